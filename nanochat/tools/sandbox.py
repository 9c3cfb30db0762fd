"""Untrusted Python in a jail: code that a model wrote goes in, what it printed and whether it held come out.

A jail is a process that gives up everything and only then runs the code. The wall is the kernel's: a seccomp filter
that knows some twenty system calls (compute, allocate, sleep, write to the sockets that are there, leave) and refuses
all others, so it does not matter what the code finds inside Python, `ctypes` included. Around it: no_new_privs, no
capabilities, another user where we are root, resource limits, no environment, an empty folder, no file descriptor but
its sockets, a session of its own that is killed at the end.

Jails are forked from a zygote, a small Python process that has imported what the code may import; a run takes some
milliseconds, the first one of a thread a tenth of a second more. A zygote never sees code, so one run leaves nothing
for the next to read; it waits for the next run, and leaves when this process does, however it ends.

`run_python` runs one piece of code. Its `ok` is the jail's own word: leaving early never is ok, but code that attacks
the runner around it can forge it. Where a pass is worth cheating for, use `run_checks` or `passes`: there the program
and its checks run in two jails, values alone travel between them, and they are compared where the program cannot
reach; right answers are the only way to pass.

What stays open: a hole in the kernel's few calls that are allowed; the clock, so time can be measured; random bytes.

Source: prctl(2), seccomp(2), capabilities(7); system call numbers from Linux's asm/unistd_64.h (x86-64) and
asm-generic/unistd.h (aarch64).
"""

import atexit
import builtins
import contextlib
import errno
import importlib
import io
import itertools
import json
import math
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn

from nanochat.shell.cli import UserError

MEMORY_BYTES = 512 * 1024**2  # what a program may use besides the bare interpreter
OUTPUT_BYTES = 64 * 1024  # kept of what it prints, the note that it was cut included
START_SECONDS = 60.0  # for a jail to stand, on a crowded machine
CUT = "\n[output cut at 64 kB]\n"

# What untrusted code may import: no file can be read behind the wall, so zygotes import all of it before.
MODULES = (
    *("abc", "array", "base64", "binascii", "bisect", "calendar", "cmath", "collections.abc", "contextlib", "copy"),
    *("dataclasses", "datetime", "decimal", "difflib", "enum", "fractions", "functools", "hashlib", "heapq", "io"),
    *("itertools", "json", "keyword", "math", "numbers", "operator", "pprint", "queue", "random", "re", "secrets"),
    *("statistics", "string", "struct", "textwrap", "time", "traceback", "types", "typing", "unicodedata", "uuid"),
    *("warnings", "weakref", "zlib", "_strptime"),  # datetime imports the last one at its first use
)

# A system call's number on each machine; -1 where the machine has no such call.
MACHINES = ("x86_64", "aarch64")
AUDIT_ARCH = (0xC000003E, 0xC00000B7)
SYSTEM_CALLS = {
    **{"brk": (12, 214), "munmap": (11, 215), "mremap": (25, 216)},  # memory
    **{"futex": (202, 98), "getrandom": (318, 278), "rt_sigreturn": (15, 139)},
    **{"exit": (60, 93), "exit_group": (231, 94)},
    **{"gettimeofday": (96, 169), "time": (201, -1), "clock_gettime": (228, 113), "clock_getres": (229, 114)},
    **{"nanosleep": (35, 101), "clock_nanosleep": (230, 115)},
    **{"select": (23, -1), "pselect6": (270, 72)},  # Python 3.10 sleeps with it
}
MMAP, READ, WRITE = (9, 222), (0, 63), (1, 64)  # allowed for some arguments


@dataclass(frozen=True)
class Run:
    """What became of a run."""

    ok: bool  # it came to its end without an exception
    output: str  # stdout and stderr together, 64 kB at most; says when it was cut
    error: str  # one line, "" when ok
    timed_out: bool
    seconds: float  # wall clock, from the moment the jail stood


def run_python(code: str, *, timeout_seconds: float = 5.0, memory_bytes: int = MEMORY_BYTES) -> Run:
    """Run code as `__main__` in a jail and wait for it; from any thread, many at once.

    Input is empty; of the standard library, MODULES can be imported. `ok` means that the code ran to its last line:
    `exit(0)`, `os._exit(0)` and a crash are not ok. It is the word of a process the code lives in (see above).

    Raises UserError: when this machine cannot isolate; nothing has been run then.
    """
    return _run([("run", code)], timeout_seconds, memory_bytes)


def run_checks(program: str, checks: str, *, timeout_seconds: float = 5.0, memory_bytes: int = MEMORY_BYTES) -> Run:
    """Run trusted checks (assert statements) against an untrusted program; ok: all ran, and none failed.

        run_checks("def double(x): return 2 * x", "assert double(4) == 8").ok

    The checks run in a jail of their own. A name that they use, and neither they nor Python define, is the program's:
    its functions are called there, and arguments and results travel as values: None, bool, int, float, str, bytes,
    list, tuple, dict, set, frozenset, range, and iterators as all they yield. A result of another type raises
    TypeError in the checks; an exception arrives as its nearest built-in class; what a function changes in place does
    not come back. The program's own `if __name__ == "__main__":` does not run.

    Never ok: a program that leaves, even inside the checks' `try`; checks that use nothing of the program. Checks
    that call a helper of the program to find the right answer trust it, unless they define it again themselves.

    Raises UserError: when this machine cannot isolate; nothing has been run then.
    """
    return _run([("program", program), ("checks", checks)], timeout_seconds, memory_bytes)


def passes(program: str, checks: str, *, timeout_seconds: float = 5.0, memory_bytes: int = MEMORY_BYTES) -> bool:
    """Whether the program passes the checks: `run_checks(...).ok`."""
    return run_checks(program, checks, timeout_seconds=timeout_seconds, memory_bytes=memory_bytes).ok


# ---- Outside: start jails, listen, end them ---------------------------------------------------------------


class _Zygote:
    """A process that forks jails and ends them, for one run at a time."""

    waiting: list["_Zygote"] = []  # for the next run; one step takes or gives back, so threads need no lock
    living: set["_Zygote"] = set()

    def __init__(self):
        root = str(Path(__file__).resolve().parent.parent.parent)
        start = f"import sys; sys.path.insert(0, {root!r}); from nanochat.tools.sandbox import zygote; zygote()"
        # A Python that needs this to find its own library does not start without it.
        environment = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(START_SECONDS)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-X", "utf8", "-c", start],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd="/",
                env=environment,
                start_new_session=True,
            )
        assert self.process.stderr
        self.errors = self.process.stderr
        if not self.living:
            os.register_at_fork(after_in_child=_Zygote.forget_all)
            atexit.register(_Zygote.close_all)
        self.living.add(self)

    def ask(self, *words: object, descriptors: tuple[int, ...] = ()) -> int:
        """Its answer. Raises UserError: when it is dead, or could not do it."""
        try:
            socket.send_fds(self.control, [json.dumps(words).encode()], descriptors)
            answer = self.control.recv(1 << 10)
        except TimeoutError:
            self.process.kill()
            answer = b""
        except OSError:
            answer = b""
        if not answer:
            said = self.errors.read().decode("utf-8", "replace")
            _refuse(f"the process that starts jails left with exit code {self.process.wait()}: {said}")
        value = json.loads(answer)
        return value if isinstance(value, int) else _refuse(f"a jail could not be started: {value}")

    def close(self) -> None:
        """Kill it, and with it its jails."""
        self.living.discard(self)
        self.control.close()
        self.errors.close()
        self.process.kill()
        self.process.wait()

    @classmethod
    def close_all(cls) -> None:
        for zygote in list(cls.living):
            zygote.close()

    @classmethod
    def forget_all(cls) -> None:
        """In a forked child: they are the parent's, and die when the last copy of their socket is closed."""
        for zygote in cls.living:
            zygote.control.close()
            zygote.errors.close()
            zygote.process.returncode = 0  # not ours to wait for
        cls.waiting.clear()
        cls.living.clear()


@contextlib.contextmanager
def _borrowed_zygote() -> Iterator[_Zygote]:
    zygote = None
    while zygote is None:
        try:
            zygote = _Zygote.waiting.pop()
        except IndexError:
            zygote = _Zygote()
        if zygote.process.poll() is not None:  # somebody killed it while it waited
            zygote.close()
            zygote = None
    try:
        yield zygote
    except BaseException:
        zygote.close()
        raise
    _Zygote.waiting.append(zygote)


class _Jail:
    """One process of untrusted code, and its line to us: code goes in; "J" once the jail stands, then a result come."""

    def __init__(self, zygote: _Zygote, role: str, code: str, limits: list[int], given: list[socket.socket]):
        self.zygote = zygote
        self.said = b""
        self.returncode: int | None = None
        self.line, theirs = socket.socketpair()
        with theirs:
            descriptors = tuple(end.fileno() for end in (theirs, *given))
            self.pid = zygote.ask("start", role, *limits, descriptors=descriptors)
        try:
            data = code.encode("utf-8", "surrogatepass")
            self.line.sendall(struct.pack("<Q", len(data)) + data)
        except OSError:
            self.said = b""  # it died at its start: the silence tells

    def end(self) -> None:
        """Kill what is left of it, and leave no zombie."""
        if self.returncode is None:
            self.returncode = self.zygote.ask("end", self.pid)
            self.line.close()

    @property
    def error(self) -> str:
        """Why it is not ok, in one line; "" when it is."""
        assert self.returncode is not None
        result = self.said[1:].decode("utf-8", "replace")
        if result == "ok":
            return ""
        if result:
            return " ".join(result.split())
        if self.returncode < 0:
            return f"killed by {signal.Signals(-self.returncode).name}"
        return f"left early with exit code {self.returncode}"


def _run(parts: list[tuple[str, str]], timeout_seconds: float, memory_bytes: int) -> Run:
    """Run each part, a role and its code, in a jail; the last one's result is the run's."""
    _require_isolation()
    if not 0 < timeout_seconds < math.inf:
        raise ValueError(f"timeout_seconds {timeout_seconds}: more than 0")
    with contextlib.ExitStack() as stack:
        zygote = stack.enter_context(_borrowed_zygote())
        limits = [math.ceil(timeout_seconds) + 1, memory_bytes]
        jails: list[_Jail] = []
        with contextlib.ExitStack() as theirs:  # closed once the jails hold it, so that their end is seen
            output, writable = socket.socketpair()
            stack.enter_context(output)
            theirs.enter_context(writable)
            peers = socket.socketpair() if len(parts) > 1 else ()
            for peer in peers:
                theirs.enter_context(peer)
            for index, (role, code) in enumerate(parts):
                jails.append(_Jail(zygote, role, code, limits, [writable, *peers[index : index + 1]]))
                stack.callback(jails[-1].end)
        printed, timed_out, seconds = _listen(jails, output, timeout_seconds)
        for jail in jails:
            if not jail.said.startswith(b"J"):
                why = (jail.said or printed).decode("utf-8", "replace")
                _refuse(f"a jail did not stand: {why or 'no word from it'}")
    error = f"timed out after {timeout_seconds:g} s" if timed_out else jails[-1].error
    return Run(ok=not error, output=_text(printed), error=error, timed_out=timed_out, seconds=seconds)


def _listen(jails: list[_Jail], output: socket.socket, timeout_seconds: float) -> tuple[bytes, bool, float]:
    """Read until the last jail's process is gone or its time is over, then end all: (printed, timed out, seconds)."""
    talking = {jail.line.fileno(): jail for jail in jails}
    last = jails[-1].line.fileno()
    poll = select.poll()
    for descriptor in (output.fileno(), *talking):
        poll.register(descriptor, select.POLLIN)
    printed, late, standing = bytearray(), False, False
    started = time.monotonic()
    deadline = started + START_SECONDS
    # Until all stand, too: checks that cannot even be compiled are over before their program has begun.
    while not late and (last in talking or any(not jail.said for jail in talking.values())):
        for descriptor, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000 + 1):
            chunk = _read(descriptor)
            if not chunk:
                poll.unregister(descriptor)
                talking.pop(descriptor, None)
            elif descriptor in talking:
                talking[descriptor].said = (talking[descriptor].said + chunk)[:4096]
            else:
                printed += chunk[: OUTPUT_BYTES + 1 - len(printed)]  # what is too much is read and dropped
        now = time.monotonic()
        if not standing and all(jail.said for jail in jails):
            started, standing, deadline = now, True, now + timeout_seconds
        late = now >= deadline
    seconds = time.monotonic() - started
    for jail in jails:
        jail.end()
    while chunk := _read(output.fileno()):  # what was on its way; nobody is left who could write more
        printed += chunk[: OUTPUT_BYTES + 1 - len(printed)]
    return bytes(printed), late and last in talking, seconds


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except ConnectionResetError:  # it died with unread bytes on its side
        return b""


def _text(printed: bytes) -> str:
    """As text; "?" for what is no UTF-8, so that it never grows."""
    if len(printed) <= OUTPUT_BYTES:
        return printed.decode("utf-8", "replace").replace("\ufffd", "?")
    return printed[: OUTPUT_BYTES - len(CUT)].decode("utf-8", "ignore") + CUT


def _require_isolation() -> None:
    """Raises UserError: where the filter is not known to hold. Whether the kernel takes it, the jail finds out."""
    if sys.platform != "linux":
        _refuse(f"it takes Linux's seccomp, and this is {sys.platform}")
    if os.uname().machine not in MACHINES or sys.maxsize < 2**32 or sys.byteorder != "little":
        _refuse(f"it takes a 64-bit Python on {' or '.join(MACHINES)}, and this is {os.uname().machine}")
    if not sys.executable:
        _refuse("it takes a Python to start, and sys.executable is empty")


def _refuse(why: str) -> NoReturn:
    why = " ".join(why.split())[-400:]
    raise UserError(f"model-written Python cannot be run safely here: {why}; leave out what runs it")


# ---- The zygote -------------------------------------------------------------------------------------------


def zygote() -> None:
    """The zygote's process: fork a jail, or end one, until our side closes the socket."""
    for name in (*MODULES, "ctypes", "resource"):  # the last two are for the jails themselves
        try:
            importlib.import_module(name)
        except ImportError:  # this Python was built without it: the code's import will say so
            continue
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)  # noqa: PTH106 (an empty folder without a name: nobody can put anything there)
    control = socket.socket(fileno=0)
    own = os.getpid()
    while True:
        request, descriptors, *_ = socket.recv_fds(control, 1 << 16, 3)
        if not request:
            return  # the jails that are left are killed when we are gone
        verb, *words = json.loads(request)
        if verb == "start":
            try:
                answer: object = os.fork()
            except OSError as error:
                answer = str(error)
            if answer == 0:
                try:
                    _inside(own, words, descriptors)
                except BaseException as error:
                    os.write(2, f"{error!r}\n".encode())
                finally:
                    os._exit(1)
            for descriptor in descriptors:
                os.close(descriptor)
        else:
            try:
                os.killpg(words[0], signal.SIGKILL)
            except ProcessLookupError:  # it has not come so far as to lead a group
                os.kill(words[0], signal.SIGKILL)
            answer = os.waitstatus_to_exitcode(os.waitpid(words[0], 0)[1])
        control.send(json.dumps(answer).encode())


# ---- Inside: give up everything, then run -----------------------------------------------------------------


def _inside(parent: int, words: list, descriptors: list[int]) -> None:
    """The jail's process, from its start to its end."""
    role, cpu_seconds, memory_bytes = words
    line, output, *peers = descriptors
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(0)  # the zygote's socket
    for low, high in itertools.pairwise(sorted((2, line, *peers, 1024))):
        os.closerange(low + 1, high)  # all that is open between those we keep
    with os.fdopen(line, "rb", closefd=False) as request:
        (length,) = struct.unpack("<Q", request.read(8))
        code = request.read(length).decode("utf-8", "surrogatepass")
    sys.stdin = io.StringIO("")
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = os.fdopen(descriptor, "w", 1, "utf-8", "backslashreplace", closefd=False)  # a line survives a kill
        sys.__dict__.update({name: stream, f"__{name}__": stream})
    builtins.__dict__.update(exit=sys.exit, quit=sys.exit)  # without site nobody has set them
    os.environ.clear()
    sys.argv[:], sys.path[:] = [""], []
    try:
        _confine({line, *peers}, set(peers), parent, cpu_seconds, memory_bytes)
    except (OSError, ValueError) as error:
        os.write(line, f"{error}".encode())
        os._exit(1)
    stdout, stderr = sys.stdout, sys.stderr
    os.write(line, b"J")
    if role == "checks":
        error = _check(code, peers[0])
    else:
        module = ModuleType("__main__" if role == "run" else "program")
        sys.modules[module.__name__] = module
        error = _execute(code, module.__dict__, "<code>")
        if role == "program":
            _serve(peers[0], module.__dict__, error)
    stdout.flush()
    stderr.flush()
    os.write(line, error.encode("utf-8", "replace")[:1000] or b"ok")
    os._exit(0)  # nothing of the code's runs after its end: no atexit, no destructor


def _confine(writable: set[int], readable: set[int], parent: int, cpu_seconds: int, memory_bytes: int) -> None:
    """Give up all rights of this process. Raises OSError: where the machine does not let us."""
    import ctypes
    import resource

    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: Any) -> None:
        wide = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in arguments]
        if getattr(libc, name)(*wide):
            number = ctypes.get_errno()
            raise OSError(number, f"{name} {arguments[0] if name == 'prctl' else ''}: {os.strerror(number)}")

    _become_nobody()
    call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))  # _LINUX_CAPABILITY_VERSION_3, no capability
    call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    call("prctl", 4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: nobody of the same user looks in
    call("prctl", 1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: no orphan, however the zygote dies
    if os.getppid() != parent:
        os._exit(1)
    limits = dict.fromkeys(("CORE", "FSIZE", "NPROC", "MEMLOCK", "MSGQUEUE", "SIGPENDING", "NOFILE"), 0)
    limits |= {"CPU": cpu_seconds, "AS": memory_bytes + _address_space()}
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))

    program = filter_program(os.uname().machine, readable, writable | {1, 2})
    instructions = ctypes.create_string_buffer(program, len(program))
    call("prctl", 22, 2, struct.pack("HP", len(program) // 8, ctypes.addressof(instructions)), 0, 0)  # PR_SET_SECCOMP
    try:
        os.open("/", os.O_RDONLY)
    except OSError as error:
        if error.errno == errno.EPERM:  # the filter's answer
            return
    raise OSError(0, "the seccomp filter does not hold")


def _become_nobody() -> None:
    """Root becomes another user, so that even a hole in the filter finds nothing that is root's."""
    if os.geteuid() != 0:
        return
    try:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
    except OSError:  # a container with one user only: root without capabilities, behind the filter
        return


def _address_space() -> int:
    """Bytes of address space that this process has mapped."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
    except OSError:  # no /proc here
        return 0


def filter_program(machine: str, readable: set[int], writable: set[int]) -> bytes:
    """The seccomp filter, in classic BPF: allows SYSTEM_CALLS, reading and writing of the given file descriptors and
    mapping of memory that is not executable, answers EPERM to all else, and kills what calls by another machine's
    numbers (32-bit calls and x32 on x86-64). Source: seccomp(2), Linux's filter.rst."""
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF_LD|W|ABS, JEQ, JGE, JSET, RET
    number, arch, argument = 0, 4, 16  # offsets in struct seccomp_data; an argument's low half comes first
    allow, deny, kill = 0x7FFF0000, 0x00050001, 0x80000000  # RET_ALLOW, RET_ERRNO with EPERM, RET_KILL_PROCESS
    column = MACHINES.index(machine)
    code = [(load, 0, 0, arch), (equal, 1, 0, AUDIT_ARCH[column]), (give, 0, 0, kill)]
    code += [(load, 0, 0, number), (at_least, 0, 1, 0x40000000), (give, 0, 0, kill)]
    for numbers in SYSTEM_CALLS.values():
        if numbers[column] >= 0:
            code += [(equal, 0, 1, numbers[column]), (give, 0, 0, allow)]
    for numbers, descriptors in ((READ, readable), (WRITE, writable)):
        one_of_them = [line for fd in sorted(descriptors) for line in ((equal, 0, 1, fd), (give, 0, 0, allow))]
        code += [(equal, 0, len(one_of_them) + 2, numbers[column]), (load, 0, 0, argument), *one_of_them]
        code += [(give, 0, 0, deny)]
    code += [(equal, 0, 3, MMAP[column]), (load, 0, 0, argument + 2 * 8)]
    code += [(any_bit, 1, 0, 4), (give, 0, 0, allow), (give, 0, 0, deny)]  # PROT_EXEC
    return b"".join(struct.pack("HBBI", *line) for line in code)


def _execute(code: str, namespace: dict[str, Any], filename: str) -> str:
    """Run code in a namespace; "" at its end, otherwise what happened, in one line (the traceback is printed)."""
    show, streams = sys.excepthook, (sys.stdout, sys.stderr)
    try:
        exec(compile(code, filename, "exec", dont_inherit=True), namespace)
    except BaseException as error:
        sys.stdout, sys.stderr = streams
        theirs = error.__traceback__ and error.__traceback__.tb_next  # without our own frame
        if not isinstance(error, SystemExit):
            streams[0].flush()
            show(type(error), error.with_traceback(theirs), theirs)
        lines = [line for frame, line in traceback.walk_tb(theirs) if frame.f_code.co_filename == filename]
        return _one_line(error) + (f" (line {lines[-1]})" if lines else "")
    return ""


def _one_line(error: BaseException) -> str:
    try:
        message = str(error)
    except BaseException:  # its class is the untrusted code's
        message = ""
    return " ".join(f"{type(error).__name__}: {message}".split())[:300].removesuffix(":")


# ---- Inside: a program and its checks ---------------------------------------------------------------------
# The checks' process asks and the program's process answers, a line of JSON each. An answer is only ever data, so the
# worst a program can do is to answer wrongly.


def _serve(peer: int, namespace: dict[str, Any], failure: str) -> None:
    """Answer for the program until the checks have ended: which of the wanted names it has, then calls of them."""
    with os.fdopen(peer, "rb", closefd=False) as requests:
        for request in requests:
            content = json.loads(request)
            try:
                if failure:
                    answer = {"failure": failure}
                elif isinstance(content, list):
                    answer = {"names": {name: _described(namespace[name]) for name in content if name in namespace}}
                else:
                    arguments, options = _unpack(content["arguments"]), _unpack(content["options"])
                    answer = {"value": _pack(namespace[content["name"]](*arguments, **options))}
            except BaseException as error:
                classes = [kind.__name__ for kind in type(error).__mro__]
                answer = {"raised": classes, "message": _one_line(error).partition(": ")[2]}
            _write(peer, json.dumps(answer).encode() + b"\n")


def _described(value: object) -> dict:
    if isinstance(value, ModuleType):
        return {"module": value.__name__}
    if callable(value):
        return {"callable": True}
    try:
        return {"value": _pack(value)}
    except TypeError:
        return {}


class _Broken(BaseException):
    """The program can no longer pass, whatever the checks catch."""


class _Program:
    """The checks' view of the program in the other process."""

    def __init__(self, peer: int):
        self.peer = peer
        self.answers = os.fdopen(peer, "rb", closefd=False)
        self.broken = ""
        self.used = False

    def names(self, wanted: list[str]) -> dict[str, object]:
        """Those of the wanted names that the program has: stand-ins for functions, plain values, our own modules."""
        found: dict[str, object] = {}
        for name, about in self.ask(wanted)["names"].items():
            if name not in wanted:
                raise self.spoiled("the program's answer makes no sense")
            if "callable" in about:
                found[name] = self.stand_in(name)
            elif "value" in about:
                found[name] = _unpack(about["value"])
                self.used = True
            elif about.get("module") in MODULES:
                found[name] = sys.modules.get(about["module"])
        return found

    def stand_in(self, name: str):
        def call(*arguments, **options):
            self.used = True
            answer = self.ask({"name": name, "arguments": _pack(arguments), "options": _pack(options)})
            if "raised" in answer:
                raise self.exception(answer["raised"], str(answer["message"]))
            try:
                return _unpack(answer["value"])
            except (ValueError, TypeError, LookupError, RecursionError, MemoryError):
                raise self.spoiled("the program's answer makes no sense") from None

        call.__name__ = name
        return call

    def ask(self, question: object) -> dict[str, Any]:
        try:
            _write(self.peer, json.dumps(question).encode() + b"\n")
            line = self.answers.readline()
        except OSError:
            line = b""
        if not line:
            raise self.spoiled("the program left before its checks had ended")
        try:
            answer = json.loads(line)
            failure = answer.get("failure")
        except (ValueError, AttributeError, RecursionError, MemoryError):
            raise self.spoiled("the program's answer makes no sense") from None
        if failure:
            raise self.spoiled(f"the program failed: {failure}")
        return answer

    def exception(self, classes: list[str], message: str) -> BaseException:
        """Ours, of the nearest built-in class, for the program's."""
        kinds = [vars(builtins).get(str(name)) for name in classes]
        kind = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseException)), Exception)
        if issubclass(kind, SystemExit):
            return self.spoiled("the program called exit")
        if issubclass(kind, StopIteration | StopAsyncIteration | GeneratorExit):
            kind = RuntimeError  # it would end a loop of the checks as if all had been checked
        try:
            return kind(message)
        except TypeError:  # UnicodeError's family wants more than a message
            return RuntimeError(message)

    def spoiled(self, why: str) -> _Broken:
        self.broken = self.broken or why
        return _Broken(self.broken)


def _check(code: str, peer: int) -> str:
    """Run the checks; "" when all ran to their end, and none failed."""
    program = _Program(peer)
    try:
        wanted = _names_in(compile(code, "<checks>", "exec", dont_inherit=True)) - set(dir(builtins))
        namespace = program.names(sorted(wanted)) | {"__builtins__": builtins, "__name__": "checks"}
    except (_Broken, SyntaxError, ValueError, TypeError, LookupError, AttributeError) as error:
        return program.broken or _one_line(error)
    error = _execute(code, namespace, "<checks>")
    return program.broken or error or ("" if program.used else "the checks never used the program")


def _names_in(code: CodeType) -> set[str]:
    """Every name that code, and the functions in it, look up outside themselves."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


CONTAINERS = {"list": list, "tuple": tuple, "dict": dict, "set": set, "frozenset": frozenset}


def _pack(value: Any) -> Any:
    """A value as what JSON can carry: what JSON does not know becomes a dict with its type for a key."""
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**1024 else {"int": hex(value)}  # Python writes no very long ones in decimal
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    for name, kind in CONTAINERS.items():
        if isinstance(value, kind):
            return {name: [_pack(item) for item in (value.items() if kind is dict else value)]}
    if hasattr(value, "__next__"):
        return {"iterator": [_pack(item) for item in value]}
    raise TypeError(f"a value of type {type(value).__name__} cannot travel between a program and its checks")


def _unpack(data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind in ("int", "bytes"):
        return int(content, 16) if kind == "int" else bytes.fromhex(content)
    items = [_unpack(item) for item in content]
    return range(*items) if kind == "range" else (CONTAINERS | {"iterator": iter})[kind](items)


def _write(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
