"""Tokens on the disk: the rows are those without a cache, and never of other, damaged or half-written tokens."""

import json
import os
import random
import threading
from pathlib import Path

import numpy as np
import pytest
from test_loader import rows_of, take, through_tensors

from nanochat.corpus import Part, WeightedCorpora, open_corpus
from nanochat.data import token_cache
from nanochat.data.token_cache import CachedCorpus, cached, read
from nanochat.demo.writer import DemoCorpus
from nanochat.loader import Loader
from nanochat.tokenizer import Tokenizer

GIB = 1.0


class Counting(Tokenizer):
    """Byte by byte; it counts the texts that it encodes."""

    def __init__(self, more: tuple[bytes, ...] = ()):
        super().__init__([*(bytes([value]) for value in range(256)), *more])
        self.texts = 0

    def encode_batch(self, texts, prepend=None, num_threads=1):
        self.texts += len(texts)
        return super().encode_batch(texts, prepend, num_threads)


@pytest.fixture
def text(tmp_path, monkeypatch) -> Path:
    """13 blocks of 60 documents: more than the loader tokenizes at once."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    source = random.Random(0)
    lines = [json.dumps({"text": chr(97 + n % 26) * source.randrange(0, 180)}) for n in range(800)]
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(lines))
    return path


def opened(text: Path, tokenizer: Tokenizer, gib: float = GIB):
    return cached(open_corpus(str(text), str(text))[0], tokenizer, gib)


def batches(corpus, tokenizer, count=60, **options):
    return take(Loader(corpus, tokenizer, 8, 255, **options), count)


def test_rows_are_those_without_a_cache_and_the_second_run_tokenizes_nothing(text):
    first, second, plain = Counting(), Counting(), Counting()
    straight = batches(opened(text, plain, gib=0), plain)
    assert straight[-1].epochs[0] >= 1 and plain.texts > 800
    cold = batches(opened(text, first), first)
    warm = batches(opened(text, second), second)
    assert rows_of(straight) == rows_of(cold) == rows_of(warm)
    assert second.texts == 0 and 0 < first.texts < plain.texts  # the second epoch is read, too
    folders = [*(text.parent / "base/tokens").iterdir()]
    assert len(folders) == 1 and "texts.jsonl" in (folders[0] / "about.json").read_text()
    assert not [*folders[0].glob("*.tmp")]


def test_resumed_in_the_middle_of_a_block_with_a_part_of_the_cache_is_straight_through(text):
    tokenizer = Counting()
    straight = batches(opened(text, tokenizer, gib=0), tokenizer, 20)
    for stop in (1, 4, 9):
        batches(opened(text, tokenizer), tokenizer, stop)
        state = through_tensors([straight[stop - 1].state])
        rest = batches(opened(text, tokenizer), tokenizer, 20 - stop, state=state)
        assert rows_of(rest) == rows_of(straight[stop:])


def test_a_damaged_block_is_tokenized_and_written_again(text):
    tokenizer = Counting()
    whole = rows_of(batches(opened(text, tokenizer), tokenizer))
    blocks = sorted((text.parent / "base/tokens").glob("*/*.tokens"))
    contents = [block.read_bytes() for block in blocks]
    blocks[0].write_bytes(b"")
    blocks[1].write_bytes(contents[1][:-7])
    blocks[2].write_bytes(bytes(len(contents[2])))
    blocks[3].write_bytes(contents[3][:40] + bytes([contents[3][40] ^ 1]) + contents[3][41:])
    blocks[4].unlink()
    assert [read(block) is None for block in blocks[:6]] == [True] * 5 + [False]
    again = Counting()
    assert rows_of(batches(opened(text, again), again)) == whole
    assert [block.read_bytes() for block in blocks] == contents
    assert 0 < again.texts < 6 * 80 < 800  # those five blocks


def test_another_tokenizer_or_changed_text_never_meets_old_tokens(text):
    for tokenizer in (Counting(), Counting((b"aa", b"bb"))):
        assert rows_of(batches(opened(text, tokenizer), tokenizer, 5)) == rows_of(
            batches(opened(text, tokenizer, gib=0), tokenizer, 5)
        )
    status = text.stat()
    text.write_text(text.read_text().replace("c", "d"))  # as many bytes
    os.utime(text, ns=(status.st_atime_ns, status.st_mtime_ns + 1000))
    tokenizer = Counting()
    got = rows_of(batches(opened(text, tokenizer), tokenizer, 5))
    assert got == rows_of(batches(opened(text, tokenizer, gib=0), tokenizer, 5))
    assert len([*(text.parent / "base/tokens").iterdir()]) == 3


def test_the_rest_of_a_file_never_meets_the_tokens_of_its_first_90_percent(text):
    """The block across the bound is another one with and without `--val_data`; those before it are the same."""
    lines = [json.dumps({"text": f"{n:03} " + chr(97 + n % 26) * 124}) for n in range(396)]
    text.write_text("".join(f"{line}\n" for line in lines))
    parted = text.with_suffix(".txt")  # its last document is 20% of it, and is cut
    parted.write_text("<|endoftext|>\n".join([*("x" * 6200 + "\n" for _ in range(8)), "y" * 12_000]))
    for path, whole, cut in ((text, 57, 51), (parted, 9, 9)):
        tokenizer = Counting()
        for val_data, blocks in ((str(path), whole), (None, cut)):
            corpus = cached(open_corpus(str(path), val_data)[0], tokenizer, GIB)
            assert isinstance(corpus, CachedCorpus) and corpus.block_count() == blocks
            block = cut - 1
            texts = open_corpus(str(path), val_data)[0].read_block(block)  # pyright: ignore[reportAttributeAccessIssue]
            assert len(texts) == (1 if path is parted else 7 if val_data else 6)
            documents = corpus.read_block(block)[0 : len(texts)]
            assert [one.tolist() for one in documents] == [one.tolist() for one in corpus.tokenize(texts)]


def test_writers_at_once(text):
    """Four loaders on one folder, some of them in the same process: each block is whole at any moment."""
    tokenizer = Counting()
    whole = rows_of(batches(opened(text, tokenizer, gib=0), tokenizer))
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(rows_of(batches(opened(text, tokenizer), tokenizer))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [whole] * 4
    assert all(read(block) for block in (text.parent / "base/tokens").glob("*/*.tokens"))


def test_the_cache_keeps_to_its_size_and_outlives_its_deletion(text, capsys):
    tokenizer = Counting()
    corpus = opened(text, tokenizer, gib=100_000 / 2**30)
    batches(corpus, tokenizer)
    sizes = [block.stat().st_size for block in corpus.folder.glob("*.tokens")]
    assert 50_000 < sum(sizes) <= 100_000
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "is full" in err and "--token_cache_gib" in err
    # The folder goes away while a run reads from it, and cannot be written any more.
    corpus = opened(text, tokenizer)
    loader = Loader(corpus, tokenizer, 8, 255)
    got = rows_of([next(loader)])
    corpus.folder.rename(text.parent / "elsewhere")
    corpus.folder.write_text("in the way")
    got += rows_of(take(loader, 59))
    assert got == rows_of(batches(opened(text, tokenizer, gib=0), tokenizer))
    assert capsys.readouterr().err.count("tokenized again") == 1


def test_the_size_is_that_of_all_processes_and_of_older_folders(text, monkeypatch):
    monkeypatch.setattr(token_cache, "RECOUNT_BYTES", 0)
    root = text.parent / "base/tokens"
    (root / "older").mkdir(parents=True)
    (root / "older/0.tokens").write_bytes(bytes(30_000))
    (root / "older/1.tokens").symlink_to("nowhere")
    killed, running = (root / f"older/{number}.1.1.tmp" for number in (2, 3))
    for unfinished in (killed, running):
        unfinished.write_bytes(bytes(10_000))
    os.utime(killed, (0, 0))
    tokenizer = Counting()
    corpora = [opened(text, tokenizer, gib=100_000 / 2**30) for _ in range(2)]
    blocks = [[np.arange(4000)], [np.arange(3000)]]
    for number in range(4):  # in turn, as two processes write
        for corpus, block in zip(corpora, blocks, strict=True):
            corpus.write(corpus.folder / f"{number}.{len(block[0])}.tokens", block)
    written = [file for file in root.glob("*/*.tokens") if file.is_file()]
    assert 85_000 < sum(file.stat().st_size for file in written) <= 90_000  # of 100,000, the unfinished one counts
    assert running.exists() and not killed.exists()


def test_which_corpora_are_cached(text):
    tokenizer = Counting()
    parts = [Part("demo", DemoCorpus("train"), 0.5), Part("texts", open_corpus(str(text))[0], 0.5)]
    demo, texts = cached(WeightedCorpora("both", parts), tokenizer, GIB).parts
    assert isinstance(demo.corpus, DemoCorpus) and isinstance(texts.corpus, CachedCorpus) and texts.weight == 0.5
