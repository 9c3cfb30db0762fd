"""The chat format: messages <-> token ids and a loss mask.

A conversation is a list of messages `{"role": ..., "content": ...}`: at most one `system` message at the beginning,
then `user` and `assistant` in turn. A content is a text, or a list of parts `{"type": ..., "text": ...}` of the types
`text`, `python` (the assistant calls its tool) and `python_output` (the tool's result).

SFT, RL, evaluation, the terminal chat and the server all render here, and nowhere else: a model must be served exactly
the format that it was trained on. One token of difference costs quality, and nothing reports it.

A model of another family keeps its own format, which its chat template writes (families/chat_template.py). Its messages
may also have `tool_calls`, and the role `tool`, as the template reads them; `tools` are the functions that it
describes. In this project's own format a message of the role `tool`, which environments write (tasks/environment.py),
is a user's turn.
"""

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nanochat.cli import UserError
from nanochat.families.chat_template import ChatTemplate, RenderedText, Settings, TemplateError
from nanochat.families.imported_tokenizer import ImportedTokenizer
from nanochat.tokenizer import Tokenizer

Message = dict[str, Any]  # {"role": str, "content": str | list[Part], "train"?: bool}
Part = dict[str, str]  # {"type": str, "text": str}

# The conversation
#
#     [{"role": "user", "content": "2+3?"},
#      {"role": "assistant", "content": [{"type": "text", "text": "It is "}, {"type": "python", "text": "2+3"},
#                                        {"type": "python_output", "text": "5"}, {"type": "text", "text": "5."}]}]
#
# becomes these tokens (a text is shown as one token here) with this mask:
#
#     <|bos|>  <|user_start|>  2+3?  <|user_end|>  <|assistant_start|>
#        0           0          0          0               0
#     It is  <|python_start|>  2+3  <|python_end|>  <|output_start|>  5  <|output_end|>  5.  <|assistant_end|>
#       1           1           1          1               0          0         0        1          1
#
# The mask says which tokens a loss predicts: the target of a place is the next token, and it counts where that token's
# mask is 1 (packing.py). So the place of `<|assistant_start|>` learns to write `It is`.
#
# The mask has a 1 under each token that the assistant chooses: its text, its calls with their marks, and the end of its
# turn. It has a 0 under what others write: the system, the user, the tool. Learning the tool's results would teach the
# model to make them up. `<|assistant_start|>` has a 0 because every prompt ends with it.
#
# Special tokens are inserted by id. Spelled out in a message they are plain text (tokenizer.py), so no message can end
# its own turn or begin another one's.

CALL_ID = "000000000"  # of a tool's call, in the form that Mistral's templates check
ROLES = ("system", "user", "assistant", "tool")  # the last one for chat templates alone
# The special tokens around each type of part; a text has none.
MARKS = {
    "text": ("", ""),
    "python": ("<|python_start|>", "<|python_end|>"),
    "python_output": ("<|output_start|>", "<|output_end|>"),
}


@dataclass(frozen=True)
class Rendered:
    """A conversation as tokens."""

    ids: list[int]
    mask: list[int]  # 1 under each token that the assistant chooses
    cut: bool  # it was longer than max_tokens: its end is missing
    unlearned: int = 0  # replies that a chat template writes otherwise when more turns follow: nothing is learned there

    @property
    def target_count(self) -> int:
        """Tokens to learn from; 0 where every assistant part is empty, masked or cut off."""
        return sum(self.mask)


def parts_of(content: str | Sequence[Part]) -> list[Part]:
    """A content as parts; a plain text is one part."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def text_of(content: str | Sequence[Part]) -> str:
    """What a reader sees of a content: its text, without calls and their results."""
    # "It is " + call + result + "5." -> "It is 5."
    return "".join(part["text"] for part in parts_of(content) if part["type"] == "text")


def check_messages(messages: Any) -> None:
    """Raises ValueError: for anything that is not a conversation; names the message and what is wrong with it."""
    # Data sets and requests are written by others. A mistake is found here, with the number of its message, and not as
    # a KeyError in the middle of rendering.
    if not isinstance(messages, list) or not messages:
        raise ValueError("a conversation is a non-empty list of messages")
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"message {number} is not an object with role and content")
        _check_message(number, message)

    # Whose turn it is follows from the place: a model trained on strict turns has never seen two of one role in a row.
    has_system = messages[0]["role"] == "system"
    if len(messages) == has_system:
        raise ValueError("there is a system message and nothing else")
    expected = ["user"]
    for number, message in enumerate(messages[has_system:], start=has_system):
        role = message["role"]
        if role not in expected:
            raise ValueError(f"message {number} is by {role}, where {' or '.join(expected)} is expected")
        if role == "assistant":
            expected = ["tool"] if message.get("tool_calls") else ["user"]
        else:
            expected = ["assistant"] if role == "user" else ["assistant", "tool"]


def _check_message(number: int, message: dict) -> None:
    role = message.get("role")
    content = message.get("content")
    if role not in ROLES:
        raise ValueError(f"message {number} has the role {role!r}: {', '.join(ROLES)}")
    if not isinstance(content, str | list):
        raise ValueError(f"message {number} ({role}) has no content: a text, or a list of parts")
    if message.get("tool_calls") and role != "assistant":
        raise ValueError(f"message {number} ({role}) has tool_calls: only the assistant calls a tool")
    for part in parts_of(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in list(MARKS) or not isinstance(part.get("text"), str):
            raise ValueError(f"message {number} ({role}) has a part that is not type ({', '.join(MARKS)}) and text")
        if kind != "text" and role != "assistant":
            raise ValueError(f"message {number} ({role}) has a {kind} part: only the assistant calls a tool")
    if not isinstance(message.get("train", True), bool):
        raise ValueError(f'message {number} ({role}): "train" is true or false')


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    max_tokens: int | None = None,
    tools: Sequence[Any] | None = None,
) -> Rendered:
    """Token ids and loss mask of a whole conversation, cut off after `max_tokens`.

    Raises TemplateError: when the chat format refuses the conversation. Raises UserError: when a model has no format.
    """
    if isinstance(tokenizer, ImportedTokenizer):
        ids, mask, unlearned = _render_by_template(tokenizer, messages, tools)
    else:
        if any(message.get("tool_calls") for message in messages):
            what = "it calls functions (tool_calls), for which only models with a chat template have a format"
            raise TemplateError(f"{what}: leave it out, or name another --source")
        ids, mask = _render(tokenizer, messages)
        unlearned = 0
    # Training cuts the end off, because each target needs all that precedes it and nothing that follows.
    if max_tokens is None or len(ids) <= max_tokens:
        return Rendered(ids, mask, cut=False, unlearned=unlearned)
    return Rendered(ids[:max_tokens], mask[:max_tokens], cut=True, unlearned=unlearned)


def _render(tokenizer: Tokenizer, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
    ids = [tokenizer.get_bos_token_id()]
    mask = [0]
    for message in messages:
        role = "user" if message["role"] == "tool" else message["role"]
        # An empty part is left out: marks around nothing would be a call without an expression.
        parts = [part for part in parts_of(message["content"]) if part["text"]]
        # A message with `"train": false` is context only. So is an empty reply: learning from it would teach the model
        # to end its turn at once.
        learned = role == "assistant" and bool(parts) and message.get("train", True)
        # The role's mark opens the turn. Each part is encoded by itself: the tool's result has the same tokens here as
        # in the engine, which encodes it alone.
        ids.append(tokenizer.encode_special(f"<|{role}_start|>"))
        mask.append(0)
        for part in parts:
            start, end = MARKS[part["type"]]
            tokens = tokenizer.encode(part["text"], prepend=start or None, append=end or None)
            ids += tokens
            mask += [int(learned and part["type"] != "python_output")] * len(tokens)
        # The end of a turn is the assistant's choice too: this is where it learns to stop.
        ids.append(tokenizer.encode_special(f"<|{role}_end|>"))
        mask.append(int(learned))
    return ids, mask


@dataclass(frozen=True)
class Prompt:
    """What a model reads before its reply."""

    ids: list[int]
    oldest: int  # index of the oldest message that it reads, the system message aside


def render_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    max_tokens: int | None = None,
    settings: Settings | None = None,
    tools: Sequence[Any] | None = None,
) -> list[int]:
    """Token ids of a conversation up to where the reply begins, or up to the end of a reply that the model continues.

    `settings`, `tools`: for a chat template, as in `ChatTemplate.render`.
    Raises UserError: when the system message and the last message alone are longer than `max_tokens`.
    """
    ids = _shortened(tokenizer, messages, max_tokens, settings, tools).ids
    if max_tokens is not None and len(ids) > max_tokens:
        raise UserError(f"the message has {len(ids)} tokens, there is room for {max_tokens}: shorten it")
    return ids


def render_continuation(
    tokenizer: Tokenizer,
    question: Sequence[Message],
    messages: Sequence[Message],
    is_complete: bool,
    tools: Sequence[Any] | None = None,
) -> list[int]:
    """Token ids between a sampled reply and the next one: the end of its turn, unless it `is_complete` and has one,
    the messages that follow it, and the mark of the next reply. `question` is what the conversation began with.

    The reply's own tokens stay as they were sampled. Encoded again from its text they may be others.
    Raises UserError: when a chat template writes a reply otherwise once other messages follow it.
    """
    if isinstance(tokenizer, ImportedTokenizer):
        return _continuation_by_template(tokenizer, question, messages, is_complete, tools)
    end = [] if is_complete else [tokenizer.encode_special("<|assistant_end|>")]
    return end + render(tokenizer, messages).ids[1:] + [tokenizer.encode_special("<|assistant_start|>")]


def fit_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    context: int,
    reply_tokens: int | None = None,
    settings: Settings | None = None,
) -> Prompt:
    """The prompt of a chat of any length: half of the context stays free for the reply, or less for one of at most
    `reply_tokens`.

    The system message and the last message always stay; where they alone are longer, the reply has what is left.
    """
    # Half: with an eighth, 32 of the demo's 256 tokens, 7 of 12 second stories in a chat ended in mid-sentence
    # (docs/measurements.md). What the model no longer reads costs less than a reply that it cannot finish.
    room = min(reply_tokens or context, context // 2)
    return _shortened(tokenizer, messages, context - room, settings)


def _shortened(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    max_tokens: int | None,
    settings: Settings | None,
    tools: Sequence[Any] | None = None,
) -> Prompt:
    """The prompt without the oldest turns, as few as its length requires."""
    if isinstance(tokenizer, ImportedTokenizer):
        return _shortened_by_template(tokenizer, messages, max_tokens, settings, tools)
    # The result is the beginning of what `render` gives for the conversation with its reply: in training the model has
    # seen exactly this. A conversation that is too long loses its oldest turns, where training loses the end: the reply
    # must follow the newest question. For example:
    #
    #     messages    system  user 1  reply 1  user 2  reply 2  user 3
    #     prompt      <|bos|> system           user 2  reply 2  user 3  <|assistant_start|>
    first = 1 if messages[0]["role"] == "system" else 0
    # What there is of the reply: its mark, and the text that the model is to continue. The end of the turn is missing.
    reply = [tokenizer.encode_special("<|assistant_start|>")]
    if messages[-1]["role"] == "assistant":
        reply = render(tokenizer, messages[-1:]).ids[1:-1]
        messages = messages[:-1]
    assert messages[-1]["role"] == "user" and (len(messages) - first) % 2 == 1

    # What is always there: the begin token, the system message, the question.
    head = render(tokenizer, messages[:first]).ids
    question = render(tokenizer, messages[-1:]).ids[1:]  # each turn without a begin token of its own
    question += reply
    length = len(head) + len(question)

    # As many earlier turns as fit, from the newest to the oldest. Each is a user's message and its reply. In
    # training no question is without its reply, so both stay or both are dropped. The first turn that does not fit ends
    # the search: no turn is missing from the middle.
    turns: list[list[int]] = []
    oldest = len(messages) - 1
    for index in range(len(messages) - 3, first - 1, -2):
        turn = render(tokenizer, messages[index : index + 2]).ids[1:]
        length += len(turn)
        if max_tokens is not None and length > max_tokens:
            break
        turns.append(turn)
        oldest = index

    ids = head
    for turn in reversed(turns):
        ids += turn
    return Prompt(ids + question, oldest)


def parse_reply(tokenizer: Tokenizer, ids: Iterable[int]) -> list[Part]:
    """The parts of an assistant's tokens, as generated after a prompt: the inverse of `render` for one message."""
    # "It is " <|python_start|> "2+3" <|python_end|> <|output_start|> "5" <|output_end|> "5." <|assistant_end|> becomes
    # the parts text "It is ", python "2+3", python_output "5" and text "5.".
    #
    # A model can generate anything, so nothing here raises. A mark in the wrong place is dropped. A call that was not
    # closed, because the reply was cut off there, is text: a reader would see nothing of it, and rendered again it
    # would be a call without a result.
    if isinstance(tokenizer, ImportedTokenizer):
        return _parse_by_template(tokenizer, ids)
    opening = {tokenizer.encode_special(start): kind for kind, (start, _) in MARKS.items() if start}
    closing = {tokenizer.encode_special(end) for _, end in MARKS.values() if end}
    end = tokenizer.encode_special("<|assistant_end|>")
    special = set(tokenizer.special_ids.values())
    # An opening mark begins a part of its type. A closing mark begins a text, and so does the reply itself. Parts that
    # stay empty are left out at the end.
    runs: list[tuple[str, list[int]]] = [("text", [])]  # (type, tokens) of each part
    for token in ids:
        if token == end:
            break
        if token in opening:
            runs.append((opening[token], []))
        elif token in closing:
            runs.append(("text", []))
        elif token not in special:  # a role's mark in the middle of a reply is no text
            _, tokens = runs[-1]
            tokens.append(token)
    if runs[-1][0] == "python":
        runs[-1] = ("text", runs[-1][1])
    # Decoded once per part and not per token: a character may be spread over several tokens.
    return [{"type": kind, "text": tokenizer.decode(tokens)} for kind, tokens in runs if tokens]


# ---------------------------------------------------------------------- by the chat template of another family


def _template(tokenizer: ImportedTokenizer) -> ChatTemplate:
    if tokenizer.chat_template is None:
        raise UserError(
            "this model has no chat template, so it continues text and holds no conversation: take its "
            "instruction-tuned relative, or put a chat_template.jinja next to its tokenizer.json"
        )
    return tokenizer.chat_template


def _for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as templates read them: a content is a text."""
    # The model has no marks for calculator calls. Of "It is " + call + result + "5." it reads and learns "It is 5."
    plain = []
    for message in messages:
        fields = {name: value for name, value in message.items() if name != "train" and value is not None}
        plain.append({**fields, "content": text_of(message.get("content") or "")})
    return plain


def _render_by_template(
    tokenizer: ImportedTokenizer, messages: Sequence[Message], tools: Sequence[Any] | None
) -> tuple[list[int], list[int], int]:
    """Token ids, loss mask, and how many replies are not learned although they should be."""
    template = _template(tokenizer)
    plain = _for_template(messages)
    whole = template.render(plain, tools)
    ends = {name for name, index in tokenizer.special_ids.items() if index in tokenizer.reply_ends}
    spans = []
    unlearned = 0
    replies = [message for message in messages if message["role"] == "assistant"]
    for message, span in zip(replies, template.learned(whole, plain, tools, ends), strict=True):
        has_content = text_of(message.get("content") or "") or message.get("tool_calls")
        if not has_content or not message.get("train", True):
            continue
        if span is None:
            unlearned += 1
        else:
            spans.append(span)
    ids, mask = tokenizer.encode_rendered(whole, spans)
    return ids, mask, unlearned


def _shortened_by_template(
    tokenizer: ImportedTokenizer,
    messages: Sequence[Message],
    max_tokens: int | None,
    settings: Settings | None,
    tools: Sequence[Any] | None,
) -> Prompt:
    template = _template(tokenizer)
    first = 1 if messages[0]["role"] == "system" else 0
    # A reply that the model continues is written after the prompt by itself: a template would end its turn.
    begun: list[int] = []
    if messages[-1]["role"] == "assistant":
        begun = tokenizer.encode_continuation(text_of(messages[-1]["content"]))
        messages = messages[:-1]
    plain = _for_template(messages)
    questions = [number for number, message in enumerate(messages) if number >= first and message["role"] == "user"]

    def prompt(oldest: int) -> list[int]:
        shortened = [*plain[:first], *plain[oldest:]]
        rendered = template.render(shortened, tools, add_generation_prompt=True, settings=settings)
        return tokenizer.encode_rendered(rendered)[0] + begun

    # Each possible beginning gives another text, and the later it begins, the shorter it is: a few are tried.
    ids = prompt(first)
    if max_tokens is None or len(ids) <= max_tokens or len(questions) < 2:
        return Prompt(ids, first)
    earlier = questions[1:-1]  # the first is too long, and the last always stays
    fitting = bisect.bisect_left(earlier, True, key=lambda oldest: len(prompt(oldest)) <= max_tokens)
    oldest = [*earlier, questions[-1]][fitting]
    return Prompt(prompt(oldest), oldest)


def _continuation_by_template(
    tokenizer: ImportedTokenizer,
    question: Sequence[Message],
    messages: Sequence[Message],
    is_complete: bool,
    tools: Sequence[Any] | None,
) -> list[int]:
    # A template writes whole conversations. What follows a reply is found in one, after the token that ends the reply:
    #
    #     question            <|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n
    #     + reply, messages   <|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\nOK<|im_end|>\n<|im_start|>...
    #     continuation                                                             <|im_end|>\n<|im_start|>...
    #
    # Any reply will do, because the continuation does not depend on it. That holds where a template leaves a reply as
    # it is once others follow. Qwen3's drops the thoughts of replies before the last user's message, so the trial has
    # some: its models can call tools, and cannot play a game in which the user speaks.
    template = _template(tokenizer)
    plain = _for_template(question)
    prompt = template.render(plain, tools, add_generation_prompt=True).text
    ends = {name for name, index in tokenizer.special_ids.items() if index in tokenizer.reply_ends}
    has_thoughts = any("</think>" in source for source in template.sources.values())
    texts = ["<think>\nOK\n</think>\n\n", "OK"] if has_thoughts else ["OK"]
    after: list[int] = []
    for text in texts:
        reply: Message = {"role": "assistant", "content": text}
        following = _for_template(messages)
        if messages[0]["role"] == "tool":  # templates want to see its call
            function = {"name": messages[0].get("name", "tool"), "arguments": {}}
            reply["tool_calls"] = [{"id": CALL_ID, "type": "function", "function": function}]
            following = [{"tool_call_id": CALL_ID, **message} for message in following]
        whole = template.render([*plain, reply, *following], tools, add_generation_prompt=True)
        end = next((start for start, _, name in whole.specials if start >= len(prompt) and name in ends), None)
        is_kept = whole.text.startswith(prompt) and text.strip() in whole.text[len(prompt) : end]
        if end is None or not is_kept:
            what = "thoughts (<think>) of a reply out" if text != "OK" else "a reply not as it was"
            raise UserError(
                f"this model's chat template leaves {what} once a message by {messages[0]['role']} follows it, so "
                "episodes of several turns would be other texts than those of its chats: choose another environment or "
                "model, or put a chat_template.jinja that keeps replies next to its tokenizer.json"
            )
        specials = [(start - end, stop - end, name) for start, stop, name in whole.specials if start >= end]
        after = tokenizer.encode_rendered(RenderedText(whole.text[end:], specials, []))[0]
    return after[1:] if is_complete else after


def _parse_by_template(tokenizer: ImportedTokenizer, ids: Iterable[int]) -> list[Part]:
    special = set(tokenizer.special_ids.values())
    tokens = []
    for token in ids:
        if token in tokenizer.reply_ends:
            break
        if token not in special:
            tokens.append(token)
    text = tokenizer.decode(tokens)
    return [{"type": "text", "text": text}] if text else []
