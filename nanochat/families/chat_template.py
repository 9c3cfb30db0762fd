"""Chat templates of other model families: Jinja programs that write a conversation as text, run as transformers does.

A template comes with a model, from strangers. Jinja's sandbox hides everything that is not data, but it does not bound
time and memory. Two limits do:

- At loading, `try_out` renders an unknown template in a child process that has a second and 400 MB: short and long
  conversations, with and without tools. A template that loops for ever or doubles a text again and again ends there.
- At rendering, a text longer than any conversation, or one that takes long to write, is an error.

Not covered: a template that looks harmless in the trial and then, for the messages of one conversation, computes for
ever without writing anything, or makes one huge text in a single operation. Rendering runs in the process that serves
or trains, many times a second, so nothing watches it from outside.

Text of messages never becomes a special token, although a template mixes both in one text: a special token's name in a
message gets an extra character that no text has, and loses it when the text is divided into tokens.

Source: the settings of transformers' `apply_chat_template` (the environment, its filters and its functions).
"""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from nanochat.conversation import Settings, UnrenderableChat
from nanochat.tokenizer import replace_surrogates

MAX_CHARACTERS = 1 << 24  # in a rendered conversation: a context of a million tokens has about 4 million
MAX_SECONDS = 10.0  # to write it; the longest conversations take about 0.1
TRIAL_SECONDS = 60.0  # for the child of a machine that is very busy; its own limit is a second of computing
# Unicode has set aside characters that no text contains, for uses like ours.
NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]

Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]  # (start, end) in a text
Special = tuple[int, int, str]  # (start, end, name) of a special token in a text


class TemplateError(UnrenderableChat):
    """A template cannot render a conversation, or refuses to."""


class TooMuchWork(TemplateError):
    """A text is too long, or takes too long to write."""

    def __init__(self) -> None:
        super().__init__("it takes more work than any conversation needs")


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
        self._compiled: dict[str, Any] = {}
        # Turns are marked by {% generation %}; otherwise they are found by comparing renderings (`learned`).
        self.has_marks = re.search(r"{%-?\s*generation\s*-?%}", self.sources["default"]) is not None
        for name in self.sources:
            self._compile(name)

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
        # Three characters for our marks, which are in none of the texts.
        everything = json.dumps(
            [messages, tools, settings, list(self.sources.values())], ensure_ascii=False, default=str
        )
        unused = [character for character in NONCHARACTERS if character not in everything]
        if len(unused) < 3:
            raise TemplateError("the messages contain Unicode's noncharacters U+FDD0 to U+FDEF: leave them out")
        state.marks = (unused[0], unused[1])
        guard = unused[2]
        source = "tool_use" if tools and "tool_use" in self.sources else "default"
        template = self._compile(source)
        fields = {
            **self._guarded(settings or {}, guard),
            **self.names,
            "messages": self._guarded(messages, guard),
            "tools": self._guarded(tools, guard) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        with _complaints(self.file):
            text = _written(template.generate(fields))
        return self._divided(text, guard)

    @cached_property
    def reply_opening(self) -> str:
        """The end of a prompt, such as `<|im_start|>assistant` and a line end; empty if a prompt adds nothing to the
        conversation."""
        question = [{"role": "user", "content": "Hello"}]
        try:
            text = self.render(question).text
            prompt = self.render(question, add_generation_prompt=True).text
        except TemplateError:
            return ""
        return prompt.removeprefix(text) if prompt.startswith(text) else ""

    def learned(
        self, whole: RenderedText, messages: Messages, tools: Sequence[Any] | None, ends: Collection[str]
    ) -> list[Span | None]:
        """The model's text in each assistant's message of the rendered conversation: from the beginning of the reply to
        its end, one of the special tokens `ends`. None if the template has no such place.
        """
        replies = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if self.has_marks and len(whole.marked) == len(replies):
            return list(whole.marked)
        # Without marks a reply is the part of its turn that the prompt before it lacks:
        #
        #     messages[:1] and the prompt     <|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n
        #     messages[:2]                    <|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n5.<|im_end|>\n
        #     learned                                                                              5.<|im_end|>
        #
        # That counts only where the whole conversation begins with it. Qwen3's template drops the thoughts of earlier
        # replies: there the model would learn from a text to which it never replies.
        spans: list[Span | None] = []
        for number in replies:
            try:
                prompt = self.render(messages[:number], tools, add_generation_prompt=True).text
                turn = self.render(messages[: number + 1], tools)
            except TemplateError:  # it refuses a part of this conversation
                spans.append(None)
                continue
            start = len(prompt)
            end = next((end for first, end, name in turn.specials if first >= start and name in ends), len(turn.text))
            is_exact = turn.text.startswith(prompt) and whole.text.startswith(turn.text[:end])
            spans.append((start, end) if is_exact else None)
        return spans

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

    def _divided(self, text: str, guard: str) -> RenderedText:
        """The text without our marks, and where its special tokens are: guarded names are none."""
        begin, end = state.marks
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

    def _compile(self, name: str) -> Any:
        if name not in self._compiled:
            environment = self._environment
            with _complaints(self.file):
                self._compiled[name] = environment.from_string(self.sources[name])
        return self._compiled[name]

    @cached_property
    def _environment(self) -> Any:
        return _environment()


# ---------------------------------------------------------------------- limits


class _State(threading.local):
    """The rendering on this thread."""

    marks: tuple[str, str] = ("", "")  # around the text inside {% generation %}


state = _State()


class _complaints:
    """One line for every error of a template."""

    def __init__(self, file: str):
        self.where = f" in {file}" if file else ""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception):  # a template can raise anything: 1 / 0, no such key, memory
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise TemplateError(f"the chat template{self.where} fails: {reason}") from error


def _written(pieces: Iterable[str]) -> str:
    """The text of a template, which arrives in pieces. Raises TooMuchWork: when it is too long, or takes too long."""
    began = time.monotonic()
    text = []
    characters = 0
    for piece in pieces:
        text.append(piece)
        characters += len(piece)
        if characters > MAX_CHARACTERS or time.monotonic() - began > MAX_SECONDS:
            raise TooMuchWork
    return "".join(text)


def try_out(sources: Mapping[str, str], file: str = "") -> None:
    """Render unknown templates once in a child process with limits (template_trial.py), which takes 0.2 seconds.

    Raises TemplateError: when they need more than a second or 400 MB. Other complaints wait for the first rendering.
    """
    package_folder = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package_folder, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "nanochat.families.template_trial"]
    where = f" in {file}" if file else ""
    try:
        done = subprocess.run(
            command, input=json.dumps(dict(sources)).encode(), capture_output=True, timeout=TRIAL_SECONDS, check=False,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise TemplateError(f"the chat template{where} fails: its trial did not end") from error
    if done.returncode:
        raise TemplateError(f"the chat template{where} fails: {TooMuchWork()}")


# ---------------------------------------------------------------------- Jinja


def _environment() -> Any:
    """The environment of transformers."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %} encloses the assistant's text."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_enclose"), [], [], body).set_lineno(line)

        def _enclose(self, caller: Callable[[], str]) -> str:
            begin, end = state.marks
            return f"{begin}{caller()}{end}"

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys=False):
        # Jinja's own filter writes < and > as \u003c and \u003e, which models have not learned.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
