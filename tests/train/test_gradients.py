"""Loss and every gradient equal the single-device run, on every mesh and at every ZeRO stage."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ulysses_jax.attention.reference import attend as reference_attend
from ulysses_jax.attention.spec import AttentionSpec
from ulysses_jax.data.batches import Batch
from ulysses_jax.model.gpt import cast_to, hidden_states, init_params
from ulysses_jax.parallel.mesh import make_mesh
from ulysses_jax.train.state import sharding_policy
from ulysses_jax.train.step import Program

GPT2 = {
    "positions": "learned",
    "norm": "layernorm",
    "mlp": "gelu",
    "biases": True,
    "tied_head": True,
}


def _truth(arch, params, batch):
    """Loss and gradients by dense float32 attention and whole logits, on one device."""
    spec = AttentionSpec(causal=True, q_segment_ids=batch.segments_BS)

    def loss(params):
        x_BSE, table_VE = hidden_states(
            arch,
            params,
            batch.tokens_BS,
            batch.positions_BS,
            lambda q, k, v: reference_attend(q, k, v, spec, arch.head_dim**-0.5)[0],
            cast_to(arch),
        )
        logp_BSV = jax.nn.log_softmax(jnp.einsum("bse,ve->bsv", x_BSE, table_VE))
        target_BS = jnp.take_along_axis(logp_BSV, jnp.maximum(batch.labels_BS, 0)[..., None], -1)
        valid_BS = batch.labels_BS != -100
        return -jnp.sum(target_BS[..., 0] * valid_BS) / jnp.sum(valid_BS)

    return jax.jit(jax.value_and_grad(loss))(params)


@functools.partial(jax.jit, static_argnums=0)
def _perturbed_params(arch):
    """Weights without the constants that norms and biases start at: they hide lost gradients."""
    params = init_params(arch, jax.random.key(0))
    return jax.tree.map(lambda w: w + 0.1 * jax.random.normal(jax.random.key(1), w.shape), params)


@pytest.fixture(scope="module")
def truth(tiny_architecture, packed_batch):
    """(architecture, params, batch, loss, gradients), one for each set of overrides."""

    @functools.cache
    def make(overrides):
        arch = tiny_architecture(**dict(overrides))
        params = _perturbed_params(arch)
        batch = packed_batch()
        flat = jax.tree.map(lambda x: x[0], batch)
        return arch, params, batch, *_truth(arch, params, flat)

    def choose(attention="blockwise", **overrides):
        arch, *values = make(tuple(sorted(overrides.items())))
        return dataclasses.replace(arch, attention=attention), *values

    return choose


def _stored(params, policy):
    padded = jax.tree.map(
        lambda w, p: jnp.pad(w, [(0, s - n) for s, n in zip(p.stored, p.logical, strict=True)]),
        params,
        policy.placements,
    )
    return jax.device_put(padded, policy.shardings(policy.param_specs))


def _assert_close(actual, expected, placement, tolerance=1e-5):
    """Compares every shard with its part of the padded truth, so no device can be wrong unseen."""
    pad = [(0, s - n) for s, n in zip(placement.stored, placement.logical, strict=True)]
    truth = np.pad(expected, pad)
    # The gradient of a key bias without RoPE is zero but for rounding; it needs a scale.
    limit = tolerance * max(np.abs(truth).max(), 1e-4)
    for shard in actual.addressable_shards:
        np.testing.assert_allclose(shard.data, truth[shard.index], rtol=0, atol=limit)


def _check(truth, mesh_shape, stage, remat="exchange", chunk=7, **overrides):
    arch, params, batch, loss, gradients = truth(**overrides)
    mesh = make_mesh(*mesh_shape)
    policy = sharding_policy(arch, mesh, stage)
    program = Program(arch, policy, remat, chunk)
    placed = jax.device_put(batch, policy.batch(leading=1))
    found_loss, found, labels = jax.jit(program.loss_and_gradients)(
        _stored(params, policy), placed, jax.random.key(0)
    )
    assert int(labels) == int(np.sum(batch.labels_BS != -100))
    assert float(found_loss) == pytest.approx(float(loss), rel=1e-5)
    jax.tree.map(_assert_close, found, gradients, policy.placements)


@pytest.mark.parametrize("mesh_shape", [(1, 1), (8, 1), (1, 8), (2, 4), (4, 2), (3, 2)])
def test_gradients_equal_single_device_on_every_mesh(truth, mesh_shape):
    _check(truth, mesh_shape, stage=3)


@pytest.mark.parametrize(("mesh_shape", "kv_heads"), [((1, 3), 4), ((2, 4), 1)])
def test_gradients_equal_single_device_where_devices_do_not_divide_the_heads(
    truth, mesh_shape, kv_heads
):
    _check(truth, mesh_shape, stage=3, num_heads=kv_heads * 2, num_kv_heads=kv_heads, embed_dim=16)


# Stages 0 and 1 run the same backward pass, so stage 1 is on one mesh only. What does not depend
# on the local attention is compiled with the smaller program of the two.
@pytest.mark.parametrize(
    ("mesh_shape", "stage"),
    [(mesh, stage) for mesh in ((4, 1), (2, 2), (1, 4)) for stage in (0, 2, 3)] + [((2, 2), 1)],
)
def test_gradients_have_no_factor_of_the_mesh_at_any_zero_stage(truth, mesh_shape, stage):
    _check(truth, mesh_shape, stage, attention="reference")


@pytest.mark.parametrize("remat", ["none", "full"])
def test_gradients_do_not_depend_on_what_is_recomputed(truth, remat):
    _check(truth, (2, 4), stage=3, remat=remat)


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_equal_single_device_for_a_gpt2_shape(truth, stage):
    _check(truth, (3, 2), stage, attention="reference", **GPT2)


@pytest.mark.parametrize("chunk", [1, 10_000])
def test_gradients_do_not_depend_on_the_loss_chunk(truth, chunk):
    _check(truth, (2, 2), stage=3, chunk=chunk, attention="reference")


@pytest.fixture(scope="module")
def bfloat16_error(truth):
    """Distance of all bfloat16 gradients from those in float32, relative to their length."""
    arch, params, batch, _, exact = truth()
    arch = dataclasses.replace(arch, dtype="bfloat16")

    @functools.cache
    def measure(mesh_shape):
        policy = sharding_policy(arch, make_mesh(*mesh_shape), 3)
        program = Program(arch, policy, "exchange", 64)
        placed = jax.device_put(batch, policy.batch(leading=1))
        _, found, _ = jax.jit(program.loss_and_gradients)(
            _stored(params, policy), placed, jax.random.key(0)
        )
        squares = jax.tree.map(lambda a, b: np.sum((np.asarray(a) - b) ** 2), found, exact)
        lengths = jax.tree.map(lambda b: np.sum(np.asarray(b) ** 2), exact)
        return (sum(jax.tree.leaves(squares)) / sum(jax.tree.leaves(lengths))) ** 0.5

    return measure


@pytest.mark.parametrize("mesh_shape", [(8, 1), (1, 8)])
def test_the_error_of_bfloat16_does_not_grow_with_the_mesh(bfloat16_error, mesh_shape):
    alone = bfloat16_error((1, 1))
    assert 1e-4 < alone < 0.05, "bfloat16 was not used, or is not bfloat16's own error"
    assert bfloat16_error(mesh_shape) < 1.2 * alone


@pytest.fixture(scope="module")
def frequent_token_gradient(tiny_architecture):
    """The gradient of the token table, by dtype and mesh, where nine of ten tokens are the same."""
    # Short rows and one head: its row of the table sums thousands of terms at little cost.
    shape = (1, 256, 32)
    arch = tiny_architecture(
        num_layers=1, num_heads=1, num_kv_heads=1, max_seq_len=32, tied_head=True
    )
    arch = dataclasses.replace(arch, attention="reference")
    draw = np.random.default_rng(0)
    tokens = np.where(draw.random(shape) < 0.9, 5, draw.integers(0, 37, shape)).astype(np.int32)
    positions = np.broadcast_to(np.arange(32, dtype=np.int32), shape)
    batch = Batch(tokens, np.roll(tokens, -1, axis=-1), positions, None)
    params = _perturbed_params(arch)

    def gradient(dtype, mesh_shape):
        policy = sharding_policy(arch, make_mesh(*mesh_shape), 3)
        program = Program(dataclasses.replace(arch, dtype=dtype), policy, "exchange", 512)
        placed = jax.device_put(batch, policy.batch(leading=1))
        _, found, _ = jax.jit(program.loss_and_gradients)(
            _stored(params, policy), placed, jax.random.key(0)
        )
        return np.asarray(found["embedding"]["tokens"])[:37]

    return functools.cache(gradient)


@pytest.mark.parametrize("mesh_shape", [(1, 1), (8, 1)])
def test_bfloat16_gradients_of_frequent_tokens_are_summed_in_float32(
    frequent_token_gradient, mesh_shape
):
    exact = frequent_token_gradient("float32", (1, 1))
    found = frequent_token_gradient("bfloat16", mesh_shape)
    distance = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert 1e-4 < distance < 0.02


def test_another_document_changes_no_bit_of_the_loss_on_a_mesh(tiny_architecture):
    """The labels are those of document B alone; a token of A changes (A and B share a device)."""
    arch = tiny_architecture()
    policy = sharding_policy(arch, make_mesh(1, 4), 3)
    program = Program(arch, policy, "exchange", 16)
    position = np.arange(24, dtype=np.int32)[None]
    segments = (position >= 8).astype(np.int32)
    tokens = np.random.default_rng(0).integers(0, 37, (1, 24), dtype=np.int32)
    labels = np.where(segments == 1, np.roll(tokens, -1), -100)
    loss_sum = jax.jit(program.loss_sum)
    params = _stored(_perturbed_params(arch), policy)

    def loss(tokens, labels=labels):
        batch = Batch(tokens, labels, position - 8 * segments, segments)
        return float(loss_sum(params, jax.device_put(batch, policy.batch()))[0])

    changed = tokens.copy()
    changed[0, 3] = (tokens[0, 3] + 1) % 37
    assert loss(changed) == loss(tokens)
    everywhere = np.roll(tokens, -1)
    assert loss(changed, everywhere) != loss(tokens, everywhere)
