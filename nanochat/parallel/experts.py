"""Expert parallelism: each rank holds whole experts, and tokens travel to the ranks of their experts.

fsdp gathers the weights of all experts of a block, although each token passes through a few of them. Here the weights
of experts stay where they are (source: Lepikhin et al. 2021, GShard). Everything else is fsdp.

    2 ranks, 4 experts, 4 tokens each with K = 1      rank 0, with experts 0 and 1     rank 1, with experts 2 and 3
    rows for each expert, sorted by expert            0: a  1: b  2: c d               0: e f  2: g  3: h
    all-to-all of the counts, wait for the device
    all-to-all of the rows                            0: a  1: b  0: e f               2: c d  2: g  3: h
    sorted by expert                                  0: a e f  1: b                   2: c d g  3: h
    the experts' MLPs
    the same way back                                 0: a  1: b  2: c d               0: e f  2: g  3: h

In each layer a rank passes E counts to the first all-to-all, N x K x C elements to the second, and as many as have
arrived to the third. The backward pass sends the rows both ways again. Recomputed activations send all of the forward
pass once more. The host waits for the device once in the forward pass of each layer, and once more where it is
recomputed: it has to know how many rows arrive.

No expert has a capacity, so a rank may receive all rows of all ranks. A rank that receives none still takes part.

The gradient of an expert is complete on its rank, because all of its tokens were there. Rows of experts are those that
fsdp would hold, so the optimizer and checkpoints are the same as without expert parallelism.

Legend: N tokens of a rank, C width, E experts, K experts per token, R ranks that divide the experts between them.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nanochat.device import Device
from nanochat.experts.layer import ExpertLinear
from nanochat.ground.cli import UserError
from nanochat.ground.sharding import Exchange
from nanochat.kernels.grouped import Groups, even_sizes
from nanochat.parallel import fsdp
from nanochat.parallel.exchange import Travel
from nanochat.parallel.mesh import Place, find_place


class WholeExperts(fsdp.Fsdp):
    """The layout of fsdp, but each rank holds whole experts, which are never gathered."""

    def __str__(self) -> str:
        return f"{super().__str__()}, tokens travel to their experts"

    def shard(self, model: Any, device: Device) -> None:
        """Shard the model; all ranks must call it equally often.

        Raises UserError: when the model has no experts, or the ranks cannot divide them.
        """
        _require_divisible(model, self.place.ranks)
        # The rows of a rank's experts become DTensors before fsdp sees them: it leaves DTensors alone.
        for module, name, weight in _weights_of_experts(model):
            rows = weight.detach()[self.place.share(len(weight))].clone()
            part = self.place.as_part(rows, tuple(weight.shape))
            setattr(module, name, nn.Parameter(part, weight.requires_grad))
        for block in model.blocks:
            block.mlp.compute = functools.partial(_compute_elsewhere, block.mlp.compute, self.place)
        super().shard(model, device)

    def exchange(self, model: Any) -> Exchange:
        return WholeExpertsExchange(self.place, model)


def lay_out(device: Device, parallel: str, replicate: int = 1) -> WholeExperts:
    """Raises UserError: when the processes or their layout cannot hold experts in parts."""
    if parallel != "fsdp" or device.world_size == 1:
        raise UserError(
            f"--expert_parallel needs --parallel fsdp and several processes; processes here: {device.world_size}, "
            f"with --parallel {parallel}"
        )
    return WholeExperts(find_place(device, "fsdp", replicate))


def _require_divisible(model: Any, R: int) -> None:
    E = model.config.experts
    if not E:
        raise UserError("--expert_parallel needs a model with experts, and this one has none: leave it out")
    if E % R:
        fitting = [count for count in range(2, E + 1) if E % count == 0]
        raise UserError(
            f"--expert_parallel: {R} processes (in each group of --replicate) do not divide the {E} experts of this "
            f"model: use {' or '.join(map(str, fitting))}, or leave it out"
        )
    if not isinstance(model.blocks[0].mlp.input, ExpertLinear):
        raise UserError(
            "--expert_parallel: with --lora_base nf4 every process holds all experts: leave one of the two out"
        )


def _weights_of_experts(model: Any) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """The parameters in which rows of all experts are stacked, adapters included: a module, a name in it, the value."""
    for block in model.blocks:
        for linear in (block.mlp.input, block.mlp.output):
            for module in linear.modules():
                for name, parameter in list(module.named_parameters(recurse=False)):
                    yield module, name, parameter


class WholeExpertsExchange(fsdp.FsdpExchange):
    """FSDP2 reduces all gradients but those of experts, which are complete on their ranks."""

    def __init__(self, place: Place, model: Any):
        super().__init__(place, model)
        self.experts = {parameter for _, _, parameter in _weights_of_experts(model)}

    def reduce(self) -> list[Tensor]:
        grads = super().reduce()
        for share in self.shares:
            if share.parameter in self.experts:
                if self.place.replicas > 1:  # each group has sent its own tokens to its own copy
                    assert self.place.mesh is not None
                    dist.all_reduce(share.grad, group=self.place.mesh.get_group("replicate"))
                share.grad.div_(self.divided_by)  # as FSDP2 divides the others
        return grads


# ---------------------------------------------------------------------- the way of the tokens


def _compute_elsewhere(compute: Callable[..., Tensor], place: Place, rows: Tensor, groups: Groups) -> Tensor:
    """`Experts.compute`, where the ranks hold the experts: rows sorted by expert (rows, C) -> (rows, C)."""
    arriving = torch.empty_like(groups.counts)  # (E,): for each rank, its rows for each expert of this rank
    dist.all_to_all_single(arriving, groups.counts, group=place.group)
    counts = torch.stack((groups.counts, arriving))
    if type(counts) is Tensor:
        leaving_counts, arriving_counts = counts.tolist()  # the one wait for the device
    else:  # without data, in a dry run
        leaving_counts = arriving_counts = even_sizes(len(rows), len(groups.counts))
    journey = Journey(leaving_counts, arriving_counts, place)
    rows = Travel.apply(journey.go, journey.come_back, rows)
    rows = compute(rows, journey.groups(arriving))
    return Travel.apply(journey.come_back, journey.go, rows)


class Journey:
    """The way of one layer's rows to the ranks of their experts, and back."""

    def __init__(self, leaving: list[int], arriving: list[int], place: Place):
        # `leaving` are the rows for each of E experts; `arriving` those from each of R ranks for each own expert.
        self.group = place.group
        self.ranks = place.ranks
        self.own = len(leaving) // place.ranks  # experts of this rank
        self.leaving = _sums(leaving, self.own)  # rows to each rank
        self.arriving = _sums(arriving, self.own)  # rows from each rank
        self.by_rank = arriving  # for each rank, the rows for each expert
        self.by_expert = [count for expert in range(self.own) for count in arriving[expert :: self.own]]
        self.total = sum(arriving)

    def go(self, rows: Tensor) -> Tensor:
        """The rows of this rank's tokens, sorted by expert -> the rows of its experts' tokens, sorted by expert."""
        arrived = self._exchange(rows, self.leaving, self.arriving)
        if not self.total:
            # Not every operator takes an empty tensor. A rank without tokens computes one row of zeros.
            return arrived.new_zeros(1, arrived.size(1))
        return _regroup(arrived, self.by_rank, self.own)

    def come_back(self, rows: Tensor) -> Tensor:
        """The opposite of `go`."""
        rows = _regroup(rows[: self.total], self.by_expert, self.ranks)
        return self._exchange(rows, self.arriving, self.leaving)

    def groups(self, arriving: Tensor) -> Groups:
        """The rows of each expert of this rank, after `go`; `arriving` is a tensor (E,) on the device."""
        counts = arriving.view(self.ranks, self.own).sum(dim=0)
        sizes = _sums(self.by_expert, self.ranks)
        if not self.total:
            counts[0] = sizes[0] = 1
        groups = Groups(sum(sizes), counts)
        groups.sizes = sizes  # so that nothing waits for the device again
        return groups

    def _exchange(self, rows: Tensor, leaving: list[int], arriving: list[int]) -> Tensor:
        arrived = rows.new_empty(sum(arriving), rows.size(1))
        dist.all_to_all_single(arrived, rows.contiguous(), arriving, leaving, group=self.group)
        return arrived


def _sums(counts: list[int], length: int) -> list[int]:
    """The sums of consecutive runs of this length."""
    return [sum(counts[start : start + length]) for start in range(0, len(counts), length)]


def _regroup(rows: Tensor, sizes: list[int], columns: int) -> Tensor:
    """Rows in groups of these sizes, which form a table of so many columns, read column by column."""
    groups = rows.split(sizes)
    return torch.cat([group for column in range(columns) for group in groups[column::columns]])
