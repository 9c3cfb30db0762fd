"""A story and questions about it, as people ask them in a chat after the model has told its story.

The corpus asks each question in one way (grammar.txt). story_questions.txt has the ways in which people ask, and
questions that the corpus does not have.
"""

import random
import re
from dataclasses import dataclass
from functools import cache

from nanochat.demo import writer
from nanochat.demo.plots import lexicon, plots, pronouns_of
from nanochat.demo.sections import entries, sections
from nanochat.demo.stories import corpus_split, order, slots_of, typed
from nanochat.demo.walks import Walk, WalkTask

LEFT_OUT = ("wear", "weather")  # roles that some stories lack and people ask about by name: "What colour was the hat?"
UNTOLD = "The story does not say."
EVERY_PLOT = "every plot"  # the table with questions about stories of any plot
SHOWN_SHARE = 0.15  # share of the examples at the start of a chat whose story is in the first question
BETWEEN_SHARE = 0.15  # share of the questions that come after something else than the story


@dataclass(frozen=True)
class Question:
    """A question about a story: ways to ask, and its answer."""

    ways: tuple[str, ...]
    answer: str
    held_out: str | None = None  # the way that training does not have

    def draw(self, rng: random.Random, is_new: bool) -> str:
        """One way to ask; with `is_new` the one that is held out, if there is one."""
        return self.held_out if is_new and self.held_out else rng.choice(self.ways)


@cache
def tables() -> dict[str, tuple[Question, ...]]:
    """The questions of story_questions.txt by plot, with slots for roles."""
    found: dict[str, tuple[Question, ...]] = {}
    for plot, lines in sections("story_questions.txt").items():
        questions = [(answer, " | ".join(asked).split(" | ")) for answer, asked in entries(lines).items()]
        found[plot] = tuple(Question(tuple(ways[:-1]), answer, ways[-1]) for answer, ways in questions)
    return found


@cache
def questions_of(plot: str) -> tuple[Question, ...]:
    """All questions about stories of a plot, with slots for roles."""
    corpus = [Question((way,), answer) for way, answer in plots()[plot].questions]
    found: dict[str, Question] = {}
    for question in (*corpus, *tables()[EVERY_PLOT], *tables()[plot]):
        other = found.get(question.answer, question)
        ways = dict.fromkeys((*other.ways, *question.ways))
        found[question.answer] = Question(tuple(ways), question.answer, question.held_out or other.held_out)
    return tuple(found.values())


def questions(rng: random.Random, story: writer.Story) -> list[Question]:
    """What can be asked about a story. At most one of the questions is about something that the story leaves out."""
    words = {role: rng.choice(lexicon()[role]) for role in LEFT_OUT if role not in story.facts} | story.facts
    found: list[Question] = []
    left_out: list[str] = []
    for question in questions_of(story.plot):
        ways = tuple(writer.filled(way, words) for way in question.ways if slots_of(way) <= words.keys())
        answer = question.answer if "trait" in story.facts else question.answer.replace("{trait} ", "")
        if not slots_of(answer) <= story.facts.keys():
            left_out += ways
        elif ways:
            held_out = None
            if question.held_out and slots_of(question.held_out) <= words.keys():
                held_out = writer.filled(question.held_out, words)
            found.append(Question(ways, writer.filled(answer, story.facts), held_out))
    return [*found, Question(tuple(left_out), UNTOLD)] if left_out else found


class StoryQuestions(WalkTask):
    """Some questions about a story: in one message, or after the model has told it to order.

    The answer is a span of the story. Where the story leaves out what is asked for, it says so. In half of the test
    split the last question is asked in a way that the train split never has, if it has one.
    """

    name = "questions"

    def go_on(self, rng: random.Random, walk: Walk) -> str:
        is_test = self.split == "test"
        is_shown = not walk.stories and rng.random() < SHOWN_SHARE
        if walk.stories and not is_test:
            story = walk.stories[-1]
        else:
            story = writer.story(rng, corpus_split(self.split))
            if not is_shown:
                walk.tell(order(rng, story, is_next=bool(walk.stories))[0], story)
        if not is_shown and rng.random() < BETWEEN_SHARE:
            walk.wander(rng, 1, "stories", "questions")
        asked = rng.sample(questions(rng, story), 1 + rng.randrange(3 if is_test else 4))
        is_new = is_test and rng.random() < 0.5
        for number, question in enumerate(asked, 1):
            way = question.draw(rng, is_new and number == len(asked))
            way = typed(rng, way if is_shown else with_pronoun(rng, story, way), story.facts)
            walk.say(f"{story.text}\n{way}" if is_shown and number == 1 else way, question.answer)
        return asked[-1].answer


def with_pronoun(rng: random.Random, story: writer.Story, question: str) -> str:
    """The question, sometimes with a pronoun for the hero, of whom the story has just told."""
    if rng.random() < 0.5:
        return question
    pronouns = pronouns_of(story.hero)
    question = re.sub(rf"\b{story.hero}'s\b", pronouns["his"], question)
    subject = rf"\b([Dd]id|[Dd]oes|[Ww]as|[Ii]s|could|must|when|that) {story.hero}\b"
    question = re.sub(subject, rf"\1 {pronouns['he']}", question)
    return re.sub(rf"\b{story.hero}\b", pronouns["him"], question)
