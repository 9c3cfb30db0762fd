"""The output head and its cross-entropy in one, without ever holding all the logits.

A vocabulary of 32,768 over 32,768 tokens is 4 GiB of fp32 logits, and as much again for their
gradient. Here a chunk of tokens goes through head, softmax and gradient at once, and only the
gradients of the hidden states and of the head are kept (source: Hsu et al. 2024, Liger Kernel,
who describe the same fusion). `F.linear_cross_entropy` does this too from torch 2.13 on, but
knows no soft cap and cannot be compiled.

Legend: N tokens, W width, V vocab.
"""

import torch
from torch import Tensor

IGNORE = -1  # a target with this value counts for nothing
CHUNK_ELEMENTS = 1 << 21  # logits in flight on a CPU, about what its caches hold: 14% off a step's time
DEVICE_CHUNK_ELEMENTS = 1 << 27  # on an accelerator, which wants few and large launches: 512 MiB in fp32
CHUNK_TOKENS = 256  # in flight at least


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Bound logits to (-cap, cap) smoothly; 0 leaves them alone (source: Gemma Team 2024, Gemma 2)."""
    return cap * torch.tanh(logits / cap) if cap else logits


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, cap: float = 0.0) -> Tensor:
    """Sum in nats of the cross-entropy of softmax(soft_cap(hidden @ weight.T)) against targets.

    hidden (N, W), weight (V, W), targets (N,) with IGNORE where nothing is to be predicted.
    Differentiable in hidden and weight, once. If every target is ignored the sum and its gradients are 0.
    """
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(hidden, weight, targets, cap)  # type: ignore[no-any-return]
    return token_losses(hidden, weight, targets, cap).sum()


def token_losses(hidden: Tensor, weight: Tensor, targets: Tensor, cap: float = 0.0) -> Tensor:
    """Per-token cross-entropy in nats, (N,) in fp32, 0 where the target is IGNORE."""
    # A copy even in fp32 where there is a gradient: backward reads it, when a sharded head has let go of its own.
    weight = weight.to(hidden.dtype, copy=torch.is_grad_enabled() and weight.requires_grad)
    losses = []
    for h, t in _chunks(hidden, targets, weight.size(0)):
        logits = soft_cap((h @ weight.T).float(), cap)  # (n, V)
        losses.append(torch.nn.functional.cross_entropy(logits, t, ignore_index=IGNORE, reduction="none"))
    return torch.cat(losses)


def _chunks(hidden: Tensor, targets: Tensor, vocab: int) -> list[tuple[Tensor, Tensor]]:
    elements = CHUNK_ELEMENTS if hidden.device.type == "cpu" else DEVICE_CHUNK_ELEMENTS
    size = max(CHUNK_TOKENS, elements // vocab)
    return list(zip(hidden.split(size), targets.split(size), strict=True))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, cap: float) -> Tensor:
        matrix, bounded = weight.to(hidden.dtype), 0 < cap <= 50
        loss = torch.zeros((), device=hidden.device)
        grad_hidden, grad_weight = [], torch.zeros(weight.shape, device=weight.device)
        columns = torch.arange(weight.size(0), device=hidden.device)
        for h, t in _chunks(hidden, targets, weight.size(0)):
            logits = (h @ matrix.T).float()  # (n, V)
            capped = 1 - 2 / (torch.exp(logits * (2 / cap)) + 1) if cap else logits  # tanh, at half its price
            scaled = cap * capped if cap else logits
            # logits within (-50, 50) need no shift: exp can neither overflow nor vanish there
            high = 0.0 if bounded else scaled.amax(dim=1, keepdim=True)
            exps = torch.exp(scaled if bounded else scaled - high)
            total = exps.sum(dim=1, keepdim=True)  # (n, 1)
            counts = (t != IGNORE)[:, None].float()  # (n, 1)
            chosen = t.clamp(min=0)[:, None]
            loss = loss + ((total.log() + high - scaled.gather(1, chosen)) * counts).sum()
            grad = exps * (counts / total) - torch.where(columns == chosen, counts, 0.0)
            if cap:
                grad = grad * (1 - capped * capped)
            grad = grad.to(h.dtype)
            grad_hidden.append(grad @ matrix)
            grad_weight = grad_weight + (grad.T @ h)
        ctx.save_for_backward(torch.cat(grad_hidden), grad_weight)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (grad,) = grads
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad.to(grad_hidden.dtype), (grad_weight * grad).to(ctx.weight_dtype), None, None
