"""RL and DPO losses against numbers worked by hand, and against one another."""

import math

import pytest
import torch
from tiny import cpu_device, lively_model, tiny_config
from torch import Tensor

from nanochat import losses
from nanochat.attention import Segments
from nanochat.cross_entropy import IGNORE
from nanochat.data.packing import PackedBatch, pack_pairs, pack_sequences
from nanochat.losses import (
    PAIR_STATS,
    PairBatch,
    PolicyBatch,
    clipped_objective,
    dapo_loss,
    dpo_loss,
    dr_grpo_loss,
    grpo_loss,
    ipo_loss,
    kl_estimate,
    reinforce_loss,
    reply_logp,
    token_logp,
)


class Fixed:
    """A model whose token losses are given: -log p of each target."""

    def __init__(self, logp: Tensor):
        self.logp = logp.requires_grad_()

    def __call__(self, inputs: Tensor, targets: Tensor, *, segments: Segments, reduction: str) -> Tensor:
        assert reduction == "none"
        return torch.where(targets == IGNORE, 0.0, -self.logp)


def two_samples(old: list[float] | None = None) -> PolicyBatch:
    """A row with a sample of 2 targets and advantage 1, and one of 3 targets and advantage -0.5."""
    zeros = torch.zeros(1, 6, dtype=torch.long)
    targets = torch.tensor([[5, 6, 7, 8, 9, IGNORE]])
    segments = Segments.from_numbers(torch.tensor([[0, 0, 1, 1, 1, 2]]))
    rows = PackedBatch(zeros, targets, segments, torch.tensor([[0, 0, 1, 1, 1, 0]]))
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
    rows = pack_sequences(ids, masks, 32)
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


# ---------------------------------------------------------------------- preference pairs


def one_pair(chosen: list[float], rejected: list[float], reference: tuple[float, float]) -> tuple[Fixed, PairBatch]:
    """A row with both replies of a pair, of which the targets' probabilities are given, then a padded pair."""
    targets = torch.tensor([[5] * len(chosen) + [6] * len(rejected) + [IGNORE]])
    numbers = torch.tensor([[0] * len(chosen) + [1] * len(rejected) + [0]])
    zeros = torch.zeros_like(targets)
    model = Fixed(torch.log(torch.tensor([[*chosen, *rejected, 1.0]])))
    rows = PackedBatch(zeros, targets, Segments.from_numbers(numbers), numbers)
    return model, PairBatch(rows, 2, torch.log(torch.tensor([reference, (1.0, 1.0)])))


def test_dpo_by_hand():
    model, batch = one_pair([0.5, 0.25], [0.5, 0.5, 0.5], (1 / 16, 1 / 4))
    stats = torch.zeros(len(PAIR_STATS))
    loss, pairs = dpo_loss(model, batch, beta=0.5, stats=stats)
    # gains: ln (1/8 : 1/16) = ln 2, and ln (1/8 : 1/4) = -ln 2; half their difference is ln 2: sigmoid 2/3
    assert (loss.item(), pairs.item()) == pytest.approx((-math.log(2 / 3), 1))
    assert stats.tolist() == pytest.approx([1, 1, math.log(2), 0.5 * math.log(2), -0.5 * math.log(2)])
    loss.backward()
    # sigmoid(-margin) x beta pulls every target of the chosen reply up, those of the rejected one down
    assert model.logp.grad.flatten().tolist() == pytest.approx([-1 / 6] * 2 + [1 / 6] * 3 + [0])
    smoothed, _ = dpo_loss(model, batch, beta=0.5, label_smoothing=0.1)
    assert smoothed.item() == pytest.approx(-0.9 * math.log(2 / 3) - 0.1 * math.log(1 / 3))
    with_sft, _ = dpo_loss(model, batch, beta=0.5, sft_weight=2.0)
    assert with_sft.item() == pytest.approx(-math.log(2 / 3) + 2 * 1.5 * math.log(2))


def test_ipo_by_hand():
    model, batch = one_pair([0.5, 0.25], [0.5, 0.5, 0.5], (1 / 16, 1 / 4))
    stats = torch.zeros(len(PAIR_STATS))
    loss, pairs = ipo_loss(model, batch, beta=0.25, stats=stats)
    difference = math.log(2) / 2 + math.log(2) / 3  # of the gains a token
    assert (loss.item(), pairs.item()) == pytest.approx(((difference - 2) ** 2, 1))
    assert stats.tolist() == pytest.approx([1, 1, difference / 4, math.log(2) / 8, -math.log(2) / 12])


def test_replies_as_likely_as_before_are_a_tie():
    model, batch = one_pair([0.5], [0.25], (0.5, 0.25))
    stats = torch.zeros(len(PAIR_STATS))
    loss, _ = dpo_loss(model, batch, stats=stats)
    assert loss.item() == pytest.approx(math.log(2)) and stats.tolist() == [1, 0.5, 0, 0, 0]


def random_pairs(count: int) -> tuple[list[list[int]], list[list[int]]]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(6, 27, (2 * count,), generator=generator).tolist()
    ids = [torch.randint(0, 100, (n,), generator=generator).tolist() for n in lengths]
    return ids, [[0] * 4 + [1] * (len(i) - 4) for i in ids]


@pytest.mark.parametrize("loss_fn", [dpo_loss, ipo_loss])
def test_packed_pairs_have_the_loss_and_the_gradient_of_each_by_itself(loss_fn):
    """Against each pair alone, from the logits of the model and nothing of ours."""
    model, reference = lively_model(tiny_config()), lively_model(tiny_config(), seed=7)
    ids, masks = random_pairs(7)

    def alone(policy: torch.nn.Module, number: int) -> tuple[Tensor, int]:
        tokens = torch.tensor([ids[number]])
        logp = policy(tokens[:, :-1])[0].log_softmax(-1)
        chosen = [logp[place, ids[number][place + 1]] for place in range(3, len(ids[number]) - 1)]
        return torch.stack(chosen).sum(), len(chosen)

    expected = torch.zeros(())
    for pair in range(7):
        gains = []
        for number in (2 * pair, 2 * pair + 1):
            logp, targets = alone(model, number)
            gain = logp - alone(reference, number)[0].detach()
            gains.append(gain if loss_fn is dpo_loss else gain / targets)
            if number % 2 == 0:
                likely = logp / targets
        apart = gains[0] - gains[1]
        own = torch.log1p(torch.exp(-0.3 * apart)) if loss_fn is dpo_loss else (apart - 1 / 0.6) ** 2
        expected = expected + own - 0.2 * likely
    wanted = gradient(model, expected)

    micros = list(pack_pairs(ids, masks, 32, 3, cpu_device()))
    assert 1 < len(micros) < 7
    model.zero_grad()
    total, counted = torch.zeros(()), 0
    for rows, pairs in micros:
        batch = PairBatch(rows, pairs)
        batch = PairBatch(rows, pairs, reply_logp(reference, batch).detach())
        loss, count = loss_fn(model, batch, beta=0.3, sft_weight=0.2)
        loss.backward()
        total, counted = total + loss.detach(), counted + count
    assert counted == 7
    torch.testing.assert_close(total, expected.detach(), rtol=1e-5, atol=1e-5)
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-5)
    assert wanted.abs().max() > 1e-2


def test_a_micro_batch_of_padding_adds_nothing():
    model = lively_model(tiny_config())
    (rows, pairs), *more = pack_pairs([], [], 32, 2, cpu_device())
    assert not more
    batch = PairBatch(rows, pairs)
    batch = PairBatch(rows, pairs, reply_logp(model, batch).detach())
    stats = torch.zeros(len(PAIR_STATS))
    for loss_fn in (dpo_loss, ipo_loss):
        loss, count = loss_fn(model, batch, sft_weight=1.0, stats=stats)
        assert (loss.item(), count.item(), stats.abs().sum().item()) == (0, 0, 0)
        assert not gradient(model, loss).any()
