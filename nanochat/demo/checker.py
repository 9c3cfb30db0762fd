"""Grades stories for coherence, from the text alone: the demo's measure of what a model has learned.

The checker uses the grammar of the corpus but not its draws. It works in three steps:

1. Each sentence is parsed into the beats it can be and the words of its roles.
2. The plot is the one that explains the most sentences in the order of its beats.
3. The roles must then agree from the first sentence to the last.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations

from nanochat.demo.plots import (
    PRONOUNS,
    SENTENCE_END,
    SLOT,
    Beat,
    Plot,
    is_pronoun,
    lexicon,
    plots,
    pronouns_of,
    tables,
)

TOKEN = re.compile(r"\{\+?\w+\}|'s|[A-Za-z]+|\S")  # a slot, a word or a mark
STORY_ENDS = (".", "!", "?", '."', '!"', '?"')


@dataclass(frozen=True)
class StoryCheck:
    """What the checker found: `ok` when there is no problem; `plot` is empty when none was recognised."""

    ok: bool
    problems: list[str]
    plot: str = ""


@dataclass(frozen=True)
class Binding:
    """The words that a sentence puts into a slot."""

    role: str
    words: str
    may_be_new: bool  # the slot is a `{+role}`


@dataclass(frozen=True)
class Reading:
    """One way to understand a sentence."""

    beats: frozenset[tuple[str, int]]  # (plot, index of the beat)
    bindings: tuple[Binding, ...]


def cut_to_story(text: str) -> str:
    """The first story of a sample: up to a line break, a special token, or the next "Once upon a time"."""
    text = text.strip().split("\n", 1)[0]
    text = text.split("<|", 1)[0]
    text = text.split(" Once upon a time", 1)[0]
    return text.strip()


def check_story(text: str) -> StoryCheck:
    """Grade the first story of `text`.

    Each sentence must parse and fit its place in one plot; every role keeps its words; pronouns agree; nobody is
    mentioned before appearing; the help fits the trouble; the story has an end, and no sentence occurs twice.
    """
    text = cut_to_story(text)
    if not text:
        return StoryCheck(False, ["there is no story"])
    problems: list[str] = []
    sentences = SENTENCE_END.split(text)
    if not text.endswith(STORY_ENDS):
        problems.append(f"stops unfinished: {sentences.pop()!r}")
    for sentence in dict.fromkeys(sentences):
        if sentences.count(sentence) > 1:
            problems.append(f"repeats: {sentence!r}")

    # 1. Parse the sentences.
    readings = [_read_sentence(sentence) for sentence in sentences]
    for sentence, options in zip(sentences, readings, strict=True):
        if not options:
            problems.append(f"does not parse: {sentence!r}")

    # 2. Find the plot, and the beat of each sentence.
    candidates: set[str] = set()
    for options in readings:
        for reading in options:
            candidates.update(name for name, _ in reading.beats)
    if not candidates:
        return StoryCheck(False, problems or ["there is no story"])
    beats_by_plot = {name: _assign_beats(name, readings) for name in sorted(candidates)}
    plot = plots()[max(beats_by_plot, key=lambda name: len(beats_by_plot[name]))]
    beat_of = beats_by_plot[plot.name]  # sentence -> beat
    for number, sentence in enumerate(sentences):
        if readings[number] and number not in beat_of:
            problems.append(f"out of place: {sentence!r}")
    present = list(beat_of.values())
    for index, beat in enumerate(plot.beats):
        if index not in present and not beat.optional:
            problems.append(f"leaves out the {beat.name}")
        if present.count(index) > _most_sentences(beat):
            problems.append(f"repeats the {beat.name}")

    # 3. Follow the roles through the story. Of several readings the one with the fewest problems counts.
    facts: dict[str, str] = {}
    for number, index in beat_of.items():
        options = [reading for reading in readings[number] if (plot.name, index) in reading.beats]
        outcomes = [_follow(facts, reading.bindings) for reading in options]
        found, facts = min(outcomes, key=lambda outcome: len(outcome[0]))
        problems += found
    problems += _misfits(plot, facts)
    return StoryCheck(not problems, problems, plot.name)


def _most_sentences(beat: Beat) -> int:
    """Sentences of the beat's longest telling."""
    return max(len(SENTENCE_END.split(telling)) for telling in beat.tellings)


def _assign_beats(plot: str, readings: Sequence[Sequence[Reading]]) -> dict[int, int]:
    """Give as many sentences as possible a beat of the plot, such that the beats never go backwards.

    Returns sentence -> beat. This is the longest non-decreasing subsequence: `best[b]` is the longest assignment so
    far whose last beat is b.
    """
    best: dict[int, dict[int, int]] = {-1: {}}
    for number, options in enumerate(readings):
        indices: set[int] = set()
        for reading in options:
            indices.update(index for name, index in reading.beats if name == plot)
        for index in sorted(indices, reverse=True):  # so that a sentence does not follow itself
            before = max((best[last] for last in best if last <= index), key=len)
            extended = {**before, number: index}
            best[index] = max(best.get(index, {}), extended, key=len)
    return max(best.values(), key=len)


def _follow(facts: dict[str, str], bindings: Sequence[Binding]) -> tuple[list[str], dict[str, str]]:
    """What is wrong with a sentence's roles, given the roles so far; and the roles after it."""
    facts = dict(facts)
    problems: list[str] = []
    for binding in bindings:
        role, words = binding.role, binding.words
        if is_pronoun(role):
            name = facts.get("friend" if role.startswith("friend_") else "hero", "")
            if name and words not in pronouns_of(name).values():
                problems.append(f"calls {name} {words!r}")
        elif role in facts and facts[role] != words:
            problems.append(f"the {_label(role)} changes from {facts[role]!r} to {words!r}")
        elif role not in facts and not binding.may_be_new:
            problems.append(f"the {_label(role)} {words!r} was never introduced")
        else:
            facts[role] = words
    return problems, facts


def _misfits(plot: Plot, facts: dict[str, str]) -> list[str]:
    """Roles that do not go together: one word in two roles that must differ, or words of different rows."""
    problems: list[str] = []
    for draw in plot.draws:
        for other in draw.unlike:
            if draw.role in facts and facts[draw.role] == facts.get(other):
                problems.append(f"{facts[other]!r} is both {_label(other)} and {_label(draw.role)}")
    known = [role for role in plot.rows[0] if role in facts] if plot.rows else []
    for one, other in combinations(known, 2):
        if not any(row[one] == facts[one] and row[other] == facts[other] for row in plot.rows):
            problems.append(f"the {_label(other)} {facts[other]!r} does not fit the {_label(one)} {facts[one]!r}")
    return problems


def _label(role: str) -> str:
    return role.rstrip("23").replace("_", " ")


# ---------------------------------------------------------------------- parsing


@dataclass
class Node:
    """A step in reading a sentence: which words or slots may come next, and which beats may end here."""

    words: dict[str, "Node"] = field(default_factory=dict)
    slots: dict[tuple[str, bool], "Node"] = field(default_factory=dict)  # (role, may be new)
    beats: set[tuple[str, int]] = field(default_factory=set)  # (plot, index of the beat)


def _read_sentence(sentence: str) -> list[Reading]:
    """Every way to understand a sentence."""
    if not (sentence[0] == '"' or sentence[0].isupper()) or "  " in sentence:
        return []
    tokens = tuple(_tokens(sentence))
    readings: list[Reading] = []

    def walk(node: Node, position: int, bindings: tuple[Binding, ...]) -> None:
        if position == len(tokens):
            if node.beats:
                readings.append(Reading(frozenset(node.beats), bindings))
            return
        token = tokens[position]
        if token in node.words:
            walk(node.words[token], position + 1, bindings)
        for (role, may_be_new), after in node.slots.items():
            for words in _slot_words()[role].get(token, ()):
                end = position + len(words)
                if tokens[position:end] == words:
                    walk(after, end, (*bindings, Binding(role, " ".join(words), may_be_new)))

    walk(_sentence_tree(), 0, ())
    return readings


@cache
def _sentence_tree() -> Node:
    """All tellings of all plots as one tree of words and slots: tellings with the same beginning share its nodes."""
    root = Node()
    for plot in plots().values():
        for index, beat in enumerate(plot.beats):
            for telling in beat.tellings:
                for sentence in SENTENCE_END.split(telling):
                    _leaf_of(root, sentence).beats.add((plot.name, index))
    return root


def _leaf_of(node: Node, sentence: str) -> Node:
    """The node at the end of a sentence of the grammar; makes the nodes that are not there yet."""
    for token in _tokens(sentence):
        slot = SLOT.fullmatch(token)
        if slot is None:
            node = node.words.setdefault(token, Node())
        else:
            new, role = slot.groups()
            role = role.lower() if is_pronoun(role) else role
            node = node.slots.setdefault((role, bool(new)), Node())
    return node


@cache
def _slot_words() -> dict[str, dict[str, list[tuple[str, ...]]]]:
    """role -> first token -> the token sequences that a slot of this role may hold, over all plots."""
    choices: dict[str, set[str]] = {}
    for plot in plots().values():
        for draw in plot.draws:
            choices.setdefault(draw.role, set()).update(draw.words)
        for row in plot.rows:
            for role, words in row.items():
                choices.setdefault(role, set()).add(words)
    for case in ("he", "him", "his"):
        both = {PRONOUNS["he"][case], PRONOUNS["she"][case]}
        choices[case] = both
        choices[f"friend_{case}"] = both

    table: dict[str, dict[str, list[tuple[str, ...]]]] = {}
    for role, texts in choices.items():
        table[role] = {}
        for tokens in sorted(tuple(TOKEN.findall(text)) for text in texts):
            table[role].setdefault(tokens[0], []).append(tokens)
    return table


@cache
def _openers() -> list[list[str]]:
    """The words that may open any sentence, as tokens."""
    return [opener.split() for opener in _phrases("openers")]


@cache
def _phrases(table: str) -> list[str]:
    return ", ".join(tables()[table].split("\n")).strip(", ").split(", ")


def _tokens(sentence: str) -> list[str]:
    """Words and marks without openers, fillers and the closing mark; the first word in lower case unless a name."""
    tokens = [token for token in TOKEN.findall(sentence) if token not in _phrases("fillers")]
    if tokens and tokens[0] not in lexicon()["hero"] and not SLOT.fullmatch(tokens[0]):
        tokens[0] = tokens[0].lower()
    while opener := _opener_of(tokens):
        tokens = tokens[len(opener) :]
        if tokens[:1] == [","]:
            tokens = tokens[1:]
    if tokens and tokens[-1] in ".!":
        tokens.pop()
    return tokens


def _opener_of(tokens: list[str]) -> list[str] | None:
    return next((opener for opener in _openers() if tokens[: len(opener)] == opener), None)
