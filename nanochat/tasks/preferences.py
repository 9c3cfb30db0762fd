"""Preference pairs of your own, or of any data set of a hub: a pair per row, in one of these forms.

    {"chosen": [messages], "rejected": [messages]}         whole conversations that differ in their last message
    {"prompt": ..., "chosen": ..., "rejected": ...}        the prompt a text or messages, a reply a text, a message or
                                                           [message]; "question" means "prompt" too
    {"conversations": [...], "chosen": ..., "rejected": ...}                          ShareGPT's names
    {"instruction": "...", "input": "...", "chosen": ..., "rejected": ...}            Alpaca's

A text under "system" or "system_prompt" goes before the prompt. Splits, other names of a field, and what becomes of a
row that cannot be used, are those of conversations.py.
"""

from collections.abc import Iterable
from typing import Any

from nanochat.conversation import Message, check_messages
from nanochat.tasks.conversations import (
    QUESTIONS,
    Conversations,
    UnknownForm,
    as_messages,
    contents,
    first_of,
    plain,
    question_of,
    tools_of,
    with_system,
)
from nanochat.tasks.task import Example, Pair

KNOWN = (
    '{"chosen": [...], "rejected": [...]}, {"prompt", "chosen", "rejected"}, {"conversations", "chosen", "rejected"}, '
    '{"instruction", "input", "chosen", "rejected"}'
)


class Preferences(Conversations):
    """A question, and two replies to it. As a dialogue a pair is its chosen reply."""

    name = "preferences"
    has_pairs = True
    columns = {*Conversations.columns, "chosen", "rejected"}

    def check(self, record: Any) -> bool:
        self.read(record)
        return False

    @staticmethod
    def is_known(names: Iterable[str]) -> bool:
        return {"chosen", "rejected"} <= set(names)

    def pair(self, index: int) -> Pair:
        return self.records.parse(int(self.numbers[index]), pair_of)

    def read(self, record: Any) -> Example:
        pair = pair_of(record)
        return Example([*pair.question, pair.chosen], tools=tools_of(record))


def pair_of(record: Any) -> Pair:
    """The pair of a record in any of the forms above, checked. Raises ValueError: with the problem."""
    if not isinstance(record, dict) or not Preferences.is_known(record):
        raise UnknownForm(f"unknown form ({contents(record)}); known forms: {KNOWN}")
    chosen = _conversation(record, "chosen")
    rejected = _conversation(record, "rejected")
    if chosen[:-1] != rejected[:-1]:
        raise ValueError("chosen and rejected do not answer the same messages")
    return Pair(chosen[:-1], chosen[-1], rejected[-1])


def _conversation(record: dict[str, Any], side: str) -> list[Message]:
    """The whole conversation of one side."""
    messages = [plain(message) for message in as_messages(record[side], "assistant")]
    is_reply_alone = messages and isinstance(messages[0], dict) and messages[0].get("role") == "assistant"
    if is_reply_alone:
        messages = _question(record, side) + messages
    try:
        check_messages(messages)
    except ValueError as error:
        raise ValueError(f"of {side}, {error}") from error
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"{side} does not end with the assistant's reply")
    return messages


def _question(record: dict[str, Any], side: str) -> list[Any]:
    turns = record.get("conversations")
    if isinstance(first_of(record, QUESTIONS), str | list):
        messages = question_of(record)
    elif isinstance(turns, list):
        messages = turns
    else:
        problem = "is a reply alone, and there is no prompt that is a text or a list of messages"
        raise ValueError(f"{side} {problem}; known forms: {KNOWN}")
    return [plain(message) for message in with_system(record, messages)]
