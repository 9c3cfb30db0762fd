"""Your preferences, or any data set of a hub. Most losses compare pairs: one per row, in one of these forms.

    {"chosen": [messages], "rejected": [messages]}         whole conversations that differ in their last message
    {"prompt": ..., "chosen": ..., "rejected": ...}        the prompt a text or messages, a reply a text, a message or
                                                           [message]; "question" means "prompt" too
    {"conversations": [...], "chosen": ..., "rejected": ...}                          ShareGPT's names
    {"instruction": "...", "input": "...", "chosen": ..., "rejected": ...}            Alpaca's

KTO learns from single replies as well: any form of conversations.py, and "label" (or "kto_tag") true or false, for the
last message. It splits pairs; a file may hold both.

    {"prompt": ..., "completion": ..., "label": true}
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}], "label": false}

A text under "system" or "system_prompt" goes before the prompt. conversations.py describes the splits, the other names
of a field, and how an unusable row is handled.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from nanochat.conversation import Message, check_messages
from nanochat.task import Example, Pair, reply_alone
from nanochat.task_flag import BadRecords
from nanochat.tasks.conversations import (
    QUESTIONS,
    Conversations,
    UnknownForm,
    answered,
    as_messages,
    contents,
    conversation_of,
    first_of,
    plain,
    question_of,
    tools_of,
    with_system,
)

KNOWN = (
    '{"chosen": [...], "rejected": [...]}, {"prompt", "chosen", "rejected"}, {"conversations", "chosen", "rejected"}, '
    '{"instruction", "input", "chosen", "rejected"}'
)
LABELS = ("label", "kto_tag")


class Preferences(Conversations):
    """A question, and two replies to it. As a dialogue a pair is its chosen reply."""

    name = "preferences"
    has_pairs = True
    columns = {*Conversations.columns, "chosen", "rejected"}

    def _checked(self, source: str, bad_records: BadRecords) -> np.ndarray:
        self.labels = bytearray()
        return super()._checked(source, bad_records)

    def check(self, record: Any) -> bool:
        # A resumed run must find the rejected replies as they were. An example holds only the chosen one.
        rejected = repr(pair_of(record).rejected).encode()
        tools_of(record)
        self.labels += hashlib.blake2b(rejected, digest_size=8).digest()
        return False

    @staticmethod
    def is_known(names: Iterable[str]) -> bool:
        return {"chosen", "rejected"} <= set(names)

    def pair(self, index: int) -> Pair:
        return self.records.parse(int(self.numbers[index]), pair_of)

    def read(self, record: Any) -> Example:
        pair = pair_of(record)
        return Example([*pair.question, pair.chosen], tools=tools_of(record))


class Labelled(Preferences):
    """A question, and a good or a bad reply to it, or both."""

    name = "labelled"
    columns = {*Preferences.columns, *LABELS}

    @staticmethod
    def is_known(names: Iterable[str]) -> bool:
        has_label = any(name in LABELS for name in names) and Conversations.is_known(names)
        return has_label or Preferences.is_known(names)

    def check(self, record: Any) -> bool:
        # A resumed run must find every label unchanged: a changed label reverses its gradient.
        self.labels += bytes(is_good for _, is_good in judged_of(record))
        if Preferences.is_known(record):
            super().check(record)
        return False

    def judged(self, index: int) -> list[tuple[list[Message], bool]]:
        return self.records.parse(int(self.numbers[index]), judged_of)

    def read(self, record: Any) -> Example:
        return Example(judged_of(record)[0][0], tools=tools_of(record))


def judged_of(record: Any) -> list[tuple[list[Message], bool]]:
    """Conversations of a record, and whether each ends well. Raises ValueError: with the problem."""
    if not isinstance(record, dict) or not Labelled.is_known(record):
        forms = f'any form of a conversation with "label": true or false, {KNOWN}'
        raise UnknownForm(f"unknown form ({contents(record)}); known forms: {forms}")
    if Preferences.is_known(record):
        chosen, rejected = pair_of(record).conversations
        return [(chosen, True), (rejected, False)]
    label = first_of(record, LABELS)
    if not isinstance(label, bool):
        raise ValueError(f"its label is {label!r}, not true or false")
    return [(reply_alone(answered(conversation_of(record))), label)]


def pair_of(record: Any) -> Pair:
    """The pair of a record in any of the forms above, checked. Raises ValueError: with the problem."""
    if not isinstance(record, dict) or not Preferences.is_known(record):
        hint = "; replies with a label are for chat_dpo --loss kto" if _has_label(record) else ""
        raise UnknownForm(f"unknown form ({contents(record)}); known forms: {KNOWN}{hint}")
    chosen = _conversation(record, "chosen")
    rejected = _conversation(record, "rejected")
    if chosen[:-1] != rejected[:-1]:
        raise ValueError("chosen and rejected do not answer the same messages")
    return Pair(chosen[:-1], chosen[-1], rejected[-1])


def _has_label(record: Any) -> bool:
    return isinstance(record, dict) and any(name in record for name in LABELS)


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
        problem = "is only a reply, and the prompt (a text or a list of messages) is missing"
        raise ValueError(f"{side} {problem}; known forms: {KNOWN}")
    return [plain(message) for message in with_system(record, messages)]
