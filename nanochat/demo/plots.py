"""Reads the tables of `grammar.txt`: the words of each role, and each plot with its beats.

Terms: a *role* is something a story speaks of (`hero`, `kind`, `tool`, ...); a *beat* is one step of a plot (want,
trouble, help, thanks, ...); a *telling* is one way to write a beat, with slots for the roles.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

NAME_COLUMN = 14  # characters; the width of a table's left column

PRONOUNS = {
    "she": {"he": "she", "him": "her", "his": "her", "He": "She", "His": "Her"},
    "he": {"he": "he", "him": "him", "his": "his", "He": "He", "His": "His"},
}
SAME_WORDS = {"friend": "hero", "friend_kind": "kind", "wear_colour": "colour"}  # role -> whose words it takes

SLOT = re.compile(r"\{(\+?)(\w+)\}")  # {role}, or {+role} where the role may first appear
CHOICE = re.compile(r"\(([^()]*)\)")  # (one|other)
SENTENCE_END = re.compile(r"""(?<=[.!?])\s+(?=["A-Z{])|(?<=[.!?]")\s+(?=["A-Z{])""")


@dataclass(frozen=True)
class Beat:
    """One step of a plot."""

    name: str
    optional: bool  # a story may leave it out
    tellings: tuple[str, ...]  # every choice spelled out; the slots keep their `+`
    introduces: frozenset[str]  # the roles that appear here for the first time


@dataclass(frozen=True)
class Draw:
    """A role that is drawn by itself, not as part of a row."""

    role: str
    words: tuple[str, ...]
    unlike: tuple[str, ...]  # roles over the same words that must hold another one


@dataclass(frozen=True)
class Plot:
    """One plot of the grammar."""

    name: str
    key: tuple[str, ...]  # the roles that decide the split: kind of hero, want, obstacle, place
    rows: tuple[dict[str, str], ...]  # words that fit together: a story takes one row
    beats: tuple[Beat, ...]
    draws: tuple[Draw, ...]
    questions: tuple[tuple[str, str], ...]  # (question, answer), with slots


@cache
def tables() -> dict[str, str]:
    """The tables of the grammar by name: `lexicon`, `opening`, `plot quest`, ..."""
    text = Path(__file__).with_name("grammar.txt").read_text(encoding="utf-8")
    _, *sections = re.split(r"^\[(.+)\]\n", text, flags=re.MULTILINE)  # comment, name, table, name, table, ...
    return dict(zip(sections[::2], sections[1::2], strict=True))


@cache
def plots() -> dict[str, Plot]:
    """The plots by name."""
    found: dict[str, Plot] = {}
    for title, table in tables().items():
        if title.startswith("plot "):
            name = title.removeprefix("plot ")
            found[name] = _read_plot(name, table)
    return found


@cache
def lexicon() -> dict[str, tuple[str, ...]]:
    """The words that each role may hold. Roles with the same words share one tuple: `is` compares them."""
    words: dict[str, tuple[str, ...]] = {}
    for role, lines in _read_columns(tables()["lexicon"]).items():
        words[role] = tuple(", ".join(lines).split(", "))
    words["hero"] = words["she"] + words["he"]
    return words


def pronouns_of(name: str) -> dict[str, str]:
    """The pronouns of a hero or a friend, by the case in which the grammar writes them."""
    return PRONOUNS["she" if name in lexicon()["she"] else "he"]


def is_pronoun(role: str) -> bool:
    """Whether a slot holds a pronoun: `{He}`, `{friend_his}`, ..."""
    return role.removeprefix("friend_").lower() in ("he", "him", "his")


def _read_columns(table: str) -> dict[str, list[str]]:
    """Left column -> lines of the right column. A name holds until the next one."""
    columns: dict[str, list[str]] = {}
    name = ""
    for line in table.splitlines():
        name = line[:NAME_COLUMN].strip() or name
        if line[NAME_COLUMN:]:
            columns.setdefault(name, []).append(line[NAME_COLUMN:])
    return columns


def _read_plot(name: str, table: str) -> Plot:
    columns = _read_columns(tables()["opening"] + table + tables()["ending"] + tables()["questions"])
    want, obstacle, place = columns.pop("key")[0].split()
    rows = tuple(_read_rows(columns.pop("rows", [])))
    questions = []
    for line in columns.pop("questions"):
        question, _, answer = line.partition(" | ")
        questions.append((question, answer))
    beats = tuple(_read_beat(title, lines) for title, lines in columns.items())  # all other entries are beats

    roles: set[str] = set()
    for beat in beats:
        for telling in beat.tellings:
            roles.update(role for _, role in SLOT.findall(telling) if not is_pronoun(role))
    if rows:
        roles -= rows[0].keys()
    draws: list[Draw] = []
    for role in sorted(roles):  # sorted: the order of the draws is part of what a seed means
        words = lexicon()[SAME_WORDS.get(role) or role.rstrip("23")]
        unlike = tuple(earlier.role for earlier in draws if earlier.words is words)
        draws.append(Draw(role, words, unlike))
    return Plot(name, ("kind", want, obstacle, place), rows, beats, tuple(draws), tuple(questions))


def _read_rows(lines: Sequence[str]) -> Iterator[dict[str, str]]:
    """One row for each combination of the words that a line offers."""
    if not lines:
        return
    roles = lines[0].split(" | ")
    for line in lines[1:]:
        cells = [cell.split(", ") for cell in line.split(" | ")]
        for words in product(*cells):
            yield dict(zip(roles, words, strict=True))


def _read_beat(title: str, lines: Sequence[str]) -> Beat:
    tellings: list[str] = []
    introduces: set[str] = set()
    for line in lines:
        tellings += _spell_out(line)
        introduces.update(role for new, role in SLOT.findall(line) if new)
    return Beat(title.rstrip("?"), title.endswith("?"), tuple(tellings), frozenset(introduces))


def _spell_out(line: str) -> list[str]:
    """Every way through the `(one|other)` choices of a line."""
    options: list[list[str]] = []
    for index, part in enumerate(CHOICE.split(line)):  # plain text and choices in turn
        options.append(part.split("|") if index % 2 == 1 else [part])
    return ["".join(parts) for parts in product(*options)]
