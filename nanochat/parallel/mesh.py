"""The ranks of a run, and the rows that each of them has.

With R replicas the ranks form R groups of neighbours. Each group holds the whole model, sharded inside: weights travel
inside a group, and only gradients go between groups.

Rows are shared out as torch.chunk does: ceil(rows / ranks) to each rank, and the rest, maybe nothing, to the last.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from nanochat.cli import UserError
from nanochat.device import Device


@dataclass(frozen=True)
class Place:
    """This process's place among the ranks."""

    rank: int = 0  # among the ranks that hold one optimizer state between them
    ranks: int = 1
    replica: int = 0  # which such group this is
    replicas: int = 1
    mesh: DeviceMesh | None = None  # (ranks,), or (replicas, ranks); None: without a process group, to plan only
    host_mesh: DeviceMesh | None = None  # the same ranks, for what they keep in main memory: nothing travels on it

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that hold one state between them; None for all ranks."""
        return self.mesh.get_group("shard") if self.mesh is not None else None

    def shares(self, size: int) -> list[slice]:
        """Which of `size` rows each rank has."""
        most = -(-size // self.ranks)  # rounded up
        return [slice(min(size, r * most), min(size, (r + 1) * most)) for r in range(self.ranks)]

    def share(self, size: int) -> slice:
        """Which of `size` rows this rank has."""
        return self.shares(size)[self.rank]

    def as_part(self, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        """This rank's rows of a tensor of `shape` as a DTensor over the same memory; without a mesh the rows."""
        if self.mesh is None:
            return rows
        # The last dimension of the mesh shards, the one before it (replicas) repeats. The stride is the whole tensor's.
        placements = [Replicate()] * (self.mesh.ndim - 1) + [Shard(0)]
        strides = torch.empty(shape, device="meta").stride()
        mesh = self.mesh if rows.device.type == self.mesh.device_type else self.host_mesh
        return DTensor.from_local(rows, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides)


def find_place(device: Device, parallel: Literal["ddp", "fsdp"], replicate: int = 1) -> Place:
    """Share the run out over the ranks; neighbours form a group.

    Raises UserError: when the ranks do not form `replicate` groups.
    """
    if replicate > 1 and (parallel != "fsdp" or device.world_size % replicate or device.world_size == replicate):
        raise UserError(
            f"--replicate {replicate} needs --parallel fsdp and several processes in each of {replicate} groups; "
            f"processes here: {device.world_size}, with --parallel {parallel}"
        )
    # Ranks are numbered host by host, so that neighbours share a host and its fast links.
    ranks = device.world_size // replicate
    if replicate == 1:
        mesh = init_device_mesh(device.kind, (ranks,), mesh_dim_names=("shard",))
    else:  # init_device_mesh would split the group of all ranks, which not every backend can
        table = torch.arange(device.world_size).view(replicate, ranks)
        across, _ = dist.new_subgroups_by_enumeration(table.T.tolist())
        within, _ = dist.new_subgroups_by_enumeration(table.tolist())
        groups: list[Any] = [across, within]
        mesh = DeviceMesh.from_group(groups, device.kind, table, mesh_dim_names=("replicate", "shard"))
    host_mesh = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False)
    replica, rank = divmod(device.rank, ranks)
    return Place(rank, ranks, replica, replicate, mesh, host_mesh)
