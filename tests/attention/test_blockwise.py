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


def _temporary_bytes(length: int, **fields: Any) -> int:
    spec = AttentionSpec(causal=True, **fields)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(blockwise.attend(q, k, v, spec, 0.3)[0] ** 2)

    x = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
    step = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(x, x, x).compile()
    return step.memory_analysis().temp_size_in_bytes


def test_no_buffer_has_the_size_of_all_pairs() -> None:
    length = 16384
    assert _temporary_bytes(length) < length**2 * 4 / 50


def test_memory_grows_with_the_sequence_whatever_is_described() -> None:
    def temporary(length: int) -> int:
        return _temporary_bytes(
            length,
            window=(100, None),
            q_segment_ids=np.arange(length)[None] % 7,
            kv_lengths=np.array([length - 3]),
            mask=np.ones((1, 1, 1, length), bool),
            dropout=Dropout(rate=0.1, key=jax.random.key(0)),
        )

    assert temporary(16384) < 2.5 * temporary(8192)


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


def test_rows_of_one_large_score_have_the_gradient_of_equal_weights() -> None:
    """As where an additive mask rules out a whole row: max + log(count) would lose the count."""
    x = jax.random.normal(jax.random.key(2), (1, 7, 1, 3))
    bias = jnp.full((1, 1, 1, 7), -1e9)

    def gradients(attend: Any) -> Any:
        def loss(k: jax.Array, v: jax.Array) -> jax.Array:
            return jnp.sum(jnp.sin(attend(x, k, v, AttentionSpec(bias=bias), 0.3)[0]))

        return jax.grad(loss, (0, 1))(x, 2 * x)

    for actual, expected in zip(gradients(SMALL), gradients(reference.attend), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_an_empty_row_gives_zero_beside_values_that_are_not_finite() -> None:
    x = jnp.ones((2, 5, 1, 3))
    spec = AttentionSpec(kv_lengths=jnp.array([3, 0]))
    out, _ = SMALL(x, x, x.at[:, 1].set(jnp.nan), spec, 0.3)
    assert not out[1].any()


def test_a_layout_block_longer_than_the_sequence_is_cut() -> None:
    x = jax.random.normal(jax.random.key(0), (1, 13, 1, 3))
    spec = AttentionSpec(block_layout=BlockLayout(1024, 1024, np.ones((1, 1, 1), bool)))
    out, _ = blockwise.attend(x, x, x, spec, 0.3)
    np.testing.assert_allclose(out, reference.attend(x, x, x, spec, 0.3)[0], atol=1e-6)


def test_it_runs_with_64_bit_types_on() -> None:
    x = jax.random.normal(jax.random.key(0), (1, 13, 1, 3))
    layout = BlockLayout(4, 5, np.ones((1, 4, 3), bool))
    spec = AttentionSpec(True, np.zeros((1, 13), int), window=(5, 0), block_layout=layout)
    expected, _ = reference.attend(x, x, x, spec, 0.3)
    with jax.enable_x64(True):
        wide = dataclasses.replace(spec, bias=jnp.zeros((1, 1, 13, 13)))
        gradient = jax.grad(lambda q: jnp.sum(SMALL(q, x, x, wide, 0.3)[0]))(x)
        assert gradient.shape == x.shape
        out, _ = SMALL(x, x, x, wide, 0.3)
    np.testing.assert_allclose(out, expected, atol=1e-6)


def test_a_scale_that_is_traced_is_refused() -> None:
    x = jnp.ones((1, 5, 1, 3))
    with pytest.raises(ValueError, match="it is compiled in: give a Python number"):
        jax.jit(lambda scale: SMALL(x, x, x, AttentionSpec(), scale))(0.3)


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
