"""Operators that allocate what an accelerator's operators allocate, and compute nothing: for a plan of cards that are
not here (run/plan.py).

A CPU's operators keep more for the backward pass, in smaller pieces. These follow npu.py: one fused operator each for
attention, for norms, for the gated MLP and for the products of all experts, whose results and saved tensors have the
same shapes. tests/simnpu/test_plan.py compares the counts.

Legend: B batch, T query tokens, H query heads, K key/value heads, D head dim.
"""

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from nanochat.attention import Segments
from nanochat.gpt import GPT
from nanochat.kernels.adamw import unfused_adamw
from nanochat.kernels.casts import cast_together
from nanochat.kernels.gradients import WrittenKernels, rotate
from nanochat.kernels.grouped import Groups, grouped_product
from nanochat.operators import AdamWUpdate

STATISTICS = 8  # numbers that the fused attention keeps for each query and head, for its maximum and again for its sum


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        statistics = [q.new_empty(*q.shape[:-1], STATISTICS, dtype=torch.float32) for _ in range(2)]
        ctx.save_for_backward(q, k, v, out, *statistics)
        return out

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in ctx.saved_tensors[:3])


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight) if ctx.needs_input_grad[1] else None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, added: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = torch.empty_like(x)
        ctx.save_for_backward(total, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x), total

    @staticmethod
    def backward(ctx, *grads: Tensor):
        total, weight, _ = ctx.saved_tensors
        grad = torch.empty_like(total)
        return grad, grad, torch.empty_like(weight) if ctx.needs_input_grad[2] else None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.new_empty(*x.shape[:-1], x.size(-1) // 2)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return torch.empty_like(ctx.saved_tensors[0])


class _GroupedOperators:
    def rows_by_matrices(self, x: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
        return x.new_empty(x.size(0), matrices.size(2))

    def columns_by_rows(self, x: Tensor, y: Tensor, groups: Groups) -> Tensor:
        return x.new_empty(len(groups.counts), x.size(1), y.size(1))


class CountedKernels(WrittenKernels):
    name = "the shapes of an accelerator's operators"
    # As in npu.py.
    loss_in_fp32 = False
    loss_chunk_elements = 1 << 27

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int = 0, segments: Segments | None = None
    ) -> Tensor:
        return _Attention.apply(q, k, v)  # type: ignore[no-any-return]

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        return _Norm.apply(x, self._gain(x, weight))  # type: ignore[no-any-return]

    def add_rms_norm(self, x: Tensor, added: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        return _AddNorm.apply(x, added, self._gain(x, weight))  # type: ignore[no-any-return]

    def _gain(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x.new_empty(x.size(-1)) if weight is None else weight

    def swiglu(self, x: Tensor) -> Tensor:
        return _SwiGLU.apply(x)  # type: ignore[no-any-return]

    def grouped_product(self, x: Tensor, weight: Tensor, groups: Groups, cast: Tensor | None = None) -> Tensor:
        return grouped_product(_GroupedOperators(), x, weight, groups, cast)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(x, cos, sin)

    def cast_weights(self, model: GPT) -> contextlib.AbstractContextManager[None]:
        return cast_together(model, self.dtype)

    def adamw(self, updates: Iterable[AdamWUpdate], steps: Tensor, targets: Tensor, ok: Tensor) -> None:
        unfused_adamw(updates, steps, targets, ok)

    def cached_attention(self, *inputs: Any, **options: Any) -> Tensor:
        raise NotImplementedError("these kernels only count the memory of a step")
