"""The samples of a step of reinforcement learning, and the batches that the policy learns from.

`rollout.py` draws samples. Here they become rows with an advantage at each token; losses.py does the rest.

Legend: Q questions, G samples a question, S = Q x G samples, N rows, T tokens a row.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from nanochat.collectives import sum_over_ranks
from nanochat.cross_entropy import IGNORE
from nanochat.device import Device
from nanochat.engine import Ending
from nanochat.losses import PolicyBatch, has_signal, token_logp
from nanochat.packing import PackedBatch, pack_sequences


@dataclass
class Sample:
    """One episode, as the policy learns from it: the tokens of a question, of a reply, of the environment's answer, and
    so on."""

    question: int  # its number in the step
    number: int  # its number among the samples of its question
    tokens: list[int]  # the whole conversation
    mask: list[int]  # 1 under each token that the policy chose: not the question's, not the tool's
    logprobs: list[float]  # one per token in nats, by the sampling weights; 0 where the mask is 0
    ending: Ending = "cut off"  # how the last reply ended
    longest: int = 0  # tokens of the longest reply
    parts: dict[str, float] = field(default_factory=dict)  # parts of the reward by name, before their weights
    reward: float = 0.0  # the weighted sum of the parts

    def extend(self, tokens: list[int], mask: list[int], logprobs: list[float]) -> None:
        self.tokens += tokens
        self.mask += mask
        self.logprobs += logprobs


@dataclass(frozen=True)
class Samples:
    """The samples of a step, in groups of the G samples of each question."""

    groups: list[list[Sample]]
    group_size: int  # G, even without a question

    def __iter__(self) -> Iterator[Sample]:
        for group in self.groups:
            yield from group

    def grid(self, value: Callable[[Sample], float]) -> np.ndarray:
        """A number of each sample, (Q, G)."""
        return np.array([value(sample) for sample in self]).reshape(len(self.groups), self.group_size)

    @property
    def rewards(self) -> np.ndarray:
        return self.grid(lambda sample: sample.reward)

    @property
    def without_signal(self) -> int:
        """Questions whose replies are all equally good."""
        return int(np.count_nonzero(~has_signal(self.rewards)))

    @property
    def token_count(self) -> int:
        return sum(len(sample.tokens) for sample in self)

    def split(self, count: int) -> list["Samples"]:
        """Split into `count` parts, each with all samples of its share of the questions; a part may be empty."""
        Q = len(self.groups)
        bounds = [Q * part // count for part in range(count + 1)]
        return [replace(self, groups=self.groups[bounds[part] : bounds[part + 1]]) for part in range(count)]

    def refill(self, more: "Samples") -> "Samples":
        """Replace questions without a signal by questions of `more` that have one, as far as these suffice."""
        # The rewards themselves decide: DAPO filters by accuracy, before its overlong penalty changes them. Otherwise
        # replies that are all right but not equally long would look like a signal.
        groups = list(self.groups)
        free = np.flatnonzero(~has_signal(self.rewards)).tolist()
        spare = np.flatnonzero(has_signal(more.rewards)).tolist()
        for place, question in zip(free, spare, strict=False):
            groups[place] = more.groups[question]
        return replace(self, groups=groups)

    def metrics(self) -> dict[str, float]:
        """The metrics for the log that do not need the model."""
        rewards = self.rewards
        replies = max(1, rewards.size)
        questions = max(1, len(self.groups))
        metrics = {"reward": rewards.sum() / replies}
        names = [*next(iter(self)).parts] if self.groups else []
        if len(names) > 1:
            for name in names:
                metrics[f"reward/{name}"] = self.grid(lambda sample, name=name: sample.parts[name]).sum() / replies
        # With rewards of 0 and 1 this is the share of questions with a right reply among the G: pass@G.
        metrics["pass_at_k"] = rewards.max(axis=1).sum() / questions
        metrics["no_signal"] = self.without_signal / questions
        metrics["response_tokens"] = sum(sum(sample.mask) for sample in self) / replies
        metrics["truncated"] = len([sample for sample in self if sample.ending == "cut off"]) / replies
        return metrics


# ---------------------------------------------------------------------- pack


def policy_batches(
    samples: Samples,
    shape: tuple[int, int],
    device: Device,
    policy: Any = None,
    reference: Any = None,
    temperature: float = 1.0,
) -> list[PolicyBatch]:
    """This rank's share of the samples in micro-batches of a `shape` (rows, tokens of a row), on the device.

    With the log probabilities of the models that are given, at a temperature; all advantages are 0 so far.
    """  # fmt: skip
    rows, row_tokens = shape
    packed = pack_sequences(
        [sample.tokens for sample in samples], [sample.mask for sample in samples], row_tokens, device.data_ranks,
        [sample.logprobs for sample in samples],
    )  # fmt: skip
    # 1 / its number of targets, for losses that give every sample the same weight however long it is.
    share = samples.grid(lambda sample: 1 / max(1, sum(sample.mask)))
    batches = []
    for micro in packed.micro_batches(rows, device, device.data_rank, device.data_ranks):
        per_token = spread(share, micro, device)
        old_logp = None if policy is None else logp_of(policy, micro, temperature)
        reference_logp = None if reference is None else logp_of(reference, micro, temperature)
        batches.append(PolicyBatch(micro, torch.zeros_like(per_token), per_token, old_logp, reference_logp))
    return batches


def spread(per_sample: np.ndarray, rows: PackedBatch, device: Device) -> torch.Tensor:
    """A number of each sample, (S,) or (Q, G), at each of its targets, (N, T); 0 elsewhere."""
    numbers = torch.from_numpy(per_sample).float().flatten()
    if not len(numbers):
        numbers = torch.zeros(1)  # no questions: the batch is one row of padding, which has no sample
    # `source` (N, T) names the sample of each token. Padding has source 0 and no target: it is multiplied by 0.
    return (rows.targets != IGNORE) * device.to_device(numbers)[rows.source]


@torch.no_grad()
def logp_of(model: Any, rows: PackedBatch, temperature: float = 1.0) -> torch.Tensor:
    """Log probabilities of a micro-batch's targets under a model, without a gradient."""
    return token_logp(model, rows, temperature)


# ---------------------------------------------------------------------- compare


def overlong_penalty(lengths: np.ndarray, max_tokens: int, share: float) -> np.ndarray:
    """The penalty for replies of these lengths: 0, and in the last `share` of max_tokens linearly up to 1.

    A reply that is cut off has usually missed its answer, and a reply that ends just before has it. This slope teaches
    the model to finish (source: Yu et al. 2025, DAPO, soft overlong punishment).
    """
    if not share:
        return np.zeros(lengths.shape)
    # With max_tokens 100 and a share of 0.2, a reply of 80 tokens loses 0, one of 90 0.5, one of 100 1.
    slope = max_tokens * share
    return ((lengths - (max_tokens - slope)) / slope).clip(0, 1)


def kl_of_samples(parts: Sequence[Samples], minibatches: Sequence[Sequence[PolicyBatch]], device: Device) -> np.ndarray:
    """log p(o) - log p_reference(o) of each sample in nats, (Q, G): its share of the KL to the reference.

    p is the model's own, from before the step's first update: the sampler rounds otherwise. `parts` are the samples of
    each minibatch. The host waits once, for all of them.
    """
    differences = []
    sources = []
    count = 0
    for part, batches in zip(parts, minibatches, strict=True):
        for batch in batches:
            assert batch.old_logp is not None and batch.reference_logp is not None
            differences.append((batch.old_logp - batch.reference_logp).flatten())
            sources.append((count + batch.rows.source).flatten())
        count += part.rewards.size
    # A sample lies in one row of one rank, or of the ranks that share it: it is summed there, and is 0 elsewhere.
    own = np.bincount(torch.cat(sources).cpu().numpy(), torch.cat(differences).cpu().numpy(), count)
    own /= device.context_ranks
    totals = sum_over_ranks(device.to_device(torch.from_numpy(own).float()), device)
    return totals.cpu().numpy().reshape(-1, parts[0].group_size)


def with_advantages(
    parts: Sequence[Samples], minibatches: Sequence[Sequence[PolicyBatch]], advantages: np.ndarray, device: Device
) -> list[list[PolicyBatch]]:
    """The minibatches with the advantages (Q, G) of their samples; `parts` are the samples of each."""
    done = []
    first = 0
    for part, batches in zip(parts, minibatches, strict=True):
        own = advantages[first : first + len(part.groups)]
        done.append([replace(batch, advantages=spread(own, batch.rows, device)) for batch in batches])
        first += len(part.groups)
    return done
