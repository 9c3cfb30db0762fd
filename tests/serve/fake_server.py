"""Servers of the chat app for tests.

A `FakeScheduler` replies word by word as a test says; `wedged_scheduler` is a real one whose device hangs; `checkpoint`
is a folder that `scripts.chat_web` serves.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import tiny
from bodies import CONTEXT

from nanochat.serve.app import create_app
from nanochat.serve.listener import listening, make_server
from nanochat.serve.metrics import SchedulerMetrics
from nanochat.serve.scheduler import Chunk, Overloaded, Request, Scheduler, Stream, TokenLogprob
from nanochat.serve.state import LoadedModel


@dataclass
class FakeScheduler:
    """Each running reply gets one word per tick."""

    slots: int = 4
    queue: int = 4
    tick: float = 0.0  # seconds
    word: str = "word "
    calls: bool = False  # a reply calls the calculator first
    dies: bool = False  # its thread ends
    stalled_seconds: float = 0.0
    fails: bool = False  # each reply ends with an error
    raises: str = ""  # submit raises this
    requests: list[Request] = field(default_factory=list)
    running: list[tuple[Request, Stream]] = field(default_factory=list)
    waiting: list[tuple[Request, Stream]] = field(default_factory=list)
    finished: dict[str, int] = field(default_factory=dict)
    deadline: float | None = None  # set once it closes

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self.work = threading.Event()
        self.thread = threading.Thread(target=self.loop, daemon=True)
        self.metrics = SchedulerMetrics()
        self.metrics.slots.set(self.slots)
        self.metrics.running.set_function(lambda: len(self.running))
        self.metrics.queued.set_function(lambda: len(self.waiting))

    def start(self) -> None:
        self.thread.start()

    @property
    def size(self) -> int:
        return self.slots

    @property
    def capacity(self) -> int:
        return self.slots + self.queue

    def submit_all(self, requests: list[Request], on_chunk: Any = None) -> list[Stream]:
        if self.raises:
            raise RuntimeError(self.raises)
        with self.lock:
            if len(self.running) + len(self.waiting) + len(requests) > self.capacity:
                raise Overloaded(3.2)
            streams = [Stream(self.work.set, partial(on_chunk, number)) for number in range(len(requests))]
            self.requests += requests
            self.waiting += zip(requests, streams, strict=True)
            self.work.set()
        return streams

    def loop(self) -> None:
        while (not self.dies and self.deadline is None) or self.running or self.waiting:
            if not self.running and not self.waiting:
                self.work.wait(0.02)
                self.work.clear()
            with self.lock:
                for reply in [*self.running, *self.waiting]:
                    if reply[1].cancelled or time.monotonic() > (self.deadline or float("inf")):
                        self.end(reply, "cancelled")
                while self.waiting and len(self.running) < self.slots:
                    self.running.append(self.waiting.pop(0))
                for reply in list(self.running):
                    self.step(reply)
            time.sleep(self.tick)

    def step(self, reply: tuple[Request, Stream]) -> None:
        request, stream = reply
        made = stream.completion_tokens
        if self.fails:
            self.end(reply, "error", "out of memory")
        elif self.calls and request.calls == "own" and made == 0:
            stream.put(Chunk((), "2+", kind="python"))
            stream.put(Chunk((1,), "3", kind="python"))
            stream.put(Chunk((), "5", kind="python_output"))
        else:
            alternatives = tuple((65 + place, -0.5 - place) for place in range(request.logprobs))
            logprobs = (TokenLogprob(65, -0.5, alternatives),) if request.logprobs >= 0 else ()
            stream.put(Chunk((65,), f"{self.word}{made} " if len(self.word) < 20 else self.word, logprobs=logprobs))
        if stream.completion_tokens >= request.max_tokens:
            self.end(reply, "length")

    def end(self, reply: tuple[Request, Stream], reason: str, error: str = "") -> None:
        for replies in (self.running, self.waiting):
            if reply in replies:
                replies.remove(reply)
                self.finished[reason] = self.finished.get(reason, 0) + 1
                self.metrics.finished.labels(reason).inc()
                limit = reply[0].limit if reason == "length" else ""
                reply[1].put(Chunk(finish_reason=reason, error=error, limit=limit))

    def close(self, grace: float = 10.0) -> None:
        self.deadline = self.deadline or time.monotonic() + grace
        self.thread.join(grace + 5)


def loaded(scheduler: Any) -> LoadedModel:
    return LoadedModel(scheduler, tiny.tiny_tokenizer(), "tiny", CONTEXT, chats=True)


def body_of(include_usage: bool = False, calls: str = "own") -> Any:
    """What a serializer reads of a body."""
    return SimpleNamespace(include_usage=include_usage, calls=calls, family_calls=None, return_token_ids=None)


def make_app(scheduler: Any = None, model: LoadedModel | None = None, **settings: Any) -> Any:
    """An app over a fake scheduler that is ready as soon as it starts."""
    scheduler = scheduler or FakeScheduler()

    def load() -> LoadedModel:
        scheduler.start()
        return model or loaded(scheduler)

    return create_app(load, **settings)


def wedged_scheduler(release: Any) -> Scheduler:
    """A real one whose first step waits for `release`, as for a kernel that hangs."""
    scheduler = Scheduler(tiny.make_engine(stops=True, sequence_len=CONTEXT), slots=2)
    decode = scheduler.slots.decode

    def hang_in_this_kernel(**settings: Any) -> Any:
        release.wait()
        return decode(**settings)

    scheduler.slots.decode = hang_in_this_kernel  # pyright: ignore[reportAttributeAccessIssue]
    return scheduler


def checkpoint(folder: Path, seed: int = 0, **meta: Any) -> Path:
    tokenizer = tiny.tiny_tokenizer()
    model = tiny.lively_model(tiny.tiny_config(vocab_size=tokenizer.vocab_size, sequence_len=CONTEXT), seed=seed)
    return tiny.save_checkpoint(folder / "tiny", 1, model, tokenizer, {"stage": "sft", **meta})


@contextlib.contextmanager
def serving(app: Any, ready: bool = True) -> Iterator[int]:
    """The app on a real socket, in a thread; yields the port."""
    with listening("127.0.0.1", 0) as listener:
        server = make_server(app, 1)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            until(lambda: server.started and (not ready or app.state.nanochat.model is not None))
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(60)
        assert not thread.is_alive()


def until(condition: Callable[[], Any], seconds: float = 60.0) -> float:
    """Wait until it holds; returns the seconds it took, without those in which this process got no core."""
    began = last = time.monotonic()
    took = 0.0
    while not condition():
        time.sleep(0.002)
        now = time.monotonic()
        assert now - began < seconds, "it never happened"
        took += min(now - last, 0.01)
        last = now
    return took


@contextlib.contextmanager
def client_of(app: Any) -> Iterator[Callable[..., httpx.Response]]:
    """Requests straight into the app, without a socket: `ask(method, path, **httpx settings)`."""
    loop = asyncio.new_event_loop()
    lifespan = app.router.lifespan_context(app)
    loop.run_until_complete(lifespan.__aenter__())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://localhost")
    until(lambda: app.state.nanochat.model is not None or app.state.nanochat.failed)
    try:
        yield lambda method, path, **more: loop.run_until_complete(client.request(method, path, **more))
    finally:
        loop.run_until_complete(lifespan.__aexit__(None, None, None))
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error in a response; checks OpenAI's form."""
    (name, error), *rest = answer.json().items()
    assert name == "error" and not rest and set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"] and "\n" not in error["message"]
    return error


def asking() -> Iterator[Callable[..., httpx.Response]]:
    """For a fixture: a client of an app for tests that change nothing in it."""
    with client_of(make_app()) as ask:
        yield ask
