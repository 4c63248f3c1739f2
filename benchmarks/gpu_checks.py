"""Every kernel against the reference: output and gradients, on the calls of `gpu_cases`."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_cases import Case, cases
from gpu_programs import Deadline, compile_all

from ulysses_jax.attention.select import attention_function

_BATCH = 2
# Of the largest entry: bfloat16 keeps 8 bits, and the weights are rounded to it as well.
_TOLERANCE = 0.02


def check_kernels(tiny: bool, kernels: list[str], deadline: Deadline) -> list[dict[str, Any]]:
    """One entry a case and kernel, with `result`, or `refused`, `failed` or `skipped` and why.

    `result` is `right` or `wrong`. A kernel may refuse a call; that is not a failure.
    """
    chosen = [(case, kernel) for case in cases(tiny) for kernel in ("reference", *kernels)]
    makers = {(case.name, kernel): partial(_compile, case, kernel) for case, kernel in chosen}
    programs = compile_all(makers, deadline)
    found = []
    for case in cases(tiny):
        expected = programs[case.name, "reference"]
        if callable(expected):
            expected = expected(*_arrays(case, "float32"))
        for kernel in kernels:
            entry = {"case": case.name, "kernel": kernel}
            entry |= _judged(programs[case.name, kernel], case, expected)
            print(f"  {entry}", file=sys.stderr, flush=True)
            found.append(entry)
    return found


def _compile(case: Case, kernel: str) -> Callable[..., dict[str, jax.Array]]:
    attend = attention_function(kernel)

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> dict[str, jax.Array]:
        def out_and_lse(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
            return attend(q, k, v, case.spec(), case.head_dim**-0.5)

        (out, lse), pull = jax.vjp(out_and_lse, q, k, v)
        # Some gradient for the log-sum-exp too: fused kernels need a second backward pass for it.
        dq, dk, dv = pull((d_out, 0.1 * jnp.cos(jnp.where(jnp.isfinite(lse), lse, 0))))
        return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}

    # The reference takes the same values, and computes in float32 from there.
    arrays = _arrays(case, "float32" if kernel == "reference" else "bfloat16")
    return run.lower(*arrays).compile()


def _arrays(case: Case, dtype: str) -> list[jax.Array]:
    draw = np.random.default_rng(0)
    q_shape = (_BATCH, case.q_len, case.heads, case.head_dim)
    kv_shape = (_BATCH, case.kv_len, case.kv_heads, case.head_dim)
    shapes = (q_shape, kv_shape, kv_shape, q_shape)
    return [jnp.asarray(draw.standard_normal(s), jnp.bfloat16).astype(dtype) for s in shapes]


def _judged(program: Any, case: Case, expected: Any) -> dict[str, Any]:
    if not callable(program):
        return dict(program)
    if "lse" not in expected:
        return dict(expected)
    try:
        got = program(*_arrays(case, "bfloat16"))
        errors = {name: _error(got[name], expected[name]) for name in expected}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}
    right = all(error <= _TOLERANCE for error in errors.values())
    return {"result": "right" if right else "wrong", "errors": errors}


def _error(got: jax.Array, expected: jax.Array) -> float:
    """Largest difference as a share of the largest entry; infinite where it cannot be told."""
    a, b = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return float("inf")
    finite = np.isfinite(b)
    largest = np.max(np.abs(b[finite]), initial=1e-30)
    return float(np.max(np.abs(a[finite] - b[finite]), initial=0.0) / largest)
