"""S5. Batched is the same as alone.

Requests with different settings join and leave a batch. Each gets the tokens that it gets in a scheduler without
others. A greedy request gets the tokens of `Engine.generate`, for every shape of model.
"""

import functools
import random
import time
from dataclasses import replace
from typing import Any

import pytest
from bodies import CONTEXT
from fake_server import until
from running_schedulers import GREEDY, in_all_states, make_engine, prompt_of, started, tokens_of, what_is_read
from tiny import SHAPES

from nanochat import engine as engines
from nanochat.engine import SamplingParams
from nanochat.serve.scheduler import Chunk, DeviceThread, Overloaded, Request, Scheduler

running = pytest.fixture(started)


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_is_what_the_engine_generates(shape: str, running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "CACHE_STEP", 16)
    engine = make_engine(shape)
    scheduler = running(engine)
    prompts = [prompt_of(length, length) for length in (1, 2, 17, 33, 50, 9, 70)]
    streams = [scheduler.submit(Request(prompt, 10, GREEDY)) for prompt in prompts]
    for prompt, stream in zip(prompts, streams, strict=True):
        assert tokens_of(stream) == engine.generate([prompt], max_tokens=10, sampling=GREEDY)[0][0]


def random_requests(count: int, seed: int) -> list[Request]:
    """Prompts that share beginnings, and every setting."""
    draw = random.Random(seed)
    begins = [prompt_of(40, one) for one in range(3)]
    requests = []
    for number in range(count):
        prompt = draw.choice(begins)[: draw.randint(1, 40)] + prompt_of(draw.randint(0, 20), 100 + number)
        room = min(draw.randint(1, 20), CONTEXT - len(prompt))
        settings: dict[str, Any] = {}
        if draw.random() < 0.6:
            settings = {
                "temperature": draw.choice([0.3, 1.0, 1.7]),
                "top_k": draw.choice([0, 0, 1, 5, 400]),
                "top_p": draw.choice([1.0, 0.5, 0.95]),
                "min_p": draw.choice([0.0, 0.0, 0.1]),
                "seed": draw.randint(0, 5),
            }
        settings["repetition_penalty"] = draw.choice([1.0, 1.0, 1.3])
        settings["presence_penalty"] = draw.choice([0.0, 0.0, 0.0, 1.2])
        settings["frequency_penalty"] = draw.choice([0.0, 0.0, 0.0, -0.5, 0.9])
        sampling = SamplingParams(**{"temperature": 0.0, **settings})
        biased = draw.sample(range(260), draw.choice([0, 0, 0, 2, 30]))
        logit_bias = {token: draw.choice([-100.0, 3.0, 8.0]) for token in biased}
        stop_ids = frozenset(draw.sample(range(260), draw.choice([0, 0, 20])))
        requests.append(Request(prompt, room, sampling, logit_bias=logit_bias, stop_ids=stop_ids))
    return requests


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [16, pytest.param(300, marks=pytest.mark.soak)])
def test_batched_is_alone_whoever_joins_and_leaves(
    shape: str, count: int, running: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engines, "CACHE_STEP", 16)
    engine, draw = make_engine(shape), random.Random(count)
    requests = random_requests(count, list(SHAPES).index(shape))
    alone = []
    for request in requests:  # each in a scheduler that has never seen another
        scheduler = Scheduler(engine, slots=8, prefill_chunk=32)
        scheduler.start()
        alone.append(tokens_of(scheduler.submit(request)))
        scheduler.close()
    together = running(engine, slots=8, prefill_chunk=32, queue=count)
    streams, cancelled = [], set()
    for number, request in enumerate(requests):
        streams.append(together.submit(request))
        if draw.random() < 0.3:
            time.sleep(draw.random() * 0.02)
        if draw.random() < 0.2:
            victim = draw.randrange(number + 1)
            streams[victim].cancel()
            cancelled.add(victim)
    for number, (stream, expected) in enumerate(zip(streams, alone, strict=True)):
        tokens = tokens_of(stream)
        assert tokens == (expected[: len(tokens)] if number in cancelled else expected), f"request {number}"
    assert in_all_states(together) == (0, 0)


def test_prompts_that_wait_are_read_together(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One forward pass reads several prompts, and each reply equals the one to its prompt alone."""
    engine = make_engine()
    scheduler = running(engine, slots=12, queue=12, prefill_chunk=64)
    read = what_is_read(scheduler, monkeypatch)
    lengths = [9, 17, 3, 1, 12, 12, 60, 30, 2]
    prompts = [prompt_of(length, 1 + number) for number, length in enumerate(lengths)]
    alone = [engine.generate([prompt], max_tokens=20, sampling=GREEDY)[0][0] for prompt in prompts]
    requests = [Request(prompt, 20, GREEDY) for prompt in prompts]
    with scheduler.changed:  # the device's thread waits until all are there
        streams = [scheduler.submit(request) for request in requests[:5]]
        choices = scheduler.submit_all([requests[5]] * 3)
        echo = scheduler.submit(replace(requests[0], logprobs=0, echo=9))
        streams += [scheduler.submit(request) for request in requests[5:]]
    assert [tokens_of(stream) for stream in streams] == alone
    assert [tokens_of(stream) for stream in choices] == [alone[5]] * 3
    assert tokens_of(echo) == alone[0]
    assert read[0] == [8, 16, 2]  # 48 of at most 64 tokens, padded; the next prompt has nothing to read
    # Only one of a request's choices reads the prompt, and `Slots.score` reads an echoed prompt.
    assert sum(map(sum, read)) == sum(length - 1 for length in [*lengths, lengths[5]])


def test_models_on_one_device_take_turns_and_close_together(running: Any) -> None:
    """Each replies as it does alone, and neither waits for the end of the other's replies."""
    engines = [make_engine(), make_engine("qwen3")]
    thread = DeviceThread()
    schedulers = [Scheduler(engine, slots=2, prefill_chunk=16, device_thread=thread) for engine in engines]
    thread.thread.start()
    prompt = prompt_of(10)
    order: list[int] = []

    def taken(number: int, choice: int, chunk: Chunk) -> None:
        order.extend([number] * len(chunk.token_ids))

    streams = [one.submit(Request(prompt, 30, GREEDY)) for one in schedulers]
    for engine, stream in zip(engines, streams, strict=True):
        assert tokens_of(stream) == engine.generate([prompt], max_tokens=30, sampling=GREEDY)[0][0]
    with thread.changed:  # both begin at once
        for number, scheduler in enumerate(schedulers):
            request = Request(prompt, 30, SamplingParams(temperature=0), logit_bias={97: 100.0})
            scheduler.submit_all([request], functools.partial(taken, number))
    until(lambda: not any(one.requests for one in schedulers))
    assert sorted(order) == [0] * 30 + [1] * 30 and order == [0, 1] * 30
    last = schedulers[1].submit(Request(prompt, 60, GREEDY, logit_bias={97: 100.0}))
    begin = next(iter(last))  # it has a slot: the grace is for it, too
    schedulers[0].close(grace=20)
    assert len(begin.token_ids) + len(tokens_of(last)) == 60 and not schedulers[1].thread.is_alive()
    with pytest.raises(Overloaded):
        schedulers[1].submit(Request(prompt, 1))
