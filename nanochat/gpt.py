"""The model: a decoder-only transformer, written by hand. Every architectural choice is a field of GPTConfig.

Tokens go in; logits come out, or with targets the summed cross-entropy. The defaults are the fast from-scratch preset
(source: nanochat and modded-nanogpt, unless a line names another), except `lookback_heads`. Qwen and Llama shapes are
other values of the same fields. `scaling.py` turns a depth into a config.

How a token becomes a loss, in `hidden` and `forward`: embedding -> blocks (attention, MLP, each added to the residual
stream) -> norm -> head -> cross-entropy.

Legend: B batch, T time, C width, H query heads, K key/value heads, D head dim, V vocab.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nanochat import device as devices
from nanochat.attention import KVCache, Segments
from nanochat.cross_entropy import linear_cross_entropy, soft_cap
from nanochat.ground.sharding import fill, is_dtensor
from nanochat.operators import TorchKernels
from nanochat.rotary import RopeScaling, rotary_tables

SCALAR_HEAD = "scalar_head.weight"  # the name of the scalar head's one parameter
GATE_INPUTS = 32  # channels of the residual stream that a value gate reads; a few are enough for a scalar per head


@dataclass(frozen=True)
class GPTConfig:
    """The model's shape; stored as JSON in every checkpoint."""

    vocab_size: int = 32768
    # Training length and context: the rotary tables end here.
    sequence_len: int = 2048
    n_layer: int = 12
    width: int = 768
    # Heads of 128 channels each. Heads of 64 were no faster: 487 for 463 ms a step (depth 4, AMD EPYC, 2026-11-20).
    n_head: int = 6
    # Query heads share key/value heads in groups of n_head / n_kv_head, which shrinks the cache by that factor
    # (source: Ainslie et al. 2023, GQA). The preset does not group.
    n_kv_head: int = 6
    head_dim: int = 0  # 0: width / n_head
    # relu2: relu(x)^2, as good as a gated MLP at this scale and cheaper (source: So et al. 2021, Primer).
    # swiglu: silu(gate) * up (source: Shazeer 2020, GLU variants); Llama and Qwen use it.
    mlp: Literal["relu2", "swiglu"] = "relu2"
    mlp_width: int = 0  # 0: 4 x width
    experts: int = 0  # MLPs in each block, of which a router chooses some for each token (experts/); 0: one MLP for all
    experts_per_token: int = 2
    shared_experts: int = 0  # the number of experts that every token takes in addition
    shared_gate: bool = False  # whether a gate per token weighs their sum
    router: Literal["softmax", "sigmoid"] = "sigmoid"  # its scores; with sigmoid a bias balances the experts
    router_normalized: bool = True  # whether the weights of a token's experts add up to 1
    # One letter per layer, repeated: S attends to sequence_len / 4 tokens, L to all. Short windows save attention work
    # (source: Beltagy et al. 2020, Longformer). The last layer is always L: the prediction can use the whole context.
    # D keeps a state of fixed size in the place of keys and values (deltanet/), with these heads and channels.
    window_pattern: str = "L"
    state_key_heads: int = 0
    state_value_heads: int = 0
    state_key_dim: int = 0
    state_value_dim: int = 0
    # Tokens of a short window; 0: as above. Models of other families have a fixed number, in the last layer too if the
    # pattern says so (Mistral).
    window_tokens: int = 0
    # Base of the rotary wavelengths: the slowest pair of channels turns once in about 2 pi theta tokens.
    rope_theta: float = 100_000.0
    rotary_dims: int = 0  # the first channels of a head, which alone are rotated; 0: all
    # Stretches the model to a longer context than it was first trained with (run/long_context.py); None: a new model.
    rope_scaling: RopeScaling | None = None
    # An RMSNorm on q and k bounds their products, so that attention cannot saturate at high learning rates
    # (source: Henry et al. 2020, Query-Key Normalization). Qwen3 norms before the rotation, the preset after it.
    qk_norm: Literal["none", "before_rotary", "after_rotary"] = "after_rotary"
    # The norm also limits how sharp attention can get. A fixed gain on q and on k gives back some sharpness.
    qk_scale: float = 1.2
    # A learned gain in every norm. The next matrix can learn the same, so the preset leaves it out.
    norm_weight: bool = False
    norm_eps: float = 1e-6
    # Biases on q, k and v, as in Qwen2. The preset has no bias anywhere.
    attention_bias: bool = False
    attention_gate: bool = False  # whether each head's result is multiplied by a gate, which is computed with its query
    # How many heads of the first layer begin by looking back, by biases on their q and k: the first head at the last
    # token, the next head at the token before it. With such heads later layers continue what occurred earlier in the
    # text (source: Olsson et al. 2022, In-context Learning and Induction Heads); a model takes a while to learn them.
    lookback_heads: int = 0
    # One table for embedding and head (source: Press and Wolf 2017). Untied, each has its own scale and learning rate:
    # 0.3 and 0.008 at depth 12 (scaling.py).
    tied_head: bool = False
    # A norm after the embedding: the residual stream starts at unit size, however large the embeddings grow.
    embedding_norm: bool = True
    # A second embedding of the token, added to the values of every other layer, the last included. It costs memory but
    # almost no FLOPs, and is one of the larger gains per FLOP (source: Zhou et al. 2024, Value Residual Learning).
    value_embeddings: bool = True
    # Before each layer: x = a x + b x0, with x0 the normed embedding and two learned scalars per layer. The scale a
    # sets how much a layer adds to the stream; b keeps the token's identity within reach of deep layers.
    residual_scales: bool = True
    # Logits are bounded to (-cap, cap), which stops the head from growing without end; 0: off
    # (source: Gemma Team 2024, Gemma 2).
    logit_cap: float = 15.0
    # A second head, with one output: the reward of a reply (alignment/reward_model.py).
    scalar_head: bool = False

    def __post_init__(self):
        # JSON holds it as a dictionary.
        scaling: Any = self.rope_scaling
        if isinstance(scaling, dict):
            object.__setattr__(self, "rope_scaling", RopeScaling(**scaling))
        # Sizes left at 0 are computed from the width.
        if self.head_dim == 0:
            if self.width % self.n_head:
                raise ValueError(f"width {self.width} is not a multiple of n_head {self.n_head}")
            object.__setattr__(self, "head_dim", self.width // self.n_head)
        if self.mlp_width == 0:
            object.__setattr__(self, "mlp_width", 4 * self.width)
        # Refuse impossible shapes.
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head {self.n_head} is not a multiple of n_kv_head {self.n_kv_head}")
        if self.lookback_heads > self.n_kv_head:
            raise ValueError(f"lookback_heads {self.lookback_heads} are more than the {self.n_kv_head} key heads")
        if self.head_dim % 2:
            raise ValueError(
                f"--head_dim {self.head_dim} is odd, and rotary positions turn pairs of channels: use an even number, "
                f"such as {self.head_dim + 1}"
            )
        letters = "SLD" if self.has_states else "SL"
        if not self.window_pattern or set(self.window_pattern) - set(letters):
            raise ValueError(f"--window_pattern {self.window_pattern!r}: letters S (short) and L (long), e.g. SSSL")

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and the head."""
        # A multiple of 64 leaves matrix units no ragged edge. The padding is never predicted: `read_out` drops it.
        return math.ceil(self.vocab_size / 64) * 64

    def window(self, layer: int) -> int:
        """How many tokens a token of this layer attends to, itself included; 0 for all."""
        # SSSL with 12 layers and rows of 2,048: 512, 512, 512, 0, three times over. Information from beyond 512 tokens
        # arrives through the L layers, and layer by layer through the S layers.
        letter = self.letter(layer)
        if self.window_tokens:
            return self.window_tokens if letter == "S" else 0
        if letter != "S" or layer == self.n_layer - 1:
            return 0
        return max(self.sequence_len // 4, 1)

    def letter(self, layer: int) -> str:
        return self.window_pattern[layer % len(self.window_pattern)]

    @property
    def has_states(self) -> bool:
        return self.state_value_heads > 0

    @property
    def attention_layers(self) -> list[int]:
        """The layers that attend, and so have keys and values in a cache."""
        return [layer for layer in range(self.n_layer) if self.letter(layer) != "D"]

    def has_value_embedding(self, layer: int) -> bool:
        # Every other layer, which halves the memory. The last layer always has one.
        return self.value_embeddings and layer % 2 == (self.n_layer - 1) % 2


@dataclass
class ForwardContext:
    """Data that all layers of one forward pass share. It is computed once, because each piece costs launches."""

    # (T, 1, D). With a cache (B T, 1, D): its rows are at different positions, so all tokens form one row.
    cos: Tensor
    sin: Tensor
    segments: Segments | None = None
    cache: KVCache | None = None
    indices: Tensor | None = None  # where the new keys and values go in the cache
    masks: dict[int, Tensor] = field(default_factory=dict)  # by window; empty: attend to the new tokens only


class Linear(nn.Linear):
    """A product in the dtype of its input. Its weight stays in fp32: an update is often smaller than bf16 resolves."""

    # The model casts, not torch.autocast, whose lists of operators differ between devices and versions: some promote a
    # square or a norm to fp32, and with it everything that follows. Without autocast, and with single operators for
    # relu^2 and sums of products (kernels/gradients.py), a step at depth 12 keeps 406 instead of 550 KiB per token for
    # its backward pass (counted on a simulated NPU, 2026-11-22).

    cast: Tensor | None = None  # the weight in the dtype of the products, within `TorchKernels.cast_weights`

    def __init__(self, inputs: int, outputs: int, kernels: TorchKernels, bias: bool = False):
        super().__init__(inputs, outputs, bias=bias)
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        y = self.kernels.product(x, self.weight, self.cast)
        return y if self.bias is None else y + self.bias.to(x.dtype)


class Norm(nn.Module):
    """RMSNorm: LayerNorm without its mean, which costs time and gains nothing (source: Zhang and Sennrich 2019)."""

    def __init__(self, size: int, config: GPTConfig, kernels: TorchKernels):
        super().__init__()
        self.eps = config.norm_eps
        self.kernels = kernels
        self.weight = nn.Parameter(torch.ones(size)) if config.norm_weight else None

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, self.gain(x), self.eps)

    def gain(self, x: Tensor) -> Tensor | None:
        # Parameters stay in fp32 where activations are bf16; a norm takes both in one dtype.
        return None if self.weight is None else self.weight.to(x.dtype)


class AddNorm(Norm):
    """The norm of a sum, and the sum itself: one launch where the device has an operator for both."""

    def forward(self, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.kernels.add_rms_norm(x, added, self.gain(x), self.eps)


class Attention(nn.Module):
    """Each token reads from the tokens before it. Source: Vaswani et al. 2017."""

    def __init__(self, config: GPTConfig, layer: int, kernels: TorchKernels):
        super().__init__()
        self.config = config
        self.cache_layer = config.attention_layers.index(layer)
        self.window = config.window(layer)
        self.kernels = kernels
        H = config.n_head
        K = config.n_kv_head
        D = config.head_dim
        # q, k and v in one product: one launch instead of three.
        queries = 2 * H if config.attention_gate else H
        linear = kernels.qkv_linear(has_equal_heads=queries == K and not config.attention_bias) or Linear
        self.qkv = linear(config.width, (queries + 2 * K) * D, kernels, bias=config.attention_bias)
        # This mixes the results of the heads, and writes them to the residual stream.
        self.output = Linear(H * D, config.width, kernels)
        has_norm = config.qk_norm != "none"
        self.q_norm = Norm(D, config, kernels) if has_norm else None
        self.k_norm = Norm(D, config, kernels) if has_norm else None
        self.lookback = None  # biases of q and k, (H + K) x D in one row
        if layer == 0 and config.lookback_heads:
            self.lookback = nn.Parameter(torch.zeros((H + K) * D))
        self.value_gate = None
        if config.has_value_embedding(layer):
            self.value_gate = Linear(min(GATE_INPUTS, config.width), K, kernels)
        # 1 / sqrt(D) keeps the products q k at unit size. Of the gains on q and k only the product matters, so they are
        # part of the scale and cost nothing.
        gain = config.qk_scale**2 if has_norm else 1.0
        # YaRN's gain on cos and sin, which a norm after the rotation would remove.
        if config.qk_norm == "after_rotary" and config.rope_scaling is not None:
            gain *= config.rope_scaling.gain**2
        self.scale = gain / math.sqrt(D)

    def init_weights(self, uniform: Callable[[Tensor, float], None], std: float) -> None:
        """Draw the initial weights; `GPT.init_weights` says why so."""
        uniform(self.qkv.weight, std)
        if self.qkv.bias is not None:
            self.qkv.bias.zero_()
        if self.lookback is not None:
            fill(self.lookback, self._lookback())
        if self.value_gate is not None:
            # Every gate starts at 3 sigmoid(0) = 1.5, half open for every token.
            self.value_gate.weight.zero_()
        self.output.weight.zero_()

    def _lookback(self) -> Tensor:
        """The initial biases of q and k, by which the first heads of a layer look back: ((H + K) D,)."""
        c = self.config
        D = c.head_dim
        # The rotation turns pair i of a query at position t by t f_i, and of a key at position s by s f_i. If the key's
        # bias is ahead of the query's by d f_i, the two point in one direction where s = t - d: in all pairs there, and
        # nowhere else. A quarter of the channels take part, the fastest pairs: they tell neighbours apart. The biases
        # are twice as large as the products (sqrt(D)): they decide where to look, and the tokens have a small say.
        pairs = max(D // 8, 1)
        frequencies = c.rope_theta ** (-2 * torch.arange(pairs) / D)
        size = 2 * math.sqrt(D / pairs)
        queries = torch.zeros(c.n_kv_head, c.n_head // c.n_kv_head, D)  # grouped by the key head that they share
        keys = torch.zeros(c.n_kv_head, D)
        for head in range(c.lookback_heads):
            angles = (head + 1) * frequencies
            queries[head, :, :pairs] = size
            keys[head, :pairs] = size * angles.cos()
            keys[head, D // 2 : D // 2 + pairs] = size * angles.sin()
        return torch.cat((queries.flatten(), keys.flatten()))

    def forward(self, x: Tensor, value: Tensor | None, context: ForwardContext) -> Tensor:
        """x (B, T, C), with `value` (B, T, K x D) this layer's value embeddings -> (B, T, C)."""
        c = self.config
        B, T, _ = x.shape
        H = c.n_head
        K = c.n_kv_head
        D = c.head_dim

        # Queries (what each token looks for), keys (how it is found) and values (what it passes on). The norm and the
        # rotation treat queries and keys alike. Both stay in one tensor, qk, so that each operator is one launch.
        qkv = self.qkv(x)
        gate = None
        if c.attention_gate:  # each query is followed by the gate of its head
            queries, keys_and_values = qkv.split((2 * H * D, 2 * K * D), dim=-1)
            q, gate = queries.view(B, T, H, 2, D).unbind(3)
            qkv = torch.cat((q.flatten(2), keys_and_values), dim=-1)
        if isinstance(qkv, tuple):  # `kernels.qkv_linear`: q, k and v lie one after the other in memory
            qk = qkv[0].view(2, B, T, H, D)
            v = qkv[1].view(B, T, K, D)
        else:  # each token's q, k and v lie side by side
            qk, v = qkv.view(B, T, H + 2 * K, D).split((H + K, K), dim=2)  # qk (B, T, H + K, D)
        if self.lookback is not None:
            qk = qk + self.lookback.to(qk.dtype).view((2, 1, 1, H, D) if qk.ndim == 5 else (H + K, D))
        if c.qk_norm == "before_rotary":
            qk = self._norm_heads(qk)
        # After the rotation a product q k depends on the distance of the two tokens, not on where they are (rotary.py).
        # The operator takes (rows, T, heads, D) and T angles. With a cache, whose rows are at different positions, all
        # tokens form one row and have B T angles.
        rows = qk.view(-1, len(context.cos), *qk.shape[-2:])
        turned = self.kernels.rotate(rows[..., : context.cos.size(-1)], context.cos, context.sin)
        if c.rotary_dims:
            turned = torch.cat((turned, rows[..., c.rotary_dims :]), dim=-1)
        qk = turned.view(qk.shape)
        if c.qk_norm == "after_rotary":
            qk = self._norm_heads(qk)
        q, k = self._heads(qk)  # q (B, T, H, D), k and v (B, T, K, D)

        # The value embedding enters through a gate per head, between 0 and 3: the token's state decides how much of
        # the token's identity its values carry.
        if value is not None and self.value_gate is not None:
            value_gate = torch.sigmoid(self.value_gate(x[..., : self.value_gate.in_features]))  # (B, T, K)
            v = torch.addcmul(v, value_gate.unsqueeze(-1), value.view(B, T, K, D), value=3)  # v + 3 gate value

        # The new tokens attend to each other, and with a cache to the tokens before them.
        if context.cache is None:
            y = self.kernels.attention(q, k, v, scale=self.scale, window=self.window, segments=context.segments)
        else:
            # The cache receives the new keys and values first, so that a token finds itself there. Then the queries
            # attend to everything that the cache holds of their rows.
            assert context.indices is not None
            context.cache.write(self.cache_layer, k, v, context.indices)
            keys, values = context.cache.read(self.cache_layer)  # (B, K, S, D)
            q = q.to(keys.dtype)
            kernels = self.kernels
            attend = kernels.recorded_attention if context.cache.is_recorded else kernels.cached_attention
            y = attend(q, keys, values, scale=self.scale, mask=context.masks[self.window])
        if gate is not None:
            y = y * torch.sigmoid(gate)
        return self.output(y.reshape(B, T, H * D))  # y (B, T, H, D)

    def _norm_heads(self, qk: Tensor) -> Tensor:
        """Norm each head of the queries and keys in qk, in either layout."""
        assert self.q_norm is not None and self.k_norm is not None
        if self.q_norm.weight is None:  # without learned gains the two norms are the same function
            return self.q_norm(qk)
        q, k = self._heads(qk)
        normed = (self.q_norm(q), self.k_norm(k))
        return torch.stack(normed) if qk.ndim == 5 else torch.cat(normed, dim=2)

    def _heads(self, qk: Tensor) -> Sequence[Tensor]:
        """Queries (B, T, H, D) and keys (B, T, K, D), as views of qk."""
        return qk.unbind() if qk.ndim == 5 else qk.split((self.config.n_head, self.config.n_kv_head), dim=2)


class MLP(nn.Module):
    """Each token separately: widen, apply a nonlinearity, narrow. Two thirds of a block's parameters are here."""

    def __init__(self, config: GPTConfig, kernels: TorchKernels):
        super().__init__()
        self.kernels = kernels
        self.gated = config.mlp == "swiglu"
        inputs = 2 * config.mlp_width if self.gated else config.mlp_width  # gate and up in one product
        self.input = Linear(config.width, inputs, kernels)
        self.output = Linear(config.mlp_width, config.width, kernels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.input(x)
        # relu squared: the slope is 0 for negative inputs and grows with positive ones, so the input is its own gate.
        x = self.kernels.swiglu(x) if self.gated else self.kernels.relu_squared(x)
        return self.output(x)


class Block(nn.Module):
    """Attention, then the MLP; each reads the normed residual stream and adds to it."""

    def __init__(self, config: GPTConfig, layer: int, kernels: TorchKernels):
        super().__init__()
        self.attention_norm = Norm(config.width, config, kernels)
        attends = config.letter(layer) != "D"
        self.attention: Any = Attention(config, layer, kernels) if attends else kernels.state_layer(config, layer)
        self.mlp_norm = AddNorm(config.width, config, kernels)
        self.mlp: Any = kernels.experts(config) if config.experts else MLP(config, kernels)
        self.is_recomputed = False  # see GPT.recompute_activations

    def forward(self, x: Tensor, value: Tensor | None, context: ForwardContext) -> Tensor:
        """x (B, T, C) -> (B, T, C)"""
        if not self.is_recomputed:
            return self.compute(x, value, context)
        # Dropout must draw the same again, and only adapters have it. Nothing else in a block is random, and keeping
        # the generators' states would wait for the device.
        is_random = any(getattr(module, "dropout", 0) for module in self.modules())
        return checkpoint(self.compute, x, value, context, use_reentrant=False, preserve_rng_state=is_random)

    def compute(self, x: Tensor, value: Tensor | None, context: ForwardContext) -> Tensor:
        """What a block computes; kernels/compiling.py has a compiled form take its place."""
        # The norms come before attention and MLP, not after: the stream stays an unbroken sum, and gradients reach
        # every layer at full size (source: Xiong et al. 2020, On Layer Normalization in the Transformer Architecture).
        normed, x = self.mlp_norm(x, self.attention(self.attention_norm(x), value, context))
        return x + self.mlp(normed)


class Embedding(nn.Embedding):
    """A table of vectors, one row per token."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:  # on meta torch would import its compiler to draw values: 1 s of every start
            super().reset_parameters()


class ValueEmbedding(Embedding):
    """A table of values, one row per token. It also takes the residual stream x and returns it unchanged."""

    def forward(self, tokens: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        # Only FSDP needs x. It reduces a module's gradients once the gradients of its inputs are complete, and token
        # ids have none: without x, whole gradients of all tables stay in memory until the end of the backward pass.
        return super().forward(tokens), x


class Head(nn.Linear):
    """The output head: hidden states to logits, or with targets to their cross-entropy."""

    def __init__(self, config: GPTConfig, kernels: TorchKernels):
        super().__init__(config.width, config.padded_vocab_size, bias=False)
        self.config = config
        self.kernels = kernels

    def forward(self, hidden: Tensor, *loss: Any) -> Tensor:
        # The loss is computed here because it reads the weight, which FSDP gathers only while this forward runs.
        return read_out(self.config, self.kernels, self.weight, hidden, *loss)


class ScalarHead(nn.Module):
    """One number for each position, in fp32. Its weights start at zero."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        # It has no bias: rewards are compared with each other, and a bias would cancel out.
        self.weight = nn.Parameter(torch.zeros(config.width))

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., C) -> (...)"""
        return hidden.float() @ self.weight


def capped_logits(config: GPTConfig, products: Tensor) -> Tensor:
    """Hidden states times the head's weight (..., V), which a device may have packed -> logits (..., V) in fp32."""
    # The 8 bits of precision of bf16 are too few for a softmax over the vocabulary.
    return soft_cap(products.float(), config.logit_cap)


def read_out(
    config: GPTConfig, kernels: TorchKernels, weight: Tensor, hidden: Tensor,
    targets: Tensor | None = None, reduction: str = "sum", temperature: float = 1.0,
) -> Tensor:  # fmt: skip
    """The head's weight (V, C) and hidden states (..., C) -> soft-capped logits (..., V) in fp32.

    With targets (B, T) it returns the cross-entropy in nats instead: the sum, or (B, T) with the reduction "none". The
    cross-entropy is of the logits divided by `temperature`.
    """
    if config.vocab_size < len(weight):  # the gradient of a slice is a copy of the whole table
        weight = weight[: config.vocab_size]  # without the padding
    cap = config.logit_cap
    if targets is None:
        return capped_logits(config, F.linear(hidden, weight.to(hidden.dtype)))
    if temperature != 1:  # cap tanh(x / cap) / t is a cap of cap / t on x / t
        hidden = hidden / temperature
        cap = cap / temperature
    # Head and loss in one, chunk by chunk, so that the logits of all tokens are never in memory (cross_entropy.py).
    sizes = kernels.loss_tokens(config.vocab_size)
    loss = linear_cross_entropy(
        hidden.flatten(0, 1), weight, targets.flatten(), cap, *sizes, kernels.loss_in_fp32, reduction
    )
    return loss if reduction == "sum" else loss.view_as(targets)


class GPT(nn.Module):
    """The whole model. `kernels` are the operators of the device that it will run on, `device.kernels`; None: the
    operators of a CPU."""

    def __init__(self, config: GPTConfig, kernels: TorchKernels | None = None):
        super().__init__()
        self.config = config
        # The caller chooses them, once, not the device of the weights: a model is often built on another device than it
        # runs on, such as the meta device or main memory. `_context` refuses tokens on a device that does not match.
        self.kernels = kernels or devices.runtime_of("cpu").kernels(torch.float32, "")
        V = config.padded_vocab_size
        C = config.width
        # Token ids to vectors, and the stack of blocks that refines them.
        self.embedding = Embedding(V, C)
        self.embedding_norm = Norm(C, config, self.kernels) if config.embedding_norm else None
        self.blocks = nn.ModuleList(Block(config, layer, self.kernels) for layer in range(config.n_layer))
        # Vectors to a prediction of the next token.
        self.norm = Norm(C, config, self.kernels)
        self.head: nn.Module | None = None if config.tied_head else Head(config, self.kernels)
        # Whether `kernels.pack` has laid out the weights for decoding. Such a model has no gradient and no loss.
        self.is_packed = False
        self.value_embeddings = nn.ModuleDict()
        for layer in range(config.n_layer):
            if config.has_value_embedding(layer):
                self.value_embeddings[str(layer)] = ValueEmbedding(V, config.n_kv_head * config.head_dim)
        if config.residual_scales:
            self.residual_scales = nn.Parameter(torch.ones(config.n_layer))
            self.embedding_scales = nn.Parameter(torch.zeros(config.n_layer))
        # It comes last, so that adding it to a model leaves the order of the other parameters.
        self.scalar_head = ScalarHead(config) if config.scalar_head else None
        # What a room has added to the layers, to train it in their place: `adapters.lora.Attached`; None: nothing.
        self.extension: Any = None
        # The rotary tables are computed from the config, so checkpoints do not hold them.
        self.rotary: Tensor  # (2, sequence_len, D): cosines and sines
        self.register_buffer(
            "rotary", torch.empty(2, config.sequence_len, config.rotary_dims or config.head_dim), persistent=False
        )
        self.fill_rotary()

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    def to_empty(self, *, device: Any, recurse: bool = True) -> "GPT":
        """Move from the meta device to memory that is not filled yet."""

        def allocated(tensor: Tensor) -> Tensor:  # torch.empty_like of a meta tensor imports sympy for a shape
            if is_dtensor(tensor):
                return torch.empty_like(tensor, device=device)
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

        return self._apply(allocated, recurse=recurse)

    def recompute_activations(self) -> None:
        """Have the backward pass compute each block again instead of keeping its activations: less memory, one more
        forward pass (source: Chen et al. 2016, Training deep nets with sublinear memory cost)."""
        for block in self.blocks:
            assert isinstance(block, Block)
            block.is_recomputed = True

    @torch.no_grad()
    def fill_rotary(self) -> None:
        """Compute the rotary tables, once the model has left the meta device."""
        if not self.rotary.is_meta:
            c = self.config
            self.rotary.copy_(rotary_tables(c.sequence_len, c.rotary_dims or c.head_dim, c.rope_theta, c.rope_scaling))

    @torch.no_grad()
    def init_weights(self, seed: int = 0) -> None:
        """Draw the initial weights."""
        # The host draws whole tensors and each process keeps its rows, so every device and layout has the same weights.
        generator = torch.Generator().manual_seed(seed)
        # Their memory holds anything. A parameter that is forgotten below makes the first loss NaN, on every device.
        for parameter in self.parameters():
            parameter.fill_(math.nan)

        def normal(parameter: Tensor, std: float) -> None:
            fill(parameter, torch.randn(parameter.shape, generator=generator) * std)

        def uniform(parameter: Tensor, std: float) -> None:
            bound = std * math.sqrt(3)  # a uniform variable has a standard deviation of its bound / sqrt(3)
            fill(parameter, (torch.rand(parameter.shape, generator=generator) * 2 - 1) * bound)

        # A product with weights of standard deviation 1 / sqrt(width) keeps unit-size inputs at unit size.
        std = 1 / math.sqrt(self.config.width)
        # The norm after the embedding removes its size, but the size decides how far one update turns a row.
        normal(self.embedding.weight, 0.8)
        if isinstance(self.head, Head):
            # Nearly equal logits: the first loss is ln(vocab_size), the loss of knowing nothing. For 32,768 tokens that
            # is 10.4 nats; a run that starts higher has a mistake in its head or its targets.
            normal(self.head.weight, 0.001)
        if self.scalar_head is not None:
            fill(self.scalar_head.weight, torch.zeros(self.config.width))
        for embedding in self.value_embeddings.values():
            assert isinstance(embedding, ValueEmbedding)
            # As large as the values to which they are added.
            uniform(embedding.weight, std)
        for block in self.blocks:
            assert isinstance(block, Block)
            # Uniform, not normal, where Muon updates: it has no outliers at the same standard deviation. Output
            # projections of zero: every block starts as the identity, at any depth (source: Zhang et al. 2019, Fixup),
            # and the gradient reaches the embeddings undisturbed.
            block.attention.init_weights(uniform, std)
            # Smaller, because the square in relu2 makes large inputs larger still.
            uniform(block.mlp.input.weight, 0.4 * std)
            block.mlp.output.weight.zero_()
            if self.config.experts:
                block.mlp.init_weights(uniform, std)
        for module in self.modules():
            if isinstance(module, Norm) and module.weight is not None:
                module.weight.fill_(1.0)
        if self.config.residual_scales:
            # Early layers start with a larger stream and more of the embedding, late layers with less of both.
            last = max(self.config.n_layer - 1, 1)
            depth = torch.arange(self.config.n_layer) / last  # 0 at the first layer, 1 at the last
            fill(self.residual_scales, 1.15 - 0.10 * depth)
            fill(self.embedding_scales, 0.20 - 0.15 * depth)
        self.fill_rotary()

    def cast_weights(self) -> AbstractContextManager[None]:
        """A context for a training step, in which no weight changes: products may share one cast of all weights."""
        return self.kernels.cast_weights(self)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        cache: KVCache | None = None,
        segments: Segments | None = None,
        reduction: Literal["sum", "none"] = "sum",
        scalars: bool = False,
        temperature: float = 1.0,
    ) -> Tensor:
        """tokens (B, T) -> logits (B, T, V) in fp32; with targets (B, T) the cross-entropy in nats.

        The cross-entropy is a sum, or with the reduction "none" (B, T), 0 where the target is IGNORE. With `segments`,
        the documents of packed rows, a token attends only to its own document. With a `temperature` the cross-entropy
        is of the logits divided by it. With `scalars` it returns the scalar head's numbers instead, (B, T) in fp32.
        """
        # Every loss starts here, because the compiler and FSDP wrap only this method of a model.
        hidden = self.hidden(tokens, cache, segments)
        if scalars:
            assert self.scalar_head is not None
            return self.scalar_head(hidden)
        return self.logits(hidden) if targets is None else self._read_out(hidden, targets, reduction, temperature)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., C) -> soft-capped logits (..., V) in fp32."""
        return self._read_out(hidden)

    def hidden(self, tokens: Tensor, cache: KVCache | None = None, segments: Segments | None = None) -> Tensor:
        """tokens (B, T) -> the normed last residual (B, T, C). With a cache the tokens continue its rows."""
        # The residual stream starts as the token's embedding. Every layer reads it and adds to it.
        x = self.embedding(tokens)  # (B, T, C)
        # The stream has the dtype of the products: bf16 halves the memory traffic between them. Where the weights
        # are in bf16 already, as in the engine, their dtype decides.
        if x.dtype == torch.float32:
            x = x.to(self.kernels.dtype)
        context = self._context(tokens, x.dtype, cache, segments)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        # Every layer mixes in a share of it again (`mix`). It is a view, because the compiler takes no tensor twice.
        first = x.view_as(x)

        if self.config.residual_scales:
            # Cast and split for all layers at once: per layer it would be several launches each.
            residual_scales = self.residual_scales.to(x.dtype).unbind()
            embedding_scales = self.embedding_scales.to(x.dtype).unbind()
        for i, block in enumerate(self.blocks):
            if self.config.residual_scales:
                # x = a x + b first, with this layer's two scales
                x, first = self.kernels.mix(x, first, residual_scales[i], embedding_scales[i])
            value = None
            if str(i) in self.value_embeddings:
                # x passes through unchanged (ValueEmbedding says why).
                value, x = self.value_embeddings[str(i)](tokens, x)
                value = value.to(x.dtype)
            x = block(x, value, context)
        return self.norm(x)

    def _context(
        self, tokens: Tensor, dtype: torch.dtype, cache: KVCache | None, segments: Segments | None
    ) -> ForwardContext:
        """Positions and masks for all layers."""
        if self.kernels.device_type not in (None, tokens.device.type):
            raise ValueError(
                f"the model has {self.kernels.device_type} kernels and its tokens are on {tokens.device.type}: "
                "build it with GPT(config, device.kernels)"
            )
        T = tokens.size(1)
        positions = None
        if cache is None:
            # Every row starts at position 0, unless the tokens are only a part of their rows.
            start = 0 if segments is None else segments.start
            end = start + T
            assert self.config.sequence_len >= end, f"{end} tokens in a row of at most {self.config.sequence_len}"
            rotary = self.rotary[:, start:end]  # (2, T, D)
        else:
            # Each row continues where it ends in the cache.
            positions = cache.positions(T)  # (B, T)
            rotary = self.rotary[:, positions].flatten(1, 2)  # (2, B T, D)
        # cos and sin of each position, with an axis that all heads share.
        cos, sin = rotary.to(dtype).unsqueeze(-2)
        context = ForwardContext(cos, sin, segments=segments, cache=cache)
        if cache is not None and positions is not None:
            context.indices = cache.indices(positions)
            windows = [self.config.window(layer) for layer in self.config.attention_layers]
            for window, mask in cache.masks(positions, windows).items():
                context.masks[window] = self.kernels.prepare_mask(mask)
        return context

    def _read_out(self, hidden: Tensor, *loss: Any) -> Tensor:
        # A tied head is the embedding's weight. FSDP keeps it gathered, because it belongs to the root module.
        if self.head is None:
            return read_out(self.config, self.kernels, self.embedding.weight, hidden, *loss)
        return self.head(hidden, *loss)

    def head_weight(self) -> Tensor:
        """(vocab_size, C), without the padding."""
        weight = self.head.weight if isinstance(self.head, Head) else self.embedding.weight
        return weight[: self.config.vocab_size]

    def parameter_groups(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """Every parameter, by the role that decides how it is optimised (optim.py)."""
        roles = ("matrix", "qkv", "embedding", "value_embedding", "head", "vector", "residual_scale")
        groups: dict[str, list[tuple[str, nn.Parameter]]] = {role: [] for role in roles}
        # Muon takes matrices, AdamW the rest with a learning rate per role (scaling.py). The embedding scales count as
        # vectors. The residual scales have their own role, because they multiply the whole stream.
        for name, parameter in self.named_parameters():
            part = name.partition(".")[0]
            if part in ("embedding", "value_embeddings", "head", "residual_scales"):
                role = part.removesuffix("s")  # these parts give their roles the name
            elif part == "scalar_head":
                role = "head"
            elif parameter.ndim != 2 or any(part.endswith("_gate") for part in name.split(".")):
                # A gate is a matrix too, but too small for Muon.
                role = "vector"
            elif ".qkv." in name:
                # Three matrices stacked in one, which Muon takes apart.
                role = "qkv"
            else:
                role = "matrix"
            groups[role].append((name, parameter))
        return groups

    def gradient_order(self) -> list[str]:
        """The names of all parameters in the order in which a backward pass completes their gradients."""
        # It goes from the loss backwards: the head first, then block after block, the embedding last. The optimizer
        # sends gradients in this order, while the backward pass still computes the others (optim.py).
        parts = ["scalar_head", "head", "norm"]
        for layer in reversed(range(self.config.n_layer)):
            parts += [f"blocks.{layer}", f"value_embeddings.{layer}"]
        parts += ["residual_scales", "embedding_scales", "embedding_norm", "embedding"]
        names = [name for name, _ in self.named_parameters()][::-1]
        order = []
        for part in parts:
            order += [name for name in names if name == part or name.startswith(f"{part}.")]
        return order
