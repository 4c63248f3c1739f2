"""The GPT on one device: its shapes, packed documents, rotary positions, and dropout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ulysses_jax.attention.reference import attend
from ulysses_jax.attention.spec import AttentionSpec
from ulysses_jax.model.dropout import Dropout
from ulysses_jax.model.gpt import GPT, init_params
from ulysses_jax.model.rotary import rotate

GPT2 = {"positions": "learned", "norm": "layernorm", "mlp": "gelu", "biases": True}


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request, tiny_architecture):
    overrides = GPT2 if request.param == "gpt2" else {"num_kv_heads": 2}
    return GPT(tiny_architecture(**overrides), rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def logits(model):
    """logits(tokens_BS, positions_BS=None, segments_BS=None), dense attention in float32."""

    @jax.jit
    def run(tokens_BS, positions_BS=None, segments_BS=None):
        spec = AttentionSpec(causal=True, q_segment_ids=segments_BS)
        scale = model.arch.head_dim**-0.5
        return model(tokens_BS, positions_BS, lambda q, k, v: attend(q, k, v, spec, scale)[0])

    return run


TOKENS = jax.random.randint(jax.random.key(3), (1, 16), 0, 37)


def test_plain_call_is_causal_attention_from_position_zero(model, logits):
    positions = jnp.arange(16)[None]
    np.testing.assert_allclose(
        jax.jit(lambda t: model(t))(TOKENS), logits(TOKENS, positions), atol=1e-5
    )
    changed = logits(TOKENS.at[0, 9].set((TOKENS[0, 9] + 1) % 37), positions)
    np.testing.assert_array_equal(changed[:, :9], logits(TOKENS, positions)[:, :9])
    assert np.all(np.any(changed[:, 9:] != logits(TOKENS, positions)[:, 9:], axis=-1))


def test_packed_documents_equal_separate_forwards(logits):
    positions = jnp.concatenate([jnp.arange(5), jnp.arange(11)])[None]
    segments = jnp.repeat(jnp.arange(2), jnp.array([5, 11]), total_repeat_length=16)[None]
    packed = logits(TOKENS, positions, segments)
    np.testing.assert_allclose(packed[:, :5], logits(TOKENS[:, :5]), atol=1e-5)
    np.testing.assert_allclose(packed[:, 5:], logits(TOKENS[:, 5:]), atol=1e-5)


def test_another_document_changes_no_bit(logits):
    positions = jnp.concatenate([jnp.arange(5), jnp.arange(11)])[None]
    segments = jnp.repeat(jnp.arange(2), jnp.array([5, 11]), total_repeat_length=16)[None]
    changed = logits(TOKENS.at[0, 2].set((TOKENS[0, 2] + 1) % 37), positions, segments)
    packed = logits(TOKENS, positions, segments)
    np.testing.assert_array_equal(changed[:, 5:], packed[:, 5:])
    assert np.any(changed[:, 2:5] != packed[:, 2:5])


def test_initial_weights_are_those_of_the_module(tiny_architecture):
    arch = tiny_architecture()
    params = jax.jit(functools.partial(init_params, arch))(jax.random.key(0))
    module = GPT(arch, rngs=nnx.Rngs(params=jax.random.key(0))).params()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params, module)
    stacked = params["blocks"]["query"]["kernel"]
    assert stacked.shape == (2, 16, 16)
    assert np.any(stacked[0] != stacked[1]), "every layer must start from weights of its own"


def test_rotation_depends_on_the_distance_of_two_positions_only():
    q_BsHD = jax.random.normal(jax.random.key(0), (1, 2, 1, 6))

    def score(first, second):
        turned = rotate(q_BsHD, jnp.array([[first, second]]), 100.0)
        return float(jnp.vdot(turned[0, 0], turned[0, 1]))

    assert score(3, 10) == pytest.approx(score(1003, 1010), rel=1e-4)
    assert abs(score(3, 10) - score(3, 11)) > 1e-3


def test_dropout_of_a_part_is_the_part_of_the_whole():
    x_BsE = jnp.ones((3, 8, 64))

    def dropped(rows, columns):
        part = Dropout(jax.random.key(0), jnp.arange(3)[rows], jnp.arange(8)[columns], 0.25)
        return part(x_BsE[rows, columns], jnp.int32(5))

    whole = dropped(slice(3), slice(8))
    np.testing.assert_array_equal(dropped(slice(1, 3), slice(4, 8)), whole[1:3, 4:8])
    assert float(jnp.mean(whole == 0)) == pytest.approx(0.25, abs=0.03)
    assert float(jnp.max(whole)) == pytest.approx(1 / 0.75)
