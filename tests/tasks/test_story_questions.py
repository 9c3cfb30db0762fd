"""Questions about a story: each way to ask can be asked, training lacks the held-out ones, a gap is named."""

import random
import re

import pytest

from nanochat.demo import corpus as demo
from nanochat.demo.checker import check_story
from nanochat.demo.plots import plots, pronouns_of
from nanochat.tasks.stories import slots_of
from nanochat.tasks.story_questions import ALL, UNTOLD, StoryQuestions, questions, questions_of, tables, with_pronoun


def asked_in(example) -> list[str]:
    """The texts of a chat's questions, without the story of the first one."""
    texts = [message["content"] for message in example.messages if message["role"] == "user"]
    return [text.rpartition("\n")[2].lower().rstrip(" .?!") for text in texts]


def test_questions_go_on_after_a_story_and_say_what_it_leaves_out():
    examples = [StoryQuestions("train").example(index) for index in range(1000)]
    after = [example for example in examples if "\n" not in example.messages[0]["content"]]
    assert 0.5 < len(after) / len(examples) < 0.7
    for example in after:
        assert check_story(example.messages[1]["content"], example.messages[0]["content"].split()).ok
    asked = [message["content"] for example in after for message in example.messages[2::2]]
    assert any(re.search(r"\b(he|she|him|her|his)\b", question) for question in asked)
    assert not any(re.search(r"\b(him|her|he|she)'s\b", question) for question in asked)
    untold = [example for example in examples if example.answer == UNTOLD]
    assert 0.05 < len(untold) / len(examples) < 0.25
    for example in untold:
        assert not re.search(r"wear|have on", asked_in(example)[-1]) or " wore " not in str(example.messages)
    talk = [example for example in after if "You are welcome!" in str(example.messages[2:])]
    assert 0 < len(talk) < 50  # small talk about the story


@pytest.mark.parametrize("plot", [*plots()])
def test_every_question_about_a_plot_is_asked_of_some_story(plot: str):
    rng = random.Random(0)
    stories = [story for story in (demo.story(rng, "train") for _ in range(4000)) if story.plot == plot]
    roles = {role for story in stories for role in story.facts}
    for question in (*tables()[ALL], *tables()[plot]):
        assert slots_of(question.answer) <= roles and question.answer.endswith((".", '."')), question.answer
        for way in (*question.ways, question.new):
            assert way and slots_of(way) <= roles and way.endswith("?"), way
    ways = [way for question in questions_of(plot) for way in (*question.ways, question.new) if way]
    assert len(ways) == len(set(ways))  # one answer each
    for way, answer in plots()[plot].questions:
        assert any(way in question.ways and answer == question.answer for question in questions_of(plot))
    for story in stories[:100]:
        texts = [question.answer for question in questions(story)]
        assert all("{" not in text for text in texts) and len(texts) == len(set(texts)) + (texts.count(UNTOLD) == 2)


def test_ways_that_are_held_out_are_in_the_test_split_alone():
    held_out = {
        question.new.lower().rstrip("?")
        for table in tables().values()
        for question in table
        if question.new and not slots_of(question.new)
    }
    assert len(held_out) >= 10
    trained = {text for index in range(2000) for text in asked_in(StoryQuestions("train").example(index))}
    assert not trained & held_out
    tests = [asked_in(StoryQuestions("test").example(index)) for index in range(1000)]
    assert held_out & {texts[-1] for texts in tests} and not held_out & {
        text for texts in tests for text in texts[1:-1]
    }


def test_a_pronoun_takes_the_case_of_the_name():
    rng = random.Random(1)
    story = next(
        story for story in (demo.story(rng, "train") for _ in range(100)) if pronouns_of(story.hero)["he"] == "he"
    )
    found = {
        with_pronoun(random.Random(seed), story, f"{before}{story.hero}{after}")
        for before, after in (
            ("Where is ", "'s home?"),
            ("Where did ", " live?"),
            ("Who helped ", "?"),
            ("Who is ", "?"),
        )
        for seed in range(20)
    }
    assert {"Where is his home?", "Where did he live?", "Who helped him?", "Who is he?"} < found
    assert len(found) == 8
