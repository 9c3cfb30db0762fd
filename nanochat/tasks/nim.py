"""Nim: two players take 1, 2 or 3 stones in turn, and who takes the last one wins. The other player moves at random.

    user         Nim with 9 stones. Take 1, 2 or 3.
    assistant    1
    user         I take 2, 6 left.
    assistant    2
    user         I take 3, 1 left.
    assistant    1                                        the model has won: reward 1

The best play is known: leave a multiple of 4.
"""

import random
from collections.abc import Sequence

from nanochat.conversation import Message, Part, text_of
from nanochat.task import Environment, Step

MOVES = (1, 2, 3)
STONES = range(4, 10)  # at the beginning


class Nim(Environment):
    """A game; 1 for a win, 0 for a loss or anything but a move."""

    def __init__(self, rng: random.Random):
        super().__init__(rng)
        self.left = rng.choice(STONES)

    def start(self) -> list[Message]:
        return [{"role": "user", "content": f"Nim with {self.left} stones. Take 1, 2 or 3."}]

    def step(self, reply: Sequence[Part]) -> Step:
        move = text_of(reply).strip()
        if move not in map(str, MOVES) or int(move) > self.left:
            return Step()
        self.left -= int(move)
        if self.left == 0:
            return Step(reward=1.0)
        answer = self.rng.choice([move for move in MOVES if move <= self.left])
        self.left -= answer
        if self.left == 0:
            return Step()
        return Step([{"role": "user", "content": f"I take {answer}, {self.left} left."}])

    def reference_reply(self) -> str:
        return str(self.rng.choice([move for move in MOVES if move <= self.left]))
