"""A training client's requests on the disk, so that no kill loses an acknowledged one.

    models/<model>/model.json                 what is trained, and whose it is
    models/<model>/log/<number>.<kind>.<sum>  the body of each request since the last snapshot
    models/<model>/loaded/<number>/step_<n>/  the checkpoint that request <number> loads; 0: that the model begins from
    models/<model>/state/<number>/step_<n>/   the last snapshot: weights and optimizer after request <number>
    models/<model>/state/<number>/results/    the results of the covered requests, for a client that still asks

A request is in the log, and the log on the disk, before the client gets its promise. A restarted server loads the
snapshot and runs the log after it. Why a log, and not the state after every step: a batch has kilobytes, and the state
of a model that is trained whole gigabytes; and gradients since the last step are not lost either. The price is
that a restart computes up to `snapshot_steps` steps again, on a CPU to the same bits, on an accelerator up to rounding.

A byte of the log that has changed would make another model of it: the name of an entry has the first digits of its
sha256. An entry that arrived before its turn is named `<number>.<kind>.<sum>.early`. Without that word all requests
before it had been acknowledged, so that a missing one is seen.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nanochat import model_folder, storage
from nanochat.cli import UserError
from nanochat.log import warn

NAME = re.compile(r"(\d{9})\.([a-z_]+)(?:\.([0-9a-f]{16})(\.early)?)?")  # entries of earlier versions have no sum
REFUSED = "refused"  # a request that was answered with an error; its number is used up


@dataclass(frozen=True)
class Entry:
    """A request in the log."""

    number: int  # the client counts its requests to a model from 1 on
    kind: str
    content: bytes


class RequestLog:
    """The log and the snapshot in one model's folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "log").mkdir(parents=True, exist_ok=True)
        (folder / "state").mkdir(exist_ok=True)

    def append(self, entry: Entry, is_early: bool = False) -> None:
        """Returns once it is on the disk. `is_early`: requests before it have not arrived."""
        name = f"{entry.number:09d}.{entry.kind}.{_sum_of(entry.content)}" + (".early" if is_early else "")
        path = self.folder / "log" / name
        unfinished = path.with_name(path.name + ".tmp")
        storage.write_file(unfinished, [entry.content])
        unfinished.rename(path)
        storage.flush(path.parent)

    def entries(self) -> tuple[list[Entry], str]:
        """Those after the snapshot, in order, and what is wrong with the one after them; empty: nothing is."""
        found: list[Entry] = []
        for path in sorted((self.folder / "log").iterdir()):
            if path.name.endswith(".tmp"):  # never acknowledged
                path.unlink()
                continue
            parts = NAME.fullmatch(path.name)
            if parts is None:
                warn(f"{path} is not a request of this server, and is left alone")
                continue
            number = int(parts[1])
            if number <= self.covered:
                continue
            before = found[-1].number if found else self.covered
            if number != before + 1 and not parts[4]:
                return found, f"request {before + 1} is missing in {path.parent}"
            content = path.read_bytes()
            if parts[3] and parts[3] != _sum_of(content):
                return found, f"{path} is damaged"
            found.append(Entry(number, parts[2], content))
        return found, ""

    def keep_loaded(self, number: int, step_folder: Path) -> Path:
        """The checkpoint that request `number` loads, in this model's folder: it may be overwritten where it is."""
        kept = self.folder / "loaded" / str(number)
        if not kept.exists():
            unfinished = kept.with_name(f"{number}.tmp")
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.copytree(step_folder, unfinished / step_folder.name, copy_function=_link_or_copy)
            unfinished.rename(kept)
            storage.flush(kept.parent)
        return kept / step_folder.name

    def loaded(self, number: int) -> Path | None:
        """What `keep_loaded` has kept for this request."""
        return next((self.folder / "loaded" / str(number)).glob("step_*"), None)

    @property
    def covered(self) -> int:
        """The number of the last request that the snapshot covers; 0: no snapshot."""
        return max((int(path.name) for path in self._snapshots()), default=0)

    def snapshot(self) -> Path | None:
        """The checkpoint to resume from; None: the model begins as it was created.

        Raises UserError: when the checkpoint is damaged.
        """
        if not self.covered:
            return None
        found = model_folder.newest(self._state(self.covered))
        if found is None:
            raise UserError(f"{self._state(self.covered)} is damaged: create a training client from a saved state")
        return found[0]

    def results(self) -> dict[int, bytes]:
        """The results, by number, of the requests that this snapshot covers and the previous one does not."""
        folder = self._state(self.covered) / "results"
        return {int(path.name): path.read_bytes() for path in folder.glob("*")}

    def begin_snapshot(self, number: int, results: Mapping[int, bytes]) -> Path:
        """The folder in which the caller saves the checkpoint after request `number`; then it calls `end_snapshot`."""
        folder = self._state(number)
        (folder / "results").mkdir(parents=True, exist_ok=True)
        for its_number, result in results.items():
            storage.write_file(folder / "results" / str(its_number), [result])
        return folder

    def end_snapshot(self) -> None:
        """Remove the log entries that the new snapshot covers, after reading it back to check that it is whole."""
        covered = self.covered
        if model_folder.newest(self._state(covered)) is None:
            shutil.rmtree(self._state(covered), ignore_errors=True)  # the log and the previous snapshot stay
            return
        for path in (self.folder / "log").iterdir():
            parts = NAME.fullmatch(path.name)
            if parts is not None and int(parts[1]) <= covered:
                path.unlink(missing_ok=True)
        for path in (self.folder / "state").iterdir():  # also one that a kill has left half-way
            if path.name.isdigit() and int(path.name) < covered:
                shutil.rmtree(path, ignore_errors=True)
        for path in (self.folder / "loaded").glob("*"):
            if path.name.isdigit() and int(path.name) <= covered:
                shutil.rmtree(path, ignore_errors=True)

    def _state(self, number: int) -> Path:
        return self.folder / "state" / str(number)

    def _snapshots(self) -> list[Path]:
        """The folders with a finished checkpoint."""
        folders = [path for path in (self.folder / "state").iterdir() if path.name.isdigit()]
        return [path for path in folders if model_folder.steps(path)]


def _sum_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)  # a checkpoint's files are replaced, and never written again
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)
