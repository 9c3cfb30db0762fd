"""The ranks of a run: how it is spread over its processes, and the collectives by which they agree.

The layout of one process is here; parallel/ has the layouts of several. Every rank calls a collective, in the same
order; a rank that does not call it leaves the others waiting.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from nanochat.device import Device
from nanochat.ground import rooms
from nanochat.ground.cli import UserError
from nanochat.ground.sharding import Exchange


@dataclass(frozen=True)
class Layout:
    """One process, which holds the whole model and does all of the work."""

    # Whether ranks hold only parts of the parameters: then each forward pass is a collective.
    sharded = False

    def __str__(self) -> str:
        return "one process"

    def shard(self, model: Any, device: Device) -> None:
        """Leave this process its part of the parameters of a GPT, in place. Make the optimizer afterwards.

        The model may still be on the meta device.
        """

    def exchange(self, model: Any) -> Exchange:
        """The exchange between the ranks in a step, for a model that `shard` has laid out: one for each optimizer."""
        return Exchange()


def lay_out(
    device: Device, parallel: Literal["ddp", "fsdp"] = "ddp", replicate: int = 1, expert_parallel: bool = False
) -> Layout:
    """The layout of a run on all of its processes: `ddp` keeps the whole model on each, `fsdp` a part of it.

    Raises UserError: when the processes do not form `replicate` groups, or not groups of `device.context_ranks`, or
    when they cannot hold experts in parts.
    """
    if expert_parallel:
        layout = rooms.find("layouts", "experts")(device, parallel, replicate)
    elif device.world_size == replicate == device.context_ranks == 1:
        return Layout()
    else:
        layout = rooms.find("layouts", parallel)(device, replicate)
    if device.context_ranks > 1:
        layout = rooms.find("layouts", "context")(device, layout)
    return layout


Decision = TypeVar("Decision")  # what JSON can hold


def sum_over_ranks(tensor: Tensor, device: Device) -> Tensor:
    """Sum a tensor over all ranks, in place, and return it. One process returns it unchanged."""
    if device.world_size > 1:
        dist.all_reduce(tensor)
    return tensor


def gather_values(value: Any, device: Device) -> list[Any]:
    """The ranks' values, in rank order, on every rank. A value is what JSON can hold; a tuple arrives as a list."""
    # Not by torch's all_gather_object: that one unpickles what arrives, and a pickle can run any program.
    text = json.dumps(value).encode()
    if device.world_size == 1:
        return [json.loads(text)]
    # A collective moves tensors of one size: all texts are filled up to the longest with spaces, which JSON ignores.
    longest = torch.tensor(len(text), dtype=torch.int32, device=device.torch_device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    own = torch.frombuffer(bytearray(text.ljust(int(longest))), dtype=torch.uint8).to(device.torch_device)
    texts = [torch.empty_like(own) for _ in range(device.world_size)]
    dist.all_gather(texts, own)
    return [json.loads(text.cpu().numpy().tobytes()) for text in texts]


def decide_on_rank_zero(device: Device, decide: Callable[[], Decision]) -> Decision:
    """The result of `decide` on rank 0, on every rank.

    It reads folders that all hosts share: another host may see a listing that is seconds old.

    Raises UserError: on all ranks, when `decide` fails on rank 0.
    """
    decision: Any = None
    failure: Exception | None = None
    if device.is_main:
        try:
            decision = decide()
        except Exception as error:
            failure = error
    decision, message = gather_values((decision, None if failure is None else str(failure)), device)[0]
    if failure is not None:
        raise failure
    if message is not None:
        raise UserError(message)
    return decision
