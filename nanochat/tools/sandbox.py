"""Untrusted Python in a jail: runs a model-written program against trusted checks, and reports whether it passed.

The program and its checks run in two separate processes, both in a jail. The program's process never sees the checks.
The checks' process writes the verdict, on a line to which the program has no access: `exit(0)`, a printed "ok" and
objects that equal everything do not help. Right answers are the only way to pass.

A jail is a fresh Python process that gives up all rights and then runs the code (jail.py). The kernel enforces the
wall: a seccomp filter allows some twenty system calls (compute, allocate, sleep, write to the existing sockets, leave)
and refuses all others. So it does not matter what the code finds inside Python, including `ctypes`. The jail also has
no_new_privs, no capabilities, another user instead of root, resource limits, an empty environment, and no file
descriptors except its sockets. Three things remain: a possible hole in these few system calls, the clock, and random
bytes.
"""

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import NoReturn

from nanochat.ground.cli import UserError
from nanochat.tools.jail import MACHINES, OK, STANDING

MEMORY_BYTES = 512 * 1024**2  # memory of a program, in addition to the bare interpreter
OUTPUT_BYTES = 64 * 1024  # printed output to keep
START_SECONDS = 60.0  # time for the jails to start, on a busy machine


@dataclass(frozen=True)
class Run:
    """The outcome of a run."""

    ok: bool  # all checks ran, and none failed
    output: str  # stdout and stderr of the program and its checks, 64 kB at most
    error: str  # one line, "" when ok


def run_checks(program: str, checks: str, *, timeout_seconds: float = 5.0, memory_bytes: int = MEMORY_BYTES) -> Run:
    """Run trusted checks (assert statements) against an untrusted program; from any thread, many at once.

        run_checks("def double(x): return 2 * x", "assert double(4) == 8").ok

    A name that the checks use, and that neither they nor Python define, is a function of the program. It is called in
    the program's process; arguments and results travel as values: None, bool, int, float, str, bytes, list, tuple,
    dict, set, frozenset. An exception, or a result of another type, is a RuntimeError in the checks. In-place changes
    by a function do not come back. The code can import `jail.MODULES` of the standard library. The program's
    `if __name__ == "__main__":` does not run.

    Never ok: a program that exits, even inside the checks' `try`; checks that use no function of the program.

    Raises UserError: when this machine cannot isolate; in this case nothing has run.
    """
    _require_isolation()
    if not 0 < timeout_seconds < math.inf:
        raise ValueError(f"timeout_seconds {timeout_seconds}: more than 0")
    limits = [math.ceil(timeout_seconds) + 1, memory_bytes]
    output, output_end = os.pipe()
    program_peer, checks_peer = socket.socketpair()
    with contextlib.ExitStack() as stack:
        # The thread reads until both jails have ended; the stack ends them first.
        source = stack.enter_context(os.fdopen(output, "rb", buffering=0))
        reader = stack.enter_context(ThreadPoolExecutor(1))
        printed = reader.submit(_read_output, source)
        # Close our copies of the jails' ends after both have started: then a closed socket means an ended jail.
        with os.fdopen(output_end, "wb"), program_peer, checks_peer:
            program_jail = _Jail("program", program, limits, program_peer, output_end)
            stack.callback(program_jail.end)
            checks_jail = _Jail("checks", checks, limits, checks_peer, output_end)
            stack.callback(checks_jail.end)
        reports = [jail.receive(START_SECONDS) or b"" for jail in (program_jail, checks_jail)]
        # The time limit of the code begins now. Quick checks have already reported their verdict.
        verdict = reports[1].removeprefix(STANDING) or checks_jail.receive(timeout_seconds)

    for jail, report in zip((program_jail, checks_jail), reports, strict=True):
        if not report.startswith(STANDING):
            # It was killed before it could report, by a person or by the kernel when memory is short. That is one
            # failed run; it does not mean that the machine cannot isolate.
            if jail.died_of == signal.SIGKILL:
                return Run(ok=False, output="", error="its process was killed at its start")
            why = (report or printed.result()).decode("utf-8", "replace")
            _refuse(f"a jail did not start: {why or 'it reported nothing'}")
    if verdict is None:
        error = f"timed out after {timeout_seconds:g} s"
    elif verdict == OK:
        error = ""
    else:
        error = " ".join(verdict.decode("utf-8", "replace").split()) or "the checks left before their end"
    text = printed.result().decode("utf-8", "replace").replace("\ufffd", "?")  # "?": the text never grows
    return Run(ok=not error, output=text, error=error)


def run_program(program: str) -> Run:
    """Run an untrusted program to its end; `output` is its printed output.

    Raises UserError: when this machine cannot isolate; in this case nothing has run.
    """
    # The program answers a call after it has ended. The error for a missing function is not a failure here.
    checks = "try:\n    is_there_no_such_function()\nexcept RuntimeError:\n    pass"
    return run_checks(program, checks)


class _Jail:
    """One process: code goes in, a report comes out.

    The kernel kills it when the thread that started it ends, so it never outlives a run.
    """

    def __init__(self, role: str, code: str, limits: list[int], peer: socket.socket, output: int):
        self.line, theirs = socket.socketpair()
        arguments = [role, os.getpid(), theirs.fileno(), *limits]
        # Some Pythons need this to find their library, and do not start without it.
        environment = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        with theirs:
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-B", "-X", "utf8", "-X", "int_max_str_digits=0"]
                    + [str(Path(__file__).with_name("jail.py")), *map(str, arguments)],
                    stdin=peer.fileno(),
                    stdout=output,
                    stderr=output,
                    pass_fds=[theirs.fileno()],
                    cwd="/",
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                self.line.close()
                _refuse(f"a jail did not start: {error}")
        with contextlib.suppress(OSError):  # it died at its start, which its missing report shows
            self.line.settimeout(START_SECONDS)
            self.line.sendall(code.encode("utf-8", "surrogatepass"))
            self.line.shutdown(socket.SHUT_WR)

    def receive(self, seconds: float) -> bytes | None:
        """The next report of the jail: b"" when it has ended, None when the time is over."""
        self.line.settimeout(seconds)
        try:
            report = self.line.recv(4096)
        except TimeoutError:
            return None
        except ConnectionResetError:  # it died with unread bytes on its side
            report = b""
        if not report:  # the line closes a moment before the exit status is available
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)
        return report

    def end(self) -> None:
        self.died_of = -(self.process.poll() or 0)
        self.process.kill()  # it cannot have children
        self.process.wait()
        self.line.close()


def _read_output(source: FileIO) -> bytes:
    printed = b""
    while chunk := source.read(1 << 16):
        printed += chunk[: OUTPUT_BYTES - len(printed)]  # the rest is read and dropped
    return printed


def _require_isolation() -> None:
    """Raises UserError: when the filter is not known to work here. The jail finds out whether the kernel accepts it."""
    if sys.platform != "linux":
        _refuse(f"it takes Linux's seccomp, and this is {sys.platform}")
    if os.uname().machine not in MACHINES or sys.maxsize < 2**32 or sys.byteorder != "little":
        _refuse(f"it takes a 64-bit Python on {' or '.join(MACHINES)}, and this is {os.uname().machine}")
    if not sys.executable:
        _refuse("it takes a Python to start, and sys.executable is empty")


def _refuse(why: str) -> NoReturn:
    why = " ".join(why.split())[-400:]
    raise UserError(f"model-written Python cannot be run safely here: {why}; leave out what runs it")
