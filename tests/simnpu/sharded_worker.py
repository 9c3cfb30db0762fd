"""What each rank of `sharded_worker.py FOLDER` does for test_sharded.py: the training step under each
layout over the real HCCL process group, its waits and its memory; written to FOLDER/<rank>.json."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from test_context import kept_and_sent, packed_steps
from test_parallel import RATES, VARIANTS, make_run, rows_of_rank, steps, trained
from test_train import make_batch
from tiny import tiny_config

from nanochat import device as devices
from nanochat.gpt import GPT
from nanochat.ground.sharding import local
from nanochat.optim import StateFormat
from nanochat.ranks import lay_out
from nanochat.train import make_optimizer, next_token_loss, train_step
from simnpu import counts

STEPS = 2
LAYOUTS = {"ddp": ("ddp", 1), "fsdp": ("fsdp", 1), "hybrid": ("fsdp", 2)}
SHARED = {"all four": ("ddp", 1, 4), "pairs": ("fsdp", 2, 2)}  # with the number of ranks that share rows
EXPERTS = "an expert without tokens"


def state_and_weights(device: devices.Device, how: str, in_main_memory: bool) -> tuple[dict[str, Any], set[str]]:
    """This rank's after two steps, in main memory, and where the state was kept."""
    kept_as = StateFormat(torch.bfloat16, in_main_memory)
    model, optimizer = run = make_run(device, how, kept_as=kept_as)
    steps(run, device, 2)
    device.synchronize()
    state = optimizer.state_dict()
    tensors = {name: local(tensor).cpu().clone() for name, tensor in (state | dict(model.named_parameters())).items()}
    return tensors, {tensor.device.type for name, tensor in state.items() if "moment" in name}


def offloads(device: devices.Device, how: str) -> bool:
    """Whether state in main memory changes no bit."""
    kept, where = state_and_weights(device, how, True)
    expected, _ = state_and_weights(device, how, False)
    return "cpu" in where and all(torch.equal(kept[name], tensor) for name, tensor in expected.items())


def waits(device: devices.Device, how: Any, replicate: int, context_ranks: int = 1) -> int:
    """The host's waits in a step of two micro-batches in bfloat16."""
    device = replace(device, dtype=torch.bfloat16, context_ranks=context_ranks)
    run = make_run(device, how, replicate)
    steps(run, device, 1)
    batches = [[device.to_device(part) for part in make_batch(i)] for i in range(2)]
    return waits_of(run, batches, device)


def waits_of(run: Any, batches: list[Any], device: devices.Device) -> int:
    with counts.counted() as seen:
        train_step(*run, batches, next_token_loss, device=device)
    return seen.waits


def expert_waits(device: devices.Device, expert_parallel: bool) -> int:
    """The same with experts."""
    device = replace(device, dtype=torch.bfloat16)
    run = make_run(device, "fsdp", expert_parallel=expert_parallel, **VARIANTS[EXPERTS])
    train_step(*run, rows_of_rank(device, 1), next_token_loss, device=device)
    return waits_of(run, rows_of_rank(device, 3), device)


def memory(device: devices.Device) -> dict[str, int]:
    """Bytes: the most that this rank's allocator held from the empty model to the end of two steps, and what the
    whole model's parameters, gradients and optimizer state are."""
    config = tiny_config(n_layer=12, width=128, n_head=4, n_kv_head=4, vocab_size=1024, sequence_len=16)
    device.module.empty_cache()
    device.module.reset_peak_memory_stats()
    begin = device.module.memory_allocated()
    layout = lay_out(device, "fsdp")
    with torch.device("meta"):
        model = GPT(config, device.kernels)
    layout.shard(model, device)
    model.to_empty(device=device.torch_device)
    model.init_weights()
    optimizer = make_optimizer(model, RATES, device, layout=layout)
    for step in range(2):
        tokens = torch.randint(0, 1024, (1, 17), generator=torch.Generator().manual_seed(step))
        batch = device.to_device(tokens[:, :-1].contiguous()), device.to_device(tokens[:, 1:].contiguous())
        train_step(model, optimizer, [batch], next_token_loss, device=device)
    device.synchronize()
    weights = sum(p.numel() for p in model.parameters())
    whole = 4 * (2 * weights + sum(t.numel() for t in optimizer.state_dict().values()))
    return {"peak": device.module.max_memory_allocated() - begin, "whole": whole}


def main(folder: Path) -> None:
    device = devices.init("npu", "float32")
    from nanochat.kernels.npu import compressed_mask  # imports torch_npu

    alone = replace(device, world_size=1)
    four = replace(device, context_ranks=4)
    mask = compressed_mask(device.torch_device)
    cases = dict.fromkeys((EXPERTS, "adapters of experts"), STEPS)
    experts = trained(device, "fsdp", 1, cases, expert_parallel=True)
    results = {
        "losses": {name: steps(make_run(device, *layout), device, STEPS) for name, layout in LAYOUTS.items()},
        "costs": [kept_and_sent(where, device.kernels, mask) for where in (alone, four)],
        "documents": {
            name: packed_steps(replace(device, context_ranks=context_ranks), how, STEPS)
            for name, (how, _, context_ranks) in SHARED.items()
        },
        "waits": {name: waits(device, *layout) for name, layout in (LAYOUTS | SHARED).items()},
        "experts": {case: one["stats"] for case, one in experts.items()},
        "expert waits": [expert_waits(device, is_parallel) for is_parallel in (True, False)],
        "memory": memory(device),
        "offloads": offloads(device, "fsdp"),
    }
    (folder / f"{device.rank}.json").write_text(json.dumps(results))
    devices.shutdown(device)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
