"""Sums of every size, operator and spelling; which of them only the test split has."""

import random
import re
from collections import Counter
from functools import cache

import pytest

from nanochat.conversation import parts_of, text_of
from nanochat.demo.arithmetic import AROUND, Addition, Arithmetic, in_letters, is_held_out, sum_example, ways
from nanochat.demo.follow_ups import Memory
from nanochat.demo.typed import as_typed, mistyped
from nanochat.demo.writer import held_out_pair
from nanochat.task import Example, Split


@cache
def examples(split: Split) -> list[Example]:
    task = Arithmetic(split)
    return [task.example(index) for index in range(3000)]


def call_of(example: Example) -> str:
    return example.messages[-1]["content"][0]["text"]


def question_of(example: Example) -> str:
    return example.question[-1]["content"]


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("task", [Arithmetic, Addition, Memory])
def test_held_out_sums_are_in_the_test_split_only(task, split: Split):
    calls = []
    for index in range(300):
        messages = task(split).example(index).messages
        asked = messages[-1:] if split == "test" else messages  # earlier turns are of the train split
        parts = [part for message in asked for part in parts_of(message["content"])]
        calls += [part["text"] for part in parts if part["type"] == "python"]
    held_out = {is_held_out(call) for call in calls}
    assert held_out == {split == "test"}
    assert is_held_out("0.5*8") == held_out_pair(0, 5) == held_out_pair(5, 0)  # in either order


SPELLINGS = {  # how people write a sum, and the call that answers it
    r"(\d+) ?\+ ?(\d+)(?: =)?": "{}+{}",
    r".*?(\d+) x (\d+)[^\d]*": "{}*{}",
    r".*?(\d+) ÷ (\d+)[^\d]*": "{}/{}",
    r"What is (\d+) ?[-−] ?(\d+)\?": "{}-{}",
    r"(?!.*(?:plus.* plus|minus|hundred))[^-]*?([a-z]+-[a-z]+) (plus|times|over) ([a-z]+-[a-z]+)[^a-z]*": "{}{}{}",
    r"(\d+)加(\d+)等于几？?": "{}+{}",
    r"[A-Za-z !']*(\d+) \+ (\d+) - (\d+)[^\d]*": "{}+{}-{}",
    r"(\d+) ?\+ ?\? ?= ?(\d+)": "{1}-{0}",
    r"\? ?- ?(\d+) ?= ?(\d+)": "{1}+{0}",
    r"(\d+) ?\* ?\? ?= ?(\d+)": "{1}/{0}",
    r"(\d+) \w+ of (\d+)( each)?": "{}*{}",
    r"\w+ ha[sd] (\d+) \w+\. S?He (?:loses|lost|eats|ate|gives away|gave away) (\d+)(?: of them)?\. How[^\d]*": "{}-{}",
}


def test_sums_of_every_size_and_spelling_are_trained_on():
    calls = {call_of(example) for example in examples("train")}
    possible = {f"{a}+{b}" for a in range(10) for b in range(10) if not held_out_pair(a, b)}
    assert len(possible & calls) > 0.75 * len(possible)
    for operator in "+-*/":
        numbers = [re.fullmatch(rf"(\d+){re.escape(operator)}(\d+)", call) for call in calls]
        lengths = {(len(found[1]), len(found[2])) for found in numbers if found}
        assert {(1, 1), (2, 1), (2, 2), (3, 2)} <= lengths
    asked = [(question_of(example).replace(",", ""), call_of(example)) for example in examples("train")]
    in_digits = {in_letters(number): number for number in range(1000)} | {"plus": "+", "times": "*", "over": "/"}
    for spelling, form in SPELLINGS.items():
        found = [(re.fullmatch(spelling, question), call) for question, call in asked]
        found = [([in_digits.get(text, text) for text in match.groups()], call) for match, call in found if match]
        assert found and all(form.format(*numbers) == call for numbers, call in found), spelling


def test_new_ways_to_ask_are_in_the_test_split_only():
    asked_in = (AROUND, *(f"named {sign}" for sign in "+-*/"), "told +", "told -")
    held_out = [text for section in asked_in for text in ways(section)["held out"]]
    forms = [re.sub(r"\\\{[a-z]+\\\}", ".+", re.escape(text.rstrip(".?？"))).lower() for text in held_out]
    form = re.compile("|".join(forms))
    shares = {}
    for split in ("train", "test"):
        asked = [question_of(example).lower().rstrip(".?？") for example in examples(split)[:1000]]
        shares[split] = sum(form.fullmatch(question) is not None for question in asked) / len(asked)
    assert shares["train"] == 0 < 0.25 < shares["test"]


def test_a_wrong_reply_differs_in_one_digit_and_in_its_answer():
    task = Arithmetic("train")
    for index in range(300):
        wrong = task.wrong(index)
        right = call_of(examples("train")[index])
        differing = sum(a != b for a, b in zip(wrong[0]["text"], right, strict=True))
        assert differing == 1 or re.search(r"\b0\b", right)  # another digit may leave 0*5 at 0
        assert not task.grade(task.example(index), wrong)
        assert text_of(wrong).startswith(wrong[0]["text"])


def test_typing_changes_case_marks_and_short_forms_alone():
    rng = random.Random(0)
    typed = {as_typed(rng, "What is it? I am Tom.") for _ in range(300)}
    assert {"What is it? I am Tom.", "what is it? i am tom", "What's it? I'm Tom."} <= typed
    assert {text.lower().replace("'", "").replace(".", "") for text in typed} <= {
        f"{what} it? {am} tom" for what in ("what is", "whats") for am in ("i am", "im")
    }


def test_typos_are_in_words_and_never_in_slots_numbers_or_names():
    rng = random.Random(0)
    text = "Hello {name}, does {thing}s cost Gregor 12345 or 1000x?"
    typed = [mistyped(rng, text) for _ in range(3000)]
    assert 0.06 < sum(one != text for one in typed) / 3000 < 0.1
    words = Counter(word for one in typed for word in one.split())
    assert [word for word in text.split() if words[word] < 3000] == ["Hello", "does", "cost"]
    assert {"Helo", "csot", "dooes"} < set(words)


def test_a_reply_has_four_decimals_at_most_and_says_what_cannot_be_calculated():
    task = Arithmetic("train")
    for call, text in (("10/3", "10/3 = 3.3333."), ("2/3", "2/3 = 0.6667."), ("5/0", "I cannot calculate that.")):
        example = sum_example("?", call)
        called, output, stated = example.messages[-1]["content"]
        assert stated["text"] == text and task.grade(example, [called, output, stated])
        assert not task.grade(example, [called, stated])  # the tool has not been asked
    assert 0.005 < sum(example.answer == "error" for example in examples("train")) / 3000 < 0.03
    numbers = {42: "forty-two", 105: "one hundred and five", 2500: "two thousand five hundred", 5000: "five thousand"}
    assert {number: in_letters(number) for number in numbers} == numbers
    assert any(re.search(r"\d,\d{3}", question_of(example)) for example in examples("train"))
