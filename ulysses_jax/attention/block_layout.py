"""Static tables of the blocks of pairs that are attended, and the field's patterns of them."""

import dataclasses
import hashlib
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int


@dataclasses.dataclass(frozen=True, eq=False)
class BlockLayout:
    """Query i and key j attend only if `attended[head, i // q_block, j // kv_block]`.

    Static: it is hashed and compared by content, so that a program is compiled once a layout and
    blocks that nobody attends to can be left out of it. Combine it with `causal` and the other
    conditions of a spec for what happens inside a block.

    Attributes:
        q_block, kv_block: queries and keys a block, of any size; the last block may be shorter.
        attended: bool [1, nq, nk] for all heads, or [H, nq, nk] for the H heads of the whole
            model, with nq = ceil(S / q_block) and nk = ceil(T / kv_block). Copied.

    Raises:
        ValueError: a block size is no positive integer, or the table is no bool [., nq, nk].

    Example:
        >>> longformer(length=10, block=4).attended.shape  # ceil(10 / 4) blocks a side
        (1, 3, 3)
        >>> layout = BlockLayout(q_block=4, kv_block=2, attended=np.ones((1, 3, 5), bool))
        >>> layout.check(q_len=10, kv_len=10, heads=8, first_head=0)
    """

    q_block: int
    kv_block: int
    attended: Bool[np.ndarray, "H nq nk"]
    _identity: tuple[int, int, tuple[int, ...], bytes] = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("q_block", "kv_block"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} is {size!r}: use an integer of at least 1")
        table = np.array(self.attended)
        if table.dtype != np.bool_ or table.ndim != 3 or 0 in table.shape:
            raise ValueError(
                f"attended is {table.dtype}{list(table.shape)}, but a block layout needs bool "
                "[1 or heads, query blocks, key blocks]"
            )
        table.flags.writeable = False
        object.__setattr__(self, "attended", table)
        # Once: a table may be large, and a jitted call looks its program up by it.
        digest = hashlib.sha256(table.tobytes()).digest()
        object.__setattr__(self, "_identity", (self.q_block, self.kv_block, table.shape, digest))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockLayout) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def check(self, q_len: int, kv_len: int, heads: int, first_head: int | Array) -> None:
        """Refuses a call of other lengths, or with heads that have no table.

        Raises:
            ValueError: the number of blocks or of heads is not the layout's. The heads of a
                traced `first_head` are only compared in number.
        """
        tables, *blocks = self.attended.shape
        for side, length, block, given in zip(
            ("q", "kv"), (q_len, kv_len), (self.q_block, self.kv_block), blocks, strict=True
        ):
            needed = -(-length // block)
            if given != needed:
                raise ValueError(
                    f"the block layout has {given} {side} blocks of {block}, but a length of "
                    f"{length} needs {needed}: make the layout for this length"
                )
        stop = heads + (int(first_head) if isinstance(first_head, int | np.integer) else 0)
        if tables != 1 and stop > tables:
            raise ValueError(
                f"the block layout has tables for {tables} heads, but this call reaches head "
                f"{stop - 1}: give 1 table, or one for each head of the whole model"
            )

    def tables(
        self, heads: int, first_head: int | Int[Array, ""]
    ) -> Bool[Array | np.ndarray, "h nq nk"]:
        """The tables of the heads from `first_head` on, or [1, nq, nk] where all share one.

        A numpy array unless `first_head` is traced.
        """
        if self.attended.shape[0] == 1:
            return self.attended
        if isinstance(first_head, int | np.integer):
            return self.attended[first_head : first_head + heads]
        return lax.dynamic_slice_in_dim(jnp.asarray(self.attended), first_head, heads)


def fixed(
    length: int,
    block: int,
    *,
    local_blocks: int = 4,
    global_blocks: int = 1,
    heads: int = 1,
    patterns: int = 1,
) -> BlockLayout:
    """Strides of blocks that attend to each other, and summary blocks that all attend to.

    The fixed pattern of Sparse Transformers (Child et al. 2019, section 4.3), with the parameters
    of DeepSpeed's `FixedSparsityConfig` (without its horizontal global attention). Under `causal`
    it is its unidirectional form.

    Args:
        length: queries, and keys, of the whole sequence.
        block: queries, and keys, of a block.
        local_blocks: blocks a stride.
        global_blocks: how many of each stride are its summary: the last ones.
        heads: tables to make.
        patterns: head i takes the `i % patterns`-th group of `global_blocks` from a stride's end.

    Raises:
        ValueError: a number is below 1, or a stride has too few blocks for its patterns.
    """
    _require_positive(
        length=length,
        block=block,
        local_blocks=local_blocks,
        global_blocks=global_blocks,
        heads=heads,
        patterns=patterns,
    )
    if patterns * global_blocks > local_blocks:
        raise ValueError(
            f"{patterns} patterns of {global_blocks} global blocks need "
            f"{patterns * global_blocks} blocks, but local_blocks is {local_blocks}: raise it"
        )
    count = -(-length // block)
    index_n = np.arange(count)
    local_nn = index_n[:, None] // local_blocks == index_n // local_blocks
    attended_Hnn = np.repeat(local_nn[None], heads, axis=0)
    for head in range(heads):
        first = local_blocks - (1 + head % patterns) * global_blocks
        for stride in range(0, count, local_blocks):
            # The last stride may be short: its summary moves up to the end of the sequence.
            start = max(0, min(stride + first, count - global_blocks))
            attended_Hnn[head, :, start : start + global_blocks] = True
    return BlockLayout(block, block, attended_Hnn)


def longformer(
    length: int, block: int, *, window_blocks: int = 1, global_blocks: Sequence[int] = (0,)
) -> BlockLayout:
    """A window of blocks, and global blocks that attend to all and that all attend to.

    Sliding window and global attention of Longformer (Beltagy et al. 2020, section 3.1).

    Args:
        length: queries, and keys, of the whole sequence.
        block: queries, and keys, of a block.
        window_blocks: blocks that a block sees on each side of itself.
        global_blocks: indices of the global blocks.

    Raises:
        ValueError: a number is out of range.
    """
    _require_positive(length=length, block=block)
    count = -(-length // block)
    if window_blocks < 0:
        raise ValueError(f"window_blocks is {window_blocks}: use 0 or more")
    for index in global_blocks:
        if not 0 <= index < count:
            raise ValueError(f"global block {index} is none of the {count}: use 0 to {count - 1}")
    index_n = np.arange(count)
    attended_nn = abs(index_n[:, None] - index_n) <= window_blocks
    attended_nn[:, list(global_blocks)] = True
    attended_nn[list(global_blocks)] = True
    return BlockLayout(block, block, attended_nn[None])


def bigbird(
    length: int,
    block: int,
    *,
    window_blocks: int = 1,
    global_blocks: int = 1,
    random_blocks: int = 1,
    heads: int = 1,
    causal: bool = False,
    seed: int = 0,
) -> BlockLayout:
    """Longformer's window and global blocks, and blocks drawn at random for each block and head.

    BigBird's internal construction (Zaheer et al. 2020, section 2).

    Args:
        length: queries, and keys, of the whole sequence.
        block: queries, and keys, of a block.
        window_blocks: blocks that a block sees on each side of itself.
        global_blocks: how many blocks are global: the first ones.
        random_blocks: blocks drawn besides; all that are left, where fewer are.
        heads: tables to make, each with draws of its own.
        causal: draw from blocks before the query's only. Causality itself is the spec's.
        seed: of the draws, by numpy.

    Raises:
        ValueError: a number is out of range.
    """
    _require_positive(length=length, block=block, heads=heads)
    count = -(-length // block)
    if not 0 <= global_blocks <= count:
        raise ValueError(
            f"global_blocks is {global_blocks}: use 0 to {count}, the blocks there are"
        )
    if random_blocks < 0:
        raise ValueError(f"random_blocks is {random_blocks}: use 0 or more")
    base = longformer(
        length, block, window_blocks=window_blocks, global_blocks=range(global_blocks)
    )
    attended_Hnn = np.repeat(base.attended, heads, axis=0)
    draw = np.random.default_rng(seed)
    for table_nn in attended_Hnn:
        for row, attended_n in enumerate(table_nn):
            left = np.flatnonzero(~attended_n[: row if causal else count])
            attended_n[draw.permutation(left)[:random_blocks]] = True
    return BlockLayout(block, block, attended_Hnn)


def _require_positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} is {number!r}: use an integer of at least 1")
