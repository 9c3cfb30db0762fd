"""A training client's requests on the disk, so that no kill loses an acknowledged one.

    models/<model>/model.json                 the trained parts, and the owner
    models/<model>/log/<number>.<kind>        the body of each request since the last snapshot
    models/<model>/state/<number>/step_<n>/   the last snapshot: weights and optimizer after request <number>
    models/<model>/state/<number>/results/    the results of the covered requests, for a client that still asks

A request is in the log, and the log on the disk, before the client gets its promise. A restarted server loads the
snapshot and replays the log after it. The reason for a log instead of the state after every step: a batch has
kilobytes, but the state of a fully trained model gigabytes. A log also keeps the gradients since the last step. The
cost is that a restart repeats up to `snapshot_steps` steps: with the same bits on a CPU, up to rounding on an
accelerator.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nanochat import model_folder, storage
from nanochat.cli import UserError

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

    def append(self, entry: Entry) -> None:
        """Append an entry; returns when it is on the disk."""
        path = self.folder / "log" / f"{entry.number:09d}.{entry.kind}"
        unfinished = path.with_name(path.name + ".tmp")
        storage.write_file(unfinished, [entry.content])
        unfinished.rename(path)
        storage.flush(path.parent)

    def entries(self) -> list[Entry]:
        """The entries after the snapshot, in order."""
        found = []
        for path in sorted((self.folder / "log").iterdir()):
            number, _, kind = path.name.partition(".")
            if kind.endswith(".tmp"):  # never acknowledged
                path.unlink()
            elif int(number) > self.covered:
                found.append(Entry(int(number), kind, path.read_bytes()))
        return found

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
            if int(path.name.partition(".")[0]) <= covered:
                path.unlink(missing_ok=True)
        for path in (self.folder / "state").iterdir():  # also an unfinished one that a kill has left
            if int(path.name) < covered:
                shutil.rmtree(path, ignore_errors=True)

    def _state(self, number: int) -> Path:
        return self.folder / "state" / str(number)

    def _snapshots(self) -> list[Path]:
        """The folders with a finished checkpoint."""
        return [path for path in (self.folder / "state").iterdir() if model_folder.steps(path)]
