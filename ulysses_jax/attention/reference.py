"""Dense softmax attention in float32: the truth that the others are tested against."""

import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32

from ulysses_jax.attention.shapes import attention_sizes
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
        The output in the dtype of q, and the float32 log-sum-exp of the scaled scores. A query
        with nothing to attend to gives 0 and -inf, and passes no gradient on.

    Raises:
        ValueError: the shapes do not fit together (see `attention_sizes` and `key_ranges`).
    """
    sizes = attention_sizes(q_BShD, k_BTgD, v_BTgD)
    start_BS, end_BS = spec.key_ranges(sizes.batch, sizes.q_len, sizes.kv_len)
    q_BShD = checkpoint_name(q_BShD, "attn_q")
    k_BTgD = checkpoint_name(k_BTgD, "attn_k")
    v_BTgD = checkpoint_name(v_BTgD, "attn_v")
    k_BTgD = k_BTgD.astype(jnp.float32)
    v_BTgD = v_BTgD.astype(jnp.float32)
    q_BSgrD = q_BShD.astype(jnp.float32).reshape(
        sizes.batch, sizes.q_len, sizes.kv_heads, -1, sizes.head_dim
    )

    key_T = jnp.arange(sizes.kv_len)
    attended_BST = (key_T >= start_BS[..., None]) & (key_T < end_BS[..., None])
    attended_B11ST = attended_BST[:, None, None]
    empty_BS = ~jnp.any(attended_BST, axis=-1)
    empty_B11S1 = empty_BS[:, None, None, :, None]

    score_BgrST = scale * jnp.einsum(
        "bsgrd,btgd->bgrst", q_BSgrD, k_BTgD, precision=lax.Precision.HIGHEST
    )
    score_BgrST = jnp.where(attended_B11ST, score_BgrST, -jnp.inf)
    highest_BgrS1 = lax.stop_gradient(jnp.max(score_BgrST, axis=-1, keepdims=True))
    highest_BgrS1 = jnp.where(empty_B11S1, 0.0, highest_BgrS1)
    weight_BgrST = jnp.exp(score_BgrST - highest_BgrS1)
    total_BgrS1 = jnp.sum(weight_BgrST, axis=-1, keepdims=True)
    total_BgrS1 = jnp.where(empty_B11S1, 1.0, total_BgrS1)

    out_BSgrD = jnp.einsum(
        "bgrst,btgd->bsgrd", weight_BgrST / total_BgrS1, v_BTgD, precision=lax.Precision.HIGHEST
    )
    # A constant where the row is empty, so that whatever cotangent it gets goes nowhere.
    out_BSgrD = jnp.where(empty_BS[..., None, None, None], 0.0, out_BSgrD)
    lse_BgrS1 = jnp.where(empty_B11S1, -jnp.inf, highest_BgrS1 + jnp.log(total_BgrS1))
    out_BShD = out_BSgrD.reshape(q_BShD.shape).astype(q_BShD.dtype)
    lse_BhS = lse_BgrS1.reshape(sizes.batch, sizes.heads, sizes.q_len)
    return checkpoint_name(out_BShD, "attn_out"), checkpoint_name(lse_BhS, "attn_lse")
