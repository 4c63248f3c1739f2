"""The manifest of one checkpoint: what was written, so that damage is seen before it is used.

Orbax stores no checksum of the arrays: a flipped byte restores wrong numbers in silence. A
manifest is written after Orbax has committed a step, and read and checked before a restore. A
committed step without one (the process was killed in between) counts as unverified.

It is the file `manifest.json` inside the step's directory, so that both are moved and deleted as
one. Its text is fixed by its content (sorted keys, one space of indent), which makes every changed
byte of the manifest itself visible too:

    {
     "content": {
      "arrays": {"<path>": {"dtype": "float32", "shape": [16, 5]}, ...},
      "files": {"<path under the step>": {"sha256": "<hex>", "size": <bytes>}, ...},
      "format": 1,
      "identity": {<what the run is: model, data, logical shapes>},
      "step": 20
     },
     "sha256": "<hex, of the content rendered in the same way>"
    }

`arrays` are as stored, padded for the mesh that wrote them. `files` names every file of the step
but the manifest; a file it does not name is not looked at.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST_NAME = "manifest.json"
FORMAT = 1
_TEMPORARY_SUFFIX = ".writing"
_HASHING_THREADS = 8


class DamagedCheckpoint(Exception):
    """A checkpoint that must not be used; the message names each file that is wrong, and how."""


@dataclass(frozen=True)
class Manifest:
    """What one checkpoint holds; see the module's docstring for each field."""

    step: int
    identity: dict[str, Any]
    arrays: dict[str, dict[str, Any]]
    files: dict[str, dict[str, Any]]


def write(
    directory: Path, step: int, identity: Mapping[str, Any], arrays: Mapping[str, Mapping[str, Any]]
) -> None:
    """Hashes every file of the committed step in `directory` and writes its manifest, atomically.

    The files reach the disk before the manifest does, so that a manifest that survives a power
    failure speaks of files that did.
    """
    names = sorted(_files_below(directory))
    with ThreadPoolExecutor(_HASHING_THREADS) as threads:
        records = threads.map(lambda name: _fingerprint(directory / name, flush=True), names)
        files = dict(zip(names, records, strict=True))
    content = {
        "format": FORMAT,
        "step": step,
        "identity": identity,
        "arrays": arrays,
        "files": files,
    }
    text = _render({"content": content, "sha256": _digest(content)})
    temporary = directory / (MANIFEST_NAME + _TEMPORARY_SUFFIX)
    with temporary.open("wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, directory / MANIFEST_NAME)
    for folder in (directory, directory.parent):
        _flush_folder(folder)


def read(directory: Path) -> Manifest:
    """Reads the manifest of the step in `directory`, checking the manifest but not the files.

    Raises:
      DamagedCheckpoint: there is no manifest, or a byte of it has changed.
      ValueError: it is whole, but of a format that this version does not know.
    """
    try:
        text = (directory / MANIFEST_NAME).read_bytes()
    except FileNotFoundError:
        raise DamagedCheckpoint(
            f"it has no {MANIFEST_NAME} (the save was cut short, or is still running)"
        ) from None
    except OSError as error:
        raise DamagedCheckpoint(f"{MANIFEST_NAME} cannot be read ({error.strerror})") from None
    try:
        parsed = json.loads(text)
        content = parsed["content"]
        whole = parsed["sha256"] == _digest(content) and text == _render(parsed)
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise DamagedCheckpoint(f"{MANIFEST_NAME} is not as it was written")
    if content["format"] != FORMAT:
        raise ValueError(
            f"{directory / MANIFEST_NAME} has format {content['format']}, this version reads only "
            f"format {FORMAT}: use the version of ulysses_jax that wrote it"
        )
    return Manifest(content["step"], content["identity"], content["arrays"], content["files"])


def verify(directory: Path, manifest: Manifest) -> None:
    """Compares every file of the step in `directory` with its manifest, reading all of them.

    Raises:
      DamagedCheckpoint: files are missing, of another size or with other bytes; all are named.
    """
    with ThreadPoolExecutor(_HASHING_THREADS) as threads:
        problems = threads.map(
            lambda item: _problem(directory / item[0], item[0], item[1]), manifest.files.items()
        )
        found = [problem for problem in problems if problem]
    if found:
        raise DamagedCheckpoint("; ".join(found))


def differences(
    stored: Mapping[str, Any], expected: Mapping[str, Any], *, only_expected: bool = False
) -> list[str]:
    """Each field in which two identities differ, as `model.num_layers is 4 in the checkpoint, ...`.

    With `only_expected`, fields that only `stored` has are passed over.
    """
    return list(_differing_fields("", stored, expected, only_expected))


def _differing_fields(
    prefix: str, stored: Mapping[str, Any], expected: Mapping[str, Any], only_expected: bool
) -> Iterator[str]:
    names = expected if only_expected else {**stored, **expected}
    for name in sorted(names):
        path = prefix + name
        if name not in stored:
            value = json.dumps(expected[name])
            yield f"{path} is not in the checkpoint, {value} in the config"
        elif name not in expected:
            yield f"{path} is {json.dumps(stored[name])} in the checkpoint, not in the config"
        elif isinstance(stored[name], Mapping) and isinstance(expected[name], Mapping):
            yield from _differing_fields(f"{path}.", stored[name], expected[name], only_expected)
        elif stored[name] != expected[name]:
            yield (
                f"{path} is {json.dumps(stored[name])} in the checkpoint, "
                f"{json.dumps(expected[name])} in the config"
            )


def _problem(path: Path, name: str, record: Mapping[str, Any]) -> str | None:
    try:
        size = path.stat().st_size
        if size != record["size"]:
            return f"{name} has {size} bytes instead of {record['size']}"
        if _fingerprint(path, flush=False) != record:
            return f"{name} has other bytes than were written (sha256 differs)"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None


def _fingerprint(path: Path, *, flush: bool) -> dict[str, Any]:
    with path.open("rb") as file:
        if flush:
            os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": file.tell(), "sha256": digest}


def _files_below(directory: Path) -> Iterator[str]:
    for path in directory.rglob("*"):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and name not in (MANIFEST_NAME, MANIFEST_NAME + _TEMPORARY_SUFFIX):
            yield name


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(content: Any) -> str:
    return hashlib.sha256(_render(content)).hexdigest()


def _render(content: Any) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()
