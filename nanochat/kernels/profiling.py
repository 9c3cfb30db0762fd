"""`--profile N` of the training scripts: a trace of N steps, and a table of the operators that took most time.

Open the trace in https://ui.perfetto.dev or chrome://tracing. The profiler is torch's, or the vendor's if the device
has one, which adds further tables.
"""

import csv
import importlib
import shutil
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch

from nanochat.device import Device
from nanochat.ground.log import noting, print0
from nanochat.run.progress import Attendant

SKIPPED = 3  # steps before the recording: they compile and fill caches; the last one warms up the profiler
SHOWN = 10  # operators in the table


class Recorder(Attendant):
    """Records `steps` training steps of a run that has `steps_left`, on rank 0; without steps it does nothing.

    After the last recorded step it prints the summary, and writes it to `folder/summary.txt`. It replaces an earlier
    recording in `folder`.
    """

    def __init__(self, steps: int, steps_left: int, device: Device, folder: Path):
        self.device = device
        self.folder = folder
        # A short run skips fewer steps, and always records at least one.
        self.skipped = max(0, min(SKIPPED, steps_left - 1, max(1, steps_left - steps)))
        self.steps = min(steps, steps_left - self.skipped)
        self.seen = 0
        self.seconds = 0.0  # time of the recorded steps, without the profiler's work
        self.profiler: Any = None

    def __enter__(self) -> "Recorder":
        if self.steps > 0 and self.device.is_main:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            self.profiler = make_profiler(self.device, self.skipped, self.steps, self.folder)
            self.profiler.start()
        self.resumed = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        # A run that ends early does not reach the last recorded step.
        if self.profiler is not None:
            self.profiler.stop()

    def boundary(self, step: int) -> float:
        if self.profiler is None:
            return 0.0
        self.seen += 1
        last = self.seen == self.skipped + self.steps
        if self.seen == self.skipped or last:
            self.device.synchronize()  # otherwise work of one step would be recorded or timed in another
        paused = time.perf_counter()
        if self.seen > self.skipped:
            self.seconds += paused - self.resumed
        with noting(f"--profile: {self.folder}", "the run goes on without its profile"):
            self.profiler.step()
            if last:
                self.profiler.stop()
                text = self._summary()
                print0(text)
                (self.folder / "summary.txt").write_text(text + "\n", encoding="utf-8")
        if last:
            self.profiler = None
        self.resumed = time.perf_counter()
        return self.resumed - paused

    def _summary(self) -> str:
        step_ms = self.seconds / self.steps * 1e3
        memory = self.device.peak_memory() / 2**30
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        lines = [f"profile of {steps} on {self.device}: {step_ms:.2f} ms a step, peak {memory:.2f} GiB"]
        if hasattr(self.profiler, "key_averages"):
            column = "self_cpu_time_total" if self.device.kind == "cpu" else "self_device_time_total"
            lines.append(self.profiler.key_averages().table(column, SHOWN, max_name_column_width=50))
        elif table := kernel_table(self.folder, SHOWN):
            lines.append(table)
        lines.append(f"trace: {self.folder}")
        return "\n".join(lines)


def make_profiler(device: Device, skipped: int, steps: int, folder: Path) -> Any:
    """A profiler that records `steps` steps after the first `skipped` and writes the trace to `folder`.

    It needs `start()`, a `step()` after every step, and `stop()`.
    """
    tool: Any = torch.profiler
    options: dict[str, Any] = {"on_trace_ready": lambda done: done.export_chrome_trace(str(folder / "trace.json"))}
    if device.kind == "npu":
        tool = importlib.import_module("torch_npu").profiler
        options = {
            "on_trace_ready": tool.tensorboard_trace_handler(str(folder.resolve())),
            "experimental_config": tool._ExperimentalConfig(aic_metrics=tool.AiCMetrics.AiCoreNone),
        }
    activities = [tool.ProfilerActivity.CPU]
    if device.kind != "cpu":
        activities.append(getattr(tool.ProfilerActivity, device.kind.upper()))
    # The profiler starts up in the last of the skipped steps, so the trace does not include its start-up.
    schedule = tool.schedule(wait=max(0, skipped - 1), warmup=min(1, skipped), active=steps, repeat=1)
    return tool.profile(activities=activities, schedule=schedule, **options)


def kernel_table(folder: Path, count: int) -> str:
    """The `count` types of kernels that took most time on the device, as torch_npu's profiler has recorded them below
    `folder`; "" if it has recorded none.

    Source: the columns of kernel_details.csv in torch_npu 2.13.0.
    """
    microseconds: defaultdict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for file in folder.glob("*/ASCEND_PROFILER_OUTPUT/kernel_details.csv"):
        with file.open(newline="", encoding="utf-8") as opened:
            for row in csv.DictReader(opened):
                microseconds[row["Type"]] += float(row["Duration(us)"])
                calls[row["Type"]] += 1
    if not calls:
        return ""
    total = sum(microseconds.values())
    lines = [f"{'kernels of this type':40}{'calls':>8}{'ms':>12}{'share':>8}"]
    for name in sorted(microseconds, key=lambda name: -microseconds[name])[:count]:
        time = microseconds[name]
        lines.append(f"{name:40}{calls[name]:8}{time / 1e3:12.3f}{time / total:8.1%}")
    lines.append(f"{'all':40}{calls.total():8}{total / 1e3:12.3f}{1:8.1%}")
    return "\n".join(lines)
