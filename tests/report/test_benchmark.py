"""Two files of `scripts.bench --json` compared, each ratio with its noise; a sweep with its plot."""

import contextlib
import errno
import itertools
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nanochat.cli import UserError
from nanochat.report import benchmark
from nanochat.report.benchmark import NOISE, Point, Ratio, ratio_of
from nanochat.serve import load
from nanochat.serve.load import LoadStats
from scripts import bench

TINY: dict[str, Any] = {
    "device": "cpu", "depth": 1, "head_dim": 32, "max_seq_len": 16, "vocab_size": 64, "device_batch_size": 1,
    "compile": "off",
}  # fmt: skip


def noisy(middle: float, seed: int, count: int = 20, spread: float = 0.01) -> list[float]:
    return (middle * (1 + spread * np.random.default_rng(seed).standard_normal(count))).tolist()


def content(step: float, product: float = 200.0, seed: int = 0, **changes: Any) -> dict[str, Any]:
    """What `bench train --json` writes."""
    measurements = {
        "step": {"unit": "tokens/s", "values": noisy(step, seed)},
        "bare product": {"unit": "GFLOP/s", "values": noisy(product, seed + 1)},
        "warm-up": {"unit": "s", "values": [3.0]},
    }
    return {
        "what": "train", "device": "1 x a chip (cpu, float32)", "kernels": "cpu", "threads": 2,
        "versions": {"torch": "2.13"}, "config": {"what": "train", "depth": 4, "json": f"{seed}.json"},
        "measurements": measurements, **changes,
    }  # fmt: skip


@pytest.fixture
def write(tmp_path):
    """Writes contents or texts to files; returns their paths."""

    def written(*contents) -> list[str]:
        paths = [tmp_path / f"{number}.json" for number in range(len(contents))]
        for path, one in zip(paths, contents, strict=True):
            path.write_text(one if isinstance(one, str) else json.dumps(one))
        return [str(path) for path in paths]

    return written


# ---------------------------------------------------------------------- a ratio and its noise


def test_a_gain_beyond_the_noise_is_found_and_one_within_it_is_not():
    gain = ratio_of(noisy(1000, 1), noisy(1100, 2))
    assert gain.low is not None and gain.high is not None and 1.08 < gain.low < 1.1 < gain.high < 1.12
    assert (gain.verdict("tokens/s"), gain.verdict("ms"), gain.verdict("MiB")) == ("faster", "slower", "more")
    assert ratio_of(noisy(1100, 2), noisy(1000, 1)).verdict("tokens/s") == "slower"
    assert ratio_of(noisy(1000, 1, spread=0.1), noisy(1010, 2, spread=0.1)).verdict("tokens/s") == NOISE
    assert ratio_of(noisy(1000, 1), noisy(1000, 1)) == ratio_of(noisy(1000, 1), noisy(1000, 1))  # nothing is by chance


def test_a_slow_streak_makes_the_interval_wider():
    """The same measurements, once in turn and once as two streaks: the machine changed in between."""
    fast_and_slow = noisy(1000, 1, count=10) + noisy(900, 2, count=10)
    in_turn = list(itertools.chain.from_iterable(zip(fast_and_slow[:10], fast_and_slow[10:], strict=True)))
    streaks, turns = (ratio_of(noisy(1000, 3), values) for values in (fast_and_slow, in_turn))
    assert streaks.value == turns.value
    assert streaks.high - streaks.low > 1.2 * (turns.high - turns.low)  # pyright: ignore[reportOptionalOperand]


def test_few_measurements_give_the_widest_ratio():
    assert ratio_of([10, 8, 9], [12, 11, 10]) == Ratio(11 / 9, 10 / 10, 12 / 8)
    assert ratio_of([10], [12, 12]) == Ratio(1.2) and Ratio(1.2).verdict("s") == "measured once"


# ---------------------------------------------------------------------- two files


def test_each_measurement_has_its_row(write, capsys):
    files = write(content(1000), content(1100, seed=7, commit="another"))
    bench.main(bench.Config("compare", tuple(files)))
    out, err = capsys.readouterr()
    rows = {re.split(r"\s{2,}", line)[0]: line for line in out.splitlines()}
    assert rows["step, tokens/s"].endswith("faster") and " 1.1" in rows["step, tokens/s"]
    assert rows["bare product, GFLOP/s"].endswith(NOISE) and rows["warm-up, s"].endswith("measured once")
    assert err == ""  # the commit and the name of the file are meant to differ


def test_what_makes_a_comparison_doubtful_is_a_warning(write, capsys):
    slower_machine = content(900, product=180, seed=7, device="1 x another chip", threads=1)
    slower_machine["config"]["depth"] = 6
    before, after = map(benchmark.load, write(content(1000), slower_machine))
    benchmark.compare(before, after)
    alike, machine = capsys.readouterr().err.splitlines()
    assert all(text in alike for text in ("depth 4 and 6", "another chip", "threads 2 and 1"))
    assert "slower" in machine and "share" in machine
    sides = [content(1000, what="sweep"), content(900, product=180, seed=7, what="sweep")]
    for side in sides:
        side["measurements"] = {f"{name}, 4 x 16 tokens": one for name, one in side["measurements"].items()}
    benchmark.compare(*map(benchmark.load, write(*sides)))
    assert "machine itself was slower" in capsys.readouterr().err


@pytest.mark.parametrize(
    "other",
    [
        "not JSON",
        "[1, 2]",
        json.dumps({"tokens_per_second": 5}),
        content(1000, measurements={"step": {"unit": "tokens/s", "values": []}}),
        content(1000, measurements={"step": {"unit": "tokens/s", "values": [0.0, float("nan")]}}),
        content(1000, measurements={"step": {"unit": "tokens/s", "values": "fast"}}),
        content(1000, measurements={"step": {"unit": "tokens/s", "values": "12"}}),
        content(1000, measurements={"step": {"unit": "tokens/s", "values": [10**400]}}),
        content(1000, what="serve"),
        content(1000, measurements={"step": {"unit": "s", "values": [1.0]}}),
    ],
    ids=[
        "no JSON",
        "a list",
        "older",
        "nothing measured",
        "no number",
        "a text",
        "digits",
        "too large",
        "another kind",
        "another unit",
    ],
)
def test_a_file_that_cannot_be_compared_is_one_line(write, other):
    files = tuple(write(content(1000), other))
    with pytest.raises(UserError, match=r"1\.json") as raised:
        bench.main(bench.Config("compare", files))
    assert "\n" not in str(raised.value)


def test_files_that_are_missing_or_too_many(tmp_path):
    for files in ((), ("a.json",), ("a.json", "b.json", "c.json")):
        with pytest.raises(UserError, match="two files"):
            bench.main(bench.Config("compare", files))
    with pytest.raises(UserError, match="take none"):
        bench.main(bench.Config("train", ("a.json",)))
    for path in (tmp_path, tmp_path / "nosuch.json"):
        with pytest.raises(UserError, match="bench --json"):
            benchmark.load(str(path))


def test_a_file_of_bench_is_compared_with_itself(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "PRODUCT_FLOPS", 1e8)
    file = str(tmp_path / "bench.json")
    bench.main(bench.Config("train", **TINY, steps=3, json=file))
    measured = benchmark.load(file).measurements
    assert [len(values) for _, values in measured.values()] == [3, 3, 3, 1, 1]
    step, share, product = (np.median(measured[name][1]) for name in [*measured][:3])
    assert step > 0 and product > 0 and 0 < share < 100
    bench.main(bench.Config("compare", (file, file)))
    assert capsys.readouterr().out.count("1.000 ") == 5


# ---------------------------------------------------------------------- a sweep


def test_a_plot_has_a_line_for_each_length_and_a_panel_for_each_number_of_threads(tmp_path):
    points = []
    for rows, row_tokens, threads in itertools.product((16, 4, 1), (128, 512), (2,)):
        rates = noisy(1000 * rows, seed=rows)
        points.append(Point(rows, row_tokens, threads, rates, [50.0], 2**30))
    file = tmp_path / "sweep.svg"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("matplotlib").rcParams, "svg.fonttype", "none")
        benchmark.draw_sweep(points[:-1], str(file))  # the last one did not fit in memory
    words = set(re.findall(r">([^<>\n]+)</text>", file.read_text()))
    assert {"rows", "tokens/s", "1", "4", "16", "128 tokens a row", "512 tokens a row", "2 threads"} <= words


def test_a_sweep_measures_each_combination(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "PRODUCT_FLOPS", 1e8)
    # Threads of this process in place of new processes, each of which would import torch.
    monkeypatch.setattr(bench, "ProcessPoolExecutor", lambda workers, context: ThreadPoolExecutor(workers))
    sizes: dict[str, Any] = {"sweep_rows": (1, 1, 2), "sweep_threads": (1,), "json": "sweep.json", "plot": "plot.png"}
    bench.main(bench.Config("sweep", **TINY, steps=2, **sizes))
    found = benchmark.load("sweep.json")
    assert [name for name in found.measurements if name.startswith("step")] == [
        f"step, {rows} x 16 tokens, 1 thread" for rows in (1, 2)
    ]
    assert len(found.measurements) == 10 and found.settings["threads"] == [1]  # each with its bare product
    assert (tmp_path / "plot.png").stat().st_size > 1000
    table = capsys.readouterr().out.splitlines()[-3:-1]  # before "wrote plot.png"
    assert [line.split()[:3] for line in table] == [["1", "16", "1"], ["2", "16", "1"]]


def test_a_sweep_that_is_stopped_has_written_what_it_measured(tmp_path, monkeypatch, capsys):
    measured = {name: {"unit": "%", "values": [5.0]} for name in ("step", "share of the bare product")}
    metrics = {"device": "a chip", "versions": {}, "kernels": "cpu", "threads": 1, "peak_memory_bytes": 1}
    results = iter([BrokenProcessPool(), None, KeyboardInterrupt()])

    def train(config: bench.Config) -> dict[str, Any]:
        result = next(results)
        if result:
            raise result
        return metrics | {"measurements": measured}

    monkeypatch.setattr(bench, "quietly_train", train)
    monkeypatch.setattr(bench, "ProcessPoolExecutor", lambda workers, context: ThreadPoolExecutor(workers))
    files = {"json": str(tmp_path / "sweep.json"), "plot": str(tmp_path / "sweep.png")}
    with pytest.raises(KeyboardInterrupt):
        bench.main(bench.Config("sweep", **TINY, sweep_rows=(1, 2, 4), **files))
    assert [*benchmark.load(files["json"]).measurements][0] == "step, 2 x 16 tokens, 1 thread"
    assert (tmp_path / "sweep.png").stat().st_size > 1000
    assert "1 rows of 16 tokens are left out: their process was killed" in capsys.readouterr().err


# ---------------------------------------------------------------------- serve


def test_a_request_that_fails_is_an_error_and_each_speed_is_written_once(tmp_path, monkeypatch, capsys):
    """Without a server and processes: what the clients measured is given."""
    stats = LoadStats(seconds=1.0, tokens=8, requests=3)
    monkeypatch.setattr(load, "closed_loop", lambda *_: stats)
    monkeypatch.setattr(bench, "serving", lambda engine, slots: contextlib.nullcontext(0))
    monkeypatch.setattr(bench.multiprocessing, "get_context", lambda _: SimpleNamespace(Pool=ThreadPool))
    config = bench.Config(
        "serve", device="cpu", depth=1, head_dim=32, vocab_size=400, batches=(2,), new_tokens=2, threads=1,
        json=str(tmp_path / "serve.json"),
    )  # fmt: skip
    bench.main(config)
    assert "1 thread," in capsys.readouterr().out
    written = json.loads((tmp_path / "serve.json").read_text())
    assert [*written] == ["what", "commit", "config", "device", "versions", "kernels", "threads", "measurements"]
    assert benchmark.load(str(tmp_path / "serve.json")).measurements["HTTP, 2 clients"] == ("tokens/s", [8.0] * 5)
    stats.failed = 1
    with pytest.raises(UserError, match="--batches 2: 5 of 15 requests"):
        bench.main(config)
    for size in (100, 300):
        with pytest.raises(UserError, match="--vocab_size"):
            bench.main(replace(config, vocab_size=size))


def test_a_full_disk_leaves_what_was_measured_before(tmp_path, monkeypatch):
    file = tmp_path / "bench.json"
    file.write_text("before")

    def full(path, text):
        with path.open("w") as new:
            new.write(text[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(Path, "write_text", full)
        bench.write_json(bench.Config("train", json=str(file)), {})
    assert file.read_text() == "before"
    bench.write_json(bench.Config("train", json=str(file)), {"measurements": {}})
    assert json.loads(file.read_text())["measurements"] == {}


def test_a_file_that_is_no_file_is_written_to(tmp_path):
    """As /dev/stdout, a link, and what it may lead to, a pipe."""
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "target")
    for name in ("link", "target"):
        with ThreadPoolExecutor(1) as thread:
            read = thread.submit((tmp_path / "target").read_text)
            bench.write_json(bench.Config("train", json=str(tmp_path / name)), {})
            assert json.loads(read.result(timeout=10))["what"] == "train"
    assert (tmp_path / "link").is_symlink()


# ---------------------------------------------------------------------- flags


@pytest.mark.parametrize(
    ("what", "flags"),
    [
        ("train", {"batches": (1,)}),
        ("train", {"sweep_rows": (1,)}),
        ("serve", {"steps": 3}),
        ("serve", {"fp8": True}),
        ("sweep", {"against": "transformers"}),
        ("compare", {"json": "out.json", "files": ("a.json", "b.json")}),
        ("train", {"threads": 4096}),
        ("serve", {"threads": 4096}),
        ("sweep", {"sweep_threads": (1, 4096)}),
        ("train", {"json": "/"}),
        ("train", {"json": ""}),
        ("train", {"json": f"/tmp/{'long' * 63}"}),  # no room for the suffix of the file beside it
        ("train", {"json": f"/tmp/{'long' * 70}"}),
        ("train", {"depth": 9, "source": "sft"}),
        ("sweep", {"json": "/tmp/same.svg", "plot": "/tmp/../tmp/same.svg", "sweep_rows": (1,)}),
        ("sweep", {"plot": "/proc/sweep.svg", "sweep_rows": (1,)}),
    ],
)
def test_a_flag_that_does_nothing_or_cannot_work_is_refused_before_anything_is_measured(what, flags):
    name = next(iter(flags))
    with pytest.raises(UserError, match=f"^--{name} "):
        bench.main(bench.Config(what, **flags))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "--sweep_rows"),
        ({"sweep_rows": (4, 0)}, "--sweep_rows, .*: --device_batch_size 0"),
        ({"sweep_threads": (1,), "plot": "plot.xyz"}, r"--plot plot\.xyz"),
        ({"sweep_threads": (1,), "plot": "/nowhere/plot.svg"}, "--plot /nowhere"),
    ],
    ids=["nothing to vary", "no rows", "a format", "a folder"],
)
def test_a_sweep_that_cannot_work_is_one_line(flags, words):
    with pytest.raises(UserError, match=words):
        bench.main(bench.Config("sweep", **TINY, **flags))
