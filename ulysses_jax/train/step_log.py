"""Step metrics from devices to records, one step late, and the stop at what is not finite."""

import time

import jax
from rich.console import Console

from ulysses_jax.train.checkpoint import Checkpoints
from ulysses_jax.train.config import Config
from ulysses_jax.train.flops import device_peak, paper_flops, useful_flops
from ulysses_jax.train.metrics import MetricsWriter
from ulysses_jax.train.step import Program, StepMetrics


class NonFinite(Exception):
    """The loss, gradient or update of a step was not finite, and the update was not applied."""


class StepLog:
    """Turns the metrics of a step into a record after the next step was dispatched."""

    def __init__(
        self,
        config: Config,
        program: Program,
        writer: MetricsWriter,
        checkpoints: Checkpoints,
        console: Console,
    ):
        train, arch, mesh = config.train, program.arch, program.policy.mesh
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
                f"the update of step {step} was not applied, because it, the loss "
                f"({metrics.loss}) or the gradient's norm ({metrics.grad_norm}) is not "
                "finite. The last good checkpoint is "
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
