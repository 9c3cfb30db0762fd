"""Attention against a plain masked softmax, and the cache against no cache."""

import pytest
import torch
from torch import Tensor

from nanochat.attention import KVCache, Segments
from nanochat.kernels import cpu, torch_
from nanochat.kernels.cpu import CpuKernels
from nanochat.kernels.torch_ import TorchKernels

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def reference(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int = 0) -> Tensor:
    """Softmax over everything a query may see, one big matrix; (B, T, H, D) as in the module."""
    groups = q.size(2) // k.size(2)
    k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * scale
    T = q.size(1)
    distance = torch.arange(T)[:, None] - torch.arange(T)[None, :]
    hidden = (distance < 0) | ((distance >= window) if window else torch.zeros(T, T, dtype=torch.bool))
    return torch.einsum("bhts,bshd->bthd", scores.masked_fill(hidden, -torch.inf).softmax(dim=-1), v)


def random_qkv(B: int, T: int, H: int, K: int, D: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, T, H, D), torch.randn(B, T, K, D), torch.randn(B, T, K, D)


# ---------------------------------------------------------------------- whole rows


@pytest.fixture(params=["cpu", "cpu-blocks", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TorchKernels:
    """Matrix products in one block and in several, and torch's fused operator."""
    if request.param == "cpu-blocks":
        monkeypatch.setattr(cpu, "PLAIN_BLOCK", 3)
    return TorchKernels() if request.param == "torch" else CpuKernels()


def test_device_and_length_choose_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    for module, name in ((cpu, "plain_attention"), (torch_, "windowed_attention"), (torch_, "fused_attention")):
        monkeypatch.setattr(module, name, lambda q, k, v, name=name, **_: taken.append(name) or q)
    monkeypatch.setattr(cpu, "PLAIN_TOKENS", 8)
    for kernels, T, window in (
        (CpuKernels(), 8, 3),
        (CpuKernels(), 9, 3),
        (TorchKernels(), 8, 3),
        (CpuKernels(), 9, 9),
    ):
        kernels.attention(*random_qkv(1, T, 1, 1), scale=1.0, window=window)
    assert taken == ["plain_attention", "windowed_attention", "windowed_attention", "fused_attention"]


@pytest.mark.parametrize("window", [0, 1, 2, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("T", [1, 2, 3, 4, 7, 8, 9, 15, 16, 17])
def test_windowed_attention_is_a_masked_softmax(kernels: TorchKernels, T: int, window: int) -> None:
    inputs = [x.requires_grad_() for x in random_qkv(2, T, 4, 2)]
    out, expected = kernels.attention(*inputs, scale=0.7, window=window), reference(*inputs, 0.7, window)
    torch.testing.assert_close(out, expected, **CLOSE)
    weight = torch.randn_like(out)
    gradients = torch.autograd.grad((out * weight).sum(), inputs)
    expected_gradients = torch.autograd.grad((expected * weight).sum(), inputs)
    # A gradient is a sum of terms of both signs, and its rounding is that of the terms: a gradient of 0 has one too.
    largest = max(gradient.abs().amax().item() for gradient in expected_gradients)
    for got, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6 * max(1.0, largest))


@pytest.mark.parametrize(("H", "K"), [(1, 1), (4, 4), (4, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize("window", [0, 3])
def test_query_heads_share_key_heads_in_order(kernels: TorchKernels, H: int, K: int, window: int) -> None:
    q, k, v = random_qkv(3, 10, H, K)
    torch.testing.assert_close(
        kernels.attention(q, k, v, scale=0.5, window=window), reference(q, k, v, 0.5, window), **CLOSE
    )


def test_a_window_of_one_returns_the_values(kernels: TorchKernels) -> None:
    q, k, v = random_qkv(2, 9, 2, 2)
    torch.testing.assert_close(kernels.attention(q, k, v, scale=1.0, window=1), v, **CLOSE)


def test_bfloat16_is_near(kernels: TorchKernels) -> None:
    q, k, v = random_qkv(2, 9, 2, 2)
    out = kernels.attention(*(x.bfloat16() for x in (q, k, v)), scale=0.5, window=4)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), reference(q, k, v, 0.5, 4), rtol=0.05, atol=0.05)


# ---------------------------------------------------------------------- with a cache


def cached_attention(
    cache: KVCache, q: Tensor, k: Tensor, v: Tensor, window: int, layer: int = 0, scale: float = 0.7
) -> Tensor:
    """One pass of one layer, as the model and the engine do it between them; `position` moves on."""
    positions = cache.positions(q.size(1))
    cache.write(layer, k, v, positions)
    keys, values = cache.read(layer)
    q = q.to(keys.dtype)
    out = CpuKernels().cached_attention(q, keys, values, scale=scale, mask=cache.masks(positions, [window])[window])
    cache.position += positions.size(1)
    return out


@pytest.mark.parametrize("window", [0, 1, 3, 5])
@pytest.mark.parametrize("chunks", [[12], [5, 1, 1, 1, 1, 1, 1, 1], [4, 4, 4], [1] * 12, [7, 5], [2, 1, 6, 3]])
def test_cache_in_any_chunks_equals_whole_rows(chunks: list[int], window: int) -> None:
    q, k, v = random_qkv(2, 12, 4, 2)
    cache = KVCache.empty(2, 2, 16, 2, 4, "cpu", torch.float32)
    parts = list(zip(*(x.split(chunks, dim=1) for x in (q, k, v)), strict=True))
    out = torch.cat([cached_attention(cache, *part, window, layer=1) for part in parts], dim=1)
    torch.testing.assert_close(out, reference(q, k, v, 0.7, window), **CLOSE)
    assert cache.position.tolist() == [12, 12]
    assert not cache.keys[0].any(), "the other layer was written"


@pytest.mark.parametrize("window", [0, 3])
def test_rows_of_different_lengths_do_not_see_the_filling(window: int) -> None:
    lengths, decoded = torch.tensor([5, 2, 7]), 4
    q, k, v = random_qkv(3, 11, 4, 2)  # row r is q[r, : lengths[r] + decoded]
    cache = KVCache.empty(1, 3, 12, 2, 4, "cpu", torch.float32)
    filling = torch.arange(7) >= lengths[:, None]  # behind the short rows, as a batch of prompts has it
    prompt = [x[:, :7].masked_fill(filling[..., None, None], 99.0) for x in (q, k, v)]
    cached_attention(cache, *prompt, window)
    cache.position.copy_(lengths)
    rows = torch.arange(3)
    outs = []
    for _ in range(decoded):
        at = cache.position.clone()
        outs.append(cached_attention(cache, *(x[rows, at][:, None] for x in (q, k, v)), window)[:, 0])
    for row, length in enumerate(lengths.tolist()):
        end = length + decoded
        alone = reference(*(x[row : row + 1, :end] for x in (q, k, v)), 0.7, window)[0, length:]
        torch.testing.assert_close(torch.stack([out[row] for out in outs]), alone, **CLOSE)


def test_keys_beyond_attended_len_are_not_read() -> None:
    q, k, v = random_qkv(1, 5, 2, 2)
    cache = KVCache.empty(1, 1, 16, 2, 4, "cpu", torch.float32)
    cache.keys[:, :, 5:] = torch.nan
    cache.values[:, :, 5:] = torch.nan
    cache.attended_len = 5
    out = cached_attention(cache, q, k, v, 0)
    torch.testing.assert_close(out, reference(q, k, v, 0.7), **CLOSE)
    assert cache.masks(cache.positions(1), [0])[0].shape == (1, 1, 1, 5)


def test_masks_are_made_once_for_each_window() -> None:
    cache = KVCache.empty(3, 2, 6, 1, 4, "cpu", torch.float32)
    cache.position += torch.tensor([3, 0])
    masks = cache.masks(cache.positions(2), [2, 0, 2])
    assert set(masks) == {0, 2}
    assert masks[0].shape == (2, 1, 2, 6)
    assert masks[0][0, 0].int().tolist() == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]]
    assert masks[2][0, 0].int().tolist() == [[0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0]]
    assert masks[2][1, 0].int().tolist() == [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]]


def test_rows_copied_from_one_begin_alike_and_part() -> None:
    q, k, v = random_qkv(1, 6, 4, 2)
    cache = KVCache.empty(1, 4, 10, 2, 4, "cpu", torch.float32)
    cached_attention(cache.view(1, 2), *(x[:, :4] for x in (q, k, v)), 0)
    cache.copy_rows(torch.tensor([1, 1, 1]), torch.tensor([0, 2, 3]), 4)
    cache.position.fill_(4)
    ends = [torch.randn(4, 2, heads, 4) for heads in (4, 2, 2)]
    out = cached_attention(cache, *ends, 0)
    for row in range(4):
        whole = [torch.cat((x[:, :4], end[row : row + 1]), dim=1) for x, end in zip((q, k, v), ends, strict=True)]
        torch.testing.assert_close(out[row], reference(*whole, 0.7)[0, 4:], **CLOSE)


def test_a_cache_of_lower_precision_rounds_what_it_keeps() -> None:
    q, k, v = random_qkv(1, 3, 2, 2)
    cache = KVCache.empty(1, 1, 4, 2, 4, "cpu", torch.bfloat16)
    out = cached_attention(cache, q, k, v, 0)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), reference(q, k, v, 0.7), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("window", [0, 1, 5, 16, 100])
def test_documents_of_a_row_do_not_attend_to_each_other(kernels: TorchKernels, window: int) -> None:
    """Every document of a row attends as it would alone."""
    q, k, v = random_qkv(2, 50, 4, 2)
    numbers = (torch.rand(2, 50) < 0.2).cumsum(1)
    segments = Segments(numbers, kernels.prepare_mask)
    out = kernels.attention(q, k, v, scale=0.3, window=window, segments=segments)
    for row in range(2):
        for number in numbers[row].unique():
            own = (numbers[row] == number).nonzero().flatten()
            document = [x[row : row + 1, own] for x in (q, k, v)]
            torch.testing.assert_close(out[row : row + 1, own], reference(*document, 0.3, window), **CLOSE)
    one_document = Segments(torch.zeros_like(numbers), kernels.prepare_mask)
    whole = kernels.attention(q, k, v, scale=0.3, window=window, segments=one_document)
    torch.testing.assert_close(whole, kernels.attention(q, k, v, scale=0.3, window=window), **CLOSE)
