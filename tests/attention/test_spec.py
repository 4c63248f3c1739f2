"""Key ranges against the pairs that each description means."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ulysses_jax.attention.spec import AttentionSpec, KeyRanges


def _ranges(spec: AttentionSpec, batch: int, q_len: int, kv_len: int) -> KeyRanges:
    return jax.jit(AttentionSpec.key_ranges, static_argnums=(1, 2, 3))(spec, batch, q_len, kv_len)


def _pairs(spec: AttentionSpec, batch: int, q_len: int, kv_len: int) -> np.ndarray:
    ranges = _ranges(spec, batch, q_len, kv_len)
    key = np.arange(kv_len)
    return (key >= np.asarray(ranges.start_BS)[..., None]) & (
        key < np.asarray(ranges.end_BS)[..., None]
    )


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


@pytest.mark.parametrize("cross", [False, True])
def test_segments_in_any_order_of_ids_see_themselves_only(cross: bool) -> None:
    ids = np.array([[7, 7, 2, 5, 5, 5], [1, 1, 1, 1, 1, 1], [5, 4, 3, 2, 1, 0]])
    spec = AttentionSpec(q_segment_ids=jnp.array(ids), kv_segment_ids=jnp.array(ids))
    if not cross:
        spec = AttentionSpec(q_segment_ids=jnp.array(ids))
    pairs = _pairs(spec, 3, 6, 6)
    np.testing.assert_array_equal(pairs, ids[:, :, None] == ids[:, None, :])


def test_cross_attention_finds_the_segment_of_each_query() -> None:
    q_ids = np.array([[3, 0, 9, 3], [-1, 8, 5, 5]])
    kv_ids = np.array([[0, 0, 7, 3, 3, 3, 1], [5, 8, 8, 2, 2, -1, 4]])
    spec = AttentionSpec(q_segment_ids=jnp.array(q_ids), kv_segment_ids=jnp.array(kv_ids))
    pairs = _pairs(spec, 2, 4, 7)
    np.testing.assert_array_equal(pairs, q_ids[:, :, None] == kv_ids[:, None, :])
    assert not pairs[0, 2].any()


def test_an_id_that_comes_back_opens_a_segment_of_its_own() -> None:
    ids = jnp.array([[4, 4, 6, 4]])
    ranges = _ranges(AttentionSpec(q_segment_ids=ids), 1, 4, 4)
    assert ranges.start_BS.tolist() == [[0, 0, 2, 3]]
    assert ranges.end_BS.tolist() == [[2, 2, 3, 4]]
    ranges = _ranges(AttentionSpec(q_segment_ids=ids, kv_segment_ids=ids), 1, 4, 4)
    assert ranges.start_BS.tolist() == [[0, 0, 2, 0]]
    assert ranges.end_BS.tolist() == [[2, 2, 3, 2]]


def test_arrays_are_leaves_and_causal_is_static() -> None:
    spec = AttentionSpec(causal=True, kv_lengths=jnp.array([3]))
    leaves, structure = jax.tree.flatten(spec)
    assert len(leaves) == 1
    assert jax.tree.unflatten(structure, [None]) == AttentionSpec(causal=True)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (AttentionSpec(kv_segment_ids=jnp.zeros((2, 5), int)), "without q_segment_ids"),
        (AttentionSpec(q_segment_ids=jnp.zeros((2, 3), int)), "3 queries and 5 keys"),
        (AttentionSpec(q_segment_ids=jnp.zeros((2, 5), int)), r"shape \[2, 3\]"),
        (AttentionSpec(kv_lengths=jnp.zeros((3,), int)), r"\[3\], but .* shape \[2\]"),
        (AttentionSpec(kv_lengths=jnp.zeros((2,))), "kv_lengths is float32"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(spec: AttentionSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec.key_ranges(2, 3, 5)
