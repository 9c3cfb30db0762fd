"""Reads the tables of `grammar.txt`: the words of each role, and each plot with its beats.

Terms: a *role* is something a story speaks of (`hero`, `kind`, `tool`, ...); a *beat* is one step of a plot (want,
trouble, help, thanks, ...); a *telling* is one way to write a beat, with slots for the roles.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, product

from nanochat.demo.sections import entries, sections, word_lists

GRAMMAR = "grammar.txt"

PRONOUNS = {
    "she": {"he": "she", "him": "her", "his": "her", "He": "She", "His": "Her"},
    "he": {"he": "he", "him": "him", "his": "his", "He": "He", "His": "His"},
}
SAME_WORDS = {"friend": "hero", "friend_kind": "kind", "wear_colour": "colour"}  # role -> whose words it takes

OPEN_ROLES = ("hero", "friend", "kind", "friend_kind", "trait", "love")  # may hold words that are in no table

SLOT = re.compile(r"\{(\+?)(\w+)\}")  # {role}, or {+role} where the role may first appear
CHOICE = re.compile(r"\(([^()]*)\)")  # (one|other)
SENTENCE_END = re.compile(r"""(?<=[.!?])\s+(?=["A-Z{])|(?<=[.!?]")\s+(?=["A-Z{])""")


@dataclass(frozen=True)
class Beat:
    """One step of a plot."""

    name: str
    optional: bool  # a story may leave it out
    tellings: tuple[str, ...]  # every choice spelled out; the slots keep their `+`


@dataclass(frozen=True)
class Draw:
    """A role that is drawn separately, not as part of a row."""

    role: str
    words: tuple[str, ...]
    unlike: tuple[str, ...]  # roles over the same words that must hold another one


@dataclass(frozen=True)
class Plot:
    """One plot of the grammar."""

    name: str
    key: tuple[str, ...]  # the roles that decide the split: kind of hero, want, obstacle, place
    rows: list[dict[str, str]]  # words that fit together: a story takes one row
    beats: tuple[Beat, ...]
    draws: tuple[Draw, ...]
    questions: list[list[str]]  # question and answer, with slots


@cache
def plots() -> dict[str, Plot]:
    found = [_read_plot(title) for title in sections(GRAMMAR) if title.startswith("plot ")]
    return {plot.name: plot for plot in found}


@cache
def lexicon() -> dict[str, tuple[str, ...]]:
    """The words that each role may hold. Roles with the same words share one tuple: `is` compares them."""
    words = {role: tuple(found) for role, found in word_lists(GRAMMAR, "lexicon").items()}
    words["hero"] = words["she"] + words["he"]
    return words


@cache
def words_in_use() -> frozenset[str]:
    """Every word of the grammar in lower case, names included."""
    return frozenset(re.findall("[a-z]+", " ".join(chain(*sections(GRAMMAR).values())).lower()))


@cache
def story_words() -> tuple[str, ...]:
    """The words of three letters or more in stories, without names and the words held out of all documents."""
    others = ("openers", "fillers", "questions")
    found = [entries(lines) for name, lines in sections(GRAMMAR).items() if name not in others]
    text = " ".join(line for section in found for lines in section.values() for line in lines)
    text = re.sub(r"\{\+?\w+\}", " ", text)  # without slots
    return tuple(sorted(set(re.findall(r"\b[a-z]{3,}\b", text)) - {*lexicon()["new kind"], *lexicon()["new trait"]}))


def gender_of(name: str) -> str | None:
    """Whose pronouns a hero or a friend has, "she" or "he"; None for a name that no table has."""
    for pronoun in PRONOUNS:
        if any(name in lexicon()[row] for row in (pronoun, f"rare {pronoun}")):
            return pronoun
    return None


def pronouns_of(name: str) -> dict[str, str]:
    """The pronouns of a hero or a friend, by the case in which the grammar writes them.

    A name that no table has is a girl's where it ends as most girls' names do.
    """
    return PRONOUNS[gender_of(name) or ("she" if name[-1] in "aei" else "he")]


def is_pronoun(role: str) -> bool:
    """Whether a slot holds a pronoun: `{He}`, `{friend_his}`, ..."""
    return role.removeprefix("friend_").lower() in ("he", "him", "his")


def _read_plot(title: str) -> Plot:
    columns = entries(chain(*(sections(GRAMMAR)[part] for part in ("opening", title, "ending", "questions"))))
    want, obstacle, place = columns.pop("key")[0].split()
    rows = _read_rows(columns.pop("rows", []))
    questions = [line.split(" | ") for line in columns.pop("questions")]
    beats = tuple(_read_beat(title, lines) for title, lines in columns.items())  # all other entries are beats

    # Slots outside of the rows are drawn separately. Sorted: the order of the draws is part of what a seed means.
    slots = SLOT.findall(" ".join(telling for beat in beats for telling in beat.tellings))
    roles = {role for _, role in slots if not is_pronoun(role)}
    draws: list[Draw] = []
    for role in sorted(roles.difference(*rows)):
        words = lexicon()[SAME_WORDS.get(role) or role.rstrip("23")]
        unlike = tuple(earlier.role for earlier in draws if earlier.words is words)
        draws.append(Draw(role, words, unlike))
    return Plot(title.removeprefix("plot "), ("kind", want, obstacle, place), rows, beats, tuple(draws), questions)


def _read_rows(lines: Sequence[str]) -> list[dict[str, str]]:
    """One row for each combination of the words that a line offers; the first line names the roles."""
    rows = []
    for line in lines[1:]:
        cells = [cell.split(", ") for cell in line.split(" | ")]
        rows += [dict(zip(lines[0].split(" | "), words, strict=True)) for words in product(*cells)]
    return rows


def _read_beat(title: str, lines: Sequence[str]) -> Beat:
    tellings: list[str] = []
    for line in lines:
        # Spell out every way through the `(one|other)` choices: the parts are plain text and choices in turn.
        options = [part.split("|") for part in CHOICE.split(line)]
        tellings += ["".join(parts) for parts in product(*options)]
    return Beat(title.rstrip("?"), title.endswith("?"), tuple(tellings))
