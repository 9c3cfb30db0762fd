"""T10. A run that learned nothing says so.

Seeded ways to learn nothing, each with one line whose advice fits, and controls without one: by the numbers of a run,
and by runs that really go wrong. Sources with NaN or too large weights, and data without anything to learn or to
prefer, are refused.
"""

import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import BASE, CPU, DPO, MID, RL, SFT, call, chat, forget_after, metrics, mistake, refused, write_lines
from tiny import save_checkpoint

from nanochat import losses, rollout
from nanochat.checkpoint_manager import load_model
from nanochat.demo.arithmetic import Addition
from nanochat.experts import router
from nanochat.losses import masked_loss
from nanochat.run import verdict
from nanochat.run.progress import Progress
from scripts import base_train, chat_dpo, chat_rl, chat_sft

# ---------------------------------------------------------------------- by the numbers of a run


def judged(flags, first, recent, *, rate=0.01, steps=100, adapter=None, experts=(0, 2), **progress) -> str:
    """The verdict on a finished run; `first` and `recent` are means over its beginning and its end."""
    shape = SimpleNamespace(experts=experts[0], experts_per_token=experts[1])
    start = SimpleNamespace(adapter=adapter, model=SimpleNamespace(config=shape))
    optimizer = SimpleNamespace(groups=[SimpleNamespace(learning_rate=rate)])
    means = [{"square": one.get("loss", 0) ** 2, "opening": 9.0, **one} for one in (first, recent)]
    state = Progress(**{"step": steps, "first": means[0], "recent": means[1], **progress})
    run: Any = SimpleNamespace(progress=state, config=flags, last=steps, optimizer=optimizer, start=start)
    return verdict.judge(run)


def val(before: float, now: float, best: float = 9.0, name: str = "val_loss", error: float = 0.0) -> dict[str, Any]:
    initial = {f"{name}_before": before, f"{name}_error_before": error}
    return {"initial": initial, "evaluated": {name: now, f"{name}_error": error}, "best": {name: min(now, best)}}


REWARD: Any = {"name": "eval_reward", "error": 0.03}
SFT_FLAGS, LORA, ADAMW = chat_sft.Config(), chat_sft.Config(lora_rank=8), chat_sft.Config(learning_rate=1e-5)
CLIPPED = chat_sft.Config(learning_rate=1e-3, max_grad_norm=1e-9)
RL_FLAGS, DISTILL = chat_rl.Config(), chat_rl.Config(loss="distill", teacher="sft")
FELL, STILL = {"loss": 2.0}, {"loss": 5.0}
WAYS = [
    (SFT_FLAGS, STILL, STILL, {"rate": 0.0, **val(5, 5)}, "raise --lr_scale"),
    (ADAMW, STILL, STILL, {"rate": 1e-9, **val(5, 5)}, "raise --learning_rate"),
    (SFT_FLAGS, STILL, STILL, val(5, 5.1), "lower --lr_scale, or look at the data"),
    (base_train.Config(), STILL, STILL, val(5, 5.1, name="val_bpb"), "lower --matrix_lr"),
    (SFT_FLAGS, STILL, FELL, val(5, 5.1), "has fallen, train on more data"),
    (SFT_FLAGS, STILL, STILL, val(4, 1.62, 1.09), "worse than 1.0900, the best: lower"),
    (SFT_FLAGS, STILL, STILL, val(5, 4.999), "hardly moved (5.0000 -> 4.9990): raise --lr_scale"),
    (CLIPPED, STILL, STILL, val(5, 4.999), "raise --max_grad_norm"),
    (chat_dpo.Config(), STILL, {**STILL, "accuracy": 0.52}, val(0.6931, 0.6930), "scripts.preview"),
    (SFT_FLAGS, FELL, STILL, {}, "the training loss is 5.0000, worse than 2.0000 at the beginning: lower"),
    (SFT_FLAGS, STILL, STILL, {}, "the training loss has hardly moved (5.0000 -> 5.0000): raise --lr_scale"),
    (SFT_FLAGS, STILL, {"loss": 11.0, "updated": 0.0}, {}, "too large, lower --lr_scale and begin again"),
    (SFT_FLAGS, STILL, {"loss": 0.0, "updated": 0.0}, {}, "no target"),
    (RL_FLAGS, {"no_signal": 0.86, "reward": 0.3}, {"no_signal": 0.9, "reward": 0.3}, {}, "86% of the questions"),
    (RL_FLAGS, {"reward": 0.5}, {"reward": 0.5}, val(0.6, 0.1, **REWARD), "eval_reward is 0.1000, worse than 0.6000"),
    (DISTILL, {"kl": 1e-5}, {"kl": 1e-4, "no_signal": 1.0}, {}, "another --teacher"),
    (base_train.Config(), STILL, {**FELL, "expert_max_share": 0.89, "expert_entropy": 0.5}, {"experts": (2, 1)}, "89%"),
    (base_train.Config(), STILL, {**FELL, "expert_max_share": 0.5, "expert_entropy": 0.6}, {"experts": (4, 2)}, "50%"),
]
CONTROLS = [
    (SFT_FLAGS, STILL, FELL, val(5, 4)),
    (base_train.Config(), STILL, FELL, val(5, 1.1, 1.09, "val_bpb")),
    (SFT_FLAGS, STILL, STILL, {"steps": 4, **val(5, 5.01)}),  # a trial
    (ADAMW, STILL, STILL, {"rate": 1e-6, **val(5, 4.98)}),
    (LORA, STILL, FELL, {"rate": 2e-4, "adapter": {"alpha": 16, "rank": 64}, **val(5, 4)}),
    (SFT_FLAGS, {"loss": 5.0, "square": 27.0}, {"loss": 5.1, "square": 28.0}, {}),  # by chance
    (RL_FLAGS, {"no_signal": 0.7, "reward": 0.5}, {"no_signal": 1.0, "reward": 1.0}, val(0.5, 1.0, **REWARD)),
    (RL_FLAGS, {"reward": 0.5}, {"reward": 0.5}, val(0.6, 0.5, **REWARD)),
    (DISTILL, {"kl": 0.3, "no_signal": 1.0}, {"kl": 1e-4, "no_signal": 1.0}, {}),
    (base_train.Config(), STILL, {**FELL, "expert_max_share": 0.44, "expert_entropy": 0.79}, {"experts": (4, 2)}),
]


@pytest.mark.parametrize(("flags", "first", "recent", "run", "words"), [*WAYS, *((*row, None) for row in CONTROLS)])
def test_a_verdict_fits_its_cause(flags, first, recent, run, words):
    line = judged(flags, first, recent, **run)
    assert words in line if words else not line


# ---------------------------------------------------------------------- by runs


def warnings_of(capsys: pytest.CaptureFixture) -> tuple[list[str], str]:
    """The warnings about what a run learns, and its last line."""
    captured = capsys.readouterr()
    return re.findall(r"(?m)^warning: (after .*)", captured.err), captured.out.splitlines()[-1]


def upwards(model: Any, rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss with the gradient of the opposite sign."""
    loss, targets = masked_loss(model, rows)
    return 2 * loss.detach() - loss, targets


@pytest.mark.parametrize(
    ("script", "flags", "words"),
    [
        ("base_train", (*BASE, "--matrix_lr=0"), "raise --matrix_lr"),
        ("base_train", (*BASE, "--matrix_lr=100", "--num_iterations=30"), "too large, lower --matrix_lr"),
        ("base_train", (*BASE, "--experts=4", "--experts_per_token=1"), "fewer experts"),
        ("mid_train", (*MID, "--lr_scale=100"), "lower --lr_scale"),
        ("chat_sft", SFT, ""),  # a control
        ("chat_sft", (*SFT, "--lr_scale=0"), "raise --lr_scale"),
        ("chat_sft", (*SFT, "--lora_rank=4", "--lora_alpha=1e-6"), "raise --lora_alpha"),
        ("chat_sft", (*SFT, "--val_share=0"), "the training loss is"),
        ("chat_dpo", DPO, "scripts.preview"),
        ("chat_rl", (*RL, "--num_samples=8"), "equally good"),
        ("chat_rl", (*RL, "--loss=distill", "--teacher=base"), "another --teacher"),
    ],
)
def test_a_run_that_goes_wrong(start, tmp_path, capsys, monkeypatch, script, flags, words):
    """Once and at the end a line, whose problem its last line repeats."""
    rewards = iter(range(10**6))
    monkeypatch.setattr(Addition, "reward", lambda *_: float(next(rewards) % 100 == 7))  # one reply in a hundred
    monkeypatch.setattr(rollout, "ending", lambda tokens, mask, tokenizer: "complete")
    monkeypatch.setattr(router, "BIAS_RATE", -0.1)  # experts with more tokens than others are given more of them
    if script != "base_train":
        flags = (*flags, "--source=base", "--source_tag=d1")
    if script == "chat_dpo":
        coins = [random.Random(n).sample(["Yes.", "No."], 2) for n in range(200)]
        rows = [{"prompt": f"Is it {n}?", "chosen": coin[0], "rejected": coin[1]} for n, coin in enumerate(coins)]
        flags = (*flags, f"--tasks={write_lines(tmp_path / 'pairs.jsonl', rows)}")
    if "--val_share=0" in flags:
        rows = [chat(f"What is {n}?", str(n)) for n in range(40)]
        flags = (*flags, f"--tasks={write_lines(tmp_path / 'chats.jsonl', rows)}")
        monkeypatch.setattr(losses, "masked_loss", upwards)
    flags = ("--num_iterations=12", "--eval_every=6", "--save_every=6", "--model_tag=lost", *flags)
    call(script, *flags)
    lost, last = warnings_of(capsys)
    if not words:
        lines = metrics(start, "sft", "lost")
        change = f"{lines[0]['val_loss_before']:.4f} -> {lines[-1]['val_loss']:.4f}"
        assert not lost and last == f"done: 12 steps, val_loss {change}"
        return
    problem = re.fullmatch(r"after \d+ steps (.*?): .*", lost[-1])
    assert words in lost[-1] and problem and last.startswith(f"done, but {problem[1]}: "), (lost, last)
    assert len(lost) <= 2
    if "--val_share=0" in flags:  # the resumed run knows how the training loss began
        forget_after(start, "sft", 6, "lost")
        call(script, *flags, "--resume")
        assert warnings_of(capsys) == (lost, last)


def spoiled(base: Path, value: float) -> Path:
    """The pretrained model with one weight that is not finite; its checkpoint is whole."""
    model, tokenizer, _ = load_model("base", "cpu")
    with torch.no_grad():
        model.get_parameter("blocks.0.mlp.input.weight")[3, 2] = value
    return save_checkpoint(base / "checkpoints/base/spoiled", 1, model, tokenizer, {"stage": "base"})


@pytest.mark.parametrize(
    ("script", "flags", "flag", "value"),
    [
        ("chat_sft", SFT, "--source", torch.nan),
        ("chat_dpo", DPO, "--source", torch.nan),
        ("mid_train", MID, "--source", torch.inf),
        ("chat_rl", (*RL, "--source=base", "--source_tag=d1", "--loss=distill"), "--teacher", torch.nan),
        ("chat_sft", SFT, "--source", 3e38),  # finite, and too large
        ("chat_rl", (*RL, "--source=base", "--source_tag=d1", "--loss=distill"), "--teacher", 3e38),
    ],
)
def test_a_source_that_computes_nothing_finite(start, capsys, script, flags, flag, value):
    folder = spoiled(start, value)
    names = ("blocks.0.mlp.input.weight", "1 of") if value != 3e38 else ("computes NaN or infinite",)
    refused(capsys, (script, *flags, f"{flag}={folder}"), f"{flag} {folder}", *names)
    assert not list(start.glob("runs/*/spoiled"))


@pytest.mark.parametrize(
    ("script", "row", "words"),
    [
        ("chat_sft", chat("Hi?", "Yes.", train=False), ("nothing to learn",)),
        ("chat_sft", chat("long " * 300, "Never reached."), ("--max_seq_len",)),
        ("chat_dpo", {"prompt": "Hi?", "chosen": "no", "rejected": "no"}, ("12 of 12 records left out",)),
    ],
)
def test_data_without_anything_to_learn(start, tmp_path, capsys, script, row, words):
    tasks = f"--tasks={write_lines(tmp_path / 'same.jsonl', [row] * 12)}"
    code, err = mistake(capsys, script, *CPU, "--source=base", tasks, "--num_iterations=2")
    assert code == 1 and any(word in err for word in words), err
    assert not (start / f"checkpoints/{script.removeprefix('chat_')}").exists()
