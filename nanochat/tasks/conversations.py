"""Conversations of your own: any .jsonl[.gz] or .parquet, a conversation a row, in one of these forms.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    [{"role": "user", "content": "..."}, ...]                         the list alone
    {"conversations": [{"from": "human", "value": "..."}, ...]}       ShareGPT's: human, gpt, system
    {"instruction": "...", "input": "...", "output": "..."}           Alpaca's

A folder's own train and test files are the splits; otherwise the last 10% of the rows are the test split. Every row is
checked when the file is opened. A last question that nobody answered is left off: there is nothing to learn from it.
"""

from pathlib import Path
from typing import Any

from nanochat.conversation import Message, check_messages
from nanochat.data.records import data_files, find_split, open_records
from nanochat.shell.cli import UserError
from nanochat.tasks.task import Example, Split, Task

NAMES = {"train": ("train",), "test": ("test", "validation", "valid", "val")}
ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names for them
KNOWN = '{"messages": [...]}, a list of messages, {"conversations": [...]}, {"instruction", "input", "output"}'


class Conversations(Task):
    """A dialogue to learn from."""

    name, kind = "conversations", "dialogue"

    def __init__(self, split: Split, path: str | None = None, hub: str = "hf"):
        if path is None:
            raise UserError(f"{self.name}: name a .jsonl file or a folder of them")
        place = Path(path).expanduser()
        own = {name: find_split(place, names) if place.is_dir() else [] for name, names in NAMES.items()}
        if all(own.values()):
            self.records = open_records(own[split])
            self.range = range(len(self.records))
        else:
            self.records = open_records(data_files(place))
            count = len(self.records)
            cut = min(count * 9 // 10, count - 1) if count > 1 else count
            self.range = range(cut) if split == "train" else range(cut, count)
        for index in self.range:
            self._messages(index)

    def __len__(self) -> int:
        return len(self.range)

    def example(self, index: int) -> Example:
        return Example(self._messages(self.range[index]))

    def _messages(self, index: int) -> list[Message]:
        """Raises UserError: naming the row, when it is not what it should be."""
        try:
            return messages_of(self.records[index])
        except UserError:
            raise  # it names the row already
        except ValueError as error:
            raise self.records.error(index, f"is no conversation: {error}") from error


def messages_of(row: Any) -> list[Message]:
    """The messages of a row in any of the forms above, checked; the last one is the assistant's.

    Raises ValueError: saying what is wrong with it.
    """
    if isinstance(row, dict) and isinstance(row.get("messages"), list):
        row = row["messages"]
    elif isinstance(row, dict) and isinstance(row.get("conversations"), list):
        row = row["conversations"]
    elif isinstance(row, dict) and isinstance(row.get("instruction"), str):
        asked = "\n\n".join(text for text in (row["instruction"], row.get("input")) if text)
        row = [{"role": "user", "content": asked}, {"role": "assistant", "content": row.get("output")}]
    elif not isinstance(row, list):
        has = f"with {', '.join(row) or 'nothing'}" if isinstance(row, dict) else f"but {type(row).__name__}"
        raise ValueError(f"no form that is known ({has}); these are: {KNOWN}")
    messages = [plain(message) for message in row]
    check_messages(messages)
    if messages[-1]["role"] == "user":
        messages.pop()
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError("nobody answers: there is no message by the assistant")
    return messages


def plain(message: Any) -> Any:
    """Only what a message is made of: a column of a .parquet gives each message every key that any of them has."""
    if not isinstance(message, dict):
        return message
    if "from" in message and "role" not in message:
        who = message["from"]
        role = ROLES.get(who, who) if isinstance(who, str) else who
        message = {"role": role, "content": message.get("value"), "train": message.get("train")}
    return {key: message[key] for key in ("role", "content", "train") if message.get(key) is not None}
