"""Check that a sampler outside this process computes the same probabilities as the trainer.

Other weights, another tokenization or another temperature damage the policy without an error: the samples look right,
and what is learned from them is wrong. So the log probabilities that come with samples are compared with the trainer's.

A server may take weights and never use them: on a CPU vLLM 0.32 loaded a tied model's weights and kept its head, and
answered every request with 200.
"""

from collections.abc import Iterable
from dataclasses import replace

from nanochat.cli import Failed
from nanochat.collectives import gather_values
from nanochat.cross_entropy import IGNORE
from nanochat.device import Device
from nanochat.gpt import GPT
from nanochat.log import print0
from nanochat.packing import pack_sequences
from nanochat.rollout import Reply, Sampler, largest_gap
from nanochat.samples import Sample, logp_of
from nanochat.sampling import SamplingParams
from nanochat.tokenizer import Tokenizer

PROBE = "The first question is what"
PROBE_TOKENS = 32


def measure(model: GPT, samples: Iterable[Sample], device: Device, temperature: float) -> tuple[float, float, int]:
    """Sums over the sampled tokens of |log p_trainer - log p_sampler| and of -log p_trainer in nats, and their number.

    All ranks call it together, each with samples of its own, or with none: the model's weights may be spread over them.
    """
    samples = list(samples)
    rows = pack_sequences(
        [sample.tokens for sample in samples], [sample.mask for sample in samples], model.config.sequence_len,
        values=[sample.logprobs for sample in samples],
    )  # fmt: skip
    rows = next(rows.micro_batches(len(rows), device))
    is_target = rows.targets != IGNORE
    own = logp_of(model, rows, temperature)[is_target]
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
            f"{sampling.temperature:g} before --top_k (vLLM: --logprobs-mode processed_logprobs, without --top_k)"
        )
    print0(f"sampler: its log probabilities are within {largest:.1g} nats a token of the trainer's")
