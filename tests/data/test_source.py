"""What `data.source` resolves to, and how it refuses."""

import os
import sysconfig
from pathlib import Path

import pytest

from ulysses_jax.data.source import TextSource, TokenSource, resolve


def text_names(source: str) -> list[str]:
    found = resolve(source)
    assert isinstance(found, TextSource)
    return [document.name for document in found.documents]


def test_standard_library_is_its_python_files_without_installed_packages():
    found = resolve("python-stdlib")
    assert isinstance(found, TextSource)
    names = [document.name for document in found.documents]
    assert {"os.py", "json/decoder.py"} <= set(names)
    assert names == sorted(names)
    assert all(name.endswith(".py") for name in names)
    assert not any("site-packages" in name or "dist-packages" in name for name in names)


def test_standard_library_leaves_out_unreadable_files(tmp_path, monkeypatch):
    (tmp_path / "site-packages").mkdir()
    for name in ("kept.py", "locked.py", "notes.txt", "site-packages/third_party.py"):
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    make_unreadable(monkeypatch, tmp_path / "locked.py")
    found = resolve("python-stdlib")
    assert isinstance(found, TextSource)
    assert [document.name for document in found.documents] == ["kept.py"]
    assert found.left_out == 1


def test_standard_library_without_sources_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match=r"no \*\.py file.*name a text file"):
        resolve("python-stdlib")


def test_folder_is_its_visible_text_files_sorted_by_relative_path(tmp_path):
    for name in ("b/c.md", "a.txt", "b.txt", ".git/config", "b/.hidden"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    (tmp_path / "image.png").write_bytes(b"\x89PNG\xff\x00")
    (tmp_path / "empty.txt").touch()
    assert text_names(str(tmp_path)) == ["a.txt", "b.txt", "b/c.md"]
    found = resolve(str(tmp_path))
    assert isinstance(found, TextSource)
    assert found.left_out == 2


def test_text_cut_inside_a_character_is_still_text(tmp_path):
    file = tmp_path / "cut.txt"
    file.write_bytes("naïve é".encode()[:-1])
    assert text_names(str(file)) == ["cut.txt"]


@pytest.mark.parametrize("names", [["train.bin"], ["train.bin", "val.bin"], ["x.bin", "val.bin"]])
def test_val_bin_is_held_out_only_beside_train_bin(tmp_path, names):
    for name in names:
        (tmp_path / name).write_bytes(bytes(8))
    found = resolve(str(tmp_path / names[0]), token_dtype="uint32", document_end=7)
    assert isinstance(found, TokenSource)
    assert found.heldout == (tmp_path / "val.bin" if names == ["train.bin", "val.bin"] else None)
    assert (found.dtype.itemsize, found.document_end) == (4, 7)


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("", None, "data.source='' does not exist"),
        ("missing.txt", None, "does not exist; it must be 'python-stdlib'"),
        ("empty.txt", b"", "is empty; name a file of UTF-8 text"),
        ("photo.jpg", b"\xff\xd8\xff", "is not UTF-8 text; name a file of UTF-8 text"),
        ("empty.bin", b"", "is empty; name a file of tokens"),
        ("odd.bin", b"abc", "has 3 bytes, no multiple of the 2 bytes of data.token_dtype='uint16'"),
    ],
)
def test_bad_files_are_refused_with_the_fix(tmp_path, name, contents, message):
    if contents is not None:
        (tmp_path / name).write_bytes(contents)
    with pytest.raises(ValueError, match=message):
        resolve(str(tmp_path / name) if name else "")


@pytest.mark.parametrize("names", [[], ["empty.txt", ".hidden"]])
def test_folder_without_text_is_refused(tmp_path, names):
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"holds no text.*name a folder of texts"):
        resolve(str(tmp_path))


def test_device_file_is_refused():
    with pytest.raises(ValueError, match=r"neither a regular file nor a folder"):
        resolve(os.devnull)


@pytest.mark.parametrize("name", ["a.txt", "a.bin"])
@pytest.mark.parametrize("whole_folder", [False, True])
def test_unreadable_file_is_refused(tmp_path, monkeypatch, name, whole_folder):
    file = tmp_path / name
    file.write_bytes(b"text")
    make_unreadable(monkeypatch, file)
    with pytest.raises(ValueError, match=rf"cannot read '.*{name}' \(denied\); make it readable"):
        resolve(str(tmp_path if whole_folder else file))


def test_unreadable_subfolder_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "locked").mkdir()
    scandir = os.scandir

    def scan(path):
        if Path(path).name == "locked":
            raise PermissionError(13, "denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    with pytest.raises(ValueError, match=r"cannot read '.*locked' \(denied\)"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_dtype": "int16"}, "'int16' is unknown; use one of uint16, uint32"),
        ({"document_end": 65536}, r"65536 does not fit uint16 \(0 to 65535\)"),
        ({"document_end": -1}, r"-1 does not fit uint16 \(0 to 65535\)"),
    ],
)
def test_token_options_that_do_not_fit_are_refused(tmp_path, options, message):
    (tmp_path / "a.bin").write_bytes(bytes(4))
    with pytest.raises(ValueError, match=message):
        resolve(str(tmp_path / "a.bin"), **options)


def test_document_end_is_refused_for_text(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match=r"data\.document_end=0 is for \.bin files"):
        resolve(str(tmp_path / "a.txt"), document_end=0)


def make_unreadable(monkeypatch, path: Path) -> None:
    """Refuses to open `path`; permissions would not, where the tests run as root."""
    open_path = Path.open

    def refuse(self, *args, **kwargs):
        if self == path:
            raise PermissionError(13, "denied", str(path))
        return open_path(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
