"""How one call is cut: its units of rows and heads, and the blocks of their queries and keys.

A unit is a part of the batch rows and key/value heads that is computed by itself, one after the
other. Within it, b counts rows, g key/value heads, n query blocks, m key blocks, k the keys of a
block and R its query columns: the queries of the block for each head that shares a key/value head.
One matrix product so serves all those heads, and keys and values are never repeated.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, Shaped

from ulysses_jax.attention.padding import pad_to_multiple
from ulysses_jax.attention.shapes import AttentionSizes


class BlockSizes(NamedTuple):
    """Queries and keys a block, batch rows and key/value heads a unit.

    Rows and heads a unit must divide those of the call, and several rows need all its heads.
    """

    q: int
    kv: int
    rows: int = 1
    kv_heads: int = 1


class Place(NamedTuple):
    """The first batch row and key/value head of a unit."""

    row: Int32[Array, ""]
    kv_head: Int32[Array, ""]


class Cut(NamedTuple):
    """The sizes of a call and of its parts; static."""

    sizes: AttentionSizes
    blocks: BlockSizes

    @property
    def share(self) -> int:
        """Query heads that share a key/value head."""
        return self.sizes.heads // self.sizes.kv_heads

    @property
    def columns(self) -> int:
        """Query columns R of a block."""
        return self.share * self.blocks.q

    @property
    def q_blocks(self) -> int:
        return -(-self.sizes.q_len // self.blocks.q)

    @property
    def kv_blocks(self) -> int:
        return -(-self.sizes.kv_len // self.blocks.kv)

    @property
    def units(self) -> int:
        return (self.sizes.batch // self.blocks.rows) * self._units_a_row

    @property
    def _units_a_row(self) -> int:
        return self.sizes.kv_heads // self.blocks.kv_heads

    def place(self, unit: Int32[Array, ""]) -> Place:
        """Where unit number `unit` begins."""
        rows, heads = jnp.divmod(unit, self._units_a_row)
        return Place(rows * self.blocks.rows, heads * self.blocks.kv_heads)

    def queries(self, x_BShD: Shaped[Array, "B S h D"], place: Place) -> Shaped[Array, "..."]:
        """A unit's [n, b, g, R, D], zeros after the end."""
        b, g, r = self.blocks.rows, self.blocks.kv_heads, self.share
        size = (b, self.sizes.q_len, g * r, x_BShD.shape[3])
        x_bShD = lax.dynamic_slice(x_BShD, corner(place.row, 0, place.kv_head * r, 0), size)
        x_bShD = pad_to_multiple(x_bShD, 1, self.blocks.q)
        x_bnqgrD = x_bShD.reshape(b, self.q_blocks, self.blocks.q, g, r, -1)
        return x_bnqgrD.transpose(1, 0, 3, 4, 2, 5).reshape(self.q_blocks, b, g, self.columns, -1)

    def statistics(
        self, x_BhS: Shaped[Array, "B h S"], place: Place, padding: float
    ) -> Shaped[Array, "..."]:
        """A unit's [n, b, g, 1, R], `padding` after the end."""
        b, g, r = self.blocks.rows, self.blocks.kv_heads, self.share
        size = (b, g * r, self.sizes.q_len)
        x_bhS = lax.dynamic_slice(x_BhS, corner(place.row, place.kv_head * r, 0), size)
        x_bhS = pad_to_multiple(x_bhS, 2, self.blocks.q, padding)
        x_bgrnq = x_bhS.reshape(b, g, r, self.q_blocks, self.blocks.q)
        return x_bgrnq.transpose(3, 0, 1, 2, 4).reshape(self.q_blocks, b, g, 1, self.columns)

    def keys(self, x_BTgD: Shaped[Array, "B T g D"], place: Place) -> Shaped[Array, "m b g k D"]:
        """A unit's [m, b, g, k, D], zeros after the end."""
        b, g = self.blocks.rows, self.blocks.kv_heads
        size = (b, self.sizes.kv_len, g, x_BTgD.shape[3])
        x_bTgD = lax.dynamic_slice(x_BTgD, corner(place.row, 0, place.kv_head, 0), size)
        x_bTgD = pad_to_multiple(x_bTgD, 1, self.blocks.kv)
        return x_bTgD.reshape(b, self.kv_blocks, self.blocks.kv, g, -1).transpose(1, 0, 3, 2, 4)

    def put_queries(
        self, x_BShD: Shaped[Array, "B S h D"], x_nbgRD: Shaped[Array, "n b g R D"], place: Place
    ) -> Shaped[Array, "B S h D"]:
        """Writes a unit's blocks where `queries` read them."""
        n, b, g, _, dim = x_nbgRD.shape
        x_nbgrqD = x_nbgRD.reshape(n, b, g, self.share, self.blocks.q, dim)
        x_bnqgrD = x_nbgrqD.transpose(1, 0, 4, 2, 3, 5)
        x_bShD = x_bnqgrD.reshape(b, -1, g * self.share, dim)[:, : self.sizes.q_len]
        at = corner(place.row, 0, place.kv_head * self.share, 0)
        return lax.dynamic_update_slice(x_BShD, x_bShD.astype(x_BShD.dtype), at)

    def put_statistics(
        self, x_BhS: Shaped[Array, "B h S"], x_nbg1R: Shaped[Array, "n b g 1 R"], place: Place
    ) -> Shaped[Array, "B h S"]:
        """Writes a unit's blocks where `statistics` read them."""
        n, b, g, _, _ = x_nbg1R.shape
        x_bgrnq = x_nbg1R.reshape(n, b, g, self.share, self.blocks.q).transpose(1, 2, 3, 0, 4)
        x_bhS = x_bgrnq.reshape(b, g * self.share, -1)[:, :, : self.sizes.q_len]
        at = corner(place.row, place.kv_head * self.share, 0)
        return lax.dynamic_update_slice(x_BhS, x_bhS, at)

    def put_keys(
        self, x_BTgD: Shaped[Array, "B T g D"], x_mbgkD: Shaped[Array, "m b g k D"], place: Place
    ) -> Shaped[Array, "B T g D"]:
        """Writes a unit's blocks where `keys` read them."""
        _, b, g, _, dim = x_mbgkD.shape
        x_bTgD = x_mbgkD.transpose(1, 0, 3, 2, 4).reshape(b, -1, g, dim)[:, : self.sizes.kv_len]
        at = corner(place.row, 0, place.kv_head, 0)
        return lax.dynamic_update_slice(x_BTgD, x_bTgD.astype(x_BTgD.dtype), at)


def corner(*starts: int | Int32[Array, ""]) -> tuple[Int32[Array, ""], ...]:
    """Where a slice starts, all of one integer type, as slices need (also with 64-bit types on)."""
    return tuple(jnp.asarray(start, jnp.int32) for start in starts)
