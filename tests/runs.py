"""Runs that are stopped, resumed and compared: what they leave, their processes, and equal bytes at the end."""

import contextlib
import hashlib
import importlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tiny import is_running

from nanochat.ground import cli

ROOT = Path(__file__).resolve().parent.parent
TIMED = {"seconds", "tok_per_sec", "mfu", "peak_memory_bytes", "eta", "sampling_seconds", "training_seconds"}


# ---------------------------------------------------------------------- commands


def call(script: str, *argv: str) -> None:
    """Run a script's main in this process as the command line does; raises SystemExit with its exit code."""
    module = importlib.import_module(f"scripts.{script}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *argv])
        cli.run(module.main, module.Config)


def process(*command: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=env, input=stdin, capture_output=True, text=True, timeout=300
    )


def mistake(capsys, script: str, *argv: str, warnings: int = 0) -> tuple[int, str]:
    """The exit code and the one line of a command that cannot work, after this many warnings."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as leaving:
        call(script, *argv)
    err = capsys.readouterr().err
    *warned, last = err.splitlines()
    assert last.startswith("error: ") and [line[:9] for line in warned] == ["warning: "] * warnings, err
    return leaving.value.code, err


def refused(capsys, command: Sequence[str], *words: str, code: int = 1) -> None:
    """The command ends with this code, and its one line has these words."""
    found, line = mistake(capsys, *command)
    assert found == code and all(word in line for word in words), (found, line)


# ---------------------------------------------------------------------- what a run leaves


def metrics(base: Path, stage: str, tag: str = "d1") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (base / "runs" / stage / tag / "metrics.jsonl").read_text().splitlines()]


def losses(base: Path, stage: str, tag: str = "d1") -> list[float]:
    return [line["loss"] for line in metrics(base, stage, tag)]


def lasting(base: Path, stage: str, tag: str = "d1") -> list[dict[str, Any]]:
    """What was logged, without the times."""
    return [{name: value for name, value in line.items() if name not in TIMED} for line in metrics(base, stage, tag)]


def sha256(base: Path, stage: str, step: int, tag: str = "d1", name: str = "model.safetensors") -> str:
    path = base / "checkpoints" / stage / tag / f"step_{step:06d}" / name
    return hashlib.sha256(path.read_bytes()).hexdigest()


def forget_after(base: Path, stage: str, step: int, tag: str = "d1") -> None:
    """Delete the later steps, as if the run had stopped after this one."""
    for folder in (base / "checkpoints" / stage / tag).glob("step_*"):
        if int(folder.name.removeprefix("step_")) > step:
            shutil.rmtree(folder)


def exactly_resumed(
    base: Path, script: str, stage: str, flags: Sequence[str], steps: int, parts: Sequence[int] = (), tag: str = "d1"
) -> Callable[..., None]:
    """Straight through; then again from the middle and from a quarter, or from the steps `parts`.

    Returns the function that resumes from a step, after those behind it or behind `kept` are deleted, and compares.
    """
    call(script, *flags)
    folder = base / "checkpoints" / stage / tag
    # The manifest and meta.json have seconds in them.
    names = {path.name for path in (folder / f"step_{steps:06d}").iterdir()} - {"manifest.json", "meta.json"}
    assert {"model.safetensors", "adapter.safetensors"} & names and len(names) > 3

    def outcome() -> Any:
        return lasting(base, stage, tag), {name: sha256(base, stage, steps, tag, name) for name in names}

    straight = outcome()

    def resume_from(step: int, kept: int | None = None) -> None:
        forget_after(base, stage, kept or step, tag)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            call(script, *flags, "--resume")
        print(printed.getvalue())
        assert f"resumed from {folder}/step_{step:06d}" in printed.getvalue()
        assert outcome() == straight

    for step in parts or (steps // 2, steps // 4):
        resume_from(step)
    return resume_from


# ---------------------------------------------------------------------- its processes


def environment(base: Path) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "NANOCHAT_BASE_DIR": str(base), "PYTHONPATH": str(ROOT)}


def start(base: Path, arguments: list[str]) -> tuple[subprocess.Popen, Path]:
    """A run whose output goes to a file; Ctrl-C is not ignored, as it would be behind a shell's &."""
    output = base.with_suffix(".txt")
    with output.open("w") as file:
        process = subprocess.Popen(
            arguments, cwd=ROOT, env=environment(base), stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
    return process, output


def wait_for(output: Path, pattern: str, process: subprocess.Popen, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not re.search(pattern, output.read_text(), re.MULTILINE):
        assert process.poll() is None and time.monotonic() < deadline, output.read_text()
        time.sleep(0.02)


def workers_of(process: subprocess.Popen) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def kill(process: subprocess.Popen) -> None:
    """What is left of a failed test."""
    left = [] if process.poll() is not None else [*workers_of(process), process.pid]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    process.wait()


@contextmanager
def running(base: Path, arguments: list[str]) -> Iterator[tuple[subprocess.Popen, Path]]:
    process, output = start(base, arguments)
    try:
        yield process, output
    finally:
        kill(process)


def until_gone(pids: Sequence[int], output: Path) -> float:
    """Seconds until none of these processes is left: 30 at most."""
    began = time.monotonic()
    while any(map(is_running, pids)):
        assert time.monotonic() - began < 30, output.read_text()
        time.sleep(0.05)
    return time.monotonic() - began
