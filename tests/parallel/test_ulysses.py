"""Exchanged attention in a user's own region: exact, with any local function, and refusing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import ulysses_jax
from ulysses_jax import AttentionSpec, attention_function, exchanged_attention, make_mesh
from ulysses_jax.attention import reference
from ulysses_jax.attention.block_layout import BlockLayout
from ulysses_jax.attention.dropout import Dropout

SPLIT = PartitionSpec("data", "seq")
SCALE = 0.4


def _sharded(mesh, local):
    spec = AttentionSpec(causal=True)

    def region(q, k, v):
        return exchanged_attention(q, k, v, spec, local=local, axis="seq", scale=SCALE)

    return jax.jit(jax.shard_map(region, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT))


def _draw(heads, kv_heads, batch=2, length=12):
    keys = jax.random.split(jax.random.key(0), 3)
    return [
        jax.random.normal(key, (batch, length, count, 5))
        for key, count in zip(keys, (heads, kv_heads, kv_heads), strict=True)
    ]


@pytest.mark.parametrize("ways", [1, 2, 4])
def test_identity_attention_returns_its_queries_bitwise(ways):
    def identity(q_BShD, k_BTgD, v_BTgD, spec, scale):
        return q_BShD, jnp.zeros((*q_BShD.shape[:1], *q_BShD.shape[2:0:-1]))

    q, k, v = _draw(8, 4)
    np.testing.assert_array_equal(_sharded(make_mesh(2, ways), identity)(q, k, v), q)


@pytest.mark.parametrize(("heads", "kv_heads", "mesh_shape"), [(6, 3, (2, 3)), (8, 2, (1, 4))])
def test_values_and_gradients_equal_dense_attention(heads, kv_heads, mesh_shape):
    inputs = _draw(heads, kv_heads)
    weight = jax.random.normal(jax.random.key(9), inputs[0].shape)
    sharded = _sharded(make_mesh(*mesh_shape), attention_function("blockwise"))

    def both(attend):
        def loss(q, k, v):
            return jnp.sum(weight * attend(q, k, v))

        return attend(*inputs), *jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*inputs)

    expected = both(lambda q, k, v: reference.attend(q, k, v, AttentionSpec(causal=True), SCALE)[0])
    for found, wanted in zip(both(sharded), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_what_belongs_to_a_head_stays_with_it():
    """A bias with its gradient, a mask, a layout and dropout, each of its own for every head."""
    q, k, v = _draw(8, 4)
    draw = np.random.default_rng(2)
    layout = BlockLayout(3, 4, draw.random((8, 4, 3)) < 0.7)
    spec = AttentionSpec(
        mask=jnp.asarray(draw.random((1, 8, 12, 12)) < 0.8),
        block_layout=layout,
        dropout=Dropout(rate=0.4, key=jax.random.key(3)),
    )
    bias = jnp.asarray(draw.standard_normal((1, 8, 12, 12)), jnp.float32)
    local = attention_function("blockwise")
    rows = PartitionSpec(None, "seq")

    def region(q, k, v, bias):
        biased = dataclasses.replace(spec, bias=bias)
        return exchanged_attention(q, k, v, biased, local=local, axis="seq", scale=SCALE)

    whole = PartitionSpec()
    sharded = jax.shard_map(
        region, mesh=make_mesh(1, 4), in_specs=(rows, rows, rows, whole), out_specs=rows
    )

    def dense(q, k, v, bias):
        return reference.attend(q, k, v, dataclasses.replace(spec, bias=bias), SCALE)[0]

    def both(attend):
        def call(*inputs):
            out, vjp = jax.vjp(attend, *inputs)
            return out, *vjp(jnp.cos(out))

        return jax.jit(call)(q, k, v, bias)

    for found, wanted in zip(both(sharded), both(dense), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (AttentionSpec(mask=np.ones((1, 4, 12, 12), bool)), "has 4 heads, but this call has 8"),
        (AttentionSpec(bias=np.ones((1, 1, 3, 12), np.float32)), "has 3 queries, but .* has 12"),
        (AttentionSpec(kv_lengths=np.ones(3, np.int32)), r"needs integers of shape \[2\]"),
        (AttentionSpec(block_layout=BlockLayout(12, 12, np.ones((4, 1, 1), bool))), "4 heads"),
    ],
)
def test_a_spec_that_does_not_fit_the_whole_sequence_is_refused(spec, message):
    q, k, v = _draw(8, 8)
    local = attention_function("blockwise")

    def region(q, k, v):
        return exchanged_attention(q, k, v, spec, local=local, axis="seq", scale=SCALE)

    rows = PartitionSpec(None, "seq")
    with pytest.raises(ValueError, match=message):
        jax.shard_map(region, mesh=make_mesh(1, 4), in_specs=rows, out_specs=rows)(q, k, v)


def test_dropout_does_not_depend_on_how_rows_and_heads_are_split():
    q, k, v = _draw(4, 4)
    dropout = Dropout(rate=0.5, key=jax.random.key(3))

    def region(q, k, v):
        spec = AttentionSpec(dropout=dropout, first_row=jax.lax.axis_index("data") * q.shape[0])
        local = attention_function("blockwise")
        return exchanged_attention(q, k, v, spec, local=local, axis="seq", scale=SCALE)

    mapped = jax.shard_map(region, mesh=make_mesh(2, 2), in_specs=SPLIT, out_specs=SPLIT)
    expected, _ = reference.attend(q, k, v, AttentionSpec(dropout=dropout), SCALE)
    np.testing.assert_allclose(jax.jit(mapped)(q, k, v), expected, rtol=0, atol=1e-5)


def test_every_public_name_exists():
    for name in ulysses_jax.__all__:
        assert callable(getattr(ulysses_jax, name)), name
    with pytest.raises(AttributeError, match="no attribute 'ring'"):
        _ = ulysses_jax.ring
