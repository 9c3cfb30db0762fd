"""Calls of a client's tools: how the model writes them, and how they become OpenAI's `tool_calls`.

The models are trained with one tool, a calculator, whose calls are `python` parts (conversation.py). The client owns
that tool if it lists a tool `calculator` with the single parameter `expression`: then a call ends the reply and goes to
the client, instead of being answered here. Any other tool is called only if the client requires it: the schemas of the
tools then constrain the reply to `{"name":...,"arguments":...}` (grammar.py). Calls and results of earlier turns are
read as `python` and `python_output` parts, the only form of a call in the chat format.
"""

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any, Literal

CALCULATOR = "calculator"

# The calls that a reply may contain. "none": no calls, only plain text. "own": calls of the calculator, answered by the
# server. "client": calls of the calculator, passed to the client. "calculator": the whole reply is such a call.
# "schema": the reply is a call by the tools' schemas.
Calls = Literal["none", "own", "client", "calculator", "schema"]


def is_calculator(name: str, parameters: dict[str, Any] | None) -> bool:
    properties = (parameters or {}).get("properties")
    return name == CALCULATOR and isinstance(properties, dict) and list(properties) == ["expression"]


def call_schema(tools: Sequence[tuple[str, dict[str, Any] | None]]) -> dict[str, Any]:
    """The schema of a call to one of the tools, from their names and parameters."""
    branches = []
    for number, (name, parameters) in enumerate(tools):
        # A reference such as "#/$defs/City" is relative to the nearest "$id": each tool keeps its own definitions.
        arguments: dict[str, Any] = {"type": "object", **(parameters or {}), "$id": f"tool:{number}"}
        if arguments.get("properties"):
            # A model that does not read the schema would add other arguments until the end of its reply.
            arguments.setdefault("additionalProperties", False)
        branches.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": arguments},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return {"anyOf": branches}


def call_text(name: str, arguments: str) -> str:
    """An earlier call as the text of a `python` part; `arguments` is JSON, or a model's attempt at it."""
    if name == CALCULATOR:
        try:
            values = json.loads(arguments)
        except (ValueError, RecursionError):
            values = None
        if isinstance(values, dict) and isinstance(values.get("expression"), str):
            return values["expression"]
    return f'{{"name":{json.dumps(name)},"arguments":{arguments}}}'


class CallWriter:
    """Turns the text of the client's call in one reply, as it arrives, into fragments of OpenAI's `tool_calls`."""

    def __init__(self, calls: Calls):
        # Chunks of this kind are the call; "" without a call.
        self.kind = {"client": "python", "calculator": "python", "schema": "text"}.get(calls, "")
        self.id = f"call_{uuid.uuid4().hex}"
        self.name = CALCULATOR
        self.has_begun = False
        self._text = ""  # not handed out yet

    def add(self, text: str, finish_reason: str | None) -> dict[str, Any] | None:
        """The next fragment; None: nothing yet. `finish_reason` is set if the reply ends here."""
        arguments = self._arguments(text) if self.kind == "text" else self._expression(text, finish_reason)
        if arguments is None or (self.has_begun and not arguments):
            return None
        if self.has_begun:
            return {"index": 0, "function": {"arguments": arguments}}
        self.has_begun = True
        function = {"name": self.name, "arguments": arguments}
        return {"index": 0, "id": self.id, "type": "function", "function": function}

    def _expression(self, text: str, finish_reason: str | None) -> str | None:
        """The next piece of `{"expression":"2+3"}` for a call of the calculator, `2+3`."""
        if not self.has_begun and not text and finish_reason != "tool_calls":  # with it, the call is empty
            return None
        opening = "" if self.has_begun else '{"expression":"'
        closing = "" if finish_reason in (None, "length") else '"}'
        return opening + json.dumps(text, ensure_ascii=False)[1:-1] + closing

    def _arguments(self, text: str) -> str | None:
        """The inner braces of `{"name":"f","arguments":{...}}`. The last character is held back: it may be the end."""
        self._text += text
        if not self.has_begun:
            head = re.match(r'\{"name":"([^"]*)","arguments":', self._text)
            if head is None:
                return None
            self.name = head[1]
            self._text = self._text[head.end() :]
        ready, self._text = self._text[:-1], self._text[-1:]
        return ready
