"""The attended pairs as a dense table: for the reference and for short sequences only."""

import jax.numpy as jnp
from jaxtyping import Array, Bool

from ulysses_jax.attention.key_ranges import bounded, lengths_within
from ulysses_jax.attention.shapes import AttentionSizes
from ulysses_jax.attention.spec import AttentionSpec


def attended_pairs(spec: AttentionSpec, sizes: AttentionSizes) -> Bool[Array, "B h S T"]:
    """Whether a query of a row and head attends to a key; dimensions B and h may be 1.

    Straight from the meaning of `spec`, in O(S * T) memory and more.

    Raises:
        ValueError: the spec does not fit these sizes (see `AttentionSpec.check`).
    """
    batch, q_len, kv_len, heads = sizes.batch, sizes.q_len, sizes.kv_len, sizes.heads
    spec.check(batch, q_len, kv_len, heads)
    query_S1 = jnp.arange(q_len)[:, None]
    key_T = jnp.arange(kv_len)
    pairs_BhST = jnp.ones((1, 1, q_len, kv_len), bool)
    if spec.causal:
        pairs_BhST &= key_T <= query_S1
    left, right = spec.window or (None, None)
    if left is not None:
        pairs_BhST &= query_S1 - key_T <= bounded(left, q_len + kv_len)
    if right is not None:
        pairs_BhST &= key_T - query_S1 <= bounded(right, q_len + kv_len)
    segments = spec.segment_ids(batch, q_len, kv_len)
    if segments is not None:
        q_ids_BS, kv_ids_BT = segments
        pairs_BhST &= (q_ids_BS[:, :, None] == kv_ids_BT[:, None, :])[:, None]
    if spec.kv_lengths is not None:
        lengths_B = lengths_within(spec.kv_lengths, sizes.kv_len)
        pairs_BhST &= key_T < lengths_B[:, None, None, None]
    if spec.block_layout is not None:
        layout = spec.block_layout
        tables_hnm = jnp.asarray(layout.tables(heads, spec.first_head))
        pairs_BhST &= tables_hnm[:, query_S1 // layout.q_block, key_T // layout.kv_block]
    if spec.mask is not None:
        pairs_BhST &= spec.mask
    return pairs_BhST
