"""S13. Training opens no door.

Every port that the documented command opens listens on loopback, and a pickle that is planted in its rendezvous does
nothing. torchrun --standalone is the control: the same search finds its open port, and the same pickle runs there. No
collective of a run pickles.
"""

import base64
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from runs import LAUNCHERS, ROOT, process, started, until, wait_for
from test_endings import RUN
from tiny import command_on_a_rank, run_ranks
from torch.distributed import TCPStore
from torch.distributed import distributed_c10d as c10d

from nanochat.device import Device
from nanochat.ground import store
from nanochat.ranks import gather_values

README = (ROOT / "README.md").read_text(encoding="utf-8")


def documented(launcher: str) -> list[str]:
    """The README's command for eight devices, for two processes on a CPU."""
    (command,) = re.findall(r"^python -m nanochat\.run\.launch .*scripts\.base_train(?= -- )", README, re.MULTILINE)
    command = command.replace("--nproc_per_node=8", "--nproc_per_node=2")
    command = command.replace("python -m nanochat.run.launch", shlex.join([sys.executable, "-m", *LAUNCHERS[launcher]]))
    return [*shlex.split(command), "--", *RUN, "--num_iterations=100000", "--eval_every=0", "--save_every=0"]


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
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_documented_command_opens_no_door_and_standalone_says_that_it_does(launcher, home, tmp_path):
    base = shutil.copytree(home, tmp_path / "base")
    process, output = started(base, documented(launcher))
    planted = tmp_path / "planted"
    members = [process.pid]
    try:
        wait_for(output, r"^base +5/", process)
        members = family(process.pid)
        places = [place for pid in members for place in listening(pid)]
        for worker in members[1:]:
            os.kill(worker, signal.SIGSTOP)  # only the launcher is tested from here on
        plant(process, planted)
        with contextlib.suppress(AssertionError):
            until(planted.exists, output, 15 if launcher == "standalone" else 7)  # torchrun reads it every 5 s
        alive = process.poll() is None
    finally:
        for pid in members:  # stopped ranks would stay: they are in no group of the launcher's
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    elsewhere = [place for place in places if place[0] not in LOOPBACK]
    warnings = output.read_text().count("is open to the network")
    assert len(places) >= 3  # the launcher's store, and of each rank the socket of its collectives
    if launcher == "launch":
        assert not elsewhere and not planted.exists() and alive and warnings == 0
    else:
        assert elsewhere and planted.exists() and warnings == 1


def test_the_launcher_refuses_several_hosts():
    command = ("nanochat.run.launch", "--nnodes=2", "--nproc_per_node=2", "-m", "scripts.base_train")
    done = process(*command)
    assert done.returncode == 2 and "docs/multinode.md" in done.stderr and "Traceback" not in done.stderr


def test_a_store_listens_on_this_host_only():
    served = store.serve(timedelta(seconds=5))
    TCPStore(store.LOOPBACK, served.port, is_master=False).set("key", "value")
    assert served.get("key") == b"value"
    assert not store.is_open_to_others(served.port)
    torchruns = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert store.is_open_to_others(torchruns.port)


def refuse(*_: object) -> None:
    raise AssertionError("a collective pickles")


def run_on_a_rank(device: Device, flags: tuple[str, ...]) -> tuple[str, list[object]]:
    """A run on two ranks, and values of any length that reach every rank, without a pickle."""
    c10d._object_to_tensor = c10d._tensor_to_object = refuse
    own = {"rank": device.rank, "text": "é从" * device.rank * 1000, "numbers": (0.1, 2**60), "nothing": None}
    values = gather_values(own, device)
    return command_on_a_rank(device, "base_train", flags), values


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_no_collective_of_a_run_pickles(layout, home, tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(shutil.copytree(home, tmp_path / "base")))
    flags = (*RUN, "--num_iterations=3", f"--parallel={layout}")
    (printed, first), (_, second) = run_ranks(run_on_a_rank, flags)
    assert "done: 3 steps" in printed and first == second
    assert first[0] == {"rank": 0, "text": "", "numbers": [0.1, 2**60], "nothing": None}
    assert first[1]["text"] == "é从" * 1000
