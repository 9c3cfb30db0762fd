"""Rotary positions: how far each pair of channels turns per token, and how a model is stretched to longer rows.

Queries and keys are rotated by their positions, so that a product of the two depends on the distance of the tokens and
not on where they are (source: Su et al. 2021, RoFormer). `TorchKernels.rotate` applies the tables of this file.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeScaling:
    """How a model reads longer rows than it was first trained on: its slow rotary pairs turn more slowly.

    A pair that makes a full turn within a short distance tells neighbours apart, and must stay as it is. A pair that
    never makes a full turn in the original context would reach angles that the model has not seen: it is slowed by
    `factor`.
    """

    # linear: slows all pairs alike (source: Chen et al. 2023, Position Interpolation).
    # llama3: slows a pair by the number of turns that it makes in the original context. Between the two limits below
    # the slowed and the original frequency are mixed in proportion (source: Llama Team 2024, The Llama 3 Herd of
    # Models, and its released code).
    # yarn: the same idea, with a ramp over the pairs' indices, and a gain on cos and sin that sharpens attention
    # (source: Peng et al. 2023, YaRN).
    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_len: int = 0  # tokens of the original context; linear does not need it
    fewest_turns: float = 1.0  # a pair with fewer turns is slowed by the whole factor
    most_turns: float = 4.0  # a pair with more turns stays as it is
    gain: float = 1.0  # yarn: multiplies cos and sin
    whole_pairs: bool = True  # yarn: the ramp begins and ends at a pair, not between two

    def __post_init__(self):
        numbers = (self.factor, self.original_len, self.fewest_turns, self.most_turns, self.gain)
        if self.kind not in ("linear", "llama3", "yarn") or not all(isinstance(n, int | float) for n in numbers):
            raise ValueError("rope_scaling: a kind (linear, llama3, yarn) and its numbers")
        if not (0 < self.factor < math.inf and 0 < self.gain < math.inf):
            raise ValueError(f"rope_scaling: factor {self.factor} and gain {self.gain} are above 0 and finite")
        if self.kind != "linear" and not (self.original_len > 0 and 0 < self.fewest_turns < self.most_turns < math.inf):
            raise ValueError(f"rope_scaling: {self.kind} needs the original context, and turns in order")

    def apply(self, frequencies: Tensor, theta: float) -> Tensor:
        """The scaled frequencies (D / 2,) of the pairs, in radians per token."""
        slowed = frequencies / self.factor
        if self.kind == "linear":
            return slowed
        # The share of its frequency that each pair keeps: 0 for slow pairs, 1 for fast ones.
        if self.kind == "llama3":
            turns = self.original_len * frequencies / (2 * math.pi)
            kept = (turns - self.fewest_turns) / (self.most_turns - self.fewest_turns)
        else:
            D = 2 * len(frequencies)
            first = self._pair_with(self.most_turns, D, theta)
            last = self._pair_with(self.fewest_turns, D, theta)
            if self.whole_pairs:
                first = math.floor(first)
                last = math.ceil(last)
            first = max(first, 0)
            last = min(last, D - 1)
            kept = 1 - (torch.arange(D // 2) - first) / max(last - first, 0.001)
        kept = kept.clamp(0, 1)
        return (1 - kept) * slowed + kept * frequencies

    def _pair_with(self, turns: float, D: int, theta: float) -> float:
        """The index of the pair that makes this many turns in the original context, as a fraction between two pairs."""
        # It solves theta^(-2i / D) = 2 pi turns / original_len for i.
        return D * math.log(self.original_len / (2 * math.pi * turns)) / (2 * math.log(theta))


def rotary_tables(tokens: int, head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Cosines and sines for the positions 0 to `tokens` - 1: (2, T, D)."""
    # Pair i turns by position x theta^(-2i / D): fast pairs separate neighbours, slow pairs distant tokens.
    # At D = 128 and theta = 100,000 a full turn takes pair 0 about 6 tokens, pair 32 2,000 and pair 63 525,000.
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)  # (D / 2,)
    if scaling is not None:
        frequencies = scaling.apply(frequencies, theta)
    positions = torch.arange(tokens, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)  # (T, D / 2)
    # A pair is (x[i], x[i + D/2]), the split-half layout of Llama and Qwen; both channels have one angle.
    angles = torch.cat((angles, angles), dim=1)  # (T, D)
    return torch.stack((angles.cos(), angles.sin())) * (scaling.gain if scaling else 1.0)
