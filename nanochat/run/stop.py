"""Signals: a run saves and leaves, and all of its ranks leave at the same step.

`Stop` hears `cli.SIGNALS`, and output that nobody reads counts as one. The loop calls `boundary` once a step, and
long work between two boundaries calls `should_stop` now and then. Neither waits for the device. The ranks talk through
a TCPStore and not through the collective library, whose calls wait for the device.

The agreement: a step counts as passed when a rank has begun it. The first rank that knows of a signal adds one to the
highest step that any rank has passed, and all ranks stop there, however far their hosts had run ahead of each other.
"""

import contextlib
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from nanochat.device import Device
from nanochat.ground import screen
from nanochat.ground import store as job_store
from nanochat.ground.cli import SIGNALS
from nanochat.ground.log import print0
from nanochat.ranks import sum_over_ranks

ASK_SECONDS = 0.5  # `should_stop` asks the store for other ranks' signals this often
STORE_SECONDS = 20.0  # for the store to answer a request
AT_ONCE_SECONDS = 1.0  # a second Ctrl-C within this is the first one, sent twice for one key press


class Stop:
    """Hears SIGNALS in a `with` block, and agrees with the other ranks; all ranks construct it together.

    `step` is the number of finished steps.
    """

    def __init__(self, device: Device, step: int):
        self.device = device
        self.signal = 0  # the one that stops the run, once this rank knows of it
        self.last: int | None = None  # the boundary where all ranks stop, once they agreed on it
        self.calls = 0  # number of calls of `should_stop`, which shows that long work makes progress
        self._signal_at = 0.0
        self._asked_at = 0.0
        self.store: Store = HashStore()
        if device.world_size > 1:
            # A name that no earlier start of this job has used: the launcher's store outlives the ranks.
            token = torch.tensor(random.SystemRandom().getrandbits(31), device=device.torch_device)
            dist.broadcast(token, 0)
            self.store = PrefixStore(f"stop/{int(token)}", job_store.connect(timedelta(seconds=STORE_SECONDS)))
        if device.is_main:
            self.store.set("signal", "")
            self.store.set("last", "")
        self.store.set(f"passed/{device.rank}", str(step))
        with screen.Bar("waiting for the other processes"):
            self.agree(False)  # every key that is read exists now

    # ---------------------------------------------------------------------- what the loop calls

    def boundary(self, step: int) -> bool:
        """`step` steps are launched. True, on all ranks at the same step, when the run must save and leave here."""
        # A rank publishes that it passes this boundary, and only then looks for a signal. If it finds none, the rank
        # that will publish the first one reads the step afterwards, and chooses a higher one as the last.
        if not self.signal:
            self.store.set(f"passed/{self.device.rank}", str(step))
        return self.publish() > 0 and step >= self.choose_last()

    def choose_last(self) -> int:
        """The boundary where all ranks stop, once a signal is published."""
        if self.last is None:
            keys = [f"passed/{rank}" for rank in range(self.device.world_size)]
            last = max(int(value) for value in self.store.multi_get(keys)) + 1
            self.last = int(self.store.compare_set("last", "", str(last)))  # several ranks may choose: the first does
        return self.last

    def should_stop(self) -> bool:
        """Whether a stop was requested on any rank. Long work calls it at every batch."""
        self.calls += 1
        now = time.monotonic()
        if now - self._asked_at > ASK_SECONDS:
            self._asked_at = now
            self.publish()
        return bool(self.signal)

    def publish(self) -> int:
        """Publish this rank's signal, or learn of another rank's; returns the one that is published, or 0."""
        # The listening thread may hear a signal meanwhile. Then 0 is right: the others do not know of it yet.
        published = int(self.store.compare_set("signal", "", str(self.signal or "")) or 0)
        if published:
            self.request(published)
        return published

    def agree(self, interrupted: bool) -> bool:
        """Whether any rank was interrupted, the same on all ranks. A collective."""
        if self.device.world_size == 1:
            return interrupted
        flag = torch.tensor(float(interrupted), device=self.device.torch_device)
        return sum_over_ranks(flag, self.device).item() > 0

    def collect(self, name: str, value: Any) -> list[Any]:
        """Send rank 0 what JSON can hold. It waits, and returns the ranks' values in rank order. Not a collective."""
        keys = [f"{name}/{rank}" for rank in range(self.device.world_size)]
        self.store.set(keys[self.device.rank], json.dumps(value))
        if not self.device.is_main:
            return []
        while not self.store.check(keys):  # `get` would keep the training from the store until it has its answer
            time.sleep(0.1)
        values = [json.loads(value) for value in self.store.multi_get(keys)]
        for key in keys:
            self.store.delete_key(key)
        return values

    def request(self, number: int) -> None:
        """Stop the run as this signal does."""
        if not self.signal:
            self._signal_at = time.monotonic()
            self.signal = number

    def leave(self, saved: Path) -> NoReturn:
        """After the loop: print one line and exit with the status that a signal has."""
        number = self.signal or signal.SIGTERM
        if self.device.is_main:
            name = signal.Signals(number).name
            print(f"stopped by {name}: saved {saved}; continue with --resume", file=sys.stderr, flush=True)
        sys.exit(128 + number)

    # ---------------------------------------------------------------------- hearing signals

    def __enter__(self) -> "Stop":
        # The numbers of signals go straight to the listening thread: the main one may be in a collective for long.
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._handlers = {}
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, lambda *_: None)
        self._wakeup = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        # That thread takes the signals; this one blocks them, and a child process inherits that. A Ctrl-C goes to the
        # whole process group: it would kill the C++ compiler that torch.compile started, and the step with it.
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._handlers)
        screen.on_lost = self.request  # also after the block: the last lines may find no reader either
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        self._sender.send(b"\0")
        self._thread.join()
        for number, handler in self._handlers.items():
            # torchrun sends SIGTERM to the other ranks as soon as one has left: these are leaving already.
            leaving = self.signal and number == signal.SIGTERM
            signal.signal(number, signal.SIG_IGN if leaving else handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        self._receiver.close()
        self._sender.close()

    def _listen(self) -> None:
        """A thread: hears signals until the `with` block ends."""
        while True:
            for number in self._receiver.recv(64):
                if number == 0:
                    return
                if number in self._handlers:
                    self._hear(number)

    def _hear(self, number: int) -> None:
        if not self.signal:
            self.request(number)
            print0(f"{signal.Signals(number).name}: saving, then leaving (Ctrl-C again leaves at once)")
        elif number == signal.SIGINT and time.monotonic() - self._signal_at > AT_ONCE_SECONDS:
            end_process("interrupted twice: left at once, nothing more was saved", 128 + number)


def end_process(line: str, status: int, print_it: bool = True) -> NoReturn:
    """End this process at once, whatever its other threads are doing; `line` goes to stderr."""
    if print_it:
        begin = "\n" if screen.has_bars() else ""  # after the bar
        kind = "stopped" if status > 128 else "error"
        with contextlib.suppress(OSError):  # nobody may read it
            os.write(2, f"{begin}{kind}: {line}\n".encode())
    os._exit(status)
