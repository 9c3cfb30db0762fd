"""Ranks that hold whole experts learn as one process does, gather no expert, and read and write the same checkpoints.

Starting ranks is what takes long, so each number of ranks starts once for all tests.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from runs import call
from test_parallel import (
    QWEN3_MOE,
    UNEVEN,
    VARIANTS,
    Collectives,
    check_equal,
    generated,
    make_run,
    of_experts,
    skipped,
    trained,
)  # fmt: skip
from test_scripts import base  # noqa: F401 (base is a fixture)
from test_stages import BASE, pretrained, start  # noqa: F401 (fixtures)
from test_train import make_batch
from tiny import FOUR_EXPERTS, complaint, cpu_device, run_ranks, tiny_config
from torch import Tensor

from nanochat.adapters import lora
from nanochat.device import Device
from nanochat.gpt import GPT, GPTConfig
from nanochat.ground.sharding import local
from nanochat.kernels.grouped import Groups
from nanochat.parallel.experts import Journey, WholeExperts
from nanochat.parallel.mesh import Place
from nanochat.ranks import lay_out
from nanochat.train import next_token_loss

NORMS = 5e-5  # a norm sums squares in another order on each processor: 2.3e-5 after five steps on an AMD EPYC


def costs(device: Device, expert_parallel: bool, recompute: bool) -> dict[str, Any]:
    """Bytes of a forward and a backward pass by kind of collective, and elements of experts that a rank holds."""
    model, _ = make_run(device, "fsdp", expert_parallel=expert_parallel, config=of_experts(), recompute=recompute)
    held = [local(p).numel() for name, p in model.named_parameters() if ".mlp.input" in name or ".mlp.output" in name]
    with Collectives() as seen:
        loss, _ = next_token_loss(model, make_batch(device.rank))
        loss.backward()
    return {"bytes": dict(seen.bytes), "events": seen.events, "held": sum(held)}


def on_two_ranks(device: Device) -> dict[str, Any]:
    shared = replace(device, context_ranks=2)
    experts = dict.fromkeys(("shared experts", "adamw of experts", *UNEVEN), 6)
    moe = {"config": QWEN3_MOE}
    return {
        "fsdp": trained(device, "fsdp", 1, {"shared experts": 4}),
        "experts": trained(device, "fsdp", 1, experts, expert_parallel=True),
        "rows shared": trained(shared, "fsdp", 1, {"shared experts": 4}, expert_parallel=True),
        "skipped": skipped(device, expert_parallel=True, **VARIANTS["shared experts"]),
        "generated": [generated(device, "fsdp", expert_parallel=parallel, **moe) for parallel in (False, True)],
        "costs": [costs(device, *how) for how in ((False, False), (True, False), (True, True))],
    }


def on_four_ranks(device: Device) -> dict[str, Any]:
    hybrid = {"shared experts": 4, "adapters of experts": 4}
    return {
        "experts": trained(device, "fsdp", 1, dict.fromkeys(UNEVEN, 4), expert_parallel=True),
        "hybrid": trained(device, "fsdp", 2, hybrid, expert_parallel=True),
    }


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks)


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, Any]]:
    return run_ranks(on_four_ranks, world_size=4)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "context_ranks"), [("fsdp", 1), ("experts", 1), ("rows shared", 2)])
def test_two_ranks_with_whole_experts_learn_as_one(two_ranks, how, context_ranks):
    check_equal([rank[how] for rank in two_ranks], context_ranks, NORMS)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["experts", "hybrid"])
def test_four_ranks_with_whole_experts_learn_as_one(four_ranks, how):
    check_equal([rank[how] for rank in four_ranks], norms=NORMS)


@pytest.mark.slow
def test_tokens_went_where_the_cases_say(four_ranks):
    for rank in four_ranks:
        for loads in rank["experts"]["an expert without tokens"]["loads"]:
            assert loads[3] == 0 and min(loads[:3]) > 0
        for loads in rank["experts"]["all tokens at one expert"]["loads"]:
            assert loads[1] > 0 and [loads[0], *loads[2:]] == [0, 0, 0]


@pytest.mark.slow
def test_a_bad_step_on_one_rank_changes_nothing(two_ranks):
    assert [rank["skipped"] for rank in two_ranks] == [[0.0, 0.0, True, 1.0, True]] * 2


@pytest.mark.slow
def test_each_rank_decodes_with_all_experts(two_ranks):
    first, expected = two_ranks[0]["generated"]
    assert first == expected and len(first) == 2
    for rank in two_ranks:
        assert rank["generated"] == [expected, expected]


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


def test_what_cannot_hold_whole_experts_is_refused():
    needed = "--expert_parallel needs --parallel fsdp and several processes; processes here: "
    assert complaint(lambda: lay_out(cpu_device(), "fsdp", 1, True)).startswith(f"{needed}1")
    line = complaint(lambda: lay_out(cpu_device(world_size=2), "ddp", 1, True))
    assert line == f"{needed}2, with --parallel ddp"

    def refused(config: GPTConfig, ranks: int, **settings: Any) -> str:
        model = GPT(config)
        if settings:
            lora.attach(model, lora.Lora(4, 8.0, **settings))
        shapes = [tuple(p.shape) for p in model.parameters()]
        line = complaint(lambda: WholeExperts(Place(0, ranks)).shard(model, cpu_device()))
        assert [tuple(local(p).shape) for p in model.parameters()] == shapes  # nothing has changed
        return line

    assert "3 processes (in each group of --replicate) do not divide the 4 experts of this model: use 2 or 4, " in (
        refused(tiny_config(**FOUR_EXPERTS), 3)
    )
    assert "has none: leave it out" in refused(tiny_config(), 2)
    assert "--lora_base nf4" in refused(QWEN3_MOE, 2, base_format="nf4")


# ---------------------------------------------------------------------- commands


EXPERTS = (*BASE, "--experts=4", "--experts_per_token=2", "--shared_experts=1", "--optimizer_dtype=float32")


def test_a_dry_run_counts_whole_experts(start, capsys):  # noqa: F811
    def peak(*flags: str) -> float:
        shape = ("--depth=2", "--experts=64", "--expert_width=64", "--max_seq_len=32", "--device_batch_size=1")
        call("base_train", *EXPERTS, *shape, "--dry_run", "--dry_run_devices=4", "--parallel=fsdp", *flags)
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "most at once" in line]
        return float(line.split()[-2].replace(",", ""))

    # In fp32 MiB: the 64 experts of a block, 2 x 64 x 64 each, that fsdp gathers.
    sharded = peak()
    assert sharded - peak("--expert_parallel") > 64 * 2 * 64 * 64 * 4 / 2**20
    assert peak("--parallel=ddp") > sharded
