"""The first things that people type to a chat model, from a file that says which replies are right.

Each line has a `question` and one or more ways to be right:

    {"question": "what is 2+2", "number": "4"}                       the last number of the reply
    {"question": "tell me a story about a cat", "story": "cat"}      a story that holds together, with this word in it
    {"question": "about a cat called Mia", "story": {"kind": "cat", "hero": "Mia"}}           one with these roles
    {"question": "as JSON, with the key name: I am Mia", "json": {"name": "Mia"}}             this object, nothing else
    {"question": "who are you?", "says": ["nanochat"]}               any of these, in upper or lower case
    {"question": "What time is it?", "honest": true}                 it says that it does not know, or what it does know

`"not": ["once upon a time"]` lists phrases that make a reply wrong whatever else it says. `"before": [...]` has the
messages of the chat before the question.

It is only for evaluation; nothing is trained on it. `tests/first_questions.jsonl` has a hundred, and so has
`tests/second_questions.jsonl`.
"""

import re
from collections.abc import Sequence
from typing import Any

from nanochat.conversation import Part, text_of
from nanochat.data.records import open_records
from nanochat.demo.checker import check_story
from nanochat.ground.cli import UserError
from nanochat.ground.untrusted import json_of
from nanochat.task import Example, Split, turn
from nanochat.tasks.messages import check_messages
from nanochat.tasks.recorded import RecordTask

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
HONEST = re.compile(
    r"I (do not|don't) (know|understand)|I (cannot|can't)|I (only know|know only)|我不知道|我不会|我只会"
)
RULES = ("number", "story", "json", "says", "honest")  # the ways to be right


class FirstQuestions(RecordTask):
    """A question, and what a right or honest reply to it says."""

    name = "first_questions"
    source = "file"

    def __init__(self, split: Split, path: str | None = None, hub: str = "hf"):
        assert path is not None  # parse_tasks has refused it
        if split == "train":
            raise UserError(f"{self.name} is for chat_eval: a model that has learned the answers proves nothing")
        self.records = open_records([path])
        self.numbers = range(len(self.records))

    def read(self, record: Any) -> Example:
        if not isinstance(record, dict) or not isinstance(record.get("question"), str):
            raise ValueError('it has no "question" that is a text')
        rules = {name: rule for name, rule in record.items() if name not in ("question", "before", "not")}
        if not rules or not rules.keys() <= {*RULES}:
            raise ValueError(f"its ways to be right are {rules}: at least one of {', '.join(RULES)}")
        # The questions have no reference reply: the empty text is the conversation's last message.
        messages = [*record.get("before", []), *turn(record["question"], "")]
        check_messages(messages)
        return Example(messages, {**rules, "not": record.get("not", [])})

    def grade(self, example: Example, reply: Sequence[Part]) -> bool:
        text = text_of(reply)
        rules = example.answer
        if _has_any(rules["not"], text):
            return False
        numbers = NUMBER.findall(text)
        return (
            ("number" in rules and numbers[-1:] == [rules["number"]])
            or ("story" in rules and _tells(rules["story"], text))
            or ("json" in rules and json_of(text) == rules["json"])
            or ("honest" in rules and HONEST.search(text) is not None)
            or _has_any(rules.get("says", ()), text)
        )


class SecondQuestions(FirstQuestions):
    """The same for a list that nobody trains towards.

    The training data changed after looks at what the model failed of the first list, so its score there flatters a
    little. `tests/second_questions.jsonl` was written without a look at the training data, from what the model is meant
    to do. Nobody should train towards its questions, or change them after a score.
    """

    name = "second_questions"


def _has_any(phrases: Sequence[str], text: str) -> bool:
    """Whether a text has one of the phrases, in upper or lower case."""
    return any(phrase.lower() in text.lower() for phrase in phrases)


def _tells(wanted: str | dict[str, str], text: str) -> bool:
    """Whether a text is a whole story about what was requested: a word anywhere in it, or the words of roles."""
    if isinstance(wanted, str):
        return check_story(text, known=[wanted]).ok and re.search(rf"\b{re.escape(wanted)}", text) is not None
    check = check_story(text, known=list(wanted.values()))
    return check.ok and all(_has_role(check.facts, role, words) for role, words in wanted.items())


def _has_role(facts: dict[str, str], role: str, words: str) -> bool:
    """Whether the words are in this role: "forest" is in the place "in the deep forest". A second colour (`colour2`) is
    a colour, too."""
    pattern = re.compile(rf"\b{re.escape(words)}\b", re.IGNORECASE)
    return any(name.rstrip("23") == role and pattern.search(found) for name, found in facts.items())
