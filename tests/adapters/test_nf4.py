"""Weights in 4 bits: within their bound, and as they are when they are in 4 bits already. Adapters over them are in
test_lora.py."""

import math

import pytest
import torch
import torch.nn.functional as F

from nanochat.adapters.nf4 import BLOCK, dequantize, quantize


def test_four_bits_keep_their_bound():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 70, generator=generator) * 0.02  # the last block is not full
    weight[5] = 0
    weight[7, 3] = 4.0  # an outlier
    codes, factors = quantize(weight)
    assert codes.dtype == torch.uint8 and 8 * codes.nbytes == 4 * math.ceil(weight.numel() / BLOCK) * BLOCK
    back = dequantize(codes, factors, weight.shape, torch.float32)
    blocks = F.pad((weight - back).flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    assert (blocks.abs().amax(dim=1) <= 0.1520 * factors + 1e-9).all()
    assert (blocks.abs().amax(dim=1) / factors.clamp(min=1e-9)).max() > 0.1, "the bound is not loose"
    assert torch.equal(back[5], torch.zeros(70)) and back[7, 3] == 4.0
    # What is in 4 bits already stays as it is.
    assert torch.equal(dequantize(*quantize(back), weight.shape, torch.float32), back)
    assert dequantize(codes, factors, weight.shape, torch.bfloat16).equal(back.bfloat16())
    normal = torch.randn(1 << 20, generator=generator)
    lost = (dequantize(*quantize(normal), normal.shape, torch.float32) - normal).square().mean().sqrt().item()
    assert lost == pytest.approx(0.092, abs=0.001)
