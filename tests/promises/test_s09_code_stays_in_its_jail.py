"""S9. Model-written code stays in its jail.

Every probe is code that leaves evidence when it gets out: a secret in what it prints, a changed folder, a message, a
dead victim, or the word ESCAPED after a call that must not succeed. Where that is harmless the same code also runs
without the jail, and must leave evidence there: a probe that cannot escape anyway proves nothing. The rest: no process
is left, output, time and memory are capped, only right answers pass, and it refuses to run where it cannot isolate.
"""

import contextlib
import ctypes
import json
import os
import re
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny import complaint, is_running

from nanochat.tools import jail, sandbox
from nanochat.tools.sandbox import Run, run_checks

ROOT = Path(__file__).resolve().parents[2]
MACHINE = os.uname().machine
NOBODY: dict = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}

HAS_A_JAIL = sys.platform == "linux" and MACHINE in jail.MACHINES
pytestmark = pytest.mark.skipif(not HAS_A_JAIL, reason="the jail refuses to run here")

SQUARE = "def f(x): return x * x"
CHECKS = "assert f(2) == 4\nassert f(3) == 9"

# ---------------------------------------------------------------------- who runs the jail: root and an ordinary user

RUNNER = """
import json, sys
sys.path.insert(0, sys.argv[1])
from nanochat.tools.sandbox import run_checks
print("ready", flush=True)
for line in sys.stdin:
    arguments, options = json.loads(line)
    print(json.dumps(vars(run_checks(*arguments, **options))), flush=True)
"""


@pytest.fixture(scope="module")
def ordinary_user() -> Iterator[Callable[..., Run]]:
    """`run_checks` in a process of an ordinary user."""
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):  # ours may be in root's home
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        try:
            process = subprocess.Popen([python, "-c", RUNNER, str(ROOT)], **pipes, **NOBODY)
        except OSError:
            continue
        if process.stdout.readline() == "ready\n":
            break
        process.wait()
    else:
        pytest.skip("no Python here that an ordinary user can start")

    def call(*arguments, **options) -> Run:
        process.stdin.write(json.dumps([arguments, options]) + "\n")
        process.stdin.flush()
        return Run(**json.loads(process.stdout.readline()))

    yield call
    process.stdin.close()
    assert process.wait(10) == 0


@pytest.fixture(params=["this_user", "ordinary_user"])
def sandboxed(request: pytest.FixtureRequest) -> Callable[..., Run]:
    return run_checks if request.param == "this_user" else request.getfixturevalue("ordinary_user")


# ---------------------------------------------------------------------- the probes

# name: (number on x86-64, number on aarch64)
NUMBERS = {
    "openat": (257, 56), "openat2": (437, 437), "socket": (41, 198), "clone": (56, 220), "clone3": (435, 435),
    "execveat": (322, 281), "memfd_create": (319, 279), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "unshare": (272, 97), "shmget": (29, 194), "io_uring_setup": (425, 425), "eventfd2": (290, 19),
    "keyctl": (250, 219),
}  # fmt: skip
# The beginning of every probe. `call` is a system call by number, past everything that Python might check.
HEADER = """
import os, sys, ctypes, struct
{constants}
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    libc.syscall.restype = ctypes.c_long
    result = libc.syscall(ctypes.c_long(number), *wide)
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result
"""


@dataclass(frozen=True)
class Probe:
    name: str
    code: str
    outside: str = "works"  # or "root": for root only; "mostly": a container may refuse it; "not tried"


PROBES = [
    # files
    Probe("open", "print(open(SECRET).read())"),
    Probe("os.open", "print(os.read(os.open(SECRET, os.O_RDONLY), 99))"),
    Probe("openat", "print(os.read(call(NR['openat'], -100, SECRET.encode(), 0), 99))"),
    Probe("openat2", "print(os.read(call(NR['openat2'], -100, SECRET.encode(), bytes(24), 24), 99))", "mostly"),
    Probe("create", "open(FOLDER + '/new', 'w').write('x')"),
    Probe("truncate", "os.truncate(SECRET, 1)"),
    Probe("unlink", "os.unlink(SECRET)"),
    Probe("mkdir", "os.mkdir(FOLDER + '/new')"),
    Probe("symlink", "os.symlink('/', FOLDER + '/new')"),
    Probe("chmod", "os.chmod(SECRET, 0o600)\nprint('ESCAPED')"),
    Probe("stat", "print('ESCAPED', os.stat(SECRET).st_size)"),
    Probe("chdir", "os.chdir(FOLDER)\nprint('ESCAPED')"),
    Probe("inherited descriptor", "for fd in range(256):\n  try: print(os.pread(fd, 99, 0))\n  except OSError: pass"),
    Probe("memfd", "call(NR['memfd_create'], b'x', 0)\nprint('ESCAPED')"),
    # /proc
    Probe("proc environ", "print(open(f'/proc/{VICTIM}/environ').read())", "mostly"),
    Probe("proc root", "print(open('/proc/self/root' + SECRET).read())"),
    Probe("proc mem", "open('/proc/self/mem', 'r+b')\nprint('ESCAPED')"),
    # network
    Probe("tcp", "import socket\ns = socket.socket()\ns.connect(('127.0.0.1', PORT))\ns.sendall(b'out')"),
    Probe("unix socket", "import socket\ns = socket.socket(1, 1)\ns.connect(FOLDER + '/socket')\ns.sendall(b'out')"),
    Probe("listen", "import socket\ns = socket.socket()\ns.bind(('127.0.0.1', 0))\ns.listen()\nprint('ESCAPED')"),
    # processes
    Probe("fork", "if os.fork() == 0:\n  open(FOLDER + '/new', 'w')\n  os._exit(0)\nprint('ESCAPED')\nos.wait()"),
    Probe("daemon", "if os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: os.mkdir(FOLDER + '/new')\n  os._exit(0)"),
    Probe("clone", "if call(NR['clone'], 17, 0, 0, 0, 0) == 0: os._exit(0)\nprint('ESCAPED')\nos.wait()"),
    Probe("clone3", "a = bytes(32) + struct.pack('Q', 17) + bytes(48)\nif call(NR['clone3'], a, 88) == 0: os._exit(0)\n"
          "print('ESCAPED')\nos.wait()", "mostly"),
    Probe("os.system", "os.system(TOUCH)"),
    Probe("posix_spawn", "os.waitpid(os.posix_spawn('/bin/sh', ['sh', '-c', TOUCH], {}), 0)"),
    Probe("exec", "os.execv('/bin/sh', ['sh', '-c', TOUCH])"),
    Probe("execveat", "v = (ctypes.c_char_p * 4)(b'sh', b'-c', TOUCH.encode())\n"
          "call(NR['execveat'], -100, b'/bin/sh', v, 0, 0)"),
    Probe("libc system", "ctypes.CDLL(None).system(TOUCH.encode())"),
    # threads
    Probe("thread", "import threading\nthreading.Thread(target=print, args=('ESCAPED',)).start()"),
    # signals
    Probe("kill", "os.kill(VICTIM, 9)\nprint('ESCAPED')"),
    Probe("tgkill", "call(NR['tgkill'], VICTIM, VICTIM, 9)\nprint('ESCAPED')"),
    Probe("pidfd", "call(NR['pidfd_send_signal'], call(NR['pidfd_open'], VICTIM, 0), 9, 0, 0)", "mostly"),
    Probe("kill everybody", "os.kill(-1, 0)\nprint('ESCAPED')", "not tried"),
    Probe("kill parent", "os.kill(os.getppid(), 0)\nprint('ESCAPED')"),
    Probe("signal handler", "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ESCAPED')"),
    Probe("alarm", "import signal\nsignal.alarm(0)\nsignal.setitimer(signal.ITIMER_REAL, 0)\nprint('ESCAPED')"),
    # ptrace and memory
    Probe("ptrace attach", "call(NR['ptrace'], 16, VICTIM, 0, 0)\nprint('ESCAPED')", "mostly"),
    Probe("ptrace traceme", "call(NR['ptrace'], 0, 0, 0, 0)\nprint('ESCAPED')", "mostly"),
    Probe("process_vm_readv", "call(NR['process_vm_readv'], VICTIM, 0, 0, 0, 0, 0)\nprint('ESCAPED')", "mostly"),
    Probe("executable memory", "p = libc.mmap\np.restype = ctypes.c_void_p\na = p(None, 4096, 7, 34, -1, 0)\n"
          "if a != 2**64 - 1: print('ESCAPED')"),
    Probe("mprotect", "p = libc.mmap\np.restype = ctypes.c_void_p\na = p(None, 4096, 3, 34, -1, 0)\n"
          "if libc.mprotect(ctypes.c_void_p(a), 4096, 7) == 0: print('ESCAPED')"),
    Probe("shared memory", "call(NR['shmget'], 0, 4096, 0o1600)\nprint('ESCAPED')"),
    # rights and limits
    Probe("limits", "import resource\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\nprint('ESCAPED')"),
    Probe("become root", "os.setuid(0)\nprint('ESCAPED')", "root"),
    Probe("unshare", "call(NR['unshare'], 0x10000000)\nprint('ESCAPED')", "mostly"),
    Probe("dumpable", "if libc.prctl(4, 1, 0, 0, 0) == 0: print('ESCAPED')"),
    Probe("outlive the parent", "if libc.prctl(1, 0, 0, 0, 0) == 0: print('ESCAPED')"),
    Probe("io_uring", "call(NR['io_uring_setup'], 4, bytes(120))\nprint('ESCAPED')", "mostly"),
    Probe("keyring", "call(NR['keyctl'], 0, -3, 1)\nprint('ESCAPED')", "mostly"),
    # what Python keeps within reach
    Probe("reload os", "import importlib\nimportlib.reload(os).system(TOUCH)"),
    Probe("subclasses", "c = [c for c in object.__subclasses__() if c.__name__ == '_wrap_close'][0]\n"
          "c.__init__.__globals__['system'](TOUCH)"),
    Probe("a jail in the jail", "sys.path.insert(0, ROOT)\nfrom nanochat.tools.sandbox import run_checks\n"
          "if run_checks('def f(): return 1', 'assert f() == 1').ok: print('ESCAPED')"),
]  # fmt: skip


class World:
    """What a probe could touch, all of it open to every user."""

    def __init__(self, folder: Path):
        self.token = secrets.token_hex(8)
        self.folder = folder
        self.folder.chmod(0o777)
        (folder / self.token).touch()
        self.secret = folder / "secret"
        self.secret.write_text(self.token)
        self.secret.chmod(0o666)
        self.open_secret = os.open(self.secret, os.O_RDONLY)
        os.set_inheritable(self.open_secret, True)
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix.bind(str(folder / "socket"))
        self.unix.listen()
        (folder / "socket").chmod(0o777)
        self.environment = {"TOKEN": secrets.token_hex(8)}
        sleep = ["/bin/sleep", "600"]
        self.victim = subprocess.Popen(sleep, env=self.environment, start_new_session=True, **NOBODY)
        self.before = self.look()

    def look(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() if path.is_file() else b"" for path in self.folder.iterdir()}

    def header(self) -> str:
        constants = {
            "SECRET": str(self.secret), "FOLDER": str(self.folder), "ROOT": str(ROOT),
            "TOUCH": f"> {self.folder}/new", "PORT": self.tcp.getsockname()[1], "VICTIM": self.victim.pid,
            "NR": {name: numbers[jail.MACHINES.index(MACHINE)] for name, numbers in NUMBERS.items()},
        }  # fmt: skip
        return HEADER.replace("{constants}", "\n".join(f"{name} = {value!r}" for name, value in constants.items()))

    def evidence(self, output: str) -> list[str]:
        """Every sign that the probe got out."""
        signs = ["it printed ESCAPED"] if "ESCAPED" in output else []
        signs += ["it read the secret"] if self.token in output or self.environment["TOKEN"] in output else []
        signs += ["it changed the folder"] if self.look() != self.before else []
        signs += ["it killed its victim"] if self.victim.poll() is not None else []
        readable, _, _ = select.select([self.tcp, self.unix], [], [], 0)
        signs += ["it sent a message"] if readable else []
        return signs

    def close(self) -> None:
        os.close(self.open_secret)
        self.tcp.close()
        self.unix.close()
        self.victim.kill()
        self.victim.wait()


@pytest.fixture
def world() -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="probe-", dir="/tmp") as folder:  # tmp_path is closed to other users
        world = World(Path(folder))
        yield world
        world.close()


def descendants(ancestor: int) -> set[int]:
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it left just now
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = {ancestor}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {ancestor}


@pytest.fixture(scope="module")
def adopts_orphans() -> Iterator[None]:
    """A process whose parent ended becomes our child, so that the test sees it."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    yield
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_a_probe_escapes_where_there_is_no_jail(probe: Probe, world: World):
    if probe.outside == "not tried" or (probe.outside == "root" and os.geteuid() != 0):
        pytest.skip("not tried without the jail")
    command = [sys.executable, "-I", "-S", "-c", world.header() + probe.code]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "close_fds": False}
    ran = subprocess.run(command, timeout=60, **pipes)
    deadline = time.monotonic() + (5 if ran.returncode == 0 else 0.1)  # what was started or killed may take a moment
    while not world.evidence(ran.stdout) and time.monotonic() < deadline:
        time.sleep(0.01)
    if probe.outside == "mostly" and not world.evidence(ran.stdout) and "Error" in ran.stdout:
        pytest.skip("this machine refuses it anyway")
    assert world.evidence(ran.stdout), ran.stdout


def test_no_probe_leaves_the_jail(world: World, sandboxed: Callable[..., Run], adopts_orphans: None):
    """All probes in one program, each in its own function."""
    assert len({probe.name for probe in PROBES}) == len(PROBES) > 40
    code = world.header()
    for probe in PROBES:
        code += f"print('begun', {probe.name!r}, flush=True)\ntry:\n    def probe():\n"
        code += textwrap.indent(probe.code, "        ")
        code += "\n    probe()\nexcept BaseException as error: print(error)\n"
    before = descendants(os.getpid())
    run = sandboxed(code, "f()", timeout_seconds=30)
    assert re.findall(r"^begun (.+)$", run.output, re.MULTILINE) == [probe.name for probe in PROBES], run
    assert not world.evidence(run.output) and not run.ok, run
    assert descendants(os.getpid()) - before == set()


# ---------------------------------------------------------------------- the filter, instruction by instruction


def verdict(program: bytes, number: int, arch: int, arguments: tuple[int, ...] = ()) -> str:
    """What the kernel would answer: runs the few classic BPF instructions that the filter uses."""
    data = struct.pack("<IIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    at, accumulator = 0, 0
    while True:
        code, true, false, k = struct.unpack_from("<HBBI", program, at * 8)
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif code == 0x06:
            return {0x7FFF0000: "allow", 0x00050001: "deny", 0x80000000: "kill"}[k]
        else:
            at += true if {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: accumulator & k}[code] else false


ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h


@pytest.mark.parametrize("machine", jail.MACHINES)
def test_the_filter_allows_its_list_and_nothing_else(machine: str):
    column = jail.MACHINES.index(machine)
    program = jail.filter_program(machine, readable={7}, writable={1, 2, 5})
    listed = {numbers[column] for numbers in jail.SYSTEM_CALLS.values()} - {-1}
    mmap, read, write = jail.MMAP[column], jail.READ[column], jail.WRITE[column]
    for number in range(1024):
        expected = "allow" if number in listed | {mmap} else "deny"
        assert verdict(program, number, ARCHES[machine]) == expected, number
    assert {fd for fd in range(64) if verdict(program, read, ARCHES[machine], (fd,)) == "allow"} == {7}
    assert {fd for fd in range(64) if verdict(program, write, ARCHES[machine], (fd,)) == "allow"} == {1, 2, 5}
    for protection in range(16):
        allowed = verdict(program, mmap, ARCHES[machine], (0, 4096, protection)) == "allow"
        assert allowed == (not protection & 4)
    for number in (0x40000000, 0x40000001, 0x40000000 + write, 0xFFFFFFFF):
        assert verdict(program, number, ARCHES[machine]) == "kill"
    for arch in {*ARCHES.values(), 0x40000003, 0x40000028, 0} - {ARCHES[machine]}:  # also i386 and arm
        assert verdict(program, write, arch, (1,)) == "kill"


def test_the_numbers_are_the_kernels():
    headers = [Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm-generic/unistd.h")]
    calls = jail.SYSTEM_CALLS | {"mmap": jail.MMAP, "read": jail.READ, "write": jail.WRITE}
    if not all(header.is_file() for header in headers):
        pytest.skip("no kernel headers here")
    for column, header in enumerate(headers):
        numbers = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
        known = {name: int(number) for name, number in numbers}
        assert {name: known.get(name, -1) for name in calls} == {name: both[column] for name, both in calls.items()}


# ---------------------------------------------------------------------- output, time and memory


def test_output_is_cut(sandboxed: Callable[..., Run]):
    run = sandboxed("for _ in range(20): print('é' * 10**5)\n" + SQUARE, CHECKS)
    assert run.ok
    assert run.output == "é" * 32768 and sandbox.OUTPUT_BYTES == 65536
    run = sandboxed("while True: print('x' * 1000)", "f()", timeout_seconds=0.3)
    assert run.error.startswith("timed out after") and len(run.output.encode()) <= 65536


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "9**9**9",  # one long step of the interpreter
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    ],
)
def test_time_is_limited(code: str):
    run = run_checks("print('begun')\n" + code, "f(1)", timeout_seconds=0.4)
    assert (run.ok, run.output, run.error) == (False, "begun\n", "timed out after 0.4 s")


def test_memory_is_limited(sandboxed: Callable[..., Run]):
    size = 64 * 1024**2
    for code in ("x = bytearray(100 * 1024**2)", "x = []\nwhile True: x.append('x' * 10**6 + str(len(x)))"):
        run = sandboxed(code, CHECKS, memory_bytes=size)
        assert not run.ok and "MemoryError" in run.error, run
    assert sandboxed(f"x = bytearray(40 * 1024**2)\n{SQUARE}", CHECKS, memory_bytes=size).ok


@pytest.mark.parametrize(
    "code",
    [
        "import os\nwhile True: os.fork()",
        "import sys\nsys.setrecursionlimit(10**9)\nf = lambda n: f(n + 1)\nf(0)",
        "eval('(' * 10**6)",
    ],
)
def test_bombs_do_not_go_off(code: str, adopts_orphans: None):
    before = descendants(os.getpid())
    run = run_checks(code, CHECKS, timeout_seconds=1, memory_bytes=128 * 1024**2)
    assert not run.ok and run.error and "\n" not in run.error
    assert descendants(os.getpid()) - before == set()


# ---------------------------------------------------------------------- only right answers pass

SAY = "import os\ndef say(data):\n  for fd in range(256):\n    try: os.write(fd, data)\n    except OSError: pass\n"

WRONG = {
    "wrong": "def f(x): return x + x",
    "no such function": "def g(x): return x * x",
    "raises at its start": SQUARE + "\nraise ValueError",
    "exit at its end": SQUARE + "\nexit(0)",
    "os._exit at its end": SQUARE + "\nimport os\nos._exit(0)",
    "exit in the call": "def f(x): exit(0)",
    "os._exit in the call": "import os\ndef f(x): os._exit(0)",
    "crash in the call": "import ctypes\ndef f(x): ctypes.string_at(0)",
    "equal to everything": "class A:\n  __eq__ = lambda s, o: True\n  __bool__ = __eq__\ndef f(x): return A()",
    "an int that equals everything": "class A(int):\n  __eq__ = lambda s, o: True\ndef f(x): return A(1)",
    "no AssertionError": "import builtins\nbuiltins.AssertionError = builtins.Exception = OSError\ndef f(x): return 0",
    "writes a pass everywhere": SAY + "say(b'Jok')\nsay(b'ok')\nos._exit(0)",
    "answers beforehand": SAY + "say(b'{\"value\": 4}\\n' * 9)\n1/0",
    "answers no JSON": SAY + "def f(x): say(b'\\xff\\n')",
    "answers a strange value": SAY + 'def f(x): say(b\'{"value": {"int": [], "x": 1}}\\n\')',
    "answers a deep value": SAY + "def f(x): say(b'{\"value\": ' + b'[' * 10**5 + b'\\n')",
    "a list in itself": "x = []\nx.append(x)\ndef f(y): return x",
    "a huge answer": "def f(x): return 'x' * 10**8",
    "an endless answer": "import itertools\ndef f(x): return itertools.count()",
    "an endless loop": "def f(x):\n  while True: pass",
    "its own check": SQUARE.replace("x * x", "0") + "\ndef check(f): pass\nCHECKS = ''",
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_programs_do_not_pass(name: str):
    seconds = 0.3 if "endless" in name else 20  # on a busy machine the others must not run out of time
    run = run_checks(WRONG[name], CHECKS, timeout_seconds=seconds, memory_bytes=128 * 1024**2)
    assert not run.ok and run.error and "\n" not in run.error
    is_over_time = run.error.startswith("timed out after")
    assert is_over_time == name.startswith("an endless loop") or name in ("an endless answer", "a huge answer")


@pytest.mark.parametrize(
    ("program", "checks"),
    [
        # the end of an iteration must not end the checks' loops
        ("def f(x): raise StopIteration", "assert all(map(lambda x: f(x) == x, [1, 2]))"),
        ("def f(x): raise GeneratorExit", "assert all(f(x) == x for x in [1, 2])"),
        # leaving fails even where the checks catch everything
        ("def f(x): exit(0)", "try:\n    f(1)\n    assert False\nexcept:\n    pass\n"),
        ("import os\ndef f(x): os._exit(0)", "try:\n    f(1)\n    assert False\nexcept:\n    pass\n"),
        # what Python has is Python's
        ("def f(x): return -5\ndef abs(x): return 0", "assert abs(f(5) - 5) < 1e-6"),
        ("def f(x): return 1\ndef all(x): return True\ndef len(x): return 3", "assert all([f(2) == 2])"),
        ("__name__ = 'checks?'\ndef f(x): return 1", "assert f(1) == 1 and __name__ == 'checks?'"),
        ("class math:\n  isclose = lambda *a: True\ndef f(x): return 1", "import math\nassert math.isclose(f(2), 2)"),
        ("class math:\n  isclose = lambda *a: True\ndef f(x): return 1", "assert math.isclose(f(2), 2)"),
        # what the checks define is theirs
        ("def f(x): return 1\ndef right(x): return 1", "def right(x): return x\nassert f(2) == right(2)"),
        # values that the checks hold do not change under them
        ("def f(x):\n  x.clear()\n  return x", "x = [2, 1]\nassert f(x) == sorted(x)"),
        # checks that check nothing
        (SQUARE, ""),
        (SQUARE, "assert True"),
        (SQUARE, "def check(candidate): assert candidate(2) == 5\ncheck"),
        (SQUARE, "assert f(2) == 4\nimport sys\nsys.exit(0)"),
        (SQUARE, "assert f(2) == 4\nimport os\nos._exit(0)"),
    ],
)
def test_no_way_around_the_checks(program: str, checks: str):
    run = run_checks(program, checks)
    assert not run.ok and run.error


def test_a_program_cannot_see_its_checks_nor_earlier_ones():
    """Not in objects, not in frames, not in the memory it can reach as the heap around its own objects."""
    canary = "canary-" + secrets.token_hex(8)
    half = len(canary) // 2
    program = f"""
import ctypes, gc, sys
def search():
    wanted = ({canary[:half]!r} + {canary[half:]!r})
    seen, frame = [], sys._getframe()
    while frame:
        seen += [repr(frame.f_locals.get(name))[:10**5] for name in frame.f_locals if name not in ("wanted", "seen")]
        frame = frame.f_back
    for thing in gc.get_objects():
        for inner in gc.get_referents(thing):
            if type(inner) in (str, bytes) and inner is not wanted: seen.append(str(inner))
    return any(wanted in text for text in seen if text != wanted)
def reads():
    return ctypes.string_at(id("x"), 16) != b""
early = search()
def found(): return early
"""
    checks = f"# {canary}\nmark = '{canary}'\nassert found() is False and search() is False and reads()"
    for _ in range(2):
        assert run_checks(program, checks).error == ""
    # the search works: it finds what is there
    planted = f"here = ['{canary}!']\n" + program
    assert run_checks(planted, "assert found() is True").ok


# ---------------------------------------------------------------------- many at once, and the end of everything


def test_threads_leave_nothing_behind(adopts_orphans: None):
    """No process, no descriptor, no thread."""

    def one(index: int) -> bool:
        if index % 3 == 0:
            return run_checks(f"def f(x): return x + {index}", f"assert f(1) == {index + 1}").ok
        if index % 3 == 1:
            return not run_checks(f"def f(x): return x + {index}", f"assert f(1) == {index}").ok
        return run_checks("while True: pass", CHECKS, timeout_seconds=0.2).error == "timed out after 0.2 s"

    def state():
        return descendants(os.getpid()), len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    run_checks(SQUARE, CHECKS)
    before = state()
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(one, range(12)))
    for _ in range(100):  # a thread that reads what a killed program wrote ends a moment after it
        if state() == before:
            break
        time.sleep(0.1)
    assert state() == before


START = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom nanochat.tools.sandbox import run_checks\n"


def test_no_jail_outlives_its_parent():
    code = START + "run_checks('while True: pass', 'f(1)', timeout_seconds=60)"
    parent = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while len(family := descendants(parent.pid)) < 2:  # the program and the checks
        assert time.monotonic() < deadline
        time.sleep(0.02)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    while any(map(is_running, family)):
        assert time.monotonic() < deadline, "a jail outlived its parent"
        time.sleep(0.02)


# ---------------------------------------------------------------------- where it cannot isolate


@pytest.mark.parametrize(
    ("module", "name", "value", "problem"),
    [
        (sys, "platform", "darwin", "darwin"),
        (os, "uname", lambda: SimpleNamespace(machine="riscv64"), "riscv64"),
        (sys, "maxsize", 2**31 - 1, "64-bit"),
        (sys, "executable", "", "sys.executable"),
        (sys, "executable", "/bin/false", "did not start"),
        (sys, "executable", "/no/such/python", "did not start"),
    ],
)
def test_refuses_where_it_cannot_isolate(monkeypatch: pytest.MonkeyPatch, module, name, value, problem):
    with monkeypatch.context() as patch:
        patch.setattr(module, name, value)
        assert problem in complaint(lambda: run_checks(SQUARE, CHECKS))


def test_refuses_where_the_kernel_has_no_seccomp():
    """The same answer from prctl as from a kernel without filters: another filter gives it."""
    prctl, seccomp = (157, 317) if MACHINE == "x86_64" else (167, 277)
    code = f"""
import ctypes, struct, sys
lines = [(0x20, 0, 0, 0), (0x15, 0, 3, {prctl}), (0x20, 0, 0, 16), (0x15, 2, 0, 22), (0x06, 0, 0, 0x7FFF0000)]
lines += [(0x15, 0, 1, {seccomp}), (0x06, 0, 0, 0x00050016), (0x06, 0, 0, 0x7FFF0000)]  # EINVAL
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, struct.pack("HP", len(lines), ctypes.addressof(program))) == 0
{START}
from nanochat.ground.cli import UserError
try:
    run_checks("1", "1")
except UserError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "[Errno 22] prctl 22" in ran.stdout, ran
    assert len(ran.stdout.splitlines()) == 1 and ran.stderr == ""
