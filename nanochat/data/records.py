"""Records of tasks by number: a question with its answer, a conversation, a preference pair.

`open_records(paths)` opens .jsonl[.gz] and .parquet files or folders (files.py), `open_split(name, split, path, hub)`
one split of a task's dataset, from a local path or from the hub. Any order of records is cheap to read.
"""

import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from nanochat.data import hub as hubs
from nanochat.data.catalog import TASKS
from nanochat.data.files import RECORD_SUFFIXES, Fields, Records, list_files, open_file, refuse_links_out
from nanochat.shell.cli import UserError


def open_records(paths: Iterable[str | Path], fields: Fields | None = None) -> Records:
    """The records of some files and folders in order.

    Raises UserError: when a path is missing, of no known format or damaged, or all of them hold no record.
    """
    paths = [Path(path).expanduser() for path in paths]
    columns = None if fields is None else list(fields)
    files = [open_file(file, columns) for path in paths for file in list_files(path, RECORD_SUFFIXES)]
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
            found = [file for file in sorted(folder.glob("*")) if re.fullmatch(pattern, file.name.lower())]
            if found:
                refuse_links_out(path, found)
                return found
    files = list_files(path, RECORD_SUFFIXES) if only else []
    return files if len(files) == 1 else []
