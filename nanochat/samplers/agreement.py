"""Check that a sampler outside this process computes the same probabilities as the trainer."""

from dataclasses import replace

from nanochat.cli import Failed
from nanochat.collectives import gather_values
from nanochat.cross_entropy import IGNORE
from nanochat.device import Device
from nanochat.gpt import GPT
from nanochat.log import print0
from nanochat.packing import pack_sequences
from nanochat.rollout import Reply, Sampler, largest_gap
from nanochat.samples import logp_of
from nanochat.sampling import SamplingParams
from nanochat.tokenizer import Tokenizer

PROBE = "The first question is what"
PROBE_TOKENS = 32


def check_agreement(
    sampler: Sampler, model: GPT, tokenizer: Tokenizer, device: Device, sampling: SamplingParams
) -> None:
    """Sample a short reply as the run does, and compare the sampler's log probabilities with the trainer's.

    Another model, another tokenization or another temperature would make the policy wrong without any error.

    Another model, another tokenization or log probabilities at another temperature would damage the policy without an
    error. All ranks call it together, right after weights were handed over.
    Raises Failed: on all ranks, when the log probabilities differ.
    """
    prompt = [tokenizer.get_bos_token_id(), *tokenizer.encode(PROBE)]
    reply = Reply([0], [0], [0.0], "cut off")
    failed = ""
    try:
        reply = sampler([prompt], [replace(sampling, seed=device.rank)], PROBE_TOKENS)[0]
    except Failed as error:  # this rank must still take part in the exchange below
        failed = str(error)
    rows = pack_sequences([[*prompt, *reply.tokens]], [[0] * len(prompt) + reply.mask], model.config.sequence_len)
    rows = next(rows.micro_batches(1, device))
    own = logp_of(model, rows, sampling.temperature)[rows.targets != IGNORE].tolist()
    theirs = [logp for logp, chosen in zip(reply.logprobs, reply.mask, strict=True) if chosen]
    count = max(1, len(own))
    difference = sum(abs(one - other) for one, other in zip(own, theirs, strict=True)) / count
    reports = gather_values((failed, difference, -sum(own) / count), device)
    for failed, *_ in reports:
        if failed:
            raise Failed(failed)
    largest = max(difference for _, difference, _ in reports)
    if not all(difference <= largest_gap(entropy) for _, difference, entropy in reports):
        raise Failed(
            f"--sampler: its log probabilities of a reply are {largest:.2g} nats a token from the trainer's: it has "
            f"other weights, another tokenization, or log probabilities that are not at --temperature "
            f"{sampling.temperature:g} before --top_k (vLLM: --logprobs-mode processed_logprobs, without --top_k)"
        )
    print0(f"sampler: its log probabilities are within {largest:.1g} nats a token of the trainer's")
