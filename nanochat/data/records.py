"""Records of tasks by number: a question with its answer, a conversation, a preference pair.

`open_records(paths)` opens files or folders of any format. `open_split(name, split, path, hub)` opens one split of a
task's dataset, from a local path or from the hub. `open_part(source, part, hub)` opens the training part or the
held-out part of any other dataset. Any order of records is cheap to read.
"""

import contextlib
import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nanochat.data import hub as hubs
from nanochat.data.catalog import HUB_NAME, TASKS
from nanochat.data.splits import choose_files, name_unread
from nanochat.ground.cli import UserError
from nanochat.ground.text_files import (
    Columns,
    DataFile,
    Fields,
    Records,
    list_files,
    open_file,
    refuse_links_out,
)

FEWEST_ROWS = 100  # a smaller file is needed whole: nothing is held out by default
HELD_OUT_ROWS = 200  # more than these make a validation slow, and little more exact
RECORD_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet", ".csv", ".tsv", ".json")


def open_records(paths: Iterable[str | Path], fields: Fields | None = None, columns: Columns = None) -> Records:
    """The records of some files and folders in order. `columns`: of a .parquet; default: `fields`.

    Raises UserError: when a path is missing, of no known format or damaged, or all of them hold no record.
    """
    paths = [Path(path).expanduser() for path in paths]
    if columns is None and fields is not None:
        columns = list(fields)
    files = [open_file(file, columns) for path in paths for file in list_files(path, RECORD_SUFFIXES)]
    records = Records(files, fields)
    if not len(records):
        raise UserError(f"{', '.join(map(str, paths))}: it has no rows")
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


def open_part(
    source: str, part: Literal["train", "test"], hub: str, columns: Columns = None, val_share: float | None = None,
    parse: Callable[[Any], Any] = lambda record: record, strict_data: bool = False,
) -> Records:  # fmt: skip
    """The records to learn from, or those that are held out, of a local file or folder or of a hub's ORG/NAME[/CONFIG].

    `@SPLIT` after it names a split. The files that splits.py finds are held out, or else some of the rows: see
    `held_out_rows`. `parse` raises ValueError for a record that cannot be used. Raises UserError: with the next step.
    """
    name, at, requested = source.rpartition("@")
    if not at or Path(source).expanduser().exists():
        name = source
        requested = ""
    place = Path(name).expanduser()
    if place.is_dir():
        files = {file.relative_to(place).as_posix(): file for file in list_files(place, RECORD_SUFFIXES)}
        chosen = choose_files(list(files), requested or None)
        if part == "train":
            name_unread(f"--tasks {source}", place, {*chosen.train, *chosen.held_out}, strict_data)
        train, held_out = ([files[path] for path in paths] for paths in (chosen.train, chosen.held_out))
    elif place.exists() or not (on_hub := HUB_NAME.fullmatch(name)):
        if requested:
            raise UserError(f"{source}: {name} is not a folder with splits: leave @{requested} out")
        train, held_out = [place], []
    else:
        try:
            train, held_out = hubs.fetch_part(on_hub["repo"], on_hub["config"], requested or None, part, hub)
        except UserError as error:
            raise UserError(f"--tasks {source} is not a file or folder here; as a hub dataset, {error}") from error
    if held_out:
        return open_records(train if part == "train" else held_out, columns=columns)
    records = open_records(train, columns=columns)
    rows = held_out_rows(records, val_share, parse)
    if part == "train":
        rows = np.setdiff1d(np.arange(len(records)), rows)
    return ChosenRecords(records, rows)


def held_out_rows(records: Records, share: float | None, parse: Callable[[Any], Any]) -> np.ndarray:
    """The numbers of the rows that are held out, in order: `share` of them, or by default 2% of them and 200 at most,
    and none of less than 100 rows.

    A hash of a row decides: a file may be sorted by topic, and equal rows are all on one side. Rows that `parse`
    cannot use are left to the training part, which counts them.
    """
    count = len(records)
    # Exact: a float of 0.1 times 30 rows is above 3. Of two rows or more the training part has one.
    wanted = min(math.ceil(Fraction(str(share or 0)) * count), count - 1)
    if share is None and count >= FEWEST_ROWS:
        wanted = min(count // 50, HELD_OUT_ROWS)
    if wanted <= 0:
        return np.empty(0, np.int64)
    numbers_of: dict[bytes, list[int]] = {}
    for number in range(count):
        with contextlib.suppress(UserError):
            row = repr(records[number]).encode(errors="surrogatepass")
            numbers_of.setdefault(hashlib.blake2b(row, digest_size=8).digest(), []).append(number)
    chosen: list[int] = []
    for digest in sorted(numbers_of):
        equal = numbers_of[digest]
        if len(chosen) + len(equal) > wanted:
            continue
        with contextlib.suppress(UserError):
            records.parse(equal[0], parse)
            chosen += equal
        if len(chosen) == wanted:
            break
    return np.array(sorted(chosen), np.int64)


class ChosenRecords(Records):
    """Those records of some files whose numbers are given."""

    def __init__(self, whole: Records, numbers: np.ndarray):
        super().__init__(whole.files)
        self.whole = whole
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def place(self, index: int) -> tuple[DataFile, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        return self.whole.place(int(self.numbers[index]))


def find_split(path: Path, names: Sequence[str], inside: str | Path = ".", only: bool = False) -> list[Path]:
    """The files of a split with one of `names`: `path` itself, or the files in that folder or its subfolder `inside`.

    `only`: the dataset has only this split, so a folder's single data file belongs to it. Raises UserError: for a file
    that has the name of another split.
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
            found = [file for file in sorted(folder.glob("*")) if re.fullmatch(pattern, file.name.lower())]
            if found:
                refuse_links_out(path, found)
                return found
    files = list_files(path, RECORD_SUFFIXES) if only else []
    return files if len(files) == 1 else []
