"""S18. A stuck device is seen.

A model thread that stops: /ready is 503 within 60 seconds, the log has the place, and SIGTERM ends the process within
10. The limits are shortened here; their defaults are compared with the promise.
"""

import json
import re
import socket
import threading
from dataclasses import replace
from typing import Any

import httpx
import pytest
from bodies import COMPLETIONS, PROMPT
from connections import head_of, is_ready
from fake_server import FakeScheduler, client_of, error_of, loaded, make_app, serving, until, wedged_scheduler
from running_schedulers import GREEDY, make_engine, prompt_of, started, tokens_of
from test_s11_shutdown_is_clean import process_of

from nanochat.ground import cli
from nanochat.serve import state
from nanochat.serve.app import create_app
from nanochat.serve.scheduler import Overloaded, Request
from nanochat.serve.state import LoadedModel

running = pytest.fixture(started)


def test_the_limits_are_the_promised_ones():
    assert state.STUCK_SECONDS <= 60 and state.EXIT_SECONDS < 10


def test_a_device_that_hangs_is_not_ready_and_its_place_is_logged(caplog, monkeypatch):
    monkeypatch.setattr(state, "STUCK_SECONDS", 0.5)
    release = threading.Event()
    scheduler = wedged_scheduler(release)
    with serving(make_app(scheduler)) as port:
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


def test_a_failure_ends_the_running_and_the_next_are_served(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    scheduler = running(engine, slots=2)
    decode, failures = scheduler.slots.decode, iter([False, False, True])

    def failing(**arguments: Any) -> Any:
        if next(failures, False):
            raise MemoryError("secret words of a prompt")
        return decode(**arguments)

    monkeypatch.setattr(scheduler.slots, "decode", failing)
    last = list(scheduler.submit(Request(prompt_of(5), 20)))[-1]
    assert last.finish_reason == "error" and "MemoryError" in last.error and "secret" not in last.error
    tokens = tokens_of(scheduler.submit(Request(prompt_of(5), 20, GREEDY)))
    assert tokens == engine.generate([prompt_of(5)], max_tokens=20, sampling=GREEDY)[0][0]


def test_a_device_that_is_gone_ends_every_request(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = running(slots=1)

    def gone(**_: Any) -> None:
        raise RuntimeError("no device")

    monkeypatch.setattr(scheduler.slots, "decode", gone)
    monkeypatch.setattr(scheduler.slots, "reset", gone)
    streams = scheduler.submit_all([Request(prompt_of(5), 5)] * 3)
    assert [list(stream)[-1].finish_reason for stream in streams] == ["error"] * 3
    with pytest.raises(Overloaded):
        scheduler.submit(Request(prompt_of(5), 5))
