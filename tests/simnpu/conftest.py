"""Processes on simulated NPUs, and what is said when they cannot."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from simnpu import build

ROOT = Path(__file__).resolve().parents[2]
RANKS = str(ROOT / "tests/simnpu/ranks.py")
Simulated = Callable[..., subprocess.CompletedProcess[str]]


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
