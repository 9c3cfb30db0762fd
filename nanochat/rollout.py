"""Samples of a policy for reinforcement learning: questions in, sampled replies with rewards and advantages out.

Legend: Q questions, G samples a question, S = Q x G samples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nanochat.conversation import parse_reply, render_prompt
from nanochat.cross_entropy import IGNORE
from nanochat.data.packing import PackedBatch
from nanochat.device import Device
from nanochat.engine import Engine
from nanochat.losses import PolicyBatch, kl_estimate, token_logp
from nanochat.parallel.collectives import gather_objects, sum_over_ranks
from nanochat.sampling import SamplingParams, seed_of
from nanochat.shell.cli import Interrupted
from nanochat.tasks.task import Example, Task


@dataclass(frozen=True)
class Samples:
    """S replies, those to one question side by side."""

    ids: list[list[int]]  # question and reply
    masks: list[list[int]]  # 1 under each token that the policy chose
    rewards: np.ndarray  # (Q, G)
    replies: list[str]  # as text with the marks, to look at


def sample_replies(
    engine: Engine,
    questions: Sequence[tuple[Task, Example]],
    *,
    samples: int,
    max_tokens: int,
    seed: int,
    rows: int,
    should_stop: Callable[[], bool] = lambda: False,
    **sampling: Any,
) -> Samples:
    """`samples` replies to each question, each rewarded by its task. All ranks call it together and get all replies.

    At most `rows` replies run at once on a rank. `sampling` names fields of SamplingParams. What a reply draws depends
    on `seed`, its question's number and its own number, not on the rank that samples it nor on what runs next to it
    (but for the rounding of products of other shapes). A reply that `max_tokens` or the context cuts off keeps what it
    has; its task decides what that is worth.
    Raises Interrupted: on every rank, when `should_stop` returned True on any of them.
    """
    tokenizer, device = engine.tokenizer, engine.device
    room = engine.model.config.sequence_len - 1
    prompts = [render_prompt(tokenizer, example.question, room) for _, example in questions]

    # 1. Deal. Replies are dealt out to the ranks like cards, in the order of their questions' lengths, so that each
    #    rank gets some of every question: replies to one question tend to be long together, and a rank that had them
    #    all would keep the others waiting.
    by_length = sorted(range(len(prompts)), key=lambda question: len(prompts[question]))
    wanted = [(question, sample) for question in by_length for sample in range(samples)]
    mine = wanted[device.rank :: device.world_size]

    # 2. Sample, each reply from a seed of its own. The end token is kept: the policy must learn to end.
    own: list[_Reply] | None = []
    try:
        tokens, masks = [], []
        if mine:
            tokens, masks = engine.generate(
                [prompts[question] for question, _ in mine],
                max_tokens=max_tokens,
                sampling=[SamplingParams(**sampling, seed=seed_of(seed, *numbers)) for numbers in mine],
                max_rows=rows,
                keep_stop=True,
                should_stop=should_stop,
            )
        # 3. Reward, on the rank that has sampled.
        for numbers, reply, mask in zip(mine, tokens, masks, strict=True):
            task, example = questions[numbers[0]]
            own.append(_Reply(numbers, reply, mask, task.reward(example, parse_reply(tokenizer, reply))))
    except Interrupted:
        own = None

    # 4. Exchange: every rank packs the same batch from all replies, in the order of questions and samples.
    replies = sorted(_from_all_ranks(own, device), key=lambda reply: reply.numbers)
    rewards = np.zeros((len(questions), samples))
    for reply in replies:
        rewards[reply.numbers] = reply.reward
    return Samples(
        ids=[prompts[reply.numbers[0]] + reply.tokens for reply in replies],
        masks=[[0] * len(prompts[reply.numbers[0]]) + reply.mask for reply in replies],
        rewards=rewards,
        replies=[tokenizer.decode(reply.tokens) for reply in replies],
    )


@dataclass(frozen=True)
class _Reply:
    numbers: tuple[int, int]  # of the question, and of the sample among its question's
    tokens: list[int]
    mask: list[int]
    reward: float


def _from_all_ranks(own: list[_Reply] | None, device: Device) -> list[_Reply]:
    """Raises Interrupted: when a rank has None."""
    replies: list[_Reply] = []
    for share in gather_objects(own, device):
        if share is None:
            raise Interrupted
        replies += share
    return replies


def group_advantages(rewards: np.ndarray, by_deviation: bool) -> np.ndarray:
    """How much better each sample is than its question's others: rewards (Q, G) less their mean, and
    `by_deviation` divided by their standard deviation (source: Shao et al. 2024, GRPO). A group of equals gets 0."""
    advantages = rewards - rewards.mean(axis=1, keepdims=True)
    if by_deviation:
        advantages = advantages / (rewards.std(axis=1, keepdims=True) + 1e-6)
    return advantages


def policy_batch(rows: PackedBatch, samples: Samples, advantages: np.ndarray, device: Device) -> PolicyBatch:
    """A micro-batch (a part of the packed samples, on the device) with its samples' advantages (Q, G)."""
    lengths = torch.tensor([max(1, sum(mask)) for mask in samples.masks], dtype=torch.float32)
    by_sample = device.to_device(torch.stack((torch.from_numpy(advantages).float().flatten(), 1 / lengths)))
    if not samples.ids:  # a rank without a question has a row of padding, which is of no sample
        by_sample = by_sample.new_zeros(2, 1)
    of_targets = (rows.targets != IGNORE) * by_sample[:, rows.source]  # (2, N, T)
    return PolicyBatch(rows, of_targets[0], of_targets[1])


@torch.no_grad()
def logp_of(model: torch.nn.Module, rows: PackedBatch, device: Device) -> torch.Tensor:
    """Log probabilities of a micro-batch's targets under a model, without a gradient."""
    with device.autocast():
        return token_logp(model, rows)


def mean_kl(model: torch.nn.Module, batches: Sequence[PolicyBatch], device: Device) -> float:
    """Nats a token that the model has moved away from the reference, on the samples, over all ranks."""
    totals = torch.zeros(2, device=device.torch_device)
    for batch in batches:
        assert batch.reference_logp is not None
        moved = kl_estimate(logp_of(model, batch.rows, device), batch.reference_logp).sum()
        totals += torch.stack((moved, (batch.rows.targets != IGNORE).sum().float()))
    total, targets = sum_over_ranks(totals, device).tolist()
    return total / max(targets, 1.0)
