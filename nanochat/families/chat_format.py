"""The chat format of another model family: its template writes the text, its tokenizer encodes it.

A model learns the text that it would write after a prompt, with the token that ends its turn.
"""

import bisect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from nanochat.conversation import ChatFormat, Message, Part, Prompt, Rendered, Settings, UnrenderableChat, text_of
from nanochat.families.chat_template import ChatTemplate, RenderedText
from nanochat.families.reply_spans import THOUGHT, Conversation, Text, thought_of
from nanochat.families.tool_calls import THOUGHT_SEPARATOR, CallForm, find_form, opens_thought
from nanochat.ground.cli import UserError

THINKING = {"enable_thinking": True}  # as a client asks for a thought
CALL_ID = "000000000"  # the id of a tool call, in the form that Mistral's templates check


class TemplateFormat(ChatFormat):
    """Conversations as a chat template writes them; without a template every method that renders raises UserError."""

    def __init__(self, tokenizer: Any, template: ChatTemplate | None):
        self.tokenizer = tokenizer  # an ImportedTokenizer, whose module imports this one
        self._template = template
        ends = set(tokenizer.reply_ends)
        self._end_names = {name for name, index in tokenizer.special_ids.items() if index in ends}

    @property
    def template(self) -> ChatTemplate:
        if self._template is None:
            raise UserError(
                "this model has no chat template, so it continues text and holds no conversation: take its "
                "instruction-tuned relative, or put a chat_template.jinja next to its tokenizer.json"
            )
        return self._template

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Rendered:
        return self.renderings(messages, tools)[-1]

    def renderings(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[Rendered]:
        if messages[-1]["role"] == "rendered":  # tasks/conversations.py
            return [self._of_text(messages[-1]["content"])]
        plain = self._as_texts(messages)
        whole = self.template.render(plain, tools)
        conversation = Conversation(self.template, whole, plain, tools, self._end_names)
        learned: list[tuple[Text, Rendered]] = []
        count = 0
        lost: list[str] = []  # replies that are not learned
        for number, (message, text) in enumerate(zip(messages, plain, strict=True)):
            parts = [text.get(self.template.thought_field or ""), text["content"], text.get("tool_calls")]
            if message["role"] != "assistant" or not any(parts) or not message.get("train", True):
                continue
            count += 1
            reply = self._learned(conversation, number)
            if reply is None and thought_of(text):
                # The prompts of the small models of Qwen3.5 close the thought, unless a client turns thoughts on.
                whole_thinking = self.template.render(plain, tools, settings=THINKING)
                reply = self._learned(replace(conversation, whole=whole_thinking, settings=THINKING), number)
            if reply is None:
                lost.append("".join(part if isinstance(part, str) else json.dumps(part) for part in parts if part))
            else:
                learned.append(reply)
        found = self._together(whole, learned)
        lost_tokens = sum(len(self.tokenizer.encode(text)) + 1 for text in lost)  # and the end of the turn
        known = sum(one.target_count for one in found)
        found[-1] = replace(found[-1], replies=count, unlearned=len(lost), reply_tokens=known + lost_tokens)
        return found

    def _of_text(self, text: str) -> Rendered:
        """A whole chat that a template wrote elsewhere: names of special tokens in it are these tokens.

        A reply is learned where the text opens it as a prompt does, up to the token that ends it. Raises
        UnrenderableChat: for a text without such a reply.
        """
        prompt = self.template.render([{"role": "user", "content": "?"}], add_generation_prompt=True)
        opening = prompt.text.rpartition("?")[2]  # <|im_end|>\n<|im_start|>assistant\n, with a thought for some models
        begin = next((name for start, _, name in prompt.specials if start == 0), "")
        if self.tokenizer.special_ids.get(begin) == self.tokenizer.get_bos_token_id():
            text = begin + text.removeprefix(begin)
        specials = self._specials_in(text)
        ends = [end for _, end, name in specials if name in self._end_names]
        spans = []
        place = text.find(opening)
        while place >= 0:
            start = place + len(opening)
            end = next((end for end in ends if end > start), len(text))
            spans.append((start, end))
            place = text.find(opening, end)
        if not spans:
            raise UnrenderableChat(f"a rendered chat in which no reply opens as in this model's prompts: {opening!r}")
        ids, mask = self.tokenizer.encode_rendered(RenderedText(text, specials, []), spans)
        replies = max(len(spans), text.count(opening.partition("<think>")[0]))
        return Rendered(ids, mask, replies=replies, unlearned=replies - len(spans), reply_tokens=sum(mask))

    def _specials_in(self, text: str) -> list[tuple[int, int, str]]:
        """The names of special tokens in a text, each with its place."""
        pattern = "|".join(map(re.escape, sorted(self.tokenizer.special_ids, key=len, reverse=True)))
        return [(found.start(), found.end(), found[0]) for found in re.finditer(pattern, text)]

    def _learned(self, conversation: Conversation, number: int) -> tuple[Text, Rendered] | None:
        """Message `number` behind its prompt, as text and as tokens; None: it is not what serving would read and
        write."""
        reply = conversation.reply(number)
        if reply is None or self._lacks(conversation, reply, conversation.messages[number]):
            return None
        ids, mask = self.tokenizer.encode_rendered(reply.rendered, reply.spans)
        prompt, _ = self.tokenizer.encode_rendered(reply.prompt)
        return (reply, Rendered(ids, mask)) if ids[: len(prompt)] == prompt else None

    def _together(self, whole: RenderedText, learned: Sequence[tuple[Text, Rendered]]) -> list[Rendered]:
        """One rendering of all replies that have the same tokens before them in `whole`, and one of each other reply.

        The last reply is in the last one.
        """
        together = [one for one in learned if whole.text.startswith(one[0].rendered.text)]
        ids, mask = self.tokenizer.encode_rendered(whole, [span for reply, _ in together for span in reply.spans])
        if any(ids[: len(alone.ids)] != alone.ids for _, alone in together):  # a token crosses the end of a reply
            together = []
        apart = [alone for reply, alone in learned if (reply, alone) not in together]
        if apart and not together:
            return apart
        one = Rendered(ids, mask)
        return [*apart, one] if not apart or learned[-1] in together else [one, *apart]

    def shorten(
        self,
        messages: Sequence[Message],
        max_tokens: int | None = None,
        settings: Settings | None = None,
        tools: Sequence[Any] | None = None,
    ) -> Prompt:
        template = self.template
        first = 1 if messages[0]["role"] == "system" else 0
        # A template would end the turn of a reply that the model continues, so that reply is encoded separately.
        begun = ""
        if messages[-1]["role"] == "assistant":
            begun = text_of(messages[-1]["content"])
            messages = messages[:-1]
        plain = self._as_texts(messages)
        questions = [number for number, message in enumerate(messages) if number >= first and message["role"] == "user"]

        def prompt(oldest: int) -> list[int]:
            shortened = [*plain[:first], *plain[oldest:]]
            rendered = template.render(shortened, tools, add_generation_prompt=True, settings=settings)
            rest = begun
            if begun and opens_thought(rendered.text):
                # The text of a reply comes after its thought, which may be empty.
                is_thought = begun.startswith("<think>\n")
                end = template.thought_end or THOUGHT_SEPARATOR
                rest = begun.removeprefix("<think>\n") if is_thought else end + begun
            return self.tokenizer.encode_rendered(rendered, [])[0] + self.tokenizer.encode_continuation(rest)

        # Each possible beginning gives another text, and a later beginning a shorter one: bisection tries a few.
        ids = prompt(first)
        if max_tokens is None or len(ids) <= max_tokens or len(questions) < 2:
            return Prompt(ids, first)
        earlier = questions[1:-1]  # the first is too long, and the last always stays
        fitting = bisect.bisect_left(earlier, True, key=lambda oldest: len(prompt(oldest)) <= max_tokens)
        oldest = [*earlier, questions[-1]][fitting]
        return Prompt(prompt(oldest), oldest)

    def continuation(
        self,
        question: Sequence[Message],
        messages: Sequence[Message],
        is_complete: bool,
        tools: Sequence[Any] | None = None,
    ) -> list[int]:
        # A template writes whole conversations. So render one, and take the text after the token that ends the reply:
        #
        #     question            <|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n
        #     + reply, messages   <|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\nOK<|im_end|>\n<|im_start|>...
        #     continuation                                                             <|im_end|>\n<|im_start|>...
        #
        # Any reply will do where the continuation does not depend on it, that is where a template leaves a reply as it
        # is once others follow. Qwen3's template drops the thoughts of replies before the last user's message, so one
        # trial has thoughts: its models can call tools, and cannot play a game in which the user speaks.
        template = self.template
        plain = self._as_texts(question)
        prompt = template.render(plain, tools, add_generation_prompt=True).text
        texts = ["<think>\nOK\n</think>\n\n", "OK"] if template.has_thoughts else ["OK"]
        after: list[int] = []
        for text in texts:
            reply: Message = {"role": "assistant", "content": text}
            following = self._as_texts(messages)
            if messages[0]["role"] == "tool":  # templates want to see its call
                function = {"name": messages[0].get("name", "tool"), "arguments": {}}
                reply["tool_calls"] = [{"id": CALL_ID, "type": "function", "function": function}]
                following = [{"tool_call_id": CALL_ID, **message} for message in following]
            whole = template.render([*plain, reply, *following], tools, add_generation_prompt=True)
            ends = (start for start, _, name in whole.specials if start >= len(prompt) and name in self._end_names)
            end = next(ends, None)
            is_kept = whole.text.startswith(prompt) and text.strip() in whole.text[len(prompt) : end]
            if end is None or not is_kept:
                what = "thoughts (<think>) of a reply out" if text != "OK" else "a reply not as it was"
                raise UserError(
                    f"this model's chat template leaves {what} once a message by {messages[0]['role']} follows it, so "
                    "the texts of episodes with several turns would differ from its chats: choose another "
                    "environment or model, or put a chat_template.jinja that keeps replies next to its tokenizer.json"
                )
            specials = [(start - end, stop - end, name) for start, stop, name in whole.specials if start >= end]
            after = self.tokenizer.encode_rendered(RenderedText(whole.text[end:], specials, []), [])[0]
        return after[1:] if is_complete else after

    @cached_property
    def call_form(self) -> CallForm | None:
        """How the model writes function calls; None: in no form that is read here."""
        return find_form(self.template, self._end_names)

    def encode_begun(self, text: str) -> list[int]:
        """The ids of the beginning of a reply, in which names of special tokens are these tokens."""
        return self.tokenizer.encode_rendered(RenderedText(text, self._specials_in(text), []), [])[0]

    def parse(self, ids: Iterable[int]) -> list[Part]:
        special = set(self.tokenizer.special_ids.values())
        tokens = []
        for token in ids:
            if token in self.tokenizer.reply_ends:
                break
            if token not in special:
                tokens.append(token)
        text = self.tokenizer.decode(tokens)
        return [{"type": "text", "text": text}] if text else []

    def _lacks(self, conversation: Conversation, reply: Text, message: Mapping[str, Any]) -> bool:
        """Whether a template left out a call of a message, or its thought: it would be learned to reply without it."""
        if conversation.marked is not None:  # the template has said what is learned
            return False
        written = reply.rendered.text[len(reply.prompt.text) :]
        needed = [call.get("function", {}).get("name", "") for call in message.get("tool_calls") or []]
        needed.append(thought_of(message))
        return not all(text.strip() in written for text in needed)

    def _as_texts(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages as templates read them: each content is one text, and a thought is in the template's field."""
        # The model has no marks for calculator calls. From "It is " + call + result + "5." it reads and learns "It is
        # 5."
        plain = []
        for message in messages:
            fields = {name: value for name, value in message.items() if name != "train" and value is not None}
            content = text_of(message.get("content") or "")
            # Data have the thought in the content (tasks/messages.py). A template that has a field for it may not look
            # there.
            found = THOUGHT.match(content) if message["role"] == "assistant" and "</think>" in content else None
            if found and found[1].strip() and self.template.thought_field is not None:
                fields[self.template.thought_field] = found[1].strip("\n")
                content = content[found.end() :]
            plain.append({**fields, "content": content})
        return plain
