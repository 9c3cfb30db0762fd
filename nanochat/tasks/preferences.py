"""Preference pairs of your own: any .jsonl[.gz] or .parquet, a pair per row, in one of these forms.

    {"chosen": [messages], "rejected": [messages]}         whole conversations that differ in their last message
    {"prompt": ..., "chosen": ..., "rejected": ...}        the prompt a text or messages, a reply a text, a message or
                                                           [message]; "question" means "prompt" too
    {"conversations": [...], "chosen": ..., "rejected": ...}                          ShareGPT's names
    {"instruction": "...", "input": "...", "chosen": ..., "rejected": ...}            Alpaca's

A text under "system" goes before the prompt. Splits, and when a row is checked, are those of conversations.py.
"""

from typing import Any

from nanochat.conversation import Message, check_messages
from nanochat.tasks.conversations import Conversations, contents, plain
from nanochat.tasks.task import Example, Pair

KNOWN = (
    '{"chosen": [...], "rejected": [...]}, {"prompt", "chosen", "rejected"}, {"conversations", "chosen", "rejected"}, '
    '{"instruction", "input", "chosen", "rejected"}'
)


class Preferences(Conversations):
    """A question, and two replies to it. As a dialogue a pair is its chosen reply."""

    name = "preferences"
    has_pairs = True

    def pair(self, index: int) -> Pair:
        return self.records.parse(index, pair_of)

    def read(self, record: Any) -> Example:
        pair = pair_of(record)
        return Example([*pair.question, pair.chosen])


def pair_of(record: Any) -> Pair:
    """The pair of a record in any of the forms above, checked. Raises ValueError: with the problem."""
    if not isinstance(record, dict) or record.get("chosen") is None or record.get("rejected") is None:
        raise ValueError(f"unknown form ({contents(record)}); known forms: {KNOWN}")
    chosen = _conversation(record, "chosen")
    rejected = _conversation(record, "rejected")
    if chosen[:-1] != rejected[:-1]:
        raise ValueError("chosen and rejected do not answer the same messages")
    return Pair(chosen[:-1], chosen[-1], rejected[-1])


def _conversation(record: dict[str, Any], side: str) -> list[Message]:
    """The whole conversation of one side."""
    reply = record[side]
    if not isinstance(reply, list | dict):
        reply = {"role": "assistant", "content": reply}
    messages = [plain(message) for message in (reply if isinstance(reply, list) else [reply])]
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
    prompt = record.get("prompt", record.get("question", record.get("conversations")))
    if isinstance(record.get("instruction"), str) and prompt is None:
        prompt = "\n\n".join(text for text in (record["instruction"], record.get("input")) if text)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list):
        problem = "is a reply alone, and there is no prompt that is a text or a list of messages"
        raise ValueError(f"{side} {problem}; known forms: {KNOWN}")
    if record.get("system"):
        prompt = [{"role": "system", "content": record["system"]}, *prompt]
    return [plain(message) for message in prompt]
