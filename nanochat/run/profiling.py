"""A trace of a few training steps, and a page that says what it shows: `--profile N` of the training scripts.

`Recorder` stands beside the training loop and hears of every step. `Device.profiler` records; here the steps are
chosen, and the recording read into a few lines for people. The trace itself is for https://ui.perfetto.dev or
chrome://tracing.
"""

import csv
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nanochat.device import Device

SKIPPED = 3  # steps before the recording: they compile and fill caches, the last warms the profiler up
SHOWN = 10  # operators
PAUSE = "ynchronize"  # in the name of every call that does nothing but wait for the device


class Recorder:
    """Records `steps` training steps of a run that has `steps_left`, on rank 0; with 0 it does nothing.

    Used as a context manager around the loop; `step()` follows each training step. When the last one is recorded,
    the summary goes to `say` and to `folder/summary.txt`. An earlier recording in `folder` is replaced.
    """

    def __init__(self, steps: int, steps_left: int, device: Device, folder: Path, say: Callable[[str], object]):
        self.device, self.folder, self.say = device, folder, say
        self.skipped = max(0, min(SKIPPED, steps_left - 1, max(1, steps_left - steps)))
        self.steps = min(steps, steps_left - self.skipped)
        self.seen, self.began = 0, 0.0
        self.profiler: Any = None
        if self.steps > 0 and device.is_main:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            self.profiler = device.profiler(self.skipped, self.steps, folder)

    def __enter__(self) -> "Recorder":
        if self.profiler is not None:
            self.profiler.start()
            self.began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        if self.profiler is not None:
            self.profiler.stop()

    def step(self) -> float:
        """A training step was launched. Returns the seconds that recording took from the run."""
        if self.profiler is None:
            return 0.0
        self.seen += 1
        first, last = self.seen == self.skipped, self.seen == self.skipped + self.steps
        if first or last:
            self.device.synchronize()  # so that nothing of one side is recorded or timed on the other
        ended = time.perf_counter()
        self.profiler.step()
        if last:
            profiler, self.profiler = self.profiler, None
            profiler.stop()
            text = "\n".join(self._summary(ended - self.began, *_read(profiler, self.folder)))
            (self.folder / "summary.txt").write_text(text + "\n", encoding="utf-8")
            self.say(text)
        taken = time.perf_counter() - ended
        self.began = ended + taken if first else self.began + taken
        return taken

    def _summary(self, seconds: float, costs: dict[str, list[float]], kernels: list[float]) -> Iterator[str]:
        """The lines of summary.txt; `seconds` is how long the recorded steps took, the rest is from `_read`."""
        to_ms = 1e-3 / self.steps  # microseconds in all -> milliseconds a step
        step_ms, device_ms = seconds / self.steps * 1e3, sum(kernels) * to_ms
        host_ms = sum(host for name, (_, host, _) in costs.items() if PAUSE not in name) * to_ms
        calls = sum(calls for calls, _, _ in costs.values()) / self.steps
        yield f"profile of {self.steps} step{'s' if self.steps > 1 else ''} on {self.device}"
        yield f"a step: {step_ms:.2f} ms, host in operators {host_ms:.2f} ms ({host_ms / step_ms:.0%}), " + (
            f"device busy {device_ms:.2f} ms ({device_ms / step_ms:.0%}), {len(kernels) / self.steps:,.0f} launches"
            if kernels
            else f"{calls:,.0f} operators"
        )
        if self.device.kind != "cpu" and not kernels:
            yield "nothing was recorded on the device: the profiler's own messages above may say why"
        yield f"peak memory: {self.device.peak_memory() / 2**30:.2f} GiB"
        yield f"{'operator':<50} {'share':>6} {'device ms':>10} {'host ms':>10} {'calls':>8}"
        column, whole_ms = (2, device_ms) if kernels else (1, host_ms)
        for name, cost in sorted(costs.items(), key=lambda item: -item[1][column])[:SHOWN]:
            share = cost[column] * to_ms / whole_ms if whole_ms else 0
            times = f"{cost[2] * to_ms:>10.2f} {cost[1] * to_ms:>10.2f} {cost[0] / self.steps:>8.1f}"
            yield f"{name[:50]:<50} {share:>6.1%} {times}"
        traces = sorted(self.folder.rglob("trace*.json"))
        yield f"trace: {traces[0] if traces else 'none was written, see the messages above'}"


def _read(profiler: Any, folder: Path) -> tuple[dict[str, list[float]], list[float]]:
    """By operator its calls, host and device time without those of the operators that it called; and the time of every
    kernel; in microseconds. Some vendors' profilers write tables, torch's own answers itself."""
    costs: dict[str, list[float]] = {}

    def add(name: str, *cost: float) -> None:
        costs[name] = [a + b for a, b in zip(costs.get(name, (0, 0, 0)), cost, strict=True)]

    if not hasattr(profiler, "key_averages"):
        for call in _rows(folder, "operator_details.csv"):
            add(call["Name"], 1, float(call["Host Self Duration(us)"]), float(call["Device Self Duration(us)"]))
        return costs, [float(kernel["Duration(us)"]) for kernel in _rows(folder, "kernel_details.csv")]
    kernels: list[float] = []
    for event in profiler.key_averages():
        if event.device_type.name != "CPU" and not event.is_user_annotation:
            kernels += [event.self_device_time_total / event.count] * event.count
        elif not event.is_user_annotation:
            add(event.key, event.count, event.self_cpu_time_total, event.self_device_time_total)
    return costs, kernels


def _rows(folder: Path, name: str) -> Iterator[dict[str, str]]:
    for path in folder.rglob(name):
        with path.open(encoding="utf-8", newline="") as file:
            yield from csv.DictReader(file)
