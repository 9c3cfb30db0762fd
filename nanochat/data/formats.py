"""The formats of text and records that ground/text_files.py does not read.

.parquet    rows of the wanted columns (parquet.py)
.jsonl.gz   one JSON value a line; the file is unpacked into a temporary file when it is opened
.json       a list, of which each item is a row, also in an object: {"data": [...]}; or one JSON value after the other
.csv, .tsv  UTF-8, or UTF-16 as Excel writes it, with a header; each row is an object of texts
"""

import codecs
import contextlib
import csv
import gzip
import io
import mmap
import os
import re
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from nanochat.ground.cli import UserError
from nanochat.ground.paths import base_dir
from nanochat.ground.text_files import (
    BYTE_ORDER_MARK,
    COPY_BYTES,
    MAX_LINE_BYTES,
    Columns,
    JsonLinesFile,
    SpanFile,
    conversion,
    mapped,
)
from nanochat.ground.untrusted import json_of

MAX_UNPACKED_RATIO = 100  # for .gz and .parquet: text packs 3 to 30 times smaller, a bomb 1,000 times ...
MIN_BOMB_BYTES = 64 << 20  # ... and is refused from this size on
MAX_CSV_ROW_BYTES = 16 << 20  # after a quote without an end, all the rest is one row, of four bytes a character
INDEX_COLUMN = "Unnamed: 0"  # the column of row numbers that pandas writes without a name: the name it reads it by
STRUCTURE = re.compile(rb'"[^"\\]*["\\]|[\[\]{},]')  # JSON: a text up to its end or its first \, or a mark
IN_TEXT = re.compile(rb'["\\]')
SEPARATOR_DECLARED = re.compile(rb'"?sep=(.)"?\r?$')
# The head of an object that has the rows in a list: {"version": 1, "data": [{...
VALUE = rb'(?:"(?:[^"\\]|\\.)*"|[-+.\w]+)'
HEAD = re.compile(
    rb'\s*\{\s*(?:"[^"\\]*"\s*:\s*%s\s*,\s*)*"(?:data|train|rows|examples|instances|items)"\s*:\s*(?=\[\s*[\[{])'
    % VALUE
)
TAIL = re.compile(rb'(?:\s*,\s*"[^"\\]*"\s*:\s*%s)*\s*\}\s*' % VALUE)


@contextlib.contextmanager
def damage_in_one_line(path: Path, kind: str, *errors: type[Exception]) -> Iterator[None]:
    """Turn a library's error about a damaged file into one line with the file's name."""
    try:
        yield
    except UserError:  # it is one line already
        raise
    except errors as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise UserError(f"{path} is a damaged {kind} ({first_line}): fetch or write it again") from error


def without_nulls(value: Any) -> Any:
    """A value without the nulls of its objects: in Arrow's tables each object has the names of all in its column."""
    if isinstance(value, dict):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def refuse_bomb(path: Path, unpacked_bytes: int, packed_bytes: int) -> None:
    if unpacked_bytes > max(MIN_BOMB_BYTES, MAX_UNPACKED_RATIO * packed_bytes):
        raise UserError(f"{path} unpacks to more than {MAX_UNPACKED_RATIO} times its size: is it a bomb?")


class GzipFile(JsonLinesFile):
    """The lines of a .jsonl.gz."""

    def __init__(self, path: Path, columns: Columns = None):
        self.path = path
        self.unpacked = _unpack(path)
        self._index(self._lines())


class JsonFile(JsonLinesFile):
    """The items of one JSON list, which may be in an object: {"data": [...]}. A file without such a list holds one JSON
    value after the other: each a line, or an object in several lines."""

    def __init__(self, path: Path, columns: Columns = None):
        self.path = path
        with path.open("rb") as file:
            start = file.read(COPY_BYTES).removeprefix(BYTE_ORDER_MARK)
        self.head = HEAD.match(start)
        is_list = self.head is not None or start.lstrip().startswith(b"[")
        self.item_depth = 1 if is_list else 0  # how many brackets an item is in
        lines = start.strip().split(b"\n", 2)[:2]
        # One damaged line says nothing; where neither of the first two is JSON, the values take several lines.
        self.has_items = is_list or (len(lines) == 2 and all(json_of(line) is None for line in lines))
        self._index(self._items() if self.has_items else self._lines())

    def where(self, row: int) -> str:
        return f"{self.path} item {row + 1}" if self.has_items else super().where(row)

    def _items(self) -> Iterator[tuple[int, bytes]]:
        """The first byte of each item of the list, or of each object of a file that has one after the other, and its
        bytes."""
        # Only brackets, commas and texts are looked for; an item is parsed when it is read, as a line is. A parser
        # would hold the whole list as objects, which take ten times the bytes of the file.
        with mapped(self.path) as data:
            depth = 0
            begin = 0  # where the item begins
            place = self.head.end() + len(BYTE_ORDER_MARK) * (data[:3] == BYTE_ORDER_MARK) if self.head else 0
            while match := STRUCTURE.search(data, place):
                place = match.end()
                mark = data[place - 1 : place]
                if mark == b"\\":
                    place = self._end_of_text(data, place + 1)
                elif mark in b"[{":
                    depth += 1
                    if depth == self.item_depth:
                        begin = place
                elif mark in b",]}":
                    depth -= mark != b","
                    is_end_of_item = depth == 0 or (depth == self.item_depth and mark == b",")
                    # A comma, or the end of a list, follows the item; the end of an object belongs to it.
                    end = place if self.item_depth == 0 and mark != b"," else place - 1
                    if is_end_of_item:
                        item = data[begin:end]
                        if item.strip():
                            yield begin, item
                        begin = place
                if place - begin > MAX_LINE_BYTES:
                    raise UserError(
                        f"{self.path}: the item at byte {begin:,} is longer than {MAX_LINE_BYTES >> 20} MiB"
                    )
                if depth == 0 and self.item_depth:
                    break
            if depth:
                raise UserError(f"{self.path} is a damaged .json: its last value does not end; fetch or write it again")
            rest = data[begin : begin + COPY_BYTES]
            if not (TAIL.fullmatch(rest) if self.head else not rest.strip()):
                what = "the list" if self.item_depth else "the last object"
                raise UserError(
                    f"{self.path}: something follows {what}: one list a file, or one JSON value a line (.jsonl)"
                )

    def _end_of_text(self, data: mmap.mmap, place: int) -> int:
        """The end of the JSON text that `place` is in."""
        while match := IN_TEXT.search(data, place):
            place = match.end()
            if match[0] == b'"':
                return place
            place += 1  # an escaped character does not end the text
        return len(data)


class CsvFile(SpanFile):
    """The rows of a CSV file with a header, as objects of texts. A text in quotes may hold line ends.

    A header without a comma may divide its columns by tabs or semicolons, as Excel does in some countries; a line
    `sep=;` before it, which Excel reads too, names the mark. A .tsv has tabs.
    """

    def __init__(self, path: Path, columns: Columns = None):
        self.path = path
        csv.field_size_limit(MAX_CSV_ROW_BYTES)  # the module's own limit, 128 KiB, is less than a long chat has
        self.unpacked = _from_utf16(path)
        with self._opened() as file:
            first_line = os.pread(file.fileno(), COPY_BYTES, 0).partition(b"\n")[0]
        declared = SEPARATOR_DECLARED.match(first_line.removeprefix(BYTE_ORDER_MARK))
        self.delimiter = next((mark for mark in ",\t;|" if mark.encode() in first_line), ",")
        if declared is not None:
            self.delimiter = declared[1].decode("latin1")
        elif path.name.lower().endswith(".tsv"):
            self.delimiter = "\t"
        self.skipped = len(first_line) + 1 if declared is not None else 0  # bytes before the header
        self.header: list[str] = []
        self._index(self._rows())

    where = JsonLinesFile.where

    def _parse(self, row: int, data: bytes) -> dict[str, str]:
        text = io.StringIO(data.decode("utf-8"), newline="")
        [values] = csv.reader(text, strict=True, delimiter=self.delimiter)
        if not any(values[len(self.header) :]):  # columns without a name are empty, as Excel writes them
            values = values[: len(self.header)]
        if len(values) != len(self.header):
            problem = f"has {len(values)} values, and the header names {len(self.header)}"
            raise UserError(
                f"{self.where(row)} {problem}: quote texts that hold the mark between columns, or line ends"
            )
        return dict(zip(self.header, values, strict=True))

    def _rows(self) -> Iterator[tuple[int, bytes]]:
        """The first byte of each row after the header, and its bytes."""
        end = self.skipped  # where the parser has read to: it reads no line beyond the current row

        def lines(file: IO[bytes]) -> Iterator[str]:
            nonlocal end
            while line := file.readline(MAX_CSV_ROW_BYTES):
                end += len(line)
                if end - begin >= MAX_CSV_ROW_BYTES:
                    limit = f"longer than {MAX_CSV_ROW_BYTES >> 20} MiB"
                    raise UserError(f"{self.path}: the row at byte {begin:,} is {limit}: is a quote not closed?")
                try:
                    text = line.decode("utf-8")
                except UnicodeDecodeError as error:
                    place = end - len(line) + error.start
                    raise UserError(f"{self.path} is not UTF-8 (byte {place:,}): {conversion(line)}") from error
                yield text.removeprefix("\ufeff") if begin == 0 else text

        begin = self.skipped
        with damage_in_one_line(self.path, self.path.suffix, csv.Error), self._opened() as file:
            file.seek(begin)
            for values in csv.reader(lines(file), strict=True, delimiter=self.delimiter):
                if not self.header:
                    self.header = [name.strip() for name in values]
                    while self.header and not self.header[-1]:  # columns that Excel formats, without a name
                        self.header.pop()
                    if len(values) > 1 and not self.header[0]:
                        self.header[0] = INDEX_COLUMN
                    if values and (not all(self.header) or len(set(self.header)) < len(self.header)):
                        raise UserError(
                            f"{self.path}: its first line names the columns, each once; it is {values!r:.80}"
                        )
                elif values:
                    yield begin, os.pread(file.fileno(), end - begin, begin)
                begin = end


def _from_utf16(path: Path) -> IO[bytes] | None:
    """A UTF-16 text as UTF-8 in a temporary file, which vanishes with this process; None where it is not UTF-16."""
    with path.open("rb") as file:
        if file.read(2) not in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            return None
        file.seek(0)
        base_dir().mkdir(parents=True, exist_ok=True)
        converted = tempfile.TemporaryFile(dir=base_dir())  # noqa: SIM115 (lives as long as its reader)
        decoder = codecs.getincrementaldecoder("utf-16")()
        with damage_in_one_line(path, "UTF-16 text", UnicodeDecodeError):
            while chunk := file.read(COPY_BYTES):
                converted.write(decoder.decode(chunk).encode("utf-8"))
            converted.write(decoder.decode(b"", final=True).encode("utf-8"))
    converted.seek(0)
    return converted


def _unpack(path: Path) -> IO[bytes]:
    """The text of a .gz in a temporary file, which vanishes with this process.

    gzip can only be read forwards from its beginning, and training reads blocks in shuffled order.
    Raises UserError: when the file is damaged or a bomb.
    """
    base_dir().mkdir(parents=True, exist_ok=True)
    unpacked = tempfile.TemporaryFile(dir=base_dir())  # noqa: SIM115 (lives as long as its reader)
    size = 0
    damage = damage_in_one_line(path, "gzip file", gzip.BadGzipFile, EOFError, zlib.error)
    with damage, path.open("rb") as packed, gzip.GzipFile(fileobj=packed) as text:
        while chunk := text.read(COPY_BYTES):
            size += len(chunk)
            refuse_bomb(path, size, packed.tell())
            unpacked.write(chunk)
    unpacked.seek(0)
    return unpacked
