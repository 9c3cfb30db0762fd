"""Byte-pair tokenizer: text in, token ids out. rustbpe trains it, tiktoken encodes with it.

Ids run in merge order: first the 256 bytes, then the merges, then the special tokens that mark the
parts of a chat. Text alone never yields a special id: those come from `encode_special` only.
On disk it is one file, `tokenizer.json`, which holds everything that defines it and its own sha256.
"""

import base64
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, overload

import tiktoken

from nanochat.shell.cli import UserError

SPECIAL_TOKENS = (
    "<|bos|>",  # begins every document and every conversation
    "<|system_start|>",
    "<|system_end|>",
    "<|user_start|>",
    "<|user_end|>",
    "<|assistant_start|>",
    "<|assistant_end|>",
    "<|python_start|>",  # the assistant calls a tool ...
    "<|python_end|>",
    "<|output_start|>",  # ... and reads its answer
    "<|output_end|>",
)

# GPT-4's split pattern, but numbers go in ones and twos instead of threes: a small vocabulary has better uses.
# A merge never crosses the border between two pieces of this split.
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)

FILE_NAME = "tokenizer.json"
FORMAT_VERSION = 1
TRAIN_AGAIN = "train one with `python -m scripts.tok_train`"


class Tokenizer:
    """A byte-pair vocabulary; immutable once made, safe to share between threads and to pickle to a worker."""

    def __init__(
        self,
        tokens: Sequence[bytes],
        pattern: str = SPLIT_PATTERN,
        special_tokens: Sequence[str] = SPECIAL_TOKENS,
    ):
        """`tokens` in rank order: the id of a token is its place.

        Raises ValueError: when the tokens cannot encode every text.
        """
        ranks = {token: rank for rank, token in enumerate(tokens)}
        if len(ranks) != len(tokens) or b"" in ranks:
            raise ValueError("a token is empty or stands twice")
        if not all(bytes([value]) in ranks for value in range(256)):
            raise ValueError("not all of the 256 bytes are tokens")
        if len(set(special_tokens)) != len(special_tokens) or "" in special_tokens:
            raise ValueError("a special token is empty or stands twice")
        self.pattern = pattern
        self.tokens = list(tokens)
        self.special_ids = {name: len(tokens) + place for place, name in enumerate(special_tokens)}
        self.vocab_size = len(tokens) + len(special_tokens)
        self._encoding = tiktoken.Encoding(
            name="nanochat", pat_str=pattern, mergeable_ranks=ranks, special_tokens=self.special_ids
        )

    # ------------------------------------------------------------------ train, save, load

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learn the merges from a stream of texts, on all cores; the result does not depend on their number.

        `vocab_size` counts the special tokens. A text with too little in it to merge gives a smaller
        vocabulary: compare `.vocab_size` with what was asked for.

        Raises UserError: when vocab_size has no room for the bytes and the special tokens, or there is no text.
        """
        import rustbpe  # here: who only encodes does not need it

        smallest = 256 + len(SPECIAL_TOKENS)
        if vocab_size < smallest:
            raise UserError(
                f"--vocab_size {vocab_size} is too small: 256 bytes and {len(SPECIAL_TOKENS)} special tokens "
                f"need at least {smallest}"
            )
        characters = 0

        def pieces() -> Iterator[str]:
            nonlocal characters
            for text in texts:
                characters += len(text)
                yield from _cut_long_runs(mend_surrogates(text))

        trainer = rustbpe.Tokenizer()  # pyright: ignore[reportAttributeAccessIssue] (it ships no types)
        trainer.train_from_iterator(pieces(), vocab_size - len(SPECIAL_TOKENS), buffer_size=8192, pattern=SPLIT_PATTERN)
        if characters == 0:
            raise UserError("there is no text to train a tokenizer on: check --data")
        ranked = sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])
        return cls([bytes(token) for token, _ in ranked])

    def shrink(self, vocab_size: int) -> "Tokenizer":
        """The tokenizer of the first merges only: the same as training for fewer tokens."""
        return Tokenizer(self.tokens[: vocab_size - len(self.special_ids)], self.pattern, list(self.special_ids))

    def save(self, folder: str | Path) -> Path:
        """Write `folder/tokenizer.json`, whole or not at all."""
        path = Path(folder) / FILE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"version": FORMAT_VERSION, "sha256": self.fingerprint(), **self._definition()}
        unfinished = path.with_name(f"{FILE_NAME}.{os.getpid()}.tmp")
        with unfinished.open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        return unfinished.replace(path)

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """Read and verify `folder/tokenizer.json`.

        Raises UserError: when it is missing, damaged, or of another format version.
        """
        path = Path(folder) / FILE_NAME
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["version"] != FORMAT_VERSION:
                raise ValueError(f"it has format version {content['version']}, this code reads {FORMAT_VERSION}")
            tokens = [base64.b64decode(token, validate=True) for token in content["merges"]]
            tokenizer = cls(tokens, content["pattern"], content["special_tokens"])
            if tokenizer.fingerprint() != content["sha256"]:
                raise ValueError("its content does not match its sha256")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UserError(f"there is no tokenizer at {path}: {TRAIN_AGAIN}") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{path} cannot be used ({error}): restore it or {TRAIN_AGAIN}") from error
        return tokenizer

    def fingerprint(self) -> str:
        """sha256 over all that defines the ids; equal fingerprints mean equal ids for every text."""
        return hashlib.sha256(json.dumps(self._definition(), sort_keys=True).encode()).hexdigest()

    def _definition(self) -> dict[str, Any]:
        return {
            "pattern": self.pattern,
            "special_tokens": list(self.special_ids),
            "merges": [base64.b64encode(token).decode() for token in self.tokens],  # in rank order
        }

    # ------------------------------------------------------------------ encode, decode

    @overload
    def encode(
        self, text: str, prepend: int | str | None = None, append: int | str | None = None, num_threads: int = 1
    ) -> list[int]: ...

    @overload
    def encode(
        self, text: list[str], prepend: int | str | None = None, append: int | str | None = None, num_threads: int = 1
    ) -> list[list[int]]: ...

    def encode(
        self,
        text: str | list[str],
        prepend: int | str | None = None,
        append: int | str | None = None,
        num_threads: int = 1,
    ) -> list[int] | list[list[int]]:
        """Token ids of a text, or of each text of a list (then on `num_threads` threads).

        `prepend` and `append` are ids or names of special tokens. Special tokens spelled out in the text
        are plain text. A lone surrogate, which no file can hold, becomes U+FFFD.
        """
        first = [] if prepend is None else [self._special_id(prepend)]
        last = [] if append is None else [self._special_id(append)]

        def encode_one(text: str) -> list[int]:
            ids = list(first)
            for piece in _cut_long_runs(mend_surrogates(text)):
                ids += self._encoding.encode_ordinary(piece)
            return ids + last

        if isinstance(text, str):
            return encode_one(text)
        if num_threads <= 1 or len(text) <= 1:
            return [encode_one(one) for one in text]
        with ThreadPoolExecutor(num_threads) as threads:  # tiktoken works outside the interpreter's lock
            shares = [text[place::num_threads] for place in range(num_threads)]
            encoded = list(threads.map(lambda share: [encode_one(one) for one in share], shares))
        return [encoded[place % num_threads][place // num_threads] for place in range(len(text))]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; a character cut in half becomes U+FFFD, a special token its name."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The exact bytes of the ids, for output that streams token by token.

        Raises ValueError: when an id is outside the vocabulary.
        """
        ids = list(ids)
        try:
            return self._encoding.decode_bytes(ids)
        except (KeyError, OverflowError) as error:
            wrong = next(one for one in ids if not 0 <= one < self.vocab_size)
            raise ValueError(f"token id {wrong} is outside the vocabulary of {self.vocab_size}") from error

    # ------------------------------------------------------------------ special tokens, byte counts

    def get_bos_token_id(self) -> int:
        """The id that begins every document."""
        return self.encode_special("<|bos|>")

    def encode_special(self, name: str) -> int:
        """The id of a special token.

        Raises UserError: when this tokenizer has no such token.
        """
        if name not in self.special_ids:
            raise UserError(f"the tokenizer has no special token {name!r}: it has {', '.join(self.special_ids)}")
        return self.special_ids[name]

    def _special_id(self, token: int | str) -> int:
        return self.encode_special(token) if isinstance(token, str) else token

    def token_bytes(self) -> list[int]:
        """Bytes of text each id stands for, 0 for special tokens: the weights of bits per byte."""
        return [len(token) for token in self.tokens] + [0] * len(self.special_ids)


def bytes_per_token(encode: Callable[[str], list[int]], texts: Iterable[str]) -> float:
    """UTF-8 bytes per token over all texts together: how much a vocabulary packs into one step."""
    total_bytes = total_tokens = 0
    for text in map(mend_surrogates, texts):
        total_bytes += len(text.encode())
        total_tokens += len(encode(text))
    return total_bytes / max(total_tokens, 1)


# ---------------------------------------------------------------------- text that breaks encoders

RUN_BLOCK = 512  # characters
_LETTER_DIGIT_OR_SPACE = re.compile(r"[^\W_]|\s")


def _cut_long_runs(text: str) -> list[str]:
    """Cut the text inside runs of letters, of whitespace, or of anything else without a break.

    Such a run is one piece of the split pattern. Past some 100,000 spaces the pattern engine overflows
    its stack, and the merge loop of older tiktoken is quadratic in a piece. A cut comes after each
    aligned block of 512 characters that is all one kind, so no piece exceeds 1,023 characters, the cost is
    a glance at each block, and text without runs of 512 characters encodes as if this were not here.
    """
    pieces = []
    begin = 0
    for end in range(RUN_BLOCK, len(text), RUN_BLOCK):
        block = text[end - RUN_BLOCK : end]
        if block.isalpha() or block.isspace() or not _LETTER_DIGIT_OR_SPACE.search(block):
            pieces.append(text[begin:end])
            begin = end
    pieces.append(text[begin:])
    return pieces


def mend_surrogates(text: str) -> str:
    """The text as UTF-8 can hold it: surrogate pairs joined, lone surrogates replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
