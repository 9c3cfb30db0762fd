"""scripts.bench: what it measures and writes."""

import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanochat import scaling
from nanochat.ground.cli import UserError, parse
from nanochat.ground.log import counted
from scripts import bench

MODEL: dict[str, Any] = {"device": "cpu", "depth": 1, "head_dim": 32}
TINY = {**MODEL, "max_seq_len": 16, "vocab_size": 64, "device_batch_size": 1, "compile": "off"}
SERVED = {**MODEL, "vocab_size": 400, "batches": (2,)}


# ---------------------------------------------------------------------- train


def test_the_measurements_of_training_follow_from_the_seconds(tmp_path, monkeypatch):
    """By a clock on which the work of each round takes 2 s for the step and 4 s for the product."""
    now = itertools.accumulate(itertools.cycle([0, 2, 0, 4]))
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    monkeypatch.setattr(bench, "PRODUCT_FLOPS", 1e8)  # two products a round
    file = tmp_path / "bench.json"
    bench.main(bench.Config(bench.Train(**TINY, steps=3, json=str(file))))
    written = json.loads(file.read_text())
    measured = {name: one["values"] for name, one in written["measurements"].items()}
    assert measured["step"] == [16 / 2] * 3 and measured["warm-up"] == [12]
    flops = 2 * (2 * 16 * 1024**2) / 4
    assert measured["bare product"] == [flops / 1e9] * 3 and written["flops_per_second"]["product"] == flops
    step_flops = scaling.flops_per_token(scaling.model_config(1, 64, 16, head_dim=32)) * 16 / 2
    assert written["flops_per_second"]["step"] == step_flops
    assert measured["share of the bare product"] == [pytest.approx(100 * step_flops / flops)] * 3


# ---------------------------------------------------------------------- serve


def test_the_measurements_of_serving_follow_from_the_seconds(tmp_path, monkeypatch, capsys):
    """By a clock on which each trial takes 8 s."""
    monkeypatch.setattr(bench, "NEW_TOKENS", 2)
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=itertools.count(0, 8).__next__))
    bench.main(bench.Config(bench.Serve(**SERVED, json=str(tmp_path / "serve.json"))))
    assert f"{counted(torch.get_num_threads(), 'thread')}, depth 1," in capsys.readouterr().out
    written = json.loads((tmp_path / "serve.json").read_text())
    assert [*written] == ["what", "commit", "config", "device", "versions", "kernels", "threads", "measurements"]
    assert written["measurements"] == {"engine, batch 2": {"unit": "tokens/s", "values": [2 * 2 / 8] * 5}}


# ---------------------------------------------------------------------- flags


@pytest.mark.parametrize(
    ("what", "flags"),
    [
        (bench.Train, {"json": "/"}),
        (bench.Train, {"json": ""}),
        (bench.Train, {"depth": 9, "source": "sft"}),
        (bench.Serve, {"batches": (4, 0)}),
        (bench.Serve, {"max_seq_len": 143}),
        (bench.Serve, {"vocab_size": 100}),
        (bench.Serve, {"vocab_size": 300}),
    ],
)
def test_a_flag_that_does_nothing_or_cannot_work_is_refused_before_anything_is_measured(what, flags):
    name = next(iter(flags))
    with pytest.raises(UserError, match=f"--{name}"):
        bench.main(bench.Config(what(**(SERVED if what is bench.Serve else {}) | flags)))


@pytest.mark.parametrize("words", ["train --batches 1", "serve --steps 3", "train a.json"])
def test_a_flag_of_another_measurement_or_a_file_is_refused(words, capsys):
    with pytest.raises(SystemExit) as leaving:
        parse(bench.Config, words.split())
    assert leaving.value.code == 2 and capsys.readouterr().err.count("\n") == 1
