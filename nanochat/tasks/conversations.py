"""Conversations of your own: any .jsonl[.gz] or .parquet, a conversation per row, in one of these forms.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    [{"role": "user", "content": "..."}, ...]                         the list alone
    {"conversations": [{"from": "human", "value": "..."}, ...]}       ShareGPT's: human, gpt, system
    {"instruction": "...", "input": "...", "output": "..."}           Alpaca's

A folder's own train and test files are the splits; otherwise the last 10% of the rows are the test split. Every row is
checked when the file is opened. A last question without an answer is dropped: there is nothing to learn from it.
"""

from pathlib import Path
from typing import Any

from nanochat.conversation import Message, check_messages
from nanochat.data.files import Records
from nanochat.data.records import find_split, open_records
from nanochat.shell.cli import UserError
from nanochat.tasks.recorded import RecordTask
from nanochat.tasks.task import Example, Split

SPLIT_NAMES: dict[Split, tuple[str, ...]] = {"train": ("train",), "test": ("test", "validation", "valid", "val")}
ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names for them
KNOWN = '{"messages": [...]}, a list of messages, {"conversations": [...]}, {"instruction", "input", "output"}'


class Conversations(RecordTask):
    """A dialogue to learn from."""

    name = "conversations"
    kind = "dialogue"
    has_pairs = False

    def __init__(self, split: Split, path: str | None = None, hub: str = "hf"):
        if path is None:
            raise UserError(f"{self.name}: name a .jsonl file or a folder of them")
        place = Path(path).expanduser()
        files_of = {name: find_split(place, names) if place.is_dir() else [] for name, names in SPLIT_NAMES.items()}
        if all(files_of.values()):
            self.records = open_records(files_of[split])
        else:
            self.records = open_records([place])
            count = len(self.records)
            cut = min(count * 9 // 10, count - 1) if count > 1 else count
            part = range(cut) if split == "train" else range(cut, count)
            self.records = Records(self.records.files, first=part.start, end=part.stop)
        for index in range(len(self)):
            self.example(index)

    def read(self, record: Any) -> Example:
        return Example(messages_of(record))


def messages_of(record: Any) -> list[Message]:
    """The messages of a record in any of the forms above, checked; the last one is the assistant's.

    Raises ValueError: with the problem.
    """
    fields = record if isinstance(record, dict) else {}
    if isinstance(fields.get("messages"), list):
        messages = fields["messages"]
    elif isinstance(fields.get("conversations"), list):
        messages = fields["conversations"]
    elif isinstance(fields.get("instruction"), str):
        question = "\n\n".join(text for text in (fields["instruction"], fields.get("input")) if text)
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": fields.get("output")}]
    elif isinstance(record, list):
        messages = record
    else:
        raise ValueError(f"unknown form ({contents(record)}); known forms: {KNOWN}")
    messages = [plain(message) for message in messages]
    check_messages(messages)
    if messages[-1]["role"] == "user":
        messages.pop()
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError("there is no message from the assistant")
    return messages


def contents(record: Any) -> str:
    """The fields of a record, for messages."""
    if isinstance(record, dict):
        return f"with {', '.join(record) or 'nothing'}"
    return f"but {type(record).__name__}"


def plain(message: Any) -> Any:
    """A message without other keys: a column of a .parquet has in each message every key that any of them has."""
    if not isinstance(message, dict):
        return message
    if "from" in message and "role" not in message:
        sender = message["from"]
        role = ROLES.get(sender, sender) if isinstance(sender, str) else sender
        message = {"role": role, "content": message.get("value"), "train": message.get("train")}
    return {key: message[key] for key in ("role", "content", "train") if message.get(key) is not None}
