"""The operators that the model calls, and what each computes.

kernels/gradients.py has the operators that devices share, with written-out gradients. cpu.py, cuda.py and npu.py next
to it replace what their device does better. `device.kernels` chooses once, when the model is built. A mask is True
where a query may attend to a key.

Legend: B batch, T query tokens, S keys, H query heads, K key/value heads, D head dim, C width, V vocab.
"""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat.attention import Segments

# The format of the weights with which the engine decodes; auto: the dtype of the products.
WeightFormat = Literal["auto", "fp16"]

SMALLEST_CHUNK = 256  # the smallest number of tokens whose logits are computed at a time


@dataclass(frozen=True)
class AdamWUpdate:
    """One step of parameters that share their betas and their decay. Each list has one entry per parameter."""

    weights: list[Tensor]
    grads: list[Tensor]  # sums over the targets
    first_moment: Tensor  # flat: the elements of all parameters in a row
    second_moment: Tensor  # flat, likewise
    learning_rates: list[float]
    eps: list[float]
    betas: tuple[float, float]
    weight_decay: float


def split_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of consecutive parts of a flat tensor, in the shapes of the tensors."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


class TorchKernels:
    name = "torch"  # for the log
    device_type: str | None = None  # the only kind of device that these run on; None: any
    # FLOPs of a run from which torch.compile pays (kernels/run_flags.py); infinite: only when --compile requests it.
    compiled_flops = 0.0
    # Logits that the fused loss holds at a time, 256 MiB in fp32: an accelerator wants few and large launches.
    loss_chunk_elements = 1 << 26
    # Logits that it passes over at a time; None: all that it holds.
    loss_slice_elements: int | None = None
    # Whether the steps between the head's products are in fp32 in training, or in the dtype of the products. In bf16
    # they move half of the bytes, and losses differ by 0.004, as between bf16 and fp32 (depth 2, 2026-11-26).
    loss_in_fp32 = True
    # top_p looks at this many of the likeliest tokens before it sorts them all; 0: it sorts them all at once.
    top_p_first = 0
    # Whether attention to a cache would copy keys that lie apart. The cache is then laid out for as many tokens as its
    # rows have, by powers of two. False: attention reads the filled part of a cache that is laid out for its capacity.
    reads_whole_cache = False

    def __init__(self, dtype: torch.dtype = torch.float32):
        # Matrix products and the residual stream are in this dtype. Weights stay in fp32, and norms, softmax and
        # losses compute in fp32.
        self.dtype = dtype

    def __str__(self) -> str:
        return self.name

    # ------------------------------------------------------------------ blocks

    def product(self, x: Tensor, weight: Tensor, cast: Tensor | None = None) -> Tensor:
        """x (..., inputs), weight (outputs, inputs) -> x @ weight.T (..., outputs) in the dtype of x. `cast` is the
        weight in that dtype, if it exists already."""
        raise NotImplementedError

    def cast_weights(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """A context in which a GPT's products read weights that were cast together, if that is faster."""
        return contextlib.nullcontext()

    def mix(self, x: Tensor, first: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """a x + b first, where a and b have one element each, and `first` again, for the next layer."""
        raise NotImplementedError

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) over the last axis, times the gain if there is one."""
        return F.rms_norm(x, (x.size(-1),), weight, eps)

    def add_rms_norm(self, x: Tensor, added: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        """The norm of x + added, and the sum itself."""
        x = x + added
        return self.rms_norm(x, weight, eps), x

    def relu_squared(self, x: Tensor) -> Tensor:
        """relu(x)^2."""
        raise NotImplementedError

    def swiglu(self, x: Tensor) -> Tensor:
        """silu(gate) * up, where x (..., 2 M) is gate and up next to each other -> (..., M)."""
        raise NotImplementedError

    def experts(self, config: Any) -> Any:
        """The module that takes the place of the MLP in a model with experts."""
        raise NotImplementedError

    def state_layer(self, config: Any, layer: int) -> Any:
        """The module that takes the place of attention in a layer D (`GPTConfig.window_pattern`)."""
        raise NotImplementedError

    def row_states(self, config: Any, rows: int, device: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The memory that a cache of this many rows holds for all such layers, (layers, rows, ...) each."""
        return ()

    # ------------------------------------------------------------------ attention

    def qkv_linear(self, has_equal_heads: bool) -> Any:
        """The class of the linear layer that computes queries, keys and values; None: the model's `Linear`."""
        raise NotImplementedError

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate each pair (x[i], x[i + D/2]) of x (B, T, heads, D) by its position's angle; cos, sin (T, 1, D):
        (low, high) -> (low cos - high sin, high cos + low sin)."""
        raise NotImplementedError

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int = 0, segments: Segments | None = None
    ) -> Tensor:
        """Causal attention over whole rows: q (B, T, H, D), k and v (B, T, K, D) -> (B, T, H, D).

        H is a multiple of K. With `segments` the documents of a row do not attend to each other.
        """
        raise NotImplementedError

    def prepare_mask(self, mask: Tensor) -> Tensor:
        """The mask in the form for `cached_attention`; called once per forward pass and window, not once per layer."""
        raise NotImplementedError

    def cached_attention(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor) -> Tensor:
        """Attention to a cache: q (B, T, H, D), k and v (B, K, S, D), prepared mask (B, 1, T, S) -> (B, T, H, D)."""
        grouped = q.size(2) != k.size(1)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)
        return out.transpose(1, 2)

    def recorded_attention(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor) -> Tensor:
        """`cached_attention` for a pass whose launches are recorded."""
        raise NotImplementedError

    # ------------------------------------------------------------------ loss and optimizer

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
            # The fused kernel takes one learning rate and one epsilon: it runs once for each pair.
            pairs = list(zip(update.learning_rates, update.eps, strict=True))
            for rate, eps in dict.fromkeys(pairs):
                alike = [place for place, pair in enumerate(pairs) if pair == (rate, eps)]
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
                    eps=eps,
                    amsgrad=False,
                    maximize=False,
                    grad_scale=targets,
                    found_inf=1 - ok,
                )

    # ------------------------------------------------------------------ decoding

    def running_sums(self, rows: Tensor) -> Tensor:
        """The cumulative sums of each row (B, V)."""
        try:
            return rows.cumsum(dim=-1)
        except RuntimeError:  # --deterministic: torch refuses it on some devices
            if not torch.are_deterministic_algorithms_enabled():
                raise
        # Only their kernel for a single row sums in a changing order, but torch refuses both kernels.
        torch.use_deterministic_algorithms(False)
        try:
            return rows.expand(2, -1).cumsum(dim=-1)[:1] if rows.size(0) == 1 else rows.cumsum(dim=-1)
        finally:
            torch.use_deterministic_algorithms(True)

    def packs(self, dtype: torch.dtype) -> bool:
        """Whether `pack` makes decoding in this dtype faster here."""
        raise NotImplementedError

    def pack(self, model: Any, weights: WeightFormat = "auto", may_round: bool = False) -> Any:
        """Lay out a GPT's weights for decoding, in place. Only where `packs`, or to make them smaller.

        With `may_round` and "auto" matrices may be in fp16, where that is faster.

        Raises UserError: when products with such weights do not exist here.
        """
        raise NotImplementedError
