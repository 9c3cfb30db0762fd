"""A dataclass in, a command line out; and one clear line for a user's mistake.

Every script ends with `run(main, Config)`. The dataclass's fields are the flags, the comment after a field is its help,
and the field's annotation states which values it takes (`Range`) and whether a resumed run may change it (`Frozen`).

Exit codes: 0 done, 1 the run failed (one line names the next step), 2 bad flags. `NANOCHAT_TRACEBACK=1` shows the
whole traceback of a failure. `NANOCHAT_BASE_TRAIN="--depth=2"`, and the like for every script, appends flags to those
of the command line.
"""

import atexit
import contextlib
import ctypes
import errno
import functools
import gc
import io
import os
import re
import shlex
import signal
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from nanochat.ground import screen
from nanochat.ground.extras import advice
from nanochat.ground.untrusted import printable

Config = TypeVar("Config")
T = TypeVar("T")


# What ends a run in good order. Batch systems send the last two before they kill a job.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)

# Functions that explain an error in one line, or return None. Devices, the compiler and users' files add theirs.
explainers: set[Callable[[BaseException], str | None]] = set()


class UserError(ValueError):
    """A mistake the user can fix; its text names the flag and the next step."""


class Interrupted(Exception):
    """A stop was requested during the work, which has no result on any rank."""


class Failed(Interrupted):
    """Something outside the training failed, such as a user's function: the run saves, and ends with this line."""


# ---------------------------------------------------------------------- what an annotation states about a flag


@dataclass(frozen=True)
class Range:
    """Metadata: the least and the greatest value of a number. Nothing here has more than 10**12 of anything."""

    low: float
    high: float = 10**12


# Number flags, as in `depth: Positive = 8`. None, where a flag allows it, is in every range.
Positive = Annotated[int, Range(1)]
Count = Annotated[int, Range(0)]
Depth = Annotated[int, Range(1, 1000)]  # layers: a million of them are built for hours before the memory is full
Size = Annotated[int, Range(1, 10**7)]  # the size of something that fits the memory
Seed = Annotated[int, Range(0, 2**62)]
Fraction = Annotated[float, Range(0, 1)]

# A flag that a resumed run must not change, as in `seed: Frozen[Seed] = 0`. Every other flag may change.
FROZEN = "frozen"
Frozen = Annotated[T, FROZEN]


def check_ranges(config: Any) -> None:
    """Raises UserError: when a flag's value is outside the range of its annotation."""
    for flag, metadata in _metadata_of_flags(type(config)).items():
        value = getattr(config, flag)
        if is_dataclass(value):  # flags that several scripts share, such as SamplingParams
            check_ranges(value)
            continue
        for limits in metadata:
            if value is None or not isinstance(limits, Range):
                continue
            if not value >= limits.low:  # NaN is not in any range either
                least = "above 0" if 0 < limits.low <= 1e-9 else f"at least {limits.low:g}"
                raise UserError(f"--{flag} {value!s:.40}: {least}")
            if value > limits.high:
                raise UserError(f"--{flag} {value!s:.40}: at most {limits.high:,}")


def frozen_flags(config_type: type) -> list[str]:
    """The names of a dataclass's `Frozen` fields."""
    return [flag for flag, metadata in _metadata_of_flags(config_type).items() if FROZEN in metadata]


@functools.cache  # a server checks the settings of every request
def _metadata_of_flags(config_type: type) -> dict[str, list[Any]]:
    hints = typing.get_type_hints(config_type, include_extras=True)
    return {flag: _metadata(annotation) for flag, annotation in hints.items()}


def _metadata(annotation: Any) -> list[Any]:
    """The metadata that `Annotated` attaches to a type, and to its parts as in `Positive | None`."""
    found = list(getattr(annotation, "__metadata__", ()))
    for part in typing.get_args(annotation):
        found += _metadata(part)
    return found


# ---------------------------------------------------------------------- from the command line to main


def parse(config_type: type[Config], argv: list[str] | None = None) -> Config:
    """Read flags into the dataclass and check their ranges; leaves with code 2 and one line for a bad flag.

    Hyphens and underscores are alike. A leading `--`, which torchrun passes on, is skipped.
    """
    import tyro

    module = sys.modules[config_type.__module__]
    script = module.__spec__.name if module.__spec__ else config_type.__module__
    command = f"python -m {script}" if module.__spec__ else Path(sys.argv[0]).name

    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--"]:
        argv = argv[1:]
    variable = f"NANOCHAT_{script.rpartition('.')[2].upper()}"
    try:
        argv = [*argv, *shlex.split(os.environ.get(variable, ""))]
    except ValueError as error:
        fail(f"{variable} in the environment holds flags as a shell would read them: {error}", code=2)

    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message):
            config = tyro.cli(config_type, prog=command, args=argv, description=module.__doc__, use_underscores=True)
        check_ranges(config)
    except UserError as error:
        fail(str(error), code=2)
    except SystemExit as leaving:
        if leaving.code:
            mistake = _without_frame(message.getvalue())
            if mistake.startswith("Unrecognized") and any(word.endswith(",") for word in argv):
                mistake += "; a space ends a flag's value: leave it out after a comma"
            elif mistake.startswith("Unrecognized"):  # it lists all unknown flags of the line
                mistake += "; docs/finetune.md has the flags of ms-swift, LLaMA-Factory and TRL with ours"
            fail(f"{mistake}; see `{command} --help`", code=2)
        raise  # --help
    return config


def _without_frame(text: str) -> str:
    """tyro's message about a bad flag, without the box around it, its title and the line on --help at its end."""
    # tyro prints such a message and exits: it has no call that returns the text, and no option that leaves the box out.
    text = re.sub(r"\x1b\[[0-9;]*m|[╭╮╰╯│]", "", text)  # colours and the box
    sections = [" ".join(section.split()) for section in re.split(r"─+|-{3,}", text)]  # with rules between them
    sections = [section for section in sections if section][1:-1]
    # Where a flag takes several types, tyro adds an error for each of them, with Python's names for the types.
    message = "; ".join(section.partition(" Got errors:")[0] for section in sections)
    return message.removeprefix("Error parsing Config: ")  # before a UserError of a config


def run(main: Callable[[Config], None], config_type: type[Config], *, shows_progress: bool = False) -> None:
    """Parse and run. A mistake that the user can fix becomes one line on stderr and exit code 1.

    `shows_progress`: with bars in a terminal, and a heartbeat elsewhere (screen.py).
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by `>&-`: without another file, the next one opened gets its number
            setattr(sys, name, Path(os.devnull).open("r+"))  # noqa: SIM115 (lives as long as the process)
    for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show a character shows a question mark
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if shows_progress:
        sys.stdout, sys.stderr = screen.Output(sys.stdout), screen.Output(sys.stderr)
    ignore_exported_ranks()
    end_with_launcher()
    atexit.register(gc.freeze)  # Python's last collection would visit every object of the imports for half a second
    if os.environ.get("NANOCHAT_TRACEBACK") == "1":
        main(parse(config_type))
        return
    try:
        config = parse(config_type)
        with screen.opened() if shows_progress else contextlib.nullcontext():
            main(config)
    except SystemExit as leaving:  # a signal stopped the run, which has saved
        _leave_torchrun(leaving.code)
        raise
    except KeyboardInterrupt:
        fail("interrupted: the same command begins it again", code=130)
    except BrokenPipeError:  # the reader of a pipe left, as `head` does, and there was more to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's last flush
        sys.exit(1)
    except UserError as error:
        fail(str(error))
    except OSError as error:
        if error.errno == errno.ENOSPC:
            where = f" ({error.filename})" if error.filename else ""
            fail(f"the disk is full{where}: free space, or let NANOCHAT_BASE_DIR or a flag name another place")
        if error.filename is None:
            raise
        remedy = "fix the path"
        if isinstance(error, PermissionError):  # it may belong to another user of the same base folder
            remedy = "have its owner run `chmod -R g+rwX` on the folder, for a group of you both"
        fail(f"{error.filename}: {error.strerror}; {remedy}, or point NANOCHAT_BASE_DIR elsewhere")
    except Exception as error:
        line = _explain(error)
        if line is None:
            raise
        fail(line)
    _leave_torchrun(0)


def _leave_torchrun(status: Any) -> None:
    """End a process of torchrun's at once, without taking the interpreter apart; others end as Python ends them."""
    # The threads of the collective library outlive the process group where a sharded model refers to it. One that drops
    # a tensor while the interpreter is taken apart aborts the process (SIGABRT, "terminate called without an active
    # exception"), and torchrun reports that a finished run has failed: 2 of 80 runs of chat_dpo with --parallel fsdp.
    if "TORCHELASTIC_RUN_ID" in os.environ and isinstance(status, int):
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def ignore_exported_ranks() -> None:
    """Remove RANK and WORLD_SIZE from the environment if no launcher set them, with a warning."""
    # Guides for several nodes export both in the shell. A single process that reads them waits for others that never
    # start, or prints nothing because it is not rank 0. A launcher of processes also sets LOCAL_RANK.
    if "LOCAL_RANK" in os.environ:
        return
    exported = [name for name in ("RANK", "WORLD_SIZE") if os.environ.pop(name, None) is not None]
    if exported:
        names = " ".join(exported)
        print(f"warning: {names} of this shell ignored, torchrun sets them: `unset {names}`", file=sys.stderr)


def end_with_launcher() -> None:
    """Have the system end this process when its launcher or its speedrun dies. A command calls this first."""
    # A launcher that ends in good order ends its processes. One that is killed (kill -9, out of memory) cannot, and
    # they would train on, with the devices taken. So it is with speedrun_npu.sh.
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # only Linux has it
    parent = os.environ.get("_NANOCHAT_PARENT")
    if prctl is None or not (parent or "TORCHELASTIC_RUN_ID" in os.environ):
        return
    # SIGTERM: save and leave. Several ranks of one host cannot: what they agree through died with the launcher.
    several = os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE") != "1"
    prctl(1, int(signal.SIGKILL if several else signal.SIGTERM), 0, 0, 0)  # PR_SET_PDEATHSIG
    # The system sends nothing if the parent died before that call. Z: it died, and its own parent does not know yet.
    state = Path(f"/proc/{parent}/stat")
    if parent and Path("/proc/self").exists() and (not state.exists() or ") Z" in state.read_text()):
        fail("the process that started this one has died: start it again")


def out_of_memory(error: BaseException) -> bool:
    """Whether a host or a device reports that its memory is full."""
    words = ("out of memory", "not enough memory", "can't allocate memory")
    return isinstance(error, MemoryError) or any(word in str(error).lower() for word in words)


def _explain(error: BaseException) -> str | None:
    """One line for a failure of the machine or of a user's file, rather than of our code; None for others."""
    first_line = (str(error).splitlines() or [type(error).__name__])[0]
    if out_of_memory(error):
        return f"out of memory: lower --device_batch_size, --max_seq_len or --depth ({first_line})"
    if isinstance(error, ImportError) and (line := advice(error)):
        return line
    cause: BaseException | None = error
    while cause is not None:  # torch imports an accelerator's package, and hides why that failed
        missing = re.search(r"\S+\.so\S*(?=: cannot open shared object file)", str(cause))
        if missing:
            return (
                f"{missing[0]} is not found: run `source .../set_env.sh` of the accelerator's software in this shell "
                "first (`python check_npu.py` shows where it is), then run this again"
            )
        cause = cause.__cause__ or cause.__context__
    for explain in explainers:
        if line := explain(error):
            return line
    return None


def fail(message: str, code: int = 1) -> typing.NoReturn:
    """Print one line and leave."""
    line = printable(" ".join(message.split()))
    print(f"error: {line}", file=sys.stderr, flush=True)
    sys.exit(code)
