"""The server's promises: no body crashes it, limits are reported, leaving frees a slot, nobody uninvited gets in.

Most tests run over a `FakeScheduler`, whose replies a test knows and times; test_openai.py uses the real one. The
promises' full counts run with `-m soak`.
"""

import asyncio
import contextlib
import gc
import http.client
import itertools
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import tiny
import torch
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from nanochat.checkpoint_manager import load_model
from nanochat.device import Device
from nanochat.engine import Engine, Slots
from nanochat.gpt import GPTConfig
from nanochat.ground import cli
from nanochat.model_folder import weights_sha256
from nanochat.sampling import SamplingParams
from nanochat.serve.app import create_app
from nanochat.serve.listener import listening, make_server
from nanochat.serve.load import closed_loop
from nanochat.serve.metrics import SchedulerMetrics
from nanochat.serve.middleware import MAX_BODY, MAX_HEAD
from nanochat.serve.replies import ChatSerializer, ChunkQueue, CompletionSerializer, Waker
from nanochat.serve.scheduler import Chunk, Overloaded, Request, Scheduler, Stream, TokenLogprob, fitting_context
from nanochat.serve.schema import MAX_CONTAINERS
from nanochat.serve.state import LoadedModel
from nanochat.serve.weights import ServedWeights
from nanochat.tokenizer import SPECIAL_TOKENS, Tokenizer
from scripts import bench, chat_web

ROOT = Path(__file__).resolve().parents[2]
KEY = "a-key-of-tests"
CONTEXT = 512
CANARY = "canary-83f1c2"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
PROMPT = {"prompt": "x"}

# ---------------------------------------------------------------------- a scheduler whose replies the test knows


@dataclass
class FakeScheduler:
    """Each running reply gets one word per tick."""

    slots: int = 4
    queue: int = 4
    tick: float = 0.0  # seconds
    word: str = "word "
    calls: bool = False  # a reply calls the calculator first
    dies: bool = False  # its thread ends by itself
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


@pytest.fixture(scope="module")
def ask() -> Iterator[Callable[..., httpx.Response]]:
    """A client of an app for tests that change nothing in it."""
    with client_of(make_app()) as ask:
        yield ask


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The same on a real socket."""
    with serving(make_app(FakeScheduler(tick=0.02))) as port:
        yield port


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error in a response; checks OpenAI's form."""
    (name, error), *rest = answer.json().items()
    assert name == "error" and not rest and set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"] and "\n" not in error["message"]
    return error


def head_of(path: str, length: int) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode()


def open_stream(port: int, **body: Any) -> socket.socket:
    """A streaming chat request on a socket of its own, with the headers and the first event read."""
    content = json.dumps({**HELLO, "stream": True, **body}).encode()
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(head_of(CHAT, len(content)) + content)
    connection.settimeout(60)
    assert b"200 OK" in connection.recv(200)
    return connection


def rest_of(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def exchange(port: int, *sent: bytes, pause: float = 0.0) -> bytes:
    """What the server sends in return for these bytes until it closes; `pause` seconds after each part."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        answer = b""
        with contextlib.suppress(ConnectionError):
            for part in sent:
                connection.sendall(part)
                time.sleep(pause)
            while part := connection.recv(1 << 16):
                answer += part
        return answer


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


def malformed(rng: random.Random) -> bytes:
    """A body that is wrong in one of many ways; some are right."""
    body: Any = {**json.loads(json.dumps(HELLO)), "prompt": "x", "max_tokens": 2}
    for _ in range(rng.randint(0, 4)):
        body[rng.choice(FIELDS)] = rng.choice(ODD)
    for name, share in (("prompt", 0.5), ("messages", 0.3)):
        if rng.random() < share:
            body.pop(name, None)
    if isinstance(body.get("messages"), list) and body["messages"] and rng.random() < 0.3:
        message = {"role": "user", "content": "x", rng.choice(("role", "content", "name", "nanochat")): rng.choice(ODD)}
        body["messages"] = [message] * rng.randint(1, 3)
    if rng.random() < 0.1:
        body = rng.choice(ODD)
    content = json.dumps(body, ensure_ascii=rng.random() < 0.7).encode(errors="surrogatepass")
    match rng.randint(0, 9):
        case 0:
            content = content[: rng.randint(0, len(content))]
        case 1:
            place = rng.randint(0, len(content))
            content = content[:place] + rng.randbytes(rng.randint(1, 8)) + content[place:]
        case 2:
            content = rng.choice((b"[", b'{"messages":', b'{"a":[')) * rng.choice((5, 150, 250, 40_000))
        case 3:
            number = rng.choice((b"1e999", b"-1e999", b"9" * 5000, b"1" + b"0" * 400 + b".5", b"0x10", b"1_0"))
            content = b'{"messages":[{"role":"user","content":"x"}],"seed":' + number + b',"temperature":1}'
    return content


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.soak)])
def test_malformed_bodies_get_an_error_in_openais_form(count: int):
    rng = random.Random(1)
    statuses = set()
    with client_of(make_app(FakeScheduler(slots=64, queue=64))) as ask:
        for number in range(count):
            answer = ask("POST", (CHAT, COMPLETIONS)[number % 2], content=malformed(rng))
            statuses.add(answer.status_code)
            if answer.status_code != 200:
                error_of(answer)
        assert ask("GET", "/ready").status_code == 200
    assert {200, 400} <= statuses <= {200, 400, 404}


def test_raw_bytes_do_not_crash_it(port: int):
    rng = random.Random(2)
    starts = (b"", b"GET / HTTP/1.1\r\n", head_of(COMPLETIONS, 0)[:-5])
    for _ in range(60):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(rng.choice(starts) + rng.randbytes(rng.randint(1, 200)) + b"\r\n\r\n")
    assert httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200


def test_a_mistake_of_ours_is_a_500_that_reveals_nothing_and_logs_no_prompt(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    with client_of(make_app(FakeScheduler(raises=f"what the user wrote: {CANARY}"))) as ask:
        answer = ask("POST", CHAT, json=HELLO)
    assert answer.status_code == 500 and error_of(answer)["type"] == "server_error"
    assert "RuntimeError" in caplog.text and "in submit" in caplog.text
    assert CANARY not in "\n".join([answer.text, caplog.text, *capfd.readouterr()])


# ---------------------------------------------------------------------- refusals


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **more}]}


NOTE = {"type": "url_citation", "url_citation": {"url": "x"}}
CALLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": {"type": kind}}}
    for name, kind in (("f", "object"), ("g", "strin"))
)
MANY = {"logprobs": True, "top_logprobs": 20, "max_tokens": 500}


def call_of(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def schema(of: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": of}}


# What each route refuses: the field that the error names, and what the message must name besides. ALLOWED is just
# within the limits.
REFUSED: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    CHAT: [
        ({"temperature": 3}, "temperature", ""),
        ({"repetition_penalty": 101}, "repetition_penalty", ""),
        ({"temperature": "warm"}, "temperature", ""),
        ({"n": 0}, "n", ""),
        ({"n": 4}, "n", "1 x 4.* 3 "),  # of three slots; the queue is for other clients
        ({"messages": []}, "messages", ""),
        (user(5), "messages.0.content", ""),
        (user([{"type": "image_url"}]), "messages.0.content.0.type", ""),
        (user("x", annotations=[0] * 400_000), "messages.0.annotations", ""),  # also what is ignored is bounded
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages", ""),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata", ""),
        ({"metadata": {"a": [[]] * 40_000}}, "", "20,000"),
        ({"temprature": 1}, "temprature", ""),
        ({"model": "gpt-4"}, "model", ""),
        ({"presence_penalty": 2.5}, "presence_penalty", ""),
        ({"logit_bias": {"5": 101}}, "logit_bias", ""),
        ({"logit_bias": {"x": 1}}, "logit_bias", ""),
        ({"logit_bias": {"100000": 1}}, "logit_bias", ""),
        ({"logit_bias": {str(token): 1 for token in range(301)}}, "logit_bias", ""),
        ({"stop_token_ids": [100_000]}, "stop_token_ids", ""),
        ({"stop_token_ids": list(range(65))}, "stop_token_ids", ""),
        ({"stop": [""]}, "stop.0", ""),
        ({"stop": ["x"] * 17}, "stop", "16"),
        ({"stream_options": {}}, "", "stream_options"),
        ({"tools": [{}]}, "tools.0.type", ""),
        ({"tool_choice": "required"}, "tool_choice", ""),
        ({"tool_choice": "any"}, "tool_choice", '"name"'),  # the other form
        ({"tool_choice": call_of("f")}, "tool_choice", ""),
        ({"tools": CALLS[:1], "tool_choice": call_of("other")}, "tool_choice", ""),
        ({"tools": CALLS[:1], "tool_choice": call_of("any")}, "tool_choice", ""),
        ({"tools": CALLS[:1] * 2}, "tools", ""),
        ({"tools": CALLS[1:], "tool_choice": "required"}, "tools", "strin"),
        ({"tools": [call_of("no spaces")]}, "tools.0.function.name", ""),
        ({"function_call": {"name": "f"}}, "function_call", ""),
        ({"store": True}, "store", ""),
        ({"continue_final_message": True}, "continue_final_message", ""),
        ({"add_generation_prompt": False}, "add_generation_prompt", ""),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs", ""),  # ours has no template
        ({"chat_template_kwargs": {"x": [1]}}, "chat_template_kwargs", ""),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {**schema({}), "type": "json_object"}}, "response_format", "json_schema"),
        ({"response_format": schema({"type": "strin"})}, "response_format", "strin"),
        ({"response_format": schema({"not": {}})}, "response_format", "not"),
        ({"response_format": {"type": "xml"}}, "response_format.type", ""),
        (
            {"messages": [*HELLO["messages"], {"role": "assistant", "content": "{"}], "response_format": schema({})},
            "response_format",
            "",
        ),
        # more logprobs than the server can write in a moment
        ({**MANY, "n": 24}, "max_tokens", "250,000"),
        ({**MANY, "n": 24, "stream": True}, "max_tokens", "250,000"),
        ({"logprobs": True, "top_logprobs": 10, "n": 64}, "max_tokens", "250,000"),  # as long as the context allows
    ],
    COMPLETIONS: [
        ({"prompt": ["x"] * 3, "n": 2}, "n", "3 x 2.* 3 "),
        ({"prompt": ["x"] * 32, "n": 2, "max_tokens": 500, "logprobs": 9}, "max_tokens", "250,000"),
        ({"prompt": ["x"] * 32, "n": 2, "max_tokens": 500, "logprobs": 9, "stream": True}, "max_tokens", "250,000"),
        ({"prompt": [[]] * MAX_CONTAINERS}, "", "20,000"),
        ({"prompt": [[]] * (MAX_CONTAINERS - 5)}, "prompt.0", ""),
    ],
}  # fmt: skip
ALLOWED: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        {"presence_penalty": -2, "frequency_penalty": 2, "logit_bias": {"5": -100}, "stop_token_ids": [5]},
        {"metadata": {str(number): "x" for number in range(16)}},
        user("x", annotations=[NOTE] * 128),
        {"n": 3},
    ],
    COMPLETIONS: [{"prompt": ["x"] * 3}],
}
BODIES = {CHAT: HELLO, COMPLETIONS: PROMPT}


@pytest.mark.parametrize("path", REFUSED)
def test_what_is_wrong_with_a_body_is_named(path: str):
    with client_of(make_app(FakeScheduler(slots=3))) as few, client_of(make_app(FakeScheduler(slots=64))) as many:
        for change, param, named in REFUSED[path]:
            answer = (few if param == "n" else many)("POST", path, json={**BODIES[path], **change})
            error = error_of(answer)
            assert answer.status_code == (404 if param == "model" else 400), change
            assert (error["param"] or "", error["type"]) == (param, "invalid_request_error"), change
            assert re.search(named, error["message"]), change
        for change in ALLOWED[path]:
            assert few("POST", path, json={**BODIES[path], "max_tokens": 1, **change}).status_code == 200, change


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("GET", "/nowhere", b"", 404),
        ("GET", "/v1/models/other", b"", 404),
        ("GET", "/v1/models/a%00b", b"", 404),
        ("GET", "/%ED%A0%80", b"", 404),
        ("GET", "/../../etc/passwd", b"", 404),
        ("PUT", "/v1/models", b"", 405),
        ("GET", CHAT, b"", 405),
        ("POST", CHAT, b"", 400),
        ("POST", CHAT, b'{"messages": ' + b"[" * 300 + b"]" * 300 + b"}", 400),
        ("POST", COMPLETIONS, b'{"prompt":[]}', 400),
    ],
)
def test_every_error_has_openais_form(ask: Any, method: str, path: str, content: bytes, status: int):
    answer = ask(method, path, content=content)
    assert answer.status_code == status and error_of(answer)["type"] == "invalid_request_error"


# ---------------------------------------------------------------------- S2: limits are reported, not hit


def test_a_body_over_one_mebibyte_is_refused_before_it_is_read(port: int):
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(head_of(COMPLETIONS, MAX_BODY + 1) + b"{")
        connection.settimeout(60)
        answer = b""
        while b"\r\n\r\n{" not in answer:
            answer += connection.recv(10_000)
        assert b" 413 " in answer.splitlines()[0] and b'"error"' in answer
    url = f"http://127.0.0.1:{port}{COMPLETIONS}"
    for content in (b"x" * (3 * MAX_BODY), (b"x" * 65536 for _ in range(20))):  # with a length, and without
        answer = httpx.post(url, content=content)
        assert answer.status_code == 413 and error_of(answer)["code"] == "too_large"
    body = {**PROMPT, "user": "u" * (MAX_BODY - 100), "max_tokens": 1}
    assert httpx.post(url, json=body).status_code == 200


def test_max_tokens_end_at_the_context_and_a_prompt_that_fills_it_is_refused(ask: Any):
    for max_tokens in (CONTEXT - 100, CONTEXT - 99, 10**20):  # the begin token is one of the prompt's
        answer = ask("POST", COMPLETIONS, json={"prompt": "x" * 99, "max_tokens": max_tokens})
        choice = answer.json()["choices"][0]
        assert choice["finish_reason"] == "length" and answer.json()["usage"]["total_tokens"] == CONTEXT
        assert choice["nanochat"]["limit"] == ("max_tokens" if max_tokens == CONTEXT - 100 else "context")
    error = error_of(ask("POST", COMPLETIONS, json={"prompt": "x" * CONTEXT, "max_tokens": 1}))
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 512 tokens. However, your messages ")
    full = {"messages": [{"role": "user", "content": "x" * (CONTEXT - 4)}]}  # the begin token and three marks
    for more in ({}, {"truncation": "auto"}, {"truncation": "auto", "max_tokens": 5}):
        error = error_of(ask("POST", CHAT, json={**full, **more}))
        assert re.findall(r"\d+", error["message"]) == ["512", "512"]
    for words in ("word " * 2000, "x" * 900_000):
        answer = ask("POST", CHAT, json={"messages": [{"role": "user", "content": words}]})
        assert answer.status_code == 400 and re.search(r"in (at least )?\d+ tokens", error_of(answer)["message"])


def test_truncation_drops_the_oldest_turns():
    roles = ("user", "assistant")
    turns = [{"role": role, "content": f"{number} " + "x" * 80} for number in range(6) for role in roles]
    body = {"messages": [*turns, {"role": "user", "content": "the last"}], "max_tokens": 50}
    auto = {**body, "truncation": "auto"}
    scheduler = FakeScheduler()
    with client_of(make_app(scheduler)) as ask:
        assert ask("POST", CHAT, json=body).status_code == 400
        assert ask("POST", CHAT, json=auto).status_code == 200
        text = tiny.tiny_tokenizer().decode(scheduler.requests[0].prompt)
        assert "the last" in text and "5 xx" in text and "0 xx" not in text
        assert len(scheduler.requests[0].prompt) + 50 <= CONTEXT
        assert ask("POST", CHAT, json={**auto, "max_tokens": 9999}).status_code == 200
        longest = scheduler.requests[-1]
        assert len(longest.prompt) <= CONTEXT // 2 and len(longest.prompt) + longest.max_tokens == CONTEXT
        # No turn goes while a reply of open length has half of the context; the question may take more. The reply names
        # the first message of the request that the model still reads.
        for lengths, first in (((50, 50, 148), 0), ((50, 50, 149), 2), ((9, 9, 480), 2)):
            sides = zip((*roles, "user"), lengths, "abc", strict=True)
            turns = [{"role": role, "content": letter * length} for role, length, letter in sides]
            answer = ask("POST", CHAT, json={"messages": turns, "truncation": "auto"})
            assert answer.status_code == 200, lengths
            text = tiny.tiny_tokenizer().decode(scheduler.requests[-1].prompt)
            assert ("a" * lengths[0] in text, "c" * lengths[2] in text) == (first == 0, True), lengths
            message = answer.json()["choices"][0]["message"]
            assert message["nanochat"] == {"first_message_read": first, "limit": "context"}
        question = [{"role": "user", "content": "x" * 5000}]
        assert ask("POST", CHAT, json={**auto, "messages": question}).status_code == 400


def test_what_ended_a_reply_and_what_it_no_longer_read_are_told_apart():
    """A client that sets no limit must not read that its limit was reached."""
    # Turns begin at messages 1, 3, 5 and 6 of the request: 200 tokens do not fit beside the last two of 100.
    words = [("system", "s"), ("user", "a" * 100), ("user", "b" * 100), ("assistant", "c"), ("system", "t")]
    words += [("user", "d" * 100), ("assistant", "e"), ("user", "f" * 100)]
    long = {"messages": [{"role": role, "content": text} for role, text in words], "truncation": "auto"}
    with client_of(make_app()) as ask:
        for stream in (False, True):
            for path, body, facts in (
                (CHAT, {**HELLO, "max_tokens": 2}, {"limit": "max_tokens"}),
                (CHAT, HELLO, {"limit": "context"}),
                (
                    CHAT,
                    {**HELLO, "truncation": "auto", "max_tokens": 9999},
                    {"first_message_read": 0, "limit": "context"},
                ),
                (CHAT, {**long, "max_tokens": 1}, {"first_message_read": 0, "limit": "max_tokens"}),
                (CHAT, long, {"first_message_read": 5, "limit": "context"}),
                (COMPLETIONS, PROMPT, {"limit": "max_tokens"}),  # without a number 16, as OpenAI's
                (COMPLETIONS, {**PROMPT, "max_tokens": CONTEXT - 2}, {"limit": "max_tokens"}),
            ):
                answer = ask("POST", path, json={**body, "stream": stream})
                if stream:
                    *events, done = answer.text.strip().split("\n\n")
                    assert done == "data: [DONE]"
                    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
                    said = [choice.get("delta", choice).get("nanochat") for choice in choices]
                    assert not any(said[:-1]), body
                else:
                    (choice,) = answer.json()["choices"]
                    said = [choice.get("message", choice).get("nanochat")]
                assert said[-1] == facts, body


def test_the_event_loop_tokenizes_nothing_long(monkeypatch: pytest.MonkeyPatch):
    turns = [{"role": role, "content": role[0]} for _ in range(2000) for role in ("user", "assistant")]
    chat = {"messages": [*turns, *HELLO["messages"]], "max_tokens": 1, "truncation": "auto"}
    threads = set()
    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda *a, **k: threads.add(threading.get_ident()) or encode(*a, **k))
    with client_of(make_app(FakeScheduler(slots=128))) as ask:
        for path, body in ((CHAT, chat), (COMPLETIONS, {"prompt": ["x" * 400] * 128, "max_tokens": 1})):
            threads.clear()
            assert ask("POST", path, json=body).status_code == 200
            assert threads and threading.get_ident() not in threads, path
        ask("POST", COMPLETIONS, json=PROMPT)
        assert threading.get_ident() in threads


def test_headers_are_bounded_in_size(port: int):
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    for sent in (
        head + b"x: " + b"y" * 2 * MAX_HEAD,  # never complete
        head + b"x: " + b"y" * MAX_HEAD + b"\r\n\r\n",
        head + b"x: y\r\n" * (MAX_HEAD // 4) + b"\r\n",
        b"GET /" + b"y" * 2 * MAX_HEAD,
    ):
        answer = exchange(port, sent)
        assert answer.startswith(b"HTTP/1.1 431 ") and b'"invalid_request_error"' in answer
    assert exchange(port, head + b"x: " + b"y" * (MAX_HEAD // 2) + b"\r\nconnection: close\r\n\r\n")[9:12] == b"200"
    # So is what follows a chunked body.
    chunked = head_of(COMPLETIONS, 0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + b"1\r\n{\r\n0\r\n"
    assert exchange(port, chunked, *[b"x: " + b"y" * 1000 + b"\r\n"] * 300, pause=0.001) == b""
    assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200


def test_headers_that_do_not_arrive_and_idle_connections_are_closed(port: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("nanochat.serve.connection.HEAD_SECONDS", 0.3)
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    whole = head + b"\r\n"
    for sent in ([b""], [head], [whole, head]):
        answer = exchange(port, *sent, pause=0.1)
        assert b"HTTP/1.1 408 " in answer and answer.count(b'"status":"ok"') == sent.count(whole)
    with open_stream(port, max_tokens=40) as stream:  # a response may take its time
        assert any(b"[DONE]" in line for line in stream.makefile("rb"))


def test_a_client_that_leaves_within_its_body_is_no_mistake_of_ours(capfd: pytest.CaptureFixture[str]):
    app = make_app()
    with serving(app) as port:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(head_of(COMPLETIONS, 100) + b"{")
            time.sleep(0.1)
        time.sleep(0.1)
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    metrics = generate_latest(app.state.nanochat.registry)
    assert [line for line in metrics.splitlines() if b"responses_total{" in line] == [
        b'nanochat_http_responses_total{status="200"} 1.0'
    ]
    assert not "".join(capfd.readouterr())


# ---------------------------------------------------------------------- S3, S4: leaving, overload, standing still


@pytest.mark.parametrize("count", [25, pytest.param(500, marks=pytest.mark.soak)])
def test_a_client_that_leaves_frees_its_slot(count: int):
    rng = random.Random(3)
    scheduler = FakeScheduler(slots=4, queue=0, tick=0.002)
    seconds = []
    with serving(make_app(scheduler)) as port:
        for number in range(count):
            body: dict[str, Any] = {"max_tokens": 400}
            if number % 3 == 2:  # a client that waits for a response in one piece
                connection = http.client.HTTPConnection("127.0.0.1", port)
                connection.request("POST", CHAT, json.dumps({**HELLO, **body, "n": 2}))
                until(lambda: scheduler.running)
                time.sleep(rng.random() * 0.03)
                connection.close()
            else:
                stream = open_stream(port, **body, n=number % 2 + 1)
                time.sleep(rng.random() * 0.03)
                if number % 2:  # a reset instead of a goodbye
                    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
                stream.close()
            seconds.append(until(lambda: not scheduler.running and not scheduler.waiting))
        assert scheduler.finished == {"cancelled": len(scheduler.requests)}
    assert max(seconds) < 0.25


def test_overload_is_refused_at_once_and_the_server_still_responds():
    scheduler = FakeScheduler(slots=3, queue=2, tick=0.005)
    with serving(make_app(scheduler)) as port:
        url = f"http://127.0.0.1:{port}"
        streams = [open_stream(port, max_tokens=400) for _ in range(5)]
        until(lambda: len(scheduler.running) == 3 and len(scheduler.waiting) == 2)
        answer = httpx.post(url + CHAT, json=HELLO)
        assert answer.status_code == 429 and answer.headers["retry-after"] == "3"
        assert error_of(answer)["type"] == "rate_limit_error"
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        metrics = httpx.get(f"{url}/metrics").text
        states = (("running", 3), ("queued", 2))
        assert all(f'nanochat_requests_{state}{{model="tiny"}} {count}.0\n' in metrics for state, count in states)
        streams.pop(0).close()
        until(lambda: len(scheduler.running) + len(scheduler.waiting) == 4)
        # Two choices, and room for one: neither is made.
        assert httpx.post(url + CHAT, json={**HELLO, "n": 2}).status_code == 429
        assert len(scheduler.running) + len(scheduler.waiting) == 4
        for stream in streams:
            stream.close()
        until(lambda: not scheduler.running)


def test_the_largest_reply_is_written_a_little_at_a_time(monkeypatch: pytest.MonkeyPatch):
    """S4: written at its end it would hold the event loop, and with it /health, for more than a second."""
    turn = 0
    written: Counter[int] = Counter()  # tokens with 20 alternatives each, by the turn of the event loop
    for serializer in (ChatSerializer, CompletionSerializer):
        logprobs = serializer.logprobs

        def counted(self: Any, number: int, of: Any, logprobs: Any = logprobs) -> Any:
            written[turn] += len(of)
            return logprobs(self, number, of)

        monkeypatch.setattr(serializer, "logprobs", counted)
    app = make_app(FakeScheduler(slots=24))
    count, tokens = 24, 490  # of 21 logprobs each: just below the limit

    async def ask_and_count(path: str, body: dict[str, Any]) -> httpx.Response:
        async def count_turns() -> None:
            nonlocal turn
            while True:
                turn += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count_turns())
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
        async with client, app.router.lifespan_context(app):
            while app.state.nanochat.model is None:
                await asyncio.sleep(0.01)
            answer = await client.post(path, json={**body, "n": count, "max_tokens": tokens}, timeout=60)
        counting.cancel()
        return answer

    body = {**HELLO, "logprobs": True, "top_logprobs": 20}
    answer = asyncio.run(ask_and_count(CHAT, body)).json()
    assert sum(written.values()) == count * tokens and max(written.values()) <= 64
    for number, choice in enumerate(answer["choices"]):
        assert choice["index"] == number and choice["message"]["content"].endswith("word 489 ")
        assert len(choice["logprobs"]["content"]) == tokens and choice["logprobs"]["refusal"] is None
        assert choice["logprobs"]["content"][-1]["top_logprobs"][19] == {"token": "T", "bytes": [84], "logprob": -19.5}
    assert answer["usage"]["completion_tokens"] == count * tokens


def test_the_collector_of_garbage_does_not_look_through_what_was_loaded(tmp_path: Path):
    """S4: or a body with many lists would hold the event loop for as long as that takes."""
    config = chat_web.Config(source=str(checkpoint(tmp_path)), device="cpu", slots=1)
    before = gc.get_freeze_count()
    with client_of(chat_web.make_app(config, lambda error: None)):
        assert gc.get_freeze_count() > before + 1000


def test_a_reader_that_stops_is_dropped_and_the_others_continue():
    scheduler = FakeScheduler(slots=2, queue=0, tick=0.001, word="x" * 20_000)
    body = {**HELLO, "stream": True, "max_tokens": 450}
    content = json.dumps(body).encode()
    with serving(make_app(scheduler, stall_seconds=0.4)) as port, socket.socket() as stopped:
        stopped.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stopped.connect(("127.0.0.1", port))
        stopped.sendall(head_of(CHAT, len(content)) + content)
        until(lambda: scheduler.requests)
        scheduler.tick = 0.02
        with httpx.stream("POST", f"http://127.0.0.1:{port}{CHAT}", json=body) as other:
            read = 0
            for part in other.iter_bytes():
                read += len(part)
                if read > 400_000 and scheduler.finished.get("cancelled"):
                    break
            assert scheduler.finished == {"cancelled": 1} and len(scheduler.running) == 1


# ---------------------------------------------------------------------- S6: nobody uninvited


def test_with_a_key_every_route_but_the_probes_and_the_page_requires_it():
    app = make_app(api_key=KEY)
    paths = {route.path for route in app.routes if isinstance(route, Route)}
    assert {"/", "/health", "/ready", "/metrics", "/v1/models", CHAT, "/openapi.json"} <= paths
    wrong = ({}, {"authorization": "Bearer wrong"}, {"authorization": KEY}, {"authorization": "Bearer "})
    with client_of(app) as ask:
        for path in (*paths, "/v1/models/tiny", "/nowhere"):
            for method in ("GET", "POST", "HEAD", "OPTIONS"):
                is_open = path in ("/", "/health", "/ready") and method in ("GET", "HEAD")
                for headers in wrong:
                    assert (ask(method, path, headers=headers).status_code != 401) == is_open, (method, path, headers)
            assert ask("GET", path, headers={"authorization": f"Bearer {KEY}"}).status_code != 401
        answer = ask("GET", "/v1/models", headers={"authorization": "Bearer \xff\xfe".encode("latin-1")})
        assert answer.status_code == 401 and error_of(answer)["code"] == "invalid_api_key"
        assert ask("GET", "/v1/models", params={"key": KEY}).status_code == 401  # an address may end up in a log
        assert ask("GET", "/ready").json() == {"status": "ready"}  # nothing of the model
        for path in ("/tokenize", "/detokenize"):
            assert ask("POST", path, json={}).status_code == 401


def test_the_page_and_its_libraries_are_sent_compressed_and_once():
    with client_of(make_app(api_key=KEY)) as ask:
        page = ask("GET", "/", headers={"accept-encoding": "gzip"})
        assert page.headers["content-encoding"] == "gzip" and int(page.headers["content-length"]) < len(page.text) / 2
        assert ask("GET", "/", headers={"accept-encoding": "identity"}).text == page.text
        again = ask("GET", "/", headers={"if-none-match": page.headers["etag"]})
        assert again.status_code == 304 and not again.content and page.headers["cache-control"] == "no-cache"
        names = re.findall(r"[\w.-]+-\d+\.\d+\.\d+/[\w.-]+\.(?:js|css)", page.text)
        for name in names:
            library = ask("GET", f"/vendor/{name}")
            assert library.status_code == 200 and "immutable" in library.headers["cache-control"]
            assert ("javascript" if name.endswith("js") else "css") in library.headers["content-type"]
            assert ask("POST", f"/vendor/{name}").status_code == 401
        assert len(names) == 3
        for name in ("README.md", "../app.py", "..%2fapp.py", "temml-0.13.5/LICENSE", ""):
            assert ask("GET", f"/vendor/{name}", headers={"authorization": f"Bearer {KEY}"}).status_code == 404, name
        assert ask("GET", "/health").headers["cache-control"] == "no-store"


def test_pages_elsewhere_are_refused(ask: Any, port: int):
    """By their origin; what a Host may be is in the table of the ways to start."""
    assert error_of(ask("GET", "/health", headers={"host": "evil.example"}))["code"] == "host_not_allowed"
    own = {"host": "localhost:8000", "origin": "http://localhost:8000"}
    assert ask("POST", COMPLETIONS, json=PROMPT, headers=own).status_code == 200
    for origin in ("http://evil.example", "null", "http://localhost:8001", "http://[", "file://"):
        answer = ask("POST", COMPLETIONS, json=PROMPT, headers={**own, "origin": origin})
        assert answer.status_code == 403 and error_of(answer)["type"] == "permission_error"
        assert "access-control-allow-origin" not in answer.headers
    two_hosts = exchange(port, b"GET /health HTTP/1.1\r\nHost: evil.example\r\nHost: localhost\r\n\r\n")
    assert two_hosts.startswith(b"HTTP/1.1 400 ")


def test_pages_of_named_origins_may_use_the_api():
    chosen = "https://chat.example.org"
    flags = chat_web.Config(allowed_origins=f" {chosen} , http://[::1]:3000")
    origins = chat_web.allowed_origins(flags)
    assert origins == (chosen, "http://[::1]:3000")
    preflight = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,x-stainless-os",
    }
    with client_of(make_app(api_key=KEY, origins=origins)) as ask:
        answer = ask("OPTIONS", CHAT, headers={"origin": chosen, **preflight})  # a browser sends no key with it
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == chosen
        assert "x-stainless-os" in answer.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in answer.headers
        key = {"authorization": f"Bearer {KEY}"}
        answer = ask("POST", CHAT, json={**HELLO, "max_tokens": 1}, headers={"origin": chosen, **key})
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == chosen
        assert "Origin" in answer.headers["vary"]
        answer = ask("POST", CHAT, json=HELLO, headers={"origin": chosen})  # the page can read why
        assert answer.status_code == 401 and answer.headers["access-control-allow-origin"] == chosen
        for method in ("OPTIONS", "POST"):
            answer = ask(method, CHAT, headers={"origin": "https://evil.example", **preflight, **key})
            assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers
    for wrong in ("*", "chat.example.org", "https://chat.example.org/", "null", "https://a b"):
        with pytest.raises(cli.UserError, match="--allowed_origins"):
            chat_web.allowed_origins(chat_web.Config(allowed_origins=wrong))


def test_every_response_carries_the_strict_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    page = tmp_path / "ui.html"
    page.write_text("<style>b{}</style><script>1</script>")
    monkeypatch.setattr("nanochat.serve.page.PAGE", page)
    with client_of(make_app()) as ask:
        for path in ("/", "/health", "/nowhere", "/v1/models"):
            headers = ask("GET", path).headers
            policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
            assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
            # sha256 of `1`, in base64: the one script that may run besides this server's files
            assert policy["script-src"] == "'self' 'sha256-a4ayc/80/OGda4BO/1o/V0etpOqiLx1JwB5S3beHW0s='"
            assert "unsafe" not in headers["content-security-policy"] and headers["referrer-policy"] == "no-referrer"
        assert ask("HEAD", "/").status_code == ask("HEAD", "/health").status_code == 200
        assert ask("GET", "/").text == page.read_text() and "text/html" in ask("GET", "/").headers["content-type"]


def test_the_command_makes_a_key_where_others_could_reach_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("NANOCHAT_API_KEY", raising=False)
    config = chat_web.Config()
    assert config.host == "127.0.0.1" and chat_web.choose_key(config, open_to_others=False) is None
    made = {chat_web.choose_key(config, open_to_others=True) for _ in range(3)}
    assert len(made) == 3 and all(len(key or "") >= 32 for key in made)
    assert all(map(chat_web.is_loopback, ("127.0.0.1", "localhost", "::1", "127.8.8.8")))
    assert not any(map(chat_web.is_loopback, ("0.0.0.0", "::", "192.168.1.2", "", "localhost.example", "example.org")))
    assert chat_web.choose_key(replace(config, api_key="none"), open_to_others=True) is None
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    assert chat_web.choose_key(replace(config, api_key_file=file), open_to_others=True) == KEY
    monkeypatch.setenv("NANOCHAT_API_KEY", "from-the-environment")
    assert chat_web.choose_key(config, open_to_others=False) == "from-the-environment"
    assert chat_web.choose_key(replace(config, api_key=KEY), open_to_others=False) == KEY
    file.write_bytes(b"\xff\xfe\x00")
    for wrong in (file, tmp_path / "none"):
        with pytest.raises(cli.UserError, match=f"--api_key_file {wrong}"):
            chat_web.choose_key(replace(config, api_key_file=wrong), open_to_others=False)
    monkeypatch.delenv("NANOCHAT_API_KEY")
    for key in ("", "short", "with spaces in it", "nicht-ünlich"):
        with pytest.raises(cli.UserError, match="api_key"):
            chat_web.choose_key(replace(config, api_key=key), open_to_others=False)


def test_without_a_key_only_names_that_no_other_site_can_own_are_accepted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A page at evil.example may let that name point to this machine; its requests then carry it as their Host.

    Only a key that is made here is printed, in the part of the address that a browser does not send."""
    monkeypatch.delenv("NANOCHAT_API_KEY", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "Lab-7")
    served: list[chat_web.Config] = []
    monkeypatch.setattr(chat_web, "check", lambda config: [])
    monkeypatch.setattr(chat_web, "serve", lambda config, listener: served.append(config))
    everywhere = chat_web.Config(host="0.0.0.0", port=0, api_key="none")
    local = ("localhost", "localhost:8000", "127.0.0.1:80", "[::1]:80")
    own = (*local, "lab-7:8000", "LAB-7", "192.168.1.5", "[fe80::1]:8000", "[::2]")
    foreign = ("evil.example", "lab-7.evil.example", "192.168.1.5.evil.example", "2130706433.evil", "", "[evil]",
               "localhost.evil.example", "127.0.0.1.evil", "[::1].evil.com", "[::1]evil.com:80", "localhost:1@evil.com",
               "localhost@evil.com", "localhost:evil.com")  # fmt: skip
    for config, accepted, refused, printed in (
        (everywhere, own, foreign, "any address"),
        (replace(everywhere, allowed_hosts="chat.example.org"), (*own, "chat.example.org"), foreign, "chat.example"),
        (replace(everywhere, allowed_hosts="*"), (*own, *foreign), (), "any host name"),
        (replace(everywhere, api_key=KEY), (*own, *foreign), (), ""),
        (replace(everywhere, api_key=None), (*own, *foreign), (), ""),
        (chat_web.Config(port=0), local, (*own[len(local) :], *foreign), ""),
    ):
        chat_web.main(config)
        address, *warning = capsys.readouterr().out.splitlines()
        assert len(warning) == bool(printed) and printed in "".join(warning)
        key = served.pop().api_key
        is_made = config.host == "0.0.0.0" and config.api_key is None
        assert address.endswith(f"/#key={key}" if is_made else "/") and "?" not in address
        assert is_made or key == (None if config.api_key in (None, "none") else config.api_key)
        with client_of(make_app(api_key=key, hosts=chat_web.allowed_hosts(config, key))) as ask:
            for host in accepted:
                assert ask("GET", "/health", headers={"host": host}).status_code == 200, (config, host)
            for host in refused:
                answer = ask("GET", "/health", headers={"host": host})
                assert error_of(answer)["code"] == "host_not_allowed", (config, host)


def test_under_gunicorn_a_server_without_a_key_refuses_foreign_names_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(chat_web, "check", lambda config: [])
    monkeypatch.setattr(chat_web, "make_app", lambda config, give_up: config)
    for key, flags, printed, foreign in (
        ("none", "", "no API key", False),
        ("none", "--allowed_hosts=*", "any host name", True),
        (KEY, "", "", True),
        (None, "", "/#key=", True),
    ):
        monkeypatch.setenv("NANOCHAT_CHAT_WEB", flags)
        monkeypatch.delenv("NANOCHAT_API_KEY", raising=False)
        if key is not None:
            monkeypatch.setenv("NANOCHAT_API_KEY", key)
        config = chat_web.__getattr__("app")
        monkeypatch.delattr(chat_web, "app")
        out = capsys.readouterr().out
        assert printed in out and len(out.splitlines()) == bool(printed)
        assert (chat_web.allowed_hosts(config, config.api_key) == ()) == foreign


# ---------------------------------------------------------------------- S7, S12: what users write


def test_user_text_never_becomes_a_control_token():
    scheduler = FakeScheduler(slots=64)
    tokenizer = tiny.tiny_tokenizer()
    special = set(tokenizer.special_ids.values())

    with client_of(make_app(scheduler)) as ask:

        def marks(path: str, **body: Any) -> list[int]:
            """The special tokens in the prompt that the model gets."""
            assert ask("POST", path, json={**body, "max_tokens": 1}).status_code == 200
            return [token for token in scheduler.requests[-1].prompt if token in special]

        roles = ("system", "user", "assistant", "user")
        turns = [{"role": role, "content": "a"} for role in roles]
        one = marks(CHAT, **HELLO)
        several = marks(CHAT, messages=turns)
        for name in SPECIAL_TOKENS:
            for text in (name, f"{name}{name} x", f" {name}\n", f"a{name}b"):
                assert marks(CHAT, messages=[{"role": "user", "content": text}]) == one
                assert text in tokenizer.decode(scheduler.requests[-1].prompt)
                assert marks(COMPLETIONS, prompt=text) == [tokenizer.get_bos_token_id()]
            half = len(name) // 2  # split over messages and over parts
            texts = (name[:half], name[half:]) * 2
            split: list[Any] = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
            split[1]["content"] = [{"type": "text", "text": text} for text in texts[:2]]
            assert marks(CHAT, messages=split) == several
        for token in special:
            answer = ask("POST", COMPLETIONS, json={"prompt": [65, token], "max_tokens": 1})
            assert answer.status_code == 400 and error_of(answer)["param"] == "prompt"


def whisper(port: int) -> None:
    """Send the canary in all ways, good and bad, and leave in the middle of some."""
    base = f"http://127.0.0.1:{port}"
    secret = {"messages": [{"role": "user", "content": CANARY}]}
    for body in ({}, {"stream": True}, {"temperature": CANARY}, {"n": 200}, {CANARY: 1}, {"max_tokens": 9999}):
        httpx.post(base + CHAT, json={"max_tokens": 9, **secret, **body})
    httpx.post(base + COMPLETIONS, content=f'{{"prompt": "{CANARY}'.encode())
    httpx.post(f"{base}{COMPLETIONS}?{CANARY}", content=b"x", headers={"x-note": CANARY})
    httpx.get(f"{base}/v1/models/{CANARY}", headers={"origin": f"http://{CANARY}", "authorization": f"Bearer {CANARY}"})
    half_a_body = head_of(COMPLETIONS, 99) + f'{{"prompt": "{CANARY}'.encode()
    for content in (half_a_body, f"{CANARY}\r\n\r\n".encode()):  # the second is no HTTP at all
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(content)
            time.sleep(0.05)
    for _ in range(3):
        open_stream(port, **secret, max_tokens=400).close()


@pytest.mark.parametrize("fault", ["", "a reply", "the device"])
def test_prompts_are_not_logged(fault: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture):
    def failing(*_: Any, **settings: Any) -> None:
        raise RuntimeError(f"what the user wrote: {CANARY}")

    scheduler: Any = FakeScheduler(tick=0.001, fails=fault == "a reply")
    if fault == "the device":
        scheduler = Scheduler(tiny.make_engine(stops=True, sequence_len=CONTEXT), slots=2)
        scheduler.slots.decode = failing
    caplog.set_level(0)
    with serving(make_app(scheduler)) as port:
        whisper(port)
        answer = httpx.post(f"http://127.0.0.1:{port}{CHAT}", json={**HELLO, "max_tokens": 2})
    assert answer.status_code == (500 if fault else 200)
    assert fault != "the device" or "RuntimeError" in error_of(answer)["message"]
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert CANARY not in "\n".join([answer.text, *capfd.readouterr(), *ours])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "sign"), [("alone", signal.SIGTERM), ("alone", signal.SIGINT), ("gunicorn", signal.SIGTERM)]
)
def test_the_command_logs_no_prompt_and_ends_its_streams(how: str, sign: signal.Signals, tmp_path: Path):
    """docs/deploy.md: what it prints, and every file under its home. By itself it prints its address."""
    if how == "gunicorn":
        pytest.importorskip("gunicorn", reason="GUNICORN IS NOT TESTED: pip install gunicorn")
    folder = checkpoint(tmp_path)
    port = tiny.free_port()
    flags = f"--source {folder} --device cpu --slots 20"
    words = f"scripts.chat_web --port {port} {flags}"
    if how == "gunicorn":
        words = f"gunicorn -b 127.0.0.1:{port} -k uvicorn.workers.UvicornWorker scripts.chat_web:app"
    own = {name: str(tmp_path) for name in ("HOME", "TMPDIR", "NANOCHAT_BASE_DIR")}
    environment = {**os.environ, **own, "NANOCHAT_API_KEY": "none", "NANOCHAT_CHAT_WEB": flags}
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-m", *words.split()]
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment)
    try:
        until(lambda: is_ready(port), 60)
        whisper(port)
        secret = [{"role": "user", "content": CANARY}]
        streams = [open_stream(port, messages=secret, max_tokens=400, seed=seed) for seed in range(20)]
        process.send_signal(sign)
        ends = [rest_of(stream) for stream in streams]
        assert process.wait(15) in (0, -signal.SIGTERM)
    finally:
        process.terminate()
        process.wait(20)
    assert all(b"data: [DONE]" in text for text in ends)
    assert how == "gunicorn" or (tmp_path / "log").read_text() == f"http://127.0.0.1:{port}/\n"
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and CANARY.encode() in file.read_bytes()]


def is_ready(port: int) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return "nanochat_ready 1.0\n" in httpx.get(f"http://127.0.0.1:{port}/metrics").text
    return False


# ---------------------------------------------------------------------- S11: a clean end


def serve(port_to: Any, hangs: bool) -> None:
    """In a process of its own: the app as `chat_web.serve` runs it, over replies of known length or a device that
    hangs."""
    scheduler = wedged_scheduler(threading.Event()) if hangs else FakeScheduler(slots=20, queue=4, tick=0.01)
    chat_web.make_app = lambda config, on_failure: make_app(scheduler, grace=2.0)
    with listening("127.0.0.1", 0) as listener:
        port_to.send(listener.getsockname()[1])
        chat_web.serve(chat_web.Config(), listener)


@contextlib.contextmanager
def process_of(hangs: bool) -> Iterator[tuple[Any, int]]:
    """A server that is ready, and its port."""
    context: Any = multiprocessing.get_context("spawn" if hangs else "fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, hangs))
    process.start()
    try:
        assert ours.poll(60)
        port = ours.recv()
        until(lambda: is_ready(port), 20)
        yield process, port
    finally:
        process.kill()


@pytest.mark.slow
def test_sigterm_ends_the_process_though_its_device_hangs():
    with process_of(hangs=True) as (process, port):
        content = json.dumps({**PROMPT, "stream": True}).encode()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(head_of(COMPLETIONS, len(content)) + content)
            running = re.compile(r"nanochat_requests_running\{[^}]*\} 1\.0")
            until(lambda: running.search(httpx.get(f"http://127.0.0.1:{port}/metrics").text))
            process.terminate()
            process.join(12)
        assert process.exitcode == 1


@pytest.mark.slow
def test_sigterm_ends_every_stream_with_a_final_event():
    with process_of(hangs=False) as (process, port):
        lengths = [5 * (number + 1) for number in range(10)] + [450] * 10  # half a second, and more than the grace
        streams = [open_stream(port, max_tokens=length) for length in lengths]
        process.terminate()
        texts = [rest_of(stream).decode() for stream in streams]
        process.join(10)
        assert process.exitcode in (0, -signal.SIGTERM)
    assert all("data: [DONE]" in text for text in texts)
    finished = ['"finish_reason":"length"' in text for text in texts]
    assert all(finished[:10]) and not any(finished[10:])
    assert all('"code":"cancelled"' in text for text in texts[10:])


# ---------------------------------------------------------------------- replies


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("serializer_type", [ChatSerializer, CompletionSerializer])
def test_an_event_of_plain_text_is_written_as_every_other_one(serializer_type: Any, include_usage: bool):
    serializer = serializer_type(loaded(FakeScheduler()), body_of(include_usage=include_usage))
    texts = ["word ", '"quoted" \\ {}\n\t', "\x00\x1f\x7f", "\u2028 \u4f60\u597d \U0001f600", "null", '",":']
    for number, text in itertools.product((0, 1, 12), texts):
        chunk = Chunk((65,), text)
        event = serializer.event(number, chunk)
        assert event == serializer.choices_event(serializer.chunk(number, chunk))
        (choice,) = json.loads(event.removeprefix(b"data: "))["choices"]
        assert choice["index"] == number and text in (choice.get("text"), choice.get("delta", {}).get("content"))
    assert serializer.event(0, Chunk((65,))) == b""  # half a character
    schema = ChatSerializer(loaded(FakeScheduler()), body_of(calls="schema"))
    assert b"content" not in schema.event(0, Chunk((65,), '{"name":"f","arguments":{"a":'))  # text that is a call


def on_a_loop(monkeypatch: pytest.MonkeyPatch, work: Callable[[Waker, Counter[str]], Any]) -> Counter[str]:
    """Run with a waker; returns how often its event loop was called from other threads, by the name of what it ran."""
    calls: Counter[str] = Counter()

    async def counted() -> None:
        loop = asyncio.get_running_loop()
        call = loop.call_soon_threadsafe

        def count(callback: Any, *arguments: Any) -> Any:
            calls[callback.__name__] += 1
            return call(callback, *arguments)

        monkeypatch.setattr(loop, "call_soon_threadsafe", count)
        await work(Waker(), calls)

    asyncio.run(counted())
    return calls


def test_the_tokens_of_a_step_wake_the_event_loop_once(monkeypatch: pytest.MonkeyPatch):
    """Whatever the number of clients; the ends of replies come at once."""

    async def work(waker: Waker, calls: Counter[str]) -> None:
        queues = [ChunkQueue(waker) for _ in range(50)]
        taking = [asyncio.create_task(queue.take(15)) for queue in queues]
        await asyncio.sleep(0)

        def step(**settings: Any) -> None:
            for queue in queues:
                queue.put(0, Chunk((65,), "word ", **settings))

        thread = threading.Thread(target=step)
        thread.start()
        thread.join()  # the event loop is blocked meanwhile, as it is by a device's thread that has Python's lock
        assert await asyncio.gather(*taking) == [[(0, Chunk((65,), "word "))]] * 50
        assert calls.total() == 1
        # More steps before the loop has rested: one more call for all of them, and one event for each client.
        taking = [asyncio.create_task(queue.take(15)) for queue in queues]
        for _ in range(3):
            step()
        assert await asyncio.gather(*taking) == [[(0, Chunk((65,) * 3, "word word word "))]] * 50
        assert calls.total() == 2
        monkeypatch.setattr("nanochat.serve.replies.ROUND_SECONDS", 1000.0)
        for _ in range(2):
            taking = [asyncio.create_task(queue.take(15)) for queue in queues]
            await asyncio.sleep(0)
            step(finish_reason="stop")
            await asyncio.gather(*taking)

    on_a_loop(monkeypatch, work)


def test_a_closed_event_loop_cancels_every_stream(monkeypatch: pytest.MonkeyPatch):
    streams: list[Stream] = []

    async def work(waker: Waker, calls: Counter[str]) -> None:
        streams.extend(Stream(lambda: None, partial(ChunkQueue(waker).put, number)) for number in range(3))

    on_a_loop(monkeypatch, work)
    for stream in streams:
        stream.put(Chunk((65,), "word "))
    assert all(stream.cancelled for stream in streams)


def test_only_a_silent_stream_has_heartbeats(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("nanochat.serve.replies.HEARTBEAT_SECONDS", 0.2)
    for tick, beats in ((0.05, False), (0.5, True)):
        with client_of(make_app(FakeScheduler(tick=tick))) as ask:
            text = ask("POST", CHAT, json={**HELLO, "stream": True, "max_tokens": 10 if not beats else 3}).text
        assert (": waiting\n\n" in text) == beats
        assert text.count("word") == (10 if not beats else 3) and text.endswith("data: [DONE]\n\n")


def test_logprobs_of_a_chat_are_those_of_its_content():
    """A calculator call is in no content, so its tokens are in no list."""
    serializer = ChatSerializer(loaded(FakeScheduler()), body_of())
    call, text = TokenLogprob(50, -1.0), TokenLogprob(65, -0.5)
    assert serializer.chunk(0, Chunk((50,), "2", kind="python", logprobs=(call,)))["logprobs"] is None
    for chunk in (Chunk((50,), "2", kind="python", logprobs=(call,)), Chunk((65,), "A", logprobs=(text,))):
        serializer.add(0, chunk)
    (choice,) = json.loads(b"".join(serializer.whole({})))["choices"]
    assert "".join(one["token"] for one in choice["logprobs"]["content"]) == choice["message"]["content"] == "A"


@pytest.mark.parametrize(
    ("text", "finish_reason", "arguments"),
    [
        ('{"name":"f","arguments":{"a":1}}', "stop", '{"a":1}'),
        ('{"name":"f","arguments":{"a":1}}', "length", '{"a":1}'),  # complete with its last token
        ('{"name":"f","arguments":{"a":', "length", '{"a"'),  # what may be the last brace is held back
        ('{"name":"f', "length", None),
        ('{"name":"f', "stop", None),  # by one of the client's stop_token_ids
    ],
)
def test_a_call_is_the_same_whole_and_streamed(text: str, finish_reason: str, arguments: str | None):
    serializer = ChatSerializer(loaded(FakeScheduler()), body_of(calls="schema"))
    logprobs = (TokenLogprob(65, -0.5),)
    chunks = [Chunk((65,), character, logprobs=logprobs) for character in text]
    chunks.append(Chunk(finish_reason=finish_reason))
    events = [serializer.chunk(0, chunk) for chunk in chunks]
    for chunk in chunks:
        serializer.add(0, chunk)
    (choice,) = json.loads(b"".join(serializer.whole({})))["choices"]
    fragments = [one for event in events for one in event["delta"].get("tool_calls", ())]
    calls = choice["message"].get("tool_calls")
    assert "".join(one["function"]["arguments"] for one in fragments) == (arguments or "")
    assert (calls and calls[0]["function"]) == (arguments and {"name": "f", "arguments": arguments})
    reason = "tool_calls" if arguments and finish_reason == "stop" else finish_reason
    assert choice["finish_reason"] == events[-1]["finish_reason"] == reason
    # The call is in no content, so its tokens are in no list of logprobs.
    assert not choice["message"]["content"] and not any(event["delta"].get("content") for event in events)
    assert choice["logprobs"] is None and not any(event["logprobs"] for event in events)


def test_a_call_of_the_calculator_is_the_same_whole_and_streamed():
    """test_openai.py compares the rest of a stream with the whole."""
    with client_of(make_app(FakeScheduler(calls=True))) as ask:
        body = {**HELLO, "max_tokens": 4, "n": 2, "seed": 5}
        whole = ask("POST", CHAT, json=body).json()
        answer = ask("POST", CHAT, json={**body, "stream": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        choices = [event["choices"][0] for event in events_of(answer.text)]
        for number, choice in enumerate(whole["choices"]):
            assert choice["index"] == number and choice["message"]["content"] == "word 1 word 2 word 3 "
            calls = [{"type": "python", "text": "2+3"}, {"type": "python_output", "text": "5"}]
            assert choice["message"]["nanochat"]["parts"][:2] == calls
            own = [one for one in choices if one["index"] == number]
            assert own[0]["delta"] == {"role": "assistant", "content": ""} and own[-1]["finish_reason"] == "length"
            assert "".join(one["delta"].get("content", "") for one in own) == choice["message"]["content"]
            shown = [one["delta"]["nanochat"] for one in own if "nanochat" in one["delta"]]
            for call in calls:
                assert "".join(one["text"] for one in shown if one.get("kind") == call["type"]) == call["text"]


def test_settings_reach_the_scheduler():
    scheduler = FakeScheduler()
    settings = {"temperature": 0.25, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.5}
    with client_of(make_app(scheduler)) as ask:
        body = {**HELLO, **settings, "seed": 11, "n": 3, "stop": ["a", "b"], "max_tokens": 20}
        body |= {"max_completion_tokens": 9}  # which goes before max_tokens
        assert ask("POST", CHAT, json=body).status_code == 200
        assert [request.sampling.seed for request in scheduler.requests] == [11, 12, 13]
        for request in scheduler.requests:
            assert request.sampling == SamplingParams(**settings, seed=request.sampling.seed)
            assert (request.stop, request.max_tokens, request.logprobs, request.calls) == (("a", "b"), 9, -1, "own")
        scheduler.requests.clear()
        for _ in range(2):
            ask("POST", COMPLETIONS, json={"prompt": ["x", "y"], "logprobs": 2})
        assert len({request.sampling.seed for request in scheduler.requests}) == 2  # one for each HTTP request
        assert [request.max_tokens for request in scheduler.requests] == [16] * 4
        assert all(request.calls == "none" for request in scheduler.requests)
        assert scheduler.requests[0].logprobs == 2


def test_an_earlier_reply_with_a_call_can_be_sent_back():
    scheduler = FakeScheduler(calls=True)
    with client_of(make_app(scheduler)) as ask:
        body = {**HELLO, "max_tokens": 2, "truncation": "auto"}
        message = ask("POST", CHAT, json=body).json()["choices"][0]["message"]
        assert set(message["nanochat"]) == {"parts", "first_message_read", "limit"}
        turns = [*HELLO["messages"], message, {"role": "user", "content": "more"}]
        assert ask("POST", CHAT, json={"messages": turns, "max_tokens": 1}).status_code == 200
        text = tiny.tiny_tokenizer().decode(scheduler.requests[-1].prompt)
        assert "<|python_start|>2+3<|python_end|><|output_start|>5<|output_end|>word 1 <|assistant_end|>" in text


def test_messages_in_any_order_become_turns():
    """As vLLM takes them: two users in a row, late system messages, parts of a text, the beginning of the reply."""
    scheduler = FakeScheduler()
    user, more = ({"role": "user", "content": text} for text in ("one", "two"))
    reply = {"role": "assistant", "content": "It is"}
    late = {"role": "system", "content": "late"}
    parts = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
    call = {"type": "python", "text": "2+3"}
    called = {**reply, "nanochat": {"parts": [{"type": "text", "text": "It is "}, call]}}
    asked = "<|user_start|>one\ntwo<|user_end|><|assistant_start|>"
    with client_of(make_app(scheduler)) as ask:
        for messages, text in (
            ([user, more], asked),
            ([parts], asked),
            ([{**late, "role": "developer"}, user, late, more], f"<|system_start|>late\nlate<|system_end|>{asked}"),
            ([user, more, reply], f"{asked}It is"),
            ([user, more, reply, reply], f"{asked}It is\nIt is"),
            ([user, more, {"role": "assistant", "content": None}], asked),
        ):
            is_open = messages[-1]["role"] == "assistant"
            for body in ({}, {"continue_final_message": is_open, "add_generation_prompt": not is_open}):
                body = {**body, "messages": messages, "max_tokens": 1}
                for truncation in ({}, {"truncation": "auto"}):
                    assert ask("POST", CHAT, json={**body, **truncation}).status_code == 200, messages
                    assert tiny.tiny_tokenizer().decode(scheduler.requests[-1].prompt) == f"<|bos|>{text}"
        for messages in ([reply, user], [late], [user, called], [{"role": "user", "content": None}]):
            answer = ask("POST", CHAT, json={"messages": messages})
            assert answer.status_code == 400 and error_of(answer)["param"] == "messages"


def test_a_failed_reply_is_an_error():
    with client_of(make_app(FakeScheduler(fails=True))) as ask:
        answer = ask("POST", CHAT, json=HELLO)
        assert answer.status_code == 500 and error_of(answer)["message"] == "out of memory"
        events = events_of(ask("POST", CHAT, json={**HELLO, "stream": True}).text)
        assert events[-1]["error"]["code"] == "generation_failed"


def test_it_is_alive_before_it_is_ready():
    may_load = threading.Event()
    errors: list[BaseException] = []
    scheduler = FakeScheduler()

    def load() -> LoadedModel:
        may_load.wait()
        scheduler.start()
        return loaded(scheduler)

    with serving(create_app(load), ready=False) as port:
        base = f"http://127.0.0.1:{port}"
        assert httpx.get(f"{base}/health").status_code == 200
        for path in ("/ready", "/v1/models"):
            answer = httpx.get(f"{base}{path}")
            assert answer.status_code == 503 and error_of(answer)["code"] == "not_ready"
        assert not is_ready(port)
        may_load.set()
        until(lambda: httpx.get(f"{base}/ready").status_code == 200)
        assert is_ready(port)

    def broken() -> LoadedModel:
        raise MemoryError

    with client_of(create_app(broken, on_failure=errors.append)) as ask:
        assert ask("GET", "/ready").status_code == 503 and isinstance(errors[0], MemoryError)


def test_a_lost_device_ends_the_server():
    errors: list[BaseException] = []
    scheduler = FakeScheduler()
    with client_of(make_app(scheduler, on_failure=errors.append)) as ask:
        assert ask("GET", "/ready").status_code == 200
        scheduler.dies = True
        until(lambda: errors)
        assert isinstance(errors[0], cli.UserError)
        for method, path, body in (("GET", "/ready", None), ("POST", COMPLETIONS, PROMPT)):
            answer = ask(method, path, json=body)
            assert answer.status_code == 503 and "device" in error_of(answer)["message"]
        assert "nanochat_ready 0.0\n" in ask("GET", "/metrics").text


def wedged_scheduler(release: Any) -> Scheduler:
    """A real one whose first step waits for `release`, as for a kernel that hangs."""
    scheduler = Scheduler(tiny.make_engine(stops=True, sequence_len=CONTEXT), slots=2)
    decode = scheduler.slots.decode

    def hang_in_this_kernel(**settings: Any) -> Any:
        release.wait()
        return decode(**settings)

    scheduler.slots.decode = hang_in_this_kernel  # pyright: ignore[reportAttributeAccessIssue]
    return scheduler


def test_a_device_that_hangs_is_not_ready_and_its_place_is_logged(caplog: pytest.LogCaptureFixture):
    release = threading.Event()
    scheduler = wedged_scheduler(release)
    with serving(make_app(scheduler, stuck_seconds=0.5)) as port:
        base = f"http://127.0.0.1:{port}"
        assert httpx.get(f"{base}/ready").status_code == 200
        scheduler.submit(Request((0,), 1))
        until(lambda: httpx.get(f"{base}/ready").status_code == 503)
        answer = httpx.post(f"{base}{COMPLETIONS}", json=PROMPT)
        assert answer.status_code == 503 and "stuck" in error_of(answer)["message"]
        assert httpx.get(f"{base}/health").status_code == 200 and not is_ready(port)
        until(lambda: "hang_in_this_kernel" in caplog.text)
        release.set()
        until(lambda: httpx.get(f"{base}/ready").status_code == 200)
    assert caplog.text.count("no request has moved for 0.5 s") == 1


def test_a_request_is_drawn_as_the_checkpoint_says_field_by_field():
    scheduler = FakeScheduler()
    own = SamplingParams(temperature=0.6, top_k=9, min_p=0.1)
    with client_of(make_app(scheduler, replace(loaded(scheduler), sampling=own))) as ask:
        shown = ask("GET", "/v1/models").json()["data"][0]["nanochat"]
        assert SamplingParams(**shown["sampling"]) == own and "seed" not in shown["sampling"]
        for path, body in ((CHAT, HELLO), (COMPLETIONS, PROMPT)):
            for settings in ({}, {"temperature": 1.0}, {"top_k": 0, "min_p": 0.0, "top_p": 0.5}, {"temperature": None}):
                answer = ask("POST", path, json={**body, **settings, "seed": 5, "max_tokens": 1})
                sent = {name: value for name, value in settings.items() if value is not None}
                assert answer.status_code == 200 and scheduler.requests[-1].sampling == replace(own, **sent, seed=5)


def test_the_model_list_has_the_facts_of_the_checkpoint(tmp_path: Path):
    folder = checkpoint(tmp_path, pretraining={"data": "/home/me/books"}, tasks=["stories"], sampling={"min_p": 0.2})
    config = chat_web.Config(source=str(folder), device="cpu", slots=1, name="my model")
    with client_of(chat_web.make_app(config, lambda error: None)) as ask:
        reply = ask("POST", COMPLETIONS, json={"model": "nanochat", "prompt": "a", "max_tokens": 0}).json()
        assert reply["model"] == "my model" and reply["system_fingerprint"] == f"fp_{weights_sha256(folder)[:12]}"
        (shown,) = ask("GET", "/v1/models").json()["data"]
        answer = ask("GET", f"/v1/models/{shown['id']}").json()
    assert answer == shown
    facts = shown["nanochat"]
    model, _, meta = load_model(folder, "cpu")
    assert facts.pop("sampling") == meta["sampling"] and meta["sampling"]["min_p"] == 0.2
    assert facts.pop("parameters") == sum(weight.numel() for weight in model.parameters())
    assert abs(facts.pop("trained_at") - time.time()) < 100
    assert facts == {
        "context": model.config.sequence_len, "chats": True, "tasks": ["stories"], "data": "books", "stage": "sft",
        "step": meta["step"], "slots": 1,
    }  # fmt: skip


def test_metrics_are_in_prometheus_form():
    scheduler = FakeScheduler()
    for seconds in (0.001, 0.2, 0.2, 40):
        scheduler.metrics.first_token.observe(seconds)
    with client_of(make_app(scheduler)) as ask:
        ask("GET", "/nowhere")
        ask("POST", COMPLETIONS, json=PROMPT)
        families = list(text_string_to_metric_families(ask("GET", "/metrics").text))
    values = {}
    for sample in (sample for family in families for sample in family.samples):
        values[(sample.name.removeprefix("nanochat_"), *sample.labels.values())] = sample.value
    assert {family.type for family in families} == {"counter", "gauge", "histogram"}
    assert values["http_responses_total", "404"] == values["http_responses_total", "200"] == 1
    assert values["requests_finished_total", "tiny", "length"] == 1 and values["slots", "tiny"] == 4
    first = "time_to_first_token_seconds"
    assert [values[f"{first}_bucket", bound, "tiny"] for bound in ("0.1", "1.0", "+Inf")] == [1, 3, 4]
    assert values[f"{first}_count", "tiny"] == 4 and values[f"{first}_sum", "tiny"] == pytest.approx(40.401)
    assert not [name for name, *_ in values if name.endswith("_created")]


# ---------------------------------------------------------------------- the command


def checkpoint(folder: Path, seed: int = 0, **meta: Any) -> Path:
    tokenizer = tiny.tiny_tokenizer()
    model = tiny.lively_model(tiny.tiny_config(vocab_size=tokenizer.vocab_size, sequence_len=CONTEXT), seed=seed)
    return tiny.save_checkpoint(folder / "tiny", 1, model, tokenizer, {"stage": "sft", **meta})


def test_mistakes_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    folder = checkpoint(tmp_path)
    namesake = checkpoint(tmp_path / "other")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for flags, named in (
            ("--source sft", "sft"),
            ("--slots 0", "--slots 0"),
            ("--host 0.0.0.0 --api_key short", "--api_key"),
            ("--api_key_file /nowhere/key", "/nowhere/key"),
            (f"--source {folder} --device gpu", "--device 'gpu'"),
            (f"--source {folder} --allowed_origins *", "--allowed_origins *"),
            (f"--source {folder} --name " + "x" * 101, "--name"),
            (f"--source {folder},nowhere", "--source nowhere is neither"),
            (f"--source {folder},{folder}", "listed before"),
            (f"--source {folder},{namesake}", "another model is called nanochat-tiny-sft"),
            (f"--source {folder},{namesake} --name a", "--name a: --source has 2 models"),
            (f"--source {folder},{namesake} --name ,b", "--name ,b: --source has 2 models"),
            (f"--source {folder},{namesake} --name a,nanochat", "another model is called nanochat"),
            (f"--source {folder},{namesake} --for_rl", "--for_rl are for a single --source, not for 2"),
            (f"--source {folder},{namesake} --adapter x", "--adapter and --for_rl are for a single --source"),
            ("--source ,", "names no model"),
            (f"--source {folder} --device cpu --graphs on", "--graphs on"),
            (f"--source {folder} --port {taken.getsockname()[1]}", f"--port {taken.getsockname()[1]}"),
            (f"--source {folder} --host 192.0.2.1 --api_key none", "--host 192.0.2.1"),
            (f"--source {folder} --host no.such.host.example --api_key none", "--host no.such.host.example"),
        ):
            monkeypatch.setattr(sys, "argv", ["chat_web", "--device", "cpu", *flags.split()])
            with pytest.raises(SystemExit) as left:
                cli.run(chat_web.main, chat_web.Config)
            out, err = capsys.readouterr()
            assert left.value.code in (1, 2) and named in err and len(err.splitlines()) == 1 and not out, flags


def test_gunicorn_decides_where_to_listen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for flags in ("--port 9000", "--host 0.0.0.0", "--api_key_file /nowhere/key", "--slots 0"):
        monkeypatch.setenv("NANOCHAT_CHAT_WEB", flags)
        with pytest.raises(SystemExit) as left:
            chat_web.__getattr__("app")
        out, err = capsys.readouterr()
        assert left.value.code == 3 and flags.split()[0] in err and len(err.splitlines()) == 1 and not out


def test_a_cache_that_does_not_fit_names_the_flag(tmp_path: Path):
    folder = checkpoint(tmp_path)
    errors: list[BaseException] = []
    config = chat_web.Config(source=str(folder), device="cpu", slots=10**10)
    with client_of(chat_web.make_app(config, errors.append)) as ask:
        assert ask("GET", "/ready").status_code == 503
    with pytest.raises(cli.UserError, match=r"--slots 10000000000.* [\d,.]+ GiB "):
        raise errors.pop()


def test_the_default_cache_fits_the_device(capsys: pytest.CaptureFixture[str]):
    """Qwen3 0.6B with its own context of 40,960 tokens and 16 slots, where 58 GiB of a card of 64 are free."""
    shape = GPTConfig(n_layer=28, width=1024, n_head=16, n_kv_head=8, head_dim=128, sequence_len=40960)
    free = 58 * 2**30
    device = SimpleNamespace(dtype=torch.bfloat16, free_memory=lambda: free)
    engine: Any = SimpleNamespace(model=SimpleNamespace(config=shape), device=device)
    token = Slots.bytes_per_slot(shape, torch.bfloat16) // 40960
    assert 70 * 2**30 <= 16 * 40960 * token < 71 * 2**30
    tokens = fitting_context(engine, 16)
    assert 20_000 < tokens < 40960 and 16 * tokens * token <= 0.7 * free
    assert f"a chat has at most {tokens:,} tokens" in capsys.readouterr().out
    assert fitting_context(engine, 8) == 40960 and not capsys.readouterr().out
    device.free_memory = lambda: None  # the system does not say
    assert fitting_context(engine, 16) == 40960


def test_weights_that_do_not_fit_are_refused_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = checkpoint(tmp_path)
    model, _, _ = load_model(folder, tiny.cpu_device())
    needed = 4 * sum(weight.numel() for weight in model.parameters())
    errors: list[BaseException] = []
    config = chat_web.Config(source=str(folder), device="cpu", dtype="float32")
    for free, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(Device, "free_memory", lambda self, free=free: free)
        with client_of(chat_web.make_app(replace(config, max_seq_len=32), errors.append)) as ask:
            assert ask("GET", "/ready").status_code == (200 if fits else 503)
    (error,) = errors
    assert isinstance(error, cli.UserError) and "\n" not in str(error)
    assert folder.name in str(error) and "GiB in float32" in str(error) and "--to hf" in str(error)


def test_a_served_model_is_in_memory_once_and_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On an accelerator, in bf16: no copy in fp32 is made, and the weights are the same as in a copy of it."""
    folder = checkpoint(tmp_path)
    device = tiny.cpu_device(dtype=torch.bfloat16)
    monkeypatch.setattr(type(device.kernels), "packs", lambda self, dtype: False)  # as on an accelerator
    before, tokenizer, _ = load_model(folder, device)
    copied = Engine(before, tokenizer, device).model
    assert before.embedding.weight.dtype == torch.float32 and copied is not before
    model, _, _ = load_model(folder, device, prepare=[ServedWeights(folder)])
    assert Engine(model, tokenizer, device).model is model
    expected = copied.state_dict() | dict(copied.named_buffers())
    assert {weight.dtype for weight in model.state_dict().values()} == {torch.bfloat16}
    for name, weight in (model.state_dict() | dict(model.named_buffers())).items():
        assert torch.equal(weight, expected[name]), name


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of a base model and two later stages, with weights and sampling settings of their own."""
    folder = tmp_path_factory.mktemp("stages")
    names = ("base", "sft", "rl")
    return {
        name: checkpoint(folder / name, seed, stage=name, sampling={"top_k": seed + 1})
        for seed, name in enumerate(names)
    }


@pytest.fixture(scope="module")
def several(stages: dict[str, Path]) -> Iterator[Callable[..., httpx.Response]]:
    """A client of a server with all of them."""
    source = ",".join(map(str, stages.values()))
    config = chat_web.Config(source=source, name="base,sft,rl", device="cpu", dtype="float32", slots=2)
    with client_of(chat_web.make_app(config, lambda error: None)) as ask:
        yield ask


def test_several_models_are_chosen_by_name(stages: dict[str, Path], several: Any):
    """Each replies as it does alone, with its own settings; the last one of --source is the default."""
    listed = several("GET", "/v1/models").json()["data"]
    assert [one["id"] for one in listed] == ["rl", "sft", "base"]
    assert [one["nanochat"]["sampling"]["top_k"] for one in listed] == [3, 2, 1]
    assert [one["nanochat"]["chats"] for one in listed] == [True, True, False]
    texts = {}
    for name, folder in stages.items():
        body = {"prompt": "abc", "max_tokens": 12, "temperature": 0, "model": name}
        answer = several("POST", COMPLETIONS, json=body).json()
        model, tokenizer, _ = load_model(folder, "cpu")
        prompt = tokenizer.encode("abc", prepend=tokenizer.get_bos_token_id())
        greedy = SamplingParams(temperature=0)
        reply = Engine(model, tokenizer).generate([prompt], max_tokens=12, sampling=greedy)[0][0]
        assert (answer["model"], answer["choices"][0]["text"]) == (name, tokenizer.decode(reply))
        assert answer["system_fingerprint"] == f"fp_{weights_sha256(folder)[:12]}"
        texts[name] = answer["choices"][0]["text"]
        assert several("GET", f"/v1/models/{name}").json()["id"] == name
    assert len(set(texts.values())) == 3
    for default in ({}, {"model": "nanochat"}):
        answer = several("POST", COMPLETIONS, json={"prompt": "abc", "max_tokens": 12, "temperature": 0, **default})
        assert answer.json()["choices"][0]["text"] == texts["rl"]
    assert several("POST", CHAT, json={**HELLO, "max_tokens": 1, "model": "sft"}).status_code == 200
    base = several("POST", CHAT, json={**HELLO, "model": "base"})
    assert base.status_code == 400 and "base is a base model" in error_of(base)["message"]
    assert COMPLETIONS in error_of(base)["message"]
    unknown = several("POST", CHAT, json={**HELLO, "model": "gpt-4"})
    wrong = error_of(unknown)
    assert unknown.status_code == 404 and (wrong["code"], wrong["param"]) == ("model_not_found", "model")
    assert wrong["message"].endswith("this server has rl, sft, base; nanochat is another name of rl")
    assert several("POST", "/update_weights_from_disk", json={"model_path": "/"}).status_code == 403


def test_the_metrics_of_several_models_have_its_name(several: Any):
    several("POST", COMPLETIONS, json={**PROMPT, "max_tokens": 3, "model": "sft", "logit_bias": {"97": 100}})
    families = list(text_string_to_metric_families(several("GET", "/metrics").text))
    assert len({family.name for family in families}) == len(families)
    slots = next(family for family in families if family.name == "nanochat_slots")
    assert {sample.labels["model"]: sample.value for sample in slots.samples} == {"rl": 2, "sft": 2, "base": 2}


@pytest.mark.parametrize(
    ("names", "max_seq_len", "tokens"),
    [
        (["sft"], 0, 320),  # 0.7 of 512, in steps of 64
        (["sft"], CONTEXT, CONTEXT),
        (["base", "sft", "rl"], 0, 64),  # a third of it
    ],
)
def test_a_server_with_little_memory_has_a_shorter_context(
    stages: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    names: list[str], max_seq_len: int, tokens: int,
):  # fmt: skip
    """Several models share one thread, or their threads of OpenMP would outnumber the cores, and the memory, or each
    alone would take the cache's whole share."""
    slot = Slots.bytes_per_slot(tiny.tiny_config(sequence_len=CONTEXT), torch.float32)
    monkeypatch.setattr(Device, "free_memory", lambda self: 2 * slot)
    source = ",".join(str(stages[name]) for name in names)
    config = chat_web.Config(source=source, name=",".join(names), device="cpu", dtype="float32", slots=2)
    app = chat_web.make_app(replace(config, max_seq_len=max_seq_len), print)
    with client_of(app) as ask:
        models = app.state.nanochat.model.all
        assert len({model.scheduler.thread for model in models}) == 1
        assert len({model.scheduler for model in models}) == len(names)
        assert [model.context for model in models] == [tokens] * len(names)
        assert ("shared by 3 models" in capsys.readouterr().out) == (len(names) == 3)
        assert ask("POST", "/tokenize", json={"prompt": "one", "model": "sft"}).json()["max_model_len"] == tokens


def test_one_hung_device_makes_all_its_models_not_ready():
    schedulers = [FakeScheduler(), FakeScheduler(stalled_seconds=100.0)]

    def load() -> LoadedModel:
        for scheduler in schedulers:
            scheduler.start()
        default, other = map(loaded, schedulers)
        return replace(default, others=(replace(other, name="other"),))

    with client_of(create_app(load)) as ask:
        assert ask("GET", "/ready").status_code == 503 and ask("GET", "/health").status_code == 200
        schedulers[1].stalled_seconds = 0.0
        assert ask("GET", "/ready").status_code == 200
        answer = ask("POST", COMPLETIONS, json={**PROMPT, "model": "other"})
        assert answer.json()["model"] == "other" and not schedulers[0].requests and schedulers[1].requests


def test_the_load_measures_every_gap_between_tokens(port: int):
    stats = closed_loop("127.0.0.1", port, {**PROMPT, "max_tokens": 8}, clients=2, requests=4)
    assert (stats.requests, stats.tokens, stats.failed, len(stats.first_token)) == (4, 32, 0, 4)
    assert 14 < len(stats.between_tokens) <= 28 and min(stats.between_tokens) > 0


def test_a_missing_folder_is_reported_before_anything_is_measured():
    with pytest.raises(cli.UserError, match="--json /nowhere/serve.json"):
        bench.main(bench.Config(bench.Serve(json="/nowhere/serve.json")))
