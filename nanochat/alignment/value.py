"""PPO's value function: predict the reward at each token, so that tokens that improve the prediction are rewarded.

The scalar head (gpt.py) predicts, at each sampled token, the reward that the reply will earn. A token's advantage is
the rise of the prediction from there on, and at the end the amount by which the reward exceeds it.

Legend: N rows, T tokens a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanochat.cross_entropy import IGNORE
from nanochat.device import Device
from nanochat.losses import PolicyBatch
from nanochat.ranks import sum_over_ranks

VALUE_WEIGHT = 0.5  # weight of the error of the values in the loss
VALUE_CLIP = 0.2  # how far a value may move


@dataclass(frozen=True)
class ValuedBatch(PolicyBatch):
    """Packed samples with advantages per token; both fields are (N, T)."""

    old_values: Tensor | None = None  # the scalar head before the step's first update
    returns: Tensor | None = None  # the targets of the scalar head


@dataclass(frozen=True)
class ValueFunction:
    """The scalar head as a critic."""

    gae_lambda: float = 0.95  # 1: the reward judges all tokens; 0: the next value does

    @torch.no_grad()
    def estimate(
        self, model: Any, minibatches: Sequence[Sequence[PolicyBatch]], device: Device
    ) -> list[list[ValuedBatch]]:
        """Replace each sample's reward in `advantages` by an advantage per token, and add the scalar head's targets.

        The advantages have mean 0 and deviation 1 over all targets of the step, as is usual in PPO. The host waits for
        the device once, and once more where several ranks share their sums.
        """
        every = [batch for batches in minibatches for batch in batches]
        old_values = []
        needed = []
        for batch in every:
            rows = batch.rows
            is_target = rows.targets != IGNORE
            values = model(rows.inputs, rows.targets, segments=rows.segments, scalars=True)
            old_values.append(torch.where(is_target, values, 0.0))
            needed += [old_values[-1], batch.advantages, is_target, rows.source]

        # An advantage needs the advantage of the next token. A device would launch 19 tiny operators for each place of
        # a row, 38,937 in all for 2,048 tokens (simulated NPU). The host needs some milliseconds and a copy each way.
        on_host = _to_host(needed)
        advantages = []
        returns = []
        masks = []
        for first in range(0, len(on_host), 4):
            values, rewards, is_target, source = on_host[first : first + 4]
            masks.append(is_target > 0)
            own = token_advantages(values, rewards, masks[-1], source, self.gae_lambda)
            advantages.append(own)
            returns.append(values + own)

        mean, deviation = _mean_and_deviation(advantages, masks, device)
        for own, mask in zip(advantages, masks, strict=True):
            own[mask] = (own[mask] - mean) / deviation  # equal advantages stay 0, up to rounding
        sent = _to_device([*advantages, *returns], device)

        filled = []
        for number, batch in enumerate(every):
            filled.append(ValuedBatch(**{
                **vars(batch), "advantages": sent[number], "old_values": old_values[number],
                "returns": sent[len(every) + number],
            }))  # fmt: skip
        remaining = iter(filled)
        return [[next(remaining) for _ in batches] for batches in minibatches]

    def error(self, model: Any, batch: ValuedBatch) -> Tensor:
        """The weighted error of the scalar head at each target, half of its square, (N, T), 0 elsewhere; a second
        forward pass."""
        assert batch.old_values is not None and batch.returns is not None
        values = model(batch.rows.inputs, batch.rows.targets, segments=batch.rows.segments, scalars=True)
        # Like a probability, a value moves at most by the clip. Beyond it the larger of two errors counts, which has no
        # gradient (source: Schulman et al. 2017, PPO, in its code).
        near = batch.old_values + (values - batch.old_values).clamp(-VALUE_CLIP, VALUE_CLIP)
        error = torch.maximum((values - batch.returns).square(), (near - batch.returns).square())
        return VALUE_WEIGHT * (0.5 * torch.where(batch.rows.targets != IGNORE, error, 0.0))


def token_advantages(
    values: np.ndarray, rewards: np.ndarray, is_target: np.ndarray, source: np.ndarray, gae_lambda: float
) -> np.ndarray:
    """Generalised advantages (N, T) in fp64; places without a target get 0.

    All arrays are (N, T): the values, each sample's reward at all of its targets, whether a place is a target, and the
    number of its sample.
    Source: Schulman et al. 2016, High-Dimensional Continuous Control Using Generalized Advantage Estimation.
    """
    # delta_t = r_t + V_(t+1) - V_t, and A_t = delta_t + lambda A_(t+1), from a sample's last target to its first: the
    # discount is 1, because a reply is as good however long it is. Only the last target has a reward, and nothing
    # follows it. With values 0.5, 0.75, a reward of 1 and lambda 0.5:
    #
    #     A_2 = 1 - 0.75 = 0.25        A_1 = (0.75 - 0.5) + 0.5 x 0.25 = 0.375
    #
    # With lambda 1 the value is only a baseline: A = reward - V, exact but noisy. With lambda 0 only the next token's
    # value judges a token, which is biased while the values are wrong.
    #
    # Below are the targets only, row by row: a tool's tokens between two targets change nothing.
    value = values[is_target].astype(np.float64)
    row = np.nonzero(is_target)[0]
    sample = source[is_target]
    goes_on = np.zeros(len(value), dtype=bool)  # whether the next target belongs to the same sample
    goes_on[:-1] = (row[1:] == row[:-1]) & (sample[1:] == sample[:-1])
    reward = np.where(goes_on, 0.0, rewards[is_target])
    next_value = np.where(goes_on, np.append(value[1:], 0.0), 0.0)
    delta = reward + next_value - value
    decay = np.where(goes_on, gae_lambda, 0.0)

    # Python's own numbers: in this loop they are several times as fast as numpy's scalars.
    backwards = []
    advantage = 0.0
    for rise, share in zip(delta[::-1].tolist(), decay[::-1].tolist(), strict=True):
        advantage = rise + share * advantage
        backwards.append(advantage)
    advantages = np.zeros(values.shape)
    advantages[is_target] = backwards[::-1]
    return advantages


def _mean_and_deviation(
    advantages: Sequence[np.ndarray], masks: Sequence[np.ndarray], device: Device
) -> tuple[float, float]:
    """The mean and the deviation over all targets of all ranks."""
    at_targets = [own[mask] for own, mask in zip(advantages, masks, strict=True)]
    own = np.concatenate([*at_targets, np.zeros(0)])  # a rank may have none
    own_mean = own.mean() if own.size else 0.0
    # Each rank subtracts its mean before it squares: the squares of rewards near 10,000 would leave fp32 no digit for a
    # deviation of 1. A rank fills only its row of the table, so the sum over ranks gives all of them the whole table.
    numbers = np.zeros((device.world_size, 3))
    numbers[device.rank] = own.size, own_mean, np.square(own - own_mean).sum()
    if device.world_size > 1:
        (on_device,) = _to_device([numbers], device)
        (numbers,) = _to_host([sum_over_ranks(on_device, device)])
    counts, means, squares = numbers.astype(np.float64).T
    count = max(1.0, counts.sum())
    mean = (counts * means).sum() / count
    # The squares of the distances to the common mean: those to the own mean, and the distance of the two means.
    variance = (squares + counts * np.square(means - mean)).sum() / count
    return mean, (variance + 1e-8) ** 0.5


def _to_host(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """Tensors of one device as fp32 arrays on the host, in one copy; this waits for the device.

    fp32 represents whole numbers exactly up to 2^24, which is enough for the number of a sample.
    """
    if not tensors:
        return []
    flat = torch.cat([tensor.float().flatten() for tensor in tensors]).cpu().numpy()
    ends = np.cumsum([tensor.numel() for tensor in tensors])[:-1]
    return [part.reshape(tensor.shape) for part, tensor in zip(np.split(flat, ends), tensors, strict=True)]


def _to_device(arrays: Sequence[np.ndarray], device: Device) -> list[Tensor]:
    """Arrays as fp32 tensors on the device, in one copy that the host does not wait for."""
    if not arrays:
        return []
    flat = np.concatenate([array.ravel() for array in arrays]).astype(np.float32)
    parts = device.to_device(torch.from_numpy(flat)).split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
