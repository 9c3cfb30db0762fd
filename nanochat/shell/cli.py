"""A dataclass in, a command line out; and one clear line for a user's mistake.

Every script ends with `run(main, Config)`. The dataclass's fields are the flags, the comment
behind a field is its help. Exit codes: 0 done, 1 the run failed (one line says what to do next),
2 bad flags. `NANOCHAT_TRACEBACK=1` shows the whole traceback of a failure. `NANOCHAT_BASE_TRAIN="--depth=2"`, and
the like for every script, adds flags behind those of the command line: what a machine wants, or a quick trial.
"""

import contextlib
import errno
import io
import math
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Config = TypeVar("Config")


# What a device's runtime means by an error of its own, as one line with the mend, or None; `device.init` adds to it.
explainers: list[Callable[[BaseException], str | None]] = []


class UserError(ValueError):
    """A mistake the user can mend; its text names the flag and the next step."""


class Interrupted(Exception):
    """A stop was asked for while this was under way: it has no result, on any rank."""


def parse(config_type: type[Config], argv: list[str] | None = None) -> Config:
    """Read flags into the dataclass. Hyphens and underscores are alike; a `--` that torchrun
    hands on is skipped."""
    import tyro

    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--"]:
        argv = argv[1:]
    module = sys.modules[config_type.__module__]
    script = config_type.__module__ if module.__spec__ is None else module.__spec__.name
    variable = f"NANOCHAT_{script.rpartition('.')[2].upper()}"
    try:
        argv = [*argv, *shlex.split(os.environ.get(variable, ""))]
    except ValueError as error:
        fail(f"{variable} in the environment holds flags as a shell would read them: {error}", code=2)
    command = f"python -m {module.__spec__.name}" if module.__spec__ else Path(sys.argv[0]).name
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(config_type, prog=command, args=argv, description=module.__doc__, use_underscores=True)
    except SystemExit as leaving:
        if leaving.code:
            fail(f"{_without_frame(said.getvalue())}; see `{command} --help`", code=2)
        raise


def _without_frame(text: str) -> str:
    """What tyro says about a bad flag, without the box around it and the line on --help at its end."""
    lines = [line.strip("│| ") for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line[:1] not in "╭╰+"]
    sections = " ".join("\n" if line and not line.strip("─-") else line for line in lines).split("\n")
    return "; ".join(section.strip() for section in sections if not section.strip().startswith("For full helptext"))


def run(main: Callable[[Config], None], config_type: type[Config]) -> None:
    """Parse, run, and turn what a user can mend into one line on stderr and exit code 1."""
    for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show a character shows a question mark
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    config = parse(config_type)
    if os.environ.get("NANOCHAT_TRACEBACK") == "1":
        main(config)
        return
    try:
        main(config)
    except KeyboardInterrupt:
        fail("interrupted", code=130)
    except BrokenPipeError:  # the reader of a pipe left: nobody to tell, but the work is not done
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except UserError as error:
        fail(str(error))
    except OSError as error:
        if error.errno == errno.ENOSPC:
            where = error.filename or "no file named"
            fail(f"the disk is full ({where}): free space or point NANOCHAT_BASE_DIR elsewhere")
        if error.filename is None:
            raise
        fail(f"{error.filename}: {error.strerror}; mend the path, or point NANOCHAT_BASE_DIR elsewhere")
    except (RuntimeError, MemoryError, ImportError) as error:  # every backend's out-of-memory error is a RuntimeError
        line = _explain(error)
        if line is None:
            raise
        fail(line)


def out_of_memory(error: BaseException) -> bool:
    """Whether that is what a machine or a device means."""
    words = ("out of memory", "not enough memory", "can't allocate memory")
    return isinstance(error, MemoryError) or any(word in str(error).lower() for word in words)


def _explain(error: BaseException) -> str | None:
    """One line for a failure of the machine rather than of the code; None for others."""
    first_line = (str(error).splitlines() or [type(error).__name__])[0]
    if out_of_memory(error):
        return f"out of memory: lower --device_batch_size, --max_seq_len or --depth ({first_line})"
    cause: BaseException | None = error
    while cause is not None:  # torch loads an accelerator's package by itself, and says little when that fails
        missing = re.search(r"\S+\.so\S*(?=: cannot open shared object file)", str(cause))
        if missing:
            return (
                f"{missing[0]} is not found: run `source .../set_env.sh` of the accelerator's software in this shell "
                "first (`python check_npu.py` says where it lies), then this again"
            )
        cause = cause.__cause__ or cause.__context__
    return next((line for explain in explainers if (line := explain(error))), None)


def require(config: Any, flags: str, low: float, high: float = math.inf) -> None:
    """Raises UserError: when one of the flags (names with spaces between them) is set and not within low to high."""
    for flag in flags.split():
        value = getattr(config, flag)
        if isinstance(value, int) and value > max(low, 10**12) and high == math.inf:
            raise UserError(f"--{flag}: at most 1,000,000,000,000")
        if value is not None and not (low <= value <= high and abs(value) != math.inf):  # NaN is within nothing
            allowed = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
            raise UserError(f"--{flag} {value}: {allowed}")


def fail(message: str, code: int = 1) -> None:
    """Print one line and leave."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    sys.exit(code)
