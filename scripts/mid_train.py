"""Mid-training: teach a base model the chat format and new skills, on whole conversations in dense rows, every
token of them a target.

python -m scripts.mid_train --device_batch_size=8

torchrun --standalone --nproc_per_node=8 -m scripts.mid_train -- --device_batch_size=16 --tasks smoltalk:20,gsm8k:1
"""

import math
import time
from dataclasses import dataclass
from typing import Annotated, Literal

from nanochat.shell.cli import Count, Fraction, Positive, Range, Seed, UserError, run
from nanochat.shell.log import check_trackers, print0, record
from nanochat.shell.paths import checkpoint_dir


@dataclass(frozen=True)
class Config:
    # model and data
    source: str = "base"  # a stage, or a checkpoint's folder
    source_tag: str | None = None  # of the source; default: --model_tag, or else the one written last
    source_step: int | None = None  # default: the newest
    tasks: str = ""  # NAME[=PATH][:WEIGHT],... or a .jsonl of conversations; default: by what the base model has read
    hub: Literal["hf", "modelscope"] = "hf"  # where tasks with data come from
    # horizon and batch
    num_iterations: Positive | None = None  # steps; default: a tenth of the base model's tokens
    device_batch_size: Positive = 16  # rows a device computes at once
    total_batch_size: Positive | None = None  # tokens a step over all devices; default: the base model's
    # optimizer: multiples of pretraining's rates
    lr_scale: Annotated[float, Range(0, 100)] = 0.5  # of all rates
    warmdown_fraction: Fraction = 0.8  # of the run, at its end, over which rates fall
    # evaluation, logging, saving
    eval_every: Count = 150  # steps between evaluations; 0: only at the end
    eval_tokens: Positive = 262_144  # of held-out conversations
    log_every: Positive = 10  # steps between log lines; reading a loss waits for the device
    save_every: Count = 0  # steps between checkpoints; 0: only at the end
    keep_last: Count = 0  # checkpoints that stay, the newest ones; 0: all
    keep_every: Count = 0  # steps whose multiples stay as well
    profile: Count = 0  # steps to record behind the first few: a trace and its summary in the run's folder
    run: str | None = None  # the run's name at a tracker
    track: str = ""  # wandb, swanlab, tensorboard; several with commas
    model_tag: str | None = None  # the checkpoints' folder name; default: the source's
    resume: bool = False  # go on from the newest whole checkpoint of this tag
    # processes
    parallel: Literal["ddp", "fsdp"] = "ddp"  # a whole model in each process, or a share of it
    replicate: Positive = 1  # fsdp: groups of neighbours that hold a whole model each, sharded inside
    activation_checkpointing: bool = False  # compute a block's activations twice, to keep few
    hang_seconds: Positive = 600  # without any movement on some rank, after which all end and name it
    agree_every: Positive = 100  # steps between comparisons of the ranks' weights; before each save too
    # device
    device: str = "auto"  # auto, npu, cuda or cpu
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # of matrix products
    compile: Literal["auto", "on", "off"] = "auto"  # torch.compile; auto: where it pays
    seed: Seed = 0  # of the data's order


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
    needs = {"what --tasks names": train_corpus.mixture.fingerprint()}
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
        kept = "tasks seed"
        progress, shares = checkpoint_manager.resume(
            folder, config, kept, steps, model, tokenizer, optimizer, device, source, batch_tokens, needs
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
        meta=lambda: {"source": checkpoint_manager.short_name(source), "pretraining": pretraining, "needs": needs},
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
