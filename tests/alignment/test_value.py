"""PPO's value function: advantages of tokens by hand, the value's error, and what trains it."""

from dataclasses import replace

import pytest
import torch
from runs import exactly_resumed
from test_losses import LOGP, OLD, Fixed, two_samples
from test_scripts import base, mistake  # noqa: F401
from test_stages import RL, call, pretrained, start  # noqa: F401 (fixtures)
from tiny import cpu_device

from nanochat.alignment import value
from nanochat.alignment.policy_losses import PPO
from nanochat.alignment.value import ValueFunction, value_error
from nanochat.checkpoint_manager import load_model
from nanochat.losses import policy_loss

VALUES = torch.tensor([[0.5, 0.75, 0.2, 0.4, 0.6, 9.0]])  # of a sample of 2 targets, of one of 3, and of padding


def critic(values: torch.Tensor = VALUES) -> Fixed:
    return Fixed(LOGP.clone(), values.clone())


def test_advantages_of_tokens_by_hand():
    batch = two_samples()
    rewards = torch.tensor([[1.0, 1.0, 0.0, 0.0, 0.0, 0.0]])
    targets, source = batch.rows.targets, batch.rows.source
    # A_2 = 1 - 0.75 and A_1 = 0.25 + 0.5 x 0.25; -0.6, then 0.2 - 0.3 and 0.2 - 0.05
    found = value.token_advantages(VALUES, rewards, targets, source, 1.0, 0.5)
    assert found.flatten().tolist() == pytest.approx([0.375, 0.25, 0.15, -0.1, -0.6, 0.0])
    # With lambda 1 it is reward - value, with lambda 0 what the next value is more; a discount shrinks the latter.
    found = value.token_advantages(VALUES, rewards, targets, source, 1.0, 1.0)
    assert found.flatten().tolist() == pytest.approx([0.5, 0.25, -0.2, -0.4, -0.6, 0.0])
    found = value.token_advantages(VALUES, rewards, targets, source, 0.5, 0.0)
    assert found.flatten().tolist() == pytest.approx([0.375 - 0.5, 0.25, 0.0, -0.1, -0.6, 0.0])
    # A tool's token between two targets changes nothing.
    gap = targets.clone()
    gap[0, 3] = targets[0, 5]
    found = value.token_advantages(VALUES, rewards, gap, source, 1.0, 0.5)
    assert found.flatten().tolist() == pytest.approx([0.375, 0.25, 0.4 - 0.3, 0.0, -0.6, 0.0])


def test_the_values_error_is_clipped():
    batch = replace(two_samples(OLD), old_values=VALUES, returns=VALUES + 1)
    model = critic(VALUES + torch.tensor([[0.1, 0.5, -0.5, 0.0, 0.0, 0.0]]))
    error = value_error(model, batch, clip=0.2)
    # 0.9; 0.5 counts as 1 - 0.2 = 0.8, the larger error, without a gradient; 1.5 counts in full
    assert (2 * error).flatten().tolist() == pytest.approx([0.81, 0.64, 2.25, 1.0, 1.0, 0.0])
    error.sum().backward()
    assert model.values.grad.flatten().tolist() == pytest.approx([-0.9, 0.0, -1.5, -1.0, -1.0, 0.0])
    # The clipped objective of the tokens is 1, 1.2, -1, -0.4, -0.5 (test_losses.py), half the squared errors 2.85.
    loss, count = policy_loss(model, batch, method=PPO, max_tokens=8, critic=ValueFunction())
    assert (loss.item(), count.item()) == pytest.approx((-0.3 + 0.5 * 2.85, 5))


def test_estimates_have_one_mean_and_deviation_over_all_minibatches():
    batch = replace(two_samples(), advantages=torch.tensor([[1.0, 1.0, 0.0, 0.0, 0.0, 0.0]]))
    ((one,), (other,)) = ValueFunction(1.0, 0.5).estimate(critic(), [[batch], [batch]], cpu_device())
    advantages = one.advantages.flatten()[:5]
    assert advantages.mean().item() == pytest.approx(0, abs=1e-6)
    assert advantages.square().mean().item() == pytest.approx(1, rel=1e-4)
    assert one.returns.flatten().tolist() == pytest.approx([0.875, 1.0, 0.35, 0.3, 0.0, 0.0])
    loss, count = policy_loss(critic(), one, method=PPO, max_tokens=8, critic=ValueFunction(value_weight=2.0))
    errors = (one.returns - VALUES)[0, :5].square().sum()
    assert (loss.item(), count.item()) == pytest.approx((-advantages.sum().item() + errors.item(), 5), abs=1e-5)
    assert torch.equal(other.advantages, one.advantages)
    # They do not change where all rewards are higher by as much, as far as fp32 has digits.
    higher = replace(batch, advantages=batch.advantages + 8192)
    ((low,),), ((high,),) = (ValueFunction(1.0, 1.0).estimate(critic(), [[b]], cpu_device()) for b in (batch, higher))
    torch.testing.assert_close(high.advantages, low.advantages, atol=2e-3, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [(), ("--lora_rank=2",)], ids=["whole", "lora"])
def test_ppo_trains_its_scalar_head_and_resumes_exactly(start, capsys, lora):  # noqa: F811
    flags = (*RL, *lora, "--loss=ppo", "--source=base", "--source_tag=d1", "--minibatches=2", "--eval_every=0")
    flags = (*flags, "--reward=task,rm:rm", "--num_iterations=4", "--save_every=1")
    reward = ("--loss=reward", "--device=cpu", "--dtype=float32", "--tasks=addition")
    call("chat_dpo", *reward, "--source=base", "--num_iterations=1")
    exactly_resumed(start, "chat_rl", "rl", flags, 4)
    model, _, meta = load_model("rl", "cpu")
    assert model.scalar_head.weight.abs().sum() > 0 and meta["model"]["scalar_head"]
    code, err = mistake(capsys, "chat_rl", *RL, "--source=base", "--gae_lambda=0.9")
    assert code == 1 and "--gae_lambda: --loss grpo has no value function, ppo has" in err
