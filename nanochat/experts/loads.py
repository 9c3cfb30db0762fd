"""How evenly tokens are spread over experts, for the log lines of a run."""

from typing import Any

import torch

from nanochat.device import Device
from nanochat.experts.router import Router
from nanochat.gpt import GPT
from nanochat.ranks import sum_over_ranks


@torch.no_grad()
def read_loads(model: GPT, device: Device) -> dict[str, Any]:
    """The loads of all layers since the last call, over all ranks; empty if no step was taken.

    expert_max_share, expert_min_share  share of the tokens' choices at the busiest and at the least busy expert of a
                                        layer; 1 / experts each where loads are even
    expert_max_tokens                   the tokens of the busiest expert, padding included
    expert_entropy                      of the shares, the mean over the layers: 1 where loads are even, 0 where one
                                        expert has all tokens
    """
    rows = []
    for router in [module for module in model.modules() if isinstance(module, Router)]:
        # No loads: no gradient has reached this layer, or no step was taken.
        empty = torch.zeros(router.config.experts, device=device.torch_device)
        rows.append(empty if router.loads is None else router.loads)
        router.loads = None
    loads = sum_over_ranks(torch.stack(rows), device)  # (layers, E)
    totals = loads.sum(dim=1, keepdim=True)
    shares = loads / totals.clamp(min=1)
    even = torch.full_like(shares, 1 / shares.size(1))
    shares = torch.where(totals > 0, shares, even)
    entropy = -torch.xlogy(shares, shares).sum(dim=1).mean()
    numbers = torch.stack((shares.max(), shares.min(), loads.max(), entropy, totals.sum())).tolist()
    most, least, tokens, nats, total = numbers
    if not total:
        return {}
    largest = torch.tensor(float(shares.size(1))).log().item()
    return {
        "expert_max_share": most,
        "expert_min_share": least,
        "expert_max_tokens": int(tokens),
        "expert_entropy": nats / largest if largest else 1.0,
    }
