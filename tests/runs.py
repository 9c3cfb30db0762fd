"""Runs that are stopped, resumed and compared: what they leave, their processes, and equal bytes at the end."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from test_scripts import call
from tiny import is_running

ROOT = Path(__file__).resolve().parent.parent
TIMED = {"seconds", "tok_per_sec", "mfu", "peak_memory_bytes", "eta", "sampling_seconds", "training_seconds"}


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
) -> None:
    """Straight through; then again from the middle and from a quarter, or from the ends of `parts`."""
    call(script, *flags)
    folder = base / "checkpoints" / stage / tag
    # The manifest and meta.json have seconds in them.
    names = {path.name for path in (folder / f"step_{steps:06d}").iterdir()} - {"manifest.json", "meta.json"}
    assert {"model.safetensors", "adapter.safetensors"} & names and len(names) > 3

    def outcome() -> Any:
        return lasting(base, stage, tag), {name: sha256(base, stage, steps, tag, name) for name in names}

    straight = outcome()
    for kept in parts or (steps // 2, steps // 4):
        forget_after(base, stage, kept, tag)
        call(script, *flags, "--resume")
        assert outcome() == straight


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
