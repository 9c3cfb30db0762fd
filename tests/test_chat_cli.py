"""The terminal: chats and continues, shows calls, keeps its history, obeys commands, stops a reply and not itself.

The models here are tables: what follows a token depends on that token alone, so that every reply is known.
"""

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
from typing import Any

import pytest
import torch
from tiny import save_checkpoint, tiny_tokenizer

from nanochat.conversation import check_messages, render
from nanochat.engine import Engine, SamplingParams
from nanochat.gpt import GPT, GPTConfig
from nanochat.shell import cli, paths
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


def add_checkpoint(stage: str, model: GPT, tag: str = "tiny", step: int = 3) -> Path:
    return save_checkpoint(paths.checkpoint_dir(stage, tag), step, model, TOKENIZER, {"stage": stage})


@pytest.fixture(autouse=True)
def base_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    for name in ("NANOCHAT_TRACEBACK", "NO_COLOR", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def sums() -> None:
    add_checkpoint("sft", table_model(SUM, SUM_ANSWERED))


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Each reply that is asked for: `prompt`, `made` (the tokens that came), the settings."""
    seen: list[dict[str, Any]] = []
    stream = Engine.stream

    def watched(self: Engine, prompts: list[list[int]], max_tokens: int, sampling: SamplingParams) -> Iterator[Any]:
        seen.append({"prompt": prompts[0], "made": [], "max_tokens": max_tokens, **asdict(sampling)})
        for new in stream(self, prompts, max_tokens=max_tokens, sampling=sampling):
            if new.finish_reason != "stop":
                seen[-1]["made"].append(new.id)
            yield new

    monkeypatch.setattr(Engine, "stream", watched)
    return seen


@pytest.fixture
def ctrl_c_after(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Put the number of tokens behind which the next reply is interrupted."""
    planned: list[int] = []
    stream = Engine.stream

    def interrupted(self: Engine, *args: Any, **settings: Any) -> Iterator[Any]:
        left = planned.pop() if planned else -1
        for new in stream(self, *args, **settings):
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            yield new

    monkeypatch.setattr(Engine, "stream", interrupted)
    return planned


class Terminal(io.StringIO):
    """Lines as someone types them; the line ^C is that key."""

    def isatty(self) -> bool:
        return True

    def readline(self, size: int | None = -1, /) -> str:
        line = super().readline()
        if line == "^C\n":
            raise KeyboardInterrupt
        return line


def run(*argv: str) -> None:
    """As from the command line; raises SystemExit with the exit code where it is not 0."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["chat_cli", "--device=cpu", "--dtype=float32", *argv])
        cli.run(chat_cli.main, chat_cli.Config)


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Type lines on a terminal; returns what stands behind each of them, without the `> ` of the prompts."""

    def talk(*lines: str, flags: tuple[str, ...] = (), colour: bool = False) -> list[str]:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", Terminal("".join(f"{line}\n" for line in lines)))
            patch.setattr(sys.stdout, "isatty", lambda: True)
            if not colour:
                patch.setenv("NO_COLOR", "1")
            run(*flags)
        out, err = capsys.readouterr()
        assert err == ""
        return re.split("(?<!-)> ", out)  # the one in a call's arrow is none

    return talk


def one_shot(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[str, str]:
    capsys.readouterr()
    run(*argv)
    out, err = capsys.readouterr()
    return out, err


# ---------------------------------------------------------------------- which model


def test_auto_is_the_furthest_stage(talk):
    models = {}
    for stage in ("base", "mid", "sft", "dpo", "rl"):
        models[stage] = add_checkpoint(stage, table_model(SUM, SUM_ANSWERED))
        banner, *_ = talk()
        assert banner.startswith(f"{stage}: {models[stage]}\n")
    add_checkpoint("mid", table_model(SUM, SUM_ANSWERED), tag="other", step=7)
    assert talk(flags=("--model_tag=other",))[0].startswith("mid: ")
    assert talk(flags=("--source=sft",))[0].startswith("sft: ")
    assert talk(flags=(f"--source={models['dpo']}",))[0].startswith("dpo: ")
    assert "type the beginning of a text" in talk(flags=(f"--source={models['base']}",))[0]


def test_a_stage_without_a_finished_step_is_passed_over(talk, sums):
    (paths.checkpoint_dir("rl", "tiny") / "step_000003.tmp").mkdir(parents=True)
    (paths.base_dir() / "checkpoints" / "rl" / "note.txt").write_text("")
    assert talk()[0].startswith("sft: ")


def test_one_shot_tells_the_model_to_a_terminal_only(capsys, monkeypatch, sums):
    assert one_shot(capsys, "-p", "x")[1] == "[47+38 -> 85]\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert one_shot(capsys, "-p", "x")[1].startswith("sft: ")
    assert "sft:" not in one_shot(capsys, "-p", "x", "--source=sft")[1]


# ---------------------------------------------------------------------- a reply


def test_a_reply_with_its_call(talk, sums):
    banner, reply, end = talk("What is 47 + 38?")
    assert "/help" in banner
    assert (reply, end) == ("S= [47+38 -> 85] .\n", "\n")


def test_only_what_is_not_text_is_dim(talk, sums, monkeypatch):
    _, reply, _ = talk("x", colour=True)
    assert reply.replace("\x1b[0m\x1b[2m", "") == "S=\x1b[2m [47+38 -> 85] \x1b[0m.\n"
    monkeypatch.setenv("TERM", "dumb")
    assert talk("x", colour=True)[1] == "S= [47+38 -> 85] .\n"


def test_a_call_at_the_beginning_and_one_without_an_answer(talk):
    add_checkpoint("sft", table_model(ids("assistant_start", "python_start", b"1+"), ids(b"+", "assistant_end")))
    assert talk("x")[1] == "[1+]\n"  # it never closed its call
    add_checkpoint("sft", table_model(ids("assistant_start", "python_end", b"ok", "assistant_end")), step=4)
    assert talk("x")[1] == "ok\n"


@pytest.mark.parametrize("mode", ["terminal", "pipe", "base"])
def test_what_a_terminal_would_obey_is_left_out(talk, capsys, mode):
    expected = "[A从B\tC\nD\N{REPLACEMENT CHARACTER}\n"
    add_checkpoint("base" if mode == "base" else "sft", table_model(WILD))
    if mode == "terminal":
        assert talk("x")[1] == expected
    elif mode == "pipe":
        assert one_shot(capsys, "-p", "x")[0] == expected
    else:
        add_checkpoint("base", table_model(ids(b"x\x1b[c\n", "bos")), step=4)
        assert one_shot(capsys, "-p", "a\x1bx")[0] == "ax[c\n\n"


def test_stats(talk, capsys, sums):
    assert re.fullmatch(r"S= \[47\+38 -> 85\] \.\n\(14 tokens, [\d,.]+ tokens/s\)\n", talk("x", flags=("--stats",))[1])
    out, err = one_shot(capsys, "-p", "x", "--stats")
    assert out == "S=.\n"
    assert re.fullmatch(r"\[47\+38 -> 85\]\n\(14 tokens, [\d,.]+ tokens/s\)\n", err)


# ---------------------------------------------------------------------- the conversation


def test_later_turns_see_what_was_said(talk, sums, prompts, tmp_path):
    file = tmp_path / "chat.jsonl"
    talk("What is 47 + 38?", "从 <|assistant_end|>", f"/save {file}", "Thanks!", flags=("--system=Be kind.",))
    (row,) = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    messages = row["messages"]
    check_messages(messages)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [message["content"] for message in messages[:4:3]] == ["Be kind.", "从 <|assistant_end|>"]
    assert messages[2] == {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "S="},
            {"type": "python", "text": "47+38"},
            {"type": "python_output", "text": "85"},
            {"type": "text", "text": "."},
        ],
    }
    start, end = (TOKENIZER.encode_special(f"<|assistant_{name}|>") for name in ("start", "end"))
    messages.append({"role": "user", "content": "Thanks!"})
    for reply, until in zip(prompts, (2, 4, 6), strict=True):
        assert reply["prompt"] == [*render(TOKENIZER, messages[:until]).ids, start]
    for before, after in zip(prompts, prompts[1:], strict=False):  # the cache of one turn would serve the next
        begun = [*before["prompt"], *before["made"], end]
        assert after["prompt"][: len(begun)] == begun


def test_a_saved_conversation_is_a_task(talk, sums, tmp_path):
    from nanochat.tasks.conversations import Conversations

    file = tmp_path / "my chat.jsonl"
    talk("One", f"/save {file}", "/new", "Two", f"/save {file}")
    task = Conversations("train", str(file))
    first = task.example(0).messages
    assert len(task) == 1 and len(file.read_text().splitlines()) == 2  # the other row is the test split
    assert first[0] == {"role": "user", "content": "One"} and len(first) == 2


def test_the_oldest_turns_are_left_out_and_it_is_told_once(talk, prompts):
    context = 64
    add_checkpoint("sft", table_model(ids("assistant_start", b"ok.", "assistant_end"), context=context))
    words = "(the model reads 64 tokens: the oldest turns are left out from here)\n"
    said = talk(*(f"message {number}" for number in range(6)), "/new", "message 9", flags=("--max_tokens=10",))
    assert [words in text for text in said].count(True) == 1
    assert said[4] == f"{words}ok.\n" and said[5] == said[6] == "ok.\n"
    assert max(len(reply["prompt"]) for reply in prompts) <= context - 10
    last = prompts[5]["prompt"]
    text = TOKENIZER.decode(last)
    assert "message 5" in text and "message 3" in text and "message 2" not in text
    assert "message 9" in TOKENIZER.decode(prompts[6]["prompt"]) and len(prompts[6]["prompt"]) < 20


def test_a_message_too_long_is_told_and_the_chat_goes_on(talk, prompts, capsys):
    add_checkpoint("sft", table_model(ids("assistant_start", b"ok.", "assistant_end"), context=64))
    long = "x" * 40
    said = talk("hello", long, "/set max_tokens 8", long, "/set max_tokens 500", "hello")
    assert re.match("error: .* 44 tokens, .* 32: .* max_tokens", said[2])
    assert said[1] == said[4] == "ok.\n" and said[6].endswith("from here)\nok.\n")
    with pytest.raises(SystemExit) as leaving:
        run("-p", long)
    assert leaving.value.code == 1
    assert capsys.readouterr().err.startswith("error: the message has 44 tokens")


# ---------------------------------------------------------------------- commands


def test_new_undo_retry(talk, prompts):
    add_checkpoint("sft", table_model(anything=True))
    said = talk(
        *("/retry", "/undo", "/save x", "first", "/retry", "second", "/undo", "third", "/new", "/undo", "fourth"),
        *(" /etc", "", "   ", "/quit", "never"),
        flags=("--max_tokens=5", "--system=S", "--seed=40"),
    )
    for place, command in ((1, "/retry"), (2, "/undo"), (3, "/save"), (10, "/undo")):
        assert said[place] == f"error: {command}: there is no turn yet\n"
    assert said[7] == "taken back: second\n"
    first, other, _, third, fourth, slash = (TOKENIZER.decode(reply["prompt"]) for reply in prompts)
    begin = "<|bos|><|system_start|>S<|system_end|><|user_start|>"
    reply = TOKENIZER.decode(prompts[1]["made"])
    assert first == other == f"{begin}first<|user_end|><|assistant_start|>"
    assert said[4] != said[5] == f"{reply}\n"  # another seed
    assert third == f"{begin}first<|user_end|><|assistant_start|>{reply}<|assistant_end|><|user_start|>third" + (
        "<|user_end|><|assistant_start|>"
    )
    assert fourth == f"{begin}fourth<|user_end|><|assistant_start|>"
    assert " /etc" in slash
    assert [reply["seed"] for reply in prompts] == list(range(40, 46))


def test_system(talk, sums, prompts):
    said = talk("one", "/system Be brief, please.", "two", "/system", "three")
    assert said[2] == "system message: Be brief, please.\n" and said[4] == "no system message\n"
    one, two, three = (TOKENIZER.decode(reply["prompt"]) for reply in prompts)
    assert two.startswith("<|bos|><|system_start|>Be brief, please.<|system_end|><|user_start|>one<|user_end|>")
    assert one.startswith("<|bos|><|user_start|>one") and three.startswith("<|bos|><|user_start|>one")


def test_set(talk, sums, prompts):
    said = talk(
        *("one", "/set temperature 0.5", "/set top_k=3", "/set top_p 0.9", "/set max_tokens 7", "/set seed 11", "two"),
        *("three", "/set"),
    )
    settings = [{key: reply[key] for key in ("max_tokens", *chat_cli.SAMPLING)} for reply in prompts]
    assert settings[0] == {**asdict(SamplingParams(temperature=0.7)), "max_tokens": 256}
    assert settings[1] == {**asdict(SamplingParams(0.5, 3, 0.9, seed=11)), "max_tokens": 7}
    assert settings[2] == {**settings[1], "seed": 12}
    assert said[9].startswith("max_tokens 7, temperature 0.5, top_k 3, top_p 0.9") and "seed 13" in said[9]
    assert said[7] == said[8] == "S= [47+3]\n"  # 7 tokens: the call is cut off


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/set temperature -1", "--temperature -1.0"),
        ("/set temperature hot", "/set temperature hot: not a number"),
        ("/set temperature", "/set temperature : not a number"),
        ("/set top_k 0.5", "/set top_k 0.5: not a number"),
        ("/set top_p 2", "--top_p"),
        ("/set max_tokens 0", "--max_tokens 0: at least 1"),
        ("/set seed -1", "--seed -1"),
        ("/set colour red", "/set colour: no such setting; there are max_tokens, temperature, top_k"),
        ("/frobnicate", "/frobnicate is not a command: /help lists them"),
        ("/save", "/save: name a file"),
        ("/save /nowhere/at/all.jsonl", "No such file or directory"),
        ("/save ~nobody-of-that-name/x", "/save ~nobody-of-that-name/x"),
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing(talk, sums, prompts, line, words):
    said = talk("one", line, "two", "/set")
    assert said[2].startswith("error: ") and said[2].count("\n") == 1 and words in said[2]
    assert said[4].startswith("max_tokens 256, temperature 0.7, top_k 0, top_p 1.0") and "seed 2" in said[4]
    assert "one" in TOKENIZER.decode(prompts[1]["prompt"])


def test_help_names_every_command(talk, sums):
    help_text = talk("/help")[1]
    for command in ("/new", "/undo", "/retry", "/system", "/set", "/save", "/quit"):
        assert command in help_text
        assert "is not a command" not in "".join(talk("hello", command))


# ---------------------------------------------------------------------- Ctrl-C


def test_ctrl_c_keeps_the_reply_so_far(talk, sums, prompts, ctrl_c_after, tmp_path):
    file = tmp_path / "chat.jsonl"
    ctrl_c_after.append(5)
    said = talk("one", "two", f"/save {file}")
    assert said[1] == "S= [47] [stopped]\n" and said[2] == "S= [47+38 -> 85] .\n"
    messages = json.loads(file.read_text())["messages"]
    assert messages[1]["content"] == [{"type": "text", "text": "S="}, {"type": "python", "text": "47"}]
    assert messages[1]["train"] is False and "train" not in messages[3]  # it should not be learned to end there
    assert "<|python_start|>47<|python_end|><|assistant_end|><|user_start|>two" in TOKENIZER.decode(
        prompts[1]["prompt"]
    )


def test_a_reply_that_max_tokens_cut_off_is_not_learned_from(talk, sums, tmp_path):
    file = tmp_path / "chat.jsonl"
    talk("one", f"/save {file}", flags=("--max_tokens=2",))
    assert json.loads(file.read_text())["messages"][1] == {"role": "assistant", "content": "S=", "train": False}


def test_ctrl_c_before_the_first_token(talk, sums, ctrl_c_after, tmp_path):
    ctrl_c_after.append(0)
    said = talk("one", "two", f"/save {tmp_path / 'chat.jsonl'}")
    assert said[1] == " [stopped]\n" and said[2] == "S= [47+38 -> 85] .\n"
    assert json.loads((tmp_path / "chat.jsonl").read_text())["messages"][1]["content"] == ""


def test_ctrl_c_at_the_prompt_leaves_nothing(talk, sums):
    said = talk("^C", "^C", "one")
    assert said[1] == said[2] == "\nCtrl-D or /quit leaves\n" and said[3].startswith("S=")


def test_ctrl_c_ends_a_single_reply_with_its_exit_code(capsys, sums, ctrl_c_after):
    ctrl_c_after.append(2)
    with pytest.raises(SystemExit) as leaving:
        run("-p", "x")
    assert leaving.value.code == 130
    assert capsys.readouterr() == ("S=\n", "error: interrupted\n")


# ---------------------------------------------------------------------- one shot, pipes


class Pipe(io.StringIO):
    """The other end of a pipe."""


def test_a_pipe_is_one_message_and_the_reply_is_text_alone(capsys, monkeypatch, sums, prompts):
    monkeypatch.setattr(sys, "stdin", Pipe("two\n\nlines\n"))
    assert one_shot(capsys) == ("S=.\n", "[47+38 -> 85]\n")
    assert TOKENIZER.decode(prompts[0]["prompt"]) == "<|bos|><|user_start|>two\n\nlines<|user_end|><|assistant_start|>"
    assert one_shot(capsys, "--prompt=x", "--system=Be kind.") == ("S=.\n", "[47+38 -> 85]\n")
    assert "<|system_start|>Be kind.<|system_end|><|user_start|>x<" in TOKENIZER.decode(prompts[1]["prompt"])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert one_shot(capsys, "-p", "x") == ("S= [47+38 -> 85] .\n", "")


@pytest.mark.parametrize("text", ["", "\n", " \n\n"])
def test_no_message(capsys, monkeypatch, sums, text):
    monkeypatch.setattr(sys, "stdin", Pipe(text))
    with pytest.raises(SystemExit) as leaving:
        run()
    assert leaving.value.code == 1
    assert capsys.readouterr() == ("", "error: --prompt: there is no message; name one, or pipe one in\n")


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "scripts.chat_cli", "--device=cpu", "--dtype=float32", *argv]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def test_mistakes_and_broken_text(capsys, sums):
    assert one_shot(capsys, "-p", b"bad \xff bytes".decode(errors="surrogateescape"))[0] == "S=.\n"
    with pytest.raises(SystemExit) as leaving:
        run("-p", "x", "--source=rl")
    out, err = capsys.readouterr()
    assert (leaving.value.code, out) == (1, "") and "`python -m scripts.chat_rl`" in err and err.count("\n") == 1


@pytest.mark.slow
def test_pipes_of_a_process(sums):
    piped = subprocess.run(
        command(), cwd=ROOT, env=environment(), input="从".encode() + b"\xff?", capture_output=True, timeout=120
    )
    assert (piped.returncode, piped.stdout, piped.stderr) == (0, b"S=.\n", b"[47+38 -> 85]\n")

    add_checkpoint("rl", table_model(anything=True, context=4096))
    with subprocess.Popen(
        command("-p", "x", "--max_tokens=4000"), cwd=ROOT, env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as endless:  # fmt: skip
        assert endless.stdout and endless.stderr
        assert len(endless.stdout.read(10)) == 10  # streamed: the reply is far from its end
        endless.stdout.close()
        assert endless.stderr.read() == b""  # the reader has left, and nobody is told
        assert endless.wait(timeout=60) == 1


@pytest.mark.slow
def test_a_real_terminal():
    add_checkpoint("sft", table_model(anything=True, context=8192))
    process, terminal = pty.fork()
    if process == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a runner in the background has it ignored
        os.chdir(ROOT)
        os.execvpe(sys.executable, command("--max_tokens=8000"), {**environment(), "TERM": "dumb"})
    seen = ""

    def read_until(pattern: str, seconds: float = 60) -> str:
        """What came up to the pattern; what is behind it stays for the next call."""
        nonlocal seen
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, seen)):
            assert time.monotonic() < deadline, f"no {pattern!r} in {seen!r}"
            if select.select([terminal], [], [], 0.2)[0]:
                seen += os.read(terminal, 4096).decode().replace("\r\n", "\n")
        text, seen = seen[: match.end()], seen[match.end() :]
        return text

    def press(text: str) -> None:
        os.write(terminal, text.encode())

    try:
        assert read_until("> ").startswith("sft: ")
        time.sleep(0.5)  # the prompt is there a moment before the line editor listens
        press("\x03")
        read_until("Ctrl-D or /quit leaves\n> ")
        press("hellX\x7fo\n")  # a typing error, taken back
        assert read_until("[a-z]{40}")
        press("\x03")
        stopped = read_until(r" \[stopped\]\n> ")
        assert len(stopped) < 8000
        press("\x1b[A\n")  # the message before, from the line editor's memory
        read_until("[a-z]{40}")
        press("\x03")
        read_until(r" \[stopped\]\n> ")
        press("/undo\n")
        assert read_until("taken back: .*\n> ").endswith("taken back: hello\n> ")
        press("\x04")  # Ctrl-D
        deadline = time.monotonic() + 60
        ended = (0, 0)
        while ended[0] == 0 and time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.1)[0]:
                try:
                    os.read(terminal, 4096)
                except OSError:  # nobody holds the other end any more
                    time.sleep(0.05)
            ended = os.waitpid(process, os.WNOHANG)
        assert os.waitstatus_to_exitcode(ended[1]) == 0 and ended[0] == process
        process = 0
    finally:
        os.close(terminal)
        if process:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


# ---------------------------------------------------------------------- a base model


def test_a_base_model_continues_text(capsys, monkeypatch, talk, prompts):
    add_checkpoint("base", table_model(BASE))
    assert one_shot(capsys, "-p", "Upon") == ("Upon ago.\n", "")
    monkeypatch.setattr(sys, "stdin", Pipe("Upon\n"))
    assert one_shot(capsys) == ("Upon ago.\n", "")
    monkeypatch.setattr(sys, "stdin", Pipe(""))
    one_shot(capsys, "--max_tokens=3")  # nothing to continue: any text
    said = talk("Upon", "/retry", "then", "x" * 600, "/system Be kind.", "Upon", "", "never")
    assert said[1] == said[2] == said[6] == "Upon ago.\n" and said[3] == "then ago.\n"
    assert said[4] == "error: the prompt has 601 tokens, the model's context 512: shorten the prompt\n"
    assert said[5].startswith("error: /system")
    assert len(said) == 8 and said[7] == ""  # an empty line leaves
    bos = TOKENIZER.get_bos_token_id()
    assert all(reply["prompt"][:1] == [bos] and bos not in reply["prompt"][1:] for reply in prompts)
    assert prompts[5]["prompt"] == TOKENIZER.encode("then", prepend=bos)  # without what stood before


def test_a_base_model_has_no_system_message(capsys):
    add_checkpoint("base", table_model(BASE))
    with pytest.raises(SystemExit) as leaving:
        run("-p", "x", "--system=Be kind.")
    assert leaving.value.code == 1
    assert "--system" in capsys.readouterr().err
