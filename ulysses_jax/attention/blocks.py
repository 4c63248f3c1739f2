"""How whole sequences are cut into blocks: sizes, layout, and which blocks a query block visits."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, Shaped

from ulysses_jax.attention.shapes import AttentionSizes
from ulysses_jax.attention.spec import KeyRanges

_LARGE_BLOCK = 512
_SMALL_BLOCK = 256
_MAX_SCORES = 4 * 2**20  # of one pair of blocks, over batch and heads: 16 MiB in float32
_ROW_MULTIPLE = 16


class BlockSizes(NamedTuple):
    """Queries and keys a block."""

    q: int
    kv: int


def block_sizes(sizes: AttentionSizes) -> BlockSizes:
    """Block sizes from the shapes alone; a sequence no longer than a block is one block.

    Large blocks keep the matrix products efficient, while batch * heads * q * kv scores exist at
    once. Longer sequences are cut evenly, so that little of the last block is padding.
    """
    heads = sizes.batch * sizes.heads
    limit = _LARGE_BLOCK if heads * _LARGE_BLOCK**2 <= _MAX_SCORES else _SMALL_BLOCK
    return BlockSizes(_even_block(sizes.q_len, limit), _even_block(sizes.kv_len, limit))


def _even_block(length: int, limit: int) -> int:
    if length <= limit:
        return length
    even = -(-length // -(-length // limit))
    return -(-even // _ROW_MULTIPLE) * _ROW_MULTIPLE


def to_blocks(x_BSHD: Shaped[Array, "B S H D"], groups: int, block: int) -> Shaped[Array, "..."]:
    """[B, S, H, D] to [n, B, g, R, D]: n blocks, R = H/g * block rows, zeros after the end.

    The rows of all heads that share a key/value head lie together, so that one matrix product
    serves them and k and v are never repeated.
    """
    batch, length, heads, dim = x_BSHD.shape
    count = -(-length // block)
    x_BSHD = jnp.pad(x_BSHD, ((0, 0), (0, count * block - length), (0, 0), (0, 0)))
    x_BnbgrD = x_BSHD.reshape(batch, count, block, groups, heads // groups, dim)
    x_nBgrbD = x_BnbgrD.transpose(1, 0, 3, 4, 2, 5)
    return x_nBgrbD.reshape(count, batch, groups, heads // groups * block, dim)


def from_blocks(
    x_nBgRD: Shaped[Array, "n B g R D"], length: int, block: int
) -> Shaped[Array, "..."]:
    """[n, B, g, R, D] back to [B, S, H, D] with S = `length`: the inverse of `to_blocks`."""
    count, batch, groups, rows, dim = x_nBgRD.shape
    x_nBgrbD = x_nBgRD.reshape(count, batch, groups, rows // block, block, dim)
    x_BnbgrD = x_nBgrbD.transpose(1, 0, 4, 2, 3, 5)
    return x_BnbgrD.reshape(batch, count * block, groups * rows // block, dim)[:, :length]


class QueryReach(NamedTuple):
    """Where the n query blocks look; `scan` hands out one query block's part.

    Key blocks outside [first, stop) hold no key of any row.
    """

    start_nB1R1: Int32[Array, "n B 1 R 1"]
    end_nB1R1: Int32[Array, "n B 1 R 1"]
    first_n: Int32[Array, " n"]
    stop_n: Int32[Array, " n"]

    @property
    def empty(self) -> Bool[Array, "n B 1 R 1"]:
        """The rows that have nothing to attend to."""
        return self.start_nB1R1 >= self.end_nB1R1


def query_reach(ranges: KeyRanges, sizes: AttentionSizes, blocks: BlockSizes) -> QueryReach:
    """The reach of each query block; padded queries have the empty range [0, 0)."""
    start_BS = jnp.maximum(ranges.start_BS, 0)
    end_BS = jnp.minimum(ranges.end_BS, sizes.kv_len)
    rows_per_query = sizes.heads // sizes.kv_heads
    start, end = (
        to_blocks(jnp.repeat(x_BS[:, :, None, None], rows_per_query, axis=2), 1, blocks.q)
        for x_BS in (start_BS, end_BS)
    )
    empty = start >= end
    rows = (1, 2, 3, 4)
    first = jnp.min(jnp.where(empty, sizes.kv_len, start), axis=rows) // blocks.kv
    stop = -(-jnp.max(jnp.where(empty, 0, end), axis=rows) // blocks.kv)
    return QueryReach(start, end, first, stop)
