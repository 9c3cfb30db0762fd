"""Stories to order, drawn from the grammar of the demo corpus.

Combinations that the corpus holds out are in the test split only.
"""

import random
import re
from collections.abc import Collection, Mapping, Sequence

from nanochat.conversation import Part, parts_of, text_of
from nanochat.demo import small_talk, writer
from nanochat.demo.checker import StoryCheck, check_story
from nanochat.demo.plots import SLOT, lexicon, pronouns_of
from nanochat.demo.sections import sections, word_lists
from nanochat.demo.typed import as_typed, mistyped
from nanochat.demo.walks import Walk, WalkTask
from nanochat.ground.cli import UserError
from nanochat.task import Example, Split

AGREED_SHARE = 0.5  # share of the stories after an offer of one, in training, that are ordered by accepting it
NEXT_SHARE = 0.5  # share of the stories after another one whose order says so
WHO = {"hero", "kind", "trait"}  # the roles that most orders name
# The roles whose words a story draws from outside the corpus.
WHO_IS_NEW = (("hero",), ("kind",), ("trait",), ("trait", "kind"), ("hero", "kind"))
COPIED_SHARE = 0.5  # share of the stories to order, in training, that have a made-up name, kind or trait
# Which roles are made up in such a story, drawn evenly. Fewer names: the corpus has made-up names already.
WHO_IS_MADE_UP = (("hero",), ("kind",), ("kind",), ("trait",), ("trait", "kind"), ("hero", "kind"))
WISHED_SHARE = 0.1  # share of the stories to order, in training, about somebody whom people often ask for
GRAM = 4  # words of a sequence, for the measure of variety
TEXTS_AT_ONCE = 60  # texts that are compared: among more, a sequence is more likely to occur again


class Stories(WalkTask):
    """A story to order. It is right if it holds together and has what the order names: the hero, the kind, ... A second
    story needs another hero, too."""

    name = "stories"

    def go_on(self, rng: random.Random, walk: Walk) -> dict[str, str]:
        is_agreed = self.split == "train" and small_talk.offers_story(walk.messages) and rng.random() < AGREED_SHARE
        while True:
            named: Sequence[str] = ()
            if is_agreed:
                story = writer.story(rng, corpus_split(self.split))
            else:
                named, story = self.draw_story(rng)
            if story.hero not in str(walk.messages):
                break
        if is_agreed:
            question, asked = as_typed(rng, rng.choice(small_talk.agreements())), {}
        else:
            question, asked = order(rng, story, named, is_next=bool(walk.stories), is_test=self.split == "test")
        walk.tell(question, story)
        return asked

    def wrong(self, index: int) -> str:
        """The story, but its hero has another name from the middle on: the typical mistake of a small model."""
        text = text_of(parts_of(self.example(index).messages[-1]["content"]))
        known = self.example(index).answer.values()
        rng = self.rng(index, "/wrong")
        hero = re.compile(rf"\b{check_story(text, known).facts['hero']}\b")
        places = [match.start() for match in hero.finditer(text)]
        middle = next((place for place in places if place > len(text) // 2), places[-1])
        names = lexicon()["hero"]
        for name in rng.sample(names, len(names)):
            if name in text:
                continue
            wrong = text[:middle] + hero.sub(name, text[middle:])
            # A hero with a single mention can have another name, unless it is a girl's and the story says "he".
            if not check_story(wrong, known).ok:
                return wrong
        raise AssertionError(f"no other name makes story {index} wrong")

    def grade(self, example: Example, reply: Sequence[Part]) -> bool:
        check = checked(example, reply)
        return check.ok and is_followed(example, check) and not is_told_again(example, check)

    def reward(self, example: Example, reply: Sequence[Part]) -> float:
        """Half for a story that holds together, half for the share of what its order names: most replies of a small
        model have some of both, and the right ones alone would teach little."""
        check = checked(example, reply)
        followed = [check.facts.get(role) == words for role, words in example.answer.items()] or [check.ok]
        return (check.ok + sum(followed) / len(followed)) / (4 if is_told_again(example, check) else 2)

    def measures(self, replies: Sequence[tuple[Example, Sequence[Part]]]) -> dict[str, float | Sequence[float | None]]:
        """Which replies hold together; have the name, the kind and the trait of their order, where it names any; have
        all of an order with other details. How varied the replies are (`distinct_grams`)."""
        checks = [(example, checked(example, reply)) for example, reply in replies]
        who = [is_followed(example, check, WHO) if example.answer.keys() & WHO else None for example, check in checks]
        details = [is_followed(example, check) if example.answer.keys() - WHO else None for example, check in checks]
        return {
            "holds_together": [check.ok for _, check in checks],
            "order_followed": who,
            "details_followed": details,
            "distinct_4grams": distinct_grams([text_of(reply) for _, reply in replies]),
        }

    def draw_story(self, rng: random.Random) -> tuple[Sequence[str], writer.Story]:
        """The roles that the order has to name, and a story. In training, some names, kinds and traits are words
        without a meaning, which can only be copied from the order, and some kinds are those that people often order."""
        form = rng.random() if self.split == "train" else 1.0
        if form < COPIED_SHARE:
            made_up = rng.choice(WHO_IS_MADE_UP)
            return made_up, writer.story(rng, "train", made_up=made_up)
        if form < COPIED_SHARE + WISHED_SHARE:
            kind, pronoun = rng.choice(wished_kinds())
            while True:
                story = writer.story(rng, "train", given={"kind": kind})
                if pronoun in ("any", pronouns_of(story.hero)["he"]):
                    return ("kind",), story
        return (), writer.story(rng, corpus_split(self.split))


class NewStories(Stories):
    """Stories about somebody whose name, or whose kind, no document has: whether orders are read and not recalled.

    For evaluation only: a word that training has seen is not new. Raises UserError: for the train split.
    """

    name = "new_stories"

    def __init__(self, split: Split, path: str | None = None, hub: str = "hf"):
        if split == "train":
            raise UserError("new_stories is for chat_eval: a word that training has seen is not new; train on stories")
        super().__init__(split, path, hub)

    def draw_story(self, rng: random.Random) -> tuple[Sequence[str], writer.Story]:
        new = rng.choice(WHO_IS_NEW)
        return new, writer.story(rng, corpus_split(self.split), new)


def orders(section: str) -> list[str]:
    """Ways to ask for a story, with slots for roles: `open`, `usual` or `detailed` ones, `next` ones after a story, and
    `held out` ones, which the train split does not have."""
    return sections("stories.txt")[section]


def wished_kinds() -> list[tuple[str, str]]:
    """Kinds that people often ask for, each with its pronoun: "she", "he" or "any"."""
    lists = word_lists("stories.txt", "wished kinds")
    return [(kind, pronoun) for pronoun, kinds in lists.items() for kind in kinds]


def order(
    rng: random.Random, story: writer.Story, needed: Sequence[str] = (), is_next: bool = False, is_test: bool = False
) -> tuple[str, dict[str, str]]:
    """A way to ask for a story, and what it names: role -> its words. It names the roles in `needed`.

    `is_next`: a story was told before. `is_test`: half of the ways are held out.
    """
    roles = set(story.facts)
    form = rng.random()
    if is_next and rng.random() < NEXT_SHARE:
        ways = orders("next")
    elif needed or 0.1 <= form < 0.7:
        ways = orders("held out" if is_test and rng.random() < 0.5 else "usual")
    elif form < 0.1:
        ways = orders("open")
    else:
        ways = orders("detailed")
    possible: list[str] = []
    for some in (ways, orders("usual"), orders("open")):
        possible = possible or [way for way in some if set(needed) <= slots_of(way) <= roles]
    way = rng.choice(possible)
    asked = {role: story.facts[role] for role in sorted(slots_of(way))}
    question = writer.with_articles(mistyped(rng, way).format_map(story.facts))
    return typed(rng, question, asked), asked


def typed(rng: random.Random, question: str, facts: Mapping[str, str]) -> str:
    """The question as somebody may type it: a name in lower case can be recalled, if it is a usual one."""
    names = [words for role, words in facts.items() if role in ("hero", "friend")]
    return as_typed(rng, question) if all(name in lexicon()["hero"] for name in names) else question


def slots_of(text: str) -> set[str]:
    return {role for _, role in SLOT.findall(text)}


def checked(example: Example, reply: Sequence[Part]) -> StoryCheck:
    """What the checker says of a reply to an order; the words of the order are words that stories may have."""
    return check_story(text_of(reply), known=set(example.answer.values()))


def is_followed(example: Example, check: StoryCheck, roles: Collection[str] | None = None) -> bool:
    """Whether a story has what its order names, or those of it that are among `roles`."""
    asked = {role: words for role, words in example.answer.items() if roles is None or role in roles}
    return all(check.facts.get(role) == words for role, words in asked.items())


def is_told_again(example: Example, check: StoryCheck) -> bool:
    """Whether the hero is somebody of an earlier turn, such as another story, whom the order does not name."""
    earlier = " ".join(text_of(parts_of(message["content"])) for message in example.question[:-1])
    hero = check.facts.get("hero")
    return hero is not None and "hero" not in example.answer and re.search(rf"\b{hero}\b", earlier) is not None


def openings(count: int, seed: int = 0) -> list[str]:
    """`count` beginnings of held-out stories, of 6 to 12 words, for a base model to go on with."""
    rng = random.Random(f"{seed}/prompts")
    found: list[str] = []
    for _ in range(count):
        words = writer.story(rng, "val").text.split()
        found.append(" ".join(words[: 6 + int(rng.random() * 7)]))
    return found


def distinct_grams(texts: Sequence[str]) -> float:
    """Different sequences of four words, as a share of all; the mean over 60 texts at a time.

    Source: Li et al. 2016, "A Diversity-Promoting Objective Function for Neural Conversation Models" (distinct-n).
    """
    shares = []
    for first in range(0, len(texts), TEXTS_AT_ONCE):
        words = [text.split() for text in texts[first : first + TEXTS_AT_ONCE]]
        grams = [tuple(text[at : at + GRAM]) for text in words for at in range(len(text) - GRAM + 1)]
        if len(words) == TEXTS_AT_ONCE or first == 0:  # a smaller rest would count as more varied
            shares.append(len(set(grams)) / max(1, len(grams)))
    return sum(shares) / max(1, len(shares))


def corpus_split(split: Split) -> writer.Split:
    """The corpus holds combinations out for its own validation split: they are our test split."""
    return "train" if split == "train" else "val"
