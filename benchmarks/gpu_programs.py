"""Compiling many programs at once, within the time that is left; and which kernels run here."""

import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from ulysses_jax.attention.select import attention_function

_THREADS = 8
_KERNELS = ("cudnn", "tokamax", "pallas", "splash", "blockwise")

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Deadline:
    """A moment of `time.monotonic`."""

    moment: float

    def allows(self, seconds: float = 0.0) -> bool:
        """Whether work of that length would still end in time."""
        return self.left() > seconds

    def left(self) -> float:
        """Seconds until then, negative after it."""
        return self.moment - time.monotonic()


def kernels_here() -> tuple[list[str], dict[str, str]]:
    """The kernels that this machine can be asked to run, and why it cannot run the others."""
    runnable, reasons = [], {}
    for name in _KERNELS:
        try:
            attention_function(name)
        except (NotImplementedError, ValueError) as refusal:
            reasons[name] = str(refusal)
        else:
            runnable.append(name)
    return runnable, reasons


def compile_all(
    makers: Mapping[Key, Callable[[], Any]], deadline: Deadline
) -> dict[Key, Callable[..., Any] | dict[str, str]]:
    """Calls every maker, several at a time; a maker lowers and compiles one program.

    Returns, in the same order, the programs, or for those that could not be had one of
    {"refused": why} for a NotImplementedError, {"failed": why}, {"skipped": why}.
    """
    pool = ThreadPoolExecutor(_THREADS)
    futures = {key: pool.submit(maker) for key, maker in makers.items()}
    found: dict[Key, Any] = {}
    for key, future in futures.items():
        try:
            found[key] = future.result(timeout=max(0.0, deadline.left()))
        except TimeoutError:
            found[key] = {"skipped": "out of time"}
        except NotImplementedError as refusal:
            found[key] = {"refused": str(refusal)}
        except Exception as error:
            found[key] = {"failed": f"{type(error).__name__}: {error}"}
    pool.shutdown(wait=False, cancel_futures=True)
    return found
