"""The experts of a block, in the place of its MLP.

Each expert is a separate MLP, and a token passes through K of the E experts, so that a model can have many more
parameters than a token is multiplied by (source: Shazeer et al. 2017, Outrageously Large Neural Networks). No expert
has a capacity: every token reaches all of its experts, however many tokens they have (source: Gale et al. 2022,
MegaBlocks).

The matrices of all experts are stacked in one parameter, one below the other, like q, k and v. The optimizer, files and
sharding see rows of a matrix, and Muon takes each expert's matrices apart (train.py).

How N tokens pass through, here 3 tokens with K = 2 of E = 3 experts:

    chosen        token 0: 2, 0    token 1: 0, 1    token 2: 2, 0       pairs 0 to 5 of token and expert
    sorted        0: tokens 0 1 2      1: token 1      2: tokens 0 2    pairs 1 2 5 | 3 | 0 4
    experts       each multiplies its rows, one grouped product for all of them
    summed        each token's K rows, by the router's weights

Legend: B batch, T time, C width, N tokens, E experts, K experts per token, M width of an expert.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.function import once_differentiable

from nanochat.experts.router import Router, read_loads, take_biases
from nanochat.gpt import MLP, GPTConfig, Linear
from nanochat.ground.cli import UserError
from nanochat.ground.sharding import is_dtensor
from nanochat.kernels.grouped import Groups, loop_product
from nanochat.operators import TorchKernels


class ExpertLinear(nn.Module):
    """One linear layer for each expert, without bias. Rows of x are sorted by expert."""

    cast: Tensor | None = None  # the weight in the dtype of the products, see `TorchKernels.cast_weights`

    def __init__(self, experts: int, inputs: int, outputs: int, kernels: TorchKernels):
        super().__init__()
        self.experts = experts
        self.in_features = inputs
        self.out_features = outputs  # rows of one expert's matrix
        self.kernels = kernels
        self.weight = nn.Parameter(torch.empty(experts * outputs, inputs))

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        """x (rows, inputs) -> (rows, outputs)"""
        return grouped_product(self.kernels, x, self.weight, groups, self.cast)


def grouped_product(
    kernels: TorchKernels, x: Tensor, weight: Tensor, groups: Groups, cast: Tensor | None = None
) -> Tensor:
    """Multiply the rows of each group of x (rows, inputs) by its own matrix, of those that are stacked in the weight
    (groups x outputs, inputs) -> (rows, outputs)."""
    if is_dtensor(weight):  # each rank has other experts, and x has their rows (parallel/experts.py)
        weight = weight.to_local()
    grouped = getattr(kernels, "grouped_product", None)
    if grouped is not None:
        return grouped(x, weight, groups, cast)
    return loop_product(kernels.product, x, weight, groups, cast)


class Experts(nn.Module):
    """Routed experts, and with `shared_experts` an MLP of their width for every token."""

    read_loads = staticmethod(read_loads)  # numbers for the log lines of a run
    take_biases = staticmethod(take_biases)  # for the optimizer

    def __init__(self, config: GPTConfig, kernels: TorchKernels):
        super().__init__()
        require_possible(config)
        self.kernels = kernels
        self.config = config
        self.gated = config.mlp == "swiglu"
        inputs = 2 * config.mlp_width if self.gated else config.mlp_width  # gate and up in one product
        self.router = Router(config)
        self.input = ExpertLinear(config.experts, config.width, inputs, kernels)
        self.output = ExpertLinear(config.experts, config.mlp_width, config.width, kernels)
        self.shared = None
        if config.shared_experts:
            self.shared = MLP(replace(config, mlp_width=config.shared_experts * config.mlp_width), kernels)
        self.shared_gate = Linear(config.width, 1, kernels) if config.shared_gate else None

    def init_weights(self, uniform: Callable[[Tensor, float], None], std: float) -> None:
        """Draw what an MLP does not have; `GPT.init_weights` draws the input and the output of the experts."""
        uniform(self.router.weight, std)
        if self.router.bias is not None:
            self.router.bias.zero_()
        if self.shared is not None:
            uniform(self.shared.input.weight, 0.4 * std)
            self.shared.output.weight.zero_()
        if self.shared_gate is not None:
            self.shared_gate.weight.zero_()  # half open

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        tokens = x.flatten(0, 1)  # (N, C)
        weights, chosen, counts = self.router(tokens)
        # A stable sort keeps the tokens of an expert in their order, so that one expert computes what an MLP does. Some
        # devices sort and write only numbers of 32 bits quickly.
        pairs = chosen.flatten().float().sort(stable=True).indices  # (N K,), the pairs of token and expert by expert
        order = torch.arange(len(pairs), dtype=torch.int32, device=x.device)
        places = torch.empty_like(order).scatter_(0, pairs, order)  # where each pair stands in that order
        rows = _ToExperts.apply(tokens, pairs, places, chosen.size(1))  # (N K, C)
        rows = self.compute(rows, Groups(len(rows), counts))
        rows = _FromExperts.apply(rows, pairs, places).view(*chosen.shape, -1)  # (N, K, C)
        weights = weights.to(x.dtype).unsqueeze(1)  # (N, 1, K); only a CPU multiplies N tiny matrices quickly
        y = (torch.bmm(weights, rows) if rows.is_cpu else (weights.mT * rows).sum(dim=1)).view_as(x)
        if self.shared is None:
            return y
        shared = self.shared(x)
        return y + (shared if self.shared_gate is None else shared * torch.sigmoid(self.shared_gate(x)))

    def compute(self, rows: Tensor, groups: Groups) -> Tensor:
        """The experts' MLPs over rows that are sorted by expert: (rows, C) -> (rows, C).

        Where ranks have different experts, rows travel to them before this and back after it.
        """
        rows = self.input(rows, groups)
        rows = self.kernels.swiglu(rows) if self.gated else self.kernels.relu_squared(rows)
        return self.output(rows, groups)


def require_possible(config: GPTConfig) -> None:
    """Raises UserError: when no such experts exist, naming the flag."""
    if not 1 <= config.experts_per_token <= config.experts:
        raise UserError(
            f"--experts_per_token {config.experts_per_token} of --experts {config.experts}: from 1 to {config.experts}"
        )
    if config.shared_experts < 0:
        raise UserError(f"--shared_experts {config.shared_experts}: 0 or more")


# Both orders are permutations, whose gradients are the other permutation: reading by index. Autograd would add up rows
# at their indices, which on accelerators sums in a random order.


class _ToExperts(torch.autograd.Function):
    """tokens (N, C) -> a copy for each of the K experts of a token, sorted by expert (N K, C)."""

    @staticmethod
    def forward(ctx, tokens: Tensor, pairs: Tensor, places: Tensor, per_token: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.per_token = per_token
        # pairs // per_token is looked up: before CANN 9.0 an NPU divides whole numbers on its slow AI CPU.
        token_of = torch.arange(len(tokens), device=pairs.device)[:, None].expand(-1, per_token).flatten()
        return tokens.index_select(0, token_of.index_select(0, pairs))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        (places,) = ctx.saved_tensors
        copies = grads[0].index_select(0, places)
        if ctx.per_token > 1:
            copies = copies.unflatten(0, (-1, ctx.per_token)).sum(dim=1)
        return copies, None, None, None


class _FromExperts(torch.autograd.Function):
    """rows (N K, C) sorted by expert -> sorted by token."""

    @staticmethod
    def forward(ctx, rows: Tensor, pairs: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(pairs)
        return rows.index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        (pairs,) = ctx.saved_tensors
        return grads[0].index_select(0, pairs), None, None
