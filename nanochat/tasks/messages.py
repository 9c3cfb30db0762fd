"""Messages as other projects write them, one by one: their roles, what is learned of them, calls, thoughts.

    role, from           user, assistant, system, tool; human, gpt, bot, observation and others below, in any case
    content, value       a text, or a list of parts
    train, loss, weight  false or 0: the message is read, but not learned (ours, ms-swift's, OpenAI's)
    reasoning_content    the thought before a reply, with <think> and </think> or without; "reasoning" and "thinking"
                         mean the same
    tool_calls           functions that the assistant calls, in OpenAI's form; a message of the role function_call or
                         tool_call, whose content is {"name", "arguments"} or a list of them, is such a message too

A thought becomes a part of the reply, in the marks that most families have: `<think>`, a line, `</think>`. A template
with a field for thoughts gets it in that field (families/chat_format.py).
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from nanochat.conversation import Message, check_message, parts_of, text_of
from nanochat.data.formats import without_nulls
from nanochat.tasks.columns import MEDIA
from nanochat.tasks.forms import parsed

# What other projects call the roles.
SENDERS = {
    "human": "user", "prompter": "user", "用户": "user",
    "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant", "model": "assistant", "ai": "assistant",
    "助手": "assistant",
    "developer": "system", "系统": "system",
    "observation": "tool", "observations": "tool", "tool_response": "tool", "ipython": "tool",
    "function_response": "tool", "function": "tool",
}  # fmt: skip
CALLERS = ("function_call", "tool_call")  # roles of messages that are a call, as text
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
MARKS = ("train", "loss", "weight", "loss_scale")  # what says whether a message is learned
PLAIN = {"role", "content"}
USUAL = {*PLAIN, "from", "value"}
READ = {*USUAL, "tool_calls", "tool_call_id", *THOUGHTS, *MARKS}
# A thought at the beginning of a reply, as Qwen's and DeepSeek's models write it.
THOUGHT = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
# What other tools replace before a model reads it: names, in their chats about the model itself, and files.
UNFILLED = re.compile(r"\{\{(?:NAME|AUTHOR|name|author)\}\}")
PLACES = r"<(?:image|video|audio)_\d+>|<ImageHere>|<\|(?:image|video|audio|vision)\w*\|>|<img>[^<>\n]+</img>"
PLACE = re.compile(rf"<(?:image|video|audio)>|{PLACES}")
# Where a row has no column of files, <image> may also be a word: it has to begin or end a line of the user's.
PLACE_OF_USER = re.compile(rf"^\s*<(?:image|video|audio)>|<(?:image|video|audio)>\s*$|{PLACES}", re.MULTILINE)
HTML = re.compile(r"</(?!img>)")
# Marks of chat templates, and <image> where it may also be a word.
SPELLED = re.compile(
    r"<\|\w+\|>|<\uff5c[^<>\s]+>|\[/?INST\]|<(?:start|end)_of_turn>|</s>|<[be]os>"
    r"|<<SYS>>|<(?:image|video|audio|bbox|ref-object)>|\{\{ ?(?:NAME|AUTHOR|name|author) ?\}\}"
)
LOST = re.compile("[\0\ufffd\ud800-\udfff]")  # what is left of a character after a wrong conversion
# Names in a turn that is one object: {"human": "...", "assistant": "..."}, or {"input": "...", "output": "..."}.
ASKED = ("human", "user", "input")
REPLIED = ("assistant", "gpt", "bot", "output")


def check_messages(messages: Any, *, may_lack_replies: bool = False) -> None:
    """Raises ValueError: for anything that is not a conversation; names the message and the mistake.

    `may_lack_replies`: a message of the user may follow another one, whose reply the model will write.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError("a conversation is a non-empty list of messages")
    for number, message in enumerate(messages):
        check_message(number, message)

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
        elif role == "user":
            expected = ["assistant", "user"] if may_lack_replies else ["assistant"]
        else:
            expected = ["assistant", "tool"]


def next_reply(messages: Sequence[Message]) -> int:
    """The place of the first reply that a conversation lacks: between two messages of the user, or at the end."""
    for place, (message, following) in enumerate(pairwise(messages), 1):
        if message["role"] == following["role"] == "user":
            return place
    return len(messages)


def plain_messages(messages: Any) -> Any:
    """A list of messages as this project has them, still unchecked.

    A call that is a message of its own joins the reply or the call before it, and so does a second text of the user or
    of the assistant, after a blank line. System messages join at the beginning, as in the server.
    Raises ValueError: with the problem.
    """
    if not isinstance(messages, list):
        return messages
    joined: list[Any] = []
    for message in sorted(_turns(messages), key=_follows_system):
        one = plain(message)
        is_call = isinstance(one, dict) and "tool_calls" in one and _role(_with_plain_keys(message)) in CALLERS
        before = joined[-1] if joined else None
        if is_call and isinstance(before, dict) and before.get("role") == "assistant":
            if before.get("train", True) != one.get("train", True):
                raise ValueError("a call and the reply before it are one turn: mark both as learned, or none")
            joined[-1] = {
                **before,
                "content": text_of(before["content"]) + one["content"],
                "tool_calls": [*before.get("tool_calls", []), *one["tool_calls"]],
            }
        elif isinstance(before, dict) and isinstance(one, dict) and _is_one_turn(before, one):
            between = "\n" if one["role"] == "system" else "\n\n"
            joined[-1] = {**before, "content": f"{before['content']}{between}{one['content']}"}
        else:
            joined.append(one)
    return joined


def systems_in(messages: Sequence[Any]) -> list[Any]:
    """The contents of the system messages among unchecked messages."""
    return [plain(message).get("content") for message in messages if not _follows_system(message)]


def _follows_system(message: Any) -> bool:
    return not (isinstance(message, dict) and _role(_with_plain_keys(message)) == "system")


def _is_one_turn(before: dict[str, Any], one: dict[str, Any]) -> bool:
    """Whether two messages in a row are one turn, in two texts."""
    # A mark counts for the whole turn, and a thought stands at its beginning.
    return (
        isinstance(before.get("content"), str)
        and isinstance(one.get("content"), str)
        and before.keys() <= {*PLAIN, "train"}
        and before.get("role") in ("system", "user", "assistant")
        and {**before, "content": ""} == {**one, "content": ""}
        and not one["content"].lstrip().startswith("<think>")
    )


def plain(message: Any) -> Any:
    """A message without other keys: a column of a .parquet has in each message every key that any of them has.

    Raises ValueError: for a call of a function that cannot be read, and for a mark that is neither true nor false.
    """
    if not isinstance(message, dict):
        return message
    if message.keys() == PLAIN and message["role"] in ("user", "assistant", "system"):  # most are, and data are large
        content = message["content"]
        if isinstance(content, str) and not (message["role"] == "assistant" and "think>" in content):
            return message
    message = _with_plain_keys(message)
    if message.get("function_call"):
        raise ValueError("a message calls a function by function_call: only tool_calls are read")
    role = _role(message)
    content = _one_of(message, "content", "value")
    if isinstance(content, list) and content and all(_is_text(part) for part in content):
        content = text_of(content)
    # The answer to a sum.
    if isinstance(content, int | float) and not isinstance(content, bool) and math.isfinite(content):
        content = str(content)
    for name in MEDIA:
        if message.get(name):
            raise ValueError(f'a message has "{name}": models here read only text')
    read = {"role": role, "content": content, "train": _train(message)}
    calls = parsed(message.get("tool_calls"), "tool_calls")
    if role in CALLERS:
        thought, calls = _call_in_text(content)
        read |= {"role": "assistant", "content": thought}
    if calls:
        if not isinstance(calls, list):
            raise ValueError("tool_calls is not a list")
        read["content"] = "" if read["content"] is None else read["content"]
        read["tool_calls"] = [call_of(call) for call in calls]
    if read["role"] == "assistant":
        read["content"] = _with_thought(message, read["content"])
    if message.get("tool_call_id"):
        read["tool_call_id"] = message["tool_call_id"]
    if role == "tool" and message.get("name"):
        read["name"] = message["name"]
    return {key: value for key, value in read.items() if value is not None}


def refuse_placeholders(messages: Sequence[Message], columns: Iterable[Any]) -> None:
    """Raises ValueError: for a text with a mark that another tool replaces: a model would learn the mark itself.

    `columns`: of the record, also those that are not read.
    """
    has_media = any(isinstance(name, str) and name in MEDIA for name in columns)
    for message in messages:
        text = text_of(message["content"])
        if "{{" in text and "```" not in text and (name := UNFILLED.search(text)):
            raise ValueError(
                f"it has {name[0]}, which other tools replace by a name: write the name into the file, for example "
                f"sed -i 's/{name[0]}/.../g'"
            )
        if "<" not in text or not (has_media or (message["role"] == "user" and HTML.search(text) is None)):
            continue
        if place := (PLACE if has_media else PLACE_OF_USER).search(text):
            what = "the place of an image, video or sound"
            raise ValueError(f"it has {place[0].strip()}, {what}: models here read only text")


def spelled_marks(text: str) -> list[str]:
    """The marks in a text that a chat template would write between messages. A model learns them as letters."""
    return SPELLED.findall(text) if any(mark in text for mark in "<[{") else []


def unread_keys(messages: Any) -> Counter[str]:
    """The keys in a list of messages that nothing reads, and in how many of its messages they are."""
    counts: Counter[str] = Counter()
    for message in _turns(messages) if isinstance(messages, list) else []:
        if not isinstance(message, dict) or message.keys() <= USUAL:
            continue
        message = _with_plain_keys(message)
        role = _role(message)
        read = READ | {"name"} if role == "tool" else READ
        if role in ("user", "system", "tool"):
            read = read - set(THOUGHTS)
        counts.update(str(key) for key, value in message.items() if value is not None and key not in read)
        mark = next((key for key in MARKS if message.get(key) is not None), None)
        if mark is not None and message[mark] and role in ("user", "system", "tool"):
            counts[f"{mark}={json.dumps(message[mark])} of the role {role}, which is never learned"] += 1
    return counts


def given(messages: Sequence[Any]) -> list[Any]:
    """The messages of a prompt: its replies are read, and learned only if they are marked so."""
    found = []
    for message in _turns(messages):
        is_reply = isinstance(message, dict) and _is_reply(message)
        if is_reply and all(message.get(mark) is None for mark in MARKS):
            message = {**message, "train": False}
        found.append(message)
    return found


def _is_reply(message: dict[str, Any]) -> bool:
    return _role(_with_plain_keys(message)) in ("assistant", *CALLERS)


def begun_reply(prompt: Sequence[Any]) -> list[Message]:
    """The words of the assistant at a prompt's end, which a sampled reply continues, as in TRL; often none. Unlike the
    thought of a reply, theirs may be open.

    Raises ValueError: for a call of a function.
    """
    last = _with_plain_keys(prompt[-1]) if prompt and isinstance(prompt[-1], dict) else {}
    if not last or not _is_reply(last):
        return []
    text = _one_of(last, "content", "value")
    if isinstance(text, list) and all(map(_is_text, text)):
        text = text_of(text)
    thought = _thought_of(last)
    if len(prompt) > 1 and isinstance(prompt[-2], dict) and _is_reply(prompt[-2]):
        raise ValueError("its prompt ends with two messages of the assistant: join them")
    if not isinstance(text, str) or last.get("tool_calls") or _role(last) != "assistant":
        raise ValueError("its prompt ends with a call of a function, or with other words than a text: leave them out")
    return [{"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\n{text}" if thought else text}]


def with_thought(messages: Sequence[Any], thought: str) -> list[Any]:
    """A reply, given as messages, with a thought that its record has in a column.

    Raises ValueError: where several messages could have it.
    """
    replies = [number for number, message in enumerate(messages) if isinstance(message, dict) and _is_reply(message)]
    if len(replies) != 1:
        raise ValueError("it has a thought in a column, and not one reply that it is for")
    [number] = replies
    reply = messages[number]
    key = next((key for key in THOUGHTS if not reply.get(key)), None)
    if key is None:
        raise ValueError("it has a thought in a column, and its reply has one of its own")
    return [*messages[:number], {**reply, key: thought}, *messages[number + 1 :]]


def thoughts_in(messages: Iterable[Any]) -> int:
    """How many replies in a conversation have a thought."""
    return sum(message["role"] == "assistant" and bool(_split(message)[0]) for message in messages)


def without_thoughts(messages: Sequence[Message]) -> list[Message]:
    """A conversation without the thoughts of its replies."""
    return [
        {**message, "content": _split(message)[1]} if message["role"] == "assistant" else message
        for message in messages
    ]


def call_of(call: Any) -> dict[str, Any]:
    """A call of a function as chat templates read it: with an object of arguments. Raises ValueError: without one."""
    function = call.get("function") if isinstance(call, dict) else None
    fields = function if isinstance(function, dict) else {}
    # Llama's calls have "parameters".
    written = fields.get("arguments") or fields.get("parameters") or {}
    arguments = parsed(written, "the arguments of a function")
    if not isinstance(fields.get("name"), str) or not isinstance(arguments, dict):
        raise ValueError("a call in tool_calls has no function with a name and an object of arguments")
    if written is arguments:  # data that were once in a .parquet have the names of all arguments in each call
        arguments = without_nulls(arguments)
    identity = {"id": call["id"]} if call.get("id") else {}
    return {**identity, "type": "function", "function": {"name": fields["name"], "arguments": arguments}}


def _turns(messages: Sequence[Any]) -> Sequence[Any]:
    """Messages, where a list may have turns of a question with its answer: old ms-swift's and xtuner's."""
    if all(isinstance(message, dict) and ("role" in message or "from" in message) for message in messages):
        return messages
    found: list[Any] = []
    for message in messages:
        fields = _with_plain_keys(message) if isinstance(message, dict) else {}
        asked = next((key for key in ASKED if key in fields), None)
        replied = next((key for key in REPLIED if key in fields), None)
        if "role" in fields or "from" in fields or asked is None or replied is None:
            found.append(message)
            continue
        rest = {key: value for key, value in fields.items() if key not in (asked, replied, "system")}
        if fields.get("system"):
            found.append({"role": "system", "content": fields["system"]})
        found.append({"role": "user", "content": fields[asked]})
        found.append({"role": "assistant", "content": fields[replied], **rest})
    return found


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _with_plain_keys(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its keys in lower case, where it would have no role otherwise."""
    if "role" in message or "from" in message:
        return message
    return {str(key).strip().lower(): value for key, value in message.items()}


def _role(message: dict[str, Any]) -> Any:
    """The role of a message with plain keys, by the name that it has here."""
    role = message.get("role")
    if role is None:
        role = message.get("from")
    return _known_role(role) if isinstance(role, str) else role


def _one_of(message: dict[str, Any], first: str, second: str) -> Any:
    """The value under one of two names. Raises ValueError: when there are two different values."""
    values = [message[name] for name in (first, second) if message.get(name) is not None]
    if len(values) == 2 and values[0] != values[1]:
        raise ValueError(f'a message has both "{first}" and "{second}", and they differ: leave one out')
    return values[0] if values else None


@lru_cache(maxsize=256)
def _known_role(role: str) -> str:
    name = role.strip().lower()
    name = SENDERS.get(name, name)
    return name if name in ("user", "assistant", "system", "tool", *CALLERS) else role


def _train(message: dict[str, Any]) -> bool | None:
    """Whether a message is learned, as its marks say; None where they say nothing, or that it is.

    Raises ValueError: for another value, and for marks that contradict each other: the wrong reply would be learned.
    """
    marks: dict[str, bool] = {}
    for mark in MARKS:
        value = message.get(mark)
        if isinstance(value, str):
            value = {"false": False, "true": True}.get(value.strip().lower(), value)
        if value not in (None, 0, 1):  # false and true are equal to them
            raise ValueError(f'a message has "{mark}": {json.dumps(value)}: only true, false, 1 and 0 are known')
        if value is not None:
            marks[mark] = bool(value)
    if len(set(marks.values())) > 1:
        raise ValueError(f"the marks {' and '.join(marks)} of a message contradict each other")
    return False if False in marks.values() else None


def _with_thought(message: dict[str, Any], content: Any) -> Any:
    """The content of a reply with its thought before it, if that is a field of its own."""
    thought = _thought_of(message)
    if isinstance(content, str) and ("<think>" in content or "</think>" in content):
        content = _in_marks(content)
    if not thought or not isinstance(content, str | list):
        return content
    lead = f"<think>\n{thought}\n</think>\n\n"
    if isinstance(content, list):
        return [{"type": "text", "text": lead}, *content]
    found = THOUGHT.match(content)  # some data sets have it in both places
    if found is None:
        return lead + content.lstrip("\n")
    if found[1].strip() not in ("", thought):
        raise ValueError("a reply has two thoughts, one in a field of its own and another in its text")
    return lead + content[found.end() :]


def _thought_of(message: dict[str, Any]) -> str:
    """The thought that is a field of a reply, without marks; an empty text where there is none.

    Raises ValueError: for a thought that is not a text, that has marks inside, and for two that differ.
    """
    thoughts: dict[str, str] = {}
    for key in THOUGHTS:
        value = message.get(key)
        if not value:
            continue
        if not isinstance(value, str):
            raise ValueError(f"the thought of a reply ({key}) is not a text")
        thought = value.strip().removeprefix("<think>").removesuffix("</think>").strip()
        if "<think>" in thought or "</think>" in thought:
            raise ValueError(f"the thought of a reply ({key}) has a mark of a thought inside")
        if thought:
            thoughts[key] = thought
    if len(set(thoughts.values())) > 1:
        raise ValueError(f"a reply has two thoughts, under {' and '.join(thoughts)}: leave one out")
    return next(iter(thoughts.values()), "")


def _in_marks(content: str) -> str:
    """A reply whose text has a thought, with both of its marks. Models whose prompt ends with <think> write only the
    second, and so do their data.

    Raises ValueError: where the thought does not begin the reply, or does not end: a template would drop the text
    before it, or the model would learn a thought without an end.
    """
    before, mark, rest = content.partition("<think>")
    if not mark or "</think>" in before:
        before, _, rest = content.partition("</think>")
        content = f"<think>\n{before.strip()}\n</think>\n\n{rest.strip()}"
        before = ""
    elif "</think>" not in rest:
        if before.strip():  # the text only mentions the mark
            return content
        raise ValueError("a thought (<think>) of a reply does not end")
    if before.strip() or "<think>" in rest.partition("</think>")[2]:
        raise ValueError("a thought (<think>) stands within a reply, and not at its beginning")
    return content


def _split(message: Message) -> tuple[str, Any]:
    """The thought of a reply, or an empty text, and its content without the thought."""
    content = message["content"]
    if isinstance(content, str) and "</think>" not in content:
        return "", content
    parts = parts_of(content)
    first = parts[0] if parts and parts[0].get("type") == "text" else {"text": ""}
    found = THOUGHT.match(first["text"])
    if found is None:
        return "", content
    rest = first["text"][found.end() :]
    return found[1].strip(), rest if isinstance(content, str) else [{**first, "text": rest}, *parts[1:]]


def _call_in_text(content: Any) -> tuple[str, list[Any]]:
    """The thought before a call that is written as text, and its functions. Raises ValueError: when it is not JSON."""
    text = content if isinstance(content, str) else ""
    thought, json_text = "", text
    if found := THOUGHT.match(text):
        thought, json_text = found[0], text[found.end() :]
    calls = parsed(json_text, "a call of a function") if isinstance(content, str) else content
    functions = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else call
        if isinstance(function, dict) and (unread := set(function) - {"name", "arguments", "parameters", "id", "type"}):
            raise ValueError(f"a call of a function has {', '.join(sorted(unread))}, and not only name and arguments")
        functions.append({"function": function})
    return thought, functions
