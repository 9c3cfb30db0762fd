"""Saving: a kill at any file operation, a full disk at any byte, a lost rank cost no run.

A kill is real: a forked process ends by os._exit before, or in the middle of, its k-th file operation, for every k.
"""

import contextlib
import dataclasses
import errno
import gc
import io
import json
import multiprocessing
import os
import posix
import random
import shutil
import signal
import subprocess
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import BYTES, cpu_device, momentum, run_ranks, save_step, smallest_model

from nanochat import model_folder
from nanochat import ranks as collectives
from nanochat.device import Device
from nanochat.ground import paths, storage
from nanochat.ground.cli import UserError
from nanochat.model_folder import newest, steps
from nanochat.ranks import lay_out
from nanochat.run import saver
from nanochat.run.flags import TrainFlags
from nanochat.run.saver import clean_up, load_training, resume
from nanochat.run.stage import Start
from nanochat.scaling import Rates
from nanochat.train import make_optimizer

FILES = {"manifest.json", "meta.json", "model.safetensors", "tokenizer.json", "training.json"}
ROOT = Path(__file__).resolve().parents[2]
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
        *(("over a whole one", True), ("with retention", False)),
        pytest.param("after an older one", True, marks=pytest.mark.slow),
        *(
            pytest.param(scenario, False, marks=pytest.mark.slow)
            for scenario in SCENARIOS
            if scenario not in ("with retention", "after an older one")  # which begin alike
        ),
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
@pytest.mark.parametrize("doomed_rank", [0, 1])
@pytest.mark.parametrize("torn", [False, True])
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


@pytest.mark.soak
def test_random_kills_cost_nothing(folder, monkeypatch):
    """200 times kill -9 at a random moment, of one process and of two; every resume takes up the newest."""
    monkeypatch.setattr(os, "fsync", posix.fsync)  # the real one
    source, reached, unusable, trials = random.Random(0), 0, 0, 200
    for trial in range(trials):
        if trial % 2:
            children = forked_ranks(lambda rank: save_for_ever(folder, rank, 2))
        else:
            children = [forked(lambda: save_for_ever(folder, 0, 1))]
        time.sleep(source.uniform(0.0, 1.0))
        for child in source.sample(children, len(children)):
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
    state = {**momentum(0), "row": torch.zeros(2, dtype=torch.int64), **cpu_device().rng_state()}
    needed = sum(tensor.nbytes for part in (smallest_model().state_dict(), state) for tensor in part.values())
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


def save_on_two(folder: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> list[Any]:
    """What two ranks, threads of this process called rank0 and rank1, return or raise when they save a step."""
    ends = multiprocessing.Pipe()
    monkeypatch.setattr(collectives, "dist", dist_of_two(dict(enumerate(ends)), rank_of_thread))
    outcomes: list[Any] = [None, None]

    def run(rank: int) -> None:
        try:
            outcomes[rank] = save_step(folder, step, seed=step, rank=rank, ranks=2)
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=[rank], name=f"rank{rank}") for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def rank_of_thread() -> int:
    return int(threading.current_thread().name[-1])


@pytest.mark.parametrize("slow", [0, 1])
def test_two_ranks_save_one_checkpoint(folder, monkeypatch, slow):
    write = os.write

    def slowly(handle: int, data: Any) -> int:
        if threading.current_thread().name == f"rank{slow}":
            data = data[: len(data) // 2 + 1]
            time.sleep(0.002)
        return write(handle, data)

    monkeypatch.setattr(os, "write", slowly)
    for step in (1, 2):
        assert save_on_two(folder, monkeypatch, step) == [folder / f"step_{step:06d}"] * 2
        assert usable(folder) == (step, step)
    assert steps(folder) == [1, 2]


def test_everything_reaches_the_disk_before_the_rename_and_the_rename_after(folder, monkeypatch):
    flushed, at_rename = [], []
    rename = os.rename

    def record_rename(source, target, **options):
        if Path(source).name == "step_000001.tmp":
            at_rename[:] = [len(flushed), {file.stat().st_ino for file in (Path(source), *Path(source).iterdir())}]
        rename(source, target, **options)

    monkeypatch.setattr(os, "fsync", lambda handle: flushed.append(os.fstat(handle).st_ino))
    monkeypatch.setattr(os, "rename", record_rename)
    save_on_two(folder, monkeypatch, 1)
    before, inodes = at_rename
    assert len(inodes) == 1 + len(FILES) + 2
    assert inodes <= set(flushed[:before])
    assert folder.stat().st_ino in flushed[before:]


@pytest.mark.parametrize("room", [0, 50, 600])
@pytest.mark.parametrize("full", [0, 1])
def test_a_disk_that_is_full_for_one_rank_is_reported_by_both(folder, monkeypatch, room, full):
    save_step(folder, 1, seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", FullDisk(room, f"rank{full}"))
        for outcome in save_on_two(folder, monkeypatch, 2):
            assert isinstance(outcome, UserError) and "the disk is full" in str(outcome)
    assert [file.name for file in folder.iterdir()] == ["step_000001"]
    assert usable(folder) == (1, 1)
    save_on_two(folder, monkeypatch, 3)  # with room again it works
    assert usable(folder) == (3, 3)


def test_too_little_room_is_reported_before_writing(folder, monkeypatch):
    save_step(folder, 1, seed=1)
    usage = namedtuple("usage", "total used free")(10**6, 10**6 - 1234, 1234)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        patch.setattr(os, "write", lambda *_: pytest.fail("it was written"))
        with pytest.raises(UserError, match=r"the disk is full.*1,234 free.*NANOCHAT_BASE_DIR"):
            save_step(folder, 2, seed=2)
    assert [file.name for file in folder.iterdir()] == ["step_000001"]
    assert usable(folder) == (1, 1)


def test_another_error_is_not_called_a_full_disk(folder, monkeypatch):
    def fails(*_: Any) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "write", fails)
    with pytest.raises(OSError, match="Read-only") as caught:
        save_step(folder, 1)
    assert not isinstance(caught.value, UserError)


@pytest.mark.slow
def test_saving_leaves_no_file_or_copy_behind(folder):
    def held() -> tuple[int, int]:
        gc.collect()
        tensors = sum(type(thing) is torch.Tensor for thing in gc.get_objects())
        return len(list(Path("/proc/self/fd").iterdir())), tensors

    counts = []
    gc.collect()
    gc.freeze()  # what other tests and all modules hold takes no part, and no time
    for step in range(1, 21):
        save_step(folder, step, keep_last=2)
        counts.append(held())
    # A copy or a file that stays adds one a step. Fewer there may be: what other tests have left goes some time.
    files, tensors = zip(*counts[1:], strict=True)
    assert max(files) <= files[0] and max(tensors) <= tensors[0], counts


# ---------------------------------------------------------------------- what is kept


@pytest.mark.parametrize(
    ("keep_last", "left"), [(0, [1, 2, 3, 4, 5, 6]), (1, [6]), (2, [5, 6]), (9, [1, 2, 3, 4, 5, 6])]
)
def test_old_steps_go(folder, keep_last, left):
    for step in range(1, 7):
        save_step(folder, step, seed=step, keep_last=keep_last)
    assert steps(folder) == left
    assert usable(folder) == (6, 6)


def test_each_step_is_read_back_once(folder, monkeypatch):
    for step in (1, 2, 3):
        save_step(folder, step, seed=step)
    read, verify = [], model_folder.verify
    monkeypatch.setattr(model_folder, "verify", lambda path: (read.append(path.name[-1]), verify(path))[1])
    for step in (4, 5, 6):
        save_step(folder, step, seed=step, keep_last=3)
    assert "".join(read) == "456" and steps(folder) == [4, 5, 6]


def test_only_steps_are_deleted(folder):
    for name in ("step_x", "step_000001.mine", "notes", "best"):
        (folder / name).mkdir(parents=True)
    (folder / "step_000002.txt").write_text("mine")
    before = set(folder.iterdir())
    for step in (3, 4):
        save_step(folder, step, seed=step, keep_last=1)
    clean_up(folder)
    assert set(folder.iterdir()) == before | {folder / "step_000004"}


def test_nothing_is_deleted_while_the_new_one_is_damaged(folder, monkeypatch, capsys):
    save_step(folder, 1, seed=1)
    commit = saver.commit

    def damaging(unfinished: Path, final: Path, files: dict[str, Any]) -> None:
        commit(unfinished, final, files)
        (final / "model.safetensors").write_bytes(b"")

    monkeypatch.setattr(saver, "commit", damaging)
    for step in (2, 3):
        save_step(folder, step, seed=step, keep_last=1)
    assert steps(folder) == [1, 2, 3]
    assert "step_000003 is damaged as soon as it is saved" in capsys.readouterr().err
    assert usable(folder) == (1, 1)
    monkeypatch.undo()
    save_step(folder, 2, seed=5, keep_last=1)  # the run resumes from 1, below a later step that is damaged
    assert steps(folder) == [2, 3]
    assert usable(folder) == (2, 5)


# ---------------------------------------------------------------------- a run that resumes


def begin(device: Device, folder: str, steps: int) -> float:
    """The beginning of a script in small: resume, or save step 5 of a new run; returns what is drawn next."""
    torch.manual_seed(device.rank)
    model = smallest_model(1)
    laid_out = lay_out(device, "ddp")
    laid_out.shard(model, device)
    optimizer = make_optimizer(model, Rates(0.02, 0.01, 0.01, 0.01, 0.01, 0.01, 0.1), device, layout=laid_out)
    meta = {"config": {"seed": 0}, "source": None, "fingerprints": {}}
    start = Start(0.0, device, laid_out, model, BYTES, "run", {})
    progress, _ = resume(Path(folder), TrainFlags(), start, optimizer, steps, meta)
    if not progress.step:
        torch.rand(7)  # the generator is not as at the beginning
        progress.step = 5
        now, state = meta | {"progress": dataclasses.asdict(progress)}, optimizer.state_dict()
        saver.save(Path(folder), 5, model, BYTES, now, state, {"row": torch.ones(1)}, device)
    paths.unlock(Path(folder))
    return torch.rand(()).item()


@pytest.mark.slow
def test_a_rank_of_another_world_has_its_generator_back(tmp_path):
    drawn = begin(cpu_device(), str(tmp_path / "run"), 9)
    zero, one = run_ranks(begin, str(tmp_path / "run"), 9)
    assert zero == drawn != one


def test_a_resume_that_cannot_be_is_one_line(tmp_path):
    folder = tmp_path / "run"
    begin(cpu_device(), str(folder), 9)
    with pytest.raises(UserError, match="--num_iterations"):
        begin(cpu_device(), str(folder), 4)
    for name in ("training.json", "training.rank0.safetensors", "model.safetensors"):
        shutil.copytree(folder, tmp_path / name)
        path = tmp_path / name / "step_000005"
        (path / name).write_bytes(b"{}")  # and a manifest that says so
        manifest = json.loads((path / "manifest.json").read_text())
        manifest[name] = storage.facts(path / name)
        (path / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(UserError, match="--resume: .*step_000005"):
            begin(cpu_device(), str(tmp_path / name), 9)
    # Code that has another flag, and a field of the model: in a new run both have their defaults. The other way round
    # the model of the checkpoint is not one that this code can make.
    for change, refused in ((lambda meta: meta["model"].pop("logit_cap"), False),
                            (lambda meta: meta["config"].pop("seed"), False),
                            (lambda meta: meta["model"].update(gate=True), True)):  # fmt: skip
        path = tmp_path / "other" / "step_000005"
        shutil.copytree(folder / "step_000005", path)
        meta = json.loads((path / "meta.json").read_text())
        change(meta)
        (path / "meta.json").write_text(json.dumps(meta))
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["meta.json"] = storage.facts(path / "meta.json")
        (path / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(UserError, match="saved by other code.*'gate'") if refused else contextlib.nullcontext():
            begin(cpu_device(), str(path.parent), 9)
        shutil.rmtree(path.parent)
    for file in (folder / "step_000005").iterdir():
        file.write_bytes(b"")
    with pytest.raises(UserError, match="no checkpoint in .* is whole"):
        begin(cpu_device(), str(folder), 9)
