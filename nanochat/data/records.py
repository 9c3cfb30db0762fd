"""Rows of local files by number, for tasks: a question with its answer, a conversation, a multiple choice.

`open_rows(paths)` opens files or folders, `open_split(name, split, path, hub)` one split of a task's dataset, from a
local path or from the hub. Any order of rows is cheap. Kept in memory: where each line begins, of a .gz the lines
themselves (still compressed), of a .parquet the row groups read last. A damaged row is one line that names it.

    .jsonl[.gz] one JSON value a line
    .parquet    the named columns
"""

import bisect
import gzip
import itertools
import json
import re
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nanochat.data import hub as hubs
from nanochat.data.sources import BYTE_ORDER_MARK, _NoDamage
from nanochat.shell.cli import UserError

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
BLOCK_BYTES = 256 << 10  # of a .gz, decompressed to reach one of its lines
CACHE_BYTES = 128 << 20  # of one file's row groups

Fields = Mapping[str, type]  # what each row must have, and of which type
KINDS = {str: "a text", int: "a whole number", list: "a list", dict: "an object"}


def open_rows(paths: str | Path | Iterable[str | Path], fields: Fields | None = None) -> "Rows":
    """The rows of some files and folders, one after the other; with `fields` each row is an object that has them.

    Raises UserError: when a path is missing, is of no known kind, is damaged, or all of them hold no row.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    files = [file for path in given for file in data_files(Path(path).expanduser())]
    rows = Rows([_open(file, fields) for file in files], fields)
    if not len(rows):
        raise UserError(f"{', '.join(map(str, given))}: there are no rows in it")
    return rows


def open_split(
    name: str, split: str, path: str | None, hub: str, fields: Fields | None = None, also: Sequence[str] = ()
) -> "Rows":
    """The rows of one split of the task `name`: from `path` where it is given, from the hub otherwise.

    `also`: other names that the split's file may have in a folder of the user's own.
    Raises UserError: with what to do next.
    """
    splits = hubs.TASKS[name].splits
    if split not in splits:
        raise UserError(f"{name} has no {split} split: only {', '.join(splits)}")
    if path is None:
        return open_rows(hubs.fetch_split(name, split, hub), fields)
    inside = Path(splits[split][0].path).parent  # where a copy of the whole repo keeps it
    files = find_split(Path(path).expanduser(), (split, *also), inside, only=len(splits) == 1)
    if not files:
        raise UserError(f"{path}: no {split}.jsonl[.gz] and no {split}*.parquet in this folder: name the file itself")
    return open_rows(files, fields)


def find_split(path: Path, names: Sequence[str], inside: str | Path = ".", only: bool = False) -> list[Path]:
    """The files of a split that goes by one of `names`: `path` itself, or what is in that folder or its `inside`.

    `only`: there is no other split, so that a folder's single data file is it. Raises UserError: for a file that is
    named after another split.
    """
    if not path.is_dir():
        others = {"train", "test"} - set(names)
        if re.split(r"[.-]", path.name.lower())[0] in others:
            raise UserError(f"{path} is by its name not the {names[0]} split: name the folder that has both")
        return [path]
    folders = list(dict.fromkeys([path, path / inside]))
    for folder, name in itertools.product(folders, names):
        # hub.py puts the folder before the name: main--test-00000-of-00001.parquet.
        patterns = [rf"{name}\.jsonl", rf"{name}\.jsonl\.gz", rf"(.*--)?{name}.*\.parquet"]
        for pattern in patterns:
            found = [file for file in _plain_files(folder) if re.fullmatch(pattern, file.name.lower())]
            if found:
                return found
    data = data_files(path) if only else []
    return data if len(data) == 1 else []


def data_files(path: Path) -> list[Path]:
    """The file itself, or every data file of the folder, by name.

    Raises UserError: when there is none.
    """
    if path.is_dir():
        files = [file for file in _plain_files(path) if file.name.lower().endswith(SUFFIXES)]
        if not files:
            raise UserError(f"{path}: no file in this folder ends in {', '.join(SUFFIXES)}")
        return files
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    if not path.name.lower().endswith(SUFFIXES):
        hint = f" (of a JSON list: jq -c '.[]' {path.name} > {path.stem}.jsonl)" if path.suffix == ".json" else ""
        raise UserError(f"{path}: unknown suffix {path.suffix!r}; known are {', '.join(SUFFIXES)}{hint}")
    return [path]


def _plain_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))


class Rows:
    """Rows by number, over all the files."""

    def __init__(self, files: Sequence["_JsonLines | _Parquet"], fields: Fields | None = None):
        self.files, self.fields = list(files), fields
        self.ends = list(itertools.accumulate(file.count for file in self.files))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, index: int) -> Any:
        """Raises UserError: when the row is damaged, or has not all the fields."""
        file, row = self._place(index)
        value = file.read(row)
        if self.fields is not None:
            self.require(index, value, self.fields)
        return value

    def where(self, index: int) -> str:
        """The file and the line, for messages."""
        file, row = self._place(index)
        return f"{file.path} {file.number(row)}"

    def error(self, index: int, problem: str) -> UserError:
        """What to raise for a row that is not what it should be."""
        return UserError(f"{self.where(index)} {problem}")

    def require(self, index: int, value: Any, fields: Fields) -> None:
        """Raises UserError: when the value, found in row `index`, is no object with the fields."""
        for name, kind in fields.items():
            if not isinstance(value, dict):
                raise self.error(index, f"is no object with {', '.join(fields)}")
            if not isinstance(value.get(name), kind):
                has = ", ".join(value) or "none"
                raise self.error(index, f"has no {name!r} that is {KINDS[kind]}: its fields are {has}")

    def _place(self, index: int) -> "tuple[_JsonLines | _Parquet, int]":
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        which = bisect.bisect_right(self.ends, index)
        return self.files[which], index - self.ends[which] + self.files[which].count


def _open(path: Path, fields: Fields | None) -> "_JsonLines | _Parquet":
    return _Parquet(path, fields) if path.name.lower().endswith(".parquet") else _JsonLines(path)


class _JsonLines:
    """One JSON value a line; blank lines do not count."""

    def __init__(self, path: Path):
        self.path, self.lock = path, threading.Lock()
        packed = path.name.lower().endswith(".gz")
        self.blocks: list[bytes] | None = [] if packed else None
        self.stream: Any = None  # a .jsonl, kept open
        self.block: tuple[int, bytes] = (-1, b"")  # of a .gz: the one read last
        begins, numbers, offset, block_begins, held = [], [], 0, [0], []
        damage = _NoDamage(path, "gzip file", (gzip.BadGzipFile, EOFError, zlib.error))
        with damage, gzip.open(path, "rb") if packed else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    begins.append(offset)
                    numbers.append(number)
                offset += len(line)
                if self.blocks is not None:
                    held.append(line)
                    if offset - block_begins[-1] >= BLOCK_BYTES:
                        self.blocks.append(zlib.compress(b"".join(held), 1))
                        block_begins.append(offset)
                        held.clear()
        if self.blocks is not None:
            self.blocks.append(zlib.compress(b"".join(held), 1))
        self.count = len(begins)
        self.begins = np.array([*begins, offset], dtype=np.int64)  # (rows + 1,) bytes, unpacked
        self.numbers = np.array(numbers, dtype=np.int64)  # (rows,) lines
        self.block_begins = block_begins  # bytes, unpacked

    def number(self, row: int) -> str:
        return f"line {self.numbers[row]}"

    def read(self, row: int) -> Any:
        begin, end = int(self.begins[row]), int(self.begins[row + 1])
        with self.lock:
            if self.blocks is None:
                self.stream = self.stream or self.path.open("rb")
                self.stream.seek(begin)
                line = self.stream.read(end - begin)
            else:
                which = bisect.bisect_right(self.block_begins, begin) - 1
                if self.block[0] != which:
                    self.block = (which, zlib.decompress(self.blocks[which]))
                first = self.block_begins[which]
                line = self.block[1][begin - first : end - first]
        try:
            return json.loads(line.removeprefix(BYTE_ORDER_MARK))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self.path} {self.number(row)} is not JSON: {error}") from error


class _Parquet:
    """The columns of a parquet file that are asked for, by row group."""

    def __init__(self, path: Path, fields: Fields | None):
        import pyarrow
        import pyarrow.parquet

        self.path, self.lock = path, threading.Lock()
        self.damage = _NoDamage(path, "parquet file", (pyarrow.ArrowException, OSError))
        self.columns = None if fields is None else list(fields)
        self.groups: OrderedDict[int, Any] = OrderedDict()  # tables, the one used last at the end
        with self.damage:
            self.file = pyarrow.parquet.ParquetFile(path)
            has = self.file.schema_arrow.names
            for column in self.columns or ():
                if column not in has:
                    raise UserError(f"{path} has no column {column!r}: its columns are {', '.join(has)}")
            sizes = [self.file.metadata.row_group(group).num_rows for group in range(self.file.num_row_groups)]
        self.ends = list(itertools.accumulate(sizes))
        self.count = self.ends[-1] if self.ends else 0

    def number(self, row: int) -> str:
        return f"row {row + 1}"

    def read(self, row: int) -> Any:
        group = bisect.bisect_right(self.ends, row)
        first = self.ends[group - 1] if group else 0
        with self.lock, self.damage:
            if group not in self.groups:
                self.groups[group] = self.file.read_row_group(group, columns=self.columns)
                while len(self.groups) > 1 and sum(table.nbytes for table in self.groups.values()) > CACHE_BYTES:
                    self.groups.popitem(last=False)
            self.groups.move_to_end(group)
            return self.groups[group].slice(row - first, 1).to_pylist()[0]
