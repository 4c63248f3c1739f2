"""The leakage probe: changes one token, and looks which outputs change with it."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from ulysses_jax.verification.case import Case
from ulysses_jax.verification.places import Sequences
from ulysses_jax.verification.report import Check
from ulysses_jax.verification.runs import Results, Run
from ulysses_jax.verification.tokens import change_of_places, exchange_tokens


@dataclass(frozen=True)
class Reach:
    """How much each output changed with the token, exactly 0 where not at all."""

    sharded_BS: Float[np.ndarray, "B S"]
    single_BS: Float[np.ndarray, "B S"]


def probe_places(case: Case, sequences: Sequences) -> list[tuple[int, int]]:
    """The (row, token) places to perturb, all of them valid.

    Both ends, both sides of the first border between parts, a place inside the last part, and the
    first token of the last segment, on one row after the other.
    """
    if case.probes is not None:
        return [(int(row), int(token)) for row, token in case.probes]
    length, size = sequences.length, sequences.part_length
    border = size if size < length else length // 2
    tokens = [0, border, border - 1, length - 1 - size // 2, length - 1]
    valid_BS, segments_BS = case.valid_BS, case.segments_BS
    rows = np.flatnonzero(valid_BS.any(axis=1))
    places = [(int(rows[i % len(rows)]), token) for i, token in enumerate(tokens)]
    if segments_BS is not None:
        row = int(rows[-1])
        last = segments_BS[row, np.flatnonzero(valid_BS[row])[-1]]
        places.append((row, int((segments_BS[row] == last).argmax())))
    return sorted({(row, _nearest(valid_BS[row], token)) for row, token in places})


def _nearest(valid_S: Bool[np.ndarray, " S"], token: int) -> int:
    valid = np.flatnonzero(valid_S)
    return int(valid[np.abs(valid - token).argmin()])


def probe_leakage(
    case: Case, place: tuple[int, int], runs: tuple[Run, Run], before: tuple[Results, Results]
) -> Reach:
    """Changes the token at `place` in both runs, (sharded, single)."""
    where_BS = np.zeros(case.tokens_BS.shape, bool)
    where_BS[place] = True
    tokens_BS = exchange_tokens(case.tokens_BS, where_BS)
    changes = [
        np.where(case.valid_BS, change_of_places(old.outputs, run.step(tokens_BS).outputs), 0.0)
        for run, old in zip(runs, before, strict=True)
    ]
    return Reach(*changes)


def judge_leakage(
    case: Case, place: tuple[int, int], reach: Reach, scale: float, sequences: Sequences
) -> Check:
    """Whether the change stayed where it is declared to, and is that of one device.

    Any bit that changes where nothing may is a leak. Elsewhere a place that changes in one run
    only counts above the tolerance of `scale`, the largest output: below, one of the two runs may
    have lost the change in rounding.
    """
    row, token = place
    name = f"leakage from row {row}, token {token}"
    changed = {"on the mesh": reach.sharded_BS > 0, "on one device": reach.single_BS > 0}
    if not changed["on one device"].any() and not changed["on the mesh"].any():
        detail = "no output changes, not even its own: the probe saw nothing"
        return Check(name, False, 0, 0, detail)
    problems, wrong_BS = [], np.zeros(case.tokens_BS.shape, bool)
    for reason, forbidden_BS in _forbidden(case, place):
        leaks = {run: changed_BS & forbidden_BS for run, changed_BS in changed.items()}
        leaking = [run for run, leak_BS in leaks.items() if leak_BS.any()]
        if leaking:
            index = _first(leaks[leaking[0]])
            seen = "in both runs" if len(leaking) == 2 else leaking[0]
            problems.append(f"changes {_name(index, sequences)}, {reason}, {seen}")
            wrong_BS |= leaks[leaking[0]]
    for one, other in (("on one device", "on the mesh"), ("on the mesh", "on one device")):
        size_BS = reach.single_BS if one == "on one device" else reach.sharded_BS
        only_BS = (size_BS > case.tolerance * scale) & ~changed[other]
        if only_BS.any() and not (only_BS & wrong_BS).any():
            index = _first(only_BS)
            problems.append(f"changes {_name(index, sequences)}, {one} but not {other}")
            wrong_BS |= only_BS
    if problems:
        return Check(name, False, int(wrong_BS.sum()), 0, "; ".join(problems))
    seen_BS = changed["on the mesh"]
    return Check(name, True, 0, 0, f"{seen_BS.sum()} of {seen_BS.size} outputs change with it")


def _forbidden(case: Case, place: tuple[int, int]) -> Iterator[tuple[str, np.ndarray]]:
    """(reason, [B, S] True where nothing may change with the token at `place`)."""
    row, token = place
    rows_B1 = np.arange(case.tokens_BS.shape[0])[:, None]
    tokens_1S = np.arange(case.tokens_BS.shape[1])
    yield "another row", np.broadcast_to(rows_B1 != row, case.tokens_BS.shape)
    if case.causal:
        yield "which comes before it", (rows_B1 == row) & (tokens_1S < token)
    segments_BS = case.segments_BS
    if segments_BS is not None:
        yield "of another segment", (rows_B1 == row) & (segments_BS != segments_BS[place])


def _first(where_BS: Bool[np.ndarray, "B S"]) -> tuple[int, int]:
    row, token = np.argwhere(where_BS)[0]
    return int(row), int(token)


def _name(index: tuple[int, int], sequences: Sequences) -> str:
    return f"row {index[0]}, {sequences.name(index[1])}"
