"""From sources to token stores: contents, splits, fingerprints, kills and races."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ulysses_jax.data import source, store
from ulysses_jax.data.store import Corpus, TokenStore, prepare

TEXTS = {"a.txt": b"alpha ", "b/c.txt": b"beta gamma", "d.md": b"delta", "e.txt": b"x" * 200}


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "texts"
    (root / "b").mkdir(parents=True)
    for name, text in TEXTS.items():
        (root / name).write_bytes(text)
    return root


def documents(part: TokenStore) -> list[bytes]:
    return [bytes(piece) for piece in np.split(part.tokens, part.document_starts[1:])]


def everything(corpus: Corpus) -> list:
    return [documents(corpus.train), documents(corpus.heldout), corpus.fingerprint]


def write_tokens(path: Path, tokens, dtype: str = "<u2") -> Path:
    path.write_bytes(np.asarray(tokens, dtype).tobytes())
    return path


@pytest.mark.parametrize("chunk", [3, 1 << 20])
def test_every_byte_of_a_folder_is_trained_on_or_held_out(folder, tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(source, "_CHUNK_BYTES", chunk)
    corpus = prepare(str(folder), tmp_path / "cache", heldout_tokens=20)
    assert corpus.train.tokens.dtype == np.uint8
    kept, held = [b"", *documents(corpus.train)], [b"", *documents(corpus.heldout)]
    for text in TEXTS.values():
        assert any(text[:cut] in kept and text[cut:] in held for cut in range(len(text) + 1))
    assert sum(map(len, kept + held)) == sum(map(len, TEXTS.values()))
    assert 10 <= sum(map(len, held)) <= 20
    assert corpus.description == (
        f"{folder}: 4 documents, {len(corpus.train)} tokens to train on, "
        f"{len(corpus.heldout)} held out"
    )


def test_text_file_holds_out_its_tail(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    corpus = prepare(str(tmp_path / "a.txt"), tmp_path / "cache", heldout_tokens=7)
    assert everything(corpus)[:2] == [[bytes(range(93))], [bytes(range(93, 100))]]


def test_text_too_short_to_hold_anything_out_has_an_empty_heldout_store(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"nine char")
    corpus = prepare(str(tmp_path / "a.txt"), tmp_path / "cache")
    assert (len(corpus.train), len(corpus.heldout)) == (9, 0)
    assert len(corpus.heldout.document_starts) == 0


def test_files_left_out_are_said(folder, tmp_path):
    (folder / "image.png").write_bytes(b"\xff\x00")
    corpus = prepare(str(folder), tmp_path / "cache")
    assert corpus.description.endswith("; 1 files left out (empty or no UTF-8)")


def test_second_preparation_opens_what_the_first_wrote(folder, tmp_path, monkeypatch):
    first = prepare(str(folder), tmp_path / "cache")
    monkeypatch.setattr(store, "_write_text", None)
    assert everything(prepare(str(folder), tmp_path / "cache")) == everything(first)


def test_fingerprint_follows_names_bytes_and_split_but_not_the_place(folder, tmp_path):
    fingerprint = prepare(str(folder), tmp_path / "cache").fingerprint
    moved = shutil.copytree(folder, tmp_path / "elsewhere")
    assert prepare(str(moved), tmp_path / "other cache").fingerprint == fingerprint
    assert prepare(str(folder), tmp_path / "cache", heldout_tokens=5).fingerprint != fingerprint
    (moved / "d.md").rename(moved / "d2.md")
    assert prepare(str(moved), tmp_path / "cache").fingerprint != fingerprint
    (folder / "d.md").write_bytes(b"DELTA")
    assert prepare(str(folder), tmp_path / "cache").fingerprint != fingerprint


def test_text_that_changes_while_it_is_read_is_refused(folder, tmp_path, monkeypatch):
    read_chunks = store.read_chunks
    monkeypatch.setattr(store, "read_chunks", lambda path: [b"?", *read_chunks(path)])
    with pytest.raises(ValueError, match=r"changed while it was read; run again"):
        prepare(str(folder), tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []


def test_negative_heldout_tokens_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match=r"data\.heldout_tokens=-1 is negative"):
        prepare(str(folder), tmp_path / "cache", heldout_tokens=-1)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_bin_is_mapped_in_place_and_its_tail_held_out(tmp_path, dtype):
    file = write_tokens(tmp_path / "x.bin", range(1000, 1100), dtype)
    corpus = prepare(str(file), tmp_path / "cache", heldout_tokens=7, token_dtype=dtype)
    assert isinstance(corpus.train.tokens, np.memmap)
    assert corpus.train.tokens.dtype == dtype
    np.testing.assert_array_equal(corpus.train.tokens, np.arange(1000, 1093))
    np.testing.assert_array_equal(corpus.heldout.tokens, np.arange(1093, 1100))
    assert [list(part.document_starts) for part in (corpus.train, corpus.heldout)] == [[0], [0]]
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("scan_tokens", [3, 1000])
@pytest.mark.parametrize(
    ("ends", "train_starts", "heldout_starts"),
    [
        ([4, 10, 39], [0, 5, 11], [0]),
        ([4, 35], [0, 5], [0]),
        ([4, 36, 37], [0, 5], [0, 1, 2]),
        ([0, 37], [0, 1], [0, 2]),
    ],
)
def test_documents_of_a_bin_start_after_each_end_token(
    tmp_path, monkeypatch, scan_tokens, ends, train_starts, heldout_starts
):
    monkeypatch.setattr(store, "_SCAN_TOKENS", scan_tokens)
    tokens = np.ones(40)
    tokens[ends] = 50256
    file = write_tokens(tmp_path / "x.bin", tokens)
    for _ in range(2):
        corpus = prepare(str(file), tmp_path / "cache", document_end=50256)
        assert list(corpus.train.document_starts) == train_starts
        assert list(corpus.heldout.document_starts) == heldout_starts
        monkeypatch.setattr(store, "_write_starts", None)


def test_document_starts_are_found_again_when_the_bin_has_changed(tmp_path):
    tokens = np.ones(4_000_000)
    tokens[2_000_000] = 9
    file = write_tokens(tmp_path / "x.bin", tokens)
    prepare(str(file), tmp_path / "cache", document_end=9)
    tokens[[2_000_000, 2_000_100]] = 1, 9
    write_tokens(file, tokens)
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    corpus = prepare(str(file), tmp_path / "cache", document_end=9)
    assert list(corpus.train.document_starts) == [0, 2_000_101]


def test_document_end_that_does_not_occur_is_refused(tmp_path):
    file = write_tokens(tmp_path / "x.bin", range(40))
    with pytest.raises(ValueError, match=r"data\.document_end=50256 does not occur"):
        prepare(str(file), tmp_path / "cache", document_end=50256)


def test_start_of_val_bin_is_held_out_of_all_of_train_bin(tmp_path):
    write_tokens(tmp_path / "train.bin", range(30))
    write_tokens(tmp_path / "val.bin", range(100, 130))
    corpus = prepare(str(tmp_path / "train.bin"), tmp_path / "cache", heldout_tokens=7)
    np.testing.assert_array_equal(corpus.train.tokens, np.arange(30))
    np.testing.assert_array_equal(corpus.heldout.tokens, np.arange(100, 107))


def test_fingerprint_of_a_bin_reads_samples_and_sees_ends_size_and_reading(tmp_path):
    tokens = np.arange(4_000_000) % 50000
    file = write_tokens(tmp_path / "x.bin", tokens)
    prints = [prepare(str(file), tmp_path / "cache").fingerprint]
    copy = shutil.copy(file, tmp_path / "copy.bin")
    assert prepare(str(copy), tmp_path / "cache").fingerprint == prints[0]
    prints.append(prepare(str(file), tmp_path / "cache", token_dtype="uint32").fingerprint)
    prints.append(prepare(str(file), tmp_path / "cache", heldout_tokens=9).fingerprint)
    for changed in (tokens[:-2], np.append(tokens[:-1], 5), np.append(5, tokens[1:])):
        write_tokens(file, changed)
        prints.append(prepare(str(file), tmp_path / "cache").fingerprint)
    assert len(set(prints)) == len(prints)


PREPARE = """
import os, signal, sys
from ulysses_jax.data.store import prepare
if len(sys.argv) > 3:
    def die(*args):
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(os, sys.argv[3], die)
print(prepare(sys.argv[1], sys.argv[2]).fingerprint)
"""


@pytest.mark.parametrize("moment", ["fsync", "rename"])
def test_process_killed_while_writing_leaves_no_store_and_the_next_one_writes_it(
    folder, tmp_path, moment
):
    cache = tmp_path / "cache"
    killed = subprocess.run([sys.executable, "-c", PREPARE, folder, cache, moment], check=False)
    assert killed.returncode == -signal.SIGKILL
    (partial,) = os.listdir(cache)
    assert partial.endswith(".partial")
    corpus = prepare(str(folder), cache)
    assert everything(corpus) == everything(prepare(str(folder), tmp_path / "other"))
    assert sorted(os.listdir(cache)) == sorted([partial, corpus.fingerprint])


def test_processes_that_prepare_at_once_end_with_one_store(folder, tmp_path):
    command = [sys.executable, "-c", PREPARE, folder, tmp_path / "cache"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    fingerprints = {process.communicate()[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert fingerprints == set(os.listdir(tmp_path / "cache"))
    assert everything(prepare(str(folder), tmp_path / "cache")) == everything(
        prepare(str(folder), tmp_path / "other")
    )
