"""Operators that are faster on a CPU than torch's: attention by matrix products, norms and rotations with written-out
gradients (gradients.py), weights packed for decoding.

Legend: B batch, T query tokens, S keys, H query heads, K key/value heads, D head dim.
"""

from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from nanochat.attention import Segments, blockwise_attention
from nanochat.device import Runtime
from nanochat.gpt import GPTConfig, capped_logits
from nanochat.ground.cli import UserError
from nanochat.kernels.gradients import NO_FP16, RMSNorm, Rotation, WrittenKernels, apply, cached_products
from nanochat.operators import WeightFormat

# Longest row for attention by matrix products: the scores still fit the processor's caches.
PLAIN_TOKENS = 1024
# Whether this torch has products with matrices in fp16, which it has on x86.
HAS_FP16 = "fbgemm" in torch.backends.quantized.supported_engines


class CpuRuntime(Runtime):
    def kernels(self, dtype: torch.dtype, name: str) -> "CpuKernels":
        return CpuKernels(dtype)


class CpuKernels(WrittenKernels):
    name = "cpu (attention by matrix products)"
    device_type = "cpu"
    # Compiling takes 21 to 40 s. Where products are in bf16 it saves a fifth of a step, in fp32 a few percent. Two
    # cores with AMX win that back after 375 to 450 steps, 4e13 to 5e13 FLOPs (depth 4, 4,096 tokens, 2026-11-23).
    compiled_flops = 6e13
    # Sorting a whole vocabulary takes milliseconds on a CPU, and reading the result does not wait for a device.
    top_p_first = 64

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__(dtype)
        # fp32 takes 1,024 tokens at V 8,192: with 256 tokens, products are a tenth slower. In bf16 products are several
        # times as fast, so memory counts: with 256 tokens all passes stay in the caches and take four fifths of the
        # time.
        self.loss_chunk_elements = 1 << (23 if dtype == torch.float32 else 21)
        self.loss_slice_elements = 1 << (20 if dtype == torch.float32 else 19)
        # Whether the processor multiplies tiles of bf16, for which torch's fused attention has special code.
        self.has_amx = torch.cpu._is_amx_tile_supported()

    # In eager mode norms and rotations took a quarter of a step. The compiler has its own passes for them.

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        if weight is None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return RMSNorm.apply(x, eps)
        return super().rms_norm(x, weight, eps)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return super().rotate(x, cos, sin) if torch.compiler.is_compiling() else apply(Rotation, x, cos, sin)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int = 0, segments: Segments | None = None
    ) -> Tensor:
        """Matrix products up to PLAIN_TOKENS: 16 ms a layer where torch's fused operator takes 43."""
        if q.size(1) <= PLAIN_TOKENS:
            # Blocks keep the scores small, and skip the keys that no query of the block attends to.
            return blockwise_attention(q, k, v, scale=scale, window=window, segments=segments, attend=masked_products)
        return super().attention(q, k, v, scale=scale, window=window, segments=segments)

    def prepare_mask(self, mask: Tensor) -> Tensor:
        """0 where a query may attend, -inf elsewhere: torch's fused operator would build it again in every layer."""
        return torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)

    def cached_attention(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor) -> Tensor:
        """torch's fused operator, or matrix products in bf16 without AMX.

        There the fused operator takes 3 times as long for 16 rows of one query. With AMX it takes a fifth of the time.
        """
        if k.dtype == torch.float32 or self.has_amx:
            return super().cached_attention(q, k, v, scale=scale, mask=mask)
        # The filled part of a cache has gaps, over which products in bf16 take 2 to 5 times as long; the copy is cheap.
        return cached_products(q, k.contiguous(), v.contiguous(), scale=scale, hidden=mask < 0)

    def packs(self, dtype: torch.dtype) -> bool:
        if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
            return False
        return dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()

    def pack(self, model: Any, weights: WeightFormat = "auto", may_round: bool = False) -> Any:
        packed = PackedLinear
        if weights == "fp16":
            if self.dtype != torch.float32 or not HAS_FP16:
                raise UserError(NO_FP16)
            packed = HalfLinear
        elif may_round and self.dtype == torch.float32 and HAS_FP16 and not model.config.experts:
            # Half of the bytes: a token of one row takes 0.72 of the time (Intel Xeon with AVX-512, depth 4,
            # 2026-11-27). A rounded router would choose other experts.
            packed = rounded_linear
        # The head first: its padding is cut off, and the loop below then skips it.
        model.head = PackedHead(packed(model.head_weight().detach()), model.config)
        places = []
        for module in model.modules():
            places += [(module, name) for name, child in module.named_children() if isinstance(child, nn.Linear)]
        for parent, name in places:
            linear = getattr(parent, name)  # the only reference: the weight is freed before the next one is packed
            layout = SmallLinear if name.endswith("_gate") else packed
            setattr(parent, name, layout(linear.weight.detach(), linear.bias))
        model.is_packed = True
        return model


def masked_products(q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor) -> Tensor:
    """Attention as it is defined: q (B, T, H, D), k and v (B, S, K, D), a mask (..., T, S) -> (B, T, H, D)."""
    B, T, H, D = q.shape
    groups = H // k.size(2)
    q = q.transpose(1, 2).reshape(B * H, T, D)
    if groups > 1:
        k = k.repeat_interleave(groups, dim=2)
        v = v.repeat_interleave(groups, dim=2)
    k = k.transpose(1, 2).reshape(B * H, -1, D)
    v = v.transpose(1, 2).reshape(B * H, -1, D)
    # The product includes the scale and the mask. As separate operators they took two passes over the scores, and two
    # more in the backward pass. Softmax computes in fp32 internally.
    hidden = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)
    hidden = hidden.expand(B, H, T, -1).reshape(B * H, T, -1)
    weights = torch.baddbmm(hidden, q, k.mT, alpha=scale).softmax(dim=-1)  # (B x H, T, S)
    return (weights @ v).view(B, H, T, D).transpose(1, 2)


class PackedLinear(nn.Module):
    """A linear layer x (..., in) -> (..., out) with its weight (out, in) in oneDNN's layout. It has no gradient."""

    # torch's products of a few rows use one thread; these use all threads. One row through all layers takes 1.29
    # instead of 2.29 ms in fp32 (depth 4, two cores of an AMD EPYC, 2026-11-21). In fp32 a row's bits also do not
    # depend on the other rows of its batch; in bf16 they do on processors with AMX.

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")


class HalfLinear(nn.Module):
    """A PackedLinear with its weight in fp16, in FBGEMM's layout; inputs, sums and outputs are in fp32.

    Raises UserError: when a weight is above fp16's range.
    """

    # A decoded token reads every weight once. Half of the bytes make its products 1.4 to 2.5 times as fast, with an
    # error of 2.5e-4 of the largest output (two cores of an AMD EPYC with AVX2, 2026-11-23). With AVX2 one or two rows
    # are summed in another order than the rows of a larger batch, so the bits depend on the batch size, as on an
    # accelerator. With AVX-512 they do not.

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        most = torch.finfo(torch.float16).max
        if not weight.abs().amax() <= most:  # FBGEMM would clip larger weights, even in the model itself
            raise UserError(f"--weights fp16: the model has weights that are NaN or above {most:,.0f}; leave it out")
        self.out_features, self.in_features = weight.shape
        bias = None if bias is None else bias.detach()
        self.weight = torch.ops.quantized.linear_prepack_fp16(weight.contiguous(), bias)
        # The bare operator: its Python wrapper looks for a tracer's arguments, which takes 6 calls.
        self.product = torch.ops.quantized.linear_dynamic_fp16.default._op

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight)


def rounded_linear(weight: Tensor, bias: Tensor | None = None) -> nn.Module:
    """A HalfLinear, or where fp16 cannot hold the weight a PackedLinear."""
    try:
        return HalfLinear(weight, bias)
    except UserError:  # the weight is beyond fp16's range
        return PackedLinear(weight, bias)


class SmallLinear(nn.Module):
    """A linear layer with few outputs and no bias. oneDNN takes 28 us to begin a product of 32 x 2, this one 7."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        assert bias is None
        self.out_features, self.in_features = weight.shape
        self.weight = nn.functional.pad(weight, (0, 0, 0, 1))  # with one more output, which is cut off again

    def forward(self, x: Tensor) -> Tensor:
        # Row by row, unlike F.linear: the order of the sum does not depend on the batch. The result has gaps between
        # its rows: over all rows at once, torch's sigmoid rounds what fills a vector otherwise than what is left over.
        return (x.unsqueeze(-2) * self.weight).sum(dim=-1)[..., :-1]


class PackedHead(nn.Module):
    """The output head, packed: logits only, no loss."""

    def __init__(self, product: nn.Module, config: GPTConfig):
        super().__init__()
        self.product = product
        self.config = config

    def forward(self, hidden: Tensor) -> Tensor:
        return capped_logits(self.config, self.product(hidden))
