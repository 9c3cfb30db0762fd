"""LoRA: fine-tune a model through small matrices, its adapters, while its own weights stay as they are.

A linear layer y = W x becomes y = W x + scale B A x, with A (rank, inputs) and B (outputs, rank). Only A and B are
trained, so only they have gradients, optimizer state and a place in the checkpoint. B starts at 0: at the first step
the model is what it was before, bit for bit. Source: Hu et al. 2021, LoRA.

    attach(model, lora)      put adapters into a GPT and freeze all else
    without_adapters(model)  the same model with its adapters switched off: the reference of DPO and GRPO
    Adapters                 adapters in files: ours, or a folder of the library `peft`; merged into weights

The frozen weights are in the dtype of the products. With `base_format` "nf4" those of the blocks take 4.5 bits: QLoRA.

Legend: N tokens, r rank, I inputs, O outputs of a layer.
"""

import contextlib
import functools
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

from nanochat.gpt import GPT, GPTConfig, Linear, StackedLinear
from nanochat.parallel.fsdp import fill, held_rows, local
from nanochat.shell.cli import UserError
from nanochat.shell.untrusted import read_json, require_file

# The matrices that can have an adapter, by the names that Hugging Face and peft give them. Here q, k and v are rows of
# one matrix, and gate and up of another. Each part still has an A and a B of its own, as it has there.
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MAX_BASES = 16  # adapters of adapters of adapters ...


@dataclass(frozen=True)
class Lora:
    """The settings of all adapters of a model."""

    rank: int
    alpha: float = 32.0
    dropout: float = 0.0  # of what A reads, in training
    targets: tuple[str, ...] = TARGETS
    rank_stabilized: bool = False
    base_format: Literal["plain", "nf4"] = "plain"  # the frozen matrices of the blocks: as they are, or in 4 bits

    @property
    def scale(self) -> float:
        # alpha / rank: the best learning rate then hardly depends on the rank (source: Hu et al. 2021). At ranks of 64
        # and more the product B A grows only as sqrt(rank), and rsLoRA's alpha / sqrt(rank) keeps its size (source:
        # Kalajdzievski 2023, A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA).
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


def parts_of(config: GPTConfig) -> dict[str, list[tuple[str, int]]]:
    """The matrices of a block, each with its parts and their rows in the order in which they lie."""
    D = config.head_dim
    kv = config.n_kv_head * D
    widths = [("up_proj", config.mlp_width)]
    if config.mlp == "swiglu":
        widths = [("gate_proj", config.mlp_width), *widths]
    return {
        "attention.qkv": [("q_proj", config.n_head * D), ("k_proj", kv), ("v_proj", kv)],
        "attention.output": [("o_proj", config.width)],
        "mlp.input": widths,
        "mlp.output": [("down_proj", config.width)],
    }


def choose_targets(text: str, rank: int, config: GPTConfig) -> tuple[str, ...]:
    """The targets that a flag names, "all" or names with commas.

    Raises UserError: when the model has no such matrix, or one that is too small for the rank.
    """
    rows = {name: count for parts in parts_of(config).values() for name, count in parts}
    names = tuple(rows) if text == "all" else tuple(name.strip() for name in text.split(","))
    inputs = {"o_proj": config.n_head * config.head_dim, "down_proj": config.mlp_width}
    for name in names:
        if name not in rows:
            raise UserError(f"--lora_targets {name}: this model has {', '.join(rows)}; name some of them, or all")
        shape = (rows[name], inputs.get(name, config.width))
        if rank > min(shape):
            sizes = f"{shape[0]} x {shape[1]}"
            raise UserError(f"--lora_rank {rank}: {name} of this model is {sizes}, so at most {min(shape)}")
    return names


# ---------------------------------------------------------------------- 4 bits for a weight

# NF4 (source: Dettmers et al. 2023, QLoRA, appendix E). Trained weights are about normal, so its 16 values are
# quantiles of a normal distribution: dense around 0, where most weights are. One of them is 0 itself. A block of 64
# weights shares one factor, its largest absolute value: an outlier spoils the resolution of its own block alone.
#
#     weights            0.030   -0.012    0.001   -0.060      their largest is 0.060
#     divided by it      0.500   -0.200    0.017   -1.000
#     nearest value      0.441   -0.185    0.000   -1.000      the values number 12, 5, 7 and 0
#     read back          0.026   -0.011    0.000   -0.060
#
# The widest gap, from -1 to -0.70, bounds the error: at most 0.152 of the block's largest weight. Of normal weights
# the error is 9.2% of their root mean square (docs/measurements.md).
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
NF4_BLOCK = 64
NF4_PIECE = 1 << 18  # blocks that are read back at a time: 17 million weights, whose fp32 values take 67 MB


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight of n elements in 4 bits each: codes (n / 64, 32) in uint8, two to a byte, and factors (n / 64,)."""
    flat = weight.detach().float().flatten()
    blocks = F.pad(flat, (0, -len(flat) % NF4_BLOCK)).view(-1, NF4_BLOCK)
    factors = blocks.abs().amax(dim=1)
    values = torch.tensor(NF4, device=weight.device)
    # The nearest value: count the midpoints between neighbours that lie below.
    midpoints = (values[1:] + values[:-1]) / 2
    scaled = blocks / factors.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    codes = torch.bucketize(scaled, midpoints, out_int32=True).to(torch.uint8)
    return codes[:, 0::2] * 16 + codes[:, 1::2], factors


def dequantize(codes: Tensor, factors: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The weight that `quantize` has rounded, in its shape."""
    # A byte is looked up as a pair of values in a table of 256: a plain embedding, which every device has, in place of
    # shifts and masks of single bits.
    table = _pairs(codes.device)
    out = torch.empty(len(codes), NF4_BLOCK, dtype=dtype, device=codes.device)
    pieces = zip(out.split(NF4_PIECE), codes.split(NF4_PIECE), factors.split(NF4_PIECE), strict=True)
    for target, packed, factor in pieces:
        values = F.embedding(packed.int(), table).flatten(1)  # (blocks, 32, 2) -> (blocks, 64)
        target.copy_(values.mul_(factor[:, None]))
    return out.flatten()[: math.prod(shape)].view(*shape)


@functools.cache
def _pairs(device: torch.device) -> Tensor:
    """(256, 2): the two values of each byte."""
    with torch.inference_mode(False):  # the first call may be in inference mode; training must be able to use it too
        values = torch.tensor(NF4)
        return torch.stack((values.repeat_interleave(16), values.repeat(16)), dim=1).to(device)


# ---------------------------------------------------------------------- a layer with adapters


class FrozenLinear(nn.Module):
    """A linear layer of a GPT, in its place and under its names, that is not trained; the targets in it have adapters.

    Its one or two adapter parameters are fused as the matrix is: `lora_A` (targets x r, I) has the A of each target,
    `lora_B` (O of the targets, r) their B, one below the other.
    """

    codes: Tensor
    factors: Tensor

    def __init__(self, linear: Linear, parts: Sequence[tuple[str, int]], lora: Lora):
        super().__init__()
        self.lora = lora
        self.dropout = lora.dropout if any(name in lora.targets for name, _ in parts) else 0.0
        self.out_features, self.in_features = linear.weight.shape
        self.is_stacked = isinstance(linear, StackedLinear)
        self.is_quantized = lora.base_format == "nf4"
        self.enabled = True  # False: without adapters, see `without_adapters`
        self.bias = linear.bias
        device = linear.weight.device
        self.weight: nn.Parameter | None = None
        if self.is_quantized:
            # Buffers, which no rank shards: 4 bits of a weight are fewer than the 16 of a half in bf16.
            blocks = math.ceil(linear.weight.numel() / NF4_BLOCK)
            codes = torch.empty(blocks, NF4_BLOCK // 2, dtype=torch.uint8, device=device)
            self.register_buffer("codes", codes, persistent=False)
            self.register_buffer("factors", torch.empty(blocks, device=device), persistent=False)
        else:
            self.weight = linear.weight  # pyright: ignore[reportAttributeAccessIssue]
        # The rows of the product that have an adapter.
        self.rows: list[tuple[int, int]] = []
        start = 0
        for name, count in parts:
            if name in lora.targets:
                self.rows.append((start, start + count))
            start += count
        self.lora_A: nn.Parameter | None = None
        self.lora_B: nn.Parameter | None = None
        if self.rows:
            # In fp32, as all that is trained: an update is often smaller than bf16 resolves.
            inputs = torch.empty(len(self.rows) * lora.rank, self.in_features, device=device)
            outputs = torch.empty(sum(stop - start for start, stop in self.rows), lora.rank, device=device)
            self.lora_A = nn.Parameter(inputs)
            self.lora_B = nn.Parameter(outputs)

    def forward(self, x: Tensor) -> Any:
        """x (..., I) -> (..., O), or what a StackedLinear returns."""
        A = self.lora_A if self.enabled else None
        # Dropout only where something is learned: evaluation and sampling run without gradients.
        dropped = None
        if A is not None and self.dropout and torch.is_grad_enabled():
            dropped = F.dropout(x, self.dropout)
        weight, factors = (self.codes, self.factors) if self.is_quantized else (self.weight, None)
        shape = (self.out_features, self.in_features)
        y = _FrozenProduct.apply(
            x, dropped, weight, factors, A, self.lora_B, shape, self.rows, self.lora.scale, self.is_stacked
        )
        return y if self.bias is None else y + self.bias.to(x.dtype)

    @torch.no_grad()
    def set_weight(self, weight: Tensor) -> None:
        """Take over a whole weight (O, I); of a sharded one, this rank's rows."""
        if self.weight is not None:
            fill(self.weight, weight)
            return
        codes, factors = quantize(weight)
        self.codes.copy_(codes)
        self.factors.copy_(factors)

    @torch.no_grad()
    def init_adapters(self, generator: torch.Generator) -> None:
        """A is random and B is 0: their product is 0, but the gradient of B is not."""
        if self.lora_A is None or self.lora_B is None:
            return
        bound = 1 / math.sqrt(self.in_features)  # as nn.Linear draws its weights, and peft its A
        fill(self.lora_A, (torch.rand(self.lora_A.shape, generator=generator) * 2 - 1) * bound)
        local(self.lora_B).zero_()


class _FrozenProduct(torch.autograd.Function):
    """x W^T, plus scale x A^T B^T in the rows that have an adapter.

    For backward it keeps x (none without adapters) and x A^T, but no copy of W: one in 4 bits is read back once more.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, dropped: Tensor | None, weight: Tensor, factors: Tensor | None, A: Tensor | None,
        B: Tensor | None, shape: tuple[int, int], rows: list[tuple[int, int]], scale: float, is_stacked: bool,
    ) -> Any:  # fmt: skip
        ctx.plan = (shape, rows, scale, is_stacked)
        matrix = _matrix(weight, factors, shape, x.dtype)
        # The same products as in gpt.py, so that no bit changes where B is 0.
        if is_stacked:
            y = x.flatten(0, -2)[None] @ matrix.unflatten(0, (3, -1)).mT  # (3, N, O / 3)
        else:
            y = F.linear(x, matrix).flatten(0, -2)  # (N, O)
        read = None
        inner = None
        if A is not None and B is not None:
            # One product reads for all targets; then each writes into its own rows of the result.
            read = x if dropped is None else dropped
            inner = F.linear(read.flatten(0, -2), A.to(x.dtype)).mul_(scale)  # (N, targets x r)
            pairs = zip(_parts(y, rows, is_stacked), inner.split(B.size(1), dim=1), _rows(B, rows), strict=True)
            for target, its_inner, its_B in pairs:
                target.addmm_(its_inner, its_B.to(x.dtype).T)
        ctx.save_for_backward(read, inner, weight, factors, A, B)
        ctx.was_dropped = dropped is not None
        if is_stacked:
            y = y.unflatten(1, x.shape[:-1])
            return y[:2], y[2]
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        shape, rows, scale, is_stacked = ctx.plan
        read, inner, weight, factors, A, B = ctx.saved_tensors
        grad = torch.cat((*grads[0], grads[1]), dim=-1) if is_stacked else grads[0]
        leading = grad.shape[:-1]
        grad = grad.flatten(0, -2)  # (N, O)
        grad_x = None
        grad_dropped = None
        grad_A = None
        grad_B = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ _matrix(weight, factors, shape, grad.dtype)  # (N, I)
        if A is not None:
            # y = scale B A x, so with g = dy: A has the gradient (scale g B)^T x, B has g^T (scale x A^T), and x has
            # (scale g B) A.
            grad_rows = [grad[:, start:stop] for start, stop in rows]
            pairs = zip(grad_rows, _rows(B, rows), strict=True)
            grad_inner = torch.cat([g @ its_B.to(g.dtype) for g, its_B in pairs], dim=1).mul_(scale)  # (N, targets x r)
            grad_A = (grad_inner.T @ read.flatten(0, -2)).to(A.dtype)
            pairs = zip(grad_rows, inner.split(B.size(1), dim=1), strict=True)
            grad_B = torch.cat([g.T @ its_inner for g, its_inner in pairs]).to(B.dtype)
            if ctx.was_dropped:
                grad_dropped = (grad_inner @ A.to(grad.dtype)).view(*leading, -1)
            elif grad_x is not None:
                grad_x.addmm_(grad_inner, A.to(grad.dtype))
        if grad_x is not None:
            grad_x = grad_x.view(*leading, -1)
        return grad_x, grad_dropped, None, None, grad_A, grad_B, None, None, None, None


def _matrix(weight: Tensor, factors: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return weight.to(dtype) if factors is None else dequantize(weight, factors, shape, dtype)


def _parts(y: Tensor, rows: Sequence[tuple[int, int]], is_stacked: bool) -> list[Tensor]:
    """Views (N, O of the part) of a product's result: planes of (3, N, O / 3), or columns of (N, O)."""
    if is_stacked:
        return [y[start // y.size(2)] for start, _ in rows]
    return [y[:, start:stop] for start, stop in rows]


def _rows(B: Tensor, rows: Sequence[tuple[int, int]]) -> Sequence[Tensor]:
    """The B of each target, (O of the target, r)."""
    return B.split([stop - start for start, stop in rows])


# ---------------------------------------------------------------------- a model with adapters


def attach(model: GPT, lora: Lora) -> None:
    """Freeze a model and put adapters into its blocks, in place. The model may still be on the meta device: then
    `load_base` and `init_adapters` fill it."""
    model.requires_grad_(False)
    parts = parts_of(model.config)
    for block in model.blocks:
        for path, its_parts in parts.items():
            parent_name, _, name = path.rpartition(".")
            parent = block.get_submodule(parent_name)
            linear = getattr(parent, name)
            assert isinstance(linear, Linear), "the model has adapters already"
            setattr(parent, name, FrozenLinear(linear, its_parts, lora))


def frozen_layers(model: nn.Module) -> list[FrozenLinear]:
    return [module for module in model.modules() if isinstance(module, FrozenLinear)]


def settings_of(model: nn.Module) -> Lora | None:
    """The settings of a model's adapters; None: it has none."""
    layers = frozen_layers(model)
    return layers[0].lora if layers else None


def init_adapters(model: GPT, seed: int = 0) -> None:
    """Draw A, and set B to 0: the same on every device and layout, as in `GPT.init_weights`."""
    generator = torch.Generator().manual_seed(seed)
    for layer in frozen_layers(model):
        layer.init_adapters(generator)


class without_adapters:  # noqa: N801 (called as a function)
    """A model with its adapters switched off, as a function of what the model takes: no second model is in memory."""

    def __init__(self, model: Any):
        self.model = model

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        with switched_off(self.model):
            return self.model(*inputs, **options)


@contextlib.contextmanager
def switched_off(model: Any) -> Iterator[None]:
    """In the block the model, or torch.compile's wrapper of it, computes without its adapters."""
    layers = frozen_layers(getattr(model, "_orig_mod", model))
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True


# ---------------------------------------------------------------------- adapters in files

PEFT_CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
_PEFT_MODULES = {"attention": "self_attn", "mlp": "mlp"}


@dataclass(frozen=True)
class Adapters:
    """The adapters of a whole model: settings, and tensors by their parameters' names."""

    lora: Lora
    tensors: dict[str, Tensor]

    def changes(self, name: str) -> bool:
        """Whether `merged` may return another weight than it is given."""
        return self.lora.base_format == "nf4" or f"{name.removesuffix('.weight')}.lora_A" in self.tensors

    def merged(self, name: str, weight: Tensor, config: GPTConfig) -> Tensor:
        """A weight (O, I) of the base, with what its adapters add to it: W + scale B A, in fp32."""
        # Merged into what they were trained over: a base of 4 bits is rounded first.
        layer = re.fullmatch(r"(blocks\.\d+)\.(.*)\.weight", name)
        parts = parts_of(config).get(layer[2]) if layer else None
        if parts is None:
            return weight
        if self.lora.base_format == "nf4":
            weight = dequantize(*quantize(weight), weight.shape, torch.float32)
        module = name.removesuffix(".weight")
        if f"{module}.lora_A" not in self.tensors:
            return weight
        merged = weight.float()
        merged = merged.clone() if merged is weight else merged
        for (start, stop), A, B in self._of(module, parts):
            merged[start:stop].addmm_(B, A, alpha=self.lora.scale)
        return merged

    def _of(self, module: str, parts: Sequence[tuple[str, int]]) -> Iterator[tuple[tuple[int, int], Tensor, Tensor]]:
        """For each target in a matrix its rows, its A (r, I) and its B (O, r)."""
        A = self.tensors[f"{module}.lora_A"].float().split(self.lora.rank)
        B = self.tensors[f"{module}.lora_B"].float()
        begin = 0  # of the target's rows in the matrix
        first = 0  # and in B, which has those of targets only
        place = 0
        for name, count in parts:
            if name in self.lora.targets:
                yield (begin, begin + count), A[place], B[first : first + count]
                first += count
                place += 1
            begin += count

    def require_fit(self, config: GPTConfig, where: str) -> None:
        """Raises UserError: when they are not of a model of this shape."""
        with torch.device("meta"):
            model = GPT(config)
            attach(model, self.lora)
        expected = {name: list(p.shape) for name, p in model.named_parameters() if p.requires_grad}
        found = {name: list(tensor.shape) for name, tensor in self.tensors.items()}
        for name in sorted({*expected, *found}):
            if expected.get(name) != found.get(name):
                raise UserError(
                    f"{where} holds adapters for another model: {name} is {found.get(name, 'missing')}, this model's "
                    f"is {expected.get(name, 'missing')}; name the base that they were trained on"
                )


def settings_from(entry: dict[str, Any]) -> Lora:
    """The settings in a checkpoint's meta data. Raises ValueError or TypeError: when they are none."""
    names = Lora.__dataclass_fields__
    lora = Lora(**{**{name: entry[name] for name in names}, "targets": tuple(entry["targets"])})
    is_valid = isinstance(lora.rank, int) and lora.rank > 0 and lora.base_format in ("plain", "nf4")
    if not is_valid or not lora.targets or set(lora.targets) - set(TARGETS) or not math.isfinite(float(lora.alpha)):
        raise ValueError("its adapters' settings are not ours")
    return lora


def read_adapters(path: Path, lora: Lora) -> Adapters:
    """Adapters from a checkpoint's file."""
    with safe_open(path, framework="pt") as file:
        return Adapters(lora, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118


@torch.no_grad()
def merge(model: GPT, adapters: Adapters) -> None:
    """Merge adapters into a model's weights, in place."""
    for name, parameter in model.named_parameters():
        if adapters.changes(name):
            parameter.copy_(adapters.merged(name, parameter.detach(), model.config))


# Fills a tensor with rows of a parameter: its name, how many rows it has, and the first one to read.
RowReader = Callable[[str, int, int, Tensor], None]


@torch.no_grad()
def load_base(model: GPT, shapes: dict[str, torch.Size], read: RowReader, sources: Sequence[Adapters]) -> None:
    """Fill a model's own parameters, which have these `shapes`, with the adapters of `sources` merged into them one
    after the other. Of a sharded model this rank's rows."""
    targets = dict(model.named_parameters())
    layers = {f"{name}.weight": layer for name, layer in model.named_modules() if isinstance(layer, FrozenLinear)}
    for name, shape in shapes.items():
        layer = layers.get(name)
        is_quantized = layer is not None and layer.is_quantized
        if not is_quantized and not any(adapters.changes(name) for adapters in sources):
            read(name, shape[0], held_rows(targets[name]).start, local(targets[name]))
            continue
        # Blocks of 64 weights and products of adapters need the whole matrix: one is in main memory at a time.
        weight = torch.empty(shape)
        read(name, shape[0], 0, weight)
        for adapters in sources:
            weight = adapters.merged(name, weight, model.config)
        if layer is not None:
            layer.set_weight(weight)
        else:
            fill(targets[name], weight)


# ---------------------------------------------------------------------- peft's folders

# peft names the adapters of a Hugging Face model by its modules, each with its own A and B:
#
#     base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight      (r, I)      rows 0 to r of our
#     base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight      (O, r)      blocks.3.attention.qkv.lora_A ...


def peft_name(module: str, target: str) -> str:
    """blocks.3.attention.qkv and q_proj -> what peft calls that adapter, without .lora_A.weight."""
    _, layer, part, _ = module.split(".")
    return f"base_model.model.model.layers.{layer}.{_PEFT_MODULES[part]}.{target}"


def write_peft(folder: Path, adapters: Adapters, config: GPTConfig, base: str) -> None:
    """Write adapter_config.json and adapter_model.safetensors; `base` is where peft finds the model."""
    from nanochat.shell import storage

    tensors = {}
    for module in {name.rpartition(".")[0] for name in adapters.tensors}:
        parts = parts_of(config)[module.split(".", 2)[2]]
        names = [name for name, _ in parts if name in adapters.lora.targets]
        for name, (_, A, B) in zip(names, adapters._of(module, parts), strict=True):
            tensors[f"{peft_name(module, name)}.lora_A.weight"] = A.contiguous()
            tensors[f"{peft_name(module, name)}.lora_B.weight"] = B.contiguous()
    storage.write_tensors(folder / PEFT_WEIGHTS, tensors, {"format": "pt"})
    lora = adapters.lora
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "use_rslora": lora.rank_stabilized,
        "target_modules": list(lora.targets), "bias": "none", "fan_in_fan_out": False,
    }  # fmt: skip
    storage.write_json(folder / PEFT_CONFIG, settings)


def read_peft(folder: Path, config: GPTConfig) -> Adapters:
    """Adapters from a folder of peft's, for a base of this shape.

    Raises UserError: when they are of a kind that is not plain LoRA on the blocks' matrices, or of another model.
    """
    if not (folder / PEFT_CONFIG).is_file() or not (folder / PEFT_WEIGHTS).is_file():
        raise UserError(f"{folder} has no {PEFT_CONFIG} and {PEFT_WEIGHTS}: name a folder that peft has saved")
    settings = read_json(folder / PEFT_CONFIG)
    # peft's variants store other numbers under the same names; what is unset or empty changes nothing.
    variants = ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "trainable_token_indices")
    used = [name for name in variants if settings.get(name)]
    used += [f"bias {settings['bias']}"] if settings.get("bias", "none") != "none" else []
    if settings.get("peft_type") != "LORA" or used:
        kind = ", ".join(used) or settings.get("peft_type")
        raise UserError(f"{folder} is not plain LoRA ({kind}): merge it with peft, and name that model as --source")
    rank = settings.get("r")
    if not isinstance(rank, int) or rank < 1 or not isinstance(settings.get("lora_alpha"), int | float):
        raise UserError(f"{folder / PEFT_CONFIG} has no rank r above 0 or no lora_alpha: save it again with peft")
    require_file(folder / PEFT_WEIGHTS)
    with safe_open(folder / PEFT_WEIGHTS, framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    pattern = re.compile(r"base_model\.model\.model\.layers\.\d+\.(?:self_attn|mlp)\.(\w+)\.lora_[AB]\.weight")
    matches = [pattern.fullmatch(name) for name in found]
    strange = [name for name, match in zip(found, matches, strict=True) if match is None or match[1] not in TARGETS]
    if strange:
        raise UserError(f"{folder} has adapters on {strange[0]}: only {', '.join(TARGETS)} can have one here")
    named = {match[1] for match in matches if match}
    lora = Lora(
        rank, settings["lora_alpha"], settings.get("lora_dropout", 0.0), tuple(n for n in TARGETS if n in named),
        settings.get("use_rslora", False),
    )  # fmt: skip
    # Join what is one matrix here.
    tensors = {}
    for layer in range(config.n_layer):
        for path, parts in parts_of(config).items():
            module = f"blocks.{layer}.{path}"
            names = [peft_name(module, name) for name, _ in parts if name in lora.targets]
            for side in ("lora_A", "lora_B"):
                sides = [found.pop(f"{name}.{side}.weight", None) for name in names]
                sides = [tensor.float() for tensor in sides if tensor is not None]
                if sides:
                    tensors[f"{module}.{side}"] = torch.cat(sides)
    adapters = Adapters(lora, tensors | found)  # what is left over belongs to another model, and `require_fit` names it
    adapters.require_fit(config, str(folder))
    return adapters


def facts(lora: Lora) -> dict[str, Any]:
    """The settings for a checkpoint's meta data."""
    return {**asdict(lora), "targets": list(lora.targets)}


def describe(model: GPT, lora: Lora) -> str:
    """One line for the log: how much is trained, and what the frozen base takes."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(local(p).nbytes for p in model.parameters() if not p.requires_grad)
    for layer in frozen_layers(model):
        frozen += layer.codes.nbytes + layer.factors.nbytes if layer.is_quantized else 0
    base = "4-bit NF4" if lora.base_format == "nf4" else str(model.embedding.weight.dtype).removeprefix("torch.")
    return f"adapters of rank {lora.rank}: {trained:,} parameters; frozen base: {frozen:,} bytes, {base}"
