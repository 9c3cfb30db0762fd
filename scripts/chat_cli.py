"""Chat with a model in the terminal, streamed as it is made; a base model continues your text instead.

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from nanochat.shell.cli import Positive, Seed, UserError, check_ranges, run


@dataclass(frozen=True)
class Config:
    source: str = "auto"  # a stage, or a checkpoint's folder; auto: the furthest trained of rl, dpo, sft, mid, base
    model_tag: str | None = None  # default: the tag written last
    step: int | None = None  # default: the newest
    prompt: Annotated[str | None, tyro.conf.arg(aliases=["-p"])] = None  # answer this and leave; default: ask
    system: str = ""  # what the model is told before the conversation
    max_tokens: Positive = 256  # of a reply
    temperature: float = 0.7  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    seed: Seed = 0  # of the first reply; each further one takes the next
    stats: bool = False  # tell tokens and tokens/s behind each reply
    device: str = "auto"  # auto, npu, cuda or cpu
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # of matrix products
    graphs: bool = False  # an accelerator records what a decoded token launches and replays it in one


SETTINGS = ("temperature", "top_k", "top_p", "max_tokens", "seed")  # what /set may change
COMMANDS = """\
/new             begin anew; the system message and the settings stay
/undo            take back the last turn
/retry           another reply to the last message
/system TEXT     what the model is told before the conversation; without TEXT: nothing
/set NAME VALUE  temperature, top_k, top_p, max_tokens or seed; without NAME: what they are
/save FILE       add the conversation to a .jsonl file, as a row that can be trained on
/quit            leave; so does Ctrl-D. Ctrl-C stops a reply."""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # what a terminal obeys, but for tab and newline


def main(config: Config) -> None:
    # The heavy imports stand here so that --help answers at once.
    from nanochat import device as devices
    from nanochat.checkpoint_manager import load_model
    from nanochat.conversation import Message, parse_reply, render_prompt, text_of
    from nanochat.engine import Engine
    from nanochat.tokenizer import replace_surrogates

    # ------------------------------------------------------------------ load
    check(config)
    device = devices.init(config.device, config.dtype)
    model, tokenizer, meta = load_model(config.source, device, model_tag=config.model_tag, step=config.step)
    engine = Engine(model, tokenizer, device, config.graphs)
    context = model.config.sequence_len
    stage = meta.get("stage", "unknown stage")
    chats = stage != "base"
    if config.system and not chats:
        raise UserError(f"--system: {meta['folder']} is a base model, which continues text; name a chat --source")

    # ------------------------------------------------------------------ show
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    asks = config.prompt is None and sys.stdin is not None and sys.stdin.isatty()
    on_terminal = sys.stdout.isatty()
    colours = on_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    dim, plain = ("\x1b[2m", "\x1b[0m") if colours else ("", "")
    call_marks = {engine.call_start: " [", engine.call_end: "", engine.answer_start: " -> ", engine.answer_end: "] "}
    if not on_terminal:
        call_marks |= {engine.call_start: "[", engine.answer_end: "]\n"}

    def say(text: str, aside: bool = False) -> None:
        """Print, without what a terminal would obey; what is not the reply's text dim, or apart from it on stderr."""
        text = CONTROL.sub("", text)
        if not aside:
            print(text, end="", flush=True)
        elif text:
            print(f"{dim}{text}{plain}", end="", flush=True, file=sys.stdout if on_terminal else sys.stderr)

    # ------------------------------------------------------------------ one reply
    def prompt_of(messages: list[Message]) -> list[int]:
        """Token ids up to where the reply begins; room for `max_tokens` stays, at most half of the context."""
        nonlocal told
        text = messages[-1]["content"]
        if not chats:
            return tokenizer.encode(text, prepend=tokenizer.get_bos_token_id())
        room = min(config.max_tokens, context // 2)
        try:
            ids = render_prompt(tokenizer, messages, context - room)
        except UserError as error:
            raise UserError(f"{error}, or lower max_tokens: a reply is left {room}") from error
        if not told and len(ids) < len(render_prompt(tokenizer, messages)):
            told = True
            say(f"(the model reads {context:,} tokens: from here on the oldest turns are left out)\n", aside=True)
        return ids

    def answer(messages: list[Message]) -> Message:
        """Stream the reply to the last message. Ctrl-C ends it, not the program, unless it is the only one."""
        ids, made, calling, stopped = prompt_of(messages), [], False, False
        lead = "" if chats else messages[-1]["content"]  # a base model's text is read as one with its beginning
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a token may end within a character
        began = time.perf_counter()
        try:
            for column, _ in engine.stream(
                [ids], max_tokens=config.max_tokens, temperature=config.temperature,
                top_k=config.top_k, top_p=config.top_p, seed=config.seed,
            ):  # fmt: skip
                token = column[0]
                assert token is not None
                say(lead)
                lead = ""
                made.append(token)
                mark = call_marks.get(token)
                if mark is None:
                    say(decoder.decode(tokenizer.decode_bytes([token])), aside=calling)
                    continue
                say(decoder.decode(b"", final=True), aside=calling)
                calling = calling or token == engine.call_start
                if calling:
                    say(mark.lstrip() if len(made) == 1 else mark, aside=True)
                    calling = token != engine.answer_end
        except KeyboardInterrupt:
            stopped = True
        seconds = time.perf_counter() - began
        say(lead + decoder.decode(b"", final=True), aside=calling)
        if calling:
            say(call_marks[engine.answer_end].rstrip(" "), aside=True)
        if stopped and asks:
            print(f"{dim} [stopped]{plain}", end="")
        print(flush=True)
        if stopped and not asks:
            raise KeyboardInterrupt
        if config.stats:
            say(f"({len(made)} tokens, {len(made) / seconds:,.1f} tokens/s)\n", aside=True)
        parts = parse_reply(tokenizer, made)
        spoken = all(part["type"] == "text" for part in parts)
        reply: Message = {"role": "assistant", "content": text_of(parts) if spoken else parts}
        if stopped or len(made) >= min(config.max_tokens, context - len(ids)):
            reply["train"] = False  # a saved conversation should not teach to end here
        return reply

    def system_message(text: str) -> list[Message]:
        return [{"role": "system", "content": replace_surrogates(text)}] if text else []

    system, turns = system_message(config.system), []
    told = False  # that the oldest turns are left out

    # ------------------------------------------------------------------ one shot: a flag or a pipe
    if not asks:
        if config.source == "auto" and sys.stderr.isatty():
            print(f"{stage}: {meta['folder']}", file=sys.stderr)
        text = config.prompt if config.prompt is not None else sys.stdin.read() if sys.stdin else ""
        text = replace_surrogates(text.rstrip("\n"))
        if chats and not text.strip():
            raise UserError("--prompt: there is no message; name one, or pipe one in")
        answer([*system, {"role": "user", "content": text}])
        return

    # ------------------------------------------------------------------ ask again and again
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input() then edits lines and remembers them)
    begin = "" if chats else "type the beginning of a text; an empty line leaves, too; "
    print(f"{stage}: {meta['folder']}\n{begin}/help lists the commands, Ctrl-C stops a reply, Ctrl-D leaves")
    while True:
        try:
            text, before = replace_surrogates(input("> ")), turns
            if not text and not chats:
                return
            if not text.strip() and chats:
                continue
            if text.startswith("/"):
                command, rest = [*text.split(maxsplit=1), ""][:2]
                rest = rest.strip()
                match command:
                    case "/quit":
                        return
                    case "/help":
                        print(COMMANDS)
                    case "/new":
                        turns, told = [], False
                    case "/set":
                        config = changed(config, rest)
                        print(", ".join(f"{name} {getattr(config, name)}" for name in SETTINGS))
                    case "/system" if chats:
                        system = system_message(rest)
                        print(f"system message: {rest}" if rest else "no system message")
                    case "/system":
                        raise UserError("/system: a base model continues text, and nothing else")
                    case "/undo" | "/retry" | "/save" if not turns:
                        raise UserError(f"{command}: nothing has been said yet")
                    case "/undo":
                        print(f"taken back: {turns[-2]['content']}")
                        turns = turns[:-2]
                    case "/retry":
                        text, before = turns[-2]["content"], turns[:-2]
                    case "/save":
                        save(rest, [*system, *turns])
                    case _:
                        raise UserError(f"{command} is no command: /help lists them; a space before it makes it a text")
                if command != "/retry":
                    continue
            asked = [*before, {"role": "user", "content": text}]
            turns = [*asked, answer([*system, *asked])]
            config = replace(config, seed=config.seed + 1)
        except UserError as error:  # what follows may well work
            print(f"error: {error}")
        except KeyboardInterrupt:
            print("\nCtrl-D or /quit leaves")
        except EOFError:
            print()
            return


def check(config: Config) -> None:
    """Raises UserError: when a setting is out of range."""
    from nanochat.engine import check_sampling

    check_ranges(config)
    check_sampling(config.temperature, config.top_k, config.top_p)


def changed(config: Config, assignment: str) -> Config:
    """The config after `/set NAME VALUE`."""
    if not assignment:
        return config
    name, _, value = assignment.replace("=", " ").partition(" ")
    if name not in SETTINGS:
        raise UserError(f"/set {name}: no such setting; there are {', '.join(SETTINGS)}")
    try:
        number: Any = type(getattr(config, name))(value)
    except ValueError as error:
        raise UserError(f"/set {name} {value}: not a number that fits") from error
    config = replace(config, **{name: number})
    check(config)
    return config


def save(name: str, messages: list[dict[str, Any]]) -> None:
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
