"""Sums through the calculator: the model writes the call, the tool answers, the model reads the answer out.

The test split has pairs of numbers that the demo corpus holds out, and half of its questions are asked in a way that
the train split does not have.
"""

import random
import re
from collections.abc import Sequence
from functools import cache

from nanochat.calculator import calculate
from nanochat.conversation import Part, text_of
from nanochat.demo.plots import lexicon
from nanochat.demo.sections import entries, sections, word_lists
from nanochat.demo.typed import as_typed
from nanochat.demo.writer import held_out_pair
from nanochat.task import Example, GeneratedTask, turn

FILE = "arithmetic.txt"
AROUND = "around a sum"
SIGNS = {"+": ("+",), "-": ("-", "-", "−"), "*": ("*", "*", "x", "×"), "/": ("/", "/", "÷")}
SPOKEN_CHINESE = {"+": "加", "-": "减", "*": "乘", "/": "除以"}
NUMBER_WORDS = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
]
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
# One of these bounds both numbers, or each number has its own bound.
SIZES = (*(10,) * 6, *(13,) * 2, *(21,) * 2, *(100,) * 5, *(1000,) * 4, *(10_000,) * 2, 100_000, 1_000_000)


class Arithmetic(GeneratedTask):
    """Sums, differences, products and whole quotients of any size in many spellings, some of them as a little story."""

    name = "arithmetic"

    def example(self, index: int) -> Example:
        rng = self.rng(index)
        while True:
            operator, a, b = self.draw(rng)
            question, call = self.question(rng, operator, a, b)
            if is_held_out(call) == (self.split == "test"):
                return sum_example(question, call)

    def draw(self, rng: random.Random) -> tuple[str, int, int]:
        """An operator and two numbers."""
        operator = rng.choice("++++---**//")
        size = rng.choice(SIZES)
        is_mixed = rng.random() < 0.3
        a = number_below(rng, size)
        b = number_below(rng, rng.choice(SIZES) if is_mixed else size)
        if operator == "-" and rng.random() < 0.9:
            a, b = max(a, b), min(a, b)  # a difference below zero is rare
        if operator == "*":
            a, b = a % 1000, b % 1000
        if operator == "/":
            b = b % 100 or 1
            a = a % 1000 * b  # the quotient is whole
        return operator, a, b

    def question(self, rng: random.Random, operator: str, a: int, b: int) -> tuple[str, str]:
        """A question about two numbers, sometimes more, and the call that answers it."""
        is_test = self.split == "test"
        call = f"{a}{operator}{b}"
        form = rng.random()
        if form < 0.3:
            return longer_question(rng, draw_way(rng, AROUND, is_test))
        form = (form - 0.3) / 0.7
        if form < 0.2 and operator in "+-" and a >= b > 1:
            told = draw_way(rng, f"told {operator}", is_test)
            thing = a_thing(rng)
            return told.format(a=a, b=b, name=rng.choice(lexicon()["hero"]), thing=thing), call
        if form < 0.4:
            named = draw_way(rng, f"named {operator}", is_test)
            in_words = named.isascii() and rng.random() < 0.25
            return as_typed(rng, named.format(a=spelled(a, in_words), b=spelled(b, in_words))), call
        around = draw_way(rng, AROUND, is_test)
        return as_typed(rng, around.format(sum=spelled_sum(rng, operator, a, b, not around.isascii()))), call

    def wrong(self, index: int) -> list[Part]:
        """The sum with one digit of its call changed, or more until its value is another, and the tool's answer."""
        call = self.example(index).messages[-1]["content"][0]["text"]
        rng = self.rng(index, "/wrong")
        places = [place for place, character in enumerate(call) if character.isdigit()]
        changed = call
        while calculate(changed) == calculate(call):
            place = rng.choice(places)
            changed = changed[:place] + rng.choice("123456789") + changed[place + 1 :]
        return sum_example("", changed).messages[-1]["content"]

    def grade(self, example: Example, reply: Sequence[Part]) -> bool:
        """Right if the tool gave the answer, and the reply's own statement is true: `47+38 = 85.`"""
        left_side, _, right_side = text_of(reply).rpartition("=")
        outputs = [part["text"] for part in reply if part["type"] == "python_output"]
        is_stated = right_side.strip().rstrip(".") == example.answer == calculate(left_side)
        return is_stated and example.answer in outputs


class Addition(Arithmetic):
    """Two-digit addition, asked in ways that the train split has: only the numbers of its test split are new."""

    name = "addition"

    def draw(self, rng: random.Random) -> tuple[str, int, int]:
        return "+", rng.randrange(10, 100), rng.randrange(10, 100)

    def question(self, rng: random.Random, operator: str, a: int, b: int) -> tuple[str, str]:
        if rng.random() < 0.3:
            question = draw_way(rng, "named +", is_test=False).format(a=a, b=b)
        else:
            around = draw_way(rng, AROUND, is_test=False)
            question = around.format(sum=spelled_sum(rng, operator, a, b, not around.isascii()))
        return as_typed(rng, question), f"{a}+{b}"


@cache
def ways(section: str) -> dict[str, list[str]]:
    """Ways to ask for the same thing: `known` ones, and `held out` ones for the test split only."""
    return entries(sections(FILE)[section])


def draw_way(rng: random.Random, section: str, is_test: bool) -> str:
    return rng.choice(ways(section)["held out" if is_test and rng.random() < 0.5 else "known"])


def is_held_out(call: str) -> bool:
    """Whether a call is for the test split: by its first two whole numbers, so `0.5*8` by 0 and 5."""
    a, b, *_ = map(int, re.findall(r"\d+", call))
    return held_out_pair(a, b)


def number_below(rng: random.Random, size: int) -> int:
    """A number below `size`, sometimes a round one: 20, 500, 1000."""
    if rng.random() < 0.1 and size >= 100:
        return rng.randint(1, 10) * (size // 10)
    return rng.randrange(size)


def longer_question(rng: random.Random, around: str) -> tuple[str, str]:
    """A sum of up to four terms, with signs, brackets or decimals, or one told in two steps; and its call."""
    form = rng.random()
    size = rng.choice((10, 10, 20, 100))
    if form < 0.3:  # told
        a, b, c = sorted((rng.randrange(2, size) for _ in range(3)), reverse=True)
        told, call = rng.choice(sections(FILE)["longer"]).split(" | ")
        if call in ("{a}-{b}-{c}", "{a}-{b}*{c}"):
            a += b + c if call == "{a}-{b}-{c}" else b * c  # so that something is left
        thing = a_thing(rng)
        question = told.format(a=a, b=b, c=c, name=rng.choice(lexicon()["hero"]), thing=thing)
        if rng.random() >= 0.5:
            question = as_typed(rng, question)
        return question, call.format(a=a, b=b, c=c)
    if form < 0.42:
        b = rng.randrange(2, 13)
        a = b * rng.randrange(1, size)
        thing = a_thing(rng)
        shared = rng.choice(sections(FILE)["shared"])
        return shared.format(a=a, b=b, name=rng.choice(lexicon()["hero"]), thing=thing), f"{a}/{b}"
    if form < 0.47:
        way, call = rng.choice(sections(FILE)["one number"]).split(" | ")
        a = rng.randrange(size)
        return as_typed(rng, way.format(a=a)), call.format(a=a)
    text = written_sum(rng, size)
    return as_typed(rng, around.format(sum=text)), text.replace(" ", "")


def a_thing(rng: random.Random) -> str:
    return rng.choice((*lexicon()["object"], *word_lists(FILE, "words")["things"]))


def written_sum(rng: random.Random, size: int) -> str:
    """An expression of two to four terms as people write it: `-5 + 3`, `2*(3+4)`, `1.5 + 2.25`, `3+4-2*6`."""
    space = rng.choice(("", " "))
    form = rng.random()

    def number() -> str:
        return str(rng.randrange(1, size))

    def decimal() -> str:
        whole = rng.randrange(size)
        return f"{whole}.{rng.choice(('5', '25', str(rng.randrange(1, 10)), '75'))}"

    def sign(signs: str = "+-*") -> str:
        return f"{space}{rng.choice(signs)}{space}"

    if form < 0.25:  # a sign before a number
        if rng.random() < 0.7:
            last = number()
        elif rng.random() < 0.5:
            last = f"(-{number()})"
        else:
            last = f"-{number()}"
        first = f"-{number()}" if rng.random() < 0.8 or last.isdigit() else number()
        return f"{first}{sign()}{last}"
    if form < 0.5:  # decimals
        a = decimal()
        b = decimal()
        return f"{a}{sign()}{b if rng.random() < 0.7 else number()}"
    if form < 0.7:  # brackets
        inner = f"({number()}{sign('+-')}{number()})"
        return f"{inner}{sign()}{number()}" if rng.random() < 0.5 else f"{number()}{sign()}{inner}"
    terms = [number() for _ in range(rng.choice((3, 3, 4)))]
    return terms[0] + "".join(f"{sign()}{term}" for term in terms[1:])


def in_letters(number: int) -> str:
    """A number below 1000 in words: forty-two, three hundred and five."""
    if number < len(NUMBER_WORDS):
        return NUMBER_WORDS[number]
    if number < 100:
        ten, one = divmod(number, 10)
        return TENS[ten - 2] + (f"-{NUMBER_WORDS[one]}" if one else "")
    hundreds, rest = divmod(number, 100)
    return f"{NUMBER_WORDS[hundreds]} hundred" + (f" and {in_letters(rest)}" if rest else "")


def spelled(number: int, in_words: bool) -> str:
    """A number in digits, or in letters if it is below 1000."""
    return in_letters(number) if in_words and number < 1000 else str(number)


def spelled_sum(rng: random.Random, operator: str, a: int, b: int, in_chinese: bool) -> str:
    """`2 + 2`, `2+2`, `2 plus two`, or `2加2`."""
    if in_chinese and rng.random() < 0.7:
        return f"{a}{SPOKEN_CHINESE[operator]}{b}"
    if not in_chinese and rng.random() < 0.3:
        first = rng.random() < 0.5
        second = first if rng.random() < 0.7 else not first
        text = f"{spelled(a, first)} {rng.choice(word_lists(FILE, 'words')[operator])} {spelled(b, second)}"
        return text.replace("y-", "y ") if rng.random() < 0.3 else text  # forty two
    spacing = rng.choice(("", " "))
    return f"{a}{spacing}{rng.choice(SIGNS[operator])}{spacing}{b}"


def sum_example(question: str, call: str) -> Example:
    answer = calculate(call)
    assert answer is not None, call
    reply = [
        {"type": "python", "text": call},
        {"type": "python_output", "text": answer},
        {"type": "text", "text": f"{call} = {answer}."},
    ]
    return Example(turn(question, reply), answer)
