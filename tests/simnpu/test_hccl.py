"""hccl.c under the real torch_npu's process group; test_pipeline.py has collectives that fail or hang."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("hccl_worker.py")
MIXED = """
import torch, torch.distributed as dist
from nanochat import device
here = device.init("npu", "float32")
numbers = torch.ones(8, device="npu")
dist.all_reduce(numbers) if here.rank else dist.broadcast(numbers, 0)
"""


@pytest.mark.slow
def test_every_collective_gives_what_gloo_gives(simulated: Callable[..., Any], tmp_path: Path):
    done = simulated([str(WORKER), str(tmp_path)], ranks=4, env={"HCCL_EXEC_TIMEOUT": "60"})
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(4):
        outcomes = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(outcomes) > 30 and not [text for text in outcomes.values() if text], (rank, outcomes)


@pytest.mark.slow
def test_ranks_that_call_different_collectives_are_refused(simulated: Callable[..., Any]):
    done = simulated(["-c", MIXED], ranks=2, env={"HCCL_EXEC_TIMEOUT": "60"})
    assert done.returncode == 1 and "rank 0 broadcast" in done.stderr and "rank 1 all_reduce" in done.stderr
