"""A manifest must make every kind of damage visible, and name it."""

import json
import os

import pytest

from ulysses_jax.train import manifest
from ulysses_jax.train.manifest import MANIFEST_NAME, DamagedCheckpoint

IDENTITY = {"model": {"num_layers": 4, "vocab_size": 257}, "shapes": {"embed": [257, 8]}}
ARRAYS = {"embed": {"dtype": "float32", "shape": [264, 8]}}


@pytest.fixture
def step_folder(tmp_path):
    folder = tmp_path / "step_00000020"
    (folder / "d").mkdir(parents=True)
    (folder / "d" / "arrays").write_bytes(bytes(range(256)) * 3)
    (folder / "metadata").write_bytes(b"{}")
    (folder / "empty").write_bytes(b"")
    manifest.write(folder, 20, IDENTITY, ARRAYS)
    return folder


def flip(path, index):
    content = bytearray(path.read_bytes())
    content[index] ^= 1
    path.write_bytes(content)


def test_manifest_returns_what_was_written_and_accepts_untouched_files(step_folder):
    found = manifest.read(step_folder)
    assert (found.step, found.identity, found.arrays) == (20, IDENTITY, ARRAYS)
    assert sorted(found.files) == ["d/arrays", "empty", "metadata"]
    assert found.files["d/arrays"]["size"] == 768
    manifest.verify(step_folder, found)
    assert sorted(os.listdir(step_folder)) == ["d", "empty", MANIFEST_NAME, "metadata"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: flip(path, 0), "other bytes"),
        (lambda path: flip(path, 767), "other bytes"),
        (lambda path: os.truncate(path, 767), "767 bytes instead of 768"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "769 bytes instead of 768"),
        (lambda path: path.unlink(), "is missing"),
    ],
)
def test_damaged_file_is_named_with_what_is_wrong(step_folder, damage, said):
    damage(step_folder / "d" / "arrays")
    with pytest.raises(DamagedCheckpoint, match=f"^d/arrays .*{said}"):
        manifest.verify(step_folder, manifest.read(step_folder))


def test_every_damaged_file_is_named(step_folder):
    flip(step_folder / "metadata", 1)
    (step_folder / "empty").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"empty is missing; metadata has other bytes"):
        manifest.verify(step_folder, manifest.read(step_folder))


def test_flipped_bytes_of_the_manifest_itself_are_seen(step_folder):
    path = step_folder / MANIFEST_NAME
    for index in range(0, path.stat().st_size, 7):
        flip(path, index)
        with pytest.raises(DamagedCheckpoint, match=MANIFEST_NAME):
            manifest.read(step_folder)
        flip(path, index)
    manifest.read(step_folder)
    path.write_bytes(path.read_bytes().replace(b"\n  ", b"\n\t ", 1))
    with pytest.raises(DamagedCheckpoint, match="not as it was written"):
        manifest.read(step_folder)


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"content": {}}', b"\xff\xfe"])
def test_text_that_is_no_manifest_is_damage_and_not_a_crash(step_folder, text):
    (step_folder / MANIFEST_NAME).write_bytes(text)
    with pytest.raises(DamagedCheckpoint, match="not as it was written"):
        manifest.read(step_folder)


def test_missing_manifest_is_unverified_even_if_its_writing_had_begun(step_folder):
    (step_folder / MANIFEST_NAME).rename(step_folder / (MANIFEST_NAME + ".writing"))
    with pytest.raises(DamagedCheckpoint, match="has no manifest"):
        manifest.read(step_folder)


def test_manifest_of_a_later_format_is_refused_and_not_called_damaged(step_folder, monkeypatch):
    monkeypatch.setattr(manifest, "FORMAT", 2)
    manifest.write(step_folder, 20, IDENTITY, ARRAYS)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="format 2, this version reads only format 1"):
        manifest.read(step_folder)


def test_rewriting_gives_the_same_bytes(step_folder):
    before = (step_folder / MANIFEST_NAME).read_bytes()
    manifest.write(step_folder, 20, json.loads(json.dumps(IDENTITY)), ARRAYS)
    assert (step_folder / MANIFEST_NAME).read_bytes() == before


@pytest.mark.parametrize(
    ("stored", "expected", "said"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 1}}, []),
        ({"a": {"b": 4}}, {"a": {"b": 6}}, ["a.b is 4 in the checkpoint, 6 in the config"]),
        ({"a": "x"}, {"a": None}, ['a is "x" in the checkpoint, null in the config']),
        ({"a": 1}, {}, ["a is 1 in the checkpoint, not in the config"]),
        ({}, {"a": [2, 3]}, ["a is not in the checkpoint, [2, 3] in the config"]),
        ({"a": {"b": 1}}, {"a": 1}, ['a is {"b": 1} in the checkpoint, 1 in the config']),
        (
            {"b": 1, "a": {"d": 1, "c": 2}},
            {"b": 2, "a": {"d": 1, "c": 3}},
            [
                "a.c is 2 in the checkpoint, 3 in the config",
                "b is 1 in the checkpoint, 2 in the config",
            ],
        ),
    ],
)
def test_differences_name_every_field_with_both_values(stored, expected, said):
    assert manifest.differences(stored, expected) == said


def test_differences_can_pass_over_fields_that_only_the_checkpoint_has():
    stored = {"a": {"b": 1, "c": 2}, "d": 3}
    assert manifest.differences(stored, {"a": {"b": 1}}, only_expected=True) == []
    assert len(manifest.differences(stored, {"a": {"b": 2}}, only_expected=True)) == 1
