"""JAX's own Triton kernel for NVIDIA GPUs: packed segments by comparing their ids.

`jax.experimental.pallas.ops.gpu.attention`. It visits every block that causality allows, those of
other segments too, so packing saves it no work; but it builds no S x S mask, in either direction.
"""

import math
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import attention as kernels
from jaxtyping import Array, Float, Float32

from ulysses_jax.attention.fused import Gradients, Outputs, fused_attention
from ulysses_jax.attention.limits import (
    refuse_before_ampere,
    refuse_dtypes,
    refuse_head_dim,
    refuse_pairwise,
)
from ulysses_jax.attention.padding import pad_to_multiple
from ulysses_jax.attention.shapes import attention_sizes
from ulysses_jax.attention.spec import AttentionSpec
from ulysses_jax.attention.varying import unchecked

_NAME = "Pallas GPU attention"
# Of 16-bit elements: more does not fit the shared memory of an A100 with these blocks.
_LARGEST_HEAD_DIM = 128
_BLOCK = 128
_BLOCKS = kernels.BlockSizes(
    block_q=_BLOCK,
    block_k=_BLOCK,
    block_q_dkv=32,
    block_kv_dkv=32,
    block_q_dq=32,
    block_kv_dq=32,
)


def attend(
    q_BShD: Float[Array, "B S h D"],
    k_BTgD: Float[Array, "B T g D"],
    v_BTgD: Float[Array, "B T g D"],
    spec: AttentionSpec,
    scale: float,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B S h D"], Float32[Array, "B h S"]]:
    """Softmax of `scale * q k^T` over the keys that `spec` allows, times v. O(S) memory.

    Takes causality and the segments of self-attention, which may recur. Sequences are padded to a
    multiple of 128 with a segment of their own (the kernel is wrong otherwise, without an error).

    Args:
        q_BShD, k_BTgD, v_BTgD: as many keys as queries, as many key/value heads as query heads.
        spec: which keys each query attends to.
        scale: factor of the scores, usually D^(-1/2).
        interpret: runs the kernel's operations one by one on any backend, for tests.

    Returns:
        The output in the dtype of q, and the float32 log-sum-exp of the scaled scores.

    Raises:
        NotImplementedError: the kernel cannot do this: a dtype of more than 16 bits (its products
            are TF32), a head dim above 128, shared key/value heads, S != T, key lengths, a window,
            separate kv_segment_ids, mask, bias, block layout, dropout.
        ValueError: the shapes do not fit together.
    """
    sizes = attention_sizes(q_BShD, k_BTgD, v_BTgD)
    spec.check(sizes.batch, sizes.q_len, sizes.kv_len, sizes.heads)
    if not interpret:
        refuse_before_ampere(_NAME)
        refuse_dtypes(_NAME, ("bfloat16", "float16"), q_BShD, k_BTgD, v_BTgD)
    refuse_head_dim(_NAME, sizes, multiple=8, largest=_LARGEST_HEAD_DIM)
    refuse_pairwise(_NAME, spec)
    if sizes.q_len != sizes.kv_len:
        raise NotImplementedError(
            f"{_NAME} needs as many queries as keys, not {sizes.q_len} and {sizes.kv_len}"
        )
    if sizes.heads != sizes.kv_heads:
        raise NotImplementedError(
            f"{_NAME} needs a key/value head for each query head, not {sizes.kv_heads} for "
            f"{sizes.heads}"
        )
    for name in ("kv_lengths", "window", "kv_segment_ids"):
        if getattr(spec, name) is not None:
            raise NotImplementedError(
                f"{_NAME} cannot apply AttentionSpec.{name}: it knows causality and one segment "
                "id for each position only"
            )
    ids_BS = spec.q_segment_ids
    if ids_BS is None and sizes.q_len % _BLOCK:
        ids_BS = jnp.zeros((sizes.batch, sizes.q_len), jnp.int32)
    masks = () if ids_BS is None else (jnp.asarray(ids_BS).astype(jnp.int32),)
    kernel = _Kernel(scale, spec.causal, interpret)
    return fused_attention(kernel, q_BShD, k_BTgD, v_BTgD, masks, empty_BS=None)


@dataclass(frozen=True)
class _Kernel:
    scale: float
    causal: bool
    interpret: bool

    def forward(
        self, q_BShD: Array, k_BShD: Array, v_BShD: Array, masks: tuple[Array, ...]
    ) -> Outputs:
        length = q_BShD.shape[1]
        forward = partial(
            kernels.mha,
            sm_scale=self.scale,
            causal=self.causal,
            block_sizes=_BLOCKS,
            interpret=self.interpret,
            return_residuals=True,
        )
        operands = (pad_to_multiple(x, 1, _BLOCK) for x in (q_BShD, k_BShD, v_BShD))
        out_BShD, lse2_BhS = unchecked(forward, *operands, _padded_ids(masks))
        # The kernel's exponentials are of base 2.
        return out_BShD[:, :length], math.log(2) * lse2_BhS[:, :, :length]

    def backward(
        self,
        q_BShD: Array,
        k_BShD: Array,
        v_BShD: Array,
        masks: tuple[Array, ...],
        out_BShD: Array,
        lse_BhS: Array,
        dout_BShD: Array,
    ) -> Gradients:
        length = q_BShD.shape[1]
        # Padded queries have dout = 0, so that the weights they get add nothing.
        q_BShD, k_BShD, v_BShD, out_BShD, dout_BShD = (
            pad_to_multiple(x, 1, _BLOCK) for x in (q_BShD, k_BShD, v_BShD, out_BShD, dout_BShD)
        )
        lse2_BhS = pad_to_multiple(lse_BhS / math.log(2), 2, _BLOCK)
        residuals = (q_BShD, k_BShD, v_BShD, _padded_ids(masks), out_BShD, lse2_BhS)
        backward = partial(
            kernels._mha_backward,
            self.scale,
            self.causal,
            _BLOCKS,
            "triton",
            None,  # warps, chosen by the kernel
            2,  # stages
            None,  # grid, chosen by the kernel
            self.interpret,
            False,  # debug
            False,  # return residuals
        )
        gradients = unchecked(backward, residuals, dout_BShD)[:3]
        dq_BShD, dk_BShD, dv_BShD = (x[:, :length] for x in gradients)
        return dq_BShD, dk_BShD, dv_BShD


def _padded_ids(masks: tuple[Array, ...]) -> Array | None:
    """The segment ids, with an id for the padding that no position has."""
    if not masks:
        return None
    (ids_BS,) = masks
    own_B1 = jnp.max(ids_BS, axis=1, keepdims=True) + 1
    padding = -ids_BS.shape[1] % _BLOCK
    own_Bp = jnp.broadcast_to(own_B1, (ids_BS.shape[0], padding))
    return jnp.concatenate([ids_BS, own_Bp], axis=1)
