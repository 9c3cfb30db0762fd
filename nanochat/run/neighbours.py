"""How much of the processors other programs take while something is timed: beside them any figure is too slow.

Linux counts the busy time of each processor since its start, in /proc/stat (source: man 5 proc_stat). What is beyond
the time of this process, on the processors that it may use, belongs to other programs, or to other guests of the host.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

STAT = Path("/proc/stat")
# The columns of a processor's line that are work: user, nice, system, irq, softirq, steal. Not idle and iowait; the
# time of guests is within user and nice.
WORK = (1, 2, 3, 6, 7, 8)
SHORTEST = 1.0  # seconds: the counts advance in steps of 10 ms


class Neighbours:
    """A clock of other programs' work, from its making on.

    `own` returns the seconds that all processes of the measurement have worked so far.
    """

    def __init__(self, own: Callable[[], float] = time.process_time):
        self.own = own
        self.began = time.monotonic()
        self.busy = _busy_seconds()
        self.ours = own()

    def processors(self) -> float | None:
        """How many processors others have taken since the beginning, on average; None where that is not known."""
        seconds = time.monotonic() - self.began
        busy = _busy_seconds()
        if busy is None or self.busy is None or seconds < SHORTEST:
            return None
        return max(0.0, busy - self.busy - (self.own() - self.ours)) / seconds


def _busy_seconds() -> float | None:
    """Seconds of work of the processors that this process may use; None on other systems than Linux."""
    try:
        lines = STAT.read_text().splitlines()
        names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        ticks = os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return None
    processors = [fields for fields in map(str.split, lines) if fields and fields[0] in names]
    return sum(int(fields[place]) for fields in processors for place in WORK) / ticks
