"""Two network namespaces act as two hosts: a job spans them, loses one to kill -9, and ends as if nothing had happened.

The commands are those of docs/multinode.md. It takes root and iproute2 to make namespaces.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import ROOT
from test_endings import MIDWAY, RUN, STEPS, home, result  # noqa: F401 (home is a fixture)

PAGE = (ROOT / "docs" / "multinode.md").read_text(encoding="utf-8")
JOB = f"nc{os.getpid() % 10_000}"
ADDRESSES = {"node1": "10.77.0.1", "node2": "10.77.0.2"}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def network() -> Iterator[None]:
    """A cable between two namespaces, with interfaces eth0."""
    names = [f"{JOB}{node}" for node in ADDRESSES]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for name, address in zip(names, ADDRESSES.values(), strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth0", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        reason = getattr(error, "stderr", None) or error
        pytest.skip(f"NO TWO HOSTS: network namespaces cannot be made here ({reason}): run as root with iproute2")
    yield
    for name in names:
        ip("netns", "del", name)


def documented(node: str) -> tuple[list[str], dict[str, str]]:
    """The command of one host and its variables, as the page has them, for the CPU."""
    (block,) = re.findall(r"```bash\n(# on every host.*?)```", PAGE, re.DOTALL)
    lines = block.replace("\\\n", " ").splitlines()
    exported = dict(line.removeprefix("export ").split("=") for line in lines if line.startswith("export "))
    (command,) = [line for line in lines if line.startswith("torchrun ")]
    command = command.replace("--nproc_per_node=8", "--nproc_per_node=1").split(" -- ")[0]
    command = command.replace("ADDRESS", ADDRESSES[node])
    exported = {name: value.replace("ADDRESS", ADDRESSES[node]) for name, value in exported.items()}
    return shlex.split(command.replace("torchrun", f"{sys.executable} -m torch.distributed.run")), exported


def host(node: str, base: Path, output: Path) -> subprocess.Popen:
    """One host's torchrun, with a name and an address of its own and one processor."""
    command, exported = documented(node)
    names = base.with_name("hosts")
    names.write_text("127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for n, a in ADDRESSES.items()))
    inside = f"hostname {node}; mount --bind {names} /etc/hosts; exec {shlex.join([*command, '--', *RUN, '--resume'])}"
    core = sorted(os.sched_getaffinity(0))[list(ADDRESSES).index(node) % len(os.sched_getaffinity(0))]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NANOCHAT_BASE_DIR": str(base), "OMP_NUM_THREADS": "1", **exported}
    with output.open("w") as file:
        return subprocess.Popen(
            ["taskset", "-c", str(core), "ip", "netns", "exec", JOB + node, "unshare", "--uts", "sh", "-c", inside],
            cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip


def everything_on(node: str) -> list[int]:
    output = subprocess.run(["ip", "netns", "pids", JOB + node], capture_output=True, text=True, check=True).stdout
    return [int(pid) for pid in output.split()]


def cut_power(node: str) -> None:
    for pid in everything_on(node):
        os.kill(pid, signal.SIGKILL)


def run(folder: Path, home: Path, lost: str | None) -> Path:  # noqa: F811
    """A job over both hosts; one is lost midway and started again. Returns its base folder."""
    base = folder / "base"
    shutil.copytree(home, base)
    output = {node: folder / f"{node}.txt" for node in ADDRESSES}
    hosts = {node: host(node, base, output[node]) for node in ADDRESSES}
    try:
        if lost:
            deadline = time.monotonic() + 120
            while not (base / "checkpoints/base/d1" / MIDWAY).is_dir():
                assert time.monotonic() < deadline, "\n".join(path.read_text() for path in output.values())
                time.sleep(0.1)
            cut_power(lost)
            hosts[lost].wait()
            time.sleep(5)
            (survivor,) = set(ADDRESSES) - {lost}
            assert hosts[survivor].poll() is None, output[survivor].read_text()  # it waits
            hosts[lost] = host(lost, base, output[lost])
        for node, process in hosts.items():
            assert process.wait(timeout=200) == 0, output[node].read_text()
    finally:
        for node, process in hosts.items():
            cut_power(node)
            process.wait()
    if lost:
        assert any("resumed from" in path.read_text() for path in output.values())
    return base


@pytest.mark.soak
def test_a_host_that_is_lost_and_started_again_changes_nothing(network, home, tmp_path):  # noqa: F811
    (tmp_path / "straight").mkdir()
    (tmp_path / "lost").mkdir()
    straight = result(run(tmp_path / "straight", home, None))
    assert result(run(tmp_path / "lost", home, "node2")) == straight
    assert len(straight[1]) == STEPS["base"]
