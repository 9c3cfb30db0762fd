"""A conversation with a model in two lines of Python.

    chat = Chat("sft")
    print(chat.say("What is 47 + 38?"))

`say` has the four steps of every chat here, on the command line and in the server too: messages become a prompt, the
engine generates, its tokens become a message again, and the next prompt begins with both.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from nanochat.checkpoint_manager import load_model
from nanochat.conversation import Message, fit_prompt, parse_reply, text_of
from nanochat.engine import Engine
from nanochat.ground.cli import UserError
from nanochat.sampling import SamplingParams


class Chat:
    """A model, and the conversation with it so far: `messages`.

    `source` is a stage, a folder or hf:ORG/NAME, as for --source, or an Engine; "auto" is the furthest stage. `device`
    is "npu:0", "cuda:0", "cpu", or nothing for the best one here. A reply has at most `max_tokens` tokens. `sampling`
    names fields of SamplingParams, such as temperature=0.0; the others are the checkpoint's.
    Raises UserError: when the checkpoint does not exist or cannot be used, `max_tokens` is below 1, or a base model
    gets a `system` message.
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
        if max_tokens < 1:
            raise UserError(f"max_tokens {max_tokens} leaves no room for a reply: it must be at least 1")
        own: dict[str, Any] = {}
        if isinstance(source, str | Path):
            model, tokenizer, meta = load_model(source, device, model_tag=model_tag)
            self.engine = Engine(model, tokenizer)
            self.has_turns = meta["stage"] != "base" and tokenizer.can_chat
            own = meta["sampling"]
        else:
            self.engine = source
            self.has_turns = source.tokenizer.can_chat
        if system and not self.has_turns:
            raise UserError(f"{source} is a base model, which continues text: leave the system message out")
        self.max_tokens = max_tokens
        self.sampling = SamplingParams(**{**own, **sampling})
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []

    def say(self, text: str, **sampling: Any) -> str:
        """The model's reply to a message; both are added to `messages`.

        A base model continues this text alone, and `messages` stays empty.
        `sampling` changes fields of SamplingParams for this reply. Each reply draws by the seed after the last one's.
        Raises UserError: when the message is not a text or does not fit into the context, or a setting is out of range.
        """
        if not isinstance(text, str):
            raise UserError(f"say() takes a text, not {type(text).__name__}")
        tokenizer = self.engine.tokenizer
        turns = [*self.messages, {"role": "user", "content": text}]
        if self.has_turns:
            ids = fit_prompt(tokenizer, turns, self.engine.model.config.sequence_len, self.max_tokens).ids
        else:
            ids = tokenizer.encode(text, prepend=tokenizer.get_bos_token_id())
        params = replace(self.sampling, **sampling)
        (new_tokens,), _ = self.engine.generate([ids], max_tokens=self.max_tokens, sampling=params)
        self.sampling = replace(self.sampling, seed=self.sampling.seed + 1)
        if not self.has_turns:
            return tokenizer.decode(new_tokens)
        reply = parse_reply(tokenizer, new_tokens)  # parts: its text, and the calls of the calculator
        self.messages = [*turns, {"role": "assistant", "content": reply}]
        return text_of(reply)
