"""The training step under ddp, fsdp and hybrid, and of ranks that share rows, over the real HCCL process group equals
one CPU's (sharded_worker.py)."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from test_context import check_costs, packed_steps
from test_parallel import alone, make_run, same_steps, steps
from tiny import cpu_device

STEPS = 2  # as in the worker
WORKER = Path(__file__).resolve().parent / "sharded_worker.py"


@pytest.mark.slow
def test_sharded_training(simulated: Callable, tmp_path: Path) -> None:
    ranks = 4
    done = simulated([os.fspath(WORKER), os.fspath(tmp_path)], ranks=ranks, env={"HCCL_EXEC_TIMEOUT": "60"})
    assert done.returncode == 0, done.stderr[-6000:]
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    expected = steps(make_run(cpu_device()), cpu_device(), STEPS)
    documents = packed_steps(cpu_device(), "ddp", STEPS)
    for rank in results:
        for name in ("all four", "pairs"):
            same_steps(rank["documents"][name], documents, 4 if name == "all four" else 2)
        for layout in ("ddp", "fsdp", "hybrid"):
            same_steps(rank["losses"][layout], expected)
        for case, stats in rank["experts"].items():
            same_steps(stats, alone(case, STEPS)["stats"])
        whole, shared = rank["costs"]
        check_costs(shared, whole, 4, key_heads=4)
        assert rank["offloads"]
