"""Load on a server of ours, and what its clients see: `python -m scripts.bench serve`.

A client streams completions over plain HTTP/1.1. Closed loop: so many clients, each asking anew when its answer is
there. Open loop: requests at random times, a rate apart, whatever the answers take (source: Schroeder et al. 2006, Open
versus closed). Runs in a process of its own, so that it does not share the server's Python.
"""

import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Seen:
    """What the clients saw; times in seconds."""

    seconds: float = 0.0  # from the first request to the last answer's end
    tokens: int = 0
    requests: int = 0
    refused: int = 0  # answered 429
    failed: int = 0
    first_token: list[float] = field(default_factory=list)
    between_tokens: list[float] = field(default_factory=list)  # or where some came at once, between those; every one

    def summary(self) -> dict[str, Any]:
        def quantiles(values: list[float]) -> dict[str, float]:
            if len(values) < 2:
                return {"p50": values[0], "p95": values[0]} if values else {}
            cuts = statistics.quantiles(values, n=20, method="inclusive")
            return {"p50": cuts[9], "p95": cuts[18]}

        return {
            "tokens_per_second": self.tokens / self.seconds if self.seconds else 0.0, "requests": self.requests,
            "refused": self.refused, "failed": self.failed, "first_token_seconds": quantiles(self.first_token),
            "between_tokens_seconds": quantiles(self.between_tokens),
        }  # fmt: skip


def closed_loop(host: str, port: int, body: dict[str, Any], clients: int, requests: int) -> Seen:
    """`clients` at once, `requests` in all."""

    async def run(seen: Seen) -> None:
        left = iter(range(requests))

        async def client() -> None:
            for number in left:
                await _ask(host, port, {**body, "seed": number}, seen)

        await asyncio.gather(*(client() for _ in range(clients)))

    return _measure(run)


def open_loop(host: str, port: int, body: dict[str, Any], rate: float, requests: int, seed: int = 0) -> Seen:
    """`requests` in all, `rate` a second, at the times of a Poisson process."""
    times = random.Random(seed)

    async def run(seen: Seen) -> None:
        tasks = []
        for number in range(requests):
            tasks.append(asyncio.create_task(_ask(host, port, {**body, "seed": number}, seen)))
            await asyncio.sleep(times.expovariate(rate))
        await asyncio.gather(*tasks)

    return _measure(run)


def _measure(run: Callable[[Seen], Coroutine[Any, Any, None]]) -> Seen:
    seen = Seen()
    began = time.perf_counter()

    asyncio.run(run(seen))
    seen.seconds = time.perf_counter() - began
    return seen


async def _ask(host: str, port: int, body: dict[str, Any], seen: Seen) -> None:
    """One streamed completion."""
    content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    seen.requests += 1
    began = time.perf_counter()
    writer = None
    try:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(head.encode() + content)
        status = int((await reader.readline()).split()[1])
        if status != 200:
            seen.refused += status == 429
            seen.failed += status != 429
            return
        last = 0.0
        tokens = 0
        async for line in reader:
            if line.startswith(b'data: {"error"'):
                seen.failed += 1
                return
            if b'"choices":[{' in line and b'"text":""' not in line:  # the end may come without a token
                now = time.perf_counter()
                if last:
                    seen.between_tokens.append(now - last)
                else:
                    seen.first_token.append(now - began)
                last = now
            elif b'"usage":{' in line:  # the one event that is read, so that the clients leave the cores to the server
                tokens = json.loads(line[6:])["usage"]["completion_tokens"]
        seen.tokens += tokens
    except (OSError, ValueError, IndexError):
        seen.failed += 1
    finally:
        if writer is not None:
            writer.close()
