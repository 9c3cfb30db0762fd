"""The fused head and cross-entropy against the plain pair, and against its promise to hold no (N, V)."""

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanochat.cross_entropy import IGNORE, linear_cross_entropy, soft_cap

N, W, V = 37, 8, 50
token_losses = functools.partial(linear_cross_entropy, reduction="none")


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, cap: float) -> Tensor:
    """All logits at once, in fp32 or, if the hidden states are, in fp64."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    logits = soft_cap(hidden.to(dtype) @ weight.to(dtype).T, cap)
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")


def random_case(scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = torch.randn(N, W) * scale, torch.randn(V, W)
    targets = torch.randint(0, V, (N,))
    targets[::5] = IGNORE
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def with_gradients(
    function, hidden: Tensor, weight: Tensor, targets: Tensor, cap: float, *chunk_tokens: int
) -> list[Tensor]:
    loss = function(hidden, weight, targets, cap, *chunk_tokens)
    return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]


chunked = pytest.mark.parametrize("chunk_tokens", [1, 7, 4096])


@chunked
@pytest.mark.parametrize("cap", [0.0, 15.0, 2.0])
def test_fused_equals_plain(cap: float, chunk_tokens: int) -> None:
    """Sums and losses of single tokens, their gradients for an upstream gradient of 3, and both without gradients."""
    hidden, weight, targets = case = random_case(scale=3.0)
    share = torch.randn(N)  # as an advantage: of both signs

    def weighted(*inputs: Any) -> Tensor:
        return (token_losses(*inputs) * share).sum()

    def plain_weighted(hidden: Tensor, weight: Tensor, targets: Tensor, cap: float) -> Tensor:
        logits = soft_cap(hidden @ weight.T, cap)
        return (F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none") * share).sum()

    for fused, reference in ((linear_cross_entropy, plain), (weighted, plain_weighted)):
        wanted = with_gradients(reference, *case, cap)
        thrice = with_gradients(lambda *inputs, fused=fused: 3 * fused(*inputs), *case, cap, chunk_tokens)
        for got, one in zip(thrice, wanted, strict=True):
            torch.testing.assert_close(got / 3, one, rtol=2e-5, atol=1e-5)
        with torch.no_grad():
            torch.testing.assert_close(fused(*case, cap, chunk_tokens), wanted[0], rtol=2e-5, atol=1e-5)
    assert token_losses(*case, cap, chunk_tokens)[targets == IGNORE].eq(0).all()


@chunked
@pytest.mark.parametrize("cap", [0.0, 15.0])
@pytest.mark.parametrize("in_fp32", [True, False])
def test_bfloat16_is_near_plain(cap: float, chunk_tokens: int, in_fp32: bool) -> None:
    hidden, weight, targets = random_case()
    half = hidden.detach().bfloat16().requires_grad_()
    options = (cap, chunk_tokens, None, in_fp32)
    loss, grad_hidden, grad_weight = with_gradients(linear_cross_entropy, half, weight, targets, *options)
    rounded = (half.detach().float().requires_grad_(), weight.detach().bfloat16().float().requires_grad_(), targets)
    wanted = with_gradients(plain, *rounded, cap)
    assert (loss.dtype, grad_hidden.dtype, grad_weight.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    torch.testing.assert_close(loss, wanted[0], rtol=5e-3, atol=0)
    for got, reference in ((grad_hidden.float(), wanted[1]), (grad_weight, wanted[2])):
        assert (got - reference).norm() < 0.01 * reference.norm()


@pytest.mark.parametrize("function", [linear_cross_entropy, lambda *inputs: token_losses(*inputs).sum()])
def test_the_gradient_of_a_bfloat16_head_is_rounded_once(function: Any) -> None:
    """As FSDP gathers the head: the sum over chunks of tokens is in fp32."""
    hidden, weight, targets = random_case()
    half = hidden.detach().bfloat16().requires_grad_()
    gathered = weight.detach().bfloat16().requires_grad_()
    whole = gathered.detach().float().requires_grad_()
    loss, grad_hidden, grad_weight = with_gradients(function, half, gathered, targets, 15.0, 1)
    exact = with_gradients(function, half, whole, targets, 15.0, 1)
    assert torch.equal(loss, exact[0]) and torch.equal(grad_hidden, exact[1])
    assert grad_weight.dtype == torch.bfloat16 and torch.equal(grad_weight, exact[2].bfloat16())
    assert not torch.equal(grad_weight.float(), exact[2])


@pytest.mark.parametrize("logit", [4.0, 5.0, 6.0])
def test_a_target_that_is_nearly_certain_has_an_exact_gradient_in_bfloat16(logit: float) -> None:
    """For a logit of 6 its softmax is 0.9975, which bf16 rounds to 0.996 or 1: softmax - 1 is computed in fp32."""
    hidden = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[logit], [0.0]], requires_grad=True)
    cap = 15.0
    loss = linear_cross_entropy(hidden, weight, torch.tensor([0]), cap, 1, None, False)
    (grad,) = torch.autograd.grad(loss, weight)
    tanh = torch.tensor(logit / cap).bfloat16().tanh()
    capped = (tanh * cap).item()
    assert loss.item() == pytest.approx(math.log1p(math.exp(-capped)), rel=1e-4)
    assert grad[0].item() == pytest.approx(-(1 - tanh.item() ** 2) / (1 + math.exp(capped)), rel=0.01)


@pytest.mark.parametrize("cap", [0.0, 15.0])
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_nothing_to_predict_is_exactly_nothing(cap: float, size: float) -> None:
    hidden, weight, _ = random_case(size)
    nothing = torch.full((N,), IGNORE)
    for value in with_gradients(linear_cross_entropy, hidden, weight, nothing, cap, 7):
        assert value.eq(0).all()
    assert token_losses(hidden, weight, nothing, cap, 7).eq(0).all()


@pytest.mark.parametrize("cap", [0.0, 15.0, 50.0, 200.0])
def test_large_logits_do_not_overflow(cap: float) -> None:
    hidden, weight, targets = random_case(scale=1e4)
    truth = with_gradients(plain, hidden.double(), weight.double(), targets, cap)
    for got, wanted in zip(with_gradients(linear_cross_entropy, hidden, weight, targets, cap, 7), truth, strict=True):
        assert got.isfinite().all()
        # fp32 holds the cap's derivative, near 0 here, to 2.4e-7. The gradients are sums of it times up to 1e4.
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=4e-3)


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor any operator returned."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.numel())
        return out


@pytest.mark.parametrize("function", [linear_cross_entropy, token_losses])
@pytest.mark.parametrize("cap", [0.0, 15.0])
def test_the_logits_are_never_all_there(cap: float, function) -> None:
    rows, chunk = 64, 4
    hidden, weight = torch.randn(rows, W, requires_grad=True), torch.randn(V, W, requires_grad=True)
    targets = torch.randint(0, V, (rows,))
    saved = []
    with LargestTensor() as seen:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
            loss = function(hidden, weight, targets, cap, chunk)
        loss.sum().backward()
        function(hidden.detach(), weight.detach(), targets, cap, chunk)
    assert seen.elements <= max(rows * W, V * W, chunk * V) < rows * V
    assert sum(saved) <= rows * W + V * W + rows
