"""ddp: each rank keeps the whole model, and updates a share of it.

Gradients travel during the backward pass (source: Li et al. 2020, PyTorch Distributed: Experiences on Accelerating Data
Parallel Training), and new weights while the optimizer updates other weights.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nanochat.device import Device
from nanochat.ground.sharding import Exchange, Share
from nanochat.parallel.exchange import RankExchange
from nanochat.parallel.mesh import Place, find_place
from nanochat.ranks import Layout

# Every rank updates smaller AdamW tensors completely: that is cheaper than sending the new weights.
SHARD_ELEMENTS = 4096

# torch 2.13 renamed both; older versions know only the second name.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # (share, whole, ...)
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # (whole, share, ...)


@dataclass(frozen=True)
class Ddp(Layout):
    """The whole model on each rank."""

    place: Place

    def __str__(self) -> str:
        return "ddp"

    def exchange(self, model: Any) -> Exchange:
        return DdpExchange(self.place)


def lay_out(device: Device, replicate: int = 1) -> Ddp:
    """Raises UserError: when `replicate` asks for groups, which only fsdp has."""
    return Ddp(find_place(device, "ddp", replicate))


class DdpExchange(RankExchange):
    """Gradients and weights between ranks that hold the whole model."""

    def __init__(self, place: Place):
        super().__init__(place)
        self._started = 0  # number of shares whose gradients have been sent
        self._awaited: set[nn.Parameter] = set()  # parameters whose gradients the last backward has not completed
        self._hooks: list[RemovableHandle] = []

    def share(self, parameter: nn.Parameter, is_matrix: bool) -> Share:
        # AdamW computes in flat rows of elements: only parameters that the ranks divide without padding are split.
        is_large = parameter.numel() >= SHARD_ELEMENTS and parameter.size(0) % self.place.ranks == 0
        return DdpShare(parameter, self.place, is_matrix or is_large)

    def before_backward(self, is_last: bool) -> None:
        if not is_last:
            return
        assert not self._started, "a backward failed: its gradients are partly sent"
        self._awaited = {share.parameter for share in self.shares}
        self._hooks = [p.register_post_accumulate_grad_hook(self._gradient_is_ready) for p in self._awaited]

    # Autograd calls this on its own thread, as soon as a parameter's gradient is complete.
    @torch.no_grad()
    def _gradient_is_ready(self, parameter: Tensor) -> None:
        assert parameter in self._awaited, "a gradient was added to after it was sent"
        self._awaited.remove(parameter)  # type: ignore[arg-type]
        # Send complete gradients, but only in order: on another rank the loss may reach other parameters.
        while self._started < len(self.shares) and self.shares[self._started].parameter not in self._awaited:
            self.shares[self._started].send_gradient()
            self._started += 1

    def reduce(self) -> list[Tensor]:
        # The hooks go first: the next step's earlier micro-batches must not send anything.
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        # Send the gradients that the hooks have not sent: gradients that no loss reached, and the gradients queued
        # after them. If no hook was set, send all.
        for share in self.shares[self._started :]:
            share.send_gradient()
        self._started = 0
        for share in self.shares:
            share.receive_gradient()
        # All ranks hold the gradients of small parameters; the norm counts them only on the first rank.
        return [share.grad for share in self.shares if share.is_part or self.place.rank == 0]

    def send_weight(self, share: "DdpShare") -> None:
        share.send_weight()

    def receive_weights(self) -> None:
        for share in self.shares:
            share.receive_weight()


class DdpShare(Share):
    """The rows of one parameter that this rank updates, and their way to and from the other ranks.

    A large parameter is split: a reduce-scatter and an all-gather divide its rows among the ranks. The gradient of a
    small parameter is summed on all ranks, and all ranks make the same update of the whole parameter.
    """

    def __init__(self, parameter: nn.Parameter, place: Place, is_split: bool):
        super().__init__(parameter)
        self.place = place
        self.is_part = is_split
        self.work: dist.Work | None = None
        self.gathered: Tensor | None = None
        # The collectives need equal shares. If the rows do not divide evenly, zeros pad them to ranks x `most` rows.
        rows = parameter.size(0)
        self.rows = place.share(rows) if is_split else slice(0, rows)
        self.most = place.shares(rows)[0].stop  # rows of the largest share, which is the first
        self.is_padded = self.most * place.ranks != rows

    def weight(self) -> Tensor:
        whole = super().weight()
        return whole[self.rows] if self.is_part else whole

    def send_gradient(self) -> None:
        # The parameter drops its gradient before the next one is sent, so that only a few are in memory at once; where
        # weights are cast together (kernels/casts.py), a bucket's. A gradient that no loss reached is sent as zeros:
        # the other ranks wait for it.
        self.take_gradient()
        if self.is_part:
            # 5 rows on 2 ranks: padded to 6, summed over the ranks, 3 to each rank. The last row is padding.
            padded = _pad(self.grad.contiguous(), self.most * self.place.ranks)
            self.grad = padded.new_empty(self.most, *self.grad.shape[1:])
            self.work = reduce_scatter(self.grad, padded, group=self.place.group, async_op=True)
        else:
            # Too small to split: every rank receives the whole sum and computes the same update from it.
            self.work = dist.all_reduce(self.grad, group=self.place.group, async_op=True)

    def receive_gradient(self) -> None:
        self._wait()
        if self.is_part:
            # Drop the padding.
            self.grad = self.grad[: self.rows.stop - self.rows.start]

    def send_weight(self) -> None:
        if not self.is_part:
            return  # every rank has made the same update
        # Gather straight into the parameter, from a copy of this rank's rows: a collective must not read the memory
        # that it writes to. Padded rows take a detour through another tensor.
        mine = _pad(self.weight().clone(), self.most)
        whole = super().weight()
        if self.is_padded:
            whole = self.gathered = mine.new_empty(self.most * self.place.ranks, *mine.shape[1:])
        self.work = all_gather(whole, mine, group=self.place.group, async_op=True)

    def receive_weight(self) -> None:
        self._wait()
        if self.gathered is not None:
            super().weight().copy_(self.gathered[: self.parameter.size(0)])
            self.gathered = None

    def _wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        self.work = None


def _pad(rows: Tensor, count: int) -> Tensor:
    """The rows, and zeros up to `count` rows."""
    missing = count - len(rows)
    return torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:]))) if missing else rows
