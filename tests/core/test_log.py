"""The run log: always valid JSON, no step twice after a resume, harmless trackers."""

import contextlib
import errno
import json
import os
import re
import sys
import time
import types
from pathlib import Path

import pytest

from nanochat.ground.cli import UserError
from nanochat.ground.log import print0, print_table, record, warn
from nanochat.ground.screen import duration
from nanochat.run import trackers
from nanochat.run.run_log import REQUIRED, RunLog


def metrics(step: int, **further) -> dict:
    known = {"loss": 5.0 - step / 1000, "lr": 0.02, "tokens": step * 1000, "tok_per_sec": 1234.5, "mfu": 0.412}
    return {"step": step, **known, "seconds": step * 0.5, "peak_memory_bytes": 1 << 30, **further}


def read_lines(folder: Path) -> list[dict]:
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    text = (folder / "metrics.jsonl").read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


# ---------------------------------------------------------------------- metrics.jsonl


def test_every_line_is_json_with_all_required_keys(tmp_path):
    with RunLog("base", tmp_path / "run", 10) as run:
        run.step(metrics(0, loss=float("nan"), reward=float("inf"), skipped_steps=0))
        assert len(read_lines(tmp_path / "run")) == 1  # at once, not at the end
        run.step({"step": 1, "val_bpb": 1.25})
    first, second = read_lines(tmp_path / "run")
    assert (first["loss"], first["reward"], first["lr"], first["skipped_steps"]) == (None, None, 0.02, 0)
    assert set(second) == {*REQUIRED, "val_bpb"} and second["loss"] is None and second["val_bpb"] == 1.25


def test_a_resumed_run_has_each_step_once(tmp_path):
    with RunLog("base", tmp_path, 20) as run:
        for step in range(10):
            run.step(metrics(step, attempt=1))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "lo')  # killed in the middle of a line
    with RunLog("base", tmp_path, 20, start_step=6) as run:
        assert [line["step"] for line in read_lines(tmp_path)] == list(range(6))
        for step in range(6, 12):
            run.step(metrics(step, attempt=2))
    lines = read_lines(tmp_path)
    assert [line["step"] for line in lines] == list(range(12))
    assert [line["attempt"] for line in lines] == [1] * 6 + [2] * 6
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
    RunLog("base", tmp_path, 20).close()  # a new run under the same name begins a new curve
    assert read_lines(tmp_path) == []


@pytest.mark.parametrize(
    "torn", [b"\x00\x00\x00", b'{"step": 1', b"7\n", b'"text"\n', b"{}\n", b'{"step": null}\n', b"\xff"]
)
def test_a_torn_line_is_dropped(tmp_path, torn):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n' + torn)
    RunLog("base", tmp_path, 20, start_step=5).close()
    assert read_lines(tmp_path) == [{"step": 0}]


class FullDisk:
    """A file on a disk that takes this many bytes, and then fails with an error."""

    def __init__(self, room: int, error: int):
        self.room, self.error = room, error
        self.content = b""

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(self.error, os.strerror(self.error))
        written = data[: self.room]
        self.content += written
        self.room -= len(written)
        return len(written)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.ESTALE])
@pytest.mark.parametrize("makes_room", [True, False])
def test_lines_wait_while_the_disk_takes_none(tmp_path, capsys, monkeypatch, makes_room, error):
    run = RunLog("base", tmp_path, 10)
    path = tmp_path / "metrics.jsonl"
    disk = FullDisk(250, error)  # one line, and a part of the second
    monkeypatch.setattr(Path, "open", lambda *_, **options: contextlib.nullcontext(disk))
    for step in range(4):
        run.step(metrics(step))
    assert disk.content.count(b"\n") == 1 and len(disk.content) == 250
    if makes_room:
        disk.room = 10_000
    run.close()
    steps = [json.loads(line)["step"] for line in disk.content.splitlines() if makes_room or line.endswith(b"}")]
    first, *later = capsys.readouterr().err.splitlines()
    assert first.startswith(f"warning: {path}: {os.strerror(error)}: the run goes on, its lines wait")
    assert steps == ([0, 1, 2, 3] if makes_room else [0])
    assert later == ([] if makes_room else [f"warning: {path} cannot be written: 3 lines are lost"])


def test_a_command_that_cannot_be_recorded_has_still_ended_well(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    (tmp_path / "runs" / "commands.jsonl").mkdir(parents=True)
    record("base", "d1", time.time())
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch("warning: .*commands.jsonl: Is a directory: .*\n", err)


def test_other_ranks_write_and_print_nothing(tmp_path, capsys, monkeypatch):
    with RunLog("base", tmp_path / "run", 10, is_main=False) as run:
        run.step(metrics(0))
    monkeypatch.setenv("RANK", "1")
    print0("hello")
    warn("hello")
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("RANK", "0")
    print0("one", 2)
    warn("three")
    assert capsys.readouterr() == ("one 2\n", "warning: three\n")


# ---------------------------------------------------------------------- lines on the screen


def test_a_line_shows_what_is_known(tmp_path, capsys):
    """No zero counts, and no estimate from the first step."""
    with RunLog("rl", tmp_path, 100, start_step=40) as run:
        run.step(metrics(40, mfu=None, skipped_steps=0, epoch=0))
        run.step(metrics(41, loss=float("nan"), reward=0.25, val_bpb=1.5, entropy=0.5))
        run.step({"step": 42, "val_loss": 2.0, "skipped_steps": 1})
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == "rl  40/100 | loss 4.9600 | lr 0.02 | 1,234 tok/s"
    # 41,000 tokens in two steps, 1,234.5 of them a second, and 58 steps to go
    assert second.split(" | ")[4:] == ["mfu 41.2%", "eta 46s", "val_bpb 1.5000", "reward 0.2500"]
    assert third == "rl  42/100 | val_loss 2.0000 | skipped_steps 1"


def test_a_table_is_aligned_and_without_columns_of_nothing(capsys):
    rows = [["stories", "0.0%", "0.0%", "0", "all"], ["sums", "100.0%", "0.0%", "12", "two digits"]]
    print_table(("task", "accuracy", "guessing", "cut off", "on"), rows, optional=("guessing", "cut off"))
    _, heads, _, first, second = capsys.readouterr().out.splitlines()
    assert heads.split() == ["task", "accuracy", "cut", "off", "on"]
    assert first.index("%") == second.index("%")
    assert first.split() == ["stories", "0.0%", "0", "all"]
    assert second.split() == ["sums", "100.0%", "12", "two", "digits"]


def test_duration():
    seconds = (0, 59.4, 59.6, 192, 3599.7, 3900, 86399, 86400, 3.3 * 86400)
    assert [duration(one) for one in seconds] == [
        *("0s", "59s", "1m00s", "3m12s", "1h00m", "1h05m", "23h59m", "1d00h", "3d07h")
    ]


# ---------------------------------------------------------------------- trackers


class FakeTracker:
    """Stands in for wandb and swanlab; `fail_at` names the step whose log raises."""

    def __init__(self, fail_at: int | None = None):
        self.fail_at, self.logged, self.finished, self.arguments = fail_at, [], 0, {}

    def module(self, name: str) -> types.ModuleType:
        module = types.ModuleType(name)
        module.init, module.log, module.finish = self.init, self.log, self.finish  # type: ignore[attr-defined]
        return module

    def init(self, **arguments):
        self.arguments = arguments
        return self

    def log(self, values, step):
        if self.fail_at is not None and step >= self.fail_at:
            raise ConnectionError("the tracker's server is gone")
        self.logged.append((step, values))

    def finish(self):
        self.finished += 1
        if self.fail_at is not None:
            raise ConnectionError("still gone")


def test_trackers_get_name_config_and_numbers_and_one_that_fails_warns_once(tmp_path, monkeypatch, capsys):
    good, bad = FakeTracker(), FakeTracker(fail_at=3)
    monkeypatch.setitem(sys.modules, "wandb", bad.module("wandb"))
    monkeypatch.setitem(sys.modules, "swanlab", good.module("swanlab"))
    with RunLog("base", tmp_path, 10) as run:
        run.trackers = trackers.start("wandb, swanlab", "my run", tmp_path, {"depth": 4})
        run.step(metrics(0, mfu=None, loss=float("nan")))
        for step in range(1, 10):
            run.step(metrics(step))
    for fake in (good, bad):
        assert "my run" in fake.arguments.values() and fake.arguments["config"] == {"depth": 4}
        assert "mfu" not in fake.logged[0][1] and "loss" not in fake.logged[0][1]
        assert fake.logged[1] == (1, fake.logged[1][1] | {"loss": 4.999})
    assert (len(bad.logged), len(good.logged), len(read_lines(tmp_path)), good.finished) == (3, 10, 10, 1)
    errors = capsys.readouterr().err
    assert errors.count("warning") == 1 and "wandb" in errors and "server is gone" in errors
    monkeypatch.setattr(sys.modules["wandb"], "init", lambda **_: 1 / 0)
    assert not trackers.start("wandb", "my run", tmp_path, {})
    assert "wandb" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wandb", r"--track wandb: .*pip install -e '.\[track\]'"),
        ("swanlab", r"--track swanlab: .*pip install -e '.\[track\]'"),
        ("weights", "--track 'weights'.*wandb, swanlab, tensorboard"),
    ],
)
def test_a_missing_or_unknown_tracker_is_named(monkeypatch, name, words):
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(UserError, match=words):
        trackers.check(name)
