"""--profile: the steps asked for are recorded and no others, the summary adds up, and training is not changed."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import call, losses, sha256
from test_scripts import TINY, base, tokenizer, trained_tokenizer  # noqa: F401
from test_stages import DPO, MID, RL, SFT, pretrained, start  # noqa: F401 (fixtures)
from tiny import cpu_device

from nanochat.device import Device
from nanochat.kernels import profiling
from nanochat.kernels.profiling import Recorder, kernel_table


def recorded(folder: Path) -> list[int]:
    """The numbers of the steps in a trace."""
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    names = [event.get("name", "") for event in events if event.get("ph") == "X"]
    return sorted(int(name.partition("#")[2]) for name in names if name.startswith("ProfilerStep#"))


def run(recorder: Recorder, steps: int) -> list[float]:
    with recorder:
        return [(torch.ones(4, 4) @ torch.ones(4, 4), recorder.boundary(step))[1] for step in range(1, steps + 1)]


class VendorProfiler:
    """A profiler that writes its own tables and has no `key_averages`, as torch_npu's."""

    def __init__(self, on_step: Callable[[], object] = lambda: None):
        self.on_step = on_step
        self.stopped = 0

    def start(self) -> None: ...

    def step(self) -> None:
        self.on_step()

    def stop(self) -> None:
        self.stopped += 1


def accelerator(
    monkeypatch: pytest.MonkeyPatch, profiler: VendorProfiler, synchronize: Callable[[], object] = lambda: None
) -> Device:
    monkeypatch.setattr(profiling, "make_profiler", lambda device, skipped, steps, folder: profiler)
    module: Any = SimpleNamespace(synchronize=synchronize, max_memory_allocated=lambda: 3 * 2**30)
    return cpu_device(kind="npu", module=module, name="Ascend910B3", dtype=torch.bfloat16)


# ---------------------------------------------------------------------- which steps


@pytest.mark.parametrize(
    ("asked", "left", "expected"),
    [(2, 9, [3, 4]), (4, 6, [2, 3, 4, 5]), (5, 5, [1, 2, 3, 4]), (9, 3, [1, 2]), (9, 2, [1]), (9, 1, [0])],
)
def test_the_steps_asked_for_or_as_many_as_there_are(tmp_path, capsys, asked, left, expected):
    run(Recorder(asked, left, cpu_device(), tmp_path / "profile"), left)
    assert recorded(tmp_path / "profile") == expected
    summary = (tmp_path / "profile" / "summary.txt").read_text()
    assert summary == capsys.readouterr().out
    first, *table, last = summary.splitlines()
    assert f"profile of {len(expected)} step" in first and last == f"trace: {tmp_path / 'profile'}"
    assert any(re.match(rf" +aten::mm .* {len(expected)} *$", line) for line in table)  # calls


@pytest.mark.parametrize(
    ("asked", "left", "rank"), [(0, 9, 0), (3, 0, 0), (3, 9, 1)], ids=["not asked", "none left", "another rank"]
)
def test_nothing_is_recorded(tmp_path, monkeypatch, capsys, asked, left, rank):
    monkeypatch.delattr(profiling, "make_profiler")
    device = cpu_device(rank=rank, world_size=rank + 1)
    assert run(Recorder(asked, left, device, tmp_path / "profile"), left) == [0.0] * left
    assert not (tmp_path / "profile").exists() and capsys.readouterr().out == ""


def test_a_run_that_fails_stops_the_profiler(tmp_path, monkeypatch):
    made = VendorProfiler()
    recorder = Recorder(3, 9, accelerator(monkeypatch, made), tmp_path / "profile")
    with pytest.raises(ZeroDivisionError), recorder:
        recorder.boundary(1)
        raise ZeroDivisionError
    assert made.stopped == 1


def test_an_earlier_recording_is_replaced(tmp_path):
    (tmp_path / "profile" / "old_ascend_pt").mkdir(parents=True)
    run(Recorder(1, 4, cpu_device(), tmp_path / "profile"), 4)
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == ["summary.txt", "trace.json"]


# ---------------------------------------------------------------------- the summary


def test_the_profilers_own_time_is_no_training(tmp_path, monkeypatch):
    """Steps of 20 ms, between which the profiler works for 100 s."""
    now = [0.0]
    waits = []

    def own_work() -> None:
        now[0] += 100

    monkeypatch.setattr("nanochat.kernels.profiling.time", SimpleNamespace(perf_counter=lambda: now[0]))
    device = accelerator(monkeypatch, VendorProfiler(own_work), lambda: waits.append(recorder.seen))
    recorder = Recorder(2, 3, device, tmp_path / "profile")
    taken = []
    with recorder:
        for step in (1, 2, 3):
            now[0] += 0.02
            taken.append(recorder.boundary(step))
    assert taken == pytest.approx([100, 100, 100])
    assert waits == [1, 3]  # after the last step that is left out and the last that is recorded, nowhere else
    summary = (tmp_path / "profile" / "summary.txt").read_text()
    assert "Ascend910B3 (npu, bfloat16): 20.00 ms a step, peak 3.00 GiB" in summary


# ---------------------------------------------------------------------- in training


def test_pretraining_is_not_changed(base, tokenizer):  # noqa: F811
    call("base_train", *TINY, "--num_iterations=5", "--profile=2")
    assert recorded(base / "runs" / "base" / "d1" / "profile") == [3, 4]
    call("base_train", *TINY, "--num_iterations=5", "--model_tag=plain")
    assert losses(base, "base", "plain") == losses(base, "base")
    assert sha256(base, "base", 5, "plain") == sha256(base, "base", 5)
    assert not (base / "runs" / "base" / "plain" / "profile").exists()


@pytest.mark.parametrize(
    ("script", "stage", "flags"),
    [("mid_train", "mid", MID), ("chat_sft", "sft", SFT), ("chat_dpo", "dpo", DPO), ("chat_rl", "rl", RL)],
)
def test_every_stage_has_it(start, script, stage, flags):  # noqa: F811
    call(script, *flags, "--source=base", "--num_iterations=2", "--profile=1")
    assert recorded(start / "runs" / stage / "d1" / "profile") == [1]


# ---------------------------------------------------------------------- the vendor's table

# The columns of torch_npu 2.13.0, and one more step than one file has.
KERNELS = Path(__file__).with_name("kernel_details.csv").read_text()


def test_the_summary_of_an_npu_has_the_kernels_that_took_most_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "profile" / "host_1_2_ascend_pt" / "ASCEND_PROFILER_OUTPUT"
    assert kernel_table(tmp_path / "profile", 2) == ""

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kernel_details.csv").write_text(KERNELS)

    run(Recorder(1, 4, accelerator(monkeypatch, VendorProfiler(write)), tmp_path / "profile"), 4)
    summary = (tmp_path / "profile" / "summary.txt").read_text()
    assert "MatMulV3" in summary and summary.endswith(f"trace: {tmp_path / 'profile'}\n")
    rows = [line.split() for line in kernel_table(tmp_path / "profile", 2).splitlines()]
    assert rows[1] == ["MatMulV3", "2", "0.600", "60.0%"] and rows[2][1:] == ["1", "0.200", "20.0%"]
    assert rows[-1] == ["all", "4", "1.000", "100.0%"] and len(rows) == 4
