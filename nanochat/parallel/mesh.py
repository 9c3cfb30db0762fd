"""How several ranks are laid out.

With R replicas the ranks form R groups of neighbours. Each group holds the whole model, sharded inside: weights travel
inside a group, and only gradients go between groups.
"""

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nanochat.device import Device
from nanochat.layout import Layout


def lay_out_ranks(device: Device, parallel: Literal["ddp", "fsdp"], replicate: int) -> Layout:
    """The place of this process among several, in groups of neighbours."""
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
    return Layout(parallel == "fsdp", rank, ranks, replica, replicate, mesh, host_mesh)
