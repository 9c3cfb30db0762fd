"""Grades stories for coherence, from nothing but the text: the demo's measure of what a model has learned.

The checker uses the grammar of the corpus but not its draws. It works in three steps:

1. Each sentence is matched with the sentences of the grammar: which beats can it be, with which words in its slots?
2. The plot is the one that explains the most sentences in the order of its beats.
3. The roles must then agree from the first sentence to the last.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations

from nanochat.demo.plots import (
    GRAMMAR,
    OPEN_ROLES,
    PRONOUNS,
    SENTENCE_END,
    SLOT,
    Plot,
    gender_of,
    is_pronoun,
    lexicon,
    plots,
)
from nanochat.demo.sections import sections, words_of

TOKEN = re.compile(r"\{\+?\w+\}|'s|[A-Za-z]+|\S")  # a slot, a word or a mark
# What the open roles may hold.
A_NAME = "[A-Z][a-z]+"
A_KIND = "[a-z]+(?: [a-z]+)?"
ANY_WORDS = {"hero": A_NAME, "friend": A_NAME, "kind": A_KIND, "friend_kind": A_KIND, "trait": "[a-z]+"}
ANY_WORDS["love"] = "[a-z]+(?: [a-z]+){0,2}"
WRONG_ARTICLE = re.compile(r"\b[Aa] (?=[aeiou](?!ni))|\b[Aa]n (?![aeiou]|hour)")
STORY_ENDS = (".", "!", "?", '."', '!"', '?"')


@dataclass(frozen=True)
class StoryCheck:
    """The checker's result: `ok` without a problem; `plot` is empty when none was recognised."""

    ok: bool
    problems: list[str]
    plot: str = ""
    facts: dict[str, str] = field(default_factory=dict)  # role -> its words, as the story tells them


@dataclass(frozen=True)
class Template:
    """A sentence of the grammar."""

    pattern: re.Pattern[str]  # matches normalised sentences; a group for each slot
    slots: list[tuple[str, str]]  # ("+" where the role may be new, role)
    beats: set[tuple[str, int]]  # (plot, index of the beat)


# One way to understand a sentence: as this template, with these words in its slots.
Reading = tuple[Template, Sequence[str]]


def cut_to_story(text: str) -> str:
    """The first story of a sample: up to a line break, a special token, or the next "Once upon a time"."""
    return re.split(r"\n|<\|| Once upon a time", text.strip())[0].strip()


def check_story(text: str, known: Collection[str] = ()) -> StoryCheck:
    """Grade the first story of `text`.

    Each sentence must parse and fit its place in one plot; every role keeps its words; pronouns agree; nobody is
    mentioned before appearing; the help fits the trouble; the story has an end, and no sentence occurs twice.
    Anybody may have any name. A kind, a trait and what somebody loves are words of the grammar, or one of `known`: what
    the order asked for.
    """
    text = cut_to_story(text)
    if not text:
        return StoryCheck(False, ["there is no story"])
    problems: list[str] = []
    sentences = SENTENCE_END.split(text)
    if not text.endswith(STORY_ENDS):
        problems.append(f"stops unfinished: {sentences.pop()!r}")
    problems += [f"repeats: {sentence!r}" for sentence, count in Counter(sentences).items() if count > 1]

    # 1. Match the sentences with the grammar.
    readings = [_read_sentence(sentence) for sentence in sentences]
    problems += [f"does not parse: {sentences[number]!r}" for number, found in enumerate(readings) if not found]

    # 2. Find the plot, and the beat of each sentence.
    beats_by_plot = {name: _assign_beats(name, readings) for name in sorted(plots())}
    plot = plots()[max(beats_by_plot, key=lambda name: len(beats_by_plot[name]))]
    beat_of = beats_by_plot[plot.name]  # sentence -> beat
    if not beat_of:
        return StoryCheck(False, problems or ["there is no story"])
    for number, sentence in enumerate(sentences):
        if readings[number] and number not in beat_of:
            problems.append(f"out of place: {sentence!r}")
    present = Counter(beat_of.values())
    for index, beat in enumerate(plot.beats):
        if not present[index] and not beat.optional:
            problems.append(f"leaves out the {beat.name}")
        if present[index] > max(len(SENTENCE_END.split(telling)) for telling in beat.tellings):
            problems.append(f"repeats the {beat.name}")

    # 3. Follow the roles through the story. Of several readings the one with the fewest problems counts.
    facts: dict[str, str] = {}
    for number, index in beat_of.items():
        options = [(template, words) for template, words in readings[number] if (plot.name, index) in template.beats]
        outcomes = [_follow(facts, template, words) for template, words in options]
        found, facts = min(outcomes, key=lambda outcome: len(outcome[0]))
        problems += found
    problems += _misfits(plot, facts)
    problems += [f"a wrong article: {text[match.start() :][:20]!r}" for match in WRONG_ARTICLE.finditer(text)]
    for role in ("kind", "friend_kind", "trait", "love"):
        table = role.removeprefix("friend_")
        if role in facts and facts[role] not in (*lexicon()[table], *lexicon().get(f"rare {table}", ()), *known):
            problems.append(f"the {_label(role)} {facts[role]!r} is not a word that stories use")
    roles = {role: words for role, words in facts.items() if not role.endswith(" pronoun")}
    return StoryCheck(not problems, problems, plot.name, roles)


def _assign_beats(plot: str, readings: Sequence[Sequence[Reading]]) -> dict[int, int]:
    """Give as many sentences as possible a beat of the plot, such that the beats never go backwards.

    Returns sentence -> beat. This is the longest non-decreasing subsequence: `best[b]` is the longest assignment so
    far whose last beat is b.
    """
    best: dict[int, dict[int, int]] = {-1: {}}
    for number, options in enumerate(readings):
        indices = {index for template, _ in options for name, index in template.beats if name == plot}
        for index in sorted(indices, reverse=True):  # so that a sentence does not follow itself
            before = max((best[last] for last in best if last <= index), key=len)
            extended = {**before, number: index}
            best[index] = max(best.get(index, {}), extended, key=len)
    return max(best.values(), key=len)


def _follow(facts: dict[str, str], template: Template, found: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The problems with a sentence's roles, given the roles so far; and the roles after it."""
    facts = dict(facts)
    problems: list[str] = []
    for (new, role), words in zip(template.slots, found, strict=True):
        if is_pronoun(role):
            person = "friend" if role.startswith("friend_") else "hero"
            name = facts.get(person, "")
            # Somebody whose name is in no table is what the first pronoun says.
            gender = gender_of(name) or facts.get(f"{person} pronoun")
            if not gender:
                facts[f"{person} pronoun"] = next(one for one, cases in PRONOUNS.items() if words in cases.values())
            elif name and words not in PRONOUNS[gender].values():
                problems.append(f"calls {name} {words!r}")
        elif facts.get(role, words) != words:
            problems.append(f"the {_label(role)} changes from {facts[role]!r} to {words!r}")
        elif role not in facts and not new:
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
                problems.append(f"{facts[other]!r} is said of two that must differ")
    known = [role for role in plot.rows[0] if role in facts] if plot.rows else []
    for one, other in combinations(known, 2):
        if not any(row[one] == facts[one] and row[other] == facts[other] for row in plot.rows):
            problems.append(f"the {_label(other)} {facts[other]!r} does not fit the {_label(one)} {facts[one]!r}")
    return problems


def _label(role: str) -> str:
    return role.rstrip("23").replace("_", " ").replace("adj", "adjective")


# ---------------------------------------------------------------------- parsing


def _read_sentence(sentence: str) -> list[Reading]:
    """Every way to understand a sentence."""
    if not (sentence[0] == '"' or sentence[0].isupper()) or "  " in sentence:
        return []
    sentence = _normalised(sentence)
    templates = _templates().get(sentence.partition(" ")[0], []) + _templates()[""]
    matches = [(template, template.pattern.fullmatch(sentence)) for template in templates]
    return [(template, match.groups()) for template, match in matches if match]


@cache
def _templates() -> dict[str, list[Template]]:
    """The sentences of all tellings of all plots, by each first word that they can have; "" stands for any name."""
    beats = defaultdict(set)  # sentence -> where it may occur
    for plot in plots().values():
        for index, beat in enumerate(plot.beats):
            for telling in beat.tellings:
                for sentence in SENTENCE_END.split(telling):
                    beats[_normalised(sentence)].add((plot.name, index))

    choices = _slot_words()
    templates: dict[str, list[Template]] = defaultdict(list)
    for sentence in beats:
        first, *parts = SLOT.split(sentence)  # text, "+" or "", role, text, "+" or "", role, text, ...
        slots = list(zip(parts[0::3], parts[1::3], strict=True))
        pattern = re.escape(first)
        for (_, role), text in zip(slots, parts[2::3], strict=True):
            words = ANY_WORDS.get(role) or "|".join(map(re.escape, choices[role]))
            if role in ("trait", "kind"):
                pattern = re.sub(r"\ba\\ $", r"an?\\ ", pattern)
            pattern += f"({words})" + re.escape(text)
        template = Template(re.compile(pattern), slots, beats[sentence])
        if first:
            firsts = [first]
        elif slots[0][1] in OPEN_ROLES:
            firsts = [""]
        else:
            firsts = choices[slots[0][1]]
        for word in {words.partition(" ")[0] for words in firsts}:
            templates[word].append(template)
    return templates


def _slot_words() -> dict[str, list[str]]:
    """role -> the words that a slot of this role may hold, over all plots."""
    choices: dict[str, set[str]] = defaultdict(set)
    for plot in plots().values():
        for draw in plot.draws:
            choices[draw.role].update(draw.words)
        for row in plot.rows:
            for role, words in row.items():
                choices[role].add(words)
    for pronouns in PRONOUNS.values():
        for case in ("he", "him", "his"):
            choices[case].add(pronouns[case])
            choices[f"friend_{case}"].add(pronouns[case])
    return {role: sorted(" ".join(TOKEN.findall(words)) for words in found) for role, found in choices.items()}


def _normalised(sentence: str) -> str:
    """Words and marks with a space between them, without openers, fillers and the closing mark; the first word in
    lower case unless it may be a name: no sentence of the grammar begins with it."""
    tokens = [token for token in TOKEN.findall(sentence) if token not in _phrases("fillers")]
    if tokens and (tokens[0].lower() in _first_words() or not tokens[0].isalpha()):
        tokens[0] = tokens[0].lower()
    return re.sub(r" ?[.!]$", "", _openers().sub("", " ".join(tokens)))


@cache
def _first_words() -> set[str]:
    """The words with which a sentence of the grammar may begin."""
    tellings = (telling for plot in plots().values() for beat in plot.beats for telling in beat.tellings)
    sentences = [sentence for telling in tellings for sentence in SENTENCE_END.split(telling)]
    words = {TOKEN.findall(opening)[0].lower() for opening in (*sentences, *_phrases("openers"), *_phrases("fillers"))}
    return words | {word for cases in PRONOUNS.values() for word in cases.values()}


@cache
def _openers() -> re.Pattern[str]:
    """The words that may open any sentence, as often as they follow one another."""
    return re.compile(rf"^((?:{'|'.join(_phrases('openers'))})(?: ,)?(?: |$))+")


@cache
def _phrases(section: str) -> list[str]:
    return words_of(sections(GRAMMAR)[section])
