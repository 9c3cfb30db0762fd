"""T1. A kill during a save never costs a run.

A forked process ends by os._exit before, or in the middle of, its k-th file operation, for every k, on one rank and on
two; then by kill -9 at random moments. What a resume takes afterwards is whole, and the newest that was complete.
"""

import io
import multiprocessing
import os
import posix
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import cpu_device, momentum, save_step, smallest_model

from nanochat import model_folder
from nanochat import ranks as collectives
from nanochat.ground import storage
from nanochat.ground.cli import UserError
from nanochat.model_folder import newest, steps
from nanochat.run import saver
from nanochat.run.saver import clean_up, load_training

FILES = {"manifest.json", "meta.json", "model.safetensors", "tokenizer.json", "training.json"}
KILLED, FAILED = 9, 3  # exit codes

pytestmark = pytest.mark.usefixtures("base_folder")


def usable(folder: Path, ranks: int = 1) -> tuple[int, int] | None:
    """(step, seed) of what a resume takes, every value of it compared; None where there is nothing."""
    clean_up(folder)
    found = newest(folder)
    if found is None:
        return None
    path, meta = found
    model, state, seed = smallest_model(100), momentum(), meta["seed"]
    saver.load_trained(model, path / "model.safetensors")
    expected = smallest_model(seed).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    loader, _ = load_training(path, meta, state)
    assert torch.equal(state["a.momentum"], momentum(seed)["a.momentum"])
    assert [int(share["row"][0]) for share in loader] == [seed + rank for rank in range(meta["world_size"])]
    assert {file.name for file in path.iterdir()} == FILES | {storage.share_name(r) for r in range(meta["world_size"])}
    return meta["step"], seed


# ---------------------------------------------------------------------- a kill at any file operation

OPERATIONS = ("open", "write", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir")


def die_at(at: int, torn: bool) -> Callable[[], int]:
    """Count this process's file operations, and end it before number `at`; torn: half-way through write `at`."""
    count, lock = 0, threading.Lock()

    def wrap(operation: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            nonlocal count
            with lock:
                count += 1
                if count == at:
                    if torn:
                        operation(args[0], args[1][: len(args[1]) // 2])
                    os._exit(KILLED)
            return operation(*args, **options)

        return counted

    for name in ("write",) if torn else OPERATIONS:
        setattr(os, name, wrap(getattr(os, name)))
    if not torn:
        io.open = wrap(io.open)
    return lambda: count


def forked(action: Callable[[], Any]) -> int:
    """Run in a child process that is left without any clearing up; returns its id."""
    child = os.fork()
    if child:
        return child
    code = FAILED
    try:
        action()
        code = 0
    except UserError:
        pass
    finally:
        os._exit(code)


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kills(prepare: Callable[[], None], action: Callable[[], Any], result: Callable[[], Any], torn: bool) -> list[Any]:
    """What `result` finds when `action` is killed at its first file operation, its second, ...; the last one lived."""
    outcomes = []
    for at in range(1, 400):
        prepare()

        def doomed(at: int = at) -> None:
            die_at(at, torn)
            action()

        code = exit_code(forked(doomed))
        assert code in (0, KILLED)
        outcomes.append(result())
        if code == 0:
            return outcomes
    raise AssertionError("it never ended")


SCENARIOS = {  # what lies there when step 2 is saved with seed 7, and what a resume may find if that fails
    "the first": (None, {None}),
    "after an older one": ("older", {(1, 1)}),
    "over a leftover": ("leftover", {(1, 1)}),
    "over a damaged one": ("damaged", {(1, 1)}),
    "over a whole one": ("whole", {(2, 2)}),
    "with retention": ("older", {(1, 1)}),
}


@pytest.fixture(scope="module")
def templates(tmp_path_factory) -> dict[str | None, Path]:
    """The folders that the scenarios begin with."""
    base = tmp_path_factory.mktemp("templates")
    for name in ("older", "leftover", "damaged", "whole"):
        save_step(base / name, 1, seed=1)
        if name != "older":
            step = save_step(base / name, 2, seed=2)
            if name == "leftover":
                step = step.rename(step.with_name(step.name + ".tmp"))
                (step / "manifest.json").unlink()
                (step / "training.rank7.safetensors").write_bytes(b"of a run of eight")
            if name == "damaged":
                (step / "model.safetensors").write_bytes(b"")
    return {None: base / "nothing", **{path.name: path for path in base.iterdir()}}


@pytest.mark.parametrize(
    ("scenario", "torn"),
    [
        pytest.param("the first", False, marks=pytest.mark.slow),
        ("after an older one", True),
        pytest.param("over a leftover", False, marks=pytest.mark.slow),
        pytest.param("over a damaged one", False, marks=pytest.mark.slow),
        ("over a whole one", True),
        ("over a whole one", False),
        ("with retention", False),
    ],
)
def test_a_kill_at_any_operation_costs_nothing(folder, templates, scenario, torn):
    template, allowed = SCENARIOS[scenario]
    keep_last = 1 if scenario == "with retention" else 0

    def prepare() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        if template:
            shutil.copytree(templates[template], folder)

    def result() -> tuple[int, int] | None:
        found = usable(folder)
        if keep_last:  # a step half deleted is not taken for one
            assert all(model_folder.is_whole(folder / f"step_{step:06d}") for step in steps(folder))
        return found

    outcomes = kills(prepare, lambda: save_step(folder, 2, seed=7, keep_last=keep_last), result, torn)
    assert set(outcomes) == allowed | {(2, 7)}
    first = outcomes.index((2, 7))
    assert set(outcomes[first:]) == {(2, 7)}  # once it is there it stays
    assert first >= (5 if torn else 21)
    assert not [path for path in folder.iterdir() if path.suffix]  # no leftovers
    if scenario == "with retention":
        assert steps(folder) == [2]


@pytest.mark.parametrize("whole", [".tmp", ".old"])
def test_a_kill_while_cleaning_up_costs_nothing(folder, templates, whole):
    """Killed between two renames, and killed again while that is put right."""

    def prepare() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(templates["whole"], folder)
        for suffix in (".tmp", ".old"):
            shutil.copytree(folder / "step_000002", folder / f"step_000002{suffix}")
            if suffix != whole:
                (folder / f"step_000002{suffix}" / "meta.json").write_bytes(b"")
        shutil.rmtree(folder / "step_000002")

    outcomes = kills(prepare, lambda: clean_up(folder), lambda: usable(folder), torn=False)
    assert set(outcomes) == {(2, 2)} and len(outcomes) > 5


def dist_of_two(ranks: dict[Any, Any], me: Callable[[], Any]) -> Any:
    """The collectives of a save between rank 0 and rank 1, over a pipe. `ranks` holds the ends, `me()` is this rank."""

    def exchange(value: Any) -> Any:
        end = ranks[me()]
        try:
            end.send(value)
            assert end.poll(5)
            return end.recv()
        except (OSError, EOFError) as error:
            raise RuntimeError("gloo: connection closed by peer") from error

    def all_reduce(number: torch.Tensor, op: Any) -> None:
        assert op == torch.distributed.ReduceOp.MAX
        number.fill_(max(int(number), exchange(int(number))))

    def all_gather(tensors: list[torch.Tensor], own: torch.Tensor) -> None:
        tensors[me()], tensors[1 - me()] = own, torch.tensor(exchange(own.tolist()), dtype=own.dtype)

    return SimpleNamespace(all_reduce=all_reduce, all_gather=all_gather, ReduceOp=torch.distributed.ReduceOp)


def forked_ranks(action: Callable[[int], Any]) -> list[int]:
    """Ranks 0 and 1 as processes joined by a pipe, which breaks when one of them dies; returns their ids."""
    ends = multiprocessing.Pipe()

    def run(rank: int) -> None:
        ends[1 - rank].close()
        collectives.dist = dist_of_two({rank: ends[rank]}, lambda: rank)
        action(rank)

    children = [forked(lambda rank=rank: run(rank)) for rank in (0, 1)]
    for end in ends:
        end.close()
    return children


@pytest.mark.slow
@pytest.mark.parametrize(("doomed_rank", "torn"), [(0, False), (1, True)])
def test_a_kill_of_one_of_two_ranks_costs_nothing(folder, templates, doomed_rank, torn):
    outcomes = []
    for at in range(1, 400):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(templates["older"], folder)

        def run(rank: int, at: int = at) -> None:
            if rank == doomed_rank:
                die_at(at, torn)
            save_step(folder, 2, seed=7, rank=rank, ranks=2)

        codes = [exit_code(child) for child in forked_ranks(run)]
        assert codes[doomed_rank] in (0, KILLED)
        outcomes.append(usable(folder))
        if codes[doomed_rank] == 0:
            break
        if doomed_rank == 1:  # rank 0 misses it in the next collective
            assert codes[0] == FAILED and outcomes[-1] == (1, 1)
    assert set(outcomes) == {(1, 1), (2, 7)}
    first = outcomes.index((2, 7))
    assert set(outcomes[first:]) == {(2, 7)}
    assert len(outcomes) >= (5 if torn or doomed_rank else 31)


def save_for_ever(folder: Path, rank: int, ranks: int) -> None:
    """What a training run does to its folder: resume, then a save a step, of which the last two are kept."""
    device = cpu_device(rank=rank, world_size=ranks)

    def clean() -> str:
        clean_up(folder)
        return str((steps(folder) or [0])[-1] + 1)

    for step in range(int(collectives.decide_on_rank_zero(device, clean) or 0), 10**6):
        save_step(folder, step, seed=step % 1000, rank=rank, ranks=ranks, keep_last=2)


@pytest.mark.parametrize("trials", [6, pytest.param(200, marks=pytest.mark.soak)])
def test_random_kills_cost_nothing(folder, monkeypatch, trials):
    """kill -9 at a random moment, of one process and of two; every resume takes up the newest."""
    monkeypatch.setattr(os, "fsync", posix.fsync)  # the real one
    source, reached = random.Random(0), 0
    for trial in range(trials):
        if trial % 2:
            children = forked_ranks(lambda rank: save_for_ever(folder, rank, 2))
        else:
            children = [forked(lambda: save_for_ever(folder, 0, 1))]
        time.sleep(source.uniform(0.0, 1.0 if trials > 6 else 0.2))
        for child in source.sample(children, len(children)):
            os.kill(child, signal.SIGKILL)
        for child in children:
            exit_code(child)
        found = usable(folder)
        assert found is None if reached == 0 and not steps(folder) else found[0] == max(steps(folder)) >= reached
        reached = found[0] if found else reached
    assert reached > trials / 2


def test_everything_reaches_the_disk_before_the_rename_and_the_rename_after(folder, monkeypatch):
    flushed, at_rename = [], []
    rename = os.rename

    def record_rename(source, target, **options):
        if Path(source).name == "step_000001.tmp":
            at_rename[:] = [len(flushed), {file.stat().st_ino for file in (Path(source), *Path(source).iterdir())}]
        rename(source, target, **options)

    monkeypatch.setattr(os, "fsync", lambda handle: flushed.append(os.fstat(handle).st_ino))
    monkeypatch.setattr(os, "rename", record_rename)
    save_step(folder, 1)
    before, inodes = at_rename
    assert len(inodes) == 1 + len(FILES) + 1
    assert inodes <= set(flushed[:before])
    assert folder.stat().st_ino in flushed[before:]
