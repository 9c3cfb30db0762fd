"""Code of the user that a flag names: `file.py:NAME`, a function or a class.

It runs with the user's rights, like a script: name only files that you would run yourself.
"""

import contextlib
import hashlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanochat.ground import cli
from nanochat.ground.cli import Failed, UserError

PLACE = re.compile(r"(?P<path>[^:]+\.py):(?P<name>[A-Za-z_]\w*)")
_files: set[str] = set()  # that have been loaded


def load(flag: str, place: str) -> Any:
    """The object that `file.py:NAME` names. A file runs once, and may import its neighbours.

    Raises UserError: when the file or the name is missing, or the file fails; `flag` is for the message.
    """
    match = PLACE.fullmatch(place)
    assert match is not None
    path = Path(match["path"]).expanduser().resolve()
    if not path.is_file():
        raise UserError(f"{flag} {place}: no file {match['path']} here")
    name = f"user code {path}"  # not the name of any other module
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # a dataclass looks its module up while it is made
        _files.add(str(path))
        cli.explainers.add(explain)
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            raise UserError(f"{flag} {place}: {explain(error) or error}") from error
    found = getattr(sys.modules[name], match["name"], None)
    if found is None:
        names = [name for name, value in vars(sys.modules[name]).items() if callable(value) and name[0] != "_"]
        raise UserError(f"{flag} {place}: the file has no {match['name']}, it has {', '.join(names) or 'nothing'}")
    return found


def fingerprint(place: str) -> str:
    """The sha256 of the file of `file.py:NAME`."""
    return hashlib.sha256(Path(place.rpartition(":")[0]).expanduser().read_bytes()).hexdigest()


@contextlib.contextmanager
def failures() -> Iterator[None]:
    """Raises Failed: for an exception of a loaded file."""
    try:
        yield
    except (Exception, SystemExit) as error:
        problem = explain(error)
        if problem is None or isinstance(error, Failed):
            raise
        raise Failed(problem) from error


def explain(error: BaseException) -> str | None:
    """One line for an exception of a loaded file, with the line of the file that failed; None for other exceptions."""
    problem = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename in _files:
        return f"{Path(error.filename).name}:{error.lineno} `{(error.text or '').strip()}`: {problem}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in _files]
    if not frames:
        return None
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno} `{frames[-1].line}`: {problem}"
