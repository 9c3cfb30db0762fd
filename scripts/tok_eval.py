"""Measure the tokenizer: bytes per token on English, Chinese, code and numbers.

python -m scripts.tok_eval --data demo
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nanochat.ground.cli import run
from nanochat.ground.paths import tokenizer_dir

HELD_OUT_CHARS = 1_000_000

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
    data: str | None = None  # also measure the held-out text of this file, folder or dataset
    val_data: str | None = None  # held-out text; default: the end of --data
    columns: str = ""  # text=COLUMN, where the text in files has another name
    hub: Literal["hf", "modelscope"] = "hf"  # where a dataset is downloaded from


def main(config: Config) -> None:
    import argparse  # a module of the running Python serves as an example of code

    from nanochat.ground.corpus import open_corpus, read_texts
    from nanochat.tokenizer import Tokenizer, bytes_per_token

    tokenizer = Tokenizer.load(tokenizer_dir())
    code = Path(argparse.__file__).read_text(encoding="utf-8")
    pairs = [(n * n % 997, n * 7919 % 10007) for n in range(200)]  # numbers of up to four digits
    numbers = "\n".join(f"{first} + {second} = {first + second}" for first, second in pairs)
    texts = {"English": [ENGLISH], "Chinese": [CHINESE], "code": [code], "numbers": [numbers]}
    if config.data is not None:
        _, held_out = open_corpus(config.data, val_data=config.val_data, hub=config.hub, columns=config.columns)
        texts[f"held out of {Path(config.data).name}"] = list(read_texts(held_out, HELD_OUT_CHARS))
    print(f"bytes per token, of {tokenizer.vocab_size:,} tokens:")
    for kind, parts in texts.items():
        print(f"{bytes_per_token(tokenizer.encode, parts):6.2f}  {kind}")


if __name__ == "__main__":
    run(main, Config)
