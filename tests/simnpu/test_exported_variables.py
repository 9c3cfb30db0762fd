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


def compute(exported: dict[str, str], **arguments: Any) -> dict[str, Any]:
    """A case of cases.py on a simulated NPU, from a shell that has exported these variables and no others of `READ`."""
    kept = {name: value for name, value in os.environ.items() if name not in READ}
    kept |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, RUN]
    if "TASK_QUEUE_ENABLE" not in exported:  # which the simulator has set otherwise
        command += ["env", "-u", "TASK_QUEUE_ENABLE"]
    command += [sys.executable, WORKER, "cases"]
    request = {"function": "under_the_environment", "arguments": {"device": "npu:0", **arguments}}
    done = subprocess.run(
        command, env={**kept, **exported}, input=json.dumps(request) + "\n", capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0 and done.stdout, done.stderr[-3000:]
    answer = json.loads(done.stdout)
    assert "error" not in answer, answer["error"]
    return answer["result"]


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
    found = compute(exported)
    check(found)
    assert found["recorded"] > 0 and found["level"] == level
    assert "TASK_QUEUE_ENABLE" not in found["printed"]


@pytest.mark.parametrize("exported", [{}, {"TASK_QUEUE_ENABLE": "2"}], ids=["nothing", "level 2"])
def test_decoding_with_a_torch_npu_that_cannot_lower_its_queue(exported: dict[str, str]):
    """Before 2.13. It refuses to record at the second level. If a user has exported that, replies are decoded launch by
    launch, and the run prints it once, however many replies there are. Otherwise nanochat chooses the first level."""
    found = compute(exported, older=True)
    check(found)
    warnings = [line for line in found["printed"].splitlines() if "TASK_QUEUE_ENABLE" in line]
    assert len(warnings) == len(exported)
    assert (found["recorded"] == 0) == bool(exported)


HCCL = {
    **{
        "HCCL_CONNECT_TIMEOUT": "1800",
        "HCCL_EXEC_TIMEOUT": "1800",
        "HCCL_BUFFSIZE": "120",
        "HCCL_IF_BASE_PORT": "61000",
    },
    **{"HCCL_SOCKET_IFNAME": "lo", "HCCL_WHITELIST_DISABLE": "1", "HCCL_DETERMINISTIC": "true"},
    **{"HCCL_OP_EXPANSION_MODE": "AIV", "HCCL_ASYNC_ERROR_HANDLING": "0"},
}


def test_two_ranks_with_exported_hccl_variables(simulated: Callable[..., Any]):
    """Both ranks train on the same rows, so their losses are a single CPU's."""
    program = "import json; from simnpu import cases; print('found', json.dumps(cases.under_the_environment('npu')))"
    done = simulated(["-c", program], ranks=2, env=HCCL)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    assert len(lines) == 2
    for line in lines:
        check(json.loads(line.removeprefix("found ")))
