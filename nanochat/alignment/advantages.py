"""Further advantages, from the rewards (Q, G) of G replies to each of Q questions; losses.py has the basic ones.

Four replies to a question, by their rewards:

    rewards    group_mean                   leave_one_out
    1 0 0 1     0.50 -0.50 -0.50  0.50       0.67 -0.67 -0.67  0.67
    1 0 0 0     0.75 -0.25 -0.25 -0.25       1.00 -0.33 -0.33 -0.33
    1 1 1 1     0     0     0     0          0     0     0     0
"""

import numpy as np

from nanochat.losses import Penalties, group_mean, has_signal


def leave_one_out(rewards: np.ndarray, penalties: Penalties = 0.0) -> np.ndarray:
    """Reward minus the mean of the other replies to its question (source: Ahmadian et al. 2024, Back to Basics: RLOO).

    The baseline leaves out the reply's own reward. So the mean gradient is the gradient of the expected reward, without
    the factor (G - 1) / G of `group_mean`.
    """
    samples = rewards.shape[1]
    return group_mean(rewards, penalties) * (samples / max(1, samples - 1))


def batch_deviation(rewards: np.ndarray, penalties: Penalties = 0.0) -> np.ndarray:
    """Reward minus the mean of all of the step's replies, by their deviation (source: Hu et al. 2025, REINFORCE++).

    All questions share a baseline: a question whose replies are always right also teaches, and an easy one teaches
    more. With `--kl_in reward` every token is charged for the KL of its whole reply; in the paper, only for the KL from
    this token on.
    """
    worth = rewards - penalties
    if worth.size == 0 or not has_signal(worth.reshape(1, -1)).any():
        return np.zeros_like(worth)
    # Equal rewards: the penalties keep their size.
    deviation = rewards.std() + 1e-6 if has_signal(rewards.reshape(1, -1)).any() else 1.0
    return (worth - worth.mean()) / deviation


def no_baseline(rewards: np.ndarray, penalties: Penalties = 0.0) -> np.ndarray:
    """The reward itself: PPO compares it with a value function, token by token (value.py)."""
    return rewards - penalties
