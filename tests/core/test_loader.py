"""The loader: rows are a function of (seed, index) alone; nothing lost, nothing twice, resumed anywhere exactly.

Most tests use a corpus whose every token names its document and its place in it, so that rows can be taken
apart again and counted.
"""

import itertools
import random
import threading
from collections import Counter

import numpy as np
import pytest
import torch
from tiny import cpu_device

from nanochat import loader as loading
from nanochat.ground.cli import UserError
from nanochat.ground.corpus import Part, WeightedCorpora
from nanochat.loader import Loader, LoaderState

BEGIN = 0
LONGEST = 100_000  # tokens of a document


class Numbered:
    """A tokenizer for tests: the text "3 5" becomes the begin token and 5 tokens of document 3."""

    def get_bos_token_id(self):
        return BEGIN

    def encode_batch(self, texts, prepend, num_threads=1):
        return [[prepend, *tokens_of(text)] for text in texts]


def tokens_of(text: str) -> range:
    document, length = map(int, text.split())
    return range((document + 1) * LONGEST, (document + 1) * LONGEST + length)


class Blocks:
    """A corpus in memory; `reads` are the numbers of the blocks read."""

    def __init__(self, blocks, name="blocks"):
        self.blocks, self.name, self.reads = blocks, name, []

    def block_count(self):
        return len(self.blocks)

    def read_block(self, index):
        self.reads.append(index)
        return self.blocks[index]


def corpus_of(lengths, documents_per_block=5, first=0) -> Blocks:
    texts = [f"{number} {length}" for number, length in enumerate(lengths, first)]
    return Blocks([texts[i : i + documents_per_block] for i in range(0, len(texts), documents_per_block)])


def random_lengths(count: int, longest: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(1, longest) for _ in range(count)]


def take(loader, batches: int):
    """The next batches, and the thread ended."""
    got = [batch for batch, _ in zip(loader, range(batches), strict=False)]
    loader.close()
    return got


def rows_of(batches) -> list[list[int]]:
    return [[int(row[0]), *target.tolist()] for b in batches for row, target in zip(b.inputs, b.targets, strict=True)]


def world_rows(corpus, row_tokens, world_size, batches, batch_rows=2, state=None, tokenizer=None, **options):
    """{index: row} of all ranks together, and each rank's last state."""
    rows, states = {}, []
    for rank in range(world_size):
        first = state.row if state else 0
        loader = Loader(
            corpus, tokenizer or Numbered(), batch_rows, row_tokens,
            rank=rank, world_size=world_size, state=state, **options,
        )  # fmt: skip
        got = take(loader, batches)
        begin = next(i for i in itertools.count(first) if i % world_size == rank)
        rows |= {begin + world_size * n: row for n, row in enumerate(rows_of(got))}
        states.append(got[-1].state)
    return rows, states


def through_tensors(states) -> LoaderState:
    return LoaderState.merge([state.to_tensors() for state in states])


def pieces_of(row) -> list[list[int]]:
    """The documents and parts of documents in a row, without their begin tokens."""
    starts = [i for i, token in enumerate(row) if token == BEGIN] + [len(row)]
    return [row[a + 1 : b] for a, b in itertools.pairwise(starts)]


def count(rows) -> Counter:
    return Counter(int(token) for row in rows for token in row if token != BEGIN)


def count_left(state) -> Counter:
    # The first place of a document is the begin token's, whatever is in it.
    return count(document[1:] for at in state.shards.values() for document in at.waiting)


def count_dealt(corpus, state) -> Counter:
    """The tokens that the shards have read, computed from the shuffled epochs and the shards' positions."""
    blocks = corpus.block_count()
    epochs = 1 + max(at.positions[0].block for at in state.shards.values()) * state.shard_count // blocks
    order = np.concatenate([np.random.default_rng((0, epoch)).permutation(blocks) for epoch in range(epochs + 1)])
    dealt = Counter()
    for shard, at in state.shards.items():
        mine = [corpus.blocks[block] for block in order[shard :: state.shard_count][: at.positions[0].block + 1]]
        texts = [text for block in mine[:-1] for text in block] + mine[-1][: at.positions[0].document]
        dealt.update(token for text in texts for token in tokens_of(text))
    return dealt


# ---------------------------------------------------------------------- rows


@pytest.mark.parametrize("longest", [8, 40, 400], ids=["short", "as long as a row", "far longer than a row"])
def test_rows_are_full_and_hold_every_token_once(longest):
    corpus = corpus_of(random_lengths(3000, longest))
    batches = take(Loader(corpus, Numbered(), 3, 31), 60)
    rows = rows_of(batches)
    assert all(len(row) == 32 and row[0] == BEGIN for row in rows)
    for b in batches:
        assert b.inputs.shape == b.targets.shape == (3, 31)
        assert b.inputs.dtype == torch.long
        assert torch.equal(b.inputs[:, 1:], b.targets[:, :-1])

    seen, left = count(rows), count_left(batches[-1].state)
    assert max(seen.values()) == 1
    assert seen + left == count_dealt(corpus, batches[-1].state)

    # A piece is a run of one document; the parts of a cut document follow each other in its shard.
    reached: dict[int, int] = {}
    for row in rows:
        for piece in pieces_of(row):
            if piece:
                assert piece == list(range(piece[0], piece[0] + len(piece)))
                document, place = divmod(piece[0], LONGEST)
                assert place == reached.get(document, 0)
                reached[document] = place + len(piece)


def test_documents_end_where_the_next_begins():
    corpus = corpus_of(random_lengths(300, 20))
    whole = take(Loader(corpus, Numbered(), 3, 31), 5)
    for batch, plain in zip(take(Loader(corpus, Numbered(), 3, 31, document_mask=True), 5), whole, strict=True):
        assert plain.segments is None and torch.equal(batch.inputs, plain.inputs)
        inputs, targets, segments = batch.to(cpu_device())
        assert torch.equal(targets, plain.targets)
        begins = (inputs.flatten() == BEGIN).nonzero().flatten().tolist()
        assert len(begins) > 3 and segments.ends == [*begins[1:], inputs.numel()]


def test_a_finite_corpus_gives_each_document_once_an_epoch():
    corpus = corpus_of(random_lengths(400, 25), documents_per_block=10)
    every_token = {token for block in corpus.blocks for text in block for token in tokens_of(text)}
    batches = take(Loader(corpus, Numbered(), 8, 15), 200)
    dealt = count_dealt(corpus, batches[-1].state)
    assert count(rows_of(batches)) + count_left(batches[-1].state) == dealt
    assert set(dealt) == every_token
    assert batches[-1].epochs[0] >= 4
    assert min(dealt.values()) >= batches[-1].epochs[0]
    assert max(dealt.values()) <= batches[-1].epochs[0] + 2  # some shards are ahead of others


def test_the_longest_document_that_fits_is_taken():
    """Replays every shard with nothing but lengths: ties may go either way, the fit may not."""
    corpus = corpus_of(random_lengths(4000, 60), documents_per_block=7)
    rows = rows_of(take(Loader(corpus, Numbered(), 8, 40), 40))
    order = np.random.default_rng((0, 0)).permutation(corpus.block_count())
    cuts = 0
    for shard in range(loading.CANONICAL_SHARDS):
        blocks = iter(order[shard :: loading.CANONICAL_SHARDS])
        waiting: list[int] = []  # lengths with the begin token
        for row in rows[shard :: loading.CANONICAL_SHARDS]:
            room = len(row)
            for piece in pieces_of(row):
                # A block has fewer than loading.TOKENIZE_DOCUMENTS.
                while len(waiting) < loading.BUFFER_DOCUMENTS and sum(waiting) < loading.BUFFER_ROWS * len(row):
                    waiting += [1 + len(tokens_of(text)) for text in corpus.blocks[next(blocks)]]
                length = 1 + len(piece)
                fitting = [one for one in waiting if one <= room]
                if fitting:
                    assert length == max(fitting)
                    waiting.remove(length)
                else:
                    assert length == room
                    longest = max(waiting)
                    waiting.remove(longest)
                    waiting.append(1 + longest - length)  # the rest, with a begin token of its own
                    cuts += 1
                room -= length
            assert room == 0
    assert 0 < cuts < len(rows)  # best fit leaves few rows that need a cut


# ---------------------------------------------------------------------- world sizes


def test_a_long_document_is_not_copied_for_each_row():
    document = np.arange(BEGIN, 100, dtype=np.int32)
    waiting = [document]
    taken = [loading.take_best_fit(waiting, room, BEGIN) for room in (40, 1, 30)]
    assert [one.tolist() for one in taken] == [[*range(40)], [BEGIN], [BEGIN, *range(40, 69)]]
    assert np.shares_memory(waiting[0], document) and document.tolist() == [*range(100)]
    assert loading.take_best_fit(waiting, 99, BEGIN).tolist() == [BEGIN, *range(69, 100)] and not waiting


def test_more_ranks_than_canonical_shards_share_nothing():
    corpus = corpus_of(random_lengths(3000, 20))
    rows, states = world_rows(corpus, 15, 12, 2)
    assert all(state.shard_count == 24 for state in states)
    assert sorted(shard for state in states for shard in state.shards) == list(range(24))
    assert max(Counter(t for row in rows.values() for t in row if t != BEGIN).values()) == 1


# ---------------------------------------------------------------------- resume


def test_resume_at_any_batch_is_straight_through():
    corpus = corpus_of(random_lengths(300, 90), documents_per_block=40)  # stops in the middle of blocks
    assert loading.TOKENIZE_DOCUMENTS < 40
    straight = take(Loader(corpus, Numbered(), 3, 31), 20)
    for stop in (1, 2, 3, 5, 8, 13, 19):
        state = through_tensors([straight[stop - 1].state])
        rest = take(Loader(corpus, Numbered(), 3, 31, state=state), 20 - stop)
        assert rows_of(rest) == rows_of(straight[stop:])
        assert [b.epochs[0] for b in rest] == [b.epochs[0] for b in straight[stop:]]
        assert rest[-1].state.to_tensors().keys() == straight[-1].state.to_tensors().keys()
        for name, tensor in straight[-1].state.to_tensors().items():
            assert torch.equal(tensor, rest[-1].state.to_tensors()[name])


@pytest.mark.parametrize(
    ("worlds", "batch_rows"), [((1, 1, 1), 2), ((1, 2, 1), 1), ((2, 1, 4), 3), ((4, 8, 1), 2), ((2, 2, 2), 3)]
)
def test_resume_twice_and_at_other_world_sizes(worlds, batch_rows):
    """Row numbers that no world size divides are among them."""
    corpus = corpus_of(random_lengths(500, 70))
    straight, _ = world_rows(corpus, 31, 1, 130, batch_rows=1)
    state, seen = None, {}
    for world_size in worlds:
        rows, states = world_rows(corpus, 31, world_size, 3, batch_rows, state)
        assert not seen.keys() & rows.keys()
        seen |= rows
        state = through_tensors(states)
        assert {s.row for s in states} == {len(seen)}
    assert sorted(seen) == list(range(len(seen)))
    assert seen == {i: straight[i] for i in seen}


def test_states_are_whole_and_of_a_world_size_that_divides_the_shards():
    state = LoaderState(5, {}, 0)
    assert LoaderState.merge([state.to_tensors()]) == state
    states = world_rows(corpus_of(random_lengths(500, 20)), 15, 2, 1)[1]
    with pytest.raises(AssertionError, match="missing"):
        through_tensors(states[:1])
    with pytest.raises(UserError, match="divides 8, not with 3"):
        Loader(corpus_of([3]), Numbered(), 1, 15, world_size=3, state=through_tensors(states))


# ---------------------------------------------------------------------- seeds


def test_another_seed_is_another_order():
    corpus = corpus_of(random_lengths(300, 20))
    first, again, other = (rows_of(take(Loader(corpus, Numbered(), 3, 31, seed=seed), 3)) for seed in (0, 0, 1))
    assert first == again != other


# ---------------------------------------------------------------------- mixtures

SHARES = {"short": (0.5, 8), "middle": (0.3, 60), "long": (0.2, 400)}  # weight, longest document


def mixture() -> WeightedCorpora:
    """Three corpora, of documents of different lengths, that end after different times."""
    parts = []
    for number, (name, (weight, longest)) in enumerate(SHARES.items()):
        lengths = random_lengths(40_000 // longest, longest, seed=number)
        parts.append(Part(name, corpus_of(lengths, 40, first=10_000 * number), weight))
    return WeightedCorpora("mixture", parts)


def test_shares_of_tokens_follow_the_weights():
    batches = take(Loader(mixture(), Numbered(), 8, 127), 60)
    for shard in batches[-1].state.shards.values():
        # A corpus is ahead of the one furthest behind by one document at most.
        progress = [at.tokens / weight for at, (weight, _) in zip(shard.positions, SHARES.values(), strict=True)]
        for ahead, (weight, longest) in zip(progress, SHARES.values(), strict=True):
            assert ahead - min(progress) <= longest / weight
    # So what is read has the shares, and the rows have all of it but what waits: 8 rows a shard, and a document.
    read = [sum(shard.positions[number].tokens for shard in batches[-1].state.shards.values()) for number in range(3)]
    assert [tokens / sum(read) for tokens in read] == pytest.approx([0.5, 0.3, 0.2], abs=0.01)
    assert 0 <= sum(read) - 60 * 8 * 128 <= 8 * (8 * 128 + 400)
    # The short one, of 0.5, has been read more often than the others.
    epochs = batches[-1].epochs
    assert epochs[0] >= 1 and epochs[0] > epochs[1] >= epochs[2]


# ---------------------------------------------------------------------- odd corpora


@pytest.mark.parametrize(
    "blocks",
    [
        [["0 3"]],
        [["0 100"]],
        [["0 3"], ["1 100"], ["2 1"]],
        [[], ["0 7"], [], ["1 40"]],
        [["0 7"], *[[]] * 20],
        [[], []] + [["0 7"]] + [[]] * 5,  # as many blocks as shards, one with text
    ],
    ids=["one short", "one long", "fewer than shards", "some empty", "most empty", "one of eight"],
)
def test_tiny_corpora_never_run_dry(blocks):
    corpus = Blocks(blocks)
    tokens = {token for block in blocks for text in block for token in tokens_of(text)}
    rows = rows_of(take(Loader(corpus, Numbered(), 8, 31), 40))
    assert all(len(row) == 32 and row[0] == BEGIN for row in rows)
    assert {token for row in rows for token in row} == tokens | {BEGIN}
    alone = {i: row for i, row in enumerate(rows)}
    together, _ = world_rows(corpus, 31, 2, 8)
    assert together == {i: alone[i] for i in together}


@pytest.mark.parametrize("batch_rows", [8, 1])
def test_a_text_too_small_to_fill_a_batch_is_reported_once(batch_rows, capsys):
    take(Loader(Blocks([["0 100"]], name="one.txt"), Numbered(), batch_rows, 31), 40)
    (line,) = capsys.readouterr().err.splitlines()
    assert "one.txt" in line
    assert "31 tokens" in line
    take(Loader(corpus_of(random_lengths(400, 25)), Numbered(), batch_rows, 31), 40)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("count", [3, None], ids=["finite", "endless"])
def test_a_corpus_without_text_is_one_error(count):
    corpus = Blocks([[]] * 3, name="nothing.txt")
    corpus.block_count = lambda: count
    corpus.read_block = lambda index: []
    loader = Loader(corpus, Numbered(), 1, 31)
    with pytest.raises(UserError, match=r"nothing\.txt"):
        next(loader)
    loader.close()


class Breaks(Blocks):
    def read_block(self, index):
        if len(self.reads) == 20:
            raise UserError("line 7 is not JSON")
        return super().read_block(index)


@pytest.mark.parametrize("step_batches", [1, 3, 9])
def test_an_error_of_the_corpus_comes_after_the_whole_steps_before_it(step_batches):
    errors: list[BaseException] = []
    blocks = corpus_of(random_lengths(2000, 30), 64).blocks
    whole = rows_of(take(Loader(Blocks(blocks), Numbered(), 2, 31), 400))
    loader = Loader(Breaks(blocks), Numbered(), 2, 31, step_batches=step_batches, on_error=errors.append)
    got = []
    while not errors:
        got += [next(loader) for _ in range(step_batches)]
    noticed = len(got)
    for _ in range(2):  # a second call does not hang
        with pytest.raises(UserError, match="line 7"):
            while True:
                got.append(next(loader))
    assert 2 < noticed <= len(got) < noticed + step_batches
    assert rows_of(got) == whole[: 2 * len(got)]
    assert len(errors) == 1
    loader.close()


# ---------------------------------------------------------------------- the thread


def loader_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("loader")}


def test_close_ends_the_thread():
    others = loader_threads()  # tests that failed have left them
    loader = Loader(corpus_of(random_lengths(500, 30)), Numbered(), 2, 31)
    assert loader_threads() == others  # nothing runs before the first batch
    next(loader)
    assert len(loader_threads() - others) <= 1
    for _ in range(2):
        loader.close()
        assert loader_threads() == others
    Loader(corpus_of([3]), Numbered(), 2, 31).close()  # never started
