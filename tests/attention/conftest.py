"""The shared base of attention tests: implementations, cases, and the definition of attention.

The definition is in float64 and pair by pair, from the meaning of a spec alone. Specs of one
structure and shape share one compiled program an implementation. Kernels that others keep run
interpreted, in float32.
"""

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ulysses_jax.attention import blockwise, pallas, reference, splash
from ulysses_jax.attention.block_layout import BlockLayout, longformer
from ulysses_jax.attention.blocks import BlockSizes
from ulysses_jax.attention.dropout import Dropout, keep, query_words
from ulysses_jax.attention.select import LocalAttention
from ulysses_jax.attention.spec import AttentionSpec

SCALE = 0.4
RESULTS = ("out", "lse", "dq", "dk", "dv", "dbias")
PAIRWISE = frozenset({"block_layout", "mask", "bias", "dropout"})
FIELDS = PAIRWISE | {"q_segment_ids", "kv_lengths", "window"}
MOST = 8, 8, 32, 32  # rows, heads, queries and keys of a model whose dropout is drawn


class Arrays(NamedTuple):
    """q, k, v, and the cotangents of output and log-sum-exp."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    dlse: np.ndarray


Results = dict[str, np.ndarray]
Compute = Callable[[Arrays, AttentionSpec], Results]


class Case(NamedTuple):
    """The sizes [B, S, T, h, g, D] of a call, and its spec."""

    sizes: tuple[int, int, int, int, int, int]
    spec: AttentionSpec

    def arrays(self) -> Arrays:
        draw = np.random.default_rng(7).standard_normal
        batch, q_len, kv_len, heads, kv_heads, dim = self.sizes
        q_shape, k_shape = (batch, q_len, heads, dim), (batch, kv_len, kv_heads, dim)
        shapes = q_shape, k_shape, k_shape, q_shape, (batch, heads, q_len)
        return Arrays(*(draw(shape).astype(np.float32) for shape in shapes))

    def features(self) -> set[str]:
        """What of this call an implementation may have to refuse."""
        _, q_len, kv_len, heads, kv_heads, _ = self.sizes
        found = {name: getattr(self.spec, name) is not None for name in FIELDS}
        found |= {"cross": q_len != kv_len, "grouped": heads != kv_heads}
        return {feature for feature, given in found.items() if given}


def _differentiated(attend: LocalAttention) -> Compute:
    def compute(arrays: Arrays, spec: AttentionSpec) -> dict[str, jax.Array]:
        q, k, v, *cotangents = arrays

        def call(q: Any, k: Any, v: Any, bias: Any) -> tuple[jax.Array, jax.Array]:
            return attend(q, k, v, dataclasses.replace(spec, bias=bias), SCALE)

        results, vjp = jax.vjp(call, q, k, v, spec.bias)
        named = dict(zip(RESULTS, (*results, *vjp(tuple(cotangents))), strict=True))
        return {name: x for name, x in named.items() if x is not None}

    return compute


@cache
def _compiled(attend: LocalAttention) -> Compute:
    return jax.jit(_differentiated(attend))


class Implementation(NamedTuple):
    """Local attention, and the features that it must refuse."""

    attend: LocalAttention
    refuses: frozenset[str] = frozenset()
    head_dim: int | None = None  # the smallest that it takes, unless it takes all

    def fitted(self, case: Case) -> Case:
        dim = self.head_dim or case.sizes[5]
        return case._replace(sizes=(*case.sizes[:5], dim))

    def compute(self, arrays: Arrays, spec: AttentionSpec) -> Results:
        """Compiled results and gradients."""
        return _compiled(self.attend)(arrays, spec)


IMPLEMENTATIONS = {
    "blockwise": Implementation(partial(blockwise.attend, blocks=BlockSizes(8, 5))),
    "reference": Implementation(reference.attend),
    "pallas": Implementation(
        partial(pallas.attend, interpret=True),
        PAIRWISE | {"kv_lengths", "window", "cross", "grouped"},
        head_dim=8,
    ),
    # The windows of cases are traced, which splash does not take.
    "splash": Implementation(partial(splash.attend, interpret=True), PAIRWISE | {"window"}),
}


def _ids(*lengths: int) -> np.ndarray:
    # Not sorted: only equality may matter.
    return np.repeat(np.array([5, 2, 9, 0, 7, 1], np.int32)[: len(lengths)], lengths)


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(11).standard_normal(shape).astype(np.float32)


def _ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


SELF = (3, 23, 23, 6, 2, 5)
UNGROUPED = (3, 23, 23, 2, 2, 5)
# More than one block of 128, which is the smallest of some kernels.
LONG = (2, 137, 137, 2, 2, 5)
CROSS = (2, 11, 17, 4, 2, 3)
KEY = np.array([3, 141], np.uint32)
WHOLE = [_ids(23)] * 3
DOCUMENTS = [_ids(5, 11, 7), _ids(23), _ids(1, 1, 20, 1)]
RECURRING = [np.resize(_ints(4, 4, 1, 7), 23), np.resize(_ints(2, 2, 2, 0, 2), 23), _ids(9, 14)]
TABLES = np.random.default_rng(5).random((7, 3, 4)) < 0.5


def _packed(causal: bool, ids: list[np.ndarray], lengths: list[int]) -> Case:
    spec = AttentionSpec(causal, np.stack(ids), None, _ints(*lengths), contiguous_segments=True)
    return Case(SELF, spec)


def _self(**fields: Any) -> Case:
    return Case(SELF, AttentionSpec(**fields))


def _cross(**fields: Any) -> Case:
    return Case(CROSS, AttentionSpec(**fields))


def _everything(
    ids: np.ndarray, lengths: np.ndarray, window: tuple[int, int], mask: np.ndarray, bias: float
) -> Case:
    """All features at once, on the shapes of CROSS; `ids` are of 11 queries, then 17 keys."""
    return _cross(
        causal=True,
        q_segment_ids=ids[:, :11],
        kv_segment_ids=ids[:, 11:],
        kv_lengths=lengths,
        window=window,
        block_layout=BlockLayout(4, 5, TABLES | np.eye(3, 4, dtype=bool)),
        mask=mask,
        bias=bias * _random(1, 4, 11, 17),
        dropout=Dropout(rate=0.4, key=KEY),
        first_row=_ints(2)[0],
        first_head=_ints(3)[0],
    )


def _striped(length: int) -> np.ndarray:
    """Scores of -inf at every third key, and in all of query 4."""
    bias = _random(1, 1, length, length)
    bias[..., ::3] = bias[:, :, 4] = -np.inf
    return bias


CASES: dict[str, Case] = {
    "everything attended": _packed(False, WHOLE, [23, 23, 23]),
    "lengths, one of them 0": _packed(False, WHOLE, [0, 7, 22]),
    "documents": _packed(False, DOCUMENTS, [23, 23, 23]),
    "causal": _packed(True, WHOLE, [23, 23, 23]),
    "causal documents with lengths": _packed(True, DOCUMENTS, [14, 0, 23]),
    "no condition": Case(UNGROUPED, AttentionSpec()),
    "recurring segments": Case(UNGROUPED, AttentionSpec(q_segment_ids=np.stack(RECURRING))),
    "rising segments": Case(
        UNGROUPED, AttentionSpec(q_segment_ids=np.stack([np.arange(23, dtype=np.int32) // 6] * 3))
    ),
    "causal recurring segments, over blocks": Case(
        LONG,
        AttentionSpec(
            True, np.stack([np.resize(_ints(4, 4, 1), 137), np.resize(_ids(60, 29), 137)])
        ),
    ),
    "causal, other segments of keys": _cross(
        causal=True,
        q_segment_ids=np.stack([_ids(6, 1, 4)] * 2),
        kv_segment_ids=np.stack([np.resize(_ints(5, 2), 17), _ids(3, 2, 12)]),
    ),
    "causal, more queries": Case((2, 17, 7, 2, 1, 3), AttentionSpec(True)),
    "one token": Case((2, 1, 1, 2, 1, 3), AttentionSpec(True)),
    "window": _self(window=(3, 6)),
    "window of the query alone": _self(window=(0, 0)),
    "window without end": _self(window=(40, 2**31 - 1)),
    "window of one side, more keys": _cross(window=(None, 2)),
    "causal window": _cross(causal=True, window=(4, None)),
    "layout": _self(block_layout=longformer(23, 4, global_blocks=(2,))),
    "layout of each head, from the fourth on": Case(
        (2, 11, 17, 2, 2, 3), AttentionSpec(block_layout=BlockLayout(4, 5, TABLES), first_head=3)
    ),
    "mask": _cross(mask=_random(2, 4, 11, 17) < 0.3),
    "bias": _cross(bias=_random(2, 4, 11, 17)),
    "bias that rules out": _self(bias=_striped(23)),
    "mask of keys, bias of queries": _cross(
        mask=_random(1, 1, 1, 17) < 0.3, bias=_random(2, 1, 11, 1)
    ),
    "mask of queries, bias of heads": _cross(
        mask=_random(2, 1, 11, 1) < 0.3, bias=_random(1, 4, 1, 1)
    ),
    "dropout": _cross(dropout=Dropout(rate=0.5, key=KEY), first_row=3, first_head=2),
    "dropout shared by rows and heads": _cross(
        dropout=Dropout(rate=0.5, key=KEY, broadcast=True), first_row=3, first_head=2
    ),
    "everything": _everything(
        np.resize(_ints(1, 1, 1, 0, 1), (2, 28)),
        _ints(15, 9),
        (6, 2),
        _random(2, 4, 11, 17) < 0.8,
        2.0,
    ),
}


@pytest.fixture(scope="session")
def cases() -> dict[str, Case]:
    return CASES


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="session", params=["blockwise", "reference"])
def implementation(request: pytest.FixtureRequest) -> Implementation:
    """Those that take every spec."""
    return IMPLEMENTATIONS[request.param]


@pytest.fixture(scope="session", params=IMPLEMENTATIONS)
def any_implementation(request: pytest.FixtureRequest) -> Implementation:
    return IMPLEMENTATIONS[request.param]


@pytest.fixture(scope="session")
def differentiated() -> Callable[[LocalAttention], Compute]:
    """Makes a function of arrays and spec that gives the results and all gradients."""
    return _differentiated


@pytest.fixture(scope="session")
def compute(implementation: Implementation) -> Compute:
    return implementation.compute


@pytest.fixture(scope="session")
def assert_equal() -> Callable[[Results, Results, float], None]:
    """Equal to a tolerance times the largest finite entry; infinities in the same places."""

    def check(actual: Results, expected: Results, tolerance: float) -> None:
        assert set(actual) == set(expected)
        for name, y in expected.items():
            largest = np.max(np.abs(y), where=np.isfinite(y), initial=1e-30)
            x = np.asarray(actual[name], np.float64)
            np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * largest, err_msg=name)

    return check


@jax.jit
def _draws(dropout: Dropout) -> jax.Array:
    """Which pairs are kept, by global row, head, query and key."""
    words = query_words(dropout, *(jnp.arange(n) for n in MOST[:3]))
    return keep(words[..., None, :], jnp.arange(MOST[3]), dropout.rate)


def _factors(spec: AttentionSpec, batch: int, heads: int, q_len: int, kv_len: int) -> np.ndarray:
    """What dropout multiplies each weight with, [B, h, S, T], drawn for the whole model."""
    if spec.dropout is None:
        return np.ones((batch, heads, q_len, kv_len))
    row, head = int(spec.first_row), int(spec.first_head)
    kept = np.asarray(_draws(spec.dropout))
    kept = kept[row : row + batch, head : head + heads, :q_len, :kv_len]
    assert kept.shape == (batch, heads, q_len, kv_len)
    return kept / (1 - spec.dropout.rate)


def _entry(array: np.ndarray, *index: int) -> np.generic:
    return array[tuple(0 if n == 1 else i for n, i in zip(array.shape, index, strict=True))]


def attended(spec: AttentionSpec, b: int, head: int, i: int, j: int) -> bool:
    """Whether query i of row b and head may look at key j."""
    if spec.causal and j > i:
        return False
    left, right = spec.window or (None, None)
    if (left is not None and j < i - int(left)) or (right is not None and j > i + int(right)):
        return False
    if spec.kv_lengths is not None and j >= spec.kv_lengths[b]:
        return False
    if spec.q_segment_ids is not None:
        kv_ids = spec.q_segment_ids if spec.kv_segment_ids is None else spec.kv_segment_ids
        if spec.q_segment_ids[b, i] != kv_ids[b, j]:
            return False
    if spec.block_layout is not None:
        layout = spec.block_layout
        place = int(spec.first_head) + head, i // layout.q_block, j // layout.kv_block
        if not _entry(layout.attended, *place):
            return False
    if spec.mask is not None and not _entry(spec.mask, b, head, i, j):
        return False
    return spec.bias is None or _entry(spec.bias, b, head, i, j) != -np.inf


@pytest.fixture(scope="session")
def pairs() -> Callable[..., np.ndarray]:
    """Which pairs of a spec are attended, one by one: bool [B, h, S, T]."""

    def table(spec: AttentionSpec, shape: tuple[int, int, int, int]) -> np.ndarray:
        return np.reshape([attended(spec, *place) for place in np.ndindex(shape)], shape)

    return table


@pytest.fixture(scope="session")
def definition(pairs: Callable[..., np.ndarray]) -> Compute:
    """out, lse, dq, dk, dv, and dbias where there is a bias, of one call."""

    def define(arrays: Arrays, spec: AttentionSpec) -> Results:
        q, k, v, dout, dlse = (np.asarray(x, np.float64) for x in arrays)
        batch, q_len, heads, _ = q.shape
        kv_len, kv_heads = k.shape[1:3]
        table = pairs(spec, (batch, heads, q_len, kv_len))
        factors = _factors(spec, batch, heads, q_len, kv_len)
        out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
        lse = np.full((batch, heads, q_len), -np.inf)
        dbias = None if spec.bias is None else np.zeros(spec.bias.shape)
        for b, i, head in np.ndindex(batch, q_len, heads):
            keys = np.flatnonzero(table[b, head, i])
            if not keys.size:
                continue
            at, query, shared = (b, keys, head // (heads // kv_heads)), (b, i, head), (b, head, i)
            scores = SCALE * k[at] @ q[query]
            if spec.bias is not None:
                scores += [float(_entry(spec.bias, b, head, i, j)) for j in keys]
            lse[shared] = np.log(np.sum(np.exp(scores - scores.max()))) + scores.max()
            weights, factor = np.exp(scores - lse[shared]), factors[b, head, i, keys]
            out[query] = (factor * weights) @ v[at]
            dweights = factor * (v[at] @ dout[query])
            dscores = weights * (dweights - out[query] @ dout[query] + dlse[shared])
            dq[query] = SCALE * dscores @ k[at]
            dk[at] += SCALE * np.outer(dscores, q[query])
            dv[at] += np.outer(factor * weights, dout[query])
            if dbias is not None:
                for j, dscore in zip(keys, dscores, strict=True):
                    place = zip(dbias.shape, (b, head, i, j), strict=True)
                    dbias[tuple(0 if n == 1 else x for n, x in place)] += dscore
        results = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
        return results if dbias is None else results | {"dbias": dbias}

    return define
