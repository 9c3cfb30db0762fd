"""Chat with a model in the terminal. Replies appear as they are generated; a base model continues your text instead.

python -m scripts.chat_cli

python -m scripts.chat_cli "What is 47 + 38?"

echo "Tell me a story." | python -m scripts.chat_cli > story.txt

python -m scripts.chat_cli "What is this about?" < story.txt

Piped input is one message, however many lines it has. scripts/chat_batch.py replies to each line of a file.
"""

import codecs
import io
import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from nanochat.conversation import Message, fit_prompt, parse_reply
from nanochat.ground.cli import Positive, UserError, run
from nanochat.ground.untrusted import CONTROL, printable
from nanochat.sampling import SamplingParams
from nanochat.serve.decoding_flags import DecodingFlags, SamplingFlags
from nanochat.serve.terminal import line_editor, notice
from nanochat.tokenizer import replace_surrogates


@dataclass(frozen=True)
class Config:
    # Reply to this message and exit; piped input is appended to it. Default: a dialogue.
    message: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[MESSAGE ...]")] = ()
    source: str = "auto"  # a stage, a folder (ours, Hugging Face's or peft's) or hf:ORG/NAME; auto: the furthest stage
    model_tag: str | None = None  # default: the tag written last
    prompt: Annotated[str | None, tyro.conf.arg(aliases=["-p"])] = None  # the message, as a flag
    system: str = ""  # system message at the start of the conversation
    max_tokens: Positive = 256  # tokens of a reply
    sampling: Annotated[SamplingFlags, tyro.conf.arg(name="")] = SamplingFlags()
    device: str = "auto"  # auto, npu, cuda or cpu
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # the dtype of matrix products
    decoding: Annotated[DecodingFlags, tyro.conf.arg(name="")] = DecodingFlags()


COMMANDS = ("/new", "/save", "/help", "/quit")
HELP = """\
  any text          a message, to which the model replies; a base model continues it
  /new              start a new conversation
  /save FILE.jsonl  append the conversation to a file to train on
  /help             show this list
  /quit             leave, as Ctrl-D does
  Ctrl-C            stop a reply
  Up, Down          earlier messages
  Tab               complete a command
  a space, then /   a text that begins with /"""
HINT = "/help lists what you can type, /quit or Ctrl-D leaves, Ctrl-C stops a reply"


def main(config: Config) -> None:
    # ------------------------------------------------------------------ load
    with notice("loading ..."):
        # The heavy imports are here so that --help answers at once.
        from nanochat import device as devices
        from nanochat.checkpoint_manager import load_model
        from nanochat.engine import Engine

        device = devices.init(config.device, config.dtype)
        model, tokenizer, meta = load_model(config.source, device, model_tag=config.model_tag)
    stage = meta["stage"]
    sampling = config.sampling.over(meta["sampling"])
    has_turns = stage != "base" and tokenizer.can_chat
    if config.system and not has_turns:
        raise UserError(f"--system: {meta['folder']} is a base model, which continues text; name a chat --source")
    chat = Chat(Engine(model, tokenizer, device, **asdict(config.decoding)), config, sampling, has_turns)

    # ------------------------------------------------------------------ one reply: to a flag, a pipe, or both
    on_terminal = sys.stdin is not None and sys.stdin.isatty()
    if config.message and config.prompt is not None:
        raise UserError("--prompt: the message is there already, without a flag; leave one of them out")
    prompt = " ".join(config.message) if config.message else config.prompt
    if prompt is not None or not on_terminal:
        parts = [prompt, None if on_terminal else piped_in()]
        text = replace_surrogates("\n".join(part.rstrip("\n") for part in parts if part))
        if chat.has_turns and not text.strip():
            raise UserError("--prompt: there is no message; name one, or pipe one in")
        if not chat.send(text):
            raise KeyboardInterrupt  # ends the program with its exit code
        return

    # ------------------------------------------------------------------ a dialogue
    session = line_editor(COMMANDS)
    hint = "" if chat.has_turns else "type the beginning of a text; an empty line leaves, too; "
    print(printable(f"{stage}: {meta['folder']}\n{hint}{HINT}"))
    while True:
        try:
            text = replace_surrogates(session.prompt("> "))
            command = text.rstrip()
            if command == "/quit" or (not text and not chat.has_turns):
                return
            if command == "/new":
                chat.turns = []
            elif command.split(" ")[0] == "/save":
                print(printable(chat.save(command.removeprefix("/save").strip())))
            elif command == "/help":
                print(HELP)
            elif text.startswith("/"):
                print(printable(f"no such command as {text.split()[0]}: {HINT}; a space before it makes it a text"))
            elif text.strip() or not chat.has_turns:
                chat.send(text)
        except UserError as error:  # the next message may work
            print(printable(f"error: {error}"))
        except KeyboardInterrupt:
            print(HINT)
        except EOFError:
            return


# ---------------------------------------------------------------------- the terminal


def piped_in() -> str:
    """All of standard input. The caller has checked that it is not a terminal."""
    if sys.stdin is None:
        return ""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    with notice("reading standard input ..."):  # shows why the program waits if the pipe stays empty
        return sys.stdin.read()


class Chat:
    """A conversation with a model. A base model has no turns: it continues each text separately."""

    def __init__(self, engine: Any, config: Config, sampling: SamplingParams, has_turns: bool):
        self.engine = engine
        self.tokenizer = engine.tokenizer
        self.config = config
        self.has_turns = has_turns
        self.sampling = sampling
        self.system: list[Message] = []
        if config.system:
            self.system = [{"role": "system", "content": replace_surrogates(config.system)}]
        self.turns: list[Message] = []
        self.is_cut = False  # whether the last prompt left out the oldest turns
        # A terminal shows a call as [2+3 -> 5]. A file or a pipe receives only the text.
        self.on_terminal = sys.stdout.isatty()
        colours = self.on_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self.dim, self.plain = ("\x1b[2m", "\x1b[0m") if colours else ("", "")
        self.marks = {
            engine.call_start: " [",
            engine.call_end: "",
            engine.answer_start: " -> ",
            engine.answer_end: "] ",
        }

    def send(self, text: str) -> bool:
        """Stream the reply to a message, and add both to the conversation; False if Ctrl-C stopped it.

        The next reply uses the next seed.
        """
        turns: list[Message] = [*self.turns, {"role": "user", "content": text}]
        ids = self.prompt(turns)
        # The prompt of a thinking model opens the thought, which belongs to the reply. A base model continues the text,
        # so the text itself is shown first.
        begun = ids[-2:] if self.tokenizer.decode(ids[-2:]) == "<think>\n" else []
        made, stopped = self.stream(ids, lead=self.tokenizer.decode(begun) if self.has_turns else text)
        if self.has_turns:
            self.turns = [*turns, {"role": "assistant", "content": parse_reply(self.tokenizer, begun + made)}]
        return not stopped

    def stream(self, ids: list[int], lead: str = "") -> tuple[list[int], bool]:
        """Show `lead`, then the reply as it is generated; returns the new tokens, and whether Ctrl-C stopped it."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a token may end within a character
        made: list[int] = []
        in_call = False
        stopped = False
        finish_reason = None
        try:
            for new in self.engine.stream([ids], max_tokens=self.config.max_tokens, sampling=self.sampling):
                self.show(lead)
                lead = ""
                finish_reason = new.finish_reason
                if finish_reason == "stop":
                    break
                made.append(new.id)
                if new.id in self.marks:
                    piece = decoder.decode(b"", final=True) + self.marks[new.id]
                else:
                    piece = decoder.decode(self.tokenizer.decode_bytes([new.id]))
                    if self.has_turns and self.tokenizer.strips_space and len(made) == 1:
                        piece = piece.removeprefix(" ")
                in_call = new.kind != "text"
                self.show(piece, in_call)
                in_call = in_call and new.id != self.engine.answer_end
        except KeyboardInterrupt:
            stopped = True

        # Complete the output: half a character, an open call, the line.
        self.show(lead + decoder.decode(b"", final=True), in_call)
        if in_call:
            self.show("]", aside=True)
        if stopped:
            self.show(" [stopped]", aside=True)
        self.show("\n")
        if finish_reason == "length" and self.has_turns:
            at = "--max_tokens" if len(made) == self.config.max_tokens else "the end of the context"
            self.show(f"(cut off at {at})\n", aside=True)
        self.sampling = replace(self.sampling, seed=self.sampling.seed + 1)
        return made, stopped

    def save(self, name: str) -> str:
        """Append the conversation to a .jsonl, from which `chat_sft --tasks` learns; returns a line about it.

        Raises UserError: when the conversation is empty, or the file cannot be written.
        """
        if not self.turns:
            raise UserError("/save: there is no conversation yet")
        if not name.endswith(".jsonl"):
            raise UserError(f"/save {name}: name a file that ends in .jsonl, such as /save chats.jsonl")
        path = Path(name).expanduser()
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"messages": [*self.system, *self.turns]}, ensure_ascii=False) + "\n")
        except OSError as error:
            raise UserError(f"/save {name}: {error.strerror}") from error
        return f"added to {path}; `python -m scripts.chat_sft --tasks {path}` learns from it"

    def prompt(self, turns: list[Message]) -> list[int]:
        """Token ids up to the start of the reply. They leave room for `max_tokens`, at most 3/8 of the context."""
        if not self.has_turns:
            return self.tokenizer.encode(turns[-1]["content"], prepend=self.tokenizer.get_bos_token_id())
        context = self.engine.model.config.sequence_len
        prompt = fit_prompt(self.tokenizer, [*self.system, *turns], context, self.config.max_tokens)
        if len(prompt.ids) >= context:
            raise UserError(f"that is {len(prompt.ids)} tokens, the model's context {context}: shorten the message")
        was_cut = self.is_cut
        self.is_cut = prompt.oldest > len(self.system)
        if self.is_cut and not was_cut:
            self.show(f"(the model reads {context:,} tokens: the oldest turns are left out from here)\n", aside=True)
        return prompt.ids

    def show(self, text: str, aside: bool = False) -> None:
        """Print without control characters. `aside` marks text that is not part of the reply; it is dim."""
        text = CONTROL.sub("", text)
        if aside:
            text = f"{self.dim}{text}{self.plain}" if self.on_terminal else ""
        print(text, end="", flush=True)


if __name__ == "__main__":
    run(main, Config)
