"""Training opens no door: all ports listen on this host alone, and a pickle that is planted in a store does nothing."""

import base64
import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
from runs import ROOT, start, wait_for
from test_endings import RUN, home  # noqa: F401 (a fixture)
from tiny import command_on_a_rank, is_running, run_ranks
from torch.distributed import TCPStore
from torch.distributed import distributed_c10d as c10d

from nanochat.device import Device
from nanochat.ground import store
from nanochat.ground.cli import UserError
from nanochat.ranks import gather_values

README = (ROOT / "README.md").read_text(encoding="utf-8")


def documented(launcher: str) -> list[str]:
    """The README's command for eight devices, for two processes on a CPU."""
    (command,) = re.findall(r"^python -m nanochat\.run\.launch .*scripts\.base_train(?= -- )", README, re.MULTILINE)
    command = command.replace("--nproc_per_node=8", "--nproc_per_node=2")
    command = command.replace("python -m nanochat.run.launch", f"{sys.executable} -m {launcher}")
    return [*shlex.split(command), "--", *RUN[:-1], "--num_iterations=100000", "--eval_every=0", "--save_every=0"]


def family(pid: int) -> list[int]:
    """A process and all that it started, and they."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in family(int(child)))]


def listening(pid: int) -> list[tuple[str, int]]:
    """Where a process listens: addresses in the kernel's hexadecimal, and ports."""
    links = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    places = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in links:
                address, _, port = fields[1].rpartition(":")
                places.append((address, int(port, 16)))
    return places


LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")  # as the tables have it


class Planted:
    """Unpickling it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def plant(process: subprocess.Popen, path: Path) -> None:
    """Write the pickle over what torchrun's rendezvous keeps, at every port of the launcher that is a store."""
    import pickle

    worker = family(process.pid)[1]
    variables = Path(f"/proc/{worker}/environ").read_bytes().decode().split("\0")
    (job,) = [line.partition("=")[2] for line in variables if line.startswith("TORCHELASTIC_RUN_ID=")]
    text = base64.b64encode(pickle.dumps(Planted(path))).decode()
    for _, port in listening(process.pid):
        TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5)).set(f"torch.rendezvous.{job}", text)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["nanochat.run.launch", "torch.distributed.run --standalone"])
def test_the_documented_command_opens_no_door_and_standalone_says_that_it_does(launcher, home, tmp_path):  # noqa: F811
    """The second is the control: the same search finds torchrun's open port, and the same pickle runs there."""
    base = tmp_path / "base"
    shutil.copytree(home, base)
    process, output = start(base, documented(launcher))
    planted = tmp_path / "planted"
    members = [process.pid]
    try:
        wait_for(output, r"^base +5/", process)
        members = family(process.pid)
        places = [place for pid in members for place in listening(pid)]
        for worker in members[1:]:
            os.kill(worker, signal.SIGSTOP)  # the launcher alone is tested from here on
        plant(process, planted)
        deadline = time.monotonic() + 15  # torchrun reads its rendezvous every 5 s
        while not planted.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        alive = process.poll() is None
    finally:
        for pid in members:  # stopped ranks would stay: they are in no group of the launcher's
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    elsewhere = [place for place in places if place[0] not in LOOPBACK]
    warnings = output.read_text().count("is open to the network")
    assert len(places) >= 4  # the launcher's store, rank 0's, and of each rank the socket of its collectives
    if launcher == "nanochat.run.launch":
        assert not elsewhere and not planted.exists() and alive and warnings == 0
    else:
        assert elsewhere and planted.exists() and warnings == 1


def test_it_refuses_several_hosts():
    command = [
        sys.executable,
        "-m",
        "nanochat.run.launch",
        "--nnodes=2",
        "--nproc_per_node=2",
        "-m",
        "scripts.base_train",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "docs/multinode.md" in done.stderr and "Traceback" not in done.stderr


def test_a_store_listens_on_this_host_alone():
    served = store.serve(timedelta(seconds=5))
    store.connect(timedelta(seconds=5), served.port).set("key", "value")
    assert served.get("key") == b"value"
    assert not store.is_open_to_others(served.port)
    torchruns = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert store.is_open_to_others(torchruns.port)


def test_a_rank_whose_launcher_has_died_ends_at_once(monkeypatch):
    """torch would look for the launcher's store for the whole timeout."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (job | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"launcher of this process has died .*{port}"):
        store.of_this_start(timedelta(seconds=5))


def test_a_command_ends_with_its_launcher_from_its_first_moment_on():
    """The launcher dies before torch is loaded, which takes seconds: `cli.run` has asked for the signal by then."""
    script = (
        "import dataclasses, os, time\n"
        "from nanochat.ground import cli\n"
        "@dataclasses.dataclass\n"
        "class Config:\n"
        "    x: int = 0  # help\n"
        "def main(config):\n"
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(60)\n"
        "cli.run(main, Config)\n"
    )
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {script!r}])"
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "job", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", launcher]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        rank = int(process.stdout.readline())
        process.kill()
        deadline = time.monotonic() + 10
        while is_running(rank):
            assert time.monotonic() < deadline, os.kill(rank, signal.SIGKILL)
            time.sleep(0.05)


WAITING = """
from nanochat import device
from nanochat.ground import screen
screen.HEARTBEAT_SECONDS = screen.SHOWN_AFTER_SECONDS = 0.2
with screen.opened():
    screen.phase("loading torch")
    device.init("cpu")
"""


def test_the_screen_says_that_a_rank_waits_for_the_others():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
    job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-u", "-c", WAITING]
    with subprocess.Popen(command, env={**os.environ, **job}, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "waiting for the other processes" in line or len(lines) == 5:
                process.kill()  # nobody else joins
    assert any("waiting for the other processes" in line for line in lines), lines


# ---------------------------------------------------------------------- collectives


def refuse(*_: object) -> None:
    raise AssertionError("a collective pickles")


def values_on_a_rank(device: Device) -> list[object]:
    c10d._object_to_tensor = c10d._tensor_to_object = refuse
    own = {"rank": device.rank, "text": "é从" * device.rank * 1000, "numbers": (0.1, 2**60), "nothing": None}
    return gather_values(own, device)


@pytest.mark.slow
def test_values_of_any_length_reach_every_rank():
    first, second = run_ranks(values_on_a_rank)
    assert first == second
    assert first[0] == {"rank": 0, "text": "", "numbers": [0.1, 2**60], "nothing": None}
    assert first[1]["text"] == "é从" * 1000


def stage_on_a_rank(device: Device, flags: tuple[str, ...]) -> str:
    c10d._object_to_tensor = c10d._tensor_to_object = refuse
    return command_on_a_rank(device, "base_train", flags)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_no_collective_of_a_run_pickles(layout, home, tmp_path, monkeypatch):  # noqa: F811
    shutil.copytree(home, tmp_path / "base")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    flags = (*RUN[:-1], "--num_iterations=3", f"--parallel={layout}")
    assert "done: 3 steps" in run_ranks(stage_on_a_rank, flags)[0]
