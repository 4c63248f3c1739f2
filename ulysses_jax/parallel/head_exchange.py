"""The route by all-to-alls: whole sequences for part of the heads, for any heads and lengths."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32, Int32, Shaped

from ulysses_jax.attention.block_layout import BlockLayout
from ulysses_jax.attention.select import LocalAttention
from ulysses_jax.attention.spec import AttentionSpec
from ulysses_jax.parallel.exchange import heads_to_seq, seq_to_heads_together
from ulysses_jax.parallel.heads import HeadPlan


class _Group(NamedTuple):
    """Query slots that each device exchanges and computes at a time.

    Attributes:
      first, slots: which of its query slots.
      kv_first, kv_count: which of its key/value heads they need.
      kv_of_runs: for each device, which of these each run of slots uses.
    """

    first: int
    slots: int
    kv_first: int
    kv_count: int
    kv_of_runs: tuple[tuple[int, ...], ...]


def attend_by_heads(
    q_BsHD: Float[Array, "B s H D"],
    k_BtKD: Float[Array, "B t K D"],
    v_BtKD: Float[Array, "B t K D"],
    spec: AttentionSpec,
    plan: HeadPlan,
    *,
    local: LocalAttention,
    axis: str,
    scale: float,
    lengths: tuple[int, int],
    chunks: int,
    return_lse: bool,
) -> tuple[Float[Array, "B s H D"], Float32[Array, "B H s"] | None]:
    """Exchanges, attends over whole sequences, and exchanges back (paper, section 3.1).

    Args:
      q_BsHD, k_BtKD, v_BtKD: this device's part of the sequences, all heads.
      spec: over the whole sequences and all heads.
      plan: for the number of heads and of devices.
      lengths: S and T. What the devices hold beyond them is padding that nobody sees.
      chunks: groups of heads. The exchange of one may run beside the attention of the one before;
        it waits for the one before that, so that no more than two are whole at a time.

    Raises:
      ValueError: `chunks` does not divide a device's heads.
    """
    q_len, kv_len = lengths
    part = lax.axis_index(axis)
    q_BsPhD = _slots(plan.query_slots(q_BsHD, axis=2), plan.ways)
    k_BtPgD, v_BtPgD = (_slots(plan.kv_slots(x), plan.ways) for x in (k_BtKD, v_BtKD))
    spec = _with_slots(spec, plan)

    whole_kv: tuple[tuple[int, int], list[Array]] | None = None
    outs_BsPhD: list[Array] = []
    lses_BsPh1: list[Array] = []
    for number, group in enumerate(_groups(plan, chunks)):
        sent = [_taken(q_BsPhD, group.first, group.slots)]
        kv = (group.kv_first, group.kv_count)
        if whole_kv is None or whole_kv[0] != kv:
            sent += [_taken(x_BtPgD, *kv) for x_BtPgD in (k_BtPgD, v_BtPgD)]
        if number >= 2:
            sent, _ = lax.optimization_barrier((sent, outs_BsPhD[number - 2]))
        q_BShD, *fresh = _exchanged(sent, axis)
        if fresh:
            whole_kv = kv, fresh
        assert whole_kv is not None
        k_BTgD, v_BTgD = (
            _for_runs(x_BTgD[:, :kv_len], group.kv_of_runs, part) for x_BTgD in whole_kv[1]
        )
        out_BShD, lse_BhS = local(
            q_BShD[:, :q_len], k_BTgD, v_BTgD, _own(spec, plan, part, group), scale
        )
        outs_BsPhD.append(_returned(out_BShD, axis, q_BShD.shape[1]))
        if return_lse:
            assert lse_BhS is not None
            lse_BSh1 = lse_BhS.swapaxes(1, 2)[..., None]
            lses_BsPh1.append(_returned(lse_BSh1, axis, q_BShD.shape[1]))

    out_BsHD = plan.from_query_slots(_joined(outs_BsPhD), axis=2)
    lse_BHs = None
    if return_lse:
        lse_BHs = plan.from_query_slots(_joined(lses_BsPh1), axis=2)[..., 0].swapaxes(1, 2)
    return checkpoint_name(out_BsHD, "attn_exchanged"), lse_BHs


def _groups(plan: HeadPlan, chunks: int) -> list[_Group]:
    if plan.own_heads % chunks:
        fitting = [n for n in range(1, plan.own_heads + 1) if plan.own_heads % n == 0]
        raise ValueError(
            f"chunks = {chunks} does not divide the {plan.own_heads} query heads that a device "
            f"computes ({plan}): use one of {fitting}"
        )
    count = plan.own_heads // chunks
    groups = []
    for first in range(0, plan.own_heads, count):
        rows = plan.kv_of_slots(first, count)
        low, high = 0, plan.own_kv_heads
        if len(set(rows)) == 1:
            low, high = min(rows[0]), max(rows[0]) + 1
        rows = tuple(tuple(kv - low for kv in row) for row in rows)
        groups.append(_Group(first, count, low, high - low, rows))
    return groups


def _slots(x_BsHD: Shaped[Array, "B s _ D"], ways: int) -> Shaped[Array, "B s P _ D"]:
    B, s, _, D = x_BsHD.shape
    return x_BsHD.reshape(B, s, ways, -1, D)


def _taken(x_BsPnD: Shaped[Array, "B s P _ D"], first: int, count: int) -> Shaped[Array, "..."]:
    B, s, P, _, D = x_BsPnD.shape
    return x_BsPnD[:, :, :, first : first + count].reshape(B, s, P * count, D)


def _exchanged(arrays: list[Array], axis: str) -> list[Array]:
    """All that may share an all-to-all does: q, k and v where they are of one length and dtype."""
    alike: dict[tuple[int, int, str], list[int]] = {}
    for index, x_BsHD in enumerate(arrays):
        key = (x_BsHD.shape[1], x_BsHD.shape[3], str(x_BsHD.dtype))
        alike.setdefault(key, []).append(index)
    received = list(arrays)
    for indices in alike.values():
        exchanged = seq_to_heads_together([arrays[i] for i in indices], axis)
        for index, x_BShD in zip(indices, exchanged, strict=True):
            received[index] = x_BShD
    return received


def _for_runs(
    x_BTgD: Shaped[Array, "B T g D"],
    kv_of_runs: tuple[tuple[int, ...], ...],
    part: Int32[Array, ""],
) -> Shaped[Array, "B T _ D"]:
    """The key/value head of each run of query slots, repeated where runs share one."""
    rows = set(kv_of_runs)
    if rows == {tuple(range(x_BTgD.shape[2]))}:
        return x_BTgD
    if len(rows) == 1:
        return jnp.concatenate([x_BTgD[:, :, kv : kv + 1] for kv in kv_of_runs[0]], axis=2)
    own = jnp.asarray(kv_of_runs, jnp.int32)[part]
    return jnp.concatenate([lax.dynamic_slice_in_dim(x_BTgD, kv, 1, axis=2) for kv in own], axis=2)


def _returned(x_BShD: Array, axis: str, padded: int) -> Array:
    """Exchanged back, in slots [B, s, P, h, D]."""
    more = padded - x_BShD.shape[1]
    if more:
        x_BShD = jnp.pad(x_BShD, ((0, 0), (0, more), (0, 0), (0, 0)))
    return _slots(heads_to_seq(x_BShD, axis), lax.axis_size(axis))


def _joined(groups_BsPhD: list[Array]) -> Array:
    x_BsPhD = groups_BsPhD[0] if len(groups_BsPhD) == 1 else jnp.concatenate(groups_BsPhD, axis=3)
    B, s, _, _, D = x_BsPhD.shape
    return x_BsPhD.reshape(B, s, -1, D)


def _with_slots(spec: AttentionSpec, plan: HeadPlan) -> AttentionSpec:
    """`spec` with what belongs to a head in its slot."""

    def slots(x: Shaped[Array, "#B #H #S #T"] | None) -> Shaped[Array, "..."] | None:
        return x if x is None or x.shape[1] == 1 else plan.query_slots(jnp.asarray(x), axis=1)

    layout = spec.block_layout
    if layout is not None and layout.attended.shape[0] > 1 and plan.waste > 1:
        # A table for slots that are padding, for which nothing is computed.
        tables = np.pad(layout.attended, ((0, plan.own_heads), (0, 0), (0, 0)))
        layout = BlockLayout(layout.q_block, layout.kv_block, tables)
    return dataclasses.replace(
        spec, mask=slots(spec.mask), bias=slots(spec.bias), block_layout=layout
    )


def _own(
    spec: AttentionSpec, plan: HeadPlan, part: Int32[Array, ""], group: _Group
) -> AttentionSpec:
    """`spec` as the device that has this part of the heads is to see it."""

    def own(x: Shaped[Array, "#B #H #S #T"] | None) -> Shaped[Array, "..."] | None:
        if x is None or x.shape[1] == 1:
            return x
        first = part * plan.own_heads + group.first
        return lax.dynamic_slice_in_dim(x, first, group.slots, axis=1)

    first_head = spec.first_head
    if spec.dropout is not None or spec.block_layout is not None:
        first_head = first_head + jnp.asarray(plan.starts, jnp.int32)[part] + group.first
    return dataclasses.replace(
        spec, mask=own(spec.mask), bias=own(spec.bias), first_head=first_head
    )
