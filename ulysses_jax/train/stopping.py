"""Stopping a run from outside: SIGTERM, Ctrl-C or a closed terminal lets it save and end.

In a single process the first signal asks for the stop and a second one ends the process at once.
With several, JAX's preemption notifier owns SIGTERM and agrees with all processes on one step to
stop at, though only one was signalled; a handler of ours would stop it from working.
"""

import os
import signal
from types import FrameType, TracebackType
from typing import Any, Self

import jax
from jax.experimental import multihost_utils


class StopRequest:
    """Knows whether somebody asked the run to stop; signals are caught while it is entered."""

    def __init__(self) -> None:
        self._asked = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if jax.process_count() == 1:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                # Under nohup a closed terminal is to be ignored.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._ask)
        else:
            self._previous[signal.SIGINT] = signal.signal(signal.SIGINT, _pass_on_as_sigterm)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        for caught in self._previous:
            signal.signal(caught, signal.SIG_DFL)

    def stops_at(self, step: int) -> bool:
        """Whether the run shall stop now, after `step` steps; the same answer in all processes."""
        if jax.process_count() == 1:
            return self._asked
        return multihost_utils.reached_preemption_sync_point(step)


def _pass_on_as_sigterm(number: int, frame: FrameType | None) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
