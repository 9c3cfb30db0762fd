"""What users export before they start a run: training and decoding give what a CPU gives.

torch_npu reads some variables as it is imported, so each case has its own process."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simnpu import cases, tomllib
from simnpu.conftest import WORKER

ROOT = Path(__file__).resolve().parents[2]
READ = ("TASK_QUEUE_ENABLE", "PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "ASCEND_LAUNCH_BLOCKING")
EXPORTED = tomllib.loads(Path(__file__).with_name("exported_variables.toml").read_text("utf-8"))
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("built")]


@functools.cache
def on_cpu() -> dict[str, Any]:
    return cases.under_the_environment("cpu")


def check(found: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(on_cpu()["losses"], rel=1e-5)
    assert found["replies"] == on_cpu()["replies"]


@pytest.mark.parametrize("level", [0, 1, 2])
def test_training_and_decoding_run_with_what_users_export(level: int):
    """A torch_npu before 2.13 cannot lower its queue and refuses to record at the second level. If a user has exported
    that, replies are decoded launch by launch, and the run prints it once, however many replies there are."""
    exported = EXPORTED["levels"][level]
    kept = {name: value for name, value in os.environ.items() if name not in READ}
    kept |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **exported}
    command = [sys.executable, str(ROOT / "tests/simnpu/run")]
    if "TASK_QUEUE_ENABLE" not in exported:  # which the simulator has set otherwise
        command += ["env", "-u", "TASK_QUEUE_ENABLE"]
    olders = (False, True) if level == 2 else (False,)
    text = ""
    for older in olders:
        arguments = {"device": "npu:0", "older": older}
        text += json.dumps({"function": "under_the_environment", "arguments": arguments}) + "\n"
    command += [sys.executable, WORKER, "cases"]
    done = subprocess.run(command, env=kept, input=text, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    for older, answer in zip(olders, map(json.loads, done.stdout.splitlines()), strict=True):
        found = answer["result"]
        check(found)
        printed = [line for line in found["printed"].splitlines() if "TASK_QUEUE_ENABLE" in line]
        assert len(printed) == older and (found["recorded"] == 0) == older
        assert older or found["level"] == level


def test_two_ranks_with_exported_hccl_variables(simulated: Callable[..., Any]):
    """Both ranks train on the same rows, so their losses are a single CPU's."""
    # The newline ends a line that other output may have begun.
    program = r"import json; from simnpu import cases; print('\nfound', json.dumps(cases.under_the_environment('npu')))"
    done = simulated(["-c", program], ranks=2, env=EXPORTED["hccl"])
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    assert len(lines) == 2, done.stdout[-2000:]
    for line in lines:
        check(json.loads(line.removeprefix("found ")))
