"""Sequences become rows of one length, several in a row, none cut, none seeing another.

SFT packs conversations, RL packs samples. The targets carry the loss mask, and `source` says which sequence each
target belongs to, so that a loss may weigh sequences.

Legend: N rows, T tokens a row, S sequences.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanochat.cross_entropy import IGNORE
from nanochat.device import Device


@dataclass(frozen=True)
class Rows:
    """Packed rows; all fields (N, T)."""

    inputs: Tensor
    targets: Tensor  # the input moved on by one; IGNORE where the mask is 0 and at a sequence's end
    segments: Tensor  # number of the sequence within its row; padding has numbers of its own
    source: Tensor  # which of the S sequences a place belongs to; 0 in the padding, where there is no target

    def __len__(self) -> int:
        return len(self.inputs)

    def micro_batches(self, rows: int, device: Device, rank: int = 0, world_size: int = 1) -> Iterator["Rows"]:
        """The share of one of `world_size` ranks in micro-batches of `rows` rows, on the device; every rank has as
        many, the last ones filled up with rows without a target."""
        count = -(-len(self) // (rows * world_size))
        missing = count * rows * world_size - len(self)
        fills = ((self.inputs, 0), (self.targets, IGNORE), (self.segments, 0), (self.source, 0))
        fields = [torch.nn.functional.pad(tensor, (0, 0, 0, missing), value=fill) for tensor, fill in fills]
        for micro in range(count):
            share = slice(micro * rows * world_size + rank, (micro + 1) * rows * world_size, world_size)
            yield Rows(*(device.to_device(field[share].contiguous()) for field in fields))


def pack(ids: Sequence[Sequence[int]], masks: Sequence[Sequence[int]], row_tokens: int) -> Rows:
    """Pack S sequences, each with a mask that has a 1 under every token to learn; best fit, longest first.

    A sequence of n tokens takes n - 1 places: its last token is only a target. Raises ValueError: when one is longer
    than row_tokens + 1.
    """
    order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
    rows: list[list[int]] = []
    room: list[int] = []
    for i in order:
        need = max(len(ids[i]) - 1, 0)
        if need > row_tokens:
            raise ValueError(f"a sequence of {len(ids[i])} tokens does not fit a row of {row_tokens}")
        fits = [row for row, left in enumerate(room) if left >= need]
        if fits:
            row = min(fits, key=room.__getitem__)
        else:
            row = len(rows)
            rows.append([])
            room.append(row_tokens)
        rows[row].append(i)
        room[row] -= need
    shape = (max(len(rows), 1), row_tokens)  # no sequence: one row of padding
    inputs, source = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    targets, segments = np.full(shape, IGNORE, np.int64), np.zeros(shape, np.int64)
    for row, members in enumerate(rows):
        place = 0
        for number, i in enumerate(members):
            tokens, mask = np.asarray(ids[i]), np.asarray(masks[i])
            end = place + max(len(tokens) - 1, 0)
            inputs[row, place:end] = tokens[:-1]
            targets[row, place:end] = np.where(mask[1:], tokens[1:], IGNORE)
            segments[row, place:end] = number
            source[row, place:end] = i
            place = end
        segments[row, place:] = len(members)
    return Rows(*(torch.from_numpy(field) for field in (inputs, targets, segments, source)))
