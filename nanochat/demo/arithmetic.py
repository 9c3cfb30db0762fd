"""Sums through the calculator: the model writes the call, the tool answers, the model reads the answer out.

The test split has pairs of numbers that the demo corpus holds out, and half of its questions are asked in a way that
the train split does not have.
"""

import random
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import cache

from nanochat.calculator import calculate
from nanochat.conversation import Part, text_of
from nanochat.demo.plots import lexicon, pronouns_of
from nanochat.demo.sections import entries, sections, word_lists
from nanochat.demo.typed import as_typed
from nanochat.demo.walks import EARLIER, Walk, WalkTask
from nanochat.demo.writer import held_out_pair
from nanochat.engine import NO_ANSWER
from nanochat.task import Example, turn

FILE = "arithmetic.txt"
AROUND = "around a sum"
CANNOT = "I cannot calculate that."  # the reply to a division by zero
LONGER = {"longer": 0.34, "gaps": 0.16, "shared": 0.08, "one number": 0.06}  # sections; the rest are written sums
SIGNS = {"+": ("+",), "-": ("-", "-", "−"), "*": ("*", "*", "x", "×"), "/": ("/", "/", "÷")}
SPOKEN_CHINESE = {"+": "加", "-": "减", "*": "乘", "/": "除以"}
NUMBER_WORDS = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
]
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
# One of these bounds both numbers, or each number has its own bound.
SIZES = (*(10,) * 6, *(13,) * 2, *(21,) * 2, *(100,) * 5, *(1000,) * 4, *(10_000,) * 2, 100_000, 1_000_000)


class Arithmetic(WalkTask):
    """Sums of any size in many spellings, some as a little story; divisions by zero, whose answer is `NO_ANSWER`."""

    name = "arithmetic"

    def go_on(self, rng: random.Random, walk: Walk) -> str:
        while True:
            operator, a, b = self.draw(rng)
            question, call = self.question(rng, operator, a, b)
            if is_held_out(call) == (self.split == "test"):
                return walk_on(walk, sum_example(question, call))

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
            a, b = a % 1000, b % 100 or 1
            form = rng.random()
            if form < 0.1:
                b = 0  # the tool has no answer
            elif form < 0.7:
                a *= b  # the quotient is whole
        return operator, a, b

    def question(self, rng: random.Random, operator: str, a: int, b: int) -> tuple[str, str]:
        """A question about two numbers, sometimes more, and the call that answers it."""
        is_test = self.split == "test"
        call = f"{a}{operator}{b}"
        if rng.random() < 0.4:
            return longer_question(rng, draw_way(rng, AROUND, is_test))
        form = rng.random()
        if form > 0.5:
            return plain_question(rng, draw_way(rng, AROUND, is_test), operator, a, b), call
        section = "told" if form < 0.35 and operator in "+-" and a >= b > 1 else "named"
        return told(rng, draw_way(rng, f"{section} {operator}", is_test), {"a": a, "b": b}), call

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
        outputs = [rounded(part["text"]) for part in reply if part["type"] == "python_output"]
        if example.answer == NO_ANSWER:
            return NO_ANSWER in outputs and text_of(reply).strip() == CANNOT
        stated = right_side.strip().rstrip(".")
        return stated == example.answer == rounded(calculate(left_side) or NO_ANSWER) and example.answer in outputs


class Addition(Arithmetic):
    """Two-digit addition, asked in ways that the train split has: only the numbers of its test split are new."""

    name = "addition"
    not_after = tuple(EARLIER)  # only first messages: the one task for a short context

    def draw(self, rng: random.Random) -> tuple[str, int, int]:
        return "+", rng.randrange(10, 100), rng.randrange(10, 100)

    def question(self, rng: random.Random, operator: str, a: int, b: int) -> tuple[str, str]:
        if rng.random() < 0.3:
            return told(rng, draw_way(rng, "named +", is_test=False), {"a": a, "b": b}), f"{a}+{b}"
        return plain_question(rng, draw_way(rng, AROUND, is_test=False), operator, a, b), f"{a}+{b}"


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
    """A sum of up to four terms, with signs, brackets, decimals or a gap, or told in several steps; and its call."""
    size = rng.choice((10, 10, 20, 20, 100, 100, 1000))
    section = rng.choices((*LONGER, ""), (*LONGER.values(), 1 - sum(LONGER.values())))[0]
    if not section:
        text = written_sum(rng, size)
        return as_typed(rng, around.format(sum=text)), text.replace(" ", "")
    a, b, c, d = sorted((rng.randrange(2, size) for _ in range(4)), reverse=True)
    numbers = {"a": a, "b": b, "c": c, "d": d, "even": 2 * a, "total": a + b, "all": a + b + c}
    numbers |= {"product": a * b, "paid": a + b * c}
    way, call = rng.choice(sections(FILE)[section]).split(" | ")
    return told(rng, way, numbers), call.format_map(numbers)


def told(rng: random.Random, way: str, numbers: Mapping[str, int]) -> str:
    """A way to ask as somebody types it, with these numbers, a name, a thing and verbs in its slots."""
    name = rng.choice(lexicon()["hero"])
    in_words = way.isascii() and rng.random() < 0.25
    said = {slot: spelled(rng, number, in_words) for slot, number in numbers.items()}
    said |= {slot: rng.choice(words) for slot, words in word_lists(FILE, "words").items()}
    said |= pronouns_of(name) | {"name": name, "thing": a_thing(rng)}
    return as_typed(rng, way.format_map(said))


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
        last = rng.choice(("{}", "{}", "{}", "{}", "(-{})", "-{}")).format(number())
        first = f"-{number()}" if rng.random() < 0.8 or last.isdigit() else number()
        return f"{first}{sign()}{last}"
    if form < 0.5:  # decimals
        last = decimal() if rng.random() < 0.7 else number()
        return f"{decimal()}{sign()}{last}"
    if form < 0.7:  # brackets
        inner = f"({number()}{sign('+-')}{number()})"
        return f"{inner}{sign()}{number()}" if rng.random() < 0.5 else f"{number()}{sign()}{inner}"
    terms = [number() for _ in range(rng.choice((3, 4)))]
    return terms[0] + "".join(f"{sign()}{term}" for term in terms[1:])


def in_letters(number: int) -> str:
    """A number below a million in words: forty-two, three hundred and five, two thousand."""
    if number < len(NUMBER_WORDS):
        return NUMBER_WORDS[number]
    if number < 100:
        ten, one = divmod(number, 10)
        return TENS[ten - 2] + (f"-{NUMBER_WORDS[one]}" if one else "")
    size, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    count, rest = divmod(number, size)
    if not rest:
        return f"{in_letters(count)} {name}"
    return f"{in_letters(count)} {name}{' and' if rest < 100 else ''} {in_letters(rest)}"


def spelled(rng: random.Random, number: int, in_words: bool) -> str:
    """A number in digits, sometimes `5,000`; or in letters if it is below 1000 or round: sometimes "forty two"."""
    if in_words and (number < 1000 or (number < 100_000 and number % 1000 == 0)):
        letters = in_letters(number)
        return letters.replace("-", " ").replace(" and", "") if rng.random() < 0.3 else letters
    return f"{number:,}" if rng.random() < 0.35 else str(number)


def plain_question(rng: random.Random, around: str, operator: str, a: int, b: int) -> str:
    """`What is 2 + 2?`, `2+2`, `2 plus two is?`, or `2加2等于几？`, as somebody types it."""
    in_chinese = not around.isascii()
    form = rng.random()
    if in_chinese and form < 0.7:
        text = f"{a}{SPOKEN_CHINESE[operator]}{b}"
    elif not in_chinese and form < (0.5 if 20 < max(a, b) < 1000 else 0.25):
        first = rng.random() < 0.5
        second = first if rng.random() < 0.7 else not first
        sign = rng.choice(word_lists(FILE, "words")[operator])
        text = f"{spelled(rng, a, first)} {sign} {spelled(rng, b, second)}"
    else:
        spacing = rng.choice(("", " "))
        sign = spacing + rng.choice(SIGNS[operator]) + spacing
        text = spelled(rng, a, False) + sign + spelled(rng, b, False)
    return as_typed(rng, around.format(sum=text))


def rounded(answer: str) -> str:
    """The tool's answer as a reply states it, with four decimals at most: 3.33333333333333 as 3.3333."""
    if "." not in answer:
        return answer
    short = f"{Decimal(answer):.4f}".rstrip("0").rstrip(".")
    return short if Decimal(short) else answer


def walk_on(walk: Walk, example: Example) -> str:
    """Add a sum to a walk; returns its answer."""
    walk.messages += example.messages
    walk.last_sum = "" if example.answer == NO_ANSWER else rounded(example.answer)
    return example.answer


def sum_example(question: str, call: str) -> Example:
    answer = calculate(call) or NO_ANSWER
    stated = CANNOT if answer == NO_ANSWER else f"{call} = {rounded(answer)}."
    reply = [
        {"type": "python", "text": call},
        {"type": "python_output", "text": answer},
        {"type": "text", "text": stated},
    ]
    return Example(turn(question, reply), rounded(answer))
