"""What ends a run before its end: a signal, a dead or hung rank, a slow one, ranks whose weights have parted.

`Faults` stands beside a training loop. Two threads of its own hear signals and talk to the other ranks through the
job's TCPStore, never through the collective library, which may be what hangs. The loop asks `boundary` once a step,
and long work between two boundaries asks `should_stop` now and then; neither waits for the device nor for another rank,
unless a stop is being agreed on.

The stop: the rank that hears a signal says so in the store. Every rank then keeps its main thread at its next
boundary and publishes the last one it passed; rank 0 answers with the highest of these plus one, and all ranks stop
at that boundary, however far their hosts had run ahead. Nobody can wait for a rank that is behind, for it is let
through up to there.

The watchdog: every rank publishes once a second where it stands. Rank 0 watches all ranks, all ranks watch rank 0.

Stragglers: a rank's own work in a step is what it does before it first waits for others, until its last backward. Of a
sharded model that is the data and the host alone: every block is gathered from all ranks, and how much of a gather is
waiting nobody can tell, so that a device that computes slowly is not named there.
"""

import collections
import contextlib
import json
import os
import random
import select
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from nanochat.device import Device
from nanochat.shell.cli import UserError
from nanochat.shell.log import print0, warn

POLL_SECONDS = 0.5  # between two looks at the store; a tenth of it while a stop is agreed on
BEAT_SECONDS = 1.0
ANSWER_SECONDS = 5.0  # for the others to answer when a stop is asked for: one that died never does
STORE_SECONDS = 20.0  # for the store to answer a request that it can answer
START_SECONDS = 1800.0  # the first two steps may compile, and wait for all ranks to come up
STILL_SECONDS = 5.0  # that this process stood still itself, by Ctrl-Z perhaps: no time that others were silent
AT_ONCE_SECONDS = 1.0  # a second Ctrl-C later than this is meant as one, not sent twice for one key
WINDOW = 10  # steps whose middle is compared, twice in a row
SLOW_RATIO, SLOW_SECONDS = 1.5, 0.005  # slower than the middle rank by both: worth a line
CHUNK = 1 << 18  # elements summed at once


class Faults:
    """Signals, heartbeats and what follows from them; a context manager around a training loop, on all ranks.

    `step` counts finished steps. `hang_seconds` without any movement end the job.
    """

    def __init__(self, device: Device, step: int, hang_seconds: float = 600.0):
        self.device, self.hang_seconds = device, hang_seconds
        self.host = socket.gethostname()
        self.signal = 0  # the one that stops the run, once this rank knows
        self._start, self._passed, self._last = step, step, None  # boundaries; the last: where all stop
        self._holding = False  # the main thread waits at its next boundary until _last is known
        self._condition = threading.Condition()
        self._phase, self._patience, self._ticks = "training", 0.0, 0
        self._began = device.mark()
        self._marks: collections.deque[tuple[Any, Any]] = collections.deque(maxlen=4 * WINDOW)
        self._work: collections.deque[float] = collections.deque(maxlen=2 * WINDOW)
        self._closed, self._wake = threading.Event(), threading.Event()
        self._main = threading.main_thread().ident
        self._asked_at = self._held_at = self._beat_at = 0.0
        self._beats = 0
        self._seen: dict[int, tuple[Any, float]] = {}  # rank -> its newest beat, and when it came
        self._moved: dict[int, tuple[Any, float]] = {}  # rank -> where it stands, and since when
        self._slow: set[int] = set()
        self._heard_store = self._polled = time.monotonic()
        self._threads = [threading.Thread(target=f, daemon=True) for f in (self._listen, self._watch)]
        self._store = self._open_store()

    def _open_store(self) -> Store:
        """A connection of our own, and names that no earlier start of this job has used."""
        if self.device.world_size == 1:
            store: Store = HashStore()
        else:
            token = torch.tensor(random.SystemRandom().getrandbits(31), device=self.device.torch_device)
            dist.broadcast(token, 0)
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            connection = TCPStore(*address, is_master=False, timeout=timedelta(seconds=STORE_SECONDS))
            store = PrefixStore(f"faults/{token.item()}", connection)
        if self.device.is_main:
            for key in ("stop", "last", "verdict"):
                store.set(key, "")
        self._publish(store)
        if self.device.world_size > 1:
            dist.barrier()  # every key that is read is there
        return store

    def __enter__(self) -> "Faults":
        # The bytes of signals go straight to the listening thread: the main one may be in a collective for long.
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._handlers = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) != signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, lambda *_: None)
        self._wakeup = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._wake.set()
        signal.set_wakeup_fd(self._wakeup)
        self._sender.send(b"\0")
        for thread in self._threads:
            thread.join(timeout=STORE_SECONDS)
        for number, handler in self._handlers.items():
            # Of a run that is leaving, torchrun ends the other ranks as soon as one has left.
            signal.signal(number, signal.SIG_IGN if self.signal and number == signal.SIGTERM else handler)
        self._receiver.close()
        self._sender.close()

    # ------------------------------------------------------------------ what the loop calls

    def boundary(self, step: int, computed: Any = None) -> bool:
        """`step` steps are launched, `computed` is their last one's mark behind its backward. True, on all ranks at the
        same step, when the run is to save and leave here."""
        if computed is not None:
            self._marks.append((self._began, computed))
            while self._marks and (seconds := self.device.seconds_between(*self._marks[0])) is not None:
                self._marks.popleft()
                self._work.append(seconds)
        with self._condition:
            while self._holding and self._last is None:
                self._condition.wait()
            if self._last is not None and step >= self._last:
                return True
            self._passed = step
        self._began = self.device.mark()
        return False

    def should_stop(self) -> bool:
        """Whether a stop was asked for; at every batch of something long. It also shows that the work goes on."""
        self._ticks += 1
        return bool(self.signal)

    def agree(self, interrupted: bool) -> bool:
        """Whether any rank was interrupted, known to all; behind long work in which ranks ask by themselves. A
        collective."""
        if self.device.world_size == 1:
            return interrupted
        flag = torch.tensor(float(interrupted), device=self.device.torch_device)
        dist.all_reduce(flag)
        return flag.item() > 0

    @contextlib.contextmanager
    def phase(self, name: str, seconds: float = 0.0) -> Iterator[None]:
        """What the run does in place of training, for the watchdog's line; `seconds` is a longer time to stand still
        than `hang_seconds`."""
        before = self._phase, self._patience
        self._phase, self._patience = name, seconds
        try:
            yield
        finally:
            self._phase, self._patience = before
            self._began = self.device.mark()

    def leave(self, saved: Path) -> NoReturn:
        """Behind the loop, when it was stopped: one line, and the status that a signal has."""
        number = self.signal or int(self._store.get("stop") or signal.SIGTERM)  # of another rank, not yet seen here
        if self.device.is_main:
            name = signal.Signals(number).name
            print(f"stopped by {name}: saved {saved}; go on with --resume", file=sys.stderr, flush=True)
        sys.exit(128 + number)

    # ------------------------------------------------------------------ hearing signals

    def _listen(self) -> None:
        """Hears signals, and that the other thread no longer gets an answer from the store."""
        before = time.monotonic()
        while not self._closed.is_set():
            ready, _, _ = select.select([self._receiver], [], [], BEAT_SECONDS)
            for number in self._receiver.recv(64) if ready else b"":
                if number in self._handlers:
                    self._hear(number)
            if time.monotonic() - before > STILL_SECONDS:
                self._heard_store = time.monotonic()
            before = time.monotonic()
            late = before - self._heard_store
            if late > self.hang_seconds and not self._closed.is_set():
                self._end(f"rank {self.device.rank} on {self.host}: {_store_name()} has not answered for {late:.0f} s")

    def _hear(self, number: int) -> None:
        now = time.monotonic()
        if not self.signal:
            self._asked_at, self.signal = now, number
            print0(f"{signal.Signals(number).name}: saving, then leaving (Ctrl-C again leaves at once)")
            self._wake.set()
        elif number == signal.SIGINT and now - self._asked_at > AT_ONCE_SECONDS:
            self._end("interrupted twice: left at once, nothing more was saved", 128 + number)

    # ------------------------------------------------------------------ talking to the other ranks

    def _watch(self) -> None:
        stop_told = False
        try:
            while not self._closed.is_set():
                self._wake.wait(POLL_SECONDS / 10 if self._holding else POLL_SECONDS)
                self._wake.clear()
                now = time.monotonic()
                if (late := now - self._polled) > STILL_SECONDS:
                    for times in (self._seen, self._moved):
                        times.update({rank: (state, at + late) for rank, (state, at) in times.items()})
                self._polled = now
                if self.signal and not stop_told:
                    self._store.compare_set("stop", "", str(self.signal))
                    stop_told = True
                stop, last, verdict = (v.decode() for v in self._store.multi_get(["stop", "last", "verdict"]))
                if verdict:
                    self._obey(verdict, speak=self.device.local_rank == 0)
                if stop:
                    self._follow_stop(int(stop), last)
                if now - self._beat_at >= BEAT_SECONDS:
                    self._beat_at = now
                    self._publish(self._store)
                    self._judge(now)
                self._heard_store = time.monotonic()
        except (RuntimeError, ValueError) as error:  # torch's DistError among them
            if not self._closed.wait(2):  # the others may be leaving, and their store with them
                line = str(error).splitlines()[0]
                self._end(f"rank {self.device.rank} on {self.host} lost {_store_name()}: that ended ({line})")

    def _follow_stop(self, number: int, last: str) -> None:
        """One look at a stop that is being agreed on."""
        if not self._holding:
            with self._condition:
                self._holding, passed = True, self._passed
            self.signal = self.signal or number
            self._held_at = time.monotonic()
            self._store.set(f"passed/{self.device.rank}", str(passed))
        if last:
            with self._condition:
                self._last = int(last)
                self._condition.notify_all()
            return
        keys = [f"passed/{rank}" for rank in range(self.device.world_size)]
        if self.device.is_main and self._store.check(keys):
            self._store.set("last", str(1 + max(int(value) for value in self._store.multi_get(keys))))
        elif time.monotonic() - self._held_at > ANSWER_SECONDS * (1 if self.device.is_main else 2):
            silent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            self._sentence(f"{_ranks(silent or [0])} did not answer when the run was to stop: nothing more was saved")

    def _publish(self, store: Store) -> None:
        self._beats += 1
        patience = self._patience if self._passed >= self._start + 2 else START_SECONDS
        work = list(self._work)
        halves = [statistics.median(half) for half in (work[:WINDOW], work[WINDOW:])] if len(work) == 2 * WINDOW else []
        beat = [self._beats, self.host, self._passed, self._phase, self._ticks, self._place(), patience, halves]
        store.set(f"beat/{self.device.rank}", json.dumps(beat))

    def _place(self) -> str:
        """Where the main thread stands: the innermost line that is not torch's, and what it called of torch."""
        frame = sys._current_frames().get(self._main or 0)
        innermost = frame.f_code.co_name if frame else ""
        while frame and f"{os.sep}torch{os.sep}" in frame.f_code.co_filename and frame.f_back:
            frame = frame.f_back
        return f"{_line(frame)} ({innermost})" if frame else "?"

    def _judge(self, now: float) -> None:
        """End the job when a rank is silent or stands still; name one that is slow."""
        ranks = range(self.device.world_size) if self.device.is_main else (0,)
        beats = dict(zip(ranks, map(json.loads, self._store.multi_get([f"beat/{r}" for r in ranks])), strict=True))
        for rank, (number, _, step, phase, ticks, *_) in beats.items():
            for times, state in ((self._seen, number), (self._moved, (step, phase, ticks))):
                if times.get(rank, (None, 0))[0] != state:
                    times[rank] = state, now
        silent = [rank for rank in ranks if now - self._seen[rank][1] > self.hang_seconds]
        patience = max(self.hang_seconds, *(beat[6] for beat in beats.values()))
        if silent:
            _, host, step, phase, *_ = beats[silent[0]]
            self._sentence(
                f"{_ranks(silent)} on {host} has been silent for {self.hang_seconds:g} s, last in step {step + 1} "
                f"({phase}): stopped, or its host is gone; start again with --resume"
            )
        elif self.device.is_main and any(now - self._moved[rank][1] > patience for rank in ranks):
            self._sentence(f"{_stuck(beats)}: nothing moved for {patience:g} s; start again with --resume")
        elif self.device.is_main and self.device.world_size > 1:
            for rank, line in slow_ranks({rank: (beat[1], beat[7]) for rank, beat in beats.items()}):
                if rank not in self._slow:
                    self._slow.add(rank)
                    warn(line)

    def _sentence(self, text: str) -> None:
        """End all ranks with one reason, that of the first to say so."""
        text = self._store.compare_set("verdict", "", text).decode()
        self._obey(text, speak=self._store.add("speakers", 1) == 1)

    def _obey(self, text: str, speak: bool) -> NoReturn:
        if self.device.is_main:  # the store may be in this very process: the others first
            time.sleep(2 * POLL_SECONDS)
        self._end(text, speak=speak)

    def _end(self, text: str, status: int = 1, speak: bool = True) -> NoReturn:
        """End this process at once, whatever its other threads are doing."""
        if speak:
            os.write(2, f"{'stopped' if self.signal else 'error'}: {text}\n".encode())
        os._exit(128 + self.signal if status == 1 and self.signal else status)


def slow_ranks(work: dict[int, tuple[str, list[float]]]) -> Iterator[tuple[int, str]]:
    """The ranks whose own work in a step takes clearly longer than the middle rank's, with a line on each. `work` is
    rank -> (host, seconds a step in the last ten steps but ten and in the last ten; none before there are so many)."""
    if not all(seconds for _, seconds in work.values()):
        return
    before, middle = (statistics.median_low(halves) for halves in zip(*(s for _, s in work.values()), strict=True))
    for rank, (host, (earlier, own)) in work.items():
        slow = earlier > SLOW_RATIO * before and own > SLOW_RATIO * middle
        if slow and min(earlier - before, own - middle) > SLOW_SECONDS:
            yield (
                rank,
                (
                    f"rank {rank} on {host} takes {own / max(middle, 1e-3):.1f} times as long as the middle one: "
                    f"{own * 1e3:.1f} ms of its own work a step against {middle * 1e3:.1f} ms, all ranks wait for it"
                ),
            )


# ---------------------------------------------------------------------- do ranks hold the same?


def checksum(parameters: Iterable[Tensor], device: Device) -> Tensor:
    """Two words of int32 on the device: a sum modulo 2**64 over all bits, each element weighted by an odd number of
    its own. It is exact in any order; a changed bit or two elements in each other's place always change it."""
    total = torch.zeros((), dtype=torch.int64, device=device.torch_device)
    odd = torch.arange(CHUNK, device=device.torch_device).mul_(2).add_(1)
    first = 0
    for parameter in parameters:
        local = getattr(parameter, "to_local", lambda p=parameter: p)().detach().contiguous()
        words = local.view(-1).view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[local.itemsize])
        for chunk in words.split(CHUNK):
            wide = chunk.long()
            total += wide.sum() * (2 * first) + wide.mul_(odd[: len(chunk)]).sum()
            first += len(chunk)
    return total.view(1).view(torch.int32)


def require_agreement(
    parameters: Iterable[Tensor], device: Device, last_good: Callable[[], object], group: Any = None
) -> None:
    """Compare what the ranks of `group` (all, when None) must hold alike; a collective, and it waits for the device.

    Raises UserError: naming the ranks that differ and the last good checkpoint; on every rank of the group.
    """
    if device.world_size == 1:
        return
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    mine = checksum(parameters, device)
    sums = [torch.empty_like(mine) for _ in members]
    dist.all_gather(sums, mine, group=group)
    values = [tuple(one) for one in torch.stack(sums).tolist()]
    (common, count), *others = collections.Counter(values).most_common()
    if not others:
        return
    odd = [rank for rank, value in zip(members, values, strict=True) if value != common or 2 * count <= len(members)]
    raise UserError(
        f"the weights of {_ranks(odd)} differ from those of the others, though all must hold the same: the memory or "
        f"a link of one of them fails; the last good checkpoint is {last_good() or 'none'}, --resume goes on from it"
    )


def _ranks(ranks: list[int]) -> str:
    some = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f"rank {some}" if len(ranks) == 1 else f"ranks {some}"


def _stuck(beats: dict[int, list[Any]]) -> str:
    """Who holds the others up: who is behind, or else stands where few do; else where all stand."""
    steps = {rank: beat[2] for rank, beat in beats.items()}
    places = collections.Counter(beat[5] for beat in beats.values())
    usual, count = places.most_common(1)[0]
    behind = [rank for rank, step in steps.items() if step == min(steps.values())]
    if len(behind) == len(beats) and 2 * count > len(beats):
        behind = [rank for rank, beat in beats.items() if beat[5] != usual] or behind
    _, host, step, phase, _, place, *_ = beats[behind[0]]
    if len(behind) == len(beats):
        where = ", ".join(f"rank {rank} on {beat[1]} in {beat[5]}" for rank, beat in list(beats.items())[:4])
        return f"all ranks stand in step {step + 1} ({phase}): {where}"
    others = next(beat[5] for rank, beat in beats.items() if rank not in behind)
    return f"{_ranks(behind)} on {host} hangs in step {step + 1} ({phase}), in {place}; others wait in {others}"


def _line(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


def _store_name() -> str:
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    own = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return f"the job's store at {where}{', in the process of rank 0' if own else ''}"
