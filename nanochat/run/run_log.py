"""The log of a run: metrics.jsonl, the lines on the screen, and trackers.

Metrics are plain numbers; nothing here waits for a device. `step` counts from 0 and is the index of the
optimizer step that just ran, so a run that resumes at step n keeps the lines before n and rewrites the rest.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nanochat.ground import screen
from nanochat.ground.log import counted, noting, print0, warn

Metrics = Mapping[str, Any]  # name -> float, int or None (unknown)

# Every line of metrics.jsonl has these. mfu is a fraction of peak; seconds is training time so far, without
# evaluation and saving.
REQUIRED = ("step", "loss", "lr", "tokens", "tok_per_sec", "mfu", "seconds", "peak_memory_bytes")

# The numbers at the beginning of a printed line.
BEGINNING = {"loss": "loss {:.4f}", "lr": "lr {:.3g}", "tok_per_sec": "{:,.0f} tok/s", "mfu": "mfu {:.1%}"}
# Numbers of RL that only metrics.jsonl has, and the report. With them a printed line would have 330 characters.
FILE_ONLY = (
    "pass_at_k", "no_signal", "truncated", "entropy", "sampler_gap", "clipped", "sampling_seconds", "training_seconds",
)  # fmt: skip


class RunLog:
    """The log of one run: `step` with the numbers of a training step, `close` at the end.

    Writes `folder/metrics.jsonl` line by line; lines that cannot be written wait in memory. Ranks above 0 write and
    print nothing. A terminal has lines of only some steps: its `bar`, which the loop moves, has the newest numbers.
    """

    def __init__(self, stage: str, folder: Path, total_steps: int, start_step: int = 0, is_main: bool = True):
        self.stage = stage
        self.total_steps = total_steps
        self.start_step = start_step
        self.trackers: dict[str, Any] = {}  # they receive the numbers too, see trackers.py
        self.bar = screen.Bar(stage, total_steps, start_step, seconds_each=0).begin()
        self._path = folder / "metrics.jsonl"
        self._is_main = is_main
        self._waiting = b""  # lines that could not be written yet
        self._next_line = 0  # the step from which on a terminal has a line again
        if is_main:
            folder.mkdir(parents=True, exist_ok=True)
            _keep_steps_before(self._path, start_step)

    def step(self, metrics: Metrics) -> None:
        """Log one step: the `REQUIRED` keys that are known, `val_bpb` after an evaluation, and any further number.

        NaN and infinity become null in metrics.jsonl: JSON has no such numbers.
        """
        if not self._is_main:
            return
        values = {key: metrics.get(key) for key in REQUIRED} | dict(metrics)
        finite = {}
        for key, value in values.items():
            finite[key] = None if isinstance(value, float) and not math.isfinite(value) else value
        self._waiting += (json.dumps(finite, allow_nan=False) + "\n").encode()
        self._write()
        known = {key: value for key, value in finite.items() if value is not None}
        self._call_trackers(lambda tracker: tracker.log(known, step=known["step"]))
        parts = self._parts(values)
        newest = [parts[name] for name in ("reward", "loss", "tok_per_sec") if name in parts]
        self.bar.note = "  ".join(newest)
        # In a terminal: the first step and about ten more, evaluations, and steps that went wrong.
        is_evaluation = any(name.startswith(("val_", "eval_")) for name in finite)
        is_due = finite["step"] >= self._next_line
        if is_due or is_evaluation or finite["loss"] is None or not screen.has_bars():
            self._next_line = finite["step"] + self.total_steps // 10
            place = f"{finite['step']:>{len(str(self.total_steps))}}/{self.total_steps}"
            print0(" | ".join([f"{self.stage} {place}", *parts.values()]))

    def close(self, *_: object) -> None:
        """Finish the trackers. Closing twice is harmless."""
        self.bar.end()
        self._call_trackers(lambda tracker: tracker.finish())
        self.trackers = {}
        if self._waiting:
            self._write()
        if self._waiting:
            warn(f"{self._path} cannot be written: {counted(self._waiting.count(10), 'line')} are lost")

    def __enter__(self) -> "RunLog":
        return self

    __exit__ = close

    def _write(self) -> None:
        """Write the lines that wait, as far as the disk takes them."""
        # Opened each time: a handle of a file server's file may never work again after the server was gone.
        with noting(str(self._path), "the run goes on, its lines wait"), self._path.open("ab", buffering=0) as file:
            while self._waiting:  # a disk may have room for a part of a line
                self._waiting = self._waiting[file.write(self._waiting) :]

    def _call_trackers(self, call: Callable[[Any], object]) -> None:
        for name, tracker in list(self.trackers.items()):
            try:
                call(tracker)
            except Exception as error:  # a tracker never stops a run
                del self.trackers[name]
                warn(f"tracker {name} failed and is switched off; the run continues: {error!r}")

    def _parts(self, values: Metrics) -> dict[str, str]:
        """What a line shows: `loss 3.2141 | lr 0.02 | 12,345 tok/s | mfu 41.2% | eta 3m12s | val_bpb 1.2345 ...`

        Unknown numbers, counts of 0 and what is in `FILE_ONLY` are left out.
        """
        parts = {name: text.format(values[name]) for name, text in BEGINNING.items() if values[name] is not None}
        speed = values["tok_per_sec"]
        steps = values["step"] + 1
        if speed and values["tokens"] and values["step"] > self.start_step:  # the first step takes longer than others
            self.bar.seconds_each = values["tokens"] / steps / speed
            parts["eta"] = f"eta {screen.duration(self.bar.seconds_each * (self.total_steps - steps))}"
        further = [key for key in values if key not in (*REQUIRED, *FILE_ONLY) and values[key] is not None]
        further.sort(key=lambda key: key != "val_bpb")  # val_bpb first
        for key in further:
            value = values[key]
            if isinstance(value, int) and value == 0:
                continue
            parts[key] = f"{key} {value:.4f}" if isinstance(value, float) else f"{key} {value}"
        return parts


def _keep_steps_before(path: Path, start_step: int) -> None:
    """Drop from metrics.jsonl the steps that a run from `start_step` will write again, and lines that a kill tore."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] < start_step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text("".join(kept), encoding="utf-8")
    unfinished.replace(path)
