"""The bigram entropy against counts by hand."""

import math

import numpy as np
import pytest

from ulysses_jax.data import bigram
from ulysses_jax.data.bigram import bigram_entropy
from ulysses_jax.data.store import TokenStore


def store_of(tokens, dtype=np.uint8) -> TokenStore:
    return TokenStore(np.array(list(tokens), dtype), np.zeros(1, np.int64))


@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_entropy_is_that_of_add_one_counts(monkeypatch, chunk):
    monkeypatch.setattr(bigram, "_CHUNK_TOKENS", chunk)
    train = store_of(b"ababac")  # ab ba ab ba ac
    heldout = store_of(b"abc")
    expected = -(math.log2(3 / (256 + 3)) + math.log2(1 / (256 + 2))) / 2
    assert bigram_entropy(train, heldout) == pytest.approx(expected, rel=1e-12)


def test_counts_do_not_overflow_at_the_largest_byte():
    assert bigram_entropy(store_of([255] * 9), store_of([255, 255])) == pytest.approx(
        math.log2((256 + 8) / 9)
    )


def test_tokens_that_are_not_bytes_are_refused():
    with pytest.raises(ValueError, match=r"not of uint16 tokens; use it for text"):
        bigram_entropy(store_of([1, 2]), store_of([1, 2], np.uint16))


def test_heldout_part_without_a_pair_is_refused():
    with pytest.raises(ValueError, match=r"has 1 tokens, at least 2 are needed"):
        bigram_entropy(store_of([1, 2]), store_of([1]))
