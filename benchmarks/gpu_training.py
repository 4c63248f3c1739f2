"""A few steps of gpt-1.2b at 32K tokens on one device, and XLA's memory prediction against it."""

import sys
import time
from statistics import median
from typing import Any

import jax
import numpy as np
from gpu_programs import Deadline

from ulysses_jax.data.batches import Batch
from ulysses_jax.model.config import ModelConfig
from ulysses_jax.parallel.mesh import make_mesh
from ulysses_jax.train.config import Config, OptimizerConfig, Remat, TrainConfig
from ulysses_jax.train.flops import device_peak, useful_flops
from ulysses_jax.train.state import Purpose, random_key
from ulysses_jax.train.trainer import Trainer

_REMATS: tuple[Remat, ...] = ("exchange", "full")
_MOST_STEPS = 8


def train(tiny: bool, deadline: Deadline) -> dict[str, Any]:
    """Trains with the first remat policy whose predicted memory fits; returns what was seen.

    Bytes are of the device. `peak_bytes` is what the process had in use at most, null where the
    backend does not tell.
    """
    device = jax.devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    for remat in _REMATS:
        config = _config(remat, tiny)
        trainer = Trainer.of(config, make_mesh(1, 1, [device]))
        began = time.perf_counter()
        compiled = trainer.compile()
        compile_s = time.perf_counter() - began
        predicted = compiled.memory_analysis().peak_memory_in_bytes
        print(f"  remat {remat}: {predicted / 2**30:.2f} GiB", file=sys.stderr, flush=True)
        if limit is None or predicted <= limit:
            break
    else:
        return {"refused": f"needs {predicted} bytes with remat {remat}, the device has {limit}"}
    earlier = (device.memory_stats() or {}).get("peak_bytes_in_use")
    losses, seconds = _steps(config, trainer, compiled, deadline)
    peak_bytes = (device.memory_stats() or {}).get("peak_bytes_in_use")
    flops = useful_flops(trainer.program.arch, 1, config.train.seq_len)
    peak_flops = device_peak(device)
    step_s = median(seconds)
    return {
        "model": config.model.preset if not tiny else f"{config.model.preset}, made tiny",
        "parameters": trainer.program.arch.num_parameters(),
        "tokens": config.train.seq_len,
        "remat": remat,
        "compile_seconds": compile_s,
        "losses": losses,
        "step_seconds": seconds,
        "useful_tflops": flops / step_s / 1e12,
        "useful_mfu": None if peak_flops is None else flops / step_s / peak_flops,
        "predicted_peak_bytes": predicted,
        "peak_bytes": peak_bytes,
        "peak_bytes_before": earlier,
    }


def _config(remat: Remat, tiny: bool) -> Config:
    shape: dict[str, Any] = {}
    if tiny:
        shape = {"vocab_size": 256, "num_layers": 2, "num_heads": 2, "embed_dim": 64}
    return Config(
        model=ModelConfig(preset="gpt-1.2b", dtype="bfloat16", attention="auto", **shape),
        train=TrainConfig(
            seq_len=128 if tiny else 32768, global_batch=1, remat=remat, steps=_MOST_STEPS
        ),
        optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=0),
    )


def _steps(
    config: Config, trainer: Trainer, compiled: Any, deadline: Deadline
) -> tuple[list[float], list[float]]:
    """Losses of all steps, and the seconds of those after the first, on one random batch."""
    policy = trainer.program.policy
    draw = np.random.default_rng(0)
    shape = (1, 1, config.train.seq_len + 1)
    tokens = draw.integers(0, trainer.program.arch.vocab_size, shape, dtype=np.int32)
    positions = np.arange(config.train.seq_len, dtype=np.int32)[None, None]
    batch = jax.device_put(
        Batch(tokens[..., :-1], tokens[..., 1:], positions, None), policy.batch(leading=1)
    )
    state = trainer.init(random_key(0, Purpose.PARAMETERS, policy))
    key = random_key(0, Purpose.DROPOUT, policy)
    losses, seconds = [], []
    while len(losses) < 2 or (len(losses) < _MOST_STEPS and deadline.allows(2 * seconds[-1])):
        began = time.perf_counter()
        state, metrics = compiled(state, batch, key)
        losses.append(float(metrics.loss))
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - began)
    return losses, seconds[1:]
