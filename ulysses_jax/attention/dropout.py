"""Dropout of attention weights by a counter: which pairs are kept depends on no block or mesh."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key, UInt32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Dropout:
    """Drops each weight of the softmax with probability `rate`, and scales the rest by 1/(1-rate).

    The draw for a pair is a function of the key and of the *global* indices of batch row, query
    head, query and key, so the same pairs are dropped on any mesh and with any block size.

    Attributes:
        rate: probability in [0, 1); static.
        key: a PRNG key, new style or raw; the same on every device.
        broadcast: all rows and heads drop the same pairs (Flax's `broadcast_dropout`); static.

    Raises:
        ValueError: the rate is not from 0 to below 1.

    Example:
        >>> Dropout(rate=0.1, key=jax.random.key(0)).broadcast
        False
    """

    rate: float = dataclasses.field(metadata={"static": True})
    key: Key[Array, ""] | UInt32[Array, "2"]
    broadcast: bool = dataclasses.field(default=False, metadata={"static": True})

    def __post_init__(self) -> None:
        if not isinstance(self.rate, int | float) or not 0.0 <= self.rate < 1.0:
            raise ValueError(f"the dropout rate is {self.rate!r}: use a number from 0 to below 1")


def seed_words(key: Key[Array, ""] | UInt32[Array, "..."]) -> UInt32[Array, "2"]:
    """A key of any kind as the two words of a Threefry key; those of a Threefry key are its own."""
    words = jax.random.key_data(key)
    return words if words.shape == (2,) else jax.random.bits(key, (2,), jnp.uint32)


def query_words(
    dropout: Dropout,
    row_B: Int[Array, " B"],
    head_h: Int[Array, " h"],
    query_S: Int[Array, " S"],
) -> UInt32[Array, "B h S 2"]:
    """Two random words for each (row, head, query), given by their global indices.

    These come from Threefry, which costs O(S) here; only the pairs need the cheap `keep`.
    """
    if dropout.broadcast:
        row_B, head_h = jnp.zeros_like(row_B), jnp.zeros_like(head_h)
    fold = jax.random.fold_in
    key = jax.random.wrap_key_data(seed_words(dropout.key), impl="threefry2x32")
    key_B = jax.vmap(fold, (None, 0))(key, row_B)
    key_Bh = jax.vmap(jax.vmap(fold, (None, 0)), (0, None))(key_B, head_h)
    key_BhS = jax.vmap(jax.vmap(jax.vmap(fold, (None, 0)), (0, None)), (0, None))(key_Bh, query_S)
    return jax.random.key_data(key_BhS)


def keep(
    words_x2: UInt32[Array, "*x 2"], key_y: Int[Array, "*y"], rate: float
) -> Bool[Array, "*xy"]:
    """Whether each pair is kept, with probability 1 - `rate`: words and keys are broadcast.

    An integer hash of the key index: lowbias32 (Wellons, hash-prospector), whose two rounds are
    keyed with the two words of the query. One word would make a query's row a shifted or permuted
    copy of another's with probability 2^-32 a pair, which happens in long sequences; the second
    makes that negligible. The last shift of the hash is left out: only the high bits decide.
    """
    x = words_x2[..., 0] ^ key_y.astype(jnp.uint32)
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) ^ words_x2[..., 1]
    x = x * jnp.uint32(0x846CA68B)
    return x >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))
