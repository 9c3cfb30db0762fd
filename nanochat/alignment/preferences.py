"""Preferences: examples with a better and a worse reply, or a reply with a label, in; micro-batches for losses.py out.

    1. draw       an example's replies as tokens                                   `draw_replies`
    2. pack       both replies of a pair into one micro-batch, or single replies   `pair_batches`, `judged_batches`
    3. compare    the log probabilities of a frozen reference model are added      `compared`
    4. learn      PAIR_LOSSES in losses.py

Legend: R replies, N rows, T tokens a row.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from nanochat.conversation import Rendered
from nanochat.device import Device
from nanochat.log import warn
from nanochat.losses import JudgedBatch, PairBatch, gain_sum, reply_logp
from nanochat.mixture import JudgedReply, Mixture, is_learned
from nanochat.packing import PackedBatch, pack_pairs, pack_sequences
from nanochat.tokenizer import Tokenizer
from nanochat.train import mean_loss

Replies = Sequence[JudgedReply]  # to one question: a chosen one and a rejected one, or one alone
Batch = TypeVar("Batch", bound=PairBatch | JudgedBatch)


def draw_replies(mixture: Mixture, tokenizer: Tokenizer, numbers: range, max_tokens: int) -> list[Replies]:
    """The replies of examples by number, the same on every rank, without the examples that have nothing to prefer: a
    reply is empty, or both of a pair are the same as far as `max_tokens` reach."""
    examples = [mixture.rendered_replies(tokenizer, number, max_tokens) for number in numbers]
    return [replies for replies in examples if is_learned(*(reply.rendered for reply in replies))]


def report_first(examples: Sequence[Replies], row_tokens: int) -> None:
    """Warn of what a run's first examples show of its data: replies that the context cuts off, labels all the same."""
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
        device, device.rank, device.world_size,
    ):  # fmt: skip
        yield PairBatch(micro, pairs)


def judged_batches(examples: Iterable[Replies], row_tokens: int, rows: int, device: Device) -> Iterator[JudgedBatch]:
    """This rank's share of single replies, in micro-batches of at most `rows` rows; pairs are taken apart."""
    replies = [reply for replies in examples for reply in replies]
    ids = [reply.rendered.ids for reply in replies]
    masks = [reply.rendered.mask for reply in replies]
    is_good = device.to_device(torch.tensor([reply.is_good for reply in replies], dtype=torch.bool))
    packed = pack_sequences(ids, masks, row_tokens, device.world_size)
    for micro in packed.micro_batches(rows, device, device.rank, device.world_size):
        yield JudgedBatch(micro, is_good)


def compared(batches: Iterable[Batch], reference: Any) -> Iterator[Batch]:
    """Micro-batches with the log probabilities of the reference model, which may be compiled; None: as they are."""
    for batch in batches:
        yield batch if reference is None else with_reference(batch, reference)


@torch.no_grad()
def with_reference(batch: Batch, reference: Any) -> Batch:
    return replace(batch, reference_logp=reply_logp(reference, batch))


def of_full_rows(rows: PackedBatch, is_unpaired: bool, reference: Any) -> Batch:
    """The micro-batch of --dry_run: a reply in each of these rows."""
    count = rows.inputs.size(0)
    if is_unpaired:
        batch: Batch = JudgedBatch(rows, torch.ones(count, dtype=torch.bool, device=rows.inputs.device))
    else:
        batch = PairBatch(rows, count // 2)
    return batch if reference is None else with_reference(batch, reference)


def kl_baseline(
    model: Any, reference: Any, examples: Sequence[Replies], row_tokens: int, rows: int, device: Device
) -> float:
    """KTO's baseline, in nats a reply over all ranks: how far the model is from its reference.

    It is the mean gain of replies to other questions than their own, which the losses do not push up or down. All of a
    step's replies have the same, however they are cut into micro-batches. It costs a forward pass of both models.
    """
    mismatched = to_other_questions([reply for replies in examples for reply in replies], row_tokens + 1)
    batches = judged_batches([mismatched], row_tokens, rows, device)
    mean = mean_loss(model, compared(batches, reference), gain_sum, device)
    # A KL divergence is not negative. The mean of a few replies may be, and is NaN without any.
    return mean if mean > 0 else 0.0


def to_other_questions(replies: Replies, max_tokens: int) -> list[JudgedReply]:
    """Each reply's question, answered with the next reply to another one."""
    firsts = [reply.rendered.mask.index(1) for reply in replies]  # the first token that is learned
    questions = [tuple(reply.rendered.ids[:first]) for reply, first in zip(replies, firsts, strict=True)]
    mismatched = []
    for number, question in enumerate(questions):
        # The replies to one question are neighbours.
        later = ((number + step) % len(replies) for step in range(1, len(replies)))
        other = next((other for other in later if questions[other] != question), None)
        if other is not None:
            reply = replies[other].rendered
            ids = [*question, *reply.ids[firsts[other] :]]
            mask = [0] * len(question) + reply.mask[firsts[other] :]
            rendered = Rendered(ids[:max_tokens], mask[:max_tokens], cut=len(ids) > max_tokens)
            mismatched.append(JudgedReply(rendered, replies[other].is_good))
    return mismatched
