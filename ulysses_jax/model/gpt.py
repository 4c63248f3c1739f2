"""The GPT: GPT-2 and Llama shapes from one Architecture, layers scanned, attention handed in."""

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from ulysses_jax.attention.select import attention_function
from ulysses_jax.attention.spec import AttentionSpec
from ulysses_jax.model.block import Block, Embedding, Head
from ulysses_jax.model.config import Architecture
from ulysses_jax.model.dropout import Dropout

Params = dict[str, Any]
"""{"embedding": …, "blocks": every leaf stacked over layers, "head": …}, float32 leaves."""

Attend = Callable[[Array, Array, Array], Array]
"""(q_BsHD, k_BsKD, v_BsKD) → out_BsHD."""

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class Fetch(Protocol):
    """Turns one part's stored weights into the whole weights that its layer computes with.

    `part` is a key of `Params`; for "blocks" the weights are one layer's. A sharded trainer
    gathers here, so the gather stands inside the layer loop.
    """

    def __call__(self, part: str, stored: Params) -> Params: ...


class GPT(nnx.Module):
    """A GPT on one device: token ids [B, S] to logits [B, S, V].

    `positions_BS` and `attend` (see `__call__`) make it run on a part of the sequence.

    Raises:
      ValueError: the architecture's attention cannot do a call of its shapes.

    Example:
      >>> from ulysses_jax.model.config import ModelConfig
      >>> architecture = ModelConfig(num_layers=1, attention="reference").architecture(seq_len=16)
      >>> model = GPT(architecture, rngs=nnx.Rngs(0))
      >>> model(jnp.zeros((2, 16), int)).shape
      (2, 16, 256)
    """

    def __init__(self, arch: Architecture, *, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=arch.num_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(arch, rngs=rngs)

        self.arch = arch
        self.embedding = Embedding(arch, rngs=rngs)
        self.blocks = stacked(rngs)
        self.head = Head(arch, rngs=rngs)

    def params(self) -> Params:
        """The weights as a plain nested dict, for optax, sharding and checkpoints."""
        return dict(nnx.to_pure_dict(nnx.state(self, nnx.Param)))

    def __call__(
        self,
        tokens_BS: Int[Array, "B S"],
        positions_BS: Int[Array, "B S"] | None = None,
        attend: Attend | None = None,
    ) -> Float[Array, "B S V"]:
        """Logits in float32; positions default to 0 … S−1, attention to plain causal."""
        if positions_BS is None:
            positions_BS = jnp.broadcast_to(jnp.arange(tokens_BS.shape[1]), tokens_BS.shape)
        params, fetch = self.params(), cast_to(self.arch)
        x_BSE, table_VE = hidden_states(
            self.arch, params, tokens_BS, positions_BS, attend or causal_attend(self.arch), fetch
        )
        return jnp.einsum("bse,ve->bsv", x_BSE, table_VE, preferred_element_type=jnp.float32)


@cache
def modules(arch: Architecture) -> dict[str, nnx.GraphDef[Any]]:
    """The NNX structure of each part without its weights ("blocks": of one layer)."""

    def structure(kind: type[nnx.Module]) -> nnx.GraphDef[Any]:
        return nnx.split(nnx.eval_shape(lambda: kind(arch, rngs=nnx.Rngs(0))))[0]

    return {"embedding": structure(Embedding), "blocks": structure(Block), "head": structure(Head)}


def init_params(arch: Architecture, key: PRNGKeyArray) -> Params:
    """Float32 weights drawn from `key`."""
    return GPT(arch, rngs=nnx.Rngs(params=key)).params()


def cast_to(arch: Architecture) -> Fetch:
    """The single-device `Fetch`: weights are whole already and only take the compute dtype."""

    def fetch(part: str, stored: Params) -> Params:
        return jax.tree.map(lambda w: w.astype(arch.dtype), stored)

    return fetch


def causal_attend(arch: Architecture) -> Attend:
    """Plain causal attention with the architecture's local kernel."""
    local = attention_function(arch.attention)

    def attend(q_BSHD: Array, k_BSKD: Array, v_BSKD: Array) -> Array:
        return local(q_BSHD, k_BSKD, v_BSKD, AttentionSpec(causal=True), arch.head_dim**-0.5)[0]

    return attend


def hidden_states(
    arch: Architecture,
    params: Params,
    tokens_Bs: Int[Array, "B s"],
    positions_Bs: Int[Array, "B s"],
    attend: Attend,
    fetch: Fetch,
    remat: Wrap = lambda layer: layer,
    dropout: Dropout | None = None,
) -> tuple[Float[Array, "B s E"], Float[Array, "V E"]]:
    """Everything before the logits: the normed hidden states and the output table.

    Args:
      arch: the resolved architecture.
      params: stored weights, in whatever form `fetch` understands.
      tokens_Bs: token ids, any part of the sequence.
      positions_Bs: global position of each token in its document.
      attend: attention over the whole sequence, given the local part of q, k and v.
      fetch: makes one part's stored weights whole, in the compute dtype.
      remat: wraps the layer function, to say what its backward pass recomputes.
      dropout: residual dropout, or None.

    A tied table is fetched a second time for the head, and its gradient leaves in two parts: kept
    from the embedding to the head, both would occupy memory through every layer.
    """
    graph = modules(arch)
    embedding = nnx.merge(graph["embedding"], fetch("embedding", params["embedding"]))
    x_BsE = embedding(tokens_Bs, positions_Bs)
    if dropout is not None:
        x_BsE = dropout(x_BsE, jnp.int32(2 * arch.num_layers))

    @remat
    def layer(x_BsE: Array, stored: Params, index: Array) -> Array:
        block = nnx.merge(graph["blocks"], fetch("blocks", stored))
        q_BsHD, k_BsKD, v_BsKD = block.queries_keys_values(x_BsE, positions_Bs)
        attended_BsHD = attend(q_BsHD, k_BsKD, v_BsKD)
        if dropout is None:
            return block.finish(x_BsE, attended_BsHD)
        return block.finish(x_BsE, attended_BsHD, lambda x, place: dropout(x, 2 * index + place))

    x_BsE, _ = jax.lax.scan(
        lambda x, xs: (layer(x, *xs), None),
        x_BsE,
        (params["blocks"], jnp.arange(arch.num_layers)),
    )
    head = nnx.merge(graph["head"], fetch("head", params["head"]))
    table_VE = head.table[...] if head.table is not None else None
    if table_VE is None:
        table_VE = fetch("embedding", params["embedding"])["tokens"]
    return head.norm(x_BsE), table_VE
