"""The run folder: what lies in it, and whether a run may start or resume there.

config.yaml      the complete config of the newest start (`--config` reads it back)
data.txt         what the run reads, with the fingerprint of the tokens
metrics.jsonl    a line per step and per evaluation (format: `metrics.py`)
events.*         the same for TensorBoard
checkpoints/     see `checkpoint.py`
loss.png         the loss curves
sample.txt       a text sampled from the trained model
.lock            held by the process that writes here
profile/         traces for TensorBoard or Perfetto, with train.profile_steps
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ulysses_jax.train.checkpoint import has_sealed_remains, latest_step
from ulysses_jax.train.command_line import RUN_CONFIG
from ulysses_jax.train.config import Resume


def replace_text(path: Path, text: str) -> None:
    """Writes a file so that a reader, or a kill at any moment, finds the old text or the new."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


class RunFolder:
    """The paths of one run."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config = self.path / RUN_CONFIG
        self.data = self.path / "data.txt"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.loss_plot = self.path / "loss.png"
        self.sample = self.path / "sample.txt"
        self.profile = self.path / "profile"
        self._lock = self.path / ".lock"

    def resumes(self, resume: Resume) -> bool:
        """Whether the run continues from a checkpoint here; changes nothing.

        Raises:
          ValueError: the folder holds a run and `resume` is false, holds no checkpoint and it is
            true, or cannot be written.
        """
        has_checkpoint = latest_step(self.checkpoints) is not None
        if resume is True and not has_checkpoint:
            raise ValueError(
                f"checkpoint.resume is true, but {self.path} holds no checkpoint; give the "
                "run_dir of a run that saved one, or checkpoint.resume = auto to start where "
                "there is none"
            )
        if resume is False and self.path.is_dir() and self._has_content():
            raise ValueError(
                f"run_dir {self.path} exists and is not empty; give another run_dir, or continue "
                "the run in it with checkpoint.resume = true"
            )
        if not has_checkpoint and has_sealed_remains(self.checkpoints):
            raise ValueError(
                f"the checkpoints in {self.checkpoints} are all damaged, and starting anew would "
                "overwrite the run; restore them from a copy, or give another run_dir"
            )
        self._require_writable()
        return has_checkpoint

    def _has_content(self) -> bool:
        return any(path != self._lock for path in self.path.iterdir())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other runs out of the folder, which is made if missing; for one process.

        The lock ends with the process, however that ends.

        Raises:
          ValueError: another run holds it, or the folder cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = self._lock.open("a")
        except OSError as error:
            raise self._unwritable(error) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(
                    f"another run is training in run_dir {self.path}; give another run_dir, or "
                    "wait for its end"
                ) from error
            yield

    def _unwritable(self, error: OSError) -> ValueError:
        return ValueError(
            f"run_dir {self.path} cannot be written: {error}; give a run_dir that you may write to"
        )

    def _require_writable(self) -> None:
        nearest = self.path.absolute()
        try:
            while not nearest.exists():
                nearest = nearest.parent
        except OSError as error:
            raise self._unwritable(error) from error
        if not nearest.is_dir():
            raise ValueError(
                f"run_dir {self.path} cannot be a folder: {nearest} is a file; give another run_dir"
            )
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise ValueError(
                f"run_dir {self.path} cannot be written: no permission in {nearest}; give a "
                "run_dir that you may write to"
            )

    def create(self, config: str, data: str) -> None:
        """Makes the folder and writes the config and what the data is; for one process."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            replace_text(self.config, config)
            replace_text(self.data, data)
        except OSError as error:
            raise self._unwritable(error) from error
