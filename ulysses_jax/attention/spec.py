"""Which keys each query attends to, described without ever building an S x T mask."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


class KeyRanges(NamedTuple):
    """Query i of row b attends to the keys `start_BS[b, i] <= key < end_BS[b, i]`.

    A range with `start >= end` is empty: the query attends to nothing.
    """

    start_BS: Int[Array, "B S"]
    end_BS: Int[Array, "B S"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Describes the attended pairs of one call; conditions given together must all hold.

    A pytree: the arrays are traced leaves, so one compiled program serves many packings and
    lengths; `causal` is static.

    Attributes:
        causal: query i attends to the keys j <= i. Both counts start at 0, also when S != T (the
            top-left alignment of `jax.nn.dot_product_attention`).
        q_segment_ids: [B, S] integers. A query attends to the keys of its own segment only.
        kv_segment_ids: [B, T] integers; None means self-attention, where the keys have the
            segments of the queries.
        kv_lengths: [B] integers. Row b attends to its first `kv_lengths[b]` keys only.

    A segment is one contiguous run of equal ids on the key side, in any order of ids. An id that
    comes back after another one is not joined with its earlier run: in self-attention every run
    is a segment by itself, and with `kv_segment_ids` given the first run of the id is taken. An
    id of a query that no key has attends to nothing.
    """

    causal: bool = dataclasses.field(default=False, metadata={"static": True})
    q_segment_ids: Int[Array, "B S"] | None = None
    kv_segment_ids: Int[Array, "B T"] | None = None
    kv_lengths: Int[Array, " B"] | None = None

    def key_ranges(self, batch: int, q_len: int, kv_len: int) -> KeyRanges:
        """Lowers the description to one range of keys a query, in O(B * (S + T)) memory.

        Raises:
            ValueError: an array does not have the shape that `batch`, `q_len` and `kv_len` ask for,
                is not of integers, or the key side of the segments cannot be told.
        """
        start_BS = jnp.zeros((batch, q_len), jnp.int32)
        end_BS = jnp.full((batch, q_len), kv_len, jnp.int32)
        segments = self._segment_ranges(batch, q_len, kv_len)
        if segments is not None:
            start_BS, end_BS = segments
        if self.kv_lengths is not None:
            _require("kv_lengths", self.kv_lengths, (batch,))
            end_BS = jnp.minimum(end_BS, self.kv_lengths.astype(jnp.int32)[:, None])
        if self.causal:
            end_BS = jnp.minimum(end_BS, jnp.arange(1, q_len + 1, dtype=jnp.int32))
        return KeyRanges(start_BS, end_BS)

    def _segment_ranges(self, batch: int, q_len: int, kv_len: int) -> KeyRanges | None:
        if self.q_segment_ids is None:
            if self.kv_segment_ids is not None:
                raise ValueError(
                    "kv_segment_ids are given without q_segment_ids, so no query has a segment: "
                    "give q_segment_ids too"
                )
            return None
        _require("q_segment_ids", self.q_segment_ids, (batch, q_len))
        if self.kv_segment_ids is None:
            if q_len != kv_len:
                raise ValueError(
                    f"q_segment_ids alone describe self-attention, but there are {q_len} queries "
                    f"and {kv_len} keys: give kv_segment_ids too"
                )
            return _runs(self.q_segment_ids)
        _require("kv_segment_ids", self.kv_segment_ids, (batch, kv_len))
        return _runs_of(self.q_segment_ids, self.kv_segment_ids)


def _require(name: str, array: Array, shape: tuple[int, ...]) -> None:
    if array.shape != shape or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(
            f"{name} is {array.dtype}{list(array.shape)}, but this call needs integers of shape "
            f"{list(shape)}"
        )


def _runs(ids_BS: Int[Array, "B S"]) -> KeyRanges:
    """The run of equal neighbouring ids that each position belongs to."""
    length = ids_BS.shape[1]
    position_S = jnp.arange(length, dtype=jnp.int32)
    differs = ids_BS[:, 1:] != ids_BS[:, :-1]
    opens_BS = jnp.pad(differs, ((0, 0), (1, 0)), constant_values=True)
    closes_BS = jnp.pad(differs, ((0, 0), (0, 1)), constant_values=True)
    start_BS = lax.cummax(jnp.where(opens_BS, position_S, 0), axis=1)
    end_BS = lax.cummin(jnp.where(closes_BS, position_S + 1, length), axis=1, reverse=True)
    return KeyRanges(start_BS, end_BS)


def _runs_of(q_ids_BS: Int[Array, "B S"], kv_ids_BT: Int[Array, "B T"]) -> KeyRanges:
    """The first run of keys that has the id of each query; [0, 0) where no key has it."""

    def one_row(
        q_ids_S: Int[Array, " S"], kv_ids_T: Int[Array, " T"], run_end_T: Int[Array, " T"]
    ) -> KeyRanges:
        order_T = jnp.argsort(kv_ids_T, stable=True)
        rank_S = jnp.searchsorted(kv_ids_T[order_T], q_ids_S)
        first_S = order_T[jnp.minimum(rank_S, kv_ids_T.size - 1)].astype(jnp.int32)
        found_S = kv_ids_T[first_S] == q_ids_S
        return KeyRanges(jnp.where(found_S, first_S, 0), jnp.where(found_S, run_end_T[first_S], 0))

    return jax.vmap(one_row)(q_ids_BS, kv_ids_BT, _runs(kv_ids_BT).end_BS)
