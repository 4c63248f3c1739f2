"""What `data.source` means: the documents of a text corpus, or a file of ready-made tokens.

- `python-stdlib`: every `*.py` of the running interpreter's standard library, without
  site-packages and dist-packages. Real text on every machine, without a download.
- a path ending in `.bin`: headerless little-endian tokens, as nanoGPT writes them.
- any other file: one document of text.
- a folder: every regular file below it is a document, except hidden files and folders
  (names starting with a dot) and files in folders that are symbolic links.

Text is UTF-8, a token a byte. In a folder, files that are not UTF-8 (images, archives) and empty
files are left out and counted; a file that cannot be read is an error, except in the standard
library, where it is left out as well.
"""

import codecs
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

STANDARD_LIBRARY = "python-stdlib"
TokenDtype = np.dtype[np.uint16] | np.dtype[np.uint32]
TOKEN_DTYPES: dict[str, TokenDtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Document:
    """One text: its name relative to the corpus, where it lies, its bytes' number and hash."""

    name: str
    path: Path
    size: int
    sha256: str


@dataclass(frozen=True)
class TextSource:
    """Documents sorted by name, all non-empty; `left_out` counts the files that were not text."""

    documents: tuple[Document, ...]
    left_out: int


@dataclass(frozen=True)
class TokenSource:
    """Token files: `heldout` is None where the tail of `train` is to be held out."""

    train: Path
    heldout: Path | None
    dtype: TokenDtype
    document_end: int | None


def resolve(
    source: str, *, token_dtype: str = "uint16", document_end: int | None = None
) -> TextSource | TokenSource:
    """Finds what `source` names (see the module's docstring).

    Args:
        source: `python-stdlib` or a path.
        token_dtype: `uint16` or `uint32`, the tokens of a `.bin`.
        document_end: the token that ends each document of a `.bin`, or None for one document.

    Raises:
        ValueError: the source is missing, empty, unreadable or no text, or the options of a
            `.bin` do not fit.
    """
    if source == STANDARD_LIBRARY:
        _refuse_document_end(source, document_end)
        return _standard_library()
    path = Path(source).expanduser()
    if not source or not os.path.exists(path):
        raise ValueError(
            f"data.source={source!r} does not exist; it must be {STANDARD_LIBRARY!r}, "
            "a text file, a folder of texts or a .bin file of tokens"
        )
    if path.suffix == ".bin" and path.is_file():
        return _token_files(path, token_dtype, document_end)
    _refuse_document_end(source, document_end)
    if path.is_file():
        return _text_file(path)
    if path.is_dir():
        return _text_folder(path)
    raise ValueError(
        f"data.source={source!r} is neither a regular file nor a folder; name a file or a folder"
    )


def read_chunks(path: Path) -> Iterator[bytes]:
    """Yields a file's bytes, at most 1 MiB at a time."""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


def _refuse_document_end(source: str, document_end: int | None) -> None:
    if document_end is not None:
        raise ValueError(
            f"data.document_end={document_end} is for .bin files, data.source={source!r} is text "
            "(a file is a document); leave data.document_end unset"
        )


def _standard_library() -> TextSource:
    root = Path(sysconfig.get_paths()["stdlib"])

    def is_wanted(name: str) -> bool:
        return name not in ("site-packages", "dist-packages")

    paths = [path for path in _files(root, is_wanted, lambda error: None) if path.suffix == ".py"]
    documents = []
    for path in paths:
        try:
            document = _scan(path, _name(path, root))
        except OSError:
            continue
        if document is not None:
            documents.append(document)
    if not documents:
        raise ValueError(
            f"data.source={STANDARD_LIBRARY!r}: no *.py file with text under {root}; "
            "name a text file or a folder of texts instead"
        )
    return TextSource(_sorted(documents), len(paths) - len(documents))


def _text_file(path: Path) -> TextSource:
    try:
        document = _scan(path, path.name)
    except OSError as error:
        _raise_unreadable(path, error)
    if document is None:
        problem = "is not UTF-8 text" if path.stat().st_size else "is empty"
        raise ValueError(
            f"data.source={str(path)!r} {problem}; name a file of UTF-8 text "
            "(or a .bin file of tokens)"
        )
    return TextSource((document,), 0)


def _text_folder(root: Path) -> TextSource:
    def is_wanted(name: str) -> bool:
        return not name.startswith(".")

    def refuse(error: OSError) -> NoReturn:
        _raise_unreadable(Path(error.filename), error)

    paths = list(_files(root, is_wanted, refuse))
    documents = []
    for path in paths:
        try:
            document = _scan(path, _name(path, root))
        except OSError as error:
            _raise_unreadable(path, error)
        if document is not None:
            documents.append(document)
    if not documents:
        raise ValueError(
            f"data.source={str(root)!r} holds no text: {len(paths)} files, none of them non-empty "
            "UTF-8; name a folder of texts"
        )
    return TextSource(_sorted(documents), len(paths) - len(documents))


def _token_files(path: Path, token_dtype: str, document_end: int | None) -> TokenSource:
    if token_dtype not in TOKEN_DTYPES:
        raise ValueError(
            f"data.token_dtype={token_dtype!r} is unknown; use one of {', '.join(TOKEN_DTYPES)}"
        )
    dtype = TOKEN_DTYPES[token_dtype]
    limit = 2 ** (8 * dtype.itemsize) - 1
    if document_end is not None and not 0 <= document_end <= limit:
        raise ValueError(
            f"data.document_end={document_end} does not fit {token_dtype} (0 to {limit}); "
            "give the token that ends a document, or set data.token_dtype"
        )
    sibling = path.with_name("val.bin")
    heldout = sibling if path.name == "train.bin" and sibling.is_file() else None
    for file in (path,) if heldout is None else (path, heldout):
        try:
            with file.open("rb") as handle:
                size = os.fstat(handle.fileno()).st_size
        except OSError as error:
            _raise_unreadable(file, error)
        if size == 0:
            raise ValueError(f"data.source: {str(file)!r} is empty; name a file of tokens")
        if size % dtype.itemsize:
            raise ValueError(
                f"data.source: {str(file)!r} has {size} bytes, no multiple of the "
                f"{dtype.itemsize} bytes of data.token_dtype={token_dtype!r}; set the dtype it was "
                "written with, or write it again"
            )
    return TokenSource(path, heldout, dtype, document_end)


def _files(
    root: Path, is_wanted: Callable[[str], bool], on_error: Callable[[OSError], None]
) -> Iterator[Path]:
    for folder, folders, files in os.walk(root, onerror=on_error):
        folders[:] = filter(is_wanted, folders)
        yield from (
            path for name in files if is_wanted(name) and (path := Path(folder, name)).is_file()
        )


def _scan(path: Path, name: str) -> Document | None:
    """Reads a file once; None where it is empty or no UTF-8. A cut last character is allowed."""
    digest = hashlib.sha256()
    decoder = codecs.getincrementaldecoder("utf-8")()
    size = 0
    try:
        for chunk in read_chunks(path):
            decoder.decode(chunk)
            digest.update(chunk)
            size += len(chunk)
    except UnicodeDecodeError:
        return None
    return Document(name, path, size, digest.hexdigest()) if size else None


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def _sorted(documents: list[Document]) -> tuple[Document, ...]:
    return tuple(sorted(documents, key=lambda document: document.name))


def _raise_unreadable(path: Path, error: OSError) -> NoReturn:
    raise ValueError(
        f"data.source: cannot read {str(path)!r} ({error.strerror}); make it readable to this user "
        "or choose another source"
    ) from error
