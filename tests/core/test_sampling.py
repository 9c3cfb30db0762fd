"""Sampling: tokens are drawn from the requested probabilities, each row by its own settings, and by its seed alone."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from nanochat.ground.cli import UserError, check_ranges
from nanochat.operators import TorchKernels
from nanochat.sampling import (
    CHAT_SAMPLING,
    RowSettings,
    SamplingParams,
    read_settings,
    sample,
    saved_settings,
    seed_of,
    uniforms,
)
from nanochat.serve.decoding_flags import SamplingFlags

UNIFORMS = [96861 / 2**23, 2026261 / 2**23]  # the first of seed 0
P = torch.tensor([0.05, 0.3, 0.1, 0.25, 0.02, 0.18, 0.1])
DRAWS = 20_000
EVENLY = (torch.arange(DRAWS) + 0.5)[:, None] / DRAWS  # noise without chance: counts are exact but for rounding


def draw(
    logits: Tensor,
    params: list[SamplingParams],
    noise: Tensor,
    seen: Tensor | None = None,
    first: int = 0,
    counts: Tensor | None = None,
    bias: Tensor | None = None,
) -> list[int]:
    """One token for each row of logits; one setting may serve all rows."""
    B = len(logits)
    table = torch.tensor([RowSettings.numbers(one) for one in params]).expand(B, -1)
    seen = torch.zeros_like(logits, dtype=torch.bool) if seen is None else seen
    kernels = TorchKernels()
    kernels.top_p_first = first
    return sample(logits, RowSettings(params, table), noise, seen, kernels, counts, bias).tolist()


EVERY = range(7)
KEPT: list[tuple[dict[str, Any], Any]] = [
    *(({"temperature": value}, EVERY) for value in (1.0, 0.3, 2.0)),
    *(({"temperature": value}, [1]) for value in (1e-3, 1e-7, 5e-324)),
    *(({"top_k": k}, kept) for k, kept in ((1, [1]), (3, [1, 3, 5]), (99, EVERY))),
    *(
        ({"top_p": p}, kept)
        for p, kept in ((0.01, [1]), (0.29, [1]), (0.31, [1, 3]), (0.54, [1, 3]), (0.56, [1, 3, 5]))
    ),
    ({"top_p": 0.999}, EVERY),
    ({"top_k": 3, "top_p": 0.7}, [1, 3]),  # top_k first: of the best three, 0.41 + 0.34 reach 0.7
    ({"min_p": 0.5}, [1, 3, 5]),
    ({"min_p": 1.0}, [1]),
    ({"min_p": 0.5, "top_p": 0.54}, [1, 3]),
    ({"temperature": 2.0, "min_p": 0.5}, [1, 2, 3, 5, 6]),
]


@pytest.mark.parametrize(("settings", "kept"), KEPT)
@pytest.mark.parametrize("first_look", [0, 2, 64])
def test_tokens_are_drawn_from_the_kept_probabilities(settings: dict[str, Any], kept: Any, first_look: int) -> None:
    expected = torch.zeros(7)
    expected[list(kept)] = P[list(kept)] ** (1 / settings.get("temperature", 1.0)) if len(kept) > 1 else 1.0
    expected *= DRAWS / expected.sum()
    drawn = torch.tensor(draw(P.log().expand(DRAWS, -1), [SamplingParams(**settings)], EVENLY, first=first_look))
    assert (drawn.bincount(minlength=7) - expected).abs().max() <= 1.01


def test_neighbours_change_nothing_in_a_row() -> None:
    """Every setting next to every other: a row draws what it draws alone."""
    params = [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(temperature=1.3, top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1),
        SamplingParams(repetition_penalty=1.5),
        SamplingParams(temperature=0, repetition_penalty=3.0),
        SamplingParams(temperature=0.7, top_k=40, top_p=0.5, min_p=0.05, repetition_penalty=0.8),
        SamplingParams(presence_penalty=1.5),
        SamplingParams(frequency_penalty=-0.7, top_p=0.9),
    ]
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        logits = 3 * torch.randn(len(params), 200, generator=generator)
        noise = torch.rand(len(params), 1, generator=generator)
        seen = torch.rand(len(params), 200, generator=generator) < 0.3
        counts = torch.randint(0, 3, (len(params), 200), generator=generator).float()
        bias = torch.zeros(len(params), 200)
        bias[:3] = 5 * torch.randn(3, 200, generator=generator)
        bias[1, 50:] = -math.inf
        together = draw(logits, params, noise, seen, counts=counts, bias=bias)
        assert together[1] < 50
        for row, one in enumerate(params):
            alone = slice(row, row + 1)
            own_counts = counts[alone] if one.presence_penalty or one.frequency_penalty else None
            own_bias = bias[alone] if row < 3 else None
            assert draw(logits[alone], [one], noise[alone], seen[alone], 0, own_counts, own_bias) == [together[row]]


LIMITS = [{"top_k": 40}, {"top_k": 7, "top_p": 0.5}, {"top_k": 99}, {}, {"temperature": 0}]
LIMITS += [{"top_k": 4000}, {"min_p": 0.1}]


@pytest.mark.parametrize("first", [0, 16])
def test_top_p_after_other_limits_is_that_of_a_whole_sort(first: int) -> None:
    """Among the likeliest tokens that top_k leaves, or the first few; equal logits included."""
    generator = torch.Generator().manual_seed(6)
    looking = TorchKernels()
    looking.top_p_first = first
    for rounding, others in itertools.product((0, 1, 2, 100), ([], LIMITS[1:3], LIMITS[3:5], LIMITS)):
        params = [SamplingParams(**{"top_p": 0.9, **settings}) for settings in (LIMITS[0], *others)]
        logits = 4 * torch.randn(len(params), 500, generator=generator)
        logits = (logits / rounding).round() * rounding if rounding else logits  # groups are as likely as the k-th
        settings = RowSettings(params, torch.tensor([RowSettings.numbers(one) for one in params]))
        whole = RowSettings(params, settings.table)
        whole.top_p_candidates = 0
        seen = torch.zeros_like(logits, dtype=torch.bool)
        for noise in torch.rand(20, len(params), 1, generator=generator):
            expected = sample(logits, whole, noise, seen, TorchKernels())
            assert torch.equal(sample(logits, settings, noise, seen, looking), expected)


def test_equal_logits_are_kept_or_dropped_together() -> None:
    drawn = torch.tensor(draw(torch.zeros(DRAWS, 6), [SamplingParams(top_k=2)], EVENLY))
    assert drawn.bincount(minlength=6).min() > 0.9 * DRAWS / 6


def test_the_penalty_makes_seen_tokens_less_likely_on_both_sides_of_zero() -> None:
    logits = torch.tensor([[2.0, 1.5, -1.0], [-1.0, -1.5, -3.0]])
    seen = torch.tensor([[True, False, False], [True, False, True]])
    penalty = [SamplingParams(temperature=0, repetition_penalty=2.0)] * 2
    assert draw(logits, penalty, torch.zeros(2, 1), seen) == [1, 1]
    assert draw(logits, penalty, torch.zeros(2, 1), ~seen) == [0, 0]


def test_openais_penalties_are_subtracted_and_the_second_by_count() -> None:
    logits = torch.tensor([[2.0, 1.0, -0.5]])
    counts = torch.tensor([[3.0, 1.0, 0.0]])
    for settings, token in (
        ({"presence_penalty": 1.4}, 0),  # 0.6, -0.4, -0.5
        ({"frequency_penalty": 0.4}, 0),  # 0.8, 0.6, -0.5
        ({"frequency_penalty": 0.6}, 1),  # 0.2, 0.4, -0.5
        ({"frequency_penalty": 2.0}, 2),  # -4, -1, -0.5
        ({"presence_penalty": 1.6, "frequency_penalty": 0.7}, 2),  # -1.7, -1.3, -0.5
        ({"presence_penalty": -2.0}, 0),
    ):
        params = [SamplingParams(temperature=0, **settings)]
        assert draw(logits, params, torch.zeros(1, 1), counts=counts) == [token], settings


def test_the_ends_of_the_noise_draw_nothing_impossible() -> None:
    logits = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]])
    for noise, token in ((0.0, 1), (1 - 2**-23, 2)):
        assert draw(logits, [SamplingParams()], torch.tensor([[noise]])) == [token]


OUT_OF_RANGE: list[tuple[str, float]] = [
    *(("temperature", value) for value in (-0.1, math.nan, math.inf)),
    *(("top_p", value) for value in (0.0, 1.01, math.nan)),
    *(("top_k", -1), ("min_p", 1.5), ("repetition_penalty", 0.0), ("seed", -1)),
    *(("presence_penalty", 2.1), ("frequency_penalty", -2.1)),
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_a_setting_out_of_range_is_named(name: str, value: float) -> None:
    with pytest.raises(UserError, match=f"--{name}"):
        check_ranges(SamplingParams(**{name: value}))


def test_settings_are_saved_as_what_they_change_and_read_back() -> None:
    saved = saved_settings(CHAT_SAMPLING)
    assert saved == {"temperature": 0.8, "min_p": 0.2} and read_settings(saved) == CHAT_SAMPLING
    assert read_settings({}) == SamplingParams() and read_settings({"temperature": 1, "top_k": 9}).top_k == 9
    for hostile in (
        *(None, [], "hot", 1.0, [["temperature", 1]]),
        *({"temperature": value} for value in (-1, 101, math.nan, math.inf, 10**400, "1", None, True, [1], {})),
        *({"top_k": value} for value in (1.5, -1, 10**13)),
        *({"min_p": 2}, {"top_p": 0}, {"seed": 1}, {"unknown": 1}, {"temperature": 1, "unknown": 1}),
    ):
        with pytest.raises(ValueError, match=r"meta\.json") as refused:
            read_settings(hostile)
        assert "\n" not in str(refused.value) and len(str(refused.value)) < 200


def test_uniforms_depend_on_seed_and_number_alone_and_are_even() -> None:
    many = torch.from_numpy(uniforms(7, 100_000))
    assert torch.equal(torch.from_numpy(uniforms(7, 10)), many[:10])
    assert many.min() >= 0 and many.max() <= 1 - 2**-23
    counts = torch.histc(many, bins=100, min=0, max=1)
    assert ((counts - 1000).square() / 1000).sum() < 99 + 5 * math.sqrt(2 * 99)
    # Neighbouring seeds share no numbers, and the numbers stay what they are.
    firsts = torch.stack([torch.from_numpy(uniforms(seed, 4)) for seed in range(2000)])
    assert firsts.unique().numel() > 0.999 * firsts.numel()
    assert uniforms(0, 2).tolist() == UNIFORMS and len(uniforms(2**64, 1)) == 1
    numbers = [path for n in range(4) for path in itertools.product(range(13), repeat=n)]
    assert len({seed_of(1, *path) for path in numbers}) == len(numbers)


@pytest.mark.parametrize("rows", [1, 3])
def test_one_order_of_sums_does_not_stop_sampling(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Where torch refuses cumsum among deterministic algorithms, as it does on CUDA, with or without top_p."""
    cumsum = Tensor.cumsum
    shapes: list[int] = []

    def refused(tensor: Tensor, dim: int) -> Tensor:
        if torch.are_deterministic_algorithms_enabled():
            raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")
        shapes.append(len(tensor))
        return cumsum(tensor, dim=dim)

    logits = P.log().expand(rows, -1)
    noise = torch.full((rows, 1), 0.4)
    params = [SamplingParams(top_p=0.9)]
    expected = draw(logits, params, noise)
    monkeypatch.setattr(Tensor, "cumsum", refused)
    torch.use_deterministic_algorithms(True)
    try:
        assert draw(logits, params, noise) == expected
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert shapes == [max(2, rows)] * 2  # never a single row


def test_flags_replace_the_settings_of_a_checkpoint_within_their_ranges():
    saved = {"temperature": 0.8, "presence_penalty": 0.5}
    assert SamplingFlags().over(saved) == SamplingParams(**saved)
    assert SamplingFlags(temperature=0, top_k=3, seed=7).over(saved) == SamplingParams(
        0, 3, presence_penalty=0.5, seed=7
    )
    for name in set(vars(SamplingFlags())):
        with pytest.raises(UserError, match=f"^--{name} -1"):
            SamplingFlags(**{name: -1})
