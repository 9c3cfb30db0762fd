"""Repeating what somebody says: the plainest exercise in copying words that the model has never seen."""

import random

from nanochat.demo import writer
from nanochat.demo.plots import lexicon
from nanochat.demo.sections import sections
from nanochat.demo.stories import corpus_split
from nanochat.demo.walks import Walk, WalkTask

TIMES = (("two times", 2), ("twice", 2), ("three times", 3), ("3 times", 3), ("four times", 4))


class Repeat(WalkTask):
    """One to four words or numbers, most of them without a meaning, or some words of a story; sometimes more than once.
    The test split also has the corpus's new words."""

    name = "repeat"

    def go_on(self, rng: random.Random, walk: Walk) -> str:
        said = " ".join(self._word(rng) for _ in range(rng.choice((1, 1, 2, 3, 4))))
        form = rng.random()
        if form < 0.35:
            words = writer.story(rng, corpus_split(self.split)).text.replace('"', "").split()
            first = rng.randrange(len(words) - 7)
            said = " ".join(words[first : first + rng.randint(2, 7)]).rstrip(".!?,")
        elif form < 0.45:
            often, count = rng.choice(TIMES)
            word = self._word(rng)
            repeated = ", ".join([word] * count)
            walk.say(f"Say {word} {often}.", repeated)
            return repeated
        walk.say(rng.choice(sections("repeat.txt")["ways"]).format(said=said), said)
        return said

    def _word(self, rng: random.Random) -> str:
        form = rng.random()
        if form < 0.5:
            name = writer.made_up_name(rng)
            return name if rng.random() < 0.6 else name.lower()
        if form < 0.65:
            return str(rng.randrange(10 ** rng.randrange(1, 8)))
        new = self.split == "test" and rng.random() < 0.5
        rows = ("new name", "new kind") if new else ("rare she", "rare he", "rare kind", "object", "food")
        return rng.choice(lexicon()[rng.choice(rows)])
