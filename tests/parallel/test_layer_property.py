"""Any call of the layer equals the definition of attention: values and every gradient."""

from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

from ulysses_jax import BlockLayout, HeadPlan, ulysses_attention

RATE, SEED = 0.4, 3

pytestmark = pytest.mark.filterwarnings("ignore:.* devices for .* query heads")


def draws(count):
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


class Call(NamedTuple):
    """One call of the layer: sizes B, S, T, H, K, D, axes, what is computed, and how."""

    sizes: tuple[int, int, int, int, int, int]
    axes: dict[str, Any]
    what: dict[str, Any]
    how: dict[str, Any]

    def marks(self):
        """Two calls that share one of these are alike."""
        kind = str(self.how["attention"]), self.how["exchange"] == "halo"
        return {
            (*kind, *self.sizes[1:5]),
            (*kind, *self.axes.items(), *sorted(self.what)),
        }


def _random(draw, *shape):
    """Numbers that are not drawn one by one: only the seed is."""
    return np.random.default_rng(draw(st.integers(0, 99))).standard_normal(shape)


def _pairs_shape(draw, B, H, S, T):
    return tuple(draw(st.sampled_from((1, n))) for n in (B, H, S, T))


def _segments(draw, B, S, T):
    """Ids that start and end anywhere, or come back; keys may have their own."""
    rises = draw(st.booleans())

    def ids(length):
        if rises:
            return np.sort(np.abs(_random(draw, B, length)) * 2).astype(np.int32)
        return (_random(draw, B, length) > 0).astype(np.int32) * 7 - 3

    found = {"q_segment_ids": ids(S)}
    if S != T or draw(st.booleans()):
        found["kv_segment_ids"] = ids(T)
    if rises:
        found["contiguous_segments"] = draw(st.booleans())
    return found


def _side(draw, length, traced):
    side = draw(st.integers(0, length))
    return np.asarray(side, np.int32) if traced and draw(st.booleans()) else side


def _layout(draw, H, S, T):
    q_block, kv_block = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    heads = draw(st.sampled_from((1, H)))
    table = _random(draw, heads, -(-S // q_block), -(-T // kv_block)) < 0.5
    return BlockLayout(q_block, kv_block, table)


def _what(draw, sizes, features):
    """Keywords that say what is computed."""
    B, S, T, H, _, _ = sizes
    what: dict[str, Any] = {}
    chosen = draw(st.sets(st.sampled_from(features), min_size=1, max_size=4))
    if "causal" in chosen:
        what["is_causal"] = True
    if "window" in chosen:
        left, right = (_side(draw, max(S, T), traced=True) for _ in range(2))
        what["window"] = draw(st.sampled_from(((left, right), (left, None), (None, right))))
    if "segments" in chosen:
        what |= _segments(draw, B, S, T)
    if "lengths" in chosen:
        lengths = draw(st.lists(st.integers(0, T), min_size=B, max_size=B))
        what["kv_lengths"] = np.array(lengths, np.int32)
    if "layout" in chosen:
        what["block_layout"] = _layout(draw, H, S, T)
    if "mask" in chosen:
        what["mask"] = _random(draw, *_pairs_shape(draw, B, H, S, T)) < 0.7
    if "bias" in chosen:
        bias = _random(draw, *_pairs_shape(draw, B, H, S, T)).astype(np.float32)
        what["bias"] = np.where(bias > 1.5, -np.inf, bias) if draw(st.booleans()) else bias
    if "dropout" in chosen:
        what |= {"dropout_rate": RATE, "broadcast_dropout": draw(st.booleans())}
    if draw(st.booleans()):
        what["scale"] = 0.3
    return what


def _axes(draw):
    """Axes of up to 8 devices: a data axis or none, any P, sometimes an axis over heads."""
    P = draw(st.sampled_from((4, 3, 2, 6, 8, 5, 7, 1)))
    axes = {"data": draw(st.integers(1, min(2, 8 // P)))} if draw(st.booleans()) else {}
    axes["seq"] = P
    if 8 // P // axes.get("data", 1) > 1 and draw(st.booleans()):
        axes["tensor"] = 2
    if draw(st.sampled_from((False, False, True))):
        axes["axis_type"] = AxisType.Explicit
    return axes


FEATURES = ("causal", "window", "segments", "lengths", "layout", "mask", "bias", "dropout")


@st.composite
def calls(draw, features=FEATURES, attention="reference"):
    """Calls of any kind."""
    K = draw(st.integers(1, 5))
    H = K * draw(st.integers(1, 10 // K))
    B, S, D = draw(st.integers(1, 3)), draw(st.integers(1, 13)), draw(st.sampled_from((2, 3, 1)))
    T = draw(st.sampled_from((S, draw(st.integers(1, 13)))))
    axes = _axes(draw)
    how = {"attention": attention, "return_lse": isinstance(attention, str)}
    if "tensor" in axes:
        how["head_axes"] = "tensor"
    else:
        own = HeadPlan.of(H, K, axes["seq"]).own_heads
        how["chunks"] = draw(st.sampled_from([n for n in range(1, own + 1) if own % n == 0]))
    how["exchange"] = draw(st.sampled_from(("auto", "all_to_all")))
    sizes = B, S, T, H, K, D
    return Call(sizes, axes, _what(draw, sizes, features), how)


@st.composite
def calls_with_halo(draw):
    """Self-attention in a static window, by what is fetched from the neighbours."""
    K = draw(st.integers(1, 3))
    H = K * draw(st.integers(1, 3))
    B, S, D = draw(st.integers(1, 3)), draw(st.integers(1, 15)), draw(st.sampled_from((2, 3)))
    axes = _axes(draw)
    sizes = B, S, S, H, K, D
    what = _what(draw, sizes, ("segments", "lengths", "mask", "bias"))
    left, right = _side(draw, S, traced=False), _side(draw, S, traced=False)
    causal = draw(st.booleans())
    what |= {"is_causal": causal, "window": (left, None if causal else right)}
    how = {"attention": "reference", "return_lse": True, "exchange": "halo"}
    if "tensor" in axes:
        how["head_axes"] = "tensor"
    return Call(sizes, axes, what, how)


@pytest.fixture(scope="module")
def check(arrays, make_axes, gradients_of, definition, assert_equal):
    passed = set()

    def run(call):
        # Hypothesis varies what it has drawn, but every call costs a program of its own.
        assume(not call.marks() & passed)
        numbers = arrays(*call.sizes)
        if not call.how["return_lse"]:
            numbers = numbers._replace(dlse=0 * numbers.dlse)
        keywords = call.what | call.how
        if "dropout_rate" in call.what:
            keywords["dropout_rng"] = jax.random.key(SEED)
        attend = partial(ulysses_attention, mesh=make_axes(**call.axes))
        found = gradients_of(attend, numbers, **keywords)
        defined = {name: x for name, x in call.what.items() if name != "contiguous_segments"}
        expected = definition(numbers, dropout_seed=SEED, **defined)
        if not call.how["return_lse"]:
            del expected["lse"]
        assert_equal(found, expected)
        passed.update(call.marks())

    return run


@draws(56)
@given(calls())
def test_any_call_equals_the_definition(check, call):
    check(call)


@draws(26)
@given(calls_with_halo())
def test_any_window_fetched_from_the_neighbours_equals_the_definition(check, call):
    check(call)


@draws(8)
@given(calls(attention="blockwise"))
def test_any_call_of_blockwise_attention_equals_the_definition(check, call):
    check(call)


@draws(8)
@given(calls(FEATURES[:-1], attention=jax.nn.dot_product_attention))
def test_any_call_of_a_users_function_equals_the_definition(check, call):
    check(call)
