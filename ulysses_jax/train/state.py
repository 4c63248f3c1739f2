"""The training state: its pieces, where they live, and how it starts straight in its shards."""

from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray

from ulysses_jax.model.config import Architecture
from ulysses_jax.model.gpt import init_params
from ulysses_jax.parallel.sharding import ShardingPolicy


@partial(
    jax.tree_util.register_dataclass, data_fields=["step", "params", "moments"], meta_fields=[]
)
@dataclass(frozen=True)
class TrainState:
    """What a checkpoint holds; also a tree of the same form for abstract values or shardings.

    Attributes:
      step: Int[Array, ""], batches consumed; it also numbers the next batch.
      params: float32 parameters as stored (padded, sharded).
      moments: the optax state, its count included.
    """

    step: Any
    params: dict[str, Any]
    moments: Any


class Purpose(IntEnum):
    """What a random key is for; those of one seed share nothing."""

    PARAMETERS = 0
    DROPOUT = 1
    SAMPLING = 2


def random_key(seed: int, purpose: Purpose, policy: ShardingPolicy) -> PRNGKeyArray:
    """The key of `seed` for one purpose, on every device, those of other processes included."""

    # device_put refuses keys for a mesh that reaches into other processes.
    @partial(jax.jit, out_shardings=policy.whole)
    def make() -> PRNGKeyArray:
        return jax.random.fold_in(jax.random.key(seed), purpose)

    key: PRNGKeyArray = make()
    return key


def sharding_policy(arch: Architecture, mesh: Mesh, stage: int) -> ShardingPolicy:
    """Where the state of `arch` lives on `mesh` at ZeRO stage `stage`."""
    shapes = jax.eval_shape(partial(init_params, arch), jax.random.key(0))
    return ShardingPolicy.of(shapes, mesh, stage)


def state_shardings(policy: ShardingPolicy, optimizer: optax.GradientTransformation) -> TrainState:
    """A sharding for every leaf of the state."""
    return TrainState(
        policy.whole,
        policy.shardings(policy.param_specs),
        policy.optimizer_shardings(optimizer),
    )


def make_init(
    arch: Architecture, policy: ShardingPolicy, optimizer: optax.GradientTransformation
) -> Any:
    """The jitted function key → first state; each device makes only its own shards."""

    def init(key: PRNGKeyArray) -> TrainState:
        params = jax.tree.map(
            lambda w, p: jnp.pad(w, [(0, s - n) for s, n in zip(p.stored, p.logical, strict=True)]),
            init_params(arch, key),
            policy.placements,
        )
        return TrainState(jnp.int32(0), params, optimizer.init(params))

    return jax.jit(init, out_shardings=state_shardings(policy, optimizer))


def abstract_state(
    arch: Architecture, policy: ShardingPolicy, optimizer: optax.GradientTransformation
) -> TrainState:
    """The state's shapes and shardings without any array, to compile or restore into."""
    init = make_init(arch, policy, optimizer)
    shapes = jax.eval_shape(init, jax.random.key(0))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        state_shardings(policy, optimizer),
    )
