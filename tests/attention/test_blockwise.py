"""What blockwise attention promises beyond its values: memory, remat, and transformations."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Jaxpr
from jax.sharding import AxisType, PartitionSpec

from ulysses_jax.attention import blockwise, reference
from ulysses_jax.attention.blocks import BlockSizes
from ulysses_jax.attention.spec import AttentionSpec

NAMES = ("attn_q", "attn_k", "attn_v", "attn_out", "attn_lse")
SMALL = partial(blockwise.attend, blocks=BlockSizes(8, 5))


def _primitives(jaxpr: Jaxpr) -> Iterator[str]:
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            if isinstance(inner, Jaxpr):
                yield from _primitives(inner)


def _counts(saved: tuple[str, ...] | None) -> tuple[int, int]:
    """Loops over key blocks, and matrix products, in a training step of three scanned layers."""

    def layer(x: jax.Array, weights: jax.Array, spec: AttentionSpec) -> jax.Array:
        return x + SMALL(x @ weights[0], x @ weights[1], x @ weights[2], spec, 0.3)[0]

    if saved is not None:
        policy = jax.checkpoint_policies.save_only_these_names(*saved)
        layer = jax.checkpoint(layer, policy=policy)

    def loss(x: jax.Array, weights: jax.Array, spec: AttentionSpec) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w, spec), None), x, weights)
        return jnp.sum(x)

    spec = AttentionSpec(causal=True, q_segment_ids=jnp.zeros((1, 11), int))
    arrays = jnp.ones((1, 11, 2, 3)), jnp.ones((3, 3, 3, 3))
    primitives = list(_primitives(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*arrays, spec).jaxpr))
    return primitives.count("while"), primitives.count("dot_general")


def test_nothing_is_computed_again_when_the_names_are_saved() -> None:
    projections, attention = 3 + 6, 2 + 5
    assert _counts(None) == (2, projections + attention)
    assert _counts(NAMES) == (2, projections + attention)


@pytest.mark.parametrize(
    ("unsaved", "more_loops", "more_products"),
    [
        ("attn_q", 0, 1),
        ("attn_k", 0, 1),
        ("attn_v", 0, 1),
        ("attn_out", 1, 2),
        ("attn_lse", 1, 2),
    ],
)
def test_what_is_not_saved_is_computed_again(
    unsaved: str, more_loops: int, more_products: int
) -> None:
    loops, products = _counts(tuple(name for name in NAMES if name != unsaved))
    assert (loops, products) == (2 + more_loops, 3 + 6 + 2 + 5 + more_products)


def _temporary_bytes(length: int) -> int:
    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(blockwise.attend(q, k, v, AttentionSpec(causal=True), 0.3)[0] ** 2)

    x = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
    step = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(x, x, x).compile()
    return step.memory_analysis().temp_size_in_bytes


def test_no_buffer_has_the_size_of_all_pairs() -> None:
    length = 16384
    assert _temporary_bytes(length) < length**2 * 4 / 50


@pytest.fixture(scope="module")
def inputs() -> tuple[jax.Array, ...]:
    draw = np.random.default_rng(3).standard_normal
    return tuple(jnp.asarray(draw((2, 23, heads, 3)), jnp.float32) for heads in (4, 2, 2))


IDS = np.stack([np.repeat([0, 1], [9, 14]), np.repeat([0, 1], [17, 6])])


def test_gradients_are_summed_over_devices_that_share_keys(inputs: tuple[jax.Array, ...]) -> None:
    """With replication checked: q split over both axes, k, v and ids over one."""
    axes = (AxisType.Auto, AxisType.Auto)
    mesh = jax.make_mesh((2, 2), ("data", "seq"), axis_types=axes, devices=jax.devices()[:4])
    q, k, v = inputs
    k, v = k[:, :, :1], v[:, :, :1]
    rows, heads = PartitionSpec("data"), PartitionSpec("data", None, "seq")

    def local(q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec) -> jax.Array:
        return SMALL(q, k, v, spec, 0.3)[0]

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, sharded: bool) -> jax.Array:
        spec = AttentionSpec(True, IDS, IDS[::-1])
        if not sharded:
            return jnp.sum(jnp.sin(reference.attend(q, k, v, spec, 0.3)[0]))
        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=(heads, rows, rows, rows), out_specs=heads, check_vma=True
        )
        return jnp.sum(jnp.sin(mapped(q, k, v, spec)))

    gradients = jax.jit(jax.grad(loss, (0, 1, 2)), static_argnums=3)
    for actual, expected in zip(gradients(q, k, v, True), gradients(q, k, v, False), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_vmap_over_packings_equals_one_call_each(inputs: tuple[jax.Array, ...]) -> None:
    q, k, v = inputs

    def gradient(q: jax.Array, ids: jax.Array) -> jax.Array:
        spec = AttentionSpec(causal=True, q_segment_ids=ids)
        return jax.grad(lambda q, k: jnp.sum(jnp.sin(SMALL(q, k, v, spec, 0.3)[0])), (0, 1))(q, k)

    many_q, many_ids = jnp.stack([q, 2 * q]), jnp.stack([IDS, IDS[::-1]])
    together = jax.jit(jax.vmap(gradient))(many_q, many_ids)
    one = jax.jit(gradient)
    for i in range(2):
        for actual, expected in zip(together, one(many_q[i], many_ids[i]), strict=True):
            np.testing.assert_allclose(actual[i], expected, rtol=0, atol=1e-6)
