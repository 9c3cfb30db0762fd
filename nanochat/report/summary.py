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
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from nanochat.conversation import text_of
from nanochat.shell.cli import UserError
from nanochat.shell.paths import STAGES, base_dir, run_dir, safe_tag

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
    """One finished command."""

    script: str
    line: str
    stage: str
    tag: str | None  # None: it serves every run, such as training a tokenizer
    seconds: float
    computed_on: str


@dataclass
class Stage:
    """The files of one stage."""

    name: str
    metrics: list[dict[str, float]] = field(default_factory=list)  # by step
    evaluation: dict[str, float] = field(default_factory=dict)  # the numbers of eval.json, and chatcore
    samples: list[str] = field(default_factory=list)
    scores: dict[str, dict[str, float]] = field(default_factory=dict)  # task -> accuracy, low, high, baseline
    chats: list[Chat] = field(default_factory=list)

    def values(self, key: str) -> list[float]:
        return [line[key] for line in self.metrics if key in line]

    def last(self, key: str) -> float | None:
        values = self.values(key)
        return values[-1] if values else None

    def curve(self, key: str) -> Points:
        """A metric over training seconds, or over steps where those are unknown, thinned out."""
        clock = "step" if self.last("seconds") is None else "seconds"
        points = []
        now = 0.0
        for line in self.metrics:
            now = max(now, line.get(clock, now))
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
    notes: list[str]  # what was left out

    def seconds_by_stage(self) -> dict[str, float]:
        """The time of each stage's finished commands, in the order of the pipeline.

        Training counts at least its training seconds: a run that has not finished, or was killed, has no command.
        """
        spent: dict[str, dict[str, float]] = {}  # stage -> script -> seconds
        for command in self.commands:
            scripts = spent.setdefault(command.stage, {})
            scripts[command.script] = scripts.get(command.script, 0) + command.seconds
        for stage in self.stages:
            scripts = spent.setdefault(stage.name, {})
            script = STAGES[stage.name]
            scripts[script] = max(scripts.get(script, 0), stage.last("seconds") or 0)
        seconds = {}
        for name in [name for name in spent if name not in STAGES] + list(STAGES):  # the tokenizer is first
            total = sum(spent.get(name, {}).values())
            if total > 0:
                seconds[name] = total
        return seconds


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
    tag = safe_tag(tag)
    notes: list[str] = []
    stages = []
    missing = []
    for name in STAGES:
        stage = _read_stage(name, run_dir(name, tag), notes)
        if stage.metrics or stage.evaluation or stage.scores:
            stages.append(stage)
        else:
            missing.append(name)
    finished = _parsed(runs / "commands.jsonl", _command, notes)
    if not stages and tag not in [command.tag for command in finished]:
        raise UserError(
            f"--model_tag {tag}: {runs} has no run of it: run `python -m scripts.base_train --model_tag {tag}` first"
        )
    shared = {command.script: command for command in finished if command.tag is None}  # the newest of each script
    commands = [command for command in finished if command.tag == tag or command is shared.get(command.script)]

    if missing:
        notes.append(f"no run of {', '.join(missing)}")
    for stage in stages:
        if not stage.scores and stage.name != "base":
            notes.append(f"no chat evaluation of {stage.name}")
    scripts = [command.script for command in commands]
    unfinished = [stage.name for stage in stages if stage.metrics and STAGES[stage.name] not in scripts]
    if unfinished:
        notes.append(f"no finished training on record of {', '.join(unfinished)}: its steps alone count")

    machine = {}
    devices = dict.fromkeys(command.computed_on for command in commands if command.computed_on)
    if devices:
        machine["computed on"] = "; ".join(devices)
    return RunSummary(tag, stages, commands, machine | _machine(), notes)


def _read_stage(name: str, folder: Path, notes: list[str]) -> Stage:
    stage = Stage(name)
    by_step = {line["step"]: line for line in _parsed(folder / "metrics.jsonl", _metrics, notes)}
    stage.metrics = [by_step[step] for step in sorted(by_step)]
    for evaluation, samples in _parsed(folder / "eval.json", _evaluation, notes):
        stage.evaluation = evaluation
        stage.samples = samples
    for chatcore, scores, chats in _parsed(folder / "chat_eval.json", _chat_evaluation, notes):
        stage.evaluation = stage.evaluation | chatcore
        stage.scores = scores
        stage.chats = chats
    return stage


# ---------------------------------------------------------------------- parsing untrusted files


def _parsed(path: Path, parse: Callable[[Any], Parsed], notes: list[str]) -> list[Parsed]:
    """What `parse` returns for each line of a .jsonl file, or for a whole .json file; a note counts what it refuses."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    is_lines = path.suffix == ".jsonl"
    parsed = []
    damaged = 0
    for part in text.split("\n") if is_lines else [text]:
        if not part.strip():
            continue
        try:
            parsed.append(parse(json.loads(part)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            damaged += 1
    if damaged:
        what = f"damaged lines skipped: {damaged}" if is_lines else "damaged"
        notes.append(f"{path.relative_to(base_dir())}: {what}")
    return parsed


def _metrics(line: Any) -> dict[str, float]:
    numbers = _numbers(line)
    if "step" not in numbers:
        raise KeyError("step")
    if "peak_memory_bytes" in numbers:
        numbers["peak_memory_gib"] = numbers["peak_memory_bytes"] / 2**30
    return numbers


def _evaluation(values: Any) -> tuple[dict[str, float], list[str]]:
    return _numbers(values), [_text(sample) for sample in values.get("samples", [])]


def _chat_evaluation(values: Any) -> tuple[dict[str, float], dict[str, dict[str, float]], list[Chat]]:
    """ChatCORE, the scores by task, the conversations."""
    scores = {}
    for task, score in values["tasks"].items():
        numbers = _numbers(score)
        if "accuracy" in numbers:
            scores[_text(task)[:40]] = numbers
    chats = []
    for sample in values.get("samples", []):
        messages = tuple((_text(part["role"]), _text(text_of(part["content"]))) for part in sample["messages"])
        reply = tuple((_text(part["type"]), _text(part["text"])) for part in sample["reply"])
        correct = sample.get("correct")
        chats.append(Chat(_text(sample["task"])[:40], messages, reply, correct if isinstance(correct, bool) else None))
    chatcore = {key: value for key, value in _numbers(values).items() if key == "chatcore"}
    return chatcore, scores, chats


def _command(line: Any) -> Command:
    texts = {key: _text(value) for key, value in line.items() if isinstance(value, str)}
    numbers = _numbers(line)
    computed_on = ""
    if "device" in texts:
        kind = ", ".join(texts[key] for key in ("kind", "dtype") if key in texts)
        computed_on = f"{numbers.get('world_size', 1):.0f} × {texts['device']} ({kind})"
    script = texts["script"]
    return Command(
        script, texts.get("command", script), texts.get("stage") or script, texts.get("tag"),
        max(0.0, numbers["seconds"]), computed_on,
    )  # fmt: skip


def _numbers(values: Any) -> dict[str, float]:
    """The numbers of a JSON object that can be drawn: no NaN, nothing infinite."""
    numbers = {}
    for key, value in values.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30:
            numbers[key] = float(value)
    return numbers


def _text(text: str) -> str:
    """Text that every file can hold: no control characters, no lone surrogates."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", " ", text).encode("utf-8", "replace").decode()


# ---------------------------------------------------------------------- this machine


def _machine() -> dict[str, str]:
    """Where the report is made; no device is touched."""
    machine = {"system": f"{platform.platform()}, {os.cpu_count()} cores", "Python": platform.python_version()}
    versions = {found.metadata["Name"] or "": found.version for found in metadata.distributions()}
    for name in sorted(versions):
        if re.fullmatch(r"torch([-_]\w+)?|nanochat", name):
            machine[name] = versions[name]
    root = Path(__file__).resolve().parents[2]
    if (root / ".git").exists():
        git = ["git", "--no-optional-locks", "-C", os.fspath(root), "describe", "--always", "--dirty", "--exclude=*"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # no git
            machine["commit"] = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True).stdout
    return {name: _text(value).strip() for name, value in machine.items()}
