"""Further advantages, from the rewards (Q, G) of G replies to each of Q questions, and the KL of `--kl_in reward`.

Four replies to a question, by their rewards:

    rewards    group_mean                   leave_one_out
    1 0 0 1     0.50 -0.50 -0.50  0.50       0.67 -0.67 -0.67  0.67
    1 0 0 0     0.75 -0.25 -0.25 -0.25       1.00 -0.33 -0.33 -0.33
    1 1 1 1     0     0     0     0          0     0     0     0
"""

from collections.abc import Sequence

import numpy as np
import torch

from nanochat.device import Device
from nanochat.losses import Penalties, PolicyBatch, group_mean
from nanochat.ranks import sum_over_ranks


def leave_one_out(rewards: np.ndarray, penalties: Penalties = 0.0) -> np.ndarray:
    """Reward minus the mean of the other replies to its question (source: Ahmadian et al. 2024, Back to Basics: RLOO).

    The baseline leaves out the reply's own reward. So the mean gradient is the gradient of the expected reward, without
    the factor (G - 1) / G of `group_mean`.
    """
    samples = rewards.shape[1]
    return group_mean(rewards, penalties) * (samples / max(1, samples - 1))


def no_baseline(rewards: np.ndarray, penalties: Penalties = 0.0) -> np.ndarray:
    """The reward itself: PPO compares it with a value function, token by token (value.py)."""
    return rewards - penalties


def kl_of_samples(batches: Sequence[Sequence[PolicyBatch]], sizes: Sequence[int], device: Device) -> np.ndarray:
    """log p(o) - log p_reference(o) of each sample in nats, (S,): its share of the KL to the reference.

    p is the model's own, from before the step's first update: the sampler rounds otherwise. `sizes` are the numbers of
    samples of the minibatches, `batches` their micro-batches. The host waits once, for all of them.
    """
    differences = []
    sources = []
    count = 0
    for size, micro_batches in zip(sizes, batches, strict=True):
        for batch in micro_batches:
            assert batch.old_logp is not None and batch.reference_logp is not None
            differences.append((batch.old_logp - batch.reference_logp).flatten())
            sources.append((count + batch.rows.source).flatten())
        count += size
    # A sample lies in one row of one rank, or of the ranks that share it: it is summed there, and is 0 elsewhere.
    own = np.bincount(torch.cat(sources).cpu().numpy(), torch.cat(differences).cpu().numpy(), count)
    own /= device.context_ranks
    return sum_over_ranks(device.to_device(torch.from_numpy(own).float()), device).cpu().numpy()
