"""Samples for reinforcement learning: questions in, replies with rewards and advantages out. A step of scripts/chat_rl:

    1. sample      G replies to each of Q questions, by the policy as it is now       `sample_replies`
    2. reward      each task rewards its replies, such as 1 for a right answer        `Task.reward`
    3. compare     an advantage for each reply: its reward against its question's     `group_advantages`
    4. learn       tokens of replies with a positive advantage become likelier        `policy_batch`, losses.py

Nothing here learns a value function: the other replies to the same question are the baseline
(source: Shao et al. 2024, DeepSeekMath, which calls it GRPO).

Legend: Q questions, G samples a question, S = Q x G samples, N rows, T tokens a row.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from nanochat.conversation import parse_reply, render_prompt
from nanochat.cross_entropy import IGNORE
from nanochat.data.packing import PackedBatch
from nanochat.device import Device
from nanochat.engine import Engine
from nanochat.losses import PolicyBatch, kl_estimate, token_logp
from nanochat.parallel.collectives import gather_values, sum_over_ranks
from nanochat.sampling import SamplingParams, seed_of
from nanochat.shell.cli import Interrupted
from nanochat.tasks.task import Example, Task


@dataclass(frozen=True)
class Samples:
    """S replies; those to one question are neighbours."""

    ids: list[list[int]]  # question and reply
    masks: list[list[int]]  # 1 under each token that the policy chose: not the question's, not the tool's
    rewards: np.ndarray  # (Q, G)

    def split(self, count: int) -> list["Samples"]:
        """In `count` parts, each with all replies to its share of the questions; a part may be empty."""
        Q, G = self.rewards.shape
        parts = []
        for part in range(count):
            first = Q * part // count
            end = Q * (part + 1) // count
            replies = slice(first * G, end * G)
            parts.append(Samples(self.ids[replies], self.masks[replies], self.rewards[first:end]))
        return parts


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
    on `seed`, its question's number and its own number, not on the rank that samples it. Its neighbours change at most
    the rounding, because they change the shapes of the products. A reply that `max_tokens` or the context cuts off
    keeps what it has; its task decides what that is worth. A reply that ends with another special token than the
    assistant's end is worth nothing.
    Raises Interrupted: on every rank, when `should_stop` returned True on any of them.
    """
    tokenizer = engine.tokenizer
    device = engine.device
    # At least one token of the context is left for the reply.
    room = engine.model.config.sequence_len - 1
    prompts = [render_prompt(tokenizer, example.question, room) for _, example in questions]

    # 1. Deal. Replies are dealt out to the ranks like cards, in the order of their questions' lengths, so that each
    #    rank gets some of every question: replies to one question tend to be long together, and a rank that had them
    #    all would keep the others waiting. Two ranks, questions A and B, three samples of each:
    #
    #        wanted   A0 A1 A2 B0 B1 B2
    #        rank 0   A0    A2    B1
    #        rank 1      A1    B0    B2
    #
    #    In a simulation of 8 ranks ranks then idle 3 to 9% of the time instead of 26 to 39% (docs/measurements.md).
    by_length = sorted(range(len(prompts)), key=lambda question: len(prompts[question]))
    wanted: list[tuple[int, int]] = []
    for question in by_length:
        wanted += [(question, sample) for sample in range(samples)]
    mine = wanted[device.rank :: device.world_size]

    # 2. Sample, each reply from a seed of its own: 1, 2 and 3 ranks sample the same replies in fp32. The end token is
    #    kept: the policy must learn to end.
    settings = [SamplingParams(**sampling, seed=seed_of(seed, *numbers)) for numbers in mine]
    own: list[_Reply] | None = []  # None: this rank was interrupted
    try:
        tokens = []
        masks = []
        if mine:
            tokens, masks = engine.generate(
                [prompts[question] for question, _ in mine],
                max_tokens=max_tokens,
                sampling=settings,
                max_rows=rows,
                keep_stop=True,
                should_stop=should_stop,
            )
        # 3. Reward, on the rank that has sampled. A reward may run a program, so the ranks share this work, too.
        for numbers, reply, mask in zip(mine, tokens, masks, strict=True):
            task, example = questions[numbers[0]]
            reward = 0.0  # the model must not learn to end with whatever stops the engine
            if engine.ending(reply, mask) != "broken":
                reward = task.reward(example, parse_reply(tokenizer, reply))
            own.append(_Reply(list(numbers), reply, mask, reward))
    # An interrupted rank still takes part in the exchange below, or the others would wait for it in vain.
    except Interrupted:
        own = None

    # 4. Exchange: every rank packs the same batch from all replies, in the order of questions and samples.
    replies: list[_Reply] = []
    for share in gather_values(None if own is None else [asdict(reply) for reply in own], device):
        if share is None:
            raise Interrupted
        replies += [_Reply(**reply) for reply in share]
    replies.sort(key=lambda reply: reply.numbers)
    return Samples(
        ids=[prompts[reply.numbers[0]] + reply.tokens for reply in replies],
        masks=[[0] * len(prompts[reply.numbers[0]]) + reply.mask for reply in replies],
        rewards=np.array([reply.reward for reply in replies]).reshape(len(questions), samples),
    )


@dataclass(frozen=True)
class _Reply:
    numbers: list[int]  # of the question, and of the sample among its question's
    tokens: list[int]
    mask: list[int]
    reward: float


def group_advantages(rewards: np.ndarray, by_deviation: bool) -> np.ndarray:
    """How much better each reply is than the other replies to its question: rewards (Q, G) -> advantages (Q, G)."""
    # Four replies to a question, by their rewards:
    #
    #     rewards    advantages                    divided by the deviation
    #     1 0 0 1     0.50 -0.50 -0.50  0.50        1.00 -1.00 -1.00  1.00
    #     1 0 0 0     0.75 -0.25 -0.25 -0.25        1.73 -0.58 -0.58 -0.58
    #     1 1 1 1     0     0     0     0           0     0     0     0
    #
    # The mean reward of a question is its baseline: an easy question then teaches no more than a hard one, and a group
    # in which all replies are equally good teaches nothing.
    advantages = rewards - rewards.mean(axis=1, keepdims=True)
    # The mean of equals is rounded: of three rewards of 0.1 it is above 0.1, and nothing would pass for a preference.
    advantages[np.ptp(rewards, axis=1) == 0] = 0
    # GRPO also divides by the group's standard deviation. Dr. GRPO (Liu et al. 2025) does not: the division gives
    # questions that are nearly always right or nearly always wrong a larger weight, as the second row shows. In the
    # demo Dr. GRPO learns stories as well (88.5% against 86.5% after RL) and forgets less (docs/measurements.md).
    if by_deviation:
        advantages = advantages / (rewards.std(axis=1, keepdims=True) + 1e-6)  # a group of equals stays 0
    return advantages


def policy_batch(rows: PackedBatch, samples: Samples, advantages: np.ndarray, device: Device) -> PolicyBatch:
    """A micro-batch of the packed samples, on the device, with the advantage of each target's sample."""
    # One number for each sample: its advantage (Q, G) -> (S,), and 1 / its number of targets, for losses that give
    # every sample the same weight however long it is.
    by_sample = torch.from_numpy(advantages).float().flatten()
    lengths = torch.tensor([max(1, sum(mask)) for mask in samples.masks], dtype=torch.float32)
    per_sample = device.to_device(torch.stack((by_sample, 1 / lengths)))  # (2, S)
    if not samples.ids:
        per_sample = per_sample.new_zeros(2, 1)  # no questions: the batch is one row of padding, which has no sample
    # Spread them over the tokens; `source` (N, T) names the sample of each token. The index (N, T) selects columns of
    # (2, S), which gives (2, N, T). Padding has source 0 and no target, so that it is multiplied by 0.
    is_target = rows.targets != IGNORE
    per_token = is_target * per_sample[:, rows.source]  # (2, N, T)
    return PolicyBatch(rows, per_token[0], per_token[1])


@torch.no_grad()
def logp_of(model: Any, rows: PackedBatch) -> torch.Tensor:
    """Log probabilities of a micro-batch's targets under a model, without a gradient."""
    return token_logp(model, rows)


def mean_kl(model: Any, batches: Sequence[PolicyBatch], device: Device) -> float:
    """How far the model has moved from the reference, on the samples of all ranks: KL divergence, nats per token."""
    # Sums first, and one division at the end: micro-batches and ranks hold different numbers of tokens, so a mean of
    # their means would be another number. The device adds them up; the host waits once, in `tolist`.
    totals = torch.zeros(2, device=device.torch_device)  # nats, tokens
    for batch in batches:
        assert batch.reference_logp is not None
        kl = kl_estimate(logp_of(model, batch.rows), batch.reference_logp).sum()
        tokens = (batch.rows.targets != IGNORE).sum().float()
        totals += torch.stack((kl, tokens))
    nats, tokens = sum_over_ranks(totals, device).tolist()
    return nats / max(tokens, 1.0)
