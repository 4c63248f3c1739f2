"""Reading collectives from program text: loops, trip counts, and both forms of an all-to-all."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from ulysses_jax.parallel.collectives import Collective, collectives
from ulysses_jax.parallel.mesh import SEQ, make_mesh

ASYNCHRONOUS = """
%body (arg: (s32[], bf16[4,2])) -> (s32[], bf16[4,2]) {
  %a2a = ((bf16[4,2], bf16[4,2]), (bf16[4,2], bf16[4,2])) all-to-all-start(%x, %y), dimensions={0}
  %done = (bf16[4,2], bf16[4,2]) all-to-all-done(%a2a)
}

ENTRY %main (p: bf16[4,2]) -> bf16[4,2] {
  %loop = (s32[], bf16[4,2]) while(%t), condition=%cond, body=%body, backend_config={"x":1}
}
"""


def test_counts_in_nested_loops_are_the_product_of_their_trips():
    def region(x):
        def inner(x, _):
            return lax.all_to_all(x, SEQ, 1, 0, tiled=True).reshape(x.shape), None

        def outer(x, _):
            return lax.scan(inner, lax.psum(x, SEQ) + x, length=3)[0], None

        return lax.scan(outer, x, length=5)[0]

    mesh, split = make_mesh(1, 4), PartitionSpec(SEQ)
    function = jax.jit(jax.shard_map(region, mesh=mesh, in_specs=split, out_specs=split))
    program = function.lower(jnp.zeros((8, 12))).compile().as_text()
    found = {c.kind: c for c in collectives(program)}
    assert found["all-to-all"].runs == 15
    assert found["all-to-all"].loops == 2
    assert found["all-to-all"].elements == 24
    assert found["all-reduce"].runs == 5


def test_an_asynchronous_start_counts_its_results_once():
    (found,) = collectives(ASYNCHRONOUS)
    assert found == Collective("all-to-all", 16, ((4, 2), (4, 2)), loops=1, runs=None)


@pytest.mark.parametrize("text", ["", "HloModule empty"])
def test_text_without_a_program_has_no_collectives(text):
    assert collectives(text) == []
