"""The chat format: messages <-> token ids and a loss mask.

A conversation is a list of messages `{"role": ..., "content": ...}`: at most one `system` message at the beginning,
then `user` and `assistant` in turn. A content is a text, or a list of parts `{"type": ..., "text": ...}` of the types
`text`, `python` (the assistant calls its tool) and `python_output` (the tool's result).

SFT, RL, evaluation, the terminal chat and the server all call `render`, `render_prompt` and `parse_reply`, and nothing
else writes a chat: a model must be served exactly the format that it was trained on. One token of difference costs
quality, and nothing reports it.

`ChatFormat` is the format of this project. A tokenizer of another family carries a subclass, which renders the family's
template. There messages may also have `tool_calls` and the role `tool`, and `tools` are the functions that the template
describes. In our format a message of the role `tool`, which environments write (task.py), is a user's turn.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nanochat.ground.cli import UserError
from nanochat.tokenizer import Tokenizer

Message = dict[str, Any]  # {"role": str, "content": str | list[Part], "train"?: bool}
Part = dict[str, str]  # {"type": str, "text": str}
Settings = Mapping[str, Any]  # variables of a family's template, such as enable_thinking

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
# turn. It has a 0 under the text of the others: the system, the user, the tool. Learning the tool's results would teach
# the model to make them up. `<|assistant_start|>` has a 0 because every prompt ends with it.
#
# Special tokens are inserted by id. A message that spells one out is plain text (tokenizer.py), so no message can end
# its own turn or begin the turn of another role.

ROLES = ("system", "user", "assistant", "tool")
# The special tokens around each type of part; a text has none.
MARKS = {
    "text": ("", ""),
    "python": ("<|python_start|>", "<|python_end|>"),
    "python_output": ("<|output_start|>", "<|output_end|>"),
}


class UnrenderableChat(UserError):
    """A chat format cannot write a conversation."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as tokens."""

    ids: list[int]
    mask: list[int]  # 1 under each token that the assistant chooses
    cut: bool = False  # it was longer than max_tokens: its end is missing
    replies: int = 0  # the assistant's replies that the model should learn
    unlearned: int = 0  # replies that the template does not write as the model would: not learned
    reply_tokens: int = 0  # tokens of all replies, before anything was left out or cut

    @property
    def target_count(self) -> int:
        """Tokens to learn from; 0 where every assistant part is empty, masked or cut off."""
        return sum(self.mask)


@dataclass(frozen=True)
class Prompt:
    """The text that a model reads before its reply."""

    ids: list[int]
    oldest: int  # index of the oldest message that it reads, the system message aside


def parts_of(content: str | Sequence[Part]) -> list[Part]:
    """A content as parts; a plain text is one part."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def text_of(content: str | Sequence[Part]) -> str:
    """The text that a reader sees: a content without calls and their results."""
    # "It is " + call + result + "5." -> "It is 5."
    return "".join(part["text"] for part in parts_of(content) if part["type"] == "text")


def check_message(number: int, message: Any) -> None:
    """Raises ValueError: for anything that is not a message; `number` is its place in the conversation."""
    # Others write data, requests and environments. This names the mistake, before rendering would fail with a KeyError.
    if not isinstance(message, dict):
        raise ValueError(f"message {number} is not an object with role and content")
    role = message.get("role")
    content = message.get("content")
    if role not in ROLES:
        raise ValueError(f"message {number} has the role {role!r}: {', '.join(ROLES)}")
    if not isinstance(content, str | list):
        has = "no content" if content is None else f"{content!r:.40} as its content"
        raise ValueError(f"message {number} ({role}) has {has}: write a text, or a list of parts")
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


# ---------------------------------------------------------------------- what the rest of the code calls


def chat_format(tokenizer: Tokenizer) -> "ChatFormat":
    """The format of the model that reads these tokens."""
    return tokenizer.chat_format or ChatFormat(tokenizer)


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    max_tokens: int | None = None,
    tools: Sequence[Any] | None = None,
) -> Rendered:
    """The last of `renderings`, in which the last reply is learned."""
    return renderings(tokenizer, messages, max_tokens, tools)[-1]


def renderings(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    max_tokens: int | None = None,
    tools: Sequence[Any] | None = None,
) -> list[Rendered]:
    """All that a model learns from a conversation, as token ids with a loss mask, each cut off after `max_tokens`.

    Before every learned reply are the ids that `render_prompt` gives for the messages before it. The format of this
    project writes all of them in one rendering. A template that writes earlier turns in another way needs several.

    Raises UnrenderableChat: when the format refuses the conversation. Raises UserError: when a model has no format.
    """
    found = chat_format(tokenizer).renderings(messages, tools)
    if max_tokens is None:
        return found
    # Training cuts the end off, because each target needs all that precedes it and nothing that follows.
    for number, one in enumerate(found):
        if len(one.ids) > max_tokens:
            found[number] = replace(one, ids=one.ids[:max_tokens], mask=one.mask[:max_tokens], cut=True)
    return found


def render_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    max_tokens: int | None = None,
    settings: Settings | None = None,
    tools: Sequence[Any] | None = None,
) -> list[int]:
    """Token ids of a conversation up to where the reply begins, or up to the end of a reply that the model continues.

    `settings` and `tools` are for a template (ChatFormat).
    Raises UserError: when the system message and the last message together are longer than `max_tokens`.
    """
    ids = chat_format(tokenizer).shorten(messages, max_tokens, settings, tools).ids
    if max_tokens is not None and len(ids) > max_tokens:
        raise UserError(f"the message has {len(ids)} tokens, there is room for {max_tokens}: shorten it")
    return ids


def fit_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    context: int,
    reply_tokens: int | None = None,
    settings: Settings | None = None,
    tools: Sequence[Any] | None = None,
) -> Prompt:
    """The prompt of a chat of any length. 3/8 of the context, but at most `reply_tokens`, stay free for the reply.

    The system message and the last message always stay; if they are longer than that, the reply gets the rest.
    """
    # 3/8 are 192 of the demo's 512 tokens: 99 of 100 stories are shorter. With an eighth 7 of 12 second stories in a
    # chat ended in mid-sentence (2026-11-22); with half it forgets its first one 64 tokens earlier.
    room = min(reply_tokens or context, 3 * context // 8)
    return chat_format(tokenizer).shorten(messages, context - room, settings, tools)


def parse_reply(tokenizer: Tokenizer, ids: Iterable[int]) -> list[Part]:
    """The parts of an assistant's tokens, as generated after a prompt: the inverse of `render` for one message."""
    return chat_format(tokenizer).parse(ids)


# ---------------------------------------------------------------------- the format of this project


class ChatFormat:
    """How a model's conversations become tokens, and its tokens messages: turns between special tokens, as in the
    picture above.

    Every method but `parse` raises UnrenderableChat: when the format refuses the conversation; a subclass raises
    UserError: when the model has no chat format. `settings` and `tools` are for templates.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Rendered:
        """Token ids and loss mask of a whole conversation."""
        if any(message.get("tool_calls") or message["role"] == "rendered" for message in messages):
            what = "it is a rendered text" if messages[0]["role"] == "rendered" else "it calls functions (tool_calls)"
            hint = "leave it out, or name another --source"
            raise UnrenderableChat(f"{what}, for which only models with a chat template have a format: {hint}")
        ids = [self.tokenizer.get_bos_token_id()]
        mask = [0]
        replies = 0
        for message in messages:
            turn, turn_mask = self._turn(message)
            ids += turn
            mask += turn_mask
            replies += turn_mask[-1]
        return Rendered(ids, mask, replies=replies, reply_tokens=sum(mask))

    def renderings(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[Rendered]:
        """The conversation, once or several times, so that each reply follows its prompt in one of them."""
        return [self.render(messages, tools)]

    def _turn(self, message: Message) -> tuple[list[int], list[int]]:
        """One message as token ids and a mask."""
        role = "user" if message["role"] == "tool" else message["role"]
        # Skip an empty part: marks around nothing would be a call without an expression.
        parts = [part for part in parts_of(message["content"]) if part["text"]]
        # A message with `"train": false` is only context. So is an empty reply: the model would learn to end its turn
        # at once.
        learned = role == "assistant" and bool(parts) and message.get("train", True)
        # The mark of the role opens the turn.
        ids = [self.tokenizer.encode_special(f"<|{role}_start|>")]
        mask = [0]
        # Each part is encoded separately, so that a tool's result has the same tokens here as in the engine, which
        # encodes only the result.
        for part in parts:
            start, end = MARKS[part["type"]]
            tokens = self.tokenizer.encode(part["text"], prepend=start or None, append=end or None)
            ids += tokens
            mask += [int(learned and part["type"] != "python_output")] * len(tokens)
        # The end of a turn is the assistant's choice too: this is where it learns to stop.
        ids.append(self.tokenizer.encode_special(f"<|{role}_end|>"))
        mask.append(int(learned))
        return ids, mask

    def shorten(
        self,
        messages: Sequence[Message],
        max_tokens: int | None = None,
        settings: Settings | None = None,
        tools: Sequence[Any] | None = None,
    ) -> Prompt:
        """Everything up to where the reply begins, or up to the end of a reply that the model continues.

        It drops as few of the oldest turns as `max_tokens` requires. The system message and the last message always
        stay, so the prompt may still be longer.
        """
        # A prompt is the beginning of `render`'s result for the conversation with its reply: the model has seen
        # exactly this in training. A conversation that is too long loses its oldest turns, where training loses the
        # end: the reply must follow the newest question. For example:
        #
        #     messages    system  user 1  reply 1  user 2  reply 2  user 3
        #     prompt      <|bos|> system           user 2  reply 2  user 3  <|assistant_start|>
        first = 1 if messages[0]["role"] == "system" else 0
        # The reply so far: its mark, and the text that the model continues. The end of its turn is missing.
        reply = [self.tokenizer.encode_special("<|assistant_start|>")]
        if messages[-1]["role"] == "assistant":
            reply = self.render(messages[-1:]).ids[1:-1]
            messages = messages[:-1]
        assert messages[-1]["role"] == "user" and (len(messages) - first) % 2 == 1

        # Every prompt has the begin token, the system message and the question.
        head = self.render(messages[:first]).ids
        question = self.render(messages[-1:]).ids[1:]  # only the conversation has a begin token, not each turn
        question += reply
        length = len(head) + len(question)

        # Add earlier turns, from the newest to the oldest, while they fit. A turn is a user's message and its reply: in
        # training every question has its reply, so both stay or both go. The first turn that does not fit ends the
        # search, so that no turn is missing from the middle.
        turns: list[list[int]] = []
        oldest = len(messages) - 1
        for index in range(len(messages) - 3, first - 1, -2):
            turn = self.render(messages[index : index + 2]).ids[1:]
            length += len(turn)
            if max_tokens is not None and length > max_tokens:
                break
            turns.append(turn)
            oldest = index

        ids = head
        for turn in reversed(turns):
            ids += turn
        return Prompt(ids + question, oldest)

    def continuation(
        self,
        question: Sequence[Message],
        messages: Sequence[Message],
        is_complete: bool,
        tools: Sequence[Any] | None = None,
    ) -> list[int]:
        """Token ids between a sampled reply and the next one: the end of the reply's turn, unless the reply
        `is_complete` and has one; then the `messages` that follow, and the mark of the next reply. `question` begins
        the conversation.

        The reply keeps the tokens that were sampled: its text, encoded again, may give others.
        Raises UserError: when a template changes a reply once other messages follow it.
        """
        end = [] if is_complete else [self.tokenizer.encode_special("<|assistant_end|>")]
        return end + self.render(messages).ids[1:] + [self.tokenizer.encode_special("<|assistant_start|>")]

    def parse(self, ids: Iterable[int]) -> list[Part]:
        """The parts of a reply: the inverse of `render` for one message. A model can write anything, so it never
        raises."""
        # "It is " <|python_start|> "2+3" <|python_end|> <|output_start|> "5" <|output_end|> "5." <|assistant_end|>
        # becomes the parts text "It is ", python "2+3", python_output "5" and text "5.".
        #
        # A mark in the wrong place is dropped. A call without its end, because the reply was cut off there, becomes
        # text: a reader would see nothing of it, and rendered again it would be a call without a result.
        encode_special = self.tokenizer.encode_special
        opening = {encode_special(start): kind for kind, (start, _) in MARKS.items() if start}
        closing = {encode_special(end) for _, end in MARKS.values() if end}
        end_of_turn = encode_special("<|assistant_end|>")
        special = set(self.tokenizer.special_ids.values())
        # An opening mark begins a part of its type. The reply and every closing mark begin a text. Parts that stay
        # empty are dropped at the end.
        runs: list[tuple[str, list[int]]] = [("text", [])]  # (type, tokens) of each part
        for token in ids:
            if token == end_of_turn:
                break
            if token in opening:
                runs.append((opening[token], []))
            elif token in closing:
                runs.append(("text", []))
            elif token not in special:  # a role's mark in the middle of a reply is not text
                _, tokens = runs[-1]
                tokens.append(token)
        if runs[-1][0] == "python":
            runs[-1] = ("text", runs[-1][1])
        # Decode each part as a whole: a character may be spread over several tokens.
        return [{"type": kind, "text": self.tokenizer.decode(tokens)} for kind, tokens in runs if tokens]
