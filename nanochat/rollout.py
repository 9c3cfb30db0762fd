"""Samples of a policy for reinforcement learning: questions in, sampled replies with rewards and advantages out.

Legend: Q questions, G samples a question, S = Q x G samples.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from nanochat.conversation import parse_reply, render_prompt
from nanochat.cross_entropy import IGNORE
from nanochat.data.packing import PackedBatch
from nanochat.device import Device
from nanochat.engine import Engine, seed_of
from nanochat.losses import PolicyBatch, kl_estimate, token_logp
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
    temperature: float,
    seed: int,
    rows: int,
    top_k: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
) -> Samples:
    """`samples` replies to each question, each rewarded by its task; all ranks together, and each has all of them.

    A rank samples as many rows at once as there are for each, at most `rows`; where that makes more batches than ranks,
    whoever is done takes the next one. What is sampled depends on `seed`, a question's number and a sample's alone, not
    on who samples it beside what, but for the rounding of products of other shapes. A reply that is cut off by
    `max_tokens` or by the context keeps what it has; its task decides what that is worth. `should_stop` says,
    before each token, whether to break off.
    Raises Interrupted: on every rank, when any of them broke off.
    """
    tokenizer, device = engine.tokenizer, engine.device
    room = engine.model.config.sequence_len - 1
    prompts = [render_prompt(tokenizer, example.question, room) for _, example in questions]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # equal lengths decode together
    wanted = [(i, g) for i in order for g in range(samples)]
    batches = dealt(len(wanted), device.world_size, rows)
    mine: list[_Reply] | None = []
    for batch in _whoever_is_free(len(batches), device):
        members = [wanted[place] for place in batches[batch]]
        try:
            tokens, masks = engine.generate(
                [prompts[i] for i, _ in members], max_tokens=max_tokens, temperature=temperature, top_k=top_k,
                seed=[seed_of(seed, i, g) for i, g in members], keep_stop=True, should_stop=should_stop,
            )  # fmt: skip
        except Interrupted:
            mine = None
            break
        for (i, g), sequence, mask in zip(members, tokens, masks, strict=True):
            task, example = questions[i]
            mine.append(((i, g), sequence, mask, task.reward(example, parse_reply(tokenizer, sequence))))
    ids, masks, replies, rewards = [], [], [], np.zeros((len(questions), samples))
    for (i, g), sequence, mask, reward in sorted(_of_all_ranks(mine, device)):
        ids.append(prompts[i] + sequence)
        masks.append([0] * len(prompts[i]) + mask)
        rewards[i, g] = reward
        replies.append(tokenizer.decode(sequence))
    return Samples(ids, masks, rewards, replies)


def dealt(count: int, ranks: int, most: int) -> list[range]:
    """The places of `count` replies, in the order of their questions, in batches of at most `most`.

    They are dealt out like cards, so that each of the ranks that sample at one time gets some of every question: long
    replies are long together, by their question, and who had those would keep all others waiting. To cut more batches
    than ranks instead would take longer: a batch's time is that of its longest reply, and grows little with its rows
    (docs/measurements.md has the counts).
    """
    at_once = ranks * min(most, max(1, -(-count // ranks)))
    ends = [(first, min(first + at_once, count)) for first in range(0, count, at_once)]
    return [range(first + rank, end, ranks) for first, end in ends for rank in range(min(ranks, end - first))]


_Reply = tuple[tuple[int, int], list[int], list[int], float]  # question and sample, tokens, mask, reward
_handed_out = 0  # numbers that all ranks together have drawn from the store so far


def _whoever_is_free(count: int, device: Device) -> Iterator[int]:
    """The numbers below `count`, each to one rank: the next one to whoever asks first. All ranks go through it, and
    meet in a collective before they do so again."""
    global _handed_out
    if device.world_size == 1:
        yield from range(count)
        return
    first, store = _handed_out, dist.distributed_c10d._get_default_store()
    _handed_out += count + device.world_size  # each rank also draws the number that tells it to stop
    while (number := store.add("rollout", 1) - 1 - first) < count:
        yield number


def _of_all_ranks(mine: list[_Reply] | None, device: Device) -> list[_Reply]:
    """Raises Interrupted: when a rank has None."""
    shares: list[list[_Reply] | None] = [mine] * device.world_size
    if device.world_size > 1:
        dist.all_gather_object(shares, mine)
    if any(share is None for share in shares):
        raise Interrupted
    return [reply for share in shares for reply in share or ()]


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
    if device.world_size > 1:
        dist.all_reduce(totals)
    total, targets = totals.tolist()
    return total / max(targets, 1.0)
