"""The built-in `demo` corpus: short stories, questions about them and sums, without end and without a network.

A plot is a list of beats (want, trouble, help, thanks, ...) whose sentences have slots for the story's roles; the
words, the plots and what fits together are tables in `demo_grammar.py`. The generator draws the roles and fills the
slots. The checker uses the same tables but knows nothing of what was drawn: it parses each sentence into roles, finds
the plot, and then asks whether the roles agree from the first sentence to the last.

About one combination in ten (plot, kind of hero, want, obstacle, place) is told in the validation split only.
"""

import random
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations, product
from typing import Literal

from nanochat.demo.grammar import ENDING, FILLERS, LEXICON, OPENERS, OPENING, PLOTS, QUESTIONS

Split = Literal["train", "val"]

BLOCK_DOCUMENTS = 64
HELD_OUT_SHARE = 10  # one combination in this many belongs to validation
QUESTION_SHARE, NUMBER_SHARE = 0.15, 0.10  # of the documents; the rest are stories
OPTIONAL_SHARE = 0.25  # how often a beat marked `?` is told

PRONOUNS = {
    "she": {"he": "she", "him": "her", "his": "her", "He": "She", "His": "Her"},
    "he": {"he": "he", "him": "him", "his": "his", "He": "He", "His": "His"},
}
SAME_WORDS = {"friend": "hero", "friend_kind": "kind", "wear_colour": "colour"}  # a role over another role's words

SLOT = re.compile(r"\{(\+?)(\w+)\}")
CHOICE = re.compile(r"\(([^()]*)\)")
TOKEN = re.compile(r"\{\+?\w+\}|'s|[A-Za-z]+|\S")
SENTENCE_END = re.compile(r"""(?<=[.!?])\s+(?=["A-Z{])|(?<=[.!?]")\s+(?=["A-Z{])""")

# ---------------------------------------------------------------------------------------------------------------------
# Reading the tables


@dataclass(frozen=True)
class Beat:
    """One step of a plot. `tellings` keep their `{+slot}` marks; the other two are ready for `str.format_map`."""

    name: str
    optional: bool
    tellings: tuple[str, ...]
    without_habit: tuple[str, ...]  # those that do not speak of what the hero wears
    templates: tuple[str, ...]
    brings: frozenset[str]  # the roles that it brings into the story
    most_sentences: int


@dataclass(frozen=True)
class Plot:
    """One plot, ready to tell and to check. `draws` lists (role, words, earlier roles over the same words)."""

    name: str
    key: tuple[str, ...]  # kind of hero, want, obstacle, place
    rows: tuple[dict[str, str], ...]
    beats: tuple[Beat, ...]
    draws: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]
    questions: tuple[tuple[str, str], ...]


@cache
def _plots() -> dict[str, Plot]:
    return {name: _read_plot(name, table) for name, table in PLOTS.items()}


@cache
def _lexicon() -> dict[str, tuple[str, ...]]:
    """Which words the roles may hold. Every role is drawn from one shared tuple, so `is` tells same from other."""
    words = {
        name: tuple(word for line in lines for word in line.split(", ")) for name, lines in _columns(LEXICON).items()
    }
    words["hero"] = words["she"] + words["he"]
    return words


def words(role: str) -> tuple[str, ...]:
    """What a role of the stories may hold: `words("hero")`, `words("object")`, ..."""
    return _lexicon()[role]


def _columns(table: str) -> dict[str, list[str]]:
    """Left column -> lines of the right column."""
    columns: dict[str, list[str]] = {}
    name = ""
    for line in table.splitlines():
        name = line[:18].strip() or name
        if line[18:]:
            columns.setdefault(name, []).append(line[18:])
    return columns


def _read_plot(name: str, table: str) -> Plot:
    columns = _columns(OPENING + table + ENDING + QUESTIONS)
    want, obstacle, place = columns.pop("key")[0].split()
    rows = tuple(_read_rows(columns.pop("rows", [])))
    questions = tuple((ask, answer) for ask, _, answer in (line.partition(" | ") for line in columns.pop("questions")))
    beats = tuple(_read_beat(title, lines) for title, lines in columns.items())

    roles = {role for beat in beats for telling in beat.tellings for _, role in SLOT.findall(telling)}
    draws: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = []
    for role in sorted(roles - set(rows[0] if rows else ())):
        if not _is_pronoun(role):
            words = _lexicon()[SAME_WORDS.get(role) or role.rstrip("23")]
            draws.append((role, words, tuple(earlier for earlier, same, _ in draws if same is words)))
    return Plot(name, ("kind", want, obstacle, place), rows, beats, tuple(draws), questions)


def _read_rows(lines: Sequence[str]) -> Iterator[dict[str, str]]:
    roles = lines[0].split(" | ") if lines else []
    for line in lines[1:]:
        for values in product(*(cell.split(", ") for cell in line.split(" | "))):
            yield dict(zip(roles, values, strict=True))


def _read_beat(title: str, lines: Sequence[str]) -> Beat:
    tellings = tuple(telling for line in lines for telling in _choices(line))
    templates = tuple(telling.replace("{+", "{") for telling in tellings)
    without_habit = tuple(template for template in templates if "{wear}" not in template)
    brings = frozenset(role for telling in tellings for new, role in SLOT.findall(telling) if new)
    longest = max(len(SENTENCE_END.split(telling)) for telling in tellings)
    return Beat(title.rstrip("?"), title.endswith("?"), tellings, without_habit, templates, brings, longest)


def _choices(telling: str) -> Iterator[str]:
    """Every way through the `(a|b)` choices of a telling."""
    parts = CHOICE.split(telling)  # plain, choice, plain, choice, ..., plain
    for words in product(*(part.split("|") if i % 2 else [part] for i, part in enumerate(parts))):
        yield "".join(words)


def _is_pronoun(role: str) -> bool:
    return role.removeprefix("friend_").lower() in ("he", "him", "his")


# ---------------------------------------------------------------------------------------------------------------------
# Telling


@dataclass(frozen=True)
class Story:
    """A story and what was drawn for it: `facts` maps each role (`hero`, `kind`, `tool`, ...) to its words."""

    text: str
    plot: str
    facts: dict[str, str]

    @property
    def hero(self) -> str:
        return self.facts["hero"]

    @property
    def helper(self) -> str:
        """Who helps: "wise owl", a friend's name, or the family member of a plot without a helper."""
        if "helper" in self.facts:
            return f"{self.facts['adj']} {self.facts['helper']}"
        return self.facts.get("friend") or self.facts["kin"]

    @property
    def combination(self) -> tuple[str, ...]:
        """Plot, kind of hero, want, obstacle, place: what decides the split."""
        return (self.plot, *(self.facts[role] for role in _plots()[self.plot].key))

    @property
    def want(self) -> str:
        return self.combination[2]

    @property
    def obstacle(self) -> str:
        return self.combination[3]

    @property
    def place(self) -> str:
        return self.combination[4]


def held_out(*parts: object) -> bool:
    """Whether this combination belongs to validation: about one in ten, the same on every machine."""
    return zlib.crc32("|".join(map(str, parts)).encode()) % HELD_OUT_SHARE == 0


def held_out_pair(first: int, second: int) -> bool:
    """Whether sums of these two numbers, in either order, belong to validation."""
    return held_out("sum", min(first, second), max(first, second))


def story(rng: random.Random, split: Split) -> Story:
    """Draw a story whose combination belongs to `split`."""
    plots = tuple(_plots().values())
    draw = rng.random
    while True:
        plot = plots[int(draw() * len(plots))]
        facts = dict(plot.rows[int(draw() * len(plot.rows))]) if plot.rows else {}
        for role, words, others in plot.draws:
            word = words[int(draw() * len(words))]
            while others and any(facts[other] == word for other in others):
                word = words[int(draw() * len(words))]
            facts[role] = word
        if held_out(plot.name, *[facts[role] for role in plot.key]) == (split == "val"):
            break
    slots = facts | PRONOUNS[_gender(facts["hero"])]
    if "friend" in facts:
        slots |= {f"friend_{case}": word for case, word in PRONOUNS[_gender(facts["friend"])].items()}

    has_habit = False
    templates = []
    for beat in plot.beats:
        if beat.optional and draw() >= OPTIONAL_SHARE:
            for role in beat.brings:
                del facts[role]
            continue
        has_habit = has_habit or beat.name == "habit"
        choices = beat.templates if has_habit else beat.without_habit
        templates.append(choices[int(draw() * len(choices))])
    return Story(" ".join(templates).format_map(slots), plot.name, facts)


def questions(story: Story) -> list[tuple[str, str]]:
    """Every question the grammar can ask about a story, with its answer."""
    asked = _plots()[story.plot].questions
    known = [(ask, answer) for ask, answer in asked if all(r in story.facts for _, r in SLOT.findall(ask + answer))]
    return [(ask.format_map(story.facts), answer.format_map(story.facts)) for ask, answer in known]


def question_text(rng: random.Random, split: Split) -> str:
    """A story, then two to four lines `Question: ... Answer: ...` about it."""
    told = story(rng, split)
    asked = rng.sample(questions(told), 2 + int(rng.random() * 3))
    return "\n".join([told.text, *(f"Question: {question} Answer: {answer}" for question, answer in asked)])


def number_text(rng: random.Random, split: Split) -> str:
    """Six lines about numbers: sums, differences, counting, comparing, small word problems.

    A sum whose pair of numbers is held out (`held_out_pair(a, b)`) is in validation only.
    """
    return "\n".join(_number_line(rng, split) for _ in range(6))


def _number_line(rng: random.Random, split: Split) -> str:
    draw = rng.random
    while True:
        size = (10, 100, 100, 1000)[int(draw() * 4)]
        first, second = int(draw() * size), int(draw() * size)
        if held_out_pair(first, second) == (split == "val"):
            break
    total = first + second
    form = int(draw() * 10)
    if form < 3:
        return f"{first} + {second} = {total}."
    if form < 5:
        return f"{total} - {first} = {second}."
    if form == 5:
        return f"Question: What is {first} + {second}? Answer: {total}."
    if form == 6:
        name, thing = rng.choice(_lexicon()["hero"]), rng.choice(_lexicon()["object"])
        he = _gender(name)
        things = [f"{number} {thing}{'' if number == 1 else 's'}" for number in (first, second, total)]
        return f"{name} has {things[0]}. Then {he} gets {things[1]}. Now {he} has {things[2]}."
    if form == 7:
        step = (1, 2, 5, 10)[int(draw() * 4)]
        return f"Counting by {step}: {', '.join(str(first + step * i) for i in range(7))}."
    if form == 8:
        order = "less than" if first < second else "more than" if first > second else "the same as"
        return f"{first} is {order} {second}."
    return f"The number after {first} is {first + 1}, and the number before {first + 1} is {first}."


def block(index: int, split: Split, seed: int = 0) -> list[str]:
    """The `BLOCK_DOCUMENTS` documents of block `index` (0, 1, 2, ... without end); the same for the same arguments."""
    rng = random.Random(f"{seed}/{split}/{index}")
    documents = []
    for _ in range(BLOCK_DOCUMENTS):
        share = rng.random()
        if share < QUESTION_SHARE:
            documents.append(question_text(rng, split))
        elif share < QUESTION_SHARE + NUMBER_SHARE:
            documents.append(number_text(rng, split))
        else:
            documents.append(story(rng, split).text)
    return documents


def prompts(count: int, seed: int = 0) -> list[str]:
    """`count` openings to sample from: the first 6 to 12 words of held-out stories."""
    rng = random.Random(f"{seed}/prompts")
    return [" ".join(story(rng, "val").text.split()[: 6 + int(rng.random() * 7)]) for _ in range(count)]


def _gender(name: str) -> str:
    return "she" if name in _lexicon()["she"] else "he"


# ---------------------------------------------------------------------------------------------------------------------
# Checking


@dataclass(frozen=True)
class StoryCheck:
    """What the checker found: `ok` when there is no problem; `plot` is empty when none was recognised."""

    ok: bool
    problems: list[str]
    plot: str = ""


@dataclass
class Node:
    """A step in reading a sentence: which word or slot may come next, and which beats may end here."""

    words: dict[str, "Node"] = field(default_factory=dict)
    slots: dict[tuple[str, str], "Node"] = field(default_factory=dict)  # ("+" or "", role)
    beats: set[tuple[str, int]] = field(default_factory=set)  # (plot, index of the beat)


Binding = tuple[str, str, str]  # ("+" where the role may be new, role, words)
Reading = tuple[set[tuple[str, int]], tuple[Binding, ...]]


def cut_to_story(text: str) -> str:
    """The first story of a sample: up to a line break, a special token, or the next "Once upon a time"."""
    text = text.strip().split("\n", 1)[0].split("<|", 1)[0]
    again = text.find(" Once upon a time")
    return (text if again < 0 else text[:again]).strip()


def check_story(text: str) -> StoryCheck:
    """Grade the first story of `text` for coherence, from the text alone.

    Each sentence must parse, belong to one plot and stand at its place in it; every role keeps its words; pronouns
    agree; nobody is spoken of before appearing; help fits the trouble; the story ends, and no sentence comes twice.
    """
    text = cut_to_story(text)
    if not text:
        return StoryCheck(False, ["there is no story"])
    sentences = SENTENCE_END.split(text)
    problems = []
    if not text.endswith((".", "!", "?", '."', '!"', '?"')):
        problems.append(f"stops unfinished: {sentences.pop()!r}")
    problems += [
        f"says twice: {sentence!r}" for sentence in dict.fromkeys(s for s in sentences if sentences.count(s) > 1)
    ]
    readings = []
    for sentence in sentences:
        readings.append(_read_sentence(sentence))
        if not readings[-1]:
            problems.append(f"does not parse: {sentence!r}")

    # The plot is the one that places the most sentences.
    placed = {
        name: _place(name, readings) for name in sorted({p for r in readings for beats, _ in r for p, _ in beats})
    }
    if not placed:
        return StoryCheck(False, problems or ["there is no story"])
    plot = _plots()[max(placed, key=lambda name: len(placed[name]))]
    places = placed[plot.name]  # sentence -> beat
    problems += [f"out of place: {s!r}" for i, s in enumerate(sentences) if readings[i] and i not in places]
    told = list(places.values())
    for index, beat in enumerate(plot.beats):
        if index not in told and not beat.optional:
            problems.append(f"leaves out the {beat.name}")
        if told.count(index) > beat.most_sentences:
            problems.append(f"tells the {beat.name} more than once")

    facts: dict[str, str] = {}
    for i, index in places.items():
        options = [_bind(facts, bindings) for beats, bindings in readings[i] if (plot.name, index) in beats]
        found, facts = min(options, key=lambda option: len(option[0]))
        problems += found
    problems += _misfits(plot, facts)
    return StoryCheck(not problems, problems, plot.name)


def _bind(facts: dict[str, str], bindings: Sequence[Binding]) -> tuple[list[str], dict[str, str]]:
    """What is wrong with a sentence's roles, given the roles so far; and the roles after it."""
    facts = dict(facts)
    problems = []
    for new, role, words in bindings:
        if _is_pronoun(role):
            name = facts.get("friend" if role.startswith("friend_") else "hero", "")
            if name and words not in PRONOUNS[_gender(name)].values():
                problems.append(f"says {words!r} of {name}")
        elif role in facts and facts[role] != words:
            problems.append(f"the {_label(role)} changes from {facts[role]!r} to {words!r}")
        elif role not in facts and not new:
            problems.append(f"the {_label(role)} {words!r} comes from nowhere")
        else:
            facts[role] = words
    return problems, facts


def _misfits(plot: Plot, facts: dict[str, str]) -> list[str]:
    """Roles that do not go together: words of different rows, or one word in two roles that must differ."""
    problems = []
    for role, _, others in plot.draws:
        for other in others:
            if role in facts and facts[role] == facts.get(other):
                problems.append(f"{facts[role]!r} is both {_label(other)} and {_label(role)}")
    known = [role for role in plot.rows[0] if role in facts] if plot.rows else []
    for one, other in combinations(known, 2):
        if not any(row[one] == facts[one] and row[other] == facts[other] for row in plot.rows):
            problems.append(f"the {_label(other)} {facts[other]!r} does not fit the {_label(one)} {facts[one]!r}")
    return problems


def _label(role: str) -> str:
    return role.rstrip("23").replace("_", " ")


def _place(plot: str, readings: Sequence[Sequence[Reading]]) -> dict[int, int]:
    """Give as many sentences as possible a beat of the plot such that the beats never go backwards."""
    best: dict[int, dict[int, int]] = {-1: {}}  # last beat told -> sentence -> beat
    for i, options in enumerate(readings):
        for index in sorted({index for beats, _ in options for name, index in beats if name == plot}, reverse=True):
            longest = max((best[last] for last in best if last <= index), key=len)
            best[index] = max(best.get(index, {}), {**longest, i: index}, key=len)
    return max(best.values(), key=len)


@cache
def _word_classes() -> dict[str, dict[str, list[tuple[str, ...]]]]:
    """role -> first word -> the word sequences a slot of this role may hold, over all plots."""
    values: dict[str, set[str]] = {}
    for plot in _plots().values():
        for role, words, _ in plot.draws:
            values.setdefault(role, set()).update(words)
        for row in plot.rows:
            for role, words in row.items():
                values.setdefault(role, set()).add(words)
    for owner in ("", "friend_"):
        for case in ("he", "him", "his"):
            values[owner + case] = {PRONOUNS["he"][case], PRONOUNS["she"][case]}
    classes: dict[str, dict[str, list[tuple[str, ...]]]] = {}
    for role, choices in values.items():
        first = classes.setdefault(role, {})
        for tokens in sorted(tuple(TOKEN.findall(choice)) for choice in choices):
            first.setdefault(tokens[0], []).append(tokens)
    return classes


@cache
def _grammar() -> Node:
    """All tellings of all plots as one tree of words and slots."""
    root = Node()
    for plot in _plots().values():
        for index, beat in enumerate(plot.beats):
            for sentence in (s for telling in beat.tellings for s in SENTENCE_END.split(telling)):
                node = root
                for token in _tokens(sentence):
                    slot = SLOT.fullmatch(token)
                    if slot:
                        role = slot[2].lower() if _is_pronoun(slot[2]) else slot[2]
                        node = node.slots.setdefault((slot[1], role), Node())
                    else:
                        node = node.words.setdefault(token, Node())
                node.beats.add((plot.name, index))
    return root


@cache
def _openers() -> Sequence[Sequence[str]]:
    return [opener.split() for line in OPENERS.split("\n") for opener in line.split(", ") if opener.strip()]


def _tokens(sentence: str) -> list[str]:
    """Words and marks without openers, fillers and the closing mark; the first word in lower case unless a name."""
    tokens = [token for token in TOKEN.findall(sentence) if token not in FILLERS.split(", ")]
    if tokens and tokens[0] not in _lexicon()["hero"] and not SLOT.fullmatch(tokens[0]):
        tokens[0] = tokens[0].lower()
    stripped = True
    while stripped:
        stripped = False
        for opener in _openers():
            if tokens[: len(opener)] == opener:
                tokens = tokens[len(opener) + (tokens[len(opener) : len(opener) + 1] == [","]) :]
                stripped = True
    if tokens and tokens[-1] in ".!":
        tokens.pop()
    return tokens


def _read_sentence(sentence: str) -> list[Reading]:
    """Every way to understand a sentence: the beats it can tell and the words of its roles."""
    if not (sentence[0] == '"' or sentence[0].isupper()) or "  " in sentence:
        return []
    tokens = tuple(_tokens(sentence))
    readings: list[Reading] = []

    def walk(node: Node, at: int, bindings: tuple[Binding, ...]) -> None:
        if at == len(tokens):
            if node.beats:
                readings.append((node.beats, bindings))
            return
        if tokens[at] in node.words:
            walk(node.words[tokens[at]], at + 1, bindings)
        for (new, role), following in node.slots.items():
            for words in _word_classes()[role].get(tokens[at], ()):
                if tokens[at : at + len(words)] == words:
                    walk(following, at + len(words), (*bindings, (new, role, " ".join(words))))

    walk(_grammar(), 0, ())
    return readings
