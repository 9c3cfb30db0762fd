"""`check_npu.py --full`: each part in a process of its own, and what all of them find in one report.json.

This file needs only the standard library, so it also runs where torch does not start. A part appends a line of JSON for
each of its checks to a file. So a part that crashes or hangs loses only the check that it was in, and the next part
starts anyway.
"""

import contextlib
import datetime
import functools
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/ascend.md"
FIRST = "checks"  # the checks of check_npu.py; without a device that works no other part makes sense
# Seconds that a part may take. On a card all of them together take about ten minutes. A part but the first is
# tests/on_device/test_<part>.py.
PARTS = {
    FIRST: 420, "operators": 180, "steps": 240, "decoding": 300, "training": 360, "all_devices": 300, "profile": 360,
}  # fmt: skip
ENDING_SECONDS = 40  # a part that is stopped stops its own processes first
TAIL = 3000  # characters of an output in the report
OUTCOMES = ("PASS", "FAIL", "SKIP")


def commands(kind: str, first: Sequence[str], is_small: bool) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Each part's command, without ON_DEVICE_LINES, and the variables that it needs."""
    variables = {"ON_DEVICE": kind, "ON_DEVICE_SIZES": "small" if is_small or kind == "cpu" else "card"}
    # Without capturing: what a part has printed before it crashed is in the report.
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--capture=no"]
    tests = {part: [*pytest, f"tests/on_device/test_{part}.py"] for part in PARTS if part != FIRST}
    return {part: (command, variables) for part, command in {FIRST: list(first), **tests}.items()}


class FullReport:
    """The lines of all parts, printed as they arrive, and the file that holds them.

    `about` are further entries of the file, such as the versions. `fix_for` knows the fix of an error by its text.
    """

    def __init__(self, out: Path, about: Mapping[str, Any], fix_for: Callable[[str], str | None]):
        self.out = out
        self.about = about
        self.fix_for = fix_for
        self.is_small = False  # small sizes show that a check works, but not what a card does
        self.parts: dict[str, dict[str, Any]] = {}
        self.began = time.monotonic()

    def run(self, part: str, command: Sequence[str], limit: float, variables: Mapping[str, str]) -> None:
        """Run a part for at most `limit` seconds. What goes wrong is a line too."""
        print_line(f"== {part} (at most {limit:g} s)")
        began = time.monotonic()
        entry = self.parts[part] = {"lines": [], "seconds": 0.0, "output": ""}
        interrupted: BaseException | None = None
        is_late = False
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+", errors="replace") as output:
            record = Path(folder) / "lines.jsonl"
            # A session of its own: whatever the part has started ends with it.
            process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **variables, "ON_DEVICE_LINES": str(record)},
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
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
            output.seek(0)
            entry["output"] = output.read()[-TAIL:].strip()
        entry["seconds"] = round(time.monotonic() - began, 1)
        reason = ""
        if interrupted:
            reason = "interrupted"
        elif is_late:
            reason = f"stopped: no end within {limit:g} s"
        elif process.returncode < 0:
            reason = f"ended by signal {-process.returncode}"
        elif process.returncode > 1 or (process.returncode and not self._has_failed(part)):
            reason = f"ended with exit code {process.returncode}"
        elif not entry["lines"]:
            reason = "ran no check"
        if reason:
            outcome = "SKIP" if interrupted else "FAIL"  # the machine did nothing wrong: no fix
            self.add(part, {"name": f"part {part}", "outcome": outcome, "detail": reason}, entry["output"])
        self.write()
        if interrupted:
            print_line(f"interrupted: {self.out} has the lines until now; the same command begins anew")
            raise interrupted

    def _show(self, part: str, record: Path) -> None:
        """Add the lines that are new in a part's file; a process that was killed may have left half a line."""
        text = record.read_text(encoding="utf-8") if record.exists() else ""
        for line in text.splitlines()[len(self.parts[part]["lines"]) :]:
            with contextlib.suppress(ValueError):
                self.add(part, json.loads(line))

    def add(self, part: str, line: dict[str, Any], output: str = "") -> None:
        if line["outcome"] == "FAIL" and not line.get("fix"):
            text = line.get("traceback", "") + line["detail"] + output
            line["fix"] = self.fix_for(text) or "send the report: this line is what it is for"
        self.parts.setdefault(part, {"lines": []})["lines"].append(line)
        seconds = f" ({line['seconds']:.1f} s)" if line.get("seconds") else ""
        print_line(f"{line['outcome']} {line['name']}: {line['detail']}{seconds}")
        if line["outcome"] == "FAIL":
            if line.get("what"):
                print_line(f"     what: {line['what']}")
            print_line(f"     fix: {line['fix']}")
        if line.get("table"):
            print_line(line["table"])

    def _has_failed(self, part: str) -> bool:
        return any(line["outcome"] == "FAIL" for line in self.parts[part]["lines"])

    def passed(self, part: str, name: str) -> bool:
        return any(line["name"] == name and line["outcome"] == "PASS" for line in self.parts[part]["lines"])

    def answers(self) -> list[dict[str, str]]:
        """What the lines until now say about each doubt: yes, no, partly (some checks did not run), or open."""
        found = []
        for starts, doubt in doubts():
            lines = [(line["outcome"], f"{line['name']}: {line['detail']}") for line in self._lines_of(starts)]
            outcomes = {outcome for outcome, _ in lines}
            answer = "partly" if "PASS" in outcomes else "open"
            answer = "yes" if outcomes == {"PASS"} and not self.is_small else answer
            answer = "no" if "FAIL" in outcomes else answer
            worst = [text for outcome, text in lines if outcome == ("FAIL" if answer == "no" else "SKIP")]
            because = "; ".join(worst or [text for _, text in lines]) or "not run"
            found.append({"doubt": doubt, "answer": answer, "because": because})
        return found

    def _lines_of(self, starts: Sequence[str]) -> Iterator[dict[str, Any]]:
        for part, entry in self.parts.items():
            for line in entry["lines"]:
                if line["name"] == f"part {part}":  # it ended early: the rest of its checks did not run
                    if starts[0].partition(".")[0] == part:
                        yield {**line, "outcome": "SKIP"}
                elif longest_start(f"{part}.{line['name']}") in starts:
                    yield line

    def finish(self) -> int:
        """Print the doubts and the counts, and write the file; returns the exit code."""
        sizes = " (PARTLY at most: the sizes were small)" if self.is_small else ""
        print_line(f"== the doubts of docs/ascend.md: does this device do what the page says?{sizes}")
        for row in self.answers():
            print_line(f"{row['answer'].upper()}: {row['doubt']} [{row['because']}]")
        outcomes = [line["outcome"] for part in self.parts.values() for line in part["lines"]]
        counts = {outcome: outcomes.count(outcome) for outcome in OUTCOMES}
        seconds = time.monotonic() - self.began
        print_line(f"{counts['PASS']} passed, {counts['FAIL']} failed, {counts['SKIP']} skipped in {seconds:.0f} s")
        print_line(
            f"please attach {self.out} to an issue of this project, also if nothing failed; look at it first, because "
            "the vendor's tool lists processes"
        )
        self.write()
        return 1 if counts["FAIL"] else 0

    def write(self) -> None:
        """Write the file as a whole: a reader never sees half of one."""
        content = {
            "what": "check_npu.py --full",
            "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            **self.about,
            "seconds": round(time.monotonic() - self.began, 1),
            "doubts": self.answers(),
            "parts": self.parts,
        }
        text = json.dumps(content, indent=1, ensure_ascii=False)
        home = str(Path.home())
        if len(home) > 1:
            text = text.replace(home, "~")  # the name of the account is in every path below it
        unfinished = self.out.with_name(f"{self.out.name}.tmp")
        unfinished.write_text(text + "\n", encoding="utf-8")
        unfinished.replace(self.out)


@functools.cache
def doubts() -> list[tuple[list[str], str]]:
    """The table of docs/ascend.md: each doubt, with what the checks that settle it begin with, such as
    `steps.step[` of the part `steps`."""
    page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""  # someone may copy the project without docs/
    section = page.partition("\n## Ten minutes with a card\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return [(re.findall(r"`(.+?)`", names), re.sub(r" \*\(\w\)\*", "", doubt)) for names, doubt in rows]


def longest_start(check: str) -> str:
    """The one of all doubts' beginnings that belongs to this check; "" if none does."""
    starts = [start for row, _ in doubts() for start in row]
    return max((start for start in starts if check.startswith(start)), key=len, default="")


def run(check_npu: Any, machine: Any, options: Any) -> int:
    """`check_npu.py --full`; `check_npu` is that file as a module. Returns the exit code."""
    kind = machine.kind if options.device == "auto" else options.device
    out = (options.out or Path("report.json")).resolve()
    problem = ("", "")
    if importlib.util.find_spec("pytest") is None:
        problem = (f"pytest is not installed for {sys.executable}", "pip install pytest")
    elif out.is_dir() or not os.access(out.parent, os.W_OK):  # before ten minutes of work
        problem = (f"{out} cannot be written", "--out names a file that can be written")
    if problem[0]:
        print_line(f"FAIL full: {problem[0]}\n     fix: {problem[1]}")
        return 1
    provenance = importlib.import_module("nanochat.ground.provenance")
    name, *arguments = {"npu": ("npu-smi", "info"), "cuda": ("nvidia-smi",), "cpu": ("lscpu",)}[kind]
    tool = check_npu.find_program(options.root, name)
    about = {
        "commit": provenance.commit(),
        "device": kind,
        "machine": asdict(machine),
        "versions": {**provenance.versions(), "numpy": check_npu.installed("numpy"), "CANN": machine.cann},
        "vendor_tool": f"{name} not found",
        "environment": environment(kind, os.environ),
    }
    if tool:
        about["vendor_tool"] = check_npu.run_program([str(check_npu.below(options.root, tool)), *arguments])
    report = FullReport(out, about, lambda text: check_npu.fix_for(text, kind, machine.cann_environment))
    first = [sys.executable, check_npu.__file__, "--device", kind, "--root", str(options.root)]
    with stoppable():
        return run_parts(report, kind, first, works=f"{kind} devices", is_small=options.small)


def run_parts(report: FullReport, kind: str, first: Sequence[str], works: str, is_small: bool) -> int:
    """Run every part, the ones after the first only if its line `works` passed; returns the exit code."""
    report.is_small = is_small or kind == "cpu"
    for part, (command, variables) in commands(kind, first, is_small).items():
        if part == FIRST or report.passed(FIRST, works):
            report.run(part, command, PARTS[part], variables)
        else:
            report.add(part, {"name": f"part {part}", "outcome": "SKIP", "detail": f"needs `{works}`"})
    return report.finish()


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


def print_line(text: str) -> None:
    """Print a line; a terminal that was closed must not keep the report from being written."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


# The report has the variables that begin so: they change what the vendor's libraries and torch do.
VARIABLES: dict[str, list[str]] = json.loads(Path(__file__).with_name("variables.json").read_text())


def environment(kind: str, variables: Mapping[str, str]) -> dict[str, str]:
    """The variables for this kind of device, without what may hold a secret: a name, an address, a query, flags."""
    kept = {}
    prefixes = (*VARIABLES[kind], *VARIABLES["shared"])
    for name, value in sorted(variables.items()):
        if name.startswith(prefixes) and not re.search(r"TOKEN|SECRET|PASS|KEY|AUTH|CRED", name):
            value = re.sub(r"//\S*@", "//...@", value)  # a password in an address
            value = re.sub(r"\?\S*", "?...", value)
            kept[name] = "..." if "--" in value else value  # flags, as NANOCHAT_CHAT_WEB has them
    return kept
