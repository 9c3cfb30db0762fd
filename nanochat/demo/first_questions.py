"""Lists of what people type to a chat model, each a file that says which replies are right.

Each line has a `question` and one or more ways to be right:

    {"question": "what is 2+2", "number": "4"}                       the last number of the reply
    {"question": "tell me a story about a cat", "story": "cat"}      a story that holds together, with this word in it
    {"question": "about a cat called Mia", "story": {"kind": "cat", "hero": "Mia"}}           one with these roles
    {"question": "as JSON, with the key name: I am Mia", "json": {"name": "Mia"}}             this object, nothing else
    {"question": "who are you?", "says": ["nanochat"]}               any of these, in upper or lower case
    {"question": "What time is it?", "honest": true}                 it says that it does not know, or what it does know
    {"question": "who helped her?", "recalls": "helper"}             what the story before says of this role, or that it
                                                                     says nothing, and no name from elsewhere
    {"question": "how old is she?", "untold": true}                  it says that the story does not say

`"not": ["once upon a time"]` lists phrases that make a reply wrong whatever else it says. `"before": [...]` has the
messages of the chat before the question; where a reply is left out, the model itself replies. `"group"` is for readers.

They are only for evaluation. Training changed after looks at what the model failed of tests/first_questions.jsonl: its
score flatters a little. The other lists are never trained towards, or changed after a score.
"""

import re
from collections.abc import Sequence
from typing import Any

from nanochat.conversation import Message, Part, text_of
from nanochat.data.records import open_records
from nanochat.demo.checker import check_story, cut_to_story
from nanochat.demo.plots import SENTENCE_END, gender_of, plots, words_in_use
from nanochat.demo.sections import sections, word_lists, words_of
from nanochat.ground.cli import UserError
from nanochat.ground.untrusted import json_of
from nanochat.task import Example, Split, turn
from nanochat.tasks.messages import check_messages
from nanochat.tasks.recorded import RecordTask

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}\b)")
HONEST = re.compile(
    r"\bI (do not|don't) (know|understand)|I (cannot|can't)|I (only know|know only)|我不知道|我不会|我只会"
)
UNTOLD = re.compile(HONEST.pattern + r"|(does not|doesn't|did not|didn't|never) (say|tell|mention)", re.IGNORECASE)
RULES = ("number", "story", "json", "says", "honest", "recalls", "untold")  # the ways to be right
FILE = "first_questions.txt"  # the roles that answer a question about a story, and words that say nothing of one


class FirstQuestions(RecordTask):
    """Questions of a list, and what a right or honest reply says."""

    name = "first_questions"
    source = "file"

    def __init__(self, split: Split, path: str | None = None, hub: str = "hf"):
        assert path is not None  # parse_tasks has refused it
        if split == "train":
            raise UserError(f"{path} is for chat_eval: a model that has learned the answers proves nothing")
        self.records = open_records([path])
        self.numbers = range(len(self.records))

    def read(self, record: Any) -> Example:
        if not isinstance(record, dict) or not isinstance(record.get("question"), str):
            raise ValueError('it has no "question" that is a text')
        rules = {name: rule for name, rule in record.items() if name not in ("question", "before", "not", "group")}
        if not rules or not rules.keys() <= {*RULES}:
            raise ValueError(f"its ways to be right are {rules}: at least one of {', '.join(RULES)}")
        for name, rule in {**rules, "not": record.get("not", [])}.items():
            if not is_rule(name, rule):
                raise ValueError(f'its "{name}" is {str(rule)[:60]!r}: nanochat/demo/first_questions.py shows its form')
        # The questions have no reference reply: the empty text is the conversation's last message.
        before = record.get("before", [])
        messages = [*(before if isinstance(before, list) else [before]), *turn(record["question"], "")]
        check_messages(messages, may_lack_replies=True)
        return Example(messages, {**rules, "not": record.get("not", [])})

    def grade(self, example: Example, reply: Sequence[Part]) -> bool:
        text = text_of(reply)
        rules = example.answer
        if _has_any(rules["not"], text):
            return False
        numbers = NUMBER.findall(THOUSANDS.sub("", text))
        return (
            ("number" in rules and numbers[-1:] == [rules["number"]])
            or ("story" in rules and _tells(rules["story"], text, example.question))
            or ("json" in rules and json_of(text) == rules["json"])
            or ("honest" in rules and HONEST.search(text) is not None)
            or ("untold" in rules and UNTOLD.search(text) is not None)
            or ("recalls" in rules and _recalls(rules["recalls"], text, example.question))
            or _has_any(rules.get("says", ()), text)
        )


def is_rule(name: str, rule: Any) -> bool:
    """Whether a way to be right has its form, so that no typing mistake counts as a wrong reply."""
    if name in ("says", "not"):
        return isinstance(rule, list) and all(isinstance(phrase, str) for phrase in rule)
    if name == "story" and isinstance(rule, dict):
        roles = {draw.role for plot in plots().values() for draw in plot.draws}
        roles |= {role for plot in plots().values() for row in plot.rows for role in row}
        return rule.keys() <= roles and all(isinstance(words, str) for words in rule.values())
    if name == "recalls":
        return rule in list(word_lists(FILE, "recalled"))
    if name in ("honest", "untold"):
        return rule is True
    return name == "json" or isinstance(rule, str)


def _has_any(phrases: Sequence[str], text: str) -> bool:
    """Whether a text has one of the phrases, in upper or lower case."""
    return any(phrase.lower() in text.lower() for phrase in phrases)


def _tells(wanted: str | dict[str, str], text: str, question: Sequence[Message]) -> bool:
    """Whether a text is a whole story about what was requested: a word anywhere in it, or the words of roles."""
    said = " ".join(text_of(message["content"]) for message in question if message["role"] == "user")
    words = [wanted] if isinstance(wanted, str) else list(wanted.values())
    check = check_story(text, known=[*words, *re.findall(r"\w+", said)])
    if isinstance(wanted, str):
        return check.ok and re.search(rf"\b{re.escape(wanted)}", text) is not None
    return check.ok and all(_has_role(check.facts, role, words) for role, words in wanted.items())


def _has_role(facts: dict[str, str], role: str, words: str) -> bool:
    """Whether the words are in this role: "forest" is in the place "in the deep forest". A second colour (`colour2`) is
    a colour, too."""
    pattern = re.compile(rf"\b{re.escape(words)}\b", re.IGNORECASE)
    return any(name.rstrip("23") == role and pattern.search(found) for name, found in facts.items())


def _recalls(asked: str, text: str, question: Sequence[Message]) -> bool:
    """Whether a text has half of the words with which the chat's last story says what was asked for, and no name that
    the story does not have. Where the story says nothing of it, a text is right that says so."""
    stories = [cut_to_story(text_of(message["content"])) for message in question]
    stories = [story for story in stories if "hero" in check_story(story).facts]
    if not stories:
        return False
    # A name: a word in upper case that is not a usual first word of a sentence.
    for word in set(re.findall(r"\b[A-Z][a-z]+", text)) - set(re.findall(r"\w+", stories[-1])):
        if gender_of(word) or (word.lower() not in words_in_use() and _content(word)):
            return False
    facts = check_story(stories[-1]).facts
    told = [facts[role] for role in word_lists(FILE, "recalled")[asked] if role in facts]
    if asked == "end":
        told += [sentence.replace(facts["hero"], "") for sentence in SENTENCE_END.split(stories[-1])[-2:]]
    if not told:
        return UNTOLD.search(text) is not None
    needed = map(_content, told)
    return any(2 * len(words & _content(text)) >= len(words) > 0 for words in needed)


def _content(text: str) -> set[str]:
    """The words of a text that tell something, in lower case."""
    return set(re.findall(r"[a-z0-9]+", text.lower())) - set(words_of(sections(FILE)["plain"]))
