"""The service's data in memory: the limits, the queued requests with their results, and the models."""

import itertools
import json
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanochat.ground.cli import UserError, out_of_memory
from nanochat.serve.scheduler import log_failure
from nanochat.serve.schema import ApiError
from nanochat.train_service.sampling import MAX_NUMBERS, SampleJob
from nanochat.train_service.tenants import Slices, Trained, TrainedModel


@dataclass(frozen=True)
class Limits:
    """The limits of one server."""

    queue: int = 1024  # requests of one owner that wait
    slots: int = 16  # sequences sampled at once
    batch_tokens: int = 8192  # tokens of a micro-batch
    models: int = 8  # in memory at once
    snapshot_steps: int = 20  # optimizer steps between two snapshots
    owner_bytes: int = 0  # the disk for the weights of an owner, above which nothing new is saved; 0: any


def _started_future() -> "Future[bytes]":
    future: Future[bytes] = Future()
    future.set_running_or_notify_cancel()  # clients that wait for it cannot cancel it
    return future


@dataclass(frozen=True)
class Weights:
    """Saved weights, which never change: the folder of their step, and the parts of the model that they are."""

    step: Path
    trained: Trained


@dataclass(eq=False)
class Job:
    """A request in the queue."""

    id: str
    owner: str
    slices: "Slices[None] | None" = None  # None: it is a sample
    result: "Future[bytes]" = field(default_factory=_started_future)
    sampler: Weights | None = None  # a sample's weights; None: the base
    sample: SampleJob | None = None
    size: int = 0  # bytes of the request's body
    is_queued: bool = False  # False: it came before its turn

    @property
    def model_id(self) -> str:
        """The model of a request that is not a sample."""
        return self.id.rpartition(":")[0]

    @classmethod
    def finished(cls, request_id: str, content: bytes) -> "Job":
        """A request whose result is known."""
        job = cls(request_id, "")
        job.result.set_result(content)
        return job


class Queue:
    """Requests that wait. Owners take turns; each owner's requests come in the order of their arrival, and one that has
    run for a slice comes after those that arrived meanwhile."""

    def __init__(self) -> None:
        self._of: dict[str, list[Job]] = {}  # the owner whose turn is next is in front

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def append(self, job: Job) -> None:
        self._of.setdefault(job.owner, []).append(job)

    def put_back(self, job: Job) -> None:
        """Queue the rest of a request whose slice has run: all other owners come first."""
        self._of[job.owner] = [*self._of.pop(job.owner, []), job]

    def take(self, may_run: Callable[[Job], bool]) -> list[Job]:
        """The first request of the next owner that may run now. Of a sample, the owner's samples of the same weights,
        as many as are decoded together."""
        for owner in list(self._of):
            jobs = self._of.pop(owner)
            ready = [job for job in jobs if may_run(job)]
            taken = ready[:1]
            if taken and taken[0].sample is not None:
                taken = _together([job for job in ready if job.sample and job.sampler == taken[0].sampler])
            ids = {id(job) for job in taken}
            left = [job for job in jobs if id(job) not in ids]
            if left:
                self._of[owner] = left  # at the end: the others come first
            if taken:
                return taken
        return []


def _together(jobs: list[Job]) -> list[Job]:
    """The first samples whose results have at most MAX_NUMBERS numbers."""
    totals = itertools.accumulate(job.sample.numbers for job in jobs if job.sample)
    return [job for job, total in zip(jobs, totals, strict=True) if total <= MAX_NUMBERS] or jobs[:1]


@dataclass(eq=False)
class Model:
    """A client's model; `live` is its part in memory, which only the worker touches."""

    id: str
    owner: str
    facts: dict[str, Any]  # created, metadata, trained
    covered: int = -1  # the last request whose effect is in the snapshot; -1: without a snapshot
    snapshot: str = ""  # its folder
    done: int = -1  # the last request that has an outcome
    next: int = 0  # the number of the request that is queued next; request 0 creates the model
    early: dict[int, Job] = field(default_factory=dict)  # requests that came before their turn
    live: TrainedModel | None = None
    used: float = 0.0
    saved_steps: int = 0  # optimizer steps that the snapshot covers
    stopped: str = ""  # why it takes no more requests: its files are damaged

    @property
    def settings(self) -> Trained:
        return Trained(**self.facts["trained"])


# ---------------------------------------------------------------------- results


def as_json(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode()


def failure(error: Exception) -> bytes:
    """The result of a failed request: one line, and whether the client or the server is at fault."""
    if isinstance(error, UserError):
        return as_json({"error": str(error), "category": "user"})
    if isinstance(error, ApiError):
        return as_json({"error": error.body["error"]["message"], "category": "user"})
    if out_of_memory(error):
        return as_json({"error": "the server has too little memory for this: send shorter or fewer sequences, or lower "
                      "--batch_tokens", "category": "server"})  # fmt: skip
    log_failure("a request failed", error)
    return as_json({"error": "the server failed on this request; its log names the line", "category": "server"})
