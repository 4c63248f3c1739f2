"""NVIDIA's fused attention, by way of the cuDNN primitives that `jax.nn` keeps.

`jax.nn.dot_product_attention(implementation="cudnn")` itself rounds the log-sum-exp to bfloat16,
drops its gradient in silence and hides its residuals from remat policies, so its two kernels are
called one by one.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as kernels
from jaxtyping import Array, Float, Float32

from ulysses_jax.attention.fused import Gradients, Outputs, fused_attention
from ulysses_jax.attention.key_ranges import lengths_within
from ulysses_jax.attention.limits import (
    compute_capability,
    refuse_before_ampere,
    refuse_dtypes,
    refuse_head_dim,
    refuse_pairwise,
    static_window,
)
from ulysses_jax.attention.shapes import AttentionSizes, attention_sizes
from ulysses_jax.attention.spec import AttentionSpec

_NAME = "cuDNN attention"
_HOPPER = 9.0


def attend(
    q_BShD: Float[Array, "B S h D"],
    k_BTgD: Float[Array, "B T g D"],
    v_BTgD: Float[Array, "B T g D"],
    spec: AttentionSpec,
    scale: float,
) -> tuple[Float[Array, "B S h D"], Float32[Array, "B h S"]]:
    """Softmax of `scale * q k^T` over the keys that `spec` allows, times v. O(S + T) memory.

    Takes causality, a left window where nothing after the query is seen, and key lengths.

    Returns:
        The output in the dtype of q, and the float32 log-sum-exp of the scaled scores. A query
        with nothing to attend to gives 0 and -inf, and passes no gradient on.

    Raises:
        NotImplementedError: cuDNN is missing or cannot do this: a dtype of more than 16 bits; a
            head dim that is no multiple of 8, or above 128 (256 on Hopper and later); segments; a
            window to the right, a traced one, or one with key lengths; causality where S != T;
            mask, bias, block layout, dropout.
        ValueError: the shapes do not fit together.
    """
    sizes = attention_sizes(q_BShD, k_BTgD, v_BTgD)
    spec.check(sizes.batch, sizes.q_len, sizes.kv_len, sizes.heads)
    refuse_before_ampere(_NAME)
    refuse_dtypes(_NAME, ("bfloat16", "float16"), q_BShD, k_BTgD, v_BTgD)
    hopper = (compute_capability() or 0.0) >= _HOPPER
    refuse_head_dim(_NAME, sizes, multiple=8, largest=256 if hopper else 128)
    kernel = _kernel(spec, sizes, scale)
    if kernels.cuda_versions is None:
        raise NotImplementedError(
            f"{_NAME} needs JAX with NVIDIA's libraries: pip install 'ulysses_jax[cuda12]'"
        )
    lengths_B = jnp.full(sizes.batch, sizes.kv_len, jnp.int32)
    if spec.kv_lengths is not None:
        lengths_B = lengths_within(spec.kv_lengths, sizes.kv_len)
    empty_BS = jnp.broadcast_to((lengths_B <= 0)[:, None], (sizes.batch, sizes.q_len))
    # cuDNN is never given an empty row of keys: it is masked here.
    masks = (jnp.maximum(lengths_B, 1),)
    return fused_attention(kernel, q_BShD, k_BTgD, v_BTgD, masks, empty_BS)


@dataclass(frozen=True)
class _Kernel:
    """`window` counts the query itself, as cuDNN does; None is no limit."""

    scale: float
    mask: kernels.MaskType
    window: int | None

    def forward(
        self, q_BShD: Array, k_BTgD: Array, v_BTgD: Array, masks: tuple[Array, ...]
    ) -> Outputs:
        q_lengths_B, kv_lengths_B = self._lengths(q_BShD, masks)
        return kernels.dot_product_attention(
            q_BShD,
            k_BTgD,
            v_BTgD,
            q_seqlen=q_lengths_B,
            kv_seqlen=kv_lengths_B,
            scale=self.scale,
            mask_type=self.mask,
            sliding_window_length=self.window,
            return_residual=True,
        )

    def backward(
        self,
        q_BShD: Array,
        k_BTgD: Array,
        v_BTgD: Array,
        masks: tuple[Array, ...],
        out_BShD: Array,
        lse_BhS: Array,
        dout_BShD: Array,
    ) -> Gradients:
        unused = jnp.zeros(0, q_BShD.dtype)
        q_lengths_B, kv_lengths_B = self._lengths(q_BShD, masks)
        dq_BShD, dk_BTgD, dv_BTgD = kernels._dot_product_attention_bwd_p_wrapper.bind(
            q_BShD,
            k_BTgD,
            v_BTgD,
            unused,  # bias
            unused if q_lengths_B is None else q_lengths_B,
            unused if kv_lengths_B is None else kv_lengths_B,
            *(unused,) * 4,  # offsets of packed segments, page tables
            lse_BhS,
            out_BShD,
            dout_BShD,
            scale=self.scale,
            seed=0,
            dropout_rate=0.0,
            variadic_args=(False, False),  # no bias and no gradient of it
            mask_type=self.mask,
            layout=kernels.AttentionLayout.BTNH.value,
            sliding_window_length=self.window,
        )
        if kv_lengths_B is not None:
            # What cuDNN writes for keys past the length is not specified.
            seen_BT = jnp.arange(k_BTgD.shape[1]) < kv_lengths_B[:, None]
            dk_BTgD = jnp.where(seen_BT[:, :, None, None], dk_BTgD, 0)
            dv_BTgD = jnp.where(seen_BT[:, :, None, None], dv_BTgD, 0)
        return dq_BShD, dk_BTgD, dv_BTgD

    def _lengths(
        self, q_BShD: Array, masks: tuple[Array, ...]
    ) -> tuple[Array, Array] | tuple[None, None]:
        if not kernels.has_padding(self.mask):
            return None, None
        (kv_lengths_B,) = masks
        return jnp.full_like(kv_lengths_B, q_BShD.shape[1]), kv_lengths_B


def _kernel(spec: AttentionSpec, sizes: AttentionSizes, scale: float) -> _Kernel:
    refuse_pairwise(_NAME, spec)
    if spec.q_segment_ids is not None:
        raise NotImplementedError(
            f"{_NAME} cannot keep segments apart: its packed layout needs Hopper and a number of "
            "segments known at compile time, and makes the log-sum-exp that many times larger"
        )
    left, right = static_window(_NAME, spec)
    if left is not None and left >= sizes.q_len - 1:
        left = None  # reaches the first key from every query
    if right not in (None, 0):
        raise NotImplementedError(
            f"{_NAME} has no window to the right of the query, such as {right}"
        )
    if right is None and left is not None:
        raise NotImplementedError(
            f"{_NAME} applies a left window, such as {left}, only where no later key is seen: "
            "set causal=True, or a right window of 0"
        )
    causal = right == 0
    if causal and sizes.q_len != sizes.kv_len:
        raise NotImplementedError(
            f"{_NAME} is causal here for as many queries as keys only, not {sizes.q_len} and "
            f"{sizes.kv_len}"
        )
    if left is not None and spec.kv_lengths is not None:
        raise NotImplementedError(f"{_NAME} takes a window or key lengths, not both")
    if spec.kv_lengths is None:
        mask = kernels.MaskType.CAUSAL if causal else kernels.MaskType.NO_MASK
    else:
        mask = kernels.MaskType.PADDING_CAUSAL if causal else kernels.MaskType.PADDING
    return _Kernel(scale, mask, None if left is None else left + 1)
