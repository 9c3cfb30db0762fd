"""The commands: help at once, the whole chain, runs begun anew or resumed with other flags, saves in time, speed.

Most tests run a script's `main` in this process, through the same `run` as on the command line; those marked
slow start real processes. Mistakes are in tests/promises (P5).
"""

import contextlib
import importlib
import io
import json
import math
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runs import (  # noqa: F401 (the lower-case ones that are not called are fixtures)
    DPO,
    RL,
    ROOT,
    SFT,
    STAGE_SCRIPTS,
    TINY,
    base,
    call,
    copied_speedrun,
    losses,
    metrics,
    mistake,
    pretrained,
    process,
    refused,
    sha256,
    start,
    step_folder,
    tokenizer,
    trained_tokenizer,
)
from tiny import command_on_a_rank, cpu_device, run_ranks

from nanochat import loader, model_folder, train
from nanochat.checkpoint_manager import load_model
from nanochat.device import Device
from nanochat.ground import cli, host, storage
from nanochat.model_folder import steps as steps_of
from nanochat.run import loop, saver
from nanochat.run.flags import TrainFlags
from nanochat.run.progress import Progress
from nanochat.run.run_log import REQUIRED

# ---------------------------------------------------------------------- the chain


@pytest.mark.slow
def test_text_becomes_a_model_that_is_evaluated_and_sampled(base, capsys, monkeypatch):  # noqa: F811
    call("tok_train", "--max_chars=100000", "--vocab_size=300")
    call("tok_eval")
    assert "bytes per token" in capsys.readouterr().out
    call("base_train", *TINY, "--num_iterations=20", "--eval_every=10", "--save_every=15")
    lines = metrics(base, "base")
    assert [line["step"] for line in lines] == list(range(20))
    for line in lines:
        assert set(REQUIRED) <= set(line) and line["tokens"] == (line["step"] + 1) * 256
        assert line["tok_per_sec"] > 0 and line["peak_memory_bytes"] > 0 and line["skipped_steps"] == 0
    assert [line["step"] for line in lines if "val_bpb" in line] == [9, 19]
    assert [line["seconds"] for line in lines] == sorted(line["seconds"] for line in lines)
    assert lines[0]["loss"] == pytest.approx(math.log(300), rel=0.01)  # a uniform guess
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.1 and lines[-1]["val_bpb"] < lines[9]["val_bpb"]
    assert steps_of(base / "checkpoints/base/d1") == [15, 20]
    facts = json.loads((base / "runs/base/d1/run.json").read_text())
    assert (facts["context"], facts["steps"]) == (64, 20) and facts["parameters"] > 1000 and facts["versions"]["torch"]
    command = json.loads((base / "runs/commands.jsonl").read_text().splitlines()[-1])
    assert (command["first_step"], command["last_step"]) == (0, 20)

    sizes = ("--eval_tokens=256", "--device_batch_size=2", "--dtype=float32", "--device=cpu", "--max_tokens=8")
    for flags, step in (((), 20), (("--source=base/d1/step_15",), 15)):
        call("base_eval", *sizes, "--samples=2", "--stories=3", "--prompt=Mia the fox", *flags)
        results = json.loads((base / "runs/base/d1/eval.json").read_text())
        assert results["step"] == step and results["samples"][0].startswith("Mia the fox")
        assert results["stories"] == 3 and 0 <= results["stories_passed"] <= 3
        assert 0 < results["train_bpb"] < 8 and results["train_bpb"] != results["val_bpb"]
        if step == 20:  # training evaluates as base_eval does
            assert results["val_bpb"] == pytest.approx(lines[-1]["val_bpb"], rel=1e-6)


# ---------------------------------------------------------------------- begun anew, and resumed with other flags


def test_a_run_begun_anew_keeps_the_earlier_one(base, tokenizer, capsys, monkeypatch):  # noqa: F811
    call("base_train", *TINY, "--num_iterations=2", "--seed=1")
    before = (base / "runs/base/d1/metrics.jsonl").read_text()
    sha = sha256(base, "base", 2)
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    for flag in ("--track=nonsense", "--track=wandb"):  # a start that fails moves nothing
        code, _ = mistake(capsys, "base_train", *TINY, "--num_iterations=2", flag)
        assert code == 1 and sha256(base, "base", 2) == sha
    call("base_train", *TINY, "--num_iterations=2", "--run=mine")
    assert "warning: --run mine" in capsys.readouterr().err  # no tracker is set that could use the name
    assert (base / "runs/base/d1.1/metrics.jsonl").read_text() == before
    assert sha256(base, "base", 2, "d1.1") == sha != sha256(base, "base", 2)


def test_resume_refuses_other_data_another_order_batch_or_model(base, tokenizer, capsys):  # noqa: F811
    call("base_train", *TINY, "--num_iterations=2", "--model_tag=d1")
    for flag, words in (
        ("--data=pydoc", "--data demo, not pydoc"),
        ("--optimizer=adamw", "--optimizer muon, not adamw"),
        ("--total_batch_size=512", "--total_batch_size (tokens a step) 256, not 512"),
        ("--depth=2", "--depth 1, not 2"),
    ):
        command = ("base_train", *TINY, "--num_iterations=4", "--model_tag=d1", "--resume", flag)
        refused(capsys, command, "--resume", words, "another --model_tag")


def test_resume_reports_what_it_changes_and_where_nothing_is(base, tokenizer, capsys):  # noqa: F811
    call("base_train", *TINY, "--num_iterations=2", "--matrix_lr=0.02", "--resume")
    out, err = capsys.readouterr()
    assert "starting from the beginning" in out and err == "" and len(losses(base, "base")) == 2
    call("base_train", *TINY, "--num_iterations=2", "--matrix_lr=0.02", "--resume")
    assert "other settings" not in capsys.readouterr().out
    changes = ("--matrix_lr=0.01", "--warmdown_fraction=0.5", "--num_iterations=3", "--eval_every=7")
    call("base_train", *TINY, *changes, "--resume")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "other settings" in line]
    for change in ("matrix_lr 0.02 -> 0.01", "warmdown_fraction 0.65 -> 0.5", "num_iterations 2 -> 3"):
        assert change in line
    call("base_train", *TINY, "--num_iterations=1", "--model_tag=mime", "--resume")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: --resume") and "base/mime" in line and line.endswith(" d1")


@pytest.mark.slow
def test_the_mask_between_documents_holds_in_every_stage(base, monkeypatch, capsys):  # noqa: F811
    call("tok_train", "--max_chars=100000", "--vocab_size=300")
    long_rows = ("--max_seq_len=256", "--total_batch_size=512")  # rows of several documents
    sizes = ("--eval_tokens=256", "--device_batch_size=2", "--dtype=float32", "--device=cpu")
    mid = (*sizes, "--total_batch_size=512", "--tasks=addition,stories", "--model_tag=mid")
    used = []
    segments_of = loader.segments_of
    monkeypatch.setattr(loader, "segments_of", lambda *inputs: used.append(1) or segments_of(*inputs))
    last = []
    for mask in ("off", "on"):
        flags = (f"--model_tag={mask}", f"--document_mask={mask}", "--num_iterations=4")
        call("base_train", *TINY, *long_rows, *flags)
        last.append(metrics(base, "base", mask)[-1])
        call("base_eval", *sizes, "--samples=0", "--stories=0", f"--model_tag={mask}")
        results = json.loads((base / f"runs/base/{mask}/eval.json").read_text())
        assert results["val_bpb"] == pytest.approx(last[-1]["val_bpb"], rel=1e-6)
        used.clear()
        call("mid_train", *mid, f"--source_tag={mask}", "--num_iterations=2")
        assert bool(used) == (mask == "on")
    assert last[0]["loss"] != last[1]["loss"] and last[0]["val_bpb"] != last[1]["val_bpb"]
    # The base model may have been trained anew since: mid-training continues only as it began.
    (base / "checkpoints/base/on").rename(base / "checkpoints/base/kept")
    (base / "checkpoints/base/off").rename(base / "checkpoints/base/on")
    command = ("mid_train", *mid, "--source_tag=on", "--num_iterations=4", "--resume")
    refused(capsys, command, "--document_mask True, not False")


def test_flags_that_resume_refuses():
    """All that decides what a step computes, and what the model is, by the names of the flags."""
    frozen = {name: set(cli.frozen_flags(importlib.import_module(f"scripts.{name}").Config)) for name in STAGE_SCRIPTS}
    stage = (
        "seed optimizer_dtype tasks max_seq_len rope_scaling lora_rank lora_alpha lora_dropout lora_targets lora_base"
    )
    examples = f"{stage} target_examples_per_step val_share"
    for script, flags in {
        "base_train": "seed optimizer_dtype data val_data shards optimizer depth head_dim max_seq_len window_pattern "
        "mlp document_mask experts experts_per_token expert_width shared_experts",
        "mid_train": f"{stage} data val_data shards",
        "chat_sft": f"{examples} learn too_long",
        "chat_dpo": f"{examples} loss beta gamma label_smoothing sft_weight",
        "chat_rl": f"{stage} examples_per_step num_samples max_tokens temperature top_k reward loss kl kl_in clip_low "
        "clip_high importance_cap refills teacher staleness",
    }.items():
        assert frozen[script] == set(flags.split())


# ---------------------------------------------------------------------- saves in time


def saved_in_time(device: Device, flags: tuple[str, ...], room: int = 1 << 50) -> list[int]:
    """The steps that a run saves whose ten minutes are over at every step, by the clock of rank 0."""
    saved = []
    prepare, settle = saver.prepare, loop.Run.settle_save

    def noted(folder: Path, step: int, *arguments: Any, **options: Any) -> Any:
        saved.append(step)
        return prepare(folder, step, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "SAVE_EVERY_SECONDS", 0.0 if device.is_main else 1e9)
        patch.setattr(saver, "prepare", noted)
        patch.setattr(loop.Run, "settle_save", lambda run, wait=True: settle(run))  # however long the thread takes
        patch.setattr(saver, "free_bytes", lambda _: room)
        command_on_a_rank(device, "base_train", flags)
    return saved


@pytest.mark.slow
def test_ten_minutes_of_training_are_saved_and_the_newest_stays(base, tokenizer):  # noqa: F811
    flags = (*TINY, "--num_iterations=4")
    folder = base / "checkpoints/base/d1"
    assert run_ranks(saved_in_time, flags) == [[1, 2, 3, 4]] * 2
    assert steps_of(folder) == [4]
    for more, saved, left in (
        (("--save_every=3",), [3, 4], [3, 4]),
        (("--keep_last=2",), [1, 2, 3, 4], [3, 4]),
        # Step 5 was replaced, the one resumed from is kept; then the end is saved already.
        (("--num_iterations=6", "--resume"), [5, 6], [3, 4, 6]),
        (("--num_iterations=6", "--resume"), [], [3, 4, 6]),
    ):
        assert saved_in_time(cpu_device(), (*flags, *more)) == saved
        assert steps_of(folder) == left


@pytest.mark.parametrize(
    ("step", "saved", "step_seconds", "planned"),
    [
        *((10, None, 2.0, 300), (400, None, 2.0, 400), (410, 400, 2.0, 700), (400, 400, 1200.0, 401)),
        *((410, 401, 2.0, 800), (410, 401, 20.0, 431)),  # the next evaluation, if it is near
    ],
)
def test_the_next_save_is_ten_minutes_after_the_last_one(step, saved, step_seconds, planned):
    run: Any = SimpleNamespace(
        config=TrainFlags(), device=cpu_device(), folder=Path("/"), checkpoint_bytes=0, progress=Progress(step),
        saved_step=saved, step_seconds=step_seconds, in_time=[], first_step=0, saving=None,
    )  # fmt: skip
    loop.Run._plan_save(run)
    assert run.next_save == planned


# ---------------------------------------------------------------------- saves beside the training


def saves(device: Device, script: str, flags: tuple[str, ...], beside: bool) -> str:
    """What a run prints whose saves are slow, or which has no memory for a copy and waits for them."""
    write = storage.write_tensors

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.5)
        return write(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        if beside:
            patch.setattr(storage, "write_tensors", slowly)
        else:
            patch.setattr(host, "free_memory", lambda: 1)
        return command_on_a_rank(device, script, flags)


@pytest.mark.parametrize(
    ("script", "flags", "ranks"),
    [
        ("base_train", TINY, 1),
        pytest.param("base_train", (*TINY, "--parallel=ddp"), 2, marks=pytest.mark.slow),
        pytest.param("base_train", (*TINY, "--parallel=fsdp"), 2, marks=pytest.mark.slow),
        pytest.param("chat_sft", (*SFT, "--source=base/d1", "--lora_rank=2"), 1, marks=pytest.mark.slow),
        pytest.param("chat_rl", (*RL, "--source=base/d1"), 1, marks=pytest.mark.slow),
    ],
)
def test_a_save_beside_the_training_has_the_bits_of_one_that_waits(start, script, flags, ranks):  # noqa: F811
    stage = script.removesuffix("_train").removeprefix("chat_")
    printed = []
    for tag in ("beside", "waits"):
        arguments = script, (*flags, "--num_iterations=3", "--save_every=1", f"--model_tag={tag}"), tag == "beside"
        printed.append((run_ranks(saves, *arguments) if ranks > 1 else [saves(cpu_device(), *arguments)])[0])
    for step in (1, 2, 3):
        manifests, metas = [], []
        for tag in ("beside", "waits"):
            folder = step_folder(start, stage, step, tag)
            metas.append(model_folder.verify(folder))
            manifests.append(json.loads((folder / "manifest.json").read_text()))
            del manifests[-1]["meta.json"], metas[-1]["trained_at"], metas[-1]["progress"]["seconds"]
            assert metas[-1]["config"].pop("model_tag") == tag
        assert manifests[0] == manifests[1] and metas[0] == metas[1]
    first_saved = rf"^{stage} 1/|^saved(?= \S+step_000001$)"
    orders = [re.findall(first_saved, text, re.MULTILINE) for text in printed]
    assert orders == [[f"{stage} 1/", "saved"], ["saved", f"{stage} 1/"]]
    assert printed[1].count("warning: training waits while a checkpoint is written") == 1


def test_a_run_that_fails_completes_the_save_under_way(base, tokenizer, monkeypatch):  # noqa: F811
    train_step = train.train_step

    def fails_after_the_save(*arguments: Any, **options: Any) -> Any:
        if (base / "checkpoints/base/d1").exists():
            raise RuntimeError("a step fails")
        return train_step(*arguments, **options)

    monkeypatch.setattr(train, "train_step", fails_after_the_save)
    with pytest.raises(RuntimeError, match="a step fails"):
        saves(cpu_device(), "base_train", (*TINY, "--num_iterations=9", "--save_every=2"), beside=True)
    assert steps_of(base / "checkpoints/base/d1") == [2]


# ---------------------------------------------------------------------- the best checkpoint

# Validation falls until step 4, and rises; step 3 is never evaluated.
BEST_IS_4 = {0: 5.0, 2: 3.0, 4: 2.0, 6: 2.5, 8: 4.0}
BEST_IS_LAST = {0: 5.0, 2: 3.0, 4: 2.0, 6: 2.5, 8: 1.0}


@pytest.fixture
def validate(monkeypatch):
    """Have evaluations give the numbers of a curve; `stop_at` ends the first evaluation of this step by a signal."""
    log, stopped = loop.Run.log_evaluation, []

    def set_curve(curve: dict[int, float], stop_at: int | None = None) -> None:
        def logged(run: loop.Run, **metrics: float) -> None:
            step = run.progress.step
            if step == stop_at and not stopped:
                stopped.append(step)
                run.stop.request(signal.SIGTERM)
                raise cli.Interrupted
            sign = -1 if "eval_reward" in metrics else 1
            log(run, **dict.fromkeys(metrics, sign * curve[step]))

        monkeypatch.setattr(loop.Run, "log_evaluation", logged)

    return set_curve


class Killed(BaseException):
    """The process ends here."""


@contextlib.contextmanager
def killed_at(kill: int, function: str):
    """Killed after the save of step `kill`, or, in `_retire`, before its deletions."""
    owner = saver if function == "_retire" else loop.Run
    real = getattr(owner, function)

    def doomed(*arguments: Any) -> None:
        if f"step_{kill:06d}" in str(arguments):
            raise Killed
        real(*arguments)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(owner, function, doomed)
        yield


EACH_STEP = ("--num_iterations=8", "--eval_every=2", "--save_every=1")


@pytest.mark.slow
@pytest.mark.parametrize(("script", "flags"), [("base_train", TINY), ("chat_dpo", DPO), ("chat_rl", RL)])
def test_the_best_checkpoint_stays(start, capsys, validate, script, flags):  # noqa: F811
    """Straight through; killed before the best step, at it and after it, and resumed; and the last step is the best."""
    stage = script.removesuffix("_train").removeprefix("chat_")
    flags = (*flags, *EACH_STEP, "--model_tag=best", *(() if stage == "base" else ("--source=base/d1",)))
    folder = start / "checkpoints" / stage / "best"
    use = f"validation was best at step 4: --source {stage}/best/step_000004"
    validate(BEST_IS_4)
    call(script, *flags)
    hashes = [sha256(start, stage, step, "best") for step in (4, 8)]
    assert steps_of(folder) == [*range(1, 9)] and use in capsys.readouterr().out.splitlines()
    kills = ((3, "_count_save", [2, 3]), (4, "_retire", [2, 3, 4]), (5, "_retire", [4, 5]), (7, "_count_save", [4, 7]))
    for kill, function, left in kills if stage == "base" else kills[:2]:
        with killed_at(kill, function):
            call(script, *flags, "--keep_last=1")
        assert steps_of(folder) == left
        call(script, *flags, "--keep_last=1", "--resume")
        assert steps_of(folder) == [4, 8] and use in capsys.readouterr().out.splitlines()
        assert [sha256(start, stage, step, "best") for step in (4, 8)] == hashes
    load_model(f"{stage}/best/step_000004", "cpu")
    (folder / "step_000004/model.safetensors").write_bytes(b"")
    call(script, *flags, "--keep_last=1", "--resume")  # nothing is left to do
    assert "at step 4: which is damaged or not saved; --save_every 2 " in capsys.readouterr().out
    validate(BEST_IS_LAST)
    call(script, *flags, "--keep_last=1")
    assert steps_of(folder) == [8] and "validation was best" not in capsys.readouterr().out


def test_an_evaluation_that_a_signal_ends_counts_after_the_resume(base, tokenizer, capsys, validate):  # noqa: F811
    flags = (*TINY, *EACH_STEP, "--keep_last=1")
    validate(BEST_IS_4, stop_at=4)
    with pytest.raises(SystemExit):
        call("base_train", *flags)
    assert steps_of(base / "checkpoints/base/d1") == [2, 4]
    call("base_train", *flags, "--resume")
    assert steps_of(base / "checkpoints/base/d1") == [4, 8]


def test_without_a_flag_the_best_save_in_time_stays_or_the_end_names_the_flag(base, tokenizer, capsys, validate):  # noqa: F811
    flags = (*TINY, "--num_iterations=8", "--eval_every=2")
    validate(BEST_IS_4)
    assert saved_in_time(cpu_device(), flags) == [*range(1, 9)]
    assert steps_of(base / "checkpoints/base/d1") == [4, 8]
    call("base_train", *flags)
    assert "at step 4: which is damaged or not saved; --save_every 2 " in capsys.readouterr().out
    validate({**BEST_IS_4, 2: 1.0})  # the checkpoint of step 3 is not the one that was evaluated at step 2
    call("base_train", *flags, "--save_every=3", "--keep_last=1")
    assert "best at step 6: --source base/d1/step_000006" in capsys.readouterr().out
    assert steps_of(base / "checkpoints/base/d1") == [6, 8]


# ---------------------------------------------------------------------- how long it takes


def test_gradients_are_clipped_to_one_by_adamw_alone_or_as_a_flag_says():
    config = importlib.import_module("scripts.chat_sft").Config
    assert config().largest_norm is None and config(learning_rate=1e-5).largest_norm == 1.0
    assert config(max_grad_norm=0.3).largest_norm == 0.3
    assert config(learning_rate=1e-5, max_grad_norm=0.0).largest_norm is None


def test_the_third_step_is_logged_with_the_time_that_is_left(base, tokenizer, capsys, monkeypatch):  # noqa: F811
    """By a clock on which the first step takes 1,000 s and each further one 10 s."""
    now, step = 0.0, train.train_step

    def slow(*arguments: Any, **options: Any) -> Any:
        nonlocal now
        now += 10 if now else 1000
        return step(*arguments, **options)

    monkeypatch.setattr(train, "train_step", slow)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    call("base_train", *TINY, "--num_iterations=12", "--eval_every=0", "--log_every=100")
    assert "eta 1m30s" in re.findall(r"(?m)^base +2/12 .*$", capsys.readouterr().out)[0]


# ---------------------------------------------------------------------- documented ways


def test_tasks_of_all_stages_are_looked_up_before_the_first(base, monkeypatch):  # noqa: F811
    requested = set()

    def open_task(spec, split, reading):
        requested.add((spec.name, split, reading.hub))

    monkeypatch.setattr("nanochat.tasks.flag.open_task", open_task)
    call("fetch", "--data=fineweb-edu-chinese", "--hub=modelscope", "--eval_tasks=mmlu,gsm8k")
    names = ("smoltalk_zh", "gsm8k", "addition", "identity")
    learned = {(name, split) for name in names for split in ("train", "test")}
    assert requested == {(*one, "modelscope") for one in {*learned, ("mmlu", "test")}}


@pytest.mark.slow
def test_the_speedrun_runs_and_goes_on_where_it_stopped(tmp_path):
    """The README's first command, in its smallest profile, on a text file: killed in a stage and started again, with
    nothing left to do in the one before. test_speedrun.py has its flags, its rehearsal and what fails."""
    text = tmp_path / "my text.txt"
    text.write_text("".join(f"The boat number {n} sails to island {n * 7 % 90}.\n\n" for n in range(4000)))
    command, settings = copied_speedrun(tmp_path / "copy", is_simulated=False)
    command += ["--profile", "smoke"]
    settings |= {"cwd": tmp_path, "stdout": subprocess.PIPE}
    settings["env"] |= {"NANOCHAT_CHAT_EVAL": "--max_examples=2 --max_tokens=8", "NANOCHAT_BASE_EVAL": "--stories=1"}
    settings["env"]["NANOCHAT_BASE_DIR"] = str(tmp_path / "base")
    killed = subprocess.Popen([*command, "--data", "my text.txt"], start_new_session=True, **settings)
    assert killed.stdout is not None
    for line in killed.stdout:
        if line.startswith("saved ") and line.endswith("mid/smoke/step_000005\n"):
            break
    # The session: each stage has its own process group.
    subprocess.run(["pkill", "-KILL", "-s", str(killed.pid)], check=True)
    killed.communicate()
    (folder,) = (tmp_path / "base" / "speedrun").iterdir()
    weights = (folder / "checkpoints/base/smoke/step_000060/model.safetensors").read_bytes()
    last = subprocess.run([*command, "--data=my text.txt"], stderr=subprocess.PIPE, **settings)
    assert last.returncode == 0, last.stderr
    # Its short rows cut conversations, which is said.
    assert all(line.startswith("warning: learned: ") for line in last.stderr.splitlines()), last.stderr
    resumed = re.findall(r"^resumed from .*checkpoints/(\S+)$", last.stdout, re.MULTILINE)
    assert resumed == ["base/smoke/step_000060", "mid/smoke/step_000005"]
    assert (folder / "checkpoints/base/smoke/step_000060/model.safetensors").read_bytes() == weights
    assert (folder / "checkpoints/rl/smoke/step_000002/model.safetensors").is_file()
    for stage in ("sft", "rl"):
        tasks = json.loads((folder / f"runs/{stage}/smoke/chat_eval.json").read_text())["tasks"]
        assert {task["total"] for task in tasks.values()} == {2} and "stories" in tasks
    assert "</html>" in (folder / "runs/report/smoke/report.html").read_text()
    assert f"{folder}/runs/report/smoke/report.html" in last.stdout and "scripts.chat_web" in last.stdout
    assert len(list((tmp_path / "base" / "speedrun").iterdir())) == 1  # "--data x" and "--data=x" are the same


@pytest.mark.slow
def test_the_five_commands_of_make_it_yours_work(base, tmp_path, monkeypatch, capsys):  # noqa: F811
    """A text file becomes a model with another name; what chat_cli's /save writes is in test_chat_cli.py."""
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
    assert step_folder(base, "sft", 2, "ada").is_dir()
