"""Attention as it is defined, in float64 and without JAX, and calls of the layer with gradients."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from ulysses_jax.attention.dropout import Dropout, keep, query_words

RESULTS = ("out", "lse", "dq", "dk", "dv", "dbias")
MOST = 4, 12, 16, 16  # rows, heads, queries and keys whose dropout is drawn

Results = dict[str, np.ndarray]


class Arrays(NamedTuple):
    """q, k, v, and the cotangents of output and log-sum-exp."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    dlse: np.ndarray


@pytest.fixture(scope="session")
def arrays() -> Callable[..., Arrays]:
    """Draws those of a call with sizes B, S, T, H, K, D."""

    def make(B: int, S: int, T: int, H: int, K: int, D: int) -> Arrays:
        normal = np.random.default_rng(7).standard_normal
        shapes = (B, S, H, D), (B, T, K, D), (B, T, K, D), (B, S, H, D), (B, H, S)
        return Arrays(*(normal(shape).astype(np.float32) for shape in shapes))

    return make


@pytest.fixture(scope="session")
def make_axes() -> Callable[..., Mesh]:
    """Makes a mesh of the first devices from names and sizes of its axes."""

    def make(axis_type: AxisType = AxisType.Auto, **sizes: int) -> Mesh:
        types = (axis_type,) * len(sizes)
        count = int(np.prod(list(sizes.values())))
        return jax.make_mesh(
            tuple(sizes.values()), tuple(sizes), axis_types=types, devices=jax.devices()[:count]
        )

    return make


@pytest.fixture(scope="session")
def gradients_of() -> Callable[..., Results]:
    """Compiles and runs `attend(q, k, v, **keywords)` with its gradients, as one program.

    numpy and JAX arrays among the keywords are traced. Without `return_lse` there is no `lse`.
    """

    def compute(attend: Callable[..., Any], given: Arrays, **keywords: Any) -> Results:
        leaves, tree = jax.tree.flatten(keywords, is_leaf=lambda x: x is None)
        traced = {n: x for n, x in enumerate(leaves) if isinstance(x, np.ndarray | jax.Array)}
        returns_lse = keywords.get("return_lse", False)

        def program(given: Arrays, traced: dict[int, Any]) -> dict[str, Any]:
            known = jax.tree.unflatten(tree, [traced.get(n, x) for n, x in enumerate(leaves)])

            def call(q: Any, k: Any, v: Any, bias: Any) -> Any:
                return attend(q, k, v, **known | ({} if bias is None else {"bias": bias}))

            results, vjp = jax.vjp(call, *given[:3], known.get("bias"))
            if returns_lse:
                found = *results, *vjp((given.dout, given.dlse))
            else:
                found = results, None, *vjp(given.dout)
            named = zip(RESULTS, found, strict=True)
            return {name: x for name, x in named if x is not None}

        return jax.jit(program)(given, traced)

    return compute


@pytest.fixture(scope="session")
def assert_equal() -> Callable[[Results, Results], None]:
    """Equal to 1e-5 of the largest finite entry, or of a tenth; infinities in the same places."""

    def check(actual: Results, expected: Results) -> None:
        assert set(actual) == set(expected)
        for name, y in expected.items():
            largest = np.max(np.abs(y), where=np.isfinite(y), initial=0.1)
            x = np.asarray(actual[name], np.float64)
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * largest, err_msg=name)

    return check


@cache
def _kept(rate: float, seed: int, broadcast: bool) -> np.ndarray:
    """Which pairs are kept, by global row, head, query and key."""

    def draw(key: jax.Array) -> jax.Array:
        dropout = Dropout(rate=rate, key=key, broadcast=broadcast)
        words = query_words(dropout, *(jnp.arange(n) for n in MOST[:3]))
        return keep(words[..., None, :], jnp.arange(MOST[3]), rate)

    return np.asarray(jax.jit(draw)(jax.random.key(seed)))


@pytest.fixture(scope="session")
def definition() -> Callable[..., Results]:
    """out, lse, dq, dk, dv, and dbias where there is a bias.

    Keywords are those of `ulysses_attention` that say what is computed. The key of dropout is that
    of an integer `dropout_seed`.
    """
    return _define


def _define(
    given: Arrays,
    *,
    scale: float | None = None,
    bias: np.ndarray | None = None,
    dropout_rate: float = 0.0,
    dropout_seed: int = 0,
    broadcast_dropout: bool = False,
    **conditions: Any,
) -> Results:
    q, k, v, dout, dlse = (np.asarray(x, np.float64) for x in given)
    B, S, H, D = q.shape
    T, K = k.shape[1:3]
    used = np.arange(H) // (H // K)
    k_BTHD, v_BTHD = k[:, :, used], v[:, :, used]
    scale = D**-0.5 if scale is None else scale
    factor = np.ones((B, H, S, T))
    if dropout_rate:
        kept = _kept(dropout_rate, dropout_seed, broadcast_dropout)[:B, :H, :S, :T]
        assert kept.shape == factor.shape
        factor = kept / (1 - dropout_rate)

    pairs = _attended((B, H, S, T), **conditions)
    score = scale * np.einsum("bshd,bthd->bhst", q, k_BTHD)
    if bias is not None:
        score = score + bias
    score = np.where(pairs, score, -np.inf)
    empty = ~np.isfinite(score).any(-1)
    highest = np.where(empty, 0, score.max(-1))
    total = np.exp(score - highest[..., None]).sum(-1)
    lse = np.where(empty, -np.inf, highest + np.log(np.where(empty, 1, total)))
    weight = np.exp(score - np.where(empty, 0, lse)[..., None])

    out = np.einsum("bhst,bthd->bshd", factor * weight, v_BTHD)
    dweight = factor * np.einsum("bshd,bthd->bhst", dout, v_BTHD)
    inner = np.einsum("bshd,bshd->bhs", dout, out)
    dscore = weight * (dweight - inner[..., None] + dlse[..., None])
    dq = scale * np.einsum("bhst,bthd->bshd", dscore, k_BTHD)
    dk = scale * np.einsum("bhst,bshd->bthd", dscore, q)
    dv = np.einsum("bhst,bshd->bthd", factor * weight, dout)
    dk, dv = (x.reshape(B, T, K, H // K, D).sum(3) for x in (dk, dv))
    results = dict(zip(RESULTS, (out, lse, dq, dk, dv), strict=False))
    if bias is not None:
        shared = tuple(axis for axis, size in enumerate(bias.shape) if size == 1)
        results["dbias"] = dscore.sum(shared, keepdims=True)
    return results


def _attended(
    shape: tuple[int, int, int, int],
    *,
    is_causal: bool = False,
    window: tuple[Any, Any] | None = None,
    q_segment_ids: np.ndarray | None = None,
    kv_segment_ids: np.ndarray | None = None,
    kv_lengths: np.ndarray | None = None,
    block_layout: Any = None,
    mask: np.ndarray | None = None,
) -> np.ndarray:
    """Whether query i of row b and head h may look at key j, by what each keyword means."""
    b, h, i, j = np.ogrid[tuple(slice(n) for n in shape)]
    pairs = np.ones(shape, bool)
    if is_causal:
        pairs &= j <= i
    left, right = window or (None, None)
    if left is not None:
        pairs &= j >= i - int(left)
    if right is not None:
        pairs &= j <= i + int(right)
    if q_segment_ids is not None:
        kv_ids = q_segment_ids if kv_segment_ids is None else kv_segment_ids
        pairs &= q_segment_ids[b, i] == kv_ids[b, j]
    if kv_lengths is not None:
        pairs &= j < kv_lengths[b]
    if block_layout is not None:
        table = block_layout.attended
        head = h if len(table) > 1 else 0
        pairs &= table[head, i // block_layout.q_block, j // block_layout.kv_block]
    if mask is not None:
        pairs &= mask
    return pairs
