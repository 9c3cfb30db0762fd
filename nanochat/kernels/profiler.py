"""torch's profiler, or the vendor's profiler if the device has one."""

import csv
import importlib
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch

from nanochat.device import Device


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
