"""What DAPO adds to a step of RL: new questions in place of those that teach nothing, and a penalty for long replies.

Source: Yu et al. 2025, DAPO. `--refills` is for all methods, the penalty only for `--loss dapo`.

Legend: Q questions, G samples a question.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from nanochat.device import Device
from nanochat.losses import has_signal
from nanochat.rollout import RankSamples, Samples, gather_samples

OVERLONG_SHARE = 0.2  # last share of max_tokens in which a reply's reward falls


def with_refills(drawn: Samples, refills: int, draw: Callable[[int, int], RankSamples], device: Device) -> Samples:
    """A step's samples, with questions without a signal replaced by others, up to `refills` times.

    `draw(refill, count)` samples `count` other questions. All ranks call this together.
    """
    for refill in range(1, 1 + refills):
        if drawn.without_signal:
            drawn = replace_questions(drawn, gather_samples(draw(refill, drawn.without_signal), device))
    return drawn


def replace_questions(drawn: Samples, more: Samples) -> Samples:
    """Replace questions without a signal by questions of `more` that have one, as far as these suffice."""
    # The rewards themselves decide: DAPO filters by accuracy, before its overlong penalty changes them. Otherwise
    # replies that are all right but not equally long would look like a signal.
    groups = list(drawn.groups)
    free = np.flatnonzero(~has_signal(drawn.rewards)).tolist()
    spare = np.flatnonzero(has_signal(more.rewards)).tolist()
    for place, question in zip(free, spare, strict=False):
        groups[place] = more.groups[question]
    return replace(drawn, groups=groups)


def overlong_penalty(lengths: np.ndarray, max_tokens: int) -> np.ndarray:
    """The penalty for replies of these lengths: 0, and in the last fifth of max_tokens linearly up to 1.

    A reply that is cut off has usually missed its answer, and a reply that ends just before has it. This slope teaches
    the model to finish (soft overlong punishment).
    """
    # With max_tokens 100 a reply of 80 tokens loses 0, one of 90 0.5, one of 100 1.
    slope = max_tokens * OVERLONG_SHARE
    return ((lengths - (max_tokens - slope)) / slope).clip(0, 1)
