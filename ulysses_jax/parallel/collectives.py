"""Reads the collectives of a compiled program: kind, size, and how often each one runs."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

KINDS = ("all-to-all", "all-gather", "reduce-scatter", "all-reduce", "collective-permute")

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_CALLED = re.compile(
    r"(?:body|condition|to_apply|calls|branch_computations)=(?:\{([^}]*)\}|%?([\w.\-]+))"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_GROUP = re.compile(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\])")
_INSTRUCTION = re.compile(rf"^\s*(?:ROOT )?%?[\w.\-]+ = (.*?) ({'|'.join(KINDS)})(-start)?\((.*)$")


@dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled program.

    Attributes:
      kind: one of `KINDS`.
      elements: of the result on one device. Counted instead of bytes, because the CPU compiler
        widens bfloat16 collectives to float32.
      shapes: the result's arrays.
      loops: how many loops it stands inside.
      runs: how often it runs: the product of those loops' trip counts; None if one is unknown.
    """

    kind: str
    elements: int
    shapes: tuple[tuple[int, ...], ...]
    loops: int
    runs: int | None


def collectives(program: str) -> list[Collective]:
    """The collectives in `program`, the text of a compiled program (`compiled.as_text()`).

    An all-to-all of P separate operands, as XLA writes it on CPU, is one collective; so is an
    asynchronous start with its done. One among a single device communicates nothing and is left
    out.
    """
    bodies = _computations(program)
    places = _loops_around(bodies)
    found = []
    for name, lines in bodies.items():
        if name not in places:
            continue
        loops, runs = places[name]
        for line in lines:
            match = _INSTRUCTION.match(line)
            if match is None:
                continue
            result, kind, start, attributes = match.groups()
            if _group_size(attributes) == 1:
                continue
            shapes = [_dims(text) for _, text in _ARRAY.findall(result)]
            if start and len(shapes) > 1:
                # An asynchronous start returns its operands before its results.
                shapes = shapes[len(shapes) // 2 :]
            elements = sum(math.prod(shape) for shape in shapes)
            found.append(Collective(kind, elements, tuple(shapes), loops, runs))
    return found


def _group_size(attributes: str) -> int | None:
    group = _GROUP.search(attributes)
    if group is None:
        return None
    listed, counted = group.groups()
    return int(counted) if counted else listed.count(",") + 1


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def _computations(program: str) -> dict[str, list[str]]:
    bodies: dict[str, list[str]] = {}
    current: list[str] = []
    for line in program.splitlines():
        match = _COMPUTATION.match(line)
        if match:
            name = "ENTRY" if line.startswith("ENTRY") else match.group(1)
            current = bodies.setdefault(name, [])
        else:
            current.append(line)
    return bodies


def _loops_around(bodies: dict[str, list[str]]) -> dict[str, tuple[int, int | None]]:
    """(enclosing loops, runs) of every computation reachable from the entry."""
    places: dict[str, tuple[int, int | None]] = {}
    waiting: list[tuple[str, int, int | None]] = [("ENTRY", 0, 1)]
    while waiting:
        name, loops, runs = waiting.pop()
        if name not in bodies or name in places:
            continue
        places[name] = (loops, runs)
        for line in bodies[name]:
            inner_loops, inner_runs = loops, runs
            if " while(" in line:
                trips = _TRIPS.search(line)
                inner_loops = loops + 1
                inner_runs = runs * int(trips.group(1)) if trips and runs is not None else None
            for called in _called(line):
                waiting.append((called, inner_loops, inner_runs))
    return places


def _called(line: str) -> Iterable[str]:
    for several, one in _CALLED.findall(line):
        for name in (several or one).split(","):
            yield name.strip().lstrip("%")
