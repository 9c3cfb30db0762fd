"""Pretrain a base model on text, on one device or under torchrun.

python -m scripts.base_train --data demo --depth 4 --device_batch_size 8 --max_seq_len 256

torchrun --standalone --nproc_per_node=8 -m scripts.base_train -- --depth=12 --device_batch_size=16
"""

import dataclasses
import math
import time
from dataclasses import dataclass
from typing import Annotated, Literal

from nanochat.run.flags import TrainFlags
from nanochat.shell.cli import Count, Fraction, Frozen, Positive, Range, UserError, run
from nanochat.shell.log import check_trackers, print0, record
from nanochat.shell.paths import checkpoint_dir, safe_tag, tokenizer_dir

Rate = Annotated[float, Range(0, 1e4)]


@dataclass(frozen=True)
class Config(TrainFlags):
    # data
    data: Frozen[str] = "demo"  # a file, a folder, or a name: demo, pydoc, a hub dataset
    val_data: Frozen[str | None] = None  # held-out text; default: the end of --data
    hub: Literal["hf", "modelscope"] = "hf"  # where hub datasets are downloaded from
    shards: Frozen[Positive | None] = None  # files of a hub dataset to train on; default: its first few
    dataloader_num_workers: Annotated[int, Range(0, 256)] = 1  # threads that tokenize
    # model
    depth: Positive = 8  # the one dial: layers; the width is 64 x depth, rounded up to whole heads
    head_dim: Positive = 128  # channels of an attention head
    max_seq_len: Positive = 2048  # tokens of context
    window_pattern: str = "L"  # a letter a layer: S sees a quarter of the context, L all of it, e.g. SSSL
    logit_cap: Annotated[float, Range(0, 1e4)] = 15.0  # soft cap of the logits; 0 for none
    # horizon and batch
    num_iterations: Positive | None = None  # steps; default: from --target_param_data_ratio
    target_param_data_ratio: Annotated[float, Range(1e-3, 1e6)] = 12.0  # training tokens a scaling parameter
    device_batch_size: Positive = 16  # rows a device computes at once
    total_batch_size: Positive | None = None  # tokens a step over all devices; default: a power law of the horizon
    gradient_accumulation_steps: Positive | None = None  # instead of --total_batch_size: micro-batches a step
    # optimizer; rates are by rule unless set
    optimizer: Frozen[Literal["muon", "adamw"]] = "muon"  # of the matrices
    matrix_lr: Rate | None = None  # of the matrices
    embedding_lr: Rate | None = None  # of the token embedding
    value_embedding_lr: Rate | None = None  # of the value embeddings
    head_lr: Rate | None = None  # of the output head
    weight_decay: Rate | None = None  # of the matrices
    warmdown_fraction: Fraction = 0.65  # of the run, at its end, over which rates fall
    # evaluation, device
    eval_every: Count = 250  # steps between evaluations; 0: only at the end
    eval_tokens: Positive = 1_048_576  # of validation text
    compile: Literal["auto", "on", "off"] = "auto"  # torch.compile; auto: where it pays


def main(config: Config) -> None:
    began = time.time()
    # The heavy imports stand here so that --help answers at once.
    import torch

    from nanochat import device as devices
    from nanochat import scaling
    from nanochat.data.loader import Loader, LoaderState
    from nanochat.data.sources import fingerprint, open_corpus
    from nanochat.evals.bpb import bits_per_byte, validation_rows
    from nanochat.gpt import GPT
    from nanochat.parallel.fsdp import shard
    from nanochat.parallel.mesh import lay_out
    from nanochat.run.resume import resume
    from nanochat.run.stage import Stage
    from nanochat.tokenizer import Tokenizer
    from nanochat.train import Meter, Progress, Schedule, make_optimizer, next_token_loss, train_step

    # ------------------------------------------------------------------ device, tokenizer, data
    check(config)
    tokenizer = Tokenizer.load(tokenizer_dir())
    train_corpus, val_corpus = open_corpus(config.data, config.val_data, hub=config.hub, shards=config.shards)
    device = devices.init(config.device, config.dtype)
    device.seed(config.seed)
    layout = lay_out(device, config.parallel, config.replicate)
    print0(f"device: {device}; {layout}")

    # ------------------------------------------------------------------ model
    model_config = scaling.model_config(
        config.depth, tokenizer.vocab_size, config.max_seq_len, config.window_pattern, config.head_dim
    )
    model_config = dataclasses.replace(model_config, logit_cap=config.logit_cap)
    with torch.device("meta"):
        model = GPT(model_config, device.kernels)
    shard(model, layout, device, config.activation_checkpointing)
    model.to_empty(device=device.torch_device)
    model.init_weights(config.seed)
    counts = scaling.parameter_counts(model)
    print0(f"model: {counts['total']:,} parameters ({', '.join(f'{k} {v:,}' for k, v in counts.items() if v)})")

    # ------------------------------------------------------------------ horizon, batch, optimizer
    micro_tokens = config.device_batch_size * config.max_seq_len * device.world_size  # of one pass on all devices
    horizon = scaling.training_tokens(model_config, config.target_param_data_ratio)
    accumulation = micro_batches(config, micro_tokens, scaling.batch_tokens(model_config, horizon))
    batch_tokens = micro_tokens * accumulation
    steps = config.num_iterations or max(1, round(horizon / batch_tokens))
    rates = scaling.rates(model_config, batch_tokens, steps * batch_tokens)
    chosen = {f"{role}_lr": role for role in ("matrix", "embedding", "value_embedding", "head")}
    given = {role: getattr(config, flag) for flag, role in chosen.items()} | {"weight_decay": config.weight_decay}
    rates = dataclasses.replace(rates, **{role: value for role, value in given.items() if value is not None})
    optimizer = make_optimizer(model, rates, device, config.optimizer, layout)
    schedule = Schedule.for_run(steps, warmdown_fraction=config.warmdown_fraction)
    print0(
        f"horizon: {steps:,} steps of {batch_tokens:,} tokens ({accumulation} micro-batches), "
        f"{steps * batch_tokens:,} in all"
    )

    # ------------------------------------------------------------------ resume
    tag = config.model_tag or f"d{config.depth}"
    folder = checkpoint_dir("base", tag)
    progress, shares, fingerprints = Progress(), [], {"what --data names": fingerprint(train_corpus)}
    if config.resume:
        progress, shares = resume(
            folder, config, steps, model, tokenizer, optimizer, device,
            batch_tokens=batch_tokens, fingerprints=fingerprints,
        )  # fmt: skip
    loader = Loader(
        train_corpus, tokenizer, config.device_batch_size, config.max_seq_len,
        rank=device.rank, world_size=device.world_size, seed=config.seed,
        workers=config.dataloader_num_workers, state=LoaderState.merge(shares) if shares else None,
    )  # fmt: skip

    # ------------------------------------------------------------------ train
    token_flops = scaling.flops_per_token(model_config)
    compiled, how = device.compile(model, config.compile, token_flops * batch_tokens * (steps - progress.step))
    print0(f"step: {how}; kernels: {device.kernels}")
    rows = validation_rows(val_corpus, tokenizer, config.max_seq_len, config.eval_tokens)
    token_bytes = torch.tensor(tokenizer.token_bytes())

    def evaluate() -> dict[str, float]:
        val_bpb = bits_per_byte(model, rows, token_bytes, config.device_batch_size, device, stage.should_stop)
        if not math.isfinite(val_bpb):
            raise UserError(f"validation is {val_bpb} at step {progress.step}, nothing more was saved: lower the rates")
        progress.best_val_bpb = min(val_bpb, progress.best_val_bpb or math.inf)
        return {"val_bpb": val_bpb}

    stage = Stage(
        "base", tag, config, device, layout, model, tokenizer, optimizer, progress, steps,
        evaluate=evaluate,
        loader_state=lambda: micro[-1].state.to_tensors(),
        meta=lambda: {
            "pretraining": {"data": config.data, "batch_tokens": batch_tokens, "tokens": progress.tokens},
            "fingerprints": fingerprints,
        },
    )  # fmt: skip
    with stage:
        meter = Meter(progress, device, token_flops)
        for step in stage.steps(meter):
            micro = [next(loader) for _ in range(accumulation)]
            batches = ((device.to_device(b.inputs), device.to_device(b.targets)) for b in micro)
            stats = train_step(
                # Step 0 runs eagerly: its loss is there before the compiler is done, and a resumed run, which
                # never is at step 0, rounds like one straight through.
                compiled if step else model, optimizer, batches, next_token_loss, device=device,
                lr=schedule.lr(step), momentum=schedule.momentum(step), weight_decay=schedule.weight_decay(step),
            )  # fmt: skip
            meter.add(stats, batch_tokens)
            if stage.due(stats):
                stage.report(meter.read(stats) | {"lr": rates.matrix * schedule.lr(step), "epoch": micro[-1].epoch})
    loader.close()
    stage.finish()
    if progress.best_val_bpb is not None:
        best = f"best validation {progress.best_val_bpb:.4f} bits per byte"
        print0(f"done: {progress.step:,} steps, {progress.seconds:.1f} s of training, {best}")
    record("base", tag, began, device)


def check(config: Config) -> None:
    """Raises UserError: for sizes no run can have."""
    check_trackers(config.track)
    safe_tag(config.model_tag or "default")
    if config.head_dim % 2:
        raise UserError(f"--head_dim {config.head_dim}: an even number, such as 64 or 128")
    if set(config.window_pattern) - set("SL") or not config.window_pattern:
        raise UserError(f"--window_pattern {config.window_pattern!r}: letters S and L, e.g. SSSL")


def micro_batches(config: Config, micro_tokens: int, by_rule: int) -> int:
    """Micro-batches a step, from the flags or by rule.

    Raises UserError: when the flags contradict each other.
    """
    given = config.gradient_accumulation_steps
    if config.total_batch_size is None:
        return given or max(1, round(by_rule / micro_tokens))
    count, rest = divmod(config.total_batch_size, micro_tokens)
    if rest or (given and given != count):
        near = max(1, round(config.total_batch_size / micro_tokens)) * micro_tokens
        raise UserError(
            f"--total_batch_size {config.total_batch_size} is not {given or 'a multiple of'} x {micro_tokens} tokens "
            f"(device_batch_size x max_seq_len x processes): "
            f"use {(given or 0) * micro_tokens or near}, or another --device_batch_size"
        )
    return count


if __name__ == "__main__":
    run(main, Config)
