"""Bars at the bottom of a terminal: whole lines above them, one process that draws, plain lines elsewhere."""

import codecs
import contextlib
import io
import os
import pty
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from nanochat.ground import screen
from nanochat.ground.log import print0, warn
from nanochat.ground.screen import Bar, phase, track
from nanochat.run.run_log import RunLog

COLUMNS = 80
STEP = "loss 5.0000 | lr 0.02 | 500 tok/s"


class Terminal(threading.Thread):
    """The other end of a pseudo-terminal: keeps what a reader would see, line by line, and what was there before."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.master, slave = pty.openpty()
        self.stream = os.fdopen(slave, "w", encoding="utf-8")
        self.text = ""
        self.lines = [""]
        self.row = 0
        self.seen: list[str] = []  # every state of the last lines
        self.start()

    def run(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")()
        with contextlib.suppress(OSError):  # the other end was closed
            while data := os.read(self.master, 65536):
                text = decoder.decode(data)
                self.text += text
                self._obey(text)
                self.seen.append("\n".join(self.lines[-4:]))

    def _obey(self, text: str) -> None:
        # What rich writes: text, CR, LF, a line up, erase a line; colours and the cursor change no character.
        for part in re.findall(r"\x1b\[\??[\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
            if part == "\r":
                continue  # each text after it begins with an erased line
            if part == "\n":
                self.row += 1
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif part == "\x1b[1A":
                self.row -= 1
            elif part == "\x1b[2K":
                self.lines[self.row] = ""
            elif not part.startswith("\x1b"):
                self.lines[self.row] += part


@pytest.fixture(autouse=True)
def no_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test starts without bars; an earlier test of a failed run may have left some."""
    monkeypatch.setattr(screen, "_bars", [])


@contextlib.contextmanager
def in_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """A terminal as the standard output and error of this process."""
    for name in ("CI", "NO_COLOR", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setattr(screen, "SHOWN_AFTER_SECONDS", 0.0)
    terminal = Terminal()
    with terminal.stream as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        yield terminal
    terminal.join(10)  # it has read all that was written


def wait_for(terminal: Terminal, words: str) -> str:
    """The last lines that had these words."""
    for _ in range(500):
        for state in terminal.seen[::-1]:
            if words in state:
                return state
        time.sleep(0.02)
    raise AssertionError(f"{words!r} was never shown: {terminal.text!r}")


def metrics(step: int, **more: float) -> dict:
    return {"step": step, "loss": 5.0 - step, "lr": 0.02, "tokens": (step + 1) * 1000, "tok_per_sec": 500.0, **more}


def test_output_without_a_reader_asks_for_a_stop_once_and_raises_no_more(monkeypatch):
    requests: list[int] = []
    for number in (signal.SIGPIPE, signal.SIGHUP):
        reader, writer = os.pipe() if number == signal.SIGPIPE else pty.openpty()
        output = screen.Output(os.fdopen(writer, "w"))
        print("read", file=output, flush=True)
        os.close(reader)
        monkeypatch.setattr(screen, "on_lost", None)
        with pytest.raises(OSError):
            print("outside of a run", file=output, flush=True)
        monkeypatch.setattr(screen, "on_lost", requests.append)
        for _ in range(3):
            print("lost", file=output, flush=True)
        assert requests.pop() == number and not requests


def test_a_run_in_a_terminal_has_a_bar_and_whole_lines_above_it(monkeypatch, tmp_path):
    with in_terminal(monkeypatch) as terminal, screen.opened():
        phase("loading torch")
        wait_for(terminal, "loading torch")
        with RunLog("base", tmp_path, 100) as run:
            for step in range(4):
                run.bar.done = step + 1
                run.step(metrics(step))
                print0(f"a line {step} " + "x" * 100)
                warn(f"a warning {step}")
            run.step(metrics(4, val_bpb=1.25, grad_norm=0.1))
            shown = wait_for(terminal, "eta 3m12s  loss 1.0000")
            for _ in track(range(3), "evaluation"):
                inner = wait_for(terminal, "evaluation")
    assert re.search(r"base +[━╸╺]+ 4/100  \d+s  eta 3m12s  loss 1\.0000  500 tok/s", shown)
    assert "evaluation" in inner.splitlines()[-1] and "base" in inner.splitlines()[-2]
    # What stays on the screen: each line once, whole, in order; of the five steps the first and the evaluation.
    first, *between, last = [line for line in terminal.lines if line.strip()]
    assert first == f"base   0/100 | {STEP}"
    assert last.startswith("base   4/100 | loss 1.0000 ") and "val_bpb 1.2500" in last
    lines = [(f"a line {step} " + "x" * 100, f"warning: a warning {step}") for step in range(4)]
    assert between == [line for pair in lines for line in pair]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5  # the file has every step
    assert terminal.text.rindex("\x1b[?25h") > terminal.text.rindex("\x1b[?25l")  # the cursor is there


def test_an_interrupted_bar_leaves_the_terminal_as_it_was(monkeypatch):
    with in_terminal(monkeypatch) as terminal:
        with pytest.raises(KeyboardInterrupt), screen.opened(), Bar("replies", 10):
            wait_for(terminal, "replies")
            raise KeyboardInterrupt
        print0("error: interrupted")
        wait_for(terminal, "error: interrupted")
    assert [line for line in terminal.lines if line.strip()] == ["error: interrupted"]
    assert not screen.has_bars()


def test_only_rank_0_draws_and_nothing_without_a_screen(monkeypatch, capsys):
    phase("loading")
    with Bar("replies", 2) as one:
        assert list(track((number for number in range(3)), "numbers")) == [0, 1, 2]
    assert one.done == 0
    assert capsys.readouterr() == ("", "")
    with in_terminal(monkeypatch) as terminal:
        monkeypatch.setenv("RANK", "1")
        with screen.opened(), Bar("replies", 10):
            assert not screen.has_bars()
    assert terminal.text == ""


@pytest.mark.parametrize("name, value", [("TERM", "dumb"), ("NO_COLOR", "1"), ("CI", "true"), ("pipe", "")])
def test_elsewhere_lines_are_plain_and_silence_has_a_heartbeat(monkeypatch, tmp_path, name, value):
    for variable in ("CI", "NO_COLOR", "RANK"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    out = io.StringIO()
    out.isatty = lambda: name != "pipe"  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(screen, "SHOWN_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(screen, "HEARTBEAT_SECONDS", 0.1)
    with screen.opened(), RunLog("base", tmp_path, 100) as run:
        run.step(metrics(0))
        run.step(metrics(1))
        run.bar.done = 2
        with Bar("micro-batch", 8, done=3):
            while "micro-batch" not in out.getvalue():
                time.sleep(0.01)
    first, second, *beats = out.getvalue().splitlines()
    assert (first, second) == (f"base   0/100 | {STEP}", f"base   1/100 | {STEP.replace('5.', '4.')} | eta 3m16s")
    assert any(re.search(r"base 2/100  \d+s  eta 3m16s .* micro-batch 3/8  \d+s  eta", beat) for beat in beats)


def test_what_a_bar_says():
    bars: dict[str, dict] = {
        "40s": {"total": None},
        "3  40s": {"total": None, "done": 3},
        "2/8  40s  eta 2m00s": {"total": 8, "done": 2},
        "8/8  40s  done": {"total": 8, "done": 8, "note": "done"},
        "0/8  40s": {"total": 8, "done": 0},
        "60/100  40s  eta 1m20s  loss 1": {"total": 100, "done": 60, "note": "loss 1", "seconds_each": 2.0},
        "60/100  40s": {"total": 100, "done": 60, "seconds_each": 0},  # a run that resumes
    }
    began = time.monotonic() - 40
    assert [Bar("x", began=began, **fields).status() for fields in bars.values()] == list(bars)
