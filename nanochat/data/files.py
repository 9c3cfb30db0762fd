"""One reader for each file format that text and records come in: .txt, .jsonl[.gz], .parquet.

A file is a list of rows, cut into blocks of neighbouring rows: the unit in which training shuffles and reads a corpus.
Blocks are the same at every opening, and any order of reading them gives the same rows. In memory is only where each
row or block begins. A damaged or hostile file is a UserError with its name and line.

    .txt        documents between lines `<|endoftext|>`, or else pieces of about 4 KiB: nothing lost, nothing twice
    .jsonl[.gz] one JSON value a line; a .gz is unpacked into a temporary file when it is opened
    .parquet    rows of the wanted columns; a block is a row group, or an equal share of a large one
"""

import contextlib
import gzip
import itertools
import json
import mmap
import tempfile
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from nanochat.shell.cli import UserError
from nanochat.shell.log import warn
from nanochat.shell.paths import base_dir

DOCUMENT_BYTES = 4096  # of a .txt without separators
MAX_DOCUMENT_BYTES = 1 << 20  # of a .txt with separators
MAX_LINE_BYTES = 64 << 20  # of a .jsonl: a longer line is no row
MAX_GROUP_BYTES = 16 << 20  # of a parquet row group before it is split
MAX_UNPACKED_RATIO = 100  # of a .gz: text packs 3 to 30 times smaller, a bomb 1,000 times ...
MIN_BOMB_BYTES = 64 << 20  # ... which is looked at from this size on
CACHE_BYTES = 128 << 20  # of one parquet file's blocks, for rows in any order
COPY_BYTES = 1 << 20
SEPARATOR = b"<|endoftext|>"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class BlockFile:
    """A file as blocks of rows."""

    path: Path
    starts: np.ndarray  # (blocks + 1,) int64: the first row of each block, then the number of rows

    def __len__(self) -> int:
        return int(self.starts[-1])

    def block_of(self, row: int) -> int:
        return int(np.searchsorted(self.starts, row, side="right")) - 1

    def read(self, block: int) -> list[Any]:
        """The rows of one block."""
        raise NotImplementedError

    def row(self, row: int) -> Any:
        """One row; any order of rows is cheap."""
        raise NotImplementedError

    def where(self, row: int) -> str:
        """The file and the place in it, for messages."""
        return f"{self.path} row {row + 1}"


def list_files(path: Path, suffixes: Sequence[str], *, recursive: bool, flag: str = "") -> list[Path]:
    """The file itself, or the files of a folder with one of the suffixes, sorted by path; hidden ones are left out.

    Raises UserError: when there is none, or the path is not a file of these kinds.
    """
    lead = f"{flag} {path}".strip()
    known = ", ".join(suffixes)
    if path.is_dir():
        files = []
        for file in path.rglob("*") if recursive else path.iterdir():
            hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if file.name.lower().endswith(tuple(suffixes)) and file.is_file() and not hidden:
                files.append(file)
        if not files:
            raise UserError(f"{lead}: no file in this folder ends in {known}")
        return sorted(files, key=lambda file: file.relative_to(path).as_posix())
    if not path.exists():
        raise UserError(f"{lead}: no such file or folder")
    if not path.is_file():
        raise UserError(f"{lead}: neither a file nor a folder")  # a pipe would block for ever
    if not path.name.lower().endswith(tuple(suffixes)):
        hint = f" (for a JSON list: jq -c '.[]' {path.name} > {path.stem}.jsonl)" if path.suffix == ".json" else ""
        raise UserError(f"{lead}: unknown suffix {path.suffix!r}; known are {known}{hint}")
    return [path]


def open_file(path: Path, columns: Sequence[str] | None = None) -> BlockFile:
    """A file of any known format. `columns` of a .parquet: only these are read; None: all.

    Raises UserError: when the file cannot be read.
    """
    name = path.name.lower()
    try:
        if name.endswith(".txt"):
            return TextFile(path)
        if name.endswith(".parquet"):
            return ParquetFile(path, columns)
        return JsonLinesFile(path)
    except PermissionError as error:
        raise UserError(f"{path}: no permission to read it") from error


@contextlib.contextmanager
def _damage_in_one_line(path: Path, kind: str, *errors: type[Exception]) -> Iterator[None]:
    """Turn what a library raises on a damaged file into one line with the file's name."""
    try:
        yield
    except (UserError, FileNotFoundError, PermissionError):
        raise
    except errors as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise UserError(f"{path} is a damaged {kind} ({first_line}): fetch or write it again") from error


def _block_bytes(file_bytes: int) -> int:
    """Blocks small enough for a good shuffle of a small file, few enough for a small index of a large one."""
    return min(max(file_bytes // 4096, 6 * 1024), 1 << 20)


# ---------------------------------------------------------------------- .txt


class TextFile(BlockFile):
    """Bytes `start` to `stop` of a text file as documents. Invalid UTF-8 is replaced, counted and reported once."""

    def __init__(self, path: Path, start: int = 0, stop: int | None = None):
        size = path.stat().st_size
        self.path = path
        self.stop = size if stop is None else stop
        self.has_separators = False
        begins: list[int] = []  # of blocks, in bytes
        starts: list[int] = []  # of blocks, in documents
        documents = 0
        invalid = 0
        filled = 0  # bytes in the block so far
        target = _block_bytes(size)
        if size:
            with _mapped(path) as data:
                if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
                    raise UserError(f"{path} is UTF-16: convert it, iconv -f utf-16 -t utf-8")
                first = max(start, len(BYTE_ORDER_MARK) if data[:3] == BYTE_ORDER_MARK else 0)
                self.has_separators = _next_separator(data, 0, size)[0] < size
                for begin, end in _documents(data, first, self.stop, self.stop, self.has_separators):
                    if not begins or filled >= target:
                        begins.append(begin)
                        starts.append(documents)
                        filled = 0
                    filled += end - begin
                    documents += 1
                    invalid += _count_invalid(data[begin:end])
        if invalid:
            warn(f"{path}: {invalid} invalid UTF-8 sequences are read as \N{REPLACEMENT CHARACTER}")
        self.begins = np.array([*begins, self.stop], dtype=np.int64)  # (blocks + 1,) bytes
        self.starts = np.array([*starts, documents], dtype=np.int64)

    def read(self, block: int) -> list[str]:
        begin = int(self.begins[block])
        until = int(self.begins[block + 1])
        with _mapped(self.path) as data:
            spans = _documents(data, begin, until, self.stop, self.has_separators)
            return [data[begin:end].decode("utf-8", "replace") for begin, end in spans]


def text_cut(path: Path) -> int:
    """The byte where the last 10% of a .txt begin: there, or at the next separator if there is one."""
    size = path.stat().st_size
    if size < 2:
        return 0
    with _mapped(path) as data:
        cut = _character_start(data, size * 9 // 10)
        after_separator = _next_separator(data, cut, size)[1]
        return after_separator if after_separator < size else cut


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield data


def _documents(data: mmap.mmap, begin: int, until: int, stop: int, has_separators: bool) -> Iterator[tuple[int, int]]:
    """(begin, end) of the documents that begin before `until`; text and separators end at `stop`."""
    limit = MAX_DOCUMENT_BYTES if has_separators else DOCUMENT_BYTES
    while begin < until:
        separator, after_separator = _next_separator(data, begin, stop) if has_separators else (stop, stop)
        while begin < min(separator, until):
            end = _document_end(data, begin, separator, limit)
            yield begin, end
            begin = end
        begin = after_separator


def _next_separator(data: mmap.mmap, begin: int, stop: int) -> tuple[int, int]:
    """Where the next line begins that is exactly the separator, and where the line after it begins."""
    position = data.find(SEPARATOR, begin, stop)
    while position >= 0:
        end = position + len(SEPARATOR)
        if data[end : end + 2] == b"\r\n":
            end += 1
        first_line = position == 0 or (position == 3 and data[:3] == BYTE_ORDER_MARK)
        starts_line = first_line or data[position - 1 : position] == b"\n"
        ends_line = end >= stop or data[end : end + 1] == b"\n"
        if starts_line and ends_line:
            return position, min(end + 1, stop)
        position = data.find(SEPARATOR, position + 1, stop)
    return stop, stop


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


def _count_invalid(document: bytes) -> int:
    try:
        document.decode("utf-8")
        return 0
    except UnicodeDecodeError:
        return document.decode("utf-8", "replace").count("\ufffd") - document.count("\ufffd".encode())


# ---------------------------------------------------------------------- .jsonl, .jsonl.gz


class JsonLinesFile(BlockFile):
    """One JSON value a line; blank lines are no rows. A line is parsed when it is read."""

    def __init__(self, path: Path):
        self.path = path
        self.lock = threading.RLock()
        self.unpacked = _unpack(path) if path.name.lower().endswith(".gz") else None
        begins: list[int] = []  # of rows, in bytes
        starts: list[int] = []  # of blocks, in rows
        offset = 0
        filled = 0  # bytes in the block so far
        target = _block_bytes(path.stat().st_size)
        with self._opened() as file:
            while line := file.readline(MAX_LINE_BYTES):
                if len(line) == MAX_LINE_BYTES:
                    raise UserError(f"{path}: the line at byte {offset:,} is longer than {MAX_LINE_BYTES >> 20} MiB")
                if line.strip():
                    if not begins or filled >= target:
                        starts.append(len(begins))
                        filled = 0
                    begins.append(offset)
                    filled += len(line)
                offset += len(line)
        self.begins = np.array(begins, dtype=np.int64)  # (rows,) bytes
        self.starts = np.array([*starts, len(begins)], dtype=np.int64)

    def read(self, block: int) -> list[Any]:
        rows = range(int(self.starts[block]), int(self.starts[block + 1]))
        with self._opened() as file:
            return [self._parse(file, row) for row in rows]

    def row(self, row: int) -> Any:
        with self._opened() as file:
            return self._parse(file, row)

    def where(self, row: int) -> str:
        """Lines are counted when a message needs it: an index of line numbers would double the memory."""
        number = 1
        left = int(self.begins[row])
        with self._opened() as file:
            file.seek(0)
            while left > 0:
                chunk = file.read(min(left, COPY_BYTES))
                number += chunk.count(b"\n")
                left -= len(chunk)
        return f"{self.path} line {number}"

    def _parse(self, file: IO[bytes], row: int) -> Any:
        file.seek(int(self.begins[row]))
        try:
            return json.loads(file.readline().removeprefix(BYTE_ORDER_MARK))
        except (ValueError, RecursionError) as error:
            problem = error
        raise UserError(f"{self.where(row)} is not JSON: {problem}") from problem

    @contextlib.contextmanager
    def _opened(self) -> Iterator[IO[bytes]]:
        """The text; one thread at a time."""
        if self.unpacked is None:
            with self.path.open("rb") as file:
                yield file
        else:
            with self.lock:
                yield self.unpacked


def _unpack(path: Path) -> IO[bytes]:
    """The text of a .gz in a temporary file, which vanishes with this process.

    gzip can only be read forwards from its beginning, and training reads blocks in shuffled order.
    Raises UserError: when the file is damaged or a bomb.
    """
    base_dir().mkdir(parents=True, exist_ok=True)
    unpacked = tempfile.TemporaryFile(dir=base_dir())  # noqa: SIM115 (lives as long as its reader)
    size = 0
    damage = _damage_in_one_line(path, "gzip file", gzip.BadGzipFile, EOFError, zlib.error)
    with damage, path.open("rb") as packed, gzip.GzipFile(fileobj=packed) as text:
        while chunk := text.read(COPY_BYTES):
            size += len(chunk)
            if size > max(MIN_BOMB_BYTES, MAX_UNPACKED_RATIO * packed.tell()):
                raise UserError(f"{path} unpacks to more than {MAX_UNPACKED_RATIO} times its size: is it a bomb?")
            unpacked.write(chunk)
    unpacked.seek(0)
    return unpacked


# ---------------------------------------------------------------------- .parquet


class ParquetFile(BlockFile):
    """The rows of a parquet file as dictionaries of the wanted columns."""

    def __init__(self, path: Path, columns: Sequence[str] | None = None):
        import pyarrow
        import pyarrow.parquet

        self.path = path
        self.columns = None if columns is None else list(columns)
        self.lock = threading.RLock()
        self.damage_errors = (pyarrow.ArrowException, OSError)
        self.cache: OrderedDict[int, list[Any]] = OrderedDict()  # blocks of `row`, the one used last at the end
        self.rows: Iterator[Any] = iter(())  # of the row group that is being read
        self.place = (-1, 0)  # that row group, and which of its rows comes next
        with _damage_in_one_line(path, "parquet file", *self.damage_errors):
            # Buffered, not pre-buffered: 12 MB instead of a whole column chunk (183 MB for one of 171 MB).
            self.file = pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
            self.schema = self.file.schema_arrow
            for column in self.columns or ():
                if column not in self.schema.names:
                    raise UserError(f"{path} has no column {column!r}: its columns are {', '.join(self.schema.names)}")
            self.spans = list(self._split_groups())  # of each block: row group, its first row there, number of rows
        self.starts = np.fromiter(itertools.accumulate((rows for _, _, rows in self.spans), initial=0), dtype=np.int64)
        file_bytes = sum(self._group_bytes(group) for group in range(self.file.num_row_groups))
        self.cached_blocks = max(CACHE_BYTES * len(self.spans) // max(file_bytes, 1), 1)  # that fill CACHE_BYTES

    def read(self, block: int) -> list[Any]:
        group, first, count = self.spans[block]
        with self.lock, _damage_in_one_line(self.path, "parquet file", *self.damage_errors):
            if self.place[0] != group or self.place[1] > first:  # a jump: start this row group again
                batches = self.file.iter_batches(batch_size=1024, row_groups=[group], columns=self.columns)
                self.rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
                self.place = (group, 0)
            for _ in itertools.islice(self.rows, first - self.place[1]):
                pass
            rows = list(itertools.islice(self.rows, count))
            self.place = (group, first + count)
        assert len(rows) == count
        return rows

    def row(self, row: int) -> Any:
        block = self.block_of(row)
        with self.lock:
            rows = self.cache.pop(block, None)
            if rows is None:
                rows = self.read(block)
            self.cache[block] = rows
            while len(self.cache) > self.cached_blocks:
                self.cache.popitem(last=False)
        return rows[row - int(self.starts[block])]

    def _split_groups(self) -> Iterator[tuple[int, int, int]]:
        """Row groups of at most 16 MiB, and 64 blocks or more per file if there are rows enough for a good shuffle."""
        for group in range(self.file.num_row_groups):
            rows = self.file.metadata.row_group(group).num_rows
            for_shuffling = min(-(-64 // self.file.num_row_groups), rows // 8)
            shares = max(-(-self._group_bytes(group) // MAX_GROUP_BYTES), for_shuffling, 1)
            step = max(-(-rows // shares), 1)
            for first in range(0, rows, step):
                yield group, first, min(step, rows - first)

    def _group_bytes(self, group: int) -> int:
        """Unpacked bytes of a row group: of the one wanted column if the file's columns are flat, else of all."""
        about = self.file.metadata.row_group(group)
        is_flat = len(self.file.schema.names) == len(self.schema.names)
        if self.columns is None or len(self.columns) != 1 or not is_flat:
            return about.total_byte_size
        return about.column(self.schema.names.index(self.columns[0])).total_uncompressed_size
