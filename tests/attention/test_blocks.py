"""Blocks: their sizes, their layout, and the key blocks that a query block visits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ulysses_jax.attention.blocks import (
    BlockSizes,
    QueryReach,
    block_sizes,
    from_blocks,
    query_reach,
    to_blocks,
)
from ulysses_jax.attention.shapes import AttentionSizes
from ulysses_jax.attention.spec import AttentionSpec


@pytest.mark.parametrize(
    ("q_len", "kv_len", "heads", "expected"),
    [
        (1, 1, 1, (1, 1)),
        (509, 7, 16, (509, 7)),
        (4096, 4096, 16, (512, 512)),
        (4096, 4096, 17, (256, 256)),
        (514, 8192, 1, (272, 512)),
    ],
)
def test_blocks_are_bounded_and_even(
    q_len: int, kv_len: int, heads: int, expected: tuple[int, int]
) -> None:
    assert block_sizes(AttentionSizes(1, q_len, kv_len, heads, heads, 64)) == expected


def test_rows_of_heads_that_share_keys_lie_together() -> None:
    x = jnp.arange(2 * 7 * 6 * 3).reshape(2, 7, 6, 3)
    blocks = to_blocks(x, 2, 4)
    assert blocks.shape == (2, 2, 2, 12, 3)
    np.testing.assert_array_equal(blocks[0, 1, 1, 4:8], x[1, :4, 4])
    np.testing.assert_array_equal(blocks[1, 1, 1, 4:7], x[1, 4:, 4])
    assert not blocks[1, 1, 1, 7].any()
    np.testing.assert_array_equal(from_blocks(blocks, 7, 4), x)


def test_only_key_blocks_that_hold_an_attended_key_are_visited() -> None:
    sizes = AttentionSizes(1, 11, 11, 2, 1, 8)
    ids = jnp.array([[0] * 7 + [1] * 4])

    @jax.jit
    def lower(spec: AttentionSpec) -> QueryReach:
        return query_reach(spec.key_ranges(1, 11, 11), sizes, BlockSizes(4, 3))

    def visits(spec: AttentionSpec) -> list[tuple[int, int]]:
        reach = lower(spec)
        return list(zip(reach.first_n.tolist(), reach.stop_n.tolist(), strict=True))

    assert visits(AttentionSpec()) == [(0, 4)] * 3
    assert visits(AttentionSpec(causal=True)) == [(0, 2), (0, 3), (0, 4)]
    assert visits(AttentionSpec(causal=True, q_segment_ids=ids)) == [(0, 2), (0, 3), (2, 4)]
    assert visits(AttentionSpec(q_segment_ids=ids)) == [(0, 3), (0, 4), (2, 4)]
    nothing = visits(AttentionSpec(kv_lengths=jnp.array([0])))
    assert all(first >= stop for first, stop in nothing)
