"""Advantages against numbers worked by hand."""

import numpy as np
import pytest
from tiny import all_losses

from nanochat.alignment.advantages import leave_one_out
from nanochat.alignment.dapo import overlong_penalty
from nanochat.losses import group_deviation, group_mean

METHODS = all_losses("policy losses")
REWARDS = np.array([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])


def test_those_of_a_question():
    assert group_mean(REWARDS).tolist() == [[0.75, -0.25, -0.25, -0.25], [0] * 4]
    by_deviation = group_deviation(REWARDS)
    assert by_deviation[0] == pytest.approx(np.array([0.75, -0.25, -0.25, -0.25]) / (0.1875**0.5), rel=1e-5)
    assert by_deviation[1].tolist() == [0] * 4  # equals: nothing to learn, and no NaN
    # 1 against the mean of 0 0 0; 0 against the mean of 1 0 0
    assert leave_one_out(REWARDS) == pytest.approx(np.array([[1, -1 / 3, -1 / 3, -1 / 3], [0] * 4]))
    equal = np.full((1, 3), 0.1)  # whose mean is not 0.1
    assert equal.mean() != 0.1 and group_deviation(equal).tolist() == [[0] * 3]


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"ppo", "distill"}))
def test_penalties_are_not_in_the_deviation(name):
    advantages = METHODS[name].advantages
    one = 1e-6 * np.array([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])  # rounding
    equal = np.ones((2, 4))
    assert advantages(equal, 0.0).tolist() == advantages(equal, np.full((2, 4), 0.1)).tolist() == [[0] * 4] * 2
    # Sums that are equal but for their rounding are equal.
    sums = np.array([[0.1 + 0.2, 0.3, 0.3, 0.3]] * 2)
    assert np.ptp(sums) > 0 and advantages(sums, 0.0).tolist() == [[0] * 4] * 2
    costs = np.array([[0.01, 0.02, 0.03, 0.04]] * 2)
    np.testing.assert_allclose(advantages(sums, costs), advantages(np.full((2, 4), 0.3), costs), atol=1e-12)
    # Where all rewards are equal a penalty moves a reply by about as much as it takes away.
    assert np.abs(advantages(equal, one)).max() < 2e-6
    # Elsewhere it counts in the same unit as the rewards.
    moved = advantages(REWARDS, one) - advantages(REWARDS)
    unit = advantages(REWARDS)[0].max() - advantages(REWARDS)[0].min()  # of a reward
    assert np.ptp(moved[0]) == pytest.approx(1e-6 * unit, rel=1e-3)


def test_the_last_part_of_a_reply_costs():
    lengths = np.array([[10, 80], [90, 100]])
    assert overlong_penalty(lengths, 100) == pytest.approx(np.array([[0, 0], [0.5, 1]]))
