"""Further methods of reinforcement learning, next to GRPO in losses.py: `chat_rl --loss` finds them by name.

    loss          a token's objective            weight of a token   divided by            A
    grpo          min(r A, clip(r) A)            1 / |o|             samples               group_deviation
    reinforce     A log p                        1 / |o|             samples               group_mean
    dr_grpo       min(r A, clip(r) A)            1 / max_tokens      samples               group_mean
    dapo          min(r A, clip(r) A)            1                   tokens of all samples group_deviation
    rloo          A log p                        1                   samples               leave_one_out
    gspo          min(s A, clip(s) A)            1 / |o|             samples               group_deviation
    cispo         clip(r) A log p                1                   tokens of all samples group_deviation
    ppo           min(r A, clip(r) A)            1                   tokens of all samples of each token: value.py
    distill       min(r A, clip(r) A)            1                   tokens of all samples log p_teacher - log p_old

losses.py explains the columns. s is the geometric mean of r over the sample; in cispo clip(r) is a constant. dapo.py
has what else DAPO changes.

The weights matter where lengths differ. Take one sample of 2 tokens and one of 8. With 1 / |o| each sample counts once:
a token of the short one weighs 1/2, a token of the long one 1/8. In dapo every token weighs 1/10 of the mean. The
constant max_tokens instead of |o| removes a bias: division by |o| makes each token of a long wrong reply cheap, so a
model learns to write long wrong replies.

Legend: N rows, T tokens a row.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from nanochat.alignment.advantages import leave_one_out, no_baseline
from nanochat.cross_entropy import IGNORE
from nanochat.losses import (
    PolicyBatch,
    PolicyLoss,
    clipped_objective,
    group_deviation,
    group_mean,
    over_samples,
    token_ratio,
)
from nanochat.packing import PackedBatch


def sample_ratio(log_ratio: Tensor, rows: PackedBatch) -> Tensor:
    """s of each token's sample, the geometric mean of r over its targets: (p(o) / p_old(o))^(1 / |o|)."""
    # The reward is for the whole sample, so the ratio is too. Ratios of single tokens are noise, which adds up over a
    # long sample. The root keeps samples of all lengths in one narrow range: hence the clip of 3e-4.
    _, row_tokens = rows.inputs.shape
    sequences = max(Counter((end - 1) // row_tokens for end in rows.segments.ends).values())  # in the fullest row
    # One mask per sequence of a row, then plain sums: as in `by_reply`, their order is fixed.
    numbers = torch.arange(1, sequences + 1, device=log_ratio.device)
    own = rows.segments.numbers == numbers[:, None, None]  # (sequences, N, T)
    sums = torch.where(own, log_ratio, 0.0).sum(dim=2, keepdim=True)
    lengths = (own & (rows.targets != IGNORE)).sum(dim=2, keepdim=True)
    means = sums / lengths.clamp(min=1)  # (sequences, N, 1)
    return torch.exp(torch.where(own, means, 0.0).sum(dim=0))  # (N, T)


def log_objective(logp: Tensor, ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """A log p: the gradient is A grad log p, whatever the ratio."""
    # Every token has its sample's advantage: the one reward is for the whole reply, and no critic divides it up.
    # The gradient on the token's own logit is A (1 - p): an unlikely token moves most, a certain one not at all.
    # Nothing bounds the move, so this objective fits one update from each set of samples.
    return advantages * logp


def weighted_log_objective(
    logp: Tensor, ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """clip(r, 1 - low, 1 + high) A log p, the clipped ratio without a gradient."""
    # The weight corrects for samples of an older policy, and the clip bounds it. Every token keeps its gradient, also
    # the rare tokens at which a reply turns ("but", "wait") and which a clipped objective drops first.
    return ratio.detach().clamp(1 - clip_low, 1 + clip_high) * advantages * logp


def over_tokens(objective: Tensor, batch: PolicyBatch, max_tokens: int) -> tuple[Tensor, Tensor]:
    """Mean over all tokens: a long wrong reply is pushed down in full."""
    targets = batch.rows.targets != IGNORE
    return (objective * targets).sum(), targets.sum()


def over_max_tokens(objective: Tensor, batch: PolicyBatch, max_tokens: int) -> tuple[Tensor, Tensor]:
    """Sum over a sample's tokens / max_tokens, mean over samples."""
    total, _ = over_tokens(objective, batch, max_tokens)
    return total / max_tokens, batch.sample_share.sum()


def over_whole_samples(objective: Tensor, batch: PolicyBatch, max_tokens: int) -> tuple[Tensor, Tensor]:
    """Sum over a sample's tokens, mean over samples: a sample is one action, whose log p(o) is the sum over tokens."""
    total, _ = over_tokens(objective, batch, max_tokens)
    return total, batch.sample_share.sum()


@dataclass(frozen=True)
class Distillation(PolicyLoss):
    """On-policy distillation: a teacher judges each token instead of the rewards."""

    def token_advantages(self, batch: PolicyBatch, old: Tensor) -> Tensor:
        """log p_teacher - log p_old of each token that the student has sampled."""
        # The mean of log p - log p_teacher over the student's samples is the reverse KL(student || teacher).
        assert batch.reference_logp is not None
        return batch.reference_logp - old


REINFORCE = PolicyLoss(
    token_ratio, log_objective, over_samples, group_mean,
    "Williams 1992, Simple Statistical Gradient-Following Algorithms", clip="nothing",
)  # fmt: skip

DR_GRPO = PolicyLoss(
    token_ratio, clipped_objective, over_max_tokens, group_mean,
    "Liu et al. 2025, Understanding R1-Zero-Like Training",
)  # fmt: skip

# The upper clip is wider, because it holds unlikely tokens down: from p = 0.01 a clip of 1.2 allows 0.012 at most, from
# p = 0.5 it allows 0.6.
DAPO = PolicyLoss(token_ratio, clipped_objective, over_tokens, group_deviation, "Yu et al. 2025, DAPO", clip_high=0.28)

RLOO = PolicyLoss(
    token_ratio, log_objective, over_whole_samples, leave_one_out,
    "Ahmadian et al. 2024, Back to Basics: Revisiting REINFORCE Style Optimization", clip="nothing",
)  # fmt: skip

PPO = PolicyLoss(
    token_ratio, clipped_objective, over_tokens, no_baseline,
    "Schulman et al. 2017, Proximal Policy Optimization Algorithms",
)  # fmt: skip

GSPO = PolicyLoss(
    sample_ratio, clipped_objective, over_samples, group_deviation,
    "Zheng et al. 2025, Group Sequence Policy Optimization", clip_low=3e-4, clip_high=4e-4,
)  # fmt: skip

# The paper has no lower bound. The largest weight, 5, is from Khatri et al. 2025, The Art of Scaling RL Compute.
CISPO = PolicyLoss(
    token_ratio, weighted_log_objective, over_tokens, group_deviation, "MiniMax 2025, MiniMax-M1",
    clip="weight", clip_low=1.0, clip_high=4.0,
)  # fmt: skip

DISTILL = Distillation(
    token_ratio, clipped_objective, over_tokens, no_baseline,
    "Gu et al. 2023, MiniLLM; Agarwal et al. 2023, On-Policy Distillation (GKD)",
)  # fmt: skip
