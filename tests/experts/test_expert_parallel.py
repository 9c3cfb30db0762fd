"""Ranks that hold whole experts gather none of them, send rows by a formula, skip bad steps and decode.

That they learn as one process is promise T8.
"""

from typing import Any

import pytest
import torch
from runs import call
from test_parallel import QWEN3_MOE, VARIANTS, Collectives, generated, make_run, of_experts, skipped
from test_scripts import base  # noqa: F401 (base is a fixture)
from test_stages import BASE, pretrained, start  # noqa: F401 (fixtures)
from test_train import make_batch
from tiny import FOUR_EXPERTS, complaint, cpu_device, run_ranks, tiny_config
from torch import Tensor

from nanochat.adapters import lora
from nanochat.device import Device
from nanochat.gpt import GPT
from nanochat.ground.sharding import local
from nanochat.kernels.grouped import Groups
from nanochat.parallel.experts import Journey, WholeExperts
from nanochat.parallel.mesh import Place
from nanochat.ranks import lay_out
from nanochat.train import next_token_loss


def costs(device: Device, expert_parallel: bool, recompute: bool) -> dict[str, Any]:
    """Bytes of a forward and a backward pass by kind of collective, and elements of experts that a rank holds."""
    model, _ = make_run(device, "fsdp", expert_parallel=expert_parallel, config=of_experts(), recompute=recompute)
    held = [local(p).numel() for name, p in model.named_parameters() if ".mlp.input" in name or ".mlp.output" in name]
    with Collectives() as seen:
        loss, _ = next_token_loss(model, make_batch(device.rank))
        loss.backward()
    return {"bytes": dict(seen.bytes), "events": seen.events, "held": sum(held)}


def on_two_ranks(device: Device) -> dict[str, Any]:
    return {
        "skipped": skipped(device, expert_parallel=True, **VARIANTS["shared experts"]),
        "generated": generated(device, "fsdp", expert_parallel=True, config=QWEN3_MOE),
        "costs": [costs(device, *how) for how in ((False, False), (True, False), (True, True))],
    }


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks)


@pytest.mark.slow
def test_a_bad_step_on_one_rank_changes_nothing(two_ranks):
    assert [rank["skipped"] for rank in two_ranks] == [[0.0, 0.0, True, 1.0, True]] * 2


@pytest.mark.slow
def test_each_rank_decodes_with_all_experts(two_ranks):
    expected = generated(cpu_device(), "ddp", config=QWEN3_MOE)
    assert [rank["generated"] for rank in two_ranks] == [expected, expected] and len(expected) == 2


@pytest.mark.slow
def test_no_expert_is_gathered_and_rows_travel_by_formula(two_ranks):
    config = of_experts()
    layers = config.n_layer
    weights = layers * config.experts * 2 * config.width * config.mlp_width
    rows = 8 * 16 * config.experts_per_token
    sent = 0
    for rank in two_ranks:
        gathered, travelled, recomputed = rank["costs"]
        assert (gathered["held"], travelled["held"]) == (weights // 2, weights // 2)
        # fsdp gathers the weights of experts twice, and reduces their gradients. Exactly these bytes are gone.
        before, after = gathered["bytes"], travelled["bytes"]
        assert before["all_gather"] - after["all_gather"] == 2 * 4 * weights
        assert before["reduce_scatter"] - after["reduce_scatter"] == 4 * weights
        assert "all_to_all" not in before
        assert travelled["events"].count("all_to_all") == layers * 5
        assert recomputed["events"].count("all_to_all") == layers * 8
        sent += after["all_to_all"]
    # Both ranks together: the counts of each layer, and each row four times.
    assert sent == 2 * layers * (8 * config.experts + 4 * 4 * rows * config.width)


# ---------------------------------------------------------------------- without ranks


def test_a_journey_sorts_rows_by_expert_and_back():
    """Of 2 ranks with 3 experts each, this one receives 1, 0 and 2 rows from one, and 2, 1 and 0 from the other."""

    class Pretended(Journey):
        def _exchange(self, rows: Tensor, leaving: list[int], arriving: list[int]) -> Tensor:
            assert len(rows) == sum(leaving) == sum(arriving)
            return rows

    counts = [1, 0, 2, 2, 1, 0]
    journey = Pretended(counts, counts, Place(0, 2))
    assert (journey.leaving, journey.arriving) == ([3, 3], [3, 3])
    arrived = torch.tensor([0, 2, 2, 0, 0, 1])[:, None]
    gone = journey.go(arrived)
    assert gone.flatten().tolist() == [0, 0, 0, 1, 2, 2]
    assert journey.come_back(gone).flatten().tolist() == arrived.flatten().tolist()
    groups = journey.groups(torch.tensor(counts))
    assert (groups.rows, groups.sizes, groups.counts.tolist()) == (6, [3, 1, 2], [3, 1, 2])

    nothing = Pretended([0] * 6, [0] * 6, Place(0, 2))
    gone = nothing.go(torch.ones(0, 5))
    assert gone.tolist() == [[0.0] * 5] and nothing.come_back(gone).shape == (0, 5)
    groups = nothing.groups(torch.zeros(6, dtype=torch.long))
    assert (groups.rows, groups.sizes, groups.counts.tolist()) == (1, [1, 0, 0], [1, 0, 0])
    assert Groups(1, groups.counts).sizes == groups.sizes


@pytest.mark.parametrize(("world_size", "parallel"), [(1, "fsdp"), (2, "ddp")])
def test_layouts_without_whole_experts_are_refused(world_size, parallel):
    line = complaint(lambda: lay_out(cpu_device(world_size=world_size), parallel, 1, True))
    assert "--expert_parallel needs --parallel fsdp" in line and f"processes here: {world_size}" in line


@pytest.mark.parametrize(
    ("config", "ranks", "base_format", "words"),
    [
        (tiny_config(**FOUR_EXPERTS), 3, None, ("3 processes", "4 experts", "use 2 or 4")),
        (tiny_config(), 2, None, ("--expert_parallel", "leave it out")),
        (QWEN3_MOE, 2, "nf4", ("--lora_base nf4",)),
    ],
)
def test_models_without_whole_experts_are_refused(config, ranks, base_format, words):
    model = GPT(config)
    if base_format:
        lora.attach(model, lora.Lora(4, 8.0, base_format=base_format))
    shapes = [tuple(p.shape) for p in model.parameters()]
    line = complaint(lambda: WholeExperts(Place(0, ranks)).shard(model, cpu_device()))
    assert all(word in line for word in words), line
    assert [tuple(local(p).shape) for p in model.parameters()] == shapes  # nothing has changed


# ---------------------------------------------------------------------- commands


EXPERTS = (*BASE, "--experts=4", "--experts_per_token=2", "--shared_experts=1", "--optimizer_dtype=float32")


def test_a_dry_run_counts_whole_experts(start, capsys):  # noqa: F811
    def peak(*flags: str) -> float:
        shape = ("--depth=2", "--experts=64", "--expert_width=64", "--max_seq_len=32", "--device_batch_size=1")
        call("base_train", *EXPERTS, *shape, "--dry_run", "--dry_run_devices=4", "--parallel=fsdp", *flags)
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "most at once" in line]
        return float(line.split()[-2].replace(",", ""))

    # In fp32 MiB: the 64 experts of a block, 2 x 64 x 64 each, that fsdp gathers.
    assert peak() - peak("--expert_parallel") > 64 * 2 * 64 * 64 * 4 / 2**20
