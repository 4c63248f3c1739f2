"""The sizes of one attention call, checked once for every implementation."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class AttentionSizes(NamedTuple):
    """Batch B, queries S, keys T, query heads h, key/value heads g, head dim D of a call."""

    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int


def attention_sizes(
    q_BShD: Float[Array, "B S h D"],
    k_BTgD: Float[Array, "B T g D"],
    v_BTgD: Float[Array, "B T g D"],
) -> AttentionSizes:
    """Reads the sizes off the arrays.

    Raises:
        ValueError: the shapes do not fit together, a sequence is empty, g does not divide h, or
            an array is not floating point.
    """
    shapes = f"q {list(q_BShD.shape)}, k {list(k_BTgD.shape)}, v {list(v_BTgD.shape)}"
    if q_BShD.ndim != 4 or k_BTgD.ndim != 4 or k_BTgD.shape != v_BTgD.shape:
        raise ValueError(f"attention needs q [B, S, h, D] and k, v [B, T, g, D], not {shapes}")
    batch, q_len, heads, head_dim = q_BShD.shape
    _, kv_len, kv_heads, _ = k_BTgD.shape
    if (k_BTgD.shape[0], k_BTgD.shape[3]) != (batch, head_dim):
        raise ValueError(f"q, k and v must agree in batch and head dim, not {shapes}")
    if 0 in q_BShD.shape or 0 in k_BTgD.shape:
        raise ValueError(f"attention needs every dimension to be at least 1, not {shapes}")
    for name, x in (("q", q_BShD), ("k", k_BTgD), ("v", v_BTgD)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} is {x.dtype}, but attention needs floating point: convert it")
    if heads % kv_heads:
        raise ValueError(
            f"{heads} query heads cannot share {kv_heads} key/value heads: the number of query "
            "heads must be a multiple"
        )
    return AttentionSizes(batch, q_len, kv_len, heads, kv_heads, head_dim)
