"""Packs sequences into rows of one length: several in a row, none cut, none attending to another.

SFT packs conversations, RL packs samples, DPO packs pairs of replies (alignment/reply_pairs.py). Their lengths differ
so much that one sequence per row would spend most of the compute on padding.

Legend: N rows, T tokens per row, S sequences.
"""

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanochat.attention import Segments
from nanochat.cross_entropy import IGNORE
from nanochat.device import Device


@dataclass(frozen=True)
class PackedBatch:
    """Packed rows; every tensor is (N, T)."""

    inputs: Tensor
    targets: Tensor  # the next token; IGNORE where the mask is 0, at the end of a sequence and in the padding
    segments: Segments  # the sequences of each row; attention stays inside one, and the padding is another segment
    source: Tensor  # the number of the sequence, 0 to S - 1, so that a loss can weigh sequences; 0 in the padding
    values: Tensor | None = None  # one number per target; 0 where a place has no target

    def __len__(self) -> int:
        return len(self.inputs)

    def to(self, device: Device) -> "PackedBatch":
        move = device.to_device
        values = None if self.values is None else move(self.values)
        return PackedBatch(move(self.inputs), move(self.targets), self.segments.to(move), move(self.source), values)

    def micro_batches(self, rows: int, device: Device, rank: int = 0, world_size: int = 1) -> Iterator["PackedBatch"]:
        """One rank's share in micro-batches of `rows` rows, on the device.

        Row i goes to rank i mod world_size. All ranks get the same number of micro-batches, of the same shapes, because
        each rank joins the collectives of the others. Rows without a target fill up the last micro-batch. A micro-batch
        ends at its last target.
        """
        missing = (0, 0, 0, -len(self) % world_size)
        fill_values = [(self.inputs, 0), (self.targets, IGNORE), (self.segments.numbers, 0), (self.source, 0)]
        if self.values is not None:
            fill_values.append((self.values, 0))
        fields = [torch.nn.functional.pad(field, missing, value=value) for field, value in fill_values]
        # Example: 10 rows of 2,048 on 2 ranks, in micro-batches of 4. One row of each rank makes a group, and the last
        # group ends at place 700. Lengths are rounded up to an eighth of the row, so that only few shapes occur:
        #
        #     groups         0      1      2      3      4
        #     places         2,048  2,048  2,048  2,048  768
        #     micro-batch    0      0      0      0      1
        row_tokens = self.inputs.size(1)
        eighth = max(1, row_tokens // 8)
        eighth += -eighth % device.context_ranks  # ranks that share a row divide its tokens
        is_target = (fields[1] != IGNORE).view(-1, world_size, row_tokens).any(dim=1)  # (groups, T)
        last = (is_target * torch.arange(1, row_tokens + 1)).amax(dim=1)  # (groups,)
        places = [min(row_tokens, max(1, -(-end // eighth)) * eighth) for end in last.tolist()]
        first = 0
        while first < len(places):
            end = first + 1
            while end < min(first + rows, len(places)) and places[end] == places[first]:
                end += 1
            share = slice(first * world_size + rank, end * world_size, world_size)
            inputs, targets, numbers, *more = (field[share, : places[first]].contiguous() for field in fields)
            yield PackedBatch(inputs, targets, Segments.from_numbers(numbers), *more).to(device)
            first = end


def pack_sequences(
    ids: Sequence[Sequence[int]],
    masks: Sequence[Sequence[int]],
    row_tokens: int,
    ranks: int = 1,
    values: Sequence[Sequence[float]] | None = None,
) -> PackedBatch:
    """Pack S sequences. Each has a mask with a 1 under every token to learn, and may have a value for every token.

    Best fit, longest first: each sequence goes into the row that it fills up most, or into a new row. Without any
    sequence the result is one row of padding. Where the number of `ranks` does not divide the number of rows, the last
    rows become one short row per rank, if these have room.

    Raises ValueError: when a sequence is longer than row_tokens + 1.
    """
    # Example: four sequences that need 7, 5, 4 and 3 places, in rows of 10:
    #
    #     7   a new row 0, which then has 3 free
    #     5   a new row 1, which then has 5 free
    #     4   row 1, which then has 1 free
    #     3   row 0, which is then full
    #
    # Longest first, because the short ones fill the gaps that the long ones leave.
    rows: list[list[int]] = []  # the sequences in each row
    free: list[tuple[int, int]] = []  # (free places, row) in order, so that bisect finds the best fit
    for i in sorted(range(len(ids)), key=lambda i: -len(ids[i])):
        need = places_of(ids[i], row_tokens)
        found = bisect.bisect_left(free, (need,))
        if found < len(free):
            room, row = free.pop(found)
        else:
            room = row_tokens
            row = len(rows)
            rows.append([])
        rows[row].append(i)
        bisect.insort(free, (room - need, row))
    rows = [rows[row] for _, row in free]  # fullest first: rows of about one length are neighbours
    # 32 conversations often fit 7 rows, and 8 ranks need 8. The sequences of the last rows, longest first, each go into
    # the emptiest of 8 new rows. These get about the same length, and micro_batches cuts them off there.
    left_over = len(rows) % ranks
    if left_over:
        spread: list[list[int]] = [[] for _ in range(ranks)]
        filled = [0] * ranks
        sequences = itertools.chain.from_iterable(rows[-left_over:])
        for i in sorted(sequences, key=lambda i: -len(ids[i])):
            emptiest = filled.index(min(filled))
            spread[emptiest].append(i)
            filled[emptiest] += places_of(ids[i], row_tokens)
        if max(filled) <= row_tokens:
            rows[-left_over:] = spread
    return fill_rows(rows or [[]], ids, masks, row_tokens, values)


def places_of(sequence: Sequence[int], row_tokens: int) -> int:
    """Places of a row that a sequence takes: one less than its tokens, because the last token is only a target."""
    places = max(len(sequence) - 1, 0)
    if places > row_tokens:
        raise ValueError(f"a sequence of {len(sequence)} tokens does not fit a row of {row_tokens}")
    return places


def fill_rows(
    rows: Sequence[Sequence[int]],
    ids: Sequence[Sequence[int]],
    masks: Sequence[Sequence[int]],
    row_tokens: int,
    values: Sequence[Sequence[float]] | None = None,
) -> PackedBatch:
    """Write each row's sequences one after the other."""
    # Example: a row of 6 with two sequences, tokens 1 2 3 4 with mask 0 0 1 1 and tokens 5 6 7 with mask 0 1 1:
    #
    #     inputs     1  2  3  5  6  0     without the last token of each sequence: nothing follows it
    #     targets    -  3  4  6  7  -     the token after each input, IGNORE (-) where the mask is 0
    #     segments   0  0  0  1  1  2     the padding is another segment
    shape = (len(rows), row_tokens)
    inputs = np.zeros(shape, np.int64)
    targets = np.full(shape, IGNORE, np.int64)
    segments = np.zeros(shape, np.int64)
    source = np.zeros(shape, np.int64)
    of_targets = np.zeros(shape, np.float32)
    for row, members in enumerate(rows):
        begin = 0
        for number, i in enumerate(members):
            tokens = np.asarray(ids[i])
            mask = np.asarray(masks[i])
            end = begin + max(len(tokens) - 1, 0)
            inputs[row, begin:end] = tokens[:-1]
            targets[row, begin:end] = np.where(mask[1:], tokens[1:], IGNORE)
            segments[row, begin:end] = number
            source[row, begin:end] = i
            if values is not None:
                of_targets[row, begin:end] = np.where(mask[1:], values[i][1:], 0)
            begin = end
        segments[row, begin:] = len(members)  # the padding
    return PackedBatch(
        torch.from_numpy(inputs), torch.from_numpy(targets), Segments.from_numbers(torch.from_numpy(segments)),
        torch.from_numpy(source), None if values is None else torch.from_numpy(of_targets),
    )  # fmt: skip
