"""`verify`: whether a model sharded over a mesh is the model on one device."""

import sys
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from ulysses_jax.parallel.region import DEFAULT_BATCH_AXES
from ulysses_jax.verification.case import Case, ModelFn
from ulysses_jax.verification.differences import compare, largest_entry
from ulysses_jax.verification.exchanges import check_exchanges
from ulysses_jax.verification.leakage import judge_leakage, probe_leakage, probe_places
from ulysses_jax.verification.padding import probe_padding
from ulysses_jax.verification.places import Sequences
from ulysses_jax.verification.report import Report
from ulysses_jax.verification.runs import Run, sharded_run, single_device_run


def verify(
    model_fn: ModelFn,
    inputs: dict[str, Any],
    mesh: Mesh,
    *,
    params: Any,
    tokens: str = "tokens",
    causal: bool = False,
    segments: str | None = None,
    valid: str | None = None,
    lengths: str | None = None,
    seq_axis: str = "seq",
    batch_axes: str | Sequence[str] = DEFAULT_BATCH_AXES,
    param_shardings: Any = None,
    tolerance: float = 1e-5,
    probes: Sequence[tuple[int, int]] | None = None,
) -> Report:
    """Runs a model on one device and on `mesh`, and says whether the two are the same.

    `model_fn(params, inputs, mesh)` returns (loss, outputs), a scalar and [B, S, ...]; mesh is
    None for the run on one device, which uses the first of `mesh`. The other is traced under
    `jax.set_mesh(mesh)`, so that a Flax model may ignore the argument. Both runs are one compiled
    step of loss and gradients, with float32 matrix products of full precision. Checked are:

    - the loss, the outputs and each gradient, to `tolerance` of the largest entry (of a gradient:
      at least 1% of the largest of all);
    - leakage: one token is changed, and the outputs that change must be the same in both runs
      and none that the caller rules out: bit for bit, no other row, nothing before the token if
      `causal`, nothing of another id of `inputs[segments]`;
    - padding, if `valid` or `lengths` is named: the tokens of all padded places are changed, and
      no valid output, loss or gradient may follow;
    - the collectives of the compiled step: something must exchange the sequence.

    What is not declared is only compared with the run on one device: a mask that the model lacks
    in both is not missed. Progress goes to stderr. The keywords are described at `Case`.

    Example:
      >>> def model_fn(params, inputs, mesh):
      ...     x = params["embedding"][inputs["tokens"]]
      ...     q = k = v = x.reshape(*x.shape[:2], 4, 2)
      ...     x += ulysses_attention(q, k, v, mesh, is_causal=True).reshape(x.shape)
      ...     return jnp.mean(x**2), x
      >>> inputs = {"tokens": jnp.arange(16).reshape(2, 8)}
      >>> params = {"embedding": jax.random.normal(jax.random.key(0), (16, 8))}
      >>> report = verify(model_fn, inputs, make_mesh(2, 2), params=params, causal=True)
      >>> report.passed
      True
      >>> report.require()  # Raises, with the table that print(report) shows, unless it passed.

    Raises:
      ValueError: the mesh has no such axis, an input is missing or of the wrong kind, or the model
        returns something else than (loss, outputs).
    """
    case = Case(
        model_fn=model_fn,
        inputs=inputs,
        params=params,
        tokens=tokens,
        causal=causal,
        segments=segments,
        valid=valid,
        lengths=lengths,
        seq_axis=seq_axis,
        batch_axes=batch_axes,
        param_shardings=param_shardings,
        tolerance=tolerance,
        probes=probes,
    )
    return verify_case(case, mesh)


def verify_case(case: Case, mesh: Mesh) -> Report:
    """`verify` of a case that is put together already."""
    case.check(mesh)
    _say("compiling the step for one device")
    single = single_device_run(case, mesh)
    _say(f"compiling it for {_describe(mesh)}")
    sharded = sharded_run(case, mesh)
    return verify_runs(case, mesh, (sharded, single))


def verify_runs(case: Case, mesh: Mesh, runs: tuple[Run, Run]) -> Report:
    """All checks of the two compiled steps of a case, (on `mesh`, on one device)."""
    sequences = Sequences(case.tokens_BS.shape[1], mesh.shape[case.seq_axis])
    _say("running both")
    sharded, single = (run.step(case.tokens_BS) for run in runs)
    checks = compare(sharded, single, case.valid_BS, case.tolerance, sequences)
    places = probe_places(case, sequences)
    _say(f"changing one token, at {len(places)} places in turn")
    scale = largest_entry(single.outputs)
    for place in places:
        reach = probe_leakage(case, place, runs, (sharded, single))
        checks.append(judge_leakage(case, place, reach, scale, sequences))
    if case.padded:
        _say("changing the padding")
        checks += probe_padding(case, runs, (sharded, single), sequences)
    checks += check_exchanges(case, mesh, runs[0].program)
    return Report(f"one device against {_describe(mesh)}", tuple(checks))


def _describe(mesh: Mesh) -> str:
    return " × ".join(f"{axis} {size}" for axis, size in mesh.shape.items())


def _say(what: str) -> None:
    print(f"verify: {what}", file=sys.stderr)
