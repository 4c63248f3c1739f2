"""PyPI's ringattention, whose package does not import on today's JAX, as a function of q, k, v."""

from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp

# It asks for jax.lib.xla_bridge, gone since; by then the module wanted here has been imported.
with suppress(AttributeError):
    import ringattention  # noqa: F401
from ringattention.ringattention_jax import ring_attention as _ring_attention


def ring_attention(q: Any, k: Any, v: Any, *, axis: str, block: int) -> Any:
    """Causal attention over the sequence split over `axis`; its blocks are of `block` tokens."""
    blockwise = {
        "causal_block_size": 1,
        "query_chunk_size": block,
        "key_chunk_size": block,
        "deterministic": True,
        "dropout_rng": None,
        "attn_pdrop": 0.0,
        "dtype": jnp.float32,
        "policy": jax.checkpoint_policies.nothing_saveable,
        "precision": None,
        "prevent_cse": False,
    }
    return _ring_attention(q, k, v, None, None, None, axis, True, blockwise)
