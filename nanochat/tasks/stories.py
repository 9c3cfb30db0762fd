"""Stories to order, and questions about a story, both drawn from the grammar of the demo corpus.

Combinations that the corpus holds out are in the test split only.
"""

import random
import re
from collections.abc import Sequence

from nanochat.conversation import Part, text_of
from nanochat.demo import corpus as demo
from nanochat.demo.checker import check_story
from nanochat.tasks.task import Example, Split, Task

ORDERS = (
    "Tell me a story about {hero} the {kind}.",
    "Tell me a story about a {kind} named {hero}.",
    "Please tell me a story about a {trait} {kind} named {hero}.",
    "Write a story about {hero}, a {trait} {kind}.",
    "Can you tell me about {hero} the {kind}?",
    "I want to hear a story about {hero}.",
    "Tell me a story.",
    "A story, please!",
)


class _Told(Task):
    """Drawn from the demo corpus's grammar: its train split, or what that holds out."""

    def __init__(self, split: Split):
        self.split = split
        self.corpus: demo.Split = "train" if split == "train" else "val"

    def __len__(self) -> int:
        return 100_000 if self.split == "train" else 1_000


class Stories(_Told):
    """A story to order; graded by the story checker, and by whether the hero's name that was asked for is in it. What
    kind of animal the hero is to be is not graded."""

    name, kind, baseline = "stories", "generative", 0.0

    def example(self, index: int) -> Example:
        rng, story = self._draw(index)
        order = rng.choice(ORDERS)
        hero = story.hero if "{hero}" in order else ""
        messages = [
            {"role": "user", "content": order.format_map(story.facts)},
            {"role": "assistant", "content": story.text},
        ]
        return Example(messages, hero)

    def wrong(self, index: int) -> str:
        """The story, but from its middle on its hero has another name: what a small model gets wrong."""
        rng, story = self._draw(index)
        text, name = story.text, re.compile(rf"\b{story.hero}\b")
        places = [match.start() for match in name.finditer(text)]
        middle = next((place for place in places if place > len(text) // 2), places[-1])
        others = rng.sample(names := demo.words("hero"), len(names))
        told = (text[:middle] + name.sub(other, text[middle:]) for other in others if other not in text)
        # A hero who is named once can have another name, unless that is a girl's and the story says "he".
        return next(wrong for wrong in told if not check_story(wrong).ok)

    def _draw(self, index: int) -> tuple[random.Random, demo.Story]:
        rng = random.Random(f"stories/{self.split}/{index}")
        return rng, demo.story(rng, self.corpus)

    def grade(self, example: Example, reply: Sequence[Part]) -> bool:
        text = text_of(reply)
        return check_story(text).ok and re.search(rf"\b{example.answer}\b", text) is not None


class StoryQuestions(_Told):
    """A short story and a question about it; the answer is one sentence."""

    name, kind, baseline = "questions", "generative", 0.0

    def example(self, index: int) -> Example:
        rng = random.Random(f"questions/{self.split}/{index}")
        story = demo.story(rng, self.corpus)
        asked = demo.questions(story)
        messages = []
        for place, (question, answer) in enumerate(rng.sample(asked, 1 + rng.randrange(3))):
            text = f"{story.text}\n{question}" if place == 0 else question
            messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        return Example(messages, messages[-1]["content"])

    def grade(self, example: Example, reply: Sequence[Part]) -> bool:
        return text_of(reply).strip() == example.answer
