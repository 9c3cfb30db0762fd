"""Mid-training, SFT, DPO and RL: exact resumes, equal losses at any world size, odd conversations, rewards that rise.

The helpers are test_scripts'; most tests run a script's `main` in this process.
"""

import functools
import gc
import json
import math
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import call, exactly_resumed, forget_after, lasting, losses, metrics, mistake, process, refused, sha256
from safetensors.torch import load_file
from test_scripts import base  # noqa: F401 (base is a fixture)
from tiny import cpu_device, lively_model, rendered_pairs, run_command, save_checkpoint, tiny_config, tiny_tokenizer
from torch._dynamo.utils import counters

from nanochat import rollout, scaling
from nanochat.alignment.pair_losses import dpo_loss
from nanochat.alignment.reply_pairs import pair_batches, with_reference
from nanochat.attention import Segments
from nanochat.checkpoint_manager import load_model
from nanochat.conversation import Part, text_of
from nanochat.cross_entropy import IGNORE
from nanochat.demo.arithmetic import Addition
from nanochat.gpt import Block
from nanochat.ground import paths
from nanochat.kernels.compiling import CompiledBlocks, CompilerClock
from nanochat.kernels.gradients import WrittenKernels
from nanochat.losses import GRPO, PolicyBatch, policy_loss, token_logp
from nanochat.mixture import FAR_DRAW, Mixture
from nanochat.run import stage as stages
from nanochat.run.loop import Run
from nanochat.run.progress import Meter, Progress
from nanochat.run.run_log import REQUIRED
from nanochat.run.stop import Stop
from nanochat.task import Example, Task
from nanochat.tasks.flag import EpochMixture
from nanochat.tokenizer import Tokenizer
from nanochat.train import make_optimizer, train_step

CPU = ("--device=cpu", "--dtype=float32", "--log_every=1")
BASE = (
    *(*CPU, "--depth=1", "--head_dim=32", "--max_seq_len=128", "--device_batch_size=2", "--total_batch_size=512"),
    *("--eval_tokens=256", "--compile=off"),
)
SHORT = "addition,identity,spelling"
MID = (*CPU, f"--tasks={SHORT}", "--device_batch_size=2", "--total_batch_size=512", "--eval_tokens=512")
SFT = (*CPU, f"--tasks={SHORT}", "--device_batch_size=2", "--target_examples_per_step=8", "--eval_examples=8")
DPO = (
    *(*CPU, f"--tasks={SHORT}", "--device_batch_size=2", "--target_examples_per_step=8", "--eval_examples=8"),
    *("--lr_scale=0.2", "--beta=0.3"),
)
FOUR_MICRO_BATCHES = "--gradient_accumulation_steps=4"
RM = (*(flag for flag in DPO if "beta" not in flag), "--loss=reward")
RL = (
    *(*CPU, "--tasks=addition", "--device_batch_size=2", "--examples_per_step=3", "--num_samples=4"),
    *("--max_tokens=12", "--eval_examples=8", "--lr_scale=0.2"),
)


FOLDERS: dict[str, Path] = {}  # of the next two, once for all modules: to pytest each has fixtures of its own


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> Path:
    """A base folder with a tokenizer and twenty steps of pretraining."""
    if "pretrained" in FOLDERS:
        return FOLDERS["pretrained"]
    folder = tmp_path_factory.mktemp("pretrained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(folder))
        torch.set_num_threads(1)
        texts = [f"What is {n} + {m}? The word is spelled {n * m}. I am nanochat." for n in range(60) for m in range(9)]
        Tokenizer.train(texts, 400).save(folder / "tokenizer")
        call("base_train", *BASE, "--num_iterations=20")
    FOLDERS["pretrained"] = folder
    return folder


@pytest.fixture
def start(pretrained, base) -> Path:  # noqa: F811
    shutil.copytree(pretrained, base)
    return base


@pytest.fixture(scope="module")
def tutored(pretrained, tmp_path_factory) -> Path:
    """The same behind a few steps of SFT: about half of its answers to the questions in `questions` are right."""
    if "tutored" in FOLDERS:
        return FOLDERS["tutored"]
    folder = tmp_path_factory.mktemp("tutored") / "base"
    shutil.copytree(pretrained, folder)
    rows = [{"question": f"What is {n}?", "answer": f"#### {n % 2 + 1}"} for n in range(64)]
    (folder / "questions").mkdir()
    for split in ("train", "test"):
        (folder / f"questions/{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(folder))
        sizes = ("--device_batch_size=4", "--target_examples_per_step=16", "--num_iterations=12", "--eval_examples=8")
        call("chat_sft", *CPU, *sizes, "--source=base", f"--tasks=gsm8k={folder / 'questions'}", "--lr_scale=2")
    FOLDERS["tutored"] = folder
    return folder


@pytest.fixture
def taught(tutored, base) -> Path:  # noqa: F811
    shutil.copytree(tutored, base)
    return base


def graded(base: Path) -> tuple[str, ...]:  # noqa: F811
    """RL on questions whose replies are not all worth the same."""
    return (
        *(*RL, f"--tasks=gsm8k={base / 'questions'}", "--source=sft", "--source_tag=d1"),
        *("--kl=0.1", "--kl_in=reward", "--importance_cap=2", "--updates_per_step=2"),
    )


@pytest.mark.parametrize("stage", ["sft", "dpo", "rl"])
def test_a_file_that_changes_under_a_run_ends_it_with_a_checkpoint(start, tmp_path, capsys, monkeypatch, stage):
    folder = tmp_path / "examples"
    if stage == "dpo":
        pairs_file(folder, 60)
    else:
        folder.mkdir()
        rows = [{"question": f"What is {n}?", "answer": f"#### {n}"} for n in range(60)]
        for split in ("train", "test"):
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "train.jsonl"
    steps = 0

    def noted(*arguments: Any, **options: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:
            path.write_bytes(bytes(path.stat().st_size))
        return train_step(*arguments, **options)

    monkeypatch.setattr("nanochat.train.train_step", noted)
    flags = {"sft": SFT, "dpo": DPO, "rl": RL}[stage]
    tasks = f"--tasks={folder if stage == 'dpo' else f'gsm8k={folder}'}"
    code, err = mistake(capsys, f"chat_{stage}", *flags, "--source=base", tasks, "--num_iterations=9")
    saved = start / f"checkpoints/{stage}/d1/step_000003"
    assert code == 1 and f"{path} has changed since it was opened" in err
    assert f"; saved {saved}, --resume continues" in err and (saved / "meta.json").is_file()


# ---------------------------------------------------------------------- before a run


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("base_train", BASE),
        ("mid_train", MID),
        ("chat_sft", (*SFT, "--source=base", "--lora_rank=2")),
        ("chat_dpo", (*RM, "--source=base")),
        ("chat_dpo", (*DPO, "--source=base")),
        ("chat_rl", (*RL, "--source=base", "--kl=0.1", "--minibatches=2")),
    ],
)
def test_a_dry_run_prints_the_memory_and_writes_nothing(start, capsys, script, flags):
    before = sorted(start.rglob("*"))
    call(script, *flags, "--dry_run")
    assert sorted(start.rglob("*")) == before
    lines = [line for line in capsys.readouterr().out.splitlines() if line.endswith(" MiB")]
    sizes = {line[2:34].strip(): float(line[34:].split()[0].replace(",", "")) for line in lines}
    weights = (start / "checkpoints/base/d1/step_000020/model.safetensors").stat().st_size / 2**20
    assert sizes["parameters"] == pytest.approx(weights, abs=0.2)  # and the rotary tables, or adapters
    if script == "chat_sft":
        assert sizes["gradients"] < 0.2 * weights
    else:
        assert sizes["gradients"] == pytest.approx(weights, abs=0.06)
    most = next(size for name, size in sizes.items() if name.startswith("most at once"))
    assert sizes["parameters"] + sizes["optimizer state"] + sizes["activations"] < most


# ---------------------------------------------------------------------- the chain


@pytest.mark.slow
def test_a_base_model_becomes_a_chat_model(start, capsys):
    call("mid_train", *MID, "--num_iterations=8", "--eval_every=4")
    call("chat_sft", *SFT, "--num_iterations=8", "--eval_every=4")
    call("chat_dpo", *DPO, "--num_iterations=4", "--eval_every=2")
    call("chat_rl", *RL, "--num_iterations=2", "--eval_every=1", "--source=dpo")
    out = capsys.readouterr().out
    assert "held-out reward" in out and "a question and a reply, reward" in out
    keys = (("mid", "val_bpb", 8), ("sft", "val_loss", 8), ("dpo", "val_accuracy", 4), ("rl", "eval_reward", 2))
    for stage, key, steps in keys:
        lines = metrics(start, stage)
        assert [line["step"] for line in lines] == list(range(steps))
        assert all(set(REQUIRED) <= set(line) and math.isfinite(line["loss"]) for line in lines)
        assert f"{key}_before" in lines[0] and f"{key}_before" not in lines[1]
        assert key in lines[-1] and (start / "checkpoints" / stage / "d1" / f"step_{steps:06d}").is_dir()
        assert [line["tokens"] for line in lines] == sorted(line["tokens"] for line in lines)
    assert losses(start, "sft")[-1] < losses(start, "sft")[0]
    assert all(0.5 < line["real_tokens"] <= 1 for line in metrics(start, "sft"))
    assert metrics(start, "mid")[-1]["val_bpb"] < metrics(start, "mid")[3]["val_bpb"]
    named = {"reward", "response_tokens", "pass_at_k", "no_signal", "truncated", "entropy", "sampler_gap", "clipped"}
    assert all({*named, "sampling_seconds", "training_seconds"} <= set(line) for line in metrics(start, "rl"))
    assert max(line["sampler_gap"] for line in metrics(start, "rl")) < 1e-5
    pairs = {"accuracy", "margin", "chosen_reward", "rejected_reward", "left_out"}
    assert all(pairs <= set(line) for line in metrics(start, "dpo"))
    assert losses(start, "dpo")[0] == pytest.approx(math.log(2)) and metrics(start, "dpo")[0]["accuracy"] == 0.5
    commands = [json.loads(line) for line in (start / "runs/commands.jsonl").read_text().splitlines()]
    assert [c["stage"] for c in commands] == ["base", "mid", "sft", "dpo", "rl"]
    assert all(c["tag"] == "d1" and c["seconds"] > 0 and c["kind"] == "cpu" for c in commands)
    # What a server reads of a checkpoint: how to draw its replies, and all that it has learned on the way.
    for stage in ("base", "mid", "sft", "dpo", "rl"):
        *_, meta = load_model(stage, "cpu")
        assert meta["tasks"] == ([] if stage == "base" else SHORT.split(","))
        assert (meta["sampling"]["temperature"], meta["sampling"]["min_p"]) == (0.8, 0.05)


def test_sft_continues_where_mid_training_stopped(start, monkeypatch):
    drawn: dict[str, list[int]] = {}
    original = Mixture.draw

    def recorded(stage: str) -> None:
        def draw(mixture: Mixture, index: int) -> tuple[Task, int]:
            if mixture.tasks[0].split == "train" and 0 <= index < FAR_DRAW:  # the others are what came before one
                drawn.setdefault(stage, []).append(index)
            return original(mixture, index)

        monkeypatch.setattr(Mixture, "draw", draw)

    recorded("mid")
    call("mid_train", *MID, "--num_iterations=8")
    recorded("sft")
    call("chat_sft", *SFT, "--num_iterations=4")
    recorded("again")
    call("chat_sft", *SFT, "--num_iterations=4", "--source=sft", "--source_tag=d1", "--model_tag=again")
    first = min(drawn["sft"])
    saved = json.loads((start / "checkpoints/mid/d1/step_000008/meta.json").read_text())
    assert first == saved["pretraining"]["conversations"] and 0 < first < 10 * len(drawn["mid"])
    assert not set(drawn["mid"][: len(drawn["mid"]) // 2]) & set(drawn["sft"])
    assert set(drawn["sft"]) == set(range(first, first + 32)) and min(drawn["again"]) == first + 32


def tuned(flags: Sequence[str]) -> tuple[str, ...]:
    """The flags with AdamW at a rate of its own, clipped gradients and a rounded state."""
    others = (flag for flag in flags if "lr_scale" not in flag)
    return (*others, "--learning_rate=1e-3", "--weight_decay=0.1", "--max_grad_norm=0.3", "--optimizer_dtype=bfloat16")


@pytest.mark.parametrize(("script", "stage", "flags"), [("chat_sft", "sft", SFT), ("chat_dpo", "dpo", DPO)])
def test_epochs_have_every_example_once_and_resume_exactly(start, tmp_path, monkeypatch, script, stage, flags):
    """Of 23 rows 6 are held out; an epoch of 17 has four steps of 4, and one of 1."""
    file = tmp_path / "mine.jsonl"
    if stage == "sft":
        rows = [{"instruction": f"What is {n}?", "output": f"It is {n}."} for n in range(23)]
    else:
        rows = [{"prompt": f"What is {n}?", "chosen": f"It is {n}.", "rejected": "No."} for n in range(23)]
    file.write_text("\n".join(map(json.dumps, rows)))
    drawn = []
    draw = EpochMixture.draw

    def recorded(mixture: EpochMixture, index: int) -> Any:
        if index < FAR_DRAW:  # beyond are the chats that generated examples follow
            drawn.append(draw(mixture, index)[1])
        return draw(mixture, index)

    monkeypatch.setattr(EpochMixture, "draw", recorded)
    flags = (*tuned(flags), "--source=base", f"--tasks={file}", "--target_examples_per_step=4", "--val_share=0.25")
    flags = (*flags, "--lr_schedule=cosine", "--warmup_ratio=0.2", "--save_every=1", "--eval_every=5")
    exactly_resumed(start, script, stage, (*flags, "--num_epochs=2"), 10, (4, 5))
    begun = 4 + (stage == "sft")  # the opening measures how long a step is, and SFT looks first whether it can learn
    first, second = drawn[begun : begun + 17], drawn[begun + 17 : begun + 34]
    assert sorted(first) == sorted(second) == list(range(17)) and first != second
    lines = metrics(start, stage)
    assert [line["lr"] for line in lines[:3]] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3])
    assert lines[6]["lr"] == pytest.approx(1e-3 * (0.05 + 0.95 / 2)) and "val_loss" in lines[4]
    assert lines[-1]["loss"] < lines[0]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "stage", "flags", "extra"),
    [
        ("chat_dpo", "rm", RM, ""),
        ("chat_rl", "rl", RL, "--loss=grpo --kl=0.1 --updates_per_step=2"),
        ("chat_rl", "rl", tuned(RL), "--loss=dapo --refills=1"),
        ("chat_rl", "rl", RL, "--loss=reinforce++ --kl=0.1 --kl_in=reward --minibatches=2 --importance_cap=2"),
        ("chat_rl", "rl", RL, "--loss=distill --teacher=base --tasks=identity"),
    ],
    ids=["reward", "grpo", "dapo", "reinforce++", "distill"],
)
def test_other_losses_resume_exactly(start, script, stage, flags, extra):
    steps = 8 if stage == "rm" else 4
    flags = (*flags, *extra.split(), "--source=base", f"--num_iterations={steps}", f"--eval_every={steps // 2}")
    exactly_resumed(start, script, stage, (*flags, f"--save_every={steps // 4}"), steps)
    assert stage == "rm" or ("kl" in metrics(start, "rl")[-1]) == ("dapo" not in extra)


@pytest.fixture
def compiler(monkeypatch, request) -> Iterator[None]:
    """The compiler begins anew whenever a run starts, as in a process of its own. Unless a test names a backend, only
    the traced operators run: each program in C++ takes seconds."""
    compile_ = torch.compile

    def anew(*args: Any, **options: Any) -> Any:
        torch._dynamo.reset()
        return compile_(*args, **{"backend": getattr(request, "param", "aot_eager"), **options})

    monkeypatch.setattr(torch, "compile", anew)
    counters.clear()
    yield
    torch.use_deterministic_algorithms(False)


REWARDS = """
import pathlib
STEPS = pathlib.Path(__file__).with_name("steps")

def letters(episodes):
    return [sum(c in e.fields["wanted"] for c in e.reply) / 10 for e in episodes]

async def short(episodes):
    calls = int(STEPS.read_text())
    STEPS.write_text(str(calls + 1))
    return [0.01 * e.tokens / (calls != 4) for e in episodes]
"""


@pytest.mark.slow
def test_a_reward_that_fails_costs_nothing(start, tmp_path, capsys):
    """On questions without answers. The fifth call divides by 0: the run saves, and a resumed one ends as if nothing
    had happened."""
    rows = [{"prompt": f"What is {n}?", "wanted": "aeiou"} for n in range(20)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "mine.py").write_text(REWARDS)
    flags = [*RL, f"--tasks={tmp_path / 'prompts.jsonl'}", "--source=base", "--source_tag=d1", "--eval_every=0"]
    flags += ["--num_iterations=3", f"--reward={tmp_path}/mine.py:letters,{tmp_path}/mine.py:short:-0.5"]
    # Calls: the trial, the first evaluation, three steps, the last evaluation.
    (tmp_path / "steps").write_text("100")
    call("chat_rl", *flags, "--model_tag=straight")
    lines = metrics(start, "rl", "straight")
    assert len(lines) == 3 and any(line["grad_norm"] > 0 for line in lines)
    (tmp_path / "steps").write_text("0")
    with pytest.raises(SystemExit) as leaving:
        call("chat_rl", *flags)
    error = capsys.readouterr().err.splitlines()[-1]
    assert leaving.value.code == 1 and "--reward short fails: mine.py:" in error and "`return [0.01" in error
    assert "step_000002, --resume continues" in error and sha256(start, "rl", 2)
    (tmp_path / "steps").write_text("103")
    call("chat_rl", *flags, "--resume")
    assert sha256(start, "rl", 3) == sha256(start, "rl", 3, "straight")
    (tmp_path / "mine.py").write_text(REWARDS.replace("aeiou", "xyz") + "#")
    assert "mine.py" in mistake(capsys, "chat_rl", *flags, "--resume")[1]


def warnings_of(capsys: pytest.CaptureFixture) -> tuple[list[str], str]:
    """The warnings about what a run has lost, and its last line."""
    captured = capsys.readouterr()
    lost = [line for line in captured.err.splitlines() if re.search("worse than the|had no gradient", line)]
    assert all(line.startswith("warning: after ") for line in lost)
    return lost, captured.out.splitlines()[-1]


@pytest.mark.parametrize("lr_scale", ["0.2", "100"])
def test_a_run_that_makes_the_model_worse_says_so(start, capsys, lr_scale):
    """At each evaluation and once at the end, also when it resumes; a run that learns says nothing."""
    flags = (*SFT, "--source=base", "--num_iterations=6", "--eval_every=2", "--save_every=4", f"--lr_scale={lr_scale}")
    call("chat_sft", *flags)
    lost, last = warnings_of(capsys)
    ((before, after),) = [map(float, pair) for pair in re.findall(r"val_loss (\S+) -> (\S+)$", last)]
    assert after == pytest.approx(metrics(start, "sft")[-1]["val_loss"], abs=1e-4)
    if lr_scale == "0.2":
        assert not lost and after < before
        return
    assert re.findall(r"after (\d) steps", " ".join(lost)) == ["2", "4", "6"]
    assert f"val_loss is {after:.4f}, worse than the {before:.4f} before the first step" in lost[-1]
    forget_after(start, "sft", 4)
    call("chat_sft", *flags, "--resume")
    assert warnings_of(capsys) == (lost[2:], last)


def test_a_run_without_gradients_says_so(start, capsys):
    """A rate that makes every logit infinite for the softmax: no loss is NaN, and no step changes anything."""
    call("base_train", *BASE, "--num_iterations=30", "--eval_every=15", "--matrix_lr=100", "--model_tag=lost")
    lost, last = warnings_of(capsys)
    assert [re.search(r"the last (\d\d) steps had no gradient", line) is not None for line in lost] == [True] * 2
    # The untrained model of the first evaluation counts, too.
    lines = metrics(start, "base", "lost")
    values = [line[name] for line in lines for name in ("val_bpb_before", "val_bpb") if name in line]
    assert len(values) == 3 and last.endswith(f"best validation {min(values):.4f} bits per byte, last {values[-1]:.4f}")


def spoiled(base: Path, value: float) -> Path:  # noqa: F811
    """The pretrained model with one weight that is not finite; its checkpoint is whole."""
    model, tokenizer, _ = load_model("base", "cpu")
    with torch.no_grad():
        model.get_parameter("blocks.0.mlp.input.weight")[3, 2] = value
    return save_checkpoint(base / "checkpoints/base/spoiled", 1, model, tokenizer, {"stage": "base"})


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("script", "flags", "flag"),
    [
        ("chat_sft", SFT, "--source"),
        ("mid_train", MID, "--source"),
        ("chat_dpo", DPO, "--source"),
        ("chat_rl", (*RL, "--source=base", "--source_tag=d1", "--loss=distill"), "--teacher"),
    ],
)
def test_a_source_that_is_not_finite_is_named_before_the_first_step(start, capsys, value, script, flags, flag):
    folder = spoiled(start, value)
    code, error = mistake(capsys, script, *flags, f"{flag}={folder}")
    assert code == 1 and f"{flag} {folder}: weights are NaN or infinite (blocks.0.mlp.input.weight; 1 of" in error
    assert not list(start.glob("runs/*/spoiled"))
    if value == math.inf:  # finite, and too large
        shutil.rmtree(folder.parent)
        refused(capsys, (script, *flags, f"{flag}={spoiled(start, 3e38)}"), "computes NaN or infinite numbers")


@pytest.mark.slow
@pytest.mark.parametrize(("script", "stage"), [("chat_sft", "sft"), ("chat_dpo", "dpo"), ("chat_rl", "rl")])
def test_compiled_stages_resume_exactly(taught, compiler, script, stage):
    flags = (*flags_of(stage, taught), "--model_tag=d1", "--num_iterations=4", "--save_every=1", "--eval_every=2")
    if stage == "rl":
        flags = (*flags, "--examples_per_step=8", "--device_batch_size=1")  # full rows
    call(script, *flags, "--compile=off", "--model_tag=eager")
    exactly_resumed(taught, script, stage, (*flags, "--compile=on"), 4, (2,))  # a start compiles for seconds
    compiled = losses(taught, stage)
    eager = losses(taught, stage, "eager")
    assert compiled[0] == eager[0]
    assert compiled[1] == pytest.approx(eager[1], rel=1e-4, abs=1e-6)
    assert counters["stats"]["unique_graphs"] >= 1  # something was compiled


def test_compiling_is_announced_once_and_its_seconds_are_counted(capsys):
    def compiler(graph: Any, inputs: Any) -> Any:
        time.sleep(0.2)
        return graph

    def program(size: int) -> None:
        torch.compile(lambda x: x * 2, backend=compiler, dynamic=False)(torch.ones(size))

    meter = Meter(Progress(), cpu_device())
    with CompilerClock(meter):
        program(2)
        first = meter.compiling
        assert first >= 0.2
        program(3)
    counted = meter.compiling
    assert counted >= first + 0.2
    program(4)  # the run is over
    assert meter.compiling == counted
    assert capsys.readouterr().out == "compiling, about 25s, once\n"


def test_what_is_loaded_is_not_searched_for_garbage():
    meter = SimpleNamespace(restart=lambda: None)
    stop = SimpleNamespace(boundary=lambda step: False)
    run: Any = SimpleNamespace(
        meter=meter, stop=stop, stopped=False, attendants=[], progress=Progress(step=7), first_step=7
    )
    frozen = []
    made = []
    for _ in Run.steps(run):
        frozen.append(gc.get_freeze_count())
        if len(frozen) == 6:
            break
        made.append([[] for _ in range(1000)])
        run.progress.step += 1
    gc.unfreeze()
    assert frozen[0] == frozen[1] == frozen[2]
    assert frozen[3] > frozen[0] + 3000 and frozen[4] == frozen[5] == frozen[3]  # three steps after the resumed one


def test_one_program_for_any_number_of_documents():
    class TakesBounds(WrittenKernels):
        def attention(self, *args: Any, segments: Segments, **options: Any) -> torch.Tensor:
            return super().attention(*args, segments=segments, **options) + 0 * segments.bounds.sum()

    model = lively_model(tiny_config(n_layer=1), kernels=TakesBounds())
    traced = torch.compile(Block.compute, backend="aot_eager", dynamic=False)
    counters.clear()
    tokens = torch.zeros(3, 20, dtype=torch.long)
    for length in (10, 5, 4, 3):
        segments = Segments.from_numbers(torch.arange(20).expand(3, 20) // length)
        one = CompiledBlocks(model, traced, tokens.shape)(tokens, tokens, segments=segments)
        torch.testing.assert_close(one, model(tokens, tokens, segments=segments))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiler", "dtype"), [("inductor", torch.float32), ("aot_eager", torch.bfloat16)], indirect=["compiler"]
)
def test_one_program_for_one_shape(compiler, dtype):
    """A policy, as it learns and as it sampled, and its reference all run it; other shapes stay eager."""
    device = cpu_device(dtype=dtype)
    random = torch.Generator().manual_seed(0)
    ids = [torch.randint(100, (length,), generator=random).tolist() for length in (5, 17, 9, 12, 20, 8, 30, 25)]
    masks = [[0] + [1] * (len(one) - 1) for one in ids]
    (pair_batch,) = pair_batches(rendered_pairs(ids, masks), 32, 5, device)
    rows = pair_batch.rows
    config = tiny_config(n_layer=1)
    model, reference, eager = (lively_model(config, kernels=device.kernels) for _ in range(3))
    compute = torch.compile(Block.compute, dynamic=False)
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

    # Steps of both losses. A reference like the policy gives ln 2 to the last bit.
    pair_batch = with_reference(pair_batch, frozen)
    advantages = torch.where(rows.source % 2 == 0, 1.0, -0.5) * (rows.targets != IGNORE)
    policy_batch = PolicyBatch(rows, advantages, (rows.targets != IGNORE).float() / 10, sampled)
    rates = scaling.rates(model.config, batch=1, tokens=1)
    grpo_loss = functools.partial(policy_loss, method=GRPO, max_tokens=32)
    near = {"rel": 1e-5, "abs": 1e-6} if dtype == torch.float32 else {"rel": 0.05, "abs": 0.02}
    steps = {"compiled": [], "eager": []}
    for name, run, weights in (("compiled", policy, model), ("eager", eager, eager)):
        optimizer = make_optimizer(weights, rates, device)
        for loss_fn, batch in ((dpo_loss, pair_batch), (grpo_loss, policy_batch), (dpo_loss, pair_batch)):
            stats = train_step(run, optimizer, [batch], loss_fn, device=device, lr=0.1)
            steps[name] += [stats.loss.item(), stats.grad_norm.item()]
    assert steps["compiled"] == pytest.approx(steps["eager"], **near)
    assert steps["compiled"][0] == torch.tensor(2.0).log().item()
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["mid", "sft", "dpo", "rl"])
def test_twenty_ten_and_ten_steps_are_forty(taught, stage):
    flags = flags_of(stage, taught)
    if stage == "mid":
        flags = (*flags, "--optimizer_dtype=bfloat16")
    script = paths.STAGES[stage]
    flags = (*flags, "--model_tag=d1", "--num_iterations=40", "--save_every=10", "--eval_every=15", "--seed=5")
    exactly_resumed(taught, script, stage, flags, 40, (20, 30))


def test_the_same_seed_gives_the_same_reinforcement(start, capsys):
    replies = {}
    for tag, seed in (("one", 0), ("two", 0), ("three", 1)):
        flags = ("--source=base", "--source_tag=d1", f"--model_tag={tag}", "--num_iterations=3", f"--seed={seed}")
        call("chat_rl", *RL, *flags)
        replies[tag] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("a question")]
    assert sha256(start, "rl", 3, "one") == sha256(start, "rl", 3, "two")
    assert replies["one"] == replies["two"] != replies["three"]


@pytest.mark.parametrize(
    ("stage", "flags", "ways"),
    [
        ("base", BASE, ["--device_batch_size=4", f"{FOUR_MICRO_BATCHES} --device_batch_size=1"]),
        ("mid", MID, [f"{FOUR_MICRO_BATCHES} --device_batch_size=1 --dataloader_num_workers=0"]),
        ("sft", SFT, ["--device_batch_size=7"]),
    ],
)
def test_micro_batches_add_up_to_the_batch(start, stage, flags, ways):
    """However a batch is cut up. The number of micro-batches takes the place of the batch's size."""
    source = () if stage == "base" else ("--source=base", "--source_tag=d1")
    run = (paths.STAGES[stage], *source, "--num_iterations=4", "--eval_every=2")
    call(*run, *flags, "--model_tag=whole")
    for way in ways:
        kept = [flag for flag in flags if "total_batch_size" not in flag or FOUR_MICRO_BATCHES not in way]
        call(*run, *kept, *way.split(), "--model_tag=cut")
        for line, one in zip(metrics(start, stage, "cut"), metrics(start, stage, "whole"), strict=True):
            assert line["tokens"] == one["tokens"]
            for name in ("loss", "val_bpb", "val_loss"):
                assert line.get(name, 0) == pytest.approx(one.get(name, 0), rel=1e-5)


# ---------------------------------------------------------------------- conversations of one's own


def conversation(question: str, answer: str, **more: bool) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}]}


def test_odd_conversations_are_counted_and_change_nothing(start, tmp_path):
    """Empty, masked and over-long replies beside good ones: the loss is that of the good ones alone."""
    good = [conversation(f"What is {n}?", f"It is {n}.") for n in range(8)]
    odd = [
        conversation("Silent?", ""),
        conversation("Masked?", "No.", train=False),
        conversation("long " * 300, "Never reached."),
    ]
    good_file, odd_file = tmp_path / "good", tmp_path / "odd"
    for folder, rows in ((good_file, good), (odd_file, good + odd)):
        folder.mkdir()
        for split in ("train", "test"):
            (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = (*CPU, "--source=base", "--source_tag=d1", "--device_batch_size=2", "--num_iterations=3", "--eval_every=1")
    call("chat_sft", *flags, f"--tasks={good_file}", "--target_examples_per_step=8", "--model_tag=good")
    call("chat_sft", *flags, f"--tasks={odd_file}", "--target_examples_per_step=11", "--model_tag=odd")
    assert losses(start, "sft", "odd")[0] == pytest.approx(losses(start, "sft", "good")[0], rel=1e-5)
    assert [(line["no_target"], line["cut"]) for line in metrics(start, "sft", "odd")] == [(3, 1)] * 3
    assert [(line["no_target"], line["cut"]) for line in metrics(start, "sft", "good")] == [(0, 0)] * 3
    assert all(math.isfinite(line["val_loss"]) for line in metrics(start, "sft", "odd"))


@pytest.mark.slow
def test_odd_conversations_are_counted_over_a_resume(start, tmp_path, monkeypatch):
    """Stopped between two log lines, the next line counts what was there before."""
    rows = [conversation(f"What is {n}?", f"It is {n}.", **({} if n % 3 else {"train": False})) for n in range(40)]
    file = tmp_path / "odd.jsonl"
    file.write_text("\n".join(map(json.dumps, [*rows, conversation("long " * 300, "Never reached.")])))
    flags = (*CPU, "--source=base", "--source_tag=d1", f"--tasks={file}", "--target_examples_per_step=4")
    flags = (*flags, "--device_batch_size=2", "--num_iterations=12", "--log_every=5", "--eval_examples=4")
    call("chat_sft", *flags, "--model_tag=straight")
    for stops in ((3, 8), (6, 10)):  # between lines, and behind one
        shutil.rmtree(start / "checkpoints/sft/run", ignore_errors=True)
        for stop in stops:
            with monkeypatch.context() as patch, pytest.raises(SystemExit):
                patch.setattr(Stop, "boundary", lambda self, step, stop=stop: step == stop)
                call("chat_sft", *flags, "--model_tag=run", "--resume")
        call("chat_sft", *flags, "--model_tag=run", "--resume")
        assert lasting(start, "sft", "run") == lasting(start, "sft", "straight")
    assert sum(line["no_target"] for line in metrics(start, "sft", "straight")) > 10


def test_a_batch_without_any_target_changes_no_weight(start, tmp_path, capsys):
    file = tmp_path / "masked.jsonl"
    # One of 40 is learned, and it comes after two steps: without any the run would not begin.
    file.write_text("\n".join(json.dumps(conversation(f"q{n}", "a", train=n == 0)) for n in range(40)))
    call("chat_sft", *CPU, "--source=base", f"--tasks={file}", "--target_examples_per_step=4", "--num_iterations=2")
    assert losses(start, "sft") == [0.0, 0.0]
    assert not any("val_loss" in line for line in metrics(start, "sft"))  # and no NaN
    before = load_file(start / "checkpoints/base/d1/step_000020/model.safetensors")
    after = load_file(start / "checkpoints/sft/d1/step_000002/model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert metrics(start, "sft")[-1]["no_target"] == 4


def test_gsm8k_from_a_folder(start, tmp_path, capsys):
    for split in ("train", "test"):
        rows = []
        for n in range(2, 40):
            answer = f"{n}+{n}=<<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}"
            rows.append({"question": f"Tom has {n} nuts and finds {n}. How many?", "answer": answer})
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tasks = f"--tasks=gsm8k={tmp_path}:2,addition"
    call("chat_sft", *SFT, "--source=base", tasks, "--num_iterations=3")
    call("chat_rl", *RL, f"--tasks=gsm8k={tmp_path}", "--num_iterations=2")
    assert len(metrics(start, "rl")) == 2
    for table_only in (False, True):
        capsys.readouterr()
        (start / "runs/sft/d1/chat_eval.json").unlink(missing_ok=True)
        flags = ("--max_examples=4", "--max_tokens=8", *(["--table_only"] if table_only else []))
        call("chat_eval", "--device=cpu", f"--tasks=gsm8k={tmp_path}", *flags)
        out = capsys.readouterr().out
        assert ("user: " in out) == ("a chat:" in out) == (not table_only) and "ChatCORE" in out
        report = json.loads((start / "runs/sft/d1/chat_eval.json").read_text())
        assert report["tasks"]["gsm8k"]["total"] == 4 and report["samples"] and report["chat"]


# ---------------------------------------------------------------------- rewards


@pytest.mark.slow
def test_reinforcement_raises_a_reward(start, monkeypatch):
    """Rewarded for answers with an `a` in them, the model says `a` more often; every loss does it."""

    def reward(self: Addition, example: Example, reply: Sequence[Part]) -> float:
        return float("a" in text_of(reply))

    monkeypatch.setattr(Addition, "reward", reward)
    monkeypatch.setattr("scripts.chat_rl.TABLE_LR_SCALE", 1.0)  # a tiny model learns with its tables
    flags = (*RL, "--source=base", "--source_tag=d1", "--num_iterations=6", "--lr_scale=0.5")
    for loss in ("reinforce", "rloo", "reinforce++", "grpo", "dr_grpo", "dapo", "gspo", "cispo"):
        sizes = ("--num_samples=16", "--eval_every=0", "--eval_examples=8", "--max_tokens=6")
        call("chat_rl", *flags, *sizes, f"--loss={loss}", f"--model_tag={loss}")
        lines = metrics(start, "rl", loss)
        assert lines[0]["reward"] < 0.6
        assert sum(line["reward"] for line in lines[-3:]) / 3 > lines[0]["reward"] + 0.15


@pytest.mark.slow
def test_a_student_comes_nearer_to_its_teacher(start, capsys):
    """On chats that nobody grades; the teacher has learned for longer."""
    flags = (*RL, "--source=base", "--source_tag=d1", "--tasks=identity")
    call("chat_sft", *SFT, "--source=base", "--tasks=identity", "--num_iterations=10")
    call("chat_rl", *flags, "--loss=distill", "--teacher=sft", "--num_iterations=12", "--num_samples=8")
    kl = [line["kl"] for line in metrics(start, "rl")]
    assert sum(kl[-3:]) < 0.7 * sum(kl[:3])
    assert f"KL to the teacher {kl[-1]:.3f} nats" in capsys.readouterr().out


def test_a_teacher_reads_the_tokens_of_its_student(start, capsys, tmp_path):
    tokenizer = tiny_tokenizer()
    model = lively_model(tiny_config(vocab_size=tokenizer.vocab_size))
    teacher = save_checkpoint(tmp_path / "other", 1, model, tokenizer, {"stage": "base"})
    code, err = mistake(capsys, "chat_rl", *RL, "--source=base", "--loss=distill", f"--teacher={teacher}")
    assert code == 1 and "tokenizer" in err and "chat_batch" in err


@pytest.mark.slow
def test_minibatches_of_a_step_clip(taught, monkeypatch, capsys):
    """Two updates of a step from half of the questions each; with one update the clip does nothing, and it is said."""
    flags = (*RL, f"--tasks=gsm8k={taught / 'questions'}", "--source=sft", "--source_tag=d1", "--num_iterations=2")
    flags = (*flags, "--examples_per_step=8", "--lr_scale=4")
    hashes = {}
    for tag, more in (("whole", ()), ("clip", ("--clip_low=0.01",)), ("halves", ("--minibatches=2",))):
        call("chat_rl", *flags, f"--model_tag={tag}", *more)
        assert ("do nothing with one update" in capsys.readouterr().out) == (tag == "clip")
        hashes[tag] = sha256(taught, "rl", 2, tag)
    assert hashes["whole"] == hashes["clip"] != hashes["halves"]
    call("chat_rl", *flags, "--model_tag=halves_clip", "--minibatches=2", "--clip_low=0.01", "--clip_high=0.01")
    assert "do nothing" not in capsys.readouterr().out
    assert sha256(taught, "rl", 2, "halves_clip") != hashes["halves"]


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ("", 4),
        # At the first step the model is its own reference: the KL is 0, not the rounding of two ways to compute it.
        *((f"--loss={loss} --kl=0.2 --kl_in=reward", 1) for loss in ("grpo", "rloo", "reinforce++", "gspo")),
        ("--kl=0.2 --kl_in=reward --dtype=bfloat16", 1),
        ("--kl=0.2 --kl_in=reward --updates_per_step=2 --top_k=4 --temperature=1.5", 1),
        ("--kl=0.2", 1),
    ],
)
def test_a_step_whose_replies_are_equally_good_changes_no_weight(start, monkeypatch, flags, steps):
    monkeypatch.setattr(Addition, "reward", lambda self, example, reply: 0.3)
    monkeypatch.setattr(rollout, "ending", lambda tokens, mask, tokenizer: "complete")
    call("chat_rl", *RL, "--source=base", f"--num_iterations={steps}", *flags.split())
    assert [line["idle_steps"] for line in metrics(start, "rl")] == [*range(1, steps + 1)]
    before = load_file(start / "checkpoints/base/d1/step_000020/model.safetensors")
    after = load_file(start / f"checkpoints/rl/d1/step_{steps:06d}/model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_questions_that_do_not_fit_are_left_out(start, tmp_path, capsys):
    for split in ("train", "test"):
        rows = [{"question": "word " * 400, "answer": "#### 1"}, {"question": "1?", "answer": "#### 1"}]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    call("chat_rl", *RL, "--source=base", f"--tasks=gsm8k={tmp_path}", "--examples_per_step=1", "--num_iterations=4")
    assert {0.0} < {line["response_tokens"] for line in metrics(start, "rl")}  # of two questions one never fits
    long = json.dumps({"question": "word " * 400, "answer": "#### 1"})
    (tmp_path / "train.jsonl").write_text(long)
    refused(capsys, ("chat_rl", *RL, "--source=base", f"--tasks=gsm8k={tmp_path}"), " 128 ")


# ---------------------------------------------------------------------- several ranks, users' commands


STAGES = {
    "mid": ("mid_train", "val_bpb"),
    "sft": ("chat_sft", "val_loss"),
    "rm": ("chat_dpo", "val_loss"),
    "dpo": ("chat_dpo", "val_loss"),
    "rl": ("chat_rl", "eval_reward"),
}


WHOLE, SHARDS, SHARED_ROWS = "--parallel=ddp", "--parallel=fsdp", "--context_parallel=2"


def flags_of(stage: str, base: Path) -> tuple[str, ...]:  # noqa: F811
    return {
        "mid": (*MID, "--source_tag=d1"),
        "sft": (*SFT, "--source=base", "--source_tag=d1"),
        "rm": (*tuned(RM), "--source=sft", "--source_tag=d1"),
        "dpo": (*tuned(DPO), "--source=sft", "--source_tag=d1", "--sft_weight=0.1"),
        "rl": graded(base),
    }[stage]


def fewest_rows(stage: str) -> str:
    return "--device_batch_size=2" if stage in ("dpo", "rm") else "--device_batch_size=1"


def same_training(base: Path, stage: str, one: str, other: str, steps: int) -> None:  # noqa: F811
    """Two runs in one folder whose figures differ by their rounding alone."""
    alone, together = metrics(base, stage, one), metrics(base, stage, other)
    assert [line["step"] for line in together] == [line["step"] for line in alone] == list(range(steps))
    names = ("loss", "grad_norm", STAGES[stage][1], "reward", "response_tokens", "tokens", "kl", "accuracy")
    for name in (*names, "margin", "val_margin"):
        expected = [line.get(name, 0) for line in alone]
        # a loss of policy gradients is a sum of both signs, as a margin is; a divergence starts at 0
        rounding = 1e-3 if name == "grad_norm" else 1e-5
        found = pytest.approx(expected, rel=rounding, abs=1e-5 if stage in ("rm", "dpo", "rl") else 0)
        assert [line.get(name, 0) for line in together] == found, name
    weights = [
        load_file(base / f"checkpoints/{stage}/{tag}/step_{steps:06d}/model.safetensors") for tag in (one, other)
    ]
    for name, tensor in weights[0].items():
        # As a whole, because AdamW makes a full step, up or down, of a gradient that is nothing but rounding.
        assert (weights[1][name] - tensor).norm() <= 1e-4 * tensor.norm(), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "extra", "first", "then"),
    [
        ("mid", (), SHARED_ROWS, WHOLE),
        ("sft", (), SHARDS, SHARED_ROWS),
        ("rm", (), WHOLE, SHARDS),
        ("dpo", (), SHARDS, SHARED_ROWS),
        ("rl", (), SHARDS, SHARED_ROWS),
        ("rl", ("--loss=ppo",), SHARED_ROWS, WHOLE),
    ],
    ids=["mid", "sft", "rm", "dpo", "rl", "ppo"],
)
def test_ranks_train_as_one_and_any_layout_continues(taught, stage, extra, first, then):
    """Straight through on two ranks; from a third on two ranks of another layout, then on one."""
    script, _ = STAGES[stage]
    flags = (*flags_of(stage, taught), *extra, "--num_iterations=6", "--eval_every=3", "--save_every=2")
    call(script, *flags, "--model_tag=one")
    many = (script, *flags, "--model_tag=many")

    def on_two_ranks(layout: str, *more: str) -> None:
        printed = run_command(*many, *(() if layout == SHARED_ROWS else (fewest_rows(stage),)), layout, *more)
        assert "device: 2 x" in printed and ("ddp, rows shared by 2" in printed) == (layout == SHARED_ROWS)
        same_training(taught, stage, "one", "many", 6)

    folder = taught / "checkpoints" / stage / "many"
    on_two_ranks(first)
    forget_after(taught, stage, 2, "many")
    on_two_ranks(then, "--resume")
    assert (folder / "step_000006/training.rank1.safetensors").exists()

    forget_after(taught, stage, 4, "many")
    call(*many, "--resume")
    assert not (folder / "step_000006/training.rank1.safetensors").exists()
    same_training(taught, stage, "one", "many", 6)
    if stage == "rl":  # there was something to learn
        assert sum(line["no_signal"] < 1 for line in metrics(taught, "rl", "one")) >= 4


@pytest.mark.parametrize("stage", [pytest.param(s, marks=[] if s == "rl" else pytest.mark.soak) for s in STAGES])
@pytest.mark.slow
def test_replicas_of_shards_train_as_one(taught, stage):
    """Four processes: two groups of two, activations computed twice."""
    script, _ = STAGES[stage]
    flags = (*flags_of(stage, taught), "--num_iterations=4", "--eval_every=2")
    call(script, *flags, "--model_tag=one")
    hybrid = ("--parallel=fsdp", "--replicate=2", "--activation_checkpointing")
    run_command(script, *flags, *hybrid, "--model_tag=many", fewest_rows(stage), ranks=4)
    same_training(taught, stage, "one", "many", 4)


@pytest.mark.slow
def test_users_documented_commands_run_as_written(start, monkeypatch):
    # Smaller than by default, and all else as written.
    monkeypatch.setenv("NANOCHAT_MID_TRAIN", "--num_iterations=2 --eval_tokens=4096")
    monkeypatch.setenv("NANOCHAT_CHAT_SFT", "--num_iterations=4 --eval_examples=8")
    monkeypatch.setenv("NANOCHAT_CHAT_RL", "--num_iterations=1 --eval_examples=8 --max_tokens=16")
    call("mid_train", "--device_batch_size=8")
    call("chat_sft", "--device_batch_size=4")
    torchrun = ("torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "scripts.chat_sft", "--")
    result = process(*torchrun, "--device_batch_size=8", "--target_examples_per_step=32")
    assert result.returncode == 0, result.stderr
    run_command("chat_rl", "--device_batch_size=4", "--examples_per_step=16")
    assert metrics(start, "sft")[-1]["step"] == 3 and metrics(start, "rl")[-1]["step"] == 0


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("mid_train --source=nowhere", "neither a stage"),
        ("mid_train --source_tag=nowhere", "that is whole"),
        ("mid_train --tasks=nothing", "no such task"),
        ("mid_train --total_batch_size=100 --device_batch_size=2", "--total_batch_size"),
        ("mid_train --lr_scale=-1", "--lr_scale"),
        ("chat_sft", "no mid checkpoint"),
        ("chat_sft --source=base --tasks=gsm8k=/nowhere", "/nowhere"),
        ("chat_sft --source=base --target_examples_per_step=0", "--target_examples_per_step"),
        ("chat_sft --source=base --context_parallel=2", "--context_parallel 2 needs groups of 2 processes"),
        ("chat_sft --source=base --model_tag=../x", "--model_tag"),
        ("chat_dpo", "no sft checkpoint"),
        ("chat_dpo --source=base --tasks=smoltalk", "two to compare"),
        ("chat_dpo --source=base --tasks=humaneval", "no train split"),
        ("chat_dpo --source=base --device_batch_size=1", "--device_batch_size 1: at least 2"),
        ("chat_dpo --source=base --beta=0", "--beta"),
        ("chat_dpo --source=base --label_smoothing=0.6", "--label_smoothing 0.6: at most 0.5"),
        ("chat_dpo --source=base --loss=ipo --label_smoothing=0.1", "--label_smoothing 0.1"),
        ("chat_dpo --source=base --loss=reward --sft_weight=1", "--sft_weight 1.0: --loss reward has none, dpo, ipo, "),
        ("chat_rl", "no sft checkpoint"),
        ("chat_rl --source=base --num_samples=1", "--num_samples"),
        ("chat_rl --source=base --temperature=0", "--temperature"),
        ("chat_rl --source=base --top_k=-1", "--top_k"),
        ("chat_sft --source=base --learning_rate=1e-4 --lr_scale=0.5", "leave --lr_scale out"),
        ("chat_dpo --source=base --weight_decay=0.1", "--weight_decay 0.1 needs --learning_rate"),
        ("chat_dpo --source=base --num_epochs=1 --num_iterations=7", "leave one of them out"),
        ("chat_sft --source=base --num_epochs=1 --tasks=addition:2,identity", "leave the weights out"),
        ("chat_sft --source=base --lora_base=nf4", "--lora_base needs --lora_rank"),
        ("chat_sft --source=base --rope_scaling=linear", "--rope_scaling linear needs a --max_seq_len beyond"),
        ("chat_sft --source=base --tasks=addition --max_seq_len=3", "leave nothing to learn"),
        (f"chat_sft --source=base --num_iterations={10**400}", ": at most 1,000,000,000,000"),
    ],
)
def test_a_mistake_costs_one_line(start, capsys, command, says):
    script, *flags = command.split()
    code, err = mistake(capsys, script, *flags, "--device=cpu")
    assert code in (1, 2) and says in err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--loss=nosuch", "grpo, "),
        ("--loss=distill", "--teacher"),
        ("--loss=distill --teacher=base --kl=0.1", "leave --kl out"),
        ("--kl_in=reward", "--kl_in reward"),
        ("--loss=dapo --staleness=1", "--refills 0"),
        ("--minibatches=4 --examples_per_step=3", "--minibatches 4"),
        ("--reward=mine.py:short", "no file mine.py"),
        ("--reward=length", "--reward length: it is none of task"),
        ("--tasks=smoltalk", "no right answer to grade"),
        ("--tasks=nosuch", "no such task"),
        ("--sampler=llama", "--sampler llama: engine, "),
        ("--sampler=http://127.0.0.1:9,127.0.0.1:8", "--sampler http://127.0.0.1:9,127.0.0.1:8"),
        ("--sampler=ray:0", "--sampler ray:0"),
    ],
)
def test_rl_refuses_flags_before_it_loads_a_model(monkeypatch, capsys, flags, says):
    monkeypatch.setattr(stages, "begin", None)
    refused(capsys, ("chat_rl", *flags.split(), "--device=cpu"), says)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--loss=rloo --clip_low=0.1", "--loss rloo has no clip"),
        ("--clip_high=0.3", "do nothing with one update a step"),
        ("--importance_cap=0.5", "--importance_cap 0.5 is below 1"),
        ("--top_k=1", "nearly equal"),
        ("--loss=reinforce --minibatches=3", "3 updates a step: --loss reinforce has no clip"),
        ("--loss=cispo --minibatches=2 --updates_per_step=2", "4 updates a step: --loss cispo has no clip"),
        ("--loss=cispo --clip_high=3 --minibatches=2 --examples_per_step=2", "2 updates a step"),
        ("--clip_low=0.1 --minibatches=2", ""),
        ("--loss=gspo --updates_per_step=2", ""),
    ],
)
def test_rl_hints_at_flags_that_do_little_good(monkeypatch, capsys, flags, says):
    monkeypatch.setattr(stages, "begin", lambda *_, **__: sys.exit(3))
    with pytest.raises(SystemExit):
        call("chat_rl", *flags.split())
    *hints, loss = capsys.readouterr().out.splitlines()
    assert loss.startswith("loss: ") and len(hints) == bool(says) and says in "".join(hints)


def test_resume_keeps_to_its_flags(start, capsys):
    call("chat_sft", *SFT, "--source=base", "--num_iterations=2")
    for flags, words in (
        ("--num_iterations=4 --seed=1 --resume", "--seed"),
        ("--num_iterations=1 --resume", "--num_iterations"),
        ("--learning_rate=1e-4 --resume", "adamw and muon, not adamw"),
        ("--num_epochs=1 --resume", "steps, not epochs"),
        ("--optimizer_dtype=bfloat16 --resume", "--optimizer_dtype float32"),
        ("--offload_optimizer", "--offload_optimizer"),
    ):
        refused(capsys, ("chat_sft", *SFT, "--source=base", *flags.split()), words)


def test_resume_keeps_to_its_source(start, capsys):
    call("chat_sft", *SFT, "--source=base", "--num_iterations=2")
    call("mid_train", *MID, "--num_iterations=2")
    code, err = mistake(capsys, "chat_sft", *SFT, "--source=mid", "--num_iterations=4", "--resume")
    assert code == 1 and "base/d1/step_000020" in err and "mid/d1/step_000002" in err


@pytest.mark.slow
def test_resume_keeps_to_its_data(start, tmp_path, capsys):
    """Other rows under the same name would come in another order: some twice, some never. A rejected reply that
    has changed is noticed in any row."""
    said = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "no"}]} for i in range(9)
    ]
    pairs = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no"} for i in range(9)]
    many = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no"} for i in range(40)]
    rewritten = [many[0], {**many[1], "rejected": "never"}, *many[2:]]
    for script, rows, others, flags in (
        ("chat_sft", said, said[::-1], SFT),
        ("mid_train", said, said[::-1], MID),
        ("chat_dpo", pairs, pairs[::-1], DPO),
        ("chat_dpo", many, rewritten, (*DPO, "--model_tag=many", "--source_tag=d1")),
    ):
        file = tmp_path / "rows.jsonl"
        flags = (*(f for f in flags if "--tasks" not in f), "--source=base", f"--tasks={file}")
        file.write_text("\n".join(map(json.dumps, rows)))
        call(script, *flags, "--num_iterations=1")
        file.write_text("\n".join(map(json.dumps, others)))
        code, err = mistake(capsys, script, *flags, "--num_iterations=2", "--resume")
        assert code == 1 and "--resume" in err and "what --tasks names" in err, script
        file.write_text("\n".join(map(json.dumps, rows)))
        call(script, *flags, "--num_iterations=2", "--resume")


def test_pairs_with_nothing_to_prefer_are_an_error(start, tmp_path, capsys):
    file = tmp_path / "same.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"{i}?", "chosen": "no", "rejected": "no"}) for i in range(9)))
    flags = (*(flag for flag in DPO if "--tasks" not in flag), "--source=base", f"--tasks={file}")
    refused(capsys, ("chat_dpo", *flags, "--num_iterations=2"), "nothing to prefer", "longer than the context")


@pytest.mark.parametrize(("script", "flags"), [("chat_dpo", DPO), ("chat_rl", (*RL, "--kl=0.1"))], ids=["dpo", "rl"])
def test_resume_keeps_to_its_reference(start, capsys, script, flags):
    """A source of the same name whose weights were trained anew is not what the run was measured against."""
    flags = (*flags, "--source=sft", "--source_tag=d1")
    call("chat_sft", *SFT, "--source=base", "--num_iterations=2")
    call(script, *flags, "--num_iterations=1")
    call("chat_sft", *SFT, "--source=base", "--num_iterations=2", "--seed=1")
    refused(capsys, (script, *flags, "--num_iterations=2", "--resume"), "--resume", "the reference's weights")
    call("chat_sft", *SFT, "--source=base", "--num_iterations=2")  # as before
    call(script, *flags, "--num_iterations=2", "--resume")


# ---------------------------------------------------------------------- preferences


def pairs_file(folder: Path, count: int, odd: Sequence[dict] = ()) -> Path:
    """A number is followed by a word that its parity says; the other word is the worse reply."""
    folder.mkdir()
    words = ("That is an even one.", "This number is odd.")
    for split, first in (("train", 0), ("test", 1000)):
        rows = [
            {"prompt": f"What is {n}?", "chosen": words[n % 2], "rejected": words[1 - n % 2]}
            for n in range(first, first + count)
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, [*rows, *odd])))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dpo", "simpo"])
def test_held_out_pairs_are_told_apart(start, tmp_path, loss):
    tasks = f"--tasks={pairs_file(tmp_path / 'pairs', 300)}"
    flags = (*CPU, "--source=base", tasks, "--device_batch_size=8", "--target_examples_per_step=16", "--lr_scale=0.5")
    more = ("--num_iterations=60", "--eval_every=20", "--eval_examples=64", f"--loss={loss}")
    call("chat_dpo", *flags, *more)
    lines = metrics(start, "dpo")
    assert (lines[0]["accuracy"] == 0.5) == (loss != "simpo")  # under a reference both replies are as before
    found = [line["val_accuracy"] for line in lines if "val_accuracy" in line]
    assert found[-1] > 0.8, found
    assert lines[-1]["val_chosen_reward"] > lines[-1]["val_rejected_reward"]
    assert lines[-1]["val_loss"] < lines[0]["loss"]


def test_a_loss_without_a_reference_needs_no_second_model(start, capsys):
    peaks = {}
    for loss in ("dpo", "simpo"):
        call("chat_dpo", *DPO, "--source=base", f"--loss={loss}", "--dry_run")
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "most at once" in line]
        peaks[loss] = float(line.split()[-2].replace(",", ""))
    weights = (start / "checkpoints/base/d1/step_000020/model.safetensors").stat().st_size / 2**20
    assert peaks["dpo"] - peaks["simpo"] > 0.9 * weights


def test_pairs_with_nothing_to_prefer_are_left_out(start, tmp_path):
    """Of odd pairs beside good ones the loss is that of the good ones alone; they are counted over a resume."""
    odd = [
        {"prompt": "Silent?", "chosen": "", "rejected": "No."},
        {"prompt": "The same?", "chosen": "Yes.", "rejected": "Yes."},
        {"prompt": "long " * 300, "chosen": "Never", "rejected": "reached."},
    ]
    files = [pairs_file(tmp_path / name, 6, rows) for name, rows in (("good", []), ("odd", odd))]
    flags = (*CPU, "--source=base", "--source_tag=d1", "--device_batch_size=2", "--num_iterations=3", "--eval_every=1")
    call("chat_dpo", *flags, f"--tasks={files[0]}", "--target_examples_per_step=6", "--model_tag=good")
    odd_flags = (*flags, f"--tasks={files[1]}", "--target_examples_per_step=9", "--model_tag=odd", "--save_every=1")
    call("chat_dpo", *odd_flags)
    for name in ("loss", "val_loss", "tokens"):
        good, odd_ones = ([line[name] for line in metrics(start, "dpo", tag)] for tag in ("good", "odd"))
        assert odd_ones == pytest.approx(good, rel=1e-4), name
    assert [line["left_out"] for line in metrics(start, "dpo", "odd")] == [3, 6, 9]
    forget_after(start, "dpo", 2, "odd")
    call("chat_dpo", *odd_flags, "--resume")
    assert [line["left_out"] for line in metrics(start, "dpo", "odd")] == [3, 6, 9]
