"""Mistakes of a caller: each is refused with its value, its limit and its fix."""

import jax.numpy as jnp
import numpy as np
import pytest

from ulysses_jax import make_mesh
from ulysses_jax.verification.case import Case
from ulysses_jax.verification.runs import single_device_run
from ulysses_jax.verification.verify import verify_case

TOKENS = np.arange(12).reshape(2, 6)
INPUTS = {
    "tokens": TOKENS,
    "segments": TOKENS // 3,
    "valid": TOKENS < 10,
    "lengths": np.array([6, 4]),
    "odd": np.array([6, 4, 2]),
}


def _case(model_fn=lambda *_: None, inputs=INPUTS, **keywords):
    return Case(model_fn, inputs, {"w": jnp.ones(3)}, **keywords)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"seq_axis": "sequence"}, "seq_axis 'sequence' is no axis of the mesh, which has 'data',"),
        ({"batch_axes": "batch"}, "batch_axes 'batch' is no axis of the mesh"),
        ({"tokens": "ids"}, "tokens 'ids' is not in inputs, which has 'tokens', 'segments'"),
        ({"inputs": [TOKENS]}, "inputs is a list; give a dict"),
        ({"tokens": "lengths"}, r"inputs\['lengths'\] is int64 of shape \(2,\); tokens must be"),
        (
            {"inputs": {"tokens": TOKENS / 2}},
            r"inputs\['tokens'\] is float64 of shape \(2, 6\); tokens must be integers of \[B, S\]",
        ),
        ({"inputs": {"tokens": TOKENS * 0}}, "fewer than two different ids"),
        ({"segments": "lengths"}, r"segments 'lengths' is int64 of shape \(2,\); give integers"),
        ({"valid": "segments"}, r"valid 'segments' is int64 of shape \(2, 6\); give bool"),
        ({"lengths": "odd"}, r"lengths 'odd' is int64 of shape \(3,\); give integers of shape"),
        (
            {"inputs": INPUTS | {"valid": TOKENS >= 0}, "valid": "valid"},
            "valid leave no padding to probe",
        ),
        (
            {"inputs": INPUTS | {"lengths": np.array([0, 0])}, "lengths": "lengths"},
            "every token is padding",
        ),
        ({"tolerance": 0}, "tolerance is 0; use a number between 0 and 1"),
        ({"probes": [(1, 6)]}, r"probe \(1, 6\) is no \(row, token\) of tokens of shape \(2, 6\)"),
    ],
)
def test_mistake_in_a_case_is_refused(keywords, message):
    with pytest.raises(ValueError, match=message):
        verify_case(_case(**keywords), make_mesh(1, 2))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda x: x.sum(), "model_fn returned a .*; return"),
        (lambda x: (x.sum(-1), x), r"loss of float32\[2\]; return a floating-point scalar"),
        (lambda x: (1, x), r"loss of int32\[\]"),
        (
            lambda x: (x.sum(), x[:, :3]),
            r"outputs of shape \(2, 3\) on one device; return \[B, S, ...\] with \[B, S\] = \[2, 6",
        ),
    ],
)
def test_model_that_returns_something_else_is_refused(returned, message):
    def model_fn(params, inputs, mesh):
        return returned(params["w"][inputs["tokens"]])

    with pytest.raises(ValueError, match=message):
        single_device_run(_case(model_fn), make_mesh(1, 2))


def test_valid_and_lengths_hold_together():
    inputs = INPUTS | {"lengths": np.array([3, 6])}
    case = _case(inputs=inputs, valid="valid", lengths="lengths")
    np.testing.assert_array_equal(case.valid_BS, [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0]])
