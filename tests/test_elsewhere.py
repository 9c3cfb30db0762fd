"""What people bring from other trainers: epochs, accumulated batches and adapters, in every stage that trains a model
from elsewhere. The base is test_stages' small one.
"""

import json
import math
from typing import Any

import pytest
import torch
from runs import call, exactly_resumed, losses, metrics, mistake, refused
from safetensors.torch import load_file
from test_scripts import base  # noqa: F401 (base is a fixture)
from test_stages import CPU, DPO, RL, SFT, pretrained, start  # noqa: F401 (fixtures)

from nanochat.checkpoint_manager import load_model
from nanochat.tasks.flag import EpochMixture
from nanochat.tokenizer import Tokenizer

# ---------------------------------------------------------------------- --gradient_accumulation_steps


@pytest.mark.parametrize(("script", "stage", "flags"), [("chat_sft", "sft", SFT), ("chat_dpo", "dpo", DPO)])
def test_accumulation_is_batch_size_times_steps_times_devices(start, capsys, script, stage, flags):  # noqa: F811
    """2 x 4 x 1 examples a step, and the same numbers as with the flag that counts examples."""
    flags = (*flags, "--source=base", "--num_iterations=3")
    call(script, *flags)
    counted = losses(start, stage)
    others = [flag for flag in flags if "examples_per_step" not in flag]
    capsys.readouterr()
    call(script, *others, "--gradient_accumulation_steps=4")
    assert "horizon: 3 steps of 8 " in capsys.readouterr().out and losses(start, stage) == counted
    meta = json.loads((start / f"checkpoints/{stage}/d1/step_000003/meta.json").read_text())
    # On another number of devices the same flags would be another batch: a resume compares the examples.
    assert (meta["config"]["target_examples_per_step"], meta["config"]["gradient_accumulation_steps"]) == (8, None)
    capsys.readouterr()
    code, line = mistake(capsys, script, *others, "--gradient_accumulation_steps=3", "--resume")
    assert code == 1 and "--target_examples_per_step 8, not 6" in line


def test_accumulation_counts_replies_in_rl(start, capsys):  # noqa: F811
    """2 x 6 x 1 replies a step are 3 questions with 4 replies each, as in other trainers of GRPO."""
    flags = [flag for flag in (*RL, "--source=base", "--num_iterations=1") if "examples_per_step" not in flag]
    call("chat_rl", *flags, "--gradient_accumulation_steps=6")
    assert "1 step of 3 questions, 4 replies to each" in capsys.readouterr().out
    refused(capsys, ("chat_rl", *flags, "--gradient_accumulation_steps=3"), "6 replies a step", "--examples_per_step")
    code, line = mistake(capsys, "chat_rl", *flags, "--gradient_accumulation_steps=2", "--minibatches=2")
    assert code == 1 and "--minibatches 2: each needs a question, and --examples_per_step is 1" in line


# ---------------------------------------------------------------------- --num_epochs


def test_rl_asks_every_question_once_an_epoch_and_resumes_exactly(start, tmp_path, monkeypatch):  # noqa: F811
    """14 questions, 4 a step: two epochs are 7 steps."""
    (tmp_path / "questions").mkdir()
    rows = [{"question": f"What is {n}?", "answer": f"#### {n % 2}"} for n in range(14)]
    for split in ("train", "test"):
        (tmp_path / f"questions/{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    drawn: list[int] = []
    draw = EpochMixture.draw

    def recorded(mixture: EpochMixture, index: int) -> Any:
        drawn.append(draw(mixture, index)[1])
        return draw(mixture, index)

    monkeypatch.setattr(EpochMixture, "draw", recorded)
    flags = (*RL, "--source=base", f"--tasks=gsm8k={tmp_path / 'questions'}", "--examples_per_step=4")
    flags = (*flags, "--num_epochs=2", "--save_every=1", "--eval_every=0", "--num_samples=2", "--max_tokens=4")
    exactly_resumed(start, "chat_rl", "rl", flags, 7, (3,))
    begun = 100  # the first questions are tried before training
    first, second = drawn[begun : begun + 14], drawn[begun + 14 : begun + 28]
    assert sorted(first) == sorted(second) == list(range(14)) and first != second


def test_continued_pretraining_counts_its_epochs(start, tmp_path, capsys):  # noqa: F811
    text = tmp_path / "mine.jsonl"
    text.write_text("\n".join(json.dumps({"text": f"The boat number {n} has {n * n} sails. " * 3}) for n in range(60)))
    (tmp_path / "val.jsonl").write_text(json.dumps({"text": "A boat has a sail."}))
    tokenizer = Tokenizer.load(start / "tokenizer")
    documents = [json.loads(line)["text"] for line in text.read_text().splitlines()]
    tokens = sum(1 + len(tokenizer.encode(document)) for document in documents)
    steps = math.ceil(2 * tokens / (4 * 129))
    flags = (*CPU, "--source=base", "--source_tag=d1", f"--data={text}", f"--val_data={tmp_path / 'val.jsonl'}")
    flags = (*flags, "--device_batch_size=4", "--total_batch_size=512", "--eval_every=0", "--compile=off")
    call("mid_train", *flags, "--num_epochs=2")
    assert f"data: {tokens:,} tokens" in capsys.readouterr().out
    lines = metrics(start, "base", "d1-continued")
    assert len(lines) == steps > 4


# ---------------------------------------------------------------------- adapters in continued pretraining


@pytest.mark.parametrize("base_format", ["plain", "nf4"])
def test_continued_pretraining_of_adapters_resumes_exactly(start, capsys, base_format):  # noqa: F811
    flags = (*CPU, "--source=base", "--source_tag=d1", "--data=demo", "--device_batch_size=2", "--compile=off")
    flags = (*flags, "--total_batch_size=256", "--num_iterations=6", "--save_every=3", "--eval_tokens=512")
    flags = (*flags, "--lora_rank=4", "--lora_alpha=8", f"--lora_base={base_format}", "--model_tag=texts")
    exactly_resumed(start, "mid_train", "base", flags, 6, (3,), "texts")
    out = capsys.readouterr().out
    assert "adapters of rank 4" in out and metrics(start, "base", "texts")[0]["lr"] <= 2e-4
    folder = start / "checkpoints/base/texts/step_000006"
    assert not (folder / "model.safetensors").exists()
    assert all("lora_" in name for name in load_file(folder / "adapter.safetensors"))

    # What it becomes is a base model: adapters for a chat are trained over it, and both are merged.
    before, _, _ = load_model("base", "cpu", model_tag="d1")
    after, _, meta = load_model("base", "cpu", model_tag="texts")
    weights = dict(before.named_parameters()), dict(after.named_parameters())
    name = next(name for name in weights[0] if name.startswith("blocks.0.") and weights[0][name].ndim == 2)
    assert not torch.equal(*(one[name] for one in weights)) and meta["pretraining"]["tokens"] > 6 * 256
    sft = ("--source=base", "--source_tag=texts", "--model_tag=chat", "--num_iterations=1", "--lora_rank=2")
    call("chat_sft", *SFT, *sft)
    assert load_model("sft", "cpu", model_tag="chat")[2]["stage"] == "sft"


def test_adapters_in_continued_pretraining_learn(start):  # noqa: F811
    flags = (*CPU, "--source=base", "--source_tag=d1", "--data=pydoc", "--device_batch_size=4", "--compile=off")
    flags = (*flags, "--total_batch_size=512", "--num_iterations=30", "--eval_every=0", "--eval_tokens=2048")
    call("mid_train", *flags, "--lora_rank=8", "--learning_rate=0.01")
    lines = metrics(start, "base", "d1-continued")
    assert lines[-1]["val_bpb"] < lines[0]["val_bpb_before"] - 0.05


# ---------------------------------------------------------------------- mistakes

EXAMPLES = ("--target_examples_per_step", "--target_examples_per_step", "--examples_per_step")  # of each stage


@pytest.mark.parametrize(
    ("command", "words", "code"),
    [
        *(
            (f"{script} --gradient_accumulation_steps=2 {flag}=8", (flag, "leave one of them out"), 2)
            for script, flag in zip(("chat_sft", "chat_dpo", "chat_rl"), EXAMPLES, strict=True)
        ),
        ("mid_train --num_epochs=1 --data=demo", ("never ends", "--num_iterations"), 1),
        ("mid_train --num_epochs=1 --data=demo:0.5,pydoc:0.5", ("is drawn by weight", "--num_iterations"), 1),
        ("mid_train --num_epochs=1 --num_iterations=3", ("leave one of them out",), 2),
        ("chat_rl --num_epochs=1 --loss=dapo", ("--refills 0",), 1),
        ("chat_rl --num_epochs=1 --num_iterations=3", ("leave one of them out",), 2),
        ("mid_train --data=demo --num_iterations=1 --lora_rank=4 --lr_scale=0.1", ("of --lora_rank is absolute",), 2),
        ("mid_train --data=demo --num_iterations=1 --lora_alpha=4", ("--lora_alpha needs --lora_rank",), 2),
    ],
)
def test_a_mistake_costs_one_line(start, capsys, command, words, code):  # noqa: F811
    script, *flags = command.split()
    shared = RL if script == "chat_rl" else CPU
    refused(capsys, (script, *shared, "--source=base", "--source_tag=d1", *flags), *words, code=code)
