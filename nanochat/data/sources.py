"""Names and paths become addressable text: `open_corpus(data) -> (train, validation)`.

A corpus is a row of blocks; a block is a handful of documents, the same ones at every call and in any
order of calls. The loader addresses text by block, so that the order of training is a function of
(seed, index) at any world size. Kept in memory: where each block begins. Read when asked for: its text.

    .txt        documents between lines `<|endoftext|>`, or else pieces of about 4 KiB: nothing lost, nothing twice
    .jsonl[.gz] one JSON object a line, its `text`; a .gz is quick forwards and starts over on a jump back
    .parquet    the `text` column; a block is a row group or an equal share of a large one
    names       demo, pydoc, the hub datasets of hub.py, any `org/name` of a hub
"""

import bisect
import difflib
import gzip
import hashlib
import itertools
import json
import mmap
import os
import re
import sysconfig
import textwrap
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from nanochat.data import hub as hubs
from nanochat.shell.cli import UserError
from nanochat.shell.log import warn

DOCUMENT_BYTES = 4096  # of a .txt without separators
LARGEST_DOCUMENT_BYTES = 1 << 20  # of a .txt with separators
LARGEST_GROUP_BYTES = 16 << 20  # of a parquet row group before it is split
MARK = b"<|endoftext|>"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".parquet")
NAMES = ("demo", "pydoc", *hubs.DATASETS)


class Corpus(Protocol):
    name: str

    def block_count(self) -> int | None:
        """None: without end."""
        ...

    def read_block(self, index: int) -> list[str]:
        """The documents of one block in order (now and then none); cheap for the next index, correct for any."""
        ...


def fingerprint(corpus: Corpus) -> str:
    """A sha256 by which to know a corpus again: of its number of blocks and of eight of them, evenly spaced."""
    count = corpus.block_count()
    digest = hashlib.sha256(str(count).encode())
    for index in sorted({i * (8 if count is None else count) // 8 for i in range(8)}):
        for document in corpus.read_block(index):
            digest.update(document.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


def read_texts(corpus: Corpus, max_chars: int) -> Iterator[str]:
    """The documents of a corpus in order, up to so many characters; the last one may be cut."""
    blocks = corpus.block_count()
    for index in itertools.count() if blocks is None else range(blocks):
        for document in corpus.read_block(index):
            yield document[:max_chars]
            max_chars -= len(document)
            if max_chars <= 0:
                return


def open_corpus(
    data: str, val_data: str | None = None, *, hub: str = "hf", shards: int | None = None, seed: int = 0
) -> tuple[Corpus, Corpus]:
    """Open --data (and --val_data) as (train, validation).

    Without `val_data` a folder's last file is validation, or the last 10% of a single file; a name has its
    own validation split. `shards`: how many train shards of a hub dataset. Raises UserError: in one line.
    """
    if val_data is None:
        train, val = _open(data, "--data", False, hub, shards, seed)
    else:
        train, _ = _open(data, "--data", True, hub, shards, seed)
        _, val = _open(val_data, "--val_data", True, hub, 1, seed)
    for corpus, role in ((train, "training"), (val, "validation")):
        if corpus.block_count() == 0:
            raise UserError(f"{corpus.name}: no text for {role}; give more of it, or a file of its own by --val_data")
        if corpus.block_count() is not None:
            corpus.read_block(0)  # a file that cannot be read is found now, not after the first steps
    return train, val


def _open(data: str, flag: str, whole: bool, hub: str, shards: int | None, seed: int) -> tuple[Corpus, Corpus]:
    """(train, validation) of one name or path; a path taken whole is both."""
    if not data:
        raise UserError(f"{flag} is empty: name a file, a folder, or one of {', '.join(NAMES)}")
    if data == "demo":
        return DemoCorpus("train", seed), DemoCorpus("val", seed)
    if data == "pydoc":
        return PydocCorpus("train"), PydocCorpus("val")
    path = Path(data).expanduser()
    if data not in NAMES and path.exists():
        return _open_files(data, _text_files(path, flag), "text", whole)
    org_and_name = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", data) and not data.lower().endswith(SUFFIXES)
    if data not in NAMES and not org_and_name:
        near = difflib.get_close_matches(data, NAMES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"{flag} {data}: no such file or folder; {hint}the names are {', '.join(NAMES)}")
    column = hubs.DATASETS[data].text_column if data in hubs.DATASETS else "text"
    try:
        files = hubs.fetch(data, hub, shards)
    except UserError as error:
        lead = f"{flag} {data} is no file or folder here; as a hub dataset, " if org_and_name else ""
        raise UserError(f"{lead}{error}") from error
    return _open_files(data, files, column, False)


def _text_files(path: Path, flag: str) -> list[Path]:
    if path.is_file():
        if not path.name.lower().endswith(SUFFIXES):
            raise UserError(f"{flag} {path}: unknown suffix {path.suffix!r}; known are {', '.join(SUFFIXES)}")
        return [path]
    files = [file for file in path.rglob("*") if file.name.lower().endswith(SUFFIXES) and file.is_file()]
    files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    if not files:
        raise UserError(f"{flag} {path}: no file in this folder ends in {', '.join(SUFFIXES)}")
    return sorted(files, key=lambda file: file.relative_to(path).as_posix())


def _open_files(name: str, paths: list[Path], column: str, whole: bool) -> tuple[Corpus, Corpus]:
    if len(paths) > 1 or whole:
        files = [_open_file(path, column) for path in paths]
        if whole:
            corpus = FileCorpus(name, files)
            return corpus, corpus
        return FileCorpus(name, files[:-1]), FileCorpus(f"{name} ({paths[-1].name})", files[-1:])
    path = paths[0]
    val_name = f"{name} (last 10%)"
    if path.name.lower().endswith(".txt"):
        cut = _text_cut(path)
        return FileCorpus(name, [TextFile(path, stop=cut)]), FileCorpus(val_name, [TextFile(path, start=cut)])
    # Opened twice: train and validation each keep their own place in the stream.
    train, val = _open_file(path, column), _open_file(path, column)
    cut = min(train.document_count * 9 // 10, train.document_count - 1)
    return FileCorpus(name, [train], high=cut), FileCorpus(val_name, [val], low=cut)


def _open_file(path: Path, column: str) -> "IndexedFile":
    name = path.name.lower()
    try:
        if name.endswith(".txt"):
            return TextFile(path)
        return ParquetFile(path, column) if name.endswith(".parquet") else JsonLinesFile(path)
    except PermissionError as error:
        raise UserError(f"{path}: no permission to read it") from error


class IndexedFile:
    """One file as blocks. `starts[b]` is the number of the first document of block b; the last entry ends them."""

    def __init__(self, path: Path, starts: Iterable[int]):
        self.path = path
        self.starts = np.fromiter(starts, dtype=np.int64)  # (blocks + 1,)

    @property
    def document_count(self) -> int:
        return int(self.starts[-1])

    def read(self, block: int) -> list[str]:
        raise NotImplementedError


class FileCorpus:
    """Files one after the other. Documents `low` to `high` of a single file make a split."""

    def __init__(self, name: str, files: list[Any], low: int = 0, high: int | None = None):
        assert len(files) == 1 or (low == 0 and high is None)
        self.name, self.files, self.low = name, files, low
        if len(files) == 1:
            self.high: int = files[0].document_count if high is None else high
            first = int(np.searchsorted(files[0].starts, low, side="right")) - 1
            last = int(np.searchsorted(files[0].starts, self.high, side="left"))
            self.ranges = [range(first, max(last, first) if self.high > low else first)]
        else:
            self.ranges = [range(len(file.starts) - 1) for file in files]
        self.ends = list(itertools.accumulate(len(blocks) for blocks in self.ranges))

    def block_count(self) -> int:
        return self.ends[-1]

    def read_block(self, index: int) -> list[str]:
        if not 0 <= index < self.ends[-1]:
            raise IndexError(f"block {index} of {self.ends[-1]}")
        which = bisect.bisect_right(self.ends, index)
        file, blocks = self.files[which], self.ranges[which]
        block = blocks[index - self.ends[which] + len(blocks)]
        documents = file.read(block)
        if len(self.files) == 1:
            start = int(file.starts[block])
            documents = documents[max(self.low - start, 0) : self.high - start]
        return [document for document in documents if document]


def _block_bytes(file_bytes: int) -> int:
    """Blocks small enough for a good shuffle of a small file, few enough for a small index of a large one."""
    return min(max(file_bytes // 4096, 6 * 1024), 1 << 20)


class TextFile(IndexedFile):
    """Bytes `start` to `stop` of a text file. Invalid UTF-8 is replaced, counted and reported once."""

    def __init__(self, path: Path, start: int = 0, stop: int | None = None):
        size = path.stat().st_size
        self.path, self.stop, self.marked = path, size if stop is None else stop, False
        begins, starts, invalid = [], [], 0
        filled, count, target = 0, 0, _block_bytes(size)
        if size:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
                    raise UserError(f"{path} is UTF-16: convert it, iconv -f utf-16 -t utf-8")
                first = max(start, 3 if data[:3] == BYTE_ORDER_MARK else 0)
                self.marked = _next_mark(data, 0, size)[0] < size
                for begin, end in _pieces(data, first, self.stop, self.stop, self.marked):
                    if not begins or filled >= target:
                        begins.append(begin)
                        starts.append(count)
                        filled = 0
                    filled, count = filled + end - begin, count + 1
                    invalid += _invalid(data[begin:end])
        if invalid:
            warn(f"{path}: {invalid} invalid UTF-8 sequences are read as \N{REPLACEMENT CHARACTER}")
        self.begins = np.array([*begins, self.stop], dtype=np.int64)  # (blocks + 1,) bytes
        super().__init__(path, [*starts, count])

    def read(self, block: int) -> list[str]:
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            spans = _pieces(data, int(self.begins[block]), int(self.begins[block + 1]), self.stop, self.marked)
            return [data[begin:end].decode("utf-8", "replace") for begin, end in spans]


def _invalid(piece: bytes) -> int:
    try:
        piece.decode("utf-8")
        return 0
    except UnicodeDecodeError:
        return piece.decode("utf-8", "replace").count("\ufffd") - piece.count("\ufffd".encode())


def _pieces(data: mmap.mmap, begin: int, until: int, stop: int, marked: bool) -> Iterator[tuple[int, int]]:
    """(begin, end) of the documents that begin before `until`; text and separators end at `stop`."""
    limit = LARGEST_DOCUMENT_BYTES if marked else DOCUMENT_BYTES
    while begin < until:
        mark, after_mark = _next_mark(data, begin, stop) if marked else (stop, stop)
        while begin < min(mark, until):
            end = _cut(data, begin, mark, limit)
            yield begin, end
            begin = end
        begin = after_mark


def _next_mark(data: mmap.mmap, begin: int, stop: int) -> tuple[int, int]:
    """Where the next line that is exactly the separator begins, and where the line after it does."""
    position = data.find(MARK, begin, stop)
    while position >= 0:
        end = position + len(MARK)
        end += data[end : end + 2] == b"\r\n"
        at_start = position == 0 or data[position - 1] == 10 or (position == 3 and data[:3] == BYTE_ORDER_MARK)
        if at_start and (end >= stop or data[end] == 10):
            return position, min(end + 1, stop)
        position = data.find(MARK, position + 1, stop)
    return stop, stop


def _cut(data: mmap.mmap, begin: int, end: int, limit: int) -> int:
    """The end of the piece at `begin`: after a blank line, else a line end, else between two characters."""
    if end - begin <= limit:
        return end
    window = data[begin : begin + limit]
    for line_ends in ((b"\n\n", b"\n\r\n"), (b"\n",)):
        length = max(window.rfind(line_end) + len(line_end) for line_end in line_ends)
        if length >= limit // 4:
            return begin + length
    return _character_start(data, begin + limit)


def _character_start(data: mmap.mmap, position: int) -> int:
    """`position`, or up to 3 bytes before it where a UTF-8 character would be torn."""
    for start in range(position, max(position - 4, -1), -1):
        if data[start] & 0xC0 != 0x80:
            return start
    return position


def _text_cut(path: Path) -> int:
    """Where the last 10% of a .txt begin: at the byte, or at the next separator when there is one."""
    size = path.stat().st_size
    if size < 2:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cut = _character_start(data, size * 9 // 10)
        after_mark = _next_mark(data, cut, size)[1]
        return after_mark if after_mark < size else cut


class JsonLinesFile(IndexedFile):
    """One JSON object a line with a `text`; blank lines do not count."""

    def __init__(self, path: Path):
        self.path, self.lock = path, threading.Lock()
        self.opener: Callable[..., Any] = gzip.open if path.name.lower().endswith(".gz") else open
        self.stream: Any = None  # kept open: the next block is then a plain read, also in a .gz
        begins, starts, numbers, offset, filled, rows = [], [], [], 0, 0, 0
        target = _block_bytes(path.stat().st_size)
        with self._no_damage(), self.opener(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    if not begins or filled >= target:
                        begins.append(offset)
                        starts.append(rows)
                        numbers.append(number)
                        filled = 0
                    rows, filled = rows + 1, filled + len(line)
                offset += len(line)
        self.begins = np.array([*begins, offset], dtype=np.int64)  # (blocks + 1,) bytes, unpacked
        self.numbers = np.array(numbers, dtype=np.int64)  # (blocks,) line numbers, for messages
        super().__init__(path, [*starts, rows])

    def read(self, block: int) -> list[str]:
        begin, end = int(self.begins[block]), int(self.begins[block + 1])
        with self.lock, self._no_damage():
            self.stream = self.stream or self.opener(self.path, "rb")
            self.stream.seek(begin)
            lines = self.stream.read(end - begin).split(b"\n")
        numbered = enumerate(lines, start=int(self.numbers[block]))
        return [self._text(line, number) for number, line in numbered if line.strip()]

    def _text(self, line: bytes, number: int) -> str:
        try:
            row = json.loads(line.removeprefix(BYTE_ORDER_MARK))
        except ValueError as error:
            raise UserError(f"{self.path} line {number} is not JSON: {error}") from error
        text = row.get("text") if isinstance(row, dict) else None
        if not isinstance(text, str):
            fields = f"its fields are {', '.join(row) or 'none'}" if isinstance(row, dict) else "it is no object"
            raise UserError(f'{self.path} line {number} has no "text" string: {fields}')
        return text if text.isascii() else text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")

    def _no_damage(self) -> "_NoDamage":
        return _NoDamage(self.path, "gzip file", (gzip.BadGzipFile, EOFError, zlib.error))


class ParquetFile(IndexedFile):
    """The text column of a parquet file."""

    def __init__(self, path: Path, column: str = "text"):
        import pyarrow
        import pyarrow.parquet

        self.path, self.column, self.lock = path, column, threading.Lock()
        self.damage = _NoDamage(path, "parquet file", (pyarrow.ArrowException, OSError))
        self.file: Any = None
        self.place: tuple[int, int] = (-1, 0)  # the row group being read, the row that comes next
        with self.damage, pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if column not in names:
                raise UserError(f"{path} has no column {column!r}: its columns are {', '.join(names)}")
            kind = file.schema_arrow.field(column).type
            if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                raise UserError(f"{path}: column {column!r} holds {kind}, not text")
            leaf = names.index(column) if len(file.schema.names) == len(names) else None  # None: nested columns
            self.spans: list[tuple[int, int, int]] = []  # of each block: row group, its first row there, rows
            for group in range(file.num_row_groups):
                about = file.metadata.row_group(group)
                size = about.total_byte_size if leaf is None else about.column(leaf).total_uncompressed_size
                wanted = min(-(-64 // file.num_row_groups), about.num_rows // 8)  # 64 blocks where rows suffice
                shares = max(-(-size // LARGEST_GROUP_BYTES), wanted, 1)
                step = max(-(-about.num_rows // shares), 1)
                for row in range(0, about.num_rows, step):
                    self.spans.append((group, row, min(step, about.num_rows - row)))
        super().__init__(path, itertools.accumulate((rows for _, _, rows in self.spans), initial=0))

    def read(self, block: int) -> list[str]:
        import pyarrow.parquet

        group, row, count = self.spans[block]
        with self.lock, self.damage:
            # Buffered, not pre-buffered: 12 MB in place of a whole column chunk (183 MB for one of 171 MB).
            self.file = self.file or pyarrow.parquet.ParquetFile(self.path, buffer_size=1 << 20, pre_buffer=False)
            if self.place[0] != group or self.place[1] > row:  # a jump: begin this row group anew
                batches = self.file.iter_batches(batch_size=1024, row_groups=[group], columns=[self.column])
                self.rows = (text for batch in batches for text in batch.column(0).to_pylist())
                self.place = (group, 0)
            for _ in itertools.islice(self.rows, row - self.place[1]):
                pass
            texts = list(itertools.islice(self.rows, count))
            self.place = (group, row + count)
        assert len(texts) == count
        return [text or "" for text in texts]


class _NoDamage:
    """Turns what a library raises on a damaged file into one line that names it."""

    def __init__(self, path: Path, kind: str, errors: tuple[type[Exception], ...]):
        self.path, self.kind, self.errors = path, kind, errors

    def __enter__(self) -> None: ...

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, self.errors) and not isinstance(error, (UserError, FileNotFoundError, PermissionError)):
            first_line = (str(error).splitlines() or [""])[0]
            raise UserError(f"{self.path} is a damaged {self.kind} ({first_line}): fetch or write it again") from error


class DemoCorpus:
    """Stories without end, made as they are read."""

    def __init__(self, split: Literal["train", "val"], seed: int):
        from nanochat.demo import corpus as demo

        self.name, self.seed, self.make = "demo", seed, demo.block
        self.split: Literal["train", "val"] = split

    def block_count(self) -> None:
        return None

    def read_block(self, index: int) -> list[str]:
        return self.make(index, self.split, self.seed)


class PydocCorpus:
    """The documentation of the running Python, one document a module or topic; every tenth is validation."""

    def __init__(self, split: Literal["train", "val"]):
        import pydoc_data.topics

        root = Path(sysconfig.get_path("stdlib"))
        skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
        files: list[Path] = []
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if name not in skip]
            files += [Path(folder, name) for name in names if name.endswith((".py", ".rst", ".txt"))]
        files = [file.relative_to(root) for file in files if file.stat().st_size > 200]  # not an empty __init__.py
        files.sort(key=Path.as_posix)
        if not files:
            raise UserError(f"--data pydoc: this Python keeps no readable standard library at {root}; try --data demo")
        self.name, self.root = "pydoc", root
        self.topics: dict[str, str] = pydoc_data.topics.topics
        items: list[Path | str] = [*files, *sorted(self.topics)]
        self.items = items[9::10] if split == "val" else [item for n, item in enumerate(items) if n % 10 != 9]

    def block_count(self) -> int:
        return len(self.items)

    def read_block(self, index: int) -> list[str]:
        item = self.items[index]
        if isinstance(item, str):
            return [self.topics[item]]
        source = (self.root / item).read_bytes()
        if item.suffix != ".py":
            return [source.decode("utf-8", "replace")]
        name = ".".join(item.with_suffix("").parts).removesuffix(".__init__")
        return [_module_document(name, source)]


def _module_document(name: str, source: bytes) -> str:
    """Docstrings and signatures of one module as readable text, from its syntax tree."""
    import ast

    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return f"module {name}\n"
    parts = [f"module {name}\n\n{ast.get_docstring(tree) or ''}".rstrip()]

    def describe(node: ast.AST, indent: str) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            doc = ast.get_docstring(child)
            if child.name.startswith("_") and not doc:
                continue
            if isinstance(child, ast.ClassDef):
                bases = ", ".join(ast.unparse(base) for base in child.bases)
                heading = f"class {child.name}({bases})" if bases else f"class {child.name}"
            else:
                heading = f"def {child.name}({ast.unparse(child.args)})"
            parts.append(textwrap.indent(heading + (f"\n{textwrap.indent(doc, '    ')}" if doc else ""), indent))
            if isinstance(child, ast.ClassDef):
                describe(child, indent + "    ")

    describe(tree, "")
    return "\n\n".join(parts) + "\n"
