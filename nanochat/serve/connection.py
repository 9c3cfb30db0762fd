"""One client's connection: how much it may send, and how long it may take, before a request's headers are whole.

In flow the bytes of a socket; `Connection` counts and times what uvicorn's own protocol would wait for without an end,
and closes. What comes behind the headers is bounded by `gate.py`.
"""

import json
from asyncio import TimerHandle, Transport

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nanochat.serve.gate import MAX_HEAD
from nanochat.serve.schema import error_body

HEAD_SECONDS = 10.0  # for a request's headers to come whole


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with a limit on the size and the time of what is neither a whole head nor a body."""

    unread = 0  # bytes since the last that were a body's, or ended a head: headers, trailers, what stands around chunks
    late: TimerHandle | None = None  # runs while a head is awaited

    def connection_made(self, transport: Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self.await_head()

    def data_received(self, data: bytes) -> None:
        self.unread += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        idle = self.cycle is None or self.cycle.response_complete
        if self.unread > MAX_HEAD:
            if idle:
                self.transport.write(_refusal(431, "Request Header Fields Too Large", f"over {MAX_HEAD:,} bytes"))
            self.transport.close()
        elif idle and self.late is None:  # the next request's first bytes
            self.await_head()

    def await_head(self) -> None:
        self.late = self.loop.call_later(HEAD_SECONDS, self.head_is_late)

    def head_is_late(self) -> None:
        self.transport.write(_refusal(408, "Request Timeout", f"they did not come within {HEAD_SECONDS:g} s"))
        self.transport.close()

    def on_headers_complete(self) -> None:
        self.unread = 0
        self.stop_waiting()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.unread = 0
        super().on_body(body)

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_waiting()
        super().connection_lost(exc)

    def stop_waiting(self) -> None:
        if self.late is not None:
            self.late.cancel()
            self.late = None


def _refusal(status: int, phrase: str, why: str) -> bytes:
    body = json.dumps(error_body(status, f"the request's headers: {why}")).encode()
    head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return f"{head}connection: close\r\n\r\n".encode() + body
