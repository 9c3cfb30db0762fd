"""The loss functions of the chat stages, for `train_step`: each returns the sum of its losses and its denominator.

SFT: cross-entropy of what the assistant said. RL: policy-gradient losses of samples with advantages. These differ in
how far a probability may move from where it was sampled (the clip) and in what the mean is taken over:

    reinforce  -A log p                          mean over a sample's tokens, then over samples
    grpo       clipped on both sides, KL penalty the same            (Shao et al. 2024, DeepSeekMath)
    dapo       the upper clip is wider           mean over all tokens (Yu et al. 2025, DAPO)
    dr_grpo    clipped on both sides             sum over a sample's tokens / a constant, mean over samples
                                                 (Liu et al. 2025, Understanding R1-Zero-Like Training)

DPO: how much more likely than under a frozen reference model the better of two replies became than the worse one.

    dpo        logistic loss of log probabilities, summed over a reply   (Rafailov et al. 2023, DPO)
    ipo        squared distance of their means from a margin             (Azar et al. 2023, A General Theoretical
                                                                         Paradigm to Understand Learning from Human
                                                                         Preferences)

Legend: N rows, T tokens a row, S samples, P pairs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanochat.cross_entropy import IGNORE
from nanochat.data.packing import PackedBatch

PAIR_FIGURES = ("pairs", "accuracy", "margin", "chosen_reward", "rejected_reward")


def masked_loss(model: Any, rows: PackedBatch) -> tuple[Tensor, Tensor]:
    """Supervised fine-tuning: nats of the targets that the mask left."""
    return model(rows.inputs, rows.targets, segments=rows.segments), (rows.targets != IGNORE).sum()


@dataclass(frozen=True)
class PolicyBatch:
    """Packed samples of a policy, all (N, T), 0 where there is no target."""

    rows: PackedBatch
    advantages: Tensor  # of the sample that a target belongs to
    sample_share: Tensor  # 1 / targets of that sample: they sum to 1 over a sample
    old_logp: Tensor | None = None  # log probabilities when the samples were drawn; None: they are the present ones
    reference_logp: Tensor | None = None  # of the frozen reference model, for the KL penalty


def reinforce_loss(model: Any, batch: PolicyBatch) -> tuple[Tensor, Tensor]:
    """Williams 1992: the log probability of each token, weighed by its sample's advantage."""
    objective = batch.advantages * token_logp(model, batch.rows)
    return -(objective * batch.sample_share).sum(), batch.sample_share.sum()


def grpo_loss(
    model: Any, batch: PolicyBatch, clip_low: float = 0.2, clip_high: float = 0.2, kl: float = 0.0
) -> tuple[Tensor, Tensor]:
    logp = token_logp(model, batch.rows)
    objective = clipped_objective(logp, batch, clip_low, clip_high)
    if kl:
        assert batch.reference_logp is not None
        objective = objective - kl * kl_estimate(logp, batch.reference_logp)
    return -(objective * batch.sample_share).sum(), batch.sample_share.sum()


def dapo_loss(model: Any, batch: PolicyBatch, clip_low: float = 0.2, clip_high: float = 0.28) -> tuple[Tensor, Tensor]:
    objective = clipped_objective(token_logp(model, batch.rows), batch, clip_low, clip_high)
    targets = batch.rows.targets != IGNORE
    return -(objective * targets).sum(), targets.sum()


def dr_grpo_loss(
    model: Any, batch: PolicyBatch, max_tokens: int, clip_low: float = 0.2, clip_high: float = 0.2
) -> tuple[Tensor, Tensor]:
    """`max_tokens`, the most a sample may have, is the constant in place of each sample's own length."""
    objective = clipped_objective(token_logp(model, batch.rows), batch, clip_low, clip_high)
    targets = batch.rows.targets != IGNORE
    return -(objective * targets).sum() / max_tokens, batch.sample_share.sum()


def token_logp(model: Any, rows: PackedBatch) -> Tensor:
    """Log probability in nats of each target, (N, T), 0 where there is none."""
    return -model.losses(rows.inputs, rows.targets, rows.segments)


def clipped_objective(logp: Tensor, batch: PolicyBatch, clip_low: float, clip_high: float) -> Tensor:
    """min(r A, clip(r, 1 - low, 1 + high) A) with r = p / p_old (source: Schulman et al. 2017, PPO)."""
    old = logp.detach() if batch.old_logp is None else batch.old_logp
    ratio = torch.exp(logp - old)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.minimum(ratio * batch.advantages, clipped * batch.advantages)


def kl_estimate(logp: Tensor, reference_logp: Tensor) -> Tensor:
    """A non-negative, unbiased estimate of KL(policy || reference) at each sampled token: q/p - 1 - log(q/p)
    (source: Schulman 2020, Approximating KL divergence)."""
    difference = reference_logp - logp
    return torch.expm1(difference) - difference


@dataclass(frozen=True)
class PairBatch:
    """Packed pairs of replies: sequence 2p is the chosen one of pair p, 2p + 1 the rejected one. A pair is counted
    where both have a target."""

    rows: PackedBatch
    pairs: int
    reference_logp: Tensor | None = None  # (P, 2), of each reply's targets together, under the frozen reference model


def dpo_loss(
    model: Any,
    batch: PairBatch,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    sft_weight: float = 0.0,
    figures: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """-log sigmoid(beta x (gain of the chosen reply - gain of the rejected one)), a gain being log p - log p_reference.

    `label_smoothing` is the share of pairs taken to be the wrong way round (source: Mitchell 2023, conservative DPO).
    `sft_weight` adds the chosen reply's mean cross-entropy (source: Pang et al. 2024, Iterative RPO). To `figures`
    (5,) the sums of PAIR_FIGURES are added; a reply's reward is beta x its gain, a tie counts half as accurate."""
    logp = reply_logp(model, batch)
    assert batch.reference_logp is not None
    rewards = beta * (logp - batch.reference_logp)  # (P, 2)
    margin = rewards[:, 0] - rewards[:, 1]
    right, wrong = (torch.nn.functional.logsigmoid(sign * margin) for sign in (1, -1))
    losses = -(1 - label_smoothing) * right - label_smoothing * wrong
    return _of_pairs(losses, rewards, logp, batch, sft_weight, figures)


def ipo_loss(
    model: Any, batch: PairBatch, beta: float = 0.1, sft_weight: float = 0.0, figures: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(difference of the gains - 1 / (2 beta))^2; a gain, and so the rewards in `figures`, is a mean over the reply's
    tokens here, or long replies would be far from any margin."""
    logp = reply_logp(model, batch)
    assert batch.reference_logp is not None
    gains = (logp - batch.reference_logp) / reply_targets(batch).clamp(min=1)  # (P, 2)
    losses = (gains[:, 0] - gains[:, 1] - 1 / (2 * beta)).square()
    return _of_pairs(losses, beta * gains, logp, batch, sft_weight, figures)


def _of_pairs(
    losses: Tensor, rewards: Tensor, logp: Tensor, batch: PairBatch, sft_weight: float, figures: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The sum over the pairs that count, and their number. losses (P,), rewards and logp (P, 2)."""
    targets = reply_targets(batch)
    counts = (targets.amin(dim=1) > 0).float()  # (P,)
    if sft_weight:
        losses = losses - sft_weight * logp[:, 0] / targets[:, 0].clamp(min=1)
    if figures is not None:
        chosen, rejected = rewards.detach().unbind(dim=1)
        accurate = (torch.sign(chosen - rejected) + 1) / 2
        figures += (counts * torch.stack((counts, accurate, chosen - rejected, chosen, rejected))).sum(dim=1)
    return (losses * counts).sum(), counts.sum()


def reply_logp(model: Any, batch: PairBatch) -> Tensor:
    """Log probability in nats of each reply's targets together, (P, 2)."""
    return _by_reply(token_logp(model, batch.rows), batch)


def reply_targets(batch: PairBatch) -> Tensor:
    """How many targets each reply has, (P, 2)."""
    return _by_reply((batch.rows.targets != IGNORE).float(), batch)


def _by_reply(values: Tensor, batch: PairBatch) -> Tensor:
    """Sums (P, 2) of values (N, T) that are 0 where there is no target. In a fixed order, as index_add's is not."""
    numbers = torch.arange(2 * batch.pairs, device=values.device)
    own = batch.rows.source == numbers[:, None, None]  # (2P, N, T)
    return torch.where(own, values, 0.0).sum(dim=(1, 2)).view(-1, 2)
