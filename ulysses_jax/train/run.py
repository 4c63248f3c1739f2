"""`run(config)`: everything a training run is made of, from devices to the finished report."""

import sys
from contextlib import closing, nullcontext

import jax
import numpy as np
from jax.experimental import multihost_utils
from rich.console import Console
from rich.table import Table

from ulysses_jax.attention.select import attention_function
from ulysses_jax.data.batches import TrainBatches
from ulysses_jax.data.store import Corpus
from ulysses_jax.parallel.backend import (
    Processes,
    compiler_options,
    process_table,
    require_joined,
    start_backend,
)
from ulysses_jax.parallel.mesh import DATA, make_mesh
from ulysses_jax.train.checkpoint import Checkpoints
from ulysses_jax.train.command_line import to_yaml
from ulysses_jax.train.config import Config, DistributedConfig
from ulysses_jax.train.corpus import open_corpus
from ulysses_jax.train.evaluation import Evaluator
from ulysses_jax.train.identity import run_identity
from ulysses_jax.train.loop import Loop
from ulysses_jax.train.optimizer import warmup_used
from ulysses_jax.train.plan import compiled_table, plan_table
from ulysses_jax.train.report import finish
from ulysses_jax.train.run_folder import RunFolder
from ulysses_jax.train.step import Program
from ulysses_jax.train.step_log import NonFinite
from ulysses_jax.train.terminal import make_console
from ulysses_jax.train.trainer import Trainer


def run(config: Config) -> int:
    """Trains as `config` says, or with `dry_run` only plans and compiles; returns the exit code.

    Raises:
      ValueError: the config does not fit the devices, the data or the run folder.
      NotImplementedError: the attention kernel that it names cannot do what the model needs.
    """
    start_backend(config.mesh.simulated_devices, processes_of(config.distributed))
    require_joined()
    console = make_console(quiet=jax.process_index() > 0)
    _print_processes(console)
    mesh = make_mesh(config.mesh.data, config.mesh.seq)
    _require_divisible_batch(config, mesh.shape[DATA])
    # A kernel that these devices or this installation lack is refused before anything is made.
    attention_function(config.model.attention, mesh.devices.flat[0].platform)
    if config.train.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", config.train.compilation_cache)
    trainer = Trainer.of(config, mesh)
    _print_start(console, config, trainer.program)
    if config.dry_run:
        with console.status("compiling the step"):
            compiled = trainer.compile()
        console.print(compiled_table(compiled))
        console.print("dry run: nothing was trained")
        return 0
    return _train(config, trainer, console)


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


def _print_processes(console: Console) -> None:
    if jax.process_count() > 1:
        table = Table("process", "devices", "kind", title="processes", title_justify="left")
        for index, kind, count in process_table():
            table.add_row(str(index), str(count), kind)
        console.print(table)


def _print_start(console: Console, config: Config, program: Program) -> None:
    console.print(plan_table(config, program.arch, program.policy))
    device = program.policy.mesh.devices.flat[0]
    if device.platform != "cpu":
        listed = ", ".join(f"{name}={value}" for name, value in compiler_options(device).items())
        console.print(f"XLA options: {listed or 'none'}", highlight=False)
    warmup = warmup_used(config.optimizer, config.train.steps)
    if warmup < config.optimizer.warmup_steps:
        console.print(
            f"optimizer.warmup_steps is {config.optimizer.warmup_steps}, but the run has "
            f"{config.train.steps} steps; the warmup is shortened to {warmup}"
        )


def _train(config: Config, trainer: Trainer, console: Console) -> int:
    folder = RunFolder(config.run_dir)
    own_view = folder.resumes(config.checkpoint.resume)
    # A shared file system may show the others an older state of the folder.
    resumes = bool(multihost_utils.broadcast_one_to_all(np.bool_(own_view)))
    with console.status("reading the data"):
        corpus = open_corpus(config.data)
    console.print(f"data: {corpus.description}", highlight=False, markup=False)
    program = trainer.program
    batches = TrainBatches(
        corpus.train,
        config.train.seq_len,
        config.train.global_batch,
        config.seed,
        config.data.document_mask,
        program.arch.vocab_size,
    )
    rows = config.train.global_batch // config.train.accumulate
    evaluator = Evaluator.of(program, corpus.heldout, rows, config.data.document_mask)
    # Also the moment when every process has checked the folder, before one of them makes it.
    _require_same_data(corpus)
    identity = run_identity(config, program, corpus.fingerprint)

    def report(message: str) -> None:
        console.print(message, markup=False, soft_wrap=True)

    with (
        folder.locked() if jax.process_index() == 0 else nullcontext(),
        closing(
            Checkpoints(folder.checkpoints, config.checkpoint.keep, identity, report)
        ) as checkpoints,
    ):
        loop = Loop(config, trainer, batches, evaluator, checkpoints, folder, console)
        start, state = loop.first_state(resumes)
        # Not before: a run that may not resume here leaves the folder's config as it was.
        if jax.process_index() == 0:
            folder.create(to_yaml(config), f"{corpus.description}\n{corpus.fingerprint}\n")
        multihost_utils.sync_global_devices("the folder is there")
        try:
            end = loop.train(start, state)
        except NonFinite as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    if end.stopped:
        console.print(
            f"stopped after step {end.step}, which is saved; continue with\n"
            f"python train.py --config {folder.config} --checkpoint.resume true",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        return 0
    finish(config, program, corpus, folder, end.params, console)
    return 0


def _require_same_data(corpus: Corpus) -> None:
    own = np.frombuffer(bytes.fromhex(corpus.fingerprint)[:8], np.uint8)
    others = multihost_utils.process_allgather(own).reshape(jax.process_count(), -1)
    different = np.flatnonzero(np.any(others != others[0], axis=1))
    if different.size:
        raise ValueError(
            f"processes 0 and {different[0]} read different data; give data.source a path that "
            "all processes share (python-stdlib is each machine's own)"
        )
