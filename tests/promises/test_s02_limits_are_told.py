"""S2. Limits are told, not hit.

A body over 1 MiB gets a 413 before it is read, a prompt and `max_tokens` over the context a 400 with both numbers; the
sizes and the time of request heads are bounded too.
"""

import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from bodies import CHAT, COMPLETIONS, CONTEXT, PROMPT
from connections import exchange, head_of, open_stream
from fake_server import FakeScheduler, asking, error_of, make_app, serving

from nanochat.serve.middleware import MAX_BODY, MAX_HEAD

ask = pytest.fixture(asking, scope="module")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving(make_app(FakeScheduler(tick=0.02))) as port:
        yield port


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
    assert exchange(port, head + b"content-length: 0 \r\nconnection: close\r\n\r\n")[9:12] == b"200"  # a number too
    # Java's client offers another protocol: its body is read all the same.
    offer = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
    whole = head_of(COMPLETIONS, 15).replace(b"Content", offer + b"Content")
    assert exchange(port, whole + b'{"prompt": "x"}', head + b"connection: close\r\n\r\n").count(b" 200 OK") == 2
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
