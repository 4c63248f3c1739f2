"""The child's side of an interleaved measurement: prepare once, then run and time when told.

A contestant is one process, or one a rank, started by `interleaving.py` with one argument: a JSON
object. `answers` in it is the file descriptor on which the contestant answers, one JSON line each:
first the facts that `prepare` found, then for every line on standard input the seconds of a run.
Standard output stays free for whatever the libraries print.
"""

import json
import os
import resource
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import version
from time import perf_counter
from typing import Any

Run = Callable[[], None]
"""Does the work once, to its very end."""

Facts = dict[str, Any]
"""What is known without timing, such as `work`, `temporary_bytes`, `wire_bytes`, `check`."""


def serve(prepare: Callable[..., tuple[Run, Facts]], packages: Iterable[str]) -> None:
    """Calls `prepare` with the arguments of this process, then runs until standard input ends.

    Args:
      prepare: imports, compiles and warms up; what it takes is not timed.
      packages: distributions whose versions belong to the result.
    """
    arguments = json.loads(sys.argv[1])
    with os.fdopen(arguments.pop("answers"), "w", buffering=1) as answers:
        run, facts = prepare(**arguments)
        versions = {name: version(name) for name in packages}
        print(json.dumps(facts | {"versions": versions}), file=answers)
        while sys.stdin.readline():
            began = perf_counter()
            run()
            seconds = perf_counter() - began
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            print(json.dumps({"seconds": seconds, "peak_rss_bytes": peak}), file=answers)
