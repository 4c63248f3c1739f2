"""Dense softmax attention in float32: the truth that the others are tested against."""

import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32, Shaped

from ulysses_jax.attention.dropout import keep, query_words
from ulysses_jax.attention.pairs import attended_pairs
from ulysses_jax.attention.shapes import AttentionSizes, attention_sizes
from ulysses_jax.attention.spec import AttentionSpec


def attend(
    q_BShD: Float[Array, "B S h D"],
    k_BTgD: Float[Array, "B T g D"],
    v_BTgD: Float[Array, "B T g D"],
    spec: AttentionSpec,
    scale: float,
) -> tuple[Float[Array, "B S h D"], Float32[Array, "B h S"]]:
    """Softmax of `scale * q k^T` over the keys that `spec` allows, times v. O(S * T) memory.

    Query head i uses key/value head `i // (h // g)`. Everything is computed in float32.

    Returns:
        The output in the dtype of q, and the float32 log-sum-exp of the scaled scores, bias
        included. A query with nothing to attend to gives 0 and -inf, and passes no gradient on.

    Raises:
        ValueError: the shapes do not fit together (see `attention_sizes`, `AttentionSpec.check`).
    """
    sizes = attention_sizes(q_BShD, k_BTgD, v_BTgD)
    pairs_BgrST = _grouped(attended_pairs(spec, sizes), sizes)
    q_BShD = checkpoint_name(q_BShD, "attn_q")
    k_BTgD = checkpoint_name(k_BTgD, "attn_k")
    v_BTgD = checkpoint_name(v_BTgD, "attn_v")
    k_BTgD = k_BTgD.astype(jnp.float32)
    v_BTgD = v_BTgD.astype(jnp.float32)
    q_BSgrD = q_BShD.astype(jnp.float32).reshape(
        sizes.batch, sizes.q_len, sizes.kv_heads, -1, sizes.head_dim
    )

    score_BgrST = scale * jnp.einsum(
        "bsgrd,btgd->bgrst", q_BSgrD, k_BTgD, precision=lax.Precision.HIGHEST
    )
    if spec.bias is not None:
        score_BgrST += _grouped(spec.bias, sizes).astype(jnp.float32)
    score_BgrST = jnp.where(pairs_BgrST, score_BgrST, -jnp.inf)
    highest_BgrS1 = lax.stop_gradient(jnp.max(score_BgrST, axis=-1, keepdims=True))
    highest_BgrS1 = jnp.where(highest_BgrS1 == -jnp.inf, 0.0, highest_BgrS1)
    weight_BgrST = jnp.exp(score_BgrST - highest_BgrS1)
    total_BgrS1 = jnp.sum(weight_BgrST, axis=-1, keepdims=True)
    # Not asked of the highest score: the maximum of XLA:CPU passes over NaN, the sum does not.
    empty_BgrS1 = total_BgrS1 == 0.0
    total_BgrS1 = jnp.where(empty_BgrS1, 1.0, total_BgrS1)
    lse_BgrS1 = jnp.where(empty_BgrS1, -jnp.inf, highest_BgrS1 + jnp.log(total_BgrS1))

    out_BgrSD = jnp.einsum(
        "bgrst,btgd->bgrsd",
        _dropped(weight_BgrST / total_BgrS1, spec, sizes),
        v_BTgD,
        precision=lax.Precision.HIGHEST,
    )
    # A constant where the row is empty, so that whatever cotangent it gets goes nowhere.
    out_BgrSD = jnp.where(empty_BgrS1, 0.0, out_BgrSD)
    out_BShD = out_BgrSD.transpose(0, 3, 1, 2, 4).reshape(q_BShD.shape).astype(q_BShD.dtype)
    lse_BhS = lse_BgrS1.reshape(sizes.batch, sizes.heads, sizes.q_len)
    return checkpoint_name(out_BShD, "attn_out"), checkpoint_name(lse_BhS, "attn_lse")


def _dropped(
    weight_BgrST: Float32[Array, "B g r S T"], spec: AttentionSpec, sizes: AttentionSizes
) -> Float32[Array, "B g r S T"]:
    """The weights after dropout."""
    if spec.dropout is None:
        return weight_BgrST
    words_BhS2 = query_words(
        spec.dropout,
        spec.first_row + jnp.arange(sizes.batch),
        spec.first_head + jnp.arange(sizes.heads),
        jnp.arange(sizes.q_len),
    )
    rate = spec.dropout.rate
    kept_BhST = keep(words_BhS2[..., None, :], jnp.arange(sizes.kv_len), rate)
    return jnp.where(_grouped(kept_BhST, sizes), weight_BgrST / (1.0 - rate), 0.0)


def _grouped(x_BhST: Shaped[Array, "B h S T"], sizes: AttentionSizes) -> Shaped[Array, "..."]:
    """[B, h, S, T] to [B, g, h/g, S, T]; dimensions of 1 stay so."""
    batch, heads, *lengths = x_BhST.shape
    groups = (1, 1) if heads == 1 else (sizes.kv_heads, heads // sizes.kv_heads)
    return x_BhST.reshape(batch, *groups, *lengths)
