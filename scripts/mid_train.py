"""Mid-training: a base model learns the chat format and new skills from whole conversations, or it reads more text. The
rows are dense, and every token is a target.

python -m scripts.mid_train --device_batch_size=8

python -m nanochat.run.launch --nproc_per_node=8 -m scripts.mid_train -- --tasks smoltalk:20,gsm8k:1

python -m scripts.mid_train --source hf:Qwen/Qwen3-0.6B --data my_texts:0.7,fineweb-edu:0.3 --max_seq_len 2048 \
    --device_batch_size 4 --total_batch_size 131072 --num_iterations 500
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from nanochat.ground import cli
from nanochat.ground.cli import Count, Fraction, Frozen, Positive, Range, UserError
from nanochat.ground.log import counted, doubt, print0
from nanochat.ground.paths import checkpoint_dir
from nanochat.ground.screen import phase, track
from nanochat.run.flags import ChatFlags, Epochs, forbid_both

if TYPE_CHECKING:
    from nanochat.run.stage import Start


@dataclass(frozen=True)
class Config(ChatFlags):
    # data
    data: Frozen[str] = ""  # text instead of --tasks: the forms of base_train --data; it stays a base model
    val_data: Frozen[str | None] = None  # held-out text; default: the end of --data
    shards: Frozen[Positive | None] = None  # files of a hub dataset of --data; default: its first few
    # horizon and batch
    num_iterations: Positive | None = None  # steps; default: a tenth of the base model's tokens
    num_epochs: Epochs | None = None  # instead of --num_iterations: passes over the text of --data, which is counted
    device_batch_size: Positive = 16  # rows a device computes at once
    total_batch_size: Positive | None = None  # tokens per step, over all devices; default: the base model's
    gradient_accumulation_steps: Positive | None = None  # instead of --total_batch_size: micro-batches per step
    dataloader_num_workers: Annotated[int, Range(0, 256)] = 1  # threads that tokenize
    # optimizer. At the full rates of pretraining a trained model first forgets; at low rates it learns little of the
    # new text (source: Ibrahim et al. 2024, Simple and Scalable Strategies to Continually Pre-train).
    lr_scale: Annotated[float, Range(0, 100)] = 0.5  # multiplies all learning rates of pretraining
    warmdown_fraction: Fraction = 0.8  # the last part of the run, in which the rates fall
    # evaluation
    eval_every: Count = 150  # steps between evaluations; 0: only at the beginning and the end
    eval_tokens: Positive = 262_144  # tokens of held-out conversations or text

    def __post_init__(self):
        super().__post_init__()
        forbid_both(self, "num_epochs", "num_iterations", "the horizon")
        if self.data and self.tasks:
            raise UserError("--data and --tasks both name what the model learns from: leave one of them out")
        for flag in ("val_data", "shards", "num_epochs"):
            if getattr(self, flag) is not None and not self.data:
                raise UserError(f"--{flag} is for text: add --data, or leave it out")
        if self.data and self.source in ("auto", "base") and self.source_tag is None:
            raise UserError(
                f"--source {self.source}: name it by --source_tag too, as this run makes a base model of another tag"
            )


def main(config: Config) -> None:
    phase("loading torch")
    # The heavy imports are here so that --help answers at once.
    import torch

    from nanochat import scaling
    from nanochat.bpb import bits_per_byte, validation_rows
    from nanochat.data.passes import count_tokens
    from nanochat.data.text_table import print_texts
    from nanochat.ground.corpus import by_part, fingerprint, mean_by_weight, open_corpus, weighted_parts
    from nanochat.kernels.run_flags import compiled_and_profiled
    from nanochat.loader import Loader, LoaderState
    from nanochat.mixture import BLOCK_EXAMPLES, MixtureCorpus
    from nanochat.run.loop import Run
    from nanochat.run.stage import begin, count_micro_batches, open_optimizer
    from nanochat.tasks.flag import open_tasks
    from nanochat.train import Schedule, next_token_loss, train_step

    # ------------------------------------------------------------------ model, batch
    start = begin(config)
    stage = "mid"
    if config.data:
        stage = "base"
        start.tag = tag_beside_source(config.model_tag, start)
    device = start.device
    model = start.model
    tokenizer = start.tokenizer
    pretraining = start.pretraining
    row_tokens = model.config.sequence_len
    document_mask = pretraining.get("document_mask", bool(config.data))  # as in pretraining
    micro_tokens = config.device_batch_size * row_tokens * device.data_ranks  # tokens in one pass over all devices
    by_rule = pretraining.get("batch_tokens", micro_tokens)
    accumulation = count_micro_batches(
        micro_tokens, by_rule, config.total_batch_size, config.gradient_accumulation_steps
    )
    batch_tokens = micro_tokens * accumulation
    if start.ledger is not None:  # --dry_run, which needs no data: any rates take the same memory
        optimizer, _ = open_optimizer(config, start, scaling.rates(model.config, batch=1, tokens=1))
        start.ledger.report(
            model, optimizer, next_token_loss, config.device_batch_size, micro_batches=accumulation,
            batch_of=lambda rows: (rows.inputs, rows.targets, rows.segments if document_mask else None),
            max_grad_norm=config.largest_norm,
        )  # fmt: skip
        return

    # ------------------------------------------------------------------ data
    task_names: list[str] = []  # those that the model learns
    fingerprints: dict[str, Any] = {"tokens a step": batch_tokens, "the base model's --document_mask": document_mask}
    has_validation = True
    if config.data:
        train_corpus, val_corpus = open_corpus(
            config.data, config.val_data, hub=config.hub, shards=config.shards, columns=config.columns
        )
        print_texts(config, train_corpus, val_corpus, tokenizer)
        fingerprints["what --data names"] = fingerprint(train_corpus)
    else:
        from nanochat.tasks.conversations import Conversations

        tasks, train, held_out = open_tasks(config, pretraining["data"])
        train_corpus, val_corpus = MixtureCorpus(train, tokenizer), MixtureCorpus(held_out, tokenizer)
        print0(f"tasks: {tasks}")
        if masked := sum(task.seen.masked for task in train.tasks if isinstance(task, Conversations)):
            problem = f"{masked:,} replies are marked as not learned, but mid-training learns every token"
            doubt(f"--tasks {tasks}: {problem}", config.strict_data)
        has_validation = bool(held_out.tasks)  # a small file has no held-out rows
        task_names = train.task_names
        fingerprints["what --tasks names"] = train.fingerprint()

    # ------------------------------------------------------------------ horizon, optimizer
    if config.num_epochs is not None:
        text_tokens = count_tokens(train_corpus, tokenizer, device, config.dataloader_num_workers)
        # A row takes one token more than the model reads: the last one is only a target.
        epoch_steps = text_tokens * row_tokens / (row_tokens + 1) / batch_tokens
        steps = max(1, math.ceil(round(config.num_epochs * epoch_steps, 6)))
        print0(f"data: {text_tokens:,} tokens, of which an epoch is {epoch_steps:,.1f} steps")
    elif not config.num_iterations and not pretraining["tokens"]:
        raise UserError("--num_iterations: this model does not say how many tokens it has read: give the steps")
    else:
        steps = config.num_iterations or max(1, round(pretraining["tokens"] / 10 / batch_tokens))
    rates = scaling.rates(model.config, batch_tokens, steps * batch_tokens).scaled(config.lr_scale)
    optimizer, peak_lr = open_optimizer(config, start, rates)
    schedule = Schedule.for_run(steps, config.warmdown_fraction)
    print0(f"horizon: {counted(steps, 'step')} of {batch_tokens:,} tokens; micro-batches a step: {accumulation}")

    # ------------------------------------------------------------------ train
    token_flops = scaling.flops_per_token(model.config, is_frozen=start.adapter is not None)
    tokens_before = pretraining["tokens"]
    if config.data:
        # Record everything that the model has read: later stages choose their default tasks by it. A text that is read
        # again is named once.
        names = dict.fromkeys(filter(None, (pretraining["data"], config.data)))
        pretraining |= {"data": ",".join(names), "batch_tokens": batch_tokens, "document_mask": document_mask}
        pretraining["context"] = max(row_tokens, pretraining.get("context", 0))
    run = Run(
        stage, config, start, optimizer, steps, token_flops=token_flops, tasks=task_names, fingerprints=fingerprints
    )
    run.has_validation = has_validation
    loader = Loader(
        train_corpus, tokenizer, config.device_batch_size, row_tokens, rank=device.data_rank,
        world_size=device.data_ranks, seed=config.seed, workers=config.dataloader_num_workers,
        state=LoaderState.merge(run.loader_states) if run.loader_states else None,
        document_mask=document_mask, step_batches=accumulation, on_error=run.fail,
    )  # fmt: skip
    compiled, _ = compiled_and_profiled(run, token_flops * batch_tokens, (config.device_batch_size, row_tokens), model)
    phase("reading the validation text")
    val_rows = []  # one entry per corpus of a mixture of texts; its share sets the size
    for part in weighted_parts(val_corpus) if has_validation else []:
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
                    bits = []
                    for rows in val_rows:
                        bits.append(bits_per_byte(
                            model, rows, token_bytes, config.device_batch_size, device,
                            should_stop=run.should_stop, document_mask=document_mask,
                        ))  # fmt: skip
                    metrics = by_part("val_bpb", bits, val_corpus) | {"val_bpb": mean_by_weight(bits, val_corpus)}
                    run.log_evaluation(**metrics)
            if run.must_save:
                if config.data:
                    pretraining["tokens"] = tokens_before + run.progress.tokens
                else:
                    # SFT continues after the conversations read so far: after the block of the furthest shard.
                    blocks = 1 + max(shard.positions[0].block for shard in position.shards.values())
                    pretraining["conversations"] = blocks * position.shard_count * BLOCK_EXAMPLES
                run.save(position.to_tensors())
            if run.must_leave:
                break

            # ---- one step: the batch comes in micro-batches, each small enough for the device's memory
            micro = [next(loader) for _ in range(accumulation)]
            batches = (batch.to(device) for batch in track(micro, "micro-batch"))
            stats = train_step(
                compiled if step else model, optimizer, batches, next_token_loss, device=device,
                lr=schedule.lr(step), momentum=schedule.momentum(step), weight_decay=schedule.weight_decay(step),
                max_grad_norm=config.largest_norm,
            )  # fmt: skip
            run.count(stats, batch_tokens)
            position = micro[-1].state
            if run.must_log:
                epochs = by_part("epoch", micro[-1].epochs, train_corpus) if config.data else {}
                run.log_step(lr=peak_lr * schedule.lr(step), **epochs)
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
