"""What says that a checkpoint belongs to a run: nothing that a mesh or a kernel decides."""

from dataclasses import asdict
from typing import Any

import jax

from ulysses_jax.model.config import Architecture
from ulysses_jax.parallel.sharding import ShardingPolicy


def identity_of(
    arch: Architecture, policy: ShardingPolicy, fingerprint: str | None
) -> dict[str, Any]:
    """The fields that are stored with a checkpoint and compared before it is restored.

    Args:
      arch: the model.
      policy: placements of its parameters; only their logical shapes count.
      fingerprint: of the data; None leaves it out, to use the model on other data.
    """
    fields = asdict(arch)
    # How attention is computed does not change what a model is.
    del fields["attention"]
    shapes = {
        jax.tree_util.keystr(path, simple=True, separator="."): list(placement.logical)
        for path, placement in jax.tree_util.tree_leaves_with_path(policy.placements)
    }
    identity: dict[str, Any] = {"model": fields, "shapes": shapes}
    if fingerprint is not None:
        identity["data"] = {"fingerprint": fingerprint}
    return identity
