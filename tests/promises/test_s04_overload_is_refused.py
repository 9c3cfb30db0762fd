"""S4. Overload is refused, not queued for ever, and a full server still responds.

The running and the waiting are counted; what would hold the event loop is written, read or collected in small parts;
a reader that stops is dropped while the others go on.
"""

import asyncio
import json
import socket
import threading
from collections import Counter
from typing import Any

import httpx
import pytest
from bodies import CHAT, COMPLETIONS, HELLO, PROMPT
from connections import exchange, head_of, send_stream
from fake_server import FakeScheduler, client_of, error_of, make_app, serving, until
from running_schedulers import finished, in_all_states, metric, prompt_of, started, tokens_of
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nanochat.engine import SamplingParams
from nanochat.serve.replies import ChatSerializer, CompletionSerializer
from nanochat.serve.scheduler import Overloaded, Request, Stream
from nanochat.tokenizer import Tokenizer

running = pytest.fixture(started)


def test_overload_is_refused_at_once_and_the_server_still_responds():
    scheduler = FakeScheduler(slots=3, queue=2, tick=0.005)
    with serving(make_app(scheduler)) as port:
        url = f"http://127.0.0.1:{port}"
        streams = [send_stream(port, max_tokens=400) for _ in range(5)]
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


def test_too_many_are_told_when_to_come_again(running: Any) -> None:
    scheduler = running(slots=2, queue=3)
    streams = [scheduler.submit(Request(prompt_of(5), 75)) for _ in range(5)]
    with pytest.raises(Overloaded) as refused:
        scheduler.submit(Request(prompt_of(5), 75))
    assert refused.value.retry_after >= 1
    assert sum(in_all_states(scheduler)) == 5 and metric(scheduler, "slots") == 2
    for stream in streams:
        stream.cancel()
        list(stream)
    assert len(tokens_of(scheduler.submit(Request(prompt_of(5), 3)))) == 3


def test_several_are_taken_together_or_not_at_all(running: Any) -> None:
    scheduler = running(slots=2, queue=2)
    request = Request(prompt_of(5), 5)
    with pytest.raises(Overloaded):
        scheduler.submit_all([request] * 5)
    assert not scheduler.requests and scheduler.capacity == 4
    streams = scheduler.submit_all([request] * 4)
    assert [list(stream)[-1].finish_reason for stream in streams] == ["length"] * 4
    assert finished(scheduler) == {"length": 4}


def test_requests_take_turns(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The many choices of one client do not keep out who comes after it."""
    scheduler = running(slots=2, queue=8)
    begun: list[str] = []
    take_slot = scheduler._take_slot

    def recorded(row: Any) -> bool:
        taken = take_slot(row)
        begun.extend([f"{row.request.stop[0][0]}{row.request.sampling.seed}"] if taken else [])
        return taken

    def submit(name: str, count: int) -> list[Stream]:
        settings = [SamplingParams(seed=number) for number in range(count)]
        return scheduler.submit_all([Request(prompt_of(5), 20, one, stop=(name * 9,)) for one in settings])

    monkeypatch.setattr(scheduler, "_take_slot", recorded)
    with scheduler.changed:  # the device's thread waits until all are there
        streams = [*submit("a", 4), *submit("b", 3), *submit("c", 1)]
    assert {list(stream)[-1].finish_reason for stream in streams} == {"length"}
    assert begun == ["a0", "b0", "c0", "a1", "b1", "a2", "b2", "a3"]


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
    count, tokens = 24, 490  # with 21 logprobs each: just below the limit

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


def test_a_body_of_one_byte_chunks_is_parsed_a_little_at_a_time(monkeypatch: pytest.MonkeyPatch):
    sizes = []
    parse = HttpToolsProtocol.data_received
    monkeypatch.setattr(
        HttpToolsProtocol, "data_received", lambda self, data: sizes.append(len(data)) or parse(self, data)
    )
    content = json.dumps({**PROMPT, "user": "x" * 200_000}).encode()
    head = head_of(COMPLETIONS, 0).replace(b"Content-Length: 0", b"Connection: close\r\nTransfer-Encoding: chunked")
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in content) + b"0\r\n\r\n"
    with serving(make_app()) as port:
        assert exchange(port, head, chunks).startswith(b"HTTP/1.1 200")
    assert sum(sizes) == len(head + chunks) and max(sizes) <= 1 << 15


def test_a_reader_that_stops_is_dropped_and_the_others_continue(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("nanochat.serve.replies.STALL_SECONDS", 0.4)
    scheduler = FakeScheduler(slots=2, queue=0, tick=0.001, word="x" * 20_000)
    body = {**HELLO, "stream": True, "max_tokens": 450}
    content = json.dumps(body).encode()
    with serving(make_app(scheduler)) as port, socket.socket() as stopped:
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
