"""Calls of a client's tools: how the model writes them, and how they become OpenAI's `tool_calls`.

Our models are trained with one tool, a calculator, whose calls are `python` parts (conversation.py). The client owns
that tool if it lists a tool `calculator` with the single parameter `expression`: then a call ends the reply and goes to
the client, instead of being answered here. Any other tool is called only if the client requires it: the schemas of the
tools then constrain the reply to `{"name":...,"arguments":...}` (grammar.py). Calls and results of earlier turns are
read as `python` and `python_output` parts, the only form of a call in the chat format.

Models of other families have learned to call any function, in the form of their chat template
(families/tool_calls.py). The template describes the tools to them and writes earlier calls and results. A required call
follows the schema, after the beginning of a call in the model's form.
"""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nanochat.families.tool_calls import PROBE_NAME, CallForm, CallReader, FunctionCall, new_id
from nanochat.ground.untrusted import json_of

CALCULATOR = "calculator"
NAMED_HEAD = r'\{"name": ?"([^"]*)", ?"(?:arguments|parameters)": ?(?=\S)'
# With one of these, a schema that lists no properties may still have some.
MORE_ARGUMENTS = ("allOf", "anyOf", "oneOf", "$ref", "patternProperties")

# The calls that a reply may contain. "none": no calls, only plain text. "own": calls of the calculator, answered by the
# server. "client": calls of the calculator, passed to the client. "calculator": the whole reply is such a call.
# "schema": the reply is a call by the tools' schemas. "family": text and calls in the form of another model family.
Calls = Literal["none", "own", "client", "calculator", "schema", "family"]


@dataclass(frozen=True)
class FamilyCalls:
    """How a model of another family writes the calls of one request."""

    form: CallForm
    tools: Mapping[str, dict[str, Any] | None]  # the functions that it may call: their parameters by name
    is_single: bool = False  # the client wants one call at most

    @property
    def required_name(self) -> str:
        """The name that comes before the JSON of a required call; empty where the JSON has it."""
        return next(iter(self.tools)) if self.form.names_first and len(self.tools) == 1 else ""

    @property
    def opening(self) -> str:
        """The beginning of a reply that must be a call, up to its JSON."""
        if self.form.names_first and not self.required_name:  # the older form, in which the model chooses the name
            return f"{self.form.mark}["
        return self.form.opening.replace(PROBE_NAME, self.required_name)

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of the JSON of a required call."""
        if not self.required_name:
            return call_schema(list(self.tools.items()), self.form.key)
        return _arguments_schema(self.tools[self.required_name], 0)


def is_calculator(name: str, parameters: dict[str, Any] | None) -> bool:
    properties = (parameters or {}).get("properties")
    return name == CALCULATOR and isinstance(properties, dict) and list(properties) == ["expression"]


def call_schema(tools: Sequence[tuple[str, dict[str, Any] | None]], key: str = "arguments") -> dict[str, Any]:
    """The schema of a call to one of the tools, from their names and parameters; `key` is the name of the arguments."""
    branches = []
    for number, (name, parameters) in enumerate(tools):
        properties = {"name": {"const": name}, key: _arguments_schema(parameters, number)}
        closed = {"required": ["name", key], "additionalProperties": False}
        branches.append({"type": "object", "properties": properties, **closed})
    return {"anyOf": branches}


def _arguments_schema(parameters: dict[str, Any] | None, number: int) -> dict[str, Any]:
    # A reference such as "#/$defs/City" is relative to the nearest "$id": each tool keeps its own definitions.
    arguments: dict[str, Any] = {"type": "object", **(parameters or {}), "$id": f"tool:{number}"}
    is_listed = "properties" in arguments or not parameters
    if arguments.get("properties") or (is_listed and not any(name in arguments for name in MORE_ARGUMENTS)):
        # A model that does not read the schema would add other arguments until the end of its reply.
        arguments.setdefault("additionalProperties", False)
    return arguments


def call_text(name: str, arguments: str) -> str:
    """An earlier call as the text of a `python` part; `arguments` is JSON, or a model's attempt at it."""
    if name == CALCULATOR:
        values = json_of(arguments)
        if isinstance(values, dict) and isinstance(values.get("expression"), str):
            return values["expression"]
    return f'{{"name":{json.dumps(name)},"arguments":{arguments}}}'


# A writer turns one reply, as it arrives, into text and fragments of OpenAI's `tool_calls`. Chunks of its `kind` have
# calls in them, or none have if it is "". `add` returns the further text and fragments; its `finish_reason` is set if
# the reply ends there.


class FamilyWriter:
    """The calls of other families. Each is one fragment: only a complete call is known to be one."""

    kind = "text"

    def __init__(self, family: FamilyCalls):
        self.has_begun = False
        self._reader = CallReader(family.form, family.tools, family.is_single)
        self._count = 0

    def add(self, text: str, finish_reason: str | None) -> tuple[str, list[dict[str, Any]]]:
        written = ""
        fragments = []
        for piece in self._reader.add(text, is_end=finish_reason is not None):
            if isinstance(piece, FunctionCall):
                function = {"name": piece.name, "arguments": piece.arguments_json()}
                call_id = piece.id or new_id()
                fragments.append({"index": self._count, "id": call_id, "type": "function", "function": function})
                self._count += 1
            else:
                written += piece
        self.has_begun = self._count > 0
        return written, fragments


class CallWriter:
    """The one call of a reply by our models, or of a reply that must be a call."""

    def __init__(self, calls: Calls, family: FamilyCalls | None = None):
        # Chunks of this kind are the call; "" without a call.
        self.kind = {"client": "python", "calculator": "python", "schema": "text"}.get(calls, "")
        self.id = f"call_{uuid.uuid4().hex}" if family is None else new_id()
        required = "" if family is None else family.required_name
        self.name = required or CALCULATOR
        self.has_begun = False
        self._has_name = not required  # the JSON has it
        self._text = ""  # not handed out yet

    def add(self, text: str, finish_reason: str | None) -> tuple[str, list[dict[str, Any]]]:
        arguments = self._arguments(text) if self.kind == "text" else self._expression(text, finish_reason)
        if arguments is None or (self.has_begun and not arguments):
            return "", []
        if self.has_begun:
            return "", [{"index": 0, "function": {"arguments": arguments}}]
        self.has_begun = True
        function = {"name": self.name, "arguments": arguments}
        return "", [{"index": 0, "id": self.id, "type": "function", "function": function}]

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
            # After a thought the reply has the beginning of a call in the model's form.
            head = re.search(NAMED_HEAD if self._has_name else r"(?=\{)", self._text)
            if head is None:
                return None
            self.name = head[1] if self._has_name else self.name
            self._text = self._text[head.end() :]
        held = int(self._has_name)
        ready, self._text = self._text[: len(self._text) - held], self._text[len(self._text) - held :]
        return ready
