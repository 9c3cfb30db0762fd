"""Attention against a plain masked softmax, and the cache against no cache."""

import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from nanochat import attention
from nanochat.attention import KVCache, Segments
from nanochat.kernels import cpu
from nanochat.kernels.cpu import CpuKernels
from nanochat.kernels.decoding import lay_out
from nanochat.kernels.gradients import WrittenKernels
from nanochat.operators import TorchKernels

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


@pytest.fixture(params=["cpu", "cpu-blocks", "cpu-long", "torch", "cuda", "cuda-2.11"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TorchKernels:
    """Matrix products in one block and in several, torch's fused operator in several, and each device's own."""
    if request.param in ("cpu-blocks", "cpu-long", "torch"):
        monkeypatch.setattr(attention, "BLOCK", 3)
    if request.param == "cpu-long":
        monkeypatch.setattr(cpu, "PLAIN_TOKENS", 0)
    if request.param.startswith("cuda"):
        cuda = request.getfixturevalue("cuda_on_cpu")
        monkeypatch.setattr(cuda.CudaKernels, "device_type", None)
        monkeypatch.setattr(cuda, "SHARES_HEADS", request.param == "cuda")
        return cuda.CudaKernels()
    return WrittenKernels() if request.param == "torch" else CpuKernels()


@pytest.fixture(scope="module")
def cuda_on_cpu() -> Iterator[Any]:
    """kernels/cuda.py, with the two operators that only a GPU has by their documented meaning.

    Sequences lie between cumulative lengths; a query attends to `window_size_left` keys before its own place and
    `window_size_right` after it, -1 for no limit (the page of varlen_attn, and Dao-AILab/flash-attention's README).
    """

    def softmaxes(
        q: Tensor, k: Tensor, bounds: Tensor, key_bounds: Tensor, longest: int, longest_key: int, dropout: float,
        is_causal: bool, scale: float, left: int, right: int,
    ) -> Iterator[tuple[slice, Tensor]]:  # fmt: skip
        """Each document's places, and its weights (H, t, s)."""
        assert bounds.dtype == torch.int32 and torch.equal(bounds, key_bounds)
        assert (bounds[0], bounds[-1]) == (0, len(q)) and bounds.diff().max() <= longest == longest_key
        assert dropout == 0
        k = k.repeat_interleave(q.size(1) // k.size(1), dim=1)
        for begin, end in itertools.pairwise(bounds.tolist()):
            place = torch.arange(end - begin)
            distance = place[:, None] - place
            hidden = (distance < -right) if right >= 0 else (distance < 0) & is_causal
            if left >= 0:
                hidden |= distance > left
            scores = torch.einsum("thd,shd->hts", q[begin:end], k[begin:end]) * scale
            yield slice(begin, end), scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)

    def forward(
        q: Tensor, k: Tensor, v: Tensor, *places: Any, scale: float, window_size_left: int, window_size_right: int,
        **others: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        *places, return_debug_mask = places
        assert not return_debug_mask and all(other is None for other in others.values())
        v = v.repeat_interleave(q.size(1) // v.size(1), dim=1)
        outputs = []
        for part, weights in softmaxes(q, k, *places, scale, window_size_left, window_size_right):
            outputs.append(torch.einsum("hts,shd->thd", weights, v[part]))
        nothing = torch.empty(0)
        return torch.cat(outputs), nothing, nothing, nothing, nothing

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, *places: Any, scale: float,
        window_size_left: int, window_size_right: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        *places, _rng_state, _unused = places
        K = k.size(1)
        groups = q.size(1) // K
        k = k.repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)
        grads = [torch.zeros_like(x) for x in (q, k, v)]
        for part, weights in softmaxes(q, k, *places, scale, window_size_left, window_size_right):
            from_values = torch.einsum("thd,shd->hts", grad[part], v[part])
            inner = (grad[part] * out[part]).sum(-1).T[:, :, None]
            score_grad = weights * (from_values - inner) * scale
            grads[0][part] = torch.einsum("hts,shd->thd", score_grad, k[part])
            grads[1][part] = torch.einsum("hts,thd->shd", score_grad, q[part])
            grads[2][part] = torch.einsum("hts,thd->shd", weights, grad[part])
        return grads[0], *(x.unflatten(1, (K, groups)).sum(2) for x in grads[1:])

    pytest.importorskip("torch.nn.attention.varlen")
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    yield importlib.import_module("nanochat.kernels.cuda")
    library._destroy()


@pytest.mark.parametrize("window", [0, 1, 3, 8])
@pytest.mark.parametrize("T", [1, 3, 8, 9, 17])
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
    cache.write(layer, k, v, cache.indices(positions))
    keys, values = cache.read(layer)
    q = q.to(keys.dtype)
    kernels = CpuKernels()
    mask = kernels.prepare_mask(cache.masks(positions, [window])[window])
    out = kernels.cached_attention(q, keys, values, scale=scale, mask=mask)
    cache.position += positions.size(1)
    return out


@pytest.mark.parametrize("has_amx", [True, False])
def test_decoding_in_bf16_is_right_on_every_processor(has_amx: bool) -> None:
    """One query a row, of two, against 20 keys, with the operator of processors with AMX and of others."""
    kernels = CpuKernels(torch.bfloat16)
    kernels.has_amx = has_amx
    q, k, v = (x.bfloat16() for x in random_qkv(2, 20, 4, 2))
    seen = torch.arange(20) <= torch.tensor([19, 7])[:, None]
    mask = kernels.prepare_mask(seen[:, None, None])
    out = kernels.cached_attention(q[:, -1:], k.transpose(1, 2), v.transpose(1, 2), scale=0.7, mask=mask)
    for row, length in enumerate((20, 8)):
        first = slice(row, row + 1)
        last = q[first, -1:].expand(-1, length, -1, -1)  # at each place
        parts = (x.float() for x in (last, k[first, :length], v[first, :length]))
        expected = reference(*parts, 0.7)[:, -1]
        torch.testing.assert_close(out[first, 0].float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("window", [0, 1, 3])
@pytest.mark.parametrize("chunks", [[12], [5, *[1] * 7], [4, 4, 4], [1] * 12, [2, 1, 6, 3]])
def test_cache_in_any_chunks_equals_whole_rows(chunks: list[int], window: int) -> None:
    q, k, v = random_qkv(2, 12, 4, 2)
    cache = KVCache.empty(2, 2, 12, 2, 4, "cpu", torch.float32)
    parts = list(zip(*(x.split(chunks, dim=1) for x in (q, k, v)), strict=True))
    out = torch.cat([cached_attention(cache, *part, window, layer=1) for part in parts], dim=1)
    torch.testing.assert_close(out, reference(q, k, v, 0.7, window), **CLOSE)
    assert cache.position.tolist() == [12, 12]
    assert not cache.keys[0].any(), "the other layer was written"


def test_keys_beyond_attended_len_are_not_read() -> None:
    q, k, v = random_qkv(1, 5, 2, 2)
    cache = KVCache.empty(1, 1, 16, 2, 4, "cpu", torch.float32)
    cache.by_head(cache.keys)[..., 5:, :] = torch.nan
    cache.by_head(cache.values)[..., 5:, :] = torch.nan
    cache.attended_len = 5
    out = cached_attention(cache, q, k, v, 0)
    torch.testing.assert_close(out, reference(q, k, v, 0.7), **CLOSE)
    assert cache.masks(cache.positions(1), [0])[0].shape == (1, 1, 1, 5)


def test_a_cache_that_is_laid_out_anew_reads_the_same() -> None:
    """For more and for fewer tokens, in the same memory, with a token between; what no longer fits is lost."""
    q, k, v = random_qkv(3, 9, 4, 2)
    cache = KVCache.empty(2, 3, 16, 2, 4, "cpu", torch.float32)
    cache.keys.fill_(9.0)  # what earlier rows left there
    memory = cache.keys.data_ptr(), cache.values.data_ptr()
    outs = []
    for stride, first, end in ((6, 0, 4), (6, 4, 5), (16, 5, 7), (8, 7, 8), (12, 8, 9)):
        lay_out(cache, stride, kept=first)
        assert cache.by_head(cache.keys).shape == (2, 3, 2, stride, 4) and cache.attended_len == stride
        outs.append(cached_attention(cache, *(x[:, first:end] for x in (q, k, v)), 0, layer=1))
        assert cache.read(1)[0].is_contiguous()  # one matrix after the other: nothing is copied to multiply it
    torch.testing.assert_close(torch.cat(outs, dim=1), reference(q, k, v, 0.7), **CLOSE)
    assert (cache.keys.data_ptr(), cache.values.data_ptr()) == memory


def test_padding_does_not_reach_the_keys_of_other_heads_and_rows() -> None:
    """It lands on the last positions that no token of the row has."""
    cache = KVCache.empty(1, 2, 8, 2, 4, "cpu", torch.float32)
    lay_out(cache, 8, kept=0)
    cache.max_position = 40
    cache.position.fill_(4)
    _, k, v = random_qkv(2, 6, 4, 2)
    positions = cache.positions(6)
    assert positions.tolist() == [[4, 5, 6, 7, 7, 7]] * 2
    cache.write(0, k, v, cache.indices(positions))
    assert not cache.by_head(cache.keys)[..., :4, :].any()


@pytest.mark.parametrize(("window", "heads"), [(0, (4, 2)), (1, (2, 2)), (5, (4, 2)), (16, (2, 2)), (100, (4, 2))])
def test_documents_of_a_row_do_not_attend_to_each_other(
    kernels: TorchKernels, window: int, heads: tuple[int, int]
) -> None:
    """Every document of a row attends as it would alone, and has the gradients that it would have alone."""
    inputs = [x.requires_grad_() for x in random_qkv(2, 50, *heads)]
    numbers = (torch.rand(2, 50) < 0.2).cumsum(1)
    out = kernels.attention(*inputs, scale=0.3, window=window, segments=Segments.from_numbers(numbers))
    weights = torch.randn_like(out)
    gradients = torch.autograd.grad((out * weights).sum(), inputs)
    for row in range(2):
        for number in numbers[row].unique():
            own = (numbers[row] == number).nonzero().flatten()
            document = [x[row : row + 1, own].detach().requires_grad_() for x in inputs]
            alone = reference(*document, 0.3, window)
            torch.testing.assert_close(out[row : row + 1, own], alone, **CLOSE)
            alone_gradients = torch.autograd.grad((alone * weights[row : row + 1, own]).sum(), document)
            for gradient, expected in zip(gradients, alone_gradients, strict=True):
                torch.testing.assert_close(gradient[row : row + 1, own], expected, rtol=1e-5, atol=1e-5)
    one_document = Segments.from_numbers(torch.zeros_like(numbers))
    whole = kernels.attention(*inputs, scale=0.3, window=window, segments=one_document)
    torch.testing.assert_close(whole, kernels.attention(*inputs, scale=0.3, window=window), **CLOSE)


def test_segments_know_where_documents_end() -> None:
    numbers = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1]])  # the last and the first have one number
    segments = Segments.from_numbers(numbers)
    assert segments.ends == [3, 6, 10, 12]
    assert segments.numbers.tolist() == [[1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 2, 2]]
    again = Segments.from_numbers(torch.tensor([[0, 0, 1, 0]]))  # the last one is no part of the first
    assert again.numbers.tolist() == [[1, 1, 2, 3]] and again.ends == [2, 3, 4]
    assert segments.bounds.tolist() == [0, 3, 6, 10, 12] and segments.bounds.dtype == torch.int32
    assert [segments.first_key(start) for start in range(6)] == [0, 0, 0, 0, 3, 3]
