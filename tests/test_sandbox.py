"""The jail: what it lets code do, and that nothing gets out of it.

Every probe is a piece of code that leaves evidence when it gets out: a secret in what it prints, a changed folder, a
caught message, a dead victim, or the word ESCAPED behind a call that must not succeed. Where that is harmless the same
code also runs without the jail, and must leave evidence there: a probe that cannot escape anyway proves nothing.
"""

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
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanochat.shell.cli import UserError
from nanochat.tools import sandbox
from nanochat.tools.sandbox import Run, passes, run_checks, run_python

ROOT = Path(__file__).resolve().parent.parent
MACHINE = os.uname().machine
NOBODY = 65534

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or MACHINE not in sandbox.MACHINES, reason="the jail refuses to run here"
)


# ---- Who runs the jail: root and an ordinary user -----------------------------------------------------------

RUNNER = """
import json, sys
sys.path.insert(0, sys.argv[1])
from nanochat.tools import sandbox
print("ready", flush=True)
for line in sys.stdin:
    name, arguments, options = json.loads(line)
    print(json.dumps(vars(getattr(sandbox, name)(*arguments, **options))), flush=True)
"""


@pytest.fixture(scope="session")
def ordinary_user() -> Iterator[Callable[..., Run]]:
    """Calls a function of the sandbox from a process of an ordinary user."""
    if os.geteuid() != 0:
        yield lambda name, *arguments, **options: getattr(sandbox, name)(*arguments, **options)
        return
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):  # ours may lie in root's home
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

    def call(name: str, *arguments, **options) -> Run:
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps([name, arguments, options]) + "\n")
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
    return lambda name, *arguments, **options: getattr(sandbox, name)(*arguments, **options)


# ---- The probes ----------------------------------------------------------------------------------------------

# name: (number on x86-64, number on aarch64)
NUMBERS = {
    "openat": (257, 56),
    "openat2": (437, 437),
    "socket": (41, 198),
    "clone": (56, 220),
    "clone3": (435, 435),
    "execveat": (322, 281),
    "memfd_create": (319, 279),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "unshare": (272, 97),
    "shmget": (29, 194),
    "io_uring_setup": (425, 425),
    "eventfd2": (290, 19),
    "keyctl": (250, 219),
}

# What every probe starts with. `call` is a system call by number, past everything that Python might check.
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
print("started", flush=True)
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
    Probe("a jail in the jail", "sys.path.insert(0, ROOT)\nfrom nanochat.tools.sandbox import run_python\n"
          "if run_python('print(1)').ok: print('ESCAPED')"),
]  # fmt: skip


VICTIMS: list[tuple[subprocess.Popen[bytes], str]] = []  # one at a time: the next where a probe killed the last


def victim() -> tuple[subprocess.Popen[bytes], str]:
    """A process that a jail's user may kill, and what its environment holds."""
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
    """What a probe could touch, all of it open to every user, and what became of it."""

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

    def code(self, probe: Probe) -> str:
        constants = {
            "SECRET": str(self.secret),
            "FOLDER": str(self.folder),
            "ROOT": str(ROOT),
            "TOUCH": f"> {self.folder}/new",
            "PORT": self.port,
            "VICTIM": self.victim.pid,
            "NR": {name: numbers[sandbox.MACHINES.index(MACHINE)] for name, numbers in NUMBERS.items()},
        }
        lines = "\n".join(f"{name} = {value!r}" for name, value in constants.items())
        return HEADER.replace("{constants}", lines) + probe.code + "\n"

    def evidence(self, output: str) -> list[str]:
        """Every sign that the probe got out."""
        signs = ["it says so"] if "ESCAPED" in output else []
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
    """Every process here: its parent, and its state."""
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
    """Whoever loses its parent below us becomes our child, and is seen."""
    import ctypes

    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    yield
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)


def test_there_are_more_than_forty_probes():
    assert len(PROBES) == len({probe.name for probe in PROBES}) > 40


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_a_probe_escapes_where_there_is_no_jail(probe: Probe, world: World):
    if probe.outside == "not tried" or (probe.outside == "root" and os.geteuid() != 0):
        pytest.skip("not tried without the jail")
    ran = subprocess.run(
        [sys.executable, "-I", "-S", "-c", world.code(probe)],
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


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_a_probe_stays_in_the_jail(probe: Probe, world: World, sandboxed: Callable[..., Run], adopts_orphans: None):
    sandboxed("run_python", "")  # the zygote that will serve is there
    before = descendants(os.getpid())
    run = sandboxed("run_python", world.code(probe), timeout_seconds=10)
    assert run.output.startswith("started\n"), run
    assert not world.evidence(run.output), run
    assert descendants(os.getpid()) - before == set()


@pytest.mark.skipif(MACHINE != "x86_64", reason="x86-64 has second numbers for its calls")
def test_calls_by_other_numbers_kill(sandboxed: Callable[..., Run]):
    code = "import ctypes\nctypes.CDLL(None).syscall(0x40000000 + 39)\nprint('ESCAPED')"  # getpid of the x32 ABI
    run = sandboxed("run_python", code)
    assert (run.ok, run.output, run.error) == (False, "", "killed by SIGSYS")


# ---- The filter, read by hand ---------------------------------------------------------------------------------


def verdict(program: bytes, number: int, arch: int, arguments: tuple[int, ...] = ()) -> str:
    """What the kernel would say: a reader of the few classic BPF instructions the filter uses."""
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


@pytest.mark.parametrize("machine", sandbox.MACHINES)
def test_the_filter_allows_its_list_and_nothing_else(machine: str):
    column = sandbox.MACHINES.index(machine)
    program = sandbox.filter_program(machine, readable={7}, writable={1, 2, 5})
    listed = {numbers[column] for numbers in sandbox.SYSTEM_CALLS.values()} - {-1}
    mmap, read, write = sandbox.MMAP[column], sandbox.READ[column], sandbox.WRITE[column]
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
    column = sandbox.MACHINES.index(machine)
    calls = sandbox.SYSTEM_CALLS | {"mmap": sandbox.MMAP, "read": sandbox.READ, "write": sandbox.WRITE}
    assert {name: known.get(name, -1) for name in calls} == {name: numbers[column] for name, numbers in calls.items()}


# ---- What comes out -------------------------------------------------------------------------------------------


def test_output_and_result(sandboxed: Callable[..., Run]):
    code = "import sys\nprint('out')\nprint('err', file=sys.stderr)\nif __name__ == '__main__':\n    print('é', 1 + 1)"
    run = sandboxed("run_python", code)
    assert (run.ok, run.output, run.error, run.timed_out) == (True, "out\nerr\né 2\n", "", False)
    assert 0 < run.seconds < 5


def test_an_error_is_told():
    run = run_python("print('before')\ndef f():\n    return 1 / 0\nf()\nprint('after')")
    assert (run.ok, run.error) == (False, "ZeroDivisionError: division by zero (line 3)")
    assert run.output.startswith("before\nTraceback") and 'File "<code>", line 3, in f' in run.output
    assert "sandbox.py" not in run.output
    run = run_python("def f(:")
    assert not run.ok and run.error.startswith("SyntaxError") and "\n" not in run.error
    run = run_python("class Odd(Exception):\n    def __str__(self): raise self\nraise Odd")
    assert (run.ok, run.error) == (False, "Odd (line 3)")
    assert not run_python("'\ud800'").ok and not run_python("\x00").ok


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("exit(0)", "SystemExit: 0 (line 1)"),
        ("quit()", "SystemExit (line 1)"),
        ("import sys\nsys.exit(0)", "SystemExit: 0 (line 2)"),
        ("raise SystemExit", "SystemExit (line 1)"),
        ("import os\nos._exit(0)", "left early with exit code 0"),
        ("import os\nprint('ok', 'Jok')\nos._exit(0)", "left early with exit code 0"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt (line 1)"),
        ("import ctypes\nctypes.string_at(0)", "killed by SIGSEGV"),
        ("import os\nos.abort()", "killed by SIGSEGV"),  # it may send itself no signal
        ("input()", "EOFError: EOF when reading a line (line 1)"),
        ("import numpy", "ModuleNotFoundError: No module named 'numpy' (line 1)"),
    ],
)
def test_leaving_early_is_not_ok(code: str, error: str, sandboxed: Callable[..., Run]):
    run = sandboxed("run_python", code + "\nprint('end')")
    assert (run.ok, run.error) == (False, error)
    assert "end" not in run.output


def test_what_is_left_at_the_end_does_not_run():
    code = "import atexit\natexit.register(print, 'late')\nclass A:\n    def __del__(self): print('late')\na = A()"
    assert run_python(code).output == ""


def test_output_is_cut(sandboxed: Callable[..., Run]):
    run = sandboxed("run_python", "for _ in range(20): print('é' * 10**5)")
    assert run.ok
    assert len(run.output.encode()) <= sandbox.OUTPUT_BYTES == 65536 and run.output.endswith(sandbox.CUT)
    assert run.output.startswith("é" * 32000)
    run = sandboxed("run_python", "print('x' * 65535)")
    assert run.output == "x" * 65535 + "\n"
    run = sandboxed("run_python", "import os\nfor _ in range(30): os.write(1, b'\\xff' * 10**5)")
    assert run.ok and len(run.output.encode()) <= 65536
    run = sandboxed("run_python", "import os\nos.write(2, b'a\\xffb')")
    assert run.output == "a?b"
    run = sandboxed("run_python", "while True: print('x' * 1000)", timeout_seconds=0.3)
    assert run.timed_out and len(run.output.encode()) <= 65536


def test_everything_listed_can_be_imported(sandboxed: Callable[..., Run]):
    run = sandboxed("run_python", "import " + ", ".join(sandbox.MODULES))
    assert run.ok, run.error
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
    run = sandboxed("run_python", code)
    assert run.ok, run
    assert run.output == "Point(x=1) 0cc175b9c0f1b6a831c399e269772661 3\n1.5 [('a', 2)] 1.1\n"


def test_each_run_is_fresh(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CANARY", "canary")
    outputs = {run_python("import random\nprint(random.random())").output for _ in range(3)}
    assert len(outputs) == 3
    assert run_python("import builtins, math\nbuiltins.canary = math.pi = 3").ok
    code = "import builtins, math, os, sys\nprint(hasattr(builtins, 'canary'), math.pi, os.environ, sys.argv, sys.path)"
    assert run_python(code).output == "False 3.141592653589793 environ({}) [''] []\n"


# ---- Limits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "9**9**9",  # one long step of the interpreter
        "import time\ntime.sleep(100)",
        "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    ],
)
def test_time_is_limited(code: str):
    run = run_python("print('begun')\n" + code, timeout_seconds=0.2)
    assert (run.ok, run.output, run.error, run.timed_out) == (False, "begun\n", "timed out after 0.2 s", True)
    assert 0.2 <= run.seconds < 5


def test_memory_is_limited(sandboxed: Callable[..., Run]):
    megabytes = 1024**2
    for code in ("x = bytearray(100 * 1024**2)", "x = []\nwhile True: x.append('x' * 10**6 + str(len(x)))"):
        run = sandboxed("run_python", code, memory_bytes=64 * megabytes)
        assert not run.ok and run.error.startswith("MemoryError"), run
    assert sandboxed("run_python", "x = bytearray(40 * 1024**2)", memory_bytes=64 * megabytes).ok


@pytest.mark.parametrize(
    "code",
    [
        "import os\nwhile True: os.fork()",
        "import _thread\nwhile True: _thread.start_new_thread(print, ())",
        "def f(n): return f(n + 1)\nf(0)",
        "import sys\nsys.setrecursionlimit(10**9)\nf = lambda n: f(n + 1)\nf(0)",
        "import sys\nsys.setrecursionlimit(10**9)\nx = []\nfor _ in range(10**6): x = [x]\nprint(x)",
        "eval('(' * 10**6)",
        "x = 0\nfor _ in range(10**6): x = [x]\ndel x\nraise ValueError",
    ],
)
def test_bombs_do_not_go_off(code: str, adopts_orphans: None):
    run_python("")
    before = descendants(os.getpid())
    run = run_python(code, timeout_seconds=1, memory_bytes=128 * 1024**2)
    assert not run.ok and run.error and "\n" not in run.error
    assert descendants(os.getpid()) - before == set()


def test_a_long_program_is_no_problem():
    assert run_python("x = 1\n" * 50_000 + "print(x)", timeout_seconds=60).output == "1\n"


# ---- Programs and their checks -----------------------------------------------------------------------------------

SQUARE = "def f(x): return x * x"
CHECKS = "assert f(2) == 4\nassert f(3) == 9"


def test_right_programs_pass(sandboxed: Callable[..., Run]):
    run = sandboxed("run_checks", SQUARE, CHECKS)
    assert (run.ok, run.error, run.output) == (True, "", "")
    assert passes(SQUARE, CHECKS) and passes("f = lambda x, *, n=2: x ** n", "assert f(3) == 9 and f(2, n=3) == 8")


def test_a_task_in_the_style_of_humaneval():
    program = '''
from typing import List
import math

def poly(xs: List[float], x: float):
    """Evaluates a polynomial."""
    return sum(coefficient * math.pow(x, i) for i, coefficient in enumerate(xs))

def find_zero(xs: List[float]) -> float:
    low, high = -1000.0, 1000.0
    while high - low > 1e-10:
        middle = (low + high) / 2
        low, high = (low, middle) if poly(xs, middle) * poly(xs, high) > 0 else (middle, high)
    return low

if __name__ == "__main__":
    print(input())
'''
    checks = """
METADATA = {}
def check(candidate):
    import math, random, copy
    rng = random.Random(42)
    for _ in range(50):
        xs = [float(rng.randint(1, 9)), float(rng.randint(1, 9))]
        assert math.fabs(poly(xs, candidate(copy.deepcopy(xs)))) < 1e-4, "not a zero"
check(find_zero)
"""
    run = run_checks(program, checks)
    assert run.ok and run.output == ""
    wrong = program.replace("return low", "return low + 1")
    run = run_checks(wrong, checks)
    assert not run.ok and run.error == "AssertionError: not a zero (line 8)"


VALUES = [
    *(
        "None",
        "True",
        "0",
        "-7",
        "10**400",
        "-(2**2000)",
        "1.5",
        "-0.0",
        "float('inf')",
        "1e-300",
        "''",
        "'é\\n\"\\ud800'",
    ),
    *("b'\\x00\\xff'", "[]", "[1, [2, (3, {4: {5, 6}})]]", "()", "(1,)", "{}", "{'a': [1], (1, 2): None, 3: {}}"),
    *("set()", "{1, 'a'}", "frozenset({1})", "range(2, 9, 3)", "[{'tuple': [1]}]", "{'dict': 1}"),
]


@pytest.mark.parametrize("value", VALUES)
def test_values_travel_unchanged(value: str):
    checks = f"value = {value}\nassert same(value) == value == CONSTANT and type(same(value)) is type(value)\n"
    checks += "assert repr(same(value)) == repr(value) or isinstance(value, set)"
    assert run_checks(f"def same(x): return x\nCONSTANT = {value}", checks).error == ""


def test_what_travels_otherwise():
    program = """
import collections, math
class Mine(ValueError): pass
def fails(): raise Mine("no good")
def decodes(): return b"\\xff".decode()
def yields():
    yield 1
    yield 2
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
assert raised(fails, ValueError) == "no good"
assert raised(decodes, RuntimeError)
assert list(yields()) == [1, 2] and next(yields()) == 1
assert counts() == {"a": 2, "b": 1}
assert "Mine" in raised(gives_class, TypeError) or "type" in raised(gives_class, TypeError)
assert "function" in raised(lambda: takes(raised), TypeError)
assert takes(True) == "bool" and takes((1,)) == "tuple"
mine = [0]
assert changes(mine) == [0, 1] and mine == [0]
assert Point(1, y=2) == (1, 2)
assert math.sqrt(4) == 2
assert "missing" not in globals()
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
    "answers beforehand": SAY + "say(b'{\"names\": {\"f\": {\"callable\": 1}}}\\n' + b'{\"value\": 4}\\n' * 9)\n1/0",
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
    run = run_checks(WRONG[name], CHECKS, timeout_seconds=0.3, memory_bytes=128 * 1024**2)
    assert not run.ok and run.error and "\n" not in run.error
    assert run.timed_out == name.startswith("an endless loop") or name == "an endless answer"


@pytest.mark.parametrize("leaving", ["exit(0)", "raise SystemExit(0)", "import os; os._exit(0)"])
def test_leaving_fails_even_where_the_checks_catch_everything(leaving: str):
    checks = "try:\n    f(1)\n    assert False\nexcept:\n    pass\nassert g(1) == 1"
    assert not passes(f"def f(x): {leaving}\ndef g(x): return x", checks)
    assert passes("def f(x): raise ValueError\ndef g(x): return x", checks)


@pytest.mark.parametrize(
    ("program", "checks"),
    [
        # the end of an iteration must not end the checks' loops
        ("def f(x): raise StopIteration", "assert all(map(lambda x: f(x) == x, [1, 2]))"),
        ("def f(x): raise GeneratorExit", "assert all(f(x) == x for x in [1, 2])"),
        # what Python has is Python's
        ("def f(x): return -5\ndef abs(x): return 0", "assert abs(f(5) - 5) < 1e-6"),
        (
            "def f(x): return 1\ndef all(x): return True\ndef len(x): return 3",
            "assert all([f(2) == 2]) and len([1]) == 3",
        ),
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
found = search()
"""
    checks = f"# {canary}\nmark = '{canary}'\nassert found is False and search() is False and reads()"
    for _ in range(2):
        assert run_checks(program, checks).error == ""
    # the search works: it finds what is there
    planted = f"here = ['{canary}!']\n" + program
    assert run_checks(planted, "assert found is True").ok


# ---- Many at once, and the end of everything ----------------------------------------------------------------------


def test_threads():
    def one(index: int) -> bool:
        if index % 4 == 0:
            return passes(f"def f(x): return x + {index}", f"assert f(1) == {index + 1}")
        if index % 4 == 1:
            return not passes(f"def f(x): return x + {index}", f"assert f(1) == {index}")
        if index % 4 == 2:
            return run_python("while True: pass", timeout_seconds=0.2).timed_out
        return run_python(f"print({index} * 2)").output == f"{index * 2}\n"

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(one, range(36)))
    assert len(sandbox._Zygote.waiting) == len(sandbox._Zygote.living) <= 7


def test_nothing_is_left_behind(adopts_orphans: None):
    """No process, no descriptor, no thread."""
    run_checks(SQUARE, CHECKS)

    def state():
        return descendants(os.getpid()), len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    before = state()
    for code in ("print(1)", "while True: pass", "import os\nos._exit(3)", "1/0"):
        run_python(code, timeout_seconds=0.2)
    run_checks(SQUARE, CHECKS)
    run_checks("while True: pass", CHECKS, timeout_seconds=0.2)
    assert state() == before


def test_a_zygote_that_was_killed_is_replaced():
    run_python("")
    for zygote in sandbox._Zygote.waiting:
        zygote.process.kill()
        zygote.process.wait()
    assert run_python("print(1)").output == "1\n"


START = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom nanochat.tools.sandbox import run_python\n"


@pytest.mark.parametrize("code", ["while True: pass", "import time\ntime.sleep(60)"])
def test_no_jail_outlives_its_parent(code: str):
    parent = subprocess.Popen([sys.executable, "-c", START + f"run_python({code!r}, timeout_seconds=60)"])
    deadline = time.monotonic() + 30
    while len(family := descendants(parent.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    family = descendants(parent.pid)
    assert len(family) == 2  # a zygote and a jail
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    while time.monotonic() < deadline:
        alive = {pid for pid, (_, state) in processes().items() if pid in family and state != "Z"}
        if not alive:
            return
        time.sleep(0.02)
    pytest.fail("a jail outlived its parent")


def test_a_forked_child_has_its_own_zygote():
    code = START + (
        "import os\nassert run_python('print(1)').output == '1\\n'\n"
        "child = os.fork()\n"
        "for _ in range(5): assert run_python(f'print({os.getpid()})').output == f'{os.getpid()}\\n'\n"
        "if child: assert os.waitpid(child, 0)[1] == 0\n"
    )
    ran = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


# ---- Where it cannot isolate ---------------------------------------------------------------------------------------


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_refuses_another_system_or_machine(monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        assert "seccomp, and this is darwin" in refused(lambda: run_python("1"))
        assert "seccomp, and this is darwin" in refused(lambda: passes(SQUARE, CHECKS))
    with monkeypatch.context() as patch:
        patch.setattr(os, "uname", lambda: SimpleNamespace(machine="riscv64"))
        assert "x86_64 or aarch64, and this is riscv64" in refused(lambda: run_python("1"))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "maxsize", 2**31 - 1)
        assert "64-bit" in refused(lambda: run_python("1"))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "")
        assert "sys.executable" in refused(lambda: run_python("1"))


def test_refuses_where_no_jail_starts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sandbox._Zygote, "waiting", [])
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert "exit code 1" in refused(lambda: run_python("1"))


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
from nanochat.shell.cli import UserError
try:
    run_python("1")
except UserError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "a jail did not stand: [Errno 22] prctl 22: Invalid argument" in ran.stdout, ran
    assert len(ran.stdout.splitlines()) == 1 and ran.stderr == ""


def test_checks_that_do_not_compile_are_told_even_before_the_program_begins():
    for _ in range(30):
        assert run_checks(SQUARE, "f(1) +").error.startswith("SyntaxError")


def test_bad_limits_are_told():
    for seconds in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="timeout_seconds"):
            run_python("1", timeout_seconds=seconds)


@pytest.mark.slow
def test_a_thousand_runs():
    """What a run costs is printed, not asserted: `pytest -s`."""
    run_python("")
    for name, call in {
        "run_python": lambda: run_python("print(1)").ok,
        "passes": lambda: passes("from typing import List\n" + SQUARE, CHECKS),
    }.items():
        times = []
        for _ in range(500):
            started = time.perf_counter()
            assert call()
            times.append(time.perf_counter() - started)
        times.sort()
        print(f"{name}: median {times[250] * 1000:.1f} ms, 99% {times[495] * 1000:.1f} ms")
    assert len(sandbox._Zygote.living) <= 8
