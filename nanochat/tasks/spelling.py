"""Letters of words: a model that reads tokens has to learn how they are spelled.

The words come from the demo corpus; about one in ten is held out and appears only in the test split.
"""

import random
import re
from collections.abc import Sequence
from functools import cache

from nanochat.conversation import Part, text_of
from nanochat.demo.plots import story_words
from nanochat.demo.writer import held_out
from nanochat.task import Example, GeneratedTask, Split, turn

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
SPELL = (
    "Spell the word {word}.",
    "How do you spell {word}?",
    "How is {word} spelled?",
    "Please spell {word} for me.",
    "Can you spell {word}?",
    "Spell {word}, letter by letter.",
    "What letters is the word {word} made of?",
    "{word} - how do I spell that?",
)
COUNT = (
    "How many times does the letter {letter} appear in {word}?",
    "How many {letter}s are in the word {word}?",
    "How often is the letter {letter} in {word}?",
    "Count the letter {letter} in {word}.",
    "In {word}, how many times do you see the letter {letter}?",
    "How many letters {letter} are there in the word {word}?",
)
RUN = re.compile(r"\b[a-z](?:(?:-| ?, ?| )[a-z]\b)+")  # b-e-l-l, b e l l or b, e, l, l
INTEGER = re.compile(r"[0-9]+")


class Spelling(GeneratedTask):
    """A word, letter by letter; graded by the last row of single letters."""

    name = "spelling"

    def word(self, index: int) -> str:
        """Words take turns; everything else about an example is drawn at random."""
        of_split = words(self.split)
        return of_split[index % len(of_split)]

    def example(self, index: int) -> Example:
        rng = self.rng(index)
        word = self.word(index)
        answer = f"The word {word} is spelled {'-'.join(word)}."
        return Example(turn(rng.choice(SPELL).format(word=word), answer), word)

    def grade(self, example: Example, reply: Sequence[Part]) -> bool:
        runs = RUN.findall(text_of(reply).lower())
        return bool(runs) and re.sub(r"[^a-z]", "", runs[-1]) == example.answer


class LetterCount(Spelling):
    """How often a letter is in a word: the word is spelled, then the tool counts; graded by the last number."""

    name = "letters"

    def example(self, index: int) -> Example:
        rng = self.rng(index)
        word = self.word(index)
        repeated = sorted({letter for letter in word if word.count(letter) > 1})
        # Repeated letters are rare: drawn only from the alphabet or the word, nearly every answer would be 0 or 1.
        if repeated and rng.random() < 0.7:
            letter = rng.choice(repeated)
        else:
            letter = rng.choice(rng.choice((word, word, ALPHABET)))
        count = str(word.count(letter))
        answer = [
            {"type": "text", "text": f"The word {word} is spelled {'-'.join(word)}. "},
            {"type": "python", "text": f'"{word}".count("{letter}")'},
            {"type": "python_output", "text": count},
            {"type": "text", "text": f"The letter {letter} is in it {count} {'time' if count == '1' else 'times'}."},
        ]
        return Example(turn(rng.choice(COUNT).format(word=word, letter=letter), answer), count)

    def grade(self, example: Example, reply: Sequence[Part]) -> bool:
        numbers = INTEGER.findall(text_of(reply))
        return bool(numbers) and numbers[-1] == example.answer


@cache
def words(split: Split) -> tuple[str, ...]:
    """Words of three letters or more, in a fixed order without a pattern."""
    found = list(story_words())
    random.Random("words").shuffle(found)
    return tuple(word for word in found if held_out("word", word) == (split == "test"))
