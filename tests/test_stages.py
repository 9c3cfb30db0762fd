"""Mid-training, SFT, DPO and RL: their order, their batches, odd conversations, rewards that rise.

Most tests run a script's `main` in this process. That a stage resumes exactly, and at any number of ranks, is shown in
tests/promises (T2, T3).
"""

import contextlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from runs import (  # noqa: F401 (base, pretrained, start, taught and tutored are fixtures)
    BASE,
    CPU,
    DPO,
    MID,
    RL,
    RM,
    SFT,
    SHORT,
    base,
    call,
    chat,
    graded,
    losses,
    meta_of,
    metrics,
    mistake,
    pretrained,
    refused,
    sha256,
    start,
    step_folder,
    taught,
    tuned,
    tutored,
    write_lines,
    write_splits,
)
from tiny import cpu_device, lively_model, rendered_pairs, tiny_config
from torch._dynamo.utils import counters

from nanochat.alignment.reply_pairs import pair_batches
from nanochat.attention import Segments
from nanochat.checkpoint_manager import load_model
from nanochat.conversation import Part, text_of
from nanochat.demo.arithmetic import Addition
from nanochat.gpt import Block
from nanochat.ground import paths
from nanochat.kernels.compiling import CompiledBlocks, CompilerClock
from nanochat.kernels.gradients import WrittenKernels
from nanochat.losses import token_logp
from nanochat.mixture import FAR_DRAW, FIRST_EXAMPLES, Mixture
from nanochat.run.progress import Meter, Progress
from nanochat.run.run_log import REQUIRED
from nanochat.task import Example, Task
from nanochat.tokenizer import Tokenizer

# ---------------------------------------------------------------------- before a run


@pytest.mark.parametrize(("script", "flags"), [("base_train", BASE), ("chat_dpo", (*DPO, "--source=base"))])
def test_a_dry_run_prints_the_memory_and_writes_nothing(start, capsys, script, flags):  # noqa: F811
    """The other stages, and adapters, are in tests/parallel/test_dry_run.py."""
    before = sorted(start.rglob("*"))
    call(script, *flags, "--dry_run")
    assert sorted(start.rglob("*")) == before
    lines = [line for line in capsys.readouterr().out.splitlines() if line.endswith(" MiB")]
    sizes = {line[2:34].strip(): float(line[34:].split()[0].replace(",", "")) for line in lines}
    weights = (step_folder(start, "base", 20) / "model.safetensors").stat().st_size / 2**20
    assert sizes["parameters"] == pytest.approx(weights, abs=0.2)  # and the rotary tables
    assert sizes["gradients"] == pytest.approx(weights, abs=0.06)
    most = next(size for name, size in sizes.items() if name.startswith("most at once"))
    assert sizes["parameters"] + sizes["optimizer state"] + sizes["activations"] < most
    if script == "chat_dpo":  # a loss without a reference needs no second model
        call(script, *flags, "--loss=simpo", "--dry_run")
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "most at once" in line]
        assert most - float(line.split()[-2].replace(",", "")) > 0.9 * weights


# ---------------------------------------------------------------------- the chain


@pytest.mark.slow
def test_a_base_model_becomes_a_chat_model(start, capsys):  # noqa: F811
    call("mid_train", *MID, "--num_iterations=8", "--eval_every=4")
    call("chat_sft", *SFT, "--num_iterations=8", "--eval_every=4")
    call("chat_dpo", *DPO, "--num_iterations=2", "--eval_every=2")
    call("chat_rl", *RL, "--num_iterations=2", "--eval_every=1", "--source=dpo")
    out = capsys.readouterr().out
    assert "done: 2 steps, eval_reward 0." in out and "a question and a reply, reward" in out
    keys = (("mid", "val_bpb", 8), ("sft", "val_loss", 8), ("dpo", "val_accuracy", 2), ("rl", "eval_reward", 2))
    for stage, key, steps in keys:
        lines = metrics(start, stage)
        assert [line["step"] for line in lines] == list(range(steps))
        assert all(set(REQUIRED) <= set(line) and math.isfinite(line["loss"]) for line in lines)
        assert f"{key}_before" in lines[0] and f"{key}_before" not in lines[1]
        assert key in lines[-1] and step_folder(start, stage, steps).is_dir()
        assert [line["tokens"] for line in lines] == sorted(line["tokens"] for line in lines)
    sft, dpo, rl = (metrics(start, stage) for stage in ("sft", "dpo", "rl"))
    assert sft[-1]["loss"] < sft[0]["loss"] and all(0.5 < line["real_tokens"] <= 1 for line in sft)
    assert metrics(start, "mid")[-1]["val_bpb"] < metrics(start, "mid")[3]["val_bpb"]
    named = {"reward", "response_tokens", "pass_at_k", "no_signal", "truncated", "entropy", "sampler_gap", "clipped"}
    assert all({*named, "sampling_seconds", "training_seconds"} <= set(line) for line in rl)
    assert max(line["sampler_gap"] for line in rl) < 1e-5
    assert all({"margin", "chosen_reward", "rejected_reward", "left_out"} <= set(line) for line in dpo)
    assert dpo[0]["loss"] == pytest.approx(math.log(2)) and dpo[0]["accuracy"] == 0.5
    commands = [json.loads(line) for line in (start / "runs/commands.jsonl").read_text().splitlines()]
    assert [c["stage"] for c in commands] == ["base", "mid", "sft", "dpo", "rl"]
    assert all(c["tag"] == "d1" and c["seconds"] > 0 and c["kind"] == "cpu" for c in commands)
    # What a server reads of a checkpoint: how to draw its replies, and all that it has learned on the way.
    for stage in ("base", "mid", "sft", "dpo", "rl"):
        *_, meta = load_model(stage, "cpu")
        assert meta["tasks"] == ([] if stage == "base" else SHORT.split(","))
        assert (meta["sampling"]["temperature"], meta["sampling"]["min_p"]) == (0.8, 0.2)


def test_sft_continues_where_mid_training_stopped(start, monkeypatch):  # noqa: F811
    drawn: dict[str, list[int]] = {"mid": [], "sft": [], "again": []}
    original = Mixture.draw

    def recorded(stage: str, script: str, *flags: str) -> None:
        def draw(mixture: Mixture, index: int) -> tuple[Task, int]:
            if mixture.tasks[0].split == "train" and 0 <= index < FAR_DRAW:  # the others are what came before one
                drawn[stage].append(index)
            return original(mixture, index)

        monkeypatch.setattr(Mixture, "draw", draw)
        call(script, *flags)

    recorded("mid", "mid_train", *MID, "--num_iterations=8")
    recorded("sft", "chat_sft", *SFT, "--num_iterations=4")
    flags = ("--source=sft", "--source_tag=d1", "--model_tag=again")
    recorded("again", "chat_sft", *SFT, "--num_iterations=4", *flags)
    first = min(drawn["sft"])
    assert first == meta_of(start, "mid", 8)["pretraining"]["conversations"] and 0 < first < 10 * len(drawn["mid"])
    assert not set(drawn["mid"][: len(drawn["mid"]) // 2]) & set(drawn["sft"])
    looked_at = set(range(first, first + FIRST_EXAMPLES))  # at the beginning; the steps learn 32
    assert set(drawn["sft"]) == looked_at and min(drawn["again"]) == first + 32


def test_continued_pretraining_counts_its_epochs_and_learns(start, tmp_path, capsys):  # noqa: F811
    """Two epochs of a text, by adapters."""
    documents = [f"The boat number {n} has {n * n} sails. " * 3 for n in range(60)]
    text = write_lines(tmp_path / "mine.jsonl", [{"text": document} for document in documents])
    val_data = write_lines(tmp_path / "val.jsonl", [{"text": "The boat number 7 has 49 sails."}])
    tokenizer = Tokenizer.load(start / "tokenizer")
    tokens = sum(1 + len(tokenizer.encode(document)) for document in documents)
    flags = (*CPU, "--source=base", "--source_tag=d1", f"--data={text}", f"--val_data={val_data}", "--compile=off")
    flags = (*flags, "--device_batch_size=4", "--total_batch_size=512", "--eval_every=0", "--num_epochs=2")
    call("mid_train", *flags, "--lora_rank=8", "--learning_rate=0.01")
    assert f"data: {tokens:,} tokens" in capsys.readouterr().out
    lines = metrics(start, "base", "d1-continued")
    assert len(lines) == math.ceil(2 * tokens / (4 * 129)) > 4
    assert lines[-1]["val_bpb"] < lines[0]["val_bpb_before"] - 0.05


# ---------------------------------------------------------------------- batches

FOUR_MICRO_BATCHES = "--gradient_accumulation_steps=4"


@pytest.mark.parametrize(
    ("stage", "flags", "size", "way"),
    [
        ("base", BASE, "total_batch_size", f"{FOUR_MICRO_BATCHES} --device_batch_size=1"),
        ("mid", MID, "total_batch_size", f"{FOUR_MICRO_BATCHES} --device_batch_size=1 --dataloader_num_workers=0"),
        ("sft", SFT, "no flag", "--device_batch_size=7"),
        ("sft", SFT, "examples_per_step", FOUR_MICRO_BATCHES),
        ("dpo", DPO, "examples_per_step", FOUR_MICRO_BATCHES),
    ],
)
def test_micro_batches_add_up_to_the_batch(start, stage, flags, size, way):  # noqa: F811
    """However a batch is cut up. The number of micro-batches takes the place of the batch's size."""
    source = () if stage == "base" else ("--source=base", "--source_tag=d1")
    run = (paths.STAGES[stage], *source, "--num_iterations=3", "--eval_every=2")
    call(*run, *flags, "--model_tag=whole")
    call(*run, *(flag for flag in flags if size not in flag), *way.split(), "--model_tag=cut")
    for line, one in zip(metrics(start, stage, "cut"), metrics(start, stage, "whole"), strict=True):
        assert line["tokens"] == one["tokens"]
        for name in ("loss", "val_bpb", "val_loss"):
            assert line.get(name, 0) == pytest.approx(one.get(name, 0), rel=1e-5)
    if size == "examples_per_step":
        # On another number of devices the same flags would be another batch: a resume compares the examples.
        config = meta_of(start, stage, 3, "cut")["config"]
        assert (config["target_examples_per_step"], config["gradient_accumulation_steps"]) == (8, None)


def test_accumulation_counts_replies_in_rl(start, capsys):  # noqa: F811
    """2 x 6 x 1 replies a step are 3 questions with 4 replies each, as in other trainers of GRPO."""
    flags = [flag for flag in (*RL, "--source=base", "--num_iterations=1") if "examples_per_step" not in flag]
    call("chat_rl", *flags, "--gradient_accumulation_steps=6")
    assert "1 step of 3 questions, 4 replies to each" in capsys.readouterr().out
    code, line = mistake(capsys, "chat_rl", *flags, "--gradient_accumulation_steps=2", "--minibatches=2")
    assert code == 1 and "--minibatches 2" in line and "--examples_per_step is 1" in line


def test_odd_conversations_are_counted_and_change_nothing(start, tmp_path):  # noqa: F811
    """Empty, masked and over-long replies beside good ones: the loss is that of the good ones only."""
    good = [chat(f"What is {n}?", f"It is {n}.") for n in range(8)]
    odd = [chat("Silent?", ""), chat("Masked?", "No.", train=False), chat("long " * 300, "Never reached.")]
    flags = (*CPU, "--source=base", "--source_tag=d1", "--device_batch_size=2", "--num_iterations=2", "--eval_every=1")
    for tag, rows in (("good", good), ("odd", good + odd)):
        tasks = f"--tasks={write_splits(tmp_path / tag, rows)}"
        call("chat_sft", *flags, tasks, f"--target_examples_per_step={len(rows)}", f"--model_tag={tag}")
    assert losses(start, "sft", "odd")[0] == pytest.approx(losses(start, "sft", "good")[0], rel=1e-5)
    assert [(line["no_target"], line["cut"]) for line in metrics(start, "sft", "odd")] == [(3, 1)] * 2
    assert [(line["no_target"], line["cut"]) for line in metrics(start, "sft", "good")] == [(0, 0)] * 2
    assert all(math.isfinite(line["val_loss"]) for line in metrics(start, "sft", "odd"))


# ---------------------------------------------------------------------- what a resume refuses


def test_resume_keeps_to_its_flags_and_its_source(start, capsys):  # noqa: F811
    call("chat_sft", *SFT, "--source=base", "--num_iterations=2")
    call("mid_train", *MID, "--num_iterations=1")
    for flags, words in (
        ("--num_iterations=1 --resume", "--num_iterations"),
        ("--learning_rate=1e-4 --resume", "adamw and muon, not adamw"),
        ("--num_epochs=1 --resume", "steps, not epochs"),
        ("--optimizer_dtype=bfloat16 --resume", "--optimizer_dtype float32"),
        ("--offload_optimizer", "--offload_optimizer"),
        ("--source=mid --num_iterations=4 --resume", "base/d1/step_000020, not mid/d1/step_000001"),
    ):
        refused(capsys, ("chat_sft", *SFT, "--source=base", *flags.split()), words)


@pytest.mark.slow
@pytest.mark.parametrize(("script", "flags"), [("chat_sft", SFT), ("mid_train", MID), ("chat_dpo", DPO)])
def test_resume_keeps_to_its_data(start, tmp_path, capsys, script, flags):  # noqa: F811
    """Other rows under the same name would come in another order: some twice, some never. A rejected reply that
    has changed is noticed in any row."""
    rows = [chat(f"{i}?", "no") for i in range(9)]
    others = rows[::-1]
    if script == "chat_dpo":
        rows = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no"} for i in range(40)]
        others = [rows[0], {**rows[1], "rejected": "never"}, *rows[2:]]
    path = tmp_path / "rows.jsonl"
    flags = (*flags, "--source=base", f"--tasks={write_lines(path, rows)}")
    call(script, *flags, "--num_iterations=1")
    write_lines(path, others)
    refused(capsys, (script, *flags, "--num_iterations=2", "--resume"), "--resume", "what --tasks names")
    write_lines(path, rows)
    call(script, *flags, "--num_iterations=2", "--resume")


@pytest.mark.parametrize(("script", "flags"), [("chat_dpo", DPO), ("chat_rl", (*RL, "--kl=0.1"))], ids=["dpo", "rl"])
def test_resume_keeps_to_its_reference(start, capsys, script, flags):  # noqa: F811
    """A source of the same name whose weights were trained anew is not what the run was measured against."""
    flags = (*flags, "--source=sft", "--source_tag=d1")
    call("chat_sft", *SFT, "--source=base", "--num_iterations=1")
    call(script, *flags, "--num_iterations=1")
    call("chat_sft", *SFT, "--source=base", "--num_iterations=1", "--seed=1")
    refused(capsys, (script, *flags, "--num_iterations=2", "--resume"), "--resume", "the reference's weights")
    call("chat_sft", *SFT, "--source=base", "--num_iterations=1")  # as before
    call(script, *flags, "--num_iterations=2", "--resume")


# ---------------------------------------------------------------------- compiled


@pytest.fixture
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    torch._inductor.config.cpp.vec_isa_ok = True  # as `compile_blocks` sets it
    yield
    torch.use_deterministic_algorithms(False)


def test_compiling_is_announced_once_and_its_seconds_are_counted(capsys):
    def compiler(graph: Any, inputs: Any) -> Any:
        time.sleep(0.1)
        return graph

    meter = Meter(Progress(), cpu_device())
    counted = []
    for size, clock in ((2, CompilerClock(meter)), (3, CompilerClock(meter)), (4, contextlib.nullcontext())):
        with clock:
            torch.compile(lambda x: x * 2, backend=compiler, dynamic=False)(torch.ones(size))
        counted.append(meter.compiling)
    assert counted[0] >= 0.1 and counted[1] >= counted[0] + 0.1 and counted[2] == counted[1]
    assert capsys.readouterr().out.count("compiling") == 2


def test_one_program_for_any_number_of_documents(compiler):
    class TakesBounds(WrittenKernels):
        def attention(self, *args: Any, segments: Segments, **options: Any) -> torch.Tensor:
            return super().attention(*args, segments=segments, **options) + 0 * segments.bounds.sum()

    model = lively_model(tiny_config(n_layer=1), kernels=TakesBounds())
    traced = torch.compile(Block.compute, backend="aot_eager", dynamic=False)
    tokens = torch.zeros(3, 20, dtype=torch.long)
    for length in (10, 5, 3):
        segments = Segments.from_numbers(torch.arange(20).expand(3, 20) // length)
        one = CompiledBlocks(model, traced, tokens.shape)(tokens, tokens, segments=segments)
        torch.testing.assert_close(one, model(tokens, tokens, segments=segments))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("inductor", torch.float32), pytest.param("aot_eager", torch.bfloat16, marks=pytest.mark.soak)],
)
def test_one_program_for_one_shape(compiler, backend, dtype):
    """A policy, as it learns and as it sampled, and its reference all run it; other shapes stay eager."""
    device = cpu_device(dtype=dtype)
    random = torch.Generator().manual_seed(0)
    ids = [torch.randint(100, (length,), generator=random).tolist() for length in (5, 17, 9, 12, 20, 8, 30, 25)]
    masks = [[0] + [1] * (len(one) - 1) for one in ids]
    (pair_batch,) = pair_batches(rendered_pairs(ids, masks), 32, 5, device)
    rows = pair_batch.rows
    config = tiny_config(n_layer=1)
    model, reference, eager = (lively_model(config, kernels=device.kernels) for _ in range(3))
    compute = torch.compile(Block.compute, backend=backend, dynamic=False)
    policy, frozen = (CompiledBlocks(one, compute, rows.inputs.shape) for one in (model, reference))
    reference.eval()  # as load_model leaves it
    with torch.no_grad():
        sampled = token_logp(policy, rows)
        of_reference = token_logp(frozen, rows)
    now = token_logp(policy, rows)
    assert now.requires_grad and not sampled.requires_grad
    assert torch.equal(now, sampled) and torch.equal(now, of_reference)
    few = next(rows.micro_batches(2, device))
    assert torch.equal(token_logp(policy, few), token_logp(eager, few))
    for logp in (now, token_logp(eager, rows)):
        logp.mean().backward()
    rtol, atol = (1e-4, 1e-6) if dtype == torch.float32 else (0.05, 0.02)
    for learned, plain in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(learned.grad, plain.grad, rtol=rtol, atol=atol)
    assert counters["stats"]["unique_graphs"] == 1


# ---------------------------------------------------------------------- rewards


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["reinforce", "rloo", "grpo", "dr_grpo", "dapo", "gspo", "cispo"])
def test_reinforcement_raises_a_reward(start, monkeypatch, loss):  # noqa: F811
    """Rewarded for answers with an `a` in them, the model says `a` more often; every loss does it."""

    def reward(self: Addition, example: Example, reply: Sequence[Part]) -> float:
        return float("a" in text_of(reply))

    monkeypatch.setattr(Addition, "reward", reward)
    monkeypatch.setattr("scripts.chat_rl.TABLE_LR_SCALE", 1.0)  # a tiny model learns with its tables
    flags = (*RL, "--source=base", "--source_tag=d1", "--num_iterations=6", "--lr_scale=0.5", f"--loss={loss}")
    call("chat_rl", *flags, "--num_samples=16", "--eval_every=0", "--max_tokens=6")
    lines = metrics(start, "rl")
    assert lines[0]["reward"] < 0.6
    assert sum(line["reward"] for line in lines[-3:]) / 3 > lines[0]["reward"] + 0.15


@pytest.mark.slow
def test_a_student_comes_nearer_to_its_teacher(start, capsys):  # noqa: F811
    """On chats that nobody grades; the teacher has learned for longer."""
    flags = (*RL, "--source=base", "--source_tag=d1", "--tasks=identity")
    call("chat_sft", *SFT, "--source=base", "--tasks=identity", "--num_iterations=20")
    call("chat_rl", *flags, "--loss=distill", "--teacher=sft", "--num_iterations=24", "--num_samples=16")
    kl = [line["kl"] for line in metrics(start, "rl")]
    assert sum(kl[-3:]) < 0.7 * sum(kl[:3])
    assert f"KL to the teacher {kl[-1]:.3f} nats" in capsys.readouterr().out


def test_questions_that_do_not_fit_are_left_out(start, tmp_path, capsys):  # noqa: F811
    long = {"question": "word " * 400, "answer": "#### 1"}
    tasks = f"--tasks=gsm8k={write_splits(tmp_path, [long, {'question': '1?', 'answer': '#### 1'}])}"
    call("chat_rl", *RL, "--source=base", tasks, "--examples_per_step=1", "--num_iterations=4")
    assert {0.0} < {line["response_tokens"] for line in metrics(start, "rl")}  # of two questions one never fits
    write_lines(tmp_path / "train.jsonl", [long])
    refused(capsys, ("chat_rl", *RL, "--source=base", tasks), " 128 ")


# ---------------------------------------------------------------------- preferences


def pairs_file(folder: Path, count: int, odd: Sequence[dict] = ()) -> Path:
    """A number is followed by a word that its parity says; the other word is the worse reply."""
    words = ("That is an even one.", "This number is odd.")
    for split, first in (("train", 0), ("test", 1000)):
        rows = [
            {"prompt": f"What is {n}?", "chosen": words[n % 2], "rejected": words[1 - n % 2]}
            for n in range(first, first + count)
        ]
        write_lines(folder / f"{split}.jsonl", [*rows, *odd])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dpo", "simpo"])
def test_held_out_pairs_are_told_apart(start, tmp_path, loss):  # noqa: F811
    tasks = f"--tasks={pairs_file(tmp_path / 'pairs', 300)}"
    flags = (*CPU, "--source=base", tasks, "--device_batch_size=8", "--target_examples_per_step=16", "--lr_scale=0.5")
    call("chat_dpo", *flags, "--num_iterations=40", "--eval_every=20", "--eval_examples=32", f"--loss={loss}")
    lines = metrics(start, "dpo")
    assert (lines[0]["accuracy"] == 0.5) == (loss != "simpo")  # under a reference both replies are as before
    found = [line["val_accuracy"] for line in lines if "val_accuracy" in line]
    assert found[-1] > 0.8, found
    assert lines[-1]["val_chosen_reward"] > lines[-1]["val_rejected_reward"]
    assert lines[-1]["val_loss"] < lines[0]["loss"]


def test_pairs_with_nothing_to_prefer_are_left_out(start, tmp_path):  # noqa: F811
    """Odd pairs next to good ones change no loss. They are counted: the first two when the file is opened, the long one
    in each step."""
    odd = [
        {"prompt": "Silent?", "chosen": "", "rejected": "No."},
        {"prompt": "The same?", "chosen": "Yes.", "rejected": "Yes."},
        {"prompt": "long " * 300, "chosen": "Never", "rejected": "reached."},
    ]
    flags = (*CPU, "--source=base", "--source_tag=d1", "--device_batch_size=2", "--num_iterations=3", "--eval_every=1")
    for tag, rows in (("good", []), ("odd", odd)):
        tasks = f"--tasks={pairs_file(tmp_path / tag, 6, rows)}"
        call("chat_dpo", *flags, tasks, f"--target_examples_per_step={6 + bool(rows)}", f"--model_tag={tag}")
    for name in ("loss", "val_loss", "tokens"):
        good, odd_ones = ([line[name] for line in metrics(start, "dpo", tag)] for tag in ("good", "odd"))
        assert odd_ones == pytest.approx(good, rel=1e-4), name
    assert [line["left_out"] for line in metrics(start, "dpo", "odd")] == [1, 2, 3]
