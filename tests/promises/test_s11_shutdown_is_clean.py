"""S11. Shutdown is clean.

SIGTERM with 20 open streams: each is finished, or ended with a final event. test_s12_prompts_are_not_logged.py does the
same with the command.
"""

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
from bodies import CHAT
from connections import head_of, is_ready, open_stream, rest_of, send_stream
from fake_server import FakeScheduler, make_app, serving, until, wedged_scheduler
from running_schedulers import metric, prompt_of, started

from nanochat.serve import state
from nanochat.serve.listener import listening
from nanochat.serve.scheduler import Overloaded, Request
from scripts import chat_web

running = pytest.fixture(started)


def serve(port_to: Any, hangs: bool) -> None:
    """In another process: the app as `chat_web.serve` runs it, over replies of known length or a device that hangs."""
    scheduler = wedged_scheduler(threading.Event()) if hangs else FakeScheduler(slots=20, queue=4, tick=0.005)
    state.EXIT_SECONDS = 2.0 if hangs else state.EXIT_SECONDS
    state.GRACE_SECONDS = 1.0
    chat_web.make_app = lambda config, on_failure: make_app(scheduler)
    with listening("127.0.0.1", 0) as listener:
        port_to.send(listener.getsockname()[1])
        chat_web.serve(chat_web.Config(), listener)


@contextlib.contextmanager
def process_of(hangs: bool) -> Iterator[tuple[Any, int]]:
    """A server that is ready, and its port."""
    context = tiny.forkserver()
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, hangs))
    process.start()
    try:
        assert ours.poll(60)
        port = ours.recv()
        until(lambda: is_ready(port))
        yield process, port
    finally:
        process.kill()
        process.join()


@pytest.mark.slow
def test_sigterm_ends_every_stream_with_a_final_event():
    with process_of(hangs=False) as (process, port):
        lengths = [3 * (number + 1) for number in range(10)] + [450] * 10  # a fraction of the grace, and more than it
        streams = [open_stream(port, max_tokens=length) for length in lengths]
        process.terminate()
        texts = [rest_of(stream).decode() for stream in streams]
        process.join(10)
        assert process.exitcode in (0, -signal.SIGTERM)
    assert all("data: [DONE]" in text for text in texts)
    reasons = ['"finish_reason":"length"' in text for text in texts]
    assert all(reasons[:10]) and not any(reasons[10:])
    assert all('"code":"cancelled"' in text for text in texts[10:])


def test_a_stream_that_waits_gets_503():
    scheduler = FakeScheduler(slots=1, queue=1, tick=0.005)
    app = make_app(scheduler)
    with serving(app) as port:
        running = open_stream(port, max_tokens=450)
        waiting = send_stream(port, max_tokens=5)
        until(lambda: scheduler.waiting)
        upload = socket.create_connection(("127.0.0.1", port), timeout=60)
        upload.sendall(head_of(CHAT, 100) + b"{")
        app.state.nanochat.closing = True
        scheduler.close(grace=0)
        assert upload.recv(20).startswith(b"HTTP/1.1 503")
        upload.close()
        assert waiting.recv(20).startswith(b"HTTP/1.1 503")
        assert b'"code":"cancelled"' in rest_of(running)
        waiting.close()


@pytest.mark.parametrize("grace", [20, 0])
def test_closing_lets_the_running_finish_and_gives_every_stream_an_end(running: Any, grace: int) -> None:
    scheduler = running(slots=2)
    streams = [scheduler.submit(Request(prompt_of(5), 30 if grace else 75)) for _ in range(6)]
    until(lambda: metric(scheduler, "requests_running") == 2)
    scheduler.close(grace=grace)
    reasons = [list(stream)[-1].finish_reason for stream in streams]
    if grace:
        assert reasons.count("length") >= 2 and reasons.count("cancelled") >= 3
    else:
        assert reasons == ["cancelled"] * 6
    assert not scheduler.thread.is_alive()
    with pytest.raises(Overloaded):
        scheduler.submit(Request(prompt_of(5), 1))
