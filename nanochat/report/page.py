"""The report of a run: report.html, a page with plots.

It is a template, filled only from a `RunSummary`: one file without scripts or outside requests. matplotlib draws its
plots as SVG. Jinja escapes every text: samples are a model's words.
"""

import html
import io
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

import jinja2
import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from nanochat.log import duration
from nanochat.paths import SCRIPTS
from nanochat.report.summary import Chat, Pairs, Points, RunSummary, Stage

SMOOTH = 1 / 30  # share of a curve on either side of a point that its moving mean covers


@dataclass
class Cell:
    text: str = ""
    detail: str = ""
    share: float | None = None  # from 0 to 1: a bar under the number
    best: bool = False  # the best number in its row
    fell: bool = False  # below the 95% interval of an earlier stage


@dataclass
class Table:
    heads: list[str]
    rows: list[list[Cell]]


# ---------------------------------------------------------------------- the headline


def headline(summary: RunSummary) -> Iterator[tuple[str, str, str]]:
    """The results in at most six numbers, each with its name and a detail; unknown numbers are left out."""
    for stage in [stage for stage in summary.stages if stage.val_bpb is not None][:1]:
        earlier = stage.curve("val_bpb")[:-1]
        start = f"; {earlier[0][1]:.2f} at first" if earlier else ""
        yield f"{stage.val_bpb:.3f}", "bits per byte", f"{stage.name}, held out{start}"

    # A story follows the order if it has the name, the kind and the trait that the order names.
    for name, measure in (("stories hold together", "holds together"), ("stories follow the order", "order followed")):
        key = ("stories", measure)
        shares = {stage.name: stage.shares[key] for stage in summary.stages if key in stage.shares}
        if shares:
            *earlier, last = shares
            before = "".join(f"; {stage} {shares[stage]['accuracy']:.0%}" for stage in earlier)
            yield f"{shares[last]['accuracy']:.0%}", name, f"{last}{before}"

    evaluated = [stage for stage in summary.stages if stage.scores and stage.name != "base"]  # it only tells stories
    if evaluated:
        shared = set.intersection(*(set(stage.scores) for stage in evaluated))
        means = {}
        for stage in evaluated:
            means[stage.name] = fmean(stage.scores[task]["accuracy"] for task in shared or stage.scores)
        best = max(means, key=lambda name: means[name])
        others = "".join(f"; {name} {mean:.0%}" for name, mean in means.items() if name != best)
        yield f"{means[best]:.0%}", f"accuracy after {best}", f"mean of {'shared' if shared else 'its'} tasks{others}"

    rl = next((stage for stage in summary.stages if stage.name == "rl"), Stage("rl"))
    held_out = [value for _, value in rl.curve("eval_reward")]
    if len(held_out) > 1:
        ends = f"{held_out[0]:.2f} → {held_out[-1]:.2f}"
        yield ends, "RL reward", "held-out questions, first and last evaluation"

    seconds = sum(summary.seconds_by_stage().values())
    if seconds:
        evaluations = summary.evaluation_seconds()
        more = f"; evaluations of it {duration(evaluations)} more" if evaluations else ""
        yield duration(seconds), "the run", f"{duration(training_seconds(summary))} of it training steps{more}"


def training_seconds(summary: RunSummary) -> float:
    return sum(stage.training_seconds() for stage in summary.stages)


def header(summary: RunSummary) -> dict[str, str]:
    """The model, data, time and code of the training, in words; missing facts are "unknown" or left out."""
    tokens = [f"{stage.last('tokens'):,.0f} in {stage.name}" for stage in summary.stages if stage.last("tokens")]
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
        "Tokens": [", ".join(tokens)] if tokens else [],
        "Date": [summary.began.replace("T", " ").replace("+00:00", " UTC")] if summary.began else [],
        "Commit": summary.fact("commit") or ["unknown"],
        "Device": devices,
        "System": summary.fact("system"),
        "Versions": [", ".join(f"{name} {'/'.join(dict.fromkeys(found))}" for name, found in versions.items())],
    }
    joined = {name: "; ".join(dict.fromkeys(map(str, values))) for name, values in words.items()}
    return {name: text for name, text in joined.items() if text}


def conversation(summary: RunSummary) -> tuple[str, list[tuple[str, Pairs]]]:
    """A title for the chat of the stage that was trained last, and the chat; empty if no stage has one."""
    chats = [stage for stage in summary.stages if stage.conversation]
    if not chats:
        return "", []
    stage = chats[-1]
    title = f"A chat with {stage.name} at the checkpoint's own settings"
    tries = "the first try" if stage.conversation_try == 1 else f"try {stage.conversation_try}, the best so far"
    return f"{title}: {tries}, as it came", stage.conversation


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
        mfu = stage.values("mfu")
        row = {
            "stage": name,
            "steps": "" if step is None else f"{step + 1:,.0f}",
            "tokens": in_a_word(stage, "tokens", "last"),
            "loss": _decimals(last_loss(stage)),
            "val loss": _decimals(stage.last("val_loss")),
            "val bpb": _decimals(stage.val_bpb),
            "tokens/s": in_a_word(stage, "tok_per_sec", "median"),
            "GiB": in_a_word(stage, "peak_memory_gib", "peak"),
            "MFU": f"{median(mfu):.1%}" if mfu else "",
            "training": duration(stage.training_seconds()) if stage.metrics else "",
            "in all": duration(seconds[name]) if name in seconds else "",
            "evaluation": duration(evaluation) if (evaluation := summary.evaluation_seconds(name)) else "",
        }
        rows.append(row)
    heads = [head for head in rows[0] if any(row[head] for row in rows)]
    total = {"stage": "total", "training": duration(training_seconds(summary))}
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
    guessing = chances(stages)
    # A base model has shares of a task, such as the stories, without an accuracy.
    named = [[*stage.scores, *(task for task, _ in stage.shares)] for stage in stages]
    for task in dict.fromkeys(chain.from_iterable(named)):
        detail = f"chance {guessing[task]:.0%}" if guessing.get(task) else ""
        rows.append([Cell(task, detail), *_score_cells([stage.scores.get(task) for stage in stages])])
        for key in further:
            if key[0] == task:
                rows.append([Cell(key[1], task), *_score_cells([stage.shares.get(key) for stage in stages])])
    rows += [numbers("ChatCORE", "", "chatcore"), numbers("CORE", "", "core")]
    return Table(
        ["task", *(stage.name for stage in stages)], [row for row in rows if any(cell.text for cell in row[1:])]
    )


def chances(stages: list[Stage]) -> dict[str, float]:
    """Each task with the accuracy of guessing."""
    tasks = dict.fromkeys(task for stage in stages for task in stage.scores)
    return {task: max(stage.scores.get(task, {}).get("baseline", 0) for stage in stages) for task in tasks}


def _score_cells(scores: list[dict[str, float] | None]) -> list[Cell]:
    """A cell for each stage: the share, its interval, the best one, and where the skill fell since an earlier stage."""
    cells = []
    highest_low = 0.0  # the highest lower end of an interval so far
    known = [score["accuracy"] for score in scores if score]
    for score in scores:
        if score is None:
            cells.append(Cell())
            continue
        accuracy = score["accuracy"]
        interval = "–".join(f"{100 * score[end]:.0f}" for end in ("low", "high") if end in score)
        best = len(known) > 1 and accuracy == max(known)
        cells.append(Cell(f"{accuracy:.1%}", interval, accuracy, best, fell=accuracy < highest_low))
        highest_low = max(highest_low, score.get("low", 0.0))
    return cells


def questions(summary: RunSummary) -> dict[tuple[str, Pairs], dict[str, list[Chat]]]:
    """Each question once: (task, messages) -> stage -> its replies."""
    found: dict[tuple[str, Pairs], dict[str, list[Chat]]] = defaultdict(dict)
    for stage in summary.stages:
        for chat in stage.chats:
            found[chat.task, chat.messages].setdefault(stage.name, []).append(chat)
    return found


# ---------------------------------------------------------------------- numbers as words


def in_a_word(stage: Stage, key: str, how: str, share: float = SMOOTH) -> str:
    """A stage's values in one word: their last, peak, median or ends, with the last smoothed; "" without values."""
    values = [value for _, value in stage.curve(key)] if how == "ends" else stage.values(key)
    if not values:
        return ""
    if how == "ends":
        return f"{values[0]:.2f} → {smooth(stage.curve(key), share)[-1][1]:.2f}"
    return short({"last": values[-1], "peak": max(values), "median": median(values)}[how])


def word_of(plot: "Plot", stage: Stage) -> str:
    """What the title of a plot says about a stage. Where held-out questions are drawn as dots, the first and the last
    value are of these: the first value in training is of a single batch, which may be easy or hard."""
    if plot.dots and plot.word == "ends" and len(stage.curve(plot.dots)) > 1:
        return in_a_word(stage, plot.dots, "ends", 0)
    return in_a_word(stage, plot.metric, plot.word, plot.smooth)


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
    word: str  # the number above each stage: its last, peak, median, or its ends
    from_zero: bool = True  # the y axis
    smooth: float = SMOOTH  # draw a moving mean over this share of the values to either side; 0: none
    dots: str | None = None  # a second metric, drawn into the same axes


PLOTS = (
    Plot("reward", "Reward", "line: training questions; dots: held-out questions", "ends", dots="eval_reward"),
    Plot("margin", "Preference margin", "chosen less rejected reward; line: training; dots: held out", "ends",
         dots="val_margin"),
    Plot("val_bpb", "Bits per byte", "held-out text of each stage", "ends", from_zero=False, smooth=0),
    Plot("lr", "Learning rate", "the peak is above", "peak", smooth=0),
    Plot("tok_per_sec", "Throughput", "tokens a second; the median is above", "median"),
    Plot("peak_memory_gib", "Peak memory", "GiB", "peak", smooth=0),
    Plot("val_accuracy", "Preference accuracy", "held-out replies on the right side", "ends", smooth=0),
    Plot("pass_at_k", "Best reply to a question", "mean reward; of rewards of 0 and 1 this is pass@k", "ends"),
    Plot("no_signal", "Questions without signal", "share to which all replies are equally good", "last"),
    Plot("entropy", "Entropy", "nats a token", "ends"),
    Plot("kl", "KL to the reference", "nats a token", "last"),
    Plot("clipped", "Clipped tokens", "share that the clip stops", "last"),
    Plot("response_tokens", "Length of replies", "tokens", "last"),
    Plot("truncated", "Replies cut off", "share", "last"),
    Plot("sampling_seconds", "Seconds of a step", "line: sampling, with its median; dots: training", "median",
         dots="training_seconds"),
)  # fmt: skip
LOSS = Plot("loss", "Loss", "", "ends", from_zero=False)
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


def loss_plot(stage: Stage) -> Plot | None:
    """How to draw a stage's loss; None where it has no loss to look at."""
    # The loss of RL stays near zero however good the replies are: advantages are relative to the other replies.
    if stage.name == "rl" or not stage.curve("loss"):
        return None
    return LOSS if stage.name in ("base", "mid") else TUNING_LOSS


def last_loss(stage: Stage) -> float | None:
    """The mean of the last losses, as its plot shows it."""
    plot = loss_plot(stage)
    return smooth(stage.curve("loss"), plot.smooth)[-1][1] if plot else None


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
        if plot.dots and stage.curve(plot.dots):
            style |= {"color": COLOURS["text"], "marker": "o", "linewidth": 0}
            axes.plot(*zip(*stage.curve(plot.dots), strict=True), **style, gid=f"{plot.dots}-{stage.name}")
        axes.set_title(word_of(plot, stage))
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
    words = [f"{stage.name} {word_of(plot, stage)}" for stage in stages]
    return _svg(figure, plot.metric + "-".join(stage.name for stage in stages), f"{plot.title}: {', '.join(words)}")


# ---------------------------------------------------------------------- the page


def to_html(summary: RunSummary) -> str:
    """The whole page."""
    stages = summary.stages
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about missing glyphs: the browser draws the text
        # Rewards that are a sum of parts, whose names are the user's.
        logged: set[str] = set()
        for stage in stages:
            logged.update(*stage.metrics)
        plots_of_parts = [
            Plot(name, f"Reward: {name.removeprefix('reward/')}", "a part, before its weight", "ends")
            for name in sorted(logged)
            if name.startswith("reward/")
        ]
        wanted = [*PLOTS, *plots_of_parts]
        shown = [plot for plot in wanted if any(stage.curve(plot.metric) for stage in stages)]
        plots = {plot: _curves(plot, stages) for plot in shown}
        losses = []
        for stage in stages:
            loss = loss_plot(stage)
            if loss is not None:
                losses.append(_curves(loss, [stage], 2.6))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters["duration"] = duration
    chat_title, chat = conversation(summary)
    text = environment.get_template("report.html").render(
        summary=summary, headline=headline(summary), stage_table=stage_table(summary), score_table=score_table(summary),
        questions=questions(summary), stage_names=list(SCRIPTS), header=header(summary), chat_title=chat_title,
        chat=chat, plots=plots, losses=losses, tasks=list(chances(stages).items()),
    )  # fmt: skip
    # A file holds no lone surrogates, and a page no control characters.
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", " ", text).encode("utf-8", "replace").decode()
