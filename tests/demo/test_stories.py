"""Stories to order: what an order names is graded, new words are in no document, and how varied the replies are."""

import random
import re

import pytest

from nanochat.conversation import parts_of
from nanochat.demo import writer
from nanochat.demo.checker import check_story
from nanochat.demo.plots import lexicon, words_in_use
from nanochat.demo.small_talk import Identity, Unknown, agreements, offers_story
from nanochat.demo.stories import NewStories, Stories, distinct_grams, wished_kinds, with_articles
from nanochat.ground.cli import UserError
from nanochat.task import Example, turn
from nanochat.tasks.flag import TaskSpec, generated_tasks, open_task

STORY = (
    "Once upon a time there was a brave {kind} named {hero}. {He} lived in a teapot. {He} wanted to learn to swim. "
    "On Monday {he} tried and sank like a stone. Then a wise owl stopped to look. "
    '"You must kick with both legs," said the wise owl. On Sunday {hero} swam all the way around the pond. '
    '"Thank you for your help," said {hero} to the wise owl. Now {hero} helps everyone who wants to swim.'
)
SHE = {"He": "She", "he": "she"}
HE = {"He": "He", "he": "he"}
TASKS = {"stories": Stories, "identity": Identity, "unknown": Unknown}


def graded(asked: dict[str, str], **words: str) -> bool:
    example = Example(turn("", ""), asked)
    return Stories("train").grade(
        example, parts_of(STORY.format_map({"kind": "dragon", "hero": "Ravi", **HE, **words}))
    )


def test_a_story_has_to_have_what_its_order_names():
    assert graded({}) and graded({"kind": "dragon", "hero": "Ravi", "trait": "brave", "skill": "swim"})
    assert not graded({"kind": "dragon"}, kind="cat")
    assert not graded({"hero": "Ravi"}, hero="Tom")
    assert not graded({"trait": "lazy"})
    assert not graded({"weather": "rainy"})  # a role that the story leaves out


def test_a_word_that_only_the_order_has_is_right():
    assert not graded({}, kind="quokka")
    assert graded({"kind": "quokka"}, kind="quokka")
    assert not graded({"kind": "quokka"})
    assert graded({"hero": "Qadu"}, hero="Qadu") and graded({"hero": "Qadu"}, hero="Qadu", **SHE)


def test_the_reward_counts_what_holds_together_and_what_was_ordered():
    task = Stories("train")
    good = parts_of(STORY.format_map({"kind": "dragon", "hero": "Ravi", **HE}))
    spoiled = parts_of(STORY.format_map({"kind": "dragon", "hero": "Ravi", **HE}).replace("Monday he", "Monday she"))
    order = Example(turn("", ""), {"kind": "dragon", "trait": "lazy"})
    assert task.reward(order, good) == 0.75 and task.reward(order, spoiled) == 0.25
    assert task.reward(Example(turn("", ""), {}), good) == 1
    assert task.reward(Example(turn("", ""), {}), spoiled) == task.reward(order, parts_of("Hello!")) == 0


def test_somebody_with_an_unknown_name_keeps_the_first_pronoun():
    story = STORY.format_map({"kind": "dragon", "hero": "Qadu", **HE})
    spoiled = story.replace("On Monday he", "On Monday she")
    assert check_story(story).ok and "calls Qadu 'she'" in check_story(spoiled).problems
    assert check_story(story).facts["hero"] == "Qadu"
    assert check_story(STORY.format_map({"kind": "dragon", "hero": "Mia", **HE})).problems == ["calls Mia 'he'"] * 3


def test_new_words_are_in_no_document_and_in_the_orders_of_new_stories_only():
    new = {word for row in ("new name", "new kind") for word in lexicon()[row]}
    documents = " ".join(text for index in range(60) for text in writer.block(index, "train"))
    stories = [Stories(split).example(index) for split in ("train", "test") for index in range(500)]
    asked = " ".join(str(message["content"]) for example in stories for message in example.messages)
    for word in new:
        assert not re.search(rf"\b{word}\b", documents + asked), word
    usual = {word for row, words in lexicon().items() if not row.startswith("new ") for word in words}
    assert not usual & new
    task = NewStories("test")
    for index in range(200):
        example = task.example(index)
        assert new & set(example.answer.values())
        assert all(words.lower() in example.question[0]["content"].lower() for words in example.answer.values())
    with pytest.raises(UserError, match="new_stories is for chat_eval"):
        NewStories("train")


@pytest.mark.parametrize("name", [name for name in generated_tasks() if name != "new_stories"])
def test_no_task_trains_on_new_words_or_their_plurals(name: str):
    task = open_task(TaskSpec(name, None, 1.0), "train")
    read = " ".join(str(task.example(index).messages) for index in range(1500)).lower()
    for word in (word for row in ("new name", "new kind") for word in lexicon()[row]):
        assert not re.search(rf"\b{word.lower()}(s|es)?\b", read), word


def test_a_name_without_a_meaning_is_no_word_of_the_stories():
    names = {writer.made_up_name(Stories("train").rng(index)) for index in range(20_000)}
    assert len(names) > 5000 and not {"So", "But", "He", "Him", "For", "Soon", "Tom", "Zed"} & names


def test_a_word_without_a_meaning_is_fit_for_children():
    rng = random.Random(0)
    drawn = {draw(rng).lower() for draw in (writer.made_up_name, writer.made_up_kind) for _ in range(30_000)}
    rude = re.compile("cock|dick|poop|penis|slut|whore|tits|piss|nig|fag|shit|ass|cunt|porn")
    assert len(drawn) > 20_000 and not [word for word in drawn if rude.search(word)]


def test_names_and_kinds_are_often_unusual():
    stories = [writer.story(Stories("train").rng(index), "train") for index in range(2000)]
    for role, row, least in (("hero", "hero", 0.21), ("kind", "kind", 0.11)):
        share = sum(story.facts[role] not in lexicon()[row] for story in stories) / len(stories)
        assert least < share < least + 0.08, role


def test_orders_name_details_and_the_rest_is_open():
    examples = [Stories("train").example(index) for index in range(2000)]
    roles = {role for example in examples for role in example.answer}
    assert {"hero", "kind", "trait", "home", "weather", "object", "colour", "friend", "skill", "fear", "rule"} <= roles
    assert 0.05 < sum(not example.answer for example in examples) / len(examples) < 0.2


def test_names_and_kinds_without_a_meaning_are_for_training_and_named_by_the_order():
    def invented(task: Stories, index: int) -> set[str]:
        example = task.example(index)
        asked = {words for role, words in example.answer.items() if role == "kind"}
        assert all(words.lower() in example.question[-1]["content"].lower() for words in asked)
        return asked - usual

    usual = {*lexicon()["kind"], *lexicon()["rare kind"]}
    train, test = (
        set().union(*(invented(Stories(split), index) for index in range(1000))) for split in ("train", "test")
    )
    assert len(train) > 150 and not test
    assert not train & words_in_use()


def test_measures_of_replies():
    good = STORY.format_map({"kind": "dragon", "hero": "Ravi", **HE})
    replies = [
        (Example(turn("", ""), {"kind": "dragon"}), parts_of(good)),
        (Example(turn("", ""), {"kind": "cat"}), parts_of(good)),
        (Example(turn("", ""), {"kind": "dragon"}), parts_of(good.replace("Monday he", "Monday she"))),
        (Example(turn("", ""), {"kind": "dragon", "weather": "rainy"}), parts_of("Hello!")),
    ]
    measures = Stories("train").measures(replies)
    assert measures["holds_together"] == (2, 4)
    assert measures["order_followed"] == (2, 4) and measures["details_followed"] == (0, 1)
    open_order = (Example(turn("", ""), {}), parts_of(good))
    assert Stories("train").measures([*replies, open_order])["order_followed"] == (2, 4)  # it asks for nobody
    assert measures["rarest_plot"] == 0
    assert 0 < measures["distinct_4grams"] < 0.5
    assert Stories("train").measures([])["holds_together"] == (0, 0)


def test_distinct_sequences_of_four_words():
    assert distinct_grams(["a b c d e"]) == 1
    assert distinct_grams(["a b c d", "a b c d"]) == 0.5
    assert distinct_grams(["a b c"]) == distinct_grams([]) == 0
    story = "a b c d e f"
    assert distinct_grams([story] * 60) == distinct_grams([story] * 120) == 1 / 60  # 60 texts at a time
    assert distinct_grams([story] * 60 + ["g h i j"]) == 1 / 60


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("about a owl", "about an owl"),
        ("A elephant", "An elephant"),
        ("a fox and a apron", "a fox and an apron"),
        ("about a unicorn", "about a unicorn"),
        ("Ella owl", "Ella owl"),
    ],
)
def test_articles(text: str, right: str):
    assert with_articles(text) == right


def test_some_stories_are_ordered_in_the_middle_of_a_chat():
    task = Stories("train")
    examples = [task.example(index) for index in range(1000)]
    turns = [len(example.messages) // 2 for example in examples]
    assert set(turns) == {1, 2, 3, 4} and 0.22 < sum(count > 1 for count in turns) / len(turns) < 0.34
    for example in examples[:200]:
        assert task.grade(example, parts_of(example.messages[-1]["content"]))
    assert all(len(Stories("test").example(index).messages) == 2 for index in range(200))


def test_whoever_agrees_to_a_story_gets_one():
    agreed = {text.lower().strip(" .!") for text in agreements()}
    questions = [(name, TASKS[name]("train").example(index).question) for name in TASKS for index in range(1500)]
    accepted = [(name, asked) for name, asked in questions if asked[-1]["content"].lower().strip(" .!?") in agreed]
    offers = [name for name, asked in accepted if offers_story(asked[:-1])]
    assert 30 < len(offers) < 120 and set(offers) == {"stories"}
    assert {name for name, _ in accepted} > {"identity"}  # without an offer it is asked what is wanted
    for _, asked in questions:  # nor does a story wait in the turns before
        for number in range(2, len(asked) - 1, 2):
            said = asked[number]["content"]
            assert not (isinstance(said, str) and said.lower().strip(" .!?") in agreed and offers_story(asked[:number]))


def test_kinds_that_people_ask_for_are_drawn_often_and_have_their_pronoun():
    task = Stories("train")
    stories = [task.example(index).messages[-1]["content"] for index in range(3000)]
    wished = [kind for kind, _ in wished_kinds()]
    found = [match for story in stories if (match := re.search(rf"\b({'|'.join(wished)}) (named|who) ", story))]
    assert 0.06 < len(found) / len(stories) < 0.14
    assert {match[1] for match in found} == set(wished)
    princesses = [story for story in stories if "princess named" in story]
    assert princesses and sum(" she " in story.lower() for story in princesses) > 0.8 * len(princesses)
