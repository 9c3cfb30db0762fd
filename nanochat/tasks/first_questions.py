"""The first things that people type to a chat model, from a file that says which replies are right.

Each line has a `question` and one or more ways to be right:

    {"question": "what is 2+2", "number": "4"}                       the last number of the reply
    {"question": "tell me a story about a cat", "story": "cat"}      a story that holds together, with this word in it
    {"question": "who are you?", "says": ["nanochat"]}               any of these, in upper or lower case
    {"question": "What time is it?", "honest": true}                 it says that it does not know, or what it does know

It is only for evaluation; nothing is trained on it. `tests/first_questions.jsonl` has a hundred.
"""

import re
from collections.abc import Sequence
from typing import Any

from nanochat.cli import UserError
from nanochat.conversation import Part, text_of
from nanochat.data.records import open_records
from nanochat.demo.checker import check_story
from nanochat.task import Example, Split, turn
from nanochat.tasks.recorded import RecordTask

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
HONEST = re.compile(
    r"I (do not|don't) (know|understand)|I (cannot|can't)|I (only know|know only)|我不知道|我不会|我只会"
)
RULES = {"number": str, "story": str, "says": list, "honest": bool}


class FirstQuestions(RecordTask):
    """A question, and what a right or honest reply to it says."""

    name = "first_questions"
    has_pairs = False

    def __init__(self, split: Split, path: str | None = None, hub: str = "hf"):
        assert path is not None  # task_flag.py has refused it
        if split == "train":
            raise UserError("first_questions is for chat_eval: a model that has learned the answers proves nothing")
        self.records = open_records([path])

    def read(self, record: Any) -> Example:
        if not isinstance(record, dict) or not isinstance(record.get("question"), str):
            raise ValueError('it has no "question" that is a text')
        rules = {name: rule for name, rule in record.items() if name != "question"}
        if not rules or any(not isinstance(rule, RULES.get(name, ())) for name, rule in rules.items()):
            raise ValueError(f"its ways to be right are {rules}: at least one of {', '.join(RULES)}")
        # The questions have no reference reply: the empty text is the conversation's last message.
        return Example(turn(record["question"], ""), rules)

    def grade(self, example: Example, reply: Sequence[Part]) -> bool:
        text = text_of(reply)
        rules = example.answer
        numbers = NUMBER.findall(text)
        if "number" in rules and numbers and numbers[-1] == rules["number"]:
            return True
        if "story" in rules and check_story(text).ok and rules["story"] in text:
            return True
        if rules.get("honest") and HONEST.search(text):
            return True
        return any(phrase.lower() in text.lower() for phrase in rules.get("says", ()))
