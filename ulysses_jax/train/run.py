"""`run(config)`: everything a training run is made of, from devices to the sampled text."""

import sys
from contextlib import closing
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from rich.console import Console
from rich.table import Table

from ulysses_jax.data.batches import Batch, TrainBatches
from ulysses_jax.data.bigram import bigram_entropy
from ulysses_jax.data.store import Corpus
from ulysses_jax.model.config import Architecture
from ulysses_jax.parallel.backend import (
    Processes,
    compiler_options,
    gpu_options,
    process_table,
    start_backend,
)
from ulysses_jax.parallel.mesh import SEQ, make_mesh
from ulysses_jax.parallel.sharding import ShardingPolicy
from ulysses_jax.train.checkpoint import Checkpoints
from ulysses_jax.train.command_line import to_yaml
from ulysses_jax.train.config import Config, DistributedConfig
from ulysses_jax.train.corpus import is_text, open_corpus
from ulysses_jax.train.identity import identity_of
from ulysses_jax.train.loop import Evaluator, NonFinite, Trainer, first_state, train
from ulysses_jax.train.loss_plot import plot_losses
from ulysses_jax.train.metrics import read_lines
from ulysses_jax.train.optimizer import learning_rate_schedule, make_optimizer, warmup_used
from ulysses_jax.train.plan import compiled_table, plan_table
from ulysses_jax.train.run_folder import RunFolder, replace_text
from ulysses_jax.train.sampling import decode, sample_text
from ulysses_jax.train.state import abstract_state, make_init, sharding_policy, state_shardings
from ulysses_jax.train.step import Program, make_train_step

# The sampled text at the end of a run: how much of the held-out part it continues, and how boldly.
_PROMPT_TOKENS = 64
_SAMPLE_TEMPERATURE = 0.8


def run(config: Config) -> int:
    """Trains as `config` says, or with `dry_run` only plans and compiles; returns the exit code.

    Raises:
      ValueError: the config does not fit the devices, the data or the run folder.
    """
    start_backend(config.mesh.simulated_devices, processes_of(config.distributed))
    console = Console(quiet=jax.process_index() > 0)
    mesh = make_mesh(config.mesh.data, config.mesh.seq)
    arch = config.model.architecture(config.train.seq_len)
    _require_divisible_batch(config, mesh.size // mesh.shape[SEQ])
    if config.train.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", config.train.compilation_cache)
    policy = sharding_policy(arch, mesh, config.train.zero_stage)
    _print_start(console, config, arch, policy)
    trainer = _make_trainer(config, arch, policy)
    if config.dry_run:
        with console.status("compiling the step"):
            compiled = trainer.compile()
        console.print(compiled_table(compiled))
        console.print("dry run: nothing was trained")
        return 0
    return _train(config, arch, policy, trainer, console)


def processes_of(config: DistributedConfig) -> Processes:
    """The processes that `distributed.*` describes."""
    return Processes(config.coordinator, config.num_processes, config.process_id, config.detect)


def _require_divisible_batch(config: Config, data: int) -> None:
    rows, parts = config.train.global_batch, config.train.accumulate
    if rows % (data * parts):
        nearest = max(rows // (data * parts), 1) * data * parts
        raise ValueError(
            f"train.global_batch is {rows}, which mesh.data × train.accumulate = {data} × {parts} "
            f"does not divide; use {nearest} or {nearest + data * parts}"
        )


def _print_start(
    console: Console, config: Config, arch: Architecture, policy: ShardingPolicy
) -> None:
    if jax.process_count() > 1:
        table = Table("process", "devices", "kind", title="processes", title_justify="left")
        for index, kind, count in process_table():
            table.add_row(str(index), str(count), kind)
        console.print(table)
    console.print(plan_table(config, arch, policy))
    if compiler_options():
        console.print("XLA options:", ", ".join(f"{k}={v}" for k, v in gpu_options().items()))
    warmup = warmup_used(config.optimizer, config.train.steps)
    if warmup < config.optimizer.warmup_steps:
        console.print(
            f"optimizer.warmup_steps is {config.optimizer.warmup_steps}, but the run has "
            f"{config.train.steps} steps; the warmup is shortened to {warmup}"
        )


def _make_trainer(config: Config, arch: Architecture, policy: ShardingPolicy) -> Trainer:
    program = Program(arch, policy, config.train.remat, config.train.loss_chunk)
    optimizer = make_optimizer(config.optimizer, config.train.steps)
    schedule = learning_rate_schedule(config.optimizer, config.train.steps)
    step = jax.jit(
        make_train_step(program, optimizer, schedule),
        donate_argnums=0,
        out_shardings=(state_shardings(policy, optimizer), policy.whole),
        compiler_options=compiler_options(),
    )
    parts = config.train.accumulate
    shape = (parts, config.train.global_batch // parts, config.train.seq_len)
    return Trainer(
        step=step,
        state=abstract_state(arch, policy, optimizer),
        init=make_init(arch, policy, optimizer),
        batch=_abstract_batch(shape, policy, config.data.document_mask),
        policy=policy,
        arch=arch,
    )


def _abstract_batch(shape: tuple[int, ...], policy: ShardingPolicy, masked: bool) -> Batch:
    array: Any = jax.ShapeDtypeStruct(shape, np.int32, sharding=policy.batch(leading=1))
    return Batch(array, array, array, array if masked else None)


def _train(
    config: Config, arch: Architecture, policy: ShardingPolicy, trainer: Trainer, console: Console
) -> int:
    folder = RunFolder(config.run_dir)
    resumes = folder.resumes(config.checkpoint.resume)
    with console.status("reading the data"):
        corpus = open_corpus(config.data)
    console.print(f"data: {corpus.description}", highlight=False)
    batches = TrainBatches(
        corpus.train,
        config.train.seq_len,
        config.train.global_batch,
        config.seed,
        config.data.document_mask,
        arch.vocab_size,
    )
    evaluator = Evaluator.of(config, arch, policy, corpus)
    multihost_utils.sync_global_devices("every process has checked the folder")
    identity = identity_of(arch, policy, corpus.fingerprint)

    def report(message: str) -> None:
        console.print(message, markup=False, soft_wrap=True)

    with closing(
        Checkpoints(folder.checkpoints, config.checkpoint.keep, identity, report)
    ) as checkpoints:
        start, state = first_state(config, trainer, checkpoints, resumes, console)
        # Not before: a run that may not resume here leaves the folder's config as it was.
        if jax.process_index() == 0:
            folder.create(to_yaml(config), f"{corpus.description}\n{corpus.fingerprint}\n")
        multihost_utils.sync_global_devices("the folder is there")
        try:
            end = train(
                config, trainer, batches, evaluator, checkpoints, folder, start, state, console
            )
        except NonFinite as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    if end.stopped:
        console.print(
            f"stopped after step {end.step}, which is saved; continue with "
            f"checkpoint.resume = true and run_dir = {folder.path}"
        )
        return 0
    _finish(config, arch, policy, corpus, folder, end.params, console)
    return 0


def _finish(
    config: Config,
    arch: Architecture,
    policy: ShardingPolicy,
    corpus: Corpus,
    folder: RunFolder,
    params: dict[str, Any],
    console: Console,
) -> None:
    text = is_text(config.data.source)
    held_out = corpus.heldout.tokens
    prompt = held_out[: min(_PROMPT_TOKENS, arch.max_seq_len // 2)].tolist()
    tokens = min(config.train.sample_tokens, arch.max_seq_len - len(prompt))
    sampled = []
    if tokens > 0:
        with console.status("sampling a text"):
            sampled = sample_text(
                arch, policy, params, prompt, tokens, _SAMPLE_TEMPERATURE, config.seed
            )
    if jax.process_index() > 0:
        return
    records = read_lines(folder.metrics)
    references = {}
    if text:
        references["bigram entropy"] = bigram_entropy(corpus.train, corpus.heldout)
        last = next(r for r in reversed(records) if "bits_per_token" in r)["bits_per_token"]
        console.print(
            f"held out: [bold]{last:.3f} bits per byte[/bold]; a bigram model of the same files: "
            f"{references['bigram entropy']:.3f}",
            highlight=False,
        )
    plot_losses(records, references, folder.loss_plot)
    if sampled:
        start, continued = decode(prompt, text), decode(sampled, text)
        replace_text(folder.sample, start + continued)
        console.rule("sampled continuation", align="left")
        console.print(f"[dim]{_escaped(start)}[/dim]{_escaped(continued)}", highlight=False)
        console.rule()
    console.print(f"run folder: {folder.path}  (loss plot: {folder.loss_plot})", highlight=False)


def _escaped(text: str) -> str:
    return text.replace("[", "\\[")
