"""The output of a command: lines and tables from rank 0 only, and the list of commands for the report."""

import contextlib
import datetime
import json
import os
import shlex
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from nanochat.ground.cli import UserError
from nanochat.ground.paths import base_dir
from nanochat.ground.untrusted import printable

NOTHING = ("", "0", "0.0%")
_noted: set[tuple[str, int | None]] = set()  # failures that `noting` has warned of


def print0(*values: object) -> None:
    """Print on rank 0 only, at once; texts of a model, or of files, with their control characters made visible."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(*(printable(str(value)) for value in values), flush=True)


def warn(message: str) -> None:
    """One line on stderr, on rank 0 only."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"warning: {printable(message)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def noting(what: str, consequence: str) -> Iterator[None]:
    """Around what a run can do without, such as its log: an OSError ends the block, and is a warning the first time."""
    try:
        yield
    except OSError as error:
        if (what, error.errno) not in _noted:
            _noted.add((what, error.errno))
            warn(f"{what}: {error.strerror or error}: {consequence}")


def doubt(problem: str, strict_data: bool) -> None:
    """Warn that data may mean something else than what is learned. Raises UserError: with --strict_data."""
    problem = f"{problem} (--strict_data makes this an error)"
    if strict_data:
        raise UserError(problem)
    warn(problem)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], optional: Collection[str] = ()) -> None:
    """An aligned table, on rank 0: numbers to the right, the first column and a last one called "on" to the left.

    A column of `optional` is left out if it is empty in all rows.
    """
    kept = []
    for place, column in enumerate(columns):
        if column not in optional or any(row[place] not in NOTHING for row in rows):
            kept.append(place)
    widths = [max(len(row[place]) for row in (columns, *rows)) for place in kept]
    lines = []
    for row in (columns, *rows):
        cells = []
        for place, width in zip(kept, widths, strict=True):
            is_text = place == 0 or columns[place] == "on"
            cells.append(f"{row[place]:{'<' if is_text else '>'}{width}}")
        lines.append("  ".join(cells).rstrip())
    rule = "-" * (sum(widths) + 2 * len(widths) - 2)
    print0("\n".join(["", lines[0], rule, *lines[1:]]))


def record(stage: str, tag: str | None, began: float, device: Any = None, steps: tuple[int, int] | None = None) -> None:
    """Append a command that ended well, or saved and left, to `runs/commands.jsonl`: the report adds up their times.

    `began` is the `time.time()` at its start. `steps` are the finished steps when a training loop began and when it
    ended: the report uses them to group the commands of one run. Only rank 0 writes.
    """
    if device is not None and not device.is_main:
        return
    spec = sys.modules["__main__"].__spec__
    script = spec.name if spec else Path(sys.argv[0]).stem
    line: dict[str, Any] = {
        "script": script.rpartition(".")[2],
        "command": shlex.join(["python", "-m", script, *sys.argv[1:]]),
        "stage": stage,
        "tag": tag,
        "seconds": round(time.time() - began, 3),
        "started": time_text(began),
    }
    if steps is not None:
        line["first_step"], line["last_step"] = steps
    if device is not None:
        line |= device_facts(device)
    path = base_dir() / "runs" / "commands.jsonl"
    with noting(str(path), "the report will not name this command"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def time_text(seconds: float) -> str:
    """A `time.time()` as `2026-11-29T04:24:03+00:00`."""
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).isoformat(timespec="seconds")


def device_facts(device: Any) -> dict[str, Any]:
    """What the report says about the devices of a command."""
    dtype = str(device.dtype).removeprefix("torch.")
    return {"world_size": device.world_size, "device": device.name, "kind": device.kind, "dtype": dtype}


def counted(number: int, noun: str) -> str:
    """`1 step`, `2,000 steps`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
