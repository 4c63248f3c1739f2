"""The run folder: what lies in it, and whether a run may start or resume there.

config.yaml      the complete config of the newest start (`--config` reads it back)
data.txt         what the run reads, with the fingerprint of the tokens
metrics.jsonl    a line per step and per evaluation (format: `metrics.py`)
events.*         the same for TensorBoard
checkpoints/     see `checkpoint.py`
loss.png         the loss curves
sample.txt       a text sampled from the trained model
profile/         traces for TensorBoard or Perfetto, with train.profile_steps
"""

import os
from pathlib import Path

from ulysses_jax.train.checkpoint import latest_step
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
        if resume is False and self.path.is_dir() and any(self.path.iterdir()):
            raise ValueError(
                f"run_dir {self.path} exists and is not empty; give another run_dir, or continue "
                "the run in it with checkpoint.resume = true"
            )
        self._require_writable()
        return has_checkpoint

    def _require_writable(self) -> None:
        nearest = self.path.absolute()
        while not nearest.exists():
            nearest = nearest.parent
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
            raise ValueError(
                f"run_dir {self.path} cannot be written: {error}; give a run_dir that you may "
                "write to"
            ) from error
