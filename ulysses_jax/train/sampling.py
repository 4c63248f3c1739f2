"""Text from a model whose weights are sharded, by the same gathers as in training."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int, PRNGKeyArray

from ulysses_jax.model.config import Architecture
from ulysses_jax.model.generate import check_length, generate
from ulysses_jax.parallel.backend import compiler_options
from ulysses_jax.parallel.mesh import AXES
from ulysses_jax.parallel.sharding import ShardingPolicy
from ulysses_jax.parallel.weights import make_fetch, rejoin, split_for_gradient
from ulysses_jax.train.state import Purpose, random_key


def make_sampler(
    arch: Architecture, policy: ShardingPolicy, tokens: int
) -> Callable[[dict[str, Any], Int[Array, "B S"], Array, PRNGKeyArray], Int[Array, "B N"]]:
    """The function (params, prompt, temperature, key) → `tokens` tokens, to be jitted.

    Every device computes the whole text with weights gathered a layer at a time: no device ever
    holds the model, and no prompt is too short for the mesh.
    """

    def region(params: Any, prompt_BS: Array, temperature: Array, key: PRNGKeyArray) -> Array:
        free, whole = split_for_gradient(policy, params)
        stored = rejoin(policy, free, whole)
        varying = partial(lax.pcast, axis_name=AXES, to="varying")
        with jax.default_matmul_precision(arch.matmul_precision):
            sampled_BN = generate(
                arch,
                stored,
                varying(prompt_BS),
                tokens,
                temperature,
                key,
                make_fetch(policy, arch.dtype),
            )
        # All devices hold the same text; the maximum tells the compiler so.
        return lax.pmax(sampled_BN, AXES)

    whole = PartitionSpec()
    return jax.shard_map(
        region,
        mesh=policy.mesh,
        in_specs=(policy.param_specs, whole, whole, whole),
        out_specs=whole,
    )


def sample_text(
    arch: Architecture,
    policy: ShardingPolicy,
    params: dict[str, Any],
    prompt: list[int],
    tokens: int,
    temperature: float,
    seed: int,
) -> list[int]:
    """Continues one prompt of token ids by `tokens` sampled ones.

    Raises:
      ValueError: the prompt is empty, has a token outside the vocabulary, or is too long.
    """
    check_length(arch, len(prompt), tokens)
    if max(prompt) >= arch.vocab_size or min(prompt) < 0:
        raise ValueError(
            f"the prompt holds token {max(prompt)}, but model.vocab_size is {arch.vocab_size}; "
            "use a prompt in the model's own tokens"
        )
    options = compiler_options(policy.mesh.devices.flat[0])
    sampler = jax.jit(make_sampler(arch, policy, tokens), compiler_options=options)
    inputs = jax.device_put(
        (jnp.asarray([prompt], jnp.int32), jnp.float32(temperature)), policy.whole
    )
    return jax.device_get(sampler(params, *inputs, random_key(seed, Purpose.SAMPLING, policy)))[
        0
    ].tolist()


def encode(prompt: str, text: bool) -> list[int]:
    """The tokens of a prompt: its bytes, or the ids in it for a model of a tokenizer's tokens.

    Raises:
      ValueError: an id is not a number.
    """
    if text:
        # Bytes of the command line that are no UTF-8 reach Python as surrogates.
        return list(prompt.encode("utf-8", errors="surrogateescape"))
    try:
        return [int(word) for word in prompt.split()]
    except ValueError as error:
        raise ValueError(
            f"the prompt is {prompt!r}, but this model was trained on a .bin of token ids; give "
            "the ids as numbers separated by spaces"
        ) from error


def decode(tokens: list[int], text: bool) -> str:
    """Tokens as text if they are bytes, else as their ids separated by spaces."""
    if text:
        # A vocabulary above 256 has tokens that no text trained, and no byte stands for.
        return bytes(t if t < 256 else 0x3F for t in tokens).decode("utf-8", errors="replace")
    return " ".join(map(str, tokens)) + " "


def printable(text: str) -> str:
    """`text` without the control characters that a model may sample and a terminal would obey."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
