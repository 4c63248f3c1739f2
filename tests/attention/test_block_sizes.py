"""Blocks are bounded, even, and no larger than a layout pays for."""

import numpy as np
import pytest

from ulysses_jax.attention.block_layout import BlockLayout, longformer
from ulysses_jax.attention.block_sizes import (
    block_sizes,
    check_blocks,
    cut_layout,
    whole_layout_blocks,
)
from ulysses_jax.attention.blocks import BlockSizes
from ulysses_jax.attention.shapes import AttentionSizes


@pytest.mark.parametrize(
    ("batch", "q_len", "kv_len", "heads", "kv_heads", "expected"),
    [
        (1, 1, 1, 1, 1, (1, 1, 1, 1)),
        (1, 509, 7, 16, 16, (509, 7, 1, 16)),
        (1, 4096, 4096, 16, 16, (512, 512, 1, 1)),
        (1, 8194, 8192, 1, 1, (496, 512, 1, 1)),
        (1, 4096, 4096, 8, 2, (128, 512, 1, 1)),
        (6, 64, 64, 4, 4, (64, 64, 6, 4)),
        (7, 128, 128, 4, 4, (128, 128, 1, 4)),
        (2, 128, 256, 15, 15, (128, 256, 1, 5)),
    ],
)
def test_tiles_are_bounded_and_even(
    batch: int, q_len: int, kv_len: int, heads: int, kv_heads: int, expected: tuple[int, ...]
) -> None:
    assert block_sizes(AttentionSizes(batch, q_len, kv_len, heads, kv_heads, 64)) == expected


def test_small_tiles_have_a_quarter_of_the_scores() -> None:
    assert block_sizes(AttentionSizes(2, 4096, 4096, 8, 4, 64), small=True) == (128, 256, 1, 1)
    assert block_sizes(AttentionSizes(2, 64, 64, 8, 4, 64), small=True) == (64, 64, 2, 4)


def test_a_dense_layout_gets_large_blocks_and_a_scattered_one_small_ones() -> None:
    sizes = AttentionSizes(1, 2048, 2048, 8, 8, 64)
    dense = BlockLayout(64, 64, np.ones((1, 32, 32), bool))
    assert block_sizes(sizes, dense)[:2] == (512, 512)
    scattered = BlockLayout(64, 64, np.eye(32, dtype=bool)[None, ::-1] | np.eye(32, dtype=bool))
    assert max(block_sizes(sizes, scattered)[:2]) <= 128


def test_blocks_of_a_layout_above_the_limit_are_cut_where_they_divide() -> None:
    attended = np.array([[[True, False], [True, True]]])
    small = BlockLayout(64, 512, attended)
    assert cut_layout(small, 128, 1024) == small
    for q_len, rows in ((2048, 4), (1100, 3)):
        cut = cut_layout(BlockLayout(1024, 1021, attended), q_len, 2042)
        assert (cut.q_block, cut.kv_block) == (512, 1021)
        np.testing.assert_array_equal(cut.attended, np.repeat(attended, 2, axis=1)[:, :rows])


def test_layout_blocks_that_cannot_be_cut_are_refused() -> None:
    layout = BlockLayout(64, 4099, np.ones((1, 2, 2), bool))
    with pytest.raises(ValueError, match=r"4099 keys: above 1024 use one that a number from 64"):
        cut_layout(layout, 128, 8198)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (BlockSizes(0, 4), "use sizes of at least 1"),
        (BlockSizes(4, 4, 2, 2), "do not divide the 3 rows and 2 kv heads"),
        (BlockSizes(4, 4, 1, 3), "do not divide the 3 rows and 2 kv heads"),
        (BlockSizes(4, 4, 3, 1), "a unit of several rows needs all 2 kv heads"),
    ],
)
def test_blocks_that_do_not_cover_the_call_are_refused(blocks: BlockSizes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_blocks(blocks, AttentionSizes(3, 8, 8, 4, 2, 8))


def test_given_blocks_are_enlarged_to_whole_blocks_of_the_layout() -> None:
    layout = longformer(64, 16, window_blocks=3)
    assert whole_layout_blocks(BlockSizes(8, 17, 2, 2), layout) == (16, 32, 2, 2)
