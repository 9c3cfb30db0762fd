"""What test_cann_rules.py reads in the log: the second step of every stage, and a token with every sampling setting."""

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import tiny
import torch
import torch.distributed as dist
from torch import Tensor

from nanochat import bpb, scaling
from nanochat import device as devices
from nanochat.adapters import lora
from nanochat.alignment.pair_losses import PAIR_STATS
from nanochat.alignment.reply_pairs import pair_batches, with_reference
from nanochat.alignment.value import ValueFunction
from nanochat.attention import Segments
from nanochat.device import Device
from nanochat.engine import Engine, Row, SamplingParams
from nanochat.gpt import GPT, GPTConfig
from nanochat.losses import POLICY_STATS, masked_loss, policy_loss, token_logp
from nanochat.optim import Optimizer
from nanochat.packing import PackedBatch
from nanochat.parallel import experts as expert_parallel
from nanochat.ranks import lay_out
from nanochat.rollout import Sample, Samples, policy_batches, with_advantages
from nanochat.run.progress import Meter, Progress
from nanochat.train import make_adamw, make_optimizer, next_token_loss, train_step
from nanochat.train_service.losses import TOKEN_LOSSES, TokenLoss
from simnpu.adapters import section

ROWS, TOKENS, WIDTH, VOCAB = 4, 128, 256, 32768
QWEN3: dict[str, Any] = tiny.SHAPES["qwen3"] | {"head_dim": 64, "mlp_width": 1024, "lookback_heads": 0}
QWEN3_5: dict[str, Any] = tiny.SHAPES["qwen3_5"] | {
    "head_dim": 64, "mlp_width": 1024, "lookback_heads": 0, "state_key_dim": 64, "state_value_dim": 64, "n_layer": 3,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"experts": 8, "experts_per_token": 2, "mlp_width": 256}


def model_of(
    device: Device, config: GPTConfig | None = None, adapted: dict[str, Any] | None = None, **changes: Any
) -> GPT:
    """A model on the meta device, so that a layout can shard it; with such adapters on all matrices."""
    sizes = {"vocab_size": VOCAB, "sequence_len": TOKENS, "width": WIDTH, "n_head": 4, "n_kv_head": 4, "n_layer": 2}
    preset = {"head_dim": 64, "mlp_width": 1024, "window_pattern": "SL", "lookback_heads": 2}
    with torch.device("meta"):
        model = GPT(config or tiny.tiny_config(**{**sizes, **preset, **changes}), device.kernels)
        if adapted:
            targets = lora.choose_targets("all", adapted["rank"], model.config)
            lora.attach(model.to(device.dtype), lora.Lora(targets=targets, **adapted))
    return model


def with_memory(model: GPT, device: Device) -> GPT:
    """Its weights have memory, but nobody draws them: nothing reads them."""
    model.to_empty(device=device.torch_device).fill_rotary()
    return model


def optimizer_of(model: GPT, device: Device, layout: Any, adapted: Any, **options: Any) -> Optimizer:
    if adapted:
        return make_adamw(model, 1e-4, device, layout=layout, **options)
    return make_optimizer(model, scaling.rates(model.config, 1 << 10, 1 << 20), device, layout=layout, **options)


def batch_of(rows: int, tokens: int, device: Device) -> tuple[Tensor, Tensor]:
    inputs, targets = torch.zeros(2, rows, tokens, dtype=torch.long, device=device.torch_device)
    return inputs, targets


def join(ranks: int) -> None:
    """Become rank 0 of this many; hccl.c waits for no other here."""
    if ranks > 1 and not dist.is_initialized():
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(ranks))
        torch.npu.set_device(0)
        dist.init_process_group("hccl", store=dist.HashStore(), rank=0, world_size=ranks)


def packed(device: Device, rows: int = ROWS, tokens: int = TOKENS, document: int = 64) -> PackedBatch:
    """Rows of documents of `document` tokens each."""
    zeros = torch.zeros(rows, tokens, dtype=torch.long)
    numbers = (torch.arange(tokens) // document).expand(rows, tokens).contiguous()
    return PackedBatch(zeros, zeros, Segments.from_numbers(numbers), zeros).to(device)


def step(
    stage: str, batch: Any = None, loss_fn: Any = masked_loss, ranks: int = 1, adapted: dict[str, Any] | None = None,
    layout_of: Callable[[Device], Any] = lay_out, context_ranks: int = 1, micro_batches: int = 2,
    max_grad_norm: float | None = 1.0, config: GPTConfig | None = None, **changes: Any,
) -> None:  # fmt: skip
    """Two steps. The second one's batch, made of the device and model, the step and its log line are sections."""
    join(ranks)
    device = replace(devices.init("npu", "bfloat16"), context_ranks=context_ranks)
    model = model_of(device, config, adapted, **changes)
    layout = layout_of(device)
    layout.shard(model, device)
    optimizer = optimizer_of(with_memory(model, device), device, layout, adapted)
    for name in ("first", stage):
        with section(f"batch of {name}"):
            batches = [packed(device) if batch is None else batch(device, model)] * micro_batches
        torch.npu.reset_peak_memory_stats()
        with section(name):
            stats = train_step(model, optimizer, batches, loss_fn, device=device, max_grad_norm=max_grad_norm)
        del batches
    with section(f"log line of {stage}"):
        Meter(Progress(step=1), device).read(stats)


def tokens_only(device: Device, model: GPT) -> Any:
    return batch_of(ROWS, TOKENS, device)


# ---------------------------------------------------------------------- micro-batches and losses of the stages


def pairs(device: Device, model: GPT) -> Any:
    replies = tiny.rendered_pairs([[1] * 30] * 8, [[0] * 10 + [1] * 20] * 8)
    return with_reference(next(iter(pair_batches(replies, TOKENS, ROWS, device))), model)


def samples(device: Device, model: GPT) -> Any:
    group = [Sample(0, number, [1] * 30, [0] * 10 + [1] * 20, [0.0] * 30) for number in range(4)]
    drawn = Samples([group] * 4, 4)
    batches = policy_batches(drawn, (ROWS, TOKENS), device, model, model, 0.7)
    return with_advantages([drawn], [batches], np.zeros((4, 4)), device)[0][0]


def valued_samples(device: Device, model: GPT) -> Any:
    return ValueFunction().estimate(model, [[samples(device, model)]], device)[0][0]


def of_tokens(loss: TokenLoss, inputs: list[Tensor], model: GPT, rows: PackedBatch) -> tuple[Tensor, Tensor]:
    """A loss of the training service, as its jobs sum it."""
    return loss.function(token_logp(model, rows), *inputs, **loss.settings).sum(), (rows.targets != -1).sum()


def stages() -> None:
    """One process with one device: all but the collectives."""
    device = devices.init("npu", "bfloat16")
    step("base", tokens_only, next_token_loss)
    step("packed SFT")
    step("packed SFT of Qwen3", **QWEN3)
    step("packed SFT of Qwen3.5", **QWEN3_5)
    step("Qwen3.5 with experts", tokens_only, next_token_loss, **QWEN3_5 | EXPERTS, router="softmax", shared_experts=1,
         shared_gate=True)  # fmt: skip
    step("LoRA", tokens_only, next_token_loss, adapted={"rank": 8, "dropout": 0.1})
    step("NF4", adapted={"rank": 8, "base_format": "nf4"}, **QWEN3)
    for name, loss in tiny.all_losses("pair losses").items():
        stats = torch.zeros(len(PAIR_STATS), device=device.torch_device)
        step(f"preferences, {name}", pairs, functools.partial(loss.function, stats=stats), scalar_head=name == "reward")
    for name, method in tiny.all_losses("policy losses").items():
        critic = ValueFunction() if name == "ppo" else None
        loss_fn = functools.partial(
            policy_loss, method=method, max_tokens=32, kl=0.1, importance_cap=2.0, temperature=0.7, critic=critic,
            stats=torch.zeros(len(POLICY_STATS), device=device.torch_device),
        )  # fmt: skip
        step(f"RL, {name}", valued_samples if critic else samples, loss_fn, scalar_head=critic is not None)
    for name, loss in TOKEN_LOSSES.items():
        inputs = [torch.zeros(ROWS, TOKENS, device=device.torch_device)] * len(loss.inputs)
        service_loss = functools.partial(of_tokens, loss, inputs)
        step(f"service, {name}", loss_fn=service_loss)
    step("experts", tokens_only, next_token_loss, shared_experts=1, **EXPERTS)
    step("experts of Qwen3", **QWEN3 | EXPERTS, router="softmax")
    step("LoRA of experts", adapted={"rank": 8}, **QWEN3 | EXPERTS, router="softmax")


LAYOUTS: dict[str, Any] = {  # --parallel, --replicate and --context_parallel of four ranks
    "ddp": ("ddp", 1, 1), "fsdp": ("fsdp", 1, 1), "hybrid": ("fsdp", 2, 1), "context parallel": ("ddp", 1, 4),
    "context parallel in pairs": ("fsdp", 2, 2),
}  # fmt: skip


def layouts() -> None:
    """Rank 0 of four."""
    for name, (parallel, replicate, context_ranks) in LAYOUTS.items():
        layout_of = functools.partial(lay_out, parallel=parallel, replicate=replicate)
        step(name, ranks=4, layout_of=layout_of, context_ranks=context_ranks)
    fsdp = functools.partial(lay_out, parallel="fsdp")
    step("experts of fsdp", ranks=4, layout_of=fsdp, **EXPERTS)
    # In place of the one wait of a layer, in which the host would read here that no row has arrived.
    expert_parallel.Tensor = None  # type: ignore[attr-defined]
    step("expert parallel", ranks=4, layout_of=functools.partial(fsdp, expert_parallel=True), **EXPERTS)


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0}, "temperature": {"temperature": 0.7}, "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9}, "top_k and top_p": {"top_k": 50, "top_p": 0.9}, "min_p": {"min_p": 0.05},
    "repetition_penalty": {"repetition_penalty": 1.1}, "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
}  # fmt: skip


def decoding() -> None:
    """Three rows, one of them greedy: their prompts, a token, one with logprobs and a bias, and the rows' release."""
    device = devices.init("npu", "bfloat16")
    for name, settings in SETTINGS.items():
        decode(name, settings, device)
    decode("Qwen3.5", {}, device, **QWEN3_5)


def decode(name: str, settings: dict[str, Any], device: Device, **changes: Any) -> None:
    model = with_memory(model_of(device, vocab_size=280, **changes), device)
    engine = Engine(model.eval(), tiny.tiny_tokenizer(), device, "off")
    engine.stop_ids = set()
    sampling = [SamplingParams(**settings), SamplingParams(**settings), SamplingParams(temperature=0.0)]
    with engine.slots(3, 64) as slots:
        with section(f"{name}: prompts"):
            slots.fill([Row([5, 6, 7], 9, one, logit_bias={3: 1.0}) for one in sampling])
        slots.decode(2)
        slots.decode()
        with section(f"{name}: a token"):
            slots.decode()
        with section(f"{name}: a token with logprobs"):
            slots.decode(2)
        with section(f"{name}: release"):
            slots.release([slots.rows[0]])


def evaluations() -> None:
    device = devices.init("npu", "bfloat16")
    model = with_memory(model_of(device, scalar_head=True), device)
    rows = torch.zeros(ROWS, TOKENS + 1, dtype=torch.long)
    with section("bits per byte"):
        bpb.bits_per_byte(model, rows, torch.ones(32768, dtype=torch.long), ROWS, device, document_mask=True)
