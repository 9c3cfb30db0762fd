"""The router: which experts a token goes to, and with which weights.

It scores every expert for every token, and the K experts with the highest scores take the token. Nothing in this keeps
the router from sending all tokens to the same few experts, which then learn the most and are chosen the more. A bias on
each expert's score balances them. It takes part in the choice, but not in the weights, so that it changes no output
directly and needs no auxiliary loss (source: Wang et al. 2024, Auxiliary-Loss-Free Load Balancing Strategy for
Mixture-of-Experts; DeepSeek-AI 2024, DeepSeek-V3).

Legend: N tokens, C width, E experts, K experts per token.
"""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nanochat.device import Device
from nanochat.gpt import GPT, GPTConfig
from nanochat.optim import ParameterGroup
from nanochat.ranks import sum_over_ranks

# How far the bias of an expert moves in a step (source: DeepSeek-AI 2024, DeepSeek-V3): it falls if the expert had more
# tokens in the step than the mean, and rises if it had fewer.
BIAS_RATE = 0.001
# The bias is a parameter whose gradient is the surplus of tokens, not a derivative, and AdamW without memory (betas of
# 0) moves it by its rate against the sign of the surplus. So loads are summed over micro-batches and ranks, saved,
# resumed and skipped as every other gradient and parameter is.
# Only tokens that learn count: padding differs from one number of ranks to another. So nothing moves in RL when all
# replies are equally good, nor in the first step of a new model, whose output projections are 0.
# The gradient is made small, so that the norm of all gradients is what it would be without it: its sign is all that
# matters. The factor is a power of two, so that micro-batches and ranks add up to exactly 0 without a surplus.
SURPLUS = 2.0**-30


class Router(nn.Module):
    """Scores of experts, in fp32: in bf16 experts with nearly equal scores would tie."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.experts, config.width))
        self.bias = nn.Parameter(torch.zeros(config.experts)) if config.router == "sigmoid" else None
        # The tokens of each expert (E,), over the training steps since `read_loads`; None: no step yet.
        self.loads: Tensor | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (N, C) -> the weights of each token's experts (N, K) in fp32, their numbers (N, K), and the number of
        tokens of each expert (E,)."""
        c = self.config
        logits = F.linear(x.float(), self.weight.float())  # (N, E)
        scores = logits.log_softmax(dim=-1) if c.router == "softmax" else F.logsigmoid(logits)  # their logarithms
        ranked = scores.detach().exp()
        if self.bias is not None:
            # Only differences between biases matter. Their mean would drift over a long run, and is left out.
            bias = self.bias.detach().float()
            ranked = ranked + (bias - bias.mean())
        chosen = ranked.topk(c.experts_per_token, dim=-1).indices
        weights = scores.gather(1, chosen)
        # A softmax of logarithms divides by the sum. For a single expert its gradient is 0 without rounding.
        weights = weights.softmax(dim=-1) if c.router_normalized else weights.exp()
        counts = _counts(chosen, c.experts)
        if weights.requires_grad:
            weights = _CountLoads.apply(weights, self.bias, chosen, counts, self)
        return weights, chosen, counts


def take_biases(roles: dict[str, list[tuple[str, nn.Parameter]]]) -> ParameterGroup:
    """Take the biases of routers out of the roles of a model's parameters, into a group for the optimizer."""
    biases = [(name, bias) for name, bias in roles["vector"] if name.endswith("router.bias")]
    roles["vector"] = [(name, parameter) for name, parameter in roles["vector"] if not name.endswith("router.bias")]
    trained = [(name, bias) for name, bias in biases if bias.requires_grad]
    # With betas of 0, AdamW divides each gradient by its own size: every element moves by the rate.
    return ParameterGroup("adamw", trained, BIAS_RATE, betas=(0.0, 0.0), eps=1e-20)


def _counts(chosen: Tensor, experts: int) -> Tensor:
    """How often each expert is chosen (E,). Not by bincount, for which the host would wait."""
    numbers = torch.arange(experts, device=chosen.device)
    return (chosen.unsqueeze(-1) == numbers).sum(dim=(0, 1))


class _CountLoads(torch.autograd.Function):
    """Returns the weights unchanged. Its backward pass counts the tokens of each expert.

    The backward pass runs once for each forward pass in training, also where recomputation runs the forward pass
    twice, and never for an evaluation or a sample.
    """

    @staticmethod
    def forward(ctx, weights: Tensor, bias: Tensor | None, chosen: Tensor, counts: Tensor, router: Any) -> Tensor:
        ctx.save_for_backward(chosen, counts)
        ctx.router = router
        return weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        chosen, counts = ctx.saved_tensors
        router = ctx.router
        router.loads = counts.float() if router.loads is None else router.loads + counts
        surplus = None
        if ctx.needs_input_grad[1]:
            learns = (grads[0] != 0).any(dim=-1)  # (N,)
            learning = _counts(torch.where(learns.unsqueeze(-1), chosen, -1), len(counts)).float()
            # In whole numbers, as the mean may be none: only then does the sum of an expert with its share give 0.
            surplus = (len(counts) * learning - learning.sum()) * SURPLUS
        return grads[0], surplus, None, None, None


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
