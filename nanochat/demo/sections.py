"""Reads the text files in this folder: the words and sentences from which the demo makes its examples.

A file has sections, each under its name in brackets. What is before the first one, and each line that begins with `#`,
is a comment.

    [agreements]
    Yes, please!
    Go ahead.

    [fact colour]
    said   My favourite colour is {shade}.
           I like the colour {shade}.
    known  Your favourite colour is {shade}

A section is a list of lines, or a list of entries. An entry begins at the margin with its name, up to two spaces; the
rest of the line and the indented lines below are the lines of the entry.
"""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path


@cache
def sections(file: str) -> dict[str, list[str]]:
    """The lines of each section of a file, by its name."""
    text = Path(__file__).with_name(file).read_text(encoding="utf-8")
    _, *parts = re.split(r"^\[(.+)\]\n", text, flags=re.MULTILINE)  # comment, name, lines, name, lines, ...
    found = {}
    for name, part in zip(parts[::2], parts[1::2], strict=True):
        found[name] = [line for line in part.split("\n") if line and not line.startswith("#")]
    return found


def entries(lines: Iterable[str]) -> dict[str, list[str]]:
    """The lines of each entry, by its name. Entries of one name are joined."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in lines:
        if not line.startswith(" "):
            name, _, line = line.partition("  ")
        entry = found.setdefault(name, [])
        if line:
            entry.append(line.strip())
    return found


def words_of(lines: Iterable[str]) -> list[str]:
    """The words of lines with commas between."""
    return ", ".join(lines).split(", ")


@cache
def word_lists(file: str, section: str) -> dict[str, list[str]]:
    """The words of each entry of a section."""
    return {name: words_of(lines) for name, lines in entries(sections(file)[section]).items()}
