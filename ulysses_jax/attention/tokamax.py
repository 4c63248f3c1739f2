"""tokamax's kernels for NVIDIA GPUs: Mosaic on Hopper, Triton on all from Ampere on.

Both take one range of keys a query in the forward pass. In the backward pass only Mosaic does:
Triton's would build an S x S mask there (tokamax 0.0.12), so it is given causality alone.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from absl import flags
from jax import lax
from jaxtyping import Array, Float, Float32
from tokamax._src import config
from tokamax._src.ops.attention import base, pallas_mosaic_gpu, pallas_triton

from ulysses_jax.attention.fused import (
    NOTHING_ATTENDED,
    Gradients,
    Outputs,
    fused_attention,
)
from ulysses_jax.attention.limits import (
    compute_capability,
    refuse_before_ampere,
    refuse_dtypes,
    refuse_head_dim,
    refuse_pairwise,
)
from ulysses_jax.attention.padding import pad_to_multiple
from ulysses_jax.attention.shapes import AttentionSizes, attention_sizes
from ulysses_jax.attention.spec import AttentionSpec
from ulysses_jax.attention.varying import unchecked

_NAME = "tokamax attention"
# Mosaic reads ranges by pairs of query blocks and sees keys that pad a block as real ones, so
# everything is padded to the largest pair that its tuning may choose.
_MOSAIC_MULTIPLE = 512


def attend(
    q_BShD: Float[Array, "B S h D"],
    k_BTgD: Float[Array, "B T g D"],
    v_BTgD: Float[Array, "B T g D"],
    spec: AttentionSpec,
    scale: float,
) -> tuple[Float[Array, "B S h D"], Float32[Array, "B h S"]]:
    """Softmax of `scale * q k^T` over the keys that `spec` allows, times v. O(S + T) memory.

    On Hopper, in 16 bits, takes everything that is one range of keys a query: causality, windows,
    lengths and contiguous segments. Elsewhere, and in float32, takes causality alone. Forward, the
    blocks outside the ranges are skipped; backward, those above the diagonal only.

    Returns:
        The output in the dtype of q, and the float32 log-sum-exp of the scaled scores. A query
        with nothing to attend to gives 0 and -inf, and passes no gradient on.

    Raises:
        NotImplementedError: the kernels cannot do this: a head dim that is no multiple of 8 or is
            above 128; segments without `contiguous_segments`; more than causality where Mosaic
            cannot be used; mask, bias, block layout, dropout.
        ValueError: the shapes do not fit together.
    """
    sizes = attention_sizes(q_BShD, k_BTgD, v_BTgD)
    spec.check(sizes.batch, sizes.q_len, sizes.kv_len, sizes.heads)
    refuse_before_ampere(_NAME)
    refuse_dtypes(_NAME, ("bfloat16", "float16", "float32"), q_BShD, k_BTgD, v_BTgD)
    refuse_head_dim(_NAME, sizes, multiple=8, largest=128)
    refuse_pairwise(_NAME, spec)
    if spec.recurring:
        raise NotImplementedError(
            f"{_NAME} knows one range of keys a query, but segments may recur: promise "
            "contiguous_segments=True if none does"
        )
    mosaic = _has_mosaic() and q_BShD.dtype != jnp.float32
    causal_only = spec.window is None and spec.kv_lengths is None and spec.q_segment_ids is None
    if not mosaic and not causal_only:
        raise NotImplementedError(
            f"{_NAME} with windows, lengths or segments needs a Hopper GPU and 16 bits, not "
            f"compute capability {compute_capability()} and {q_BShD.dtype}: the backward pass of "
            "its Triton kernel would build an S x S mask"
        )
    start_BS, end_BS = spec.key_ranges(sizes.batch, sizes.q_len, sizes.kv_len)
    kernel = _kernel(spec, sizes, scale, mosaic)
    masks = tuple(x for x, used in ((start_BS, kernel.starts), (end_BS, kernel.ends)) if used)
    return fused_attention(kernel, q_BShD, k_BTgD, v_BTgD, masks, start_BS >= end_BS)


def _has_mosaic() -> bool:
    capability = compute_capability()
    return capability is not None and 9.0 <= capability < 10.0


def _kernel(spec: AttentionSpec, sizes: AttentionSizes, scale: float, mosaic: bool) -> "_Kernel":
    if not mosaic:
        return _Kernel(scale, 1, spec.causal, starts=False, ends=False)
    ranged = spec.window is not None or spec.q_segment_ids is not None
    cut = spec.kv_lengths is not None or spec.kv_segment_ids is not None
    # Where causality says all about the ends, the backward kernel skips the blocks above the
    # diagonal; given ends it would not.
    causal = spec.causal and not cut and sizes.q_len <= sizes.kv_len
    padded = sizes.kv_len % _MOSAIC_MULTIPLE != 0
    ends = not causal and (spec.causal or ranged or cut or padded)
    return _Kernel(scale, _MOSAIC_MULTIPLE, causal, starts=ranged, ends=ends)


@dataclass(frozen=True)
class _Kernel:
    """`multiple` divides the padded sequences: 1 for Triton, which pads by itself."""

    scale: float
    multiple: int
    causal: bool
    starts: bool
    ends: bool

    def forward(
        self, q_BShD: Array, k_BTgD: Array, v_BTgD: Array, masks: tuple[Array, ...]
    ) -> Outputs:
        length = q_BShD.shape[1]
        operands = [pad_to_multiple(x, 1, self.multiple) for x in (q_BShD, k_BTgD, v_BTgD)]
        options, ranges = self._options(q_BShD), self._ranges(masks)

        def forward(q: Array, k: Array, v: Array, start: Any, end: Any) -> Any:
            mask = base.Mask(k_start=start, k_end=end, is_causal=self.causal)
            return self._op()(q, k, v, mask=mask, **options, return_residuals=True)

        with _available():
            out_BShD, (highest_BhS, total_BhS) = unchecked(forward, *operands, *ranges)
        lse_BhS = highest_BhS + jnp.log(total_BhS)
        return out_BShD[:, :length], lse_BhS[:, :, :length]

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
        q_len, kv_len = q_BShD.shape[1], k_BTgD.shape[1]
        options, ranges = self._options(q_BShD), self._ranges(masks)
        q_BShD, k_BTgD, v_BTgD, out_BShD, dout_BShD = (
            pad_to_multiple(x, 1, self.multiple)
            for x in (q_BShD, k_BTgD, v_BTgD, out_BShD, dout_BShD)
        )
        lse_BhS = pad_to_multiple(lse_BhS, 2, self.multiple, NOTHING_ATTENDED)
        # Weights are exp(score - highest) / total there: the log-sum-exp stands for both.
        residuals = lse_BhS, jnp.ones_like(lse_BhS)

        def backward(
            residuals: Any,
            out: Array,
            do: Array,
            q: Array,
            k: Array,
            v: Array,
            start: Any,
            end: Any,
        ) -> Any:
            mask = base.Mask(k_start=start, k_end=end, is_causal=self.causal)
            bound = self._op().bind(q, k, v, mask=mask, **options)
            named = {x: y for x, y in bound.kwargs.items() if x != "return_residuals"}
            return self._op().vjp(residuals, out, do, *bound.args, **named)

        operands = q_BShD, k_BTgD, v_BTgD, *ranges
        with _available():
            grads = unchecked(backward, residuals, out_BShD, dout_BShD, *operands)
        return grads["q"][:, :q_len], grads["k"][:, :kv_len], grads["v"][:, :kv_len]

    def _op(self) -> Any:
        if self.multiple == 1:
            return pallas_triton.PallasTritonFlashAttention()
        return pallas_mosaic_gpu.PallasMosaicGpuFlashAttention()

    def _options(self, q_BShD: Array) -> dict[str, Any]:
        # In float32, products would be rounded to TF32 otherwise.
        full = q_BShD.dtype == jnp.float32
        return {
            "logits_scale": self.scale,
            "precision": lax.Precision.HIGHEST if full else lax.Precision.DEFAULT,
        }

    def _ranges(self, masks: tuple[Array, ...]) -> tuple[Array | None, Array | None]:
        # The ranges of padded queries do not matter: a copy of the last one widens no block's.
        ranges = [pad_to_multiple(x, 1, self.multiple, None)[:, None] for x in masks]
        start = ranges.pop(0) if self.starts else None
        return start, ranges.pop(0) if self.ends else None


def _available() -> Any:
    """Lets tokamax run where it cannot ask a GPU, as when compiling for one that is elsewhere."""
    if not flags.FLAGS.is_parsed():
        # tokamax would parse the command line of this process, and fail on our arguments.
        flags.FLAGS.mark_as_parsed()
    return nullcontext() if compute_capability() else config.cross_compile(True)
