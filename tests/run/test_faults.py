"""Ranks stop at one step whoever heard the signal; a rank that dies or hangs is named."""

import contextlib
import multiprocessing
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny import cpu_device, lively_model, run_ranks, tiny_config

from nanochat import device as devices
from nanochat.bpb import bits_per_byte
from nanochat.device import Device
from nanochat.ground.cli import Interrupted
from nanochat.run import watchdog as module
from nanochat.run.stop import Stop
from nanochat.run.watchdog import Watchdog


class Watched:
    """A stop with its watchdog, entered as a run enters them."""

    def __init__(self, device: Device, step: int, hang_seconds: float = 600.0):
        self.stop = Stop(device, step)
        self.watchdog = Watchdog(device, self.stop, step, hang_seconds)
        self.should_stop, self.agree, self.leave = self.stop.should_stop, self.stop.agree, self.stop.leave
        self.phase = self.watchdog.phase

    def __enter__(self) -> "Watched":
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(self.stop)
        self.stack.enter_context(self.watchdog)
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def boundary(self, step: int) -> bool:
        self.watchdog.boundary(step)
        return self.stop.boundary(step)


# ---------------------------------------------------------------------- the stop


def stop_of_free_ranks(device: Device) -> dict[str, Any]:
    """Ranks that never wait for each other, as hosts far ahead of their devices; the slow one hears the signal."""
    with Watched(device, 10) as faults:
        for step in range(11, 4000):
            time.sleep(0.002 if device.rank == 0 else 0.01)
            if step == 30 and device.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if faults.boundary(step):
                break
    with pytest.raises(SystemExit) as leaving:
        faults.leave(Path("step"))
    return {"step": step, "status": leaving.value.code, "waited": faults.stop.last}


@pytest.mark.slow
def test_all_ranks_stop_at_one_step_though_one_heard_the_signal_and_runs_behind():
    fast, slow = run_ranks(stop_of_free_ranks)
    assert fast["step"] == slow["step"] == fast["waited"]
    assert fast["step"] > 60  # the fast one was ahead: the slow one was let through up to there
    assert fast["status"] == slow["status"] == 143


def stop_of_ranks_in_step(device: Device) -> int:
    """Every step waits for the other rank, as gloo's do; the main thread of the one that hears is in a collective."""
    with Watched(device, 0) as faults:
        for step in range(1, 4000):
            dist.all_reduce(torch.ones(8))
            if step == 20 and device.rank == 0:
                os.kill(os.getpid(), signal.SIGINT)
            if faults.boundary(step):
                return step
    return 0


@pytest.mark.slow
def test_ranks_in_step_stop_together_and_nobody_waits_for_ever():
    first, second = run_ranks(stop_of_ranks_in_step)
    assert first == second >= 20


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_process_stops_at_the_next_boundary_and_gives_the_handlers_back(number, capsys):
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    try:
        with Watched(cpu_device(), 5) as faults:
            assert not faults.boundary(6) and not faults.should_stop()
            os.kill(os.getpid(), number)
            for _ in range(1000):
                if faults.should_stop():
                    break
                time.sleep(0.01)
            time.sleep(0.3)  # the thread has seen it too
            assert faults.boundary(7)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN  # torchrun sends it to those that leave
        with pytest.raises(SystemExit) as leaving:
            faults.leave(Path("checkpoints/step_000007"))
    finally:
        for n, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(n, handler)
    assert leaving.value.code == 128 + number
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"stopped by {number.name}: saved checkpoints/step_000007; continue with --resume"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_compiler_survives_the_signal_of_the_whole_process_group(number):
    with Watched(cpu_device(), 0):
        compiler = subprocess.Popen(["sleep", "0.5"])
        time.sleep(0.1)
        compiler.send_signal(number)
        assert compiler.wait() == 0
    after = subprocess.Popen(["sleep", "5"])
    time.sleep(0.1)
    after.send_signal(number)
    assert after.wait() == -number


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_without_a_signal_nothing_is_left_behind():
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)], open_files()
    for _ in range(3):
        with Watched(cpu_device(), 0) as faults:
            assert not any(faults.boundary(step) for step in range(1, 50))
    after = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)], open_files()
    assert after == before


def test_a_signal_that_is_ignored_stays_ignored():
    """`nohup`'s shell and a job in the background ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Watched(cpu_device(), 0) as faults:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            assert not faults.should_stop() and signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def evaluation_on_a_rank(device: Device, who: int) -> dict[str, Any]:
    calls = 0

    def asked() -> bool:
        nonlocal calls
        calls += 1
        return device.rank == who and calls == 3

    rows = torch.randint(0, 100, (12, 17))
    arguments = lively_model(tiny_config()), rows, torch.ones(100, dtype=torch.int64), 1, device
    try:
        value = bits_per_byte(*arguments, asked)
    except Interrupted:
        value = None
    return {"value": value, "calls": calls, "agreed": Watched(device, 0).agree(device.rank == who)}


@pytest.mark.slow
def test_an_evaluation_that_one_rank_breaks_off_has_no_value_on_any():
    whole = run_ranks(evaluation_on_a_rank, 7)
    assert whole[0]["value"] == whole[1]["value"] > 0 and not whole[0]["agreed"]
    broken = run_ranks(evaluation_on_a_rank, 1)
    assert [rank["value"] for rank in broken] == [None, None]
    assert [rank["calls"] for rank in broken] == [6, 3]
    assert all(rank["agreed"] for rank in broken)


# ---------------------------------------------------------------------- the watchdog


HANG_SECONDS = 1.5


def outcome(function: Callable[..., Any], *, signals: Any = None, world_size: int = 2) -> tuple[list[Any], float, str]:
    """Exit codes, seconds from the hang on, and what was said, of ranks that do not end well. `signals(processes)` is
    called once all of them have said "ready"."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun's agent has it, no rank
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(function, rank, world_size, store.port, folder) for rank in range(world_size)]
        ranks = [context.Process(target=_faulty_rank, args=one, daemon=True) for one in arguments]
        try:
            for process in ranks:
                process.start()
            until(lambda: len(list(Path(folder).glob("*.ready"))) == world_size, 60)
            began = time.monotonic()
            stopped = signals(ranks) if signals else None
            others = [process for process in ranks if process is not stopped]
            until(lambda: not any(process.is_alive() for process in others), 30)
            seconds = time.monotonic() - began
            codes = [process.exitcode for process in ranks]
            return codes, seconds, "".join(path.read_text() for path in sorted(Path(folder).glob("*.err")))
        finally:
            for process in ranks:
                process.kill()
                process.join()


def until(true: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)


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


def work_in_step(device: Device, faults: Watched) -> None:
    for step in range(44, 4000):
        dist.all_reduce(torch.ones(1))
        time.sleep(0.01)
        faults.boundary(step)


def one_odd_place(device: Device, faults: Watched) -> None:
    if device.rank == 2:
        select.select([], [], [], 60)
    dist.barrier()


@contextlib.contextmanager
def one_line(text: str) -> Iterator[str]:
    lines = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(set(lines)) == 1, text
    yield lines[0]


@pytest.mark.slow
def test_ranks_that_stand_at_one_step_are_all_told_with_their_places():
    codes, seconds, text = outcome(hang_in_own_code)
    assert codes == [1, 1] and HANG_SECONDS / 2 < seconds < 10
    with one_line(text) as line:
        assert "nothing moved for 1.5 s" in line and "--resume" in line
        assert re.search(r"rank 1 on \S+ in step 44 \(training\), in test_faults.py:\d+ hang_in_own_code", line)
        assert re.search(r"rank 0 on \S+ in step 44 \(training\), in ", line)


@pytest.mark.slow
def test_the_rank_that_is_behind_is_the_one_that_hangs():
    codes, _, text = outcome(hang_behind)
    assert codes == [1, 1]
    with one_line(text) as line:
        assert re.search(
            rf"1.5 s: rank 0 on {socket.gethostname()} in step 44 \(evaluation\), in \S+ hang_behind", line
        )


@pytest.mark.slow
def test_of_many_the_one_that_stands_elsewhere_hangs():
    codes, _, text = outcome(one_odd_place, world_size=3)
    assert codes == [1, 1, 1]
    with one_line(text) as line:
        assert re.search(r"1.5 s: rank 2 on \S+ in step 44 .*; ranks 0, 1 on .*\(barrier\)", line)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_named_by_the_others(rank):
    def stop(ranks: list[Any]) -> Any:
        os.kill(ranks[rank].pid, signal.SIGSTOP)
        return ranks[rank]

    codes, seconds, text = outcome(work_in_step, signals=stop)
    assert codes == ([None, 1] if rank == 0 else [1, None])
    with one_line(text) as line:
        assert re.search(rf"rank {rank} on \S+ has been silent for 1.5 s, last in step \d+ \(training\)", line)
    assert HANG_SECONDS / 2 < seconds < 10


@pytest.mark.slow
def test_a_killed_rank_takes_no_save_with_it_and_the_rest_leave_in_time():
    """torchrun's SIGTERM comes to the survivor of a kill -9: it cannot agree with the dead one, and must not wait."""

    def kill(ranks: list[Any]) -> None:
        ranks[1].kill()
        os.kill(ranks[0].pid, signal.SIGTERM)

    codes, seconds, text = outcome(sleep_in_step, signals=kill)
    assert codes == [143, -9] and seconds < 10
    assert "rank 1 did not answer when the run was to stop" in text


def sleep_in_step(device: Device, faults: Watched) -> None:
    for step in range(44, 4000):
        time.sleep(0.05)
        faults.boundary(step)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once():
    def twice(ranks: list[Any]) -> None:
        for _ in range(2):
            os.kill(ranks[0].pid, signal.SIGINT)
            time.sleep(1.3)

    codes, _, text = outcome(deaf, signals=twice, world_size=1)
    assert codes == [130] and "interrupted twice" in text


def deaf(device: Device, faults: Watched) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [])
    while True:
        select.select([], [], [], 0.2)


def test_a_slow_step_is_no_hang_while_work_or_a_longer_leave_is_shown(monkeypatch):
    """On a clock of the test's own: the real one ends the process that runs late."""
    watched = Watched(cpu_device(), 40, hang_seconds=10)
    watchdog, verdicts = watched.watchdog, []
    monkeypatch.setattr(watchdog, "_condemn", verdicts.append)

    def pass_time(seconds: float) -> None:
        watchdog._awake += seconds
        watchdog._look()

    for step in (41, 42, 43):
        watched.boundary(step)
        pass_time(2)
    for _ in range(5):
        watched.should_stop()
        pass_time(9)
    with watched.phase("saving", seconds=60):
        for _ in range(6):
            pass_time(9)
    pass_time(9)
    pass_time(9)
    assert verdicts == []
    pass_time(9)
    (line,) = verdicts
    assert "nothing moved for 10 s: rank 0" in line and "in step 44 (training)" in line


def test_what_others_write_in_the_jobs_store_is_printed_with_escapes():
    """Any user of the machine can write the verdict that the watchdog obeys."""
    code = (
        "from types import SimpleNamespace; from nanochat.run.watchdog import Watchdog; "
        "Watchdog._end(SimpleNamespace(stop=SimpleNamespace(signal=0)), '\\x1b[2Jlost\\nerror: \\x9b31m all')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 1
    assert done.stderr == rb"error: \x1b[2Jlost error: \x9b31m all" + b"\n"
