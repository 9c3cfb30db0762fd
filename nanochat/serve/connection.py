"""One client's connection, before a request's headers are complete: how much it may send, and for how long.

uvicorn's parser waits without a limit for headers of any size. `Connection` counts and times them, responds with 431
or 408, and closes. `middleware.py` limits everything after the headers.
"""

import json
from asyncio import TimerHandle, Transport

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nanochat.serve.middleware import MAX_HEAD
from nanochat.serve.schema import error_body

HEAD_SECONDS = 10.0  # time for a client to send a request's headers
SLICE = 1 << 15  # bytes that are parsed before other clients get their turn


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with a limit on the size and the time of everything that is not a body.

    It parses a slice at a time: in a body of one-byte chunks each byte takes 2 us, and the 256 KiB of one read would
    hold the event loop for 0.1 s.
    """

    pending_bytes = 0  # since the last byte of a body or of complete headers: headers, trailers, chunk sizes
    timer: TimerHandle | None = None  # runs while the headers arrive
    unparsed = b""

    def connection_made(self, transport: Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self.start_timer()

    def data_received(self, data: bytes) -> None:
        is_parsing = bool(self.unparsed)
        self.unparsed += data
        if not is_parsing:
            self.parse_slice()

    def parse_slice(self) -> None:
        data = self.unparsed[:SLICE]
        self.unparsed = self.unparsed[SLICE:]
        self.pending_bytes += len(data)
        super().data_received(data)  # calls on_body and on_headers_complete
        if self.transport.is_closing():
            return
        if self.unparsed:
            self.transport.pause_reading()
            self.loop.call_soon(self.parse_slice)
        elif not self.flow.read_paused:
            self.transport.resume_reading()
        between_requests = self.cycle is None or self.cycle.response_complete
        if self.pending_bytes > MAX_HEAD:
            if between_requests:  # otherwise a response may have begun
                self.refuse(431, "Request Header Fields Too Large", f"over {MAX_HEAD:,} bytes")
            self.transport.close()
        elif between_requests and self.timer is None:  # the first bytes of the next request
            self.start_timer()

    def on_headers_complete(self) -> None:
        self.pending_bytes = 0
        self.stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.pending_bytes = 0
        super().on_body(body)

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_timer()
        super().connection_lost(exc)

    def start_timer(self) -> None:
        self.timer = self.loop.call_later(HEAD_SECONDS, self.time_out)

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def time_out(self) -> None:
        self.refuse(408, "Request Timeout", f"not complete within {HEAD_SECONDS:g} s")
        self.transport.close()

    def refuse(self, status: int, phrase: str, why: str) -> None:
        body = json.dumps(error_body(status, f"the request's headers: {why}")).encode()
        head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
