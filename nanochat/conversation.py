"""The chat format: messages <-> token ids and a loss mask. SFT, RL, evaluation, terminal and server render here only.

A conversation is a list of messages `{"role": ..., "content": ...}`: at most one `system` message, first, then
`user` and `assistant` in turn. A content is a text, or a list of parts `{"type": ..., "text": ...}` whose types are
`text`, `python` (the assistant calls its tool) and `python_output` (what the tool answered). As tokens:

    <|bos|> <|system_start|> ... <|system_end|> <|user_start|> ... <|user_end|>
    <|assistant_start|> 2 + 3 is <|python_start|> 2+3 <|python_end|>
    <|output_start|> 5 <|output_end|> 5. <|assistant_end|>

(without the spaces and line ends shown between the tokens). The mask has a 1 under every token that the assistant is
to choose: its text and its calls with their marks, and its end; not what the tool answered. A message with
`"train": false`, or an empty one, is never learned from (mid-training aside, which reads conversations as text).
Special tokens come from ids only: spelled out in a text they are plain text.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nanochat.shell.cli import UserError
from nanochat.tokenizer import Tokenizer

Message = dict[str, Any]  # {"role": str, "content": str | list[Part], "train"?: bool}
Part = dict[str, str]  # {"type": str, "text": str}

MARKS = {  # of a part inside the assistant's message; a text has none
    "text": ("", ""),
    "python": ("<|python_start|>", "<|python_end|>"),
    "python_output": ("<|output_start|>", "<|output_end|>"),
}


@dataclass(frozen=True)
class Rendered:
    """A conversation as tokens."""

    ids: list[int]
    mask: list[int]  # 1 under each token that the assistant is to choose
    cut: bool  # it was longer than asked for, and its end is missing

    @property
    def target_count(self) -> int:
        """Tokens to learn from; 0 where every assistant part is empty, masked or cut off."""
        return sum(self.mask)


def parts_of(content: str | Sequence[Part]) -> list[Part]:
    """A content as parts; a plain text is one part."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def text_of(content: str | Sequence[Part]) -> str:
    """What a reader sees of a content: its text, without calls and their answers."""
    return "".join(part["text"] for part in parts_of(content) if part["type"] == "text")


def check_messages(messages: Any) -> None:
    """Raises ValueError: saying what is wrong, for anything that is not a conversation."""
    if not isinstance(messages, list) or not messages:
        raise ValueError("a conversation is a list of messages, and not an empty one")
    turns = messages[1:] if isinstance(messages[0], dict) and messages[0].get("role") == "system" else messages
    for place, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"message {place} is no object with role and content")
        role, content = message.get("role"), message.get("content")
        if role not in ("system", "user", "assistant"):
            raise ValueError(f"message {place} has the role {role!r}: system, user or assistant")
        if not isinstance(content, (str, list)):
            raise ValueError(f"message {place} ({role}) has no content: a text, or a list of parts")
        for part in content if isinstance(content, list) else ():
            kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
            if kind not in tuple(MARKS) or not isinstance(text, str):
                raise ValueError(f"message {place} ({role}) has a part that is not type ({', '.join(MARKS)}) and text")
            if part["type"] != "text" and role != "assistant":
                raise ValueError(f"message {place} ({role}) has a {part['type']} part: only the assistant calls a tool")
        if not isinstance(message.get("train", True), bool):
            raise ValueError(f'message {place} ({role}): "train" is true or false')
    for place, message in enumerate(turns):
        expected = ("user", "assistant")[place % 2]
        if message["role"] != expected:
            place += len(messages) - len(turns)
            raise ValueError(f"message {place} is by {message['role']}, where {expected} is due")
    if not turns:
        raise ValueError("there is a system message and nothing else")


def render(tokenizer: Tokenizer, messages: Sequence[Message], max_tokens: int | None = None) -> Rendered:
    """Token ids and loss mask of a whole conversation, cut off behind `max_tokens`."""
    ids, mask = [tokenizer.get_bos_token_id()], [0]
    for message in messages:
        role, learned = message["role"], message["role"] == "assistant" and message.get("train", True)
        parts = [part for part in parts_of(message["content"]) if part["text"]]
        learned = learned and bool(parts)  # an empty reply would teach silence
        ids.append(tokenizer.encode_special(f"<|{role}_start|>"))
        mask.append(0)
        for part in parts:
            tokens = _encode_part(tokenizer, part)
            ids += tokens
            mask += [int(learned and part["type"] != "python_output")] * len(tokens)
        ids.append(tokenizer.encode_special(f"<|{role}_end|>"))
        mask.append(int(learned))
    if max_tokens is None or len(ids) <= max_tokens:
        return Rendered(ids, mask, False)
    return Rendered(ids[:max_tokens], mask[:max_tokens], True)


def render_prompt(tokenizer: Tokenizer, messages: Sequence[Message], max_tokens: int | None = None) -> list[int]:
    """Token ids up to where the assistant's reply to the last message (the user's) begins.

    Where that is more than `max_tokens`, the oldest turns are left out, never the system message or the question.
    Raises UserError: when even those are too long.
    """
    first = 1 if messages[0]["role"] == "system" else 0
    assert messages[-1]["role"] == "user" and (len(messages) - first) % 2 == 1
    head = render(tokenizer, messages[:first]).ids
    kept = [[*render(tokenizer, messages[-1:]).ids[1:], tokenizer.encode_special("<|assistant_start|>")]]
    length = len(head) + len(kept[0])
    if max_tokens is not None and length > max_tokens:
        raise UserError(f"the message has {length} tokens, there is room for {max_tokens}: shorten it")
    for place in range(len(messages) - 3, first - 1, -2):  # a question and its answer, the newest first
        turn = render(tokenizer, messages[place : place + 2]).ids[1:]
        length += len(turn)
        if max_tokens is not None and length > max_tokens:
            break
        kept.append(turn)
    return [*head, *(token for turn in reversed(kept) for token in turn)]


def parse_reply(tokenizer: Tokenizer, ids: Iterable[int]) -> list[Part]:
    """The parts of an assistant's tokens, as generated behind a prompt: the inverse of `render` for one message.

    Ends at the assistant's end. Marks out of place are dropped; a call that was not closed is still a call.
    """
    opening = {tokenizer.encode_special(start): kind for kind, (start, _) in MARKS.items() if start}
    closing = {tokenizer.encode_special(end) for _, end in MARKS.values() if end}
    end = tokenizer.encode_special("<|assistant_end|>")
    special = set(tokenizer.special_ids.values())
    runs: list[tuple[str, list[int]]] = [("text", [])]
    for token in ids:
        if token == end:
            break
        if token in opening:
            runs.append((opening[token], []))
        elif token in closing:
            runs.append(("text", []))
        elif token not in special:
            runs[-1][1].append(token)
    return [{"type": kind, "text": tokenizer.decode(run)} for kind, run in runs if run]


def _encode_part(tokenizer: Tokenizer, part: Part) -> list[int]:
    start, end = MARKS[part["type"]]
    return tokenizer.encode(part["text"], prepend=start or None, append=end or None)
