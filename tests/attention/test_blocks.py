"""How a call is cut into units and blocks, and put together again."""

import jax.numpy as jnp
import numpy as np
import pytest

from ulysses_jax.attention.blocks import BlockSizes, Cut
from ulysses_jax.attention.shapes import AttentionSizes

SIZES = AttentionSizes(batch=2, q_len=7, kv_len=5, heads=6, kv_heads=2, head_dim=3)
WHOLE = Cut(SIZES, BlockSizes(4, 2, rows=2, kv_heads=2))
SPLIT = Cut(SIZES, BlockSizes(4, 2))


def _numbers(*shape: int) -> np.ndarray:
    return np.arange(1, np.prod(shape) + 1, dtype=np.int32).reshape(shape)


def test_columns_of_heads_that_share_keys_lie_together() -> None:
    x = _numbers(2, 7, 6, 3)
    blocks = SPLIT.queries(jnp.asarray(x), SPLIT.place(jnp.int32(3)))
    assert blocks.shape == (2, 1, 1, 12, 3)
    np.testing.assert_array_equal(blocks[0, 0, 0, 4:8], x[1, :4, 4])
    np.testing.assert_array_equal(blocks[1, 0, 0, 4:7], x[1, 4:, 4])
    assert not blocks[1, 0, 0, 7].any()


@pytest.mark.parametrize("cut", [WHOLE, SPLIT], ids=["one unit", "four units"])
def test_what_all_units_put_back_is_what_they_were_cut_from(cut: Cut) -> None:
    assert cut.units == (1 if cut is WHOLE else 4)
    queries, keys, statistics = _numbers(2, 7, 6, 3), _numbers(2, 5, 2, 3), _numbers(2, 6, 7)
    back = [jnp.zeros_like(x) for x in (queries, keys, statistics)]
    for number in range(cut.units):
        place = cut.place(jnp.int32(number))
        back = [
            cut.put_queries(back[0], cut.queries(jnp.asarray(queries), place), place),
            cut.put_keys(back[1], cut.keys(jnp.asarray(keys), place), place),
            cut.put_statistics(back[2], cut.statistics(jnp.asarray(statistics), place, 0), place),
        ]
    for x, y in zip(back, (queries, keys, statistics), strict=True):
        np.testing.assert_array_equal(x, y)
