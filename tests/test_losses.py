"""RL losses against numbers worked by hand, and against one another."""

import math

import pytest
import torch
from tiny import lively_model, tiny_config
from torch import Tensor

from nanochat import losses
from nanochat.cross_entropy import IGNORE
from nanochat.losses import (
    PolicyBatch,
    clipped_objective,
    dapo_loss,
    dr_grpo_loss,
    grpo_loss,
    kl_estimate,
    reinforce_loss,
    token_logp,
)
from nanochat.packing import Rows, pack


class Fixed:
    """A model whose token losses are given: -log p of each target."""

    def __init__(self, logp: Tensor):
        self.logp = logp.requires_grad_()

    def losses(self, inputs: Tensor, targets: Tensor, segments: Tensor) -> Tensor:
        return torch.where(targets == IGNORE, 0.0, -self.logp)


def two_samples(old: list[float] | None = None) -> PolicyBatch:
    """A row with a sample of 2 targets and advantage 1, and one of 3 targets and advantage -0.5."""
    zeros = torch.zeros(1, 6, dtype=torch.long)
    targets = torch.tensor([[5, 6, 7, 8, 9, IGNORE]])
    rows = Rows(zeros, targets, torch.tensor([[0, 0, 1, 1, 1, 2]]), torch.tensor([[0, 0, 1, 1, 1, 0]]))
    return PolicyBatch(
        rows,
        advantages=torch.tensor([[1.0, 1.0, -0.5, -0.5, -0.5, 0.0]]),
        sample_share=torch.tensor([[0.5, 0.5, 1 / 3, 1 / 3, 1 / 3, 0.0]]),
        old_logp=None if old is None else torch.tensor([old]),
    )


LOGP = torch.log(torch.tensor([[0.5, 0.25, 0.5, 0.5, 0.125, 1.0]]))
OLD = torch.log(torch.tensor([0.5, 0.125, 0.25, 1.0, 0.125, 1.0])).tolist()  # ratios 1, 2, 2, 0.5, 1


def test_reinforce_by_hand():
    loss, count = reinforce_loss(Fixed(LOGP.clone()), two_samples())
    # mean over each sample: (ln .5 + ln .25) / 2 = -1.5 ln 2; (ln .5 + ln .5 + ln .125) / 3 = -5/3 ln 2
    assert loss.item() == pytest.approx(1.5 * math.log(2) - 0.5 * 5 / 3 * math.log(2))
    assert count.item() == pytest.approx(2)


def test_the_clip_by_hand():
    objective = clipped_objective(LOGP, two_samples(OLD), 0.2, 0.2)
    # gains are capped at 1.2; a loss is not: 2 x -0.5 stays, 0.5 x -0.5 becomes 0.8 x -0.5
    assert objective.flatten().tolist() == pytest.approx([1.0, 1.2, -1.0, -0.4, -0.5, 0.0])
    wider = clipped_objective(LOGP, two_samples(OLD), 0.2, 0.28)
    assert wider.flatten().tolist() == pytest.approx([1.0, 1.28, -1.0, -0.4, -0.5, 0.0])


def test_what_each_variant_takes_the_mean_over():
    batch = two_samples(OLD)
    loss, count = grpo_loss(Fixed(LOGP.clone()), batch)
    assert (loss.item(), count.item()) == pytest.approx((-(2.2 / 2 - 1.9 / 3), 2))
    loss, count = dapo_loss(Fixed(LOGP.clone()), batch)
    assert (loss.item(), count.item()) == pytest.approx((-(2.28 - 1.9), 5))
    loss, count = dr_grpo_loss(Fixed(LOGP.clone()), batch, max_tokens=10)
    assert (loss.item(), count.item()) == pytest.approx((-(2.2 - 1.9) / 10, 2))


def test_a_clipped_token_has_no_gradient_and_one_that_is_not_has():
    model = Fixed(LOGP.clone())
    grpo_loss(model, two_samples(OLD))[0].backward()
    # -ratio x advantage x share where the unclipped side counts; tokens 1 and 3 are clipped
    assert model.logp.grad.flatten().tolist() == pytest.approx([-0.5, 0.0, 1 / 3, 0.0, 0.5 / 3, 0.0])


def test_kl_by_hand_and_never_negative():
    logp, reference = torch.log(torch.tensor([0.5, 0.2])), torch.log(torch.tensor([0.25, 0.4]))
    expected = [0.5 - 1 - math.log(0.5), 2 - 1 - math.log(2)]
    assert kl_estimate(logp, reference).tolist() == pytest.approx(expected)
    assert (kl_estimate(torch.randn(1000), torch.randn(1000)) >= -1e-6).all()
    policy, other = torch.softmax(torch.randn(50), 0), torch.softmax(torch.randn(50), 0)
    exact = (policy * (policy / other).log()).sum()  # unbiased: its mean under the policy is the KL
    torch.testing.assert_close((policy * kl_estimate(policy.log(), other.log())).sum(), exact)


def test_the_kl_penalty_is_in_the_loss():
    batch = two_samples(OLD)
    reference = torch.log(torch.tensor([[0.25, 0.25, 0.5, 0.5, 0.25, 1.0]]))
    batch = PolicyBatch(batch.rows, batch.advantages, batch.sample_share, batch.old_logp, reference)
    plain, _ = grpo_loss(Fixed(LOGP.clone()), batch)
    with_kl, _ = grpo_loss(Fixed(LOGP.clone()), batch, kl=0.1)
    kl = (0.5 - 1 - math.log(0.5)) / 2 + (2 - 1 - math.log(2)) / 3
    assert (with_kl - plain).item() == pytest.approx(0.1 * kl)


def real_batch() -> tuple[torch.nn.Module, PolicyBatch]:
    model = lively_model(tiny_config())
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 100, (n,), generator=generator).tolist() for n in (9, 14, 5, 20)]
    masks = [[0] * 3 + [1] * (len(i) - 3) for i in ids]
    rows = pack(ids, masks, 32)
    advantages = torch.tensor([1.0, -0.5, 0.25, -0.75])
    lengths = torch.tensor([len(i) - 3 for i in ids])
    targets = rows.targets != IGNORE
    return model, PolicyBatch(rows, advantages[rows.source] * targets, (1 / lengths)[rows.source] * targets)


def gradient(model: torch.nn.Module, loss: Tensor) -> Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_grpo_with_one_update_and_no_kl_has_the_gradient_of_reinforce():
    model, batch = real_batch()
    expected = gradient(model, reinforce_loss(model, batch)[0])
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(gradient(model, grpo_loss(model, batch)[0]), expected, rtol=1e-5, atol=1e-7)
    old = PolicyBatch(batch.rows, batch.advantages, batch.sample_share, old_logp=token_logp(model, batch.rows).detach())
    torch.testing.assert_close(gradient(model, grpo_loss(model, old)[0]), expected, rtol=1e-5, atol=1e-7)
    assert not torch.allclose(gradient(model, dapo_loss(model, batch)[0]), expected)


def test_token_logp_is_the_models(tiny_config):
    model, batch = real_batch()
    logits = model(batch.rows.inputs, segments=batch.rows.segments)
    targets = batch.rows.targets
    expected = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    expected = torch.where(targets == IGNORE, 0.0, expected)
    torch.testing.assert_close(losses.token_logp(model, batch.rows), expected)
