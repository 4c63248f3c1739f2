"""Blockwise attention in pure JAX: O(S) memory forward and backward, on every backend.

The forward pass is the online softmax of FlashAttention (Dao et al. 2022, algorithm 1). The
backward pass computes the weights again from the log-sum-exp, once for each pair of blocks
(FlashAttention-2, Dao 2023, algorithm 2). A query block visits only the key blocks that hold a
pair for it (see `visits`), and masks only those that also hold others.

Tiles have keys down and query columns across (see `blocks` for the names of dimensions).
"""

import os
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32, Int32

from ulysses_jax.attention.block_sizes import (
    block_sizes,
    check_blocks,
    cut_layout,
    whole_layout_blocks,
)
from ulysses_jax.attention.blocks import BlockSizes, Cut
from ulysses_jax.attention.dropout import seed_words
from ulysses_jax.attention.key_ranges import as_ids
from ulysses_jax.attention.shapes import attention_sizes
from ulysses_jax.attention.spec import AttentionSpec
from ulysses_jax.attention.tiles import Fixed, Rules, Unit, pad_pairs, pad_rules, product, unit_at
from ulysses_jax.attention.varying import vary_alike

_Pairs: TypeAlias = Float[Array, "#B #h #S #T"]
_Inputs: TypeAlias = tuple[
    Float[Array, "B S h D"],
    Float[Array, "B T g D"],
    Float[Array, "B T g D"],
    _Pairs | None,
    Rules,
]
_Outputs: TypeAlias = tuple[Float[Array, "B S h D"], Float32[Array, "B h S"]]
# The output, the greatest score of each query, and the logarithm of its sum of exponentials. Their
# sum is the log-sum-exp, but where it is large it no longer tells the second.
_Softmax: TypeAlias = tuple[
    Float[Array, "B S h D"], Float32[Array, "B h S"], Float32[Array, "B h S"]
]
_Residuals: TypeAlias = tuple[_Inputs, _Softmax]
_Arrays: TypeAlias = tuple[Array, ...]


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

    The custom VJP keeps q, k, v, the output and the log-sum-exp (in two parts) under the names
    `attn_q`, `attn_k`, `attn_v`, `attn_out` and `attn_lse`: under a remat policy that saves these,
    no attention is computed again. Both results may be differentiated, in reverse mode only; so may
    a bias, whose gradient has its size.

    Args:
        q_BShD, k_BTgD, v_BTgD: h a multiple of g; S and T need not be multiples of anything.
        spec: which keys each query attends to.
        scale: factor of the scores, usually D^(-1/2).
        blocks: how the call is cut. When None it is chosen from the shapes, smaller for CPU
            devices that have no more than one core each.

    Returns:
        The output in the dtype of q, and the float32 log-sum-exp of the scores before dropout. A
        query with nothing to attend to gives 0 and -inf, and passes no gradient on.

    Raises:
        ValueError: the shapes or the spec do not fit together.
    """
    if isinstance(scale, jax.core.Tracer):
        raise ValueError(f"scale is {scale}, but it is compiled in: give a Python number")
    sizes = attention_sizes(q_BShD, k_BTgD, v_BTgD)
    spec.check(sizes.batch, sizes.q_len, sizes.kv_len, sizes.heads)
    lengths = (sizes.batch, sizes.q_len, sizes.kv_len)
    layout = (
        None
        if spec.block_layout is None
        else cut_layout(spec.block_layout, sizes.q_len, sizes.kv_len)
    )
    blocks = blocks or block_sizes(sizes, layout, small=_cores_a_device() < 2)
    check_blocks(blocks, sizes)
    if layout is not None:
        blocks = whole_layout_blocks(blocks, layout)
    dropout = spec.dropout
    fixed = Fixed(
        Cut(sizes, blocks),
        float(scale),
        layout,
        dropout.rate if dropout is not None else 0.0,
        dropout is not None and dropout.broadcast,
    )
    rules = Rules(
        spec.key_ranges(*lengths),
        jax.tree.map(as_ids, spec.segment_ids(*lengths)) if spec.recurring else None,
        spec.mask,
        seed_words(dropout.key) if dropout is not None else None,
        jnp.asarray(spec.first_row, jnp.int32),
        jnp.asarray(spec.first_head, jnp.int32),
    )
    return _attend(fixed, *vary_alike((q_BShD, k_BTgD, v_BTgD, spec.bias, rules)))


def _cores_a_device() -> float:
    """CPU cores for each device of this process; unlimited for devices that are not CPUs."""
    if jax.default_backend() != "cpu":
        return float("inf")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (cores or 1) / jax.local_device_count()


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    fixed: Fixed,
    q_BShD: Float[Array, "B S h D"],
    k_BTgD: Float[Array, "B T g D"],
    v_BTgD: Float[Array, "B T g D"],
    bias: _Pairs | None,
    rules: Rules,
) -> _Outputs:
    return _results(_softmax(fixed, q_BShD, k_BTgD, v_BTgD, bias, rules))


def _results(softmax: _Softmax) -> _Outputs:
    out_BShD, highest_BhS, log_total_BhS = softmax
    # Of a query with nothing to attend to this is -inf + 0.
    return out_BShD, highest_BhS + log_total_BhS


def _softmax(
    fixed: Fixed,
    q_BShD: Float[Array, "B S h D"],
    k_BTgD: Float[Array, "B T g D"],
    v_BTgD: Float[Array, "B T g D"],
    bias: _Pairs | None,
    rules: Rules,
) -> _Softmax:
    cut = fixed.cut
    rules, bias = pad_rules(rules, cut), pad_pairs(bias, cut)

    def unit(number: Int32[Array, ""], softmax: _Softmax) -> _Softmax:
        unit = unit_at(fixed, rules, bias, number)
        q_nbgRD = _scaled(cut.queries(q_BShD, unit.place), unit)
        k_mbgkD = cut.keys(k_BTgD, unit.place)
        v_mbgDk = cut.keys(v_BTgD, unit.place).swapaxes(3, 4)

        def query_block(
            _: None, x: tuple[Int32[Array, ""], Float[Array, "b g R D"]]
        ) -> tuple[None, _Arrays]:
            n, q_bgRD = x
            q_bgDR = q_bgRD.swapaxes(2, 3)
            columns = unit.columns(n)

            def key_block(j: Int32[Array, ""], softmax: _Arrays, ragged: bool) -> _Arrays:
                highest_bg1R, total_bg1R, sum_bgDR = softmax
                score_bgkR = unit.scores(q_bgDR, k_mbgkD[j], columns, n, j, ragged)
                higher_bg1R = jnp.maximum(highest_bg1R, jnp.max(score_bgkR, axis=2, keepdims=True))
                # The difference of two -inf is NaN, that of -inf and 0 is not.
                finite_bg1R = jnp.where(higher_bg1R == -jnp.inf, 0, higher_bg1R)
                weight_bgkR = jnp.exp(score_bgkR - finite_bg1R)
                shrink_bg1R = jnp.exp(highest_bg1R - finite_bg1R)
                more_bg1R = jnp.sum(weight_bgkR, axis=2, keepdims=True)
                kept_bgkR = unit.kept(columns, j)
                if kept_bgkR is not None:
                    weight_bgkR *= kept_bgkR
                v_bgDk = v_mbgDk[j]
                more_bgDR = product("bgdk,bgkr->bgdr", v_bgDk, weight_bgkR.astype(v_bgDk.dtype))
                return (
                    higher_bg1R,
                    shrink_bg1R * total_bg1R + more_bg1R,
                    shrink_bg1R * sum_bgDR + more_bgDR,
                )

            column = (*q_bgDR.shape[:2], 1, q_bgDR.shape[3])
            softmax = (
                lax.full_like(q_bgDR, -jnp.inf, jnp.float32, column),
                lax.full_like(q_bgDR, 0, jnp.float32, column),
                lax.full_like(q_bgDR, 0, jnp.float32),
            )
            highest_bg1R, total_bg1R, sum_bgDR = _over_keys(unit, n, key_block, softmax)
            empty_bg1R = total_bg1R == 0
            total_bg1R = jnp.where(empty_bg1R, 1, total_bg1R)
            # Also where a value that nobody attends to is NaN: 0 * NaN is not 0.
            out_bgDR = jnp.where(empty_bg1R, 0, sum_bgDR / total_bg1R)
            return None, (out_bgDR.swapaxes(2, 3), highest_bg1R, jnp.log(total_bg1R))

        numbers = jnp.arange(cut.q_blocks, dtype=jnp.int32)
        _, (out_nbgRD, *statistics_nbg1R) = lax.scan(query_block, None, (numbers, q_nbgRD))
        out_BShD, *statistics_BhS = softmax
        highest_BhS, log_total_BhS = (
            cut.put_statistics(x_BhS, x_nbg1R, unit.place)
            for x_BhS, x_nbg1R in zip(statistics_BhS, statistics_nbg1R, strict=True)
        )
        return cut.put_queries(out_BShD, out_nbgRD, unit.place), highest_BhS, log_total_BhS

    shape = (cut.sizes.batch, cut.sizes.heads, cut.sizes.q_len)
    zeros_BhS = lax.full_like(q_BShD, 0, jnp.float32, shape)
    return lax.fori_loop(0, cut.units, unit, (lax.full_like(q_BShD, 0), zeros_BhS, zeros_BhS))


def _attend_forward(
    fixed: Fixed,
    q_BShD: Float[Array, "B S h D"],
    k_BTgD: Float[Array, "B T g D"],
    v_BTgD: Float[Array, "B T g D"],
    bias: _Pairs | None,
    rules: Rules,
) -> tuple[_Outputs, _Residuals]:
    q_BShD = checkpoint_name(q_BShD, "attn_q")
    k_BTgD = checkpoint_name(k_BTgD, "attn_k")
    v_BTgD = checkpoint_name(v_BTgD, "attn_v")
    out_BShD, *statistics_BhS = _softmax(fixed, q_BShD, k_BTgD, v_BTgD, bias, rules)
    highest_BhS, log_total_BhS = (checkpoint_name(x_BhS, "attn_lse") for x_BhS in statistics_BhS)
    softmax = checkpoint_name(out_BShD, "attn_out"), highest_BhS, log_total_BhS
    return _results(softmax), ((q_BShD, k_BTgD, v_BTgD, bias, rules), softmax)


def _attend_backward(
    fixed: Fixed, residuals: _Residuals, cotangents: _Outputs
) -> tuple[Array, Array, Array, _Pairs | None, None]:
    (q_BShD, k_BTgD, v_BTgD, bias, rules), softmax = residuals
    out_BShD, highest_BhS, log_total_BhS = softmax
    dout_BShD, dlse_BhS = cotangents
    cut = fixed.cut

    # The results of empty rows are constants, so whatever cotangent they got (NaN after a merge of
    # two -inf, say) means nothing.
    empty_BhS = highest_BhS == -jnp.inf
    highest_BhS = jnp.where(empty_BhS, 0, highest_BhS)
    # With p the weights and dp = dout v^T, the gradient of a score is p (dp - delta): the softmax
    # subtracts sum(p dp) = sum(dout out) from every dp of a row, and the lse adds its cotangent.
    delta_BShD = dout_BShD.astype(jnp.float32) * out_BShD.astype(jnp.float32)
    delta_BhS = jnp.sum(delta_BShD, axis=-1).swapaxes(1, 2) - dlse_BhS
    # The weights below lack their division by the total: dout and delta carry it.
    share_BhS = jnp.exp(-log_total_BhS)
    delta_BhS = jnp.where(empty_BhS, 0, share_BhS * delta_BhS)
    empty_BSh1, share_BSh1 = (x.swapaxes(1, 2)[..., None] for x in (empty_BhS, share_BhS))
    dout_BShD = jnp.where(empty_BSh1, 0, share_BSh1 * dout_BShD).astype(dout_BShD.dtype)

    padded_rules, padded_bias = pad_rules(rules, cut), pad_pairs(bias, cut)

    def unit(number: Int32[Array, ""], gradients: _Arrays) -> _Arrays:
        unit = unit_at(fixed, padded_rules, padded_bias, number)
        q_nbgRD = _scaled(cut.queries(q_BShD, unit.place), unit)
        dout_nbgRD = cut.queries(dout_BShD, unit.place)
        highest_nbg1R = cut.statistics(highest_BhS, unit.place, 0)
        delta_nbg1R = cut.statistics(delta_BhS, unit.place, 0)
        k_mbgkD, v_mbgkD = cut.keys(k_BTgD, unit.place), cut.keys(v_BTgD, unit.place)
        k_mbgDk = k_mbgkD.swapaxes(3, 4)

        def query_block(gradients: _Arrays, x: _Arrays) -> tuple[_Arrays, None]:
            # Block n of the queries is replaced by its gradient: one whole array less.
            q_nbgRD, *sums = gradients
            n, dout_bgRD, highest_bg1R, delta_bg1R = x
            q_bgRD = q_nbgRD[n]
            columns = unit.columns(n)
            q_bgDR, dout_bgDR = q_bgRD.swapaxes(2, 3), dout_bgRD.swapaxes(2, 3)

            def key_block(j: Int32[Array, ""], sums: _Arrays, ragged: bool) -> _Arrays:
                dq_bgDR, dk_mbgkD, dv_mbgkD, *dbias = sums
                score_bgkR = unit.scores(q_bgDR, k_mbgkD[j], columns, n, j, ragged)
                weight_bgkR = jnp.exp(score_bgkR - highest_bg1R)
                dweight_bgkR = product("bgkd,bgdr->bgkr", v_mbgkD[j], dout_bgDR)
                kept_bgkR = unit.kept(columns, j)
                dropped_bgkR = weight_bgkR
                if kept_bgkR is not None:
                    dropped_bgkR = weight_bgkR * kept_bgkR
                    dweight_bgkR *= kept_bgkR
                dscore_bgkR = weight_bgkR * (dweight_bgkR - delta_bg1R)
                more = [unit.add_to_bias(x, dscore_bgkR, n, j) for x in dbias]
                dscore_bgkR = dscore_bgkR.astype(q_bgRD.dtype)
                dropped_bgkR = dropped_bgkR.astype(dout_bgRD.dtype)
                dq_bgDR += product("bgdk,bgkr->bgdr", k_mbgDk[j], dscore_bgkR)
                dk_bgkD = product("bgkr,bgrd->bgkd", dscore_bgkR, q_bgRD)
                dv_bgkD = product("bgkr,bgrd->bgkd", dropped_bgkR, dout_bgRD)
                dk_mbgkD, dv_mbgkD = dk_mbgkD.at[j].add(dk_bgkD), dv_mbgkD.at[j].add(dv_bgkD)
                return dq_bgDR, dk_mbgkD, dv_mbgkD, *more

            zeros_bgDR = lax.full_like(q_bgDR, 0, jnp.float32)
            dq_bgDR, *more = _over_keys(unit, n, key_block, (zeros_bgDR, *sums))
            dq_bgRD = fixed.scale * dq_bgDR.swapaxes(2, 3)
            return (q_nbgRD.at[n].set(dq_bgRD.astype(q_nbgRD.dtype)), *more), None

        dq_BShD, dk_BTgD, dv_BTgD, *dbias = gradients
        zeros = lax.full_like(k_mbgkD, 0, jnp.float32), lax.full_like(v_mbgkD, 0, jnp.float32)
        numbers = jnp.arange(cut.q_blocks, dtype=jnp.int32)
        sums, _ = lax.scan(
            query_block,
            (q_nbgRD, *zeros, *dbias),
            (numbers, dout_nbgRD, highest_nbg1R, delta_nbg1R),
        )
        dq_nbgRD, dk_mbgkD, dv_mbgkD, *dbias = sums
        if not unit.scales_queries(q_BShD):
            dk_mbgkD *= fixed.scale
        return (
            cut.put_queries(dq_BShD, dq_nbgRD, unit.place),
            cut.put_keys(dk_BTgD, dk_mbgkD, unit.place),
            cut.put_keys(dv_BTgD, dv_mbgkD, unit.place),
            *dbias,
        )

    zeros = [lax.full_like(x, 0) for x in (q_BShD, k_BTgD, v_BTgD)]
    if padded_bias is not None:
        zeros.append(lax.full_like(padded_bias, 0, jnp.float32))
    dq_BShD, dk_BTgD, dv_BTgD, *dbias = lax.fori_loop(0, cut.units, unit, tuple(zeros))
    if bias is None:
        return dq_BShD, dk_BTgD, dv_BTgD, None, None
    dbias = dbias[0][tuple(slice(length) for length in bias.shape)].astype(bias.dtype)
    return dq_BShD, dk_BTgD, dv_BTgD, dbias, None


_attend.defvjp(_attend_forward, _attend_backward)


def _scaled(q_nbgRD: Float[Array, "n b g R D"], unit: Unit) -> Float[Array, "n b g R D"]:
    return q_nbgRD * unit.fixed.scale if unit.scales_queries(q_nbgRD) else q_nbgRD


def _over_keys(
    unit: Unit,
    n: Int32[Array, ""],
    key_block: Callable[[Int32[Array, ""], _Arrays, bool], _Arrays],
    carry: _Arrays,
) -> _Arrays:
    """Folds `key_block` over the visits of query block n, the full blocks first."""
    visits = unit.visits(n)

    def full(i: Int32[Array, ""], carry: _Arrays) -> _Arrays:
        return key_block(visits.full_block(i), carry, False)

    def ragged(i: Int32[Array, ""], carry: _Arrays) -> _Arrays:
        return key_block(visits.ragged_block(i), carry, True)

    if not unit.never_full:
        carry = lax.fori_loop(0, visits.full, full, carry)
    return lax.fori_loop(0, visits.ragged, ragged, carry)
