"""The numbers and tables of a report, computed from a `RunSummary`."""

import itertools
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import NamedTuple

from nanochat.report.summary import Chat, Pairs, Points, RunSummary, Stage
from nanochat.shell.log import duration


class Headline(NamedTuple):
    number: str
    what: str
    detail: str


@dataclass
class Cell:
    text: str = ""
    detail: str = ""
    share: float | None = None  # of 1: a bar under the number
    best: bool = False  # of its row


@dataclass
class Table:
    heads: list[str]
    rows: list[list[Cell]] = field(default_factory=list)

    def has_details(self) -> bool:
        return any(cell.detail for row in self.rows for cell in row[1:])


@dataclass
class Question:
    """One question with the answers of all stages."""

    task: str
    messages: Pairs
    answers: list[tuple[str, Chat]]  # (stage, chat)


# ---------------------------------------------------------------------- the headline


def headline(summary: RunSummary) -> list[Headline]:
    """The results in at most five numbers; those that are not known are left out."""
    found = [_bits_per_byte(summary), _stories(summary), _accuracy(summary), _reward(summary), _time(summary)]
    return [number for number in found if number is not None]


def _bits_per_byte(summary: RunSummary) -> Headline | None:
    for stage in summary.stages:
        if stage.val_bpb is not None:
            earlier = stage.values("val_bpb")[:-1]
            start = f"; {earlier[0]:.2f} at first" if earlier else ""
            return Headline(f"{stage.val_bpb:.3f}", "bits per byte", f"{stage.name}, held out{start}")
    return None


def _stories(summary: RunSummary) -> Headline | None:
    shares: dict[str, float] = {}  # stage -> share of its stories that pass the checker
    for stage in summary.stages:
        if stage.evaluation.get("stories"):
            shares[stage.name] = stage.evaluation.get("stories_passed", 0) / stage.evaluation["stories"]
        if "stories" in stage.scores:
            shares[stage.name] = stage.scores["stories"]["accuracy"]
    if not shares:
        return None
    *earlier, last = shares
    before = "".join(f"; {name} {shares[name]:.0%}" for name in earlier)
    return Headline(f"{shares[last]:.0%}", "stories hold together", f"{last}{before}")


def _accuracy(summary: RunSummary) -> Headline | None:
    evaluated = [stage for stage in summary.stages if stage.scores]
    if not evaluated:
        return None
    shared = [task for task in evaluated[0].scores if all(task in stage.scores for stage in evaluated)]
    means = {}
    for stage in evaluated:
        tasks = shared or list(stage.scores)
        means[stage.name] = fmean(stage.scores[task]["accuracy"] for task in tasks)
    best = max(means, key=lambda name: means[name])
    others = ", ".join(f"{name} {mean:.0%}" for name, mean in means.items() if name != best)
    detail = f"mean of {'shared' if shared else 'its'} tasks; {others}" if others else "mean of its tasks"
    return Headline(f"{means[best]:.0%}", f"accuracy after {best}", detail)


def _reward(summary: RunSummary) -> Headline | None:
    for stage in summary.stages:
        if stage.name != "rl":
            continue
        before = stage.values("reward_before")
        held_out = before[:1] + stage.values("eval_reward")
        training = stage.values("reward")
        if len(held_out) > 1:
            when = "before and after" if before else "first and last evaluation"
            return Headline(f"{held_out[0]:.2f} → {held_out[-1]:.2f}", "RL reward", f"held-out questions, {when}")
        if len(training) > 1:
            tenth = len(training) // 10 + 1
            ends = f"{fmean(training[:tenth]):.2f} → {fmean(training[-tenth:]):.2f}"
            return Headline(ends, "RL reward", "training questions, first and last tenth of the steps")
    return None


def _time(summary: RunSummary) -> Headline | None:
    seconds = sum(summary.seconds_by_stage().values())
    if not seconds:
        return None
    return Headline(duration(seconds), "in all", f"{duration(training_seconds(summary))} of it training steps")


def training_seconds(summary: RunSummary) -> float:
    return sum(stage.last("seconds") or 0 for stage in summary.stages)


# ---------------------------------------------------------------------- tables


def stage_table(summary: RunSummary) -> Table:
    """A row a stage: what it did and how long it took. Columns that are empty are left out."""
    seconds = summary.seconds_by_stage()
    stages = {stage.name: stage for stage in summary.stages}
    rows: list[dict[str, str]] = []
    for name in [*(name for name in seconds if name not in stages), *stages]:
        stage = stages.get(name, Stage(name))
        step = stage.last("step")
        mfu = stage.values("mfu")
        row = {
            "stage": name,
            "steps": "" if step is None else f"{step + 1:,.0f}",
            "tokens": in_a_word(stage, "tokens", "last"),
            "loss": _decimals(stage.last("loss")),
            "val loss": _decimals(stage.last("val_loss")),
            "val bpb": _decimals(stage.val_bpb),
            "tokens/s": in_a_word(stage, "tok_per_sec", "median"),
            "GiB": in_a_word(stage, "peak_memory_gib", "peak"),
            "MFU": f"{median(mfu):.1%}" if mfu else "",
            "training": duration(stage.last("seconds") or 0) if stage.metrics else "",
            "in all": duration(seconds[name]) if name in seconds else "",
        }
        rows.append(row)
    heads = [head for head in rows[0] if any(row[head] for row in rows)]
    total = {"stage": "total", "training": duration(training_seconds(summary))}
    rows.append(total | {"in all": duration(sum(seconds.values()))})
    return Table(heads, [[Cell(row.get(head, "")) for head in heads] for row in rows])


def score_table(summary: RunSummary) -> Table:
    """A row an evaluation, a column a stage."""
    stages = [stage for stage in summary.stages if stage.scores or stage.evaluation]
    table = Table(["", *(stage.name for stage in stages)])

    def add_row(name: str, detail: str, cells: list[Cell]) -> None:
        shares = [cell.share for cell in cells if cell.share is not None]
        if len(shares) > 1:
            for cell in cells:
                cell.best = cell.share == max(shares)
        if any(cell.text for cell in cells):
            table.rows.append([Cell(name, detail), *cells])

    def add_number(name: str, detail: str, key: str) -> None:
        add_row(name, detail, [Cell(_decimals(stage.evaluation.get(key))) for stage in stages])

    add_number("bits per byte", "held out", "val_bpb")
    add_number("bits per byte", "training", "train_bpb")
    add_row("stories", "hold together", [_stories_cell(stage) for stage in stages])
    for task in dict.fromkeys(task for stage in stages for task in stage.scores):
        chance = max(stage.scores.get(task, {}).get("baseline", 0) for stage in stages)
        add_row(task, f"chance {chance:.0%}" if chance else "", [_score_cell(stage, task) for stage in stages])
    add_number("ChatCORE", "", "chatcore")
    add_number("CORE", "", "core")
    return table


def _stories_cell(stage: Stage) -> Cell:
    stories = stage.evaluation.get("stories")
    if not stories:
        return Cell()
    passed = stage.evaluation.get("stories_passed", 0)
    return Cell(f"{passed / stories:.1%}", f"{passed:.0f}/{stories:.0f}", passed / stories)


def _score_cell(stage: Stage, task: str) -> Cell:
    score = stage.scores.get(task)
    if score is None:
        return Cell()
    interval = "–".join(f"{100 * score[end]:.0f}" for end in ("low", "high") if end in score)
    return Cell(f"{score['accuracy']:.1%}", interval, score["accuracy"])


def questions(summary: RunSummary) -> list[Question]:
    """Each question once, with the answers to it; the tasks take turns."""
    by_question: dict[tuple[str, Pairs], Question] = {}
    for stage in summary.stages:
        for chat in stage.chats:
            key = (chat.task, chat.messages)
            question = by_question.setdefault(key, Question(chat.task, chat.messages, []))
            question.answers.append((stage.name, chat))
    by_task: dict[str, list[Question]] = {}
    for question in by_question.values():
        by_task.setdefault(question.task, []).append(question)
    turns = itertools.zip_longest(*by_task.values())
    return [question for turn in turns for question in turn if question is not None]


# ---------------------------------------------------------------------- numbers as words


def in_a_word(stage: Stage, key: str, how: str) -> str:
    """A stage's values in one word: their last, peak, median or ends; "" where there are none."""
    values = stage.values(key)
    if not values:
        return ""
    if how == "ends":
        return f"{values[0]:.2f} → {smooth(stage.curve(key))[-1][1]:.2f}"
    return short({"last": values[-1], "peak": max(values), "median": median(values)}[how])


def smooth(points: Points) -> Points:
    """Means over a thirtieth of the curve to either side."""
    reach = len(points) // 30
    smoothed = []
    for index, (x, _) in enumerate(points):
        near = points[max(0, index - reach) : index + reach + 1]
        smoothed.append((x, fmean(y for _, y in near)))
    return smoothed


def short(value: float) -> str:
    """`950`, `12.3K`, `2.87M`, `3.1B`, `4e-5`."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.{3 if value >= 1e-3 else 2}g}".replace("e-0", "e-")


def _decimals(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
