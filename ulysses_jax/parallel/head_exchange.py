"""The route by all-to-alls: whole sequences for part of the heads, for any heads and lengths."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32, Int, Int32, Shaped

from ulysses_jax.attention.block_layout import BlockLayout
from ulysses_jax.attention.select import LocalAttention
from ulysses_jax.attention.spec import AttentionSpec
from ulysses_jax.parallel.exchange import heads_to_seq, seq_to_heads_together
from ulysses_jax.parallel.heads import HeadPlan
from ulysses_jax.parallel.order import after


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
    groups = _groups(plan, chunks)
    spec = _with_slots(spec, plan)
    q_nBsHD = _by_group(plan.query_slots(q_BsHD, axis=2), plan.ways, chunks)
    kv = [plan.kv_slots(x_BtKD) for x_BtKD in (k_BtKD, v_BtKD)]
    sent: tuple[Array, ...] = (q_nBsHD,)
    whole_kv: list[Array] = []
    if groups.splits_kv:
        sent += tuple(_by_group(x, plan.ways, chunks) for x in kv)
    elif chunks > 1:
        whole_kv = _exchanged(kv, axis)
    else:
        sent += tuple(x[None] for x in kv)

    outs_BShD: list[Array] = []
    groups_of_results: list[list[Array]] = []
    for number in range(chunks):
        own = [x_nBsHD[number] for x_nBsHD in sent]
        if number >= 2:
            own = after(own, outs_BShD[number - 2])
        q_BShD, k_BTgD, v_BTgD = [*_exchanged(own, axis), *whole_kv]
        kv_of_runs = groups.runs(number, part)
        out_BShD, lse_BhS = local(
            q_BShD[:, :q_len],
            _for_runs(k_BTgD[:, :kv_len], kv_of_runs),
            _for_runs(v_BTgD[:, :kv_len], kv_of_runs),
            _own(spec, plan, part, number * groups.slots, groups.slots),
            scale,
        )
        outs_BShD.append(out_BShD)
        results = [out_BShD]
        if return_lse:
            assert lse_BhS is not None
            results.append(lse_BhS.swapaxes(1, 2)[..., None])
        groups_of_results.append([_returned(x, axis, q_BShD.shape[1]) for x in results])

    results = [_joined(list(of_groups)) for of_groups in zip(*groups_of_results, strict=True)]
    out_BsHD = plan.from_query_slots(results[0], axis=2)
    lse_BHs = None
    if return_lse:
        lse_BHs = plan.from_query_slots(results[1], axis=2)[..., 0].swapaxes(1, 2)
    return checkpoint_name(out_BsHD, "attn_exchanged"), lse_BHs


class _Groups(NamedTuple):
    """How the query slots of each device are exchanged and computed: a group at a time.

    Attributes:
      slots: query slots a group.
      splits_kv: whether each group has key/value heads of its own, or all come with the first.
      kv_of_runs: [group, device, run], which of these each run of query slots uses.
    """

    slots: int
    splits_kv: bool
    kv_of_runs: Int[np.ndarray, "n P runs"]

    def runs(
        self, number: int, part: Int32[Array, ""]
    ) -> Int[np.ndarray, " runs"] | Int32[Array, " runs"]:
        """Those of one group on one device; a numpy array where all devices agree."""
        own_Pr = self.kv_of_runs[number]
        return own_Pr[0] if (own_Pr == own_Pr[0]).all() else jnp.asarray(own_Pr)[part]


def _groups(plan: HeadPlan, chunks: int) -> _Groups:
    if plan.own_heads % chunks:
        fitting = [n for n in range(1, plan.own_heads + 1) if plan.own_heads % n == 0]
        raise ValueError(
            f"chunks = {chunks} does not divide the {plan.own_heads} query heads that a device "
            f"computes ({plan}): use one of {fitting}"
        )
    slots = plan.own_heads // chunks
    kv_of_runs = np.asarray([plan.kv_of_slots(n * slots, slots) for n in range(chunks)], np.int32)
    own, uneven = divmod(plan.own_kv_heads, chunks)
    first = own * np.arange(chunks)[:, None, None]
    splits = not uneven and bool(((kv_of_runs >= first) & (kv_of_runs < first + own)).all())
    return _Groups(slots, splits, kv_of_runs - first if splits else kv_of_runs)


def _by_group(x_BsHD: Shaped[Array, "B s _ D"], ways: int, groups: int) -> Shaped[Array, "..."]:
    """The slots of one group of every device after those of another: [n, B, s, P * slots, D]."""
    B, s, _, D = x_BsHD.shape
    x_BsPnhD = x_BsHD.reshape(B, s, ways, groups, -1, D)
    return jnp.moveaxis(x_BsPnhD, 3, 0).reshape(groups, B, s, -1, D)


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
    x_BTgD: Shaped[Array, "B T g D"], kv_of_runs: Int[Array | np.ndarray, " runs"]
) -> Shaped[Array, "B T runs D"]:
    """The key/value head of each run of query slots, repeated where runs share one."""
    if isinstance(kv_of_runs, np.ndarray) and kv_of_runs.tolist() == list(range(x_BTgD.shape[2])):
        return x_BTgD
    return jnp.concatenate(
        [lax.dynamic_slice_in_dim(x_BTgD, kv, 1, axis=2) for kv in kv_of_runs], axis=2
    )


def _returned(x_BShD: Shaped[Array, "B S _ D"], axis: str, padded: int) -> Shaped[Array, "..."]:
    """Exchanged back: [B, s, P, slots, D]."""
    more = padded - x_BShD.shape[1]
    if more:
        x_BShD = jnp.pad(x_BShD, ((0, 0), (0, more), (0, 0), (0, 0)))
    x_BsHD = heads_to_seq(x_BShD, axis)
    B, s, _, D = x_BsHD.shape
    return x_BsHD.reshape(B, s, lax.axis_size(axis), -1, D)


def _joined(groups_BsPhD: list[Array]) -> Shaped[Array, "B s _ D"]:
    """The slots of all groups, device by device: the inverse of `_by_group`."""
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
    spec: AttentionSpec,
    plan: HeadPlan,
    part: Int32[Array, ""],
    first: int,
    slots: int,
) -> AttentionSpec:
    """`spec` for so many of the slots of the device that has this part, from its `first` on."""

    def own(x: Shaped[Array, "#B #H #S #T"] | None) -> Shaped[Array, "..."] | None:
        if x is None or x.shape[1] == 1:
            return x
        return lax.dynamic_slice_in_dim(x, part * plan.own_heads + first, slots, axis=1)

    first_head = spec.first_head
    if spec.dropout is not None or spec.block_layout is not None:
        first_head = first_head + jnp.asarray(plan.starts, jnp.int32)[part] + first
    return dataclasses.replace(
        spec, mask=own(spec.mask), bias=own(spec.bias), first_head=first_head
    )
