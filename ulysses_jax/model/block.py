"""The parts of the GPT as Flax NNX modules: embedding, transformer block, final norm and head."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from ulysses_jax.model.config import Architecture
from ulysses_jax.model.lookup import look_up
from ulysses_jax.model.rotary import rotate

Drop = Callable[[Array, int], Array]
"""Dropout of what is added to the residual stream, at place 0 (attention) or 1 (MLP)."""


def _normal(stddev: float) -> nnx.Initializer:
    return nnx.initializers.normal(stddev)


# GPT-2 (Radford et al. 2019) and Llama both start from this spread.
_WEIGHT_SPREAD = 0.02


def _norm(arch: Architecture, rngs: nnx.Rngs) -> nnx.Module:
    kind = nnx.LayerNorm if arch.norm == "layernorm" else nnx.RMSNorm
    return kind(arch.embed_dim, epsilon=arch.norm_eps, dtype=jnp.dtype(arch.dtype), rngs=rngs)


def _linear(
    arch: Architecture, width_in: int, width_out: int, rngs: nnx.Rngs, stddev: float
) -> nnx.Linear:
    return nnx.Linear(
        width_in,
        width_out,
        use_bias=arch.biases,
        dtype=jnp.dtype(arch.dtype),
        kernel_init=_normal(stddev),
        rngs=rngs,
    )


def _table(rows: int, arch: Architecture, rngs: nnx.Rngs) -> nnx.Param[Array]:
    return nnx.Param(_normal(_WEIGHT_SPREAD)(rngs.params(), (rows, arch.embed_dim), jnp.float32))


def _into_residual(arch: Architecture) -> float:
    """GPT-2's spread of weights that write to the residual stream: smaller with more layers."""
    return _WEIGHT_SPREAD / (2 * arch.num_layers) ** 0.5


class Embedding(nnx.Module):
    """Token embedding, with a learned position table where the architecture has one."""

    def __init__(self, arch: Architecture, *, rngs: nnx.Rngs):
        self.tokens = _table(arch.vocab_size, arch, rngs)
        learned = arch.positions == "learned"
        self.positions = _table(arch.max_seq_len, arch, rngs) if learned else None
        self.dtype = jnp.dtype(arch.dtype)

    def __call__(
        self, tokens_Bs: Int[Array, "B s"], positions_Bs: Int[Array, "B s"]
    ) -> Float[Array, "B s E"]:
        x_BsE = look_up(self.tokens[...], tokens_Bs).astype(self.dtype)
        if self.positions is not None:
            x_BsE += look_up(self.positions[...], positions_Bs).astype(self.dtype)
        return x_BsE


class Block(nnx.Module):
    """One pre-norm transformer layer, split where attention over other tokens takes place.

    `queries_keys_values`, then any attention, then `finish`: nothing in this class looks at
    another token, so it runs unchanged on a part of the sequence.
    """

    def __init__(self, arch: Architecture, *, rngs: nnx.Rngs):
        self.arch = arch
        E, F = arch.embed_dim, arch.mlp_dim
        query_width = arch.num_heads * arch.head_dim
        kv_width = arch.num_kv_heads * arch.head_dim
        self.attention_norm = _norm(arch, rngs)
        self.query = _linear(arch, E, query_width, rngs, _WEIGHT_SPREAD)
        self.key = _linear(arch, E, kv_width, rngs, _WEIGHT_SPREAD)
        self.value = _linear(arch, E, kv_width, rngs, _WEIGHT_SPREAD)
        self.output = _linear(arch, query_width, E, rngs, _into_residual(arch))
        self.mlp_norm = _norm(arch, rngs)
        self.gate = _linear(arch, E, F, rngs, _WEIGHT_SPREAD) if arch.mlp == "swiglu" else None
        self.up = _linear(arch, E, F, rngs, _WEIGHT_SPREAD)
        self.down = _linear(arch, F, E, rngs, _into_residual(arch))

    def queries_keys_values(
        self, x_BsE: Float[Array, "B s E"], positions_Bs: Int[Array, "B s"]
    ) -> tuple[Float[Array, "B s H D"], Float[Array, "B s K D"], Float[Array, "B s K D"]]:
        """Normalises and projects, with rotary positions applied where the model has them."""
        normed_BsE = self.attention_norm(x_BsE)
        heads = (*x_BsE.shape[:2], -1, self.arch.head_dim)
        q_BsHD = self.query(normed_BsE).reshape(heads)
        k_BsKD = self.key(normed_BsE).reshape(heads)
        v_BsKD = self.value(normed_BsE).reshape(heads)
        if self.arch.positions == "rope":
            q_BsHD = rotate(q_BsHD, positions_Bs, self.arch.rope_theta)
            k_BsKD = rotate(k_BsKD, positions_Bs, self.arch.rope_theta)
        return q_BsHD, k_BsKD, v_BsKD

    def finish(
        self,
        x_BsE: Float[Array, "B s E"],
        attended_BsHD: Float[Array, "B s H D"],
        drop: Drop = lambda x, _: x,
    ) -> Float[Array, "B s E"]:
        """Adds the projected attention output, then the MLP; `drop(x, 0 or 1)` before each add."""
        flat = (*attended_BsHD.shape[:2], -1)
        x_BsE = x_BsE + drop(self.output(attended_BsHD.reshape(flat)), 0)
        normed_BsE = self.mlp_norm(x_BsE)
        up_BsF = self.up(normed_BsE)
        if self.gate is not None:
            hidden_BsF = jax.nn.silu(self.gate(normed_BsE)) * up_BsF
        else:
            hidden_BsF = jax.nn.gelu(up_BsF)
        return x_BsE + drop(self.down(hidden_BsF), 1)


class Head(nnx.Module):
    """The final norm, and the output table where it is not the embedding's."""

    def __init__(self, arch: Architecture, *, rngs: nnx.Rngs):
        self.norm = _norm(arch, rngs)
        self.table = None if arch.tied_head else _table(arch.vocab_size, arch, rngs)
