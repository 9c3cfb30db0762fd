"""A tensor's rows, which one process holds or several ranks share, and the exchange of rows in an optimizer step.

A plain tensor is the case of one rank that holds every row, so callers need not know which kind they have. Tensors
of several ranks are torch's DTensor. The exchanges of several ranks are in parallel/; each overrides the methods that
it needs.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether several ranks hold a tensor's rows between them.

    Nothing is a DTensor before its class is imported, and importing it here would take as long as all of torch.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def held_box(tensor: Tensor) -> tuple[list[int], list[int]]:
    """The offset and the size of the part that this process holds: all of a plain tensor, its shard of a DTensor.

    Raises NotImplementedError: when a DTensor is laid out in any other way than in shards or whole copies.
    """
    offset = [0] * tensor.ndim
    size = list(tensor.shape)
    if not is_dtensor(tensor):
        return offset, size
    from torch.distributed.tensor import Shard  # as in is_dtensor

    for mesh_dim, placement in enumerate(tensor.placements):
        if type(placement) is Shard:  # not one of its subclasses, whose rows are in another order
            # torch gives each rank ceil(n / ranks) rows; the last ranks hold fewer, or none.
            dim = placement.dim
            rows = math.ceil(size[dim] / tensor.device_mesh.size(mesh_dim))
            start = min(tensor.device_mesh.get_local_rank(mesh_dim) * rows, size[dim])
            offset[dim] += start
            size[dim] = min(rows, size[dim] - start)
        elif not placement.is_replicate():
            raise NotImplementedError(f"a tensor is laid out as {placement}: only Shard and Replicate are known")
    return offset, size


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds, over the same memory."""
    return tensor.to_local().detach() if is_dtensor(tensor) else tensor.detach()


def whole(tensor: Tensor) -> Tensor:
    """All rows of a tensor, on every rank; all ranks call it together."""
    return tensor.full_tensor().detach() if is_dtensor(tensor) else tensor.detach()


def held_rows(tensor: Tensor) -> slice:
    """The rows of a tensor that this process holds."""
    offset, size = held_box(tensor)
    return slice(offset[0], offset[0] + size[0])


@torch.no_grad()
def fill(tensor: Tensor, values: Tensor) -> None:
    """Copy the rows that this process holds out of all rows, `values`."""
    local(tensor).copy_(values[held_rows(tensor)])


def trained_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of a checkpoint, by name: all, or for a model with frozen ones (lora.py) the others."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def whole_weights(model: nn.Module, copied: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Every trained parameter by name, one at a time, all ranks together: whole in rank 0's main memory, empty
    elsewhere; with `copied` they never share the model's memory."""
    is_main = not dist.is_initialized() or dist.get_rank() == 0
    for name, parameter in trained_parameters(model).items():
        gathered = whole(parameter)
        yield name, gathered.to("cpu", copy=copied).contiguous() if is_main else torch.empty(0, dtype=gathered.dtype)


def is_sharded(model: Any) -> bool:
    """Whether several ranks share the parameters of a model between them."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # as in is_dtensor: a sharded model has imported it
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


class Share:
    """The rows of one parameter that this rank updates. One process updates all of them."""

    is_part = False  # whether other ranks update the other rows

    def __init__(self, parameter: nn.Parameter):
        self.parameter = parameter
        self.grad = torch.empty(0)  # the gradient of these rows, between `reduce` and `step`

    def weight(self) -> Tensor:
        """These rows, over the parameter's memory."""
        return local(self.parameter)

    def take_gradient(self) -> None:
        """Move the gradient here from the parameter. Where no loss reached the parameter, it is zero."""
        grad = self.parameter.grad
        self.grad = torch.zeros_like(local(self.parameter)) if grad is None else local(grad)
        self.parameter.grad = None


@dataclass(frozen=True)
class Rows:
    """Rows [start, stop) of a parameter: a matrix, or the part of a matrix that a share holds.

    A matrix is counted in the parameter's rows, a part in the share's. On one process the two are the same.
    """

    share: Share
    start: int
    stop: int

    def gradient(self) -> Tensor:
        return self.share.grad[self.start : self.stop]

    def weight(self) -> Tensor:
        return self.share.weight()[self.start : self.stop]


class Exchange:
    """The exchange of one process, which sends nothing. An exchange belongs to one optimizer."""

    # Gradients arrive divided by this number where a backend computes means over the ranks instead of sums.
    divided_by = 1

    def __init__(self) -> None:
        # Everything that `share` has returned, in the order in which a backward completes the gradients.
        self.shares: Sequence[Any] = []

    def share(self, parameter: nn.Parameter, is_matrix: bool) -> Share:
        """The rows of a parameter that this rank updates; `is_matrix` for those that Muon updates."""
        return Share(parameter)

    def before_backward(self, is_last: bool) -> None:
        """Prepare for a backward. Gradients may travel while it runs; whole ones do so in the last one of a step."""

    def reduce(self) -> list[Tensor]:
        """Fill every share's `grad` with the sum over the ranks; returns the gradients that count in this rank's norm.

        A gradient that several ranks hold counts on only one of them.
        """
        for share in self.shares:
            share.take_gradient()
        return [share.grad for share in self.shares]

    def owned(self, count: int) -> slice:
        """The matrices, out of `count`, that this rank orthogonalises."""
        return slice(0, count)

    def to_owners(self, stack: Any) -> Tensor:
        """The whole gradients of the matrices that this rank owns (owned, rows, columns)."""
        return torch.stack([matrix.gradient() for matrix in stack.matrices])

    def to_holders(self, stack: Any, update: Tensor, size: Tensor) -> tuple[list[Rows], Tensor, Tensor]:
        """The rows of the stack's matrices in this rank's shares, with their updates and sizes. `update` and `size` are
        the results of `Muon.direction` for the owned matrices."""
        return stack.matrices, update, size

    def send_weight(self, share: Any) -> None:
        """Start to send the new rows of a share to the other ranks."""

    def receive_weights(self) -> None:
        """Wait until every parameter has its new rows from all ranks."""

    def as_part(self, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        """This rank's rows of a tensor of `shape`; a DTensor over the same memory if other ranks have other rows."""
        return rows
