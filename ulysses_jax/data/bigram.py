"""The bigram entropy of a text: what a model must beat to have learned more than byte pairs."""

import numpy as np
from jaxtyping import Int64

from ulysses_jax.data.store import TokenStore

_BYTES = 256
_CHUNK_TOKENS = 1 << 22


def bigram_entropy(train: TokenStore, heldout: TokenStore) -> float:
    """Bits per token of the held-out bytes under p(next | byte) counted on the training bytes.

    Counts are smoothed by adding one to each of the 256 successors of a byte. All neighbours count,
    also those on either side of a document boundary, as in training without a document mask.

    Raises:
        ValueError: a store's tokens are not bytes, or the held-out store has no pair to predict.
    """
    for store in (train, heldout):
        if store.tokens.dtype != np.uint8:
            raise ValueError(
                f"the bigram entropy is of bytes (uint8), not of {store.tokens.dtype} tokens; "
                "use it for text sources only"
            )
    if len(heldout) < 2:
        raise ValueError(
            f"the held-out part has {len(heldout)} tokens, at least 2 are needed to predict one; "
            "raise data.heldout_tokens or give more text"
        )
    smoothed = _pair_counts(train) + 1
    bits = -np.log2(smoothed / smoothed.sum(axis=1, keepdims=True))
    return float((_pair_counts(heldout) * bits).sum() / (len(heldout) - 1))


def _pair_counts(store: TokenStore) -> Int64[np.ndarray, "byte next"]:
    counts = np.zeros(_BYTES * _BYTES, np.int64)
    for start in range(0, len(store) - 1, _CHUNK_TOKENS):
        chunk = np.asarray(store.tokens[start : start + _CHUNK_TOKENS + 1], np.int32)
        counts += np.bincount(chunk[:-1] * _BYTES + chunk[1:], minlength=len(counts))
    return counts.reshape(_BYTES, _BYTES)
