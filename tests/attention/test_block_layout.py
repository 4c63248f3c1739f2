"""Block layouts: static by content, checked against their calls, and the patterns of the papers."""

from collections.abc import Callable

import jax
import numpy as np
import pytest

from ulysses_jax.attention.block_layout import BlockLayout, bigbird, fixed, longformer


def _drawn(layout: BlockLayout, head: int = 0) -> list[str]:
    return ["".join(".x"[cell] for cell in row) for row in layout.attended[head].astype(int)]


def test_layouts_of_equal_content_are_one_key_of_a_compile_cache() -> None:
    table = np.eye(3, dtype=bool)[None]
    layout = BlockLayout(4, 2, table)
    assert layout == BlockLayout(4, 2, table.copy())
    assert hash(layout) == hash(BlockLayout(4, 2, table.copy()))
    for other in (BlockLayout(2, 4, table), BlockLayout(4, 2, ~table), "layout"):
        assert layout != other
    # Same bytes, another shape.
    wide = np.ones((1, 2, 3), bool)
    assert BlockLayout(4, 2, wide) != BlockLayout(4, 2, wide.reshape(1, 3, 2))


def test_a_layout_does_not_change_with_the_array_it_was_made_from() -> None:
    table = np.ones((1, 2, 2), bool)
    layout = BlockLayout(4, 4, table)
    table[:] = False
    assert layout.attended.all()
    with pytest.raises(ValueError, match="read-only"):
        layout.attended[0, 0, 0] = False


@pytest.mark.parametrize(
    ("q_block", "kv_block", "table", "message"),
    [
        (0, 4, np.ones((1, 2, 2), bool), "q_block is 0: use an integer of at least 1"),
        (4, 2.0, np.ones((1, 2, 2), bool), "kv_block is 2.0"),
        (4, 4, np.ones((2, 2), bool), r"attended is bool\[2, 2\]"),
        (4, 4, np.ones((1, 2, 2)), r"attended is float64\[1, 2, 2\]"),
        (4, 4, np.ones((1, 0, 2), bool), r"bool\[1, 0, 2\]"),
    ],
)
def test_a_layout_that_is_none_is_refused(
    q_block: int, kv_block: int, table: np.ndarray, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        BlockLayout(q_block, kv_block, table)


def test_a_call_that_does_not_fit_is_refused() -> None:
    layout = BlockLayout(4, 2, np.ones((6, 2, 3), bool))
    layout.check(5, 6, 3, 3)
    layout.check(8, 5, 6, 0)
    for q_len, kv_len, heads, first, message in (
        (9, 6, 2, 0, "2 q blocks of 4, but a length of 9 needs 3"),
        (4, 6, 2, 0, "2 q blocks of 4, but a length of 4 needs 1"),
        (5, 7, 2, 0, "3 kv blocks of 2, but a length of 7 needs 4"),
        (5, 6, 4, 3, "tables for 6 heads, but this call reaches head 6"),
        (5, 6, 7, np.int32(0), "tables for 6 heads, but this call reaches head 6"),
    ):
        with pytest.raises(ValueError, match=message):
            layout.check(q_len, kv_len, heads, first)
    BlockLayout(4, 2, np.ones((1, 2, 3), bool)).check(5, 6, 4, 3)


def test_heads_take_their_tables_by_global_index() -> None:
    table = np.random.default_rng(0).random((7, 3, 5)) < 0.5
    layout = BlockLayout(4, 4, table)
    np.testing.assert_array_equal(layout.tables(3, 2), table[2:5])
    traced = jax.jit(lambda first: layout.tables(3, first))(4)
    np.testing.assert_array_equal(traced, table[4:])
    assert BlockLayout(4, 4, table[:1]).tables(3, 2).shape == (1, 3, 5)


def test_fixed_pattern_has_strides_and_their_summaries() -> None:
    layout = fixed(7 * 5 - 2, 5, local_blocks=3, heads=3, patterns=2)
    assert (layout.q_block, layout.kv_block, layout.attended.shape) == (5, 5, (3, 7, 7))
    assert _drawn(layout) == [
        "xxx..xx",
        "xxx..xx",
        "xxx..xx",
        "..xxxxx",
        "..xxxxx",
        "..xxxxx",
        "..x..xx",
    ]
    assert _drawn(layout, 1) == [
        "xxx.x.x",
        "xxx.x.x",
        "xxx.x.x",
        ".x.xxxx",
        ".x.xxxx",
        ".x.xxxx",
        ".x..x.x",
    ]
    assert _drawn(layout, 2) == _drawn(layout, 0)
    assert _drawn(fixed(3, 2, local_blocks=4, global_blocks=3)) == ["xx", "xx"]


def test_longformer_has_a_window_and_global_blocks() -> None:
    assert _drawn(longformer(11, 2, window_blocks=1, global_blocks=(3,))) == [
        "xx.x..",
        "xxxx..",
        ".xxx..",
        "xxxxxx",
        "...xxx",
        "...xxx",
    ]
    assert _drawn(longformer(3, 1, window_blocks=0, global_blocks=())) == ["x..", ".x.", "..x"]


def test_bigbird_adds_random_blocks_of_each_head_to_longformer() -> None:
    layout = bigbird(36, 3, window_blocks=1, global_blocks=2, random_blocks=3, heads=2, seed=5)
    base = longformer(36, 3, window_blocks=1, global_blocks=(0, 1)).attended
    assert (layout.attended | ~base).all()
    added = (layout.attended & ~base).sum(axis=2)
    assert (added == np.minimum(3, 12 - base.sum(axis=2))).all()
    assert (layout.attended[0] != layout.attended[1]).any()
    same = bigbird(36, 3, window_blocks=1, global_blocks=2, random_blocks=3, heads=2, seed=5)
    assert layout == same
    assert layout != bigbird(36, 3, global_blocks=2, random_blocks=3, heads=2, seed=6)
    causal = bigbird(36, 3, global_blocks=2, random_blocks=3, heads=2, causal=True, seed=5)
    past = np.tri(12, k=-1, dtype=bool)
    assert not (causal.attended & ~base & ~past).any()
    assert ((causal.attended & ~base).sum(axis=2) == np.minimum(3, (past & ~base).sum(2))).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fixed(8, 0), "block is 0: use an integer of at least 1"),
        (lambda: fixed(8, 2, local_blocks=3, global_blocks=2, patterns=2), "need 4 blocks, but"),
        (lambda: longformer(8, 2, window_blocks=-1), "window_blocks is -1"),
        (
            lambda: longformer(8, 2, global_blocks=(4,)),
            "global block 4 is none of the 4: use 0 to 3",
        ),
        (lambda: bigbird(8, 2, global_blocks=5), "global_blocks is 5: use 0 to 4"),
        (lambda: bigbird(8, 2, random_blocks=-1), "random_blocks is -1"),
        (lambda: bigbird(8, 2, heads=0), "heads is 0"),
    ],
)
def test_a_pattern_out_of_range_is_refused(make: Callable[[], BlockLayout], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
