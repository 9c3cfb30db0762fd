"""What every module and operator returns in one training step, to find where two devices begin to differ."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nanochat import scaling
from nanochat.attention import Segments
from nanochat.device import Device
from nanochat.gpt import GPT, GPTConfig
from nanochat.train import make_optimizer, next_token_loss, train_step

# The operators of a device (nanochat/kernels/). They are functions, not modules, and the first suspects on a new card.
WATCHED = ("rms_norm", "add_rms_norm", "rotate", "attention", "swiglu")
# Relative to a tensor's norm. In bf16 the gradient of a single number, such as a scale, is off by up to 5% on a
# simulated NPU; a wrong operator changes a tensor by about its norm.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.15}
Reading = tuple[str, Tensor]  # a place such as "forward blocks.1.attention: rotate", and its tensor on the host


class WatchedKernels:
    """A device's kernels, which report each call of WATCHED. One that calls another counts as one call: on another
    device it may be one operator."""

    def __init__(self, kernels: Any):
        self.kernels = kernels
        self.report: Callable[[str, Any], None] = lambda name, output: None

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.kernels, name)
        if name not in WATCHED:
            return attribute

        def call(*inputs: Any, **options: Any) -> Any:
            output = attribute(*inputs, **options)
            self.report(name, output)
            return output

        return call


class Recording:
    """Records a model of WatchedKernels: outputs in the order of the computation, then their gradients, then the
    parameters' gradients."""

    def __init__(self, model: nn.Module):
        self.readings: list[Reading] = []
        self._inside: list[str] = []  # the modules whose forward is running, innermost last
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda module, inputs, name=name: self._inside.append(name))
            module.register_forward_hook(lambda module, inputs, output: self._watch(self._inside.pop(), output))
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda parameter, name=name: self._add(f"gradient {name}", parameter.grad)
            )
        kernels: Any = model.kernels
        kernels.report = lambda name, output: self._watch(f"{self._inside[-1]}: {name}", output)

    def _watch(self, name: str, output: Any) -> None:
        # A module or kernel may return several tensors, as a value embedding does; the first one is its result.
        tensor = output[0] if isinstance(output, tuple) else output
        if isinstance(tensor, Tensor):
            self._add(f"forward {name}", tensor)
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: self._add(f"backward {name}", grad))

    def _add(self, place: str, tensor: Any) -> None:
        self.readings.append((place, tensor.detach().float().cpu().clone()))


def add_noise(model: GPT, seed: int) -> torch.Generator:
    """Add noise to every weight of a model on the host; returns the generator, to draw further values.

    A new model's output projections are zeros: gradients could not pass through them, and no layer would change a
    logit.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * (0.5 / model.config.width**0.5)
    return generator


def make_step(
    device: Device, config: GPTConfig, *, rows: int, document_tokens: int = 0, kernels: Any = None
) -> tuple[GPT, Callable[[], object]]:
    """A model, and a call that takes a training step of it. Weights and tokens are the same on every device.

    With `document_tokens` the rows are packed with documents of this many tokens. The last of experts gets no token.
    """
    model = GPT(config, kernels or device.kernels)
    model.init_weights(0)
    generator = add_noise(model, 1)
    for name, parameter in model.named_parameters():
        if name.endswith("router.bias"):
            parameter.data[-1] = -5
    model.to(device.torch_device)
    T = config.sequence_len
    optimizer = make_optimizer(model, scaling.rates(config, rows * T, 1000 * rows * T), device)
    ids = device.to_device(torch.randint(config.vocab_size, (rows, T + 1), generator=generator))
    batch: list[Any] = [ids[:, :-1], ids[:, 1:].contiguous()]
    if document_tokens:
        numbers = (torch.arange(T) // document_tokens).expand(rows, T)
        batch.append(Segments.from_numbers(numbers).to(device.to_device))
    return model, lambda: train_step(model, optimizer, [batch], next_token_loss, device=device)


def record_step(device: Device, config: GPTConfig, **options: int) -> list[Reading]:
    """Take a training step of `make_step`."""
    model, take_step = make_step(device, config, kernels=WatchedKernels(device.kernels), **options)
    recording = Recording(model)
    take_step()
    return recording.readings


def differences(ours: list[Reading], theirs: list[Reading]) -> list[tuple[str, float]]:
    """How far each tensor is from the other recording's, as a share of its norm, in the order of the computation."""
    # Devices may add up gradients of parameters at other moments of the backward pass.
    others: dict[str, list[Tensor]] = {}
    for place, tensor in theirs:
        others.setdefault(place, []).append(tensor)
    found = []
    for place, tensor in ours:
        assert others.get(place), f"{place}: only in one of the two recordings"
        other = others[place].pop(0)
        scale = max(float(tensor.norm()), float(other.norm()), 1e-30)
        found.append((place, float((tensor - other).norm()) / scale))
    assert not any(others.values()), "one recording has more tensors than the other"
    return found


def first_difference(found: list[tuple[str, float]], tolerance: float) -> str:
    """The first tensor that is farther away than `tolerance`, or ""."""
    for place, error in found:
        if not error <= tolerance:  # NaN is a difference too
            return f"{place}: {error:.2e} of the norm, more than {tolerance:g}"
    return ""
