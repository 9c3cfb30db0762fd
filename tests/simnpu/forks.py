"""Simulated processes, forked from one that has imported torch_npu and the code: imports alone take seconds each.

`simulated([...])` is as `subprocess.run([sys.executable, ...])` on simulated NPUs, or as torchrun on several of them.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("core", "parallel", "experts", "serve", "train_service")
sys.path[:0] = [str(ROOT / folder) for folder in ("", "tests", *(f"tests/{room}" for room in ROOMS))]

import tiny  # noqa: E402
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler  # noqa: E402

from nanochat.ground.cli import SIGNALS  # noqa: E402
from simnpu import build  # noqa: E402

PLACES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
MESSAGE_BYTES = 1 << 17  # a command and its environment


class Running:
    """A forked command, and the process group that it is."""

    def __init__(self, status: socket.socket) -> None:
        self.status = status
        self.code: int | None = None
        self.group = int(status.recv(64))

    def wait(self, timeout: float) -> int:
        """The exit code, each time. Raises TimeoutError: when there is none in time; the command is killed."""
        if self.code is None:
            with self.status:
                self.status.settimeout(timeout)
                try:
                    self.code = int(self.status.recv(64) or -signal.SIGKILL)
                except TimeoutError:
                    os.killpg(self.group, signal.SIGKILL)
                    raise
        return self.code


@functools.cache
def _server(adapters: bool, is_simulated: bool) -> socket.socket:
    """The way to the process that forks, which ends with this one. What torch_npu links differs with `adapters`."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    simulator = build.environment(adapters=os.devnull if adapters else None) if is_simulated else {}
    env = {**os.environ, "OMP_NUM_THREADS": "1", **simulator}
    with theirs:
        command = [sys.executable, __file__, str(theirs.fileno())]
        process = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    atexit.register(lambda: (ours.close(), process.wait()))
    return ours


def start(
    command: Sequence[str], streams: Sequence[int], devices: int = 1, ranks: int = 1,
    env: dict[str, str] | None = None, cwd: Path = ROOT, **options: Any,
) -> Running:  # fmt: skip
    """Begin a command of Python's, a script or -m MODULE or -c CODE, with these files as its standard streams.

    The options are those of `build.environment`; `env` adds variables."""
    kept = {name: value for name, value in os.environ.items() if name not in PLACES}
    variables = {**kept, "OMP_NUM_THREADS": "1", **build.environment(devices=max(devices, ranks), **options)}
    request = {"command": list(command), "ranks": ranks, "cwd": os.fspath(cwd), "env": {**variables, **(env or {})}}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        socket.send_fds(
            _server("adapters" in options, True), [json.dumps(request).encode()], [*streams, theirs.fileno()]
        )
    return Running(ours)


def simulated(command: Sequence[str], *, timeout: float = 300, **options: Any) -> subprocess.CompletedProcess[str]:
    """What a command did and printed; the options are those of `start`."""
    with Path(os.devnull).open() as nothing, tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        running = start(command, [nothing.fileno(), out.fileno(), err.fileno()], **options)
        code = running.wait(timeout)
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(command, code, out.read(), err.read())


def write_python(path: Path, is_simulated: bool = True) -> int:
    """Write a program that forks what it is to run as Python. Who starts it passes on the file handle returned here."""
    server = _server(False, is_simulated).fileno()
    client = Path(__file__).with_name("forked_python.py")
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -IS {shlex.quote(str(client))} {server} "$@"\n')
    path.chmod(0o755)
    return server


# ---------------------------------------------------------------------- in the process that forks


def serve(control: socket.socket) -> list[str]:
    """Returns in each process of a command, with the command."""
    for name in tiny.PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # a child's collector would copy the pages of all imports
    while True:
        message, files, *_ = socket.recv_fds(control, MESSAGE_BYTES, 4)
        if not message:
            sys.exit()
        if os.fork() == 0:
            control.close()
            return _become(json.loads(message), files)
        for file in files:
            os.close(file)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _become(request: dict[str, Any], files: list[int]) -> list[str]:
    """The first process of a command forks its ranks, waits for them, and reports how they ended."""
    *streams, status = files
    for number, file in enumerate(streams):
        os.dup2(file, number)
        os.close(file)
    os.setsid()
    os.write(status, str(os.getpid()).encode())
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    ranks = request["ranks"]
    if ranks > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(tiny.free_port()))
        os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    running = []
    for rank in range(ranks):
        if ranks > 1:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        pid = os.fork()
        if pid == 0:
            os.close(status)
            return request["command"]
        running.append(pid)
    # Nothing comes from who waits for the command: when it dies, this group is killed.
    threading.Thread(target=lambda: (os.read(status, 1), os.killpg(0, signal.SIGKILL)), daemon=True).start()
    code = 0
    while running:
        pid, ended = os.wait()
        running.remove(pid)
        if ended and not code:  # the others would wait for it
            code = os.waitstatus_to_exitcode(ended)
            for other in running:
                os.kill(other, signal.SIGKILL)
    os.write(status, str(code).encode())
    os._exit(0)


def interruptible() -> None:
    """Ctrl-C is not ignored, as it would be behind a shell's &."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class ForkedRank(subprocess.Popen):
    """In the launcher, in place of `Popen`: forks a rank instead of starting Python anew."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *_) -> None:
        sys.stdout.flush()
        self._child_created = True
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            os.closerange(3, 1 << 16)
            for number in SIGNALS:  # the launcher has handlers
                signal.signal(number, signal.SIG_DFL)
            interruptible()
            os.environ.clear()
            os.environ.update(env)
            run_and_leave([word for word in args[1:] if word != "-u"])


def run(first: str) -> None:
    """The rest of `python FIRST ...`, whose other arguments are in sys.argv."""
    if first in ("-c", "-m"):
        sys.path.insert(0, "")
        what, sys.argv[0] = sys.argv[0], first
    if first == "-c":
        exec(what, {"__name__": "__main__"})
    elif first == "-m":
        sys.modules.pop(what, None)
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv[:0] = [first]
        sys.path.insert(0, os.fspath(Path(first).parent))
        runpy.run_path(first, run_name="__main__")


def run_and_leave(command: Sequence[str]) -> NoReturn:
    """All that `python COMMAND` does, in this process."""
    first, *sys.argv = command
    subprocess_handler.Popen = ForkedRank
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    try:
        run(first)
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
        leave(leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None))
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)  # torch's says which rank it is
        leave(1)
    leave(0)


def leave(code: int) -> NoReturn:
    """End as Python does, but for taking the interpreter apart: that takes 3 s, because it visits every object."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        request = serve(channel)
    run_and_leave(request)
