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
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from nanochat import model_folder
from nanochat import ranks as collectives
from nanochat.ground import storage
from nanochat.ground.cli import UserError
from nanochat.model_folder import newest, steps
from nanochat.run import saver
from nanochat.run.saver import clean_up, load_training
from nanochat.run.stop import Stop

FILES = {"manifest.json", "meta.json", "model.safetensors", "tokenizer.json", "training.json"}
KILLED, FAILED = 9, 3  # exit codes
OPERATIONS = ("open", "write", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir")

pytestmark = pytest.mark.usefixtures("base_folder")


def usable(folder: Path) -> tuple[int, int] | None:
    """(step, seed) of what a resume takes, every value of it compared; None where there is nothing."""
    clean_up(folder)
    found = newest(folder)
    if found is None:
        return None
    path, meta = found
    model, state, seed = smallest_model(100), momentum(), meta["seed"]
    assert meta["pretraining"]["seed"] == seed
    saver.load_trained(model, path / "model.safetensors")
    expected = smallest_model(seed).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    loader, _ = load_training(path, meta, state)
    assert torch.equal(state["a.momentum"], momentum(seed)["a.momentum"])
    ranks = range(meta["world_size"])
    assert [int(share["row"][0]) for share in loader] == [seed + rank for rank in ranks]
    assert {file.name for file in path.iterdir()} == FILES | {storage.share_name(rank) for rank in ranks}
    return meta["step"], seed


# ---------------------------------------------------------------------- processes that die


def die_at(at: int, torn: bool) -> None:
    """End this process before its file operation number `at`; torn: half-way through its write number `at`."""
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


def dist_of_two(ends: dict[int, Any], rank: Callable[[], int]) -> Any:
    """The collectives of a save between rank 0 and rank 1, over a pipe; `rank()` is the one that calls."""

    def exchange(value: Any) -> Any:
        end = ends[rank()]
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
        tensors[rank()], tensors[1 - rank()] = own, torch.tensor(exchange(own.tolist()), dtype=own.dtype)

    return SimpleNamespace(all_reduce=all_reduce, all_gather=all_gather, ReduceOp=torch.distributed.ReduceOp)


def forked(action: Callable[[int], Any], ranks: int) -> list[int]:
    """Ranks as processes that are left without any clearing up, two of them joined by a pipe, which breaks when one of
    them dies; returns their ids."""
    ends = multiprocessing.Pipe()
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child:
            children.append(child)
            continue
        code = FAILED
        try:
            if ranks > 1:
                ends[1 - rank].close()
                collectives.dist = dist_of_two({rank: ends[rank]}, lambda rank=rank: rank)
            action(rank)
            code = 0
        except UserError:
            pass
        finally:
            os._exit(code)
    for end in ends:
        end.close()
    return children


def stop_of(rank: int, ranks: int, path: Path) -> Stop:
    """A run's stop, over a file in place of the job's store."""
    stop = Stop(cpu_device(), 0)
    stop.device = cpu_device(rank=rank, world_size=ranks)
    stop.store = FileStore(str(path), ranks) if ranks > 1 else stop.store
    return stop


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# ---------------------------------------------------------------------- at any file operation


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders that the scenarios begin with, by name."""
    base = tmp_path_factory.mktemp("templates")
    names = ("older", "leftover", "damaged", "whole", "whole.tmp", "whole.old")
    for name in names:
        save_step(base / name, 1, seed=1)
        if name != "older":
            save_step(base / name, 2, seed=2)
    step = base / "leftover/step_000002.tmp"
    (base / "leftover/step_000002").rename(step)
    (step / "manifest.json").unlink()
    (step / "training.rank7.safetensors").write_bytes(b"of a run of eight")
    (base / "damaged/step_000002/model.safetensors").write_bytes(b"")
    for whole, other in ((".tmp", ".old"), (".old", ".tmp")):  # killed between two renames
        step = base / f"whole{whole}/step_000002"
        shutil.copytree(step, step.with_suffix(other))
        (step.with_suffix(other) / "meta.json").write_bytes(b"")
        step.rename(step.with_suffix(whole))
    return {name: base / name for name in names} | {"nothing": base / "nothing"}


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("template", "ranks", "doomed", "torn", "beside"),
    [
        pytest.param("nothing", 1, 0, False, False, marks=SLOW),
        ("older", 1, 0, True, False),
        ("older", 1, 0, False, True),  # keeps only the last step
        pytest.param("older", 1, 0, False, False, marks=SLOW),  # likewise
        pytest.param("leftover", 1, 0, False, False, marks=SLOW),
        pytest.param("damaged", 1, 0, False, True, marks=SLOW),
        ("whole", 1, 0, True, False),
        pytest.param("whole", 1, 0, False, False, marks=SLOW),
        pytest.param("older", 2, 0, False, False, marks=SLOW),
        pytest.param("older", 2, 1, True, False, marks=SLOW),
        pytest.param("older", 2, 0, False, True, marks=SLOW),
        pytest.param("older", 2, 1, False, True, marks=SLOW),
        ("whole.tmp", 1, 0, False, False),  # killed while an earlier kill is put right
        ("whole.old", 1, 0, False, False),
    ],
)
def test_a_kill_at_any_operation_costs_nothing(folder, templates, template, ranks, doomed, torn, beside):
    """Step 2 is saved with seed 7, also beside steps, or a folder is cleaned up; one rank ends at its first operation,
    its second, ..."""
    keep_last = 1 if (template, ranks, torn) == ("older", 1, False) else 0
    is_clean_up = "." in template
    outcomes = []
    for at in range(1, 400):
        shutil.rmtree(folder, ignore_errors=True)
        if template != "nothing":
            shutil.copytree(templates[template], folder)

        def run(rank: int, at: int = at) -> None:
            if rank == doomed:
                die_at(at, torn)
            if is_clean_up:
                clean_up(folder)
            else:
                stop = stop_of(rank, ranks, folder.with_name(f"store{at}")) if beside else None
                save_step(folder, 2, seed=7, rank=rank, ranks=ranks, keep_last=keep_last, stop=stop)

        codes = [exit_code(child) for child in forked(run, ranks)]
        assert codes[doomed] in (0, KILLED)
        outcomes.append(usable(folder))
        if keep_last:  # a step half deleted is not taken for one
            assert all(model_folder.is_whole(folder / f"step_{step:06d}") for step in steps(folder))
        if codes[doomed] == 0:
            break
        if doomed == 1:  # rank 0 misses it in the next collective
            assert codes[0] == FAILED and outcomes[-1] == (1, 1)
    assert not [path for path in folder.iterdir() if path.suffix]  # no leftovers
    if is_clean_up:
        assert set(outcomes) == {(2, 2)} and len(outcomes) > 5
        return
    before = {"nothing": None, "whole": (2, 2)}.get(template, (1, 1))
    first = outcomes.index((2, 7))
    assert set(outcomes[:first]) == {before} and set(outcomes[first:]) == {(2, 7)}  # once it is there it stays
    assert first >= (4 if torn or doomed else 21)
    assert steps(folder)[-1] == 2 and (not keep_last or steps(folder) == [2])


# ---------------------------------------------------------------------- at any moment


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
        ranks = 1 + trial % 2
        children = forked(lambda rank, ranks=ranks: save_for_ever(folder, rank, ranks), ranks)
        time.sleep(source.uniform(0.0, 1.0 if trials > 6 else 0.2))
        for child in source.sample(children, ranks):
            os.kill(child, signal.SIGKILL)
        for child in children:
            exit_code(child)
        found = usable(folder)
        assert found is None if reached == 0 and not steps(folder) else found[0] == max(steps(folder)) >= reached
        reached = found[0] if found else reached
    assert reached > 0


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
