"""The work of a training script before its loop: open the device, load the source, plan steps, make the optimizer.

start = begin(config)                      # device, source checkpoint, model, tokenizer, tag
optimizer, peak_lr = open_optimizer(config, start, rates)
run = Run("sft", config, start, optimizer, steps, fingerprints={...})     # loop.py
"""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanochat import device as devices
from nanochat import model_folder
from nanochat.checkpoint_manager import Preparation, build, describe, load_folder
from nanochat.device import Device
from nanochat.gpt import GPT
from nanochat.ground import rooms, screen
from nanochat.ground.cli import UserError
from nanochat.ground.log import print0, warn
from nanochat.ground.paths import SCRIPTS, safe_tag
from nanochat.ground.sharding import local
from nanochat.ground.untrusted import read_text
from nanochat.model_folder import find_source
from nanochat.optim import Optimizer
from nanochat.ranks import Layout, lay_out, sum_over_ranks
from nanochat.run.flags import ChatFlags, StageFlags, TrainFlags
from nanochat.sampling import CHAT_SAMPLING, SamplingParams, saved_settings
from nanochat.scaling import Rates
from nanochat.tokenizer import Tokenizer
from nanochat.train import make_adamw, make_optimizer

MAX_TEMPLATE = 1 << 20  # bytes of a file with a chat template


@dataclass
class Start:
    """The state of a run before its first step."""

    began: float  # time.time() when the command started
    device: Device
    layout: Layout
    model: GPT  # sharded by the layout
    tokenizer: Tokenizer
    tag: str  # name of the checkpoints' folder
    # The model's training data so far: data, tokens and batch_tokens of the base model, conversations of mid-training
    # and SFT.
    pretraining: dict[str, Any] = dataclasses.field(default_factory=lambda: {"data": "", "tokens": 0})
    source: Path | None = None  # the checkpoint it began from
    tasks: list[str] = dataclasses.field(default_factory=list)  # tasks that the source has learned
    # How to draw its replies.
    sampling: dict[str, float] = dataclasses.field(default_factory=lambda: saved_settings(CHAT_SAMPLING))
    reference: Any = None  # the source's model: a frozen copy of it, or the model itself without its adapters
    reference_source: Path | None = None  # the reference's checkpoint; a teacher has another one
    adapter: dict[str, Any] | None = None  # if only adapters are trained: their settings and their base
    ledger: Any = None  # for --dry_run: the model has no weights, and everything is counted (parallel/dry_run.py)


def open_device(config: TrainFlags) -> tuple[Device, Layout]:
    """Join the process group, take this process's device, seed its generators.

    Raises UserError: when the device is not there or cannot train, or the processes' flags contradict each other.
    """
    if config.track:
        from nanochat.run import trackers

        trackers.check(config.track)
    if config.run and not config.track:
        warn(f"--run {config.run} names the run at a tracker, and no tracker is set: add --track, or leave --run out")
    if config.model_tag is not None:
        safe_tag(config.model_tag)
    device = devices.init(config.device, config.dtype, config.deterministic)
    if not device.can_train:
        raise UserError(f"{device.name} is made for inference and cannot train: train elsewhere, and chat here")
    if config.offload_optimizer and device.kind == "cpu":
        raise UserError("--offload_optimizer: on a CPU the state is in main memory already: leave the flag out")
    device.seed(config.seed)
    if config.dry_run_devices > 1 and not config.dry_run:
        raise UserError(
            f"--dry_run_devices {config.dry_run_devices} belongs to --dry_run: to train on that many devices, "
            f"python -m nanochat.run.launch --nproc_per_node={config.dry_run_devices} -m scripts.NAME -- ..."
        )
    if config.dry_run_devices > 1:
        device = rooms.find("layouts", "dry_run_devices")(device, config.dry_run_devices)
    device = dataclasses.replace(device, context_ranks=config.context_parallel)
    layout = lay_out(device, config.parallel, config.replicate, config.expert_parallel)
    print0(f"device: {device}; {layout}")
    return device, layout


def begin(
    config: StageFlags, with_reference: bool = False, teacher: str | None = None, prepare: Sequence[Preparation] = ()
) -> Start:
    """Open the device, and load the checkpoint that a stage begins from.

    `with_reference` also keeps a frozen copy of its model, for losses that compare with it; `teacher` is the source of
    another model in its place. `prepare` changes the model while it is loaded, before it receives adapters.
    Raises UserError: when the checkpoint is missing or damaged, or the teacher reads other tokens.
    """
    began = time.time()
    device, layout = open_device(config)
    screen.phase("looking for the source")
    source_tag = config.source_tag
    if source_tag is None and config.source in ("auto", *SCRIPTS):
        source_tag = config.model_tag
    source = find_source(config.source, source_tag, device, without_weights=config.dry_run)
    screen.phase("making the model without its weights" if config.dry_run else "loading the model")
    if isinstance(config, ChatFlags) and config.lora_rank:
        prepare = [*prepare, rooms.find("adapters", "new")(config, config.seed)]
    model, tokenizer, meta = load(config, source, device, layout, prepare)
    if config.activation_checkpointing:
        model.recompute_activations()
    start = Start(
        began, device, layout, model, tokenizer,
        tag=config.model_tag or model_folder.tag_of(source),
        pretraining={"data": "", "tokens": 0, **meta.get("pretraining", {})},
        source=source, tasks=meta["tasks"], sampling=saved_settings(SamplingParams(**meta["sampling"])),
        adapter=None if model.extension is None else model.extension.facts(),
    )  # fmt: skip

    if with_reference or teacher is not None:
        load_reference(config, start, teacher)

    if config.dry_run:
        screen.phase("counting the memory of a step")
        models = [model, start.reference] if isinstance(start.reference, GPT) else [model]
        start.ledger = rooms.find("layouts", "dry_run")(device, *models)
    else:
        if isinstance(config, ChatFlags):
            start.tokenizer = chosen_template(tokenizer, config.chat_template)
        screen.phase("checking the weights")
        require_finite(model, source, "--source", device)
        if start.reference_source not in (None, source):
            require_finite(start.reference, start.reference_source, "--teacher", device)
        if start.adapter is not None:
            start.adapter |= rooms.find("adapters", "base")(source, device)
        screen.phase("opening the data")
    model.train()

    print0(f"source: {source}")
    if config.max_seq_len:
        scaled = model.config.rope_scaling
        by = "" if scaled is None else f", positions scaled by {scaled.factor:g} ({scaled.kind})"
        print0(f"context: {model.config.sequence_len:,} tokens, rope_theta {model.config.rope_theta:,.0f}{by}")
    if model.extension is not None:
        print0(model.extension.describe(model))
    return start


def load(
    config: StageFlags, folder: Path, device: Device, layout: Layout, prepare: Sequence[Preparation] = ()
) -> tuple[GPT, Any, dict[str, Any]]:
    """`load_folder` with the context of the flags. A dry run reads only the shape: its model stays on the meta device,
    and has no tokenizer."""
    from nanochat.run.long_context import NewContext  # base_train has a context from its flags

    prepare = [NewContext(config.max_seq_len, config.rope_scaling), *prepare]
    if not config.dry_run:
        return load_folder(folder, device, layout=layout, prepare=prepare)
    with model_folder.damage_of(folder):
        _, shape, meta = describe(folder, prepare)
        model, _ = build(shape, device, layout, prepare)
    return model, None, meta


def load_reference(config: StageFlags, start: Start, teacher: str | None) -> None:
    """Keep the model to compare with: the teacher, or the source's own, which a model with adapters contains.

    Raises UserError: when the teacher reads other tokens, or fewer.
    """
    start.reference_source = start.source
    if teacher is not None:
        start.reference_source = find_source(teacher, None, start.device, "--teacher ", config.dry_run)
    elif start.model.extension is not None:
        start.reference = start.model.extension.without(start.model)
        return
    assert start.reference_source is not None
    start.reference, its_tokenizer, _ = load(config, start.reference_source, start.device, start.layout)
    if its_tokenizer is not None and its_tokenizer.fingerprint() != start.tokenizer.fingerprint():
        raise UserError(
            f"--teacher {teacher} has another tokenizer than {start.source}: have it write replies (chat_batch) "
            "and train on them (chat_sft --tasks), as docs/rl.md shows"
        )
    context = start.reference.config.sequence_len
    if context < start.model.config.sequence_len:
        raise UserError(
            f"--teacher {teacher}: its context is {context} tokens, the student's "
            f"{start.model.config.sequence_len}: set --max_seq_len {context}"
        )


def chosen_template(tokenizer: Tokenizer, file: str | None) -> Tokenizer:
    """The tokenizer with the template of --chat_template; checkpoints then have it too.

    Raises UserError: when the file cannot be read, or the model has no templates.
    """
    if file is None:
        return tokenizer
    try:
        source = read_text(Path(file), MAX_TEMPLATE)
    except (OSError, ValueError) as error:
        raise UserError(f"--chat_template {file} cannot be read: {error}") from error
    return tokenizer.with_chat_template(source, file)


def require_finite(model: GPT, folder: Path | None, flag: str, device: Device) -> None:
    """All ranks call this together, before the first step: later the run would be blamed for what its source brought.

    Raises UserError: when a weight is NaN or infinite, or when the model computes such numbers from finite weights.
    """
    parameters = dict(model.named_parameters())
    broken = torch.stack([(~torch.isfinite(local(one)).all()).float() for one in parameters.values()])
    names = [name for name, count in zip(parameters, sum_over_ranks(broken, device).tolist(), strict=True) if count]
    if names:
        raise UserError(
            f"{flag} {folder}: weights are NaN or infinite ({names[0]}; {len(names)} of {len(parameters)} tensors): "
            f"its training has failed; name another {flag}, or an earlier step"
        )
    with torch.no_grad():
        count = min(8 * device.context_ranks, model.config.sequence_len)  # the ranks that share a row divide its tokens
        logits = model(torch.arange(count, device=model.device)[None])
    if sum_over_ranks((~torch.isfinite(logits)).sum().float(), device).item():
        raise UserError(
            f"{flag} {folder} computes NaN or infinite numbers from its weights, which are finite: "
            f"name another {flag}, or an earlier step"
        )


def count_micro_batches(micro_tokens: int, by_rule: int, total: int | None, requested: int | None = None) -> int:
    """Micro-batches a step: from --total_batch_size, from a `requested` number, or for `by_rule` tokens a step.

    Raises UserError: when the flags contradict each other.
    """
    if total is None:
        return requested or max(1, round(by_rule / micro_tokens))
    count, rest = divmod(total, micro_tokens)
    if rest == 0 and requested in (None, count):
        return count
    nearest = requested or max(1, round(total / micro_tokens))
    wanted = "a multiple of" if requested is None else f"{requested} x"
    raise UserError(
        f"--total_batch_size {total} is not {wanted} {micro_tokens} tokens (device_batch_size x context x processes; "
        f"those that share rows count once): use {nearest * micro_tokens}, or another --device_batch_size"
    )


def open_optimizer(config: ChatFlags, start: Start, rates: Rates) -> tuple[Optimizer, float]:
    """The optimizer of SFT, DPO or RL, and its peak rate for the log: AdamW's, or Muon's for matrices."""
    clipping = ""
    if config.largest_norm is not None:
        clipping = f"; gradients are clipped to a norm of {config.largest_norm:g}"
    rate = config.adamw_rate
    if rate is None:
        print0(f"optimizer: Muon at {rates.matrix:.3g} for matrices, AdamW for the rest{clipping}")
        optimizer = make_optimizer(start.model, rates, start.device, layout=start.layout, kept_as=config.kept_as)
        return optimizer, rates.matrix
    print0(f"optimizer: AdamW at {rate:g}, weight decay of matrices {config.weight_decay:g}{clipping}")
    optimizer = make_adamw(start.model, rate, start.device, config.weight_decay, start.layout, config.kept_as)
    return optimizer, rate
