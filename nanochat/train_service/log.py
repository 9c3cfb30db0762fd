"""A training client's requests on the disk, so that no kill loses an acknowledged one.

    models/<model>/model.json                 the trained parts, and the owner
    models/<model>/log/<number>.<kind>.<sum>  the body of each request since the last snapshot; the sum covers all three
                                              .failed_<left>: it was answered as failed, and is never run again
    models/<model>/state/<number>/step_<n>/   the last snapshot: weights and optimizer after request <number>
    models/<model>/loaded/<number>/step_<n>/  the checkpoint that request <number> loads, since the last snapshot
    models/<model>/state/<number>/results/    the results of the covered requests, for a client that still asks

A request is in the log, and the log on the disk, before the client gets its promise. A restarted server loads the
snapshot and replays the log after it. The reason for a log instead of the state after every step: a batch has
kilobytes, but the state of a fully trained model gigabytes. A log also keeps the gradients since the last step. The
cost is that a restart repeats up to `snapshot_steps` steps: with the same bits on a CPU, up to rounding on an
accelerator.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanochat import model_folder
from nanochat.ground import storage
from nanochat.ground.cli import UserError
from nanochat.ground.log import warn
from nanochat.run import saver

REFUSED = "refused"  # a request that was answered with an error; its number is used up
SUM_CHARACTERS = 16  # characters of a sha256 in an entry's name: 64 bits
# number.kind.sum, then .early for one that came before its turn, or .failed_<left> for one that has failed.
ENTRY_NAME = re.compile(r"(\d{9})\.([a-z_]+)\.([0-9a-f]{16})(?:\.(early|failed_[a-z]+))?")
UNFINISHED_NAME = re.compile(r"\d{9}\.tmp")
RESULT_NAME = re.compile(r"(\d{1,9})\.([0-9a-f]{16})")


class DamagedLog(UserError):
    """A log that does not say what the model's client has sent."""


def write_record(path: Path, content: dict[str, Any]) -> None:
    """Write a small JSON file whole or not at all: a full disk and a kill leave the old one, or none."""
    unfinished = path.with_name(path.name + ".tmp")
    try:
        sha256 = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        storage.write_json(unfinished, {"sha256": sha256, "content": content})
        unfinished.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    storage.flush(path.parent)


def read_record(path: Path) -> dict[str, Any]:
    """Raises UserError: when the file cannot be read, or is not what `write_record` wrote."""
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict) or content.keys() != {"sha256", "content"}:
            raise ValueError("it is not a record")
        sha256, content = content["sha256"], content["content"]
        if hashlib.sha256(json.dumps(content).encode()).hexdigest() != sha256:
            raise ValueError("its content is not what was written")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({str(error)[:200]}): restore it from a backup") from None
    return content


@dataclass(frozen=True)
class Entry:
    """A request in the log."""

    number: int  # the client counts its requests to a model from 1 on
    kind: str
    content: bytes
    is_early: bool = False  # it came before one with a smaller number, which may still be missing
    left: str = ""  # of one that has failed: what it has left behind, see `TrainedModel.after_failure`


class RequestLog:
    """The log and the snapshot in one model's folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "log").mkdir(parents=True, exist_ok=True)
        (folder / "state").mkdir(exist_ok=True)
        # What a kill left unfinished was never acknowledged. Later an unfinished file may belong to a running `append`.
        for path in (folder / "log").iterdir():
            if UNFINISHED_NAME.fullmatch(path.name):
                path.unlink()

    def append(self, entry: Entry) -> None:
        """Returns once it is on the disk."""
        unfinished = self.folder / "log" / f"{entry.number:09d}.tmp"
        path = unfinished
        try:
            storage.write_file(unfinished, [entry.content])
            path = self._path(entry)
            unfinished.rename(path)
            storage.flush(path.parent)
        except BaseException:  # it is not acknowledged: the client sends it again
            for written in (unfinished, path):
                with contextlib.suppress(OSError):
                    written.unlink()
            raise

    def in_turn(self, entry: Entry) -> None:
        """All requests before an early one have come: from now on a missing one is seen."""
        path = self._path(entry)
        if entry.is_early and path.exists():
            path.rename(self._path(replace(entry, is_early=False)))

    def fail(self, entry: Entry, left: str) -> None:
        """Note that a request has failed; returns once this is on the disk. A new name needs no room on a full disk."""
        path = self._path(replace(entry, is_early=False))
        path.rename(self._path(replace(entry, is_early=False, left=left)))
        storage.flush(path.parent)

    def _path(self, entry: Entry) -> Path:
        name = f"{entry.number:09d}.{entry.kind}.{_entry_sum(entry.number, entry.kind, entry.content)}"
        name += ".early" if entry.is_early else ""
        name += f".failed_{entry.left}" if entry.left else ""
        return self.folder / "log" / name

    def entries(self, last: int | None = None) -> tuple[list[Entry], str]:
        """Those after the snapshot, in order, up to the first damage, and what that is; empty: nothing is damaged.

        `last`: the number of the last one to read. While clients send requests, later entries may be renamed.
        An entry that did not come early says that all before it had been acknowledged: a missing one is seen.
        """
        found: list[Entry] = []
        covered = self.covered
        for match, path in self._logged():
            number = int(match[1])
            if number <= covered or (last is not None and number > last):
                continue
            before = found[-1].number if found else covered
            mark = match[4] or ""
            if number != before + 1 and mark != "early":
                return found, f"{path.parent} lacks request {before + 1}"
            content = path.read_bytes()
            if _entry_sum(number, match[2], content) != match[3]:
                return found, f"{path} is damaged"
            left = mark.removeprefix("failed_") if mark != "early" else ""
            found.append(Entry(number, match[2], content, is_early=mark == "early", left=left))
        return found, ""

    def _logged(self) -> list[tuple[re.Match[str], Path]]:
        """The names, taken apart, and the files of all entries, in order."""
        found = []
        for path in sorted((self.folder / "log").iterdir()):
            match = ENTRY_NAME.fullmatch(path.name)
            if UNFINISHED_NAME.fullmatch(path.name):  # of an `append` that runs now
                continue
            if match:
                found.append((match, path))
            else:
                warn(f"{path} is not a request of this server, and is left alone")
        return found

    @property
    def covered(self) -> int:
        """The number of the last request that the snapshot covers; 0: no snapshot."""
        return max((int(path.name) for path in self._states() if model_folder.steps(path)), default=0)

    def snapshot(self) -> Path | None:
        """The checkpoint to resume from; None: the model begins as it was created.

        Raises DamagedLog: when it is damaged.
        """
        if not self.covered:
            return None
        found = model_folder.newest(self._state(self.covered))
        if found is None:
            raise DamagedLog(f"{self._state(self.covered)} is damaged")
        return found[0]

    def results(self) -> dict[int, bytes]:
        """The results, by number, of the requests that this snapshot covers and the previous one did not."""
        found = {}
        for path in (self._state(self.covered) / "results").glob("*"):
            match = RESULT_NAME.fullmatch(path.name)
            content = path.read_bytes()
            if match and _sum(content) == match[2]:  # a damaged one is as one that is gone
                found[int(match[1])] = content
        return found

    def loaded(self, number: int) -> Path | None:
        """The pinned checkpoint of a load; None: it is not pinned yet."""
        folder = self.folder / "loaded" / str(number)
        found = model_folder.steps(folder)
        return model_folder.step_path(folder, found[-1]) if found else None

    def pin(self, number: int, step_folder: Path) -> Path:
        """Keep the files that request `number` loads: the checkpoint may be overwritten or deleted before the log is
        run again. A hard link takes no room, and a checkpoint's files are replaced, never changed.
        """
        pinned = self.folder / "loaded" / str(number) / step_folder.name
        unfinished = pinned.with_name(pinned.name + ".tmp")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for path in step_folder.iterdir():
            try:
                os.link(path, unfinished / path.name)
            except OSError:  # a file system without links
                shutil.copyfile(path, unfinished / path.name)
                storage.flush(unfinished / path.name)
        saver.publish(unfinished, pinned)
        return pinned

    @contextlib.contextmanager
    def new_snapshot(self, number: int, results: Mapping[int, bytes]) -> Iterator[Path]:
        """The folder in which the block saves the checkpoint after request `number`; afterwards, see `end_snapshot`.

        Raises UserError: when it cannot be read back. After any error the log and the previous one stay.
        """
        folder = self._state(number)
        try:
            (folder / "results").mkdir(parents=True, exist_ok=True)
            for its_number, result in results.items():
                storage.write_file(folder / "results" / f"{its_number}.{_sum(result)}", [result])
            yield folder
            if model_folder.newest(folder) is None:
                raise UserError("it cannot be read back")
        except (OSError, UserError):
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def end_snapshot(self) -> None:
        """Remove the log entries that the new snapshot covers."""
        covered = self.covered
        for match, path in self._logged():
            if int(match[1]) <= covered:
                path.unlink(missing_ok=True)
        for path in (self.folder / "loaded").glob("*"):
            if path.name.isdecimal() and int(path.name) <= covered:
                shutil.rmtree(path, ignore_errors=True)
        for path in self._states():  # also one that a kill has left half-way
            if int(path.name) < covered:
                shutil.rmtree(path, ignore_errors=True)

    def _state(self, number: int) -> Path:
        return self.folder / "state" / str(number)

    def _states(self) -> list[Path]:
        return [path for path in (self.folder / "state").iterdir() if path.name.isdecimal()]


def _entry_sum(number: int, kind: str, content: bytes) -> str:
    return _sum(f"{number}.{kind}.".encode() + content)


def _sum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:SUM_CHARACTERS]
