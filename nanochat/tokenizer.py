"""Byte-pair tokenizer: text in, token ids out. rustbpe trains it, tiktoken encodes with it.

The tokenizers of other families have the same interface. `Tokenizer.load` reads ours, and asks a room for theirs.

The vocabulary, by id:

    0 ... 255        the bytes, so that every text can be encoded
    256 ...          the merges, in the order in which training found them
    the last ids     the special tokens, which mark the parts of a document or a chat

On disk it is one file, `tokenizer.json`, which holds everything that defines the ids, and a sha256 of that.

Source: Sennrich, Haddow, Birch 2016, Neural Machine Translation of Rare Words with Subword Units; on bytes: Radford et
al. 2019, Language Models are Unsupervised Multitask Learners.
"""

import base64
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tiktoken

from nanochat.ground import rooms
from nanochat.ground.cli import UserError
from nanochat.ground.untrusted import read_json

# Marks that are not text. They show the model where a document begins, and who is speaking in a chat.
#
# Text never becomes one of them. `encode` treats its text as plain bytes, even if the text spells out "<|user_end|>".
# Only `encode_special`, and the `prepend` and `append` of `encode`, give special ids. So users cannot end their own
# turn or write the turn of the assistant, whatever they type.
SPECIAL_TOKENS = (
    "<|bos|>",  # begins every document and every conversation
    # The parts of a conversation (conversation.py).
    "<|system_start|>",
    "<|system_end|>",
    "<|user_start|>",
    "<|user_end|>",
    "<|assistant_start|>",
    "<|assistant_end|>",
    # The assistant calls a tool ...
    "<|python_start|>",
    "<|python_end|>",
    # ... and reads its result
    "<|output_start|>",
    "<|output_end|>",
)

# Before any merge, this pattern splits the text into words, numbers and marks; a merge never crosses the border between
# two pieces. Without it the vocabulary would fill up with "dog.", "dog!" and "dog?". The space before a word belongs to
# the word: " dog" is one token, and spaces cost nothing.
#
# It is the pattern of GPT-4 with one change: every digit is a token of its own, instead of groups of up to three. Then
# equal digits are equal tokens wherever they stand in a number, which a small model needs to copy a long one; and 1,000
# tokens for three-digit numbers would be a large part of a small vocabulary.
#
#     "Don't pay $1,234  for it!"   ->   Don | 't |  pay |  $ | 1 | , | 2 | 3 | 4 |   |  for |  it | !
SPLIT_PATTERN = "|".join(
    (
        r"'(?i:[sdmt]|ll|ve|re)",  # the end of an English contraction: it's, we'll
        r"[^\r\n\p{L}\p{N}]?+\p{L}+",  # a word, with one space or mark before it
        r"\p{N}",  # a digit
        r" ?[^\s\p{L}\p{N}]++[\r\n]*",  # marks, with the line ends after them
        r"\s*[\r\n]",  # white space up to a line end
        r"\s+(?!\S)",  # white space, but for the last space: that one belongs to the next word
        r"\s+",
    )
)

FILE_NAME = "tokenizer.json"
# The same file next to a tokenizer.json in the format of Hugging Face (scripts/export.py).
EXPORTED_NAME = "nanochat_tokenizer.json"
# An imported vocabulary of 262,144 tokens with its merges takes 33 MB and 1.8 million values. A file with many more
# would take gigabytes as objects.
MAX_FILE = {"max_bytes": 64 << 20, "max_values": 4_000_000}
TRAIN_AGAIN = "train one with `python -m scripts.tok_train`"


class Tokenizer:
    """A byte-pair vocabulary. It never changes, so threads may share it; it can be pickled to a worker."""

    format_version = 1  # version of the file
    indent: int | None = 1  # indent of the file's JSON

    # The rest of the code reads these. A tokenizer of another family has other values.
    vocab_size: int
    special_ids: dict[str, int]  # by name
    token_texts: list[bytes]  # by id: what each token adds to a text; nothing for a special token
    reply_ends: tuple[int, ...]  # tokens that end a complete reply; the first is the usual one
    stop_ids: frozenset[int]  # tokens that end a reply, complete or not
    text_end: int  # the token after a text of a base model
    strips_space = False  # a reply is shown without the space before its first word
    chat_format: Any = None  # the conversation.ChatFormat of another family; None: the format of conversation.py
    can_chat = True  # False: the model of another family has no chat format

    def __init__(
        self,
        tokens: Sequence[bytes],
        pattern: str = SPLIT_PATTERN,
        special_tokens: Sequence[str] = SPECIAL_TOKENS,
    ):
        """`tokens` are in the order of their ids.

        Raises ValueError: when the tokens cannot encode every text.
        """
        # The id of a token is its rank. The encoder applies the merge of the lowest rank first, as training did.
        # With the merges 256 = l o, 257 = e r, 258 = lo w, the word "lower" becomes the ids 258, 257:
        #
        #     l o w e r  ->  lo w e r  ->  lo w er  ->  low er
        ranks = {token: rank for rank, token in enumerate(tokens)}
        if len(ranks) != len(tokens) or len(set(special_tokens)) != len(special_tokens):
            raise ValueError("a token occurs twice")
        if not all(bytes([value]) in ranks for value in range(256)):
            raise ValueError("not all of the 256 bytes are tokens")
        self.pattern = pattern
        self.tokens = list(tokens)
        # The special tokens come last. The ids of text stay the same when another special token is added.
        self.special_ids = {name: len(tokens) + index for index, name in enumerate(special_tokens)}
        self.vocab_size = len(tokens) + len(special_tokens)
        self.token_texts = [*tokens, *[b""] * len(special_tokens)]
        # Any special token ends a reply, except the two marks of a call. The others end the message or the document, or
        # only the user, the system or the tool may write them.
        calls = {"<|python_start|>", "<|python_end|>"}
        self.stop_ids = frozenset(index for name, index in self.special_ids.items() if name not in calls)
        self.reply_ends = tuple(self.special_ids[name] for name in ("<|assistant_end|>",) if name in self.special_ids)
        self.text_end = self.special_ids.get("<|bos|>", -1)
        self._encoding = tiktoken.Encoding(
            name="nanochat", pat_str=pattern, mergeable_ranks=ranks, special_tokens=self.special_ids
        )

    def with_chat_template(self, source: str, file: str) -> "Tokenizer":
        """The same vocabulary with the chat template `source`, which was read from `file`.

        Raises UserError: our own tokenizer has no template; of another family's, when it cannot be used.
        """
        raise UserError(f"--chat_template {file} is for imported models; conversation.py has the format of this one")

    # ---------------------------------------------------------------------- train, save, load

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learn the merges from a stream of texts, on all cores. The result does not depend on the number of cores.

        `vocab_size` includes the special tokens. Text with too few different pairs gives a smaller vocabulary: compare
        `.vocab_size` with what you requested.

        Raises UserError: when vocab_size has no room for the bytes and the special tokens, or there is no text.
        """
        import rustbpe  # only training needs it

        # Byte-pair encoding starts with every text as bytes. It counts the pairs of neighbours, turns the most frequent
        # pair into one new token, and repeats that until the vocabulary is full:
        #
        #     "the other"     t h e _ o t h e r      (_ is the space)
        #     merge t h       th e _ o th e r
        #     merge th e      the _ o the r
        #
        # Frequent words end up as one token, rare ones as several. A larger vocabulary makes sequences shorter, and
        # the embedding and the output layer larger.
        smallest = 256 + len(SPECIAL_TOKENS)
        if vocab_size < smallest:
            raise UserError(
                f"--vocab_size {vocab_size} is too small: 256 bytes and {len(SPECIAL_TOKENS)} special tokens "
                f"need at least {smallest}"
            )
        characters = 0

        # The trainer reads a stream: the text never has to fit in memory.
        def pieces() -> Iterator[str]:
            nonlocal characters
            for text in texts:
                characters += len(text)
                yield from _cut_long_runs(replace_surrogates(text))

        trainer = rustbpe.Tokenizer()  # pyright: ignore[reportAttributeAccessIssue] (it ships no types)
        trainer.train_from_iterator(pieces(), vocab_size - len(SPECIAL_TOKENS), buffer_size=8192, pattern=SPLIT_PATTERN)
        if characters == 0:
            raise UserError("there is no text to train a tokenizer on: check --data")
        ranked = sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])
        return cls([bytes(token) for token, _ in ranked])

    def shrink(self, vocab_size: int) -> "Tokenizer":
        """The tokenizer of the first merges, equal to one that was trained for fewer tokens."""
        # Training is greedy: no merge depends on a later one. So one long training gives every smaller vocabulary.
        return Tokenizer(self.tokens[: vocab_size - len(self.special_ids)], self.pattern, list(self.special_ids))

    def save(self, folder: str | Path, name: str = FILE_NAME) -> Path:
        """Write `folder/tokenizer.json`, completely or not at all."""
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"version": self.format_version, "sha256": self.fingerprint(), **self._definition()}
        # Write another file and rename it: a rename is atomic, so a kill never leaves half a tokenizer.
        unfinished = path.with_name(f"{name}.{os.getpid()}.tmp")
        with unfinished.open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=self.indent)
            file.flush()
            os.fsync(file.fileno())
        return unfinished.replace(path)

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """Read and verify `folder/tokenizer.json`, or EXPORTED_NAME where it exists.

        Raises UserError: when the file is missing, damaged, or of another format version.
        """
        path = Path(folder) / EXPORTED_NAME
        if not path.exists():
            path = Path(folder) / FILE_NAME
        try:
            content = read_json(path, **MAX_FILE)
            if "model" in content or "tokenizer" in content:  # another family: our files have neither
                return rooms.find("folders", "huggingface").tokenizer(path, content)
            if content["version"] != cls.format_version:
                raise ValueError(f"it has format version {content['version']}, this code reads {cls.format_version}")
            tokens = [base64.b64decode(token, validate=True) for token in content["merges"]]
            # The file defines the split pattern and the special tokens. Today's code may have others.
            tokenizer = cls(tokens, content["pattern"], content["special_tokens"])
            if tokenizer.fingerprint() != content["sha256"]:
                raise ValueError("its content does not match its sha256")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UserError(
                f"there is no tokenizer at {path}: copy the one of the model there, or {TRAIN_AGAIN}"
            ) from error
        except UserError:  # the room's own message
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} cannot be used ({str(error)[:500]}): restore it or {TRAIN_AGAIN}") from error
        return tokenizer

    def fingerprint(self) -> str:
        """sha256 of everything that defines the ids: equal fingerprints mean equal ids for every text."""
        # Every checkpoint stores it. With another tokenizer a model reads and writes nonsense, without any error.
        return hashlib.sha256(json.dumps(self._definition(), sort_keys=True).encode()).hexdigest()

    def _definition(self) -> dict[str, Any]:
        return {
            "pattern": self.pattern,
            "special_tokens": list(self.special_ids),
            "merges": [base64.b64encode(token).decode() for token in self.tokens],  # in the order of their ids
        }

    # ---------------------------------------------------------------------- encode, decode

    def encode(self, text: str, prepend: int | str | None = None, append: int | str | None = None) -> list[int]:
        """Token ids of a text; `prepend` and `append` are special tokens, by id or by name."""
        ids = [] if prepend is None else [self._special_id(prepend)]
        for piece in _cut_long_runs(replace_surrogates(text)):
            # This splits the piece by the pattern and merges within each part. "Ordinary" means without special tokens:
            # the encoder spells out a special token's name in the text.
            ids += self._encoding.encode_ordinary(piece)
        if append is not None:
            ids.append(self._special_id(append))
        return ids

    def encode_continuation(self, text: str) -> list[int]:
        """Token ids of a text that follows other text."""
        return self.encode(text)  # some families put a space before a text, but not here

    def encode_batch(
        self, texts: Sequence[str], prepend: int | str | None = None, num_threads: int = 1
    ) -> list[list[int]]:
        """`encode` of each text, on `num_threads` threads."""
        if num_threads <= 1:
            return [self.encode(text, prepend) for text in texts]
        # tiktoken releases the interpreter's lock, so the threads run in parallel.
        with ThreadPoolExecutor(num_threads) as threads:
            return list(threads.map(lambda text: self.encode(text, prepend), texts))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; a special token gives its name."""
        # A token may end inside a character of several bytes, such as a Chinese one. Half a character becomes U+FFFD
        # here, so code that streams joins the bytes first.
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The exact bytes of the ids, for output that streams token by token."""
        return self._encoding.decode_bytes(list(ids))

    # ---------------------------------------------------------------------- special tokens, byte counts

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
        """Bytes of text per id, 0 for special tokens."""
        # Bits per byte need this: the loss per byte of text. A loss per token cannot compare two vocabularies, because
        # the larger one has fewer tokens, each of which is harder to predict.
        return [len(token) for token in self.tokens] + [0] * len(self.special_ids)


def bytes_per_token(encode: Callable[[str], list[int]], texts: Iterable[str]) -> float:
    """UTF-8 bytes per token over all texts together."""
    # It measures how well a vocabulary compresses. More bytes per token put more text into a training step and into a
    # context.
    texts = [replace_surrogates(text) for text in texts]
    return sum(len(text.encode()) for text in texts) / max(1, sum(len(encode(text)) for text in texts))


# ---------------------------------------------------------------------- text that breaks encoders

RUN_BLOCK = 512  # characters
_LETTER_DIGIT_OR_SPACE = re.compile(r"[^\W_]|\s")


def _cut_long_runs(text: str) -> list[str]:
    """Cut the text inside long runs of letters, of white space, or of marks."""
    # The split pattern takes such a run as one piece. From about 100,000 spaces on, the regex engine overflows its
    # stack, and the merge loop of older tiktoken is quadratic in a piece. A cut after each aligned block of 512
    # characters of one kind keeps every piece under 1,024 characters. A text without such a block keeps its ids.
    pieces = []
    begin = 0
    for end in range(RUN_BLOCK, len(text), RUN_BLOCK):
        block = text[end - RUN_BLOCK : end]
        if block.isalpha() or block.isspace() or not _LETTER_DIGIT_OR_SPACE.search(block):
            pieces.append(text[begin:end])
            begin = end
    pieces.append(text[begin:])
    return pieces


def replace_surrogates(text: str) -> str:
    """The text as UTF-8 can hold it: surrogate pairs are joined, lone surrogates become U+FFFD."""
    # Surrogates are halves of characters in UTF-16. JSON such as "\\ud83d" puts them into Python strings.
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
