"""Chat with a model in the terminal, streamed as it is generated; a base model continues your text instead.

python -m scripts.chat_cli
python -m scripts.chat_cli -p "What is 47 + 38?"
echo "Tell me a story." | python -m scripts.chat_cli > story.txt
"""

import codecs
import contextlib
import io
import json
import os
import re
import sys
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from nanochat.conversation import Message, parse_reply, render_prompt, text_of
from nanochat.sampling import SamplingParams
from nanochat.shell.cli import Positive, UserError, check_ranges, run
from nanochat.tokenizer import replace_surrogates


@dataclass(frozen=True)
class Config:
    source: str = "auto"  # a stage, or a checkpoint's folder; auto: the furthest trained of rl, dpo, sft, mid, base
    model_tag: str | None = None  # default: the tag written last
    step: int | None = None  # default: the newest
    prompt: Annotated[str | None, tyro.conf.arg(aliases=["-p"])] = None  # reply to this and exit; default: a dialogue
    system: str = ""  # system message, before the conversation
    max_tokens: Positive = 256  # of a reply
    sampling: Annotated[SamplingParams, tyro.conf.arg(name="")] = SamplingParams(temperature=0.7)
    stats: bool = False  # print tokens and tokens/s after each reply
    device: str = "auto"  # auto, npu, cuda or cpu
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # of matrix products
    graphs: bool = False  # an accelerator records the launches of a decoded token and replays them as one


SAMPLING = [field.name for field in fields(SamplingParams)]
COMMANDS = f"""\
/new             start a new conversation; the system message and the settings stay
/undo            take back the last turn
/retry           another reply to the last message
/system TEXT     the system message before the conversation; without TEXT: none
/set NAME VALUE  max_tokens, {", ".join(SAMPLING)}; without NAME: show them
/save FILE       add the conversation to a .jsonl file, as a row to train on
/quit            leave; so does Ctrl-D. Ctrl-C stops a reply."""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # characters that a terminal obeys, except tab and newline


def main(config: Config) -> None:
    # The heavy imports are here so that --help responds at once.
    from nanochat import device as devices
    from nanochat.checkpoint_manager import load_model
    from nanochat.engine import Engine

    # ------------------------------------------------------------------ load
    device = devices.init(config.device, config.dtype)
    model, tokenizer, meta = load_model(config.source, device, model_tag=config.model_tag, step=config.step)
    stage = meta.get("stage", "unknown stage")
    if config.system and stage == "base":
        raise UserError(f"--system: {meta['folder']} is a base model, which continues text; name a chat --source")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    in_dialogue = config.prompt is None and sys.stdin is not None and sys.stdin.isatty()
    chat = Chat(Engine(model, tokenizer, device, config.graphs), config, stage != "base", in_dialogue)

    # ------------------------------------------------------------------ one reply: to a flag or a pipe
    if not in_dialogue:
        if config.source == "auto" and sys.stderr.isatty():
            print(f"{stage}: {meta['folder']}", file=sys.stderr)
        text = config.prompt
        if text is None:
            text = sys.stdin.read() if sys.stdin else ""
        text = replace_surrogates(text.rstrip("\n"))
        if chat.has_turns and not text.strip():
            raise UserError("--prompt: there is no message; name one, or pipe one in")
        chat.send(text, [])
        return

    # ------------------------------------------------------------------ a dialogue
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input() then edits lines and remembers them)
    hint = "" if chat.has_turns else "type the beginning of a text; an empty line leaves, too; "
    print(f"{stage}: {meta['folder']}\n{hint}/help lists the commands, Ctrl-C stops a reply, Ctrl-D leaves")
    while True:
        try:
            line = replace_surrogates(input("> "))
            if line.split()[:1] == ["/quit"] or (not line and not chat.has_turns):
                return
            if line.startswith("/"):
                chat.command(line)
            elif line.strip() or not chat.has_turns:
                chat.send(line, chat.turns)
        except UserError as error:  # the next message may well work
            print(f"error: {error}")
        except KeyboardInterrupt:
            print("\nCtrl-D or /quit leaves")
        except EOFError:
            print()
            return


class Chat:
    """A conversation with a model: its messages, its settings, and how a reply is shown."""

    def __init__(self, engine: Any, config: Config, has_turns: bool, in_dialogue: bool):
        self.engine = engine
        self.tokenizer = engine.tokenizer
        self.context = engine.model.config.sequence_len
        self.config = config  # /set changes it
        self.has_turns = has_turns  # False: a base model, which continues each text by itself
        self.in_dialogue = in_dialogue
        self.system = system_message(config.system)
        self.turns: list[Message] = []
        self.warned = False  # the user knows that the oldest turns are left out

        self.on_terminal = sys.stdout.isatty()
        colours = self.on_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self.dim, self.plain = ("\x1b[2m", "\x1b[0m") if colours else ("", "")
        # A call is shown as [2+3 -> 5].
        self.marks = {
            engine.call_start: " [",
            engine.call_end: "",
            engine.answer_start: " -> ",
            engine.answer_end: "] ",
        }
        if not self.on_terminal:
            self.marks |= {engine.call_start: "[", engine.answer_end: "]\n"}

    # ---- one turn

    def send(self, text: str, turns: list[Message]) -> None:
        """Add a message to earlier turns and stream the reply to it; the next reply draws by the next seed."""
        messages = [*turns, {"role": "user", "content": text}]
        self.turns = [*messages, self.reply([*self.system, *messages])]
        sampling = replace(self.config.sampling, seed=self.config.sampling.seed + 1)
        self.config = replace(self.config, sampling=sampling)

    def reply(self, messages: list[Message]) -> Message:
        """Stream the reply to the last message. Ctrl-C stops it, and ends the program where it is the only one."""
        config = self.config
        ids = self.prompt_of(messages)
        lead = "" if self.has_turns else messages[-1]["content"]  # a base model's text is read with its beginning
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a token may end within a character
        made: list[int] = []
        in_call = False
        stopped = False
        began = time.perf_counter()
        try:
            for new in self.engine.stream([ids], max_tokens=config.max_tokens, sampling=config.sampling):
                self.show(lead)
                lead = ""
                if new.finish_reason == "stop":
                    break
                made.append(new.id)
                if new.id not in self.marks:
                    self.show(decoder.decode(self.tokenizer.decode_bytes([new.id])), aside=in_call)
                    continue
                self.show(decoder.decode(b"", final=True), aside=in_call)
                in_call = new.kind != "text"
                if in_call:
                    mark = self.marks[new.id]
                    self.show(mark.lstrip() if len(made) == 1 else mark, aside=True)
                    in_call = new.id != self.engine.answer_end
        except KeyboardInterrupt:
            stopped = True
        seconds = time.perf_counter() - began

        # Complete what is on the screen: half a character, an open call, the line.
        self.show(lead + decoder.decode(b"", final=True), aside=in_call)
        if in_call:
            self.show(self.marks[self.engine.answer_end].rstrip(" "), aside=True)
        if stopped and self.in_dialogue:
            print(f"{self.dim} [stopped]{self.plain}", end="")
        print(flush=True)
        if stopped and not self.in_dialogue:
            raise KeyboardInterrupt
        if config.stats:
            self.show(f"({len(made)} tokens, {len(made) / seconds:,.1f} tokens/s)\n", aside=True)

        parts = parse_reply(self.tokenizer, made)
        is_text = all(part["type"] == "text" for part in parts)
        message: Message = {"role": "assistant", "content": text_of(parts) if is_text else parts}
        if stopped or len(made) >= min(config.max_tokens, self.context - len(ids)):
            message["train"] = False  # it was cut off: a saved conversation should not teach to end here
        return message

    def prompt_of(self, messages: list[Message]) -> list[int]:
        """Token ids up to where the reply begins; room for `max_tokens` stays, at most half of the context."""
        if not self.has_turns:
            return self.tokenizer.encode(messages[-1]["content"], prepend=self.tokenizer.get_bos_token_id())
        room = min(self.config.max_tokens, self.context // 2)
        try:
            ids = render_prompt(self.tokenizer, messages, self.context - room)
        except UserError as error:
            raise UserError(f"{error}, or lower max_tokens: {room} tokens are kept free for the reply") from error
        if not self.warned and len(ids) < len(render_prompt(self.tokenizer, messages)):
            self.warned = True
            self.show(
                f"(the model reads {self.context:,} tokens: the oldest turns are left out from here)\n", aside=True
            )
        return ids

    def show(self, text: str, aside: bool = False) -> None:
        """Print without the characters that a terminal obeys. What is not text of the reply is dim on a terminal, and
        goes to stderr where stdout is a file or a pipe."""
        text = CONTROL.sub("", text)
        if not aside:
            print(text, end="", flush=True)
        elif text:
            print(
                f"{self.dim}{text}{self.plain}", end="", flush=True, file=sys.stdout if self.on_terminal else sys.stderr
            )

    # ---- commands

    def command(self, line: str) -> None:
        """Raises UserError: for a command that does not exist or cannot run now."""
        command, _, rest = line.partition(" ")
        rest = rest.strip()
        if command in ("/undo", "/retry", "/save") and not self.turns:
            raise UserError(f"{command}: there is no turn yet")
        match command:
            case "/help":
                print(COMMANDS)
            case "/new":
                self.turns = []
                self.warned = False
            case "/undo":
                print(f"taken back: {self.turns[-2]['content']}")
                self.turns = self.turns[:-2]
            case "/retry":
                self.send(self.turns[-2]["content"], self.turns[:-2])
            case "/system":
                if not self.has_turns:
                    raise UserError("/system: a base model continues text; it has no system message")
                self.system = system_message(rest)
                print(f"system message: {rest}" if rest else "no system message")
            case "/set":
                if rest:
                    self.set(*rest.replace("=", " ").partition(" ")[::2])
                settings = {"max_tokens": self.config.max_tokens}
                settings |= {name: getattr(self.config.sampling, name) for name in SAMPLING}
                print(", ".join(f"{name} {value}" for name, value in settings.items()))
            case "/save":
                save(rest, [*self.system, *self.turns])
            case _:
                raise UserError(f"{command} is not a command: /help lists them; a space before it makes it a text")

    def set(self, name: str, value: str) -> None:
        """Change one setting. Raises UserError: when there is none of this name, or the value is out of range."""
        if name not in ("max_tokens", *SAMPLING):
            raise UserError(f"/set {name}: no such setting; there are max_tokens, {', '.join(SAMPLING)}")
        owner: Any = self.config if name == "max_tokens" else self.config.sampling
        try:
            changed = replace(owner, **{name: type(getattr(owner, name))(value)})
        except ValueError as error:
            raise UserError(f"/set {name} {value}: not a number that fits") from error
        check_ranges(changed)
        self.config = changed if name == "max_tokens" else replace(self.config, sampling=changed)


def system_message(text: str) -> list[Message]:
    return [{"role": "system", "content": replace_surrogates(text)}] if text else []


def save(name: str, messages: list[Message]) -> None:
    """Add a conversation to a file as one row."""
    if not name:
        raise UserError("/save: name a file, such as /save chat.jsonl")
    try:
        with Path(name).expanduser().open("a", encoding="utf-8") as file:
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    except (OSError, RuntimeError) as error:  # the latter: a ~user who does not exist
        raise UserError(f"/save {name}: {error}") from error
    print(f"{len(messages)} messages added to {name}")


if __name__ == "__main__":
    run(main, Config)
