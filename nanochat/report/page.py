"""A report to look at, report.html, and the same to read, report.md.

Both are templates, filled from a `RunSummary` alone. The page is one file without scripts or outside requests;
matplotlib draws its plots as SVG. Jinja escapes every text in the page, `_markdown` every text in the Markdown: samples
are a model's words.
"""

import io
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat.report import tables
from nanochat.report.summary import Points, RunSummary, Stage
from nanochat.shell.log import duration
from nanochat.shell.paths import STAGES

# ---------------------------------------------------------------------- plots


@dataclass(frozen=True)
class Plot:
    """One metric of all stages, side by side."""

    metric: str
    title: str
    detail: str
    word: str  # the number above each stage: its last, peak, median, or its ends
    from_zero: bool = True  # the y axis
    of_peak: bool = False  # draw each stage's values as a share of its peak
    smooth: bool = True  # draw a moving mean over the values
    dots: str | None = None  # a second metric, drawn into the same axes


PLOTS = (
    Plot("reward", "Reward", "line: training questions; dots: held-out questions", "ends", dots="eval_reward"),
    Plot("margin", "Preference margin", "chosen less rejected reward; line: training; dots: held out", "ends",
         dots="val_margin"),
    Plot("val_bpb", "Bits per byte", "held-out text of each stage", "last", from_zero=False, smooth=False),
    Plot("lr", "Learning rate", "share of its peak, which is above", "peak", of_peak=True, smooth=False),
    Plot("tok_per_sec", "Throughput", "tokens a second; the median is above", "median"),
    Plot("peak_memory_gib", "Peak memory", "GiB", "peak", smooth=False),
    Plot("kl", "KL to the reference", "nats a token", "last"),
    Plot("response_tokens", "Length of replies", "tokens", "last"),
)  # fmt: skip
LOSS = Plot("loss", "", "", "ends", from_zero=False)

# What plots are drawn in. Each colour becomes the page's variable of that name, which has a light and a dark value.
COLOURS = {name: f"#c0de{index:02x}" for index, name in enumerate([*STAGES, "ink", "quiet", "line", "card"])}


def _svg(name: str, width: float, height: float, draw: Callable[[Any], None], left: float = 0.4) -> str:
    """One pair of axes, in inches, as inline SVG."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    settings: Any = {"svg.hashsalt": name, "svg.fonttype": "none", "text.parse_math": False, "font.size": 7.5}
    file = io.StringIO()
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of glyphs that are missing here: the browser draws the text
        figure = FigureCanvasSVG(Figure(figsize=(width, height))).figure
        axes = figure.add_axes((left / width, 0.21 / height, 1 - (left + 0.12) / width, 1 - 0.42 / height))
        axes.spines[:].set_visible(False)
        axes.grid(color=COLOURS["line"], linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(length=0, labelcolor=COLOURS["quiet"], which="both")
        draw(axes)
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=no_metadata)
    # Leave to the page what belongs to it: fonts, the size, colours; and drop ids that another plot has too.
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'font-family: [^;]*; | id="[\w.]*_\d+"| xmlns(:xlink)?="[^"]*"', "", svg)
    svg = re.sub(r'<svg width="\S+" height="\S+"', "<svg", svg)
    for variable, colour in COLOURS.items():
        svg = svg.replace(colour, f"var(--{variable})")
    return svg


def _curves(plot: Plot, stages: list[Stage], width: float, height: float) -> str:
    """Stages side by side, each over its training time: faint values, a bold mean."""
    stages = [stage for stage in stages if stage.values(plot.metric)]
    curves = [stage.curve(plot.metric) for stage in stages]
    total = sum(curve[-1][0] for curve in curves) or 1
    widths = [max(curve[-1][0] / total, 0.2) for curve in curves]  # a short stage is wider than its share

    def draw(axes: Any) -> None:
        left = 0.0
        for stage, curve, stage_width in zip(stages, curves, widths, strict=True):
            per_second = stage_width / (curve[-1][0] or 1)
            top = (max(y for _, y in curve) or 1) if plot.of_peak else 1
            style = {"color": COLOURS[stage.name], "markersize": 3.5}
            axes.plot(*_placed(curve, left, per_second, top), **style, linewidth=0.8, alpha=0.35)
            mean = tables.smooth(curve) if plot.smooth else curve
            style["marker"] = "o" if len(curve) < 12 else ""
            axes.plot(*_placed(mean, left, per_second, top), **style, linewidth=1.8, gid=f"{plot.metric}-{stage.name}")
            if plot.dots and stage.values(plot.dots):
                style |= {"color": COLOURS["ink"], "marker": "o", "gid": f"{plot.dots}-{stage.name}"}
                axes.plot(*_placed(stage.curve(plot.dots), left, per_second, top), **style, linewidth=0)
            place = {"x": left + stage_width / 2, "ha": "center", "transform": axes.get_xaxis_transform()}
            axes.text(y=1.05, s=tables.in_a_word(stage, plot.metric, plot.word), color=COLOURS["ink"], **place)
            axes.text(y=-0.05, s=stage.name, color=COLOURS[stage.name], va="top", weight="bold", **place)
            left += stage_width + 0.03
            if stage is not stages[-1]:
                axes.axvline(left - 0.015, color=COLOURS["line"], linewidth=0.6)
        axes.set_xlim(-0.01, left - 0.02)
        axes.set_xticks([])
        _scale(axes, plot.from_zero)

    return _svg(plot.metric + "-".join(stage.name for stage in stages), width, height, draw)


def _placed(points: Points, left: float, per_second: float, top: float) -> tuple[list[float], list[float]]:
    """The coordinates of a stage's points in axes that several stages share."""
    return [left + per_second * x for x, _ in points], [y / top for _, y in points]


def _scale(axes: Any, from_zero: bool) -> None:
    """The y axis: from zero, or logarithmic for positive values that span more than a factor of five."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

    low, high = axes.dataLim.intervaly
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    if from_zero:
        axes.set_ylim(min(0, 1.08 * low), 1.08 * high or 1)
    elif low > 0 and high > 5 * low:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.minorticks_off()
        axes.set_ylim(low / 1.15, high * 1.15)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tables.short(value)))


def _accuracy(stages: list[Stage]) -> str:
    """A row a task: a dot with its 95% interval for each stage, and a thin line at a random guess."""
    tasks = list(dict.fromkeys(task for stage in stages for task in stage.scores))

    def draw(axes: Any) -> None:
        for index, stage in enumerate(stages):
            shift = (index - (len(stages) - 1) / 2) * min(0.2, 0.7 / len(stages))  # stages do not overlap
            rows = [tasks.index(task) + shift for task in stage.scores]
            scores = list(stage.scores.values())
            colour = COLOURS[stage.name]
            for row, score in zip(rows, scores, strict=True):
                interval = [score.get("low", score["accuracy"]), score.get("high", score["accuracy"])]
                axes.plot(interval, [row, row], color=colour, alpha=0.35, linewidth=2.5)
            axes.plot(
                [score["accuracy"] for score in scores], rows, color=colour, linewidth=0, marker="o", markersize=5,
                markeredgecolor=COLOURS["card"], gid=f"accuracy-{stage.name}",
            )  # fmt: skip
        for row, task in enumerate(tasks):
            chance = max(stage.scores.get(task, {}).get("baseline", 0) for stage in stages)
            axes.plot([chance, chance], [row - 0.4, row + 0.4], color=COLOURS["quiet"], linewidth=0.8)
        axes.grid(visible=False, axis="y")
        axes.set_yticks(range(len(tasks)), [task if len(task) < 18 else f"{task[:16]}…" for task in tasks])
        axes.set_ylim(len(tasks) - 0.45, -0.55)
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100%"])
        axes.set_xlim(-0.02, 1.02)

    left = 0.2 + 0.055 * min(17, max(map(len, tasks)))
    return _svg("accuracy", 4.2, max(1.9, 0.45 + 0.32 * len(tasks)), draw, left)


# ---------------------------------------------------------------------- the page and the Markdown


def to_html(summary: RunSummary) -> str:
    """The whole page."""
    plots = {}
    for plot in PLOTS:
        if any(stage.values(plot.metric) for stage in summary.stages):
            plots[plot] = _curves(plot, summary.stages, 4.2, 1.9)
    evaluated = [stage for stage in summary.stages if stage.scores]
    trained = [stage for stage in summary.stages if stage.values("loss")]
    loss_inches = min(4.2, 8.25 / max(1, len(trained)))  # so many are next to each other
    return _render(
        "report.html", summary, autoescape=True, plots=plots, accuracy=_accuracy(evaluated) if evaluated else None,
        losses=[_curves(LOSS, [stage], loss_inches, 1.2 + 0.15 * loss_inches) for stage in trained],
        loss_inches=loss_inches,
    )  # fmt: skip


def to_markdown(summary: RunSummary) -> str:
    """The report without plots: numbers, tables, some samples, machine and commands."""
    lines = "\n".join(f"{command.line}  # {duration(command.seconds)}" for command in summary.commands)
    longest = max(map(len, re.findall("`+", lines)), default=0)
    fence = "`" * max(3, longest + 1)  # a fence in a command does not close the block
    return _render("report.md", summary, autoescape=False, commands=lines, fence=fence)


def _render(template: str, summary: RunSummary, autoescape: bool, **further: Any) -> str:
    import jinja2

    environment = jinja2.Environment(
        autoescape=autoescape, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters |= {"duration": duration, "clip": _clip, "markdown": _markdown}
    text = Path(__file__).with_name(template).read_text(encoding="utf-8")
    return environment.from_string(text).render(
        summary=summary,
        headline=tables.headline(summary),
        stage_table=tables.stage_table(summary),
        score_table=tables.score_table(summary),
        questions=tables.questions(summary),
        stage_names=list(STAGES),
        verdicts={True: " ✓", False: " ✗", None: ""},
        **further,
    )


def _clip(text: str, limit: int = 1500) -> str:
    return text if len(text) <= limit else text[:limit].rstrip() + " …"


def _markdown(text: str) -> str:
    """Text in one line that Markdown shows as it is."""
    text = re.sub(r"([\\`*_\[\]|~$#])", r"\\\1", " ".join(_clip(text).split()))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
