"""T7. A dead or hung rank ends the job with a name.

Ranks that hang, are stopped or killed: every other rank ends by the watchdog's deadline, with one line that names rank
and step. A killed rank or launcher of a real run leaves no process, and the run that is started again ends with the
same bytes as one that nothing disturbed.
"""

import os
import re
import select
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runs import Straight, command, running, until, until_gone, wait_for, workers_of
from test_endings import MIDWAY, RUN, STEPS
from test_faults import Watched
from tiny import forkserver

from nanochat import device as devices
from nanochat.device import Device
from nanochat.run import watchdog as module

HANG_SECONDS = 1.5


def outcome(function: Callable[..., Any], *, signals: Any = None, world_size: int = 2) -> tuple[list[Any], str]:
    """Exit codes and lines of ranks that do not end well. `signals(processes)` is called once all of them are ready;
    the rank that it returns stays."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun's agent has it, no rank
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(function, rank, world_size, store.port, folder) for rank in range(world_size)]
        ranks = [forkserver().Process(target=_faulty_rank, args=one, daemon=True) for one in arguments]
        try:
            for process in ranks:
                process.start()
            until(lambda: len(list(Path(folder).glob("*.ready"))) == world_size, Path(os.devnull), 60)
            stopped = signals(ranks) if signals else None
            others = [process for process in ranks if process is not stopped]
            until(lambda: not any(process.is_alive() for process in others), Path(os.devnull))
            codes = [process.exitcode for process in ranks]
            return codes, "".join(path.read_text() for path in sorted(Path(folder).glob("*.err")))
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _faulty_rank(function: Callable[..., Any], rank: int, world_size: int, port: int, folder: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    os.dup2(os.open(f"{folder}/{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
    device = devices.init("cpu", "float32")
    module.POLL_SECONDS, module.BEAT_SECONDS, module.ANSWER_SECONDS = 0.1, 0.2, 1.0
    module.START_SECONDS = HANG_SECONDS
    with Watched(device, 40, HANG_SECONDS) as faults:
        for step in range(41, 44):
            assert not faults.boundary(step)
        Path(f"{folder}/{rank}.ready").touch()
        function(device, faults)


def hang_in_own_code(device: Device, faults: Watched) -> None:
    if device.rank == 1:
        select.select([], [], [], 60)
    dist.all_reduce(torch.ones(1))


def hang_behind(device: Device, faults: Watched) -> None:
    with faults.phase("evaluation"):
        if device.rank == 0:
            dist.all_reduce(torch.ones(1))
    faults.boundary(44)
    time.sleep(60)


def one_odd_place(device: Device, faults: Watched) -> None:
    if device.rank == 2:
        select.select([], [], [], 60)
    dist.barrier()


def work_in_step(device: Device, faults: Watched) -> None:
    for step in range(44, 4000):
        dist.all_reduce(torch.ones(1))
        time.sleep(0.01)
        faults.boundary(step)


def sleep_in_step(device: Device, faults: Watched) -> None:
    for step in range(44, 4000):
        time.sleep(0.05)
        faults.boundary(step)


def deaf(device: Device, faults: Watched) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [])
    while True:
        select.select([], [], [], 0.2)


def the_error(text: str) -> str:
    """The line that all ranks print, or the first of them."""
    lines = {line for line in text.splitlines() if line.startswith("error: ")}
    assert len(lines) == 1, text
    return lines.pop()


HERE = rf"on {socket.gethostname()} in step 44"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "ranks", "patterns"),
    [
        (
            hang_in_own_code,
            2,
            (rf"rank 1 {HERE} \(training\), in \w+.py:\d+ hang_in_own_code", rf"rank 0 {HERE} \(training\), in "),
        ),
        # The rank that is behind is the one that hangs; of many the one that waits at another place.
        (hang_behind, 2, (rf"1.5 s: rank 0 {HERE} \(evaluation\), in \S+ hang_behind",)),
        (one_odd_place, 3, (rf"1.5 s: rank 2 {HERE} .*; ranks 0, 1 on .*\(barrier\)",)),
    ],
)
def test_ranks_that_hang_are_named_with_their_places(function, ranks, patterns):
    codes, text = outcome(function, world_size=ranks)
    line = the_error(text)
    assert codes == [1] * ranks and "--resume" in line
    assert all(re.search(pattern, line) for pattern in patterns), line


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_named_by_the_others(rank):
    def stop(ranks: list[Any]) -> Any:
        os.kill(ranks[rank].pid, signal.SIGSTOP)
        return ranks[rank]

    codes, text = outcome(work_in_step, signals=stop)
    assert codes == ([None, 1] if rank == 0 else [1, None])
    assert re.search(rf"rank {rank} on \S+ has been silent for 1.5 s, last in step \d+ \(training\)", the_error(text))


@pytest.mark.slow
def test_a_killed_rank_takes_no_save_with_it_and_the_rest_leave_in_time():
    """torchrun's SIGTERM comes to the survivor of a kill -9: it cannot agree with the dead one, and must not wait."""

    def kill(ranks: list[Any]) -> None:
        ranks[1].kill()
        os.kill(ranks[0].pid, signal.SIGTERM)

    codes, text = outcome(sleep_in_step, signals=kill)
    assert codes == [143, -9]
    assert "rank 1 did not answer when the run was to stop" in text


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once():
    def twice(ranks: list[Any]) -> None:
        for _ in range(2):
            os.kill(ranks[0].pid, signal.SIGINT)
            time.sleep(1.3)  # sooner it is the same press of the keys

    codes, text = outcome(deaf, signals=twice, world_size=1)
    assert codes == [130] and "interrupted twice" in text


# ---------------------------------------------------------------------- real runs


@pytest.fixture(scope="module")
def straight(home, tmp_path_factory) -> Straight:
    """A run of two ranks that nothing disturbs."""
    base = shutil.copytree(home, tmp_path_factory.mktemp("straight") / "base")
    return Straight(base, "base", RUN, 2, "", "d1", "")


def begin_anew(run: Straight) -> None:
    shutil.rmtree(run.folder)
    shutil.rmtree(run.base / "runs")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["launch", pytest.param("standalone", marks=pytest.mark.soak)])
def test_a_killed_rank_is_started_again_and_nothing_is_lost(straight, launcher):
    begin_anew(straight)
    arguments = command("base_train", (*RUN, "--resume"), 2, "--max-restarts=3", launcher=launcher)
    with running(straight.base, arguments) as (process, output):
        wait_for(output, f"^saved .*{MIDWAY}", process)
        ranks = workers_of(process)
        os.kill(ranks[1], signal.SIGKILL)
        until_gone(ranks, output)
        assert process.wait(timeout=300) == 0, output.read_text()
    assert "resumed from" in output.read_text()
    straight.compare()


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [None, 0, *(pytest.param(one, marks=pytest.mark.soak) for one in (0.5, 2, 4))])
def test_a_killed_launcher_leaves_no_orphans_and_a_whole_checkpoint(straight, seconds):
    """At moments from the start of its ranks, in most of which torch is being loaded; and between two saves."""
    begin_anew(straight)
    with running(straight.base, command("base_train", RUN, 2), is_forked=seconds is None) as (process, output):
        until(lambda: bool(workers_of(process)), output, 60)
        if seconds is None:
            wait_for(output, f"^base +{STEPS['base'] // 2}/", process)
        time.sleep(seconds or 0)
        ranks = workers_of(process)
        os.kill(process.pid, signal.SIGKILL)
        until_gone(ranks, output)
    assert ranks and "Traceback" not in output.read_text()
    straight.run(2, "", "--resume")
    straight.compare()
