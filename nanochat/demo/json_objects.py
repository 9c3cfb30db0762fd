"""Facts as JSON: what a message says, in an object with the keys that it asks for."""

import json
import random
from collections.abc import Sequence
from typing import Any

from nanochat.conversation import Part, text_of
from nanochat.demo import writer
from nanochat.demo.arithmetic import a_thing
from nanochat.demo.sections import sections, words_of
from nanochat.demo.stories import corpus_split
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
        try:
            found = json.loads(text_of(reply))
        except (ValueError, RecursionError):
            return False
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
            found[key] = rng.choice(
                (a_thing(rng), rng.choice(writer.words("hero")), rng.choice(writer.words("colour")))
            )
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
    """A sentence or two, and what they say: key -> value."""
    name, kind, trait = (story.facts[role] for role in ("hero", "kind", "trait"))
    thing = a_thing(rng)
    colour = rng.choice(writer.words("colour"))
    number = rng.randrange(2, rng.choice((10, 100)))
    form = rng.randrange(6)
    if form == 0:
        return f"{name} is a {trait} {kind}.", {"name": name, "trait": trait, "kind": kind}
    if form == 1:
        return f"{name} is {number} years old and lives {story.facts['home']}.", {
            "name": name, "age": number, "home": story.facts["home"],
        }  # fmt: skip
    if form == 2:
        return f"{name} has {number} {colour} {thing}s.", {
            "name": name, "count": number, "colour": colour, "thing": thing,
        }  # fmt: skip
    if form == 3:
        friends = rng.sample(writer.words("hero"), rng.randint(2, 3))
        return f"The friends of {name} are {', '.join(friends[:-1])} and {friends[-1]}.", {
            "name": name, "friends": friends,
        }  # fmt: skip
    if form == 4:
        is_happy = rng.random() < 0.5
        return f"{name} the {kind} is {'' if is_happy else 'not '}happy.", {
            "name": name, "kind": kind, "happy": is_happy,
        }  # fmt: skip
    return f"The {thing} is {colour} and costs {number} dollars.", {"thing": thing, "colour": colour, "price": number}
