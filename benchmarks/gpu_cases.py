"""The calls that every kernel is checked on: windows, packing, head dims, ragged sizes."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ulysses_jax.attention.spec import AttentionSpec


@dataclass(frozen=True)
class Case:
    """One call, bfloat16.

    Attributes:
      name: what it tries.
      spec: makes the spec; called inside the jitted function, so that its ints are static.
      q_len, kv_len, heads, kv_heads, head_dim: the sizes.
    """

    name: str
    spec: Callable[[], AttentionSpec]
    q_len: int
    kv_len: int
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 128


def cases(tiny: bool) -> list[Case]:
    """The cases, the most telling first; `tiny` makes the sequences short."""
    length = 64 if tiny else 1024
    ragged = length - 27

    def make(
        name: str,
        spec: Callable[[], AttentionSpec],
        q_len: int = length,
        kv_len: int | None = None,
        kv_heads: int = 4,
        head_dim: int = 128,
    ) -> Case:
        keys = q_len if kv_len is None else kv_len
        return Case(name, spec, q_len, keys, kv_heads=kv_heads, head_dim=head_dim)

    def causal() -> AttentionSpec:
        return AttentionSpec(causal=True)

    def packed(length: int, contiguous: bool) -> Callable[[], AttentionSpec]:
        ids = _documents(length)
        if not contiguous:
            ids = ids % 3
        return lambda: AttentionSpec(causal=True, q_segment_ids=ids, contiguous_segments=contiguous)

    window = length // 8
    return [
        make("causal", causal),
        make("causal, window", lambda: AttentionSpec(causal=True, window=(window - 1, 0))),
        make("causal, packed", packed(length, contiguous=True)),
        make("causal, head dim 64", causal, head_dim=64),
        make("causal, packed, ids recur", packed(length, contiguous=False)),
        make("causal, ragged length", causal, q_len=ragged),
        make("causal, grouped kv heads", causal, kv_heads=2),
        make("full", AttentionSpec),
        make("causal, head dim 256", causal, head_dim=256),
        make("key lengths", lambda: AttentionSpec(kv_lengths=np.array([ragged, 5], np.int32))),
        make("causal, packed, ragged", packed(ragged, contiguous=True), q_len=ragged),
        make("window on both sides", lambda: AttentionSpec(window=(window, window))),
        make("full, more keys than queries", AttentionSpec, q_len=length // 2, kv_len=length),
        make("causal, head dim 80", causal, head_dim=80),
    ]


def _documents(length: int) -> np.ndarray:
    """Ids of unequal documents in two rows, [2, length]: 0, 1, 2, …"""
    cuts = [[length // 7, length // 3, length // 2, length - 5], [1, length // 4, length // 2]]
    positions = np.arange(length)
    return np.stack([np.searchsorted(c, positions, side="right") for c in cuts]).astype(np.int32)
