"""Differences of two runs: what counts as one, and how its place and kind are told."""

import numpy as np
import pytest

from ulysses_jax.verification.differences import compare
from ulysses_jax.verification.places import Sequences
from ulysses_jax.verification.runs import Results

OUTPUTS = np.arange(1.0, 25).reshape(2, 6, 2)
WEIGHTS = np.array([[3.0, -1.0], [0.5, 2.0]])


def _results(loss=2.0, outputs=OUTPUTS, **gradients):
    return Results(np.float32(loss), outputs, {"w": WEIGHTS} | gradients)


def _compare(found, expected=None, valid=None):
    valid = np.ones((2, 6), bool) if valid is None else valid
    checks = compare(found, expected or _results(), valid, 1e-5, Sequences(6, 3))
    return {check.name: check for check in checks}


def _changed(x, index, value):
    x = x.copy()
    x[index] = value
    return x


def test_equal_runs_pass():
    checks = _compare(_results())
    assert list(checks) == ["loss", "outputs", "gradient of w"]
    assert all(check.passed and check.measured == 0 for check in checks.values())


def test_error_is_a_share_of_the_largest_entry():
    for error, passes in ((2e-5, True), (4e-5, False)):
        check = _compare(_results(w=_changed(WEIGHTS, (1, 0), 0.5 + error)))["gradient of w"]
        assert check.passed == passes
        assert check.measured == pytest.approx(error / 3)
    assert check.detail == "first at [1, 0]: 0.50004 instead of 0.5"


def test_first_difference_of_outputs_names_its_token_and_part():
    outputs = _changed(_changed(OUTPUTS, (1, 3, 1), 0.0), (1, 4, 0), 0.0)
    detail = _compare(_results(outputs=outputs))["outputs"].detail
    assert detail == "first at [1, 3, 1]: row 1, token 3, the last of part 1 of 3: 0 instead of 20"


def test_outputs_at_padded_places_are_not_compared_unless_they_are_not_finite():
    valid = np.arange(6) < np.array([[6], [4]])
    outputs = _changed(OUTPUTS, (1, 5), 0.0)
    assert _compare(_results(outputs=outputs), valid=valid)["outputs"].passed
    outputs = _changed(OUTPUTS, (1, 5), np.nan)
    assert not _compare(_results(outputs=outputs), valid=valid)["outputs"].passed


@pytest.mark.parametrize("factor", [4.0, 0.25, -1.0, 0.0])
def test_constant_factor_of_a_gradient_is_told(factor):
    check = _compare(_results(w=factor * WEIGHTS))["gradient of w"]
    assert not check.passed
    assert check.detail.startswith(f"{factor:#.3g} times the single-device gradient; first at")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_fail_even_if_both_runs_agree(value):
    bad = _results(value, _changed(OUTPUTS, (0, 2, 1), value), w=_changed(WEIGHTS, (0, 1), value))
    for found, expected in ((bad, None), (_results(), bad), (bad, bad)):
        checks = _compare(found, expected)
        assert not any(check.passed for check in checks.values())
        assert all(check.measured == np.inf for check in checks.values())
        assert "not finite, first at [0, 2, 1]: row 0, token 2" in checks["outputs"].detail


def test_gradient_that_is_zero_but_for_rounding_is_not_held_to_its_own_size():
    noise = _results(bias=np.array([3e-8, -1e-8])), _results(bias=np.array([-2e-8, 1e-8]))
    assert all(check.passed for check in _compare(*noise).values())
    real = _results(bias=np.array([4e-3, 4e-3])), _results(bias=np.array([1e-3, 1e-3]))
    check = _compare(*real)["gradient of bias"]
    assert not check.passed
    assert check.detail.startswith("4.00 times")


def test_loss_that_depends_on_no_parameter_fails():
    nothing = _results(w=np.zeros((2, 2)))
    assert not _compare(nothing, nothing)["gradients"].passed


def test_outputs_of_the_shard_instead_of_the_whole_are_refused():
    with pytest.raises(ValueError, match=r"\(2, 6, 1\) on the mesh and \(2, 6, 2\) on one device"):
        _compare(_results(outputs=OUTPUTS[..., :1]))
