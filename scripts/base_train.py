"""Pretrain a base model on text, on one device or under torchrun.

python -m scripts.base_train --data demo --depth 4 --device_batch_size 8 --max_seq_len 256

python -m nanochat.run.launch --nproc_per_node=8 -m scripts.base_train -- --depth=12 --device_batch_size=16
"""

import dataclasses
import math
import time
from dataclasses import dataclass
from typing import Annotated, Literal

from nanochat.run.flags import TrainFlags
from nanochat.shell import cli
from nanochat.shell.cli import Count, Depth, Fraction, Frozen, Positive, Range, Size
from nanochat.shell.log import counted, print0
from nanochat.shell.paths import tokenizer_dir
from nanochat.shell.screen import phase, track

Rate = Annotated[float, Range(0, 1e4)]


@dataclass(frozen=True)
class Config(TrainFlags):
    # data
    # A file, a folder, or a name: demo, pydoc, a hub dataset. Several by their shares of the tokens: a:0.7,b:0.3.
    data: Frozen[str] = "demo"
    val_data: Frozen[str | None] = None  # held-out text; default: the end of --data
    hub: Literal["hf", "modelscope"] = "hf"  # where hub datasets are downloaded from
    shards: Frozen[Positive | None] = None  # files of a hub dataset to train on; default: its first few
    dataloader_num_workers: Annotated[int, Range(0, 256)] = 1  # threads that tokenize
    # model
    depth: Frozen[Depth] = 8  # the one dial: layers; the width is 64 x depth, rounded up to whole heads
    head_dim: Frozen[Annotated[int, Range(1, 4096)]] = 128  # channels of an attention head
    max_seq_len: Frozen[Size] = 2048  # tokens of context
    window_pattern: Frozen[str] = "L"  # one letter per layer: S sees a quarter of the context, L all of it, e.g. SSSL
    mlp: Frozen[Literal["relu2", "swiglu"]] = "relu2"  # squared ReLU, or SwiGLU of 2/3 the width: as many parameters
    document_mask: Frozen[Literal["on", "off"]] = "on"  # on: a row's documents do not attend to each other
    logit_cap: Frozen[Annotated[float, Range(0, 10_000)]] = 15.0  # soft cap of the logits; 0 for none
    # horizon and batch
    num_iterations: Positive | None = None  # steps; default: from --target_param_data_ratio
    target_param_data_ratio: Annotated[float, Range(1e-3, 1e6)] = 12.0  # training tokens per scaling parameter
    device_batch_size: Size = 16  # rows a device computes at once
    total_batch_size: Positive | None = None  # tokens per step, over all devices; default: grows with the horizon
    gradient_accumulation_steps: Size | None = None  # instead of --total_batch_size: micro-batches per step
    # optimizer; a rate that is not set follows from depth, batch and horizon (scaling.py)
    optimizer: Frozen[Literal["muon", "adamw"]] = "muon"  # the optimizer of the blocks' matrices; AdamW takes the rest
    matrix_lr: Rate | None = None  # learning rate of the blocks' matrices; default: by rule
    embedding_lr: Rate | None = None  # learning rate of the token embedding; default: by rule
    value_embedding_lr: Rate | None = None  # learning rate of the value embeddings; default: by rule
    head_lr: Rate | None = None  # learning rate of the output head; default: by rule
    weight_decay: Rate | None = None  # weight decay of the blocks' matrices; default: by rule
    warmdown_fraction: Fraction = 0.65  # last part of the run, in which the rates fall
    # evaluation, device
    eval_every: Count = 250  # steps between evaluations; 0: only at the beginning and the end
    eval_tokens: Positive = 1_048_576  # tokens of validation text per evaluation
    compile: Literal["auto", "on", "off"] = "auto"  # torch.compile; auto: where it pays


def main(config: Config) -> None:
    began = time.time()
    phase("loading torch")
    # The heavy imports are here so that --help answers at once.
    import torch

    from nanochat import scaling
    from nanochat.data.loader import Loader, LoaderState
    from nanochat.data.sources import by_part, fingerprint, mean_by_weight, open_corpus, parts_of
    from nanochat.evals.bpb import bits_per_byte, validation_rows
    from nanochat.gpt import GPT
    from nanochat.parallel.fsdp import shard
    from nanochat.run.memory import Ledger, full_rows
    from nanochat.run.stage import Run, Start, count_micro_batches, open_device
    from nanochat.tokenizer import Tokenizer
    from nanochat.train import Schedule, make_optimizer, next_token_loss, train_step

    # ------------------------------------------------------------------ tokenizer, data, device
    phase("opening the data")
    tokenizer = Tokenizer.load(tokenizer_dir())
    train_corpus, val_corpus = open_corpus(config.data, config.val_data, hub=config.hub, shards=config.shards)
    device, layout = open_device(config)

    # ------------------------------------------------------------------ model
    model_config = scaling.model_config(
        config.depth, tokenizer.vocab_size, config.max_seq_len, config.window_pattern, config.head_dim, config.mlp
    )
    model_config = dataclasses.replace(model_config, logit_cap=config.logit_cap)
    phase("making the model")
    # Built without memory, then sharded, then allocated: no rank ever holds more than its shard.
    with torch.device("meta"):
        model = GPT(model_config, device.kernels)
    shard(model, layout, device, config.activation_checkpointing)
    ledger = Ledger.begin(device, model) if config.dry_run else None
    if ledger is None:
        model.to_empty(device=device.torch_device)
        model.init_weights(config.seed)
    counts = scaling.parameter_counts(model)
    print0(f"model: {counts['total']:,} parameters ({', '.join(f'{k} {v:,}' for k, v in counts.items() if v)})")

    # ------------------------------------------------------------------ horizon, batch, optimizer
    micro_tokens = config.device_batch_size * config.max_seq_len * device.world_size  # of one pass on all devices
    horizon = scaling.training_tokens(model_config, config.target_param_data_ratio)
    accumulation = count_micro_batches(
        micro_tokens, scaling.batch_tokens(model_config, horizon), config.total_batch_size,
        config.gradient_accumulation_steps,
    )  # fmt: skip
    batch_tokens = micro_tokens * accumulation
    steps = config.num_iterations or max(1, round(horizon / batch_tokens))
    rates = scaling.rates(model_config, batch_tokens, steps * batch_tokens, config.optimizer)
    chosen = {
        "matrix": config.matrix_lr,
        "embedding": config.embedding_lr,
        "value_embedding": config.value_embedding_lr,
        "head": config.head_lr,
        "weight_decay": config.weight_decay,
    }
    rates = dataclasses.replace(rates, **{role: rate for role, rate in chosen.items() if rate is not None})
    optimizer = make_optimizer(model, rates, device, config.optimizer, layout)
    schedule = Schedule.for_run(steps, warmdown_fraction=config.warmdown_fraction)
    print0(f"horizon: {counted(steps, 'step')} of {batch_tokens:,} tokens; micro-batches a step: {accumulation}")

    document_mask = config.document_mask == "on"
    if ledger is not None:
        rows = full_rows(config.device_batch_size, config.max_seq_len, device)
        batch = (rows.inputs, rows.targets, *([rows.segments] if document_mask else []))
        ledger.report(model, optimizer, [batch] * min(accumulation, 2), next_token_loss)
        return

    # ------------------------------------------------------------------ train
    token_flops = scaling.flops_per_token(model_config)
    pretraining = {"data": config.data, "batch_tokens": batch_tokens, "tokens": 0, "document_mask": document_mask}
    start = Start(began, device, layout, model, tokenizer, config.model_tag or f"d{config.depth}", pretraining)
    run = Run(
        "base", config, start, optimizer, steps, token_flops=token_flops,
        fingerprints={"tokens a step": batch_tokens, "what --data names": fingerprint(train_corpus)},
    )  # fmt: skip
    loader = Loader(
        train_corpus, tokenizer, config.device_batch_size, config.max_seq_len, rank=device.rank,
        world_size=device.world_size, seed=config.seed, workers=config.dataloader_num_workers,
        state=LoaderState.merge(run.loader_states) if run.loader_states else None,
        document_mask=document_mask,
    )  # fmt: skip
    shape = (config.device_batch_size, config.max_seq_len)
    compiled = run.compile(model, config.compile, token_flops * batch_tokens, shape)
    phase("reading the validation text")
    val_rows = []  # of each corpus of a mixture, by its share
    for part in parts_of(val_corpus):
        share = math.ceil(part.weight * config.eval_tokens)
        val_rows.append(validation_rows(part.corpus, tokenizer, config.max_seq_len, share))
    token_bytes = torch.tensor(tokenizer.token_bytes())
    position = loader.start  # in the data, after the last step; `save` stores it

    with run:
        for step in run.steps():
            # ---- `step` steps are finished: evaluate, save or leave if that is due
            if run.should_evaluate:
                with run.interruptible("evaluation"):
                    # An untrained model guesses alike everywhere: a batch's worth of text shows how well, and the
                    # first loss need not wait for all of it.
                    most_rows = None if step else batch_tokens // config.max_seq_len
                    bits = []
                    for rows in val_rows:
                        bits += [bits_per_byte(
                            model, rows[:most_rows], token_bytes, config.device_batch_size, device,
                            should_stop=run.should_stop, document_mask=document_mask,
                        )]  # fmt: skip
                    metrics = by_part("val_bpb", bits, val_corpus) | {"val_bpb": mean_by_weight(bits, val_corpus)}
                    run.log_evaluation(**metrics)
            if run.should_save:
                pretraining["tokens"] = run.progress.tokens
                run.save(position.to_tensors())
            if run.should_leave:
                break

            # ---- one step: the batch comes in micro-batches, each small enough for the device's memory
            micro = [next(loader) for _ in range(accumulation)]
            batches = (batch.to(device) for batch in track(micro, "micro-batch"))
            stats = train_step(
                # Step 0 runs eagerly, so the first loss is printed before the compiler is done. Every later step is
                # compiled. A checkpoint is from step 1 or later, so a resumed run rounds like an uninterrupted one.
                compiled if step else model, optimizer, batches, next_token_loss, device=device,
                lr=schedule.lr(step), momentum=schedule.momentum(step), weight_decay=schedule.weight_decay(step),
            )  # fmt: skip
            run.add(stats, batch_tokens)
            position = micro[-1].state
            if run.should_log:
                epochs = by_part("epoch", micro[-1].epochs, train_corpus)
                run.log(stats, lr=rates.matrix * schedule.lr(step), **epochs)
    loader.close()
    best = run.progress.best_val_bpb
    run.finish("" if best is None else f"best validation {best:.4f} bits per byte")


if __name__ == "__main__":
    cli.run(main, Config, shows_progress=True)
