"""Preference pairs of your own: any .jsonl[.gz] or .parquet, two replies to one question a row, in one of these forms.

    {"chosen": [messages], "rejected": [messages]}         whole conversations that differ in their last message
    {"prompt": ..., "chosen": ..., "rejected": ...}        the prompt a text or messages, a reply a text, a message or
                                                           [message]; "question" is as good as "prompt"
    {"conversations": [...], "chosen": ..., "rejected": ...}                          ShareGPT's names
    {"instruction": "...", "input": "...", "chosen": ..., "rejected": ...}            Alpaca's

A text under "system" stands before the prompt. Splits, and when a row is checked, are those of conversations.py. As a
dialogue a pair is its chosen reply.
"""

from typing import Any

from nanochat.conversation import Message, check_messages
from nanochat.data.records import open_split
from nanochat.shell.cli import UserError
from nanochat.tasks.conversations import Conversations, plain
from nanochat.tasks.task import Pair, Split

KNOWN = (
    '{"chosen": [...], "rejected": [...]}, {"prompt", "chosen", "rejected"}, {"conversations", "chosen", "rejected"}, '
    '{"instruction", "input", "chosen", "rejected"}'
)


class Preferences(Conversations):
    """A question, and two replies to it."""

    name = "preferences"

    def pair(self, index: int) -> Pair:
        return self._pair(self.range[index])

    def _messages(self, index: int) -> list[Message]:
        pair = self._pair(index)
        return [*pair.question, pair.chosen]

    def _pair(self, index: int) -> Pair:
        try:
            return pair_of(self.records[index])
        except UserError:
            raise  # it names the row already
        except ValueError as error:
            raise self.records.error(index, f"is no preference pair: {error}") from error


class UltraFeedback(Preferences):
    """Replies of many models to 64,000 questions, graded by a larger one: of each question the best and another; 61,135
    pairs, and 2,000 for testing. A row is checked when it is read.

    Source: Cui et al. 2023, UltraFeedback (arXiv:2310.01377), as paired by Tunstall et al. 2023, Zephyr.
    """

    name = "ultrafeedback"

    def __init__(self, split: Split, path: str | None = None, hub: str = "hf"):
        own = f"{split}_prefs"  # its other splits are for SFT and for generating
        self.records = open_split(self.name, own, path, hub, {"chosen": list, "rejected": list}, also=(split,))
        self.range = range(len(self.records))


def pair_of(row: Any) -> Pair:
    """The pair of a row in any of the forms above, checked.

    Raises ValueError: saying what is wrong with it.
    """
    if not isinstance(row, dict) or row.get("chosen") is None or row.get("rejected") is None:
        has = f"with {', '.join(row) or 'nothing'}" if isinstance(row, dict) else f"but {type(row).__name__}"
        raise ValueError(f"no form that is known ({has}); these are: {KNOWN}")
    chosen, rejected = (_conversation(row, side) for side in ("chosen", "rejected"))
    if chosen[:-1] != rejected[:-1]:
        raise ValueError("chosen and rejected do not answer the same messages")
    return Pair(chosen[:-1], chosen[-1], rejected[-1])


def _conversation(row: dict[str, Any], side: str) -> list[Message]:
    """The whole conversation of one side."""
    reply = row[side]
    if isinstance(reply, list):
        messages = [plain(message) for message in reply]
    else:
        messages = [plain(reply) if isinstance(reply, dict) else {"role": "assistant", "content": reply}]
    first = messages[0].get("role") if messages and isinstance(messages[0], dict) else None
    if first == "assistant":
        question = _question(row, side)
        if row.get("system"):
            question = [{"role": "system", "content": row["system"]}, *question]
        messages = question + messages
    try:
        check_messages(messages)
    except ValueError as error:
        raise ValueError(f"of {side}, {error}") from error
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"{side} does not end with the assistant's reply")
    return messages


def _question(row: dict[str, Any], side: str) -> list[Any]:
    prompt = row.get("prompt", row.get("question", row.get("conversations")))
    if isinstance(row.get("instruction"), str) and prompt is None:
        prompt = "\n\n".join(text for text in (row["instruction"], row.get("input")) if text)
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list):
        return [plain(message) for message in prompt]
    raise ValueError(
        f"{side} is a reply alone, and there is no prompt that is a text or a list of messages; forms that are known: "
        f"{KNOWN}"
    )
