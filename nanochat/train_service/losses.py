"""The losses that a client names in forward_backward, each a function of token-level tensors.

    L(logp, inputs) -> loss of each token (N, T), times its weight; backward runs from the sum

The losses are sums, not means, and are not weighted by length: the client chooses the divisor, in its weights, its
advantages or its learning rate. Without `weights` each weight is 1. p is the probability of a token, q its probability
at sampling, r = p / q, A its advantage and s the geometric mean of r over a sample:

    loss                   formula for a token
    cross_entropy          -log p
    importance_sampling    -r A
    ppo                    -min(r A, clip(r) A)
    cispo                  -clip(r) A log p, with no gradient through r
    dro                    -(A log p - beta / 2 (log p - log q)^2)
    gspo                   -min(s A, clip(s) A), where s has the gradient of the token's r

cross_entropy also takes several targets per token, (N, T, K). With a teacher's probabilities as weights this is
distillation from its K most likely tokens.

Legend: N rows, T tokens a row, K targets a token.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nanochat.alignment.policy_losses import weighted_log_objective
from nanochat.ground.cli import UserError
from nanochat.losses import clipped_objective


@dataclass(frozen=True)
class TokenLoss:
    """A row of the table."""

    function: Callable[..., Tensor]  # (logp, *inputs, **settings) -> (N, T)
    inputs: tuple[str, ...]  # names in loss_fn_inputs, in the order of the function's parameters
    settings: Mapping[str, float]  # names in loss_fn_config, with their defaults


def cross_entropy(logp: Tensor) -> Tensor:
    return -logp


def importance_sampling(logp: Tensor, old_logp: Tensor, advantages: Tensor) -> Tensor:
    # r corrects for samples that another policy has drawn. If it was this policy, r is 1 and has the gradient of log p:
    # REINFORCE.
    return -torch.exp(logp - old_logp) * advantages


def clipped(objective: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss with a clip. Where PPO's applies, a token has no gradient. In cispo every token has a gradient: its clip
    bounds only its weight."""

    def loss(
        logp: Tensor, old_logp: Tensor, advantages: Tensor, *, clip_low_threshold: float, clip_high_threshold: float
    ) -> Tensor:
        # The thresholds are the ends of the clip; nanochat/losses.py counts them from 1.
        ratio = torch.exp(logp - old_logp)
        return -objective(logp, ratio, advantages, 1 - clip_low_threshold, clip_high_threshold - 1)

    return loss


def dro(logp: Tensor, old_logp: Tensor, advantages: Tensor, *, beta: float) -> Tensor:
    # The square pulls the policy back towards the sampling policy at every token, even if A is 0.
    return -(logp * advantages - beta / 2 * (logp - old_logp).square())


def gspo(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    sequence_ratio_mask: Tensor,
    *,
    clip_low_threshold: float,
    clip_high_threshold: float,
) -> Tensor:
    # The mask is 1 at the sampled tokens. Every token has the sample's ratio and its own gradient: the difference of
    # log p and the same number without a gradient is 0.
    is_sampled = (sequence_ratio_mask != 0).to(logp.dtype)
    total = ((logp - old_logp).detach() * is_sampled).sum(dim=1, keepdim=True)
    ratio = torch.exp(total / is_sampled.sum(dim=1, keepdim=True).clamp(min=1) + logp - logp.detach())
    return -clipped_objective(logp, ratio, advantages, 1 - clip_low_threshold, clip_high_threshold - 1)


POLICY_INPUTS = ("logprobs", "advantages")
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

TOKEN_LOSSES = {
    "cross_entropy": TokenLoss(cross_entropy, (), {}),
    # Williams 1992, Simple Statistical Gradient-Following Algorithms
    "importance_sampling": TokenLoss(importance_sampling, POLICY_INPUTS, {}),
    # Schulman et al. 2017, Proximal Policy Optimization Algorithms
    "ppo": TokenLoss(clipped(clipped_objective), POLICY_INPUTS, CLIP),
    # MiniMax 2025, MiniMax-M1
    "cispo": TokenLoss(clipped(weighted_log_objective), POLICY_INPUTS, CLIP),
    # Richemond et al. 2024, Offline Regularised RL (DRO)
    "dro": TokenLoss(dro, POLICY_INPUTS, {"beta": 0.05}),
    # Zheng et al. 2025, Group Sequence Policy Optimization, with the paper's clip
    "gspo": TokenLoss(
        gspo, (*POLICY_INPUTS, "sequence_ratio_mask"), {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4}
    ),
}


def find_loss(name: str, config: Mapping[str, float]) -> tuple[TokenLoss, dict[str, float]]:
    """A loss, and all its settings.

    Raises UserError: for a loss or a setting that is not in the table; it never substitutes another one.
    """
    loss = TOKEN_LOSSES.get(name)
    if loss is None:
        raise UserError(f"loss_fn {name[:50]!r}: this server has {', '.join(TOKEN_LOSSES)}")
    for setting, value in config.items():
        if setting not in loss.settings:
            known = ", ".join(loss.settings) or "none"
            raise UserError(f"loss_fn_config {setting[:50]!r}: {name} has {known}")
        if not math.isfinite(value) or value < 0:
            raise UserError(f"loss_fn_config {setting} {value}: at least 0, and finite")
    return loss, {**loss.settings, **config}
