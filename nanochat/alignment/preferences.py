"""Preferences: turn examples with a better and a worse reply, or a labelled reply, into micro-batches for losses.py.

1. draw       an example's replies as tokens                                   `draw_replies`
2. pack       both replies of a pair into one micro-batch, or single replies   `pair_batches`, kto.py
3. compare    add the log probabilities of a frozen reference model            `compared`
4. learn      PAIR_LOSSES in losses.py
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from nanochat.device import Device
from nanochat.log import warn
from nanochat.losses import PairBatch, reply_logp
from nanochat.mixture import JudgedReply, Mixture, is_learned
from nanochat.packing import pack_pairs
from nanochat.tokenizer import Tokenizer

Replies = Sequence[JudgedReply]  # replies to one question: a chosen and a rejected one, or a single one
Batch = TypeVar("Batch")  # PairBatch, or another batch with `reference_logp`


def draw_replies(mixture: Mixture, tokenizer: Tokenizer, numbers: range, max_tokens: int) -> list[Replies]:
    """The replies of examples by number, the same on every rank.

    Examples with nothing to prefer are left out: a reply is empty, or both replies agree in their first `max_tokens`.
    """
    examples = [mixture.rendered_replies(tokenizer, number, max_tokens) for number in numbers]
    return [replies for replies in examples if is_learned(*(reply.rendered for reply in replies))]


def report_first(examples: Sequence[Replies], row_tokens: int) -> None:
    """Warn about the data if the context cuts off replies of a run's first examples, or all their labels are equal."""
    replies = [reply for each in examples for reply in each]
    cut = len([reply for reply in replies if reply.rendered.cut])
    if cut:
        warn(
            f"{cut} of the first {len(replies)} replies are cut off at the context of {row_tokens} tokens: "
            "they are compared without their ends; shorten them, or use a larger --max_seq_len"
        )
    if replies and len({reply.is_good for reply in replies}) == 1:
        label = "good" if replies[0].is_good else "bad"
        warn(f"the first {len(replies)} replies are all labelled {label}: nothing to compare them with")


def token_count(examples: Iterable[Replies]) -> int:
    return sum(len(reply.rendered.ids) for replies in examples for reply in replies)


def pair_batches(examples: Iterable[Replies], row_tokens: int, rows: int, device: Device) -> Iterator[PairBatch]:
    """This rank's share of pairs, in micro-batches of `rows` rows."""
    replies = [reply.rendered for pair in examples for reply in pair]
    for micro, pairs in pack_pairs(
        [reply.ids for reply in replies], [reply.mask for reply in replies], row_tokens, rows,
        device, device.data_rank, device.data_ranks,
    ):  # fmt: skip
        yield PairBatch(micro, pairs)


def compared(batches: Iterable[Batch], reference: Any) -> Iterator[Batch]:
    """Micro-batches with the log probabilities of the reference model, which may be compiled; None: unchanged."""
    for batch in batches:
        yield with_reference(batch, reference)


@torch.no_grad()
def with_reference(batch: Any, reference: Any) -> Any:
    return batch if reference is None else replace(batch, reference_logp=reply_logp(reference, batch))
