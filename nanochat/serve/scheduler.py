"""Continuous batching: requests join and leave a running batch between two decoded tokens.

Requests flow in from any thread, chunks of new tokens and their text flow out; one thread owns the device and runs
`_turn` for as long as there is work: let go who has left, take in who waits (copying what a slot has read of the same
prompt), read a chunk of the new prompts, decode one token for all that run. What a request is given does not depend on
its neighbours.
"""

import codecs
import logging
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from nanochat.engine import Call, Engine, Sampling, Slots, check_sampling
from nanochat.shell.cli import UserError

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)  # of the histograms
STALL_STEPS = 1.0  # a chunk of a prompt takes as long as so many decoded tokens, at most, while others wait for theirs
JOINS = 3  # requests at most that join then in one turn: each takes about a third of a decoded token's time
SMOOTHING = 0.2  # weight of the newest in a running mean
FEW_ROWS = 4  # a batch of so many takes hardly longer to decode than one row alone
SHORTEST_MATCH = 8  # tokens; copying fewer is not worth it


@dataclass(frozen=True)
class Request:
    """One generation, checked by whoever makes it."""

    prompt: tuple[int, ...]  # token ids, begin token first
    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # 1: off
    seed: int = 0
    stop: tuple[str, ...] = ()  # the text ends before the first of these
    logprobs: int = -1  # -1: none; n: of the token and n alternatives
    tools: bool = True  # answer the calculator's calls inside the stream


@dataclass(frozen=True)
class TokenLogprob:
    """How likely the model held a token, and its best alternatives."""

    token_id: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


@dataclass(frozen=True)
class Chunk:
    """What is new since the last chunk of a request."""

    token_ids: tuple[int, ...] = ()
    text: str = ""  # complete characters only; what may be the start of a stop string is held back
    by_model: bool = True  # False: the tool's answer
    kind: str = "text"  # "text", "python" (a call's code) or "python_output" (its answer)
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None  # on the last chunk alone: "stop", "length", "cancelled" or "error"
    error: str = ""


class Overloaded(Exception):
    """Slots and queue are full; `retry_after` seconds from now there may be room."""

    def __init__(self, retry_after: float):
        super().__init__(f"all slots are taken and the queue is full: try again in {retry_after:.0f} s")
        self.retry_after = retry_after


@dataclass(frozen=True)
class Histogram:
    """Counts of seconds by bucket, as Prometheus has them: `counts[i]` values up to `bounds[i]`, the last above all."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]  # one more than bounds; not summed up
    total: float = 0.0  # of the values, seconds


@dataclass(frozen=True)
class Figures:
    """A snapshot of what the scheduler does and has done."""

    running: int = 0
    queued: int = 0
    slots: int = 0
    tokens_generated: int = 0
    tokens_prompt: int = 0
    tokens_reused: int = 0  # of the prompts, copied from a slot that had them already
    requests_finished: dict[str, int] = field(default_factory=dict)  # by finish reason
    cache_used: int = 0  # bytes
    cache_total: int = 0  # bytes
    first_token_seconds: Histogram = Histogram((), (0,))
    token_seconds: Histogram = Histogram((), (0,))


class Stream:
    """What comes back from one request."""

    def __init__(self, prompt_tokens: int, wake: Callable[[], None]):
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.cancelled = False
        self._wake = wake
        self._arrived = threading.Condition()
        self._chunks: deque[Chunk] = deque()
        self._callback: Callable[[Chunk], None] | None = None

    def cancel(self) -> None:
        """End it; from any thread. The slot is free before the next decode step."""
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
        """Call back from the device's thread for each chunk; for those that came earlier at once, from this one."""
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
            except RuntimeError:  # an event loop that is closed takes no more calls: nobody listens
                self.cancelled = True


class TextOut:
    """Token ids become text that may be shown: whole characters, no special tokens, nothing of a stop string."""

    def __init__(self, tokens: list[bytes], stop: tuple[str, ...]):
        self.tokens, self.stop = tokens, stop
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.held = ""  # may be the beginning of a stop string

    def add(self, token: int) -> tuple[str, bool]:
        """The text that a token lets go, and whether a stop string has come."""
        text = self.plain(token)
        return self._cut(text) if self.stop and text else (text, False)

    def plain(self, token: int) -> str:
        """The same where no stop string counts."""
        return self.decoder.decode(self.tokens[token]) if token < len(self.tokens) else ""

    def flush(self) -> tuple[str, bool]:
        """The rest, where a text ends: half a character becomes U+FFFD."""
        text = self.decoder.decode(b"", True)
        self.decoder.reset()
        text, stopped = self._cut(text) if self.stop else (text, False)
        rest, self.held = self.held, ""
        return (text, True) if stopped else (text + rest, False)

    def _cut(self, text: str) -> tuple[str, bool]:
        text = self.held + text
        found = [place for place in (text.find(stop) for stop in self.stop) if place >= 0]
        if found:
            self.held = ""
            return text[: min(found)], True
        held = max(_overlap(text, stop) for stop in self.stop)
        self.held = text[len(text) - held :]
        return text[: len(text) - held], False


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that a stop string begins with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


class _Row(Call):
    """A request in its slot, or on its way there."""

    def __init__(self, request: Request, stream: Stream, tokens: list[bytes]):
        super().__init__()
        self.request, self.stream = request, stream
        self.slot = -1
        self.filled = 0  # tokens of the prompt in the cache
        self.begun = False  # its slot holds tokens of this prompt, and no longer another's
        self.joined = False  # all are, and it decodes
        self.made = 0  # new tokens
        self.kind = "text"
        self.out = TextOut(tokens, request.stop)
        self.began = self.last_time = time.monotonic()


class _Times:
    """A histogram that grows."""

    def __init__(self) -> None:
        self.counts, self.total = [0] * (len(SECONDS) + 1), 0.0

    def add(self, seconds: float) -> None:
        self.counts[next((i for i, bound in enumerate(SECONDS) if seconds <= bound), len(SECONDS))] += 1
        self.total += seconds

    def snapshot(self) -> Histogram:
        return Histogram(SECONDS, tuple(self.counts), self.total)


class Scheduler:
    """Serves requests from one engine, whose cache of `slots` rows is made here, once.

    `queue` more requests may wait. Between two decoded tokens of the running rows at most `prefill_chunk` tokens of new
    prompts are read. With `cache_bytes` there are no more slots than fit.
    Raises UserError: when not even one fits.
    """

    def __init__(
        self, engine: Engine, *, slots: int = 16, queue: int = 64, prefill_chunk: int = 256, cache_bytes: int = 0
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
        self.engine, self.queue_length = engine, queue
        self.context = engine.model.config.sequence_len
        self.slots = Slots(engine, slots, min(prefill_chunk, self.context))
        self.rows: list[_Row | None] = [None] * slots
        # The tokens that each slot holds as a prefill computed them, what decoding adds not among them: those are what
        # the same tokens give in any other prompt, bit by bit.
        self.contents: list[tuple[int, ...]] = [()] * slots
        self.used = [0] * slots  # when a slot was last taken, as a count
        self.waiting: deque[_Row] = deque()
        self.filling: deque[_Row] = deque()  # they have a slot, in the order in which their prompts are read
        self.changed = threading.Condition()  # over `waiting`, `closing` and `unfinished`, which other threads touch
        self.closing = self.killed = False
        self.unfinished = 0  # requests in slots or waiting
        self.thread: threading.Thread | None = None
        self.logger = logging.getLogger(__name__)
        # figures; the device's thread alone writes them
        self.taken = self.tokens_generated = self.tokens_prompt = self.tokens_reused = 0
        self.finished: Counter[str] = Counter()
        self.first_token, self.per_token = _Times(), _Times()
        self.step_seconds = self.prompt_token_seconds = self.request_seconds = 0.0  # running means

    # ------------------------------------------------------------------ any thread

    def start(self) -> None:
        """Start the thread that owns the device."""
        assert self.thread is None
        self.thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self.thread.start()

    @property
    def capacity(self) -> int:
        """Requests that it holds at most, in slots and waiting."""
        return len(self.rows) + self.queue_length

    def submit(self, request: Request) -> Stream:
        """Hand in a request; its chunks come out of the stream.

        Raises Overloaded: when slots and queue are full, or it is closing. Raises UserError: when the prompt and
        max_tokens do not fit the context, or a setting is out of range."""
        return self.submit_all([request])[0]

    def submit_all(self, requests: Sequence[Request]) -> list[Stream]:
        """Hand in several, or none of them. Raises what `submit` raises, Overloaded where not all find room."""
        for request in requests:
            self._check(request)
        tokens = self.engine.tokenizer.tokens
        rows = [_Row(request, Stream(len(request.prompt), self._wake), tokens) for request in requests]
        with self.changed:
            if self.closing or self.unfinished + len(rows) > self.capacity:
                waves = 1 + len(self.waiting) / len(self.rows)
                raise Overloaded(max(1.0, waves * self.request_seconds))
            self.unfinished += len(rows)
            self.waiting.extend(rows)
            self.changed.notify_all()
        return [row.stream for row in rows]

    def _check(self, request: Request) -> None:
        check_sampling(request.temperature, request.top_k, request.top_p, request.min_p, request.repetition_penalty)
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
        """Take no new requests, end the waiting ones, let the running ones finish within `grace` seconds, cancel what
        is left, and join the thread."""
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

    def figures(self) -> Figures:
        """What it does and has done, as of now."""
        rows = [row for row in list(self.rows) if row is not None]
        slots = len(self.rows)
        used = sum(row.filled + row.made for row in rows) * self.slot_bytes // self.slots.cache.capacity
        return Figures(
            running=len(rows),
            queued=max(0, self.unfinished - len(rows)),
            slots=slots,
            tokens_generated=self.tokens_generated,
            tokens_prompt=self.tokens_prompt,
            tokens_reused=self.tokens_reused,
            requests_finished=dict(self.finished),
            cache_used=used,
            cache_total=slots * self.slot_bytes,
            first_token_seconds=self.first_token.snapshot(),
            token_seconds=self.per_token.snapshot(),
        )

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()

    # ------------------------------------------------------------------ the device's thread

    def _run(self) -> None:
        reason = "error"
        try:
            self.slots.choose_sizes()
            while True:
                with self.changed:
                    while not self.unfinished and not self.killed:
                        self.changed.wait()
                    if self.killed:
                        reason = "cancelled"
                        return
                try:
                    self._turn()
                except Exception as error:  # one row's trouble (memory, say) must not end the server
                    self._log("generation failed: the requests in the slots end, later ones go on", error)
                    self._fail(f"generation failed: {type(error).__name__}")
        except Exception as error:
            self._log("the device takes no more work: serving ends", error)
        finally:
            self._end_all(reason)

    def _log(self, what: str, error: Exception) -> None:
        """With where it happened and no more: the message may quote what a user wrote."""
        where = "".join(traceback.format_tb(error.__traceback__))
        self.logger.error("%s\n%s%s", what, where, type(error).__name__)

    def _end_all(self, reason: str) -> None:
        """Give every stream its end, without a word to the device, which may be what failed."""
        with self.changed:
            self.closing = True
            left = [*self.waiting, *(row for row in self.rows if row is not None)]
            self.waiting.clear()
            self.rows = [None] * len(self.rows)
            self.unfinished = 0
            self.finished[reason] += len(left)
            self.changed.notify_all()
        for row in left:
            error = "the device failed" if reason == "error" else ""
            row.stream.put(Chunk((), row.out.flush()[0], row.kind != "python_output", row.kind, (), reason, error))

    def _turn(self) -> None:
        """Let go who has left, take in who waits, read some of their prompts, decode one token for all that run."""
        begin = time.perf_counter()
        for row in list(self.rows):
            if row is not None and row.stream.cancelled:
                self._finish(row, "cancelled")
        self._admit()
        read = self._read_prompts()
        running = [row for row in self.rows if row is not None and row.joined]
        if not running:
            return
        self._decode(running)
        seconds = time.perf_counter() - begin
        if not read:
            self.step_seconds = _mean(self.step_seconds, seconds)
        elif self.step_seconds:
            self.prompt_token_seconds = _mean(self.prompt_token_seconds, max(0.0, seconds - self.step_seconds) / read)

    def _admit(self) -> None:
        while True:
            with self.changed:
                # who has left the queue makes room in it at once, whether or not a slot is free
                gone = [row for row in self.waiting if row.stream.cancelled]
                for row in gone:
                    self.waiting.remove(row)
                row = self.waiting.popleft() if self.waiting and None in self.rows else None
            for one in gone:
                self._finish(one, "cancelled")
            if row is None:
                return
            self._place(row)

    def _place(self, row: _Row) -> None:
        """Find a slot for a request: where the beginning of its prompt stands already, or one that is little missed."""
        source, shared = self._best_match(row)
        # A low slot keeps the decoded batch small.
        busy = [place for place, one in enumerate(self.rows) if one is not None]
        limit = max(self._rows_worth(len(busy) + 1), *(place + 1 for place in busy), 0)
        free = [place for place in range(min(limit, len(self.rows))) if self.rows[place] is None]
        extends = shared == len(self.contents[source])  # taking that slot itself loses nothing
        if shared and source in free and (extends or len(free) == 1):
            slot = source
        else:
            slot = min(free, key=lambda place: (self.contents[place] != (), self.used[place]))
        row.slot = slot
        self.rows[slot] = row
        self.taken += 1
        self.used[slot] = self.taken
        self.tokens_prompt += len(row.request.prompt)
        self.filling.append(row)

    def _rows_worth(self, busy: int) -> int:
        """The smallest batch worth making room for, where what the low slots hold might be lost."""
        return self.slots.rows_for(min(max(busy, FEW_ROWS), len(self.rows)))

    def _best_match(self, row: _Row) -> tuple[int, int]:
        """The slot that has read the most of a request's prompt, and how many tokens; 0 where it is not worth it."""
        wanted = row.request.prompt[:-1]
        matches = [_shared(content, wanted) for content in self.contents]
        source = max(range(len(matches)), key=matches.__getitem__)
        return source, matches[source] if matches[source] >= SHORTEST_MATCH else 0

    def _begin(self, row: _Row) -> None:
        """Start on a prompt with what a slot has read of it by now: equal prompts that came together are read once."""
        source, shared = self._best_match(row)
        row.begun, row.filled = True, shared
        self.contents[row.slot] = row.request.prompt[:shared]
        self.slots.hold(row.slot, shared, source if shared else None)
        self.tokens_reused += shared

    def _read_prompts(self) -> int:
        """Read on in the prompts that came first; returns the number of tokens read.

        While others wait for their tokens, requests join in turns that read nothing, a few at a time.
        """
        budget, others = self.slots.prefill_chunk, any(row is not None and row.joined for row in self.rows)
        if others:
            budget = self._patience()
        left, joined = budget, 0
        while self.filling and left > 0:
            row = self.filling[0]
            if not row.begun:
                self._begin(row)
            wanted = row.request.prompt[:-1]
            chunk = wanted[row.filled : row.filled + left]
            if chunk and others and joined:
                break
            if chunk:
                left -= self.slots.prefill(row.slot, chunk, row.filled)
                row.filled += len(chunk)
                self.contents[row.slot] = wanted[: row.filled]
            if row.filled == len(wanted):
                if others and (left < budget or joined == JOINS):
                    break
                self.filling.popleft()
                request = row.request
                sampling = Sampling(
                    request.temperature,
                    request.top_k,
                    request.top_p,
                    request.min_p,
                    request.repetition_penalty,
                    request.seed,
                )
                self.slots.join(row.slot, request.prompt, request.max_tokens, sampling)
                row.joined = True
                joined += 1
        return budget - left

    def _patience(self) -> int:
        """The largest size of a chunk that takes no longer than STALL_STEPS decoded tokens, or the smallest one."""
        smallest, *larger = self.slots.chunk_sizes
        if not self.prompt_token_seconds:
            return smallest
        most = STALL_STEPS * self.step_seconds / self.prompt_token_seconds
        return max((size for size in larger if size <= most), default=smallest)

    def _decode(self, running: list[_Row]) -> None:
        self._close_ranks(running)
        rows = self.slots.rows_for(max(row.slot for row in running) + 1)
        longest = max(row.filled + row.made for row in running)
        alternatives = max(row.request.logprobs for row in running)
        tokens, table = self.slots.decode(rows, longest, alternatives)
        now = time.monotonic()
        given: dict[int, int] = {}
        for row in running:
            token, by_model = tokens[row.slot], not row.given
            if not by_model:
                token = row.given.popleft()
                given[row.slot] = token
            logprobs: tuple[TokenLogprob, ...] = ()
            if by_model and row.request.logprobs >= 0:
                logprobs = (_logprob(token, table[row.slot], row.request.logprobs),)
            (self.per_token if row.made else self.first_token).add(now - row.last_time)
            row.last_time = now
            self._hand_out(row, token, by_model, logprobs)
        if given:
            self.slots.give({slot: token for slot, token in given.items() if self.rows[slot] is not None})

    def _close_ranks(self, running: list[_Row]) -> None:
        """Where all who are in a slot fit a smaller batch, move the highest down, so that it is decoded as such."""
        busy = [row for row in self.rows if row is not None]
        size = self._rows_worth(len(busy))
        if max(row.slot for row in running) < size:
            return
        for row in running:
            if row.slot >= size:
                free = [place for place in range(size) if self.rows[place] is None]
                target = min(free, key=lambda place: (self.contents[place] != (), self.used[place]))
                source, held = row.slot, row.filled + row.made
                self.slots.move(source, target, held)
                self.contents[target] = self.contents[source]
                self.slots.leave(source, len(self.contents[source]))
                self.rows[source], self.rows[target] = None, row
                self.used[target] = self.used[source]
                row.slot = target

    def _hand_out(self, row: _Row, token: int, by_model: bool, logprobs: tuple[TokenLogprob, ...]) -> None:
        engine, request = self.engine, row.request
        if by_model and token in engine.stop_ids:
            self._finish(row, "stop")
            return
        row.made += 1
        self.tokens_generated += 1
        kind = "text" if by_model else "python_output"
        if by_model and (row.call is not None or token == engine.call_start):
            kind = "python"
        if kind != row.kind:
            if self._let_go(row):
                return
            row.kind = kind
        if by_model:
            engine.follow_call(row, token)
            if not request.tools:
                row.given.clear()
        if kind == "text":
            text, stopped = row.out.add(token)
        else:
            text, stopped = row.out.plain(token), False
        row.stream.put(Chunk((token,), text, by_model, kind, logprobs))
        if stopped:
            self._finish(row, "stop", flush=False)
        elif row.made >= request.max_tokens:
            self._finish(row, "length")

    def _let_go(self, row: _Row) -> bool:
        """Hand out what is held back, where one kind of text ends; True where that ends the request."""
        text, stopped = row.out.flush()
        if text:
            row.stream.put(Chunk((), text, row.kind != "python_output", row.kind))
        if stopped:
            self._finish(row, "stop", flush=False)
        return stopped

    def _finish(self, row: _Row, reason: str, *, flush: bool = True, error: str = "") -> None:
        """End a request, wherever it stands, and free its slot."""
        text = ""
        if flush:
            text, stopped = row.out.flush()
            reason = "stop" if stopped else reason
        if row.slot >= 0:
            if row in self.filling:
                self.filling.remove(row)
            self.slots.leave(row.slot, len(self.contents[row.slot]))
            self.rows[row.slot] = None
        self.finished[reason] += 1
        self.request_seconds = _mean(self.request_seconds, time.monotonic() - row.began)
        with self.changed:
            self.unfinished -= 1
            self.changed.notify_all()
        row.stream.put(Chunk((), text, row.kind != "python_output", row.kind, (), reason, error))

    def _fail(self, error: str) -> None:
        for slot, row in enumerate(self.rows):
            self.contents[slot] = ()  # who knows how far it was written
            if row is not None:
                row.filled = 0
                self._finish(row, "error", error=error)


def _shared(content: tuple[int, ...], wanted: tuple[int, ...]) -> int:
    """How many tokens two sequences begin with alike."""
    most = min(len(content), len(wanted))
    if content[:most] == wanted[:most]:
        return most
    return next(place for place in range(most) if content[place] != wanted[place])


def _mean(mean: float, newest: float) -> float:
    return newest if not mean else mean + SMOOTHING * (newest - mean)


def _logprob(token: int, numbers: list[float], alternatives: int) -> TokenLogprob:
    """Of a row of Slots.decode's table, which holds the most alternatives that anybody asked for."""
    most = (len(numbers) - 1) // 2
    values, ids = numbers[1 : 1 + most], numbers[1 + most :]
    best = tuple((int(one), value) for one, value in zip(ids, values, strict=True))
    return TokenLogprob(token, numbers[0], best[:alternatives])
