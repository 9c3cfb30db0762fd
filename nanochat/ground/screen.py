"""The progress of a command: bars at the bottom of a terminal, and an occasional line elsewhere.

    for batch in track(batches, "validation"):     # a bar, as long as the loop runs
        ...
    with Bar("replies", total=64) as replies:      # the same, for work that is not the items of one loop
        replies.done += 1
    phase("loading torch")                         # no bar, but words and their seconds, until the next phase

`cli.run` opens a screen for the scripts that want one. Without a screen, as in a notebook or in the server, all
of these show nothing. Lines that are printed while bars are shown appear above them.

Only a terminal has bars. Elsewhere (a pipe, a file, CI, TERM=dumb, NO_COLOR) a line reports the present work whenever
a minute passes without any other line.
"""

import contextlib
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

REDRAWN_PER_SECOND = 5  # each takes a thread a few milliseconds
SHOWN_AFTER_SECONDS = 2.0  # shorter work would only flicker
HEARTBEAT_SECONDS = 60.0
NAME_COLUMNS = 13  # so that bars do not move when an inner one appears


# Called with SIGPIPE or SIGHUP when nobody reads the output any more; without it, a write then raises.
on_lost: Callable[[int], None] | None = None


class Output:
    """Standard output or error during a training run: the run must save before it ends for want of a reader.

    A reader that is gone (`| tee` after a Ctrl-C, a terminal that was closed) is reported once to `on_lost`, and later
    text is dropped. Text that cannot be written for another reason, such as a full disk, is dropped: the run goes on.
    """

    def __init__(self, stream: Any):
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._is_lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        global _written
        _written = time.monotonic()
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call: Callable[[], object]) -> None:
        if self._is_lost:
            return
        try:
            call()
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            if on_lost is None:
                raise
            is_hangup = isinstance(error, OSError) and error.errno == errno.EIO and self._is_terminal
            self._is_lost = isinstance(error, BrokenPipeError) or is_hangup
            is_ignored = is_hangup and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # as by nohup
            if self._is_lost and not is_ignored:
                on_lost(signal.SIGHUP if is_hangup else signal.SIGPIPE)


@dataclass(eq=False)
class Bar:
    """Long work. A loop sets its fields, which costs nothing: the screen reads them when it draws."""

    text: str
    total: float | None = None  # None: the amount of work is unknown
    done: float = 0
    note: str = ""  # further text to show, such as the loss
    seconds_each: float | None = None  # None: by the time so far; 0: unknown
    began: float = field(default_factory=time.monotonic)

    def begin(self) -> "Bar":
        """Show it until `end`; `with` does both."""
        _bars.append(self)
        return self

    def end(self, *_: object) -> None:
        """Ending a bar twice is harmless."""
        if self in _bars:
            _bars.remove(self)

    __enter__ = begin
    __exit__ = end

    def status(self) -> str:
        """`142/560  3m12s  eta 9m25s  note`: the work done, the time so far, the time left, and the note."""
        parts = []
        if self.total is not None:
            parts.append(f"{self.done:,.0f}/{self.total:,.0f}")
        elif self.done:
            parts.append(f"{self.done:,.0f}")
        elapsed = time.monotonic() - self.began
        parts.append(duration(elapsed))
        seconds_each = self.seconds_each
        if seconds_each is None:
            seconds_each = elapsed / self.done if self.done else 0
        if self.total is not None and self.done < self.total and seconds_each:
            parts.append(f"eta {duration(seconds_each * (self.total - self.done))}")
        return "  ".join(filter(None, [*parts, self.note]))


# A process has one terminal, and so one list of bars.
_bars: list[Bar] = []  # the outermost first
_phase = Bar("starting")  # shown while no bar is
_live: Any = None  # what draws them in a terminal
_written = 0.0  # when the command wrote its last text


def _shown() -> list[Bar]:
    now = time.monotonic()
    shown = [one for one in list(_bars) if now - one.began >= SHOWN_AFTER_SECONDS]
    return shown or [_phase]


@contextlib.contextmanager
def opened() -> Iterator[None]:
    """Show the progress of the block, in a process of rank 0."""
    global _live
    phase("starting")
    closed = threading.Event()
    is_main = int(os.environ.get("RANK", "0")) == 0
    if is_main and is_terminal():
        _live = _start_drawing()
    elif is_main:
        threading.Thread(target=_beat, args=[closed], daemon=True).start()
    try:
        yield
    finally:
        closed.set()
        if _live is not None:
            _live.stop()  # the bars go, the lines above them stay
            _live = None


def _start_drawing() -> Any:
    from rich.console import Console  # here: a pipe does without it
    from rich.live import Live
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
    from rich.table import Column

    # soft_wrap: the terminal breaks long lines, so that a path that is copied from one has no line end in it.
    console = Console(soft_wrap=True, highlight=False)
    columns = (
        SpinnerColumn("line"),  # every terminal has its characters
        TextColumn("{task.description}", table_column=Column(min_width=NAME_COLUMNS, no_wrap=True)),
        BarColumn(bar_width=None, table_column=Column(ratio=1)),  # takes the room that the text leaves
        TextColumn("{task.fields[status]}", style="cyan", table_column=Column(no_wrap=True, overflow="ellipsis")),
    )

    def render() -> Progress:
        # The bars are read here, and only here, so that a loop that moves one does not wait for a lock.
        progress = Progress(*columns, console=console, auto_refresh=False, expand=True)
        for place, one in enumerate(_shown()):
            done: Any = one.done  # a float, where rich's type names an int
            progress.add_task(" " * place + one.text, total=one.total, completed=done, status=one.status())
        return progress

    live = Live(
        get_renderable=render, console=console, refresh_per_second=REDRAWN_PER_SECOND, transient=True,
        redirect_stderr=sys.stderr.isatty(),
    )  # fmt: skip
    live.start()
    console.show_cursor(True)  # a killed process could not show it again
    return live


def _beat(closed: threading.Event) -> None:
    """A thread: print a line now and then while nothing else does."""
    while not closed.wait(HEARTBEAT_SECONDS):
        if time.monotonic() - _written >= HEARTBEAT_SECONDS:
            print(" | ".join(f"{one.text} {one.status()}" for one in _shown()), flush=True)


def is_terminal() -> bool:
    """Whether standard output may have bars."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("CI") or os.environ.get("TERM", "dumb") in ("", "dumb")
    return sys.stdout.isatty() and not plain


def has_bars() -> bool:
    """Whether bars are shown at present."""
    return _live is not None


def phase(text: str) -> None:
    """Name the command's work from here on, outside of all bars."""
    global _phase
    _phase = Bar(text)


def track(items: Iterable[T], text: str) -> Iterator[T]:
    """The items, with a bar that counts them."""
    with Bar(text, len(items) if isinstance(items, Collection) else None) as one:
        for item in items:
            yield item
            one.done += 1


def duration(seconds: float) -> str:
    """`42s`, `3m12s`, `1h05m`, `3d07h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
