"""Facts as JSON: what a message says, in an object with the keys that it asks for."""

import json
import random
from collections.abc import Sequence
from typing import Any

from nanochat.conversation import Part, text_of
from nanochat.demo import writer
from nanochat.demo.arithmetic import a_thing
from nanochat.demo.plots import lexicon
from nanochat.demo.sections import sections, words_of
from nanochat.demo.stories import corpus_split, slots_of
from nanochat.ground.untrusted import json_of
from nanochat.task import Example, GeneratedTask, turn


class JsonObjects(GeneratedTask):
    """An object of one to four keys: names, kinds, colours, numbers, truth values and lists."""

    name = "json"

    def example(self, index: int) -> Example:
        rng = self.rng(index)
        if rng.random() < 0.35:
            return given_object(rng)
        story = writer.story(rng, corpus_split(self.split))
        said, facts = statement(rng, story)
        keys = rng.sample(sorted(facts), rng.randint(1, len(facts)))
        found = {key: facts[key] for key in keys}
        shown = [f'"{key}"' for key in keys] if rng.random() < 0.3 else keys
        listed = ", ".join(shown[:-1]) + " and " * (len(keys) > 1) + shown[-1]
        is_invented = rng.random() < 0.15
        way = rng.choice(ways("invent" if is_invented else "ask"))
        question = way.format(said=said, keys=listed, newline="\n")
        return Example(turn(question, json.dumps(found)), keys if is_invented else found)

    def grade(self, example: Example, reply: Sequence[Part]) -> bool:
        """Right if it is an object with what was said; for an invented one, with the keys alone."""
        found = json_of(text_of(reply))
        if isinstance(example.answer, list):
            return isinstance(found, dict) and list(found) == example.answer
        return json.dumps(found, sort_keys=True) == json.dumps(example.answer, sort_keys=True)  # 0 is not false


def ways(section: str) -> list[str]:
    return sections("json_objects.txt")[section]


def given_object(rng: random.Random) -> Example:
    """An object whose keys and values are in the question, as they are."""
    keys = rng.sample(words_of(ways("keys")), rng.choice((1, 1, 2, 2, 3)))
    found: dict[str, Any] = {}
    for key in keys:
        form = rng.random()
        if form < 0.35:
            found[key] = rng.randrange(rng.choice((10, 100, 1000)))
        elif form < 0.6:
            found[key] = writer.made_up_name(rng)
        elif form < 0.75:
            found[key] = writer.made_up_kind(rng)
        else:
            found[key] = rng.choice((a_thing(rng), rng.choice(lexicon()["hero"]), rng.choice(lexicon()["colour"])))
    is_quoted = rng.random() < 0.3
    written = {key: json.dumps(value) if is_quoted else str(value) for key, value in found.items()}
    if len(keys) == 1 and rng.random() < 0.6:
        question = rng.choice(ways("one given")).format(key=keys[0], value=written[keys[0]])
    else:
        sign, between = rng.choice(((" is ", ", "), (" is ", " and "), (" = ", ", "), (": ", ", ")))
        pairs = between.join(f"{key}{sign}{value}" for key, value in written.items())
        question = rng.choice(ways("given")).format(pairs=pairs)
    return Example(turn(question, json.dumps(found)), found)


def statement(rng: random.Random, story: writer.Story) -> tuple[str, dict[str, Any]]:
    """A sentence, and what it says: key -> value."""
    thing = a_thing(rng)
    colour = rng.choice(lexicon()["colour"])
    number = rng.randrange(2, rng.choice((10, 100)))
    way = rng.choice(ways("statements"))
    known: dict[str, Any] = {"name": story.hero, **story.facts, "thing": thing, "colour": colour}
    known |= dict.fromkeys(("age", "count", "price"), number)
    words = dict(known)
    if "{friends}" in way:
        friends = known["friends"] = rng.sample(lexicon()["hero"], rng.randint(2, 3))
        words["friends"] = f"{', '.join(friends[:-1])} and {friends[-1]}"
    if "{happy}" in way:
        known["happy"] = rng.random() < 0.5
        words["happy"] = "happy" if known["happy"] else "not happy"
    return way.format_map(words), {key: known[key] for key in slots_of(way)}
