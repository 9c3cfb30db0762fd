"""Bits per byte by hand, and the same however the text is cut into rows, batches and ranks."""

import itertools
import math

import pytest
import torch
from tiny import cpu_device, lively_model, run_ranks, tiny_config, tiny_tokenizer
from torch import Tensor

from nanochat.bpb import bits_per_byte, validation_rows
from nanochat.cross_entropy import IGNORE
from nanochat.device import Device
from nanochat.loader import BUFFER_DOCUMENTS, BUFFER_ROWS, Loader
from nanochat.tokenizer import Tokenizer

BLOCKS = [["the then", "从 an ox"], [], ["hat", "the 从从 theme", "x"]]  # the last block ends in the middle of nothing
ALL = 10**6


class Blocks:
    """A corpus of a few blocks, or of the same ones for ever."""

    name = "blocks"

    def __init__(self, endless: bool = False):
        self.endless, self.read = endless, 0

    def block_count(self) -> int | None:
        return None if self.endless else len(BLOCKS)

    def read_block(self, index: int) -> list[str]:
        self.read += 1
        return BLOCKS[index % len(BLOCKS)]


class Pairs:
    """Losses that a token and its predecessor decide, and a record of the pairs that were scored."""

    def __init__(self, vocab_size: int):
        self.table = torch.rand(vocab_size, vocab_size, generator=torch.Generator().manual_seed(0)) * 9
        self.scored: list[tuple[int, int]] = []
        self.shapes: set[tuple[int, ...]] = set()

    def __call__(self, tokens: Tensor, targets: Tensor, *, segments: None, reduction: str) -> Tensor:
        assert segments is None and reduction == "none"
        self.shapes.add(tuple(tokens.shape))
        pairs = torch.stack((tokens, targets), dim=-1)[targets != IGNORE]
        self.scored += [(first, second) for first, second in pairs.tolist()]
        return torch.where(targets == IGNORE, 0.0, self.table[tokens, targets.clamp(min=0)])


def stream(tokenizer: Tokenizer) -> list[int]:
    """All documents of BLOCKS, a begin token before each."""
    documents = [document for block in BLOCKS for document in block]
    return sum((tokenizer.encode(document, prepend="<|bos|>") for document in documents), [])


def weights(tokenizer: Tokenizer) -> Tensor:
    return torch.tensor(tokenizer.token_bytes())


def by_hand(rows: Tensor, tokenizer: Tokenizer) -> float:
    """Pairs over all rows: bits of all but the begin tokens, over the bytes of the whole text."""
    table = Pairs(tokenizer.vocab_size).table
    unpredicted = (tokenizer.get_bos_token_id(), IGNORE)
    pairs = [(a, b) for row in rows.tolist() for a, b in zip(row, row[1:], strict=False) if b not in unpredicted]
    nats = sum(table[a, b].item() for a, b in pairs)
    return nats / math.log(2) / sum(len(text.encode()) for block in BLOCKS for text in block)


# ---------------------------------------------------------------------- rows


@pytest.mark.parametrize("row_tokens", [1, 2, 5, 7, 100])
def test_rows_hold_each_token_once_and_none_begins_in_mid_document(row_tokens: int) -> None:
    tokenizer = tiny_tokenizer()
    begin = tokenizer.get_bos_token_id()
    rows = validation_rows(Blocks(), tokenizer, row_tokens, ALL)
    assert rows.dtype == torch.int64 and rows.size(1) == row_tokens + 1
    assert (rows[:, 0] == begin).all()
    tokens = rows.flatten().tolist()
    assert sorted(t for t in tokens if t not in (begin, IGNORE)) == sorted(t for t in stream(tokenizer) if t != begin)
    assert IGNORE not in rows[:-1] and rows[-1, 0] != IGNORE  # no row of filling alone
    fewer = validation_rows(Blocks(), tokenizer, row_tokens, 9)
    assert torch.equal(fewer, rows[: -(-9 // row_tokens)])


def test_rows_are_those_that_training_makes() -> None:
    """Of the same documents in the same order, a shard of the loader packs the same rows."""
    tokenizer = tiny_tokenizer()
    shards = 8

    class Texts(Blocks):
        """Every shard reads the same documents."""

        def read_block(self, index: int) -> list[str]:
            return [f"{'the ' * (n * 7 % 23)}{index // shards} {n}" for n in range(20)]

    class FirstShard(Texts):
        def read_block(self, index: int) -> list[str]:
            return super().read_block(index * shards)

    rows = validation_rows(FirstShard(endless=True), tokenizer, 32, 32 * 40)
    loader = Loader(Texts(endless=True), tokenizer, 1, 32)
    for number in range(40 * shards):
        batch = next(loader)
        if number % shards == 0:
            row = torch.cat((batch.inputs[0], batch.targets[0, -1:]))
            assert torch.equal(rows[number // shards], row)
    loader.close()


def test_an_endless_corpus_is_read_no_further_than_needed(tiny_tokenizer: Tokenizer) -> None:
    corpus = Blocks(endless=True)
    rows = validation_rows(corpus, tiny_tokenizer, 16, 80)
    assert rows.shape == (5, 17)
    assert not (rows == IGNORE).any()
    buffered = min(BUFFER_DOCUMENTS * 2, 17 * BUFFER_ROWS)  # in tokens; a document here has more than one
    assert corpus.read <= 3 * (80 + buffered) // len(stream(tiny_tokenizer)) + 3


def test_a_text_of_one_token_still_is_a_row(tiny_tokenizer: Tokenizer) -> None:
    class Empty(Blocks):
        def read_block(self, index: int) -> list[str]:
            return [""] if index == 0 else []

    rows = validation_rows(Empty(), tiny_tokenizer, 4, 100)
    assert rows.tolist() == [[tiny_tokenizer.get_bos_token_id(), *[IGNORE] * 4]]
    value = bits_per_byte(Pairs(300), rows, weights(tiny_tokenizer), 2, cpu_device())
    assert math.isnan(value)  # no byte to predict


# ---------------------------------------------------------------------- the number


def test_with_the_mask_each_document_is_read_by_itself() -> None:
    tokenizer = tiny_tokenizer()
    bos = tokenizer.get_bos_token_id()
    model = lively_model(tiny_config(vocab_size=tokenizer.vocab_size))
    rows = validation_rows(Blocks(), tokenizer, 11, ALL)
    nats = 0.0
    text_bytes = 0
    documents = 0
    for row in rows.tolist():
        starts = [place for place, token in enumerate(row) if token == bos]
        for begin, end in itertools.pairwise([*starts, len(row)]):
            # its last target is the next one's begin token, whose prediction does not count
            document = torch.tensor([[token for token in row[begin:end] if token != IGNORE]])
            documents += 1
            if document.size(1) > 1:
                nats += model(document[:, :-1], document[:, 1:]).item()
                text_bytes += int(weights(tokenizer)[document[0, 1:]].sum())
    assert documents > len(rows)
    masked = bits_per_byte(model, rows, weights(tokenizer), 2, cpu_device(), document_mask=True)
    assert masked == pytest.approx(nats / math.log(2) / text_bytes, rel=1e-5)
    assert masked != pytest.approx(bits_per_byte(model, rows, weights(tokenizer), 2, cpu_device()), rel=1e-4)


@pytest.mark.parametrize("batch_rows", [1, 2, 3, 50])
@pytest.mark.parametrize("row_tokens", [1, 3, 8, 200])
def test_batches_do_not_change_what_a_bigram_scores(row_tokens: int, batch_rows: int) -> None:
    tokenizer = tiny_tokenizer()
    model = Pairs(tokenizer.vocab_size)
    rows = validation_rows(Blocks(), tokenizer, row_tokens, ALL)
    value = bits_per_byte(model, rows, weights(tokenizer), batch_rows, cpu_device())
    assert value == pytest.approx(by_hand(rows, tokenizer), rel=1e-5)
    pairs = [(a, b) for row in rows.tolist() for a, b in zip(row, row[1:], strict=False) if b != IGNORE]
    assert sorted(model.scored) == sorted(pairs)  # each token once, after its own
    assert model.shapes == {(batch_rows, row_tokens)}, "a shape of its own for the last batch: compiled twice"


ROW_TOKENS = (5, 200)  # several rows; one row for two ranks


def score_on_a_rank(device: Device) -> list[tuple[float, list[tuple[int, int]]]]:
    tokenizer = tiny_tokenizer()
    found = []
    for row_tokens in ROW_TOKENS:
        model = Pairs(tokenizer.vocab_size)
        rows = validation_rows(Blocks(), tokenizer, row_tokens, ALL)
        found.append((bits_per_byte(model, rows, weights(tokenizer), 2, device), model.scored))
    return found


@pytest.mark.slow
def test_two_ranks_score_as_one_and_share_the_work() -> None:
    cases = zip(ROW_TOKENS, score_on_a_rank(cpu_device()), *run_ranks(score_on_a_rank), strict=True)
    for row_tokens, (alone, scored), (one, scored_of_one), (two, scored_of_two) in cases:
        assert one == two == pytest.approx(alone, rel=1e-6)
        assert sorted(scored_of_one + scored_of_two) == sorted(scored)
        assert bool(scored_of_two) == (row_tokens == 5)
