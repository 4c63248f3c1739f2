"""Contestant: our train step, made by the trainer from a config, on simulated devices."""

import dataclasses
from typing import Any

import jax
import numpy as np
import train_step_sizes as sizes
from contestant import Facts, Run, serve

from ulysses_jax.data.batches import Batch
from ulysses_jax.model.config import ModelConfig
from ulysses_jax.parallel.backend import Processes, start_backend
from ulysses_jax.parallel.mesh import make_mesh
from ulysses_jax.train.config import Config, MeshConfig, OptimizerConfig, Remat, TrainConfig
from ulysses_jax.train.state import Purpose, random_key
from ulysses_jax.train.trainer import Trainer


def prepare(remat: Remat) -> tuple[Run, Facts]:
    """Compiles the step and takes the checked ones; a run is a few more."""
    start_backend(sizes.WORLD, Processes())
    trainer = Trainer.of(_config(remat), make_mesh(1, sizes.WORLD))
    compiled = trainer.compile()
    policy = trainer.program.policy
    key = random_key(0, Purpose.DROPOUT, policy)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, trainer.state.params)
    state = dataclasses.replace(
        trainer.init(random_key(0, Purpose.PARAMETERS, policy)),
        params=jax.device_put(_nested(sizes.parameters()), shardings),
    )
    tokens, labels = (x[None] for x in sizes.tokens_and_labels())
    positions = np.arange(sizes.TOKENS, dtype=np.int32)[None, None]
    batch = jax.device_put(Batch(tokens, labels, positions, None), policy.batch(leading=1))

    def step() -> float:
        nonlocal state
        state, metrics = compiled(state, batch, key)
        return float(metrics.loss)

    def run() -> None:
        for _ in range(sizes.STEPS_A_RUN):
            step()
        jax.block_until_ready(state)

    losses = [step() for _ in range(sizes.CHECKED_STEPS)]
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return run, {"work": sizes.STEPS_A_RUN, "check": losses, "temporary_bytes": temporary}


def _config(remat: Remat) -> Config:
    return Config(
        mesh=MeshConfig(data=1, seq=sizes.WORLD, simulated_devices=sizes.WORLD),
        model=ModelConfig(
            preset="gpt2",
            vocab_size=sizes.VOCABULARY,
            num_layers=sizes.LAYERS,
            num_heads=sizes.HEADS,
            embed_dim=sizes.WIDTH,
            mlp_dim=sizes.MLP_WIDTH,
            tied_head=False,
            norm_eps=sizes.NORM_EPS,
        ),
        train=TrainConfig(
            seq_len=sizes.TOKENS, global_batch=1, zero_stage=3, remat=remat, steps=100_000
        ),
        optimizer=OptimizerConfig(
            learning_rate=sizes.LEARNING_RATE,
            warmup_steps=0,
            final_learning_rate_fraction=1.0,
            beta1=sizes.BETAS[0],
            beta2=sizes.BETAS[1],
            eps=sizes.EPS,
            weight_decay=sizes.WEIGHT_DECAY,
            clip_norm=sizes.CLIP_NORM,
        ),
    )


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *folders, name = path.split(".")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = leaf
    return tree


if __name__ == "__main__":
    serve(prepare, ["jax", "jaxlib", "flax", "optax"])
