"""All sharding policy: where each parameter, gradient, moment and batch lives at each ZeRO stage.

| stage | parameters | gradients      | moments | leaves the backward pass as |
|-------|------------|----------------|---------|-----------------------------|
| 0     | whole      | whole          | whole   | all-reduce                  |
| 1     | whole      | whole          | shards  | all-reduce                  |
| 2     | whole      | shards         | shards  | reduce-scatter              |
| 3     | shards     | shards         | shards  | reduce-scatter              |

Shards are over the combined data × sequence ranks (Ulysses, section 3.2): each device holds
1/(D·P). A dimension that D·P does not divide is stored padded with zeros up to the next
multiple. Zeros stay zeros: their gradient is the transpose of the slice that drops them.
"""

from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ulysses_jax.parallel.mesh import AXES, DATA, SEQ

# A shard that padding makes larger than this share of an even one is not worth having.
_LARGEST_WASTE = 2.0


@dataclass(frozen=True)
class Placement:
    """Where one parameter lives.

    Attributes:
      logical: the parameter's own shape.
      stored: its shape with the split dimension padded for the mesh.
      dim: the dimension that is split over data × sequence; None: left whole on every device.
    """

    logical: tuple[int, ...]
    stored: tuple[int, ...]
    dim: int | None

    @property
    def spec(self) -> PartitionSpec:
        """The partition of the stored array."""
        if self.dim is None:
            return PartitionSpec()
        return PartitionSpec(*[None] * self.dim, AXES)


def place(logical: tuple[int, ...], ways: int, stacked: bool) -> Placement:
    """Chooses the dimension to split `ways` ways: the one that needs the least padding.

    The leading dimension of a parameter stacked over layers is never split: each layer is
    gathered alone, inside the layer loop. Of equally good dimensions the first is taken, whose
    shards lie next to each other in the gathered weight.
    """
    candidates = range(1 if stacked else 0, len(logical))
    if ways == 1 or not candidates:
        return Placement(logical, logical, None)

    def padded(dim: int) -> int:
        return -(-logical[dim] // ways) * ways

    dim = min(candidates, key=lambda d: padded(d) / logical[d])
    if padded(dim) > _LARGEST_WASTE * logical[dim]:
        return Placement(logical, logical, None)
    return Placement(logical, (*logical[:dim], padded(dim), *logical[dim + 1 :]), dim)


@dataclass(frozen=True)
class ShardingPolicy:
    """Placement of a whole model on one mesh at one ZeRO stage.

    Attributes:
      mesh: the ('data', 'seq') mesh.
      stage: ZeRO stage, 0 to 3.
      placements: a tree of `Placement`, one for each parameter.
    """

    mesh: Mesh
    stage: int
    placements: dict[str, Any]

    @classmethod
    def of(cls, params: dict[str, Any], mesh: Mesh, stage: int) -> "ShardingPolicy":
        """The policy for `params`, a tree of anything with a shape, as `GPT.params()` gives it."""
        ways = mesh.size if stage > 0 else 1
        placements = {
            part: jax.tree.map(
                lambda leaf, stacked=part == "blocks": place(tuple(leaf.shape), ways, stacked), tree
            )
            for part, tree in params.items()
        }
        return cls(mesh, stage, placements)

    @property
    def whole(self) -> NamedSharding:
        """On every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def batch(self, leading: int = 0) -> NamedSharding:
        """Of [*leading, B, S] arrays: batch over 'data', sequence over 'seq'."""
        return NamedSharding(self.mesh, PartitionSpec(*[None] * leading, DATA, SEQ))

    def _specs(self, split: bool) -> dict[str, Any]:
        return jax.tree.map(lambda p: p.spec if split else PartitionSpec(), self.placements)

    @property
    def param_specs(self) -> dict[str, Any]:
        """Partition of each parameter."""
        return self._specs(self.stage >= 3)

    @property
    def gradient_specs(self) -> dict[str, Any]:
        """Partition of each gradient as it leaves the backward pass."""
        return self._specs(self.stage >= 2)

    @property
    def moment_specs(self) -> dict[str, Any]:
        """Partition of each optimizer moment, and of the update."""
        return self._specs(self.stage >= 1)

    def shardings(self, specs: Any) -> Any:
        """`specs` on this mesh."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)

    def stored_params(self) -> dict[str, Any]:
        """The parameters as abstract float32 arrays, padded and sharded."""
        return jax.tree.map(
            lambda p, s: jax.ShapeDtypeStruct(p.stored, "float32", sharding=s),
            self.placements,
            self.shardings(self.param_specs),
        )

    def optimizer_shardings(self, optimizer: optax.GradientTransformation) -> Any:
        """A sharding for every leaf of the optimizer's state: moments as above, the rest whole."""
        state = jax.eval_shape(optimizer.init, self.stored_params())
        return optax.tree_map_params(
            optimizer,
            lambda _, sharding: sharding,
            state,
            self.shardings(self.moment_specs),
            transform_non_params=lambda _: self.whole,
        )
