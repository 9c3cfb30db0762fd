"""Where the replies are in a rendered conversation: what a model learns of it, and nothing else.

A template writes a whole conversation as one text. A reply in it is what the model would write after its prompt, up to
and with the token that ends its turn. Three rules find it, each where the one before does not:

1. *Marks.* The template says it itself, by {% generation %}: exactly what it marks is learned.
2. *Prompts.* The whole text begins with the prompt before the reply. Then the reply begins where the prompt ends.
3. *Places.* The whole text differs from the prompt somewhere before the reply. Qwen3 writes an empty thought into the
   last reply only, Mistral moves the system message into the last question, and the prompt of R1 opens a thought that
   no reply has. So every text of the conversation is rendered between two characters that occur nowhere else. They
   show where in the whole text each message went, and the prompt shows what comes between a question and its reply.

A reply of which the template drops a part, such as the thoughts of earlier replies, is not learned: the model would
learn to reply without it. A reply that the third rule finds may follow other text than the prompt that serving renders
before it, as with R1: then the model is asked where it has learned nothing. Such replies are counted.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nanochat.families.chat_template import THOUGHT_FIELDS, ChatTemplate, Messages, RenderedText, Span, TemplateError

# Characters of the private planes 15 and 16, which no text has in practice: leaf number n is between the n-th of each.
BEGINS = 0xF0000
ENDS = 0x100000
MAX_LEAVES = 0xFFFD
MARK = re.compile("[\U000f0000-\U0010ffff]")
THOUGHT_TAG = re.compile("(</?think>)")  # templates divide a reply there
TEXT_FIELDS = ("content", *THOUGHT_FIELDS)


@dataclass(frozen=True)
class Reply:
    """What the model writes in one message of a rendered conversation."""

    spans: list[Span]  # several only where a template marks them; none where it leaves no such place
    is_served: bool  # serving renders the same text before it as a prompt


@dataclass(frozen=True)
class Conversation:
    """A conversation, and its rendering `whole`; `ends` are the special tokens that end a reply."""

    template: ChatTemplate
    whole: RenderedText
    messages: Messages
    tools: Sequence[Any] | None
    ends: Collection[str]

    def replies(self) -> list[Reply]:
        """What the model writes in each assistant's message, from where the reply begins to its end."""
        numbers = [number for number, message in enumerate(self.messages) if message["role"] == "assistant"]
        if not self.template.has_marks(self.tools):
            return [self._reply(number) for number in numbers]
        marked = self._marked(numbers)
        return [Reply(own, self._is_served(number)) for number, own in zip(numbers, marked, strict=True)]

    def _reply(self, number: int) -> Reply:
        span = self._after_prompt(number)
        if span is not None:
            return Reply([span], self._matches_mode(span[0], number))
        span = None if self.places is None else self.places.reply(number)
        return Reply([], False) if span is None else Reply([span], self._is_served(number))

    @cached_property
    def places(self) -> "Places | None":
        return Places.of(self)

    def prompt(self, messages: Messages) -> str | None:
        """The prompt that serving renders for a reply to these messages; None: the template refuses one of them."""
        try:
            return self.template.render(messages, self.tools, add_generation_prompt=True).text
        except TemplateError:
            return None

    def _is_served(self, number: int) -> bool:
        """Whether `whole` begins with the prompt that serving renders before message `number`."""
        prompt = self.prompt(self.messages[:number])
        return prompt is not None and self.whole.text.startswith(prompt) and self._matches_mode(len(prompt), number)

    def _matches_mode(self, start: int, number: int) -> bool:
        """Whether a reply at `start` without a thought also follows the prompt of `enable_thinking=False`, for which it
        is trained."""
        message = self.messages[number]
        has_thought = "</think>" in (message.get("content") or "") or any(message.get(name) for name in THOUGHT_FIELDS)
        return has_thought or self.whole.text.startswith(self.template.closed_thought, start)

    def _marked(self, replies: list[int]) -> list[list[Span]]:
        """The marked spans of each reply. A template may mark only some replies, or several parts of one."""
        if not replies:
            return []
        if len(self.whole.marked) == len(replies):
            return [[span] for span in self.whole.marked]
        owned: dict[int, list[Span]] = {number: [] for number in replies}
        for span in self.whole.marked:
            # A span belongs to the reply with the last text that begins before its end, as the text inside of it does.
            before = [(-1, replies[-1])]
            if self.places is not None:
                for leaf, begins in zip(self.places.leaves, self.places.begins, strict=True):
                    before += [(begin, leaf.message) for begin in begins if begin < span[1] and leaf.message in owned]
            owned[max(before)[1]].append(span)
        return list(owned.values())

    def _after_prompt(self, number: int) -> Span | None:
        """Message `number`, where the whole conversation begins with its prompt and its turn."""
        #     the prompt     <|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n
        #     with the turn  <|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n5.<|im_end|>\n
        #     learned                                                               5.<|im_end|>
        prompt = self.prompt(self.messages[:number])
        if prompt is None:
            return None
        try:
            turn = self.template.render(self.messages[: number + 1], self.tools)
        except TemplateError:
            return None
        start = len(prompt)
        ends = (end for first, end, name in turn.specials if first >= start and name in self.ends)
        end = next(ends, len(turn.text))
        is_exact = turn.text.startswith(prompt) and self.whole.text.startswith(turn.text[:end])
        return (start, end) if is_exact else None


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
        try:
            text = conversation.template.render(marked, conversation.tools).text
        except TemplateError:
            return None
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
        """What the model writes in message `number`; None where a part of it is missing or not in one place."""
        own = [index for index, leaf in enumerate(self.leaves) if leaf.message == number]
        if not own or any(len(self.begins[index]) != 1 or len(self.ends[index]) != 1 for index in own):
            return None
        first_leaf = min(own, key=lambda index: self.begins[index])
        last_leaf = max(own, key=lambda index: self.ends[index])
        first = self.begins[first_leaf][0]
        last = self.ends[last_leaf][0]
        # Texts of other messages, which the reply must not contain: the last one before it, the first one after it.
        others = [index for index, leaf in enumerate(self.leaves) if leaf.message != number]
        ended = [(place, index) for index in others for place in self.ends[index]]
        begun = [place for index in others for place in self.begins[index]]
        if any(first < place < last for place in begun) or any(first < place < last for place, _ in ended):
            return None
        before = max((one for one in ended if one[0] <= first), default=None)
        following = min((place for place in begun if place >= last), default=None)
        start = self._start(number, first, self.leaves[first_leaf], before)
        end = self._end(last, self.leaves[last_leaf], following)
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
            prompt = self.conversation.prompt(self.marked[:number]) or ""
            _, mark, opening = prompt.rpartition(chr(ENDS + before[1]))
            is_plain = mark and not MARK.search(opening)  # no other text comes between
            if is_plain and self.conversation.whole.text.startswith(opening, before[0], first):
                return before[0] + len(opening)
        # A text is the assistant's from its first character on. What comes before a name in a call may not be.
        return None if leaf.is_call else first

    def _end(self, last: int, leaf: Leaf, following: int | None) -> int | None:
        """Where a reply ends whose last leaf ends at `last`; `following` is where another message's text begins."""
        specials = (special for special in self.conversation.whole.specials if special[0] >= last)
        _, end, name = next(specials, (last, last, ""))
        if name in self.conversation.ends and (following is None or end <= following):
            return end
        return None if leaf.is_call else last


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
