"""Files of text as corpora: `open_texts(name, paths, ...) -> (train, validation)`; and rows of files, by number.

A file is a list of rows, cut into blocks of neighbouring rows: the unit in which training shuffles and reads a corpus.
Blocks are the same at every opening, and any order of reading them gives the same rows. Only the places of the rows are
in memory. A damaged or hostile file is a UserError with its name and line.

    .txt        documents between lines `<|endoftext|>`, or else pieces of about 4 KiB: nothing lost, nothing twice
    .jsonl      one JSON value a line

Other formats are rows "file formats" of the rooms (rooms.py). Tasks read `Records` of all formats (data/records.py).
"""

import array
import bisect
import contextlib
import itertools
import json
import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from nanochat.ground import rooms
from nanochat.ground.cli import UserError
from nanochat.ground.log import warn
from nanochat.ground.paths import naming

DOCUMENT_BYTES = 4096  # a document of a .txt without separators
MAX_DOCUMENT_BYTES = 1 << 20  # a document of a .txt with separators
MAX_LINE_BYTES = 64 << 20  # a line of a .jsonl: a longer line is not a row
MAX_INVALID = 1 / 1000  # the share of a text's characters that may be invalid UTF-8: more is another encoding
COPY_BYTES = 1 << 20
CHANGED = "{} has changed since it was opened: put the old file back, or start anew"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# A line that is exactly <|endoftext|>. It begins the file, perhaps after a byte order mark, or follows a line end.
SEPARATOR_LINE = re.compile(
    rb"<\|endoftext\|>(?:(?<=^<\|endoftext\|>)|(?<=\A\xef\xbb\xbf<\|endoftext\|>))(?:\r?\n|\Z)", re.MULTILINE
)
COMMON = re.compile("[\n -~\u3000-\u30ff\u4e00-\u9fff]")  # characters of English, Chinese and Japanese
HIGH_BYTES = re.compile(rb"[\x80-\xff]+")
# Files of the `datasets` library that describe others.
LFS_POINTER = b"version https://git-lfs"
SETTINGS = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")
SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".json", ".parquet")  # the formats in which --data reads text

T = TypeVar("T")
Fields = Mapping[str, type]  # the fields that each record must have, with their types
# The columns of a table to read, or a function that chooses them among all columns; None: all.
Columns = Sequence[str] | Callable[[list[str]], list[str] | None] | None
KINDS = {str: "a text", int: "a whole number", list: "a list", dict: "an object"}


# ---------------------------------------------------------------------- documents


def open_texts(name: str, paths: Sequence[Path], whole: bool, column: str) -> tuple["FileCorpus", "FileCorpus"]:
    """(train, validation): the last file of several is validation, of one file the last 10%. With `whole`, both are
    everything. `column`: the field of rows that has the text."""
    if whole:
        corpus = FileCorpus(name, [open_file(path, [column]) for path in paths], column)
        return corpus, corpus
    if len(paths) > 1:
        files = [open_file(path, [column]) for path in paths]
        return FileCorpus(name, files[:-1], column), FileCorpus(f"{name} ({paths[-1].name})", files[-1:], column)
    [path] = paths
    val_name = f"{name} (last 10%)"
    if path.name.lower().endswith(".txt"):
        cut = text_cut(path)
        return FileCorpus(name, [TextFile(path, stop=cut)]), FileCorpus(val_name, [TextFile(path, start=cut)])
    file = open_file(path, [column])
    cut = max(min(len(file) * 9 // 10, len(file) - 1), 0)
    return FileCorpus(name, [file], column, end=cut), FileCorpus(val_name, [file], column, first=cut)


class FileCorpus:
    """The documents `first` to `end` of some files; `column` is the field of their rows that has the text."""

    def __init__(
        self, name: str, files: Sequence["DataFile"], column: str = "text", first: int = 0, end: int | None = None
    ):
        self.name = name
        self.column = column
        self.records = Records(files, {column: str}, first, end)

    def block_count(self) -> int:
        return len(self.records.starts) - 1

    def read_block(self, index: int) -> list[str]:
        if not 0 <= index < self.block_count():
            raise IndexError(f"block {index} of {self.block_count()}")
        first, end = self.records.starts[index : index + 2].tolist()
        file, row = self.records.place(first)
        rows = file.read(row, row + end - first)
        if not isinstance(file, TextFile):
            rows = [self._text(file, first + place, row) for place, row in enumerate(rows)]
        return [text for text in rows if text]

    def _text(self, file: "DataFile", index: int, row: Any) -> str:
        """The text of one row. Raises UserError: when it has none."""
        if file.has_nulls and row[self.column] is None:
            return ""
        text = _texts_of_messages(row) or self.records.checked(index, row)[self.column]
        return text if text.isascii() else text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def _texts_of_messages(row: Any) -> str:
    """The text of {"messages": [{"role": "assistant", "content": "..."}]}, as ms-swift has rows to pretrain on."""
    messages = row.get("messages") if isinstance(row, dict) else None
    alone = messages[0] if isinstance(messages, list) and len(messages) == 1 else None
    if not isinstance(alone, dict) or alone.get("role") != "assistant" or not isinstance(alone.get("content"), str):
        return ""
    return alone["content"]


# ---------------------------------------------------------------------- rows


class DataFile:
    """A file as a list of rows in blocks."""

    path: Path
    starts: np.ndarray  # (blocks + 1,) int64: the first row of each block, then the number of rows
    has_nulls: bool = False  # a row may have null in place of a value, as in a table
    _opened_as: tuple[int, int, int]  # its size, time of change and inode when it was opened

    def _identity(self) -> tuple[int, int, int]:
        facts = self.path.stat()
        return facts.st_size, facts.st_ctime_ns, facts.st_ino  # `cp -p` restores the other time, st_mtime_ns

    def _require_unchanged(self) -> None:
        """Before a read, so that a file that was cut off is not called damaged, and after it.

        Raises UserError: when the file has changed: its rows would be others than those that were counted.
        """
        if not self.path.exists() or self._identity() != self._opened_as:
            raise UserError(CHANGED.format(self.path))

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, first: int, end: int) -> list[Any]:
        """The rows `first` to `end`, all of one block."""
        raise NotImplementedError

    def row(self, row: int) -> Any:
        """One row; any order of rows is cheap."""
        return self.read(row, row + 1)[0]

    def where(self, row: int) -> str:
        """The file and the place in it, for messages."""
        return f"{self.path} row {row + 1}"


class Records:
    """The rows of several files, one file after the other, or only the rows `first` to `end`.

    With `fields`, each record must be an object that has them.
    """

    def __init__(self, files: Sequence[DataFile], fields: Fields | None = None, first: int = 0, end: int | None = None):
        self.files = files
        self.fields = fields
        self.first = first
        self.ends = list(itertools.accumulate(len(file) for file in files))  # the end of each file, in rows
        starts = [file.starts[1:] + stop - len(file) for file, stop in zip(files, self.ends, strict=True)]
        # The first record of each block, then the number of records. Blocks outside of first ... end become empty, and
        # `unique` drops them. A block across a bound is cut there.
        self.starts = np.unique(np.concatenate([[0], *starts]).clip(first, end)) - first  # (blocks + 1,)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: int) -> Any:
        """Raises UserError: when the record is damaged, or lacks a field."""
        file, row = self.place(index)
        return self.checked(index, file.row(row))

    def error(self, index: int, problem: str) -> UserError:
        """The error for a bad record: its file, its line, the problem."""
        return UserError(f"{self.where(index)} {problem}")

    def where(self, index: int) -> str:
        """The file of a record, and its line."""
        file, row = self.place(index)
        return file.where(row)

    def checked(self, index: int, value: Any) -> Any:
        """The value of record `index`. Raises UserError: when it is not an object with the fields."""
        if self.fields and not isinstance(value, dict):
            raise self.error(index, f"is not an object with {', '.join(self.fields)}")
        for name, kind in (self.fields or {}).items():
            if not isinstance(value.get(name), kind):
                has = f"it is {value[name]!r:.40}" if name in value else f"its fields are {', '.join(value) or 'none'}"
                raise self.error(index, f'has no "{name}" that is {KINDS[kind]}: {has}')
        return value

    def parse(self, index: int, parse: Callable[[Any], T]) -> T:
        """The result of `parse` for a record. Raises UserError: with the place of the record, where `parse` raises
        ValueError."""
        value = self[index]
        try:
            return parse(value)
        except ValueError as error:
            raise self.error(index, f"cannot be used: {error}") from error

    def place(self, index: int) -> tuple[DataFile, int]:
        """The file of a record, and its row there."""
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        row = self.first + index
        which = bisect.bisect_right(self.ends, row)
        file = self.files[which]
        return file, row - self.ends[which] + len(file)


def list_files(path: Path, suffixes: Sequence[str], flag: str = "") -> list[Path]:
    """The file itself, or the files below a folder with one of the suffixes, sorted by path, without hidden files.

    Raises UserError: when the folder has none, or the path is not a file of these kinds.
    """
    lead = f"{flag} {path}".strip()
    known = ", ".join(suffixes)
    if path.is_dir():
        files = []
        for file in path.rglob("*"):
            hidden = is_hidden(file.relative_to(path).as_posix())
            is_known = file.name.lower().endswith(tuple(suffixes)) and file.name not in SETTINGS
            if is_known and file.is_file() and not hidden:
                files.append(file)
        if not files:
            raise UserError(f"{lead}: no file in this folder ends in {known}")
        # Data sets come with settings in .json. Such files hold rows only where the folder has no other files.
        files = [file for file in files if file.suffix.lower() != ".json"] or files
        refuse_links_out(path, files)
        return sorted(files, key=lambda file: file.relative_to(path).as_posix())
    if not path.exists():
        raise UserError(f"{lead}: no such file or folder")
    if not path.is_file():
        raise UserError(f"{lead}: neither a file nor a folder")  # a pipe would block for ever
    if not path.name.lower().endswith(tuple(suffixes)):
        raise UserError(f"{lead}: unknown suffix {path.suffix!r}; known are {known}")
    return [path]


def is_hidden(path: str) -> bool:
    """Whether a file, by its path in a data set, does not belong to it: hidden, or made by an archiver."""
    return any(part.startswith((".", "__MACOSX")) for part in path.split("/"))


def refuse_links_out(folder: Path, files: Iterable[Path]) -> None:
    """Raises UserError: when a file found in a folder is a link to a place outside of it."""
    # A folder from elsewhere must not choose other files of this machine to be read, trained on and served.
    for file in files:
        if not file.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{file} is a link out of {folder}: copy the folder with `cp -rL`, or name the file itself")


def open_file(path: Path, columns: Columns = None) -> DataFile:
    """A file of any known format. Of a table only the `columns` are read; None: all.

    Raises UserError: when the file cannot be read.
    """
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise UserError(f"{path} only names the file that git-lfs keeps: run git lfs pull in its folder")
    name = path.name.lower()
    if name.endswith(".txt"):
        return TextFile(path)
    for suffix in rooms.names("file formats"):
        if name.endswith(suffix):
            return rooms.find("file formats", suffix)(path, columns)
    return JsonLinesFile(path)


class SpanFile(DataFile):
    """A file whose rows are stretches of its bytes, or of the bytes that it unpacks to."""

    unpacked: IO[bytes] | None = None

    def _index(self, rows: Iterable[tuple[int, bytes]]) -> None:
        """Note where the rows begin and end, with a hash of each, and cut them into blocks."""
        with self._opened() as file:
            start = os.pread(file.fileno(), DOCUMENT_BYTES, 0)
        # UTF-16 and UTF-32 have zeros in each character of English, and in each comma and line end.
        if start.startswith((b"\xff\xfe", b"\xfe\xff")) or start.count(0) > MAX_INVALID * len(start):
            raise UserError(f"{self.path} is not UTF-8: {conversion(start)}")
        # Blocks are small enough to shuffle a small file well, and few enough to keep the index of a large file small.
        # A loader deals blocks to 8 shards and more: with fewer blocks two shards would read the same one at a time,
        # and a batch would have the same rows twice. So a file has about 64, if it has that many rows.
        size = self.path.stat().st_size
        block_bytes = min(max(size // 4096, min(size // 64, 6 * 1024)), 1 << 20)
        bounds = array.array("q")
        starts: list[int] = []
        filled = block_bytes  # bytes in the block so far: the first row begins a new one
        for begin, row in rows:
            if filled >= block_bytes:
                starts.append(len(bounds) // 3)
                filled = 0
            bounds.extend((begin, begin + len(row), hash(row)))
            filled += len(row)
        self.spans = np.array(bounds, dtype=np.int64).reshape(-1, 3)  # (rows, 3): first byte, end, hash of the bytes
        self.starts = np.array([*starts, len(self.spans)], dtype=np.int64)

    def read(self, first: int, end: int) -> list[Any]:
        spans = self.spans[first:end].tolist()
        with naming(self.path), self._opened() as file:
            rows = [os.pread(file.fileno(), stop - begin, begin) for begin, stop, _ in spans]
        if [hash(row) for row in rows] != [known for *_, known in spans]:
            raise UserError(CHANGED.format(self.path))
        return [self._parse(first + place, row) for place, row in enumerate(rows)]

    def _parse(self, row: int, data: bytes) -> Any:
        raise NotImplementedError

    def _opened(self) -> contextlib.AbstractContextManager[IO[bytes]]:
        return self.path.open("rb") if self.unpacked is None else contextlib.nullcontext(self.unpacked)


def conversion(text: bytes) -> str:
    """What to do with bytes that are not UTF-8, with the encoding that they probably are in."""
    if text.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")) or text.count(b"\0\0") > len(text) // 8:
        encoding = "utf-32"
    elif text.startswith((b"\xff\xfe", b"\xfe\xff")):
        encoding = "utf-16"
    elif text.count(0) > MAX_INVALID * len(text):
        known = {name: len(COMMON.findall(text.decode(name, "replace"))) for name in ("utf-16le", "utf-16be")}
        encoding = max(known, key=lambda name: known[name])
    else:
        # Letters with accents stand alone, and Chinese characters are two bytes, one after the other.
        runs = HIGH_BYTES.findall(text)
        encoding = "gb18030" if sum(map(len, runs)) >= 2 * len(runs) else "latin1"
    return f"it is probably {encoding}: convert it, iconv -f {encoding} -t utf-8, and read the result"


# ---------------------------------------------------------------------- .txt


class TextFile(SpanFile):
    """Bytes `start` to `stop` of a text file as documents. Invalid UTF-8 is replaced, counted and reported once.

    Raises UserError: for a text in another encoding, most of whose characters would be replaced.
    """

    def __init__(self, path: Path, start: int = 0, stop: int | None = None):
        self.path = path
        self.invalid = 0
        self.characters = 0
        self.sample = b""  # the first document that has them
        self._index(self._documents(start, stop))
        if self.invalid > MAX_INVALID * self.characters:
            counts = f"{self.invalid:,} sequences in {self.characters:,} characters"
            raise UserError(f"{path} is not UTF-8 ({counts}): {conversion(self.sample)}")
        if self.invalid:
            warn(f"{path}: {self.invalid} invalid UTF-8 sequences are read as \N{REPLACEMENT CHARACTER}")

    def _parse(self, row: int, data: bytes) -> str:
        return data.decode("utf-8", "replace")

    def _documents(self, begin: int, stop: int | None) -> Iterator[tuple[int, bytes]]:
        """The first byte of each document, and its bytes."""
        size = self.path.stat().st_size
        stop = size if stop is None else stop
        if not size:
            return  # an empty file cannot be mapped
        with mapped(self.path) as data:
            if data[:3] == BYTE_ORDER_MARK:
                begin = max(begin, len(BYTE_ORDER_MARK))
            # `find` first: it scans a large file without separators faster than the pattern.
            has_separators = data.find(b"<|endoftext|>") >= 0 and SEPARATOR_LINE.search(data) is not None
            limit = MAX_DOCUMENT_BYTES if has_separators else DOCUMENT_BYTES
            matches = SEPARATOR_LINE.finditer(data, begin, stop) if has_separators else ()
            separators = (match.span() for match in matches)
            for separator, after_separator in itertools.chain(separators, [(stop, stop)]):
                while begin < separator:
                    end = _document_end(data, begin, separator, limit)
                    document = data[begin:end]
                    text = document.decode("utf-8", "replace")
                    self.characters += len(text)
                    invalid = text.count("\ufffd") - document.count("\ufffd".encode())
                    self.sample = self.sample or (document if invalid else b"")
                    self.invalid += invalid
                    yield begin, document
                    begin = end
                begin = after_separator


def text_cut(path: Path) -> int:
    """The byte where the last 10% of a .txt begin: there, or at the next separator if there is one."""
    size = path.stat().st_size
    if size < 2:
        return 0
    with mapped(path) as data:
        cut = _character_start(data, size * 9 // 10)
        separator = SEPARATOR_LINE.search(data, cut)
        return separator.end() if separator and separator.end() < size else cut


@contextlib.contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield data


def _document_end(data: mmap.mmap, begin: int, end: int, limit: int) -> int:
    """The end of the document at `begin`: after a blank line, else after a line, else between two characters."""
    if end - begin <= limit:
        return end
    window = data[begin : begin + limit]
    after_blank_line = max(window.rfind(b"\n\n") + 2, window.rfind(b"\n\r\n") + 3)
    after_line = window.rfind(b"\n") + 1
    for length in (after_blank_line, after_line):
        if length >= limit // 4:
            return begin + length
    return _character_start(data, begin + limit)


def _character_start(data: mmap.mmap, position: int) -> int:
    """`position`, or up to 3 bytes before it if it lies inside a UTF-8 character."""
    for start in range(position, max(position - 4, -1), -1):
        is_continuation_byte = data[start] & 0xC0 == 0x80
        if not is_continuation_byte:
            return start
    return position


# ---------------------------------------------------------------------- .jsonl


class JsonLinesFile(SpanFile):
    """One JSON value per line; blank lines are skipped. A line is parsed when it is read."""

    def __init__(self, path: Path):
        self.path = path
        self._index(self._lines())

    def where(self, row: int) -> str:
        """Count the lines only for a message: an index of line numbers would be as large as the index of rows."""
        number = 1
        stop = int(self.spans[row, 0])
        with self._opened() as file:
            for begin in range(0, stop, COPY_BYTES):
                number += os.pread(file.fileno(), min(stop - begin, COPY_BYTES), begin).count(b"\n")
        return f"{self.path} line {number}"

    def _parse(self, row: int, data: bytes) -> Any:
        try:
            return json.loads(data.removeprefix(BYTE_ORDER_MARK))
        except UnicodeDecodeError as error:
            raise UserError(f"{self.where(row)} is not JSON in UTF-8: {conversion(data)}") from error
        except (ValueError, RecursionError) as error:
            hint = "; a file with values in several lines is named .json" if data.strip() in (b"{", b"[") else ""
            raise UserError(f"{self.where(row)} is not JSON: {error}{hint}") from error

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """The first byte of each line that is not blank, and its bytes."""
        begin = 0
        with self._opened() as file:
            while line := file.readline(MAX_LINE_BYTES):
                if len(line) == MAX_LINE_BYTES:
                    limit = f"longer than {MAX_LINE_BYTES >> 20} MiB"
                    raise UserError(f"{self.path}: the line at byte {begin:,} is {limit}")
                if line.strip():
                    yield begin, line
                begin += len(line)
