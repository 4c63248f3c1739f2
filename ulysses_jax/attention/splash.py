"""Splash attention, the block-sparse TPU kernel of `jax.experimental.pallas.ops.tpu`."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as mask_lib
from jaxtyping import Array, Bool, Float, Float32, Int32

from ulysses_jax.attention.fused import (
    NOTHING_ATTENDED,
    Gradients,
    Outputs,
    fused_attention,
)
from ulysses_jax.attention.key_ranges import lengths_within
from ulysses_jax.attention.limits import (
    refuse_dtypes,
    refuse_head_dim,
    refuse_pairwise,
    static_window,
)
from ulysses_jax.attention.padding import pad_to_multiple
from ulysses_jax.attention.shapes import AttentionSizes, attention_sizes
from ulysses_jax.attention.spec import AttentionSpec
from ulysses_jax.attention.varying import unchecked

_NAME = "splash attention"
# A TPU register is 128 lanes wide; the kernel is fast with blocks of at least 512.
_LANES = 128
_LARGEST_BLOCK = 512


def attend(
    q_BShD: Float[Array, "B S h D"],
    k_BTgD: Float[Array, "B T g D"],
    v_BTgD: Float[Array, "B T g D"],
    spec: AttentionSpec,
    scale: float,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B S h D"], Float32[Array, "B h S"]]:
    """Softmax of `scale * q k^T` over the keys that `spec` allows, times v. O(S + T) memory.

    Takes causality, windows, key lengths and segments, which may recur. Blocks that causality and
    the window rule out are skipped; those of other segments, or past the lengths, are not. The
    scale is multiplied into q, in q's dtype.

    Args:
        q_BShD, k_BTgD, v_BTgD: h a multiple of g; padded here to the blocks of the kernel.
        spec: which keys each query attends to.
        scale: factor of the scores, usually D^(-1/2).
        interpret: runs the kernel's operations one by one on any backend, for tests.

    Returns:
        The output in the dtype of q, and the float32 log-sum-exp of the scaled scores. A query
        with nothing to attend to gives 0 and -inf, and passes no gradient on.

    Raises:
        NotImplementedError: the kernel cannot do this: a dtype other than float32 and bfloat16; a
            head dim other than 64 or a multiple of 128; a traced window; mask, bias, block layout,
            dropout.
        ValueError: the shapes do not fit together.
    """
    sizes = attention_sizes(q_BShD, k_BTgD, v_BTgD)
    spec.check(sizes.batch, sizes.q_len, sizes.kv_len, sizes.heads)
    if not interpret:
        refuse_dtypes(_NAME, ("bfloat16", "float32"), q_BShD, k_BTgD, v_BTgD)
        if sizes.head_dim != _LANES // 2:
            refuse_head_dim(_NAME, sizes, multiple=_LANES, largest=2 * _LANES)
    refuse_pairwise(_NAME, spec)
    left, right = static_window(_NAME, spec)
    kernel = _Kernel(scale, sizes.q_len, sizes.kv_len, left, right, interpret)
    masks = _ids(spec, sizes, kernel)
    return fused_attention(kernel, q_BShD, k_BTgD, v_BTgD, masks, empty_BS=None)


@dataclass(frozen=True)
class _Kernel:
    """Sizes are those before padding; `left` and `right` limit the band of attended pairs."""

    scale: float
    q_len: int
    kv_len: int
    left: int | None
    right: int | None
    interpret: bool

    @property
    def q_block(self) -> int:
        return _block(self.q_len)

    @property
    def kv_block(self) -> int:
        return _block(self.kv_len)

    def forward(
        self, q_BShD: Array, k_BTgD: Array, v_BTgD: Array, masks: tuple[Array, ...]
    ) -> Outputs:
        splash = self._splash(q_BShD.shape[2])
        operands = self._scaled(q_BShD), self._keys(k_BTgD), self._keys(v_BTgD)
        out_BhSD, (lse_BhS,) = unchecked(jax.vmap(splash), *operands, _segments(masks))
        out_BShD = out_BhSD.swapaxes(1, 2)[:, : self.q_len]
        return out_BShD, lse_BhS[:, :, : self.q_len]

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
        splash = self._splash(q_BShD.shape[2])
        lse_BhS = pad_to_multiple(lse_BhS, 2, self.q_block, NOTHING_ATTENDED)

        def one_row(
            q: Array, k: Array, v: Array, ids: Any, out: Array, lse: Array, do: Array
        ) -> Any:
            infos = splash.dq_mask_info, splash.dkv_mask_info
            return kernels._splash_attention_bwd(
                False,
                kernels.DEFAULT_MASK_VALUE,
                False,
                splash.kwargs["block_sizes"],
                None,
                splash.kwargs["mask_function"],
                None,
                self.interpret,
                (q, k, v, ids, None, out, lse, *infos),
                do,
            )[3:6]

        dq_BhSD, dk_BgTD, dv_BgTD = unchecked(
            jax.vmap(one_row),
            self._scaled(q_BShD),
            self._keys(k_BTgD),
            self._keys(v_BTgD),
            _segments(masks),
            self._queries(out_BShD),
            lse_BhS,
            self._queries(dout_BShD),
        )
        dq_BShD = (self.scale * dq_BhSD.swapaxes(1, 2).astype(jnp.float32)).astype(q_BShD.dtype)
        dk_BTgD, dv_BTgD = dk_BgTD.swapaxes(1, 2), dv_BgTD.swapaxes(1, 2)
        return dq_BShD[:, : self.q_len], dk_BTgD[:, : self.kv_len], dv_BTgD[:, : self.kv_len]

    def _queries(self, x_BShD: Array) -> Float[Array, "B h S D"]:
        return pad_to_multiple(x_BShD, 1, self.q_block).swapaxes(1, 2)

    def _keys(self, x_BTgD: Array) -> Float[Array, "B g T D"]:
        return pad_to_multiple(x_BTgD, 1, self.kv_block).swapaxes(1, 2)

    def _scaled(self, q_BShD: Array) -> Float[Array, "B h S D"]:
        q_BhSD = self._queries(q_BShD)
        return (self.scale * q_BhSD.astype(jnp.float32)).astype(q_BShD.dtype)

    def _splash(self, heads: int) -> kernels.SplashAttentionKernel:
        q_block, kv_block = self.q_block, self.kv_block
        shape = self.q_len + -self.q_len % q_block, self.kv_len + -self.kv_len % kv_block
        no_limit = sum(shape)
        left = no_limit if self.left is None else min(self.left, no_limit)
        right = no_limit if self.right is None else min(self.right, no_limit)
        band = _Band(shape, (left, right), offset=0)
        blocks = kernels.BlockSizes(
            block_q=q_block,
            block_kv=kv_block,
            block_q_dkv=q_block,
            block_kv_dkv=kv_block,
            block_q_dq=q_block,
            block_kv_dq=kv_block,
        )
        return kernels.make_splash_mha(
            mask_lib.MultiHeadMask([band] * heads),
            block_sizes=blocks,
            head_shards=1,
            q_seq_shards=1,
            save_residuals=True,
            interpret=self.interpret,
        )


class _Band(mask_lib.LocalMask):
    """A window that says of a block whether any and whether all of its pairs are in it.

    The kernel computes the mask itself, and asks for blocks at trace time only to sort them. Built
    pair by pair, as the base class does, they would take minutes for 131072 tokens.
    """

    def __getitem__(self, index: tuple[slice, slice]) -> Bool[np.ndarray, "1 2"]:
        rows, columns = index
        left, right = (sum(self.shape) if side is None else side for side in self.window_size)
        # Of column - row, over the block.
        least, greatest = columns.start - (rows.stop - 1), columns.stop - 1 - rows.start
        some = least <= right and greatest >= -left
        every = least >= -left and greatest <= right
        return np.array([[some, every]])


def _ids(
    spec: AttentionSpec, sizes: AttentionSizes, kernel: _Kernel
) -> tuple[Int32[Array, "B S"], Int32[Array, "B T"]] | tuple[()]:
    """Segment ids that also keep padded keys, and those past the lengths, from every query."""
    given = spec.segment_ids(sizes.batch, sizes.q_len, sizes.kv_len)
    padded = sizes.kv_len % kernel.kv_block != 0
    beyond = kernel.right is None or sizes.q_len + kernel.right > sizes.kv_len
    if given is None and spec.kv_lengths is None and not (padded and beyond):
        return ()
    q_ids_BS = jnp.zeros((sizes.batch, sizes.q_len), jnp.int32)
    kv_ids_BT = jnp.zeros((sizes.batch, sizes.kv_len), jnp.int32)
    if given is not None:
        q_ids_BS, kv_ids_BT = (jnp.asarray(x).astype(jnp.int32) for x in given)
    nobody_B1 = jnp.min(q_ids_BS, axis=1, keepdims=True) - 1
    if spec.kv_lengths is not None:
        lengths_B = lengths_within(spec.kv_lengths, sizes.kv_len)
        seen_BT = jnp.arange(sizes.kv_len) < lengths_B[:, None]
        kv_ids_BT = jnp.where(seen_BT, kv_ids_BT, nobody_B1)
    kv_ids_BT = pad_to_multiple(kv_ids_BT - nobody_B1, 1, kernel.kv_block) + nobody_B1
    return pad_to_multiple(q_ids_BS, 1, kernel.q_block), kv_ids_BT


def _segments(masks: tuple[Array, ...]) -> kernels.SegmentIds | None:
    return kernels.SegmentIds(*masks) if masks else None


def _block(length: int) -> int:
    """The block for a sequence: as large as is useful, and a multiple of the lanes."""
    return min(_LARGEST_BLOCK, length + -length % _LANES)
