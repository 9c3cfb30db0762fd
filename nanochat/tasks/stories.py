"""Stories to order, and questions about a story, both drawn from the grammar of the demo corpus.

Combinations that the corpus holds out are in the test split only.
"""

import random
import re
from collections.abc import Sequence

from nanochat.conversation import Part, text_of
from nanochat.demo import corpus as demo
from nanochat.demo.checker import check_story
from nanochat.task import Example, GeneratedTask, Split, turn
from nanochat.tasks.typed import as_typed

ORDERS = (
    "Tell me a story about {hero} the {kind}.",
    "Tell me a story about a {kind} named {hero}.",
    "Please tell me a story about a {trait} {kind} named {hero}.",
    "Write a story about {hero}, a {trait} {kind}.",
    "Can you tell me about {hero} the {kind}?",
    "I want to hear a story about {hero}.",
    "Tell me a story.",
    "A story, please!",
    "Tell me a story about a {kind}.",
    "Write a little story about a {trait} {kind}.",
    "Can you tell me a story?",
    "I would like to hear a story.",
    "Read me a bedtime story about a {kind}.",
    "Another story, please!",
    "Story",
    "讲一个故事。",
)


class Stories(GeneratedTask):
    """A story to order; graded by the story checker, and by whether the requested name of the hero is in it.

    The requested kind of animal is not graded.
    """

    name = "stories"

    def example(self, index: int) -> Example:
        rng, story = self._draw(index)
        order = rng.choice(ORDERS)
        hero = story.hero if "{hero}" in order else ""
        question = order.format_map(story.facts)
        if not hero:
            question = as_typed(rng, question)
        return Example(turn(question, story.text), hero)

    def wrong(self, index: int) -> str:
        """The story, but its hero has another name from the middle on: the typical mistake of a small model."""
        rng, story = self._draw(index)
        hero = re.compile(rf"\b{story.hero}\b")
        places = [match.start() for match in hero.finditer(story.text)]
        middle = next((place for place in places if place > len(story.text) // 2), places[-1])
        names = demo.words("hero")
        for name in rng.sample(names, len(names)):
            if name in story.text:
                continue
            wrong = story.text[:middle] + hero.sub(name, story.text[middle:])
            # A hero with a single mention can have another name, unless it is a girl's and the story says "he".
            if not check_story(wrong).ok:
                return wrong
        raise AssertionError(f"no other name makes story {index} wrong")

    def grade(self, example: Example, reply: Sequence[Part]) -> bool:
        text = text_of(reply)
        return check_story(text).ok and re.search(rf"\b{example.answer}\b", text) is not None

    def _draw(self, index: int) -> tuple[random.Random, demo.Story]:
        rng = self.rng(index)
        return rng, demo.story(rng, _corpus_split(self.split))


class StoryQuestions(GeneratedTask):
    """A short story and a question about it; the answer is one sentence."""

    name = "questions"

    def example(self, index: int) -> Example:
        rng = self.rng(index)
        story = demo.story(rng, _corpus_split(self.split))
        questions = demo.questions(story)
        messages = []
        for place, (question, answer) in enumerate(rng.sample(questions, 1 + rng.randrange(3))):
            messages += turn(f"{story.text}\n{question}" if place == 0 else question, answer)
        return Example(messages, messages[-1]["content"])


def _corpus_split(split: Split) -> demo.Split:
    """The corpus holds combinations out for its own validation split: they are our test split."""
    return "train" if split == "train" else "val"
