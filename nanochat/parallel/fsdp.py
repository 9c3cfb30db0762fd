"""Sharded models: each rank holds its rows of every parameter, and gathers a block's weights when the block runs.

Source: Zhao et al. 2023, PyTorch FSDP, in its second form, `fully_shard`, whose parameters are DTensors. sharding.py
reads and writes them.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from nanochat.cli import UserError
from nanochat.collectives import reduce_scatter
from nanochat.device import Device
from nanochat.layout import Layout


def shard(model: Any, layout: Layout, device: Device, activation_checkpointing: bool = False) -> None:
    """Under fsdp, leave this rank its rows of each parameter, in place; make the optimizer afterwards.

    The model, a GPT, may still be on the meta device. Its forward gathers what it needs; every rank must call it
    equally often. Gradients are means over all ranks. Blocks compute in the device's dtype; tables, the head and the
    vectors stay in fp32, so that the gradients of frequent tokens add up.

    With `activation_checkpointing`, under any layout, backward computes a block's activations again instead of
    keeping them (source: Chen et al. 2016, Training deep nets with sublinear memory cost).

    Raises UserError: when this torch sums gradients on a CPU where FSDP needs their mean.
    """
    if activation_checkpointing:
        for block in model.blocks:
            # Dropout must draw the same again. Nothing else in a block is random, and keeping the generators' states
            # would wait for the device.
            is_random = any(getattr(module, "dropout", 0) for module in block.modules())
            block.recompute = functools.partial(_recomputed, is_random)
    if not layout.sharded:
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # not on one process: see is_dtensor

    if device.kind == "cpu":
        _require_means(device)
    # The warning is about views that are written in place. A value embedding returns a view; nothing writes to it.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # Tables first: each is gathered by itself, in fp32, and only in the forward pass.
    tables = list(model.value_embeddings.values())
    if model.head is not None:  # else the embedding is the head too, and belongs to the root
        tables += [model.embedding, model.head]
    for table in tables:
        fully_shard(table, mesh=layout.mesh, reshard_after_forward=True)
        table.set_unshard_in_backward(False)  # no table's gradient needs the table
    # Then each block, gathered in the dtype that it computes in: half of the bytes in bf16.
    block_dtype = None if device.dtype == torch.float32 else device.dtype
    policy = MixedPrecisionPolicy(param_dtype=block_dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=layout.mesh, mp_policy=policy, reshard_after_forward=True)
    # The root takes the rest. By default it would stay gathered, and after an evaluation its gathered parameters
    # would miss the optimizer's updates of the shards.
    fully_shard(model, mesh=layout.mesh, reshard_after_forward=True)


def _recomputed(is_random: bool, compute: Callable[..., Any], *inputs: Any) -> Any:
    return checkpoint(compute, *inputs, use_reentrant=False, preserve_rng_state=is_random)


def _require_means(device: Device) -> None:
    """FSDP needs the mean of gradients; torch 2.7 silently returns their sum between processes on a CPU."""
    mean = torch.zeros(1)
    reduce_scatter(mean, torch.ones(device.world_size), op=dist.ReduceOp.AVG)
    if mean.item() != 1:
        raise UserError(
            f"--parallel fsdp: torch {torch.__version__} returns a sum on a cpu where a mean is needed, so every "
            "gradient would be too large: use --parallel ddp, or a newer torch"
        )
