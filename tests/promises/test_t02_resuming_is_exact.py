"""T2. Resuming is exact in every stage.

A run that nothing disturbs, and the same run killed and resumed: every byte of its last checkpoint and every logged
number are equal. Between them the rows have mixtures, masks between documents, epochs, packing with its leftovers,
adapters, rounded optimizer states, references, teachers, refilled batches and compiled steps.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import (
    BASE,
    CPU,
    DPO,
    MID,
    RL,
    RM,
    SFT,
    TINY,
    call,
    chat,
    graded,
    lasting,
    losses,
    meta_of,
    metrics,
    questions,
    resume,
    tuned,
    write_lines,
    write_splits,
)
from safetensors.torch import load_file
from torch._dynamo.utils import counters

from nanochat.checkpoint_manager import load_model
from nanochat.mixture import FAR_DRAW
from nanochat.run.stop import Stop
from nanochat.tasks.flag import EpochMixture


def flags_of(stage: str, base: Path) -> tuple[str, ...]:
    """Each stage with a source, in the forms of its loss and optimizer that keep the most state."""
    return {
        "base": (*BASE, "--save_every=0"),
        "mid": (*MID, "--source_tag=d1", "--optimizer_dtype=bfloat16"),
        "sft": (*SFT, "--source=base", "--source_tag=d1"),
        "rm": (*tuned(RM), "--source=sft", "--source_tag=d1"),
        "dpo": (*tuned(DPO), "--source=sft", "--source_tag=d1", "--sft_weight=0.1"),
        "rl": graded(base),
    }[stage]


@pytest.fixture
def mixture(tmp_path: Path) -> str:
    path = tmp_path / "small.txt"
    path.write_text("<|endoftext|>\n".join(f"The boat {n}. Once upon a time {n * 7} fish.\n" * 3 for n in range(90)))
    return f"--data={path}:0.3,demo:0.7"


def test_pretraining_on_a_mixture(base, tokenizer, mixture, capsys):
    """From the middle; from a step that a resumed run has saved; from the one before a damaged one; from the end."""
    flags = (*TINY, mixture, "--max_seq_len=256", "--total_batch_size=512", "--seed=3")
    straight = resume(base, "base", (*flags, "--num_iterations=6", "--save_every=2", "--eval_every=3"), kill=(2, 4))
    weights = straight.folder / "step_000004/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    straight.resumed(2, kept=4)
    straight.resumed(6)
    assert [line["step"] for line in metrics(base, "base")] == list(range(6))  # none twice, none missing


def test_continued_pretraining_of_adapters_with_a_longer_context(start, mixture, capsys):
    flags = (*CPU, mixture, "--source=base", "--source_tag=d1", "--max_seq_len=256", "--rope_scaling=yarn")
    flags += (
        "--device_batch_size=2",
        "--total_batch_size=1024",
        "--num_iterations=4",
        "--save_every=2",
        "--compile=off",
    )
    flags += ("--lora_rank=4", "--lora_alpha=8", "--lora_dropout=0.1", "--lora_base=nf4", "--eval_tokens=256")
    straight = resume(start, "base", flags, kill=(2,), tag="texts", script="mid_train")
    assert "context: 256 tokens, rope_theta 100,000, positions scaled by 2 (yarn)" in capsys.readouterr().out
    folder = straight.folder / "step_000004"
    assert metrics(start, "base", "texts")[0]["lr"] <= 2e-4 and not (folder / "model.safetensors").exists()
    assert all("lora_" in name for name in load_file(folder / "adapter.safetensors"))
    meta = meta_of(start, "base", 4, "texts")
    read = meta["pretraining"]
    assert (read["tokens"], read["context"], read["batch_tokens"]) == (20 * 512 + 4 * 1024, 256, 1024)
    assert read["data"] == f"demo,{mixture.removeprefix('--data=')}"
    assert meta["source"] == "base/d1/step_000020" and meta["model"]["rope_scaling"]["original_len"] == 128
    # What it becomes is a base model: adapters for a chat are trained over it, and both are merged.
    before, after = (load_model("base", "cpu", model_tag=tag)[0].state_dict() for tag in ("d1", "texts"))
    name = next(name for name in before if name.startswith("blocks.0.") and before[name].ndim == 2)
    assert not torch.equal(before[name], after[name])
    sft = ("--source=base", "--source_tag=texts", "--model_tag=chat", "--num_iterations=1", "--lora_rank=2")
    call("chat_sft", *SFT, *sft)
    assert load_model("sft", "cpu", model_tag="chat")[2]["stage"] == "sft"


@pytest.mark.slow
@pytest.mark.parametrize("steps", [8, pytest.param(40, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("stage", "extra"),
    [
        ("mid", ""),
        ("rm", ""),
        ("dpo", ""),
        ("rl", ""),
        ("rl", "--loss=dapo --refills=1 --kl=0 --kl_in=loss --updates_per_step=1 --minibatches=3 --learning_rate=1e-3"),
        ("rl", "--loss=distill --teacher=base --tasks=identity --kl=0 --kl_in=loss"),
    ],
    ids=["mid", "reward", "dpo", "reward_kl", "dapo", "distill"],
)
def test_steps_in_three_parts(taught, stage, extra, steps):
    """A half, a quarter and a quarter of the steps."""
    flags = [flag for flag in flags_of(stage, taught) if "learning_rate" not in extra or "lr_scale" not in flag]
    flags += [*extra.split(), f"--num_iterations={steps}", "--seed=5"]
    flags += [f"--save_every={steps // 4}", f"--eval_every={steps // 3}"]
    resume(taught, stage, flags, kill=(steps // 2, steps * 3 // 4))


def rows_of(stage: str) -> list[dict[str, Any]]:
    if stage == "sft":
        return [{"instruction": f"What is {n}?", "output": f"It is {n}."} for n in range(23)]
    return [{"prompt": f"What is {n}?", "chosen": f"It is {n}.", "rejected": "No."} for n in range(23)]


@pytest.mark.parametrize(("stage", "flags"), [("sft", SFT), ("dpo", DPO), ("rl", RL)])
def test_epochs_have_every_example_once(start, tmp_path, monkeypatch, stage, flags):
    """SFT and DPO: 6 of 23 rows are held out; an epoch of 17 has four steps of 4, and one of 1. RL: 14 questions, 4 a
    step, are 7 steps in two epochs."""
    flags = (*flags, "--source=base", "--num_epochs=2", "--save_every=1")
    if stage == "rl":
        count, steps, kill, begun = 14, 7, (3,), 100  # the first questions are tried before training
        flags += (f"--tasks=gsm8k={write_splits(tmp_path, questions(count))}", "--examples_per_step=4")
        flags += ("--eval_every=0", "--num_samples=2", "--max_tokens=4")
    else:
        # The opening measures how long a step is, and SFT looks first at all rows, whether it can learn.
        count, steps, kill, begun = 17, 10, (4, 5), 4 + 17 * (stage == "sft")
        flags = (*tuned(flags), f"--tasks={write_lines(tmp_path / 'mine.jsonl', rows_of(stage))}", "--val_share=0.25")
        flags += ("--target_examples_per_step=4", "--lr_schedule=cosine", "--warmup_ratio=0.2", "--eval_every=5")
    drawn: list[int] = []
    draw = EpochMixture.draw

    def recorded(mixture: EpochMixture, index: int) -> Any:
        if index < FAR_DRAW:  # beyond are the chats that generated examples follow
            drawn.append(draw(mixture, index)[1])
        return draw(mixture, index)

    monkeypatch.setattr(EpochMixture, "draw", recorded)
    straight = resume(start, stage, flags, kill=kill)
    first, second = (drawn[begun + count * epoch : begun + count * (epoch + 1)] for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(count)) and first != second and straight.steps == steps
    if stage != "rl":
        lines = metrics(start, stage)
        assert [line["lr"] for line in lines[:3]] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3])
        assert lines[6]["lr"] == pytest.approx(1e-3 * (0.05 + 0.95 / 2)) and "val_loss" in lines[4]
        assert lines[-1]["loss"] < lines[0]["loss"]


@pytest.mark.parametrize("stage", ["mid", "sft", "dpo", "rl"])
def test_a_run_of_which_nothing_is_held_out(start, tmp_path, capsys, stage):
    """A small file is needed whole: every step that would be evaluated has its line at once."""
    rows = rows_of(stage) if stage == "dpo" else [chat(f"What is {n}?", f"It is {n}.") for n in range(23)]
    (tmp_path / "reward.py").write_text(
        "def long(episodes):\n    return [len(one.reply) % 7 / 7 for one in episodes]\n"
    )
    flags = {"mid": MID, "sft": SFT, "dpo": DPO, "rl": (*RL, f"--reward={tmp_path / 'reward.py'}:long")}[stage]
    flags += (f"--tasks={write_lines(tmp_path / 'mine.jsonl', rows)}", "--source=base/d1")
    flags += ("--num_iterations=4", "--eval_every=1", "--save_every=1")
    straight = resume(start, stage, flags, kill=(2,))
    lines = metrics(start, stage)
    names = {name for line in lines for name in line}
    assert len(lines) == 4 and not [name for name in names if name.startswith(("val_", "eval_"))]
    assert "before the first step" not in straight.printed and "validation was best" not in straight.printed
    assert "done: 4 steps" in straight.printed and ("nothing was held out" in straight.printed) == (stage == "rl")


def test_counts_between_two_lines(start, tmp_path, monkeypatch):
    """Stopped between two log lines, or behind one: the next line counts what was there before."""
    rows = [chat(f"What is {n}?", f"It is {n}.", **({} if n % 3 else {"train": False})) for n in range(40)]
    tasks = f"--tasks={write_lines(tmp_path / 'odd.jsonl', [*rows, chat('long ' * 300, 'Never reached.')])}"
    flags = (*CPU, "--source=base", "--source_tag=d1", tasks, "--target_examples_per_step=4", "--device_batch_size=2")
    flags += ("--num_iterations=8", "--log_every=5", "--eval_examples=4")
    call("chat_sft", *flags, "--model_tag=straight")
    for stop in (3, 6):
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(Stop, "boundary", lambda self, step, stop=stop: step == stop)
            call("chat_sft", *flags, "--model_tag=run", "--resume")
    call("chat_sft", *flags, "--model_tag=run", "--resume")
    assert lasting(start, "sft", "run") == lasting(start, "sft", "straight")
    assert sum(line["no_target"] for line in metrics(start, "sft", "straight")) > 5


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The compiler begins anew whenever a run starts, as in a new process. Only the traced operators run: each
    program in C++ takes seconds."""
    compile_ = torch.compile

    def anew(*args: Any, **options: Any) -> Any:
        torch._dynamo.reset()
        return compile_(*args, **{"backend": "aot_eager", **options})

    monkeypatch.setattr(torch, "compile", anew)
    counters.clear()
    yield
    torch.use_deterministic_algorithms(False)


def compiled_flags(stage: str, base: Path) -> Sequence[str]:
    if stage == "rl":
        return (*flags_of(stage, base), "--updates_per_step=1", "--examples_per_step=2", "--device_batch_size=1")
    return flags_of(stage, base)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "dpo", "rl"])
def test_compiled_steps(taught, compiler, stage):
    flags = (*compiled_flags(stage, taught), "--num_iterations=3", "--save_every=1", "--eval_every=0")
    call(f"chat_{stage}", *flags, "--compile=off", "--model_tag=eager")
    resume(taught, stage, (*flags, "--compile=on"), kill=(2,))  # a start compiles for seconds
    compiled, eager = losses(taught, stage), losses(taught, stage, "eager")
    assert compiled[0] == eager[0]
    assert compiled[1] == pytest.approx(eager[1], rel=1e-4, abs=1e-6)
    assert counters["stats"]["unique_graphs"] >= 1  # something was compiled
