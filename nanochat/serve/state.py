"""The server's state: the loaded models, whether the server is closing, and the counts of its responses."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import Metric

from nanochat.ground.cli import UserError
from nanochat.sampling import SamplingParams
from nanochat.serve.grammar import Vocabulary
from nanochat.serve.scheduler import Overloaded, Scheduler, log_place
from nanochat.serve.schema import ApiError
from nanochat.tokenizer import Tokenizer

GRACE_SECONDS = 7.0  # running replies have so long to finish when the server closes
STUCK_SECONDS = 60.0  # a step takes less than a second; the first ones on an NPU compile kernels
EXIT_SECONDS = 9.5  # after the signal to end; supervisors kill after 10

# Reads other weights from a folder; returns their fingerprint, and a function that loads them while no request runs.
ReadUpdate = Callable[[str], tuple[str, Callable[[], None]]]


@dataclass(frozen=True)
class LoadedModel:
    """A model that accepts requests."""

    scheduler: Scheduler  # started
    tokenizer: Tokenizer
    name: str
    context: int  # tokens of prompt and reply together
    chats: bool  # False: a base model, which continues text
    created: int = 0  # seconds since 1970
    fingerprint: str = ""  # identifies the weights; every reply names it
    sampling: SamplingParams = SamplingParams()  # defaults of a request's missing settings
    # For the page: tasks, parameters, data, trained_at, step, stage.
    about: Mapping[str, Any] = field(default_factory=dict)
    others: tuple["LoadedModel", ...] = ()  # the further models of the server, on the same device
    read_update: ReadUpdate | None = None  # None: its weights never change

    @property
    def all(self) -> tuple["LoadedModel", ...]:
        """Every model of the server, this one first."""
        return (self, *self.others)

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the tokenizer's longest token."""
        return max(map(len, self.tokenizer.token_texts))

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokens for grammars; built on first use, which takes a second for a large vocabulary."""
        return Vocabulary(self.tokenizer, self.end)

    @property
    def end(self) -> int:
        """The token after a reply; for a base model, after a text."""
        return self.tokenizer.reply_ends[0] if self.chats else self.tokenizer.text_end


class ServerState:
    """State that the loading thread, the signal to end and the event loop write, and the routes read.

    `load` returns the default model, which has the others. `on_failure` is called with the error when a model could not
    be loaded or the device stopped working. After STUCK_SECONDS in which no request moved, the server is not ready, and
    its log names the place.
    """

    def __init__(
        self,
        load: Callable[[], LoadedModel],
        on_failure: Callable[[BaseException], None],
    ):
        self.model: LoadedModel | None = None
        self.closing = False
        self.failed = ""  # why there will be no more replies
        self.updating = False  # other weights are being loaded
        self.updates = asyncio.Lock()  # one update at a time
        self.parsing = asyncio.Lock()  # one long body at a time
        self.compiling = asyncio.Lock()  # one grammar at a time,
        # for which each client sends one of its requests: otherwise one with many would keep the others out.
        self.turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.registry = CollectorRegistry()
        self.responses = Counter("nanochat_http_responses", "Responses by status.", ["status"], registry=self.registry)
        ready = Gauge("nanochat_ready", "1 when the model is loaded and takes requests.", registry=self.registry)
        ready.set_function(lambda: self.is_ready)
        self.registry.register(self)
        self._load = load
        self._on_failure = on_failure

    def load(self) -> None:
        """Load the model; runs on a separate thread.

        That thread must end. Its OpenMP workers and the workers of the decoding thread would together outnumber the
        cores. They would sleep between two matrix products, and decoding would take twice as long.
        """
        try:
            self.model = self._load()
        except BaseException as error:
            self._fail("could not load its model", error)
            return
        threading.Thread(target=self._watch, args=(self.model,), name="watch", daemon=True).start()

    def _watch(self, model: LoadedModel) -> None:
        """Log the place when the device's thread hangs, once each time. Report when it ends although nobody closed
        the server: its device failed."""
        was_stuck = False
        thread = model.scheduler.thread
        while thread.is_alive():
            thread.join(min(1.0, STUCK_SECONDS / 4))
            is_stuck = self.is_stuck
            if is_stuck and not was_stuck:
                log_place(f"no request has moved for {STUCK_SECONDS:g} s; the device's thread is at", thread)
            was_stuck = is_stuck
        if not self.closing:
            error = UserError("the device takes no more work, see the error above: restart the server")
            self._fail("has lost its device", error)

    def update(self, path: str) -> LoadedModel:
        """Load the weights in a folder. Running replies finish with the old ones; new requests are refused meanwhile.

        Raises ApiError: 403 if the weights never change, 400 if the folder does not fit.
        """
        model = self.ready_model()
        if model.read_update is None:
            message = "the weights of this server stay: --for_rl lets a trainer replace them"
            raise ApiError(403, message, code="not_for_rl")
        with ThreadPoolExecutor(1) as thread:  # a thread that ends, as in `load`
            return thread.submit(self._update, model, model.read_update, path).result()

    def _update(self, model: LoadedModel, read: ReadUpdate, path: str) -> LoadedModel:
        try:
            fingerprint, take_over = read(path)
        except (ValueError, OSError) as error:  # UserError among them
            raise ApiError(400, str(error), param="model_path", code="invalid_value") from error
        self.updating = True
        try:
            model.scheduler.while_idle(take_over)
            self.model = replace(model, fingerprint=fingerprint)
        except Overloaded as error:
            raise ApiError(503, "the server is closing", code="not_ready") from error
        finally:
            self.updating = False
        return self.model

    def collect(self) -> Iterable[Metric]:
        """Each metric of the models' schedulers once, for the registry; its samples have the label `model`."""
        found: dict[str, Metric] = {}
        models = () if self.model is None else self.model.all
        for model in models:
            for metric in model.scheduler.metrics.registry.collect():
                merged = found.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    merged.samples.append(sample._replace(labels={"model": model.name, **sample.labels}))
        return found.values()

    def _fail(self, why: str, error: BaseException) -> None:
        self.failed = why
        self._on_failure(error)

    def close(self) -> None:
        """Let running replies finish within the grace, and end the others; blocks. May be called more than once."""
        self.closing = True
        if self.model is not None:
            self.model.scheduler.close(GRACE_SECONDS)

    def device_thread(self) -> threading.Thread | None:
        """The device's thread, of all models; None before they are loaded."""
        return None if self.model is None else self.model.scheduler.thread

    @property
    def is_stuck(self) -> bool:
        """Whether no request of some model has moved for too long."""
        models = () if self.model is None else self.model.all
        return any(one.scheduler.stalled_seconds > STUCK_SECONDS for one in models)

    @property
    def is_ready(self) -> bool:
        return self.model is not None and not (self.closing or self.failed or self.updating or self.is_stuck)

    def ready_model(self) -> LoadedModel:
        """The model. Raises ApiError: 503 while it loads, after it has failed, and when the server closes."""
        if self.model is not None and self.is_ready:
            return self.model
        why = "is closing" if self.closing else self.failed or "is loading its model"
        wait = "5"
        if self.updating and not self.closing:
            why = "takes over other weights"
            wait = "1"
        elif self.is_stuck and not (self.closing or self.failed):
            why = "is stuck: its log names the place"
        raise ApiError(503, f"the server {why}", code="not_ready", headers={"retry-after": wait})


@contextlib.contextmanager
def closing_at_signals(
    close: Callable[[], None], device_thread: Callable[[], threading.Thread | None]
) -> Iterator[None]:
    """Begin to `close` the replies as soon as SIGTERM or SIGINT arrives, and end the process after EXIT_SECONDS.

    uvicorn's own handler waits for open streams before it ends the app's lifespan, so it would wait for every reply.
    """
    handlers: dict[int, Any] = {}

    def handle(number: int, frame: Any) -> None:
        threading.Thread(target=close, name="close", daemon=True).start()
        threading.Thread(target=_exit_late, args=(device_thread,), name="exit", daemon=True).start()
        handlers[number](number, frame)

    if threading.current_thread() is threading.main_thread():  # Python allows it nowhere else
        for number in (signal.SIGTERM, signal.SIGINT):
            handler = signal.getsignal(number)
            if callable(handler):
                handlers[number] = handler
                signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _exit_late(device_thread: Callable[[], threading.Thread | None]) -> None:
    """End the process EXIT_SECONDS from now, whatever its threads do: one that waits for the device for ever would
    keep the server from closing."""
    time.sleep(EXIT_SECONDS)
    thread = device_thread()
    if thread is not None and thread.is_alive():
        log_place("the server ends, but the device's thread does not; it is at", thread)
    os._exit(1)
