"""The judged results of the attention benchmark: a table for people and JSON for the record."""

import datetime
import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from attention_rows import Figure, Goal, Row
from interleaving import Measured

HEADINGS = ("row", "work", "ours", "against", "ratio", "target", "reached")


@dataclass(frozen=True)
class Verdict:
    """One goal of a row, judged.

    Attributes:
      goal: the bound.
      ours, against: the two figures, None where it was not measured.
      ratio: the number that is judged.
      reached: whether it keeps the bound.
    """

    goal: Goal
    ours: float
    against: float | None
    ratio: float
    reached: bool


def judge(goal: Goal, ours: Measured, against: Measured | None) -> Verdict:
    """Compares one figure of the two sides."""
    our_figure = _figure(goal.figure, ours)
    if against is None:
        return Verdict(goal, our_figure, None, our_figure, our_figure <= goal.bound)
    their_figure = _figure(goal.figure, against)
    if goal.ratio == "against / ours":
        ratio = their_figure / our_figure
        return Verdict(goal, our_figure, their_figure, ratio, ratio >= goal.bound)
    ratio = our_figure / their_figure
    # A ratio of counted bytes may equal its bound but for rounding.
    return Verdict(goal, our_figure, their_figure, ratio, ratio <= goal.bound * (1 + 1e-9))


def table_lines(row: Row, verdicts: list[Verdict]) -> list[tuple[str, ...]]:
    """The cells of one row, a line for each goal."""
    return [
        (
            row.name,
            f"{row.work}, {_quantity(verdict.goal.figure)}",
            f"{_printed(verdict.goal.figure, verdict.ours)} ({row.ours.name})",
            "the machine"
            if verdict.against is None or row.against is None
            else f"{_printed(verdict.goal.figure, verdict.against)} ({row.against.name})",
            _ratio(verdict),
            _target(verdict.goal),
            "yes" if verdict.reached else "NO",
        )
        for verdict in verdicts
    ]


def failed_line(row: Row, reason: str) -> tuple[str, ...]:
    """The cells of a row that could not be measured."""
    against = "the machine" if row.against is None else row.against.name
    return row.name, row.work, row.ours.name, against, "–", "–", f"not measured: {reason}"


def machine() -> dict[str, Any]:
    """What the measurements were taken on."""
    with open("/proc/cpuinfo") as lines:
        models = {line.split(":")[1].strip() for line in lines if line.startswith("model name")}
    return {
        "cpu": ", ".join(sorted(models)),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def record(
    row: Row, ours: Measured, against: Measured | None, verdicts: list[Verdict]
) -> dict[str, Any]:
    """Everything about a measured row."""
    return _about(row) | {
        "ours": asdict(row.ours) | asdict(ours),
        "against": None if row.against is None else asdict(row.against) | asdict(against or ours),
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }


def failed_record(row: Row, reason: str) -> dict[str, Any]:
    """What is known of a row that could not be measured."""
    sides = {"ours": asdict(row.ours), "against": row.against and asdict(row.against)}
    return _about(row) | sides | {"not_measured": reason}


def save(path: Path, records: dict[str, dict[str, Any]]) -> None:
    """Writes the rows into the JSON file, in place of earlier ones of the same names."""
    earlier = json.loads(path.read_text())["rows"] if path.exists() else {}
    path.write_text(json.dumps({"rows": earlier | records}, indent=1, ensure_ascii=False) + "\n")


def _about(row: Row) -> dict[str, Any]:
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"work": row.work, "date": date, "machine": machine()}


def _figure(figure: Figure, side: Measured) -> float:
    if figure == "seconds":
        return median(side.seconds) / side.facts["work"]
    if figure == "peak_rss_bytes":
        return side.peak_rss_bytes
    value: float = side.facts[figure]
    return value


def _quantity(figure: Figure) -> str:
    return {
        "seconds": "time",
        "temporary_bytes": "temporary memory a device",
        "wire_bytes": "sent by a device",
        "peak_rss_bytes": "peak resident memory",
    }[figure]


def _printed(figure: Figure, value: float) -> str:
    if figure != "seconds":
        return f"{value / 2**20:.1f} MiB"
    if value > 1e-3:
        return f"{value:.3f} s"
    if value > 1e-8:
        return f"{value * 1e6:.2f} µs a token"
    return f"{1e-9 / value:.1f} GFLOP/s"


def _ratio(verdict: Verdict) -> str:
    if verdict.against is None:
        return _printed(verdict.goal.figure, verdict.ratio)
    return f"{verdict.ratio:.3g}"


def _target(goal: Goal) -> str:
    if goal.ratio == "ours":
        return f"≤ {_printed(goal.figure, goal.bound)}"
    sign = "≥" if goal.ratio == "against / ours" else "≤"
    aim = f", aim {goal.aim:g}" if goal.aim else ""
    return f"{sign} {goal.bound:.3g}{aim}"
