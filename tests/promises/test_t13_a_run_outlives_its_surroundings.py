"""T13. A run outlives its surroundings.

A pipe that ends, a closed terminal, a disk that is full for a moment, a log that cannot be written, a reward that fails
and data that change: the run goes on with a line, or saves and ends with one. What has changed is never learned, and
the run that resumes ends as if nothing had happened.
"""

import errno
import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from runs import (
    DPO,
    RL,
    SFT,
    TINY,
    Forked,
    call,
    command,
    kill,
    losses,
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
from nanochat.ground import storage
from nanochat.model_folder import steps as steps_of
from nanochat.run import loop
from nanochat.run.run_log import RunLog

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


# ---------------------------------------------------------------------- the disk


class FullAtFirst:
    """A log file that a full disk refuses for as many writes as this."""

    def __init__(self, file: Any, refused: int):
        self.file, self.refused = file, refused

    def write(self, data: bytes) -> int:
        self.refused -= 1
        if self.refused >= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(data)

    def close(self) -> None:
        self.file.close()


def test_a_disk_that_is_full_for_a_moment_costs_no_run(base, tokenizer, capsys, monkeypatch):
    """One save fails in its thread, the last one three times, and two lines of the log wait until there is room."""
    write, init = storage.write_tensors, RunLog.__init__
    full_for = {"step_000002.tmp": 1, "step_000006.tmp": 3}

    def fails_first(path: Path, *arguments: Any) -> Any:
        full_for[path.parent.name] = full_for.get(path.parent.name, 0) - 1
        if full_for[path.parent.name] >= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, *arguments)

    def opened(log: RunLog, *arguments: Any, **options: Any) -> None:
        init(log, *arguments, **options)
        log._file = FullAtFirst(log._file, 2)  # pyright: ignore[reportAttributeAccessIssue]

    monkeypatch.setattr(storage, "write_tensors", fails_first)
    monkeypatch.setattr(loop, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(RunLog, "__init__", opened)
    flags = (*TINY, "--num_iterations=6", "--save_every=2")
    call("base_train", *flags)
    err = capsys.readouterr().err
    failed = re.findall(r"^warning: step (\d) was not saved: the disk is full: .*?(; trying .*)?$", err, re.MULTILINE)
    assert failed == [("2", ""), ("6", "; trying again for 600 s")]
    assert f"warning: {base}/runs/base/d1/metrics.jsonl: {os.strerror(errno.ENOSPC)}" in err
    assert steps_of(base / "checkpoints/base/d1") == [4, 6] and len(losses(base, "base")) == 6
    full_for["step_000006.tmp"] = 10**9
    monkeypatch.setattr(loop, "LAST_SAVE_SECONDS", 0.1)
    assert mistake(capsys, "base_train", *flags, warnings=2)[0] == 1
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
    flags = {"sft": SFT, "dpo": DPO, "rl": RL}[stage]
    tasks = f"--tasks={folder if stage == 'dpo' else f'gsm8k={folder}'}"
    code, err = mistake(capsys, f"chat_{stage}", *flags, "--source=base", tasks, "--num_iterations=9")
    saved = step_folder(start, stage, 3)
    assert code == 1 and f"{path} has changed" in err
    assert f"; saved {saved}, --resume continues" in err and (saved / "meta.json").is_file()


def changed_text(device: Device, text: str, flags: tuple[str, ...]) -> str:
    """What a run prints whose text becomes zeros after its third step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "train_step", zeroed_in_step_three(Path(text), device.is_main))
        with pytest.raises(RuntimeError) as failed:
            command_on_a_rank(device, "base_train", flags)
    return str(failed.value)


@pytest.mark.slow
def test_text_that_changes_is_not_learned(base, tokenizer, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"The boat number {n} sails to island {n * 7 % 90}.\n\n" for n in range(3000)))
    content = text.read_bytes()
    flags = (*TINY, f"--data={text}", "--num_iterations=40", "--save_every=0", "--total_batch_size=512")
    run_command("base_train", *flags)
    straight = sha256(base, "base", 40)
    shown = "".join(run_ranks(changed_text, str(text), flags))
    (step,) = steps_of(base / "checkpoints/base/d1")
    assert 3 <= step < 35 and f"{text} has changed" in shown and f"saved {step_folder(base, 'base', step)}" in shown
    text.write_bytes(content)
    run_command("base_train", *flags, "--resume")
    assert sha256(base, "base", 40) == straight


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
