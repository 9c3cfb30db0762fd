"""What every task is: examples by index, each a conversation with its reference answer, and a grade for a reply."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nanochat.conversation import Message, Part, parts_of, text_of
from nanochat.shell.cli import UserError

Split = Literal["train", "test"]
Kind = Literal["generative", "choice", "dialogue"]  # graded by what it writes, by the letter it prefers, not at all


@dataclass(frozen=True)
class Example:
    """One conversation. Its last message is the assistant's reference answer; those before it are the question."""

    messages: list[Message]
    answer: Any = None  # what grading needs
    letters: tuple[str, ...] = ()  # of a multiple-choice question: the answers to choose from, each a single letter

    @property
    def question(self) -> list[Message]:
        return self.messages[:-1]


@dataclass(frozen=True)
class Pair:
    """Two replies to one question, of which the first is preferred."""

    question: list[Message]
    chosen: Message
    rejected: Message

    @property
    def conversations(self) -> tuple[list[Message], list[Message]]:
        """Both, with nothing to learn from but the replies that are compared."""
        given = [{**message, "train": False} for message in self.question]
        return [*given, self.chosen], [*given, self.rejected]


class Task:
    """A row of examples, the same for the same arguments on every machine.

    A subclass sets the three fields, `__len__`, `example`, and `grade` unless it is a dialogue.
    """

    name: str
    kind: Kind
    baseline: float = 0.0  # accuracy of guessing at random

    def __len__(self) -> int:
        raise NotImplementedError

    def example(self, index: int) -> Example:
        """Example 0 <= index < len."""
        raise NotImplementedError

    def pair(self, index: int) -> Pair:
        """Example `index` for preference optimisation: its reference answer and a wrong one."""
        messages = self.example(index).messages
        return Pair(messages[:-1], messages[-1], {"role": "assistant", "content": self.wrong(index)})

    def wrong(self, index: int) -> str | list[Part]:
        """A reply to example `index` that is not right, the same at every call: here the reference answer of the next
        example that has another."""
        example = self.example(index)
        for other in range(index + 1, index + 100):
            reply = self.example(other % len(self)).messages[-1]["content"]
            if not self.grade(example, parts_of(reply)):
                return reply
        raise UserError(f"--tasks {self.name}: all answers are the same, there is no wrong one")

    def grade(self, example: Example, reply: Sequence[Part]) -> bool:
        """Whether an assistant's reply is right."""
        raise NotImplementedError(f"{self.name} has nothing to grade")

    def reward(self, example: Example, reply: Sequence[Part]) -> float:
        """The reward in reinforcement learning, 0 to 1."""
        return float(self.grade(example, reply))


def choice_question(question: str, choices: Sequence[str], letters: Sequence[str]) -> str:
    """A multiple-choice question as one text; its answer is a letter alone."""
    lines = [f"- {letter}: {choice}" for letter, choice in zip(letters, choices, strict=True)]
    return "\n".join([f"Multiple choice: {question}", *lines, "Answer with the letter alone."])


def chosen_letter(reply: Sequence[Part]) -> str:
    """What a reply to a multiple-choice question chose."""
    return text_of(reply).strip()[:1]
