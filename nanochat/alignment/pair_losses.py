"""Further losses of preferences: rows of the table in losses.py, which `chat_dpo --loss` finds by name.

c is the chosen reply and r the rejected one. log p(c) is the log probability of all tokens of c under the model, |c|
their number, g(c) = log p(c) - log q(c) the gain over the reference model q, and s the sigmoid:

    loss    formula for a pair                                           reference    beta
    dpo     -log s(beta (g(c) - g(r)))                                   yes          0.1
    ipo     (g(c) / |c| - g(r) / |r| - 1 / (2 beta))^2                   yes          0.1
    simpo   -log s(beta (log p(c) / |c| - log p(r) / |r|) - gamma)       no           2
    cpo     -log s(beta (log p(c) - log p(r))) - log p(c) / |c|          no           0.1
    orpo    -beta log s(log odds(c) - log odds(r)) - log p(c) / |c|      no           0.1

reward_model.py has the loss of a reward model.

An example: the chosen reply has tokens with p = 1/2 and 1/4, the rejected one three tokens with p = 1/2. Under the
reference the replies have 1/16 and 1/4. So log p = -3 ln 2 for both; the gains are ln 2 and -ln 2, the means
-3/2 ln 2 and -ln 2. With the betas of the table:

    dpo     -log s(0.1 x 2 ln 2)                        = 0.626
    ipo     (ln 2 / 2 + ln 2 / 3 - 5)^2                 = 19.557
    simpo   -log s(2 x (-1.5 ln 2 + ln 2) - 1)          = 1.862
    cpo     -log s(0) + 1.5 ln 2                        = 1.733
    orpo    -0.1 log s(ln 0.547 - ln 1) + 1.5 ln 2      = 1.144     odds = p / (1 - p) of p = 2^-1.5 and 2^-1

Legend: P pairs.
"""

from typing import Any

import torch
from torch import Tensor

from nanochat.losses import PairBatch, PairLoss, reply_logp, reply_targets, sum_over_pairs


def ipo_loss(
    model: Any, batch: PairBatch, *, beta: float = 0.1, sft_weight: float = 0.0, stats: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(difference of the gains - 1 / (2 beta))^2; a gain, and so the rewards in `stats`, is a mean over the reply's
    tokens here."""
    logp = reply_logp(model, batch)
    assert batch.reference_logp is not None
    # A mean, because one margin applies to all pairs: the sum of a long reply would be far from any margin.
    gains = (logp - batch.reference_logp) / reply_targets(batch).clamp(min=1)  # (P, 2)
    # A regression to a margin of 5 at beta = 0.1. DPO rewards a larger margin without limit, and overfits pairs whose
    # order is certain. Here a margin beyond the target increases the loss again.
    losses = (gains[:, 0] - gains[:, 1] - 1 / (2 * beta)).square()
    return sum_over_pairs(losses, beta * gains, logp, batch, sft_weight, stats)


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


def cpo_loss(
    model: Any, batch: PairBatch, *, beta: float = 0.1, sft_weight: float = 1.0, stats: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """-log sigmoid(beta x (log p of chosen reply - log p of rejected reply)) + the chosen reply's cross-entropy."""
    logp = reply_logp(model, batch)
    # DPO with a reference that gives all replies the same probability, which cancels out: no second model is needed.
    # Instead of the reference, the second term keeps the chosen reply likely. A sum over the tokens favours short
    # replies.
    rewards = beta * logp  # (P, 2)
    losses = -torch.nn.functional.logsigmoid(rewards[:, 0] - rewards[:, 1])
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


IPO = PairLoss(
    ipo_loss, "Azar et al. 2023, A General Theoretical Paradigm to Understand Learning from Preferences",
    has_reference=True,
)  # fmt: skip
SIMPO = PairLoss(simpo_loss, "Meng et al. 2024, SimPO")
CPO = PairLoss(cpo_loss, "Xu et al. 2024, Contrastive Preference Optimization")
ORPO = PairLoss(orpo_loss, "Hong et al. 2024, ORPO")
