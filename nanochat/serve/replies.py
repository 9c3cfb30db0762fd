"""From the scheduler's chunks to an HTTP response: one JSON object, or server-sent events as the chunks arrive.

One HTTP request has one or more streams (`n` choices of each prompt). A `ChunkQueue` carries their chunks from the
scheduler's thread to the event loop, a `ChoicesSerializer` writes them in the form of a route of OpenAI's API, and a
`Reply` sends the result. A client that leaves, or stops reading, cancels its streams, and so frees their slots.

The largest reply in one piece has megabytes of logprobs. If it were written at the end, it would block the event loop,
and so every other client, for seconds. So each chunk becomes JSON when it arrives, a few at a time, and the end only
joins.
"""

import asyncio
import codecs
import functools
import itertools
import time
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.background import BackgroundTask
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nanochat.conversation import text_of
from nanochat.ground.log import print0
from nanochat.serve.listener import STALL_SECONDS
from nanochat.serve.scheduler import Chunk, Stream, TokenLogprob
from nanochat.serve.schema import ApiError, ChatBody, CompletionBody, RequestBody, encode
from nanochat.serve.state import LoadedModel
from nanochat.serve.tools import CallWriter, FamilyWriter

CHUNKS_AT_ONCE = 64  # chunks written before other clients get their turn; 3 ms with 20 logprobs each
ROUND_SECONDS = 0.005  # replies get their new tokens at most this often, which nobody sees; ends come at once
# After a round the event loop rests for this many times its duration, and leaves Python's lock to the device's thread.
REST_FACTOR = 2.0
LONGEST_REST_SECONDS = 0.05  # a round may have been long because the process was stopped
HEARTBEAT_SECONDS = 15.0  # a stream without chunks sends a comment this often, for proxies that cut silent connections

# ---------------------------------------------------------------------- from the scheduler's thread to the event loop


class Waker:
    """Notifies the replies on the event loop that chunks have arrived.

    It notifies all of them in one round, because waking the event loop is costly. After a round it rests, so that a
    device that is faster than the event loop gets Python's lock. The events of the next round then have several tokens
    each.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._filled: deque[ChunkQueue] = deque()  # queues with new chunks
        self._is_due = False  # a round is planned, which will notify them
        self._next_round = 0.0  # its time at the earliest

    def wake(self, queue: "ChunkQueue", at_once: bool) -> None:
        """Runs on any thread. Raises RuntimeError: when the event loop is closed."""
        if self._loop.is_closed():
            raise RuntimeError("the event loop is closed")
        self._filled.append(queue)
        if at_once:
            self._loop.call_soon_threadsafe(self._notify_all)
        elif not self._is_due:
            self._is_due = True
            self._loop.call_soon_threadsafe(self._round)

    def _notify_all(self) -> None:
        while self._filled:
            self._filled.popleft().notify()

    def _round(self) -> None:
        now = time.monotonic()
        if now < self._next_round:
            self._loop.call_later(self._next_round - now, self._round)
            return
        self._next_round = now + ROUND_SECONDS
        self._is_due = False  # before notifying: a queue that is filled later needs another round
        self._notify_all()
        self._loop.call_soon(self._rest, now)  # after the replies that were notified

    def _rest(self, began: float) -> None:
        now = time.monotonic()
        self._next_round = max(self._next_round, now + min(REST_FACTOR * (now - began), LONGEST_REST_SECONDS))


class ChunkQueue:
    """The chunks of several streams, each with the number of its stream."""

    def __init__(self, waker: Waker) -> None:
        self._waker = waker
        self._chunks: deque[tuple[int, Chunk]] = deque()
        self._is_announced = False  # the waker knows of the new chunks
        self._arrived = asyncio.Event()

    def put(self, number: int, chunk: Chunk) -> None:
        """Runs on the scheduler's thread. The end of a stream is announced at once."""
        self._chunks.append((number, chunk))
        is_last = chunk.finish_reason is not None
        if is_last or not self._is_announced:
            self._is_announced = True
            self._waker.wake(self, at_once=is_last)

    def notify(self) -> None:
        if self._chunks:  # otherwise they are taken already
            self._arrived.set()

    async def take(self, seconds: float) -> list[tuple[int, Chunk]]:
        """The oldest chunks, each with the number of its stream; empty when none arrives for `seconds`.

        Neighbours of one kind are merged: a slow reader gets larger chunks, not more chunks.
        """
        if self._arrived.is_set():
            await asyncio.sleep(0)  # more chunks are waiting, but it is the other clients' turn
        else:
            timer = asyncio.get_running_loop().call_later(seconds, self._arrived.set)
            await self._arrived.wait()
            timer.cancel()
        self._is_announced = False  # before taking them: a chunk that arrives in the meantime is announced again
        taken = [self._chunks.popleft() for _ in range(min(len(self._chunks), CHUNKS_AT_ONCE))]
        if len(taken) < CHUNKS_AT_ONCE or not self._chunks:
            self._arrived.clear()
        return _merged(taken) if len(taken) > 1 else taken


def _merged(chunks: Sequence[tuple[int, Chunk]]) -> list[tuple[int, Chunk]]:
    """The chunks, ordered by their streams, with neighbours of one kind merged."""
    merged = []
    in_order = sorted(chunks, key=lambda numbered: numbered[0])  # keeps the order within a stream
    for (number, _), group in itertools.groupby(in_order, key=lambda numbered: (numbered[0], numbered[1].kind)):
        together = [chunk for _, chunk in group]
        token_ids = tuple(itertools.chain.from_iterable(chunk.token_ids for chunk in together))
        text = "".join([chunk.text for chunk in together])
        logprobs = tuple(itertools.chain.from_iterable(chunk.logprobs for chunk in together))
        merged.append((number, together[-1]._replace(token_ids=token_ids, text=text, logprobs=logprobs)))
    return merged


# ---------------------------------------------------------------------- OpenAI's JSON


@dataclass
class WholeChoice:
    """A choice of a reply in one piece, with the chunks so far."""

    parts: list[tuple[str, list[str]]] = field(default_factory=list)  # (kind, texts), neighbours of different kinds
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, list[bytes]] = field(default_factory=dict)  # each token's entries as JSON
    finish_reason: str | None = None
    limit: str = ""


class ChoicesSerializer:
    """The common part of the two routes whose replies are a list of choices."""

    prefix = ""  # the beginning of the response's id
    object = ""  # the field `object` of a reply in one piece
    stream_object = ""
    first_message_read: int | None = None
    returns_token_ids = False

    def __init__(self, model: LoadedModel, body: RequestBody):
        self.tokenizer = model.tokenizer
        self.include_usage = body.include_usage  # at the end of a stream
        self.head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": model.fingerprint or None,
        }
        # An event up to its choices. A stream has an event for every token, and they differ only in their choices.
        self.opening = b"data: " + _opened("choices", {**self.head, "object": self.stream_object})
        self.choices: dict[int, WholeChoice] = defaultdict(WholeChoice)  # for a reply in one piece

    def logprobs(self, number: int, logprobs: Sequence[TokenLogprob]) -> Mapping[str, list[Any] | None]:
        """Lists with an entry per token. None for a list of OpenAI's that is empty here."""
        raise NotImplementedError

    def listed(self, chunk: Chunk) -> Sequence[TokenLogprob]:
        """The logprobs of a chunk that go to the client."""
        return chunk.logprobs

    def content(
        self, parts: Sequence[tuple[str, str]], facts: dict[str, Any], finish_reason: str | None
    ) -> dict[str, Any]:
        """The content of a choice in one piece, from (kind, text), with our additional `facts` about it.

        It may replace the finish_reason.
        """
        raise NotImplementedError

    def facts(self, limit: str) -> dict[str, Any]:
        """Facts about a finished reply that OpenAI's fields lack."""
        facts: dict[str, Any] = {}
        if self.first_message_read is not None:
            facts["first_message_read"] = self.first_message_read
        if limit:
            facts["limit"] = limit
        return facts

    def chunk(self, number: int, chunk: Chunk) -> dict[str, Any]:
        """The choice of an event in a stream."""
        raise NotImplementedError

    def choice_object(self, number: int, chunk: Chunk, **content: Any) -> dict[str, Any]:
        """The result of `chunk`, with the route's `content`."""
        listed = self.listed(chunk)
        logprobs = self.logprobs(number, listed) if listed else None
        return {"index": number, **content, "logprobs": logprobs, "finish_reason": chunk.finish_reason}

    def begin(self, streams: int) -> bytes:
        return b""

    def event(self, number: int, chunk: Chunk) -> bytes:
        if not (chunk.text or chunk.logprobs or chunk.finish_reason):  # only half a character
            return b""
        return self.choices_event(self.chunk(number, chunk))

    def choices_event(self, *choices: dict[str, Any], usage: dict[str, Any] | None = None) -> bytes:
        ending = f',"usage":{encode(usage)}}}\n\n' if self.include_usage else "}\n\n"
        return self.opening + (encode(choices) + ending).encode()

    def end(self, usage: dict[str, Any]) -> bytes:
        return (self.choices_event(usage=usage) if self.include_usage else b"") + DONE

    def fail(self, error: ApiError) -> bytes:
        return b"data: " + encode(error.body).encode() + b"\n\n" + DONE

    def add(self, number: int, chunk: Chunk) -> None:
        choice = self.choices[number]
        choice.finish_reason = chunk.finish_reason
        choice.limit = chunk.limit
        choice.token_ids += chunk.token_ids
        if not choice.parts or choice.parts[-1][0] != chunk.kind:
            choice.parts.append((chunk.kind, []))
        choice.parts[-1][1].append(chunk.text)
        listed = self.listed(chunk)
        if listed:
            for name, entries in self.logprobs(number, listed).items():
                written = choice.logprobs.setdefault(name, [])
                written += [encode(entry).encode() for entry in entries or ()]

    def whole(self, usage: dict[str, Any]) -> Iterator[bytes]:
        yield _opened("choices", {**self.head, "object": self.object, "usage": usage}) + b"["
        for number, choice in sorted(self.choices.items()):
            parts = [(kind, "".join(texts)) for kind, texts in choice.parts]
            content = self.content(parts, self.facts(choice.limit), choice.finish_reason)
            fields = {"index": number, "finish_reason": choice.finish_reason, **content}
            if self.returns_token_ids:
                fields["token_ids"] = choice.token_ids
            yield b"," if number else b""
            yield _opened("logprobs", fields)
            opening = b"{"
            for name, entries in choice.logprobs.items():
                yield opening + f'"{name}":'.encode()
                yield from (b"[", b",".join(entries), b"]") if entries else (b"null",)
                opening = b","
            yield b"}}" if choice.logprobs else b"null}"
        yield b"]}"

    def token(self, token: int, logprob: float) -> dict[str, Any]:
        # JSON has no infinity; OpenAI's API writes -9999 for a token without probability.
        return {**_token_fields(self.tokenizer.decode_bytes([token])), "logprob": max(-9999.0, logprob)}


class ChatSerializer(ChoicesSerializer):
    """/v1/chat/completions. `content` is plain text; calculator calls and their results are in a field `nanochat`, the
    thought before the text is in `reasoning_content`.

    Calls for the client are in `tool_calls` instead: `calls` selects them (tools.py).
    """

    prefix = "chatcmpl"
    object = "chat.completion"
    stream_object = "chat.completion.chunk"

    def __init__(self, model: LoadedModel, body: ChatBody, first_message_read: int | None = None):
        super().__init__(model, body)
        self.first_message_read = first_message_read
        self.calls = body.calls
        family = body.family_calls
        self._make_writer: Callable[[], CallWriter | FamilyWriter] = partial(CallWriter, body.calls, family)
        if family is not None and body.calls == "family":
            self._make_writer = partial(FamilyWriter, family)
        self._writers = defaultdict(self._make_writer)  # by choice

    def begin(self, streams: int) -> bytes:
        delta = {"role": "assistant", "content": ""}
        openings = [self.choice_object(number, Chunk(), delta=delta) for number in range(streams)]
        return b"".join(map(self.choices_event, openings))

    def chunk(self, number: int, chunk: Chunk) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        writer = self._writers[number]
        if chunk.kind == writer.kind:
            text, fragments = writer.add(chunk.text, chunk.finish_reason)
            if text:
                delta["content"] = text
            if fragments:
                delta["tool_calls"] = fragments
            if writer.has_begun and chunk.finish_reason == "stop":
                chunk = chunk._replace(finish_reason="tool_calls")
        elif chunk.text and chunk.kind in FIELDS:
            delta[FIELDS[chunk.kind]] = chunk.text
        elif chunk.text:
            delta["nanochat"] = {"kind": chunk.kind, "text": chunk.text}
        facts = self.facts(chunk.limit) if chunk.finish_reason else {}
        if facts:
            delta["nanochat"] = {**delta.get("nanochat", {}), **facts}
        return self.choice_object(number, chunk, delta=delta)

    def content(
        self, parts: Sequence[tuple[str, str]], facts: dict[str, Any], finish_reason: str | None
    ) -> dict[str, Any]:
        writer = self._make_writer()
        own, fragments = writer.add("".join(text for kind, text in parts if kind == writer.kind), finish_reason)
        written = [
            {"type": kind, "text": text} for kind, text in parts if text and kind not in (writer.kind, "thought")
        ]
        message: dict[str, Any] = {"role": "assistant", "content": text_of(written) + own, "refusal": None}
        thought = "".join(text for kind, text in parts if kind == "thought")
        if thought:
            message["reasoning_content"] = thought
        if thought or fragments:
            message["content"] = message["content"] or None
        if fragments:
            for fragment in fragments:
                del fragment["index"]
            message["tool_calls"] = fragments
            finish_reason = "tool_calls" if finish_reason == "stop" else finish_reason
        if any(part["type"] != "text" for part in written):
            facts = {"parts": written, **facts}
        if facts:
            message["nanochat"] = facts
        return {"message": message, "finish_reason": finish_reason}

    def listed(self, chunk: Chunk) -> Sequence[TokenLogprob]:
        # `logprobs.content` has the tokens of the message's content, without calls. Calls of other families are among
        # the tokens of the content, as in vLLM: which tokens are a call is only known at its end.
        return chunk.logprobs if chunk.kind == "text" and self.calls != "schema" else ()

    def logprobs(self, number: int, logprobs: Sequence[TokenLogprob]) -> Mapping[str, list[Any] | None]:
        content = []
        for one in logprobs:
            alternatives = [self.token(token, logprob) for token, logprob in one.alternatives]
            assert one.logprob is not None  # this route does not echo prompts
            content.append({**self.token(one.token_id, one.logprob), "top_logprobs": alternatives})
        return {"content": content, "refusal": None}


class CompletionSerializer(ChoicesSerializer):
    """/v1/completions."""

    prefix = "cmpl"
    object = "text_completion"
    stream_object = "text_completion"

    def __init__(self, model: LoadedModel, body: CompletionBody):
        super().__init__(model, body)
        self.returns_token_ids = bool(body.return_token_ids)
        # For `text_offset`: the characters of each choice so far. A character may span several tokens.
        self._offsets: Counter[int] = Counter()
        self._decoders = defaultdict(partial(codecs.getincrementaldecoder("utf-8"), "replace"))

    def chunk(self, number: int, chunk: Chunk) -> dict[str, Any]:
        facts = self.facts(chunk.limit)
        return self.choice_object(number, chunk, text=chunk.text, **({"nanochat": facts} if facts else {}))

    def content(
        self, parts: Sequence[tuple[str, str]], facts: dict[str, Any], finish_reason: str | None
    ) -> dict[str, Any]:
        return {"text": "".join(text for _, text in parts), **({"nanochat": facts} if facts else {})}

    def logprobs(self, number: int, logprobs: Sequence[TokenLogprob]) -> Mapping[str, list[Any] | None]:
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for one in logprobs:
            is_forced = one.logprob is None  # the first token of a prompt, or a token that the model did not choose
            token = self.token(one.token_id, one.logprob or 0.0)
            alternatives = [self.token(*alternative) for alternative in one.alternatives]
            best = {_token_name(other): other["logprob"] for other in alternatives}
            lists["tokens"].append(_token_name(token))
            lists["token_logprobs"].append(None if is_forced else token["logprob"])
            lists["top_logprobs"].append(None if is_forced else best)
            lists["text_offset"].append(self._offsets[number])
            texts = self.tokenizer.token_texts
            if one.token_id < len(texts) and texts[one.token_id]:  # a special token has a name but no text
                self._offsets[number] += len(self._decoders[number].decode(texts[one.token_id]))
        return lists


def make_serializer(
    model: LoadedModel, body: ChatBody | CompletionBody, first_message_read: int | None
) -> ChoicesSerializer:
    """The serializer of the replies to a body; see `prompts.EncodedPrompt`."""
    if isinstance(body, ChatBody):
        return ChatSerializer(model, body, first_message_read)
    return CompletionSerializer(model, body)


@functools.lru_cache(maxsize=1 << 14)
def _token_fields(data: bytes) -> dict[str, Any]:
    return {"token": data.decode(errors="replace"), "bytes": list(data)}


def _token_name(token: dict[str, Any]) -> str:
    """A token's text, or its bytes if it has only part of a character: otherwise several would share a name."""
    data = bytes(token["bytes"])
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


# ---------------------------------------------------------------------- the response


@dataclass(eq=False)
class Reply(Response):
    """The response to one HTTP request, whole or as a stream of events, unless its client leaves first.

    STALL_SECONDS limits the time for which a client of a stream may read nothing. Starlette's StreamingResponse would
    wait for it for ever.
    """

    serializer: ChoicesSerializer
    queue: ChunkQueue
    streams: Sequence[Stream]
    prompt_tokens: Sequence[int]  # for each prompt, whose choices are neighbours in `streams`
    as_events: bool
    background: BackgroundTask | None = None  # Starlette's
    running: int = field(init=False)  # streams that have not ended

    def __post_init__(self) -> None:
        self.running = len(self.streams)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def disconnect() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        work = self._send_events(send) if self.as_events else self._send_whole(scope, receive, send)
        worker = asyncio.create_task(work)
        listener = asyncio.create_task(disconnect())
        try:
            await asyncio.wait({worker, listener}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            worker.cancel()  # does nothing to a task that has ended
            listener.cancel()
            await asyncio.wait({worker, listener})
            for stream in self.streams:
                stream.cancel()  # frees the slots of running streams
        if not worker.cancelled():
            worker.result()

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        while self.running:
            for number, chunk in await self._take():
                self.serializer.add(number, chunk)
        content = b"".join(self.serializer.whole(usage_of(self.streams, self.prompt_tokens)))
        await Response(content, media_type="application/json")(scope, receive, send)

    async def _send_events(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def drop() -> None:
            print0(f"dropped a client that read nothing for {STALL_SECONDS:g} s")
            task.cancel()

        async def write(events: bytes, more_body: bool = True) -> None:
            if not events and more_body:
                return
            timer = loop.call_later(STALL_SECONDS, drop)  # a timeout context takes 10 us more
            try:
                # Waits for a slow client.
                await send({"type": "http.response.body", "body": events, "more_body": more_body})
            finally:
                timer.cancel()

        # The status is sent with the first tokens: a request that waits until the server closes gets 503.
        chunks = await self._take()
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]  # for nginx
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        serializer = self.serializer
        events = serializer.begin(len(self.streams))
        try:
            while True:
                written = [serializer.event(number, chunk) for number, chunk in chunks]
                events += b"".join(written) if chunks else HEARTBEAT
                if not self.running:
                    break
                await write(events)
                events = b""
                chunks = await self._take()
            events += serializer.end(usage_of(self.streams, self.prompt_tokens))
        except ApiError as error:
            events = serializer.fail(error)
        await write(events, more_body=False)

    async def _take(self) -> list[tuple[int, Chunk]]:
        """The next chunks, each with the number of its stream; empty when none arrived for a while.

        Raises ApiError: when a stream was cancelled or failed.
        """
        chunks = await self.queue.take(HEARTBEAT_SECONDS)
        for _, chunk in chunks:
            if chunk.finish_reason is None:
                continue
            if chunk.finish_reason == "cancelled":
                raise ApiError(503, "the server is closing: the reply is incomplete", code="cancelled")
            if chunk.finish_reason == "error" and chunk.is_clients_error:
                raise ApiError(400, chunk.error, param="response_format", code="invalid_value")
            if chunk.finish_reason == "error":
                raise ApiError(500, chunk.error or "the reply failed", code="generation_failed")
            self.running -= 1
        return chunks


def usage_of(streams: Sequence[Stream], prompt_tokens: Sequence[int]) -> dict[str, Any]:
    """The sum of the tokens of all prompts, whatever the number of their choices, and of all `streams`."""
    prompt = sum(prompt_tokens)
    generated = sum(stream.completion_tokens for stream in streams)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def _opened(name: str, fields: dict[str, Any]) -> bytes:
    """An object as JSON, up to the value of one more field."""
    return f'{encode(fields)[:-1]},"{name}":'.encode()


FIELDS = {"text": "content", "thought": "reasoning_content"}  # a chunk's kind -> the message's field
DONE = b"data: [DONE]\n\n"
HEARTBEAT = b": waiting\n\n"  # a comment: clients skip it
