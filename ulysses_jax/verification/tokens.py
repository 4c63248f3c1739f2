"""Changed tokens and what they changed: the two halves of every probe."""

import numpy as np
from jaxtyping import Bool, Float, Int


def exchange_tokens(
    tokens_BS: Int[np.ndarray, "B S"], where_BS: Bool[np.ndarray, "B S"]
) -> Int[np.ndarray, "B S"]:
    """Another id at each of these places, from the range of those that occur."""
    low, high = int(tokens_BS.min()), int(tokens_BS.max())
    others_BS = low + (tokens_BS.astype(np.int64) - low + 1) % (high - low + 1)
    return np.where(where_BS, others_BS, tokens_BS).astype(tokens_BS.dtype)


def change_of_places(
    before: Float[np.ndarray, "B S ..."], after: Float[np.ndarray, "B S ..."]
) -> Float[np.ndarray, "B S"]:
    """The largest change at each place: 0 only if all its values stayed exactly as they were.

    Infinite where a value became, or no longer is, NaN or infinite.
    """
    same = (before == after) | (np.isnan(before) & np.isnan(after))
    with np.errstate(invalid="ignore"):
        change = np.where(same, 0.0, np.abs(after - before))
    change = np.nan_to_num(change, nan=np.inf, posinf=np.inf)
    return change.reshape(*change.shape[:2], -1).max(-1, initial=0.0)
