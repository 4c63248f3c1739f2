"""Every implementation gives what the definition of attention gives, or refuses the spec."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ulysses_jax.attention import blockwise
from ulysses_jax.attention.block_layout import longformer
from ulysses_jax.attention.spec import AttentionSpec

Run = Callable[..., dict[str, np.ndarray]]
Check = Callable[..., None]


def test_results_and_gradients_equal_the_definition_or_are_refused(
    any_implementation: Any, definition: Run, assert_equal: Check, case: Any
) -> None:
    arrays, spec = any_implementation.fitted(case).arrays(), case.spec
    if any_implementation.refuses & case.features():
        with pytest.raises(NotImplementedError):
            any_implementation.compute(arrays, spec)
    else:
        assert_equal(any_implementation.compute(arrays, spec), definition(arrays, spec), 1e-5)


def test_no_implementation_refuses_all_but_a_few_cases(
    any_implementation: Any, cases: dict[str, Any]
) -> None:
    taken = [name for name, x in cases.items() if not any_implementation.refuses & x.features()]
    assert len(taken) >= 3


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    causal=st.booleans(),
    borders=st.lists(st.booleans(), min_size=3 * 23, max_size=3 * 23),
    lengths=st.lists(st.integers(0, 23), min_size=3, max_size=3),
)
def test_any_packing_equals_the_definition(
    compute: Run,
    definition: Run,
    assert_equal: Check,
    cases: dict[str, Any],
    causal: bool,
    borders: list[bool],
    lengths: list[int],
) -> None:
    case = cases["documents"]
    spec = dataclasses.replace(
        case.spec,
        causal=causal,
        q_segment_ids=np.cumsum(np.reshape(borders, (3, 23)), axis=1, dtype=np.int32),
        kv_lengths=np.array(lengths, np.int32),
    )
    arrays = case.arrays()
    assert_equal(compute(arrays, spec), definition(arrays, spec), 1e-5)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    ids=st.lists(st.integers(0, 2), min_size=4, max_size=28),
    lengths=st.lists(st.integers(0, 17), min_size=2, max_size=2),
    window=st.tuples(st.integers(0, 18), st.integers(0, 18)),
    attended=st.sampled_from([0.1, 0.6, 1.0]),
    bias=st.sampled_from([0.0, 1.0, 30.0]),
    offsets=st.tuples(st.integers(0, 2), st.integers(0, 3)),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_combination_equals_the_definition(
    compute: Run,
    definition: Run,
    assert_equal: Check,
    cases: dict[str, Any],
    ids: list[int],
    lengths: list[int],
    window: tuple[int, int],
    attended: float,
    bias: float,
    offsets: tuple[int, int],
    seed: int,
) -> None:
    case = cases["everything"]
    ids_BST = np.resize(np.array(ids, np.int32), (2, 28))
    spec = dataclasses.replace(
        case.spec,
        q_segment_ids=ids_BST[:, :11],
        kv_segment_ids=ids_BST[:, 11:],
        kv_lengths=np.array(lengths, np.int32),
        window=window,
        mask=np.random.default_rng(seed).random(case.spec.mask.shape) < attended,
        bias=np.float32(bias) * case.spec.bias,
        first_row=np.int32(offsets[0]),
        first_head=np.int32(offsets[1]),
    )
    arrays = case.arrays()
    assert_equal(compute(arrays, spec), definition(arrays, spec), 1e-5)


def test_blocks_chosen_from_the_shapes_equal_the_definition(
    differentiated: Callable[..., Run], definition: Run, assert_equal: Check, cases: dict[str, Any]
) -> None:
    ids = np.repeat(np.array([[5, 2]], np.int32), [211, 310], axis=1)
    case = cases["causal"]._replace(
        sizes=(1, 521, 521, 1, 1, 4), spec=AttentionSpec(causal=True, q_segment_ids=ids)
    )
    compute = jax.jit(differentiated(blockwise.attend))
    assert_equal(compute(case.arrays(), case.spec), definition(case.arrays(), case.spec), 1e-5)


@pytest.mark.parametrize("name", ["causal, more queries", "causal window", "bias"])
def test_the_definition_means_what_jax_nn_means(
    definition: Run, assert_equal: Check, cases: dict[str, Any], name: str
) -> None:
    arrays, spec = cases[name].arrays(), cases[name].spec
    out = jax.nn.dot_product_attention(
        *arrays[:3],
        spec.bias,
        is_causal=spec.causal,
        scale=0.4,
        local_window_size=None if spec.window is None else (spec.window[0], 0),
    )
    assert_equal({"out": out}, {"out": definition(arrays, spec)["out"]}, 1e-5)


@pytest.mark.parametrize("name", ["causal, more queries", "everything"])
def test_bfloat16_errs_no_more_than_bfloat16(
    compute: Run, definition: Run, assert_equal: Check, cases: dict[str, Any], name: str
) -> None:
    arrays, spec = cases[name].arrays(), cases[name].spec
    rounded = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), arrays)
    arrays = rounded._replace(dlse=rounded.dlse.astype(jnp.float32))
    actual, expected = compute(arrays, spec), definition(arrays, spec)
    for name in ("lse", "dbias"):
        assert actual.get(name, actual["lse"]).dtype == jnp.float32
    assert all(actual[name].dtype == jnp.bfloat16 for name in ("out", "dq", "dk", "dv"))
    assert_equal({"lse": actual.pop("lse")}, {"lse": expected.pop("lse")}, 1e-5)
    assert_equal(actual, expected, 2 * float(jnp.finfo(jnp.bfloat16).eps))


@pytest.mark.parametrize(
    ("any_implementation", "name", "start"),
    [
        ("blockwise", "documents", 5),
        ("reference", "documents", 5),
        ("splash", "documents", 5),
        ("blockwise", "rising segments", 6),
        ("pallas", "rising segments", 6),
        ("splash", "rising segments", 6),
    ],
    indirect=["any_implementation"],
)
def test_a_document_stays_bit_identical_when_another_changes(
    any_implementation: Any, cases: dict[str, Any], name: str, start: int
) -> None:
    case, compute = any_implementation.fitted(cases[name]), any_implementation.compute
    arrays = case.arrays()
    changed = jax.tree.map(np.copy, arrays)
    for x in changed[:4]:
        x[0, 3] += 1
    before, after = compute(arrays, case.spec), compute(changed, case.spec)
    for name in before:
        x, y = (
            np.asarray(results[name].swapaxes(1, 2) if name == "lse" else results[name])
            for results in (before, after)
        )
        np.testing.assert_array_equal(x[0, start:], y[0, start:], err_msg=name)
        np.testing.assert_array_equal(x[1:], y[1:], err_msg=name)
        assert (x[0, :start] != y[0, :start]).any(), name


@pytest.mark.parametrize(
    "name", ["recurring segments", "window", "layout", "mask", "bias that rules out", "dropout"]
)
def test_a_key_changes_exactly_the_queries_that_look_at_it(
    compute: Run, pairs: Callable[..., np.ndarray], cases: dict[str, Any], name: str
) -> None:
    arrays, spec = cases[name].arrays(), cases[name].spec
    batch, q_len, kv_len, heads, _, _ = cases[name].sizes
    key = 10
    changed = arrays._replace(k=arrays.k.copy(), v=arrays.v.copy())
    changed.k[:, key] += 1
    changed.v[:, key] -= 1
    before, after = compute(arrays, spec), compute(changed, spec)
    looks = pairs(spec, (batch, heads, q_len, kv_len))[..., key]
    differs = {result: np.asarray(before[result]) != np.asarray(after[result]) for result in before}
    np.testing.assert_array_equal(differs["lse"], looks)
    for result in ("out", "dq"):
        changes = differs[result].any(axis=-1).swapaxes(1, 2)
        assert not (changes & ~looks).any(), result
        # Alone with that key, a query's weight is 1 and its dq 0, whatever the key.
        assert changes[looks].mean() > 0.8, result


@pytest.mark.parametrize("name", ["lengths, one of them 0", "everything", "bias that rules out"])
def test_a_query_with_nothing_to_attend_gives_zero_and_passes_nothing_on(
    compute: Run, definition: Run, assert_equal: Check, cases: dict[str, Any], name: str
) -> None:
    arrays, spec = cases[name].arrays(), cases[name].spec
    expected = definition(arrays, spec)
    nothing = np.isneginf(expected["lse"])
    assert nothing.any()
    # What differentiating a merge of two empty parts hands back.
    arrays.dlse[nothing] = np.nan
    arrays.dout[nothing.swapaxes(1, 2)] = np.nan
    actual = compute(arrays, spec)
    assert not np.asarray(actual["out"]).swapaxes(1, 2)[nothing].any()
    assert_equal(actual, expected, 1e-5)


def test_a_nan_of_the_input_is_not_hidden(compute: Run, cases: dict[str, Any]) -> None:
    case = cases["causal"]
    arrays = case.arrays()
    arrays.q[0, 4] = np.nan
    results = compute(arrays, case.spec)
    assert np.isnan(results["out"][0, 4]).all()
    assert np.isnan(results["lse"][0, :, 4]).all()
    assert np.isfinite(results["out"][0, :4]).all()


def test_scores_far_outside_the_range_of_exp_do_not_overflow(
    compute: Run, definition: Run, assert_equal: Check, cases: dict[str, Any]
) -> None:
    case = cases["causal"]
    arrays = case.arrays()
    arrays = arrays._replace(q=100 * arrays.q, k=100 * arrays.k)
    assert_equal(compute(arrays, case.spec), definition(arrays, case.spec), 1e-3)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (AttentionSpec(mask=np.ones((1, 3, 1, 1), bool)), "3 heads, but this call has 4"),
        (AttentionSpec(block_layout=longformer(11, 4)), "length of 17 needs 5"),
        (AttentionSpec(kv_lengths=np.ones(3, np.int32)), r"needs integers of shape \[2\]"),
    ],
)
def test_a_spec_that_does_not_fit_is_refused(
    implementation: Any, cases: dict[str, Any], spec: AttentionSpec, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        implementation.attend(*cases["mask"].arrays()[:3], spec, 0.4)
