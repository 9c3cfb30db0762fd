"""T6. A full disk, a flipped byte or a truncated file is noticed.

Writes end with ENOSPC at 50 offsets of a save, on one rank and on one of two: the older checkpoints are whole, and the
line has the bytes needed and free. Bits of every kind of file are flipped, and files cut: a resume takes the step
before.
"""

import errno
import multiprocessing
import os
import random
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import TINY, call, write_lines
from test_scripts import saved_in_time
from test_t01_a_kill_costs_no_save import FILES, dist_of_two, usable
from tiny import cpu_device, momentum, save_step, smallest_model

from nanochat import model_folder
from nanochat import ranks as collectives
from nanochat.ground.cli import UserError
from nanochat.model_folder import DamagedCheckpoint
from nanochat.run import saver

pytestmark = pytest.mark.usefixtures("base_folder")


# ---------------------------------------------------------------------- damage


@pytest.mark.parametrize("name", sorted({*FILES, "training.rank0.safetensors"}))
def test_flips_and_cuts_are_found_and_the_step_before_is_taken(folder, capsys, name):
    save_step(folder, 1, seed=1)
    file = save_step(folder, 2, seed=2) / name
    whole = file.read_bytes()
    source = random.Random(name)
    for place in (source.randrange(len(whole)) for _ in range(100)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << source.randrange(8)
        file.write_bytes(flipped)
        with pytest.raises(DamagedCheckpoint, match="step_000002"):
            model_folder.verify(file.parent)
    for length in (0, 1, len(whole) - 1, *(source.randrange(len(whole)) for _ in range(97))):
        file.write_bytes(whole[:length])
        with pytest.raises(DamagedCheckpoint, match="step_000002"):
            model_folder.verify(file.parent)
    assert usable(folder) == (1, 1)
    assert re.search("^warning: .*step_000002.*step 1$", capsys.readouterr().err, re.MULTILINE)
    file.write_bytes(whole)
    assert usable(folder) == (2, 2)


def test_nothing_is_deleted_while_the_new_one_is_damaged(folder, monkeypatch, capsys):
    save_step(folder, 1, seed=1)
    commit = saver.commit

    def damaging(unfinished: Path, final: Path, files: dict[str, Any]) -> None:
        commit(unfinished, final, files)
        (final / "model.safetensors").write_bytes(b"")

    with monkeypatch.context() as patch:
        patch.setattr(saver, "commit", damaging)
        for step in (2, 3):
            save_step(folder, step, seed=step, keep_last=1)
    assert model_folder.steps(folder) == [1, 2, 3]
    assert "step_000003 is damaged" in capsys.readouterr().err
    assert usable(folder) == (1, 1)
    save_step(folder, 2, seed=5, keep_last=1)  # the run resumes from 1, below a later step that is damaged
    assert model_folder.steps(folder) == [2, 3]
    assert usable(folder) == (2, 5)


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
    size = sum(file.stat().st_size for file in path.iterdir() if file.name != "tokenizer.json")
    state = {**momentum(0), "row": torch.zeros(2, dtype=torch.int64), **cpu_device().rng_state()}
    needed = sum(tensor.nbytes for part in (smallest_model().state_dict(), state) for tensor in part.values())
    for number in range(50):
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", FullDisk(size * number // 50))
            with pytest.raises(UserError, match=rf"disk is full.* {needed:,} bytes, .* free"):
                save_step(folder, 2, seed=2)
        assert [file.name for file in folder.iterdir()] == ["step_000001"]  # and the room is given back
        assert usable(folder) == (1, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", FullDisk(size + 100))
        save_step(folder, 2, seed=2)
    assert usable(folder) == (2, 2)


def save_on_two(folder: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> list[Any]:
    """What two ranks, threads of this process called rank0 and rank1, return or raise when they save a step."""
    ends = multiprocessing.Pipe()
    two = dist_of_two(dict(enumerate(ends)), lambda: int(threading.current_thread().name[-1]))
    monkeypatch.setattr(collectives, "dist", two)
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


@pytest.mark.parametrize(("full", "room"), [(0, 0), (0, 600), (1, 50)])
def test_a_disk_that_is_full_for_one_rank_is_reported_by_both(folder, monkeypatch, full, room):
    save_step(folder, 1, seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", FullDisk(room, f"rank{full}"))
        for outcome in save_on_two(folder, monkeypatch, 2):
            assert isinstance(outcome, UserError) and "the disk is full" in str(outcome)
    assert [file.name for file in folder.iterdir()] == ["step_000001"]
    assert usable(folder) == (1, 1)
    assert save_on_two(folder, monkeypatch, 3) == [folder / "step_000003"] * 2  # with room again it works
    assert usable(folder) == (3, 3)


def test_too_little_room_is_reported_before_writing_and_another_error_is_not_a_full_disk(folder, monkeypatch):
    save_step(folder, 1, seed=1)
    usage = shutil.disk_usage(folder)._replace(free=1234)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        patch.setattr(os, "write", lambda *_: pytest.fail("it was written"))
        with pytest.raises(UserError, match=r"1,234 free.*NANOCHAT_BASE_DIR"):
            save_step(folder, 2, seed=2)
    assert usable(folder) == (1, 1)

    def fails(*_: Any) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "write", fails)
    with pytest.raises(OSError, match="Read-only"):
        save_step(folder, 2)


# ---------------------------------------------------------------------- the disk of a run


def test_a_disk_that_is_too_small_is_named_before_the_first_step(base, tokenizer, capsys, monkeypatch):
    """With room for one checkpoint of many there is a warning; without room for one, an error."""
    monkeypatch.setattr("nanochat.train.train_step", lambda *_, **__: pytest.fail("a step was taken"))
    usage = shutil.disk_usage(base)

    def error_with(free: int, *more: str) -> str:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
        with pytest.raises(BaseException) as caught:
            call("base_train", *TINY, "--num_iterations=7", "--save_every=2", *more)
        assert isinstance(caught.value, SystemExit if free < 10**6 else pytest.fail.Exception)
        return capsys.readouterr().err

    error = error_with(5000)
    (needed,) = re.findall(r"error: .* needs (\S+) bytes, .* has 5,000 free", error)
    needed = int(needed.replace(",", ""))
    assert needed > 10**6 and not (base / "runs").exists()
    assert f"4 checkpoints of {needed:,} bytes" in error_with(needed * 3)
    assert f"3 checkpoints of {needed:,} bytes" in error_with(int(needed * 1.5), "--keep_last=1")
    assert "checkpoints" not in error_with(needed * 3, "--keep_last=1") + error_with(needed * 5)
    # Documents that wait in the loader are part of a checkpoint: here some 400,000 tokens in each of eight shards.
    rows = write_lines(base.parent / "large.jsonl", [{"text": "Once upon a time " * 100_000}] * 20)
    (more,) = re.findall(r"needs (\S+) bytes", error_with(5000, f"--data={rows}"))
    assert int(more.replace(",", "")) > 5 * needed


def test_a_save_in_time_leaves_room_for_the_last_one(base, tokenizer):
    flags = (*TINY, "--num_iterations=3")
    with pytest.raises(RuntimeError, match="a checkpoint needs") as caught:
        saved_in_time(cpu_device(), flags, 5000)
    needed = int(re.findall(r" needs (\S+) bytes", str(caught.value))[0].replace(",", ""))
    assert saved_in_time(cpu_device(), flags, int(1.5 * needed)) == [3]
    assert saved_in_time(cpu_device(), flags, int(2.5 * needed)) == [1, 2, 3]
