"""LoRA: fine-tune a model through small matrices, its adapters, without changing its own weights.

A linear layer y = W x becomes y = W x + scale B A x, with A (rank, inputs) and B (outputs, rank). Only A and B are
trained, so only they have gradients, optimizer state and a place in the checkpoint. B starts at 0: at the first step
the model is the same as before, bit for bit. Source: Hu et al. 2021, LoRA.

    attach(model, lora)      put adapters into a GPT and freeze all else
    without_adapters(model)  the same model with its adapters switched off: the reference of DPO and GRPO
    merged_weights(model)    the weights of an equal model without adapters, for other samplers
    Adapters                 the adapters of a model as tensors, for merging into weights
    NewAdapters              gives a model new adapters while it is loaded

families/matrices.py lists the matrices that can have an adapter, by the names that Hugging Face and peft give them. If
one of our matrices stacks several of them, each has its own A and B, as it has there. The frozen weights are in the
dtype of the products; with `base_format` "nf4" the weights of the blocks have 4.5 bits (nf4.py).

Legend: r rank, I inputs, O outputs of a matrix.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor
from torch.autograd.function import once_differentiable

from nanochat.adapters.nf4 import NF4Experts, NF4Linear, dequantize, quantize
from nanochat.checkpoint_manager import Preparation
from nanochat.device import Device
from nanochat.experts.layer import ExpertLinear, grouped_product
from nanochat.families.matrices import matrices_of, stacked_matrices
from nanochat.gpt import GPT, SCALAR_HEAD, GPTConfig
from nanochat.ground.cli import UserError
from nanochat.ground.sharding import fill, local, whole
from nanochat.kernels.gradients import product
from nanochat.kernels.grouped import Groups


@dataclass(frozen=True)
class Lora:
    """The settings of all adapters of a model."""

    rank: int
    alpha: float = 32.0
    dropout: float = 0.0  # dropout on the input of A, in training
    targets: tuple[str, ...] = (
        "q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj",
        "gate_proj", "up_proj", "down_proj",
    )  # fmt: skip
    base_format: Literal["plain", "nf4"] = "plain"  # the frozen matrices of the blocks: as they are, or in 4 bits

    @property
    def scale(self) -> float:
        # alpha / rank: the best learning rate then hardly depends on the rank (source: Hu et al. 2021). At ranks of 64
        # and more the product B A grows only as sqrt(rank): an alpha times sqrt(rank) keeps its size (rsLoRA; source:
        # Kalajdzievski 2023, A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA).
        return self.alpha / self.rank


def choose_targets(text: str, rank: int, config: GPTConfig) -> tuple[str, ...]:
    """The targets that a flag names, "all" or names with commas.

    Raises UserError: when the model has no such matrix, or one that is too small for the rank.
    """
    rows: dict[str, int] = {}
    for parts in stacked_matrices(config).values():
        for name, count in parts.items():  # a shared expert may be wider than the others
            rows[name] = min(count, rows.get(name, count))
    names = tuple(name.strip() for name in text.split(","))
    if text == "all":  # two matrices have one row per head: adapters would be larger than they are
        names = tuple(name for name in rows if name not in ("in_proj_b", "in_proj_a"))
    inputs = {"o_proj": config.n_head * config.head_dim, "down_proj": config.mlp_width}
    inputs["out_proj"] = config.state_value_heads * config.state_value_dim
    for name in names:
        if name not in rows:
            raise UserError(f"--lora_targets {name}: this model has {', '.join(rows)}; name some of them, or all")
        shape = (rows[name], inputs.get(name, config.width))
        if rank > min(shape):
            sizes = f"{shape[0]} x {shape[1]}"
            raise UserError(f"--lora_rank {rank}: {name} of this model is {sizes}, so at most {min(shape)}")
    return names


# ---------------------------------------------------------------------- a model with adapters


class Adapter(nn.Module):
    """The A and B of one matrix, or of the same matrix in each expert of a block, one below the other."""

    def __init__(self, outputs: int, inputs: int, lora: Lora, device: torch.device, experts: int = 1):
        super().__init__()
        self.scale = lora.scale
        # In fp32, as all that is trained: an update is often smaller than bf16 resolves.
        self.lora_A = nn.Parameter(torch.empty(experts * lora.rank, inputs, device=device))
        self.lora_B = nn.Parameter(torch.empty(experts * outputs, lora.rank, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """x (..., I) -> scale B A x (..., O)."""
        inner = F.linear(x, self.lora_A.to(x.dtype)) * self.scale  # (..., r)
        return F.linear(inner, self.lora_B.to(x.dtype))


class LinearAdapters(nn.ModuleDict):
    """The adapters of a linear layer by the names of the matrices that are stacked in it; not each has one."""

    together: tuple[Tensor, Tensor] | None = None  # all A and all B, within `Attached.cast_weights`

    def __init__(self, parts: dict[str, int], inputs: int, lora: Lora, device: torch.device, experts: int = 1):
        targets = [name for name in parts if name in lora.targets]
        super().__init__({name: Adapter(parts[name], inputs, lora, device, experts) for name in targets})
        self.parts = parts
        self.lora = lora
        self.dropout = lora.dropout  # `GPT.recompute_activations` looks for it
        self.enabled = True  # False: without adapters, see `without_adapters`

    def forward(self, x: Tensor, y: Any) -> Any:
        """Add scale B A x to y, the layer's product of x (..., I): a tensor (..., O), or the two of a StackedLinear."""
        if self.together is not None:
            return self._add_together(*self.together, x, y)
        added = []
        for name, rows in self.parts.items():
            if name in self:
                added.append(self[name](self._dropped(x)))
            else:
                added.append(x.new_zeros(*x.shape[:-1], rows))
        if isinstance(y, tuple):
            return y[0] + torch.stack(added[:2]), y[1] + added[2]
        return y + torch.cat(added, dim=-1)

    def _dropped(self, x: Tensor) -> Tensor:
        # Dropout only where something is learned: evaluation and sampling run without gradients. Each matrix draws its
        # own mask, as in peft: with one mask for q, k and v the same inputs would be missing from all three.
        return F.dropout(x, self.dropout) if self.dropout and torch.is_grad_enabled() else x

    def _add_together(self, A: Tensor, B: Tensor, x: Tensor, y: Any) -> Any:
        """The same in two products, with A (R, I) and B (O, R) as `stack_adapters` returns them."""
        if self.dropout:
            inner = torch.cat([product(self._dropped(x), part) for part in A.split(self.lora.rank)], dim=-1)
        else:
            inner = product(x, A)  # (..., R)
        return _AddProduct.apply(inner, B, *y) if isinstance(y, tuple) else _AddProduct.apply(inner, B, y)


class ExpertAdapters(LinearAdapters):
    """The adapters of the experts of a block: each expert has its own A and B."""

    def __init__(self, parts: dict[str, int], linear: ExpertLinear, lora: Lora, device: torch.device):
        super().__init__(parts, linear.in_features, lora, device, linear.experts)
        self.kernels = linear.kernels

    def forward(self, x: Tensor, groups: Groups, y: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Add scale B A x to y, the experts' product of x (rows, I): (rows, O)."""
        added = []
        for name, rows in self.parts.items():
            if name in self:
                adapter: Any = self[name]
                inner = grouped_product(self.kernels, self._dropped(x), adapter.lora_A, groups)
                added.append(grouped_product(self.kernels, inner * self.lora.scale, adapter.lora_B, groups))
            else:
                added.append(x.new_zeros(len(x), rows))
        return y + torch.cat(added, dim=-1)


def _add_adapters(linear: Any, inputs: tuple[Any, ...], y: Any) -> Any:
    """y = W x becomes W x + scale B A x: a hook that runs after the layer, whichever class of layer it is."""
    return linear.adapters(*inputs, y) if linear.adapters.enabled else y


def attach(model: GPT, lora: Lora) -> None:
    """Freeze a model and put adapters into its blocks, in place. On the meta device they are filled later, by
    `init_adapters`."""
    model.requires_grad_(False)
    model.extension = Attached(lora)
    if model.scalar_head is not None:
        # It has nothing to adapt: it is trained, and saved, with the adapters.
        model.scalar_head.float().requires_grad_(True)
    for block in model.blocks:
        for path, parts in matrices_of(block, model.config).items():
            linear: Any = block.get_submodule(path)
            adapted: Any = None
            if set(parts) & set(lora.targets):
                if isinstance(linear, ExpertLinear):
                    adapted = ExpertAdapters(parts, linear, lora, model.device)
                else:
                    adapted = LinearAdapters(parts, linear.in_features, lora, model.device)
            if lora.base_format == "nf4":
                parent, _, name = path.rpartition(".")
                linear = NF4Experts(linear) if isinstance(linear, ExpertLinear) else NF4Linear(linear)
                setattr(block.get_submodule(parent), name, linear)
            if adapted is not None:
                linear.adapters = adapted
                linear.register_forward_hook(_add_adapters)


def adapters_in(model: nn.Module) -> list[LinearAdapters]:
    return [module for module in model.modules() if isinstance(module, LinearAdapters)]


@torch.no_grad()
def init_adapters(model: nn.Module, seed: int = 0) -> None:
    """A is random and B is 0: their product is 0, but the gradient of B is not. As in `GPT.init_weights`, A is the same
    on every device and layout."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, Adapter):
            bound = 1 / math.sqrt(module.lora_A.size(1))  # as nn.Linear draws its weights, and peft its A
            fill(module.lora_A, (torch.rand(module.lora_A.shape, generator=generator) * 2 - 1) * bound)
            local(module.lora_B).zero_()


class without_adapters:  # noqa: N801 (called as a function)
    """A model with its adapters switched off, as a function with the model's arguments, without a second model."""

    def __init__(self, model: Any):
        self.model = model

    def over(self, model: Any) -> "without_adapters":
        """The same over another form of the model, such as a compiled one."""
        return without_adapters(model)

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        found = adapters_in(self.model)
        for adapters in found:
            adapters.enabled = False
        try:
            return self.model(*inputs, **options)
        finally:
            for adapters in found:
                adapters.enabled = True


# ---------------------------------------------------------------------- the adapters of a layer in two products


# Adapters are many small operators: with 7 of them in each of 28 layers of Qwen3 0.6B, a step makes twice the launches
# of a step without. On devices where launches cost more than memory, all adapters of a layer run as one. Their As are
# stacked, R rows in all, and each B is a block of a matrix. For qkv with adapters on q and v:
#
#     x (..., I)  ->  A_q  ->  (..., R)  ->  B_q   0   ->  (..., O), added to the layer's own product
#                     A_v                     0    0
#                                             0   B_v
#
# Each A and B remains a separate parameter, also in checkpoints and in the optimizer.


def stack_adapters(layers: Sequence[Any], dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """For each of L LinearAdapters of the same shapes: the As as one (R, I), and the Bs as blocks of one (O, R), times
    the scale, in the dtype of the products."""
    # Each operator works on all layers at once. None of them saves a tensor for its backward pass, so the backward
    # passes of several micro-batches can go through one result.
    first = layers[0]
    r = first.lora.rank
    R = r * len(first)
    all_A = []
    all_B = []
    for part, rows in first.parts.items():
        if part in first:
            before = r * len(all_A)  # columns of earlier blocks
            all_A.append(torch.stack([layer[part].lora_A for layer in layers]))  # (L, r, I)
            B = torch.stack([layer[part].lora_B for layer in layers])  # (L, rows, r)
            all_B.append(F.pad(B, (before, R - r - before)))  # (L, rows, R)
        else:
            B = next(iter(first.values())).lora_B
            all_B.append(B.new_zeros(len(layers), rows, R))
    A = torch.cat(all_A, dim=1).to(dtype)
    B = _Scaled.apply(torch.cat(all_B, dim=1), first.lora.scale).to(dtype)
    return list(zip(A.unbind(), B.unbind(), strict=True))


class _Scaled(torch.autograd.Function):
    """x times a number. torch's own operator saves the number as a tensor."""

    @staticmethod
    def forward(ctx, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        return grads[0] * ctx.factor, None


class _AddProduct(torch.autograd.Function):
    """inner (..., R), B (O, R) and y (..., O) -> y + inner B^T, in one launch. Or y is the result of a StackedLinear:
    (2, ..., O / 3) and (..., O / 3)."""

    @staticmethod
    def forward(ctx, inner: Tensor, B: Tensor, *y: Tensor) -> Any:
        ctx.save_for_backward(inner, B)
        inner = inner.flatten(0, -2)  # (tokens, R)
        last = torch.addmm(y[-1].flatten(0, -2), inner, B[-y[-1].size(-1) :].T).view_as(y[-1])
        if len(y) == 1:
            return last
        pair = B[: 2 * y[0].size(-1)].unflatten(0, (2, -1))  # (2, O / 3, R)
        return torch.baddbmm(y[0].flatten(1, -2), inner.expand(2, -1, -1), pair.mT).view_as(y[0]), last

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        inner, B = ctx.saved_tensors
        grad = grads[0] if len(grads) == 1 else torch.cat((*grads[0], grads[1]), dim=-1)  # (..., O)
        return grad @ B, grad.flatten(0, -2).T @ inner.flatten(0, -2), *grads


# ---------------------------------------------------------------------- adapters as tensors


@dataclass(frozen=True)
class Adapters:
    """The adapters of a whole model: settings, and tensors by their parameters' names."""

    lora: Lora
    tensors: dict[str, Tensor]  # blocks.3.attention.qkv.adapters.q_proj.lora_A ...

    def merged(self, name: str, weight: Tensor, config: GPTConfig) -> Tensor:
        """A weight (O, I) of the base plus its adapters: W + scale B A, in fp32."""
        parts = parts_of(name, config)
        # Adapters are merged into the base that they were trained over: a base of 4 bits is rounded first.
        if parts and self.lora.base_format == "nf4":
            weight = dequantize(*quantize(weight), weight.shape, torch.float32)
        merged = weight.float().clone()
        start = 0
        for target, rows in parts.items():
            adapter = f"{name.removesuffix('weight')}adapters.{target}"
            if f"{adapter}.lora_A" in self.tensors:
                A = self.tensors[f"{adapter}.lora_A"].float().split(self.lora.rank)
                B = self.tensors[f"{adapter}.lora_B"].float().split(rows)
                # The matrices of experts are stacked, one pair of A and B for each expert.
                for target_rows, its_A, its_B in zip(merged.chunk(len(A)), A, B, strict=True):
                    target_rows[start : start + rows].addmm_(its_B, its_A, alpha=self.lora.scale)
            start += rows
        return merged

    def require_fit(self, config: GPTConfig, where: str) -> None:
        """Raises UserError: when they are not of a model of this shape."""
        with torch.device("meta"):
            model = GPT(config)
            attach(model, self.lora)
        expected = {name: list(p.shape) for name, p in model.named_parameters() if p.requires_grad}
        found = {name: list(tensor.shape) for name, tensor in self.tensors.items()}
        if SCALAR_HEAD not in found:
            expected.pop(SCALAR_HEAD, None)  # adapters of an earlier stage have none
        for name in sorted({*expected, *found}):
            if expected.get(name) != found.get(name):
                raise UserError(
                    f"{where} holds adapters for another model: {name} is {found.get(name, 'missing')}, this model's "
                    f"is {expected.get(name, 'missing')}; name the base that they were trained on"
                )


@torch.no_grad()
def merged_weights(model: GPT) -> Iterator[tuple[str, Tensor]]:
    """A model's weights by name, one at a time, whole on each rank and with its adapters merged in fp32. All ranks call
    it together."""
    parameters = dict(model.named_parameters())
    if not isinstance(model.extension, Attached):
        yield from ((name, whole(parameter)) for name, parameter in parameters.items())
        return
    tensors = {name: whole(parameters.pop(name)) for name in list(parameters) if ".adapters." in name}
    adapters = Adapters(model.extension.lora, tensors)
    for name, parameter in parameters.items():
        yield name, adapters.merged(name, whole(parameter), model.config)
    for path, layer in model.named_modules():
        if isinstance(layer, NF4Linear):
            # To round a weight that is rounded already changes nothing: a block's largest value is one of the table.
            yield f"{path}.weight", adapters.merged(f"{path}.weight", layer.dequantized(), model.config)


def parts_of(name: str, config: GPTConfig) -> dict[str, int]:
    """The matrices that a parameter is stacked from; none where it can have no adapters."""
    matrix = re.fullmatch(r"blocks\.\d+\.(.+)\.weight", name)
    return stacked_matrices(config).get(matrix[1], {}) if matrix else {}


def read_adapters(path: Path, entry: dict[str, Any]) -> Adapters:
    """The adapters of a checkpoint, from its file and their settings in the meta data (`Attached.facts`).

    Raises ValueError or TypeError: when these are not settings of this class.
    """
    settings = {name: entry[name] for name in Lora.__dataclass_fields__}
    lora = Lora(**{**settings, "targets": tuple(entry["targets"])})
    is_valid = isinstance(lora.rank, int) and lora.rank > 0 and lora.base_format in ("plain", "nf4")
    if not is_valid or not lora.targets or set(lora.targets) - set(Lora.targets) or not math.isfinite(lora.alpha):
        raise ValueError("its adapters' settings are not ours")
    with safe_open(path, framework="pt") as file:
        return Adapters(lora, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118


class Attached:
    """The adapters of a model behind its `extension`."""

    def __init__(self, lora: Lora):
        self.lora = lora

    def add_to(self, model: GPT) -> None:
        """Add the same to another model, which may be on the meta device."""
        attach(model, self.lora)

    def without(self, model: Any) -> "without_adapters":
        """The model without adapters, as a function: the reference of DPO and GRPO."""
        return without_adapters(model)

    @contextlib.contextmanager
    def cast_weights(self, model: GPT, dtype: torch.dtype) -> Iterator[None]:
        """A context in which the adapters' products share one cast of all their weights."""
        found: list[LinearAdapters] = []
        paths_of = {block: matrices_of(block, model.config) for block in model.blocks}
        for path in stacked_matrices(model.config):
            layers = [block.get_submodule(path) for block, paths in paths_of.items() if path in paths]
            alike: list[Any] = [layer.adapters for layer in layers if hasattr(layer, "adapters")]
            alike = [adapters for adapters in alike if not isinstance(adapters, ExpertAdapters)]
            found += alike
            for adapters, together in zip(alike, stack_adapters(alike, dtype) if alike else [], strict=True):
                adapters.together = together
        try:
            yield
        finally:
            for adapters in found:
                adapters.together = None

    def facts(self) -> dict[str, Any]:
        """The settings for a checkpoint's meta data."""
        return {**asdict(self.lora), "targets": list(self.lora.targets)}

    def describe(self, model: GPT) -> str:
        """For the log: the number of trained parameters, and the size of the frozen base; a hint where a sharded base
        in the dtype of the products would take less than a whole one in 4 bits."""
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        frozen = sum(local(p).nbytes for p in model.parameters() if not p.requires_grad)
        quantized = [layer for layer in model.modules() if isinstance(layer, NF4Linear)]
        packed = sum(layer.codes.nbytes + layer.factors.nbytes for layer in quantized)
        table = model.embedding.weight
        dtype = str(table.dtype).removeprefix("torch.")
        base = "4-bit NF4" if quantized else dtype
        line = f"adapters of rank {self.lora.rank}: {trained:,} parameters; "
        line += f"frozen base: {frozen + packed:,} bytes, {base}"
        share = local(table).numel() / table.numel()  # the part of a sharded table that this process holds
        plain = round(sum(layer.in_features * layer.out_features for layer in quantized) * table.element_size() * share)
        if plain < packed:
            line += "\nhint: fsdp does not shard 4-bit matrices: without --lora_base nf4 they take "
            line += f"{plain:,} bytes in {dtype} instead of {packed:,} on each process"
        return line


class NewAdapters(Preparation):
    """Gives a model that is loaded new adapters to train, drawn by a seed. All else is frozen, in the dtype of the
    products. `choose` makes their settings for the model's shape."""

    def __init__(self, choose: Callable[[GPTConfig], Lora], seed: int = 0):
        self.choose = choose
        self.seed = seed

    @classmethod
    def from_flags(cls, flags: Any, seed: int) -> "NewAdapters":
        """The adapters that the --lora flags describe.

        Raises UserError: when the model is loaded and cannot have them.
        """

        def choose(config: GPTConfig) -> Lora:
            targets = choose_targets(flags.lora_targets, flags.lora_rank, config)
            alpha, dropout, base = flags.lora_alpha, flags.lora_dropout, flags.lora_base
            return Lora(flags.lora_rank, alpha, dropout, targets, base_format=base)

        return cls(choose, seed)

    def reshape(self, model: GPT, device: Device) -> None:
        model.to(device.dtype)
        attach(model, self.choose(model.config))

    def fill(self, model: GPT) -> None:
        init_adapters(model, self.seed)
