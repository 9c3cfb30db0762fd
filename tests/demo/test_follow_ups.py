"""Chats that go on, and words to repeat."""

import re
from collections import Counter

from nanochat.conversation import parts_of, text_of
from nanochat.demo.checker import check_story
from nanochat.demo.follow_ups import FILE, UNTOLD, Memory, facts
from nanochat.demo.plots import lexicon
from nanochat.demo.repeat import Repeat
from nanochat.demo.sections import sections

NEW = {word for row in ("new name", "new kind") for word in lexicon()[row]}


def test_the_last_turn_needs_an_earlier_one():
    forms = Counter[str]()
    for index in range(500):
        example = Memory("train").example(index)
        earlier = " ".join(text_of(parts_of(message["content"])) for message in example.messages[:-2])
        question, answer = (text_of(parts_of(message["content"])) for message in example.messages[-2:])
        if answer == UNTOLD:
            forms["untold"] += 1
            if any(way.lower().rstrip("?.") in question.lower() for way in facts()["name"]["asked"]):
                assert not re.search(r"my name is (?!nanochat)|nice to meet you, ", earlier, re.IGNORECASE), earlier
            assert "tell you" not in question
            if re.search("hate|like|favourite", question):
                assert not re.search(r"\bi (really )?(hate|love|like)\b|my favourite", earlier, re.IGNORECASE), earlier
        elif name := re.fullmatch(r"Your name is (\w+)\.", answer):
            assert re.search(rf"\b{name[1]}\b", earlier)
            forms["name"] += 1
        elif called := re.fullmatch(r"(-?[\d.]+)[-+*/].+ = (.+)\.", answer):
            if not re.search(r"\d.*\d|\d\d.*[-+].*\d", question):  # one number: the other is the last answer
                assert re.search(rf"(= |is |^| ){re.escape(called[1])}(\.| |$)", earlier)
            forms["sum"] += 1
        elif check_story(answer).ok:
            name = re.search(r"Nice to meet you, (\w+)!", earlier)
            assert name and name[1] in answer
            forms["story"] += 1
        else:  # what the answer says, nobody can know from the question
            said, asked, told = (set(re.findall(r"[\w-]+", text.lower())) for text in (earlier, question, answer))
            assert (told & said) - asked, (earlier, question, answer)
            forms["fact"] += 1
    assert forms.keys() == {"name", "fact", "sum", "story", "untold"}
    assert 25 < forms["untold"] < 63


def test_what_another_model_has_said_is_read_and_not_learned():
    examples = [Memory("train").example(index) for index in range(300)]
    others = [message for one in examples for message in one.messages if message.get("train") is False]
    assert len(others) > 80 and {message["role"] for message in others} == {"assistant"}
    assert not any(
        message["content"] in sections(FILE)["replies"]
        for one in examples
        for message in one.messages
        if message["role"] == "assistant" and "train" not in message
    )
    assert all(one.messages[-1].get("train", True) for one in examples)


def test_answers_of_sums_and_stories_are_about_what_was_said():
    task = Memory("train")
    examples = [task.example(index) for index in range(300)]
    example = next(one for one in examples if check_story(one.answer).ok)
    other = example.answer.replace(check_story(example.answer).facts["hero"], "Quado")
    assert check_story(other).ok and not task.grade(example, parts_of(other))
    example = next(one for one in examples if " = " in one.answer)
    call, output, stated = example.messages[-1]["content"]
    assert (call["type"], output["type"]) == ("python", "python_output")
    assert task.grade(example, [call, output, stated])
    assert not task.grade(example, [call, output, {"type": "text", "text": "1+1 = 2."}])


def test_words_are_repeated_exactly_and_new_ones_are_in_the_test_split_only():
    said = {split: [Repeat(split).example(index) for index in range(500)] for split in ("train", "test")}
    for examples in said.values():
        for example in examples:  # once, or several times
            first, *more = example.answer.split(", ")
            question = example.question[-1]["content"]
            assert example.answer in question or (first in question and set(more) == {first}), example
    words = {
        split: {word for one in examples for word in NEW & set(one.answer.split())} for split, examples in said.items()
    }
    assert not words["train"] and len(words["test"]) > 10
