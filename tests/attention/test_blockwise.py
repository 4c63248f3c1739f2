"""What blockwise attention promises beyond its values: memory, remat, and transformations."""

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Jaxpr
from jax.sharding import AxisType, PartitionSpec

from ulysses_jax.attention import blockwise, reference
from ulysses_jax.attention.block_layout import BlockLayout
from ulysses_jax.attention.blocks import BlockSizes
from ulysses_jax.attention.dropout import Dropout
from ulysses_jax.attention.spec import AttentionSpec

NAMES = ("attn_q", "attn_k", "attn_v", "attn_out", "attn_lse")
SMALL = partial(blockwise.attend, blocks=BlockSizes(8, 5))
# Forward and backward, each with one loop over full and one over ragged key blocks.
LOOPS, PRODUCTS, PROJECTIONS = 2 * 2, 2 * (2 + 5), 3 + 6


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

    ids = jnp.zeros((1, 11), int)
    spec = AttentionSpec(causal=True, q_segment_ids=ids, contiguous_segments=True)
    arrays = jnp.ones((1, 11, 2, 3)), jnp.ones((3, 3, 3, 3))
    primitives = list(_primitives(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*arrays, spec).jaxpr))
    return primitives.count("while"), primitives.count("dot_general")


def test_nothing_is_computed_again_when_the_names_are_saved() -> None:
    assert _counts(None) == (LOOPS, PROJECTIONS + PRODUCTS)
    assert _counts(NAMES) == (LOOPS, PROJECTIONS + PRODUCTS)


@pytest.mark.parametrize(
    ("unsaved", "more_loops", "more_products"),
    [
        ("attn_q", 0, 1),
        ("attn_k", 0, 1),
        ("attn_v", 0, 1),
        ("attn_out", 2, 4),
        ("attn_lse", 2, 4),
    ],
)
def test_what_is_not_saved_is_computed_again(
    unsaved: str, more_loops: int, more_products: int
) -> None:
    loops, products = _counts(tuple(name for name in NAMES if name != unsaved))
    assert (loops, products) == (LOOPS + more_loops, PROJECTIONS + PRODUCTS + more_products)


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


def test_units_of_several_rows_and_heads_equal_units_of_one(inputs: tuple[jax.Array, ...]) -> None:
    """With all that belongs to a row or a head: tables, bias, dropout, segments, lengths."""
    draw = np.random.default_rng(5)
    layout = BlockLayout(3, 2, draw.random((7, 8, 12)) < 0.7)
    spec = AttentionSpec(
        q_segment_ids=IDS,
        kv_lengths=np.array([23, 11]),
        window=(13, 9),
        block_layout=layout,
        mask=draw.random((2, 4, 23, 23)) < 0.9,
        dropout=Dropout(rate=0.3, key=jax.random.key(1)),
        first_row=2,
        first_head=3,
    )

    @partial(jax.jit, static_argnums=0)
    def results(blocks: BlockSizes, bias: jax.Array) -> Any:
        def call(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> Any:
            biased = dataclasses.replace(spec, bias=bias)
            return blockwise.attend(q, k, v, biased, 0.3, blocks=blocks)

        outputs, vjp = jax.vjp(call, *inputs, bias)
        return outputs, vjp(jax.tree.map(jnp.cos, outputs))

    bias = jnp.asarray(draw.standard_normal((1, 4, 23, 23)), jnp.float32)
    one, several = results(BlockSizes(6, 4), bias), results(BlockSizes(9, 8, 2, 2), bias)
    for x, y in zip(jax.tree.leaves(several), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * np.abs(y[np.isfinite(y)]).max())


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
