"""Two devices of one host: collectives with uneven counts, a training step together, and bandwidth."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

from nanochat import device as devices
from on_device import ranks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def found(kind: str) -> list[dict[str, Any]]:
    """What each of two ranks has found: by check its numbers, or the text of its error."""
    if kind == "cpu":
        return [json.loads(text) for text in tiny.run_ranks(ranks.run_checks)]
    device = devices.init(kind)
    if device.module.device_count() < 2:
        pytest.skip("there is one device")
    if not device.can_train:
        pytest.skip(f"{device.name} is made for inference")
    command = [sys.executable, "-m", "nanochat.run.launch", "--nproc_per_node=2", ranks.__file__, kind]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    answers = done.stdout.split("rank {")[1:]  # two ranks may print into one line
    assert answers, done.stdout[-1000:] + done.stderr[-2000:]
    return [json.JSONDecoder().raw_decode("{" + answer)[0] for answer in answers]


@pytest.mark.parametrize("check", ranks.CHECKS)
def test_two_ranks(found: list[dict[str, Any]], measured: Callable[..., None], check: str):
    """Two devices find each other; uneven exchanges arrive; both have the same weights after three steps."""
    assert len(found) == 2, found
    for rank, checks in enumerate(found):
        assert check in checks, f"rank {rank} did not come so far"
        assert not isinstance(checks[check], str), checks[check]
    measured(**found[0][check])
