"""S8. A path from outside never leaves its folder; a file from outside never runs.

Sixty names that would lead out are refused as the tag of a run, and as a path that a hub lists. A link out of a folder
of data is not read, and a link in place of a lock is not followed. core/test_checkpoint_manager.py has pickles in place
of the files of a checkpoint, and files that are mutated under a manifest that agrees with them.
"""

import os
from pathlib import Path

import pytest
from test_hub import fake  # noqa: F401 (a fixture)
from tiny import complaint

from nanochat.data import hub
from nanochat.data.records import find_split
from nanochat.ground import paths
from nanochat.ground.cli import UserError
from nanochat.ground.corpus import open_corpus

OUTSIDE = (
    *("", ".", "..", "...", "../x", "../../etc/passwd", "..\\x", "x/..", "x/../../y", "./x", "/", "/etc", "//x", "x/"),
    *("x/y", "x\\y", "\\\\host\\share", "C:\\x", "C:x", "~", "~/x", "~root", "$HOME", "${HOME}", "`id`", "$(id)"),
    *("x;y", "x|y", "x&y", "x y", " x", "x ", "x\n", "\nx", "x\0", "x\0/../y", "%2e%2e%2f", "..%2f", "x*", "x?"),
    *(".hidden", ".tmp", "-rf", "--help", "\u2025/x", "\uff0e\uff0e/x", "\u2215etc", "x\u202e", "é", "模型", "x" * 101),
    *("file:///etc", "http://x", "x\ty", "x'y", 'x"y', "<x>"),
)
INSIDE = ("d4", "d12-long", "2024.05.01", "lr=0.1+wd", "_x", "A", "x" * 100, "a..b", "x..")
LISTED = ("../x.parquet", "a/../../x.parquet", "/x.parquet", "..\\x.parquet", "C:/x.parquet", "a\0.parquet")
MODELS = ("hf:", "hf:name", "hf:a/b/c", "hf:../x", "hf:a/..", "hf:a/b@../../c", "hf:a b/c")


def test_the_tag_of_a_run_is_one_folder(base_folder: Path):
    assert len(set(OUTSIDE)) >= 50
    for tag in OUTSIDE:
        for function in (paths.safe_tag, lambda tag: paths.checkpoint_dir("base", tag)):
            assert "--model_tag" in complaint(lambda tag=tag, function=function: function(tag))
        with pytest.raises(UserError):
            paths.run_dir("base", tag)
    for tag in INSIDE:
        assert paths.checkpoint_dir("base", tag).resolve().parent == (base_folder / "checkpoints" / "base").resolve()


@pytest.mark.parametrize("path", LISTED)
def test_a_path_that_a_hub_lists_stays_in_its_folder(fake, path, tmp_path):  # noqa: F811
    assert hub.leaves_folder(path)
    assert not hub.leaves_folder("a/b..c/x.parquet")
    fake.files = {path: b"x", "a.parquet": b"x"}
    assert repr(path)[1:-1] in complaint(lambda: hub.fetch("org/name"))
    assert not list(tmp_path.rglob("*.parquet"))


@pytest.mark.parametrize("source", MODELS)
def test_a_model_of_a_hub_is_named_by_two_names(fake, source):  # noqa: F811
    assert "hf:ORG/NAME" in complaint(lambda: hub.fetch_model(source))
    assert not fake.seen


def test_a_link_out_of_a_folder_of_data_is_not_read(tmp_path):
    (tmp_path / "train.txt").write_text("secret")
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.txt").write_text("text " * 100)
    (folder / "b.txt").write_text("text " * 100)
    (folder / "c.txt").symlink_to("a.txt")  # inside
    (tmp_path / "link").symlink_to(folder)  # the user's own link
    for place in (folder, tmp_path / "link"):
        assert open_corpus(str(place))[0].block_count() == 2
    (folder / "train.txt").symlink_to(tmp_path / "train.txt")
    assert f"{folder / 'train.txt'} is a link" in complaint(lambda: open_corpus(str(folder)))
    (folder / "train.txt").unlink()
    (tmp_path / "train.jsonl").write_text("{}")
    (folder / "train.jsonl").symlink_to(tmp_path / "train.jsonl")
    assert "train.jsonl is a link" in complaint(lambda: find_split(folder, ["train"]))
    assert find_split(folder / "train.jsonl", ["train"])  # the user has named it


def test_a_planted_lock_overwrites_no_file(fake, tmp_path):  # noqa: F811
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for plant in (lambda lock: lock.symlink_to(victim), lambda lock: lock.symlink_to(tmp_path / "new"), os.mkfifo):
        plant(tmp_path / ".run.lock")
        assert ".run.lock" in complaint(lambda: paths.lock(tmp_path / "run"))
        (tmp_path / ".run.lock").unlink()
    fake.files = {"a.parquet": b"x"}
    folder = paths.base_dir() / "data/org--name"
    folder.mkdir(parents=True)
    (folder / ".lock").symlink_to(victim)
    assert ".lock" in complaint(lambda: hub.fetch("org/name"))
    assert victim.read_text() == "mine"
    assert not (tmp_path / "new").exists()
