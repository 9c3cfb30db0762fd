"""Bits per byte on held-out text: a loss that tokenizers of any vocabulary can be compared by.

The validation text is laid out as one stream, a begin token before each document, and cut into rows; each
token is predicted once. The nats of all tokens that stand for text are divided by that text's bytes.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanochat.cross_entropy import IGNORE
from nanochat.data.loader import Documents, tokenize
from nanochat.device import Device
from nanochat.parallel.collectives import sum_over_ranks
from nanochat.shell.cli import Interrupted
from nanochat.tokenizer import Tokenizer


def validation_rows(corpus: Documents, tokenizer: Tokenizer, row_tokens: int, max_tokens: int) -> Tensor:
    """The first `max_tokens` tokens of a corpus as rows (N, T + 1) of int64; each row begins with the last token
    of the row before it, and IGNORE fills up the last one."""
    tokens: list[int] = []
    blocks = corpus.block_count()
    block = 0
    while len(tokens) <= max_tokens and (blocks is None or block < blocks):
        for document in tokenize(corpus.read_block(block), tokenizer):
            tokens += document.tolist()
        block += 1
    tokens = tokens[: max_tokens + 1]
    rows = max(1, math.ceil((len(tokens) - 1) / row_tokens))
    padded = np.full(rows * row_tokens + 1, IGNORE, dtype=np.int64)
    padded[: len(tokens)] = tokens
    return torch.from_numpy(np.lib.stride_tricks.sliding_window_view(padded, row_tokens + 1)[::row_tokens].copy())


@torch.no_grad()  # not inference_mode: what a sharded model gathers here it will want gradients of
def bits_per_byte(
    model: Any,
    rows: Tensor,
    token_bytes: Tensor,
    batch_rows: int,
    device: Device,
    should_stop: Callable[[], bool] | None = None,
) -> float:
    """Mean bits a byte over rows (N, T + 1), shared out over the ranks; the same on every rank.

    `token_bytes` (V,) counts each token's bytes of text, 0 for special tokens, whose prediction is left out.
    `should_stop` says, before a batch, whether to break off.
    Raises Interrupted: on every rank, when any of them broke off.
    """
    totals = torch.zeros(3, dtype=torch.float32, device=device.torch_device)  # nats, bytes, ranks that broke off
    weights = token_bytes.to(device.torch_device)
    mine = rows[device.rank :: device.world_size]
    for first in range(0, -(-len(rows) // device.world_size), batch_rows):  # equally often on every rank
        batch = mine[first : first + batch_rows]
        if should_stop is not None and should_stop():
            totals[2] = 1
            break
        missing = batch_rows - len(batch)
        batch = torch.nn.functional.pad(batch, (0, 0, 0, missing), value=IGNORE)  # one shape for all
        batch = device.to_device(batch)
        targets = batch[:, 1:]
        sizes = torch.where(targets == IGNORE, 0, weights[targets.clamp(min=0)])
        with device.autocast():
            losses = model.losses(batch[:, :-1].clamp(min=0), targets)
        totals[:2] += torch.stack(((losses * (sizes > 0)).sum(), sizes.sum().float()))
    nats, text_bytes, broken_off = sum_over_ranks(totals, device).tolist()
    if broken_off:
        raise Interrupted
    return nats / (math.log(2) * text_bytes) if text_bytes else math.nan
