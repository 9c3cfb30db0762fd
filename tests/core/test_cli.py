"""The command line: one dataclass, any spelling of a flag, and one line for what a user can fix."""

import errno
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
import torch

from nanochat.ground import cli
from nanochat.ground.cli import UserError

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Config:
    device_batch_size: cli.Positive = 16  # rows a device computes at once
    model_tag: str | None = None  # the folder's name
    ratio: float = 12.0  # tokens a parameter
    dtype: Literal["auto", "float32"] = "auto"  # of products
    resume: bool = False  # go on
    seed: cli.Frozen[cli.Seed | None] = None  # of the data
    share: cli.Fraction = 0.5  # of the run
    top_p: Annotated[float, cli.Range(1e-9, 1)] = 1.0  # of the probability


# ---------------------------------------------------------------------- flags


ONE_CONFIG = [
    ["--device_batch_size=8", "--model_tag=a-b_c"],
    ["--device-batch-size", "8", "--model-tag", "a-b_c"],
    ["--device-batch_size", "8", "--model_tag", "a-b_c"],
    ["--", "--device-batch-size", "8", "--model-tag=a-b_c"],  # what torchrun hands on
]


def test_any_spelling_of_a_flag():
    wanted = Config(device_batch_size=8, model_tag="a-b_c")  # a value keeps its hyphens and underscores
    assert [cli.parse(Config, argv) for argv in ONE_CONFIG] == [wanted] * len(ONE_CONFIG)
    assert cli.parse(Config, []) == cli.parse(Config, ["--"]) == Config()
    assert cli.parse(Config, ["--resume"]).resume is True
    assert cli.parse(Config, ["--no-resume"]).resume is False
    assert cli.parse(Config, ["--ratio=inf"]).ratio == float("inf")  # no range, no limit
    assert cli.frozen_flags(Config) == ["seed"]


WRONG_FLAGS = [
    (["--depth", "3"], ["--depth"]),
    (["--device_batch_sise", "3"], ["--device_batch_sise", "--device_batch_size"]),  # and what was meant
    (["--device_batch_size", "1.5"], ["--device_batch_size", "1.5"]),
    (["--device_batch_size"], ["--device_batch_size"]),
    (["--dtype", "float16"], ["--dtype", "float16", "'auto', 'float32'"]),
    (["stray"], ["stray"]),
    (["--seed=1.5"], ["--seed", "['1.5']"]),
    (["--ratio=x"], ["--ratio", "'x'"]),
    (["--model", "Qwen/Qwen3-0.6B", "--lora_r=8", "--lora_rank=8"], ["--model", "--lora_r=8", "docs/finetune.md"]),
]
OUT_OF_RANGE = [
    (["--device_batch_size=0"], ["--device_batch_size", "at least 1"]),
    (["--device_batch_size=" + "9" * 30], [f"--device_batch_size {'9' * 30}: at most 1,000,000,000,000"]),
    (["--seed=-1"], ["--seed", "at least 0"]),
    (["--share=1.1"], ["--share 1.1: at most 1"]),
    (["--share=nan"], ["--share", "at least 0"]),
    (["--top_p=0"], ["--top_p 0.0: above 0"]),
]


@pytest.mark.parametrize(("argv", "named"), [*WRONG_FLAGS, *OUT_OF_RANGE])
def test_bad_flags_are_one_line_and_two(argv, named, capsys):
    with pytest.raises(SystemExit) as leaving:
        cli.parse(Config, argv)
    assert leaving.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n")
    assert ("--help`" in err) == ((argv, named) in WRONG_FLAGS)
    assert not set("╭│╰─") & set(err) and "Range(" not in err
    for text in named:
        assert text in err


def test_help_is_the_dataclass_and_the_docstring(capsys):
    with pytest.raises(SystemExit) as leaving:
        cli.parse(Config, ["--help"])
    assert leaving.value.code == 0
    out, err = capsys.readouterr()
    assert err == ""
    for text in ("The command line: one dataclass", "--device_batch_size", "rows a device computes at once", "16"):
        assert text in out
    assert "--model_tag {None}|STR " in out and "--dtype {auto,float32} " in out


# ---------------------------------------------------------------------- run


def outcome(error: BaseException | None, monkeypatch, capsys, traceback: str = "") -> tuple[int, str]:
    """The exit code and stderr of a main that raises."""
    seen = []

    def main(config):
        seen.append(config)
        if error is not None:
            raise error

    monkeypatch.setattr(sys, "argv", ["prog", "--ratio=2"])
    monkeypatch.setenv("NANOCHAT_TRACEBACK", traceback)
    code = 0
    try:
        cli.run(main, Config)
    except SystemExit as leaving:
        code = leaving.code
    assert seen == [Config(ratio=2.0)]
    return code, capsys.readouterr().err


MEMORY = "error: out of memory: lower --device_batch_size"
FULL = "No space left on device"
ENDINGS: dict[str, tuple[BaseException | None, int, tuple[str, ...]]] = {  # the exit code, and words of the one line
    "done": (None, 0, ()),
    "a mistake": (UserError("--depth 0:\n  at least\t1"), 1, ("error: --depth 0: at least 1\n",)),
    "ctrl-c": (KeyboardInterrupt(), 130, ("error: interrupted: the same command begins it again\n",)),
    "cuda": (torch.OutOfMemoryError("CUDA out of memory. Tried 2.00 GiB.\nMore words."), 1, (MEMORY, "Tried 2.00 GiB")),
    "npu": (RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB (NPU 0)"), 1, (MEMORY, "(NPU 0)")),
    "host": (RuntimeError("DefaultCPUAllocator: not enough memory: you tried 9 bytes."), 1, (MEMORY, "tried 9 bytes")),
    "numpy": (MemoryError("Unable to allocate 8.00 EiB for an array"), 1, (MEMORY, "8.00 EiB")),
    "python": (MemoryError(), 1, (MEMORY, "MemoryError")),
    "full": (OSError(errno.ENOSPC, FULL), 1, ("error: the disk is full", "NANOCHAT_BASE_DIR")),
    "a full disk": (OSError(errno.ENOSPC, FULL, "/x/y"), 1, ("error: the disk is full", "/x/y", "NANOCHAT_BASE_DIR")),
    "another user's": (OSError(errno.EACCES, "No", "/x/y"), 1, ("error: /x/y: No", "chmod -R g+rwX", "NANOCHAT_BASE")),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_what_a_user_can_fix_is_one_line(name, monkeypatch, capsys):
    error, expected, words = ENDINGS[name]
    code, err = outcome(error, monkeypatch, capsys)
    assert (code, err.count("\n")) == (expected, 1 if expected else 0)
    assert err.startswith(words[:1] or "") and all(word in err for word in words) and "More words" not in err


UNEXPLAINED = [OSError(errno.EIO, "I/O"), RuntimeError("shapes differ"), ValueError("a bug")]


@pytest.mark.parametrize(("error", "requested"), [*((error, "") for error in UNEXPLAINED), (UserError("--what"), "1")])
def test_what_no_user_can_fix_keeps_its_traceback_and_on_request_all_do(error, requested, monkeypatch, capsys):
    with pytest.raises(type(error)) as caught:
        outcome(error, monkeypatch, capsys, requested)
    assert caught.value is error


# ---------------------------------------------------------------------- as a process


def test_closed_streams_take_text(monkeypatch):
    """As with `>&- 2>&-`."""
    monkeypatch.setattr(sys, "argv", ["program"])
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    cli.run(lambda config: print("lost", flush=True), Config, shows_progress=True)


PROGRAM = """
from dataclasses import dataclass
from nanochat.ground.cli import run

@dataclass(frozen=True)
class Config:
    "A program."

def main(config):
    for number in range(100_000):
        print(number)

run(main, Config)
"""


def test_a_reader_may_leave():
    """As `--help | head -3`: no traceback."""

    def run(output: int, *flags: str) -> tuple[int, str]:
        command = [sys.executable, "-c", PROGRAM, *flags]
        done = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.PIPE, text=True, timeout=60)
        return done.returncode, done.stderr

    reading, writing = os.pipe()
    os.close(reading)
    assert run(writing) == run(writing, "--help") == (1, "")  # the work is not done, and nobody reads an error
    os.close(writing)
    with Path("/dev/full").open("w") as full:
        code, error = run(full.fileno(), "--help")
    assert (code, error.count("\n")) == (1, 1)
    assert error.startswith("error: the disk is full")


TORN_DOWN = """
import atexit, os
from dataclasses import dataclass
from nanochat.ground import cli

class Torn:
    def __del__(self):
        os.abort()

@dataclass
class Config:
    "Does nothing."

def main(config):
    global torn
    torn = Torn()
    torn.itself = torn
    atexit.register(print, "at exit")
    print("done")

"""


@pytest.mark.parametrize(
    ("call", "job", "status"),
    [("cli.run(main, Config)", {"TORCHELASTIC_RUN_ID": "job"}, 0), ("main(Config())", {}, -signal.SIGABRT)],
    ids=["with run", "without run"],
)
def test_a_done_process_is_not_taken_apart(call, job, status):
    """Threads of the collective library that drop their tensors meanwhile abort it; here an object does."""
    done = subprocess.run(
        [sys.executable, "-c", TORN_DOWN + call], cwd=ROOT, env={**os.environ, **job}, capture_output=True, text=True
    )
    assert done.stdout.split("\n") == ["done", "at exit", ""]
    assert done.returncode == status, done.stderr


def test_a_command_whose_speedrun_has_died_already_ends():
    command = f'{sys.executable} -c "from nanochat.ground import cli; cli.end_with_launcher(); print(1)"'
    script = f"export _NANOCHAT_PARENT=$$; (sleep 0.3; {command}) & kill -9 $$"
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=False)  # ends with the command
    assert b"died" in done.stderr and not done.stdout
