"""Which code computed a result: the versions of the installed packages, and the commit of a checkout."""

import contextlib
import functools
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path


@functools.cache  # it reads the metadata of every package
def versions() -> dict[str, str]:
    """The versions of Python, nanochat and torch, and of torch's package for an accelerator; nothing is imported."""
    found = {"Python": platform.python_version()}
    for package in metadata.distributions():
        name = package.metadata["Name"] or ""
        if re.split("[-_]", name)[0] in ("nanochat", "torch"):
            found[name] = package.version
    return found


def commit() -> str:
    """The commit of this checkout, with `-dirty` if files differ from it; "unknown" outside a git repository."""
    root = Path(__file__).resolve().parents[2]
    git = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--exclude=*"]
    if (root / ".git").exists():
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # no git
            done = subprocess.run(git, cwd=root, capture_output=True, text=True, timeout=10, check=True)
            return done.stdout.strip()
    return "unknown"
