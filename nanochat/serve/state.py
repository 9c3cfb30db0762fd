"""What the server holds beside its settings: the model once it is loaded, whether it is closing, and its figures.

`State` is written by the thread that loads, by the signal to end and by the event loop; out flows what the routes ask:
the model that is ready, and the text that Prometheus reads.
"""

import contextlib
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nanochat.serve.scheduler import Histogram, Scheduler
from nanochat.serve.schema import ApiError
from nanochat.shell.cli import UserError
from nanochat.tokenizer import Tokenizer


@dataclass(frozen=True)
class Served:
    """A model that is ready."""

    scheduler: Scheduler  # started
    tokenizer: Tokenizer
    name: str
    context: int  # tokens of prompt and reply together
    chats: bool  # False: a base model, which continues text
    created: int = 0  # seconds since 1970


class State:
    """What the app knows beside its settings: the model once it is there, and whether it is closing."""

    def __init__(self, load: Callable[[], Served], grace: float, on_failure: Callable[[BaseException], None]):
        self.served: Served | None = None
        self.draining = False
        self.failed = ""  # why nothing is served any more
        self.responses: Counter[int] = Counter()  # by status
        self._load, self._grace, self._on_failure = load, grace, on_failure
        self._lock = threading.Lock()
        self._closed = False

    def load(self) -> None:
        """Load the model; for a thread of its own.

        The thread must end: OpenMP's workers of this one and of the one that decodes would be more than there are
        cores, fall asleep between two products, and decoding take twice as long."""
        try:
            served = self._load()
        except BaseException as error:
            self._fail("could not load its model", error)
            return
        with self._lock:
            if self._closed:
                served.scheduler.close(0)
                return
            self.served = served
        threading.Thread(target=self._watch, args=(served.scheduler.thread,), name="watch", daemon=True).start()

    def _watch(self, device: threading.Thread) -> None:
        """Tell when the thread that owns the device has ended unasked."""
        device.join()
        if not self.draining:
            self._fail(
                "has lost its device", UserError("the device takes no more work, see above: start the server anew")
            )

    def _fail(self, why: str, error: BaseException) -> None:
        self.failed = why
        self._on_failure(error)

    def close(self) -> None:
        """Finish or end what runs; blocks. Whoever calls second waits for the first."""
        self.draining = True
        with self._lock:
            if not self._closed and self.served is not None:
                self.served.scheduler.close(self._grace)
            self._closed = True

    def ready(self) -> Served:
        """Raises ApiError: 503, while the model is loaded or the server closes."""
        if self.draining or self.failed or self.served is None:
            why = "is closing" if self.draining else self.failed or "loads its model"
            raise ApiError(503, f"the server {why}", code="not_ready", headers={"retry-after": "5"})
        return self.served


@contextlib.contextmanager
def closing_at_signals(state: State) -> Iterator[None]:
    """The server's own handlers wait for open streams before they tell the app: begin to close the streams with the
    signal itself."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            handler = signal.getsignal(number)
            if callable(handler):
                before[number] = handler

    def handle(number: int, frame: Any) -> None:
        threading.Thread(target=state.close, name="close", daemon=True).start()
        before[signal.Signals(number)](number, frame)

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def metrics_text(state: State, replica: int | None = None) -> str:
    """Prometheus' text format, version 0.0.4."""
    own = "" if replica is None else f'replica="{replica}"'
    lines: list[str] = []

    def labels(more: str) -> str:
        both = ",".join(part for part in (own, more) if part)
        return f"{{{both}}}" if both else ""

    def tell(name: str, kind: str, help: str, values: Mapping[str, float]) -> None:
        lines.extend((f"# HELP nanochat_{name} {help}", f"# TYPE nanochat_{name} {kind}"))
        lines.extend(f"nanochat_{name}{labels(label)} {value}" for label, value in values.items())

    def histogram(name: str, help: str, data: Histogram) -> None:
        lines.extend((f"# HELP nanochat_{name} {help}", f"# TYPE nanochat_{name} histogram"))
        seen = 0
        for bound, count in zip([*map(str, data.bounds), "+Inf"], data.counts, strict=True):
            seen += count
            label = f'le="{bound}"'
            lines.append(f"nanochat_{name}_bucket{labels(label)} {seen}")
        lines.append(f"nanochat_{name}_sum{labels('')} {data.total}")
        lines.append(f"nanochat_{name}_count{labels('')} {seen}")

    answers = {f'status="{status}"': count for status, count in sorted(state.responses.items())}
    errors = sum(count for status, count in state.responses.items() if status >= 500)
    tell("http_responses_total", "counter", "Answers by status.", answers)
    tell("http_errors_total", "counter", "Answers with a status of 500 or more.", {"": errors})
    tell("ready", "gauge", "1 when the model is loaded and takes requests.", {"": int(_is_ready(state))})
    if state.served is not None:
        figures = state.served.scheduler.figures()
        finished = {f'reason="{reason}"': count for reason, count in sorted(figures.requests_finished.items())}
        tell("requests_running", "gauge", "Requests that hold a slot.", {"": figures.running})
        tell("requests_queued", "gauge", "Requests that wait for a slot.", {"": figures.queued})
        tell("slots", "gauge", "Requests that can run at once.", {"": figures.slots})
        tell("requests_finished_total", "counter", "Requests by how they ended.", finished)
        tell("tokens_generated_total", "counter", "Tokens generated.", {"": figures.tokens_generated})
        tell("tokens_prompt_total", "counter", "Tokens of prompts.", {"": figures.tokens_prompt})
        tell("tokens_reused_total", "counter", "Tokens of prompts found in the cache.", {"": figures.tokens_reused})
        tell("cache_used_bytes", "gauge", "Bytes of the cache that requests use.", {"": figures.cache_used})
        tell("cache_bytes", "gauge", "Bytes of the cache.", {"": figures.cache_total})
        histogram("time_to_first_token_seconds", "From asking to the first token.", figures.first_token_seconds)
        histogram("time_per_token_seconds", "Between two tokens of a request.", figures.token_seconds)
    return "\n".join(lines) + "\n"


def _is_ready(state: State) -> bool:
    return state.served is not None and not state.draining and not state.failed
