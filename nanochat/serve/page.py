"""The chat page and its libraries. The server sends them to a browser that has no key yet."""

import base64
import gzip
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

PAGE = Path(__file__).parent / "ui.html"
VENDOR = Path(__file__).parent / "vendor"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".woff2": "font/woff2",
}


@dataclass(frozen=True)
class StaticFile:
    """A file in memory, also compressed: on a phone's network the size decides the time to the first paint."""

    content: bytes
    compressed: bytes
    media_type: str
    cache_control: str
    etag: str

    @classmethod
    def read(cls, path: Path, cache_control: str) -> "StaticFile":
        content = path.read_bytes()
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        return cls(content, gzip.compress(content, mtime=0), MEDIA_TYPES[path.suffix], cache_control, etag)

    def response(self, request: Request) -> Response:
        """The file, or 304 without it for a browser that still has it."""
        headers = {"cache-control": self.cache_control, "etag": self.etag, "vary": "accept-encoding"}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return Response(self.content, media_type=self.media_type, headers=headers)
        return Response(self.compressed, media_type=self.media_type, headers={**headers, "content-encoding": "gzip"})


def load_page() -> dict[str, StaticFile]:
    """Path below the server's address -> the file: the page at "/", and its libraries.

    The page may change with each start of the server, so a browser asks whether its copy is still right. A library's
    folder is named after its version, so its files never change.
    """
    files = {"/": StaticFile.read(PAGE, "no-cache")}
    for path in sorted(VENDOR.glob("*/*")):
        if path.suffix in MEDIA_TYPES:  # not the licences
            address = f"/vendor/{path.relative_to(VENDOR).as_posix()}"
            files[address] = StaticFile.read(path, "public, max-age=31536000, immutable")
    return files


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
