"""Continue the pretraining of a trained model on text: one of our models, or one from a hub.

python -m scripts.continue_train --source hf:Qwen/Qwen3-0.6B --data my_texts:0.7,fineweb-edu:0.3 --max_seq_len 2048 \
    --device_batch_size 4 --total_batch_size 131072 --num_iterations 500 --learning_rate 2e-5
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from nanochat import cli
from nanochat.cli import Positive, Range, UserError
from nanochat.flags import Epochs, TextFlags, TuningFlags, forbid_both
from nanochat.log import counted, print0
from nanochat.paths import checkpoint_dir
from nanochat.screen import phase, track

if TYPE_CHECKING:
    from nanochat.stage import Start

# The scale of mid-training. At the full rates a trained model first forgets; at low rates it learns little of the new
# text (source: Ibrahim et al. 2024, Simple and Scalable Strategies to Continually Pre-train).
LR_SCALE = 0.5
# The decay and clipping that most recipes use for models trained by AdamW (source: Brown et al. 2020, GPT-3, and later
# papers).
ADAMW_DECAY = 0.1
ADAMW_NORM = 1.0


@dataclass(frozen=True)
class Config(TextFlags, TuningFlags):
    # optimizer
    lr_scale: Annotated[float, Range(0, 100)] | None = None  # multiplies all rates by rule; default: 0.5
    # horizon and batch
    num_iterations: Positive | None = None  # steps; this or --num_epochs is required
    num_epochs: Epochs | None = None  # instead of --num_iterations: passes over the text of --data, which is counted
    total_batch_size: Positive | None = None  # tokens per step, over all devices; default: the source's, or one pass

    def __post_init__(self):
        super().__post_init__()
        forbid_both(self, "num_epochs", "num_iterations", "the horizon")
        if self.num_iterations is None and self.num_epochs is None:
            raise UserError(
                "--num_iterations: say for how many steps --source is trained, of --total_batch_size tokens; or "
                "--num_epochs, for how many passes over --data"
            )
        if self.source in ("auto", "base") and self.source_tag is None:
            raise UserError(
                f"--source {self.source}: name it by --source_tag too, as this run makes a base model of another tag"
            )
        if self.adamw_rate is not None:
            chosen_by = "--learning_rate" if self.learning_rate is not None else "the rate of --lora_rank"
            for flag in ("lr_scale", "matrix_lr"):
                if getattr(self, flag) is not None:
                    raise UserError(f"{chosen_by} is absolute, for all parameters: leave --{flag} out")


def main(config: Config) -> None:
    phase("loading torch")
    # The heavy imports are here so that --help answers at once.
    import torch

    from nanochat import scaling
    from nanochat.bpb import bits_per_byte, validation_rows
    from nanochat.corpus import by_part, fingerprint, mean_by_weight, open_corpus, weighted_parts
    from nanochat.data.passes import count_tokens
    from nanochat.loader import Loader, LoaderState
    from nanochat.loop import Run
    from nanochat.stage import begin, count_micro_batches
    from nanochat.train import Schedule, make_adamw, make_optimizer, next_token_loss, train_step

    # ------------------------------------------------------------------ data, model
    phase("opening the data")
    corpora = None
    if not config.dry_run:  # which needs no data
        corpora = open_corpus(
            config.data, config.val_data, hub=config.hub, shards=config.shards, columns=config.columns
        )
    start = begin(config)
    start.tag = tag_beside_source(config.model_tag, start)
    device = start.device
    model = start.model
    tokenizer = start.tokenizer
    counts = scaling.parameter_counts(model)
    print0(f"model: {counts['total']:,} parameters ({', '.join(f'{k} {v:,}' for k, v in counts.items() if v)})")

    # ------------------------------------------------------------------ horizon, batch, optimizer
    row_tokens = model.config.sequence_len
    micro_tokens = config.device_batch_size * row_tokens * device.data_ranks  # tokens in one pass over all devices
    by_rule = start.pretraining.get("batch_tokens", micro_tokens)
    accumulation = count_micro_batches(
        micro_tokens, by_rule, config.total_batch_size, config.gradient_accumulation_steps
    )
    batch_tokens = micro_tokens * accumulation
    steps = config.num_iterations or 1
    text = None
    if corpora is not None:
        text = corpora[0]
        if config.num_epochs is not None:
            text_tokens = count_tokens(text, tokenizer, device, config.dataloader_num_workers)
            # A row takes one token more than the model reads: the last one is only a target.
            epoch_steps = text_tokens * row_tokens / (row_tokens + 1) / batch_tokens
            steps = max(1, math.ceil(round(config.num_epochs * epoch_steps, 6)))
            print0(f"data: {text_tokens:,} tokens, of which an epoch is {epoch_steps:,.1f} steps")
    largest_norm = None  # gradients are not clipped
    if config.adamw_rate is None:
        rates = scaling.rates(model.config, batch_tokens, steps * batch_tokens, config.optimizer)
        rates = config.override(rates.scaled(LR_SCALE if config.lr_scale is None else config.lr_scale))
        optimizer = make_optimizer(model, rates, device, config.optimizer, start.layout, config.kept_as)
        peak_lr = rates.matrix
    else:
        # Decay draws adapters to the weights of the source, which they begin from: there it is off by default.
        decay = config.weight_decay
        if decay is None:
            decay = 0.0 if config.lora_rank else ADAMW_DECAY
        optimizer = make_adamw(model, config.adamw_rate, device, decay, start.layout, config.kept_as)
        peak_lr = config.adamw_rate
        largest_norm = ADAMW_NORM
    schedule = Schedule.for_run(steps, warmdown_fraction=config.warmdown_fraction)
    print0(f"horizon: {counted(steps, 'step')} of {batch_tokens:,} tokens; micro-batches a step: {accumulation}")

    document_mask = config.document_mask == "on"
    if start.ledger is not None:  # --dry_run
        start.ledger.report(
            model, optimizer, next_token_loss, config.device_batch_size, micro_batches=accumulation,
            batch_of=lambda rows: (rows.inputs, rows.targets, rows.segments if document_mask else None),
            max_grad_norm=largest_norm,
        )  # fmt: skip
        return

    # ------------------------------------------------------------------ train
    assert corpora is not None and text is not None
    train_corpus, val_corpus = corpora
    token_flops = scaling.flops_per_token(model.config, is_frozen=start.adapter is not None)
    pretraining = start.pretraining
    tokens_before = pretraining["tokens"]
    # Record everything that the model has read: later stages choose their default tasks by it. A text that is read
    # again is named once.
    names = dict.fromkeys(filter(None, (pretraining["data"], config.data)))
    pretraining |= {"data": ",".join(names), "batch_tokens": batch_tokens, "document_mask": document_mask}
    pretraining["context"] = max(row_tokens, pretraining.get("context", 0))
    run = Run(
        "base", config, start, optimizer, steps, token_flops=token_flops,
        fingerprints={"tokens a step": batch_tokens, "what --data names": fingerprint(train_corpus)},
    )  # fmt: skip
    loader = Loader(
        text, tokenizer, config.device_batch_size, row_tokens, rank=device.data_rank,
        world_size=device.data_ranks, seed=config.seed, workers=config.dataloader_num_workers,
        state=LoaderState.merge(run.loader_states) if run.loader_states else None,
        document_mask=document_mask, step_batches=accumulation, on_error=run.fail,
    )  # fmt: skip
    compiled = run.compile(model, config.compile, token_flops * batch_tokens, (config.device_batch_size, row_tokens))
    phase("reading the validation text")
    val_rows = []  # one entry per corpus of a mixture; its share sets the size
    for part in weighted_parts(val_corpus):
        share = math.ceil(part.weight * config.eval_tokens)
        val_rows.append(validation_rows(part.corpus, tokenizer, row_tokens, share))
    token_bytes = torch.tensor(tokenizer.token_bytes())
    position = loader.start  # in the data, after the last step; `save` stores it

    with run:
        for step in run.steps():
            # ---- `step` steps are finished: evaluate, save or leave if that is due
            if run.due.evaluate:
                with run.interruptible("evaluation"):
                    bits = []
                    for rows in val_rows:
                        bits.append(bits_per_byte(
                            model, rows, token_bytes, config.device_batch_size, device,
                            should_stop=run.should_stop, document_mask=document_mask,
                        ))  # fmt: skip
                    metrics = by_part("val_bpb", bits, val_corpus) | {"val_bpb": mean_by_weight(bits, val_corpus)}
                    run.log.evaluation(**metrics)
            if run.due.save:
                pretraining["tokens"] = tokens_before + run.progress.tokens
                run.save(position.to_tensors())
            if run.due.leave:
                break

            # ---- one step; step 0 is eager, as in base_train
            micro = [next(loader) for _ in range(accumulation)]
            batches = (batch.to(device) for batch in track(micro, "micro-batch"))
            stats = train_step(
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
    run.finish()


def tag_beside_source(model_tag: str | None, start: "Start") -> str:
    """The tag of the new checkpoints. It differs from the tag of a source that is one of our base models.

    Raises UserError: when `model_tag` is the source's.
    """
    if start.source is None or start.source.resolve().parent != checkpoint_dir("base", start.tag).resolve():
        return start.tag
    if model_tag is not None:
        raise UserError(f"--model_tag {model_tag} is the source's own: name another one for the model that it becomes")
    return f"{start.tag}-continued"


if __name__ == "__main__":
    cli.run(main, Config, shows_progress=True)
