"""What users export before they start a run: training and decoding give what a CPU gives.

torch_npu reads some variables as it is imported, so each test has a process of its own."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simnpu import cases
from simnpu.conftest import WORKER

ROOT = Path(__file__).resolve().parents[2]
RUN = str(ROOT / "tests/simnpu/run")
READ = ("TASK_QUEUE_ENABLE", "PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "ASCEND_LAUNCH_BLOCKING")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("built")]


def compute(exported: dict[str, str], *older: bool) -> list[dict[str, Any]]:
    """A case of cases.py on a simulated NPU, from a shell that has exported these variables and no others of `READ`:
    with this torch_npu, or as with one before 2.13."""
    kept = {name: value for name, value in os.environ.items() if name not in READ}
    kept |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **exported}
    command = [sys.executable, RUN]
    if "TASK_QUEUE_ENABLE" not in exported:  # which the simulator has set otherwise
        command += ["env", "-u", "TASK_QUEUE_ENABLE"]
    command += [sys.executable, WORKER, "cases"]
    requests = [
        json.dumps({"function": "under_the_environment", "arguments": {"device": "npu:0", "older": one}})
        for one in older
    ]
    text = "\n".join(requests) + "\n"
    done = subprocess.run(command, env=kept, input=text, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and done.stdout, done.stderr[-3000:]
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert not [answer for answer in answers if "error" in answer], answers
    return [answer["result"] for answer in answers]


@functools.cache
def on_cpu() -> dict[str, Any]:
    return cases.under_the_environment("cpu")


def check(found: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(on_cpu()["losses"], rel=1e-5)
    assert found["replies"] == on_cpu()["replies"]


EXPORTED = [  # and the level of the task queue that torch_npu then reports
    ({"TASK_QUEUE_ENABLE": "0", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}, 0),
    ({"TASK_QUEUE_ENABLE": "1", "PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:128,garbage_collection_threshold:0.8"}, 1),
    ({"TASK_QUEUE_ENABLE": "2", "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False"}, 2),
    ({"ASCEND_LAUNCH_BLOCKING": "1"}, 0),
]


@pytest.mark.parametrize(("exported", "level"), EXPORTED, ids=["level 0", "level 1", "level 2", "blocking"])
def test_training_and_decoding_run_with_what_users_export(exported: dict[str, str], level: int):
    """An older torch_npu cannot lower its queue and refuses to record at the second level. If a user has exported that,
    replies are decoded launch by launch, and the run prints it once, however many replies there are."""
    found, *older = compute(exported, *([False, True] if level == 2 else [False]))
    for one in (found, *older):
        check(one)
        printed = [line for line in one["printed"].splitlines() if "TASK_QUEUE_ENABLE" in line]
        assert len(printed) == (one is not found) and (one["recorded"] == 0) == (one is not found)
    assert found["level"] == level


def test_an_older_torch_npu_records_where_nothing_is_exported():
    """nanochat chooses the first level."""
    (found,) = compute({}, True)
    check(found)
    assert found["recorded"] > 0 and "TASK_QUEUE_ENABLE" not in found["printed"]


HCCL = {
    "HCCL_CONNECT_TIMEOUT": "1800", "HCCL_EXEC_TIMEOUT": "1800", "HCCL_BUFFSIZE": "120", "HCCL_IF_BASE_PORT": "61000",
    "HCCL_SOCKET_IFNAME": "lo", "HCCL_WHITELIST_DISABLE": "1", "HCCL_DETERMINISTIC": "true",
    "HCCL_OP_EXPANSION_MODE": "AIV", "HCCL_ASYNC_ERROR_HANDLING": "0",
}  # fmt: skip


def test_two_ranks_with_exported_hccl_variables(simulated: Callable[..., Any]):
    """Both ranks train on the same rows, so their losses are a single CPU's."""
    # The newline ends a line that other output may have begun.
    program = r"import json; from simnpu import cases; print('\nfound', json.dumps(cases.under_the_environment('npu')))"
    done = simulated(["-c", program], ranks=2, env=HCCL)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    assert len(lines) == 2, done.stdout[-2000:]
    for line in lines:
        check(json.loads(line.removeprefix("found ")))
