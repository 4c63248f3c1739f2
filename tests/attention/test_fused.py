"""Kernels that others keep, as traced for a mesh with replication checked: how often each runs."""

from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from ulysses_jax.attention import cudnn
from ulysses_jax.attention.select import LocalAttention
from ulysses_jax.attention.spec import AttentionSpec

NAMES = ("attn_q", "attn_k", "attn_v", "attn_out", "attn_lse")


class Kernels(NamedTuple):
    """An adapter, and what its two passes are called in a trace."""

    adapter: str
    forward: str
    backward: str


KERNELS = {
    "cudnn": Kernels(
        "cudnn", "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"
    ),
    "pallas": Kernels("pallas", "mha_forward", "mha_backward"),
    "splash": Kernels("splash", "splash_mha_fwd_residuals", "splash_mha_dq_no_residuals"),
    "tokamax": Kernels("tokamax", "pallas_flash_attention_fwd_res", "pallas_flash_attention_vjp"),
}


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    if request.param == "tokamax":
        pytest.importorskip("tokamax")
    versions = SimpleNamespace(cudnn_get_version=lambda: 92800)
    monkeypatch.setattr(cudnn.kernels, "cuda_versions", versions)
    return KERNELS[request.param]


def _trace(attend: LocalAttention, remat: Callable[..., Any], use: Callable[..., Any]) -> list[str]:
    """Forward and backward pass of three scanned layers, heads split over four devices."""

    def layer(q: jax.Array, k: jax.Array) -> jax.Array:
        return q + use(*attend(q, k, k, AttentionSpec(causal=True), 0.5)).astype(q.dtype)

    def loss(q: jax.Array, k: jax.Array) -> jax.Array:
        q, _ = jax.lax.scan(lambda q, _: (remat(layer)(q, k), None), q, length=3)
        return jnp.sum(q**2)

    mesh = jax.make_mesh((4,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    heads = PartitionSpec(None, None, "seq")
    mapped = jax.shard_map(
        jax.grad(loss, (0, 1)), mesh=mesh, in_specs=heads, out_specs=heads, check_vma=True
    )
    q = jax.ShapeDtypeStruct((1, 128, 4, 128), jnp.bfloat16)
    return list(_names(jax.make_jaxpr(mapped)(q, q).jaxpr))


def _names(jaxpr: Any) -> Iterator[str]:
    """The name of every operation and Pallas kernel, as often as it stands in the program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation.params["name"]
            continue
        yield equation.primitive.name
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _names(inner)


def _calls(trace: list[str], kernels: Kernels) -> tuple[int, int]:
    return trace.count(kernels.forward), trace.count(kernels.backward)


def _remat(*saved: str) -> Callable[..., Any]:
    policy = jax.checkpoint_policies.save_only_these_names(*saved)
    return lambda layer: jax.checkpoint(layer, policy=policy, prevent_cse=False)


def _attend(kernels: Kernels) -> LocalAttention:
    return import_module(f"ulysses_jax.attention.{kernels.adapter}").attend


def test_saved_names_spare_the_forward_kernel_in_the_backward_pass(kernels: Kernels) -> None:
    trace = _trace(_attend(kernels), _remat(*NAMES), lambda out, lse: out)
    assert _calls(trace, kernels) == (1, 1)


def test_without_the_saved_names_the_forward_kernel_runs_again(kernels: Kernels) -> None:
    trace = _trace(_attend(kernels), _remat(), lambda out, lse: out)
    assert _calls(trace, kernels) == (2, 1)


def test_the_gradient_of_the_log_sum_exp_is_one_more_backward_kernel(kernels: Kernels) -> None:
    trace = _trace(
        _attend(kernels), _remat(*NAMES), lambda out, lse: out * lse.swapaxes(1, 2)[..., None]
    )
    assert _calls(trace, kernels) == (1, 2)
