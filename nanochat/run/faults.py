"""What ends a run early: a signal, a dead rank, a hung rank.

`Faults` accompanies a training loop. Two threads of its own hear signals and talk to the other ranks through the job's
TCPStore, never through the collective library, which may be what hangs. The loop calls `boundary` once a step, and long
work between two boundaries calls `should_stop` now and then. Neither waits for the device, nor for another rank unless
a stop is being agreed on.

The stop: the rank that hears a signal writes it to the store. Every rank then holds its main thread at its next
boundary and publishes the last one it passed. All stop one boundary after the highest of these, however far their
hosts had run ahead of each other. A rank that is late is let through up to there, so that nobody waits for it in a
collective.

The watchdog: every rank publishes a `Beat` once a second. Rank 0 watches all ranks, all ranks watch rank 0.
"""

import contextlib
import dataclasses
import json
import os
import random
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from nanochat import screen
from nanochat import store as job_store
from nanochat.collectives import sum_over_ranks
from nanochat.device import Device
from nanochat.log import print0

POLL_SECONDS = 0.5  # between two looks at the store; a tenth of it while a stop is agreed on
BEAT_SECONDS = 1.0
ANSWER_SECONDS = 5.0  # for the other ranks to answer a stop; one that died never does
STORE_SECONDS = 20.0  # for the store to answer a request
START_SECONDS = 1800.0  # the first two steps may compile, and wait for all ranks to start
STILL_SECONDS = 5.0  # longer than this without running: this process itself was stopped (Ctrl-Z), not the others
AT_ONCE_SECONDS = 1.0  # a second Ctrl-C within this is the first one, sent twice for one key press


@dataclass
class Beat:
    """What a rank publishes about itself once a second."""

    sent: float  # by the rank's own clock
    host: str
    step: int  # the last boundary it passed
    phase: str  # training, evaluation, sampling, saving
    ticks: int  # calls of `should_stop`: long work that still moves
    place: str  # the line of code that its main thread executes
    patience: float  # seconds that its phase may take without moving


class Faults:
    """Signals, heartbeats and what follows from them; a context manager around a training loop, on all ranks.

    `step` is the number of finished steps. `hang_seconds` without progress on some rank end the job.
    """

    def __init__(self, device: Device, step: int, hang_seconds: float = 600.0):
        self.device = device
        self.hang_seconds = hang_seconds
        self.signal = 0  # the one that stops the run, once this rank knows
        self._signal_at = 0.0
        # The stop. Boundaries are counted in finished steps.
        self._start = step
        self._passed = step  # the last boundary that the main thread passed
        self._last: int | None = None  # the boundary where all ranks stop, once agreed on
        self._holding = False  # the main thread waits at its next boundary until _last is known
        self._held = step  # the last boundary that it had passed then
        self._held_at = 0.0
        self._condition = threading.Condition()
        # What this rank publishes.
        self._host = socket.gethostname()
        self._phase = ("training", 0.0)  # and the seconds that it may stand still
        self._ticks = 0
        # What it has seen of the others: the newest value of each thing, and since when it has it.
        self._seen: dict[str, tuple[Any, float]] = {}
        # Its own threads, and their clock. It does not count time in which this process itself was stopped: the others
        # would seem silent.
        self._awake = 0.0
        self._store_answered = 0.0
        self._closed = threading.Event()
        self._wake = threading.Event()
        self._threads = [threading.Thread(target=f, daemon=True) for f in (self._listen, self._watch)]
        self._spare: Store | None = None  # in the process of rank 0, for when torchrun's is lost
        self._store = self._open_store()

    def _open_store(self) -> Store:
        """Connect to the job's store, under names that no earlier start of this job has used."""
        if self.device.world_size == 1:
            store: Store = HashStore()
        else:
            timeout = timedelta(seconds=STORE_SECONDS)
            has_spare = job_store.is_torchruns() and job_store.on_one_host()
            served = job_store.serve(timeout) if has_spare and self.device.is_main else None
            numbers = [random.SystemRandom().getrandbits(31), served.port if served else 0]
            shared = torch.tensor(numbers, device=self.device.torch_device)
            dist.broadcast(shared, 0)
            token, port = shared.tolist()
            store = PrefixStore(f"faults/{token}", job_store.connect(timeout))
            if has_spare:
                self._spare = served or job_store.connect(timeout, port)
        for place in filter(None, (store, self._spare)):
            if self.device.is_main:
                for key in ("stop", "verdict"):
                    place.set(key, "")
            self._publish(place)
        if self.device.world_size > 1:
            dist.barrier()  # every key that is read exists now
        return store

    def __enter__(self) -> "Faults":
        # The bytes of signals go straight to the listening thread: the main one may be inside a collective for long.
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._handlers = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) != signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, lambda *_: None)
        self._wakeup = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        for thread in self._threads:
            thread.start()
        # Those threads hear the signals; this one blocks them, and a child process inherits that. A Ctrl-C goes to the
        # whole process group: it would kill the C++ compiler that torch.compile started, and the step with it.
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._handlers)
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._wake.set()
        signal.set_wakeup_fd(self._wakeup)
        self._sender.send(b"\0")
        for thread in self._threads:
            thread.join(timeout=STORE_SECONDS)
        for number, handler in self._handlers.items():
            # torchrun sends SIGTERM to the other ranks as soon as one has left: these are leaving already.
            leaving = self.signal and number == signal.SIGTERM
            signal.signal(number, signal.SIG_IGN if leaving else handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        self._receiver.close()
        self._sender.close()

    # ---------------------------------------------------------------------- what the loop calls

    def boundary(self, step: int) -> bool:
        """`step` steps are launched. True, on all ranks at the same step, when the run must save and leave here."""
        with self._condition:
            while self._holding and self._last is None:
                self._condition.wait()
            if self._last is not None and step >= self._last:
                return True
            self._passed = step
        return False

    def should_stop(self) -> bool:
        """Whether a stop was requested. Long work calls it at every batch, which also shows that it moves."""
        self._ticks += 1
        return bool(self.signal)

    def agree(self, interrupted: bool) -> bool:
        """Whether any rank was interrupted, the same on all ranks. A collective."""
        flag = torch.tensor(float(interrupted), device=self.device.torch_device)
        return sum_over_ranks(flag, self.device).item() > 0

    @contextlib.contextmanager
    def phase(self, name: str, seconds: float = 0.0) -> Iterator[None]:
        """Name what the run does instead of training, for the watchdog's line. It may stand still for `seconds` where
        that is longer than `hang_seconds`."""
        before = self._phase
        self._phase = (name, seconds)
        try:
            yield
        finally:
            self._phase = before

    def leave(self, saved: Path) -> NoReturn:
        """After the loop, when it was stopped: print one line and exit with the status that a signal has."""
        number = self.signal or int(self._store.get("stop") or signal.SIGTERM)  # of another rank, not yet seen here
        if self.device.is_main:
            name = signal.Signals(number).name
            print(f"stopped by {name}: saved {saved}; continue with --resume", file=sys.stderr, flush=True)
        sys.exit(128 + number)

    # ---------------------------------------------------------------------- hearing signals

    def _listen(self) -> None:
        """A thread: hears signals, and notices that the other thread gets no answer from the store any more."""
        before = time.monotonic()
        while not self._closed.is_set():
            ready, _, _ = select.select([self._receiver], [], [], POLL_SECONDS / 5)
            now = time.monotonic()
            self._awake += min(now - before, STILL_SECONDS)
            before = now
            for number in self._receiver.recv(64) if ready else b"":
                if number in self._handlers:
                    self._hear(number)
            late = self._awake - self._store_answered
            if late > self.hang_seconds and not self._closed.is_set():
                self._end(f"rank {self.device.rank} on {self._host}: {_store_name()} has not answered for {late:.0f} s")

    def _hear(self, number: int) -> None:
        if not self.signal:
            self._signal_at = self._awake
            self.signal = number
            print0(f"{signal.Signals(number).name}: saving, then leaving (Ctrl-C again leaves at once)")
            self._wake.set()
        elif number == signal.SIGINT and self._awake - self._signal_at > AT_ONCE_SECONDS:
            self._end("interrupted twice: left at once, nothing more was saved", 128 + number)

    # ---------------------------------------------------------------------- talking to the other ranks

    def _watch(self) -> None:
        """A thread: looks at the store every POLL_SECONDS."""
        while not self._closed.is_set():
            self._wake.wait(POLL_SECONDS / 10 if self._holding else POLL_SECONDS)
            self._wake.clear()
            try:
                self._look()
            except (RuntimeError, ValueError) as error:  # torch's DistError among them
                if not self._closed.wait(2):  # the others may be leaving, and their store with them
                    self._lose_store(str(error).splitlines()[0])

    def _look(self) -> None:
        """Act on a stop or on a verdict, and publish that this rank lives."""
        if self.signal and self._last is None:
            self._store.compare_set("stop", "", str(self.signal))
        stop, verdict = (value.decode() for value in self._store.multi_get(["stop", "verdict"]))
        if verdict:
            self._obey(verdict, print_it=self.device.local_rank == 0)
        if stop:
            self._follow_stop(int(stop))
        if self._awake - self._sent >= BEAT_SECONDS:
            self._publish(self._store)
            self._judge()
        self._store_answered = self._awake

    def _lose_store(self, reason: str) -> None:
        """Stop the run over the spare store, where there is one: torchrun was killed. Else end at once."""
        if self._spare is None:
            self._end(f"rank {self.device.rank} on {self._host} lost {_store_name()}: that ended ({reason})")
        print0(f"lost {_store_name()}, of torchrun, which was killed or does not run: saving, then leaving")
        self._store, self._spare = self._spare, None
        self._held_at = self._awake  # the others may take a moment longer to notice
        self.signal = self.signal or signal.SIGTERM

    def _follow_stop(self, number: int) -> None:
        """One look at a stop that is being agreed on."""
        # First hold the main thread at its next boundary, and publish the last one that it passed.
        if not self._holding:
            with self._condition:
                self._holding = True
                self._held = self._passed
            self.signal = self.signal or number
            self._held_at = self._awake
        self._store.set(f"passed/{self.device.rank}", str(self._held))  # at every look: the store may be the spare one
        # Once all ranks have answered, let the main thread run up to the boundary where all stop. The answers never
        # change, so that every rank finds the same one.
        keys = [f"passed/{rank}" for rank in range(self.device.world_size)]
        if self._last is None and self._store.check(keys):
            with self._condition:
                self._last = max(int(value) for value in self._store.multi_get(keys)) + 1
                self._condition.notify_all()
        elif self._last is None and self._awake - self._held_at > ANSWER_SECONDS:
            silent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            self._condemn(f"{_ranks(silent)} did not answer when the run was to stop: nothing more was saved")

    def _publish(self, store: Store) -> None:
        self._sent = self._awake
        phase, seconds = self._phase
        patience = seconds if self._passed >= self._start + 2 else START_SECONDS
        beat = Beat(self._sent, self._host, self._passed, phase, self._ticks, self._place(), patience)
        store.set(f"beat/{self.device.rank}", json.dumps(dataclasses.asdict(beat)))

    def _place(self) -> str:
        """The line that the main thread executes: the innermost one outside of torch, and what it called there."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        innermost = frame.f_code.co_name if frame else ""
        while frame and f"{os.sep}torch{os.sep}" in frame.f_code.co_filename and frame.f_back:
            frame = frame.f_back
        if frame is None:
            return "?"
        return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name} ({innermost})"

    def _judge(self) -> None:
        """End the job when a rank is silent or does not move."""
        ranks = list(range(self.device.world_size)) if self.device.is_main else [0]
        values = self._store.multi_get([f"beat/{rank}" for rank in ranks])
        beats = {rank: Beat(**json.loads(value)) for rank, value in zip(ranks, values, strict=True)}
        silent_for = {rank: self._age(f"beat of {rank}", beat.sent) for rank, beat in beats.items()}
        still_for = [self._age(f"work of {rank}", (beat.step, beat.phase, beat.ticks)) for rank, beat in beats.items()]
        silent = [rank for rank in ranks if silent_for[rank] > self.hang_seconds]
        patience = max(self.hang_seconds, *(beat.patience for beat in beats.values()))
        if silent:
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
        """For how many seconds something has had this value."""
        if what not in self._seen or self._seen[what][0] != value:
            self._seen[what] = (value, self._awake)
        return self._awake - self._seen[what][1]

    # ---------------------------------------------------------------------- ending the job

    def _condemn(self, text: str) -> None:
        """End all ranks with one reason, that of the first rank to write one."""
        text = self._store.compare_set("verdict", "", text).decode()
        self._obey(text, print_it=self._store.add("printers", 1) == 1)

    def _obey(self, text: str, print_it: bool) -> NoReturn:
        if self.device.is_main:  # the store may be in this very process: the others read the verdict first
            time.sleep(2 * POLL_SECONDS)
        self._end(text, print_it=print_it)

    def _end(self, text: str, status: int = 1, print_it: bool = True) -> NoReturn:
        """End this process at once, whatever its other threads are doing."""
        if print_it:
            begin = "\n" if screen.has_bars() else ""  # after the bar
            os.write(2, f"{begin}{'stopped' if self.signal else 'error'}: {text}\n".encode())
        os._exit(128 + self.signal if status == 1 and self.signal else status)


def _places(beats: dict[int, Beat]) -> str:
    """Where the ranks are, those first that hold the others up: of the lowest step, then in the least usual line."""
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
    own = "" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else ", in the process of rank 0"
    return f"the job's store at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}{own}"
