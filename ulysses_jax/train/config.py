"""The configuration of a run: what every key is called, means and defaults to (no JAX here)."""

from dataclasses import dataclass, field
from typing import Literal

from ulysses_jax.model.config import ModelConfig

TokenDtype = Literal["uint16", "uint32"]
Remat = Literal["none", "full", "exchange"]
OptimizerName = Literal["adamw", "sgd"]
Resume = bool | Literal["auto"]


class ConfigError(ValueError):
    """A mistake in a config file or on the command line; the message says how to mend it."""


@dataclass(frozen=True)
class MeshConfig:
    """The devices and how they share the work."""

    data: int = -1
    """Devices that share the sequences of a batch (count; -1: all that mesh.seq leaves)."""
    seq: int = 1
    """Devices that share each sequence (count); in training it must divide train.seq_len.

    Heads that it does not divide are padded, or repeated: the plan says by how much.
    """
    simulated_devices: int = 0
    """CPU devices to simulate in each process (count; 0: use the real devices)."""


@dataclass(frozen=True)
class DataConfig:
    """The text and how it becomes sequences of tokens."""

    source: str = "python-stdlib"
    """python-stdlib (the interpreter's own library), a text file, a folder of texts, or a .bin."""
    document_mask: bool = False
    """Whether tokens attend only within their own document."""
    heldout_tokens: int = 200_000
    """Size of the part kept for evaluation (tokens, at most)."""
    cache_dir: str = "runs/data"
    """Folder for the tokens made from text (path)."""
    token_dtype: TokenDtype = "uint16"
    """Type of the tokens in a .bin file."""
    document_end: int | None = None
    """Token that ends each document of a .bin file (token id; null: one single document)."""


@dataclass(frozen=True)
class TrainConfig:
    """The training step and loop."""

    seq_len: int = 512
    """Length of a sequence (tokens); must be divisible by mesh.seq."""
    global_batch: int = 8
    """Sequences per optimizer step, over all devices and accumulation steps (count)."""
    accumulate: int = 1
    """Parts, computed one after the other, that a global batch is split into (count)."""
    steps: int = 300
    """Optimizer steps to train for (count)."""
    zero_stage: int = 3
    """ZeRO stage: 0 shards nothing, 1 optimizer state, 2 also gradients, 3 also parameters."""
    remat: Remat = "exchange"
    """Recomputation in the backward pass: none keeps every activation, full recomputes each layer,
    exchange keeps only what the exchanges and the attention made."""
    loss_chunk: int = 1024
    """Positions whose logits exist at once on a device (tokens)."""
    eval_every: int = 100
    """Interval between evaluations (optimizer steps; 0: only after the last)."""
    log_every: int = 10
    """Interval between log lines (optimizer steps)."""
    profile_steps: int = 0
    """Length of the profile written for TensorBoard (optimizer steps; 0: none)."""
    compilation_cache: str = ""
    """Folder that keeps compiled programs between runs (path; empty: none)."""
    sample_tokens: int = 256
    """Length of the text sampled after training (tokens; 0: none)."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its schedule: linear warmup, then a cosine down to the final rate."""

    name: OptimizerName = "adamw"
    """Update rule; sgd has no momentum and is for exact comparisons."""
    learning_rate: float = 3e-3
    """Highest learning rate (per step), reached at the end of the warmup."""
    warmup_steps: int = 30
    """Length of the warmup (optimizer steps); shortened, and said so, where the run is shorter."""
    final_learning_rate_fraction: float = 0.1
    """Learning rate of the last step as a share of the highest (0 to 1)."""
    beta1: float = 0.9
    """Decay of AdamW's mean gradient (0 to below 1, per step)."""
    beta2: float = 0.95
    """Decay of AdamW's mean squared gradient (0 to below 1, per step)."""
    eps: float = 1e-8
    """Number added to the denominator of AdamW (in units of the gradient)."""
    weight_decay: float = 0.1
    """Decay of the weight matrices (share per step, times the learning rate)."""
    clip_norm: float = 1.0
    """Largest global gradient norm (0: no clipping)."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints in the run folder."""

    every: int = 100
    """Interval between checkpoints (optimizer steps; 0: only after the last)."""
    keep: int = 2
    """Newest checkpoints to keep (count)."""
    resume: Resume = False
    """false refuses an existing run, true demands a checkpoint, auto resumes where there is one."""


@dataclass(frozen=True)
class DistributedConfig:
    """The processes of a run on several machines."""

    coordinator: str | None = None
    """Address of process 0 (host:port; null: a single process, or detected)."""
    num_processes: int | None = None
    """Processes in the run (count; null: one, or detected)."""
    process_id: int | None = None
    """Rank of this process (0 to num_processes - 1; null: 0, or detected)."""
    detect: bool = False
    """Whether to read what is null above from Slurm, Open MPI or Kubernetes."""


@dataclass(frozen=True)
class Config:
    """A complete run."""

    mesh: MeshConfig = field(default_factory=MeshConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    run_dir: str = "runs/quickstart"
    """Folder of the run: config, metrics, checkpoints, plot and sample (path)."""
    seed: int = 0
    """Seed of the initial parameters, the data order and dropout (0 to 4294967295)."""
    dry_run: bool = False
    """Whether to print the plan and compile the step, but train nothing."""


@dataclass(frozen=True)
class GenerateConfig:
    """Text generation from a run's newest checkpoint."""

    run_dir: str
    """Folder of a trained run (path)."""
    prompt: str
    """Text to continue."""
    tokens: int = 256
    """Length of the continuation (tokens)."""
    temperature: float = 0.8
    """Divisor of the logits before sampling (0: always the likeliest token)."""
    seed: int = 0
    """Seed of the sampling (0 to 4294967295)."""


@dataclass(frozen=True)
class EvaluateConfig:
    """Evaluation of a run's newest checkpoint; data keys not given are the run's own."""

    run_dir: str
    """Folder of a trained run (path)."""
    data: DataConfig
    mesh: MeshConfig = field(default_factory=lambda: MeshConfig(data=1))
