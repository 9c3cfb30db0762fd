"""Continuous batching: batched as alone, nothing leaks, text as people may see it."""

import functools
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from test_serve import until
from tiny import SHAPES, tiny_tokenizer

from nanochat import engine as engines
from nanochat.engine import Engine, NewToken, SamplingParams
from nanochat.serve import scheduler as schedulers
from nanochat.serve.scheduler import Chunk, DeviceThread, Overloaded, Request, Scheduler, Stream, TextOut, TokenLogprob

CONTEXT = 80
make_engine = functools.partial(tiny.make_engine, sequence_len=CONTEXT)
GREEDY = SamplingParams(temperature=0)


@pytest.fixture
def running() -> Iterator[Any]:
    """Makes schedulers that run, and closes them."""
    made: list[Scheduler] = []

    def make(engine: Engine | None = None, **settings: Any) -> Scheduler:
        scheduler = Scheduler(engine or make_engine(), **{"slots": 4, "prefill_chunk": 16, **settings})
        made.append(scheduler)
        scheduler.start()
        return scheduler

    yield make
    for scheduler in made:
        scheduler.close(grace=0)


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def tokens_of(stream: Stream) -> list[int]:
    return [token for chunk in stream for token in chunk.token_ids]


def metric(scheduler: Scheduler, name: str, **labels: str) -> float:
    return scheduler.metrics.registry.get_sample_value(f"nanochat_{name}", labels) or 0


def in_all_states(scheduler: Scheduler) -> tuple[float, float]:
    return metric(scheduler, "requests_running"), metric(scheduler, "requests_queued")


def finished(scheduler: Scheduler) -> dict[str, float]:
    """Requests by how they ended."""
    samples = [sample for family in scheduler.metrics.finished.collect() for sample in family.samples]
    return {sample.labels["reason"]: sample.value for sample in samples if sample.name.endswith("_total")}


# ---------------------------------------------------------------------- batched as alone


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


@pytest.mark.parametrize(("shape", "seed"), [("fast", 5), ("fast", 6), *((shape, n) for n, shape in enumerate(SHAPES))])
def test_batched_is_alone_whoever_joins_and_leaves(
    shape: str, seed: int, running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "CACHE_STEP", 16)
    engine, draw = make_engine(shape), random.Random(seed)
    requests = random_requests(30, seed)
    alone = []
    for request in requests:  # each in a scheduler that has never seen another
        scheduler = Scheduler(engine, slots=8, prefill_chunk=32)
        scheduler.start()
        alone.append(tokens_of(scheduler.submit(request)))
        scheduler.close()
    together = running(engine, slots=8, prefill_chunk=32)
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


def what_is_read(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The lengths of the pieces of prompts that each pass reads from now on."""
    read: list[list[int]] = []
    prefill = scheduler.slots.prefill

    def recorded(slot: int, pieces: list[tuple[int, ...]], filled: int) -> int:
        read.append([len(piece) for piece in pieces])
        return prefill(slot, pieces, filled)

    monkeypatch.setattr(scheduler.slots, "prefill", recorded)
    return read


def test_a_prompt_is_read_once_for_the_choices_of_a_request_and_again_for_another_request(
    running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the time to the first token would tell one client what another one wrote (S14)."""
    engine = make_engine()
    scheduler = running(engine)
    read = what_is_read(scheduler, monkeypatch)
    requests = [Request(prompt_of(50), 20, SamplingParams(seed=seed)) for seed in range(4)]
    choices = [tokens_of(stream) for stream in scheduler.submit_all(requests)]
    assert sum(map(sum, read)) == 49
    assert len({tuple(tokens) for tokens in choices}) == 4
    assert tokens_of(scheduler.submit(requests[2])) == choices[2]
    assert sum(map(sum, read)) == 2 * 49


def test_a_client_learns_nothing_of_what_another_one_wrote(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """S14: after a prompt equal to the one before, and after another one as long, all counts and all work are equal."""
    engine = make_engine()
    secret, other = prompt_of(50, 1), prompt_of(50, 2)
    seen = []
    for written in (secret, other):
        scheduler = running(engine, slots=4)
        work: list[tuple[str, Any]] = []
        slots = scheduler.slots
        prefill, copy, decode = slots.prefill, slots.copy, slots.decode
        monkeypatch.setattr(slots, "prefill", lambda s, p, f, run=prefill, to=work: to.append((s, f)) or run(s, p, f))
        monkeypatch.setattr(slots, "copy", lambda *a, run=copy, to=work: to.append(("copy", a)) or run(*a))
        monkeypatch.setattr(slots, "decode", lambda run=decode, to=work, **a: to.append(("decode", a)) or run(**a))
        first = scheduler.submit(Request(written, 4, GREEDY))  # as one request ends, and while another one runs
        tokens_of(first)
        running_on = scheduler.submit(Request(written, 30, GREEDY))
        until(lambda stream=running_on: stream.completion_tokens > 0)
        began = len(work)
        guess = scheduler.submit(Request(secret, 4, GREEDY))
        tokens = tokens_of(guess)
        of_the_guess = [entry for entry in work[began:] if entry[0] != "decode"]
        tokens_of(running_on)
        samples = {}
        for family in scheduler.metrics.registry.collect():
            for sample in family.samples:
                if not sample.name.endswith(("_bucket", "_sum", "_created")):  # times
                    samples[(sample.name, *sorted(sample.labels.values()))] = sample.value
        seen.append((tokens, of_the_guess, samples))
    assert seen[0] == seen[1]
    assert seen[0][1] and "copy" not in {name for name, _ in seen[0][1]}


def test_a_bias_forbids_or_forces_a_token(running: Any) -> None:
    scheduler = running(slots=2)
    prompt = prompt_of(9)
    forced = tokens_of(scheduler.submit(Request(prompt, 6, GREEDY, logit_bias={70: 100.0})))
    assert forced == [70] * 6
    free = tokens_of(scheduler.submit(Request(prompt, 12, GREEDY)))
    without = tokens_of(scheduler.submit(Request(prompt, 12, GREEDY, logit_bias={free[0]: -100.0})))
    assert free[0] not in without


def test_penalties_count_the_replys_tokens_and_not_the_prompts(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens are above all others, and the likelier one, with which the prompt ends, by 1."""
    engine = make_engine()
    pinned = torch.zeros(engine.model.config.vocab_size)
    pinned[70], pinned[71] = 10.0, 9.0
    monkeypatch.setattr(engine.model, "logits", lambda hidden: pinned.expand(len(hidden), -1))
    scheduler = running(engine, slots=2)
    for settings, expected in (
        ({}, [70] * 6),
        ({"frequency_penalty": 0.8}, [70, 70, 71, 70, 71, 70]),  # 9.2 and 9, then 8.4 and 9, 8.4 and 8.2, 7.6 and 8.2
        ({"presence_penalty": 1.2}, [70, 71, 70, 70, 70, 70]),  # 8.8 and 9, then 8.8 and 7.8
    ):
        sampling = SamplingParams(temperature=0, **settings)
        assert tokens_of(scheduler.submit(Request((*prompt_of(5), 70), 6, sampling))) == expected


def echo_of(stream: Stream) -> tuple[str, list[TokenLogprob]]:
    chunks = list(stream)
    return "".join(chunk.text for chunk in chunks), [one for chunk in chunks for one in chunk.logprobs]


@torch.no_grad()
def test_an_echo_has_the_models_logprobs_of_the_prompt(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in pieces, alone, next to running rows, and copied for a second choice: the same numbers."""
    monkeypatch.setattr(schedulers, "SCORED_AT_ONCE", 5)
    engine = make_engine()
    scheduler = running(engine)
    prompt = prompt_of(50)
    request = Request(prompt, 0, GREEDY, logprobs=2, echo=47)
    sizes = {len(chunk.logprobs) for chunk in scheduler.submit(request)}
    assert max(sizes) == 1, "the event loop writes a few chunks at a time"
    text, alone = echo_of(scheduler.submit(request))
    assert text == b"".join(engine.tokenizer.tokens[token] for token in prompt[3:]).decode(errors="replace")
    assert [one.token_id for one in alone] == list(prompt[3:]) and alone[0] == TokenLogprob(prompt[3], None)
    exact = engine.model(torch.tensor([prompt]))[0].log_softmax(dim=-1)
    for place, one in enumerate(alone[1:], 4):
        assert one.logprob == pytest.approx(float(exact[place - 1, prompt[place]]), abs=1e-4)
        assert one.alternatives[0][1] == pytest.approx(float(exact[place - 1].max()), abs=1e-4)
        assert one.alternatives[0][0] == int(exact[place - 1].argmax())

    neighbour = scheduler.submit(Request(prompt_of(9), 70, SamplingParams(seed=1)))
    until(lambda: neighbour.completion_tokens > 0)
    streams = scheduler.submit_all([replace(request, max_tokens=3)] * 2)
    for stream, cached in zip(streams, (0, 49), strict=True):
        _, entries = echo_of(stream)
        assert entries[:47] == alone and len(entries) == 50 and stream.cached_tokens == cached
    neighbour.cancel()


def test_an_echo_lists_the_token_that_ends_the_reply(running: Any) -> None:
    """lm-eval measures a text with max_tokens 1 and drops the last entry: there must be one."""
    engine = make_engine()
    request = Request(prompt_of(9), 1, GREEDY, logprobs=0, echo=9)
    _, entries = echo_of(running(engine).submit(request))
    engine.stop_ids = {entries[-1].token_id}
    _, stopped = echo_of(running(engine).submit(request))
    assert stopped == entries and len(entries) == 10


def test_logprobs_are_those_of_the_text_that_a_stop_string_leaves(running: Any) -> None:
    engine = make_engine()
    tokens = engine.tokenizer.tokens
    words = {size: [token for token in range(len(tokens)) if len(tokens[token]) == size] for size in (1, 3)}
    bias = {token: 12.0 for token in words[3]} | {token: 6.0 for token in words[1][97:122]}
    free = Request(prompt_of(9), 20, SamplingParams(seed=3), logprobs=0, logit_bias=bias)
    scheduler = running(engine)
    text, entries = echo_of(scheduler.submit(free))
    assert "".join(engine.tokenizer.decode([one.token_id]) for one in entries) == text
    for begin in range(len(text) - 6):
        stop = text[begin : begin + 5]
        shown, kept = echo_of(scheduler.submit(replace(free, stop=(stop, "th\0"))))
        assert shown == text[: text.index(stop)]
        whole = "".join(engine.tokenizer.decode([one.token_id]) for one in kept)
        last = engine.tokenizer.decode([kept[-1].token_id]) if kept else ""
        assert whole.startswith(shown) and len(whole) - len(shown) < max(1, len(last)), stop


# ---------------------------------------------------------------------- who leaves, and too many


def test_cancelled_at_any_point_no_slot_is_lost(running: Any) -> None:
    scheduler, draw = running(queue=600), random.Random(0)
    streams = []
    for number in range(500):
        prompt = prompt_of(draw.randint(1, 60), number % 7)
        streams.append(scheduler.submit(Request(prompt, draw.randint(1, 20), SamplingParams(seed=number))))
        if draw.random() < 0.3:
            time.sleep(0.002 * draw.random())
        streams[draw.randrange(max(0, number - 6), number + 1)].cancel()
    for stream in streams:
        stream.cancel()
    reasons = [list(stream)[-1].finish_reason for stream in streams]
    assert set(reasons) <= {"cancelled", "length"} and reasons.count("cancelled") > 100
    assert in_all_states(scheduler) == (0, 0)
    assert sum(finished(scheduler).values()) == 500
    assert not (scheduler.slots.rows or scheduler.requests)
    after = [scheduler.submit(Request(prompt_of(5), 4, GREEDY)) for _ in range(4)]
    assert len({tuple(tokens_of(stream)) for stream in after}) == 1


def test_a_slot_is_free_before_the_next_token(running: Any) -> None:
    scheduler = running(slots=1)
    first = scheduler.submit(Request(prompt_of(4), 70))
    until(lambda: first.completion_tokens > 0)
    first.cancel()
    made = first.completion_tokens
    chunks = list(first)
    assert chunks[-1].finish_reason == "cancelled"
    assert first.completion_tokens <= made + 1


def test_too_many_are_told_when_to_come_again(running: Any) -> None:
    scheduler = running(slots=2, queue=3)
    streams = [scheduler.submit(Request(prompt_of(5), 75)) for _ in range(5)]
    with pytest.raises(Overloaded) as refused:
        scheduler.submit(Request(prompt_of(5), 75))
    assert refused.value.retry_after >= 1
    assert sum(in_all_states(scheduler)) == 5 and metric(scheduler, "slots") == 2
    for stream in streams:
        stream.cancel()
        list(stream)
    assert len(tokens_of(scheduler.submit(Request(prompt_of(5), 3)))) == 3


def test_several_are_taken_together_or_not_at_all(running: Any) -> None:
    scheduler = running(slots=2, queue=2)
    request = Request(prompt_of(5), 5)
    with pytest.raises(Overloaded):
        scheduler.submit_all([request] * 5)
    assert not scheduler.requests and scheduler.capacity == 4
    streams = scheduler.submit_all([request] * 4)
    assert [list(stream)[-1].finish_reason for stream in streams] == ["length"] * 4
    assert finished(scheduler) == {"length": 4}


def test_requests_take_turns(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The many choices of one client do not keep out who comes after it."""
    scheduler = running(slots=2, queue=8)
    begun: list[str] = []
    take_slot = scheduler._take_slot

    def recorded(row: Any) -> bool:
        taken = take_slot(row)
        begun.extend([f"{row.request.stop[0][0]}{row.request.sampling.seed}"] if taken else [])
        return taken

    def submit(name: str, count: int) -> list[Stream]:
        settings = [SamplingParams(seed=number) for number in range(count)]
        return scheduler.submit_all([Request(prompt_of(5), 20, one, stop=(name * 9,)) for one in settings])

    monkeypatch.setattr(scheduler, "_take_slot", recorded)
    with scheduler.changed:  # the device's thread waits until all are there
        streams = [*submit("a", 4), *submit("b", 3), *submit("c", 1)]
    assert {list(stream)[-1].finish_reason for stream in streams} == {"length"}
    assert begun == ["a0", "b0", "c0", "a1", "b1", "a2", "b2", "a3"]


def test_one_that_waits_and_is_cancelled_makes_room_at_once(running: Any) -> None:
    scheduler = running(slots=1, queue=1)
    first, second = (scheduler.submit(Request(prompt_of(5), 75)) for _ in range(2))
    second.cancel()
    assert [chunk.finish_reason for chunk in second] == ["cancelled"]
    third = scheduler.submit(Request(prompt_of(5), 2))
    first.cancel()
    assert len(tokens_of(third)) == 2


@pytest.mark.parametrize("grace", [20, 0])
def test_closing_lets_the_running_finish_and_gives_every_stream_an_end(running: Any, grace: int) -> None:
    scheduler = running(slots=2)
    streams = [scheduler.submit(Request(prompt_of(5), 30 if grace else 75)) for _ in range(6)]
    until(lambda: metric(scheduler, "requests_running") == 2)
    scheduler.close(grace=grace)
    reasons = [list(stream)[-1].finish_reason for stream in streams]
    if grace:
        assert reasons.count("length") >= 2 and reasons.count("cancelled") >= 3
    else:
        assert reasons == ["cancelled"] * 6
    assert not scheduler.thread.is_alive()
    with pytest.raises(Overloaded):
        scheduler.submit(Request(prompt_of(5), 1))


def test_models_on_one_device_take_turns_and_close_together(running: Any) -> None:
    """Each replies as it does alone, and neither waits for the end of the other's replies."""
    engines = [make_engine(), make_engine("qwen3")]
    thread = DeviceThread()
    schedulers = [Scheduler(engine, slots=2, prefill_chunk=16, device_thread=thread) for engine in engines]
    thread.start()
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


def test_a_failure_ends_the_running_and_the_next_are_served(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    scheduler = running(engine, slots=2)
    decode, failures = scheduler.slots.decode, iter([False, False, True])

    def failing(**arguments: Any) -> Any:
        if next(failures, False):
            raise MemoryError("secret words of a prompt")
        return decode(**arguments)

    monkeypatch.setattr(scheduler.slots, "decode", failing)
    last = list(scheduler.submit(Request(prompt_of(5), 20)))[-1]
    assert last.finish_reason == "error" and "MemoryError" in last.error and "secret" not in last.error
    tokens = tokens_of(scheduler.submit(Request(prompt_of(5), 20, GREEDY)))
    assert tokens == engine.generate([prompt_of(5)], max_tokens=20, sampling=GREEDY)[0][0]


def test_a_device_that_is_gone_leaves_nobody_waiting(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = running(slots=1)

    def gone(**_: Any) -> None:
        raise RuntimeError("no device")

    monkeypatch.setattr(scheduler.slots, "decode", gone)
    monkeypatch.setattr(scheduler.slots, "reset", gone)
    streams = scheduler.submit_all([Request(prompt_of(5), 5)] * 3)
    assert [list(stream)[-1].finish_reason for stream in streams] == ["error"] * 3
    with pytest.raises(Overloaded):
        scheduler.submit(Request(prompt_of(5), 5))


# ---------------------------------------------------------------------- long prompts


def test_a_long_prompt_is_read_in_pieces_between_the_tokens_of_others(
    running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(sequence_len=512)
    scheduler = running(engine, prefill_chunk=64)
    events: list[str] = []
    slots = scheduler.slots
    prefill, decode, admit = slots.prefill, slots.decode, slots.admit
    monkeypatch.setattr(slots, "prefill", lambda s, t, h: events.append(f"{len(t[0])}") or prefill(s, t, h))
    monkeypatch.setattr(slots, "admit", lambda *a: events.append("admit") or admit(*a))
    monkeypatch.setattr(slots, "decode", lambda **a: events.append("decode") or decode(**a))
    runner = scheduler.submit(Request(prompt_of(3), 400))
    until(lambda: runner.completion_tokens > 5)
    long = scheduler.submit(Request(prompt_of(300), 3, GREEDY))
    tokens = tokens_of(long)
    runner.cancel()
    assert tokens == engine.generate([prompt_of(300)], max_tokens=3, sampling=GREEDY)[0][0]
    pieces = [place for place, event in enumerate(events) if event.isdigit()][1:]  # the first is the runner's own
    assert sum(int(events[place]) for place in pieces) == 299
    for place in pieces:
        assert int(events[place]) <= 64
        assert events[place + 1] == "decode", "two pieces without a token for the others between them"
    joined = len(events) - 1 - events[::-1].index("admit")
    assert events[joined - 1] == events[joined + 1] == "decode", "it joins in a turn that reads nothing"


class Clock:
    """Counts steps. Only the model's work moves it: no busy machine can disturb it. A step of decoding takes one."""

    def __init__(self, running: Any, patch: pytest.MonkeyPatch, read_steps: Callable[[int], float], **settings: Any):
        """`read_steps`: the steps that it takes to read so many tokens."""
        self.now = 0.0
        self.ends: list[float] = []  # of the steps of decoding
        self.read: list[tuple[int, float]] = []  # prompts, steps
        self.disturbed: int | None = None  # this reading takes 20 steps more
        patch.setattr(schedulers, "time", SimpleNamespace(perf_counter=lambda: self.now, monotonic=time.monotonic))
        self.scheduler = running(make_engine(sequence_len=512), prefill_chunk=256, **settings)
        slots = self.scheduler.slots
        prefill, decode = slots.prefill, slots.decode

        def timed(slot: int, pieces: list[tuple[int, ...]], filled: int) -> int:
            computed = prefill(slot, pieces, filled)
            took = read_steps(computed)
            self.now += took + (20 if len(self.read) == self.disturbed else 0)
            self.read.append((len(pieces), took))
            return computed

        def step(**arguments: Any) -> list[NewToken]:
            self.now += 1
            self.ends.append(self.now)
            return decode(**arguments)

        patch.setattr(slots, "prefill", timed)
        patch.setattr(slots, "decode", step)
        self.runner = self.scheduler.submit(Request(prompt_of(3), 500))
        until(lambda: self.runner.completion_tokens > 5)


@pytest.mark.parametrize("tokens_a_step", [20, 50, 400])
def test_a_long_prompt_keeps_the_others_waiting_for_two_steps_at_most(
    tokens_a_step: int, running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(running, monkeypatch, lambda tokens: tokens / tokens_a_step)
    assert len(tokens_of(clock.scheduler.submit(Request(prompt_of(400), 3, GREEDY)))) == 3
    clock.runner.cancel()
    stalls = [after - before for before, after in itertools.pairwise(clock.ends)]
    assert 1.5 < max(stalls) <= 2  # it uses what it may


# ---------------------------------------------------------------------- prompts that are read together


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


@pytest.mark.parametrize("disturbed", [None, 1, 2])
def test_how_many_are_read_while_others_wait_is_learned(
    disturbed: int | None, running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass over one prompt takes a step, and each further token a hundredth of one. A single disturbed pass is
    forgotten after a while."""
    clock = Clock(running, monkeypatch, lambda tokens: 1 + (tokens - 16) / 100, slots=24, queue=24)
    clock.disturbed = disturbed
    scheduler = clock.scheduler
    tokens_of(scheduler.submit(Request(prompt_of(10), 1)))  # one alone: the shortest piece
    for _ in range(4):
        with scheduler.changed:
            streams = [scheduler.submit(Request(prompt_of(10, number), 5)) for number in range(20)]
        for stream in streams:
            tokens_of(stream)
    clock.runner.cancel()
    counts = [count for count, _ in clock.read]
    if disturbed is None:
        assert max(took for _, took in clock.read) <= 1.5  # half as long again as one prompt
        assert counts[:8] == [1, 1, 2, 4, 4, 4, 4, 2]  # two to learn, then 64 tokens at once
    assert max(took for _, took in clock.read) <= 2  # at most twice as many tokens as the time before
    assert 4 <= max(counts[-6:]) <= 5, counts


# ---------------------------------------------------------------------- the text


def scripted(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, tokens: list[int]) -> None:
    """Have the model choose these tokens, whatever its logits say, and ramble on behind them."""
    script = iter(tokens)
    monkeypatch.setattr(engines, "sample", lambda logits, *_: torch.full((len(logits),), next(script, 120)))


def parts_of(chunks: list[Chunk]) -> list[tuple[str, str]]:
    parts: list[tuple[str, str]] = []
    for chunk in chunks:
        if parts and parts[-1][0] == chunk.kind:
            parts[-1] = (chunk.kind, parts[-1][1] + chunk.text)
        elif chunk.text:
            parts.append((chunk.kind, chunk.text))
    return parts


def test_a_call_is_answered_inside_the_stream(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(stops=True)
    tokenizer = engine.tokenizer
    start, end, stop = (tokenizer.encode_special(f"<|{m}|>") for m in ("python_start", "python_end", "assistant_end"))
    scheduler = running(engine)
    script = [*b"It is ", start, *tokenizer.encode("6*7"), end, 1, 1, 1, 1, *b" ok", stop]
    scripted(scheduler, monkeypatch, script)
    stream = scheduler.submit(Request(prompt_of(4), 50))
    chunks = list(stream)
    assert parts_of(chunks) == [("text", "It is "), ("python", "6*7"), ("python_output", "42"), ("text", " ok")]
    assert [c.token_ids for c in chunks if c.kind == "python_output"] == [
        (token,) for token in tokenizer.encode("42", prepend=engine.answer_start, append=engine.answer_end)
    ]
    assert chunks[-1].finish_reason == "stop"
    assert stream.completion_tokens == len(script) - 1
    # Without its end mark the call is closed where the model ends its turn; where the reply is cut off, it is text.
    scripted(scheduler, monkeypatch, [*script[:10], stop, *script[11:]])
    chunks = list(scheduler.submit(Request(prompt_of(4), 50, logprobs=0)))
    assert parts_of(chunks) == [("text", "It is "), ("python", "6*7"), ("python_output", "42"), ("text", " ok")]
    assert [token for chunk in chunks for token in chunk.token_ids][10] == end and chunks[-1].finish_reason == "stop"
    scripted(scheduler, monkeypatch, script)
    stream = scheduler.submit(Request(prompt_of(4), 9))
    chunks = list(stream)
    assert parts_of(chunks) == [("text", "It is 6*")] and chunks[-1].finish_reason == "length"
    assert stream.completion_tokens == 9
    scripted(scheduler, monkeypatch, script)
    chunks = list(scheduler.submit(Request(prompt_of(4), 13, calls="none")))
    assert all(chunk.kind != "python_output" for chunk in chunks)
    assert parts_of(chunks)[:2] == [("text", "It is "), ("python", "6*7")]


def test_the_tools_answer_is_what_the_model_reads(running: Any) -> None:
    """The tokens that the tool gives stand in the cache in place of those that the model chose."""
    engine = make_engine()
    prompts = [prompt_of(12, seed) for seed in range(8)]
    free = engine.generate([prompts[0]], max_tokens=20, sampling=GREEDY)[0][0]
    engine.call_start, engine.call_end, *_ = dict.fromkeys(free)  # the first prompt's row calls, for one
    alone = [engine.generate([prompt], max_tokens=60, sampling=GREEDY) for prompt in prompts]
    assert 0 in alone[0][1][0][:40], "nobody calls: choose other prompts"
    scheduler = running(engine, slots=8)
    streams = [scheduler.submit(Request(prompt, 60, GREEDY)) for prompt in prompts]
    assert [tokens_of(stream) for stream in streams] == [tokens[0] for tokens, _ in alone]


@pytest.mark.parametrize(
    ("written", "stop", "shown"),
    [
        ("one two three", ("two",), "one "),
        ("one two three", (" th", "two"), "one "),
        ("aaab", ("aab",), "a"),
        ("ababac", ("abac",), "ab"),
        ("stops", ("sto", "top"), ""),
        ("never", ("nevermore",), "never"),
        ("never here", ("nevermore", "her e"), "never here"),
        ("从从", ("从从",), ""),
        ("x从y", ("从",), "x"),
    ],
)
def test_the_text_ends_before_a_stop_string_wherever_tokens_part(
    written: str, stop: tuple[str, ...], shown: str, running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(stops=True)
    end = engine.tokenizer.encode_special("<|assistant_end|>")
    scheduler = running(engine)
    for tokens in (list(written.encode()), engine.tokenizer.encode(written)):
        scripted(scheduler, monkeypatch, [*tokens, end])
        chunks = list(scheduler.submit(Request(prompt_of(4), 50, stop=stop)))
        assert "".join(chunk.text for chunk in chunks) == shown
        assert chunks[-1].finish_reason == "stop"
        assert shown != written or sum(len(chunk.token_ids) for chunk in chunks) == len(tokens)
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_characters_come_whole_and_marks_never() -> None:
    tokenizer = tiny_tokenizer()
    out = TextOut(tokenizer.tokens, ())
    assert [out.cut(out.plain(token)) for token in "é从🙂".encode()] == ["", "é", "", "", "从", "", "", "", "🙂"]
    assert [out.cut(out.plain(token)) for token in tokenizer.special_ids.values()] == [""] * len(tokenizer.special_ids)
    assert out.cut(out.plain("从".encode()[0])) == ""
    assert (out.flush(), out.flush()) == ("\ufffd", "")


def test_what_may_begin_a_stop_string_is_held_until_it_does_not() -> None:
    out = TextOut(tiny_tokenizer().tokens, ("END", "\n\n"))
    assert [out.cut(out.plain(token)) for token in b"aEENx\nb"] == ["a", "", "E", "", "ENx", "", "\nb"]
    assert out.cut(out.plain(b"E"[0])) == ""
    assert (out.flush(), out.stopped) == ("E", False)


# ---------------------------------------------------------------------- logprobs, ends, mistakes


def test_logprobs_are_the_models(running: Any) -> None:
    engine = make_engine()
    scheduler = running(engine)
    prompt = prompt_of(9)
    other = scheduler.submit(Request(prompt_of(5), 20, logprobs=5))
    chunks = list(scheduler.submit(Request(prompt, 6, SamplingParams(temperature=0.7, top_k=4), logprobs=2)))
    tokens = list(prompt)
    for chunk in chunks[:-1]:
        with torch.no_grad():
            expected = engine.model(torch.tensor([tokens]))[0, -1].log_softmax(-1)
        (entry,) = chunk.logprobs
        assert chunk.token_ids == (entry.token_id,)
        assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=1e-4)
        best = expected.topk(2)
        assert [one for one, _ in entry.alternatives] == best.indices.tolist()
        assert [value for _, value in entry.alternatives] == pytest.approx(best.values.tolist(), abs=1e-4)
        tokens.append(entry.token_id)
    assert all(len(entry.alternatives) == 5 for chunk in other for entry in chunk.logprobs)
    assert all(not chunk.logprobs for chunk in scheduler.submit(Request(prompt, 3)))
    (entry,) = next(iter(scheduler.submit(Request(prompt, 3, logprobs=0)))).logprobs
    assert entry.logprob < 0 and entry.alternatives == ()


def test_a_request_ends_at_a_stop_token_or_its_length(running: Any) -> None:
    engine = make_engine()
    prompt = prompt_of(7)
    free = engine.generate([prompt], max_tokens=CONTEXT - 7, sampling=GREEDY)[0][0]
    scheduler = running(engine)
    chunks = list(scheduler.submit(Request(prompt, CONTEXT - 7, GREEDY)))
    assert [token for chunk in chunks for token in chunk.token_ids] == free
    assert chunks[-1].finish_reason == "length"
    named = list(scheduler.submit(Request(prompt, 30, GREEDY, stop_ids=frozenset({free[4], 300}))))
    engine.stop_ids = {free[4]}
    for chunks in (named, list(scheduler.submit(Request(prompt, 30, GREEDY)))):
        assert [token for chunk in chunks for token in chunk.token_ids] == free[: free.index(free[4])]
        assert chunks[-1].finish_reason == "stop"


def test_a_listener_hears_what_the_stream_would_give(running: Any) -> None:
    scheduler = running()
    heard: list[tuple[int, Chunk]] = []
    ended = threading.Event()

    def listen(number: int, chunk: Chunk) -> None:
        heard.append((number, chunk))
        if sum(chunk.finish_reason is not None for _, chunk in heard) == 2:
            ended.set()

    requests = [Request(prompt_of(5, seed), 20, GREEDY) for seed in range(2)]
    scheduler.submit_all(requests, listen)
    assert ended.wait(10)
    for number, request in enumerate(requests):
        own = [token for place, chunk in heard if place == number for token in chunk.token_ids]
        assert own == tokens_of(scheduler.submit(request))


def test_a_listener_that_takes_no_more_is_cancelled(running: Any) -> None:
    scheduler = running()

    def closed(*_: Any) -> None:
        raise RuntimeError("Event loop is closed")

    (stream,) = scheduler.submit_all([Request(prompt_of(5), 70)], closed)
    until(lambda: finished(scheduler))
    assert finished(scheduler) == {"cancelled": 1} and stream.completion_tokens < 70
    assert len(tokens_of(scheduler.submit(Request(prompt_of(5), 3)))) == 3


def test_the_metrics_count(running: Any) -> None:
    scheduler = running()
    for _ in range(3):
        tokens_of(scheduler.submit(Request(prompt_of(12), 6, GREEDY)))
    assert [metric(scheduler, f"tokens_{what}_total") for what in ("prompt", "generated")] == [36, 18]
    assert finished(scheduler) == {"length": 3}
    assert metric(scheduler, "time_to_first_token_seconds_count") == 3
    assert metric(scheduler, "time_per_token_seconds_count") == 15
    assert in_all_states(scheduler) == (0, 0)
