"""S3. A client that leaves frees its slot within 250 ms.

Disconnects at random points over sockets, and requests that are cancelled at random points in the real scheduler.
"""

import http.client
import json
import random
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from bodies import CHAT, COMPLETIONS, HELLO
from connections import head_of, open_stream
from fake_server import FakeScheduler, make_app, serving, until
from prometheus_client import generate_latest
from running_schedulers import GREEDY, finished, in_all_states, prompt_of, started, tokens_of

from nanochat.engine import SamplingParams
from nanochat.serve.scheduler import Request

running = pytest.fixture(started)


@pytest.mark.parametrize("count", [15, pytest.param(500, marks=pytest.mark.soak)])
def test_a_client_that_leaves_frees_its_slot(count: int):
    rng = random.Random(3)
    scheduler = FakeScheduler(slots=4, queue=0, tick=0.002)
    seconds = []
    resident = []
    with serving(make_app(scheduler)) as port:
        for number in range(count):
            body: dict[str, Any] = {"max_tokens": 400}
            if number % 3 == 2:  # a client that waits for a response in one piece
                connection = http.client.HTTPConnection("127.0.0.1", port)
                connection.request("POST", CHAT, json.dumps({**HELLO, **body, "n": 2}))
                until(lambda: scheduler.running)
                if connection.sock is not None and number % 2:  # and has sent the next one
                    connection.sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                time.sleep(rng.random() * 0.03)
                connection.close()
            else:
                stream = open_stream(port, **body, n=number % 2 + 1)
                time.sleep(rng.random() * 0.03)
                if number % 2:  # a reset instead of a goodbye
                    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
                stream.close()
            resident.append(int(Path("/proc/self/statm").read_text().split()[1]))
            seconds.append(until(lambda: not scheduler.running and not scheduler.waiting))
        assert scheduler.finished == {"cancelled": len(scheduler.requests)}
    assert max(seconds) < 0.25
    assert count < 500 or resident[-1] < 1.05 * resident[100]


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


@pytest.mark.parametrize("count", [150, pytest.param(5000, marks=pytest.mark.soak)])
def test_cancelled_at_any_point_no_slot_is_lost(running: Any, count: int):
    scheduler, draw = running(queue=count), random.Random(0)
    streams = []
    for number in range(count):
        prompt = prompt_of(draw.randint(1, 60), number % 7)
        streams.append(scheduler.submit(Request(prompt, draw.randint(1, 20), SamplingParams(seed=number))))
        if draw.random() < 0.3:
            time.sleep(0.002 * draw.random())
        streams[draw.randrange(max(0, number - 6), number + 1)].cancel()
    for stream in streams:
        stream.cancel()
    reasons = [list(stream)[-1].finish_reason for stream in streams]
    assert set(reasons) <= {"cancelled", "length"} and reasons.count("cancelled") > count / 5
    assert in_all_states(scheduler) == (0, 0)
    assert sum(finished(scheduler).values()) == count
    assert not (scheduler.slots.rows or scheduler.requests)
    after = [scheduler.submit(Request(prompt_of(5), 4, GREEDY)) for _ in range(4)]
    assert len({tuple(tokens_of(stream)) for stream in after}) == 1


def test_a_slot_is_free_before_the_next_token(running: Any) -> None:
    scheduler = running(slots=1)
    first = scheduler.submit(Request(prompt_of(4), 70))
    until(lambda: first.completion_tokens > 0)
    first.cancel()
    made = first.completion_tokens
    chunks = list(first)
    assert chunks[-1].finish_reason == "cancelled"
    assert first.completion_tokens <= made + 1


def test_one_that_waits_and_is_cancelled_makes_room_at_once(running: Any) -> None:
    scheduler = running(slots=1, queue=1)
    first, second = (scheduler.submit(Request(prompt_of(5), 75)) for _ in range(2))
    second.cancel()
    assert [chunk.finish_reason for chunk in second] == ["cancelled"]
    third = scheduler.submit(Request(prompt_of(5), 2))
    first.cancel()
    assert len(tokens_of(third)) == 2
