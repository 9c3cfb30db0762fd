"""`--profile N` of the training scripts: a trace of N steps, and torch's table of their operators.

Open the trace in https://ui.perfetto.dev or chrome://tracing. A vendor's profiler adds further tables.
"""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanochat.device import Device
from nanochat.kernels.profiler import kernel_table, make_profiler
from nanochat.run.loop import Attendant

SKIPPED = 3  # steps before the recording: they compile and fill caches; the last one warms up the profiler
SHOWN = 10  # operators in the table


class Recorder(Attendant):
    """Records `steps` training steps of a run that has `steps_left`, on rank 0; with 0 steps it does nothing.

    It starts immediately. After the last recorded step the summary goes to `report` and to `folder/summary.txt`. It
    replaces an earlier recording in `folder`.
    """

    def __init__(self, steps: int, steps_left: int, device: Device, folder: Path, report: Callable[[str], object]):
        self.device = device
        self.folder = folder
        self.report = report
        # A short run skips fewer steps, and always records at least one.
        self.skipped = max(0, min(SKIPPED, steps_left - 1, max(1, steps_left - steps)))
        self.steps = min(steps, steps_left - self.skipped)
        self.seen = 0
        self.seconds = 0.0  # time of the recorded steps, without the profiler's work
        self.profiler: Any = None
        if self.steps > 0 and device.is_main:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            self.profiler = make_profiler(device, self.skipped, self.steps, folder)
            self.profiler.start()
        self.resumed = time.perf_counter()

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
        self.profiler.step()
        if last:
            self.profiler.stop()
            text = self._summary()
            self.profiler = None
            (self.folder / "summary.txt").write_text(text + "\n", encoding="utf-8")
            self.report(text)
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
