"""Every implementation against the definition of attention, in float64 and pair by pair.

Specs of one shape give the same arrays and so share one compiled program an implementation.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ulysses_jax.attention import blockwise, reference
from ulysses_jax.attention.blocks import BlockSizes
from ulysses_jax.attention.select import LocalAttention
from ulysses_jax.attention.spec import AttentionSpec

SCALE = 0.4
RESULTS = ("out", "lse", "dq", "dk", "dv")


class Case(NamedTuple):
    """The sizes [B, S, T, h, g, D] of a call, and its spec."""

    sizes: tuple[int, int, int, int, int, int]
    spec: AttentionSpec


class Arrays(NamedTuple):
    """q, k, v, and the cotangents of output and log-sum-exp."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    dlse: np.ndarray


Compute = Callable[[Arrays, AttentionSpec], dict[str, np.ndarray]]


def _compute(attend: LocalAttention) -> Compute:
    def compute(arrays: Arrays, spec: AttentionSpec) -> dict[str, jax.Array]:
        q, k, v, *cotangents = arrays
        results, vjp = jax.vjp(lambda q, k, v: attend(q, k, v, spec, SCALE), q, k, v)
        return dict(zip(RESULTS, (*results, *vjp(tuple(cotangents))), strict=True))

    return jax.jit(compute)


IMPLEMENTATIONS: dict[str, Compute] = {
    "blockwise": _compute(partial(blockwise.attend, blocks=BlockSizes(8, 5))),
    "reference": _compute(reference.attend),
}
every_implementation = pytest.mark.parametrize(
    "compute", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS
)


def _definition(arrays: Arrays, spec: AttentionSpec) -> dict[str, np.ndarray]:
    """The results from the meaning of the spec rather than from its key ranges."""
    q, k, v, dout, dlse = (np.asarray(x, np.float64) for x in arrays)
    batch, q_len, heads, _ = q.shape
    kv_len, kv_heads = k.shape[1:3]
    pairs = np.ones((batch, q_len, kv_len), bool)
    if spec.causal:
        pairs &= np.arange(kv_len) <= np.arange(q_len)[:, None]
    if spec.q_segment_ids is not None:
        kv_ids = spec.q_segment_ids if spec.kv_segment_ids is None else spec.kv_segment_ids
        pairs &= spec.q_segment_ids[:, :, None] == kv_ids[:, None, :]
    if spec.kv_lengths is not None:
        pairs &= np.arange(kv_len) < spec.kv_lengths[:, None, None]

    out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
    lse = np.full((batch, heads, q_len), -np.inf)
    for b, i, head in np.ndindex(batch, q_len, heads):
        keys = np.flatnonzero(pairs[b, i])
        if not keys.size:
            continue
        at, query, shared = (b, keys, head // (heads // kv_heads)), (b, i, head), (b, head, i)
        scores = SCALE * k[at] @ q[query]
        lse[shared] = np.log(np.sum(np.exp(scores - scores.max()))) + scores.max()
        weights = np.exp(scores - lse[shared])
        out[query] = weights @ v[at]
        dscores = weights * (v[at] @ dout[query] - out[query] @ dout[query] + dlse[shared])
        dq[query] = SCALE * dscores @ k[at]
        dk[at] += SCALE * np.outer(dscores, q[query])
        dv[at] += np.outer(weights, dout[query])
    return dict(zip(RESULTS, (out, lse, dq, dk, dv), strict=True))


def _ids(*lengths: int) -> np.ndarray:
    # Not sorted: only equality of neighbours may matter.
    return np.repeat(np.array([5, 2, 9, 0, 7, 1], np.int32)[: len(lengths)], lengths)


def _packed(causal: bool, ids: list[np.ndarray], lengths: list[int]) -> Case:
    spec = AttentionSpec(causal, np.stack(ids), kv_lengths=np.array(lengths, np.int32))
    return Case((3, 23, 23, 6, 2, 5), spec)


def _cross(q_ids: np.ndarray, kv_ids: np.ndarray) -> Case:
    return Case((1, 11, 17, 3, 3, 3), AttentionSpec(True, q_ids[None], kv_ids[None]))


WHOLE = [_ids(23)] * 3
DOCUMENTS = [_ids(5, 11, 7), _ids(23), _ids(1, 1, 20, 1)]
CASES: dict[str, Case] = {
    "everything": _packed(False, WHOLE, [23, 23, 23]),
    "lengths, one of them 0": _packed(False, WHOLE, [0, 7, 22]),
    "documents": _packed(False, DOCUMENTS, [23, 23, 23]),
    "causal": _packed(True, WHOLE, [23, 23, 23]),
    "causal documents with lengths": _packed(True, DOCUMENTS, [14, 0, 23]),
    "causal, more keys": _cross(_ids(11), _ids(17)),
    "causal, segments of other lengths": _cross(_ids(6, 1, 4), _ids(3, 2, 12)),
    "causal, more queries": Case((2, 17, 7, 2, 1, 3), AttentionSpec(True)),
    "one token": Case((2, 1, 1, 2, 1, 3), AttentionSpec(True)),
}


def _arrays(case: Case) -> Arrays:
    draw = np.random.default_rng(7).standard_normal
    batch, q_len, kv_len, heads, kv_heads, dim = case.sizes
    q_shape, k_shape = (batch, q_len, heads, dim), (batch, kv_len, kv_heads, dim)
    shapes = q_shape, k_shape, k_shape, q_shape, (batch, heads, q_len)
    return Arrays(*(draw(shape).astype(np.float32) for shape in shapes))


def _assert_equal(
    actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float
) -> None:
    """Equal to `tolerance` times the largest finite entry; infinities in the same places."""
    for name, y in expected.items():
        largest = np.max(np.abs(y), where=np.isfinite(y), initial=1e-30)
        x = np.asarray(actual[name], np.float64)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * largest, err_msg=name)


@every_implementation
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results_and_gradients_equal_the_definition(compute: Compute, case: Case) -> None:
    arrays = _arrays(case)
    _assert_equal(compute(arrays, case.spec), _definition(arrays, case.spec), 1e-5)


@every_implementation
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    causal=st.booleans(),
    borders=st.lists(st.booleans(), min_size=3 * 23, max_size=3 * 23),
    lengths=st.lists(st.integers(0, 23), min_size=3, max_size=3),
)
def test_any_packing_equals_the_definition(
    compute: Compute, causal: bool, borders: list[bool], lengths: list[int]
) -> None:
    ids = np.cumsum(np.reshape(borders, (3, 23)), axis=1, dtype=np.int32)
    case = _packed(causal, list(ids), lengths)
    arrays = _arrays(case)
    _assert_equal(compute(arrays, case.spec), _definition(arrays, case.spec), 1e-5)


def test_blocks_chosen_from_the_shapes_equal_the_definition() -> None:
    case = Case((1, 521, 521, 1, 1, 4), AttentionSpec(True, _ids(211, 310)[None]))
    arrays = _arrays(case)
    compute = _compute(blockwise.attend)
    _assert_equal(compute(arrays, case.spec), _definition(arrays, case.spec), 1e-5)


def test_causal_means_what_jax_nn_means() -> None:
    case = CASES["causal, more keys"]
    arrays = _arrays(case)
    out = jax.nn.dot_product_attention(*arrays[:3], is_causal=True, scale=SCALE)
    _assert_equal({"out": out}, {"out": _definition(arrays, case.spec)["out"]}, 1e-5)


@every_implementation
def test_bfloat16_errs_no_more_than_bfloat16(compute: Compute) -> None:
    case = CASES["causal, more queries"]
    rounded = Arrays(*(jnp.asarray(x, jnp.bfloat16) for x in _arrays(case)))
    arrays = rounded._replace(dlse=rounded.dlse.astype(jnp.float32))
    actual = compute(arrays, case.spec)
    assert actual["lse"].dtype == jnp.float32
    assert all(actual[name].dtype == jnp.bfloat16 for name in RESULTS if name != "lse")
    expected = _definition(arrays, case.spec)
    _assert_equal({"lse": actual["lse"]}, {"lse": expected.pop("lse")}, 1e-5)
    _assert_equal(actual, expected, 2 * float(jnp.finfo(jnp.bfloat16).eps))


@every_implementation
def test_a_document_stays_bit_identical_when_another_changes(compute: Compute) -> None:
    case = CASES["documents"]
    arrays = _arrays(case)
    changed = Arrays(*(x.copy() for x in arrays))
    for x in changed[:4]:
        x[0, 3] += 1
    before, after = compute(arrays, case.spec), compute(changed, case.spec)
    for name in RESULTS:
        x, y = (
            np.asarray(results[name].swapaxes(1, 2) if name == "lse" else results[name])
            for results in (before, after)
        )
        np.testing.assert_array_equal(x[0, 5:], y[0, 5:], err_msg=name)
        np.testing.assert_array_equal(x[1:], y[1:], err_msg=name)
        assert (x[0, :5] != y[0, :5]).any(), name


@every_implementation
def test_a_row_with_nothing_to_attend_gives_zero_and_passes_nothing_on(compute: Compute) -> None:
    case = CASES["lengths, one of them 0"]
    arrays = _arrays(case)
    # What differentiating a merge of two empty parts hands back.
    arrays.dout[0], arrays.dlse[0] = np.nan, np.nan
    results = compute(arrays, case.spec)
    assert (results.pop("lse")[0] == -np.inf).all()
    for name, x in results.items():
        assert not x[0].any(), name
        assert np.isfinite(x).all(), name


@every_implementation
def test_a_nan_of_the_input_is_not_hidden(compute: Compute) -> None:
    case = CASES["causal"]
    arrays = _arrays(case)
    arrays.q[0, 4] = np.nan
    results = compute(arrays, case.spec)
    assert np.isnan(results["out"][0, 4]).all()
    assert np.isnan(results["lse"][0, :, 4]).all()
    assert np.isfinite(results["out"][0, :4]).all()


@every_implementation
def test_scores_far_outside_the_range_of_exp_do_not_overflow(compute: Compute) -> None:
    case = CASES["causal"]
    arrays = _arrays(case)
    arrays = arrays._replace(q=100 * arrays.q, k=100 * arrays.k)
    _assert_equal(compute(arrays, case.spec), _definition(arrays, case.spec), 1e-3)
