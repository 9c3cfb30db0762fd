"""The report: each number comes from its file, the page is whole, self-contained and safe, what is missing is noted."""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from runs import refused
from tiny import complaint

from nanochat.ground import provenance
from nanochat.ground.paths import SCRIPTS, STAGES
from nanochat.report import report_page
from nanochat.report import summary as report
from scripts import report as script

TAG = "made-up"
VOID = {"meta", "br", "hr", "img", "input", "link"}
PAYLOADS = (
    "<script>alert('first')</script>",
    '"><img src=x onerror="alert(2)">',
    "</div></body></html><svg/onload=alert(3)>",
    "$\\frac$ {{7*7}} `</code>` | **bold** [link](javascript:alert(4)) &lt;b&gt; ]]> -->",
)


class Page(HTMLParser):
    """Refuses tags that do not match; collects elements, attributes and text."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.tags, self.attributes, self.words = [], set(), [], []
        self.feed(text)
        self.close()
        assert not self.open

    @property
    def text(self) -> str:
        return "".join(self.words)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert tag in VOID or self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)


@pytest.fixture
def base(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    return tmp_path


def write(base: Path, stage: str, name: str, content: object, tag: str = TAG) -> Path:
    """A JSON file, or a file of JSON lines from a list."""
    path = base / "runs" / stage / tag / name
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(line) for line in content] if name.endswith("l") else [json.dumps(content)]  # pyright: ignore
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def metrics(steps: int, seconds: float, **further) -> list[dict]:
    """Lines of metrics.jsonl; a further value may be a function of the step."""
    lines = []
    for step in range(steps):
        line = {"step": step, "loss": 4 / (1 + step), "lr": 0.02 * (1 - step / steps), "tokens": 1000 * (step + 1)}
        line |= {"tok_per_sec": 5120.0, "mfu": 0.375, "seconds": seconds * (step + 1) / steps}
        line |= {"peak_memory_bytes": 3 << 30}
        line |= {key: value(step) if callable(value) else value for key, value in further.items()}
        lines.append({key: value for key, value in line.items() if value is not None})
    return lines


def by_question(**shares: float) -> dict:
    """Shares of 100 questions, the first ones right."""
    return {name: {f"{n}:abc": float(n < round(100 * share)) for n in range(100)} for name, share in shares.items()}


def chat_evaluation(accuracy: float, answer: str, chatcore: float) -> dict:
    def score(value: float, baseline: float) -> dict:
        return {"accuracy": value, "low": value - 0.05, "high": value + 0.05, "baseline": baseline,
                "places": [[3, 4], [1, 8], [0, 0]], "scores": by_question(accuracy=value)}  # fmt: skip

    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "6 * 7?"}]
    question = [{"role": "user", "content": parts if accuracy == 0.5 else "What is 6 * 7?"}]  # one question, two forms
    reply = [{"type": "python", "text": "6 * 7"}, {"type": "python_output", "text": "42"}]
    reply.append({"type": "text", "text": answer})
    samples = [{"task": "arithmetic", "messages": question, "reply": reply, "correct": answer == "forty-two"}]
    tasks = {"arithmetic": score(accuracy, 0.0), "arc": score(accuracy / 2, 0.25)}
    return {"step": 9, "tasks": tasks, "chatcore": chatcore, "samples": samples}


def command(name: str, stage: str, seconds: float, tag: str | None = TAG, **further) -> dict:
    line = {"script": name, "command": f"python -m scripts.{name} --seed 7", "stage": stage, "tag": tag}
    line |= {"started": "2026-01-02T03:04:05+00:00", "seconds": seconds, "world_size": 8}
    return line | {"device": "Abacus 9000", "kind": "beads", "dtype": "bfloat16"} | further


def write_commands(base: Path, lines: list[dict]) -> Path:
    (base / "runs").mkdir(exist_ok=True)
    (base / "runs" / "commands.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return base / "runs" / "commands.jsonl"


def trained(name: str, stage: str, seconds: float, first: int, last: int, **further) -> dict:
    """The command of a training loop that began with `first` steps done and ended with `last`."""
    return command(name, stage, seconds, **{"first_step": first, "last_step": last, **further})


CALL = [
    {"type": "python", "text": "47+38"},
    {"type": "python_output", "text": "85"},
    {"type": "text", "text": "It is 85."},
]
FACTS = {
    "stage": "base", "tag": TAG, "started": "2026-01-02T03:04:05+00:00", "parameters": 5049216, "layers": 4,
    "context": 256, "vocab_size": 4096, "data": "demo", "world_size": 8, "commit": "0123abc", "system": "Beads OS",
    "versions": {"Python": "3.11.2", "torch": "2.9.0"},
}  # fmt: skip


class Whole(NamedTuple):
    base: Path
    summary: report.RunSummary
    html: str


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Iterator[Whole]:
    """All stages, with everything that a report can hold."""
    base = tmp_path_factory.mktemp("whole")
    bpb = {"val_bpb": lambda step: 2.5 - step / 25 if step % 5 == 4 else None}
    bpb["val_bpb_before"] = lambda step: None if step else 3.21
    write(base, "base", "run.json", FACTS)
    write(base, "base", "metrics.jsonl", metrics(40, 400.0, **bpb))
    evaluation = {"step": 40, "train_bpb": 0.8125, "val_bpb": 0.9375, "stories": 200, "stories_passed": 137}
    write(base, "base", "eval.json", evaluation | {"samples": ["Once upon a time.", "A frog sang."], "core": 0.1771})
    write(base, "mid", "metrics.jsonl", metrics(20, 60.0, val_loss=0.3456))
    write(base, "sft", "metrics.jsonl", metrics(10, 30.0))
    margins = {"margin": lambda step: step / 4, "val_margin": lambda step: 0.9 if step == 4 else None}
    write(base, "dpo", "metrics.jsonl", metrics(5, 15.0, **margins))
    reward = {"reward": lambda step: step / 30, "eval_reward": lambda step: 0.25 + step / 50 if step % 6 == 0 else None}
    write(base, "rl", "metrics.jsonl", metrics(25, 50.0, **reward, loss=lambda step: math.sin(step), kl=0.0123))
    graded = {"mid": (0.2, "7"), "sft": (0.5, "forty-one"), "dpo": (0.6, "no"), "rl": (0.9, "forty-two")}
    for stage, (accuracy, answer) in graded.items():
        chat = [{"role": "user", "content": f"Hello, {stage}!"}, {"role": "assistant", "content": CALL}]
        write(base, stage, "chat_eval.json", chat_evaluation(accuracy, answer, accuracy / 3) | {"chat": chat})
    lines = [command("tok_train", "tokenizer", 99.0, None), command("tok_train", "tokenizer", 11.0, None)]
    lines.append(trained("base_train", "base", 6666.0, 0, 40, started="2026-01-01T03:04:05+00:00"))  # moved aside
    lines += [trained("base_train", "base", 300.0, 0, 25), trained("base_train", "base", 200.0, 25, 40)]  # resumed
    lines += [trained("base_train", "base", 3.0, 40, 40)]  # it had nothing to do
    lines += [command("base_eval", "base", 20.0), trained("base_train", "base", 7777.0, 0, 40, tag="another-tag")]
    lines += [trained("mid_train", "mid", 70.0, 0, 20), trained("chat_sft", "sft", 35.0, 0, 10)]
    lines += [command("chat_eval", "sft", 5.0), trained("chat_dpo", "dpo", 16.0, 0, 5)]
    write_commands(base, lines)  # RL is still going
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(base))
        summary = report.collect(TAG)
        yield Whole(base, summary, report_page.to_html(summary))


# ---------------------------------------------------------------------- numbers


def as_dicts(table: report_page.Table) -> dict[str, dict[str, str]]:
    """Row -> column -> text."""
    texts = {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}
    return {name: dict(zip(table.heads[1:], row, strict=True)) for name, row in texts.items()}


def test_times_add_up(whole):
    summary = whole.summary
    # The newest tokenizer, both parts of base_train, no other tag or earlier run; RL, not finished, by its training
    # seconds. Evaluations are not the run's own time.
    times = {"tokenizer": 11.0, "base": 500.0, "mid": 70.0, "sft": 35.0, "dpo": 16.0, "rl": 50.0}
    assert [summary.evaluation_seconds(name) for name in ("base", "sft", None)] == [20.0, 5.0, 25.0]
    assert summary.seconds_by_stage() == times
    assert list(summary.seconds_by_stage()) == list(times)
    total = as_dicts(report_page.stage_table(summary))["total"]
    assert total["training"] == "9m15s" and total["in all"] == "11m22s" and total["evaluation"] == "25s"


def test_seconds_of_killed_parts_and_of_late_evaluations(base):
    """A part that was killed has left no command. An evaluation long after the run adds nothing to it."""
    write(base, "base", "metrics.jsonl", metrics(10, 500.0))
    write(base, "base", "run.json", FACTS)
    late = {"started": "2027-05-05T05:05:05+00:00"}
    parts = [trained("base_train", "base", 120.0, 0, 2), command("base_eval", "base", 999.0, **late)]
    write_commands(base, [*parts, command("tok_train", "t", 9.0, None, **late)])
    summary = report.collect(TAG)
    assert summary.seconds_by_stage() == {"base": 500.0} and summary.evaluation_seconds() == 999.0


def test_the_tables_hold_what_the_files_hold(whole):
    table = as_dicts(report_page.stage_table(whole.summary))
    assert list(table) == ["tokenizer", *STAGES, "total"]
    assert table["base"] == {
        "steps": "40", "tokens": "40K", "val loss": "", "tokens/s": "5.12K", "GiB": "3",
        "MFU": "37.5%", "training": "6m40s", "in all": "8m20s", "evaluation": "20s",
    }  # fmt: skip
    assert table["mid"]["val loss"] == "0.3456" and table["dpo"]["steps"] == "5"

    score_table, _ = report_page.score_table(whole.summary)
    scores = {(row[0].text, row[0].detail): row[1:] for row in score_table.rows}
    assert score_table.heads == ["task", *STAGES]
    assert [cell.text for cell in scores["bits per byte", "held out"]] == ["0.9375", "", "", "", ""]
    assert [cell.text for cell in scores["bits per byte", "training"]] == ["0.8125", "", "", "", ""]
    assert scores["holds together", "stories"][0] == report_page.Cell("68.5%", "", 0.685, "stories holds together")
    arithmetic = scores["arithmetic", ""]
    assert [cell.text for cell in arithmetic] == ["", "20.0%", "50.0%", "60.0%", "90.0%"]
    assert [cell.verdict for cell in arithmetic] == ["", "", "rose", "rose", "rose"] and arithmetic[
        4
    ].detail == "85–95 of 100"
    assert [cell.text for cell in scores[report.PLACES, "arc"]] == ["", *["75% / 12% / -"] * 4]
    assert [cell.text for cell in scores["arc", "chance 25%"]] == ["", "10.0%", "25.0%", "30.0%", "45.0%"]
    assert scores["ChatCORE", ""][4].text == "0.3000" and scores["CORE", ""][0].text == "0.1771"


def stories(accuracy: float, order: float, together: float) -> dict[str, Any]:
    """A task with further shares."""
    score: dict[str, Any] = {"accuracy": accuracy, "low": accuracy - 0.05, "high": accuracy + 0.05, "baseline": 0.0}
    score |= {"order_followed": order, "order_followed_low": order - 0.05, "order_followed_high": order + 0.05}
    score |= {"scores": by_question(accuracy=accuracy, order_followed=order, holds_together=together)}
    return score | {"holds_together": together, "holds_together_low": together - 0.01, "distinct_4grams": 0.72,
                    "holds_together_high": together + 0.01}  # fmt: skip


def test_further_shares_of_a_task_have_rows_and_a_skill_that_fell_is_marked(base):
    write(base, "base", "eval.json", {"val_bpb": 1.0, "stories": 100, "stories_passed": 80})
    plain = {"accuracy": 0.9, "low": 0.8, "high": 0.95, "baseline": 0.0, "scores": by_question(accuracy=0.9)}
    lower = {"accuracy": 0.87, "low": 0.8, "high": 0.9, "baseline": 0.0, "scores": by_question(accuracy=0.87)}
    write(base, "sft", "chat_eval.json", {"tasks": {"stories": stories(0.45, 0.5, 0.88), "sums": plain}})
    write(base, "rl", "chat_eval.json", {"tasks": {"stories": stories(0.5, 0.25, 0.75), "sums": lower}})
    summary = report.collect(TAG)
    rows = {(row[0].text, row[0].detail): row[1:] for row in report_page.score_table(summary)[0].rows}
    order = rows["order followed", "stories"]
    assert [f"{cell.text} {cell.detail}" for cell in order] == [" ", "50.0% 45–55 of 100", "25.0% 20–30 of 100"]
    assert [cell.text for cell in rows["holds together", "stories"]] == ["80.0%", "88.0%", "75.0%"]
    assert [cell.text for cell in rows["stories", ""]] == ["", "45.0%", "50.0%"]  # what base does is no accuracy
    assert rows["distinct 4-grams", "stories"][2].text == "72.0%"
    fell = {name for (name, _), cells in rows.items() if any(cell.verdict == "fell" for cell in cells)}
    assert fell == {"order followed", "holds together"}
    text = Page(report_page.to_html(summary)).text
    assert text.count("fell to ▼") == 2 and text.count("within chance ≈") == 2
    beyond = "stories order followed -25.0 (-33.3 to -15.7, n 100), stories holds together -13.0 ("
    assert f"rl: {beyond}" in text and ") beyond chance; within it: stories +5.0 (" in text


@pytest.mark.parametrize("samples", [1, 8])
def test_stages_are_compared_on_the_questions_that_both_answered(base, samples):
    """mid answered 50, SFT 200 and nine more of those 50, although it has a smaller share of all right. With several
    replies to a question it has another spread, so nothing is compared."""
    for stage, right in {"mid": [0] * 9 + [1] * 41, "sft": [1] * 50 + [0] * 150}.items():
        score = {"accuracy": sum(right) / len(right), "low": 0.2, "high": 0.9, "questions": len(right)}
        score["scores"] = {"accuracy": {f"{number}:abc": one for number, one in enumerate(right)}}
        score["settings"] = {"samples": 1 if stage == "mid" else samples, "max_examples": len(right)}
        write(base, stage, "chat_eval.json", {"tasks": {"sums": score}})
    text = Page(report_page.to_html(report.collect(TAG))).text
    assert ("sft: sums +18.0 (+5.7 to +28.9, n 50) beyond chance." in text) == (samples == 1)
    assert "82.0% 20–90 of 50" in text and ("rose to ▲ 25.0% 20–90 of 200" in text) == (samples == 1)


# ---------------------------------------------------------------------- the page


def test_the_page_is_whole_and_requests_nothing(whole):
    html = whole.html
    assert report_page.to_html(whole.summary) == html and "fell to" not in html
    page = Page(html)
    # Facts of the run and texts of models; the numbers of the tables are tested above.
    for text in ("0.25 → 0.73", "5,049,216", "256 tokens", "0123abc", "torch 2.9.0", "Hello, rl!", "It is 85."):
        assert text in page.text, text
    assert "dpo: arithmetic +10.0 (+3.4 to +16.2, n 100) beyond chance; within it: arc +5.0 (" in page.text
    for text in ("0.9375", "11m22s", "85–95", "A frog sang."):
        assert text in page.text, text
    assert "8 × Abacus 9000 (beads, bfloat16)" in page.text and "python -m scripts.mid_train --seed 7" in page.text
    assert "python -m scripts.base_train --seed 73m20s" in page.text and "2026-01-02 03:04:05 UTC" in page.text
    assert not any(other in page.text for other in ("7777", "2h09m", "1h51m"))  # another tag, a run moved aside
    assert not page.tags & {"script", "iframe", "object", "embed", "link", "img", "base", "form", "foreignobject"}
    for name, value in page.attributes:
        assert not name.startswith("on"), name
        if name in ("src", "href", "xlink:href", "action", "data"):
            assert re.fullmatch("#[a-z0-9]+", value), (name, value)
    assert "http:" not in html and "https:" not in html and "@import" not in html
    assert set(re.findall(r"url\(([^)]*)\)", html)) <= {f"#{value}" for name, value in page.attributes if name == "id"}
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert "default-src 'none'" in html
    labels = [value for name, value in page.attributes if name == "aria-label"]
    assert "Loss: base 4 → 0.101" in labels and not any(label.startswith(":") for label in labels)


def ys_of(html: str, line: str) -> list[float]:
    path = html.partition(f'id="{line}"')[2].partition(' d="')[2].partition('"')[0]
    return [float(y) for y in re.findall(r"[ML] [\d.]+ ([\d.]+)", path)]


def test_a_question_is_shown_once_with_the_answers_of_all_stages(whole):
    page = Page(whole.html)
    assert page.text.count("What is 6 * 7?") == 1
    answers = page.text.partition("What is 6 * 7?")[2]
    places = [answers.index(text) for text in ("✗ wrong", "forty-one", "✓ right", "forty-two")]
    assert places == sorted(places)


def test_each_plot_has_a_line_for_each_stage_that_has_values(whole, base):
    def lines(html: str, key: str) -> list[str]:
        return re.findall(f' id="{key}-([a-z]+)"', html)

    assert lines(whole.html, "lr") == lines(whole.html, "tok_per_sec") == list(STAGES)
    assert lines(whole.html, "loss") == ["base", "mid", "sft", "dpo"]  # RL's says nothing
    assert lines(whole.html, "val_bpb") == ["base"] and lines(whole.html, "margin") == ["dpo"]
    main, _, more = whole.html.partition("<details><summary>1 more")
    assert lines(main, "reward") == lines(more, "kl") == ["rl"] and not lines(main, "kl")
    write(base, "rm", "metrics.jsonl", metrics(5, 5.0, val_accuracy=lambda step: 0.5 + step / 10))
    names = ("pass_at_k", "no_signal", "entropy", "clipped", "truncated", "sampling_seconds", "training_seconds")
    rewards = {"reward": lambda step: 0.9 - step / 10, "eval_reward": lambda step: 0.25 + step / 8}
    rewards |= {**dict.fromkeys(names, 0.5), "reward/short": -0.25, "eval_reward_before": 0.0625}
    write(base, "rl", "metrics.jsonl", metrics(5, 5.0, **rewards))
    html = report_page.to_html(report.collect(TAG))
    assert lines(html, "loss") == ["rm"] and "Preference accuracy: rm 0.5 → 0.9" in html
    assert all(lines(html, name) == ["rl"] for name in (*names, "reward/short"))
    assert "Reward: rl 0.0625 → 0.75" in html  # held-out questions, from before the first step


def test_a_line_goes_where_its_values_go(base):
    """The loss is a mean: of three values in base, whose fall at the beginning must not be smeared out, of eleven in
    SFT. What is evaluated is drawn as it is, and a long run is thinned out."""
    noisy = {"loss": lambda step: 2.0 + step % 2, "val_bpb": lambda step: 1.0 + (step + 1) / 40}
    noisy["val_bpb_before"] = lambda step: None if step else 3.0
    for stage in ("base", "sft"):
        write(base, stage, "metrics.jsonl", metrics(40, 9.0, **noisy))
    summary = report.collect(TAG)
    assert summary.stages[0].curve("val_bpb")[:2] == [(0, 3.0), (1, 1.025)]
    html = report_page.to_html(summary)
    ys = ys_of(html, "val_bpb-base")
    assert ys[0] < min(ys[1:]) and ys[1:] == sorted(ys[1:], reverse=True)  # y grows downwards on a page
    middle = {stage: ys_of(html, f"loss-{stage}")[6:-6] for stage in ("base", "sft")}
    spread = {stage: max(ys) - min(ys) for stage, ys in middle.items()}
    assert 0 < spread["sft"] < 0.4 * spread["base"]
    write(base, "base", "metrics.jsonl", metrics(5000, 9000.0, loss=lambda step: step * 7919 % 1000))
    summary = report.collect(TAG)
    curve = summary.stages[0].curve("loss")
    assert 250 < len(curve) <= 302 and curve[0] == (1, 0.0) and curve[-1] == (5000, 4999 * 7919 % 1000)


@pytest.mark.parametrize("payload", PAYLOADS)
def test_what_a_model_writes_stays_text(base, payload):
    write(base, "base", "eval.json", {"val_bpb": 1.0, "samples": [payload, "half \ud83d of a face, \x00\x1b[31m 中文"]})
    chats = []
    for kind in ("text", "python", "python_output", payload):
        message, reply = {"role": payload, "content": payload}, {"type": kind, "text": payload}
        chats.append({"task": payload, "messages": [message], "reply": [reply], "correct": None})
    chat = [{"role": "user", "content": payload}, {"role": "assistant", "content": payload}]
    score = {"accuracy": 0.5, "baseline": 0.1}
    write(base, "sft", "chat_eval.json", {"tasks": {payload: score}, "samples": chats, "chat": chat})
    write(base, "sft", "run.json", {"commit": payload, "data": payload, "versions": {"torch": payload}})
    further = {"command": f"python {payload}", "device": payload, "dtype": payload}
    write_commands(base, [command(payload, payload, 5.0, **further)])
    html = report_page.to_html(report.collect(TAG))
    page = Page(html)
    assert not page.tags & {"script", "img"} and not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.text.count(payload) >= 8  # sample, question and replies, command, device, stage
    assert "half ? of a face,   [31m 中文" in page.text and "own settings, as it came" in page.text and html.encode()
    # Nothing is closed early.
    assert page.text.rstrip().endswith("Left out: no run of mid, rm, dpo, rl.")


# ---------------------------------------------------------------------- what is missing or damaged


def test_damaged_lines_are_skipped_and_counted(base):
    path = write(base, "base", "metrics.jsonl", metrics(4, 8.0))
    torn = ['{"step": 4, "lo', "[1]", "7", "null", '{"loss": 1.0}', '{"step": "five"}', '{"step": NaN}', "[" * 99999]
    again = json.dumps({"step": 1, "loss": 0.25})  # in place of an earlier one
    last = json.dumps({"step": 4, "loss": 0.0625, "seconds": 10.0, "lr": None, "tokens": "many", "mfu": True})
    lines = [last, *path.read_text().splitlines(), *torn, "\x00\x00", again]
    path.write_bytes("\n".join(lines).encode() + b'\n\xff\n{"step": 5')
    write_commands(base, [trained("base_train", "base", 12.0, 0, 5)]).open("a").write('{"script": "base_ev')
    summary = report.collect(TAG)
    assert f"runs/base/{TAG}/metrics.jsonl: damaged lines skipped: 11" in summary.notes
    assert "runs/commands.jsonl: damaged lines skipped: 1" in summary.notes
    assert summary.stages[0].values("loss") == [4.0, 0.25, 4 / 3, 1.0, 0.0625]
    assert summary.seconds_by_stage() == {"base": 12.0}
    assert "damaged lines skipped: 11" in report_page.to_html(summary)


@pytest.mark.slow
def test_damaged_evaluations_and_odd_numbers_stop_nothing(base):
    odd = [0.0, -1.0, 1e300, 10**400, float("inf"), float("nan"), True, "7", None, [], 1e-300]
    names = ("loss", "lr", "tok_per_sec", "seconds", "val_bpb", "reward", "kl")
    write(base, "rl", "metrics.jsonl", [{"step": step, **dict.fromkeys(names, odd[step])} for step in range(len(odd))])
    assert report.collect(TAG).stages[0].values("loss") == [0.0, -1.0, 1e-300]
    for text in ("", "{", "[]", "null", '{"samples": 7}', '{"tasks": [1]}', '{"samples": [{}]}'):
        for name in ("eval.json", "chat_eval.json"):
            write(base, "rl", name, {}).write_text(text)
        summary = report.collect(TAG)
        assert summary.stages[0].samples == [] and summary.stages[0].scores == {}
        assert any("eval.json: damaged" in note for note in summary.notes) == bool(text)
        assert Page(report_page.to_html(summary))


def test_any_stage_or_file_may_be_alone(base):
    for stage in SCRIPTS:
        tag = f"only-{stage}"
        write(base, stage, "metrics.jsonl", [{"step": 0, "loss": 3.0, "seconds": 2.0}], tag)  # one step into a run
        summary = report.collect(tag)
        html = report_page.to_html(summary)
        assert Page(html).text.count("Left out:") == 1 and summary.seconds_by_stage() == {stage: 2.0}
        assert not {"Evaluation", "Questions and replies"} & set(re.findall("<h2>(.*?)</h2>", html))
    write_commands(base, [trained("base_train", "base", 61.0, 0, 5, tag="commands")])
    for tag, text in {"eval.json": "1.5000", "chat_eval.json": "50.0%", "commands": "1m01s"}.items():
        if tag != "commands":
            write(base, "rl", tag, {"val_bpb": 1.5, "tasks": {"arc": {"accuracy": 0.5}}}, tag)
        assert text in Page(report_page.to_html(report.collect(tag))).text


def test_nothing_to_report_names_the_command(base, capsys):
    refused(capsys, ["report"], "python -m scripts.base_train", str(base / "runs"))
    write(base, "mid", "metrics.jsonl", metrics(2, 1.0), tag="other")
    write_commands(base, [command("tok_train", "tokenizer", 3.0, None)])
    line = complaint(lambda: report.collect(TAG))
    assert line.startswith("--model_tag made-up: ") and "base_train --model_tag made-up" in line
    refused(capsys, ["report", "--model_tag=../x"], "--model_tag '../x' is not a plain")
    assert not (base / "runs" / "report").exists()


# ---------------------------------------------------------------------- the command


def test_the_command_reports_the_tag_written_last(whole, capsys):
    newest = write(whole.base, "sft", "eval.json", {"val_bpb": 1.25}, tag="fresh")
    os.utime(newest, (2e9, 2e9))
    script.main(script.Config())
    folder = whole.base / "runs" / "report" / "fresh"
    assert capsys.readouterr().out.split() == [str(folder / "report.html")]
    assert "1.2500" in (folder / "report.html").read_text()
    script.main(script.Config(model_tag=TAG))
    assert (whole.base / "runs" / "report" / TAG / "report.html").read_text() == whole.html
    assert report.newest_tag() == "fresh"  # a report is no run


def test_a_report_needs_no_torch_and_no_pyplot(whole):
    code = (
        "import sys; from nanochat.report import report_page, summary; "
        "report_page.to_html(summary.collect(sys.argv[1])); "
        "print({'torch', 'matplotlib.pyplot'} & set(sys.modules))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code, TAG], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "set()" and done.stderr == ""


def test_what_computed_is_named(monkeypatch):
    versions = provenance.versions()
    assert {"Python", "torch"} <= set(versions) and versions["Python"] == "{}.{}.{}".format(*sys.version_info)
    monkeypatch.setenv("PATH", "/nowhere")  # no git
    assert provenance.commit() == "unknown"


# ---------------------------------------------------------------------- in a browser


@pytest.mark.slow
def test_all_can_use_the_report_also_on_a_phone(whole, base, tmp_path, open_page, axe_violations):
    """axe-core's rules, light and dark; no wider than a phone, also with long words."""
    tag = "e" * 90
    write(base, "base", "run.json", FACTS | {"data": "/folder" * 40, "parameters": 10**15}, tag=tag)
    write(base, "base", "metrics.jsonl", metrics(8, 20.0, val_bpb=0.5), tag=tag)
    write(base, "base", "eval.json", {"val_bpb": 0.5, "samples": ["w" * 300, "| wide " * 90]}, tag=tag)
    write_commands(base, [trained("base_train", "base", 60.0, 0, 8, tag=tag, command="base_train --data " + "d" * 200)])
    long_words = report_page.to_html(report.collect(tag))
    page = open_page(None, width=360, height=720)
    for name, html in (("a run", whole.html), ("long words", long_words)):
        (tmp_path / "report.html").write_text(html)
        page.goto((tmp_path / "report.html").as_uri())
        assert page.evaluate("document.scrollingElement.scrollWidth <= document.scrollingElement.clientWidth"), name
        # A table that is wider than the page scrolls by itself, also by keyboard; nothing else is cut off.
        cut = page.evaluate(
            """[...document.querySelectorAll("body *:not(.sr, .wide[tabindex='0'])")].filter((element) =>
                 element.scrollWidth > element.clientWidth + 1 && getComputedStyle(element).overflowX !== "visible")
               .map((element) => element.outerHTML)"""
        )
        assert cut == [], name
        for theme in ("light", "dark"):
            page.emulate_media(color_scheme=theme)
            assert axe_violations(page) == [], (name, theme)
    page.evaluate("document.querySelector('h2').style.color = '#555'")  # what it must find, on the dark page
    assert {line.split()[0] for line in axe_violations(page)} == {"color-contrast"}
