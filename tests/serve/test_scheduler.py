"""Continuous batching: what is read together, text as people may see it, logprobs, ends; S3 to S5 and S14 have more."""

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from fake_server import until
from running_schedulers import (
    GREEDY,
    SCHEDULER_CONTEXT,
    finished,
    in_all_states,
    make_engine,
    metric,
    prompt_of,
    started,
    tokens_of,
)

from nanochat import engine as engines
from nanochat.engine import NewToken, SamplingParams
from nanochat.serve import scheduler as schedulers
from nanochat.serve.scheduler import Chunk, Request, Scheduler, Stream, TextOut, TokenLogprob

running = pytest.fixture(started)


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
    for stream in streams:
        _, entries = echo_of(stream)
        assert entries[:47] == alone and len(entries) == 50
    neighbour.cancel()
    # Tokens that are generated have the model's too, whatever the sampling; a request gets as many as it wants.
    sampled = Request(prompt[:9], 6, SamplingParams(temperature=0.7, top_k=4), logprobs=2)
    other = scheduler.submit(Request(prompt_of(5), 20, logprobs=5))
    tokens = list(prompt[:9])
    for entry in echo_of(scheduler.submit(sampled))[1]:
        exact = engine.model(torch.tensor([tokens]))[0, -1].log_softmax(-1)
        best = exact.topk(2)
        assert entry.logprob == pytest.approx(float(exact[entry.token_id]), abs=1e-4)
        assert [one for one, _ in entry.alternatives] == best.indices.tolist()
        assert [value for _, value in entry.alternatives] == pytest.approx(best.values.tolist(), abs=1e-4)
        tokens.append(entry.token_id)
    assert len(tokens) == 15 and {len(entry.alternatives) for entry in echo_of(other)[1]} == {5}


def test_each_token_comes_with_its_logprob_up_to_a_stop_string(running: Any) -> None:
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
        # The first tokens of the stop string are among them; its last one is only if text comes before it in the token.
        whole = "".join(engine.tokenizer.decode([one.token_id]) for one in kept)
        assert text.startswith(whole) and len(shown) <= len(whole) < len(shown) + len(stop) + 3, stop


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
        """`read_steps`: the steps that it takes to read this many tokens."""
        self.now = 0.0
        self.ends: list[float] = []  # the ends of decoding steps
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


@pytest.mark.parametrize(
    ("read_steps", "longest", "budget"),
    [
        (lambda tokens: tokens / 20, 2.6, 32),  # the fewest tokens take more than a step
        (lambda tokens: tokens / 100, 1.64, 64),
        (lambda tokens: tokens / 400, 1.64, 256),
        (lambda tokens: 1 + (tokens - 16) / 100, 2.16, 32),  # more than the launch of a pass
    ],
)
def test_others_wait_for_two_steps_while_prompts_are_read(
    read_steps: Callable[[int], float], longest: float, budget: int, running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long prompts, and short ones several at a time. A pass that the machine disturbed is soon forgotten."""
    clock = Clock(running, monkeypatch, read_steps, slots=24, queue=24)
    scheduler = clock.scheduler
    clock.disturbed = 2
    for length in (400, 400):
        assert len(tokens_of(scheduler.submit(Request(prompt_of(length), 3, GREEDY)))) == 3
    assert scheduler.budget == budget
    with scheduler.changed:
        streams = [scheduler.submit(Request(prompt_of(10, number), 5)) for number in range(20)]
    for stream in streams:
        tokens_of(stream)
    clock.runner.cancel()
    counts = [count for count, _ in clock.read]
    assert max(counts) == budget // 16  # prompts at once, each padded to 16 tokens
    stalls = [after - before for before, after in itertools.pairwise(clock.ends)]
    # After a longer wait the others get tokens without one, until it was two steps on average.
    assert all(second == pytest.approx(1) for first, second in itertools.pairwise(stalls) if first > 2.01)
    stalls.sort()
    assert stalls[-1] > 20 and stalls[-2] == pytest.approx(longest)


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
    """The tokens that the tool gives are in the cache in place of those that the model chose."""
    engine = make_engine()
    prompts = [prompt_of(12, seed) for seed in range(8)]
    free = engine.generate([prompts[0]], max_tokens=20, sampling=GREEDY)[0][0]
    engine.call_start, engine.call_end, *_ = dict.fromkeys(free)  # the first prompt's row calls, for one
    alone = [engine.generate([prompt], max_tokens=60, sampling=GREEDY) for prompt in prompts]
    assert 0 in alone[0][1][0][:40], "no prompt calls: choose others"
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
    tokenizer = tiny.tiny_tokenizer()
    out = TextOut(tokenizer.tokens, ())
    assert [out.cut(out.plain(token)) for token in "é从🙂".encode()] == ["", "é", "", "", "从", "", "", "", "🙂"]
    assert [out.cut(out.plain(token)) for token in tokenizer.special_ids.values()] == [""] * len(tokenizer.special_ids)
    assert out.cut(out.plain("从".encode()[0])) == ""
    assert (out.flush(), out.flush()) == ("\ufffd", "")


def test_a_request_ends_at_a_stop_token_or_its_length(running: Any) -> None:
    engine = make_engine()
    prompt = prompt_of(7)
    free = engine.generate([prompt], max_tokens=SCHEDULER_CONTEXT - 7, sampling=GREEDY)[0][0]
    scheduler = running(engine)
    chunks = list(scheduler.submit(Request(prompt, SCHEDULER_CONTEXT - 7, GREEDY)))
    assert [token for chunk in chunks for token in chunk.token_ids] == free
    assert chunks[-1].finish_reason == "length"
    named = list(scheduler.submit(Request(prompt, 30, GREEDY, stop_ids=frozenset({free[4], 300}))))
    engine.stop_ids = {free[4]}
    for chunks in (named, list(scheduler.submit(Request(prompt, 30, GREEDY)))):
        assert [token for chunk in chunks for token in chunk.token_ids] == free[: free.index(free[4])]
        assert chunks[-1].finish_reason == "stop"


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
