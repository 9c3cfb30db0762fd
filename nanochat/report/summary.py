"""The report of one run: what `runs/` holds about a tag, as a page to look at and a Markdown file to read.

`collect(tag)` reads metrics, evaluations, finished commands and this machine into a `RunSummary`; `to_markdown` and
`report_page.to_html` are functions of that alone. What is missing is left out with a note. What is read is untrusted
(samples are a model's words) and escaped where it is written.
"""

import contextlib
import json
import math
import os
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple, TypeVar

from nanochat.conversation import text_of
from nanochat.shell.cli import UserError
from nanochat.shell.log import duration
from nanochat.shell.paths import STAGES, base_dir, run_dir, safe_tag

Parsed = TypeVar("Parsed")
Points = list[tuple[float, float]]
Pairs = tuple[tuple[str, str], ...]

VERDICTS = {True: " ✓", False: " ✗", None: ""}

# ---------------------------------------------------------------------- what a report is made of


class Chat(NamedTuple):
    """One question and the model's reply."""

    task: str
    messages: Pairs  # (role, text)
    reply: Pairs  # (kind, text); the kinds are text, python and python_output
    correct: bool | None


class Command(NamedTuple):
    """One finished command."""

    script: str
    line: str
    stage: str
    seconds: float
    computed_on: str


@dataclass
class Stage:
    """What one stage left behind."""

    name: str
    metrics: list[dict[str, float]] = field(default_factory=list)  # by step
    evaluation: dict[str, float] = field(default_factory=dict)  # the numbers of eval.json, and chatcore
    samples: list[str] = field(default_factory=list)
    scores: dict[str, dict[str, float]] = field(default_factory=dict)  # task -> accuracy, low, high, baseline
    chats: list[Chat] = field(default_factory=list)

    def values(self, key: str) -> list[float]:
        return [line[key] for line in self.metrics if key in line]

    def last(self, key: str) -> float | None:
        return next(reversed(self.values(key)), None)

    def curve(self, key: str) -> Points:
        """Some 300 points over training seconds (steps where those are unknown)."""
        points, now, clock = [], 0.0, "seconds" if self.last("seconds") else "step"
        for line in self.metrics:
            now = max(now, line.get(clock, now))
            if key in line:
                points.append((now, line[key]))
        return points[: -1 : len(points) // 300 + 1] + points[-1:]

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
        """Time of finished commands; training counts at least its training seconds, as while it is going on."""
        spent: dict[str, dict[str, float]] = {}
        for command in self.commands:
            scripts = spent.setdefault(command.stage, {})
            scripts[command.script] = scripts.get(command.script, 0) + command.seconds
        for stage in self.stages:
            scripts, script = spent.setdefault(stage.name, {}), STAGES[stage.name]
            scripts[script] = max(scripts.get(script, 0), stage.last("seconds") or 0)
        order = [name for name in spent if name not in STAGES] + list(STAGES)  # the tokenizer comes first
        totals = {name: sum(spent[name].values()) for name in order if name in spent}
        return {name: seconds for name, seconds in totals.items() if seconds > 0}


# ---------------------------------------------------------------------- reading


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
    runs, tag, notes = base_dir() / "runs", safe_tag(tag), list[str]()
    stages = [_stage(name, run_dir(name, tag), notes) for name in STAGES]
    found = [stage for stage in stages if stage.metrics or stage.evaluation or stage.scores]
    finished = _parsed(runs / "commands.jsonl", _command, notes)
    shared = {command.script: command for its_tag, command in finished if its_tag is None}  # the newest of each script
    commands = [command for its_tag, command in finished if its_tag == tag or command is shared.get(command.script)]
    if not found and tag not in dict(finished):
        others = sorted({folder.name for stage in STAGES for folder in runs.glob(f"{stage}/*")})[:9]
        there = f", or report one of {', '.join(others)}" if others else ""
        todo = f"run `python -m scripts.base_train --model_tag {tag}` first{there}"
        raise UserError(f"--model_tag {tag}: nothing to report in {runs}: {todo}")
    missing = [stage.name for stage in stages if stage not in found]
    notes += [f"no run of {', '.join(missing)}"] if missing else []
    notes += [f"no chat evaluation of {stage.name}" for stage in found if not stage.scores and stage.name != "base"]
    done = {command.script for command in commands}
    unfinished = [stage.name for stage in found if stage.metrics and STAGES[stage.name] not in done]
    notes += [f"no finished training on record of {', '.join(unfinished)}: its steps alone count"] if unfinished else []
    devices = dict.fromkeys(command.computed_on for command in commands if command.computed_on)
    machine = ({"computed on": "; ".join(devices)} if devices else {}) | _machine()
    return RunSummary(tag, found, commands, machine, notes)


def _parsed(path: Path, parse: Callable[[Any], Parsed], notes: list[str]) -> list[Parsed]:
    """What `parse` makes of each line of a .jsonl file, or of a whole .json file; a note counts what it refuses."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    parsed, damaged = [], 0
    for part in text.split("\n") if path.suffix == ".jsonl" else [text]:
        try:
            parsed += [parse(json.loads(part))] if part.strip() else []
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            damaged += 1
    if damaged:
        what = "damaged" if path.suffix == ".json" else f"{damaged} damaged line{'s' * (damaged > 1)} skipped"
        notes.append(f"{path.relative_to(base_dir())}: {what}")
    return parsed


def _stage(name: str, folder: Path, notes: list[str]) -> Stage:
    by_step = {line["step"]: line for line in _parsed(folder / "metrics.jsonl", _metrics, notes)}
    stage = Stage(name, [by_step[step] for step in sorted(by_step)])
    for evaluation in _parsed(folder / "eval.json", _evaluation, notes):
        stage.evaluation, stage.samples = evaluation
    for chatcore, scores, chats in _parsed(folder / "chat_eval.json", _chat_evaluation, notes):
        stage.evaluation, stage.scores, stage.chats = stage.evaluation | chatcore, scores, chats
    return stage


def _metrics(line: Any) -> dict[str, float]:
    numbers = _numbers(line)
    if "peak_memory_bytes" in numbers:
        numbers["peak_memory_gib"] = numbers["peak_memory_bytes"] / 2**30
    return numbers | {"step": numbers["step"]}


def _evaluation(values: Any) -> tuple[dict[str, float], list[str]]:
    return _numbers(values), [_text(sample) for sample in values.get("samples", [])]


def _chat_evaluation(values: Any) -> tuple[dict[str, float], dict[str, dict[str, float]], list[Chat]]:
    """ChatCORE, the scores by task, the conversations."""
    scores = {_text(task)[:40]: _numbers(score) for task, score in values["tasks"].items()}
    chats = []
    for sample in values.get("samples", []):
        messages = tuple((_text(part["role"]), _text(text_of(part["content"]))) for part in sample["messages"])
        reply = tuple((_text(part["type"]), _text(part["text"])) for part in sample["reply"])
        correct = sample.get("correct") if isinstance(sample.get("correct"), bool) else None
        chats.append(Chat(_text(sample["task"])[:40], messages, reply, correct))
    chatcore = {key: value for key, value in _numbers(values).items() if key == "chatcore"}
    return chatcore, {task: score for task, score in scores.items() if "accuracy" in score}, chats


def _command(line: Any) -> tuple[str | None, Command]:
    """The tag and the command."""
    texts = {key: _text(value) for key, value in line.items() if isinstance(value, str)}
    script, numbers = texts["script"], _numbers(line)
    kind = ", ".join(texts[key] for key in ("kind", "dtype") if key in texts)
    computed_on = f"{numbers.get('world_size', 1):.0f} × {texts['device']} ({kind})" if "device" in texts else ""
    stage, seconds = texts.get("stage") or script, max(0.0, numbers["seconds"])
    return texts.get("tag"), Command(script, texts.get("command", script), stage, seconds, computed_on)


def _numbers(values: Any) -> dict[str, float]:
    """The numbers of a JSON object that can be drawn: no NaN, nothing endless."""
    numbers = {k: v for k, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return {key: float(value) for key, value in numbers.items() if abs(value) < 1e30}


def _text(text: str) -> str:
    """Text that every file can hold: no control characters, no halves of characters."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", " ", text).encode("utf-8", "replace").decode()


def _machine() -> dict[str, str]:
    """Where the report is made; no device is touched."""
    cpuinfo, root = Path("/proc/cpuinfo"), Path(__file__).resolve().parent.parent
    named = re.search(r"^model name\s*:\s*(.+)", cpuinfo.read_text(errors="replace") if cpuinfo.is_file() else "", re.M)
    cpu = named[1] if named else platform.processor() or platform.machine()
    facts = {"system": platform.platform(), "processor": f"{cpu}, {os.cpu_count()} cores"}
    facts["memory"] = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.3g} GiB"
    versions = {found.metadata["Name"] or "": found.version for found in metadata.distributions()}
    ours = sorted(name for name in versions if re.fullmatch(r"torch([-_]\w+)?|nanochat", name))
    facts |= {"Python": platform.python_version()} | {name: versions[name] for name in ours}
    if (root / ".git").exists():
        git = ["git", "--no-optional-locks", "-C", os.fspath(root), "describe", "--always", "--dirty", "--exclude=*"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            facts["commit"] = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return {key: _text(value) for key, value in facts.items()}


# ---------------------------------------------------------------------- numbers and tables


class Cell(NamedTuple):
    text: str
    detail: str = ""
    share: float | None = None  # drawn as a bar behind the number
    best: bool = False  # of its row


Table = tuple[list[str], list[list[Cell]]]  # heads; rows


def headline(summary: RunSummary) -> list[tuple[str, str, str]]:
    """What came out, as (number, what it is, detail); at most five."""
    numbers = []
    if stage := next((stage for stage in summary.stages if stage.val_bpb is not None), None):
        start = next((f"; {value:.2f} at first" for value in stage.values("val_bpb")[:-1]), "")
        numbers.append((f"{stage.val_bpb:.3f}", "bits per byte", f"{stage.name}, held out{start}"))
    told: dict[str, float] = {}  # stage -> share of its stories that hold together
    for stage in summary.stages:
        if of := stage.evaluation.get("stories"):
            told[stage.name] = stage.evaluation.get("stories_passed", 0) / of
        if score := stage.scores.get("stories"):
            told[stage.name] = score["accuracy"]
    if told:
        *earlier, last = told
        before = "".join(f"; {name} {told[name]:.0%}" for name in earlier)
        numbers.append((f"{told[last]:.0%}", "stories hold together", f"{last}{before}"))
    if evaluated := [stage for stage in summary.stages if stage.scores]:
        shared = [task for task in evaluated[0].scores if all(task in stage.scores for stage in evaluated)]
        means = {s.name: fmean(s.scores[task]["accuracy"] for task in shared or s.scores) for s in evaluated}
        best = max(means, key=lambda name: means[name])
        others = ", ".join(f"{name} {mean:.0%}" for name, mean in means.items() if name != best)
        detail = f"mean of {'shared' if shared and others else 'its'} tasks{others and f'; {others}'}"
        numbers.append((f"{means[best]:.0%}", f"accuracy after {best}", detail))
    rl = next((stage for stage in summary.stages if stage.name == "rl"), Stage("rl"))
    held_out, training = rl.values("reward_before")[:1] + rl.values("eval_reward"), rl.values("reward")
    if len(held_out) > 1:
        when = "before and after" if rl.values("reward_before") else "first and last evaluation"
        numbers.append((f"{held_out[0]:.2f} → {held_out[-1]:.2f}", "RL reward", f"held-out questions, {when}"))
    elif len(training) > 1:
        few = len(training) // 10 + 1
        ends = f"{fmean(training[:few]):.2f} → {fmean(training[-few:]):.2f}"
        numbers.append((ends, "RL reward", "training questions, first and last tenth of the steps"))
    if times := summary.seconds_by_stage():
        steps = sum(stage.last("seconds") or 0 for stage in summary.stages)
        numbers.append((duration(sum(times.values())), "in all", f"{duration(steps)} of it training steps"))
    return numbers


def stage_table(summary: RunSummary) -> Table:
    """What each stage did and how long it took; columns nobody filled are left out."""
    times, stages = summary.seconds_by_stage(), {stage.name: stage for stage in summary.stages}
    rows: list[dict[str, str]] = []
    for name in [*(name for name in times if name not in stages), *stages]:
        stage, seconds = stages.get(name, Stage(name)), times.get(name, 0)
        step, tokens = stage.last("step"), in_a_word(stage, "tokens", "last")
        row = {"stage": name, "steps": "" if step is None else f"{step + 1:,.0f}", "tokens": tokens}
        values = {"loss": stage.last("loss"), "val loss": stage.last("val_loss"), "val bpb": stage.val_bpb}
        row |= {head: "" if value is None else f"{value:.4f}" for head, value in values.items()}
        row["tokens/s"], row["GiB"] = (
            in_a_word(stage, "tok_per_sec", "median"),
            in_a_word(stage, "peak_memory_gib", "peak"),
        )
        row["MFU"] = f"{median(mfu):.1%}" if (mfu := stage.values("mfu")) else ""
        row["training"] = duration(stage.last("seconds") or 0) if stage.metrics else ""
        rows.append(row | {"in all": duration(seconds) if seconds else ""})
    heads = [head for head in rows[0] if any(row[head] for row in rows)]
    training = sum(stage.last("seconds") or 0 for stage in summary.stages)
    total = {"stage": "total", "training": duration(training), "in all": duration(sum(times.values()))}
    return heads, [[Cell(row.get(head, "")) for head in heads] for row in [*rows, total]]


def score_table(summary: RunSummary) -> Table:
    """Evaluations: a row a task, a column a stage."""
    stages = [stage for stage in summary.stages if stage.scores or stage.evaluation]
    rows: list[list[Cell]] = []

    def add(name: str, detail: str, cells: Sequence[Cell | None]) -> None:
        shares = [cell.share for cell in cells if cell and cell.share is not None]
        top = max(shares) if len(shares) > 1 else math.nan
        if any(cells):
            rows.append([Cell(name, detail), *(c._replace(best=c.share == top) if c else Cell("") for c in cells)])

    for key, name, detail in (("val_bpb", "bits per byte", "held out"), ("train_bpb", "bits per byte", "training")):
        add(name, detail, [Cell(f"{s.evaluation[key]:.4f}") if key in s.evaluation else None for s in stages])
    counts = [(s.evaluation.get("stories_passed", 0), s.evaluation.get("stories")) for s in stages]
    stories = [Cell(f"{n / of:.1%}", f"{n:.0f}/{of:.0f}", n / of) if of else None for n, of in counts]
    add("stories", "hold together", stories)
    for task in dict.fromkeys(task for stage in stages for task in stage.scores):
        scores = [stage.scores.get(task) for stage in stages]
        chance = max(score.get("baseline", 0) for score in scores if score)
        cells: list[Cell | None] = [None] * len(stages)
        for i, score in enumerate(scores):
            if score:
                ends = [f"{100 * score[end]:.0f}" for end in ("low", "high") if end in score]
                cells[i] = Cell(f"{score['accuracy']:.1%}", "–".join(ends), score["accuracy"])
        add(task, f"chance {chance:.0%}" if chance else "", cells)
    for key, name in (("chatcore", "ChatCORE"), ("core", "CORE")):
        add(name, "", [Cell(f"{s.evaluation[key]:.4f}") if key in s.evaluation else None for s in stages])
    return ["", *(stage.name for stage in stages)], rows


def questions(summary: RunSummary) -> list[list[tuple[str, Chat]]]:
    """Each question once, with the answers to it as (stage, chat); the tasks take turns."""
    asked: dict[tuple[str, Pairs], list[tuple[str, Chat]]] = {}
    for stage in summary.stages:
        for chat in stage.chats:
            asked.setdefault((chat.task, chat.messages), []).append((stage.name, chat))
    turns, ranked = Counter[str](), []
    for (task, _), answers in asked.items():
        turns[task] += 1
        ranked.append((turns[task], answers))
    return [answers for _, answers in sorted(ranked, key=lambda item: item[0])]


def in_a_word(stage: Stage, key: str, how: str) -> str:
    """A stage's values in one word: their last, peak, median or ends; "" where there are none."""
    values = stage.values(key)
    if how == "ends" and values:
        return f"{values[0]:.2f} → {smooth(stage.curve(key))[-1][1]:.2f}"
    return short({"last": values[-1], "peak": max(values), "median": median(values)}[how]) if values else ""


def smooth(points: Points) -> Points:
    """Means over a thirtieth of the curve to either side."""
    reach = len(points) // 30
    return [(x, fmean(y for _, y in points[max(0, i - reach) : i + reach + 1])) for i, (x, _) in enumerate(points)]


def short(value: float | None) -> str:
    """`950`, `12.3K`, `2.87M`, `3.1B`, `4e-5`."""
    if value is None:
        return ""
    size, letter = next((pair for pair in ((1e9, "B"), (1e6, "M"), (1e3, "K")) if value >= pair[0]), (1, ""))
    return f"{value / size:.{3 if value >= 1e-3 else 2}g}{letter}".replace("e-0", "e-")


def clip(text: str, limit: int = 1500) -> str:
    return text if len(text) <= limit else text[:limit].rstrip() + " …"


# ---------------------------------------------------------------------- Markdown


def to_markdown(summary: RunSummary) -> str:
    """The report without plots: numbers, tables, some samples, machine and commands."""
    parts = [f"# nanochat run: {_plain(summary.tag)}"]
    parts.append("\n".join(f"- **{number}** {what} ({detail})" for number, what, detail in headline(summary)))
    for title, (heads, rows) in (("Stages", stage_table(summary)), ("Evaluation", score_table(summary))):
        lines = [[_plain(head) for head in heads], ["---", *["---:"] * (len(heads) - 1)]]
        for row in rows:
            texts = [f"**{_plain(cell.text)}**" if cell.best else _plain(cell.text) for cell in row]
            lines.append([t + (f" ({_plain(c.detail)})" if c.detail else "") for t, c in zip(texts, row, strict=True)])
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        parts += [f"## {title}\n\n{table}"] if rows else []
    blocks = [[f"**{stage.name}**", text] for stage in summary.stages for text in map(_plain, stage.samples[:2])]
    for answers in questions(summary)[:4]:
        block = [f"**{_plain(role)}** {_plain(text)}" for role, text in answers[0][1].messages]
        for name, chat in answers:
            reply = " ".join(("" if kind == "text" else f"[{_plain(kind)}] ") + _plain(t) for kind, t in chat.reply)
            block.append(f"**{name}{VERDICTS[chat.correct]}** {reply}")
        blocks.append(block)
    if blocks:
        parts.append("## Samples\n\n" + "\n\n".join("> " + "\n>\n> ".join(block) for block in blocks))
    parts.append("## Machine\n\n" + "\n".join(f"- {_plain(k)}: {_plain(v)}" for k, v in summary.machine.items()))
    if summary.commands:
        text = "\n".join(f"{command.line}  # {duration(command.seconds)}" for command in summary.commands)
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
        parts.append(f"## Commands\n\n{fence}bash\n{text}\n{fence}")
    if summary.notes:
        parts.append(f"Left out: {_plain('; '.join(summary.notes))}.")
    return "\n\n".join(parts) + "\n"


def _plain(text: str) -> str:
    """Text in one line that Markdown shows as it is."""
    text = re.sub(r"([\\`*_\[\]|~$#])", r"\\\1", " ".join(clip(text).split()))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
