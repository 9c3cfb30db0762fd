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
    return [task.example(index) for index in range(2000)]


def call_of(example: Example) -> str:
    return example.messages[-1]["content"][0]["text"]


def question_of(example: Example) -> str:
    return example.question[0]["content"]


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("task", [Arithmetic, Addition, Memory])
def test_held_out_sums_are_in_the_test_split_only(task, split: Split):
    calls = []
    for index in range(300):
        parts = [part for message in task(split).example(index).messages for part in parts_of(message["content"])]
        calls += [part["text"] for part in parts if part["type"] == "python"]
    held_out = {is_held_out(call) for call in calls}
    assert held_out == {split == "test"} or (task is Memory and split == "test")  # it has small talk with usual sums
    if task is Addition:
        assert all(re.fullmatch(r"[0-9]{2}\+[0-9]{2}", call) for call in calls)
    assert is_held_out("0.5*8") == held_out_pair(0, 5) == held_out_pair(5, 0)  # in either order


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


def test_sums_of_every_size_and_spelling_are_trained_on():
    calls = {call_of(example) for example in examples("train")}
    possible = {f"{a}+{b}" for a in range(10) for b in range(10) if not held_out_pair(a, b)}
    assert len(possible) == 84
    assert len(possible & calls) > 0.75 * len(possible)
    for operator in "+-*/":
        numbers = [re.fullmatch(rf"(\d+){re.escape(operator)}(\d+)", call) for call in calls]
        lengths = {(len(found[1]), len(found[2])) for found in numbers if found}
        assert {(1, 1), (2, 1), (2, 2), (3, 2)} <= lengths
    for spelling in SPELLINGS:
        assert any(re.fullmatch(spelling, question_of(example)) for example in examples("train")), spelling


def test_new_ways_to_ask_are_in_the_test_split_only():
    asking = [ways(section) for section in (AROUND, *(f"named {sign}" for sign in "+-*/"), "told +", "told -")]
    held_out = [text for way in asking for text in way["held out"]]
    forms = [re.sub(r"\\\{[a-z]+\\\}", ".+", re.escape(text)).lower() for text in held_out]
    form = re.compile("|".join(forms))
    shares = {}
    for split in ("train", "test"):
        asked = [question_of(example).lower() for example in examples(split)[:1000]]
        shares[split] = sum(form.fullmatch(question) is not None for question in asked) / len(asked)
    assert shares["train"] == 0
    assert shares["test"] > 0.25  # where all marks are typed


def test_a_wrong_reply_differs_in_one_digit_and_in_its_answer():
    task = Arithmetic("train")
    zeros = next(index for index, example in enumerate(examples("train")) if call_of(example) == "0*0")
    for index in (*range(100), zeros):  # one other digit leaves 0*0 at 0
        wrong = task.wrong(index)
        right = call_of(examples("train")[index])
        differing = sum(a != b for a, b in zip(wrong[0]["text"], right, strict=True))
        assert differing == 1 or index == zeros
        assert not task.grade(task.example(index), wrong)
        assert text_of(wrong).startswith(wrong[0]["text"])


def test_typing_changes_case_marks_and_short_forms_alone():
    rng = random.Random(0)
    typed = {as_typed(rng, "What is it? I am Tom.") for _ in range(300)}
    assert {"What is it? I am Tom.", "what is it? i am tom", "What's it? I'm Tom."} <= typed
    assert {text.lower().replace("'", "").replace(".", "") for text in typed} <= {
        f"{what} it? {am} tom" for what in ("what is", "whats") for am in ("i am", "im")
    }
