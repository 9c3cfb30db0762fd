"""KTO: preferences from single replies, good or bad, for data without pairs (`chat_dpo --loss kto`).

g(y) = log p(y) - log q(y) is the gain of a reply over the reference model q, s the sigmoid, and z the baseline that all
replies of a step share:

    kto     1 - s(beta (g(y) - z)) if good, 1 - s(beta (z - g(y))) if bad    beta 0.1

Example: a good reply has a gain of ln 2 and a bad one -ln 2, at z = 0. Each loss is 1 - s(0.1 ln 2), 0.965 together.

Legend: R replies.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanochat.alignment.preferences import Replies, compared
from nanochat.conversation import Rendered
from nanochat.device import Device
from nanochat.losses import PairLoss, reply_logp, reply_targets
from nanochat.mixture import JudgedReply
from nanochat.packing import PackedBatch, pack_sequences
from nanochat.train import mean_loss


@dataclass(frozen=True)
class JudgedBatch:
    """Packed replies, each good or bad. A micro-batch holds some of the R replies of a step: only replies with a target
    in it count."""

    rows: PackedBatch
    is_good: Tensor  # (R,), bool
    reference_logp: Tensor | None = None  # (R,): sum over a reply's targets, under the frozen reference model

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.is_good.shape)


def kto_loss(
    model: Any,
    batch: JudgedBatch,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    baseline: float = 0.0,
    stats: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """1 - sigmoid(beta x (gain - baseline)) of a good reply, 1 - sigmoid(beta x (baseline - gain)) of a bad one.

    The weights multiply the losses. Choose them so that weight times number is about equal for good and bad replies.
    All replies of a step have the same baseline, in nats per reply (`kl_baseline`). In `stats` "chosen" means good, and
    a reply is accurate if its gain is on the right side of the baseline.
    """
    logp = reply_logp(model, batch)
    assert batch.reference_logp is not None
    gains = logp - batch.reference_logp  # (R,)
    # People judge a result relative to a reference point, and further gains matter less and less to them (the prospect
    # theory of Kahneman and Tversky). The sigmoid models this value. The reference point is the general movement of the
    # model: the mean gain of replies to other questions, an estimate of the KL divergence.
    #
    #     beta (gain - baseline) = +3    good: 1 - 0.95 = 0.05, learned: hardly a gradient
    #                              -3    good: 1 - 0.05 = 0.95, out of reach: hardly a gradient either
    #
    # DPO lacks the second case: with KTO the pull of a wrong label does not grow without end.
    side = torch.where(batch.is_good, 1.0, -1.0)
    weight = torch.where(batch.is_good, desirable_weight, undesirable_weight)
    losses = weight * (1 - torch.sigmoid(beta * side * (gains - baseline)))
    counts = (reply_targets(batch) > 0).float()  # (R,)
    if stats is not None:
        good = counts * batch.is_good
        bad = counts - good
        rewards = beta * gains.detach()
        accurate = (torch.sign(side * (gains.detach() - baseline)) + 1) / 2  # 1, 0, or 0.5 for a tie
        stats += torch.stack((good, bad, counts * accurate, good * rewards, bad * rewards)).sum(dim=1)
    return (losses * counts).sum(), counts.sum()


def gain_sum(model: Any, batch: JudgedBatch) -> tuple[Tensor, Tensor]:
    """The sum of the replies' gains, and their number: over replies to other questions the mean is KTO's baseline."""
    assert batch.reference_logp is not None
    # The gain of a reply without a target is 0, so the sum needs no mask.
    gains = reply_logp(model, batch) - batch.reference_logp
    return gains.sum(), (reply_targets(batch) > 0).sum()


def judged_batches(examples: Iterable[Replies], row_tokens: int, rows: int, device: Device) -> Iterator[JudgedBatch]:
    """This rank's share of single replies, in micro-batches of at most `rows` rows; pairs are split."""
    replies = [reply for replies in examples for reply in replies]
    ids = [reply.rendered.ids for reply in replies]
    masks = [reply.rendered.mask for reply in replies]
    is_good = device.to_device(torch.tensor([reply.is_good for reply in replies], dtype=torch.bool))
    packed = pack_sequences(ids, masks, row_tokens, device.data_ranks)
    for micro in packed.micro_batches(rows, device, device.data_rank, device.data_ranks):
        yield JudgedBatch(micro, is_good)


def full_batch(rows: PackedBatch) -> JudgedBatch:
    """A micro-batch with a good reply in each row, for the memory of a dry run."""
    return JudgedBatch(rows, torch.ones(len(rows.inputs), dtype=torch.bool, device=rows.inputs.device))


def kl_baseline(
    model: Any, reference: Any, examples: Sequence[Replies], row_tokens: int, rows: int, device: Device
) -> float:
    """KTO's baseline, in nats per reply over all ranks: the distance of the model from its reference.

    It is the mean gain of mismatched replies, paired with other questions, which the losses push neither up nor down.
    All replies of a step share it, whatever their micro-batches. It costs a forward pass of both models.
    """
    mismatched = to_other_questions([reply for replies in examples for reply in replies], row_tokens + 1)
    batches = judged_batches([mismatched], row_tokens, rows, device)
    mean = mean_loss(model, compared(batches, reference), gain_sum, device)
    # A KL divergence is not negative. The mean of a few replies may be, and is NaN without any.
    return mean if mean > 0 else 0.0


def to_other_questions(replies: Replies, max_tokens: int) -> list[JudgedReply]:
    """Each reply's question, answered with the next reply that belongs to another question."""
    firsts = [reply.rendered.mask.index(1) for reply in replies]  # the first learned token
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


KTO = PairLoss(
    kto_loss, "Ethayarajh et al. 2024, KTO", has_reference=True, is_unpaired=True, batches=judged_batches,
    full_batch=full_batch, baseline=kl_baseline,
)  # fmt: skip
