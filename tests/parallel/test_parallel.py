"""Runs that are sharded: what their ranks hold, send and refuse. That they learn as one process is promise T8
(tests/promises/test_t08_sharding_changes_nothing.py), which uses the runs of this file.

Starting ranks is what takes long, so each number of ranks starts once for all tests.
"""

import dataclasses
import functools
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_train import RATES, make_batch, masked, numbers, poisoned_loss, rows_of, same_bytes
from tiny import (
    EXPERT_SHAPES,
    FOUR_EXPERTS,
    LIVELY_ADAPTERS,
    PLAIN,
    SHAPES,
    adapt,
    cpu_device,
    lively_model,
    run_ranks,
    save_checkpoint,
    tiny_config,
    tiny_tokenizer,
)  # fmt: skip
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanochat.adapters.lora import Lora
from nanochat.bpb import bits_per_byte
from nanochat.checkpoint_manager import load_folder
from nanochat.cross_entropy import IGNORE
from nanochat.device import Device
from nanochat.engine import Engine, SamplingParams
from nanochat.gpt import GPT, GPTConfig
from nanochat.ground.cli import UserError
from nanochat.ground.sharding import local, whole
from nanochat.kernels.compiling import CompiledBlocks, compile_blocks
from nanochat.optim import Optimizer, ParameterGroup, StateFormat
from nanochat.parallel import fsdp
from nanochat.parallel.ddp import DdpExchange
from nanochat.parallel.mesh import Place
from nanochat.ranks import lay_out
from nanochat.train import make_adamw, make_optimizer, next_token_loss, train_step

CONFIG = tiny_config(sequence_len=16)


def of_experts(**changes: Any) -> GPTConfig:
    return tiny_config(**{"sequence_len": 16, "n_layer": 2, "value_embeddings": False, **FOUR_EXPERTS, **changes})


# Each is a run of its own, with these options of make_run.
SHAPED: dict[str, dict[str, Any]] = {
    name: {"config": tiny_config(sequence_len=16, **changes)} for name, changes in SHAPES.items()
}
THREE_EXPERTS: dict[str, Any] = {
    **PLAIN, "qk_norm": "none", "experts": 3, "experts_per_token": 3, "shared_experts": 2, "mlp_width": 16,
}  # fmt: skip
QWEN3_MOE = of_experts(**EXPERT_SHAPES["qwen3_moe"])
# A router's bias decides where tokens go, whatever its scores, which lie between 0 and 1.
UNEVEN: dict[str, dict[str, Any]] = {
    "an expert without tokens": {"config": of_experts(), "bias": (0.0, 0.0, 0.0, -5.0)},
    "all tokens at one expert": {
        "config": of_experts(experts_per_token=1),
        "bias": (0.0, 5.0, 0.0, 0.0),
        "recompute": True,
    },
}
VARIANTS: dict[str, dict[str, Any]] = {
    "muon": {},
    "adamw": {"matrices": "adamw", "recompute": True},
    "tuned": {"is_tuned": True},  # as in fine-tuning
    "adapters": {**SHAPED["qwen3"], "adapters": LIVELY_ADAPTERS},
    "adapters of nf4": {**SHAPED["qwen3"], "adapters": Lora(3, 8.0, base_format="nf4")},
    **SHAPED,
    "shared experts": {"config": of_experts(shared_experts=1), "recompute": True},
    "adamw of experts": {"config": QWEN3_MOE, "matrices": "adamw"},
    "adapters of experts": {"config": QWEN3_MOE, "adapters": LIVELY_ADAPTERS},
    "three experts": {"config": of_experts(**THREE_EXPERTS)},
    **UNEVEN,
}
# Between equal losses the norm of a few shapes parts by 4e-5, on two replicated ranks as on shards.
NORMS = 1e-4
CLIPPED = {"tuned": 0.5, "adamw of experts": 0.5, "adapters": 0.1}
Run = tuple[GPT, Optimizer]
Stats = list[tuple[float, ...]]


def make_run(
    device: Device, how: Any = "ddp", replicate: int = 1, expert_parallel: bool = False, *,
    config: GPTConfig = CONFIG, matrices: Any = "muon", recompute: bool = False, compiled: bool = False,
    is_tuned: bool = False, kept_as: StateFormat | None = None, adapters: Lora | None = None,
    bias: tuple[float, ...] = (),
) -> Run:  # fmt: skip
    model = lively_model(config, kernels=device.kernels).to(device.torch_device)
    if bias:
        for block in model.blocks:
            block.mlp.router.bias.data.copy_(torch.tensor(bias))  # type: ignore[union-attr]
    if adapters:
        model = adapt(model, adapters, lively=False)
    if recompute:
        model.recompute_activations()
    layout = lay_out(device, how, replicate, expert_parallel)
    layout.shard(model, device)
    if adapters:
        return model, make_adamw(model, 0.01, device, layout=layout)
    optimizer = make_optimizer(model, RATES, device, matrices, layout, kept_as)
    if is_tuned:
        optimizer = make_adamw(model, 0.003, device, 0.1, layout)
    return (compile_blocks(device, model, "on")[0] if compiled else model), optimizer  # type: ignore[return-value]


def rows_of_rank(device: Device, step: int) -> list[tuple[Tensor, ...]]:
    """This rank's rows of a batch, in every other step in two micro-batches."""
    first, count = device.data_rank, device.data_ranks
    slices = [slice(first, None, count)]
    if step % 2:
        slices = [slice(first, None, 2 * count), slice(first + count, None, 2 * count)]
    return [tuple(map(device.to_device, rows)) for rows in rows_of(make_batch(step), *slices)]


def steps(run: Run, device: Device, count: int, **settings: Any) -> Stats:
    stats = []
    for step in range(count):
        batches = rows_of_rank(device, step)
        stats.append(numbers(train_step(*run, batches, next_token_loss, device=device, momentum=0.9, **settings)))
    return stats


def weights(model: Any) -> dict[str, Tensor]:
    model = model.model if isinstance(model, CompiledBlocks) else model
    return {name: whole(parameter).clone() for name, parameter in model.named_parameters()}


def state(optimizer: Optimizer) -> dict[str, Tensor]:
    return {name: whole(tensor).clone() for name, tensor in optimizer.state_dict().items()}


# ---------------------------------------------------------------------- losses


def trained(device: Device, how: str, replicate: int, variants: dict[str, int], **options: Any) -> dict[str, Any]:
    """Each variant after so many steps."""
    results = {}
    for variant, count in variants.items():
        run = make_run(device, how, replicate, **VARIANTS[variant], **options)
        stats = steps(run, device, count, max_grad_norm=CLIPPED.get(variant))
        results[variant] = {"stats": stats, "weights": weights(run[0]), "state": state(run[1])}
        if run[0].config.experts:
            results[variant]["loads"] = [block.mlp.router.loads.tolist() for block in run[0].blocks]
    return results


@functools.cache
def alone(variant: str, count: int) -> dict[str, Any]:
    return trained(cpu_device(), "ddp", 1, {variant: count})[variant]


def same_steps(found: Stats, expected: Stats, context_ranks: int = 1, norms: float = 1e-5) -> None:
    """The same losses, norms within the share `norms`, and updates; all ranks that share a row count its targets."""
    assert len(found) == len(expected)
    for (loss, targets, norm, updated), one in zip(found, expected, strict=True):
        assert loss == pytest.approx(one[0], rel=1e-6 if len(found) < 20 else 1e-5, abs=1e-6)
        assert targets == context_ranks * one[1]
        assert norm == pytest.approx(one[2], rel=norms)
        assert updated == one[3]


def check_equal(everywhere: list[dict[str, Any]], context_ranks: int = 1, norms: float = 1e-5) -> None:
    """The results of `trained` on each rank against those of this process."""
    for variant, first in everywhere[0].items():
        expected = alone(variant, len(first["stats"]))
        same_steps(first["stats"], expected["stats"], context_ranks, norms)
        if variant == "adapters of experts":
            continue  # AdamW makes full steps of gradients that are only rounding
        for part, tolerances in (("weights", {"rtol": 0, "atol": 3e-5}), ("state", {"rtol": 1e-3, "atol": 1e-4})):
            assert first[part].keys() == expected[part].keys(), variant
            for name, value in expected[part].items():
                assert first[part][name].shape == value.shape, (variant, name)
                assert torch.allclose(first[part][name], value, **tolerances), (variant, name)
        for rank in everywhere[1:]:
            assert rank[variant]["stats"] == first["stats"], variant
            assert same_bytes(rank[variant]["weights"], first["weights"]), variant


def in_bfloat16(device: Device) -> list[list[float]]:
    """Losses under ddp and fsdp with bf16 products, and in fp32."""
    low = replace(device, dtype=torch.bfloat16)
    runs = (make_run(low, "ddp"), low), (make_run(low, "fsdp"), low), (make_run(device, "ddp"), device)
    steps(make_run(low, "fsdp", **VARIANTS["adapters"]), low, 2)  # a base in bf16 among adapters in fp32
    return [[loss for loss, *_ in steps(run, where, 5)] for run, where in runs]


# ---------------------------------------------------------------------- the rest of a run


def recomputed(device: Device, how: str) -> bool:
    """Whether three steps with activation checkpointing end with the same bits as without."""
    plain, saving = make_run(device, how), make_run(device, how, recompute=True)
    stats = steps(plain, device, 3), steps(saving, device, 3)
    return stats[0] == stats[1] and same_bytes(weights(plain[0]), weights(saving[0]))


def skipped(device: Device, **options: Any) -> list[Any]:
    """Of a step that is bad on the last rank alone: what it reports, whether no byte changed, and whether the next
    step, which only that rank has targets for, changes some."""
    run = make_run(device, "fsdp", **options)
    steps(run, device, 2)
    before = {**weights(run[0]), **state(run[1])}
    last_rank = device.rank == device.world_size - 1
    factors = (1.0, math.nan, 1.0) if last_rank else (1.0, 1.0, 1.0)
    batches = [(make_batch(i), factor) for i, factor in enumerate(factors)]
    bad = train_step(*run, batches, poisoned_loss, device=device)
    unchanged = same_bytes({**weights(run[0]), **state(run[1])}, before)
    good = train_step(*run, [make_batch(3) if last_rank else masked(make_batch(3))], next_token_loss, device=device)
    changed = not same_bytes({**weights(run[0]), **state(run[1])}, before)
    return [bad.updated.item(), bad.finite.item(), unchanged, good.updated.item(), changed]


def evaluated(device: Device, how: str) -> list[float]:
    """Bits per byte before and after a step: 5 rows in batches of 2 make two passes on rank 0, one on rank 1."""
    run = make_run(device, how)
    rows = make_batch(9, rows=5)
    inputs = torch.cat((rows[0], rows[0][:, :1]), dim=1)
    token_bytes = torch.arange(CONFIG.vocab_size) % 4
    before = bits_per_byte(run[0], inputs, token_bytes, 2, device)
    steps(run, device, 1)
    return [before, bits_per_byte(run[0], inputs, token_bytes, 2, device)]


def generated(device: Device, how: str, config: GPTConfig = CONFIG, **options: Any) -> list[list[int]]:
    """Greedy tokens of the model as it is, and after three steps more: each rank draws another number of them."""
    run = make_run(device, how, config=replace(config, vocab_size=280, sequence_len=64), **options)
    engine = Engine(run[0], tiny_tokenizer(), device)
    drawn = []
    for _ in range(2):
        greedy = SamplingParams(temperature=0.0)
        drawn += engine.generate([[5, 6, 7]], max_tokens=12 + device.rank, sampling=greedy)[0]
        steps(run, device, 3)
        engine.update(run[0])
    return [tokens[:12] for tokens in drawn]


READERS = {"fsdp": ("fsdp", 1), "shared rows": ("fsdp", 2)}  # --parallel and --context_parallel


def read_as(device: Device, how: str) -> tuple[list[float], list[list[int]]]:
    return evaluated(device, how), generated(device, how)


def shares(device: Device) -> list[int]:
    """Elements of parameters and state that a rank holds, and of the whole."""
    run = make_run(device, "fsdp")
    tensors = [*run[0].parameters(), *run[1].state_dict().values()]
    assert all(isinstance(t, DTensor) for t in tensors if t.numel() > 1)
    return [sum(local(t).numel() for t in tensors), sum(t.numel() for t in tensors)]


def torch_that_sums(device: Device) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp, "reduce_scatter", lambda mean, whole, **_: mean.fill_(2))
        try:
            make_run(device, "fsdp")
        except UserError as error:
            return str(error)
    return ""


# ---------------------------------------------------------------------- collectives during the backward


class Collectives(TorchDispatchMode):
    """Counts what this rank hands to collectives, in bytes by kind, and lists them in order."""

    KINDS = {
        "_allgather_base_": ("all_gather", 0), "_reduce_scatter_base_": ("reduce_scatter", 1),
        "allreduce_": ("all_reduce", 0), "alltoall_base_": ("all_to_all", 1),
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.events: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            kind, place = self.KINDS[function.overloadpacket.__name__]
            tensors = args[place] if isinstance(args[place], list) else [args[place]]
            self.bytes[kind] += sum(t.nbytes for t in tensors)
            self.events.append(kind)
        return function(*args, **(kwargs or {}))


def loss_without_head(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Reaches neither the head, whose gradient is the first to travel, nor the last block's value embedding."""
    values = model.value_embeddings
    model.value_embeddings = torch.nn.ModuleDict({name: table for name, table in values.items() if name != "2"})
    try:
        return model.hidden(batch[0]).square().sum(), (batch[1] != IGNORE).sum()
    finally:
        model.value_embeddings = values


def unlike_losses(run: Run, device: Device, count: int) -> Stats:
    """Steps whose losses reach other parameters on some ranks than on others, the last on none all of them."""
    figures = []
    for step in range(count):
        partial = device.rank % 2 == 1 or step == count - 1
        batches = [make_batch(10 * step + device.rank), make_batch(10 * step + device.rank + 5)]
        loss_fn = loss_without_head if partial else next_token_loss
        figures.append(numbers(train_step(*run, batches, loss_fn, device=device)))
    return figures


def overlapped(device: Device) -> list[bool]:
    """Whether steps whose gradients travel during the backward end with the bits of steps that send them afterwards,
    with a loss that reaches all parameters and with others."""
    same = []
    for learn in (steps, unlike_losses):
        one = make_run(device)
        other = make_run(device)
        other[1].before_backward = lambda is_last: None  # type: ignore[method-assign]
        alike = learn(one, device, 4) == learn(other, device, 4)
        alike &= same_bytes(weights(one[0]), weights(other[0]))
        same.append(alike and same_bytes(state(one[1]), state(other[1])))
    return same


def events_of_a_step(device: Device, how: str = "ddp", replicate: int = 1) -> tuple[list[str], dict[str, int]]:
    """A step of two micro-batches: its forwards, its blocks' backwards and its collectives in order, and the bytes that
    the collectives were handed."""
    run = make_run(device, how, replicate)
    reduce = run[1].reduce
    with Collectives() as seen:

        def loss_fn(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
            seen.events.append("forward")
            return next_token_loss(model, batch)

        def noted_reduce() -> Tensor:
            seen.events.append("reduce")
            return reduce()

        for i, block in enumerate(run[0].blocks):
            block.register_full_backward_pre_hook(lambda *_, i=i: seen.events.append(f"block {i}"))
        run[1].reduce = noted_reduce  # type: ignore[method-assign]
        train_step(*run, [make_batch(0), make_batch(1)], loss_fn, device=device)
    return seen.events, dict(seen.bytes)


def micro_batches_of(events: list[str]) -> tuple[Counter[str], Counter[str]]:
    """The events of each of the two micro-batches of a step, counted."""
    first = events.index("forward")
    last = events.index("forward", first + 1)
    return Counter(events[first:last]), Counter(events[last : events.index("reduce")])


# ---------------------------------------------------------------------- on two ranks


class LargestMade(TorchDispatchMode):
    """The number of elements of the largest fp32 tensor that takes memory of its own; views of a mapped file do not."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        plain = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor)]
        for leaf in plain:
            if leaf.dtype == torch.float32 and not leaf.is_meta and not function.is_view:
                self.elements = max(self.elements, leaf.numel())
        return out


def loaded(device: Device, folder: str) -> list[Any]:
    """The largest tensor that a rank makes while it loads a checkpoint, and whether it then holds the right rows."""
    with LargestMade() as made:
        model, _, _ = load_folder(Path(folder), device, layout=lay_out(device, "fsdp"))
    written = load_file(Path(folder) / "model.safetensors")
    same = {name: torch.equal(whole(tensor), written[name]) for name, tensor in model.state_dict().items()}
    return [made.elements, all(same.values()), max(tensor.numel() for tensor in written.values())]


def on_two_ranks(device: Device, folder: str) -> dict[str, Any]:
    return {
        "loaded": loaded(device, folder),
        "overlapped": overlapped(device),
        "events": events_of_a_step(device),
        "fsdp_events": events_of_a_step(device, "fsdp"),
        "bfloat16_events": events_of_a_step(replace(device, dtype=torch.bfloat16), "fsdp"),
        "recomputed": recomputed(device, "fsdp"),
        "skipped": skipped(device),
        "bfloat16": in_bfloat16(device),
        "refused": torch_that_sums(device),
        "shares": shares(device),
        **{name: read_as(replace(device, context_ranks=ranks), how) for name, (how, ranks) in READERS.items()},
    }


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    words = tiny_tokenizer()
    model = lively_model(tiny_config(vocab_size=words.vocab_size))
    meta = {"model": dataclasses.asdict(model.config)}
    folder = save_checkpoint(tmp_path_factory.mktemp("one") / "base", 1, model, words, meta)
    return run_ranks(on_two_ranks, str(folder))


@pytest.mark.parametrize(
    ("name", "expected"), [("recomputed", True), ("skipped", [0.0, 0.0, True, 1.0, True]), ("overlapped", [True, True])]
)
def test_ranks_change_no_byte(two_ranks: list[dict[str, Any]], name: str, expected: Any) -> None:
    """Where activations are recomputed, a batch is bad on one rank, or gradients travel early."""
    assert [rank[name] for rank in two_ranks] == [expected, expected]


@pytest.mark.parametrize("layout", READERS)
def test_ranks_read_what_one_process_reads(two_ranks: list[dict[str, Any]], layout: str) -> None:
    """Evaluations of batches that are not all on each rank, and replies."""
    bits, replies = read_as(cpu_device(), "ddp")
    assert bits[0] != bits[1] and replies[0] != replies[1]
    for rank in two_ranks:
        found_bits, found_replies = rank[layout]
        assert found_bits == pytest.approx(bits, rel=1e-5)
        assert found_replies == replies


def test_a_rank_loads_its_rows_alone(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        made, same, largest = rank["loaded"]
        assert same and made <= largest / 2


def test_each_rank_holds_its_share(two_ranks: list[dict[str, Any]]) -> None:
    held, sizes = zip(*(rank["shares"] for rank in two_ranks), strict=True)
    count = sizes[0]
    assert sizes == (count, count)
    for elements in held:  # each rank counts the steps, of five groups; an odd number of matrices has no half
        assert elements == pytest.approx(count / 2, rel=0.15)
    assert sum(held) == count + 5


def test_gradients_travel_during_the_last_backward(two_ranks: list[dict[str, Any]]) -> None:
    events, _ = two_ranks[0]["events"]
    assert two_ranks[1]["events"][0] == events
    first = events.index("forward")
    last = events.index("forward", first + 1)
    ended = events.index("reduce")
    assert events[first + 1 : last] == ["block 2", "block 1", "block 0"]  # the sum is not complete: nothing travels
    assert events[last + 1] == "reduce_scatter"  # the head's
    gradients = ("reduce_scatter", "all_reduce")
    assert sum(event in gradients for event in events[last:ended]) == len(list(GPT(CONFIG).parameters()))
    assert events[ended:].count("all_reduce") == 1  # the sum of losses and targets
    begun = [events.index(f"block {i}", last) for i in (2, 1, 0)]
    for start, stop in zip(begun, [*begun[1:], ended], strict=True):
        assert sum(event in gradients for event in events[start:stop]) >= 4  # a block's, while the next runs


def test_ddp_sends_each_gradient_and_each_weight_once(two_ranks: list[dict[str, Any]]) -> None:
    roles = GPT(CONFIG).parameter_groups()
    matrices = [p for role in ("matrix", "qkv") for _, p in roles[role]]
    tables = [p for role in ("embedding", "value_embedding", "head") for _, p in roles[role]]
    elements = sum(p.numel() for p in matrices + [t for t in tables if t.numel() >= 4096])
    for rank in two_ranks:
        sent = rank["events"][1]
        assert sent["reduce_scatter"] == sent["all_gather"] == 4 * elements
    # Muon's detour: half of the gradients a rank, and half of the updates with one more element a row
    detour = sum(rank["events"][1]["all_to_all"] for rank in two_ranks)
    assert detour == 4 * sum(2 * p.numel() + p.size(0) for p in matrices)


def test_fsdp_exchanges_the_same_in_every_micro_batch(two_ranks: list[dict[str, Any]]) -> None:
    model = GPT(CONFIG)
    blocks = sum(parameter.numel() for parameter in model.blocks.parameters())
    head = model.head.weight.numel()
    tables = sum(table.weight.numel() for table in (model.embedding, *model.value_embeddings.values()))
    rest = 2 * (CONFIG.n_layer + 1)  # two scales a layer; three rows do not divide evenly among two ranks
    for rank in two_ranks:
        # In bf16 what enters products is gathered in bf16. Sums of gradients are in fp32 all the same.
        for name, product_bytes in (("fsdp_events", 4), ("bfloat16_events", 2)):
            events, sent = rank[name]
            first, last = micro_batches_of(events)
            assert first == last
            assert sent["reduce_scatter"] == 2 * 4 * (blocks + head + tables + rest)
            assert sent["all_gather"] == 2 * (product_bytes * (2 * blocks + head) + 4 * (tables + 2 * rest))
            assert sent["all_reduce"] == 4 * 3  # the sum of losses and targets


def test_bf16_is_another_arithmetic_and_learns(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        by_ddp, by_fsdp, exact = rank["bfloat16"]
        assert by_fsdp == pytest.approx(by_ddp, rel=1e-2)
        assert max(abs(a / b - 1) for a, b in zip(by_ddp, exact, strict=True)) > 1e-4


def test_a_torch_that_sums_gradients_is_refused(two_ranks: list[dict[str, Any]]) -> None:
    assert all("--parallel ddp" in rank["refused"] for rank in two_ranks)


def test_a_failed_backward_is_noticed() -> None:
    """Its gradients are partly sent: the ranks would sum those of different steps."""
    parameter = torch.nn.Parameter(torch.zeros(4, 4))
    exchange = DdpExchange(Place(ranks=2))
    optimizer = Optimizer([ParameterGroup("adamw", [("p", parameter)], 0.1)], exchange=exchange)
    exchange._started = 1
    with pytest.raises(AssertionError, match="partly sent"):
        optimizer.before_backward(is_last=True)


# ---------------------------------------------------------------------- layouts


@pytest.mark.parametrize(
    ("ranks", "how", "replicate", "says"),
    [
        (4, "ddp", 2, "--replicate 2 needs --parallel fsdp"),
        (4, "fsdp", 3, "--replicate 3 needs .* processes here: 4,"),
        (4, "fsdp", 4, "--replicate 4 needs .* processes here: 4,"),
        (1, "fsdp", 2, "--replicate 2 needs .* processes here: 1,"),
    ],
)
def test_impossible_layouts_are_refused(ranks: int, how: Any, replicate: int, says: str) -> None:
    with pytest.raises(UserError, match=says):
        lay_out(cpu_device(world_size=ranks), how, replicate)
