"""Which bytes of a text corpus are held out from training for evaluation."""

import hashlib
import os
from collections.abc import Sequence

from ulysses_jax.data.source import Document

_LARGEST_SHARE = 4  # one document is at most this part of the budget, so that none decides a result


def heldout_budget(total: int, heldout_tokens: int) -> int:
    """The most tokens to hold out of `total`: `heldout_tokens`, but never more than a tenth."""
    return min(heldout_tokens, total // 10)


def heldout_bytes(documents: Sequence[Document], budget: int) -> list[int]:
    """How many bytes of each document, counted from its end, are held out; at most `budget` in all.

    Whole documents are taken in the order of a hash of their names, so that the choice neither
    follows the folder layout nor changes with the machine. A document of more than a quarter of the
    budget, or more than what is left of it, stays in training. Where that fills less than half of
    the budget (one text file, a few big ones), the remaining documents are taken in the same order
    and the last one is cut: its tail is held out.
    """
    order = sorted(range(len(documents)), key=lambda index: _name_hash(documents[index]))
    held = [0] * len(documents)
    left = budget
    for index in order:
        size = documents[index].size
        if size <= min(left, budget // _LARGEST_SHARE):
            held[index] = size
            left -= size
    if left > budget / 2:
        for index in order:
            if not held[index]:
                held[index] = min(documents[index].size, left)
                left -= held[index]
    return held


def _name_hash(document: Document) -> bytes:
    return hashlib.sha256(os.fsencode(document.name)).digest()
