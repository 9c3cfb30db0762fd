"""All devices of one host: collectives, training in every layout against one CPU, and bandwidth."""

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
    """What each rank has found: by check its numbers, or the text of its error."""
    if kind == "cpu":
        return [json.loads(text) for text in tiny.run_ranks(ranks.run_checks)]
    device = devices.init(kind)
    count = device.module.device_count()
    if count < 2:
        pytest.skip("there is one device")
    if not device.can_train:
        pytest.skip(f"{device.name} is made for inference")
    count = 1 << (count.bit_length() - 1)  # HCCL's pages exclude 3, 5, 6 and 7
    command = [sys.executable, "-m", "nanochat.run.launch", f"--nproc_per_node={count}", ranks.__file__, kind]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    answers = done.stdout.split("rank {")[1:]  # several ranks may print into one line
    assert len(answers) == count, done.stdout[-1000:] + done.stderr[-2000:]
    return [json.JSONDecoder().raw_decode("{" + answer)[0] for answer in answers]


@pytest.mark.parametrize("check", ranks.CHECKS)
def test_ranks(found: list[dict[str, Any]], measured: Callable[..., None], check: str):
    """The devices find each other; uneven exchanges arrive; each layout of a training run learns as one CPU."""
    for rank, checks in enumerate(found):
        assert check in checks, f"rank {rank} did not come so far"
        error = checks[check]
        assert not isinstance(error, str), f"rank {rank}: {error.splitlines()[-1]}\n{error}"
    measured(devices=len(found), **found[0][check])
