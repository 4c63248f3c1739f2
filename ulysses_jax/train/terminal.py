"""The terminal of a run: one that may go away, or not know every character, without harm."""

import io
import sys
from typing import TextIO

from rich.console import Console


class _Patient(io.TextIOBase):
    """Writes to a stream until that fails, as the pipe of a reader that has ended does."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._gone = False

    def write(self, text: str) -> int:
        if not self._gone:
            try:
                encoding = self._stream.encoding or "utf-8"
                self._stream.write(text.encode(encoding, errors="replace").decode(encoding))
            except OSError:
                self._gone = True
        return len(text)

    def flush(self) -> None:
        if not self._gone:
            try:
                self._stream.flush()
            except OSError:
                self._gone = True

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """That of the stream, by which rich chooses the characters of boxes and bars."""
        return self._stream.encoding or "utf-8"


def make_console(quiet: bool = False) -> Console:
    """The console for a run's messages; training outlives whoever reads them."""
    return Console(file=_Patient(sys.stdout), quiet=quiet)  # type: ignore[arg-type]
