"""Packed weights: the model computes what it did, and a row the same bits in any company."""

import copy

import pytest
import torch
import torch.nn as nn
from tiny import SHAPES, lively_model, tiny_config

from nanochat.cross_entropy import soft_cap
from nanochat.ground.cli import UserError
from nanochat.kernels.cpu import CpuKernels, PackedLinear, SmallLinear
from nanochat.kernels.gradients import WrittenKernels

pytestmark = pytest.mark.skipif(not CpuKernels().packs(torch.float32), reason="this torch packs nothing")
has_fp16 = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="this torch has no products with fp16 weights"
)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_packed_model_computes_what_it_did(shape: str) -> None:
    model = lively_model(tiny_config(**SHAPES[shape])).eval()
    packed = model.kernels.pack(copy.deepcopy(model))
    tokens = torch.randint(model.config.vocab_size, (3, 17))
    with torch.inference_mode():
        torch.testing.assert_close(packed(tokens), model(tokens), rtol=1e-5, atol=1e-5)
    assert not any(isinstance(module, nn.Linear) for module in packed.modules())
    assert any(isinstance(module, nn.Linear) for module in model.modules()), "the model itself stays as it was"


@has_fp16
@pytest.mark.parametrize("shape", SHAPES)
def test_in_fp16_it_computes_what_it_did_with_rounded_weights(shape: str) -> None:
    model = lively_model(tiny_config(**SHAPES[shape])).eval()
    packed = model.kernels.pack(copy.deepcopy(model), "fp16")
    tokens = torch.randint(model.config.vocab_size, (3, 17))
    head = model.head_weight().detach().half().float()
    with torch.inference_mode():
        exact = model.hidden(tokens)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "value_gate" not in name:
            module.weight.data = module.weight.data.half().float()
    with torch.inference_mode():
        hidden = packed.hidden(tokens)
        torch.testing.assert_close(hidden, model.hidden(tokens), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(hidden, exact, rtol=1e-5, atol=1e-5)
        expected = soft_cap(hidden @ head.T, model.config.logit_cap)
        torch.testing.assert_close(packed.logits(hidden), expected, rtol=1e-5, atol=1e-5)


@has_fp16
def test_weights_above_fp16s_range_are_refused_and_stay_as_they_are() -> None:
    model = lively_model(tiny_config())
    weight = model.blocks[1].get_submodule("mlp.input").weight
    weight.data[3, 5] = -7e4
    with pytest.raises(UserError, match="--weights fp16.*65,504"):
        model.kernels.pack(model, "fp16")
    assert weight[3, 5] == -7e4


def test_other_devices_and_bf16_refuse_weights_in_fp16() -> None:
    for kernels in (WrittenKernels(), CpuKernels(torch.bfloat16)):
        with pytest.raises(UserError, match="--weights fp16.*leave it out"):
            kernels.pack(lively_model(tiny_config()), "fp16")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outputs, inputs", [(768, 256), (256, 1024), (267, 192), (2, 32)])
def test_a_row_has_the_same_bits_in_a_batch_of_any_size(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    """In fp32. In bf16 they differ by a rounding on processors with AMX, whose products of many rows add up in
    another order."""
    if not CpuKernels().packs(dtype):
        pytest.skip(f"this processor packs no weights in {dtype}")
    weight = torch.randn(outputs, inputs, dtype=dtype)
    rows = torch.randn(64, inputs, dtype=dtype)
    product = PackedLinear(weight, torch.randn(outputs, dtype=dtype)) if outputs > 2 else SmallLinear(weight)
    with torch.inference_mode():
        for count in (1, 2, 3, 5, 16, 33):
            few = product(rows[:count])
            many = product(rows)[:count]
            if dtype == torch.float32:
                assert torch.equal(few, many)
            else:
                assert (few - many).abs().amax() <= 2**-7 * many.abs().amax()  # bf16 has 8 bits of precision


def test_a_row_of_gates_has_the_same_bits_in_any_company() -> None:
    """torch's sigmoid rounds the places that fill a vector otherwise than those that are left over."""
    gate = SmallLinear(torch.randn(3, 32))
    rows = torch.randn(4000, 32)
    with torch.inference_mode():
        together = torch.sigmoid(gate(rows))
        alone = torch.cat([torch.sigmoid(gate(row)) for row in rows.split(1)])
    assert torch.equal(alone, together)
