"""What is decided while a program is traced, said once on stderr."""

import functools
import sys

import jax


@functools.cache  # However many layers and traces come to the same decision.
def announce(line: str) -> None:
    """Prints `line`, unless it was printed before; of several processes only the first does."""
    if jax.process_index() == 0:
        print(line, file=sys.stderr)
