"""Your conversations, or any data set of a hub: one conversation per row, in one of these forms.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    [{"role": "user", "content": "..."}, ...]                         only the list
    {"conversations": [{"from": "human", "value": "..."}, ...]}       ShareGPT's: human, gpt, system
    {"instruction": "...", "input": "...", "output": "..."}           Alpaca's
    {"prompt": ..., "completion": ...}                                texts, messages or lists of messages

"conversation" means "conversations" too; "prompt", "question" and "query" mean "instruction"; "completion", "response"
and "answer" mean "output"; "context" means "input". A text under "system" or "system_prompt" goes before all, and
"history", a list of [question, answer], before the question. `"train": false` or `"weight": 0` in a message: not
learned.

Functions that the assistant calls are in OpenAI's form: a list "tools", `"tool_calls": [{"function": {"name": "...",
"arguments": ...}}]` in an assistant's message, and their results as messages of the role "tool". Only a model with a
chat template learns from such a row.

data/records.py reads the rows. All are checked when they are opened. A row in a known form that is still not a
conversation is skipped and counted, or is an error with `bad_records="fail"`. A row in an unknown form is always an
error. A last question without an answer is dropped: it teaches nothing.

If rewards need no right answer (chat_rl --reward), a question is enough, under the same names.
"""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from nanochat.cli import UserError
from nanochat.conversation import Message, check_messages
from nanochat.data.records import open_part
from nanochat.log import warn
from nanochat.screen import track
from nanochat.task import Example, Split
from nanochat.task_flag import BadRecords
from nanochat.tasks.recorded import RecordTask

LISTS = ("messages", "conversations", "conversation")
QUESTIONS = ("instruction", "prompt", "question", "query")
ANSWERS = ("output", "completion", "response", "answer")
INPUTS = ("input", "context")
SYSTEMS = ("system", "system_prompt")
ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names for them
KNOWN = (
    '{"messages": [...]}, a list of messages, {"conversations": [...]}, {"instruction", "input", "output"}, '
    '{"prompt", "completion"}'
)


class UnknownForm(ValueError):
    """A record in none of the forms above."""


class Conversations(RecordTask):
    """A dialogue to learn from."""

    name = "conversations"
    kind = "dialogue"
    has_pairs = False
    columns = {*LISTS, *QUESTIONS, *ANSWERS, *INPUTS, *SYSTEMS, "history", "tools"}  # that are read

    def __init__(
        self,
        split: Split,
        path: str | None = None,
        hub: str = "hf",
        label: str | None = None,
        bad_records: BadRecords = "skip",
        val_share: float | None = None,
    ):
        """`path`: a file, a folder or ORG/NAME[/CONFIG], each with `@SPLIT` or without; `label`: another name;
        `val_share`: see `open_part`."""
        if path is None:
            raise UserError(f"{self.name}: name a .jsonl file or a folder of them")
        self.name = label or self.name
        self.records = open_part(path, split, hub, self.columns_to_read, val_share)
        self.numbers = self._checked(f"{path} ({split})", bad_records)  # numbers of the records that are used

    def __len__(self) -> int:
        return len(self.numbers)

    def example(self, index: int) -> Example:
        return self.records.parse(int(self.numbers[index]), self.read_with_fields)

    def where(self, index: int) -> str:
        return self.records.where(int(self.numbers[index]))

    def read(self, record: Any) -> Example:
        return Example(messages_of(record), tools=tools_of(record))

    def check(self, record: Any) -> bool:
        """Whether its last question is dropped. Raises ValueError: when the record is not a conversation."""
        messages = conversation_of(record)
        tools_of(record)
        return len(answered(messages)) < len(messages)

    @staticmethod
    def is_known(names: Iterable[str]) -> bool:
        """Whether records with these fields are in a known form."""
        has_both = any(name in QUESTIONS for name in names) and any(name in ANSWERS for name in names)
        return has_both or any(name in LISTS for name in names)

    def columns_to_read(self, names: list[str]) -> list[str] | None:
        """The columns of a .parquet to read; all of them if the form is unknown, so that the message can list them."""
        return [name for name in names if name in self.columns] if self.is_known(names) else None

    def _checked(self, source: str, bad_records: BadRecords) -> np.ndarray:
        """The numbers of the records that are conversations; a warning counts the others.

        Raises UserError: for a record in an unknown form; with `bad_records="fail"` for any record that is not a
        conversation; and when no conversation is left.
        """
        count = len(self.records)
        used = np.ones(count, dtype=bool)
        first: tuple[int, ValueError] | None = None  # that is left out: its number and its problem
        questions = 0  # at the end of a conversation
        for index in track(range(count), f"checking {self.name}"):
            record = self.records[index]
            try:
                questions += self.check(record)
            except UnknownForm as error:  # as a rule the form of all
                raise self.records.error(index, f"cannot be used: {error}") from error
            except ValueError as error:
                used[index] = False
                first = first or (index, error)
        if first is not None:
            index, problem = first
            others = count - int(used.sum()) - 1
            if bad_records == "fail":
                more = f"; {others:,} more of the {count:,} records cannot, either" if others else ""
                raise self.records.error(index, f"cannot be used: {problem}{more}") from problem
            left_out = f"{others + 1:,} of {count:,} records left out: first {self.records.where(index)}: {problem}"
            if not used.any():
                raise UserError(f"--tasks {source}: {left_out}")
            warn(f"--tasks {source}: {left_out} (--bad_records fail makes this an error)")
        if questions:
            warn(f"--tasks {source}: the last message of {questions:,} of {count:,} is a question: it is dropped")
        return used.nonzero()[0]


class Prompts(Conversations):
    """A question, for rewards that need no right answer. All fields of its record are read."""

    name = "prompts"

    @staticmethod
    def is_known(names: Iterable[str]) -> bool:
        return any(name in (*LISTS, *QUESTIONS) for name in names)

    def columns_to_read(self, names: list[str]) -> list[str] | None:
        return None

    def check(self, record: Any) -> bool:
        self.read(record)
        return False

    def read(self, record: Any) -> Example:
        fields = record if isinstance(record, dict) else {}
        has_list = isinstance(record, list) or any(isinstance(fields.get(name), list) for name in LISTS)
        if has_list or isinstance(first_of(fields, ANSWERS), str):
            messages = conversation_of(record)
        elif self.is_known(fields):
            messages = [plain(message) for message in with_system(fields, question_of(fields))]
            check_messages(messages)
        else:
            raise UnknownForm(f"unknown form ({contents(record)}): there is no {', '.join((*LISTS, *QUESTIONS))}")
        # An empty text replaces a missing reference reply.
        if messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        return Example(messages, first_of(fields, ANSWERS), tools=tools_of(record), fields=fields)


def messages_of(record: Any) -> list[Message]:
    """The messages of a record in any of the forms above, checked; the last one is the assistant's.

    Raises ValueError: with the problem.
    """
    return answered(conversation_of(record))


def answered(messages: list[Message]) -> list[Message]:
    """A conversation without an unanswered last question. Raises ValueError: when nothing is left of it."""
    replies = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not replies:
        raise ValueError("the assistant has no message")
    return messages[: replies[-1] + 1]


def conversation_of(record: Any) -> list[Message]:
    """All messages of a record in any of the forms above, checked. Raises ValueError: with the problem."""
    fields = record if isinstance(record, dict) else {}
    lists = [fields[name] for name in LISTS if isinstance(fields.get(name), list)]
    if lists:
        messages = lists[0]
    elif isinstance(record, list):
        messages = record
    elif Conversations.is_known(fields):
        messages = question_of(fields) + as_messages(first_of(fields, ANSWERS), "assistant")
    else:
        raise UnknownForm(f"unknown form ({contents(record)}); known forms: {KNOWN}")
    messages = [plain(message) for message in with_system(fields, messages)]
    check_messages(messages)
    return messages


def question_of(fields: dict[str, Any]) -> list[Any]:
    """The messages before the reply, for a record with a separate field for the question."""
    question = first_of(fields, QUESTIONS)
    more = first_of(fields, INPUTS)
    if isinstance(question, str) and isinstance(more, str) and more:
        question = f"{question}\n\n{more}" if question else more
    messages = []
    for turn in fields.get("history") or []:
        if not isinstance(turn, list) or len(turn) != 2:
            raise ValueError('its "history" is not a list of [question, answer]')
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    return messages + as_messages(question, "user")


def with_system(fields: dict[str, Any], messages: list[Any]) -> list[Any]:
    """The messages, after the record's system message if it has one."""
    system = first_of(fields, SYSTEMS)
    return [{"role": "system", "content": system}, *messages] if system else messages


def first_of(fields: dict[str, Any], names: Iterable[str]) -> Any:
    """The value of the first of these fields that exists and is not null."""
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def as_messages(value: Any, role: str) -> list[Any]:
    """A text, a message or a list of messages as messages, still unchecked."""
    if isinstance(value, list):
        return value
    return [value if isinstance(value, dict) else {"role": role, "content": value}]


def contents(record: Any) -> str:
    """The fields of a record, for messages."""
    if isinstance(record, dict):
        return f"with {', '.join(record)[:400] or 'nothing'}"
    return f"but {type(record).__name__}"


def plain(message: Any) -> Any:
    """A message without other keys: a column of a .parquet has in each message every key that any of them has.

    Raises ValueError: for a call of a function that cannot be read.
    """
    if not isinstance(message, dict):
        return message
    if message.get("function_call"):
        raise ValueError("a message calls a function by function_call: only tool_calls are read")
    if "from" in message and "role" not in message:
        sender = message["from"]
        role = ROLES.get(sender, sender) if isinstance(sender, str) else sender
        message = {**message, "role": role, "content": message.get("value")}
    if message.get("weight") == 0 and message.get("train") is None:
        message = {**message, "train": False}
    read = {key: message[key] for key in ("role", "content", "train") if message.get(key) is not None}
    calls = parsed(message.get("tool_calls"), "tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise ValueError("tool_calls is not a list")
        read = {"content": "", **read, "tool_calls": [call_of(call) for call in calls]}
    if message.get("tool_call_id"):
        read["tool_call_id"] = message["tool_call_id"]
    return read


def call_of(call: Any) -> dict[str, Any]:
    """A call of a function as chat templates read it: with an object of arguments. Raises ValueError: without one."""
    function = call.get("function") if isinstance(call, dict) else None
    fields = function if isinstance(function, dict) else {}
    arguments = parsed(fields.get("arguments") or {}, "the arguments of a function")
    if not isinstance(fields.get("name"), str) or not isinstance(arguments, dict):
        raise ValueError("a call in tool_calls has no function with a name and an object of arguments")
    # In a .parquet each call has the names of all arguments.
    arguments = {name: value for name, value in arguments.items() if value is not None}
    identity = {"id": call["id"]} if call.get("id") else {}
    return {**identity, "type": "function", "function": {"name": fields["name"], "arguments": arguments}}


def tools_of(record: Any) -> list[dict[str, Any]] | None:
    """The functions that a record offers. Raises ValueError: when it has something else under that name."""
    tools = parsed(record.get("tools"), "tools") if isinstance(record, dict) else None
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError('its "tools" are not a list of objects')
    return tools or None


def parsed(value: Any, name: str) -> Any:
    """The value of a field, which may be JSON in a text. Raises ValueError: when the text is something else."""
    if not isinstance(value, str) or not value:
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is a text that is not JSON") from error
