"""The two runs that are compared: one compiled training step on one device, one on the mesh."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Float

from ulysses_jax.parallel.backend import compiler_options
from ulysses_jax.verification.case import Case


@dataclass(frozen=True)
class Results:
    """What one step computed, on the host.

    Attributes:
      loss: the scalar loss.
      outputs: [B, S, ...].
      gradients: of the loss, one for each parameter by its path.
    """

    loss: Float[np.ndarray, ""]
    outputs: Float[np.ndarray, "B S ..."]
    gradients: dict[str, np.ndarray]


@dataclass(frozen=True)
class Run:
    """A compiled step that can be run again on changed tokens.

    Attributes:
      program: the text of the compiled step.
      step: runs it on these tokens [B, S], with all else as the case has it.
    """

    program: str
    step: Callable[[np.ndarray], Results]


def single_device_run(case: Case, mesh: Mesh) -> Run:
    """Compiles the step, without a mesh, for the first device of `mesh`."""
    whole = SingleDeviceSharding(mesh.devices.flat[0])
    inputs = jax.tree.map(lambda x: jax.device_put(x, whole), case.inputs)
    return _run(case, None, jax.device_put(case.params, whole), inputs)


def sharded_run(case: Case, mesh: Mesh) -> Run:
    """Compiles the step for `mesh`, with its inputs split where they can be."""
    shardings = jax.tree.map(
        lambda s: NamedSharding(mesh, s) if isinstance(s, PartitionSpec) else s,
        PartitionSpec() if case.param_shardings is None else case.param_shardings,
    )
    inputs = jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(mesh, _partition(case, mesh, jnp.shape(x)))),
        case.inputs,
    )
    return _run(case, mesh, jax.device_put(case.params, shardings), inputs)


def rows_on_a_device(case: Case, mesh: Mesh) -> int:
    """Batch rows of which a device of `mesh` holds its part."""
    rows = case.tokens_BS.shape[0]
    ways = math.prod(mesh.shape[axis] for axis in case.batch_axes_of(mesh))
    return rows if rows % ways else rows // ways


def _partition(case: Case, mesh: Mesh, shape: tuple[int, ...]) -> PartitionSpec:
    rows, length = case.tokens_BS.shape
    axes = case.batch_axes_of(mesh)
    if shape[:1] != (rows,):
        return PartitionSpec()
    batch = axes if rows_on_a_device(case, mesh) < rows else None
    if shape[1:2] == (length,) and length % mesh.shape[case.seq_axis] == 0:
        return PartitionSpec(batch, case.seq_axis)
    return PartitionSpec(batch)


def _run(case: Case, mesh: Mesh | None, params: Any, inputs: dict[str, Any]) -> Run:
    objective = _objective(case, mesh)

    def step(params: Any, inputs: dict[str, Any]) -> Any:
        return jax.value_and_grad(objective, has_aux=True, allow_int=True)(params, inputs)

    tokens = inputs[case.tokens]
    options = compiler_options(next(iter(tokens.devices())))
    # TPUs and recent GPUs multiply float32 with fewer bits by default.
    with jax.set_mesh(mesh), jax.default_matmul_precision("float32"):
        compiled = jax.jit(step, compiler_options=options).lower(params, inputs).compile()

    def run(tokens_BS: np.ndarray) -> Results:
        changed = jax.device_put(tokens_BS, tokens.sharding)
        (loss, outputs), gradients = compiled(params, inputs | {case.tokens: changed})
        by_path = {
            jax.tree_util.keystr(path, simple=True, separator=".") or "params": _on_host(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(gradients)
            if leaf.dtype != jax.dtypes.float0
        }
        return Results(_on_host(loss), _on_host(outputs), by_path)

    return Run(str(compiled.as_text()), run)


def _objective(case: Case, mesh: Mesh | None) -> Callable[[Any, dict[str, Any]], Any]:
    shape = case.tokens_BS.shape

    def objective(params: Any, inputs: dict[str, Any]) -> Any:
        returned = case.model_fn(params, inputs, mesh)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise ValueError(
                f"model_fn returned a {type(returned).__name__}; return (loss, outputs)"
            )
        loss, outputs = returned
        if jnp.shape(loss) or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
            raise ValueError(
                f"model_fn returned a loss of {jnp.result_type(loss)}{list(jnp.shape(loss))}; "
                "return a floating-point scalar, such as its mean over the batch"
            )
        if jnp.shape(outputs)[:2] != shape:
            raise ValueError(
                f"model_fn returned outputs of shape {jnp.shape(outputs)} "
                f"{'on one device' if mesh is None else 'on the mesh'}; return [B, S, ...] with "
                f"[B, S] = {list(shape)}, those of the tokens"
            )
        return loss, outputs

    return objective


def _on_host(x: jax.Array) -> np.ndarray:
    host = np.asarray(x)
    # bfloat16 and the like; float32 holds them exactly.
    return host if host.dtype in (np.float32, np.float64) else host.astype(np.float32)
