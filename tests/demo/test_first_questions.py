"""The list of a hundred first questions: how a reply is graded, and that training does not contain the list."""

import json
import random
import re
from pathlib import Path

import pytest
from tiny import complaint

from nanochat.demo.corpus import story
from nanochat.task_flag import TaskSpec, open_task, parse_tasks
from nanochat.tasks.first_questions import FirstQuestions
from nanochat.tasks.identity import SLOT, groups
from nanochat.tasks.stories import ORDERS

LIST = Path(__file__).resolve().parents[1] / "first_questions.jsonl"
# Openings that everybody types: the list and the train split both have them.
COMMON = {
    *(
        "hi",
        "hello",
        "hey there",
        "good morning",
        "hi how are you",
        "how are you today",
        "thanks",
        "bye",
        "hello nanochat",
    ),
    *("who are you", "whats your name", "what is your name", "what are you", "are you human", "how old are you"),
    *("what can you do", "help", "what do you know", "tell me about yourself", "nice to meet you", "tell me a story"),
    *("ok", "你好", "你是谁", "谢谢"),
}


def plain(text: str) -> str:
    """Without case and marks: two spellings of one question are equal."""
    return re.sub(r"[^\w ]", "", text.lower()).strip()


def test_there_are_a_hundred_different_questions_of_every_sort():
    rows = [json.loads(line) for line in LIST.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == len({row["question"] for row in rows}) == 100
    assert sum("number" in row for row in rows) >= 25
    assert sum(row.get("honest", False) for row in rows) >= 35
    assert sum("story" in row for row in rows) >= 4
    assert sum(not row["question"].isascii() for row in rows) >= 6
    assert "What is 2 + 2?" in {row["question"] for row in rows}


def test_training_has_none_of_them_but_what_everybody_types():
    questions = {plain(json.loads(line)["question"]) for line in LIST.read_text(encoding="utf-8").splitlines()}
    learned = {plain(order) for order in ORDERS}
    for group in (*groups("identity"), *groups("unknown")):
        for line in group.lines:
            learned |= {plain(way) for way in line[:-1] if not SLOT.search(way)}
    assert questions & learned <= {plain(text) for text in COMMON}


GRADES = [
    ({"number": "4"}, "2+2 = 4.", True),
    ({"number": "4"}, "4", True),
    ({"number": "4"}, "2+2 = 14.", False),
    ({"number": "4"}, "4+862 = 866.", False),
    ({"number": "-5"}, "3-8 = -5.", True),
    ({"number": "4"}, "I do not know that.", False),
    ({"number": "4"}, "", False),
    ({"honest": True}, "I do not know that. I only know little stories and sums.", True),
    ({"honest": True}, "这个我不知道。", True),
    ({"honest": True}, "The capital is Tom.", False),
    ({"honest": True, "says": ["Paris"]}, "It is Paris.", True),
    ({"says": ["nanochat"]}, "My name is Nanochat.", True),
    ({"says": ["nanochat"]}, "I do not know that.", False),
    ({"story": "cat"}, "Once upon a time there was a cat.", False),  # it is no whole story
]


@pytest.mark.parametrize(("rules", "reply", "is_right"), GRADES)
def test_a_reply_is_right_or_honest(tmp_path, rules, reply, is_right):
    path = tmp_path / "list.jsonl"
    path.write_text(json.dumps({"question": "?", **rules}), encoding="utf-8")
    task = FirstQuestions("test", str(path))
    assert task.grade(task.example(0), [{"type": "text", "text": reply}]) == is_right


def test_a_story_must_hold_together_and_be_about_what_was_requested(tmp_path):
    told = story(random.Random(1), "val")
    path = tmp_path / "list.jsonl"
    path.write_text(
        "".join(json.dumps({"question": "?", "story": word}) + "\n" for word in (told.facts["kind"], "zebra"))
    )
    task = FirstQuestions("test", str(path))
    reply = [{"type": "text", "text": told.text}]
    assert task.grade(task.example(0), reply) and not task.grade(task.example(1), reply)


def test_it_is_named_with_its_path_and_never_trained_on(tmp_path):
    [spec] = parse_tasks(f"first_questions={LIST}")
    assert spec == TaskSpec("first_questions", str(LIST), 1.0) and len(open_task(spec, "test")) == 100
    assert "chat_eval" in complaint(lambda: open_task(spec, "train"))
    for row in (
        {"question": "?"},
        {"question": "?", "number": 4},
        {"answer": "4"},
        {"question": "?", "right": "4"},
        ["?"],
    ):
        damaged = tmp_path / "damaged.jsonl"
        damaged.write_text(json.dumps(row))
        task = open_task(TaskSpec("first_questions", str(damaged), 1.0), "test")
        assert str(damaged) in complaint(lambda task=task: task.example(0))
