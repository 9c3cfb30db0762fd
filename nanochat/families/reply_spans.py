"""What a model learns of a conversation: each reply behind exactly the prompt that serving renders before it.

A template writes a whole conversation as one text. A reply in it is what the model would write after its prompt, up to
and with the token that ends its turn. But many templates write earlier turns in another way than the last one: Qwen3
writes an empty thought into the last reply only and drops the thoughts of earlier ones, the prompt of R1 opens a
thought that no written reply has, and Mistral moves the system message into the last question. A model that learned a
reply there would learn it where it is never asked. So:

    the whole text begins with the prompt and the reply     it is learned there, with all other such replies
    it does not                                             the reply is learned in another text, see `reply`

What of a reply is learned, its template may say itself, by {% generation %}: then exactly what it marks. A reply of
which the template drops a part, such as its thoughts, is not learned: the model would learn to reply without it.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from nanochat.conversation import Settings
from nanochat.families.chat_template import THOUGHT_FIELDS, ChatTemplate, Messages, RenderedText, Span, TemplateError

# Characters of the private planes 15 and 16, which no text has in practice: leaf number n is between the n-th of each.
BEGINS = 0xF0000
ENDS = 0x100000
MAX_LEAVES = 0xFFFD
MARK = re.compile("[\U000f0000-\U0010ffff]")
THOUGHT = re.compile(r"\s*<think>(.*?)</think>\n*", re.DOTALL)  # at the beginning of a reply
THOUGHT_TAG = re.compile("(</?think>)")  # templates divide a reply there
OPENED_THOUGHT = re.compile(r"<think>\s*\Z")  # at the end of a prompt
CLOSED = "</think>"
TEXT_FIELDS = ("content", *THOUGHT_FIELDS)


@dataclass(frozen=True)
class Text:
    """A text that a model reads, and what it learns of it."""

    rendered: RenderedText
    prompt: RenderedText  # what serving renders before the reply; `rendered` begins with it
    spans: list[Span]  # what is learned of the reply


@dataclass(frozen=True)
class Conversation:
    """A conversation, and its rendering `whole`; `ends` are the special tokens that end a reply."""

    template: ChatTemplate
    whole: RenderedText
    messages: Messages
    tools: Sequence[Any] | None
    ends: Collection[str]
    settings: Settings | None = None  # variables of the template, as a client sets them

    @cached_property
    def marked(self) -> dict[int, list[Span]] | None:
        """What the template marks of each reply; None where it marks nothing at all."""
        return self._marked() if self.template.has_marks(self.tools) else None

    @cached_property
    def places(self) -> "Places | None":
        return Places.of(self)

    def rendered(self, messages: Messages, is_prompt: bool = False) -> RenderedText | None:
        """These messages, or the prompt that serving renders for a reply to them; None: the template refuses one."""
        try:
            return self.template.render(messages, self.tools, is_prompt, self.settings)
        except TemplateError:
            return None

    def reply(self, number: int) -> Text | None:
        """The prompt before message `number`, and the message as the template writes it at the end of a conversation.

        None: the template refuses one of the two, marks nothing of the message, or does not leave it in one place.
        """
        if self.marked is not None and not self.marked[number]:
            return None
        text = self._alone(number)
        if text is None or self.marked is None or not self.whole.text.startswith(text.rendered.text):
            return text if text is not None and text.spans else None
        return replace(text, spans=self.marked[number])

    def _alone(self, number: int) -> Text | None:
        prompt = self.rendered(self.messages[:number], is_prompt=True)
        written = self.rendered(self.messages[: number + 1])
        if prompt is None or written is None:
            return None
        turn = replace(self, whole=written, messages=self.messages[: number + 1])
        #     the prompt     <|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n
        #     the turn       <|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n5.<|im_end|>\n
        #     learned                                                               5.<|im_end|>
        start = len(prompt.text)
        if written.text.startswith(prompt.text):
            return turn.learned(number, prompt, "", start, turn.end_after(start))
        # R1's prompt opens a thought, and the turns that it writes have none: the reply closes it.
        #
        #     the prompt     <|User|>2+3?<|Assistant|><think>\n
        #     the turn       <|User|>2+3?<|Assistant|>5.<|end|>
        #     learned                                          \n</think>\n\n5.<|end|>
        opened = OPENED_THOUGHT.search(prompt.text)
        if opened and written.text.startswith(prompt.text[: opened.start()]):
            end = turn.end_after(opened.start())
            found = THOUGHT.match(written.text, opened.start(), end)
            thought = found[1] if found else thought_of(self.messages[number])
            rest = written.text[found.end() if found else opened.start() : end]
            start = end - len(rest.lstrip())
            return turn.learned(number, prompt, f"{thought.strip()}\n{CLOSED}\n\n", start, end)
        # Mistral's prompt has the system message in its last question, the turn does not.
        span = None if turn.places is None else turn.places.reply(number)
        return None if span is None else turn.learned(number, prompt, "", *span)

    def end_after(self, start: int) -> int:
        """Where the reply ends that begins at `start`: behind the token that ends its turn."""
        ends = (end for first, end, name in self.whole.specials if first >= start and name in self.ends)
        return next(ends, len(self.whole.text))

    def learned(self, number: int, prompt: RenderedText, closing: str, start: int, end: int) -> Text:
        """`whole`'s text from `start` to `end`, which is message `number`, behind a prompt and the end of a thought."""
        begin = len(prompt.text) + len(closing)
        shift = begin - start
        specials = list(prompt.specials)
        if closing and self.template.is_special(CLOSED):
            place = len(prompt.text) + closing.rindex(CLOSED)
            specials.append((place, place + len(CLOSED), CLOSED))
        for first, last, name in self.whole.specials:
            if start <= first and last <= end:
                specials.append((first + shift, last + shift, name))
        spans = [(len(prompt.text), end + shift)]
        if self.marked is not None:
            own = [(max(first, start) + shift, min(last, end) + shift) for first, last in self.marked[number]]
            spans = [(first, last) for first, last in own if first < last]
            if spans and spans[0][0] == begin:
                spans[0] = (len(prompt.text), spans[0][1])  # what closes the thought belongs to its reply
        text = prompt.text + closing + self.whole.text[start:end]
        return Text(RenderedText(text, specials, []), prompt, spans)

    def _marked(self) -> dict[int, list[Span]]:
        """The marked spans of each reply. A template may mark only some replies, or several parts of one."""
        replies = [number for number, message in enumerate(self.messages) if message["role"] == "assistant"]
        owned: dict[int, list[Span]] = {number: [] for number in replies}
        if len(self.whole.marked) == len(replies):
            return {number: [span] for number, span in zip(replies, self.whole.marked, strict=True)}
        for span in self.whole.marked if replies else []:
            # A span belongs to the reply with the last text that begins before its end, as the text inside of it does.
            before = [(-1, replies[-1])]
            if self.places is not None:
                for leaf, begins in zip(self.places.leaves, self.places.begins, strict=True):
                    before += [(begin, leaf.message) for begin in begins if begin < span[1] and leaf.message in owned]
            owned[max(before)[1]].append(span)
        return owned


def thought_of(message: Mapping[str, Any]) -> str:
    """The thought of a reply, in its content or in a field."""
    found = THOUGHT.match(message.get("content") or "")
    return found[1] if found else next((message[name] for name in THOUGHT_FIELDS if message.get(name)), "")


@dataclass(frozen=True)
class Leaf:
    """One text of a message, without the white space around it."""

    message: int
    is_call: bool  # part of a function call, which a template writes inside of something like JSON


@dataclass(frozen=True)
class Places:
    """Where the texts of a conversation are in its rendering."""

    conversation: Conversation
    marked: list[Any]  # the messages, with marks around their leaves
    leaves: list[Leaf]
    begins: list[list[int]]  # for each leaf, its places in the whole text
    ends: list[list[int]]

    @classmethod
    def of(cls, conversation: Conversation) -> "Places | None":
        """None: when the template does not write the same text around our marks, or a text contains them."""
        leaves: list[Leaf] = []
        marked = [_with_marks(message, number, leaves) for number, message in enumerate(conversation.messages)]
        whole = conversation.whole
        if MARK.search(whole.text) or len(leaves) > MAX_LEAVES:
            return None
        rendered = conversation.rendered(marked)
        text = "" if rendered is None else rendered.text
        if MARK.sub("", text) != whole.text:
            return None
        begins: list[list[int]] = [[] for _ in leaves]
        ends: list[list[int]] = [[] for _ in leaves]
        for count, mark in enumerate(MARK.finditer(text)):
            code = ord(mark[0])
            found = begins[code - BEGINS] if code < ENDS else ends[code - ENDS]
            found.append(mark.start() - count)
        return cls(conversation, marked, leaves, begins, ends)

    def reply(self, number: int) -> Span | None:
        """What the model writes in message `number`, the last; None where a part is missing or not in one place."""
        own = [index for index, leaf in enumerate(self.leaves) if leaf.message == number]
        if not own or any(len(self.begins[index]) != 1 or len(self.ends[index]) != 1 for index in own):
            return None
        first_leaf = min(own, key=lambda index: self.begins[index])
        last_leaf = max(own, key=lambda index: self.ends[index])
        first = self.begins[first_leaf][0]
        last = self.ends[last_leaf][0]
        # The reply must not contain a text of another message.
        others = [index for index, leaf in enumerate(self.leaves) if leaf.message != number]
        ended = [(place, index) for index in others for place in self.ends[index]]
        if any(first < place for index in others for place in self.begins[index]) or any(
            first < place for place, _ in ended
        ):
            return None
        start = self._start(number, first, self.leaves[first_leaf], max(ended, default=None))
        end = self._end(last, self.leaves[last_leaf])
        return None if start is None or end is None else (start, end)

    def _start(self, number: int, first: int, leaf: Leaf, before: tuple[int, int] | None) -> int | None:
        """Where a reply begins whose first leaf is at `first`; `before` is where which leaf ends before it."""
        if before is not None and self.leaves[before[1]].message == number - 1:
            # From the question to the first leaf, and the same in the prompt:
            #
            #     Qwen3, a call     <|im_end|>\n<|im_start|>assistant\n<tool_call>\n{"name": "      the prompt, and more
            #     its prompt        <|im_end|>\n<|im_start|>assistant\n
            #     R1                <|Assistant|>                                         less than the prompt
            #     its prompt        <|Assistant|><think>\n
            prompt = self.conversation.rendered(self.marked[:number], is_prompt=True)
            _, mark, opening = (prompt.text if prompt else "").rpartition(chr(ENDS + before[1]))
            is_plain = mark and not MARK.search(opening)  # no other text comes between
            if is_plain and self.conversation.whole.text.startswith(opening, before[0], first):
                return before[0] + len(opening)
        # A text is the assistant's from its first character on. What comes before a name in a call may not be, and what
        # opens a thought belongs to it.
        between = self.conversation.whole.text[before[0] if before else 0 : first]
        return None if leaf.is_call or THOUGHT_TAG.search(between) else first

    def _end(self, last: int, leaf: Leaf) -> int | None:
        """Where a reply ends whose last leaf ends at `last`."""
        specials = (special for special in self.conversation.whole.specials if special[0] >= last)
        _, end, name = next(specials, (last, last, ""))
        return end if name in self.conversation.ends else None if leaf.is_call else last


def _with_marks(message: Mapping[str, Any], number: int, leaves: list[Leaf]) -> dict[str, Any]:
    """A copy of a message with marks around its texts. Names and ids that templates check stay as they are."""

    def mark(text: str, is_call: bool) -> str:
        parts = []
        for piece in [text] if is_call else THOUGHT_TAG.split(text):
            body = piece.strip()
            if not body or THOUGHT_TAG.fullmatch(piece):
                parts.append(piece)
                continue
            # Templates strip texts: the marks are inside of the white space.
            before, _, after = piece.partition(body)
            count = len(leaves)
            parts.append(f"{before}{chr(BEGINS + count)}{body}{chr(ENDS + count)}{after}")
            leaves.append(Leaf(number, is_call))
        return "".join(parts)

    def mark_all(value: Any) -> Any:
        if isinstance(value, str):
            return mark(value, is_call=True)
        if isinstance(value, Mapping):
            return {key: mark_all(one) for key, one in value.items()}
        return [mark_all(one) for one in value] if isinstance(value, list) else value

    copied = dict(message)
    for name in TEXT_FIELDS:
        if isinstance(copied.get(name), str):
            copied[name] = mark(copied[name], is_call=False)
    if copied.get("tool_calls"):
        calls = []
        for call in copied["tool_calls"]:
            function = dict(call.get("function") or {})
            marked = {name: mark_all(function[name]) for name in ("name", "arguments") if name in function}
            calls.append({**call, "function": {**function, **marked}} if function else call)
        copied["tool_calls"] = calls
    return copied
