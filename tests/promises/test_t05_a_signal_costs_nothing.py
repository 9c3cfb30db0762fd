"""T5. SIGTERM, SIGHUP or Ctrl-C at any moment ends with a complete checkpoint within 10 seconds.

A signal comes to the launcher or to one rank while a real run trains, evaluates, samples or saves; the run that resumes
ends with the bytes of one that nothing disturbed. `NANOCHAT_TRIALS=20 pytest -m soak -k signal` is the long form.
"""

import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import (
    DPO,
    RL,
    SFT,
    TINY,
    Straight,
    call,
    command,
    losses,
    metrics,
    running,
    sha256,
    until,
    wait_for,
    workers_of,
)
from test_endings import RUN, STEPS
from tiny import lively_model, run_ranks, tiny_config

from nanochat import model_folder
from nanochat.bpb import bits_per_byte
from nanochat.device import Device
from nanochat.ground import paths
from nanochat.ground.cli import SIGNALS, Interrupted
from nanochat.run.stop import Stop

CHAT_RUNS = {
    "sft": (*SFT, "--source=base", "--eval_examples=160", "--eval_every=5", "--save_every=6"),
    "dpo": (*DPO, "--source=sft", "--eval_examples=100", "--eval_every=5", "--save_every=6"),
    "rl": (*RL, "--source=sft", "--eval_examples=100", "--eval_every=3", "--save_every=4"),
}


@pytest.fixture(scope="module")
def straight(home, tutored, tmp_path_factory) -> Callable[[int, str], tuple[Straight, float]]:
    """(ranks, stage) -> a run that nothing disturbs, and its seconds a step."""
    known: dict[tuple[int, str], tuple[Straight, float]] = {}

    def run(ranks: int, stage: str) -> tuple[Straight, float]:
        if (ranks, stage) not in known:
            begin = home if stage == "base" else tutored
            folder = shutil.copytree(begin, tmp_path_factory.mktemp(f"{stage}{ranks}") / "base")
            flags = RUN
            if stage != "base":
                tasks = (f"--tasks=gsm8k={folder / 'questions'}",) if stage == "rl" else ()
                flags = (*CHAT_RUNS[stage], "--source_tag=d1", f"--num_iterations={STEPS[stage]}", *tasks)
                flags = (*flags, "--parallel=fsdp")
            began = time.monotonic()
            one = Straight(folder, stage, flags, ranks, "", "run", "")
            known[ranks, stage] = one, (time.monotonic() - began) / STEPS[stage]
        return known[ranks, stage]

    return run


def hears_signals(pids: list[int]) -> bool:
    """Whether these processes have a handler for SIGTERM, which Python does not install."""
    masks = [re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE) for pid in pids]
    return bool(masks) and all(mask and int(mask[1], 16) >> (signal.SIGTERM - 1) & 1 for mask in masks)


def trial(straight: Any, ranks: int, stage: str, chance: random.Random, early: bool = False) -> str:
    """One signal at one moment, `early` before the first step is over; returns what it met."""
    run, step_seconds = straight(ranks, stage)
    number = chance.choice(SIGNALS)
    shutil.rmtree(run.folder)
    lines = run.base / f"runs/{stage}/run/metrics.jsonl"
    lines.unlink()
    with running(run.base, command(paths.STAGES[stage], run.flags, ranks)) as (process, output):
        if early:
            wait_for(output, "^horizon: ", process)
            until(lambda: hears_signals(workers_of(process) if ranks > 1 else [process.pid]), output, 60)
        else:
            wait_for(output, f"^{stage} +0/", process)
            reached = chance.randrange(STEPS[stage] * 2 // 3)
            until(lambda: lines.read_text().count("\n") > reached, output, 100)
            time.sleep(chance.uniform(0, step_seconds))
        workers = workers_of(process) if ranks > 1 else []
        to = chance.choice([process.pid, *workers])
        sent = time.monotonic()
        assert process.poll() is None, output.read_text()
        os.kill(to, number)
        status = process.wait(timeout=30)
        took = time.monotonic() - sent
    text = output.read_text()
    stopped = re.search(r"^stopped by (SIG\w+): saved (\S+); continue with --resume$", text, re.MULTILINE)
    assert stopped and stopped[1] == number.name, text
    folder = Path(stopped[2])
    meta = model_folder.verify(folder)
    assert took < 10, f"{took:.1f} s\n{text}"
    assert folder == run.folder / f"step_{meta['step']:06d}"
    assert model_folder.steps(run.folder)[-1] == meta["step"] and not list(run.folder.glob("*.tmp"))
    assert not early or meta["step"] == 0
    assert status == 128 + number and "Traceback" not in text, text
    run.run(ranks, "", "--resume")
    run.compare()
    at = "evaluation" if meta["progress"]["pending"] else "sampling" if early else "training"
    who = "all" if to == process.pid else f"worker {to}"
    return f"{stage} on {ranks} ranks, {number.name} to {who} at step {meta['step']} ({at}): {took:.1f} s"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "ranks", "seed", "early"),
    [
        ("base", 2, 34, False),  # SIGUSR1 to the launcher
        ("sft", 1, 9, False),  # SIGQUIT
        ("rl", 2, 2, False),
        ("rl", 1, 1, True),  # while the first replies are sampled
        pytest.param("base", 1, 0, False, marks=pytest.mark.soak),
        pytest.param("rl", 2, 2, True, marks=pytest.mark.soak),
    ],
)
def test_a_signal_at_any_moment_costs_nothing(straight, stage, ranks, seed, early):
    print(trial(straight, ranks, stage, random.Random(seed), early))


@pytest.mark.soak
@pytest.mark.parametrize("stage", ["base", "sft", "dpo", "rl"])
def test_many_signals_at_any_moment_cost_nothing(straight, stage):
    chance = random.Random(int(os.environ.get("NANOCHAT_SEED", "0")))
    for index in range(int(os.environ.get("NANOCHAT_TRIALS", "20"))):
        print(trial(straight, 1 + index % 2, stage, chance), flush=True)


def test_a_stop_in_the_first_evaluation_costs_nothing(base, tokenizer, monkeypatch):
    flags = (*TINY, "--num_iterations=3", "--eval_every=0")
    call("base_train", *flags)
    straight = metrics(base, "base")
    bits = [sorted(key for key in line if "bpb" in key) for line in straight]
    assert bits == [["val_bpb_before"], [], ["val_bpb"]]
    assert straight[0]["val_bpb_before"] > straight[-1]["val_bpb"]

    def stopped(*arguments: Any, should_stop: Any, **further: Any) -> float:
        should_stop.__self__.stop.signal = signal.SIGTERM  # as if one had come
        return bits_per_byte(*arguments, should_stop=should_stop, **further)

    with monkeypatch.context() as patch:
        patch.setattr("nanochat.bpb.bits_per_byte", stopped)
        with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
            call("base_train", *flags, "--model_tag=two")
    call("base_train", *flags, "--model_tag=two", "--resume")
    assert losses(base, "base", "two") == losses(base, "base")
    assert sha256(base, "base", 3, "two") == sha256(base, "base", 3)
    assert metrics(base, "base", "two")[0]["val_bpb_before"] == straight[0]["val_bpb_before"]


def evaluation_on_a_rank(device: Device, who: int) -> dict[str, Any]:
    calls = 0

    def should_stop() -> bool:
        nonlocal calls
        calls += 1
        return device.rank == who and calls == 3

    rows = torch.randint(0, 100, (12, 17))
    arguments = lively_model(tiny_config()), rows, torch.ones(100, dtype=torch.int64), 1, device
    try:
        value = bits_per_byte(*arguments, should_stop)
    except Interrupted:
        value = None
    return {"value": value, "calls": calls, "agreed": Stop(device, 0).agree(device.rank == who)}


@pytest.mark.slow
def test_an_evaluation_that_one_rank_breaks_off_has_no_value_on_any():
    whole = run_ranks(evaluation_on_a_rank, 7)
    assert whole[0]["value"] == whole[1]["value"] > 0 and not whole[0]["agreed"]
    broken = run_ranks(evaluation_on_a_rank, 1)
    assert [(rank["value"], rank["calls"], rank["agreed"]) for rank in broken] == [(None, 6, True), (None, 3, True)]
