"""Attention: which keys a query may attend to, how a window is computed, and the cache of keys and values.

A query attends to the keys of its own and of earlier tokens: softmax(q k^T scale) v (source: Vaswani et al. 2017). With
a window of w it attends to itself and the w - 1 tokens before it; 0 means no window. Everywhere in this project a mask
is True where the query may attend to the key. Which operator runs on which device is decided in kernels/.

Legend: B batch, T query tokens, S cached tokens, H query heads, K key/value heads, D head dim, w window.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

# Which keys a query may attend to (1) in a row of 6 tokens, query by query from top to bottom:
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


class Segments:
    """The document of each token. Packed training rows hold several documents, which must not attend to each other.

    The masks are built on first use and shared by all layers of a forward pass.
    """

    def __init__(self, numbers: Tensor, prepare_mask: Callable[[Tensor], Tensor]):
        self.numbers = numbers  # (B, T), equal for tokens of one document
        self.prepare_mask = prepare_mask  # the kernels', once per mask instead of once per layer
        self._distance: Tensor | None = None
        self._document: Tensor | None = None
        self._prepared: dict[int, Tensor] = {}

    def mask(self, window: int) -> Tensor:
        """(B, 1, T, T): same document, not later, within the window; in the form that the kernels take."""
        # Once per forward pass, for all windows. Every mask costs several launches, and it is the same in each layer.
        if self._distance is None or self._document is None:
            index = torch.arange(self.numbers.size(1), device=self.numbers.device)
            self._distance = index[:, None] - index  # (T, T): how far a key lies before its query
            # Numbers 0 0 1 compared with themselves as a column and as a row: a block of True for each document.
            same_document = self.numbers[:, :, None] == self.numbers[:, None]  # (B, T, T)
            self._document = same_document & (self._distance >= 0)
        # Once per window, for all layers that have it.
        if window not in self._prepared:
            mask = self._document
            if window:
                mask = mask & (self._distance < window)
            self._prepared[window] = self.prepare_mask(mask[:, None])
        return self._prepared[window]


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, is_causal: bool = False, mask: Tensor | None = None
) -> Tensor:
    """torch's fused attention on (B, T, heads, D)."""
    # torch takes (B, heads, T, D). The fused operator works in tiles and never holds the T x T scores
    # (source: Dao et al. 2022, FlashAttention). A transposed view costs nothing: no value is copied.
    q = q.transpose(1, 2)
    k = k.transpose(1, 2)
    v = v.transpose(1, 2)
    # Several query heads may share a key head (source: Ainslie et al. 2023, GQA). torch derives the groups from the
    # head counts: with 6 query heads and 2 key heads, queries 0 to 2 read key head 0, and 3 to 5 key head 1.
    grouped = q.size(1) != k.size(1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


def windowed_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int, segments: Segments | None = None
) -> Tensor:
    """Attention within a window of w < T tokens, with an operator that knows masks but no windows.

    Work and masks grow with T x 2w instead of T x T. Source: Beltagy et al. 2020, Longformer.
    """
    B, T, _, _ = q.shape
    w = window

    # The row is cut into blocks of w queries. A query's window reaches back w - 1 tokens, so a block needs the keys of
    # itself and of the block before it: 2w keys. With w = 3 and T = 8:
    #
    #     block 0   queries 0 1 2   keys       0 1 2
    #     block 1   queries 3 4 5   keys 0 1 2 3 4 5
    #     block 2   queries 6 7 -   keys 3 4 5 6 7 -       (- is padding)

    # The first block has no block before it: plain causal attention within the block. Its window ends nowhere inside
    # the block, so the window adds nothing to the causal mask.
    first_mask = None
    if segments is not None:
        same_document = segments.numbers[:, :w, None] == segments.numbers[:, None, :w]
        first_mask = same_document.tril()[:, None]  # (B, 1, w, w)
    first = fused_attention(
        q[:, :w], k[:, :w], v[:, :w], scale=scale, is_causal=first_mask is None, mask=first_mask
    )  # (B, w, H, D)

    # Pad the row to whole blocks. The padding follows every token, so no token attends to it.
    blocks = (T - 1) // w  # without the first
    padding = (blocks + 1) * w - T
    q = F.pad(q, (0, 0, 0, 0, 0, padding))  # (B, w + blocks x w, H, D)
    k = F.pad(k, (0, 0, 0, 0, 0, padding))
    v = F.pad(v, (0, 0, 0, 0, 0, padding))

    # Query i of a block is key w + i of its 2w keys. It attends to the keys at a distance of 0 to w - 1. The mask is
    # the same for every block; for w = 3 it is 0 1 1 1 0 0, 0 0 1 1 1 0, 0 0 0 1 1 1.
    index = torch.arange(2 * w, device=q.device)
    distance = index[w:, None] - index  # (w, 2w)
    mask = (distance >= 0) & (distance < w)
    # Documents end at different places in different blocks: with them every block has a mask of its own.
    if segments is not None:
        numbers = F.pad(segments.numbers, (0, padding), value=-1)
        numbers = numbers.unfold(1, 2 * w, w)  # (B, blocks, 2w): the documents of each block's keys
        same_document = numbers[:, :, w:, None] == numbers[:, :, None]  # (B, blocks, w, 2w)
        mask = (same_document & mask).flatten(0, 1)[:, None]  # (B x blocks, 1, w, 2w)

    # The blocks become rows of a batch, and one call computes them all. No block reads another's result.
    q = q[:, w:].reshape(B * blocks, w, *q.shape[2:])
    k = _with_block_before(k, blocks, w)
    v = _with_block_before(v, blocks, w)
    rest = fused_attention(q, k, v, scale=scale, mask=mask)  # (B x blocks, w, H, D)
    rest = rest.reshape(B, blocks * w, *q.shape[2:])
    return torch.cat((first, rest), dim=1)[:, :T]


def _with_block_before(x: Tensor, blocks: int, w: int) -> Tensor:
    """(B, w + blocks x w, K, D) -> (B x blocks, 2w, K, D): each block but the first, after the one before it."""
    # Blocks 0 1 2 3: `before` is 0 1 2 and `own` is 1 2 3, joined to the pairs 01, 12 and 23.
    before = x[:, :-w].unflatten(1, (blocks, w))
    own = x[:, w:].unflatten(1, (blocks, w))
    return torch.cat((before, own), dim=2).flatten(0, 1)


# Without a cache every new token costs a pass over the whole sequence. The keys and values of earlier tokens never
# change, because no token attends to a later one: they are stored once and read at every token after.
#
# One layer of a cache for three rows, capacity 8. A letter is a token whose key and value are there:
#
#              0  1  2  3  4  5  6  7    position
#     row 0    a  b  c  d  .  .  .  .       4        its next token goes to place 4
#     row 1    e  f  .  .  .  .  .  .       2
#     row 2    g  h  i  j  k  .  .  .       5
#              '--attended_len--'
#
# Rows are of different lengths, so each has a position of its own. A step with one new token per row needs 6 places.
# It reads 6 and not 8 of them, and its mask hides the places after each row's own end.


@dataclass
class KVCache:
    """Keys and values of every layer for up to `capacity` tokens per row, so that a new token computes only its own.

    Layers only write and read. The engine advances `position` once per forward pass, after the last layer.
    """

    # One block of fixed shape (layers, B, K, S, D): nothing is allocated while decoding, and its launches can be
    # recorded once and replayed.
    keys: Tensor
    values: Tensor
    # (B,): how many tokens each row holds. On the device, so that a decoded token waits for nothing from the host.
    position: Tensor
    # (B, 1): 0, 1, 2, ...; the index for writing.
    rows: Tensor
    # Keys from here on are not read. The engine keeps it low while all rows are short.
    attended_len: int
    # Later positions are clamped to it: a padded piece of a prompt writes its padding there, not outside the cache.
    max_position: int | None = None

    @classmethod
    def empty(
        cls, layers: int, batch: int, capacity: int, kv_heads: int, head_dim: int,
        device: torch.device | str, dtype: torch.dtype,
    ) -> "KVCache":  # fmt: skip
        # Heads before tokens: the keys of one head are neighbours in memory, as attention reads them.
        shape = (layers, batch, kv_heads, capacity, head_dim)
        return cls(
            keys=torch.zeros(shape, device=device, dtype=dtype),
            values=torch.zeros(shape, device=device, dtype=dtype),
            position=torch.zeros(batch, device=device, dtype=torch.long),
            rows=torch.arange(batch, device=device)[:, None],
            attended_len=capacity,
        )

    @property
    def capacity(self) -> int:
        return self.keys.size(3)

    def view(self, first: int, end: int) -> "KVCache":
        """The rows from `first` to before `end`, in this cache's memory."""
        # Slices share the memory: what is written through the view is in the cache. `attended_len` is a number, not a
        # tensor, so that each view has its own.
        return replace(
            self,
            keys=self.keys[:, first:end],
            values=self.values[:, first:end],
            position=self.position[first:end],
            rows=self.rows[: end - first],
        )

    def copy_rows(self, sources: Tensor, targets: Tensor, tokens: int) -> None:
        """Copy the first `tokens` keys and values of some rows into others, (B,) of indices; both may overlap."""
        # The right side is gathered into new memory first, so a row may be both source and target.
        self.keys[:, targets, :, :tokens] = self.keys[:, sources, :, :tokens]
        self.values[:, targets, :, :tokens] = self.values[:, sources, :, :tokens]

    def positions(self, tokens: int) -> Tensor:
        """(B, T): the positions of the next `tokens` tokens of each row."""
        positions = self.position[:, None]  # (B, 1)
        if tokens > 1:  # a decoded token saves two launches
            positions = positions + torch.arange(tokens, device=self.position.device)
        if self.max_position is not None:
            positions = positions.clamp(max=self.max_position)
        return positions

    def masks(self, positions: Tensor, windows: list[int]) -> dict[int, Tensor]:
        """For each window in use a mask (B, 1, T, attended_len)."""
        # How far each key lies before its query. Beyond a row's end it is negative, which hides what is not written.
        distance = positions[:, None, :, None] - torch.arange(self.attended_len, device=positions.device)
        causal = distance >= 0
        # Layers of the same window share one mask.
        masks = {}
        for window in set(windows):
            mask = causal
            if window:
                mask = causal & (distance < window)
            masks[window] = mask
        return masks

    def write(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Store k and v (B, T, K, D) at `positions` (B, T)."""
        # `rows` (B, 1) and `positions` (B, T) together name one place of the cache for each token. torch runs it as an
        # index_put_. That takes 0.04 ms where scatter_, which copies the whole cache, takes 1.3 (docs/measurements.md).
        self.keys[layer][self.rows, :, positions] = k.to(self.keys.dtype)
        self.values[layer][self.rows, :, positions] = v.to(self.values.dtype)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """The first `attended_len` keys and values of a layer, (B, K, attended_len, D) each."""
        # A slice, not a copy. The cost of a token grows with the keys it reads, so it reads as few as it can.
        return self.keys[layer, :, :, : self.attended_len], self.values[layer, :, :, : self.attended_len]
