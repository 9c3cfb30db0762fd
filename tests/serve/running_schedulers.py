"""Real schedulers over tiny engines, and what they did."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import tiny
import torch

from nanochat.engine import Engine, SamplingParams
from nanochat.serve.scheduler import Scheduler, Stream

GREEDY = SamplingParams(temperature=0)
SCHEDULER_CONTEXT = 80
make_engine = functools.partial(tiny.make_engine, sequence_len=SCHEDULER_CONTEXT)


def started() -> Iterator[Callable[..., Scheduler]]:
    """For a fixture: a function that starts a scheduler; all of them are closed at the end."""
    made: list[Scheduler] = []

    def make(engine: Engine | None = None, **settings: Any) -> Scheduler:
        scheduler = Scheduler(engine or make_engine(), **{"slots": 4, "prefill_chunk": 16, **settings})
        made.append(scheduler)
        scheduler.start()
        return scheduler

    yield make
    for scheduler in made:
        scheduler.close(grace=0)


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def tokens_of(stream: Stream) -> list[int]:
    return [token for chunk in stream for token in chunk.token_ids]


def metric(scheduler: Scheduler, name: str, **labels: str) -> float:
    return scheduler.metrics.registry.get_sample_value(f"nanochat_{name}", labels) or 0


def in_all_states(scheduler: Scheduler) -> tuple[float, float]:
    return metric(scheduler, "requests_running"), metric(scheduler, "requests_queued")


def finished(scheduler: Scheduler) -> dict[str, float]:
    """Requests by how they ended."""
    samples = [sample for family in scheduler.metrics.finished.collect() for sample in family.samples]
    return {sample.labels["reason"]: sample.value for sample in samples if sample.name.endswith("_total")}


def what_is_read(scheduler: Scheduler, monkeypatch: Any) -> list[list[int]]:
    """The lengths of the pieces of prompts that each pass reads from now on."""
    read: list[list[int]] = []
    prefill = scheduler.slots.prefill

    def recorded(slot: int, pieces: list[tuple[int, ...]], filled: int) -> int:
        read.append([len(piece) for piece in pieces])
        return prefill(slot, pieces, filled)

    monkeypatch.setattr(scheduler.slots, "prefill", recorded)
    return read
