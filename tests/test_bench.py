"""scripts.bench: what it measures and writes."""

import contextlib
import json
from dataclasses import replace
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nanochat.ground.cli import UserError, parse
from nanochat.ground.log import counted
from nanochat.serve import load
from nanochat.serve.load import LoadStats
from scripts import bench

TINY: dict[str, Any] = {
    "device": "cpu", "depth": 1, "head_dim": 32, "max_seq_len": 16, "vocab_size": 64, "device_batch_size": 1,
    "compile": "off",
}  # fmt: skip


# ---------------------------------------------------------------------- train


def test_each_measurement_has_all_its_values(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "PRODUCT_FLOPS", 1e8)
    file = str(tmp_path / "bench.json")
    bench.main(bench.Config(bench.Train(**TINY, steps=3, json=file)))
    measured = json.loads(Path(file).read_text())["measurements"]
    assert [len(one["values"]) for one in measured.values()] == [3, 3, 3, 1, 1]
    step, share, product = (np.median(measured[name]["values"]) for name in [*measured][:3])
    assert step > 0 and product > 0 and 0 < share < 100


# ---------------------------------------------------------------------- serve


def test_a_request_that_fails_is_an_error_and_each_speed_is_written_once(tmp_path, monkeypatch, capsys):
    """Without a server and processes: what the clients measured is given."""
    stats = LoadStats(seconds=1.0, tokens=8, requests=3)
    monkeypatch.setattr(load, "closed_loop", lambda *_: stats)
    monkeypatch.setattr(bench, "serving", lambda engine, slots: contextlib.nullcontext(0))
    monkeypatch.setattr(bench.multiprocessing, "get_context", lambda _: SimpleNamespace(Pool=ThreadPool))
    monkeypatch.setattr(bench, "NEW_TOKENS", 2)
    config = bench.Serve(
        device="cpu", depth=1, head_dim=32, vocab_size=400, batches=(2,),
        json=str(tmp_path / "serve.json"),
    )  # fmt: skip
    bench.main(bench.Config(config))
    assert f"{counted(torch.get_num_threads(), 'thread')}, depth 1," in capsys.readouterr().out
    written = json.loads((tmp_path / "serve.json").read_text())
    names = ["what", "commit", "config", "device", "versions", "kernels", "threads", "measurements"]
    assert [*written] == names
    assert written["measurements"]["HTTP, 2 clients"] == {"unit": "tokens/s", "values": [8.0] * 5}
    stats.failed = 1
    with pytest.raises(UserError, match="--batches 2: 5 of 15"):
        bench.main(bench.Config(config))
    for size in (100, 300):
        with pytest.raises(UserError, match="--vocab_size"):
            bench.main(bench.Config(replace(config, vocab_size=size)))


# ---------------------------------------------------------------------- flags


@pytest.mark.parametrize(
    ("what", "flags"),
    [
        (bench.Train, {"json": "/"}),
        (bench.Train, {"json": ""}),
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
        "train a.json",
    ],
)
def test_a_flag_of_another_measurement_or_a_file_is_refused(words, capsys):
    with pytest.raises(SystemExit) as leaving:
        parse(bench.Config, words.split())
    assert leaving.value.code == 2 and capsys.readouterr().err.count("\n") == 1
