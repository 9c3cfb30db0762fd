"""Clients that put load on a server and measure it, for `python -m scripts.bench serve`.

Each client streams completions and sends its next request when its reply is complete. Run them in a separate process,
so that they do not share the server's Python lock.
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
    stats = LoadStats(requests=requests)
    seeds = iter(range(requests))

    async def client() -> None:
        for seed in seeds:  # shared: each client takes the next one
            try:
                await measure(host, port, {**body, "seed": seed}, stats)
            except (OSError, EOFError):  # no connection, or no complete reply
                stats.failed += 1

    async def run() -> None:
        await asyncio.gather(*(client() for _ in range(clients)))

    began = time.perf_counter()
    uvloop.run(run())  # the server's event loop, which takes half of asyncio's time per event
    stats.seconds = time.perf_counter() - began
    return stats


async def measure(host: str, port: int, body: dict[str, Any], stats: LoadStats) -> None:
    """Send a request and time its events. Only the last one is parsed, to leave the cores to the server.

    Raises OSError or EOFError: when the reply is missing or incomplete.
    """
    content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {len(content)}\r\n\r\n"
    last = 0.0  # time of the last token
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(head.encode() + content)
        if b" 200 " not in await reader.readuntil(b"\r\n\r\n"):
            raise EOFError("refused")
        while b'"usage":{' not in (event := await reader.readuntil(b"\n\n")):
            if b'"choices":[{' not in event:
                raise EOFError("the reply failed")
            now = time.perf_counter()
            if b'"text":""' not in event:  # the last choice may have no text
                (stats.between_tokens if last else stats.first_token).append(now - (last or began))
                last = now
        stats.tokens += json.loads(event[event.index(b"data: ") + 6 :])["usage"]["completion_tokens"]
    finally:
        writer.close()
