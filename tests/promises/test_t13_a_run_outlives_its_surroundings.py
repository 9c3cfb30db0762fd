"""T13. A run outlives its surroundings.

A pipe that ends, a closed terminal, a disk that is full for a moment, a log that cannot be written, a reward that fails
and data that change: the run goes on with a line, or saves and ends with one. What has changed is never learned, and
the run that resumes ends as if nothing had happened.
"""

import errno
import io
import json
import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from runs import (
    DPO,
    MID,
    RL,
    SFT,
    TINY,
    Forked,
    call,
    chat,
    command,
    kill,
    metrics,
    mistake,
    questions,
    sha256,
    step_folder,
    write_lines,
    write_splits,
)
from test_endings import RUN
from test_stages import pairs_file
from tiny import command_on_a_rank, run_command, run_ranks

from nanochat import model_folder, train
from nanochat.device import Device
from nanochat.ground import paths, storage
from nanochat.model_folder import steps as steps_of
from nanochat.run import loop
from nanochat.run.loop import Run

# ---------------------------------------------------------------------- the terminal


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "ranks", "interrupted"), [("base", 2, True), ("sft", 1, False)])
def test_a_run_whose_reader_is_gone_saves(home, tutored, tmp_path, stage, ranks, interrupted):
    """`... | tee log` after a Ctrl-C, of which tee dies first, or `... 2>&1 | head`."""
    base = shutil.copytree(home if stage == "base" else tutored, tmp_path / "base")
    flags = RUN if stage == "base" else (*SFT, "--source=base", "--source_tag=d1", "--save_every=0")
    script = "base_train" if stage == "base" else "chat_sft"
    errors, pipe = tmp_path / "errors", tmp_path / "pipe"
    errors.touch()
    os.mkfifo(pipe)
    arguments = command(script, (*flags, "--num_iterations=100000"), ranks)
    process = Forked(base, arguments, pipe, errors if interrupted else pipe)
    stdout = pipe.open()
    try:
        shown = []
        while not (shown and re.match(f"{stage} +2/", shown[-1])):
            shown.append(stdout.readline())
            assert shown[-1], ("".join(shown), errors.read_text())
        stdout.close()
        if interrupted:
            os.killpg(process.pid, signal.SIGINT)
        status = process.wait(timeout=60)
    finally:
        kill(process)
    text = errors.read_text()
    assert status in (128 + signal.SIGINT, 128 + signal.SIGPIPE) and "Traceback" not in text, text
    folder = base / f"checkpoints/{stage}/d1"
    newest = steps_of(folder)[-1]
    assert newest > 2 and model_folder.verify(folder / f"step_{newest:06d}")["step"] == newest
    assert not interrupted or re.search(rf"^stopped by SIG\w+: saved \S*step_{newest:06d}; ", text, re.MULTILINE), text


# ---------------------------------------------------------------------- every call to the outside

ERRORS = ("EACCES", "EDQUOT", "EIO", "ENOMEM", "ENOSPC", "EPIPE", "EROFS", "ESTALE")
STAGES = {"base": (*TINY, "--data=pydoc"), "mid": MID, "sft": SFT, "dpo": DPO, "rl": RL}
TRIALS = int(os.environ.get("NANOCHAT_TRIALS", "100"))


class Outside:
    """The files and the screen of a run: the calls in `failing` fail, of those from its first step to its last save."""

    def __init__(self, patch: pytest.MonkeyPatch, failing: range = range(0), error: str = "EIO"):
        self.failing, self.error = failing, getattr(errno, error)
        self.calls: list[str] = []
        self.trained = self.code = 0
        self.is_open = False
        for name in ("open", "pread", "read", "write", "mkdir", "rename", "scandir", "stat", "statvfs", "unlink"):
            patch.setattr(os, name, partial(self.touch, name, getattr(os, name)))
        patch.setattr(io, "open", partial(self.touch, "open", io.open))
        self.screen = {name: io.StringIO() for name in ("stdout", "stderr")}
        for name, stream in self.screen.items():
            patch.setattr(stream, "write", partial(self.touch, name, stream.write))
            patch.setattr(sys, name, stream)
        count, save = Run.count, Run.save

        def counted(run: Run, *step: Any) -> None:
            count(run, *step)
            self.trained += 1
            self.is_open = True

        def saved(run: Run, state: Any) -> None:
            self.is_open = not run.must_leave
            save(run, state)
            self.is_open = True

        patch.setattr(Run, "count", counted)
        patch.setattr(Run, "save", saved)
        patch.setattr(loop, "SAVE_EVERY_SECONDS", 0.0)  # after each step, and the step before is deleted

    def touch(self, name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if self.is_open:
            self.calls.append(name)
            if len(self.calls) - 1 in self.failing:
                raise OSError(self.error, os.strerror(self.error), str(arguments[0]))
        return call(*arguments, **options)


@pytest.mark.parametrize(
    ("stage", "trials"), [("sft", 9), *(pytest.param(stage, TRIALS, marks=pytest.mark.soak) for stage in STAGES)]
)
def test_no_call_to_the_outside_costs_a_step(start, tmp_path, stage, trials):
    """`NANOCHAT_TRIALS=1000 NANOCHAT_SEED=1 pytest -m soak -k outside` is the long form."""
    flags = [*STAGES[stage], "--num_iterations=4", "--eval_every=2", "--compile=off"]
    if stage != "base":
        tasks = (
            pairs_file(tmp_path / "pairs", 90) if stage == "dpo" else f"gsm8k={write_splits(tmp_path, questions(90))}"
        )
        flags += [f"--tasks={tasks}", "--source=base", "--source_tag=d1"]

    def run(tag: str, *fault: Any) -> Outside:
        with pytest.MonkeyPatch.context() as patch:
            outside = Outside(patch, *fault)
            try:
                call(paths.STAGES[stage], *flags, f"--model_tag={tag}", shows_progress=True)
            except SystemExit as leaving:
                outside.code = leaving.code
        return outside

    calls = run("straight").calls
    straight = sha256(start, stage, 4, "straight")
    rng = random.Random(int(os.environ.get("NANOCHAT_SEED", "0")))
    names = sorted(set(calls))
    for trial in range(trials):
        tag = str(trial)
        first = rng.choice([place for place, name in enumerate(calls) if name == names[trial % len(names)]])
        fault = range(first, first + rng.choice((1, 3, len(calls)))), rng.choice(ERRORS)
        outside = run(tag, *fault)
        errors = outside.screen["stderr"].getvalue()
        newest = steps_of(start / "checkpoints" / stage / tag)[-1]
        assert newest == outside.trained and "Traceback" not in errors, (fault, errors)
        if outside.code and len(fault[0]) == 1 and fault[1] != "EPIPE":  # with more of them, the line may be lost
            assert re.search("^(error|stopped).*saved", errors, re.MULTILINE), (fault, errors)
        if newest < 4:
            call(paths.STAGES[stage], *flags, f"--model_tag={tag}", "--resume")
        assert sha256(start, stage, 4, tag) == straight, fault


# ---------------------------------------------------------------------- the disk


def test_a_disk_that_is_full_for_a_moment_costs_no_run(base, tokenizer, capsys, monkeypatch):
    """One save fails in its thread, and the last one three times."""
    write = storage.write_tensors
    full_for = {"step_000002.tmp": 1, "step_000006.tmp": 3}

    def fails_first(path: Path, *arguments: Any) -> Any:
        full_for[path.parent.name] = full_for.get(path.parent.name, 0) - 1
        if full_for[path.parent.name] >= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, *arguments)

    monkeypatch.setattr(storage, "write_tensors", fails_first)
    monkeypatch.setattr(loop, "RETRY_SECONDS", 0.01)
    flags = (*TINY, "--num_iterations=6", "--save_every=2")
    call("base_train", *flags)
    err = capsys.readouterr().err
    failed = re.findall(r"^warning: step (\d) was not saved: the disk is full: .*?(; trying .*)?$", err, re.MULTILINE)
    assert failed == [("2", ""), ("6", "; trying again for 600 s")]
    assert steps_of(base / "checkpoints/base/d1") == [4, 6]
    full_for["step_000006.tmp"] = 10**9
    monkeypatch.setattr(loop, "LAST_SAVE_SECONDS", 0.1)
    assert mistake(capsys, "base_train", *flags, warnings=1)[0] == 1
    assert full_for["step_000006.tmp"] < 10**9 - 3 and steps_of(base / "checkpoints/base/d1") == [2, 4]


# ---------------------------------------------------------------------- data that change


def zeroed_in_step_three(path: Path, is_writer: bool = True) -> Any:
    """A `train_step` whose third call finds the file full of zeros."""
    step, steps = train.train_step, 0

    def noted(*arguments: Any, **options: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 3 and is_writer:
            path.write_bytes(bytes(path.stat().st_size))
        return step(*arguments, **options)

    return noted


@pytest.mark.parametrize("stage", ["sft", "dpo", "rl"])
def test_a_file_that_changes_under_a_run_ends_it_with_a_checkpoint(start, tmp_path, capsys, monkeypatch, stage):
    folder = tmp_path / "examples"
    if stage == "dpo":
        pairs_file(folder, 60)
    else:
        write_splits(folder, questions(60))
    path = folder / "train.jsonl"
    monkeypatch.setattr("nanochat.train.train_step", zeroed_in_step_three(path))
    tasks = f"--tasks={folder if stage == 'dpo' else f'gsm8k={folder}'}"
    code, err = mistake(capsys, f"chat_{stage}", *STAGES[stage], "--source=base", tasks, "--num_iterations=9")
    saved = step_folder(start, stage, 3 if stage == "rl" else 4)  # the others have read the next step's data
    assert code == 1 and f"{path} has changed" in err
    assert f"; saved {saved}, --resume continues" in err and (saved / "meta.json").is_file()


def changed_data(device: Device, path: str, script: str, flags: tuple[str, ...]) -> str:
    """What a run prints whose data become zeros after its third step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "train_step", zeroed_in_step_three(Path(path), device.is_main))
        with pytest.raises(RuntimeError) as failed:
            command_on_a_rank(device, script, flags)
    return str(failed.value)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "steps"), [("base", 40), ("sft", 9)])
def test_data_that_change_are_not_learned(start, tmp_path, stage, steps):
    texts = [f"The boat number {n} sails to island {n * 7 % 90}." for n in range(3000)]
    path = Path(write_lines(tmp_path / "rows.jsonl", [{"text": text, **chat(text, text)} for text in texts]))
    data = (*TINY, f"--data={path}", "--total_batch_size=512")
    if stage == "sft":
        data = (*SFT, f"--tasks={path}", "--source=base", "--source_tag=d1")
    flags = (*data, f"--num_iterations={steps}", "--save_every=0", "--model_tag=t")
    content = path.read_bytes()
    run_command(paths.STAGES[stage], *flags)
    straight = sha256(start, stage, steps, "t")
    shown = "".join(run_ranks(changed_data, str(path), paths.STAGES[stage], flags))
    (step,) = steps_of(start / "checkpoints" / stage / "t")
    assert 3 <= step < 35 and f"{path} has changed" in shown and f"t/step_{step:06d}" in shown
    path.write_bytes(content)
    run_command(paths.STAGES[stage], *flags, "--resume")
    assert sha256(start, stage, steps, "t") == straight


# ---------------------------------------------------------------------- a reward that fails

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
    rows = [{"prompt": f"What is {n}?", "wanted": "aeiou"} for n in range(120)]
    prompts = write_lines(tmp_path / "prompts.jsonl", rows)
    (tmp_path / "mine.py").write_text(REWARDS)
    flags = [*RL, f"--tasks={prompts}", "--source=base", "--source_tag=d1", "--eval_every=0", "--num_iterations=3"]
    flags += [f"--reward={tmp_path}/mine.py:letters,{tmp_path}/mine.py:short:-0.5"]
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
    assert json.loads((step_folder(start, "rl", 3) / "meta.json").read_text())["step"] == 3
