"""What says that a checkpoint belongs to a run: nothing that a mesh or a kernel decides."""

from dataclasses import asdict
from typing import Any

import jax

from ulysses_jax.model.config import Architecture
from ulysses_jax.parallel.sharding import ShardingPolicy
from ulysses_jax.train.config import Config
from ulysses_jax.train.step import Program


def run_identity(config: Config, program: Program, fingerprint: str) -> dict[str, Any]:
    """The identity of a training run: its model, its data, and the order that it reads them in.

    `fingerprint` is the corpus's. The learning rate and the like may change from one start to the
    next; what is listed here may not.
    """
    order = {
        "seed": config.seed,
        "global_batch": config.train.global_batch,
        "document_mask": config.data.document_mask,
    }
    data = {"fingerprint": fingerprint, **order}
    return model_identity(program.arch, program.policy) | {"data": data}


def model_identity(arch: Architecture, policy: ShardingPolicy) -> dict[str, Any]:
    """The fields that are stored with a checkpoint and compared before it is restored.

    Args:
      arch: the model.
      policy: placements of its parameters; only their logical shapes count.
    """
    fields = asdict(arch)
    # How attention is computed does not change what a model is.
    del fields["attention"]
    shapes = {
        jax.tree_util.keystr(path, simple=True, separator="."): list(placement.logical)
        for path, placement in jax.tree_util.tree_leaves_with_path(policy.placements)
    }
    return {"model": fields, "shapes": shapes}
