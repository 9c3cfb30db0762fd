"""How a run is laid out over its ranks: `ddp` keeps the whole model on each of them, `fsdp` a share of every parameter.

Either way each rank keeps and updates a share of the optimizer's state (optim.py). Under fsdp (source: Zhao et al.
2023, PyTorch FSDP, in its second form, `fully_shard`) a rank holds its rows of each parameter, and gathers a block's
when the block runs. With R replicas the ranks form R groups that hold the whole model each, sharded inside: what is
gathered stays inside a group of neighbours, and only gradients go between the groups.

Rows are shared out as torch.chunk does: ceil(rows / ranks) to each rank, and what is left, maybe nothing, to the last.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from nanochat.device import Device
from nanochat.shell.cli import UserError


@dataclass(frozen=True)
class Layout:
    """This process's place. One process by itself is `Layout()`."""

    sharded: bool = False  # parameters too, not the optimizer's state alone
    rank: int = 0  # among those that hold one state, or one model, between them
    ranks: int = 1
    replica: int = 0  # which such group this is
    replicas: int = 1
    mesh: DeviceMesh | None = None  # (ranks,), or (replicas, ranks); None on one process

    def __str__(self) -> str:
        if not self.sharded:
            return "one process" if self.ranks == 1 else "ddp"
        return f"fsdp over {self.ranks}" + (f", {self.replicas} replicas" if self.replicas > 1 else "")

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that hold one state between them; None for all there are."""
        return self.mesh.get_group("shard") if self.mesh is not None else None

    def shares(self, size: int) -> list[slice]:
        """Which of `size` rows each rank has."""
        most = -(-size // self.ranks)
        return [slice(min(size, r * most), min(size, (r + 1) * most)) for r in range(self.ranks)]

    def share(self, size: int) -> slice:
        """Which of `size` rows this rank has."""
        return self.shares(size)[self.rank]

    def as_share(self, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        """This rank's rows of a tensor of that shape as a DTensor over the same memory; a plain one on one process."""
        if self.mesh is None:
            return rows
        placements = [Replicate()] * (self.mesh.ndim - 1) + [Shard(0)]
        strides = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(rows, self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides)


def lay_out(device: Device, parallel: Literal["ddp", "fsdp"] = "ddp", replicate: int = 1) -> Layout:
    """Share the run out over the ranks; neighbours form a group.

    Raises UserError: when the ranks do not form that many groups; when torch's processes on a cpu cannot be sharded.
    """
    if replicate > 1:
        if parallel != "fsdp":
            raise UserError(
                f"--replicate {replicate} goes with --parallel fsdp; {parallel} holds a whole model everywhere"
            )
        if device.world_size % replicate:
            raise UserError(f"--replicate {replicate} does not divide the {device.world_size} processes")
        if device.world_size == replicate:
            raise UserError(f"--replicate {replicate} is a whole model on each process: use --parallel ddp")
    if device.world_size == 1:
        return Layout()  # nothing to shard
    if parallel == "fsdp" and device.kind == "cpu":
        _require_means(device)
    ranks = device.world_size // replicate
    if replicate == 1:
        mesh = init_device_mesh(device.kind, (ranks,), mesh_dim_names=("shard",))
    else:  # init_device_mesh would split the group of all, which not every backend can
        table = torch.arange(device.world_size).view(replicate, ranks)
        across, _ = dist.new_subgroups_by_enumeration(table.T.tolist())
        within, _ = dist.new_subgroups_by_enumeration(table.tolist())
        groups: list[Any] = [across, within]
        mesh = DeviceMesh.from_group(groups, device.kind, table, mesh_dim_names=("replicate", "shard"))
    replica, rank = divmod(device.rank, ranks)
    return Layout(parallel == "fsdp", rank, ranks, replica, replicate, mesh)


def reduce_scatter(share: Tensor, whole: Tensor, **options: Any) -> dist.Work | None:
    """torch's own, under the name that it has in this version."""
    named = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13
    return named(share, whole, **options)


def all_gather(whole: Tensor, share: Tensor, **options: Any) -> dist.Work | None:
    """torch's own, under the name that it has in this version."""
    named = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    return named(whole, share, **options)


def _require_means(device: Device) -> None:
    """FSDP asks for the mean of gradients; torch 2.7 gives their sum between processes on a cpu, without a word."""
    mean = torch.zeros(1)
    reduce_scatter(mean, torch.ones(device.world_size), op=dist.ReduceOp.AVG)
    if mean.item() != 1:
        raise UserError(
            f"--parallel fsdp: torch {torch.__version__} sums on a cpu where a mean is asked for, so that every "
            "gradient would be too large: use --parallel ddp, or a newer torch"
        )


def shard(model: Any, layout: Layout, device: Device, activation_checkpointing: bool = False) -> None:
    """Under fsdp, leave this rank its rows of each parameter, in place; the optimizer is made afterwards.

    The model, a GPT, may still be on the meta device. Its forward and `losses` gather what they need; every rank must
    call them equally often. Gradients are means over all ranks. Blocks compute in the device's dtype; tables, the head
    and the vectors stay in fp32, so that the gradients of frequent tokens add up.

    With `activation_checkpointing`, under any layout, a block's activations are computed anew in backward instead of
    being kept (source: Chen et al. 2016, Training deep nets with sublinear memory cost).
    """
    if activation_checkpointing:
        for block in model.blocks:
            block.forward = functools.partial(_recomputed, block.forward)
    if not layout.sharded:
        return
    # The residual that a value embedding hands through is one, and nothing is added to it in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    low = None if device.dtype == torch.float32 else device.dtype
    blocks = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    tables = list(model.value_embeddings.values())
    if model.head is not None:  # else the embedding is the head too, and belongs to the root
        tables += [model.embedding, model.head]
    for table in tables:
        fully_shard(table, mesh=layout.mesh, reshard_after_forward=True)
        table.set_unshard_in_backward(False)  # no table's gradient needs the table
    for block in model.blocks:
        fully_shard(block, mesh=layout.mesh, mp_policy=blocks, reshard_after_forward=True)
    # Left gathered, as a root is by default, its parameters would miss what the shards are given after an evaluation.
    fully_shard(model, mesh=layout.mesh, reshard_after_forward=True)
    register_fsdp_forward_method(model, "losses")


def _recomputed(forward: Callable[..., Any], *inputs: Any) -> Any:
    # Nothing in a block is random; to keep the generators' states would wait for the device.
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False)


def synchronize_gradients(model: Any, last: bool) -> None:
    """Say before each backward whether it is the step's last: only then do sharded gradients travel."""
    model = getattr(model, "_orig_mod", model)  # behind torch.compile
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)


def is_sharded(model: Any) -> bool:
    return isinstance(getattr(model, "_orig_mod", model), FSDPModule)


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, over the same memory."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def whole(tensor: Tensor) -> Tensor:
    """All rows of a tensor, on every rank; all ranks call it together."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def held_rows(tensor: Tensor) -> slice:
    """Which rows of a tensor this process holds."""
    if not isinstance(tensor, DTensor):
        return slice(0, len(tensor))
    mesh = tensor.device_mesh
    return Layout(rank=mesh.get_local_rank(mesh.ndim - 1), ranks=mesh.size(mesh.ndim - 1)).share(len(tensor))


def first_decides(device: Device, decide: Callable[[], str | None]) -> str | None:
    """What rank 0 finds in folders that all share, on every rank: what another host lists may be seconds old.

    Raises UserError: on all ranks, when it fails there."""
    if device.world_size == 1:
        return decide()
    found, failed = None, None
    if device.is_main:
        try:
            found = decide()
        except Exception as error:
            failed = error
    word = [found, failed and str(failed)]
    dist.broadcast_object_list(word, 0, device=device.torch_device)
    if failed is not None:
        raise failed
    if word[1] is not None:
        raise UserError(word[1])
    return word[0]


@torch.no_grad()
def fill(tensor: Tensor, values: Tensor) -> None:
    """Copy the rows that this process holds out of all rows."""
    local(tensor).copy_(values[held_rows(tensor)])


def whole_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter by name, one at a time, all ranks together: whole in rank 0's main memory, empty elsewhere."""
    main = not dist.is_initialized() or dist.get_rank() == 0
    for name, parameter in model.state_dict().items():
        gathered = whole(parameter)
        yield name, gathered.cpu().contiguous() if main else torch.empty(0, dtype=gathered.dtype)


def load_whole(model: nn.Module, path: Path) -> None:
    """Read this process's rows of every parameter from a file of whole weights.

    Raises ValueError: when the file holds other names or shapes. Raises SafetensorError: when it cannot be read.
    """
    targets = model.state_dict()
    with safe_open(path, framework="pt") as file:
        if differing := set(targets) ^ set(file.keys()):
            raise ValueError(f"{path} belongs to another model: {', '.join(sorted(differing)[:3])}")
        for name, target in targets.items():
            source = file.get_slice(name)
            if list(target.shape) != source.get_shape():
                raise ValueError(f"{path}: {name} is {source.get_shape()}, the model's is {list(target.shape)}")
            rows = held_rows(target)
            local(target).copy_(source[rows.start : rows.stop])
