"""Small talk and what the model does not know: the tables, their splits, the answers."""

import re
from collections import Counter

import pytest

from nanochat.demo.follow_ups import UNTOLD, facts
from nanochat.demo.small_talk import SLOT, Identity, Unknown, groups, lexicon, offers_story
from nanochat.task import Split, turn

GROUPS = (*groups("identity"), *groups("unknown"))


def plain(text: str) -> str:
    return re.sub(r"\W", "", text.lower())


def test_every_slot_has_words_and_every_word_a_slot():
    used = {slot for group in GROUPS for line in group.lines for way in line for slot in SLOT.findall(way)}
    assert used - {"number", "noise"} == set(lexicon())
    assert min(map(len, lexicon().values())) >= 10
    assert [word for word, held_out in lexicon()["money"].items() if held_out] == ["insurance"]
    for slot, words in lexicon().items():
        assert 0 < sum(words.values()) <= len(words) / 4, slot


def test_each_way_to_ask_has_one_answer():
    answers = {way.lower().rstrip("?."): UNTOLD for fact in facts().values() for way in fact["asked"]}
    drawn = Counter(Unknown("train").example(index).answer for index in range(1000))
    assert len(drawn) > 25 and max(drawn.values()) < 100  # a chat of many questions is not one sentence over and over
    for group in GROUPS:
        assert group.lines
        assert group.answer[-1] not in "?？" or offers_story(turn("", group.answer)), group.answer
        for line in group.lines:
            for way in line:
                assert answers.setdefault(way.lower().rstrip("?!."), group.answer) == group.answer, way


@pytest.mark.parametrize("task", [Identity, Unknown])
def test_half_of_the_test_split_has_new_ways_or_new_words(task):
    lines = [line for group in groups(task.name) for line in group.lines]
    known = {plain(way) for line in lines for way in line[:-1]}
    new = {plain(line[-1]) for line in lines}
    new_words = ("denmark", "frankenstein", "migraine", "buddhism", "alicein", "uninstall", "taylorswift", "steel")

    def last(split: Split) -> list[str]:
        return [plain(task(split).example(index).question[-1]["content"]) for index in range(400)]

    train = last("train")
    assert set(train) & known and not set(train) & new
    assert not any(word in question for question in train for word in new_words)
    test = last("test")
    assert set(test) & known and 40 < sum(question in new for question in test) < 240


def test_any_honest_answer_is_right():
    for index in range(100):
        example = Unknown("test").example(index)
        assert Unknown("test").grade(example, [{"type": "text", "text": example.answer}])
        assert not Unknown("test").grade(example, [{"type": "text", "text": "Once upon a time."}])
        assert example.messages[-1]["content"] == example.answer
