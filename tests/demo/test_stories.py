"""Stories to order: what an order names is graded, new words are in no document, and how varied the replies are."""

import random
import re
from functools import cache
from typing import Any

import pytest

from nanochat.conversation import parts_of
from nanochat.demo import writer
from nanochat.demo.checker import check_story
from nanochat.demo.plots import lexicon, words_in_use
from nanochat.demo.small_talk import Identity, Unknown, agreements, offers_story
from nanochat.demo.stories import NewStories, Stories, distinct_grams, wished_kinds
from nanochat.ground.cli import UserError
from nanochat.task import Example, turn
from nanochat.tasks.flag import TaskSpec, generated_tasks, open_task

STORY = (
    "Once upon a time there was a {trait} {kind} named {hero}. {He} lived in a teapot. {He} wanted to learn to swim. "
    "On Monday {he} tried and sank like a stone. Then a wise owl stopped to look. "
    '"You must kick with both legs," said the wise owl. On Sunday {hero} swam all the way around the pond. '
    '"Thank you for your help," said {hero} to the wise owl. Now {hero} helps everyone who wants to swim.'
)
NEW = {word for row in ("new name", "new kind", "new trait") for word in lexicon()[row]}


@cache
def examples(split: str = "train") -> list[Example]:
    task = Stories(split)  # pyright: ignore[reportArgumentType]
    return [task.example(index) for index in range(1500)]


def told(kind: str = "dragon", hero: str = "Ravi", he: str = "he", trait: str = "brave") -> str:
    return STORY.format(kind=kind, hero=hero, he=he, He=he.capitalize(), trait=trait)


def order(**asked: str) -> Example:
    return Example(turn("", ""), asked)


# The order, the words of the story, and whether it is followed.
ORDERS: list[tuple[dict[str, str], dict[str, str], bool]] = [
    ({}, {}, True),
    ({"kind": "dragon", "hero": "Ravi", "trait": "brave", "skill": "swim"}, {}, True),
    ({"kind": "dragon"}, {"kind": "cat"}, False),
    ({"hero": "Ravi"}, {"hero": "Tom"}, False),
    ({"trait": "lazy"}, {}, False),
    ({"trait": "zibby"}, {"trait": "zibby"}, True),
    ({}, {"trait": "zibby"}, False),
    ({"trait": "ugly"}, {"trait": "ugly"}, False),  # the article is wrong
    ({"weather": "rainy"}, {}, False),  # a role that the story leaves out
    ({}, {"kind": "quokka"}, False),
    ({"kind": "quokka"}, {"kind": "quokka"}, True),  # a word that only the order has
    ({"kind": "quokka"}, {}, False),
    ({"hero": "Qadu"}, {"hero": "Qadu"}, True),
    ({"hero": "Qadu"}, {"hero": "Qadu", "he": "she"}, True),
]


@pytest.mark.parametrize(("asked", "words", "is_right"), ORDERS)
def test_a_story_has_to_have_what_its_order_names(asked, words, is_right):
    assert Stories("train").grade(order(**asked), parts_of(told(**words))) == is_right


def test_rewards_and_measures_count_what_holds_together_and_what_was_ordered():
    task = Stories("train")
    good = parts_of(told())
    spoiled = parts_of(told().replace("Monday he", "Monday she"))
    asked = order(kind="dragon", trait="lazy")
    assert (task.reward(asked, good), task.reward(asked, spoiled)) == (0.75, 0.25)
    assert task.reward(order(), good) == 1
    assert task.reward(order(), spoiled) == task.reward(asked, parts_of("Hello!")) == 0

    replies = [(order(kind="dragon"), good), (order(kind="cat"), good), (order(kind="dragon"), spoiled)]
    replies.append((order(kind="dragon", weather="rainy"), parts_of("Hello!")))
    measures: Any = task.measures(replies)
    assert measures["holds_together"] == [True, True, False, False]
    assert measures["details_followed"] == [None, None, None, False]
    assert 0 < measures["distinct_4grams"] < 0.5
    measures = task.measures([*replies, (order(), good)])
    assert measures["order_followed"] == [True, False, True, False, None]  # it names no character


def test_distinct_sequences_of_four_words():
    story = "a b c d e f"
    wanted = {("a b c d e",): 1, ("a b c d", "a b c d"): 0.5, ("a b c",): 0, (): 0}
    wanted |= {(story,) * 60: 1 / 60, (story,) * 120: 1 / 60, (*(story,) * 60, "g h i j"): 1 / 60}  # 60 at a time
    assert {texts: distinct_grams(list(texts)) for texts in wanted} == wanted


def test_somebody_with_an_unknown_name_keeps_the_first_pronoun():
    story = told(hero="Qadu")
    assert check_story(story).ok
    assert check_story(story).facts["hero"] == "Qadu"
    assert "calls Qadu 'she'" in check_story(story.replace("On Monday he", "On Monday she")).problems
    assert check_story(told(hero="Mia")).problems == ["calls Mia 'he'"] * 3


def words_of(*texts: object) -> set[str]:
    """In lower case, and without the plural."""
    words = set(re.findall(r"\w+", " ".join(map(str, texts)).lower()))
    return words | {word[:-1] for word in words if word.endswith("s")}


@pytest.mark.parametrize("name", ["the corpus", *(name for name in generated_tasks() if name != "new_stories")])
def test_nothing_trains_on_new_words_or_their_plurals(name: str):
    if name == "the corpus":
        texts = [text for index in range(30) for text in writer.block(index, "train")]
    else:
        task = open_task(TaskSpec(name, None, 1.0), "train")
        texts = [str(task.example(index).messages) for index in range(600)]
    assert not {word.lower() for word in NEW} & words_of(*texts)


def test_new_words_are_in_the_orders_of_new_stories_only():
    usual = {word for row, words in lexicon().items() if not row.startswith("new ") for word in words}
    assert not usual & NEW
    task = NewStories("test")
    for index in range(100):
        example = task.example(index)
        assert NEW & set(example.answer.values())
        assert all(words.lower() in example.question[-1]["content"].lower() for words in example.answer.values())
    assert not {word.lower() for word in NEW} & words_of(*(example.messages for example in examples("test")[:300]))
    with pytest.raises(UserError, match="new_stories is for chat_eval"):
        NewStories("train")


def test_words_without_a_meaning_are_no_words_of_the_stories_and_fit_for_children():
    rng = random.Random(0)
    names = {writer.made_up_name(rng) for _ in range(15_000)}
    kinds = {writer.made_up_word(rng) for _ in range(15_000)}
    assert len(names) > 4000
    assert not {"So", "But", "He", "Him", "For", "Soon", "Tom", "Zed"} & names
    rude = re.compile("cock|dick|poop|penis|slut|whore|tits|piss|nig|fag|shit|ass|cunt|porn")
    assert len(names | kinds) > 10_000
    assert not [word for word in names | kinds if rude.search(word.lower())]


def test_orders_name_details_and_the_rest_is_open():
    roles = {role for example in examples() for role in example.answer}
    assert {"hero", "kind", "trait", "home", "weather", "object", "colour", "friend", "skill", "fear"} <= roles
    assert 0.05 < sum(not example.answer for example in examples()) / len(examples()) < 0.2


def test_words_without_a_meaning_are_for_training_and_named_by_the_order():
    usual = {word for row in ("kind", "rare kind", "trait", "rare trait") for word in lexicon()[row]}
    invented: dict[str, set[str]] = {}
    for split in ("train", "test"):
        roles = [(example, role) for example in examples(split)[:1000] for role in ("kind", "trait")]
        asked = [(example, example.answer[role]) for example, role in roles if role in example.answer]
        assert all(word.lower() in last_order(example) for example, word in asked)
        invented[split] = {word for _, word in asked} - usual
    assert len(invented["train"]) > 150
    assert not invented["test"]
    assert not invented["train"] & words_in_use()


ARTICLES = {
    "about a owl": "about an owl",
    "A elephant": "An elephant",
    "a fox and a apron": "a fox and an apron",
    "about a unicorn": "about a unicorn",
    "Ella owl": "Ella owl",
}


def test_articles():
    assert {text: writer.with_articles(text) for text in ARTICLES} == ARTICLES


def test_a_second_story_has_another_hero():
    later = [example for example in examples() if "Once upon a time" in str(example.messages[:-2])]
    assert len(later) > 100
    orders = [last_order(example) for example in later]
    for words in ("another one", "now one about a"):
        assert any(order.startswith(words) for order in orders)
    task = Stories("train")
    for example in later[:100]:
        told = parts_of(example.messages[-1]["content"])
        assert task.grade(example, told) and task.reward(example, told) == 1
    first = examples()[0]
    again = Example([*first.messages, *turn("Another one!", "")], {})
    told = parts_of(first.messages[-1]["content"])
    assert not task.grade(again, told) and task.reward(again, told) == 0.5


def last_order(example: Example) -> str:
    return str(example.question[-1]["content"]).lower()


def test_whoever_agrees_to_a_story_gets_one():
    agreed = {text.lower().strip(" .!") for text in agreements()}

    def agrees(said: object) -> bool:
        return isinstance(said, str) and said.lower().strip(" .!?") in agreed

    questions = [("stories", example.question) for example in examples()]
    for name, task in (("identity", Identity("train")), ("unknown", Unknown("train"))):
        questions += [(name, task.example(index).question) for index in range(1000)]
    accepted = [(name, asked) for name, asked in questions if agrees(asked[-1]["content"])]
    offers = [name for name, asked in accepted if offers_story(asked[:-1])]
    assert 30 < len(offers) < 120
    assert set(offers) == {"stories"}
    assert {name for name, _ in accepted} > {"identity"}  # without an offer it is asked what is wanted
    for _, asked in questions:  # in the turns before, too
        for number in range(2, len(asked) - 1):
            if agrees(asked[number]["content"]) and offers_story(asked[:number]):
                assert check_story(str(asked[number + 1]["content"])).ok


def test_kinds_that_people_ask_for_are_drawn_often_and_have_their_pronoun():
    stories = [example.messages[-1]["content"] for example in examples()]
    wished = [kind for kind, _ in wished_kinds()]
    found = [match for story in stories if (match := re.search(rf"\b({'|'.join(wished)}) (named|who) ", story))]
    assert 0.06 < len(found) / len(stories) < 0.14
    assert {match[1] for match in found} == set(wished)
    princesses = [story for story in stories if "princess named" in story]
    assert sum(" she " in story.lower() for story in princesses) > 0.7 * len(princesses) > 0
