"""How large the blocks of a call are: from its shapes, and from the blocks of its layout."""

import itertools

import numpy as np
from jaxtyping import Bool

from ulysses_jax.attention.block_layout import BlockLayout
from ulysses_jax.attention.blocks import BlockSizes
from ulysses_jax.attention.shapes import AttentionSizes

_LARGE = 512
_SMALL = 256
_MULTIPLE = 16
# What starting a tile costs, as rows and columns of scores.
_OVERHEAD = 64


def block_sizes(
    sizes: AttentionSizes, layout: BlockLayout | None = None, small: bool = False
) -> BlockSizes:
    """Tiles of about 512 x 512 scores; a sequence no longer than a block is one block.

    Longer sequences are cut evenly, so that little of the last block is padding. The query
    columns of a block are its queries times the heads that share keys. Where a tile would be
    smaller, a unit takes more heads, and then more rows. With a layout the blocks are multiples
    of its blocks: as large as pays for the unattended pairs that they bring along.

    Args:
        sizes: of the call.
        layout: the blocks that are attended, already through `cut_layout`.
        small: tiles of 256 x 256, which one core keeps in its cache. Several cores that share a
            tile need a larger one, or they wait for each other.
    """
    block = _SMALL if small else _LARGE
    share = sizes.heads // sizes.kv_heads
    most_queries = max(_MULTIPLE, block // share)
    if layout is None:
        q, kv = _even_block(sizes.q_len, most_queries), _even_block(sizes.kv_len, block)
    else:
        q, kv = _cheapest_blocks(layout, most_queries, block, share)
    room = block**2 // (q * share * kv)
    heads = _divisor(sizes.kv_heads, room)
    rows = 1
    if heads == sizes.kv_heads:
        rows = _divisor(sizes.batch, room // heads)
    return BlockSizes(q, kv, rows, heads)


def check_blocks(blocks: BlockSizes, sizes: AttentionSizes) -> None:
    """Refuses block sizes that do not cut a call into equal units.

    Raises:
        ValueError: a size is below 1, or does not divide what it has to.
    """
    if min(blocks) < 1:
        raise ValueError(f"blocks are {blocks}: use sizes of at least 1")
    if sizes.batch % blocks.rows or sizes.kv_heads % blocks.kv_heads:
        raise ValueError(
            f"blocks are {blocks}, but units of so many rows and kv heads do not divide the "
            f"{sizes.batch} rows and {sizes.kv_heads} kv heads of this call: use divisors"
        )
    if blocks.rows > 1 and blocks.kv_heads != sizes.kv_heads:
        raise ValueError(
            f"blocks are {blocks}, but a unit of several rows needs all {sizes.kv_heads} kv "
            f"heads: use kv_heads={sizes.kv_heads}, or rows=1"
        )


def cut_layout(layout: BlockLayout, q_len: int, kv_len: int) -> BlockLayout:
    """The same pairs in blocks of at most 512 where some of 64 or more divide the layout's.

    Raises:
        ValueError: none does, and a block of the layout is above 1024: a tile of the scores of a
            whole block would take as much memory as it has pairs.
    """
    q, kv = (_divisor(block, _LARGE) for block in (layout.q_block, layout.kv_block))
    q, kv = (
        small if small >= _OVERHEAD else block
        for small, block in ((q, layout.q_block), (kv, layout.kv_block))
    )
    if max(q, kv) > 2 * _LARGE:
        raise ValueError(
            f"the block layout has blocks of {layout.q_block} queries and {layout.kv_block} keys: "
            f"above {2 * _LARGE} use one that a number from {_OVERHEAD} to {_LARGE} divides"
        )
    if (q, kv) == (layout.q_block, layout.kv_block):
        return layout
    attended = np.repeat(layout.attended, layout.q_block // q, axis=1)
    attended = np.repeat(attended, layout.kv_block // kv, axis=2)
    # The last block may be shorter than whole: its cut blocks after the end are none.
    return BlockLayout(q, kv, attended[:, : -(-q_len // q), : -(-kv_len // kv)])


def whole_layout_blocks(blocks: BlockSizes, layout: BlockLayout) -> BlockSizes:
    """`blocks`, enlarged to whole blocks of the layout."""
    q, kv = (
        -(-given // whole) * whole
        for given, whole in ((blocks.q, layout.q_block), (blocks.kv, layout.kv_block))
    )
    return blocks._replace(q=q, kv=kv)


def _even_block(length: int, limit: int) -> int:
    if length <= limit:
        return length
    even = -(-length // -(-length // limit))
    return -(-even // _MULTIPLE) * _MULTIPLE


def _cheapest_blocks(
    layout: BlockLayout, most_queries: int, most_keys: int, share: int
) -> tuple[int, int]:
    """Multiples of the layout's blocks that cost least, visits and their sizes together."""
    choices = itertools.product(
        _multiples(layout.q_block, most_queries), _multiples(layout.kv_block, most_keys)
    )

    def cost(choice: tuple[int, int]) -> int:
        q, kv = choice
        visits = _visits(layout.attended, q // layout.q_block, kv // layout.kv_block)
        return visits * (q * share + _OVERHEAD) * (kv + _OVERHEAD)

    return min(choices, key=cost)


def _multiples(block: int, limit: int) -> list[int]:
    """`block` and its doubles up to the limit."""
    found = [block]
    while 2 * found[-1] <= limit:
        found.append(2 * found[-1])
    return found


def _visits(attended: Bool[np.ndarray, "H nq nk"], q_times: int, kv_times: int) -> int:
    """Pairs of blocks with anything attended when so many of the layout's blocks make one."""
    for axis, times in ((1, q_times), (2, kv_times)):
        starts = np.arange(0, attended.shape[axis], times)
        attended = np.logical_or.reduceat(attended, starts, axis=axis)
    return int(np.count_nonzero(attended))


def _divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` up to `limit`, and at least 1."""
    return max(i for i in range(1, number + 1) if number % i == 0 and i <= max(limit, 1))
