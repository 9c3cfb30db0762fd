"""Measure the tokenizer: bytes per token on English, Chinese, code and numbers, beside well-known ones.

python -m scripts.tok_eval --data demo
"""

import hashlib
import itertools
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nanochat.shell.cli import UserError, run
from nanochat.shell.log import print0
from nanochat.shell.paths import tokenizer_dir

HELD_OUT_CHARS = 1_000_000

# The files behind tiktoken's encodings (address, sha256). `get_encoding` downloads what it does not find in
# its cache and what does not match; with these checked first it never does.
SITE = "https://openaipublic.blob.core.windows.net"
ENCODING_FILES = {
    "gpt2": (
        (f"{SITE}/gpt-2/encodings/main/vocab.bpe", "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
        (
            f"{SITE}/gpt-2/encodings/main/encoder.json",
            "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
        ),
    ),
    "cl100k_base": (
        (f"{SITE}/encodings/cl100k_base.tiktoken", "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"),
    ),
    "o200k_base": (
        (f"{SITE}/encodings/o200k_base.tiktoken", "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"),
    ),
}

ENGLISH = """\
The ferry to the island leaves twice a day, and in winter not at all when the wind comes from the north. Nobody who
lives there seems to mind. They keep flour, lamp oil and good books in the house, and a neighbour's boat is never
further than a short walk along the harbour wall. "You learn to want things early," the schoolteacher told me, "so
that you have them when you need them." She had taught three generations in the same room, and she could still
say which of the desks had been carved by whom. Most of her pupils left for the mainland at sixteen; about half
of them came back before they were thirty, usually with a profession the island did not strictly require.
"""
CHINESE = """\
清晨的市场总是最先醒来。卖豆腐的老人推着木车走过石板路，车轮声、吆喝声和远处的钟声混在一起。孩子们背着书包从桥上跑过，
其中一个停下来，看河里的鸭子排成一行游向对岸。茶馆的门刚刚打开，老板把昨夜的茶叶倒掉，重新烧上一壶水。他说，做了三十年的茶，
最难的不是火候，而是耐心：水开得太急，茶就苦；等得太久，香气又散了。人工智能正在改变许多行业，但这条街上的手艺，
仍然要靠一双手慢慢学会。下午两点以后，阳光照进院子，猫在屋檐下睡觉，整个小城安静得像一本合上的书。
"""


@dataclass(frozen=True)
class Config:
    data: str | None = None  # also measure held-out text of this file, folder or dataset
    val_data: str | None = None  # held-out text; default: the end of --data
    hub: str = "hf"  # where a dataset comes from: hf or modelscope


def samples() -> dict[str, str]:
    """One text a kind; code is a module of the running Python."""
    import argparse

    numbers = "\n".join(f"{n * n % 997} + {n * 7919 % 10007} = {n * n % 997 + n * 7919 % 10007}" for n in range(200))
    code = Path(argparse.__file__).read_text(encoding="utf-8")
    return {"English": ENGLISH, "Chinese": CHINESE, "code": code, "numbers": numbers}


def cached_encodings() -> list[str]:
    """Names of the tiktoken encodings whose files are on this disk, whole."""
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR"))
    if folder == "":  # tiktoken's way to switch its cache off
        return []
    cache = Path(folder or Path(tempfile.gettempdir()) / "data-gym-cache")

    def is_cached(address: str, sha256: str) -> bool:
        file = cache / hashlib.sha1(address.encode()).hexdigest()
        return file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == sha256

    return [name for name, files in ENCODING_FILES.items() if all(is_cached(*file) for file in files)]


def main(config: Config) -> None:
    import tiktoken  # here, like the next ones: --help stays quick
    from rich.console import Console
    from rich.table import Table

    from nanochat.tokenizer import Tokenizer, bytes_per_token, replace_surrogates

    # ------------------------------------------------------------------ texts and encoders
    tokenizer = Tokenizer.load(tokenizer_dir())
    texts = {kind: [text] for kind, text in samples().items()}
    if config.data is not None:
        texts[f"held out of {Path(config.data).name}"] = held_out_texts(config)
    encoders: dict[str, tuple[int, Callable[[str], list[int]]]] = {"this one": (tokenizer.vocab_size, tokenizer.encode)}
    for name in cached_encodings():
        encoding = tiktoken.get_encoding(name)
        encoders[name] = (encoding.n_vocab, encoding.encode_ordinary)

    # ------------------------------------------------------------------ every text comes back as it was
    for kind, parts in texts.items():
        for part in parts:
            if tokenizer.decode(tokenizer.encode(part)) != replace_surrogates(part):
                raise UserError(f"the tokenizer does not give back the {kind} text: train it again")

    # ------------------------------------------------------------------ the table
    table = Table(title="bytes per token")
    table.add_column("text")
    for name, (vocab_size, _) in encoders.items():
        table.add_column(f"{name}\n{vocab_size:,}", justify="right")
    for kind, parts in texts.items():
        table.add_row(kind, *(f"{bytes_per_token(encode, parts):.2f}" for _, encode in encoders.values()))
    Console().print(table)
    if len(encoders) == 1:
        print0("no tiktoken encoding is cached here to compare with (nothing was downloaded)")


def held_out_texts(config: Config) -> list[str]:
    """The first million characters or so of the corpus's validation text."""
    from nanochat.data.sources import open_corpus

    assert config.data is not None
    _, corpus = open_corpus(config.data, val_data=config.val_data, hub=config.hub)
    blocks = corpus.block_count()  # None: it never ends
    texts: list[str] = []
    for block in itertools.count() if blocks is None else range(blocks):
        texts += corpus.read_block(block)
        if sum(map(len, texts)) >= HELD_OUT_CHARS:
            break
    return texts


if __name__ == "__main__":
    run(main, Config)
