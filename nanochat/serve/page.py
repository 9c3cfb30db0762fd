"""The chat page and its libraries. The server sends them to a browser that has no key yet."""

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route, request_response
from starlette.staticfiles import StaticFiles

PAGE = Path(__file__).parent / "ui.html"
VENDOR = Path(__file__).parent / "vendor"


class PageFiles(StaticFiles):
    """The page may change with each start of the server, so a browser asks whether its copy is still right. A library's
    folder is named after its version, so its files never change."""

    def file_response(self, full_path: Any, *arguments: Any, **options: Any) -> Response:
        response = super().file_response(full_path, *arguments, **options)
        is_page = Path(full_path) == PAGE
        response.headers["cache-control"] = "no-cache" if is_page else "public, max-age=31536000, immutable"
        return response


def page_routes() -> list[BaseRoute]:
    """The page at "/", and its libraries. Compressed: on a phone's network the size decides the time to the first
    paint."""
    files = PageFiles(directory=VENDOR)

    async def page(request: Request) -> Response:
        return files.file_response(PAGE, PAGE.stat(), request.scope)

    whole = GZipMiddleware(request_response(page))
    return [Route("/", whole, methods=["GET", "HEAD"]), Mount("/vendor", GZipMiddleware(files))]


def page_paths() -> list[str]:
    """The path of the page, and of each file of its libraries."""
    return ["/", *(f"/vendor/{file.relative_to(VENDOR).as_posix()}" for file in VENDOR.glob("*/*"))]


def content_policy(page: str) -> str:
    """The policy that lets a browser run only the page's script and style and this server's files.

    It names the SHA-256 of script and style, so a script that a model writes into a reply cannot run. Trusted types
    refuse text where a browser would read HTML or an address of code: `innerHTML = text` is an error. The page defines
    the only policy for addresses, which allows only addresses of libraries.
    """
    sources = {}
    for tag in ("script", "style"):
        contents = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", page, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents]
        sources[tag] = " ".join(["'self'", *(f"'sha256-{digest}'" for digest in digests)])
    return (
        f"default-src 'none'; script-src {sources['script']}; style-src {sources['style']}; font-src 'self'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types library"
    )
