"""The blocks' matrix products in FP8, for pretraining (`--fp8`) on GPUs from Ada and Hopper on.

Such a chip multiplies 8-bit numbers about twice as fast as bf16, and sums the products in fp32. Weights stay in fp32,
and everything between the products in bf16. Source: Micikevicius et al. 2022, FP8 formats for deep learning.

Legend: N tokens, I inputs, O outputs.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from nanochat.device import Device
from nanochat.gpt import GPT, Linear
from nanochat.kernels.gradients import WrittenKernels

# One of the 8 bits is the sign. e4m3 spends 4 bits on the exponent and 3 on the fraction: its steps are 1/8 to 1/16 of
# a number, up to 448. e5m2 has one bit less precision and reaches 57,344: gradients differ more in size than weights
# and activations.
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
MULTIPLE = 16  # the operator needs matrices whose sides are multiples of this
# A smaller matrix stays in bf16: it would gain less than its conversion costs. A value gate has 32 inputs.
SMALLEST_SIDE = 128

Scaled = tuple[Tensor, Tensor]  # an FP8 matrix, and the factor for its numbers, 0-D in fp32


def quantize(x: Tensor, dtype: torch.dtype) -> Scaled:
    """Round a matrix to FP8, after scaling its largest element close to the end of the format's range."""
    # The scale is a power of two, so scaling is exact, also in bf16. It is computed from the tensor itself and stays on
    # the device: the host does not wait, and a checkpoint needs no history of past sizes. A matrix of zeros, such as a
    # new output projection, must not divide by 0. NaN and infinity become NaN, and train_step skips the step.
    largest = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32).clamp(min=1e-12)
    scale = torch.exp2(torch.floor(torch.log2(torch.finfo(dtype).max / largest)))
    return (x * scale.to(x.dtype)).to(dtype), scale.reciprocal()


def product(a: Scaled, b: Scaled, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """a (M, K) and b (N, K) -> a @ b.T (M, N). The operator needs both in row-major order.

    `fast` sums with fewer bits, which is precise enough for forward products.
    """
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        a[0], b[0].t(), scale_a=a[1], scale_b=b[1], out_dtype=dtype, use_fast_accum=fast
    )


def transposed(a: Scaled) -> Scaled:
    return a[0].t().clone(memory_format=torch.contiguous_format), a[1]


class _Fp8Product(torch.autograd.Function):
    """x (N, I), weight (O, I) -> x @ weight.T (N, O) in the dtype of x. Keeps x in 8 bits for the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        scaled_x = quantize(x, E4M3)
        scaled_weight = quantize(weight, E4M3)
        ctx.save_for_backward(*scaled_x, *scaled_weight)
        ctx.weight_dtype = weight.dtype
        return product(scaled_x, scaled_weight, x.dtype, fast=True)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        x, x_factor, weight, weight_factor = ctx.saved_tensors
        grad = quantize(grads[0].contiguous(), E5M2)  # (N, O)
        grad_x = product(grad, transposed((weight, weight_factor)), grads[0].dtype)  # (N, I)
        grad_weight = product(transposed(grad), transposed((x, x_factor)), ctx.weight_dtype)  # (O, I)
        return grad_x, grad_weight


class Fp8Kernels(WrittenKernels):
    """The products of linear layers in FP8, during training."""

    def product(self, x: Tensor, weight: Tensor, cast: Tensor | None = None) -> Tensor:
        """x (..., I) -> (..., O)."""
        if not torch.is_grad_enabled():
            # An evaluation uses the weights as everybody who loads the checkpoint does: without FP8.
            return F.linear(x, weight.to(x.dtype))
        rows = x.flatten(0, -2)
        missing = -len(rows) % MULTIPLE
        padded = F.pad(rows, (0, 0, 0, missing)) if missing else rows
        return _Fp8Product.apply(padded, weight)[: len(rows)].unflatten(0, x.shape[:-1])

    def stacked_products(self, x: Tensor, weight: Tensor, cast: Tensor | None = None) -> Tensor:
        """The three products as one, with the results next to each other; attention accepts this form too."""
        return self.product(x, weight, cast)


def use_fp8(device: Device, model: GPT) -> str:
    """Switch the large matrices of a model's blocks to FP8, if the chip supports it; returns a line for the log."""
    has_fp8 = device.kind == "cuda" and device.module.get_device_capability() >= (8, 9)
    if has_fp8 and device.dtype == torch.bfloat16:
        count = replace_products(model.blocks)
        return f"fp8 in {count} matrices of the blocks, bfloat16 elsewhere"
    dtype = str(device.dtype).removeprefix("torch.")
    return f"{dtype} (--fp8 needs a GPU of compute capability 8.9 or more and bfloat16; this is {device.name})"


def replace_products(blocks: nn.Module) -> int:
    """Give the large matrices of a model's blocks the FP8 kernels; returns the number of matrices."""
    kernels = Fp8Kernels(torch.bfloat16)
    count = 0
    for module in blocks.modules():
        if isinstance(module, Linear):
            sides = (module.in_features, module.out_features)
            if min(sides) >= SMALLEST_SIDE and not any(side % MULTIPLE for side in sides):
                module.kernels = kernels
                count += 1
    return count
