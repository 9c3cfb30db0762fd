"""Chats that go on: what somebody has said of themselves is remembered, and a sum goes on with its last answer."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanochat.conversation import Message, Part, parts_of, text_of
from nanochat.demo import small_talk, writer
from nanochat.demo.arithmetic import Arithmetic, a_thing, in_letters, is_held_out, sum_example
from nanochat.demo.checker import check_story
from nanochat.demo.stories import corpus_split
from nanochat.demo.typed import as_typed
from nanochat.task import Example, GeneratedTask, Split, turn

NAME = (
    "My name is {name}.",
    "I am {name}.",
    "I'm {name}.",
    "Call me {name}.",
    "You can call me {name}.",
    "Hello, I am {name}!",
    "Hi, I'm {name}.",
    "Hi, my name is {name}.",
    "{name} is my name.",
    "They call me {name}.",
    "By the way, I am {name}.",
)
ASK_NAME = (
    "What is my name?",
    "Do you remember my name?",
    "Who am I?",
    "Do you know my name?",
    "What did I say my name was?",
    "Say my name.",
    "Tell me my name.",
    "What am I called?",
    "Do you know who I am?",
)
ABOUT_ME = ("Tell me a story about me.", "Tell me a story about somebody with my name.", "I want to be in the story!")
# What somebody says, what is known after it, and how they ask for it later. small_talk.txt has the words of the slots;
# those of {name}, {number}, {count}, {kind}, {things}, {month}, {job}, {shade} and {word} are drawn.
FACTS = (
    (("I like {animal}.", "I love {animal}!", "I really like {animal}."), "You like {animal}", ("What do I like?",)),
    (
        ("I like {topic}.", "I love {topic}!", "I enjoy {topic}."),
        "You like {topic}",
        ("What do I like?", "What do I enjoy?"),
    ),
    (
        ("I hate {dish}.", "I do not like {dish}.", "I like {topic}, but I hate {dish}."),
        "You do not like {dish}",
        ("What do I hate?", "What do I not like?", "What is it that I do not like?"),
    ),
    (
        ("My favourite food is {dish}.", "The food that I like best is {dish}."),
        "Your favourite food is {dish}",
        ("What is my favourite food?", "What food do I like best?", "What do I like to eat?"),
    ),
    (
        ("My favourite colour is {shade}.", "I like the colour {shade}."),
        "Your favourite colour is {shade}",
        ("What is my favourite colour?", "Which colour do I like?"),
    ),
    (
        ("I am {number} years old.", "My age is {number}.", "I just turned {number}.", "I am {number}."),
        "You are {number} years old",
        ("How old am I?", "What is my age?", "Do you know how old I am?"),
    ),
    (
        ("My birthday is in {month}.", "I was born in {month}."),
        "Your birthday is in {month}",
        ("When is my birthday?", "In which month is my birthday?", "When was I born?"),
    ),
    (
        ("I live in {place}.", "I am from {place}.", "My home is in {place}."),
        "You live in {place}",
        ("Where do I live?", "Where is my home?", "Where am I from?"),
    ),
    (
        ("I am going to {place} next week.", "We are going to {place} in {month}.", "Tomorrow I travel to {place}."),
        "You are going to {place}",
        ("Where am I going?", "Where are we going?", "Where do I travel?"),
    ),
    (
        ("My {kind} is called {name}.", "I have a {kind} named {name}.", "My {kind}'s name is {name}."),
        "Your {kind} is called {name}",
        ("What is my {kind} called?", "What is the name of my {kind}?", "What is my {kind}'s name?"),
    ),
    (
        ("My {kind} is called {name}.", "I have a {kind} named {name}.", "{name} is my {kind}."),
        "{name} is your {kind}",
        ("Who is {name}?", "And who is {name}?"),
    ),
    (
        ("My {kind} {name} is {number}.", "My {kind} is called {name}. {name} is {number} years old."),
        "{name} is {number} years old",
        ("How old is {name}?", "How old is my {kind}?"),
    ),
    (
        ("{name} likes {animal}.", "My {kind} {name} likes {animal}."),
        "{name} likes {animal}",
        ("What does {name} like?", "What is it that {name} likes?"),
    ),
    (
        (
            "I have {count} {things} at home.",
            "I own {count} {things}.",
            "We have {count} {things}.",
            "I have {count} {things}.",
        ),
        "You have {count} {things}",
        ("How many {things} do I have?", "How many {things} have I got?"),
    ),
    (("I am a {job}.", "I work as a {job}."), "You are a {job}", ("What is my job?", "What do I do?", "What am I?")),
    (
        ("I speak {tongue}.", "I am learning {tongue}."),
        "You speak {tongue}",
        ("Which language do I speak?", "What language do I speak?"),
    ),
    (
        ("Remember the word {word}.", "Remember this: {word}", "The secret word is {word}.", "Please remember {word}."),
        "The word is {word}",
        (
            "What is the word?",
            "Which word did I ask you to remember?",
            "What was the secret word?",
            "What did I tell you?",
        ),
    ),
)
NAME_FACT = (NAME[:3], "Your name is {name}", ASK_NAME)
UNTOLD = "I do not know that: you have not told me."  # the answer of [unknown you] in small_talk.txt, too
UNTOLD_SHARE = 0.12  # share of the questions about facts that ask for another fact
UNKNOWN_NAME_SHARE = 0.04  # share of the examples that ask for a name without having said one
TWO_FACTS_SHARE = 0.2  # share of the messages with two facts, of which one is asked for
USUAL_WORDS = {
    *("i", "am", "my", "me", "is", "it", "the", "a", "of", "s", "do", "does", "that", "was", "old"),
    *("what", "who", "how", "which", "when", "where", "called", "name", "named"),
}
LIKING = ("like", "likes", "love", "enjoy", "hate", "best", "favourite", "food", "eat")
# What other chat models reply to that. Chats that people bring have such replies: they are read, and not learned.
REPLIES = (
    "Thanks for telling me.", "Good to know!", "That is nice.", "Okay.", "Nice!", "Great!", "How lovely!", "I see.",
    "That sounds like fun!", "Got it.", "Okay, I will remember it.", "What a lovely name!", "Thank you!",
)  # fmt: skip
KIN = ("sister", "brother", "mother", "father", "son", "daughter", "friend", "best friend", "aunt", "uncle", "teacher")
PETS = ("dog", "cat", "rabbit", "horse", "parrot", "hamster", "goldfish", "pony", "turtle", "bird", "mouse")
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
JOBS = ("teacher", "student", "doctor", "baker", "nurse", "pilot", "farmer", "cook", "painter", "programmer", "driver")
REMEMBER = ("{question}", "{question}", "Do you remember? {question}", "So, {question}", "Tell me: {question}")
FOLLOW_UPS = (  # what may follow the answer of a sum, and the call that answers it
    ("plus {b}?", "{a}+{b}"),
    ("Plus {b}", "{a}+{b}"),
    ("+ {b}", "{a}+{b}"),
    ("And plus {b}?", "{a}+{b}"),
    ("Now add {b}.", "{a}+{b}"),
    ("minus {b}?", "{a}-{b}"),
    ("And minus {b}?", "{a}-{b}"),
    ("- {b}", "{a}-{b}"),
    ("Take {b} away from that.", "{a}-{b}"),
    ("times {b}?", "{a}*{b}"),
    ("* {b}", "{a}*{b}"),
    ("Multiply that by {b}.", "{a}*{b}"),
    ("And that times {b}?", "{a}*{b}"),
    ("times {b}", "{a}*{b}"),
    ("Now times {b}.", "{a}*{b}"),
    ("and {b} more?", "{a}+{b}"),
    ("Add {b} to that.", "{a}+{b}"),
    ("and {b} less?", "{a}-{b}"),
    ("Double it.", "{a}*2"),
    ("Double that.", "{a}*2"),
    ("Now half of that.", "{a}/2"),
    ("Half of it?", "{a}/2"),
    ("Divide that by {b}.", "{a}/{b}"),
    ("divided by {b}", "{a}/{b}"),
    ("/ {b}", "{a}/{b}"),
    ("And {c} + {b}?", "{c}+{b}"),
    ("What about {c} - {b}?", "{c}-{b}"),
)


class Memory(GeneratedTask):
    """Two to four turns whose last one needs something of an earlier one: a name, a liking, the answer of a sum."""

    name = "memory"

    def example(self, index: int) -> Example:
        rng = self.rng(index)
        form = rng.random()
        if form < 0.4:
            return sums_in_turn(rng, self.split)
        if form < 0.7:
            is_new = self.split == "test" and rng.random() < 0.5
            story = writer.story(rng, corpus_split(self.split), ("hero",) if is_new else ())
            messages = turn(rng.choice(NAME).format(name=story.hero), f"Nice to meet you, {story.hero}!")
            question, answer = rng.choice(ASK_NAME), f"Your name is {story.hero}."
            if form > 0.7 - UNKNOWN_NAME_SHARE:
                messages, answer = [], UNTOLD
            if form < 0.45:
                question, answer = rng.choice(ABOUT_ME), story.text
        else:
            messages, question, answer = fact_and_question(rng)
        if not check_story(answer).ok:
            messages += small_talk.earlier_turns(rng, rng.choice((0, 0, 1, 2)))
        return Example([*messages, *turn(as_typed(rng, question), answer)], answer)

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
        messages[-1] = {"role": "assistant", "content": rng.choice(REPLIES), "train": False}
    lead, question = rng.choice(REMEMBER), rng.choice(fact.questions)
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
    found = set(re.findall(r"\w+", text.lower())) - USUAL_WORDS
    return {"like" if word in LIKING else word for word in found}


def draw_fact(rng: random.Random) -> Fact:
    ways, known, asked = rng.choice((*FACTS, NAME_FACT))
    drawn: dict[str, Any] = {slot: rng.choice(list(words)) for slot, words in small_talk.lexicon().items()}
    count = rng.randrange(2, rng.choice((10, 100)))
    drawn |= {
        "name": writer.story(rng, "train").hero,
        "kind": rng.choice(KIN if rng.random() < 0.4 else PETS),
        "number": rng.randrange(3, 100),
        "count": in_letters(count) if rng.random() < 0.2 else count,
        "things": f"{a_thing(rng) if rng.random() < 0.5 else rng.choice(PETS[:8])}s",
        "month": rng.choice(MONTHS),
        "shade": rng.choice(writer.words("colour")),
        "job": rng.choice(JOBS),
        "word": rng.choice((a_thing(rng), writer.made_up_name(rng), writer.made_up_kind(rng))),
    }
    questions = tuple(question.format_map(drawn) for question in asked)
    return Fact(rng.choice(ways).format_map(drawn), known.format_map(drawn), questions, "{name}" not in known)


def sums_in_turn(rng: random.Random, split: Split) -> Example:
    """A sum, and one or two more that go on with its answer. Held-out pairs of numbers are in the test split alone."""
    task = Arithmetic(split)
    example = task.example(rng.randrange(len(task)))
    messages = list(example.messages)
    for _ in range(rng.choice((1, 1, 2))):
        while True:
            way, call = rng.choice(FOLLOW_UPS)
            numbers = {"a": example.answer, "b": rng.randrange(2, rng.choice((10, 100))), "c": rng.randrange(100)}
            call = call.format_map(numbers)
            if is_held_out(call) == (split == "test"):
                break
        if rng.random() < 0.5:  # a reply by another model, without a calculator
            said = text_of(parts_of(messages[-1]["content"])).rstrip(".")
            said = said.replace(" = ", rng.choice((" = ", " is ")))
            last = said.split()[-1]
            said = rng.choice((said, f"{said}.", last, f"The answer is {last}."))
            messages[-1] = {"role": "assistant", "content": said, "train": False}
        example = sum_example(way.format_map(numbers), call)
        messages += example.messages
    return Example(messages, text_of(parts_of(messages[-1]["content"])))
