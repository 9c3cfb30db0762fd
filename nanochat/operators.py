"""The operators that the model calls, as torch provides them.

This class is the interface, and what the others are compared with. The rooms' classes compute the same faster:
kernels/gradients.py writes gradients out, and cpu.py, cuda.py and npu.py there add what their device does better.
`device.kernels` chooses once, when the model is built. A mask is True where a query may attend to a key.

Legend: B batch, T query tokens, S keys, H query heads, K key/value heads, D head dim, V vocab.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat.attention import Segments, blockwise_attention, fused_attention
from nanochat.cli import UserError

# Of the weights with which the engine decodes; auto: in the dtype of the products.
WeightFormat = Literal["auto", "fp16"]
NO_FP16 = "--weights fp16 is for products in fp32 on an x86 CPU: add --dtype float32 there, or leave it out"

SMALLEST_CHUNK = 256  # tokens whose logits are computed at a time, at least


@dataclass(frozen=True)
class AdamWUpdate:
    """One step of parameters that differ in their learning rates alone. Each list has one entry a parameter."""

    weights: list[Tensor]
    grads: list[Tensor]  # of a sum over the targets
    first_moment: Tensor  # flat: the elements of all parameters in a row
    second_moment: Tensor  # likewise
    learning_rates: list[float]
    betas: tuple[float, float]
    eps: float
    weight_decay: float


def split_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of consecutive parts of a flat tensor, in the shapes of the tensors."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


class TorchKernels:
    # For the log.
    name = "torch"
    # The only kind of device that these run on; None: any.
    device_type: str | None = None
    # Logits that the fused loss holds at a time, 256 MiB in fp32: an accelerator wants few and large launches.
    loss_chunk_elements = 1 << 26
    # Those that it passes over at a time; None: all of them.
    loss_slice_elements: int | None = None
    # top_p looks at so many of the likeliest tokens before it sorts them all; 0: it sorts them all at once.
    top_p_first = 0
    # Whether decoding attends to the whole cache, in one shape, which can be recorded and replayed. False: to its
    # filled part, which is fewer keys to read, in a shape that changes every CACHE_STEP tokens (engine.py).
    static_shapes = False
    # Whether a step casts the weights of all products at once (gpt.py).
    casts_together = False

    def __init__(self, dtype: torch.dtype = torch.float32):
        # Of matrix products and what is between them. Weights stay in fp32; norms, softmax and losses compute in fp32.
        self.dtype = dtype

    def __str__(self) -> str:
        return self.name

    def product(self, x: Tensor, weight: Tensor, cast: Tensor | None = None) -> Tensor:
        """x (..., inputs), weight (outputs, inputs) -> x @ weight.T (..., outputs), in the dtype of x. `cast` is the
        weight in that dtype, where it is at hand."""
        return F.linear(x, weight.to(x.dtype))

    def qkv_linear(self, has_equal_heads: bool) -> Any:
        """The class of the linear layer that makes queries, keys and values; None: the model's own."""
        return None

    def queries_keys_values(self, attention: Any, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, C) -> q (B, T, H, D), k and v (B, T, K, D), rotated and normed: as the model's `Attention` does."""
        return attention.queries_keys_values(x, cos, sin)

    def relu_squared(self, x: Tensor) -> Tensor:
        """relu(x)^2."""
        return F.relu(x).square()

    def mix(self, x: Tensor, first: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """a x + b first, with a and b of one number each, and `first` again, for the next layer."""
        return torch.addcmul(a * x, b, first), first

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) over the last axis, times the gain if there is one."""
        return F.rms_norm(x, (x.size(-1),), weight, eps)

    def add_rms_norm(self, x: Tensor, added: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        """The norm of x + added, and the sum itself."""
        x = x + added
        return self.rms_norm(x, weight, eps), x

    def swiglu(self, x: Tensor) -> Tensor:
        """silu(gate) * up, where x (..., 2 M) is gate and up next to each other -> (..., M)."""
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate each pair (x[i], x[i + D/2]) of x (B, T, heads, D) by its position's angle; cos, sin (T, 1, D)."""
        # (low, high) -> (low cos - high sin, high cos + low sin)
        low, high = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-high, low), dim=-1) * sin

    def prepare_mask(self, mask: Tensor) -> Tensor:
        """The mask in the form of `cached_attention`; called once per forward pass and window, not once per layer."""
        return mask

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int = 0, segments: Segments | None = None
    ) -> Tensor:
        """Causal attention over whole rows: q (B, T, H, D), k and v (B, T, K, D) -> (B, T, H, D).

        H is a multiple of K. With `segments` the documents of a row do not attend to each other.
        """
        # The fused operator knows no windows and no documents: blocks of the row do. A window as long as the row
        # restricts nothing.
        if 0 < window < q.size(1) or segments is not None:
            return blockwise_attention(q, k, v, scale=scale, window=window, segments=segments)
        return fused_attention(q, k, v, scale=scale, is_causal=True)

    def cached_attention(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor) -> Tensor:
        """Attention to a cache: q (B, T, H, D), k and v (B, S, K, D), prepared mask (B, 1, T, S) -> (B, T, H, D)."""
        return fused_attention(q, k, v, scale=scale, mask=mask)

    def recorded_attention(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor) -> Tensor:
        """`cached_attention` for a pass whose launches are recorded."""
        return self.cached_attention(q, k, v, scale=scale, mask=mask)

    def loss_tokens(self, vocab: int) -> tuple[int, int | None]:
        """How many tokens' logits the fused loss holds at a time, and passes over at a time (cross_entropy.py);
        None: over all that it holds."""
        chunk = max(SMALLEST_CHUNK, self.loss_chunk_elements // vocab)
        if self.loss_slice_elements is None:
            return chunk, None
        return chunk, max(1, min(chunk, self.loss_slice_elements // vocab))

    def adamw(self, updates: Iterable[AdamWUpdate], steps: Tensor, targets: Tensor, ok: Tensor) -> None:
        """A step of AdamW (optim.py), in place. Gradients are divided by `targets`, 0-D. `steps` (1,) counts this step.

        Where `ok`, 0-D, is 0, no weight and no moment changes, even if gradients are not finite.
        """
        for update in updates:
            first_moments = split_like(update.first_moment, update.weights)
            second_moments = split_like(update.second_moment, update.weights)
            # The fused kernel takes one learning rate: it runs once for each.
            for rate in dict.fromkeys(update.learning_rates):
                alike = [place for place, its_rate in enumerate(update.learning_rates) if its_rate == rate]
                # It divides by grad_scale, and touches nothing when found_inf is 1.
                torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
                    [update.weights[place] for place in alike],
                    [update.grads[place] for place in alike],
                    [first_moments[place] for place in alike],
                    [second_moments[place] for place in alike],
                    [],
                    [steps] * len(alike),
                    lr=rate,
                    beta1=update.betas[0],
                    beta2=update.betas[1],
                    weight_decay=update.weight_decay,
                    eps=update.eps,
                    amsgrad=False,
                    maximize=False,
                    grad_scale=targets,
                    found_inf=1 - ok,
                )

    def packs(self, dtype: torch.dtype) -> bool:
        """Whether `pack` makes decoding in this dtype faster here."""
        return False

    def pack(self, model: Any, weights: WeightFormat = "auto") -> Any:
        """Lay out a GPT's weights for decoding, in place. Only where `packs`, or to make them smaller.

        Raises UserError: when there are no products with such weights.
        """
        if weights == "fp16":
            raise UserError(NO_FP16)
        raise NotImplementedError(f"{self.name} kernels pack no weights")


def unfused_adamw(updates: Iterable[AdamWUpdate], steps: Tensor, targets: Tensor, ok: Tensor) -> None:
    """`TorchKernels.adamw` by plain operators, for devices whose fused one cannot skip a step."""
    skipped = ok == 0
    steps = steps.clamp(min=1)  # 0 where the first step is skipped
    factors: dict[tuple[float, float], tuple[Tensor, ...]] = {}  # by betas: most updates have the same
    for update in updates:
        if update.betas not in factors:
            beta1, beta2 = update.betas
            correction1 = 1 - beta1**steps
            root2 = (1 - beta2**steps).sqrt()
            # The moments move by (1 - beta) of the way to the gradient, and in a skipped step by nothing.
            factors[update.betas] = ((1 - beta1) * ok, (1 - beta2) * ok, correction1, correction1 / root2)
        first_portion, second_portion, correction1, ratio = factors[update.betas]
        # All parameters in a row: one launch an operator, not one for each parameter. A skipped step's
        # gradient may be NaN, and 0 x NaN is NaN: select instead of multiplying.
        grad = torch.cat([grad.flatten() for grad in update.grads]).div_(targets).masked_fill_(skipped, 0.0)
        update.first_moment.lerp_(grad, first_portion)
        update.second_moment.lerp_(grad.mul_(grad), second_portion)
        # m' / (sqrt(v') + eps), where m' = m / correction1 and sqrt(v') = sqrt(v) / root2. With both corrections in the
        # divisor it is m / (sqrt(v) correction1 / root2 + eps correction1).
        divisor = update.second_moment.sqrt().mul_(ratio).add_(correction1, alpha=update.eps)
        move = torch.div(update.first_moment, divisor, out=divisor)
        if update.weight_decay:
            move.add_(torch.cat([weight.flatten() for weight in update.weights]), alpha=update.weight_decay)
        moves = split_like(move.mul_(ok), update.weights)
        torch._foreach_mul_(moves, update.learning_rates)  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_sub_(update.weights, moves)  # pyright: ignore[reportPrivateImportUsage]
