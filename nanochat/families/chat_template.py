"""Chat templates of other model families: Jinja programs that write a conversation as text, run as transformers does.

A template comes with a model, from strangers. It runs in Jinja's sandbox, which hides what is not data, and here with a
budget of work on top: a template that loops for ever, or doubles a text again and again, ends in one line.

What is in the messages never becomes a special token, although a template mixes both in one text: a special token's
name in a message gets a character into it that no text has, and loses it when the text is divided into tokens.

Source: the settings of transformers' `apply_chat_template` (the environment, its filters and its functions).
"""

import json
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, wraps
from typing import Any

from nanochat.cli import UserError
from nanochat.tokenizer import replace_surrogates

# Operations that a template may use for one conversation: a second, or six where all are calls. Of a text 64 characters
# count as one.
MAX_WORK = 1_000_000
CHARACTERS_OF_WORK = 64
MAX_NUMBER = 100_000  # as an argument: `x.ljust(10**10)` is one operation
MAX_PRODUCT = 1 << 26  # of the sizes of two arguments: `x.replace("a", x)` is one operation, too
MAX_BITS = 256  # of a number
WIDE = re.compile(r"\d{5}|\{[^{}]*:[^{}]*\{")  # in a text that is formatted
# Filters that make a long text of a short one, or search texts with regular expressions.
LEFT_OUT = ("center", "format", "urlize", "wordwrap", "striptags", "pprint", "random")
# Unicode has set aside characters that no text contains, for uses like ours.
NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


Messages = Sequence[Mapping[str, Any]]
Settings = Mapping[str, Any]
Span = tuple[int, int]  # (start, end) in a text
Special = tuple[int, int, str]  # (start, end, name) of a special token in a text


class TemplateError(UserError):
    """A template cannot render a conversation, or refuses to."""


@dataclass(frozen=True)
class RenderedText:
    """A conversation as text."""

    text: str
    specials: list[Special]  # in order; the rest is plain text
    marked: list[Span]  # what {% generation %} encloses


class ChatTemplate:
    """The templates of a tokenizer; `names` are those of its bos_token, eos_token and so on, `special` of all.
    `file`: where the templates were read, for messages.

    Raises TemplateError: when one of them is no Jinja.
    """

    def __init__(self, sources: Mapping[str, str], names: Mapping[str, str], special: Iterable[str], file: str = ""):
        self.sources = dict(sources)
        self.names = dict(names)
        self.file = file
        self._special = sorted(special, key=len, reverse=True)  # the longest match counts
        self._begun = {name[:length] for name in self._special for length in range(1, len(name))}
        self._longest = max(map(len, self._begun), default=0)
        # The first characters come before the names: templates of Mistral's have a thousand names.
        firsts = "".join(re.escape(first) for first in sorted({name[0] for name in self._special}))
        self._names = f"(?=[{firsts}])(?:{'|'.join(map(re.escape, self._special))})" if firsts else "(?!)"
        self._compiled: dict[str, Any] = {}
        # Turns are marked by {% generation %}; otherwise they are found by comparing renderings (conversation.py).
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

        `settings` are variables of the template's own, such as enable_thinking of Qwen3's.

        Raises TemplateError: with the template's own complaint, or because it takes too long.
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
            text = template.render(fields)
        return self._divided(text, guard)

    @cached_property
    def reply_opening(self) -> str:
        """What a prompt ends with, such as `<|im_start|>assistant` and a line end; empty where it has nothing more than
        the conversation."""
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
        """Of each assistant's message in the rendered conversation, what the model writes: from where the reply begins
        to its end, one of the special tokens `ends`. None where the template leaves no such place.
        """
        replies = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if self.has_marks and len(whole.marked) == len(replies):
            return list(whole.marked)
        # Without marks a reply is what its turn has more than the prompt before it:
        #
        #     messages[:1] and the prompt     <|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n
        #     messages[:2]                    <|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n5.<|im_end|>\n
        #     learned                                                                              5.<|im_end|>
        #
        # That counts only where the whole conversation begins with it. Qwen3's template leaves the thoughts of earlier
        # replies out: there the model would learn from a text to which it never replies.
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
        length = 0  # of the text so far, without any of our characters
        opened = 0
        for place, piece in enumerate(re.split(f"([{begin}{end}{guard}]|{self._names})", text)):
            if piece == begin:
                opened = length
            elif piece == end:
                marked.append((opened, length))
            elif piece != guard:
                if place % 2:  # what the text is split at
                    specials.append((length, length + len(piece), piece))
                pieces.append(piece)
                length += len(piece)
        return RenderedText("".join(pieces), specials, marked)

    def _compile(self, name: str) -> Any:
        if name not in self._compiled:
            with _complaints(self.file):
                self._compiled[name] = self._environment.from_string(self.sources[name])
        return self._compiled[name]

    @cached_property
    def _environment(self) -> Any:
        return _environment()


# ---------------------------------------------------------------------- the budget


class _State(threading.local):
    """Of the rendering on this thread."""

    work = 0
    marks: tuple[str, str] = ("", "")  # around what {% generation %} encloses


state = _State()


class _complaints:
    """One line for whatever a template raises, and a new budget."""

    def __init__(self, file: str):
        self.where = f" in {file}" if file else ""

    def __enter__(self) -> None:
        state.work = 0

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception):  # a template can raise anything: 1 / 0, no such key, memory
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise TemplateError(f"the chat template{self.where} fails: {reason}") from error


def _spend(work: int) -> None:
    state.work += work
    if state.work > MAX_WORK:
        raise TemplateError("it takes more work than any conversation needs")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | dict | range) else 0


def _spend_on(value: Any) -> Any:
    """Pay for a value; returns it."""
    size = _size(value)
    _spend(1 + (size // CHARACTERS_OF_WORK if isinstance(value, str) else size))
    return value


def _check(arguments: Iterable[Any]) -> None:
    """Refuse what is a single operation, and could fill the memory."""
    number = 1
    sizes = [1, 1]
    for argument in arguments:
        if isinstance(argument, int):
            number = max(number, abs(argument))
        sizes.append(_size(argument))
    if number > MAX_NUMBER:
        raise TemplateError(f"the number {str(number)[:20]} is too large")
    *_, second, largest = sorted(sizes)
    if max(second, number) * largest > MAX_PRODUCT:
        raise TemplateError("it takes more work than any conversation needs")


def _listed(value: Any) -> Any:
    """A generator as the list of its items: what joins them must know how many they are."""
    return list(_counted(value)) if isinstance(value, Iterator) else value


def _paid(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is checked and paid for."""

    @wraps(function)  # Jinja reads the function's attributes
    def paid(*arguments: Any, **named: Any) -> Any:
        arguments = tuple(map(_listed, arguments))
        _check([*arguments, *named.values()])
        return _spend_on(function(*arguments, **named))

    return paid


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    """The items of a loop; each is paid for."""
    for item in items:
        _spend(1)
        yield item


# ---------------------------------------------------------------------- Jinja


def _environment() -> Any:
    """The environment of transformers, whose templates have the budget."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.visitor import NodeTransformer

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %} encloses what the assistant writes."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_enclose"), [], [], body).set_lineno(line)

        def _enclose(self, caller: Callable[[], str]) -> str:
            begin, end = state.marks
            return f"{begin}{caller()}{end}"

    class PaidOperations(NodeTransformer):
        """What is neither a call nor an operator is paid for by a filter around it."""

        def visit_For(self, node: Any) -> Any:
            node.iter = nodes.Filter(node.iter, "_counted", [], [], None, None, lineno=node.lineno)
            return self.generic_visit(node)

        def visit_Output(self, node: Any) -> Any:
            node = self.generic_visit(node)
            node.nodes = [one if isinstance(one, nodes.TemplateData) else pay(one) for one in node.nodes]
            return node

        def visit_Concat(self, node: Any) -> Any:
            return pay(self.generic_visit(node))

    def pay(node: Any) -> Any:
        return nodes.Filter(node, "_spend_on", [], [], None, None, lineno=node.lineno)

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(["+", "*", "**", "%"])

        def _parse(self, source: str, name: str | None, filename: str | None) -> Any:
            return PaidOperations().visit(super()._parse(source, name, filename))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "*" and not (isinstance(left, int) and isinstance(right, int)):
                _check([left, right])
            if operator == "**" and isinstance(right, int) and right > 64:
                raise TemplateError(f"the number {str(right)[:20]} is too large")
            if operator == "%" and isinstance(left, str):
                raise TemplateError("a text cannot be formatted by %")
            result = super().call_binop(context, operator, left, right)
            if isinstance(result, int) and result.bit_length() > MAX_BITS:
                raise TemplateError("a number is too large")
            return _spend_on(result)

        def call(self, context: Any, function: Any, *arguments: Any, **named: Any) -> Any:  # pyright: ignore
            owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)  # Jinja wraps str.format
            if isinstance(owner, str):
                arguments = tuple(map(_listed, arguments))
            _check([owner, *arguments, *named.values()])
            # A width, or one that is put together from arguments: "{0:{1}{1}}".
            if isinstance(owner, str) and function.__name__.startswith("format") and WIDE.search(owner):
                raise TemplateError("a text is too wide")
            return _spend_on(super().call(context, function, *arguments, **named))

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys=False):
        # Jinja's own filter writes < and > as \u003c and \u003e, which models have not learned.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    # Without the optimizer, which would compute constants before there is a budget.
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"], optimized=False
    )
    environment.filters["tojson"] = tojson
    environment.filters = {
        name: _paid(function) for name, function in environment.filters.items() if name not in LEFT_OUT
    }
    environment.filters |= {"_counted": _counted, "_spend_on": _spend_on}
    del environment.globals["lipsum"]
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
