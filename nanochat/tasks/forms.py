"""The table of forms: what other tools write where this room expects a text, a list of messages or a list of functions.

`value_of(role, value)` gives the value of a column as this room reads it. Each row of the table names the roles
(columns.py) whose values may have the form, tells such a value from others, and reads it. The rows apply in order: a
text may become a list, and the list messages.
"""

import ast
import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LISTED = re.compile(r"\s*\[\s*\{")  # the beginning of a list of messages in a text
TRANSCRIPT = re.compile(r"\n\n(Human|Assistant):")
# numpy writes the objects of a list in lines without commas. Inside of a text Python writes a line end as \n.
NEXT_OBJECT = re.compile(r"\}\s*\n\s*\{")
MAX_LITERAL_BYTES = 1 << 20  # Python's parser takes a hundred times the bytes of a text
NAMES_IN_MESSAGES = {"messages": "the list of messages", "history": 'its "history"', "tools": "tools"}


@dataclass(frozen=True)
class Form:
    """A row of the table."""

    roles: tuple[str, ...]
    is_such: Callable[[Any], bool]
    read: Callable[[Any], Any]


def parsed(value: Any, name: str) -> Any:
    """The value of a field, which may be a text with JSON, or with a list as Python writes it.

    Raises ValueError: when the text is something else.
    """
    if not isinstance(value, str) or not value:
        return value
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(value)
    # Lists in a .csv by pandas: to_csv writes what Python, or numpy, shows of them.
    if value.lstrip().startswith(("[", "{")) and len(value) <= MAX_LITERAL_BYTES:
        with contextlib.suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return ast.literal_eval(NEXT_OBJECT.sub("}, {", value.strip()))
    raise ValueError(f"{name} is a text that is not JSON")


def _messages_in(text: str) -> Any:
    """The messages that a text lists; any other text as it is."""
    with contextlib.suppress(ValueError):
        found = parsed(text, "")
        if all(isinstance(message, dict) and ("role" in message or "from" in message) for message in found):
            return found
    return text


def _turns_of_transcript(text: str) -> list[Any]:
    _, *parts = TRANSCRIPT.split(text)
    turns = [{"from": name, "value": turn.strip()} for name, turn in zip(parts[::2], parts[1::2], strict=True)]
    return turns if turns[-1]["value"] else turns[:-1]  # a prompt ends with "Assistant:"


def _messages_of_pairs(turns: Any) -> list[Any]:
    """The messages of [question, answer], of which one may be null; messages stay as they are."""
    messages: list[Any] = []
    for turn in turns if isinstance(turns, list) else [turns]:
        if isinstance(turn, dict):
            messages.append(turn)
            continue
        if not isinstance(turn, list | tuple) or len(turn) != 2:
            raise ValueError('its "history" is not a list of [question, answer]')
        pair = zip(("user", "assistant"), turn, strict=True)
        messages += [{"role": role, "content": text} for role, text in pair if text is not None]
    return messages


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) for one in value)


def _text_that(pattern: re.Pattern[str]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and pattern.match(value) is not None


SIDES = ("question", "answer", "chosen", "rejected")
FORMS = (
    # A list as JSON in a .csv, or as pandas writes it.
    *(Form((role,), lambda value: isinstance(value, str), lambda text, name=name: parsed(text, name))
      for role, name in NAMES_IN_MESSAGES.items()),
    Form(SIDES, _text_that(LISTED), _messages_in),
    # {"input": {"messages": [...], "tools": [...]}, "preferred_output": [...]}: OpenAI's preferences.
    Form(("question",), lambda value: isinstance(value, dict) and "messages" in value, lambda value: value["messages"]),
    # "\n\nHuman: ...\n\nAssistant: ...": Anthropic's pairs of helpful and harmless replies.
    Form(("question", "chosen", "rejected"), _text_that(TRANSCRIPT), _turns_of_transcript),
    # {"response": ["a", "b"]}: ms-swift learns the first.
    Form(("answer", "chosen", "rejected"), _are_texts, lambda texts: texts[0]),
    # {"history": [["question", "answer"]]}, or messages.
    Form(("history",), bool, _messages_of_pairs),
)  # fmt: skip
BY_ROLE = {role: [form for form in FORMS if role in form.roles] for role in {*SIDES, *NAMES_IN_MESSAGES}}


def value_of(role: str, value: Any) -> Any:
    """The value of a column of this role as this room reads it. Raises ValueError: with the problem."""
    for form in BY_ROLE.get(role, ()):
        if form.is_such(value):
            value = form.read(value)
    return value
