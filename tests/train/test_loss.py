"""The chunked loss: values and gradients of the plain one, whatever the chunk and the labels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ulysses_jax.train.loss import count_labels, token_loss_sum


def _plain(x_BsE, table_VE, labels_Bs):
    logp_BsV = jax.nn.log_softmax(jnp.einsum("bse,ve->bsv", x_BsE, table_VE))
    picked_Bs = jnp.take_along_axis(logp_BsV, jnp.maximum(labels_Bs, 0)[..., None], -1)[..., 0]
    return -jnp.sum(jnp.where(labels_Bs == -100, 0.0, picked_Bs))


@pytest.fixture(scope="module")
def example():
    keys = jax.random.split(jax.random.key(0), 3)
    x_BsE = jax.random.normal(keys[0], (2, 7, 5))
    table_VE = jax.random.normal(keys[1], (11, 5))
    labels_Bs = jax.random.randint(keys[2], (2, 7), 0, 11).at[0, 2:5].set(-100)
    return x_BsE, table_VE, labels_Bs


@pytest.mark.parametrize("chunk", [1, 3, 14, 100])
def test_loss_and_gradients_equal_the_plain_ones(example, chunk):
    x_BsE, table_VE, labels_Bs = example

    def both(loss):
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x_BsE, table_VE)

    value, gradients = both(lambda x, t: 3.0 * token_loss_sum(x, t, labels_Bs, chunk))
    expected, truth = both(lambda x, t: 3.0 * _plain(x, t, labels_Bs))
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    for found, wanted in zip(gradients, truth, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_without_differentiation_the_loss_is_the_same(example):
    x_BsE, table_VE, labels_Bs = example
    value = jax.jit(token_loss_sum, static_argnums=3)(x_BsE, table_VE, labels_Bs, 3)
    assert float(value) == pytest.approx(float(_plain(x_BsE, table_VE, labels_Bs)), rel=1e-6)


def test_no_valid_label_gives_zero_loss_and_zero_gradients(example):
    x_BsE, table_VE, labels_Bs = example
    nothing = jnp.full_like(labels_Bs, -100)
    value, gradients = jax.jit(
        jax.value_and_grad(lambda x, t: token_loss_sum(x, t, nothing, 4), argnums=(0, 1))
    )(x_BsE, table_VE)
    assert float(value) == 0.0
    assert not any(np.any(g) for g in gradients)
    assert int(count_labels(nothing)) == 0


def test_logits_of_all_tokens_never_exist():
    tokens, vocabulary = 4096, 512
    x, table = jnp.zeros((1, tokens, 4)), jnp.zeros((vocabulary, 4))
    labels = jnp.zeros((1, tokens), jnp.int32)
    step = jax.jit(jax.grad(lambda x, t: token_loss_sum(x, t, labels, 64), argnums=(0, 1)))
    memory = step.lower(x, table).compile().memory_analysis()
    assert memory.temp_size_in_bytes < tokens * vocabulary * 4 / 8
