"""Counts what a program asks of its (simulated) NPUs: kernels launched, and waits of the host.

A launch is one call of a PrivateUse1 kernel that computes, one copy (either direction, or on the device), one memset
or fill, one collective, or one replay of a captured graph. What only makes a view or allocates is none. A wait is
whatever makes the host stand until the device is done: `.item()`, a blocking copy in either direction, synchronizing a
stream, an event or a device, an operator whose output's shape depends on data.

    with counted() as c:
        step()
    print(c.launches, c.waits)
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass
class Counts:
    launches: int = 0
    waits: int = 0


_active: list[Counts] = []
_quiet = threading.local()  # .depth > 0: what this thread does belongs to something counted already
hooks: list[Callable[[bool], None]] = []  # kernels.py's, told when counting begins and ends


def launch() -> None:
    if not getattr(_quiet, "depth", 0):
        for counts in _active:
            counts.launches += 1


def wait() -> None:
    if not getattr(_quiet, "depth", 0):
        for counts in _active:
            counts.waits += 1


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What this thread does inside is counted by the caller, as one."""
    _quiet.depth = getattr(_quiet, "depth", 0) + 1
    try:
        yield
    finally:
        _quiet.depth -= 1


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    counts = Counts()
    _active.append(counts)
    for hook in hooks:
        hook(True)
    try:
        yield counts
    finally:
        _active.pop()
        for hook in hooks:
            hook(False)
