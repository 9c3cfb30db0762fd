"""What test_adapters.py runs in simulated processes and reads in their logs: training steps, decoded tokens, AdamW."""

import dataclasses
import functools
import gc
from collections.abc import Callable
from typing import Any, Literal

import tiny
import torch
from torch import Tensor

from nanochat import device as devices
from nanochat import scaling
from nanochat.attention import Segments
from nanochat.device import Device
from nanochat.engine import Engine, SamplingParams
from nanochat.gpt import GPT, GPTConfig
from nanochat.kernels import npu
from nanochat.losses import masked_loss
from nanochat.optim import StateFormat
from nanochat.packing import PackedBatch
from nanochat.parallel.dry_run import begin as begin_ledger
from nanochat.parallel.dry_run import full_rows
from nanochat.ranks import lay_out
from nanochat.train import next_token_loss, train_step
from simnpu import stage_cases
from simnpu.adapters import section
from simnpu.stage_cases import batch_of, join, optimizer_of, packed, with_memory


def forget() -> None:
    """Nothing of an earlier case is in the device's memory: the peaks of the next one are its own."""
    gc.collect()
    npu.compressed_mask.cache_clear()
    npu._ones.cache_clear()
    torch.npu.empty_cache()
    held = torch.npu.memory_allocated()
    assert held < 1 << 20, f"{held:,} bytes are still held"


def model_of(depth: int, tokens: int, device: Device, **changes: Any) -> GPT:
    """The preset's model."""
    config = dataclasses.replace(scaling.model_config(depth, 32768, tokens), **changes)
    return with_memory(stage_cases.model_of(device, config), device)


def step(
    depth: int, rows: int, tokens: int, ranks: int = 1, document: int = 0, parallel: Any = "ddp", **changes: Any
) -> dict[str, int]:
    """A step of training, the second, as rank 0 of `ranks`; the allocator's peaks in it.

    `document`: the rows are packed with documents of so many tokens.
    """

    def batch(device: Device, model: GPT) -> Any:
        return packed(device, rows, tokens, document) if document else batch_of(rows, tokens, device)

    config = dataclasses.replace(scaling.model_config(depth, 32768, tokens), **changes)
    name, loss_fn = ("packed step", masked_loss) if document else ("step", next_token_loss)
    layout_of = functools.partial(lay_out, parallel=parallel)
    stage_cases.step(
        name, batch, loss_fn, ranks, layout_of=layout_of, micro_batches=1, max_grad_norm=None, config=config
    )
    return {"allocated": torch.npu.max_memory_allocated(), "reserved": torch.npu.max_memory_reserved()}


def adapters_step(rows: int, tokens: int, rank: int, micro_batches: int = 1) -> None:
    """A step, the second, that trains adapters on all matrices of a model in the shape of Qwen3 0.6B."""
    sizes = {"width": 1024, "n_head": 16, "n_kv_head": 8, "head_dim": 128, "mlp_width": 3072}
    shape = {**tiny.SHAPES["qwen3"], **sizes, "vocab_size": 151936, "sequence_len": tokens, "n_layer": 28}
    stage_cases.step(
        f"step of adapters, {micro_batches}", lambda device, _: batch_of(rows, tokens, device), next_token_loss,
        adapted={"rank": rank}, micro_batches=micro_batches, max_grad_norm=None, config=GPTConfig(**shape),
    )  # fmt: skip


def counted(
    depth: int, rows: int, tokens: int, ranks: int = 1, dtype: str = "bfloat16", parallel: Any = "ddp",
    activation_checkpointing: bool = False, lora_rank: int = 0, micro_batches: int = 1, vocab: int = 32768,
    offload: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """A step as `step` takes it, and the same one counted by --dry_run: the allocator's peak, and the count."""
    join(ranks)
    device = devices.init("npu", dtype)
    layout = lay_out(device, parallel)
    kept_as = StateFormat(torch.float32, offload)
    sizes: dict[str, int] = {}
    peak = 0
    for is_counted in (False, True):
        forget()
        adapted = {"rank": lora_rank} if lora_rank else None
        model = stage_cases.model_of(device, scaling.model_config(depth, vocab, tokens), adapted)
        if activation_checkpointing:
            model.recompute_activations()
        layout.shard(model, device)
        ledger = begin_ledger(device, model) if is_counted else None
        if ledger is None:
            with_memory(model, device)
        optimizer = optimizer_of(model, device, layout, adapted, kept_as=kept_as)
        batches = [full_rows(rows, tokens, device)] * micro_batches
        if ledger is not None:
            sizes = ledger.count_step(model, optimizer, batches, masked_loss)
        else:
            torch.npu.reset_peak_memory_stats()
            with section("offloaded step" if offload else "counted step"):
                train_step(model, optimizer, batches, masked_loss, device=device)
            peak = torch.npu.max_memory_allocated()
        del model, optimizer, batches
    return {"allocated": peak, **sizes}


def kept(depth: int, tokens: int, **changes: Any) -> float:
    """Bytes that the forward pass leaves for the backward one, for each token more."""
    device = devices.init("npu", "bfloat16")
    model = model_of(depth, tokens, device, **changes)
    held = []
    for rows in (1, 2):
        batch = batch_of(rows, tokens, device)
        before = torch.npu.memory_allocated()
        loss, _ = next_token_loss(model, batch)
        held.append(torch.npu.memory_allocated() - before)
        del loss
    return (held[1] - held[0]) / tokens


def token(depth: int, tokens: int, graphs: Literal["on", "off"] = "off", **changes: Any) -> None:
    """A decoded token of one row, sampled; with graphs also the first one, whose launches are recorded."""
    device = devices.init("npu", "bfloat16")
    engine = Engine(model_of(depth, tokens, device, **changes).eval(), tiny.tiny_tokenizer(), device, graphs)
    engine.stop_ids = set()
    # The shortest cache has 64 places for each key head, the first recording reads them all.
    stream = engine.stream([[5, 6, 7]], max_tokens=8, sampling=SamplingParams(temperature=0.7))
    with section("first token"):
        next(stream)
    for _ in range(3):
        next(stream)
    with section("token"):
        next(stream)


def to_device(kind: str = "right") -> None:
    """Copies of a batch to the device, as `Device.to_device` makes them or as planted mistakes would."""
    device = devices.init("npu", "bfloat16")
    right = Device.to_device
    planted: dict[str, Callable[[Device, Tensor], Tensor]] = {
        "right": right,
        "plain": lambda self, tensor: tensor.to(self.torch_device),
        "not pinned": lambda self, tensor: tensor.to(self.torch_device, non_blocking=True),
        "blocking": lambda self, tensor: tensor.pin_memory().to(self.torch_device),
    }
    rows = torch.zeros(4, 128, dtype=torch.long)
    batch = PackedBatch(rows, rows, Segments.from_numbers(rows), rows, rows.float())
    Device.to_device = planted[kind]  # type: ignore[method-assign]
    try:
        with section("copies"):
            batch.to(device)
    finally:
        Device.to_device = right  # type: ignore[method-assign]


def adamw(sizes: list[int]) -> dict[str, Any]:
    """One fused update of parameters of these sizes; the addresses of what would scale it and skip it."""
    lists = [[torch.zeros(size, device="npu") for size in sizes] for _ in range(4)]
    steps = [torch.zeros((), device="npu") for _ in sizes]
    scale, skip = (torch.ones((), device="npu") for _ in range(2))
    settings: dict[str, Any] = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.0, "eps": 1e-8}
    with section("adamw"):
        torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
            *lists, [], steps, **settings, amsgrad=False, maximize=False, grad_scale=scale, found_inf=skip
        )
    return {"unread": [scale.data_ptr(), skip.data_ptr()], "gradients": [one.data_ptr() for one in lists[1]]}
