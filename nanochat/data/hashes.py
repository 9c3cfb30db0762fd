"""The sha256 of large files, kept so that a file is read once and not in every run.

A checkpoint of adapters names the weights of their base by a sha256, and a base has 15 to 65 GB. `hashes/` in the base
folder has an entry for each file, `<sha256 of its path>.json`: its hash, and facts that change when its content does,
which are size, modification time, and the number of its inode with its time of change. (`touch -d` and `cp -p` restore
the modification time, but not the other one.) If a fact has changed, the file is read again.

Only weights in other programs' folders are kept here: such folders hold no hashes. Our checkpoints have a
manifest, and are compared with it whenever they are loaded, because damage on a disk changes none of these facts.
"""

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from nanochat.ground import screen, storage
from nanochat.ground.paths import base_dir


def sha256(path: Path) -> str:
    """The hash of a file: the one that is kept, or the one of its bytes, which is then kept."""
    before = _facts(path)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # no entry, or a damaged one
        entry = json.loads(_entry_of(path).read_text(encoding="utf-8"))
        if {name: entry[name] for name in before} == before:
            return str(entry["sha256"])
    with screen.Bar(f"hashing {path.name}"):
        digest = storage.sha256(path)
    if _facts(path) == before:  # nobody has written to it meanwhile
        keep(path, digest)
    return digest


def keep(path: Path, digest: str) -> None:
    """Keep the hash of a file as it is now."""
    entry = _entry_of(path)
    unfinished = entry.with_suffix(f".{os.getpid()}.tmp")
    with contextlib.suppress(OSError):  # no room, or a folder that is only read: the file is hashed again next time
        entry.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps({**_facts(path), "sha256": digest}), encoding="utf-8")
        unfinished.replace(entry)


def _entry_of(path: Path) -> Path:
    name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
    return base_dir() / "hashes" / f"{name}.json"


def _facts(path: Path) -> dict[str, Any]:
    found = path.stat()
    return {
        "path": str(path.resolve()), "bytes": found.st_size, "modified_ns": found.st_mtime_ns,
        "changed_ns": found.st_ctime_ns, "inode": found.st_ino,
    }  # fmt: skip
