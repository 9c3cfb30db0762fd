"""--profile: the steps asked for are recorded and no others, the summary adds up, and training is not changed."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_scripts import (  # noqa: F401 (fixtures)
    TINY,
    base,
    call,
    losses,
    mistake,
    process,
    sha256,
    tokenizer,
    trained_tokenizer,
)
from test_stages import DPO, MID, RL, SFT, pretrained, start  # noqa: F401 (fixtures)
from tiny import cpu_device

from nanochat.device import Device
from nanochat.run.profiling import Recorder

HEADER = "Name,Input Shapes,Call Stack,Host Self Duration(us),Host Total Duration(us),Device Self Duration(us)\n"
CALLS = "aten::mul,,,1000,9000,2000\naten::mm,,,3000,9000,12000\naten::mul,,,1000,9000,4000\n"
KERNELS = "Step Id,Name,Duration(us)\n3,Mul,2000\n3,MatMulV2,12000\n4,Mul,4000\n4,Cast,2000\n"


def recorded(folder: Path) -> list[int]:
    """The numbers of the steps in a trace."""
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    names = [event.get("name", "") for event in events if event.get("ph") == "X"]
    return sorted(int(name.partition("#")[2]) for name in names if name.startswith("ProfilerStep#"))


def run(recorder: Recorder, steps: int) -> list[float]:
    with recorder:
        return [(torch.ones(4, 4) @ torch.ones(4, 4), recorder.step())[1] for _ in range(steps)]


class VendorProfiler:
    """Stands in for a profiler that writes tables when the last step is recorded, and answers nothing itself."""

    def __init__(self, tables: dict[str, str], folder: Path, on_step: Callable[[], object] = lambda: None):
        self.tables, self.folder, self.on_step = tables, folder, on_step
        self.stopped = 0

    def start(self) -> None: ...

    def step(self) -> None:
        self.on_step()
        for name, text in self.tables.items():
            path = self.folder / "host_1_ascend_pt" / "ASCEND_PROFILER_OUTPUT" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def stop(self) -> None:
        self.stopped += 1


def accelerator(
    monkeypatch: pytest.MonkeyPatch, profiler: Callable[[Path], Any], synchronize: Callable[[], object] = lambda: None
) -> Device:
    monkeypatch.setattr(Device, "profiler", lambda self, skipped, steps, folder: profiler(folder))
    module: Any = SimpleNamespace(synchronize=synchronize, max_memory_allocated=lambda: 3 * 2**30)
    return cpu_device(kind="npu", module=module, name="Ascend910B3", dtype=torch.bfloat16)


# ---------------------------------------------------------------------- which steps


@pytest.mark.parametrize(
    ("asked", "left", "expected"),
    [(2, 9, [3, 4]), (4, 6, [2, 3, 4, 5]), (5, 5, [1, 2, 3, 4]), (9, 3, [1, 2]), (9, 2, [1]), (9, 1, [0])],
)
def test_the_steps_asked_for_or_as_many_as_there_are(tmp_path, asked, left, expected):
    said: list[str] = []
    run(Recorder(asked, left, cpu_device(), tmp_path / "profile", said.append), left)
    assert recorded(tmp_path / "profile") == expected
    assert said == [(tmp_path / "profile" / "summary.txt").read_text().rstrip("\n")]
    assert said[0].startswith(f"profile of {len(expected)} step{'s' if len(expected) > 1 else ''} on 1 x test (cpu")


@pytest.mark.parametrize(
    ("asked", "left", "rank"), [(0, 9, 0), (3, 0, 0), (3, 9, 1)], ids=["not asked", "none left", "another rank"]
)
def test_nothing_is_recorded(tmp_path, monkeypatch, asked, left, rank):
    monkeypatch.delattr(Device, "profiler")
    device = cpu_device(rank=rank, world_size=rank + 1)
    assert run(Recorder(asked, left, device, tmp_path / "profile", pytest.fail), left) == [0.0] * left
    assert not (tmp_path / "profile").exists()


def test_a_run_that_fails_stops_the_profiler(tmp_path, monkeypatch):
    made = VendorProfiler({}, tmp_path)
    recorder = Recorder(3, 9, accelerator(monkeypatch, lambda folder: made), tmp_path / "profile", pytest.fail)
    with pytest.raises(ZeroDivisionError), recorder:
        recorder.step()
        raise ZeroDivisionError
    assert made.stopped == 1


def test_an_earlier_recording_is_replaced(tmp_path):
    (tmp_path / "profile" / "old_ascend_pt").mkdir(parents=True)
    run(Recorder(1, 4, cpu_device(), tmp_path / "profile", lambda text: None), 4)
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == ["summary.txt", "trace.json"]


# ---------------------------------------------------------------------- what the summary says


def test_the_summary_of_a_host(tmp_path):
    said: list[str] = []
    run(Recorder(2, 6, cpu_device(), tmp_path / "profile", said.append), 6)
    lines = said[0].splitlines()
    assert re.fullmatch(r"a step: [\d.]+ ms, host in operators [\d.]+ ms \(\d+%\), \d+ operators", lines[1])
    assert re.fullmatch(r"peak memory: \d+\.\d\d GiB", lines[2]) and lines[3].split()[0] == "operator"
    rows = [re.fullmatch(r"(\S+) +([\d.]+)% +0\.00 +([\d.]+) +([\d.]+)", line) for line in lines[4:-1]]
    assert 1 < len(rows) <= 10 and all(rows)
    shares = [float(row[2]) for row in rows if row]
    assert shares == sorted(shares, reverse=True) and 90 < sum(shares) < 100.6
    assert {row[1]: row[4] for row in rows if row}["aten::mm"] == "1.0"  # calls a step
    assert not any("ProfilerStep" in line for line in lines)
    assert lines[-1] == f"trace: {tmp_path / 'profile' / 'trace.json'}"


def test_the_tables_of_a_vendor(tmp_path, monkeypatch):
    """4 kernels of 20 ms and 3 calls in 2 steps of 20 ms; the profiler's own minutes are no training."""
    now, waits = [0.0], []

    def own_time() -> None:
        now[0] += 100

    monkeypatch.setattr("nanochat.run.profiling.time", SimpleNamespace(perf_counter=lambda: now[0]))
    tables = {"operator_details.csv": HEADER + CALLS, "kernel_details.csv": KERNELS, "trace_view.json": "[]"}
    profiler = lambda folder: VendorProfiler(tables, folder, own_time)  # noqa: E731
    device = accelerator(monkeypatch, profiler, lambda: waits.append(recorder.seen))
    said: list[str] = []
    recorder = Recorder(2, 3, device, tmp_path / "profile", said.append)
    with recorder:
        taken = []
        for _ in range(3):
            now[0] += 0.02
            taken.append(recorder.step())
    assert taken == pytest.approx([100, 100, 100])
    assert waits == [1, 3]  # behind the last step that is left out and the last that is recorded, nowhere else
    folder = tmp_path / "profile" / "host_1_ascend_pt" / "ASCEND_PROFILER_OUTPUT"
    assert said[0].splitlines() == [
        "profile of 2 steps on 1 x Ascend910B3 (npu, bfloat16)",
        "a step: 20.00 ms, host in operators 2.50 ms (12%), device busy 10.00 ms (50%), 2 launches",
        "peak memory: 3.00 GiB",
        "operator                                            share  device ms    host ms    calls",
        "aten::mm                                            60.0%       6.00       1.50      0.5",
        "aten::mul                                           30.0%       3.00       1.00      1.0",
        f"trace: {folder / 'trace_view.json'}",
    ]


def test_kernels_that_torch_itself_recorded(tmp_path, monkeypatch):
    """Ranges and pauses are no work; a kernel counts for the operator that launched it, once."""

    def event(key: str, kind: str, count: int, host: float, device: float, annotation: bool = False) -> Any:
        return SimpleNamespace(
            key=key, device_type=SimpleNamespace(name=kind), count=count, self_cpu_time_total=host,
            self_device_time_total=device, is_user_annotation=annotation,
        )  # fmt: skip

    events = [
        event("ProfilerStep*", "CPU", 1, 500, 0, annotation=True),
        event("ProfilerStep*", "CUDA", 1, 0, 70_000, annotation=True),
        event("aten::mm", "CPU", 4, 2000, 30_000),
        event("launch", "CPU", 6, 1000, 0),
        event("deviceSynchronize", "CPU", 1, 60_000, 0),
        event("gemm_128x128", "CUDA", 4, 0, 30_000),
        event("memcpy", "CUDA", 2, 0, 10_000),
    ]
    profiler = VendorProfiler({}, tmp_path)
    profiler.key_averages = lambda: events  # type: ignore[attr-defined]
    said: list[str] = []
    run(Recorder(1, 4, accelerator(monkeypatch, lambda folder: profiler), tmp_path / "profile", said.append), 4)
    assert re.search(r"host in operators 3\.00 ms \(\d+%\), device busy 40\.00 ms \(\d+%\), 6 launches", said[0])
    assert re.search(r"^aten::mm +75\.0% +30\.00 +2\.00 +4\.0$", said[0], re.MULTILINE)
    assert "ProfilerStep" not in said[0] and "none was written" in said[0]


def test_a_profiler_that_recorded_nothing_is_not_hidden(tmp_path, monkeypatch):
    device = accelerator(monkeypatch, lambda folder: VendorProfiler({}, folder))
    said: list[str] = []
    run(Recorder(1, 4, device, tmp_path / "profile", said.append), 4)
    assert "nothing was recorded on the device" in said[0] and "trace: none was written" in said[0]


# ---------------------------------------------------------------------- in training


def test_pretraining_is_not_changed(base, tokenizer, capsys):  # noqa: F811
    call("base_train", *TINY, "--num_iterations=6", "--profile=2")
    out = capsys.readouterr().out
    folder = base / "runs" / "base" / "d1" / "profile"
    assert recorded(folder) == [3, 4] and (folder / "summary.txt").read_text() in out
    assert "aten::" in out and f"trace: {folder / 'trace.json'}" in out
    profiled, sha = losses(base), sha256(base, 6)
    call("base_train", *TINY, "--num_iterations=6", "--model_tag=plain")
    assert losses(base, "plain") == profiled and sha256(base, 6, tag="plain") == sha
    assert not (base / "runs" / "base" / "plain" / "profile").exists()


@pytest.mark.parametrize(
    ("script", "stage", "flags"),
    [("mid_train", "mid", MID), ("chat_sft", "sft", SFT), ("chat_dpo", "dpo", DPO), ("chat_rl", "rl", RL)],
)
def test_every_stage_has_it(start, script, stage, flags):  # noqa: F811
    call(script, *flags, "--source=base", "--num_iterations=2", "--profile=1")
    folder = start / "runs" / stage / "d1" / "profile"
    assert recorded(folder) == [1]
    assert "profile of 1 step " in (folder / "summary.txt").read_text()


def test_a_negative_number_of_steps(base, tokenizer, capsys):  # noqa: F811
    code, err = mistake(capsys, "base_train", *TINY, "--profile=-1")
    assert code == 2 and "--profile -1: at least 0" in err


@pytest.mark.slow
def test_on_a_simulated_npu(base, tokenizer):  # noqa: F811
    """The real torch_npu.profiler. No CANN stands behind it there: it has nothing to tell of the device, says so, and
    the run is the same as without."""
    from simnpu import build

    try:
        environment = build.environment(devices=1)
    except build.Unavailable as reason:
        pytest.skip(f"no simulated NPU: {reason}")
    flags = (*TINY, "--device=npu", "--num_iterations=6")
    plain = process("scripts.base_train", *flags, "--model_tag=plain", **environment)
    assert plain.returncode == 0, plain.stderr
    result = process("scripts.base_train", *flags, "--profile=2", **environment)
    assert result.returncode == 0, result.stderr
    assert "profile of 2 steps on 1 x Ascend910B3 (npu, float32)" in result.stdout
    assert "nothing was recorded on the device: the profiler's own messages above may say why" in result.stdout
    assert (base / "runs" / "base" / "d1" / "profile" / "summary.txt").read_text() in result.stdout
    assert losses(base) == losses(base, "plain")
