"""The losses of preferences: how much more likely the better of two replies has become than the worse one. `chat_dpo
--loss` finds them by name.

c is the chosen reply and r the rejected one. log p(c) is the log probability of all tokens of c under the model, |c|
their number, g(c) = log p(c) - log q(c) the gain over the reference model q, and s the sigmoid:

    loss    formula for a pair                                           reference    beta
    dpo     -log s(beta (g(c) - g(r)))                                   yes          0.1
    simpo   -log s(beta (log p(c) / |c| - log p(r) / |r|) - gamma)       no           2
    orpo    -beta log s(log odds(c) - log odds(r)) - log p(c) / |c|      no           0.1

reward_model.py has the loss of a reward model.

An example: the chosen reply has tokens with p = 1/2 and 1/4, the rejected one three tokens with p = 1/2. Under the
reference the replies have 1/16 and 1/4. So log p = -3 ln 2 for both; the gains are ln 2 and -ln 2, the means
-3/2 ln 2 and -ln 2. With the betas of the table:

    dpo     -log s(0.1 x 2 ln 2)                        = 0.626
    simpo   -log s(2 x (-1.5 ln 2 + ln 2) - 1)          = 1.862
    orpo    -0.1 log s(ln 0.547 - ln 1) + 1.5 ln 2      = 1.144     odds = p / (1 - p) of p = 2^-1.5 and 2^-1

Legend: N rows, T tokens a row, P pairs, R replies of a batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanochat.cross_entropy import IGNORE
from nanochat.device import Device
from nanochat.losses import token_logp
from nanochat.packing import PackedBatch
from nanochat.ranks import sum_over_ranks


@dataclass(frozen=True)
class PairBatch:
    """Packed pairs of replies: sequence 2p is the chosen one of pair p, 2p + 1 the rejected one. A pair counts where
    both have a target."""

    rows: PackedBatch
    pairs: int
    reference_logp: Tensor | None = None  # (P, 2): sum over each reply's targets, under the frozen reference model


@dataclass(frozen=True)
class PairLoss:
    """A way to learn from preferences."""

    function: Callable[..., tuple[Tensor, Tensor]]  # (model, batch, *, settings with their defaults)
    source: str  # authors, year, title
    has_reference: bool = False  # compares with a frozen reference model


PAIR_STATS = ("pairs", "accurate", "chosen_reward", "rejected_reward")


def sum_over_pairs(
    losses: Tensor, rewards: Tensor, logp: Tensor, batch: PairBatch, sft_weight: float, stats: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The sum over the pairs that count, and their number. losses (P,), rewards and logp (P, 2)."""
    targets = reply_targets(batch)
    # Padding may hold pairs without a target; they count neither in the sum nor in its divisor.
    counts = (targets.amin(dim=1) > 0).float()  # (P,)
    if sft_weight:
        # The mean cross-entropy of the chosen reply holds its probability up.
        losses = losses - sft_weight * logp[:, 0] / targets[:, 0].clamp(min=1)
    if stats is not None:
        chosen, rejected = rewards.detach().unbind(dim=1)
        accurate = torch.sign(chosen - rejected) + 1  # both replies, none, or one for a tie
        stats += (counts * torch.stack((counts, accurate, chosen, rejected))).sum(dim=1)
    return (losses * counts).sum(), counts.sum()


def mean_pair_stats(stats: Tensor, device: Device) -> dict[str, float]:
    """The share of replies on the right side, and the mean reward of each kind; empty without a pair. `stats` (4,) are
    one rank's sums of PAIR_STATS."""
    pairs, accurate, chosen_reward, rejected_reward = sum_over_ranks(stats, device).tolist()
    if not pairs:
        return {}
    return {
        "accuracy": accurate / (2 * pairs),
        "margin": chosen_reward / pairs - rejected_reward / pairs,
        "chosen_reward": chosen_reward / pairs,
        "rejected_reward": rejected_reward / pairs,
    }


def reply_logp(model: Any, batch: PairBatch) -> Tensor:
    """Log probability in nats of each reply's targets together: (P, 2)."""
    return by_reply(token_logp(model, batch.rows), batch)


def reply_targets(batch: PairBatch) -> Tensor:
    """The number of targets of each reply: (P, 2)."""
    return by_reply((batch.rows.targets != IGNORE).float(), batch)


def by_reply(values: Tensor, batch: PairBatch) -> Tensor:
    """Sum values (N, T), which are 0 where there is no target, over each reply: (P, 2)."""
    # One mask for each reply, then a plain sum. index_add would do it without the masks, but adds in a changing order:
    # two runs of one seed would differ in their last digits.
    numbers = torch.arange(2 * batch.pairs, device=values.device)
    own = batch.rows.source == numbers[:, None, None]  # (R, N, T)
    return torch.where(own, values, 0.0).sum(dim=(1, 2)).view(batch.pairs, 2)


def dpo_loss(
    model: Any,
    batch: PairBatch,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    sft_weight: float = 0.0,
    stats: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """-log sigmoid(beta x (gain of the chosen reply - gain of the rejected one)), where a gain is log p - log
    p_reference.

    `label_smoothing` is the share of pairs taken to be the wrong way round (source: Mitchell 2023, conservative DPO).
    `sft_weight`, of every loss of pairs, adds the chosen reply's mean cross-entropy (source: Pang et al. 2024,
    Iterative RPO). The sums of PAIR_STATS are added to `stats` (4,); a reply's reward is beta x its gain, a tie counts
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
    # worse: 32 of 100 hold together at five times the default rate, 48 at the default, 44 before (2026-11-21).
    right = torch.nn.functional.logsigmoid(margin)
    wrong = torch.nn.functional.logsigmoid(-margin)
    losses = -(1 - label_smoothing) * right - label_smoothing * wrong
    return sum_over_pairs(losses, rewards, logp, batch, sft_weight, stats)


def simpo_loss(
    model: Any,
    batch: PairBatch,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
    sft_weight: float = 0.0,
    stats: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """-log sigmoid(beta x (mean log p of the chosen reply's tokens - mean of the rejected reply's) - gamma)."""
    logp = reply_logp(model, batch)
    # The reward is the mean log probability of a token, which also guides sampling. It needs no reference and half the
    # compute, and does not punish length. A chosen reply that leads by less than gamma still has a loss. Only the
    # learning rate and the length of the run keep the model close to its source.
    rewards = beta * logp / reply_targets(batch).clamp(min=1)  # (P, 2)
    losses = -torch.nn.functional.logsigmoid(rewards[:, 0] - rewards[:, 1] - gamma)
    return sum_over_pairs(losses, rewards, logp, batch, sft_weight, stats)


def orpo_loss(
    model: Any, batch: PairBatch, *, beta: float = 0.1, sft_weight: float = 1.0, stats: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """-beta log sigmoid(log of the ratio of the replies' odds) + the chosen reply's cross-entropy.

    Here a reply's probability is the geometric mean over its tokens, and its reward in `stats` is beta x log of it.
    """
    logp = reply_logp(model, batch)
    # SFT and preference in one stage: the cross-entropy dominates, and the odds ratio, with its small weight, pushes
    # the rejected reply down. For small p the odds are about p. As p approaches 1 they grow without limit: once the
    # chosen reply is certain, nothing is left to learn. The odds of a certain reply are infinite, so p stays below 1 by
    # the rounding of float32.
    mean = (logp / reply_targets(batch).clamp(min=1)).clamp(max=-1e-7)  # (P, 2)
    log_odds = mean - torch.log(-torch.expm1(mean))  # log p - log(1 - p)
    losses = -beta * torch.nn.functional.logsigmoid(log_odds[:, 0] - log_odds[:, 1])
    return sum_over_pairs(losses, beta * mean, logp, batch, sft_weight, stats)


DPO = PairLoss(dpo_loss, "Rafailov et al. 2023, DPO", has_reference=True)
SIMPO = PairLoss(simpo_loss, "Meng et al. 2024, SimPO")
ORPO = PairLoss(orpo_loss, "Hong et al. 2024, ORPO")
