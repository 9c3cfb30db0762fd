"""How far two models differ on a task, and whether chance explains it.

Two stages answer the same questions. What is hard for one is hard for the other, so they are compared question by
question: these differences vary less than the two accuracies do. Only questions that both answered are compared.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

DRAWS = 2000  # for a bootstrap, and for a test by random signs
LEVEL = 0.05  # how often a stage that changed nothing may have any mark
Z = 1.96  # standard errors from the middle of a 95% interval to an end


@dataclass(frozen=True)
class Difference:
    """The mean score of a model, less the score of the model before."""

    change: float
    low: float  # the 95% interval
    high: float
    chance: float  # the probability that equal models differ by as much: a p-value
    questions: int  # that both answered


def wilson_interval(correct: float, total: float) -> tuple[float, float]:
    """The 95% confidence interval of an accuracy. Source: Wilson 1927."""
    share = correct / total
    middle = (share + Z * Z / (2 * total)) / (1 + Z * Z / total)
    reach = Z / (1 + Z * Z / total) * math.sqrt(share * (1 - share) / total + Z * Z / (4 * total * total))
    return max(middle - reach, 0.0), min(middle + reach, 1.0)


def paired(before: Mapping[str, float], after: Mapping[str, float]) -> Difference | None:
    """From two models' scores, each question -> score; None where no question is in both."""
    questions = sorted(before.keys() & after.keys())
    count = len(questions)
    if not count:
        return None
    differences = np.array([after[question] - before[question] for question in questions])
    change = float(differences.mean())
    if np.isin(differences, (-1, 0, 1)).all():
        # Right and wrong. Where only one of two equal models is right, it is either one with probability 1/2: McNemar's
        # exact test (1947). The interval is Bonett and Price's (2012), which adds one question to each side.
        rose, fell = int((differences > 0).sum()), int((differences < 0).sum())
        tail = sum(math.comb(rose + fell, more) for more in range(max(rose, fell), rose + fell + 1))
        middle = (rose - fell) / (count + 2)
        reach = Z * math.sqrt(((rose + fell + 2) / (count + 2) - middle**2) / (count + 2))
        chance = min(1.0, 2 * tail / 2 ** (rose + fell))
        return Difference(change, max(middle - reach, -1.0), min(middle + reach, 1.0), chance, count)
    # Rewards and other graded scores. Between equal models the sign of each difference is random, so the test draws
    # signs (Fisher 1935). The interval is a bootstrap's (Efron 1979), which is too narrow where questions are few.
    random = np.random.default_rng(0)
    flipped = (2.0 * random.integers(2, size=(DRAWS, count), dtype=np.int8) - 1) @ differences
    as_large = np.abs(flipped) >= abs(differences.sum()) - 1e-9
    low, high = np.quantile(differences[random.integers(count, size=(DRAWS, count))].mean(axis=1), (0.025, 0.975))
    return Difference(change, float(low), float(high), float(1 + as_large.sum()) / (1 + DRAWS), count)


def beyond_chance(chances: Sequence[float]) -> list[bool]:
    """Which of several p-values stand out together: between equal models, any does with a probability of at most LEVEL.
    Source: Holm 1979."""
    found = [False] * len(chances)
    for rank, place in enumerate(sorted(range(len(chances)), key=lambda place: chances[place])):
        if chances[place] > LEVEL / (len(chances) - rank):
            break
        found[place] = True
    return found
