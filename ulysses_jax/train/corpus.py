"""The corpus that `data.*` describes, and whether its tokens are text."""

from pathlib import Path

from ulysses_jax.data.store import Corpus, prepare
from ulysses_jax.train.config import DataConfig


def open_corpus(config: DataConfig) -> Corpus:
    """Opens the token stores, making them first where no cache holds them.

    Raises:
      ValueError: the source or an option is wrong (see `prepare`).
    """
    return prepare(
        config.source,
        Path(config.cache_dir).expanduser(),
        heldout_tokens=config.heldout_tokens,
        token_dtype=config.token_dtype,
        document_end=config.document_end,
    )


def is_text(source: str) -> bool:
    """Whether tokens are the bytes of a text; those of a `.bin` are a tokenizer's."""
    return Path(source).suffix != ".bin" or Path(source).is_dir()
