"""Who may ask, and how much at once: stands before every route.

In flows every request; those with a foreign host or origin, without the key, or with a body that is too large, are
answered here. Every answer leaves with the headers that tell a browser what it may do with it.
"""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import re
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from nanochat.serve.schema import CLIENT_LEFT, ApiError
from nanochat.serve.state import State
from nanochat.shell.log import print0

MAX_BODY = 1 << 20  # bytes
MAX_HEAD = 1 << 16  # bytes of a request's address and headers
BODY_SECONDS = 30.0  # for a client to send a body
LINGER_SECONDS = 2.0  # to take in what a refused client still sends, so that it gets to read why
OPEN_PATHS = ("/health", "/")  # need no key
PAGE = Path(__file__).parent / "ui.html"
HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",  # the page's first address carries the key
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class Gate:
    """Stands before every route: host, origin, key and size of a request; headers and status of every answer."""

    def __init__(self, app: Any, state: State, api_key: str | None, hosts: tuple[str, ...], policy: str):
        self.app, self.state, self.hosts = app, state, hosts
        self.key = None if api_key is None else api_key.encode()
        headers = {**HEADERS, "content-security-policy": policy}
        self.headers = [(name.encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # a websocket
            await send({"type": "websocket.close", "code": 1008})
            return
        started = False

        async def send_on(message: Any) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self.state.responses[message["status"]] += message["status"] != CLIENT_LEFT  # nobody was answered
                message = {**message, "headers": [*message["headers"], *self.headers]}
            await send(message)

        try:
            refused = self.refused(scope)
            if refused is None:
                await self.app(scope, receive, send_on)
            else:
                await _refuse_and_linger(refused, receive, send_on)
        except Exception as error:
            # Where it happened and no more: the message may quote what a user wrote.
            print0(f"a request failed: {type(error).__name__}\n{''.join(traceback.format_tb(error.__traceback__))}")
            if started:
                raise RuntimeError("a request failed after its answer had begun") from None
            failed = ApiError(500, "the server made a mistake; its log says where")
            await refusal(failed)(scope, receive, send_on)

    def refused(self, scope: Scope) -> ApiError | None:
        """Why this request is not let in."""
        lengths = [len(name) + len(value) + 4 for name, value in scope["headers"]]  # a colon, a space, a line's end
        if len(scope["path"]) + len(scope["query_string"]) + sum(lengths) > MAX_HEAD:
            return ApiError(431, f"the request's headers: over {MAX_HEAD:,} bytes")
        if [name for name, _ in scope["headers"]].count(b"host") > 1:
            return ApiError(400, "the request names more than one Host")
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "").lower()
        name = host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]
        if self.hosts and name not in self.hosts:
            return ApiError(403, "this server is not known by that host name: --allowed_hosts", code="host_not_allowed")
        origin = headers.get(b"origin")
        if origin is not None and _netloc(origin) != host:
            return ApiError(403, "requests from other sites' pages are refused", code="origin_not_allowed")
        is_open = scope["path"] in OPEN_PATHS and scope["method"] in ("GET", "HEAD")
        if self.key is not None and not is_open:
            scheme, _, given = headers.get(b"authorization", "").partition(" ")
            if not hmac.compare_digest(given.strip().encode("latin-1"), self.key) or scheme.lower() != "bearer":
                told = {"www-authenticate": "Bearer"}
                return ApiError(401, "the API key is missing or wrong", code="invalid_api_key", headers=told)
        length = headers.get(b"content-length", "0")
        if not length.isdigit() or int(length[:20]) > MAX_BODY:
            return _too_large()
        return None


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _too_large() -> ApiError:
    return ApiError(
        413, f"the body has more than {MAX_BODY:,} bytes", code="too_large", headers={"connection": "close"}
    )


def refusal(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, headers=error.headers)


async def _refuse_and_linger(error: ApiError, receive: Receive, send: Send) -> None:
    """Answer before the body is read, and close; but take in and forget what is on its way for a moment, or the
    client's machine would be told of a broken connection before the client has read the answer."""
    response = refusal(error)
    headers = [*response.raw_headers, *([] if "connection" in error.headers else [(b"connection", b"close")])]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})

    async def take_in() -> None:
        while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
            pass

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(take_in(), LINGER_SECONDS)
    await send({"type": "http.response.body", "body": b""})


async def read_limited(request: Request) -> bytes:
    """Raises ApiError: 413 for a body that is too large though it did not say so, 408 for one that does not come, 499
    where the client leaves before."""

    async def read() -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > MAX_BODY:
                raise _too_large()
            parts.append(part)
        return b"".join(parts)

    try:
        return await asyncio.wait_for(read(), BODY_SECONDS)
    except ClientDisconnect as error:
        raise ApiError(CLIENT_LEFT, "the client left") from error
    except asyncio.TimeoutError as error:
        raise ApiError(408, "the body did not come", headers={"connection": "close"}) from error


def load_page() -> tuple[str | None, str]:
    """The page, if there is one, and the policy under which a browser runs its script and style and nothing else."""
    page = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else None
    allowed = {}
    for tag in ("script", "style"):
        contents = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", page or "", re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in contents]
        allowed[tag] = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    return page, (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
