"""The watchdog of a run: names the rank that is dead or hangs, and ends all ranks.

Every rank publishes a `Beat` once a second in the job's TCPStore. The watchdog does not use the collective library,
because that may be the part that hangs. Rank 0 watches all ranks, and all ranks watch rank 0.
"""

import contextlib
import dataclasses
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from nanochat.device import Device
from nanochat.ground import store as job_store
from nanochat.ground.untrusted import printable
from nanochat.run.progress import Attendant
from nanochat.run.stop import STORE_SECONDS, Stop, end_process

POLL_SECONDS = 0.5  # between two reads of the store
BEAT_SECONDS = 1.0
ANSWER_SECONDS = 5.0  # after a request to stop, a rank that is silent for this long is dead
LEAVE_SECONDS = 20.0  # after a request to stop, the first two steps are given up
START_SECONDS = 1800.0  # the first two steps may compile, and wait for all ranks to start
STILL_SECONDS = 5.0  # if this process did not run for longer, it was stopped itself (Ctrl-Z), not the other ranks


@dataclass
class Beat:
    """The state that a rank publishes once a second."""

    sent: float  # on the rank's clock
    host: str
    step: int  # the last boundary that it passed
    phase: str  # training, evaluation, sampling, saving
    calls: int  # number of calls of `Stop.should_stop`: shows that long work makes progress
    place: str  # the line of code that its main thread executes
    patience: float  # seconds that its phase may take without progress


class Watchdog(Attendant):
    """Ends the job when a rank makes no progress, or sends no beat, for `hang_seconds`.

    All ranks construct it together, and enter it after `stop`.
    """

    def __init__(self, device: Device, stop: Stop, step: int, hang_seconds: float = 600.0):
        self.device = device
        self.stop = stop
        self.hang_seconds = hang_seconds
        # The state that this rank publishes.
        self._start = step
        self._passed = step
        self._host = socket.gethostname()
        self._phase = ("training", 0.0)  # with the seconds that it may last without progress
        # The newest values seen of other ranks, each with the time of its last change.
        self._seen: dict[str, tuple[Any, float]] = {}
        # The threads and their clock. The clock leaves out the time in which this process itself was stopped: the other
        # ranks would seem silent.
        self._awake = 0.0
        self._sent = 0.0
        self._store_answered = 0.0
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=f, daemon=True) for f in (self._keep_time, self._watch)]
        self._store = PrefixStore("watchdog", stop.store)
        if device.is_main:
            self._store.set("verdict", "")
        self._publish()
        stop.agree(False)  # wait for all ranks: every key that is read exists now

    def __enter__(self) -> "Watchdog":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join(timeout=STORE_SECONDS)

    # ---------------------------------------------------------------------- reports of the run

    def boundary(self, step: int) -> float:
        self._passed = step
        return 0.0

    @contextlib.contextmanager
    def phase(self, name: str, seconds: float = 0.0) -> Iterator[None]:
        """Name the work that the run does instead of training. It may run without progress for `seconds`, if that is
        longer than `hang_seconds`."""
        before = self._phase
        self._phase = (name, seconds)
        try:
            yield
        finally:
            self._phase = before

    # ---------------------------------------------------------------------- communication with the other ranks

    def _keep_time(self) -> None:
        """A thread: keeps the clock, and checks that the other thread still gets answers from the store."""
        before = time.monotonic()
        while not self._closed.wait(POLL_SECONDS / 5):
            now = time.monotonic()
            self._awake += min(now - before, STILL_SECONDS)
            before = now
            late = self._awake - self._store_answered
            if late > self.hang_seconds:
                self._end(f"rank {self.device.rank} on {self._host}: {_store_name()} has not answered for {late:.0f} s")

    def _watch(self) -> None:
        """A thread: reads the store every POLL_SECONDS."""
        while not self._closed.wait(POLL_SECONDS):
            try:
                self._look()
            except (RuntimeError, ValueError, TypeError) as error:  # torch's DistError among them
                if not self._closed.wait(2):  # the other ranks may be leaving, and their store with them
                    lost = f"{_store_name()}: that ended ({str(error).splitlines()[0]})"
                    self._end(f"rank {self.device.rank} on {self._host} lost {lost}")

    def _look(self) -> None:
        """Obey a verdict, publish a beat, and judge the other ranks."""
        verdict = self._store.get("verdict").decode()
        if verdict:
            self._obey(verdict, print_it=self.device.local_rank == 0)
        if self._awake - self._sent >= BEAT_SECONDS:
            self._publish()
            self._judge()
        self._store_answered = self._awake

    def _publish(self) -> None:
        self._sent = self._awake
        phase, seconds = self._phase
        patience = seconds if self._passed >= self._start + 2 else START_SECONDS
        beat = Beat(self._sent, self._host, self._passed, phase, self.stop.calls, self._place(), patience)
        self._store.set(f"beat/{self.device.rank}", json.dumps(dataclasses.asdict(beat)))

    def _place(self) -> str:
        """The line that the main thread executes: the innermost outside of torch, and the function it calls."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        innermost = frame.f_code.co_name if frame else ""
        while frame and f"{os.sep}torch{os.sep}" in frame.f_code.co_filename and frame.f_back:
            frame = frame.f_back
        if frame is None:
            return "?"
        return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name} ({innermost})"

    def _judge(self) -> None:
        """End the job when a rank is silent or makes no progress."""
        ranks = list(range(self.device.world_size)) if self.device.is_main else [0]
        values = self._store.multi_get([f"beat/{rank}" for rank in ranks])
        beats = {rank: Beat(**json.loads(value)) for rank, value in zip(ranks, values, strict=True)}
        silent_for = {rank: self._age(f"beat of {rank}", beat.sent) for rank, beat in beats.items()}
        still_for = [self._age(f"work of {rank}", (beat.step, beat.phase, beat.calls)) for rank, beat in beats.items()]
        patience = max(self.hang_seconds, *(beat.patience for beat in beats.values()))
        silent = [rank for rank in ranks if silent_for[rank] > self.hang_seconds]
        # A run that has to stop does not wait for a dead rank, nor for the compiler.
        stopping_for = self._age("signal", self.stop.signal) if self.stop.signal else 0.0
        unanswering = [rank for rank in ranks if silent_for[rank] > ANSWER_SECONDS]
        is_starting = self._passed < self._start + 2 and self._phase[0] == "training"
        if stopping_for > ANSWER_SECONDS and unanswering:
            self._condemn(f"{_ranks(unanswering)} did not answer when the run was to stop: nothing more was saved")
        elif stopping_for > LEAVE_SECONDS and is_starting:
            self._condemn("left in the first steps, which compile: --resume repeats them from the newest checkpoint")
        elif silent:
            beat = beats[silent[0]]
            self._condemn(
                f"{_ranks(silent)} on {beat.host} has been silent for {self.hang_seconds:g} s, last in step "
                f"{beat.step + 1} ({beat.phase}): stopped, or its host is gone; start again with --resume"
            )
        elif self.device.is_main and max(still_for) > patience:
            self._condemn(
                f"a rank hangs, nothing moved for {patience:g} s: {_places(beats)}; start again with --resume"
            )

    def _age(self, what: str, value: Any) -> float:
        """The seconds for which something has had this value."""
        if what not in self._seen or self._seen[what][0] != value:
            self._seen[what] = (value, self._awake)
        return self._awake - self._seen[what][1]

    # ---------------------------------------------------------------------- ending the job

    def _condemn(self, text: str) -> None:
        """End all ranks with one reason: the first rank that writes a verdict sets it."""
        text = self._store.compare_set("verdict", "", text).decode()
        self._obey(text, print_it=self._store.add("printers", 1) == 1)

    def _obey(self, text: str, print_it: bool) -> NoReturn:
        if self.device.is_main:  # the store may be in this process: let the other ranks read the verdict first
            time.sleep(2 * POLL_SECONDS)
        self._end(text, print_it=print_it)

    def _end(self, text: str, print_it: bool = True) -> NoReturn:
        # Any user of the machine can write in the job's store.
        line = printable(" ".join(text.split()))
        end_process(line, 128 + self.stop.signal if self.stop.signal else 1, print_it)


def _places(beats: dict[int, Beat]) -> str:
    """The places of the ranks. The ranks that block the others come first: lowest step, then rarest line."""
    groups: dict[tuple[int, str, str, str], list[int]] = {}
    for rank, beat in beats.items():
        groups.setdefault((beat.step, beat.phase, beat.host, beat.place), []).append(rank)
    lines = []
    for (step, phase, host, place), ranks in sorted(groups.items(), key=lambda group: (group[0][0], len(group[1]))):
        lines.append(f"{_ranks(ranks)} on {host} in step {step + 1} ({phase}), in {place}")
    return "; ".join(lines[:4])


def _ranks(ranks: list[int]) -> str:
    some = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f"rank {some}" if len(ranks) == 1 else f"ranks {some}"


def _store_name() -> str:
    own = "" if job_store.is_torchruns() else ", in the process of rank 0"
    return f"the job's store at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}{own}"
