"""The output head fused with its cross-entropy, so that all logits are never in memory at once.

32,768 tokens with a vocabulary of 32,768 have 4 GiB of fp32 logits, and their gradient takes as much again. Here a
chunk of tokens goes through head, softmax and gradient at once, and its logits are dropped (source: Hsu et al. 2024,
Liger Kernel, the same fusion). `F.linear_cross_entropy` does this from torch 2.13 on, but it lacks a soft cap and
cannot be compiled.

Legend: N tokens, n tokens of a chunk, W width, V vocab.
"""

from typing import Any

import torch
from torch import Tensor

# The loss of one token. The vocabulary has three tokens with the logits 2, 1, 0, and token 0 is the target:
#
#     exp of the logits      7.39   2.72   1.00      sum 11.11
#     softmax                0.67   0.24   0.09      each divided by the sum
#     loss                   log(11.11) - 2 = 0.41   which is -log 0.67
#     gradient              -0.33   0.24   0.09      softmax, minus 1 at the target; it sums to 0
#
# Gradient descent moves logits against the gradient: the target's logit rises, and the others fall in proportion to
# their probability. If the model is already sure of the target, the gradient is close to 0.
#
# Plain torch operators hold all logits at once, which is slow as well as large. For 4,096 tokens, width 256 and
# V 8,192 in bf16 on two cores, forward and backward take 507 ms, of which the three matrix products need only 99.

# A target with this value is ignored: padding, and tokens that the model does not learn to write.
IGNORE = -1
# Logits up to this cap need no shift before exp: exp(2 x 35) x 32,768 is well inside the range of fp32.
LARGEST_UNSHIFTED = 35


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Bound logits to (-cap, cap) smoothly; 0 turns the cap off (source: Gemma Team 2024, Gemma 2)."""
    return cap * torch.tanh(logits / cap) if cap else logits


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    cap: float,
    chunk_tokens: int,
    slice_tokens: int | None = None,
    in_fp32: bool = True,
    reduction: str = "sum",
) -> Tensor:
    """The cross-entropy in nats of softmax(soft_cap(hidden @ weight.T)) against targets, in fp32.

    hidden (N, W), weight (V, W), targets (N,) with IGNORE where nothing is predicted. It is a sum, or with the
    reduction "none" (N,), 0 where the target is IGNORE: for losses that weigh each token (RL, DPO). Differentiable
    once, in hidden and weight. The logits of `chunk_tokens` tokens are in memory at a time. The steps between the
    products pass over `slice_tokens` tokens at a time (None: over all), in fp32. Without `in_fp32` they are in the
    dtype of the products where a sum needs a gradient.
    """
    # Check this here: inside `forward` autograd is off, and `needs_input_grad` is True in an evaluation as well.
    has_backward = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    inputs = (hidden, weight, targets, cap, chunk_tokens, slice_tokens)
    if has_backward and reduction == "sum":
        return _SummedLoss.apply(*inputs, in_fp32)  # type: ignore[no-any-return]
    # Evaluation needs no gradient: then a chunk costs one matrix product instead of three.
    losses: Tensor = _TokenLosses.apply(*inputs, has_backward)  # type: ignore[assignment]
    return losses.sum() if reduction == "sum" else losses


def _slice_loss(logits: Tensor, targets: Tensor, cap: float, weights: Tensor | None) -> Tensor:
    """The losses (n,) of n tokens, from logits (n, V), which are overwritten, and targets (n,).

    With weights (n,) the gradient of the sum of weights x losses, with respect to the logits before the cap, takes the
    place of the logits.
    """
    # A chunk's logits are the largest tensors of a step, so each pass over them counts. Operators work in place where
    # they can: 7 operators read and write 14 numbers per logit, or 56 bytes in fp32. What is small, one number per
    # token, is in fp32 in any case: above all the sums of exps.
    tanh = None
    if cap:
        tanh = logits.div_(cap).tanh_()
        logits = tanh * cap

    # Ignored targets count 0 times. IGNORE is not an index, so they look up token 0 and drop the result.
    counts = (targets != IGNORE)[:, None].float()  # (n, 1)
    target = targets.clamp(min=0)[:, None]  # (n, 1)
    target_logit = logits.gather(1, target).float()  # (n, 1)

    # Softmax without its division. exp overflows beyond 88, so each row is shifted by its maximum. Logits within the
    # cap need no shift, which saves two passes over them.
    if cap <= 0 or cap > LARGEST_UNSHIFTED:
        shift = logits.amax(dim=1, keepdim=True)  # (n, 1)
        logits -= shift
        target_logit -= shift
    exps = logits.exp_()  # (n, V), up to one factor per row
    # The target's exp is often most of the sum. So the sum has its exact value, where bf16 has rounded it.
    target_exp = target_logit.exp()
    rounded = exps.gather(1, target)  # (n, 1)
    total = exps.sum(dim=1, keepdim=True, dtype=torch.float32) - rounded + target_exp  # (n, 1)

    # Cross-entropy is log(sum of exp) - logit of the target, and a shift of both cancels out.
    losses = (total.log() - target_logit) * counts  # (n, 1)

    # The gradient with respect to the capped logits is softmax - one-hot(target), times the token's weight. One pass
    # multiplies exps by weight / total, which gives the weighted softmax. The target's own is written over it.
    # The cap multiplies it by the derivative of cap tanh(x / cap), which is 1 - tanh^2.
    if weights is not None:
        weights = weights[:, None] * counts
        scale = weights / total
        grad = exps.mul_(scale.to(exps.dtype))
        grad.scatter_(1, target, (target_exp * scale - weights).to(grad.dtype))
        if tanh is not None:
            torch.ops.aten.tanh_backward.grad_input(grad, tanh, grad_input=tanh)
    return losses[:, 0]


def _chunk_loss(
    h: Tensor, matrix: Tensor, targets: Tensor, cap: float, slice_tokens: int | None, weights: Tensor | None = None,
    in_fp32: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """h (n, W), matrix (V, W), targets and weights (n,) -> the losses (n,), and the gradient of the sum of weights x
    losses with respect to the logits (n, V), in the dtype of h. Without weights the second result is meaningless."""
    logits = h @ matrix.T  # (n, V)
    if in_fp32:
        logits = logits.float()
    losses = []
    size = slice_tokens or len(logits)
    for start in range(0, len(logits), size):
        tokens = slice(start, start + size)
        losses.append(_slice_loss(logits[tokens], targets[tokens], cap, None if weights is None else weights[tokens]))
    all_losses = torch.cat(losses) if len(losses) > 1 else losses[0]
    return all_losses, logits if weights is None else logits.to(h.dtype)


def _chunk_gradients(
    ctx: Any, hidden: Tensor, matrix: Tensor, targets: Tensor, weights: Tensor, cap: float, chunk_tokens: int,
    slice_tokens: int | None, in_fp32: bool = True,
) -> tuple[list[Tensor], Tensor, Tensor | None]:  # fmt: skip
    """The losses of each chunk, and the gradients of the sum of weights (N,) x losses in hidden and in the matrix."""
    grad_weight = None
    all_losses = []
    grad_hidden = []
    # The device decides the sizes of chunks and slices (`loss_tokens` in kernels/). An accelerator gets a few large
    # ones. On a CPU, products are faster with 1,024 rows than with 256 (0.86 and 0.72 of a bare product's speed, on
    # an AMD EPYC, 2026-11-23). The passes between them are faster with 128 rows, which stay in the caches.
    parts = (hidden.split(chunk_tokens), targets.split(chunk_tokens), weights.split(chunk_tokens))
    for h, t, w in zip(*parts, strict=True):
        losses, grad = _chunk_loss(h, matrix, t, cap, slice_tokens, w, in_fp32)
        all_losses.append(losses)
        # Back through the product h @ W.T: one product for the gradient of h, one for the gradient of W. The chunks
        # share W, so its gradients add up, in fp32 because bf16 would lose the small ones.
        grad_hidden.append(grad @ matrix)  # (n, W)
        # A frozen head (lora.py) needs no gradient, which would be as large as the head in fp32.
        if ctx.needs_input_grad[1]:
            product = grad.T @ h  # (V, W)
            grad_weight = product.float() if grad_weight is None else grad_weight.add_(product)
            del product  # before the next chunk's logits
    return all_losses, torch.cat(grad_hidden) if len(grad_hidden) > 1 else grad_hidden[0], grad_weight


class _SummedLoss(torch.autograd.Function):
    """Computes the gradients in forward, while a chunk's logits are in memory; backward only scales them.

    The usual way keeps the logits for backward, or computes them a second time. The gradient of a sum needs neither:
    it is known up to one factor, the gradient of the sum itself. So forward ends with both gradients, N x W and V x W
    numbers, instead of N x V logits. At N 32,768, W 768 and V 32,768 that is 100 MB each in fp32 instead of 4 GiB.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, *options: Any) -> Tensor:
        matrix = weight.to(hidden.dtype)  # (V, W) in the dtype of the products; sums stay in fp32
        ones = torch.ones(targets.shape, device=targets.device)
        chunks, grad_hidden, grad_weight = _chunk_gradients(ctx, hidden, matrix, targets, ones, *options)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return torch.cat(chunks).sum()

    @staticmethod
    def backward(ctx, *grads: Tensor):
        # The incoming gradient is one scalar, for the sum. In `train_step` it is 1: once all ranks have counted their
        # targets, the optimizer divides by the total.
        (grad,) = grads
        grad_hidden, grad_weight = ctx.saved_tensors
        grad_hidden = grad_hidden * grad.to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grad).to(ctx.weight_dtype)
        # One result per argument of forward; the others have no gradient.
        return grad_hidden, grad_weight, None, None, None, None, None


class _TokenLosses(torch.autograd.Function):
    """Losses per token. Each has its own factor, which only backward knows, so backward computes the chunks again.

    This costs one product more than keeping the logits. It saves 4 GiB of logits for 8 rows of 2,048 tokens with a
    vocabulary of 32,768.
    """

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, targets: Tensor, cap: float, chunk_tokens: int, slice_tokens: int | None,
        has_backward: bool,
    ) -> Tensor:  # fmt: skip
        # Backward needs a copy, even in fp32: it reads the matrix after FSDP has freed the gathered weight.
        matrix = weight.to(hidden.dtype, copy=has_backward)
        ctx.save_for_backward(hidden, matrix, targets)
        ctx.options = (cap, chunk_tokens, slice_tokens)
        ctx.weight_dtype = weight.dtype
        losses = []
        for h, t in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True):
            losses.append(_chunk_loss(h, matrix, t, cap, slice_tokens)[0])
        return torch.cat(losses)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        hidden, matrix, targets = ctx.saved_tensors
        _, grad_hidden, grad_weight = _chunk_gradients(ctx, hidden, matrix, targets, grads[0], *ctx.options)
        if grad_weight is not None:
            grad_weight = grad_weight.to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None, None
