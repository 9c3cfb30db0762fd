"""Products in FP8: what a CPU computes by the same operator, and what the operator demands of a GPU's tensors.

No GPU was at hand: values are a CPU's, layouts are checked on tensors of a GPU without data.
"""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import cpu_device, lively_model, tiny_config
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from nanochat.gpt import Linear
from nanochat.kernels import fp8
from nanochat.kernels.fp8 import E4M3, E5M2, Fp8Kernels, quantize, replace_products, use_fp8
from nanochat.kernels.gradients import StackedLinear, WrittenKernels

WIDE = {"n_layer": 2, "width": 128, "n_head": 4, "n_kv_head": 4}


def make_layer(inputs: int = 160, outputs: int = 192, bias: bool = False) -> tuple[Linear, Linear]:
    """A layer, and one with the same weights in FP8."""
    layers = [Linear(inputs, outputs, WrittenKernels(), bias) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    assert replace_products(layers[1]) == 1
    return layers[0], layers[1]


def with_gradients(layer: Linear, x: Tensor, grad: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(grad)
    assert x.grad is not None and layer.weight.grad is not None
    return [y.detach(), x.grad, layer.weight.grad]


def relative(one: Tensor, other: Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_and_its_gradients_are_those_of_rounded_inputs(dtype: torch.dtype) -> None:
    """To the last bits those of inputs that are rounded to FP8, and within its precision the exact ones."""
    exact_layer, layer = make_layer()
    x = torch.randn(2, 9, 160).to(dtype)  # 18 tokens, no multiple of 16
    grad = 1e-5 * torch.randn(2, 9, 192).to(dtype)
    y, grad_x, grad_weight = with_gradients(layer, x, grad)
    assert (y.dtype, grad_x.dtype, grad_weight.dtype) == (dtype, dtype, torch.float32)

    def rounded(tensor: Tensor, to: torch.dtype) -> Tensor:
        values, factor = quantize(tensor.flatten(0, -2), to)
        return values.float() * factor

    x8, w8, g8 = rounded(x, E4M3), rounded(layer.weight, E4M3), rounded(grad, E5M2)
    bits = 1e-6 if dtype == torch.float32 else 4e-3
    assert relative(y.flatten(0, 1).float(), x8 @ w8.T) < bits
    assert relative(grad_x.flatten(0, 1).float(), g8 @ w8) < bits
    assert relative(grad_weight, g8.T @ x8) < 1e-6
    # A step of e4m3 is 1/8 to 1/16 of a number, so rounding errs by 2.6% in the mean square; e5m2 by twice that.
    errors = map(relative, (y, grad_x, grad_weight), with_gradients(exact_layer, x, grad))
    for error, (least, most) in zip(errors, ((0.03, 0.045), (0.05, 0.07), (0.05, 0.07)), strict=True):
        assert least < error < most


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("size", [1e-20, 1e-9, 0.37, 1.0, 448.0, 1e15])
def test_any_size_uses_the_whole_range(size: float, dtype: torch.dtype) -> None:
    x = torch.linspace(-1, 1, 65)[:, None] * size
    values, factor = quantize(x, dtype)
    if size > 1e-12:
        assert torch.finfo(dtype).max / 2 <= values.float().abs().max() <= torch.finfo(dtype).max
    assert relative(values.float() * factor, x) < (0.03 if dtype == E4M3 else 0.06) or size < 1e-12
    assert factor.log2().item() % 1 == 0


def test_zeros_stay_zeros_and_what_is_not_finite_is_seen() -> None:
    _, layer = make_layer()
    torch.nn.init.zeros_(layer.weight)  # as a new output projection
    y, grad_x, grad_weight = with_gradients(layer, torch.randn(16, 160), torch.randn(16, 192))
    assert not y.any() and not grad_x.any() and grad_weight.any()
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = torch.randn(16, 160)
        x[3, 5] = bad
        assert layer(x).isnan().any()


def test_an_evaluation_computes_as_ever() -> None:
    exact_layer, layer = make_layer(bias=True)
    x = torch.randn(5, 160)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), exact_layer(x))
    assert relative(layer(x), exact_layer(x)) > 0.01


@pytest.mark.slow
def test_the_blocks_large_matrices_are_replaced() -> None:
    config = tiny_config(**WIDE)
    model, plain = lively_model(config), lively_model(config)
    before = dict(model.named_parameters())
    assert replace_products(model.blocks) == 8  # of each block four, not the value gate
    assert dict(model.named_parameters()).keys() == before.keys()
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    kinds = {type(module.kernels) for module in model.blocks[1].modules() if isinstance(module, Linear)}
    assert kinds == {Fp8Kernels, type(plain.kernels)}
    assert isinstance(model.blocks[1].attention.qkv, StackedLinear)  # its three products are one here
    tokens = torch.randint(100, (4, 32))
    loss, exact = model(tokens, tokens), plain(tokens, tokens)
    assert loss.item() != exact.item() and loss.item() == pytest.approx(exact.item(), rel=0.01)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, tokens), plain(tokens, tokens))


def test_a_gpus_operator_takes_the_layouts() -> None:
    """On tensors of a GPU without data the operator checks dtypes, strides and sides as on the GPU."""
    saved: list[Tensor] = []
    ctx: Any = SimpleNamespace(save_for_backward=lambda *tensors: saved.extend(tensors), saved_tensors=saved)
    with FakeTensorMode():
        x = torch.empty(32, 256, device="cuda", dtype=torch.bfloat16)
        y = fp8._Fp8Product.forward(ctx, x, torch.empty(128, 256, device="cuda"))
        assert (y.device.type, y.dtype, y.shape) == ("cuda", torch.bfloat16, (32, 128))
        grad = torch.empty(32, 128, device="cuda", dtype=torch.bfloat16)
        grad_x, grad_weight = fp8._Fp8Product.backward(ctx, grad)
        assert (grad_x.dtype, grad_x.shape) == (torch.bfloat16, (32, 256))
        assert (grad_weight.dtype, grad_weight.shape, grad_weight.stride()) == (torch.float32, (128, 256), (256, 1))
        assert [tensor.dtype for tensor in saved] == [E4M3, torch.float32] * 2
        values, factor = quantize(torch.empty(32, 32, device="cuda"), E4M3)
        with pytest.raises(RuntimeError, match="mat2 must be col_major"):  # it does check
            torch._scaled_mm(values, values, factor, factor)  # pyright: ignore[reportPrivateImportUsage]


def test_a_compiler_takes_all_of_it() -> None:
    _, layer = make_layer()
    compiled: Any = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)
    x = torch.randn(3, 7, 160)
    grad = torch.randn(3, 7, 192)
    torch.testing.assert_close(with_gradients(compiled, x, grad), with_gradients(layer, x, grad))


@pytest.mark.parametrize(
    ("kind", "capability", "dtype", "says"),
    [
        ("cuda", (9, 0), torch.bfloat16, "fp8 in 8 matrices of the blocks, bfloat16 elsewhere"),
        ("cuda", (8, 9), torch.bfloat16, "fp8 in 8 matrices"),
        ("cuda", (8, 0), torch.bfloat16, "bfloat16 \\(--fp8 needs a GPU of .*; this is test\\)"),
        ("cuda", (9, 0), torch.float32, "float32 \\(--fp8 needs"),
        ("npu", (9, 0), torch.bfloat16, "bfloat16 \\(--fp8 needs"),
        ("cpu", (9, 0), torch.float32, "float32 \\(--fp8 needs"),
    ],
)
def test_what_computes_the_products_is_named(kind: str, capability: Any, dtype: torch.dtype, says: str) -> None:
    module: Any = SimpleNamespace(get_device_capability=lambda: capability)
    device = cpu_device(kind=kind, module=module, dtype=dtype)
    model = lively_model(tiny_config(**WIDE))
    assert re.match(says, use_fp8(device, model))
    assert any(
        isinstance(getattr(module, "kernels", None), Fp8Kernels) for module in model.modules()
    ) == says.startswith("fp8")
