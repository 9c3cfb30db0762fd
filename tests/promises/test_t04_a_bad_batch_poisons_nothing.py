"""T4. One bad batch never poisons a model.

NaN or infinity in one micro-batch, also on one of two ranks, changes no byte of the weights and the optimizer: all
ranks skip the step and count it, and three in a row end the run with the last good step. What has no target adds
nothing.
"""

import math
import re
import shutil
from typing import Any

import pytest
import torch
from runs import CPU, RL, TINY, call, chat, losses, metrics, mistake, refused, step_folder, write_lines
from safetensors.torch import load_file
from test_train import Batch, everything, make_batch, make_run, masked, numbers, poisoned_loss, same_bytes
from tiny import cpu_device, run_ranks
from torch import Tensor

from nanochat import rollout, train
from nanochat.cross_entropy import IGNORE
from nanochat.demo.arithmetic import Addition
from nanochat.device import Device
from nanochat.model_folder import steps as steps_of
from nanochat.run.progress import Meter, Progress
from nanochat.train import next_token_loss, train_step

DEVICE = cpu_device()

# ---------------------------------------------------------------------- one step


def test_a_masked_micro_batch_adds_nothing() -> None:
    plain, padded = make_run(), make_run()
    for step in range(3):
        batch = make_batch(step)
        one = train_step(*plain, [batch], next_token_loss, device=DEVICE)
        other = train_step(*padded, [masked(batch), batch, masked(batch)], next_token_loss, device=DEVICE)
        assert numbers(one) == numbers(other)
    assert same_bytes(everything(*plain), everything(*padded))


@pytest.mark.parametrize("batches", [[], [(masked(make_batch(1)), 1.0)] * 3, [(make_batch(1), 0.0)]])
def test_a_step_without_targets_or_without_a_gradient_changes_nothing(batches: list[Any]) -> None:
    """A gradient is missing in RL where no reply has an advantage: old momentum must not move the matrices."""
    run = make_run()
    meter = Meter(Progress(), DEVICE)
    meter.add(train_step(*run, [make_batch(0)], next_token_loss, device=DEVICE), 1)
    before = everything(*run)
    for _ in range(3):
        stats = train_step(*run, batches, poisoned_loss, device=DEVICE)
        assert (stats.loss.item(), stats.grad_norm.item(), stats.updated.item(), stats.finite.item()) == (0, 0, 0, 1)
        meter.add(stats, 1)
    assert same_bytes(everything(*run), before)
    line = meter.read(stats)
    assert (line["idle_steps"], line["skipped_steps"], meter.since_good) == (3, 0, 0)


class BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * math.inf


def bad_gradient(model: Any, batch: tuple[Batch, float]) -> tuple[Tensor, Tensor]:
    loss, targets = next_token_loss(model, batch[0])
    return BadGradient.apply(loss), targets  # type: ignore[return-value]


def bad_loss(model: Any, batch: tuple[Batch, float]) -> tuple[Tensor, Tensor]:
    loss, targets = next_token_loss(model, batch[0])
    return loss + math.inf, targets


@pytest.mark.parametrize(
    ("loss_fn", "poison", "place", "clip"),
    [
        (poisoned_loss, math.nan, 0, None),
        (poisoned_loss, math.inf, 2, 0.1),
        (poisoned_loss, -math.inf, 2, None),
        (poisoned_loss, math.nan, 2, 0.1),
        (bad_gradient, 1.0, 0, None),
        (bad_loss, 1.0, 0, None),
    ],
)
def test_one_bad_micro_batch_skips_the_step(loss_fn: Any, poison: float, place: int, clip: float | None) -> None:
    run, spared = make_run(), make_run()
    for each in (run, spared):
        train_step(*each, [make_batch(0)], next_token_loss, device=DEVICE)
    before = everything(*run)
    factors = [1.0, 1.0, 1.0]
    factors[place] = poison
    batches = [(make_batch(i), factor) for i, factor in enumerate(factors)]
    stats = train_step(*run, batches, loss_fn, device=DEVICE, max_grad_norm=clip)
    assert (stats.updated.item(), stats.finite.item()) == (0, 0)
    assert same_bytes(everything(*run), before)
    for each in (run, spared):  # and the next step is as if the bad one had not been
        assert train_step(*each, [make_batch(1)], next_token_loss, device=DEVICE).updated.item() == 1
    assert same_bytes(everything(*run), everything(*spared))


def bad_batch_on_a_rank(device: Device, bad_rank: int) -> list[Any]:
    run = make_run(device)
    train_step(*run, [make_batch(device.rank)], next_token_loss, device=device)
    before = everything(*run)
    factors = (1.0, math.nan, 1.0) if device.rank == bad_rank else (1.0, 1.0, 1.0)
    batches = [(make_batch(i), factor) for i, factor in enumerate(factors)]
    stats = train_step(*run, batches, poisoned_loss, device=device)
    unchanged = same_bytes(everything(*run), before)
    only_one = make_batch(3) if device.rank == bad_rank else masked(make_batch(3))
    after = train_step(*run, [only_one], next_token_loss, device=device)
    changed = not same_bytes(everything(*run), before)
    return [stats.updated.item(), unchanged, after.updated.item(), after.targets.item(), changed]


def bad_batches_on_a_rank(device: Device) -> list[Any]:
    return [bad_batch_on_a_rank(device, bad_rank) for bad_rank in (0, 1)]


def test_one_bad_micro_batch_on_one_rank_skips_the_step_on_both() -> None:
    targets = (make_batch(3)[1] != IGNORE).sum().item()
    assert run_ranks(bad_batches_on_a_rank) == [[[0.0, True, 1.0, targets, True]] * 2] * 2


# ---------------------------------------------------------------------- a run


def poison(monkeypatch: pytest.MonkeyPatch, *bad_steps: int) -> None:
    """The first of two micro-batches of these steps has a loss that is not finite."""
    calls = iter(range(10**6))

    def poisoned(model, batch):
        loss, targets = next_token_loss(model, batch)
        return loss * (math.nan if next(calls) in [2 * step for step in bad_steps] else 1.0), targets

    monkeypatch.setattr(train, "next_token_loss", poisoned)


def test_a_run_that_diverges_from_its_start_fails_and_saves_nothing(base, tokenizer, capsys, monkeypatch):
    poison(monkeypatch, *range(8))
    refused(capsys, ("base_train", *TINY, "--num_iterations=8"), "step: none", "checkpoint: none", "rates\n")
    assert not list((base / "checkpoints").glob("**/step_*"))


@pytest.mark.parametrize("log_every", [1, 10])
def test_three_bad_steps_in_a_row_end_a_run(base, tokenizer, capsys, monkeypatch, log_every):
    """Noticed at the next line; fewer are skipped and counted."""
    flags = (*TINY, f"--log_every={log_every}", "--num_iterations=12", "--save_every=4")
    poison(monkeypatch, 1, 3, 4, 6)
    call("base_train", *flags)
    assert metrics(base, "base")[-1]["skipped_steps"] == 4
    poison(monkeypatch, 1, 4, 5, 6)  # step 7 is good again, and the next line behind it
    code, err = mistake(capsys, "base_train", *flags)
    last_step = step_folder(base, "base", 4)
    assert code == 1 and re.search(f"good step: 3, newest checkpoint: {last_step}; .*--resume\n", err)
    assert steps_of(last_step.parent) == [4]


def test_a_diverged_run_names_an_earlier_checkpoint(base, tokenizer, capsys, monkeypatch):
    """The step after the newest checkpoint was bad, so its weights are: to resume it would end in the same way."""
    flags = (*TINY, "--log_every=10", "--num_iterations=20", "--save_every=2")
    folder = base / "checkpoints/base/d1"

    def keep(most: int) -> None:
        for step in steps_of(folder):
            if step > most:
                shutil.rmtree(folder / f"step_{step:06d}")

    poison(monkeypatch, 5, 6, 7)  # step 4 is good and step 6 is saved behind the first bad one
    code, err = mistake(capsys, "base_train", *flags)
    last = steps_of(folder)[-1]
    assert code == 1 and last > 4
    assert f"{folder}/step_{last:06d}, which diverges: move all after {folder}/step_000004 away; " in err
    # The step after the one that was resumed is bad again: so are its weights. Then the second step after it.
    for bad_steps, more in ((range(8), ()), (range(1, 20), ("--save_every=0",))):
        keep(4)
        poison(monkeypatch, *bad_steps)
        refused(capsys, ("base_train", *flags, *more, "--resume"), f"move all after {folder}/step_000002 away; ")


# ---------------------------------------------------------------------- nothing to learn


def unchanged(base, stage: str, step: int) -> bool:
    before = load_file(step_folder(base, "base", 20) / "model.safetensors")
    after = load_file(step_folder(base, stage, step) / "model.safetensors")
    return all(torch.equal(before[name], after[name]) for name in before)


def test_a_batch_without_any_target_changes_no_weight(start, tmp_path):
    # One of 40 is learned, and it comes after two steps: without any the run would not begin.
    tasks = write_lines(tmp_path / "masked.jsonl", [chat(f"q{n}", "a", train=n == 0) for n in range(40)])
    flags = (f"--tasks={tasks}", "--target_examples_per_step=4", "--num_iterations=2")
    call("chat_sft", *CPU, "--source=base", *flags)
    assert losses(start, "sft") == [0.0, 0.0]
    assert not any("val_loss" in line for line in metrics(start, "sft"))  # and no NaN
    assert unchanged(start, "sft", 2) and metrics(start, "sft")[-1]["no_target"] == 4


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ("", 3),
        # At the first step the model is its own reference: the KL is 0, not the rounding of two ways to compute it.
        ("--loss=rloo --kl=0.2 --kl_in=reward --dtype=bfloat16", 1),
        ("--kl=0.2 --kl_in=reward --updates_per_step=2 --top_k=4 --temperature=1.5", 1),
        ("--kl=0.2", 1),
    ],
)
def test_a_step_whose_replies_are_equally_good_changes_no_weight(start, monkeypatch, flags, steps):
    monkeypatch.setattr(Addition, "reward", lambda self, example, reply: 0.3)
    monkeypatch.setattr(rollout, "ending", lambda tokens, mask, tokenizer: "complete")
    call("chat_rl", *RL, "--source=base", f"--num_iterations={steps}", *flags.split())
    assert [line["idle_steps"] for line in metrics(start, "rl")] == [*range(1, steps + 1)]
    assert unchanged(start, "rl", steps)
