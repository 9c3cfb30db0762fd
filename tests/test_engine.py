"""Generation: greedy as the model alone would, batched as alone, sampled by the probabilities asked for."""

import math
from typing import Any

import pytest
import torch
from tiny import SHAPES, cpu_device, lively_model, tiny_config, tiny_tokenizer
from torch import Tensor

from nanochat import engine as engines
from nanochat.device import Device
from nanochat.engine import Engine, Sampling, Slots, check_sampling, sample, sample_rows, uniforms
from nanochat.gpt import GPT
from nanochat.shell.cli import UserError
from nanochat.tokenizer import Tokenizer

CONTEXT = 48


def make_engine(shape: str = "fast", seed: int = 0, device: Any = None) -> Engine:
    """A lively model over the tiny tokenizer's vocabulary, whose stop tokens never come by themselves."""
    tokenizer = tiny_tokenizer()
    model = lively_model(tiny_config(**{**SHAPES[shape], "vocab_size": tokenizer.vocab_size, "sequence_len": CONTEXT}))
    engine = Engine(model, tokenizer, device or cpu_device())
    engine.stop_ids = set()
    return engine


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


def rows_of(columns: list[tuple[list[int | None], list[bool]]], row: int) -> list[int]:
    """One row of what `stream` gave; once a row has ended it stays so."""
    column = [tokens[row] for tokens, _ in columns]
    tokens = [token for token in column if token is not None]
    assert column == tokens + [None] * (len(column) - len(tokens))
    return tokens


# ---------------------------------------------------------------------- greedy


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [1, 5, 20])
def test_greedy_is_the_model_without_a_cache(shape: str, length: int) -> None:
    engine, prompt = make_engine(shape), prompt_of(length)
    sequences, masks = engine.generate_batch(prompt, num_samples=2, max_tokens=20, temperature=0)
    expected = greedy(engine.model, prompt, 20)
    assert sequences == [prompt + expected] * 2
    assert masks == [[0] * length + [1] * 20] * 2
    assert len(set(expected)) > 3


@pytest.mark.parametrize("shape", SHAPES)
def test_a_mixed_batch_is_each_prompt_alone(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "CACHE_STEP", 8)  # attended_len grows several times
    engine = make_engine(shape)
    prompts = [prompt_of(length, seed=length) for length in (9, 1, 30, 12, 12)]
    columns = list(engine.stream(prompts, max_tokens=14, temperature=0))
    for row, prompt in enumerate(prompts):
        assert rows_of(columns, row) == greedy(engine.model, prompt, 14)


def test_a_long_neighbour_takes_no_room_from_a_short_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "CACHE_STEP", 8)
    engine = make_engine()
    prompts = [prompt_of(length, seed=length) for length in (4, 40, CONTEXT - 1)]
    columns = list(engine.stream(prompts, max_tokens=30, temperature=0))
    assert len(columns) == 30
    for row, (prompt, room) in enumerate(zip(prompts, (30, 8, 1), strict=True)):
        assert rows_of(columns, row) == greedy(engine.model, prompt, room)


def test_prefill_and_decode_one_token_give_the_models_logits(engine: Engine) -> None:
    prompts = [prompt_of(6), prompt_of(3, seed=1)]
    logits, cache = engine.prefill(prompts, capacity=16)
    for token in (7, 8):
        for row, prompt in enumerate(prompts):
            torch.testing.assert_close(logits[row], engine.model(torch.tensor([prompt]))[0, -1], rtol=1e-4, atol=1e-4)
            prompt.append(token)
        logits = engine.decode_one_token(torch.tensor([token, token]), cache)
    assert cache.position.tolist() == [8, 5]


def test_a_prompt_is_not_changed(engine: Engine) -> None:
    prompt = prompt_of(5)
    engine.generate_batch(prompt, num_samples=2, max_tokens=3)
    assert prompt == prompt_of(5)


def test_equal_prompts_are_read_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prefilled: list[int] = []
    prefill = engine.prefill

    def counted(prompts: list[list[int]], capacity: int) -> Any:
        prefilled.append(len(prompts))
        return prefill(prompts, capacity)

    monkeypatch.setattr(engine, "prefill", counted)
    equal = list(engine.stream([prompt_of(9)] * 3, max_tokens=9, temperature=0))
    mixed = list(engine.stream([prompt_of(9)] * 2 + [prompt_of(4)], max_tokens=9, temperature=0))
    assert prefilled == [1, 3]
    assert [rows_of(equal, row) for row in range(3)] == [rows_of(mixed, 0)] * 3


def test_bfloat16_weights_are_a_copy() -> None:
    model = lively_model(tiny_config(vocab_size=tiny_tokenizer().vocab_size))
    engine = Engine(model, tiny_tokenizer(), cpu_device(dtype=torch.bfloat16))
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert all(p.dtype == torch.bfloat16 for p in engine.model.parameters())
    logits, cache = engine.prefill([prompt_of(9)], capacity=16)
    assert (logits.dtype, cache.keys.dtype) == (torch.float32, torch.bfloat16)
    exact = model(torch.tensor([prompt_of(9)]))[0, -1]
    assert (logits[0] - exact).norm() < 0.1 * exact.norm()


# ---------------------------------------------------------------------- where it ends


def test_a_document_or_an_answer_ends_at_its_token(engine: Engine, tiny_tokenizer: Tokenizer) -> None:
    own = {tiny_tokenizer.encode_special(name) for name in ("<|python_start|>", "<|python_end|>")}
    stops = set(tiny_tokenizer.special_ids.values()) - own
    assert Engine(engine.model, tiny_tokenizer, cpu_device()).stop_ids == stops


def test_a_row_ends_with_a_stop_token_which_is_not_handed_out() -> None:
    engine = make_engine()
    prompts = [prompt_of(length, seed=length) for length in (9, 5, 12)]
    free = [greedy(engine.model, prompt, 10) for prompt in prompts]
    stop = free[1][4]
    engine.stop_ids = {stop}
    expected = [row[: row.index(stop)] if stop in row else row for row in free]
    columns = list(engine.stream(prompts, max_tokens=10, temperature=0))
    assert [rows_of(columns, row) for row in range(3)] == expected
    assert len(expected[1]) <= 4
    assert len(columns) == max(map(len, expected))
    sequences, masks = engine.generate_batch(prompts[1], max_tokens=10, temperature=0)
    assert sequences == [prompts[1] + expected[1]]
    assert [len(m) for m in masks] == [len(s) for s in sequences]
    assert sum(masks[0]) == len(expected[1])


def test_the_stream_ends_when_all_rows_have(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "stop_ids", set(range(engine.model.config.vocab_size)))
    assert list(engine.stream([prompt_of(4)] * 2, max_tokens=10)) == []
    assert engine.generate_batch(prompt_of(4), num_samples=2) == ([prompt_of(4)] * 2, [[0] * 4] * 2)


@pytest.mark.parametrize(("length", "asked", "given"), [(5, 3, 3), (5, 1, 1), (5, 0, 0), (40, 100, 8), (47, 9, 1)])
def test_max_tokens_and_the_context_limit_a_row(engine: Engine, length: int, asked: int, given: int) -> None:
    sequences, masks = engine.generate_batch(prompt_of(length), max_tokens=asked, temperature=0)
    assert len(sequences[0]) == len(masks[0]) == length + given


# ---------------------------------------------------------------------- sampling


def test_the_seed_decides(engine: Engine) -> None:
    def generate(seed: int, **settings: Any) -> list[list[int]]:
        return engine.generate_batch(prompt_of(6), num_samples=3, max_tokens=12, seed=seed, **settings)[0]

    torch.manual_seed(1)
    first = generate(3)
    torch.manual_seed(2)  # the global generator has no say
    assert generate(3) == first
    assert generate(4) != first
    assert len({tuple(row) for row in first}) == 3, "the rows of one batch are drawn alike"
    assert generate(3, temperature=0) == generate(4, temperature=0)
    assert generate(3, top_k=1) == generate(3, temperature=0)
    assert generate(3, temperature=1e-5) == generate(3, temperature=0)
    assert generate(3, top_p=1e-6) == generate(3, temperature=0)


DRAWS = 20_000


def frequencies(probabilities: Tensor, seed: int = 0, **settings: Any) -> Tensor:
    """How often each token was drawn, over DRAWS rows."""
    logits = probabilities.log().expand(DRAWS, -1)
    noise = uniforms(seed, DRAWS)[:, None]
    drawn = sample(logits, **{"temperature": 1.0, **settings}, noise=noise)
    assert drawn.shape == (DRAWS,)
    return drawn.bincount(minlength=probabilities.numel()).float()


def assert_drawn_from(counts: Tensor, expected: Tensor) -> None:
    """Chi-square: a right sampler fails this once in a million seeds, and the seed is fixed."""
    possible = expected > 0
    assert not counts[~possible].any()
    statistic = ((counts - DRAWS * expected).square() / (DRAWS * expected))[possible].sum().item()
    freedom = int(possible.sum()) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom) + 12


P = torch.tensor([0.05, 0.3, 0.1, 0.25, 0.02, 0.18, 0.1])


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_samples_follow_the_softmax(temperature: float) -> None:
    expected = P ** (1 / temperature)
    assert_drawn_from(frequencies(P, temperature=temperature), expected / expected.sum())


@pytest.mark.parametrize(("top_k", "kept"), [(1, [1]), (2, [1, 3]), (3, [1, 3, 5]), (7, range(7)), (99, range(7))])
def test_top_k_keeps_the_best(top_k: int, kept: list[int]) -> None:
    expected = torch.zeros(7)
    expected[list(kept)] = P[list(kept)]
    assert_drawn_from(frequencies(P, top_k=top_k), expected / expected.sum())


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.01, [1]), (0.29, [1]), (0.31, [1, 3]), (0.54, [1, 3]), (0.56, [1, 3, 5]), (0.999, range(7)), (1.0, range(7))],
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, kept: list[int]) -> None:
    expected = torch.zeros(7)
    expected[list(kept)] = P[list(kept)]
    assert_drawn_from(frequencies(P, top_p=top_p), expected / expected.sum())


def test_top_k_cuts_before_top_p() -> None:
    expected = torch.tensor([0, 0.3, 0, 0.25, 0, 0, 0]) / 0.55  # of the best three, 0.41 + 0.34 reach 0.7
    assert_drawn_from(frequencies(P, top_k=3, top_p=0.7), expected)


def test_top_k_keeps_no_more_where_logits_are_equal() -> None:
    counts = frequencies(torch.full((6,), 1 / 6), top_k=2)
    assert (counts > 0).sum() == 2


def test_each_row_is_cut_by_itself() -> None:
    logits = torch.stack((P.log(), P.flip(0).log()))
    noise = torch.full((2, 1), 0.5)
    assert sample(logits, temperature=1.0, top_k=1, noise=noise).tolist() == [1, 5]
    assert sample(logits, temperature=1.0, top_p=0.2, noise=noise).tolist() == [1, 5]
    assert sample(logits, temperature=0, noise=noise).tolist() == [1, 5]


@pytest.mark.parametrize("temperature", [1e-3, 1e-7, 1e-40, 5e-324])
def test_the_smallest_temperatures_are_greedy(temperature: float) -> None:
    check_sampling(temperature, 0, 1.0)
    assert frequencies(P, temperature=temperature)[1] == DRAWS


# ---------------------------------------------------------------------- a setting for each row


def settings_of(rows: list[Sampling]) -> Any:
    """What sample_rows takes for these rows."""
    slots = Slots(make_engine(), len(rows), 16)
    for slot, sampling in enumerate(rows):
        slots.join(slot, [1], 1, sampling)
    return slots._settings(len(rows))


NOTHING_SEEN = torch.zeros(1, 1, dtype=torch.bool)
EVENLY = (torch.arange(DRAWS) + 0.5)[:, None] / DRAWS  # noise without chance: counts are exact but for rounding


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, range(7)),
        ({"temperature": 0.5}, range(7)),
        ({"top_k": 3}, [1, 3, 5]),
        ({"top_k": 99}, range(7)),
        ({"top_p": 0.56}, [1, 3, 5]),
        ({"top_p": 0.01}, [1]),
        ({"top_k": 3, "top_p": 0.7}, [1, 3]),
        ({"min_p": 0.5}, [1, 3, 5]),
        ({"min_p": 1.0}, [1]),
        ({"min_p": 0.5, "top_p": 0.54}, [1, 3]),
        ({"temperature": 2.0, "min_p": 0.5}, [0, 1, 2, 3, 5, 6][1:]),
    ],
)
@pytest.mark.parametrize("first", [2, 64])
def test_rows_are_drawn_by_their_own_settings(
    settings: dict[str, Any], kept: Any, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "TOP_P_FIRST", first)
    expected = torch.zeros(7)
    expected[list(kept)] = P[list(kept)] ** (1 / settings.get("temperature", 1.0))
    expected *= DRAWS / expected.sum()
    chosen = settings_of([Sampling(**settings)])
    drawn = sample_rows(P.log().expand(DRAWS, -1), chosen, EVENLY, NOTHING_SEEN)
    assert (drawn.bincount(minlength=7) - expected).abs().max() <= 1.01


def test_neighbours_change_nothing_in_a_row() -> None:
    """Every setting beside every other: what each row draws is what it draws alone."""
    samplings = [
        Sampling(temperature=0),
        Sampling(),
        Sampling(temperature=1.3, top_k=5),
        Sampling(top_p=0.8),
        Sampling(min_p=0.1),
        Sampling(repetition_penalty=1.5),
        Sampling(temperature=0, repetition_penalty=3.0),
        Sampling(temperature=0.7, top_k=40, top_p=0.5, min_p=0.05, repetition_penalty=0.8),
    ]
    generator = torch.Generator().manual_seed(0)
    together, B = settings_of(samplings), len(samplings)
    for _ in range(50):
        logits = 3 * torch.randn(B, 200, generator=generator)
        noise, seen = torch.rand(B, 1, generator=generator), torch.rand(B, 200, generator=generator) < 0.3
        drawn = sample_rows(logits, together, noise, seen)
        for row, sampling in enumerate(samplings):
            one = slice(row, row + 1)
            assert sample_rows(logits[one], settings_of([sampling]), noise[one], seen[one]) == drawn[one]


def test_the_penalty_makes_what_was_there_less_likely_on_both_sides_of_zero() -> None:
    logits = torch.tensor([[2.0, 1.5, -1.0], [-1.0, -1.5, -3.0]])
    seen = torch.tensor([[True, False, False], [True, False, True]])
    penalty = settings_of([Sampling(temperature=0, repetition_penalty=2.0)] * 2)
    assert sample_rows(logits, penalty, torch.zeros(2, 1), seen).tolist() == [1, 1]
    assert sample_rows(logits, penalty, torch.zeros(2, 1), ~seen).tolist() == [0, 0]


def test_the_ends_of_the_noise_draw_nothing_impossible() -> None:
    logits = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]])
    settings = settings_of([Sampling()])
    for noise, token in ((0.0, 1), (1 - 2**-23, 2)):
        assert sample_rows(logits, settings, torch.tensor([[noise]]), NOTHING_SEEN).tolist() == [token]


def test_numbers_by_counter_are_even_and_do_not_depend_on_how_many_are_asked_for() -> None:
    many = uniforms(7, 100_000)
    assert torch.equal(uniforms(7, 10), many[:10])
    assert many.dtype == torch.float32 and many.min() >= 0 and many.max() < 1
    counts = (many * 100).long().bincount(minlength=100)
    assert ((counts - 1000).square() / 1000).sum() < 99 + 5 * math.sqrt(2 * 99) + 12
    assert abs((many[1:] * many[:-1]).mean() - 0.25) < 0.005
    firsts = torch.stack([uniforms(seed, 4) for seed in range(-2000, 2000)])
    assert len(set(firsts[:, 0].tolist())) > 3990
    assert ((firsts.mean(0) - 0.5).abs() < 0.03).all()
    # the published sequence of SplitMix64 from the state that seed 0 stands for
    assert uniforms(0, 2).tolist() == [(0xE220A839 >> 9) / 2**23, (0x6E789E6A >> 9) / 2**23]


# ---------------------------------------------------------------------- slots


def test_the_sizes_that_are_chosen_give_the_largest_ones_bits() -> None:
    engine = make_engine()
    sizes = engine.exact_sizes({1, 2, 4, 8, 16})
    assert sizes == tuple(sorted(sizes)) and sizes[-1] == 16
    rows = torch.randn(16, engine.model.config.width)
    with torch.inference_mode():
        for size in sizes:
            assert torch.equal(engine.model.logits(rows[:size]), engine.model.logits(rows)[:size])


@pytest.mark.parametrize("shape", SHAPES)
def test_an_idle_slot_keeps_what_it_holds_while_others_decode(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it holds more than is visible to them: what it computes there must not be NaN, which spreads."""
    monkeypatch.setattr(engines, "CACHE_STEP", 8)
    engine = make_engine(shape)
    slots = Slots(engine, 4, 64)
    slots.choose_sizes()
    slots.prefill(0, prompt_of(45), 0)
    kept = slots.cache.keys[:, 0, :, :45].clone()
    slots.join(1, [5], 10, Sampling(temperature=0))
    for held in range(10):
        slots.decode(4, held)
    slots.leave(1, 0)
    assert torch.equal(slots.cache.keys[:, 0, :, :45], kept)
    assert slots.cache.keys.isfinite().all() and slots.cache.values.isfinite().all()
    assert slots.cache.position.tolist() == [45, 0, 0, 0]


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": -0.1}, "--temperature -0.1"),
        ({"temperature": math.nan}, "--temperature nan"),
        ({"temperature": math.inf}, "--temperature inf"),
        ({"top_k": -1}, "--top_k -1"),
        ({"top_p": 0.0}, "--top_p 0.0"),
        ({"top_p": 1.01}, "--top_p 1.01"),
        ({"top_p": math.nan}, "--top_p nan"),
    ],
)
def test_settings_out_of_range_are_named(engine: Engine, settings: dict[str, float], words: str) -> None:
    with pytest.raises(UserError, match=words):
        engine.generate_batch(prompt_of(3), **settings)  # type: ignore[arg-type]


def test_prompts_that_do_not_fit_are_told(engine: Engine) -> None:
    with pytest.raises(UserError, match=f"the prompt has {CONTEXT} tokens, the model's context {CONTEXT}"):
        engine.generate_batch(prompt_of(CONTEXT))
    for prompts in ([], [[]], [[1], []]):
        with pytest.raises(UserError, match="empty prompt"):
            list(engine.stream(prompts, max_tokens=3))


# ---------------------------------------------------------------------- the tool


def scripted(engine: Engine, monkeypatch: pytest.MonkeyPatch, *rows: list[int]) -> None:
    """Have the model choose these tokens, whatever its logits say."""
    columns = iter(zip(*rows, strict=True))
    monkeypatch.setattr(engines, "sample", lambda logits, **_: torch.tensor(next(columns)))


def tool_engine() -> tuple[Engine, Tokenizer]:
    engine = make_engine()
    return Engine(engine.model, engine.tokenizer, engine.device), engine.tokenizer


def test_a_call_is_answered_and_the_other_rows_go_on(monkeypatch):
    engine, tokenizer = tool_engine()
    start, end, stop = (tokenizer.encode_special(f"<|{m}|>") for m in ("python_start", "python_end", "assistant_end"))
    caller = [start, *tokenizer.encode("6*7"), end, 1, 1, 1, 1, 65, stop]
    other = list(range(70, 70 + len(caller)))
    scripted(engine, monkeypatch, caller, other)
    tokens, masks = engine.generate([prompt_of(4), prompt_of(5)], max_tokens=len(caller))
    assert tokenizer.decode(tokens[0]) == "<|python_start|>6*7<|python_end|><|output_start|>42<|output_end|>A"
    assert masks[0] == [1] * 5 + [0] * 4 + [1]
    assert tokens[1] == other and masks[1] == [1] * len(other)


def test_a_call_without_an_answer_is_told_so_and_one_that_is_not_closed_is_not_answered(monkeypatch):
    engine, tokenizer = tool_engine()
    start, end = (tokenizer.encode_special(f"<|{m}|>") for m in ("python_start", "python_end"))
    scripted(engine, monkeypatch, [start, *tokenizer.encode("1/0"), end, *[1] * 7], [start, *range(65, 76)][:12])
    tokens, _ = engine.generate([prompt_of(4), prompt_of(5)], max_tokens=12)
    assert tokenizer.decode(tokens[0]) == "<|python_start|>1/0<|python_end|><|output_start|>error<|output_end|>"
    assert tokens[1] == [start, *range(65, 76)]


def test_the_answer_counts_and_stops_at_the_limit(monkeypatch):
    engine, tokenizer = tool_engine()
    start, end = (tokenizer.encode_special(f"<|{m}|>") for m in ("python_start", "python_end"))
    scripted(engine, monkeypatch, [start, *tokenizer.encode("6*7"), end, 1, 1, 1])
    tokens, masks = engine.generate([prompt_of(4)], max_tokens=7)
    assert tokenizer.decode(tokens[0]) == "<|python_start|>6*7<|python_end|><|output_start|>4"
    assert masks[0] == [1] * 5 + [0] * 2


@pytest.mark.parametrize("mark", ["output_start", "output_end", "user_start", "system_start", "assistant_end", "bos"])
def test_a_mark_that_is_not_the_assistants_to_write_ends_the_reply(mark, monkeypatch):
    engine, tokenizer = tool_engine()
    scripted(engine, monkeypatch, [65, tokenizer.encode_special(f"<|{mark}|>"), 66])
    assert engine.generate([prompt_of(4)], max_tokens=3)[0] == [[65]]
    scripted(engine, monkeypatch, [65, tokenizer.encode_special(f"<|{mark}|>"), 66])
    kept, _ = engine.generate([prompt_of(4)], max_tokens=3, keep_stop=True)
    assert kept == [[65, tokenizer.encode_special(f"<|{mark}|>")]]


def test_update_takes_over_the_weights_as_they_are_now():
    model = lively_model(tiny_config())
    engine = Engine(model, tiny_tokenizer(), cpu_device(dtype=torch.bfloat16))
    assert engine.model is not model
    with torch.no_grad():
        model.embedding.weight.add_(1.0)
    assert not torch.equal(engine.model.embedding.weight, model.embedding.weight.bfloat16())
    engine.update(model)
    assert torch.equal(engine.model.embedding.weight, model.embedding.weight.bfloat16())


@pytest.mark.parametrize("packs", [True, False])
def test_update_takes_over_every_matrix_packed_or_not(packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "packs_weights", property(lambda self: packs and torch.backends.mkldnn.is_available()))
    model = lively_model(tiny_config(vocab_size=tiny_tokenizer().vocab_size))
    engine = Engine(model, tiny_tokenizer(), cpu_device(dtype=torch.float32))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.7)
    engine.update(model)
    assert greedy(engine.model, prompt_of(9), 20) == greedy(model, prompt_of(9), 20)


def test_rows_that_have_ended_leave_the_batch_and_the_others_notice_nothing(monkeypatch):
    engine = make_engine()
    prompts = [
        prompt_of(length, seed) for seed, length in enumerate((30, 9, 40, 3, 44, 12))
    ]  # context 48: most end soon
    widths = []
    decode = engine.decode_one_token
    monkeypatch.setattr(engine, "decode_one_token", lambda t, c: widths.append(len(t)) or decode(t, c))
    tokens, _ = engine.generate(prompts, max_tokens=40, temperature=0)
    for prompt, new in zip(prompts, tokens, strict=True):
        assert new == greedy(engine.model, prompt, min(40, CONTEXT - len(prompt)))
    assert widths[0] == 6 and widths[-1] <= 2 and sorted(widths, reverse=True) == widths
