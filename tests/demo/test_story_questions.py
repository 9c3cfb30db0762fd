"""Questions about a story: each way to ask can be asked, training lacks the held-out ones, a gap is named."""

import random
import re
from functools import cache

import pytest

from nanochat.conversation import Message
from nanochat.demo import writer
from nanochat.demo.checker import check_story
from nanochat.demo.plots import plots, pronouns_of
from nanochat.demo.stories import slots_of
from nanochat.demo.story_questions import (
    EVERY_PLOT,
    UNTOLD,
    StoryQuestions,
    questions,
    questions_of,
    tables,
    with_pronoun,
)
from nanochat.task import Example, Split


def asked_in(example) -> list[str]:
    """The texts of a chat's questions, without the story of the first one."""
    texts = [message["content"] for message in example.messages if message["role"] == "user"]
    return [text.rpartition("\n")[2].lower().rstrip(" .?!") for text in texts]


def test_questions_go_on_after_a_story_and_say_what_it_leaves_out():
    after = [example for example in examples("train") if "\n" not in str(example.messages[-2]["content"])]
    assert 0.8 < len(after) / len(examples("train")) < 1
    asked = [message["content"] for example in after for message in example.messages[-2::2]]
    assert any(re.search(r"\b(he|she|him|her|his)\b", question) for question in asked)
    assert not any(re.search(r"\b(him|her|he|she)'s\b", question) for question in asked)
    untold = [example for example in examples("train") if example.answer == UNTOLD]
    assert 0.05 < len(untold) / len(examples("train")) < 0.25
    # An answer is in the last story of the conversation, but for some that sum up what happened.
    spans = 0
    for example in examples("train"):
        told = next(text for text in map(story_in, reversed(example.messages)) if text)
        spans += example.answer == UNTOLD or example.answer.rstrip(".").lower() in told.lower()
    assert spans > 0.6 * len(examples("train"))


def story_in(message: Message) -> str:
    text = str(message["content"]).partition("\n")[0]
    return text if check_story(text, text.split()).ok else ""


@pytest.mark.parametrize("plot", [*plots()])
def test_every_question_about_a_plot_is_asked_of_some_story(plot: str):
    stories = stories_of(plot)
    roles = {role for story in stories for role in story.facts}
    for question in (*tables()[EVERY_PLOT], *tables()[plot]):
        assert slots_of(question.answer) <= roles and question.answer.endswith((".", '."')), question.answer
        for way in (*question.ways, question.held_out):
            assert way and slots_of(way) <= roles and way.endswith("?"), way
    ways = [way for question in questions_of(plot) for way in (*question.ways, question.held_out) if way]
    assert len(ways) == len(set(ways))  # one answer each
    for way, answer in plots()[plot].questions:
        assert any(way in question.ways and answer == question.answer for question in questions_of(plot))
    for story in stories[:60]:
        texts = [question.answer for question in questions(random.Random(0), story)]
        assert all("{" not in text for text in texts) and len(texts) == len(set(texts)) + (texts.count(UNTOLD) == 2)


# Words of answers that stories need not have: an answer says in one word what a story tells in several.
SUMMARIES = {
    *("again", "nobody", "both", "friend", "about", "hungry", "present", "wore", "lived", "found", "first", "story"),
    *("helped", "wanted", "they", "them", "then", "with", "soup", "stuck", "came", "truth"),
}


@pytest.mark.parametrize("plot", [*plots()])
def test_what_an_answer_says_is_in_its_story(plot: str):
    rng = random.Random(1)
    for story in stories_of(plot)[:80]:
        told = set(re.findall(r"[a-z]{4,}", story.text.lower()))
        for question in questions(rng, story):
            if question.answer != UNTOLD and (plot, question.answer) not in corpus_answers(story):
                said = set(re.findall(r"[a-z]{4,}", question.answer.lower())) - SUMMARIES
                assert said <= told, (question, story.text)


def corpus_answers(story: writer.Story) -> set[tuple[str, str]]:
    return {(story.plot, answer) for _, answer in writer.questions(story)}


@cache
def all_stories() -> list[writer.Story]:
    rng = random.Random(0)
    return [writer.story(rng, "train") for _ in range(2500)]


def stories_of(plot: str) -> list[writer.Story]:
    return [story for story in all_stories() if story.plot == plot]


@cache
def examples(split: Split) -> list[Example]:
    task = StoryQuestions(split)
    return [task.example(index) for index in range(600)]


def test_no_held_out_way_is_in_training_for_another_plot():
    corpus = {way for plot in plots().values() for way, _ in plot.questions}
    trained = {pattern(way) for table in tables().values() for question in table for way in question.ways}
    trained |= {pattern(way) for way in corpus}
    held_out = [question.held_out for table in tables().values() for question in table]
    assert not [way for way in held_out if way and pattern(way) in trained]


def pattern(way: str) -> str:
    """A way to ask with the same mark for all slots: {hero} and {friend} are both names."""
    return re.sub(r"\{\w+\}", "{}", way)


def test_ways_that_are_held_out_are_in_the_test_split_alone():
    held_out = {
        question.held_out.lower().rstrip("?")
        for table in tables().values()
        for question in table
        if question.held_out and not slots_of(question.held_out)
    }
    assert len(held_out) >= 10
    assert not held_out & {text for example in examples("train") for text in asked_in(example)}
    tests = [asked_in(example) for example in examples("test")]
    assert held_out & {texts[-1] for texts in tests} and not held_out & {
        text for texts in tests for text in texts[1:-1]
    }


@pytest.mark.parametrize("pronoun", ["he", "she"])
def test_a_pronoun_takes_the_case_of_the_name(pronoun: str):
    rng = random.Random(1)
    stories = [story for story in all_stories()[:250] if pronouns_of(story.hero)["he"] == pronoun]
    him, his = pronouns_of(stories[0].hero)["him"], pronouns_of(stories[0].hero)["his"]
    found = set()
    for story in stories:
        for question in questions(rng, story):
            for way in filter(None, (*question.ways, question.held_out)):
                asked = with_pronoun(random.Random(0), story, way)  # this seed replaces the name
                assert not re.search(rf"\b{story.hero}\b", asked)
                found.add(re.sub(r"\b(the|a|to) [a-z ]+", "", asked))
    subject = rf"\b(did|does|was|is|could|must|when|that) {pronoun}\b"
    for asked in found:
        # After these words the name was the subject.
        assert not re.search(rf"\b(did|does|must|could|when|that) {him}\b", asked, re.IGNORECASE), asked
        if re.search(rf"\b{pronoun}\b", asked):
            assert re.search(subject, asked, re.IGNORECASE), asked
    assert {
        f"Where was {his} home?",
        f"Where does {pronoun} live?",
        f"Who helped {him}?",
        f"Who is {pronoun}?",
    } <= found
    assert any(f"Does {pronoun} have" in asked for asked in found)
