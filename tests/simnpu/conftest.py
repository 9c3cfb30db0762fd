"""Processes on simulated NPUs, and what is said when they cannot."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from simnpu import build

ROOT = Path(__file__).resolve().parents[2]
RANKS = str(ROOT / "tests/simnpu/ranks.py")
WORKER = str(ROOT / "tests/simnpu/worker.py")
Simulated = Callable[..., subprocess.CompletedProcess[str]]


@contextlib.contextmanager
def computing(module: str, env: dict[str, str] | None = None, **options: str) -> Iterator[Callable[..., Any]]:
    """A simulated process that calls functions of a module of simnpu/: `compute("function", argument=1)` is the result.

    Starting torch_npu takes seconds, so that many tests share one. The options are those of `build.environment`."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **build.environment(**options), **(env or {})}
    process = subprocess.Popen(
        [sys.executable, WORKER, module], env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin and process.stdout

    def compute(function: str, **arguments: Any) -> Any:
        print(json.dumps({"function": function, "arguments": arguments}), file=process.stdin, flush=True)
        line = process.stdout.readline()
        assert line, f"the simulated process died: {process.wait()}"
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    yield compute
    process.stdin.close()
    assert process.wait(timeout=30) == 0, "the simulated process did not end well"


@pytest.fixture(scope="session")
def built() -> None:
    try:
        build.environment()
    except build.Unavailable as reason:
        pytest.skip(f"NO SIMULATED NPU: {reason}")


@pytest.fixture(scope="session")
def simulated(built: None) -> Simulated:
    """Runs a command on simulated NPUs: `simulated(["-c", "..."], devices=2)`, or as several ranks with a device each:
    `simulated(["script.py"], ranks=2)`. The options are those of `build.environment`, `env` adds variables, and a
    command that begins with no program is this Python's."""

    def run(
        command: Sequence[str],
        devices: int = 1,
        ranks: int = 1,
        env: dict[str, str] | None = None,
        timeout: float = 300,
        **options: str,
    ) -> subprocess.CompletedProcess[str]:
        places = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        kept = {name: value for name, value in os.environ.items() if name not in places}
        simulator = build.environment(devices=max(devices, ranks), **options)
        variables = {**kept, "OMP_NUM_THREADS": "1", **simulator, **(env or {})}
        if ranks > 1:
            command = [RANKS, str(ranks), *command]
        words = [sys.executable, *command] if command[0].startswith("-") or command[0].endswith(".py") else command
        return subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=timeout)

    return run
