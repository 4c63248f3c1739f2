"""The commands' arguments and config files: text in, one checked configuration out."""

import dataclasses
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from ulysses_jax.train.config import Config, EvaluateConfig, GenerateConfig
from ulysses_jax.train.parsing import (
    Arguments,
    build_config,
    check_required,
    help_text,
    read_yaml,
    split_arguments,
)
from ulysses_jax.train.validation import validate, validate_evaluate, validate_generate

RUN_CONFIG = "config.yaml"
"""Name of the config in a run folder."""


def parse(argv: Sequence[str], prog: str = "train.py") -> Config:
    """Reads the training command's arguments, config files first and overrides last.

    `--help` and `--print_config` print and exit with code 0. Raises ConfigError, with one message,
    for anything that can be known to be wrong without looking at data or devices.
    """
    arguments = _split(Config, argv, prog, takes_config=True)
    values: dict[str, object] = {}
    for path in arguments.config_files:
        values |= read_yaml(path, Config)
    config = build_config(Config, values | arguments.values)
    validate(config)
    if "print_config" in arguments.flags:
        sys.stdout.write(to_yaml(config))
        raise SystemExit(0)
    return config


def parse_generate(
    argv: Sequence[str], prog: str = "python -m ulysses_jax generate"
) -> GenerateConfig:
    """Reads the generate command's arguments; raises ConfigError for a mistake."""
    arguments = _split(GenerateConfig, argv, prog, takes_config=False)
    config = build_config(GenerateConfig, arguments.values)
    validate_generate(config)
    return config


def parse_evaluate(
    argv: Sequence[str], prog: str = "python -m ulysses_jax evaluate"
) -> EvaluateConfig:
    """Reads the evaluate command's arguments; a data key not given is the run's own.

    Raises ConfigError for a mistake and for a run folder without a config.
    """
    arguments = _split(EvaluateConfig, argv, prog, takes_config=False)
    check_required(EvaluateConfig, arguments.values)
    run = load(Path(arguments.values["run_dir"]) / RUN_CONFIG)
    own_data = {f"data.{name}": value for name, value in dataclasses.asdict(run.data).items()}
    source = arguments.values.get("data.source")
    if source is not None and not str(source).endswith(".bin"):
        # It ends the documents of the run's own .bin; those of a text are its files.
        own_data["data.document_end"] = None
    config = build_config(EvaluateConfig, own_data | arguments.values)
    validate_evaluate(config, run)
    return config


def load(path: str | Path) -> Config:
    """Reads a config file back, such as a run folder's; raises ConfigError for a mistake in it."""
    return parse([f"--config={path}"])


def to_yaml(config: Config) -> str:
    """The complete config as text that `load` and `--config` read back to an equal one."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)


def run_command_line(main: Callable[[], int | None]) -> int:
    """Runs a command and returns its exit code.

    A ValueError, which is how a user's mistake is raised everywhere here, becomes one line on
    stderr and code 2, and so does the NotImplementedError of a kernel that was asked for by name;
    one that a library raised is a mistake of ours and keeps its traceback. An interrupt that the
    command did not handle becomes code 130.
    """
    code = 1
    try:
        code = main() or 0
    except (ValueError, NotImplementedError) as error:
        raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
        if Path(__file__).parents[1] not in Path(raised_in).parents:
            traceback.print_exc()
        else:
            print(f"error: {error}", file=sys.stderr)
            code = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except Exception:
        traceback.print_exc()
    if code and "jax" in sys.modules:
        from ulysses_jax.parallel.backend import leave_at_once

        leave_at_once(code)
    return code


def _split(schema: type, argv: Sequence[str], prog: str, takes_config: bool) -> Arguments:
    arguments = split_arguments(schema, argv, takes_config)
    if "help" in arguments.flags:
        sys.stdout.write(help_text(schema, prog, takes_config))
        raise SystemExit(0)
    return arguments
