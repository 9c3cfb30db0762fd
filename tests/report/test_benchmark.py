"""Two files of `scripts.bench --json` compared, each ratio with its noise."""

import contextlib
import errno
import itertools
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nanochat.cli import UserError, parse
from nanochat.report import benchmark
from nanochat.report.benchmark import NOISE, Ratio, ratio_of
from nanochat.run.neighbours import Neighbours
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


def test_other_programs_are_counted_and_ones_own_are_not():
    """A program beside takes its share of the processors, whatever else runs here; a loop in this process none."""
    work = "import time\nbegan = time.process_time()\nwhile time.process_time() - began < 3: pass"
    clock = Neighbours()
    assert clock.processors() is None  # after too short a time
    beside = subprocess.Popen([sys.executable, "-c", work])
    began = time.monotonic()
    assert beside.wait() == 0
    others = clock.processors()
    if not sys.platform.startswith("linux"):
        assert others is None
        return
    assert others * (time.monotonic() - began) > 2.5
    ours = Neighbours(own=lambda: 10**6 * time.process_time())  # with more than all of the work as its own
    began = time.monotonic()
    while time.monotonic() - began < 1.1:
        pass
    assert ours.processors() == 0


def test_bench_says_that_the_machine_is_busy(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(Neighbours, "processors", lambda self: 1.24)
    bench.main(bench.Config(bench.Train(**TINY, steps=1, json=str(tmp_path / "a.json"))))
    assert (
        "warning: other programs took 1.2 processors meanwhile, so the figures are too slow" in capsys.readouterr().err
    )
    assert benchmark.load(str(tmp_path / "a.json")).others == 1.24
    monkeypatch.setattr(Neighbours, "processors", lambda self: 0.05)
    bench.main(bench.Config(bench.Train(**TINY, steps=1)))
    assert not capsys.readouterr().err


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
    bench.main(bench.Config(bench.Compare(tuple(files))))
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
    busy = content(1000, other_programs=0.93)
    quiet = content(1000, seed=7, other_programs=0.04)
    benchmark.compare(*map(benchmark.load, write(busy, quiet)))
    [warning] = capsys.readouterr().err.splitlines()
    assert "0.json: other programs took 0.9 processors meanwhile" in warning
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
        bench.main(bench.Config(bench.Compare(files)))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("words", ["compare", "compare a.json", "compare a.json b.json c.json", "train a.json"])
def test_files_that_are_missing_or_too_many(words):
    with pytest.raises(SystemExit) as leaving:
        parse(bench.Config, words.split())
    assert leaving.value.code == 2


def test_a_file_that_is_not_there_is_one_line(tmp_path):
    for path in (tmp_path, tmp_path / "nosuch.json"):
        with pytest.raises(UserError, match="bench --json"):
            benchmark.load(str(path))


def test_a_file_of_bench_is_compared_with_itself(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "PRODUCT_FLOPS", 1e8)
    file = str(tmp_path / "bench.json")
    bench.main(bench.Config(bench.Train(**TINY, steps=3, json=file)))
    measured = benchmark.load(file).measurements
    assert [len(values) for _, values in measured.values()] == [3, 3, 3, 1, 1]
    step, share, product = (np.median(measured[name][1]) for name in [*measured][:3])
    assert step > 0 and product > 0 and 0 < share < 100
    bench.main(bench.Config(bench.Compare((file, file))))
    assert capsys.readouterr().out.count("1.000 ") == 5


# ---------------------------------------------------------------------- serve


def test_a_request_that_fails_is_an_error_and_each_speed_is_written_once(tmp_path, monkeypatch, capsys):
    """Without a server and processes: what the clients measured is given."""
    stats = LoadStats(seconds=1.0, tokens=8, requests=3)
    monkeypatch.setattr(load, "closed_loop", lambda *_: stats)
    monkeypatch.setattr(bench, "serving", lambda engine, slots: contextlib.nullcontext(0))
    monkeypatch.setattr(bench.multiprocessing, "get_context", lambda _: SimpleNamespace(Pool=ThreadPool))
    monkeypatch.setattr(bench, "NEW_TOKENS", 2)
    config = bench.Serve(
        device="cpu", depth=1, head_dim=32, vocab_size=400, batches=(2,), threads=1,
        json=str(tmp_path / "serve.json"),
    )  # fmt: skip
    bench.main(bench.Config(config))
    assert "1 thread," in capsys.readouterr().out
    written = json.loads((tmp_path / "serve.json").read_text())
    names = ["what", "commit", "config", "device", "versions", "kernels", "threads", "measurements", "other_programs"]
    assert [*written] == names
    assert benchmark.load(str(tmp_path / "serve.json")).measurements["HTTP, 2 clients"] == ("tokens/s", [8.0] * 5)
    stats.failed = 1
    with pytest.raises(UserError, match="--batches 2: 5 of 15"):
        bench.main(bench.Config(config))
    for size in (100, 300):
        with pytest.raises(UserError, match="--vocab_size"):
            bench.main(bench.Config(replace(config, vocab_size=size)))


def test_a_full_disk_leaves_what_was_measured_before(tmp_path, monkeypatch):
    file = tmp_path / "bench.json"
    file.write_text("before")

    def full(path, text):
        with path.open("w") as new:
            new.write(text[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(Path, "write_text", full)
        bench.write_json("train", bench.Train(json=str(file)), {})
    assert file.read_text() == "before"
    bench.write_json("train", bench.Train(json=str(file)), {"measurements": {}})
    assert json.loads(file.read_text())["measurements"] == {}


def test_a_file_that_is_no_file_is_written_to(tmp_path):
    """As /dev/stdout, a link, and what it may lead to, a pipe."""
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "target")
    for name in ("link", "target"):
        with ThreadPoolExecutor(1) as thread:
            read = thread.submit((tmp_path / "target").read_text)
            bench.write_json("train", bench.Train(json=str(tmp_path / name)), {})
            assert json.loads(read.result(timeout=10))["what"] == "train"
    assert (tmp_path / "link").is_symlink()


# ---------------------------------------------------------------------- flags


@pytest.mark.parametrize(
    ("what", "flags"),
    [
        (bench.Train, {"threads": 4096}),
        (bench.Serve, {"threads": 4096}),
        (bench.Train, {"json": "/"}),
        (bench.Train, {"json": ""}),
        (bench.Train, {"json": f"/tmp/{'long' * 63}"}),  # no room for the suffix of the file beside it
        (bench.Train, {"json": f"/tmp/{'long' * 70}"}),
        (bench.Train, {"depth": 9, "source": "sft"}),
    ],
)
def test_a_flag_that_does_nothing_or_cannot_work_is_refused_before_anything_is_measured(what, flags):
    name = next(iter(flags))
    with pytest.raises(UserError, match=f"^--{name} "):
        bench.main(bench.Config(what(**flags)))


@pytest.mark.parametrize(
    "words",
    [
        "train --batches 1",
        "serve --steps 3",
        "serve --optimizer muon",
        "compare a.json b.json --json out.json",
        "compare a",
    ],
)
def test_a_flag_of_another_measurement_is_refused(words, capsys):
    with pytest.raises(SystemExit) as leaving:
        parse(bench.Config, words.split())
    assert leaving.value.code == 2 and capsys.readouterr().err.count("\n") == 1
