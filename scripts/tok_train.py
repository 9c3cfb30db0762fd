"""Train the tokenizer: learn from text which byte sequences become one token.

python -m scripts.tok_train --data demo --vocab_size 4096
"""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nanochat.shell.cli import Positive, UserError, run
from nanochat.shell.log import print0, record
from nanochat.shell.paths import STAGES, base_dir, tokenizer_dir

if TYPE_CHECKING:
    from nanochat.data.sources import Corpus

VOCAB_SIZE = 32_768
SMALL_VOCAB_SIZE = 1024
CHARS_PER_TOKEN = 250  # a model learns little about tokens it hardly ever sees
CHARS = 2_000_000_000  # past this, more text hardly changes the merges
CHARS_OF_ENDLESS_DATA = 4_000_000
HELD_OUT_CHARS = 1_000_000
REPORT_CHARS = 100_000_000


@dataclass(frozen=True)
class Config:
    data: str = "demo"  # a file, a folder, or the name of a dataset
    val_data: str | None = None  # held-out text; default: the end of --data
    hub: str = "hf"  # where a dataset comes from: hf or modelscope
    shards: Positive | None = None  # files of a dataset to read; default: its first few
    vocab_size: int | None = None  # tokens, special ones included; default: one for 250 characters, 1024 to 32768
    max_chars: Positive | None = None  # characters to learn from; default: 2 billion, 4 million where data never ends
    doc_cap: Positive = 10_000  # characters of each document to read first; the rest follows if there is room
    overwrite: bool = False  # replace a tokenizer that checkpoints here were trained with


def read_texts(corpus: "Corpus", max_chars: int, doc_cap: int) -> Iterator[str]:
    """Texts of a corpus up to `max_chars`: the beginning of every document, then what is left of the long ones.

    Many beginnings teach more than a few whole books; a corpus smaller than the budget is read completely.
    """
    blocks = corpus.block_count()  # None: it never ends
    any_long = False
    for rest in (False, True):
        if rest and not any_long:
            return
        for block in itertools.count() if blocks is None else range(blocks):
            for document in corpus.read_block(block):
                any_long |= len(document) > doc_cap
                for begin in range(doc_cap, len(document), doc_cap) if rest else (0,):
                    text = document[begin : begin + min(doc_cap, max_chars)]
                    yield text
                    max_chars -= len(text)
                    if max_chars <= 0:
                        return


def main(config: Config) -> None:
    began = time.time()
    from nanochat.data.sources import open_corpus  # here: --help stays quick
    from nanochat.tokenizer import FILE_NAME, Tokenizer, bytes_per_token

    # ------------------------------------------------------------------ read and train
    train, held_out = open_corpus(config.data, config.val_data, hub=config.hub, shards=config.shards)
    max_chars = config.max_chars or (CHARS_OF_ENDLESS_DATA if train.block_count() is None else CHARS)
    characters = 0

    def counted() -> Iterator[str]:
        nonlocal characters
        for text in read_texts(train, max_chars, config.doc_cap):
            before, characters = characters, characters + len(text)
            if characters // REPORT_CHARS > before // REPORT_CHARS:
                print0(f"read {characters // 1_000_000:,} million characters in {time.perf_counter() - begin:.0f} s")
            yield text

    vocab_size = VOCAB_SIZE if config.vocab_size is None else config.vocab_size
    print0(f"training a tokenizer of at most {vocab_size:,} tokens on {config.data}")
    begin = time.perf_counter()
    tokenizer = Tokenizer.train(counted(), vocab_size)
    if config.vocab_size is None and tokenizer.vocab_size > SMALL_VOCAB_SIZE:
        tokenizer = tokenizer.shrink(min(tokenizer.vocab_size, max(characters // CHARS_PER_TOKEN, SMALL_VOCAB_SIZE)))
    seconds = time.perf_counter() - begin
    print0(f"{characters:,} characters | {seconds:.1f} s | vocabulary of {tokenizer.vocab_size:,} tokens")
    if config.vocab_size is not None and tokenizer.vocab_size < config.vocab_size:
        print0(f"the text has no more to merge: {config.vocab_size:,} tokens need more or more varied text")

    # ------------------------------------------------------------------ measure on text it has not seen
    texts = list(read_texts(held_out, HELD_OUT_CHARS, config.doc_cap))
    print0(f"held-out text: {bytes_per_token(tokenizer.encode, texts):.3f} bytes per token")

    # ------------------------------------------------------------------ save
    folder = tokenizer_dir()
    if not config.overwrite and differs(folder, tokenizer.fingerprint()):
        raise UserError(
            f"{folder / FILE_NAME} is another tokenizer, and checkpoints in {base_dir()} were trained with it and "
            f"would become useless: add --overwrite, or point NANOCHAT_BASE_DIR to a fresh folder"
        )
    print0(f"saved to {tokenizer.save(folder)}")
    record("tokenizer", None, began)


def differs(folder: Path, fingerprint: str) -> bool:
    """Whether a save would replace another tokenizer while there are checkpoints that need it.

    Training again with the same text and flags gives the same tokenizer and always goes through.
    """
    from nanochat.tokenizer import Tokenizer

    try:
        if Tokenizer.load(folder).fingerprint() == fingerprint:
            return False
    except UserError:  # none, or one that cannot be used: nothing to lose
        return False
    checkpoints = base_dir() / "checkpoints"
    return any(next((checkpoints / stage).glob("*/step_*"), None) is not None for stage in STAGES)


if __name__ == "__main__":
    run(main, Config)
