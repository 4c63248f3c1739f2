"""Compares what the two runs computed: the loss, the outputs and each gradient."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool

from ulysses_jax.verification.places import Sequences
from ulysses_jax.verification.report import GRADIENT, Check
from ulysses_jax.verification.runs import Results

# A gradient that is zero but for rounding, such as that of a key bias, has no scale of its own: it
# is held to this share of the largest gradient.
_SMALLEST_SCALE = 1e-2


def compare(
    sharded: Results,
    single: Results,
    valid_BS: Bool[np.ndarray, "B S"],
    tolerance: float,
    sequences: Sequences,
) -> list[Check]:
    """A check of the loss, of the outputs at valid places, and of every gradient."""
    if sharded.outputs.shape != single.outputs.shape:
        raise ValueError(
            f"model_fn returned outputs of shape {sharded.outputs.shape} on the mesh and "
            f"{single.outputs.shape} on one device; return the same global shape"
        )
    outputs, expected = (_valid(valid_BS, x.outputs) for x in (sharded, single))
    checks = [
        _check("loss", sharded.loss, single.loss, tolerance),
        _check("outputs", outputs, expected, tolerance, name_place=sequences.name_place),
    ]
    floor = gradient_floor(single)
    for path, gradient in single.gradients.items():
        name = f"{GRADIENT}{path}"
        checks.append(_check(name, sharded.gradients[path], gradient, tolerance, floor))
    if not any(gradient.any() for gradient in single.gradients.values()):
        detail = "every gradient is zero on one device: nothing was compared"
        checks.append(Check("gradients", False, 0.0, None, detail))
    return checks


def largest_entry(x: np.ndarray) -> float:
    """The size of the largest finite entry."""
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))


def gradient_floor(results: Results) -> float:
    """The least scale to which errors of a gradient are relative."""
    largest = (largest_entry(gradient) for gradient in results.gradients.values())
    return _SMALLEST_SCALE * max(largest, default=0.0)


def relative_error(
    found: np.ndarray, expected: np.ndarray, floor: float = 0.0
) -> tuple[np.ndarray, float]:
    """(the error of each entry, the scale it was divided by): the largest entry, or `floor`.

    An entry that is not finite in both has an infinite error.
    """
    scale = max(largest_entry(expected), floor) or 1.0
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(found - expected) / scale
    return np.where(np.isfinite(found) & np.isfinite(expected), error, np.inf), scale


def _check(
    name: str,
    found: np.ndarray,
    expected: np.ndarray,
    tolerance: float,
    floor: float = 0.0,
    name_place: Callable[[Sequence[int]], str] = lambda index: str(list(index)),
) -> Check:
    error, scale = relative_error(found, expected, floor)
    largest = float(error.max(initial=0.0))
    if largest <= tolerance:
        return Check(name, True, largest, tolerance)
    first = np.unravel_index(int((error > tolerance).argmax()), error.shape)
    index = tuple(int(i) for i in first)
    values = f"{found[index]:.6g} instead of {expected[index]:.6g}"
    place = f"first at {name_place(index)}: " if index else ""
    if not np.isfinite(largest):
        return Check(name, False, largest, tolerance, f"not finite, {place}{values}")
    factor = _factor(found, expected, tolerance * scale) if index else None
    factored = (
        "" if factor is None else f"{factor:#.3g} times the single-device {name.split()[0]}; "
    )
    return Check(name, False, largest, tolerance, f"{factored}{place}{values}")


def _factor(found: np.ndarray, expected: np.ndarray, limit: float) -> float | None:
    """The constant that turns `expected` into `found`, to within `limit` of it, if there is one."""
    norm = float(np.vdot(expected, expected))
    if norm == 0:
        return None
    factor = float(np.vdot(expected, found)) / norm
    rest = float(np.abs(found - factor * expected).max())
    return factor if rest <= limit * max(abs(factor), 1.0) else None


def _valid(valid_BS: Bool[np.ndarray, "B S"], outputs: np.ndarray) -> np.ndarray:
    """`outputs` with 0 at padded places, where they mean nothing; not finite ones are kept."""
    places = valid_BS.reshape(*valid_BS.shape, *[1] * (outputs.ndim - 2))
    return np.where(places | ~np.isfinite(outputs), outputs, 0)
