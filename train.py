"""Trains a GPT with Ulysses sequence parallelism: `python train.py --help`."""

import sys

from ulysses_jax.train.command_line import parse, run_command_line


def main() -> int:
    """Parses the config, then trains; JAX is imported only after that."""
    config = parse(sys.argv[1:])

    from ulysses_jax.train.run import run

    return run(config)


if __name__ == "__main__":
    sys.exit(run_command_line(main))
