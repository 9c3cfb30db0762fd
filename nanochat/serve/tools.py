"""Calls of a client's tools: how the model writes them, and how they become OpenAI's `tool_calls`.

The models are trained with one tool, a calculator, whose calls are `python` parts (conversation.py). The client owns
that tool if it lists one by the name `calculator` with the single parameter `expression`: then a call ends the reply
and goes to the client, instead of being answered here. Any other tool is called only when the client requires it: the
reply is then constrained to `{"name":...,"arguments":...}` by the schemas of the tools (grammar.py). Calls and results
of earlier turns are read as `python` and `python_output` parts, the only form of a call that the chat format has.
"""

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any, Literal

CALCULATOR = "calculator"

# What calls a reply may contain. "own": the calculator's, answered by the server. "client": the calculator's, handed to
# the client. "calculator": it is such a call from its first token on. "schema": it is a call by the tools' schemas.
Calls = Literal["own", "client", "calculator", "schema"]


def is_calculator(name: str, parameters: dict[str, Any] | None) -> bool:
    properties = (parameters or {}).get("properties")
    return name == CALCULATOR and isinstance(properties, dict) and list(properties) == ["expression"]


def call_schema(tools: Sequence[tuple[str, dict[str, Any] | None]]) -> dict[str, Any]:
    """The schema of a call of one of the tools, from names and parameters."""
    branches = []
    definitions: dict[str, Any] = {}
    for number, (name, parameters) in enumerate(tools):
        arguments: dict[str, Any] = dict(parameters or {"type": "object"})
        arguments.setdefault("type", "object")
        if arguments.get("properties"):
            # A model that does not read the schema would go on with arguments of its own, to the end of its reply.
            arguments.setdefault("additionalProperties", False)
        # "#/$defs/City" is relative to the whole schema, and two tools may each have a City.
        own = arguments.pop("$defs", {})
        arguments = _moved(arguments, number)
        for key, value in own.items() if isinstance(own, dict) else ():
            definitions[f"{number}.{key}"] = _moved(value, number)
        branches.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": arguments},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return {"anyOf": branches, "$defs": definitions}


def _moved(value: Any, number: int) -> Any:
    """A schema whose references lead to the definitions of tool `number`."""
    if isinstance(value, list):
        return [_moved(item, number) for item in value]
    if not isinstance(value, dict):
        return value
    moved = {key: _moved(item, number) for key, item in value.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/$defs/"):
        moved["$ref"] = f"#/$defs/{number}.{reference.removeprefix('#/$defs/')}"
    return moved


def call_text(name: str, arguments: str) -> str:
    """An earlier call as the text of a `python` part; `arguments` is JSON, or what a model wrote in its place."""
    if name == CALCULATOR:
        try:
            values = json.loads(arguments)
        except (ValueError, RecursionError):
            values = None
        if isinstance(values, dict) and isinstance(values.get("expression"), str):
            return values["expression"]
    return f'{{"name":{json.dumps(name)},"arguments":{arguments}}}'


class CallWriter:
    """One call of a reply, from the text as it arrives to the fragments of OpenAI's `tool_calls`."""

    def __init__(self, calls: Calls):
        self._is_expression = calls != "schema"
        self.id = f"call_{uuid.uuid4().hex}"
        self.name = CALCULATOR if self._is_expression else ""
        self._text = ""  # not handed out yet
        self._begun = False

    def add(self, text: str, finish_reason: str | None) -> dict[str, Any] | None:
        """The next fragment; None: there is nothing yet. `finish_reason` is that of the reply, where it ends here."""
        arguments = self._expression(text) if self._is_expression else self._arguments(text)
        if finish_reason is not None and self._is_expression and finish_reason != "length":
            arguments += '"}'
        if finish_reason == "length" and not self._is_expression and self.name:
            arguments += self._text  # it was cut off: what was held back is not the end of the call
        if not arguments and (self._begun or not self.name):
            return None
        fragment: dict[str, Any] = {"index": 0, "function": {"arguments": arguments}}
        if not self._begun:
            self._begun = True
            function = {"name": self.name, "arguments": arguments}
            fragment = {"index": 0, "id": self.id, "type": "function", "function": function}
        return fragment

    def _expression(self, text: str) -> str:
        written = json.dumps(text, ensure_ascii=False)[1:-1]
        return written if self._begun else '{"expression":"' + written

    def _arguments(self, text: str) -> str:
        """Of `{"name":"f","arguments":{...}}` the inner braces. The last character is held back: it may be the end."""
        self._text += text
        if not self.name:
            head = re.match(r'\{"name":("[^"]*"),"arguments":', self._text)
            if head is None:
                return ""
            self.name = json.loads(head[1])
            self._text = self._text[head.end() :]
        ready, self._text = self._text[:-1], self._text[-1:]
        return ready
