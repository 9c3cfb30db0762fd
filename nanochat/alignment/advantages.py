"""Advantages: how much better a reply was than expected, from the rewards (Q, G) of G replies to each of Q questions.

An advantage above 0 makes the tokens of its reply likelier, one below 0 less likely. Nothing here is learned: what is
expected of a reply is what the other replies earned. Four replies to a question, by their rewards:

    rewards    group_mean                   group_deviation              leave_one_out
    1 0 0 1     0.50 -0.50 -0.50  0.50       1.00 -1.00 -1.00  1.00       0.67 -0.67 -0.67  0.67
    1 0 0 0     0.75 -0.25 -0.25 -0.25       1.73 -0.58 -0.58 -0.58       1.00 -0.33 -0.33 -0.33
    1 1 1 1     0     0     0     0          0     0     0     0          0     0     0     0

Legend: Q questions, G samples a question.
"""

import numpy as np


def group_mean(rewards: np.ndarray) -> np.ndarray:
    """Reward less the mean of its question (source: Liu et al. 2025, Understanding R1-Zero-Like Training)."""
    # The mean reward of a question is its baseline: an easy question then teaches no more than a hard one, and a group
    # in which all replies are equally good teaches nothing.
    advantages = rewards - rewards.mean(axis=1, keepdims=True)
    # The mean of equals is rounded: of three rewards of 0.1 it is above 0.1, and nothing would pass for a preference.
    advantages[~has_signal(rewards)] = 0
    return advantages


def group_deviation(rewards: np.ndarray) -> np.ndarray:
    """That, divided by the standard deviation of its question (source: Shao et al. 2024, DeepSeekMath: GRPO).

    It is that of the G replies as a population, not of a sample (TRL), whose advantages are sqrt((G - 1) / G) as large.
    """
    # Dr. GRPO (Liu et al. 2025) leaves the division out: it gives questions that are nearly always right or nearly
    # always wrong a larger weight, as the second row above shows. In the demo Dr. GRPO learns stories as well (88.5%
    # against 86.5% after RL) and forgets less (docs/measurements.md).
    return group_mean(rewards) / (rewards.std(axis=1, keepdims=True) + 1e-6)  # a group of equals stays 0


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """Reward less the mean of the other replies to its question (source: Ahmadian et al. 2024, Back to Basics: RLOO).

    Its own reward is not in its baseline, so that the mean gradient is that of the expected reward, without the factor
    (G - 1) / G that `group_mean` has.
    """
    samples = rewards.shape[1]
    return group_mean(rewards) * (samples / max(1, samples - 1))


def batch_deviation(rewards: np.ndarray) -> np.ndarray:
    """Reward less the mean of all of the step's replies, by their deviation (source: Hu et al. 2025, REINFORCE++).

    All questions share a baseline: a question that is always right teaches, too, and an easy one teaches more. With
    `--kl_in reward` every token answers for the KL of its whole reply; in the paper for that from itself on.
    """
    if rewards.size == 0 or np.ptp(rewards) == 0:
        return np.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


def no_baseline(rewards: np.ndarray) -> np.ndarray:
    """The reward itself: PPO compares it with a value function, token by token (value.py)."""
    return rewards


def has_signal(rewards: np.ndarray) -> np.ndarray:
    """Of which questions some replies were better than others, (Q,)."""
    return np.ptp(rewards, axis=1) > 0


def overlong_penalty(lengths: np.ndarray, max_tokens: int, share: float) -> np.ndarray:
    """What replies of these lengths lose: 0, and in the last `share` of max_tokens linearly up to 1.

    A reply that is cut off is worth nothing, and one that ends just before is worth all: this slope teaches the model
    to come to an end (source: Yu et al. 2025, DAPO, soft overlong punishment).
    """
    if not share:
        return np.zeros(lengths.shape)
    # With max_tokens 100 and a share of 0.2, a reply of 80 tokens loses 0, one of 90 0.5, one of 100 1.
    slope = max_tokens * share
    return ((lengths - (max_tokens - slope)) / slope).clip(0, 1)
