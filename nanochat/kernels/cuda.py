"""Faster operators for NVIDIA GPUs: attention in packed rows and windows.

`F.scaled_dot_product_attention` uses its fast form, flash attention, only for plain causal rows. With a mask it uses a
slower form that reads T x T values. `varlen_attn` is flash attention for rows of several lengths, with windows.

Legend: B batch, T query tokens, H query heads, K key/value heads, D head dim.
"""

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn  # with a window from torch 2.11 on; accelerators.py checks

from nanochat.attention import Segments
from nanochat.kernels.gradients import WrittenKernels
from nanochat.kernels.grouped import GroupedOperators, Groups, grouped_product, loop_product

SHARES_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # from torch 2.12 on


class CudaKernels(WrittenKernels):
    name = "torch, with varlen_attn for packed rows and windows"
    device_type = "cuda"

    def grouped_product(self, x: Tensor, weight: Tensor, groups: Groups, cast: Tensor | None = None) -> Tensor:
        if GroupedOperators.fits(x, weight.size(0) // len(groups.counts)):
            return grouped_product(GroupedOperators(), x, weight, groups, cast)
        return loop_product(self.product, x, weight, groups, cast)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int = 0, segments: Segments | None = None
    ) -> Tensor:
        B, T, H, D = q.shape
        has_window = 0 < window < T
        if D % 8 or D > 256:  # flash attention does not support such heads
            return super().attention(q, k, v, scale=scale, window=window, segments=segments)
        if segments is None and not has_window:
            return super().attention(q, k, v, scale=scale)
        # Treat all rows as one row, divided at `bounds`: into documents, or into the original rows.
        bounds = segments.bounds if segments else torch.arange(0, B * T + 1, T, dtype=torch.int32, device=q.device)
        grouped: dict[str, Any] = {}
        if k.size(2) != H and SHARES_HEADS:
            grouped["enable_gqa"] = True
        elif k.size(2) != H:
            k, v = (part.repeat_interleave(H // part.size(2), dim=2) for part in (k, v))
        # T replaces the length of the longest document, which would be a new constant for the compiler in each batch.
        out = varlen_attn(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), bounds, bounds, T, T, scale=scale,
            # The number of tokens before and after its own that a query attends to; -1: no limit.
            window_size=(window - 1 if has_window else -1, 0), **grouped,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out.view(B, T, H, -1)  # (B x T, H, D) before
