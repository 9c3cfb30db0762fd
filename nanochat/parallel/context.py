"""Context parallelism: R neighbouring ranks compute the same rows together, each a part of their tokens.

A row of 128k tokens keeps more activations than a device has memory for. Here each rank keeps the activations of its
part. Only attention needs the other tokens of a row, and its heads are independent of each other: one all-to-all before
it and one after it exchange tokens for heads (source: Jacobs et al. 2023, DeepSpeed Ulysses). Attention itself is the
device's usual operator on whole rows, so windows and documents are exact.

    a row of 8 tokens, 4 heads, R = 2       rank 0                    rank 1
    embedding, norms, projections           tokens 0-3, all heads     tokens 4-7, all heads
    all-to-all
    attention                               heads 0-1, all tokens     heads 2-3, all tokens
    all-to-all
    output projection, MLP, head            tokens 0-3, all heads     tokens 4-7, all heads
    gather the losses                       all tokens                all tokens

The rest of the project does not notice. All R ranks read the same rows (`Device.data_rank`), and their model returns
the losses of whole rows. To ddp, fsdp, clipping and statistics they are ordinary ranks with their own data: sums of
losses, counts of targets and gradients are all R times too large together, and every ratio of them is right.

With fewer key heads than ranks several ranks get a copy of one: K' = lcm(K, R) key heads travel. In a layer a rank
passes B x T/R x (H + 2 K') x D elements to the first all-to-all and B x T/R x H x D to the second, of which (R - 1)/R
leave it. The backward pass sends the same again, and recomputed activations once more. At the end of a forward pass
each rank sends its losses, one number a token or one in all.

Legend: B batch, T tokens of a row, R ranks of a row, H query heads, K key heads, D head dim.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from nanochat.attention import Segments
from nanochat.device import Device
from nanochat.gpt import GPTConfig
from nanochat.ground.cli import UserError
from nanochat.ground.sharding import Exchange
from nanochat.parallel.ddp import all_gather
from nanochat.parallel.exchange import Travel
from nanochat.parallel.mesh import Place
from nanochat.ranks import Layout


@dataclass(frozen=True)
class RowGroup:
    """The ranks that compute the same rows."""

    rank: int  # this process's number among them; it has this part of the tokens
    ranks: int
    group: dist.ProcessGroup | None  # None: all processes of the run


class RowPart:
    """Takes the place of the segments in a forward pass over a part of rows: their tokens from `start` on."""

    # It reaches attention inside the model's own arguments, so that recomputed activations find it, too. It is not a
    # dataclass: FSDP would search its fields for gradients.

    def __init__(self, start: int, documents: Segments | None):
        self.start = start
        self.documents = documents  # the documents of whole rows; None: each row is one document


@dataclass(frozen=True)
class SharedRows(Layout):
    """The layout of ddp or fsdp, in which R neighbours compute the same rows together."""

    inner: Layout
    row: RowGroup
    sharded = True  # each forward pass is a collective, also where a rank holds all parameters

    def __str__(self) -> str:
        return f"{self.inner}, rows shared by {self.row.ranks}"

    def shard(self, model: Any, device: Device) -> None:
        """Shard the model, and have it compute a part of each row: all ranks of a row must call it with the same rows.

        Raises UserError: when the ranks cannot divide the model's heads or its rows.
        """
        _require_divisible(model.config, self.row.ranks)
        self.inner.shard(model, device)
        for block in model.blocks:
            block.attention.kernels = SharedRowsKernels(block.attention.kernels, self.row)
        model.forward = functools.partial(_forward, model.forward, self.row)

    def exchange(self, model: Any) -> Exchange:
        return self.inner.exchange(model)


def share_rows(device: Device, layout: Any) -> SharedRows:
    """The layout, ddp or fsdp, with `device.context_ranks` neighbours that share rows. All ranks call this together."""
    R = device.context_ranks
    place: Place = layout.place
    # Every group of ranks takes memory for its buffers, hundreds of MB on some devices: use a group that exists.
    group: Any = None
    if place.replicas > 1 and place.ranks == R:
        group = place.group
    elif device.world_size != R:
        neighbours = torch.arange(device.world_size).view(-1, R)
        group, _ = dist.new_subgroups_by_enumeration(neighbours.tolist())
    return SharedRows(layout, RowGroup(device.rank % R, R, group))


def _require_divisible(config: GPTConfig, R: int) -> None:
    if config.has_states:
        raise UserError("--context_parallel: a layer with a state (Qwen3.5) reads whole rows, so leave it out")
    if config.n_head % R:
        fitting = [count for count in range(2, config.n_head + 1) if config.n_head % count == 0]
        advice = f"use {' or '.join(map(str, fitting))}" if fitting else "leave it out"
        raise UserError(f"--context_parallel {R} does not divide the {config.n_head} heads of this model: {advice}")
    if config.sequence_len % R:
        raise UserError(
            f"--context_parallel {R} does not divide rows of {config.sequence_len} tokens: "
            f"set --max_seq_len {max(1, config.sequence_len // R) * R}"
        )


def _forward(
    forward: Callable[..., Tensor],
    row: RowGroup,
    tokens: Tensor,
    targets: Tensor | None = None,
    cache: Any = None,
    segments: Segments | None = None,
    **options: Any,
) -> Tensor:
    """`GPT.forward` by the ranks of a row together: each computes its part, and all return the whole result."""
    if cache is not None:  # decoding: each rank has rows of its own
        return forward(tokens, targets, cache, segments, **options)
    T = tokens.size(1)
    assert T % row.ranks == 0, f"{row.ranks} ranks share rows of {T} tokens"
    start = row.rank * T // row.ranks
    end = start + T // row.ranks
    part: Any = RowPart(start, segments)
    tokens = tokens[:, start:end].contiguous()
    if targets is not None:
        targets = targets[:, start:end].contiguous()
    result = forward(tokens, targets, segments=part, **options)
    parts = _Gather.apply(row, result)  # (R, ...)
    # A sum of losses, or the numbers of single tokens: (R, B, T/R, ...) -> (B, T, ...)
    return parts.sum() if result.ndim == 0 else parts.transpose(0, 1).flatten(1, 2)


class SharedRowsKernels:
    """The kernels of a model's attention. Where its queries are a part of rows, it attends to whole rows."""

    def __init__(self, kernels: Any, row: RowGroup):
        self._kernels = kernels
        self._row = row
        self._to_heads = functools.partial(to_heads, row)
        self._to_tokens = functools.partial(to_tokens, row)

    def __getattr__(self, name: str) -> Any:  # everything but `attention` is unchanged
        return getattr(self._kernels, name)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int = 0,
        segments: Segments | RowPart | None = None,
    ) -> Tensor:
        """q (B, T/R, H, D), k and v (B, T/R, K, D) -> (B, T/R, H, D), as the operator of the device computes it."""
        attend = functools.partial(self._kernels.attention, scale=scale, window=window)
        if not isinstance(segments, RowPart):
            return attend(q, k, v, segments=segments)
        # 6 query heads on 6 ranks with 2 key heads: each rank needs one key head, so each key head travels 3 times.
        K = k.size(2)
        copies = math.lcm(K, self._row.ranks) // K
        if copies > 1:
            k, v = (x.unsqueeze(3).expand(-1, -1, -1, copies, -1).flatten(2, 3) for x in (k, v))
        q, k, v = Travel.apply(self._to_heads, self._to_tokens, q, k, v)
        y = attend(q, k, v, segments=segments.documents)  # (B, T, H/R, D)
        return Travel.apply(self._to_tokens, self._to_heads, y)[0]


class _Gather(torch.autograd.Function):
    """The tensors of all ranks of a row: (...) -> (R, ...)."""

    @staticmethod
    def forward(ctx, row: RowGroup, part: Tensor) -> Tensor:
        ctx.row = row
        whole = part.new_empty(row.ranks * part.numel())
        all_gather(whole, part.flatten(), group=row.group)
        return whole.view(row.ranks, *part.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        # All R ranks compute the same loss of the whole, and the gradients of all R losses come back to this part. They
        # are equal, so nothing travels.
        return None, grads[0][ctx.row.rank] * ctx.row.ranks


def to_heads(row: RowGroup, *parts: Tensor) -> tuple[Tensor, ...]:
    """All heads of this rank's tokens, (B, T/R, heads, D), for its heads of all tokens, (B, T, heads/R, D)."""
    by_rank = [x.unflatten(2, (row.ranks, -1)).permute(2, 0, 1, 3, 4) for x in parts]  # (R, B, T/R, heads/R, D)
    arrived = _all_to_all(by_rank, row)
    # The ranks that sent them have one part of the tokens each. The attention of some devices needs contiguous tensors.
    return tuple(x.transpose(0, 1).flatten(1, 2).contiguous() for x in arrived)


def to_tokens(row: RowGroup, *parts: Tensor) -> tuple[Tensor, ...]:
    """This rank's heads of all tokens, (B, T, heads/R, D), for all heads of its tokens, (B, T/R, heads, D)."""
    by_rank = [x.unflatten(1, (row.ranks, -1)).transpose(0, 1) for x in parts]  # (R, B, T/R, heads/R, D)
    arrived = _all_to_all(by_rank, row)
    return tuple(x.permute(1, 2, 0, 3, 4).flatten(2, 3).contiguous() for x in arrived)


def _all_to_all(by_rank: Sequence[Tensor], row: RowGroup) -> Sequence[Tensor]:
    """Send place r of each tensor (R, B, T/R, n, D) to rank r of the row; returns what arrives, in the same shapes."""
    sent = torch.cat(list(by_rank), dim=3).contiguous()
    arrived = torch.empty_like(sent)
    dist.all_to_all_single(arrived, sent, group=row.group)
    return arrived.split([x.size(3) for x in by_rank], dim=3)
