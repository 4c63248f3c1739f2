"""The kernels' times, forward and backward, at 4K, 32K and 128K tokens, and their FLOP/s."""

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_programs import Deadline, compile_all

from ulysses_jax.attention.select import attention_function
from ulysses_jax.attention.spec import AttentionSpec
from ulysses_jax.train.flops import device_peak

_HEADS = 16
_HEAD_DIM = 128
_WINDOW = 1024
_DOCUMENTS = 8
_PATTERNS = ("causal", f"window {_WINDOW}", f"{_DOCUMENTS} documents")
_LONG_ENOUGH_S = 0.5
_MOST_RUNS = 50
_COMPILE_SHARE = 0.6
_SLACK = 1.5


def time_kernels(tiny: bool, kernels: list[str], deadline: Deadline) -> list[dict[str, Any]]:
    """One entry a kernel, pattern and length; one batch row, bfloat16, 16 heads of 128.

    FLOP/s count the attended pairs only: 4·D a pair and head forward, 2.5 times that backward. A
    length is skipped where the one before says that the time left would not do.
    """
    lengths = (32, 64, 128) if tiny else (4096, 32768, 131072)
    # At the shortest length the other patterns tell nothing new.
    calls = [
        (length, pattern, kernel)
        for length in lengths
        for pattern in (_PATTERNS if length > lengths[0] else _PATTERNS[:1])
        for kernel in kernels
    ]
    compiling = Deadline(deadline.moment - (1 - _COMPILE_SHARE) * deadline.left())
    programs = compile_all({call: partial(_compile, *call) for call in calls}, compiling)
    found = []
    for (length, pattern, kernel), program in programs.items():
        entry = {"kernel": kernel, "pattern": pattern, "tokens": length}
        earlier = [e for e in found if e["kernel"] == kernel and "seconds" in e]
        # At worst the time grows with the square of the length, whatever the pattern.
        expected = max((e["seconds"] * (length / e["tokens"]) ** 2 for e in earlier), default=0)
        if not callable(program):
            entry |= program
        elif not deadline.allows(2 * _SLACK * expected):
            entry["skipped"] = "out of time"
        else:
            entry |= _timed(program, pattern, length)
        print(f"  {entry}", file=sys.stderr, flush=True)
        found.append(entry)
    return found


def _compile(length: int, pattern: str, kernel: str) -> Any:
    attend = attention_function(kernel)

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> Any:
        def out(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return attend(q, k, v, _spec(pattern, length), _HEAD_DIM**-0.5)[0]

        return jax.vjp(out, q, k, v)[1](d_out)

    array = jax.ShapeDtypeStruct((1, length, _HEADS, _HEAD_DIM), jnp.bfloat16)
    return run.lower(array, array, array, array).compile()


def _timed(program: Callable[..., Any], pattern: str, length: int) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (1, length, _HEADS, _HEAD_DIM)
    arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
    try:
        seconds = _seconds(lambda: program(*arrays))
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}
    rate = 3.5 * 4 * _pairs(pattern, length) * _HEADS * _HEAD_DIM / seconds
    peak = device_peak(jax.devices()[0])
    return {
        "seconds": seconds,
        "tflops": rate / 1e12,
        "share_of_peak": None if peak is None else rate / peak,
    }


def _seconds(work: Callable[[], Any]) -> float:
    """Seconds of one run: of many dispatched together, if the first was short."""
    _clocked(work, 1)
    one = _clocked(work, 1)
    count = min(_MOST_RUNS, int(_LONG_ENOUGH_S / one))
    return _clocked(work, count) if count > 1 else one


def _clocked(work: Callable[[], Any], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        last = work()
    jax.block_until_ready(last)
    return (time.perf_counter() - began) / count


def _spec(pattern: str, length: int) -> AttentionSpec:
    if pattern.startswith("window"):
        return AttentionSpec(causal=True, window=(_WINDOW - 1, 0))
    if pattern.endswith("documents"):
        ids = (np.arange(length) * _DOCUMENTS // length).astype(np.int32)[None]
        return AttentionSpec(causal=True, q_segment_ids=ids, contiguous_segments=True)
    return AttentionSpec(causal=True)


def _pairs(pattern: str, length: int) -> float:
    """Attended pairs of a query and a key."""
    if pattern.startswith("window"):
        window = min(_WINDOW, length)
        return window * (length - window / 2)
    if pattern.endswith("documents"):
        return length**2 / 2 / _DOCUMENTS
    return length**2 / 2
