"""One client's connection, before a request's headers are complete: how much it may send, and for how long.

uvicorn's parser waits without a limit for headers of any size. `Connection` counts and times them, responds with 431
or 408, and closes. `middleware.py` limits everything after the headers.
"""

import json
import re
from asyncio import TimerHandle, Transport

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from nanochat.serve.middleware import MAX_HEAD
from nanochat.serve.schema import error_body

HEAD_SECONDS = 10.0  # time for a client to send a request's headers
MAX_PIPELINED = 16  # requests that wait on a connection while it is read on
SLICE = 1 << 13  # bytes that are parsed before other clients get their turn
# Java's client and `curl --http2` offer another protocol in each request. The parser would wait for its answer, and the
# body would be lost, so the header gets another name.
UPGRADE = re.compile(rb"\r\nupgrade(?=:)", re.IGNORECASE)


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with a limit on the size and the time of everything that is not a body.

    It parses a slice at a time: in a body of one-byte chunks each byte takes 2 us, and the 256 KiB of one read would
    hold the event loop for 0.1 s.
    """

    pending_bytes = 0  # since the last byte of a body or of complete headers: headers, trailers, chunk sizes
    timer: TimerHandle | None = None  # runs while the headers arrive
    unparsed = b""
    in_message = False  # the headers have arrived, and the body not yet
    cycles: tuple[RequestResponseCycle, ...] = ()  # requests whose responses are not complete

    def connection_made(self, transport: Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self.start_timer()

    def data_received(self, data: bytes) -> None:
        is_parsing = bool(self.unparsed)
        self.unparsed += data
        if not is_parsing:
            self.parse_slice()

    def parse_slice(self) -> None:
        if self.transport.is_closing():
            return
        data = self.unparsed[:SLICE]
        self.unparsed = self.unparsed[SLICE:]
        self.pending_bytes += len(data)
        if self.is_between_requests:
            head, end, rest = data.partition(b"\r\n\r\n")
            data = UPGRADE.sub(b"\r\nx-upgrade", head) + end + rest
        super().data_received(data)  # calls on_body, on_headers_complete and on_message_complete
        if self.transport.is_closing():
            return
        if self.unparsed:
            self.transport.pause_reading()
            self.loop.call_soon(self.parse_slice)
        elif not self.flow.read_paused:
            self.transport.resume_reading()
        if self.pending_bytes > MAX_HEAD:
            if self.is_between_requests:  # otherwise a response may have begun
                self.refuse(431, "Request Header Fields Too Large", f"over {MAX_HEAD:,} bytes")
            self.transport.close()
        elif self.is_between_requests and self.timer is None:  # the first bytes of the next request
            self.start_timer()

    @property
    def is_between_requests(self) -> bool:
        return not self.in_message and (self.cycle is None or self.cycle.response_complete)

    def on_headers_complete(self) -> None:
        self.pending_bytes = 0
        self.in_message = True
        self.stop_timer()
        super().on_headers_complete()
        self.cycles = (*(one for one in self.cycles if not one.response_complete), self.cycle)
        # uvicorn stops reading behind a second request, and would not see that the client leaves.
        if 0 < len(self.pipeline) <= MAX_PIPELINED:
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        self.in_message = False
        super().on_message_complete()

    def on_body(self, body: bytes) -> None:
        self.pending_bytes = 0
        super().on_body(body)

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_timer()
        for cycle in self.cycles:  # uvicorn marks only the newest one of pipelined requests
            cycle.disconnected = cycle.disconnected or not cycle.response_complete
            cycle.message_event.set()
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
