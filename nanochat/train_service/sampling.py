"""Samples for clients: requests for one model are decoded together, but do not affect each other.

The logprobs are for temperature 1 and before top_k and top_p. `forward` computes the same values for the same tokens,
and the losses of RL compare the two.
"""

import math
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from nanochat.device import Device
from nanochat.engine import Engine, NewToken, Row, logprob_table
from nanochat.gpt import GPT
from nanochat.ground.cli import UserError
from nanochat.sampling import SamplingParams
from nanochat.tokenizer import Tokenizer
from nanochat.train_service.wire import MASKED_LOGPROB, messages, topk

SLICE_SECONDS = 0.5  # samples are decoded for so long before the requests of others have their turn
SCORED_AT_ONCE = 256  # tokens of a prompt whose logits are in memory at once
MAX_NUMBERS = 1 << 22  # logprobs and ids in results that are made together; 34 MB, and a tenth of a second to send
NOT_FINITE = "sample: these weights give logits that are not finite; load weights of an earlier step"


@dataclass(eq=False)
class SampleJob:
    """The parameters of one request."""

    prompt: list[int]
    num_samples: int
    max_tokens: int
    sampling: SamplingParams
    stop_ids: frozenset[int]
    stop_texts: tuple[str, ...] = ()
    topk: int = 0  # number of most likely tokens to return at each sampled token
    prompt_logprobs: bool = False
    prompt_topk: int = 0
    prompt_last: int = 0  # score only the last tokens of the prompt; 0: all

    @property
    def numbers(self) -> int:
        """How many numbers its result can have."""
        return self.num_samples * self.max_tokens * (1 + 2 * self.topk)


def make_engine(model: GPT, tokenizer: Tokenizer, device: Device) -> Engine:
    """An engine that ends a sequence only as its request requires, and does not answer tool calls."""
    engine = Engine(model, tokenizer, device)
    engine.stop_ids = set()
    engine.call_start = engine.call_end = -1
    return engine


@dataclass(eq=False)
class _Sample:
    """One sequence that is being generated."""

    job: SampleJob
    tokens: list[int] = field(default_factory=list)
    numbers: "array[float]" = field(default_factory=lambda: array("d"))  # see NewToken.logprobs; token after token
    is_stopped: bool = False


def sample(engine: Engine, jobs: Sequence[SampleJob], slots: int) -> Iterator[list[bytes]]:
    """The results of all jobs, in the form of the wire, with pauses.

    Yields an empty list every SLICE_SECONDS, when others may use the device, and the results at last.
    """
    # Every sample is a row of the decoder. Samples of one prompt are neighbours, so its tokens are read once.
    waiting: deque[Row] = deque()
    samples: list[_Sample] = []
    for job in jobs:
        for number in range(job.num_samples):
            settings = replace(job.sampling, seed=(job.sampling.seed + number) % 2**62)
            row = Row(job.prompt, job.max_tokens, settings, len(samples), answers_calls=False, stop_ids=job.stop_ids)
            samples.append(_Sample(job))
            if job.max_tokens:
                waiting.append(row)
    topk = max((job.topk for job in jobs), default=0)
    if waiting:
        capacity = max(len(row.prompt) + row.max_tokens for row in waiting)
        size = min(slots, len(waiting))
        with engine.slots(size, min(capacity, engine.model.config.sequence_len)) as decoder:
            pause = time.monotonic() + SLICE_SECONDS
            while waiting or decoder.rows:
                free = size - len(decoder.rows)
                if waiting and (not decoder.rows or free >= max(1, size // 4)):
                    decoder.fill([waiting.popleft() for _ in range(min(free, len(waiting)))])
                new_tokens = decoder.decode(topk)
                ended = {new.row for new in new_tokens if _take(samples[new.row.number], new, engine.tokenizer)}
                decoder.release(ended)
                if time.monotonic() >= pause:
                    yield []
                    pause = time.monotonic() + SLICE_SECONDS

    # Each job's samples, and the requested data about its prompt.
    results = []
    first = 0
    for job in jobs:
        own = samples[first : first + job.num_samples]
        first += job.num_samples
        response = messages().SampleResponse(sequences=[_finished(one) for one in own])
        if job.prompt_logprobs or job.prompt_topk:
            yield []
            score_prompt(engine.model, job, response)
        results.append(response.SerializeToString())
    yield results


def _take(sample: _Sample, new: NewToken, tokenizer: Tokenizer) -> bool:
    """Add a token to a sequence; returns whether it was the last one."""
    sample.tokens.append(new.id)
    sample.numbers.extend(new.logprobs)
    sample.is_stopped = new.finish_reason == "stop"
    if sample.job.stop_texts and not sample.is_stopped:
        # A text may begin in any of the last tokens: each of its bytes is part of one token at least.
        longest = max(len(text.encode()) for text in sample.job.stop_texts)
        ending = tokenizer.decode(sample.tokens[-longest - 4 :])
        sample.is_stopped = any(text in ending for text in sample.job.stop_texts)
    return sample.is_stopped or new.finish_reason is not None


def _finished(sample: _Sample) -> Any:
    """The message for a sequence."""
    k = sample.job.topk
    numbers = np.zeros((0, 1 + 2 * k))
    if sample.tokens:
        numbers = np.frombuffer(sample.numbers).reshape(len(sample.tokens), -1)
    if np.isnan(numbers[:, 0]).any():
        raise UserError(NOT_FINITE)
    message = messages().SampledSequence(
        stop_reason="STOP_REASON_STOP" if sample.is_stopped else "STOP_REASON_LENGTH",
        tokens=np.array(sample.tokens, "<i4").tobytes(),
        logprobs=numbers[:, 0].astype("<f4").tobytes(),
    )
    if k:
        # The decoder computed as many as any of its rows wanted: the logprobs in front, then the ids.
        found = (numbers.shape[1] - 1) // 2
        ids = numbers[:, 1 + found : 1 + found + k]
        message.topk_sampled_logprobs.CopyFrom(topk(ids, numbers[:, 1 : 1 + min(k, found)]))
    return message


@torch.inference_mode()
def score_prompt(model: GPT, job: SampleJob, response: Any) -> None:
    """Add the logprob of each of a prompt's tokens (T,), NaN at the first one, and the most likely tokens in its place
    (T, k)."""
    T = len(job.prompt)
    first = max(1, T - job.prompt_last) if job.prompt_last else 1  # the first token has no predecessor
    k = min(job.prompt_topk, model.config.vocab_size)
    logprobs = np.full(T, math.nan)
    ids = np.zeros((T, k))
    values = np.full((T, k), MASKED_LOGPROB)
    tokens = torch.tensor(job.prompt, device=model.device)
    hidden = model.hidden(tokens[None, :-1])[0] if T > 1 else None  # (T - 1, C)
    for start in range(first, T, SCORED_AT_ONCE):
        assert hidden is not None
        part = slice(start, min(start + SCORED_AT_ONCE, T))
        logits = model.logits(hidden[part.start - 1 : part.stop - 1])  # (n, V)
        table = logprob_table(logits, tokens[part], k).cpu().numpy()
        logprobs[part] = table[:, 0]
        values[part] = table[:, 1 : 1 + k]
        ids[part] = table[:, 1 + k :]
    if np.isnan(logprobs[first:]).any():
        raise UserError(NOT_FINITE)
    if job.prompt_logprobs:
        response.prompt_logprobs = logprobs.astype("<f4").tobytes()
    if k:
        response.topk_prompt_logprobs.CopyFrom(topk(ids, values))
