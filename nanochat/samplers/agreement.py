"""Check that a sampler outside this process computes the same probabilities as the trainer.

Other weights, another tokenization or another temperature damage the policy without an error: the samples look right,
and what is learned from them is wrong. Two checks compare the log probabilities that came with the samples with the
trainer's own, before anything is learned from them:

    check_agreement    a short reply, before the run's first step
    Checked            some samples of every step

A server may take weights and never use them: on a CPU vLLM 0.32 loaded a tied model's weights and kept its head, and
answered every request with 200.
"""

from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

import torch

from nanochat.cross_entropy import IGNORE
from nanochat.device import Device
from nanochat.gpt import GPT
from nanochat.ground.cli import Failed
from nanochat.ground.log import print0, warn
from nanochat.losses import token_logp
from nanochat.packing import pack_sequences
from nanochat.ranks import gather_values
from nanochat.rollout import RankSamples, Reply, Sample, Sampler
from nanochat.samplers.ahead import Ahead
from nanochat.sampling import SamplingParams
from nanochat.tokenizer import Tokenizer

PROBE = "The first question is what"
PROBE_TOKENS = 32
ATTEMPTS = 3  # samplings of one step, each after a new hand-over of the weights
# Mean difference in nats between a sampler's and the trainer's log probabilities of a token. In fp32 it is 1e-6, in
# bf16 0.01; a model that is one step of RL older has 0.001, another model more than 1. What is much depends on how sure
# the model is: another temperature moves log probabilities by a share of their mean, the entropy.
ROUNDING_GAP = 0.02
LARGEST_GAP = 0.1  # share of the entropy, in addition to rounding
# How far a step moves the policy depends on its rate: this factor is a guess that leaves room, not a measurement.
OLDER_GAP = 4  # how much more a step of --staleness allows, as a share


def largest_gap(entropy: float, staleness: int = 0) -> float:
    """The largest difference in nats a token between the log probabilities of two programs with the same policy."""
    return (ROUNDING_GAP + LARGEST_GAP * max(0.0, entropy)) * (1 + OLDER_GAP * staleness)


@torch.no_grad()
def measure(model: GPT, samples: Iterable[Sample], device: Device, temperature: float) -> tuple[float, float, int]:
    """Sums over the sampled tokens of |log p_trainer - log p_sampler| and of -log p_trainer in nats, and their number.

    All ranks call it together, each with its own samples or none: the model's weights may be spread over them.
    """
    samples = list(samples)
    if device.context_ranks > 1:
        # Ranks that share rows must read the same ones: those of all of them.
        first = device.data_rank * device.context_ranks
        theirs = gather_values([asdict(sample) for sample in samples], device)[first : first + device.context_ranks]
        samples = [Sample(**sample) for rank in theirs for sample in rank]
    rows = pack_sequences(
        [sample.tokens for sample in samples], [sample.mask for sample in samples], model.config.sequence_len,
        values=[sample.logprobs for sample in samples],
    )  # fmt: skip
    rows = next(rows.micro_batches(len(rows), device))
    is_target = rows.targets != IGNORE
    own = token_logp(model, rows, temperature)[is_target]
    assert rows.values is not None
    theirs = rows.values[is_target]
    return (own - theirs).abs().sum().item(), -own.sum().item(), len(own)


def check_agreement(
    sampler: Sampler, model: GPT, tokenizer: Tokenizer, device: Device, sampling: SamplingParams
) -> None:
    """Sample a short reply as the run does, and compare the sampler's log probabilities with the trainer's.

    All ranks call it together, right after weights were handed over.
    Raises Failed: on all ranks, when the log probabilities differ.
    """
    prompt = [tokenizer.get_bos_token_id(), *tokenizer.encode(PROBE)]
    reply = Reply([0], [0], [0.0], "cut off")
    failed = ""
    try:
        reply = sampler([prompt], [replace(sampling, seed=device.rank)], PROBE_TOKENS)[0]
    except Failed as error:  # this rank must still take part in the exchange below
        failed = str(error)
    asked = [0] * len(prompt)
    sample = Sample(0, 0, [*prompt, *reply.tokens], asked + reply.mask, [0.0] * len(prompt) + reply.logprobs)
    gap, surprise, count = measure(model, [sample], device, sampling.temperature)
    reports = gather_values((failed, gap / max(1, count), surprise / max(1, count)), device)
    for failed, *_ in reports:
        if failed:
            raise Failed(failed)
    largest = max(gap for _, gap, _ in reports)
    if not all(gap <= largest_gap(entropy) for _, gap, entropy in reports):
        raise Failed(
            f"--sampler: its log probabilities of a reply are {largest:.2g} nats a token from the trainer's: it has "
            f"other weights, another tokenization, or log probabilities that are not at --temperature "
            f"{sampling.temperature:g} before --top_k (vLLM: --logprobs-mode processed_logprobs, without --top_k; "
            "vllm-ascend 0.23: --temperature 1)"
        )
    print0(f"sampler: its log probabilities are within {largest:.1g} nats a token of the trainer's")


class Checked(Ahead):
    """The samples of each step from a sampler outside this process, in agreement with the trainer.

    A step with other log probabilities than the trainer's is not learned from: the sampler gets the weights again and
    samples the step again, up to `ATTEMPTS` times in all. Then the run ends, and its checkpoint has learned from good
    samples only. Up to --device_batch_size samples of each rank are compared.
    """

    def __init__(self, *arguments: Any, config: Any, device: Device) -> None:
        super().__init__(*arguments)
        self.config = config
        self.device = device

    def take(self, step: int) -> RankSamples:
        why = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                warn(f"{why}: it gets the weights again, and samples step {step} again")
                self.forget()
            own = super().take(step)
            samples = [Sample(**sample) for sample in own.samples]
            # Neighbours are samples of one question: take them from all questions.
            count = self.config.device_batch_size
            samples = samples[:: max(1, len(samples) // count)][:count]
            is_whole = not (own.failed or own.interrupted)
            measured = measure(self.model, samples, self.device, self.config.temperature)
            reports = gather_values((is_whole, *measured), self.device)
            if not all(is_whole for is_whole, *_ in reports):
                return own  # `gather_samples` raises why
            tokens = max(1, sum(tokens for *_, tokens in reports))
            gap = sum(gap for _, gap, *_ in reports) / tokens
            largest = largest_gap(sum(surprise for _, _, surprise, _ in reports) / tokens, self.staleness)
            if gap <= largest:  # a NaN is larger
                return own
            why = (
                f"--sampler: its log probabilities are {gap:.2g} nats a token from the trainer's, more than "
                f"{largest:.2g}: it has other weights, or log probabilities of another temperature"
            )
        return replace(own, failed=f"{why}; this did not change in {ATTEMPTS} attempts")
