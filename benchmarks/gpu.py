"""Checks and measures ulysses_jax on one NVIDIA GPU in under four minutes; prints JSON.

    pip install "jax[cuda12]" flax optax numpy jaxtyping     # all that it needs
    PYTHONPATH=. python benchmarks/gpu.py > gpu.json         # on the GPU
    PYTHONPATH=. python benchmarks/gpu.py --tiny             # on a CPU, with tiny sizes

Three parts: every attention kernel against the reference, a few steps of gpt-1.2b at 32K tokens
with XLA's predicted memory beside the card's peak, and the kernels' times at 4K, 32K and 128K. Each
part has a share of the time; what no longer fits is reported as skipped. Progress goes to stderr.
Exits with 1 if a kernel is wrong, or right in no case, or a part failed.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import jax
from gpu_checks import check_kernels
from gpu_programs import Deadline, kernels_here
from gpu_timings import time_kernels
from gpu_training import train

from ulysses_jax.train.flops import device_peak

# When each part must have ended, in seconds from the start.
_CHECKS_END_S = 85
_TRAINING_END_S = 155
_TIMINGS_END_S = 220


def main() -> int:
    """Runs the three parts and prints what they found."""
    tiny = _options().tiny
    if tiny:
        jax.config.update("jax_platforms", "cpu")
    began = time.monotonic()
    device = jax.devices()[0]
    kernels, unavailable = kernels_here()
    parts: dict[str, tuple[float, Callable[[Deadline], Any]]] = {
        "checks": (_CHECKS_END_S, partial(check_kernels, tiny, kernels)),
        "training": (_TRAINING_END_S, partial(train, tiny)),
        "timings": (_TIMINGS_END_S, partial(time_kernels, tiny, kernels)),
    }
    found: dict[str, Any] = {
        "device": device.device_kind,
        "peak_bfloat16_flops": device_peak(device),
        "versions": {name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")},
        "kernels_unavailable": unavailable,
    }
    for name, (end, part) in parts.items():
        print(f"{name} …", file=sys.stderr, flush=True)
        try:
            found[name] = part(Deadline(began + end))
        except Exception as error:
            # What the other parts can still find is worth more than an early end.
            traceback.print_exc()
            found[name] = {"failed": f"{type(error).__name__}: {error}"}
    found["seconds"] = time.monotonic() - began
    print(json.dumps(found, indent=1))
    unproven = _unproven(found["checks"], kernels)
    if unproven:
        print(f"no case showed these kernels right: {', '.join(unproven)}", file=sys.stderr)
    return 1 if unproven or any(_bad(found[name]) for name in parts) else 0


def _unproven(checks: Any, kernels: list[str]) -> list[str]:
    entries = checks if isinstance(checks, list) else []
    right = {entry["kernel"] for entry in entries if entry.get("result") == "right"}
    return [kernel for kernel in kernels if kernel not in right]


def _bad(part: Any) -> bool:
    entries = part if isinstance(part, list) else [part]
    return any("failed" in entry or entry.get("result") == "wrong" for entry in entries)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on the CPU")
    return parser.parse_args()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A compilation that came too late still runs in its thread: it is not waited for.
    os._exit(code)
