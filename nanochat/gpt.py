"""The one model: a decoder-only transformer, written by hand, every architectural choice a plain field.

Tokens flow in, and out come logits, or the summed cross-entropy when targets are given. The defaults
are the fast from-scratch preset: rotary positions, QK norm, weightless RMSNorm, squared ReLU, value
embeddings, per-layer residual scales, soft-capped logits. `scaling.py` turns a depth into a config.

Legend: B batch, T time, C width, H query heads, K key/value heads, D head dim, V vocab.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from nanochat import device as devices
from nanochat.attention import KVCache, Segments, causal_attention
from nanochat.cross_entropy import linear_cross_entropy, soft_cap, token_losses
from nanochat.parallel.fsdp import fill

GATE_INPUTS = 32  # the first channels of the residual stream drive the value gates


@dataclass(frozen=True)
class GPTConfig:
    """What the model is; stored as JSON in every checkpoint."""

    vocab_size: int = 32768
    sequence_len: int = 2048  # rotary tables reach this far; also the training length
    n_layer: int = 12
    width: int = 768
    n_head: int = 6
    n_kv_head: int = 6
    head_dim: int = 0  # 0: width / n_head
    mlp: Literal["relu2", "swiglu"] = "relu2"
    mlp_width: int = 0  # 0: 4 x width
    window_pattern: str = "L"  # a letter a layer, repeated: S sees sequence_len / 4 tokens, L all; the last layer is L
    rope_theta: float = 100_000.0
    qk_norm: Literal["none", "before_rotary", "after_rotary"] = "after_rotary"
    qk_scale: float = 1.2  # fixed gain on q and on k behind their norm
    norm_weight: bool = False  # learned gains in the norms
    norm_eps: float = 1e-6
    attention_bias: bool = False  # on q, k, v
    tied_head: bool = False
    embedding_norm: bool = True
    value_embeddings: bool = True  # on every other layer, the last included
    residual_scales: bool = True  # learned per-layer scale of the residual, and of the embedding mixed in again
    logit_cap: float = 15.0

    def __post_init__(self):
        if self.head_dim == 0:
            if self.width % self.n_head:
                raise ValueError(f"width {self.width} is not a multiple of n_head {self.n_head}")
            object.__setattr__(self, "head_dim", self.width // self.n_head)
        if self.mlp_width == 0:
            object.__setattr__(self, "mlp_width", 4 * self.width)
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head {self.n_head} is not a multiple of n_kv_head {self.n_kv_head}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary positions turn pairs of channels")
        if not self.window_pattern or set(self.window_pattern) - set("SL"):
            raise ValueError(f"--window_pattern {self.window_pattern!r}: letters S (short) and L (long), e.g. SSSL")

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and the head: a multiple of 64, which matrix units like."""
        return -(-self.vocab_size // 64) * 64

    def window(self, layer: int) -> int:
        """Tokens that layer sees behind and with each token; 0 for all."""
        short = self.window_pattern[layer % len(self.window_pattern)] == "S" and layer < self.n_layer - 1
        return max(self.sequence_len // 4, 1) if short else 0

    def has_value_embedding(self, layer: int) -> bool:
        return self.value_embeddings and layer % 2 == (self.n_layer - 1) % 2


class Norm(nn.Module):
    """RMSNorm with or without a learned gain (source: Zhang and Sennrich 2019)."""

    def __init__(self, size: int, config: GPTConfig):
        super().__init__()
        self.shape, self.eps = (size,), config.norm_eps
        self.weight = nn.Parameter(torch.ones(size)) if config.norm_weight else None

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight.to(x.dtype)
        fused = devices.kernels(x.device.type)
        if fused is not None:
            return fused.rms_norm(x, weight, self.eps)
        return F.rms_norm(x, self.shape, weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.config, self.layer, self.window = config, layer, config.window(layer)
        H, K, D = config.n_head, config.n_kv_head, config.head_dim
        self.qkv = nn.Linear(config.width, (H + 2 * K) * D, bias=config.attention_bias)
        self.output = nn.Linear(H * D, config.width, bias=False)
        self.q_norm, self.k_norm = (Norm(D, config), Norm(D, config)) if config.qk_norm != "none" else (None, None)
        self.value_gate = (
            nn.Linear(min(GATE_INPUTS, config.width), K, bias=False) if config.has_value_embedding(layer) else None
        )
        gain = config.qk_scale**2 if config.qk_norm != "none" else 1.0
        self.scale = gain / math.sqrt(D)  # the gains on q and k, folded into the scale of their products

    def forward(
        self,
        x: Tensor,
        value: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        cached: "Cached | None",
        segments: Segments | None,
    ) -> Tensor:
        c = self.config
        B, T, _ = x.shape
        qkv = self.qkv(x).view(B, T, c.n_head + 2 * c.n_kv_head, c.head_dim)  # (B, T, H + 2K, D)
        qk, v = qkv.split(
            (c.n_head + c.n_kv_head, c.n_kv_head), dim=2
        )  # queries and keys go together: half the launches
        qk = self._norm(rotate(qk, *rotary)) if c.qk_norm == "after_rotary" else rotate(self._norm(qk), *rotary)
        q, k = qk.split((c.n_head, c.n_kv_head), dim=2)
        if value is not None and self.value_gate is not None:
            gate = 3 * torch.sigmoid(self.value_gate(x[..., : self.value_gate.in_features]))  # (B, T, K)
            v = v + gate.unsqueeze(-1) * value.view(B, T, c.n_kv_head, c.head_dim)
        if cached is None:
            y = causal_attention(q, k, v, scale=self.scale, window=self.window, segments=segments)
        else:
            y = cached.attention(self.layer, q, k, v, scale=self.scale, window=self.window)
        return self.output(y.reshape(B, T, -1))  # (B, T, C)

    def _norm(self, qk: Tensor) -> Tensor:
        """The QK norm, or nothing; one call where neither has a gain."""
        if self.q_norm is None or self.k_norm is None:
            return qk
        if self.q_norm.weight is None:
            return self.q_norm(qk)
        q, k = qk.split((self.config.n_head, self.config.n_kv_head), dim=2)
        return torch.cat((self.q_norm(q), self.k_norm(k)), dim=2)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.gated = config.mlp == "swiglu"
        self.input = nn.Linear(config.width, config.mlp_width * (2 if self.gated else 1), bias=False)
        self.output = nn.Linear(config.mlp_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.input(x)
        if self.gated:
            gate, up = x.chunk(2, dim=-1)
            x = F.silu(gate) * up  # source: Shazeer 2020, GLU variants
        else:
            x = F.relu(x).square()  # source: So et al. 2021, Primer
        return self.output(x)


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.attention_norm, self.attention = Norm(config.width, config), Attention(config, layer)
        self.mlp_norm, self.mlp = Norm(config.width, config), MLP(config)

    def forward(
        self,
        x: Tensor,
        value: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        cached: "Cached | None",
        segments: Segments | None,
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), value, rotary, cached, segments)
        return x + self.mlp(self.mlp_norm(x))


class ValueEmbedding(nn.Embedding):
    """Hands the residual x through: once x has its gradient, the table has its own, and a sharded one lets go of it."""

    def forward(self, tokens: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(tokens), x


class Head(nn.Linear):
    """The output head; what reads its weight (V, C) runs inside its forward, where a sharded one is whole."""

    def forward(self, hidden: Tensor, read: Callable[..., Tensor], vocab: int, *inputs: Any) -> Tensor:
        return read(hidden, self.weight[:vocab], *inputs)


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        V, C = config.padded_vocab_size, config.width
        self.embedding = nn.Embedding(V, C)
        self.embedding_norm = Norm(C, config) if config.embedding_norm else None
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = Norm(C, config)
        self.head = None if config.tied_head else Head(C, V, bias=False)
        self.packed_head: nn.Module | None = None  # in its place where the model is packed, see packed.py
        kv_width = config.n_kv_head * config.head_dim
        self.value_embeddings = nn.ModuleDict(
            {str(i): ValueEmbedding(V, kv_width) for i in range(config.n_layer) if config.has_value_embedding(i)}
        )
        if config.residual_scales:
            self.residual_scales = nn.Parameter(torch.ones(config.n_layer))
            self.embedding_scales = nn.Parameter(torch.zeros(config.n_layer))
        self.rotary_cos: Tensor
        self.rotary_sin: Tensor
        self.register_buffer("rotary_cos", torch.empty(config.sequence_len, config.head_dim), persistent=False)
        self.register_buffer("rotary_sin", torch.empty(config.sequence_len, config.head_dim), persistent=False)
        self.fill_rotary()

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @torch.no_grad()
    def fill_rotary(self) -> None:
        """Compute the rotary tables; needed once the module has left the meta device.

        Source: Su et al. 2021, RoFormer, in the split-half layout."""
        pairs = torch.arange(0, self.config.head_dim, 2, dtype=torch.float32)
        angles = torch.outer(
            torch.arange(self.config.sequence_len, dtype=torch.float32),
            self.config.rope_theta ** (-pairs / self.config.head_dim),
        )
        angles = torch.cat((angles, angles), dim=1)  # (T, D)
        if not self.rotary_cos.is_meta:
            self.rotary_cos.copy_(angles.cos())
            self.rotary_sin.copy_(angles.sin())

    @torch.no_grad()
    def init_weights(self, seed: int = 0) -> None:
        """Draw the initial weights, the same on every device: the host draws, the device receives."""
        generator = torch.Generator().manual_seed(seed)

        def normal(parameter: Tensor, std: float) -> None:
            fill(parameter, torch.randn(parameter.shape, generator=generator) * std)

        def uniform(parameter: Tensor, std: float) -> None:
            bound = std * math.sqrt(3)
            fill(parameter, (torch.rand(parameter.shape, generator=generator) * 2 - 1) * bound)

        std = 1 / math.sqrt(self.config.width)
        normal(self.embedding.weight, 0.8)
        if self.head is not None:
            normal(self.head.weight, 0.001)
        for embedding in self.value_embeddings.values():
            uniform(embedding.weight, std)  # type: ignore[arg-type]
        for block in self.blocks:
            assert isinstance(block, Block)
            uniform(block.attention.qkv.weight, std)
            if block.attention.qkv.bias is not None:
                block.attention.qkv.bias.zero_()
            if block.attention.value_gate is not None:
                block.attention.value_gate.weight.zero_()
            block.attention.output.weight.zero_()  # every block starts as the identity
            uniform(block.mlp.input.weight, 0.4 * std)
            block.mlp.output.weight.zero_()
        for module in self.modules():
            if isinstance(module, Norm) and module.weight is not None:
                module.weight.fill_(1.0)
        if self.config.residual_scales:
            last = max(self.config.n_layer - 1, 1)
            depth = torch.arange(self.config.n_layer) / last  # 0 at the first layer, 1 at the last
            fill(self.residual_scales, 1.15 - 0.10 * depth)
            fill(self.embedding_scales, 0.20 - 0.15 * depth)
        self.fill_rotary()

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        cache: KVCache | None = None,
        segments: Tensor | None = None,
    ) -> Tensor:
        """tokens (B, T) -> logits (B, T, V) in fp32; with targets (B, T) the summed cross-entropy in nats, a scalar.

        `segments` (B, T) numbers the documents of a row, which then do not see one another.
        """
        x = self.hidden(tokens, cache, segments)
        if targets is None:
            return self.logits(x)
        return self._read_head(linear_cross_entropy, x.flatten(0, 1), targets.flatten(), self.config.logit_cap)

    def losses(self, tokens: Tensor, targets: Tensor, segments: Tensor | None = None) -> Tensor:
        """Per-token cross-entropy in nats, (B, T), 0 where the target is IGNORE."""
        x = self.hidden(tokens, None, segments).flatten(0, 1)
        return self._read_head(token_losses, x, targets.flatten(), self.config.logit_cap).view_as(targets)

    def hidden(self, tokens: Tensor, cache: KVCache | None = None, segments: Tensor | None = None) -> Tensor:
        """tokens (B, T) -> the normed last residual (B, T, C). With a cache the tokens continue its rows."""
        T = tokens.size(1)
        if cache is None:
            assert self.config.sequence_len >= T, f"{T} tokens in a row of at most {self.config.sequence_len}"
            cached, cos, sin = None, self.rotary_cos[:T], self.rotary_sin[:T]  # (T, D)
        else:
            cached = Cached(cache, T, [self.config.window(i) for i in range(self.config.n_layer)])
            cos, sin = self.rotary_cos[cached.positions], self.rotary_sin[cached.positions]  # (B, T, D)
        x = self.embedding(tokens)  # (B, T, C)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        rotary = (cos.to(x.dtype).unsqueeze(-2), sin.to(x.dtype).unsqueeze(-2))  # (..., T, 1, D)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        first = x
        documents = None if segments is None else Segments(segments)
        scales: Sequence[tuple[Tensor, Tensor]] = ()  # cast and split at once: a launch each a layer otherwise
        if self.config.residual_scales:
            residual, embedded = self.residual_scales.to(x.dtype), self.embedding_scales.to(x.dtype)
            scales = list(zip(residual.unbind(), embedded.unbind(), strict=True))
        for i, block in enumerate(self.blocks):
            if scales:
                x = scales[i][0] * x + scales[i][1] * first
            value = None
            if str(i) in self.value_embeddings:
                value, x = self.value_embeddings[str(i)](tokens, x)
                value = value.to(x.dtype)
            x = block(x, value, rotary, cached, documents)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., C) -> soft-capped logits (..., V) in fp32."""
        packed = self.packed_head
        logits = self._read_head(_product, hidden) if packed is None else packed(hidden)
        return soft_cap(logits.float(), self.config.logit_cap)

    def _read_head(self, read: Callable[..., Tensor], hidden: Tensor, *inputs: Any) -> Tensor:
        """read(hidden, weight (V, C), *inputs)."""
        if self.head is None:
            return read(hidden, self.head_weight(), *inputs)
        return self.head(hidden, read, self.config.vocab_size, *inputs)

    def head_weight(self) -> Tensor:
        weight = self.embedding.weight if self.head is None else self.head.weight
        return weight[: self.config.vocab_size]  # without the padding

    def new_cache(self, batch: int, capacity: int, dtype: torch.dtype) -> KVCache:
        """An empty cache for `batch` rows of up to `capacity` tokens."""
        c = self.config
        return KVCache(c.n_layer, batch, capacity, c.n_kv_head, c.head_dim, self.device, dtype)

    def parameter_groups(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """Every parameter once, by the role that decides how it is optimised."""
        groups: dict[str, list[tuple[str, nn.Parameter]]] = {
            name: [] for name in ("matrix", "qkv", "embedding", "value_embedding", "head", "vector", "residual_scale")
        }
        for name, parameter in self.named_parameters():
            if name == "residual_scales":
                role = "residual_scale"
            elif name.startswith("embedding.") or name.startswith("value_embeddings."):
                role = "embedding" if name.startswith("embedding.") else "value_embedding"
            elif name.startswith("head."):
                role = "head"
            elif parameter.ndim < 2 or "value_gate" in name:
                role = "vector"
            else:
                role = "qkv" if ".qkv." in name else "matrix"
            groups[role].append((name, parameter))
        return groups

    def gradient_order(self) -> list[str]:
        """Every parameter's name, those first whose gradients a backward completes first."""
        order = ["head", "norm"]
        for layer in reversed(range(self.config.n_layer)):
            order += [f"blocks.{layer}", f"value_embeddings.{layer}"]
        order += ["residual_scales", "embedding_scales", "embedding"]
        names = [name for name, _ in self.named_parameters()]
        return [n for part in order for n in reversed(names) if n == part or n.startswith(f"{part}.")]


class Cached:
    """One forward pass against a cache: positions and masks are worked out once for all layers."""

    def __init__(self, cache: KVCache, tokens: int, windows: list[int]):
        self.cache = cache
        self.positions = cache.positions(tokens)  # (B, T)
        self.alone = cache.is_empty and tokens > 1  # an empty cache: the prompt need not be read back from it
        self.masks = {} if self.alone else cache.masks(self.positions, windows)

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int) -> Tensor:
        self.cache.write(layer, k, v, self.positions)
        if self.alone:
            return causal_attention(q, k, v, scale=scale, window=window)
        return self.cache.attend(layer, q, scale=scale, mask=self.masks[window])


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + D/2]) of x (B, T, heads, D) by its position's angle."""
    fused = devices.kernels(x.device.type)
    if fused is not None:
        return fused.rotate(x, cos, sin)
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin
