"""AdamW by plain operators, for devices whose fused operator cannot skip a step."""

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from nanochat.operators import AdamWUpdate, split_like


def unfused_adamw(updates: Iterable[AdamWUpdate], steps: Tensor, targets: Tensor, ok: Tensor) -> None:
    """`TorchKernels.adamw`, where all parameters of an update are one tensor: one launch per operator."""
    skipped = ok == 0
    steps = steps.clamp(min=1)  # it is 0 when the first step is skipped
    factors: dict[tuple[float, float], tuple[Tensor, ...]] = {}  # by betas, which most updates share
    for update in updates:
        if update.betas not in factors:
            beta1, beta2 = update.betas
            correction1 = 1 - beta1**steps
            root2 = (1 - beta2**steps).sqrt()
            # The moments move by (1 - beta) of the way to the gradient; in a skipped step they stay.
            factors[update.betas] = ((1 - beta1) * ok, (1 - beta2) * ok, ok / correction1, root2)
        first_portion, second_portion, share, root2 = factors[update.betas]
        # A skipped step's gradient may be NaN, and 0 x NaN is NaN: select instead of multiplying.
        grad = torch.cat([grad.flatten() for grad in update.grads]).div_(targets).masked_fill_(skipped, 0.0)
        update.first_moment.lerp_(grad, first_portion)
        update.second_moment.lerp_(grad.mul_(grad), second_portion)
        # m' / (sqrt(v') + eps), where m' = m / correction1 and sqrt(v') = sqrt(v) / root2
        divisor = update.second_moment.sqrt().div_(root2)
        sizes, rates, eps = _runs(update)
        torch._foreach_add_(divisor.split(sizes), eps)  # pyright: ignore[reportPrivateImportUsage]
        move = torch.div(update.first_moment, divisor, out=divisor).mul_(share)
        if update.weight_decay:
            decayed = torch.cat([weight.flatten() for weight in update.weights])
            move.addcmul_(decayed, ok, value=update.weight_decay)
        torch._foreach_mul_(move.split(sizes), rates)  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_sub_(update.weights, split_like(move, update.weights))  # pyright: ignore[reportPrivateImportUsage]


def _runs(update: AdamWUpdate) -> tuple[list[int], list[float], list[float]]:
    """Runs of parameters with the same learning rate and epsilon: the number of elements of each, and the two."""
    sizes = []
    rates = []
    all_eps = []
    members = zip(update.learning_rates, update.eps, update.weights, strict=True)
    for (rate, eps), run in itertools.groupby(members, key=lambda member: member[:2]):
        sizes.append(sum(weight.numel() for _, _, weight in run))
        rates.append(rate)
        all_eps.append(eps)
    return sizes, rates, all_eps
