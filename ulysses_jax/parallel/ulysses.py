"""Ulysses attention where the mesh axes are manual: exchange, local attention, exchange back."""

import dataclasses

from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int32, Shaped

from ulysses_jax.attention.select import LocalAttention
from ulysses_jax.attention.spec import AttentionSpec
from ulysses_jax.parallel.exchange import heads_to_seq, seq_to_heads
from ulysses_jax.parallel.heads import HeadPlan


def exchanged_attention(
    q_BsHD: Float[Array, "B s H D"],
    k_BsKD: Float[Array, "B s K D"],
    v_BsKD: Float[Array, "B s K D"],
    spec: AttentionSpec,
    *,
    local: LocalAttention,
    axis: str,
    scale: float,
) -> Float[Array, "B s H D"]:
    """Attention over the whole sequence from inside a `shard_map` region (paper, section 3.1).

    Args:
      q_BsHD, k_BsKD, v_BsKD: this device's contiguous part of the sequence, all heads.
      spec: what is attended, described over the whole sequence and all heads: its arrays are
        [B, S] and [B|1, H|1, S|1, T|1], not this device's part of them. B are the rows of this
        region: where they are split over another axis and dropout is given, `first_row` says
        which they are, as in `lax.axis_index("data") * B`.
      local: attention on one device, such as `attention_function("blockwise")`.
      axis: the manual mesh axis over which the sequence is split.
      scale: factor of the scores, usually D^(−1/2).

    Raises:
      ValueError: the axis size does not divide the heads, or the spec does not fit.

    The output is named `attn_exchanged` for remat policies. On an axis of size 1 nothing is
    exchanged, nor named.
    """
    ways = lax.axis_size(axis)
    if ways == 1:
        return local(q_BsHD, k_BsKD, v_BsKD, spec, scale)[0]
    batch, q_len, heads, _ = q_BsHD.shape
    HeadPlan.of(heads, k_BsKD.shape[2], ways)
    # Before the heads are cut: a part of too few would be taken from the wrong place.
    spec.check(batch, ways * q_len, ways * k_BsKD.shape[1], heads)
    spec = _own_heads(spec, lax.axis_index(axis), heads // ways)
    q_BShD, k_BSgD, v_BSgD = (seq_to_heads(x, axis) for x in (q_BsHD, k_BsKD, v_BsKD))
    out_BShD, _ = local(q_BShD, k_BSgD, v_BSgD, spec, scale)
    return checkpoint_name(heads_to_seq(out_BShD, axis), "attn_exchanged")


def _own_heads(spec: AttentionSpec, part: Int32[Array, ""], heads: int) -> AttentionSpec:
    """`spec` as the device that has this part of the heads, so many of them, is to see it."""

    def own(x: Shaped[Array, "#B #H #S #T"] | None) -> Shaped[Array, "..."] | None:
        if x is None or x.shape[1] == 1:
            return x
        return lax.dynamic_slice_in_dim(x, part * heads, heads, axis=1)

    counted = spec.dropout is not None or spec.block_layout is not None
    first = spec.first_head + part * heads if counted else spec.first_head
    return dataclasses.replace(spec, mask=own(spec.mask), bias=own(spec.bias), first_head=first)
