"""Specs: key ranges against the pairs that each description means, refusals, and tracing."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

from ulysses_jax.attention.block_layout import BlockLayout
from ulysses_jax.attention.dropout import Dropout
from ulysses_jax.attention.key_ranges import KeyRanges
from ulysses_jax.attention.spec import AttentionSpec

_lower = jax.jit(AttentionSpec.key_ranges, static_argnums=(1, 2, 3))


def _pairs(spec: AttentionSpec, batch: int, q_len: int, kv_len: int) -> np.ndarray:
    start, end = (np.asarray(x)[..., None] for x in _lower(spec, batch, q_len, kv_len))
    key = np.arange(kv_len)
    return (key >= start) & (key < end)


def _hull(pairs: np.ndarray) -> np.ndarray:
    """Every key from the first to the last attended one."""
    before = np.logical_or.accumulate(pairs, axis=-1)
    after = np.logical_or.accumulate(pairs[..., ::-1], axis=-1)[..., ::-1]
    return before & after


def test_everything_is_attended_when_nothing_is_said() -> None:
    assert _pairs(AttentionSpec(), 2, 3, 5).all()


@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 5), (3, 7), (7, 3), (1, 1)])
def test_causal_counts_queries_and_keys_from_the_same_start(q_len: int, kv_len: int) -> None:
    pairs = _pairs(AttentionSpec(causal=True), 2, q_len, kv_len)
    np.testing.assert_array_equal(pairs, np.tril(np.ones((2, q_len, kv_len), bool)))


def test_lengths_cut_the_keys_of_each_row() -> None:
    spec = AttentionSpec(kv_lengths=jnp.array([0, 2, 9, -1]))
    pairs = _pairs(spec, 4, 3, 5)
    assert pairs.sum(axis=2).tolist() == [[0] * 3, [2] * 3, [5] * 3, [0] * 3]


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(("q_len", "kv_len"), [(3, 11), (11, 3)])
@pytest.mark.parametrize(("left", "right"), [(0, 0), (2, None), (None, 1), (2**31 - 1, 2**31 - 1)])
def test_a_window_holds_both_its_ends(
    q_len: int, kv_len: int, left: int | None, right: int | None, traced: bool
) -> None:
    offset = np.arange(kv_len) - np.arange(q_len)[:, None]
    expected = (offset >= -(2**40 if left is None else left)) & (
        offset <= (2**40 if right is None else right)
    )
    spec = AttentionSpec(window=(left, right))
    if traced:
        pairs = _pairs(spec, 2, q_len, kv_len)
    else:
        start, end = spec.key_ranges(2, q_len, kv_len)
        key = np.arange(kv_len)
        pairs = (key >= start[..., None]) & (key < end[..., None])
    np.testing.assert_array_equal(pairs, np.broadcast_to(expected, pairs.shape))


@pytest.mark.parametrize("side", [2**40, np.int64(2**40)])
def test_a_window_beyond_int32_is_no_limit(side: int) -> None:
    start, end = AttentionSpec(window=(side, side)).key_ranges(1, 3, 5)
    assert not start.any()
    assert (end == 5).all()


def test_conditions_given_together_must_all_hold() -> None:
    spec = AttentionSpec(True, kv_lengths=jnp.array([4, 9]), window=(2, 1))
    query, key = np.arange(7)[:, None], np.arange(7)
    both = (key <= query) & (key >= query - 2)
    expected = np.stack([both & (key < 4), both])
    np.testing.assert_array_equal(_pairs(spec, 2, 7, 7), expected)


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize(
    "ids",
    [
        [[7, 7, 2, 5, 5, 5], [1, 1, 1, 1, 1, 1], [5, 4, 3, 2, 1, 0]],
        [[0, 0, 1, 2, 2, 2], [3, 3, 3, 3, 3, 3], [0, 1, 2, 3, 4, 5]],
    ],
    ids=["any order", "rising"],
)
def test_contiguous_segments_are_exactly_their_keys(
    cross: bool, contiguous: bool, ids: list[list[int]]
) -> None:
    array = np.array(ids)
    spec = AttentionSpec(
        q_segment_ids=jnp.array(array),
        kv_segment_ids=jnp.array(array) if cross else None,
        contiguous_segments=contiguous,
    )
    expected = array[:, :, None] == array[:, None, :]
    np.testing.assert_array_equal(_pairs(spec, 3, 6, 6), expected)


@pytest.mark.parametrize("contiguous", [False, True])
def test_cross_attention_finds_the_segment_of_each_query(contiguous: bool) -> None:
    q_ids = np.array([[3, 0, 9, 3], [-1, 8, 5, 5]])
    kv_ids = np.array([[0, 0, 7, 3, 3, 3, 1], [5, 8, 8, 2, 2, -1, 4]])
    spec = AttentionSpec(
        q_segment_ids=jnp.array(q_ids),
        kv_segment_ids=jnp.array(kv_ids),
        contiguous_segments=contiguous,
    )
    pairs = _pairs(spec, 2, 4, 7)
    np.testing.assert_array_equal(pairs, q_ids[:, :, None] == kv_ids[:, None, :])
    assert not pairs[0, 2].any()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(-1, 3), min_size=28, max_size=28), st.booleans())
def test_recurring_ids_reach_from_their_first_key_to_their_last(ids: list[int], own: bool) -> None:
    q_ids = np.reshape(ids[:14], (2, 7))
    kv_ids = q_ids if own else np.reshape(ids[14:], (2, 7))
    spec = AttentionSpec(
        q_segment_ids=jnp.array(q_ids), kv_segment_ids=None if own else jnp.array(kv_ids)
    )
    assert spec.recurring
    expected = _hull(q_ids[:, :, None] == kv_ids[:, None, :])
    np.testing.assert_array_equal(_pairs(spec, 2, 7, 7), expected)


def test_rising_ids_are_not_sorted_when_run() -> None:
    """The branch for them holds no sort, with or without the promise."""
    spec = AttentionSpec(q_segment_ids=jnp.zeros((2, 7), int))
    (cond,) = (
        equation
        for equation in jax.make_jaxpr(lambda s: s.key_ranges(2, 7, 7))(spec).eqns
        if equation.primitive.name == "cond"
    )
    joined, rising = (str(branch) for branch in cond.params["branches"])
    assert "sort" in joined
    assert "sort" not in rising
    promised = AttentionSpec(q_segment_ids=jnp.zeros((2, 7), int), contiguous_segments=True)
    assert "sort" not in str(jax.make_jaxpr(lambda s: s.key_ranges(2, 7, 7))(promised))
    assert not promised.recurring
    assert not AttentionSpec(causal=True).recurring


def test_arrays_are_leaves_and_flags_are_static() -> None:
    spec = AttentionSpec(causal=True, kv_lengths=jnp.array([3]))
    leaves, structure = jax.tree.flatten(spec)
    assert len(leaves) == 1
    assert jax.tree.unflatten(structure, [None]) == AttentionSpec(causal=True)


def test_every_field_survives_being_a_pytree() -> None:
    layout = BlockLayout(2, 3, np.ones((1, 3, 2), bool))
    spec = AttentionSpec(
        True, 1, 2, 3, (4, None), True, layout, 5, 6, Dropout(rate=0.5, key=7), 8, np.int32(9)
    )
    leaves, structure = jax.tree.flatten(spec)
    assert leaves == [1, 2, 3, 4, 5, 6, 7, 9]
    assert jax.tree.unflatten(structure, leaves) == spec
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(spec)]
    assert paths[3:] == [".window[0]", ".mask", ".bias", ".dropout.key", ".first_head"]


def test_other_values_of_what_is_traced_use_the_same_program() -> None:
    traces = 0

    @jax.jit
    def lower(spec: AttentionSpec) -> KeyRanges:
        nonlocal traces
        traces += 1
        spec.check(2, 5, 5, 3)
        return spec.key_ranges(2, 5, 5)

    for i in range(3):
        layout = BlockLayout(5, 5, np.ones((1, 1, 1), bool))
        ids, lengths = np.arange(10).reshape(2, 5) // (i + 1), np.array([i, 3])
        key = jax.random.key(i)
        lower(
            AttentionSpec(
                q_segment_ids=ids,
                kv_lengths=lengths,
                window=(i, 2 * i),
                block_layout=layout,
                mask=np.full((1, 3, 5, 1), i == 1),
                bias=np.full((1, 1, 1, 1), i, np.float32),
                dropout=Dropout(rate=0.25, key=key),
                first_head=np.int32(i),
            )
        )
    assert traces == 1


def _specs() -> dict[str, Any]:
    ids = np.array([[[0, 0, 1, 1, 0], [2, 2, 2, 2, 2]], [[0, 1, 1, 2, 3], [1, 1, 4, 4, 4]]])
    return {"q_segment_ids": ids, "kv_lengths": np.array([[5, 3], [2, 4]]), "left": np.arange(2)}


def test_vmap_over_specs_equals_one_call_each() -> None:
    fields = _specs()

    def lower(left: jax.Array, **arrays: jax.Array) -> KeyRanges:
        return AttentionSpec(window=(left, None), **arrays).key_ranges(2, 5, 5)

    together = jax.jit(jax.vmap(lambda fields: lower(**fields)))(fields)
    for i in range(2):
        alone = lower(**{name: jnp.asarray(x[i]) for name, x in fields.items()})
        for x, y in zip(together, alone, strict=True):
            np.testing.assert_array_equal(x[i], y)


def test_ranges_are_the_same_in_a_manual_region_with_replication_checked() -> None:
    """One PartitionSpec for the whole spec; rows that rise lie on one device, others not."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    rows = PartitionSpec("data")
    ids = jnp.asarray(_specs()["q_segment_ids"].reshape(4, 5))
    for kv_ids in (None, ids[::-1]):
        spec = AttentionSpec(True, ids, kv_ids, jnp.array([5, 3, 2, 4]))
        lower = partial(AttentionSpec.key_ranges, batch=2, q_len=5, kv_len=5)
        mapped = jax.shard_map(lower, mesh=mesh, in_specs=(rows,), out_specs=rows, check_vma=True)
        expected = spec.key_ranges(4, 5, 5)
        for x, y in zip(jax.jit(mapped)(spec), expected, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_segment_ids": np.zeros((2, 5), int)}, "without q_segment_ids"),
        ({"q_segment_ids": np.zeros((2, 3), int)}, "3 queries and 5 keys"),
        ({"q_segment_ids": np.zeros((2, 5), int)}, r"shape \[2, 3\]"),
        ({"q_segment_ids": [[0] * 3] * 2}, r"q_segment_ids is \[\[0, 0, 0\]"),
        ({"kv_lengths": np.zeros(3, int)}, r"\[3\], but .* shape \[2\]"),
        ({"kv_lengths": np.zeros(2)}, "kv_lengths is float64"),
        ({"causal": 1}, "causal is 1.* True or False"),
        ({"contiguous_segments": None}, "contiguous_segments is None"),
        ({"window": 7}, r"window is 7, .* use \(7, 0\)"),
        ({"window": (1, 2, 3)}, r"window is \(1, 2, 3\)"),
        ({"window": (-1, 0)}, "left side of window is -1: use 0 or more"),
        ({"window": (0, np.int32(-2))}, "right side of window is -2"),
        ({"window": (0, 1.5)}, "right side of window is 1.5"),
        ({"window": (np.zeros(2, int), None)}, r"left side of window is int64\[2\]"),
        ({"window": (True, None)}, "left side of window is True"),
        ({"mask": np.ones((2, 1, 3, 5))}, r"mask is float64\[2, 1, 3, 5\].* bool"),
        ({"mask": np.ones((3, 5), bool)}, r"bool\[3, 5\], .* shape \[2, 4, 3, 5\]"),
        ({"mask": np.ones((1, 1, 3, 4), bool)}, "has 4 keys, but this call has 5: give it 1 or 5"),
        ({"bias": np.zeros((1, 3, 3, 5), np.float32)}, "has 3 heads, but this call has 4"),
        ({"bias": np.zeros((3, 1, 1, 1), np.float32)}, "has 3 batch rows, but this call has 2"),
        ({"bias": np.zeros((1, 1, 1, 1), int)}, "bias is int64.* floating point"),
        ({"bias": 0.5}, "bias is 0.5"),
        ({"dropout": 0.1}, r"dropout is 0.1: use Dropout\(rate"),
        ({"dropout": Dropout(rate=0.1, key=np.zeros((3, 2), np.uint32))}, r"key is uint32\[3, 2\]"),
        ({"dropout": Dropout(rate=0.1, key=42)}, "key is 42.* jax.random.key"),
        ({"first_row": -1}, "first_row is -1: use the global index"),
        ({"first_head": 0.0}, "first_head is 0.0"),
        (
            {"block_layout": BlockLayout(2, 2, np.ones((1, 2, 2), bool))},
            "2 kv blocks of 2, but a length of 5 needs 3",
        ),
        (
            {"block_layout": BlockLayout(2, 2, np.ones((5, 2, 3), bool)), "first_head": 2},
            "tables for 5 heads, but this call reaches head 5",
        ),
        (
            {
                "q_segment_ids": np.zeros((2, 3), int),
                "kv_segment_ids": np.array([[0, 0, 1, 1, 2], [4, 3, 4, 3, 4]]),
                "contiguous_segments": True,
            },
            "kv_segment_ids has id 4 in 3 separate runs of row 1",
        ),
        (
            {"q_segment_ids": np.full((2, 3), 2**32), "kv_segment_ids": np.zeros((2, 5), int)},
            "q_segment_ids holds 4294967296, which is no 32-bit integer",
        ),
    ],
)
def test_what_does_not_fit_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionSpec(**fields).check(2, 3, 5, 4)


def test_key_ranges_check_what_they_are_made_from() -> None:
    with pytest.raises(ValueError, match="left side of window is -1"):
        AttentionSpec(window=(-1, 0)).key_ranges(2, 3, 5)
    with pytest.raises(ValueError, match=r"rate is 1\.0: use a number"):
        Dropout(rate=1.0, key=np.zeros(2, np.uint32))


def test_what_fits_is_not_refused() -> None:
    spec = AttentionSpec(
        q_segment_ids=jnp.zeros((2, 3), jnp.int8),
        kv_segment_ids=np.zeros((2, 5), np.uint8),
        kv_lengths=np.array([1, 2]),
        window=[np.int64(3), None],
        contiguous_segments=True,
        block_layout=BlockLayout(2, 5, np.ones((6, 2, 1), bool)),
        mask=jnp.ones((1, 4, 1, 5), bool),
        bias=jnp.zeros((2, 1, 3, 1), jnp.bfloat16),
        dropout=Dropout(rate=0.1, key=jax.random.key(0, impl="rbg")),
        first_row=jnp.int32(3),
        first_head=2,
    )
    spec.check(2, 3, 5, 4)
    jax.jit(lambda spec: spec.check(2, 3, 5, 4))(spec)
