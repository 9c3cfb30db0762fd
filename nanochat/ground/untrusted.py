"""Protection from hostile input: files that never end or fill the memory, text that commands a terminal."""

import json
import re
import stat
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 16 << 20  # a vocabulary of 262,144 tokens takes 6 MB; much larger lists take 500 MB as objects
# Control characters but line end and tab, and those that reverse the direction of the text after them.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def require_file(path: Path) -> None:
    """Raises ValueError: for a pipe or a device, whose reader waits or reads for ever. A link to a file is one."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is no regular file")


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES, max_values: int | None = None) -> Any:
    """The content of a JSON file.

    Raises ValueError: when it is not a regular file, too large, not JSON, or nested too deeply.
    """
    text = read_text(path, max_bytes)
    # A value follows a comma or a bracket. Those in texts count too, and are few.
    if max_values is not None and sum(text.count(mark) for mark in ",[{") > max_values:
        raise ValueError(f"it has more than {max_values:,} values")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def json_of(text: str | bytes) -> Any:
    """The value of a text that is JSON; None for any other text, also for one that is nested too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def read_text(path: Path, max_bytes: int) -> str:
    """The content of a text file. Raises ValueError: when it is not a regular file, too large, or not UTF-8."""
    require_file(path)
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"it has more than {max_bytes:,} bytes")
    return data.decode("utf-8")


def printable(text: str) -> str:
    r"""The text for a terminal, which shows control characters instead of obeying them.

    A model, a file name or an answer from a hub could clear the screen, rename the window or type into the shell.
    `\x1b[2J` is printed as these seven characters.
    """
    return CONTROL.sub(lambda match: repr(match[0])[1:-1], text.replace("\r\n", "\n"))
