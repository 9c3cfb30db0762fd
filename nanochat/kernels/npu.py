"""Fused Ascend operators instead of torch's, on chips that have them. tests/simnpu compares the two.

Every name and keyword exists in torch_npu from 2.7.1 on. Its conventions differ from torch's. True in a mask hides a
key; `prepare_mask` converts masks. Without a mask `sparse_mode` is ignored, and attention is full, not causal. Modes 2
(causal) and 4 (band) take a compressed mask of 2,048 x 2,048 for every length.

Legend: B batch, T query tokens, S keys, H query heads, K key/value heads, D head dim.
"""

import contextlib
import functools
import math
from collections.abc import Iterable

import torch
import torch_npu  # pyright: ignore[reportMissingImports]  # only on Ascend machines
from torch import Tensor

from nanochat.attention import Segments
from nanochat.gpt import GPT
from nanochat.kernels.adamw import unfused_adamw
from nanochat.kernels.casts import cast_together
from nanochat.kernels.gradients import WrittenKernels, cached_products
from nanochat.kernels.grouped import GroupedOperators, Groups, grouped_product
from nanochat.operators import AdamWUpdate

COMPRESSED = 2048  # side of the mask for modes 2 and 4
# The most documents in one call. The page of npu_fusion_attention gives two limits for the length of actual_seq_qlen:
# 2K in general, and 1K where lengths vary. The smaller one is safe: another call costs two launches in each layer.
MOST_DOCUMENTS = 1024
FULL_MASK = 0  # sparse modes
CAUSAL = 2
BAND = 4


@functools.cache
def compressed_mask(device: torch.device) -> Tensor:
    """One mask for all layers and lengths, in the vendor's form: True above the diagonal."""
    with torch.inference_mode(False):  # training must be able to use the mask, even if the first call is in inference
        return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool, device=device).triu(diagonal=1)


@functools.cache
def _ones(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.ones(size, dtype=dtype, device=device)


def _gain(x: Tensor, weight: Tensor | None) -> Tensor:
    """The gain of a norm, or ones: the operators of the norms require a gain."""
    return _ones(x.size(-1), x.dtype, x.device) if weight is None else weight


class _AddRmsNorm(torch.autograd.Function):
    """npu_add_rms_norm, which lacks a gradient, with the gradient of npu_rms_norm."""

    @staticmethod
    def forward(ctx, x: Tensor, added: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, rstd, total = torch_npu.npu_add_rms_norm(x, added, gain, epsilon=eps)
        ctx.save_for_backward(total, gain, rstd)
        return normed, total

    @staticmethod
    def backward(ctx, *grads: Tensor):
        total, gain, rstd = ctx.saved_tensors
        grad, grad_gain = torch.ops.npu.npu_rms_norm_backward(grads[0], total, gain, rstd)
        grad.add_(grads[1])
        grad_gain = grad_gain.to(gain.dtype) if ctx.needs_input_grad[2] else None
        return grad, grad, grad_gain, None


class _Rotate(torch.autograd.Function):
    """npu_rotary_mul, saving only the angles. Its own autograd also saves x, for the gradients of cos and sin."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return torch_npu.npu_rotary_mul(x, cos, sin)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        # The second argument replaces x. Only the gradients of cos and sin depend on x, and nobody reads them.
        return torch.ops.npu.npu_rotary_mul_backward(grads[0], grads[0], *ctx.saved_tensors)[0], None, None


class _NpuGroupedOperators(GroupedOperators):
    """npu_grouped_matmul, which lacks a gradient. With group_list_type 1 it reads the groups' counts, in int64."""

    def rows_by_matrices(self, x: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
        return torch_npu.npu_grouped_matmul(
            [x], [matrices], group_list=groups.counts, split_item=2, group_type=0, group_list_type=1
        )[0]

    def columns_by_rows(self, x: Tensor, y: Tensor, groups: Groups) -> Tensor:
        return torch_npu.npu_grouped_matmul(
            [x.T], [y], group_list=groups.counts, split_item=3, group_type=2, group_list_type=1
        )[0]


class PlainNpuKernels(WrittenKernels):
    """torch's operators, for chips without the fused ones: 910A and 310P (accelerators.py)."""

    name = "torch (this chip has no fused operators)"
    device_type = "npu"
    compiled_flops = math.inf  # not tried on a card yet
    loss_in_fp32 = False
    loss_chunk_elements = 1 << 27  # 256 MiB in bf16
    reads_whole_cache = True

    def cast_weights(self, model: GPT) -> contextlib.AbstractContextManager[None]:
        return cast_together(model, self.dtype)

    def adamw(self, updates: Iterable[AdamWUpdate], steps: Tensor, targets: Tensor, ok: Tensor) -> None:
        # Not _fused_adamw_: torch_npu's adapter passes neither grad_scale nor found_inf to its operator (read in the
        # calls of torch_npu 2.13, 2026-11-29). A skipped step would write its NaN into the weights.
        unfused_adamw(updates, steps, targets, ok)


class NpuKernels(PlainNpuKernels):
    name = "npu_fusion_attention, npu_rms_norm, npu_add_rms_norm, npu_rotary_mul, npu_swiglu"

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """One launch instead of several: about 300 fewer in a forward pass at depth 12 (simulated NPU, 2026-11-20)."""
        return torch_npu.npu_rms_norm(x, _gain(x, weight), epsilon=eps)[0]

    def add_rms_norm(self, x: Tensor, added: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        return _AddRmsNorm.apply(x, added, _gain(x, weight), eps)

    def swiglu(self, x: Tensor) -> Tensor:
        return torch_npu.npu_swiglu(x)

    def grouped_product(self, x: Tensor, weight: Tensor, groups: Groups, cast: Tensor | None = None) -> Tensor:
        return grouped_product(_NpuGroupedOperators(), x, weight, groups, cast)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return _Rotate.apply(x, cos[None], sin[None])  # the operator takes angles (1, T, 1, D)

    def prepare_mask(self, mask: Tensor) -> Tensor:
        return ~mask  # the vendor's form: True hides the key

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int = 0, segments: Segments | None = None
    ) -> Tensor:
        B, T, H, _ = q.shape
        options = {"atten_mask": compressed_mask(q.device), "sparse_mode": CAUSAL}
        if 0 < window < T:
            # The number of tokens before and after its own that a query attends to.
            options.update(sparse_mode=BAND, pre_tockens=window - 1, next_tockens=0)
        if segments is None:
            return torch_npu.npu_fusion_attention(q, k, v, H, "BSND", scale=scale, **options)[0]
        if torch.compiler.is_compiling():
            # The lengths below are numbers on the host: the compiler would generate new code for every batch.
            return super().attention(q, k, v, scale=scale, window=window, segments=segments)
        # Treat all rows as one row, divided into documents. This needs no mask of T x T and no work between documents.
        # The causal or band mask applies inside each document (source: CANN's page of aclnnFlashAttentionVarLenScore).
        inputs = [x.flatten(0, 1) for x in (q, k, v)]  # (B x T, heads, D)
        # A call takes at most MOST_DOCUMENTS documents. More documents need several calls, each starting at its
        # `begin`.
        ends_of_calls = [
            segments.ends[first : first + MOST_DOCUMENTS] for first in range(0, len(segments.ends), MOST_DOCUMENTS)
        ]
        begins = [0, *(ends[-1] for ends in ends_of_calls[:-1])]
        inputs_of_calls = [inputs]
        if len(begins) > 1:  # otherwise avoid the split, which costs time in the backward pass
            tokens = [ends[-1] - begin for ends, begin in zip(ends_of_calls, begins, strict=True)]
            inputs_of_calls = zip(*(x.split(tokens) for x in inputs), strict=True)
        outputs = []
        for its_inputs, ends, begin in zip(inputs_of_calls, ends_of_calls, begins, strict=True):
            bounds = [end - begin for end in ends]  # cumulative lengths: the end of each document of the call
            outputs.append(torch_npu.npu_fusion_attention(
                *its_inputs, H, "TND", scale=scale, actual_seq_qlen=bounds, actual_seq_kvlen=bounds, **options
            )[0])  # fmt: skip
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return out.view(B, T, H, -1)

    def cached_attention(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor) -> Tensor:
        # Not npu_fused_infer_attention_score, the operator for inference: with this mask and one query it silently
        # ignores the mask after key 512 (source: vllm-ascend issue 15503, torch_npu 2.10.0).
        out = torch_npu.npu_fusion_attention(
            q.transpose(1, 2), k, v, q.size(2), "BNSD", scale=scale, atten_mask=mask, sparse_mode=FULL_MASK
        )[0]
        return out.transpose(1, 2)

    def recorded_attention(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor) -> Tensor:
        # The vendor's page excludes npu_fusion_attention from graphs. A replay launches all operators at once, so more
        # operators cost little. Both forms read the same cache, without a copy.
        return cached_products(q, k, v, scale=scale, hidden=mask)
