"""Sums of every size, operator and spelling; which of them only the test split has."""

import random
import re
from functools import cache

import pytest

from nanochat.conversation import parts_of, text_of
from nanochat.demo.arithmetic import AROUND, Addition, Arithmetic, is_held_out, ways
from nanochat.demo.follow_ups import Memory
from nanochat.demo.typed import as_typed
from nanochat.demo.writer import held_out_pair
from nanochat.task import Example, Split


@cache
def examples(split: Split) -> list[Example]:
    task = Arithmetic(split)
    return [task.example(index) for index in range(3000)]


def call_of(example: Example) -> str:
    return example.messages[-1]["content"][0]["text"]


def question_of(example: Example) -> str:
    return example.question[0]["content"]


def test_train_has_nearly_all_sums_of_one_digit_numbers():
    seen = {call_of(example) for example in examples("train")}
    possible = {f"{a}+{b}" for a in range(10) for b in range(10) if not held_out_pair(a, b)}
    assert len(possible) == 84 and len(possible & seen) > 0.85 * len(possible)


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("task", [Arithmetic, Addition, Memory])
def test_held_out_sums_are_in_the_test_split_only(task, split: Split):
    calls = []
    for index in range(800):
        parts = [part for message in task(split).example(index).messages for part in parts_of(message["content"])]
        calls += [part["text"] for part in parts if part["type"] == "python"]
    held_out = {is_held_out(call) for call in calls}
    assert held_out == {split == "test"} or (task is Memory and split == "test")  # it has small talk with usual sums
    if task is Addition:
        assert all(re.fullmatch(r"[0-9]{2}\+[0-9]{2}", call) for call in calls)


def test_a_pair_of_numbers_is_held_out_in_either_order():
    assert is_held_out("0.5*8") == held_out_pair(0, 5) == held_out_pair(5, 0)


@pytest.mark.parametrize("operator", "+-*/")
def test_numbers_have_one_digit_or_two_or_three_and_mixed(operator):
    lengths = set()
    for example in examples("train"):
        numbers = call_of(example).split(operator)
        if len(numbers) == 2 and all(number.isdigit() for number in numbers):
            lengths.add((len(numbers[0]), len(numbers[1])))
    assert {(1, 1), (2, 1), (2, 2), (3, 2)} <= lengths


def test_answers_are_mostly_whole_and_sometimes_zero_or_negative():
    answers = [example.answer for example in examples("train")]
    assert all(re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", answer) for answer in answers)
    assert 0.02 < sum("." in answer for answer in answers) / len(answers) < 0.1
    assert "0" in answers
    assert 0 < sum(answer.startswith("-") for answer in answers) < 0.15 * len(answers)


SPELLINGS = (
    r"[0-9]+\+[0-9]+",
    r"[0-9]+ \+ [0-9]+ =",
    r"[0-9]+ x [0-9]+",
    r".*[0-9]+ ÷ [0-9]+.*",
    r"What is [0-9]+ - [0-9]+\?",
    r"what's [0-9]+.*",
    r"whats [0-9]+.*",
    r"[a-z]+ plus [a-z]+\??",
    r".* divided by .*",
    r"[0-9]+加[0-9]+等于几？?",
    r"[0-9]+ [-+*] [0-9]+ [-+*] [0-9]+\??",
)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_sums_are_spelled_as_people_do(spelling):
    assert any(re.fullmatch(spelling, question_of(example)) for example in examples("train"))


def test_new_ways_to_ask_are_in_the_test_split_only():
    asking = [ways(section) for section in (AROUND, *(f"named {sign}" for sign in "+-*/"), "told +", "told -")]
    shares = {}
    for split in ("train", "test"):
        asked = 0
        for way in asking:
            for text in way["held out"]:
                form = re.sub(r"\\\{[a-z]+\\\}", ".+", re.escape(text)).lower()
                asked += sum(re.fullmatch(form, question_of(one).lower()) is not None for one in examples(split))
        shares[split] = asked / len(examples(split))
    assert shares["train"] == 0 and shares["test"] > 0.25  # where all marks are typed


def test_a_wrong_reply_differs_in_one_digit_and_in_its_answer():
    task = Arithmetic("train")
    for index in range(100):
        example = task.example(index)
        wrong = task.wrong(index)
        right = call_of(example)
        assert sum(a != b for a, b in zip(wrong[0]["text"], right, strict=True)) == 1
        assert not task.grade(example, wrong) and text_of(wrong).startswith(wrong[0]["text"])


def test_a_product_of_zeros_has_a_wrong_reply_too():
    """One other digit leaves 0*0 at 0."""
    task = Arithmetic("train")
    index = next(index for index, example in enumerate(examples("train")) if call_of(example) == "0*0")
    assert not task.grade(task.example(index), task.wrong(index))


def test_typing_changes_case_marks_and_short_forms_alone():
    rng = random.Random(0)
    typed = {as_typed(rng, "What is it? I am Tom.") for _ in range(300)}
    assert {"What is it? I am Tom.", "what is it? i am tom", "What's it? I'm Tom."} <= typed
    assert {text.lower().replace("'", "").replace(".", "") for text in typed} <= {
        f"{what} it? {am} tom" for what in ("what is", "whats") for am in ("i am", "im")
    }
