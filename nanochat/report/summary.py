"""What the folder `runs/` holds about one tag, read into a `RunSummary`.

Missing files and damaged lines are left out, with a note. The text is untrusted: the template escapes it.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from nanochat.conversation import parts_of, text_of
from nanochat.ground.cli import UserError
from nanochat.ground.paths import SCRIPTS, TRAINING_SCRIPTS, base_dir, run_dir

Parsed = TypeVar("Parsed")
Points = list[tuple[float, float]]
Pairs = tuple[tuple[str, str], ...]
Score = tuple[str, str]

CURVE_POINTS = 300  # about as many as a plot shows

# What every task's result in chat_eval.json has. Any other number from 0 to 1 is a further share, with its own row.
RESULT = {"correct", "total", "questions", "accuracy", "low", "high", "baseline", "too_long", "cut_off", "seconds"}

PLACES = "as 1st / 2nd / 3rd+"  # message of a chat


@dataclass(frozen=True)
class Chat:
    """One question and a model's reply."""

    task: str
    messages: Pairs  # (role, text)
    reply: Pairs  # (kind, text); the kinds are text, python and python_output
    correct: bool | None


@dataclass(frozen=True)
class Command:
    """One command: a line that `shell.log.record` wrote."""

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
    first_step: int = 0  # in a training loop: the finished steps when it began
    last_step: int = 0  # and when it ended


@dataclass
class Stage:
    """The files of one stage."""

    name: str
    metrics: list[dict[str, float]] = field(default_factory=list)  # by step
    evaluation: dict[str, float] = field(default_factory=dict)  # the numbers of eval.json and chat_eval.json
    samples: list[str] = field(default_factory=list)
    # (task, "accuracy" or a further share) -> accuracy and, where the result has them, low, high, baseline, questions
    scores: dict[Score, dict[str, float]] = field(default_factory=dict)
    by_question: dict[Score, dict[str, float]] = field(default_factory=dict)  # the same of each question, by its key
    places: dict[str, str] = field(default_factory=dict)  # task -> its accuracy by place in a chat (`by_place`)
    chats: list[Chat] = field(default_factory=list)
    conversation: list[tuple[str, Pairs]] = field(default_factory=list)  # (role, parts): a chat of several turns
    facts: dict[str, str | int] = field(default_factory=dict)  # run.json: configuration, data, time

    def add_facts(self, values: Any) -> None:
        """Add the facts in `run.json`."""
        facts = {name: value for name, value in values.items() if isinstance(value, str | int)}
        versions = [f"{name} {version}" for name, version in values.get("versions", {}).items()]
        self.facts = facts | {"versions": ", ".join(versions)}

    def add_evaluation(self, values: Any) -> None:
        """Add the results of `base_eval`."""
        self.samples = [sample for sample in values.get("samples", []) if isinstance(sample, str)]
        self.evaluation |= _numbers(values)
        if self.evaluation.get("stories"):
            share = self.evaluation["stories_passed"] / self.evaluation["stories"]
            # Not an accuracy: nothing was ordered. The accuracy of `stories` also counts what an order names.
            self.scores["stories", "holds_together"] = {"accuracy": share}

    def add_chat_evaluation(self, values: Any) -> None:
        """Add the results of `chat_eval`."""
        chats = []
        for sample in values.get("samples", []):
            messages = tuple((str(message["role"]), text_of(message["content"])) for message in sample["messages"])
            reply = tuple((part["type"], part["text"]) for part in sample["reply"])
            chats.append(Chat(str(sample["task"]), messages, reply, sample["correct"]))
        for message in values.get("chat", []):
            parts = tuple((part["type"], str(part["text"])) for part in parts_of(message["content"]))
            self.conversation.append((str(message["role"]), parts))
        self.chats = chats
        self.evaluation |= _numbers({"chatcore": values.get("chatcore")})
        for task, result in values["tasks"].items():
            self.places[task] = by_place(result.get("places", ()))
            self.scores |= {(task, name): score for name, score in shares_of(_numbers(result)).items()}
            asked = {name: value for name, value in result.get("settings", {}).items() if name != "max_examples"}
            for name, each in result.get("scores", {}).items():  # questions asked in another way are others
                self.by_question[task, name] = {f"{key} {asked}": score for key, score in _numbers(each).items()}

    def values(self, key: str) -> list[float]:
        return [line[key] for line in self.metrics if key in line]

    def last(self, key: str) -> float | None:
        values = self.values(key)
        return values[-1] if values else None

    def curve(self, key: str) -> Points:
        """A metric over finished steps, thinned out; at 0, the evaluation before the first step."""
        points = [(0.0, line[f"{key}_before"]) for line in self.metrics[:1] if f"{key}_before" in line]
        points += [(line["step"] + 1, line[key]) for line in self.metrics if key in line]
        stride = len(points) // CURVE_POINTS + 1
        return points[:-1:stride] + points[-1:]

    def training_seconds(self) -> float:
        return max((line.get("seconds", 0.0) for line in self.metrics), default=0.0)

    def run_seconds(self, commands: list[Command]) -> float:
        """The time of the training commands, summed over all resumes of the run; at least its training seconds, which
        also count commands that were killed or are still running."""
        trained = [one.seconds for one in commands if one.stage == self.name and one.last_step > one.first_step]
        return max(sum(trained), self.training_seconds())


def by_place(counts: Any) -> str:
    """`96% / 91% / -`: the share of right replies to first, second and later messages, from (right, all) of each."""
    return " / ".join(f"{right / total:.0%}" if total else "-" for right, total in counts)


def label_of(share: str) -> str:
    return share.replace("_", " ").replace("4grams", "4-grams")


def shares_of(score: dict[str, float]) -> dict[str, dict[str, float]]:
    """A task's accuracy and the other shares in its result; `NAME_low` and `NAME_high` are the interval of `NAME`."""
    found = {"accuracy": score} if "accuracy" in score else {}
    for key, value in score.items():
        if key in RESULT or key.endswith(("_low", "_high")) or not 0 <= value <= 1:
            continue
        found[key] = {"accuracy": value}
        found[key] |= {end: score[f"{key}_{end}"] for end in ("low", "high") if f"{key}_{end}" in score}
    return found


@dataclass
class RunSummary:
    """All known facts about one tag."""

    tag: str
    stages: list[Stage]  # in the order of the pipeline
    commands: list[Command]  # in the order in which they finished
    notes: list[str]  # missing or damaged files

    def seconds_by_stage(self) -> dict[str, float]:
        """The time of the run itself, by stage, in the order of the pipeline; evaluations count separately."""
        seconds: dict[str, float] = {}
        for command in self.commands:
            if command.stage not in SCRIPTS:  # such as the tokenizer
                seconds[command.stage] = seconds.get(command.stage, 0.0) + command.seconds
        for name in SCRIPTS:
            stage = next((stage for stage in self.stages if stage.name == name), Stage(name))
            seconds[name] = stage.run_seconds(self.commands)
        return {name: total for name, total in seconds.items() if total}

    def evaluation_seconds(self, stage: str | None = None) -> float:
        """The time of the evaluations of one stage or of all stages."""
        evaluations = [one for one in self.commands if one.stage in SCRIPTS and one.script not in TRAINING_SCRIPTS]
        return sum(one.seconds for one in evaluations if stage in (None, one.stage))

    def fact(self, name: str) -> list[Any]:
        """The facts of the stages under a name, each value once."""
        return list(dict.fromkeys(stage.facts[name] for stage in self.stages if stage.facts.get(name)))

    def reward_parts(self) -> list[str]:
        """The metrics of a reward that is a sum of parts, whose names are the user's."""
        logged: set[str] = set()
        for stage in self.stages:
            logged.update(*stage.metrics)
        return sorted(name for name in logged if name.startswith("reward/"))


def newest_tag() -> str:
    """The tag written last, in any stage.

    Raises UserError: when no run exists.
    """
    runs = base_dir() / "runs"
    files = [file for stage in SCRIPTS for file in runs.glob(f"{stage}/*/*.json*")]
    if not files:
        raise UserError(f"{runs} has no run to report: make one with `python -m scripts.base_train`")
    return max(files, key=lambda file: file.stat().st_mtime).parent.name


def collect(tag: str) -> RunSummary:
    """Read everything about one tag below the base folder.

    Raises UserError: when nothing is found.
    """
    runs = base_dir() / "runs"
    notes: list[str] = []
    read = [_read_stage(name, run_dir(name, tag), notes) for name in SCRIPTS]
    stages = [stage for stage in read if stage.metrics or stage.evaluation or stage.scores]
    finished = _parsed(runs / "commands.jsonl", lambda line: Command(**line), notes)
    if not stages and tag not in [command.tag for command in finished]:
        raise UserError(
            f"--model_tag {tag}: {runs} has no run of it: run `python -m scripts.base_train --model_tag {tag}` first"
        )
    # An earlier run of this tag was moved aside when this one began: its commands are before `started`.
    started = {stage.name: str(stage.facts.get("started", "")) for stage in stages}
    commands = [one for one in finished if one.tag == tag and one.started >= started.get(one.stage, "")]
    # Commands that serve every run, such as the tokenizer's: the newest from before the run began.
    began = min((one for one in started.values() if one), default="")
    before = [one for one in finished if one.tag is None and (not began or one.started <= began)]
    shared = {one.script: one for one in before}
    missing = [stage.name for stage in read if stage not in stages]
    if missing:
        notes.append(f"no run of {', '.join(missing)}")
    return RunSummary(tag, stages, [*shared.values(), *commands], notes)


def _read_stage(name: str, folder: Path, notes: list[str]) -> Stage:
    stage = Stage(name)
    by_step = {line["step"]: line for line in _parsed(folder / "metrics.jsonl", _metrics, notes)}
    stage.metrics = [by_step[step] for step in sorted(by_step)]
    _parsed(folder / "run.json", stage.add_facts, notes)
    _parsed(folder / "eval.json", stage.add_evaluation, notes)
    _parsed(folder / "chat_eval.json", stage.add_chat_evaluation, notes)
    return stage


# ---------------------------------------------------------------------- parsing untrusted files


def _parsed(path: Path, parse: Callable[[Any], Parsed], notes: list[str]) -> list[Parsed]:
    """The results of `parse` for each line of a .jsonl file, or for a whole .json file; a note counts refused lines."""
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
