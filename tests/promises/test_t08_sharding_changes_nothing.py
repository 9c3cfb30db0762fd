"""T8. Sharding changes nothing: every layout learns what one process learns from the same global batch.

Losses, norms, weights and optimizer state in fp32 are compared with one process: replicated weights with a sharded
optimizer (ddp), sharded weights (fsdp), groups of shards (hybrid), ranks that share rows, and ranks that hold whole
experts. Ddp and fsdp run for twenty steps, the other combinations for a few. Each number of ranks starts once for all
its layouts.
"""

import functools
from dataclasses import replace
from typing import Any

import pytest
from test_context import packed_steps
from test_parallel import NORMS, UNEVEN, check_equal, events_of_a_step, micro_batches_of, same_steps, trained
from tiny import cpu_device, run_ranks

from nanochat.device import Device

slow = pytest.mark.slow
# For each layout: --parallel, --replicate, --context_parallel and --expert_parallel; and the steps of each variant.
Layouts = dict[str, tuple[str, int, int, bool, dict[str, int]]]
TWENTY_STEPS: Layouts = {"ddp": ("ddp", 1, 1, False, {"muon": 20}), "fsdp": ("fsdp", 1, 1, False, {"muon": 20})}
TWO: Layouts = {
    "ddp": ("ddp", 1, 1, False, {"adamw": 2, "adapters": 2, "adapters of nf4": 2}),
    "fsdp": (
        *("fsdp", 1, 1, False),
        {"adamw": 2, "tuned": 2, "adapters": 2, "adapters of nf4": 2, "ungrouped": 2, "qwen3": 2, "qwen2": 2},
    ),
    "rows": ("ddp", 1, 2, False, {"muon": 4, "ungrouped": 2, "qwen2": 2}),
    "rows and shards": ("fsdp", 1, 2, False, {"adamw": 2, "adapters": 2}),
    "gathered experts": ("fsdp", 1, 1, False, {"shared experts": 2}),
    "whole experts": ("fsdp", 1, 1, True, {"shared experts": 4, "adamw of experts": 2, **dict.fromkeys(UNEVEN, 2)}),
    "rows and whole experts": ("fsdp", 1, 2, True, {"shared experts": 2}),
}
FOUR: Layouts = {
    "ddp": ("ddp", 1, 1, False, {"muon": 2, "three experts": 2}),
    "fsdp": ("fsdp", 1, 1, False, {"muon": 2, "three experts": 2}),
    "hybrid": ("fsdp", 2, 1, False, {"muon": 2, "adamw": 2, "qwen3": 2}),
    "rows": ("ddp", 1, 4, False, {"muon": 2, "qwen2": 2}),  # two key heads: pairs of ranks have copies
    "rows of hybrid": ("fsdp", 2, 2, False, {"tuned": 2}),
    "whole experts": ("fsdp", 1, 1, True, dict.fromkeys(UNEVEN, 2)),
    "hybrid with whole experts": ("fsdp", 2, 1, True, {"shared experts": 2, "adapters of experts": 2}),
}


def learned(device: Device, layouts: Layouts, **options: Any) -> dict[str, Any]:
    """What `trained` returns for every layout."""
    results = {}
    for name, (how, replicate, context_ranks, expert_parallel, variants) in layouts.items():
        where = replace(device, context_ranks=context_ranks)
        results[name] = trained(where, how, replicate, variants, expert_parallel=expert_parallel, **options)
    return results


def on_four_ranks(device: Device) -> dict[str, Any]:
    return {
        **learned(device, FOUR),
        "documents": packed_steps(replace(device, context_ranks=4), "fsdp", 2),
        "events": events_of_a_step(device, "fsdp", 2)[0],
    }


@pytest.fixture(scope="module")
def twenty_steps() -> list[dict[str, Any]]:
    return run_ranks(learned, TWENTY_STEPS)


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(learned, TWO)


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, Any]]:
    return run_ranks(on_four_ranks, world_size=4)


def check(ranks: list[dict[str, Any]], layouts: Layouts, name: str) -> None:
    check_equal([rank[name] for rank in ranks], context_ranks=layouts[name][2], norms=NORMS)


@slow
@pytest.mark.parametrize("name", TWENTY_STEPS)
def test_two_ranks_learn_as_one_for_twenty_steps(twenty_steps: list[dict[str, Any]], name: str) -> None:
    check(twenty_steps, TWENTY_STEPS, name)


@slow
@pytest.mark.parametrize("name", TWO)
def test_two_ranks_learn_as_one(two_ranks: list[dict[str, Any]], name: str) -> None:
    check(two_ranks, TWO, name)


@slow
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_learn_as_one(four_ranks: list[dict[str, Any]], name: str) -> None:
    check(four_ranks, FOUR, name)


@slow
def test_four_ranks_that_share_rows_learn_documents(four_ranks: list[dict[str, Any]]) -> None:
    for rank in four_ranks:
        same_steps(rank["documents"], packed_steps(cpu_device(), "ddp", 2), 4)


@slow
def test_tokens_went_where_the_cases_say(four_ranks: list[dict[str, Any]]) -> None:
    for rank in four_ranks:
        for loads in rank["whole experts"]["an expert without tokens"]["loads"]:
            assert loads[3] == 0 and min(loads[:3]) > 0
        for loads in rank["whole experts"]["all tokens at one expert"]["loads"]:
            assert loads[1] > 0 and [loads[0], *loads[2:]] == [0, 0, 0]


@slow
def test_groups_of_shards_exchange_gradients_once_a_step(four_ranks: list[dict[str, Any]]) -> None:
    for rank in four_ranks:
        first, last = micro_batches_of(rank["events"])
        assert first["reduce_scatter"] == last["reduce_scatter"] == last["all_reduce"] and not first["all_reduce"]


@pytest.mark.soak
def test_compiled_ranks_learn_as_one() -> None:
    ranks = run_ranks(functools.partial(learned, compiled=True, recompute=True), TWENTY_STEPS)
    check(ranks, TWENTY_STEPS, "fsdp")
