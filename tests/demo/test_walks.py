"""Walks: every task of the demo at every place of a chat, with what was said before."""

from collections import Counter

import pytest

from nanochat.conversation import Message, parts_of
from nanochat.demo.walks import Walk, WalkTask
from nanochat.ground.rooms import find

TASKS = ("stories", "new_stories", "questions", "arithmetic", "identity", "unknown", "memory", "repeat")


def count_of(messages: list[Message]) -> int:
    return sum(message["role"] == "user" for message in messages)


@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_measured_as_first_second_and_later_message(name: str):
    task = find("tasks", name)("test")
    assert isinstance(task, WalkTask)
    examples = [task.example(index) for index in range(90)]
    places = Counter(min(count_of(example.messages), 3) for example in examples)
    assert places[3] >= 20 and places[2] >= 8 and (places[1] >= 20 or name in ("memory", "questions")), places
    for example in examples:
        assert task.grade(example, parts_of(example.messages[-1]["content"])), example
        assert sum(len(str(message["content"])) for message in example.messages) < 2400  # it fits 512 tokens


def test_a_conversation_goes_on_with_what_was_said():
    stories, questions, sums = (find("tasks", name)("train") for name in ("stories", "questions", "arithmetic"))
    for number in range(60):
        rng = stories.rng(number)
        walk = Walk()
        stories.go_on(rng, walk)
        stories.go_on(rng, walk)
        first, second = walk.stories
        assert first.hero != second.hero and walk.messages[3]["content"] == second.text
        answer = questions.go_on(rng, walk)
        assert walk.stories == [first, second] and walk.messages[-1]["content"] == answer  # about the second one
        assert sums.go_on(rng, walk).startswith(walk.last_sum)  # which is rounded, or empty after a mistake
        walk.say("Thanks!", "You are welcome!")
        assert not walk.last_sum


def test_nobody_tells_their_name_twice():
    for index in range(300):
        walk = Walk(has_facts=True)
        walk.wander(find("tasks", "memory")("train").rng(index), 3)
        said = " ".join(str(message["content"]) for message in walk.messages)
        assert "Nice to meet you, " not in said and "you have not told me" not in said
