"""Folders that are complete or absent, whoever is killed and however many processes write them.

A folder is written under a temporary name beside its place, flushed, and renamed into place; the
first of several writers wins and the others drop their copies. It holds what the caller wrote and

    sha256.json     {file name: SHA-256 in hex}, compared each time before the folder is used

While it is written it is named `.<name>.<random>.partial`. That is what a killed process leaves:
it is never opened, and removed by a later writer of the same folder once it is a day old.
"""

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

_SUMS = "sha256.json"
_ABANDONED_AFTER_S = 24 * 3600


def ensure_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Makes sure that `folder` exists and is complete, calling `write(partial_folder)` if needed.

    Raises:
        ValueError: the folder cannot be written, or one that was complete has been damaged.
    """
    if not folder.exists():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(folder)
            partial = Path(
                tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent)
            )
        except OSError as error:
            raise ValueError(
                f"data.cache_dir={str(folder.parent)!r} cannot be written ({error.strerror}); "
                "name a writable folder"
            ) from error
        try:
            write(partial)
            _seal(partial)
            _publish(partial, folder)
        except OSError as error:
            raise ValueError(
                f"data.cache_dir={str(folder.parent)!r}: writing it failed ({error}); "
                "make room there or name another folder"
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    _check(folder)


def _seal(partial: Path) -> None:
    sums = {path.name: _sha256(path) for path in sorted(partial.iterdir())}
    (partial / _SUMS).write_text(json.dumps(sums, indent=2) + "\n")
    # The rename may reach the disk before the contents do: flush them first.
    for path in (*partial.iterdir(), partial):
        _flush(path)
    # mkdtemp allows the owner alone; a cache is as readable as the folder it lies in.
    partial.chmod(partial.parent.stat().st_mode & 0o777)


def _publish(partial: Path, folder: Path) -> None:
    try:
        os.rename(partial, folder)
    except OSError:
        if not folder.exists():
            raise
        return  # another process was first, with the same contents
    _flush(folder.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_abandoned(folder: Path) -> None:
    for partial in folder.parent.glob(f".{folder.name}.*.partial"):
        try:
            age_s = time.time() - partial.stat().st_mtime
        except FileNotFoundError:
            continue  # its writer has just finished
        if age_s > _ABANDONED_AFTER_S:
            shutil.rmtree(partial, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check(folder: Path) -> None:
    try:
        sums: dict[str, str] = json.loads((folder / _SUMS).read_text())
        for name, expected in sums.items():
            if _sha256(folder / name) != expected:
                raise ValueError(f"{name} is not as it was written")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the token cache {str(folder)!r} is damaged ({error}); delete that folder, it will be "
            "written again"
        ) from error
