"""Chats that go on: what somebody has said of themselves is remembered, and a sum goes on with its last answer."""

import random
from collections.abc import Sequence

from nanochat.conversation import Part, parts_of, text_of
from nanochat.demo import corpus as demo
from nanochat.demo.checker import check_story
from nanochat.task import Example, GeneratedTask, Split, turn
from nanochat.tasks import identity
from nanochat.tasks.arithmetic import Arithmetic, is_held_out, sum_example
from nanochat.tasks.stories import corpus_split
from nanochat.tasks.typed import as_typed

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
# What somebody says of themselves, what that is of them, and how they ask for it later. Slots are those of
# smalltalk.txt; {name} and {number} are drawn.
FACTS = (
    (("I like {animal}.", "I love {animal}!", "I really like {animal}."), "You like {animal}", ("What do I like?",)),
    (
        ("I like {topic}.", "I love {topic}!", "I enjoy {topic}."),
        "You like {topic}",
        ("What do I like?", "What do I enjoy?"),
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
        ("I am {number} years old.", "My age is {number}.", "I just turned {number}."),
        "You are {number} years old",
        ("How old am I?", "What is my age?", "Do you know how old I am?"),
    ),
    (
        ("I live in {place}.", "I am from {place}.", "My home is in {place}."),
        "You live in {place}",
        ("Where do I live?", "Where is my home?", "Where am I from?"),
    ),
    (
        ("My dog is called {name}.", "I have a dog named {name}.", "My dog's name is {name}."),
        "Your dog is called {name}",
        ("What is my dog called?", "What is the name of my dog?", "Who is my dog?"),
    ),
    (
        ("My cat is called {name}.", "I have a cat named {name}."),
        "Your cat is called {name}",
        ("What is my cat called?", "What is the name of my cat?"),
    ),
    (
        ("I am a {job}.", "I work as a {job}."),
        "You are a {job}",
        ("What is my job?", "What do I do?", "What am I?"),
    ),
    (
        ("I speak {tongue}.", "I am learning {tongue}."),
        "You speak {tongue}",
        ("Which language do I speak?", "What language do I speak?"),
    ),
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
    ("Double it.", "{a}*2"),
    ("Divide that by {b}.", "{a}/{b}"),
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
            story = demo.story(rng, corpus_split(self.split), ("hero",) if is_new else ())
            messages = turn(rng.choice(NAME).format(name=story.hero), f"Nice to meet you, {story.hero}!")
            question, answer = rng.choice(ASK_NAME), f"Your name is {story.hero}."
            if form < 0.45:
                question, answer = rng.choice(ABOUT_ME), story.text
        else:
            ways, known, asked = rng.choice(FACTS)
            drawn = {
                "name": demo.story(rng, "train").hero,
                "number": rng.randrange(3, 100),
                "shade": rng.choice(demo.words("colour")),
                "job": rng.choice(JOBS),
            }
            drawn |= {slot: rng.choice(list(words)) for slot, words in identity.lexicon().items()}
            messages = turn(rng.choice(ways).format_map(drawn), f"{known.format_map(drawn)}: good to know!")
            question = rng.choice(REMEMBER).format(question=rng.choice(asked))
            answer = f"{known.format_map(drawn)}."
        if answer.startswith("You"):
            for _ in range(rng.choice((0, 0, 1, 2))):
                messages += identity.earlier_turn(rng)
        return Example([*messages, *turn(as_typed(rng, question), answer)], answer)

    def grade(self, example: Example, reply: Sequence[Part]) -> bool:
        """Right if it is the answer, or a story that holds together where the answer is one."""
        text = text_of(reply).strip()
        if text == example.answer:
            return True
        asked, told = check_story(example.answer), check_story(text)
        return asked.ok and told.ok and told.facts["hero"] == asked.facts["hero"]


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
        example = sum_example(way.format_map(numbers), call)
        messages += example.messages
    return Example(messages, text_of(parts_of(messages[-1]["content"])))
