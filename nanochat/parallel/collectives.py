"""The collectives that files outside of the optimizer call, and two that torch renamed.

Every rank calls a collective, in the same order; a rank that does not call it leaves the others waiting.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from nanochat.device import Device
from nanochat.shell.cli import UserError


def sum_over_ranks(tensor: Tensor, device: Device) -> Tensor:
    """Sum a tensor over all ranks, in place, and return it. One process returns it as it is."""
    if device.world_size > 1:
        dist.all_reduce(tensor)
    return tensor


def gather_objects(value: Any, device: Device) -> list[Any]:
    """The ranks' values, in rank order, on every rank."""
    if device.world_size == 1:
        return [value]
    values: list[Any] = [None] * device.world_size
    dist.all_gather_object(values, value)
    return values


def decide_on_rank_zero(device: Device, decide: Callable[[], str | None]) -> str | None:
    """The result of `decide` on rank 0, on every rank.

    It reads folders that all hosts share: another host may see a listing that is seconds old.

    Raises UserError: on all ranks, when `decide` fails on rank 0.
    """
    decision: str | None = None
    failure: Exception | None = None
    if device.is_main:
        try:
            decision = decide()
        except Exception as error:
            failure = error
    decision, message = gather_objects((decision, None if failure is None else str(failure)), device)[0]
    if failure is not None:
        raise failure
    if message is not None:
        raise UserError(message)
    return decision


# torch 2.13 renamed both; older versions know the second name only.


def reduce_scatter(share: Tensor, whole: Tensor, **options: Any) -> dist.Work | None:
    """Sum `whole` over the ranks, and leave in `share` the part of the sum that belongs to this rank."""
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return function(share, whole, **options)


def all_gather(whole: Tensor, share: Tensor, **options: Any) -> dist.Work | None:
    """Fill `whole` with the ranks' shares, in rank order."""
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return function(whole, share, **options)
