"""The verify command's arguments: text in, one checked configuration out (no JAX here)."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from ulysses_jax.train.config import ConfigError, MeshConfig
from ulysses_jax.train.parsing import build_config, help_text, split_arguments

_LARGEST_AXIS = 4096


@dataclass(frozen=True)
class VerifyConfig:
    """Checks that a model on a mesh is the same model as on one device."""

    model: str | None = None
    """Function without arguments that returns a ulysses_jax Case (FILE.py:NAME or module:NAME;
    null: a small GPT of this package)."""
    mesh: MeshConfig = field(default_factory=lambda: MeshConfig(data=1, seq=2))


def parse_verify(argv: Sequence[str], prog: str = "python -m ulysses_jax verify") -> VerifyConfig:
    """Reads the verify command's arguments; raises ConfigError for a mistake.

    `--help` prints and exits with code 0.
    """
    arguments = split_arguments(VerifyConfig, argv, takes_config=False)
    if "help" in arguments.flags:
        sys.stdout.write(help_text(VerifyConfig, prog, takes_config=False))
        raise SystemExit(0)
    config = build_config(VerifyConfig, arguments.values)
    _validate(config)
    return config


def _validate(config: VerifyConfig) -> None:
    mesh = config.mesh
    for key, value, smallest in (
        ("mesh.data", mesh.data, 1),
        ("mesh.seq", mesh.seq, 1),
        ("mesh.simulated_devices", mesh.simulated_devices, 0),
    ):
        if not smallest <= value <= _LARGEST_AXIS and not (key == "mesh.data" and value == -1):
            raise ConfigError(f"{key} is {value}; use a number from {smallest} to {_LARGEST_AXIS}")
    if config.model is not None:
        place, _, name = config.model.rpartition(":")
        if not place or not name.isidentifier():
            raise ConfigError(
                f"model is {config.model!r}; use FILE.py:NAME or module:NAME, where NAME is a "
                "function without arguments that returns a Case"
            )
