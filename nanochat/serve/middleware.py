"""Access to the server: who may call it, and how much they may send. This runs before every route.

It refuses a request with a foreign Host or Origin, without the API key, or with too large a body. Every response gets
headers that limit what a browser may do with it.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import re
import time
from collections.abc import Callable, Collection

from prometheus_client import Counter
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanochat.serve.scheduler import log_failure
from nanochat.serve.schema import CLIENT_LEFT, ApiError, EncodedResponse

MAX_BODY = 1 << 20  # bytes
MAX_HEAD = 1 << 16  # bytes of a request's address and headers
BODY_SECONDS = 30.0  # time for a client to send a body
LOOK_SECONDS = 0.5  # while a body arrives, the server looks this often whether it has to close
LINGER_SECONDS = 2.0  # the server discards a refused body for this long before it closes the connection
ANY_ADDRESS = "any address"  # as a host: any IP address instead of a name
SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


class AccessMiddleware:
    """Checks each request before any route runs, and adds the security headers to each response.

    `hosts` are the names that a request's Host header may contain, () for any. ANY_ADDRESS among them allows every IP
    address: a browser sends an address only to the server that has it. `origins` are the other sites whose pages may
    use the server, such as "https://chat.example.org". `open_paths` need no key, and reveal nothing about the model.
    `responses` counts the responses by status.
    """

    max_body = MAX_BODY

    def __init__(
        self,
        app: ASGIApp,
        api_key: str | None,
        hosts: tuple[str, ...],
        origins: tuple[str, ...],
        open_paths: Collection[str],
        content_policy: str,
        responses: Counter | None = None,
    ):
        self.app = app
        self.responses = responses
        self.api_key = api_key
        self.hosts = hosts
        self.origins = origins
        # The check of the key runs inside of it: a browser sends no key when it asks whether a page may send a request
        # (preflight), and shows a 401 to a page only with the headers that this adds.
        methods = ("GET", "POST")
        self.answer: ASGIApp = self.answer_caller
        if origins:
            self.answer = CORSMiddleware(
                self.answer_caller, origins, methods, allow_headers=("*",), expose_headers=("retry-after",)
            )
        self.open_paths = open_paths
        self.response_headers = {**SECURITY_HEADERS, "content-security-policy": content_policy}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the server's start and end, or a websocket, which no route takes
            await self.app(scope, receive, send)
            return
        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if self.responses is not None and message["status"] != CLIENT_LEFT:
                    self.responses.labels(message["status"]).inc()
                headers = MutableHeaders(scope=message)
                headers.update(self.response_headers)
                headers.setdefault("cache-control", "no-store")  # the page's files have their own
            await send(message)

        try:
            refusal = self.check_origin(scope)
            if refusal is None:
                await self.answer(scope, receive, send_with_headers)
            else:
                await _refuse(error_response(refusal), receive, send_with_headers)
        except Exception as error:
            log_failure("a request failed", error)  # Starlette would log the whole exception
            if started:
                raise RuntimeError("a request failed after its response had begun") from None
            failure = ApiError(500, "the server failed on this request; its log names the line")
            await error_response(failure)(scope, receive, send_with_headers)

    async def answer_caller(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self.check_key(scope)
        if refusal is None:
            await self.app(scope, receive, send)
        else:
            await _refuse(error_response(refusal), receive, send)

    def check_origin(self, scope: Scope) -> ApiError | None:
        """Returns the error that refuses this request because of its origin, or None."""
        # The size of the head. connection.py bounds it earlier; this check also holds under gunicorn.
        lengths = [len(name) + len(value) + len(b": \r\n") for name, value in scope["headers"]]
        if len(scope["path"]) + len(scope["query_string"]) + sum(lengths) > MAX_HEAD:
            return ApiError(431, f"the request's headers: over {MAX_HEAD:,} bytes")

        # The Host. A foreign site can point its own host name at this machine (DNS rebinding). Its page then counts as
        # the same origin as the server, but its requests still carry the foreign name.
        headers = Headers(scope=scope)
        if len(headers.getlist("host")) > 1:
            return ApiError(400, "the request has more than one Host header")
        host = headers.get("host", "").lower()
        # All of it has to be a name and a port: `[::1].evil.com` and `localhost:1@evil.com` are names of evil.com.
        form = re.fullmatch(r"(\[[0-9a-f:.]+\]|[^:@\[\]]+)(:\d*)?", host)
        name = form[1] if form else ""
        is_known = name in self.hosts or (ANY_ADDRESS in self.hosts and _is_address(name))
        if self.hosts and not is_known:
            message = "this server is not known by that host name: add it to --allowed_hosts"
            return ApiError(403, message, code="host_not_allowed")

        # The Origin: a browser names the page that sends a request. It must be our page, or a page allowed by name.
        origin = headers.get("origin")
        if origin is not None and origin.lower().partition("://")[2] != host and origin not in self.origins:
            message = "requests from other sites' pages are refused: --allowed_origins names those that are not"
            return ApiError(403, message, code="origin_not_allowed")
        return None

    def check_key(self, scope: Scope) -> ApiError | None:
        """Returns the error that refuses this request because of its key or size, or None."""
        headers = Headers(scope=scope)
        is_open = scope["path"] in self.open_paths and scope["method"] in ("GET", "HEAD")
        refusal = None if is_open else self.refuse_stranger(headers, scope)
        # The size of the body, where the client announces it; `read_limited` counts what really arrives.
        length = headers.get("content-length", "0").strip()  # white space around a value does not belong to it
        if refusal is None and (not length.isdigit() or int(length[:20]) > self.max_body):
            return _too_large(self.max_body)
        return refusal

    def refuse_stranger(self, headers: Headers, scope: Scope) -> ApiError | None:
        if self.api_key is None:
            return None
        # Compared in constant time: how long a wrong key takes does not depend on how wrong it is.
        scheme, _, key = headers.get("authorization", "").partition(" ")
        matches = hmac.compare_digest(key.strip().encode("latin-1"), self.api_key.encode())
        if matches and scheme.lower() == "bearer":
            return None
        challenge = {"www-authenticate": "Bearer"}
        return ApiError(401, "the API key is missing or wrong", code="invalid_api_key", headers=challenge)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _too_large(most: int) -> ApiError:
    message = f"the body has more than {most:,} bytes"
    return ApiError(413, message, code="too_large", headers={"connection": "close"})


def error_response(error: ApiError) -> EncodedResponse:
    return EncodedResponse(error.body, error.status_code, headers=error.headers)


async def http_error(request: Request, error: Exception) -> EncodedResponse:
    """An app's handler of HTTPException: its own errors, and Starlette's for an unknown route or method."""
    assert isinstance(error, HTTPException)
    if not isinstance(error, ApiError):
        error = ApiError(error.status_code, f"{error.detail}: {request.url.path[:100]}", headers=error.headers)
    return error_response(error)


async def _refuse(response: EncodedResponse, receive: Receive, send: Send) -> None:
    """Respond before the body is read, then close the connection.

    Closing at once would reset a connection on which the body is still arriving, and the client would see the reset
    before the response. So the server reads and discards the body for a moment.
    """
    response.headers["connection"] = "close"
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})

    async def discard_body() -> None:
        while (await receive()).get("more_body", False):
            pass

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(discard_body(), LINGER_SECONDS)
    await send({"type": "http.response.body", "body": b""})


async def read_limited(request: Request, most: int = MAX_BODY, is_closing: Callable[[], bool] = lambda: False) -> bytes:
    """The body, which may lack an announced length.

    Raises ApiError: 413 over `most` bytes, 408 after BODY_SECONDS, 499 when the client leaves, 503 once the server
    `is_closing`.
    Starlette has a limit too, which responds in plain text and has no deadline.
    """

    async def read() -> bytes:
        content = bytearray()
        async for part in request.stream():
            content += part
            if len(content) > most:
                raise _too_large(most)
        return bytes(content)

    task = asyncio.ensure_future(read())
    deadline = time.monotonic() + BODY_SECONDS
    headers = {"connection": "close"}  # for the rest of the body
    try:
        while True:
            await asyncio.wait({task}, timeout=min(LOOK_SECONDS, BODY_SECONDS))
            if task.done():
                return task.result()
            if is_closing():
                raise ApiError(503, "the server is closing", code="not_ready", headers=headers)
            if time.monotonic() > deadline:
                raise ApiError(408, "the body did not arrive in time", headers=headers)
    except ClientDisconnect as error:
        raise ApiError(CLIENT_LEFT, "the client left") from error
    finally:
        task.cancel()
