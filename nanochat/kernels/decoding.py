"""Decoding on an accelerator: the launches of a token are recorded once and replayed as one.

In eager mode the host launches each operator separately, and a small model's operators are shorter than their launches.
A simulated NPU counts 240 launches for a decoded token at depth 12, and 9 with a recording (2026-11-30).

Legend: B rows, V vocab.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

from torch import Tensor

from nanochat.attention import KVCache
from nanochat.device import Device
from nanochat.engine import CACHE_STEP, Engine, Slots, round_up
from nanochat.ground.log import warn

KEPT_DECODERS = 2  # some callers take turns, such as one of many short replies and one of a few long ones

NOT_RECORDING: set[str] = set()  # kinds of devices that record nothing any more in this process


def stop_recording(kind: str, why: str) -> None:
    """Make no more recordings in this process; the first call warns, with the reason."""
    # After a failure in the middle of a recording torch_npu 2.9 refuses all later ones.
    if kind not in NOT_RECORDING:
        NOT_RECORDING.add(kind)
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


class Decoders:
    """Makes an engine's decoders, and keeps them for later callers, who need their caches and recordings again."""

    def __init__(self, records: bool):
        self.records = records  # whether launches are recorded
        self.kept: list[AcceleratorSlots] = []

    def __call__(self, engine: Engine, *sizes: int) -> "AcceleratorSlots":
        return AcceleratorSlots(engine, *sizes)

    @contextlib.contextmanager
    def lend(self, engine: Engine, size: int, capacity: int) -> "Iterator[AcceleratorSlots]":
        """`Engine.slots`. Where launches are recorded, the decoder is kept for the next caller."""
        slots = next((one for one in self.kept if one.size >= size and one.capacity >= capacity), None)
        if slots is None:
            # With a power of two most callers can use the decoder of the one before.
            rounded = min(_power_of_two(capacity), engine.model.config.sequence_len) if self.records else capacity
            # The new one does the work of smaller ones. Their memory is free before it takes its own.
            others = (one for one in self.kept if one.size > size or one.capacity > rounded)
            self.kept = [*others][-KEPT_DECODERS + 1 :]
            slots = self(engine, size, rounded)
        else:
            self.kept.remove(slots)  # a second caller, while the first one still decodes, makes its own
        slots.engine = engine
        failed = False
        try:
            yield slots
        except RuntimeError:  # out of memory, perhaps
            failed = True
            raise
        finally:
            if self.records and not failed:
                slots.reset()
                # No circle of references: the memory of both must be free at once when the engine goes.
                del slots.engine
                self.kept = [*self.kept[-KEPT_DECODERS + 1 :], slots]


class AcceleratorSlots(Slots):
    """A decoder that records its steps, and lays out its cache for the tokens that it holds where a device's attention
    reads all of it."""

    def __init__(self, engine: Engine, *sizes: int):
        super().__init__(engine, *sizes)
        self._lay_out(CACHE_STEP)
        # Recordings by their numbers of rows and attended tokens, and their memory: see `_step`.
        self._recorded: dict[tuple[int, int], Callable[[], None]] = {}
        self._results: tuple[Tensor, ...] = ()  # logits (size, V) and noise (size, 1) of the last replay
        self._memory: Any = None

    def reset(self) -> None:
        self._lay_out(CACHE_STEP)
        super().reset()

    def _step(self) -> tuple[Tensor, Tensor]:
        if not self.engine.decoders.records:
            return super()._step()
        # A recording has fixed shapes, so the numbers of rows and of attended tokens are rounded up to powers of two:
        # few recordings are made, and each is replayed often. A recording also computes slots without a row. Their
        # results are not read. Each writes to its own places only, and after the prompt that it may hold, where the
        # write is overwritten before anything attends to it.
        B = len(self.rows)
        attended_len = self._attended_len(max(len(row.prompt) + row.made for row in self.rows))
        rounded = min(_power_of_two(B), self.size)
        replay = self._recorded.get((rounded, attended_len))
        if replay is None:
            # This token runs as usual, which sets up everything lazy. The next ones are replays.
            cache = replace(self.cache.view(0, rounded), attended_len=attended_len, is_recorded=True)
            results = self._forward(cache)
            self._record(cache, results)
        else:
            replay()
            results = self._results
        logits, noise = results
        return logits[:B], noise[:B]

    def _record(self, cache: KVCache, like: tuple[Tensor, Tensor]) -> None:
        """Record a step whose results are like these. If the device refuses, nothing is recorded any more."""
        rounded = len(cache.position)
        device = self.engine.device

        def step() -> None:
            for result, new in zip(self._results, self._forward(cache), strict=True):
                result[:rounded] = new

        try:
            if not self._recorded:
                self._memory = device.module.graph_pool_handle()  # shared: they never run at the same time
                self._results = tuple(result.new_empty(self.size, result.size(1)) for result in like)
            self._recorded[rounded, cache.attended_len] = capture(device, step, self._memory)
        except RuntimeError as error:
            # The device's memory may be short, or its streams used up.
            head = next(iter(str(error).splitlines()), type(error).__name__)[:200]
            stop_recording(
                device.kind, f"the launches of a token could not be recorded, decoding goes on without, slower: {head}"
            )
            self.engine.decoders.records = False
            self._recorded.clear()
            self._results = ()
            self._memory = None

    # ---- the part of the cache that attention reads

    def _attended_len(self, tokens: int) -> int:
        records = self.engine.decoders.records
        reads_whole_cache = self.engine.model.kernels.reads_whole_cache
        if not records and not reads_whole_cache:
            return super()._attended_len(tokens)
        if records:
            tokens += 1  # a place after a prompt for what a recording writes to its slot, see `_step`
        rounded = _power_of_two(round_up(tokens, CACHE_STEP))
        rounded = min(rounded, self.cache.capacity)
        if not reads_whole_cache:
            return rounded
        if rounded > self.cache.stride:
            self._lay_out(rounded, kept=self.cache.stride)
        return self.cache.stride

    def shrink(self, longest: int) -> None:
        stride = max(CACHE_STEP, _power_of_two(longest + 1))
        if stride * 4 <= self.cache.stride:
            self._lay_out(stride, kept=longest)

    def _lay_out(self, stride: int, kept: int = 0) -> None:
        if self.engine.model.kernels.reads_whole_cache:
            lay_out(self.cache, min(stride, self.cache.capacity), kept)
            self._running = None


def lay_out(cache: KVCache, stride: int, kept: int) -> None:
    """From now on a head has `stride` places; the first `kept` tokens of each row stay.

    Some devices multiply without a copy only matrices that follow each other without gaps, so attention reads all
    places of a head there (operators.py: `reads_whole_cache`). While all rows are short, these are few.
    """
    B, K = cache.heads.shape
    if kept:
        kept = min(kept, cache.stride, stride)
    for memory in (cache.keys, cache.values):
        for layer in memory if kept else ():  # one at a time: it is copied, because old and new places overlap
            tokens = cache.by_head(layer)[:, :, :kept].clone()
            layer[: B * K * stride].view(B, K, stride, -1)[:, :, :kept] = tokens
    cache.stride = cache.attended_len = stride


def _power_of_two(tokens: int) -> int:
    """The smallest power of two that is at least `tokens`."""
    return 1 << (tokens - 1).bit_length()
