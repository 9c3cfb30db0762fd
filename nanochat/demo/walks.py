"""Conversations as walks: what somebody says next depends on what was said before.

A person orders a story, asks about it, does a sum, says thanks and orders another story. Each task of the demo adds its
own turns to a walk, and takes from it what they refer to. So an example is a walk whose last reply is graded, and these
tasks are trained and measured as the first message of a chat, as the second one, and later.
"""

import random
from dataclasses import dataclass, field
from typing import Any

from nanochat.conversation import Message, Part
from nanochat.demo.writer import Story
from nanochat.ground.rooms import find
from nanochat.task import Example, GeneratedTask, turn

# The tasks whose turns may come before, by weight, and how many of them do in training.
EARLIER = {"stories": 5, "questions": 4, "arithmetic": 3, "identity": 3, "unknown": 3, "memory": 1, "repeat": 1}
COUNTS = (0, 0, 0, 1, 1, 2, 3)
ROOM = 650  # characters after which nothing more comes before: with two stories and a third it fits 512 tokens


@dataclass
class Walk:
    """A conversation so far, and what its next message may refer to."""

    messages: list[Message] = field(default_factory=list)
    stories: list[Story] = field(default_factory=list)  # which the model has told
    last_sum: str = ""  # the answer of the last sum; empty: something else came after it
    has_facts: bool = False  # somebody has said something of themselves

    def say(self, question: str, reply: str | list[Part]) -> None:
        self.messages += turn(question, reply)
        self.last_sum = ""

    def tell(self, order: str, story: Story) -> None:
        self.say(order, story.text)
        self.stories.append(story)

    def wander(self, rng: random.Random, count: int, *without: str) -> None:
        """Add the turns of `count` other tasks, as long as there is room; none of those named in `without`."""
        for _ in range(count):
            left_out = {*without, "memory"} if self.has_facts else {*without}
            tasks = {name: weight for name, weight in EARLIER.items() if name not in left_out}
            if not tasks or sum(len(str(message["content"])) for message in self.messages) > ROOM:
                return
            [name] = rng.choices(list(tasks), list(tasks.values()))
            find("tasks", name)("train").go_on(rng, self)


class WalkTask(GeneratedTask):
    """A task whose examples are walks. Thirds of its test split begin with the turns of 0, 1 and 2 other tasks."""

    not_after: tuple[str, ...] = ()  # tasks whose turns do not come before

    def go_on(self, rng: random.Random, walk: Walk) -> Any:
        """Add at least one turn to a walk; returns what grading the last reply needs."""
        raise NotImplementedError

    def example(self, index: int) -> Example:
        rng = self.rng(index)
        walk = Walk()
        walk.wander(rng, index % 3 if self.split == "test" else rng.choice(COUNTS), *self.not_after)
        answer = self.go_on(rng, walk)
        return Example(walk.messages, answer)
