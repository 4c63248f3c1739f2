"""The scores of one query block with one key block: biased, masked, dropped.

A tile is [b, g, k, R] (see `blocks`): keys down, query columns across, so that what belongs to a
query is a row vector, and reducing over the keys of a query adds whole rows.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Shaped, UInt32

from ulysses_jax.attention import visits
from ulysses_jax.attention.block_layout import BlockLayout
from ulysses_jax.attention.blocks import Cut, Place, corner
from ulysses_jax.attention.dropout import Dropout, keep, query_words
from ulysses_jax.attention.key_ranges import KeyRanges


class Rules(NamedTuple):
    """What a spec says of the pairs, as arrays; `Fixed` is the static rest of it."""

    ranges: KeyRanges
    ids: tuple[Int[Array, "B S"], Int[Array, "B T"]] | None
    mask: Bool[Array, "#B #h #S #T"] | None
    seed: UInt32[Array, "2"] | None
    first_row: Int32[Array, ""]
    first_head: Int32[Array, ""]


class Fixed(NamedTuple):
    """The static part of a call."""

    cut: Cut
    scale: float
    layout: BlockLayout | None
    dropout_rate: float
    dropout_broadcast: bool


class Columns(NamedTuple):
    """What belongs to the query columns of one block."""

    start_b11R: Int32[Array, "b 1 1 R"]
    end_b11R: Int32[Array, "b 1 1 R"]
    ids_b11R: Int32[Array, "b 1 1 R"] | None
    words_bg1R2: UInt32[Array, "b g 1 R 2"] | None


class Unit(NamedTuple):
    """The tiles of one unit: call it block by block."""

    fixed: Fixed
    rules: Rules
    bias: Float[Array, "#B #h #S #T"] | None
    place: Place
    reach: visits.Reach
    kinds: tuple[visits.Kinds | visits.SegmentKinds, ...]

    def visits(self, n: Int32[Array, ""]) -> visits.Visits:
        """The key blocks that query block n visits."""
        found = self.reach.visits(n, self.fixed.cut.kv_blocks, self.kinds)
        if not self.never_full:
            return found
        return visits.Visits(
            jnp.zeros_like(found.full),
            found.full + found.ragged,
            found.first,
            found.first,
            found.first,
            found.order_m,
        )

    @property
    def never_full(self) -> bool:
        """Whether every block is masked: a mask may rule out any pair, one block has no inside."""
        return self.rules.mask is not None or self.fixed.cut.kv_blocks == 1

    def columns(self, n: Int32[Array, ""]) -> Columns:
        """The columns of query block n."""
        cut, rules = self.fixed.cut, self.rules
        start_b11R, end_b11R = (self._of_queries(x_BS, n) for x_BS in rules.ranges)
        ids_b11R = None if rules.ids is None else self._of_queries(rules.ids[0], n)
        words_bg1R2 = None
        if rules.seed is not None:
            b, g, r, q = cut.blocks.rows, cut.blocks.kv_heads, cut.share, cut.blocks.q
            words_bhq2 = query_words(
                Dropout(
                    rate=self.fixed.dropout_rate,
                    key=rules.seed,
                    broadcast=self.fixed.dropout_broadcast,
                ),
                rules.first_row + self.place.row + jnp.arange(b),
                self._first_head + jnp.arange(g * r),
                n * q + jnp.arange(q),
            )
            words_bg1R2 = words_bhq2.reshape(b, g, 1, r * q, 2)
        return Columns(start_b11R, end_b11R, ids_b11R, words_bg1R2)

    def scores(
        self,
        q_bgDR: Float[Array, "b g D R"],
        k_bgkD: Float[Array, "b g k D"],
        columns: Columns,
        n: Int32[Array, ""],
        j: Int32[Array, ""],
        ragged: bool,
    ) -> Float32[Array, "b g k R"]:
        """The scaled and biased scores of blocks n and j, −inf where not attended.

        `q_bgDR` is already scaled where `scales_queries`. Only a `ragged` block is masked.
        """
        score_bgkR = product("bgkd,bgdr->bgkr", k_bgkD, q_bgDR)
        if not self.scales_queries(q_bgDR):
            score_bgkR *= self.fixed.scale
        if self.bias is not None:
            score_bgkR += self._tile(self.bias, n, j).astype(jnp.float32)
        if ragged:
            score_bgkR = jnp.where(self._attended(columns, n, j), score_bgkR, -jnp.inf)
        return score_bgkR

    def scales_queries(self, q: Float[Array, "..."]) -> bool:
        """Whether queries are scaled before the product: not where that rounds them again."""
        return q.dtype == jnp.float32

    def kept(self, columns: Columns, j: Int32[Array, ""]) -> Float32[Array, "b g k R"] | None:
        """The factor of each weight under dropout, 0 or 1 / (1 - rate); None without dropout."""
        if columns.words_bg1R2 is None:
            return None
        rate = self.fixed.dropout_rate
        kept_bgkR = keep(columns.words_bg1R2, self._keys(j)[:, None], rate)
        return jnp.where(kept_bgkR, jnp.float32(1 / (1 - rate)), 0)

    def add_to_bias(
        self,
        dbias: Float32[Array, "#B #h #S #T"],
        dscore_bgkR: Float32[Array, "b g k R"],
        n: Int32[Array, ""],
        j: Int32[Array, ""],
    ) -> Float32[Array, "#B #h #S #T"]:
        """Adds the gradient of a tile's scores to that of the bias, in place."""
        cut = self.fixed.cut
        b, g, k, _ = dscore_bgkR.shape
        dscore_bgrqk = dscore_bgkR.reshape(b, g, k, cut.share, -1).transpose(0, 1, 3, 4, 2)
        more = dscore_bgrqk.reshape(b, g * cut.share, -1, k)
        start, size = self._corner(dbias.shape, n, j)
        summed = [axis for axis, length in enumerate(dbias.shape) if length == 1]
        more = jnp.sum(more, axis=summed, keepdims=True) if summed else more
        return lax.dynamic_update_slice(dbias, lax.dynamic_slice(dbias, start, size) + more, start)

    @property
    def _first_head(self) -> Int32[Array, ""]:
        return self.rules.first_head + self.place.kv_head * self.fixed.cut.share

    def _keys(self, j: Int32[Array, ""]) -> Int32[Array, " k"]:
        return j * self.fixed.cut.blocks.kv + jnp.arange(self.fixed.cut.blocks.kv, dtype=jnp.int32)

    def _of_queries(self, x_BS: Int32[Array, "B S"], n: Int32[Array, ""]) -> Shaped[Array, "..."]:
        cut = self.fixed.cut
        x_bq = lax.dynamic_slice(
            x_BS, corner(self.place.row, n * cut.blocks.q), (cut.blocks.rows, cut.blocks.q)
        )
        return jnp.tile(x_bq, (1, cut.share))[:, None, None]

    def _attended(
        self, columns: Columns, n: Int32[Array, ""], j: Int32[Array, ""]
    ) -> Bool[Array, "b #g k R"]:
        cut, rules = self.fixed.cut, self.rules
        key_k1 = self._keys(j)[:, None]
        attended = (key_k1 >= columns.start_b11R) & (key_k1 < columns.end_b11R)
        if rules.ids is not None:
            ids_bk = lax.dynamic_slice(
                rules.ids[1],
                corner(self.place.row, j * cut.blocks.kv),
                (cut.blocks.rows, cut.blocks.kv),
            )
            attended &= ids_bk[:, None, :, None] == columns.ids_b11R
        if self.fixed.layout is not None:
            attended &= self._layout_tile(self.fixed.layout, n, j)
        if rules.mask is not None:
            attended &= self._tile(rules.mask, n, j)
        return attended

    def _layout_tile(
        self, layout: BlockLayout, n: Int32[Array, ""], j: Int32[Array, ""]
    ) -> Bool[Array, "1 #g k R"]:
        cut = self.fixed.cut
        heads = cut.blocks.kv_heads * cut.share
        tables_hnm = jnp.asarray(layout.tables(heads, self._first_head))
        q_times, kv_times = cut.blocks.q // layout.q_block, cut.blocks.kv // layout.kv_block
        padded = jnp.pad(
            tables_hnm,
            (
                (0, 0),
                (0, cut.q_blocks * q_times - tables_hnm.shape[1]),
                (0, cut.kv_blocks * kv_times - tables_hnm.shape[2]),
            ),
        )
        size = (padded.shape[0], q_times, kv_times)
        tile_hqk = lax.dynamic_slice(padded, corner(0, n * q_times, j * kv_times), size)
        tile_hqk = jnp.repeat(jnp.repeat(tile_hqk, layout.q_block, 1), layout.kv_block, 2)
        return _to_columns(tile_hqk[None], cut)

    def _corner(
        self, shape: tuple[int, ...], n: Int32[Array, ""], j: Int32[Array, ""]
    ) -> tuple[tuple[Int[Array, ""] | int, ...], tuple[int, ...]]:
        """Start and size of a tile in an array over pairs, whose dimensions may be 1."""
        cut = self.fixed.cut
        starts = (
            self.place.row,
            self.place.kv_head * cut.share,
            n * cut.blocks.q,
            j * cut.blocks.kv,
        )
        sizes = (
            cut.blocks.rows,
            cut.blocks.kv_heads * cut.share,
            cut.blocks.q,
            cut.blocks.kv,
        )
        narrow = [length == 1 for length in shape]
        return (
            corner(*(0 if one else x for x, one in zip(starts, narrow, strict=True))),
            tuple(1 if one else x for x, one in zip(sizes, narrow, strict=True)),
        )

    def _tile(
        self, x: Shaped[Array, "#B #h #S #T"], n: Int32[Array, ""], j: Int32[Array, ""]
    ) -> Shaped[Array, "#b #g #k #R"]:
        return _to_columns(lax.dynamic_slice(x, *self._corner(x.shape, n, j)), self.fixed.cut)


def unit_at(
    fixed: Fixed,
    rules: Rules,
    bias: Float[Array, "#B #h #S #T"] | None,
    number: Int32[Array, ""],
) -> Unit:
    """Unit `number` of a call, with what is known of its blocks."""
    cut = fixed.cut
    place = cut.place(number.astype(jnp.int32))
    kinds: list[visits.Kinds | visits.SegmentKinds] = []
    if rules.ids is not None:
        kinds.append(visits.segment_kinds(*rules.ids, cut, place))
    if fixed.layout is not None:
        head = rules.first_head + place.kv_head * cut.share
        heads = cut.blocks.kv_heads * cut.share
        kinds.append(visits.layout_kinds(fixed.layout, cut, head, heads))
    reach = visits.reach(rules.ranges, cut, place)
    return Unit(fixed, rules, bias, place, reach, tuple(kinds))


def pad_pairs(x: Shaped[Array, "#B #h #S #T"] | None, cut: Cut) -> Shaped[Array, "..."] | None:
    """An array over pairs with whole blocks along S and T, so that every tile can be cut out."""
    if x is None:
        return None
    lengths = cut.q_blocks * cut.blocks.q, cut.kv_blocks * cut.blocks.kv
    widths = [(0, 0), (0, 0)]
    widths += [
        (0, 0 if given == 1 else whole - given)
        for given, whole in zip(x.shape[2:], lengths, strict=True)
    ]
    return jnp.pad(x, widths)


def pad_rules(rules: Rules, cut: Cut) -> Rules:
    """The rules for whole blocks: padded queries see what the last one does, none sees padding."""
    more_q = cut.q_blocks * cut.blocks.q - cut.sizes.q_len
    more_k = cut.kv_blocks * cut.blocks.kv - cut.sizes.kv_len

    def edge(x_BS: Int32[Array, "B S"], more: int) -> Int32[Array, "..."]:
        return jnp.pad(x_BS, ((0, 0), (0, more)), mode="edge")

    start_BS = edge(jnp.maximum(rules.ranges.start_BS, 0), more_q)
    end_BS = edge(jnp.minimum(rules.ranges.end_BS, cut.sizes.kv_len), more_q)
    ids = rules.ids
    if ids is not None:
        ids = edge(ids[0], more_q), edge(ids[1], more_k)
    return rules._replace(
        ranges=KeyRanges(start_BS, end_BS), ids=ids, mask=pad_pairs(rules.mask, cut)
    )


def product(equation: str, x: Float[Array, "..."], y: Float[Array, "..."]) -> Float32[Array, "..."]:
    """A matrix product accumulated in float32; float32 factors are never cut to TF32."""
    precision = lax.Precision.HIGHEST if y.dtype == jnp.float32 else None
    return jnp.einsum(equation, x, y, precision=precision, preferred_element_type=jnp.float32)


def _to_columns(x_bhqk: Shaped[Array, "..."], cut: Cut) -> Shaped[Array, "#b #g #k #R"]:
    """[b, g*r, q, k], any of them 1, to [b, g, k, R]."""
    b, heads, q, k = x_bhqk.shape
    if heads == 1 and q == 1:
        return x_bhqk.swapaxes(2, 3)
    g, r = (1, 1) if heads == 1 else (cut.blocks.kv_heads, cut.share)
    x_bgkrq = x_bhqk.reshape(b, g, r, q, k).transpose(0, 1, 4, 2, 3)
    if (r, q) != (cut.share, cut.blocks.q):
        x_bgkrq = jnp.broadcast_to(x_bgkrq, (b, g, k, cut.share, cut.blocks.q))
    return x_bgkrq.reshape(b, g, k, cut.columns)
