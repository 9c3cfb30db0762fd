"""Counts what a program asks of its (simulated) NPUs: kernels launched and waits of the host, by call site and step.

A launch is one call of a PrivateUse1 kernel that computes, one copy (either direction, or on the device), one memset
or fill, one collective, or one replay of a captured graph. What only makes a view or allocates is none. An operator
that real hardware runs as several kernels counts once: the dispatcher shows no more.
A wait is whatever makes the host stand until the device is done: `.item()`, a blocking copy in either direction,
synchronizing a stream, an event or a device, an operator whose output's shape depends on data.
Each counts for the nearest frame outside torch, torch_npu and the simulator; backward passes run in threads of their
own and count for what the main thread is doing (`loss.backward()`).

    with counted() as c:
        step()
    print(c.launches, c.waits, c.by_site())
"""

import atexit
import contextlib
import functools
import importlib.abc
import importlib.machinery
import json
import os
import statistics
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

STEPS = "nanochat/train.py:train_step,nanochat/engine.py:sample"  # a step of training, a decoded token
HERE = str(Path(__file__).resolve().parent)


@dataclass
class Counts:
    """Launches and waits, each keyed by (site, what)."""

    launched: Counter[tuple[str, str]] = field(default_factory=Counter)
    waited: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def launches(self) -> int:
        return self.launched.total()

    @property
    def waits(self) -> int:
        return self.waited.total()

    def by_site(self) -> dict[str, tuple[int, int]]:
        """Site -> (launches, waits), the busiest first."""
        launched, waited = Counter[str](), Counter[str]()
        for counter, sums in ((self.launched, launched), (self.waited, waited)):
            for (site, _), count in counter.items():
                sums[site] += count
        sites = sorted(launched | waited, key=lambda site: (-waited[site], -launched[site], site))
        return {site: (launched[site], waited[site]) for site in sites}

    def by_operator(self) -> dict[str, int]:
        sums = Counter[str]()
        for (_, what), count in self.launched.items():
            sums[what] += count
        return dict(sums.most_common())


_active: list[Counts] = []
_quiet = threading.local()  # .depth > 0: what this thread does belongs to something counted already
hooks: list[Callable[[bool], None]] = []  # kernels.py's, told when counting begins and ends


def launch(what: str) -> None:
    if _active and not getattr(_quiet, "depth", 0):
        key = (_site(), what)
        for counts in _active:
            counts.launched[key] += 1


def wait(what: str) -> None:
    if _active and not getattr(_quiet, "depth", 0):
        key = (_site(), what)
        for counts in _active:
            counts.waited[key] += 1


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What this thread does inside is counted by the caller, as one."""
    _quiet.depth = getattr(_quiet, "depth", 0) + 1
    try:
        yield
    finally:
        _quiet.depth -= 1


def start() -> Counts:
    counts = Counts()
    _active.append(counts)
    for hook in hooks:
        hook(True)
    return counts


def stop(counts: Counts) -> None:
    _active[:] = [other for other in _active if other is not counts]
    if not _active:
        for hook in hooks:
            hook(False)


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    counts = start()
    try:
        yield counts
    finally:
        stop(counts)


def snapshot() -> Counts:
    """A copy of what has been counted since the program started (with `--counts`) or since the first `counted`."""
    if not _active:
        raise RuntimeError("nothing is being counted: use counted(), or run with --counts")
    return Counts(_active[0].launched.copy(), _active[0].waited.copy())


# ---- where ----

_known: dict[CodeType, str | None] = {}  # a code object's place, None for one that is passed over


def _site() -> str:
    place = _place(sys._getframe(2))
    if place is None:  # a thread of autograd's: ask what the main thread is at
        place = _place(sys._current_frames().get(threading.main_thread().ident or 0))
    return place or "(no Python frame)"


def _place(frame: FrameType | None) -> str | None:
    while frame is not None:
        code = frame.f_code
        if code not in _known:
            passed = _passed_over(code.co_filename)
            name = getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on with its class
            _known[code] = None if passed else f"{_short(code.co_filename)}:%d {name}"
        place = _known[code]
        if place is not None:
            return place % frame.f_lineno
        frame = frame.f_back
    return None


@functools.cache
def _passed_over(file: str) -> bool:
    """Whether a file is Python's, torch's, torch_npu's or the simulator's."""
    if file.startswith(("<frozen", *(f"{HERE}/{name}.py" for name in ("kernels", "counts", "operators")))):
        return True
    parts = Path(file).parts
    if "site-packages" in parts or "torch_npu" in parts:
        return bool({"torch", "torch_npu"} & set(parts))
    return Path(file).is_relative_to(Path(os.__file__).parent)


def _short(file: str) -> str:
    with contextlib.suppress(ValueError):
        return str(Path(file).relative_to(Path.cwd()))
    return "/".join(file.split("/")[-2:])


# ---- a whole program ----


class _StepFinder(importlib.abc.MetaPathFinder):
    """Wraps functions of modules as they are imported, so that each call of one begins a step."""

    def __init__(self, wanted: dict[str, list[str]], begin: Callable[[], None]) -> None:
        self.wanted, self.begin = wanted, begin

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname not in self.wanted:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_wrap(module: Any) -> None:
            execute(module)
            for name in self.wanted[fullname]:
                *outer, last = name.split(".")
                owner = functools.reduce(getattr, outer, module)
                function = getattr(owner, last, None)
                if function is None:
                    print(f"simnpu: {fullname} has no {name} to count steps by", file=sys.stderr)
                else:
                    setattr(owner, last, self._wrapped(function))

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted_step(*args: Any, **kwargs: Any) -> Any:
            self.begin()
            return function(*args, **kwargs)

        return counted_step


class Program:
    """Counts a program from its start to its end, by steps, and prints and writes what it counted."""

    def __init__(self, file: str, steps: str) -> None:
        self.file = file
        self.before = start()  # what comes before the first step
        self.steps: list[Counts] = []
        wanted: dict[str, list[str]] = {}
        for step in steps.split(","):
            path, _, name = step.partition(":")
            wanted.setdefault(path.removesuffix(".py").replace("/", "."), []).append(name)
        sys.meta_path.insert(0, _StepFinder(wanted, self.begin_step))

    def begin_step(self) -> None:
        stop(self.steps[-1] if self.steps else self.before)
        self.steps.append(start())

    def finish(self) -> None:
        for counts in [self.before, *self.steps]:
            stop(counts)
        if not self.steps and not self.before.launches:
            return  # a process that has not touched the device, such as torchrun's own
        shown = sorted(self.steps[1:] or self.steps or [self.before], key=lambda counts: counts.launches)
        middle = shown[len(shown) // 2]
        rank = os.environ.get("RANK", "0")
        print(f"simnpu rank {rank}: {self._line('before the first step', self.before)}")
        if self.steps:
            launches = [counts.launches for counts in self.steps]
            waits = [counts.waits for counts in self.steps]
            print(
                f"simnpu rank {rank}: {len(self.steps)} steps, median {statistics.median(launches):g} launches and "
                f"{statistics.median(waits):g} waits; the last: {launches[-5:]} launches, {waits[-5:]} waits"
            )
        print(f"simnpu rank {rank}: {'a median step' if self.steps else 'all of it'}:")
        for site, (launched, waited) in middle.by_site().items():
            print(f"  {launched:6d} launches {waited:4d} waits  {site}")
        if self.file != "-":
            path = Path(self.file if int(os.environ.get("WORLD_SIZE", 1)) == 1 else f"{self.file}.{rank}")
            path.write_text(
                json.dumps(
                    {"before": self._json(self.before), "steps": [self._json(counts) for counts in self.steps]},
                    indent=1,
                )
            )

    @staticmethod
    def _line(what: str, counts: Counts) -> str:
        return f"{what} {counts.launches} launches and {counts.waits} waits"

    @staticmethod
    def _json(counts: Counts) -> dict[str, Any]:
        return {
            "launches": counts.launches,
            "waits": counts.waits,
            "by_site": counts.by_site(),
            "by_operator": counts.by_operator(),
        }


_program: list[Program] = []


def count_program() -> None:
    """Begin to count this whole program, as `run --counts` asks for it."""
    _program.append(Program(os.environ["SIMNPU_COUNTS"], os.environ.get("SIMNPU_COUNTS_STEP") or STEPS))


def finish_before_torch_npu() -> None:
    """Tell the counts at the program's end: called after torch_npu's import, and so before its own end, which waits
    for every device."""
    for program in _program:
        atexit.register(program.finish)
