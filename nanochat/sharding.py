"""A tensor's rows, whether this process holds all of them or several ranks share them (torch's DTensor).

A plain tensor is the case of one rank that holds every row, so callers need not know which kind they have.
"""

import math
import sys
from collections.abc import Iterator
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


def whole_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every trained parameter by name, one at a time, all ranks together: whole in rank 0's main memory, empty
    elsewhere."""
    is_main = not dist.is_initialized() or dist.get_rank() == 0
    for name, parameter in trained_parameters(model).items():
        gathered = whole(parameter)
        yield name, gathered.cpu().contiguous() if is_main else torch.empty(0, dtype=gathered.dtype)


def is_sharded(model: Any) -> bool:
    """Whether several ranks share the parameters of a model between them."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # as in is_dtensor: a sharded model has imported it
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)
