"""The route for sliding windows: each device fetches the keys just outside its own part only."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int32, Shaped

from ulysses_jax.attention.key_ranges import as_ids, lengths_within
from ulysses_jax.attention.select import LocalAttention
from ulysses_jax.attention.spec import AttentionSpec


class Halo(NamedTuple):
    """How many keys before and after its own part a device needs."""

    before: int
    after: int

    def elements_moved(self, rows: int, kv_heads: int, head_dim: int) -> int:
        """Elements that one device receives of k and v for one layer's forward pass."""
        return rows * (self.before + self.after) * 2 * kv_heads * head_dim


def halo_of(spec: AttentionSpec, own: int, ways: int) -> Halo | str:
    """The halo of `ways` devices that hold `own` tokens each, or why there can be none."""
    if spec.block_layout is not None or spec.dropout is not None:
        name = "a block layout" if spec.block_layout is not None else "dropout"
        return f"{name} counts from the start of the sequence"
    left, right = spec.window if spec.window is not None else (None, None)
    if spec.causal:
        right = 0
    for side, keys in (("left", left), ("right", right)):
        if keys is None:
            return f"the window has no limit on the {side}"
        if not isinstance(keys, int | np.integer):
            return f"the {side} side of the window is traced, and so not known when compiling"
    outside = (ways - 1) * own
    return Halo(min(int(left), outside), min(int(right), outside))  # type: ignore[arg-type]


def attend_with_halo(
    q_BsHD: Float[Array, "B s H D"],
    k_BsKD: Float[Array, "B s K D"],
    v_BsKD: Float[Array, "B s K D"],
    spec: AttentionSpec,
    halo: Halo,
    *,
    local: LocalAttention,
    axis: str,
    scale: float,
    length: int,
) -> tuple[Float[Array, "B s H D"], Float32[Array, "B H s"] | None]:
    """Window attention of this device's queries, all heads, over its own and its halo's keys.

    What moves is O(window), whatever the sequence. `spec` is over the whole sequence of `length`
    tokens, as for `attend_by_heads`; what the devices hold beyond it is padding.
    """
    own = q_BsHD.shape[1]
    kv_BtKD = jnp.concatenate([k_BsKD, v_BsKD], axis=2)
    kv_BtKD = jnp.concatenate(
        [*_before(kv_BtKD, halo, axis), kv_BtKD, *_after(kv_BtKD, halo, axis)], axis=1
    )
    kv_heads = k_BsKD.shape[2]
    first = lax.axis_index(axis) * own
    more = lax.axis_size(axis) * own - length
    place = _Place(first, own, kv_BtKD.shape[1], halo, length, more)
    k_BtKD, v_BtKD = kv_BtKD[:, :, :kv_heads], kv_BtKD[:, :, kv_heads:]
    return local(q_BsHD, k_BtKD, v_BtKD, _own(spec, place, q_BsHD.shape[0]), scale)


class _Place(NamedTuple):
    """Where a device's queries and keys stand in the whole sequence.

    Attributes:
      first: the first query. The first key is `halo.before` keys before it, and may be none.
      queries, keys: how many the device has.
      length: of the whole sequence; `more` is the padding after it.
    """

    first: Int32[Array, ""]
    queries: int
    keys: int
    halo: Halo
    length: int
    more: int

    def of_queries(self, x: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:
        """The queries' part of `x`, whose dimension `axis` is the whole sequence or 1."""
        return self._part(x, axis, 0, self.more, self.queries)

    def of_keys(self, x: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:
        """The same of the keys; anything where there is none."""
        return self._part(x, axis, self.halo.before, self.more + self.halo.after, self.keys)

    def _part(self, x: Array, axis: int, before: int, after: int, count: int) -> Array:
        if x.shape[axis] == 1 != self.length:
            return x
        widths = [(0, 0)] * x.ndim
        widths[axis] = (before, after)
        return lax.dynamic_slice_in_dim(jnp.pad(x, widths), self.first, count, axis)


def _before(x_BsND: Shaped[Array, "B s N D"], halo: Halo, axis: str) -> list[Array]:
    """The last tokens of the devices before this one, in their order; zeros where there is none."""
    own, ways = x_BsND.shape[1], lax.axis_size(axis)
    pieces: list[Array] = []
    for hop in range(1, -(-halo.before // own) + 1):
        count = min(own, halo.before - (hop - 1) * own)
        pairs = [(i, i + hop) for i in range(ways - hop)]
        pieces.insert(0, lax.ppermute(x_BsND[:, own - count :], axis, pairs))
    return pieces


def _after(x_BsND: Shaped[Array, "B s N D"], halo: Halo, axis: str) -> list[Array]:
    """The first tokens of the devices after this one, in their order."""
    own, ways = x_BsND.shape[1], lax.axis_size(axis)
    pieces: list[Array] = []
    for hop in range(1, -(-halo.after // own) + 1):
        count = min(own, halo.after - (hop - 1) * own)
        pairs = [(i + hop, i) for i in range(ways - hop)]
        pieces.append(lax.ppermute(x_BsND[:, :count], axis, pairs))
    return pieces


def _own(spec: AttentionSpec, place: _Place, rows: int) -> AttentionSpec:
    """`spec` for queries and keys that are counted from the first that the device has."""
    left, right = spec.window if spec.window is not None else (None, None)
    if spec.causal:
        right = 0
    assert left is not None  # Without limits there is no halo.
    assert right is not None
    before = place.halo.before
    stops_B = jnp.full(rows, place.length, jnp.int32)
    if spec.kv_lengths is not None:
        stops_B = lengths_within(spec.kv_lengths, place.length)
    q_ids, kv_ids = _segments(spec, place, rows)
    return dataclasses.replace(
        spec,
        causal=False,
        window=(int(left) - before, int(right) + before),
        q_segment_ids=q_ids,
        kv_segment_ids=kv_ids,
        contiguous_segments=spec.contiguous_segments or spec.q_segment_ids is None,
        kv_lengths=jnp.maximum(stops_B - (place.first - before), 0),
        mask=_pairs(spec.mask, place),
        bias=_pairs(spec.bias, place),
    )


def _segments(
    spec: AttentionSpec, place: _Place, rows: int
) -> tuple[Int[Array, "B s"] | None, Int[Array, "B t"] | None]:
    """Ids of the device's queries and keys; keys before the sequence have one of no query."""
    absent_t = jnp.arange(place.keys, dtype=jnp.int32) < place.halo.before - place.first
    if spec.q_segment_ids is None:
        if place.halo.before == 0:
            return None, None
        absent_Bt = jnp.broadcast_to(absent_t, (rows, place.keys))
        return jnp.zeros((rows, place.queries), jnp.int32), absent_Bt.astype(jnp.int32)
    ids = spec.segment_ids(rows, place.length, place.length)
    assert ids is not None
    q_ids_BS, kv_ids_BS = (as_ids(x) for x in ids)
    q_ids_Bs = place.of_queries(q_ids_BS, 1)
    kv_ids_Bt = place.of_keys(kv_ids_BS, 1)
    return q_ids_Bs, jnp.where(absent_t, _unused(q_ids_Bs), kv_ids_Bt)


def _unused(ids_Bs: Int[Array, "B s"]) -> Int[Array, "B 1"]:
    """The least number from 0 on that is no id of the row."""
    rows, count = ids_Bs.shape
    small_Bs = jnp.where((ids_Bs >= 0) & (ids_Bs <= count), ids_Bs, count + 1)
    used_Bn = jnp.zeros((rows, count + 1), bool)
    used_Bn = used_Bn.at[jnp.arange(rows)[:, None], small_Bs].set(True, mode="drop")
    return jnp.argmin(used_Bn, axis=1, keepdims=True).astype(ids_Bs.dtype)


def _pairs(x: Shaped[Array, "#B #H #S #T"] | None, place: _Place) -> Shaped[Array, "..."] | None:
    return None if x is None else place.of_keys(place.of_queries(jnp.asarray(x), 2), 3)
