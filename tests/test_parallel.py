"""Sharding changes nothing: ddp, fsdp and hybrid against one process on the same global batch."""

import math
from typing import Any

import pytest
import torch
from test_train import RATES, make_batch, masked, numbers, poisoned_loss, rows_of
from tiny import SHAPES, cpu_device, lively_model, run_ranks, tiny_config
from torch import Tensor
from torch.distributed.tensor import DTensor

from nanochat import parallel
from nanochat.cli import UserError
from nanochat.device import Device
from nanochat.evals.bpb import bits_per_byte
from nanochat.gpt import GPT, GPTConfig
from nanochat.optim import Optimizer
from nanochat.parallel import Layout, lay_out, shard
from nanochat.train import make_optimizer, next_token_loss, train_step

CONFIG = tiny_config(sequence_len=16)
STEPS = 20
LAYOUTS = {  # processes, --parallel, --replicate
    "ddp 2": (2, "ddp", 1),
    "fsdp 2": (2, "fsdp", 1),
    "fsdp 4": (4, "fsdp", 1),
    "hybrid 2 x 2": (4, "fsdp", 2),
}
Run = tuple[GPT, Optimizer]


def make_run(
    device: Device, how: str = "ddp", replicate: int = 1, *, config: GPTConfig = CONFIG, matrices: Any = "muon",
    recompute: bool = False,
) -> Run:  # fmt: skip
    model, layout = lively_model(config), lay_out(device, how, replicate)  # type: ignore[arg-type]
    shard(model, layout, device, recompute)
    return model, make_optimizer(model, RATES, device, matrices, layout)


def steps(run: Run, device: Device, count: int = STEPS) -> list[tuple[float, ...]]:
    """Each rank's rows of every batch, in two micro-batches; which rank has which rows changes no sum."""
    ranks = device.world_size
    figures = []
    for step in range(count):
        parts = rows_of(make_batch(step), *(slice(i, None, 2 * ranks) for i in (device.rank, device.rank + ranks)))
        figures.append(numbers(train_step(*run, parts, next_token_loss, device=device, momentum=0.9)))
    return figures


def whole_weights(model: GPT) -> dict[str, Tensor]:
    return {name: parallel.whole(parameter).clone() for name, parameter in model.named_parameters()}


def whole_state(optimizer: Optimizer) -> dict[str, Tensor]:
    return {name: parallel.whole(tensor).clone() for name, tensor in optimizer.state_dict().items()}


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[n].view(torch.int32), other[n].view(torch.int32)) for n in one
    )


def trained(device: Device, how: str, replicate: int, options: dict[str, Any]) -> dict[str, Any]:
    run = make_run(device, how, replicate, **options)
    figures = steps(run, device)
    return {"figures": figures, "weights": whole_weights(run[0]), "state": whole_state(run[1])}


@pytest.mark.parametrize("matrices", ["muon", "adamw"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_one_process(layout: str, matrices: str) -> None:
    ranks, how, replicate = LAYOUTS[layout]
    alone = trained(cpu_device(), "ddp", 1, {"matrices": matrices})
    for rank in (together := run_ranks(trained, how, replicate, {"matrices": matrices}, world_size=ranks)):
        for step, (expected, got) in enumerate(zip(alone["figures"], rank["figures"], strict=True)):
            assert got == pytest.approx(expected, rel=1e-5), step
        assert rank["figures"] == together[0]["figures"]
        assert same_bits(rank["weights"], together[0]["weights"])
        for part in ("weights", "state"):
            assert rank[part].keys() == alone[part].keys()
            for name, value in alone[part].items():
                assert rank[part][name].shape == value.shape, name
                torch.testing.assert_close(rank[part][name], value, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: n + m)


def recomputed(device: Device, how: str) -> bool:
    plain, saving = make_run(device, how), make_run(device, how, recompute=True)
    figures = steps(plain, device, 3), steps(saving, device, 3)
    return figures[0] == figures[1] and same_bits(whole_weights(plain[0]), whole_weights(saving[0]))


def test_activation_checkpointing_changes_no_bit() -> None:
    assert recomputed(cpu_device(), "ddp")
    assert run_ranks(recomputed, "fsdp") == [True, True]
