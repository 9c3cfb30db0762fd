"""Cast the weights of all products at once, for devices on which launches cost more than memory."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from nanochat.gpt import GPT
from nanochat.ground.sharding import is_sharded
from nanochat.operators import split_like

BUCKET_ELEMENTS = 1 << 25  # weights that are cast at a time


@contextlib.contextmanager
def cast_together(model: GPT, dtype: torch.dtype) -> Iterator[None]:
    """Inside the block, products read their weights from one copy of all weights in `dtype`. Weights must not change.

    This takes a few launches per step, instead of one per product and micro-batch. The backward pass holds the copies
    in any case, and casts gradients together too. Under FSDP, which casts the gathered weights itself, nothing happens.
    """
    if is_sharded(model):
        yield
        return
    # Linear layers, and the experts' (experts/layer.py): every module that multiplies by a cast of its weight.
    linears: list[Any] = [m for m in model.modules() if hasattr(m, "cast") and m.weight.dtype != dtype]
    # A bucket at a time: one row of all weights in fp32 would leave a large hole in the device's memory.
    buckets: dict[tuple[int, bool], list[Any]] = {}
    elements = 0
    for linear in linears:
        elements += linear.weight.numel()
        buckets.setdefault((elements // BUCKET_ELEMENTS, linear.weight.requires_grad), []).append(linear)
    for bucket in buckets.values():
        weights = [linear.weight for linear in bucket]
        flat = torch.cat([weight.flatten() for weight in weights]).to(dtype)
        for linear, cast in zip(bucket, split_like(flat, weights), strict=True):
            linear.cast = cast
    extension = contextlib.nullcontext()
    if model.extension is not None:
        extension = model.extension.cast_weights(model, dtype)
    try:
        with extension:
            yield
    finally:
        for linear in linears:
            linear.cast = None
