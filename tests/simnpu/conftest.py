"""Processes on simulated NPUs, and what is said when they cannot."""

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from simnpu import build, forks

WORKER = str(Path(__file__).with_name("worker.py"))
Simulated = Callable[..., subprocess.CompletedProcess[str]]


@contextlib.contextmanager
def computing(module: str, env: dict[str, str] | None = None, **options: Any) -> Iterator[Callable[..., Any]]:
    """A simulated process that calls functions of a module of simnpu/: `compute("function", argument=1)` is the result.

    Many tests share one. The options are those of `build.environment`, `env` adds variables."""
    (in_read, in_write), (out_read, out_write) = os.pipe(), os.pipe()
    running = forks.start([WORKER, module], [in_read, out_write, 2], env=env, **options)
    os.close(in_read)
    os.close(out_write)
    stdin, stdout = os.fdopen(in_write, "w"), os.fdopen(out_read)

    def compute(function: str, **arguments: Any) -> Any:
        print(json.dumps({"function": function, "arguments": arguments}), file=stdin, flush=True)
        line = stdout.readline()
        assert line, f"the simulated process died: {running.wait(30)}"
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    yield compute
    stdin.close()
    assert running.wait(30) == 0, "the simulated process did not end well"
    stdout.close()


@pytest.fixture(scope="session")
def built() -> None:
    try:
        build.environment()
    except build.Unavailable as reason:
        pytest.skip(f"NO SIMULATED NPU: {reason}")


@pytest.fixture(scope="session")
def simulated(built: None) -> Simulated:
    """Runs a command on simulated NPUs: `simulated(["-c", "..."], devices=2)`, or as several ranks with a device each:
    `simulated(["script.py"], ranks=2)`."""
    return forks.simulated
