"""Causal and windowed attention, and the cache of keys and values beside it.

Legend: B batch, T query tokens, S cached tokens, H query heads, K key/value heads, D head dim.
A window of w lets a token see itself and the w - 1 tokens before it; 0 means all of them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat import device as devices

PLAIN_TOKENS = 1024  # a CPU attends by plain products up to this length, which the caches still hold
PLAIN_BLOCK = 256  # queries at once


class Segments:
    """Which document of its row each token belongs to; the masks that follow are worked out once for all layers."""

    def __init__(self, numbers: Tensor):
        self.numbers = numbers  # (B, T)
        self._hidden: dict[int, Tensor] = {}

    def hidden(self, window: int) -> Tensor:
        """(B, 1, T, T), True where a query does not see a key: of another document, behind it, out of its window."""
        if window not in self._hidden:
            index = torch.arange(self.numbers.size(1), device=self.numbers.device)
            distance = index[:, None] - index
            unseen = (distance < 0) | (distance >= window) if window else distance < 0
            self._hidden[window] = (unseen | (self.numbers[:, :, None] != self.numbers[:, None]))[:, None]
        return self._hidden[window]


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int = 0, segments: Segments | None = None
) -> Tensor:
    """Attend over whole rows that start at position 0.

    q is (B, T, H, D), k and v are (B, T, K, D) with H a multiple of K; returns (B, T, H, D). With `segments` the
    documents of a row do not see one another; without it they do.
    Device and length choose the kernel: the device's own fused one (device.kernels); torch's fused one, which no
    window restricts, or that on blocks of a window; or, on a CPU, plain products on blocks, 2.7 times as fast there
    (docs/measurements.md).
    """
    T = q.size(1)
    fused = devices.kernels(q.device.type)
    if fused is not None:
        hidden = None if segments is None else segments.hidden(window)
        return fused.attention(q, k, v, scale=scale, window=window, hidden=hidden)
    numbers = None if segments is None else segments.numbers
    if q.device.type == "cpu" and T <= PLAIN_TOKENS:
        return plain_attention(q, k, v, scale=scale, window=window, segments=numbers)
    if 0 < window < T:
        return windowed_attention(q, k, v, scale=scale, window=window, segments=numbers)
    if segments is None:
        return _sdpa(q, k, v, scale=scale, is_causal=True)
    return _sdpa(q, k, v, scale=scale, mask=~segments.hidden(0))


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int = 0, segments: Tensor | None = None
) -> Tensor:
    """Matrix products and a softmax, a block of queries at a time against the keys that it may see."""
    T, groups = q.size(1), q.size(2) // k.size(2)
    q = q.transpose(1, 2)  # (B, H, T, D)
    k, v = (x.transpose(1, 2).repeat_interleave(groups, dim=1) if groups > 1 else x.transpose(1, 2) for x in (k, v))
    blocks = []
    for start in range(0, T, PLAIN_BLOCK):
        end = min(start + PLAIN_BLOCK, T)
        first = max(0, start - window + 1) if window else 0
        index = torch.arange(first, end, device=q.device)
        distance = index[start - first :, None] - index  # how far behind its query a key lies
        hidden = (distance < 0) | (distance >= window) if window else distance < 0  # (queries, keys)
        if segments is not None:
            apart = segments[:, start:end, None] != segments[:, None, first:end]  # (B, queries, keys)
            hidden = hidden | apart[:, None]
        scores = (q[:, :, start:end] @ k[:, :, first:end].mT).float() * scale
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1).to(v.dtype)
        blocks.append(weights @ v[:, :, first:end])
    return torch.cat(blocks, dim=2).transpose(1, 2)


def windowed_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int, segments: Tensor | None = None
) -> Tensor:
    """The fused kernel on blocks of w queries that see 2w keys, so that neither time nor mask grows with T x T
    (source: the blocked form of Beltagy et al. 2020, Longformer). The window is shorter than the rows."""
    B, T, w = q.size(0), q.size(1), window
    blocks = (T - 1) // w  # of queries behind the first one
    end = (blocks + 1) * w
    index = torch.arange(2 * w, device=q.device)
    distance = index[w:, None] - index[None, :]  # (w, 2w): how far behind its query a key lies
    visible = (distance >= 0) & (distance < w)
    if segments is None:
        first = _sdpa(q[:, :w], k[:, :w], v[:, :w], scale=scale, is_causal=True)
    else:
        segments = F.pad(segments, (0, end - T), value=-1)
        apart = segments.unfold(1, 2 * w, w)  # (B, blocks, 2w): each block's and the one's before it
        together = apart[:, :, w:, None] == apart[:, :, None]  # (B, blocks, w, 2w)
        together_first = segments[:, :w, None] == segments[:, None, :w]
        causal = index[:w, None] >= index[:w]
        first = _sdpa(q[:, :w], k[:, :w], v[:, :w], scale=scale, mask=(together_first & causal)[:, None])
        visible = (together & visible).flatten(0, 1)[:, None]  # (B x blocks, 1, w, 2w)
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, end - T)) for x in (q, k, v))  # (B, end, heads, D)
    q = q[:, w:].reshape(B * blocks, w, *q.shape[2:])
    k, v = (torch.cat((x[:, :-w].unflatten(1, (blocks, w)), x[:, w:].unflatten(1, (blocks, w))), dim=2) for x in (k, v))
    rest = _sdpa(q, k.flatten(0, 1), v.flatten(0, 1), scale=scale, mask=visible)
    return torch.cat((first, rest.reshape(B, blocks * w, *q.shape[2:])), dim=1)[:, :T]


class KVCache:
    """Keys and values of every layer, in one block of fixed size, with each row's length.

    The layers only write and read; the engine moves `position` on, once for a whole forward pass.
    `position` (B,) counts the tokens each row holds and lives on the device, so that a decoded
    token needs nothing from the host.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ):
        shape = (layers, batch, kv_heads, capacity, head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)  # (layers, B, K, S, D)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.position = torch.zeros(batch, device=device, dtype=torch.long)
        self.rows = torch.arange(batch, device=device)[:, None]  # (B, 1)
        self.capacity = capacity
        self.attended_len = capacity  # keys beyond this are not read; the engine lowers it while rows are short
        self.is_empty = True  # nothing written yet: a prefill may attend among its own tokens alone
        self.max_position: int | None = None  # positions are clamped to it: what lies after it is padding

    def select(self, rows: Tensor) -> "KVCache":
        """A cache that begins as these rows of this one, (B,) of indices; a row may come several times."""
        other = KVCache.__new__(KVCache)
        other.keys, other.values = self.keys[:, rows], self.values[:, rows]
        other.position = self.position[rows]
        other.rows = torch.arange(len(rows), device=rows.device)[:, None]
        other.capacity, other.attended_len, other.is_empty = self.capacity, self.attended_len, self.is_empty
        other.max_position = self.max_position
        return other

    def view(self, first: int, end: int) -> "KVCache":
        """The rows from `first` to before `end`, in this cache's own memory."""
        other = KVCache.__new__(KVCache)
        other.keys, other.values = self.keys[:, first:end], self.values[:, first:end]
        other.position, other.rows = self.position[first:end], self.rows[: end - first]
        other.capacity, other.attended_len, other.is_empty = self.capacity, self.attended_len, self.is_empty
        other.max_position = self.max_position
        return other

    def copy_row(self, source: int, target: int, tokens: int) -> None:
        """Give row `target` the first `tokens` tokens of row `source`, and their number."""
        self.keys[:, target, :, :tokens] = self.keys[:, source, :, :tokens]
        self.values[:, target, :, :tokens] = self.values[:, source, :, :tokens]
        self.position[target].fill_(tokens)

    def positions(self, tokens: int) -> Tensor:
        """(B, T): where the next `tokens` tokens of each row stand."""
        positions = self.position[:, None] + torch.arange(tokens, device=self.position.device)
        return positions if self.max_position is None else positions.clamp_(max=self.max_position)

    def masks(self, positions: Tensor, windows: list[int]) -> dict[int, Tensor]:
        """For each window in use a bool mask (B, 1, T, attended_len): True where a query sees a key, or, for a device
        with kernels of its own, where it does not."""
        if self.max_position is not None:  # an idle row may stand behind attended_len; seeing nothing, it would be NaN
            positions = positions.clamp(max=self.attended_len - 1)
        distance = positions[:, None, :, None] - torch.arange(self.attended_len, device=positions.device)
        causal = distance >= 0
        seen = {w: causal & (distance < w) if w else causal for w in set(windows)}
        return seen if devices.kernels(positions.device.type) is None else {w: ~mask for w, mask in seen.items()}

    def write(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Put k and v (B, T, K, D) at `positions` (B, T)."""
        self.keys[layer][self.rows, :, positions] = k.to(self.keys.dtype)
        self.values[layer][self.rows, :, positions] = v.to(self.values.dtype)

    def attend(self, layer: int, q: Tensor, *, scale: float, mask: Tensor) -> Tensor:
        """q (B, T, H, D) against the first attended_len keys of this layer's cache; returns (B, T, H, D).

        In bf16 a CPU attends by plain products: torch's fused kernel takes 3 times as long there for 16 rows of one
        query (docs/measurements.md)."""
        k, v = self.keys[layer, :, :, : self.attended_len], self.values[layer, :, :, : self.attended_len]
        q = q.transpose(1, 2).to(k.dtype)  # (B, H, T, D)
        fused = devices.kernels(q.device.type)
        if fused is not None:
            out = fused.cached_attention(q, k, v, scale=scale, hidden=mask)
        elif q.device.type == "cpu" and k.dtype != torch.float32:
            B, H, T, D = q.shape
            grouped = q.reshape(B, k.size(1), -1, D)  # (B, K, groups x T, D): a group's queries share their keys
            k, v = k.contiguous(), v.contiguous()  # or the products copy them value by value: 5 times as long
            scores = (grouped @ k.mT).view(B, H, T, -1).float() * scale
            weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1).to(v.dtype)
            out = (weights.view(B, k.size(1), -1, weights.size(-1)) @ v).view(B, H, T, D)
        else:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.size(1) != k.size(1)
            )
        return out.transpose(1, 2)  # (B, T, H, D)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, is_causal: bool = False, mask: Tensor | None = None
) -> Tensor:
    """torch's fused attention on (B, T, heads, D) tensors; it raises rather than fall back by itself."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    gqa = q.size(1) != k.size(1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=gqa)
    return out.transpose(1, 2)
