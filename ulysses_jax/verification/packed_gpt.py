"""This package's own GPT as a case: packed documents, rotary positions, causal attention."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from ulysses_jax.model.config import Architecture, Attention
from ulysses_jax.model.gpt import cast_to, hidden_states, init_params
from ulysses_jax.parallel.layer import ulysses_attention
from ulysses_jax.parallel.mesh import DATA, SEQ
from ulysses_jax.verification.case import Case

_PART_LENGTH = 8
_VOCAB = 61
_SPREAD = 0.3


def packed_gpt(mesh: Mesh, attention: Attention = "auto") -> Case:
    """A tiny GPT with two rows for each device of 'data', and a part of 8 tokens for each of 'seq'.

    Each row holds three documents whose borders need not be those of the parts. `attention` is
    the local one, by name.
    """
    rows, length = 2 * mesh.shape[DATA], _PART_LENGTH * mesh.shape[SEQ]
    arch = _architecture(length, attention)
    draw = np.random.default_rng(0)
    cuts_B2 = np.sort(draw.integers(1, length, (rows, 2)), axis=1)
    segments_BS = (np.arange(length) >= cuts_B2[..., None]).sum(axis=1).astype(np.int32)
    starts_B3 = np.concatenate([np.zeros((rows, 1), int), cuts_B2], axis=1)
    positions_BS = np.arange(length) - np.take_along_axis(starts_B3, segments_BS, axis=1)
    tokens_BS1 = draw.integers(0, _VOCAB, (rows, length + 1), dtype=np.int32)
    inputs = {
        "tokens": tokens_BS1[:, :-1],
        "labels": tokens_BS1[:, 1:],
        "positions": positions_BS.astype(np.int32),
        "segments": segments_BS,
    }

    def model_fn(
        params: Any, inputs: dict[str, Any], mesh: Mesh | None
    ) -> tuple[Float[Array, ""], Float[Array, "B S V"]]:
        def attend(q_BSHD: Array, k_BSKD: Array, v_BSKD: Array) -> Array:
            return ulysses_attention(
                q_BSHD,
                k_BSKD,
                v_BSKD,
                mesh,
                is_causal=True,
                q_segment_ids=inputs["segments"],
                attention=arch.attention,
            )

        x_BSE, table_VE = hidden_states(
            arch, params, inputs["tokens"], inputs["positions"], attend, cast_to(arch)
        )
        logits_BSV = jnp.einsum("bse,ve->bsv", x_BSE, table_VE)
        logs_BSV = jax.nn.log_softmax(logits_BSV)
        target_BS1 = jnp.take_along_axis(logs_BSV, inputs["labels"][..., None], axis=-1)
        return -jnp.mean(target_BS1), logits_BSV

    shapes = jax.eval_shape(partial(init_params, arch), jax.random.key(0))
    # Wider than a first step's, so that the attention is far from uniform.
    params = jax.tree.map(lambda x: draw.normal(0, _SPREAD, x.shape).astype(x.dtype), shapes)
    return Case(model_fn, inputs, params, causal=True, segments="segments")


def _architecture(length: int, attention: Attention) -> Architecture:
    return Architecture(
        vocab_size=_VOCAB,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        embed_dim=32,
        head_dim=8,
        mlp_dim=40,
        max_seq_len=length,
        positions="rope",
        norm="rmsnorm",
        mlp="swiglu",
        biases=False,
        tied_head=False,
        dropout_rate=0.0,
        rope_theta=100.0,
        norm_eps=1e-5,
        dtype="float32",
        attention=attention,
    )
