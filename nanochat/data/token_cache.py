"""Tokens on the disk: a second epoch, and a second run on the same files, never tokenize again.

    NANOCHAT_BASE_DIR/tokens/<key>/about.json      a description, for human readers
                                   <block>.tokens  the tokens of one block, memory-mapped when they are read

The key is a hash of everything on which the tokens depend: the tokenizer's fingerprint, the rows that are read, and
the names, sizes, modification times and a sample of the text of the files. Another tokenizer or changed files use
another folder. Only an edit outside the sample that keeps a file's size and time goes unnoticed. Any folder may be
deleted at any time. A block is written when all of it is tokenized, as a new file that is then renamed: several
processes may write the same block, and a kill leaves no half block. A checksum finds a damaged block, which is
tokenized again.

All folders together stay within a size limit, including the folders of other runs and of older files. When they reach
it, nothing is deleted and nothing more is written.

Only files are cached: `demo` never ends, and `pydoc` is small.
"""

import contextlib
import hashlib
import json
import os
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from nanochat.cli import UserError
from nanochat.collectives import gather_values
from nanochat.corpus import Corpus, FileCorpus, WeightedCorpora, fingerprint
from nanochat.device import Device
from nanochat.loader import Document, tokenize
from nanochat.log import warn
from nanochat.paths import base_dir
from nanochat.screen import track
from nanochat.tokenizer import Tokenizer

FORMAT = 1
SUFFIX = ".tokens"
UNFINISHED = ".tmp"
UNFINISHED_SECONDS = 3600  # an older unfinished file belongs to a process that was killed
RECOUNT_BYTES = 64 << 20  # a process counts the bytes of all processes again after writing this many


def cached(
    corpus: Corpus | WeightedCorpora, tokenizer: Tokenizer, gib: float, workers: int = 1
) -> Corpus | WeightedCorpora:
    """The corpus with the tokens of its files on the disk, unless all of them would exceed the limit in GiB.

    Each process may exceed it by `RECOUNT_BYTES`, because it counts the bytes of the others only now and then.

    With 0 GiB it is the corpus itself.
    """
    if isinstance(corpus, WeightedCorpora):
        parts = [replace(part, corpus=cached(part.corpus, tokenizer, gib, workers)) for part in corpus.parts]
        return WeightedCorpora(corpus.name, parts)
    if gib == 0 or not isinstance(corpus, FileCorpus):
        return corpus
    return CachedCorpus(corpus, tokenizer, base_dir() / "tokens", int(gib * 2**30), workers)


def count_tokens(corpus: Corpus | WeightedCorpora, tokenizer: Tokenizer, device: Device, workers: int = 1) -> int:
    """The tokens of a corpus, with a begin token for each document. Each rank counts some of the blocks, and a cached
    corpus writes what it tokenizes for the run that follows.

    Raises UserError: when the corpus has no end, or is a mixture by weight, of which a pass is not defined.
    """
    blocks = corpus.block_count()
    if isinstance(corpus, WeightedCorpora) or blocks is None:
        why = "is drawn by weight" if isinstance(corpus, WeightedCorpora) else "never ends"
        raise UserError(f"--num_epochs: --data {corpus.name} {why}, so it has no passes: set --num_iterations")
    total = 0
    for index in track(range(device.rank, blocks, device.world_size), "counting tokens"):
        block = corpus.read_block(index)
        total += sum(map(len, tokenize(block[0 : len(block)], tokenizer, workers)))
    return sum(gather_values(total, device))


class CachedCorpus:
    """A `FileCorpus` whose documents are tokens: from the disk, or tokenized and written there."""

    def __init__(self, corpus: FileCorpus, tokenizer: Tokenizer, root: Path, max_bytes: int, workers: int):
        self.name = corpus.name
        self._corpus = corpus
        self._tokenizer = tokenizer
        self._workers = workers
        self._root = root
        self._max_bytes = max_bytes
        self._room = 0  # bytes that may be written before the next count
        self._is_writing = True
        files = []
        for file in corpus.records.files:
            status = file.path.stat()
            files.append([file.path.name, status.st_size, status.st_mtime_ns])
        # Training reads all rows of a file with --val_data, and without it the first 90%: then the last block is cut.
        last_block = json.dumps(corpus.read_block(corpus.block_count() - 1))
        about = {
            "format": FORMAT, "tokenizer": tokenizer.fingerprint(), "files": files,
            "rows": [corpus.records.first, len(corpus.records)],
            "text": [fingerprint(corpus), hashlib.sha256(last_block.encode()).hexdigest()],
        }  # fmt: skip
        self.folder = root / hashlib.sha256(json.dumps(about).encode()).hexdigest()[:24]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"data": corpus.name, **about}, indent=1)  # the same files may have several names
            (self.folder / "about.json").write_text(text, encoding="utf-8")
        except OSError as error:
            self._stop_writing(f"{self.folder}: {error.strerror}")

    def block_count(self) -> int:
        return self._corpus.block_count()

    def read_block(self, index: int) -> Sequence[Document]:
        path = self.folder / f"{index}{SUFFIX}"
        documents = read(path)
        return _Block(self, self._corpus.read_block(index), path) if documents is None else documents

    def tokenize(self, texts: Sequence[Document]) -> list[np.ndarray]:
        return tokenize(texts, self._tokenizer, self._workers)

    def write(self, path: Path, documents: Sequence[np.ndarray]) -> None:
        """Write a block, if there is room for it."""
        if not self._is_writing:
            return
        body = np.concatenate([[len(documents)], [len(one) for one in documents], *documents]).astype(np.int32)
        if self._room < body.nbytes:
            self._room = min(self._max_bytes - self._bytes_on_disk(), body.nbytes + RECOUNT_BYTES)
        self._room -= body.nbytes
        if self._room < 0:
            full = f"full ({self._max_bytes / 2**30:g} GiB): delete what is old there, or raise --token_cache_gib"
            self._stop_writing(f"{self._root} is {full}")
            return
        # No two threads write one file, and a reader sees the whole of it or nothing.
        unfinished = path.with_name(f"{path.stem}.{os.getpid()}.{threading.get_ident()}{UNFINISHED}")
        try:
            unfinished.write_bytes(body.tobytes() + zlib.crc32(body.data).to_bytes(4, "little"))
            unfinished.replace(path)
        except OSError as error:  # the disk is full, or the folder was deleted
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            self._stop_writing(f"{self.folder}: {error.strerror}")

    def _bytes_on_disk(self) -> int:
        """The size of all folders. Removes the unfinished files of killed processes."""
        total = 0
        for folder, _, names in os.walk(self._root):
            for name in names:
                file = Path(folder, name)
                with contextlib.suppress(OSError):  # another process has deleted it
                    status = file.lstat()
                    if file.suffix == UNFINISHED and time.time() - status.st_mtime > UNFINISHED_SECONDS:
                        file.unlink()
                    else:
                        total += status.st_size
        return total

    def _stop_writing(self, reason: str) -> None:
        self._is_writing = False
        warn(f"{reason}; what is not on the disk by now is tokenized again in each epoch")


class _Block(Sequence[Document]):
    """A block that is not on the disk: its texts are tokenized as the loader takes them, then written together."""

    def __init__(self, corpus: CachedCorpus, texts: Sequence[Document], path: Path):
        self._corpus = corpus
        self._texts = texts
        self._path = path
        self._tokenized: list[np.ndarray] = []  # from the first one on, without a gap

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, places: slice) -> list[np.ndarray]:  # pyright: ignore[reportIncompatibleMethodOverride]
        documents = self._corpus.tokenize(self._texts[places])
        # A run that resumes in the middle of a block does not have its beginning: the next epoch writes it.
        if places.start == len(self._tokenized):
            self._tokenized += documents
            if len(self._tokenized) == len(self._texts):
                self._corpus.write(self._path, self._tokenized)
        return documents


def read(path: Path) -> list[np.ndarray] | None:
    """The documents of a block, as views of the file; None where it is missing or damaged."""
    # A file has the number of documents, their lengths, their tokens and a CRC-32 of all that, as int32.
    try:
        content = np.asarray(np.memmap(path, np.int32, "r"))
    except (OSError, ValueError):  # missing; empty, or no whole number of int32
        return None
    body, check = content[:-1], content[-1:]
    if len(body) == 0 or zlib.crc32(body.data).to_bytes(4, "little") != check.tobytes():
        return None
    count = int(body[0])
    ends = count + 1 + np.cumsum(body[1 : count + 1])
    return np.split(body, [count + 1, *ends])[1 : count + 1]
