"""The server keeps its promises: no body crashes it, limits are told, who leaves frees a slot, nobody uninvited asks.

Most of it runs over a scheduler made here, whose replies take as long as a test wants and say what the test knows;
tests/test_openai.py asks the real one. Short forms of the promises; the full counts are `-m soak`.
"""

import asyncio
import contextlib
import http.client
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from nanochat.checkpoint_manager import load_model, save
from nanochat.engine import Engine, Slots
from nanochat.serve.app import create_app
from nanochat.serve.connection import Connection
from nanochat.serve.load import closed_loop
from nanochat.serve.middleware import MAX_BODY, MAX_HEAD
from nanochat.serve.scheduler import Chunk, Figures, Histogram, Overloaded, Request, Scheduler, TokenLogprob
from nanochat.serve.state import LoadedModel
from nanochat.tokenizer import SPECIAL_TOKENS, Tokenizer
from scripts import bench, chat_web

ROOT = Path(__file__).resolve().parent.parent
KEY = "a-key-of-tests"
CONTEXT = 512
CANARY = "canary-83f1c2"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}

# ---------------------------------------------------------------------- a scheduler whose replies the test knows


class FakeStream:
    """A reply of `count` words, one a tick."""

    def __init__(self, scheduler: "FakeScheduler", request: Request):
        self.scheduler, self.request = scheduler, request
        self.prompt_tokens, self.completion_tokens = len(request.prompt), 0
        self.cancelled = self.ended = False
        self.callback: Callable[[Chunk], None] | None = None
        self.early: list[Chunk] = []

    def cancel(self) -> None:
        self.cancelled = True

    def listen(self, callback: Callable[[Chunk], None]) -> None:
        with self.scheduler.lock:
            for chunk in self.early:
                callback(chunk)
            self.callback = callback

    def put(self, chunk: Chunk) -> None:
        if self.callback is None:
            self.early.append(chunk)
        else:
            self.callback(chunk)


@dataclass
class FakeScheduler:
    slots: int = 4
    queue: int = 4
    tick: float = 0.0  # seconds a word
    word: str = "word "
    calls: bool = False  # the reply calls the calculator first
    dies: bool = False  # its thread ends by itself
    fails: bool = False  # each reply ends with an error
    raises: str = ""  # submit raises this
    requests: list[Request] = field(default_factory=list)
    running: list[FakeStream] = field(default_factory=list)
    waiting: list[FakeStream] = field(default_factory=list)
    finished: dict[str, int] = field(default_factory=dict)
    closing: float | None = None

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self.work = threading.Event()
        self.thread = threading.Thread(target=self.loop, daemon=True)

    def start(self) -> None:
        self.thread.start()

    @property
    def capacity(self) -> int:
        return self.slots + self.queue

    def submit_all(self, requests: list[Request]) -> list[FakeStream]:
        if self.raises:
            raise RuntimeError(self.raises)
        with self.lock:
            if len(self.running) + len(self.waiting) + len(requests) > self.capacity:
                raise Overloaded(3.2)
            streams = [FakeStream(self, request) for request in requests]
            self.requests += requests
            self.waiting += streams
            self.work.set()
        return streams

    def loop(self) -> None:
        while not self.dies and self.closing is None or self.running or self.waiting:
            if not self.running and not self.waiting:
                self.work.wait(0.05)
                self.work.clear()
            with self.lock:
                for stream in [*self.running, *self.waiting]:
                    if stream.cancelled or (self.closing is not None and time.monotonic() > self.closing):
                        self.end(stream, "cancelled")
                while self.waiting and len(self.running) < self.slots:
                    self.running.append(self.waiting.pop(0))
                for stream in list(self.running):
                    self.step(stream)
            time.sleep(self.tick)

    def step(self, stream: FakeStream) -> None:
        made, request = stream.completion_tokens, stream.request
        stream.completion_tokens += 1
        if self.fails:
            self.end(stream, "error", "out of memory")
        elif self.calls and request.tools and made == 0:
            stream.put(Chunk((1, 2), "2+", kind="python"))
            stream.put(Chunk((3,), "3", kind="python"))
            stream.put(Chunk((4,), "5", by_model=False, kind="python_output"))
        else:
            likely: tuple[TokenLogprob, ...] = ()
            if request.logprobs >= 0:
                others = tuple((65 + place, -0.5 - place) for place in range(request.logprobs))
                likely = (TokenLogprob(65, -0.5, others),)
            text = f"{self.word}{made}" if len(self.word) < 20 else self.word
            stream.put(Chunk((65,), f"{text} ", logprobs=likely))
        if made + 1 >= request.max_tokens:
            self.end(stream, "length")

    def end(self, stream: FakeStream, reason: str, error: str = "") -> None:
        for streams in (self.running, self.waiting):
            if stream in streams:
                streams.remove(stream)
                self.finished[reason] = self.finished.get(reason, 0) + 1
                stream.put(Chunk(finish_reason=reason, error=error))

    def close(self, grace: float = 10.0) -> None:
        self.closing = time.monotonic() + grace
        self.thread.join(grace + 5)

    def figures(self) -> Figures:
        with self.lock:
            return Figures(
                len(self.running), len(self.waiting), self.slots, 70, 80, 9, dict(self.finished), 10, 20,
                Histogram((0.1, 1.0), (1, 2, 3), 5.5), Histogram((0.01,), (4, 0), 0.02),
            )  # fmt: skip


def served(scheduler: Any, **changes: Any) -> LoadedModel:
    return replace(LoadedModel(scheduler, tiny.tiny_tokenizer(), "tiny", CONTEXT, True), **changes)


def make_app(scheduler: Any = None, model: dict[str, Any] | None = None, **settings: Any) -> Any:
    """An app over a fake scheduler that is ready as soon as it starts."""
    scheduler = scheduler or FakeScheduler()

    def load() -> LoadedModel:
        scheduler.start()
        return served(scheduler, **(model or {}))

    return create_app(load, **settings)


@contextlib.contextmanager
def serving(app: Any, ready: bool = True) -> Iterator[int]:
    """The app on a real socket, in a thread; yields the port."""
    with chat_web.listening(chat_web.Config(port=0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, http=Connection, ws="none", log_level="warning", access_log=False))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            until(lambda: server.started and (not ready or app.state.nanochat.model is not None))
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(20)
        assert not thread.is_alive()


def until(condition: Callable[[], Any], seconds: float = 10.0) -> float:
    """Wait until it holds; returns the seconds it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "it never happened"
        time.sleep(0.002)
    return time.monotonic() - began


@contextlib.contextmanager
def client_of(app: Any, **settings: Any) -> Iterator[Callable[..., httpx.Response]]:
    """Requests straight into the app, without a socket: `ask(method, path, **httpx settings)`."""
    loop = asyncio.new_event_loop()
    lifespan = app.router.lifespan_context(app)
    loop.run_until_complete(lifespan.__aenter__())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://localhost", **settings)
    until(lambda: app.state.nanochat.model is not None or app.state.nanochat.failed)
    try:
        yield lambda method, path, **more: loop.run_until_complete(client.request(method, path, **more))
    finally:
        loop.run_until_complete(lifespan.__aexit__(None, None, None))
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """Of an answer that is an error in OpenAI's form."""
    (name, error), *rest = answer.json().items()
    assert name == "error" and not rest and set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"] and "\n" not in error["message"]
    return error


def open_stream(port: int, **body: Any) -> socket.socket:
    """A streaming chat request on a socket of its own, with the headers and the first event read."""
    content = json.dumps({**HELLO, "stream": True, **body}).encode()
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: ")
    connection.sendall(str(len(content)).encode() + b"\r\n\r\n" + content)
    connection.settimeout(20)
    assert b"200 OK" in connection.recv(200)
    return connection


def events_of(text: str) -> list[Any]:
    """The data of server-sent events; the last must be [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line and not line.startswith(":")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


# ---------------------------------------------------------------------- S1: no body crashes it

FIELDS = (
    *("messages", "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n"),
    *("repetition_penalty", "seed", "stop", "stream", "stream_options", "logprobs", "top_logprobs", "logit_bias"),
    *("prompt", "echo", "tools", "response_format", "user", "truncation", "nonsense", "\u0000", "表"),
)
ODD = (
    *(None, True, False, 0, -1, 1, 3, 2**63, -(2**70), 10**300, 0.5, -0.0, 1e308, float("inf"), float("nan")),
    *("", "text", "\x00", "\ud800", "\U0001f642", "<|assistant_end|>", "9" * 5000, "a" * 20_000),
    *([], [[]], [None], ["x"], [1, 2, 3], [-1], [2**80], {}, {"a": 1}, {"role": "user"}, {"include_usage": 1}),
    *([{"role": "user", "content": "\ud83d"}], [{"role": "user", "content": None}], [{"role": [], "content": {}}]),
)


def malformed(random: random.Random) -> bytes:
    """A body that is wrong in one of many ways; some are right."""
    body: Any = {**json.loads(json.dumps(HELLO)), "prompt": "x", "max_tokens": 2}
    for _ in range(random.randint(0, 4)):
        body[random.choice(FIELDS)] = random.choice(ODD)
    if random.random() < 0.5:
        body.pop("prompt", None)
    if random.random() < 0.3:
        body.pop("messages", None)
    if isinstance(body.get("messages"), list) and body["messages"] and random.random() < 0.3:
        message = dict(random.choice([{"role": "user", "content": "x"}]))
        message[random.choice(("role", "content", "name", "nanochat", "x"))] = random.choice(ODD)
        body["messages"] = [message] * random.randint(1, 3)
    if random.random() < 0.1:
        body = random.choice(ODD)
    content = json.dumps(body, ensure_ascii=random.random() < 0.7).encode(errors="surrogatepass")
    match random.randint(0, 9):
        case 0:
            content = content[: random.randint(0, len(content))]
        case 1:
            place = random.randint(0, len(content))
            content = content[:place] + random.randbytes(random.randint(1, 8)) + content[place:]
        case 2:
            content = random.choice((b"[", b'{"messages":', b'{"a":[')) * random.choice((5, 150, 250, 40_000))
        case 3:
            number = random.choice((b"1e999", b"-1e999", b"9" * 5000, b"1" + b"0" * 400 + b".5", b"0x10", b"1_0"))
            content = b'{"messages":[{"role":"user","content":"x"}],"seed":' + number + b',"temperature":1}'
    return content


def crash_it(count: int) -> None:
    rng, statuses = random.Random(1), set()
    with client_of(make_app(FakeScheduler(slots=64, queue=64))) as ask:
        for number in range(count):
            path = ("/v1/chat/completions", "/v1/completions")[number % 2]
            answer = ask("POST", path, content=malformed(rng), headers={"content-type": "application/json"})
            statuses.add(answer.status_code)
            assert answer.status_code < 500, answer.text
            if answer.status_code != 200:
                error_of(answer)
        assert ask("GET", "/ready").status_code == 200
    assert {200, 400} <= statuses <= {200, 400, 404}


def test_malformed_bodies_are_answered_in_the_form_of_an_error():
    crash_it(600)


@pytest.mark.soak
def test_ten_thousand_malformed_bodies():
    crash_it(10_000)


def test_raw_bytes_are_no_way_to_crash_it_either():
    rng = random.Random(2)
    starts = (b"", b"GET / HTTP/1.1\r\n", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: ")
    with serving(make_app()) as port:
        for _ in range(60):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(rng.choice(starts) + rng.randbytes(rng.randint(1, 200)) + b"\r\n\r\n")
        assert httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/models/a%00b", 404),
        ("GET", "/%ED%A0%80", 404),
        ("GET", "/../../etc/passwd", 404),
        ("PUT", "/v1/models", 405),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/chat/completions", 400),
    ],
)
def test_every_error_has_openais_form(method: str, path: str, status: int):
    with client_of(make_app()) as ask:
        answer = ask(method, path)
        assert answer.status_code == status
        assert error_of(answer)["type"] == "invalid_request_error"


def test_a_mistake_of_ours_is_a_500_that_tells_nothing_and_logs_no_prompt(capfd: pytest.CaptureFixture[str]):
    with client_of(make_app(FakeScheduler(raises=f"what the user wrote: {CANARY}"))) as ask:
        answer = ask("POST", "/v1/chat/completions", json=HELLO)
    assert answer.status_code == 500 and error_of(answer)["type"] == "server_error"
    out, err = capfd.readouterr()
    assert "RuntimeError" in out + err and "in submit" in out + err
    assert CANARY not in answer.text + out + err


def test_what_is_refused_names_the_field():
    with client_of(make_app()) as ask:
        for change, param in (
            ({"temperature": 3}, "temperature"),
            ({"repetition_penalty": 100}, "repetition_penalty"),
            ({"temperature": "warm"}, "temperature"),
            ({"n": 0}, "n"),
            ({"messages": []}, "messages"),
            ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
            ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
            ({"temprature": 1}, "temprature"),
            ({"model": "gpt-4"}, "model"),
        ):
            answer = ask("POST", "/v1/chat/completions", json={**HELLO, **change})
            assert answer.status_code in (400, 404) and error_of(answer)["param"] == param, change
        for change in ({"presence_penalty": 1}, {"tools": [{}]}, {"stop": [""]}, {"stream_options": {}}):
            answer = ask("POST", "/v1/chat/completions", json={**HELLO, **change})
            assert answer.status_code == 400 and next(iter(change)) in error_of(answer)["message"]


# ---------------------------------------------------------------------- S2: limits are told, not hit


def test_a_body_over_one_mebibyte_is_refused_before_it_is_read():
    with serving(make_app()) as port, socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1048577\r\n\r\n{")
        connection.settimeout(1)
        answer = b""
        while b"\r\n\r\n{" not in answer:
            answer += connection.recv(10_000)
        assert b" 413 " in answer.splitlines()[0] and b'"error"' in answer
        for content, headers in ((b"x" * (3 * MAX_BODY), {}), ((b"x" * 65536 for _ in range(20)), {})):
            large = httpx.post(f"http://127.0.0.1:{port}/v1/completions", content=content, headers=headers)
            assert large.status_code == 413 and error_of(large)["code"] == "too_large"
        body = {"prompt": "x", "user": "u" * (MAX_BODY - 100), "max_tokens": 1}
        assert httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body).status_code == 200


def test_a_prompt_and_max_tokens_over_the_context_are_refused_with_both_numbers():
    with client_of(make_app()) as ask:
        fits = {"prompt": "x" * 99, "max_tokens": CONTEXT - 100}  # the begin token is one of the prompt's
        assert ask("POST", "/v1/completions", json=fits).status_code == 200
        answer = ask("POST", "/v1/completions", json={**fits, "max_tokens": CONTEXT - 99})
        assert answer.status_code == 400 and error_of(answer)["code"] == "context_length_exceeded"
        said = "the prompt has 100 tokens and max_tokens is 413, together more than the model's context of 512; "
        assert error_of(answer)["message"] == said + "shorten the prompt or lower max_tokens"
        full = {"messages": [{"role": "user", "content": "x" * (CONTEXT - 4)}]}  # the begin token and three marks
        said = "the prompt has 512 tokens, which leaves no room for a reply in the model's context of 512; "
        for more in ({}, {"truncation": "auto"}, {"truncation": "auto", "max_tokens": 5}):
            answer = ask("POST", "/v1/chat/completions", json={**full, **more})
            assert error_of(answer)["message"] == said + "shorten the prompt"
        for words in ("word " * 2000, "x" * 900_000):
            long = {"messages": [{"role": "user", "content": words}]}
            answer = ask("POST", "/v1/chat/completions", json=long)
            assert answer.status_code == 400 and re.search(
                r"has (at least )?[\d,]+ tokens", error_of(answer)["message"]
            )


def test_the_oldest_turns_are_left_out_where_that_is_asked_for():
    turns = [
        {"role": role, "content": f"{number} " + "x" * 80} for number in range(6) for role in ("user", "assistant")
    ]
    body = {"messages": [*turns, {"role": "user", "content": "the last"}], "max_tokens": 50}
    scheduler = FakeScheduler()
    with client_of(make_app(scheduler)) as ask:
        assert ask("POST", "/v1/chat/completions", json=body).status_code == 400
        assert ask("POST", "/v1/chat/completions", json={**body, "truncation": "auto"}).status_code == 200
        text = tiny.tiny_tokenizer().decode(scheduler.requests[0].prompt)
        assert "the last" in text and "5 xx" in text and "0 xx" not in text
        assert len(scheduler.requests[0].prompt) + 50 <= CONTEXT
        assert (
            ask("POST", "/v1/chat/completions", json={**body, "truncation": "auto", "max_tokens": 9999}).status_code
            == 200
        )
        longest = scheduler.requests[-1]
        assert len(longest.prompt) <= CONTEXT // 2 and len(longest.prompt) + longest.max_tokens == CONTEXT
        # No turn is left out where a reply of open length has an eighth of the context, and a question may have more.
        for lengths, kept in (((100, 100, 240), True), ((100, 100, 241), False), ((9, 9, 480), False)):
            sides = zip(("user", "assistant", "user"), lengths, "abc", strict=True)
            turns = [{"role": role, "content": letter * length} for role, length, letter in sides]
            asked = {"messages": turns, "truncation": "auto"}
            assert ask("POST", "/v1/chat/completions", json=asked).status_code == 200, lengths
            text = tiny.tiny_tokenizer().decode(scheduler.requests[-1].prompt)
            assert ("a" * lengths[0] in text, "c" * lengths[2] in text) == (kept, True), lengths
        body["messages"] = [{"role": "user", "content": "x" * 5000}]
        assert ask("POST", "/v1/chat/completions", json={**body, "truncation": "auto"}).status_code == 400


def test_the_event_loop_does_not_tokenize_what_is_long(monkeypatch: pytest.MonkeyPatch):
    turns = [{"role": role, "content": "ab"[role == "user"]} for _ in range(2000) for role in ("user", "assistant")]
    chat = {"messages": [*turns, {"role": "user", "content": "q"}], "max_tokens": 1}
    threads, encode = set(), Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda *a, **k: threads.add(threading.get_ident()) or encode(*a, **k))
    with client_of(make_app(FakeScheduler(slots=128))) as ask:
        for path, body, status in (
            ("/v1/chat/completions", {**chat, "truncation": "auto"}, 200),
            ("/v1/completions", {"prompt": ["x" * 400] * 128, "max_tokens": 1}, 200),
        ):
            threads.clear()
            assert ask("POST", path, json=body).status_code == status
            assert threads and threading.get_ident() not in threads, path
        ask("POST", "/v1/completions", json={"prompt": "x"})
        assert threading.get_ident() in threads


# ---------------------------------------------------------------------- what comes before a body


def test_headers_are_bounded_in_size():
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    with serving(make_app()) as port:
        for sent in (
            head + b"x: " + b"y" * 2 * MAX_HEAD,  # never whole
            head + b"x: " + b"y" * MAX_HEAD + b"\r\n\r\n",
            head + b"x: y\r\n" * (MAX_HEAD // 4) + b"\r\n",
            b"GET /" + b"y" * 2 * MAX_HEAD,
        ):
            answer = exchange(port, sent)
            assert answer.startswith(b"HTTP/1.1 431 ") and b'"invalid_request_error"' in answer
        assert exchange(port, head + b"x: " + b"y" * (MAX_HEAD // 2) + b"\r\nconnection: close\r\n\r\n")[9:12] == b"200"
        # What follows a chunked body is held as the headers are.
        chunked = (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"
        )
        assert exchange(port, chunked, *[b"x: " + b"y" * 1000 + b"\r\n"] * 300, pause=0.001) == b""
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200


def exchange(port: int, *sent: bytes, pause: float = 0.0) -> bytes:
    """What the server says to these bytes until it closes the connection; so many seconds from one to the next."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection, contextlib.suppress(ConnectionError):
        for part in sent:
            connection.sendall(part)
            time.sleep(pause)
        while part := connection.recv(1 << 16):
            answer += part
    return answer


@pytest.mark.slow
def test_headers_that_do_not_come_and_connections_that_rest_are_closed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("nanochat.serve.connection.HEAD_SECONDS", 0.3)
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    with serving(make_app(FakeScheduler(tick=0.02))) as port:
        whole = head + b"\r\n"
        for sent in ([b""], [b"\r\n"], [head], [whole, head], [whole, b"\r\n"]):
            began = time.monotonic()
            answer = exchange(port, *sent, pause=0.3)
            assert b"HTTP/1.1 408 " in answer and answer.count(b'"status":"ok"') == sent.count(whole)
            assert 0.25 < time.monotonic() - began < 5
        stream = open_stream(port, max_tokens=40)  # an answer may take its time
        assert b"[DONE]" in b"".join(iter(lambda: stream.recv(1 << 16), b""))


def test_two_hosts_are_one_too_many():
    with serving(make_app()) as port:
        answer = exchange(port, b"GET /health HTTP/1.1\r\nHost: evil.example\r\nHost: localhost\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")


def test_a_client_that_leaves_within_its_body_is_no_mistake_of_ours(capfd: pytest.CaptureFixture[str]):
    app = make_app()
    with serving(app) as port:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            time.sleep(0.1)
        time.sleep(0.1)
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    assert +app.state.nanochat.responses == {200: 1}
    out, err = capfd.readouterr()
    assert not out + err


# ---------------------------------------------------------------------- S3, S4: leaving, overload, standing still


def leave(count: int) -> list[float]:
    """Seconds until the slot of each client that left was free."""
    rng, scheduler, waits = random.Random(3), FakeScheduler(slots=4, queue=0, tick=0.002), []
    with serving(make_app(scheduler)) as port:
        for number in range(count):
            body: dict[str, Any] = {"max_tokens": 400}
            if number % 3 == 2:  # a client that waits for a whole answer
                connection = http.client.HTTPConnection("127.0.0.1", port)
                connection.request("POST", "/v1/chat/completions", json.dumps({**HELLO, **body, "n": 2}))
                until(lambda: scheduler.running)
                time.sleep(rng.random() * 0.03)
                connection.close()
            else:
                stream = open_stream(port, **body, n=number % 2 + 1)
                time.sleep(rng.random() * 0.03)
                if number % 2:  # a reset instead of a goodbye
                    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
                stream.close()
            waits.append(until(lambda: not scheduler.running and not scheduler.waiting))
        assert scheduler.finished == {"cancelled": len(scheduler.requests)}
    return waits


def test_a_client_that_leaves_frees_its_slot():
    assert max(leave(25)) < 0.25


@pytest.mark.soak
def test_five_hundred_clients_that_leave():
    assert max(leave(500)) < 0.25


def test_overload_is_refused_at_once_and_the_server_still_answers():
    scheduler = FakeScheduler(slots=3, queue=2, tick=0.005)
    with serving(make_app(scheduler)) as port:
        streams = [open_stream(port, max_tokens=400) for _ in range(5)]
        until(lambda: len(scheduler.running) == 3 and len(scheduler.waiting) == 2)
        began = time.monotonic()
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=HELLO)
        assert answer.status_code == 429 and answer.headers["retry-after"] == "3"
        assert error_of(answer)["type"] == "rate_limit_error" and time.monotonic() - began < 1
        assert httpx.get(f"http://127.0.0.1:{port}/health").json() == {"status": "ok"}
        metrics = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        assert "nanochat_requests_running 3.0\n" in metrics and "nanochat_requests_queued 2.0\n" in metrics
        streams.pop(0).close()
        until(lambda: not scheduler.waiting or len(scheduler.waiting) == 1)
        # Two choices find room for one: neither is made.
        double = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json={**HELLO, "n": 2})
        assert double.status_code == 429
        until(lambda: len(scheduler.running) + len(scheduler.waiting) == 4)
        for stream in streams:
            stream.close()
        until(lambda: not scheduler.running)


def test_more_than_it_ever_holds_is_refused_for_good():
    with client_of(make_app(FakeScheduler(slots=3, queue=2))) as ask:
        for path, body, said in (
            ("/v1/chat/completions", {**HELLO, "n": 6}, "1 x 6 replies"),
            ("/v1/completions", {"prompt": ["x"] * 3, "n": 2}, "3 x 2 replies"),
        ):
            answer = ask("POST", path, json=body)
            assert answer.status_code == 400 and error_of(answer)["param"] == "n"
            assert said in error_of(answer)["message"] and "holds 5 at once" in error_of(answer)["message"]
        assert ask("POST", "/v1/completions", json={"prompt": ["x"] * 5}).status_code == 200


def test_a_reader_that_stops_is_dropped_and_the_others_go_on():
    scheduler = FakeScheduler(slots=2, queue=0, tick=0.001, word="x" * 20_000)
    with serving(make_app(scheduler, stall_seconds=0.4)) as port:
        stopped = socket.socket()
        stopped.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stopped.connect(("127.0.0.1", port))
        content = json.dumps({**HELLO, "stream": True, "max_tokens": 450}).encode()
        stopped.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(content)
            + content
        )
        until(lambda: scheduler.requests)
        scheduler.tick = 0.02
        with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/chat/completions", json=json.loads(content)) as other:
            read = 0
            for part in other.iter_bytes():
                read += len(part)
                if read > 400_000 and scheduler.finished.get("cancelled"):
                    break
            assert scheduler.finished == {"cancelled": 1} and len(scheduler.running) == 1
        stopped.close()


# ---------------------------------------------------------------------- S6: nobody uninvited


def test_with_a_key_every_route_but_health_and_the_page_wants_it():
    app = make_app(api_key=KEY)
    routes = [route for route in app.routes if isinstance(route, Route)]
    paths = {route.path for route in routes}
    assert {"/", "/health", "/ready", "/metrics", "/v1/models", "/v1/chat/completions", "/openapi.json"} <= paths
    with client_of(app) as ask:
        for path in (*paths, "/v1/models/tiny", "/nowhere"):
            for method in ("GET", "POST", "HEAD", "OPTIONS"):
                for sent in (
                    {},
                    {"authorization": "Bearer wrong"},
                    {"authorization": KEY},
                    {"authorization": "Bearer "},
                ):
                    answer = ask(method, path, headers=sent)
                    opens = path in ("/", "/health") and method in ("GET", "HEAD")
                    assert (answer.status_code != 401) == opens, (method, path, sent)
            assert ask("GET", path, headers={"authorization": f"Bearer {KEY}"}).status_code != 401
        answer = ask("GET", "/v1/models", headers={"authorization": "Bearer \xff\xfe".encode("latin-1")})
        assert answer.status_code == 401 and error_of(answer)["code"] == "invalid_api_key"
        assert ask("GET", "/v1/models", params={"key": KEY}).status_code == 401  # an address may end in a log


def test_pages_elsewhere_are_refused():
    with client_of(make_app()) as ask:
        for host, allowed in (
            *(("localhost", True), ("localhost:8000", True), ("127.0.0.1:1", True), ("[::1]:80", True)),
            *(("evil.example", False), ("localhost.evil.example", False), ("[::2]", False), ("127.0.0.1.evil", False)),
        ):
            answer = ask("GET", "/health", headers={"host": host})
            assert (answer.status_code == 200) == allowed, host
        own = {"host": "localhost:8000", "origin": "http://localhost:8000"}
        assert ask("POST", "/v1/completions", json={"prompt": "x"}, headers=own).status_code == 200
        for origin in ("http://evil.example", "null", "http://localhost:8001", "http://[", "file://"):
            answer = ask("POST", "/v1/completions", json={"prompt": "x"}, headers={**own, "origin": origin})
            assert answer.status_code == 403 and error_of(answer)["type"] == "permission_error"
            assert "access-control-allow-origin" not in answer.headers
    with client_of(make_app(hosts=(), api_key=KEY)) as ask:
        assert ask("GET", "/health", headers={"host": "anything.example"}).status_code == 200


def test_every_answer_carries_the_strict_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    page = tmp_path / "ui.html"
    page.write_text("<style>b{}</style><script>1</script>")
    monkeypatch.setattr("nanochat.serve.middleware.PAGE", page)
    with client_of(make_app()) as ask:
        for path in ("/", "/health", "/nowhere", "/v1/models"):
            headers = ask("GET", path).headers
            policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
            assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
            # sha256 of `1`, in base64: the one script that may run
            assert policy["script-src"] == "'sha256-a4ayc/80/OGda4BO/1o/V0etpOqiLx1JwB5S3beHW0s='"
            assert "unsafe" not in headers["content-security-policy"] and headers["referrer-policy"] == "no-referrer"
        assert ask("HEAD", "/").status_code == ask("HEAD", "/health").status_code == 200
        assert ask("GET", "/").text == page.read_text() and "text/html" in ask("GET", "/").headers["content-type"]
    monkeypatch.setattr("nanochat.serve.middleware.PAGE", tmp_path / "none")
    with client_of(make_app()) as ask:
        assert ask("GET", "/").status_code == 404 and error_of(ask("GET", "/"))


def test_the_command_makes_a_key_where_others_could_ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("NANOCHAT_API_KEY", raising=False)
    config = chat_web.Config()
    assert config.host == "127.0.0.1" and chat_web.key_of(config, open_to_others=False) is None
    made = {chat_web.key_of(config, open_to_others=True) for _ in range(3)}
    assert len(made) == 3 and all(len(key or "") >= 32 for key in made)
    for host, loopback in (("127.0.0.1", True), ("localhost", True), ("::1", True), ("127.8.8.8", True)):
        assert chat_web.is_loopback(host) is loopback
    for host in ("0.0.0.0", "::", "192.168.1.2", "", "localhost.example", "example.org"):
        assert not chat_web.is_loopback(host)
    assert chat_web.key_of(replace(config, api_key="none"), open_to_others=True) is None
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    assert chat_web.key_of(replace(config, api_key_file=file), open_to_others=True) == KEY
    monkeypatch.setenv("NANOCHAT_API_KEY", "from-the-environment")
    assert chat_web.key_of(config, open_to_others=False) == "from-the-environment"
    assert chat_web.key_of(replace(config, api_key=KEY), open_to_others=False) == KEY
    file.write_bytes(b"\xff\xfe\x00")
    for wrong in (file, tmp_path / "none"):
        with pytest.raises(ValueError, match=f"--api_key_file {wrong}"):
            chat_web.key_of(replace(config, api_key_file=wrong), open_to_others=False)
    monkeypatch.delenv("NANOCHAT_API_KEY")
    for key in ("", "short", "with spaces in it", "nicht-ünlich"):
        with pytest.raises(ValueError, match="api_key"):
            chat_web.key_of(replace(config, api_key=key), open_to_others=False)


# ---------------------------------------------------------------------- S7, S12: what users write


def test_user_text_never_becomes_a_control_token():
    scheduler, tokenizer = FakeScheduler(slots=64), tiny.tiny_tokenizer()
    special = set(tokenizer.special_ids.values())

    def marks(prompt: tuple[int, ...]) -> list[int]:
        return [token for token in prompt if token in special]

    with client_of(make_app(scheduler)) as ask:
        ask("POST", "/v1/chat/completions", json={**HELLO, "max_tokens": 1})
        turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
        turns += [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
        ask("POST", "/v1/chat/completions", json={"messages": turns, "max_tokens": 1})
        alone, long = (marks(request.prompt) for request in scheduler.requests)
        for name in SPECIAL_TOKENS:
            for text in (name, f"{name}{name} x", f" {name}\n", f"a{name}b"):
                body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
                assert ask("POST", "/v1/chat/completions", json=body).status_code == 200
                assert marks(scheduler.requests[-1].prompt) == alone
                assert text in tokenizer.decode(scheduler.requests[-1].prompt)
                assert ask("POST", "/v1/completions", json={"prompt": text, "max_tokens": 1}).status_code == 200
                assert marks(scheduler.requests[-1].prompt) == [tokenizer.get_bos_token_id()]
            half = len(name) // 2  # split over parts and over messages
            parts = [{"type": "text", "text": name[:half]}, {"type": "text", "text": name[half:]}]
            split = [
                {**turn, "content": text} for turn, text in zip(turns, (name[:half], name[half:]) * 2, strict=True)
            ]
            split[1]["content"] = parts
            ask("POST", "/v1/chat/completions", json={"messages": split, "max_tokens": 1})
            assert marks(scheduler.requests[-1].prompt) == long
        for token in special:
            answer = ask("POST", "/v1/completions", json={"prompt": [65, token], "max_tokens": 1})
            assert answer.status_code == 400 and error_of(answer)["param"] == "prompt"


def whisper(port: int) -> None:
    """Send the canary in all ways, good and bad, and leave in the middle of some."""
    base = f"http://127.0.0.1:{port}"
    secret = {"messages": [{"role": "user", "content": CANARY}]}
    for body in ({}, {"stream": True}, {"temperature": CANARY}, {"n": 200}, {CANARY: 1}, {"max_tokens": 9999}):
        httpx.post(f"{base}/v1/chat/completions", json={"max_tokens": 9, **secret, **body})
    httpx.post(f"{base}/v1/completions", content=f'{{"prompt": "{CANARY}'.encode())
    httpx.post(f"{base}/v1/completions?{CANARY}", content=b"x", headers={"x-note": CANARY})
    httpx.get(f"{base}/v1/models/{CANARY}", headers={"origin": f"http://{CANARY}", "authorization": f"Bearer {CANARY}"})
    begun = b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"prompt": "%s'
    for content in (begun, b"%s\r\n\r\n"):  # half a body, no HTTP at all
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(content % CANARY.encode())
            time.sleep(0.05)
    for _ in range(3):
        open_stream(port, **secret, max_tokens=400).close()


def test_prompts_are_not_logged(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture):
    caplog.set_level(0)
    for scheduler in (FakeScheduler(tick=0.001), FakeScheduler(fails=True)):
        with serving(make_app(scheduler)) as port:
            whisper(port)
    out, err = capfd.readouterr()
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert CANARY not in out + err + "\n".join(ours)


def test_what_fails_on_the_device_logs_no_prompt(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    tokenizer = tiny.tiny_tokenizer()
    model = tiny.lively_model(tiny.tiny_config(vocab_size=tokenizer.vocab_size, sequence_len=CONTEXT))
    scheduler = Scheduler(Engine(model, tokenizer, tiny.cpu_device()), slots=2)

    def failing(*_: Any) -> None:
        raise RuntimeError(f"what the user wrote: {CANARY}")

    monkeypatch.setattr(scheduler.slots, "decode", failing)
    with serving(make_app(scheduler)) as port:
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=HELLO)
    assert answer.status_code == 500 and "RuntimeError" in error_of(answer)["message"]
    out, err = capfd.readouterr()
    assert CANARY not in answer.text + out + err + caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("how", ["replicas", "gunicorn"])
def test_several_processes_log_no_prompt_and_end_their_streams(how: str, tmp_path: Path):
    """docs/deploy.md: what they print and every file below their home."""
    if how == "gunicorn":
        pytest.importorskip("gunicorn", reason="GUNICORN IS NOT TESTED: pip install gunicorn")
    folder = checkpoint(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = f"--source {folder} --device cpu --slots 20"
    words = f"scripts.chat_web --port {port} --replicas 2 {flags}"
    if how == "gunicorn":
        words = f"gunicorn -b 127.0.0.1:{port} -k uvicorn.workers.UvicornWorker scripts.chat_web:app"
    own = {name: str(tmp_path) for name in ("HOME", "TMPDIR", "NANOCHAT_BASE_DIR")}
    environment = {**os.environ, **own, "NANOCHAT_API_KEY": "none", "NANOCHAT_CHAT_WEB": flags}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *words.split()], cwd=ROOT, stdout=log, stderr=log, env=environment
        )
    try:
        ready: set[str] = set()
        until(lambda: ready.update(who_is_ready(port)) or len(ready) == (2 if how == "replicas" else 1), 60)
        whisper(port)
        secret = [{"role": "user", "content": CANARY}]
        streams = [open_stream(port, messages=secret, max_tokens=400, seed=seed) for seed in range(20)]
        process.terminate()
        ends = [b"".join(iter(lambda one=stream: one.recv(1 << 16), b"")) for stream in streams]
        assert process.wait(15) == 0
    finally:
        process.terminate()
        process.wait(20)
    assert all(b"data: [DONE]" in text for text in ends)
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and CANARY.encode() in file.read_bytes()]


def who_is_ready(port: int) -> list[str]:
    """The number of the replica that answers, if it is ready; "" of a server that has none."""
    with contextlib.suppress(httpx.HTTPError):
        return re.findall(
            r'nanochat_ready(?:\{replica="(\d)"\})? 1.0\n', httpx.get(f"http://127.0.0.1:{port}/metrics").text
        )
    return []


# ---------------------------------------------------------------------- S11: an end without loose ends


def serve_fake(port_to: Any) -> None:
    """In a process of its own: the app as `chat_web.serve` runs it, over replies that never end by themselves."""
    scheduler = FakeScheduler(slots=20, queue=4, tick=0.02)
    chat_web.GRACE_SECONDS = 4.0
    chat_web.make_app = lambda config, on_failure, replica=None: make_app(scheduler, grace=4.0)
    with chat_web.listening(chat_web.Config(port=0)) as listener:
        port_to.send(listener.getsockname()[1])
        chat_web.serve(chat_web.Config(), listener)


def test_sigterm_ends_every_stream_with_a_final_event():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve_fake, args=(theirs,))
    process.start()
    try:
        assert ours.poll(60)
        port = ours.recv()
        until(lambda: is_ready(port), 20)
        lengths = [5 * (number + 1) for number in range(10)] + [450] * 10  # a second, and nine
        streams = [open_stream(port, max_tokens=length) for length in lengths]
        assert process.pid is not None
        began = time.monotonic()
        os.kill(process.pid, signal.SIGTERM)
        texts = []
        for stream in streams:
            text = b""
            while part := stream.recv(1 << 16):
                text += part
            texts.append(text.decode())
        process.join(10)
        assert time.monotonic() - began < 10 and process.exitcode in (0, -signal.SIGTERM)
    finally:
        process.kill()
    assert all("data: [DONE]" in text for text in texts)
    finished = ['"finish_reason":"length"' in text for text in texts]
    assert all(finished[:10]) and not any(finished[10:])
    assert all('"code":"cancelled"' in text for text in texts[10:])


def is_ready(port: int) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
    return False


# ---------------------------------------------------------------------- answers


def test_a_chat_answer_and_its_stream_say_the_same():
    with client_of(make_app(FakeScheduler(calls=True))) as ask:
        body = {**HELLO, "max_tokens": 4, "n": 2, "seed": 5}
        whole = ask("POST", "/v1/chat/completions", json=body).json()
        assert whole["object"] == "chat.completion" and whole["model"] == "tiny"
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        answer = ask("POST", "/v1/chat/completions", json=streamed)
        assert answer.headers["content-type"].startswith("text/event-stream")
        *events, last = events_of(answer.text)
        assert last["usage"] == whole["usage"] and last["choices"] == []
        assert whole["usage"]["completion_tokens"] == 8
        for number, choice in enumerate(whole["choices"]):
            assert choice["index"] == number and choice["finish_reason"] == "length"
            assert choice["message"]["content"] == "word 1 word 2 word 3 "
            calls = [{"type": "python", "text": "2+3"}, {"type": "python_output", "text": "5"}]
            assert choice["message"]["nanochat"]["parts"][:2] == calls
            own = [event["choices"][0] for event in events if event["choices"][0]["index"] == number]
            assert own[0]["delta"] == {"role": "assistant", "content": ""} and own[-1]["finish_reason"] == "length"
            assert all(one["finish_reason"] is None for one in own[:-1])
            assert "".join(one["delta"].get("content", "") for one in own) == choice["message"]["content"]
            shown = [one["delta"]["nanochat"] for one in own if "nanochat" in one["delta"]]
            assert "".join(one["text"] for one in shown if one["kind"] == "python") == "2+3"
            assert "".join(one["text"] for one in shown if one["kind"] == "python_output") == "5"
            assert all(event["usage"] is None for event in events)


def test_settings_reach_the_scheduler():
    scheduler = FakeScheduler()
    given = {"temperature": 0.25, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.5}
    with client_of(make_app(scheduler)) as ask:
        body = {**HELLO, **given, "seed": 11, "n": 3, "stop": ["a", "b"], "max_completion_tokens": 9}
        assert ask("POST", "/v1/chat/completions", json=body).status_code == 200
        assert [request.seed for request in scheduler.requests] == [11, 12, 13]
        for request in scheduler.requests:
            assert {name: getattr(request, name) for name in given} == given
            assert (request.stop, request.max_tokens, request.logprobs, request.tools) == (("a", "b"), 9, -1, True)
        scheduler.requests.clear()
        for _ in range(2):
            ask("POST", "/v1/completions", json={"prompt": ["x", "y"], "logprobs": 2})
        assert len({request.seed for request in scheduler.requests}) == 2  # a request's own, and not twice the same
        assert [request.max_tokens for request in scheduler.requests] == [16] * 4
        assert not any(request.tools for request in scheduler.requests)
        assert scheduler.requests[0].logprobs == 2


def test_an_earlier_reply_with_a_call_can_be_handed_back():
    scheduler = FakeScheduler(calls=True)
    with client_of(make_app(scheduler)) as ask:
        message = ask("POST", "/v1/chat/completions", json={**HELLO, "max_tokens": 2}).json()["choices"][0]["message"]
        turns = [*HELLO["messages"], message, {"role": "user", "content": "more"}]
        assert ask("POST", "/v1/chat/completions", json={"messages": turns, "max_tokens": 1}).status_code == 200
        text = tiny.tiny_tokenizer().decode(scheduler.requests[-1].prompt)
        assert "<|python_start|>2+3<|python_end|><|output_start|>5<|output_end|>word 1 <|assistant_end|>" in text


def test_an_error_in_a_reply_is_told():
    with client_of(make_app(FakeScheduler(fails=True))) as ask:
        answer = ask("POST", "/v1/chat/completions", json=HELLO)
        assert answer.status_code == 500 and error_of(answer)["message"] == "out of memory"
        events = events_of(ask("POST", "/v1/chat/completions", json={**HELLO, "stream": True}).text)
        assert events[-1]["error"]["code"] == "generation_failed"


def test_it_is_alive_before_it_is_ready_and_says_when_it_cannot_be():
    gate, errors = threading.Event(), []
    scheduler = FakeScheduler()

    def load() -> LoadedModel:
        gate.wait()
        scheduler.start()
        return served(scheduler)

    app = create_app(load)
    with serving(app, ready=False) as port:
        base = f"http://127.0.0.1:{port}"
        assert httpx.get(f"{base}/health").status_code == 200
        for path in ("/ready", "/v1/models"):
            answer = httpx.get(f"{base}{path}")
            assert answer.status_code == 503 and error_of(answer)["code"] == "not_ready"
        assert "nanochat_ready 0.0" in httpx.get(f"{base}/metrics").text
        gate.set()
        until(lambda: httpx.get(f"{base}/ready").status_code == 200)
        assert "nanochat_ready 1.0" in httpx.get(f"{base}/metrics").text

    def broken() -> LoadedModel:
        raise MemoryError

    with client_of(create_app(broken, on_failure=errors.append)) as ask:
        assert ask("GET", "/ready").status_code == 503 and isinstance(errors[0], MemoryError)


def test_a_device_that_is_gone_ends_the_server():
    errors: list[BaseException] = []
    scheduler = FakeScheduler()
    with client_of(make_app(scheduler, on_failure=errors.append)) as ask:
        assert ask("GET", "/ready").status_code == 200
        scheduler.dies = True
        until(lambda: errors)
        assert isinstance(errors[0], ValueError)
        for method, path, body in (("GET", "/ready", None), ("POST", "/v1/completions", {"prompt": "x"})):
            answer = ask(method, path, json=body)
            assert answer.status_code == 503 and "lost its device" in error_of(answer)["message"]
        assert "nanochat_ready 0.0" in ask("GET", "/metrics").text


@contextlib.contextmanager
def serving_unready(app: Any) -> Iterator[int]:
    with chat_web.listening(chat_web.Config(port=0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        until(lambda: server.started)
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join(20)


def test_a_base_model_completes_and_does_not_chat():
    with client_of(make_app(model={"chats": False})) as ask:
        answer = ask("POST", "/v1/chat/completions", json=HELLO)
        assert answer.status_code == 400 and "/v1/completions" in error_of(answer)["message"]
        assert ask("POST", "/v1/completions", json={"prompt": "x"}).status_code == 200


def test_metrics_are_in_prometheus_form():
    with client_of(make_app(replica=2)) as ask:
        ask("GET", "/nowhere")
        ask("POST", "/v1/completions", json={"prompt": "x"})
        families = list(text_string_to_metric_families(ask("GET", "/metrics").text))
    values = {}
    for sample in (sample for family in families for sample in family.samples):
        assert sample.labels.pop("replica") == "2"
        values[(sample.name.removeprefix("nanochat_"), *sample.labels.values())] = sample.value
    assert {family.type for family in families} == {"counter", "gauge", "histogram"}
    assert values["http_responses_total", "404"] == values["http_responses_total", "200"] == 1
    assert values["tokens_generated_total",] == 70 and values["cache_bytes",] == 20
    assert values["requests_finished_total", "length"] == 1
    first = "time_to_first_token_seconds"
    assert [values[f"{first}_bucket", bound] for bound in ("0.1", "1.0", "+Inf")] == [1, 3, 6]
    assert values[f"{first}_count",] == 6 and values[f"{first}_sum",] == 5.5


# ---------------------------------------------------------------------- the command


def command(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scripts.chat_web", *flags],
        cwd=ROOT, capture_output=True, text=True, timeout=60, env={**os.environ, **environment},
    )  # fmt: skip


@pytest.mark.slow
def test_mistakes_are_one_line(tmp_path: Path):
    folder = checkpoint(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for flags, said in (
            (["--source", "sft"], "there is no sft checkpoint"),
            (["--slots", "0"], "--slots 0"),
            (["--host", "0.0.0.0", "--api_key", "short"], "--api_key"),
            (["--api_key_file", "/nowhere/key"], "/nowhere/key"),
            (["--source", str(folder), "--device", "gpu"], "--device 'gpu'"),
            (["--source", str(folder), "--device", "cpu", "--graphs"], "--graphs"),
            (["--source", str(folder), "--device", "cpu:0", "--replicas", "2"], "--device cpu:0 with --replicas"),
        ):
            done = command("--port", port, *flags)
            assert done.returncode in (1, 2) and said in done.stderr, done.stderr
            assert len(done.stderr.splitlines()) == 1 and not done.stdout


def checkpoint(folder: Path) -> Path:
    tokenizer = tiny.tiny_tokenizer()
    model = tiny.lively_model(tiny.tiny_config(vocab_size=tokenizer.vocab_size, sequence_len=CONTEXT))
    return save(folder / "tiny", 1, model, tokenizer, {"stage": "sft"}, None, tiny.cpu_device())


def test_gunicorn_says_where_to_listen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for flags in ("--port 9000", "--host 0.0.0.0", "--replicas 2", "--api_key_file /nowhere/key"):
        monkeypatch.setenv("NANOCHAT_CHAT_WEB", flags)
        with pytest.raises(SystemExit) as left:
            chat_web.__getattr__("app")
        out, err = capsys.readouterr()
        assert left.value.code == 3 and flags.split()[0] in err and len(err.splitlines()) == 1 and not out


def test_a_cache_that_does_not_fit_names_the_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, errors = checkpoint(tmp_path), []
    config = chat_web.Config(source=str(folder), device="cpu", queue=1)
    for wrong, said in (
        (replace(config, slots=10**10), r"--slots 10000000000: a cache of [\d,.]+ GiB .* --cache_gib"),
        (replace(config, cache_gib=1e-9), "--cache_gib"),
    ):
        with client_of(chat_web.make_app(wrong, errors.append)) as ask:
            assert ask("GET", "/ready").status_code == 503
        with pytest.raises(ValueError, match=said):
            raise errors.pop()
    size = Slots.bytes_per_slot(Engine(load_model(folder, "cpu")[0], tiny.tiny_tokenizer()))
    app = chat_web.make_app(replace(config, cache_gib=2.5 * size / 2**30), errors.append)
    with client_of(app) as ask:
        assert "nanochat_slots 2.0\n" in ask("GET", "/metrics").text


def test_only_a_key_made_here_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.delenv("NANOCHAT_API_KEY", raising=False)
    served: list[str | None] = []
    monkeypatch.setattr(chat_web, "check", lambda config: None)
    monkeypatch.setattr(chat_web, "serve", lambda config, listener: served.append(config.api_key))
    for config in (chat_web.Config(host="0.0.0.0", port=0), chat_web.Config(port=0, api_key=KEY)):
        chat_web.main(config)
    made, own = capsys.readouterr().out.splitlines()
    assert made.endswith(f"/?key={served[0]}") and served[1] == KEY and own.endswith("/")


def stay(pid_to: Any) -> None:
    """In a process of its own: a replica that serves for ever."""
    threading.Thread(target=chat_web.end_with_parent, daemon=True).start()
    pid_to.send(os.getpid())
    time.sleep(60)


def leave_a_replica(pid_to: Any) -> None:
    multiprocessing.get_context("spawn").Process(target=stay, args=(pid_to,)).start()
    time.sleep(60)


@pytest.mark.slow
def test_replicas_end_with_their_parent_however_that_ends():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    parent = context.Process(target=leave_a_replica, args=(theirs,))
    parent.start()
    theirs.close()
    try:
        assert ours.poll(60)
        ours.recv()
    finally:
        parent.kill()
    with pytest.raises(EOFError):  # the replica's end of the pipe closes with it
        assert ours.poll(20)
        ours.recv()


def test_many_connections_are_allowed():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        chat_web.allow_many_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_load_sees_every_gap_between_tokens():
    body = {"prompt": "x", "max_tokens": 8}
    with serving(make_app(FakeScheduler(tick=0.02))) as port:
        seen = closed_loop("127.0.0.1", port, body, clients=2, requests=4)
    assert (seen.requests, seen.tokens, seen.failed, len(seen.first_token)) == (4, 32, 0, 4)
    assert 14 < len(seen.between_tokens) <= 28 and min(seen.between_tokens) > 0


def test_a_folder_that_is_missing_is_told_before_anything_is_measured():
    with pytest.raises(ValueError, match="--json /nowhere/serve.json: there is no folder /nowhere"):
        bench.main(bench.Config("serve", json="/nowhere/serve.json"))


def test_a_taken_port_and_a_foreign_host_are_told():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for config, said in (
            (chat_web.Config(port=taken.getsockname()[1]), "is taken"),
            (chat_web.Config(host="192.0.2.1", port=0), "192.0.2.1"),
            (chat_web.Config(host="no such host", port=0), "no such host"),
        ):
            with pytest.raises(ValueError, match=said), chat_web.listening(config):
                pass
