"""PPO's value function: advantages of tokens by the recurrence, the value's error, and what trains it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from runs import call, exactly_resumed
from test_losses import LOGP, OLD, Fixed, two_samples
from test_scripts import base  # noqa: F401
from test_stages import RL, pretrained, start  # noqa: F401 (fixtures)
from tiny import cpu_device

from nanochat.alignment import value
from nanochat.alignment.policy_losses import PPO
from nanochat.alignment.value import ValuedBatch, ValueFunction
from nanochat.checkpoint_manager import load_model
from nanochat.cross_entropy import IGNORE
from nanochat.device import Device
from nanochat.losses import policy_loss

VALUES = torch.tensor([[0.5, 0.75, 0.2, 0.4, 0.6, 9.0]])  # of a sample of 2 targets, of one of 3, and of padding


def critic(values: torch.Tensor = VALUES) -> Fixed:
    return Fixed(LOGP.clone(), values.clone())


def place_by_place(values, rewards, is_target, source, gae_lambda: float) -> torch.Tensor:
    """The recurrence in fp32 as the paper has it: from the last place of the rows to the first, all rows at once."""
    advantages = torch.zeros_like(values)
    next_value, next_advantage = torch.zeros(2, len(values))
    later = torch.full_like(source[:, 0], -1)
    for t in reversed(range(values.size(1))):
        goes_on = source[:, t] == later
        rise = torch.where(goes_on, next_value, rewards[:, t]) - values[:, t]
        advantage = rise + gae_lambda * torch.where(goes_on, next_advantage, 0.0)
        advantages[:, t] = torch.where(is_target[:, t], advantage, 0.0)
        next_value = torch.where(is_target[:, t], values[:, t], next_value)
        next_advantage = torch.where(is_target[:, t], advantage, next_advantage)
        later = torch.where(is_target[:, t], source[:, t], later)
    return advantages


@pytest.mark.parametrize("gae_lambda", [0.95, 1.0, 0.5])
def test_advantages_are_those_of_the_recurrence_place_by_place(gae_lambda: float):
    """Rows of many samples, some of a single target, with tools' tokens and padding; a row without any target."""
    generator = torch.Generator().manual_seed(4)
    rewards, values = torch.randn(2, 5, 400, generator=generator)
    is_target = torch.rand(5, 400, generator=generator) < 0.7
    is_target[3] = is_target[:, 390:] = False
    source = (torch.rand(5, 400, generator=generator) < 0.05).cumsum(1)
    source[1] += source[0, is_target[0]][
        -1
    ]  # the first sample of a row has the number of the last one of the row before
    arguments = (values, rewards, is_target, source)
    expected = place_by_place(*arguments, gae_lambda)
    found = value.token_advantages(*(part.numpy() for part in arguments), gae_lambda)
    np.testing.assert_allclose(found, expected.numpy(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("shift", [0.0, 8192.0])
def test_ranks_share_one_mean_and_deviation(monkeypatch: pytest.MonkeyPatch, shift: float):
    """Two ranks with a micro-batch each, the second one of another length, have what one process with both has."""
    long = two_samples()
    short = replace(two_samples(), rows=replace(long.rows, targets=long.rows.targets.clone()))
    short.rows.targets[0, 2:] = IGNORE
    batches = [
        replace(long, advantages=long.advantages + shift),
        replace(short, advantages=3 - long.advantages + shift),
    ]
    ((expected, other),) = ValueFunction().estimate(critic(), [batches], cpu_device())
    devices = [replace(cpu_device(), rank=rank, world_size=2) for rank in range(2)]
    shared = torch.zeros(2, 3)

    def add(numbers: torch.Tensor, device: Device) -> torch.Tensor:
        assert numbers.dtype == torch.float32 and not numbers[1 - device.rank].any()
        return shared.add_(numbers).clone()

    monkeypatch.setattr(value, "sum_over_ranks", add)
    for rank in (0, 1):
        ValueFunction().estimate(critic(), [[batches[rank]]], devices[rank])
    monkeypatch.setattr(value, "sum_over_ranks", lambda numbers, device: shared.clone())
    for rank, one in enumerate((expected, other)):
        ((found,),) = ValueFunction().estimate(critic(), [[batches[rank]]], devices[rank])
        torch.testing.assert_close(found.advantages, one.advantages, atol=1e-5 if not shift else 2e-3, rtol=0)
        assert torch.equal(found.returns, one.returns)


def test_the_values_error_is_clipped():
    batch = ValuedBatch(**vars(two_samples(OLD)), old_values=VALUES, returns=VALUES + 1)
    model = critic(VALUES + torch.tensor([[0.1, 0.5, -0.5, 0.0, 0.0, 0.0]]))
    error = ValueFunction().error(model, batch)
    # 0.9; 0.5 counts as 1 - 0.2 = 0.8, the larger error, without a gradient; 1.5 counts in full
    assert (4 * error).flatten().tolist() == pytest.approx([0.81, 0.64, 2.25, 1.0, 1.0, 0.0])
    (2 * error).sum().backward()
    assert model.values.grad.flatten().tolist() == pytest.approx([-0.9, 0.0, -1.5, -1.0, -1.0, 0.0])
    # The clipped objective of the tokens is 1, 1.2, -1, -0.4, -0.5 (test_losses.py), half the squared errors 2.85.
    loss, count = policy_loss(model, batch, method=PPO, max_tokens=8, critic=ValueFunction())
    assert (loss.item(), count.item()) == pytest.approx((-0.3 + 0.5 * 2.85, 5))


def test_estimates_have_one_mean_and_deviation_over_all_minibatches():
    batch = replace(two_samples(), advantages=torch.tensor([[1.0, 1.0, 0.0, 0.0, 0.0, 0.0]]))
    ((one,), (other,)) = ValueFunction(0.5).estimate(critic(), [[batch], [batch]], cpu_device())
    advantages = one.advantages.flatten()[:5]
    assert advantages.mean().item() == pytest.approx(0, abs=1e-6)
    assert advantages.square().mean().item() == pytest.approx(1, rel=1e-4)
    assert one.returns.flatten().tolist() == pytest.approx([0.875, 1.0, 0.35, 0.3, 0.0, 0.0])
    loss, count = policy_loss(critic(), one, method=PPO, max_tokens=8, critic=ValueFunction())
    errors = (one.returns - VALUES)[0, :5].square().sum()
    assert (loss.item(), count.item()) == pytest.approx((-advantages.sum().item() + errors.item() / 4, 5), abs=1e-5)
    assert torch.equal(other.advantages, one.advantages)
    # They do not change where all rewards are higher by as much, as far as fp32 has digits.
    higher = replace(batch, advantages=batch.advantages + 8192)
    ((low,),), ((high,),) = (ValueFunction(1.0).estimate(critic(), [[b]], cpu_device()) for b in (batch, higher))
    torch.testing.assert_close(high.advantages, low.advantages, atol=2e-3, rtol=0)


@pytest.mark.slow
def test_ppo_trains_its_scalar_head_with_adapters_and_resumes_exactly(start):  # noqa: F811
    shared = [flag for flag in RL if "lr_scale" not in flag]  # the rate of adapters is absolute
    flags = (*shared, "--lora_rank=2", "--loss=ppo", "--source=base", "--source_tag=d1", "--minibatches=2")
    flags = (*flags, "--eval_every=0", "--reward=task,rm:rm", "--num_iterations=2", "--save_every=1")
    reward = ("--loss=reward", "--device=cpu", "--dtype=float32", "--tasks=addition")
    call("chat_dpo", *reward, "--source=base", "--num_iterations=1")
    exactly_resumed(start, "chat_rl", "rl", flags, 2, (1,))
    model, _, meta = load_model("rl", "cpu")
    assert model.scalar_head.weight.abs().sum() > 0 and meta["model"]["scalar_head"]
