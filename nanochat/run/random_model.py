"""Models with random weights and a tokenizer for them: for measurements and checks that need no training."""

import torch

from nanochat.cli import UserError
from nanochat.gpt import GPT
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


def add_noise(model: GPT, seed: int) -> torch.Generator:
    """Add noise to every weight of a model on the host; returns the generator, to draw further values.

    A new model's output projections are zeros: gradients could not pass through them, and no layer would change a
    logit.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * (0.5 / model.config.width**0.5)
    return generator
