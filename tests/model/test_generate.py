"""Generation with a cache gives what the whole model would, and refuses what does not fit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ulysses_jax.model.generate import generate
from ulysses_jax.model.gpt import cast_to, causal_attend, hidden_states, init_params
from ulysses_jax.parallel.mesh import make_mesh
from ulysses_jax.train.sampling import decode, encode, printable, sample_text
from ulysses_jax.train.state import Purpose, sharding_policy

PROMPT = [5, 3, 8, 1, 30]


@pytest.fixture(scope="module")
def trained(tiny_architecture):
    arch = tiny_architecture(num_kv_heads=4)
    params = jax.jit(functools.partial(init_params, arch))(jax.random.key(0))
    # Weights large enough that the likeliest token is not a tie.
    return arch, jax.tree.map(lambda w: 8 * w, params)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _generate(arch, params, prompt_BS, tokens, temperature, key):
    return generate(arch, params, prompt_BS, tokens, temperature, key, cast_to(arch))


def _greedy(arch, params, tokens_BS, count):
    """Runs the whole model again for each token; padding after the text is invisible to it."""

    @jax.jit
    def logits(padded_BS):
        positions_BS = jnp.broadcast_to(jnp.arange(padded_BS.shape[1]), padded_BS.shape)
        attend = causal_attend(arch)
        x, table = hidden_states(arch, params, padded_BS, positions_BS, attend, cast_to(arch))
        return jnp.einsum("bse,ve->bsv", x, table)

    for _ in range(count):
        padded = jnp.pad(tokens_BS, ((0, 0), (0, arch.max_seq_len - tokens_BS.shape[1])))
        nearest = jnp.argmax(logits(padded)[:, tokens_BS.shape[1] - 1], axis=-1)
        tokens_BS = jnp.concatenate([tokens_BS, nearest[:, None]], axis=1)
    return tokens_BS[:, -count:]


def test_cached_greedy_tokens_are_those_of_the_whole_model(trained):
    arch, params = trained
    prompts = jnp.array([PROMPT, PROMPT[::-1]])
    found = _generate(arch, params, prompts, 12, jnp.float32(0), jax.random.key(0))
    np.testing.assert_array_equal(found, _greedy(arch, params, prompts, 12))
    assert len(np.unique(found)) > 2, "a constant text would prove nothing"


def test_samples_depend_on_the_seed_and_only_on_it(trained):
    arch, params = trained
    prompts = jnp.array([PROMPT])
    draws = [
        _generate(arch, params, prompts, 12, jnp.float32(1.5), jax.random.key(seed))
        for seed in (1, 1, 2)
    ]
    np.testing.assert_array_equal(draws[0], draws[1])
    assert np.any(draws[0] != draws[2])


def test_sharded_weights_sample_the_same_text(trained):
    arch, params = trained
    mesh = make_mesh(2, 4)
    key = jax.random.fold_in(jax.random.key(4), Purpose.SAMPLING)
    expected = _generate(arch, params, jnp.array([PROMPT]), 8, jnp.float32(0.7), key)
    policy = sharding_policy(arch, mesh, 3)
    placed = jax.device_put(params, policy.shardings(policy.param_specs))
    assert sample_text(arch, policy, placed, PROMPT, 8, 0.7, seed=4) == expected[0].tolist()


@pytest.mark.parametrize(
    ("prompt", "tokens", "words"),
    [
        (
            [1] * 20,
            5,
            "20 tokens and 5 more are asked for.* at most 4 tokens",
        ),
        ([1] * 30, 1, "30 tokens and 1 more are asked for.* sequences of 24"),
        ([], 1, "the prompt is empty"),
        ([40], 1, "token 40, but model.vocab_size is 37"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(trained, prompt, tokens, words):
    arch, params = trained
    policy = sharding_policy(arch, make_mesh(1, 1), 0)
    with pytest.raises(ValueError, match=words):
        sample_text(arch, policy, params, prompt, tokens, 1.0, 0)


def test_text_is_bytes_and_other_tokens_are_their_ids():
    assert decode(encode("naïve", text=True), text=True) == "naïve"
    assert decode([300], text=True) == "?"
    assert encode("17 4", text=False) == [17, 4]
    assert decode([17, 4], text=False) == "17 4 "
    with pytest.raises(ValueError, match="give the ids as numbers"):
        encode("hello", text=False)


def test_control_characters_do_not_reach_the_terminal():
    assert printable("a\x1b[2J\r\nb\tç") == "a\ufffd[2J\ufffd\nb\tç"
