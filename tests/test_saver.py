"""Saving: a kill at any file operation, a full disk at any byte, a lost rank cost no run; training continues meanwhile.

A kill is real: a forked process ends by os._exit before, or in the middle of, its k-th file operation, for every k.
"""

import errno
import gc
import io
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Momentum, cpu_device, run_ranks, smallest_model, smallest_training

from nanochat import checkpoint_manager
from nanochat.checkpoint_manager import Saver, Training, clean_up, load_training, newest, steps
from nanochat.data.loader import Loader, LoaderState
from nanochat.device import Device
from nanochat.parallel.fsdp import shard
from nanochat.parallel.mesh import lay_out
from nanochat.run.flags import TrainFlags
from nanochat.run.resume import resume
from nanochat.scaling import Rates
from nanochat.shell import paths, storage
from nanochat.shell.cli import UserError
from nanochat.tokenizer import Tokenizer
from nanochat.train import make_optimizer, next_token_loss, train_step

TOKENIZER = Tokenizer([bytes([value]) for value in range(256)])
FILES = {"manifest.json", "meta.json", "model.safetensors", "tokenizer.json", "training.json"}
ROOT = Path(__file__).resolve().parent.parent
KILLED, FAILED = 9, 3  # exit codes


@pytest.fixture(autouse=True)
def base_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # thousands of saves need not reach the disk
    return tmp_path


@pytest.fixture
def folder() -> Path:
    return paths.checkpoint_dir("base", "tiny")


def begin(saver: Saver, step: int, seed: int) -> Path:
    training = smallest_training(seed + saver.device.rank)
    return saver.save(step, smallest_model(seed), TOKENIZER, {"stage": "base", "seed": seed}, training)


def save_step(folder: Path, step: int, seed: int = 0, **options: Any) -> Path:
    with Saver(folder, cpu_device(), **options) as saver:
        return begin(saver, step, seed)


def usable(folder: Path, ranks: int = 1) -> tuple[int, int] | None:
    """(step, seed) of what a resume takes, every value of it compared; None where there is nothing."""
    clean_up(folder)
    found = newest(folder)
    if found is None:
        return None
    path, meta = found
    model, momentum, seed = smallest_model(100), Momentum(), meta["seed"]
    checkpoint_manager.load_weights(model, path)
    expected = smallest_model(seed).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    loader, _ = load_training(path, meta, momentum, cpu_device())
    assert torch.equal(momentum.tensors["a.momentum"], smallest_training(seed).optimizer["a.momentum"])
    assert [int(share["row"][0]) for share in loader] == [seed + rank for rank in range(meta["world_size"])]
    assert {file.name for file in path.iterdir()} == FILES | {storage.share_name(r) for r in range(meta["world_size"])}
    return meta["step"], seed


# ---------------------------------------------------------------------- a kill at any file operation

OPERATIONS = ("open", "write", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir")


def die_at(at: int, torn: bool) -> Callable[[], int]:
    """Count this process's file operations, and end it before, or half-way through, number `at`."""
    count, lock = 0, threading.Lock()

    def wrap(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            nonlocal count
            with lock:
                count += 1
                if count == at:
                    if torn and name == "write":
                        operation(args[0], args[1][: len(args[1]) // 2])
                    os._exit(KILLED)
            return operation(*args, **options)

        return counted

    for name in OPERATIONS:
        setattr(os, name, wrap(name, getattr(os, name)))
    io.open = wrap("open", io.open)
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


CASES = [("over a whole one", True), ("with retention", False)]
CASES += [pytest.param("after an older one", True, marks=pytest.mark.slow)]
CASES += [
    pytest.param(scenario, False, marks=pytest.mark.slow) for scenario in SCENARIOS if scenario != "with retention"
]


@pytest.mark.parametrize(("scenario", "torn"), CASES)
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
            assert all(checkpoint_manager.is_whole(folder / f"step_{step:06d}") for step in steps(folder))
        return found

    outcomes = kills(prepare, lambda: save_step(folder, 2, seed=7, keep_last=keep_last), result, torn)
    assert len(outcomes) > 25
    assert set(outcomes) == allowed | {(2, 7)}
    first = outcomes.index((2, 7))
    assert set(outcomes[first:]) == {(2, 7)}  # once it is there it stays
    assert first > 20
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


def ranks_save(folder: Path, rank: int, barrier: Any) -> None:
    """Rank 0 or 1 of two saves step 2, as a process of its own."""

    def meet() -> None:
        try:
            barrier.wait(timeout=0.5)
        except threading.BrokenBarrierError:
            os._exit(FAILED)  # a collective without the other rank fails

    checkpoint_manager.dist.barrier = meet  # type: ignore[assignment]
    with Saver(folder, cpu_device(rank=rank, world_size=2)) as saver:
        saver.patience_seconds = 0.2
        begin(saver, 2, seed=7)


@pytest.mark.slow
@pytest.mark.parametrize("doomed_rank", [0, 1])
@pytest.mark.parametrize("torn", [False, True])
def test_a_kill_of_one_of_two_ranks_costs_nothing(folder, templates, doomed_rank, torn):
    outcomes = []
    for at in range(1, 400):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(templates["older"], folder)
        barrier = multiprocessing.get_context("fork").Barrier(2)

        def run(rank: int, at: int = at, barrier: Any = barrier) -> None:
            if rank == doomed_rank:
                die_at(at, torn)
            ranks_save(folder, rank, barrier)

        children = [forked(lambda rank=rank: run(rank)) for rank in (0, 1)]
        codes = [exit_code(child) for child in children]
        assert codes[doomed_rank] in (0, KILLED)
        outcomes.append(usable(folder))
        if doomed_rank == 1 and codes == [FAILED, KILLED]:  # rank 0 waited in vain
            assert outcomes[-1] == (1, 1)
        if codes[doomed_rank] == 0:
            break
    assert set(outcomes) == {(1, 1), (2, 7)}
    first = outcomes.index((2, 7))
    assert set(outcomes[first:]) == {(2, 7)}
    assert len(outcomes) > (30 if doomed_rank == 0 else 5)


def save_for_ever(folder: Path, rank: int, ranks: int, barrier: Any) -> None:
    """What a training run does to its folder: resume, then a save a step, of which the last two are kept."""
    checkpoint_manager.dist.barrier = lambda: barrier.wait(timeout=5)  # type: ignore[assignment]
    if rank == 0:
        clean_up(folder)
    barrier.wait(timeout=5)
    first = (steps(folder) or [0])[-1] + 1
    with Saver(folder, cpu_device(rank=rank, world_size=ranks), keep_last=2, keep_every=50) as saver:
        saver.patience_seconds = 5
        for step in range(first, 10**6):
            begin(saver, step, seed=step % 1000)


@pytest.mark.soak
def test_random_kills_cost_nothing(folder, monkeypatch):
    """200 times kill -9 at a random moment, of one process and of two; every resume takes up the newest."""
    monkeypatch.undo()  # with the real fsync
    source, reached, unusable, trials = random.Random(0), 0, 0, 200
    for trial in range(trials):
        ranks = 1 + trial % 2
        barrier = multiprocessing.get_context("fork").Barrier(ranks)
        children = [forked(lambda r=r, n=ranks, b=barrier: save_for_ever(folder, r, n, b)) for r in range(ranks)]
        time.sleep(source.uniform(0.0, 1.0))
        for child in source.sample(children, ranks):
            os.kill(child, signal.SIGKILL)
            time.sleep(source.uniform(0.0, 0.05))
        for child in children:
            exit_code(child)
        found = usable(folder)
        unusable += found is None and reached > 0
        assert found is None or (found[0] >= reached and found[0] == max(steps(folder)))
        reached = found[0] if found else reached
    print(f"{trials} kills, {reached} steps saved, {unusable} unusable")
    assert unusable == 0 and reached > trials


# ---------------------------------------------------------------------- a full disk


class FullDisk:
    """Writes of the threads named so go through up to a number of bytes, then part of one, then no more."""

    def __init__(self, room: int, thread: str = ""):
        self.room, self.thread, self.write = room, thread, os.write

    def __call__(self, handle: int, data: Any) -> int:
        if self.thread not in threading.current_thread().name:
            return self.write(handle, data)
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        part = data[: self.room]
        self.room -= len(part)
        return self.write(handle, part)


def test_a_disk_that_fills_up_at_any_byte_is_reported(folder, monkeypatch):
    path = save_step(folder, 1, seed=1)
    size = sum(file.stat().st_size for file in path.iterdir() if file.name != "tokenizer.json")  # written by its own
    needed = sum(t.nbytes for part in (smallest_model().state_dict(), smallest_training().to_state(cpu_device()))
                 for t in part.values())  # fmt: skip
    for number in range(50):
        room = size * number // 50
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", FullDisk(room))
            with pytest.raises(UserError, match=rf"the disk is full: a checkpoint needs {needed:,} bytes, .* free"):
                save_step(folder, 2, seed=2)
        assert [file.name for file in folder.iterdir()] == ["step_000001"]  # and the room is given back
        assert usable(folder) == (1, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", FullDisk(size + 100))
        save_step(folder, 2, seed=2)
    assert usable(folder) == (2, 2)


def test_a_real_small_disk_fills_up(tmp_path):
    """A file system of so many bytes: whatever is saved on it is whole, whatever is not is reported."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root mounts a file system")
    try:
        refused = 0
        for step in range(1, 12):
            try:
                save_step(disk / "run", step, seed=step)
            except UserError as error:
                refused += 1
                assert "needs" in str(error) and "free" in str(error)
        assert refused and usable(disk / "run") == (11 - refused, 11 - refused)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def two_savers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Saver]:
    """Two ranks in one process: their savers meet in files only."""
    monkeypatch.setattr(checkpoint_manager.dist, "barrier", lambda: None)
    return [Saver(folder, cpu_device(rank=rank, world_size=2)) for rank in (0, 1)]


def test_two_ranks_save_one_checkpoint(folder, monkeypatch):
    write = os.write

    def slowly(handle: int, data: Any) -> int:
        if threading.current_thread().name == "save-rank1":
            data = data[: len(data) // 2 + 1]
            time.sleep(2 * checkpoint_manager.POLL_SECONDS)  # so that rank 0 looks at whatever is half written
        return write(handle, data)

    monkeypatch.setattr(checkpoint_manager, "POLL_SECONDS", 0.002)
    monkeypatch.setattr(os, "write", slowly)
    savers = two_savers(folder, monkeypatch)
    for step in (1, 2):
        assert [begin(saver, step, seed=step) for saver in savers] == [folder / f"step_{step:06d}"] * 2
    for saver in reversed(savers):
        saver.wait()
    assert usable(folder) == (2, 2) and steps(folder) == [1, 2]


def test_everything_reaches_the_disk_before_the_rename_and_the_rename_after(folder, monkeypatch):
    flushed, at_rename = [], []
    rename = os.rename

    def record_rename(source, target, **options):
        if Path(source).name == "step_000001.tmp":
            at_rename[:] = [len(flushed), {file.stat().st_ino for file in (Path(source), *Path(source).iterdir())}]
        rename(source, target, **options)

    monkeypatch.setattr(os, "fsync", lambda handle: flushed.append(os.fstat(handle).st_ino))
    monkeypatch.setattr(os, "rename", record_rename)
    savers = two_savers(folder, monkeypatch)
    for saver in savers:
        begin(saver, 1, seed=1)
    for saver in savers:
        saver.wait()
    before, inodes = at_rename
    assert len(inodes) == 1 + len(FILES) + 2
    assert inodes <= set(flushed[:before])
    assert folder.stat().st_ino in flushed[before:]


@pytest.mark.parametrize("room", [0, 50, 600])
def test_a_disk_that_is_full_for_one_rank_is_reported_by_both(folder, monkeypatch, room):
    save_step(folder, 1, seed=1)
    savers = two_savers(folder, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", FullDisk(room, "save-rank1"))
        for saver in savers:
            saver.patience_seconds = 0.3
            begin(saver, 2, seed=2)
        with pytest.raises(UserError, match="the disk is full"):
            savers[1].wait()
        with pytest.raises(UserError, match=r"step_000002 .*rank 1"):  # in its words, or by waiting in vain
            savers[0].wait()
    assert usable(folder) == (1, 1)
    for saver in savers:  # with room again it works
        begin(saver, 3, seed=3)
    for saver in savers:
        saver.wait()
    assert usable(folder) == (3, 3)


def test_too_little_room_is_reported_before_writing(folder, monkeypatch):
    save_step(folder, 1, seed=1)
    usage = namedtuple("usage", "total used free")(10**6, 10**6 - 1234, 1234)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        patch.setattr(os, "write", lambda *_: pytest.fail("it was written"))
        with pytest.raises(UserError, match=r"the disk is full.*1,234 free.*NANOCHAT_BASE_DIR"):
            begin(Saver(folder, cpu_device()), 2, seed=2)
    assert [file.name for file in folder.iterdir()] == ["step_000001"]
    assert usable(folder) == (1, 1)


def test_another_error_is_not_called_a_full_disk(folder, monkeypatch):
    def fails(*_: Any) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "write", fails)
    with pytest.raises(OSError, match="Read-only") as caught:
        save_step(folder, 1)
    assert not isinstance(caught.value, UserError)


# ---------------------------------------------------------------------- while training continues


@pytest.fixture
def gate(monkeypatch) -> threading.Event:
    """Nothing is written before it is set."""
    opened, write_file = threading.Event(), storage.write_file

    def waits(*args: Any) -> dict[str, Any]:
        assert opened.wait(timeout=30)
        return write_file(*args)

    monkeypatch.setattr(storage, "write_file", waits)
    return opened


def test_what_is_saved_is_what_was_there_when_save_was_called(folder, gate):
    model, training, meta = (
        smallest_model(4),
        smallest_training(4),
        {"stage": "base", "seed": 4, "progress": {"step": 2}},
    )
    with Saver(folder, cpu_device()) as saver:
        saver.save(2, model, TOKENIZER, meta, training)
        with torch.no_grad():
            for tensor in (*model.parameters(), *training.optimizer.values(), *training.loader.values()):
                tensor.zero_()
        meta["progress"]["step"] = 3
        assert steps(folder) == []  # training is here already, nothing is written yet
        gate.set()
    assert usable(folder) == (2, 4)
    assert newest(folder)[1]["progress"] == {"step": 2}


def test_a_save_waits_for_the_one_before(folder, gate):
    saver = Saver(folder, cpu_device())
    begin(saver, 1, seed=1)
    threading.Timer(0.1, gate.set).start()
    begin(saver, 2, seed=2)
    assert steps(folder)[0] == 1
    saver.wait()
    assert steps(folder) == [1, 2]


@pytest.mark.slow
def test_saving_leaves_no_thread_file_or_copy_behind(folder):
    def held() -> tuple[int, int, int]:
        gc.collect()
        tensors = sum(type(thing) is torch.Tensor for thing in gc.get_objects())
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), tensors

    saver, model, training = Saver(folder, cpu_device(), keep_last=2), smallest_model(), smallest_training()
    counts = []
    for step in range(1, 21):
        saver.save(step, model, TOKENIZER, {"stage": "base"}, training)
        saver.wait()
        counts.append(held())
    assert counts[1:] == [counts[1]] * 19


@pytest.mark.parametrize("how", ["wait", "save", "with"])
def test_what_went_wrong_is_raised(folder, monkeypatch, how):
    save_step(folder, 1, seed=1)
    saver = Saver(folder, cpu_device())
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", FullDisk(100))
        with pytest.raises(UserError, match="the disk is full"):
            if how == "with":
                with saver:
                    begin(saver, 2, seed=2)
            begin(saver, 2, seed=2)
            saver.wait() if how == "wait" else begin(saver, 3, seed=3)
    saver.wait()  # reported once
    begin(saver, 4, seed=4)
    saver.wait()
    assert usable(folder) == (4, 4)


def test_an_error_of_training_is_not_hidden_by_one_of_saving(folder, monkeypatch, capsys):
    monkeypatch.setattr(os, "write", FullDisk(100))
    with pytest.raises(KeyError), Saver(folder, cpu_device()) as saver:
        begin(saver, 2, seed=2)
        raise KeyError
    assert "step 2 was not saved: the disk is full" in capsys.readouterr().err


def test_a_rank_that_never_comes_is_named(folder, monkeypatch):
    save_step(folder, 1, seed=1)
    saver, _ = two_savers(folder, monkeypatch)
    saver.patience_seconds = 0.1
    begin(saver, 2, seed=2)
    with pytest.raises(UserError, match=r"step_000002 .*rank 1"):
        saver.wait()
    assert usable(folder) == (1, 1)


def test_a_rank_that_comes_too_late_is_named(folder, monkeypatch):
    savers = two_savers(folder, monkeypatch)
    begin(savers[0], 2, seed=2)
    shutil.rmtree(folder / "step_000002.tmp")
    with pytest.raises(UserError, match="rank 0"):
        begin(savers[1], 2, seed=2)
        savers[1].wait()
    with pytest.raises(Exception, match="step_000002"):
        savers[0].patience_seconds = 0.0
        savers[0].wait()


# ---------------------------------------------------------------------- what is kept


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "left"),
    [(0, 0, [1, 2, 3, 4, 5, 6]), (0, 4, [1, 2, 3, 4, 5, 6]), (1, 0, [6]), (2, 0, [5, 6]), (2, 2, [2, 4, 5, 6]),
     (1, 5, [5, 6]), (9, 0, [1, 2, 3, 4, 5, 6])],
)  # fmt: skip
def test_old_steps_go(folder, keep_last, keep_every, left):
    with Saver(folder, cpu_device(), keep_last=keep_last, keep_every=keep_every) as saver:
        for step in range(1, 7):
            begin(saver, step, seed=step)
    assert steps(folder) == left
    assert usable(folder) == (6, 6)


def test_a_damaged_step_does_not_count_among_those_kept(folder):
    """Of an earlier start's steps 1 to 5 the last two are damaged: a fallback from 6 must not be one of them."""
    for step in range(1, 6):
        save_step(folder, step, seed=step)
    for step in (4, 5):
        (folder / f"step_{step:06d}/model.safetensors").write_bytes(b"")
    with Saver(folder, cpu_device(), keep_last=2) as saver:
        begin(saver, 6, seed=6)
        saver.wait()
        assert steps(folder) == [3, 4, 5, 6]  # whole, and behind it what is damaged
        assert usable(folder) == (6, 6)
        (folder / "step_000006/meta.json").rename(folder / "meta.json")
        assert usable(folder) == (3, 3)
        (folder / "meta.json").rename(folder / "step_000006/meta.json")
        begin(saver, 7, seed=7)
    assert steps(folder) == [6, 7]


def test_each_step_is_read_back_once(folder, monkeypatch):
    for step in (1, 2, 3):
        save_step(folder, step, seed=step)
    read, verify = [], checkpoint_manager.verify
    monkeypatch.setattr(checkpoint_manager, "verify", lambda path: (read.append(path.name[-1]), verify(path))[1])
    with Saver(folder, cpu_device(), keep_last=3) as saver:
        for step in (4, 5, 6):
            begin(saver, step, seed=step)
    assert "".join(read) == "43256" and steps(folder) == [4, 5, 6]


def test_only_steps_are_deleted(folder):
    for name in ("step_x", "step_000001.mine", "notes", "best"):
        (folder / name).mkdir(parents=True)
    (folder / "step_000002.txt").write_text("mine")
    before = set(folder.iterdir())
    with Saver(folder, cpu_device(), keep_last=1) as saver:
        for step in (3, 4):
            begin(saver, step, seed=step)
    clean_up(folder)
    assert set(folder.iterdir()) == before | {folder / "step_000004"}


def test_nothing_is_deleted_while_the_new_one_is_damaged(folder, monkeypatch, capsys):
    save_step(folder, 1, seed=1)
    commit = checkpoint_manager.commit

    def damaging(unfinished: Path, final: Path, files: dict[str, Any]) -> None:
        commit(unfinished, final, files)
        (final / "model.safetensors").write_bytes(b"")

    monkeypatch.setattr(checkpoint_manager, "commit", damaging)
    for step in (2, 3):
        save_step(folder, step, seed=step, keep_last=1)
    assert steps(folder) == [1, 2, 3]
    assert "step_000003 is damaged as soon as it is saved" in capsys.readouterr().err
    assert usable(folder) == (1, 1)
    monkeypatch.undo()
    save_step(folder, 2, seed=5, keep_last=1)  # the run resumes from 1, below a later step that is damaged
    assert steps(folder) == [2, 3]
    assert usable(folder) == (2, 5)


# ---------------------------------------------------------------------- runs that stop and resume


class Corpus:
    """Texts of odd lengths, so that packing has leftovers."""

    name = "numbers"

    def block_count(self) -> int:
        return 24

    def read_block(self, index: int) -> list[str]:
        return [f"{index} {n} " + "ab" * ((index * 7 + n * 5) % 23) for n in range(5)]


def train(device: Device, base: str, until: int, save_every: int, layout: str = "ddp") -> dict[str, list[Any]]:
    """A run of a script in small: resume, train to step `until`, save; what every step saw, lost and drew."""
    folder, ranks = Path(base), device.world_size
    torch.manual_seed(device.rank)
    model = smallest_model(1)
    laid_out = lay_out(device, layout)  # type: ignore[arg-type]
    shard(model, laid_out, device)
    rates = Rates(0.02, 0.01, 0.01, 0.01, 0.01, 0.01, 0.1)
    optimizer = make_optimizer(model, rates, device, layout=laid_out)
    progress, shares = resume(folder, TrainFlags(), until, model, TOKENIZER, optimizer, device, fingerprints={})
    loader = Loader(
        Corpus(), TOKENIZER, 4 // ranks, 8, rank=device.rank, world_size=ranks,
        state=LoaderState.merge(shares) if shares else None,
    )  # fmt: skip
    seen: dict[str, list[Any]] = {"losses": [], "rows": [], "drawn": []}
    with Saver(folder, device, keep_last=2) as saver:
        for step in range(progress.step, until):
            batch = next(loader)
            stats = train_step(
                model, optimizer, [(batch.inputs, batch.targets)], next_token_loss, device=device, weight_decay=0.5
            )
            seen["losses"].append(stats.loss.item())
            seen["rows"].append(batch.inputs.tolist())
            seen["drawn"].append(torch.rand(()).item())
            progress.step = step + 1
            if progress.step % save_every == 0 or progress.step == until:
                training = Training(optimizer.state_dict(), batch.state.to_tensors(), device.rng_state())
                meta = {"config": {"seed": 0}, "progress": progress.to_dict()}
                saver.save(progress.step, model, TOKENIZER, meta, training)
    loader.close()
    return seen


def weights_sha256(folder: Path, step: int) -> str:
    return json.loads((folder / f"step_{step:06d}" / "manifest.json").read_text())["model.safetensors"]["sha256"]


def joined(parts: list[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


def test_twenty_and_ten_and_ten_steps_are_forty(tmp_path):
    straight = train(cpu_device(), str(tmp_path / "straight"), 40, save_every=100)
    parts = [train(cpu_device(), str(tmp_path / "parts"), until, save_every=5) for until in (20, 30, 40)]
    assert [len(part["losses"]) for part in parts] == [20, 10, 10]
    assert joined(parts) == straight
    assert weights_sha256(tmp_path / "parts", 40) == weights_sha256(tmp_path / "straight", 40)
    assert steps(tmp_path / "parts") == [35, 40]


def test_a_damaged_step_is_done_again(tmp_path, capsys):
    straight = train(cpu_device(), str(tmp_path / "straight"), 20, save_every=100)
    train(cpu_device(), str(tmp_path / "run"), 15, save_every=5)
    file = tmp_path / "run" / "step_000015" / "training.rank0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    again = train(cpu_device(), str(tmp_path / "run"), 20, save_every=5)
    assert again["losses"] == straight["losses"][10:]
    assert "step_000015/training.rank0.safetensors is damaged; falling back" in capsys.readouterr().err
    assert weights_sha256(tmp_path / "run", 20) == weights_sha256(tmp_path / "straight", 20)


def fsdp_then_ddp(device: Device, base: str) -> dict[str, list[Any]]:
    return joined([train(device, base, 15, 5, "fsdp"), train(device, base, 20, 5, "ddp")])


@pytest.mark.slow
def test_another_world_continues_with_the_same_documents(tmp_path):
    """1 process -> 2, sharded -> 2, replicated -> 1, against one straight through."""
    straight = train(cpu_device(), str(tmp_path / "straight"), 30, save_every=100)
    one = train(cpu_device(), str(tmp_path / "run"), 10, save_every=5)
    two = run_ranks(fsdp_then_ddp, str(tmp_path / "run"))
    three = train(cpu_device(), str(tmp_path / "run"), 30, save_every=5)
    assert two[0]["losses"] == two[1]["losses"]
    rows = [[row for pair in zip(*ranks, strict=True) for row in pair]
            for ranks in zip(two[0]["rows"], two[1]["rows"], strict=True)]  # fmt: skip
    assert one["rows"] + rows + three["rows"] == straight["rows"]
    losses = one["losses"] + two[0]["losses"] + three["losses"]
    assert losses == pytest.approx(straight["losses"], rel=1e-5)
    assert two[0]["drawn"] == straight["drawn"][10:20]  # rank 0 has its generator back


def test_a_resume_that_cannot_be_is_one_line(tmp_path):
    folder = tmp_path / "run"
    train(cpu_device(), str(folder), 5, save_every=5)
    with pytest.raises(UserError, match="--num_iterations"):
        train(cpu_device(), str(folder), 4, save_every=5)
    for name in ("training.json", "training.rank0.safetensors", "model.safetensors"):
        shutil.copytree(folder, tmp_path / name)
        path = tmp_path / name / "step_000005"
        (path / name).write_bytes(b"{}")  # and a manifest that says so
        manifest = json.loads((path / "manifest.json").read_text())
        manifest[name] = storage.facts(path / name)
        (path / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(UserError, match="--resume: .*step_000005"):
            train(cpu_device(), str(tmp_path / name), 9, save_every=5)
    for file in (folder / "step_000005").iterdir():
        file.write_bytes(b"")
    with pytest.raises(UserError, match="no checkpoint in .* is whole"):
        train(cpu_device(), str(folder), 9, save_every=5)
