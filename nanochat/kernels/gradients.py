"""The model's operators that all devices share, with written-out backward passes. These take fewer passes over memory
and fewer launches than autograd's. Second derivatives raise an error.

Legend: B batch, T query tokens, S keys, H query heads, K key/value heads, D head dim.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nanochat.attention import Segments, blockwise_attention
from nanochat.gpt import GPTConfig, Linear
from nanochat.ground.cli import UserError
from nanochat.operators import TorchKernels, WeightFormat

NO_FP16 = "--weights fp16 is for products in fp32 on an x86 CPU: add --dtype float32 there, or leave it out"


class WrittenKernels(TorchKernels):
    """torch's operators with written-out gradients: the base class of the kernels of all devices."""

    def product(self, x: Tensor, weight: Tensor, cast: Tensor | None = None) -> Tensor:
        return product(x, weight, cast)

    def qkv_linear(self, has_equal_heads: bool) -> Any:
        return StackedLinear if has_equal_heads else None

    def relu_squared(self, x: Tensor) -> Tensor:
        return apply(_ReluSquared, x)  # type: ignore[no-any-return]

    def mix(self, x: Tensor, first: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return apply(_Mix, x, first, a, b)  # type: ignore[no-any-return]

    def swiglu(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-high, low), dim=-1) * sin

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int = 0, segments: Segments | None = None
    ) -> Tensor:
        # The fused operator supports neither windows nor documents; blocks of the row do. A window as long as the row
        # restricts nothing.
        if 0 < window < q.size(1) or segments is not None:
            return blockwise_attention(q, k, v, scale=scale, window=window, segments=segments, attend=fused_attention)
        return fused_attention(q, k, v, scale=scale, is_causal=True)

    def prepare_mask(self, mask: Tensor) -> Tensor:
        return mask

    def recorded_attention(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor) -> Tensor:
        return self.cached_attention(q, k, v, scale=scale, mask=mask)

    def packs(self, dtype: torch.dtype) -> bool:
        return False

    def pack(self, model: Any, weights: WeightFormat = "auto", may_round: bool = False) -> Any:
        if weights == "fp16":
            raise UserError(NO_FP16)
        raise NotImplementedError(f"{self.name} kernels pack no weights")

    def experts(self, config: GPTConfig) -> Any:
        from nanochat.experts.layer import Experts  # most models have none

        return Experts(config, self)

    def state_layer(self, config: GPTConfig, layer: int) -> Any:
        from nanochat.deltanet.layer import GatedDeltaNet  # likewise

        return GatedDeltaNet(config, layer, self)

    def row_states(self, config: GPTConfig, rows: int, device: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        if not config.state_value_heads:
            return ()
        from nanochat.deltanet.layer import row_states

        return row_states(config, rows, device, dtype)


class StackedLinear(Linear):
    """Three linear layers of one input and one shape: x (..., inputs) -> the first two (2, ..., outputs), and the third
    (..., outputs).

    Their products are one operator, and the results lie in memory one after the other. As columns of a single product
    they would be strided views, which an NPU's operators copy before they read them.
    """

    def forward(self, x: Tensor) -> Any:
        return Product.apply(x, self.weight if self.cast is None else self.cast, True)


# ---------------------------------------------------------------------- attention


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, is_causal: bool = False, mask: Tensor | None = None
) -> Tensor:
    """torch's fused attention on (B, T, heads, D)."""
    # torch takes (B, heads, T, D). The fused operator works in tiles and never holds the T x T scores
    # (source: Dao et al. 2022, FlashAttention). A transposed view costs nothing: no value is copied.
    q = q.transpose(1, 2)
    k = k.transpose(1, 2)
    v = v.transpose(1, 2)
    # Several query heads may share a key head (source: Ainslie et al. 2023, GQA). torch derives the groups from the
    # head counts: with 6 query heads and 2 key heads, query heads 0 to 2 read key head 0, and 3 to 5 key head 1.
    grouped = q.size(1) != k.size(1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


def cached_products(q: Tensor, k: Tensor, v: Tensor, *, scale: float, hidden: Tensor) -> Tensor:
    """Attention to a cache by two matrix products: q (B, T, H, D), k and v (B, K, S, D) -> (B, T, H, D).

    `hidden` (B, 1, T, S) is True where a query must not attend.
    """
    B, T, H, D = q.shape
    K = k.size(1)
    # The query heads that share a key head become rows of one product.
    q = q.transpose(1, 2).reshape(B, K, -1, D)  # (B, K, H/K x T, D)
    scores = (q @ k.mT).view(B, H, T, -1).float() * scale  # (B, H, T, S)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1).to(v.dtype)
    out = weights.view(B, K, -1, k.size(2)) @ v  # (B, K, H/K x T, D)
    return out.view(B, H, T, D).transpose(1, 2)


# ---------------------------------------------------------------------- operators


def product(x: Tensor, weight: Tensor, cast: Tensor | None = None) -> Tensor:
    """x (..., inputs), weight (outputs, inputs) -> x @ weight.T (..., outputs). The weight is cast to the dtype of x,
    unless `cast` is the weight in that dtype. Its gradient then comes through `cast`."""
    return Product.apply(x, weight if cast is None else cast, False)  # type: ignore[no-any-return]


class Product(torch.autograd.Function):
    """One product, or with `is_stacked` three in one, as `StackedLinear` returns them."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, is_stacked: bool) -> Any:
        matrix = weight.to(x.dtype)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, matrix)  # a frozen weight needs no x (lora.py)
        ctx.weight_dtype = weight.dtype
        if not is_stacked:
            return F.linear(x, matrix)
        y = x.flatten(0, -2)[None] @ matrix.unflatten(0, (3, -1)).mT  # (3, tokens, outputs)
        y = y.unflatten(1, x.shape[:-1])
        return y[:2], y[2]

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        # y = x W^T. So the gradient of x is dy W, and the gradient of W is dy^T x, summed over all tokens.
        x, matrix = ctx.saved_tensors
        grad = grads[0] if len(grads) == 1 else torch.cat((*grads[0], grads[1]), dim=-1)
        grad_x = grad @ matrix if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            # In this order the result has the weight's memory layout. Autograd computes x^T dy, transposes it as a view
            # and copies it into the weight's layout: 54 launches of a step at depth 12.
            grad_weight = (grad.flatten(0, -2).T @ x.flatten(0, -2)).to(ctx.weight_dtype)
        return grad_x, grad_weight, None


class _KeepsNothing:
    """Replaces autograd's context if no backward pass follows."""

    save_for_backward = staticmethod(lambda *tensors: None)


def apply(function: Any, *inputs: Tensor) -> Any:
    """Call an autograd function. Without gradients, call only its operators: autograd takes 8 us a call, 3 a layer."""
    return function.apply(*inputs) if torch.is_grad_enabled() else function.forward(_KeepsNothing, *inputs)


class _ReluSquared(torch.autograd.Function):
    """relu(x)^2, whose derivative is 2 relu(x): both are 0 for negative x.

    So the backward pass needs one tensor and one operator. Autograd differentiates square and relu in turn, in four.
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        positive = F.relu(x)
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        (positive,) = ctx.saved_tensors
        if torch.compiler.is_compiling():  # the compiler fuses operators itself
            return (grads[0] * positive).mul_(2)
        # 0 + 2 dy relu(x): addcmul is the only operator that multiplies two tensors and a number in one pass.
        # A tensor without data, such as of a dry run, must not be kept as the zero of later steps.
        zero = _zero(positive.dtype, positive.device) if type(positive) is Tensor else positive.new_zeros(())
        return torch.addcmul(zero, grads[0], positive, value=2)


@functools.cache
def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # training must be able to use it, even if the first call is in inference
        return torch.zeros((), dtype=dtype, device=device)


class RMSNorm(torch.autograd.Function):
    """y = r x with r = 1 / sqrt(mean(x^2) + eps), so that dx = r (dy - y mean(y dy)), the mean over a row.

    Autograd's backward takes 13 passes over memory in fp32, and keeps x in fp32 for them. This one rounds y, r and the
    mean to bf16. Its error is 0.003 of dx for a random dy, where torch's is 0.0017. The error grows with the component
    of dy along y: it is 0.004 if that component is as large as the rest. In the demo's model it is 0.1 to 0.25 of the
    rest.
    """

    @staticmethod
    def forward(ctx, x: Tensor, eps: float) -> Tensor:
        y = F.rms_norm(x, (x.size(-1),), None, eps)
        # F.rms_norm does not return its r, so compute it again.
        sums_in = torch.promote_types(x.dtype, torch.float32)
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=sums_in).square_()
        ctx.save_for_backward(y, squares.div_(x.size(-1)).add_(eps).rsqrt_().to(x.dtype))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        y, r = ctx.saved_tensors
        mean = torch.linalg.vecdot(grads[0], y).unsqueeze(-1).div_(y.size(-1))
        return torch.addcmul(grads[0], y, mean, value=-1).mul_(r), None


class Rotation(torch.autograd.Function):
    """`TorchKernels.rotate` with fewer passes over memory; the backward pass rotates by the opposite angles."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, sin, -1), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    # (low, high) -> (low cos - high sin, high cos + low sin); the halves of cos are equal, and so are the halves of sin
    low, high = x.chunk(2, dim=-1)
    half = sin[..., : low.size(-1)]
    out = x * cos
    to_low, to_high = out.chunk(2, dim=-1)
    to_low.addcmul_(high, half, value=-sign)
    to_high.addcmul_(low, half, value=sign)
    return out


class _Mix(torch.autograd.Function):
    """a x + b first. Each layer adds its part to the gradient of `first` as it passes through.

    Autograd takes 9 operators for a layer's backward pass, two of which multiply by 1. This takes 4.
    """

    @staticmethod
    def forward(ctx, x: Tensor, first: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, first, a, b)
        return torch.addcmul(a * x, b, first), first

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        x, first, a, b = ctx.saved_tensors
        grad, grad_first = grads
        return grad * a, torch.addcmul(grad_first, b, grad), _dot(grad, x), _dot(grad, first)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """The sum of a b over all elements."""
    # torch's dot product of a million numbers in bf16 takes 15 ms on a CPU, this 0.3 ms. NPUs have no fast one, either.
    return (a * b).sum() if a.dtype == torch.bfloat16 else a.flatten() @ b.flatten()
