"""The output head and its cross-entropy in one, without ever holding all the logits.

A vocabulary of 32,768 over 32,768 tokens is 4 GiB of fp32 logits, and as much again for their gradient. Here a chunk of
tokens goes through head, softmax and gradient at once, and only the gradients of the hidden states and of the head are
kept (source: Hsu et al. 2024, Liger Kernel, the same fusion). `F.linear_cross_entropy` does this from torch 2.13 on,
but has no soft cap and cannot be compiled.

Legend: N tokens, n tokens of a chunk, W width, V vocab.
"""

import torch
from torch import Tensor

# The loss of one token, with the logits 2, 1, 0 of a vocabulary of three and token 0 as its target:
#
#     exp of the logits      7.39   2.72   1.00      sum 11.11
#     softmax                0.67   0.24   0.09      each divided by the sum
#     loss                   log(11.11) - 2 = 0.41   which is -log 0.67
#     gradient              -0.33   0.24   0.09      softmax, minus 1 at the target; it sums to 0
#
# Gradient descent moves logits against the gradient: the target's logit rises, and the others fall in proportion to
# their probability. Where the model is already sure of the target, the gradient is close to 0.
#
# Plain torch operators hold all logits at once, which is slow as well as large. For 4,096 tokens, width 256 and
# V 8,192 in bf16 on two cores, forward and backward take 507 ms; the three matrix products in them alone take 99.

# A target with this value counts for nothing: padding, and tokens that the model is not trained to write.
IGNORE = -1
# Logits up to this cap need no shift before exp: exp(50) x 32,768 and exp(-50) are well inside the range of fp32.
LARGEST_UNSHIFTED = 50


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Bound logits to (-cap, cap) smoothly; 0 leaves them alone (source: Gemma Team 2024, Gemma 2)."""
    return cap * torch.tanh(logits / cap) if cap else logits


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, cap: float, chunk_tokens: int) -> Tensor:
    """Sum in nats of the cross-entropy of softmax(soft_cap(hidden @ weight.T)) against targets.

    hidden (N, W), weight (V, W), targets (N,) with IGNORE where nothing is predicted. Differentiable once, in hidden
    and weight. If every target is ignored, the sum and its gradients are 0.
    """
    # Evaluation needs no gradient: there the plain form does the same with one matrix product a chunk instead of three.
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(hidden, weight, targets, cap, chunk_tokens)  # type: ignore[no-any-return]
    return token_losses(hidden, weight, targets, cap, chunk_tokens).sum()


def token_losses(hidden: Tensor, weight: Tensor, targets: Tensor, cap: float, chunk_tokens: int) -> Tensor:
    """Per-token cross-entropy in nats, (N,) in fp32, 0 where the target is IGNORE.

    The plain form, for losses that weigh each token (RL, DPO): autograd keeps the chunks' logits.
    """
    # With a gradient always a copy, even in fp32: backward reads it after FSDP has freed the gathered weight.
    weight = weight.to(hidden.dtype, copy=torch.is_grad_enabled() and weight.requires_grad)
    # Chunk by chunk, so that without a gradient only one chunk's logits are in memory.
    losses = []
    for h, t in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True):
        logits = soft_cap((h @ weight.T).float(), cap)  # (n, V)
        losses.append(torch.nn.functional.cross_entropy(logits, t, ignore_index=IGNORE, reduction="none"))
    return torch.cat(losses)


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradients in forward, while a chunk's logits are there; backward only scales them.

    The usual way keeps the logits for backward, or computes them a second time. The gradient of a sum needs neither:
    it is known up to one factor, the gradient of the sum itself.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, cap: float, chunk_tokens: int) -> Tensor:
        matrix = weight.to(hidden.dtype)  # (V, W) in the dtype of the products; sums stay in fp32
        columns = torch.arange(weight.size(0), device=hidden.device)
        loss = torch.zeros((), device=hidden.device)
        grad_weight = torch.zeros(weight.shape, device=weight.device)
        grad_hidden = []
        needs_shift = cap <= 0 or cap > LARGEST_UNSHIFTED

        # A chunk is as large as suits the device (`loss_chunk_tokens` in kernels/). An accelerator gets few large ones.
        # A CPU takes 2^21 logits, 256 tokens at V 8,192, which stay in its caches: a training step takes 398 ms, and
        # 463 ms with chunks four times as large (docs/measurements.md).
        for h, t in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True):
            # Logits, capped. They are in fp32: exp turns an error of a logit into a relative error of a probability.
            # tanh(x) = 1 - 2 / (exp(2x) + 1) lowers the price of the cap on a CPU from 95 to 30 ms of a step
            # (docs/measurements.md).
            logits = (h @ matrix.T).float()  # (n, V)
            tanh = logits
            if cap:
                tanh = 1 - 2 / (torch.exp(logits * (2 / cap)) + 1)
                logits = cap * tanh

            # Softmax without its division. exp overflows beyond 88, so each row is shifted by its maximum. Logits
            # within the cap need no shift, which saves two passes over them.
            shift: Tensor | float = 0.0
            if needs_shift:
                shift = logits.amax(dim=1, keepdim=True)  # (n, 1)
                exps = torch.exp(logits - shift)
            else:
                exps = torch.exp(logits)
            total = exps.sum(dim=1, keepdim=True)  # (n, 1)

            # Cross-entropy is log(sum of exp) - logit of the target. `total` sums exps of shifted logits, so the
            # shift is added to its log. Ignored targets count 0 times.
            counts = (t != IGNORE)[:, None].float()  # (n, 1)
            target = t.clamp(min=0)[:, None]  # (n, 1); IGNORE is no index
            loss = loss + ((total.log() + shift - logits.gather(1, target)) * counts).sum()

            # Its gradient in the capped logits is softmax - one-hot(target); through the cap it is multiplied by the
            # derivative of tanh, 1 - tanh^2.
            grad = exps * (counts / total) - torch.where(columns == target, counts, 0.0)  # (n, V)
            if cap:
                grad = grad * (1 - tanh * tanh)
            # From logits back through the product h @ W.T: one product for the gradient of h, one for that of W. The
            # chunks share W, so its gradients add up, in fp32 because bf16 would lose the small ones.
            grad = grad.to(h.dtype)
            grad_hidden.append(grad @ matrix)  # (n, W)
            grad_weight = grad_weight + (grad.T @ h)  # (V, W)
        ctx.save_for_backward(torch.cat(grad_hidden), grad_weight)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx, *grads: Tensor):
        # The gradient that arrives is one scalar, that of the sum. In `train_step` it is 1: the optimizer divides by
        # the number of targets later, when all ranks have counted theirs.
        (grad,) = grads
        grad_hidden, grad_weight = ctx.saved_tensors
        grad_hidden = grad_hidden * grad.to(grad_hidden.dtype)
        grad_weight = (grad_weight * grad).to(ctx.weight_dtype)
        # One for each argument of forward: targets, cap and chunk_tokens have no gradient.
        return grad_hidden, grad_weight, None, None, None
