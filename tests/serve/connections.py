"""Requests as bytes on sockets, and what comes back."""

import contextlib
import json
import socket
import time
from typing import Any

import httpx
from bodies import CHAT, HELLO


def head_of(path: str, length: int) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode()


def send_stream(port: int, **body: Any) -> socket.socket:
    """A streaming chat request on a new socket. Its response begins with the first token."""
    content = json.dumps({**HELLO, "stream": True, **body}).encode()
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(head_of(CHAT, len(content)) + content)
    connection.settimeout(60)
    return connection


def open_stream(port: int, **body: Any) -> socket.socket:
    """The same, with the headers and the first event read."""
    connection = send_stream(port, **body)
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


def is_ready(port: int) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return "nanochat_ready 1.0\n" in httpx.get(f"http://127.0.0.1:{port}/metrics").text
    return False
