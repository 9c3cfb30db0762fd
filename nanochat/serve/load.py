"""Clients that put load on a server and measure it, for `python -m scripts.bench serve`.

Each client streams completions over plain HTTP/1.1 and sends its next request when its reply is complete. Run them in a
separate process, so that they do not share the server's Python lock.
"""

import asyncio
import json
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import uvloop


@dataclass
class LoadStats:
    """The measurements of the clients; times in seconds."""

    seconds: float = 0.0  # from the first request to the end of the last reply
    tokens: int = 0
    requests: int = 0
    failed: int = 0  # refused ones among them
    first_token: list[float] = field(default_factory=list)
    between_tokens: list[float] = field(default_factory=list)

    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def __str__(self) -> str:
        """`1,234 tokens/s, first token 12 ms (95%: 20), between tokens 3 ms (95%: 5)`"""
        parts = [f"{self.tokens_per_second():>8,.0f} tokens/s"]
        for name, times in (("first token", self.first_token), ("between tokens", self.between_tokens)):
            if len(times) > 1:
                cuts = statistics.quantiles(times, n=20, method="inclusive")
                parts.append(f"{name} {1e3 * cuts[9]:,.0f} ms (95%: {1e3 * cuts[18]:,.0f})")
        if self.failed:
            parts.append(f"{self.failed} failed")
        return ", ".join(parts)


def closed_loop(host: str, port: int, body: dict[str, Any], clients: int, requests: int) -> LoadStats:
    """Send `requests` requests in all, from `clients` clients at once."""
    stats = LoadStats()
    numbers = iter(range(requests))

    async def client() -> None:
        for number in numbers:  # shared: each client takes the next one
            await request(host, port, {**body, "seed": number}, stats)

    async def run() -> None:
        await asyncio.gather(*(client() for _ in range(clients)))

    began = time.perf_counter()
    uvloop.run(run())  # the server's event loop, which takes half of asyncio's time per event
    stats.seconds = time.perf_counter() - began
    return stats


async def request(host: str, port: int, body: dict[str, Any], stats: LoadStats) -> None:
    content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {len(content)}\r\n"
    stats.requests += 1
    client = Client(f"{head}Connection: close\r\n\r\n".encode() + content, stats)
    try:
        await asyncio.get_running_loop().create_connection(lambda: client, host, port)
        await client.ended
    except OSError:
        stats.failed += 1


class Client(asyncio.Protocol):
    """Sends a request and reads its events as they arrive.

    It parses only the last event, and runs no coroutine for the others, to leave the cores to the server.
    """

    def __init__(self, request: bytes, stats: LoadStats):
        self.request = request
        self.stats = stats
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.began = time.perf_counter()
        self.last = 0.0  # time of the last token
        self.pending = b""  # the beginning of an event; at first, the response's headers too

    def connection_made(self, transport: Any) -> None:
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        *events, self.pending = (self.pending + data).split(b"\n\n")
        for event in events:
            self.take(event)

    def take(self, event: bytes) -> None:
        """Count an event. The size of its HTTP chunk precedes it."""
        stats = self.stats
        if b'data: {"error"' in event:
            stats.failed += 1
        elif b'"choices":[{' in event and b'"text":""' not in event:  # the last choice may have no text
            now = time.perf_counter()
            if self.last:
                stats.between_tokens.append(now - self.last)
            else:
                stats.first_token.append(now - self.began)
            self.last = now
        elif b'"usage":{' in event:
            stats.tokens += json.loads(event[event.index(b"data: ") + 6 :])["usage"]["completion_tokens"]

    def connection_lost(self, exc: Exception | None) -> None:
        # A refusal has no event: its headers are still here.
        self.stats.failed += self.pending.startswith(b"HTTP/")
        self.ended.set_result(None)
