"""Folders: below one base folder, moved by the environment, and no tag leads out of it."""

import os
import subprocess
import sys

from nanochat.ground import paths


def test_the_base_folder_is_read_from_the_environment_at_each_call(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    default = tmp_path / ".cache" / "nanochat"
    for value, base in ((str(tmp_path / "one"), tmp_path / "one"), ("~/two", tmp_path / "two"), ("", default)):
        monkeypatch.setenv("NANOCHAT_BASE_DIR", value)
        assert paths.base_dir() == base
        assert paths.tokenizer_dir() == base / "tokenizer"
        assert paths.checkpoint_dir("base", "d4") == base / "checkpoints" / "base" / "d4"
        assert paths.run_dir("sft", "d4") == base / "runs" / "sft" / "d4"
        assert not base.exists()  # naming a folder does not make it


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
