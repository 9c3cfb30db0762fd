"""Recordings of an accelerator's launches, which are replayed as one launch."""

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from nanochat.device import Device
from nanochat.ground.log import warn

_NOT_RECORDING: set[str] = set()  # kinds of devices that record nothing any more in this process


def works(kind: str) -> bool:
    """Whether no recording has failed in this process on this kind of device."""
    return kind not in _NOT_RECORDING


def stop(kind: str, why: str) -> None:
    """Make no more recordings in this process; the first call warns, with the reason."""
    # After a failure in the middle of a recording torch_npu 2.9 refuses all later ones.
    if kind not in _NOT_RECORDING:
        _NOT_RECORDING.add(kind)
        warn(why)


def capture(device: Device, function: Callable[[], None], memory: Any = None) -> Callable[[], None]:
    """Record what `function` launches, without running it; returns a call that replays everything in one launch.

    A replay uses the same tensors each time. The function writes its results to tensors that exist already, because its
    own are in `memory`, where the next recording puts its tensors, too. It must have run before: lazy set-up inside a
    recording fails. Raises RuntimeError: when the device cannot record it.
    """
    module = device.module
    graph = module.NPUGraph() if device.kind == "npu" else module.CUDAGraph()
    # "thread_local": a server's other threads may use the device meanwhile.
    with _recordable_launches(module), module.graph(graph, pool=memory, capture_error_mode="thread_local"):
        function()
    return graph.replay


@contextlib.contextmanager
def _recordable_launches(module: ModuleType) -> Iterator[None]:
    """Leave the second level of an NPU's task queue, under which torch_npu refuses to record."""
    if not hasattr(module, "set_task_queue_enable"):
        yield
        return
    level = module.get_task_queue_enable()
    module.set_task_queue_enable(min(level, 1))
    try:
        yield
    finally:
        module.set_task_queue_enable(level)
