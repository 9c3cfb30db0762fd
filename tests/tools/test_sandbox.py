"""The sandbox: what it lets code do, that nothing gets out of it, and that only right answers pass.

Every probe is code that leaves evidence when it gets out: a secret in what it prints, a changed folder, a message, a
dead victim, or the word ESCAPED after a call that must not succeed. Where that is harmless the same code also runs
without the jail, and must leave evidence there: a probe that cannot escape anyway proves nothing.
"""

import contextlib
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
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny import complaint

from nanochat.tools import jail, sandbox
from nanochat.tools.sandbox import Run, run_checks

ROOT = Path(__file__).resolve().parents[2]
MACHINE = os.uname().machine
NOBODY = 65534

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or MACHINE not in jail.MACHINES, reason="the jail refuses to run here"
)

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


@pytest.fixture(scope="session")
def ordinary_user() -> Iterator[Callable[..., Run]]:
    """`run_checks` in a process of an ordinary user."""
    if os.geteuid() != 0:
        yield run_checks
        return
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):  # ours may be in root's home
        try:
            process = subprocess.Popen(
                [python, "-c", RUNNER, str(ROOT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                **{"user": NOBODY, "group": NOBODY, "extra_groups": []},
            )
        except OSError:
            continue
        assert process.stdin and process.stdout
        if process.stdout.readline() == "ready\n":
            break
        process.wait()
    else:
        pytest.skip("no Python here that an ordinary user can start")

    def call(*arguments, **options) -> Run:
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps([arguments, options]) + "\n")
        process.stdin.flush()
        return Run(**json.loads(process.stdout.readline()))

    yield call
    process.stdin.close()
    assert process.wait(10) == 0


@pytest.fixture(params=["root", "ordinary_user"])
def sandboxed(request: pytest.FixtureRequest) -> Callable[..., Run]:
    if request.param == "ordinary_user":
        return request.getfixturevalue("ordinary_user")
    if os.geteuid() != 0:
        pytest.skip("these tests are not run by root")
    return run_checks


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
    Probe("io.FileIO", "import io\nprint(io.FileIO(SECRET).read())"),
    Probe("pathlib", "import pathlib\nprint(pathlib.Path(SECRET).read_text())"),
    Probe("openat", "print(os.read(call(NR['openat'], -100, SECRET.encode(), 0), 99))"),
    Probe("openat2", "print(os.read(call(NR['openat2'], -100, SECRET.encode(), bytes(24), 24), 99))", "mostly"),
    Probe("create", "open(FOLDER + '/new', 'w').write('x')"),
    Probe("append", "open(SECRET, 'a').write('x')"),
    Probe("truncate", "os.truncate(SECRET, 1)"),
    Probe("unlink", "os.unlink(SECRET)"),
    Probe("rename", "os.rename(SECRET, SECRET + '.moved')"),
    Probe("mkdir", "os.mkdir(FOLDER + '/new')"),
    Probe("symlink", "os.symlink('/', FOLDER + '/new')"),
    Probe("link", "os.link(SECRET, FOLDER + '/new')"),
    Probe("chmod", "os.chmod(SECRET, 0o600)\nprint('ESCAPED')"),
    Probe("listdir", "print(os.listdir(FOLDER))"),
    Probe("stat", "print('ESCAPED', os.stat(SECRET).st_size)"),
    Probe("chdir", "os.chdir(FOLDER)\nprint('ESCAPED')"),
    Probe("inherited descriptor", "for fd in range(256):\n  try: print(os.pread(fd, 99, 0))\n  except OSError: pass"),
    Probe("memfd", "call(NR['memfd_create'], b'x', 0)\nprint('ESCAPED')"),
    # /proc
    Probe("proc environ", "print(open(f'/proc/{VICTIM}/environ').read())", "mostly"),
    Probe("proc root", "print(open('/proc/self/root' + SECRET).read())"),
    Probe("proc mem", "open('/proc/self/mem', 'r+b')\nprint('ESCAPED')"),
    Probe("proc cmdline", "open('/proc/1/cmdline').read()\nprint('ESCAPED')"),
    # network
    Probe("tcp", "import socket\ns = socket.socket()\ns.connect(('127.0.0.1', PORT))\ns.sendall(b'out')"),
    Probe("udp", "import socket\nsocket.socket(2, 2).sendto(b'out', ('127.0.0.1', PORT))"),
    Probe("unix socket", "import socket\ns = socket.socket(1, 1)\ns.connect(FOLDER + '/socket')\ns.sendall(b'out')"),
    Probe("listen", "import socket\ns = socket.socket()\ns.bind(('127.0.0.1', 0))\ns.listen()\nprint('ESCAPED')"),
    Probe("raw socket call", "call(NR['socket'], 2, 1, 0)\nprint('ESCAPED')"),
    # processes
    Probe("fork", "if os.fork() == 0:\n  open(FOLDER + '/new', 'w')\n  os._exit(0)\nprint('ESCAPED')\nos.wait()"),
    Probe("daemon", "if os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: os.mkdir(FOLDER + '/new')\n  os._exit(0)"),
    Probe("clone", "if call(NR['clone'], 17, 0, 0, 0, 0) == 0: os._exit(0)\nprint('ESCAPED')\nos.wait()"),
    Probe("clone3", "a = bytes(32) + struct.pack('Q', 17) + bytes(48)\nif call(NR['clone3'], a, 88) == 0: os._exit(0)\n"
          "print('ESCAPED')\nos.wait()", "mostly"),
    Probe("os.system", "os.system(TOUCH)"),
    Probe("popen", "print(os.popen('cat ' + SECRET).read())"),
    Probe("subprocess", "import subprocess\nsubprocess.run(['/bin/sh', '-c', TOUCH])"),
    Probe("posix_spawn", "os.waitpid(os.posix_spawn('/bin/sh', ['sh', '-c', TOUCH], {}), 0)"),
    Probe("exec", "os.execv('/bin/sh', ['sh', '-c', TOUCH])"),
    Probe("execveat", "v = (ctypes.c_char_p * 4)(b'sh', b'-c', TOUCH.encode())\n"
          "call(NR['execveat'], -100, b'/bin/sh', v, 0, 0)"),
    Probe("libc system", "ctypes.CDLL(None).system(TOUCH.encode())"),
    # threads
    Probe("thread", "import threading\nthreading.Thread(target=print, args=('ESCAPED',)).start()"),
    Probe("_thread", "import _thread, time\n_thread.start_new_thread(print, ('ESCAPED',))\ntime.sleep(0.2)"),
    # signals
    Probe("kill", "os.kill(VICTIM, 9)\nprint('ESCAPED')"),
    Probe("killpg", "os.killpg(VICTIM, 9)\nprint('ESCAPED')"),
    Probe("tgkill", "call(NR['tgkill'], VICTIM, VICTIM, 9)\nprint('ESCAPED')"),
    Probe("sigqueue", "call(NR['rt_sigqueueinfo'], VICTIM, 9, struct.pack('iii116x', 9, 0, -1))\nprint('ESCAPED')"),
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
    Probe("priority", "os.setpriority(os.PRIO_PROCESS, 0, 5)\nprint('ESCAPED')"),
    Probe("io_uring", "call(NR['io_uring_setup'], 4, bytes(120))\nprint('ESCAPED')", "mostly"),
    Probe("keyring", "call(NR['keyctl'], 0, -3, 1)\nprint('ESCAPED')", "mostly"),
    Probe("eventfd", "call(NR['eventfd2'], 0, 0)\nprint('ESCAPED')"),
    # what Python keeps within reach
    Probe("reload os", "import importlib\nimportlib.reload(os).system(TOUCH)"),
    Probe("posix", "import posix\nposix.system(TOUCH)"),
    Probe("subclasses", "c = [c for c in object.__subclasses__() if c.__name__ == '_wrap_close'][0]\n"
          "c.__init__.__globals__['system'](TOUCH)"),
    Probe("another libc", "ctypes.CDLL('libc.so.6').system(TOUCH.encode())"),
    Probe("a jail in the jail", "sys.path.insert(0, ROOT)\nfrom nanochat.tools.sandbox import run_checks\n"
          "if run_checks('def f(): return 1', 'assert f() == 1').ok: print('ESCAPED')"),
]  # fmt: skip


VICTIMS: list[tuple[subprocess.Popen[bytes], str]] = []  # a new one after a probe has killed the last


def victim() -> tuple[subprocess.Popen[bytes], str]:
    """A process that the jail's user may kill, and the value of its environment variable."""
    if not VICTIMS or VICTIMS[-1][0].poll() is not None:
        token = secrets.token_hex(8)
        user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        process = subprocess.Popen(["/bin/sleep", "600"], env={"TOKEN": token}, start_new_session=True, **user)
        VICTIMS.append((process, token))
    return VICTIMS[-1]


@pytest.fixture(scope="session", autouse=True)
def no_victim_is_left() -> Iterator[None]:
    yield
    for process, _ in VICTIMS:
        process.kill()
        process.wait()


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
        self.port = self.tcp.getsockname()[1]
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", self.port))
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix.bind(str(folder / "socket"))
        self.unix.listen()
        (folder / "socket").chmod(0o777)
        self.victim, self.victims_token = victim()
        self.before = self.look()

    def look(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() if path.is_file() else b"" for path in self.folder.iterdir()}

    def header(self) -> str:
        constants = {
            "SECRET": str(self.secret),
            "FOLDER": str(self.folder),
            "ROOT": str(ROOT),
            "TOUCH": f"> {self.folder}/new",
            "PORT": self.port,
            "VICTIM": self.victim.pid,
            "NR": {name: numbers[jail.MACHINES.index(MACHINE)] for name, numbers in NUMBERS.items()},
        }
        lines = "\n".join(f"{name} = {value!r}" for name, value in constants.items())
        return HEADER.replace("{constants}", lines)

    def evidence(self, output: str) -> list[str]:
        """Every sign that the probe got out."""
        signs = ["it printed ESCAPED"] if "ESCAPED" in output else []
        signs += ["it read the secret"] if self.token in output or self.victims_token in output else []
        signs += ["it changed the folder"] if self.look() != self.before else []
        signs += ["it killed its victim"] if self.victim.poll() is not None else []
        readable, _, _ = select.select([self.tcp, self.udp, self.unix], [], [], 0)
        signs += ["it sent a message"] if readable else []
        return signs

    def close(self) -> None:
        os.close(self.open_secret)
        for listener in (self.tcp, self.udp, self.unix):
            listener.close()


@pytest.fixture
def world() -> Iterator[World]:
    # not tmp_path: its parents are closed to other users
    import tempfile

    with tempfile.TemporaryDirectory(prefix="probe-", dir="/tmp") as folder:
        world = World(Path(folder))
        yield world
        world.close()


def processes() -> dict[int, tuple[int, str]]:
    """Every process: its parent, and its state."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):  # it left just now
            continue
        found[int(path.parent.name)] = (int(parent), state)
    return found


def descendants(ancestor: int) -> set[int]:
    everybody = processes()
    found = {ancestor}
    while more := {pid for pid, (parent, _) in everybody.items() if parent in found} - found:
        found |= more
    return found - {ancestor}


@pytest.fixture(scope="session")
def adopts_orphans() -> Iterator[None]:
    """A process whose parent ended becomes our child, so that the test sees it."""
    import ctypes

    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    yield
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)


def test_there_are_more_than_forty_probes():
    assert len(PROBES) == len({probe.name for probe in PROBES}) > 40


@pytest.mark.slow
@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_a_probe_escapes_where_there_is_no_jail(probe: Probe, world: World):
    if probe.outside == "not tried" or (probe.outside == "root" and os.geteuid() != 0):
        pytest.skip("not tried without the jail")
    ran = subprocess.run(
        [sys.executable, "-I", "-S", "-c", world.header() + probe.code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        close_fds=False,
        timeout=60,
    )
    deadline = time.monotonic() + (5 if ran.returncode == 0 else 0.1)  # what was started or killed may take a moment
    while not world.evidence(ran.stdout) and time.monotonic() < deadline:
        time.sleep(0.01)
    if probe.outside == "mostly" and not world.evidence(ran.stdout) and "Error" in ran.stdout:
        pytest.skip("this machine refuses it anyway")
    assert world.evidence(ran.stdout), ran.stdout


def test_no_probe_leaves_the_jail(world: World, sandboxed: Callable[..., Run], adopts_orphans: None):
    """All probes in one program, each in a function of its own."""
    code = world.header()
    for probe in PROBES:
        code += f"print('begun', {probe.name!r}, flush=True)\ntry:\n    def probe():\n"
        code += textwrap.indent(probe.code, "        ")
        code += "\n    probe()\nexcept BaseException as error: print(error)\n"
    before = descendants(os.getpid())
    run = sandboxed(code, "f()", timeout_seconds=30)
    begun = re.findall(r"^begun (.+)$", run.output, re.MULTILINE)
    assert begun == [probe.name for probe in PROBES], run
    assert not world.evidence(run.output), run
    assert not run.ok
    assert descendants(os.getpid()) - before == set()


@pytest.mark.skipif(MACHINE != "x86_64", reason="x86-64 has second numbers for its calls")
def test_calls_by_other_numbers_kill(sandboxed: Callable[..., Run]):
    code = "import ctypes\nctypes.CDLL(None).syscall(0x40000000 + 39)\nprint('ESCAPED')"  # getpid of the x32 ABI
    run = sandboxed(code, CHECKS)
    assert (run.ok, run.output) == (False, "") and "left" in run.error


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


@pytest.mark.parametrize(
    ("machine", "headers"),
    [
        ("x86_64", ["/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"]),
        ("aarch64", ["/usr/include/asm-generic/unistd.h"]),
    ],
)
def test_the_numbers_are_the_kernels(machine: str, headers: list[str]):
    texts = [Path(header).read_text() for header in headers if Path(header).is_file()]
    if not texts or (machine == "x86_64" and MACHINE != "x86_64"):
        pytest.skip("no kernel headers here")
    known = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", texts[0])}
    column = jail.MACHINES.index(machine)
    calls = jail.SYSTEM_CALLS | {"mmap": jail.MMAP, "read": jail.READ, "write": jail.WRITE}
    assert {name: known.get(name, -1) for name in calls} == {name: numbers[column] for name, numbers in calls.items()}


# ---------------------------------------------------------------------- output and limits


def test_output(sandboxed: Callable[..., Run]):
    run = sandboxed("import sys\nprint('é', 1 + 1)\nprint('err', file=sys.stderr)\n" + SQUARE, CHECKS)
    assert (run.ok, run.error) == (True, "")
    assert run.output == "é 2\nerr\n"
    run = sandboxed("import os\nprint('\\ud800', end='')\n" + SQUARE, CHECKS)
    assert run.ok and run.output == "\\ud800"
    assert sandboxed("import os\nos.write(2, b'a\\xffb')", "f()").output == "a?b"


def test_output_is_cut(sandboxed: Callable[..., Run]):
    run = sandboxed("for _ in range(20): print('é' * 10**5)\n" + SQUARE, CHECKS)
    assert run.ok
    assert len(run.output.encode()) == sandbox.OUTPUT_BYTES == 65536
    assert run.output == "é" * 32768
    run = sandboxed("while True: print('x' * 1000)", "f()", timeout_seconds=0.3)
    assert run.error.startswith("timed out after") and len(run.output.encode()) <= 65536


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("def f(x):\n    return 1 / 0\nf(0)", "ZeroDivisionError: division by zero (line 2)"),
        ("def f(:", "SyntaxError"),
        ("class Odd(Exception):\n    def __str__(self): raise self\nraise Odd", "Odd (line 3)"),
        ("input()", "EOFError"),
        ("import numpy", "ModuleNotFoundError"),
        ("\x00", "Error"),
        ("'\ud800'", "Error"),
    ],
)
def test_a_program_that_fails_at_its_start(program: str, error: str):
    run = run_checks(program, CHECKS)
    assert not run.ok and error in run.error and "\n" not in run.error


def test_what_can_be_imported(sandboxed: Callable[..., Run]):
    code = """
from typing import List, Optional
from dataclasses import dataclass
import hashlib, random, datetime, time, decimal, statistics, collections
@dataclass
class Point:
    x: int = 1
print(Point(), hashlib.md5(b"a").hexdigest(), datetime.datetime.strptime("2024-02-03", "%Y-%m-%d").day)
print(statistics.mean([1, 2]), collections.Counter("aab").most_common(1), decimal.Decimal("0.1") + 1)
assert time.time() > 1e9 and random.Random().random() < 1 and len(random.sample(range(9), 3)) == 3
time.sleep(0.01)
"""
    run = sandboxed(f"import {', '.join(jail.MODULES)}\n{code}{SQUARE}", CHECKS)
    assert run.ok, run
    assert run.output == "Point(x=1) 0cc175b9c0f1b6a831c399e269772661 3\n1.5 [('a', 2)] 1.1\n"


def test_each_run_is_fresh(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CANARY", "canary")
    code = "import os, random, sys\nprint(random.random(), os.environ, sys.argv, sys.path, sys.stdin.read())"
    outputs = {run_checks(code, "f()").output for _ in range(2)}
    assert len(outputs) == 2
    assert all(output.endswith(" environ({}) [''] [] \n") for output in outputs)


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "9**9**9",  # one long step of the interpreter
        "import time\ntime.sleep(100)",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    ],
)
def test_time_is_limited(code: str):
    run = run_checks("print('begun')\n" + code, "f(1)", timeout_seconds=0.6)
    assert (run.ok, run.output, run.error) == (False, "begun\n", "timed out after 0.6 s")


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
        "import _thread\nwhile True: _thread.start_new_thread(print, ())",
        "import sys\nsys.setrecursionlimit(10**9)\nf = lambda n: f(n + 1)\nf(0)",
        "import sys\nsys.setrecursionlimit(10**9)\nx = []\nfor _ in range(10**6): x = [x]\nprint(x)",
        "eval('(' * 10**6)",
    ],
)
def test_bombs_do_not_go_off(code: str, adopts_orphans: None):
    before = descendants(os.getpid())
    run = run_checks(code, CHECKS, timeout_seconds=1, memory_bytes=128 * 1024**2)
    assert not run.ok and run.error and "\n" not in run.error
    assert descendants(os.getpid()) - before == set()


# ---------------------------------------------------------------------- programs and their checks


def test_right_programs_pass(sandboxed: Callable[..., Run]):
    run = sandboxed(SQUARE, CHECKS)
    assert (run.ok, run.error, run.output) == (True, "", "")
    assert run_checks("f = lambda x, *, n=2: x ** n", "assert f(3) == 9 and f(2, n=3) == 8").ok
    assert run_checks(SQUARE + "\nif __name__ == '__main__': print(input())", CHECKS).ok
    assert run_checks(SQUARE, "\nassert f(2) == 5, 'not five'").error == "AssertionError: not five (line 2)"


VALUES = (
    *("None", "True", "0", "-7", "10**5000", "-(2**2000)", "1.5", "-0.0", "float('inf')", "1e-300"),
    *("''", "'é\\n\"\\ud800'", "b'\\x00\\xff'"),
    *("[]", "[1, [2, (3, {4: {5, 6}})]]", "()", "(1,)", "{}", "{'a': [1], (1, 2): None, 3: {}}"),
    *("set()", "{1, 'a'}", "frozenset({1})", "[{'tuple': [1]}]", "{'dict': 1}"),
)


def test_values_travel_unchanged():
    checks = "def check(value):\n    assert same(value) == value and type(same(value)) is type(value), value\n"
    checks += "    assert repr(same(value)) == repr(value) or isinstance(value, set), value\n"
    checks += "\n".join(f"check({value})" for value in VALUES)
    assert run_checks("def same(x): return x", checks).error == ""


def test_what_travels_otherwise():
    program = """
import collections
class Mine(ValueError): pass
def fails(): raise Mine("no good")
def counts(): return collections.Counter("aab")
def gives_class(): return Mine
def takes(x): return type(x).__name__
def changes(x):
    x.append(1)
    return x
Point = collections.namedtuple("Point", "x y")
"""
    checks = """
def raised(function, kind):
    try:
        function()
    except kind as error:
        return str(error)
    assert False
assert raised(fails, RuntimeError) == "Mine: no good"
assert counts() == {"a": 2, "b": 1}
assert "type" in raised(gives_class, RuntimeError)
assert "function" in raised(lambda: takes(raised), TypeError)
assert "NameError" in raised(missing, RuntimeError) or "KeyError" in raised(missing, RuntimeError)
assert takes(True) == "bool" and takes((1,)) == "tuple"
mine = [0]
assert changes(mine) == [0, 1] and mine == [0]
assert Point(1, y=2) == (1, 2)
"""
    assert run_checks(program, checks).error == ""


SAY = "import os\ndef say(data):\n  for fd in range(256):\n    try: os.write(fd, data)\n    except OSError: pass\n"

WRONG = {
    "wrong": "def f(x): return x + x",
    "no such function": "def g(x): return x * x",
    "syntax error": "def f(x) return x * x",
    "raises": "def f(x): return x * y",
    "raises at its start": SQUARE + "\nraise ValueError",
    "exit at its end": SQUARE + "\nexit(0)",
    "os._exit at its end": SQUARE + "\nimport os\nos._exit(0)",
    "exit in the call": "def f(x): exit(0)",
    "sys.exit in the call": "import sys\ndef f(x): sys.exit(0)",
    "SystemExit in the call": "def f(x): raise SystemExit",
    "os._exit in the call": "import os\ndef f(x): os._exit(0)",
    "crash in the call": "import ctypes\ndef f(x): ctypes.string_at(0)",
    "equal to everything": "class A:\n  __eq__ = lambda s, o: True\n  __bool__ = __eq__\ndef f(x): return A()",
    "an int that equals everything": "class A(int):\n  __eq__ = lambda s, o: True\ndef f(x): return A(1)",
    "a str that equals everything": "class A(str):\n  __eq__ = lambda s, o: True\ndef f(x): return A()",
    "a list that equals everything": "class A(list):\n  __eq__ = lambda s, o: True\ndef f(x): return A()",
    "no AssertionError": "import builtins\nbuiltins.AssertionError = builtins.Exception = OSError\ndef f(x): return 0",
    "prints a pass": "import os\nprint('ok', 'Jok', 'PASS')\nos.write(1, b'ok')\nos._exit(0)",
    "writes a pass everywhere": SAY + "say(b'Jok')\nsay(b'ok')\nos._exit(0)",
    "answers beforehand": SAY + "say(b'{\"value\": 4}\\n' * 9)\n1/0",
    "answers nonsense": SAY + "def f(x): say(b'[1]\\n')",
    "answers no JSON": SAY + "def f(x): say(b'\\xff\\n')",
    "answers a strange value": SAY + "def f(x): say(b'{\"value\": {\"int\": [], \"x\": 1}}\\n')",
    "answers a deep value": SAY + "def f(x): say(b'{\"value\": ' + b'[' * 10**5 + b'\\n')",
    "a list in itself": "x = []\nx.append(x)\ndef f(y): return x",
    "a huge answer": "def f(x): return 'x' * 10**8",
    "an endless answer": "import itertools\ndef f(x): return itertools.count()",
    "an endless loop": "def f(x):\n  while True: pass",
    "an endless loop at its start": SQUARE + "\nwhile True: pass",
    "its own check": SQUARE.replace("x * x", "0") + "\ndef check(f): pass\nCHECKS = ''",
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_programs_do_not_pass(name: str):
    seconds = 0.3 if "endless" in name else 20  # on a busy machine the others must not run out of time
    run = run_checks(WRONG[name], CHECKS, timeout_seconds=seconds, memory_bytes=128 * 1024**2)
    assert not run.ok and run.error and "\n" not in run.error
    is_over_time = run.error.startswith("timed out after")
    assert is_over_time == name.startswith("an endless loop") or name in ("an endless answer", "a huge answer")


@pytest.mark.parametrize("leaving", ["exit(0)", "raise SystemExit(0)", "import os; os._exit(0)"])
def test_leaving_fails_even_where_the_checks_catch_everything(leaving: str):
    checks = "try:\n    f(1)\n    assert False\nexcept:\n    pass\n"
    assert not run_checks(f"def f(x): {leaving}", checks).ok
    assert run_checks("def f(x): raise ValueError", checks).ok


@pytest.mark.parametrize(
    ("program", "checks"),
    [
        # the end of an iteration must not end the checks' loops
        ("def f(x): raise StopIteration", "assert all(map(lambda x: f(x) == x, [1, 2]))"),
        ("def f(x): raise GeneratorExit", "assert all(f(x) == x for x in [1, 2])"),
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
        (SQUARE, "assert f(2) == 4\n1 +"),
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


@pytest.mark.parametrize("role", ["program", "checks"])
def test_a_jail_killed_at_its_start_costs_one_run(monkeypatch: pytest.MonkeyPatch, role: str):
    """As the kernel kills it when memory is short; a machine that cannot isolate is another matter."""
    start = sandbox._Jail.__init__

    def start_and_die(self, its_role, *arguments):
        start(self, its_role, *arguments)
        if its_role == role:
            self.process.kill()
            self.process.wait()

    before = sandbox._Jail.receive
    with monkeypatch.context() as patch:
        patch.setattr(sandbox._Jail, "__init__", start_and_die)
        # What it may have reported before the kill is lost with it.
        patch.setattr(
            sandbox._Jail, "receive", lambda self, seconds: b"" if self.process.poll() else before(self, seconds)
        )
        run = run_checks(SQUARE, CHECKS)
    assert not run.ok and "killed at its start" in run.error
    assert run_checks(SQUARE, CHECKS).ok


@pytest.mark.slow
def test_the_kernel_takes_a_jail_before_its_parent():
    code = "import time\ntime.sleep(30)"
    with ThreadPoolExecutor(1) as pool:
        mine = Path("/proc/self/oom_score_adj").read_text()
        running = pool.submit(run_checks, code, CHECKS, timeout_seconds=3)
        seen: set[str] = set()
        while not running.done():
            for pid in descendants(os.getpid()):
                with contextlib.suppress(OSError):
                    seen.add(Path(f"/proc/{pid}/oom_score_adj").read_text().strip())
            time.sleep(0.02)
    assert "1000" in seen and Path("/proc/self/oom_score_adj").read_text() == mine


START = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom nanochat.tools.sandbox import run_checks\n"


def test_no_jail_outlives_its_parent():
    code = START + "run_checks('while True: pass', 'f(1)', timeout_seconds=60)"
    parent = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 30
    while len(descendants(parent.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.5)
    family = descendants(parent.pid)
    assert len(family) == 2  # the program and the checks
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    while time.monotonic() < deadline:
        if not {pid for pid, (_, state) in processes().items() if pid in family and state != "Z"}:
            return
        time.sleep(0.02)
    pytest.fail("a jail outlived its parent")


# ---------------------------------------------------------------------- where it cannot isolate


@pytest.mark.parametrize(
    ("module", "name", "value", "problem"),
    [
        (sys, "platform", "darwin", "darwin"),
        (os, "uname", lambda: SimpleNamespace(machine="riscv64"), "riscv64"),
        (sys, "maxsize", 2**31 - 1, "64-bit"),
        (sys, "executable", "", "sys.executable"),
    ],
)
def test_refuses_another_system_or_machine(monkeypatch: pytest.MonkeyPatch, module, name, value, problem):
    with monkeypatch.context() as patch:
        patch.setattr(module, name, value)
        assert problem in complaint(lambda: run_checks(SQUARE, CHECKS))


def test_refuses_where_no_jail_starts(monkeypatch: pytest.MonkeyPatch):
    for python in ("/bin/false", "/no/such/python"):
        monkeypatch.setattr(sys, "executable", python)
        assert "did not start" in complaint(lambda: run_checks(SQUARE, CHECKS))


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


def test_bad_limits_are_refused():
    for seconds in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="timeout_seconds"):
            run_checks("1", "1", timeout_seconds=seconds)
