"""NF4: weights that are not trained in 4.5 bits each (QLoRA), in plain torch, so that it runs on every device.

Source: Dettmers et al. 2023, QLoRA, appendix E. Trained weights are about normal, so the 16 values are quantiles of a
normal distribution: dense around 0, where most weights are. One of them is 0 itself. A block of 64 weights shares one
factor, its largest absolute value: an outlier only spoils the resolution of its block.

    weights            0.030   -0.012    0.001   -0.060      their largest is 0.060
    divided by it      0.500   -0.200    0.017   -1.000
    nearest value      0.441   -0.185    0.000   -1.000      the values number 12, 5, 7 and 0
    read back          0.026   -0.011    0.000   -0.060

The widest gap, from -1 to -0.70, bounds the error: at most 0.152 of the block's largest weight. For a million normal
weights the error is 9.2% of their root mean square (2026-11-22).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nanochat.experts.layer import ExpertLinear, grouped_product
from nanochat.gpt import Linear
from nanochat.kernels.gradients import StackedLinear
from nanochat.kernels.grouped import Groups

VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
BLOCK = 64
PIECE = 1 << 18  # blocks that are read back at a time: 17 million weights, whose fp32 values take 67 MB


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight of n elements in 4 bits each: codes (n / 64, 32) in uint8, two to a byte, and factors (n / 64,)."""
    flat = weight.detach().float().flatten()
    blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    factors = blocks.abs().amax(dim=1)
    values = torch.tensor(VALUES, device=weight.device)
    # The nearest value: count the midpoints between neighbours that lie below.
    midpoints = (values[1:] + values[:-1]) / 2
    scaled = blocks / factors.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    codes = torch.bucketize(scaled, midpoints, out_int32=True).to(torch.uint8)
    return codes[:, 0::2] * 16 + codes[:, 1::2], factors


def dequantize(codes: Tensor, factors: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The weight that `quantize` has rounded, in its shape."""
    # A byte is looked up as a pair of values in a table of 256: a plain embedding, which every device has, in place of
    # shifts and masks of single bits.
    table = _pairs(codes.device)
    out = torch.empty(len(codes), BLOCK, dtype=dtype, device=codes.device)
    for target, packed, factor in zip(out.split(PIECE), codes.split(PIECE), factors.split(PIECE), strict=True):
        values = F.embedding(packed.int(), table).flatten(1)  # (blocks, 32, 2) -> (blocks, 64)
        target.copy_(values.mul_(factor[:, None]))
    return out.flatten()[: math.prod(shape)].view(*shape)


_tables: dict[torch.device, Tensor] = {}


def _pairs(device: torch.device) -> Tensor:
    """(256, 2): the two values of each byte."""
    if device in _tables:
        return _tables[device]
    with torch.inference_mode(False):  # the first call may be in inference mode; training must be able to use it too
        values = torch.tensor(VALUES)
        table = torch.stack((values.repeat_interleave(16), values.repeat(16)), dim=1).to(device)
    if type(table) is Tensor:  # not one without data, of a dry run: the process may go on
        _tables[device] = table
    return table


class NF4Linear(nn.Module):
    """A linear layer of a GPT, in its place, whose weight (O, I) is in 4 bits."""

    codes: Tensor
    factors: Tensor

    def __init__(self, linear: Linear | ExpertLinear):
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        self.is_stacked = isinstance(linear, StackedLinear)
        self.bias = linear.bias if isinstance(linear, Linear) else None
        # Buffers, which no rank shards: in most versions of torch FSDP2 refuses parameters of integers (pytorch issue
        # 177844). So under fsdp each rank holds 4.5 bits of every weight. bf16 takes 16 divided by the number of ranks,
        # which is less from 4 ranks on.
        blocks = math.ceil(linear.weight.numel() / BLOCK)
        device = linear.weight.device
        codes = torch.empty(blocks, BLOCK // 2, dtype=torch.uint8, device=device)
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("factors", torch.empty(blocks, device=device), persistent=False)

    @torch.no_grad()
    def set_weight(self, weight: Tensor) -> None:
        """Take over a whole weight (O, I)."""
        codes, factors = quantize(weight)
        self.codes.copy_(codes)
        self.factors.copy_(factors)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The whole weight (O, I)."""
        return dequantize(self.codes, self.factors, (self.out_features, self.in_features), dtype)

    def forward(self, x: Tensor) -> Any:
        """x (..., I) -> (..., O), or the result of a StackedLinear."""
        y = _Product.apply(x, self.codes, self.factors, (self.out_features, self.in_features), self.is_stacked)
        return y if self.bias is None else y + self.bias.to(x.dtype)


class NF4Experts(NF4Linear):
    """The same in the place of the experts' layer, for the matrices of all of them together."""

    def __init__(self, linear: ExpertLinear):
        super().__init__(linear)
        self.kernels = linear.kernels

    def forward(self, x: Tensor, groups: Groups) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """x (rows, I), sorted by expert -> (rows, O)"""

        def compute(x: Tensor) -> Tensor:
            return grouped_product(self.kernels, x, self.dequantized(x.dtype), groups)

        # The backward pass reads the weights back once more.
        return checkpoint(compute, x, use_reentrant=False, preserve_rng_state=False)


class _Product(torch.autograd.Function):
    """x W^T. Backward reads W back once more, so that no step keeps it, and needs no x: W is not trained."""

    @staticmethod
    def forward(
        ctx, x: Tensor, codes: Tensor, factors: Tensor, shape: tuple[int, int], is_stacked: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.save_for_backward(codes, factors)
        ctx.plan = (shape, is_stacked)
        matrix = dequantize(codes, factors, shape, x.dtype)
        if not is_stacked:
            return F.linear(x, matrix)
        y = x.flatten(0, -2)[None] @ matrix.unflatten(0, (3, -1)).mT  # (3, tokens, O / 3)
        y = y.unflatten(1, x.shape[:-1])
        return y[:2], y[2]

    @staticmethod
    def backward(ctx, *grads: Tensor):
        shape, is_stacked = ctx.plan
        codes, factors = ctx.saved_tensors
        grad = torch.cat((*grads[0], grads[1]), dim=-1) if is_stacked else grads[0]
        return grad @ dequantize(codes, factors, shape, grad.dtype), None, None, None, None
