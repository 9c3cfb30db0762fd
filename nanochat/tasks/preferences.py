"""Your preferences, or any data set of a hub. Most losses compare pairs: one per row, in one of these forms.

    {"chosen": [messages], "rejected": [messages]}         whole conversations that differ in their last message
    {"prompt": ..., "chosen": ..., "rejected": ...}        the prompt a text or messages, a reply a text, a message or
                                                           [message]; "question" means "prompt" too
    {"conversations": [...], "chosen": ..., "rejected": ...}                          ShareGPT's names
    {"instruction": "...", "input": "...", "chosen": ..., "rejected": ...}            Alpaca's
    {"messages": [...], "rejected_response": "..."}                                   ms-swift's; the last one is chosen
    {"messages": [...], "rejected_messages": [...]}                                   the same with two lists

KTO learns from single replies as well: any form of conversations.py, and "label" (or "kto_tag") true or false, for the
last message. It splits pairs; a file may hold both.

    {"prompt": ..., "completion": ..., "label": true}
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}], "label": false}

A text under "system" or "system_prompt" goes before the prompt. conversations.py describes the splits, the other names
of a field, and how an unusable row is handled.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from nanochat.conversation import Message, check_messages
from nanochat.task import Example, Pair, reply_alone
from nanochat.task_flag import BadRecords
from nanochat.tasks.columns import first_of, has, label_of, tidied
from nanochat.tasks.conversations import (
    TURNS,
    Conversations,
    UnknownForm,
    answered,
    as_messages,
    conversation_of,
    question_of,
    tools_of,
    with_system,
)
from nanochat.tasks.messages import plain_messages

KNOWN = (
    '{"chosen": [...], "rejected": [...]}, {"prompt", "chosen", "rejected"}, {"conversations", "chosen", "rejected"}, '
    '{"instruction", "input", "chosen", "rejected"}, {"messages", "rejected_response"}'
)
ADVICE = "name yours: --columns question=COLUMN,chosen=COLUMN,rejected=COLUMN"


class Preferences(Conversations):
    """A question, and two replies to it. As a dialogue a pair is its chosen reply."""

    name = "preferences"
    has_pairs = True
    learns_bad = True  # a loss of pairs decides what becomes of it
    roles = (*TURNS, "chosen", "rejected")

    def _checked(self, source: str, bad_records: BadRecords) -> np.ndarray:
        self.labels = bytearray()
        return super()._checked(source, bad_records)

    def check(self, record: Any) -> bool:
        # A resumed run must find the rejected replies as they were. An example holds only the chosen one.
        pair = pair_of(record)
        tools_of(record)
        self.labels += hashlib.blake2b(repr(pair.rejected).encode(), digest_size=8).digest()
        self.seen.replies([pair.chosen, pair.rejected])
        return False

    @staticmethod
    def is_known(names: Iterable[str]) -> bool:
        names = list(names)
        return has(names, "rejected") and (has(names, "chosen") or Conversations.is_known(names))

    def roles_of(self, fields: Mapping[str, Any]) -> list[str]:
        if first_of(fields, "chosen") is None or first_of(fields, "rejected") is None:
            return super().roles_of(fields)
        roles = ["chosen", "rejected", "system", "tools"]
        if _is_reply(plain_messages(as_messages(fields["chosen"], "assistant"))):
            is_question = first_of(fields, "question") is not None or isinstance(fields.get("input"), str)
            roles += ["question", "input", "history"] if is_question else ["messages"]
        return [role for role in self.roles if role in (*roles, "label")]

    def pair(self, index: int) -> Pair:
        return self.records.parse(int(self.numbers[index]), self._pair)

    def _pair(self, record: Any) -> Pair:
        pair = pair_of(self.tidy(record))
        *question, chosen = self.chosen_thoughts([*pair.question, pair.chosen])
        [rejected] = self.chosen_thoughts([pair.rejected])
        return Pair(question, chosen, rejected)

    def read(self, record: Any) -> Example:
        pair = pair_of(record)
        return Example(self.chosen_thoughts([*pair.question, pair.chosen]), tools=tools_of(record))


class Labelled(Preferences):
    """A question, and a good or a bad reply to it, or both."""

    name = "labelled"
    roles = (*Preferences.roles, "label")

    @staticmethod
    def is_known(names: Iterable[str]) -> bool:
        names = list(names)
        return (has(names, "label") and Conversations.is_known(names)) or Preferences.is_known(names)

    def check(self, record: Any) -> bool:
        # A resumed run must find every label unchanged: a changed label reverses its gradient.
        judged = judged_of(record)
        self.labels += bytes(is_good for _, is_good in judged)
        if Preferences.is_known(record):
            return super().check(record)
        self.seen.replies(judged[0][0])
        return False

    def judged(self, index: int) -> list[tuple[list[Message], bool]]:
        judged = self.records.parse(int(self.numbers[index]), lambda record: judged_of(self.tidy(record)))
        return [(self.chosen_thoughts(messages), is_good) for messages, is_good in judged]

    def read(self, record: Any) -> Example:
        return Example(self.chosen_thoughts(judged_of(record)[0][0]), tools=tools_of(record))


def judged_of(record: Any) -> list[tuple[list[Message], bool]]:
    """Conversations of a tidied record, and whether each ends well. Raises ValueError: with the problem."""
    if not isinstance(record, dict) or not Labelled.is_known(record):
        forms = f'any form of a conversation with "label": true or false, {KNOWN}'
        raise UnknownForm(f"; known forms: {forms}; {ADVICE},label=COLUMN")
    if Preferences.is_known(record):
        chosen, rejected = pair_of(record).conversations
        return [(chosen, True), (rejected, False)]
    is_good = label_of(record)
    if is_good is None:
        raise ValueError(f"its label is {first_of(record, 'label')!r}, not true or false")
    return [(reply_alone(answered(conversation_of(record))), is_good)]


def pair_of(record: Any) -> Pair:
    """The pair of a record in any of the forms above, checked. Raises ValueError: with the problem."""
    fields = tidied(record, {})
    if not isinstance(fields, dict) or not Preferences.is_known(fields):
        is_labelled = isinstance(fields, dict) and has(fields, "label")
        hint = "; replies with a label are for chat_dpo --loss kto" if is_labelled else ""
        raise UnknownForm(f"; known forms: {KNOWN}{hint}; {ADVICE}")
    if has(fields, "chosen"):
        chosen = _conversation(fields, "chosen", fields["chosen"])
        rejected = _conversation(fields, "rejected", first_of(fields, "rejected"))
    else:
        chosen = conversation_of(fields)
        if chosen[-1]["role"] != "assistant":
            raise ValueError("its messages do not end with the chosen reply")
        rejected = _conversation(fields, "rejected", first_of(fields, "rejected"), chosen[:-1])
    if chosen[:-1] != rejected[:-1]:
        raise ValueError("chosen and rejected do not answer the same messages")
    return Pair(chosen[:-1], chosen[-1], rejected[-1])


def _conversation(
    record: dict[str, Any], side: str, value: Any, question: list[Message] | None = None
) -> list[Message]:
    """The whole conversation of one side. `question` is what it answers, where the record does not say it."""
    messages = plain_messages(as_messages(value, "assistant"))
    if _is_reply(messages):
        messages = (_question(record, side) if question is None else question) + messages
    elif messages and question is None and _role(messages[0]) != "system":
        messages = with_system(record, messages)
    try:
        check_messages(messages)
    except ValueError as error:
        raise ValueError(f"of {side}, {error}") from error
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"{side} does not end with the assistant's reply")
    return messages


def _question(record: dict[str, Any], side: str) -> list[Any]:
    turns = first_of(record, "messages")
    if isinstance(first_of(record, "question"), str | list) or isinstance(record.get("input"), str):
        messages = question_of(record)
    elif isinstance(turns, list):
        messages = turns
    else:
        problem = "is only a reply, and the prompt (a text or a list of messages) is missing"
        raise ValueError(f"{side} {problem}; known forms: {KNOWN}")
    return plain_messages(with_system(record, messages))


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _is_reply(messages: list[Any]) -> bool:
    """Whether messages are only a reply, and not a whole conversation."""
    return bool(messages) and _role(messages[0]) == "assistant"
