"""Pretrain a base model on text, on one device or under torchrun.

python -m scripts.base_train --data demo --depth 4 --device_batch_size 8 --max_seq_len 256

python -m nanochat.run.launch --nproc_per_node=8 -m scripts.base_train -- --depth=12 --device_batch_size=16
"""

import math
import time
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from nanochat.ground import cli
from nanochat.ground.cli import Count, Depth, Fraction, Frozen, Positive, Range, Size
from nanochat.ground.log import counted, print0
from nanochat.ground.paths import tokenizer_dir
from nanochat.ground.screen import phase, track
from nanochat.run.flags import Rate, TrainFlags


@dataclass(frozen=True)
class Config(TrainFlags):
    # data

    # A file, a folder, or a name: demo, pydoc, a hub dataset. Several by their shares of the tokens: a:0.7,b:0.3.
    data: Frozen[str] = "demo"
    val_data: Frozen[str | None] = None  # held-out text; default: the end of --data
    columns: str = ""  # text=COLUMN, where the text in the files of --data has another name
    hub: Literal["hf", "modelscope"] = "hf"  # where hub datasets are downloaded from
    shards: Frozen[Positive | None] = None  # files of a hub dataset to train on; default: its first few
    dataloader_num_workers: Annotated[int, Range(0, 256)] = 1  # threads that tokenize
    document_mask: Frozen[Literal["on", "off"]] = "on"  # on: a row's documents do not attend to each other
    # batch
    device_batch_size: Size = 16  # rows a device computes at once
    gradient_accumulation_steps: Size | None = None  # instead of --total_batch_size: micro-batches per step
    # optimizer; a rate that is not set follows from depth, batch and horizon (scaling.py)
    optimizer: Frozen[Literal["muon", "adamw"]] = "muon"  # the optimizer of the blocks' matrices; AdamW takes the rest
    matrix_lr: Rate | None = None  # learning rate of the blocks' matrices; default: by rule
    weight_decay: Rate | None = None  # weight decay of the blocks' matrices; default: by rule
    warmdown_fraction: Fraction = 0.65  # the last part of the run, in which the rates fall
    # evaluation
    eval_every: Count = 250  # steps between evaluations; 0: only at the beginning and the end
    eval_tokens: Positive = 1_048_576  # tokens of validation text per evaluation
    # model
    depth: Frozen[Depth] = 8  # the one dial: layers; the width is 64 x depth, in whole heads
    head_dim: Frozen[Annotated[int, Range(1, 4096)]] = 128  # channels of an attention head
    max_seq_len: Frozen[Annotated[int, Range(1, 10**7)]] = 2048  # tokens of context
    window_pattern: Frozen[str] = "L"  # one letter per layer: S sees a quarter of the context, L all of it, e.g. SSSL
    mlp: Frozen[Literal["relu2", "swiglu"]] = "relu2"  # squared ReLU; or SwiGLU at 2/3 the width: same parameter count
    experts: Frozen[Annotated[int, Range(0, 4096)]] = 0  # experts in each block; 0: one MLP
    experts_per_token: Frozen[Positive] = 2  # experts that a token passes through
    expert_width: Frozen[Annotated[int, Range(0, 10**6)]] = 0  # 0: a token's experts add up to the MLP's width
    shared_experts: Frozen[Annotated[int, Range(0, 64)]] = 0  # experts that every token passes through in addition
    # horizon and batch
    num_iterations: Positive | None = None  # steps; default: from --target_param_data_ratio
    target_param_data_ratio: Annotated[float, Range(1e-3, 1e6)] = 12.0  # training tokens per scaling parameter
    total_batch_size: Positive | None = None  # tokens per step, over all devices; default: by the horizon

    def __post_init__(self):
        sizes = ("experts_per_token", "expert_width", "shared_experts")
        if not self.experts and any(getattr(self, name) != getattr(Config, name) for name in sizes):
            raise cli.UserError(f"--{', --'.join(sizes)} are sizes of experts: add --experts")


def main(config: Config) -> None:
    began = time.time()
    phase("loading torch")
    # The heavy imports are here so that --help answers at once.
    import torch

    from nanochat import scaling
    from nanochat.bpb import bits_per_byte, validation_rows
    from nanochat.gpt import GPT
    from nanochat.ground.corpus import by_part, fingerprint, mean_by_weight, open_corpus, weighted_parts
    from nanochat.kernels.run_flags import compiled_and_profiled
    from nanochat.loader import Loader, LoaderState
    from nanochat.run.loop import Run
    from nanochat.run.stage import Start, count_micro_batches, open_device
    from nanochat.tokenizer import Tokenizer
    from nanochat.train import Schedule, make_optimizer, next_token_loss, train_step

    # ------------------------------------------------------------------ tokenizer, data, device, model
    phase("opening the data")
    tokenizer = Tokenizer.load(tokenizer_dir())
    train_corpus, val_corpus = open_corpus(
        config.data, config.val_data, hub=config.hub, shards=config.shards, columns=config.columns
    )
    device, layout = open_device(config)
    phase("making the model")
    row_tokens = config.max_seq_len
    model_config = scaling.model_config(
        config.depth, tokenizer.vocab_size, row_tokens, head_dim=config.head_dim,
        window_pattern=config.window_pattern, mlp=config.mlp,
    )  # fmt: skip
    if config.experts:
        from nanochat.experts.sizes import with_experts

        model_config = with_experts(model_config, config)
    # Built without memory, then sharded, then allocated: no rank ever holds more than its shard.
    with torch.device("meta"):
        model = GPT(model_config, device.kernels)
    if config.activation_checkpointing:
        model.recompute_activations()
    layout.shard(model, device)
    start = Start(began, device, layout, model, tokenizer, config.model_tag or f"d{config.depth}")
    if config.dry_run:
        from nanochat.parallel import dry_run

        start.ledger = dry_run.begin(device, model)
    else:
        model.to_empty(device=device.torch_device)
        model.init_weights(config.seed)
    counts = scaling.parameter_counts(model)
    print0(f"model: {counts['total']:,} parameters ({', '.join(f'{k} {v:,}' for k, v in counts.items() if v)})")

    # ------------------------------------------------------------------ horizon, batch, optimizer
    micro_tokens = config.device_batch_size * row_tokens * device.data_ranks  # tokens in one pass over all devices
    horizon = scaling.training_tokens(model.config, config.target_param_data_ratio)
    by_rule = scaling.batch_tokens(horizon)
    accumulation = count_micro_batches(
        micro_tokens, by_rule, config.total_batch_size, config.gradient_accumulation_steps
    )
    batch_tokens = micro_tokens * accumulation
    steps = config.num_iterations or max(1, round(horizon / batch_tokens))
    rates = scaling.rates(model.config, batch_tokens, steps * batch_tokens, config.optimizer)
    if config.matrix_lr is not None:
        rates = replace(rates, matrix=config.matrix_lr)
    if config.weight_decay is not None:
        rates = replace(rates, weight_decay=config.weight_decay)
    optimizer = make_optimizer(model, rates, device, config.optimizer, layout, config.kept_as)
    # A new model has nothing to lose: a short warmup is enough (3 steps for 25: -0.8% bits per byte, 2026-11-23).
    schedule = Schedule.for_run(steps, config.warmdown_fraction, warmup_steps=min(40, steps // 40))
    print0(f"horizon: {counted(steps, 'step')} of {batch_tokens:,} tokens; micro-batches a step: {accumulation}")

    document_mask = config.document_mask == "on"
    if start.ledger is not None:  # --dry_run
        start.ledger.report(
            model, optimizer, next_token_loss, config.device_batch_size, micro_batches=accumulation,
            batch_of=lambda rows: (rows.inputs, rows.targets, rows.segments if document_mask else None),
        )  # fmt: skip
        return

    # ------------------------------------------------------------------ train
    if config.data != "demo" or config.val_data is not None:  # the demo has no files
        from nanochat.data.text_table import print_texts

        print_texts(config, train_corpus, val_corpus, tokenizer)
    token_flops = scaling.flops_per_token(model.config)
    # Record what the model reads: later stages choose their default tasks by it.
    pretraining = start.pretraining
    pretraining |= {"data": config.data, "batch_tokens": batch_tokens, "document_mask": document_mask}
    pretraining["context"] = row_tokens
    run = Run(
        "base", config, start, optimizer, steps, token_flops=token_flops,
        fingerprints={"tokens a step": batch_tokens, "what --data names": fingerprint(train_corpus)},
    )  # fmt: skip
    loader = Loader(
        train_corpus, tokenizer, config.device_batch_size, row_tokens, rank=device.data_rank,
        world_size=device.data_ranks, seed=config.seed, workers=config.dataloader_num_workers,
        state=LoaderState.merge(run.loader_states) if run.loader_states else None,
        document_mask=document_mask, step_batches=accumulation, on_error=run.fail,
    )  # fmt: skip
    compiled, _ = compiled_and_profiled(run, token_flops * batch_tokens, (config.device_batch_size, row_tokens), model)
    phase("reading the validation text")
    val_rows = []  # one entry per corpus of a mixture; its share sets the size
    for part in weighted_parts(val_corpus):
        share = math.ceil(part.weight * config.eval_tokens)
        val_rows.append(validation_rows(part.corpus, tokenizer, row_tokens, share))
    token_bytes = torch.tensor(tokenizer.token_bytes())
    position = loader.start  # in the data, after the last step; `save` stores it
    run.loader_bytes = loader.peek().state.expected_bytes()

    with run:
        for step in run.steps():
            # ---- `step` steps are finished: evaluate, save or leave if that is due
            if run.must_evaluate:
                with run.interruptible("evaluation"):
                    # An untrained model guesses alike everywhere. A batch's worth of text is enough to measure that,
                    # and the first loss comes sooner.
                    most_rows = None if step else batch_tokens // row_tokens
                    bits = []
                    for rows in val_rows:
                        bits.append(bits_per_byte(
                            model, rows[:most_rows], token_bytes, config.device_batch_size, device,
                            should_stop=run.should_stop, document_mask=document_mask,
                        ))  # fmt: skip
                    metrics = by_part("val_bpb", bits, val_corpus) | {"val_bpb": mean_by_weight(bits, val_corpus)}
                    run.log_evaluation(**metrics)
            if run.must_save:
                pretraining["tokens"] = run.progress.tokens
                run.save(position.to_tensors())
            if run.must_leave:
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
            run.count(stats, batch_tokens)
            position = micro[-1].state
            if run.must_log:
                epochs = by_part("epoch", micro[-1].epochs, train_corpus)
                run.log_step(lr=rates.matrix * schedule.lr(step), **epochs)
    loader.close()
    run.finish()


if __name__ == "__main__":
    cli.run(main, Config, shows_progress=True)
