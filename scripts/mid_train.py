"""Mid-training: teach a base model the chat format and new skills, on whole conversations in dense rows, every
token of them a target.

python -m scripts.mid_train --device_batch_size=8

torchrun --standalone --nproc_per_node=8 -m scripts.mid_train -- --device_batch_size=16 --tasks smoltalk:20,gsm8k:1
"""

import math
import time
from dataclasses import dataclass
from typing import Annotated, Literal

from nanochat.run.flags import StageFlags
from nanochat.shell.cli import Count, Fraction, Positive, Range, UserError, run
from nanochat.shell.log import check_trackers, print0, record
from nanochat.shell.paths import checkpoint_dir


@dataclass(frozen=True)
class Config(StageFlags):
    # horizon and batch
    num_iterations: Positive | None = None  # steps; default: a tenth of the base model's tokens
    device_batch_size: Positive = 16  # rows a device computes at once
    total_batch_size: Positive | None = None  # tokens a step over all devices; default: the base model's
    # optimizer
    lr_scale: Annotated[float, Range(0, 100)] = 0.5  # of all learning rates, as a multiple of pretraining's
    warmdown_fraction: Fraction = 0.8  # of the run, at its end, over which rates fall
    # evaluation, device
    eval_every: Count = 150  # steps between evaluations; 0: only at the end
    eval_tokens: Positive = 262_144  # of held-out conversations
    compile: Literal["auto", "on", "off"] = "auto"  # torch.compile; auto: where it pays


def main(config: Config) -> None:
    began = time.time()
    # The heavy imports stand here so that --help answers at once.
    import torch

    from nanochat import checkpoint_manager, scaling
    from nanochat import device as devices
    from nanochat.data.loader import Loader, LoaderState
    from nanochat.evals.bpb import bits_per_byte, validation_rows
    from nanochat.parallel.fsdp import shard
    from nanochat.parallel.mesh import lay_out
    from nanochat.run.resume import resume
    from nanochat.run.stage import Stage
    from nanochat.tasks.mixture import MixtureCorpus, default_tasks, open_mixture
    from nanochat.train import Meter, Progress, Schedule, make_optimizer, next_token_loss, train_step

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

    # ------------------------------------------------------------------ data, horizon, batch, optimizer
    pretraining = {"data": "", "tokens": 0, **source_meta.get("pretraining", {})}
    tasks = config.tasks or default_tasks(pretraining["data"])
    train_corpus, val_corpus = (
        MixtureCorpus(open_mixture(tasks, split, config.hub, config.seed), tokenizer) for split in ("train", "test")
    )
    fingerprints = {"what --tasks names": train_corpus.mixture.fingerprint()}
    row_tokens = model.config.sequence_len
    micro_tokens = config.device_batch_size * row_tokens * device.world_size  # of one pass on all devices
    asked = config.total_batch_size or pretraining.get("batch_tokens", micro_tokens)
    accumulation = max(1, round(asked / micro_tokens))
    batch_tokens = micro_tokens * accumulation
    if config.total_batch_size not in (None, batch_tokens):
        raise UserError(
            f"--total_batch_size {config.total_batch_size} is not a multiple of {micro_tokens} tokens "
            f"(device_batch_size x context x processes): use {batch_tokens}, or another --device_batch_size"
        )
    steps = config.num_iterations or max(1, round(pretraining["tokens"] / 10 / batch_tokens))
    rates = scaling.rates(model.config, batch_tokens, steps * batch_tokens).scaled(config.lr_scale)
    optimizer = make_optimizer(model, rates, device, layout=layout)
    schedule = Schedule.for_run(steps, warmdown_fraction=config.warmdown_fraction)
    print0(f"tasks: {tasks}")
    print0(f"horizon: {steps:,} steps of {batch_tokens:,} tokens ({accumulation} micro-batches)")

    # ------------------------------------------------------------------ resume
    folder = checkpoint_dir("mid", tag)
    progress, shares = Progress(), []
    if config.resume:
        progress, shares = resume(
            folder,
            config,
            steps,
            model,
            tokenizer,
            optimizer,
            device,
            source=source,
            batch_tokens=batch_tokens,
            fingerprints=fingerprints,
        )
    loader = Loader(
        train_corpus, tokenizer, config.device_batch_size, row_tokens, rank=device.rank, world_size=device.world_size,
        seed=config.seed, state=LoaderState.merge(shares) if shares else None,
    )  # fmt: skip

    # ------------------------------------------------------------------ train
    token_flops = scaling.flops_per_token(model.config)
    compiled, how = device.compile(model, config.compile, token_flops * batch_tokens * (steps - progress.step))
    print0(f"step: {how}; kernels: {device.kernels}")
    rows = validation_rows(val_corpus, tokenizer, row_tokens, config.eval_tokens)
    token_bytes = torch.tensor(tokenizer.token_bytes())

    def evaluate() -> dict[str, float]:
        val_bpb = bits_per_byte(model, rows, token_bytes, config.device_batch_size, device, stage.should_stop)
        if not math.isfinite(val_bpb):
            raise UserError(f"validation is {val_bpb} at step {progress.step}: lower --lr_scale")
        progress.best_val_bpb = min(val_bpb, progress.best_val_bpb or math.inf)
        return {"val_bpb": val_bpb}

    stage = Stage(
        "mid", tag, config, device, layout, model, tokenizer, optimizer, progress, steps,
        evaluate=evaluate,
        loader_state=lambda: micro[-1].state.to_tensors(),
        meta=lambda: {
            "source": checkpoint_manager.short_name(source), "pretraining": pretraining, "fingerprints": fingerprints,
        },
    )  # fmt: skip
    with stage:
        meter = Meter(progress, device, token_flops)
        for step in stage.steps(meter):
            micro = [next(loader) for _ in range(accumulation)]
            batches = ((device.to_device(b.inputs), device.to_device(b.targets)) for b in micro)
            stats = train_step(
                compiled if step else model, optimizer, batches, next_token_loss, device=device,
                lr=schedule.lr(step), momentum=schedule.momentum(step), weight_decay=schedule.weight_decay(step),
            )  # fmt: skip
            meter.add(stats, batch_tokens)
            if stage.due(stats):
                stage.report(meter.read(stats) | {"lr": rates.matrix * schedule.lr(step)})
    loader.close()
    stage.finish()
    print0(f"done: {progress.step:,} steps, {progress.seconds:.1f} s of training")
    record("mid", tag, began, device)


def check(config: Config) -> None:
    """Raises UserError: for sizes no run can have."""
    check_trackers(config.track)


if __name__ == "__main__":
    run(main, Config)
