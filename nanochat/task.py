"""A task: examples by number, each a conversation with its reference answer, and a grade for a reply.

A new task is one file in tasks/, with a subclass of `GeneratedTask` (a program writes the examples) or of `RecordTask`
(tasks/recorded.py: each example is a record of a dataset), and one row in its room, tasks/__init__.py:

    class Parity(GeneratedTask):
        name = "parity"
        baseline = 0.5  # accuracy of guessing

        def example(self, index):
            number = self.rng(index).randrange(1000)
            answer = "odd" if number % 2 else "even"
            return Example(turn(f"Is {number} odd or even?", answer), answer)

An environment is an episode of reinforcement learning: a program that converses with the model and rewards it. One file
with such a class is enough, `--tasks file.py:Guess` (tasks/flag.py). Here the model guesses a number:

    class Guess(Environment):
        def __init__(self, rng):
            self.number = rng.randint(1, 9)

        def start(self):
            return [{"role": "user", "content": "Guess my number, 1 to 9."}]

        def step(self, reply):
            guess = text_of(reply).strip()
            if guess == str(self.number):
                return Step(reward=1.0)
            return Step([{"role": "user", "content": "higher" if guess < str(self.number) else "lower"}])
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from nanochat.conversation import Message, Part, check_message, parts_of, text_of
from nanochat.ground.cli import UserError

LARGEST_REWARD = 1e9  # sums and squares of rewards are finite in fp32

Split = Literal["train", "test"]
# How a reply is graded: by its text, by the letter that the model prefers, or not at all.
Kind = Literal["generative", "choice", "dialogue"]

# Where the examples of a task come from: a program, a dataset of a hub or of the user's own copy, the user's file.
Source = Literal["program", "dataset", "file"]


# ---------------------------------------------------------------------- examples


@dataclass(frozen=True)
class Example:
    """One conversation. Its last message is the assistant's reference answer; what precedes it is the question."""

    messages: list[Message]
    answer: Any = None  # what grading needs
    letters: tuple[str, ...] = ()  # the answers of a multiple-choice question, each a single letter
    tools: list[dict[str, Any]] | None = None  # functions that the assistant may call, for a chat template
    fields: dict[str, Any] = field(default_factory=dict)  # all fields of the record that it was read from

    @property
    def question(self) -> list[Message]:
        return self.messages[:-1]


@dataclass(frozen=True)
class Pair:
    """Two replies to one question, of which the first is preferred. Turns may lead from the question to each reply:
    the calls of an agent, with their results."""

    question: list[Message]
    chosen: Message
    rejected: Message
    to_chosen: list[Message] = field(default_factory=list)
    to_rejected: list[Message] = field(default_factory=list)

    @property
    def conversations(self) -> tuple[list[Message], list[Message]]:
        """Both conversations. Only the replies after the question, which are compared, are learned."""
        question = [{**message, "train": False} for message in self.question]
        return [*question, *self.to_chosen, self.chosen], [*question, *self.to_rejected, self.rejected]


def turn(question: str, answer: str | list[Part]) -> list[Message]:
    """One question with its answer, as messages."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


# ---------------------------------------------------------------------- episodes


@dataclass(frozen=True)
class Step:
    """The environment's answer to a reply."""

    # The model answers these. Without any the episode is over. Their role is "user", or "tool" after a reply that calls
    # one.
    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0  # added to the reward of the episode


class Environment:
    """One episode. Each sample of a question has its own environment, and all of them begin in the same state.

    Only `rng` is random in it: the same numbers give the same episode.
    """

    tools: list[dict[str, Any]] | None = None  # functions that the model may call, for a chat template

    def __init__(self, rng: random.Random):
        self.rng = rng

    def start(self) -> list[Message]:
        """The messages before the first reply."""
        raise NotImplementedError

    def step(self, reply: Sequence[Part]) -> Step:
        """The answer to the model's reply."""
        raise NotImplementedError

    def reference_reply(self) -> str | None:
        """A reply that follows the rules at this point, though it may be a bad move. SFT on episodes of such replies
        teaches a small model the form of a reply before rewards do. None: SFT has nothing to learn."""
        return None


def opening_of(environment: Environment, name: str) -> list[Message]:
    """The messages before the first reply.

    Raises UserError: when `start` returns anything else; `name` is the task's.
    """
    source = f"the environment of {name}: start"
    messages = _checked(environment.start(), source, "a list of messages")
    if not messages:
        raise UserError(f"{source} returned no messages")
    return messages


def take_step(environment: Environment, reply: Sequence[Part], name: str) -> Step:
    """What follows the model's reply. Others write environments, so what one returns is checked.

    Raises UserError: when it is not a Step with messages and a finite reward; `name` is the task's.
    """
    step = environment.step(reply)
    source = f"the environment of {name}"
    wanted = "a Step, with a list of messages"
    if not isinstance(step, Step):
        raise UserError(f"{source} returned {repr(step)[:40]}: {wanted}")
    messages = _checked(step.messages, source, wanted)
    return Step(messages, checked_reward(step.reward, f"the environment or the reward of {name}"))


def _checked(messages: Any, source: str, wanted: str) -> list[Message]:
    if not isinstance(messages, list | tuple):
        raise UserError(f"{source} returned {repr(messages)[:40]}: {wanted}")
    try:
        for number, message in enumerate(messages):
            check_message(number, message)
    except ValueError as error:
        raise UserError(f"{source}: {error}") from error
    return list(messages)


def checked_reward(value: Any, source: str, place: str = "") -> float:
    """A number, or an array or tensor of one number, as a reward.

    Raises UserError: for anything else, NaN, infinity, and what is too large; `source` returned it, `place` is for
    what.
    """
    number = value.item() if getattr(value, "shape", None) in ((), (1,)) else value
    if not isinstance(number, int | float) or not abs(number) <= LARGEST_REWARD:
        raise UserError(f"{source} returned {repr(value)[:40]}{place}: not a number up to {LARGEST_REWARD:g}")
    return float(number)


# ---------------------------------------------------------------------- tasks


class Task:
    """A list of examples, the same for the same arguments on every machine."""

    name: str
    identity: bytes = b""  # what a resumed run must find unchanged besides the examples, as a hash
    kind: Kind = "generative"
    source: Source = "program"
    baseline: float = 0.0  # accuracy of guessing at random

    def __init__(self, split: Split, path: str | None = None, hub: str = "hf"):
        """`path`: a local file or folder instead of the dataset of a hub."""
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def example(self, index: int) -> Example:
        """Example 0 <= index < len."""
        raise NotImplementedError

    def where(self, index: int) -> str:
        """The place of an example, for messages."""
        return f"example {index:,}"

    def grade(self, example: Example, reply: Sequence[Part]) -> bool:
        """Whether an assistant's reply is right: its text, or the letter that it chose, is the answer."""
        if self.kind == "dialogue":
            raise NotImplementedError(f"{self.name} has nothing to grade")
        if example.answer is None:
            problem = "an example has no answer, by which a reply is graded"
            raise UserError(f'--tasks {self.name}: {problem}: set Example(answer=...), or kind = "dialogue"')
        text = text_of(reply).strip()
        return (text[:1] if self.kind == "choice" else text) == example.answer

    def measures(self, replies: Sequence[tuple[Example, Sequence[Part]]]) -> dict[str, float | Sequence[float | None]]:
        """What else there is to say about an evaluation's replies, by name; often nothing. A number from 0 to 1 for all
        of them, or for each (None: it does not count), whose mean has an interval."""
        return {}

    def reward(self, example: Example, reply: Sequence[Part]) -> float:
        """The reward in reinforcement learning, from 0 to 1; 0 where nothing can be graded."""
        return 0.0 if self.kind == "dialogue" else float(self.grade(example, reply))

    def environment(self, example: Example) -> Environment:
        """The episode of an example in reinforcement learning. By default it ends with the first reply."""
        return OneReply(self, example)

    def pair(self, index: int) -> Pair:
        """Example `index` for preference optimisation: its reference answer and a wrong one."""
        messages = self.example(index).messages
        return Pair(messages[:-1], messages[-1], {"role": "assistant", "content": self.wrong(index)})

    def wrong(self, index: int) -> str | list[Part]:
        """A wrong reply to example `index`, the same at every call. By default it is the reference answer of the next
        example whose answer differs."""
        example = self.example(index)
        for other in range(index + 1, index + 100):
            reply = self.example(other % len(self)).messages[-1]["content"]
            if not self.grade(example, parts_of(reply)):
                return reply
        raise UserError(f"--tasks {self.name}: all answers are the same, there is no wrong one")


class OneReply(Environment):
    """A question of a task, and the reward of the reply to it."""

    def __init__(self, task: Task, example: Example):
        self.task = task
        self.example = example
        self.tools = example.tools

    def start(self) -> list[Message]:
        return self.example.question

    def step(self, reply: Sequence[Part]) -> Step:
        return Step(reward=self.task.reward(self.example, reply))


class GeneratedTask(Task):
    """Examples that a program writes: example `index` is a function of (name, split, index)."""

    sizes = {"train": 100_000, "test": 1_000}

    def __init__(self, split: Split, path: str | None = None, hub: str = "hf"):
        self.split: Split = split

    def __len__(self) -> int:
        return self.sizes[self.split]

    def rng(self, index: int, purpose: str = "") -> random.Random:
        """The random numbers of one example."""
        return random.Random(f"{self.name}/{self.split}/{index}{purpose}")
