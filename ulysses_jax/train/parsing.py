"""Reads dataclasses from YAML files and command lines, with one message for each mistake.

jsonargparse supplies the help and the types. The files and the command line are merged before it
sees them, because left to itself it lets a file undo an override that stands before `--config`,
and it names no nearest key. A value is text in both places, so both follow the same rules.
"""

import dataclasses
import difflib
import re
import types
from argparse import SUPPRESS, ArgumentError
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import jsonargparse
import yaml

from ulysses_jax.train.config import ConfigError

_T = TypeVar("_T")
_TYPE_NAMES = types.MappingProxyType(
    {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "null"}
)
_NUMBER = re.compile(
    r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$|[-+]?\.?(inf|nan)$|null$|~$", re.IGNORECASE
)


class Arguments(NamedTuple):
    """A command line, taken apart."""

    config_files: list[str]
    values: dict[str, str]
    flags: set[str]


class Leaf(NamedTuple):
    """A key that holds one value."""

    type: Any
    required: bool


def leaves_of(schema: type, prefix: str = "") -> dict[str, Leaf]:
    """Every key of a nested dataclass that holds a value, by its dotted name."""
    leaves: dict[str, Leaf] = {}
    groups = _groups_of(schema)
    hints = get_type_hints(schema)
    for field in dataclasses.fields(schema):
        if field.name in groups:
            leaves |= leaves_of(groups[field.name], f"{prefix}{field.name}.")
        else:
            leaves[prefix + field.name] = Leaf(
                hints[field.name], required=field.default is dataclasses.MISSING
            )
    return leaves


def _groups_of(schema: type) -> dict[str, Any]:
    hints: dict[str, Any] = get_type_hints(schema)
    return {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}


def _group_defaults(schema: type, name: str) -> dict[str, Any]:
    """The defaults that `schema` gives to a group; without any, the help must show none either."""
    (field,) = (field for field in dataclasses.fields(schema) if field.name == name)
    if field.default_factory is dataclasses.MISSING:
        return {f"{name}.{key}": SUPPRESS for key in leaves_of(_groups_of(schema)[name])}
    default = dataclasses.asdict(field.default_factory())
    return {f"{name}.{key}": value for key, value in default.items()}


def split_arguments(schema: type, argv: Sequence[str], takes_config: bool) -> Arguments:
    """Takes a command line apart without interpreting any value.

    `takes_config` allows `--config FILE` and `--print_config`. A boolean key without a value is
    true. Raises ConfigError for an unknown key, a missing value or a word that belongs to no key.
    """
    leaves = leaves_of(schema)
    flags = ["help", "print_config"] if takes_config else ["help"]
    found = Arguments([], {}, set())
    words = list(argv)
    while words:
        word = words.pop(0)
        key, equals, value = ("help", "", "") if word == "-h" else word[2:].partition("=")
        if word != "-h" and not word.startswith("--"):
            raise ConfigError(f"{word!r} belongs to no key; write --KEY VALUE")
        if key in flags:
            if equals:
                raise ConfigError(f"--{key} takes no value, but {value!r} was given")
            found.flags.add(key)
            continue
        is_config = takes_config and key == "config"
        if key not in leaves and not is_config:
            known = [*leaves, *flags, *(["config"] if takes_config else [])]
            raise ConfigError(_unknown_key(key, known, "--"))
        if not equals:
            if words and not words[0].startswith("--"):
                value = words.pop(0)
            elif not is_config and leaves[key].type is bool:
                value = "true"
            else:
                expected = "a YAML file" if is_config else describe(leaves[key].type)
                raise ConfigError(f"--{key} has no value, expected {expected}")
        if is_config:
            found.config_files.append(value)
        else:
            found.values[key] = value
    return found


class _UniqueKeyLoader(yaml.BaseLoader):
    """Reads every scalar as text and refuses a mapping that gives a key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def read_yaml(path: str, schema: type) -> dict[str, Any]:
    """Reads a config file into values by dotted key.

    Raises ConfigError where the file is missing, unreadable, empty, not YAML, not made of keys, or
    has a key that `schema` has not.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"config file {path!r} is not UTF-8 text; use a YAML file") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"config file {path!r} cannot be read: {reason}") from None
    try:
        tree = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"config file {path!r}{where}: {error.problem}") from None
    except (yaml.YAMLError, RecursionError):
        raise ConfigError(f"config file {path!r} is not YAML") from None
    if tree is None:
        raise ConfigError(f"config file {path!r} is empty; it must hold keys of --help")
    return _flatten(tree, schema, path, "")


def _flatten(tree: Any, schema: type, path: str, prefix: str) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(schema)]
    if not isinstance(tree, dict):
        where = f"{prefix[:-1]} in config file {path!r}" if prefix else f"config file {path!r}"
        keys = ", ".join(names)
        raise ConfigError(f"{where} holds {_shown(tree)}, expected a mapping with keys of: {keys}")
    groups = _groups_of(schema)
    values: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if name not in names:
            if not prefix and key in leaves_of(schema):
                group, leaf = key.split(".")
                message = f"{key} must be nested; write {group}: {{{leaf}: {_shown(value)}}}"
            else:
                message = _unknown_key(key, [prefix + n for n in names] + [*leaves_of(schema)])
            raise ConfigError(f"config file {path!r}: {message}")
        if name in groups:
            values |= _flatten(value, groups[name], path, f"{key}.")
        else:
            values[key] = value
    return values


def help_text(schema: type, prog: str, takes_config: bool) -> str:
    """The help of a command, made of the docstrings of `schema` and of its fields."""
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    file_usage = "[--config FILE] " if takes_config else ""
    parser = _parser_of(
        schema,
        prog=prog,
        description=schema.__doc__,
        usage=f"{prog} {file_usage}[--KEY VALUE ...]",
    )
    if takes_config:
        parser.add_argument(
            "--config",
            metavar="FILE",
            default=SUPPRESS,
            help="YAML file of keys; a key given on the command line, before or after, wins. Of "
            "several files the last wins.",
        )
        parser.add_argument(
            "--print_config",
            action="store_true",
            default=SUPPRESS,
            help="Print the complete config and exit.",
        )
    return parser.format_help()


def _parser_of(schema: type, **settings: Any) -> jsonargparse.ArgumentParser:
    parser = jsonargparse.ArgumentParser(exit_on_error=False, default_env=False, **settings)
    groups = _groups_of(schema)
    parser.add_class_arguments(schema, as_group=False, skip=set(groups))
    for name, group_schema in groups.items():
        group = parser.add_argument_group(f"{name}: {str(group_schema.__doc__).rstrip('.')}")
        group.add_class_arguments(group_schema, name, as_group=False)
        parser.set_defaults(_group_defaults(schema, name))
    return parser


def check_required(schema: type, values: Mapping[str, Any]) -> None:
    """Raises ConfigError for a key without a default that `values` does not hold."""
    for key, leaf in leaves_of(schema).items():
        if leaf.required and key not in values:
            raise ConfigError(f"--{key} is missing, expected {describe(leaf.type)}")


def build_config(schema: type[_T], values: Mapping[str, Any]) -> _T:
    """Gives every value its type and fills in the defaults.

    `values` are texts or typed values by dotted key. Raises ConfigError for a value of the wrong
    type and for a required key that is not there.
    """
    check_required(schema, values)
    leaves = leaves_of(schema)
    for key, value in values.items():
        # YAML would also read 1:30 as 90 and "5 # no" as 5.
        if isinstance(value, str) and _is_numeric(leaves[key].type) and not _NUMBER.match(value):
            raise ConfigError(f"{key} is {_shown(value)}, expected {describe(leaves[key].type)}")
    parser = _parser_of(schema)
    try:
        namespace = parser.parse_object(_nest(values))
    except ArgumentError as error:
        required = {key: values[key] for key, leaf in leaves.items() if leaf.required}
        for key, value in values.items():
            if not _is_accepted(parser, required | {key: value}):
                expected = describe(leaves[key].type)
                raise ConfigError(f"{key} is {_shown(value)}, expected {expected}") from None
        raise ConfigError(" ".join(str(error).split())) from None
    return _construct(schema, namespace.as_dict())


def _is_numeric(hint: Any) -> bool:
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return set(parts) <= {int, float, type(None)}


def describe(hint: Any) -> str:
    """A type in plain words, for a message."""
    if get_origin(hint) is Literal:
        choices = [str(choice) for choice in get_args(hint)]
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(describe(part) for part in get_args(hint))
    return _TYPE_NAMES[hint]


def _is_accepted(parser: jsonargparse.ArgumentParser, values: Mapping[str, Any]) -> bool:
    try:
        parser.parse_object(_nest(values))
    except ArgumentError:
        return False
    return True


def _nest(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *groups, name = key.split(".")
        branch = tree
        for group in groups:
            branch = branch.setdefault(group, {})
        branch[name] = value
    return tree


def _construct(schema: type[_T], tree: Mapping[str, Any]) -> _T:
    groups: dict[str, Any] = {
        name: _construct(group, tree[name]) for name, group in _groups_of(schema).items()
    }
    return schema(**{**tree, **groups})


def _unknown_key(key: str, known: Iterable[str], dashes: str = "") -> str:
    by_leaf = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
    near = difflib.get_close_matches(key, by_leaf or list(known), n=1, cutoff=0.0)
    return f"unknown key {dashes}{key}; did you mean {dashes}{near[0]}?"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
