"""The inside of the sandbox: give up all rights, then run untrusted Python. `sandbox.py` starts this file as a script.

There are two roles. The `program` process runs the untrusted program and then calls its functions for the checks. The
`checks` process runs the checks, requests the calls and compares the results. Only values travel between the two, as
lines of JSON, so the worst that a program can do is give a wrong answer.

File descriptors: 0 is the socket between program and checks, 1 and 2 are the captured output, and `report` carries the
code in and two reports out: the wall is up, then the verdict of the checks.

Source: prctl(2), seccomp(2), capabilities(7), Linux's filter.rst; system call numbers from Linux's asm/unistd_64.h
(x86-64) and asm-generic/unistd.h (aarch64).
"""

# Every run waits for these imports: no typing, no pathlib.
import builtins
import contextlib
import ctypes
import errno
import importlib
import io
import json
import os
import re
import resource
import signal
import struct
import sys
import traceback
from functools import partial
from types import CodeType, ModuleType

STANDING = b"J"  # the first byte of a report: the wall is up
OK = b"ok"

# The modules that untrusted code may import. No file can be read inside the wall, so modules that the code names are
# imported before.
MODULES = (
    *("abc", "array", "base64", "binascii", "bisect", "calendar", "cmath", "collections", "collections.abc", "copy"),
    *("contextlib", "dataclasses", "datetime", "decimal", "difflib", "enum", "fractions", "functools", "hashlib"),
    *("heapq", "io", "itertools", "json", "keyword", "math", "numbers", "operator", "pprint", "queue", "random", "re"),
    *("secrets", "statistics", "string", "struct", "textwrap", "time", "traceback", "types", "typing", "unicodedata"),
    *("uuid", "warnings", "weakref", "zlib"),
)

# The allowed system calls: (number on x86-64, number on aarch64); -1 if a machine does not have the call.
MACHINES = ("x86_64", "aarch64")
AUDIT_ARCH = (0xC000003E, 0xC00000B7)
SYSTEM_CALLS = {
    # memory
    "brk": (12, 214),
    "munmap": (11, 215),
    "mremap": (25, 216),
    # time
    "gettimeofday": (96, 169),
    "time": (201, -1),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "select": (23, -1),
    "pselect6": (270, 72),  # Python 3.10 sleeps with it
    # the rest of what a running interpreter needs
    "futex": (202, 98),
    "getrandom": (318, 278),
    "rt_sigreturn": (15, 139),
    "exit": (60, 93),
    "exit_group": (231, 94),
}
# These are allowed for some arguments: memory that is not executable, and the file descriptors above.
MMAP = (9, 222)
READ = (0, 63)
WRITE = (1, 64)


def main() -> None:
    role = sys.argv[1]
    parent, report, cpu_seconds, memory_bytes = map(int, sys.argv[2:])
    with os.fdopen(report, "rb", closefd=False) as file:
        code = file.read().decode("utf-8", "surrogatepass")
    _import_named_modules(code)
    peer = os.fdopen(0, "rb", closefd=False)

    # When memory is short, the kernel kills this process first, not the evaluation that started it.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123
        file.write("1000")

    # The code finds no input, no arguments and no environment. Output is flushed at each line, so a kill keeps it.
    sys.stdin = io.StringIO("")
    sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    builtins.__dict__.update(exit=sys.exit, quit=sys.exit)
    os.environ.clear()
    sys.argv[:] = [""]
    sys.path.clear()

    try:
        confine(parent, {0}, {0, 1, 2, report}, cpu_seconds, memory_bytes)
    except (OSError, ValueError) as error:
        os.write(report, str(error).encode())
        os._exit(1)
    os.write(report, STANDING)
    if role == "program":
        _serve(code, peer)
    else:
        _conclude(report, _check(code, peer, report))
    os._exit(0)  # not sys.exit: no untrusted code may run after its end


def _import_named_modules(code: str) -> None:
    words = set(re.findall(r"\w+", code))
    for name in MODULES:
        if words.issuperset(name.split(".")):
            importlib.import_module(name)
    if "strptime" in words:
        importlib.import_module("_strptime")  # datetime imports it on first use


# ---------------------------------------------------------------------- the wall


def confine(parent: int, readable: set[int], writable: set[int], cpu_seconds: int, memory_bytes: int) -> None:
    """Give up all rights of this process.

    Raises OSError: when the machine does not allow one of the steps, or the filter does not hold.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: int | bytes) -> None:
        wide = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in arguments]
        if getattr(libc, name)(*wide) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{name} {arguments[0] if name == 'prctl' else ''}: {os.strerror(number)}")

    # Drop root and all capabilities, for good.
    _become_nobody()
    call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))  # _LINUX_CAPABILITY_VERSION_3, no capability
    call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    call("prctl", 4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: no process of the same user can look into this one

    # Prevent an orphan: the kernel kills this process when its parent dies.
    call("prctl", 1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)

    with open("/proc/self/statm") as file:  # noqa: PTH123 (pathlib takes long to import)
        mapped_bytes = int(file.read().split()[0]) * os.sysconf("SC_PAGESIZE")
    limits: dict[str, int] = dict.fromkeys(("CORE", "FSIZE", "NPROC", "MEMLOCK", "MSGQUEUE", "SIGPENDING", "NOFILE"), 0)
    limits["CPU"] = cpu_seconds
    limits["AS"] = mapped_bytes + memory_bytes
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(kind, (value, value))

    # The filter, and a call that must now fail.
    program = filter_program(os.uname().machine, readable, writable)
    instructions = ctypes.create_string_buffer(program, len(program))
    call("prctl", 22, 2, struct.pack("HP", len(program) // 8, ctypes.addressof(instructions)), 0, 0)  # PR_SET_SECCOMP
    try:
        os.open("/", os.O_RDONLY)
    except OSError as error:
        if error.errno == errno.EPERM:  # the filter's answer
            return
    raise OSError(0, "the seccomp filter does not hold")


def _become_nobody() -> None:
    """Root becomes another user, so that even a hole in the filter gives no access to root's files."""
    if os.geteuid() != 0:
        return
    try:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
    except OSError:  # a container with only one user: continue as root, without capabilities and with the filter
        return


def filter_program(machine: str, readable: set[int], writable: set[int]) -> bytes:
    """The seccomp filter, in classic BPF.

    It allows SYSTEM_CALLS, reading and writing of the given file descriptors, and mapping of memory that is not
    executable. It answers EPERM to every other call, and kills a process that uses another machine's numbers (32-bit
    calls, and x32 on x86-64).
    """
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF_LD|W|ABS, JEQ, JGE, JSET, RET
    number, arch, argument = 0, 4, 16  # offsets in struct seccomp_data; an argument's low half comes first
    allow, deny, kill = 0x7FFF0000, 0x00050001, 0x80000000  # RET_ALLOW, RET_ERRNO with EPERM, RET_KILL_PROCESS
    column = MACHINES.index(machine)

    # An instruction is (code, lines to skip if true, lines to skip if false, value).
    lines = [(load, 0, 0, arch), (equal, 1, 0, AUDIT_ARCH[column]), (answer, 0, 0, kill)]
    lines += [(load, 0, 0, number), (at_least, 0, 1, 0x40000000), (answer, 0, 0, kill)]
    for numbers in SYSTEM_CALLS.values():
        if numbers[column] >= 0:
            lines += [(equal, 0, 1, numbers[column]), (answer, 0, 0, allow)]
    for numbers, descriptors in ((READ, readable), (WRITE, writable)):
        one_of_them = []
        for descriptor in sorted(descriptors):
            one_of_them += [(equal, 0, 1, descriptor), (answer, 0, 0, allow)]
        lines += [(equal, 0, len(one_of_them) + 2, numbers[column]), (load, 0, 0, argument), *one_of_them]
        lines += [(answer, 0, 0, deny)]
    lines += [(equal, 0, 3, MMAP[column]), (load, 0, 0, argument + 2 * 8)]
    lines += [(any_bit, 1, 0, 4), (answer, 0, 0, allow), (answer, 0, 0, deny)]  # 4: PROT_EXEC
    return b"".join(struct.pack("HBBI", *line) for line in lines)


# ---------------------------------------------------------------------- the program


def _serve(code: str, requests: io.BufferedReader) -> None:
    """Run the program, then call its functions for the checks, until they end."""
    module = ModuleType("program")
    sys.modules["program"] = module
    functions = vars(module)
    failure = _execute(code, functions, "<program>")
    for line in requests:
        request = json.loads(line)
        answer: dict[str, object]
        try:
            arguments, options = from_json(request["arguments"]), from_json(request["options"])
            answer = {"value": to_json(functions[request["function"]](*arguments, **options))}
        except SystemExit:
            answer = {"failure": "it called exit"}
        except BaseException as error:
            answer = {"raised": _one_line(error)}
        _send({"failure": failure} if failure else answer)


def _execute(code: str, namespace: dict[str, object], filename: str) -> str:
    """Run code in a namespace. Returns "" when it has reached its end, else the error in one line."""
    stdout = sys.stdout  # the code may replace it
    try:
        exec(compile(code, filename, "exec", dont_inherit=True), namespace)
    except BaseException as error:
        lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == filename]
        return _one_line(error) + (f" (line {lines[-1]})" if lines else "")
    finally:
        stdout.flush()
    return ""


def _one_line(error: BaseException) -> str:
    try:
        message = str(error)
    except BaseException:  # untrusted code may define the class
        message = ""
    return " ".join(f"{type(error).__name__}: {message}".split())[:300].removesuffix(":")


# ---------------------------------------------------------------------- the checks


def _check(code: str, answers: io.BufferedReader, report: int) -> str:
    """Run the checks. Returns "" when all ran to their end and none failed, else why not."""
    used = False

    def call(function: str, /, *arguments: object, **options: object) -> object:
        """Call a function of the program in the other process."""
        nonlocal used
        used = True
        request = {"function": function, "arguments": to_json(arguments), "options": to_json(options)}
        raised, value = "", None
        try:
            _send(request)
            answer = json.loads(answers.readline() or '{"failure": "it left before its checks ended"}')
            failure = str(answer.get("failure", ""))
            raised = str(answer.get("raised", ""))
            value = from_json(answer.get("value"))
        except OSError:
            failure = "it left before its checks ended"
        except Exception:
            failure = "it answers nonsense"
        if failure:  # the program can no longer pass, even if the checks would catch an error
            _conclude(report, f"the program failed: {failure}")
        if raised:  # always this class: a StopIteration, for example, would end a loop of the checks without an error
            raise RuntimeError(raised)
        return value

    try:
        names = _names_in(compile(code, "<checks>", "exec", dont_inherit=True))
    except (SyntaxError, ValueError) as error:
        return _one_line(error)
    # Every name that the checks look up is a function of the program, unless Python or the checks define it: a program
    # cannot replace `abs`.
    namespace: dict[str, object] = {name: partial(call, name) for name in names - set(dir(builtins))}
    namespace |= {"__builtins__": builtins, "__name__": "checks"}
    error = _execute(code, namespace, "<checks>")
    return error or ("" if used else "the checks never used the program")


def _conclude(report: int, error: str) -> None:
    """Report why the checks failed, "" if they did not, and end this process."""
    os.write(report, error.encode("utf-8", "replace")[:1000] or OK)
    os._exit(0)


def _names_in(code: CodeType) -> set[str]:
    """Every name that code, and the functions in it, look up outside themselves."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names


# ---------------------------------------------------------------------- values as JSON

CONTAINERS = {"list": list, "tuple": tuple, "dict": dict, "set": set, "frozenset": frozenset}


def to_json(value):
    """A value for JSON: a type that JSON does not have becomes a dict with the type's name as the key.

    A subclass becomes its base class, so that no `__eq__` of a program takes part in a comparison.
    Raises TypeError: for a type that cannot travel.
    """
    if value is None or isinstance(value, bool):
        return value
    for plain in (int, float, str):
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    for name, kind in CONTAINERS.items():
        if isinstance(value, kind):
            return {name: [to_json(item) for item in (value.items() if kind is dict else value)]}
    raise TypeError(f"a value of type {type(value).__name__} cannot travel between a program and its checks")


def from_json(data):
    """The inverse of `to_json`. Raises ValueError, TypeError or LookupError: for input that `to_json` never returns."""
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == "bytes":
        return bytes.fromhex(content)
    return CONTAINERS[kind](from_json(item) for item in content)


def _send(message: dict[str, object]) -> None:
    data = memoryview(json.dumps(message).encode() + b"\n")
    while data:
        data = data[os.write(0, data) :]


if __name__ == "__main__":
    main()
