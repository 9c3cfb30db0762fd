"""The report of a run: report.html, a page with plots.

It is a template, filled only from a `RunSummary`: one file without scripts or outside requests. matplotlib draws its
plots as SVG. Jinja escapes every text: samples are a model's words.
"""

import html
import io
import math
import re
import warnings
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

import jinja2
import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from nanochat.ground.paths import SCRIPTS
from nanochat.ground.screen import duration
from nanochat.report.summary import PLACES, Chat, Pairs, Points, RunSummary, Stage

SMOOTH = 1 / 30  # share of a curve on either side of a point that its moving mean covers


@dataclass
class Cell:
    text: str = ""
    detail: str = ""
    share: float | None = None  # from 0 to 1: a bar under the number
    verdict: str = ""  # since the stage before: "rose" or "fell" beyond chance, or "chance"
    change: float = 0.0  # since the stage before


@dataclass
class Table:
    heads: list[str]
    rows: list[list[Cell]]


# ---------------------------------------------------------------------- facts and the chat


def header(summary: RunSummary) -> dict[str, str]:
    """The model, data, time and code of the training, in words; missing facts are "unknown" or left out."""
    devices = [f"{one.world_size} × {one.device} ({one.kind}, {one.dtype})" for one in summary.commands if one.device]
    versions: dict[str, list[str]] = {}
    for stage in summary.stages:
        for name, version in stage.facts.get("versions", {}).items():
            versions.setdefault(name, []).append(version)
    words = {
        "Parameters": [f"{count:,}" for count in summary.fact("parameters") if isinstance(count, int)],
        "Layers": summary.fact("layers"),
        "Vocabulary": [f"{count:,}" for count in summary.fact("vocab_size") if isinstance(count, int)],
        "Context": [f"{count:,} tokens" for count in summary.fact("context") if isinstance(count, int)],
        "Data": summary.fact("data"),
        "Date": [began.replace("T", " ").replace("+00:00", " UTC") for began in sorted(summary.fact("started"))[:1]],
        "Commit": summary.fact("commit") or ["unknown"],
        "Device": devices,
        "System": summary.fact("system"),
        "Versions": [", ".join(f"{name} {'/'.join(dict.fromkeys(found))}" for name, found in versions.items())],
    }
    joined = {name: "; ".join(dict.fromkeys(map(str, values))) for name, values in words.items()}
    return {name: text for name, text in joined.items() if text}


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


def score_table(summary: RunSummary) -> Table:
    """One row per evaluation, one column per stage."""
    stages = [stage for stage in summary.stages if stage.scores or stage.evaluation]

    def numbers(name: str, detail: str, key: str) -> list[Cell]:
        return [Cell(name, detail), *(Cell(_decimals(stage.evaluation.get(key))) for stage in stages)]

    rows = [numbers("bits per byte", "held out", "val_bpb"), numbers("bits per byte", "training", "train_bpb")]
    further = dict.fromkeys(key for stage in stages for key in stage.shares)
    # A base model has shares of a task, such as the stories, without an accuracy.
    named = [[*stage.scores, *(task for task, _ in stage.shares)] for stage in stages]
    for task in dict.fromkeys(chain.from_iterable(named)):
        chance = max(stage.scores.get(task, {}).get("baseline", 0) for stage in stages)  # the accuracy of guessing
        detail = f"chance {chance:.0%}" if chance else ""
        rows.append([Cell(task, detail), *_score_cells([stage.scores.get(task) for stage in stages])])
        rows.append([Cell(PLACES, task), *(Cell(stage.places.get(task, "")) for stage in stages)])
        for key in further:
            if key[0] == task:
                rows.append([Cell(key[1], task), *_score_cells([stage.shares.get(key) for stage in stages])])
    rows += [numbers("ChatCORE", "", "chatcore"), numbers("CORE", "", "core")]
    return Table(
        ["task", *(stage.name for stage in stages)], [row for row in rows if any(cell.text for cell in row[1:])]
    )


def _score_cells(scores: list[dict[str, float] | None]) -> list[Cell]:
    """A cell for each stage: the share, its interval, and whether chance explains the change since the stage before."""
    cells = []
    before: dict[str, float] | None = None
    for score in scores:
        if score is None:
            cells.append(Cell())
            continue
        accuracy = score["accuracy"]
        interval = "–".join(f"{100 * score[end]:.0f}" for end in ("low", "high") if end in score)
        cell = Cell(f"{accuracy:.1%}", interval, accuracy)
        if before and {"low", "high"} <= before.keys() & score.keys():
            # The 95% interval of a difference between two shares. Source: Newcombe 1998, "Interval Estimation for the
            # Difference between Independent Proportions", method 10.
            cell.change = accuracy - before["accuracy"]
            end, start = ("high", "low") if cell.change > 0 else ("low", "high")
            reach = math.hypot(before[end] - before["accuracy"], score[start] - accuracy)
            cell.verdict = "chance" if abs(cell.change) <= reach else "rose" if cell.change > 0 else "fell"
        cells.append(cell)
        before = score
    return cells


def stage_sentences(table: Table) -> list[str]:
    """What each stage changed since the one before, in percentage points: beyond chance, and the most within it."""
    sentences = []
    for column, stage in enumerate(table.heads[1:], 1):
        changed = [(row[column], row[0].text) for row in table.rows if row[column].change]
        changed.sort(key=lambda change: -abs(change[0].change))
        words: dict[bool, list[str]] = {True: [], False: []}
        for cell, name in changed:
            words[cell.verdict == "chance"].append(f"{name} {100 * cell.change:+.1f}")
        if changed:
            within = f"; within it: {', '.join(words[True][:3])}" if words[True] else ""
            sentences.append(f"{stage}: {', '.join(words[False]) or 'nothing'} beyond chance{within}")
    return sentences


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


@dataclass(frozen=True)
class Plot:
    """One metric of all stages, side by side."""

    metric: str
    title: str
    detail: str
    from_zero: bool = True  # the y axis
    smooth: float = SMOOTH  # draw a moving mean over this share of the values to either side; 0: none
    held_out: str | None = None  # the metric of held-out examples, drawn as dots into the same axes


PLOTS = (
    Plot("reward", "Reward", "line: training questions; dots: held-out questions", held_out="eval_reward"),
    Plot("margin", "Preference margin", "chosen less rejected reward; line: training; dots: held out",
         held_out="val_margin"),
    Plot("val_bpb", "Bits per byte", "held-out text of each stage", from_zero=False, smooth=0),
    Plot("lr", "Learning rate", "", smooth=0),
    Plot("tok_per_sec", "Throughput", "tokens a second"),
    Plot("val_accuracy", "Preference accuracy", "held-out replies on the right side", smooth=0),
    Plot("pass_at_k", "Best reply to a question", "mean reward; of rewards of 0 and 1 this is pass@k"),
    Plot("no_signal", "Questions without signal", "share to which all replies are equally good"),
    Plot("entropy", "Entropy", "nats a token"),
    Plot("kl", "KL to the reference", "nats a token"),
    Plot("clipped", "Clipped tokens", "share that the clip stops"),
    Plot("response_tokens", "Length of replies", "tokens"),
    Plot("truncated", "Replies cut off", "share"),
    Plot("sampling_seconds", "Seconds of sampling", "of each step"),
    Plot("training_seconds", "Seconds of training", "of each step"),
)  # fmt: skip
MAIN_PLOTS = 6  # the others, of RL, unfold
LOSS = Plot("loss", "Loss", "", from_zero=False)
# A step of fine-tuning has few targets, and its loss depends on which ones: only a wide mean shows whether it falls.
TUNING_LOSS = replace(LOSS, smooth=1 / 8)

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


def ends(plot: Plot, stage: Stage) -> str:
    """The first value of a stage and its last smoothed value, for the title of its plot.

    Held-out values are preferred: the first value in training comes from one batch, which may be easy or hard.
    """
    held_out = stage.curve(plot.held_out) if plot.held_out else []
    if len(held_out) > 1:
        first, last = held_out[0], held_out[-1]
    else:
        curve = stage.curve(plot.metric)
        first, last = curve[0], smooth(curve, plot.smooth)[-1]
    return f"{short(first[1])} → {short(last[1])}"


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


def _curves(plot: Plot, stages: list[Stage], width: float = 3.0) -> str:
    """Stages side by side, each over its steps: faint values, a bold mean."""
    stages = [stage for stage in stages if stage.curve(plot.metric)]
    curves = [stage.curve(plot.metric) for stage in stages]
    seconds = [stage.training_seconds() for stage in stages]
    shares = [max(part, sum(seconds) / 5) or 1 for part in seconds]  # a short stage is wider than its share
    figure = Figure(figsize=(width, 1.2 + width / 5), layout="constrained")
    panels = figure.subplots(1, len(stages), sharey=True, squeeze=False, width_ratios=shares)[0]
    drawn = []  # all points
    for axes, stage, curve, share in zip(panels, stages, curves, shares, strict=True):
        style: dict[str, Any] = {"color": COLOURS[stage.name], "markersize": 3.5}
        axes.plot(*zip(*curve, strict=True), **style, linewidth=0.8, alpha=0.35)
        style["marker"] = "o" if len(curve) < 12 else ""
        mean = smooth(curve, plot.smooth)
        axes.plot(*zip(*mean, strict=True), **style, linewidth=1.8, gid=f"{plot.metric}-{stage.name}")
        drawn += curve
        if plot.held_out and stage.curve(plot.held_out):
            style |= {"color": COLOURS["text"], "marker": "o", "linewidth": 0}
            axes.plot(*zip(*stage.curve(plot.held_out), strict=True), **style, gid=f"{plot.held_out}-{stage.name}")
        if len(stages) < 3:  # more panels are too narrow
            axes.set_title(ends(plot, stage))
        axes.set_xlabel(stage.name, color=COLOURS[stage.name])
        room = max(1, round(width * share / sum(shares) / 0.6))  # a tick each 0.6 inches
        axes.xaxis.set_major_locator(MaxNLocator(room, steps=[1, 2, 5, 10], integer=True))
        axes.xaxis.set_major_formatter(lambda value, _: short(value))
    # The y axis: from zero, or logarithmic for positive values that span more than a factor of five.
    low = min(y for _, y in drawn)
    high = max(y for _, y in drawn)
    axes = panels[0]
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    if plot.from_zero:
        axes.set_ylim(bottom=min(0, 1.08 * low))
    elif low > 0 and high > 5 * low:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: short(value))
    words = [f"{stage.name} {ends(plot, stage)}" for stage in stages]
    return _svg(figure, plot.metric + "-".join(stage.name for stage in stages), f"{plot.title}: {', '.join(words)}")


# ---------------------------------------------------------------------- the page


def to_html(summary: RunSummary) -> str:
    stages = summary.stages
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about missing glyphs: the browser draws the text
        # Rewards that are a sum of parts, whose names are the user's.
        logged: set[str] = set()
        for stage in stages:
            logged.update(*stage.metrics)
        plots_of_parts = [
            Plot(name, f"Reward: {name.removeprefix('reward/')}", "a part, before its weight")
            for name in sorted(logged)
            if name.startswith("reward/")
        ]
        shown = [plot for plot in PLOTS if any(stage.curve(plot.metric) for stage in stages)]
        plots = {plot: _curves(plot, stages) for plot in [*shown, *plots_of_parts]}
        losses = []
        for stage in stages:
            # The loss of RL stays near zero however good the replies are: advantages are relative to the other replies.
            if stage.name != "rl" and stage.curve("loss"):
                losses.append(_curves(LOSS if stage.name in ("base", "mid") else TUNING_LOSS, [stage], 2.6))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters["duration"] = duration
    scores = score_table(summary)
    text = environment.get_template("report.html").render(
        summary=summary, stage_table=stage_table(summary), score_table=scores, sentences=stage_sentences(scores),
        questions=questions(summary), stage_names=list(SCRIPTS), header=header(summary),
        chats=[stage for stage in stages if stage.conversation], plots=plots, main_plots=PLOTS[:MAIN_PLOTS],
        losses=losses,
    )  # fmt: skip
    # A file holds no lone surrogates, and a page no control characters.
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", " ", text).encode("utf-8", "replace").decode()
