"""Ranks stop at one step whoever heard the signal. tests/promises has ranks that die or hang (T7)."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import cpu_device, run_ranks

from nanochat.device import Device
from nanochat.run.stop import Stop
from nanochat.run.watchdog import LEAVE_SECONDS, Watchdog


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_is_ignored_stays_ignored(number):
    """`nohup` ignores the end of the terminal, and a shell's job in the background ignores Ctrl-C."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with Watched(cpu_device(), 0) as faults:
            os.kill(os.getpid(), number)
            time.sleep(0.1)
            assert not faults.should_stop() and signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


# ---------------------------------------------------------------------- the watchdog


def timed(hang_seconds: float) -> tuple[Watched, Callable[[float], None], list[str]]:
    """With a function that lets time pass, because the real clock ends the process that runs late; and the verdicts."""
    watched = Watched(cpu_device(), 40, hang_seconds)
    watchdog, verdicts = watched.watchdog, []
    watchdog._condemn = verdicts.append

    def pass_time(seconds: float) -> None:
        watchdog._awake += seconds
        watchdog._look()

    return watched, pass_time, verdicts


@pytest.mark.parametrize(("steps", "is_given_up"), [(1, True), (2, False)])
def test_a_step_that_compiles_is_given_up_after_a_signal(steps, is_given_up):
    watched, pass_time, verdicts = timed(100)
    watched.watchdog.boundary(40 + steps)
    watched.stop.request(signal.SIGTERM)
    pass_time(2)
    pass_time(LEAVE_SECONDS)
    assert not verdicts
    pass_time(1)
    assert [line[:24] for line in verdicts] == ["left in the first steps,"] * is_given_up


def test_a_slow_step_is_no_hang_while_work_or_a_longer_leave_is_shown():
    watched, pass_time, verdicts = timed(10)
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
