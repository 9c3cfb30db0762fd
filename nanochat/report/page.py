"""The page of a run's report: report.html, one file to look at, without scripts or outside requests.

`to_html` is a function of the `RunSummary` alone; matplotlib draws the plots as SVG. What is shown is untrusted
(samples are a model's words) and escaped where it is written.
"""

import io
import re
import warnings
from collections.abc import Callable
from html import escape
from typing import Any

from nanochat.report.summary import (
    VERDICTS,
    Cell,
    RunSummary,
    Stage,
    clip,
    headline,
    in_a_word,
    questions,
    score_table,
    short,
    smooth,
    stage_table,
)
from nanochat.shell.log import duration
from nanochat.shell.paths import STAGES

# ---------------------------------------------------------------------- plots

PLOTS = (  # metric; title; what is drawn; the y axis; the word above each stage
    ("reward", "Reward", "line: training questions; dots: held-out questions", "from zero", "ends"),
    ("margin", "Preference margin", "chosen less rejected reward; line: training; dots: held out", "from zero", "ends"),
    ("val_bpb", "Bits per byte", "held-out text of each stage", "", "last"),
    ("lr", "Learning rate", "share of its peak, which stands above", "share", "peak"),
    ("tok_per_sec", "Throughput", "tokens a second; the median stands above", "from zero", "median"),
    ("peak_memory_gib", "Peak memory", "GiB", "from zero", "peak"),
    ("kl", "KL to the reference", "nats a token", "from zero", "last"),
    ("response_tokens", "Length of replies", "tokens", "from zero", "last"),
)
DOTS = {"reward": "eval_reward", "margin": "val_margin"}  # a second measurement, drawn into the first one's plot
EXACT = ("val_bpb", "lr", "peak_memory_gib")  # drawn as they are; others are smoothed

# What plots are drawn in: each colour becomes the page's variable of that name, which differs in dark and light.
INK = {name: f"#c0de{place:02x}" for place, name in enumerate((*STAGES, "ink", "quiet", "line", "card"))}


def _svg(name: str, width: float, height: float, draw: Callable[[Any], None], left: float = 0.4) -> str:
    """One pair of axes, in inches, as inline SVG."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    settings: Any = {"svg.hashsalt": name, "svg.fonttype": "none", "text.parse_math": False, "font.size": 7.5}
    file, nothing = io.StringIO(), dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # glyphs that are missing here: the browser draws the text
        figure = FigureCanvasSVG(Figure(figsize=(width, height))).figure
        axes = figure.add_axes((left / width, 0.21 / height, 1 - (left + 0.12) / width, 1 - 0.42 / height))
        axes.spines[:].set_visible(False)
        axes.grid(color=INK["line"], linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(length=0, labelcolor=INK["quiet"], which="both")
        draw(axes)
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    svg = re.sub(r"<style.*?</style>", "", file.getvalue()[file.getvalue().index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'font-family: [^;]*; | id="[\w.]*_\d+"| xmlns(:xlink)?="[^"]*"', "", svg)
    svg = re.sub(r'<svg width="\S+" height="\S+"', "<svg", svg)
    for ink, colour in INK.items():
        svg = svg.replace(colour, f"var(--{ink})")
    return svg


def _curves(stages: list[Stage], key: str, width: float, height: float, axis: str, word: str) -> str:
    """Stages side by side, each over its training time, a short one wider than its share: faint values, a bold mean."""
    stages = [stage for stage in stages if stage.values(key)]
    curves = [stage.curve(key) for stage in stages]
    total = sum(curve[-1][0] for curve in curves) or 1
    shares = [max(curve[-1][0] / total, 0.2) for curve in curves]

    def draw(axes: Any) -> None:
        start, drawn = 0.0, []
        for stage, curve, share in zip(stages, curves, shares, strict=True):
            end, top = curve[-1][0] or 1, (max(y for _, y in curve) if axis == "share" else 1) or 1
            mean, dots = curve if key in EXACT else smooth(curve), stage.curve(DOTS[key]) if key in DOTS else []
            bold = {"linewidth": 1.8, "marker": "o" if len(curve) < 12 else "", "gid": f"{key}-{stage.name}"}
            dotted = {"linewidth": 0, "marker": "o", "color": INK["ink"], "gid": f"{DOTS.get(key)}-{stage.name}"}
            for points, style in ((curve, {"linewidth": 0.8, "alpha": 0.35}), (mean, bold), (dots, dotted)):
                if points:
                    drawn += (heights := [y / top for _, y in points])
                    places = [start + share * x / end for x, _ in points]
                    axes.plot(places, heights, **{"color": INK[stage.name], "markersize": 3.5} | style)
            place = {"x": start + share / 2, "ha": "center", "transform": axes.get_xaxis_transform()}
            axes.text(y=1.05, s=in_a_word(stage, key, word), color=INK["ink"], **place)
            axes.text(y=-0.05, s=stage.name, color=INK[stage.name], va="top", weight="bold", **place)
            start += share + 0.03
            if stage is not stages[-1]:
                axes.axvline(start - 0.015, color=INK["line"], linewidth=0.6)
        axes.set_xlim(-0.01, start - 0.02)
        axes.set_xticks([])
        _scale(axes, drawn, bool(axis))

    return _svg(key + "-".join(stage.name for stage in stages), width, height, draw)


def _scale(axes: Any, values: list[float], from_zero: bool) -> None:
    """The y axis: from zero, or logarithmic for positive values that span more than a factor of five."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

    low, high = min(values), max(values)
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    if from_zero:
        axes.set_ylim(min(0, 1.08 * low), 1.08 * high or 1)
    elif low > 0 and high > 5 * low:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.minorticks_off()
        axes.set_ylim(low / 1.15, high * 1.15)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def _accuracy(stages: list[Stage]) -> str:
    """A row a task: a dot with its 95% interval for each stage, and a line where a random guess is."""
    tasks = list(dict.fromkeys(task for stage in stages for task in stage.scores))

    def draw(axes: Any) -> None:
        for place, stage in enumerate(stages):
            shift = (place - (len(stages) - 1) / 2) * min(0.2, 0.7 / len(stages))
            for task, score in stage.scores.items():
                y, middle = tasks.index(task) + shift, score["accuracy"]
                interval = [score.get("low", middle), score.get("high", middle)]
                axes.plot(interval, [y, y], color=INK[stage.name], alpha=0.35, linewidth=2.5)
            rows = [tasks.index(task) + shift for task in stage.scores]
            middles = [score["accuracy"] for score in stage.scores.values()]
            axes.plot(middles, rows, color=INK[stage.name], linewidth=0, marker="o", markersize=5,
                      markeredgecolor=INK["card"], gid=f"accuracy-{stage.name}")  # fmt: skip
        for y, task in enumerate(tasks):
            chance = max(stage.scores[task].get("baseline", 0) for stage in stages if task in stage.scores)
            axes.plot([chance, chance], [y - 0.4, y + 0.4], color=INK["quiet"], linewidth=0.8)
        axes.grid(visible=False, axis="y")
        axes.set_yticks(range(len(tasks)), [task if len(task) < 18 else f"{task[:16]}…" for task in tasks])
        axes.set_ylim(len(tasks) - 0.45, -0.55)
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100%"])
        axes.set_xlim(-0.02, 1.02)

    left = 0.2 + 0.055 * min(17, max(map(len, tasks)))
    return _svg("accuracy", 4.2, max(1.9, 0.45 + 0.32 * len(tasks)), draw, left)


# ---------------------------------------------------------------------- the page

STYLE = """
:root { --base: #2f6bed; --mid: #0f9f8f; --sft: #dd8500; --dpo: #9a63ee; --rl: #e0434f; --other: #9aa0aa;
  --ink: #16181d; --quiet: #6a6f7a; --line: #e6e7ea; --card: #fff; --page: #f6f6f4; --tone: var(--other);
  color-scheme: light dark; }
@media screen and (prefers-color-scheme: dark) { :root { --base: #6f9dff; --mid: #3accb9; --sft: #f3ae3d;
  --dpo: #bd97ff; --rl: #ff7a81; --other: #737a86; --ink: #eceef2; --quiet: #969ca8; --line: #2a2d34;
  --card: #17191e; --page: #0e0f12; } }
* { box-sizing: border-box; margin: 0; }
body { background: var(--page); color: var(--ink); font: 15px/1.55 system-ui, "Segoe UI", Roboto, "Noto Sans",
  "PingFang SC", "Microsoft YaHei", sans-serif; max-width: 1160px; margin: auto; padding: 40px 24px 64px; }
h1 { font-size: 30px; line-height: 1.25; letter-spacing: -.02em; overflow-wrap: anywhere; }
h2 { font-size: 19px; letter-spacing: -.01em; margin: 44px 0 14px; } h3 { font-size: 14px; font-weight: 600; }
small, .quiet { color: var(--quiet); font-size: 12.5px; font-weight: 400; }
.grid { display: grid; gap: 14px; grid-template-columns: repeat(auto-fit, minmax(min(100%, var(--least)), 1fr)); }
.flow { columns: var(--least); column-gap: 14px; margin: 10px 0 24px; } .flow > * { margin-bottom: 14px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 14px; padding: 16px 18px; min-width: 0;
  break-inside: avoid; } figure:only-child { max-width: 560px; }
.number { font-size: 29px; font-weight: 650; line-height: 1.2; letter-spacing: -.03em; white-space: nowrap; }
.text, pre, code { white-space: pre-wrap; overflow-wrap: anywhere; }
pre, code { font: 12.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
svg { display: block; width: 100%; height: auto; margin-top: 8px; } .stage { font-weight: 650; white-space: nowrap; }
.stage::before { content: ""; display: inline-block; width: 9px; height: 9px; border-radius: 50%; margin-right: 6px;
  background: var(--tone); }
.time { display: flex; gap: 2px; height: 12px; border-radius: 6px; overflow: hidden; margin: 22px 0 10px; }
.time i { background: var(--tone); min-width: 3px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 20px; font-size: 13.5px; } .wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 8px 10px; border-top: 1px solid var(--line); white-space: nowrap; }
tr > :first-child { text-align: left; padding-left: 0; } thead th { border: 0; font-size: 13px; }
tbody th { font-weight: 500; } :is(thead, td) small { display: inline-block; min-width: 4em; }
.bar { background: linear-gradient(to right, color-mix(in srgb, var(--tone) 20%, transparent) var(--share),
  transparent 0) no-repeat 6px 50% / calc(100% - 12px) 26px; }
.bubble { border-radius: 16px 16px 16px 4px; background: color-mix(in srgb, var(--tone) 13%, var(--card));
  padding: 7px 13px; margin: 4px 0; width: fit-content; max-width: 90%; }
.user { border-radius: 16px 16px 4px 16px; margin-left: auto; }
.answer { display: grid; align-items: baseline; grid-template-columns: 76px 1fr; }
.bubble pre { border-left: 2px solid var(--tone); padding-left: 9px; margin: 4px 0; }
dl, .commands { display: grid; grid-template-columns: max-content 1fr; gap: 5px 18px; overflow-wrap: anywhere; }
.commands { grid-template-columns: 1fr max-content; gap: 10px 18px; } dt { color: var(--quiet); }
summary { cursor: pointer; margin: 14px 0; } footer { margin-top: 40px; }
@media (max-width: 600px) { body { padding: 24px 14px; } .number { font-size: 24px; } .card { padding: 14px; } }
@media print { body { padding: 0; max-width: none; zoom: .62; } * { print-color-adjust: exact; } @page { margin: 12mm; }
  tr { break-inside: avoid; } h2, h3 { break-after: avoid; } :root { --page: #fff; } }
"""


def to_html(summary: RunSummary) -> str:
    """The whole page."""
    times = summary.seconds_by_stage()
    numbers = [
        f'<div class="card"><div class="number">{escape(number)}</div><h3>{escape(what)}</h3>{_small(detail)}</div>'
        for number, what, detail in headline(summary)
    ]
    bar = "".join(f'<i style="flex:{seconds:.4f};{_tone(name)}"></i>' for name, seconds in times.items())
    legend = "".join(f"<span>{_name(name)} {_small(duration(seconds))}</span>" for name, seconds in times.items())
    page = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>nanochat run {escape(summary.tag)}</title><style>{STYLE}</style></head><body>",
        f'<span class="quiet">nanochat run</span><h1>{escape(summary.tag)}</h1>'
        f'<span class="quiet">{escape(summary.machine.get("computed on", ""))}</span>',
        f'<h2>What came out</h2>{_grid(150, numbers)}<div class="time">{bar}</div><div class="legend">{legend}</div>',
        *_plots(summary.stages),
        _table("Evaluation", *score_table(summary)),
        _table("Stages", *stage_table(summary)),
        *_samples(summary),
    ]
    facts = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in summary.machine.items())
    page.append(f'<h2>Machine</h2><div class="card"><dl>{facts}</dl></div>')
    lines = "".join(f"<code>{escape(c.line)}</code>{_small(duration(c.seconds))}" for c in summary.commands)
    page += [f'<h2>Commands</h2><div class="card commands">{lines}</div>'] if lines else []
    page += [f'<footer class="quiet">Left out: {escape("; ".join(summary.notes))}.</footer>'] if summary.notes else []
    return "\n".join([*page, "</body></html>\n"])


def _plots(stages: list[Stage]) -> list[str]:
    def card(title: str, detail: str, svg: str) -> str:
        return f'<figure class="card"><h3>{title}</h3>{_small(detail)}{svg}</figure>'

    curves = {
        key: card(title, detail, _curves(stages, key, 4.2, 1.9, axis, word))
        for key, title, detail, axis, word in PLOTS
        if any(stage.values(key) for stage in stages)
    }
    results = [curves.pop("reward")] if "reward" in curves else []
    if evaluated := [stage for stage in stages if stage.scores]:
        detail = "dots: accuracy; bars: 95% intervals; thin lines: chance"
        results.insert(0, card("Accuracy by task", detail, _accuracy(evaluated)))
    learned = [stage for stage in stages if stage.values("loss")]
    width = min(4.2, 8.25 / max(1, len(learned)))  # inches; so many fit side by side
    losses = [card("", "", _curves([stage], "loss", width, 1.2 + 0.15 * width, "", "ends")) for stage in learned]
    sections = (
        ("Results", 420, results),
        (f"Loss {_small('nats a token; dpo and rl have aims of their own')}", 98 * width, losses),
        ("Along the run", 420, [*curves.values()]),
    )
    return [f"<h2>{title}</h2>{_grid(least, cards)}" for title, least, cards in sections if cards]


def _table(title: str, heads: list[str], rows: list[list[Cell]]) -> str:
    def named(name: str) -> str:
        return _name(name) if name in STAGES else escape(name)

    body, detailed = "", any(cell.detail for row in rows for cell in row[1:])
    for row in rows:
        body += f"<tr><th>{named(row[0].text)} {_small(row[0].detail)}</th>"
        for stage, cell in zip(heads[1:], row[1:], strict=True):
            bar = "" if cell.share is None else f' class="bar" style="{_tone(stage)};--share:{cell.share:.1%}"'
            text = f"<b>{escape(cell.text)}</b>" if cell.best else escape(cell.text)
            body += f"<td{bar}>{text}{f' <small>{escape(cell.detail)}</small>' if detailed else ''}</td>"
        body += "</tr>"
    head = "".join(f"<th>{named(name)}{' <small></small>' * detailed}</th>" for name in heads)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<h2>{title}</h2><div class="card wide">{table}</div>' if rows else ""


def _samples(summary: RunSummary) -> list[str]:
    """Texts by stage; each question with the answers of all stages."""

    def fold(name: str, least: int, cards: list[str], shown: int) -> str:
        rest = f"<details><summary>{len(cards) - shown} more</summary>{_grid(least, cards[shown:], 'flow')}</details>"
        return f"<h3>{name}</h3>{_grid(least, cards[:shown], 'flow')}{rest * (len(cards) > shown)}" if cards else ""

    def part(kind: str, text: str) -> str:
        text = escape(clip(text))
        return f"<div>{text}</div>" if kind == "text" else f"{_small(kind)}<pre>{text}</pre>"

    texts, cards = [], []
    for stage in summary.stages:
        about = [f'<div class="card text" dir="auto">{escape(clip(text))}</div>' for text in stage.samples[:40]]
        texts.append(fold(_name(stage.name), 420, about, 4))
    for answers in questions(summary)[:60]:
        card, asked = "", answers[0][1]
        for role, text in asked.messages:
            kind = "user" if role == "user" else "other"
            card += f'<div class="bubble text {kind}" dir="auto">{escape(clip(text))}</div>'
        for name, chat in answers:
            reply = "".join(part(*each) for each in chat.reply)
            card += f'<div class="answer" style="{_tone(name)}"><span>{_name(name)}{VERDICTS[chat.correct]}</span>'
            card += f'<div class="bubble text" dir="auto">{reply}</div></div>'
        cards.append(f'<div class="card">{_small(asked.task)}{card}</div>')
    parts = [*texts, fold("Questions", 330, cards, 6)]
    return ["<h2>Samples</h2>", *parts] if any(parts) else []


def _grid(least: float, cards: list[str], kind: str = "grid") -> str:
    """Cards side by side, each at least so many pixels wide; kinds: grid in rows, flow in columns."""
    return f'<div class="{kind}" style="--least:{least:.0f}px">{"".join(cards)}</div>' if cards else ""


def _name(stage: str) -> str:
    return f'<span class="stage" style="{_tone(stage)}">{escape(stage)}</span>'


def _tone(stage: str) -> str:
    return f"--tone:var(--{stage if stage in STAGES else 'other'})"


def _small(text: str) -> str:
    return f"<small>{escape(text)}</small>" if text else ""
