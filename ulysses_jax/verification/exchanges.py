"""The collectives of the compiled sharded step, and whether one of them exchanges the sequence."""

from jax.sharding import Mesh

from ulysses_jax.parallel.collectives import KINDS, Collective, collectives
from ulysses_jax.verification.case import Case
from ulysses_jax.verification.report import Check
from ulysses_jax.verification.runs import rows_on_a_device

_EXCHANGES = ("all-to-all", "collective-permute")


def check_exchanges(case: Case, mesh: Mesh, program: str) -> list[Check]:
    """Whether `program` exchanges the sequence, then a row for each kind of its collectives."""
    found = collectives(program)
    rows = rows_on_a_device(case, mesh)
    whole = rows * case.tokens_BS.shape[1]
    checks = []
    if mesh.shape[case.seq_axis] > 1:
        checks.append(_check_exchange(case.seq_axis, mesh, found, rows))
    for kind in KINDS:
        of_kind = [c for c in found if c.kind == kind]
        if of_kind:
            checks.append(_row(kind, of_kind, whole))
    return checks


def _check_exchange(axis: str, mesh: Mesh, found: list[Collective], rows: int) -> Check:
    # XLA moves one number a row where a model shifts its labels over a border.
    exchanges = [c for c in found if c.kind in _EXCHANGES and c.elements > rows]
    detail = "at least 1 must move activations"
    if not exchanges:
        detail = (
            f"no {' or '.join(_EXCHANGES)} moves activations, though {axis!r} has "
            f"{mesh.shape[axis]} devices: tokens of different parts never meet, or each device "
            "computes the whole sequence"
        )
    return Check("exchange", bool(exchanges), len(exchanges), 1, detail)


def _row(kind: str, found: list[Collective], whole: int) -> Check:
    """One kind of collective; `whole` counts the tokens of a device's rows over all parts."""
    runs = sum(c.runs or 1 for c in found)
    elements = sum(c.elements * (c.runs or 1) for c in found)
    detail = f"{_count(len(found), 'instruction')}, {elements:,} elements per device"
    inside = sum(c.loops > 0 for c in found)
    if inside:
        detail += f"; {inside} inside loops"
    if any(c.runs is None for c in found):
        detail += "; the loops of some have no known length and count once"
    largest = max(found, key=lambda c: c.elements)
    # One number a token is positions or segments, not an activation.
    if kind == "all-gather" and largest.elements > whole:
        shapes = " ".join(str(list(shape)) for shape in largest.shapes)
        detail += f"; the largest, {shapes}, is as large as an activation of the whole sequence"
    return Check(f"collective: {kind}", True, runs, None, detail)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
