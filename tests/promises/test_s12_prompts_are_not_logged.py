"""S12. Prompts are not logged by default.

A canary word is sent in good and bad requests in all ways, also where a reply, the device or the server fails: it
is in no log, no error and no file that the command leaves.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny
from bodies import CHAT, COMPLETIONS, CONTEXT, HELLO
from connections import exchange, head_of, is_ready, open_stream, rest_of, send_stream
from fake_server import FakeScheduler, checkpoint, client_of, error_of, make_app, serving, until

from nanochat.serve.middleware import MAX_HEAD
from nanochat.serve.scheduler import Scheduler

ROOT = Path(__file__).resolve().parents[2]
CANARY = "canary-83f1c2"


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
        with send_stream(port, **secret, max_tokens=400) as stream:
            stream.recv(200)


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
@pytest.mark.parametrize(("how", "sign"), [("command", signal.SIGINT), ("gunicorn", signal.SIGTERM)])
def test_the_command_logs_no_prompt_and_ends_its_streams(how: str, sign: signal.Signals, tmp_path: Path):
    """docs/deploy.md: what it prints, and every file under its home. The command prints only its address."""
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
        # Under gunicorn too, headers are bounded; its worker's parser would wait for them without end.
        assert exchange(port, b"GET / HTTP/1.1\r\nx: " + b"y" * 2 * MAX_HEAD)[9:12] == b"431"
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


def test_a_mistake_of_ours_is_a_500_that_reveals_nothing_and_logs_no_prompt(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    with client_of(make_app(FakeScheduler(raises=f"what the user wrote: {CANARY}"))) as ask:
        answer = ask("POST", CHAT, json=HELLO)
    assert answer.status_code == 500 and error_of(answer)["type"] == "server_error"
    assert "RuntimeError" in caplog.text and "in submit" in caplog.text
    assert CANARY not in "\n".join([answer.text, caplog.text, *capfd.readouterr()])
