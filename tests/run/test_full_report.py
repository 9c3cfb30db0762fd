"""check_npu.py --full: no part is lost with another one, the file has what it promises, and wrong results are found."""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import is_running

from nanochat import device as devices
from nanochat.cli import UserError
from nanochat.run import full_check, full_report
from nanochat.run.full_check import SMALL, Found, Operator, Skip, Wrong
from nanochat.run.full_report import DOUBTS, FullReport, Line, environment, read_lines, run_parts

# Programs that stand in for parts: each gets `--record FILE` at the end of its command line.
WRITES = (
    "import json, sys; open(sys.argv[-1], 'a').write(json.dumps({'name': %r, 'outcome': %r, 'detail': 'x'}) + '\\n')"
)


def part(name: str = "", outcome: str = "PASS", then: str = "") -> list[str]:
    """A command that writes a line, if it has a name, and then runs this code."""
    return [sys.executable, "-c", (WRITES % (name, outcome) if name else "import sys") + "\n" + then]


def new_report(tmp_path: Path, **about: Any) -> FullReport:
    fix = lambda text: "a known fix" if "507035" in text else None  # noqa: E731
    return FullReport(tmp_path / "report.json", about, fix, is_accelerator=True)


def test_a_part_that_hangs_loses_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """It is stopped with what it has started; its earlier line and the next part are in the file."""
    child = tmp_path / "child"
    hang = (
        "import subprocess, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(child)!r}, 'w').write(str(child.pid))\n"
        "print('the last thing that it did', flush=True)\ntime.sleep(600)"
    )
    report = new_report(tmp_path)
    began = time.monotonic()
    report.run("one", part("first", "PASS", hang), limit=4)
    assert time.monotonic() - began < 30
    report.run("two", part("second"), limit=60)
    assert report.finish() == 1
    assert not is_running(int(child.read_text()))
    lines = json.loads((tmp_path / "report.json").read_text())["lines"]
    assert [(line["part"], line["name"], line["outcome"]) for line in lines] == [
        ("one", "first", "PASS"), ("one", "part one", "FAIL"), ("two", "second", "PASS"),
    ]  # fmt: skip
    assert lines[1]["detail"] == "stopped: no end within 4 s" and "the last thing" in lines[1]["traceback"]
    assert "2 passed, 1 failed, 0 skipped" in capsys.readouterr().out


def test_an_interruption_while_a_part_is_being_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nobody has to wait for a part that does not react to SIGTERM, and its lines stay."""
    child = tmp_path / "child"
    deaf = (
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({str(child)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    )

    def interrupt(process: Any, timeout: float) -> None:
        raise KeyboardInterrupt

    report = new_report(tmp_path)
    waits = full_report.subprocess.Popen.wait
    monkeypatch.setattr(
        full_report.subprocess.Popen, "wait", lambda self, *limit: interrupt(self, *limit) if limit else waits(self)
    )
    with pytest.raises(KeyboardInterrupt):
        report.run("one", part("first", "PASS", deaf), limit=2)
    assert not is_running(int(child.read_text()))
    lines = json.loads(report.out.read_text())["lines"]
    assert [(line["name"], line["detail"]) for line in lines] == [("first", "x"), ("part one", "interrupted")]


@pytest.mark.parametrize(
    ("command", "detail", "fix"),
    [
        (part(then="import os; os.kill(os.getpid(), 11)"), "ended by signal 11", "send the report"),
        (part(then="raise SystemExit('error code is 507035')"), "ended with exit code 1", "a known fix"),
        (part("passed", then="sys.exit(3)"), "ended with exit code 3", "send the report"),
        (part("failed", "FAIL", then="sys.exit(1)"), "ended with exit code 1", "send the report"),
    ],
)
def test_a_part_that_crashes_is_a_line(tmp_path: Path, command: list[str], detail: str, fix: str):
    report = new_report(tmp_path)
    report.run("one", command, limit=60)
    assert report.lines[-1].detail == detail and report.lines[-1].fix.startswith(fix)


def test_the_checks_end_with_1_after_a_fail_and_that_is_one_line(tmp_path: Path):
    report = new_report(tmp_path)
    report.run("checks", part("attention", "FAIL", "sys.exit(1)"), limit=60)
    assert [line.name for line in report.lines] == ["attention"]


def test_without_a_device_the_other_parts_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    report = new_report(tmp_path)
    assert run_parts(report, "npu", part("npu devices", "FAIL", "sys.exit(1)"), "npu devices") == 1
    assert [line.part for line in report.lines if line.outcome == "SKIP"] == [*full_report.PARTS][1:]


def test_what_a_line_settles(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    report = new_report(tmp_path)
    report.lines += [Line(name, "PASS", "") for name in ("attention", "probe float32", "skipped step", "profile")]
    report.lines += [Line("recorded float32", "PASS", ""), Line("recorded bfloat16", "FAIL", "")]
    verdicts = {doubt.lines[0]: report.verdict(doubt) for doubt in DOUBTS}
    assert verdicts["skipped step"] == verdicts["profile"] == "settled"
    assert verdicts["matrix product"] == "open: no line `matrix product`"
    assert verdicts["recorded"] == "wrong" and verdicts["eager"] == "open: no line `eager`"
    report.lines.append(Line("matrix product", "PASS", ""))
    report.finish()
    out = capsys.readouterr().out
    assert "settled the card's operators compute what a CPU computes" in out and "report.json to an issue" in out
    assert json.loads(report.out.read_text())["settles"][DOUBTS[0].text] == "settled"


def test_a_figure_that_no_line_measured_settles_nothing(tmp_path: Path):
    """Right results say nothing about speed."""
    report = new_report(tmp_path)
    (doubt,) = (doubt for doubt in DOUBTS if doubt.figure == "times_copy")
    lines = [Line(name, "PASS", "", figures={"times_copy": 1.5}) for name in doubt.lines]
    report.lines += lines
    assert report.verdict(doubt) == "settled"
    lines[1].figures = {"ms": 2.0}
    assert report.verdict(doubt) == "open: top has no times_copy"


def test_a_part_that_ends_badly_settles_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Also what has passed before: the lines that would have come later are missing."""
    report = new_report(tmp_path)
    report.run("decode", part("eager float32", then="import os; os.kill(os.getpid(), 11)"), limit=60)
    report.run("two ranks", part("skipped step"), limit=60)
    report.finish()
    out = capsys.readouterr().out
    settles = json.loads(report.out.read_text())["settles"]
    verdicts = {doubt.lines[0]: settles[doubt.text] for doubt in DOUBTS}
    assert verdicts["eager"] == "open: decode ended by signal 11"
    assert verdicts["recorded"] == "open: decode ended by signal 11; no line `recorded`"
    assert verdicts["skipped step"] == "settled"
    assert "(eager): decode ended by signal 11" in out


def test_every_doubt_is_about_parts_that_exist():
    assert {part for doubt in DOUBTS for part in doubt.parts} == set(full_report.PARTS)


def test_a_cpu_settles_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The file says what the terminal says."""
    report = FullReport(tmp_path / "report.json", {}, lambda text: None, is_accelerator=False)
    report.run("checks", part("skipped step"), limit=60)
    report.finish()
    assert "nothing: a CPU only shows" in capsys.readouterr().out
    assert json.loads(report.out.read_text())["settles"] == {}


def test_no_secret_and_no_account_leaves_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    variables = {
        "TASK_QUEUE_ENABLE": "2", "HCCL_IF_IP": "127.0.0.1", "HF_TOKEN": "a", "NANOCHAT_API_KEY": "b", "PATH": "c",
        "NANOCHAT_HUB": "https://me:d@host/x",
    }  # fmt: skip
    kept = environment(("TASK_QUEUE", "HCCL", "NANOCHAT"), variables)
    assert kept == {"HCCL_IF_IP": "127.0.0.1", "NANOCHAT_HUB": "https://...@host/x", "TASK_QUEUE_ENABLE": "2"}
    report = new_report(tmp_path, environment=kept)
    report._add(Line("probe", "FAIL", "no file", traceback='File "/home/somebody/nanochat/gpt.py", line 3'))
    report.write()
    text = report.out.read_text()
    assert "somebody" not in text and "~/nanochat/gpt.py" in text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("--api_key hunter2", "--api_key ..."),
        ("--port 8000 --api-key=hunter2 --host '::'", "--port 8000 --api-key=... --host ::"),
        ("--api_key 'hunter2 and hunter2' --port 1", "--api_key ... --port 1"),
        ("--passwords hunter2 hunter2 --port 1", "--passwords ... ... --port 1"),
        ("--API_Token 'hunter2", "..."),
        ("--max_tokens 16 --tokenizer small", "--max_tokens 16 --tokenizer small"),
        ("--hub https://me:hunter2@host/x", "--hub https://...@host/x"),
        ("http://me:hun/ter2@hunter2@host", "http://...@host"),
        ("https://host/x?a=1&access_token=hunter2&b=2", "https://host/x?a=1&access_token=...&b=2"),
        ("/data/it's", "/data/it's"),
    ],
)
def test_a_secret_within_a_value_is_masked(value: str, shown: str):
    assert environment(("NANOCHAT",), {"NANOCHAT_CHAT_WEB": value}) == {"NANOCHAT_CHAT_WEB": shown}


# ---------------------------------------------------------------------- the checks find what is wrong


def test_an_error_is_a_line_with_its_traceback(tmp_path: Path):
    def broken() -> Found:
        raise KeyError("no such thing")

    def wrong() -> Found:
        raise Wrong("7 of 8", {"ms": 2.0})

    def left_out() -> Found:
        raise Skip("one device")

    file = tmp_path / "lines"
    for name, function in (("a", broken), ("b", wrong), ("c", left_out), ("d", lambda: Found("3 ms", {"ms": 3.0}))):
        assert full_check.check(file, name, function) == (name == "d")
    a, b, c, d = read_lines(file)
    assert (a.outcome, a.detail) == ("FAIL", "KeyError: 'no such thing'") and "in broken" in a.traceback
    assert (b.outcome, b.detail, b.traceback, b.figures["ms"]) == ("FAIL", "7 of 8", "", 2.0)
    assert (c.outcome, d.outcome, d.figures["ms"]) == ("SKIP", "PASS", 3.0)


def test_a_mistake_that_no_check_expects_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Such as a device that is gone. Only what a check asks about may be left out: bf16 and recordings."""

    def refuse(kind: str, dtype: str) -> devices.Device:
        if dtype != refused and refused != "all":
            return started(kind, dtype)
        raise UserError(f"--dtype {dtype}: refused")

    started = devices.init
    file = tmp_path / "lines"
    assert not full_check.check(file, "graphs", full_check.compare_tokens, "cpu", 2, "float32", "on", {})
    monkeypatch.setattr(full_check.devices, "init", refuse)
    for refused in ("bfloat16", "all"):
        full_check.check(file, refused, full_check.compare_tokens, "cpu", 2, "bfloat16", "off", {})
    graphs, bfloat16, everything = read_lines(file)
    assert (graphs.outcome, bfloat16.outcome, everything.outcome) == ("SKIP", "SKIP", "FAIL")
    assert graphs.detail.startswith("--graphs on: ") and bfloat16.detail == "--dtype bfloat16: refused"
    assert everything.detail == "UserError: --dtype float32: refused"


def test_an_operator_with_another_result_fails():
    results = iter((torch.ones(4), *[torch.ones(4)] * full_check.REPEATS, torch.tensor([1.0, 1.0, 1.0, 1.1])))
    operator = Operator("planted", lambda device: lambda: next(results), 0.01, 32.0)
    with pytest.raises(Wrong, match="4.9e-02 of the norm"):
        full_check.time_operator("cpu", operator, judges_speed=False)


def test_an_operator_that_is_slower_than_its_bytes_fails():
    def slow() -> torch.Tensor:
        time.sleep(0.02)
        return torch.ones(4)

    operator = Operator("planted", lambda device: slow, 0.0, 1024.0)
    with pytest.raises(Wrong, match=r"[\d.]+ times a copy of as many bytes .*, more than 3 times"):
        full_check.time_operator("cpu", operator, judges_speed=True)
    # A small size is not judged, and neither is attention, whose products take the time.
    assert "times_copy" not in full_check.time_operator("cpu", operator, judges_speed=False).figures
    attention = replace(operator, is_bound_by_bytes=False)
    assert "times_copy" not in full_check.time_operator("cpu", attention, judges_speed=True).figures


def test_an_operator_that_is_as_fast_as_its_bytes_passes():
    """It moves an eighth of the bytes that it claims: a busy machine does not matter."""
    numbers = torch.ones(1 << 21)
    operator = Operator("planted", lambda device: numbers.clone, 0.0, 8.0 * 8 * (1 << 21))
    assert 0 < full_check.time_operator("cpu", operator, judges_speed=True).figures["times_copy"] < 3


@pytest.mark.parametrize(("mfu", "is_wrong"), [(0.02, True), (0.3, False), (None, False)])
def test_a_step_below_a_tenth_of_the_peak_fails(mfu: float | None, is_wrong: bool, monkeypatch: pytest.MonkeyPatch):
    def bench(command: list[str]) -> str:
        (file,) = (word.partition("=")[2] for word in command if word.startswith("--json="))
        Path(file).write_text(json.dumps({"tokens_per_second": 9.0, "peak_memory_bytes": 1 << 30, "mfu": mfu}))
        return ""

    monkeypatch.setattr(full_check, "run_command", bench)
    if is_wrong:
        with pytest.raises(Wrong, match="2.0% of the nominal peak.* below 10% of the peak"):
            full_check.train_steps("cpu", full_check.CARD)
    else:
        assert ("mfu" in full_check.train_steps("cpu", full_check.CARD).figures) == (mfu is not None)


def test_other_tokens_fail():
    """In fp32 one token is enough; in bf16 it takes most of them."""
    expected: dict[str, list[list[int]]] = {}
    full_check.compare_tokens("cpu", 2, "float32", "off", expected)
    expected["sampled"][3][-1] += 1
    with pytest.raises(Wrong, match="greedy 128 of 128, sampled 127 of 128"):
        full_check.compare_tokens("cpu", 2, "float32", "off", expected)
    for rows in expected.values():
        for row in rows:
            row[2] += 1
    with pytest.raises(Wrong, match=r"greedy \d of 128, sampled \d of 128"):
        full_check.compare_tokens("cpu", 2, "bfloat16", "off", expected)


def test_a_recording_that_fails_is_found(monkeypatch: pytest.MonkeyPatch):
    """Also where the engine goes on without it."""
    decoder = full_check.decoder

    def with_failure(*arguments: Any) -> Any:
        engine = decoder(*arguments)
        monkeypatch.setattr(devices.Device, "capture", lambda self, function: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.device.capture(lambda: None)
        return engine

    monkeypatch.setattr(full_check, "decoder", with_failure)
    with pytest.raises(Wrong, match="the recording failed.*ZeroDivisionError"):
        full_check.compare_tokens("cpu", 2, "float32", "off", {})


def test_another_kernel_is_found(monkeypatch: pytest.MonkeyPatch):
    recorded = full_check.record_steps
    calls = []

    def planted(*arguments: Any, **options: Any) -> Any:
        losses, readings = recorded(*arguments, **options)
        calls.append(readings)
        if len(calls) == 2:
            readings[5] = {**readings[5], "signature": readings[5]["signature"] + readings[5]["norm"]}
        return losses, readings

    monkeypatch.setattr(full_check, "record_steps", planted)
    config = full_check.shapes()["Qwen3"]
    with pytest.raises(Wrong, match="first difference above 0.001 of the norm: step 0, forward, .*signature"):
        full_check.compare_steps("cpu", "float32", config, full_check.DOCUMENT, 1e-3)


def test_an_exchange_that_mixes_up_rows_is_found(monkeypatch: pytest.MonkeyPatch):
    device = devices.init("cpu", "float32")

    def exchange(right: bool) -> Callable[..., None]:
        def all_to_all(arrived: torch.Tensor, sent: torch.Tensor, arriving: list[int], leaving: list[int]) -> None:
            assert leaving == [0, 3] and arriving == [0, 5]
            rows = torch.tensor([[10.0, place] for place in range(5)])
            arrived.copy_(rows if right else rows.flip(0))

        return all_to_all

    monkeypatch.setattr(full_check.dist, "all_to_all_single", exchange(right=True))
    full_check.uneven_exchange(device)
    monkeypatch.setattr(full_check.dist, "all_to_all_single", exchange(right=False))
    with pytest.raises(Wrong, match="rank 0 got"):
        full_check.uneven_exchange(device)


# ---------------------------------------------------------------------- the whole command


@pytest.mark.slow
def test_the_whole_report_on_a_cpu(tmp_path: Path):
    """Every part runs and passes, and every doubt has lines."""
    command = [sys.executable, str(full_report.ROOT / "check_npu.py"), "--device", "cpu", "--full", "--out", "r.json"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "NANOCHAT_API_KEY": "hidden"}
    done = full_report.subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "r.json").read_text()
    report = json.loads(text)
    lines = {line["name"]: line for line in report["lines"]}
    assert "hidden" not in text and report["environment"]["OMP_NUM_THREADS"] == "1"
    assert report["versions"]["torch"] and report["commit"] and report["vendor_tool"]["output"]
    assert {line["part"] for line in report["lines"]} == set(full_report.PARTS)
    assert report["settles"] == {}
    assert set(report["seconds"]) == {*full_report.PARTS, "all"}
    for name in (beginning for doubt in DOUBTS for beginning in doubt.lines):
        assert any(line.startswith(name) for line in lines), name
    skipped = {name for name, line in lines.items() if line["outcome"] == "SKIP" and line["part"] != "checks"}
    assert skipped == {"recorded float32", "recorded bfloat16", "decoding memory", "train depth 20"}
    assert lines["train depth 4"]["figures"]["tokens_per_second"] > 0
    assert lines["eager float32"]["figures"]["token_ms"] > 0
    assert lines["two ranks: all_to_all"]["detail"] == "rows [0, 3] and [5, 1] arrive"
    assert "aten::" in lines["profile"]["table"] and SMALL.depth == 4
