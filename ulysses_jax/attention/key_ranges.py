"""The one range of keys that holds all a query may attend to: from windows, lengths, segments."""

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Int32

Bound: TypeAlias = int | Int[Array, ""]


class KeyRanges(NamedTuple):
    """Query i of row b attends to no key outside `start_BS[b, i] <= key < end_BS[b, i]`.

    A range with `start >= end` is empty: the query attends to nothing.
    """

    start_BS: Int32[Array, "B S"]
    end_BS: Int32[Array, "B S"]

    def intersect(self, other: "KeyRanges") -> "KeyRanges":
        """The keys that are in both ranges."""
        return KeyRanges(
            jnp.maximum(self.start_BS, other.start_BS), jnp.minimum(self.end_BS, other.end_BS)
        )


def all_keys(batch: int, q_len: int, kv_len: int) -> KeyRanges:
    """Every query sees every key."""
    shape = (batch, q_len)
    return KeyRanges(jnp.zeros(shape, jnp.int32), jnp.full(shape, kv_len, jnp.int32))


def window_ranges(left: Bound | None, right: Bound | None, q_len: int, kv_len: int) -> KeyRanges:
    """Query i sees the keys from `i - left` to `i + right`, both included; [1, S] ranges.

    None is a side without limit.
    """
    query_S = jnp.arange(q_len, dtype=jnp.int32)
    start_BS, end_BS = all_keys(1, q_len, kv_len)
    limit = q_len + kv_len
    if left is not None:
        start_BS = jnp.maximum(start_BS, query_S - bounded(left, limit))
    if right is not None:
        end_BS = jnp.minimum(end_BS, query_S + bounded(right, limit) + 1)
    return KeyRanges(start_BS, end_BS)


def bounded(value: Bound, limit: int) -> int | Int32[Array, ""]:
    """`value` cut to +-`limit`, so that a side of 2^31 - 1 and more overflows no int32."""
    if isinstance(value, int | np.integer | np.ndarray):
        return max(-limit, min(int(value), limit))
    return jnp.clip(value, -limit, limit).astype(jnp.int32)


def lengths_within(kv_lengths_B: Int[Array, " B"], kv_len: int) -> Int32[Array, " B"]:
    """The lengths cut to 0 … `kv_len`, before a cast could turn one around."""
    lengths_B = jnp.asarray(kv_lengths_B)
    if jnp.iinfo(lengths_B.dtype).bits < 32:
        lengths_B = lengths_B.astype(jnp.int32)
    return jnp.clip(lengths_B, 0, kv_len).astype(jnp.int32)


def as_ids(ids: Int[Array, "..."]) -> Int[Array, "..."]:
    """Segment ids as int32; those of 64 bits stay so, as two of them may end in the same 32."""
    ids = jnp.asarray(ids)
    return ids if jnp.iinfo(ids.dtype).bits > 32 else ids.astype(jnp.int32)


def length_ranges(kv_lengths_B: Int[Array, " B"], kv_len: int) -> KeyRanges:
    """The first `kv_lengths_B[b]` keys; [B, 1] ranges."""
    end_B1 = lengths_within(kv_lengths_B, kv_len)[:, None]
    return KeyRanges(jnp.zeros_like(end_B1), end_B1)


def run_ranges(ids_BS: Int[Array, "B S"]) -> KeyRanges:
    """The run of equal neighbouring ids that each position belongs to, in O(B * S)."""
    length = ids_BS.shape[1]
    position_S = jnp.arange(length, dtype=jnp.int32)
    differs = ids_BS[:, 1:] != ids_BS[:, :-1]
    opens_BS = jnp.pad(differs, ((0, 0), (1, 0)), constant_values=True)
    closes_BS = jnp.pad(differs, ((0, 0), (0, 1)), constant_values=True)
    start_BS = lax.cummax(jnp.where(opens_BS, position_S, 0), axis=1)
    end_BS = lax.cummin(jnp.where(closes_BS, position_S + 1, length), axis=1, reverse=True)
    return KeyRanges(start_BS, end_BS)


def self_ranges(ids_BS: Int[Array, "B S"]) -> KeyRanges:
    """From the first to the last position with the same id.

    Where the ids never decrease along a row, these are runs, and nothing has to be sorted.
    """
    ids_BS = jnp.asarray(ids_BS)
    return lax.cond(
        jnp.all(ids_BS[:, 1:] >= ids_BS[:, :-1]),
        run_ranges,
        lambda ids_BS: cross_ranges(ids_BS, ids_BS),
        ids_BS,
    )


def cross_ranges(q_ids_BS: Int[Array, "B S"], kv_ids_BT: Int[Array, "B T"]) -> KeyRanges:
    """From the first to the last key that has the id of the query; [0, 0) where no key has it."""

    def one_row(q_ids_S: Int[Array, " S"], kv_ids_T: Int[Array, " T"]) -> KeyRanges:
        # Stable, so that the keys of one id stay in the order of their positions.
        order_T = jnp.argsort(kv_ids_T, stable=True).astype(jnp.int32)
        sorted_T = kv_ids_T[order_T]
        low_S = jnp.searchsorted(sorted_T, q_ids_S, side="left")
        high_S = jnp.searchsorted(sorted_T, q_ids_S, side="right")
        found_S = low_S < high_S
        first_S = order_T[jnp.minimum(low_S, kv_ids_T.size - 1)]
        last_S = order_T[jnp.maximum(high_S - 1, 0)]
        return KeyRanges(jnp.where(found_S, first_S, 0), jnp.where(found_S, last_S + 1, 0))

    return jax.vmap(one_row)(jnp.asarray(q_ids_BS), jnp.asarray(kv_ids_BT))
