"""A profiler trace of a few steps, for TensorBoard or Perfetto."""

from pathlib import Path
from typing import Self

import jax


class Profile:
    """Traces `steps` steps into `folder`, beginning with the third: the first two warm up."""

    def __init__(self, steps: int, folder: Path, start: int):
        self._steps = steps
        self._folder = str(folder)
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
