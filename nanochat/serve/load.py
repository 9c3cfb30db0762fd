"""Clients that put load on a server, and what they measure; for `python -m scripts.bench serve`.

Each client streams completions over plain HTTP/1.1 and sends its next request when its reply is complete. Run them in a
process of their own, so that they do not share the server's Python lock.
"""

import asyncio
import contextlib
import json
import statistics
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class LoadStats:
    """What the clients measured; times in seconds."""

    seconds: float = 0.0  # from the first request to the end of the last reply
    tokens: int = 0
    requests: int = 0
    refused: int = 0  # with 429
    failed: int = 0
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
        if self.refused or self.failed:
            parts.append(f"{self.refused} refused, {self.failed} failed")
        return ", ".join(parts)


def closed_loop(host: str, port: int, body: dict[str, Any], clients: int, requests: int) -> LoadStats:
    """`clients` at once, `requests` in all."""
    stats = LoadStats()
    numbers = iter(range(requests))

    async def client() -> None:
        for number in numbers:  # shared: each client takes the next one
            await request(host, port, {**body, "seed": number}, stats)

    async def run() -> None:
        await asyncio.gather(*(client() for _ in range(clients)))

    began = time.perf_counter()
    asyncio.run(run())
    stats.seconds = time.perf_counter() - began
    return stats


async def request(host: str, port: int, body: dict[str, Any], stats: LoadStats) -> None:
    """One streamed completion. Only its last event is parsed, so that the clients leave the cores to the server."""
    content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {len(content)}\r\n"
    stats.requests += 1
    began = time.perf_counter()
    last = 0.0  # time of the last token
    try:
        reader, writer = await asyncio.open_connection(host, port)
        with contextlib.closing(writer):
            writer.write(f"{head}Connection: close\r\n\r\n".encode() + content)
            status = int((await reader.readline()).split()[1])
            if status != 200:
                stats.refused += status == 429
                stats.failed += status != 429
                return
            async for line in reader:
                if line.startswith(b'data: {"error"'):
                    stats.failed += 1
                elif b'"choices":[{' in line and b'"text":""' not in line:  # the last choice may have no text
                    now = time.perf_counter()
                    if last:
                        stats.between_tokens.append(now - last)
                    else:
                        stats.first_token.append(now - began)
                    last = now
                elif b'"usage":{' in line:
                    stats.tokens += json.loads(line[6:])["usage"]["completion_tokens"]
    except (OSError, ValueError, IndexError):
        stats.failed += 1
