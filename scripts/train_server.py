"""Serve training: the tinker client trains and samples on this machine's device. docs/train_server.md shows how.

python -m scripts.train_server --source sft

python -m scripts.train_server --source hf:ORG/NAME --host 0.0.0.0 --api_key tml-alice8302,tml-bob5129
"""

import contextlib
import os
import secrets
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from nanochat.ground.cli import Positive, Range, UserError, run
from nanochat.serve.listener import address_of, is_loopback, listening, make_server

if TYPE_CHECKING:
    from nanochat.train_service.service import Service

KEY_PREFIX = "tml-"  # the client refuses any other key
SNAPSHOT_STEPS = 20  # the most optimizer steps that a restart has to repeat
GRACE_SECONDS = 8.0  # time for the present request to finish when the server ends


@dataclass(frozen=True)
class Config:
    source: str = "auto"  # the base model: a stage, a folder or hf:ORG/NAME; auto: the furthest stage
    model_tag: str | None = None  # default: the tag written last
    name: str = ""  # the base model's name for clients; default: the source's, such as nanochat-TAG-STAGE
    folder: Path | None = None  # keeps everything that clients create; default: service/NAME in the base folder
    host: str = "127.0.0.1"  # address to listen on; any but this machine's needs a key, by default a random one
    port: Annotated[int, Range(0, 65535)] = 8010  # 0: any free port
    # Clients' keys, with commas, each tml-...; a key gives access to what was made with it. Default: NANOCHAT_API_KEY
    api_key: str | None = None
    slots: Positive = 16  # sequences sampled at once
    batch_tokens: Positive = 8192  # tokens of a micro-batch: lower it when training does not fit into the memory
    models: Positive = 8  # models in memory at once; the others wait on the disk
    owner_gb: Annotated[float, Range(0)] = 0.0  # disk for the weights of a key, in GB; 0: as much as there is
    device: str = "auto"  # auto, npu, cuda or cpu; npu:3 is the fourth
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # the dtype of matrix products


def main(config: Config) -> None:
    # ------------------------------------------------------------------ find mistakes before anything is loaded
    if find_spec("tinker") is None:
        raise UserError("the messages are the tinker client's, for Python 3.11 and newer: pip install -e '.[service]'")
    keys = choose_keys(config)
    sys.setswitchinterval(0.001)  # the event loop waits this long for threads that parse, each time: 5 ms add up
    os.umask(0o077)  # files for this user only: they hold what clients send
    with listening(config.host, config.port) as listener:
        # -------------------------------------------------------------- load, on a thread that ends
        # Its OpenMP workers end with it. Otherwise they and the workers of the computing thread would outnumber the
        # cores, and both threads would be slow.
        with ThreadPoolExecutor(1) as loading:
            service = loading.submit(open_service, config).result()

        # -------------------------------------------------------------- serve until a signal arrives
        from nanochat.train_service.app import create_app

        # If others can reach the server, the key keeps strangers out. Any host name is then accepted.
        hosts = {} if is_loopback(config.host) else {"hosts": ()}
        app = create_app(service, keys=keys, **hosts)
        made_here = config.api_key is None and "NANOCHAT_API_KEY" not in os.environ
        key = keys[0] if keys and made_here else f"{KEY_PREFIX}..." if keys else f"{KEY_PREFIX}any"
        print(f"TINKER_BASE_URL={address_of(config.host, listener)} TINKER_API_KEY={key}", flush=True)
        print(f'base_model="{service.name}", kept in {service.folder}', flush=True)
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is how a server ends
            make_server(app, GRACE_SECONDS).run(sockets=[listener])


def choose_keys(config: Config) -> tuple[str, ...]:
    """The clients' keys; () for any. If others can reach the server and no key is set, the key is random."""
    text = os.environ.get("NANOCHAT_API_KEY", "") if config.api_key is None else config.api_key
    keys = tuple(key.strip() for key in text.split(",") if key.strip())
    for key in keys:
        if not key.startswith(KEY_PREFIX) or len(key) < 8 or not all(33 <= ord(character) < 127 for character in key):
            shown = f"{key[:5]}... ({len(key)} characters)"  # the rest is a secret
            raise UserError(
                f"--api_key: {shown} is none: a key is {KEY_PREFIX} and 4 or more ASCII characters without spaces"
            )
    if not keys and not is_loopback(config.host):
        return (KEY_PREFIX + secrets.token_urlsafe(24),)
    return keys


def open_service(config: Config) -> "Service":
    from nanochat import device as devices
    from nanochat.ground.paths import base_dir
    from nanochat.model_folder import find_source, tag_of
    from nanochat.train_service.service import Limits, Service
    from nanochat.train_service.tenants import Base

    source = find_source(config.source, config.model_tag)
    base = Base(source, devices.init(config.device, config.dtype))
    stage = base.meta["stage"]
    name = config.name or (tag_of(source) if stage == "hf" else f"nanochat-{tag_of(source)}-{stage}")
    folder = config.folder or base_dir() / "service" / name
    limits = Limits(
        slots=config.slots, batch_tokens=config.batch_tokens, models=config.models, snapshot_steps=SNAPSHOT_STEPS,
        owner_bytes=int(config.owner_gb * 1e9),
    )  # fmt: skip
    return Service(base, folder, name, limits)


if __name__ == "__main__":
    run(main, Config)
