"""The sharding policy: even shares for every preset, and where each thing lives at each stage."""

import functools
import math

import jax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from ulysses_jax.model.config import ModelConfig
from ulysses_jax.model.gpt import init_params
from ulysses_jax.model.presets import PRESETS
from ulysses_jax.parallel.mesh import AXES, make_mesh
from ulysses_jax.parallel.sharding import Placement, ShardingPolicy, place
from ulysses_jax.train.plan import plan_state


@functools.cache
def _shapes(preset):
    arch = ModelConfig(preset=preset).architecture(2048)
    return jax.eval_shape(functools.partial(init_params, arch), jax.random.key(0))


@pytest.mark.parametrize("devices", [8, 48, 256])
@pytest.mark.parametrize("preset", sorted(set(PRESETS) - {"quickstart"}))
def test_state_per_device_is_within_five_percent_of_an_even_share(preset, devices):
    mesh = AbstractMesh((devices // 8, 8), AXES)
    state = plan_state(ShardingPolicy.of(_shapes(preset), mesh, 3), "adamw")
    assert state.total <= 1.05 * state.even_share
    total = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(_shapes(preset)))
    assert state.even_share == pytest.approx(16 * total / devices)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_parameter_count_is_that_of_the_real_tree(preset):
    total = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(_shapes(preset)))
    assert ModelConfig(preset=preset).architecture(2048).num_parameters() == total


@pytest.mark.parametrize(
    ("logical", "ways", "stacked", "expected"),
    [
        # 8 divides neither 5 nor 15: 16/15 wastes less than 8/5.
        ((5, 15), 8, False, Placement((5, 15), (5, 16), 1)),
        # The stacked dimension is never split, though 8 divides it.
        ((8, 15), 8, True, Placement((8, 15), (8, 16), 1)),
        ((8, 4), 4, True, Placement((8, 4), (8, 4), 1)),
        # A shard of 8 of which 5 are padding is not worth having.
        ((3,), 8, False, Placement((3,), (3,), None)),
        ((16, 16), 1, False, Placement((16, 16), (16, 16), None)),
    ],
)
def test_the_dimension_with_least_padding_is_split(logical, ways, stacked, expected):
    assert place(logical, ways, stacked) == expected


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_stage_splits_what_its_row_of_the_table_says(stage):
    shapes = {"head": {"table": jax.ShapeDtypeStruct((16, 5), "float32")}}
    policy = ShardingPolicy.of(shapes, make_mesh(2, 4), stage)

    def is_split(specs):
        return specs["head"]["table"] != PartitionSpec()

    assert is_split(policy.moment_specs) == (stage >= 1)
    assert is_split(policy.gradient_specs) == (stage >= 2)
    assert is_split(policy.param_specs) == (stage >= 3)
