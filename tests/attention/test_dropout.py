"""Dropout draws pairs independently at its rate, and the same pairs however they are split.

Statistics are of fixed draws; each limit is one that a random draw passes with 5 sigma or more.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ulysses_jax.attention.dropout import Dropout, keep, query_words

ROWS, HEADS, QUERIES, KEYS = 3, 4, 64, 1024
RATES = (0.1, 0.5)
SIGMAS = 5.0


@partial(jax.jit, static_argnums=range(1, 5))
def _drawn(
    dropout: Dropout,
    rows: tuple[int, int] = (0, ROWS),
    heads: tuple[int, int] = (0, HEADS),
    queries: tuple[int, int] = (0, QUERIES),
    keys: tuple[int, int] = (0, KEYS),
) -> jax.Array:
    words = query_words(dropout, *(jnp.arange(*x) for x in (rows, heads, queries)))
    return keep(words[..., None, :], jnp.arange(*keys), dropout.rate)


def _normalised(rate: float, seed: int = 0) -> np.ndarray:
    """Draws [B, h, S, T] of mean 0 and variance 1."""
    kept = np.asarray(_drawn(Dropout(rate=rate, key=jax.random.key(seed))), np.float64)
    return (kept - (1 - rate)) / np.sqrt(rate * (1 - rate))


def _assert_standard_normal(z: np.ndarray, furthest: float = SIGMAS + 0.5) -> None:
    """Sums of many independent draws: none too far out, and as spread as they should be."""
    assert np.abs(z).max() < furthest
    assert abs(np.mean(z**2) - 1) < SIGMAS * np.sqrt(2 / z.size)


every_rate = pytest.mark.parametrize("rate", RATES)


@every_rate
@pytest.mark.parametrize("axis", ["row", "head", "query", "key"])
def test_every_row_head_query_and_key_is_kept_at_the_rate(rate: float, axis: str) -> None:
    place = ["row", "head", "query", "key"].index(axis)
    x = np.moveaxis(_normalised(rate), place, 0)
    _assert_standard_normal(x.reshape(len(x), -1).sum(axis=1) / np.sqrt(x[0].size))


def test_every_seed_and_rate_keeps_its_share() -> None:
    for rate in (0.02, 0.3, 0.9):
        z = [_normalised(rate, seed).sum() / np.sqrt(x) for seed, x in ((1, 786432), (2, 786432))]
        assert np.abs(z).max() < SIGMAS


@every_rate
def test_how_many_keys_a_query_keeps_varies_as_independent_draws_do(rate: float) -> None:
    _assert_standard_normal(_normalised(rate).sum(axis=-1) / np.sqrt(KEYS))


@every_rate
@pytest.mark.parametrize("distance", [1, 2, 3, 4, 8, 16, 64, 128, 256, 512])
def test_keys_at_any_distance_are_independent_in_each_query(rate: float, distance: int) -> None:
    """Each query by itself: dependences of opposite signs would cancel in a mean over queries."""
    x = _normalised(rate)
    for other in (np.arange(KEYS) + distance, np.arange(KEYS) ^ distance):
        # A pair that an exclusive or makes twice is counted once.
        key = np.flatnonzero((other < KEYS) & (other > np.arange(KEYS)))
        products = x[..., key] * x[..., other[key]]
        _assert_standard_normal(products.sum(axis=-1) / np.sqrt(key.size))


@every_rate
def test_any_two_rows_heads_and_queries_are_independent(rate: float) -> None:
    x = _normalised(rate).reshape(-1, KEYS)
    correlation = x @ x.T / np.sqrt(KEYS)
    # Products of rare drops are skewed: of this many, numpy's own reach 6 sigma.
    _assert_standard_normal(correlation[np.triu_indices(len(x), 1)], SIGMAS + 1.5)


@every_rate
def test_queries_whose_first_words_nearly_agree_do_not_drop_the_same(rate: float) -> None:
    """By the first word alone, one query would drop what another drops, at permuted keys."""
    draw = np.random.default_rng(6)
    nearly = np.uint32(0x9E3779B9) ^ np.arange(128, dtype=np.uint32)
    words = np.stack([nearly, draw.integers(0, 2**32, 128, dtype=np.uint32)], axis=1)
    kept = np.asarray(keep(jnp.asarray(words)[:, None], jnp.arange(KEYS), rate))
    x = (kept - (1 - rate)) / np.sqrt(rate * (1 - rate))
    aligned = np.take_along_axis(x, np.arange(KEYS) ^ np.arange(128)[:, None], axis=1)
    for rows in (x, aligned):
        correlation = rows @ rows.T / np.sqrt(KEYS)
        _assert_standard_normal(correlation[np.triu_indices(128, 1)], SIGMAS + 1.5)


def test_seeds_are_independent() -> None:
    x, y = (_normalised(0.5, seed).reshape(-1, KEYS) for seed in (0, 1))
    _assert_standard_normal(np.sum(x * y, axis=1) / np.sqrt(KEYS))


@every_rate
def test_runs_of_kept_keys_have_the_lengths_of_independent_draws(rate: float) -> None:
    """Chi-square of run lengths against the geometric distribution."""
    kept = np.asarray(_drawn(Dropout(rate=rate, key=jax.random.key(3)))).reshape(-1, KEYS)
    flat = np.pad(kept, ((0, 0), (1, 1))).astype(np.int8)
    lengths = []
    for row in flat:
        edges = np.flatnonzero(np.diff(row))
        # The first and last run may be cut by the ends.
        lengths.append(np.diff(edges.reshape(-1, 2), axis=1)[1:-1, 0])
    found = np.concatenate(lengths)
    p = 1 - rate
    bins = np.arange(1, int(np.log(50 / found.size) / np.log(p)))
    counts = np.bincount(np.minimum(found, bins[-1] + 1), minlength=bins[-1] + 2)[1:]
    shares = np.append(rate * p ** (bins - 1), p ** bins[-1])
    expected = found.size * shares
    chi_square = np.sum((counts - expected) ** 2 / expected)
    assert abs(chi_square - bins.size) < SIGMAS * np.sqrt(2 * bins.size)


@every_rate
def test_patterns_of_eight_keys_are_as_frequent_as_independent_draws_make_them(
    rate: float,
) -> None:
    """Chi-square over the 256 patterns that aligned groups of 8 keys can show."""
    kept = np.asarray(_drawn(Dropout(rate=rate, key=jax.random.key(4)))).reshape(-1, 8)
    counts = np.bincount(kept @ (1 << np.arange(8)), minlength=256)
    ones = np.array([pattern.bit_count() for pattern in range(256)])
    expected = len(kept) * (1 - rate) ** ones * rate ** (8 - ones)
    frequent = expected > 5
    chi_square = np.sum((counts - expected)[frequent] ** 2 / expected[frequent])
    degrees = frequent.sum() - 1
    assert abs(chi_square - degrees) < SIGMAS * np.sqrt(2 * degrees)


def test_far_positions_are_drawn_as_well_as_near_ones() -> None:
    far = 2**20 - 64
    kept = _drawn(
        Dropout(rate=0.5, key=jax.random.key(5)), queries=(far, far + 64), keys=(far, far + KEYS)
    )
    x = 2.0 * np.asarray(kept).reshape(-1, KEYS) - 1
    _assert_standard_normal(x.sum(axis=1) / np.sqrt(KEYS))
    _assert_standard_normal((x @ x.T / np.sqrt(KEYS))[np.triu_indices(len(x), 1)])


def test_the_same_pairs_are_drawn_however_they_are_split() -> None:
    dropout = Dropout(rate=0.3, key=jax.random.key(6))
    whole = np.asarray(_drawn(dropout))
    part = _drawn(dropout, rows=(1, 3), heads=(2, 3), queries=(5, 31), keys=(100, 107))
    np.testing.assert_array_equal(part, whole[1:3, 2:3, 5:31, 100:107])


def test_broadcast_dropout_draws_once_for_all_rows_and_heads() -> None:
    key = jax.random.key(7)
    kept = np.asarray(_drawn(Dropout(rate=0.3, key=key, broadcast=True)))
    assert (kept == kept[:1, :1]).all()
    assert not (kept[0, 0] == kept[0, 0, 0]).all()
    np.testing.assert_array_equal(kept[0, 0], _drawn(Dropout(rate=0.3, key=key))[0, 0])


def test_any_kind_of_key_is_a_seed() -> None:
    keys = jax.random.key(8), jax.random.key_data(jax.random.key(8)), jax.random.key(8, impl="rbg")
    new, raw, rbg = (np.asarray(_drawn(Dropout(rate=0.5, key=key))) for key in keys)
    np.testing.assert_array_equal(new, raw)
    assert abs(np.mean(new == rbg) - 0.5) < SIGMAS * 0.5 / np.sqrt(new.size)


def test_no_dropout_keeps_everything() -> None:
    assert np.asarray(_drawn(Dropout(rate=0.0, key=jax.random.key(9)))).all()


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match=f"rate is {rate}: use a number from 0"):
        Dropout(rate=rate, key=jax.random.key(0))
