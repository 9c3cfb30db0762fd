"""Thoughts and function calls in the replies of other model families.

A thought is between `<think>` and `</think>` at the beginning of a reply. Calls have one of four forms:

    Qwen, Hermes   I look it up.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>
    Llama 3        {"name": "weather", "parameters": {"city": "Paris"}}
    Mistral        [TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}, "id": "a1B2c3D4e"}]
    Qwen3-Coder    <tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>

Llama 3 may write `<|python_tag|>` before a call. Newer models of Mistral write `[TOOL_CALLS]weather[ARGS]{"city":
"Paris"}`.

Which form a model has is not looked up by its name: its chat template writes known calls, and the form that reads
exactly these calls back is the model's (`find_form`).
"""

import contextlib
import hashlib
import json
import os
import re
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from nanochat.families.chat_template import ChatTemplate, TemplateError
from nanochat.tokenizer import replace_surrogates

# The names of special tokens that belong to a thought or a call. Elsewhere a reply's text is without special tokens.
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
THOUGHT_BEGIN = "<think>"
THOUGHT_END = "</think>"
THOUGHT_SEPARATOR = "\n</think>\n\n"  # between a thought and the text, where a template does not say
CALL_ID = re.compile("[a-zA-Z0-9]{9}")  # Mistral's templates accept no other ids; other templates print none
PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True)
class FunctionCall:
    """A call that a model has written."""

    name: str
    arguments: dict[str, Any]
    id: str = ""  # the model's own, in Mistral's form

    def arguments_json(self) -> str:
        """The arguments as OpenAI's API has them.

        Raises ValueError, TypeError or RecursionError: when they are more than JSON has, such as NaN.
        """
        text = json.dumps(self.arguments, ensure_ascii=False, allow_nan=False)
        # Half of a surrogate pair is JSON only as an escape.
        return json.dumps(self.arguments) if replace_surrogates(text) != text else text


@dataclass(frozen=True)
class CallForm:
    """One family's form of a call."""

    mark: str  # a call begins with it; empty: a reply is a call if it begins with "{" or <|python_tag|>
    # From the white space before a call to its JSON. In some forms the name and the id of the call come here.
    head: re.Pattern[str]
    end: re.Pattern[str]  # what follows the arguments
    key: str = "arguments"  # the name of the arguments in the JSON
    is_xml: bool = False  # the arguments are not JSON: each is a text between marks
    # These follow from the template.
    opening: str = ""  # from the end of the prompt to the JSON of a call
    is_single: bool = False  # a reply has one call at most

    @property
    def names_first(self) -> bool:
        """Whether the name comes before the JSON, which has only the arguments."""
        return PROBE_NAME in self.opening


QWEN_END = re.compile(r"\s*</tool_call>")
XML_HEAD = r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>"
XML = CallForm("<tool_call>", re.compile(XML_HEAD), QWEN_END, is_xml=True)
QWEN = CallForm("<tool_call>", re.compile(r"\s*<tool_call>\s*"), QWEN_END)
LLAMA = CallForm("", re.compile(r"[\s;]*(?:<\|python_tag\|>)?\s*"), re.compile(""), "parameters")
LLAMA_BEGIN = re.compile(r"[\s;]*(?:\{|<\|python_tag\|>)")
MISTRAL_HEAD = r"\s*\[TOOL_CALLS\]\s*(?:(?P<name>[\w.-]+)(?:\[CALL_ID\](?P<id>\w*))?\[ARGS\]\s*|(?=[\[{]))"
MISTRAL = CallForm("[TOOL_CALLS]", re.compile(MISTRAL_HEAD), re.compile(""))


def new_id() -> str:
    return uuid.uuid4().hex[:9]


def template_id(call_id: str) -> str:
    """A client's id of a call in the form that every template accepts: ids of other servers are longer."""
    return call_id if CALL_ID.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]


# ---------------------------------------------------------------------- which form

PROBE_NAME = "look_up_weather"
PROBE_CALLS = [FunctionCall(PROBE_NAME, {"city": city, "days": [1, 2]}) for city in ("Paris", 'a "{" </tool_call>')]
PROBE_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}}
PROBE_TOOL = {
    "type": "function",
    "function": {"name": PROBE_NAME, "description": "The weather of a city", "parameters": PROBE_PARAMETERS},
}


def find_form(template: ChatTemplate, ends: Collection[str]) -> CallForm | None:
    """The form of the calls that a template writes; `ends` are the special tokens that end a reply.

    None: it does not describe tools to the model, or writes calls in none of the forms.
    """
    question = [{"role": "user", "content": "How is it there?"}]
    try:
        prompt = template.render(question, [PROBE_TOOL], add_generation_prompt=True).text
    except TemplateError:
        return None
    if PROBE_NAME not in prompt:
        return None
    for is_single in (False, True):  # Llama's templates refuse several calls in one reply
        expected = PROBE_CALLS[1:] if is_single else PROBE_CALLS
        functions = [{"name": call.name, "arguments": call.arguments} for call in expected]
        calls = [{"id": new_id(), "type": "function", "function": function} for function in functions]
        reply = {"role": "assistant", "content": "", "tool_calls": calls}
        try:
            whole = template.render([*question, reply], [PROBE_TOOL])
        except TemplateError:
            continue
        # A template may write a reply without the thought that its prompt has begun.
        begun = prompt.rstrip().removesuffix(THOUGHT_BEGIN) if opens_thought(prompt) else prompt
        start = len(os.path.commonprefix([begun, whole.text]))
        end = next((first for first, _, name in whole.specials if first >= start and name in ends), len(whole.text))
        text = whole.text[start:end]
        _, reply_text = ThoughtReader().add(text, is_end=True)
        for form in (QWEN, XML, LLAMA, MISTRAL):
            pieces = CallReader(form, {PROBE_NAME: PROBE_PARAMETERS}).add(reply_text, is_end=True)
            found = [replace(piece, id="") for piece in pieces if isinstance(piece, FunctionCall)]
            if found == expected:
                # Up to the arguments of the first call: `<tool_call>\n`, `[TOOL_CALLS] [`, `[TOOL_CALLS]weather[ARGS]`.
                arguments = "<parameter=" if form.is_xml else "{"
                return replace(form, opening=text[: text.index(arguments)], is_single=is_single)
    return None


def opens_thought(prompt: str) -> bool:
    """Whether a prompt ends within the thought of a reply, as the prompts of Qwen3's thinking models do."""
    return prompt.rstrip().endswith(THOUGHT_BEGIN)


# ---------------------------------------------------------------------- reading


class ThoughtReader:
    """Divides a reply into its thought and the text after it, as they arrive.

    The marks, and the white space around a thought, are in neither. With `in_thought` the prompt has begun the thought.
    """

    def __init__(self, in_thought: bool = False):
        self.place: Literal["beginning", "thought", "after thought", "text"] = "thought" if in_thought else "beginning"
        self._held = ""  # what is not handed out yet
        self._is_empty = True  # no part of the thought is handed out yet

    def add(self, text: str, is_end: bool = False) -> tuple[str, str]:
        """What can be handed out of the thought and of the text with a further piece of the reply."""
        self._held += text
        thought = ""
        if self.place == "beginning":
            start = self._held.lstrip()
            if start.startswith(THOUGHT_BEGIN):
                self.place = "thought"
                self._held = start.removeprefix(THOUGHT_BEGIN)
            elif is_end or not THOUGHT_BEGIN.startswith(start):
                self.place = "text"
        if self.place == "thought":
            self._held = self._held.lstrip() if self._is_empty else self._held
            before, mark, after = self._held.partition(THOUGHT_END)
            # White space and a part of the mark wait for what follows: at the end of the thought they are left out.
            thought = before[: len(before) - (0 if mark else _overlap(before, THOUGHT_END))].rstrip()
            self._held = after if mark else before[len(thought) :]
            self._is_empty = self._is_empty and not thought
            self.place = "after thought" if mark else "thought"
        if self.place == "after thought":
            self._held = self._held.lstrip()
            self.place = "text" if self._held else "after thought"
        if self.place != "text":
            return thought, ""
        text, self._held = self._held, ""
        return thought, text


class CallReader:
    """Divides a reply into its text and its calls. The text is handed out as it arrives, up to the mark of a call; what
    follows the mark is read when the reply is complete: clients run calls no sooner.

    What is not a whole call of one of the `tools` stays text: a call that is cut off, that is not JSON, or that calls
    another function. `tools` has their parameters by name, which give the arguments in XML their types. White space
    before a call is left out. With `is_single`, so are all calls after the first. A thought is not part of what is
    read: in it, a model weighs what it might call.
    """

    def __init__(self, form: CallForm, tools: Mapping[str, Any], is_single: bool = False):
        self.form = form
        self.tools = tools
        self.is_single = is_single or form.is_single
        self._held = ""  # text that is not handed out yet
        self._has_text = False  # text came before what is held

    def add(self, text: str, is_end: bool = False) -> list[str | FunctionCall]:
        """What can be handed out with a further piece of the reply, in order; at its end, everything."""
        self._held += text
        if is_end:
            return [piece for piece in self._read_all() if piece]
        end = self._begin(0)
        if end < 0:
            mark = self.form.mark or PYTHON_TAG
            end = len(self._held) - _overlap(self._held, mark)
        # White space before a call, or before what may become one, waits with it.
        ready = self._held[:end].rstrip()
        self._held = self._held[len(ready) :]
        self._has_text = self._has_text or bool(ready)
        return [ready] if ready else []

    def _begin(self, at: int) -> int:
        """Where the next call begins, as far as its mark says; -1: nowhere."""
        if self.form.mark:
            return self._held.find(self.form.mark, at)
        return at if not self._has_text and LLAMA_BEGIN.match(self._held, at) else -1

    def _read_all(self) -> list[str | FunctionCall]:
        """The rest of a reply that is complete."""
        pieces: list[str | FunctionCall] = []
        at = 0
        count = 0
        while (begin := self._begin(at)) >= 0:
            calls, end = self._read_call(begin)
            text = self._held[at : begin if calls else end]
            pieces.append(text.rstrip() if calls else text)
            pieces += calls[: max(0, 1 - count)] if self.is_single else calls
            count += len(calls)
            at = end
        rest = self._held[at:]
        if rest.strip() or not count:
            pieces.append(rest)
        return pieces

    def _read_call(self, begin: int) -> tuple[list[FunctionCall], int]:
        """The calls that begin here, and where they end; none, and where the text goes on."""
        content = None
        end = 0
        head = self.form.head.match(self._held, begin)
        if head is not None and self.form.is_xml:
            content, end = _read_xml(self._held, head.end(), self.tools.get(head["name"]))
        elif head is not None and self._held.startswith(("{", "["), head.end()):
            with contextlib.suppress(ValueError, RecursionError):
                content, end = json.JSONDecoder().raw_decode(self._held, head.end())
        if head is not None and head.groupdict().get("name") and content is not None:
            content = {**head.groupdict(), self.form.key: content}
        found = [self._call(one) for one in (content if isinstance(content, list) else [content])]
        calls = [call for call in found if call is not None]
        if calls and len(calls) == len(found):
            ending = self.form.end.match(self._held, end)
            return calls, ending.end() if ending else end
        # Without the end of a call in XML, no further call is looked for.
        is_over = not self.form.mark or (self.form.is_xml and self._held.find("</function>", begin) < 0)
        return [], len(self._held) if is_over else begin + len(self.form.mark)

    def _call(self, content: Any) -> FunctionCall | None:
        if not isinstance(content, dict):
            return None
        name = content.get("name")
        arguments = content.get(self.form.key, content.get("arguments", {}))
        if not isinstance(name, str) or name not in self.tools or not isinstance(arguments, dict):
            return None
        own_id = content.get("id")
        if not isinstance(own_id, str) or not CALL_ID.fullmatch(own_id):
            own_id = ""
        call = FunctionCall(name, arguments, own_id)
        try:
            call.arguments_json()
        except (ValueError, TypeError, RecursionError):
            return None
        return call


XML_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?")
# A value may contain its own end mark: the end has another parameter, or the end of the call, after it.
XML_VALUE_END = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))")
XML_END = re.compile(r"\s*</function>")
PYTHON_WORDS = {"True": True, "False": False, "None": None}  # templates in Jinja write these words


def _read_xml(text: str, at: int, parameters: Any) -> tuple[dict[str, Any] | None, int]:
    """The arguments of a call in XML, and where it ends; None where it does not."""
    root = parameters if isinstance(parameters, dict) else {}
    properties = root.get("properties")
    arguments = {}
    while begin := XML_PARAMETER.match(text, at):
        end = XML_VALUE_END.search(text, begin.end())
        if end is None:
            return None, at
        schema = properties.get(begin[1]) if isinstance(properties, dict) else None
        arguments[begin[1]] = _value(text[begin.end() : end.start()].removesuffix("\n"), _types(schema, root))
        at = end.end()
    ending = XML_END.match(text, at)
    return (None, at) if ending is None else (arguments, ending.end())


def _types(schema: Any, root: dict[str, Any]) -> set[str]:
    """The types that an argument's schema names, also in a union, or where it refers into the whole schema, `root`."""
    types: set[str] = set()
    waiting = [schema]
    seen: set[int] = set()  # a reference may lead back
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        named = part.get("type")
        types.update(map(str, named if isinstance(named, list) else [named]))
        for union in (part.get("anyOf"), part.get("oneOf"), part.get("allOf")):
            waiting += union if isinstance(union, list) else []
        found: Any = root
        for name in str(part.get("$ref")).removeprefix("#/").split("/"):
            found = found.get(name) if isinstance(found, dict) else None
        waiting.append(found)
    return types


def _value(text: str, types: set[str]) -> Any:
    """The value of an argument in XML: a text where its types allow one, otherwise JSON."""
    is_null = "null" in types and text in ("null", "None")
    if "string" in types and not types & {"array", "object"} and not is_null:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return PYTHON_WORDS.get(text, text)


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of a text may begin a mark."""
    sizes = range(min(len(text), len(mark) - 1), 0, -1)
    return next((size for size in sizes if mark.startswith(text[-size:])), 0)
