"""Functions of jax.nn's signature as local attention: exact, shown no empty row, or refused."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ulysses_jax.attention import reference
from ulysses_jax.attention.block_layout import BlockLayout
from ulysses_jax.attention.dropout import Dropout
from ulysses_jax.attention.jax_nn import from_jax_nn
from ulysses_jax.attention.spec import AttentionSpec

SCALE = 0.4
IDS = np.repeat(np.array([5, 2, 9], np.int32), (5, 11, 7))[None].repeat(3, 0)


def masked(query, key, value, mask=None):
    """A user's own: no keyword but the mask, and NaN where a mask leaves nothing."""
    groups = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[-1] ** -0.5
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    return jnp.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), value)


def limited(query, key, value, *, is_causal=False, key_value_seq_lengths=None):
    """A user's own that takes no mask, and gives NaN where a length is 0."""
    mask = jnp.tril(jnp.ones((query.shape[1], key.shape[1]), bool)) if is_causal else True
    if key_value_seq_lengths is not None:
        mask &= jnp.arange(key.shape[1]) < key_value_seq_lengths[:, None, None, None]
    return masked(query, key, value, mask)


def unlimited(query, key, value):
    return masked(query, key, value)


def wrapper(query, key, value, **keywords):
    return jax.nn.dot_product_attention(query, key, value, **keywords)


def _assert_equals_reference(function, case, assert_equal, scale):
    """Compares outputs and gradients; cotangents are NaN where there is nothing to attend."""

    @functools.partial(jax.jit, static_argnums=0)
    def results(attend, q, k, v, dout, _):
        def call(q, k, v, bias):
            return attend(q, k, v, dataclasses.replace(case.spec, bias=bias), scale)[0]

        empty_BhS = jnp.isneginf(reference.attend(q, k, v, case.spec, scale)[1])
        dout = jnp.where(empty_BhS.swapaxes(1, 2)[..., None], jnp.nan, dout)
        out, vjp = jax.vjp(call, q, k, v, case.spec.bias)
        named = zip(("out", "dq", "dk", "dv", "dbias"), (out, *vjp(dout)), strict=True)
        return {name: x for name, x in named if x is not None}

    arrays = case.arrays()
    found = results(from_jax_nn(function), *arrays)
    assert_equal(found, results(reference.attend, *arrays), 1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "lengths, one of them 0",
        "window of one side, more keys",
        "causal window",
        "layout of each head, from the fourth on",
        "bias that rules out",
        "bias",
        "everything",
    ],
)
def test_jax_nn_gives_what_the_reference_gives(cases, assert_equal, name):
    case = cases[name]
    case = case._replace(spec=dataclasses.replace(case.spec, dropout=None))
    _assert_equals_reference(jax.nn.dot_product_attention, case, assert_equal, SCALE)


@pytest.mark.parametrize(
    ("sizes", "fields"),
    [
        ((3, 23, 23, 6, 2, 5), {"causal": True, "q_segment_ids": IDS, "window": (4, None)}),
        # Queries after the last key and the window have no key.
        ((1, 17, 7, 2, 1, 4), {"window": (2, 3)}),
        # Queries of documents that the keys do not hold have none either.
        ((2, 3, 4, 2, 2, 4), {"q_segment_ids": IDS[:2, 4:7], "kv_segment_ids": IDS[:2, 1:5]}),
        ((3, 5, 5, 2, 1, 4), {"kv_lengths": np.array([0, 2, 9], np.int32), "window": (0, 0)}),
    ],
)
def test_rows_with_nothing_to_attend_never_reach_the_function(cases, assert_equal, sizes, fields):
    case = cases["mask"]._replace(sizes=sizes, spec=AttentionSpec(**fields))
    _assert_equals_reference(masked, case, assert_equal, sizes[-1] ** -0.5)


def test_functions_without_a_mask_serve_the_calls_that_need_none(cases, assert_equal):
    case = cases["lengths, one of them 0"]
    scale = case.sizes[-1] ** -0.5
    lengths = dataclasses.replace(case.spec, causal=True, q_segment_ids=None)
    lengths = dataclasses.replace(lengths, contiguous_segments=False)
    _assert_equals_reference(limited, case._replace(spec=lengths), assert_equal, scale)
    _assert_equals_reference(unlimited, case._replace(spec=AttentionSpec()), assert_equal, scale)


def _traced(function, spec, scale=3**-0.5, dtype="float32"):
    """The shapes of a call; nothing is computed."""
    attend = from_jax_nn(function)
    q, k = (jax.ShapeDtypeStruct((2, 6, heads, 3), dtype) for heads in (4, 2))
    return jax.eval_shape(lambda *qkv: attend(*qkv, spec, scale), q, k, k)


def _passed(spec, function=jax.nn.dot_product_attention, scale=3**-0.5) -> dict[str, Any]:
    """The keywords of the call that `spec` leads to."""
    seen = {}

    @functools.wraps(function)
    def spy(*args, **keywords):
        seen.update(keywords)
        return function(*args, **keywords)

    _traced(spy, spec, scale)
    return seen


LENGTHS = np.array([0, 4], np.int32)


@pytest.mark.parametrize(
    ("spec", "passed"),
    [
        (AttentionSpec(), {}),
        (AttentionSpec(causal=True), {"is_causal": True}),
        (AttentionSpec(window=(2, 1)), {"local_window_size": (2, 1)}),
        # What cuDNN needs to know: a window to the left alone is causal.
        (AttentionSpec(window=(2, 0)), {"is_causal": True, "local_window_size": (2, 0)}),
        (
            AttentionSpec(causal=True, window=(2, 3)),
            {"is_causal": True, "local_window_size": (2, 0)},
        ),
        (AttentionSpec(window=(None, 0)), {"is_causal": True}),
        (AttentionSpec(causal=True, window=(5, None)), {"is_causal": True}),
        (AttentionSpec(window=(2**31 - 1, 2)), {"local_window_size": (6, 2)}),
        (AttentionSpec(window=(3, 2**40)), {"local_window_size": (3, 6)}),
        (AttentionSpec(window=(np.int32(7), None)), {}),
    ],
)
def test_what_has_a_keyword_is_passed_without_a_mask(spec, passed):
    assert _passed(spec) == passed


def test_masks_hold_only_what_has_no_keyword():
    lengths = _passed(AttentionSpec(causal=True, kv_lengths=LENGTHS))
    assert set(lengths) == {"is_causal", "key_value_seq_lengths"}
    assert lengths["key_value_seq_lengths"].dtype == jnp.int32
    segments = _passed(AttentionSpec(causal=True, q_segment_ids=np.ones((2, 6), np.int32)))
    assert set(segments) == {"is_causal", "mask"}
    traced = _passed(AttentionSpec(window=(jnp.int32(2), None)))
    assert set(traced) == {"mask"}
    assert traced["mask"].shape == (1, 1, 6, 6)
    # Left of the window and past the length there may be no key, known only when it runs.
    both = _passed(AttentionSpec(window=(2, 1), kv_lengths=LENGTHS))
    assert set(both) == {"key_value_seq_lengths", "mask"}


def test_a_scale_is_passed_unless_it_is_the_usual_one():
    assert _passed(AttentionSpec(), scale=1 / np.sqrt(3)) == {}
    assert _passed(AttentionSpec(), scale=0.5) == {"scale": 0.5}


def test_wrappers_and_fixed_keywords_are_seen_through():
    assert _passed(AttentionSpec(causal=True), wrapper) == {"is_causal": True}
    fixed = functools.partial(functools.partial(masked), mask=jnp.ones((1, 1, 6, 6), bool))
    with pytest.raises(NotImplementedError, match="masked does not take the keyword 'mask'"):
        _traced(fixed, AttentionSpec(causal=True))


@pytest.mark.parametrize(
    ("function", "spec", "scale", "message"),
    [
        (unlimited, AttentionSpec(causal=True), 1, "unlimited .* 'mask', or 'is_causal'"),
        (limited, AttentionSpec(mask=np.ones((1, 1, 6, 6), bool)), 1, "limited .* 'mask', which"),
        (limited, AttentionSpec(window=(1, 1)), 1, "'mask', or 'local_window_size'"),
        (
            limited,
            AttentionSpec(q_segment_ids=np.ones((2, 6), np.int32)),
            1,
            "'mask', which AttentionSpec.q_segment_ids needs",
        ),
        (
            limited,
            AttentionSpec(block_layout=BlockLayout(3, 3, np.eye(2, dtype=bool)[None])),
            1,
            "'mask', which AttentionSpec.block_layout",
        ),
        (masked, AttentionSpec(bias=np.ones((1, 1, 6, 6), np.float32)), 1, "keyword 'bias'"),
        (masked, AttentionSpec(), 2, "masked does not take the keyword 'scale'"),
        (
            wrapper,
            AttentionSpec(dropout=Dropout(rate=0.1, key=np.zeros(2, np.uint32))),
            1,
            "wrapper cannot apply AttentionSpec.dropout",
        ),
    ],
)
def test_what_a_function_cannot_say_is_refused_by_name(function, spec, scale, message):
    with pytest.raises(NotImplementedError, match=message):
        _traced(function, spec, scale * 3**-0.5)


def test_results_of_another_shape_are_refused():
    tuples = functools.partial(jax.nn.dot_product_attention, return_residual=True)
    with pytest.raises(ValueError, match="dot_product_attention returned a tuple"):
        _traced(tuples, AttentionSpec())
    with pytest.raises(ValueError, match=r"returned \(2, 4, 6, 3\), .* of q, \(2, 6, 4, 3\)"):
        _traced(lambda q, k, v: q.swapaxes(1, 2), AttentionSpec())
    with pytest.raises(ValueError, match="attention is 7: use a name, or a function"):
        from_jax_nn(7)


def test_the_output_keeps_the_dtype_of_the_queries():
    out, lse = _traced(lambda q, k, v: q.astype(jnp.float32), AttentionSpec(), dtype="bfloat16")
    assert out.dtype == jnp.bfloat16
    assert lse is None
