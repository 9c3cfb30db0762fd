"""Continuous batching: requests join and leave a running batch between two decoded tokens.

A request is in one of four states:

    waiting   in the queue; any thread puts it there with `submit`
    reading   its prompt is being read into a slot, piece by piece
    read      its prompt is read; it joins the running rows in one of the next turns
    running   it gets a token each turn, until it ends

One thread owns the device and runs `_turn` for as long as there is work. Chunks of new tokens and their text come out
of the request's `Stream`. What a request gets does not depend on its neighbours, and nothing of a prompt is reused for
another request: the time to a first token would tell one client what another one wrote.
"""

import codecs
import logging
import threading
import time
import traceback
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from nanochat.engine import CHUNK_STEP, PREFILL_CHUNK, Engine, NewToken, Row, Slots
from nanochat.sampling import SamplingParams
from nanochat.shell.cli import UserError, check_ranges

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)  # seconds, of histograms
STALL_STEPS = 1.0  # while others wait for their tokens, a piece of a prompt takes at most as long as so many of them
SMOOTHING = 0.2  # weight of the newest value in a running mean


# ---------------------------------------------------------------------- what goes in and comes out


@dataclass(frozen=True)
class Request:
    """One generation."""

    prompt: tuple[int, ...]  # token ids, begin token first
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop: tuple[str, ...] = ()  # the text ends before the first of these
    logprobs: int = -1  # -1: none; n: of the token and n alternatives
    tools: bool = True  # answer the calculator's calls inside the stream


@dataclass(frozen=True)
class TokenLogprob:
    """The logprob of a token and of its likeliest alternatives."""

    token_id: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()  # (token id, logprob), likeliest first


@dataclass(frozen=True)
class Chunk:
    """What is new since the last chunk of a request."""

    token_ids: tuple[int, ...] = ()
    text: str = ""  # complete characters only; what may be the start of a stop string is held back
    by_model: bool = True  # False: the tool's answer
    kind: str = "text"  # "text", "python" (a call's code) or "python_output" (its answer)
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None  # on the last chunk only: "stop", "length", "cancelled" or "error"
    error: str = ""


class Overloaded(Exception):
    """Slots and queue are full; there may be room in `retry_after` seconds."""

    def __init__(self, retry_after: float):
        super().__init__(f"all slots are taken and the queue is full: try again in {retry_after:.0f} s")
        self.retry_after = retry_after


@dataclass(frozen=True)
class Histogram:
    """Counts of seconds by bucket, as in Prometheus: `counts[i]` values up to `bounds[i]`, the last count above all."""

    bounds: tuple[float, ...] = BUCKETS
    counts: tuple[int, ...] = (0,) * (len(BUCKETS) + 1)  # not cumulative
    total: float = 0.0  # sum of the values, seconds


@dataclass(frozen=True)
class Stats:
    """A snapshot of what the scheduler does and has done."""

    running: int = 0  # requests that hold a slot
    queued: int = 0
    slots: int = 0
    tokens_generated: int = 0
    tokens_prompt: int = 0
    requests_finished: dict[str, int] = field(default_factory=dict)  # by finish reason
    cache_used: int = 0  # bytes
    cache_total: int = 0  # bytes
    first_token_seconds: Histogram = Histogram()
    token_seconds: Histogram = Histogram()


class Stream:
    """The chunks of one request, for another thread to read."""

    def __init__(self, prompt_tokens: int, wake: Callable[[], None]):
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.cancelled = False
        self._wake = wake
        self._arrived = threading.Condition()
        self._chunks: deque[Chunk] = deque()
        self._callback: Callable[[Chunk], None] | None = None

    def cancel(self) -> None:
        """End the request; from any thread. Its slot is free before the next decoded token."""
        self.cancelled = True
        self._wake()

    def __iter__(self) -> Iterator[Chunk]:
        """Chunks as they come; blocks, for threads and tests."""
        while True:
            with self._arrived:
                while not self._chunks:
                    self._arrived.wait()
                chunk = self._chunks.popleft()
            yield chunk
            if chunk.finish_reason is not None:
                return

    def listen(self, callback: Callable[[Chunk], None]) -> None:
        """Call back from the device's thread for each chunk; for earlier ones at once, from this thread."""
        with self._arrived:
            self._callback = callback
            while self._chunks:
                callback(self._chunks.popleft())

    def put(self, chunk: Chunk) -> None:
        """Hand out a chunk; the scheduler's side."""
        with self._arrived:
            self.completion_tokens += len(chunk.token_ids)
            if self._callback is None:
                self._chunks.append(chunk)
                self._arrived.notify_all()
                return
            try:
                self._callback(chunk)
            except RuntimeError:  # a closed event loop takes no more calls: nobody listens
                self.cancelled = True


class TextOut:
    """Turns token ids into text that may be shown: whole characters, no special tokens, nothing of a stop string."""

    def __init__(self, tokens: list[bytes], stop: tuple[str, ...]):
        self.tokens = tokens
        self.stop = stop
        self.stopped = False  # a stop string is complete; nothing follows
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.held = ""  # may be the beginning of a stop string

    def add(self, token: int) -> str:
        """The text that may be shown after this token."""
        return self._cut(self.plain(token))

    def plain(self, token: int) -> str:
        """The same where stop strings do not count."""
        return self.decoder.decode(self.tokens[token]) if token < len(self.tokens) else ""

    def flush(self) -> str:
        """The rest, where a text ends: half a character becomes U+FFFD."""
        text = self._cut(self.decoder.decode(b"", True))
        self.decoder.reset()
        if not self.stopped:
            text += self.held
        self.held = ""
        return text

    def _cut(self, text: str) -> str:
        if not self.stop or self.stopped:
            return "" if self.stopped else text
        text = self.held + text
        self.held = ""
        found = [text.find(stop) for stop in self.stop if stop in text]
        if found:
            self.stopped = True
            return text[: min(found)]
        # Hold back the longest end of the text with which a stop string begins.
        longest = max(len(stop) for stop in self.stop) - 1
        for size in range(min(len(text), longest), 0, -1):
            end = text[len(text) - size :]
            if any(stop.startswith(end) for stop in self.stop):
                self.held = end
                return text[: len(text) - size]
        return text


# ---------------------------------------------------------------------- the scheduler


class _Row(Row):
    """A request on its way through the states."""

    def __init__(self, request: Request, stream: Stream, tokens: list[bytes], group: object):
        super().__init__(request.prompt, request.max_tokens, request.sampling, answers_calls=request.tools)
        self.request = request
        self.stream = stream
        self.group = group  # the same object for all requests that were submitted together
        self.filled = 0  # tokens of the prompt in the cache
        self.kind = "text"  # of its last token
        self.out = TextOut(tokens, request.stop)
        self.submitted = time.monotonic()
        self.last_time = self.submitted  # of its last token

    @property
    def unread(self) -> tuple[int, ...]:
        """The rest of the prompt; its last token is decoded, not read."""
        return self.request.prompt[self.filled : -1]


class _Times:
    """A histogram that grows."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds

    def snapshot(self) -> Histogram:
        return Histogram(BUCKETS, tuple(self.counts), self.total)


class Scheduler:
    """Serves requests from one engine, whose cache of `slots` rows is allocated here, once.

    `queue` more requests may wait. Between two decoded tokens of the running rows at most `prefill_chunk` tokens of new
    prompts are read. With `cache_bytes` there are no more slots than fit.
    Raises UserError: when not even one fits.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        slots: int = 16,
        queue: int = 64,
        prefill_chunk: int = PREFILL_CHUNK,
        cache_bytes: int = 0,
    ):
        self.slot_bytes = Slots.bytes_per_slot(engine)
        if cache_bytes:
            slots = min(slots, cache_bytes // self.slot_bytes)
        if slots < 1 or queue < 0 or prefill_chunk < 1:
            raise UserError(
                f"{slots} slots of {self.slot_bytes / 2**20:.1f} MiB in {cache_bytes / 2**20:.1f} MiB of cache "
                f"(--cache_gib), queue {queue}, prefill_chunk {prefill_chunk}: at least one slot, no negative queue, "
                "one token a chunk"
            )
        self.engine = engine
        self.queue_length = queue
        self.context = engine.model.config.sequence_len
        self.slots = Slots(engine, slots, prefill_chunk=min(prefill_chunk, self.context))

        # The states. `slots.rows` are the running ones; the device's thread alone touches all but `waiting`.
        self.waiting: deque[_Row] = deque()
        self.reading: _Row | None = None
        self.read: list[_Row] = []  # prompt is read, not yet running

        # Over what other threads touch: `waiting`, and these.
        self.changed = threading.Condition()
        self.closing = False
        self.killed = False
        self.unfinished = 0  # requests in any state
        self.thread: threading.Thread | None = None
        self.logger = logging.getLogger(__name__)

        # Statistics; the device's thread alone writes them.
        self.tokens_generated = 0
        self.tokens_prompt = 0
        self.finished: Counter[str] = Counter()
        self.first_token = _Times()
        self.per_token = _Times()
        self.step_seconds = 0.0  # running mean of a turn that reads no prompt
        self.prompt_token_seconds = 0.0  # running mean per token of a prompt
        self.request_seconds = 0.0  # running mean of a request, from `submit` to its end

    # ------------------------------------------------------------------ any thread

    def start(self) -> None:
        """Start the thread that owns the device."""
        assert self.thread is None
        self.thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self.thread.start()

    @property
    def capacity(self) -> int:
        """Requests that it holds at most, in slots and waiting."""
        return self.slots.size + self.queue_length

    def submit(self, request: Request) -> Stream:
        """Queue a request; its chunks come out of the stream.

        Raises Overloaded: when slots and queue are full, or it is closing. Raises UserError: when the prompt and
        max_tokens do not fit the context, or a setting is out of range.
        """
        return self.submit_all([request])[0]

    def submit_all(self, requests: Sequence[Request]) -> list[Stream]:
        """Queue several, or none of them. Raises what `submit` raises, Overloaded where not all find room.

        They belong to one client, so a prompt that several of them share is read once.
        """
        for request in requests:
            self._check(request)
        tokens = self.engine.tokenizer.tokens
        group = object()
        rows = [_Row(request, Stream(len(request.prompt), self._wake), tokens, group) for request in requests]
        with self.changed:
            if self.closing or self.unfinished + len(rows) > self.capacity:
                rounds = 1 + len(self.waiting) / self.slots.size
                raise Overloaded(max(1.0, rounds * self.request_seconds))
            self.unfinished += len(rows)
            self.waiting.extend(rows)
            self.changed.notify_all()
        return [row.stream for row in rows]

    def _check(self, request: Request) -> None:
        check_ranges(request.sampling)
        prompt = request.prompt
        vocabulary = self.engine.model.config.vocab_size
        if not prompt or min(prompt) < 0 or max(prompt) >= vocabulary:
            raise UserError(f"a prompt is token ids from 0 to {vocabulary - 1}, at least the begin token")
        if request.max_tokens < 1:
            raise UserError(f"max_tokens {request.max_tokens}: at least 1")
        if len(prompt) + request.max_tokens > self.context:
            raise UserError(
                f"the prompt's {len(prompt)} tokens and max_tokens {request.max_tokens} are more than the model's "
                f"context of {self.context}: shorten one of them"
            )

    def close(self, grace: float = 10.0) -> None:
        """Take no new requests, cancel the waiting ones, let the others finish within `grace` seconds, cancel what is
        left, and join the thread."""
        if self.thread is threading.current_thread():
            raise RuntimeError("close() waits for the thread that calls it")
        with self.changed:
            self.closing = True
            for row in self.waiting:
                row.stream.cancelled = True
            self.changed.notify_all()
            if self.thread is not None:
                self.changed.wait_for(lambda: self.unfinished == 0, timeout=grace)
            self.killed = True
            self.changed.notify_all()
        if self.thread is not None:
            self.thread.join()
        else:
            self._end_all("cancelled")

    def stats(self) -> Stats:
        """What it does and has done, as of now."""
        rows = self._in_slots()
        tokens = sum(row.filled + row.made for row in rows)
        return Stats(
            running=len(rows),
            queued=max(0, self.unfinished - len(rows)),
            slots=self.slots.size,
            tokens_generated=self.tokens_generated,
            tokens_prompt=self.tokens_prompt,
            requests_finished=dict(self.finished),
            cache_used=tokens * self.slot_bytes // self.slots.cache.capacity,
            cache_total=self.slots.size * self.slot_bytes,
            first_token_seconds=self.first_token.snapshot(),
            token_seconds=self.per_token.snapshot(),
        )

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()

    @property
    def running(self) -> list[_Row]:
        return cast(list[_Row], self.slots.rows)

    def _in_slots(self) -> list[_Row]:
        """The requests that are running, read or reading."""
        reading = self.reading
        return [*self.running, *self.read, *([] if reading is None else [reading])]

    # ------------------------------------------------------------------ the device's thread

    def _run(self) -> None:
        reason = "error"
        try:
            while True:
                with self.changed:
                    while not self.unfinished and not self.killed:
                        self.changed.wait()
                    if self.killed:
                        reason = "cancelled"
                        return
                try:
                    self._turn()
                except Exception as error:  # one request's trouble (memory, say) must not end the server
                    self._log("generation failed: the requests in the slots end, later ones are served", error)
                    self._fail(f"generation failed: {type(error).__name__}")
        except Exception as error:
            self._log("the device takes no more work: serving ends", error)
        finally:
            self._end_all(reason)

    def _turn(self) -> None:
        """One decoded token for all running rows, and what has to happen before it."""
        began = time.perf_counter()

        # 1. Cancelled requests leave, whatever state they are in.
        self._drop_cancelled()

        # 2. Either a piece of a new prompt is read, or requests whose prompts are read begin to run. While rows are
        #    running a turn never does both, so that it takes about two steps at most (docs/measurements.md).
        computed = 0
        if self.read and self.slots.rows:
            self._admit()
        else:
            computed = self._read_prompts()
            if self.read and not self.slots.rows:
                self._admit()

        # 3. A token for every running row.
        if not self.slots.rows:
            return
        self._decode()

        # 4. Measure: a turn without a prompt is a step; the rest of a turn with one is the prompt's.
        seconds = time.perf_counter() - began
        if not computed:
            self.step_seconds = _mean(self.step_seconds, seconds)
        elif self.step_seconds:
            per_token = max(0.0, seconds - self.step_seconds) / computed
            self.prompt_token_seconds = _mean(self.prompt_token_seconds, per_token)

    def _drop_cancelled(self) -> None:
        with self.changed:
            gone = [row for row in self.waiting if row.stream.cancelled]
            for row in gone:
                self.waiting.remove(row)
        gone += [row for row in self._in_slots() if row.stream.cancelled]
        self.slots.release(gone)
        for row in gone:
            self._finish(row, "cancelled")

    def _read_prompts(self) -> int:
        """Continue with the oldest prompts; returns the number of tokens computed."""
        budget = self._patience() if self.slots.rows else self.slots.prefill_chunk
        left = budget
        while left > 0:
            row = self.reading or self._next_waiting()
            if row is None:
                break
            self.reading = row
            if row.unread:
                piece = row.unread[: min(left, self.slots.prefill_chunk)]
                left -= self.slots.prefill(row.slot, [piece], row.filled)
                row.filled += len(piece)
            if not row.unread:
                self.reading = None
                self.read.append(row)
        return budget - left

    def _next_waiting(self) -> _Row | None:
        """Give the oldest waiting request the slot after the last one in use; None if no slot or request is left."""
        slot = 1 + max((row.slot for row in self._in_slots()), default=-1)
        with self.changed:
            if slot >= self.slots.size or not self.waiting:
                return None
            row = self.waiting.popleft()
        row.slot = slot
        self.tokens_prompt += len(row.prompt)
        # Choices of one request share their prompt: copy it from one that has read it.
        for other in self._in_slots():
            if other.group is row.group and other.prompt == row.prompt and not other.unread:
                row.filled = len(row.prompt) - 1
                self.slots.copy(other.slot, slot, row.filled)
                break
        return row

    def _patience(self) -> int:
        """Tokens of a prompt that take no longer than STALL_STEPS steps, in whole pieces of CHUNK_STEP."""
        if not self.prompt_token_seconds:
            return CHUNK_STEP
        tokens = STALL_STEPS * self.step_seconds / self.prompt_token_seconds
        return max(CHUNK_STEP, int(min(tokens, self.slots.prefill_chunk)) // CHUNK_STEP * CHUNK_STEP)

    def _admit(self) -> None:
        """Requests whose prompts are read begin to run."""
        rows = self.read
        self.read = []
        self.slots.admit(rows)

    def _decode(self) -> None:
        new_tokens = self.slots.decode(logprobs=max(row.request.logprobs for row in self.running))
        now = time.monotonic()
        ended: list[tuple[_Row, str]] = []
        for new in new_tokens:
            row = cast(_Row, new.row)
            times = self.first_token if row.last_time == row.submitted else self.per_token
            times.add(now - row.last_time)
            row.last_time = now
            reason = self._hand_out(row, new)
            if reason:
                ended.append((row, reason))
        self.slots.release([row for row, _ in ended])
        for row, reason in ended:
            self._finish(row, reason)

    def _hand_out(self, row: _Row, new: NewToken) -> str | None:
        """Put a token and its text into the stream; returns the reason where the request ends with it."""
        if new.finish_reason == "stop":
            return "stop"
        self.tokens_generated += 1

        # Where one kind of text ends, what is held back of it goes first.
        if new.kind != row.kind:
            text = row.out.flush()
            if text:
                row.stream.put(Chunk((), text, row.kind != "python_output", row.kind))
            if row.out.stopped:
                return "stop"
            row.kind = new.kind

        # Stop strings count in the reply's text only, not in a call or its answer.
        text = row.out.add(new.id) if new.kind == "text" else row.out.plain(new.id)
        logprobs: tuple[TokenLogprob, ...] = ()
        if new.by_model and row.request.logprobs >= 0:
            logprobs = (_logprob(new, row.request.logprobs),)
        row.stream.put(Chunk((new.id,), text, new.by_model, new.kind, logprobs))
        return "stop" if row.out.stopped else new.finish_reason

    # ---- ends

    def _finish(self, row: _Row, reason: str, error: str = "") -> None:
        """End a request, whatever state it is in; a running one has been released."""
        if row is self.reading:
            self.reading = None
        if row in self.read:
            self.read.remove(row)
        text = row.out.flush()
        if row.out.stopped:
            reason = "stop"
        self.finished[reason] += 1
        self.request_seconds = _mean(self.request_seconds, time.monotonic() - row.submitted)
        with self.changed:
            self.unfinished -= 1
            self.changed.notify_all()
        row.stream.put(Chunk((), text, row.kind != "python_output", row.kind, (), reason, error))

    def _fail(self, error: str) -> None:
        """End all requests in slots with an error. Raises what a device raises that is gone."""
        rows = self._in_slots()
        self.slots.reset()
        for row in rows:
            self._finish(row, "error", error)

    def _end_all(self, reason: str) -> None:
        """End every stream without touching the device, which may be what failed."""
        with self.changed:
            self.closing = True
            left = [*self.waiting, *self._in_slots()]
            self.waiting.clear()
            self.read = []
            self.reading = None
            self.slots.rows = []
            self.unfinished = 0
            self.finished[reason] += len(left)
            self.changed.notify_all()
        error = "the device failed" if reason == "error" else ""
        for row in left:
            row.stream.put(Chunk((), row.out.flush(), row.kind != "python_output", row.kind, (), reason, error))

    def _log(self, what: str, error: Exception) -> None:
        """Log where an error happened, not its message, which may quote what a user wrote."""
        where = "".join(traceback.format_tb(error.__traceback__))
        self.logger.error("%s\n%s%s", what, where, type(error).__name__)


def _mean(mean: float, newest: float) -> float:
    return newest if not mean else mean + SMOOTHING * (newest - mean)


def _logprob(new: NewToken, alternatives: int) -> TokenLogprob:
    """From a row of Slots.decode's table, which holds the most alternatives that any request wants."""
    most = (len(new.logprobs) - 1) // 2
    values = new.logprobs[1 : 1 + most]
    ids = new.logprobs[1 + most :]
    best = tuple((int(one), value) for one, value in zip(ids, values, strict=True))
    return TokenLogprob(new.id, new.logprobs[0], best[:alternatives])
