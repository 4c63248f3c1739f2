"""The padding probe: changes the tokens at all padded places, after which nothing may differ."""

import numpy as np

from ulysses_jax.verification.case import Case
from ulysses_jax.verification.differences import gradient_floor, relative_error
from ulysses_jax.verification.places import Sequences
from ulysses_jax.verification.report import Check
from ulysses_jax.verification.runs import Results, Run
from ulysses_jax.verification.tokens import change_of_places, exchange_tokens

_RUNS = ("on the mesh", "on one device")


def probe_padding(
    case: Case, runs: tuple[Run, Run], before: tuple[Results, Results], sequences: Sequences
) -> list[Check]:
    """Checks of the outputs at valid places, the loss and the gradients, in (sharded, single).

    The outputs must keep every bit. The loss and the gradients are held to the tolerance, because
    a GPU adds up the gradient of an embedding in any order.
    """
    tokens_BS = exchange_tokens(case.tokens_BS, ~case.valid_BS)
    after = [run.step(tokens_BS) for run in runs]
    pairs = list(zip(before, after, strict=True))
    changes = [
        np.where(case.valid_BS, change_of_places(old.outputs, new.outputs), 0.0)
        for old, new in pairs
    ]
    counts = [int((change_BS > 0).sum()) for change_BS in changes]
    where = ""
    if any(counts):
        worst = changes[0] if counts[0] else changes[1]
        row, token = (int(i) for i in np.argwhere(worst > 0)[0])
        where = f"row {row}, {sequences.name(token)}, changes with padding {_seen(counts)}"
    losses = [float(relative_error(new.loss, old.loss)[0]) for old, new in pairs]
    gradients = [_worst_gradient(old, new) for old, new in pairs]
    path = max(gradients)[1]
    return [
        Check("padding: outputs", not any(counts), max(counts), 0, where),
        _within("padding: loss", losses, case.tolerance, "it changes"),
        _within(
            "padding: gradients",
            [error for error, _ in gradients],
            case.tolerance,
            f"that of {path}",
        ),
    ]


def _worst_gradient(old: Results, new: Results) -> tuple[float, str]:
    floor = gradient_floor(old)
    errors = (
        (float(relative_error(new.gradients[path], gradient, floor)[0].max(initial=0.0)), path)
        for path, gradient in old.gradients.items()
    )
    return max(errors, default=(0.0, ""))


def _within(name: str, errors: list[float], tolerance: float, what: str) -> Check:
    largest = max(errors)
    if largest <= tolerance:
        return Check(name, True, largest, tolerance)
    wrong = [error > tolerance for error in errors]
    return Check(name, False, largest, tolerance, f"{what} {_seen(wrong)}")


def _seen(wrong: list[bool] | list[int]) -> str:
    return "in both runs" if all(wrong) else next(r for r, w in zip(_RUNS, wrong, strict=True) if w)
