"""GatedDeltaNet: a layer in the place of attention, whose memory does not grow with the row.

A convolution mixes each channel of queries, keys and values over four tokens; the gated delta rule (rule.py) reads
them; a norm and a gate finish what each head has read. Rows that hold several documents, and rows of a cache, begin
with an empty memory.

A cache holds two tensors for each such layer (`row_states`): the last three inputs of the convolution and the state.

Source: Yang et al. 2024, Gated Delta Networks; qwen3_5 of transformers 5.24, with which test_p08 compares it.

Legend: B batch, T time, C width, K key heads, G value heads per key head, Dk and Dv channels of a key and a value.
"""

import math
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from nanochat.deltanet.rule import chunked, step
from nanochat.gpt import ForwardContext, GPTConfig, Linear
from nanochat.operators import TorchKernels

TAPS = 4  # tokens that the convolution mixes


def mixed_channels(config: GPTConfig) -> int:
    """The channels of queries, keys and values together."""
    keys = config.state_key_heads * config.state_key_dim
    return 2 * keys + config.state_value_heads * config.state_value_dim


def row_states(config: GPTConfig, rows: int, device: torch.device | str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """What a cache of `rows` rows holds for the layers with a state: inputs of the convolution (layers, B, 3,
    channels), and states (layers, B, K, G, Dk, Dv) in fp32."""
    c = config
    layers = c.n_layer - len(c.attention_layers)
    groups = c.state_value_heads // c.state_key_heads
    return (
        torch.zeros(layers, rows, TAPS - 1, mixed_channels(c), device=device, dtype=dtype),
        torch.zeros(layers, rows, c.state_key_heads, groups, c.state_key_dim, c.state_value_dim, device=device),
    )


class GatedDeltaNet(nn.Module):
    """x (B, T, C) -> (B, T, C), as `Attention`."""

    def __init__(self, config: GPTConfig, layer: int, kernels: TorchKernels):
        super().__init__()
        self.kernels = kernels
        self.eps = config.norm_eps
        self.state_layer = layer - sum(other < layer for other in config.attention_layers)  # counts these layers only
        self.key_shape = (config.state_key_heads, config.state_key_dim)
        groups = config.state_value_heads // config.state_key_heads
        self.value_shape = (config.state_key_heads, groups, config.state_value_dim)
        values = math.prod(self.value_shape)
        # One product: queries, keys and values; the gate of the result; for each value head a strength and a decay.
        heads = config.state_value_heads
        self.parts = (mixed_channels(config), values, heads, heads)
        self.state_input = Linear(config.width, sum(self.parts), kernels)
        self.convolution = nn.Parameter(torch.empty(mixed_channels(config), 1, TAPS))
        self.log_rate = nn.Parameter(torch.empty(heads))
        self.rate_bias = nn.Parameter(torch.empty(heads))
        self.norm_weight = nn.Parameter(torch.ones(config.state_value_dim))
        self.state_output = Linear(values, config.width, kernels)

    def init_weights(self, uniform: Callable[[Tensor, float], None], std: float) -> None:
        uniform(self.state_input.weight, std)
        uniform(self.convolution, 1 / math.sqrt(TAPS))
        self.log_rate.zero_()  # with the bias a half-life of one token
        self.rate_bias.zero_()
        self.norm_weight.fill_(1.0)
        self.state_output.weight.zero_()  # as the output of attention

    def forward(self, x: Tensor, value: Tensor | None, context: ForwardContext) -> Tensor:
        """x (B, T, C) -> (B, T, C). No such layer has value embeddings."""
        B, T, _ = x.shape
        cache = context.cache
        mixed, gate, strength, rate = self.state_input(x).split(self.parts, dim=-1)
        # The documents' numbers as floats: an NPU pads whole numbers of 64 bits on its slow AI CPU.
        numbers = None if context.segments is None else context.segments.numbers.float()
        lengths = None
        if cache is None:
            inputs = F.pad(mixed, (0, 0, TAPS - 1, 0))  # (B, 3 + T, channels)
        else:
            windows, states = (memory[self.state_layer] for memory in cache.states)
            inputs = torch.cat((windows, mixed), dim=1)
            lengths = cache.lengths
        q, k, v = self._heads(self._convolve(inputs, numbers))
        # The logarithm of the decay is below 0: -exp(log_rate) softplus(rate + bias).
        log_decay = -self.log_rate.float().exp() * F.softplus(rate.float() + self.rate_bias.float())  # (B, T, K G)
        strength = torch.sigmoid(strength.float())
        if lengths is not None:  # padding leaves the state as it is
            is_real = (torch.arange(T, device=x.device) < lengths[:, None])[..., None]
            log_decay = log_decay * is_real
            strength = strength * is_real
        log_decay = log_decay.unflatten(-1, self.value_shape[:2])
        strength = strength.unflatten(-1, self.value_shape[:2])
        if cache is None:
            y, _ = chunked(q, k, v, log_decay, strength, None, numbers)
        elif T == 1:
            decay = log_decay[:, 0].exp()
            y = step(q[:, 0], k[:, 0], v[:, 0], decay, strength[:, 0], states)[:, None]
            windows.copy_(inputs[:, 1:])
        else:
            y, state = chunked(q, k, v, log_decay, strength, states, None)
            states.copy_(state)
            # The last three inputs of each row, before its padding.
            assert lengths is not None
            index = lengths[:, None] + torch.arange(TAPS - 1, device=x.device)  # (B, 3)
            windows.copy_(inputs.gather(1, index[..., None].expand(-1, -1, inputs.size(-1))))
        # Norm each head, and let its gate decide how much of it enters the stream.
        y = self.kernels.rms_norm(y.to(x.dtype).contiguous(), self.norm_weight.to(x.dtype), self.eps)
        y = y * F.silu(gate.float()).to(x.dtype).view_as(y)
        return self.state_output(y.view(B, T, -1))

    def _convolve(self, inputs: Tensor, numbers: Tensor | None) -> Tensor:
        """inputs (B, 3 + T, channels), each channel by itself -> (B, T, channels) in fp32."""
        inputs = inputs.float()
        taps = self.convolution.float()[:, 0].unbind(-1)  # (channels,) each, the last one for the token itself
        T = inputs.size(1) - len(taps) + 1
        y = inputs[:, -T:] * taps[-1]
        for tap in range(len(taps) - 1):
            earlier = inputs[:, tap : tap + T]
            if numbers is not None:  # a document does not see the one before it
                distance = len(taps) - 1 - tap
                same = numbers == F.pad(numbers, (distance, 0), value=-1)[:, :T]
                earlier = earlier * same[..., None]
            y = torch.addcmul(y, earlier, taps[tap])
        return F.silu(y)

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, channels) -> q and k (B, T, K, Dk) of length 1 and 1 / sqrt(Dk), and v (B, T, K, G, Dv)."""
        keys = math.prod(self.key_shape)
        q, k, v = mixed.split((keys, keys, mixed.size(-1) - 2 * keys), dim=-1)
        q = _unit(q.unflatten(-1, self.key_shape)) / math.sqrt(self.key_shape[1])
        return q, _unit(k.unflatten(-1, self.key_shape)), v.unflatten(-1, self.value_shape)


def _unit(x: Tensor) -> Tensor:
    """Vectors of length 1 along the last axis."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)
