"""The compiled step holds the collectives of the design and no others, and nothing whole."""

import dataclasses
import math
import re
from collections import Counter

import jax
import numpy as np
import pytest

from ulysses_jax.data.batches import Batch
from ulysses_jax.parallel.collectives import collectives
from ulysses_jax.parallel.mesh import make_mesh
from ulysses_jax.train.config import OptimizerConfig
from ulysses_jax.train.optimizer import learning_rate_schedule, make_optimizer
from ulysses_jax.train.state import (
    abstract_state,
    make_init,
    sharding_policy,
    state_shardings,
)
from ulysses_jax.train.step import Program, make_train_step

LAYERS = 3
BATCH, SEQUENCE = 4, 24
MESH = (2, 4)


@pytest.fixture(scope="module")
def arch(tiny_architecture):
    # Grouped kv heads, so that q and out have other sizes than k and v.
    return tiny_architecture(
        num_layers=LAYERS, num_heads=8, num_kv_heads=4, embed_dim=32, mlp_dim=40, vocab_size=64
    )


def _lower(arch, policy, remat="exchange", masked=False):
    config = OptimizerConfig()
    optimizer = make_optimizer(config, 10)
    step = jax.jit(
        make_train_step(
            Program(arch, policy, remat, 8), optimizer, learning_rate_schedule(config, 10)
        ),
        donate_argnums=0,
        out_shardings=(state_shardings(policy, optimizer), policy.whole),
    )
    array = jax.ShapeDtypeStruct((1, BATCH, SEQUENCE), np.int32, sharding=policy.batch(leading=1))
    batch = Batch(array, array, array, array if masked else None)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return step.lower(abstract_state(arch, policy, optimizer), batch, key)


@pytest.fixture(scope="module")
def small(arch):
    """Another attention of one device communicates as little, and compiles in half the time."""
    return dataclasses.replace(arch, attention="reference")


def _compiled(arch, stage, remat="exchange", masked=False):
    policy = sharding_policy(arch, make_mesh(*MESH), stage)
    return policy, _lower(arch, policy, remat, masked).compile()


@pytest.fixture(scope="module")
def zero3(arch):
    policy, compiled = _compiled(arch, 3)
    return policy, compiled, collectives(compiled.as_text())


def _layer_weights(policy):
    """Elements of each layer's weights, in order of size."""
    return Counter(math.prod(p.stored[1:]) for p in jax.tree.leaves(policy.placements["blocks"]))


def test_four_all_to_alls_a_layer_of_the_sizes_of_q_k_v_together_and_of_out(zero3, arch):
    _, _, found = zero3
    exchanges = [c for c in found if c.kind == "all-to-all"]
    tokens = BATCH * SEQUENCE // 8
    q, k = (tokens * heads * arch.head_dim for heads in (arch.num_heads, arch.num_kv_heads))
    # Forward and backward.
    assert Counter(c.elements for c in exchanges) == {q + 2 * k: 2, q: 2}
    assert all(c.loops == 1 and c.runs == LAYERS for c in exchanges)


def test_weights_are_gathered_inside_the_layer_loop_once_a_pass(zero3):
    policy, _, found = zero3
    inside = [c for c in found if c.kind == "all-gather" and c.loops == 1]
    weights = _layer_weights(policy)
    assert Counter(c.elements for c in inside) == weights + weights
    assert all(c.runs == LAYERS for c in inside)


def test_outside_the_loop_only_embedding_and_head_are_gathered(zero3):
    policy, _, found = zero3
    outside = Counter(c.elements for c in found if c.kind == "all-gather" and c.loops == 0)
    parts = policy.placements["embedding"], policy.placements["head"]
    assert outside == Counter(math.prod(p.stored) for p in jax.tree.leaves(parts))


def test_every_gradient_leaves_by_one_reduce_scatter(zero3):
    policy, _, found = zero3
    scattered = [c for c in found if c.kind == "reduce-scatter"]
    shards = Counter({n // 8: count for n, count in _layer_weights(policy).items()})
    assert Counter(c.elements for c in scattered if c.loops == 1) == shards
    parts = policy.placements["embedding"], policy.placements["head"]
    assert Counter(c.elements for c in scattered if c.loops == 0) == Counter(
        math.prod(p.stored) // 8 for p in jax.tree.leaves(parts)
    )


def test_nothing_else_is_communicated_but_scalars(zero3):
    _, _, found = zero3
    others = [c for c in found if c.kind in ("all-reduce", "collective-permute")]
    assert all(c.loops == 0 and all(shape == () for shape in c.shapes) for c in others)


@pytest.mark.parametrize(("remat", "count"), [("full", 6), ("none", 4)])
def test_recomputation_decides_the_number_of_all_to_alls(small, remat, count):
    policy, compiled = _compiled(small, 3, remat)
    found = collectives(compiled.as_text())
    assert sum(c.kind == "all-to-all" for c in found) == count
    # Also where everything is kept, weights are not: they are gathered again.
    inside = [c for c in found if c.kind == "all-gather" and c.loops == 1]
    assert len(inside) == 2 * len(jax.tree.leaves(policy.placements["blocks"]))


def test_document_masks_add_one_gather_of_segment_ids_a_step(arch, zero3):
    _, _, plain = zero3
    _, compiled = _compiled(arch, 3, masked=True)
    found = collectives(compiled.as_text())
    added = Counter((c.kind, c.elements) for c in found) - Counter(
        (c.kind, c.elements) for c in plain
    )
    assert added == {("all-gather", BATCH // 2 * SEQUENCE): 1}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_lower_stages_reduce_as_their_row_of_the_table_says(small, stage):
    policy, compiled = _compiled(small, stage)
    found = collectives(compiled.as_text())
    in_loop = Counter(c.kind for c in found if c.loops == 1)
    weights = len(jax.tree.leaves(policy.placements["blocks"]))
    assert in_loop["all-to-all"] == 4
    assert in_loop["all-gather"] == 0
    assert in_loop["reduce-scatter"] == (weights if stage == 2 else 0)
    # XLA joins the all-reduces of a layer into fewer.
    assert (in_loop["all-reduce"] > 0) == (stage < 2)


def test_one_device_communicates_nothing(small):
    policy = sharding_policy(small, make_mesh(1, 1), 3)
    assert collectives(_lower(small, policy).compile().as_text()) == []


@pytest.mark.parametrize("mesh_shape", [(2, 4), (3, 2)])
def test_the_state_starts_in_its_shards(tiny_architecture, mesh_shape):
    arch = tiny_architecture(embed_dim=64, mlp_dim=256, vocab_size=256)
    policy = sharding_policy(arch, make_mesh(*mesh_shape), 3)
    init = make_init(arch, policy, make_optimizer(OptimizerConfig(), 10))
    program = init.lower(jax.random.key(0)).compile().as_text()
    arrays = re.findall(r" = [a-z]+\d+\[([\d,]+)\]", program)
    largest = max(math.prod(map(int, dims.split(","))) for dims in arrays)
    placements = jax.tree.leaves(policy.placements)
    assert largest == max(math.prod(p.stored) for p in placements) // policy.mesh.size


@pytest.mark.parametrize("stage", [2, 3])
def test_bfloat16_weights_travel_in_bfloat16_and_their_gradients_in_float32(arch, stage):
    """Read before compilation: the CPU compiler reduces bfloat16 in float32, others do not."""
    policy = sharding_policy(arch, make_mesh(*MESH), stage)
    program = Program(dataclasses.replace(arch, dtype="bfloat16"), policy, "full", 8)
    array = jax.ShapeDtypeStruct((1, BATCH, SEQUENCE), np.int32, sharding=policy.batch(leading=1))
    text = str(
        jax.make_jaxpr(program.loss_and_gradients)(
            policy.stored_params(), Batch(array, array, array, None), jax.random.key(0)
        )
    )
    types = re.findall(r":(\w+)\[[\d,]*\]\S* = (reduce_scatter|all_gather|all_to_all)\b", text)
    assert {dtype for dtype, kind in types if kind == "reduce_scatter"} == {"f32"}
    assert {dtype for dtype, kind in types if kind != "reduce_scatter"} == {"bf16"}
    assert len({kind for _, kind in types}) == (3 if stage == 3 else 2)
