"""What an episode of reinforcement learning is: a program that converses with the model and rewards it.

A task whose episodes have several turns returns its environment from `Task.environment`. The model guesses a number:

    class Guess(Environment):
        def __init__(self, number):
            self.number = number

        def start(self):
            return [{"role": "user", "content": "Guess my number, 1 to 9."}]

        def step(self, reply):
            guess = text_of(reply).strip()
            if guess == str(self.number):
                return Step(reward=1.0)
            return Step([{"role": "user", "content": "higher" if guess < str(self.number) else "lower"}])
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from nanochat.conversation import Message, Part


@dataclass(frozen=True)
class Step:
    """What follows a reply."""

    messages: list[Message] = field(default_factory=list)  # for the model to answer; none: the episode is over
    reward: float = 0.0  # added to the episode's


class Environment:
    """One episode. Each sample of a question has an environment of its own, which begins in the same state."""

    def start(self) -> list[Message]:
        """The messages that the first reply follows."""
        raise NotImplementedError

    def step(self, reply: Sequence[Part]) -> Step:
        """What follows the model's reply."""
        raise NotImplementedError
