"""Ranks that do not fit together over the simulated HCCL. What its collectives compute is shown by test_sharded.py and
test_pipeline.py, where a model on several NPUs learns what a CPU does; the latter has collectives that fail or hang."""

from collections.abc import Callable
from typing import Any

import pytest

PROGRAM = """
import sys, torch, torch.distributed as dist
from nanochat import device
here = device.init("npu", "float32")
numbers = torch.ones(8, device=here.torch_device)
if sys.argv[1] == "mixed":
    dist.all_reduce(numbers) if here.rank else dist.broadcast(numbers, 0)
if sys.argv[1] == "sizes":
    dist.all_reduce(numbers[here.rank :].clone())
if sys.argv[1] == "undocumented":
    dist.all_gather_into_tensor(torch.zeros(16, dtype=torch.int64, device=here.torch_device), numbers.long())
"""
MISTAKES = {
    "mixed": ("rank 0 broadcast", "rank 1 all_reduce"),
    "sizes": ("sends 28 bytes", "expects 32"),
    "undocumented": ("all_gather_into_tensor of int64", "error code is 5"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_ranks_that_do_not_fit_are_refused(simulated: Callable[..., Any], mistake: str):
    done = simulated(["-c", PROGRAM, mistake], ranks=2, env={"HCCL_EXEC_TIMEOUT": "60"})
    assert done.returncode == 1 and any(word in done.stderr for word in MISTAKES[mistake]), done.stderr[-2000:]
