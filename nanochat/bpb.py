"""Bits per byte on held-out text: a loss that is comparable between tokenizers of any vocabulary.

The validation text is packed as in training (loader.py): every row begins with a begin token, and every token has as
much text before it as there. The model predicts each token once. The result is the nats of all tokens that represent
text, divided by the bytes of that text.

Legend: N rows, T tokens, V vocab.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat.cross_entropy import IGNORE
from nanochat.device import Device
from nanochat.ground.cli import Interrupted
from nanochat.ground.corpus import Corpus
from nanochat.ground.screen import track
from nanochat.loader import BUFFER_DOCUMENTS, BUFFER_ROWS, segments_of, take_best_fit, tokenize
from nanochat.ranks import sum_over_ranks
from nanochat.tokenizer import Tokenizer


def validation_rows(corpus: Corpus, tokenizer: Tokenizer, row_tokens: int, max_tokens: int) -> Tensor:
    """The first documents of a corpus, packed by best fit into rows (N, T + 1) of int64: as many rows as hold
    `max_tokens` targets, or all of a shorter corpus, and then IGNORE fills up the last one."""
    count = max(1, math.ceil(max_tokens / row_tokens))
    rows = np.full((count, row_tokens + 1), IGNORE, np.int64)
    blocks = corpus.block_count()
    block = 0
    waiting: list[np.ndarray] = []  # documents, shortest first
    for filled, row in enumerate(rows):
        used = 0
        while used < len(row):
            # Best fit chooses among as many documents as in the loader.
            while len(waiting) < BUFFER_DOCUMENTS and sum(map(len, waiting)) < BUFFER_ROWS * len(row):
                if block == blocks:
                    break
                waiting = sorted([*waiting, *tokenize(corpus.read_block(block), tokenizer)], key=len)
                block += 1
            if not waiting:
                return torch.from_numpy(rows[: filled + (used > 0)])
            document = take_best_fit(waiting, len(row) - used, tokenizer.get_bos_token_id())
            row[used : used + len(document)] = document
            used += len(document)
    return torch.from_numpy(rows)


@torch.no_grad()  # not inference_mode: the weights that a sharded model gathers here need gradients afterwards
def bits_per_byte(
    model: Any,
    rows: Tensor,
    token_bytes: Tensor,
    batch_rows: int,
    device: Device,
    should_stop: Callable[[], bool] | None = None,
    document_mask: bool = False,
) -> float:
    """Mean bits per byte over rows (N, T + 1), shared out over the ranks; the same on every rank.

    `token_bytes` (V,) counts each token's bytes of text, 0 for special tokens, whose prediction is left out.
    With `document_mask` the documents of a row do not attend to each other. `should_stop` is called before each batch.
    Raises Interrupted: on every rank, when it is true on any of them.
    """
    totals = torch.zeros(3, dtype=torch.float32, device=device.torch_device)  # nats, bytes, ranks that stopped
    bytes_of = token_bytes.to(device.torch_device)
    mine = rows[device.data_rank :: device.data_ranks]
    # Every rank runs equally many batches: a sharded model gathers its weights from all ranks in each of them.
    rows_per_rank = math.ceil(len(rows) / device.data_ranks)
    for first in track(range(0, rows_per_rank, batch_rows), "evaluation"):
        if should_stop is not None and should_stop():
            totals[2] = 1
            break
        batch = mine[first : first + batch_rows]
        missing = batch_rows - len(batch)
        batch = F.pad(batch, (0, 0, 0, missing), value=IGNORE)  # one shape, compiled once
        segments = None
        if document_mask:
            bos = int(rows[0, 0])  # every row begins with it
            segments = segments_of(batch[:, :-1], bos).to(device.to_device)
        batch = device.to_device(batch)
        inputs = batch[:, :-1].clamp(min=0)  # (B, T): IGNORE is not a token
        targets = batch[:, 1:]  # (B, T)
        target_bytes = torch.where(targets == IGNORE, 0, bytes_of[targets.clamp(min=0)])
        losses = model(inputs, targets, segments=segments, reduction="none")  # (B, T)
        nats = (losses * (target_bytes > 0)).sum()
        totals[:2] += torch.stack((nats, target_bytes.sum().float()))
    nats, text_bytes, stopped = sum_over_ranks(totals, device).tolist()
    if stopped:
        raise Interrupted
    if not text_bytes:
        return math.nan
    return nats / (math.log(2) * text_bytes)
