"""Verdicts of the leakage probe on changes that are given, and the places that it picks."""

import numpy as np
import pytest

from ulysses_jax.verification.case import Case
from ulysses_jax.verification.leakage import Reach, judge_leakage, probe_places
from ulysses_jax.verification.places import Sequences
from ulysses_jax.verification.tokens import change_of_places, exchange_tokens

SEQUENCES = Sequences(6, 3)
PLACE = (1, 2)


def _case(**declared):
    tokens = np.arange(12).reshape(2, 6)
    segments = np.array([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 2, 2]])
    return Case(lambda *_: None, {"tokens": tokens, "segments": segments}, None, **declared)


def _judge(sharded, single=None, **declared):
    """The verdict on changes at these {(row, token): size}; both runs alike by default."""
    sizes = []
    for places in (sharded, sharded if single is None else single):
        sizes.append(np.zeros((2, 6)))
        for place, size in places.items():
            sizes[-1][place] = size
    return judge_leakage(_case(**declared), PLACE, Reach(*sizes), 1.0, SEQUENCES)


def test_change_that_stays_where_it_may_passes():
    check = _judge({(1, 2): 1.0, (1, 3): 1e-30}, causal=True, segments="segments")
    assert check.passed
    assert check.detail == "2 of 12 outputs change with it"


@pytest.mark.parametrize(
    ("place", "declared", "reason"),
    [
        ((0, 2), {}, "another row"),
        ((1, 1), {"causal": True}, "which comes before it"),
        ((1, 4), {"segments": "segments"}, "of another segment"),
    ],
)
def test_smallest_change_where_none_may_be_fails_in_either_run(place, declared, reason):
    own, leak = {PLACE: 1.0}, {PLACE: 1.0, place: 1e-30}
    for sharded, single, seen in (
        (leak, leak, "in both runs"),
        (leak, own, "on the mesh"),
        (own, leak, "on one device"),
    ):
        check = _judge(sharded, single, **declared)
        assert not check.passed
        assert check.measured == 1
        assert check.detail == (
            f"changes row {place[0]}, {SEQUENCES.name(place[1])}, {reason}, {seen}"
        )
    if declared:
        assert _judge(leak, leak).passed


@pytest.mark.parametrize("lacking", ["sharded", "single"])
def test_output_that_follows_in_one_run_only_fails_unless_it_may_be_rounding(lacking):
    own = {PLACE: 1.0}
    for size, passes in ((2e-5, False), (1e-6, True)):
        runs = {"sharded": own | {(1, 5): size}, "single": own | {(1, 5): size}} | {lacking: own}
        check = _judge(**runs)
        assert check.passed == passes
    runs = {"sharded": own | {(1, 5): 1.0}, "single": own | {(1, 5): 1.0}} | {lacking: own}
    sees, not_in = ("on one device", "on the mesh")[:: 1 if lacking == "sharded" else -1]
    assert _judge(**runs).detail == (
        f"changes row 1, token 5, the last of part 2 of 3, {sees} but not {not_in}"
    )


def test_probe_that_changes_nothing_fails():
    check = _judge({})
    assert not check.passed
    assert check.detail == "no output changes, not even its own: the probe saw nothing"


def test_places_are_valid_distinct_and_end_with_the_last_segment():
    case = _case(segments="segments", lengths="lengths")
    case.inputs["lengths"] = np.array([6, 5])
    places = probe_places(case, SEQUENCES)
    assert places == sorted(set(places))
    assert all(case.valid_BS[place] for place in places)
    assert (1, 4) in places
    assert {(0, 0), (1, 2), (0, 1)} <= set(places)
    assert probe_places(_case(probes=[(1, 5)]), SEQUENCES) == [(1, 5)]


def test_exchanged_tokens_differ_and_are_ids_that_occur():
    tokens = np.array([[3, 7, 5], [7, 3, 4]], np.uint8)
    everywhere = exchange_tokens(tokens, np.ones((2, 3), bool))
    assert everywhere.dtype == tokens.dtype
    assert (everywhere != tokens).all()
    assert everywhere.min() >= 3
    assert everywhere.max() <= 7
    np.testing.assert_array_equal(exchange_tokens(tokens, np.zeros((2, 3), bool)), tokens)


def test_change_is_seen_in_the_last_bit_and_in_what_is_not_finite():
    before = np.array([[[1.0, 2.0]] * 5], np.float32)
    before[0, 4] = np.nan
    after = before.copy()
    after[0, 1, 1] = np.nextafter(np.float32(2), np.float32(3))
    after[0, 2, 0] = np.nan
    after[0, 3, 0] = np.inf
    change = change_of_places(before, after)
    assert change[0, 0] == 0
    assert 0 < change[0, 1] < 1e-6
    assert list(change[0, 2:]) == [np.inf, np.inf, 0]
