"""From a scheduler's chunks to an HTTP answer: one JSON object, or server-sent events as the chunks come.

In flow the streams of one HTTP request; `Mailbox` carries their chunks from the device's thread to the event loop,
a `Form` writes them as OpenAI's API does. A client that leaves, or stops to read, ends its streams.
"""

import asyncio
import codecs
import contextlib
import json
import time
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from nanochat.conversation import Part, text_of
from nanochat.serve.scheduler import Chunk, Stream, TokenLogprob
from nanochat.serve.schema import CLIENT_LEFT, ApiError
from nanochat.serve.state import Served
from nanochat.shell.log import print0

HEARTBEAT_SECONDS = 15.0  # a stream that waits says so, for proxies that cut silent ones

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class Mailbox:
    """Chunks of several streams on their way from the device's thread to the event loop."""

    def __init__(self, streams: Sequence[Stream]):
        self.streams = streams
        self._loop = asyncio.get_running_loop()
        self._chunks: deque[tuple[int, Chunk]] = deque()
        self._arrived = asyncio.Event()
        self._woken = False
        for number, stream in enumerate(streams):
            stream.listen(partial(self._put, number))

    def _put(self, number: int, chunk: Chunk) -> None:  # on the device's thread
        self._chunks.append((number, chunk))
        if self._woken:
            return
        self._woken = True
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody listens any more
            self._loop.call_soon_threadsafe(self._arrived.set)

    async def take(self, seconds: float) -> list[tuple[int, Chunk]]:
        """What has come since the last time, as few chunks as may be: a reader who is slow gets larger ones. An empty
        list where nothing comes for so long."""
        if not self._chunks:
            timer = self._loop.call_later(seconds, self._arrived.set)
            await self._arrived.wait()
            timer.cancel()
        self._arrived.clear()
        self._woken = False  # before the chunks are taken: one that comes meanwhile wakes again
        taken: list[tuple[int, Chunk]] = []
        last: dict[int, int] = {}  # the place of a stream's last chunk
        while self._chunks:
            number, chunk = self._chunks.popleft()
            place = last.get(number)
            if place is not None and taken[place][1].kind == chunk.kind:
                taken[place] = (number, _joined(taken[place][1], chunk))
            else:
                last[number] = len(taken)
                taken.append((number, chunk))
        return taken

    def cancel(self) -> None:
        for stream in self.streams:
            stream.cancel()


def _joined(first: Chunk, second: Chunk) -> Chunk:
    return replace(
        second,
        token_ids=first.token_ids + second.token_ids,
        text=first.text + second.text,
        logprobs=first.logprobs + second.logprobs,
    )


class Form:
    """How one of the routes writes its answers."""

    prefix, object, stream_object = "", "", ""

    def __init__(self, served: Served, logprobs: int):
        self.tokenizer, self.logprobs = served.tokenizer, logprobs
        self.head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": served.name}

    def first(self, number: int) -> dict[str, Any] | None:
        """A choice as it begins."""
        raise NotImplementedError

    def piece(self, number: int, chunk: Chunk) -> dict[str, Any]:
        raise NotImplementedError

    def whole(self, number: int, parts: list[Part], logprobs: list[TokenLogprob], reason: str) -> dict[str, Any]:
        raise NotImplementedError

    def token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self.tokenizer.decode_bytes([token])
        return {"token": data.decode(errors="replace"), "logprob": max(logprob, -9999.0), "bytes": list(data)}


class ChatForm(Form):
    """/v1/chat/completions. The calculator's calls and answers stand in a field of their own, the text is plain."""

    prefix, object, stream_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first(self, number: int) -> dict[str, Any]:
        return _choice(number, delta={"role": "assistant", "content": ""})

    def piece(self, number: int, chunk: Chunk) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if chunk.text:
            called = {"nanochat": {"kind": chunk.kind, "text": chunk.text}}
            delta = {"content": chunk.text} if chunk.kind == "text" else called
        return _choice(number, delta=delta, logprobs=self._likely(chunk.logprobs), finish_reason=chunk.finish_reason)

    def whole(self, number: int, parts: list[Part], logprobs: list[TokenLogprob], reason: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text_of(parts), "refusal": None}
        if any(part["type"] != "text" for part in parts):
            message["nanochat"] = {"parts": parts}
        return _choice(number, message=message, logprobs=self._likely(logprobs), finish_reason=reason)

    def _likely(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self.logprobs < 0 or not logprobs:
            return None
        content = [
            {**self.token(one.token_id, one.logprob), "top_logprobs": [self.token(*pair) for pair in one.alternatives]}
            for one in logprobs
        ]
        return {"content": content, "refusal": None}


class TextForm(Form):
    """/v1/completions."""

    prefix, object, stream_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, served: Served, logprobs: int):
        super().__init__(served, logprobs)
        self._offsets: Counter[int] = Counter()  # of the next token's text, by choice
        self._decoders = defaultdict(
            partial(codecs.getincrementaldecoder("utf-8"), "replace")
        )  # a character may span several tokens

    def first(self, number: int) -> None:
        return None

    def piece(self, number: int, chunk: Chunk) -> dict[str, Any]:
        likely = self._likely(number, chunk.logprobs)
        return _choice(number, text=chunk.text, logprobs=likely, finish_reason=chunk.finish_reason)

    def whole(self, number: int, parts: list[Part], logprobs: list[TokenLogprob], reason: str) -> dict[str, Any]:
        text = "".join(part["text"] for part in parts)
        return _choice(number, text=text, logprobs=self._likely(number, logprobs), finish_reason=reason)

    def _likely(self, number: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self.logprobs < 0 or not logprobs:
            return None
        told: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for one in logprobs:
            best = [self.token(*pair) for pair in one.alternatives]
            token = self.token(one.token_id, one.logprob)
            told["tokens"].append(_name(token["bytes"]))
            told["token_logprobs"].append(token["logprob"])
            told["top_logprobs"].append({_name(each["bytes"]): each["logprob"] for each in best})
            told["text_offset"].append(self._offsets[number])
            self._offsets[number] += len(self._decoders[number].decode(bytes(token["bytes"])))
        return told


def _name(token: list[int]) -> str:
    """A token's text; of one with part of a character its bytes, or several would have the same name."""
    try:
        return bytes(token).decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _choice(number: int, logprobs: Any = None, finish_reason: str | None = None, **content: Any) -> dict[str, Any]:
    return {"index": number, **content, "logprobs": logprobs, "finish_reason": finish_reason}


class Reply:
    """The answer to one HTTP request, made of one or more streams."""

    def __init__(self, form: Form, mailbox: Mailbox, prompt_tokens: int, with_usage: bool):
        self.form, self.mailbox, self.prompt_tokens, self.with_usage = form, mailbox, prompt_tokens, with_usage

    def usage(self) -> dict[str, int]:
        made = sum(stream.completion_tokens for stream in self.mailbox.streams)
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": made}
        return {**counts, "total_tokens": self.prompt_tokens + made}

    async def chunks(self) -> AsyncIterator[list[tuple[int, Chunk]]]:
        """Until every stream has ended. An empty list: nothing came for a while.

        Raises ApiError: when a stream ended otherwise than by itself.
        """
        open_streams = len(self.mailbox.streams)
        while open_streams:
            taken = await self.mailbox.take(HEARTBEAT_SECONDS)
            for _, chunk in taken:
                if chunk.finish_reason == "cancelled":
                    raise ApiError(503, "the server is closing: the reply is not whole", code="cancelled")
                if chunk.finish_reason == "error":
                    raise ApiError(500, chunk.error or "the reply could not be made", code="generation_failed")
                open_streams -= chunk.finish_reason is not None
            yield taken

    async def whole(self) -> Response:
        number_of = range(len(self.mailbox.streams))
        parts: list[list[Part]] = [[] for _ in number_of]
        logprobs: list[list[TokenLogprob]] = [[] for _ in number_of]
        reasons = ["stop" for _ in number_of]
        async for taken in self.chunks():
            for number, chunk in taken:
                logprobs[number] += chunk.logprobs
                reasons[number] = chunk.finish_reason or reasons[number]
                if not chunk.text:
                    continue
                if parts[number] and parts[number][-1]["type"] == chunk.kind:
                    parts[number][-1]["text"] += chunk.text
                else:
                    parts[number].append({"type": chunk.kind, "text": chunk.text})
        choices = [self.form.whole(n, parts[n], logprobs[n], reasons[n]) for n in number_of]
        body = {**self.form.head, "object": self.form.object, "choices": choices, "usage": self.usage()}
        return JSONResponse(body)

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events; the last is `[DONE]`, whatever happens before."""
        head = {**self.form.head, "object": self.form.stream_object}
        usage = {"usage": None} if self.with_usage else {}
        for number in range(len(self.mailbox.streams)):
            if (first := self.form.first(number)) is not None:
                yield _event({**head, "choices": [first], **usage})
        try:
            async for taken in self.chunks():
                told = [pair for pair in taken if pair[1].text or pair[1].logprobs or pair[1].finish_reason]
                lines = [_event({**head, "choices": [self.form.piece(*pair)], **usage}) for pair in told]
                if lines or not taken:
                    yield b"".join(lines) or b": waiting\n\n"
            if self.with_usage:
                yield _event({**head, "choices": [], "usage": self.usage()})
        except ApiError as error:
            yield _event(error.body())
        yield b"data: [DONE]\n\n"


_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # made once: it is called for each token


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + _compact(body).encode() + b"\n\n"


class EventStream(Response):
    """Sends events as they come, until they end, the client leaves, or stops to read."""

    def __init__(self, events: AsyncIterator[bytes], cancel: Callable[[], None], stall_seconds: float):
        super().__init__(media_type="text/event-stream", headers={"x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.events, self.cancel, self.stall_seconds = events, cancel, stall_seconds
        self.blocked_since: float | None = None  # seconds, of a clock

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        tasks = {asyncio.create_task(_gone(receive)), sender := asyncio.create_task(self._send_all(send))}
        try:
            while not (await asyncio.wait(tasks, timeout=self.stall_seconds / 4, return_when="FIRST_COMPLETED"))[0]:
                if self.blocked_since and time.monotonic() - self.blocked_since > self.stall_seconds:
                    print0(f"dropped a client that read nothing for {self.stall_seconds:g} s")
                    break
        finally:
            self.cancel()  # of no effect on what has ended
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if not sender.cancelled():
            sender.result()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self.events:
            self.blocked_since = time.monotonic()
            await send({"type": "http.response.body", "body": event, "more_body": True})
            self.blocked_since = None
        await send({"type": "http.response.body", "body": b""})


async def _gone(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Any, cancel: Callable[[], None]) -> Response:
    """What the work returns; where the client leaves first, the streams are cancelled."""
    tasks = {asyncio.create_task(_gone(request.receive)), worker := asyncio.create_task(work)}
    try:
        await asyncio.wait(tasks, return_when="FIRST_COMPLETED")
    finally:
        cancel()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return Response(status_code=CLIENT_LEFT) if worker.cancelled() else worker.result()
