"""The ranks of a run, and the rows that each rank has.

With R replicas the ranks form R groups of neighbours. Each group holds the whole model, sharded inside the group.
Weights travel inside a group; only gradients travel between groups.

Rows are divided as torch.chunk does: ceil(rows / ranks) rows per rank; the last rank has the rest, possibly nothing.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from nanochat.device import Device
from nanochat.ground.cli import UserError


@dataclass(frozen=True)
class Place:
    """This process's place among the ranks."""

    rank: int = 0  # number among the ranks that share one optimizer state
    ranks: int = 1
    replica: int = 0  # number of this group
    replicas: int = 1
    mesh: DeviceMesh | None = None  # (ranks,), or (replicas, ranks); None: without a process group
    host_mesh: DeviceMesh | None = None  # the same ranks, for tensors in main memory; nothing travels on it

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that share one state; None for all ranks."""
        return self.mesh.get_group("shard") if self.mesh is not None else None

    def shares(self, size: int) -> list[slice]:
        """The rows of each rank, out of `size` rows."""
        most = -(-size // self.ranks)  # rounded up
        return [slice(min(size, r * most), min(size, (r + 1) * most)) for r in range(self.ranks)]

    def share(self, size: int) -> slice:
        """The rows of this rank, out of `size` rows."""
        return self.shares(size)[self.rank]

    def as_part(self, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        """This rank's rows of a tensor of `shape`, as a DTensor over the same memory; without a mesh, the rows."""
        if self.mesh is None:
            return rows
        # The last dimension of the mesh shards; the dimension before it (replicas) repeats. The stride belongs to the
        # whole tensor.
        placements = [Replicate()] * (self.mesh.ndim - 1) + [Shard(0)]
        strides = torch.empty(shape, device="meta").stride()
        mesh = self.mesh if rows.device.type in (self.mesh.device_type, "meta") else self.host_mesh
        return DTensor.from_local(rows, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides)


def find_place(device: Device, parallel: Literal["ddp", "fsdp"], replicate: int = 1) -> Place:
    """Find this process's place in the run; neighbours form a group.

    Raises UserError: when the ranks do not form `replicate` groups, or not groups that share rows.
    """
    if replicate > 1 and (parallel != "fsdp" or device.world_size % replicate or device.world_size == replicate):
        raise UserError(
            f"--replicate {replicate} needs --parallel fsdp and several processes in each of {replicate} groups; "
            f"processes here: {device.world_size}, with --parallel {parallel}"
        )
    if device.world_size % device.context_ranks:
        raise UserError(
            f"--context_parallel {device.context_ranks} needs groups of {device.context_ranks} processes; "
            f"processes here: {device.world_size}"
        )
    # Ranks are numbered host by host, so that neighbours share a host and its fast links.
    ranks = device.world_size // replicate
    if replicate == 1:
        mesh = init_device_mesh(device.kind, (ranks,), mesh_dim_names=("shard",))
    else:  # init_device_mesh would split the group of all ranks, which some backends cannot
        table = torch.arange(device.world_size).view(replicate, ranks)
        across, _ = dist.new_subgroups_by_enumeration(table.T.tolist())
        within, _ = dist.new_subgroups_by_enumeration(table.tolist())
        groups: list[Any] = [across, within]
        mesh = DeviceMesh.from_group(groups, device.kind, table, mesh_dim_names=("replicate", "shard"))
    host_mesh = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False)
    replica, rank = divmod(device.rank, ranks)
    return Place(rank, ranks, replica, replicate, mesh, host_mesh)
