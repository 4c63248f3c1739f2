"""Which keys each query attends to and how, described without ever building an S x T mask."""

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ulysses_jax.attention import spec_checks
from ulysses_jax.attention.block_layout import BlockLayout
from ulysses_jax.attention.dropout import Dropout
from ulysses_jax.attention.key_ranges import (
    Bound,
    KeyRanges,
    all_keys,
    cross_ranges,
    length_ranges,
    run_ranges,
    self_ranges,
    window_ranges,
)

SegmentIds: TypeAlias = tuple[Int[Array, "B S"], Int[Array, "B T"]]


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Describes the attended pairs of one call; conditions given together must all hold.

    A pytree: arrays, and ints in `window`, are traced leaves, so one compiled program serves many
    packings, lengths and windows. `causal`, `contiguous_segments`, `block_layout` and offsets
    that are Python ints are static. A query with nothing to attend to gives 0.

    Attributes:
        causal: query i attends to the keys j <= i. Both counts start at 0, also when S != T (the
            top-left alignment of `jax.nn.dot_product_attention`).
        q_segment_ids: [B, S] integers. A query attends to the keys of its own id only, wherever
            they stand; to nothing if no key has its id.
        kv_segment_ids: [B, T] integers; None means self-attention, where the keys have the
            segments of the queries.
        kv_lengths: [B] integers. Row b attends to its first `kv_lengths[b]` keys only.
        window: (left, right). Query i attends to the keys i - left <= j <= i + right; None is a
            side without limit. It cuts whole sequences, whatever their segments.
        contiguous_segments: a promise that no id of a row of keys comes back after another one.
            Each segment is then one range of keys, which is all that a kernel has to know.
            Results are undefined where the promise is broken; it is checked on numpy arrays only.
        block_layout: blocks of pairs that are attended, a table for all heads or for each global
            head.
        mask: [B|1, h|1, S|1, T|1], True where attended, of the heads of this call.
        bias: [B|1, h|1, S|1, T|1], added to the scaled scores, of the heads of this call. It has
            a gradient. A bias of -inf rules a pair out as the mask does.
        dropout: drops softmax weights. The log-sum-exp is of the scores before dropout.
        first_row: global index of this call's first batch row: dropout counts from it.
        first_head: global index of this call's first query head: dropout and `block_layout`
            count from it.

    Example:
        >>> ids = jnp.array([[0, 0, 0, 1, 1]])
        >>> spec = AttentionSpec(causal=True, q_segment_ids=ids, contiguous_segments=True)
        >>> start_BS, end_BS = spec.key_ranges(batch=1, q_len=5, kv_len=5)
        >>> start_BS.tolist(), end_BS.tolist()
        ([[0, 0, 0, 3, 3]], [[1, 2, 3, 4, 5]])
    """

    causal: bool = False
    q_segment_ids: Int[Array, "B S"] | None = None
    kv_segment_ids: Int[Array, "B T"] | None = None
    kv_lengths: Int[Array, " B"] | None = None
    window: tuple[Bound | None, Bound | None] | None = None
    contiguous_segments: bool = False
    block_layout: BlockLayout | None = None
    mask: Bool[Array, "..."] | None = None
    bias: Float[Array, "..."] | None = None
    dropout: Dropout | None = None
    first_row: int | Int[Array, ""] = 0
    first_head: int | Int[Array, ""] = 0

    @property
    def recurring(self) -> bool:
        """Whether `key_ranges` may hold keys of other segments, so that ids must be compared."""
        return self.q_segment_ids is not None and not self.contiguous_segments

    def check(self, batch: int, q_len: int, kv_len: int, heads: int) -> None:
        """Refuses a spec that does not fit a call of these sizes; `heads` are the query heads.

        Raises:
            ValueError: an array has a wrong shape or dtype, a number is out of range, or the key
                side of the segments cannot be told.
        """
        self._check_ranges(batch, q_len, kv_len)
        spec_checks.check_offset("first_row", self.first_row)
        spec_checks.check_offset("first_head", self.first_head)
        shape = (batch, heads, q_len, kv_len)
        if self.mask is not None:
            spec_checks.check_pairs("mask", self.mask, jnp.bool_, shape)
        if self.bias is not None:
            spec_checks.check_pairs("bias", self.bias, jnp.floating, shape)
        spec_checks.check_dropout(self.dropout)
        if self.block_layout is not None:
            self.block_layout.check(q_len, kv_len, heads, self.first_head)

    def segment_ids(self, batch: int, q_len: int, kv_len: int) -> SegmentIds | None:
        """The ids of queries and keys, or None where there are no segments.

        Raises:
            ValueError: they do not fit a call of these sizes.
        """
        q_ids, kv_ids = self.q_segment_ids, self.kv_segment_ids
        spec_checks.check_segments(q_ids, kv_ids, batch, q_len, kv_len)
        if q_ids is None:
            return None
        return q_ids, q_ids if kv_ids is None else kv_ids

    def key_ranges(self, batch: int, q_len: int, kv_len: int) -> KeyRanges:
        """One range of keys a query, in O(B * (S + T)) memory.

        It holds every key that causality, window, lengths and segments allow; mask, bias and
        block layout are left out. Unless `recurring`, every key in it is allowed. If so, it
        reaches from the first to the last key of the id, cut by the other conditions.

        Raises:
            ValueError: what it is made from does not fit a call of these sizes.
        """
        self._check_ranges(batch, q_len, kv_len)
        ranges = all_keys(batch, q_len, kv_len)
        segments = self.segment_ids(batch, q_len, kv_len)
        if segments is not None:
            ranges = ranges.intersect(self._segment_ranges(*segments))
        if self.kv_lengths is not None:
            ranges = ranges.intersect(length_ranges(self.kv_lengths, kv_len))
        if self.window is not None:
            ranges = ranges.intersect(window_ranges(*self.window, q_len, kv_len))
        if self.causal:
            ranges = ranges.intersect(window_ranges(None, 0, q_len, kv_len))
        return ranges

    def _segment_ranges(
        self, q_ids_BS: Int[Array, "B S"], kv_ids_BT: Int[Array, "B T"]
    ) -> KeyRanges:
        if self.kv_segment_ids is not None:
            return cross_ranges(q_ids_BS, kv_ids_BT)
        return run_ranges(q_ids_BS) if self.contiguous_segments else self_ranges(q_ids_BS)

    def _check_ranges(self, batch: int, q_len: int, kv_len: int) -> None:
        spec_checks.check_flag("causal", self.causal)
        spec_checks.check_flag("contiguous_segments", self.contiguous_segments)
        segments = self.segment_ids(batch, q_len, kv_len)
        if segments is not None and self.contiguous_segments:
            side = "q" if self.kv_segment_ids is None else "kv"
            spec_checks.check_contiguous(f"{side}_segment_ids", segments[1])
        if self.kv_lengths is not None:
            spec_checks.check_integers("kv_lengths", self.kv_lengths, (batch,))
        spec_checks.check_window(self.window)


_STATIC = ("causal", "contiguous_segments", "block_layout")
_TRACED = ("q_segment_ids", "kv_segment_ids", "kv_lengths", "window", "mask", "bias", "dropout")
_OFFSETS = ("first_row", "first_head")


# `register_dataclass` would make a leaf of each default offset, and so a spec with [B, S] arrays
# alone could not be given one PartitionSpec or one vmap axis.
def _flatten_with_keys(spec: AttentionSpec) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
    children, static = [(name, getattr(spec, name)) for name in _TRACED], []
    for name in _OFFSETS:
        value = getattr(spec, name)
        fixed = isinstance(value, int)
        children.append((name, None if fixed else value))
        static.append(value if fixed else None)
    keyed = [(jax.tree_util.GetAttrKey(name), child) for name, child in children]
    return keyed, (*(getattr(spec, name) for name in _STATIC), *static)


def _unflatten(static: tuple[Any, ...], children: Any) -> AttentionSpec:
    fields = dict(zip((*_STATIC, *_OFFSETS), static, strict=True))
    for name, child in zip((*_TRACED, *_OFFSETS), children, strict=True):
        if name not in _OFFSETS or fields[name] is None:
            fields[name] = child
    return AttentionSpec(**fields)


jax.tree_util.register_pytree_with_keys(AttentionSpec, _flatten_with_keys, _unflatten)
