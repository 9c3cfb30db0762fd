"""From the scheduler's chunks to an HTTP response: one JSON object, or server-sent events as the chunks arrive.

One HTTP request has one or more streams (`n` choices of each prompt). A `ChunkQueue` carries their chunks from the
scheduler's thread to the event loop, a `Serializer` writes them as OpenAI's API does, a `Reply` puts both together. A
client that leaves, or stops reading, cancels its streams, and so frees their slots.
"""

import asyncio
import codecs
import contextlib
import json
import time
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from nanochat.conversation import Part, text_of
from nanochat.serve.scheduler import Chunk, Stream, TokenLogprob
from nanochat.serve.schema import CLIENT_LEFT, ApiError
from nanochat.serve.state import LoadedModel
from nanochat.shell.log import print0

HEARTBEAT_SECONDS = 15.0  # a stream without chunks sends a comment this often, for proxies that cut silent connections

# ---------------------------------------------------------------------- from the scheduler's thread to the event loop


class ChunkQueue:
    """The chunks of several streams, each with the number of its stream."""

    def __init__(self, streams: Sequence[Stream]):
        self.streams = streams
        self._loop = asyncio.get_running_loop()
        self._chunks: deque[tuple[int, Chunk]] = deque()
        self._arrived = asyncio.Event()
        self._notified = False
        for number, stream in enumerate(streams):
            stream.listen(partial(self._put, number))

    def _put(self, number: int, chunk: Chunk) -> None:
        """Runs on the scheduler's thread. Waking the event loop is costly, so it happens once per `take`."""
        self._chunks.append((number, chunk))
        if self._notified:
            return
        self._notified = True
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._arrived.set)

    async def take(self, seconds: float) -> list[tuple[int, Chunk]]:
        """All chunks since the last call, neighbours of one stream and kind merged: a slow reader gets larger chunks,
        not more of them. An empty list when none arrives for `seconds`."""
        if not self._chunks:
            timer = self._loop.call_later(seconds, self._arrived.set)
            await self._arrived.wait()
            timer.cancel()
        self._arrived.clear()
        self._notified = False  # before the chunks are taken: one that arrives meanwhile must notify again
        taken: list[tuple[int, Chunk]] = []
        places: dict[int, int] = {}  # index in `taken` of a stream's last chunk
        while self._chunks:
            number, chunk = self._chunks.popleft()
            place = places.get(number)
            if place is not None and taken[place][1].kind == chunk.kind:
                taken[place] = (number, _merged(taken[place][1], chunk))
            else:
                places[number] = len(taken)
                taken.append((number, chunk))
        return taken

    def cancel(self) -> None:
        """Free the slots of all streams; streams that have ended stay as they are."""
        for stream in self.streams:
            stream.cancel()


def _merged(first: Chunk, second: Chunk) -> Chunk:
    return replace(
        second,
        token_ids=first.token_ids + second.token_ids,
        text=first.text + second.text,
        logprobs=first.logprobs + second.logprobs,
    )


# ---------------------------------------------------------------------- OpenAI's JSON


@dataclass
class Choice:
    """One finished or growing reply, for a response in one piece."""

    parts: list[Part] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = "stop"

    def add(self, chunk: Chunk) -> None:
        self.logprobs += chunk.logprobs
        self.finish_reason = chunk.finish_reason or self.finish_reason
        if chunk.text and self.parts and self.parts[-1]["type"] == chunk.kind:
            self.parts[-1]["text"] += chunk.text
        elif chunk.text:
            self.parts.append({"type": chunk.kind, "text": chunk.text})


class _Serializer:
    prefix = ""  # of the response's id

    def __init__(self, model: LoadedModel, num_logprobs: int):
        self.tokenizer = model.tokenizer
        self.num_logprobs = num_logprobs  # -1: the client requested none
        self.head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model.name}

    def token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self.tokenizer.decode_bytes([token])
        # JSON has no infinity; OpenAI's API writes -9999 for a token without probability.
        return {"token": data.decode(errors="replace"), "logprob": max(logprob, -9999.0), "bytes": list(data)}


class ChatSerializer(_Serializer):
    """/v1/chat/completions. `content` is plain text; calculator calls and their results are in a field `nanochat`."""

    prefix = "chatcmpl"
    object = "chat.completion"
    stream_object = "chat.completion.chunk"

    def opening(self, number: int) -> dict[str, Any]:
        return _choice_object(number, delta={"role": "assistant", "content": ""})

    def chunk(self, number: int, chunk: Chunk) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if chunk.text and chunk.kind == "text":
            delta["content"] = chunk.text
        elif chunk.text:
            delta["nanochat"] = {"kind": chunk.kind, "text": chunk.text}
        return _choice_object(number, self._logprobs(chunk.logprobs), chunk.finish_reason, delta=delta)

    def choice(self, number: int, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text_of(choice.parts), "refusal": None}
        if any(part["type"] != "text" for part in choice.parts):
            message["nanochat"] = {"parts": choice.parts}
        return _choice_object(number, self._logprobs(choice.logprobs), choice.finish_reason, message=message)

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self.num_logprobs < 0 or not logprobs:
            return None
        content = []
        for one in logprobs:
            alternatives = [self.token(token, logprob) for token, logprob in one.alternatives]
            content.append({**self.token(one.token_id, one.logprob), "top_logprobs": alternatives})
        return {"content": content, "refusal": None}


class CompletionSerializer(_Serializer):
    """/v1/completions."""

    prefix = "cmpl"
    object = "text_completion"
    stream_object = "text_completion"

    def __init__(self, model: LoadedModel, num_logprobs: int):
        super().__init__(model, num_logprobs)
        # For `text_offset`: the characters of each choice so far. A character may span several tokens.
        self._offsets: Counter[int] = Counter()
        self._decoders = defaultdict(partial(codecs.getincrementaldecoder("utf-8"), "replace"))

    def opening(self, number: int) -> None:
        return None

    def chunk(self, number: int, chunk: Chunk) -> dict[str, Any]:
        return _choice_object(number, self._logprobs(number, chunk.logprobs), chunk.finish_reason, text=chunk.text)

    def choice(self, number: int, choice: Choice) -> dict[str, Any]:
        text = "".join(part["text"] for part in choice.parts)
        return _choice_object(number, self._logprobs(number, choice.logprobs), choice.finish_reason, text=text)

    def _logprobs(self, number: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self.num_logprobs < 0 or not logprobs:
            return None
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for one in logprobs:
            token = self.token(one.token_id, one.logprob)
            alternatives = [self.token(*alternative) for alternative in one.alternatives]
            lists["tokens"].append(_token_name(token))
            lists["token_logprobs"].append(token["logprob"])
            lists["top_logprobs"].append({_token_name(other): other["logprob"] for other in alternatives})
            lists["text_offset"].append(self._offsets[number])
            self._offsets[number] += len(self._decoders[number].decode(bytes(token["bytes"])))
        return lists


Serializer = ChatSerializer | CompletionSerializer


def _token_name(token: dict[str, Any]) -> str:
    """A token's text; the bytes of a token with part of a character, or several would share a name."""
    data = bytes(token["bytes"])
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _choice_object(
    number: int, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None, **content: Any
) -> dict[str, Any]:
    return {"index": number, **content, "logprobs": logprobs, "finish_reason": finish_reason}


# ---------------------------------------------------------------------- the response


class Reply:
    """Everything that one HTTP request gets back."""

    def __init__(self, serializer: Serializer, queue: ChunkQueue, prompt_tokens: int, include_usage: bool):
        self.serializer = serializer
        self.queue = queue
        self.prompt_tokens = prompt_tokens
        self.include_usage = include_usage

    def usage(self) -> dict[str, int]:
        generated = sum(stream.completion_tokens for stream in self.queue.streams)
        total = self.prompt_tokens + generated
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": generated, "total_tokens": total}

    async def batches(self) -> AsyncIterator[list[tuple[int, Chunk]]]:
        """The chunks until every stream has ended; an empty batch when none arrived for a while.

        Raises ApiError: when a stream was cancelled or failed.
        """
        running = len(self.queue.streams)
        while running:
            batch = await self.queue.take(HEARTBEAT_SECONDS)
            for _, chunk in batch:
                if chunk.finish_reason == "cancelled":
                    raise ApiError(503, "the server is closing: the reply is incomplete", code="cancelled")
                if chunk.finish_reason == "error":
                    raise ApiError(500, chunk.error or "the reply failed", code="generation_failed")
                if chunk.finish_reason is not None:
                    running -= 1
            yield batch

    async def whole(self) -> Response:
        """The response in one piece."""
        choices = [Choice() for _ in self.queue.streams]
        async for batch in self.batches():
            for number, chunk in batch:
                choices[number].add(chunk)
        serializer = self.serializer
        written = [serializer.choice(number, choice) for number, choice in enumerate(choices)]
        body = {**serializer.head, "object": serializer.object, "choices": written, "usage": self.usage()}
        return JSONResponse(body)

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events. The last is always `[DONE]`; after a failure an error comes before it."""
        serializer = self.serializer
        head = {**serializer.head, "object": serializer.stream_object}
        usage = {"usage": None} if self.include_usage else {}
        for number in range(len(self.queue.streams)):
            opening = serializer.opening(number)
            if opening is not None:
                yield _event({**head, "choices": [opening], **usage})
        try:
            async for batch in self.batches():
                events = []
                for number, chunk in batch:
                    if chunk.text or chunk.logprobs or chunk.finish_reason:  # not half a character
                        events.append(_event({**head, "choices": [serializer.chunk(number, chunk)], **usage}))
                if events:
                    yield b"".join(events)
                elif not batch:
                    yield b": waiting\n\n"  # a comment: clients skip it
            if self.include_usage:
                yield _event({**head, "choices": [], "usage": self.usage()})
        except ApiError as error:
            yield _event(error.body)
        yield b"data: [DONE]\n\n"

    async def respond(self, request: Request) -> Response:
        """The response in one piece, unless the client leaves while it is generated."""
        try:
            return await until_client_leaves(request.receive, self.whole()) or Response(status_code=CLIENT_LEFT)
        finally:
            self.queue.cancel()


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # made once: it runs for every token


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + _encode(body).encode() + b"\n\n"


class EventStream(Response):
    """Sends a reply's events until they end, the client leaves, or it reads nothing for `stall_seconds`.

    Starlette's StreamingResponse does the first two, but waits for ever for a client that reads nothing.
    """

    def __init__(self, reply: Reply, stall_seconds: float):
        super().__init__(media_type="text/event-stream", headers={"x-accel-buffering": "no"})  # for nginx
        del self.headers["content-length"]
        self.reply = reply
        self.stall_seconds = stall_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_client_leaves(receive, self._send_events(send))
        finally:
            self.reply.queue.cancel()

    async def _send_events(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def drop() -> None:
            print0(f"dropped a client that read nothing for {self.stall_seconds:g} s")
            task.cancel()

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self.reply.events():
            timer = loop.call_later(self.stall_seconds, drop)  # a timeout context takes 10 us more per token
            await send({"type": "http.response.body", "body": event, "more_body": True})  # waits for a slow client
            timer.cancel()
        await send({"type": "http.response.body", "body": b""})


async def until_client_leaves(receive: Receive, work: Coroutine[Any, Any, Any]) -> Any:
    """What `work` returns; None where the client disconnects first, and then `work` is cancelled."""

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    worker = asyncio.create_task(work)
    listener = asyncio.create_task(disconnect())
    try:
        await asyncio.wait({worker, listener}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        worker.cancel()  # of no effect on a task that has ended
        listener.cancel()
        await asyncio.wait({worker, listener})
    return None if worker.cancelled() else worker.result()
