"""Every implementation under vmap, a mesh with replication checked, and gradients of bias alone."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from ulysses_jax.attention.spec import AttentionSpec

Run = Callable[..., dict[str, np.ndarray]]
Check = Callable[..., None]


@pytest.fixture
def everything(cases: dict[str, Any]) -> tuple[Any, AttentionSpec]:
    return cases["everything"].arrays(), cases["everything"].spec


def test_vmap_over_specs_equals_one_call_each(
    implementation: Any,
    differentiated: Callable[..., Run],
    compute: Run,
    assert_equal: Check,
    everything: tuple[Any, AttentionSpec],
) -> None:
    arrays, spec = everything
    other = dataclasses.replace(
        spec,
        q_segment_ids=spec.q_segment_ids[::-1],
        kv_lengths=np.array([17, 4], np.int32),
        window=(2, 9),
        mask=spec.mask[::-1],
        bias=-spec.bias,
        first_head=np.int32(1),
    )
    expected = [compute(arrays, one) for one in (spec, other)]
    together = jax.tree.map(lambda *leaves: np.stack(leaves), spec, other)
    mapped = jax.jit(jax.vmap(differentiated(implementation.attend), (None, 0)))
    actual = mapped(arrays, together)
    for i, one in enumerate(expected):
        assert_equal({name: x[i] for name, x in actual.items()}, one, 1e-6)


def test_a_mesh_changes_nothing(
    implementation: Any,
    differentiated: Callable[..., Run],
    compute: Run,
    assert_equal: Check,
    everything: tuple[Any, AttentionSpec],
) -> None:
    """Rows over 'data', heads over 'seq'; bias has no rows, so devices must add its gradient."""
    arrays, spec = everything
    axes = (AxisType.Auto, AxisType.Auto)
    mesh = jax.make_mesh((2, 2), ("data", "seq"), axis_types=axes, devices=jax.devices()[:4])
    whole, rows, heads = PartitionSpec(), PartitionSpec("data"), PartitionSpec(None, "seq")
    both, q_like = PartitionSpec("data", "seq"), PartitionSpec("data", None, "seq")
    placed = dataclasses.replace(
        spec,
        q_segment_ids=rows,
        kv_segment_ids=rows,
        kv_lengths=rows,
        window=whole,
        mask=both,
        bias=heads,
        dropout=whole,
        first_row=whole,
        first_head=whole,
    )

    def local(arrays: Any, spec: AttentionSpec) -> dict[str, np.ndarray]:
        spec = dataclasses.replace(
            spec,
            first_row=spec.first_row + jax.lax.axis_index("data"),
            first_head=spec.first_head + 2 * jax.lax.axis_index("seq"),
        )
        return differentiated(implementation.attend)(arrays, spec)

    placed_arrays = arrays._make([q_like] * 4 + [both])
    results = dict.fromkeys(("out", "dq", "dk", "dv"), q_like) | {"lse": both, "dbias": heads}
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(placed_arrays, placed), out_specs=results, check_vma=True
    )
    assert_equal(jax.jit(mapped)(arrays, spec), compute(arrays, spec), 1e-6)


def test_bias_alone_can_be_differentiated(
    implementation: Any, compute: Run, assert_equal: Check, cases: dict[str, Any]
) -> None:
    arrays, spec = cases["bias"].arrays(), cases["bias"].spec

    def loss(bias: jax.Array) -> jax.Array:
        changed = dataclasses.replace(spec, bias=bias)
        out, lse = implementation.attend(*arrays[:3], changed, 0.4)
        return jnp.sum(out * arrays.dout) + jnp.sum(jnp.where(jnp.isinf(lse), 0, lse * arrays.dlse))

    actual = jax.jit(jax.grad(loss))(spec.bias)
    assert_equal({"dbias": actual}, {"dbias": compute(arrays, spec)["dbias"]}, 1e-6)
