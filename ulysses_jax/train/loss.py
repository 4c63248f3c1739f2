"""Cross-entropy over chunks of tokens: the logits of the whole batch never exist at once."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ulysses_jax.data.batches import IGNORED_LABEL


def token_loss_sum(
    x_BsE: Float[Array, "B s E"],
    table_VE: Float[Array, "V E"],
    labels_Bs: Int[Array, "B s"],
    chunk: int,
) -> Float[Array, ""]:
    """Sum of the cross-entropies, in nats and float32, over tokens whose label is not −100.

    At most [chunk, V] logits exist at a time. Differentiating it computes the gradients in the
    forward pass, where the logits are, so that no logit is computed twice; the table's gradient
    is accumulated in float32 over the chunks.

    Args:
      x_BsE: normed hidden states.
      table_VE: output table.
      labels_Bs: the token that follows each token (shifted already), or −100.
      chunk: tokens per chunk, at least 1; need not divide anything.
    """
    tokens = labels_Bs.size
    chunk = min(chunk, tokens)
    missing = -tokens % chunk
    x_NE = jnp.pad(x_BsE.reshape(tokens, -1), ((0, missing), (0, 0)))
    labels_N = jnp.pad(labels_Bs.reshape(-1), (0, missing), constant_values=IGNORED_LABEL)
    return _loss_sum(
        x_NE.reshape(-1, chunk, x_BsE.shape[-1]), table_VE, labels_N.reshape(-1, chunk)
    )


def count_labels(labels: Int[Array, "..."]) -> Int[Array, ""]:
    """How many labels count."""
    return jnp.sum(labels != IGNORED_LABEL, dtype=jnp.int32)


def _chunk_loss(x_cE: Array, table_VE: Array, labels_c: Array) -> tuple[Array, Array, Array]:
    """Loss of one chunk with its softmax and one-hot targets' positions."""
    logits_cV = jnp.einsum("ce,ve->cv", x_cE, table_VE, preferred_element_type=jnp.float32)
    lse_c = jax.nn.logsumexp(logits_cV, axis=-1)
    valid_c = labels_c != IGNORED_LABEL
    target_c = jnp.take_along_axis(logits_cV, jnp.maximum(labels_c, 0)[:, None], axis=-1)[:, 0]
    return jnp.sum(jnp.where(valid_c, lse_c - target_c, 0.0)), logits_cV, lse_c


@jax.custom_vjp
def _loss_sum(x_ncE: Array, table_VE: Array, labels_nc: Array) -> Array:
    losses_n = lax.map(lambda xs: _chunk_loss(xs[0], table_VE, xs[1])[0], (x_ncE, labels_nc))
    return jnp.sum(losses_n)


def _loss_sum_forward(x_ncE: Array, table_VE: Array, labels_nc: Array) -> Any:
    def step(gradient_VE: Array, xs: tuple[Array, Array]) -> Any:
        x_cE, labels_c = xs
        loss, logits_cV, lse_c = _chunk_loss(x_cE, table_VE, labels_c)
        valid_c1 = (labels_c != IGNORED_LABEL)[:, None]
        target_cV = labels_c[:, None] == jnp.arange(table_VE.shape[0])
        slope_cV = jnp.where(valid_c1, jnp.exp(logits_cV - lse_c[:, None]) - target_cV, 0.0)
        slope_cV = slope_cV.astype(x_cE.dtype)
        product = partial(jnp.einsum, preferred_element_type=jnp.float32)
        x_slope_cE = product("cv,ve->ce", slope_cV, table_VE).astype(x_cE.dtype)
        return gradient_VE + product("cv,ce->ve", slope_cV, x_cE), (loss, x_slope_cE)

    zero_VE = jnp.zeros_like(table_VE, jnp.float32)
    gradient_VE, (losses_n, x_slope_ncE) = lax.scan(step, zero_VE, (x_ncE, labels_nc))
    return jnp.sum(losses_n), (x_slope_ncE, gradient_VE, jnp.zeros((0,), table_VE.dtype))


def _loss_sum_backward(residuals: Any, g: Array) -> Any:
    x_slope_ncE, gradient_VE, like = residuals
    x_gradient = (x_slope_ncE * g).astype(x_slope_ncE.dtype)
    return x_gradient, (gradient_VE * g).astype(like.dtype), None


_loss_sum.defvjp(_loss_sum_forward, _loss_sum_backward)
