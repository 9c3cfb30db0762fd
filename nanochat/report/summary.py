"""What the folder `runs/` holds about one tag, read into a `RunSummary`.

Missing files and damaged lines are left out, with a note. The text is untrusted (samples are a model's words):
`page.py` escapes it where it writes it.
"""

import contextlib
import json
import os
import platform
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from nanochat.conversation import text_of
from nanochat.shell.cli import UserError
from nanochat.shell.paths import STAGES, base_dir, run_dir

Parsed = TypeVar("Parsed")
Points = list[tuple[float, float]]
Pairs = tuple[tuple[str, str], ...]

CURVE_POINTS = 300  # about as many as a plot shows


@dataclass(frozen=True)
class Chat:
    """One question and a model's reply."""

    task: str
    messages: Pairs  # (role, text)
    reply: Pairs  # (kind, text); the kinds are text, python and python_output
    correct: bool | None


@dataclass(frozen=True)
class Command:
    """One finished command: a line that `shell.log.record` wrote."""

    script: str
    command: str
    stage: str
    tag: str | None  # None: it serves every run, such as training a tokenizer
    seconds: float
    started: str
    world_size: int = 1
    device: str = ""
    kind: str = ""
    dtype: str = ""


@dataclass
class Stage:
    """The files of one stage."""

    name: str
    metrics: list[dict[str, float]] = field(default_factory=list)  # by step
    evaluation: dict[str, float] = field(default_factory=dict)  # the numbers of eval.json and chat_eval.json
    samples: list[str] = field(default_factory=list)
    scores: dict[str, dict[str, float]] = field(default_factory=dict)  # task -> accuracy, low, high, baseline
    chats: list[Chat] = field(default_factory=list)

    def add_evaluation(self, values: Any) -> None:
        """What `base_eval` wrote."""
        self.samples = [sample for sample in values.get("samples", []) if isinstance(sample, str)]
        self.evaluation |= _numbers(values)
        if self.evaluation.get("stories"):
            share = self.evaluation["stories_passed"] / self.evaluation["stories"]
            self.scores["stories"] = {"accuracy": share}

    def add_chat_evaluation(self, values: Any) -> None:
        """What `chat_eval` wrote."""
        chats = []
        for sample in values.get("samples", []):
            messages = tuple((str(message["role"]), text_of(message["content"])) for message in sample["messages"])
            reply = tuple((part["type"], part["text"]) for part in sample["reply"])
            chats.append(Chat(str(sample["task"]), messages, reply, sample["correct"]))
        scores = {task: _numbers(score) for task, score in values["tasks"].items()}
        self.chats = chats
        self.scores |= {task: score for task, score in scores.items() if "accuracy" in score}
        self.evaluation |= _numbers({"chatcore": values.get("chatcore")})

    def values(self, key: str) -> list[float]:
        return [line[key] for line in self.metrics if key in line]

    def last(self, key: str) -> float | None:
        values = self.values(key)
        return values[-1] if values else None

    def curve(self, key: str) -> Points:
        """A metric over training seconds, thinned out."""
        points = []
        now = 0.0
        for line in self.metrics:
            now = max(now, line.get("seconds", now))
            if key in line:
                points.append((now, line[key]))
        stride = len(points) // CURVE_POINTS + 1
        return points[:-1:stride] + points[-1:]

    @property
    def val_bpb(self) -> float | None:
        return self.evaluation.get("val_bpb", self.last("val_bpb"))


@dataclass
class RunSummary:
    """All that is known about one tag."""

    tag: str
    stages: list[Stage]  # in the order of the pipeline
    commands: list[Command]  # in the order in which they finished
    machine: dict[str, str]  # what computed, and where the report was made
    notes: list[str]  # what is missing or damaged

    def seconds_by_stage(self) -> dict[str, float]:
        """The time of each stage's finished commands, in the order of the pipeline.

        Training counts at least its training seconds: a run that has not finished, or was killed, has no command.
        """
        spent: dict[tuple[str, str], float] = defaultdict(float)  # (stage, script) -> seconds
        for command in self.commands:
            spent[command.stage, command.script] += command.seconds
        for stage in self.stages:
            training = (stage.name, STAGES[stage.name])
            spent[training] = max(spent[training], stage.last("seconds") or 0)
        others = [stage for stage, _ in spent if stage not in STAGES]  # such as the tokenizer, which is first
        seconds = dict.fromkeys([*others, *STAGES], 0.0)
        for (stage, _), value in spent.items():
            seconds[stage] += value
        return {name: total for name, total in seconds.items() if total}


def newest_tag() -> str:
    """The tag written last, in any stage.

    Raises UserError: when there is no run.
    """
    runs = base_dir() / "runs"
    files = [file for stage in STAGES for file in runs.glob(f"{stage}/*/*.json*")]
    if not files:
        raise UserError(f"there is no run in {runs} to report: make one with `python -m scripts.base_train`")
    return max(files, key=lambda file: file.stat().st_mtime).parent.name


def collect(tag: str) -> RunSummary:
    """Read everything about one tag below the base folder.

    Raises UserError: when there is nothing.
    """
    runs = base_dir() / "runs"
    notes: list[str] = []
    read = [_read_stage(name, run_dir(name, tag), notes) for name in STAGES]
    stages = [stage for stage in read if stage.metrics or stage.evaluation or stage.scores]
    finished = _parsed(runs / "commands.jsonl", lambda line: Command(**line), notes)
    if not stages and tag not in [command.tag for command in finished]:
        raise UserError(
            f"--model_tag {tag}: {runs} has no run of it: run `python -m scripts.base_train --model_tag {tag}` first"
        )
    shared = {command.script: command for command in finished if command.tag is None}  # the newest of each script
    commands = [command for command in finished if command.tag == tag or command is shared.get(command.script)]

    missing = [stage.name for stage in read if stage not in stages]
    if missing:
        notes.append(f"no run of {', '.join(missing)}")
    devices = [f"{one.world_size} × {one.device} ({one.kind}, {one.dtype})" for one in commands if one.device]
    machine = {"computed on": "; ".join(dict.fromkeys(devices))} if devices else {}
    return RunSummary(tag, stages, commands, machine | _machine(), notes)


def _read_stage(name: str, folder: Path, notes: list[str]) -> Stage:
    stage = Stage(name)
    by_step = {line["step"]: line for line in _parsed(folder / "metrics.jsonl", _metrics, notes)}
    stage.metrics = [by_step[step] for step in sorted(by_step)]
    _parsed(folder / "eval.json", stage.add_evaluation, notes)
    _parsed(folder / "chat_eval.json", stage.add_chat_evaluation, notes)
    return stage


# ---------------------------------------------------------------------- parsing untrusted files


def _parsed(path: Path, parse: Callable[[Any], Parsed], notes: list[str]) -> list[Parsed]:
    """What `parse` returns for each line of a .jsonl file, or for a whole .json file; a note counts what it refuses."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    parsed = []
    damaged = 0
    for part in text.split("\n") if path.suffix == ".jsonl" else [text]:
        if part.strip():
            try:
                parsed.append(parse(json.loads(part)))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                damaged += 1
    if damaged:
        notes.append(f"{path.relative_to(base_dir())}: damaged lines skipped: {damaged}")
    return parsed


def _metrics(line: Any) -> dict[str, float]:
    numbers = _numbers(line)
    if "peak_memory_bytes" in numbers:
        numbers["peak_memory_gib"] = numbers["peak_memory_bytes"] / 2**30
    if "step" not in numbers:
        raise KeyError("step")
    return numbers


def _numbers(values: Any) -> dict[str, float]:
    """The numbers of a JSON object that can be drawn: no NaN, nothing infinite."""
    numbers = {}
    for key, value in values.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30:
            numbers[key] = float(value)
    return numbers


# ---------------------------------------------------------------------- this machine


def _machine() -> dict[str, str]:
    """Where the report is made; no device is touched."""
    machine = {"system": f"{platform.platform()}, {os.cpu_count()} cores", "Python": platform.python_version()}
    for package in metadata.distributions():
        name = package.metadata["Name"] or ""
        if re.split("[-_]", name)[0] in ("nanochat", "torch"):  # with the package of an accelerator
            machine[name] = package.version
    git = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--exclude=*"]
    root = Path(__file__).resolve().parents[2]
    if (root / ".git").exists():
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # no git
            commit = subprocess.run(git, cwd=root, capture_output=True, text=True, timeout=10, check=True).stdout
            machine["commit"] = commit.strip()
    return machine
