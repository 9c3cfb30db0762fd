"""fsdp: each rank holds its rows of every parameter, and gathers a block's weights when the block runs.

Source: Zhao et al. 2023, PyTorch FSDP. This is its second version, `fully_shard`, whose parameters are DTensors;
ground/sharding.py reads and writes them.
"""

import functools
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from nanochat.device import Device
from nanochat.ground.cli import UserError
from nanochat.ground.sharding import Exchange, Share, is_dtensor
from nanochat.parallel.ddp import reduce_scatter
from nanochat.parallel.exchange import RankExchange
from nanochat.parallel.mesh import Place, find_place
from nanochat.ranks import Layout


@dataclass(frozen=True)
class Fsdp(Layout):
    """A part of every parameter on each rank."""

    place: Place
    sharded = True

    def __str__(self) -> str:
        replicas = self.place.replicas
        return f"fsdp over {self.place.ranks}" + (f", {replicas} replicas" if replicas > 1 else "")

    def shard(self, model: Any, device: Device) -> None:
        """Shard the model. Its forward then gathers the weights it needs, so all ranks must call it equally often.

        Raises UserError: when this torch sums gradients on a CPU where FSDP needs their mean.
        """
        if device.kind == "cpu":
            _require_means(device)
        # The warning is about in-place writes to views. A value embedding returns a view, and nothing writes to it.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        # Gradients are means over all ranks, which add up in fp32.
        shard = functools.partial(fully_shard, mesh=self.place.mesh, reshard_after_forward=True)
        # Embeddings first: each is gathered separately, in fp32, and only in the forward pass. In bf16 the same rows
        # would be looked up, but the gradient of a row is a sum over all places of its token, and bf16 loses the small
        # ones.
        tables = list(model.value_embeddings.values())
        if model.head is not None:  # otherwise the embedding is also the head, and belongs to the root
            tables.append(model.embedding)
        for table in tables:
            shard(table)
        # Then the head and each block, gathered in the dtype of their products: half of the bytes in bf16. The head
        # adds up its gradient in fp32, and rounds it once, as the products of the blocks do.
        product_dtype = None if device.dtype == torch.float32 else device.dtype
        policy = MixedPrecisionPolicy(param_dtype=product_dtype, reduce_dtype=torch.float32)
        if model.head is not None:
            tables.append(model.head)
            shard(model.head, mp_policy=policy)
        for table in tables:
            table.set_unshard_in_backward(False)  # no table's gradient needs the table
        for block in model.blocks:
            if model.config.experts:  # in fp32, see experts/router.py
                shard(block.mlp.router)
            # Those of experts that stay on their ranks are DTensors already (experts.py).
            laid_out: set[Any] = {parameter for parameter in block.parameters() if is_dtensor(parameter)}
            shard(block, mp_policy=policy, ignored_params=laid_out)
        # The root takes the rest. By default it stays gathered. After an evaluation its gathered parameters would then
        # miss the optimizer's updates of the shards.
        shard(model)

    def exchange(self, model: Any) -> Exchange:
        return FsdpExchange(self.place, model)


def lay_out(device: Device, replicate: int = 1) -> Fsdp:
    """Raises UserError: when the processes do not form `replicate` groups."""
    return Fsdp(find_place(device, "fsdp", replicate))


class FsdpExchange(RankExchange):
    """FSDP2 sums the gradients and gathers the weights. Only Muon's detour is left to exchange."""

    def __init__(self, place: Place, model: Any):
        super().__init__(place)
        self.model = model  # after `fully_shard`
        # FSDP2 returns means, the only reduction that all backends and versions support. The optimizer works with sums.
        self.divided_by = place.ranks * place.replicas

    def share(self, parameter: nn.Parameter, is_matrix: bool) -> Share:
        share = Share(parameter)
        share.is_part = True  # FSDP2 has split the parameter
        return share

    def before_backward(self, is_last: bool) -> None:
        # Every micro-batch reduces its gradients, and each rank adds up its rows: whole gradients in fp32 would take as
        # much memory on each rank as the whole model. Between groups, whose links are slow, the rows travel once a
        # step. FSDP2 keeps them until then, which takes no more memory than the gradients do afterwards. For this all
        # micro-batches of a step must reach the same parameters.
        if self.place.replicas > 1:
            self.model.set_requires_all_reduce(is_last)

    def reduce(self) -> list[Tensor]:
        grads = super().reduce()
        # All replicas hold the same gradients; the norm counts them only in the first.
        return [] if self.place.replica else grads


def _require_means(device: Device) -> None:
    """FSDP needs the mean of gradients; torch 2.7 silently returns their sum between processes on a CPU."""
    mean = torch.zeros(1)
    reduce_scatter(mean, torch.ones(device.world_size), op=dist.ReduceOp.AVG)
    if mean.item() != 1 and dist.get_backend() == "gloo":  # in a dry run nothing travels
        raise UserError(
            f"--parallel fsdp: torch {torch.__version__} returns a sum on a cpu where a mean is needed, so every "
            "gradient would be too large: use --parallel ddp, or a newer torch"
        )
