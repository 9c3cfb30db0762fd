"""Chats that go on: what somebody has said of themselves is remembered, and a sum goes on with its last answer."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from nanochat.conversation import Message, Part, parts_of, text_of
from nanochat.demo import small_talk, writer
from nanochat.demo.arithmetic import Arithmetic, a_thing, in_letters, is_held_out, sum_example, walk_on
from nanochat.demo.checker import check_story
from nanochat.demo.plots import lexicon
from nanochat.demo.sections import entries, sections, word_lists
from nanochat.demo.small_talk import UNTOLD
from nanochat.demo.stories import corpus_split
from nanochat.demo.typed import as_typed
from nanochat.demo.walks import Walk, WalkTask
from nanochat.task import Example, Split, turn

FILE = "follow_ups.txt"
UNTOLD_SHARE = 0.12  # share of the questions about facts that ask for another fact
UNKNOWN_NAME_SHARE = 0.04  # share of the examples that ask for a name without having said one
TWO_FACTS_SHARE = 0.2  # share of the messages with two facts, of which one is asked for


class Memory(WalkTask):
    """A last turn that needs something of an earlier one: a name, a liking, the answer of a sum."""

    name = "memory"
    not_after = ("memory",)  # a second name would make the first one wrong

    def go_on(self, rng: random.Random, walk: Walk) -> str:
        form = rng.random()
        if form < 0.4:
            return go_on_with_sum(rng, self.split, walk)
        walk.has_facts = True
        if form < 0.7:
            is_new = self.split == "test" and rng.random() < 0.5
            story = writer.story(rng, corpus_split(self.split), ("hero",) if is_new else ())
            if form > 0.7 - UNKNOWN_NAME_SHARE:
                answer = UNTOLD
            else:
                walk.say(draw_line(rng, "introductions").format(name=story.hero), f"Nice to meet you, {story.hero}!")
                answer = f"Your name is {story.hero}."
            walk.wander(rng, rng.choice((0, 0, 1, 2)))
            if form < 0.45:
                walk.tell(as_typed(rng, draw_line(rng, "a story about me")), story)
                return story.text
            question = rng.choice(facts()["name"]["asked"])
        else:
            messages, question, answer = fact_and_question(rng)
            walk.messages += messages
            walk.wander(rng, rng.choice((0, 0, 1, 2)))
        walk.say(as_typed(rng, question), answer)
        return answer

    def grade(self, example: Example, reply: Sequence[Part]) -> bool:
        """Right if it is the answer, or a story that holds together where the answer is one."""
        text = text_of(reply).strip()
        if text == example.answer:
            return True
        asked, told = check_story(example.answer), check_story(text)
        return asked.ok and told.ok and told.facts["hero"] == asked.facts["hero"]


def fact_and_question(rng: random.Random) -> tuple[list[Message], str, str]:
    """What somebody says of themselves, with a reply; a question about it, or about something else; and the answer."""
    fact, other = draw_fact(rng), draw_fact(rng)
    while set(fact.questions) & set(other.questions) or is_about(fact, other):
        other = draw_fact(rng)
    form = rng.random()
    said, known = fact.said, fact.known
    if form < TWO_FACTS_SHARE:
        rest = re.sub(r"^(My|The|We|Remember|Please|Tomorrow)\b", lambda match: match[0].lower(), other.said)
        said = rng.choice((f"{said.rstrip('.!')}. {other.said}", f"{said.rstrip('.!')} and {rest}"))
        fact = rng.choice((fact, other))
    elif rng.random() < 0.3 and fact.is_usual:
        said = as_typed(rng, said)
    answer = f"{fact.known}."
    if form > 1 - UNTOLD_SHARE:
        fact, answer = other, UNTOLD
    reply = f"{known}: good to know!"
    if known.startswith("Your name is "):
        reply = known.replace("Your name is", "Nice to meet you,") + "!"
    messages = turn(said, reply)
    if rng.random() < 0.5:
        messages[-1] = {"role": "assistant", "content": draw_line(rng, "replies"), "train": False}
    lead, question = draw_line(rng, "do you remember"), rng.choice(fact.questions)
    if lead.startswith(("So, ", "Tell me: ")):  # the sentence goes on
        question = question[0].lower() + question[1:]
    return messages, lead.format(question=question), answer


@dataclass(frozen=True)
class Fact:
    """Something that people say of themselves."""

    said: str
    known: str  # without a full stop
    questions: tuple[str, ...]  # ways to ask for it later
    is_usual: bool  # nothing in it is made up, so it can be read in lower case, too


def is_about(fact: Fact, other: Fact) -> bool:
    """Whether a fact may be taken for an answer to a question about the other one."""
    said = _content(fact.said)
    return any(said & _content(question) or "tell you" in question for question in other.questions)


def _content(text: str) -> set[str]:
    """The words that say what a text is about; all kinds of liking count as one."""
    found = set(re.findall(r"\w+", text.lower())) - set(words()["plain"])
    return {"like" if word in words()["liking"] else word for word in found}


@cache
def facts() -> dict[str, dict[str, list[str]]]:
    """What people say of themselves: how it is `said`, what is `known` after it, and how it is `asked` for later."""
    found = {title: entries(lines) for title, lines in sections(FILE).items()}
    return {title.removeprefix("fact "): fact for title, fact in found.items() if title.startswith("fact ")}


def draw_line(rng: random.Random, section: str) -> str:
    return rng.choice(sections(FILE)[section])


def words() -> dict[str, list[str]]:
    return word_lists(FILE, "words")


def draw_fact(rng: random.Random) -> Fact:
    fact = rng.choice(list(facts().values()))
    drawn: dict[str, Any] = {slot: rng.choice(list(words)) for slot, words in small_talk.lexicon().items()}
    count = rng.randrange(2, rng.choice((10, 100)))
    drawn |= {
        "name": writer.story(rng, "train").hero,
        "kind": rng.choice(words()["kin"] if rng.random() < 0.4 else words()["pets"]),
        "number": rng.randrange(3, 100),
        "count": in_letters(count) if rng.random() < 0.2 else count,
        "things": f"{a_thing(rng) if rng.random() < 0.5 else rng.choice(words()['pets'][:8])}s",
        "month": rng.choice(words()["months"]),
        "shade": rng.choice(lexicon()["colour"]),
        "job": rng.choice(words()["jobs"]),
        "word": rng.choice((a_thing(rng), writer.made_up_name(rng), writer.made_up_word(rng))),
    }
    [known] = fact["known"]
    questions = tuple(question.format_map(drawn) for question in fact["asked"])
    return Fact(rng.choice(fact["said"]).format_map(drawn), known.format_map(drawn), questions, "{name}" not in known)


def go_on_with_sum(rng: random.Random, split: Split, walk: Walk) -> str:
    """One or two sums that go on with the answer of the last one. Held-out pairs of numbers are in the test split
    only."""
    while not walk.last_sum:
        Arithmetic(split).go_on(rng, walk)
    for _ in range(rng.choice((1, 1, 2))):
        while True:
            way, call = draw_line(rng, "after a sum").split(" | ")
            numbers = {"a": walk.last_sum, "b": rng.randrange(2, rng.choice((10, 100))), "c": rng.randrange(100)}
            call = call.format_map(numbers)
            if is_held_out(call) == (split == "test"):
                break
        if rng.random() < 0.5:  # a reply by another model, without a calculator
            said = text_of(parts_of(walk.messages[-1]["content"])).rstrip(".")
            said = said.replace(" = ", rng.choice((" = ", " is ")))
            last = said.split()[-1]
            said = rng.choice((said, f"{said}.", last, f"The answer is {last}."))
            walk.messages[-1] = {"role": "assistant", "content": said, "train": False}
        walk_on(walk, sum_example(way.format_map(numbers), call))
    return text_of(parts_of(walk.messages[-1]["content"]))
