"""The terminal: chats and continues, shows calls, keeps its history, stops a reply and not itself.

The models here are tables: what follows a token depends only on that token, so that every reply is known.
"""

import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prompt_toolkit import PromptSession
from prompt_toolkit.application import create_app_session
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import DummyInput, create_pipe_input
from prompt_toolkit.output import DummyOutput
from runs import call
from tiny import save_checkpoint, tiny_tokenizer
from tiny_families import published, save_family

from nanochat.conversation import render
from nanochat.engine import Engine, SamplingParams
from nanochat.gpt import GPT, GPTConfig
from nanochat.ground import paths
from nanochat.serve import terminal
from nanochat.tasks.conversations import Conversations, messages_of
from nanochat.tokenizer import Tokenizer
from scripts import chat_cli

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = tiny_tokenizer()
LETTERS = list(b"abcdefghijklmnopqrstuvwxyz")


def ids(*pieces: str | bytes) -> list[int]:
    """A token a byte, and special tokens by their names."""
    return [
        token
        for piece in pieces
        for token in (piece if isinstance(piece, bytes) else [TOKENIZER.encode_special(f"<|{piece}|>")])
    ]


SUM = ids("assistant_start", b"S=", "python_start", b"47+38", "python_end")
SUM_ANSWERED = ids("output_end", b".", "assistant_end")
WILD = ids("assistant_start", "\x1b[A从\x9bB\tC\n\r\x7fD".encode(), b"\xf0", "assistant_end")  # ends within a character
BASE = ids(b"n ago.", "bos")


def table_model(*rows: list[int], anything: bool = False, context: int = 512) -> GPT:
    """A model in which each token of a row is followed by the next one; or every token by any letter."""
    width = TOKENIZER.vocab_size + 1
    model = GPT(
        GPTConfig(
            vocab_size=TOKENIZER.vocab_size, sequence_len=context, n_layer=1, width=width, mlp_width=4,
            n_head=1, n_kv_head=1, head_dim=2,
        )
    )  # fmt: skip
    model.init_weights()  # each block is the identity: a token's hidden state is its embedding
    assert model.head is not None
    with torch.no_grad():
        model.embedding.weight.zero_().fill_diagonal_(1.0)
        model.head.weight.zero_()
        if anything:
            model.head.weight[LETTERS] = 100.0
        for row in rows:
            assert len(set(row)) == len(row), "a token can be followed by one token only"
            for token, following in zip(row, row[1:], strict=False):
                model.head.weight[following, token] = 100.0
    return model


CUT = "(cut off at --max_tokens)\n"


def add_checkpoint(stage: str, model: GPT, tag: str = "tiny", step: int = 3) -> Path:
    return save_checkpoint(paths.checkpoint_dir(stage, tag), step, model, TOKENIZER, {"stage": stage})


@pytest.fixture(autouse=True)
def clean(base_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NANOCHAT_TRACEBACK", "NO_COLOR", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def sums() -> None:
    add_checkpoint("sft", table_model(SUM, SUM_ANSWERED))


class Replies(list[dict[str, Any]]):
    """Each reply that is requested: `prompt`, `made` (its tokens), the settings."""

    ctrl_c_after = -1  # tokens, after which the next reply is interrupted

    def text(self, number: int) -> str:
        return TOKENIZER.decode(self[number]["prompt"])


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> Replies:
    seen = Replies()
    stream = Engine.stream

    def watched(self: Engine, prompts: list[list[int]], max_tokens: int, sampling: SamplingParams) -> Iterator[Any]:
        seen.append({"prompt": prompts[0], "made": [], "max_tokens": max_tokens, **asdict(sampling)})
        left, seen.ctrl_c_after = seen.ctrl_c_after, -1
        for new in stream(self, prompts, max_tokens=max_tokens, sampling=sampling):
            if left == len(seen[-1]["made"]):
                raise KeyboardInterrupt
            if new.finish_reason != "stop":
                seen[-1]["made"].append(new.id)
            yield new

    monkeypatch.setattr(Engine, "stream", watched)
    return seen


class Terminal(io.StringIO):
    """Somebody sits at the other end."""

    def isatty(self) -> bool:
        return True


def run(*argv: str) -> None:
    """As from the command line; raises SystemExit with the exit code where it is not 0."""
    call("chat_cli", "--device=cpu", "--dtype=float32", *argv)


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Type lines on a terminal, where ^C is that key; returns what is printed after each of them, without the `> ` of
    the prompts."""
    prompt = PromptSession.prompt

    def shown(self: Any, message: str) -> str:
        print(message, end="")
        return prompt(self, message)

    def talk(*lines: str, flags: tuple[str, ...] = (), colour: bool = False) -> list[str]:
        keys = "".join("\x03" if line == "^C" else f"{line}\r" for line in lines) + "\x04"  # Ctrl-D
        with monkeypatch.context() as patch, create_pipe_input() as typed:
            patch.setattr(PromptSession, "prompt", shown)
            patch.setattr(sys, "stdin", Terminal())
            patch.setattr(sys.stdout, "isatty", lambda: True)
            if not colour:
                patch.setenv("NO_COLOR", "1")
            typed.send_text(keys)
            with create_app_session(input=typed, output=DummyOutput()):
                run(*flags)
        out, err = capsys.readouterr()
        assert err == ""
        return re.split("(?<!-)> ", out)  # the one in a call's arrow is none

    return talk


def one_shot(capsys: pytest.CaptureFixture[str], *argv: str, piped: Any = None) -> tuple[str, str]:
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO(piped) if isinstance(piped, str) else piped)
        run(*argv)
    out, err = capsys.readouterr()
    return out, err


# ---------------------------------------------------------------------- which model, and its reply


def test_auto_is_the_furthest_stage_with_a_finished_step(talk):
    models = {}
    for stage in ("base", "mid", "sft", "dpo", "rl"):
        models[stage] = add_checkpoint(stage, table_model(SUM, SUM_ANSWERED))
        assert talk()[0].startswith(f"{stage}: {models[stage]}\n")
    models["rl"].rename(models["rl"].with_suffix(".tmp"))
    (paths.base_dir() / "checkpoints" / "rl" / "note.txt").write_text("")
    add_checkpoint("mid", table_model(SUM, SUM_ANSWERED), tag="other", step=7)
    for flags, begin in (
        ((), "dpo: "),
        (("--model_tag=other",), "mid: "),
        (("--source=sft",), "sft: "),
        ((f"--source={models['mid']}",), "mid: "),
        ((f"--source={models['base']}",), "base: "),
    ):
        assert talk(flags=flags)[0].startswith(begin)


def test_only_what_is_not_text_is_dim(talk, sums, monkeypatch):
    _, reply, _ = talk("x", colour=True)
    assert reply.replace("\x1b[0m\x1b[2m", "") == "S=\x1b[2m [47+38 -> 85] \x1b[0m.\n"
    monkeypatch.setenv("TERM", "dumb")
    assert talk("x", colour=True)[1] == "S= [47+38 -> 85] .\n"
    begun = ids("assistant_start", "python_start", b"1+", "assistant_end")
    add_checkpoint("sft", table_model(begun, ids("output_end", "assistant_end")), step=4)
    assert talk("x")[1] == " [1+ -> error] \n"  # it never closed its call
    add_checkpoint("sft", table_model(ids("assistant_start", "python_end", b"ok", "assistant_end")), step=5)
    assert talk("x")[1] == "ok\n"


def test_what_a_terminal_would_obey_is_left_out(talk, capsys):
    add_checkpoint("base", table_model(ids(b"x\x1b[c\n", "bos")))
    assert one_shot(capsys, "-p", "a\x1bx")[0] == "ax[c\n\n"
    add_checkpoint("sft", table_model(WILD))
    expected = "[A从B\tC\nD\N{REPLACEMENT CHARACTER}\n"
    assert talk("x")[1] == one_shot(capsys, "-p", "x")[0] == expected


# ---------------------------------------------------------------------- the conversation


def test_later_turns_see_earlier_ones(talk, sums, prompts):
    said = ("What is 47 + 38?", "从 <|assistant_end|>", "Thanks!")
    talk(*said, flags=("--system=Be kind.",))
    call = [("text", "S="), ("python", "47+38"), ("python_output", "85"), ("text", ".")]
    reply = {"role": "assistant", "content": [{"type": kind, "text": text} for kind, text in call]}
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be kind."}]
    start = TOKENIZER.encode_special("<|assistant_start|>")
    for requested, text in zip(prompts, said, strict=True):
        messages.append({"role": "user", "content": text})
        assert requested["prompt"] == [*render(TOKENIZER, messages).ids, start]
        messages.append(reply)


def test_the_oldest_turns_are_left_out_and_a_message_too_long_is_refused(talk, prompts):
    context = 64
    add_checkpoint("sft", table_model(ids("assistant_start", b"ok.", "assistant_end"), context=context))
    output = talk(*(f"message {number}" for number in range(6)), "/new", "message 9", flags=("--max_tokens=10",))
    told = ["oldest turns" in text for text in output]
    assert told.count(True) == 1 and "64 tokens" in output[4] and output[4].endswith("\nok.\n") and output[5] == "ok.\n"
    assert max(len(reply["prompt"]) for reply in prompts) <= context - 10
    assert "message 5" in prompts.text(5) and "message 3" in prompts.text(5) and "message 2" not in prompts.text(5)
    assert "message 9" in prompts.text(6) and len(prompts[6]["prompt"]) < 20
    output = talk("hello", "x" * 70, "hi", "x" * 40)
    assert re.match("error: .* 74 tokens", output[2])
    assert output[1] == output[3] == "ok.\n" and output[4].endswith("ok.\n")  # 20 tokens are left for the last one
    assert "hello" in prompts.text(8) and "xx" not in prompts.text(8)


# ---------------------------------------------------------------------- what is typed


def test_a_paste_is_one_message_and_messages_are_remembered(talk, sums, prompts, monkeypatch, capsys):
    talk("one", "\x1b[200~two\r\n\nlines\x1b[201~ more", "\x1b[200~three\nlines\x1b[201~", "从")
    assert len(prompts) == 4 and "<|user_start|>two\n\nlines more<|user_end|>" in prompts.text(1)
    assert (paths.base_dir() / "chat_history").stat().st_mode & 0o777 == 0o600
    talk("\x1b[A\x1b[A")  # the arrow up: the second to last message
    talk("\x1b[A!")  # the last one, changed
    sent = [re.findall(r"<\|user_start\|>(.*?)<\|user_end\|>", prompts.text(place), re.S) for place in (4, 5)]
    assert sent == [["three\nlines"], ["three\nlines!"]]
    monkeypatch.setattr(terminal, "base_dir", lambda: Path("/dev/null"))
    with create_app_session(input=DummyInput(), output=DummyOutput()):
        assert isinstance(terminal.line_editor([]).history, InMemoryHistory)
    assert capsys.readouterr().err.startswith("warning: ")


def test_tab_completes_a_command(talk, sums, prompts):
    output = talk("one", "/n\t", "two", "/q\t", "never")
    assert "one" not in prompts.text(1) and len(prompts) == 2 and output[-1] == ""


# ---------------------------------------------------------------------- commands


def test_new(talk, prompts):
    add_checkpoint("sft", table_model(anything=True))
    lines = ("first", "second", "/new", "first", " /etc", "", "   ", "/quit", "never")
    output = talk(*lines, flags=("--max_tokens=5", "--system=S", "--seed=40"))
    begin = "<|bos|><|system_start|>S<|system_end|><|user_start|>first<|user_end|><|assistant_start|>"
    reply = TOKENIZER.decode(prompts[0]["made"])
    assert prompts.text(0) == prompts.text(2) == begin
    assert prompts.text(1).startswith(f"{begin}{reply}<|assistant_end|><|user_start|>second<|user_end|>")
    assert output[1] == f"{reply}\n{CUT}" != output[4]  # another seed
    assert " /etc" in prompts.text(3) and [reply["seed"] for reply in prompts] == list(range(40, 44))


def test_save_appends_the_conversation_in_the_form_that_training_reads(talk, sums, tmp_path):
    file = tmp_path / "my chats.jsonl"
    saved = f"/save {file}"
    output = talk(saved, "one", saved, "two", saved, "/save", f"/save {tmp_path}/a.txt", f"/save {tmp_path}/no/b.jsonl",
                  flags=("--system=S\udcff",))  # fmt: skip
    assert "no conversation" in output[1] and str(file) in output[3] and str(file) in output[5]
    assert all(line.startswith("error: /save") and line.count("\n") == 1 for line in (output[1], *output[6:9]))
    task = Conversations("train", str(file))
    first, second = (messages_of(json.loads(line)) for line in file.read_text().splitlines())
    assert [message["role"] for message in second] == ["system", "user", "assistant", "user", "assistant"]
    assert second[:3] == first == task.example(0).messages
    call = {"type": "python", "text": "47+38"}
    assert second[1]["content"] == "one" and call in second[2]["content"]
    assert second[0]["content"] == "S\ufffd"  # a byte of a command line that is no UTF-8


def test_the_settings_are_the_flags(talk, sums, prompts):
    flags = ("--temperature=0.5", "--top_k=3", "--top_p=0.9", "--max_tokens=7", "--seed=11")
    output = talk("one", "two", flags=flags)
    settings = [{key: reply[key] for key in ("max_tokens", *asdict(SamplingParams()))} for reply in prompts]
    # Those that are not set are the checkpoint's.
    assert settings[0] == {**asdict(SamplingParams(0.5, 3, 0.9, min_p=0.2, seed=11)), "max_tokens": 7}
    assert settings[1] == {**settings[0], "seed": 12}
    assert output[1] == output[2] == f"S= [47+3]\n{CUT}"  # 7 tokens: the call is cut off
    talk("one")
    assert prompts[2]["max_tokens"] == 256 and (prompts[2]["temperature"], prompts[2]["min_p"]) == (0.8, 0.2)
    folder = paths.checkpoint_dir("rl", "tiny")
    own = {"stage": "rl", "sampling": {"temperature": 0.3, "top_k": 7}}
    save_checkpoint(folder, 3, table_model(SUM, SUM_ANSWERED), TOKENIZER, own)
    talk("one", flags=("--temperature=0.6",))
    assert {**prompts[3], **asdict(SamplingParams(0.6, 7))} == prompts[3]


def test_a_reply_names_the_limit_that_has_cut_it(talk):
    add_checkpoint("sft", table_model(ids("assistant_start", b"abcdefgh.", "assistant_end")))
    assert talk("x", flags=("--max_tokens=4",))[1] == f"abcd\n{CUT}"
    # The context's end is another limit than the user's.
    add_checkpoint("sft", table_model(ids("assistant_start", b"abcdefgh.", "assistant_end"), context=8))
    assert talk("x")[1].startswith("abc\n(") and talk("x")[1] != f"abc\n{CUT}"


def test_a_thought_that_the_prompt_begins_belongs_to_the_reply(tmp_path, capsys):
    """Later turns have what the template keeps of it."""
    tokenizer = Tokenizer.load(save_family(tmp_path, "qwen3_5", chat_template=published("qwen3_8")))
    pieces = ["hm\n</think>\n\nso", "and"]
    prompts = []

    def stream(ids: list[list[int]], **_: Any) -> Iterator[Any]:
        prompts.append(tokenizer.decode(ids[0]))
        made = tokenizer.encode(pieces[len(prompts) - 1])
        for number, token in enumerate(made, 1):
            yield SimpleNamespace(id=token, kind="text", finish_reason="length" if number == len(made) else None)

    model = SimpleNamespace(config=SimpleNamespace(sequence_len=4096))
    engine = SimpleNamespace(tokenizer=tokenizer, model=model, stream=stream)
    for name in ("call_start", "call_end", "answer_start", "answer_end"):
        setattr(engine, name, -1)
    chat = chat_cli.Chat(engine, chat_cli.Config(), SamplingParams(), has_turns=True)
    chat.send("why")
    assert capsys.readouterr().out.startswith("<think>\nhm\n</think>\n\nso\n")
    chat.send("and")
    assert f"{prompts[0]}hm\n</think>\n\nso<|im_end|>\n<|im_start|>user\nand<" in prompts[1]


def test_help_and_other_commands(talk, sums, prompts):
    banner, _, wrong, also, answer, *_ = talk("one", "/frobnicate", "/quit now", "/help", "two")
    for line, command in ((wrong, "/frobnicate"), (also, "/quit")):
        assert line.count("\n") == 1 and command in line and "/help" in line and "/help" in banner
    assert all(f"\n  {what} " in f"\n{answer}" for what in (*chat_cli.COMMANDS, "Ctrl-C", "any text"))
    assert "one" in prompts.text(1) and len(prompts) == 2  # the conversation goes on


# ---------------------------------------------------------------------- Ctrl-C


@pytest.mark.parametrize(
    ("tokens", "shown", "kept"), [(5, "S= [47] [stopped]\n", "S=47"), (0, " [stopped]\n", "")]
)  # an open call is text
def test_ctrl_c_keeps_the_reply_so_far(talk, sums, prompts, tokens, shown, kept):
    prompts.ctrl_c_after = tokens
    output = talk("one", "two", "^C", "three")
    assert output[1:3] == [shown, "S= [47+38 -> 85] .\n"] and "/quit" in output[3] and output[4].startswith("S=")
    assert f"<|assistant_start|>{kept}<|assistant_end|><|user_start|>two" in prompts.text(1)


def test_ctrl_c_ends_a_single_reply_with_its_exit_code(capsys, sums, prompts):
    prompts.ctrl_c_after = 2
    with pytest.raises(SystemExit) as leaving:
        run("-p", "x")
    assert leaving.value.code == 130 and capsys.readouterr() == (
        "S=\n",
        "error: interrupted: the same command begins it again\n",
    )


# ---------------------------------------------------------------------- one shot, pipes


@pytest.mark.parametrize(
    ("argv", "piped", "message"),
    [
        ((), "two\n\nlines\n", "two\n\nlines"),
        (("What is 2+2?",), Terminal("never read"), "What is 2+2?"),
        (("What", "is", "2+2?"), Terminal("never read"), "What is 2+2?"),
        (("-p", "What is 2+2?"), None, "What is 2+2?"),
        (("-p", "What is this?"), "a\nlong text\n", "What is this?\na\nlong text"),
        (("-p", b"bad \xff bytes".decode(errors="surrogateescape")), "", "bad \ufffd bytes"),
    ],
)
def test_one_message_from_words_and_pipes(capsys, sums, prompts, argv, piped, message):
    assert one_shot(capsys, *argv, piped=piped) == ("S=.\n", "")
    assert prompts.text(0) == f"<|bos|><|user_start|>{message}<|user_end|><|assistant_start|>"


def test_on_a_terminal_a_single_reply_shows_its_call(capsys, monkeypatch, sums, prompts):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert one_shot(capsys, "-p", "x", "--system=Be kind.") == ("S= [47+38 -> 85] .\n", "")
    assert "<|system_start|>Be kind.<|system_end|><|user_start|>x<" in prompts.text(0)


@pytest.mark.parametrize(
    ("stage", "argv", "flag", "piped"),
    [
        ("sft", ("one", "-p", "two"), "--prompt", "never read"),
        ("sft", (), "--prompt", ""),
        ("sft", (), "--prompt", " \n\n"),
        ("base", ("-p", "x", "--system=Be kind."), "--system", ""),
    ],
)
def test_a_mistake_is_one_line(capsys, monkeypatch, prompts, stage, argv, flag, piped):
    add_checkpoint(stage, table_model(BASE))
    monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
    with pytest.raises(SystemExit) as leaving:
        run(*argv)
    out, err = capsys.readouterr()
    assert (leaving.value.code, out) == (1, "") and not prompts
    assert err.startswith("error: ") and err.count("\n") == 1 and flag in err


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "scripts.chat_cli", "--device=cpu", "--dtype=float32", *argv]


def environment() -> dict[str, str]:
    # The real terminal here does not answer where its cursor is.
    return {**os.environ, "OMP_NUM_THREADS": "1", "PROMPT_TOOLKIT_NO_CPR": "1"}


@pytest.mark.slow
def test_pipes_of_a_process(sums):
    piped = subprocess.run(
        command(), cwd=ROOT, env=environment(), input="从".encode() + b"\xff?", capture_output=True, timeout=120
    )
    assert (piped.returncode, piped.stdout, piped.stderr) == (0, b"S=.\n", b"")

    add_checkpoint("rl", table_model(anything=True, context=4096))
    with subprocess.Popen(
        command("-p", "x", "--max_tokens=4000"), cwd=ROOT, env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as endless:  # fmt: skip
        assert endless.stdout and endless.stderr
        assert len(endless.stdout.read(10)) == 10  # streamed: the reply is far from its end
        endless.stdout.close()
        assert endless.stderr.read() == b""  # the reader has left, and nothing is printed
        assert endless.wait(timeout=60) == 1


PROMPT = r"\x1b\[\?2004h(?s:.)*?> "  # from here on the terminal marks what is pasted


@pytest.mark.slow
def test_a_real_terminal():
    add_checkpoint("sft", table_model(anything=True, context=8192))
    process, terminal = pty.fork()
    if process == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a runner in the background has it ignored
        os.chdir(ROOT)
        os.execvpe(sys.executable, command("--max_tokens=8000"), environment())
    seen = ""

    def read_until(pattern: str, seconds: float = 120) -> str:
        """The output up to the pattern; what follows it stays for the next call."""
        nonlocal seen
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, seen)):
            assert time.monotonic() < deadline, f"no {pattern!r} in {seen!r}"
            if select.select([terminal], [], [], 0.2)[0]:
                seen += os.read(terminal, 4096).decode().replace("\r\n", "\n")
        text, seen = seen[: match.end()], seen[match.end() :]
        return text

    try:
        read_until("loading ...")
        assert "sft: " in read_until(PROMPT)
        for pressed, *expected in (
            ("\x03", "/quit", PROMPT),
            ("hellX\x7fo\r", "[a-z]{40}"),  # a typing error, taken back
            ("\x03", r"\[stopped\]", PROMPT),
            ("\x1b[A\r", "hello", "[a-z]{40}"),  # the message before, from the line editor's memory
            ("\x03", r"\[stopped\]", PROMPT),
        ):
            os.write(terminal, pressed.encode())
            for pattern in expected:
                assert len(read_until(pattern)) < 8000
        os.write(terminal, b"\x04")  # Ctrl-D
        with contextlib.suppress(OSError):  # the other end is closed
            while os.read(terminal, 4096):
                pass
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
        process = 0
    finally:
        os.close(terminal)
        if process:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


# ---------------------------------------------------------------------- a base model


def test_a_base_model_continues_text(capsys, talk, prompts):
    add_checkpoint("base", table_model(BASE))
    assert one_shot(capsys, "-p", "Upon") == one_shot(capsys, piped="Upon\n") == ("Upon ago.\n", "")
    one_shot(capsys, "--max_tokens=3", piped="")  # nothing to continue: any text
    output = talk("Upon", "then", "x" * 600, "Upon", "", "never")
    assert output[1] == output[4] == "Upon ago.\n" and output[2] == "then ago.\n"
    assert re.match("error: .* 601 tokens.* 512", output[3])
    assert len(output) == 6 and output[5] == ""  # an empty line leaves
    bos = TOKENIZER.get_bos_token_id()
    assert all(reply["prompt"][:1] == [bos] and bos not in reply["prompt"][1:] for reply in prompts)
    assert prompts[4]["prompt"] == TOKENIZER.encode("then", prepend=bos)  # without the text before it
