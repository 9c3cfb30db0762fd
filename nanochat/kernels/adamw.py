"""AdamW by plain operators, for devices whose fused operator cannot skip a step."""

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
            factors[update.betas] = ((1 - beta1) * ok, (1 - beta2) * ok, correction1, correction1 / root2)
        first_portion, second_portion, correction1, ratio = factors[update.betas]
        # A skipped step's gradient may be NaN, and 0 x NaN is NaN: select instead of multiplying.
        grad = torch.cat([grad.flatten() for grad in update.grads]).div_(targets).masked_fill_(skipped, 0.0)
        update.first_moment.lerp_(grad, first_portion)
        update.second_moment.lerp_(grad.mul_(grad), second_portion)
        # m' / (sqrt(v') + eps), where m' = m / correction1 and sqrt(v') = sqrt(v) / root2. With both corrections in the
        # divisor it is m / (sqrt(v) correction1 / root2 + eps correction1).
        divisor = update.second_moment.sqrt().mul_(ratio).add_(correction1, alpha=update.eps)
        move = torch.div(update.first_moment, divisor, out=divisor)
        if update.weight_decay:
            move.add_(torch.cat([weight.flatten() for weight in update.weights]), alpha=update.weight_decay)
        moves = split_like(move.mul_(ok), update.weights)
        torch._foreach_mul_(moves, update.learning_rates)  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_sub_(update.weights, moves)  # pyright: ignore[reportPrivateImportUsage]
