"""The training loop: feed, step, evaluate, save, stop; metrics are read one step late."""

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Self

import jax
from rich.console import Console

from ulysses_jax.data.batches import Batch, EvalBatches, TrainBatches
from ulysses_jax.data.feed import device_batches
from ulysses_jax.data.store import Corpus
from ulysses_jax.model.config import Architecture
from ulysses_jax.parallel.sharding import ShardingPolicy
from ulysses_jax.train.checkpoint import Checkpoints
from ulysses_jax.train.config import Config
from ulysses_jax.train.evaluation import EvalResult, evaluate
from ulysses_jax.train.flops import device_peak, paper_flops, useful_flops
from ulysses_jax.train.metrics import MetricsWriter
from ulysses_jax.train.run_folder import RunFolder
from ulysses_jax.train.state import TrainState, random_key
from ulysses_jax.train.step import Program, StepMetrics
from ulysses_jax.train.stopping import StopRequest


class NonFinite(Exception):
    """The loss or the gradient of a step was not a number; its update was not applied."""


@dataclass(frozen=True)
class Trainer:
    """The functions of one run, with the abstract values they are compiled for.

    Attributes:
      step: the jitted train step (state, batch, key) → (state, metrics).
      init: the jitted key → first state.
      state, batch: abstract arguments of `step`.
      policy: where they live.
      arch: the model.
    """

    step: Any
    init: Callable[[jax.Array], TrainState]
    state: TrainState
    batch: Batch
    policy: ShardingPolicy
    arch: Architecture

    def compile(self) -> Any:
        """Compiles the step without any array."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=self.policy.whole)
        return self.step.lower(self.state, self.batch, key).compile()


@dataclass(frozen=True)
class Evaluator:
    """Evaluation of this run's parameters on its held-out part."""

    loss_sum: Callable[[Any, Batch], Any]
    batches: EvalBatches
    shape: tuple[int, int]
    policy: ShardingPolicy

    @classmethod
    def of(cls, config: Config, arch: Architecture, policy: ShardingPolicy, corpus: Corpus) -> Self:
        """Batches as large as a training micro-batch."""
        rows = config.train.global_batch // config.train.accumulate
        program = Program(arch, policy, config.train.remat, config.train.loss_chunk)
        batches = EvalBatches(
            corpus.heldout,
            config.train.seq_len,
            rows,
            config.data.document_mask,
            arch.vocab_size,
        )
        shape = (rows, config.train.seq_len)
        return cls(jax.jit(program.loss_sum), batches, shape, policy)

    def __call__(self, params: dict[str, Any]) -> EvalResult:
        return evaluate(self.loss_sum, params, self.batches, self.shape, self.policy)


@dataclass(frozen=True)
class End:
    """How training ended.

    Attributes:
      step: the last step done.
      params: the parameters after it.
      stopped: whether a signal ended it before its last step.
    """

    step: int
    params: dict[str, Any]
    stopped: bool


def train(
    config: Config,
    trainer: Trainer,
    batches: TrainBatches,
    evaluator: Evaluator,
    checkpoints: Checkpoints,
    folder: RunFolder,
    start: int,
    state: TrainState,
    console: Console,
) -> End:
    """Trains from `state`, of step `start`, to `train.steps`; the state is donated.

    Raises:
      NonFinite: at the first step whose loss or gradient is not finite.
    """
    with console.status("compiling the step"):
        began = time.perf_counter()
        compiled = trainer.compile()
        console.print(f"compiled the step in {time.perf_counter() - began:.1f} s")
    policy, steps = trainer.policy, config.train.steps
    key = random_key(config.seed, policy)
    step, stopped = start, False
    feed = device_batches(
        batches.read, trainer.batch.tokens_BS.shape, policy.batch(leading=1), start, steps
    )
    writer = MetricsWriter(
        folder if jax.process_index() == 0 else None, start, steps, config.train.log_every, console
    )
    log = _StepLog(config, trainer, writer, checkpoints, console)
    with closing(feed), writer, StopRequest() as stop, _Profile(config, folder, start) as profile:
        for batch in feed:
            profile.before(step)
            # Nothing may cross between host and devices unasked: it would make the host wait.
            with jax.transfer_guard("disallow"):
                state, metrics = compiled(state, batch, key)
            step += 1
            log.add(step, metrics)
            last = step == steps
            # At the last step there is nothing left to stop.
            stopped = stop.stops_at(step) and not last
            if last or stopped or _due(config.train.eval_every, step):
                log.flush()
                if not stopped:
                    writer.evaluation(step, evaluator(state.params).loss)
                log.restart_clock()
            if last or stopped or _due(config.checkpoint.every, step):
                log.flush()
                checkpoints.save(step, state)
                log.restart_clock()
            checkpoints.check()
            if stopped:
                break
        if start == steps:
            console.print(f"all {steps} steps are done already; nothing to train")
        checkpoints.wait()
    return End(step, state.params, stopped)


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def first_state(
    config: Config, trainer: Trainer, checkpoints: Checkpoints, resumes: bool, console: Console
) -> tuple[int, TrainState]:
    """The step and state to train from: the start, or the newest good checkpoint.

    Raises:
      ValueError: the checkpoints are of another run, or none can be used.
    """
    if not resumes:
        with console.status("initialising the parameters"):
            key = random_key(config.seed, trainer.policy)
            return 0, jax.block_until_ready(trainer.init(key))
    with console.status("restoring the newest checkpoint"):
        start, state = checkpoints.restore(trainer.state)
    if start > config.train.steps:
        raise ValueError(
            f"the newest checkpoint is of step {start}, but train.steps is {config.train.steps}; "
            f"use train.steps of {start} or more"
        )
    console.print(f"resumed from the checkpoint of step {start}")
    return start, state


class _StepLog:
    """Turns the metrics of a step into a record after the next step was dispatched."""

    def __init__(
        self,
        config: Config,
        trainer: Trainer,
        writer: MetricsWriter,
        checkpoints: Checkpoints,
        console: Console,
    ):
        train, arch, mesh = config.train, trainer.arch, trainer.policy.mesh
        self._step_tokens = train.global_batch * train.seq_len
        peak = device_peak(mesh.devices.flat[0])
        self._peak = None if peak is None else peak * mesh.size
        self._useful = useful_flops(arch, train.global_batch, train.seq_len)
        self._paper = paper_flops(arch, train.global_batch, train.seq_len)
        self._writer, self._checkpoints, self._console = writer, checkpoints, console
        self._waiting: tuple[int, StepMetrics] | None = None
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leaves what happened since the last record out of the next step's time."""
        self._clock = time.perf_counter()

    def add(self, step: int, metrics: StepMetrics) -> None:
        """Takes the metrics of a step just dispatched and writes those of the one before."""
        self.flush()
        self._waiting = step, metrics

    def flush(self) -> None:
        """Waits for and writes what is left."""
        if self._waiting is None:
            return
        step, on_device = self._waiting
        self._waiting = None
        metrics: StepMetrics = jax.device_get(on_device)
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        if not metrics.applied and metrics.labels > 0:
            self._checkpoints.wait()
            good = self._checkpoints.latest_step()
            raise NonFinite(
                f"at step {step} the loss is {metrics.loss} and the gradient's norm "
                f"{metrics.grad_norm}; the update was not applied. The last good checkpoint is "
                + ("none" if good is None else f"of step {good}")
                + "; lower optimizer.learning_rate or look at the data of this step"
            )
        if not metrics.applied:
            self._console.print(f"step {step}: no token has a label, so nothing was updated")
        self._writer.train(
            {
                "step": step,
                "loss": float(metrics.loss),
                "grad_norm": float(metrics.grad_norm),
                "learning_rate": float(metrics.learning_rate),
                "tokens_seen": step * self._step_tokens,
                "step_time_s": seconds,
                "tokens_per_second": self._step_tokens / seconds,
                "mfu": self._share_of_peak(self._useful, seconds),
                "hfu_paper": self._share_of_peak(self._paper, seconds),
            }
        )

    def _share_of_peak(self, flops: float, seconds: float) -> float | None:
        return None if self._peak is None else flops / seconds / self._peak


class _Profile:
    """Traces `train.profile_steps` steps, beginning with the third: the first two warm up."""

    def __init__(self, config: Config, folder: RunFolder, start: int):
        self._steps = config.train.profile_steps
        self._folder = str(folder.profile)
        self._begin = start + 2
        self._running = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def before(self, step: int) -> None:
        """Called before the step after `step` is dispatched."""
        if self._steps and step == self._begin:
            jax.profiler.start_trace(self._folder)
            self._running = True
        elif step == self._begin + self._steps:
            self._stop()

    def _stop(self) -> None:
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
