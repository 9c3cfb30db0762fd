"""P10. `check_npu.py --full` on a card writes one file that settles every open doubt of docs/ascend.md.

It runs to the end here: on the CPU, on two simulated NPUs that compute, and over torch_npu's own adapters. Each part is
a process: one that fails, hangs or is stopped loses nothing else. Planted mistakes are found at their place."""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from on_device import quick, ranks, recording, report, test_decoding, test_operators
from on_device.report import FullReport
from on_device.sizes import CARD, SMALL, Sizes
from simnpu import build
from simnpu.forks import simulated
from tiny import is_running, run_ranks

import check_npu
from nanochat import device as devices
from nanochat.kernels.cpu import CpuKernels

ROOT = Path(__file__).resolve().parents[2]
LINE = "import json, os, sys; open(os.environ['ON_DEVICE_LINES'], 'a').write(json.dumps({}) + '\\n')\n"


def part(name: str = "", outcome: str = "PASS", then: str = "") -> list[str]:
    """A command that writes a line, if it has a name, and then runs this code."""
    line = repr({"name": name, "outcome": outcome, "detail": "x"})
    return [sys.executable, "-c", (LINE.format(line) if name else "import sys\n") + then]


@pytest.fixture
def full(tmp_path: Path) -> FullReport:
    return FullReport(tmp_path / "report.json", {}, lambda text: "a known fix" if "507035" in text else None)


def lines_of(full: FullReport) -> list[tuple[str, str, str, str]]:
    written = json.loads(full.out.read_text())["parts"]
    return [
        (name, line["name"], line["outcome"], line["detail"])
        for name, part in written.items()
        for line in part["lines"]
    ]


def test_a_doubt_is_answered_by_all_of_its_checks(full: FullReport, capsys: pytest.CaptureFixture[str]):
    def answer(check: str) -> dict[str, str]:
        return next(row for (starts, _), row in zip(report.doubts(), full.answers(), strict=True) if check in starts)

    assert answer("steps.step")["answer"] == "open"
    for name, outcome, expected in (("a", "SKIP", "open"), ("b", "PASS", "partly"), ("c", "FAIL", "no")):
        full.add("steps", {"name": f"step[{name}]", "outcome": outcome, "detail": f"it is {name} " * 99})
        assert answer("steps.step")["answer"] == expected
        assert answer("steps.vocabulary")["answer"] == "open"
    assert answer("steps.step")["because"] == "step[c]: " + "it is c " * 99 and "*(" not in str(full.answers())
    for name, outcome, expected in (("profile[dense]", "PASS", "yes"), ("part profile", "FAIL", "partly")):
        full.add("profile", {"name": name, "outcome": outcome, "detail": "x"})
        assert answer("profile")["answer"] == expected
    full.finish()
    assert f"NO: {answer('steps.step')['doubt']} [step[c]: it is c " in capsys.readouterr().out


def test_a_part_that_hangs_loses_nothing_else(full: FullReport, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """It is stopped with what it has started; its earlier line and the next part are in the file."""
    child = tmp_path / "child"
    hang = (
        "import subprocess, time\nchild = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(child)!r}, 'w').write(str(child.pid))\nprint('the last thing', flush=True)\ntime.sleep(600)"
    )
    full.run("one", part("first", then=hang), 4, {})
    full.run("two", part("second"), 60, {})
    assert full.finish() == 1
    assert not is_running(int(child.read_text()))
    found = [(*line[:3], line[3].partition(":")[0]) for line in lines_of(full)]
    assert found[:2] == [("one", "first", "PASS", "x"), ("one", "part one", "FAIL", "stopped")]
    assert found[2:] == [("two", "second", "PASS", "x")]
    assert "the last thing" in full.parts["one"]["output"]
    assert "2 passed, 1 failed, 0 skipped" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "detail", "fix"),
    [
        (part(then="import os; os.kill(os.getpid(), 11)"), "signal 11", "send the report"),
        (part(then="raise SystemExit('error code is 507035')"), "exit code 1", "a known fix"),
        (part("passed", then="sys.exit(3)"), "exit code 3", "send the report"),
        (part("failed", "FAIL", then="sys.exit(1)"), "x", "send the report"),  # as pytest does
        (part(), "no check", "send the report"),
    ],
)
def test_a_part_that_ends_badly_is_a_line(full: FullReport, command: list[str], detail: str, fix: str):
    full.run("one", command, 60, {})
    (*_, last) = full.parts["one"]["lines"]
    assert last["outcome"] == "FAIL" and last["detail"].endswith(detail) and last["fix"].startswith(fix)


def test_without_a_device_the_other_parts_are_skipped(full: FullReport):
    assert report.run_parts(full, "npu", part("npu devices", "FAIL", "sys.exit(1)"), "npu devices", False) == 1
    assert [name for name, _, outcome, _ in lines_of(full) if outcome == "SKIP"] == [*report.PARTS][1:]


def test_no_secret_and_no_account_leaves_the_machine(full: FullReport, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    kept = {
        "TASK_QUEUE_ENABLE": ("2", "2"), "NANOCHAT_HUB": ("https://me:hunter2@host/x", "https://...@host/x"),
        "NANOCHAT_CHAT_WEB": ("--api_key hunter2 --port 1", "..."),
        "NANOCHAT_BASE_TRAIN": ("https://host/x?a=1&access_token=hunter2", "https://host/x?..."),
    }  # fmt: skip
    variables = {name: value for name, (value, _) in kept.items()}
    found = report.environment("npu", {**variables, "HF_TOKEN": "a", "NANOCHAT_API_KEY": "hunter2", "PATH": "c"})
    assert found == {name: written for name, (_, written) in kept.items()}
    full.run("one", part(then="print('/home/somebody/nanochat/gpt.py')"), 60, {})
    text = full.out.read_text()
    assert "somebody" not in text and "~/nanochat/gpt.py" in text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_report_that_is_stopped_ends_its_part_and_keeps_its_lines(tmp_path: Path, number: signal.Signals):
    """The part has its own session, which no signal of a terminal or a service manager reaches."""
    out = tmp_path / "report.json"
    line = LINE.format({"name": "first", "outcome": "PASS", "detail": "x"})
    hang = f"{line}import time; open({str(tmp_path / 'part')!r}, 'w').write(str(os.getpid())); time.sleep(600)\n"
    # Python runs it at its start: the process of the checks hangs there.
    (tmp_path / "sitecustomize.py").write_text(f"import os\nif 'ON_DEVICE_LINES' in os.environ:\n    exec({hang!r})\n")
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "check_npu.py"), "--device", "cpu", "--full", "--out", str(out)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # tests may run under nohup
    )  # fmt: skip
    assert process.stdout is not None
    for printed in process.stdout:
        if printed.startswith("PASS first"):
            break
    while not (tmp_path / "part").exists():
        time.sleep(0.05)
    process.send_signal(number)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "Traceback" not in text and "fix:" not in text
    assert not is_running(int((tmp_path / "part").read_text()))
    lines = json.loads(out.read_text())["parts"]["checks"]["lines"]
    assert [(line["name"], line["detail"]) for line in lines] == [("first", "x"), ("part checks", "interrupted")]
    assert [path.name for path in tmp_path.glob("report*")] == ["report.json"]


def test_what_a_report_needs_is_said_before_it_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    for flags in ("--arch x86_64", "--out a.json", "--small", f"--root {tmp_path}/none", "--full --cann 9.0.0"):
        with pytest.raises(SystemExit):  # flags that would change nothing, and a root that is not there
            check_npu.main(flags.split())
        assert re.search(r"--\w+ needs --(full|plan): add|--root \S+: not a folder", capsys.readouterr().err)
    for out in (tmp_path / "none" / "report.json", tmp_path):
        assert check_npu.main(["--full", "--device", "cpu", "--out", str(out)]) == 1
        assert "--out" in capsys.readouterr().out
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    assert check_npu.main(["--full", "--device", "cpu", "--out", str(tmp_path / "report.json")]) == 1
    assert "fix: pip install pytest" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- planted mistakes


@pytest.mark.parametrize(
    ("is_wrong", "sizes", "is_right"), [(True, SMALL, False), (False, CARD, False), (False, SMALL, True)]
)
def test_an_operator_that_is_wrong_or_slow_fails(is_wrong: bool, sizes: Sizes, is_right: bool):
    """A small size is not judged by its time."""
    calls = iter(range(100))

    def work() -> torch.Tensor:
        time.sleep(0.005)
        return torch.ones(4) + (is_wrong and next(calls) > 0)

    timed = test_operators.Timed(work, 0.01, bytes=1024.0)
    numbers: dict[str, float] = {}
    with contextlib.nullcontext() if is_right else pytest.raises(AssertionError):
        test_operators.judge(devices.init("cpu"), lambda *_: timed, sizes, numbers.update)
    assert ("times_copy" in numbers) == (sizes is CARD)


def test_other_tokens_are_counted():
    assert [test_decoding.leading([1, 2, 3], other) for other in ([1, 2, 3], [1, 5, 3])] == [3, 1]


@pytest.mark.slow
def test_an_exchange_that_mixes_up_rows_is_found():
    """By the losses of experts, whose tokens it carries."""
    for answer in run_ranks(exchanging_wrongly):
        assert "AssertionError: losses" in json.loads(answer)["experts"]


def exchanging_wrongly(device: devices.Device) -> str:
    right = ranks.dist.all_to_all_single

    def wrong(arrived: torch.Tensor, *inputs: Any, **options: Any) -> None:
        right(arrived, *inputs, **options)
        if arrived.ndim == 2:  # rows, not their counts
            arrived.copy_(arrived.flip(0))

    ranks.dist.all_to_all_single = wrong
    return ranks.run_checks(device, ("experts",))


def second_call_flipped(right: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A permutation, so that its norm stays; the operator is called once in each block."""
    calls = itertools.count(1)

    def wrong(*inputs: Any) -> torch.Tensor:
        out = right(*inputs)
        return out.flip(-1) if next(calls) == 2 else out

    return wrong


@pytest.mark.parametrize(
    ("operator", "change", "place"),
    [
        ("attention", lambda right: lambda self, *qkv, segments=None, **rest: right(self, *qkv, **rest), "blocks.0"),
        ("attention", lambda right: lambda self, *qkv, window=0, **rest: right(self, *qkv, **rest), "blocks.0"),
        ("rotate", second_call_flipped, "blocks.1.attention: rotate"),
        ("rms_norm", lambda right: lambda self, x, *rest: right(self, x, *rest).flip(-1), "embedding_norm: rms_norm"),
    ],
    ids=["documents ignored", "windows ignored", "block 1", "norm"],
)
def test_a_wrong_step_fails_at_its_place(
    monkeypatch: pytest.MonkeyPatch, operator: str, change: Callable[[Any], Any], place: str
):
    """What check_npu.py itself computes is enough to notice an operator that is wrong."""
    right = getattr(CpuKernels, operator)
    steps = itertools.count()

    def record(*arguments: Any, **options: Any) -> list[recording.Reading]:
        with monkeypatch.context() as patch:
            if next(steps) % 2 == 0:  # the device's; every other one is the CPU's
                patch.setattr(CpuKernels, operator, change(right))
            return recording.record_step(*arguments, **options)

    assert "tensors within 0.00%" in quick.training_step("cpu")
    monkeypatch.setattr(quick, "record_step", record)
    with pytest.raises(AssertionError, match=f"forward {place}"):
        quick.training_step("cpu")


# ---------------------------------------------------------------------- whole runs


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_report_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """With every check that exists, each of them in a doubt. A shell may have the ranks of a larger job exported, as
    a guide on several nodes asks for."""
    for name, value in {"WORLD_SIZE": "8", "RANK": "0", "MASTER_ADDR": "10.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("NANOCHAT_API_KEY", "hidden")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "r.json"
    assert check_npu.main(["--device", "cpu", "--full", "--out", str(out)]) == 0, capsys.readouterr().out
    text = out.read_text()
    written = json.loads(text)
    assert "hidden" not in text and written["environment"]["OMP_NUM_THREADS"] == "1"
    assert written["versions"]["torch"] and written["commit"] and written["vendor_tool"]
    assert all(entry["seconds"] > 0 and entry["output"] for entry in written["parts"].values())
    checks = {line["name"]: line for line in written["parts"]["checks"]["lines"]}
    skipped = {name for name, line in checks.items() if line["outcome"] == "SKIP"}
    assert skipped == {"device files", "driver", "CANN", "CANN environment", "versions match"} and len(checks) == 13
    assert checks["all-reduce"]["detail"] == "2 processes"
    lines = {f"{part}.{line['name']}": line for part, entry in written["parts"].items() for line in entry["lines"]}
    line = lines["decoding.tokens[float32-eager]"]
    assert line["numbers"]["greedy"] == test_decoding.TOTAL and line["what"].startswith("Greedy and sampled")
    command = [sys.executable, "-m", "pytest", "--collect-only", "tests/on_device"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    exist = {f"{part}.{name}" for part, name in re.findall(r"on_device/test_(\w+)\.py::test_(.+)", listed)}
    assert exist and exist == {check for check in lines if not check.startswith("checks.")}
    assert {report.longest_start(check) for check in lines} == {start for row, _ in report.doubts() for start in row}
    assert {row["answer"] for row in written["doubts"]} == {"partly", "open"}  # small sizes say nothing of a card


def simulated_lines(tmp_path: Path, chosen: str, devices: int = 1, **options: Any) -> dict[str, dict[str, Any]]:
    """The lines of the chosen tests of tests/on_device on simulated NPUs, by name."""
    record = tmp_path / "lines.jsonl"
    try:
        environment = build.environment(devices=devices, **options)
    except build.Unavailable as missing:
        pytest.skip(f"no simulated NPU: {missing}")
    variables = {**environment, "ON_DEVICE": "npu", "ON_DEVICE_LINES": str(record)}
    command = ["-m", "pytest", "-p", "no:cacheprovider", "-k", chosen, "tests/on_device"]
    simulated(command, devices=devices, env=variables, **options)
    return {line["name"]: line for line in map(json.loads, record.read_text().splitlines())}


@pytest.mark.slow
def test_every_part_on_two_simulated_npus(tmp_path: Path):
    """All pass except some: the device cannot be profiled, and a step of depth 20 is too large for a simulator.
    test_npu_equals_cpu.py has the operators of the model, and steps in fp32."""
    chosen = "not test_kernel and not float32] and not profile[dense and not profile[experts or test_tokens"
    lines = simulated_lines(tmp_path, chosen, devices=2)
    failed = {name: line["detail"] for name, line in lines.items() if line["outcome"] == "FAIL"}
    assert failed.keys() == {"profile[packed]", "profile[decoding]"}, failed
    assert all("no table of kernels" in detail for detail in failed.values())
    assert {name for name, line in lines.items() if line["outcome"] == "SKIP"} == {"train_depth[20]"}
    assert all(lines[f"recordings[{rows}]"]["numbers"]["recordings"] >= 1 for rows in (4, 64, 256))
    assert lines["speed[experts_one_without_rows]"]["numbers"]["ms"] > 0
    assert lines["ranks[bandwidth]"]["numbers"]["gigabytes_per_second_at_128_mib"] > 0
    assert lines["train_depth[12]"]["numbers"]["counted_gib"] > 0.01


@pytest.mark.slow
def test_the_calls_are_ones_that_the_adapters_take(tmp_path: Path):
    """Nothing is computed, so that values are wrong. But no call raises an error."""
    chosen = "speed or tokens or recordings or memory or finite or (whole and bfloat16)"
    lines = simulated_lines(tmp_path, chosen, adapters=str(tmp_path / "calls.jsonl")).values()
    assert len(lines) == 14 + 4 + 3 + 1 + 1 + 3
    assert all(re.match("assert|AssertionError", line["detail"]) for line in lines if line["outcome"] == "FAIL"), lines
