"""The loss functions of the chat stages, for `train_step`: each returns a sum of losses and what to divide it by.

SFT: cross-entropy of what the assistant says. RL (POLICY_LOSSES): the log probability of sampled tokens, weighted by
how much better than its group a sample was. Preferences (PAIR_LOSSES): how much more likely the better of two replies
is than the worse one, or than it was under a frozen reference model.

A new loss is a row of its table.

Legend: N rows, T tokens a row, S samples, P pairs, R replies.
"""

import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from nanochat.alignment.advantages import batch_deviation, group_deviation, group_mean, leave_one_out, no_baseline
from nanochat.cli import UserError
from nanochat.collectives import sum_over_ranks
from nanochat.cross_entropy import IGNORE
from nanochat.device import Device
from nanochat.packing import PackedBatch


@dataclass(frozen=True)
class Loss:
    """A row of a table of losses."""

    function: Callable[..., tuple[Tensor, Tensor]]  # (model, batch, *, settings with their defaults)
    source: str  # authors, year, title
    has_reference: bool = False  # preferences: compare with a frozen reference model
    is_unpaired: bool = False  # preferences: of single replies (JudgedBatch), not of pairs

    def takes(self, setting: str) -> bool:
        return setting in inspect.signature(self.function).parameters

    def bind(self, **settings: Any) -> Callable[..., tuple[Tensor, Tensor]]:
        """The function with the settings that it takes filled in; a setting of None keeps the function's default."""
        taken = {name: value for name, value in settings.items() if value is not None and self.takes(name)}
        return functools.partial(self.function, **taken)


Row = TypeVar("Row")


def find(table: Mapping[str, Row], name: str) -> Row:
    """Raises UserError: when a table has no loss of this name."""
    if name not in table:
        raise UserError(f"--loss {name}: one of {', '.join(table)}")
    return table[name]


def require_settings(table: dict[str, Loss], name: str, **settings: Any) -> None:
    """Raises UserError: when a setting is not None, and the loss of this name does not take it."""
    for setting, value in settings.items():
        if value is not None and not find(table, name).takes(setting):
            others = [other for other, loss in table.items() if loss.takes(setting)]
            raise UserError(f"--{setting} {value}: --loss {name} has none, {', '.join(others)} has")


def masked_loss(model: Any, rows: PackedBatch) -> tuple[Tensor, Tensor]:
    """Supervised fine-tuning: the sum of the cross-entropy in nats over the targets that the mask keeps."""
    # The same loss as in pretraining, on fewer targets. The model reads the user's tokens and the tools' results but
    # does not learn to write them: their targets are IGNORE, which gives no loss and no gradient.
    return model(rows.inputs, rows.targets, segments=rows.segments), (rows.targets != IGNORE).sum()


# ---------------------------------------------------------------------- reinforcement learning


@dataclass(frozen=True)
class PolicyBatch:
    """Packed samples of a policy, all (N, T), 0 where there is no target. `rows.values` are the sampler's log
    probabilities; None: they are not known."""

    rows: PackedBatch
    advantages: Tensor  # of the sample that a target belongs to
    sample_share: Tensor  # 1 / targets of that sample: they sum to 1 over a sample
    old_logp: Tensor | None = None  # by this model, before the step's first update; None: they are the present ones
    reference_logp: Tensor | None = None  # of the frozen reference model, or of the teacher
    old_values: Tensor | None = None  # PPO: of the scalar head, before the step's first update (alignment/value.py)
    returns: Tensor | None = None  # PPO: what the scalar head is to learn


# A method is what a token gains by a change of its probability p (the objective), how the gains are averaged, and what
# a sample's reward R is compared with (its advantage A: alignment/advantages.py). With r = p / p_old, o a sample, |o|
# its length:
#
#     loss          a token's objective            weight of a token   divided by            A
#     reinforce     A log p                        1 / |o|             samples               group_mean
#     rloo          A log p                        1                   samples               leave_one_out
#     reinforce++   min(r A, clip(r) A)            1 / |o|             samples               batch_deviation
#     grpo          min(r A, clip(r) A)            1 / |o|             samples               group_deviation
#     dr_grpo       min(r A, clip(r) A)            1 / max_tokens      samples               group_mean
#     dapo          min(r A, clip(r) A)            1                   tokens of all samples group_deviation
#     gspo          min(s A, clip(s) A)            1 / |o|             samples               group_deviation
#     cispo         clip(r) A log p                1                   tokens of all samples group_deviation
#     ppo           min(r A, clip(r) A)            1                   tokens of all samples of each token: value.py
#     distill       min(r A, clip(r) A)            1                   tokens of all samples log p_teacher - log p_old
#
# s is the geometric mean of r over the sample; in cispo clip(r) is a constant. The loss is minus the objective. A step
# raises the probability of a token with a positive A and lowers that of a token with a negative A. A token with A = 0
# does not move: a group of samples with equal rewards teaches nothing (in reinforce++ it does: its A compares with the
# whole batch).
#
# The weights matter where lengths differ. Take one sample of 2 tokens and one of 8. With 1 / |o| each sample counts
# once: a token of the short one weighs 1/2, a token of the long one 1/8. In dapo every token weighs 1/10 of the mean.
# The constant max_tokens in the place of |o| undoes a bias: division by |o| makes each token of a long wrong reply
# cheap, so that a model learns to be wrong at length.


@dataclass(frozen=True)
class PolicyLoss:
    """A row of POLICY_LOSSES: a method of reinforcement learning. Its numbers are defaults of flags."""

    ratio: Callable[[Tensor, PackedBatch], Tensor]  # of log p - log p_old, (N, T) -> (N, T)
    objective: Callable[[Tensor, Tensor, Tensor, float, float], Tensor]  # (log p, ratio, A, clip low, clip high)
    mean: Callable[[Tensor, PolicyBatch, int], tuple[Tensor, Tensor]]  # (objective, batch, max_tokens) -> sum, divisor
    advantages: Callable[[np.ndarray], np.ndarray] | None  # rewards (Q, G) -> (Q, G); None: the teacher decides
    source: str  # authors, year, title
    clip_low: float = 0.2
    clip_high: float = 0.2
    refills: int = 0  # how often questions without a signal are replaced
    overlong: float = 0.0  # last share of max_tokens in which the reward falls
    has_values: bool = False  # a scalar head learns what each token promises, and the advantages are of tokens

    @property
    def has_clip(self) -> bool:
        return self.objective is not log_objective

    def override(self, **settings: float | None) -> "PolicyLoss":
        """With other numbers than the method's own; None keeps its own."""
        return replace(self, **{name: value for name, value in settings.items() if value is not None})


POLICY_STATS = ("tokens", "entropy", "kl", "sampler_gap", "clipped")


def policy_loss(
    model: Any,
    batch: PolicyBatch,
    *,
    method: PolicyLoss,
    max_tokens: int,
    kl: float = 0.0,
    importance_cap: float = 0.0,
    value_weight: float = 0.5,
    value_clip: float = 0.2,
    stats: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss of a method: minus its objective, and `kl` x KL(p || p_reference); of one with a value function also
    `value_weight` x its error.

    With `importance_cap` C a token weighs min(p_old / p_sampler, C): the sampler's probabilities differ from the
    trainer's where it rounds otherwise, or has older weights (source: Yao et al. 2025, Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training). To `stats` (5,) the sums of POLICY_STATS over the targets are added.
    """
    # How far is each token from where it was sampled? r = p / p_old = exp(log p - log p_old). Before the first update r
    # is 1 and only its gradient matters: log p minus itself, detached, gives exactly that.
    logp = token_logp(model, batch.rows)
    old = logp.detach() if batch.old_logp is None else batch.old_logp
    ratio = method.ratio(logp - old, batch.rows)
    advantages = batch.advantages
    if method.advantages is None:
        # On-policy distillation: each token the student has sampled is judged by the teacher alone. The mean of
        # log p - log p_teacher over the student's samples is the reverse KL(student || teacher).
        assert batch.reference_logp is not None
        advantages = batch.reference_logp - old
    objective = method.objective(logp, ratio, advantages, method.clip_low, method.clip_high)
    if importance_cap:
        # A token that the sampler drew too often counts less, one that it drew too rarely more: the mean is again that
        # of the trainer's own samples. The cap bounds what a single rare token may weigh.
        assert batch.rows.values is not None
        objective = objective * torch.exp(old - batch.rows.values).clamp(max=importance_cap)
    if kl:
        # The KL pulls every token back towards the reference, even a token with A = 0. Inside the objective the
        # advantages stay those of the task; `--kl_in reward` puts it there (chat_rl), as RLHF does.
        assert batch.reference_logp is not None
        objective = objective - kl * kl_estimate(logp, batch.reference_logp)
    if method.has_values:
        objective = objective - value_weight * value_error(model, batch, value_clip)
    if stats is not None:
        _add_policy_stats(stats, batch, logp.detach(), old, ratio.detach() - 1, advantages, method)
    total, divisor = method.mean(objective, batch, max_tokens)
    return -total, divisor


def value_error(model: Any, batch: PolicyBatch, clip: float) -> Tensor:
    """Half the squared error of the scalar head at each target, (N, T), 0 elsewhere; a second forward pass."""
    assert batch.old_values is not None and batch.returns is not None
    values = model(batch.rows.inputs, batch.rows.targets, segments=batch.rows.segments, scalars=True)
    # As a probability does, a value moves no further than the clip from where it was: beyond, the larger error counts,
    # which has no gradient (source: Schulman et al. 2017, PPO, in its code).
    near = batch.old_values + (values - batch.old_values).clamp(-clip, clip)
    error = torch.maximum((values - batch.returns).square(), (near - batch.returns).square())
    return 0.5 * torch.where(batch.rows.targets != IGNORE, error, 0.0)


# ---- What p is compared with


def token_ratio(log_ratio: Tensor, rows: PackedBatch) -> Tensor:
    """r of each token by itself."""
    return torch.exp(log_ratio)


def sample_ratio(log_ratio: Tensor, rows: PackedBatch) -> Tensor:
    """s of each token's sample, the geometric mean of r over its targets: (p(o) / p_old(o))^(1 / |o|)."""
    # The reward is for the whole sample, so the ratio is, too: that of single tokens is noise, which adds up over a
    # long sample. The root keeps samples of all lengths in one range, and a narrow one: hence the clip of 3e-4.
    _, row_tokens = rows.inputs.shape
    sequences = max(Counter((end - 1) // row_tokens for end in rows.segments.ends).values())  # in the fullest row
    # One mask for each sequence of a row, then plain sums: as in `_by_reply` they are in a fixed order.
    numbers = torch.arange(1, sequences + 1, device=log_ratio.device)
    own = rows.segments.numbers == numbers[:, None, None]  # (sequences, N, T)
    sums = torch.where(own, log_ratio, 0.0).sum(dim=2, keepdim=True)
    lengths = (own & (rows.targets != IGNORE)).sum(dim=2, keepdim=True)
    means = sums / lengths.clamp(min=1)  # (sequences, N, 1)
    return torch.exp(torch.where(own, means, 0.0).sum(dim=0))  # (N, T)


# ---- What a token gains


def log_objective(logp: Tensor, ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """A log p: the gradient is A grad log p, whatever the ratio."""
    # Every token has its sample's advantage: the one reward is for the whole reply, and no critic divides it up.
    # The gradient on the token's own logit is A (1 - p): an unlikely token moves most, a certain one not at all.
    # Nothing bounds the move, so this objective fits one update from each set of samples.
    return advantages * logp


def clipped_objective(logp: Tensor, ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """min(r A, clip(r, 1 - low, 1 + high) A): no gain from moving a probability further than the clip, while a loss
    counts in full (source: Schulman et al. 2017, PPO)."""
    # What min(r A, clip(r, 0.8, 1.2) A) does to one token. Where the clip wins, the objective is constant: no gradient.
    #
    #     A = +1   r = 1.5   min( 1.5,  1.2) =  1.2   already raised enough: no gradient
    #     A = +1   r = 0.5   min( 0.5,  0.8) =  0.5   fell, although it was good: raised again
    #     A = -1   r = 0.5   min(-0.5, -0.8) = -0.8   already lowered enough: no gradient
    #     A = -1   r = 1.5   min(-1.5, -1.2) = -1.5   rose, although it was bad: lowered again
    #
    # DAPO's upper clip is wider, because it holds unlikely tokens down: from p = 0.01 a clip of 1.2 allows 0.012 at
    # most, from p = 0.5 it allows 0.6.
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.minimum(ratio * advantages, clipped * advantages)


def weighted_log_objective(
    logp: Tensor, ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """clip(r, 1 - low, 1 + high) A log p, the clipped ratio without a gradient."""
    # The weight corrects for the samples of an older policy, and the clip bounds it. Every token keeps its gradient,
    # also the rare ones that a clipped objective drops first, at which a reply turns ("but", "wait").
    return ratio.detach().clamp(1 - clip_low, 1 + clip_high) * advantages * logp


# ---- How the gains are averaged


def over_samples(objective: Tensor, batch: PolicyBatch, max_tokens: int) -> tuple[Tensor, Tensor]:
    """Mean over a sample's tokens, then over samples."""
    # sample_share is 1 / |o| and sums to 1 over a sample: the second sum counts the samples.
    return (objective * batch.sample_share).sum(), batch.sample_share.sum()


def over_tokens(objective: Tensor, batch: PolicyBatch, max_tokens: int) -> tuple[Tensor, Tensor]:
    """Mean over all tokens: a long wrong reply is pushed down in full."""
    targets = batch.rows.targets != IGNORE
    return (objective * targets).sum(), targets.sum()


def over_whole_samples(objective: Tensor, batch: PolicyBatch, max_tokens: int) -> tuple[Tensor, Tensor]:
    """Sum over a sample's tokens, mean over samples: a sample is one action, and log p(o) the sum of its tokens'."""
    return (objective * (batch.rows.targets != IGNORE)).sum(), batch.sample_share.sum()


def over_max_tokens(objective: Tensor, batch: PolicyBatch, max_tokens: int) -> tuple[Tensor, Tensor]:
    """Sum over a sample's tokens / max_tokens, mean over samples."""
    total, samples = over_whole_samples(objective, batch, max_tokens)
    return total / max_tokens, samples


POLICY_LOSSES = {
    "reinforce": PolicyLoss(
        token_ratio, log_objective, over_samples, group_mean,
        "Williams 1992, Simple Statistical Gradient-Following Algorithms",
    ),
    "rloo": PolicyLoss(
        token_ratio, log_objective, over_whole_samples, leave_one_out,
        "Ahmadian et al. 2024, Back to Basics: Revisiting REINFORCE Style Optimization",
    ),
    "reinforce++": PolicyLoss(
        token_ratio, clipped_objective, over_samples, batch_deviation, "Hu et al. 2025, REINFORCE++",
    ),
    "grpo": PolicyLoss(
        token_ratio, clipped_objective, over_samples, group_deviation, "Shao et al. 2024, DeepSeekMath",
    ),
    "ppo": PolicyLoss(
        token_ratio, clipped_objective, over_tokens, no_baseline,
        "Schulman et al. 2017, Proximal Policy Optimization Algorithms", has_values=True,
    ),
    "dr_grpo": PolicyLoss(
        token_ratio, clipped_objective, over_max_tokens, group_mean,
        "Liu et al. 2025, Understanding R1-Zero-Like Training",
    ),
    "dapo": PolicyLoss(
        token_ratio, clipped_objective, over_tokens, group_deviation, "Yu et al. 2025, DAPO",
        clip_high=0.28, refills=3, overlong=0.2,
    ),
    "gspo": PolicyLoss(
        sample_ratio, clipped_objective, over_samples, group_deviation,
        "Zheng et al. 2025, Group Sequence Policy Optimization", clip_low=3e-4, clip_high=4e-4,
    ),
    # The paper has no lower bound; a weight of 5 at most is that of Khatri et al. 2025, The Art of Scaling RL Compute.
    "cispo": PolicyLoss(
        token_ratio, weighted_log_objective, over_tokens, group_deviation, "MiniMax 2025, MiniMax-M1",
        clip_low=1.0, clip_high=4.0,
    ),
    "distill": PolicyLoss(
        token_ratio, clipped_objective, over_tokens, None,
        "Gu et al. 2023, MiniLLM; Agarwal et al. 2023, On-Policy Distillation (GKD)",
    ),
}  # fmt: skip


def token_logp(model: Any, rows: PackedBatch) -> Tensor:
    """Log probability in nats of each target, (N, T), 0 where there is none."""
    return -model(rows.inputs, rows.targets, segments=rows.segments, reduction="none")


def kl_estimate(logp: Tensor, reference_logp: Tensor) -> Tensor:
    """A non-negative, unbiased estimate of KL(policy || reference) at each sampled token: q/p - 1 - log(q/p)
    (source: Schulman 2020, Approximating KL divergence)."""
    # The plain estimate log(p/q) has the right mean but is negative for many tokens. Adding q/p - 1, whose mean is 0,
    # makes it non-negative and less noisy: x - 1 - log x is 0 at x = 1 and positive elsewhere. With p = 0.5, q = 0.25:
    # 0.5 - 1 + ln 2 = 0.19 nats. expm1(d) is e^d - 1 without its rounding near 0, where most tokens are.
    # On given samples only its value is that of KL(p || q): its mean gradient is that of KL(q || p), 0 at the same p.
    difference = reference_logp - logp
    return torch.expm1(difference) - difference


def _add_policy_stats(
    stats: Tensor,
    batch: PolicyBatch,
    logp: Tensor,
    old: Tensor,
    change: Tensor,
    advantages: Tensor,
    method: PolicyLoss,
) -> None:
    """Add the sums of POLICY_STATS over the targets, from what the loss has computed; `change` is the ratio - 1."""
    is_target = (batch.rows.targets != IGNORE).float()
    none = torch.zeros_like(logp)
    # The mean of -log p over samples of a policy is its entropy.
    entropy = -logp
    kl = none if batch.reference_logp is None else kl_estimate(logp, batch.reference_logp)
    gap = none if batch.rows.values is None else (old - batch.rows.values).abs()
    # Where the clip stops a token: it has moved beyond it in the direction of its advantage.
    raised = (change > method.clip_high) & (advantages > 0)
    lowered = (change < -method.clip_low) & (advantages < 0)
    clipped = raised | lowered if method.has_clip else none
    stats += torch.stack([(value * is_target).sum() for value in (is_target, entropy, kl, gap, clipped)])


def mean_policy_stats(stats: Tensor, device: Device) -> dict[str, float]:
    """POLICY_STATS but the first, as means over the tokens of all ranks; `stats` (5,) are one rank's sums."""
    tokens, *sums = sum_over_ranks(stats, device).tolist()
    return {name: total / max(1, tokens) for name, total in zip(POLICY_STATS[1:], sums, strict=True)}


# ---------------------------------------------------------------------- preferences

REPLY_STATS = ("chosen", "rejected", "accurate", "chosen_reward", "rejected_reward")


@dataclass(frozen=True)
class PairBatch:
    """Packed pairs of replies: sequence 2p is the chosen one of pair p, 2p + 1 the rejected one. A pair counts where
    both have a target."""

    rows: PackedBatch
    pairs: int
    reference_logp: Tensor | None = None  # (P, 2), of each reply's targets together, under the frozen reference model

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.pairs, 2)


@dataclass(frozen=True)
class JudgedBatch:
    """Packed replies, each of them good or bad by itself. Of the R replies of a step a micro-batch holds some: a reply
    counts where it has a target."""

    rows: PackedBatch
    is_good: Tensor  # (R,), bool
    reference_logp: Tensor | None = None  # (R,), of each reply's targets together, under the frozen reference model

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.is_good.shape)


# The losses of a pair. With c the chosen reply and r the rejected one, log p(c) the log probability of all its tokens
# under the model, |c| their number, g(c) = log p(c) - log q(c) its gain over the reference model q, s the sigmoid:
#
#     loss    of a pair                                                    reference    beta
#     dpo     -log s(beta (g(c) - g(r)))                                   yes          0.1
#     ipo     (g(c) / |c| - g(r) / |r| - 1 / (2 beta))^2                   yes          0.1
#     simpo   -log s(beta (log p(c) / |c| - log p(r) / |r|) - gamma)       no           2
#     cpo     -log s(beta (log p(c) - log p(r))) - log p(c) / |c|          no           0.1
#     orpo    -beta log s(log odds(c) - log odds(r)) - log p(c) / |c|      no           0.1
#
# A loss of single replies y, good or bad ones; z is the baseline of all replies of a step:
#
#     kto     1 - s(beta (g(y) - z)) if good, 1 - s(beta (z - g(y))) if bad    yes      0.1
#
# The loss of one pair, worked out: the chosen reply has tokens of p = 1/2 and 1/4, the rejected one three of p = 1/2;
# under the reference the replies have 1/16 and 1/4. So log p = -3 ln 2 for both, gains ln 2 and -ln 2, means -3/2 ln 2
# and -ln 2. With the betas of the table:
#
#     dpo     -log s(0.1 x 2 ln 2)                        = 0.626
#     ipo     (ln 2 / 2 + ln 2 / 3 - 5)^2                 = 19.557
#     simpo   -log s(2 x (-1.5 ln 2 + ln 2) - 1)          = 1.862
#     cpo     -log s(0) + 1.5 ln 2                        = 1.733
#     orpo    -0.1 log s(ln 0.547 - ln 1) + 1.5 ln 2      = 1.144     odds = p / (1 - p) of p = 2^-1.5 and 2^-1
#     kto     1 - s(0.1 ln 2) twice, at z = 0             = 0.965


def dpo_loss(
    model: Any,
    batch: PairBatch,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    sft_weight: float = 0.0,
    stats: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """-log sigmoid(beta x (gain of the chosen reply - gain of the rejected one)), a gain being log p - log p_reference.

    `label_smoothing` is the share of pairs taken to be the wrong way round (source: Mitchell 2023, conservative DPO).
    `sft_weight`, of every loss of pairs, adds the chosen reply's mean cross-entropy (source: Pang et al. 2024,
    Iterative RPO). To `stats` (5,) the sums of REPLY_STATS are added; a reply's reward is beta x its gain, a tie counts
    half as accurate.
    """
    # Gain of each reply: how much more likely it is now than under the reference, in nats. Only differences count, so
    # a reply that was likely from the start has no advantage.
    logp = reply_logp(model, batch)
    assert batch.reference_logp is not None
    rewards = beta * (logp - batch.reference_logp)  # (P, 2)
    margin = rewards[:, 0] - rewards[:, 1]
    # The model of Bradley and Terry: the chosen reply wins with probability sigmoid(margin). The reward is the gain
    # itself, so that no reward model is trained.
    #
    #     loss = -log sigmoid(beta (gain of chosen - gain of rejected))
    #
    #     gains  0 and  0: margin 0,   loss 0.69: ln 2, the loss of every pair before the first update
    #     gains +2 and -3: margin 0.5, loss 0.47: with beta = 0.1
    #
    # The gradient is sigmoid(-margin) times beta: a pair that the model already separates hardly moves it. Nothing
    # keeps the chosen reply's own probability up. At too high a rate both replies become less likely and stories get
    # worse (docs/measurements.md, "Rates for DPO").
    right = torch.nn.functional.logsigmoid(margin)
    wrong = torch.nn.functional.logsigmoid(-margin)
    losses = -(1 - label_smoothing) * right - label_smoothing * wrong
    return _sum_over_pairs(losses, rewards, logp, batch, sft_weight, stats)


def ipo_loss(
    model: Any, batch: PairBatch, *, beta: float = 0.1, sft_weight: float = 0.0, stats: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(difference of the gains - 1 / (2 beta))^2; a gain, and so the rewards in `stats`, is a mean over the reply's
    tokens here."""
    logp = reply_logp(model, batch)
    assert batch.reference_logp is not None
    # A mean, because the margin below is one number for all pairs: the sum of a long reply would be far from any.
    gains = (logp - batch.reference_logp) / reply_targets(batch).clamp(min=1)  # (P, 2)
    # loss = (gain of chosen - gain of rejected - 1 / (2 beta))^2: a regression to a margin of 5 at beta = 0.1.
    # DPO rewards a larger margin without end, and overfits pairs whose order is certain. Here a margin beyond the
    # target is a loss again.
    losses = (gains[:, 0] - gains[:, 1] - 1 / (2 * beta)).square()
    return _sum_over_pairs(losses, beta * gains, logp, batch, sft_weight, stats)


def simpo_loss(
    model: Any,
    batch: PairBatch,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
    sft_weight: float = 0.0,
    stats: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """-log sigmoid(beta x (mean log p of the chosen reply's tokens - that of the rejected one's) - gamma)."""
    logp = reply_logp(model, batch)
    # loss = -log sigmoid(beta (log p(c) / |c| - log p(r) / |r|) - gamma)
    # The reward is what sampling goes by, the mean log probability of a token: no reference, half the compute, and a
    # long reply is not worse for being long. A chosen reply that is only just ahead still has a loss: it should lead by
    # gamma. Nothing ties the model to where it began but the rate and the length of the run.
    rewards = beta * logp / reply_targets(batch).clamp(min=1)  # (P, 2)
    losses = -torch.nn.functional.logsigmoid(rewards[:, 0] - rewards[:, 1] - gamma)
    return _sum_over_pairs(losses, rewards, logp, batch, sft_weight, stats)


def cpo_loss(
    model: Any, batch: PairBatch, *, beta: float = 0.1, sft_weight: float = 1.0, stats: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """-log sigmoid(beta x (log p of the chosen reply - log p of the rejected one)) + the chosen one's cross-entropy."""
    logp = reply_logp(model, batch)
    # loss = -log sigmoid(beta (log p(c) - log p(r))) - log p(c) / |c|
    # DPO with a reference to which all replies are equally likely, which cancels out: no second model. The second term
    # holds the chosen reply up in the reference's place. A sum over the tokens favours short replies.
    rewards = beta * logp  # (P, 2)
    losses = -torch.nn.functional.logsigmoid(rewards[:, 0] - rewards[:, 1])
    return _sum_over_pairs(losses, rewards, logp, batch, sft_weight, stats)


def orpo_loss(
    model: Any, batch: PairBatch, *, beta: float = 0.1, sft_weight: float = 1.0, stats: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """-beta log sigmoid(log of the ratio of the replies' odds) + the chosen one's cross-entropy. A reply's probability
    is the geometric mean over its tokens here, and its reward in `stats` beta x the log of that."""
    logp = reply_logp(model, batch)
    # loss = -beta log sigmoid(log odds(c) - log odds(r)) - log p(c) / |c|, with odds = p / (1 - p)
    # SFT and preference in one stage: the cross-entropy leads, and the odds ratio with its small weight pushes the
    # rejected reply down meanwhile. Where p is small, odds are p. As p nears 1 they grow without end: once the chosen
    # reply is certain, nothing is left to learn. A certain reply has no finite odds, so p stays below 1 by the rounding
    # of float32.
    mean = (logp / reply_targets(batch).clamp(min=1)).clamp(max=-1e-7)  # (P, 2)
    log_odds = mean - torch.log(-torch.expm1(mean))  # log p - log(1 - p)
    losses = -beta * torch.nn.functional.logsigmoid(log_odds[:, 0] - log_odds[:, 1])
    return _sum_over_pairs(losses, beta * mean, logp, batch, sft_weight, stats)


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

    The weights multiply them. Where one kind is rarer, its weight times its number should be about the other's. The
    baseline, in nats a reply, is that of the whole step (preferences.py). In `stats` chosen means good, and a reply is
    accurate on the right side of the baseline.
    """
    logp = reply_logp(model, batch)
    assert batch.reference_logp is not None
    gains = logp - batch.reference_logp  # (R,)
    # People judge a result against a point of reference, and further gains move them less and less (the prospect theory
    # of Kahneman and Tversky). The sigmoid is that value, and the point of reference is how far the model has moved
    # anyway: the mean gain of replies to other questions, an estimate of the KL divergence.
    #
    #     beta (gain - baseline) = +3    good: 1 - 0.95 = 0.05, learned: hardly a gradient
    #                              -3    good: 1 - 0.05 = 0.95, out of reach: hardly a gradient either
    #
    # The last is what DPO lacks: an example that is labelled wrong does not pull harder and harder.
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


def reward_loss(model: Any, batch: PairBatch, *, stats: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """-log sigmoid(reward of the chosen reply - reward of the rejected one), of a model with a scalar head.

    A reply's one target stands at its last token, where the head has read all of it. Source: Ouyang et al. 2022,
    InstructGPT.
    """
    # The model of Bradley and Terry, as in DPO, with a reward that is learned. Two replies that the head rates 1.5 and
    # 0.5: the first wins with probability sigmoid(1) = 0.73, and the loss is 0.31. Only differences count: where zero
    # lies is left open.
    scores = model(batch.rows.inputs, segments=batch.rows.segments, scalars=True)  # (N, T)
    rewards = _by_reply(torch.where(batch.rows.targets != IGNORE, scores, 0.0), batch)  # (P, 2)
    losses = -torch.nn.functional.logsigmoid(rewards[:, 0] - rewards[:, 1])
    return _sum_over_pairs(losses, rewards, rewards, batch, 0.0, stats)


def gain_sum(model: Any, batch: JudgedBatch) -> tuple[Tensor, Tensor]:
    """The replies' gains together, and their number: over replies to other questions the mean is KTO's baseline."""
    assert batch.reference_logp is not None
    # A reply without a target has no gain, so that the sum needs no mask.
    gains = reply_logp(model, batch) - batch.reference_logp
    return gains.sum(), (reply_targets(batch) > 0).sum()


PAIR_LOSSES = {
    "dpo": Loss(dpo_loss, "Rafailov et al. 2023, DPO", has_reference=True),
    "ipo": Loss(
        ipo_loss, "Azar et al. 2023, A General Theoretical Paradigm to Understand Learning from Preferences",
        has_reference=True,
    ),
    "simpo": Loss(simpo_loss, "Meng et al. 2024, SimPO"),
    "cpo": Loss(cpo_loss, "Xu et al. 2024, Contrastive Preference Optimization"),
    "orpo": Loss(orpo_loss, "Hong et al. 2024, ORPO"),
    "kto": Loss(kto_loss, "Ethayarajh et al. 2024, KTO", has_reference=True, is_unpaired=True),
}  # fmt: skip


def _sum_over_pairs(
    losses: Tensor, rewards: Tensor, logp: Tensor, batch: PairBatch, sft_weight: float, stats: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The sum over the pairs that count, and their number. losses (P,), rewards and logp (P, 2)."""
    targets = reply_targets(batch)
    # Padding may hold pairs without a target; they weigh nothing in the sum, and nothing in what it is divided by.
    counts = (targets.amin(dim=1) > 0).float()  # (P,)
    if sft_weight:
        # The mean cross-entropy of the chosen reply holds its probability up.
        losses = losses - sft_weight * logp[:, 0] / targets[:, 0].clamp(min=1)
    if stats is not None:
        chosen, rejected = rewards.detach().unbind(dim=1)
        accurate = torch.sign(chosen - rejected) + 1  # both replies, none, or one for a tie
        stats += (counts * torch.stack((counts, counts, accurate, chosen, rejected))).sum(dim=1)
    return (losses * counts).sum(), counts.sum()


def mean_reply_stats(stats: Tensor, device: Device) -> dict[str, float]:
    """What share of the replies is on the right side, and the mean reward of each kind; `stats` (5,) are one rank's
    sums of REPLY_STATS. What no reply was measured for is left out."""
    chosen, rejected, accurate, chosen_reward, rejected_reward = sum_over_ranks(stats, device).tolist()
    means = {}
    if chosen or rejected:
        means["accuracy"] = accurate / (chosen + rejected)
    if chosen and rejected:
        means["margin"] = chosen_reward / chosen - rejected_reward / rejected
    if chosen:
        means["chosen_reward"] = chosen_reward / chosen
    if rejected:
        means["rejected_reward"] = rejected_reward / rejected
    return means


def reply_logp(model: Any, batch: PairBatch | JudgedBatch) -> Tensor:
    """Log probability in nats of each reply's targets together, (P, 2) of pairs, or (R,)."""
    return _by_reply(token_logp(model, batch.rows), batch)


def reply_targets(batch: PairBatch | JudgedBatch) -> Tensor:
    """How many targets each reply has, (P, 2) of pairs, or (R,)."""
    return _by_reply((batch.rows.targets != IGNORE).float(), batch)


def _by_reply(values: Tensor, batch: PairBatch | JudgedBatch) -> Tensor:
    """Sums (P, 2) or (R,) of values (N, T) that are 0 where there is no target."""
    # One mask for each reply, then a plain sum. index_add would do it without the masks, but adds in a changing order:
    # two runs of one seed would differ in their last digits.
    numbers = torch.arange(math.prod(batch.shape), device=values.device)
    own = batch.rows.source == numbers[:, None, None]  # (R, N, T)
    return torch.where(own, values, 0.0).sum(dim=(1, 2)).view(batch.shape)
