"""Sampling from a GPT with a key/value cache: one pass over the prompt, then a token at a time."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from ulysses_jax.attention.select import attention_function
from ulysses_jax.attention.spec import AttentionSpec
from ulysses_jax.model.config import Architecture
from ulysses_jax.model.gpt import Fetch, Params, modules


class Cache(NamedTuple):
    """Keys and values of every layer, T of them allocated; those past the text are never read."""

    k_LBTKD: Float[Array, "L B T K D"]
    v_LBTKD: Float[Array, "L B T K D"]


def generate(
    arch: Architecture,
    params: Params,
    prompt_BS: Int[Array, "B S"],
    tokens: int,
    temperature: Float[Array, ""],
    key: PRNGKeyArray,
    fetch: Fetch,
) -> Int[Array, "B N"]:
    """Continues each prompt by N = `tokens` sampled tokens.

    Args:
      arch: the model.
      params: its stored weights.
      prompt_BS: at least one token each.
      tokens: how many to sample, at least 1.
      temperature: divides the logits; 0 takes the likeliest token.
      key: of the sampling.
      fetch: makes one part's stored weights whole (see `gpt.Fetch`).

    Raises:
      ValueError: prompt and continuation together are longer than the model's length.
    """
    S = prompt_BS.shape[1]
    check_length(arch, S, tokens)

    def sample(logits_BV: Array, index: Array) -> Array:
        scaled_BV = logits_BV / jnp.where(temperature > 0, temperature, 1.0)
        drawn_B = jax.random.categorical(jax.random.fold_in(key, index), scaled_BV)
        return jnp.where(temperature > 0, drawn_B, jnp.argmax(logits_BV, axis=-1)).astype(jnp.int32)

    def step(carry: tuple[Array, Cache], index: Array) -> Any:
        token_B, cache = carry
        logits_BV, cache = _extend(arch, params, token_B[:, None], S + index, cache, fetch)
        token_B = sample(logits_BV, index + 1)
        return (token_B, cache), token_B

    logits_BV, cache = _extend(arch, params, prompt_BS, None, None, fetch, room=S + tokens)
    first_B = sample(logits_BV, jnp.int32(0))
    _, rest_NB = lax.scan(step, (first_B, cache), jnp.arange(tokens - 1))
    return jnp.concatenate([first_B[:, None], rest_NB.T], axis=1)


def check_length(arch: Architecture, prompt: int, tokens: int) -> None:
    """Raises ValueError unless the prompt and the continuation fit into the model's length."""
    if prompt < 1:
        raise ValueError("the prompt is empty; give at least one token to continue")
    if prompt + tokens > arch.max_seq_len:
        room = arch.max_seq_len - prompt
        fix = f", or ask for at most {room} tokens" if room > 0 else ""
        raise ValueError(
            f"the prompt has {prompt} tokens and {tokens} more are asked for, but the model was "
            f"trained on sequences of {arch.max_seq_len}; shorten the prompt{fix}"
        )


def _extend(
    arch: Architecture,
    params: Params,
    tokens_BS: Int[Array, "B S"],
    start: Int[Array, ""] | None,
    cache: Cache | None,
    fetch: Fetch,
    room: int = 0,
) -> tuple[Float[Array, "B V"], Cache]:
    """Logits after the last of `tokens_BS`, and the cache with their keys and values.

    Without a cache the tokens are a prompt and a cache of `room` entries is made; with one they
    are a single token at position `start`.
    """
    graph = modules(arch)
    local = attention_function(arch.attention)
    B, S = tokens_BS.shape
    first = jnp.int32(0) if start is None else start
    positions_BS = jnp.broadcast_to(first + jnp.arange(S), (B, S))
    stored = fetch("embedding", params["embedding"])
    x_BSE = nnx.merge(graph["embedding"], stored)(tokens_BS, positions_BS)

    def layer(x_BSE: Array, xs: tuple[Params, Cache | None]) -> tuple[Array, Cache]:
        weights, known = xs
        block = nnx.merge(graph["blocks"], fetch("blocks", weights))
        q_BSHD, k_BSKD, v_BSKD = block.queries_keys_values(x_BSE, positions_BS)
        if known is None:
            ends = ((0, 0), (0, room - S), (0, 0), (0, 0))
            new = Cache(jnp.pad(k_BSKD, ends), jnp.pad(v_BSKD, ends))
            keys, values, spec = k_BSKD, v_BSKD, AttentionSpec(causal=True)
        else:
            new = Cache(
                lax.dynamic_update_slice_in_dim(known[0], k_BSKD, first, axis=1),
                lax.dynamic_update_slice_in_dim(known[1], v_BSKD, first, axis=1),
            )
            keys, values = new
            spec = AttentionSpec(kv_lengths=jnp.broadcast_to(first + 1, (B,)))
        attended_BSHD, _ = local(q_BSHD, keys, values, spec, arch.head_dim**-0.5)
        return block.finish(x_BSE, attended_BSHD), new

    x_BSE, extended = lax.scan(layer, x_BSE, (params["blocks"], cache))
    head = nnx.merge(graph["head"], fetch("head", params["head"]))
    table_VE = head.table[...] if head.table is not None else stored["tokens"]
    last_BE = head.norm(x_BSE[:, -1])
    logits_BV = jnp.einsum("be,ve->bv", last_BE, table_VE, preferred_element_type=jnp.float32)
    return logits_BV, extended
