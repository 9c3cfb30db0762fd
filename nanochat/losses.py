"""The loss functions of the chat stages, for `train_step`: each returns the sum of its losses and its denominator.

SFT: cross-entropy of what the assistant said. RL: policy-gradient losses of samples with advantages. These differ in
how far a probability may move from where it was sampled (the clip) and in what the mean is taken over:

    reinforce  -A log p                          mean over a sample's tokens, then over samples
    grpo       clipped on both sides, KL penalty the same            (Shao et al. 2024, DeepSeekMath)
    dapo       the upper clip is wider           mean over all tokens (Yu et al. 2025, DAPO)
    dr_grpo    clipped on both sides             sum over a sample's tokens / a constant, mean over samples
                                                 (Liu et al. 2025, Understanding R1-Zero-Like Training)

Legend: N rows, T tokens a row, S samples.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanochat.cross_entropy import IGNORE
from nanochat.packing import Rows


def masked_loss(model: Any, rows: Rows) -> tuple[Tensor, Tensor]:
    """Supervised fine-tuning: nats of the targets that the mask left."""
    return model(rows.inputs, rows.targets, segments=rows.segments), (rows.targets != IGNORE).sum()


@dataclass(frozen=True)
class PolicyBatch:
    """Packed samples of a policy, all (N, T), 0 where there is no target."""

    rows: Rows
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


def token_logp(model: Any, rows: Rows) -> Tensor:
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
