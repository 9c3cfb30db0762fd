"""Stories to order, drawn from the grammar of the demo corpus.

Combinations that the corpus holds out are in the test split only.
"""

import random
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from nanochat.conversation import Message, Part, text_of
from nanochat.demo import small_talk, writer
from nanochat.demo.checker import StoryCheck, check_story
from nanochat.demo.plots import SLOT, lexicon, plots, pronouns_of
from nanochat.demo.sections import sections, word_lists
from nanochat.demo.typed import as_typed
from nanochat.ground.cli import UserError
from nanochat.task import Example, GeneratedTask, Split, turn

AGREED_SHARE = 0.06  # share of those without words that the order has to name: somebody accepts an offer of a story
LATER_SHARE = 0.25  # share of the stories to order, in training, that come after other turns of a chat
WHO = {"hero", "kind", "trait"}  # the roles that most orders name
WHO_IS_NEW = (("hero",), ("kind",), ("hero", "kind"))  # the roles whose words a story draws from outside the corpus
COPIED_SHARE = 0.45  # share of the stories to order, in training, that have a made-up name or kind
# Which roles are made up in such a story, drawn evenly. More kinds than names: the corpus has made-up names already.
WHO_IS_MADE_UP = (("hero",), ("kind",), ("kind",), ("hero", "kind"))
WISHED_SHARE = 0.1  # share of the stories to order, in training, about somebody whom people often ask for
GRAM = 4  # words of a sequence, for the measure of variety
TEXTS_AT_ONCE = 60  # texts that are compared: among more, a sequence is more likely to occur again


class Stories(GeneratedTask):
    """A story to order. It is right if it holds together and has what the order names: the hero, the kind, ..."""

    name = "stories"

    def example(self, index: int) -> Example:
        rng, named, story = self._draw(index)
        question, asked = order(rng, story, named)
        if self.split == "test":
            return Example(turn(question, story.text), asked)
        earlier: list[Message] = []
        form = rng.random()
        if form < LATER_SHARE:
            earlier = small_talk.earlier_turns(rng, rng.choice((1, 1, 2, 3)))
        elif form < LATER_SHARE + AGREED_SHARE and not named:
            while not small_talk.offers_story(earlier):
                earlier = [*small_talk.earlier_turn(rng)]
            question, asked = as_typed(rng, rng.choice(small_talk.agreements())), {}
        return Example([*earlier, *turn(question, story.text)], asked)

    def wrong(self, index: int) -> str:
        """The story, but its hero has another name from the middle on: the typical mistake of a small model."""
        _, _, story = self._draw(index)
        rng = self.rng(index, "/wrong")
        hero = re.compile(rf"\b{story.hero}\b")
        places = [match.start() for match in hero.finditer(story.text)]
        middle = next((place for place in places if place > len(story.text) // 2), places[-1])
        names = lexicon()["hero"]
        for name in rng.sample(names, len(names)):
            if name in story.text:
                continue
            wrong = story.text[:middle] + hero.sub(name, story.text[middle:])
            # A hero with a single mention can have another name, unless it is a girl's and the story says "he".
            if not check_story(wrong).ok:
                return wrong
        raise AssertionError(f"no other name makes story {index} wrong")

    def grade(self, example: Example, reply: Sequence[Part]) -> bool:
        check = checked(example, reply)
        return check.ok and is_followed(example, check)

    def reward(self, example: Example, reply: Sequence[Part]) -> float:
        """Half for a story that holds together, half for the share of what its order names: most replies of a small
        model have some of both, and the right ones alone would teach little."""
        check = checked(example, reply)
        followed = [check.facts.get(role) == words for role, words in example.answer.items()] or [check.ok]
        return (check.ok + sum(followed) / len(followed)) / 2

    def measures(self, replies: Sequence[tuple[Example, Sequence[Part]]]) -> dict[str, float | tuple[int, int]]:
        """How many replies hold together; have the name, the kind and the trait of their order, of those whose order
        names any; have all of an order with other details. The share of the rarest plot, and how varied the replies are
        (`distinct_grams`)."""
        checks = [(example, checked(example, reply)) for example, reply in replies]
        told = Counter(check.plot for _, check in checks)
        who = [is_followed(example, check, WHO) for example, check in checks if example.answer.keys() & WHO]
        details = [is_followed(example, check) for example, check in checks if example.answer.keys() - WHO]
        return {
            "holds_together": (sum(check.ok for _, check in checks), len(checks)),
            "order_followed": (sum(who), len(who)),
            "details_followed": (sum(details), len(details)),
            "rarest_plot": min(told[plot] for plot in plots()) / max(1, len(checks)),
            "distinct_4grams": distinct_grams([text_of(reply) for _, reply in replies]),
        }

    def draw_story(self, rng: random.Random) -> tuple[Sequence[str], writer.Story]:
        """The roles that the order has to name, and a story. In training, some names and kinds are words without a
        meaning, which can only be copied from the order, and some kinds are the ones that people ask for most."""
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

    def _draw(self, index: int) -> tuple[random.Random, Sequence[str], writer.Story]:
        rng = self.rng(index)
        return rng, *self.draw_story(rng)


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
    """Ways to ask for a story, with slots for roles: `open`, `usual` or `detailed` ones."""
    return sections("stories.txt")[section]


def wished_kinds() -> list[tuple[str, str]]:
    """Kinds that people often ask for, each with its pronoun: "she", "he" or "any"."""
    lists = word_lists("stories.txt", "wished kinds")
    return [(kind, pronoun) for pronoun, kinds in lists.items() for kind in kinds]


def order(rng: random.Random, story: writer.Story, needed: Sequence[str] = ()) -> tuple[str, dict[str, str]]:
    """A way to ask for a story, and what it names: role -> its words. It names the roles in `needed`."""
    roles = set(story.facts)
    form = rng.random()
    if needed or 0.12 <= form < 0.65:
        ways = orders("usual")
    elif form < 0.12:
        ways = orders("open")
    else:
        ways = orders("detailed")
    possible = [way for way in ways if set(needed) <= slots_of(way) <= roles]
    way = rng.choice(possible or orders("open"))
    asked = {role: story.facts[role] for role in sorted(slots_of(way))}
    question = with_articles(way.format_map(story.facts))
    return typed(rng, question, asked), asked


def typed(rng: random.Random, question: str, facts: Mapping[str, str]) -> str:
    """The question as somebody may type it: a name in lower case can be recalled, if it is a usual one."""
    names = [words for role, words in facts.items() if role in ("hero", "friend")]
    return as_typed(rng, question) if all(name in lexicon()["hero"] for name in names) else question


def slots_of(text: str) -> set[str]:
    return {role for _, role in SLOT.findall(text)}


def with_articles(text: str) -> str:
    """The text with "an" where a slot's word needs it."""
    return re.sub(r"\b([Aa]) (?=[aeiou](?!ni))", r"\1n ", text)


def checked(example: Example, reply: Sequence[Part]) -> StoryCheck:
    """What the checker says of a reply to an order; the words of the order are words that stories may have."""
    return check_story(text_of(reply), known=set(example.answer.values()))


def is_followed(example: Example, check: StoryCheck, roles: Collection[str] | None = None) -> bool:
    """Whether a story has what its order names, or those of it that are among `roles`."""
    asked = {role: words for role, words in example.answer.items() if roles is None or role in roles}
    return all(check.facts.get(role) == words for role, words in asked.items())


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
