"""T10. A run that learned nothing says so.

Seeded ways to learn nothing, each with a line whose advice fits, and controls without one: validation worse than before
the first step, steps without a gradient, replies that are all worth the same, sources with NaN or too large weights,
data without anything to learn or to prefer.
"""

import re
from pathlib import Path

import pytest
import torch
from runs import BASE, CPU, DPO, MID, RL, SFT, call, chat, forget_after, metrics, mistake, refused, write_lines
from tiny import save_checkpoint

from nanochat import rollout
from nanochat.checkpoint_manager import load_model
from nanochat.demo.arithmetic import Addition


def warnings_of(capsys: pytest.CaptureFixture) -> tuple[list[str], str]:
    """The warnings about what a run has lost, and its last line."""
    captured = capsys.readouterr()
    return re.findall(r"(?m)^warning: after .*: lower the learning rates", captured.err), captured.out.splitlines()[-1]


@pytest.mark.parametrize("lr_scale", ["0.2", "100"])
def test_a_run_that_makes_the_model_worse(start, capsys, lr_scale):
    """At each evaluation and once at the end, also when it resumes; a run that learns has no such line."""
    flags = (*SFT, "--source=base", "--num_iterations=6", "--eval_every=2", "--save_every=4", f"--lr_scale={lr_scale}")
    call("chat_sft", *flags)
    lost, last = warnings_of(capsys)
    ((before, after),) = [map(float, pair) for pair in re.findall(r"val_loss (\S+) -> (\S+)$", last)]
    assert after == pytest.approx(metrics(start, "sft")[-1]["val_loss"], abs=1e-4)
    if lr_scale == "0.2":
        assert not lost and after < before
        return
    assert re.findall(r"after (\d) steps", " ".join(lost)) == ["2", "4", "6"]
    assert f"val_loss is {after:.4f}, worse than the {before:.4f}" in lost[-1]
    forget_after(start, "sft", 4)
    call("chat_sft", *flags, "--resume")
    assert warnings_of(capsys) == (lost[2:], last)


def test_a_run_without_gradients(start, capsys):
    """A rate that makes every logit infinite for the softmax: no loss is NaN, and no step changes anything."""
    call("base_train", *BASE, "--num_iterations=30", "--eval_every=15", "--matrix_lr=100", "--model_tag=lost")
    lost, last = warnings_of(capsys)
    assert [re.search(r"the last (\d\d) steps had no gradient", line) is not None for line in lost] == [True] * 2
    # The untrained model of the first evaluation counts, too.
    lines = metrics(start, "base", "lost")
    values = [line[name] for line in lines for name in ("val_bpb_before", "val_bpb") if name in line]
    assert len(values) == 3 and last.endswith(f"best validation {min(values):.4f} bits per byte, last {values[-1]:.4f}")


@pytest.mark.parametrize("is_constant", [True, False])
def test_a_reward_that_is_always_the_same(start, capsys, monkeypatch, is_constant):
    def reward(self: Addition, example: object, reply: list) -> float:
        return 0.3 if is_constant else float(len(str(reply)) % 2)

    monkeypatch.setattr(Addition, "reward", reward)
    monkeypatch.setattr(rollout, "ending", lambda tokens, mask, tokenizer: "complete")
    sizes = ("--num_iterations=10", "--max_tokens=2", "--eval_every=0", "--num_samples=4")
    call("chat_rl", *RL, "--source=base", *sizes)
    lost, _ = warnings_of(capsys)
    assert [line.count("the last 10 steps had no gradient") for line in lost] == ([1] if is_constant else [])


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
        (
            "chat_dpo",
            {"prompt": "Hi?", "chosen": "no", "rejected": "no"},
            ("12 of 12 records left out", "chosen and rejected are the same"),
        ),
    ],
)
def test_data_without_anything_to_learn(start, tmp_path, capsys, script, row, words):
    tasks = f"--tasks={write_lines(tmp_path / 'same.jsonl', [row] * 12)}"
    code, err = mistake(capsys, script, *CPU, "--source=base", tasks, "--num_iterations=2")
    assert code == 1 and any(word in err for word in words), err
    assert not (start / f"checkpoints/{script.removeprefix('chat_')}").exists()
