"""Small talk and honesty: who the model is, and that it does not know what it has not learned.

The tables are in small_talk.txt, which explains itself. A model that has only seen stories and sums answers everything
with a story or a sum. It learns where its knowledge ends from many subjects that it has never heard of, so that it
says so for the next one too. Bring your own identity as a .jsonl of conversations instead.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from nanochat.conversation import Message, Part, parts_of, text_of
from nanochat.demo.sections import entries, sections
from nanochat.demo.typed import as_typed, mistyped
from nanochat.demo.walks import Walk, WalkTask
from nanochat.demo.writer import story
from nanochat.task import Example

FILE = "small_talk.txt"
UNTOLD = "I do not know that: you have not told me."  # about the person: also the answer of [unknown you]
USUAL_SHARE = {"identity": 0.3, "unknown": 0.0}  # questions from the first line of their group
KEYBOARD_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
SLOT = re.compile(r"\{(\w+)\}")
# How a reply ends that offers a story.
OFFER = re.compile(
    r"([Ss]hall I tell you|[Ww]ould you like) (a story|one|a new one)"
    r"(, or do a sum| in English| instead| to cheer you up)?\?$|要我用英文讲一个吗？$"
)


@dataclass(frozen=True)
class Group:
    """Questions that have one answer."""

    answer: str
    # Ways to ask, with slots: "Where is {place}?"; the last of each line is held out.
    lines: tuple[tuple[str, ...], ...]


@cache
def groups(task: str) -> tuple[Group, ...]:
    """The groups of questions that belong to a task, `identity` or `unknown`."""
    found: list[Group] = []
    for title, lines in sections(FILE).items():
        if title.split()[0] == task:
            group = entries(lines)
            found.append(Group(group["answer"][0], tuple(tuple(line.split(" | ")) for line in group["ask"])))
    return tuple(found)


@cache
def lexicon() -> dict[str, dict[str, bool]]:
    """The words that each slot may hold, and whether each is held out."""
    words: dict[str, dict[str, bool]] = {}
    for slot, lines in entries(sections(FILE)["lexicon"]).items():
        words[slot] = {}
        for line in lines:
            words[slot] |= dict.fromkeys(line.split(", "), False)
            words[slot][line.split(", ")[-1]] = True
    return words


class SmallTalk(WalkTask):
    """A question with an answer learned by heart, sometimes after a system message.

    In half of the test split it has a way to ask, or a word in it, that the train split never has.
    """

    def go_on(self, rng: random.Random, walk: Walk) -> str:
        if not walk.messages and rng.random() < 0.15:
            walk.messages.append({"role": "system", "content": rng.choice(sections(FILE)["systems"])})
        is_new = self.split == "test" and rng.random() < 0.5
        while True:
            question, answer = draw(rng, self.name, is_new)
            is_told = answer == UNTOLD and walk.has_facts
            if not is_told and not accepts_story(walk.messages, question):
                walk.say(question, answer)
                return answer


class Identity(SmallTalk):
    """Greetings, thanks, the model's name and abilities, feelings, a joke; the answers are learned by heart."""

    name = "identity"


class Unknown(SmallTalk):
    """Subjects that the model has never read about: it says so, kindly, and names what it can do instead."""

    name = "unknown"

    def grade(self, example: Example, reply: Sequence[Part]) -> bool:
        """Right if it is the answer of any group of this task: each of them is honest."""
        return text_of(reply).strip() in {group.answer for group in groups(self.name)}

    def wrong(self, index: int) -> str:
        """A story, the typical answer of a model that knows nothing else."""
        return story(self.rng(index, "/wrong"), "train").text


def agreements() -> list[str]:
    """How people accept the offer of a story."""
    return sections(FILE)["agreements"]


def offers_story(messages: Sequence[Message]) -> bool:
    """Whether the last message offers a story."""
    return bool(messages) and OFFER.search(text_of(parts_of(messages[-1]["content"]))) is not None


def accepts_story(messages: Sequence[Message], question: Any) -> bool:
    """Whether a question accepts the story that the last message offers. Then the reply has to be a story."""
    return isinstance(question, str) and _plain(question) in map(_plain, agreements()) and offers_story(messages)


def _plain(text: str) -> str:
    return text.lower().strip(" .!?")


def draw(rng: random.Random, task: str, is_new: bool) -> tuple[str, str]:
    """A question as people type it, and its answer. `is_new`: with something held out in it, or else with nothing."""
    found = groups(task)
    group = rng.choices(found, [len(group.lines) for group in found])[0]
    while True:
        line = group.lines[0] if rng.random() < USUAL_SHARE[task] else rng.choice(group.lines)
        way = rng.choice(line)
        question, has_new_word = fill(rng, mistyped(rng, way))
        if (has_new_word or way == line[-1]) == is_new:
            return as_typed(rng, question), group.answer


def fill(rng: random.Random, text: str) -> tuple[str, bool]:
    """A text with a word in each of its slots, and whether any of the words is held out."""
    drawn = [(slot, _word(rng, slot)) for slot in SLOT.findall(text)]
    words = iter([word for _, word in drawn])
    is_new = any(lexicon().get(slot, {}).get(word, False) for slot, word in drawn)
    return SLOT.sub(lambda _: next(words), text), is_new


def _word(rng: random.Random, slot: str) -> str:
    if slot == "number":
        return str(rng.randrange(rng.choice((10, 100, 1000))))
    if slot == "noise":
        # Fingers on a keyboard: neighbours in a row, or anything.
        row = rng.choice((*KEYBOARD_ROWS, "".join(KEYBOARD_ROWS)))
        first = rng.randrange(len(row) - 2)
        if rng.random() < 0.5:
            return row[first : first + rng.randint(3, 6)]
        return "".join(rng.choice(row) for _ in range(rng.randint(3, 9)))
    return rng.choice(list(lexicon()[slot]))
