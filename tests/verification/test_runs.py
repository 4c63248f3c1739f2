"""The two runs: where their inputs lie, and what mesh the model sees."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from ulysses_jax import make_mesh
from ulysses_jax.verification.case import Case
from ulysses_jax.verification.runs import sharded_run, single_device_run

TOKENS = np.arange(24, dtype=np.int32).reshape(4, 6)


def test_inputs_are_split_where_the_axes_divide_them():
    seen = {}

    def model_fn(params, inputs, mesh):
        for name, x in (inputs | params).items():
            seen[name] = jax.typeof(x).sharding.spec
        x = params["w"] * jnp.float32(inputs["tokens"])
        return x.sum(), x

    # Explicit axes, because a traced array then knows how it is split.
    devices = make_mesh(2, 3).devices
    mesh = Mesh(devices, ("rows", "parts"), axis_types=(AxisType.Explicit,) * 2)
    inputs = {
        "tokens": TOKENS,
        "hidden": np.ones((4, 6, 5)),
        "lengths": np.ones(4),
        "odd": np.ones((4, 5)),
        "table": np.ones((5, 6)),
        "scalar": np.ones(()),
    }
    params = {"w": np.float32(3), "split": np.ones((6, 4)), "whole": np.ones(3)}
    shardings = {
        "w": PartitionSpec(),
        "split": PartitionSpec("parts"),
        "whole": jax.NamedSharding(mesh, PartitionSpec()),
    }
    axes = {"seq_axis": "parts", "batch_axes": "rows"}
    case = Case(model_fn, inputs, params, param_shardings=shardings, **axes)
    results = sharded_run(case, mesh).step(TOKENS)
    P = PartitionSpec
    assert seen == {
        "tokens": P("rows", "parts"),
        "hidden": P("rows", "parts", None),
        "lengths": P("rows"),
        "odd": P("rows", None),
        "table": P(None, None),
        "scalar": P(),
        "w": P(),
        "split": P("parts", None),
        "whole": P(None),
    }
    np.testing.assert_array_equal(results.outputs, 3.0 * TOKENS)
    assert results.gradients["w"] == TOKENS.sum()


def test_single_device_run_sees_no_mesh_and_the_other_its_own():
    seen = []

    def model_fn(params, inputs, mesh):
        seen.append((mesh, jax.sharding.get_abstract_mesh().axis_names))
        x = params[0] * inputs["tokens"].astype(params[0].dtype)
        return x.sum(), x

    case = Case(model_fn, {"tokens": TOKENS}, [jnp.bfloat16(2), jnp.int32(7)])
    mesh = make_mesh(2, 2)
    with jax.set_mesh(mesh):
        runs = single_device_run(case, mesh), sharded_run(case, mesh)
    assert seen == [(None, ()), (mesh, ("data", "seq"))]
    for run in runs:
        results = run.step(TOKENS + 1)
        assert results.outputs.dtype == np.float32
        np.testing.assert_array_equal(results.outputs, 2 * (TOKENS + 1))
        # An integer parameter has no gradient.
        assert results.gradients.keys() == {"0"}
