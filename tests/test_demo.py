"""The demo corpus: what it tells is coherent, never runs out and keeps its held-out part; the checker sees through it.

A mutation takes a good story and spoils one thing. The checker must refuse at least 95% of every kind.
"""

import random
import re
import statistics
from collections.abc import Callable

import pytest

from nanochat.demo import corpus as demo
from nanochat.demo.corpus import Story, check_story

STORIES = 300
REFUSED_AT_LEAST = 0.95
PRONOUN_SWAPS = {"he": "she", "she": "he", "him": "her", "his": "her", "her": "his"}


@pytest.fixture(scope="module")
def stories() -> list[Story]:
    rng = random.Random(1)
    return [demo.story(rng, "train" if i % 2 else "val") for i in range(STORIES)]


# ---------------------------------------------------------------------------------------------------------------------
# The corpus


def test_a_block_depends_on_its_arguments_only():
    block = demo.block(7, "train", seed=3)
    assert len(block) == demo.BLOCK_DOCUMENTS
    assert block == demo.block(7, "train", seed=3)
    others = [
        demo.block(8, "train", seed=3),
        demo.block(7, "val", seed=3),
        demo.block(7, "train"),
        demo.block(10**15, "train"),
    ]
    assert all(not set(block) & set(other) for other in others)


def test_documents_are_clean_and_mixed():
    documents = [document for index in range(30) for document in demo.block(index, "train")]
    assert all(document and document == document.strip() for document in documents)
    assert all(document.isascii() and "{" not in document and "  " not in document for document in documents)
    told = [document for document in documents if check_story(document).ok]
    asked = [document for document in told if "\nQuestion: " in document]
    assert 0.10 < len(asked) / len(documents) < 0.20
    assert 0.06 < 1 - len(told) / len(documents) < 0.14  # the rest: numbers


@pytest.mark.parametrize("split", ["train", "val"])
def test_every_story_passes_the_checker(split: demo.Split):
    rng = random.Random(0)
    for _ in range(1500):
        told = demo.story(rng, split)
        check = check_story(told.text)
        assert check.ok and check.problems == [], (told.text, check.problems)
        assert check.plot == told.plot


def test_stories_are_many_short_and_of_few_words():
    rng = random.Random(5)
    texts = [demo.story(rng, "train").text for _ in range(5000)]
    lengths = [len(text.split()) for text in texts]
    vocabulary = {word for text in texts for word in re.findall(r"[a-z]+", text.lower())}
    assert len(set(texts)) >= 4995
    assert 90 <= statistics.mean(lengths) <= 110
    assert min(lengths) >= 50 and max(lengths) <= 160
    assert sum(length <= 120 for length in lengths) >= 0.85 * len(lengths)
    assert 600 <= len(vocabulary) <= 900
    openings = {" ".join(text.split()[:2]) for text in texts}
    assert len(openings) > 20


def test_all_plots_are_told():
    rng = random.Random(2)
    counts = {name: 0 for name in demo.PLOTS}
    for _ in range(900):
        counts[demo.story(rng, "train").plot] += 1
    assert len(counts) >= 8
    assert min(counts.values()) > 900 / len(counts) / 2


def test_validation_combinations_never_occur_in_training():
    rng = random.Random(4)
    train = {demo.story(rng, "train").combination for _ in range(6000)}
    val = {demo.story(rng, "val").combination for _ in range(2000)}
    assert len(train) > 3000 and len(val) > 500
    assert not train & val
    share = statistics.mean(demo.held_out("quest", i, i * i) for i in range(20000))
    assert 0.09 < share < 0.11


def test_facts_are_told():
    """What a story says it drew stands in its text, and what was not told is not among its facts."""
    rng = random.Random(6)
    for _ in range(500):
        told = demo.story(rng, "train")
        assert told.hero in told.text and told.helper in told.text
        assert all(words in told.text for words in told.facts.values()), (told.facts, told.text)


def test_questions_are_answered_by_the_story():
    rng = random.Random(8)
    asked = set()
    for _ in range(300):
        told = demo.story(rng, "train")
        for question, answer in demo.questions(told):
            assert question.endswith("?") and answer.endswith((".", '."'))
            values = [words for words in told.facts.values() if words in answer]
            assert values and all(words in told.text for words in values)
            asked.add(re.sub(r"\b[A-Z]\w+\b", "", question))
    assert len(asked) > 100
    assert re.search(r"\nQuestion: .+\? Answer: .+\.", demo.question_text(rng, "train"))


def test_numbers_are_right_and_held_out():
    rng = random.Random(9)
    pairs: dict[str, set[tuple[int, int]]] = {"train": set(), "val": set()}
    split: demo.Split
    for split in ("train", "val"):
        lines = [line for _ in range(400) for line in demo.number_text(rng, split).splitlines()]
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
                assert all(
                    after - before == numbers[0] for before, after in zip(numbers[1:], numbers[2:], strict=False)
                )
            elif "less than" in line or "more than" in line:
                assert (numbers[0] < numbers[1]) == ("less" in line)
    assert len(pairs["train"]) > 800 and not pairs["train"] & pairs["val"]


def test_prompts_open_held_out_stories():
    prompts = demo.prompts(50, seed=1)
    assert prompts == demo.prompts(50, seed=1) != demo.prompts(50, seed=2)
    assert all(6 <= len(prompt.split()) <= 12 for prompt in prompts)
    assert all(not check_story(prompt).ok for prompt in prompts)


# ---------------------------------------------------------------------------------------------------------------------
# The checker


def sentences(text: str) -> list[str]:
    return demo.SENTENCE_END.split(text)


def replace_one(text: str, old: str, new: str, rng: random.Random, first: int = 0) -> str | None:
    """Replace one whole-word mention (the `first` or later), or None when there is no such mention."""
    found = list(re.finditer(rf"\b{re.escape(old)}\b", text))[first:]
    if not found:
        return None
    start, end = rng.choice(found).span()
    return text[:start] + new + text[end:]


def another(told: Story, role: str, rng: random.Random) -> str:
    """Other words for a role, none of which is in the story."""
    values = demo._lexicon().get(role) or sorted({row[role] for row in demo._plots()[told.plot].rows})
    return rng.choice([words for words in values if words not in told.text])


def swap_hero_name(told: Story, rng: random.Random) -> str | None:
    return (
        replace_one(told.text, told.hero, another(told, "hero", rng), rng) if told.text.count(told.hero) > 1 else None
    )


def swap_friend_name(told: Story, rng: random.Random) -> str | None:
    friend = told.facts.get("friend")
    return replace_one(told.text, friend, another(told, "hero", rng), rng, first=1) if friend else None


def swap_role(*roles: str) -> Callable[[Story, random.Random], str | None]:
    """One later mention of a role gets other words of the same kind."""

    def mutate(told: Story, rng: random.Random) -> str | None:
        role = next((role for role in roles if role in told.facts), None)
        return role and replace_one(told.text, told.facts[role], another(told, role, rng), rng, first=1)

    return mutate


def fulfil_another_want(told: Story, rng: random.Random) -> str | None:
    """From the second mention on, the story is about another want."""
    role = next((role for role in ("object", "food", "thing", "vegetable", "skill") if role in told.facts), None)
    if role is None or told.text.count(told.facts[role]) < 2:
        return None
    before, want, after = told.text.partition(told.facts[role])
    return before + want + after.replace(told.facts[role], another(told, role, rng))


def thank_a_stranger(told: Story, rng: random.Random) -> str | None:
    """After the help, another helper stands in the story."""
    if "helper" not in told.facts or told.text.count(told.helper) < 2:
        return None
    before, helper, after = told.text.rpartition(told.helper)
    return f"{before}{another(told, 'adj', rng)} {another(told, 'helper', rng)}{after}"


def useless_help(told: Story, rng: random.Random) -> str | None:
    """A help that fits another trouble, from beginning to end."""
    plot = demo._plots()[told.plot]
    role = next((role for role in ("tool", "gift", "tip", "advice", "mend") if role in told.facts), None)
    if role is None:
        return None
    cause = next(iter(plot.rows[0]))
    fits = {row[role] for row in plot.rows if row[cause] == told.facts[cause]}
    return told.text.replace(told.facts[role], rng.choice(sorted({row[role] for row in plot.rows} - fits)))


def change_pronoun(told: Story, rng: random.Random) -> str | None:
    found = list(re.finditer(r"\b(he|she|him|his|her)\b", told.text, re.IGNORECASE))
    if not found:
        return None
    match = rng.choice(found)
    new = PRONOUN_SWAPS[match[0].lower()]
    return told.text[: match.start()] + (new.capitalize() if match[0][0].isupper() else new) + told.text[match.end() :]


def drop_ending(told: Story, rng: random.Random) -> str:
    return " ".join(sentences(told.text)[:-1])


def truncate(told: Story, rng: random.Random) -> str:
    words = told.text.split()
    return " ".join(words[: rng.randint(len(words) // 4, len(words) - 1)])


def cut_the_last_mark(told: Story, rng: random.Random) -> str:
    return told.text.rstrip('."!')


def shuffle_sentences(told: Story, rng: random.Random) -> str:
    return " ".join(rng.sample(sentences(told.text), len(sentences(told.text))))


def swap_two_sentences(told: Story, rng: random.Random) -> str:
    parts = sentences(told.text)
    i = rng.randrange(len(parts) - 2)
    parts[i], parts[i + 2] = parts[i + 2], parts[i]
    return " ".join(parts)


def duplicate_sentence(told: Story, rng: random.Random) -> str:
    parts = sentences(told.text)
    i = rng.randrange(len(parts))
    return " ".join(parts[: i + 1] + parts[i:])


def gibberish_word(told: Story, rng: random.Random) -> str:
    words = told.text.split()
    words[rng.randrange(len(words))] = "".join(rng.choices("bcdfghklmnprst", k=6))
    return " ".join(words)


def drop_word(told: Story, rng: random.Random) -> str:
    words = told.text.split()
    candidates = [i for i, word in enumerate(words) if word not in demo.FILLERS and word.islower()]
    del words[rng.choice(candidates)]
    return " ".join(words)


def splice_two_stories(told: Story, rng: random.Random) -> str:
    other = sentences(demo.story(rng, "train").text)
    return " ".join(sentences(told.text)[:5] + other[5:])


MUTATIONS = (
    swap_hero_name,
    swap_friend_name,
    swap_role("object", "thing", "food", "vegetable", "skill", "rule"),
    swap_role("colour"),
    swap_role("place"),
    swap_role("helper", "kin"),
    fulfil_another_want,
    thank_a_stranger,
    useless_help,
    change_pronoun,
    drop_ending,
    truncate,
    cut_the_last_mark,
    shuffle_sentences,
    swap_two_sentences,
    duplicate_sentence,
    gibberish_word,
    drop_word,
    splice_two_stories,
)


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_spoiled_stories_are_refused(mutate: Callable[[Story, random.Random], str | None], stories: list[Story]):
    rng = random.Random(11)
    spoiled = [text for told in stories if (text := mutate(told, rng)) is not None and text != told.text]
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


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("Mia thanked", "Anna thanked", "the hero changes from 'Mia' to 'Anna'"),
        ("She wanted", "He wanted", "says 'he' of Mia"),
        ("Mia found the red bell", "Mia found the red drum", "does not parse"),
        ("Mia found the red bell", "Mia found the red ball", "the object changes from 'bell' to 'ball'"),
        ("Mia found the red bell", "Mia found the blue bell", "the colour changes from 'red' to 'blue'"),
        ("thanked the wise owl", "thanked the wise crow", "the helper changes from 'owl' to 'crow'"),
        ("Then a wise owl came by with a boat. ", "", "the tool 'boat' comes from nowhere"),
        ("boat", "rusty key", "the tool 'rusty key' does not fit the obstacle 'wide river'"),
        ("got across the river", "opened the gate", "does not fit"),
        ("Mia thanked the wise owl three times. ", "", "leaves out the thanks"),
        (" From that day on the red bell had the best chair in the house.", "", "leaves out the ending"),
        ("the best chair in the house.", "the best chair", "stops unfinished"),
        ("But there", "Mia cried a little, and then a little more. But there", "out of place"),
        ("She wanted", "She she wanted", "does not parse"),
        ("But there", "one day she heard that there was one in the old castle. But there", "does not parse"),
    ],
)
def test_problems_are_named(old: str, new: str, problem: str):
    assert check_story(GOOD).ok, check_story(GOOD).problems
    assert old in GOOD
    check = check_story(GOOD.replace(old, new))
    assert not check.ok
    assert any(problem in found for found in check.problems), check.problems


def test_the_checker_reads_more_than_the_generator_writes():
    """Openers and fillers may vary freely: such sentences are never generated, yet they are understood."""
    variant = GOOD.replace("She wanted", "Now she really wanted").replace("But there", "Then, at last, there")
    variant = variant.replace("With the boat", "So with the boat").replace("Mia thanked", "In the end Mia thanked")
    assert variant != GOOD and check_story(variant).ok, check_story(variant).problems


@pytest.mark.parametrize(
    "text", ["", "   \n ", "asdf qwer.", "Mia", '"', "...", "{hero}", "Mia Mia Mia.", "23 + 45 = 68.", "\x00"]
)
def test_what_is_no_story_is_refused(text: str):
    check = check_story(text)
    assert not check.ok and check.problems


def test_only_the_first_story_is_graded():
    for after in ("\nQuestion: Who helped Mia? Answer: Nobody.", "<|bos|>Tom", " Once upon a time there was", "\n\n"):
        assert demo.cut_to_story("  " + GOOD + after) == GOOD
        assert check_story(GOOD + after).ok
    assert not check_story(GOOD + " Tom ate the moon.").ok


def test_word_chains_do_not_pass(stories: list[Story]):
    """Local fluency is not enough: a chain that knows every four-word sequence seldom tells a coherent story."""
    rng = random.Random(13)
    chain: dict[tuple[str, ...], list[str]] = {}
    for _ in range(3000):
        words = ["", "", "", *demo.story(rng, "train").text.split(), ""]
        for i in range(3, len(words)):
            chain.setdefault(tuple(words[i - 3 : i]), []).append(words[i])
    passed = 0
    for _ in range(200):
        words = ["", "", ""]
        while (word := rng.choice(chain[tuple(words[-3:])])) and len(words) < 200:
            words.append(word)
        passed += check_story(" ".join(words).strip()).ok
    assert passed <= 10
