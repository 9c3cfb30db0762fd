"""What several ranks compute together: each prints a line of JSON, by check its numbers or its error.

python -m nanochat.run.launch --nproc_per_node=2 tests/on_device/ranks.py npu    # all checks
python -m nanochat.run.launch --nproc_per_node=8 tests/on_device/ranks.py npu all_reduce
"""

import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from nanochat import device as devices
from nanochat import scaling
from nanochat.device import Device
from nanochat.gpt import GPT
from nanochat.ground.cli import end_with_launcher
from nanochat.ranks import Layout, lay_out
from nanochat.train import make_optimizer, next_token_loss, train_step

LOSS_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-3}


def all_reduce(device: Device) -> None:
    numbers = torch.full((1024,), float(device.rank + 1), device=device.torch_device)
    dist.all_reduce(numbers)
    expected = device.world_size * (device.world_size + 1) / 2
    assert bool((numbers == expected).all()), f"all_reduce gave {numbers[0].item()}, expected {expected}"


def training(
    device: Device, parallel: Any = "ddp", expert_parallel: bool = False, experts: int = 0
) -> dict[str, float]:
    """Three steps of a small model on rows of all ranks: the losses must fall, and be as on one CPU."""
    # An odd number of matrices, so that Muon's shares are uneven.
    config = replace(scaling.model_config(4, 1024, 128, head_dim=64), n_layer=3)
    if experts:
        config = replace(config, experts=experts, experts_per_token=2, mlp_width=128)
    cpu = Device("cpu", torch.cpu, torch.float32, 0, 0, 1, "cpu", None)
    ids = torch.randint(1024, (2 * device.world_size, 129), generator=torch.Generator().manual_seed(0))
    losses: list[list[float]] = []
    for where, layout in ((device, lay_out(device, parallel, 1, expert_parallel)), (cpu, Layout())):
        model = GPT(config, where.kernels)
        model.init_weights(0)
        for name, parameter in model.named_parameters():
            if name.endswith("router.bias"):
                parameter.data[-experts // device.world_size :] = -5  # the last rank's experts get no token
        layout.shard(model.to(where.torch_device), where)
        optimizer = make_optimizer(model, scaling.rates(config, 1024, 1_024_000), where, layout=layout)
        rows = where.to_device(ids[where.data_rank :: where.data_ranks].contiguous())
        batch = (rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        steps = (train_step(model, optimizer, [batch], next_token_loss, device=where) for _ in range(3))
        losses.append([float(step.loss) for step in steps])
    found, expected = losses
    error = max(abs(one - other) / other for one, other in zip(found, expected, strict=True))
    assert error <= LOSS_TOLERANCES[device.dtype], f"losses {found}, on one CPU {expected}"
    assert expected[-1] < expected[0] - 0.1, f"the loss went from {expected[0]:.4f} to {expected[-1]:.4f}"
    return {"loss_difference": error, "loss_fell": found[0] - found[-1]}


def bandwidth(device: Device) -> dict[str, float]:
    """Bytes of a tensor over the time of one all-reduce, by its size."""
    found = {}
    for mebibytes in (1, 16) if device.kind == "cpu" else (1, 16, 128):
        tensor = torch.zeros(mebibytes * 2**20 // 4, device=device.torch_device)  # fp32
        for repeats in (2, 5):  # the first round warms up
            device.synchronize()
            began = time.perf_counter()
            for _ in range(repeats):
                dist.all_reduce(tensor)
            device.synchronize()
            seconds = (time.perf_counter() - began) / repeats
        found[f"gigabytes_per_second_at_{mebibytes}_mib"] = mebibytes * 2**20 / 1e9 / seconds
    return found


CHECKS: dict[str, Callable[[Device], dict[str, float] | None]] = {
    "all_reduce": all_reduce,
    "ddp": training,
    "fsdp": lambda device: training(device, "fsdp"),
    # Context parallelism: two neighbours share their rows.
    "shared_rows": lambda device: training(replace(device, context_ranks=2), "fsdp"),
    # Whole experts on each rank. No token travels to the last rank.
    "experts": lambda device: training(device, "fsdp", True, experts=4 * device.world_size),
    "bandwidth": bandwidth,
}


def run_checks(device: Device, names: Sequence[str] = tuple(CHECKS)) -> str:
    """Run them; returns what each has measured, or its error, as JSON. The first error ends them: the other rank may
    wait for this one."""
    found: dict[str, dict[str, float] | str] = {}
    for name in names:
        try:
            found[name] = CHECKS[name](device) or {}
        except Exception:
            found[name] = traceback.format_exc()
            break
    return json.dumps(found)


if __name__ == "__main__":
    end_with_launcher()
    here = devices.init(sys.argv[1])
    if not dist.is_initialized():  # init makes no group for one process
        dist.init_process_group(here.runtime.backend)
    answer = run_checks(here, sys.argv[2:] or tuple(CHECKS))
    print(f"rank {answer}", flush=True)
    for error in json.loads(answer).values():
        if isinstance(error, str):
            sys.exit(error)  # the launcher ends the other ranks
    devices.shutdown(here)
