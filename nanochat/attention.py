"""Attention: the keys that a query may attend to, windows, and the cache of keys and values.

A query attends to its own token and to earlier tokens: softmax(q k^T scale) v (source: Vaswani et al. 2017). With a
window of w it attends to itself and the w - 1 tokens before it; 0 means no window. Everywhere in this project a mask is
True where the query may attend to the key. kernels/ decides which operator runs on which device.

Legend: B batch, T query tokens, S cached tokens, H query heads, K key/value heads, D head dim, w window.
"""

import bisect
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

# Queries per block in `blockwise_attention`. Blocks of 128 compute fewer scores but add up the gradients of the keys in
# more parts: 315 instead of 210 ms for 2 rows of 2,048 in bf16 (one thread of an Intel Xeon with AMX, 2026-11-22).
BLOCK = 256

# The keys that a query may attend to (1) in a row of 6 tokens, one query per line:
#
#     causal, window 0      window 3              documents a a a b b b
#     1 . . . . .           1 . . . . .           1 . . . . .
#     1 1 . . . .           1 1 . . . .           1 1 . . . .
#     1 1 1 . . .           1 1 1 . . .           1 1 1 . . .
#     1 1 1 1 . .           . 1 1 1 . .           . . . 1 . .
#     1 1 1 1 1 .           . . 1 1 1 .           . . . 1 1 .
#     1 1 1 1 1 1           . . . 1 1 1           . . . 1 1 1
#
# A token beyond the window is not lost: layer 2 reads states that have already read their own windows, so n layers of
# window w reach n (w - 1) tokens back.


@dataclass
class Segments:
    """The documents of packed rows: a token attends only within its document."""

    # Two rows of 6 tokens, with the documents a a a b b b and c c c c d d:
    numbers: Tensor  # (B, T), equal for tokens of one document: 1 1 1 2 2 2 and 1 1 1 1 2 2
    # The end of each document, with the rows laid end to end: 3, 6, 10, 12. Operators divide their work by the ends.
    # Some do so before the launch and need numbers on the host; others need a tensor on the device.
    ends: list[int]
    bounds: Tensor  # (documents + 1,) in int32: 0, 3, 6, 10, 12
    start: int = 0  # the position of the first token; more where several processes share a row

    @classmethod
    def from_numbers(cls, numbers: Tensor) -> "Segments":
        """Build segments on the host, from numbers (B, T) that change wherever a document of a row begins."""
        is_first = torch.ones_like(numbers, dtype=torch.bool)
        is_first[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
        bounds = F.pad(is_first.flatten().nonzero()[:, 0], (0, 1), value=numbers.numel()).int()
        # Count again: a number that reappears later in its row is another document.
        return cls(is_first.cumsum(dim=1), bounds[1:].tolist(), bounds)

    def to(self, move: Callable[[Tensor], Tensor]) -> "Segments":
        """Copy the segments to another device: `move` copies one tensor (`Device.to_device`)."""
        return Segments(move(self.numbers), self.ends, move(self.bounds))

    def first_key(self, start: int) -> int:
        """The earliest token of a row that its queries from `start` on may attend to, in any of the rows."""
        # Places count through all rows. With ends of 3, 6, 10, 12 and rows of 6, query 4 of row 1 is at place 10. Three
        # ends are at or before it, so its document is number 3, which begins where number 2 ends, at 10.
        rows, tokens = self.numbers.shape
        earliest = start
        for row_start in range(0, rows * tokens, tokens):
            document = bisect.bisect_right(self.ends, row_start + start)
            begin = self.ends[document - 1] if document else 0
            earliest = min(earliest, begin - row_start)
        return earliest


def causal_mask(
    first: int, start: int, end: int, window: int, segments: Segments | None, device: torch.device
) -> Tensor:
    """The mask of the queries `start` to `end` over the keys `first` to `end` (exclusive): (T, S), or with segments
    (B, 1, T, S)."""
    index = torch.arange(first, end, device=device)
    distance = index[start - first :, None] - index  # (T, S): how far a key lies before its query
    mask = distance >= 0
    if window:
        mask = mask & (distance < window)
    if segments is not None:
        # Numbers 0 0 1 compared with themselves as a column and as a row: a block of True for each document.
        numbers = segments.numbers
        same_document = numbers[:, start:end, None] == numbers[:, None, first:end]  # (B, T, S)
        mask = mask & same_document[:, None]
    return mask


def blockwise_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int, segments: Segments | None,
    attend: Callable[..., Tensor],
) -> Tensor:  # fmt: skip
    """Attention within windows and documents, by an operator that supports only masks: q (B, T, H, D), k and v
    (B, T, K, D) -> (B, T, H, D). `attend` takes a part of q, k and v, and `scale` and `mask`.

    Work and masks grow with the number of tokens that a query may attend to, not with T x T. Source: Beltagy et al.
    2020, Longformer.
    """
    # The queries of a block read the keys from the first one that any of them may attend to, up to the block's end.
    # With blocks of 4 and a window of 3 in a row of 10:
    #
    #     queries 0 1 2 3   keys 0 1 2 3
    #     queries 4 5 6 7   keys     2 3 4 5 6 7
    #     queries 8 9       keys             6 7 8 9
    #
    # If a document begins at token 4, the keys of the second block are 4 5 6 7.
    T = q.size(1)
    blocks = []
    for start in range(0, T, BLOCK):
        end = min(start + BLOCK, T)
        first = max(0, start - window + 1) if window else 0
        # Compiled code has fixed shapes, but documents end elsewhere in every batch: there only the mask counts.
        if segments is not None and not torch.compiler.is_compiling():
            first = max(first, segments.first_key(start))
        mask = causal_mask(first, start, end, window, segments, q.device)
        blocks.append(attend(q[:, start:end], k[:, first:end], v[:, first:end], scale=scale, mask=mask))
    return torch.cat(blocks, dim=1)  # (B, T, H, D)


# Without a cache every new token costs a pass over the whole sequence. The keys and values of earlier tokens never
# change, because no token attends to a later one. So they are stored once and read for every later token.
#
# One layer of a cache for three rows, capacity 8. A letter is a token whose key and value are stored:
#
#              0  1  2  3  4  5  6  7    position
#     row 0    a  b  c  d  .  .  .  .       4        its next token goes to place 4
#     row 1    e  f  .  .  .  .  .  .       2
#     row 2    g  h  i  j  k  .  .  .       5
#              '--attended_len--'
#
# Rows have different lengths, so each has its own position. A step with one new token per row needs 6 places. It reads
# 6 places instead of 8, and its mask hides the places after each row's end. Row 1 writes its new token to place 2. The
# distances of the keys 0 to 5 are then 2 1 0 -1 -2 -3, and it attends to keys at a distance of 0 or more (`masks`).
#
# In memory the places of one key head are contiguous, and the row's next key head comes after them. With two heads:
#
#     place in memory    0 1 2 3 4 5 6 7   8 9 ...                16 ...
#                        row 0, head 0     row 0, head 1          row 1, head 0
#
# So a head's keys are one matrix (S, D), which products read where it lies, and one number per head names the place of
# a new token: row 1 writes to 16 + 2 and 24 + 2.


@dataclass
class KVCache:
    """Keys and values of every layer for up to `capacity` tokens per row, so that a new token computes only its own.

    Layers only write and read. The engine advances `position` once per forward pass, after the last layer.
    """

    # Fixed memory (layers, B K S, D): decoding allocates nothing, and its launches can be recorded once and replayed.
    keys: Tensor
    values: Tensor
    # (B,): the number of tokens in each row, which is also the place of the next one. It is on the device, so that a
    # decoded token does not wait for the host.
    position: Tensor
    # Two constants, created once instead of in every step. (B, K): 0, 1, 2, ..., the key heads, for `indices`.
    heads: Tensor
    # (places of a head,): 0, 1, 2, ..., for `masks`.
    places: Tensor
    # S: the places of a head, at most as many as there are (kernels/decoding.py).
    stride: int
    # Keys from here on are not read. The engine keeps it low while all rows are short.
    attended_len: int
    # Whether the launches of a pass are recorded for replay: some operators must not be recorded.
    is_recorded: bool = False
    # Later positions are clamped to this, and to a head's last place for a token: a padded piece of a prompt writes its
    # padding there, a slot without a row what a recording computes for it. None: positions are never later.
    max_position: int | None = None
    # What layers without keys keep of each row, (layers, B, ...) each (deltanet/layer.py).
    states: tuple[Tensor, ...] = ()
    # (B,): how many of the new tokens are real, where others are padding. None: all.
    lengths: Tensor | None = None

    @classmethod
    def empty(
        cls, layers: int, batch: int, capacity: int, kv_heads: int, head_dim: int,
        device: torch.device | str, dtype: torch.dtype,
    ) -> "KVCache":  # fmt: skip
        shape = (layers, batch * kv_heads * capacity, head_dim)
        return cls(
            keys=torch.zeros(shape, device=device, dtype=dtype),
            values=torch.zeros(shape, device=device, dtype=dtype),
            position=torch.zeros(batch, device=device, dtype=torch.long),
            heads=torch.arange(batch * kv_heads, device=device).view(batch, kv_heads),
            places=torch.arange(capacity, device=device),
            stride=capacity,
            attended_len=capacity,
        )

    @property
    def capacity(self) -> int:
        """The number of places per head."""
        return len(self.places)

    def view(self, first: int, end: int) -> "KVCache":
        """The rows `first` to `end` (exclusive), in this cache's memory, until it is laid out anew."""
        # Slices share the memory: a write through the view changes the cache. `attended_len` is a number, not a tensor,
        # so each view has its own.
        row = self.heads.size(1) * self.stride
        return replace(
            self,
            keys=self.keys[:, first * row : end * row],
            values=self.values[:, first * row : end * row],
            position=self.position[first:end],
            heads=self.heads[: end - first],  # counted in the view's own keys
            states=tuple(memory[:, first:end] for memory in self.states),
        )

    def by_head(self, memory: Tensor) -> Tensor:
        """Keys or values of one or more layers (..., B K S, D) as (..., B, K, S, D), in the same memory."""
        B, K = self.heads.shape
        used = memory[..., : B * K * self.stride, :]
        return used.view(*memory.shape[:-2], B, K, self.stride, -1)

    def copy_rows(self, sources: Tensor, targets: Tensor, tokens: int) -> None:
        """Copy the first `tokens` keys and values of the rows `sources` (B,) to the rows `targets` (B,), and all of
        their states; both may overlap."""
        # Indexing gathers the right side into new memory first, so a row may be both source and target.
        for memory in (self.by_head(self.keys), self.by_head(self.values)):
            memory[:, targets, :, :tokens] = memory[:, sources, :, :tokens]
        for memory in self.states:
            memory[:, targets] = memory[:, sources]

    def positions(self, tokens: int) -> Tensor:
        """(B, T): the positions of the next `tokens` tokens of each row."""
        positions = self.position[:, None]  # (B, 1)
        if tokens > 1:  # for one token this saves two launches
            positions = positions + torch.arange(tokens, device=self.position.device)
        if self.max_position is not None:
            positions = positions.clamp(max=min(self.max_position, self.stride - 1))
        return positions

    def masks(self, positions: Tensor, windows: list[int]) -> dict[int, Tensor]:
        """For each window in use a mask (B, 1, T, attended_len)."""
        # The distance of each key before its query. After a row's end it is negative, which hides unwritten places.
        distance = positions[:, None, :, None] - self.places[: self.attended_len]
        causal = distance >= 0
        # Layers of the same window share one mask.
        return {window: causal & (distance < window) if window else causal for window in set(windows)}

    def indices(self, positions: Tensor) -> Tensor:
        """Where the keys and values of tokens at `positions` (B, T) go in the memory of every layer: (B, T, K)."""
        return torch.add(positions[:, :, None], self.heads[:, None], alpha=self.stride)  # position + head S

    def write(self, layer: int, k: Tensor, v: Tensor, indices: Tensor) -> None:
        """Store k and v (B, T, K, D) at their `indices`."""
        # index_put_ takes 0.04 ms; scatter_, which copies the whole cache, takes 1.3 ms (64 rows at depth 4, AMD EPYC,
        # 2026-11-20). One index for one axis: with indices for axes that are apart, an NPU writes on its slow AI CPU
        # (source: CANN's aclnnIndexPutImpl), 24 times a token at depth 12.
        self.keys[layer].index_put_((indices,), k.to(self.keys.dtype))
        self.values[layer].index_put_((indices,), v.to(self.values.dtype))

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """The first `attended_len` keys and values of a layer, (B, K, attended_len, D) each."""
        # A slice, not a copy. The cost of a token grows with the keys that it reads, so it reads as few as possible.
        keys = self.by_head(self.keys[layer])
        values = self.by_head(self.values[layer])
        return keys[:, :, : self.attended_len], values[:, :, : self.attended_len]
