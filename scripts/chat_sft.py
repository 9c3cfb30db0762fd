"""Supervised fine-tuning: whole conversations, packed, with a loss on what the assistant says alone.

python -m scripts.chat_sft --device_batch_size=4

torchrun --standalone --nproc_per_node=8 -m scripts.chat_sft -- --device_batch_size=8 --target_examples_per_step=32
"""

import math
import time
from dataclasses import dataclass
from typing import Annotated, Literal

from nanochat.run.flags import StageFlags
from nanochat.shell.cli import Fraction, Frozen, Positive, Range, run
from nanochat.shell.log import check_trackers, print0, record
from nanochat.shell.paths import checkpoint_dir


@dataclass(frozen=True)
class Config(StageFlags):
    source: str = "mid"  # a stage, or a checkpoint's folder
    # horizon and batch
    num_iterations: Positive = 200  # steps
    target_examples_per_step: Frozen[Positive] = 32  # conversations a step over all devices
    device_batch_size: Positive = 8  # rows a device computes at once; a row holds as many conversations as fit
    # optimizer
    lr_scale: Annotated[float, Range(0, 100)] = 0.2  # of all learning rates, as a multiple of pretraining's
    warmdown_fraction: Fraction = 1.0  # of the run, at its end, over which rates fall
    # evaluation, device
    eval_examples: Positive = 256  # held-out conversations
    compile: Literal["auto", "on", "off"] = "auto"  # torch.compile; auto: where it pays


def main(config: Config) -> None:
    began = time.time()
    # The heavy imports stand here so that --help answers at once.
    import torch

    from nanochat import checkpoint_manager, scaling
    from nanochat import device as devices
    from nanochat.conversation import Rendered, render
    from nanochat.data.packing import PackedBatch, pack_sequences
    from nanochat.losses import masked_loss
    from nanochat.parallel.fsdp import shard
    from nanochat.parallel.mesh import lay_out
    from nanochat.run.resume import resume
    from nanochat.run.stage import Stage
    from nanochat.tasks.mixture import Mixture, default_tasks, open_mixture
    from nanochat.train import Meter, Progress, Schedule, make_optimizer, mean_loss, train_step

    # ------------------------------------------------------------------ model
    check(config)
    device = devices.init(config.device, config.dtype)
    device.seed(config.seed)
    source = checkpoint_manager.find_source(
        config.source, config.source_tag or config.model_tag, config.source_step, device
    )
    model, tokenizer, source_meta = checkpoint_manager.load_model(source, device, verified=True)
    layout = lay_out(device, config.parallel, config.replicate)
    shard(model.train(), layout, device, config.activation_checkpointing)
    tag = config.model_tag or checkpoint_manager.tag_of(source)
    print0(f"device: {device}; {layout}")
    print0(f"source: {source}")

    # ------------------------------------------------------------------ data, horizon, optimizer
    pretraining = source_meta.get("pretraining", {"data": ""})
    tasks = config.tasks or default_tasks(pretraining["data"])
    train, held_out = (open_mixture(tasks, split, config.hub, config.seed) for split in ("train", "test"))
    fingerprints = {"what --tasks names": train.fingerprint()}
    row_tokens, examples, steps = model.config.sequence_len, config.target_examples_per_step, config.num_iterations

    def packed(mixture: Mixture, first: int, count: int) -> tuple[PackedBatch, list[Rendered]]:
        """`count` examples from number `first` on, the same on every rank, as rows; those without a target left out."""
        rendered = [render(tokenizer, mixture.example(i).messages, row_tokens + 1) for i in range(first, first + count)]
        learned = [r for r in rendered if r.target_count]
        return pack_sequences([r.ids for r in learned], [r.mask for r in learned], row_tokens), rendered

    rates = scaling.rates(model.config, examples * row_tokens, steps * examples * row_tokens).scaled(config.lr_scale)
    optimizer = make_optimizer(model, rates, device, layout=layout)
    schedule = Schedule.for_run(steps, warmdown_fraction=config.warmdown_fraction)
    print0(f"tasks: {tasks}")
    print0(f"horizon: {steps:,} steps of {examples} conversations")

    # ------------------------------------------------------------------ resume
    folder = checkpoint_dir("sft", tag)
    progress, shares = Progress(), []
    if config.resume:
        progress, shares = resume(
            folder, config, steps, model, tokenizer, optimizer, device, source=source, fingerprints=fingerprints
        )

    # ------------------------------------------------------------------ train
    token_flops = scaling.flops_per_token(model.config)
    about_tokens = packed(train, 0, examples)[0].inputs.numel()  # of a step, its padding included
    held_out_rows, _ = packed(held_out, 0, min(config.eval_examples, sum(map(len, held_out.tasks))))
    compiled, how = device.compile(model, config.compile, token_flops * about_tokens * (steps - progress.step))
    print0(f"step: {how}; kernels: {device.kernels}")

    def evaluate() -> dict[str, float]:
        mine = held_out_rows.micro_batches(config.device_batch_size, device, device.rank, device.world_size)
        val_loss = mean_loss(model, mine, masked_loss, device, stage.should_stop)
        return {"val_loss": val_loss} if math.isfinite(val_loss) else {}  # nothing held out may be a target

    odd = {"no_target": 0, "cut": 0}  # conversations since the last log line
    if shares:
        odd = {what: int(shares[0][what]) for what in odd}
    stage = Stage(
        "sft", tag, config, device, layout, model, tokenizer, optimizer, progress, steps,
        evaluate=evaluate,
        loader_state=lambda: {what: torch.tensor(count) for what, count in odd.items()},
        meta=lambda: {
            "source": checkpoint_manager.short_name(source), "pretraining": pretraining, "fingerprints": fingerprints,
        },
    )  # fmt: skip
    with stage:
        meter = Meter(progress, device, token_flops)
        for step in stage.steps(meter):
            rows, rendered = packed(train, step * examples, examples)
            stats = train_step(
                compiled if step else model, optimizer,
                rows.micro_batches(config.device_batch_size, device, device.rank, device.world_size), masked_loss,
                device=device, lr=schedule.lr(step), momentum=schedule.momentum(step), weight_decay=0.0,
            )  # fmt: skip
            meter.add(stats, sum(len(r.ids) for r in rendered))
            odd["no_target"] += sum(r.target_count == 0 for r in rendered)
            odd["cut"] += sum(r.cut for r in rendered)
            if stage.due(stats):
                line = meter.read(stats) | {"lr": rates.matrix * schedule.lr(step)} | odd
                if stage.logs:  # and a checkpoint of this step begins to count anew
                    odd = dict.fromkeys(odd, 0)
                stage.report(line)
    stage.finish()
    print0(f"done: {progress.step:,} steps, {progress.seconds:.1f} s of training")
    record("sft", tag, began, device)


def check(config: Config) -> None:
    """Raises UserError: for sizes no run can have."""
    check_trackers(config.track)


if __name__ == "__main__":
    run(main, Config)
