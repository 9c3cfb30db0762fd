"""What each rank of `sharded_worker.py FOLDER` does for test_sharded.py: the training step under each
layout over the real HCCL process group; written to FOLDER/<rank>.json."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from test_context import kept_and_sent, packed_steps
from test_parallel import make_run, steps, trained

from nanochat import device as devices
from nanochat.ground.sharding import local
from nanochat.optim import StateFormat

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
        "experts": {case: one["stats"] for case, one in experts.items()},
        "offloads": offloads(device, "fsdp"),
    }
    (folder / f"{device.rank}.json").write_text(json.dumps(results))
    devices.shutdown(device)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
