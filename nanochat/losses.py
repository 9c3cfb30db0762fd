"""The loss functions of the chat stages, for `train_step`: each returns a sum of losses and its divisor.

SFT: the cross-entropy of the assistant's tokens. RL (GRPO): the log probability of sampled tokens, weighted by how much
better their sample was than the others. alignment/ has other methods of RL, and preferences.

Legend: N rows, T tokens a row, S samples, Q questions, G samples of a question.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from nanochat.cross_entropy import IGNORE
from nanochat.device import Device
from nanochat.ground import rooms
from nanochat.ground.cli import UserError
from nanochat.packing import PackedBatch
from nanochat.ranks import sum_over_ranks


def masked_loss(model: Any, rows: PackedBatch) -> tuple[Tensor, Tensor]:
    """Supervised fine-tuning: the sum of the cross-entropy in nats over the targets that the mask keeps."""
    # The same loss as in pretraining, on fewer targets. The model reads the user's tokens and the tools' results but
    # does not learn to write them: their targets are IGNORE, which gives no loss and no gradient.
    return model(rows.inputs, rows.targets, segments=rows.segments), (rows.targets != IGNORE).sum()


def token_logp(model: Any, rows: PackedBatch, temperature: float = 1.0) -> Tensor:
    """Log probability in nats of each target at a temperature, (N, T), 0 where there is none."""
    return -model(rows.inputs, rows.targets, segments=rows.segments, reduction="none", temperature=temperature)


# ---------------------------------------------------------------------- reinforcement learning


@dataclass(frozen=True)
class PolicyBatch:
    """Packed samples of a policy, all (N, T), 0 where there is no target. `rows.values` are the sampler's log
    probabilities; None: they are not known."""

    rows: PackedBatch
    advantages: Tensor  # the advantage of the sample that a target belongs to
    sample_share: Tensor  # 1 / targets of that sample: they sum to 1 over a sample
    old_logp: Tensor | None = None  # by this model, before the step's first update; None: the present ones
    reference_logp: Tensor | None = None  # by the frozen reference model, or by the teacher


# A method has three parts: a token's gain from a change of its probability p (the objective), the mean over the gains,
# and a comparison of a sample's reward R (its advantage A). With r = p / p_old, o a sample, |o| its length, GRPO has
#
#     min(r A, clip(r) A)     weighted by 1 / |o|, divided by the number of samples     A by `group_deviation`
#
# The loss is minus the objective. A step raises the probability of a token with a positive A and lowers the probability
# of a token with a negative A. A token with A = 0 does not move: a group of samples with equal rewards teaches nothing.
# alignment/policy_losses.py compares the other methods.


# What the replies lose, (Q, G), such as the KL of `--kl_in reward`. Advantages that are divided by a deviation take the
# deviation of the rewards without it: where all rewards are equal, the KL is all that differs, and its deviation may be
# the rounding of two equal models.
Penalties = np.ndarray | float


@dataclass(frozen=True)
class PolicyLoss:
    """A method of reinforcement learning. Its numbers are defaults of flags."""

    ratio: Callable[[Tensor, PackedBatch], Tensor]  # log p - log p_old -> r, (N, T) -> (N, T)
    objective: Callable[[Tensor, Tensor, Tensor, float, float], Tensor]  # (log p, ratio, A, clip low, clip high)
    mean: Callable[[Tensor, PolicyBatch, int], tuple[Tensor, Tensor]]  # (objective, batch, max_tokens) -> sum, divisor
    advantages: Callable[[np.ndarray, Penalties], np.ndarray]  # rewards (Q, G), what each loses -> (Q, G)
    source: str  # authors, year, title
    # What --clip_low and --clip_high bound: the move of a token's probability in one step, its weight, or nothing.
    clip: Literal["move", "weight", "nothing"] = "move"
    clip_low: float = 0.2
    clip_high: float = 0.2

    def token_advantages(self, batch: PolicyBatch, old: Tensor) -> Tensor:
        """The advantage of each token, (N, T); `old` is log p_old."""
        return batch.advantages  # the one reward is for the whole sample


POLICY_STATS = ("tokens", "entropy", "kl", "sampler_gap", "clipped")


def policy_loss(
    model: Any,
    batch: PolicyBatch,
    *,
    method: PolicyLoss,
    max_tokens: int,
    kl: float = 0.0,
    importance_cap: float = 0.0,
    temperature: float = 1.0,
    critic: Any = None,
    stats: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss of a method: minus its objective, plus `kl` x KL(p || p_reference), plus the critic's error.

    p is the probability at the `temperature` of the samples: what learns is the policy that sampled, as in TRL.
    With `importance_cap` C a token weighs min(p_old / p_sampler, C): the sampler's probabilities differ from the
    trainer's where it rounds otherwise, or has older weights (source: Yao et al. 2025, Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training). The sums of POLICY_STATS over the targets are added to `stats` (5,).
    """
    # How far is each token from where it was sampled? r = p / p_old = exp(log p - log p_old). Before the first update r
    # is 1 and only its gradient matters: log p minus itself, detached, gives exactly that.
    logp = token_logp(model, batch.rows, temperature)
    old = logp.detach() if batch.old_logp is None else batch.old_logp
    ratio = method.ratio(logp - old, batch.rows)
    advantages = method.token_advantages(batch, old)
    objective = method.objective(logp, ratio, advantages, method.clip_low, method.clip_high)
    if importance_cap:
        # A token that the sampler drew too often counts less, one that it drew too rarely counts more: the mean is
        # again the mean over the trainer's own samples. The cap bounds the weight of a single rare token.
        assert batch.rows.values is not None
        objective = objective * torch.exp(old - batch.rows.values).clamp(max=importance_cap)
    if kl:
        # The KL pulls every token back towards the reference, even a token with A = 0. Inside the objective the
        # advantages still belong to the task; `--kl_in reward` puts it there (chat_rl), as RLHF does.
        assert batch.reference_logp is not None
        objective = objective - kl * kl_estimate(logp, batch.reference_logp)
    if critic is not None:  # PPO (alignment/value.py)
        objective = objective - critic.error(model, batch)
    if stats is not None:
        _add_policy_stats(stats, batch, logp.detach(), old, ratio.detach() - 1, advantages, method)
    total, divisor = method.mean(objective, batch, max_tokens)
    return -total, divisor


def token_ratio(log_ratio: Tensor, rows: PackedBatch) -> Tensor:
    """r of each token."""
    return torch.exp(log_ratio)


def clipped_objective(logp: Tensor, ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """min(r A, clip(r, 1 - low, 1 + high) A): no gain from moving a probability further than the clip, while a loss
    counts in full (source: Schulman et al. 2017, PPO)."""
    # min(r A, clip(r, 0.8, 1.2) A) for one token. Where the clip wins, the objective is constant: no gradient.
    #
    #     A = +1   r = 1.5   min( 1.5,  1.2) =  1.2   already raised enough: no gradient
    #     A = +1   r = 0.5   min( 0.5,  0.8) =  0.5   fell, although it was good: raised again
    #     A = -1   r = 0.5   min(-0.5, -0.8) = -0.8   already lowered enough: no gradient
    #     A = -1   r = 1.5   min(-1.5, -1.2) = -1.5   rose, although it was bad: lowered again
    #
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.minimum(ratio * advantages, clipped * advantages)


def over_samples(objective: Tensor, batch: PolicyBatch, max_tokens: int) -> tuple[Tensor, Tensor]:
    """Mean over a sample's tokens, then over samples."""
    # sample_share is 1 / |o| and sums to 1 over a sample: the second sum counts the samples.
    return (objective * batch.sample_share).sum(), batch.sample_share.sum()


# ---- What a reward is compared with. An advantage above 0 makes the tokens of its reply likelier, one below 0 less
#      likely. Nothing here is learned: the other replies to a question show what could be expected. Four replies, by
#      their rewards:
#
#          rewards    group_mean                   group_deviation
#          1 0 0 1     0.50 -0.50 -0.50  0.50       1.00 -1.00 -1.00  1.00
#          1 0 0 0     0.75 -0.25 -0.25 -0.25       1.73 -0.58 -0.58 -0.58
#          1 1 1 1     0     0     0     0          0     0     0     0


def group_mean(rewards: np.ndarray, penalties: Penalties = 0.0) -> np.ndarray:
    """Reward minus the mean of its question (source: Liu et al. 2025, Understanding R1-Zero-Like Training)."""
    # The mean reward of a question is its baseline: an easy question then teaches no more than a hard one, and a group
    # in which all replies are equally good teaches nothing.
    rewards = rewards - penalties
    advantages = rewards - rewards.mean(axis=1, keepdims=True)
    # The mean of equal rewards is rounded: for three rewards of 0.1 it is above 0.1, as if there were a preference.
    advantages[~has_signal(rewards)] = 0
    return advantages


def group_deviation(rewards: np.ndarray, penalties: Penalties = 0.0) -> np.ndarray:
    """The same, divided by the standard deviation of its question (source: Shao et al. 2024, DeepSeekMath: GRPO).

    The G replies are the population. TRL takes them for a sample of it: its advantages are sqrt((G - 1) / G) as large.
    """
    # Dr. GRPO (Liu et al. 2025) leaves the division out: it gives questions that are nearly always right or nearly
    # always wrong a larger weight, as the second row above shows. In the demo Dr. GRPO learns stories as well (88.5%
    # against 86.5% of 200 after RL) and forgets less (arithmetic 85.0% against 81.5%, 2026-11-20).
    deviation = rewards.std(axis=1, keepdims=True) + 1e-6
    deviation[~has_signal(rewards)] = 1.0  # only penalties are left, which keep their size
    return group_mean(rewards, penalties) / deviation


ROUNDING = 1e-6  # relative difference of rewards, below which they are equal


def has_signal(rewards: np.ndarray) -> np.ndarray:
    """Whether some replies to a question were better than others, (Q,). Equal sums can differ by their rounding."""
    return np.ptp(rewards, axis=1) > ROUNDING * np.abs(rewards).max(axis=1, initial=0.0)


GRPO = PolicyLoss(token_ratio, clipped_objective, over_samples, group_deviation, "Shao et al. 2024, DeepSeekMath")


def kl_estimate(logp: Tensor, reference_logp: Tensor) -> Tensor:
    """A non-negative, unbiased estimate of KL(policy || reference) at each sampled token: q/p - 1 - log(q/p)
    (source: Schulman 2020, Approximating KL divergence)."""
    # The plain estimate log(p/q) has the right mean but is negative for many tokens. Adding q/p - 1, whose mean is 0,
    # makes it non-negative and less noisy: x - 1 - log x is 0 at x = 1 and positive elsewhere. With p = 0.5, q = 0.25:
    # 0.5 - 1 + ln 2 = 0.19 nats. expm1(d) is e^d - 1 without its rounding near 0, where most tokens are.
    # Only its value is the KL(p || q) of the samples; its mean gradient is the one of KL(q || p), which is 0 at p = q.
    difference = reference_logp - logp
    return torch.expm1(difference) - difference


def _add_policy_stats(
    stats: Tensor, batch: PolicyBatch, logp: Tensor, old: Tensor, change: Tensor, advantages: Tensor, method: PolicyLoss
) -> None:
    """Add the sums of POLICY_STATS over the targets, from the loss's tensors; `change` is the ratio - 1."""
    is_target = (batch.rows.targets != IGNORE).float()
    none = torch.zeros_like(logp)
    # The mean of -log p over samples of a policy is its entropy.
    entropy = -logp
    kl = none if batch.reference_logp is None else kl_estimate(logp, batch.reference_logp)
    gap = none if batch.rows.values is None else (old - batch.rows.values).abs()
    # Where the clip stops a token: it has moved beyond it in the direction of its advantage.
    raised = (change > method.clip_high) & (advantages > 0)
    lowered = (change < -method.clip_low) & (advantages < 0)
    clipped = raised | lowered if method.clip != "nothing" else none
    stats += torch.stack([(value * is_target).sum() for value in (is_target, entropy, kl, gap, clipped)])


def mean_policy_stats(stats: Tensor, device: Device) -> dict[str, float]:
    """POLICY_STATS except the first, as means over the tokens of all ranks; `stats` (5,) are one rank's sums."""
    tokens, *sums = sum_over_ranks(stats, device).tolist()
    return {name: total / max(1, tokens) for name, total in zip(POLICY_STATS[1:], sums, strict=True)}


def find(name: str) -> PolicyLoss:
    """The method of a --loss flag, from this file or from a room. Raises UserError: when neither has this name."""
    if name == "grpo":
        return GRPO
    if name in rooms.names("policy losses"):
        return rooms.find("policy losses", name)
    raise UserError(f"--loss {name}: one of {', '.join(['grpo', *rooms.names('policy losses')])}")
