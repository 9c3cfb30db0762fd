"""Record numbers of every module in a training step, to find where two devices or two versions begin to differ.

`record_steps` trains a model of random weights and returns its recording. `Probe(model)` watches a model that was built
with `WatchedKernels`. In a forward pass it records the output of each
module and each kernel, in the order of the computation; in a backward pass the gradients of the modules' outputs; at
the end of a step the gradients of the parameters. It keeps four numbers per tensor: the norm, the largest absolute
value, the count of values that are not finite, and a signature. `first_difference` compares two recordings.

The signature is the sum of all values, each with a fixed random sign. A rotation in the wrong direction, a permutation
or a transposed product keeps the norm, but changes the signature by about the norm.
"""

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanochat import scaling
from nanochat.attention import Segments
from nanochat.device import Device
from nanochat.gpt import GPT, GPTConfig
from nanochat.operators import TorchKernels
from nanochat.run.random_model import add_noise
from nanochat.train import make_optimizer, next_token_loss, train_step

# The operators of a device (nanochat/kernels/). They are functions, not modules, and the first suspects on a new card.
KERNELS = ("rms_norm", "add_rms_norm", "rotate", "offset_keys", "attention", "swiglu")


@dataclass(frozen=True)
class Reading:
    """The numbers of one tensor."""

    step: int
    phase: str  # "forward", "backward" (the gradient of a module's output) or "gradient" (of a parameter)
    name: str  # such as "blocks.3.attention.qkv", or "blocks.3.attention: rotate" for a kernel called there
    norm: float
    largest: float
    not_finite: int
    signature: float


@dataclass
class _Pending:
    """A reading that is still on the device."""

    phase: str
    name: str
    numbers: Tensor  # (4,)


class WatchedKernels:
    """A device's kernels for a model that a probe will watch; reports each call of KERNELS to the probe.

    A kernel that calls another one counts as one call: on another device it may be one operator.
    """

    def __init__(self, kernels: Any):
        self.kernels = kernels
        self.report: Callable[[str, Any], None] = lambda name, output: None

    row_attention: Any = TorchKernels.row_attention  # it calls offset_keys and attention here, where they are watched

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.kernels, name)
        if name not in KERNELS:
            return attribute

        def call(*inputs: Any, **options: Any) -> Any:
            output = attribute(*inputs, **options)
            self.report(name, output)
            return output

        return call


class Probe:
    """Watches a model from `__init__` on. Call `end_step` after each training step."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.readings: list[Reading] = []
        self._pending: list[_Pending] = []
        self._gradients: dict[str, Tensor] = {}  # numbers of each parameter's gradient, which the optimizer will drop
        self._step = 0
        self._inside: list[str] = []  # the modules whose forward is running, innermost last
        for name, module in model.named_modules():
            module.register_forward_pre_hook(functools.partial(self._enter, name))
            module.register_forward_hook(functools.partial(self._leave, name))
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(functools.partial(self._note_gradient, name))
        kernels = model.kernels
        if not isinstance(kernels, WatchedKernels):
            raise TypeError("a probe watches a model of WatchedKernels")
        kernels.report = self._leave_kernel

    def _enter(self, name: str, module: nn.Module, inputs: Any) -> None:
        self._inside.append(name)

    def _leave(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        self._inside.pop()
        self._watch(name or "model", output)

    def _leave_kernel(self, name: str, output: Any) -> None:
        self._watch(f"{self._inside[-1] if self._inside else 'model'}: {name}", output)

    def _watch(self, name: str, output: Any) -> None:
        # A module or kernel may return several tensors, as a value embedding does; the first one is its result.
        tensor = output[0] if isinstance(output, tuple) else output
        if not isinstance(tensor, Tensor):
            return
        self._record("forward", name, tensor)
        if tensor.requires_grad:
            tensor.register_hook(lambda grad: self._record("backward", name, grad))

    def _record(self, phase: str, name: str, tensor: Tensor) -> None:
        self._pending.append(_Pending(phase, name, _numbers(tensor.detach())))

    def _note_gradient(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._gradients[name] = _numbers(parameter.grad)

    def end_step(self) -> None:
        """Record the parameters' gradients, in the model's order, and read all numbers from the device at once."""
        for name, _ in self.model.named_parameters():
            if name in self._gradients:
                self._pending.append(_Pending("gradient", name, self._gradients[name]))
        self._gradients = {}
        if self._pending:
            table = torch.stack([pending.numbers for pending in self._pending]).tolist()
            for pending, (norm, largest, not_finite, signature) in zip(self._pending, table, strict=True):
                reading = Reading(self._step, pending.phase, pending.name, norm, largest, int(not_finite), signature)
                self.readings.append(reading)
        self._pending = []
        self._step += 1

    def to_json(self) -> list[dict[str, Any]]:
        """The readings, in the order in which they were taken."""
        return [asdict(reading) for reading in self.readings]


@torch.no_grad()
def _numbers(tensor: Tensor) -> Tensor:
    """Norm, largest absolute value, count of values that are not finite, signature: (4,) in fp32 on the device."""
    flat = tensor.float().flatten()
    finite = torch.isfinite(flat)
    flat = torch.where(finite, flat, 0.0)  # one NaN would make all four numbers NaN
    signature = flat @ _signs(flat.numel(), flat.device)
    return torch.stack((flat.norm(), flat.abs().amax(), (~finite).sum().float(), signature))


@functools.lru_cache(maxsize=64)
def _signs(count: int, device: torch.device) -> Tensor:
    """+1 and -1 in a fixed order that is the same on every device."""
    # Drawn on the host, because each device's generator draws different numbers.
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (count,), generator=generator, dtype=torch.int8)
    return (signs * 2 - 1).float().to(device)


def record_steps(
    device: Device, config: GPTConfig, *, rows: int, steps: int = 1, document_tokens: int = 0, seed: int = 0
) -> tuple[list[float], list[dict[str, Any]]]:
    """Take training steps; returns the loss and the readings of each. Weights and tokens are the same on every device.

    With `document_tokens` the rows are packed with documents of this many tokens.
    """
    # ---- a model and its optimizer, drawn on the host
    kernels: Any = WatchedKernels(device.kernels)
    model = GPT(config, kernels)
    model.init_weights(seed)
    generator = add_noise(model, seed + 1)
    model.to(device.torch_device)
    T = config.sequence_len
    optimizer = make_optimizer(model, scaling.rates(config, rows * T, 1000 * rows * T), device)

    # ---- the steps
    probe = Probe(model)
    losses = []
    for _ in range(steps):
        ids = device.to_device(torch.randint(config.vocab_size, (rows, T + 1), generator=generator))
        batch: list[Any] = [ids[:, :-1], ids[:, 1:].contiguous()]
        if document_tokens:
            numbers = (torch.arange(T) // document_tokens).expand(rows, T)
            batch.append(Segments.from_numbers(numbers).to(device.to_device))
        stats = train_step(model, optimizer, [batch], next_token_loss, device=device)
        probe.end_step()
        losses.append(stats.loss.item())
    return losses, probe.to_json()


def first_difference(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], tolerance: float) -> str | None:
    """One line about the first reading in which two recordings differ, or None if they agree.

    `tolerance` is relative to the larger norm of the two.
    """
    for a, b in zip(ours, theirs, strict=False):
        where = f"step {a['step']}, {a['phase']}, {a['name']}"
        place = ("step", "phase", "name")
        if [a[key] for key in place] != [b[key] for key in place]:
            return (
                f"{where}: the other file has {b['phase']} {b['name']} there, so the two models or runs are not alike"
            )
        if a["not_finite"] != b["not_finite"]:
            return f"{where}: {a['not_finite']} values are not finite, in the other file {b['not_finite']}"
        scale = max(a["norm"], b["norm"])
        for key in ("norm", "largest", "signature"):
            if abs(a[key] - b[key]) > tolerance * scale:
                return f"{where}: {key} {a[key]:.6g}, in the other file {b[key]:.6g} (norm {scale:.6g})"
    if len(ours) != len(theirs):
        return f"one file has {len(ours)} readings and the other {len(theirs)}: give both the same flags"
    return None
