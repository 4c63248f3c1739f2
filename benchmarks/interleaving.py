"""The parent's side of an interleaved measurement: contestants that run in turn, never at once."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).parent
PEER_PYTHON = HERE.parent / ".bench-venv" / "bin" / "python"
"""The interpreter of the environment that only peers live in."""

_PATIENCE_S = 240


class ContestantError(Exception):
    """A contestant that could not be started, or did not run to its end; says why."""


@dataclass(frozen=True)
class Side:
    """One side of a comparison.

    Attributes:
      name: what the table calls it.
      module: the module of this folder that is its process.
      arguments: keyword arguments of its `prepare`.
      processes: how many processes share the work; each is told its `rank`.
      peer: whether it lives in the peers' environment.
    """

    name: str
    module: str
    arguments: dict[str, Any] = field(default_factory=dict)
    processes: int = 1
    peer: bool = False


@dataclass
class Measured:
    """What became of one side.

    Attributes:
      facts: of its first process; `check` is summed over all of them.
      seconds: of every timed run, in order; of several processes the slowest.
      peak_rss_bytes: largest resident size so far, summed over its processes.
    """

    facts: dict[str, Any]
    seconds: list[float] = field(default_factory=list)
    peak_rss_bytes: int = 0


class _Process:
    """One process of a contestant and its two pipes."""

    def __init__(self, side: Side, arguments: dict[str, Any], log: Path) -> None:
        self.log = log
        read, write = os.pipe()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    str(PEER_PYTHON) if side.peer else sys.executable,
                    *["-m", side.module, json.dumps(arguments | {"answers": write})],
                ],
                cwd=HERE,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[write],
            )
        os.close(write)
        self.answers = os.fdopen(read)

    def tell_to_run(self) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(b"run\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise ContestantError(self._last_words()) from None

    def answer(self) -> dict[str, Any]:
        ready, _, _ = select.select([self.answers], [], [], _PATIENCE_S)
        if not ready:
            raise ContestantError(f"no answer within {_PATIENCE_S} s")
        line = self.answers.readline()
        if not line:
            raise ContestantError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdin.close()
        self.answers.close()

    def _last_words(self) -> str:
        self.process.wait()
        said = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return said[-1] if said else f"ended with code {self.process.returncode} and said nothing"


class Contestant:
    """A side with its processes running; a context manager that ends them."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self._stack = ExitStack()
        self._processes: list[_Process] = []

    def __enter__(self) -> Self:
        if self.side.peer and not PEER_PYTHON.exists():
            raise ContestantError("the peers are not installed: run attention.py --install")
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        arguments = dict(self.side.arguments)
        for rank in range(self.side.processes):
            if self.side.processes > 1:
                arguments |= {"rank": rank, "rendezvous": str(folder / "rendezvous")}
            process = _Process(self.side, arguments, folder / f"{rank}.log")
            self._stack.callback(process.end)
            self._processes.append(process)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def ready(self) -> Measured:
        """Waits until every process has prepared its work."""
        facts = [process.answer() for process in self._processes]
        if "check" in facts[0]:
            facts[0]["check"] = [
                sum(parts) for parts in zip(*(f["check"] for f in facts), strict=True)
            ]
        return Measured(facts[0])

    def run(self, measured: Measured) -> None:
        """Runs once and adds what it took to `measured`."""
        for process in self._processes:
            process.tell_to_run()
        answers = [process.answer() for process in self._processes]
        measured.seconds.append(max(answer["seconds"] for answer in answers))
        measured.peak_rss_bytes = sum(answer["peak_rss_bytes"] for answer in answers)


def measure(ours: Side, against: Side | None, rounds: int) -> tuple[Measured, Measured | None]:
    """Runs both sides in turn, `rounds` times each: ours, against, ours, against, …

    Raises:
      ContestantError: a side cannot be started or fails, or the two do not compute the same.
    """
    with ExitStack() as stack:
        sides = [side for side in (ours, against) if side is not None]
        contestants = [stack.enter_context(Contestant(side)) for side in sides]
        measured = [contestant.ready() for contestant in contestants]
        _require_same_results(sides, measured)
        for _ in range(rounds):
            for contestant, result in zip(contestants, measured, strict=True):
                contestant.run(result)
    return measured[0], measured[1] if against is not None else None


def _require_same_results(sides: list[Side], measured: list[Measured]) -> None:
    checks = [result.facts.get("check") for result in measured]
    if len(checks) < 2 or None in checks:
        return
    for first, second in zip(*checks, strict=True):
        if abs(first - second) > 1e-3 * abs(first):
            raise ContestantError(
                f"{sides[0].name} and {sides[1].name} do not compute the same: {checks[0]} and "
                f"{checks[1]}"
            )
