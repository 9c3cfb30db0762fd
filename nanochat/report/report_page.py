"""The report of a run: report.html, a page with plots.

The template has the page's words and is filled only from a `RunSummary`: one file without scripts or outside requests.
matplotlib draws the plots as SVG. Jinja escapes every text: samples are a model's words.
"""

import html
import io
import re
import warnings
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

import jinja2
import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from nanochat.evals.paired import Difference, beyond_chance, paired
from nanochat.ground.paths import SCRIPTS
from nanochat.ground.screen import duration
from nanochat.report.summary import PLACES, Chat, Pairs, Points, RunSummary, Score, Stage, label_of

SMOOTH = 1 / 30  # share of a curve on either side of a point that its moving mean covers


@dataclass
class Cell:
    text: str = ""
    detail: str = ""
    share: float | None = None  # from 0 to 1: a bar under the number
    name: str = ""  # what a sentence calls the share
    difference: Difference | None = None  # since the stage before
    verdict: str = ""  # it "rose" or "fell" beyond chance, or "chance"


@dataclass
class Table:
    heads: list[str]
    rows: list[list[Cell]]


# ---------------------------------------------------------------------- tables


def stage_table(summary: RunSummary) -> Table:
    """One row per stage: its work and its time. Empty columns are left out."""
    seconds = summary.seconds_by_stage()
    stages = {stage.name: stage for stage in summary.stages}
    rows: list[dict[str, str]] = []
    others = [name for name in seconds if name not in stages]
    for name in dict.fromkeys([*others, *stages, *(command.stage for command in summary.commands)]):
        stage = stages.get(name, Stage(name))
        step = stage.last("step")
        tokens = stage.last("tokens")
        rates, memory, mfu = (stage.values(key) for key in ("tok_per_sec", "peak_memory_gib", "mfu"))
        row = {
            "stage": name,
            "steps": "" if step is None else f"{step + 1:,.0f}",
            "tokens": "" if tokens is None else short(tokens),
            "val loss": _decimals(stage.last("val_loss")),
            "tokens/s": short(median(rates)) if rates else "",
            "GiB": short(max(memory)) if memory else "",
            "MFU": f"{median(mfu):.1%}" if mfu else "",
            "training": duration(stage.training_seconds()) if stage.metrics else "",
            "in all": duration(seconds[name]) if name in seconds else "",
            "evaluation": duration(evaluation) if (evaluation := summary.evaluation_seconds(name)) else "",
        }
        rows.append(row)
    heads = [head for head in rows[0] if any(row[head] for row in rows)]
    total = {"stage": "total", "training": duration(sum(stage.training_seconds() for stage in summary.stages))}
    total["evaluation"] = duration(summary.evaluation_seconds())
    rows.append(total | {"in all": duration(sum(seconds.values()))})
    return Table(heads, [[Cell(row.get(head, "")) for head in heads] for row in rows])


def score_table(summary: RunSummary) -> tuple[Table, dict[str, list[Cell]]]:
    """One row per evaluation, one column per stage. Also the cells of each stage that can be compared."""
    stages = [stage for stage in summary.stages if stage.scores or stage.evaluation]

    def numbers(name: str, detail: str, key: str) -> list[Cell]:
        return [Cell(name, detail), *(Cell(_decimals(stage.evaluation.get(key))) for stage in stages)]

    rows = [numbers("bits per byte", "held out", "val_bpb"), numbers("bits per byte", "training", "train_bpb")]
    keys = dict.fromkeys(chain.from_iterable(stage.scores for stage in stages))
    for task in dict.fromkeys(task for task, _ in keys):
        chance = max(stage.scores.get((task, "accuracy"), {}).get("baseline", 0) for stage in stages)  # by guessing
        detail = f"chance {chance:.0%}" if chance else ""
        rows.append([Cell(task, detail), *_score_cells(stages, (task, "accuracy"), task)])
        rows.append([Cell(PLACES, task), *(Cell(stage.places.get(task, "")) for stage in stages)])
        for key in keys:
            if key[0] == task and key[1] != "accuracy":
                name = label_of(key[1])
                rows.append([Cell(name, task), *_score_cells(stages, key, f"{task} {name}")])
    rows += [numbers("ChatCORE", "", "chatcore"), numbers("CORE", "", "core")]
    rows = [row for row in rows if any(cell.text for cell in row[1:])]
    table = Table(["task", *(stage.name for stage in stages)], rows)
    return table, _mark_changes(table)


def _score_cells(stages: list[Stage], key: Score, name: str) -> list[Cell]:
    """A cell for each stage: the share, its interval, of how many questions, and the change since the stage before."""
    cells = []
    before: Stage | None = None
    for stage in stages:
        score = stage.scores.get(key)
        if score is None:
            cells.append(Cell())
            continue
        answers = stage.by_question.get(key, {})
        interval = "–".join(f"{100 * score[end]:.0f}" for end in ("low", "high") if end in score)
        count = score.get("questions", len(answers))
        detail = f"{interval} of {count:.0f}" if count else interval
        cell = Cell(f"{score['accuracy']:.1%}", detail, score["accuracy"], name)
        if before and answers and key in before.by_question:
            cell.difference = paired(before.by_question[key], answers)
        cells.append(cell)
        before = stage
    return cells


def _mark_changes(table: Table) -> dict[str, list[Cell]]:
    """Mark what each stage changed since the one before, by all its rows together: the more rows, the more of them
    differ by chance. Returned: the marked cells of each stage, the largest change first."""
    found = {}
    for column, stage in enumerate(table.heads[1:], 1):
        changes = [(difference, row[column]) for row in table.rows if (difference := row[column].difference)]
        changes.sort(key=lambda change: -abs(change[0].change))
        beyond = beyond_chance([difference.chance for difference, _ in changes])
        for (difference, cell), is_beyond in zip(changes, beyond, strict=True):
            cell.verdict = "chance"
            if is_beyond:
                cell.verdict = "rose" if difference.change > 0 else "fell"
        found[stage] = [cell for _, cell in changes]
    return found


def questions(summary: RunSummary) -> dict[tuple[str, Pairs], dict[str, list[Chat]]]:
    """Each question once: (task, messages) -> stage -> its replies."""
    found: dict[tuple[str, Pairs], dict[str, list[Chat]]] = defaultdict(dict)
    for stage in summary.stages:
        for chat in stage.chats:
            found[chat.task, chat.messages].setdefault(stage.name, []).append(chat)
    return found


# ---------------------------------------------------------------------- numbers as words


def smooth(points: Points, share: float = SMOOTH) -> Points:
    """Means over a share of the curve to either side."""
    reach = int(len(points) * share)
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


# ---------------------------------------------------------------------- plots


# The colours of plots. Each becomes the page's variable of that name, which has a light and a dark value.
COLOURS = {name: f"#c0de{index:02x}" for index, name in enumerate([*SCRIPTS, "text", "quiet", "line"])}
STYLE: Any = {
    "svg.fonttype": "none", "text.parse_math": False, "font.size": 8, "axes.titlesize": 8,
    "axes.titlecolor": COLOURS["text"], "axes.labelweight": "bold", "axes.axisbelow": True, "axes.grid": True,
    "grid.color": COLOURS["line"], "grid.linewidth": 0.6, "xtick.labelcolor": COLOURS["quiet"], "xtick.major.size": 3,
    "xtick.color": COLOURS["line"],
    "ytick.labelcolor": COLOURS["quiet"], "ytick.major.size": 0,
    "axes.spines.left": False, "axes.spines.right": False, "axes.spines.top": False, "axes.spines.bottom": False,
}  # fmt: skip


def ends(stage: Stage, metric: str, smoothing: float, held_out: str = "") -> str:
    """The first value of a stage and its last smoothed value, for the title of its plot.

    Held-out values are preferred: the first value in training comes from one batch, which may be easy or hard.
    """
    points = stage.curve(held_out)
    if len(points) < 2:
        curve = stage.curve(metric)
        points = [curve[0], smooth(curve, smoothing)[-1]]
    return f"{short(points[0][1])} → {short(points[-1][1])}"


def _svg(figure: Figure, name: str, label: str) -> str:
    """A figure as inline SVG, with a label for readers who cannot see it. The page decides fonts, size and colours."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(
            file, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    svg = file.getvalue().partition("<svg")[2]
    svg = re.sub(r' id="[\w.]*_\d+"| xmlns(:xlink)?="[^"]*"', "", svg)  # ids that other plots use too
    for variable, colour in COLOURS.items():
        svg = svg.replace(colour, f"var(--{variable})")
    return f'<svg role="img" aria-label="{html.escape(label)}"{svg}'


def draw(
    stages: list[Stage], metric: str, title: str, from_zero: bool = True, smoothing: float = SMOOTH, held_out: str = "",
    width: float = 3.0,
) -> str:  # fmt: skip
    """One metric of all stages, side by side, each over its steps: faint values, and a bold mean over the share
    `smoothing` of the values to either side. `held_out` is the metric of held-out examples, drawn as dots.

    Empty where no stage has the metric.
    """
    stages = [stage for stage in stages if stage.curve(metric)]
    if not stages:
        return ""
    curves = [stage.curve(metric) for stage in stages]
    seconds = [stage.training_seconds() for stage in stages]
    shares = [max(part, sum(seconds) / 5) or 1 for part in seconds]  # a short stage is wider than its share
    figure = Figure(figsize=(width, 1.2 + width / 5), layout="constrained")
    panels = figure.subplots(1, len(stages), sharey=True, squeeze=False, width_ratios=shares)[0]
    drawn = []  # all points
    for axes, stage, curve, share in zip(panels, stages, curves, shares, strict=True):
        style: dict[str, Any] = {"color": COLOURS[stage.name], "markersize": 3.5}
        axes.plot(*zip(*curve, strict=True), **style, linewidth=0.8, alpha=0.35)
        style["marker"] = "o" if len(curve) < 12 else ""
        mean = smooth(curve, smoothing)
        axes.plot(*zip(*mean, strict=True), **style, linewidth=1.8, gid=f"{metric}-{stage.name}")
        drawn += curve
        if dots := stage.curve(held_out):
            style |= {"color": COLOURS["text"], "marker": "o", "linewidth": 0}
            axes.plot(*zip(*dots, strict=True), **style, gid=f"{held_out}-{stage.name}")
        if len(stages) < 3:  # more panels are too narrow
            axes.set_title(ends(stage, metric, smoothing, held_out))
        axes.set_xlabel(stage.name, color=COLOURS[stage.name])
        room = max(1, round(width * share / sum(shares) / 0.6))  # a tick each 0.6 inches
        axes.xaxis.set_major_locator(MaxNLocator(room, steps=[1, 2, 5, 10], integer=True))
        axes.xaxis.set_major_formatter(lambda value, _: short(value))
    # The y axis: from zero, or logarithmic for positive values that span more than a factor of five.
    low = min(y for _, y in drawn)
    high = max(y for _, y in drawn)
    axes = panels[0]
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    if from_zero:
        axes.set_ylim(bottom=min(0, 1.08 * low))
    elif low > 0 and high > 5 * low:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: short(value))
    words = [f"{stage.name} {ends(stage, metric, smoothing, held_out)}" for stage in stages]
    return _svg(figure, metric + "-".join(stage.name for stage in stages), f"{title}: {', '.join(words)}")


# ---------------------------------------------------------------------- the page


def to_html(summary: RunSummary) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters |= {"duration": duration, "thousands": "{:,}".format}
    scores, changes = score_table(summary)
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about missing glyphs: the browser draws the text
        text = environment.get_template("report.html").render(
            summary=summary, stage_table=stage_table(summary), score_table=scores, changes=changes,
            questions=questions(summary), stage_names=list(SCRIPTS), draw=draw,
            chats=[stage for stage in summary.stages if stage.conversation],
        )  # fmt: skip
    # A file holds no lone surrogates, and a page no control characters.
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", " ", text).encode("utf-8", "replace").decode()
