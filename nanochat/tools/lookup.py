"""Guessing a row's next tokens from its own earlier ones, for `Slots.guesses` of engine.py."""

from collections.abc import Sequence

LONGEST = 3  # tokens that must be equal: three seldom agree by chance
SHORTEST = 2


class Lookup:
    """The tokens of a row, with the places where their last few tokens occurred before."""

    def __init__(self, tokens: Sequence[int]):
        self.tokens: list[int] = []
        self.places: dict[tuple[int, ...], int] = {}  # after the latest occurrence of some tokens
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Take in the row's next token."""
        # Only now something comes after the tokens before it: the row's last tokens are not found at the row's end.
        for size in range(SHORTEST, LONGEST + 1):
            self.places[tuple(self.tokens[-size:])] = len(self.tokens)
        self.tokens.append(token)

    def guess(self, count: int) -> list[int]:
        """Up to `count` tokens: what came after the row's last tokens before, or nothing where they are new."""
        for size in range(LONGEST, SHORTEST - 1, -1):
            place = self.places.get(tuple(self.tokens[-size:]))
            if place is not None and count > 0:
                guess: list[int] = []
                for source in range(place, place + count):
                    # "a b a b" continues with "a b": past the row's end the guess continues with itself.
                    past_end = source - len(self.tokens)
                    guess.append(self.tokens[source] if past_end < 0 else guess[past_end])
                return guess
        return []
