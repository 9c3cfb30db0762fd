"""Losses of RL and of preferences against numbers worked by hand, finite differences, TRL and one another.

TRL 1.16 has no PPO. Of `ppo` its GRPO trainer computes the clipped objective, with an advantage for each token; the
value function (alignment/value.py) has the numbers and finite differences of test_value.py and of this file.
"""

import functools
import inspect
import itertools
import math
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import all_losses, cpu_device, lively_model, rendered_pairs, tiny_config
from torch import Tensor

from nanochat.alignment import reply_pairs
from nanochat.alignment.pair_losses import PAIR_STATS, PairBatch, mean_pair_stats, orpo_loss
from nanochat.alignment.reward_model import reward_loss
from nanochat.alignment.value import ValuedBatch, ValueFunction
from nanochat.attention import Segments
from nanochat.cross_entropy import IGNORE
from nanochat.ground.cli import UserError
from nanochat.losses import POLICY_STATS, PolicyBatch, mean_policy_stats, policy_loss
from nanochat.packing import PackedBatch, pack_sequences

METHODS = all_losses("policy losses")
PAIR_ROWS = all_losses("pair losses")
OF_REPLIES = [name for name in PAIR_ROWS if name != "reward"]  # their rewards are log probabilities


class Fixed:
    """A model whose token losses are given, -log p of each target, and the numbers of its scalar head."""

    def __init__(self, logp: Tensor, values: Tensor | None = None):
        self.logp = logp.requires_grad_()
        self.values = torch.zeros_like(logp) if values is None else values.requires_grad_()

    def __call__(
        self, inputs: Tensor, targets: Tensor, *, segments: Segments, reduction: str = "", scalars: bool = False,
        temperature: float = 1.0,
    ) -> Tensor:  # fmt: skip
        if scalars:
            return self.values
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


def loss_of(name: str, model: Any, batch: PolicyBatch, max_tokens: int = 10, **settings: Any) -> tuple[Tensor, Tensor]:
    own = {key: settings.pop(key) for key in ("clip_low", "clip_high") if key in settings}
    method = replace(METHODS[name], **own)
    critic = ValueFunction() if name == "ppo" else None
    return policy_loss(model, batch, method=method, max_tokens=max_tokens, **{"critic": critic, **settings})


LN2 = math.log(2)


@pytest.mark.parametrize(
    ("name", "settings", "expected"),  # the loss, and what it is divided by
    [
        # Means over each sample: (ln .5 + ln .25) / 2 = -1.5 ln 2; (ln .5 + ln .5 + ln .125) / 3 = -5/3 ln 2.
        ("reinforce", {}, (1.5 * LN2 - 0.5 * 5 / 3 * LN2, 2)),
        ("rloo", {}, (3 * LN2 - 0.5 * 5 * LN2, 2)),
        # Gains are capped at 1.2; a loss is not: 2 x -0.5 stays, 0.5 x -0.5 becomes 0.8 x -0.5: 1, 1.2, -1, -0.4, -0.5.
        ("grpo", {}, (-(2.2 / 2 - 1.9 / 3), 2)),
        ("dapo", {}, (-(2.28 - 1.9), 5)),
        ("dr_grpo", {}, (-(2.2 - 1.9) / 10, 2)),
        # The ratios 1, 2 of the first sample have the geometric mean 2^0.5, 2, 0.5, 1 of the second 1.
        ("gspo", {"clip_low": 0.5, "clip_high": 0.5}, (-(2**0.5 - 0.5), 2)),
        ("gspo", {}, (-(1.0004 - 0.5), 2)),
    ],
)
def test_losses_of_policies_by_hand(name, settings, expected):
    loss, count = loss_of(name, Fixed(LOGP.clone()), two_samples(OLD), **settings)
    assert (loss.item(), count.item()) == pytest.approx(expected, rel=1e-5)


def test_importance_weights_by_hand():
    """The trainer's p over the sampler's, at most 2."""
    sampler = torch.log(torch.tensor([[0.5, 0.5, 0.5, 0.125, 0.25, 1.0]]))
    batch = two_samples()
    batch = replace(batch, rows=replace(batch.rows, values=sampler))
    stats = torch.zeros(len(POLICY_STATS))
    loss_of("dapo", model := Fixed(LOGP.clone()), batch, importance_cap=2.0, stats=stats)[0].backward()
    assert model.logp.grad.flatten().tolist() == pytest.approx([-1, -0.5, 0.5, 0.5 * 2, 0.5 * 0.5, 0])
    assert stats.tolist() == pytest.approx([5, 8 * math.log(2), 0, 4 * math.log(2), 0], abs=1e-6)
    plain = Fixed(LOGP.clone())
    loss_of("dapo", plain, batch)[0].backward()
    assert plain.logp.grad.flatten().tolist() == pytest.approx([-1, -1, 0.5, 0.5, 0.5, 0])


def test_stats_count_what_the_clip_stops():
    batch = replace(two_samples(OLD), reference_logp=torch.log(torch.tensor([[0.25, 0.25, 0.5, 0.5, 0.25, 1.0]])))
    stats = torch.zeros(len(POLICY_STATS))
    loss_of("grpo", Fixed(LOGP.clone()), batch, stats=stats)
    kl = (0.5 - 1 - math.log(0.5)) + (2 - 1 - math.log(2))
    # Tokens 1 (raised beyond 1.2, good) and 3 (lowered beyond 0.8, bad); token 2 was raised although it is bad.
    assert stats.tolist() == pytest.approx([5, 8 * math.log(2), kl, 0, 2])
    assert mean_policy_stats(stats, cpu_device())["clipped"] == pytest.approx(0.4)


@pytest.mark.parametrize("name", METHODS)
def test_gradients_are_finite_differences(name):
    """Of every method, off policy, with importance weights and a KL penalty; the constants stay where they were."""
    generator = torch.Generator().manual_seed(4)
    old, sampler, reference = (LOGP.double() + 0.3 * torch.randn(1, 6, generator=generator) for _ in range(3))
    values, moves, returns = (torch.randn(1, 6, generator=generator).double() for _ in range(3))
    old_values = values - 0.2 * moves  # some have moved beyond the clip
    batch = two_samples()
    rows = replace(batch.rows, values=sampler)
    gains, share = batch.advantages.double(), batch.sample_share.double()
    batch = ValuedBatch(rows, gains, share, old, reference, old_values, returns)
    settings = {"kl": 0.0 if name == "distill" else 0.2, "importance_cap": 1.1, "clip_low": 0.5, "clip_high": 0.5}
    model = Fixed(LOGP.double(), values.clone())
    loss_of(name, model, batch, **settings)[0].backward()
    gradients = [model.logp.grad, model.values.grad if name == "ppo" else torch.zeros(1, 6)]
    weights = (LOGP.double() - old).exp().clamp(0.5, 1.5)  # of cispo, without a gradient
    for which, place in itertools.product(range(2), range(6)):
        found = []
        for step in (1e-6, -1e-6):
            moved = [LOGP.double(), values.clone()]
            moved[which][0, place] += step
            found.append(loss_of(name, Fixed(*moved), batch, **settings)[0].item())
        slope = (found[0] - found[1]) / 2e-6
        if name == "cispo" and which == 0:  # the slope of its weight is not in the gradient
            moving = torch.where(weights == (LOGP.double() - old).exp(), weights, 0.0)
            importance = (old - sampler).exp().clamp(max=1.1)
            slope += (moving * importance * batch.advantages * LOGP.double())[0, place].item() * (place < 5)
        assert gradients[which][0, place].item() == pytest.approx(slope, abs=1e-6), (which, place)
    assert gradients[0].abs().max() > 0.05
    # Of the five values some are clipped, others are not.
    assert 0 < torch.count_nonzero(gradients[1]) < 5 or name != "ppo"


def gradient(model: torch.nn.Module, loss: Tensor) -> Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(("temperature", "cap"), [(0.5, 0.0), (2.0, 0.0), (1.7, 4.0)])
def test_what_is_learned_is_the_policy_that_sampled(temperature, cap):
    """Every reply of one token, as often as it is drawn: the gradient is the one of the expected reward."""
    model = lively_model(tiny_config(vocab_size=40, logit_cap=cap)).double()
    rewards = torch.rand(40, generator=torch.Generator().manual_seed(2)).double()
    rows = pack_sequences([[7, 3, token] for token in range(40)], [[0, 0, 1]] * 40, 32)
    logits = model(torch.tensor([[7, 3]]))[0, -1]
    drawn = (logits / temperature).softmax(dim=-1)
    expected = gradient(model, -(drawn * rewards).sum())
    targets = rows.targets != IGNORE
    worth = (40 * drawn.detach() * rewards)[rows.source] * targets
    loss, count = policy_loss(
        model, PolicyBatch(rows, worth, targets.double()), method=METHODS["grpo"], max_tokens=1, temperature=temperature
    )
    assert count == 40
    torch.testing.assert_close(gradient(model, loss / count), expected, atol=1e-7, rtol=1e-5)
    plain = policy_loss(model, PolicyBatch(rows, worth, targets.double()), method=METHODS["grpo"], max_tokens=1)[0]
    assert torch.cosine_similarity(gradient(model, plain / count), expected, dim=0) < 0.999


# ---------------------------------------------------------------------- against trl


class TrlTrainer(SimpleNamespace):
    """What trl's losses ask of their trainer: one process, one micro-batch, the log probabilities of `logps`."""

    accelerator = SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1)
    model = SimpleNamespace(training=True)
    args = SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1)
    aux_loss_enabled = _entropy_bonus_enabled = False
    off_policy_mask_threshold = None
    top_entropy_quantile = 1.0
    temperature = 1.0
    iw_opd_gamma, iw_opd_epsilon = 0.0, 1e-8  # every token weighs the same
    current_gradient_accumulation_steps = 1
    use_vllm = vllm_importance_sampling_correction = True
    max_completion_length = 10

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        return self.logps, torch.zeros_like(self.logps), None


@pytest.mark.slow
def test_losses_and_gradients_are_those_of_trl():
    """Four samples of 2 to 7 tokens: padded rows in trl, one packed row here."""
    trainers = pytest.importorskip("trl.trainer.grpo_trainer", reason="the extra `dev` brings trl").GRPOTrainer
    rloo = pytest.importorskip("trl.trainer.rloo_trainer").RLOOTrainer
    distillation = pytest.importorskip("trl.experimental.iw_opd.iw_opd_trainer").IWOPDTrainer
    generator = torch.Generator().manual_seed(7)
    lengths = torch.tensor([2, 7, 4, 5])
    mask = (torch.arange(7) < lengths[:, None]).float()
    drawn = [torch.rand(4, 7, generator=generator) * mask for _ in range(5)]
    logps, old, sampler, reference = (-2 * one for one in drawn[:4])
    of_tokens = drawn[4] - 0.5
    advantages = torch.tensor([1.5, -0.5, 0.25, -1.0])
    importance = torch.exp(old - sampler).clamp(max=1.5)
    inputs = {
        "prompt_ids": mask.long(), "prompt_mask": mask, "completion_ids": mask.long(), "completion_mask": mask,
        "advantages": advantages, "old_per_token_logps": old, "ref_per_token_logps": reference,
        "importance_sampling_ratio": importance, "num_items_in_batch": mask.sum(), "old_logps": logps.sum(1),
    }  # fmt: skip

    def packed(values: Tensor) -> Tensor:
        return values[mask > 0][None].clone()

    numbers = packed(torch.arange(4)[:, None].expand(4, 7))
    share = packed((1 / lengths)[:, None].expand(4, 7))
    gains = packed(advantages[:, None].expand(4, 7))
    targets = torch.ones_like(numbers)
    rows = PackedBatch(targets, targets, Segments.from_numbers(numbers), numbers, packed(sampler))
    batch = PolicyBatch(rows, gains, share, packed(old), packed(reference))

    def compare(name: str, loss_fn: Any, trainer: TrlTrainer, **settings: Any) -> tuple[Tensor, Tensor]:
        trainer.logps = logps.clone().requires_grad_()
        trainer._metrics = {"train": defaultdict(list)}
        expected = loss_fn(trainer)
        expected.backward()
        model = Fixed(packed(logps))
        total, divisor = loss_of(name, model, settings.pop("batch", batch), **settings)
        (total / divisor).backward()
        torch.testing.assert_close(model.logp.grad, packed(trainer.logps.grad))
        assert model.logp.grad.abs().max() > 1e-3
        return (total / divisor).detach(), expected.detach()

    def grpo(trainer: TrlTrainer, **other: Tensor | None) -> Tensor:
        return trainers._compute_loss(trainer, None, inputs | other)

    for name, loss_type, level, low, high in (
        ("grpo", "grpo", "token", 0.2, 0.2),
        ("dr_grpo", "dr_grpo", "token", 0.2, 0.2),
        ("dapo", "dapo", "token", 0.2, 0.28),
        ("gspo", "grpo", "sequence", 3e-4, 4e-4),
        ("cispo", "cispo", "token", 1.0, 5.0),
        ("ppo", "dapo", "token", 0.2, 0.2),
    ):
        trainer = TrlTrainer(
            loss_type=loss_type, importance_sampling_level=level, epsilon_low=low, epsilon_high=high, beta=0.1
        )
        loss_fn, settings = grpo, {"kl": 0.1, "importance_cap": 1.5}
        if name == "ppo":  # its advantages are of tokens
            loss_fn = functools.partial(grpo, advantages=of_tokens)
            settings |= {"batch": replace(batch, advantages=packed(of_tokens)), "critic": None}
        ours, theirs = compare(name, loss_fn, trainer, **settings)
        torch.testing.assert_close(ours, theirs, msg=name)

    # These losses have other values than TRL's, and where the samples are the policy's own the same gradients: a ratio
    # of 1, of a token or of a whole sample, has that of the log probability.
    on_policy = replace(batch, old_logp=None)
    compare("rloo", lambda one: rloo._compute_loss(one, None, inputs), TrlTrainer(epsilon_low=0.2, epsilon_high=0.2))
    trainer = TrlTrainer(
        loss_type="grpo", importance_sampling_level="token", epsilon_low=0.2, epsilon_high=0.2, beta=0.0, use_vllm=False
    )
    compare("reinforce", functools.partial(grpo, old_per_token_logps=None), trainer, batch=on_policy)

    def student(trainer: TrlTrainer) -> Tensor:
        """TRL's on-policy distillation, over a vocabulary of the sampled token and one other."""
        logp = torch.where(mask > 0, trainer.logps, -1.0)
        logits = torch.stack((logp, torch.log1p(-logp.exp())), dim=-1)
        labels = torch.where(mask > 0, 0, -100)
        return distillation._compute_iw_opd_loss(trainer, logits, torch.zeros_like(labels), labels, reference)

    compare("distill", student, TrlTrainer(), batch=on_policy)


# ---------------------------------------------------------------------- preference pairs


def one_pair(chosen: list[float], rejected: list[float], reference: tuple[float, float]) -> tuple[Fixed, PairBatch]:
    """A row with both replies of a pair, of which the targets' probabilities are given, then a padded pair."""
    targets = torch.tensor([[5] * len(chosen) + [6] * len(rejected) + [IGNORE]])
    numbers = torch.tensor([[0] * len(chosen) + [1] * len(rejected) + [0]])
    zeros = torch.zeros_like(targets)
    model = Fixed(torch.log(torch.tensor([[*chosen, *rejected, 1.0]])))
    rows = PackedBatch(zeros, targets, Segments.from_numbers(numbers), numbers)
    return model, PairBatch(rows, 2, torch.log(torch.tensor([reference, (1.0, 1.0)])))


def test_means_are_over_the_pairs_and_nothing_without_one():
    means = mean_pair_stats(torch.tensor([2.0, 3.0, 0.5, 0.25]), cpu_device())
    assert means == {"accuracy": 0.75, "margin": 0.125, "chosen_reward": 0.25, "rejected_reward": 0.125}
    assert mean_pair_stats(torch.zeros(4), cpu_device()) == {}


# A pair whose replies have log p -3 ln 2 and -3 ln 2, gains ln 2 and -ln 2, and means -1.5 ln 2 and -ln 2.
PAIRS_BY_HAND = [  # the settings, the loss, the rewards in units of ln 2
    ("dpo", {}, 0.626233, (0.1, -0.1)),
    # Half the difference of the gains is ln 2, whose sigmoid is 2/3.
    ("dpo", {"beta": 0.5}, math.log(3 / 2), (0.5, -0.5)),
    ("dpo", {"beta": 0.5, "label_smoothing": 0.1}, 0.9 * math.log(3 / 2) + 0.1 * math.log(3), (0.5, -0.5)),
    ("dpo", {"beta": 0.5, "sft_weight": 2.0}, math.log(3 / 2) + 2 * 1.5 * LN2, (0.5, -0.5)),
    ("simpo", {}, 1.861995, (-3, -2)),
    ("simpo", {"beta": 1.0, "gamma": 0.0}, -math.log(1 / (1 + math.sqrt(2))), (-1.5, -1)),
    ("orpo", {}, 1.143693, (-0.15, -0.1)),
]


@pytest.mark.parametrize(("name", "settings", "expected", "rewards"), PAIRS_BY_HAND)
def test_losses_of_preferences_by_hand(name, settings, expected, rewards):
    model, batch = one_pair([0.5, 0.25], [0.5, 0.5, 0.5], (1 / 16, 1 / 4))
    row = PAIR_ROWS[name]
    if not row.has_reference:
        batch = replace(batch, reference_logp=None)
    stats = torch.zeros(len(PAIR_STATS))
    loss, count = row.function(model, batch, **settings, stats=stats)
    assert (loss.item(), count.item()) == (pytest.approx(expected, rel=1e-6), 1)
    accurate = 1 + (rewards[0] > rewards[1]) - (rewards[0] < rewards[1])
    assert stats.tolist() == pytest.approx([1, accurate, rewards[0] * LN2, rewards[1] * LN2])


def bound(row: Any, settings: dict[str, Any]) -> Any:
    """The function with those of these settings that it takes."""
    taken = settings.keys() & inspect.signature(row.function).parameters
    return functools.partial(row.function, **{name: settings[name] for name in taken})


def test_the_reward_loss_by_hand():
    """Scores of 1.5 and 0.5 at the replies' last tokens: the first wins with probability sigmoid(1)."""
    _, batch = one_pair([0.5], [0.25], (1.0, 1.0))
    stats = torch.zeros(len(PAIR_STATS))
    scores = torch.tensor([[1.5, 0.5, 9.0]], requires_grad=True)
    loss, count = reward_loss(lambda *_, **__: scores, batch, stats=stats)
    loss.backward()
    wins = 1 / (1 + math.exp(-1))
    assert (loss.item(), count.item()) == pytest.approx((-math.log(wins), 1))
    assert scores.grad.flatten().tolist() == pytest.approx([wins - 1, 1 - wins, 0])
    assert torch.autograd.gradcheck(
        lambda moved: reward_loss(lambda *_, **__: moved, batch)[0], scores.detach().double().requires_grad_()
    )
    assert stats.tolist() == [1, 2, 1.5, 0.5]


def test_a_certain_reply_has_finite_odds():
    model, batch = one_pair([1.0], [1.0, 1.0], (1.0, 1.0))
    loss, _ = orpo_loss(model, batch)
    loss.backward()
    assert loss.item() == pytest.approx(0.1 * LN2) and torch.isfinite(model.logp.grad).all()


def test_settings_that_a_loss_has_not_are_refused():
    loss = reply_pairs.with_settings("simpo", {"gamma": 1.5, "label_smoothing": None})
    assert (loss.func, loss.keywords) == (PAIR_ROWS["simpo"].function, {"gamma": 1.5})
    with pytest.raises(UserError, match="--gamma 1.0: --loss dpo has none, simpo has"):
        reply_pairs.with_settings("dpo", {"gamma": 1.0})


def trl_trainer(**settings: Any) -> Any:
    """What the loss functions of TRL's trainers read of them, on one process."""
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather_for_metrics=lambda x: x, gather=lambda x: x, unwrap_model=lambda x: x
    )
    return SimpleNamespace(
        accelerator=accelerator, _metrics={"train": defaultdict(list)}, _total_train_tokens=0, _tp_size=1,
        aux_loss_enabled=False, ld_alpha=None, precompute_ref_logps=True, calculate_KL=True, use_weighting=False,
        model=SimpleNamespace(training=True), f_divergence_type="reverse_kl", loss_weights=[1.0], alpha=0.0,
        args=SimpleNamespace(center_rewards_coefficient=None), **{"label_smoothing": 0.0, **settings},
    )  # fmt: skip


@pytest.mark.slow
def test_losses_of_preferences_are_those_of_trl():
    """The same tiny models on the same tokens: padded rows in TRL's functions, packed ones in ours."""
    cpo = pytest.importorskip("trl.experimental.cpo.cpo_trainer").CPOTrainer
    orpo = pytest.importorskip("trl.experimental.orpo.orpo_trainer").ORPOTrainer
    dpo = pytest.importorskip("trl.trainer.dpo_trainer").DPOTrainer
    model, reference = lively_model(tiny_config()), lively_model(tiny_config(), seed=7)
    ids, masks = random_pairs(5)
    for pair in range(5):
        ids[2 * pair + 1][:4] = ids[2 * pair][:4]  # the question
    examples = rendered_pairs(ids, masks)

    # TRL's batch: the chosen replies, then the rejected ones, padded.
    replies = [pair[0] for pair in examples] + [pair[1] for pair in examples]
    tokens, completion = torch.zeros(10, 32, dtype=torch.long), torch.zeros(10, 32, dtype=torch.long)
    for row, reply in enumerate(replies):
        tokens[row, : len(reply.ids)] = torch.tensor(reply.ids)
        completion[row, : len(reply.mask)] = torch.tensor(reply.mask)

    def outputs(policy: torch.nn.Module, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        logp = policy(input_ids[:, :-1]).log_softmax(-1)
        targets = labels[:, 1:]
        logp = logp.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * (targets != -100)
        nothing = torch.zeros_like(logp)
        return SimpleNamespace(log_probs=logp, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())

    def policy(input_ids: Tensor, labels: Tensor, **_: Any) -> SimpleNamespace:
        return outputs(model, input_ids, labels)

    labels = tokens.masked_fill(completion == 0, -100)
    with torch.no_grad():
        frozen = outputs(reference, tokens, labels).log_probs.sum(-1)
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "completion_mask": completion}
    paired = {**inputs, "ref_chosen_logps": frozen[:5], "ref_rejected_logps": frozen[5:]}
    logits = torch.nn.functional.pad(model(tokens[:, :-1]), (0, 0, 0, 1))
    sums, means = (cpo.get_batch_logps(logits, labels.clone(), average_log_prob=mean) for mean in (False, True))
    gains = sums - frozen
    smoothed = trl_trainer(beta=0.3, loss_type="sigmoid", label_smoothing=0.2)
    theirs = {
        "dpo": dpo._compute_loss(trl_trainer(beta=0.3, loss_types=["sigmoid"]), policy, paired, False),
        # TRL's DPO has no label smoothing but in other losses; that of its CPO, of gains, is cDPO.
        "cdpo": cpo.cpo_loss(smoothed, *gains.split(5))[0].mean(),
        "simpo": cpo.cpo_loss(trl_trainer(beta=0.3, loss_type="simpo", simpo_gamma=0.7), *means.split(5))[0].mean(),
        "orpo": -orpo.odds_ratio_loss(trl_trainer(beta=0.3), *means.split(5))[0].mean(),
    }
    device = cpu_device()
    assert set(theirs) == {*OF_REPLIES, "cdpo"}
    for name, expected_loss in theirs.items():
        row = PAIR_ROWS["dpo" if name == "cdpo" else name]
        settings: dict[str, Any] = {"beta": 0.3, "sft_weight": 0.0, "gamma": 0.7}
        if name == "cdpo":
            settings["label_smoothing"] = 0.2
        batches = reply_pairs.pair_batches(examples, 32, 3, device)
        frozen = reference if row.has_reference else None
        batches = [reply_pairs.with_reference(batch, frozen) for batch in batches]
        parts = [bound(row, settings)(model, batch) for batch in batches]
        assert len(parts) > 1
        ours = sum(loss for loss, _ in parts) / sum(count for _, count in parts)
        torch.testing.assert_close(ours, expected_loss, rtol=2e-5, atol=1e-6)
        parts = torch.autograd.grad(expected_loss, list(model.parameters()), retain_graph=True, allow_unused=True)
        expected = torch.cat([part.flatten() for part in parts if part is not None])
        torch.testing.assert_close(gradient(model, ours), expected, rtol=2e-4, atol=2e-6)
        assert expected.abs().max() > 1e-3


def random_pairs(count: int) -> tuple[list[list[int]], list[list[int]]]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(6, 27, (2 * count,), generator=generator).tolist()
    ids = [torch.randint(0, 100, (n,), generator=generator).tolist() for n in lengths]
    return ids, [[0] * 4 + [1] * (len(i) - 4) for i in ids]


def test_a_micro_batch_of_padding_adds_nothing():
    model = lively_model(tiny_config())
    (batch,) = reply_pairs.pair_batches([], 32, 2, cpu_device())
    batch = reply_pairs.with_reference(batch, model)
    stats = torch.zeros(len(PAIR_STATS))
    for row in (PAIR_ROWS[name] for name in OF_REPLIES):
        loss, count = row.function(model, batch, sft_weight=1.0, stats=stats)
        assert (loss.item(), count.item(), stats.abs().sum().item()) == (0, 0, 0)
        assert not gradient(model, loss).any()
