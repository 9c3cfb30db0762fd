"""PPO's value function: what each token of a reply promised, so that the tokens at which it got better are rewarded.

The scalar head (gpt.py) predicts, at each sampled token, the reward that the reply will earn. A token's advantage is
how much the prediction rose from there on, and at the end how far the reward exceeds it.

Legend: N rows, T tokens a row.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanochat.cross_entropy import IGNORE
from nanochat.device import Device
from nanochat.losses import PolicyBatch
from nanochat.parallel.collectives import sum_over_ranks
from nanochat.shell.cli import UserError


def settings(flags: Any, has_values: bool) -> tuple[dict[str, float], dict[str, float]]:
    """The flags for `estimate`, and those for `policy_loss`. Raises UserError: when the loss has no value function."""
    names = ("discount", "gae_lambda", "value_weight", "value_clip")
    given = {name: getattr(flags, name) for name in names if getattr(flags, name) is not None}
    if given and not has_values:
        raise UserError(f"--{next(iter(given))}: --loss {flags.loss} has no value function, ppo has")
    estimates = {"discount": given.pop("discount", 1.0), "gae_lambda": given.pop("gae_lambda", 0.95)}
    return estimates, given


@torch.no_grad()
def estimate(
    model: Any, minibatches: Sequence[Sequence[PolicyBatch]], discount: float, gae_lambda: float, device: Device
) -> list[list[PolicyBatch]]:
    """Minibatches whose advantages are so far each sample's reward, with those of each token, and what the scalar head
    is to learn. The advantages have mean 0 and deviation 1 over all targets of the step."""
    done = []
    totals = torch.zeros(3, device=device.torch_device)  # targets, sum of their advantages, and of the squares
    for batches in minibatches:
        parts = []
        for batch in batches:
            rows = batch.rows
            values = model(rows.inputs, rows.targets, segments=rows.segments, scalars=True)
            values = torch.where(rows.targets != IGNORE, values, 0.0)
            advantages = token_advantages(values, batch.advantages, rows.targets, rows.source, discount, gae_lambda)
            totals += torch.stack(((rows.targets != IGNORE).sum().float(), advantages.sum(), advantages.square().sum()))
            parts.append(replace(batch, advantages=advantages, old_values=values, returns=values + advantages))
        done.append(parts)
    count, total, squares = sum_over_ranks(totals, device).tolist()
    mean = total / max(1.0, count)
    deviation = max(0.0, squares / max(1.0, count) - mean**2) ** 0.5
    return [
        [
            replace(
                b, advantages=torch.where(b.rows.targets != IGNORE, (b.advantages - mean) / (deviation + 1e-6), 0.0)
            )
            for b in batches
        ]
        for batches in done
    ]


def token_advantages(
    values: Tensor, rewards: Tensor, targets: Tensor, source: Tensor, discount: float, gae_lambda: float
) -> Tensor:
    """Generalised advantages (N, T) from values and each sample's reward at all of its targets, both (N, T).

    Source: Schulman et al. 2016, High-Dimensional Continuous Control Using Generalized Advantage Estimation.
    """
    # delta_t = r_t + discount V_(t+1) - V_t, and A_t = delta_t + discount lambda A_(t+1), from a sample's last target
    # to its first. Only the last target has a reward, and nothing follows it. With values 0.5, 0.75, a reward of 1, a
    # discount of 1 and lambda 0.5:
    #
    #     A_2 = 1 - 0.75 = 0.25        A_1 = (0.75 - 0.5) + 0.5 x 0.25 = 0.375
    #
    # With lambda 1 the value is a mere baseline: A = reward - V, exact but noisy. With lambda 0 each token is judged by
    # the next one's value alone, which is biased as long as the values are wrong.
    advantages = torch.zeros_like(values)
    next_value = torch.zeros_like(values[:, 0])  # (N,)
    next_advantage = torch.zeros_like(next_value)
    later = torch.full_like(source[:, 0], -1)  # the sample of the target after this one
    for t in reversed(range(values.size(1))):
        is_target = targets[:, t] != IGNORE
        goes_on = source[:, t] == later
        reward = torch.where(goes_on, 0.0, rewards[:, t])
        delta = reward + discount * torch.where(goes_on, next_value, 0.0) - values[:, t]
        advantage = delta + discount * gae_lambda * torch.where(goes_on, next_advantage, 0.0)
        advantages[:, t] = torch.where(is_target, advantage, 0.0)
        # The tokens of a tool between two targets change nothing.
        next_value = torch.where(is_target, values[:, t], next_value)
        next_advantage = torch.where(is_target, advantage, next_advantage)
        later = torch.where(is_target, source[:, t], later)
    return advantages
