"""Sums through the calculator: the model writes the call, the tool answers, the model reads the answer out.

Pairs of numbers that the demo corpus holds out are in the test split only.
"""

import random
from collections.abc import Sequence

from nanochat.conversation import Part, text_of
from nanochat.demo.corpus import held_out_pair, words
from nanochat.tasks.task import Example, GeneratedTask, turn
from nanochat.tools.calculator import calculate

PLUS = (
    "What is {a} + {b}?",
    "How much is {a} + {b}?",
    "Add {a} and {b}.",
    "What do you get when you add {a} and {b}?",
    "{a} + {b} = ?",
    "Please add {a} and {b} for me.",
)
MINUS = (
    "What is {a} - {b}?",
    "How much is {a} - {b}?",
    "Take {b} away from {a}.",
    "{a} - {b} = ?",
)
TIMES = (
    "What is {a} * {b}?",
    "How much is {a} times {b}?",
    "{a} * {b} = ?",
)
MORE = "{name} has {a} {thing}s and gets {b} more. How many {thing}s does {name} have now?"
FEWER = "{name} has {a} {thing}s and gives {b} away. How many {thing}s are left?"


class Arithmetic(GeneratedTask):
    """Two- and three-digit sums, differences and products, some of them as a little story."""

    name = "arithmetic"

    def example(self, index: int) -> Example:
        rng = self.rng(index)
        a, b = self.draw(rng)
        while held_out_pair(a, b) != (self.split == "test"):
            a, b = self.draw(rng)
        question, call = self.question(rng, a, b)
        return sum_example(question, call)

    def draw(self, rng: random.Random) -> tuple[int, int]:
        size = rng.choice((100, 1000))
        return rng.randrange(10, size), rng.randrange(10, size)

    def question(self, rng: random.Random, a: int, b: int) -> tuple[str, str]:
        """A question about two numbers, and the call that answers it."""
        story_words = {"name": rng.choice(words("hero")), "thing": rng.choice(words("object"))}
        operation = rng.random()
        if operation < 0.4:
            return rng.choice((*PLUS, MORE)).format(a=a, b=b, **story_words), f"{a}+{b}"
        if operation < 0.8:
            a, b = max(a, b), min(a, b)
            return rng.choice((*MINUS, FEWER)).format(a=a, b=b, **story_words), f"{a}-{b}"
        return rng.choice(TIMES).format(a=a, b=b), f"{a}*{b}"

    def wrong(self, index: int) -> list[Part]:
        """The sum with one digit of its call changed, and the tool's answer to that."""
        call = self.example(index).messages[-1]["content"][0]["text"]
        rng = self.rng(index, "/wrong")
        place = rng.choice([place for place, character in enumerate(call) if character.isdigit()])
        digit = rng.choice([d for d in "123456789" if d != call[place]])
        return sum_example("", call[:place] + digit + call[place + 1 :]).messages[-1]["content"]

    def grade(self, example: Example, reply: Sequence[Part]) -> bool:
        """Right if the tool gave the answer, and the reply's own statement is true: `47+38 = 85.`"""
        left_side, _, right_side = text_of(reply).rpartition("=")
        outputs = [part["text"] for part in reply if part["type"] == "python_output"]
        is_stated = right_side.strip().rstrip(".") == example.answer == calculate(left_side)
        return is_stated and example.answer in outputs


class Addition(Arithmetic):
    """Two-digit addition."""

    name = "addition"

    def draw(self, rng: random.Random) -> tuple[int, int]:
        return rng.randrange(10, 100), rng.randrange(10, 100)

    def question(self, rng: random.Random, a: int, b: int) -> tuple[str, str]:
        return rng.choice(PLUS).format(a=a, b=b), f"{a}+{b}"


def sum_example(question: str, call: str) -> Example:
    answer = calculate(call)
    assert answer is not None, call
    reply = [
        {"type": "python", "text": call},
        {"type": "python_output", "text": answer},
        {"type": "text", "text": f"{call} = {answer}."},
    ]
    return Example(turn(question, reply), answer)
