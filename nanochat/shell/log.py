"""What a run tells: printing from rank 0 only, one live progress line, metrics.jsonl, trackers.

Plain numbers come in; nothing here waits for a device. `step` counts from 0 and is the index of the
optimizer step that just ran, so a run that resumes at step n keeps the lines before n and rewrites the rest.
"""

import datetime
import json
import math
import os
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanochat.shell.cli import UserError
from nanochat.shell.paths import base_dir

Metrics = Mapping[str, Any]  # name -> float, int or None (unknown)

# Every line of metrics.jsonl has these. mfu is a fraction of peak; seconds is training time so far, without
# evaluation and saving.
REQUIRED = ("step", "loss", "lr", "tokens", "tok_per_sec", "mfu", "seconds", "peak_memory_bytes")

PLAIN_LINES = 50  # about so many progress lines in a whole run that has no terminal ...
PLAIN_SECONDS = 60  # ... but never silent for longer than this
LIVE_SECONDS = 0.1  # the live line is redrawn at most this often


def print0(*values: object) -> None:
    """Print on rank 0 only, at once."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(*values, flush=True)


def warn(message: str) -> None:
    """One line on stderr, on rank 0 only."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"warning: {message}", file=sys.stderr, flush=True)


def record(stage: str, tag: str | None, began: float, device: Any = None) -> None:
    """Note a command that ended well as a line of `runs/commands.jsonl` (rank 0 only): what it was, the seconds since
    `began` (a `time.time()`), on what. The report adds them up."""
    if device is not None and not device.is_main:
        return
    main = sys.modules["__main__"].__spec__
    script = main.name if main else Path(sys.argv[0]).stem
    about: dict[str, Any] = {
        "script": script.rpartition(".")[2], "command": shlex.join(["python", "-m", script, *sys.argv[1:]]),
        "stage": stage, "tag": tag, "seconds": round(time.time() - began, 3),
        "started": datetime.datetime.fromtimestamp(began, datetime.timezone.utc).isoformat(timespec="seconds"),
    }  # fmt: skip
    if device is not None:
        about |= {"world_size": device.world_size, "device": device.name, "kind": device.kind}
        about["dtype"] = str(device.dtype).removeprefix("torch.")
    path = base_dir() / "runs" / "commands.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(about) + "\n")


class RunLog:
    """The log of one run: `step` after each training step, `message` for anything else, `close` at the end.

    Writes `folder/metrics.jsonl`, flushed line by line; a full disk raises OSError and is not hidden.
    Ranks above 0 write and print nothing. Use it as a context manager, so that the terminal is given back.

    Raises UserError: when a tracker is unknown or not installed.
    """

    def __init__(
        self,
        stage: str,
        folder: Path,
        total_steps: int,
        *,
        run: str | None = None,
        trackers: str | Sequence[str] = (),  # names, or one text with commas between them
        config: Metrics = {},  # noqa: B006 (only read)
        rank: int = 0,
        start_step: int = 0,
    ):
        self.stage, self.total_steps, self.rank = stage, total_steps, rank
        self._recent: deque[tuple[int, float]] = deque(maxlen=20)  # (step, seconds) of the last steps
        self._steps_seen = 0
        self._last_evaluation: dict[str, Any] = {}  # the newest val_bpb, for the live line
        self._unprinted: str | None = None  # the newest line, while only the live line shows it or nothing does
        self._printed_step, self._printed_at, self._drawn_at = start_step, time.monotonic(), -math.inf
        self._file = self._live = None
        self._trackers: dict[str, Tracker] = {}
        if rank != 0:
            return
        folder.mkdir(parents=True, exist_ok=True)
        names = trackers.split(",") if isinstance(trackers, str) else trackers
        run = run or f"{stage}-{folder.name}"
        self._trackers = _start_trackers([name.strip() for name in names if name.strip()], run, folder, dict(config))
        path = folder / "metrics.jsonl"
        _keep_steps_before(path, start_step)
        self._file = path.open("a", encoding="utf-8")
        if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
            self._live = _open_live_line()

    def step(self, metrics: Metrics) -> None:
        """Log one step: the `REQUIRED` keys that are known, `val_bpb` after an evaluation, and any further number.

        NaN and infinity become null in metrics.jsonl, which JSON cannot say otherwise.
        """
        if self._file is None:
            return
        assert "step" in metrics
        values = {key: metrics.get(key) for key in REQUIRED} | dict(metrics)
        finite = {key: None if _not_finite(value) else value for key, value in values.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()
        self._track({key: value for key, value in finite.items() if value is not None})
        self._show(values)

    def message(self, text: str) -> None:
        """Print a line; above the live line when there is one."""
        if self._live is not None:
            self._live.console.print(text, soft_wrap=True)
        elif self.rank == 0:
            print(text, flush=True)

    def close(self) -> None:
        """Print the last step if it has not been, end the live line, finish trackers. Closing twice is harmless."""
        if self._unprinted is not None:
            self.message(self._unprinted)
            self._unprinted = None
        live, self._live = self._live, None
        if live is not None:
            live.stop()
        for name, (_, finish) in self._trackers.items():
            try:
                finish()
            except Exception as error:
                warn(f"tracker {name} did not finish: {error!r}")
        self._trackers = {}
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ the line on the screen

    def _show(self, values: Metrics) -> None:
        """Redraw the live line; print a line that stays for an evaluation and, without a terminal, now and then."""
        step, now = values["step"], time.monotonic()
        if values["seconds"] is not None:
            self._recent.append((step, values["seconds"]))
        line = self._line(values)
        self._steps_seen += 1
        due = any(key.startswith("val_") for key in values)  # an evaluation is always shown
        if values.get("val_bpb") is not None:
            self._last_evaluation = {"val_bpb": values["val_bpb"]}
        if self._live is None:
            far = (step - self._printed_step) * PLAIN_LINES >= self.total_steps
            due = due or far or self._steps_seen <= 5 or now - self._printed_at >= PLAIN_SECONDS
        elif now - self._drawn_at >= LIVE_SECONDS:
            live_line = self._line({**values, **self._last_evaluation})
            self._live.update(live_line[: self._live.console.width - 1], refresh=True)
            self._drawn_at = now
        self._unprinted = None if due else line
        if due:
            self.message(line)
            self._printed_step, self._printed_at = step, now

    def _line(self, values: Metrics) -> str:
        """`base 120/2000 | loss 3.2141 | lr 0.02 | 12,345 tok/s | mfu 41.2% | eta 3m12s | val_bpb 1.2345 ...`"""
        width = len(str(self.total_steps))
        parts = [f"{self.stage} {values['step']:>{width}}/{self.total_steps}"]
        if values["loss"] is not None:
            parts.append(f"loss {values['loss']:.4f}")
        if values["lr"] is not None:
            parts.append(f"lr {values['lr']:.3g}")
        if values["tok_per_sec"] is not None:
            parts.append(f"{values['tok_per_sec']:,.0f} tok/s")
        parts.append("mfu n/a" if values["mfu"] is None else f"mfu {values['mfu']:.1%}")
        seconds_left = self._seconds_left()
        if seconds_left is not None:
            parts.append(f"eta {duration(seconds_left)}")
        further = [key for key in values if key not in REQUIRED and values[key] is not None]
        for key in sorted(further, key=lambda key: key != "val_bpb"):  # val_bpb first
            value = values[key]
            parts.append(f"{key} {value:.4f}" if isinstance(value, float) else f"{key} {value}")
        return " | ".join(parts)

    def _seconds_left(self) -> float | None:
        """Training time still to go, from the pace of the last steps; None while unknown."""
        if len(self._recent) < 2 or self._recent[-1][0] <= self._recent[0][0]:
            return None
        (first_step, first_seconds), (last_step, last_seconds) = self._recent[0], self._recent[-1]
        pace = (last_seconds - first_seconds) / (last_step - first_step)
        return pace * max(self.total_steps - 1 - last_step, 0)

    # ------------------------------------------------------------------ trackers

    def _track(self, metrics: Metrics) -> None:
        for name, (log, _) in list(self._trackers.items()):
            try:
                log(metrics)
            except Exception as error:  # a tracker never stops a run
                del self._trackers[name]
                warn(f"tracker {name} failed and is switched off, the run goes on: {error!r}")


def duration(seconds: float) -> str:
    """`42s`, `3m12s`, `1h05m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _keep_steps_before(path: Path, start_step: int) -> None:
    """Drop from metrics.jsonl what a run from start_step will write again, and lines torn by a kill."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] < start_step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text("".join(kept), encoding="utf-8")
    unfinished.replace(path)


def _open_live_line() -> Any:
    from rich.console import Console  # here: most processes have no terminal
    from rich.live import Live

    console = Console(markup=False, emoji=False, highlight=False)  # text as it is
    live = Live(console=console, auto_refresh=False, transient=True)
    live.start()
    live.console.show_cursor(True)  # a killed run leaves the cursor where the user can see it
    return live


# ---------------------------------------------------------------------- trackers: (log, finish) each

Tracker = tuple[Callable[[Metrics], object], Callable[[], object]]


def check_trackers(trackers: str) -> None:
    """Raises UserError: when --track names one that does not exist."""
    for name in filter(None, (name.strip() for name in trackers.split(","))):
        if name not in TRACKERS:
            raise UserError(f"--track {name!r} is unknown: use {', '.join(TRACKERS)}, with commas between several")


def _start_trackers(names: list[str], run: str, folder: Path, config: dict[str, Any]) -> dict[str, Tracker]:
    """Start each tracker; only one that is missing or unknown stops the run, before it has begun."""
    started = {}
    for name in names:
        check_trackers(name)
        try:
            started[name] = TRACKERS[name](run, folder, config)
        except ImportError as error:
            raise UserError(f"--track {name}: {error}; pip install 'nanochat[track]'") from error
        except Exception as error:
            warn(f"tracker {name} did not start, the run goes on without it: {error!r}")
    return started


def _start_wandb(run: str, folder: Path, config: dict[str, Any]) -> Tracker:
    import wandb  # pyright: ignore[reportMissingImports]

    session = wandb.init(project="nanochat", name=run, config=config, dir=str(folder))
    return lambda metrics: session.log(dict(metrics), step=metrics["step"]), session.finish


def _start_swanlab(run: str, folder: Path, config: dict[str, Any]) -> Tracker:
    import swanlab  # pyright: ignore[reportMissingImports]

    swanlab.init(project="nanochat", experiment_name=run, config=config, logdir=str(folder / "swanlab"))
    return lambda metrics: swanlab.log(dict(metrics), step=metrics["step"]), swanlab.finish


def _start_tensorboard(run: str, folder: Path, config: dict[str, Any]) -> Tracker:
    from torch.utils.tensorboard.writer import SummaryWriter  # needs the tensorboard package

    writer = SummaryWriter(str(folder / "tensorboard" / run))
    writer.add_text("config", json.dumps(config, default=str, indent=1))

    def log(metrics: Metrics) -> None:
        for key, value in metrics.items():
            writer.add_scalar(key, value, metrics["step"])

    return log, writer.close


TRACKERS = {"wandb": _start_wandb, "swanlab": _start_swanlab, "tensorboard": _start_tensorboard}
