"""Which key blocks a query block visits, and which of those need their pairs masked."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32, Shaped

from ulysses_jax.attention.block_layout import BlockLayout
from ulysses_jax.attention.blocks import Cut, Place
from ulysses_jax.attention.key_ranges import KeyRanges


class Visits(NamedTuple):
    """The key blocks of one query block: in full ones every pair is attended, in ragged ones some.

    Without `order_m` these are runs of neighbours: the full ones are [full_first, full_stop), the
    ragged ones [first, full_first) and then from `full_stop` on. With it the full ones are its
    first entries, and the ragged ones the next.
    """

    full: Int32[Array, ""]
    ragged: Int32[Array, ""]
    first: Int32[Array, ""]
    full_first: Int32[Array, ""]
    full_stop: Int32[Array, ""]
    order_m: Int32[Array, " m"] | None = None

    def full_block(self, i: Int32[Array, ""]) -> Int32[Array, ""]:
        """The key block of full visit number i."""
        return self.full_first + i if self.order_m is None else self.order_m[i]

    def ragged_block(self, i: Int32[Array, ""]) -> Int32[Array, ""]:
        """The key block of ragged visit number i."""
        if self.order_m is not None:
            return self.order_m[self.full + i]
        left = self.full_first - self.first
        return jnp.where(i < left, self.first + i, self.full_stop + i - left)


class Kinds(NamedTuple):
    """Whether some pairs, and whether all pairs, of each block pass one condition."""

    some_nm: Bool[Array, "n m"]
    all_nm: Bool[Array, "n m"]

    def at(self, n: Int32[Array, ""]) -> "tuple[Bool[Array, ' m'], Bool[Array, ' m']]":
        """Those of query block n."""
        return self.some_nm[n], self.all_nm[n]


class Spans(NamedTuple):
    """Least and greatest value in each block, over the rows of a unit."""

    least: Int32[Array, " blocks"]
    most: Int32[Array, " blocks"]


class SegmentKinds(NamedTuple):
    """As `Kinds`, from the ids in the blocks: never a table of all pairs of blocks."""

    q_ids: Spans
    kv_ids: Spans

    def at(self, n: Int32[Array, ""]) -> "tuple[Bool[Array, ' m'], Bool[Array, ' m']]":
        """Those of query block n: some pairs if the spans of ids meet, all if they are one id."""
        least, most = self.q_ids.least[n], self.q_ids.most[n]
        some_m = (self.kv_ids.least <= most) & (least <= self.kv_ids.most)
        all_m = (least == most) & (self.kv_ids.least == least) & (self.kv_ids.most == least)
        return some_m, all_m


class Reach(NamedTuple):
    """Where the n query blocks of a unit look by their key ranges; see `Visits`."""

    first_n: Int32[Array, " n"]
    stop_n: Int32[Array, " n"]
    full_first_n: Int32[Array, " n"]
    full_stop_n: Int32[Array, " n"]

    def visits(
        self, n: Int32[Array, ""], kv_blocks: int, kinds: tuple[Kinds | SegmentKinds, ...]
    ) -> Visits:
        """The visits of query block n: in reach, and ruled out by none of `kinds`."""
        first, stop = self.first_n[n], self.stop_n[n]
        full_first, full_stop = self.full_first_n[n], self.full_stop_n[n]
        if not kinds:
            full = full_stop - full_first
            return Visits(full, stop - first - full, first, full_first, full_stop)
        m = jnp.arange(kv_blocks, dtype=jnp.int32)
        some_m, all_m = (first <= m) & (m < stop), (full_first <= m) & (m < full_stop)
        for kind in kinds:
            more_some_m, more_all_m = kind.at(n)
            some_m, all_m = some_m & more_some_m, all_m & more_all_m
        order_m = jnp.argsort(jnp.where(all_m, 0, jnp.where(some_m, 1, 2)), stable=True)
        full, visited = (jnp.sum(x_m, dtype=jnp.int32) for x_m in (all_m, some_m))
        order_m = order_m.astype(jnp.int32)
        return Visits(full, visited - full, first, full_first, full_stop, order_m)


def reach(ranges: KeyRanges, cut: Cut, place: Place) -> Reach:
    """The reach of each query block of a unit, from the key ranges of its queries."""
    start_bS, end_bS = (_rows(x_BS, cut, place) for x_BS in ranges)
    # A query with an empty range makes no key block visited, and none full.
    empty_bS = start_bS >= end_bS
    starts = _spans(jnp.where(empty_bS, cut.sizes.kv_len, start_bS), cut.q_blocks, cut.blocks.q)
    ends = _spans(jnp.where(empty_bS, 0, end_bS), cut.q_blocks, cut.blocks.q)
    first = starts.least // cut.blocks.kv
    stop = jnp.maximum(-(-ends.most // cut.blocks.kv), first)
    full_first = jnp.clip(-(-starts.most // cut.blocks.kv), first, stop)
    full_stop = jnp.clip(ends.least // cut.blocks.kv, full_first, stop)
    return Reach(first, stop, full_first, full_stop)


def segment_kinds(
    q_ids_BS: Int32[Array, "B S"], kv_ids_BT: Int32[Array, "B T"], cut: Cut, place: Place
) -> SegmentKinds:
    """What the segments of a unit's rows say of its blocks."""
    return SegmentKinds(
        _spans(_rows(q_ids_BS, cut, place), cut.q_blocks, cut.blocks.q),
        _spans(_rows(kv_ids_BT, cut, place), cut.kv_blocks, cut.blocks.kv),
    )


def layout_kinds(layout: BlockLayout, cut: Cut, head: Int32[Array, ""] | int, heads: int) -> Kinds:
    """What a layout says of the blocks for `heads` heads from `head` on.

    The blocks of `cut` must be multiples of the layout's, so that each holds whole ones.
    """
    tables_hnm = jnp.asarray(layout.tables(heads, head))
    q_times, kv_times = cut.blocks.q // layout.q_block, cut.blocks.kv // layout.kv_block
    _, q_count, kv_count = tables_hnm.shape
    more = (cut.q_blocks * q_times - q_count, cut.kv_blocks * kv_times - kv_count)
    widths = ((0, 0), (0, more[0]), (0, more[1]))

    def blocks(padding: bool) -> Bool[Array, "h n q m k"]:
        padded = jnp.pad(tables_hnm, widths, constant_values=padding)
        return padded.reshape(-1, cut.q_blocks, q_times, cut.kv_blocks, kv_times)

    within = (0, 2, 4)
    return Kinds(jnp.any(blocks(False), axis=within), jnp.all(blocks(True), axis=within))


def _rows(x_BS: Shaped[Array, "B S"], cut: Cut, place: Place) -> Shaped[Array, "b S"]:
    return lax.dynamic_slice_in_dim(x_BS, place.row, cut.blocks.rows)


def _spans(x_bS: Int32[Array, "b S"], count: int, block: int) -> Spans:
    # The last value again after the end: the padding then changes neither bound.
    x_bS = jnp.pad(x_bS, ((0, 0), (0, block * count - x_bS.shape[1])), mode="edge")
    x_bnq = x_bS.reshape(x_bS.shape[0], count, block)
    return Spans(jnp.min(x_bnq, axis=(0, 2)), jnp.max(x_bnq, axis=(0, 2)))
