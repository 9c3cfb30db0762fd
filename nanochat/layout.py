"""A process's place among the ranks that share one model and one optimizer state.

`ddp` keeps the whole model on each rank, `fsdp` a share of every parameter. Under both, each rank keeps and updates a
share of the optimizer's state (optim.py). parallel/mesh.py lays several processes out.

Rows are shared out as torch.chunk does: ceil(rows / ranks) to each rank, and what is left, maybe nothing, to the last.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nanochat import rooms
from nanochat.cli import UserError
from nanochat.device import Device


@dataclass(frozen=True)
class Layout:
    """This process's place. A single process is `Layout()`."""

    sharded: bool = False  # parameters too, not only the optimizer's state
    rank: int = 0  # among the ranks that hold one optimizer state between them
    ranks: int = 1
    replica: int = 0  # which such group this is
    replicas: int = 1
    mesh: DeviceMesh | None = None  # (ranks,), or (replicas, ranks); None on one process
    host_mesh: DeviceMesh | None = None  # the same ranks, for what they keep in main memory: nothing travels on it

    def __str__(self) -> str:
        if self.sharded:
            return f"fsdp over {self.ranks}" + (f", {self.replicas} replicas" if self.replicas > 1 else "")
        return "ddp" if self.ranks > 1 else "one process"

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

    def as_share(self, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        """This rank's rows of a tensor of `shape` as a DTensor over the same memory; the rows themselves on one
        process."""
        if self.mesh is None:
            return rows
        from torch.distributed.tensor import DTensor, Replicate, Shard  # not on one process: see is_dtensor

        # The last dimension of the mesh shards, the one before it (replicas) repeats. The stride is that of the whole.
        placements = [Replicate()] * (self.mesh.ndim - 1) + [Shard(0)]
        strides = torch.empty(shape, device="meta").stride()
        mesh = self.mesh if rows.device.type == self.mesh.device_type else self.host_mesh
        return DTensor.from_local(rows, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides)


def lay_out(device: Device, parallel: Literal["ddp", "fsdp"] = "ddp", replicate: int = 1) -> Layout:
    """Share the run out over the ranks; neighbours form a group.

    Raises UserError: when the ranks do not form `replicate` groups.
    """
    if replicate > 1 and (parallel != "fsdp" or device.world_size % replicate or device.world_size == replicate):
        raise UserError(
            f"--replicate {replicate} needs --parallel fsdp and several processes in each of {replicate} groups; "
            f"processes here: {device.world_size}, with --parallel {parallel}"
        )
    if device.world_size == 1:
        return Layout()  # nothing to shard
    return rooms.find("layouts", "several processes")(device, parallel, replicate)
