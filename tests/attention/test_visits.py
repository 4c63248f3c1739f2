"""A query block visits the key blocks that hold a pair for it, and masks only ragged ones.

Every visit is compared with a dense table of the pairs, block by block.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ulysses_jax.attention.block_layout import BlockLayout
from ulysses_jax.attention.blocks import BlockSizes, Cut
from ulysses_jax.attention.pairs import attended_pairs
from ulysses_jax.attention.shapes import AttentionSizes
from ulysses_jax.attention.spec import AttentionSpec
from ulysses_jax.attention.tiles import Fixed, Rules, pad_rules, unit_at

SIZES = AttentionSizes(batch=2, q_len=23, kv_len=23, heads=4, kv_heads=2, head_dim=8)
BLOCKS = BlockSizes(4, 3)
SORTED = np.stack([np.repeat([0, 1, 2], [7, 12, 4]), np.repeat([3, 5], [1, 22])]).astype(np.int32)
RECURRING = np.stack([np.resize([1, 1, 1, 1, 2, 2, 2, 2], 23), SORTED[1]]).astype(np.int32)
LAYOUT = BlockLayout(2, 3, np.random.default_rng(0).random((4, 12, 8)) < 0.5)

SPECS: dict[str, Any] = {
    "everything": {},
    "causal": {"causal": True},
    "window": {"window": (5, 2)},
    "causal window": {"causal": True, "window": (6, None)},
    "lengths": {"kv_lengths": np.array([0, 11])},
    "documents": {"causal": True, "q_segment_ids": SORTED, "contiguous_segments": True},
    "documents without the promise": {"q_segment_ids": SORTED},
    "recurring segments": {"q_segment_ids": RECURRING},
    "layout": {"causal": True, "block_layout": LAYOUT},
}


@jax.jit
def _visits(spec: AttentionSpec) -> list[list[list[jax.Array]]]:
    """For each unit and query block: the counts and key blocks of its full and ragged visits."""
    lengths = SIZES.batch, SIZES.q_len, SIZES.kv_len
    cut = Cut(SIZES, BLOCKS)
    fixed = Fixed(cut, 1.0, spec.block_layout, 0.0, False)
    ids = spec.segment_ids(*lengths) if spec.recurring else None
    rules = Rules(spec.key_ranges(*lengths), ids, spec.mask, None, jnp.int32(0), jnp.int32(0))
    rules = pad_rules(rules, cut)
    numbers = jnp.arange(cut.kv_blocks)
    found = []
    for number in range(cut.units):
        unit = unit_at(fixed, rules, None, jnp.int32(number))
        for n in range(cut.q_blocks):
            visits = unit.visits(jnp.int32(n))
            blocks = jax.vmap(visits.full_block)(numbers), jax.vmap(visits.ragged_block)(numbers)
            found.append([[visits.full, visits.ragged], blocks])
    return found


@pytest.mark.parametrize("name", SPECS)
def test_the_blocks_with_pairs_are_visited_and_only_ragged_ones_masked(name: str) -> None:
    fields = SPECS[name]
    # Ids that recur, and a layout cut by ranges, are judged block by block: some may hold nothing.
    exact = name not in ("recurring segments", "layout")
    spec = AttentionSpec(**{name: _array(x) for name, x in fields.items()})
    pairs = np.asarray(attended_pairs(spec, SIZES))
    pairs = np.broadcast_to(pairs, (SIZES.batch, SIZES.heads, 23, 23))
    # Padded queries count for nothing, padded keys are attended by nobody.
    some = np.pad(pairs, ((0, 0), (0, 0), (0, 1), (0, 1)))
    every = np.pad(some[:, :, :23], ((0, 0), (0, 0), (0, 1), (0, 0)), constant_values=True)
    found = iter(_visits(spec))
    skipped = 0
    for row in range(2):
        for heads in (slice(0, 2), slice(2, 4)):
            for n in range(6):
                (full, ragged), (full_blocks, ragged_blocks) = next(found)
                at = row, heads, slice(4 * n, 4 * n + 4)
                some_m = some[at].reshape(2, 4, 8, 3).any(axis=(0, 1, 3))
                all_m = every[at].reshape(2, 4, 8, 3).all(axis=(0, 1, 3))
                full_found = sorted(np.asarray(full_blocks)[:full].tolist())
                visited = sorted([*full_found, *np.asarray(ragged_blocks)[:ragged].tolist()])
                assert full_found == np.flatnonzero(all_m).tolist(), (row, heads, n)
                if exact:
                    assert visited == np.flatnonzero(some_m).tolist(), (row, heads, n)
                else:
                    assert set(visited) >= set(np.flatnonzero(some_m)), (row, heads, n)
                    assert len(visited) == len(set(visited)), (row, heads, n)
                skipped += 8 - len(visited)
    assert (skipped > 0) == (name != "everything")


def _array(x: Any) -> Any:
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x
