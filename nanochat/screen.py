"""The progress of a command: bars at the bottom of a terminal, and an occasional line elsewhere.

    for batch in track(batches, "validation"):     # a bar, as long as the loop runs
        ...
    with bar("replies", total=64) as replies:      # the same, for work that is not the items of one loop
        replies.done += 1
    phase("loading torch")                         # no bar, but words and their seconds, until the next phase

`cli.run` opens a screen for the scripts that want one. Without a screen, as in a notebook or in the server, all
of these show nothing. Lines that are printed while bars are shown appear above them.

Only a terminal has bars. Elsewhere (a pipe, a file, CI, TERM=dumb, NO_COLOR) a line reports the present work after
HEARTBEAT_SECONDS without any other line, and again after twice and four times as long, so that a log stays short.
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
HEARTBEAT_SECONDS = 30.0
LOOK_SECONDS = 1.0  # between two checks whether a heartbeat is due
WIDE_COLUMNS = 80  # a narrower terminal has no bars but their numbers
FACT_COLUMNS = 38
NAME_COLUMNS = 13  # so that bars do not move when an inner one appears


# Called with SIGPIPE or SIGHUP when nobody reads the output any more; without it, a write then raises.
on_lost: Callable[[int], None] | None = None


class Output:
    """Standard output or error during a training run: the run must save before it ends for want of a reader.

    A reader that is gone (`| tee` after a Ctrl-C, a terminal that was closed) is reported once to `on_lost`, and later
    text is dropped. A disk that is full is not reported: the run goes on.
    """

    def __init__(self, stream: Any):
        self._stream = stream
        self._is_lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call: Callable[[], object]) -> None:
        if self._is_lost:
            return
        try:
            call()
        except OSError as error:
            if on_lost is None or error.errno not in (errno.EPIPE, errno.EIO, errno.ENOSPC):
                raise
            if error.errno != errno.ENOSPC:
                self._is_lost = True
                on_lost(signal.SIGPIPE if error.errno == errno.EPIPE else signal.SIGHUP)


@dataclass
class Bar:
    """Long work. A loop sets its fields, which costs nothing: the screen reads them when it draws."""

    text: str
    total: float | None = None  # None: the amount of work is unknown
    done: float = 0
    note: str = ""  # further text to show, such as the loss
    is_run: bool = False  # a training run: shown at once, and without the seconds since it began
    seconds_each: float | None = None  # how long a run takes for one
    began: float = field(default_factory=time.monotonic)

    def count(self) -> str:
        """`142/560`, or `142` without a total."""
        if self.total is None:
            return f"{self.done:,.0f}" if self.done else ""
        return f"{min(self.done, self.total):,.0f}/{self.total:,.0f}"

    def facts(self) -> str:
        """The time so far, the time left, and the note."""
        elapsed = time.monotonic() - self.began
        each = self.seconds_each
        parts = []
        if not self.is_run:
            parts.append(duration(elapsed))
            each = elapsed / self.done if self.done else None
        if self.total and each is not None and self.done < self.total:
            parts.append(f"eta {duration(each * (self.total - self.done))}")
        return "  ".join(filter(None, [*parts, self.note]))


class Screen:
    """Shows the bars of a command in a thread, the outermost bar first."""

    def __init__(self, is_terminal: bool):
        self.bars: list[Bar] = []
        self.phase = Bar("starting")  # shown while no bar is
        self.printed = time.monotonic()  # when the command printed its last line
        self._closed = threading.Event()
        self._live: Any = self._draw() if is_terminal else None
        if not is_terminal:
            threading.Thread(target=self._beat, daemon=True).start()

    @property
    def is_terminal(self) -> bool:
        return self._live is not None

    def close(self) -> None:
        """Remove the bars; the lines above them stay."""
        self._closed.set()
        if self._live is not None:
            self._live.stop()

    def _shown(self) -> list[Bar]:
        now = time.monotonic()
        shown = [one for one in list(self.bars) if one.is_run or now - one.began >= SHOWN_AFTER_SECONDS]
        return shown or ([self.phase] if self.phase.text else [])

    # ---------------------------------------------------------------------- a terminal

    def _draw(self) -> Any:
        from rich.console import Console  # here: a pipe does without it
        from rich.live import Live
        from rich.progress import BarColumn, SpinnerColumn, TextColumn
        from rich.table import Column

        # soft_wrap: the terminal breaks long lines, so that a path that is copied from one has no line end in it.
        self._console = console = Console(soft_wrap=True, highlight=False)
        spinner = SpinnerColumn("dots" if console.encoding.startswith("utf") else "line")
        name = TextColumn("{task.description}", table_column=Column(min_width=NAME_COLUMNS, no_wrap=True))
        count = TextColumn("{task.fields[count]}", table_column=Column(no_wrap=True))
        facts = "{task.fields[facts]}"
        # In a wide terminal the bar takes the room that the text leaves; in a narrow one the ends of the facts go.
        wide = Column(max_width=FACT_COLUMNS, no_wrap=True, overflow="ellipsis")
        narrow = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        bar = BarColumn(bar_width=None, table_column=Column(ratio=1))
        self._wide = (spinner, name, bar, count, TextColumn(facts, style="cyan", table_column=wide))
        self._narrow = (spinner, name, count, TextColumn(facts, style="cyan", table_column=narrow))
        live = Live(
            get_renderable=self._render, console=console, refresh_per_second=REDRAWN_PER_SECOND, transient=True,
            redirect_stderr=sys.stderr.isatty(),
        )  # fmt: skip
        live.start()
        console.show_cursor(True)  # a killed process could not show it again
        return live

    def _render(self) -> Any:
        from rich.progress import Progress

        columns = self._wide if self._console.width >= WIDE_COLUMNS else self._narrow
        # The bars are read here, and only here, so that a loop that moves one does not wait for a lock.
        progress = Progress(*columns, console=self._console, auto_refresh=False, expand=True)
        for place, one in enumerate(self._shown()):
            name = " " * place + one.text
            done: Any = one.done  # a float, where rich's type names an int
            progress.add_task(name, total=one.total, completed=done, count=one.count(), facts=one.facts())
        return progress.make_tasks_table(progress.tasks)

    # ---------------------------------------------------------------------- a pipe, a file

    def _beat(self) -> None:
        due = HEARTBEAT_SECONDS
        while not self._closed.wait(LOOK_SECONDS):
            silence = time.monotonic() - self.printed
            if silence < HEARTBEAT_SECONDS:
                due = HEARTBEAT_SECONDS
            elif silence >= due and self._shown():
                due = 2 * silence
                parts = [" ".join(filter(None, (one.text, one.count(), one.facts()))) for one in self._shown()]
                print(" | ".join(parts), flush=True)


_screen: Screen | None = None  # one per process, which has one terminal


@contextlib.contextmanager
def opened() -> Iterator[None]:
    """Show the progress of the block, in a process of rank 0."""
    global _screen
    if int(os.environ.get("RANK", "0")) != 0:
        yield
        return
    _screen = Screen(is_terminal())
    try:
        yield
    finally:
        _screen.close()
        _screen = None


def is_terminal() -> bool:
    """Whether standard output may have bars."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("CI") or os.environ.get("TERM", "dumb") in ("", "dumb")
    return sys.stdout.isatty() and not plain


def has_bars() -> bool:
    """Whether bars are shown at present."""
    return _screen is not None and _screen.is_terminal


def printed() -> None:
    """A line was printed: a heartbeat can wait."""
    if _screen is not None:
        _screen.printed = time.monotonic()


def phase(text: str) -> None:
    """Name the command's work from here on, outside of all bars; "": a program that shows its own progress."""
    if _screen is not None:
        _screen.phase = Bar(text)


def begin(text: str, total: float | None = None, **fields: Any) -> Bar:
    """Show a bar until `end`; `fields` are fields of Bar."""
    one = Bar(text, total, **fields)
    if _screen is not None:
        _screen.bars.append(one)
    return one


def end(one: Bar) -> None:
    """Ending a bar twice is harmless."""
    if _screen is not None:
        _screen.bars = [other for other in _screen.bars if other is not one]


@contextlib.contextmanager
def bar(text: str, total: float | None = None, **fields: Any) -> Iterator[Bar]:
    """Show a bar during the block."""
    one = begin(text, total, **fields)
    try:
        yield one
    finally:
        end(one)


def track(items: Iterable[T], text: str) -> Iterator[T]:
    """The items, with a bar that counts them."""
    with bar(text, len(items) if isinstance(items, Collection) else None) as one:
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
