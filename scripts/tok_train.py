"""Train the tokenizer: learn from text which byte sequences become single tokens.

python -m scripts.tok_train --data demo --vocab_size 4096
"""

import contextlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from nanochat.ground.cli import Positive, Size, UserError, run
from nanochat.ground.log import print0, record
from nanochat.ground.paths import base_dir, tokenizer_dir
from nanochat.ground.screen import Bar, phase

VOCAB_SIZE = 32_768
SMALL_VOCAB_SIZE = 1024
CHARS_PER_TOKEN = 250  # a model learns little about tokens that it hardly ever sees
CHARS = 2_000_000_000  # more text hardly changes the merges
CHARS_OF_ENDLESS_DATA = 4_000_000
HELD_OUT_CHARS = 1_000_000


@dataclass(frozen=True)
class Config:
    data: str = "demo"  # a file, a folder, or the name of a dataset; or several with weights: a:0.7,b:0.3
    val_data: str | None = None  # held-out text; default: the end of --data
    columns: str = ""  # text=COLUMN, where the text in files has another name
    hub: Literal["hf", "modelscope"] = "hf"  # where a dataset is downloaded from
    shards: Positive | None = None  # files of a dataset to read; default: its first few
    vocab_size: Size | None = None  # tokens, special ones included; default: one per 250 characters, 1024 to 32768
    max_chars: Positive | None = None  # characters to learn from; default: 2 billion, 4 million where data never ends


def main(config: Config) -> None:
    began = time.time()
    from nanochat.ground.corpus import fingerprint, open_corpus, read_texts  # here: --help stays quick
    from nanochat.tokenizer import Tokenizer, bytes_per_token

    # ---------------------------------------------------------------------- may it be saved?
    train, held_out = open_corpus(
        config.data, config.val_data, hub=config.hub, shards=config.shards, columns=config.columns
    )
    is_endless = train.block_count() is None
    max_chars = config.max_chars or (CHARS_OF_ENDLESS_DATA if is_endless else CHARS)
    folder = tokenizer_dir()
    origin_file = folder / "trained_from.txt"
    origin = f"data {fingerprint(train)}, vocab_size {config.vocab_size}, max_chars {max_chars}, tokenizer "
    needed = None  # the fingerprint of the tokenizer that checkpoints here depend on
    if any(base_dir().glob("checkpoints/*/*/step_*")):
        with contextlib.suppress(UserError):  # none, or a damaged one: nothing to lose
            needed = Tokenizer.load(folder).fingerprint()
    if needed:
        if origin_file.exists() and origin_file.read_bytes() == (origin + needed).encode():
            print0(f"{folder} holds the tokenizer of this text and these flags: there is nothing to do")
            return
        raise UserError(
            f"{folder} holds a tokenizer of other text or flags; checkpoints in {base_dir()} were trained with it and "
            f"would become useless: point NANOCHAT_BASE_DIR to a fresh folder, or delete this one"
        )
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()  # a folder that cannot be written is an error now, not after training

    # ---------------------------------------------------------------------- read and train
    characters = 0

    def counted_texts() -> Iterator[str]:
        nonlocal characters
        with Bar("reading characters") as reading:
            for text in read_texts(train, max_chars):
                characters += len(text)
                reading.done = characters
                yield text
        phase("learning merges")

    vocab_size = VOCAB_SIZE if config.vocab_size is None else config.vocab_size
    print0(f"training a tokenizer of at most {vocab_size:,} tokens on {config.data}")
    tokenizer = Tokenizer.train(counted_texts(), vocab_size)

    # Little text supports only a small vocabulary. The amount is known after reading. Cutting the vocabulary is exact:
    # training for fewer tokens would have given the same first merges.
    if config.vocab_size is None and tokenizer.vocab_size > SMALL_VOCAB_SIZE:
        supported = max(characters // CHARS_PER_TOKEN, SMALL_VOCAB_SIZE)
        tokenizer = tokenizer.shrink(min(tokenizer.vocab_size, supported))
    print0(f"{characters:,} characters | {time.time() - began:.1f} s | vocabulary of {tokenizer.vocab_size:,} tokens")
    if config.vocab_size is not None and tokenizer.vocab_size < config.vocab_size:
        print0(f"the text has no more to merge: {config.vocab_size:,} tokens need more or more varied text")

    # ---------------------------------------------------------------------- measure on held-out text
    phase("reading the held-out text")
    compression = bytes_per_token(tokenizer.encode, read_texts(held_out, HELD_OUT_CHARS))
    print0(f"held-out text: {compression:.3f} bytes per token")

    # ---------------------------------------------------------------------- save
    print0(f"saved to {tokenizer.save(folder)}")
    origin_file.write_text(origin + tokenizer.fingerprint())
    record("tokenizer", None, began)


if __name__ == "__main__":
    run(main, Config, shows_progress=True)
