"""The training loop: feed, step, evaluate, save, stop; metrics are read one step late."""

import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import jax
from rich.console import Console

from ulysses_jax.data.batches import TrainBatches
from ulysses_jax.data.feed import device_batches
from ulysses_jax.train.checkpoint import Checkpoints
from ulysses_jax.train.config import Config
from ulysses_jax.train.evaluation import Evaluator
from ulysses_jax.train.metrics import MetricsWriter
from ulysses_jax.train.profile import Profile
from ulysses_jax.train.run_folder import RunFolder
from ulysses_jax.train.state import Purpose, TrainState, random_key
from ulysses_jax.train.step_log import StepLog
from ulysses_jax.train.stopping import StopRequest
from ulysses_jax.train.trainer import Trainer


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


@dataclass(frozen=True)
class Loop:
    """Trains one run; every process must do the same with it, in the same order."""

    config: Config
    trainer: Trainer
    batches: TrainBatches
    evaluator: Evaluator
    checkpoints: Checkpoints
    folder: RunFolder
    console: Console

    def first_state(self, resumes: bool) -> tuple[int, TrainState]:
        """The step and state to train from: the start, or the newest good checkpoint.

        Raises:
          ValueError: the checkpoints are of another run, or none can be used.
        """
        if not resumes:
            with self.console.status("initialising the parameters"):
                key = random_key(self.config.seed, Purpose.PARAMETERS, self.trainer.program.policy)
                return 0, jax.block_until_ready(self.trainer.init(key))
        with self.console.status("restoring the newest checkpoint"):
            start, state = self.checkpoints.restore(self.trainer.state)
        if start > self.config.train.steps:
            raise ValueError(
                f"the newest checkpoint is of step {start}, but train.steps is "
                f"{self.config.train.steps}; use train.steps of {start} or more"
            )
        self.console.print(f"resumed from the checkpoint of step {start}")
        return start, state

    def train(self, start: int, state: TrainState) -> End:
        """Trains from `state`, of step `start`, to `train.steps`; the state is donated.

        Raises:
          NonFinite: at the first step whose loss or gradient is not finite.
        """
        with self.console.status("compiling the step"):
            began = time.perf_counter()
            compiled = self.trainer.compile()
            self.console.print(f"compiled the step in {time.perf_counter() - began:.1f} s")
        config, policy = self.config, self.trainer.program.policy
        steps = config.train.steps
        key = random_key(config.seed, Purpose.DROPOUT, policy)
        shape = self.trainer.batch.tokens_BS.shape
        feed = device_batches(self.batches.read, shape, policy.batch(leading=1), start, steps)
        files = self.folder if jax.process_index() == 0 else None
        writer = MetricsWriter(files, start, steps, config.train.log_every, self.console)
        log = StepLog(config, self.trainer.program, writer, self.checkpoints, self.console)
        profile = Profile(config.train.profile_steps, self.folder.profile, start)
        step, stopped = start, False
        with closing(feed), writer, StopRequest() as stop, profile:
            for batch in feed:
                profile.before(step)
                # Nothing may cross between host and devices unasked: the host would wait.
                with jax.transfer_guard("disallow"):
                    state, metrics = compiled(state, batch, key)
                step += 1
                log.add(step, metrics)
                last = step == steps
                # At the last step there is nothing left to stop.
                stopped = stop.stops_at(step) and not last
                ends = last or stopped
                evaluates = not stopped and (last or _due(config.train.eval_every, step))
                saves = ends or _due(config.checkpoint.every, step)
                if evaluates or saves:
                    log.flush()
                if evaluates:
                    writer.evaluation(step, self.evaluator(state.params).loss)
                if saves:
                    self.checkpoints.save(step, state)
                if evaluates or saves:
                    log.restart_clock()
                self.checkpoints.check()
                if stopped:
                    break
            if start == steps:
                self.console.print(f"all {steps} steps are done already; nothing to train")
                writer.evaluation(step, self.evaluator(state.params).loss)
            self.checkpoints.wait()
        return End(step, state.params, stopped)


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
