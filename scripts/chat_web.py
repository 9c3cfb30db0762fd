"""Serve a model: a page to chat in, and an API that OpenAI's clients know. For others' use see docs/deploy.md.

python -m scripts.chat_web
python -m scripts.chat_web --source sft --host 0.0.0.0 --port 8000
NANOCHAT_CHAT_WEB="--source sft" gunicorn -w 1 -b 0.0.0.0:8000 -k uvicorn.workers.UvicornWorker scripts.chat_web:app
"""

import contextlib
import errno
import ipaddress
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from nanochat.shell.cli import Positive, Range, UserError, fail, out_of_memory, parse, run

GRACE_SECONDS = 8.0  # that running replies have when the server is told to end
IDLE_SECONDS = 5  # that a connection may wait for its next request
STALL_SECONDS = 20.0  # that a reader may take nothing


@dataclass(frozen=True)
class Config:
    source: str = "auto"  # a stage, or a checkpoint's folder; auto: the furthest trained of rl, dpo, sft, mid, base
    model_tag: str | None = None  # default: the tag written last
    step: int | None = None  # default: the newest
    host: str = "127.0.0.1"  # where to listen; others than this machine need a key, and one is made if none is given
    port: Annotated[int, Range(0, 65535)] = 8000  # 0: any free one
    api_key: str | None = None  # that clients must send; default: NANOCHAT_API_KEY; "none": nobody needs one
    api_key_file: Path | None = None  # a file that holds the key
    allowed_hosts: str = ""  # further names that requests may call this server by, with commas; "*": any
    slots: Positive = 16  # replies that are made at once
    cache_gib: Annotated[float, Range(0.001)] | None = None  # memory of the caches, may mean fewer slots; default: any
    queue: Positive = 64  # requests that wait for a slot; further ones are told to come again
    replicas: Positive = 1  # processes behind the one port, each with a device of its own
    device: str = "auto"  # auto, npu, cuda or cpu
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # of matrix products
    graphs: bool = False  # an accelerator records what a decoded token launches and replays it in one


def main(config: Config) -> None:
    # ------------------------------------------------------------------ check
    key = key_of(config, open_to_others=not is_loopback(config.host))
    check(config)  # a mistake is told before anything starts

    # ------------------------------------------------------------------ serve
    with listening(config) as listener:
        shown = config.host if is_loopback(config.host) else own_name(config.host)
        address = f"http://{f'[{shown}]' if ':' in shown else shown}:{listener.getsockname()[1]}/"
        # A key of the operator's own is no news to them, and standard output may end in a log.
        print(address if key is None or names_key(config) else f"{address}?key={key}", flush=True)
        config = replace(config, api_key=key)
        if config.replicas == 1:
            serve(config, listener)
        else:
            serve_replicas(config, listener)


def serve(config: Config, listener: socket.socket, replica: int | None = None) -> None:
    """Until a signal ends it. Raises what loading the model raised."""
    import uvicorn

    from nanochat.serve.connection import Connection

    allow_many_connections()
    failures: list[BaseException] = []

    def failed(error: BaseException) -> None:
        failures.append(error)
        server.should_exit = True

    app = make_app(config, failed, replica)
    # Addresses are not logged: the page's first one carries the key.
    settings: dict[str, Any] = {"log_level": "error", "access_log": False, "server_header": False}
    settings |= {"http": Connection, "ws": "none", "timeout_keep_alive": IDLE_SECONDS}
    server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=int(GRACE_SECONDS) + 1, **settings))
    server.run(sockets=[listener])
    if failures:
        raise failures[0]


def allow_many_connections() -> None:
    """Each is an open file, and the usual limit of 1,024 is soon reached by clients who only connect."""
    if sys.platform == "linux":
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def serve_replicas(config: Config, listener: socket.socket) -> None:
    """Processes that take connections from one listening socket, whichever is free first; all end with the first."""
    import multiprocessing
    from multiprocessing import connection

    context = multiprocessing.get_context("spawn")
    replicas = [
        context.Process(target=serve_replica, args=(replace(config, device=f"{config.device}:{i}"), listener, i))
        for i in range(config.replicas)
    ]
    ending: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: ending.append(number))
    for process in replicas:
        process.start()
    listener.close()
    while not ending and all(process.is_alive() for process in replicas):
        connection.wait([process.sentinel for process in replicas], timeout=0.2)
    for process in replicas:
        process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS + 4
    for process in replicas:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()
    if not ending:
        fail("a replica ended, see above; the others were told to")


def serve_replica(config: Config, listener: socket.socket, replica: int) -> None:
    """One process of several; its mistakes are one line, too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches every process of the terminal: the parent tells us
    threading.Thread(target=end_with_parent, name="parent", daemon=True).start()
    try:
        serve(config, listener, replica)
    except UserError as error:
        fail(f"replica {replica}: {error}")


def end_with_parent() -> None:
    """End this process as soon as the one that started it has ended, however that came about."""
    import multiprocessing

    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()  # a pipe between the two closes
    os.kill(os.getpid(), signal.SIGTERM)


# ---------------------------------------------------------------------- the model


def check(config: Config) -> None:
    """What can be told without loading. Raises UserError: when there is no such checkpoint or device."""
    from nanochat import device as devices
    from nanochat.checkpoint_manager import find_source

    find_source(config.source, config.model_tag, config.step)
    if config.replicas > 1 and ":" in config.device:
        raise UserError(f"--device {config.device} with --replicas: leave the index out, each has a device of its own")
    kind = devices.kind_of(config.device)
    if config.graphs:
        devices.check_capture(kind)


def make_app(config: Config, on_failure: Callable[[BaseException], None], replica: int | None = None) -> Any:
    from nanochat.serve.app import LOOPBACK, create_app
    from nanochat.serve.state import LoadedModel

    def load() -> LoadedModel:
        from nanochat import device as devices
        from nanochat.checkpoint_manager import load_model, tag_of
        from nanochat.engine import Engine, Slots
        from nanochat.serve.scheduler import Scheduler
        from nanochat.shell.log import print0

        device = devices.init(config.device, config.dtype)
        model, tokenizer, meta = load_model(config.source, device, model_tag=config.model_tag, step=config.step)
        engine = Engine(model, tokenizer, device, config.graphs)
        cache_bytes = int((config.cache_gib or 0) * 2**30)
        try:
            scheduler = Scheduler(engine, slots=config.slots, queue=config.queue, cache_bytes=cache_bytes)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            size = config.slots * Slots.bytes_per_slot(engine) / 2**30
            said = f"--slots {config.slots}: a cache of {size:,.1f} GiB does not fit; lower it, or set --cache_gib"
            raise UserError(said) from error
        if scheduler.figures().slots < config.slots:
            print0(f"{scheduler.figures().slots} of --slots {config.slots} fit --cache_gib {config.cache_gib:g}")
        scheduler.start()
        stage = meta.get("stage", "model")
        name = f"nanochat-{tag_of(Path(meta['folder']))}-{stage}"
        return LoadedModel(scheduler, tokenizer, name, model.config.sequence_len, stage != "base", int(time.time()))

    return create_app(
        load, api_key=config.api_key, hosts=host_names(config, LOOPBACK), grace=GRACE_SECONDS,
        stall_seconds=STALL_SECONDS, on_failure=on_failure, replica=replica,
    )  # fmt: skip


def __getattr__(name: str) -> Any:
    """`app` for gunicorn and the like: made when it is first asked for, with the flags in NANOCHAT_CHAT_WEB."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def give_up(error: BaseException) -> None:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(3)  # gunicorn then ends as well instead of starting this again and again

    try:
        config = parse(Config, [])
    except SystemExit:
        sys.exit(3)  # gunicorn ends; with another status it would start this again and again
    try:
        for flag in ("host", "port", "replicas"):
            if getattr(config, flag) != getattr(Config, flag):
                raise UserError(f"--{flag} is for `python -m scripts.chat_web`: gunicorn has -b and -w")
        # Where gunicorn listens is not known here, so that others may well reach it.
        key = key_of(config, open_to_others=True)
        check(config)
    except UserError as error:
        fail(str(error), code=3)
    if key is not None and not names_key(config):
        print(f"open http://<this server>/?key={key}", flush=True)
    config = replace(config, api_key=key, allowed_hosts=config.allowed_hosts or "*")
    globals()["app"] = made = make_app(config, give_up)
    return made


# ---------------------------------------------------------------------- who may use it, and where it listens


def key_of(config: Config, open_to_others: bool) -> str | None:
    """The API key; a random one where others than this machine could ask and none is set. None: no key is needed."""
    if config.api_key is not None and config.api_key_file is not None:
        raise UserError("--api_key and --api_key_file: name one of them")
    if not names_key(config):
        return secrets.token_urlsafe(24) if open_to_others else None
    key = os.environ.get("NANOCHAT_API_KEY", "") if config.api_key is None else config.api_key
    if config.api_key_file is not None:
        try:
            key = config.api_key_file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = "it holds no key, which is ASCII text" if isinstance(error, ValueError) else error.strerror
            raise UserError(f"--api_key_file {config.api_key_file}: {why}") from error
    if key == "none":
        return None
    if len(key) < 8 or not all(33 <= ord(character) < 127 for character in key):
        raise UserError("the API key (--api_key): at least 8 characters, of ASCII and without spaces, or none")
    return key


def names_key(config: Config) -> bool:
    """Whether the operator has said which key, or that there is to be none."""
    return config.api_key is not None or config.api_key_file is not None or "NANOCHAT_API_KEY" in os.environ


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_names(config: Config, loopback: tuple[str, ...]) -> tuple[str, ...]:
    """Names that requests may call this server by; () for any, where the key keeps strangers out."""
    further = [name.strip().lower() for name in config.allowed_hosts.split(",") if name.strip()]
    if "*" in further or (not further and not is_loopback(config.host)):
        return ()
    own = f"[{config.host}]" if ":" in config.host else config.host.lower()
    return (*loopback, own, *further)


def own_name(host: str) -> str:
    """An address by which others reach this machine, where `host` stands for all of them."""
    return socket.gethostname() if host in ("0.0.0.0", "::", "") else host


@contextlib.contextmanager
def listening(config: Config) -> Iterator[socket.socket]:
    """Raises UserError: when the port is taken, or the host is not this machine's."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise UserError(f"--host {config.host}: {error}; name an address of this machine") from error
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # A reader that stopped is noticed sooner behind a small buffer, and forgotten by the system in the end.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2000 * STALL_SECONDS))
        try:
            listener.bind(address)
            listener.listen(1024)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UserError(f"--port {config.port} is taken: name another, or 0 for any free one") from error
            raise UserError(f"--host {config.host} --port {config.port}: {error.strerror}") from error
        yield listener


if __name__ == "__main__":
    run(main, Config)
