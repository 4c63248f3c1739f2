"""Blockwise attention in pure JAX: O(S) memory forward and backward, on every backend.

The forward pass is the online softmax of FlashAttention (Dao et al. 2022, algorithm 1). The
backward pass computes the weights again from the log-sum-exp, once for each pair of blocks
(FlashAttention-2, Dao 2023, algorithm 2). A query block visits only the key blocks between the
least start and the greatest end of its key ranges.

In the names m counts key blocks, n query blocks, k the keys of a block, and R the query rows of a
block: the queries of all heads that share a key/value head.
"""

from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32, Int32

from ulysses_jax.attention.blocks import (
    BlockSizes,
    QueryReach,
    block_sizes,
    from_blocks,
    query_reach,
    to_blocks,
)
from ulysses_jax.attention.shapes import attention_sizes
from ulysses_jax.attention.spec import AttentionSpec, KeyRanges

_Inputs: TypeAlias = tuple[
    Float[Array, "B S h D"], Float[Array, "B T g D"], Float[Array, "B T g D"], KeyRanges
]
_Outputs: TypeAlias = tuple[Float[Array, "B S h D"], Float32[Array, "B h S"]]
_Residuals: TypeAlias = tuple[_Inputs, _Outputs]

# Below every score, yet finite: the difference of two of them is 0, that of two -inf is NaN.
_LOWEST = -3.4e38


def attend(
    q_BShD: Float[Array, "B S h D"],
    k_BTgD: Float[Array, "B T g D"],
    v_BTgD: Float[Array, "B T g D"],
    spec: AttentionSpec,
    scale: float,
    *,
    blocks: BlockSizes | None = None,
) -> tuple[Float[Array, "B S h D"], Float32[Array, "B h S"]]:
    """Softmax of `scale * q k^T` over the keys that `spec` allows, times v. O(S + T) memory.

    Query head i uses key/value head `i // (h // g)`. Products are accumulated in float32; the
    factors of a product are in the dtype of q, k and v, the softmax weights included.

    The custom VJP keeps q, k, v, the output and the log-sum-exp under the names `attn_q`,
    `attn_k`, `attn_v`, `attn_out` and `attn_lse`: under a remat policy that saves these, no
    attention is computed again. Both results may be differentiated, in reverse mode only.

    Args:
        q_BShD, k_BTgD, v_BTgD: h a multiple of g; S and T need not be multiples of anything.
        spec: which keys each query attends to.
        scale: factor of the scores, usually D^(-1/2).
        blocks: queries and keys a block; chosen from the shapes when None.

    Returns:
        The output in the dtype of q, and the float32 log-sum-exp of the scaled scores. A query
        with nothing to attend to gives 0 and -inf, and passes no gradient on.

    Raises:
        ValueError: the shapes do not fit together (see `attention_sizes` and `key_ranges`).
    """
    sizes = attention_sizes(q_BShD, k_BTgD, v_BTgD)
    ranges = spec.key_ranges(sizes.batch, sizes.q_len, sizes.kv_len)
    inputs = _vary_alike((q_BShD, k_BTgD, v_BTgD, ranges))
    return _attend(scale, blocks or block_sizes(sizes), *inputs)


def _vary_alike(inputs: _Inputs) -> _Inputs:
    """Makes all inputs vary over the same manual mesh axes, as loop carries and a VJP must.

    An operation on two arrays casts both to the union of their axes, and sums in the transpose.
    A factor of one brings that about, here and under any version's name for the cast.
    """
    one = jnp.ones((), jnp.int32)
    for x in jax.tree.leaves(inputs):
        one = one * lax.full_like(x, 1, jnp.int32, ())
    return jax.tree.map(lambda x: x * one.astype(x.dtype), inputs)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    scale: float,
    blocks: BlockSizes,
    q_BShD: Float[Array, "B S h D"],
    k_BTgD: Float[Array, "B T g D"],
    v_BTgD: Float[Array, "B T g D"],
    ranges: KeyRanges,
) -> _Outputs:
    sizes = attention_sizes(q_BShD, k_BTgD, v_BTgD)
    q_nBgRD = to_blocks(q_BShD, sizes.kv_heads, blocks.q)
    k_mBgkD = to_blocks(k_BTgD, sizes.kv_heads, blocks.kv)
    v_mBgkD = to_blocks(v_BTgD, sizes.kv_heads, blocks.kv)

    def query_block(
        _: None, x: tuple[Float[Array, "B g R D"], QueryReach]
    ) -> tuple[None, tuple[Float[Array, "B g R D"], Float32[Array, "B g R 1"]]]:
        q_BgRD, reach = x

        def key_block(j: Int32[Array, ""], softmax: tuple[Array, ...]) -> tuple[Array, ...]:
            highest_BgR1, total_BgR1, sum_BgRD = softmax
            score_BgRk = _masked_scores(scale, q_BgRD, _block(k_mBgkD, j), reach, j)
            higher_BgR1 = jnp.maximum(highest_BgR1, jnp.max(score_BgRk, axis=-1, keepdims=True))
            weight_BgRk = jnp.exp(score_BgRk - higher_BgR1)
            shrink_BgR1 = jnp.exp(highest_BgR1 - higher_BgR1)
            total_BgR1 = shrink_BgR1 * total_BgR1 + jnp.sum(weight_BgRk, axis=-1, keepdims=True)
            more_BgRD = _product("bgrk,bgkd->bgrd", weight_BgRk, _block(v_mBgkD, j))
            return higher_BgR1, total_BgR1, shrink_BgR1 * sum_BgRD + more_BgRD

        column = (*q_BgRD.shape[:-1], 1)
        softmax = (
            lax.full_like(q_BgRD, _LOWEST, jnp.float32, column),
            lax.full_like(q_BgRD, 0, jnp.float32, column),
            lax.full_like(q_BgRD, 0, jnp.float32),
        )
        highest_BgR1, total_BgR1, sum_BgRD = lax.fori_loop(
            reach.first_n, reach.stop_n, key_block, softmax
        )
        total_BgR1 = jnp.where(reach.empty, 1.0, total_BgR1)
        lse_BgR1 = jnp.where(reach.empty, -jnp.inf, highest_BgR1 + jnp.log(total_BgR1))
        return None, ((sum_BgRD / total_BgR1).astype(q_BgRD.dtype), lse_BgR1)

    reach = query_reach(ranges, sizes, blocks)
    _, (out_nBgRD, lse_nBgR1) = lax.scan(query_block, None, (q_nBgRD, reach))
    out_BShD = from_blocks(out_nBgRD, sizes.q_len, blocks.q)
    lse_BSh1 = from_blocks(lse_nBgR1, sizes.q_len, blocks.q)
    return out_BShD, lse_BSh1[..., 0].swapaxes(1, 2)


def _attend_forward(
    scale: float,
    blocks: BlockSizes,
    q_BShD: Float[Array, "B S h D"],
    k_BTgD: Float[Array, "B T g D"],
    v_BTgD: Float[Array, "B T g D"],
    ranges: KeyRanges,
) -> tuple[_Outputs, _Residuals]:
    q_BShD = checkpoint_name(q_BShD, "attn_q")
    k_BTgD = checkpoint_name(k_BTgD, "attn_k")
    v_BTgD = checkpoint_name(v_BTgD, "attn_v")
    out_BShD, lse_BhS = _attend(scale, blocks, q_BShD, k_BTgD, v_BTgD, ranges)
    outputs = checkpoint_name(out_BShD, "attn_out"), checkpoint_name(lse_BhS, "attn_lse")
    return outputs, ((q_BShD, k_BTgD, v_BTgD, ranges), outputs)


def _attend_backward(
    scale: float, blocks: BlockSizes, residuals: _Residuals, cotangents: _Outputs
) -> tuple[Array, Array, Array, None]:
    (q_BShD, k_BTgD, v_BTgD, ranges), (out_BShD, lse_BhS) = residuals
    dout_BShD, dlse_BhS = cotangents
    sizes = attention_sizes(q_BShD, k_BTgD, v_BTgD)

    # With p the weights and dp = dout v^T, the gradient of a score is p (dp - delta): the softmax
    # subtracts sum(p dp) = sum(dout out) from every dp of a row, and the lse adds its cotangent.
    delta_BShD = dout_BShD.astype(jnp.float32) * out_BShD.astype(jnp.float32)
    dlse_BSh1 = dlse_BhS.swapaxes(1, 2)[..., None]
    delta_BSh1 = jnp.sum(delta_BShD, axis=-1, keepdims=True) - dlse_BSh1
    lse_BSh1 = lse_BhS.swapaxes(1, 2)[..., None]

    q_nBgRD, dout_nBgRD, lse_nBgR1, delta_nBgR1 = (
        to_blocks(x, sizes.kv_heads, blocks.q) for x in (q_BShD, dout_BShD, lse_BSh1, delta_BSh1)
    )
    k_mBgkD = to_blocks(k_BTgD, sizes.kv_heads, blocks.kv)
    v_mBgkD = to_blocks(v_BTgD, sizes.kv_heads, blocks.kv)
    reach = query_reach(ranges, sizes, blocks)
    # The results of empty rows are constants, so whatever cotangent they got (NaN after a merge of
    # two -inf, say) means nothing.
    dout_nBgRD = jnp.where(reach.empty, 0, dout_nBgRD)
    delta_nBgR1 = jnp.where(reach.empty, 0, delta_nBgR1)
    lse_nBgR1 = jnp.where(reach.empty, 0, lse_nBgR1)

    def query_block(
        dkv: tuple[Array, Array], x: tuple[Array, Array, Array, Array, QueryReach]
    ) -> tuple[tuple[Array, Array], Array]:
        q_BgRD, dout_BgRD, lse_BgR1, delta_BgR1, reach = x

        def key_block(j: Int32[Array, ""], sums: tuple[Array, ...]) -> tuple[Array, ...]:
            dq_BgRD, dk_mBgkD, dv_mBgkD = sums
            k_BgkD, v_BgkD = _block(k_mBgkD, j), _block(v_mBgkD, j)
            score_BgRk = _masked_scores(scale, q_BgRD, k_BgkD, reach, j)
            weight_BgRk = jnp.exp(score_BgRk - lse_BgR1)
            dweight_BgRk = _product("bgrd,bgkd->bgrk", dout_BgRD, v_BgkD)
            dscore_BgRk = weight_BgRk * (dweight_BgRk - delta_BgR1)
            dq_BgRD = dq_BgRD + _product("bgrk,bgkd->bgrd", dscore_BgRk, k_BgkD)
            dk_BgkD = _product("bgrk,bgrd->bgkd", dscore_BgRk, q_BgRD)
            dv_BgkD = _product("bgrk,bgrd->bgkd", weight_BgRk, dout_BgRD)
            return dq_BgRD, _add_block(dk_mBgkD, j, dk_BgkD), _add_block(dv_mBgkD, j, dv_BgkD)

        dq_BgRD = lax.full_like(q_BgRD, 0, jnp.float32)
        dq_BgRD, *dkv_mBgkD = lax.fori_loop(reach.first_n, reach.stop_n, key_block, (dq_BgRD, *dkv))
        return tuple(dkv_mBgkD), (scale * dq_BgRD).astype(q_BgRD.dtype)

    zeros = lax.full_like(k_mBgkD, 0, jnp.float32), lax.full_like(v_mBgkD, 0, jnp.float32)
    (dk_mBgkD, dv_mBgkD), dq_nBgRD = lax.scan(
        query_block, zeros, (q_nBgRD, dout_nBgRD, lse_nBgR1, delta_nBgR1, reach)
    )
    dk_mBgkD = (scale * dk_mBgkD).astype(k_BTgD.dtype)
    return (
        from_blocks(dq_nBgRD, sizes.q_len, blocks.q),
        from_blocks(dk_mBgkD, sizes.kv_len, blocks.kv),
        from_blocks(dv_mBgkD.astype(v_BTgD.dtype), sizes.kv_len, blocks.kv),
        None,
    )


_attend.defvjp(_attend_forward, _attend_backward)


def _masked_scores(
    scale: float,
    q_BgRD: Float[Array, "B g R D"],
    k_BgkD: Float[Array, "B g k D"],
    reach: QueryReach,
    j: Int32[Array, ""],
) -> Float32[Array, "B g R k"]:
    """The scaled scores of a query block with key block j, -inf outside the key ranges.

    Every block is masked: on CPU a branch that spares the inner blocks cost as much as the mask.
    """
    block = k_BgkD.shape[2]
    key_k = j * block + jnp.arange(block, dtype=jnp.int32)
    attended_B1Rk = (key_k >= reach.start_nB1R1) & (key_k < reach.end_nB1R1)
    score_BgRk = scale * _product("bgrd,bgkd->bgrk", q_BgRD, k_BgkD)
    return jnp.where(attended_B1Rk, score_BgRk, -jnp.inf)


def _product(
    equation: str, x: Float[Array, "..."], y: Float[Array, "..."]
) -> Float32[Array, "..."]:
    """A matrix product in the dtype of y, accumulated in float32; float32 is never cut to TF32."""
    precision = lax.Precision.HIGHEST if y.dtype == jnp.float32 else None
    return jnp.einsum(
        equation, x.astype(y.dtype), y, precision=precision, preferred_element_type=jnp.float32
    )


def _block(x_mBgkD: Float[Array, "m B g k D"], j: Int32[Array, ""]) -> Float[Array, "B g k D"]:
    return lax.dynamic_index_in_dim(x_mBgkD, j, keepdims=False)


def _add_block(
    x_mBgkD: Float32[Array, "m B g k D"], j: Int32[Array, ""], more_BgkD: Float32[Array, "B g k D"]
) -> Float32[Array, "m B g k D"]:
    """Adds to block j in place."""
    return lax.dynamic_update_index_in_dim(x_mBgkD, _block(x_mBgkD, j) + more_BgkD, j, 0)
