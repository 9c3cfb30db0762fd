"""Folders: below one base folder, moved by the environment, and no tag leads out of it."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanochat.ground import paths
from nanochat.ground.cli import UserError

OUTSIDE = (
    *("", ".", "..", "...", "../x", "../../etc/passwd", "..\\x", "x/..", "x/../../y", "./x", "/", "/etc", "//x", "x/"),
    *("x/y", "x\\y", "\\\\host\\share", "C:\\x", "C:x", "~", "~/x", "~root", "$HOME", "${HOME}", "`id`", "$(id)"),
    *("x;y", "x|y", "x&y", "x y", " x", "x ", "x\n", "\nx", "x\0", "x\0/../y", "%2e%2e%2f", "..%2f", "x*", "x?"),
    *(".hidden", ".tmp", "-rf", "--help", "\u2025/x", "\uff0e\uff0e/x", "\u2215etc", "x\u202e", "é", "模型", "x" * 101),
    *("file:///etc", "http://x", "x\ty", "x'y", 'x"y', "<x>"),
)


def test_the_base_folder_is_read_from_the_environment_at_each_call(monkeypatch, tmp_path):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "one"))
    assert paths.base_dir() == tmp_path / "one"
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "two"))
    assert paths.tokenizer_dir() == tmp_path / "two" / "tokenizer"
    assert paths.data_dir("climbmix") == tmp_path / "two" / "data" / "climbmix"
    assert paths.checkpoint_dir("base", "d4") == tmp_path / "two" / "checkpoints" / "base" / "d4"
    assert paths.run_dir("sft", "d4") == tmp_path / "two" / "runs" / "sft" / "d4"
    assert not (tmp_path / "two").exists()  # naming a folder does not make it
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NANOCHAT_BASE_DIR", "~/three")
    assert paths.base_dir() == tmp_path / "three"
    for unset in ("", None):
        if unset is None:
            monkeypatch.delenv("NANOCHAT_BASE_DIR")
        else:
            monkeypatch.setenv("NANOCHAT_BASE_DIR", unset)
        assert paths.base_dir() == tmp_path / ".cache" / "nanochat"


@pytest.mark.parametrize("tag", ["d4", "d12-long", "2024.05.01", "lr=0.1+wd", "_x", "A", "x" * 100, "a..b", "x.."])
def test_plain_names_pass(tag, monkeypatch, tmp_path):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    assert paths.safe_tag(tag) == tag
    assert paths.checkpoint_dir("base", tag).resolve().parent == (tmp_path / "checkpoints" / "base").resolve()


def test_fifty_ways_out_are_refused():
    assert len(set(OUTSIDE)) >= 50
    for tag in OUTSIDE:
        with pytest.raises(UserError, match="--model_tag") as caught:
            paths.safe_tag(tag)
        assert "\n" not in str(caught.value)
        for folder in (paths.checkpoint_dir, paths.run_dir):
            with pytest.raises(UserError):
                folder("base", tag)


def test_every_stage_has_its_script():
    scripts = {path.stem for path in (Path(__file__).parents[2] / "scripts").glob("*.py")}
    assert set(paths.STAGES.values()) <= scripts


def test_a_run_keeps_others_out_of_its_folder(tmp_path):
    folder = tmp_path / "run"
    program = (
        "import sys; from pathlib import Path; from nanochat.ground import paths\n"
        "try: paths.lock(Path(sys.argv[1]))\n"
        "except Exception as error: print(error)"
    )

    def another() -> str:
        command = [sys.executable, "-c", program, os.fspath(folder)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    paths.lock(folder)
    paths.lock(folder)  # its own
    message = another()
    assert f"process {os.getpid()} on " in message and "--model_tag" in message
    paths.unlock(folder)
    assert another() == ""


def test_a_planted_lock_overwrites_no_file(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for plant in (lambda lock: lock.symlink_to(victim), lambda lock: lock.symlink_to(tmp_path / "new"), os.mkfifo):
        plant(tmp_path / ".run.lock")
        with pytest.raises(UserError, match="is a link or no regular file") as caught:
            paths.lock(tmp_path / "run")
        assert "\n" not in str(caught.value)
        (tmp_path / ".run.lock").unlink()
    assert victim.read_text() == "mine" and not (tmp_path / "new").exists()


def test_an_error_of_a_write_gets_the_files_name():
    stale = errno.ESTALE
    with pytest.raises(OSError, match="Stale") as caught, paths.naming(Path("/x/metrics.jsonl")):
        raise OSError(stale, os.strerror(stale))
    assert caught.value.filename == "/x/metrics.jsonl"
    with pytest.raises(OSError) as caught, paths.naming(Path("/x")):
        raise FileNotFoundError(errno.ENOENT, "none", "/y")
    assert caught.value.filename == "/y"
