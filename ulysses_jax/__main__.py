"""`python -m ulysses_jax …`: generate and evaluate use a trained run, verify checks a model."""

import sys

from ulysses_jax.train.command_line import parse_evaluate, parse_generate, run_command_line
from ulysses_jax.verification.command_line import parse_verify

USAGE = """usage: python -m ulysses_jax generate --run_dir DIR --prompt TEXT [--tokens N …]
       python -m ulysses_jax evaluate --run_dir DIR [--data.source …] [--mesh.seq N …]
       python -m ulysses_jax verify [--model FILE.py:NAME] [--mesh.data N] [--mesh.seq N …]

Give --help after a command for its keys. Training is `python train.py --help`."""


def main() -> int:
    """Runs the command that the first argument names; JAX is imported only after parsing."""
    command, arguments = sys.argv[1:2], sys.argv[2:]
    if command == ["generate"]:
        generation = parse_generate(arguments)

        from ulysses_jax.train.inference import generate_text

        return generate_text(generation)
    if command == ["evaluate"]:
        evaluation = parse_evaluate(arguments)

        from ulysses_jax.train.inference import evaluate_run

        return evaluate_run(evaluation)
    if command == ["verify"]:
        verification = parse_verify(arguments)

        from ulysses_jax.verification.command import run_verify

        return run_verify(verification)
    if command in (["--help"], ["-h"]):
        print(USAGE)
        return 0
    given = repr(command[0]) if command else "nothing"
    raise ValueError(
        f"the command is {given}; use generate, evaluate or verify (--help shows them)"
    )


if __name__ == "__main__":
    sys.exit(run_command_line(main))
