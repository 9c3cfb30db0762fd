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
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import cpu_device, tiny_tokenizer

from nanochat import cli, paths
from nanochat.checkpoint_manager import save
from nanochat.conversation import check_messages, render
from nanochat.engine import Engine
from nanochat.gpt import GPT, GPTConfig
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


def table_model(*rows: list[int], anything: bool = False, context: int = 128) -> GPT:
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
    return save(paths.checkpoint_dir(stage, tag), step, model, TOKENIZER, {"stage": stage}, None, cpu_device())


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

    def watched(self: Engine, prompts: list[list[int]], **settings: Any) -> Iterator[Any]:
        seen.append({"prompt": prompts[0], "made": [], **settings})
        for column, chosen in stream(self, prompts, **settings):
            seen[-1]["made"].append(column[0])
            yield column, chosen

    monkeypatch.setattr(Engine, "stream", watched)
    return seen


@pytest.fixture
def ctrl_c_after(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Put the number of tokens behind which the next reply is interrupted."""
    planned: list[int] = []
    stream = Engine.stream

    def interrupted(self: Engine, *args: Any, **settings: Any) -> Iterator[Any]:
        left = planned.pop() if planned else -1
        for column in stream(self, *args, **settings):
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            yield column

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
        monkeypatch.setattr(sys, "stdin", Terminal("".join(f"{line}\n" for line in lines)))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        if not colour:
            monkeypatch.setenv("NO_COLOR", "1")
        run(*flags)
        out, err = capsys.readouterr()
        assert err == ""
        return out.split("> ")

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
    dim = talk("What is 47 + 38?", colour=False)[1]
    assert "\x1b" not in dim


def test_colour_is_for_what_is_not_text(talk, sums, monkeypatch):
    reply = re.sub(r"\x1b\[0m\x1b\[2m", "", talk("x", colour=True)[1].replace("\n", "$"))
    marked = re.sub(r"\x1b\[2m(.*?)\x1b\[0m", r"<\1>", talk("x", colour=True)[1].replace("-> ", "-"))
    assert marked == "S=< [><4><7><+><3><8>< -" or "\x1b[2m" in reply
