"""Checks of a configuration that need neither data nor devices."""

import math
from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ulysses_jax.model.config import Architecture, nearest_divisors, nearest_multiples
from ulysses_jax.train.config import (
    Config,
    ConfigError,
    DataConfig,
    DistributedConfig,
    EvaluateConfig,
    GenerateConfig,
    MeshConfig,
)

_SMALLEST: Mapping[str, int] = MappingProxyType(
    {
        "mesh.seq": 1,
        "mesh.simulated_devices": 0,
        "data.heldout_tokens": 1,
        "train.seq_len": 1,
        "train.global_batch": 1,
        "train.accumulate": 1,
        "train.steps": 1,
        "train.loss_chunk": 1,
        "train.eval_every": 0,
        "train.log_every": 1,
        "train.profile_steps": 0,
        "train.sample_tokens": 0,
        "optimizer.warmup_steps": 0,
        "checkpoint.every": 0,
        "checkpoint.keep": 1,
        "tokens": 1,
    }
)


# Token positions and parameter indices are int32.
_LARGEST_COUNT = 2**31 - 1
# Each is a thread and a copy of the program.
_LARGEST: Mapping[str, int] = MappingProxyType({"mesh.simulated_devices": 4096})


class _Range(NamedTuple):
    holds: Callable[[float], bool]
    words: str


# Optimizer state is float32.
_ABOVE_ZERO = _Range(lambda value: 0 < value < 1e38, "above 0 and below 1e38")
_FROM_ZERO = _Range(lambda value: 0 <= value < 1e38, "of 0 or more and below 1e38")
_SHARE = _Range(lambda value: 0 <= value <= 1, "from 0 to 1")
_DECAY = _Range(lambda value: 0 <= value < 1, "from 0 to below 1")
_RANGES: Mapping[str, _Range] = MappingProxyType(
    {
        "optimizer.learning_rate": _ABOVE_ZERO,
        "optimizer.final_learning_rate_fraction": _SHARE,
        "optimizer.beta1": _DECAY,
        "optimizer.beta2": _DECAY,
        "optimizer.eps": _ABOVE_ZERO,
        "optimizer.weight_decay": _FROM_ZERO,
        "optimizer.clip_norm": _FROM_ZERO,
        "temperature": _FROM_ZERO,
    }
)


def validate(config: Config) -> None:
    """Raises ConfigError for the first value out of range, or that contradicts another."""
    _validate_numbers(config, "mesh.", "data.", "train.", "optimizer.", "checkpoint.")
    if config.train.zero_stage not in range(4):
        raise ConfigError(f"train.zero_stage is {config.train.zero_stage}; use 0, 1, 2 or 3")
    _validate_seed(config.seed)
    _validate_path("run_dir", config.run_dir)
    _validate_distributed(config.distributed)
    try:
        architecture = config.model.architecture(config.train.seq_len)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    _validate_data(config.data, architecture)
    for key, path in (("run_dir", config.run_dir), ("data.cache_dir", config.data.cache_dir)):
        if Path(config.data.source).resolve() in (
            Path(path).resolve(),
            *Path(path).resolve().parents,
        ):
            raise ConfigError(
                f"{key} {path} lies in data.source {config.data.source}, so the run would train on "
                f"its own files; give {key} a path outside"
            )
    devices = config.mesh.simulated_devices * (config.distributed.num_processes or 1)
    _validate_mesh(config.mesh, architecture, devices)
    _validate_batch(config, devices)


def validate_evaluate(config: EvaluateConfig, run: Config) -> None:
    """Raises ConfigError where the evaluation's mesh or data do not fit the model of `run`."""
    _validate_numbers(config, "mesh.", "data.")
    architecture = run.model.architecture(run.train.seq_len)
    _validate_data(config.data, architecture)
    _validate_mesh(config.mesh, architecture, config.mesh.simulated_devices)


def validate_generate(config: GenerateConfig) -> None:
    """Raises ConfigError for the first value out of range."""
    _validate_path("run_dir", config.run_dir)
    _validate_numbers(config, "tokens", "temperature")
    _validate_seed(config.seed)


def _validate_numbers(config: Any, *prefixes: str) -> None:
    for key, smallest in _SMALLEST.items():
        if key.startswith(prefixes) and attrgetter(key)(config) < smallest:
            raise ConfigError(f"{key} is {attrgetter(key)(config)}; use {smallest} or more")
        largest = _LARGEST.get(key, _LARGEST_COUNT)
        if key.startswith(prefixes) and attrgetter(key)(config) > largest:
            raise ConfigError(f"{key} is {attrgetter(key)(config)}; use {largest} or less")
    for key, allowed in _RANGES.items():
        if key.startswith(prefixes):
            value = attrgetter(key)(config)
            if not (math.isfinite(value) and allowed.holds(value)):
                raise ConfigError(f"{key} is {value}; use a finite number {allowed.words}")


def _validate_seed(seed: int) -> None:
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed is {seed}; use a number from 0 to {2**32 - 1}")


def _validate_path(key: str, path: str) -> None:
    if not path.strip():
        raise ConfigError(f"{key} is {path!r}; use the path of a folder")
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(f"{key} is {path!r}, which is not UTF-8; use another path") from None
    if "\0" in path:
        raise ConfigError(f"{key} is {path!r}, which holds a zero byte; use another path")


def _validate_distributed(distributed: DistributedConfig) -> None:
    coordinator, processes = distributed.coordinator, distributed.num_processes
    process_id = distributed.process_id
    if processes is not None and processes < 1:
        raise ConfigError(f"distributed.num_processes is {processes}; use 1 or more")
    if process_id is not None and not 0 <= process_id < (processes or math.inf):
        limit = f"from 0 to {processes - 1}" if processes else "of 0 or more"
        raise ConfigError(f"distributed.process_id is {process_id}; use a number {limit}")
    if coordinator is not None:
        host, _, port = coordinator.rpartition(":")
        if not (host and port.isdecimal() and 0 < int(port) < 2**16):
            raise ConfigError(
                f"distributed.coordinator is {coordinator!r}; use host:port, such as 10.0.0.1:7777"
            )
    if distributed.detect:
        return
    if coordinator is None and ((processes or 1) > 1 or process_id):
        raise ConfigError(
            f"distributed.num_processes is {processes} and distributed.process_id {process_id}, "
            "but nothing says where process 0 is; set distributed.coordinator to its host:port, or "
            "distributed.detect under Slurm, Open MPI or Kubernetes"
        )
    if coordinator is not None and (processes is None or process_id is None):
        missing = "num_processes" if processes is None else "process_id"
        raise ConfigError(
            f"distributed.coordinator is {coordinator!r}, but distributed.{missing} is null; set "
            "it, or set distributed.detect under Slurm, Open MPI or Kubernetes"
        )


def _validate_data(data: DataConfig, architecture: Architecture) -> None:
    if not data.source.strip():
        raise ConfigError(
            f"data.source is {data.source!r}; use python-stdlib or the path of a file or folder"
        )
    _validate_path("data.source", data.source)
    _validate_path("data.cache_dir", data.cache_dir)
    if data.document_mask and data.source.endswith(".bin") and data.document_end is None:
        raise ConfigError(
            "data.document_mask is true, but nothing says where the documents of "
            f"{data.source} end; set data.document_end to the token that ends each (50256 in "
            "GPT-2's vocabulary), or data.document_mask to false"
        )
    if data.document_end is not None and not 0 <= data.document_end < architecture.vocab_size:
        raise ConfigError(
            f"data.document_end is {data.document_end}; use a token id from 0 to "
            f"{architecture.vocab_size - 1} (model.vocab_size = {architecture.vocab_size})"
        )


def _validate_mesh(mesh: MeshConfig, architecture: Architecture, devices: int) -> None:
    """`devices` are the simulated ones, 0 where the real ones are used and unknown yet."""
    if mesh.data < 1 and mesh.data != -1:
        raise ConfigError(f"mesh.data is {mesh.data}; use 1 or more, or -1 for all that are left")
    if architecture.max_seq_len % mesh.seq:
        raise ConfigError(
            f"train.seq_len is {architecture.max_seq_len}, which mesh.seq = {mesh.seq} does not "
            f"divide; use {nearest_multiples(architecture.max_seq_len, mesh.seq)}"
        )
    if not devices:
        return
    if mesh.data == -1 and devices % mesh.seq:
        raise ConfigError(
            f"mesh.seq is {mesh.seq}, which does not divide the {devices} simulated devices; use "
            f"mesh.seq = {nearest_divisors(devices, mesh.seq)}"
        )
    needed = max(mesh.data, 1) * mesh.seq
    if needed > devices:
        raise ConfigError(
            f"mesh.data x mesh.seq is {mesh.data} x {mesh.seq} = {needed} devices, but "
            f"mesh.simulated_devices gives {devices}; simulate more, or use a mesh of at most "
            f"{devices}"
        )


def _validate_batch(config: Config, devices: int) -> None:
    batch, accumulate = config.train.global_batch, config.train.accumulate
    data = config.mesh.data
    if data == -1:
        data = devices // config.mesh.seq if devices else 1
    if batch % (data * accumulate):
        raise ConfigError(
            f"train.global_batch is {batch}, which mesh.data x train.accumulate = {data} x "
            f"{accumulate} does not divide; use {nearest_multiples(batch, data * accumulate)}"
        )
