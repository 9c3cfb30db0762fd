"""Names and paths become addressable text: `open_corpus(data) -> (train, validation)`.

A corpus is a list of blocks; a block is a handful of documents, the same ones at every call and in any order of calls.
The loader addresses text by block, so that the order of training is a function of (seed, index) at any world size.

    files    .txt, .jsonl[.gz] with a `text` field, .parquet with a `text` column (files.py)
    names    demo, pydoc, the datasets of catalog.py, any `org/name` of a hub (hub.py)
"""

import bisect
import difflib
import hashlib
import itertools
import os
import re
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

from nanochat.data.catalog import DATASETS
from nanochat.data.files import BlockFile, ParquetFile, TextFile, list_files, open_file, text_cut
from nanochat.shell.cli import UserError

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".parquet")
NAMES = ("demo", "pydoc", *DATASETS)
ORG_AND_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class Corpus(Protocol):
    name: str

    def block_count(self) -> int | None:
        """None: without end."""
        ...

    def read_block(self, index: int) -> list[str]:
        """The documents of one block in order (sometimes none); fast for the next index, correct for any."""
        ...


def fingerprint(corpus: Corpus) -> str:
    """A sha256 that identifies a corpus: of its number of blocks and of eight of them, evenly spaced."""
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
    own validation split. `shards`: how many training shards of a hub dataset. Raises UserError: in one line.
    """
    if val_data is None:
        train, val = _open(data, "--data", False, hub, shards, seed)
    else:
        train, _ = _open(data, "--data", True, hub, shards, seed)
        _, val = _open(val_data, "--val_data", True, hub, 1, seed)
    for corpus, role in ((train, "training"), (val, "validation")):
        if corpus.block_count() == 0:
            raise UserError(f"{corpus.name}: no text for {role}: use more text, or a separate file with --val_data")
        if corpus.block_count() is not None:
            corpus.read_block(0)  # a file that cannot be read is found now, not after the first steps
    return train, val


def _open(data: str, flag: str, whole: bool, hub: str, shards: int | None, seed: int) -> tuple[Corpus, Corpus]:
    """(train, validation) of one name or path; with `whole`, both are all of a path's text."""
    if not data:
        raise UserError(f"{flag} is empty: name a file, a folder, or one of {', '.join(NAMES)}")
    if data == "demo":
        return DemoCorpus("train", seed), DemoCorpus("val", seed)
    if data == "pydoc":
        return PydocCorpus("train"), PydocCorpus("val")
    path = Path(data).expanduser()
    if data not in NAMES and path.exists():
        return _open_files(data, list_files(path, SUFFIXES, recursive=True, flag=flag), "text", whole)
    is_hub_name = ORG_AND_NAME.fullmatch(data) and not data.lower().endswith(SUFFIXES)
    if data not in NAMES and not is_hub_name:
        near = difflib.get_close_matches(data, NAMES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"{flag} {data}: no such file or folder; {hint}the names are {', '.join(NAMES)}")
    from nanochat.data import hub as hubs  # runs on local text do without it

    column = "text"
    try:
        files = hubs.fetch(data, hub, shards)
    except UserError as error:
        lead = f"{flag} {data} is not a file or folder here; as a hub dataset, " if is_hub_name else ""
        raise UserError(f"{lead}{error}") from error
    return _open_files(data, files, column, False)


def _open_files(name: str, paths: list[Path], column: str, whole: bool) -> tuple[Corpus, Corpus]:
    if whole:
        corpus = FileCorpus(name, [open_file(path, [column]) for path in paths], column)
        return corpus, corpus
    if len(paths) > 1:
        files = [open_file(path, [column]) for path in paths]
        val_name = f"{name} ({paths[-1].name})"
        return FileCorpus(name, files[:-1], column), FileCorpus(val_name, files[-1:], column)
    # A single file: its last 10% are validation. It is opened twice, so that both keep their own place in it.
    path = paths[0]
    val_name = f"{name} (last 10%)"
    if path.name.lower().endswith(".txt"):
        cut = text_cut(path)
        return FileCorpus(name, [TextFile(path, stop=cut)]), FileCorpus(val_name, [TextFile(path, start=cut)])
    train, val = open_file(path, [column]), open_file(path, [column])
    cut = min(len(train) * 9 // 10, len(train) - 1)
    return FileCorpus(name, [train], column, high=cut), FileCorpus(val_name, [val], column, low=cut)


class FileCorpus:
    """The documents of several files in order, or documents `low` to `high` of a single file.

    `column` names the field of a .jsonl or the column of a .parquet that holds the text.
    """

    def __init__(self, name: str, files: list[BlockFile], column: str = "text", low: int = 0, high: int | None = None):
        assert len(files) == 1 or (low == 0 and high is None)
        self.name = name
        self.files = files
        self.column = column
        self.low = low
        self.high = len(files[0]) if high is None else high
        for file in files:
            if isinstance(file, ParquetFile):
                _require_text_column(file, column)
        if len(files) == 1:
            self.block_ranges = [_blocks_between(files[0], low, self.high)]
        else:
            self.block_ranges = [range(len(file.starts) - 1) for file in files]
        self.ends = list(itertools.accumulate(len(blocks) for blocks in self.block_ranges))  # of each file, in blocks

    def block_count(self) -> int:
        return self.ends[-1]

    def read_block(self, index: int) -> list[str]:
        if not 0 <= index < self.ends[-1]:
            raise IndexError(f"block {index} of {self.ends[-1]}")
        which = bisect.bisect_right(self.ends, index)
        file = self.files[which]
        blocks = self.block_ranges[which]
        block = blocks[index - self.ends[which] + len(blocks)]
        first_row = int(file.starts[block])
        rows = file.read(block)
        documents = [self._text(file, first_row + place, row) for place, row in enumerate(rows)]
        if len(self.files) == 1:
            documents = documents[max(self.low - first_row, 0) : self.high - first_row]
        return [document for document in documents if document]

    def _text(self, file: BlockFile, number: int, row: Any) -> str:
        """The text of one row. Raises UserError: when it has none."""
        if isinstance(file, TextFile):
            return row
        text = row.get(self.column) if isinstance(row, dict) else None
        if text is None and isinstance(file, ParquetFile):
            return ""
        if not isinstance(text, str):
            fields = f"its fields are {', '.join(row) or 'none'}" if isinstance(row, dict) else "it is not an object"
            raise UserError(f'{file.where(number)} has no "{self.column}" string: {fields}')
        return text if text.isascii() else text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def _blocks_between(file: BlockFile, low: int, high: int) -> range:
    """The blocks that hold rows `low` to `high` of a file."""
    if high <= low:
        return range(0)
    return range(file.block_of(low), file.block_of(high - 1) + 1)


def _require_text_column(file: ParquetFile, column: str) -> None:
    import pyarrow

    kind = file.schema.field(column).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise UserError(f"{file.path}: column {column!r} holds {kind}, not text")


class DemoCorpus:
    """Stories without end, written by the grammar of demo/ as they are read."""

    def __init__(self, split: Literal["train", "val"], seed: int):
        from nanochat.demo import corpus as demo

        self.name = "demo"
        self.split: Literal["train", "val"] = split
        self.seed = seed
        self.make_block = demo.block

    def block_count(self) -> None:
        return None

    def read_block(self, index: int) -> list[str]:
        return self.make_block(index, self.split, self.seed)


class PydocCorpus:
    """The documentation of the running Python, one document a module or topic; every tenth is validation."""

    def __init__(self, split: Literal["train", "val"]):
        import pydoc_data.topics

        root = Path(sysconfig.get_path("stdlib"))
        skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
        files: list[Path] = []
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if name not in skip]
            for name in names:
                file = Path(folder, name)
                if name.endswith((".py", ".rst", ".txt")) and file.stat().st_size > 200:  # not an empty __init__.py
                    files.append(file.relative_to(root))
        files.sort(key=Path.as_posix)
        if not files:
            raise UserError(f"--data pydoc: this Python keeps no readable standard library at {root}; try --data demo")
        self.name = "pydoc"
        self.root = root
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
            if doc:
                heading += f"\n{textwrap.indent(doc, '    ')}"
            parts.append(textwrap.indent(heading, indent))
            if isinstance(child, ast.ClassDef):
                describe(child, indent + "    ")

    describe(tree, "")
    return "\n\n".join(parts) + "\n"
