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
class Operator:
    """An operator to time: `prepare` makes its inputs on a device and returns the call."""

    prepare: Callable[[Device, Sizes], Callable[[], Tensor]]
    tolerance: float  # relative to the result's norm
    bytes: Callable[[Sizes], float]  # that its launches must read and write at least
    launches: Callable[[Sizes], int] = lambda sizes: 1
    is_bound_by_bytes: bool = True  # else by its products: then a copy of as many bytes says nothing about it
    times_copy: float = TIMES_COPY  # how many times as long as copies of its bytes it may take


def write_cache(device: Device, sizes: Sizes) -> Callable[[], Tensor]:
    """A token of each row into one layer of the cache, each row at its own position."""
    rows = sizes.rows
    cache = KVCache.empty(1, rows, sizes.tokens, H, D, device.torch_device, torch.bfloat16, key_offset=True)
    k = device.to_device(draw(rows, 1, H, D).bfloat16())
    positions = device.to_device(torch.arange(rows)[:, None] * 7 % (sizes.tokens - 1))

    def work() -> Tensor:
        cache.write(0, k, k, cache.indices(positions))
        return cache.read(0)[0]

    return work


def top_50(device: Device, sizes: Sizes) -> Callable[[], Tensor]:
    logits = device.to_device(draw(sizes.rows, V))
    return lambda: logits.topk(50, dim=-1).values


def cumulative_sum(device: Device, sizes: Sizes) -> Callable[[], Tensor]:
    probabilities = device.to_device(draw(sizes.rows, V).softmax(dim=-1))
    return lambda: probabilities.cumsum(dim=-1)


def read_back(device: Device, sizes: Sizes) -> Callable[[], Tensor]:
    """A matrix in 4 bits, read back in bf16: a look-up of 8 bytes for each byte of it."""
    blocks = math.prod(sizes.matrix) // nf4.BLOCK
    codes = torch.randint(256, (blocks, nf4.BLOCK // 2), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    codes = device.to_device(codes)
    factors = device.to_device(draw(blocks).abs())
    return lambda: nf4.dequantize(codes, factors, sizes.matrix, torch.bfloat16)


def embedding_backward(device: Device, sizes: Sizes) -> Callable[[], Tensor]:
    """The gradient of a table: rows of tokens that occur several times add up."""
    tokens = sizes.rows * sizes.tokens
    ids = device.to_device(torch.randint(32768, (tokens,), generator=torch.Generator().manual_seed(0)))
    table = torch.zeros(32768, C, device=device.torch_device, requires_grad=True)
    out_grad = device.to_device(draw(tokens, C))
    out = F.embedding(ids, table)
    return lambda: torch.autograd.grad(out, table, out_grad, retain_graph=True)[0]


def experts(device: Device, sizes: Sizes) -> Callable[[], Tensor]:
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

    return work


def packed_attention(place: int) -> Callable[[Device, Sizes], Callable[[], Tensor]]:
    """Attention within documents of one length, forward and backward; the gradient of v."""

    def prepare(device: Device, sizes: Sizes) -> Callable[[], Tensor]:
        total = sizes.rows * sizes.tokens
        numbers = (torch.arange(total) * sizes.documents[place] // total).view(sizes.rows, sizes.tokens)
        segments = Segments.from_numbers(numbers).to(device.to_device)
        drawn = draw(3, sizes.rows, sizes.tokens, H, D)
        q, k, v = (device.to_device(part.to(device.dtype)).requires_grad_() for part in drawn)

        def work() -> Tensor:
            out = device.kernels.attention(q, k, v, scale=D**-0.5, segments=segments)
            # In a document of one token the gradients of q and k are 0: there is nothing to compare.
            return torch.autograd.grad(out.float().square().sum(), (q, k, v))[2]

        return work

    return prepare


def bytes_of_attention(sizes: Sizes) -> float:
    return 3 * 4 * 2 * sizes.rows * sizes.tokens * C  # q, k, v and the output, forward once and backward twice


OPERATORS = {
    "cache_write": Operator(write_cache, 0.0, lambda sizes: 4 * sizes.rows * C * 2, lambda sizes: 4),
    "top_50": Operator(top_50, 0.0, lambda sizes: 4 * sizes.rows * V, times_copy=16),
    "cumulative_sum": Operator(cumulative_sum, 1e-4, lambda sizes: 8 * sizes.rows * V, times_copy=25),
    "nf4_read_back": Operator(
        read_back,
        0.01,
        # For each byte, which is two weights: 1 to 4 bytes, a look-up of 8, a product in place, a copy in bf16.
        lambda sizes: (1 + 4 + 4 + 8 + 8 + 8 + 8 + 4) / 2 * math.prod(sizes.matrix),
        lambda sizes: 4 * math.ceil(math.prod(sizes.matrix) / nf4.BLOCK / nf4.PIECE),
    ),
    "embedding_backward": Operator(
        embedding_backward,
        1e-3,
        lambda sizes: 4 * C * (32768 + 3 * sizes.rows * sizes.tokens),
        lambda sizes: 2,  # zeros, and the sums: a gradient is added to what is read
        times_copy=12,
    ),
    "experts_one_without_rows": Operator(
        experts,
        0.02,
        # Rows and their gradient, and each matrix, three times.
        lambda sizes: 3 * 2 * (2 * sizes.rows * sizes.tokens * C + 8 * C * C),
        is_bound_by_bytes=False,
    ),
    "few_documents": Operator(packed_attention(0), 0.03, bytes_of_attention, is_bound_by_bytes=False),
    "many_documents": Operator(packed_attention(1), 0.03, bytes_of_attention, is_bound_by_bytes=False),
    "most_documents": Operator(packed_attention(2), 0.03, bytes_of_attention, is_bound_by_bytes=False),
}
TRAINING = ("experts_one_without_rows", "few_documents", "many_documents", "most_documents")


@pytest.mark.parametrize("name", OPERATORS)
def test_speed(kind: str, sizes: Sizes, measured: Callable[..., None], name: str):
    """The CPU's result, in little more time than copies of as many bytes in as many launches."""
    device = devices.init(kind)
    if name in TRAINING and not device.can_train:
        pytest.skip(f"{device.name} is made for inference")
    judge(device, OPERATORS[name], sizes, measured)


def judge(device: Device, operator: Operator, sizes: Sizes, measured: Callable[..., None]) -> None:
    work = operator.prepare(device, sizes)
    result = work()
    error = relative_error(result, operator.prepare(devices.init("cpu"), sizes)())
    milliseconds = median_ms(device, work)
    measured(ms=milliseconds, gigabytes_per_second=operator.bytes(sizes) / milliseconds / 1e6, relative_error=error)
    assert error <= operator.tolerance
    if sizes.judges_speed and operator.is_bound_by_bytes:
        times_copy = milliseconds / median_ms(device, copies(device, operator, sizes))
        measured(times_copy=times_copy)
        assert times_copy <= operator.times_copy


def copies(device: Device, operator: Operator, sizes: Sizes) -> Callable[[], None]:
    """Copies that move the operator's bytes in as many launches: what the operator takes if only bytes count."""
    launches = operator.launches(sizes)
    size = max(1, round(operator.bytes(sizes) / launches / 2))  # a copy reads each byte and writes it
    part = torch.zeros(size, dtype=torch.uint8, device=device.torch_device)

    def work() -> None:
        for _ in range(launches):
            part.clone()

    work()  # the first one takes memory
    return work
