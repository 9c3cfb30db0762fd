"""Continuous batching: requests join and leave a running batch between two decoded tokens.

A request is in one of four states:

    waiting   `submit` has queued it, from any thread
    reading   it has a slot, and its prompt is read piece by piece
    read      its prompt is read; it joins the running rows in one of the next turns
    running   it gets a token each turn, until it ends

One thread owns the device and runs `_turn` while there is work. Models that share a device share this thread: each has
its own scheduler, and they take turns (`DeviceThread`). The request's `Stream` returns chunks of new tokens and
their text. The reply to a request does not depend on its neighbours. Prompts are not reused for other requests: the
time to a first token would reveal to one client what another one wrote.

The scheduler does not check requests. serve/prompts.py passes on only requests that fit the vocabulary and the context.
"""

import codecs
import itertools
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Literal, NamedTuple, cast

import torch

from nanochat.engine import CACHE_STEP, CHUNK_STEP, PREFILL_CHUNK, Engine, NewToken, Row, Slots, logprob_table, round_up
from nanochat.families.tool_calls import ThoughtReader
from nanochat.ground.cli import UserError, out_of_memory
from nanochat.ground.log import print0
from nanochat.sampling import SamplingParams
from nanochat.serve.grammar import AfterThought, Grammar
from nanochat.serve.metrics import SchedulerMetrics
from nanochat.serve.tools import Calls

LEAST_BUDGET = 2 * CHUNK_STEP  # tokens of prompts read in a turn while others wait; fewer take as long
CACHE_SHARE = 0.7  # of the free memory for a cache of the default size; prompts, logits and recordings need some, too
SMOOTHING = 0.2  # weight of the newest value in a running mean
SCORED_AT_ONCE = 64  # tokens of a prompt whose logits are in memory at once


# ---------------------------------------------------------------------- what goes in and comes out


@dataclass(frozen=True)
class Request:
    """One generation; prompt and `max_tokens` together fit the model's context."""

    prompt: tuple[int, ...]  # token ids, begin token first
    max_tokens: int  # 0: only read the prompt
    sampling: SamplingParams = SamplingParams()
    stop: tuple[str, ...] = ()  # the text ends before the first of these
    logprobs: int = -1  # -1: none; n: for the token and n alternatives
    echo: int = 0  # this many of the prompt's last tokens precede the reply, with `logprobs` as well
    strips_space: bool = False  # its text begins without the space before its first word
    spelled: Mapping[int, bytes] = field(default_factory=dict)  # special tokens that are text here, with their names
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits of these tokens
    stop_ids: frozenset[int] = frozenset()  # further tokens that end the reply
    limit: Literal["max_tokens", "context"] = "max_tokens"  # the origin of `max_tokens`
    grammar: Grammar | AfterThought | None = None  # the grammar of the reply; only this request uses it
    in_thought: bool | None = None  # whether the reply begins within a thought; None: it has no thought
    calls: Calls = "own"  # see serve/tools.py
    every_token: bool = False  # chunks have every token with its logprob, including the token that ends the reply


@dataclass(frozen=True)
class TokenLogprob:
    """The logprob of a token and of its most likely alternatives."""

    token_id: int
    # None for the first token of an echoed prompt, and with `every_token` for a token that the model did not choose.
    logprob: float | None
    alternatives: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


class Chunk(NamedTuple):
    """The new part since the last chunk of a request."""

    token_ids: tuple[int, ...] = ()
    text: str = ""  # complete characters only; what may be the start of a stop string is held back
    kind: str = "text"  # "text", "thought", "python" (a call's code) or "python_output" (the tool's answer to it)
    logprobs: tuple[TokenLogprob, ...] = ()
    # On the last chunk only: "stop", "tool_calls", "length", "cancelled" or "error".
    finish_reason: str | None = None
    error: str = ""
    limit: str = ""  # the limit of a reply that ended with "length": "max_tokens" or "context"
    is_clients_error: bool = False  # the request was wrong, not the server


class Overloaded(Exception):
    """Slots and queue are full; there may be room in `retry_after` seconds. Or the scheduler closes."""

    def __init__(self, retry_after: float, is_closing: bool = False):
        self.retry_after = retry_after
        self.is_closing = is_closing


class Stream:
    """A request for its client. Its chunks go to `on_chunk`, on the device's thread, or are iterated over."""

    def __init__(self, wake: Callable[[], None], on_chunk: Callable[[Chunk], None] | None = None):
        self.completion_tokens = 0
        self.cancelled = False
        self._wake = wake
        self._chunks: SimpleQueue[Chunk] = SimpleQueue()
        self._on_chunk = on_chunk or self._chunks.put

    def cancel(self) -> None:
        """End the request; from any thread. Its slot is free before the next decoded token."""
        self.cancelled = True
        self._wake()

    def __iter__(self) -> Iterator[Chunk]:
        """Chunks as they arrive; blocks, for threads and tests."""
        while True:
            chunk = self._chunks.get()
            yield chunk
            if chunk.finish_reason is not None:
                return

    def put(self, chunk: Chunk) -> None:
        """Pass a chunk to the client; the scheduler calls it."""
        self.completion_tokens += len(chunk.token_ids)
        try:
            self._on_chunk(chunk)
        except RuntimeError:  # a closed event loop accepts no more calls: nobody listens
            self.cancelled = True


@dataclass(eq=False)
class TextOut:
    """Turns token ids into visible text: whole characters, without special tokens and stop strings."""

    tokens: list[bytes]
    stop: tuple[str, ...]
    strips_space: bool = False  # leave out a space before the first word
    spelled: Mapping[int, bytes] = field(default_factory=dict)
    thoughts: ThoughtReader | None = None  # set where the reply may have a thought before its text
    stopped: bool = False  # a stop string is complete; nothing follows
    held: str = ""  # text that may be the beginning of a stop string

    def __post_init__(self) -> None:
        self.longest = max(map(len, self.stop), default=0)
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def plain(self, token: int) -> str:
        """The text that is complete with this token, whatever the stop strings."""
        data = self.tokens[token] if token < len(self.tokens) else b""  # the output layer may be wider
        data = data or self.spelled.get(token, b"")
        if self.strips_space and data:
            data = data.removeprefix(b" ")
            self.strips_space = False
        return self.decoder.decode(data)

    def flush(self) -> str:
        """The rest at the end of a text: half a character becomes U+FFFD."""
        text = self.decoder.decode(b"", True)
        if self.thoughts is not None:
            _, text = self.thoughts.add(text, is_end=True)
        text = self.cut(text) + self.held
        self.held = ""
        return text

    def cut(self, text: str) -> str:
        """The visible part of further text."""
        if not self.stop:
            return text
        if self.stopped:
            return ""
        text = self.held + text
        self.held = ""
        found = [text.find(stop) for stop in self.stop if stop in text]
        if found:
            self.stopped = True
            return text[: min(found)]
        # Hold back the longest end of the text that is the beginning of a stop string.
        for size in range(min(len(text), self.longest - 1), 0, -1):
            end = text[-size:]
            if any(stop.startswith(end) for stop in self.stop):
                self.held = end
                return text[:-size]
        return text


# ---------------------------------------------------------------------- the scheduler


@dataclass(eq=False)
class _Group:
    """The requests of one `submit_all`."""

    turn: int  # the last turn in which one of them got a slot; at first the turn of its submission


class _RequestRow(Row):
    """The engine's row of a request, with the scheduler's data about its state."""

    def __init__(self, request: Request, stream: Stream, tokens: list[bytes], group: _Group):
        super().__init__(
            request.prompt, request.max_tokens, request.sampling, answers_calls=request.calls == "own",
            logit_bias=request.logit_bias, stop_ids=request.stop_ids, grammar=request.grammar,
        )  # fmt: skip
        if request.calls == "calculator":
            self.tool_call = []  # the prompt ends with the token that begins a call
        self.state: Literal["waiting", "reading", "read", "running"] = "waiting"
        self.request = request
        self.stream = stream
        self.group = group
        self.filled = 0  # tokens of the prompt in the cache
        self.is_scored = request.echo > 0 and request.logprobs >= 0  # its prompt is read for the logprobs
        self.kind = "text"  # the kind of its last token
        self.held: tuple[TokenLogprob, ...] = ()  # the first tokens, while they may begin a thought
        self.open_call: list[Chunk] = []  # a call that is held back until it is complete; see `_hand_out`
        thoughts = None if request.in_thought is None else ThoughtReader(request.in_thought)
        self.out = TextOut(tokens, request.stop, request.strips_space, request.spelled, thoughts)
        self.submitted = time.monotonic()
        self.last_time = self.submitted  # when it got its last token

    def hand_out_call(self, kind: str) -> None:
        """Put the tokens of a call into the stream: as a call, or as text if it was never closed."""
        for chunk in self.open_call:
            self.stream.put(chunk._replace(kind=kind))
        self.open_call = []

    @property
    def unread(self) -> tuple[int, ...]:
        """The rest of the prompt; its last token is decoded, not read."""
        return self.request.prompt[self.filled : -1]


@torch.inference_mode()
def score(slots: Slots, slot: int, tokens: Sequence[int], filled: int, logprobs: int) -> list[list[float]]:
    """Read all but the last of these tokens as `Slots.prefill` does; returns numbers as in `NewToken.logprobs` for each
    token after the first."""
    hidden = slots.read(slot, [tokens[:-1]], filled)[0]  # (T, C), with padding
    following = torch.zeros(len(hidden), dtype=torch.long)
    following[: len(tokens) - 1] = torch.tensor(tokens[1:])
    following = slots.engine.device.to_device(following)
    # A slice at a time: the logits of 256 tokens over a vocabulary of 150,000 would take 150 MB, twice.
    rows: list[list[float]] = []
    for begin in range(0, len(hidden), SCORED_AT_ONCE):
        part = slice(begin, begin + SCORED_AT_ONCE)
        rows += logprob_table(slots.engine.model.logits(hidden[part]), following[part], logprobs).tolist()
    return rows[: len(tokens) - 1]


def fitting_context(engine: Engine, slots: int, num_models: int = 1) -> int:
    """The tokens of a chat: the model's context, or fewer where the cache of all slots would not fit into the memory,
    which one line then says.

    Each of `num_models` on the device gets an equal share. All of them are loaded, and none has its cache yet.
    """
    config = engine.model.config
    free = engine.device.free_memory()
    if free is None:
        return config.sequence_len
    token = slots * Slots.bytes_per_slot(config, engine.device.dtype) / config.sequence_len
    fits = int(free * CACHE_SHARE / num_models / token) // CACHE_STEP * CACHE_STEP
    if fits >= config.sequence_len or not fits:
        return config.sequence_len
    memory = f"{free / 2**30:,.1f} GiB of free memory" + (f", shared by {num_models} models" if num_models > 1 else "")
    print0(
        f"a chat has at most {fits:,} tokens: the cache of {slots} of the model's {config.sequence_len:,} does not fit "
        f"into {memory} (--slots, --max_seq_len)"
    )
    return fits


def start_schedulers(engines: Sequence[Engine], slots: int, context: int = 0) -> "list[Scheduler]":
    """A scheduler for each engine, on one thread that decodes for all of them, in turns; `context` 0: what fits.

    Raises UserError: when their caches do not fit.
    """
    contexts = [context or fitting_context(engine, slots, len(engines)) for engine in engines]
    thread = DeviceThread()
    schedulers = []
    try:
        for engine, tokens in zip(engines, contexts, strict=True):
            schedulers.append(Scheduler(engine, slots=slots, context=tokens, device_thread=thread))
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        size = sum(Slots.bytes_per_slot(one.model.config, one.device.dtype) for one in engines)
        gib = slots * size / 2**30
        raise UserError(f"--slots {slots}: a cache of {gib:,.1f} GiB does not fit; lower it") from error
    thread.thread.start()
    return schedulers


class DeviceThread:
    """The thread that owns a device. The schedulers of all models on the device take turns on it.

    A thread for each model would be slower: on a CPU their OpenMP workers together outnumber the cores, and on an
    accelerator no other thread may launch kernels while one records a graph.
    """

    def __init__(self) -> None:
        self.schedulers: list[Scheduler] = []  # complete before the thread starts
        self.thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self.changed = threading.Condition()  # guards the next two, and the requests of all schedulers
        self.closing = False  # accepts no more requests
        self.killed = False  # ends the present requests

    def close(self, grace: float) -> None:
        """See `Scheduler.close`."""
        with self.changed:
            self.closing = True
            for scheduler in self.schedulers:
                scheduler.cancel_waiting()
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self._busy(), timeout=grace)
            self.killed = True
            self.changed.notify_all()
        self.thread.join()

    def _busy(self) -> "list[Scheduler]":
        return [scheduler for scheduler in self.schedulers if scheduler.requests]

    def _run(self) -> None:
        reason, problem = "error", "the device failed"
        try:
            while True:
                with self.changed:
                    self.changed.wait_for(lambda: self._busy() or self.killed)
                if self.killed:
                    reason, problem = "cancelled", ""
                    return
                for scheduler in self._busy():
                    scheduler.take_turn()
        except Exception as error:  # the device does not even reset
            log_failure("the device takes no more work: serving ends", error)
        finally:
            with self.changed:
                self.closing = True
            for scheduler in self.schedulers:
                scheduler.finish(list(scheduler.requests), reason, problem)


class Scheduler:
    """Serves requests with one engine. It allocates the engine's cache of `slots` rows once.

    `queue` more requests may wait; the next one is refused with 429. Between two decoded tokens of the running rows at
    most `prefill_chunk` tokens of new prompts are read. `device_thread` is the thread of the schedulers of other models
    on the device; by default this one is the only model there.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        slots: int = 16,
        queue: int = 64,
        context: int = 0,
        prefill_chunk: int = PREFILL_CHUNK,
        device_thread: DeviceThread | None = None,
    ):
        self.engine = engine
        self.context = context or engine.model.config.sequence_len  # tokens of a prompt and its reply
        self.slots = engine.decoder(slots, self.context, min(prefill_chunk, self.context))
        self.size = slots  # requests that run at once
        self.capacity = slots + queue  # the most requests, in slots and waiting
        self._turns = itertools.count()

        self._device_thread = device_thread or DeviceThread()
        self._device_thread.schedulers.append(self)
        self.thread = self._device_thread.thread
        self.changed = self._device_thread.changed  # guards `requests`
        # All unfinished requests, oldest first; `slots.rows` are the running ones.
        self.requests: list[_RequestRow] = []
        self.moved = time.monotonic()  # when the last turn began, or a request came that found no other

        # Running means in seconds, and the metrics of /metrics.
        self.step_seconds = 0.0  # the time of a turn that reads no prompt
        self.owed = 0.0  # seconds that prompts have taken from the running rows; see `_turn`
        self.budget = LEAST_BUDGET  # tokens of prompts read in a turn while others wait; doubled and halved by `_turn`
        self.request_seconds = 0.0  # the time of a request, from `submit` to its end
        self.metrics = SchedulerMetrics()
        self.metrics.slots.set(slots)
        self.metrics.running.set_function(lambda: len(self._with_slot()))
        self.metrics.queued.set_function(lambda: len(self._rows("waiting")))

    # ------------------------------------------------------------------ any thread

    def start(self) -> None:
        """Start the thread that owns the device, if no other scheduler shares it."""
        self.thread.start()

    def submit(self, request: Request) -> Stream:
        """Queue a request; the stream returns its chunks. Raises the errors of `submit_all`."""
        return self.submit_all([request])[0]

    def submit_all(
        self, requests: Sequence[Request], on_chunk: Callable[[int, Chunk], None] | None = None
    ) -> list[Stream]:
        """Queue all requests, or none of them; `on_chunk` gets each chunk with the number of its request.

        The requests belong to one client, so a prompt that several of them share is read once.
        Raises Overloaded: when there is not enough room for all, or the scheduler is closing.
        """
        tokens = self.engine.tokenizer.token_texts
        group = _Group(next(self._turns))
        rows = []
        for number, request in enumerate(requests):
            listener = None if on_chunk is None else partial(on_chunk, number)
            rows.append(_RequestRow(request, Stream(self._wake, listener), tokens, group))
        with self.changed:
            if self._device_thread.closing or len(self.requests) + len(rows) > self.capacity:
                rounds = 1 + len(self._rows("waiting")) / self.slots.size
                raise Overloaded(max(1.0, rounds * self.request_seconds), self._device_thread.closing)
            if not self.requests:
                self.moved = time.monotonic()
            self.requests += rows
            self.changed.notify_all()
        return [row.stream for row in rows]

    def while_idle(self, change: Callable[[], None]) -> None:
        """Call `change` when no request is left. The caller must keep new requests out until it returns.

        Raises Overloaded: when the scheduler closes.
        """
        with self.changed:
            self.changed.wait_for(lambda: not self.requests or self._device_thread.closing)
            if self._device_thread.closing:
                raise Overloaded(1.0)
            change()

    def close(self, grace: float = 10.0) -> None:
        """Accept no new requests, cancel the waiting ones, let the others finish within `grace` seconds, cancel the
        rest, and join the thread. All schedulers on the device close together."""
        self._device_thread.close(grace)

    def cancel_waiting(self) -> None:
        """Cancel the requests without a slot; the caller holds `changed`."""
        for row in self._rows("waiting"):
            row.stream.cancelled = True

    @property
    def stalled_seconds(self) -> float:
        """How long no turn has begun although there are requests: a kernel that hangs raises no error."""
        return time.monotonic() - self.moved if self.requests else 0.0

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _rows(self, *states: str) -> list[_RequestRow]:
        return [row for row in list(self.requests) if row.state in states]

    def _with_slot(self) -> list[_RequestRow]:
        return self._rows("reading", "read", "running")

    # ------------------------------------------------------------------ the device's thread

    def take_turn(self) -> None:
        """One turn. Raises the errors of `Slots.reset`: when the device takes no more work."""
        try:
            self._turn()
        except Exception as error:  # a failed request (out of memory, for example) must not end the server
            log_failure("generation failed: the requests in the slots end, later ones are served", error)
            failed = self._with_slot()
            self.slots.reset()
            self.finish(failed, "error", f"generation failed: {type(error).__name__}")

    def _turn(self) -> None:
        """One decoded token for all running rows, and what has to happen before it."""
        began = time.perf_counter()
        self.moved = time.monotonic()

        # 1. Cancelled requests leave, in any state.
        with self.changed:
            cancelled = [row for row in self.requests if row.stream.cancelled]
        self.slots.release(cancelled)
        self.finish(cancelled, "cancelled")

        # 2. Either a piece of a new prompt is read, or requests whose prompts are read begin to run. While rows are
        #    running, a turn never does both.
        computed = 0
        others_wait = bool(self.slots.rows)
        if not (others_wait and (self._rows("read") or self.owed > 0)):
            computed = self._read_prompts()
        self.finish([row for row in self._rows("read") if not row.max_tokens], "length")
        joining = self._rows("read")
        if joining and not (self.slots.rows and computed):
            self.slots.admit(joining)
            for row in joining:
                row.state = "running"

        # 3. A token for every running row.
        if not self.slots.rows:
            return
        self._decode()

        # 4. A turn without a prompt is a step. One with a piece of a prompt should take at most two, because others
        #    wait. The rest is owed to them: as many seconds pass without a prompt before the next piece.
        seconds = time.perf_counter() - began
        if not computed:
            self.step_seconds = _mean(self.step_seconds, seconds)
            self.owed = max(self.owed - seconds, 0.0)
        elif others_wait:
            self.owed = seconds - 2 * self.step_seconds
            if self.owed > 0:
                self.budget = max(self.budget // 2, LEAST_BUDGET)
            elif seconds < 1.5 * self.step_seconds and computed > self.budget // 2:
                self.budget = min(2 * self.budget, self.slots.prefill_chunk)

    def _read_prompts(self) -> int:
        """Continue with the prompts that have a slot, then with waiting ones; returns the number of tokens computed."""
        budget = self.budget if self.slots.rows else self.slots.prefill_chunk
        left = budget
        while left > 0:
            rows = self._next_prompts(left)
            if not rows:
                break
            first = rows[0]
            pieces = [row.unread[:left] for row in rows]
            if pieces[0] and first.is_scored:
                left -= self._score(first, len(pieces[0]))
            elif pieces[0]:
                left -= self.slots.prefill(first.slot, [piece for piece in pieces if piece], first.filled)
            for row, piece in zip(rows, pieces, strict=True):
                row.filled += len(piece)
                row.state = "reading" if row.unread else "read"
            if self.slots.rows and left < budget:  # others wait: a second pass would take as long again
                break
        return budget - left

    def _echo_text(self, row: _RequestRow) -> None:
        """Put the text of the echoed prompt, and the entry of its first token, into the stream."""
        tokens = self.engine.tokenizer.token_texts
        echoed = row.prompt[-row.request.echo :]
        text = b"".join(tokens[token] for token in echoed)
        row.stream.put(Chunk((), text.decode(errors="replace")))
        if row.request.logprobs >= 0:
            row.stream.put(Chunk(logprobs=(TokenLogprob(echoed[0], None),)))

    def _score(self, row: _RequestRow, count: int) -> int:
        """Read this many tokens of the prompt, and put the logprobs of the tokens after them into the stream.

        Returns the number of tokens computed.
        """
        piece = row.prompt[row.filled : row.filled + count + 1]
        hidden = len(row.prompt) - row.request.echo  # tokens before the echoed ones
        for place, numbers in enumerate(score(self.slots, row.slot, piece, row.filled, row.request.logprobs)):
            if row.filled + 1 + place > hidden:
                # One by one: the event loop writes a few chunks at a time.
                row.stream.put(Chunk(logprobs=(_logprob(piece[1 + place], numbers, row.request.logprobs),)))
        return round_up(count, CHUNK_STEP)

    def _next_prompts(self, most: int) -> list[_RequestRow]:
        """The rows to read next, with a slot; none when no row waits, or no slot is free.

        A forward pass over one short prompt takes nearly as long as over several. So whole prompts are read together,
        in neighbouring slots, as long as they have at most `most` tokens, padded to the longest.
        """
        for row in self._rows("reading"):
            return [row]
        rows: list[_RequestRow] = []
        while True:
            # Clients take turns: the next client is the one whose last turn is the longest ago. Ordered only by age,
            # the many choices of one client would keep out the clients after it.
            row = min(self._rows("waiting"), key=lambda row: row.group.turn, default=None)
            if row is None or not _fit_one_pass([*rows, row], most) or not self._take_slot(row):
                return rows
            row.group.turn = next(self._turns)
            rows.append(row)

    def _take_slot(self, row: _RequestRow) -> bool:
        """Give a waiting request the slot after the last one in use; False if there is none."""
        others = self._with_slot()
        slot = 1 + max((other.slot for other in others), default=-1)
        if slot >= self.slots.size:
            return False
        row.slot = slot
        row.state = "reading"
        self.metrics.tokens_prompt.inc(len(row.prompt))
        if row.request.echo:
            self._echo_text(row)
        # Choices of one request share their prompt: copy it from one that has read it. For logprobs it is read again,
        # and where the other's state has moved on with its reply.
        for other in others if not self.slots.cache.states else ():
            if other.group is row.group and other.prompt == row.prompt and not (other.unread or row.is_scored):
                row.filled = len(row.prompt) - 1
                self.slots.copy(other.slot, slot, row.filled)
                break
        return True

    def _decode(self) -> None:
        """One token for every running row; rows that end with it leave."""
        running = cast(list[_RequestRow], self.slots.rows)  # `_turn` admits no others
        new_tokens = self.slots.decode(logprobs=max(row.request.logprobs for row in running))
        now = time.monotonic()
        ended: dict[_RequestRow, str] = {}
        for new in new_tokens:
            row = cast(_RequestRow, new.row)
            times = self.metrics.first_token if row.last_time == row.submitted else self.metrics.per_token
            times.observe(now - row.last_time)
            row.last_time = now
            failed = row.request.grammar is not None and row.request.grammar.error
            reason = "error" if failed else self._hand_out(row, new)
            if reason:
                ended[row] = reason
        self.metrics.tokens_generated.inc(sum(new.finish_reason != "stop" for new in new_tokens))
        self.slots.release(ended)
        if ended:
            # The longest chat may have left. A prompt may be in its slot already, or a part of it.
            left = [row for row in self._with_slot() if row not in ended]
            self.slots.shrink(max((len(row.prompt) + row.made for row in left), default=0))
        for row, reason in ended.items():
            if reason == "error" and row.request.grammar is not None:
                self.finish([row], reason, f"the schema is too complex: {row.request.grammar.error}", is_clients=True)
            else:
                self.finish([row], reason)

    def _hand_out(self, row: _RequestRow, new: NewToken) -> str | None:
        """Put a token and its text into the stream; returns the reason where the request ends with it."""
        if row.request.every_token:
            logprobs = (TokenLogprob(new.id, None),)
            if new.by_model and row.request.logprobs >= 0:
                logprobs = (_logprob(new.id, new.logprobs, row.request.logprobs),)
            row.stream.put(Chunk((new.id,), row.out.plain(new.id), "text", logprobs))
            return new.finish_reason
        if new.finish_reason == "stop":
            # A client that measures a text by echo (lm-eval) expects an entry for every token that the model chose.
            if row.request.echo and row.request.logprobs >= 0:
                row.stream.put(Chunk(logprobs=(_logprob(new.id, new.logprobs, row.request.logprobs),)))
            return "stop"

        # At the end of one kind of text, its held-back rest goes out first.
        if new.kind != row.kind:
            text = row.out.flush()
            row.hand_out_call("python")
            if text:
                row.stream.put(Chunk((), text, row.kind))
            if row.out.stopped:
                return "stop"
            row.kind = new.kind

        # Stop strings count in the reply's text only, not in a thought, a call or its answer.
        text = row.out.plain(new.id)
        if row.out.thoughts is not None:
            thought, text = row.out.thoughts.add(text)
            if row.out.thoughts.place in ("thought", "after thought"):
                row.held = ()
                row.stream.put(Chunk((new.id,), thought, "thought"))
                return new.finish_reason
            if thought:  # its last part is in the token with which the text begins
                row.stream.put(Chunk((), thought, "thought"))
        if new.kind == "text":
            text = row.out.cut(text)
        if new.by_model and row.request.logprobs >= 0 and (text or not row.out.stopped):
            row.held += (_logprob(new.id, new.logprobs, row.request.logprobs),)
        logprobs: tuple[TokenLogprob, ...] = ()
        if row.out.thoughts is None or row.out.thoughts.place != "beginning":
            logprobs, row.held = row.held, ()
        chunk = Chunk((new.id,), text, new.kind, logprobs)
        # A call is handed out when it is complete. If the reply ends earlier, the part of the call is text: otherwise a
        # client that shows only a reply's text would show nothing.
        if new.kind == "python" and row.answers_calls:
            row.open_call.append(chunk)
        else:
            row.stream.put(chunk)
        if new.id == self.engine.call_end and new.kind == "python" and row.request.calls in ("client", "calculator"):
            return "tool_calls"  # the client answers it
        return "stop" if row.out.stopped else new.finish_reason

    def finish(self, rows: Sequence[_RequestRow], reason: str, error: str = "", *, is_clients: bool = False) -> None:
        """End requests in any state; running ones have already been released."""
        for row in rows:
            self.metrics.finished.labels(reason).inc()
            self.request_seconds = _mean(self.request_seconds, time.monotonic() - row.submitted)
            with self.changed:
                self.requests.remove(row)
                self.changed.notify_all()
            text = row.out.flush()
            if row.open_call:
                row.hand_out_call("text" if row.tool_call is not None else "python")
                row.kind = "text"
            limit = row.request.limit if reason == "length" else ""
            row.stream.put(Chunk((), text, row.kind, row.held, reason, error, limit, is_clients))


def _fit_one_pass(rows: Sequence[_RequestRow], most: int) -> bool:
    """Whether the prompts of these rows, the last of which has no slot yet, can be read in one forward pass."""
    *others, last = rows
    size = round_up(max(len(row.unread) for row in rows), CHUNK_STEP)
    is_copied = any(row.group is last.group and row.prompt == last.prompt for row in others)
    are_alike = all(row.unread and not row.is_scored for row in rows)
    return not others or (are_alike and size * len(rows) <= most and not is_copied)


def log_place(what: str, thread: threading.Thread) -> None:
    """Log where a thread is."""
    frame = sys._current_frames().get(thread.ident or 0)
    where = "".join(traceback.format_stack(frame)) if frame is not None else "  its thread has ended\n"
    logging.getLogger(__name__).error("%s\n%s", what, where.rstrip())


def log_failure(what: str, error: Exception) -> None:
    """Log the place of an error, but not its message, which may quote a user's text."""
    where = "".join(traceback.format_tb(error.__traceback__))
    logging.getLogger(__name__).error("%s\n%s%s", what, where, type(error).__name__)


def _mean(mean: float, newest: float) -> float:
    return newest if not mean else mean + SMOOTHING * (newest - mean)


def _logprob(token: int, numbers: Sequence[float], alternatives: int) -> TokenLogprob:
    """Convert `NewToken.logprobs`, which has as many alternatives as any running request wants."""
    most = (len(numbers) - 1) // 2
    values = numbers[1 : 1 + most]
    ids = numbers[1 + most :]
    best = tuple((int(one), value) for one, value in zip(ids, values, strict=True))
    return TokenLogprob(token, numbers[0], best[:alternatives])
