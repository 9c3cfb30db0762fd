"""One step: the same however its rows are cut up, skipped as a whole or not at all, and never waited for."""

import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from tiny import EXPERT_SHAPES, SHAPES, cpu_device, lively_model, tiny_config
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nanochat.cross_entropy import IGNORE
from nanochat.device import Device
from nanochat.experts.router import BIAS_RATE
from nanochat.gpt import GPT
from nanochat.optim import Optimizer
from nanochat.run.progress import Meter, Progress
from nanochat.scaling import Rates
from nanochat.train import Fall, Schedule, StepStats, make_adamw, make_optimizer, next_token_loss, train_step

Batch = tuple[Tensor, Tensor]
CONFIG = tiny_config(sequence_len=16)
RATES = Rates(0.01, 0.003, 0.003, 0.003, 0.003, 0.003, weight_decay=0.1)


def make_run(device: Device | None = None) -> tuple[GPT, Optimizer]:
    """A tiny model under Muon and AdamW, as base_train puts them together."""
    device = device or cpu_device()
    model = lively_model(CONFIG, kernels=device.kernels)
    return model, make_optimizer(model, RATES, device)


def make_batch(seed: int, rows: int = 8) -> Batch:
    """Rows that a model can learn something from, a different number of targets in each."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 20, (rows, 17), generator=generator)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    for row in range(rows):
        targets[row, : row % 5] = IGNORE
    return inputs, targets


def rows_of(batch: Batch, *slices: slice) -> list[Batch]:
    return [(batch[0][rows], batch[1][rows]) for rows in slices]


def masked(batch: Batch) -> Batch:
    return batch[0], torch.full_like(batch[1], IGNORE)


def everything(model: GPT, optimizer: Optimizer) -> dict[str, Tensor]:
    tensors = {**dict(model.named_parameters()), **optimizer.state_dict()}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def same_bytes(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[n].view(torch.int32), other[n].view(torch.int32)) for n in one
    )


def numbers(stats: StepStats) -> tuple[float, float, float, float]:
    return stats.loss.item(), stats.targets.item(), stats.grad_norm.item(), stats.updated.item()


# ---------------------------------------------------------------------- the recipe's optimizer


# The matrices in a block's MLP that are updated each by itself: gate and up, and those of each expert.
PARTS_OF_MLPS = {
    **dict.fromkeys(("qwen3", "qwen2", "llama", "qwen3_5"), {"mlp.input.weight": (48, 48)}),
    "experts": {"mlp.input.weight": (24,) * 4, "mlp.output.weight": (32,) * 4},
    "qwen3_moe": {"mlp.input.weight": (24,) * 8, "mlp.output.weight": (32,) * 4},
}
PARTS_OF_MLPS["qwen3_5_moe"] = PARTS_OF_MLPS["qwen3_moe"] | {"mlp.shared.input.weight": (24, 24)}


@pytest.mark.parametrize("shape", [*SHAPES, *EXPERT_SHAPES])
def test_the_optimizer_takes_every_parameter_by_its_role(shape: str) -> None:
    model = lively_model(tiny_config(**{**SHAPES, **EXPERT_SHAPES}[shape]))
    rates = Rates(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, weight_decay=7.0)
    optimizer = make_optimizer(model, rates, cpu_device())
    found = {name: group for group in optimizer.groups for name, _ in group.parameters}
    assert found.keys() == dict(model.named_parameters()).keys()
    # 4 query heads, and 2 or 4 key heads and as many value heads, are matrices of their own.
    keys = model.config.n_kv_head * model.config.head_dim
    queries = 8 if model.config.attention_gate else 4
    parts = {"attention.qkv.weight": (queries * model.config.head_dim, keys, keys), **PARTS_OF_MLPS.get(shape, {})}
    parts["attention.state_input.weight"] = (16, 16, 32, 32, 4, 4)  # q, k, v, gate, strength, rate
    for role, parameters in model.parameter_groups().items():
        for name, _ in parameters:
            matrix = role in ("matrix", "qkv")
            assert found[name].kind == ("muon" if matrix else "adamw"), name
            rate = BIAS_RATE if name.endswith("router.bias") else getattr(rates, "matrix" if matrix else role)
            assert found[name].learning_rate == rate, name
            assert found[name].weight_decay == (7.0 if matrix else 0.0), name
            assert found[name].row_splits.get(name) == parts.get(name.split(".", 2)[-1]), name


def test_adamw_alone_trains_too() -> None:
    model, batch = lively_model(CONFIG), make_batch(0)
    optimizer = make_optimizer(model, RATES, cpu_device(), matrices="adamw")
    assert {group.kind for group in optimizer.groups} == {"adamw"}
    losses = [train_step(model, optimizer, [batch], next_token_loss, device=cpu_device()).loss for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]


def test_adamw_of_fine_tuning_takes_what_is_trained() -> None:
    model = lively_model(tiny_config(**SHAPES["qwen2"]))
    frozen = [name for name, _ in model.parameter_groups()["embedding"]]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    optimizer = make_adamw(model, 0.01, cpu_device(), weight_decay=0.2)
    found = {name: group for group in optimizer.groups for name, _ in group.parameters}
    assert found.keys() == dict(model.named_parameters()).keys() - set(frozen)
    for role, parameters in model.parameter_groups().items():
        for name, _ in parameters:
            if name not in frozen:
                assert (found[name].kind, found[name].learning_rate) == ("adamw", 0.01), name
                assert found[name].weight_decay == (0.2 if role in ("matrix", "qkv") else 0.0), name


def test_clipped_steps_of_adamw_are_torchs() -> None:
    model, batches = lively_model(CONFIG), [make_batch(step) for step in range(6)]
    reference = lively_model(CONFIG)
    optimizer = make_adamw(model, 0.01, cpu_device(), weight_decay=0.1)
    matrices = [p for role in ("matrix", "qkv") for _, p in reference.parameter_groups()[role]]
    others = [p for p in reference.parameters() if not any(p is matrix for matrix in matrices)]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    torchs = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    norms = []
    for inputs, targets in batches:
        parted = rows_of((inputs, targets), slice(0, 3), slice(3, 8))
        stats = train_step(model, optimizer, parted, next_token_loss, device=cpu_device(), max_grad_norm=1.5)
        F.cross_entropy(reference(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORE).backward()
        norms.append(nn.utils.clip_grad_norm_(reference.parameters(), 1.5).item())
        torchs.step()
        torchs.zero_grad()
        assert stats.grad_norm.item() == pytest.approx(norms[-1], rel=1e-4)  # before it is clipped
    assert min(norms) < 1.5 < max(norms)  # some are clipped, and others are not
    for (name, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


# ---------------------------------------------------------------------- one step


def test_the_speed_is_without_the_seconds_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = train_step(*make_run(), [make_batch(0)], next_token_loss, device=cpu_device())
    now = [0.0]
    monkeypatch.setattr("nanochat.run.progress.time.perf_counter", lambda: now[0])
    meter = Meter(Progress(), cpu_device())
    for seconds, compiling, expected in ((50.0, 40.0, 50.0), (60.0, 0.0, 60.0)):
        meter.add(stats, 100)
        meter.compiling += compiling
        now[0] = seconds
        line = meter.read(stats)
        assert (line["tok_per_sec"], line["seconds"]) == (10.0, expected)  # training did take the time


def poisoned_loss(model: Any, batch: tuple[Batch, float]) -> tuple[Tensor, Tensor]:
    """The batch comes with a factor for its loss, so that the gradients are poisoned and not the weights."""
    loss, targets = next_token_loss(model, batch[0])
    return loss * batch[1], targets


def test_settings_reach_the_optimizer() -> None:
    still, run = make_run(), make_run()
    before = everything(*still)
    train_step(*still, [make_batch(0)], next_token_loss, device=cpu_device(), lr=0.0)
    assert all(torch.equal(p, before[name]) for name, p in still[0].named_parameters())
    train_step(*run, [make_batch(0)], next_token_loss, device=cpu_device(), momentum=0.5, weight_decay=0.0)
    name = next(name for name in run[1].state_dict() if name.endswith("momentum"))
    torch.testing.assert_close(run[1].state_dict()[name], 10 * still[1].state_dict()[name])  # 1 - 0.5 for 1 - 0.95


class NeverWaits(TorchDispatchMode):
    """Refuses what has the host read a value from the device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2"), name
        return function(*args, **(kwargs or {}))


@pytest.fixture
def never_waits(monkeypatch: pytest.MonkeyPatch) -> NeverWaits:
    def refuse(*_: Any) -> None:
        raise AssertionError("a tensor is read on the host")

    for name in ("tolist", "numpy", "cpu"):  # on the CPU these go past the dispatcher
        monkeypatch.setattr(Tensor, name, refuse)
    return NeverWaits()


@pytest.mark.parametrize("read", [Tensor.item, bool, Tensor.nonzero, lambda x: x.tolist()])
def test_never_waits_notices_a_wait(read: Callable[[Tensor], Any], never_waits: NeverWaits) -> None:
    with never_waits, pytest.raises(AssertionError):
        read(torch.ones(1))


def test_a_step_never_waits_for_the_device(never_waits: NeverWaits) -> None:
    run = make_run()
    with never_waits:
        for batch in (make_batch(0), masked(make_batch(1)), make_batch(2)):
            stats = train_step(*run, [batch, make_batch(3)], next_token_loss, device=cpu_device(), max_grad_norm=0.1)
    assert stats.updated.item() == 1


# ---------------------------------------------------------------------- the schedule


def test_learning_rate_falls_in_three_ways() -> None:
    linear, cosine, constant = (Schedule.for_run(100, 1.0, 0.2, fall=f) for f in get_args(Fall))
    rise = [(step + 1) / 21 for step in range(20)]
    assert [linear.lr(step) for step in range(20)] == [cosine.lr(step) for step in range(20)] == rise
    # From the warm-up's end, where it is 1, to 0.05 at the run's.
    assert [linear.lr(step) for step in (20, 60, 100)] == pytest.approx([1, 0.525, 0.05])
    assert [cosine.lr(step) for step in (20, 60, 100)] == pytest.approx([1, 0.525, 0.05])
    assert cosine.lr(40) == pytest.approx(0.05 + 0.95 * (1 + math.cos(math.pi / 4)) / 2)
    assert {constant.lr(step) for step in range(20, 101)} == {1.0}
    plateau = Schedule.for_run(100, 0.5, 0.2)
    assert (plateau.lr(50), plateau.lr(75)) == (1.0, pytest.approx(0.525))


def test_momentum_rises_and_weight_decay_falls() -> None:
    schedule = Schedule(1000)
    assert [schedule.momentum(step) for step in (0, 150, 300, 999)] == pytest.approx([0.85, 0.90, 0.95, 0.95])
    assert [schedule.weight_decay(step) for step in (0, 500, 1000, 1001)] == [1.0, 0.5, 0.0, 0.0]
    assert Schedule(10, momentum_steps=0).momentum(0) == pytest.approx(0.95)


@pytest.mark.parametrize(
    ("steps", "warmup_steps", "momentum_steps"), [(1, 0, 0), (9, 0, 1), (100, 10, 20), (10**4, 40, 300)]
)
def test_warm_ups_are_cut_for_short_runs(steps: int, warmup_steps: int, momentum_steps: int) -> None:
    schedule = Schedule.for_run(steps)
    assert (schedule.warmup_steps, schedule.momentum_steps) == (warmup_steps, momentum_steps)
    for step in range(min(steps, 100)):
        assert 0 < schedule.lr(step) <= 1 and 0.85 <= schedule.momentum(step) <= 0.9501
    constant = Schedule.for_run(steps, 0.0, warmup_steps=0)
    assert constant.lr(0) == constant.lr(steps - 1) == 1.0
