"""Ranks that hold whole experts learn as fsdp does, gather no expert, and read and write the same checkpoints.

Starting ranks is what takes long, so each number of ranks starts once for all tests.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_parallel import Collectives, same_bits, state, weights
from test_scripts import base, call  # noqa: F401 (base is a fixture)
from test_stages import BASE, pretrained, start  # noqa: F401 (fixtures)
from test_train import RATES, make_batch, numbers, poisoned_loss, rows_of
from tiny import (
    EXPERT_SHAPES,
    FOUR_EXPERTS,
    complaint,
    cpu_device,
    lively_model,
    run_ranks,
    tiny_config,
    tiny_tokenizer,
)
from torch import Tensor

from nanochat.adapters import lora
from nanochat.device import Device
from nanochat.engine import Engine, SamplingParams
from nanochat.gpt import GPT, GPTConfig
from nanochat.kernels.grouped import Groups
from nanochat.layout import lay_out
from nanochat.optim import Optimizer
from nanochat.parallel.experts import Journey, WholeExperts
from nanochat.parallel.fsdp import Fsdp
from nanochat.parallel.mesh import Place
from nanochat.sharding import local
from nanochat.train import make_adamw, make_optimizer, next_token_loss, train_step

Run = tuple[GPT, Optimizer]
STEPS = 6
QWEN3_MOE = EXPERT_SHAPES["qwen3_moe"]
FOUR = {**FOUR_EXPERTS, "value_embeddings": False}
# Options of make_run. A router's bias decides where tokens go, whatever its scores, which lie between 0 and 1.
CASES: dict[str, dict[str, Any]] = {
    "shared": {"changes": {**FOUR, "shared_experts": 1}, "recompute": True},
    "an expert without tokens": {"changes": FOUR, "bias": (0.0, 0.0, 0.0, -5.0)},
    "all tokens at one expert": {
        "changes": {**FOUR, "experts_per_token": 1},
        "bias": (0.0, 5.0, 0.0, 0.0),
        "recompute": True,
    },
    "adamw": {"changes": QWEN3_MOE, "matrices": "adamw"},
    "lora": {"changes": QWEN3_MOE, "rank": 4},
}
UNEVEN = ("an expert without tokens", "all tokens at one expert")


def make_run(
    device: Device, expert_parallel: bool, replicate: int = 1, *, changes: dict[str, Any], recompute: bool = False,
    matrices: Any = "muon", bias: tuple[float, ...] = (), rank: int = 0,
) -> Run:  # fmt: skip
    model = lively_model(tiny_config(sequence_len=16, n_layer=2, **changes), kernels=device.kernels).to(
        device.torch_device
    )
    if bias:
        for block in model.blocks:
            block.mlp.router.bias.data.copy_(torch.tensor(bias))  # type: ignore[union-attr]
    if recompute:
        model.recompute_activations()
    if rank:
        lora.attach(model, lora.Lora(rank, 8.0))
        lora.init_adapters(model)
    layout = lay_out(device, "fsdp", replicate, expert_parallel)
    layout.shard(model, device)
    if rank:
        return model, make_adamw(model, 0.01, device, layout=layout)
    return model, make_optimizer(model, RATES, device, matrices, layout)


def rows_of_rank(device: Device, step: int) -> list[tuple[Tensor, ...]]:
    """This rank's rows of a batch, in every other step in two micro-batches."""
    first, count = device.data_rank, device.data_ranks
    slices = [slice(first, None, count)]
    if step % 2:
        slices = [slice(first, None, 2 * count), slice(first + count, None, 2 * count)]
    return [tuple(device.to_device(part) for part in rows) for rows in rows_of(make_batch(step), *slices)]


def learned(device: Device, case: str, expert_parallel: bool, replicate: int = 1, steps: int = STEPS) -> dict[str, Any]:
    """The numbers of each step, and weights, state and loads at the end."""
    run = make_run(device, expert_parallel, replicate, **CASES[case])
    stats = []
    for step in range(steps):
        # With AdamW clipped, as in fine-tuning.
        norm = None if CASES[case].get("matrices", "muon") == "muon" else 0.5
        batches = rows_of_rank(device, step)
        one = train_step(*run, batches, next_token_loss, device=device, momentum=0.9, max_grad_norm=norm)
        stats.append(numbers(one))
    loads = [block.mlp.router.loads.tolist() for block in run[0].blocks]  # type: ignore[union-attr]
    return {"stats": stats, "weights": weights(run[0]), "state": state(run[1]), "loads": loads}


def skipped(device: Device) -> list[bool]:
    """Whether a step that is bad on the last rank changes nothing on any, and whether the next one changes some."""
    run = make_run(device, True, **CASES["shared"])
    factors = (1.0, float("nan")) if device.rank == device.world_size - 1 else (1.0, 1.0)
    before = {**weights(run[0]), **state(run[1])}
    bad = [(make_batch(step), factor) for step, factor in enumerate(factors)]
    updated = train_step(*run, bad, poisoned_loss, device=device).updated.item()
    unchanged = same_bits({**weights(run[0]), **state(run[1])}, before)
    train_step(*run, rows_of_rank(device, 2), next_token_loss, device=device)
    return [not updated, unchanged, not same_bits({**weights(run[0]), **state(run[1])}, before)]


def generated(device: Device, expert_parallel: bool) -> list[list[int]]:
    """Greedy tokens of the model as it is, and after three more steps: each rank draws another number of them."""
    run = make_run(device, expert_parallel, changes={**QWEN3_MOE, "vocab_size": 280})
    engine = Engine(run[0], tiny_tokenizer(), device)
    drawn = []
    for _ in range(2):
        drawn += engine.generate([[5, 6, 7]], max_tokens=4 + device.rank, sampling=SamplingParams(temperature=0.0))[0]
        for step in range(3):
            train_step(*run, rows_of_rank(device, step), next_token_loss, device=device)
        engine.update(run[0])
    return [tokens[:4] for tokens in drawn]


def costs(device: Device, expert_parallel: bool, recompute: bool) -> dict[str, Any]:
    """Bytes of a forward and a backward pass by kind of collective, and elements of experts that a rank holds."""
    model, _ = make_run(device, expert_parallel, changes=FOUR, recompute=recompute)
    held = [local(p).numel() for name, p in model.named_parameters() if ".mlp.input" in name or ".mlp.output" in name]
    with Collectives() as seen:
        loss, _ = next_token_loss(model, make_batch(device.rank))
        loss.backward()
    return {"bytes": dict(seen.bytes), "events": seen.events, "held": sum(held)}


def on_two_ranks(device: Device) -> dict[str, Any]:
    shared = replace(device, context_ranks=2)
    return {
        "fsdp": {case: learned(device, case, False) for case in (*UNEVEN, "shared", "adamw")},
        "experts": {case: learned(device, case, True) for case in (*UNEVEN, "shared", "adamw")},
        "rows shared": {"shared": learned(shared, "shared", True, steps=4)},
        "skipped": skipped(device),
        "generated": [generated(device, parallel) for parallel in (False, True)],
        "costs": [costs(device, *how) for how in ((False, False), (True, False), (True, True))],
    }


def on_four_ranks(device: Device) -> dict[str, Any]:
    return {
        "fsdp": {case: learned(device, case, False) for case in UNEVEN},
        "experts": {case: learned(device, case, True) for case in UNEVEN},
        "hybrid": {"shared": learned(device, "shared", True, 2), "lora": learned(device, "lora", True, 2, steps=4)},
    }


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks)


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, Any]]:
    return run_ranks(on_four_ranks, world_size=4)


def check_equal(ranks: list[dict[str, Any]], how: str, context_ranks: int = 1) -> None:
    """Losses within 1e-6 of those of fsdp on as many ranks, or else of one process, and weights and state within the
    noise of sums in another order."""
    for case, first in ranks[0][how].items():
        expected = ranks[0]["fsdp"].get(case) or learned(cpu_device(), case, False, steps=len(first["stats"]))
        for step, ((loss, targets, norm, updated), one) in enumerate(
            zip(first["stats"], expected["stats"], strict=False)
        ):
            assert loss == pytest.approx(one[0], rel=1e-6), (case, step)
            assert (targets, updated) == (context_ranks * one[1], one[3]), (case, step)
            # A norm sums squares in another order on each processor: 2.3e-5 after five steps on an AMD EPYC.
            assert norm == pytest.approx(one[2], rel=5e-5), (case, step)
        for rank in ranks[1:]:
            assert rank[how][case]["stats"] == first["stats"], case
            assert same_bits(rank[how][case]["weights"], first["weights"]), case
        if len(first["stats"]) < STEPS:
            continue
        for part, tolerances in (("weights", {"rtol": 0, "atol": 3e-5}), ("state", {"rtol": 1e-3, "atol": 1e-4})):
            assert first[part].keys() == expected[part].keys(), case
            for name, value in expected[part].items():
                torch.testing.assert_close(first[part][name], value, **tolerances, msg=f"{case}: {name}")  # type: ignore[arg-type]


@pytest.mark.slow
def test_two_ranks_with_whole_experts_learn_as_fsdp(two_ranks):
    check_equal(two_ranks, "experts")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["experts", "hybrid"])
def test_four_ranks_with_whole_experts_learn_as_fsdp(four_ranks, how):
    check_equal(four_ranks, how)


@pytest.mark.slow
def test_tokens_went_where_the_cases_say(four_ranks):
    for rank in four_ranks:
        for loads in rank["experts"]["an expert without tokens"]["loads"]:
            assert loads[3] == 0 and min(loads[:3]) > 0
        for loads in rank["experts"]["all tokens at one expert"]["loads"]:
            assert loads[1] > 0 and [loads[0], *loads[2:]] == [0, 0, 0]


@pytest.mark.slow
def test_ranks_that_share_rows_hold_whole_experts(two_ranks):
    check_equal(two_ranks, "rows shared", context_ranks=2)


@pytest.mark.slow
def test_a_bad_step_on_one_rank_changes_nothing(two_ranks):
    assert [rank["skipped"] for rank in two_ranks] == [[True] * 3] * 2


@pytest.mark.slow
def test_each_rank_decodes_with_all_experts(two_ranks):
    first, expected = two_ranks[0]["generated"]
    assert first == expected and len(first) == 2
    for rank in two_ranks:
        assert rank["generated"] == [expected, expected]


@pytest.mark.slow
def test_no_expert_is_gathered_and_rows_travel_by_formula(two_ranks):
    config = tiny_config(n_layer=2, **FOUR_EXPERTS)
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
        line = complaint(lambda: WholeExperts(Fsdp(Place(0, ranks))).shard(model, cpu_device()))
        assert [tuple(local(p).shape) for p in model.parameters()] == shapes  # nothing has changed
        return line

    assert "3 processes (in each group of --replicate) do not divide the 4 experts of this model: use 2 or 4, " in (
        refused(tiny_config(**FOUR_EXPERTS), 3)
    )
    assert "has none: leave it out" in refused(tiny_config(), 2)
    assert "--lora_base nf4" in refused(tiny_config(**QWEN3_MOE), 2, base_format="nf4")


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
