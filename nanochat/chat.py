"""A conversation with a model in two lines of Python.

    chat = Chat("sft")
    print(chat("What is 47 + 38?"))

`stream` has the four steps of every chat here, on the command line and in the server too: messages become a prompt, the
engine generates, its tokens become a message again, and the next prompt begins with both.
"""

import difflib
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from nanochat.checkpoint_manager import load_model
from nanochat.conversation import Message, fit_prompt, parse_reply, text_of
from nanochat.engine import Engine
from nanochat.ground.cli import UserError, check_ranges
from nanochat.sampling import SamplingParams

HALF_A_CHARACTER = "\ufffd"  # how the first bytes of a character are decoded, until a later token has the others


class Chat:
    """A model, and the conversation with it so far: `messages`.

    `source` is a stage, a folder or hf:ORG/NAME, as for --source, or an Engine; "auto" is the furthest stage. `device`
    is "npu:0", "cuda:0", "cpu", or nothing for the best one here. A reply has at most `max_tokens` tokens. `sampling`
    names fields of SamplingParams, such as temperature=0.0; the others are the checkpoint's.
    Raises UserError: when the checkpoint does not exist or cannot be used, an argument has a wrong name, type or value,
    or a base model gets a `system` message.
    """

    def __init__(
        self,
        source: str | Path | Engine = "auto",
        device: str | None = None,
        *,
        model_tag: str | None = None,
        system: str = "",
        max_tokens: int = 256,
        **sampling: Any,
    ):
        if not isinstance(source, str | Path | Engine):
            raise UserError(f"source {source!r:.40} is not a stage such as 'sft', a folder, hf:ORG/NAME or an Engine")
        for name, text in (("device", device), ("model_tag", model_tag), ("system", system)):
            if text is not None and not isinstance(text, str):
                raise UserError(f"{name} {text!r:.40} is not a text")
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise UserError(f"max_tokens {max_tokens!r:.40}: the tokens of a reply, a whole number from 1 on")
        self.sampling = changed(SamplingParams(), sampling)  # before a model is loaded, which may take minutes
        if isinstance(source, Engine):
            self.name = "an engine"
            self.engine = source
            self.has_turns = source.tokenizer.can_chat
        else:
            model, tokenizer, meta = load_model(source, device, model_tag=model_tag)
            self.name = f"{meta['stage']}, step {meta['step']:,}"
            self.engine = Engine(model, tokenizer)
            self.has_turns = meta["stage"] != "base" and tokenizer.can_chat
            self.sampling = SamplingParams(**{**meta["sampling"], **sampling})
        if system and not self.has_turns:
            raise UserError(f"{source} is a base model, which continues text: leave the system message out")
        self.max_tokens = max_tokens
        self.system = system
        self.reset()

    def __repr__(self) -> str:
        return f"<Chat with {self.name}, on {self.engine.model.device}: {len(self.messages)} messages>"

    def reset(self) -> None:
        """Begin a new conversation, with the same system message."""
        self.messages: list[Message] = [{"role": "system", "content": self.system}] if self.system else []

    def say(self, text: str, **sampling: Any) -> str:
        """The model's reply to a message; both are added to `messages`. `chat("Hello")` is `chat.say("Hello")`.

        A base model continues only this text, and `messages` stays empty.
        `sampling` changes fields of SamplingParams for this reply. Each reply draws by the seed after the last one's.
        Raises UserError: when the message is not a text or does not fit into the context, or a setting is wrong.
        """
        return "".join(self.stream(text, **sampling))

    __call__ = say

    def stream(self, text: str, **sampling: Any) -> Iterator[str]:
        """`say` in pieces: yields the reply's text as the model generates it.

        `messages` grow with every piece. A loop that is left early, or interrupted, keeps what was said until then as
        the reply, and the next prompt reads that.
        """
        if not isinstance(text, str):
            raise UserError(f"a message is a text, not {type(text).__name__}")
        params = changed(self.sampling, sampling)
        tokenizer = self.engine.tokenizer
        turns = [*self.messages, {"role": "user", "content": text}]
        if self.has_turns:
            ids = fit_prompt(tokenizer, turns, self.engine.model.config.sequence_len, self.max_tokens).ids
        else:
            ids = tokenizer.encode(text, prepend=tokenizer.get_bos_token_id())
        for_the_next = replace(self.sampling, seed=self.sampling.seed + 1)
        tokens: list[int] = []
        said = ""
        for new in self.engine.stream([ids], max_tokens=self.max_tokens, sampling=params):
            self.sampling = for_the_next
            if new.finish_reason != "stop":
                tokens.append(new.id)
            if self.has_turns:
                reply = parse_reply(tokenizer, tokens)  # parts: its text, and the calls of the calculator
                self.messages = [*turns, {"role": "assistant", "content": reply}]
                whole = text_of(reply)
            else:
                whole = tokenizer.decode(tokens)
            # The text of a call is not said, and of half a character the rest is awaited.
            if new.finish_reason or (new.kind == "text" and not whole.endswith(HALF_A_CHARACTER)):
                yield whole[len(said) :]
                said = whole


def changed(params: SamplingParams, changes: dict[str, Any]) -> SamplingParams:
    """The settings with these changes, by name.

    Raises UserError: for a name that no setting has, and for a value of another type or out of its range.
    """
    kinds = {field.name: type(field.default) for field in fields(SamplingParams)}
    for name, value in changes.items():
        if name not in kinds:
            near = difflib.get_close_matches(name, kinds, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the settings are {', '.join(kinds)}"
            raise UserError(f"{name!r:.40} is not a setting of replies: {hint}")
        if isinstance(value, bool) or not isinstance(value, int | kinds[name]):
            raise UserError(f"{name}={value!r:.40} is not {'a whole number' if kinds[name] is int else 'a number'}")
    params = replace(params, **changes)
    check_ranges(params)
    return params
