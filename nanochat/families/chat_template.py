"""Chat templates of other model families: Jinja programs that write a conversation as text, run as transformers does.

A template comes with a model, from strangers. Jinja's sandbox hides everything that is not data, but it does not bound
time and memory: a template may compare nested lists for ever without writing anything. So every template renders in a
child process that has a second of computing for each text and 400 MB (template_process.py), one for all templates of
this process. At loading it renders conversations of every kind, so that most hostile templates end there.

Text of messages never becomes a special token, although a template mixes both in one text: a special token's name in a
message gets an extra character that no text has, and loses it when the text is divided into tokens.
"""

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from nanochat.conversation import Settings, UnrenderableChat
from nanochat.tokenizer import replace_surrogates

THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")  # what templates call the thought of a reply
REPLY_SECONDS = 60.0  # for the child of a machine that is very busy; its own limit is a second of computing
QUESTION = {"role": "user", "content": "Hello"}  # a conversation to learn about a template
THOUGHTFUL = {"role": "assistant", "content": "<think>\nA greeting.\n</think>\n\nHi."}
# Unicode has set aside characters that no text contains, for uses like ours.
NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]

Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]  # (start, end) in a text
Special = tuple[int, int, str]  # (start, end, name) of a special token in a text


class TemplateError(UnrenderableChat):
    """A template cannot render a conversation, or refuses to."""


@dataclass(frozen=True)
class RenderedText:
    """A conversation as text."""

    text: str
    specials: list[Special]  # in order; the rest is plain text
    marked: list[Span]  # the spans inside {% generation %}


class ChatTemplate:
    """The templates of a tokenizer. `names` are the names of its bos_token, eos_token and so on, `special` the names of
    all special tokens, and `file` is where the templates were read, for messages.

    Raises TemplateError: when one of them is not Jinja.
    """

    def __init__(self, sources: Mapping[str, str], names: Mapping[str, str], special: Iterable[str], file: str = ""):
        self.sources = dict(sources)
        self.names = dict(names)
        self.file = file
        self._special = sorted(special, key=len, reverse=True)  # the longest match counts
        self._begun = {name[:length] for name in self._special for length in range(1, len(name))}
        self._longest = max(map(len, self._begun), default=0)
        # The first characters come before the names: templates of Mistral have a thousand names.
        firsts = "".join(re.escape(first) for first in sorted({name[0] for name in self._special}))
        self._names = f"(?=[{firsts}])(?:{'|'.join(map(re.escape, self._special))})" if firsts else "(?!)"
        _renderer(os.getpid()).request({"trial": list(self.sources.values())}, file)

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTemplate, (self.sources, self.names, self._special, self.file)

    def render(
        self,
        messages: Messages,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        settings: Settings | None = None,
    ) -> RenderedText:
        """The text of a conversation; with `add_generation_prompt` it ends where the reply begins.

        `settings` are variables of the template, such as enable_thinking of Qwen3.

        Raises TemplateError: with the template's complaint, or because its text is too long or takes too long.
        """
        if self.drops_thoughts:
            messages = without_dropped_thoughts(messages)
        return self._render(messages, tools, add_generation_prompt, settings)

    def _render(self, messages: Messages, tools: Any, add_generation_prompt: bool, settings: Any) -> RenderedText:
        # Three characters for our marks, which are in none of the texts.
        everything = json.dumps(
            [messages, tools, settings, list(self.sources.values())], ensure_ascii=False, default=str
        )
        unused = [character for character in NONCHARACTERS if character not in everything]
        if len(unused) < 3:
            raise TemplateError("the messages contain Unicode's noncharacters U+FDD0 to U+FDEF: leave them out")
        guard = unused[2]
        fields = {
            **self._guarded(settings or {}, guard),
            **self.names,
            "messages": self._guarded(messages, guard),
            "tools": self._guarded(tools, guard) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        request = {"source": self.source(tools), "fields": fields, "marks": unused[:2]}
        return self._divided(_renderer(os.getpid()).request(request, self.file), unused)

    def is_special(self, name: str) -> bool:
        return name in self._special

    def source(self, tools: Sequence[Any] | None) -> str:
        """The template of a conversation with these tools."""
        return self.sources["tool_use" if tools and "tool_use" in self.sources else "default"]

    def has_marks(self, tools: Sequence[Any] | None) -> bool:
        """Whether {% generation %} marks the replies; otherwise renderings are compared (reply_spans.py)."""
        return re.search(r"{%-?\s*generation\s*-?%}", self.source(tools)) is not None

    @cached_property
    def reply_opening(self) -> str:
        """The end of a prompt, such as `<|im_start|>assistant` and a line end; empty if a prompt adds nothing to the
        conversation."""
        short, long = (self._probe(QUESTION, add_generation_prompt=opens) for opens in (False, True))
        return long.removeprefix(short) if long.startswith(short) else ""

    def _probe(self, *messages: Mapping[str, Any], add_generation_prompt: bool = False) -> str:
        """The text of a conversation; empty where the template refuses it."""
        try:
            return self.render(messages, add_generation_prompt=add_generation_prompt).text
        except TemplateError:
            return ""

    @cached_property
    def thought_field(self) -> str | None:
        """The field of a reply that holds its thought; None where the template reads thoughts only in the content."""
        replies = {field: {"role": "assistant", "content": "Hi.", field: "A greeting."} for field in THOUGHT_FIELDS}
        return next((field for field in replies if "A greeting." in self._probe(QUESTION, replies[field])), None)

    @cached_property
    def has_thoughts(self) -> bool:
        """Whether it knows thoughts: it writes them, or divides a reply at the end of one."""
        return any("</think>" in source for source in self.sources.values())

    @cached_property
    def thought_end(self) -> str:
        """What it writes between the thought of a reply and its text: </think> and line ends. Empty: no thoughts."""
        reply = THOUGHTFUL
        if self.thought_field is not None:
            reply = {"role": "assistant", "content": "Hi.", self.thought_field: "A greeting."}
        found = re.search(r"<think>\s*A greeting\.(\s*</think>\s*)Hi\.", self._probe(QUESTION, reply))
        return found[1] if found and self.has_thoughts else ""

    @cached_property
    def drops_thoughts(self) -> bool:
        """Whether it leaves out the thoughts of replies that are not the last, where they are in the content."""
        try:
            return "A greeting." not in self._render([QUESTION, THOUGHTFUL, QUESTION], None, False, None).text
        except TemplateError:
            return False

    def _guarded(self, value: Any, guard: str) -> Any:
        """A copy of the messages in which no text contains a special token's name, or ends with the begin of one."""
        if isinstance(value, str):
            return self._guarded_text(value, guard)
        if isinstance(value, Mapping):
            return {self._guarded(key, guard): self._guarded(one, guard) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self._guarded(one, guard) for one in value]
        return value

    def _guarded_text(self, text: str, guard: str) -> str:
        # With "@" as the guard "a <|im_end|>" becomes "a <@|im_end|>". Where a message ends with "<|im_", the next one
        # could begin with "end|>".
        text = replace_surrogates(text)
        for length in range(1, min(len(text), self._longest) + 1):
            if text[-length:] in self._begun:
                first = len(text) - length + 1
                text = text[:first] + guard + text[first:]
                break
        # Names can overlap, so a match is the one character.
        return re.sub(f"(?={self._names})(?s:.)", lambda match: match[0] + guard, text)

    def _divided(self, text: str, ours: Sequence[str]) -> RenderedText:
        """The text without our marks, and where its special tokens are: guarded names are none."""
        begin, end, guard, *_ = ours
        specials: list[Special] = []
        marked: list[Span] = []
        pieces = []
        length = 0  # length of the text so far, without our own characters
        opened = 0
        for place, piece in enumerate(re.split(f"([{begin}{end}{guard}]|{self._names})", text)):
            if piece == begin:
                opened = length
            elif piece == end:
                marked.append((opened, length))
            elif piece != guard:
                if place % 2:  # a separator
                    specials.append((length, length + len(piece), piece))
                pieces.append(piece)
                length += len(piece)
        return RenderedText("".join(pieces), specials, marked)


def without_dropped_thoughts(messages: Messages) -> list[Mapping[str, Any]]:
    """The messages, without the thoughts of the replies before the last question.

    R1's template leaves these out and the line ends behind them not: a client that kept only the replies has none.
    """
    last = max((number for number, message in enumerate(messages) if message["role"] == "user"), default=0)
    kept = list(messages)
    for number, message in enumerate(messages[:last]):
        content = message.get("content")
        if message["role"] == "assistant" and isinstance(content, str) and "</think>" in content:
            kept[number] = {**message, "content": content.rpartition("</think>")[2].lstrip()}
    return kept


# ---------------------------------------------------------------------- the child process


class _Renderer:
    """The child process of this one, and the socket to it. It starts at the first request, and again after a template
    has ended it; threads take turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._line = socket.socket()

    def request(self, content: Mapping[str, Any], file: str) -> str:
        """The text of the reply (template_process.py). `file` is where the template was read.

        Raises TemplateError: with the template's own complaint, or when it needs more than the limits.
        """
        where = f" in {file}" if file else ""
        # Values that JSON does not have, such as dates of a data set, become texts.
        line = json.dumps(content, default=str).encode() + b"\n"
        with self._lock:
            reply = self._exchange(line)
        if not reply.endswith(b"\n"):
            raise TemplateError(f"the chat template{where} fails: it takes more work than any conversation needs")
        answer = json.loads(reply)
        if "error" in answer:
            raise TemplateError(f"the chat template{where} fails: {answer['error']}")
        return answer["text"]

    def _exchange(self, line: bytes) -> bytes:
        """The reply; without a line end where the process has ended."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        reply = b""
        try:
            self._line.sendall(line)
            with self._line.makefile("rb") as file:
                reply = file.readline()
        except OSError:  # a timeout among them
            return b""
        finally:  # an interrupted exchange would leave its reply to the next request
            if not reply.endswith(b"\n"):
                self._end()
        return reply

    def _start(self) -> None:
        if importlib.util.find_spec("jinja2") is None:
            raise ModuleNotFoundError("No module named 'jinja2'", name="jinja2")
        package_folder = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [package_folder, os.environ.get("PYTHONPATH")]))
        self._line.close()
        self._line, theirs = socket.socketpair()
        self._line.settimeout(REPLY_SECONDS)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "nanochat.families.template_process"],
                stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.DEVNULL,
                start_new_session=True, env={**os.environ, "PYTHONPATH": path},
            )  # fmt: skip

    def _end(self) -> None:
        self._line.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@lru_cache(maxsize=1)
def _renderer(process_id: int) -> _Renderer:
    """The one of this process: in a process that was forked, the child process belongs to the other one."""
    return _Renderer()
