"""Decoding: tokens as on the CPU, launched one by one and from a recording, and how long a token takes."""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch

from nanochat import device as devices
from nanochat import scaling
from nanochat.device import Device
from nanochat.engine import Engine, SamplingParams
from nanochat.gpt import GPT
from nanochat.ground.cli import UserError
from nanochat.kernels import decoding
from on_device.recording import add_noise
from on_device.sizes import Sizes, init
from scripts.bench import random_tokenizer

NEW_TOKENS = 32
PROMPT_LENGTHS = (5, 9, 17, 33)
TOTAL = NEW_TOKENS * len(PROMPT_LENGTHS)
# At this temperature one token in ten or so is not the likeliest. A higher one would draw another token at every
# difference in rounding.
SAMPLINGS = {"greedy": SamplingParams(temperature=0.0), "sampled": SamplingParams(temperature=0.3, top_k=50, seed=1)}
# In bf16 two tokens that are about equally likely may change places, and then the rest of a row differs. A wrong kernel
# leaves next to none of them.
AGREEING_SHARES = {"float32": 1.0, "bfloat16": 0.125}
HEAD_GAIN = 6  # on the head's weights: a new model's tokens would all be about equally likely
MIB = 1 << 20


class Captures:
    """Makes recordings, and notes how long each takes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.seconds: list[float] = []
        self.failures: list[str] = []
        self.capture = decoding.capture
        monkeypatch.setattr(decoding, "capture", self)

    def __call__(self, *inputs: Any) -> Any:
        began = time.perf_counter()
        try:
            result = self.capture(*inputs)
        except Exception as error:
            self.failures.append(f"{type(error).__name__}: {error}")
            raise
        self.seconds.append(time.perf_counter() - began)
        return result


def decoder(device: Device, depth: int, graphs: Literal["auto", "on", "off"]) -> Engine:
    """An engine whose replies end only at their maximum length, with the same weights on every device."""
    tokenizer = random_tokenizer(1024)
    model = GPT(scaling.model_config(depth, tokenizer.vocab_size, 256), device.kernels)
    model.init_weights(0)
    add_noise(model, 1)
    with torch.no_grad():
        for _, weight in model.parameter_groups()["head"]:
            weight.mul_(HEAD_GAIN)
    engine = Engine(model.to(device.torch_device), tokenizer, device, graphs)
    engine.stop_ids = set()
    engine.call_start = engine.call_end = -1
    return engine


def timed_tokens(
    engine: Engine, sampling: SamplingParams, lengths: Sequence[int] = PROMPT_LENGTHS
) -> tuple[list[list[int]], list[float]]:
    """The new tokens of each prompt, and the seconds of each step; the first step reads the prompts."""
    prompts = [list(range(300, 300 + length)) for length in lengths]
    tokens: list[list[int]] = [[] for _ in prompts]
    seconds = []
    began = time.perf_counter()
    for new in engine.stream(prompts, max_tokens=NEW_TOKENS, sampling=sampling):
        tokens[new.row.number].append(new.id)
        if sum(map(len, tokens)) % len(prompts) == 0:  # all rows advance together
            now = time.perf_counter()
            seconds.append(now - began)
            began = now
    return tokens, seconds


@functools.cache
def expected_tokens(depth: int, how: str) -> list[list[int]]:
    """The CPU's, in fp32: many servers' CPUs emulate bf16, which takes minutes."""
    return timed_tokens(decoder(devices.init("cpu", "float32"), depth, "off"), SAMPLINGS[how])[0]


def leading(tokens: Sequence[int], expected: Sequence[int]) -> int:
    """How many tokens agree before the first one that does not."""
    for place, (one, other) in enumerate(zip(tokens, expected, strict=True)):
        if one != other:
            return place
    return len(tokens)


def recording_engine(kind: str, dtype: str, depth: int, graphs: Literal["on", "off"]) -> Engine:
    """The device's engine; the test is skipped where it cannot record although it must."""
    try:
        devices.runtime_of(kind).records(graphs)
    except UserError as error:  # a CPU records nothing, and some runtimes cannot under an exported variable
        pytest.skip(str(error))
    engine = decoder(init(kind, dtype), depth, graphs)
    if graphs == "on" and not engine.decoders.records:
        pytest.skip("launches are not recorded here")
    return engine


@pytest.mark.parametrize("graphs", ["off", "on"], ids=["eager", "recorded"])
@pytest.mark.parametrize("dtype", AGREEING_SHARES)
def test_tokens(
    kind: str, sizes: Sizes, measured: Callable[..., None], dtype: str, graphs: Literal["on", "off"],
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    """Greedy and sampled tokens are those of the CPU, by single launches and from a recording."""
    captures = Captures(monkeypatch)
    engine = recording_engine(kind, dtype, sizes.depth, graphs)
    steps: list[float] = []
    agreeing = {}
    for how, sampling in SAMPLINGS.items():
        tokens, seconds = timed_tokens(engine, sampling)
        agreeing[how] = sum(map(leading, tokens, expected_tokens(sizes.depth, how)))
        steps += seconds[NEW_TOKENS // 2 :]  # the recording is over
    measured(token_ms=statistics.median(steps) * 1e3, **agreeing)
    if graphs == "on":
        measured(recordings=len(captures.seconds), recording_seconds=sum(captures.seconds))
        assert captures.seconds and not captures.failures, captures.failures
    assert min(agreeing.values()) >= AGREEING_SHARES[dtype] * TOTAL


@pytest.mark.parametrize("rows", [4, 64, 256])
def test_recordings(kind: str, sizes: Sizes, measured: Callable[..., None], rows: int, monkeypatch: pytest.MonkeyPatch):
    """A step of this many rows is recorded and replayed: how long both take."""
    captures = Captures(monkeypatch)
    engine = recording_engine(kind, "auto", sizes.depth, "on")
    _, seconds = timed_tokens(engine, SAMPLINGS["sampled"], [5] * rows)
    measured(recordings=len(captures.seconds), recording_seconds=sum(captures.seconds))
    measured(step_ms=statistics.median(seconds[NEW_TOKENS // 2 :]) * 1e3)
    assert captures.seconds and not captures.failures, captures.failures


def test_memory(kind: str, sizes: Sizes, measured: Callable[..., None]):
    """Decoding again takes no more memory: from the second of five times on, it stays as it is."""
    if kind == "cpu":
        pytest.skip("a CPU records nothing")
    engine = decoder(init(kind, "auto"), sizes.depth, "auto")
    held = []
    for _ in range(5):
        timed_tokens(engine, SAMPLINGS["sampled"])
        held.append(engine.device.module.memory_allocated())
    measured(grown_mib=(held[-1] - held[1]) / MIB)
    assert held[-1] - held[1] <= MIB
