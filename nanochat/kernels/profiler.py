"""torch's profiler, or the vendor's profiler if the device has one."""

import importlib
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
