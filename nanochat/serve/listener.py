"""The socket on which a server listens, and uvicorn's server for an app."""

import contextlib
import ipaddress
import socket
import sys
from collections.abc import Iterator
from typing import Any

from nanochat.ground.cli import UserError

IDLE_SECONDS = 5  # a connection may wait this long for its next request
STALL_SECONDS = 20.0  # a client that reads nothing for this long is dropped


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket. Raises UserError: when the port is taken, or the host is not an address of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, UnicodeError) as error:
        hint = "name an address of this machine and a free port, 0 for any"
        raise UserError(f"--host {host} --port {port}: {error}; {hint}") from error
    with listener:
        # Connections inherit both. With a small buffer the server notices sooner that a client stopped reading; after
        # the timeout the kernel closes the connection of a client that is gone.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2000 * STALL_SECONDS))
        yield listener


def address_of(host: str, listener: socket.socket) -> str:
    """The address of the server for a client on this machine or another one."""
    name = socket.gethostname() if host in ("0.0.0.0", "::", "") else host
    if ":" in name:  # IPv6
        name = f"[{name}]"
    return f"http://{name}:{listener.getsockname()[1]}/"


def make_server(app: Any, grace_seconds: float) -> Any:
    """uvicorn's server for an app; `run(sockets=[listener])` serves until a signal ends the process."""
    import uvicorn

    from nanochat.serve.connection import Connection

    if sys.platform == "linux":  # a connection is an open file, and the usual limit is only 1,024
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    settings = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=int(grace_seconds) + 1,
        log_level="error",
        access_log=False,  # log neither addresses nor the text of users
        server_header=False,
    )
    return uvicorn.Server(settings)
