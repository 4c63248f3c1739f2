"""Token stores: memory-mapped tokens and where their documents start.

Text becomes tokens once, in `<cache_dir>/<fingerprint>/` (written by `cache.py`, whose
`sha256.json` lies there too); the fingerprint is a hash of the documents' names and bytes and of
the split:

    train.tokens        uint8, a byte of text each: the training documents, one after the other
    train.starts        little-endian int64, the index of the first token of each document
    heldout.tokens      the same for the held-out documents
    heldout.starts

A `.bin` is mapped where it lies and never copied. If `data.document_end` names the token that ends
a document, the file is read through once to find them, and `<cache_dir>/<key>/` keeps

    starts              little-endian int64, as above

The key hashes the file's fingerprint (its size and some blocks of it, so that terabytes need not be
read) and its modification time. Held out is the tail of the `.bin`; but if it is named `train.bin`
and a `val.bin` lies beside it, training uses all of the first, and the start of the second is held
out. All files are headerless; the held-out part is always bounded by `data.heldout_tokens`.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt

from ulysses_jax.data.cache import ensure_folder
from ulysses_jax.data.heldout import heldout_budget, heldout_bytes
from ulysses_jax.data.source import (
    STANDARD_LIBRARY,
    Document,
    TextSource,
    TokenSource,
    read_chunks,
    resolve,
)

_FORMAT = b"ulysses_jax tokens 1"
_STARTS_DTYPE = np.dtype("<i8")
_SCAN_TOKENS = 1 << 24
_SAMPLED_BLOCKS = 16
_BLOCK_BYTES = 1 << 16


@dataclass(frozen=True, eq=False)
class TokenStore:
    """Tokens of documents that follow one another.

    Attributes:
        tokens: all tokens, usually memory-mapped; uint8 for bytes of text, else uint16 or uint32.
        document_starts: index of each document's first token, strictly increasing from 0.
    """

    tokens: UInt[np.ndarray, "tokens"]
    document_starts: Int64[np.ndarray, "documents"]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, eq=False)
class Corpus:
    """A training and a held-out store.

    Attributes:
        fingerprint: hex; equal for equal data and split, wherever they lie.
        description: one line for people: what was found, how it was split, what was left out.
    """

    train: TokenStore
    heldout: TokenStore
    fingerprint: str
    description: str


def prepare(
    source: str,
    cache_dir: str | os.PathLike[str],
    *,
    heldout_tokens: int = 200_000,
    token_dtype: str = "uint16",
    document_end: int | None = None,
) -> Corpus:
    """Opens the corpus that `source` names, tokenizing it first where no cache holds it.

    Safe to call in several processes at once, and after one was killed in the middle.

    Args:
        source: `python-stdlib`, a text file, a folder of texts or a `.bin` of tokens (`source.py`).
        cache_dir: where token stores are kept; made if missing.
        heldout_tokens: about how many tokens to hold out for evaluation; never more than a tenth of
            the corpus.
        token_dtype: `uint16` or `uint32`, the tokens of a `.bin`.
        document_end: the token that ends each document of a `.bin`, or None for one document.

    Raises:
        ValueError: the source or an option is wrong, or the cache cannot be used; the message names
            the value, its limit and the fix.
    """
    if heldout_tokens < 0:
        raise ValueError(
            f"data.heldout_tokens={heldout_tokens} is negative; give the number of tokens to hold "
            "out, such as 200000"
        )
    found = resolve(source, token_dtype=token_dtype, document_end=document_end)
    if isinstance(found, TextSource):
        label = source if source == STANDARD_LIBRARY else str(Path(source).expanduser())
        return _prepare_text(label, found, Path(cache_dir), heldout_tokens)
    return _prepare_tokens(found, Path(cache_dir), heldout_tokens)


def _prepare_text(label: str, source: TextSource, cache_dir: Path, heldout_tokens: int) -> Corpus:
    documents = source.documents
    total = sum(document.size for document in documents)
    held = heldout_bytes(documents, heldout_budget(total, heldout_tokens))
    fingerprint = _hash(
        *(
            part
            for document, cut in zip(documents, held, strict=True)
            for part in (os.fsencode(document.name), document.sha256.encode(), b"%d" % cut)
        )
    )
    folder = cache_dir / fingerprint
    ensure_folder(folder, lambda partial: _write_text(partial, documents, held))
    train, heldout = (
        TokenStore(
            _map(folder / f"{part}.tokens", np.dtype(np.uint8)),
            _map(folder / f"{part}.starts", _STARTS_DTYPE),
        )
        for part in ("train", "heldout")
    )
    description = _describe(label, f"{len(documents)} documents", train, heldout)
    if source.left_out:
        description += f"; {source.left_out} files left out (empty or no UTF-8)"
    return Corpus(train, heldout, fingerprint, description)


def _write_text(folder: Path, documents: Sequence[Document], held: Sequence[int]) -> None:
    starts: dict[str, list[int]] = {"train": [], "heldout": []}
    with (
        (folder / "train.tokens").open("wb") as train,
        (folder / "heldout.tokens").open("wb") as heldout,
    ):
        for document, cut in zip(documents, held, strict=True):
            kept = document.size - cut
            if kept:
                starts["train"].append(train.tell())
            if cut:
                starts["heldout"].append(heldout.tell())
            digest = hashlib.sha256()
            for chunk in read_chunks(document.path):
                digest.update(chunk)
                train.write(chunk[:kept])
                heldout.write(chunk[kept:])
                kept = max(kept - len(chunk), 0)
            if digest.hexdigest() != document.sha256:
                raise ValueError(
                    f"data.source: {str(document.path)!r} changed while it was read; "
                    "run again when nothing writes to it"
                )
    for part, indices in starts.items():
        (folder / f"{part}.starts").write_bytes(np.array(indices, _STARTS_DTYPE).tobytes())


def _prepare_tokens(source: TokenSource, cache_dir: Path, heldout_tokens: int) -> Corpus:
    files = [source.train] if source.heldout is None else [source.train, source.heldout]
    sampled = [_sample(file) for file in files]
    whole = [
        TokenStore(
            _map(file, source.dtype), _document_starts(file, sampled[index], source, cache_dir)
        )
        for index, file in enumerate(files)
    ]
    if source.heldout is None:
        total = len(whole[0])
        train, heldout = _split(whole[0], total - heldout_budget(total, heldout_tokens))
    else:
        train = whole[0]
        heldout, _ = _split(whole[1], min(len(whole[1]), heldout_tokens))
    split = f"{source.document_end} {len(train)} {len(heldout)}"
    fingerprint = _hash(*sampled, source.dtype.str.encode(), split.encode())
    label = " and ".join(map(str, files))
    return Corpus(
        train,
        heldout,
        fingerprint,
        _describe(label, f"{source.dtype.name} tokens", train, heldout),
    )


def _document_starts(
    file: Path, sampled: bytes, source: TokenSource, cache_dir: Path
) -> Int64[np.ndarray, "documents"]:
    if source.document_end is None:
        return np.zeros(1, np.int64)
    modified_ns = file.stat().st_mtime_ns
    key = _hash(sampled, source.dtype.str.encode(), b"%d %d" % (source.document_end, modified_ns))
    folder = cache_dir / key
    ensure_folder(folder, lambda partial: _write_starts(partial / "starts", file, source))
    return _map(folder / "starts", _STARTS_DTYPE)


def _write_starts(target: Path, file: Path, source: TokenSource) -> None:
    tokens = _map(file, source.dtype)
    ends = 0
    with target.open("wb") as starts:
        starts.write(np.zeros(1, _STARTS_DTYPE).tobytes())
        for offset in range(0, len(tokens), _SCAN_TOKENS):
            chunk = tokens[offset : offset + _SCAN_TOKENS]
            after = np.flatnonzero(chunk == source.document_end) + (offset + 1)
            ends += len(after)
            starts.write(after[after < len(tokens)].astype(_STARTS_DTYPE).tobytes())
    if not ends:
        raise ValueError(
            f"data.document_end={source.document_end} does not occur in {str(file)!r}; give the "
            "token that ends each document there, or leave it unset"
        )


def _split(store: TokenStore, cut: int) -> tuple[TokenStore, TokenStore]:
    """The first `cut` tokens and the rest, which starts a document of its own."""
    documents = int(np.searchsorted(store.document_starts, cut))
    later = np.asarray(store.document_starts[documents:]) - cut
    if cut < len(store) and (not len(later) or later[0]):
        later = np.concatenate([np.zeros(1, np.int64), later])
    return (
        TokenStore(store.tokens[:cut], store.document_starts[:documents]),
        TokenStore(store.tokens[cut:], later),
    )


def _map(path: Path, dtype: np.dtype[Any]) -> np.ndarray:
    if path.stat().st_size == 0:  # nothing can be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype, mode="r")


def _sample(path: Path) -> bytes:
    """A hash of a file's size and of up to 16 blocks of 64 KiB, the first and the last included."""
    size = path.stat().st_size
    last = max(size - _BLOCK_BYTES, 0)
    offsets = sorted({last * block // (_SAMPLED_BLOCKS - 1) for block in range(_SAMPLED_BLOCKS)})
    digest = hashlib.sha256(b"%d" % size)
    with path.open("rb") as file:
        for offset in offsets:
            file.seek(offset)
            digest.update(file.read(_BLOCK_BYTES))
    return digest.digest()


def _hash(*parts: bytes) -> str:
    """A name for `parts`, 32 hex digits; each goes in with its length, so that none can shift."""
    digest = hashlib.sha256(_FORMAT)
    for part in parts:
        digest.update(b"%d:" % len(part))
        digest.update(part)
    return digest.hexdigest()[:32]


def _describe(label: str, kind: str, train: TokenStore, heldout: TokenStore) -> str:
    return f"{label}: {kind}, {len(train):,} tokens to train on, {len(heldout):,} held out"
