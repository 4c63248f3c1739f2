"""What a layer moves, read off its compiled program, is what the formulas say, and no more."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ulysses_jax import make_mesh, ulysses_attention
from ulysses_jax.parallel.collectives import collectives
from ulysses_jax.parallel.order import after

B, S, D = 2, 24, 4


def _program(ways, heads, kv_heads, **options):
    """The compiled text of a layer, forward and backward, on arrays that lie as it wants them."""
    mesh = make_mesh(1, ways)
    split = NamedSharding(mesh, PartitionSpec("data", "seq"))

    def layer(q, k, v):
        out, vjp = jax.vjp(lambda *x: ulysses_attention(*x, mesh, **options), q, k, v)
        return out, vjp(jnp.cos(out))

    shapes = [(B, S, count, D) for count in (heads, kv_heads, kv_heads)]
    arrays = [jax.ShapeDtypeStruct(shape, np.float32, sharding=split) for shape in shapes]
    return jax.jit(layer, out_shardings=split).lower(*arrays).compile().as_text()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ways", "query_slots", "kv_slots"),
    [
        pytest.param(8, 8, 4, 8, 8, id="as many kv heads as heads"),
        pytest.param(8, 4, 2, 8, 4, id="no more devices than kv heads"),
        pytest.param(8, 2, 8, 8, 8, id="more devices than kv heads: one each"),
        pytest.param(6, 6, 4, 8, 8, id="padded heads"),
        pytest.param(6, 2, 4, 8, 4, id="padded heads, each device one kv head"),
    ],
)
def test_bytes_of_a_layer_equal_the_formula(heads, kv_heads, ways, query_slots, kv_slots):
    program = _program(ways, heads, kv_heads, attention="reference")
    found = collectives(program)
    own_tokens = B * S // ways
    together = own_tokens * D * (query_slots + 2 * kv_slots)
    # q, k and v together, and the output; forward and backward. With 8 slots each, and h the width
    # of all heads, the four forward ones are the 4Nh/P of the paper's table 1.
    assert all(c.runs == 1 for c in found)
    sent = Counter((c.kind, c.elements) for c in found)
    assert sent == {("all-to-all", together): 2, ("all-to-all", own_tokens * D * query_slots): 2}
    if heads == kv_heads == query_slots:
        assert together + own_tokens * D * query_slots == 4 * B * S * heads * D // ways
    # 4 bytes an element.
    assert set(re.findall(r"= \(?([a-z]+\d+)\[.* all-to-all\(", program)) == {"f32"}


@pytest.mark.parametrize("window", [(5, 0), (2, 3), (9, 0)])
@pytest.mark.parametrize("exchange", ["halo", "auto"])
def test_a_window_moves_its_own_keys_whatever_the_sequence(window, exchange):
    ways, kv_heads = 4, 2
    found = collectives(_program(ways, 4, kv_heads, window=window, exchange=exchange))
    assert {c.kind for c in found} == {"collective-permute"}
    # k and v there, their gradients back; no more than the window, in any number of hops.
    assert sum(c.elements for c in found) == 2 * B * sum(window) * 2 * kv_heads * D


def _exchanges_before(program):
    """For each all-to-all of a program without loops, those that it waits for."""
    entry = program[program.index("ENTRY") :]
    lines = dict(re.findall(r"^ +(?:ROOT )?%([\w.\-]+) = (.*)$", entry, re.MULTILINE))
    operands = {
        name: [x for x in re.findall(r"%([\w.\-]+)", line) if x in lines]
        for name, line in lines.items()
    }
    exchanges = {name for name, line in lines.items() if " all-to-all(" in line}

    def before(name, seen):
        for operand in operands[name]:
            if operand not in seen:
                seen.add(operand)
                before(operand, seen)
        return seen

    return {name: before(name, set()) & exchanges for name in exchanges}


def test_a_group_of_heads_waits_for_the_attention_two_groups_before_and_no_other():
    mesh = make_mesh(1, 2)
    q = jax.ShapeDtypeStruct((1, 8, 8, D), np.float32)

    def layer(q, k, v):
        return ulysses_attention(q, k, v, mesh, attention="reference", chunks=4)

    waits = _exchanges_before(jax.jit(layer).lower(q, q, q).compile().as_text())
    # Four groups, each with an exchange there and one back, for which nothing waits.
    there = sorted(
        (name for name in waits if any(name in before for before in waits.values())),
        key=lambda name: len(waits[name]),
    )
    assert len(waits) == 8
    assert [len(waits[name]) for name in there] == [0, 0, 1, 1]
    first, second, third, fourth = there
    assert {*waits[third], *waits[fourth]} == {first, second}


def test_the_gradient_of_a_group_waits_for_that_of_the_group_two_after_and_no_other():
    waits = _exchanges_before(_program(2, 8, 8, attention="reference", chunks=4))
    # All that is exchanged back waits for the eight exchanges forward, and the gradients of q, k
    # and v for one more: that of their own group's cotangent.
    gradients = {name for name, before in waits.items() if len(before) > 8}
    assert sorted(len(waits[name] & gradients) for name in gradients) == [0, 0, 1, 1]


def test_no_group_of_heads_costs_more_to_move_than_all_together():
    whole, split = (collectives(_program(2, 8, 4, attention="reference", chunks=n)) for n in (1, 2))
    assert sum(c.elements for c in whole) == sum(c.elements for c in split)
    assert len(split) == 2 * len(whole)


def test_what_waits_is_unchanged_bit_for_bit_and_so_is_its_gradient():
    x = jnp.asarray([0.0, -0.0, 3.0, -jnp.inf])
    for awaited in (2.0, -2.0, jnp.inf, jnp.nan):
        y, vjp = jax.vjp(after, [x], jnp.full((2, 3), awaited))
        gradient, nothing = vjp(y)
        np.testing.assert_array_equal(np.signbit(y[0]), np.signbit(x))
        np.testing.assert_array_equal(y[0], x)
        np.testing.assert_array_equal(gradient[0], x)
        np.testing.assert_array_equal(nothing, jnp.zeros((2, 3)))
