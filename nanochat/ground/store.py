"""The store in which the processes of a job find each other: a server of keys and values, with no password.

Each process writes its address there and reads the others'; later they agree there on when to stop. Any process
that reaches the port can write. On one host the store listens on 127.0.0.1, which other hosts cannot reach.
"""

import os
import socket
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from nanochat.ground.log import warn

LOOPBACK = "127.0.0.1"


def on_one_host() -> bool:
    """Whether all processes of this job run on this host."""
    return os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE", "1")


def is_torchruns() -> bool:
    """Whether the launcher's process serves the job's store; else the process of rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connect(timeout: timedelta) -> TCPStore:
    """Join the job's store. A request that takes longer than `timeout` raises RuntimeError."""
    host = LOOPBACK if on_one_host() and not is_torchruns() else os.environ["MASTER_ADDR"]
    return TCPStore(host, int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)


def serve(timeout: timedelta, port: int = 0) -> TCPStore:
    """A store in this process, only for the processes of this host; port 0: any free one."""
    # torch listens on every network interface, unless it is handed a socket that listens already.
    listener = socket.create_server((LOOPBACK, port), backlog=socket.SOMAXCONN)
    port = listener.getsockname()[1]
    return TCPStore(
        LOOPBACK, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def is_open_to_others(port: int) -> bool:
    """Whether something listens at this port on every address of this host."""
    # 127.0.0.2 is this host as well. A server that answers there listens on every address.
    try:
        socket.create_connection(("127.0.0.2", port), timeout=1).close()
    except OSError as error:
        return isinstance(error, TimeoutError)  # it listens, and is busy
    return True


def of_this_start(timeout: timedelta) -> Store | None:
    """The job's store, with keys that only this start of its processes uses; None: torch makes one from torchrun's
    variables."""
    if not is_torchruns():
        if not on_one_host():
            return None
        if os.environ["RANK"] == "0":
            return serve(timeout, int(os.environ["MASTER_PORT"]))
        return connect(timeout)
    # The store in torchrun's process outlives the workers, and torch does not separate one start of them from the next:
    # restarted processes looked for each other at the addresses of those that had died (torch 2.13).
    if not on_one_host():  # each host counts its own starts, so the prefixes would differ
        warn("set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every host: a host that is lost cannot come back without it")
        return None
    port = int(os.environ["MASTER_PORT"])
    if is_open_to_others(port):
        warn(
            f"torchrun's port {port} is open to the network, without a password, and `--standalone` runs what it is "
            "sent there; put `python -m nanochat.run.launch` for `torchrun --standalone`"
        )
    prefix = f"start_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return PrefixStore(prefix, connect(timeout))
