"""Sums through the calculator: the model writes the call, the tool answers, the model reads the answer out.

The test split has pairs of numbers that the demo corpus holds out, and half of its questions are asked in a way that
the train split does not have.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from nanochat.calculator import calculate
from nanochat.conversation import Part, text_of
from nanochat.demo.typed import as_typed
from nanochat.demo.writer import held_out_pair, words
from nanochat.task import Example, GeneratedTask, turn


@dataclass(frozen=True)
class Ways:
    """Ways to ask for the same thing."""

    known: tuple[str, ...]
    held_out: tuple[str, ...]  # in the test split only

    def draw(self, rng: random.Random, is_test: bool) -> str:
        return rng.choice(self.held_out if is_test and rng.random() < 0.5 else self.known)


# Around a sum of any operation, such as "2 + 2", "2+2" or "two plus two".
AROUND = Ways(
    known=(
        "What is {sum}?",
        "How much is {sum}?",
        "{sum} = ?",
        "{sum} =",
        "{sum}=?",
        "{sum}",
        "{sum}?",
        "{sum} is?",
        "Calculate {sum}.",
        "Can you calculate {sum}?",
        "Compute {sum}.",
        "Please solve {sum} for me.",
        "What does {sum} make?",
        "What do you get for {sum}?",
        "What is the answer to {sum}?",
        "Do you know what {sum} is?",
        "Hello! What is {sum}?",
        "{sum}等于几？",
        "{sum}是多少？",
        "{sum}等于多少？",
        "计算{sum}。",
    ),
    held_out=(
        "What is the result of {sum}?",
        "Tell me what {sum} is.",
        "{sum} equals?",
        "Work out {sum}, please.",
        "Hi, how much is {sum}?",
        "请问{sum}是多少？",
    ),
)
# Named by the operation; the same sums in other words.
NAMED = {
    "+": Ways(
        known=(
            "Add {a} and {b}.",
            "What do you get when you add {a} and {b}?",
            "Please add {a} and {b} for me.",
            "What is the sum of {a} and {b}?",
            "Sum of {a} and {b}",
            "{a}加上{b}是多少？",
        ),
        held_out=("Can you add {a} to {b}?", "How much are {a} and {b} together?", "{a}和{b}的和是多少？"),
    ),
    "-": Ways(
        known=(
            "Take {b} away from {a}.",
            "Subtract {b} from {a}.",
            "What is {a} less {b}?",
            "What is left of {a} without {b}?",
            "{a}减去{b}是多少？",
        ),
        held_out=("What remains when you take {b} from {a}?", "What is the difference between {a} and {b}?"),
    ),
    "*": Ways(
        known=(
            "Multiply {a} by {b}.",
            "Multiply {a} and {b}.",
            "What is the product of {a} and {b}?",
            "{a}乘以{b}等于几？",
        ),
        held_out=("What do you get when you multiply {a} by {b}?", "Product of {a} and {b}"),
    ),
    "/": Ways(
        known=("Divide {a} by {b}.", "What do you get when you divide {a} by {b}?", "{a}除以{b}等于几？"),
        held_out=("How often does {b} go into {a}?", "What is {a} split into {b} parts?"),
    ),
}
# Told as a little story.
TOLD = {
    "+": Ways(
        known=(
            "{name} has {a} {thing}s and gets {b} more. How many {thing}s does {name} have now?",
            "I have {a} {thing}s and then I find {b} more. How many {thing}s do I have now?",
            "There are {a} {thing}s in a box and {b} in a bag. How many {thing}s are there?",
            "{name} found {a} {thing}s on Monday and {b} on Tuesday. How many {thing}s is that?",
            "I had {a} {thing}s. My friend gave me {b} more. How many do I have?",
        ),
        held_out=("{name} buys {a} {thing}s and then {b} more. How many {thing}s did {name} buy?",),
    ),
    "-": Ways(
        known=(
            "{name} has {a} {thing}s and gives {b} away. How many {thing}s are left?",
            "I have {a} {thing}s and lose {b} of them. How many {thing}s do I have now?",
            "{name} had {a} {thing}s and sold {b} of them. How many {thing}s does {name} have left?",
        ),
        held_out=("There were {a} {thing}s, and {name} took {b} of them. How many {thing}s are left?",),
    ),
}
THINGS = ("egg", "coin", "book", "cookie", "pencil", "orange", "flower", "marble", "dollar", "card", "banana", "pear")
SIGNS = {"+": ("+",), "-": ("-", "-", "−"), "*": ("*", "*", "x", "×"), "/": ("/", "/", "÷")}
SPOKEN = {
    "+": ("plus", "and"),
    "-": ("minus", "take away"),
    "*": ("times", "multiplied by"),
    "/": ("divided by", "over"),
}
SPOKEN_CHINESE = {"+": "加", "-": "减", "*": "乘", "/": "除以"}
# More than two numbers, or a story of two steps: question and call.
LONGER_TOLD = (
    ("{name} has {a} {thing}s, gets {b} more and loses {c}. How many {thing}s are left?", "{a}+{b}-{c}"),
    ("{name} has {a} {thing}s. Then {name} finds {b} and gives {c} away. How many does {name} have?", "{a}+{b}-{c}"),
    ("I had {a} {thing}s, got {b} and then {c} more. How many do I have now?", "{a}+{b}+{c}"),
    ("There are {a} {thing}s. {name} takes {b} and I take {c}. How many are left?", "{a}-{b}-{c}"),
    ("{name} buys {a} boxes with {b} {thing}s in each. How many {thing}s is that?", "{a}*{b}"),
    ("{name} has {a} bags with {b} {thing}s each and {c} more. How many {thing}s are there?", "{a}*{b}+{c}"),
    ("There are {a} rows of {b} {thing}s, and {c} are sold. How many are left?", "{a}*{b}-{c}"),
    ("One {thing} costs {a} dollars. How much do {b} cost?", "{a}*{b}"),
    ("{name} has {a} {thing}s. {name} wins {b} and loses {c}. How many has {name} now?", "{a}+{b}-{c}"),
    ("There are {a} people on a bus. {b} get off and {c} get on. How many are on the bus?", "{a}-{b}+{c}"),
    ("{a} {thing}s were in the box. {name} took {b} out and put {c} in. How many are in it now?", "{a}-{b}+{c}"),
    ("There are {a} boxes with {b} {thing}s in each. {c} are broken. How many are whole?", "{a}*{b}-{c}"),
    ("{name} buys {b} {thing}s for {c} dollars each and pays with {a}. How much does {name} get back?", "{a}-{b}*{c}"),
    ("I buy {b} {thing}s for {c} dollars each and pay with {a}. How much change do I get?", "{a}-{b}*{c}"),
    ("{name} has {a} {thing}s and I have {b}. How many more does {name} have?", "{a}-{b}"),
    ("{name} reads {a} pages on each of {b} days. How many pages is that?", "{a}*{b}"),
    ("{a} {thing}s, {b} {thing}s and {c} {thing}s: how many in all?", "{a}+{b}+{c}"),
    ("Add {a}, {b} and {c}.", "{a}+{b}+{c}"),
    ("Can you add {a}, {b} and {c} together?", "{a}+{b}+{c}"),
    ("What is the sum of {a}, {b} and {c}?", "{a}+{b}+{c}"),
)
SHARED = (
    "Share {a} among {b}.",
    "Share {a} {thing}s among {b} friends.",
    "{b} children share {a} {thing}s. How many does each get?",
    "{name} shares {a} {thing}s with {b} friends, the same for each. How many does each get?",
    "Split {a} into {b} equal parts.",
    "How many {thing}s does each of {b} people get from {a}?",
    "If {b} friends share {a} {thing}s equally, how many does each get?",
    "{b} people share {a} dollars. How much does each get?",
)
UNARY = (("Double {a}.", "{a}*2"), ("What is half of {a}?", "{a}/2"), ("What is twice {a}?", "{a}*2"))
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
            return longer_question(rng, AROUND.draw(rng, is_test))
        form = (form - 0.3) / 0.7
        if form < 0.2 and operator in TOLD and a >= b > 1:
            told = TOLD[operator].draw(rng, is_test)
            thing = a_thing(rng)
            return told.format(a=a, b=b, name=rng.choice(words("hero")), thing=thing), call
        if form < 0.4:
            named = NAMED[operator].draw(rng, is_test)
            in_words = named.isascii() and rng.random() < 0.25
            return as_typed(rng, named.format(a=spelled(a, in_words), b=spelled(b, in_words))), call
        around = AROUND.draw(rng, is_test)
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
            question = rng.choice(NAMED["+"].known).format(a=a, b=b)
        else:
            around = rng.choice(AROUND.known)
            question = around.format(sum=spelled_sum(rng, operator, a, b, not around.isascii()))
        return as_typed(rng, question), f"{a}+{b}"


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
        told, call = rng.choice(LONGER_TOLD)
        if call in ("{a}-{b}-{c}", "{a}-{b}*{c}"):
            a += b + c if call == "{a}-{b}-{c}" else b * c  # so that something is left
        thing = a_thing(rng)
        question = told.format(a=a, b=b, c=c, name=rng.choice(words("hero")), thing=thing)
        if rng.random() >= 0.5:
            question = as_typed(rng, question)
        return question, call.format(a=a, b=b, c=c)
    if form < 0.42:
        b = rng.randrange(2, 13)
        a = b * rng.randrange(1, size)
        thing = a_thing(rng)
        return rng.choice(SHARED).format(a=a, b=b, name=rng.choice(words("hero")), thing=thing), f"{a}/{b}"
    if form < 0.47:
        way, call = rng.choice(UNARY)
        a = rng.randrange(size)
        return as_typed(rng, way.format(a=a)), call.format(a=a)
    text = written_sum(rng, size)
    return as_typed(rng, around.format(sum=text)), text.replace(" ", "")


def a_thing(rng: random.Random) -> str:
    return rng.choice((*words("object"), *THINGS))


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
        text = f"{spelled(a, first)} {rng.choice(SPOKEN[operator])} {spelled(b, second)}"
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
