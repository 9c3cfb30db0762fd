"""The commands: help at once, the whole chain, exact resumes, equal losses at any world size, one line a mistake.

Most tests run a script's `main` in this process, through the same `run` as on the command line; those marked
slow start real processes.
"""

import dataclasses
import importlib
import io
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from runs import ROOT, call, exactly_resumed, forget_after, losses, metrics, mistake, process, refused, sha256
from tiny import command_on_a_rank, cpu_device, run_command, run_ranks

from nanochat import bpb, loader, train
from nanochat import device as devices
from nanochat.bpb import bits_per_byte
from nanochat.checkpoint_manager import load_model
from nanochat.device import Device
from nanochat.ground import cli
from nanochat.model_folder import steps as steps_of
from nanochat.run import loop, saver, speed
from nanochat.run.flags import TrainFlags
from nanochat.run.progress import Progress
from nanochat.run.run_log import REQUIRED
from nanochat.tokenizer import Tokenizer
from nanochat.train import next_token_loss

SCRIPTS = sorted(path.stem for path in (ROOT / "scripts").glob("*.py") if path.stem != "__init__")
STAGE_SCRIPTS = ("base_train", "mid_train", "chat_sft", "chat_dpo", "chat_rl")

TINY = (
    *("--depth=1", "--head_dim=32", "--max_seq_len=64", "--device_batch_size=2", "--total_batch_size=256"),
    *("--eval_tokens=256", "--log_every=1", "--dtype=float32", "--device=cpu"),
)
BATCH_TOKENS = 256

# What other people's documents already use (the public contract).
CONTRACT_FLAGS = {
    "tok_train": "data val_data",
    "tok_eval": "data val_data",
    "base_train": "depth device_batch_size total_batch_size gradient_accumulation_steps dataloader_num_workers "
    "num_iterations max_seq_len target_param_data_ratio window_pattern run model_tag resume data val_data hub",
    "base_eval": "data val_data",
    "chat_cli": "source",
    "mid_train": "device_batch_size total_batch_size gradient_accumulation_steps dataloader_num_workers",
    "chat_sft": "device_batch_size target_examples_per_step",
    "chat_dpo": "device_batch_size target_examples_per_step beta",
    "chat_rl": "device_batch_size examples_per_step",
    "chat_web": "host port source",
}

REQUIRED_WORDS = {"bench": ["train"], "chat_batch": ["--in=a", "--out=b"]}  # what a script cannot do without


@pytest.fixture(scope="module")
def trained_tokenizer(tmp_path_factory) -> Path:
    """A folder with the tokenizer that most tests share."""
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = [f"{word} {number}. Once upon a time " for number in range(300) for word in ("The boat", "A small fish")]
    Tokenizer.train(texts, 320).save(folder)
    return folder


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NANOCHAT_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path / "base"
    torch.set_num_threads(threads)


@pytest.fixture
def tokenizer(trained_tokenizer, base) -> None:
    shutil.copytree(trained_tokenizer, base / "tokenizer")


# ---------------------------------------------------------------------- help


HELP = """
import contextlib, importlib, io, json, sys
from nanochat.ground import cli
pages = {}
for script in sys.argv[1:]:
    out = io.StringIO()
    module = importlib.import_module(f"scripts.{script}")
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli.parse(module.Config, ["--help"])
    pages[script] = out.getvalue()
print(json.dumps(pages))
"""


def test_help_answers_without_torch_and_touches_nothing(tmp_path):
    stub = tmp_path / "stub"
    stub.mkdir()
    for name in ("torch", "torch_npu"):
        (stub / f"{name}.py").write_text("raise RuntimeError('--help imports torch')")
    (stub / "all_help.py").write_text(HELP)
    result = process("all_help", *SCRIPTS, PYTHONPATH=f"{stub}{os.pathsep}{ROOT}", COLUMNS="100")
    assert (result.returncode, result.stderr) == (0, "")
    pages = json.loads(result.stdout)
    for script in SCRIPTS:
        assert f"python -m scripts.{script}" in pages[script]
        for flag in CONTRACT_FLAGS.get(script, "").split():
            assert re.search(rf"--{flag}\b", pages[script])
        assert not re.search(r"^\W*--\w+( \S+)? +\(default", pages[script], re.MULTILINE), (
            "a flag without a description"
        )
    assert not (tmp_path / "base").exists()
    result = process("scripts.base_train", PYTHONPATH=str(stub))
    assert "--help imports torch" in result.stderr  # the stub stops what does import it


# ---------------------------------------------------------------------- the chain


@pytest.mark.slow
def test_text_becomes_a_model_that_is_evaluated_and_sampled(base, capsys, monkeypatch):
    call("tok_train", "--max_chars=100000", "--vocab_size=300")
    assert Tokenizer.load(base / "tokenizer").vocab_size == 300
    call("tok_eval")
    assert "bytes per token" in capsys.readouterr().out

    call("base_train", *TINY, "--num_iterations=30", "--eval_every=10", "--save_every=20")
    out = capsys.readouterr().out
    assert "loss" in out and "val_bpb" in out and "saved " in out
    lines = metrics(base, "base")
    assert [line["step"] for line in lines] == list(range(30))
    for line in lines:
        assert set(REQUIRED) <= set(line)
        assert line["tokens"] == (line["step"] + 1) * BATCH_TOKENS
        assert line["tok_per_sec"] > 0 and line["peak_memory_bytes"] > 0 and line["skipped_steps"] == 0
    assert [line["step"] for line in lines if "val_bpb" in line] == [9, 19, 29]
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds) and seconds[0] > 0
    assert lines[0]["loss"] == pytest.approx(math.log(300), rel=0.01)  # a uniform guess
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.1
    assert lines[-1]["val_bpb"] < lines[9]["val_bpb"]
    assert sorted(p.name for p in (base / "checkpoints/base/d1").iterdir()) == ["step_000020", "step_000030"]

    sizes = ("--eval_tokens=256", "--device_batch_size=2", "--dtype=float32", "--device=cpu", "--max_tokens=8")
    call("base_eval", *sizes, "--samples=2", "--stories=3")
    out = capsys.readouterr().out
    results = json.loads((base / "runs/base/d1/eval.json").read_text())
    assert results["step"] == 30
    assert results["val_bpb"] == pytest.approx(lines[-1]["val_bpb"], rel=1e-6)  # training evaluates as base_eval does
    assert 0 < results["train_bpb"] < 8 and results["train_bpb"] != results["val_bpb"]
    assert len(results["samples"]) == 2 and results["stories"] == 3 and 0 <= results["stories_passed"] <= 3
    assert all(sample in out for sample in results["samples"])
    call("base_eval", *sizes, "--samples=1", "--prompt=Mia the fox", "--source=base/d1/step_20")
    results = json.loads((base / "runs/base/d1/eval.json").read_text())
    assert results["step"] == 20 and results["samples"][0].startswith("Mia the fox")
    capsys.readouterr()

    greedy = ("--temperature=0", "--max_tokens=8", "--dtype=float32", "--device=cpu")
    call("chat_cli", "-p", "Once upon", *greedy)
    once = capsys.readouterr().out
    assert once.startswith("Once upon") and once.endswith("\n") and len(once) > len("Once upon\n")
    call("chat_cli", "--prompt=Once upon", *greedy)
    assert capsys.readouterr().out == once
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once upon\n"))  # a pipe
    call("chat_cli", *greedy)
    assert capsys.readouterr().out == once
    call("chat_cli", "-p", "Once upon", *greedy, "--source", str(base / "checkpoints/base/d1/step_000030"))
    assert capsys.readouterr().out == once

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    with create_pipe_input() as typed, create_app_session(input=typed, output=DummyOutput()):
        typed.send_text("Once upon\r" + "too long " * 80 + "\rOnce upon\r\rnever asked\r")
        call("chat_cli", *greedy)
    out = capsys.readouterr().out
    assert out.count(once) == 2
    assert "error: the prompt has" in out
    assert "never" not in out


# ---------------------------------------------------------------------- the same run again, resumed, cut otherwise


@pytest.fixture
def mixture(tmp_path) -> str:
    path = tmp_path / "small.txt"
    path.write_text("<|endoftext|>\n".join(f"The boat {n}. Once upon a time {n * 7} fish.\n" * 9 for n in range(80)))
    return f"--data={path}:0.3,demo:0.7"


@pytest.fixture(params=["demo", "a mixture"])
def data(request, mixture) -> str:
    return "--data=demo" if request.param == "demo" else mixture


def test_the_same_seed_gives_the_same_run(base, tokenizer, monkeypatch, data):
    call("base_train", *TINY, data, "--num_iterations=4")
    first, first_sha = losses(base, "base"), sha256(base, "base", 4)
    call("base_train", *TINY, data, "--num_iterations=4", "--model_tag=again")
    assert losses(base, "base", "again") == first
    assert sha256(base, "base", 4, tag="again") == first_sha
    call("base_train", *TINY, data, "--num_iterations=4", "--model_tag=other", "--seed=1")
    assert losses(base, "base", "other") != first
    assert sha256(base, "base", 4, tag="other") != first_sha


@pytest.mark.slow
def test_a_resumed_run_is_straight_through(base, tokenizer, data):
    """From the middle; from a step that a resumed run has saved; from the one before a damaged one; from the end."""
    flags = (*TINY, data, "--num_iterations=8", "--save_every=2", "--eval_every=4", "--seed=3")
    resume_from = exactly_resumed(base, "base_train", "base", flags, 8, (4, 6))
    assert [line["step"] for line in metrics(base, "base")] == list(range(8))  # none twice, none missing
    weights = base / "checkpoints/base/d1/step_000004/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    resume_from(2, kept=4)
    resume_from(8)


@pytest.mark.slow
def test_continued_pretraining_resumes_exactly_and_becomes_a_chat_model(base, tokenizer, capsys, mixture):
    """A model of 64 tokens goes on with 128 in two starts; mid-training and export take what it becomes."""
    call("base_train", *TINY, "--window_pattern=S", "--num_iterations=2")
    cpu = ("--device=cpu", "--dtype=float32", "--device_batch_size=2", "--log_every=1")
    flags = (*cpu, mixture, "--source=base", "--source_tag=d1", "--max_seq_len=128", "--eval_tokens=256")
    flags += ("--num_iterations=6", "--save_every=3", "--total_batch_size=512")
    exactly_resumed(base, "mid_train", "base", flags, 6, (3,), "d1-continued")
    assert "context: 128 tokens, rope_theta 100,000, positions scaled by 2 (yarn)" in capsys.readouterr().out
    assert sha256(base, "base", 6, "d1-continued") != sha256(base, "base", 2)
    meta = json.loads((base / "checkpoints/base/d1-continued/step_000006/meta.json").read_text())
    read = meta["pretraining"]
    assert (read["tokens"], read["context"], read["batch_tokens"]) == (2 * 256 + 6 * 512, 128, 512)
    assert read["data"] == f"demo,{mixture.removeprefix('--data=')}"
    assert meta["source"] == "base/d1/step_000002" and meta["model"]["rope_scaling"]["original_len"] == 64
    assert meta["model"]["window_tokens"] == 0  # of one layer the last is the first, which sees everything

    # AdamW at an absolute rate; and what a user may get wrong.
    one = ("--model_tag=adamw", "--learning_rate=1e-4", "--num_iterations=1", "--data=demo", "--save_every=0")
    call("mid_train", *flags, *one)
    assert metrics(base, "base", "adamw")[0]["lr"] == 1e-4
    meta = json.loads((base / "checkpoints/base/adamw/step_000001/meta.json").read_text())
    assert meta["pretraining"]["data"] == "demo"
    for argv, words in (
        (["--model_tag=d1"], "--model_tag d1 is the source's own"),
        (["--learning_rate=1e-4", "--lr_scale=1"], "leave --lr_scale out"),
        (["--tasks=addition"], "--data and --tasks both name"),
        (["--rope_scaling=linear", "--source_tag=d1-continued", "--max_seq_len=256"], "as yarn: leave the flag out"),
        (["--rope_scaling=linear", "--resume"], "--rope_scaling auto, not linear"),
    ):
        code, error = mistake(capsys, "mid_train", *flags, *argv)
        assert code in (1, 2) and words in error
    code, error = mistake(capsys, "mid_train", *(flag for flag in flags if "source_tag" not in flag))
    assert code == 2 and "name it by --source_tag" in error
    refused(capsys, ("mid_train", *cpu, "--num_epochs=2"), "--num_epochs is for text: add --data", code=2)

    # A stage extends the context further, by the same method.
    sizes = ("--max_seq_len=256", "--num_iterations=1", "--eval_tokens=512")
    call("mid_train", *cpu, "--source_tag=d1-continued", "--tasks=addition", *sizes)
    model, _, meta = load_model("mid", "cpu")
    assert model.config.sequence_len == 256 and model.config.rope_scaling.factor == 4
    assert meta["pretraining"]["context"] == 256


def test_the_first_weights_are_evaluated_and_a_stop_there_costs_nothing(base, tokenizer, data, monkeypatch):
    flags = (*TINY, data, "--num_iterations=3", "--eval_every=0")
    call("base_train", *flags)
    straight = metrics(base, "base")
    bits = [sorted(key for key in line if "bpb" in key and "demo" not in key and "txt" not in key) for line in straight]
    assert bits == [["val_bpb_before"], [], ["val_bpb"]]
    assert straight[0]["val_bpb_before"] > straight[-1]["val_bpb"]
    facts = json.loads((base / "runs/base/d1/run.json").read_text())
    assert (facts["context"], facts["steps"]) == (64, 3) and facts["parameters"] > 1000
    assert facts["versions"]["torch"] and facts["commit"]

    def stopped(*arguments: Any, should_stop: Any, **further: Any) -> float:
        should_stop.__self__.stop.signal = signal.SIGTERM  # as if one had come
        return bits_per_byte(*arguments, should_stop=should_stop, **further)

    with monkeypatch.context() as patch:
        patch.setattr("nanochat.bpb.bits_per_byte", stopped)
        with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
            call("base_train", *flags, "--model_tag=two")
    call("base_train", *flags, "--model_tag=two", "--resume")
    assert losses(base, "base", "two") == losses(base, "base") and sha256(base, "base", 3, tag="two") == sha256(
        base, "base", 3
    )
    assert metrics(base, "base", "two")[0]["val_bpb_before"] == straight[0]["val_bpb_before"]
    commands = [json.loads(line) for line in (base / "runs/commands.jsonl").read_text().splitlines()]
    assert [(one["first_step"], one["last_step"]) for one in commands] == [(0, 3), (0, 0), (0, 3)]


def test_a_run_begun_anew_keeps_the_earlier_one(base, tokenizer, capsys, monkeypatch):
    call("base_train", *TINY, "--num_iterations=2", "--seed=1")
    before = (base / "runs/base/d1/metrics.jsonl").read_text()
    sha = sha256(base, "base", 2)
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    for flag in ("--track=nonsense", "--track=wandb", "--model_tag="):  # a start that fails moves nothing
        code, _ = mistake(capsys, "base_train", *TINY, "--num_iterations=2", flag)
        assert code == 1 and sha256(base, "base", 2) == sha
    call("base_train", *TINY, "--num_iterations=2")
    assert (base / "runs/base/d1.1/metrics.jsonl").read_text() == before
    assert (base / "checkpoints/base/d1.1/step_000002/model.safetensors").is_file()
    assert sha256(base, "base", 2) != sha


def test_resume_refuses_other_data_another_order_batch_or_model(base, tokenizer, capsys):
    call("base_train", *TINY, "--num_iterations=2", "--model_tag=d1")
    for flag, words in (
        ("--data=pydoc", "--data demo, not pydoc"),
        ("--seed=4", "--seed 0, not 4"),
        ("--optimizer=adamw", "--optimizer muon, not adamw"),
        ("--total_batch_size=512", "--total_batch_size (tokens a step) 256, not 512"),
        ("--depth=2", "--depth 1, not 2"),
        ("--max_seq_len=32", "--max_seq_len 64, not 32"),
        ("--head_dim=64", "--head_dim 32, not 64"),
        ("--window_pattern=SL", "--window_pattern L, not SL"),
    ):
        command = ("base_train", *TINY, "--num_iterations=4", "--model_tag=d1", "--resume", flag)
        refused(capsys, command, "--resume", words, "use its flags, or another --model_tag")


def test_resume_reports_what_it_changes(base, tokenizer, capsys):
    call("base_train", *TINY, "--num_iterations=2", "--matrix_lr=0.02")
    call("base_train", *TINY, "--num_iterations=2", "--matrix_lr=0.02", "--resume")
    assert "other settings" not in capsys.readouterr().out
    changes = ("--matrix_lr=0.01", "--warmdown_fraction=0.5", "--num_iterations=3", "--eval_every=7")
    call("base_train", *TINY, *changes, "--resume")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "other settings" in line]
    for change in ("matrix_lr 0.02 -> 0.01", "warmdown_fraction 0.65 -> 0.5", "num_iterations 2 -> 3"):
        assert change in line


@pytest.mark.slow
def test_the_mask_between_documents_holds_in_every_stage(base, monkeypatch, capsys):
    call("tok_train", "--max_chars=100000", "--vocab_size=300")
    long_rows = ("--max_seq_len=256", "--device_batch_size=2", "--total_batch_size=512")  # of several documents
    flags = (*TINY[:2], *long_rows, *TINY[5:], "--num_iterations=6", "--save_every=3")
    for mask in ("on", "off"):
        call("base_train", *flags, f"--model_tag={mask}", f"--document_mask={mask}")
    assert metrics(base, "base", "on")[-1]["loss"] != metrics(base, "base", "off")[-1]["loss"]
    assert metrics(base, "base", "on")[-1]["val_bpb"] != metrics(base, "base", "off")[-1]["val_bpb"]
    # Resumed in its middle, a run ends as it did.
    straight = losses(base, "base", "on")
    shutil.rmtree(base / "checkpoints/base/on/step_000006")
    call("base_train", *flags, "--model_tag=on", "--document_mask=on", "--resume")
    assert losses(base, "base", "on") == straight
    code, error = mistake(capsys, "base_train", *flags, "--model_tag=on", "--document_mask=off", "--resume")
    assert code == 1 and "--document_mask on, not off" in error

    asked = []
    segments_of = loader.segments_of
    monkeypatch.setattr(loader, "segments_of", lambda *inputs: asked.append(1) or segments_of(*inputs))
    sizes = ("--eval_tokens=256", "--device_batch_size=2", "--dtype=float32", "--device=cpu")
    mid = (*sizes, "--total_batch_size=512", "--tasks=addition,stories", "--model_tag=mid")
    for mask in ("off", "on"):
        call("base_eval", *sizes, "--samples=0", "--stories=0", f"--model_tag={mask}")
        results = json.loads((base / f"runs/base/{mask}/eval.json").read_text())
        assert results["val_bpb"] == pytest.approx(metrics(base, "base", mask)[-1]["val_bpb"], rel=1e-6)
        asked.clear()
        call("mid_train", *mid, f"--source_tag={mask}", "--num_iterations=2")
        assert bool(asked) == (mask == "on")
    # The base model may have been trained anew since: mid-training continues only as it began.
    (base / "checkpoints/base/on").rename(base / "checkpoints/base/kept")
    (base / "checkpoints/base/off").rename(base / "checkpoints/base/on")
    code, error = mistake(capsys, "mid_train", *mid, "--source_tag=on", "--num_iterations=4", "--resume")
    assert code == 1 and "--document_mask True, not False" in error


def test_flags_that_resume_refuses():
    """All that decides what a step computes, and what the model is, by the names of the flags."""
    experts = {"experts", "experts_per_token", "expert_width", "shared_experts"}
    model = {"depth", "head_dim", "max_seq_len", "window_pattern", "mlp", "document_mask", *experts}
    frozen = {name: set(cli.frozen_flags(importlib.import_module(f"scripts.{name}").Config)) for name in STAGE_SCRIPTS}
    assert frozen["base_train"] == {"seed", "optimizer_dtype", "data", "val_data", "shards", "optimizer", *model}
    adapters = {f"lora_{name}" for name in ("rank", "alpha", "dropout", "targets", "base")}
    stage = {"seed", "optimizer_dtype", "tasks", "max_seq_len", "rope_scaling", *adapters}
    assert frozen["mid_train"] == stage | {"data", "val_data", "shards"}
    assert frozen["chat_sft"] == stage | {"target_examples_per_step", "val_share"}
    losses = {"loss", "beta", "gamma", "label_smoothing", "sft_weight"}
    assert frozen["chat_dpo"] == frozen["chat_sft"] | losses
    samples = {"examples_per_step", "num_samples", "max_tokens", "temperature", "top_k", "reward"}
    assert frozen["chat_rl"] == stage | samples | {
        *("loss", "kl", "kl_in", "clip_low", "clip_high", "importance_cap", "refills", "teacher"),
        "staleness",
    }


def poison(monkeypatch, *bad_steps: int) -> None:
    """The first of two micro-batches of these steps has a loss that is not finite."""
    calls = iter(range(10**6))

    def poisoned(model, batch):
        loss, targets = next_token_loss(model, batch)
        return loss * (math.nan if next(calls) in [2 * step for step in bad_steps] else 1.0), targets

    monkeypatch.setattr(train, "next_token_loss", poisoned)


def test_a_run_that_diverges_from_its_start_fails_and_saves_nothing(base, tokenizer, capsys, monkeypatch):
    poison(monkeypatch, *range(8))
    code, err = mistake(capsys, "base_train", *TINY, "--num_iterations=8")
    assert code == 1 and re.search("good step: none, newest checkpoint: none; .*rates\n", err)
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
    last_step = base / "checkpoints/base/d1/step_000004"
    assert code == 1
    assert re.search(f"good step: 3, newest checkpoint: {last_step}; .*--resume\n", err)
    assert steps_of(last_step.parent) == [4]


def test_a_diverged_run_names_an_earlier_checkpoint(base, tokenizer, capsys, monkeypatch):
    """The step after the newest checkpoint was bad, so its weights are: to resume it would end in the same way."""
    flags = (*TINY, "--log_every=10", "--num_iterations=20", "--save_every=2")
    folder = base / "checkpoints/base/d1"
    poison(monkeypatch, 5, 6, 7)  # step 4 is good and step 6 is saved behind the first bad one
    code, err = mistake(capsys, "base_train", *flags)
    last = steps_of(folder)[-1]
    assert code == 1 and last > 4
    names = f"newest checkpoint: {folder}/step_{last:06d}, which diverges: move all after {folder}/step_000004 away; "
    assert names in err and err.endswith("lower the learning rates, then --resume\n")

    # The step after the one that was resumed is bad again: so are its weights.
    for step in steps_of(folder):
        if step > 4:
            shutil.rmtree(folder / f"step_{step:06d}")
    poison(monkeypatch, *range(0, 8))
    advice = f", which diverges: move all after {folder}/step_000002 away; "
    refused(capsys, ("base_train", *flags, "--resume"), advice)

    # The second step after it is bad again, and nothing was saved since.
    for step in steps_of(folder):
        if step > 4:
            shutil.rmtree(folder / f"step_{step:06d}")
    poison(monkeypatch, *range(1, 20))
    refused(capsys, ("base_train", *flags[:-1], "--save_every=0", "--resume"), advice)


def test_resume_without_a_checkpoint_begins_and_names_other_tags(base, tokenizer, capsys):
    call("base_train", *TINY, "--num_iterations=2", "--model_tag=mine", "--resume")
    out, err = capsys.readouterr()
    assert "starting from the beginning" in out and err == "" and len(losses(base, "base", "mine")) == 2
    call("base_train", *TINY, "--num_iterations=2", "--model_tag=mime", "--resume")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: --resume") and "base/mime" in line and line.endswith(" mine")


def test_a_save_that_fails_on_the_way_is_reported_and_the_run_goes_on(base, tokenizer, capsys, monkeypatch):
    save = saver.save

    def fails_once(folder, step, *arguments, **options):
        if step == 2:
            raise cli.UserError("the disk is full")
        return save(folder, step, *arguments, **options)

    monkeypatch.setattr(saver, "save", fails_once)
    call("base_train", *TINY, "--num_iterations=6", "--save_every=2")
    assert "warning: step 2 was not saved: the disk is full" in capsys.readouterr().err
    assert steps_of(base / "checkpoints/base/d1") == [4, 6] and len(losses(base, "base")) == 6


def saved_in_time(device: Device, flags: tuple[str, ...], room: int = 1 << 50) -> list[int]:
    """The steps that a run saves whose ten minutes are over at every step, by the clock of rank 0."""
    saved = []
    save = saver.save

    def noted(folder: Path, step: int, *arguments: Any, **options: Any) -> Path:
        saved.append(step)
        return save(folder, step, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "SAVE_EVERY_SECONDS", 0.0 if device.is_main else 1e9)
        patch.setattr(saver, "save", noted)
        patch.setattr(saver, "free_bytes", lambda _: room)
        command_on_a_rank(device, "base_train", flags)
    return saved


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ten_minutes_of_training_are_saved_and_the_newest_stays(base, tokenizer, ranks):
    flags = (*TINY, "--num_iterations=6")
    run_command("base_train", *flags, "--save_every=0", ranks=ranks)
    straight = sha256(base, "base", 6)
    assert run_ranks(saved_in_time, flags, world_size=ranks) == [[1, 2, 3, 4, 5, 6]] * ranks
    assert steps_of(base / "checkpoints/base/d1") == [6] and sha256(base, "base", 6) == straight
    assert run_ranks(saved_in_time, (*flags, "--save_every=4"), world_size=ranks) == [[4, 6]] * ranks
    assert steps_of(base / "checkpoints/base/d1") == [4, 6]
    if ranks == 1:
        assert run_ranks(saved_in_time, (*flags, "--log_every=100"), world_size=1) == [[1, 2, 3, 4, 5, 6]]
        assert run_ranks(saved_in_time, (*flags, "--keep_last=2"), world_size=1) == [[1, 2, 3, 4, 5, 6]]
        assert steps_of(base / "checkpoints/base/d1") == [5, 6]
        longer = (*TINY, "--num_iterations=8", "--resume")
        assert run_ranks(saved_in_time, longer, world_size=1) == [[7, 8]]
        assert steps_of(base / "checkpoints/base/d1") == [5, 6, 8]  # step 7 was replaced, the one resumed from is kept
        assert run_ranks(saved_in_time, longer, world_size=1) == [[]]  # the end is saved already


@pytest.mark.parametrize(
    ("step", "saved", "step_seconds", "planned"),
    [(10, None, 2.0, 300), (400, None, 2.0, 400), (410, 400, 2.0, 700), (400, 400, 1200.0, 401)],
)
def test_the_next_save_is_ten_minutes_after_the_last_one(step, saved, step_seconds, planned):
    run: Any = SimpleNamespace(
        config=TrainFlags(), device=cpu_device(), folder=Path("/"), checkpoint_bytes=0, progress=Progress(step),
        saved_step=saved, step_seconds=step_seconds, _saved_in_time=None,
    )  # fmt: skip
    loop.Run._plan_save(run)
    assert run.next_save == planned


def test_a_save_in_time_leaves_room_for_the_last_one(base, tokenizer):
    flags = (*TINY, "--num_iterations=3")
    with pytest.raises(AssertionError, match="a checkpoint needs") as caught:
        run_ranks(saved_in_time, flags, 5000, world_size=1)
    needed = int(re.findall(r"a checkpoint needs (\S+) bytes", str(caught.value))[0].replace(",", ""))
    assert run_ranks(saved_in_time, flags, int(1.5 * needed), world_size=1) == [[3]]
    assert run_ranks(saved_in_time, flags, int(2.5 * needed), world_size=1) == [[1, 2, 3]]


def changed_text(device: Device, text: str, flags: tuple[str, ...]) -> str:
    """What a run prints whose text becomes zeros after its third step."""
    step = train.train_step
    steps = 0

    def noted(*arguments: Any, **options: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 3 and device.is_main:
            Path(text).write_bytes(bytes(Path(text).stat().st_size))
        return step(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "train_step", noted)
        with pytest.raises(RuntimeError) as failed:
            command_on_a_rank(device, "base_train", flags)
    return str(failed.value)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_text_that_changes_is_not_learned(base, tokenizer, tmp_path, ranks):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"The boat number {n} sails to island {n * 7 % 90}.\n\n" for n in range(3000)))
    content = text.read_bytes()
    flags = (
        *TINY,
        f"--data={text}",
        "--num_iterations=80",
        "--save_every=0",
        "--total_batch_size=512",
    )
    run_command("base_train", *flags, ranks=ranks)
    straight = sha256(base, "base", 80)
    shown = run_ranks(changed_text, str(text), flags, world_size=ranks)
    (step,) = steps_of(base / "checkpoints/base/d1")
    assert 3 <= step < 60 and f"{text} has changed since it was opened" in "".join(shown)
    assert any(f"saved {base}/checkpoints/base/d1/step_{step:06d}" in one for one in shown)
    text.write_bytes(content)
    run_command("base_train", *flags, "--resume", ranks=ranks)
    assert sha256(base, "base", 80) == straight


def test_tasks_of_all_stages_are_looked_up_before_the_first(base, monkeypatch, capsys):
    requested = set()

    def open_task(spec, split, reading):
        requested.add((spec.name, split, reading.hub))

    monkeypatch.setattr("nanochat.tasks.flag.open_task", open_task)
    call("fetch", "--data=fineweb-edu-chinese", "--hub=modelscope", "--eval_tasks=mmlu,gsm8k")
    learned = {
        (name, split) for name in ("smoltalk_zh", "gsm8k", "addition", "identity") for split in ("train", "test")
    }
    assert requested == {(*one, "modelscope") for one in {*learned, ("mmlu", "test")}}
    monkeypatch.undo()
    refused(capsys, ("fetch", "--hub=modelscope", "--tasks=smoltalk"), "no copy of smoltalk is known on modelscope")


@pytest.mark.slow
def test_the_speedrun_runs_and_goes_on_where_it_stopped(tmp_path):
    """The README's first command, in its smallest profile, on a file of its own: killed in a stage and started again,
    with nothing left to do in the one before. test_speedrun.py has its flags and what fails."""
    venv = Path(sys.prefix)
    if not (venv / "nanochat_setup.txt").is_file():
        pytest.skip(f"{venv} was not made by setup_ascend.sh")
    text = tmp_path / "my text.txt"
    text.write_text("".join(f"The boat number {n} sails to island {n * 7 % 90}.\n\n" for n in range(4000)))
    environment = {**os.environ, "NANOCHAT_BASE_DIR": str(tmp_path / "base"), "VENV": str(venv), "OMP_NUM_THREADS": "1"}
    environment["NANOCHAT_CHAT_EVAL"] = "--max_examples=2"
    command = ["bash", str(ROOT / "speedrun_npu.sh"), "--profile", "smoke", "--rehearsal", "on"]
    said = ""
    killed = subprocess.Popen(
        [*command, "--data", "my text.txt"], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert killed.stdout is not None
    for line in killed.stdout:
        said += line
        if line.startswith("saved ") and line.endswith("mid/smoke/step_000005\n"):
            break
    # The session: a stage is a group of its own.
    subprocess.run(["pkill", "-KILL", "-s", str(killed.pid)], check=True)
    killed.communicate()
    (folder,) = (tmp_path / "base" / "speedrun").iterdir()
    pretrained = folder / "checkpoints/base/smoke/step_000060/model.safetensors"
    weights = pretrained.read_bytes()
    last = subprocess.run(
        [*command, "--data=my text.txt"], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert last.returncode == 0
    # Its short rows cut conversations, which is said.
    assert all(line.startswith("warning: learned: ") for line in last.stderr.splitlines()), last.stderr
    resumed = re.findall(r"^resumed from .*checkpoints/(\S+)$", last.stdout, re.MULTILINE)
    assert resumed == ["base/smoke/step_000060", "mid/smoke/step_000005"]
    assert said.count("starting from the beginning") == last.stdout.count("starting from the beginning") == 2
    # It was rehearsed once, before the run began, in a folder of its own.
    assert said.count("== rehearsal") == 1 and "== rehearsal" not in last.stdout
    assert said.index("  chat_cli ") < said.index("== tokenizer")
    assert [path.name for path in folder.glob("rehearsal*")] == ["rehearsal_passed.txt"]
    assert steps_of(folder / "checkpoints/base/smoke") == [30, 60]
    assert (folder / "checkpoints/rl/smoke/step_000002/model.safetensors").is_file()
    assert pretrained.read_bytes() == weights
    for stage in ("sft", "rl"):
        tasks = json.loads((folder / f"runs/{stage}/smoke/chat_eval.json").read_text())["tasks"]
        assert {task["total"] for task in tasks.values()} == {2} and "stories" in tasks
    assert "</html>" in (folder / "runs/report/smoke/report.html").read_text()
    *_, report, _, _, exported, page, terminal = last.stdout.splitlines()
    assert report == f"The report:  {folder}/runs/report/smoke/report.html"
    assert exported.split("=") == ["  export NANOCHAT_BASE_DIR", str(folder)]
    assert page == "  python -m scripts.chat_web    # the page, at http://127.0.0.1:8000"
    assert terminal.startswith("  python -m scripts.chat_cli ")
    assert len(list((tmp_path / "base" / "speedrun").iterdir())) == 1  # "--data x" and "--data=x" are the same


@pytest.mark.slow
def test_one_process_and_two_give_the_same_losses(base, tokenizer):
    """In fp32 on 1 and on 2 ranks; then 1 -> 2 -> 1 ranks through two resumes. Three layers at the rule's rates: where
    rounding is amplified, it shows here first. test_parallel.py has 20 steps."""
    flags = [flag for flag in TINY if not flag.startswith("--depth")]
    flags += ["--depth=3", "--window_pattern=SL", "--seed=1", "--model_tag=d1"]
    flags += ["--num_iterations=12", "--save_every=4", "--eval_every=6"]
    call("base_train", *flags)
    printed = run_command("base_train", *flags, "--model_tag=two")
    assert printed.count("device: 2 x ") == 1  # only rank 0 prints
    alone, together = metrics(base, "base"), metrics(base, "base", "two")
    assert [line["loss"] for line in together] == pytest.approx([line["loss"] for line in alone], rel=1e-5)
    for one, two in zip(alone, together, strict=True):
        assert two.get("val_bpb", 0) == pytest.approx(one.get("val_bpb", 0), rel=1e-5)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
        assert two["tokens"] == one["tokens"]

    forget_after(base, "base", 4)
    run_command("base_train", *flags, "--resume")
    assert (base / "checkpoints/base/d1/step_000008/training.rank1.safetensors").is_file()
    forget_after(base, "base", 8)
    call("base_train", *flags, "--resume")
    assert [line["step"] for line in metrics(base, "base")] == list(range(12))
    assert losses(base, "base") == pytest.approx([line["loss"] for line in alone], rel=1e-5)


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("argv", "next_step"),
    [
        (["--data=nosuch"], "--data nosuch: no such file or folder"),
        (["--data=pydok"], "did you mean pydoc?"),
        (["--total_batch_size=300"], "use 256, or another --device_batch_size"),
        (["--total_batch_size=1"], "use 128"),
        (["--gradient_accumulation_steps=3"], "is not 3 x 128 tokens .* use 384"),
        (["--depth=0"], "--depth 0: at least 1"),
        (["--max_seq_len=-1"], "--max_seq_len -1: at least 1"),
        (["--learning_rate=1e-5"], "Unrecognized options: --learning_rate=1e-5"),
        (["--device_batch_size=0"], "--device_batch_size 0: at least 1"),
        (["--num_iterations=0"], "--num_iterations 0: at least 1"),
        (["--gradient_accumulation_steps=0"], "--gradient_accumulation_steps 0: at least 1"),
        (["--depth=1000000"], "--depth 1000000: at most 1,000"),
        (["--head_dim=33"], "--head_dim 33 is odd.* use an even number, such as 34"),
        (["--shards=2"], "--shards 2: --data demo has no shards"),
        (["--model_tag="], "--model_tag '' is not a plain folder name"),
        (["--window_pattern=SXL"], "--window_pattern .SXL.: letters S"),
        (["--window_pattern="], "--window_pattern .*letters S"),
        (["--target_param_data_ratio=0"], "--target_param_data_ratio"),
        (["--target_param_data_ratio=nan"], "--target_param_data_ratio"),
        (["--warmdown_fraction=nan"], "--warmdown_fraction"),
        (["--matrix_lr=inf"], "--matrix_lr"),
        (["--seed=99999999999999999999"], "--seed"),
        (["--dataloader_num_workers=100000"], "--dataloader_num_workers"),
        (["--track=nonsense"], "--track 'nonsense' is unknown"),
        (["--data="], "--data is empty"),
        (["--data=demo:0.7,pydok:0.3"], "--data pydok: no such file.*did you mean pydoc"),
        (["--data=demo:much,pydoc"], "--data demo:much: .*the weight 'much' is not a number above 0"),
        (["--data=demo:1,demo:2"], "names demo twice"),
        (["--data=demo,,pydoc:-1"], "the weight '-1'"),
        (["--eval_every=-1"], "--eval_every -1: at least 0"),
        (["--save_every=-1"], "--save_every -1: at least 0"),
        (["--seed=-1"], "--seed"),
        (["--device=gpu"], "--device 'gpu': one of auto, npu, cuda, cpu"),
        (["--model_tag=../x"], "--model_tag '../x' is not a plain folder name"),
        (["--val_data=nosuch.txt"], "--val_data nosuch.txt: no such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_flags_that_cannot_work(base, tokenizer, capsys, argv, next_step):
    code, err = mistake(capsys, "base_train", *TINY, "--num_iterations=1", *argv)
    assert code in (1, 2)
    assert re.search(next_step, err)
    assert not (base / "checkpoints").exists()


def test_a_shape_that_bench_cannot_build(capsys):
    refused(capsys, ("bench", "train", "--device=cpu", "--head_dim=31"), "--head_dim 31 is odd", "such as 32")


@pytest.mark.parametrize(("kind", "sizes"), [("cpu", (4, 8192, 512, 8)), ("cuda", (12, 32768, 2048, 16))])
def test_bench_without_flags_fits_the_device(monkeypatch, kind: str, sizes: tuple[int, ...]):
    """On a card depth 4 and rows of 512 tokens measure the launches. A flag counts on every device."""
    monkeypatch.setattr("nanochat.device.kind_of", lambda requested: kind)
    bench = importlib.import_module("scripts.bench")
    measured = []
    monkeypatch.setattr(bench, "train", measured.append)
    for flags in ([], ["--depth=3", "--max_seq_len=64"]):
        bench.main(cli.parse(bench.Config, ["train", *flags]))
    ours, given = ((one.depth, one.vocab_size, one.max_seq_len, one.device_batch_size) for one in measured)
    assert ours == sizes and given == (3, sizes[1], 64, sizes[3])


def test_a_vocabulary_beyond_all_bounds(base, capsys):
    code, err = mistake(capsys, "tok_train", "--vocab_size=99999999999999", "--max_chars=100000")
    assert code == 2 and "--vocab_size 99999999999999: at most 10,000,000" in err


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_example_is_a_paragraph(script):
    """--help joins the lines of a paragraph."""
    docstring = importlib.import_module(f"scripts.{script}").__doc__
    for paragraph in docstring.split("\n\n"):
        commands = re.findall(r"(?m)^(?:echo .*|[A-Z_]+=.*)?(?:python|torchrun|gunicorn) ", paragraph)
        assert not commands or paragraph.count("\n") == paragraph.endswith("\n"), paragraph


@pytest.mark.parametrize("script", ["chat_cli", "base_train", "chat_web", "report"])
def test_outside_of_the_environment_one_line_says_how_to_enter_it(script, tmp_path):
    for made in (False, True):
        project = tmp_path / f"my project {made}"
        project.mkdir()
        shutil.copytree(ROOT / "scripts", project / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        if made:
            (project / ".venv/bin").mkdir(parents=True)
            (project / ".venv/bin/activate").touch()
        command = [sys.executable, "-S", "-m", f"scripts.{script}", "--help"]  # -S: without installed packages
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        result = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=60)
        assert result.returncode == 1 and result.stderr.count("\n") == 1 and not result.stdout
        assert result.stderr.startswith(f"error: {sys.executable} does not have the packages of this project: run ")
        assert f"`source '{project}/.venv/bin/activate'`" in result.stderr
        assert ("`bash setup_ascend.sh`, then" in result.stderr) == (not made)


@pytest.mark.parametrize("script", STAGE_SCRIPTS)
def test_the_help_of_a_trainer_has_every_flag_with_its_own_comment(script, capsys):
    config = importlib.import_module(f"scripts.{script}").Config
    with pytest.raises(SystemExit) as leaving:
        cli.parse(config, ["--help"])
    assert leaving.value.code == 0
    head, _, text = capsys.readouterr().out.partition("--help ")
    assert f"-m scripts.{script} --" in head
    flags = re.findall(r"(?m)^\W --(\w+)", text)
    assert sorted(flags) == sorted(field.name for field in dataclasses.fields(config))
    # tyro takes the lines above a field as its help: the heading of a section must not be one of them.
    assert not re.search(r"(?m)^(\W*--\w+ \S+|\W {2,})(data|batch|loss|optimizer|samples|model) (grpo|[A-Z])", text)


def test_a_run_of_days_begins_with_a_warning(base, tokenizer, capsys, monkeypatch):
    call("base_train", *TINY, "--num_iterations=1")
    out, err = capsys.readouterr()
    assert "time: about" not in out and err == ""  # a run that is over after its first steps
    monkeypatch.setattr(speed, "product_flops", lambda device: 1e3)
    call("base_train", *TINY, "--num_iterations=2")
    err = capsys.readouterr().err
    assert re.search(r"^warning: this run takes about \d+d\d\dh here, .* lower --num_iterations", err)
    monkeypatch.setattr(speed, "product_flops", lambda device: None)  # an accelerator whose peak is unknown
    call("base_train", *TINY, "--num_iterations=1")
    assert capsys.readouterr().err == ""


def test_the_time_of_a_run_is_that_of_real_steps(base, tokenizer, capsys, monkeypatch):
    """A clock that counts: a step takes 10 s, the first one 1,000 s, an evaluation 500 s. The third of 12 is timed."""
    now = 0.0
    step = train.train_step

    def slow_step(*arguments, **flags):
        nonlocal now
        now += 10 if now else 1000
        return step(*arguments, **flags)

    evaluate = bpb.bits_per_byte

    def slow_evaluation(*arguments, **flags):
        nonlocal now
        now += 500 if now else 0
        return evaluate(*arguments, **flags)

    monkeypatch.setattr(speed, "product_flops", lambda device: None)
    monkeypatch.setattr(train, "train_step", slow_step)
    monkeypatch.setattr(bpb, "bits_per_byte", slow_evaluation)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    call("base_train", *TINY, "--num_iterations=12", "--eval_every=2")
    out = capsys.readouterr().out
    assert out.count("time: about") == 1 and "time: about 1m30s more, 10.00 s a step" in out


def test_a_name_for_a_tracker_that_is_not_there_warns(base, tokenizer, capsys):
    call("base_train", *TINY, "--num_iterations=1", "--run=mine")
    out, err = capsys.readouterr()
    assert "warning: --run mine names the run at a tracker, and no tracker is set: add --track" in err
    assert "done: 1 step, " in out and "horizon: 1 step of" in out


@pytest.mark.parametrize("kind", ["npu", "cuda"])
def test_a_device_that_is_not_here(base, tokenizer, capsys, kind):
    if devices._available(kind):
        pytest.skip(f"this machine has {kind}")
    code, err = mistake(capsys, "base_train", *TINY, f"--device={kind}")
    assert code == 1
    assert f"--device {kind}: none found here" in err and "check_npu.py" in err and "--device cpu" in err


@pytest.mark.parametrize("script", SCRIPTS)
def test_flags_that_do_not_exist(capsys, script):
    refused(capsys, (script, *REQUIRED_WORDS.get(script, []), "--dpeth=4"), "--dpeth", "--help`", code=2)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("base_train", ("there is no tokenizer", "`python -m scripts.tok_train`")),
        ("tok_eval", ("there is no tokenizer", "`python -m scripts.tok_train`")),
        # Nothing is trained: the one command that trains all stages.
        ("chat_cli Hello", ("no base checkpoint", "`bash speedrun.sh`", "`python -m scripts.base_train`")),
        ("chat_cli Hello --source=sft", ("no sft checkpoint", "`bash speedrun.sh`", "chat_sft")),
        *(
            (f"{script} {flags}", words)
            for script in ("base_eval", "chat_cli")
            for flags, words in (
                ("", ("`python -m scripts.base_train`",)),
                ("--model_tag=d4", ("`python -m scripts.base_train`",)),
                ("--source=base/d4/step_3", ("`python -m scripts.base_train`",)),
                ("--source=sft", ("chat_sft",)),
                ("--source=nowhere", ("neither a stage",)),
            )
        ),
    ],
)
def test_what_is_missing_is_named_with_its_command(base, capsys, command, words):
    refused(capsys, command.split(), *words)


def test_a_damaged_tokenizer(base, tokenizer, capsys):
    path = base / "tokenizer/tokenizer.json"
    path.write_text(path.read_text()[:-9])
    refused(capsys, ("base_train", *TINY), "cannot be used", "`python -m scripts.tok_train`")


@pytest.mark.parametrize("script", ["tok_train", "base_train"])
def test_data_without_text(base, tokenizer, tmp_path, capsys, script):
    (tmp_path / "no_text.jsonl").write_text('{"content": "x"}\n' * 50)
    refused(capsys, (script, f"--data={tmp_path / 'no_text.jsonl'}"), 'line 1 has no "text"')


def test_what_does_not_fit_a_trained_model(base, tokenizer, capsys, tmp_path, trained_tokenizer):
    call("base_train", *TINY, "--num_iterations=2", "--save_every=1")
    long = "many words " * 60
    for argv, words in (
        (["-p", long], r"the prompt has \d+ tokens, the model's context 64: shorten the prompt"),
        (["-p", "x", "--temperature=-1"], "--temperature"),
        (["-p", "x", "--temperature=nan"], "--temperature"),
        (["-p", "x", "--top_k=-1"], "--top_k"),
        (["-p", "x", "--top_p=0"], "--top_p"),
        (["-p", "x", "--top_p=1.5"], "--top_p"),
        (["-p", "x", "--source=base/d1/step_7"], r"no step 7 .*\[1, 2\]"),
        (["-p", "x", "--model_tag=../base/d1"], "not a plain folder name"),
    ):
        code, err = mistake(capsys, "chat_cli", "--device=cpu", *argv)
        assert code in (1, 2)
        assert re.search(words, err)
    code, err = mistake(capsys, "base_eval", "--device=cpu", "--eval_tokens=64", "--samples=1", f"--prompt={long}")
    assert code == 1
    assert "shorten the prompt" in err
    for flag in ("eval_tokens", "device_batch_size", "max_tokens"):
        refused(capsys, ("base_eval", "--device=cpu", f"--{flag}=0"), f"--{flag} 0: at least 1", code=2)

    refused(capsys, ("tok_train", "--max_chars=20000", "--vocab_size=280"), "delete this one")
    assert Tokenizer.load(base / "tokenizer").fingerprint() == Tokenizer.load(trained_tokenizer).fingerprint()
    shutil.rmtree(base / "tokenizer")
    call("tok_train", "--max_chars=20000", "--vocab_size=320")
    refused(capsys, ("base_train", *TINY, "--num_iterations=4", "--resume"), "--resume")


def test_a_disk_that_is_too_small_is_named_before_the_first_step(base, tokenizer, capsys, monkeypatch):
    """With room for one checkpoint of many there is a warning; without room for one, an error."""
    monkeypatch.setattr("nanochat.train.train_step", lambda *_, **__: pytest.fail("a step was taken"))
    usage = shutil.disk_usage(base)
    flags = (*TINY, "--num_iterations=7", "--save_every=2")

    def error_with(free: int, *more: str) -> str:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
        with pytest.raises(BaseException) as caught:
            call("base_train", *flags, *more)
        assert isinstance(caught.value, SystemExit if free < 10**6 else pytest.fail.Exception)
        return capsys.readouterr().err

    error = error_with(5000)
    (needed,) = re.findall(r"error: the disk is full: a checkpoint needs (\S+) bytes, .* has 5,000 free", error)
    needed = int(needed.replace(",", ""))
    assert needed > 10**6 and not (base / "runs").exists()
    assert f"4 checkpoints of {needed:,} bytes will not fit" in error_with(needed * 3)
    assert f"2 checkpoints of {needed:,} bytes will not fit" in error_with(int(needed * 1.5), "--keep_last=1")
    assert "will not fit" not in error_with(needed * 3, "--keep_last=1") + error_with(needed * 5)


def test_what_an_owner_of_a_card_sends_in_carries_its_versions(tmp_path: Path, monkeypatch) -> None:
    """One file says on what a speed was measured."""
    monkeypatch.setattr(importlib.import_module("scripts.bench"), "PRODUCT_FLOPS", 1e8)
    flags = "--device=cpu --depth=1 --head_dim=32 --max_seq_len=16 --vocab_size=64 --device_batch_size=1 --steps=1"
    file = tmp_path / "bench.json"
    call("bench", "train", *flags.split(), "--compile=off", f"--json={file}")
    sent = json.loads(file.read_text())
    assert sent["versions"]["torch"] == torch.__version__ and sent["versions"]["python"] == platform.python_version()
    assert sent["device"].startswith("1 x ") and sent["kernels"].startswith("cpu")
    assert sent["config"]["depth"] == 1 and sent["tokens_per_second"] > 0 and sent["peak_memory_bytes"] > 0


# ---------------------------------------------------------------------- your own


@pytest.mark.slow
def test_the_five_commands_of_make_it_yours_work(base, tmp_path, monkeypatch, capsys):
    """A text of one's own becomes a model with another name; what chat_cli's /save writes is in test_chat_cli.py."""
    sections = [(ROOT / f"docs/guide{end}.md").read_text().split("\n## ") for end in ("", ".zh")]
    (english,) = [part for part in sections[0] if part.startswith("Make it yours")]
    commands = re.findall(r"^python -m scripts\.(\w+) (.*)$", english, re.MULTILINE)
    assert len(commands) == 5 and any(all(flags in part for _, flags in commands) for part in sections[1])
    monkeypatch.chdir(tmp_path)
    Path("my_texts.txt").write_text("".join(f"Once upon a time there was boat {n}.\n" for n in range(300)))
    turns = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "I am Ada."}]
    Path("chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 2)
    sft = ("--num_iterations=2", "--target_examples_per_step=2", "--device_batch_size=2", "--eval_examples=2")
    tiny = {"tok_train": ("--vocab_size=320",), "base_train": (*TINY, "--num_iterations=2"), "chat_sft": sft}
    tiny["chat_cli"] = ("--max_tokens=4",)
    for script, flags in commands:
        monkeypatch.setattr(sys, "stdin", io.StringIO("Who are you?"))
        call(script, *shlex.split(flags), *tiny[script])
    assert "done: 2 steps" in capsys.readouterr().out
    assert (base / "checkpoints/sft/ada/step_000002/meta.json").is_file()
