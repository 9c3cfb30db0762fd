"""hashes.py: a large file is hashed once, and again as soon as anything about it changes."""

import json
import os
from pathlib import Path

import pytest

from nanochat.data import hashes
from nanochat.ground import storage


@pytest.fixture
def hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are read to hash them."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    names: list[str] = []
    original = storage.sha256
    monkeypatch.setattr(storage, "sha256", lambda path: (names.append(path.name), original(path))[1])
    return names


def test_a_file_is_hashed_once(hashed: list[str], tmp_path: Path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"weights")
    first = hashes.sha256(path)
    (tmp_path / "link").symlink_to(path)
    assert hashes.sha256(path) == hashes.sha256(tmp_path / "link") == first == storage.sha256(path)
    assert hashed == ["a.safetensors"] * 2  # the second one is this test's own


@pytest.mark.parametrize("how", ["longer", "as long", "as long and as old", "another file of the same content"])
def test_a_changed_file_is_hashed_again(hashed: list[str], tmp_path: Path, how: str):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"weights")
    before = path.stat()
    hashes.sha256(path)
    content = {"longer": b"weights!", "as long": b"WEIGHTS", "as long and as old": b"WEIGHTS"}.get(how, b"weights")
    other = tmp_path / "other"
    other.write_bytes(content)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns + (how == "as long")))
    other.replace(path)
    hashed.clear()
    digest = hashes.sha256(path)
    assert hashed == ["a.safetensors"] and digest == storage.sha256(path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"sha256": "00"}', "\0"])
def test_a_damaged_entry_is_written_again(hashed: list[str], tmp_path: Path, content: str):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"weights")
    digest = hashes.sha256(path)
    (entry,) = (tmp_path / "base/hashes").iterdir()
    entry.write_text(content)
    assert hashes.sha256(path) == digest and json.loads(entry.read_text())["sha256"] == digest
    entry.unlink()  # a file that changes while it is read has no entry
    storage.sha256 = lambda path: (path.write_bytes(b"more weights"), "0" * 64)[1]  # `hashed` puts it back
    hashes.sha256(path)
    assert not list((tmp_path / "base/hashes").iterdir())


def test_a_folder_that_cannot_be_written_costs_no_run(hashed: list[str], tmp_path: Path):
    (tmp_path / "base").write_text("a file where the folder would be")
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"weights")
    assert hashes.sha256(path) == storage.sha256(path)
