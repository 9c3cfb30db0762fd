"""Text becomes rows of tokens: packed without padding, and the same rows at any number of ranks.

Five rules make training exact:

1. *Canonical shards.* Each epoch shuffles the blocks of a corpus and deals them out to a fixed number of shards. Shard
   s reads the blocks s, s + shards, s + 2 shards, ... and packs only their documents. Row i of the run is the next row
   of shard i mod shards. This rule does not mention ranks, so row i is a function of (seed, i).
2. *Ranks.* Rank r computes the rows i with i mod world_size = r. The world size divides the number of shards, so each
   shard belongs to one rank, and a rank reads and tokenizes only its own shards.
3. *Best fit.* A row takes the longest waiting document that still fits. When none fits, the row cuts the longest one,
   and the rest waits as another document. Every row begins with a begin token. Best fit cuts little, so most documents
   are read from their beginning; an epoch drops and repeats nothing.
4. *Weights.* With several corpora, a shard reads its next document from the corpus whose tokens, divided by its weight,
   are fewest. So no corpus is more than one document ahead of its share. Weights count tokens and not documents,
   because a corpus's effect on the model depends on the number of its tokens.
5. *Position.* The position of a shard has three parts: its next block in each corpus, its next document in that block,
   and the documents that wait. The last part matters, because these documents are read but in no row yet. A run resumes
   at the positions of all shards, at any world size that divides their number, and loses and repeats nothing.
"""

import bisect
import functools
import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from nanochat.attention import Segments
from nanochat.device import Device
from nanochat.ground.cli import UserError
from nanochat.ground.corpus import Corpus, WeightedCorpora, weighted_parts
from nanochat.ground.log import warn
from nanochat.tokenizer import Tokenizer

CANONICAL_SHARDS = 8  # world sizes of 1, 2, 4 and 8 divide it; any other world size gets a common multiple

# The documents of a shard that wait, so that best fit has a choice. More would fit better, but documents of a small
# corpus would wait for whole epochs.
BUFFER_ROWS = 8  # at most the tokens of 8 rows
BUFFER_DOCUMENTS = 64  # at most
TOKENIZE_DOCUMENTS = 32  # documents in one call of the tokenizer, whose threads share them
PREFETCH_BATCHES = 4  # micro-batches that are ready before the device needs them

Document = str | np.ndarray  # a text, or its int32 tokens


@dataclass
class Position:
    """Where a canonical shard is in one corpus."""

    block: int = 0  # the next one, counted within the shard
    document: int = 0  # the next one within the block
    tokens: int = 0  # tokens of all documents that the shard has read completely


@dataclass
class ShardState:
    """The position of a canonical shard."""

    positions: list[Position]  # in each corpus
    # Documents that are read but in no row yet, whole or cut: int32 tokens, shortest first. The first place of each is
    # the begin token's; in a cut document another token is there.
    waiting: list[np.ndarray] = field(default_factory=list)

    def copy(self) -> "ShardState":
        return ShardState([replace(position) for position in self.positions], list(self.waiting))


@dataclass(frozen=True)
class LoaderState:
    """The position of one rank's loader; after `merge`, of the loaders of all ranks."""

    row: int  # the next row of the run, over all ranks
    shards: dict[int, ShardState]
    shard_count: int  # number of shards of the run, over all ranks

    def to_tensors(self) -> dict[str, Tensor]:
        """Flat int32 and int64 tensors, for a checkpoint."""
        tensors = {"row": torch.tensor([self.row, self.shard_count])}
        for number, shard in self.shards.items():
            tokens = np.concatenate(shard.waiting) if shard.waiting else np.zeros(0, np.int32)
            places = [(position.block, position.document) for position in shard.positions]
            tensors[f"shard.{number}.position"] = torch.tensor(places).flatten()
            tensors[f"shard.{number}.read"] = torch.tensor([position.tokens for position in shard.positions])
            tensors[f"shard.{number}.lengths"] = torch.tensor([len(document) for document in shard.waiting])
            tensors[f"shard.{number}.tokens"] = torch.from_numpy(tokens)
        return tensors

    def expected_bytes(self) -> int:
        """What all shards take in a checkpoint, if as many tokens wait in each as in the fullest of this rank."""
        fullest = max(sum(map(len, shard.waiting)) for shard in self.shards.values())
        return fullest * np.dtype(np.int32).itemsize * self.shard_count

    @classmethod
    def merge(cls, shares: list[dict[str, Tensor]]) -> "LoaderState":
        """The whole state, from the tensors of every rank (`to_tensors`)."""
        row, shard_count = shares[0]["row"].tolist()
        shards = {}
        for tensors in shares:
            for key in tensors:
                if not key.endswith(".position"):
                    continue
                name = key.removesuffix(".position")  # "shard.<number>"
                number = int(name.removeprefix("shard."))
                places = tensors[key].view(-1, 2).tolist()
                read = tensors[f"{name}.read"].tolist()
                positions = [Position(block, at, count) for (block, at), count in zip(places, read, strict=True)]
                lengths = tensors[f"{name}.lengths"].numpy()
                tokens = tensors[f"{name}.tokens"].numpy()
                waiting = np.split(tokens, np.cumsum(lengths)[:-1]) if len(tokens) else []
                shards[number] = ShardState(positions, waiting)
        assert len(shards) == shard_count, "a rank's share of the loader's state is missing"
        return cls(row, shards, shard_count)


@dataclass(frozen=True)
class Batch:
    """One micro-batch of B rows of T tokens."""

    inputs: Tensor  # (B, T)
    targets: Tensor  # (B, T): the next token at each place; after a document it is the begin of the next one
    state: LoaderState  # the position after this batch
    epochs: list[int]  # finished passes over each corpus; 0 for a corpus that never ends
    segments: Segments | None = None  # the documents of the rows, where these do not attend to each other

    def to(self, device: Device) -> tuple[Tensor, Tensor, Segments | None]:
        """Inputs, targets and segments on the device, for `next_token_loss`."""
        segments = self.segments.to(device.to_device) if self.segments else None
        return device.to_device(self.inputs), device.to_device(self.targets), segments


class Loader:
    """Endless micro-batches for one rank. A thread tokenizes and packs them while the device computes.

    `on_error` is called once with an error of a later batch, while this step of `step_batches` batches is still whole:
    the run can stop on all ranks before one of them has no batch.
    Raises UserError: when `state` is from a run whose number of shards this world size does not divide.
    """

    def __init__(
        self,
        corpus: Corpus | WeightedCorpora,
        tokenizer: Tokenizer,
        batch_rows: int,
        row_tokens: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        workers: int = 1,
        state: LoaderState | None = None,
        document_mask: bool = False,
        step_batches: int = 0,
        on_error: Callable[[BaseException], None] | None = None,
    ):
        # The shards of this rank. With 2 ranks, rank 0 has the shards 0, 2, 4, 6 of 8, and rank 1 has the others. With
        # 4 ranks, rank 0 has 0 and 4. In both cases row 4 is the next row of shard 4: it does not depend on the ranks.
        # The number of shards belongs to the run. A resumed run keeps it, because another number gives other rows.
        shard_count = state.shard_count if state else math.lcm(CANONICAL_SHARDS, world_size)
        if shard_count % world_size != 0:
            raise UserError(
                f"this run reads its data in {shard_count} shards: resume it with a number of processes that "
                f"divides {shard_count}, not with {world_size}"
            )
        self._parts = weighted_parts(corpus)
        self._block_counts = [part.corpus.block_count() for part in self._parts]
        self._tokenizer = tokenizer
        self._begin = tokenizer.get_bos_token_id()
        self._seed = seed
        self._workers = workers
        self._shard_count = shard_count
        self._shards: dict[int, ShardState] = {}
        for number in range(rank, shard_count, world_size):
            beginning = ShardState([Position() for _ in self._parts])
            self._shards[number] = state.shards[number].copy() if state else beginning
        # By shard and corpus: the documents of the current block, and the tokens of the next documents, in order.
        self._documents: dict[tuple[int, int], Sequence[Document]] = {}
        self._tokenized: dict[tuple[int, int], deque[np.ndarray]] = {}
        self._world_size = world_size
        self._batch_rows = batch_rows
        self._row_tokens = row_tokens
        self._document_mask = document_mask

        # Row numbers count the rows of all ranks, and no rank has packed row `first` yet. The next row of this rank is
        # the smallest one from `first` on with row mod world_size = rank, that is `first` + `_offset`. A saved position
        # subtracts `_offset` again, so that all ranks store the same number.
        first = state.row if state else 0
        self._offset = (rank - first) % world_size
        self._row = first + self._offset
        self.start = self._state()  # the position before the first batch

        # The last rows of this rank, one of each of its shards: where two are alike, the text is too small.
        self._recent: deque[bytes] | None = deque(maxlen=max(batch_rows, len(self._shards)) - 1)
        self._step_batches = step_batches
        self._on_error = on_error
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self._ahead: deque[Future[Batch]] = deque()

    def __iter__(self) -> "Loader":
        return self

    def peek(self) -> Batch:
        """The batch that `next` will return."""
        # The thread starts with the first batch, so that an unused loader costs nothing.
        while len(self._ahead) <= self._step_batches + PREFETCH_BATCHES:
            self._ahead.append(self._thread.submit(self._next_batch))
        return self._ahead[0].result()

    def __next__(self) -> Batch:
        batch = self.peek()  # before popleft: a second call raises the same error again
        if self._on_error and (error := self._ahead[self._step_batches].exception()):
            self._on_error(error)
            self._on_error = None
        self._ahead.popleft()
        return batch

    def close(self) -> None:
        """End the thread and drop the batches made ahead, which no saved state counts."""
        self._thread.shutdown(cancel_futures=True)

    def _next_batch(self) -> Batch:
        # A row has one token more than a model reads: the last one is only a target.
        rows = np.empty((self._batch_rows, self._row_tokens + 1), dtype=np.int64)
        for row in rows:
            self._fill(row, self._row % self._shard_count)
            self._row += self._world_size
            self._look_for_repeats(row)
        # The position travels with the batch. The thread is some batches ahead: with its current position a resumed run
        # would skip them.
        state = self._state()

        # An epoch ends when the slowest shard has finished it.
        epochs = []
        for part, block_count in enumerate(self._block_counts):
            places = (shard.positions[part].block * self._shard_count + n for n, shard in self._shards.items())
            epochs.append(min(places) // block_count if block_count else 0)
        tokens = torch.from_numpy(rows)
        inputs = tokens[:, :-1].contiguous()
        segments = segments_of(inputs, self._begin) if self._document_mask else None
        return Batch(inputs, tokens[:, 1:].contiguous(), state, epochs, segments)

    def _state(self) -> LoaderState:
        positions = {number: shard.copy() for number, shard in self._shards.items()}
        return LoaderState(self._row - self._offset, positions, self._shard_count)

    def _look_for_repeats(self, row: np.ndarray) -> None:
        """Warn once when a row is also one of the rows just before it."""
        if self._recent is None:
            return
        content = row.tobytes()
        if content in self._recent:
            names = ", ".join(part.corpus.name for part in self._parts)
            warn(
                f"{names}: the same row of {self._row_tokens} tokens is more than once in a batch, because the text is "
                "short or repeats itself: use more text, more and shorter documents, or a smaller --max_seq_len"
            )
            self._recent = None
            return
        self._recent.append(content)

    def _fill(self, row: np.ndarray, number: int) -> None:
        """Fill a row (T + 1,) completely with the documents of shard `number`, by best fit."""
        used = 0
        while used < len(row):
            self._refill(number, BUFFER_ROWS * len(row))
            document = take_best_fit(self._shards[number].waiting, len(row) - used, self._begin)
            row[used : used + len(document)] = document
            used += len(document)

    def _refill(self, number: int, tokens: int) -> None:
        """Read documents of shard `number` until enough of them wait."""
        shard = self._shards[number]
        while len(shard.waiting) < BUFFER_DOCUMENTS and sum(map(len, shard.waiting)) < tokens:
            # Choose the corpus that lags its share the most. With weights of 0.7 and 0.3, documents of one length
            # come in the order a b a a b a a b a a, 7 of 10 from a, and again.
            progress = [at.tokens / part.weight for at, part in zip(shard.positions, self._parts, strict=True)]
            part = progress.index(min(progress))
            # A single corpus can take all that was tokenized together; a mixture chooses again after each document.
            ready = self._tokenize_ahead(number, part)
            taken = [ready.popleft() for _ in range(len(ready) if len(self._parts) == 1 else 1)]
            for document in taken:
                bisect.insort_right(shard.waiting, document, key=len)
                shard.positions[part].tokens += len(document)
            self._advance(number, part, len(taken))

    def _tokenize_ahead(self, number: int, part: int) -> deque[np.ndarray]:
        """The next documents of shard `number` in a corpus, one or more, as tokens."""
        key = (number, part)
        position = self._shards[number].positions[part]
        empty_blocks = 0
        while not self._tokenized.get(key):
            if key not in self._documents:
                self._documents[key] = self._read(part, number, position.block)
            block = self._documents[key]
            documents = block[position.document : position.document + TOKENIZE_DOCUMENTS]
            self._tokenized[key] = deque(tokenize(documents, self._tokenizer, self._workers))
            if not block:
                # A shard may meet many empty blocks in a row by chance, but not this many.
                empty_blocks += 1
                if empty_blocks > 50 * (self._block_counts[part] or 1000):
                    raise UserError(f"{self._parts[part].corpus.name}: every document is empty")
                self._advance(number, part, 0)
        return self._tokenized[key]

    def _advance(self, number: int, part: int, documents: int) -> None:
        """Move a position forward by some documents, and at the end of a block to the next block."""
        position = self._shards[number].positions[part]
        position.document += documents
        if position.document >= len(self._documents[number, part]):
            position.block += 1
            position.document = 0
            del self._documents[number, part]

    def _read(self, part: int, shard: int, block: int) -> Sequence[Document]:
        """The documents of the shard's block number `block` in a corpus."""
        # Deal the blocks out like cards: with 8 shards, shard 3 reads the blocks 3, 11, 19, ... of the shuffled order.
        # The index continues through the epochs: with 100 blocks, index 203 is place 3 of epoch 2.
        index = shard + block * self._shard_count
        block_count = self._block_counts[part]
        if block_count is not None:  # an endless corpus keeps its order
            epoch, place = divmod(index, block_count)
            index = int(_shuffled(self._seed, epoch, block_count)[place])
        return self._parts[part].corpus.read_block(index)


def segments_of(inputs: Tensor, bos: int) -> Segments:
    """The documents of pretraining rows (B, T); a begin token begins each document."""
    return Segments.from_numbers((inputs == bos).cumsum(dim=1))


def take_best_fit(waiting: list[np.ndarray], room: int, begin: int) -> np.ndarray:
    """Take the longest document that fits out of `waiting` (shortest first); where none fits, cut the longest.

    The document gets the token `begin` in the first place.
    """
    # A row of 10 places. Documents of 3, 5 and 12 tokens wait:
    #
    #     room 10   the longest that fits is 5          waiting  3, 12
    #     room  5   the longest that fits is 3          waiting  12
    #     room  2   none fits: cut 2 tokens off the 12  waiting  11, the other 10 with a begin token before them
    fitting = bisect.bisect_right(waiting, room, key=len)
    if fitting:
        document = waiting.pop(fitting - 1)
    else:
        document = waiting.pop()
        # The rest is a view: copied for every row, a document of 30 MB held up 40 batches of 8 rows for 16 s. It begins
        # with the last token that is taken, in the place of its begin token.
        bisect.insort_left(waiting, document[room - 1 :], key=len)
    taken = document[:room].copy()
    taken[0] = begin
    return taken


def tokenize(documents: Sequence[Document], tokenizer: Tokenizer, workers: int = 1) -> list[np.ndarray]:
    """Documents as int32 tokens, each with a begin token. A document of tokens has one already."""
    texts = [document for document in documents if isinstance(document, str)]
    encoded = iter(tokenizer.encode_batch(texts, prepend=tokenizer.get_bos_token_id(), num_threads=workers))
    # `encoded` keeps the order of the texts.
    return [np.array(next(encoded), np.int32) if isinstance(one, str) else one for one in documents]


@functools.lru_cache(16)
def _shuffled(seed: int, epoch: int, blocks: int) -> np.ndarray:
    """The order of the blocks in an epoch. It depends only on seed and epoch, so a resumed run finds it again."""
    return np.random.default_rng((seed, epoch)).permutation(blocks)
