"""Differences of two models: by hand, between equal models, and found where there are some."""

import numpy as np
import pytest

from nanochat.evals.paired import beyond_chance, paired, wilson_interval
from nanochat.tasks.flag import generated_tasks

# The accuracies of the speedrun's model, on 200 questions each (docs/measurements.md), and the mean reward of a story.
ACCURACIES = (0.60, 0.44, 0.66, 0.82, 0.97, 0.91, 0.96, 0.73, 0.68, 0.75, 0.87)
REWARD = 0.6
QUESTIONS = 200


def test_wilson():
    intervals = {(5, 10): (0.2366, 0.7634), (8, 10): (0.4902, 0.9433), (0, 4): (0.0, 0.4899), (4, 4): (0.5101, 1.0)}
    assert {counts: wilson_interval(*counts) for counts in intervals} == {
        counts: pytest.approx(ends, abs=1e-4) for counts, ends in intervals.items()
    }


def by_key(*scores: float) -> dict[str, float]:
    return {f"{number:03}": score for number, score in enumerate(scores)}


@pytest.mark.parametrize(
    ("both", "rose", "fell", "neither", "chance", "low", "high"),
    [
        (10, 8, 2, 30, 112 / 1024, -0.0114, 0.2421),  # P(X >= 8 of 10), twice; 6/52 -+ 1.96 sqrt((12/52 - (6/52)^2)/52)
        (40, 6, 0, 4, 2 / 64, 0.0135, 0.2173),
        (50, 0, 0, 0, 1.0, -0.0533, 0.0533),
    ],
)
def test_right_and_wrong_by_hand(both, rose, fell, neither, chance, low, high):
    before = by_key(*[1.0] * both, *[0.0] * rose, *[1.0] * fell, *[0.0] * neither)
    after = by_key(*[1.0] * both, *[1.0] * rose, *[0.0] * fell, *[0.0] * neither)
    found = paired(before, {**dict(reversed(after.items())), "999": 1.0})  # in any order; one that the other lacks
    assert found and (found.questions, found.change, found.chance) == (50, (rose - fell) / 50, chance)
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))
    assert paired(before, {"999": 1.0}) is None


def test_graded_scores():
    """Differences of one size are right and wrong with another unit: the random signs approach the exact test."""
    before = by_key(*[0.5] * 50)
    found = paired(before, by_key(*[0.75] * 8, *[0.25] * 2, *[0.5] * 40))
    assert found and found.change == 0.03 and found.chance == pytest.approx(112 / 1024, abs=0.02)
    assert found.low == pytest.approx(0.03 - 1.96 * 0.108 / 50**0.5, abs=0.006) and found.high < 0.07
    rose = paired(before, by_key(*[0.625] * 50))
    assert rose and rose.low == rose.high == rose.change == 0.125 and rose.chance < 0.001


def test_the_more_rows_the_more_each_has_to_show():
    assert beyond_chance([0.04]) == [True] and beyond_chance([0.04, 0.9]) == [False, False]
    assert beyond_chance([0.03, 0.001, 0.02, 0.9]) == [False, True, False, False]  # 0.02 > 0.05 / 3
    assert beyond_chance([0.03, 0.001, 0.016, 0.9]) == [False, True, True, False]  # 0.03 > 0.05 / 2
    assert beyond_chance([]) == []


def marks(random: np.random.Generator, effect: float, spread: float = 1.0) -> list[bool]:
    """Which tasks are marked between two models that differ by `effect` in the first one. The smaller `spread`, the
    more the questions differ: near 0 each is answered always or never."""
    pairs = []
    for number, accuracy in enumerate((*ACCURACIES, REWARD)):
        chances = random.beta(accuracy * spread, (1 - accuracy) * spread, QUESTIONS)
        scores = []
        for shift in (0, effect if number == 0 else 0):
            answers = (random.random(QUESTIONS) < np.clip(chances + shift, 0, 1)).astype(float)
            if number == len(ACCURACIES):  # graded: half for another property of the reply
                answers = (answers + (random.random(QUESTIONS) < chances)) / 2
            scores.append(by_key(*answers.tolist()))
        pairs.append(paired(*scores).chance)  # type: ignore[union-attr]
    return beyond_chance(pairs)


@pytest.mark.slow
def test_equal_models_are_rarely_marked_and_others_are_found():
    """Of 1,000 pairs of equal models at most 5% have any mark; most true differences are found."""
    assert len(ACCURACIES) == len(generated_tasks())
    random = np.random.default_rng(8)
    equal = [marks(random, effect=0) for _ in range(1000)]
    assert 0 < sum(any(marked) for marked in equal) <= 50
    found = [marks(random, effect=0.15) for _ in range(200)]
    assert sum(marked[0] for marked in found) > 100
