"""A tokenizer for models with random weights: for measurements that need no training."""

from nanochat.ground.cli import UserError
from nanochat.tokenizer import Tokenizer


def random_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer of `vocab_size` tokens: the bytes, then numbers as words, then the special tokens.

    Raises UserError: when bytes and special tokens are more than that.
    """
    words = [bytes([value]) for value in range(256)]
    least = 256 + len(Tokenizer(words).special_ids)
    if vocab_size < least:
        raise UserError(f"--vocab_size {vocab_size}: at least {least}, for bytes and special tokens")
    words += [b"%d " % number for number in range(vocab_size - least)]
    return Tokenizer(words)
