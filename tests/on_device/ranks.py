"""What several ranks compute together: each prints a line of JSON, by check its numbers or its error.

python -m nanochat.run.launch --nproc_per_node=2 tests/on_device/ranks.py npu    # all checks, for two ranks
python -m nanochat.run.launch --nproc_per_node=8 tests/on_device/ranks.py npu all_reduce
"""

import json
import sys
import time
import traceback
from collections.abc import Sequence

import torch
import torch.distributed as dist

from nanochat import device as devices
from nanochat import ranks as collectives
from nanochat import scaling
from nanochat.device import Device
from nanochat.gpt import GPT
from nanochat.ground.cli import end_with_launcher
from nanochat.train import make_optimizer, next_token_loss, train_step


def all_reduce(device: Device) -> None:
    numbers = torch.full((1024,), float(device.rank + 1), device=device.torch_device)
    dist.all_reduce(numbers)
    expected = device.world_size * (device.world_size + 1) / 2
    assert bool((numbers == expected).all()), f"all_reduce gave {numbers[0].item()}, expected {expected}"


def all_to_all(device: Device) -> None:
    """Other counts for each pair of ranks, none among them."""
    counts = [[0, 3], [5, 1]]  # rows that rank i sends to rank j
    leaving = counts[device.rank]
    arriving = [row[device.rank] for row in counts]
    rows = []
    for target, count in enumerate(leaving):
        rows += [[10.0 * device.rank + target, float(place)] for place in range(count)]
    expected = []
    for source, count in enumerate(arriving):
        expected += [[10.0 * source + device.rank, float(place)] for place in range(count)]
    sent = device.to_device(torch.tensor(rows).view(-1, 2))
    arrived = sent.new_empty(sum(arriving), 2)
    dist.all_to_all_single(arrived, sent, arriving, leaving)
    assert arrived.tolist() == expected, f"rank {device.rank} got {arrived.tolist()}, expected {expected}"


def reduce_scatter(device: Device) -> None:
    """reduce_scatter and all_gather of one tensor, as the optimizer uses them."""
    R = device.world_size
    whole = torch.arange(4.0 * R, device=device.torch_device)
    part = torch.empty(4, device=device.torch_device)
    dist.reduce_scatter_tensor(part, whole * (device.rank + 1))
    gathered = torch.empty_like(whole)
    dist.all_gather_into_tensor(gathered, part)
    expected = whole.cpu() * sum(range(1, R + 1))
    assert torch.equal(gathered.cpu(), expected), f"rank {device.rank} got {gathered.tolist()}"


def training(device: Device) -> None:
    """Three steps of a small model: both ranks must end with the same weights, and a lower loss."""
    config = scaling.model_config(3, 1024, 128)  # an odd number of matrices: Muon's shares are uneven
    model = GPT(config, device.kernels)
    model.init_weights(0)
    model.to(device.torch_device)
    optimizer = make_optimizer(model, scaling.rates(config, 1024, 1_024_000), device)
    generator = torch.Generator().manual_seed(device.rank)
    ids = device.to_device(torch.randint(1024, (4, 129), generator=generator))
    losses = []
    for _ in range(3):
        batch = (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        losses.append(float(train_step(model, optimizer, [batch], next_token_loss, device=device).loss))
    sums = [parameter.detach().double().sum().item() for parameter in model.cpu().parameters()]
    everyones = collectives.gather_values(sums, device)
    assert all(other == sums for other in everyones), "the ranks have different weights after three steps"
    assert losses[-1] < losses[0], f"the loss went from {losses[0]:.4f} to {losses[-1]:.4f}"


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


CHECKS = {check.__name__: check for check in (all_reduce, all_to_all, reduce_scatter, training, bandwidth)}


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
