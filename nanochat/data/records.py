"""Records of tasks by number: a question with its answer, a conversation, a preference pair.

`open_records(paths)` opens .jsonl[.gz] and .parquet files or folders (files.py), `open_split(name, split, path, hub)`
one split of a task's dataset, from a local path or from the hub. Any order of records is cheap to read.
"""

import bisect
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanochat.data import hub as hubs
from nanochat.data.catalog import TASKS
from nanochat.data.files import BlockFile, list_files, open_file
from nanochat.shell.cli import UserError

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")

Fields = Mapping[str, type]  # what each record must have, and of which type
KINDS = {str: "a text", int: "a whole number", list: "a list", dict: "an object"}


class Records:
    """The records of several files in order. With `fields` each one is an object that has them."""

    def __init__(self, files: Sequence[BlockFile], fields: Fields | None = None):
        self.files = list(files)
        self.fields = fields
        self.ends = list(itertools.accumulate(len(file) for file in files))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, index: int) -> Any:
        """Raises UserError: when the record is damaged, or lacks a field."""
        file, row = self._place(index)
        value = file.row(row)
        if self.fields is not None:
            self.require(index, value, self.fields)
        return value

    def error(self, index: int, problem: str) -> UserError:
        """What to raise for a record that is not as it should be: its file, its line, the problem."""
        file, row = self._place(index)
        return UserError(f"{file.where(row)} {problem}")

    def require(self, index: int, value: Any, fields: Fields) -> None:
        """Raises UserError: when the value, found in record `index`, is not an object with the fields."""
        if not isinstance(value, dict):
            raise self.error(index, f"is not an object with {', '.join(fields)}")
        for name, kind in fields.items():
            if not isinstance(value.get(name), kind):
                has = ", ".join(value) or "none"
                raise self.error(index, f"has no {name!r} that is {KINDS[kind]}: its fields are {has}")

    def _place(self, index: int) -> tuple[BlockFile, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        which = bisect.bisect_right(self.ends, index)
        file = self.files[which]
        return file, index - self.ends[which] + len(file)


def open_records(paths: Iterable[str | Path], fields: Fields | None = None) -> Records:
    """The records of some files and folders in order.

    Raises UserError: when a path is missing, of no known format or damaged, or all of them hold no record.
    """
    paths = [Path(path).expanduser() for path in paths]
    columns = None if fields is None else list(fields)
    files = [open_file(file, columns) for path in paths for file in data_files(path)]
    records = Records(files, fields)
    if not len(records):
        raise UserError(f"{', '.join(map(str, paths))}: there are no rows in it")
    return records


def open_split(
    name: str, split: str, path: str | None, hub: str, fields: Fields | None = None, also: Sequence[str] = ()
) -> Records:
    """The records of one split of the task `name`: from `path`, or without one from the hub.

    `also`: other names that the split's file may have in a folder of the user's own.
    Raises UserError: with what to do next.
    """
    splits = TASKS[name].splits
    if split not in splits:
        raise UserError(f"{name} has no {split} split: only {', '.join(splits)}")
    if path is None:
        return open_records(hubs.fetch_split(name, split, hub), fields)
    inside = Path(next(iter(splits[split]))).parent  # where a copy of the whole repo keeps it
    files = find_split(Path(path).expanduser(), (split, *also), inside, only=len(splits) == 1)
    if not files:
        raise UserError(f"{path}: no {split}.jsonl[.gz] and no {split}*.parquet in this folder: name the file itself")
    return open_records(files, fields)


def find_split(path: Path, names: Sequence[str], inside: str | Path = ".", only: bool = False) -> list[Path]:
    """The files of a split with one of `names`: `path` itself, or the files in that folder or its subfolder `inside`.

    `only`: there is no other split, so a folder's single data file is it. Raises UserError: for a file that has the
    name of another split.
    """
    if not path.is_dir():
        first_word = re.split(r"[.-]", path.name.lower())[0]
        if first_word in {"train", "test"} - set(names):
            raise UserError(f"{path} is not the {names[0]} split by its name: name the folder that has both")
        return [path]
    folders = list(dict.fromkeys([path, path / inside]))
    for folder, name in itertools.product(folders, names):
        # hub.py puts the folder before the name: main--test-00000-of-00001.parquet.
        for pattern in (rf"{name}\.jsonl", rf"{name}\.jsonl\.gz", rf"(.*--)?{name}.*\.parquet"):
            found = [file for file in _visible_files(folder) if re.fullmatch(pattern, file.name.lower())]
            if found:
                return found
    data = data_files(path) if only else []
    return data if len(data) == 1 else []


def data_files(path: Path) -> list[Path]:
    """The file itself, or every data file of the folder, by name. Raises UserError: when there is none."""
    return list_files(path, SUFFIXES, recursive=False)


def _visible_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
