"""The tokenizer: exact round trips, no special ids from text, damage found on load, no text too odd to encode."""

import base64
import hashlib
import json
import pickle
import random
import shutil
from collections.abc import Callable
from typing import Any

import pytest
from tiny import complaint

from nanochat.ground.cli import UserError
from nanochat.ground.corpus import read_texts
from nanochat.tokenizer import RUN_BLOCK, SPECIAL_TOKENS, Tokenizer, _cut_long_runs, bytes_per_token
from scripts import tok_eval, tok_train

TEXTS = [
    "Once upon a time there was a small boat. The boat had a red sail, and the sail had 3 patches. " * 3,
    "从前有一条小船，船上有一面红帆。红帆上有三块补丁。" * 3,
    "def add(a, b):\n    return a + b  # 12 + 34 = 46\n\n\tprint(add(2024, 1999))\n",
    "Hello, hello! It's the boat's sail. 😀👩‍👩‍👧 naïve café",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, 512)


# ---------------------------------------------------------------------- encode, decode


def test_a_batch_on_threads_agrees_with_single_texts(tokenizer):
    texts = [*TEXTS, "", "one", "two"]
    bos, end = tokenizer.get_bos_token_id(), tokenizer.encode_special("<|user_end|>")
    single = [tokenizer.encode(text, prepend=bos) for text in texts]
    assert tokenizer.encode_batch(texts, "<|bos|>") == single
    assert tokenizer.encode_batch(texts, bos, num_threads=3) == single
    assert tokenizer.encode("", "<|bos|>", "<|user_end|>") == [bos, end]
    assert tokenizer.encode_batch([], num_threads=3) == []


def test_lone_surrogates_become_the_replacement_character(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b\udfffc")) == "a\ufffdb\ufffdc"
    assert tokenizer.decode(tokenizer.encode("\ud83d\ude00")) == "😀"  # a pair is one character
    assert Tokenizer.train(["ab\ud800ab"], 300).decode([97]) == "a"
    assert bytes_per_token(tokenizer.encode, ["\ud800"]) == pytest.approx(3 / len(tokenizer.encode("\ufffd")))


def test_a_character_arrives_in_bytes(tokenizer):
    ids = tokenizer.encode("𰻝")  # four bytes that are no merge here
    assert [tokenizer.token_bytes()[token] for token in ids] == [1, 1, 1, 1]
    assert b"".join(tokenizer.decode_bytes([token]) for token in ids).decode() == "𰻝"
    assert tokenizer.decode(ids[:3]) == "\ufffd"
    with pytest.raises(UserError, match=r"<\|nobody\|>"):
        tokenizer.encode_special("<|nobody|>")


# ---------------------------------------------------------------------- runs without a break


@pytest.mark.parametrize("unit", [" ", "a", "人", "!", "\n", "\u3000", "\u0301", "7", "😀", " \n", "'s"])
def test_characters_without_a_break(tokenizer, unit):
    text = unit * (300_000 // len(unit))
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("unit", "length"), [(".", 511), ("a", 1000), ("\u0301", 1024), ("._", 1023 * 3), ("啊", 1024), (" ", 1_000_000)]
)
def test_training_on_characters_without_a_break(unit, length):
    """A piece of them has fewer than 1,024 characters, so that the merges of it are few."""
    trained = Tokenizer.train([unit * length], 32_768)
    assert trained.decode(trained.encode(unit * length)) == unit * length
    assert trained.vocab_size < 300
    assert all(len(piece) < 1024 * len(unit) for piece in _cut_long_runs(unit * length))


def test_only_long_runs_are_cut(tokenizer):
    whole = tokenizer._encoding.encode_ordinary
    source = random.Random(1)
    ordinary = "".join(source.choices("ab cd, 12\n人。", k=20_000))
    for text in (ordinary, "\n\n".join(TEXTS * 20), "x" * (RUN_BLOCK - 1), ("y" * (RUN_BLOCK - 1) + " ") * 9):
        assert tokenizer.encode(text) == whole(text)
    runs = Tokenizer.train(
        ["ab" * 8] * 9, 271
    )  # a merge of 16 characters: a cut is visible unless it falls on a border
    assert runs.encode("b" + "ab" * 600) != runs._encoding.encode_ordinary("b" + "ab" * 600)


# ---------------------------------------------------------------------- train


def test_training_is_deterministic_and_shrinks_to_its_prefix():
    text = [" ".join(TEXTS)] * 3
    large = Tokenizer.train(text, 400)
    assert large.vocab_size == 400
    assert Tokenizer.train(iter(text), 400).fingerprint() == large.fingerprint()
    assert large.shrink(300).fingerprint() == Tokenizer.train(text, 300).fingerprint()


def test_merges_respect_the_split():
    tokens = Tokenizer.train(["1234 5678 one,two's 90\n"] * 50, 400).tokens
    assert max(len(token) for token in tokens if token.isdigit()) == 1
    assert not any(b"," in token[1:] for token in tokens)  # a mark begins a piece
    assert b",two" in tokens
    assert b"'s" in tokens


def test_little_text_gives_a_small_vocabulary_and_none_an_error():
    assert Tokenizer.train(["hello hello"], 1000).vocab_size == 256 + 5 + len(SPECIAL_TOKENS)
    for nothing in ([], ["", ""]):
        with pytest.raises(UserError, match="--data"):
            Tokenizer.train(nothing, 1000)
    smallest = 256 + len(SPECIAL_TOKENS)
    with pytest.raises(UserError, match=f"--vocab_size {smallest - 1} .* at least {smallest}"):
        Tokenizer.train(TEXTS, smallest - 1)
    assert Tokenizer.train(TEXTS, smallest).tokens == [bytes([value]) for value in range(256)]


# ---------------------------------------------------------------------- save, load


def test_save_and_load_are_exact(tokenizer, tmp_path):
    path = tokenizer.save(tmp_path / "deep" / "folder")
    loaded = Tokenizer.load(path.parent)
    assert [file.name for file in path.parent.iterdir()] == ["tokenizer.json"]
    assert loaded.fingerprint() == tokenizer.fingerprint()
    assert loaded.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
    assert loaded.special_ids == tokenizer.special_ids
    assert pickle.loads(pickle.dumps(loaded)).encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)


def test_the_fingerprint_sees_every_change_and_the_pattern_is_saved(tokenizer, tmp_path):
    by_letter = Tokenizer(tokenizer.tokens, pattern=r"[\s\S]")
    by_letter.save(tmp_path)
    assert len(Tokenizer.load(tmp_path).encode("boat")) == 4 > len(tokenizer.encode("boat"))
    swapped = [*tokenizer.tokens[:-2], tokenizer.tokens[-1], tokenizer.tokens[-2]]
    fewer_special = Tokenizer(tokenizer.tokens, special_tokens=SPECIAL_TOKENS[:-1])
    assert len({one.fingerprint() for one in (tokenizer, by_letter, Tokenizer(swapped), fewer_special)}) == 4


def with_merges(content: dict, changes: dict[int, Any]) -> dict:
    """With other merges, by number; None leaves one out."""
    merges = [changes.get(number, merge) for number, merge in enumerate(content["merges"])]
    return {**content, "merges": [merge for merge in merges if merge is not None]}


def without_a_byte(content: dict) -> dict:
    """Consistent, but short of a byte."""
    content = with_merges(content, {65: base64.b64encode(b"unlikely").decode()})
    defined = {key: content[key] for key in ("pattern", "special_tokens", "merges")}
    return {**content, "sha256": hashlib.sha256(json.dumps(defined, sort_keys=True).encode()).hexdigest()}


# A tokenizer.json with one thing wrong: bytes, or the content of a file of JSON.
DAMAGES: dict[str, Callable[[dict], Any]] = {
    "torn": lambda content: json.dumps(content)[:-100].encode(),
    "not text": lambda content: b"\xff\xfe\x00",
    "a list": lambda content: [1, 2],
    "version": lambda content: {**content, "version": 99},
    "key": lambda content: {key: value for key, value in content.items() if key != "pattern"},
    "pattern": lambda content: {**content, "pattern": "("},
    "swap": lambda content: with_merges(content, {300: content["merges"][301], 301: content["merges"][300]}),
    "twice": lambda content: with_merges(content, {301: content["merges"][300]}),
    "no byte": lambda content: with_merges(content, {65: None}),
    "not base64": lambda content: with_merges(content, {300: "@@@"}),
    "number": lambda content: with_merges(content, {300: 7}),
    "empty": lambda content: with_merges(content, {300: ""}),
    "consistent": without_a_byte,
}


@pytest.mark.parametrize("how", DAMAGES)
def test_damage_is_found(tokenizer, tmp_path, how):
    path = tokenizer.save(tmp_path)
    broken = DAMAGES[how](json.loads(path.read_text()))
    path.write_bytes(broken if isinstance(broken, bytes) else json.dumps(broken).encode())
    for _ in range(2):
        line = complaint(lambda: Tokenizer.load(tmp_path))
        assert str(path) in line
        assert "scripts.tok_train" in line
        path.unlink(missing_ok=True)


# ---------------------------------------------------------------------- the two scripts


class ListCorpus:
    """Blocks from a list; `endless` repeats them."""

    name = "list"

    def __init__(self, blocks: list[list[str]], endless: bool = False):
        self.blocks, self.endless = blocks, endless

    def block_count(self) -> int | None:
        return None if self.endless else len(self.blocks)

    def read_block(self, index: int) -> list[str]:
        return self.blocks[index % len(self.blocks)]


def test_texts_are_read_up_to_a_number_of_characters():
    corpus = ListCorpus([["abcdefgh", "12"], [], ["ABCD"]])
    assert list(read_texts(corpus, 100)) == ["abcdefgh", "12", "ABCD"]
    assert list(read_texts(corpus, 11)) == ["abcdefgh", "12", "A"]
    assert "".join(read_texts(ListCorpus([["ab"], ["cd"]], endless=True), 7)) == "abcdabc"


def use_corpus(monkeypatch, corpus: ListCorpus) -> None:
    monkeypatch.setattr("nanochat.ground.corpus.open_corpus", lambda *_, **__: (corpus, corpus))


def test_tok_train_saves_and_protects_checkpoints(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    use_corpus(monkeypatch, ListCorpus([TEXTS]))
    config = tok_train.Config(vocab_size=400)
    tok_train.main(config)
    assert "vocabulary of 400 tokens" in capsys.readouterr().out
    first = Tokenizer.load(tmp_path / "tokenizer").fingerprint()

    (tmp_path / "checkpoints" / "base" / "d4" / "step_10").mkdir(parents=True)
    with monkeypatch.context() as without_training:
        without_training.delattr(Tokenizer, "train")
        tok_train.main(config)  # the same once more: nothing changes
        with pytest.raises(UserError, match="delete"):
            tok_train.main(tok_train.Config(vocab_size=300))
        use_corpus(without_training, ListCorpus([TEXTS[1:]]))
        with pytest.raises(UserError, match="delete"):
            tok_train.main(config)
    assert Tokenizer.load(tmp_path / "tokenizer").fingerprint() == first
    shutil.rmtree(tmp_path / "tokenizer")
    tok_train.main(tok_train.Config(vocab_size=300))
    assert Tokenizer.load(tmp_path / "tokenizer").vocab_size == 300


def test_tok_train_lets_the_text_decide_the_vocabulary(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    source = random.Random(0)
    words = ["".join(source.choices("abcdefghijklmnop", k=6)) for _ in range(2000)]
    use_corpus(monkeypatch, ListCorpus([[" ".join(source.choices(words, k=40_000))]]))
    tok_train.main(tok_train.Config())
    assert Tokenizer.load(tmp_path / "tokenizer").vocab_size == 279_999 // tok_train.CHARS_PER_TOKEN
    tok_train.main(tok_train.Config(vocab_size=30_000))
    assert "no more to merge" in capsys.readouterr().out


def test_tok_eval_prints_a_table(monkeypatch, tmp_path, tokenizer, capsys):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    use_corpus(monkeypatch, ListCorpus([TEXTS]))
    tokenizer.save(tmp_path / "tokenizer")
    tok_eval.main(tok_eval.Config(data="demo"))
    output = capsys.readouterr().out
    assert all(kind in output for kind in ("English", "Chinese", "code", "numbers", "held out of demo"))
    assert f"{bytes_per_token(tokenizer.encode, TEXTS):.2f}" in output
