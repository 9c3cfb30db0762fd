"""`check_npu.py --full`: run every part in a process of its own, and write what they find to one report.json.

This file uses only the standard library, so it also runs where torch is missing or does not start. A part is a command
that appends its lines to a file as JSON, one object a line (`add_line`). So a part that crashes or hangs keeps the
lines that it has written, and the next part starts anyway. `full_check.py` has the parts that need torch.
"""

import contextlib
import datetime
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
FIRST = "checks"  # the part without which no other part makes sense
# Seconds that a part may take. On a card all of them together take about ten minutes.
PARTS = {
    FIRST: 420, "probe": 240, "decode": 240, "operators": 180, "train depth 12": 150, "train depth 20": 210,
    "two ranks": 180, "profile": 180,
}  # fmt: skip
ENDING_SECONDS = 40  # a part that is stopped stops its own processes first
TAIL = 3000  # characters of a traceback or an output in the report
OUTCOMES = ("PASS", "FAIL", "SKIP")
SEND_TO = "attach {out} to an issue of this project; look at it first, because the vendor's tool lists processes"


@dataclass
class Line:
    """One check: its outcome, and the figure that it found."""

    name: str
    outcome: str  # PASS, FAIL or SKIP
    detail: str
    fix: str = ""
    traceback: str = ""  # the end of it, if the check ended in an error that nobody expected
    figures: dict[str, float] = field(default_factory=dict)  # with the unit in the name
    table: str = ""
    part: str = ""


@dataclass(frozen=True)
class Doubt:
    """A statement of docs/ascend.md that nobody has seen on a card, and the lines that show whether it holds."""

    text: str
    lines: tuple[str, ...]  # beginnings of names
    parts: tuple[str, ...]  # which write these lines
    figure: str = ""  # that each of the lines must have measured


# docs/ascend.md has the same names in a table, with the reason for each doubt.
DOUBTS = (
    Doubt(
        "the card's operators compute what a CPU computes", ("matrix product", "attention", "probe"), (FIRST, "probe")
    ),
    Doubt("a step that is not finite changes nothing", ("skipped step",), (FIRST,)),
    Doubt("tokens decoded by single launches are those of a CPU", ("eager",), ("decode",)),
    Doubt("launches are recorded and replayed, with the same tokens", ("recorded",), ("decode",)),
    Doubt("decoding again takes no more memory", ("decoding memory",), ("decode",)),
    Doubt(
        "these operators take not much longer than copies of their bytes",
        ("cache write", "top", "NF4", "cumulative", "embedding"), ("operators",), figure="times_copy",
    ),
    Doubt("a packed row may have this many documents", ("documents",), ("operators",)),
    Doubt(
        "a step reaches 10% of the peak, and its memory is the count", ("train depth",),
        ("train depth 12", "train depth 20"), figure="mfu",
    ),
    Doubt(
        "the devices of one host find each other, and uneven exchanges arrive", ("all-reduce", "two ranks"),
        (FIRST, "two ranks"),
    ),
    Doubt("the profiler records the card", ("profile",), ("profile",)),
)  # fmt: skip


def add_line(file: Path, line: Line) -> None:
    """Append a line to a part's file. Several processes may write to one file."""
    with file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(asdict(line)) + "\n")


def read_lines(file: Path) -> list[Line]:
    """The whole lines of a part's file; a process that was killed may have left half a line at the end."""
    lines = []
    for text in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        with contextlib.suppress(ValueError):
            lines.append(Line(**json.loads(text)))
    return lines


class FullReport:
    """The lines of all parts, printed as they arrive, and the file that holds them.

    `about` are further entries of the file, such as the versions. `fix_for` knows the fix of an error by its text.
    `is_accelerator`: what passes on a CPU settles nothing.
    """

    def __init__(self, out: Path, about: Mapping[str, Any], fix_for: Callable[[str], str | None], is_accelerator: bool):
        self.out = out
        self.about = about
        self.fix_for = fix_for
        self.is_accelerator = is_accelerator
        self.lines: list[Line] = []
        self.ended: dict[str, str] = {}  # the parts that did not reach their end, and why
        self.seconds: dict[str, float] = {}  # of each part
        self.began = time.monotonic()

    # ------------------------------------------------------------------ parts

    def run(self, part: str, command: Sequence[str], limit: float) -> list[Line]:
        """Run a part for at most `limit` seconds; returns its lines. What goes wrong is a line too."""
        say(f"== {part} (at most {limit:g} s)")
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+", errors="replace") as output:
            record = Path(folder) / "lines.jsonl"
            # A session of its own: whatever the part has started ends with it.
            process = subprocess.Popen(
                [*command, "--record", str(record)],
                cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
            is_late = False
            interrupted: BaseException | None = None
            try:
                try:
                    while process.poll() is None and not is_late:
                        time.sleep(0.2)
                        self._show(part, record)
                        is_late = time.monotonic() - began > limit
                finally:
                    end_session(process)
            except (KeyboardInterrupt, SystemExit) as error:  # SystemExit: from a signal (`stoppable`)
                interrupted = error
            self._show(part, record)
            reason = ""
            if interrupted:
                reason = "interrupted"
            elif is_late:
                reason = f"stopped: no end within {limit:g} s"
            elif process.returncode < 0:
                reason = f"ended by signal {-process.returncode}"
            elif process.returncode and not (part == FIRST and self._has_failed(part)):  # they end with 1 after a FAIL
                reason = f"ended with exit code {process.returncode}"
            if reason:
                self.ended[part] = reason
                self._add(Line(f"part {part}", "FAIL", reason, traceback=tail_of(output), part=part))
        self.seconds[part] = round(time.monotonic() - began, 1)
        self.write()
        if interrupted:
            say(f"interrupted; the lines until now are in {self.out}")
            raise interrupted
        return [line for line in self.lines if line.part == part]

    def _has_failed(self, part: str) -> bool:
        return any(line.part == part and line.outcome == "FAIL" for line in self.lines)

    def skip(self, part: str, reason: str) -> None:
        self._add(Line(f"part {part}", "SKIP", reason, part=part))

    def _show(self, part: str, record: Path) -> None:
        """Print the lines that are new in a part's file."""
        # Counted here, not by the caller: a signal may interrupt this in the middle of a line's printing.
        shown = sum(line.part == part for line in self.lines)
        for line in read_lines(record)[shown:]:
            line.part = part
            self._add(line)

    def _add(self, line: Line) -> None:
        if line.outcome == "FAIL" and not line.fix:
            line.fix = self.fix_for(line.traceback + line.detail) or "send the report: this line is what it is for"
        self.lines.append(line)
        say(f"{line.outcome} {line.name}: {line.detail}")
        if line.outcome == "FAIL":
            say(f"     fix: {line.fix}")
        if line.table:
            say(line.table)

    # ------------------------------------------------------------------ the end

    def finish(self) -> int:
        """Print what the lines settle, and write the file; returns the exit code."""
        say("== what this settles of docs/ascend.md")
        if not self.is_accelerator:
            say("nothing: a CPU only shows that the command works; run it on the card")
        for doubt in DOUBTS if self.is_accelerator else ():
            verdict, colon, reason = self.verdict(doubt).partition(": ")
            say(f"{verdict:7} {doubt.text} ({', '.join(doubt.lines)}){colon}{reason}")
        counts = {outcome: sum(line.outcome == outcome for line in self.lines) for outcome in OUTCOMES}
        seconds = time.monotonic() - self.began
        say(f"{counts['PASS']} passed, {counts['FAIL']} failed, {counts['SKIP']} skipped in {seconds:.0f} s")
        say(f"please send it, also if nothing failed: {SEND_TO.format(out=self.out)}")
        self.write()
        return 1 if counts["FAIL"] else 0

    def verdict(self, doubt: Doubt) -> str:
        """settled (all of its lines passed), wrong (one failed), or open, with the reason after a colon."""
        reasons = [f"{part} {self.ended[part]}" for part in doubt.parts if part in self.ended]
        for name in doubt.lines:
            found = [line for line in self.lines if line.name.startswith(name)]
            if any(line.outcome == "FAIL" for line in found):
                return "wrong"
            if not found:
                reasons.append(f"no line `{name}`")
            for line in found:
                if line.outcome == "SKIP":
                    reasons.append(f"{line.name} was skipped")
                elif doubt.figure and doubt.figure not in line.figures:
                    reasons.append(f"{line.name} has no {doubt.figure}")
        return f"open: {'; '.join(reasons)}" if reasons else "settled"

    def write(self) -> None:
        """Write the file as a whole: a reader never sees half of one."""
        content = {
            "what": "check_npu.py --full",
            "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            **self.about,
            "seconds": {**self.seconds, "all": round(time.monotonic() - self.began, 1)},
            "settles": {doubt.text: self.verdict(doubt) for doubt in DOUBTS} if self.is_accelerator else {},
            "lines": [asdict(line) for line in self.lines],
        }
        text = json.dumps(content, indent=1, ensure_ascii=False)
        home = str(Path.home())
        if len(home) > 1:
            text = text.replace(home, "~")  # the name of the account is in every path below it
        unfinished = self.out.with_name(f"{self.out.name}.tmp")
        unfinished.write_text(text + "\n", encoding="utf-8")
        unfinished.replace(self.out)


def tail_of(output: IO[str]) -> str:
    """The end of what a process printed."""
    output.seek(0)
    return output.read()[-TAIL:].strip()


def end_session(process: subprocess.Popen[Any]) -> None:
    """End a process and whatever it has started: a launcher needs a moment to stop its workers."""
    try:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_SECONDS)
    finally:  # also after a second Ctrl-C, which does not wait
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM and SIGHUP (a terminal that is closed) raise SystemExit here, so that a running part is ended too."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    # Under `nohup` a SIGHUP is ignored, and stays so.
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say(text: str) -> None:
    """Print a line; a terminal that was closed must not keep the report from being written."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


SECRET = r"(?i:key|token(?!s|izer)|secret|pass|auth|cred)"


def environment(prefixes: Sequence[str], variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that begin so, without those that hold a secret, and with `...` for a secret within a value."""
    kept = {}
    for name, value in sorted(variables.items()):
        if name.startswith(tuple(prefixes)) and not re.search(r"TOKEN|SECRET|PASS|KEY|AUTH|CRED", name):
            value = re.sub(r"//\S*@", "//...@", value)  # a password in an address
            value = re.sub(rf"([?&][^=&\s]*{SECRET}[^=&\s]*=)[^&\s]*", r"\1...", value)
            kept[name] = mask_flags(value) if "--" in value else value
    return kept


def mask_flags(flags: str) -> str:
    """A command line, as NANOCHAT_CHAT_WEB has one, with `...` for the values of flags that take a secret."""
    try:
        words = shlex.split(flags)
    except ValueError:  # a quotation mark without its second: it is unknown where a value ends
        return "..."
    shown = []
    is_secret = False
    for word in words:
        if word.startswith("--"):
            flag, equals, _ = word.partition("=")
            is_secret = re.search(SECRET, flag) is not None
            shown.append(f"{flag}=..." if is_secret and equals else word)
        else:
            shown.append("..." if is_secret else word)
    return shlex.join(shown)


def run_parts(report: FullReport, kind: str, first: Sequence[str], works: str, is_small: bool = False) -> int:
    """Run `first`, the checks, and then the other parts if its line `works` passed; returns the exit code.

    `is_small`: compute as little as on a CPU, for a simulated device.
    """
    lines = report.run(FIRST, first, PARTS[FIRST])
    is_usable = any(line.name == works and line.outcome == "PASS" for line in lines)
    for part, limit in PARTS.items():
        if part == FIRST:
            continue
        if not is_usable:
            report.skip(part, f"needs `{works}`")
            continue
        command = [sys.executable, "-m", "nanochat.run.full_check", part, "--device", kind]
        report.run(part, [*command, "--small"] if is_small else command, limit)
    return report.finish()
