"""The child process in which chat templates render (chat_template.py starts it and talks to it).

A request is a line of JSON, and so is the reply:

    {"source", "fields", "marks"}    {"text"}, or {"error"} with the template's own complaint
    {"trial": [source, ...]}         the same, after conversations of every kind

Each request has a second of computing, and the process has 400 MB. Whatever takes more ends the process, and the parent
starts another one. The kernel sets both limits: they also end an operation in C, such as 9**9**9.

Source: the settings of transformers' `apply_chat_template` (the environment, its filters and its functions).
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_SECONDS = 1.0  # the longest conversations take about 0.1; a busy machine refuses nothing
MEMORY_BYTES = 400 << 20  # address space, including 30 MB of the interpreter
MAX_CHARACTERS = 1 << 24  # in a rendered conversation: a context of a million tokens has about 4 million

NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
QUESTION = {"role": "user", "content": "2+3?"}
REPLY = {"role": "assistant", "content": "<think>\nA sum.\n</think>\n\n5."}
FUNCTION = {"name": "weather", "description": "The weather of a city", "parameters": {"type": "object"}}
CALL = {"id": "000000000", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
# Conversations of every kind that the rest of the code renders.
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [QUESTION],
    [{"role": "system", "content": "Be brief."}, QUESTION, REPLY, QUESTION],
    [
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "weather", "tool_call_id": "000000000", "content": '{"sun": true}'},
        REPLY,
    ],
    [{"role": "user", "content": "A long text. " * 2000}, REPLY] * 10,
]


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the timer's signal ends the process
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            reply = json.dumps(answer(json.loads(line))).encode()
        except MemoryError:
            os._exit(1)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(reply + b"\n")
        sys.stdout.buffer.flush()


def answer(request: dict[str, Any]) -> dict[str, str]:
    """Raises MemoryError: when it takes too much."""
    try:
        if "trial" not in request:
            return {"text": render(request["source"], request["fields"], request["marks"])}
        for source in request["trial"]:
            compiled(source)
    except MemoryError:
        raise
    except Exception as error:  # a template can raise anything: 1 / 0, no such key
        return {"error": " ".join(str(error).split())[:300] or type(error).__name__}
    for source in request["trial"]:
        try_out(source)
    return {"text": ""}


def render(source: str, fields: dict[str, Any], marks: list[str]) -> str:
    """Raises whatever the template raises, and MemoryError: when the text is too long."""
    Generation.marks = (marks[0], marks[1])
    text = []
    characters = 0
    for piece in compiled(source).generate(fields):
        text.append(piece)
        characters += len(piece)
        if characters > MAX_CHARACTERS:
            raise MemoryError
    return "".join(text)


def try_out(source: str) -> None:
    """Render conversations of every kind. Complaints such as "roles must alternate" are harmless here: they come again
    at the first rendering that matters."""
    for messages in CONVERSATIONS:
        for tools in (None, [{"type": "function", "function": FUNCTION}]):
            for is_prompt in (True, False):
                fields = {**NAMES, "messages": messages, "tools": tools, "add_generation_prompt": is_prompt}
                answer({"source": source, "fields": {**fields, "documents": None}, "marks": ["", ""]})


@lru_cache(maxsize=16)
def compiled(source: str) -> Any:
    return environment().from_string(source)


# ---------------------------------------------------------------------- Jinja


class Generation(Extension):
    """{% generation %} ... {% endgeneration %} encloses what the assistant writes."""

    tags = {"generation"}
    marks: tuple[str, str] = ("", "")  # what is put around it in the present rendering

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_enclose"), [], [], body).set_lineno(line)

    def _enclose(self, caller: Callable[[], str]) -> str:
        begin, end = Generation.marks
        return f"{begin}{caller()}{end}"


def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys=False) -> str:
    """Jinja's own filter writes < and > as \\u003c and \\u003e, which models have not learned."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


@lru_cache(maxsize=1)
def environment() -> Any:
    """The environment of transformers."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


if __name__ == "__main__":
    main()
