"""Serve a model: a chat page, and an API for OpenAI's clients. docs/deploy.md explains how to serve it to others.

python -m scripts.chat_web

python -m scripts.chat_web --source sft --host 0.0.0.0 --port 8000

python -m scripts.chat_web --source base,sft,rl

python -m scripts.chat_web --source sft --for_rl --slots 128 --port 8001

NANOCHAT_CHAT_WEB="--source sft" gunicorn -w 1 -b 0.0.0.0:8000 -k uvicorn.workers.UvicornWorker scripts.chat_web:app
"""

import contextlib
import gc
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from nanochat.ground.cli import Count, Positive, Range, UserError, fail, parse, run
from nanochat.ground.untrusted import printable
from nanochat.serve.decoding_flags import DecodingFlags
from nanochat.serve.listener import address_of, is_loopback, listening, make_server

if TYPE_CHECKING:
    from nanochat.serve.scheduler import Scheduler
    from nanochat.serve.state import LoadedModel

MAX_NAME = 100  # characters of --name


@dataclass(frozen=True)
class Config:
    # A stage, a folder (ours, Hugging Face's or peft's) or hf:ORG/NAME; auto: the furthest stage. Several with commas:
    # clients choose one by its name, and the last one is the default.
    source: str = "auto"
    model_tag: str | None = None  # of each stage; default: the tag written last
    # The model's name for clients, or as many names as sources; default: nanochat-TAG-STAGE. "nanochat" is always
    # accepted, too, for the default model.
    name: str = ""
    host: str = "127.0.0.1"  # address to listen on; any but this machine's needs a key, by default a random one
    port: Annotated[int, Range(0, 65535)] = 8000  # 0: any free port
    api_key: str | None = None  # clients must send it; default: NANOCHAT_API_KEY; "none": no key is needed
    api_key_file: Path | None = None  # a file that holds the key
    # Further host names of this server, separated by commas; "*": any. Default: this machine's names; or any name when
    # others can reach the server and need a key.
    allowed_hosts: str = ""
    allowed_origins: str = ""  # sites whose pages may use the API, separated by commas: https://chat.example.org
    # Sample for a trainer (chat_rl --sampler), which replaces the weights from folders below NANOCHAT_BASE_DIR. The
    # logprobs of its replies are at each request's temperature.
    for_rl: bool = False
    slots: Positive = 16  # replies generated at once, by each model
    # Tokens of a chat and its reply, at most the model's context; 0: the context, or less if the cache would not fit.
    max_seq_len: Count = 0
    device: str = "auto"  # auto, npu, cuda or cpu; npu:3 is the fourth
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # the dtype of matrix products
    decoding: Annotated[DecodingFlags, tyro.conf.arg(name="")] = DecodingFlags()


def main(config: Config) -> None:
    # ------------------------------------------------------------------ find mistakes before anything starts
    key = choose_key(config, open_to_others=not is_loopback(config.host))
    models = check(config)

    # ------------------------------------------------------------------ listen, and print the address
    with listening(config.host, config.port) as listener:
        address = address_of(config.host, listener)
        # Print only a key made here: an operator knows the key that they set, and standard output may end up in a log.
        print(address if key is None or names_key(config) else address_with_key(address, key), flush=True)
        if len(models) > 1:
            print(f"models: {', '.join(models)}", flush=True)
        warn_if_open(config, key)

        # -------------------------------------------------------------- serve until a signal arrives
        serve(replace(config, api_key=key), listener)


def serve(config: Config, listener: socket.socket) -> None:
    """Serve until a signal ends the process. Raises the error with which loading the model failed."""
    from nanochat.serve.state import GRACE_SECONDS

    failures: list[BaseException] = []

    def on_failure(error: BaseException) -> None:
        failures.append(error)
        server.should_exit = True

    server = make_server(make_app(config, on_failure), GRACE_SECONDS)
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is how a server ends
        server.run(sockets=[listener])
    if failures:
        raise failures[0]


# ---------------------------------------------------------------------- the model


def check(config: Config) -> list[str]:
    """Check everything that can be checked without loading; returns the models' names, the default first, if there are
    several.

    Raises UserError: when a checkpoint or the device does not exist, or two models have the same name.
    """
    from nanochat import device as devices

    allowed_origins(config)  # raises on a mistake
    sources = find_sources(config)
    devices.runtime_of(devices.kind_of(config.device)).records(config.decoding.graphs)  # raises on a mistake
    return [source.name for source in sources]


@dataclass(frozen=True)
class Source:
    """A model of --source."""

    name: str  # for clients; "": the default name, if it is the only model
    folder: Path  # of its checkpoint


def find_sources(config: Config) -> list[Source]:
    """The models of --source, the default first: the last one of the flag, because it is usually the most trained.

    Raises UserError: when one does not exist, or is there twice, or has the name of another one.
    """
    from nanochat.checkpoint_manager import load_config
    from nanochat.model_folder import find_source
    from nanochat.serve.prompts import ALIAS

    entries = [config.source]
    if "," in config.source and not Path(config.source).expanduser().exists():
        entries = [entry.strip() for entry in config.source.split(",") if entry.strip()]
    if not entries:
        raise UserError(f"--source {config.source} names no model: name one, or several as base,sft,rl")
    names = config.name.split(",") if len(entries) > 1 and config.name else [config.name] * len(entries)
    are_names = all(name.isprintable() and name == name.strip() and len(name) <= MAX_NAME for name in names)
    if len(names) != len(entries) or not are_names or (config.name and not all(names)):
        raise UserError(
            f"--name {config.name[:MAX_NAME]}: --source has {len(entries)} models; name each, with commas, in at most "
            f"{MAX_NAME} printable characters without spaces around them, or leave it out"
        )
    if len(entries) > 1 and config.for_rl:
        raise UserError(f"--for_rl is for a single --source, not for {len(entries)}: leave it out")

    found: list[Source] = []
    for entry, name in zip(entries, names, strict=True):
        folder = find_source(entry, config.model_tag)
        if not name and len(entries) > 1:
            _, _, meta = load_config(folder)
            name = name_of(meta)
        for other in found:
            if folder.resolve() == other.folder.resolve():
                raise UserError(f"--source {entry} is {other.name}, which is listed before: leave it out")
        if len(entries) > 1 and name in (ALIAS, *(other.name for other in found)):
            raise UserError(f"--source {entry}: another model is called {name}; name all models with --name A,B,...")
        found.append(Source(name, folder))
    return found[::-1]


def name_of(meta: dict[str, Any]) -> str:
    """The default name of a model for clients."""
    from nanochat.model_folder import tag_of

    tag = tag_of(Path(meta["folder"]))
    return f"nanochat-{tag}-{meta['stage']}" if "stage" in meta else tag


def make_app(config: Config, on_failure: Callable[[BaseException], None]) -> Any:
    """The ASGI application; it loads the model when it starts."""
    from nanochat.serve.app import create_app

    hosts = allowed_hosts(config, config.api_key)
    origins = allowed_origins(config)
    load = partial(load_models, config)
    return create_app(load, api_key=config.api_key, hosts=hosts, origins=origins, on_failure=on_failure)


def load_models(config: Config) -> "LoadedModel":
    """Load the models of --source; returns the default one, which has the others."""
    from nanochat import device as devices
    from nanochat.serve.scheduler import start_schedulers
    from nanochat.serve.weights import load_engine

    # All weights first: the caches share the memory that they leave.
    device = devices.init(config.device, config.dtype)
    sources = find_sources(config)
    loaded = [load_engine(one.folder, device, config.max_seq_len, config.decoding) for one in sources]
    schedulers = start_schedulers([engine for engine, _ in loaded], config.slots, config.max_seq_len)
    # Python's garbage collector visits every object that it tracks while all threads wait, whenever a request creates
    # many objects. The objects loaded so far stay, so exclude them: a body of 49,000 empty lists takes 16 ms, and
    # 137 without this (two cores of an AMD EPYC, 2026-11-22).
    gc.collect()
    gc.freeze()

    models = []
    for source, scheduler, (_, meta) in zip(sources, schedulers, loaded, strict=True):
        models.append(served_model(config, scheduler, source.name or name_of(meta), meta))
    return replace(models[0], others=tuple(models[1:]))


def served_model(config: Config, scheduler: "Scheduler", name: str, meta: dict[str, Any]) -> "LoadedModel":
    """A scheduler's model as the server's routes know it."""
    from nanochat.sampling import SamplingParams
    from nanochat.serve.state import LoadedModel
    from nanochat.serve.weights import fingerprint_of, reader_of_updates

    engine = scheduler.engine
    # Only the names of data files: a path would reveal details of this machine.
    names = meta.get("pretraining", {}).get("data", "").split(",")
    data = ",".join(Path(name).name if Path(name).is_absolute() else name for name in names)
    facts = {**meta, "data": data}
    about = {key: facts[key] for key in ("tasks", "parameters", "data", "trained_at", "step", "stage")}
    return LoadedModel(
        scheduler,
        engine.tokenizer,
        name,
        context=scheduler.context,
        chats=meta["stage"] != "base" and engine.tokenizer.can_chat,
        created=int(time.time()),
        fingerprint=fingerprint_of(Path(meta["folder"])),
        sampling=SamplingParams(**meta["sampling"]),
        about=about,
        read_update=reader_of_updates(engine, config.max_seq_len) if config.for_rl else None,
    )


def __getattr__(name: str) -> Any:
    """`app`, for gunicorn: built on first import, from the flags in NANOCHAT_CHAT_WEB."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    import uvicorn.config

    def give_up(error: BaseException) -> None:
        print(printable(f"error: {error}"), file=sys.stderr, flush=True)
        os._exit(3)  # gunicorn ends on this code; after any other it restarts the process again and again

    try:
        config = parse(Config, [])
        for flag in ("host", "port"):
            if getattr(config, flag) != getattr(Config, flag):
                raise UserError(f"--{flag} is for `python -m scripts.chat_web`: gunicorn has -b and -w")
        config = replace(config, host="0.0.0.0")  # gunicorn's address is unknown here: assume that it is public
        key = choose_key(config, open_to_others=True)
        check(config)
    except UserError as error:
        fail(str(error), code=3)
    except SystemExit:  # a bad flag, which `parse` has reported
        sys.exit(3)
    if key is not None and not names_key(config):
        print(f"open {address_with_key('http://<this server>/', key)}", flush=True)
    warn_if_open(config, key)
    # gunicorn's worker asks uvicorn for a protocol by this name: the one that bounds headers.
    uvicorn.config.HTTP_PROTOCOLS["auto"] = "nanochat.serve.connection:Connection"
    globals()["app"] = app = make_app(replace(config, api_key=key), give_up)
    return app


# ---------------------------------------------------------------------- who may use it, and where it listens


def choose_key(config: Config, open_to_others: bool) -> str | None:
    """The API key; None: no key is needed. If others can reach the server and no key is set, the key is random."""
    if config.api_key is not None and config.api_key_file is not None:
        raise UserError("--api_key and --api_key_file: set one of them")
    if not names_key(config):
        return secrets.token_urlsafe(24) if open_to_others else None
    key = os.environ.get("NANOCHAT_API_KEY", "") if config.api_key is None else config.api_key
    if config.api_key_file is not None:
        try:
            key = config.api_key_file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--api_key_file {config.api_key_file}: {error}; a key is ASCII text in a file") from error
    if key == "none":
        return None
    if len(key) < 8 or not all(33 <= ord(character) < 127 for character in key):
        raise UserError("the API key (--api_key): at least 8 ASCII characters without spaces, or none")
    return key


def names_key(config: Config) -> bool:
    """Whether the operator has set a key, or "none"."""
    return config.api_key is not None or config.api_key_file is not None or "NANOCHAT_API_KEY" in os.environ


def address_with_key(address: str, key: str) -> str:
    """The page's first address. A browser never sends the fragment, so the key stays out of every server's log."""
    return f"{address}#key={key}"


def warn_if_open(config: Config, key: str | None) -> None:
    """Warn that anybody who reaches the server may use it without a key."""
    if key is None and not is_loopback(config.host):
        hosts = allowed_hosts(config, key)
        by = "any host name" if not hosts else ", ".join(dict.fromkeys(hosts)) + "; --allowed_hosts adds names"
        print(f"no API key: anybody who reaches this port may use the model (by {by})", flush=True)


def allowed_hosts(config: Config, key: str | None) -> tuple[str, ...]:
    """The host names that requests may use for this server; () for any, when the key keeps strangers out."""
    from nanochat.serve.app import LOOPBACK
    from nanochat.serve.middleware import ANY_ADDRESS

    further = [name.strip().lower() for name in config.allowed_hosts.split(",") if name.strip()]
    if "*" in further:
        return ()
    if is_loopback(config.host):
        own = f"[{config.host}]" if ":" in config.host else config.host.lower()
        return (*LOOPBACK, own, *further)
    # Without a key, a page of another site could use this server through the browser of a person who can reach it: the
    # site points its host name here (DNS rebinding). That works neither with an address nor with this machine's name.
    if key is None or further:
        return (*LOOPBACK, socket.gethostname().lower(), ANY_ADDRESS, *further)
    return ()


def allowed_origins(config: Config) -> tuple[str, ...]:
    """The sites of --allowed_origins, as browsers write them. Raises UserError: when an entry is not a site."""
    origins = tuple(name.strip().lower() for name in config.allowed_origins.split(",") if name.strip())
    for origin in origins:
        # "*" would let every page that a person opens use the server through their browser.
        if not re.fullmatch(r"https?://[a-z0-9.\-\[\]:]+", origin):
            raise UserError(f"--allowed_origins {origin}: name each site as https://chat.example.org, without a path")
    return origins


if __name__ == "__main__":
    run(main, Config)
