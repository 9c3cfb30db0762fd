"""Pretrain a base model on text, or continue the pretraining of one that there is, on one device or under torchrun.

python -m scripts.base_train --data demo --depth 4 --device_batch_size 8 --max_seq_len 256

python -m nanochat.run.launch --nproc_per_node=8 -m scripts.base_train -- --depth=12 --device_batch_size=16

python -m scripts.base_train --source hf:Qwen/Qwen3-0.6B --data my_texts:0.7,fineweb-edu:0.3 --max_seq_len 2048 \
    --device_batch_size 4 --total_batch_size 131072 --num_iterations 500 --learning_rate 2e-5
"""

import dataclasses
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from nanochat import cli
from nanochat.cli import Count, Depth, Fraction, Frozen, Positive, Range, Size, UserError
from nanochat.flags import SourceFlags
from nanochat.log import counted, print0
from nanochat.paths import checkpoint_dir, tokenizer_dir
from nanochat.screen import phase, track

if TYPE_CHECKING:
    from nanochat.stage import Start

Rate = Annotated[float, Range(0, 1e4)]
# The shape of a new model where a flag is not set. A model of --source has its own.
NEW_SHAPE = {"depth": 8, "head_dim": 128, "window_pattern": "L", "mlp": "relu2", "logit_cap": 15.0}
NEW_CONTEXT = 2048
CONTINUED_SCALE = 0.5  # of --lr_scale


@dataclass(frozen=True)
class Config(SourceFlags):
    # continued pretraining
    source: str = ""  # a stage, a folder (ours, Hugging Face's or peft's) or hf:ORG/NAME; default: a new model
    # With --source: absolute, of AdamW; default: Muon, by --lr_scale.
    learning_rate: Annotated[float, Range(1e-9, 1)] | None = None
    # With --source: multiplies all learning rates of pretraining; default: 0.5.
    lr_scale: Annotated[float, Range(0, 100)] | None = None
    # data
    # A file, a folder, or a name: demo, pydoc, a hub dataset. Several by their shares of the tokens: a:0.7,b:0.3.
    data: Frozen[str] = "demo"
    val_data: Frozen[str | None] = None  # held-out text; default: the end of --data
    hub: Literal["hf", "modelscope"] = "hf"  # where hub datasets are downloaded from
    shards: Frozen[Positive | None] = None  # files of a hub dataset to train on; default: its first few
    dataloader_num_workers: Annotated[int, Range(0, 256)] = 1  # threads that tokenize
    token_cache_gib: Annotated[float, Range(0, 10**6)] = 8.0  # GiB of tokens of files on the disk, of all runs; 0: none
    document_mask: Frozen[Literal["on", "off"]] = "on"  # on: a row's documents do not attend to each other
    # new model
    depth: Frozen[Depth | None] = None  # the one dial: layers; the width is 64 x depth, in whole heads; default: 8
    head_dim: Frozen[Annotated[int, Range(1, 4096)] | None] = None  # channels of an attention head; default: 128
    # Tokens of context; default (0): 2048, or the whole context of --source.
    max_seq_len: Frozen[Annotated[int, Range(0, 10**7)]] = 0
    # One letter per layer: S sees a quarter of the context, L all of it, e.g. SSSL; default: L.
    window_pattern: Frozen[str | None] = None
    # Squared ReLU (the default), or SwiGLU of 2/3 the width: as many parameters.
    mlp: Frozen[Literal["relu2", "swiglu"] | None] = None
    # Soft cap of the logits; 0 for none; default: 15.
    logit_cap: Frozen[Annotated[float, Range(0, 10_000)] | None] = None
    # horizon and batch
    num_iterations: Positive | None = None  # steps; default: of a new model from --target_param_data_ratio
    target_param_data_ratio: Annotated[float, Range(1e-3, 1e6)] = 12.0  # training tokens per scaling parameter
    device_batch_size: Size = 16  # rows a device computes at once
    # Tokens per step, over all devices; default: of a new model by the horizon, else the source's or one micro-batch.
    total_batch_size: Positive | None = None
    gradient_accumulation_steps: Size | None = None  # instead of --total_batch_size: micro-batches per step
    # optimizer; a rate that is not set follows from depth, batch and horizon (scaling.py)
    optimizer: Frozen[Literal["muon", "adamw"]] = "muon"  # the optimizer of the blocks' matrices; AdamW takes the rest
    matrix_lr: Rate | None = None  # learning rate of the blocks' matrices; default: by rule
    embedding_lr: Rate | None = None  # learning rate of the token embedding; default: by rule
    value_embedding_lr: Rate | None = None  # learning rate of the value embeddings; default: by rule
    head_lr: Rate | None = None  # learning rate of the output head; default: by rule
    weight_decay: Rate | None = None  # weight decay of the blocks' matrices; default: by rule
    warmdown_fraction: Fraction = 0.65  # last part of the run, in which the rates fall
    fp8: Frozen[bool] = False  # the products of the blocks in 8 bits (FP8), where the device has it
    # evaluation, device
    eval_every: Count = 250  # steps between evaluations; 0: only at the beginning and the end
    eval_tokens: Positive = 1_048_576  # tokens of validation text per evaluation
    compile: Literal["auto", "on", "off"] = "auto"  # torch.compile; auto: where it pays

    def __post_init__(self):
        if not self.source:
            for flag in ("source_tag", "source_step", "learning_rate", "lr_scale", "rope_scaling"):
                if getattr(self, flag) not in (None, "auto"):
                    raise UserError(
                        f"--{flag} is for continued pretraining: name the model by --source, or leave it out"
                    )
            for flag, default in NEW_SHAPE.items():
                if getattr(self, flag) is None:
                    object.__setattr__(self, flag, default)
            object.__setattr__(self, "max_seq_len", self.max_seq_len or NEW_CONTEXT)
            return
        for flag in NEW_SHAPE:
            if getattr(self, flag) is not None:
                raise UserError(f"--{flag} shapes a new model, and --source {self.source} has its shape: leave it out")
        if self.num_iterations is None:
            raise UserError(
                "--num_iterations: say for how many steps --source is trained, of --total_batch_size tokens"
            )
        if self.source in ("auto", "base") and self.source_tag is None:
            raise UserError(
                f"--source {self.source}: name it by --source_tag too, as this run makes a base model of another tag"
            )
        if self.learning_rate is not None:
            for flag in ("lr_scale", "matrix_lr", "embedding_lr", "value_embedding_lr", "head_lr"):
                if getattr(self, flag) is not None:
                    raise UserError(f"--learning_rate is absolute, for all parameters: leave --{flag} out")

    @property
    def new_shape(self) -> dict[str, Any]:
        """The shape of a new model, as scaling.model_config takes it, and its logit_cap."""
        return {flag: getattr(self, flag) for flag in NEW_SHAPE}


def main(config: Config) -> None:
    began = time.time()
    phase("loading torch")
    # The heavy imports are here so that --help answers at once.
    import torch

    from nanochat import rooms, scaling
    from nanochat.bpb import bits_per_byte, validation_rows
    from nanochat.corpus import by_part, fingerprint, mean_by_weight, open_corpus, parts_of
    from nanochat.gpt import GPT
    from nanochat.loader import Loader, LoaderState
    from nanochat.loop import Run
    from nanochat.parallel.fsdp import shard
    from nanochat.run.memory import begin as begin_ledger
    from nanochat.run.memory import full_rows
    from nanochat.stage import Start, begin, count_micro_batches, open_device
    from nanochat.tokenizer import Tokenizer
    from nanochat.train import Schedule, make_adamw, make_optimizer, next_token_loss, train_step

    # ------------------------------------------------------------------ tokenizer, data, device, model
    phase("opening the data")
    tokenizer = None if config.source else Tokenizer.load(tokenizer_dir())
    train_corpus, val_corpus = open_corpus(config.data, config.val_data, hub=config.hub, shards=config.shards)
    if tokenizer is None:
        start = begin(config)
        start.tag = tag_beside_source(config.model_tag, start)
    else:
        device, layout = open_device(config)
        shape = config.new_shape
        logit_cap = shape.pop("logit_cap")
        model_config = scaling.model_config(vocab_size=tokenizer.vocab_size, sequence_len=config.max_seq_len, **shape)
        phase("making the model")
        # Built without memory, then sharded, then allocated: no rank ever holds more than its shard.
        with torch.device("meta"):
            model = GPT(dataclasses.replace(model_config, logit_cap=logit_cap), device.kernels)
        shard(model, layout, device, config.activation_checkpointing)
        tag = config.model_tag or f"d{config.depth}"
        start = Start(began, device, layout, model, tokenizer, tag, {"data": "", "tokens": 0})
        if config.dry_run:
            start.ledger = begin_ledger(device, model)
        else:
            model.to_empty(device=device.torch_device)
            model.init_weights(config.seed)
    device = start.device
    model = start.model
    tokenizer = start.tokenizer
    if config.fp8:
        print0(f"products: {device.use_fp8(model)}")
    row_tokens = model.config.sequence_len
    counts = scaling.parameter_counts(model)
    print0(f"model: {counts['total']:,} parameters ({', '.join(f'{k} {v:,}' for k, v in counts.items() if v)})")

    # ------------------------------------------------------------------ horizon, batch, optimizer
    micro_tokens = config.device_batch_size * row_tokens * device.world_size  # of one pass on all devices
    horizon = scaling.training_tokens(model.config, config.target_param_data_ratio)
    by_rule = scaling.batch_tokens(model.config, horizon)
    if config.source:
        by_rule = start.pretraining.get("batch_tokens", micro_tokens)
    accumulation = count_micro_batches(
        micro_tokens, by_rule, config.total_batch_size, config.gradient_accumulation_steps
    )
    batch_tokens = micro_tokens * accumulation
    steps = config.num_iterations or max(1, round(horizon / batch_tokens))
    rates = scaling.rates(model.config, batch_tokens, steps * batch_tokens, config.optimizer)
    if config.source:
        # As mid-training: at the full rates a trained model first forgets, at low ones it learns little of the new text
        # (source: Ibrahim et al. 2024, Simple and Scalable Strategies to Continually Pre-train).
        rates = rates.scaled(CONTINUED_SCALE if config.lr_scale is None else config.lr_scale)
    chosen = {
        "matrix": config.matrix_lr,
        "embedding": config.embedding_lr,
        "value_embedding": config.value_embedding_lr,
        "head": config.head_lr,
        "weight_decay": config.weight_decay,
    }
    rates = dataclasses.replace(rates, **{role: rate for role, rate in chosen.items() if rate is not None})
    if config.learning_rate is None:
        optimizer = make_optimizer(model, rates, device, config.optimizer, start.layout, config.kept_as)
        peak_lr = rates.matrix
        largest_norm = None  # gradients are not clipped
    else:
        # The decay and the clipping are those of most recipes for models that AdamW has trained (source: Brown et al.
        # 2020, GPT-3, and those after it).
        decay = 0.1 if config.weight_decay is None else config.weight_decay
        optimizer = make_adamw(model, config.learning_rate, device, decay, start.layout, config.kept_as)
        peak_lr = config.learning_rate
        largest_norm = 1.0
    # A trained model is warmed up for a tenth of a short run. A new one has nothing to lose, and learns faster with a
    # shorter rise (docs/measurements.md).
    warmup = {} if config.source else {"warmup_steps": min(40, steps // 40)}
    schedule = Schedule.for_run(steps, warmdown_fraction=config.warmdown_fraction, **warmup)
    print0(f"horizon: {counted(steps, 'step')} of {batch_tokens:,} tokens; micro-batches a step: {accumulation}")

    document_mask = config.document_mask == "on"
    if start.ledger is not None:
        rows = full_rows(config.device_batch_size, row_tokens, device)
        batch = (rows.inputs, rows.targets, *([rows.segments] if document_mask else []))
        start.ledger.report(
            model, optimizer, [batch] * min(accumulation, 2), next_token_loss, max_grad_norm=largest_norm
        )
        return

    # ------------------------------------------------------------------ train
    token_flops = scaling.flops_per_token(model.config)
    pretraining = start.pretraining
    tokens_before = pretraining["tokens"]
    # All that the model has read: default tasks follow from it. One text that is read again is named once.
    names = dict.fromkeys(filter(None, (pretraining["data"], config.data)))
    pretraining |= {"data": ",".join(names), "batch_tokens": batch_tokens, "document_mask": document_mask}
    pretraining["context"] = max(row_tokens, pretraining.get("context", 0))
    run = Run(
        "base", config, start, optimizer, steps, token_flops=token_flops,
        fingerprints={"tokens a step": batch_tokens, "what --data names": fingerprint(train_corpus)},
    )  # fmt: skip
    token_source = train_corpus
    if config.token_cache_gib:
        cache = rooms.find("token caches", "disk")
        token_source = cache(train_corpus, tokenizer, config.token_cache_gib, config.dataloader_num_workers)
    loader = Loader(
        token_source, tokenizer, config.device_batch_size, row_tokens, rank=device.rank,
        world_size=device.world_size, seed=config.seed, workers=config.dataloader_num_workers,
        state=LoaderState.merge(run.loader_states) if run.loader_states else None,
        document_mask=document_mask,
    )  # fmt: skip
    compiled = run.compile(model, config.compile, token_flops * batch_tokens, (config.device_batch_size, row_tokens))
    phase("reading the validation text")
    val_rows = []  # of each corpus of a mixture, by its share
    for part in parts_of(val_corpus):
        share = math.ceil(part.weight * config.eval_tokens)
        val_rows.append(validation_rows(part.corpus, tokenizer, row_tokens, share))
    token_bytes = torch.tensor(tokenizer.token_bytes())
    position = loader.start  # in the data, after the last step; `save` stores it

    with run:
        for step in run.steps():
            # ---- `step` steps are finished: evaluate, save or leave if that is due
            if run.due.evaluate:
                with run.interruptible("evaluation"):
                    # An untrained model guesses alike everywhere: a batch's worth of text shows how well, and the
                    # first loss need not wait for all of it.
                    most_rows = None if step or config.source else batch_tokens // row_tokens
                    bits = []
                    for rows in val_rows:
                        bits.append(bits_per_byte(
                            model, rows[:most_rows], token_bytes, config.device_batch_size, device,
                            should_stop=run.should_stop, document_mask=document_mask,
                        ))  # fmt: skip
                    metrics = by_part("val_bpb", bits, val_corpus) | {"val_bpb": mean_by_weight(bits, val_corpus)}
                    run.log.evaluation(**metrics)
            if run.due.save:
                pretraining["tokens"] = tokens_before + run.progress.tokens
                run.save(position.to_tensors())
            if run.due.leave:
                break

            # ---- one step: the batch comes in micro-batches, each small enough for the device's memory
            micro = [next(loader) for _ in range(accumulation)]
            batches = (batch.to(device) for batch in track(micro, "micro-batch"))
            stats = train_step(
                # Step 0 runs eagerly, so the first loss is printed before the compiler is done. Every later step is
                # compiled. A checkpoint is from step 1 or later, so a resumed run rounds like an uninterrupted one.
                compiled if step else model, optimizer, batches, next_token_loss, device=device,
                lr=schedule.lr(step), momentum=schedule.momentum(step), weight_decay=schedule.weight_decay(step),
                max_grad_norm=largest_norm,
            )  # fmt: skip
            run.log.add(stats, batch_tokens)
            position = micro[-1].state
            if run.due.log:
                epochs = by_part("epoch", micro[-1].epochs, train_corpus)
                run.log.step(stats, lr=peak_lr * schedule.lr(step), **epochs)
    loader.close()
    best = run.progress.best_val_bpb
    run.finish("" if best is None else f"best validation {best:.4f} bits per byte")


def tag_beside_source(model_tag: str | None, start: "Start") -> str:
    """The tag of a run that continues a model: its source's, which a base model of ours has to keep for itself.

    Raises UserError: when `model_tag` is the source's.
    """
    if start.source is None or start.source.resolve().parent != checkpoint_dir("base", start.tag).resolve():
        return start.tag
    if model_tag is not None:
        raise UserError(f"--model_tag {model_tag} is the source's own: name another one for the model that it becomes")
    return f"{start.tag}-continued"


if __name__ == "__main__":
    cli.run(main, Config, shows_progress=True)
