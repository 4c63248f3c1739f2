"""Measures local attention and a train step against their peers; prints a table, writes JSON.

    python benchmarks/attention.py --install           # the peers, into .bench-venv
    python benchmarks/attention.py                     # every row
    python benchmarks/attention.py --only deepspeed    # those whose names start so
    python benchmarks/attention.py --json results.json # rows of earlier runs stay in the file

Both sides of a row are processes that prepare first and then run in turn, never both at once, on
the same two cores. The ratio is that of the medians. A peer that is missing is reported as such.
"""

import argparse
import os
import sys
from pathlib import Path

from attention_results import (
    HEADINGS,
    failed_line,
    failed_record,
    judge,
    machine,
    record,
    save,
    table_lines,
)
from attention_rows import Row, rows
from interleaving import ContestantError, measure
from peers.environment import install

_CORES = 2


def main() -> int:
    """Runs the rows asked for; 1 if a peer could not be installed or a row not be measured."""
    options = _options()
    if options.install:
        return 1 if install() else 0
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:_CORES])
    chosen = [row for row in rows() if row.name.startswith(tuple(options.only or [""]))]
    if not chosen:
        print(f"no row is called {' or '.join(options.only)}: {', '.join(r.name for r in rows())}")
        return 2
    print(" · ".join(f"{name} {value}" for name, value in machine().items()))
    _print(HEADINGS)
    _print(["---"] * len(HEADINGS))
    measured = [_measure(row, options.rounds or row.rounds, options.json) for row in chosen]
    return 0 if all(measured) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--install", action="store_true", help="install the peers and exit")
    parser.add_argument("--only", nargs="+", metavar="ROW", help="rows whose names start so")
    parser.add_argument("--json", type=Path, help="file to write the results into")
    parser.add_argument(
        "--rounds", type=_rounds, help="runs of each side, instead of the row's own"
    )
    return parser.parse_args()


def _rounds(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} rounds cannot be run: give 1 or more")
    return int(text)


def _measure(row: Row, rounds: int, json: Path | None) -> bool:
    try:
        ours, against = measure(row.ours, row.against, rounds)
    except ContestantError as error:
        lines, entry = [failed_line(row, str(error))], failed_record(row, str(error))
    else:
        verdicts = [judge(goal, ours, against) for goal in row.goals]
        lines, entry = table_lines(row, verdicts), record(row, ours, against, verdicts)
    for line in lines:
        _print(line)
    if json is not None:
        save(json, {row.name: entry})
    return "not_measured" not in entry


def _print(cells: list[str] | tuple[str, ...]) -> None:
    print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    sys.exit(main())
