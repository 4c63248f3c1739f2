"""The head plan: each head has a place beside the key/value head it uses; little is wasted."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ulysses_jax.parallel.heads import HeadPlan

many = settings(max_examples=60, deadline=None, derandomize=True)
shapes = st.tuples(st.integers(1, 8), st.integers(1, 6), st.integers(1, 9))


@many
@given(shapes)
def test_every_query_slot_meets_the_key_value_head_it_uses(shape):
    kv_heads, queries, ways = shape
    heads = kv_heads * queries
    plan = HeadPlan.of(heads, kv_heads, ways)
    # Heads are numbered from 1, so that padding, which is 0, belongs to none.
    slots = np.asarray(plan.query_slots(1 + jnp.arange(heads), axis=0)).reshape(ways, -1)
    sent = np.asarray(plan.kv_slots(1 + jnp.arange(kv_heads).reshape(1, 1, -1, 1)))
    sent = sent.reshape(ways, plan.own_kv_heads)
    rows = plan.kv_of_slots(0, plan.own_heads)
    for device in range(ways):
        share = plan.own_heads // len(rows[device])
        for slot, head in enumerate(slots[device]):
            if head:
                assert sent[device][rows[device][slot // share]] == 1 + (head - 1) // queries
                assert head - 1 == plan.starts[device] + slot
    assert sorted(slots[slots > 0]) == list(range(1, heads + 1))


@many
@given(shapes)
def test_slots_are_undone(shape):
    kv_heads, queries, ways = shape
    plan = HeadPlan.of(kv_heads * queries, kv_heads, ways)
    x = jnp.arange(2 * plan.heads).reshape(2, plan.heads)
    np.testing.assert_array_equal(plan.from_query_slots(plan.query_slots(x, axis=1), axis=1), x)


@many
@given(shapes)
def test_no_device_computes_more_than_an_even_share_rounded_up(shape):
    kv_heads, queries, ways = shape
    plan = HeadPlan.of(kv_heads * queries, kv_heads, ways)
    assert plan.own_heads == -(-plan.heads // ways)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ways", "own", "own_kv"),
    [
        (6, 6, 4, 2, 2),
        (6, 2, 4, 2, 1),
        (8, 2, 8, 1, 1),
        (8, 1, 4, 2, 1),
        (28, 4, 8, 4, 1),
        (10, 2, 4, 3, 1),
        (3, 3, 8, 1, 1),
        (8, 4, 4, 2, 1),
        (12, 4, 6, 2, 2),
        (21, 7, 5, 5, 2),
        (18, 6, 4, 5, 2),
        (45, 9, 4, 12, 3),
    ],
)
def test_only_the_key_value_heads_that_a_device_needs_are_sent(heads, kv_heads, ways, own, own_kv):
    plan = HeadPlan.of(heads, kv_heads, ways)
    assert (plan.own_heads, plan.own_kv_heads) == (own, own_kv)


@many
@given(shapes)
def test_no_plan_with_an_even_share_sends_fewer_key_value_heads(shape):
    kv_heads, queries, ways = shape
    plan = HeadPlan.of(kv_heads * queries, kv_heads, ways)
    # The furthest head that so many devices can reach, if none is sent as many.
    reached = {0}
    for _ in range(ways):
        reached = {
            stop
            for start in reached
            for stop in range(start, min(start + plan.own_heads, plan.heads) + 1)
            if stop == start or (stop - 1) // queries - start // queries + 1 < plan.own_kv_heads
        }
    assert plan.heads not in reached


def test_more_devices_than_key_value_heads_move_less_each_as_they_grow():
    moved = [HeadPlan.of(32, 4, ways).elements_moved(4096 // ways, 8) for ways in (2, 4, 8, 16, 32)]
    assert moved == sorted(moved, reverse=True)
    # Repeated for every query head, the keys and values would be as large as the queries.
    assert moved[-1] < HeadPlan.of(32, 32, 16).elements_moved(4096 // 16, 8)


def test_the_plan_says_what_it_sends_and_wastes():
    assert str(HeadPlan.of(6, 2, 4)) == (
        "6 query and 2 key/value heads on 4 devices: 2 and 1 a device; "
        "4 key/value heads are sent; 1.33 × the query heads are computed"
    )


def test_query_heads_must_be_a_multiple_of_the_kv_heads():
    with pytest.raises(ValueError, match="6 query heads are not a multiple of 4"):
        HeadPlan.of(6, 4, 2)


def test_elements_moved_is_the_papers_volume_with_one_kv_head_a_query_head():
    sequence, hidden, ways = 1024, 64, 8
    plan = HeadPlan.of(8, 8, ways)
    assert plan.elements_moved(sequence // ways, hidden // 8) == 4 * sequence * hidden // ways
