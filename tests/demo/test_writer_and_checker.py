"""The demo corpus: coherent stories without end, and a held-out part that training never sees; and its checker.

A mutation takes a good story and spoils one thing. The checker must refuse at least 95% of every kind.
"""

import random
import re
import statistics
from collections import Counter
from collections.abc import Callable

import pytest

from nanochat.demo import writer
from nanochat.demo.checker import check_story, cut_to_story
from nanochat.demo.plots import SAME_WORDS, SENTENCE_END, lexicon, plots
from nanochat.demo.sections import sections, words_of
from nanochat.demo.stories import openings
from nanochat.demo.writer import Story

STORIES = 150
REFUSED_AT_LEAST = 0.95
PRONOUN_SWAPS = {"he": "she", "she": "he", "him": "her", "his": "her", "her": "his"}


@pytest.fixture(scope="module")
def stories() -> list[Story]:
    rng = random.Random(1)
    return [writer.story(rng, "train" if i % 2 else "val") for i in range(STORIES)]


# ---------------------------------------------------------------------- the corpus


def test_blocks_and_prompts_depend_on_their_arguments_only():
    block = writer.block(7, "train", seed=3)
    assert len(block) == writer.BLOCK_DOCUMENTS
    assert block == writer.block(7, "train", seed=3)
    others = [(8, "train", 3), (7, "val", 3), (7, "train", 0), (10**15, "train", 3)]
    assert all(not set(block) & set(writer.block(*arguments)) for arguments in others)
    prompts = openings(50, seed=1)
    assert prompts == openings(50, seed=1) != openings(50, seed=2)
    assert all(6 <= len(prompt.split()) <= 12 for prompt in prompts)
    assert all(not check_story(prompt).ok for prompt in prompts)


def test_documents_are_clean_and_mixed():
    documents = [document for index in range(8) for document in writer.block(index, "train")]
    assert all(document and document == document.strip() for document in documents)
    assert all(document.isascii() and "{" not in document and "  " not in document for document in documents)
    stories = [document for document in documents if check_story(document).ok]
    questions = [document for document in stories if re.search(r"\nQuestion: .+\? Answer: .+\.", document)]
    assert 0.10 < len(questions) / len(documents) < 0.20
    assert 0.06 < 1 - len(stories) / len(documents) < 0.14  # the rest: numbers


@pytest.mark.parametrize("split", ["train", "val"])
def test_every_story_passes_the_checker(split: writer.Split):
    rng = random.Random(0)
    for _ in range(300):
        story = writer.story(rng, split)
        check = check_story(story.text)
        assert check.ok and check.problems == [], (story.text, check.problems)
        assert check.plot == story.plot


def test_stories_are_many_short_and_of_few_words():
    rng = random.Random(5)
    stories = [writer.story(rng, "train") for _ in range(1200)]
    texts = [story.text for story in stories]
    lengths = [len(text.split()) for text in texts]
    # In lower case as they stand: names are open, the other words are few.
    vocabulary = {word for text in texts for word in re.findall(r"\b[a-z]+", text)}
    assert len(set(texts)) >= 1198
    assert 90 <= statistics.mean(lengths) <= 110
    assert min(lengths) >= 50 and max(lengths) <= 170
    assert 550 <= len(vocabulary) <= 1200
    counts = Counter(story.plot for story in stories)
    assert counts.keys() == plots().keys() and len(counts) >= 8
    assert min(counts.values()) > len(stories) / len(counts) / 2


def combination(story: Story) -> tuple[str, ...]:
    """Plot, kind of hero, want, obstacle, place: what decides the split."""
    return (story.plot, *(story.facts[role] for role in plots()[story.plot].key))


def test_validation_combinations_never_occur_in_training():
    rng = random.Random(4)
    train = {combination(writer.story(rng, "train")) for _ in range(1500)}
    val = {combination(writer.story(rng, "val")) for _ in range(500)}
    assert len(train) > 800 and len(val) > 150
    assert not train & val
    share = statistics.mean(writer.held_out("quest", i, i * i) for i in range(20000))
    assert 0.09 < share < 0.11


def helper(story: Story) -> str:
    """Who helps: "wise owl", a friend's name, or the family member in a plot without a helper."""
    if "helper" in story.facts:
        return f"{story.facts['adj']} {story.facts['helper']}"
    return story.facts.get("friend") or story.facts["kin"]


def test_facts_and_answers_are_in_the_story():
    rng = random.Random(6)
    kinds = set()
    for _ in range(300):
        story = writer.story(rng, "train")
        assert story.hero in story.text and helper(story) in story.text
        assert all(words in story.text for words in story.facts.values()), (story.facts, story.text)
        for question, answer in writer.questions(story):
            assert question.endswith("?") and answer.endswith((".", '."'))
            assert any(words.lower() in answer.lower() for words in story.facts.values())
            kinds.add(re.sub(r"\b[A-Z]\w+\b", "", question))
    assert len(kinds) > 100


def test_numbers_are_right_and_held_out():
    rng = random.Random(9)
    pairs: dict[str, set[tuple[int, int]]] = {"train": set(), "val": set()}
    split: writer.Split
    for split in ("train", "val"):
        lines = [line for _ in range(400) for line in writer.number_text(rng, split).splitlines()]
        for line in lines:
            numbers = [int(number) for number in re.findall(r"\d+", line)]
            if " + " in line:
                assert numbers[0] + numbers[1] == numbers[2]
                pairs[split].add((numbers[0], numbers[1]))
            elif " - " in line:
                assert numbers[0] - numbers[1] == numbers[2]
                pairs[split].add((numbers[1], numbers[2]))
            elif "Now" in line:
                assert numbers[0] + numbers[1] == numbers[2]
            elif line.startswith("Counting"):
                step, first, *rest = numbers
                assert rest == [first + step * i for i in range(1, 7)]
            elif "than" in line:
                assert (numbers[0] < numbers[1]) == ("less" in line)
    assert len(pairs["train"]) > 800 and not pairs["train"] & pairs["val"]


# ---------------------------------------------------------------------- the checker


def sentences(text: str) -> list[str]:
    return SENTENCE_END.split(text)


def replace_one(text: str, old: str, new: str, rng: random.Random, first: int = 0) -> str | None:
    """Replace one whole-word mention (the `first` or later), or None when there is no such mention."""
    found = list(re.finditer(rf"\b{re.escape(old)}\b", text))[first:]
    if not found:
        return None
    start, end = rng.choice(found).span()
    return text[:start] + new + text[end:]


def another(story: Story, role: str, rng: random.Random) -> str:
    """Words of this role that are not in the story."""
    role = SAME_WORDS.get(role, role)
    values = lexicon().get(role) or sorted({row[role] for row in plots()[story.plot].rows})
    return rng.choice([words for words in values if words not in story.text])


def swap_role(*roles: str) -> Callable[[Story, random.Random], str | None]:
    """One later mention of a role gets other words of the same kind."""

    def mutate(story: Story, rng: random.Random) -> str | None:
        role = next((role for role in roles if role in story.facts), None)
        return role and replace_one(story.text, story.facts[role], another(story, role, rng), rng, first=1)

    return mutate


def change_pronoun(story: Story, rng: random.Random) -> str | None:
    found = list(re.finditer(r"\b(he|she|him|his|her)\b", story.text, re.IGNORECASE))
    if not found:
        return None
    match = rng.choice(found)
    new = PRONOUN_SWAPS[match[0].lower()]
    new = new.capitalize() if match[0][0].isupper() else new
    return story.text[: match.start()] + new + story.text[match.end() :]


def swap_two_sentences(story: Story, rng: random.Random) -> str:
    parts = sentences(story.text)
    i = rng.randrange(len(parts) - 2)
    parts[i], parts[i + 2] = parts[i + 2], parts[i]
    return " ".join(parts)


def duplicate_sentence(story: Story, rng: random.Random) -> str:
    parts = sentences(story.text)
    i = rng.randrange(len(parts))
    return " ".join(parts[: i + 1] + parts[i:])


def drop_word(story: Story, rng: random.Random) -> str:
    words = story.text.split()
    fillers = words_of(sections("grammar.txt")["fillers"])
    candidates = [i for i, word in enumerate(words) if word.islower() and word not in fillers]
    del words[rng.choice(candidates)]
    return " ".join(words)


MUTATIONS = (
    swap_role("hero"),
    swap_role("friend"),
    swap_role("object", "thing", "food", "vegetable", "skill", "rule"),
    swap_role("colour"),
    swap_role("place"),
    swap_role("helper", "kin"),
    change_pronoun,
    swap_two_sentences,
    duplicate_sentence,
    drop_word,
)


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_spoiled_stories_are_refused(mutate: Callable[[Story, random.Random], str | None], stories: list[Story]):
    rng = random.Random(11)
    spoiled = [(story, mutate(story, rng)) for story in stories]
    spoiled = [text for story, text in spoiled if text is not None and text != story.text]
    assert len(spoiled) > STORIES / 20
    accepted = [text for text in spoiled if check_story(text).ok]
    assert len(accepted) <= (1 - REFUSED_AT_LEAST) * len(spoiled), (len(accepted), len(spoiled), accepted[:3])


GOOD = (
    "Once upon a time there was a brave mouse named Mia who lived in a teapot. She wanted a red bell more than cake. "
    "One day she heard that there was one in the old castle. But there was a wide river in her way. "
    "Then a wise owl came by with a boat. With the boat they got across the river. "
    "Mia found the red bell in the old castle, just waiting for her. Mia thanked the wise owl three times. "
    "From that day on the red bell had the best chair in the house."
)


PROBLEMS = [
    ("Mia thanked", "Anna thanked", "'Mia' to 'Anna'"),
    ("She wanted", "He wanted", "calls Mia 'he'"),
    ("Mia found the red bell", "Mia found the red drum", "does not parse"),
    ("Mia found the red bell", "Mia found the red ball", "'bell' to 'ball'"),
    ("Mia found the red bell", "Mia found the blue bell", "'red' to 'blue'"),
    ("thanked the wise owl", "thanked the wise crow", "'owl' to 'crow'"),
    ("Then a wise owl came by with a boat. ", "", "'boat' was never introduced"),
    ("boat", "rusty key", "'rusty key' does not fit"),
    ("got across the river", "opened the gate", "does not fit"),
    ("Mia thanked the wise owl three times. ", "", "leaves out the thanks"),
    (" From that day on the red bell had the best chair in the house.", "", "leaves out the ending"),
    ("the best chair in the house.", "the best chair", "stops unfinished"),
    ("But there", "Mia cried a little, and then a little more. But there", "out of place"),
    ("She wanted", "She she wanted", "does not parse"),
    ("But there", "one day she heard that there was one in the old castle. But there", "does not parse"),
]


@pytest.mark.parametrize(("old", "new", "problem"), PROBLEMS)
def test_problems_are_named(old: str, new: str, problem: str):
    assert check_story(GOOD).ok, check_story(GOOD).problems
    assert old in GOOD
    check = check_story(GOOD.replace(old, new))
    assert not check.ok
    assert any(problem in found for found in check.problems), check.problems


def test_only_the_first_story_is_graded():
    for after in ("\nQuestion: Who helped Mia? Answer: Nobody.", "<|bos|>Tom", " Once upon a time there was", "\n\n"):
        assert cut_to_story("  " + GOOD + after) == GOOD
        assert check_story(GOOD + after).ok
    assert not check_story(GOOD + " Tom ate the moon.").ok
    # Openers and fillers may vary freely: such sentences are never generated, yet they are understood.
    variant = GOOD.replace("She wanted", "Now she really wanted").replace("But there", "Then, at last, there")
    variant = variant.replace("With the boat", "So with the boat").replace("Mia thanked", "In the end Mia thanked")
    assert variant != GOOD and check_story(variant).ok, check_story(variant).problems
    for text in ("", "   \n ", "asdf qwer.", "Mia", '"', "...", "{hero}", "Mia Mia Mia.", "23 + 45 = 68.", "\x00"):
        check = check_story(text)
        assert not check.ok and check.problems
