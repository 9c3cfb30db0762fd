"""PPO's value function: predict the reward at each token, so that tokens that improve the prediction are rewarded.

The scalar head (gpt.py) predicts, at each sampled token, the reward that the reply will earn. A token's advantage is
the rise of the prediction from there on, and at the end the amount by which the reward exceeds it.

Legend: N rows, T tokens a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nanochat.collectives import sum_over_ranks
from nanochat.cross_entropy import IGNORE
from nanochat.device import Device
from nanochat.losses import PolicyBatch


@dataclass(frozen=True)
class ValueFunction:
    """The scalar head as a critic, with the flags of chat_rl as its settings."""

    discount: float = 1.0  # weight of the next token's value
    gae_lambda: float = 0.95  # 1: the reward judges all tokens; 0: the next value does
    value_weight: float = 0.5  # weight of the value loss
    value_clip: float = 0.2  # how far a value may move

    @torch.no_grad()
    def estimate(
        self, model: Any, minibatches: Sequence[Sequence[PolicyBatch]], device: Device
    ) -> list[list[PolicyBatch]]:
        """Replace each sample's reward in `advantages` by an advantage per token, and add the scalar head's targets.

        The advantages have mean 0 and deviation 1 over all targets of the step, as is usual in PPO.
        """
        done = []
        totals = torch.zeros(2, device=device.torch_device)  # targets, and the sum of their advantages
        for batches in minibatches:
            parts = []
            for batch in batches:
                rows = batch.rows
                values = model(rows.inputs, rows.targets, segments=rows.segments, scalars=True)
                values = torch.where(rows.targets != IGNORE, values, 0.0)
                advantages = token_advantages(
                    values, batch.advantages, rows.targets, rows.source, self.discount, self.gae_lambda
                )
                totals += torch.stack(((rows.targets != IGNORE).sum().float(), advantages.sum()))
                parts.append(replace(batch, advantages=advantages, old_values=values, returns=values + advantages))
            done.append(parts)
        # Subtract the mean before summing the squares: in fp32 the squares of rewards near 10,000 have no digit left
        # for a deviation of 1.
        count, total = sum_over_ranks(totals, device).tolist()
        squares = torch.zeros(1, device=device.torch_device)
        every = [batch for batches in done for batch in batches]
        for batch in every:
            batch.advantages.sub_(total / max(1.0, count)).mul_(batch.rows.targets != IGNORE)
            squares += batch.advantages.square().sum()
        variance = sum_over_ranks(squares, device).item() / max(1.0, count)
        for batch in every:
            batch.advantages.div_((variance + 1e-8) ** 0.5)  # equal advantages stay 0, up to rounding
        return done

    def error(self, model: Any, batch: PolicyBatch) -> Tensor:
        """The weighted error of the scalar head at each target, (N, T), 0 elsewhere; a second forward pass."""
        return self.value_weight * value_error(model, batch, self.value_clip)


def value_error(model: Any, batch: PolicyBatch, clip: float) -> Tensor:
    """Half the squared error of the scalar head at each target, (N, T), 0 elsewhere; a second forward pass."""
    assert batch.old_values is not None and batch.returns is not None
    values = model(batch.rows.inputs, batch.rows.targets, segments=batch.rows.segments, scalars=True)
    # Like a probability, a value moves at most by the clip. Beyond it the larger of two errors counts, which has no
    # gradient (source: Schulman et al. 2017, PPO, in its code).
    near = batch.old_values + (values - batch.old_values).clamp(-clip, clip)
    error = torch.maximum((values - batch.returns).square(), (near - batch.returns).square())
    return 0.5 * torch.where(batch.rows.targets != IGNORE, error, 0.0)


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
    # With lambda 1 the value is only a baseline: A = reward - V, exact but noisy. With lambda 0 only the next token's
    # value judges a token, which is biased while the values are wrong.
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
        # Tokens of a tool between two targets change nothing.
        next_value = torch.where(is_target, values[:, t], next_value)
        next_advantage = torch.where(is_target, advantage, next_advantage)
        later = torch.where(is_target, source[:, t], later)
    return advantages
