"""Text becomes rows of tokens: packed without padding, in the same order at any world size that divides the lanes.

A corpus is read as blocks. A fixed number of lanes deals them out: lane l takes the blocks l, l + lanes,
l + 2 lanes ... of an endless sequence of shuffled epochs, and packs their documents by itself. Row i of the
run comes from lane i mod lanes, and rank r computes the rows i with i mod world_size = r. So the rows are a
function of (seed, index) alone as long as the world size divides the lanes, and every rank tokenizes only
its own lanes. A lane's position and its leftovers are all the state there is.

Packing is best fit: the longest document that still fits goes into the row; when none does, the longest
one is cut, and its rest goes back as a document of its own. Every row begins with a begin token, and no
text is dropped or dealt out twice in an epoch.
"""

import bisect
import math
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from nanochat.shell.cli import UserError
from nanochat.tokenizer import Tokenizer

LANES = 8  # at least; more ranks than this get a multiple
BUFFER_ROWS = 8  # a lane keeps so many rows' worth of tokens to choose the best fit from: few, so that a small
BUFFER_DOCUMENTS = 64  # corpus does not wait in the buffers for whole epochs; and so many documents at most
TOKENIZE_DOCUMENTS = 32  # at once
PREFETCH = 4  # batches made ahead


Document = str | np.ndarray  # a text, or its int32 tokens


class Documents(Protocol):
    """What a loader reads: a `sources.Corpus`, or the same of documents that are tokens already."""

    name: str

    def block_count(self) -> int | None: ...

    def read_block(self, index: int) -> Sequence[Document]: ...


@dataclass(frozen=True)
class LaneState:
    """Where a lane stands: the next block of its own sequence, the next document in it, what is left over."""

    block: int
    document: int
    leftovers: tuple[np.ndarray, ...]  # int32 tokens of whole or cut documents, each with its begin token


@dataclass(frozen=True)
class LoaderState:
    """The next row of the run, and the lanes of one rank (or of all, when merged for a resume)."""

    row: int
    lanes: dict[int, LaneState]
    lane_count: int

    def to_tensors(self) -> dict[str, Tensor]:
        """Flat int32 and int64 tensors, for a checkpoint."""
        tensors = {"row": torch.tensor([self.row, self.lane_count])}
        for lane, state in self.lanes.items():
            tensors[f"lane.{lane}.position"] = torch.tensor([state.block, state.document])
            tensors[f"lane.{lane}.lengths"] = torch.tensor([len(d) for d in state.leftovers])
            tokens = np.concatenate(state.leftovers) if state.leftovers else np.zeros(0, np.int32)
            tensors[f"lane.{lane}.tokens"] = torch.from_numpy(tokens)
        return tensors

    @classmethod
    def merge(cls, shares: list[dict[str, Tensor]]) -> "LoaderState":
        """The whole state out of what `to_tensors` gave on every rank."""
        row, lane_count = (int(x) for x in shares[0]["row"])
        lanes = {}
        for tensors in shares:
            for lane in (int(key.split(".")[1]) for key in tensors if key.endswith(".position")):
                block, document = (int(x) for x in tensors[f"lane.{lane}.position"])
                ends = np.cumsum(tensors[f"lane.{lane}.lengths"].numpy())[:-1]
                tokens = tensors[f"lane.{lane}.tokens"].numpy()
                leftovers = tuple(np.split(tokens, ends)) if len(tokens) else ()
                lanes[lane] = LaneState(block, document, leftovers)
        assert len(lanes) == lane_count, "a rank's share of the loader's state is missing"
        return cls(row, lanes, lane_count)


@dataclass(frozen=True)
class Batch:
    """One micro-batch of B rows of T tokens, and the loader's state behind it."""

    inputs: Tensor  # (B, T)
    targets: Tensor  # (B, T): the inputs moved on by one
    state: LoaderState
    epoch: int  # finished passes over the corpus; 0 for one that never ends


class Loader:
    """Endless micro-batches for one rank, tokenized and packed ahead of time by a thread.

    Raises UserError: when `state` comes from a run whose lanes this world size does not divide.
    """

    def __init__(
        self,
        corpus: Documents,
        tokenizer: Tokenizer,
        batch_rows: int,
        row_tokens: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        workers: int = 1,
        state: LoaderState | None = None,
    ):
        count = state.lane_count if state else math.lcm(LANES, world_size)
        if count % world_size:
            raise UserError(
                f"this run's data are dealt out over {count} lanes: resume it with a number of processes that "
                f"divides {count}, not with {world_size}"
            )
        source = _Source(corpus, tokenizer, seed, workers, count)
        self._lanes = {lane: _Lane(source, lane, state) for lane in range(rank, count, world_size)}
        self._lane_count, self._stride, self._source = count, world_size, source
        first = state.row if state else 0
        self._offset = (rank - first) % world_size  # of this rank's rows behind the first of all ranks
        self._row = first + self._offset  # this rank's next row
        self._batch_rows, self._row_tokens = batch_rows, row_tokens
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(PREFETCH)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Batch:
        if self._thread is None:
            self._thread = threading.Thread(target=self._produce, name="loader", daemon=True)
            self._thread.start()
        item = self._queue.get()
        if isinstance(item, BaseException):
            self._queue.put(item)  # the thread has ended: whoever asks again is told again
            raise item
        return item

    def close(self) -> None:
        """End the thread; batches made ahead are dropped."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _produce(self) -> None:
        item: Batch | BaseException | None = None
        while not self._stop.is_set() and not isinstance(item, BaseException):
            try:
                item = self._next_batch()
            except BaseException as error:  # handed over: the consumer raises it
                item = error
            while not self._stop.is_set():
                try:
                    self._queue.put(item, timeout=0.2)
                    break
                except queue.Full:
                    continue

    def _next_batch(self) -> Batch:
        rows = np.empty((self._batch_rows, self._row_tokens + 1), dtype=np.int64)
        for row in rows:
            self._lanes[self._row % self._lane_count].fill(row)
            self._row += self._stride
        tokens = torch.from_numpy(rows)
        states = {number: lane.state() for number, lane in self._lanes.items()}
        state = LoaderState(self._row - self._offset, states, self._lane_count)
        blocks = self._source.block_count
        passed = min(lane.block * self._lane_count + number for number, lane in self._lanes.items())
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), state, passed // blocks if blocks else 0)


def tokenize(documents: Sequence[Document], tokenizer: Tokenizer, workers: int = 1) -> list[np.ndarray]:
    """Documents as int32 tokens, each with its begin token; a document of tokens has one already."""
    texts = [document for document in documents if isinstance(document, str)]
    ids = iter(tokenizer.encode(texts, prepend=tokenizer.get_bos_token_id(), num_threads=workers))
    return [np.array(next(ids), dtype=np.int32) if isinstance(d, str) else d for d in documents]


class _Source:
    """What the lanes share: the corpus in its shuffled order, and the tokenizer."""

    def __init__(self, corpus: Documents, tokenizer: Tokenizer, seed: int, workers: int, lane_count: int):
        self.corpus, self.tokenizer, self.seed, self.workers, self.lane_count = (
            corpus,
            tokenizer,
            seed,
            workers,
            lane_count,
        )
        self.begin = tokenizer.get_bos_token_id()
        self.block_count = corpus.block_count()
        self._orders: dict[int, Any] = {}  # epoch -> permutation of the blocks

    def read(self, lane: int, block: int) -> Sequence[Document]:
        """The documents of the lane's block number `block`."""
        index = lane + block * self.lane_count
        if self.block_count is not None:
            epoch, place = divmod(index, self.block_count)
            if epoch not in self._orders:
                self._orders = {e: o for e, o in self._orders.items() if e >= epoch - 1}
                self._orders[epoch] = np.random.default_rng((self.seed, epoch)).permutation(self.block_count)
            index = int(self._orders[epoch][place])
        return self.corpus.read_block(index)

    def tokenize(self, documents: Sequence[Document]) -> list[np.ndarray]:
        return tokenize(documents, self.tokenizer, self.workers)


class _Lane:
    """One stream of blocks and the documents waiting to be packed, shortest first."""

    def __init__(self, source: _Source, number: int, state: LoaderState | None):
        mine = state.lanes[number] if state else LaneState(0, 0, ())
        self.source, self.number = source, number
        self.block, self.document = mine.block, mine.document
        self.documents: Sequence[Document] | None = None  # of the current block, once read
        self.waiting = list(mine.leftovers)

    def state(self) -> LaneState:
        return LaneState(self.block, self.document, tuple(self.waiting))

    def fill(self, row: np.ndarray) -> None:
        """Fill a row (T + 1,) to its last place."""
        used = 0
        while used < len(row):
            self._refill(BUFFER_ROWS * len(row))
            room = len(row) - used
            fits = bisect.bisect_right(self.waiting, room, key=len)
            if fits:
                document = self.waiting.pop(fits - 1)
            else:
                document = self.waiting.pop()
                rest = np.concatenate((document[:1], document[room:]))  # begins like any document
                bisect.insort_left(self.waiting, rest, key=len)
                document = document[:room]
            row[used : used + len(document)] = document
            used += len(document)

    def _refill(self, tokens: int) -> None:
        empty = 0
        while len(self.waiting) < BUFFER_DOCUMENTS and sum(map(len, self.waiting)) < tokens:
            if self.documents is None:
                self.documents = self.source.read(self.number, self.block)
            documents = self.documents[self.document : self.document + TOKENIZE_DOCUMENTS]
            for document in self.source.tokenize(documents):
                bisect.insort_right(self.waiting, document, key=len)
            self.document += len(documents)
            if self.document >= len(self.documents):
                empty = 0 if self.documents else empty + 1
                if empty > 50 * (self.source.block_count or 1000):  # a lane meets its blocks by chance
                    raise UserError(f"{self.source.corpus.name}: every document is empty")
                self.block, self.document, self.documents = self.block + 1, 0, None
