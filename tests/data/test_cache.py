"""A cached folder is complete or absent."""

import os
import time

import pytest

from ulysses_jax.data.cache import ensure_folder


def write_hello(folder):
    (folder / "hello").write_text("hello")


def fail_to_write(folder):
    raise AssertionError("must not be written again")


def test_folder_is_written_once_and_nothing_else_is_left(tmp_path):
    folder = tmp_path / "cache" / "x"
    ensure_folder(folder, write_hello)
    ensure_folder(folder, fail_to_write)
    assert (folder / "hello").read_text() == "hello"
    assert list(folder.parent.iterdir()) == [folder]


def test_folder_that_failed_midway_is_absent(tmp_path):
    def fail_midway(folder):
        write_hello(folder)
        raise RuntimeError("midway")

    with pytest.raises(RuntimeError, match=r"midway"):
        ensure_folder(tmp_path / "x", fail_midway)
    assert list(tmp_path.iterdir()) == []


def test_loser_of_a_race_keeps_the_winner(tmp_path):
    folder = tmp_path / "x"

    def write_second(partial):
        ensure_folder(folder, write_hello)
        write_hello(partial)
        (partial / "second").touch()

    ensure_folder(folder, write_second)
    assert sorted(os.listdir(folder)) == ["hello", "sha256.json"]
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(("age_h", "is_kept"), [(1, True), (25, False)])
def test_partial_folder_of_a_killed_process_is_never_opened_and_removed_after_a_day(
    tmp_path, age_h, is_kept
):
    partial = tmp_path / ".x.killed.partial"
    partial.mkdir()
    (partial / "hello").write_text("hel")
    then = time.time() - age_h * 3600
    os.utime(partial, (then, then))
    ensure_folder(tmp_path / "x", write_hello)
    assert (tmp_path / "x" / "hello").read_text() == "hello"
    assert partial.exists() == is_kept


@pytest.mark.parametrize("damage", ["truncated", "changed", "file missing", "sums missing"])
def test_damaged_folder_is_refused(tmp_path, damage):
    folder = tmp_path / "x"
    ensure_folder(folder, write_hello)
    if damage == "truncated":
        (folder / "hello").write_text("hel")
    elif damage == "changed":
        (folder / "hello").write_text("hullo")
    else:
        (folder / ("hello" if damage == "file missing" else "sha256.json")).unlink()
    with pytest.raises(ValueError, match=r"is damaged \(.*\); delete that folder"):
        ensure_folder(folder, fail_to_write)


def test_cache_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"data\.cache_dir=.*cannot be written.*writable folder"):
        ensure_folder(tmp_path / "file" / "x", write_hello)


def test_full_disk_is_reported_as_such(tmp_path):
    def fill_disk(folder):
        raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match=r"No space left on device.*make room"):
        ensure_folder(tmp_path / "x", fill_disk)
    assert list(tmp_path.iterdir()) == []
