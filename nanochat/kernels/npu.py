"""Fused Ascend operators, which the model calls on an NPU in place of torch's own.

`device.kernels` alone hands this module out. Each function does what the plain code beside its call does
(tests/simnpu compares them); every name and keyword stands in torch_npu from 2.7.1 on.

Conventions of torch_npu's documentation that differ from torch's: True in a mask means hidden; without a
mask `sparse_mode` is ignored and attention is full, not causal; modes 2 (causal) and 4 (band) take a
compressed mask of 2,048 x 2,048 whatever the length.

Legend: B batch, T query tokens, S keys, H query heads, K key/value heads, D head dim.
"""

import functools

import torch
import torch_npu  # pyright: ignore[reportMissingImports]  # it is on Ascend machines alone
from torch import Tensor

COMPRESSED = 2048  # side of the mask that modes 2 and 4 ask for
AS_GIVEN, CAUSAL, BAND = 0, 2, 4  # sparse modes

NAMES = "npu_fusion_attention, npu_rms_norm, npu_rotary_mul"


@functools.cache
def compressed_mask(device: torch.device) -> Tensor:
    """One for all layers and lengths: True above the diagonal."""
    with torch.inference_mode(False):  # whoever asks first, training must be able to use it
        return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool, device=device).triu(diagonal=1)


@functools.cache
def _ones(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.ones(size, dtype=dtype, device=device)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int = 0, hidden: Tensor | None = None
) -> Tensor:
    """Causal attention over whole rows: q (B, T, H, D), k and v (B, T, K, D) -> (B, T, H, D).

    `hidden` (B, 1, T, T), True where a query does not see a key, stands for causality, window and documents alike.
    """
    band = 0 < window < q.size(1)
    options: dict[str, object] = {"atten_mask": compressed_mask(q.device), "sparse_mode": BAND if band else CAUSAL}
    if hidden is not None:
        options = {"atten_mask": hidden, "sparse_mode": AS_GIVEN}
    elif band:
        options |= {"pre_tockens": window - 1, "next_tockens": 0}  # the tokens before and behind its own
    return torch_npu.npu_fusion_attention(q, k, v, q.size(2), "BSND", scale=scale, **options)[0]


def cached_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, hidden: Tensor) -> Tensor:
    """Attention against a cache: q (B, H, T, D), k and v (B, K, S, D), hidden (B, 1, T, S) -> (B, H, T, D).

    The operator made for inference, npu_fused_infer_attention_score, is left alone: with such a mask and one query it
    has been seen to ignore the mask past key 512, silently (source: vllm-ascend issue 15503, torch_npu 2.10.0).
    """
    return torch_npu.npu_fusion_attention(
        q, k, v, q.size(1), "BNSD", scale=scale, atten_mask=hidden, sparse_mode=AS_GIVEN
    )[0]


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Root-mean-square norm of the last axis; the operator always wants a gain."""
    gain = _ones(x.size(-1), x.dtype, x.device) if weight is None else weight
    return torch_npu.npu_rms_norm(x, gain, epsilon=eps)[0]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, T, heads, D) turned by cos and sin, (T, 1, D) or (B, T, 1, D)."""
    if cos.ndim == 3:
        cos, sin = cos.unsqueeze(0), sin.unsqueeze(0)
    return torch_npu.npu_rotary_mul(x, cos, sin)  # x cos + (-high, low) sin
