"""Packed weights: the model computes what it did, and a row the same bits in any company."""

import copy

import pytest
import torch
import torch.nn as nn
from tiny import SHAPES, lively_model, tiny_config

from nanochat.kernels.cpu import CpuKernels, PackedLinear

pytestmark = pytest.mark.skipif(not CpuKernels().packs(torch.float32), reason="this torch packs nothing")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_packed_model_computes_what_it_did(shape: str) -> None:
    model = lively_model(tiny_config(**SHAPES[shape])).eval()
    packed = model.kernels.pack(copy.deepcopy(model))
    tokens = torch.randint(model.config.vocab_size, (3, 17))
    with torch.inference_mode():
        torch.testing.assert_close(packed(tokens), model(tokens), rtol=1e-5, atol=1e-5)
    assert not any(isinstance(module, nn.Linear) for module in packed.modules())
    assert any(isinstance(module, nn.Linear) for module in model.modules()), "the model itself stays as it was"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outputs, inputs", [(768, 256), (256, 1024), (267, 192), (2, 32)])
def test_a_row_has_the_same_bits_in_a_batch_of_any_size(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    """In fp32. In bf16 they differ by a rounding on processors with AMX, whose products of many rows add up in
    another order."""
    if not CpuKernels().packs(dtype):
        pytest.skip(f"this processor packs no weights in {dtype}")
    weight = torch.randn(outputs, inputs, dtype=dtype)
    rows = torch.randn(64, inputs, dtype=dtype)
    product = PackedLinear(weight, torch.randn(outputs, dtype=dtype))
    with torch.inference_mode():
        for count in (1, 2, 3, 5, 16, 33):
            few = product(rows[:count])
            many = product(rows)[:count]
            if dtype == torch.float32:
                assert torch.equal(few, many)
            else:
                assert (few - many).abs().amax() <= 2**-7 * many.abs().amax()  # bf16 has 8 bits of precision
