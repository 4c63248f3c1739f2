"""The metrics of a run: metrics.jsonl, TensorBoard events and the terminal, from one process.

metrics.jsonl holds a JSON object a line. After each step:
`step` (updates and skipped batches so far), `loss` (nats per token), `grad_norm` (before
clipping), `learning_rate`, `tokens_seen`, `step_time_s`, `tokens_per_second`, `mfu` (useful FLOPs,
those of whole causal sequences, over the devices' peak) and `hfu_paper` (the paper's count over
it), both null where the peak is unknown. After each evaluation: `step`, `eval_loss` (nats per
token), `bits_per_token`.
"""

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tensorboardX import SummaryWriter

from ulysses_jax.train.run_folder import RunFolder, replace_text


def keep_lines_until(path: Path, step: int) -> bool:
    """Drops what a resumed run will write again: lines past `step`, and one cut short by a kill.

    Returns whether an evaluation of `step` itself is among the lines kept.
    """
    if not path.exists():
        return False
    kept, evaluated = [], False
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if (
            isinstance(record, dict)
            and isinstance(record.get("step"), int | float)
            and (record["step"] <= step)
        ):
            kept.append(line + "\n")
            evaluated |= "eval_loss" in record and record["step"] == step
    replace_text(path, "".join(kept))
    return evaluated


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All records of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class MetricsWriter:
    """Writes the records of the steps after `start`, with a progress bar while it is open.

    Args:
      folder: where the files go; None writes none, for all processes but the first.
      start: the step that training starts or resumes from.
      steps: the step it will end at.
      log_every: steps between two lines on the terminal.
      console: the terminal.
    """

    def __init__(
        self,
        folder: RunFolder | None,
        start: int,
        steps: int,
        log_every: int,
        console: Console,
    ):
        self._file: TextIO | None = None
        self._evaluated: int | None = None
        if folder is not None:
            if keep_lines_until(folder.metrics, start):
                self._evaluated = start
            self._file = folder.metrics.open("a", encoding="utf-8")
            self._events = SummaryWriter(str(folder.path), purge_step=start + 1)
        self._console = console
        self._steps = steps
        self._log_every = log_every
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=console,
            # Where there is no terminal the log lines alone show how far the run is.
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=steps, completed=start)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()
        if self._file is not None:
            self._file.close()
            self._events.close()

    def train(self, record: dict[str, Any]) -> None:
        """Writes the record of one step."""
        self._write(record)
        step, loss = record["step"], record["loss"]
        self._progress.update(self._task, completed=step, description=f"loss {loss:.3f}")
        if step % self._log_every == 0 or step == self._steps:
            self._console.print(
                f"step {step:>{len(str(self._steps))}}/{self._steps}  loss {loss:.4f}  "
                f"grad norm {record['grad_norm']:.3f}  lr {record['learning_rate']:.2e}  "
                f"{record['step_time_s']:.3f} s  {record['tokens_per_second']:,.0f} tokens/s",
                highlight=False,
            )

    def evaluation(self, step: int, loss: float) -> None:
        """Writes the record of one evaluation; `loss` in nats per token."""
        bits = loss / math.log(2)
        if step != self._evaluated:
            self._write({"step": step, "eval_loss": loss, "bits_per_token": bits})
        self._console.print(
            f"step {step}  [bold]held-out loss {loss:.4f}, {bits:.3f} bits per token[/bold]",
            highlight=False,
        )

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        for name, value in record.items():
            if name != "step" and value is not None:
                self._events.add_scalar(name, value, record["step"])
