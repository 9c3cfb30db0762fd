"""The operators of a device against the CPU: results, gradients, and the time of those whose speed nobody knows.

Legend: B rows, T tokens, H heads, D head dim, C width, V vocab.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from simnpu import cases
from torch import Tensor

from nanochat import device as devices
from nanochat.adapters import nf4
from nanochat.attention import KVCache, Segments
from nanochat.device import Device
from nanochat.experts.layer import grouped_product
from nanochat.kernels.grouped import Groups
from on_device.sizes import Sizes, draw, init, median_ms, relative_error

# A slower operator is not limited by its bytes: its algorithm is wrong for the card, or it runs on a slow AI CPU. Those
# that sort, add in order or scatter may take twice as many times as on an NVIDIA H200 (2026-11-27).
TIMES_COPY = 3.0
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.03}  # relative to a result's norm
C = 768
H = 6
D = 128
V = 151_936  # Qwen3's vocabulary
Prepare = Callable[[Device, Sizes], "Timed"]  # makes an operator's inputs on a device


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", cases.KERNELS)
def test_kernel(kind: str, measured: Callable[..., None], name: str, dtype: str):
    """Each operator of the model, forward and backward, gives what the CPU gives."""
    init(kind, dtype)
    expected = torch.tensor(cases.kernel_gradients("cpu", "float32", name))
    found = torch.tensor(cases.kernel_gradients(kind, dtype, name))
    error = relative_error(found, expected)
    measured(relative_error=error)
    assert error <= TOLERANCES[dtype]


# ---------------------------------------------------------------------- timed


@dataclass(frozen=True)
class Timed:
    """A call to time, whose inputs are on the device."""

    work: Callable[[], Tensor]
    tolerance: float  # relative to the result's norm
    bytes: float = 0.0  # that its launches must read and write at least; 0: its products take the time, not its bytes
    launches: int = 1
    times_copy: float = TIMES_COPY  # how many times as long as copies of its bytes it may take


def cache_write(device: Device, sizes: Sizes) -> Timed:
    """A token of each row into one layer of the cache, each row at its own position."""
    rows = sizes.rows
    cache = KVCache.empty(1, rows, sizes.tokens, H, D, device.torch_device, torch.bfloat16)
    k = device.to_device(draw(rows, 1, H, D).bfloat16())
    positions = device.to_device(torch.arange(rows)[:, None] * 7 % (sizes.tokens - 1))

    def work() -> Tensor:
        cache.write(0, k, k, cache.indices(positions))
        return cache.read(0)[0]

    return Timed(work, 0.0, 4 * rows * C * 2, launches=3)


def top_50(device: Device, sizes: Sizes) -> Timed:
    logits = device.to_device(draw(sizes.rows, V))
    return Timed(lambda: logits.topk(50, dim=-1).values, 0.0, 4 * sizes.rows * V, times_copy=16)


def cumulative_sum(device: Device, sizes: Sizes) -> Timed:
    probabilities = device.to_device(draw(sizes.rows, V).softmax(dim=-1))
    return Timed(lambda: probabilities.cumsum(dim=-1), 1e-4, 8 * sizes.rows * V, times_copy=25)


def nf4_read_back(device: Device, sizes: Sizes) -> Timed:
    """A matrix in 4 bits, read back in bf16: a look-up of 8 bytes for each byte of it."""
    size = math.prod(sizes.matrix)
    blocks = size // nf4.BLOCK
    codes = torch.randint(256, (blocks, nf4.BLOCK // 2), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    codes = device.to_device(codes)
    factors = device.to_device(draw(blocks).abs())
    # For each byte, which is two weights: 1 to 4 bytes, a look-up of 8, a product in place, a copy in bf16.
    moved = (1 + 4 + 4 + 8 + 8 + 8 + 8 + 4) / 2 * size
    launches = 4 * math.ceil(blocks / nf4.PIECE)
    return Timed(lambda: nf4.dequantize(codes, factors, sizes.matrix, torch.bfloat16), 0.01, moved, launches)


def embedding_backward(vocab_size: int) -> Prepare:
    """The gradient of a table: rows of tokens that occur several times add up."""

    def prepare(device: Device, sizes: Sizes) -> Timed:
        tokens = sizes.rows * sizes.tokens
        rows = vocab_size if sizes.judges_speed else sizes.vocab_size
        ids = device.to_device(torch.randint(rows, (tokens,), generator=torch.Generator().manual_seed(0)))
        table = torch.zeros(rows, C, device=device.torch_device, requires_grad=True)
        out_grad = device.to_device(draw(tokens, C))
        out = F.embedding(ids, table)
        return Timed(
            lambda: torch.autograd.grad(out, table, out_grad, retain_graph=True)[0], 1e-3,
            4 * C * (rows + 3 * tokens), launches=2, times_copy=12,  # zeros, and the sums, which read what they add to
        )  # fmt: skip

    return prepare


def dot_products(device: Device, sizes: Sizes) -> Timed:
    """The gradients of a block's two scales (`mix`), 25 million bf16 numbers each: CANN may add them up on one core."""
    x = device.to_device(draw(sizes.rows, sizes.tokens, C).to(device.dtype)).requires_grad_()
    scales = [torch.full((), 0.5, device=device.torch_device, dtype=device.dtype, requires_grad=True) for _ in "ab"]
    out = device.kernels.mix(x, x, *scales)[0]
    # Each dot product reads 2 tensors, and may write and read a product; the gradients of x and `first` move 5.
    moved = 13 * x.numel() * x.element_size()
    return Timed(
        lambda: torch.stack(torch.autograd.grad(out, scales, x.detach(), retain_graph=True)), 0.03, moved, launches=6
    )


def experts(device: Device, sizes: Sizes) -> Timed:
    """Products of rows in groups (experts/), forward and backward; all gradients. One group is empty: its matrix must
    have a gradient of 0, not what was in memory."""
    rows = sizes.rows * sizes.tokens
    counts = torch.tensor([rows // 8] * 6 + [0, rows - 6 * (rows // 8)])
    groups = Groups(rows, device.to_device(counts))
    x = device.to_device(draw(rows, C).to(device.dtype)).requires_grad_()
    weight = device.to_device(draw(8 * C, C)).requires_grad_()
    toward = device.to_device(draw(rows, C).to(device.dtype))

    def work() -> Tensor:
        out = grouped_product(device.kernels, x, weight, groups)
        gradients = torch.autograd.grad(out, (x, weight), toward)
        return torch.cat([part.float().flatten() for part in (out, *gradients)])

    return Timed(work, 0.02)


def around_experts(step: str) -> Prepare:
    """What experts/layer.py does around the products of 8 experts, of which each token has 2."""

    def prepare(device: Device, sizes: Sizes) -> Timed:
        tokens = sizes.rows * sizes.tokens
        pairs = device.to_device(torch.randperm(2 * tokens, generator=torch.Generator().manual_seed(0)))
        order = torch.arange(2 * tokens, dtype=torch.int32, device=device.torch_device)
        rows = device.to_device(draw(2 * tokens, C).to(device.dtype))
        weights = device.to_device(draw(tokens, 2, 1).to(device.dtype))
        moved = rows.numel() * rows.element_size()
        if step == "scatter":
            return Timed(lambda: torch.empty_like(order).scatter_(0, pairs, order), 0.0, 32 * tokens)
        if step == "gather":
            return Timed(lambda: rows.index_select(0, pairs), 0.01, 2 * moved)
        # The product is written, and read by the sum.
        return Timed(lambda: (weights * rows.view(tokens, 2, C)).sum(dim=1), 0.02, 3.5 * moved, launches=2)

    return prepare


def packed_attention(place: int) -> Prepare:
    """Attention within documents of one length, forward and backward; the gradient of v."""

    def prepare(device: Device, sizes: Sizes) -> Timed:
        total = sizes.rows * sizes.tokens
        numbers = (torch.arange(total) * sizes.documents[place] // total).view(sizes.rows, sizes.tokens)
        segments = Segments.from_numbers(numbers).to(device.to_device)
        drawn = draw(3, sizes.rows, sizes.tokens, H, D)
        q, k, v = (device.to_device(part.to(device.dtype)).requires_grad_() for part in drawn)

        def work() -> Tensor:
            out = device.kernels.attention(q, k, v, scale=D**-0.5, segments=segments)
            # In a document of one token the gradients of q and k are 0: there is nothing to compare.
            return torch.autograd.grad(out.float().square().sum(), (q, k, v))[2]

        return Timed(work, 0.03)

    return prepare


DECODING: dict[str, Prepare] = {
    "cache_write": cache_write, "top_50": top_50, "cumulative_sum": cumulative_sum, "nf4_read_back": nf4_read_back,
}  # fmt: skip
TRAINING: dict[str, Prepare] = {
    "embedding_32768": embedding_backward(32768), "embedding_151936": embedding_backward(V),
    "dot_products": dot_products, "experts_one_without_rows": experts,
    **{f"{step}_of_experts": around_experts(step) for step in ("scatter", "gather", "sum")},
    "documents_few": packed_attention(0), "documents_many": packed_attention(1), "documents_most": packed_attention(2),
}  # fmt: skip


@pytest.mark.parametrize("name", [*DECODING, *TRAINING])
def test_speed(kind: str, sizes: Sizes, measured: Callable[..., None], name: str):
    """The CPU's result, in little more time than copies of as many bytes in as many launches."""
    device = devices.init(kind)
    if name in TRAINING and not device.can_train:
        pytest.skip(f"{device.name} is made for inference")
    judge(device, (DECODING | TRAINING)[name], sizes, measured)


def judge(device: Device, prepare: Prepare, sizes: Sizes, measured: Callable[..., None]) -> None:
    timed = prepare(device, sizes)
    error = relative_error(timed.work(), prepare(devices.init("cpu"), sizes).work())
    milliseconds = median_ms(device, timed.work)
    measured(ms=milliseconds, relative_error=error)
    assert error <= timed.tolerance
    if not timed.bytes:
        return
    measured(gigabytes_per_second=timed.bytes / milliseconds / 1e6)
    if sizes.judges_speed:
        times_copy = milliseconds / median_ms(device, copies(device, timed))
        measured(times_copy=times_copy)
        assert times_copy <= timed.times_copy


def copies(device: Device, timed: Timed) -> Callable[[], None]:
    """Copies that move the operator's bytes in as many launches: what the operator takes if only bytes count."""
    size = max(1, round(timed.bytes / timed.launches / 2))  # a copy reads each byte and writes it
    part = torch.zeros(size, dtype=torch.uint8, device=device.torch_device)

    def work() -> None:
        for _ in range(timed.launches):
            part.clone()

    work()  # the first one takes memory
    return work
