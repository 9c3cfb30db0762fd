"""Where runs live: every folder the project writes to, below one base folder.

`NANOCHAT_BASE_DIR` moves the base folder; its default is `~/.cache/nanochat`.
"""

import contextlib
import errno
import fcntl
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from nanochat.ground.cli import UserError
from nanochat.ground.untrusted import require_file

# Each stage and the script that makes its checkpoints, in the order in which they are trained.
SCRIPTS = {
    "base": "base_train", "mid": "mid_train", "sft": "chat_sft", "rm": "chat_dpo --loss reward", "dpo": "chat_dpo",
    "rl": "chat_rl",
}  # fmt: skip
TRAINING_SCRIPTS = {script.partition(" ")[0] for script in SCRIPTS.values()}
# The stages of a chat model. A reward model judges replies, and writes none.
STAGES = {stage: script for stage, script in SCRIPTS.items() if stage != "rm"}


def base_dir() -> Path:
    """The base folder, read from the environment at each call."""
    return Path(os.environ.get("NANOCHAT_BASE_DIR") or Path.home() / ".cache" / "nanochat").expanduser()


def tokenizer_dir() -> Path:
    return base_dir() / "tokenizer"


def checkpoint_dir(stage: str, tag: str) -> Path:
    """`checkpoints/<stage>/<tag>`: holds `step_<n>/` folders."""
    return base_dir() / "checkpoints" / stage / safe_tag(tag)


def run_dir(stage: str, tag: str) -> Path:
    """`runs/<stage>/<tag>`: holds `metrics.jsonl`."""
    return base_dir() / "runs" / stage / safe_tag(tag)


PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]{0,99}")  # a folder or file that stays in its parent folder


def safe_tag(tag: str) -> str:
    """The tag itself, if it is one plain folder name.

    Raises UserError: for anything that could leave its folder (`..`, a slash, a leading dot).
    """
    if not PLAIN_NAME.fullmatch(tag):
        hint = "use letters, digits, '_', '-', '.' (at most 100)"
        raise UserError(f"--model_tag {tag!r} is not a plain folder name: {hint}")
    return tag


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError in the block: errors of write, flush and close lack it."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


_locks: dict[Path, IO[str]] = {}  # held by this process


def lock(folder: Path, flag: str = "--model_tag") -> None:
    """Keep other processes out of a run's folder until `unlock`, or until this process ends.

    Raises UserError: when another process trains there; `flag` chooses another folder.
    """
    if folder in _locks:
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    handle = open_lock(folder.parent / f".{folder.name}.lock")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        handle.seek(0)
        raise UserError(
            f"{handle.read().strip() or 'another process'} trains in {folder}: wait for it, or give another {flag}"
        ) from error
    except OSError as error:
        handle.close()
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
            raise
        return  # a file system without locks
    handle.truncate(0)
    handle.write(f"process {os.getpid()} on {socket.gethostname()}")
    handle.flush()
    _locks[folder] = handle


def open_lock(path: Path) -> IO[str]:
    """Open a file for `flock`, and create it if it is missing.

    Raises UserError: when it is a link: its author would choose a file for us to overwrite.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        require_file(path)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno != errno.ELOOP:
            raise
        raise UserError(f"{path} is a link or no regular file, and locks of runs are neither: remove it") from error
    return os.fdopen(handle, "r+", encoding="utf-8")


def unlock(folder: Path) -> None:
    with contextlib.suppress(KeyError, OSError):  # it was not locked; or it is closed all the same
        _locks.pop(folder).close()
