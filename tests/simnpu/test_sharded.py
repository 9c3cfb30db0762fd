"""The training step under ddp, fsdp and hybrid over the real HCCL process group: equal to one CPU, the bytes that it
hands to HCCL, that it never waits, and how much of the device's memory it takes (sharded_worker.py)."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from test_parallel import make_run, steps
from tiny import cpu_device

from simnpu import build

HERE = Path(__file__).resolve().parent


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_sharded_training(simulated: Callable, ranks: int, tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    simulator = build.environment()["PYTHONPATH"]
    path = os.pathsep.join((simulator, os.fspath(HERE.parents[1]), os.fspath(HERE.parent)))
    command = [sys.executable, *torchrun, os.fspath(HERE / "sharded_worker.py"), os.fspath(tmp_path)]
    done = simulated(command, devices=ranks, env={"PYTHONPATH": path, "HCCL_EXEC_TIMEOUT": "60"}, timeout=300)
    assert done.returncode == 0, done.stderr[-6000:]
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    expected = steps(make_run(cpu_device()), cpu_device(), 6)
    for rank in results:
        layouts = {"ddp", "fsdp", *(["hybrid"] if ranks == 4 else [])}
        assert set(rank) == layouts | {"counts", "memory"}
        for layout in layouts:
            for got, alone in zip(rank[layout], expected, strict=True):
                assert got == pytest.approx(alone, rel=1e-5), layout
            counts = rank["counts"][layout]
            counts["handed"]["all_to_all"] = counts["handed"].pop("all_to_all_v")  # as torch_npu asks for it
            assert counts["handed"] == counts["predicted"], layout
            assert counts["waits"] == 0, layout
        if ranks == 4:  # 0.25 of it are the shards; the rest is what a block gathers, and Muon's updates on their way
            assert rank["memory"]["peak"] <= 0.4 * rank["memory"]["whole"]
