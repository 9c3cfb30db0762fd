"""Generation: greedy as the model alone, batched as alone, the tool's calls, where a reply ends."""

import copy
import dataclasses
import functools
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from tiny import SHAPES, cpu_device, lively_model, tiny_config, tiny_tokenizer

from nanochat import engine as engines
from nanochat.device import Device
from nanochat.engine import Engine, Row, SamplingParams, Slots
from nanochat.gpt import GPT
from nanochat.ground import host
from nanochat.ground.cli import Interrupted, UserError
from nanochat.kernels import decoding
from nanochat.kernels.cpu import HAS_FP16, CpuKernels, HalfLinear
from nanochat.kernels.decoding import Decoders

CONTEXT = 48
make_engine = functools.partial(tiny.make_engine, sequence_len=CONTEXT)
GREEDY = SamplingParams(temperature=0)
has_fp16 = pytest.mark.skipif(not HAS_FP16, reason="this torch has no products with fp16 weights")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def greedy(model: GPT, prompt: list[int], new: int) -> list[int]:
    """Without a cache, the whole row again for every token."""
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


# ---------------------------------------------------------------------- greedy


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_is_the_model_without_a_cache(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of every kind of length together, in several pieces, with fewer slots than prompts."""
    monkeypatch.setattr(engines, "CACHE_STEP", 16)  # the attended part grows several times
    monkeypatch.setattr(engines, "PREFILL_TOKENS", 64)
    engine = make_engine(shape)
    prompts = [prompt_of(length, seed=length) for length in (9, 1, 30, 12, 12, 40, CONTEXT - 1)]
    expected = [greedy(engine.model, prompt, min(14, CONTEXT - len(prompt))) for prompt in prompts]
    for max_rows in (None, 2, 1):
        found, masks = engine.generate(prompts, max_tokens=14, sampling=GREEDY, max_rows=max_rows)
        assert found == expected
        assert masks == [[1] * len(new) for new in expected]
    assert len(set(expected[0])) > 3


def test_bfloat16_weights_are_a_copy() -> None:
    model = lively_model(tiny_config(vocab_size=tiny_tokenizer().vocab_size))
    engine = Engine(model, tiny_tokenizer(), cpu_device(dtype=torch.bfloat16))
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert all(p.dtype == torch.bfloat16 for p in engine.model.parameters())
    slots = Slots(engine, 1)
    slots.fill([Row(prompt_of(9), 5, GREEDY)])
    (new,) = slots.decode(logprobs=100)
    likely = dict(zip(map(int, new.logprobs[101:]), new.logprobs[1:101], strict=True))
    assert slots.cache.keys.dtype == torch.bfloat16
    exact = model(torch.tensor([prompt_of(9)]))[0, -1].log_softmax(dim=-1)
    assert all(abs(exact[token] - logprob) < 0.3 for token, logprob in likely.items())


@has_fp16
def test_weights_in_fp16_replace_those_of_the_model() -> None:
    """Cached as without a cache, with other weights as an engine that began with them, and no copy in fp32."""
    config = tiny_config(vocab_size=tiny_tokenizer().vocab_size, sequence_len=CONTEXT)
    models = [lively_model(config, seed) for seed in (0, 1, 1)]
    engine, other = (Engine(model, tiny_tokenizer(), cpu_device(), weights="fp16") for model in models[:2])
    assert engine.model is models[0] and not any(isinstance(m, torch.nn.Linear) for m in models[0].modules())
    prompts = [prompt_of(length, seed=length) for length in (9, 1, 30)]
    first = engine.generate(prompts, max_tokens=9, sampling=GREEDY, keep_stop=True)
    for prompt, new in zip(prompts, first[0], strict=True):
        assert new == greedy(engine.model, prompt, len(new))
    engine.update(models[2])
    second = engine.generate(prompts, max_tokens=9, sampling=GREEDY, keep_stop=True)
    assert second == other.generate(prompts, max_tokens=9, sampling=GREEDY, keep_stop=True) != first


@has_fp16
def test_where_matrices_may_be_rounded_they_are_in_fp16() -> None:
    """The model itself stays as it is. A matrix that fp16 cannot hold and a model with experts are not rounded."""
    config = tiny_config(vocab_size=tiny_tokenizer().vocab_size, sequence_len=CONTEXT)
    device = cpu_device(may_round=True)
    model = lively_model(config)
    prompt = torch.tensor([prompt_of(9)])

    def count(engine: Engine) -> int:
        return sum(isinstance(module, HalfLinear) for module in engine.model.modules())

    def relative_error(engine: Engine) -> float:
        expected = model(prompt)
        with torch.inference_mode():
            return float((engine.model(prompt) - expected).abs().amax() / expected.abs().amax())

    engine = Engine(model, tiny_tokenizer(), device)
    matrices = count(engine)
    assert matrices == 4 * config.n_layer + 1 and not model.is_packed
    assert 2e-5 < relative_error(engine) < 2e-3
    assert relative_error(Engine(model, tiny_tokenizer(), cpu_device())) < 2e-5

    with torch.no_grad():
        model.get_parameter("blocks.1.mlp.input.weight")[3, 5] = 7e4
    engine.update(model)
    assert count(engine) == matrices - 1 and relative_error(engine) < 2e-3

    with_experts = lively_model(dataclasses.replace(config, experts=4))
    assert count(Engine(with_experts, tiny_tokenizer(), device)) == 0


# ---------------------------------------------------------------------- sampled: by the seed, the same in any batch


def test_a_seed_decides_the_reply_whatever_runs_next_to_it(engine: Engine) -> None:
    prompts = [prompt_of(length, length) for length in (6, 6, 20, 3, 11, 40)]
    params = [
        SamplingParams(seed=1),
        SamplingParams(seed=2),
        SamplingParams(temperature=0.7, top_k=20, seed=3),
        SamplingParams(temperature=0),
        SamplingParams(top_p=0.9, repetition_penalty=1.3, seed=4),
        SamplingParams(temperature=1.5, min_p=0.05, seed=2**63),
    ]
    torch.manual_seed(1)  # the global generator has no say
    together, _ = engine.generate(prompts, max_tokens=12, sampling=params)
    torch.manual_seed(2)
    assert engine.generate(prompts, max_tokens=12, sampling=params, max_rows=2)[0] == together
    for prompt, one, expected in zip(prompts, params, together, strict=True):
        assert engine.generate([prompt], max_tokens=12, sampling=one)[0] == [expected]


def test_threads_change_no_bit_of_a_reply(engine: Engine) -> None:
    """Each thread computes some of the rows. Few rows of a narrow model take one thread, and the next step has both."""
    prompts = [prompt_of(length, length) for length in (6, 6, 20, 3, 11, 40)]
    params = SamplingParams(seed=1)

    def replies(prompts: list[list[int]]) -> list[list[tuple[Any, ...]]]:
        found: list[list[tuple[Any, ...]]] = [[] for _ in prompts]
        for new in engine.stream(prompts, max_tokens=8, sampling=params, logprobs=0):
            found[new.row.number].append((new.id, *new.logprobs))
        return found

    with host.at_most_threads(1):
        expected = replies(prompts)
    torch.set_num_threads(2)
    try:
        assert replies(prompts) == expected
        assert [replies([prompt])[0] for prompt in prompts] == expected
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_generate_takes_the_settings_by_name_too(engine: Engine) -> None:
    prompts = [prompt_of(6)] * 3
    named, masks = engine.generate(prompts, max_tokens=12, temperature=0.7, top_k=20, seed=7)
    seeded = [SamplingParams(temperature=0.7, top_k=20, seed=seed) for seed in (7, 8, 9)]
    assert (named, masks) == engine.generate(prompts, max_tokens=12, sampling=seeded)
    assert len({tuple(tokens) for tokens in named}) == 3
    prompt = prompt_of(6)
    sequences, masks = engine.generate_batch(prompt, num_samples=3, max_tokens=12, temperature=0.7, top_k=20, seed=7)
    assert sequences == [prompt_of(6) + tokens for tokens in named] and prompt == prompt_of(6)
    assert masks == [[0] * 6 + [1] * 12] * 3
    greedy_replies = engine.generate(prompts, max_tokens=12, sampling=GREEDY)
    assert engine.generate(prompts, max_tokens=12, temperature=0) == greedy_replies
    with pytest.raises(TypeError, match="temperature$"):  # which of the two would count?
        engine.generate(prompts, max_tokens=12, temperature=0.7, sampling=GREEDY)
    for call in (engine.generate, lambda ids, **named: engine.generate_batch(ids[0], **named)):
        with pytest.raises(TypeError, match="temprature$"):
            call(prompts, max_tokens=12, temprature=0.7)


# ---------------------------------------------------------------------- where a reply ends


def test_a_row_ends_with_a_stop_token_and_leaves_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    prompts = [prompt_of(length, seed=length) for length in (9, 5, 12)]
    free = [greedy(engine.model, prompt, 10) for prompt in prompts]
    stop = free[1][4]
    engine.stop_ids = {stop}
    expected = [row[: row.index(stop)] if stop in row else row for row in free]
    assert len(expected[1]) <= 4

    widths: list[int] = []
    decode = Slots.decode
    monkeypatch.setattr(Slots, "decode", lambda self, *more: widths.append(len(self.rows)) or decode(self, *more))
    assert engine.generate(prompts, max_tokens=10, sampling=GREEDY)[0] == expected
    ends = [len(row) + (len(row) < 10) for row in expected]  # steps of each row: the stop token takes one
    assert widths == [sum(end > step for end in ends) for step in range(max(ends))], "a step computes running rows only"

    kept, masks = engine.generate(prompts, max_tokens=10, sampling=GREEDY, keep_stop=True)
    assert kept == [row[: row.index(stop) + 1] if stop in row else row for row in free]
    assert [len(mask) for mask in masks] == [len(row) for row in kept]


@pytest.mark.parametrize(("length", "max_tokens", "made"), [(5, 3, 3), (5, 1, 1), (5, 0, 0), (40, 100, 8), (47, 9, 1)])
def test_max_tokens_and_the_context_limit_a_row(engine: Engine, length: int, max_tokens: int, made: int) -> None:
    sequences, masks = engine.generate_batch(prompt_of(length), max_tokens=max_tokens, temperature=0)
    assert len(sequences[0]) == len(masks[0]) == length + made
    every_token = set(range(engine.model.config.vocab_size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "stop_ids", every_token)  # a reply may be empty
        assert engine.generate_batch(prompt_of(length), max_tokens=max_tokens)[0] == [prompt_of(length)]


def test_prompts_that_do_not_fit_and_settings_out_of_range_are_refused(engine: Engine) -> None:
    with pytest.raises(UserError, match=f"{CONTEXT}.*{CONTEXT}"):
        engine.generate_batch(prompt_of(CONTEXT))
    with pytest.raises(UserError, match="--top_p"):
        engine.generate_batch(prompt_of(3), top_p=2)
    for prompts in ([], [[]], [[1], []]):
        with pytest.raises(UserError, match="empty prompt"):
            list(engine.stream(prompts, max_tokens=3, sampling=GREEDY))


def test_a_stop_request_interrupts_before_the_next_token(engine: Engine) -> None:
    checks = iter([False, False, True])
    stream = engine.stream([prompt_of(4)], max_tokens=9, sampling=GREEDY, should_stop=lambda: next(checks))
    with pytest.raises(Interrupted):
        list(stream)
    assert next(checks, None) is None


# ---------------------------------------------------------------------- the tool


def scripted(monkeypatch: pytest.MonkeyPatch, *rows: list[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Generate while the "model" chooses these tokens, whatever its logits are."""
    engine = make_engine(stops=True)
    columns = iter(zip(*rows, strict=True))
    monkeypatch.setattr(engines, "sample", lambda logits, *_: torch.tensor(next(columns)[: len(logits)]))
    prompts = [prompt_of(4 + row) for row in range(len(rows))]
    return engine.generate(prompts, max_tokens=len(rows[0]), sampling=GREEDY, keep_stop=True)


def special(name: str) -> int:
    return tiny_tokenizer().encode_special(f"<|{name}|>")


CALL = [special("python_start"), *b"6*7", special("python_end")]


ANSWERED = "<|python_start|>6*7<|python_end|><|output_start|>42<|output_end|>A"
ERROR = "<|python_end|><|output_start|>error<|output_end|>"
# What the "model" chooses (a place where it is not asked: 1), the text of the reply, and its mask.
CALLS: dict[str, tuple[list[int], str, list[int]]] = {
    "answered": ([*CALL, 1, 1, 1, 1, 65], ANSWERED, [1] * 5 + [0] * 4 + [1]),
    "without a result": (
        [CALL[0], *b"1/0", CALL[-1], *[1] * 7], f"<|python_start|>1/0{ERROR}", [1] * 5 + [0] * 7,
    ),
    "open at the end": ([CALL[0], *b"1+2+3+4+5+6"], "<|python_start|>1+2+3+4+5+6", [1] * 12),
    # The turn ends inside the call, or no expression can come of it: the mark is not the model's.
    "closed for it": (
        [*CALL[:-1], special("assistant_end"), *[1] * 4, 65, special("assistant_end")],
        f"{ANSWERED}<|assistant_end|>", [1] * 4 + [0] * 5 + [1] * 2,
    ),
    "prose": ([CALL[0], *b"2 d", *[1] * 8], f"<|python_start|>2 d{ERROR}", [1] * 4 + [0] * 8),
    "cut by max_tokens": ([*CALL, 1, 1], ANSWERED[: ANSWERED.index("2<")], [1] * 5 + [0] * 2),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_answered_and_the_other_rows_are_not_touched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, text, mask = CALLS[name]
    other = list(range(70, 70 + len(chosen)))
    tokens, masks = scripted(monkeypatch, chosen, other)
    assert tiny_tokenizer().decode(tokens[0]) == text and masks[0] == mask
    assert tokens[1] == other and masks[1] == [1] * len(other)


@pytest.mark.parametrize("mark", ["output_start", "output_end", "user_start", "system_start", "assistant_end", "bos"])
def test_a_mark_that_the_assistant_may_not_write_ends_the_reply(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert scripted(monkeypatch, [65, special(mark), 66])[0] == [[65, special(mark)]]


# ---------------------------------------------------------------------- weights, and the bits of a row


@pytest.mark.parametrize(("packs", "dtype"), [(True, torch.float32), (True, torch.bfloat16), (False, torch.float32)])
def test_update_takes_over_every_weight(packs: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    supported = CpuKernels.packs  # bf16 needs instructions that not every processor has
    monkeypatch.setattr(CpuKernels, "packs", lambda self, dtype: packs and supported(self, dtype))
    model = lively_model(tiny_config(vocab_size=tiny_tokenizer().vocab_size))
    engine = Engine(model, tiny_tokenizer(), cpu_device(dtype=dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.7)
    engine.update(model)
    fresh = Engine(model, tiny_tokenizer(), cpu_device(dtype=dtype))
    assert greedy(engine.model, prompt_of(9), 20) == greedy(fresh.model, prompt_of(9), 20)


@pytest.mark.parametrize("shape", SHAPES)
def test_keys_and_values_have_the_same_bits_however_a_prompt_is_read(shape: str) -> None:
    """In pieces of any size, alone or next to other prompts, in a small or a large cache."""
    engine, prompt = make_engine(shape), prompt_of(46)
    found = []
    for pieces, slot, capacity in (
        ([45], 0, 48), ([16, 16, 13], 2, 48), ([1] * 45, 1, 47), ([30, 3, 12], 0, 46), ([7, 38], 2, 48),
    ):  # fmt: skip
        slots = Slots(engine, 4, capacity)
        filled = 0
        for size in pieces:
            others = [prompt_of(size + 5, seed=3)] * slot
            slots.prefill(0, [*others, prompt[filled : filled + size]], filled)
            filled += size
        cache = slots.cache
        found.append([cache.by_head(memory)[:, slot, :, :45] for memory in (cache.keys, cache.values)])
        found[-1] += [memory[:, slot] for memory in cache.states]
    # A state adds up chunks of 64 tokens from the start of a piece, so its last digits depend on the pieces.
    tolerance = 1e-5 if slots.cache.states else 0.0
    for memories in found[1:]:
        torch.testing.assert_close(memories, found[0], rtol=tolerance, atol=tolerance)
    assert found[0][0].abs().sum() > 0


def test_a_row_begins_with_an_empty_state_whatever_its_slot_held() -> None:
    engine = make_engine("qwen3_5")
    prompts = [[1], [1, 5], prompt_of(20)]
    expected = [greedy(engine.model, prompt, 5) for prompt in prompts]
    slots = Slots(engine, 3, 32)
    for memory in slots.cache.states:
        memory.fill_(torch.nan)
    rows = [Row(prompt, 5, GREEDY) for prompt in prompts]
    slots.fill(rows)
    found = [[new.id for new in slots.decode()] for _ in range(5)]
    assert [list(reply) for reply in zip(*found, strict=True)] == expected


# ---------------------------------------------------------------------- recorded launches


@dataclasses.dataclass
class Recorded:
    """A CPU that records, as an accelerator does: a replay runs the function again."""

    memories: list[Any] = dataclasses.field(default_factory=list)  # one for each recording
    fails_from: int = 10**9  # the first recording that the device refuses
    holds_functions: bool = True

    def capture(self, device: Device, function: Callable[[], None], memory: Any) -> Callable[[], None]:
        self.memories.append(memory)
        if len(self.memories) >= self.fails_from:
            raise RuntimeError("capture_begin: error code is 107030\n[PID: 1] memory")
        return function if self.holds_functions else lambda: None


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    monkeypatch.setattr(torch.cpu, "graph_pool_handle", object, raising=False)
    monkeypatch.setattr(decoding, "NOT_RECORDING", set())
    found = Recorded()
    monkeypatch.setattr(decoding, "capture", found.capture)
    return found


def accelerated(shape: str = "fast", whole_cache: bool = True, records: bool = True, **changes: Any) -> Engine:
    """An engine that decodes as on an accelerator."""
    engine = make_engine(shape, **{"sequence_len": 200, **changes})
    engine.decoders = Decoders(records)
    engine.model.kernels = copy.copy(engine.model.kernels)
    engine.model.kernels.reads_whole_cache = whole_cache
    return engine


@pytest.mark.parametrize(("context", "whole_cache"), [(63, True), (64, True), (64, False), (65, False)])
def test_a_prompt_as_long_as_the_context_is_read_exactly(context: int, whole_cache: bool) -> None:
    """Its padding has no places after it."""
    engine = accelerated(whole_cache=whole_cache, records=False, sequence_len=context)
    prompt = prompt_of(context)
    with torch.no_grad():
        exact = engine.model(torch.tensor([prompt]))[0].log_softmax(dim=-1)
    for first in (context - 1, 5, 16):  # in one piece, or with a beginning that was read before
        slots = engine.decoder(2)
        with torch.inference_mode():
            pieces = [slots.read(0, [prompt[:first]], 0)[:, :first]]
            if first < context - 1:
                pieces.append(slots.read(0, [prompt[first:-1]], first)[:, : context - 1 - first])
            found = engine.model.logits(torch.cat(pieces, dim=1))[0].log_softmax(dim=-1)
        torch.testing.assert_close(found, exact[:-1], rtol=1e-4, atol=1e-4)


LONG = [prompt_of(length, seed=length) for length in (9, 1, 30, 12, 12, 40, 100)]


@pytest.mark.parametrize(("shape", "whole_cache"), [*((shape, True) for shape in SHAPES), ("fast", False)])
def test_recorded_launches_give_the_same_tokens_and_are_kept(shape: str, whole_cache: bool, recorded: Recorded) -> None:
    """Few recordings, in one memory, which later calls use again, also smaller ones and ones with other settings."""
    engine = accelerated(shape, whole_cache)
    plain = make_engine(shape, sequence_len=200)
    made = []
    for prompts, new, rows in ((LONG, 60, 4), (LONG, 60, 4), (LONG[:3], 20, 2), (LONG[4:5], 60, None)):
        settings = [SamplingParams(temperature=number % 2, seed=number) for number in range(len(prompts))]
        arguments = {"max_tokens": new, "sampling": settings, "max_rows": rows, "keep_stop": True}
        assert engine.generate(prompts, **arguments) == plain.generate(prompts, **arguments)
        made.append(len(recorded.memories))
    assert 3 <= made[0] == made[1] <= made[-1] <= 3 * 3, "by powers of two: 1 to 4 rows, 64 to 200 tokens"
    assert len(set(map(id, recorded.memories))) == 1
    assert len(engine.decoders.kept) == 1


def test_an_engine_and_its_recordings_are_freed_without_the_garbage_collector(recorded: Recorded) -> None:
    engine = accelerated()
    recorded.holds_functions = False  # as a graph; this device's replays do
    engine.generate(LONG[:2], max_tokens=5, sampling=GREEDY)
    assert recorded.memories
    left = [weakref.ref(one) for one in (engine, engine.decoders.kept[0], engine.decoders.kept[0].cache.keys)]
    gc.disable()
    try:
        del engine
        assert not any(one() is not None for one in left)
    finally:
        gc.enable()


def test_two_callers_at_once_have_decoders_of_their_own(recorded: Recorded) -> None:
    engine = accelerated()
    engine.generate(LONG[:2], max_tokens=5, sampling=GREEDY)
    alone = [engine.generate([prompt], max_tokens=30, sampling=GREEDY)[0][0] for prompt in LONG[:2]]
    streams = [engine.stream([prompt], max_tokens=30, sampling=GREEDY) for prompt in LONG[:2]]
    together = [[new.id for new in pair] for pair in zip(*streams, strict=False)]
    shorter = len(together)
    assert shorter > 3 and [list(ids) for ids in zip(*together, strict=True)] == [ids[:shorter] for ids in alone]


@pytest.mark.parametrize("fails_from", [1, 3])
def test_a_recording_that_fails_costs_one_warning_and_no_token(
    fails_from: int, recorded: Recorded, capsys: Any
) -> None:
    """The device's memory or its streams may be used up: the same tokens, without recordings from there on."""
    recorded.fails_from = fails_from
    engine = accelerated()
    expected = make_engine(sequence_len=200).generate(LONG, max_tokens=60, sampling=GREEDY, max_rows=4)
    for _ in range(2):
        assert engine.generate(LONG, max_tokens=60, sampling=GREEDY, max_rows=4) == expected
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: ") and line.endswith("error code is 107030")
    assert len(recorded.memories) == fails_from and not engine.decoders.records and not engine.decoders.kept
    assert "cpu" in decoding.NOT_RECORDING  # another engine of this process does not try


def test_a_decoder_that_ran_out_of_memory_is_not_kept(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = accelerated()
    engine.generate(LONG[:2], max_tokens=5, sampling=GREEDY)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("NPU out of memory")

    monkeypatch.setattr(Slots, "prefill", fail)
    with pytest.raises(torch.OutOfMemoryError):
        engine.generate(LONG[:2], max_tokens=5, sampling=GREEDY)
    assert not engine.decoders.kept


def test_a_cache_shrinks_when_its_longest_row_has_left(recorded: Recorded) -> None:
    engine = accelerated()
    slots = engine.decoder(2)
    rows = [Row(prompt_of(150), 5, GREEDY), Row(prompt_of(9), 60, GREEDY)]
    slots.fill(rows)
    strides = [slots.cache.stride]
    ids = []
    while slots.rows:
        new_tokens = slots.decode()
        ids += [new.id for new in new_tokens if new.row is rows[1]]
        slots.release({new.row for new in new_tokens if new.finish_reason})
        slots.shrink(max((len(row.prompt) + row.made for row in slots.rows), default=0))
        strides.append(slots.cache.stride)
    assert strides[:1] + strides[5:6] == [256, 64] and len(strides) > 9, strides
    assert [ids] == make_engine(sequence_len=200).generate([prompt_of(9)], max_tokens=60, sampling=GREEDY)[0]


@pytest.mark.parametrize("seed", range(4))
def test_slots_without_a_row_write_to_no_other_slot(seed: int, recorded: Recorded) -> None:
    """Recordings compute them, too: rows end anywhere, long before others, and new prompts are read meanwhile."""
    chance = random.Random(seed)
    prompts = [prompt_of(chance.choice((5, 8, 12, 50, 55, 60, 63, 64, 65)), seed=number) for number in range(12)]
    lengths = [chance.choice((3, 5, 40, 60)) for _ in prompts]

    def replies(engine: Engine) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in prompts]
        for new in engine.stream(prompts, max_tokens=60, sampling=GREEDY, max_rows=chance.choice((3, 4, 6))):
            found[new.row.number].append(new.id)
            if len(found[new.row.number]) == lengths[new.row.number] - 1:
                new.row.max_tokens = 0
        return found

    engine = accelerated()
    assert replies(engine) == replies(make_engine(sequence_len=200))


@pytest.mark.parametrize("copied", [False, True])
def test_a_prompt_is_whole_though_its_slot_is_computed_meanwhile(copied: bool, recorded: Recorded) -> None:
    """Five rows are decoded by a recording of eight. Slot 5 had a longer row; slot 6 is read in two pieces, or copied
    to slot 7, which had another longer row."""
    engine = accelerated()
    prompt = prompt_of(65, seed=77)  # as many tokens to read as a head has places
    (expected,) = make_engine(sequence_len=200).generate([prompt], max_tokens=10, sampling=GREEDY)[0]
    slots = engine.decoder(8, 200)
    slots.fill([Row(prompt_of(10, seed=number), 100, GREEDY, number) for number in range(5)])
    ending = [Row(prompt_of(length, seed=length), 2, GREEDY, 9) for length in (40, 41, 20)]
    slots.fill(ending)
    while len(slots.rows) == 8:
        slots.release({new.row for new in slots.decode() if new.finish_reason})
    row = Row(prompt, 10, GREEDY, 6, slot=6)
    slots.prefill(6, [prompt[:16]], 0)
    for _ in range(25):  # slot 5 would have 66 tokens now, and has 64 places
        slots.decode()
    slots.prefill(6, [prompt[16:-1]], 16)
    if copied:
        slots.copy(6, 7, 64)
        row.slot = 7
    for _ in range(5):
        slots.decode()
    slots.admit([row])
    assert [new.id for _ in range(10) for new in slots.decode() if new.row is row] == expected
