"""Sequences become rows of one length, several in a row, none cut, none seeing another.

SFT packs conversations, RL packs samples, DPO pairs of replies. The targets carry the loss mask, and `source` says
which sequence each target belongs to, so that a loss may weigh sequences.

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
class PackedBatch:
    """Packed rows; all fields (N, T)."""

    inputs: Tensor
    targets: Tensor  # the input moved on by one; IGNORE where the mask is 0 and at a sequence's end
    segments: Tensor  # number of the sequence within its row; padding has numbers of its own
    source: Tensor  # which of the S sequences a place belongs to; 0 in the padding, where there is no target

    def __len__(self) -> int:
        return len(self.inputs)

    def micro_batches(self, rows: int, device: Device, rank: int = 0, world_size: int = 1) -> Iterator["PackedBatch"]:
        """The share of one of `world_size` ranks in micro-batches of `rows` rows, on the device; every rank has as
        many, the last ones filled up with rows without a target."""
        count = -(-len(self) // (rows * world_size))
        missing = count * rows * world_size - len(self)
        fills = ((self.inputs, 0), (self.targets, IGNORE), (self.segments, 0), (self.source, 0))
        fields = [torch.nn.functional.pad(tensor, (0, 0, 0, missing), value=fill) for tensor, fill in fills]
        for micro in range(count):
            share = slice(micro * rows * world_size + rank, (micro + 1) * rows * world_size, world_size)
            yield PackedBatch(*(device.to_device(field[share].contiguous()) for field in fields))


def pack_sequences(ids: Sequence[Sequence[int]], masks: Sequence[Sequence[int]], row_tokens: int) -> PackedBatch:
    """Pack S sequences, each with a mask that has a 1 under every token to learn; best fit, longest first.

    A sequence of n tokens takes n - 1 places: its last token is only a target. Raises ValueError: when one is longer
    than row_tokens + 1.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(ids)), key=lambda i: -len(ids[i])):
        need = _places(ids[i], row_tokens)
        row = _best_fit(room, need)
        if row is None:
            row = len(rows)
            rows.append([])
            room.append(row_tokens)
        rows[row].append(i)
        room[row] -= need
    return _filled(rows or [[]], ids, masks, row_tokens)  # no sequence: one row of padding


def pack_pairs(
    ids: Sequence[Sequence[int]],
    masks: Sequence[Sequence[int]],
    row_tokens: int,
    rows: int,
    device: Device,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[tuple[PackedBatch, int]]:
    """Pack S sequences of which 2i and 2i + 1 are a pair: the share of one of `world_size` ranks in micro-batches of
    `rows` rows, on the device, none of which parts a pair; every rank has as many, some maybe of padding alone.

    Comes with the number of pairs, at least 1; `source` numbers the sequences of the micro-batch, 2p and 2p + 1 for its
    pair p. Raises ValueError: when a sequence is longer than row_tokens + 1.
    """
    assert rows > 1 and len(ids) % 2 == 0
    need = [_places(sequence, row_tokens) for sequence in ids]
    micros: list[list[list[int]]] = []  # the sequences of each row
    rooms: list[list[int]] = []
    for pair in sorted(range(len(ids) // 2), key=lambda pair: -max(need[2 * pair : 2 * pair + 2])):
        members = sorted((2 * pair, 2 * pair + 1), key=lambda i: -need[i])
        needs = [need[i] for i in members]
        while (found := _roomiest(rooms, needs)) is None:  # one for each rank; an empty one has room for any pair
            micros += [[[] for _ in range(rows)] for _ in range(world_size)]
            rooms += [[row_tokens] * rows for _ in range(world_size)]
        micro, places = found
        for row, i in zip(places, members, strict=True):
            micros[micro][row].append(i)
            rooms[micro][row] -= need[i]
    for members_by_row in micros[rank::world_size] or [[[] for _ in range(rows)]]:
        kept = sorted(i for members in members_by_row for i in members)
        local = {i: place for place, i in enumerate(kept)}
        by_row = [[local[i] for i in members] for members in members_by_row]
        filled = _filled(by_row, [ids[i] for i in kept], [masks[i] for i in kept], row_tokens)
        fields = (filled.inputs, filled.targets, filled.segments, filled.source)
        yield PackedBatch(*map(device.to_device, fields)), max(1, len(kept) // 2)


def _places(sequence: Sequence[int], row_tokens: int) -> int:
    need = max(len(sequence) - 1, 0)
    if need > row_tokens:
        raise ValueError(f"a sequence of {len(sequence)} tokens does not fit a row of {row_tokens}")
    return need


def _best_fit(room: Sequence[int], need: int) -> int | None:
    """The row that so many places fill up best; None where no row has them."""
    fits = [row for row, left in enumerate(room) if left >= need]
    return min(fits, key=room.__getitem__) if fits else None


def _roomiest(rooms: Sequence[Sequence[int]], needs: Sequence[int]) -> tuple[int, list[int]] | None:
    """The emptiest micro-batch with room for all of `needs`, the greatest first, and the row for each."""
    for micro in sorted(range(len(rooms)), key=lambda micro: -sum(rooms[micro])):
        left, rows = list(rooms[micro]), []
        for need in needs:
            row = _best_fit(left, need)
            if row is None:
                break
            left[row] -= need
            rows.append(row)
        else:
            return micro, rows
    return None


def _filled(
    rows: Sequence[Sequence[int]], ids: Sequence[Sequence[int]], masks: Sequence[Sequence[int]], row_tokens: int
) -> PackedBatch:
    """The rows whose sequences' numbers are given."""
    shape = (len(rows), row_tokens)
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
    return PackedBatch(*(torch.from_numpy(field) for field in (inputs, targets, segments, source)))
