"""An episode of reinforcement learning: a program that converses with the model and rewards it.

One file with such a class is enough, `--tasks file.py:Guess`. Here the model guesses a number:

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
from typing import Any

from nanochat.cli import UserError
from nanochat.conversation import Message, Part, check_message

LARGEST_REWARD = 1e9  # sums and squares of rewards are finite in fp32


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
    messages = environment.start()
    if not isinstance(messages, list | tuple) or not messages:
        raise UserError(f"the environment of {name}: start returned {repr(messages)[:40]}: a list of messages")
    _check(messages, f"the environment of {name}", "start")
    return list(messages)


def take_step(environment: Environment, reply: Sequence[Part], name: str) -> Step:
    """What follows the model's reply. Others write environments, so what one returns is checked.

    Raises UserError: when it is not a Step with messages and a finite reward; `name` is the task's.
    """
    step = environment.step(reply)
    if not isinstance(step, Step) or not isinstance(step.messages, list | tuple):
        shown = step if not isinstance(step, Step) else step.messages
        raise UserError(f"the environment of {name} returned {repr(shown)[:40]}: a Step, with a list of messages")
    _check(step.messages, f"the environment of {name}", "a step")
    return Step(list(step.messages), checked_reward(step.reward, f"the environment or the reward of {name}"))


def _check(messages: Sequence[Any], source: str, place: str) -> None:
    try:
        for number, message in enumerate(messages):
            check_message(number, message)
    except ValueError as error:
        raise UserError(f"{source}: {error} of {place}") from error


def checked_reward(value: Any, source: str, place: str = "") -> float:
    """A number, or an array or tensor of one number, as a reward.

    Raises UserError: for anything else, NaN, infinity, and what is too large; `source` returned it, `place` is for
    what.
    """
    number = value.item() if getattr(value, "shape", None) in ((), (1,)) else value
    if not isinstance(number, int | float) or not abs(number) <= LARGEST_REWARD:
        raise UserError(f"{source} returned {repr(value)[:40]}{place}: not a number up to {LARGEST_REWARD:g}")
    return float(number)
