"""The built-in `demo` corpus: short stories, questions about them, and sums. It never ends and needs no network.

The words and the plots are tables in `grammar.txt`. A story draws a plot, then a word for each role, then one telling
of each beat, and fills the slots. `checker.py` reads stories back without knowing the draws.

The validation split is not just other stories: about one combination in ten (plot, kind of hero, want, obstacle,
place) occurs there only, so a model that scores well on it has learned the grammar and not the sentences.
"""

import contextlib
import random
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from nanochat.demo.plots import OPEN_ROLES, SLOT, is_pronoun, lexicon, plots, pronouns_of, story_words, words_in_use

Split = Literal["train", "val"]
T = TypeVar("T")

BLOCK_DOCUMENTS = 64
QUESTION_SHARE = 0.15  # share of the documents
NUMBER_SHARE = 0.10  # share of the documents; the rest are stories
OPTIONAL_SHARE = 0.25  # share of the stories that have a given optional beat
HELD_OUT_SHARE = 10  # one combination in this many belongs to validation
# By role the share of the words that are not from the usual lists.
RARE_SHARES = {"hero": 0.25, "friend": 0.25, "kind": 0.15, "friend_kind": 0.15, "trait": 0.4, "love": 0.0}
MADE_UP_SHARE = 0.6  # share of those names that are syllables without a meaning
ONSETS = ("b", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "br", "dr", "gl", "st", "tr")
VOWELS = ("a", "e", "i", "o", "u", "oo", "ee")
CODAS = ("", "", "b", "k", "l", "m", "n", "p", "r", "s", "t", "x")
# Joined syllables or halves of words can turn out obscene. Made-up words that contain one of these are drawn again.
RUDE = re.compile(
    "anal|anus|arse|ass|bastar|bitch|boob|butt|chink|cock|cok|coon|crap|cum|cunt|dick|dik|dyke|fag|fart|fuck|fuk|"
    "gay|gook|heil|homo|jap|jew|kike|kok|lesb|nazi|neeg|neg|nig|nud|orgas|paki|peni|pimp|piss|poo|porn|pric|puss|"
    "rape|rapi|seks|sex|shit|slav|slut|spic|suck|tard|teet|tit|turd|twat|vagi|wank|whor|wog"
)


@dataclass(frozen=True)
class Story:
    """A story and its draws."""

    text: str
    plot: str
    facts: dict[str, str]  # role -> its words: hero, kind, tool, ...

    @property
    def hero(self) -> str:
        return self.facts["hero"]


def held_out(*parts: object) -> bool:
    """Whether this combination belongs to validation: about one in ten, the same ones on every machine."""
    return zlib.crc32("|".join(map(str, parts)).encode()) % HELD_OUT_SHARE == 0


def held_out_pair(first: int, second: int) -> bool:
    """Whether sums of these two numbers, in either order, belong to validation."""
    return held_out("sum", min(first, second), max(first, second))


# ---------------------------------------------------------------------- stories


def story(
    rng: random.Random,
    split: Split,
    new: Collection[str] = (),
    made_up: Collection[str] = (),
    given: Mapping[str, str] | None = None,
) -> Story:
    """Draw a story whose combination belongs to `split`.

    `new`: the roles among `hero`, `kind` and `trait` that get a word which no document of the corpus has. `made_up`:
    those that get a word without a meaning. `given`: the words of some of these roles.
    """
    # Draw until the combination (plot, kind of hero, want, obstacle, place) falls into the split.
    while True:
        plot = _choose(rng, list(plots().values()))
        facts = dict(_choose(rng, plot.rows)) if plot.rows else {}
        for draw in plot.draws:
            facts[draw.role] = _choose(rng, draw.words)
            while any(facts[draw.role] == facts[other] for other in draw.unlike):
                facts[draw.role] = _choose(rng, draw.words)
        for role in OPEN_ROLES:
            if given and role in given:
                facts[role] = given[role]
            elif role in facts and role in made_up:
                facts[role] = made_up_name(rng) if role == "hero" else made_up_word(rng)
            elif role in facts and (role in new or rng.random() < RARE_SHARES[role]):
                facts[role] = _unusual(rng, role, role in new, facts)
        if held_out(plot.name, *(facts[role] for role in plot.key)) == (split == "val"):
            break

    # Choose a telling for each beat. What an earlier one may leave out, such as a coat, is only mentioned after it.
    tellings: list[str] = []
    told: set[str] = set()  # the roles so far
    for beat in plot.beats:
        if beat.optional and rng.random() >= OPTIONAL_SHARE:
            continue
        options = [telling for telling in beat.tellings if _known_roles(telling) <= told]
        if beat.name == "opening" and "trait" in (*new, *made_up):
            options = [telling for telling in options if "{+trait}" in telling]
        tellings.append(_choose(rng, options))
        told |= {role for _, role in SLOT.findall(tellings[-1])}

    # Forget the roles that no telling mentions, and fill the slots.
    text = " ".join(tellings)
    mentioned = {role for _, role in SLOT.findall(text)}
    facts = {role: found for role, found in facts.items() if role in mentioned}
    slots = facts | pronouns_of(facts["hero"])
    if "friend" in facts:
        for case, pronoun in pronouns_of(facts["friend"]).items():
            slots[f"friend_{case}"] = pronoun
    return Story(with_articles(text.replace("{+", "{").format_map(slots)), plot.name, facts)


def _known_roles(telling: str) -> set[str]:
    """The roles that a telling mentions and does not introduce."""
    slots = SLOT.findall(telling)
    return {role for _, role in slots if not is_pronoun(role)} - {role for new, role in slots if new}


def _unusual(rng: random.Random, role: str, is_new: bool, facts: dict[str, str]) -> str:
    """A name, a kind or a trait that is not from the usual lists and that no other role of the story has."""
    is_name = role in ("hero", "friend")
    table = "trait" if role == "trait" else "kind"
    if is_new:
        table = "new name" if is_name else f"new {table}"
    else:
        table = ("rare she", "rare he")[int(rng.random() * 2)] if is_name else f"rare {table}"
    while True:
        if is_name and not is_new and rng.random() < MADE_UP_SHARE:
            found = made_up_name(rng)
        else:
            found = _choose(rng, lexicon()[table])
        if found not in facts.values():
            return found


def made_up_name(rng: random.Random) -> str:
    """A name of one to three syllables that mean nothing: Tamoop, Gliba. It is never a word of the grammar."""
    syllables = (_choose(rng, ONSETS) + _choose(rng, VOWELS) for _ in range(_choose(rng, (1, 2, 2, 3))))
    name = ("".join(syllables) + _choose(rng, CODAS)).capitalize()
    return made_up_name(rng) if name.lower() in words_in_use() or RUDE.search(name.lower()) else name


def made_up_word(rng: random.Random) -> str:
    """A kind or a trait without a meaning: syllables (tamoop), or halves of two words (lantunny)."""
    while True:
        word = made_up_name(rng).lower()
        if rng.random() < 0.5:
            first, second = (_choose(rng, story_words()) for _ in range(2))
            word = first[: (len(first) + 1) // 2] + second[len(second) // 2 :]
        if len(word) > 3 and word not in words_in_use() and not RUDE.search(word):
            return word


def _choose(rng: random.Random, options: Sequence[T]) -> T:
    """One of the options. (`rng.choice` would draw other stories from the same seed.)"""
    return options[int(rng.random() * len(options))]


def questions(story: Story) -> list[tuple[str, str]]:
    """Every question that the grammar can ask about a story, with its answer."""
    found: list[tuple[str, str]] = []
    for question, answer in plots()[story.plot].questions:
        with contextlib.suppress(KeyError):  # about a role that this story left out
            found.append((filled(question, story.facts), filled(answer, story.facts)))
    return found


def with_articles(text: str) -> str:
    """The text with "an" where the next word needs it."""
    return re.sub(r"\b([Aa]) (?=[aeiou](?!ni))", r"\1n ", text)


def filled(text: str, words: Mapping[str, str]) -> str:
    """A question or an answer with the words of its roles: they may begin it."""
    text = with_articles(text.format_map(words))
    return text[0].upper() + text[1:]


def question_text(rng: random.Random, split: Split) -> str:
    """A story, then two to four lines `Question: ... Answer: ...` about it."""
    drawn = story(rng, split)
    lines = [drawn.text]
    for question, answer in rng.sample(questions(drawn), 2 + int(rng.random() * 3)):
        lines.append(f"Question: {question} Answer: {answer}")
    return "\n".join(lines)


# ---------------------------------------------------------------------- numbers


def number_text(rng: random.Random, split: Split) -> str:
    """Six lines about numbers: sums, differences, counting, comparing, small word problems.

    A sum whose pair of numbers is held out (`held_out_pair`) occurs in validation only.
    """
    return "\n".join(_number_line(rng, split) for _ in range(6))


def _number_line(rng: random.Random, split: Split) -> str:
    while True:
        size = _choose(rng, (10, 100, 100, 1000))
        first = int(rng.random() * size)
        second = int(rng.random() * size)
        if held_out_pair(first, second) == (split == "val"):
            break
    total = first + second
    form = int(rng.random() * 10)
    if form < 3:
        return f"{first} + {second} = {total}."
    if form < 5:
        return f"{total} - {first} = {second}."
    if form == 5:
        return f"Question: What is {first} + {second}? Answer: {total}."
    if form == 6:
        name = rng.choice(lexicon()["hero"])
        thing = rng.choice(lexicon()["object"])
        he = pronouns_of(name)["he"]
        return (
            f"{name} has {_count(first, thing)}. Then {he} gets {_count(second, thing)}. "
            f"Now {he} has {_count(total, thing)}."
        )
    if form == 7:
        step = _choose(rng, (1, 2, 5, 10))
        numbers = range(first, first + 7 * step, step)
        return f"Counting by {step}: {', '.join(map(str, numbers))}."
    if form == 8:
        if first == second:
            return f"{first} is the same as {second}."
        return f"{first} is {'less' if first < second else 'more'} than {second}."
    return f"The number after {first} is {first + 1}, and the number before {first + 1} is {first}."


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


# ---------------------------------------------------------------------- documents


def block(index: int, split: Split, seed: int = 0) -> list[str]:
    """The `BLOCK_DOCUMENTS` documents of block `index` (0, 1, 2, ... without end); a function of its arguments."""
    rng = random.Random(f"{seed}/{split}/{index}")
    return [_document(rng, split) for _ in range(BLOCK_DOCUMENTS)]


def _document(rng: random.Random, split: Split) -> str:
    share = rng.random()
    if share < QUESTION_SHARE:
        return question_text(rng, split)
    if share < QUESTION_SHARE + NUMBER_SHARE:
        return number_text(rng, split)
    return story(rng, split).text


# ---------------------------------------------------------------------- as --data reads it


class DemoCorpus:
    """Stories without end, written by the grammar as they are read."""

    name = "demo"

    def __init__(self, split: Split):
        self.split: Split = split

    def block_count(self) -> None:
        return None

    def read_block(self, index: int) -> list[str]:
        return block(index, self.split)
