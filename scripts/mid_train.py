"""Mid-training: teach a base model the chat format and new skills on whole conversations. The rows are dense, and every
token is a target.

python -m scripts.mid_train --device_batch_size=8

python -m nanochat.run.launch --nproc_per_node=8 -m scripts.mid_train -- --tasks smoltalk:20,gsm8k:1
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from nanochat import cli
from nanochat.cli import Count, Fraction, Positive, Range, UserError
from nanochat.flags import StageFlags
from nanochat.log import counted, print0, warn
from nanochat.screen import phase, track


@dataclass(frozen=True)
class Config(StageFlags):
    # horizon and batch
    num_iterations: Positive | None = None  # steps; default: a tenth of the base model's tokens
    device_batch_size: Positive = 16  # rows a device computes at once
    total_batch_size: Positive | None = None  # tokens per step, over all devices; default: the base model's
    gradient_accumulation_steps: Positive | None = None  # instead of --total_batch_size: micro-batches per step
    dataloader_num_workers: Annotated[int, Range(0, 256)] = 1  # threads that tokenize
    # optimizer
    lr_scale: Annotated[float, Range(0, 100)] = 0.5  # multiplies all learning rates of pretraining
    warmdown_fraction: Fraction = 0.8  # the last part of the run, in which the rates fall
    # evaluation, device
    eval_every: Count = 150  # steps between evaluations; 0: only at the beginning and the end
    eval_tokens: Positive = 262_144  # tokens of held-out conversations
    compile: Literal["auto", "on", "off"] = "auto"  # torch.compile; auto: where it pays


def main(config: Config) -> None:
    phase("loading torch")
    # The heavy imports are here so that --help answers at once.
    import torch

    from nanochat import scaling
    from nanochat.bpb import bits_per_byte, validation_rows
    from nanochat.loader import Loader, LoaderState
    from nanochat.loop import Run
    from nanochat.mixture import BLOCK_EXAMPLES, MixtureCorpus, open_mixture
    from nanochat.stage import begin, count_micro_batches
    from nanochat.tasks.defaults import default_tasks
    from nanochat.train import Schedule, make_optimizer, next_token_loss, train_step

    # ------------------------------------------------------------------ model
    start = begin(config)
    device = start.device
    model = start.model

    # ------------------------------------------------------------------ horizon, batch, optimizer
    row_tokens = model.config.sequence_len
    document_mask = start.pretraining.get("document_mask", False)  # as in pretraining
    micro_tokens = config.device_batch_size * row_tokens * device.data_ranks  # tokens in one pass over all devices
    by_rule = start.pretraining.get("batch_tokens", micro_tokens)
    accumulation = count_micro_batches(
        micro_tokens, by_rule, config.total_batch_size, config.gradient_accumulation_steps
    )
    batch_tokens = micro_tokens * accumulation
    if not config.num_iterations and not start.pretraining["tokens"]:
        raise UserError("--num_iterations: this model does not say how many tokens it has read: give the steps")
    steps = config.num_iterations or max(1, round(start.pretraining["tokens"] / 10 / batch_tokens))
    rates = scaling.rates(model.config, batch_tokens, steps * batch_tokens).scaled(config.lr_scale)
    optimizer = make_optimizer(model, rates, device, layout=start.layout, kept_as=config.kept_as)
    schedule = Schedule.for_run(steps, warmdown_fraction=config.warmdown_fraction)
    print0(f"horizon: {counted(steps, 'step')} of {batch_tokens:,} tokens; micro-batches a step: {accumulation}")

    if start.ledger is not None:  # --dry_run
        start.ledger.report(
            model, optimizer, next_token_loss, config.device_batch_size, micro_batches=accumulation,
            batch_of=lambda rows: (rows.inputs, rows.targets, rows.segments if document_mask else None),
        )  # fmt: skip
        return

    # ------------------------------------------------------------------ data
    tokenizer = start.tokenizer
    tasks = config.tasks or default_tasks(start.pretraining["data"], config.hub)
    files: dict[str, Any] = {"bad_records": config.bad_records, "columns": config.columns, "thoughts": config.thoughts}
    train_corpus, val_corpus = (
        MixtureCorpus(open_mixture(tasks, split, config.hub, config.seed, **files), tokenizer)
        for split in ("train", "test")
    )
    print0(f"tasks: {tasks}")
    if masked := sum(task.masked for task in train_corpus.mixture.tasks):
        warn(f"--tasks {tasks}: {masked:,} replies are marked as not learned, but mid-training learns every token")

    # ------------------------------------------------------------------ train
    token_flops = scaling.flops_per_token(model.config)
    run = Run(
        "mid", config, start, optimizer, steps, token_flops=token_flops, tasks=train_corpus.mixture.task_names,
        fingerprints={
            "tokens a step": batch_tokens, "what --tasks names": train_corpus.mixture.fingerprint(),
            "the base model's --document_mask": document_mask,
        },
    )  # fmt: skip
    loader = Loader(
        train_corpus, tokenizer, config.device_batch_size, row_tokens, rank=device.data_rank,
        world_size=device.data_ranks, seed=config.seed, workers=config.dataloader_num_workers,
        state=LoaderState.merge(run.loader_states) if run.loader_states else None,
        document_mask=document_mask, step_batches=accumulation, on_error=run.fail,
    )  # fmt: skip
    compiled = run.compile(model, config.compile, token_flops * batch_tokens, (config.device_batch_size, row_tokens))
    phase("reading the validation text")
    val_rows = validation_rows(val_corpus, tokenizer, row_tokens, config.eval_tokens)
    token_bytes = torch.tensor(tokenizer.token_bytes())
    position = loader.start  # in the data, after the last step; `save` stores it

    with run:
        for step in run.steps():
            # ---- `step` steps are finished: evaluate, save or leave if that is due
            if run.due.evaluate:
                with run.interruptible("evaluation"):
                    val_bpb = bits_per_byte(
                        model, val_rows, token_bytes, config.device_batch_size, device,
                        should_stop=run.should_stop, document_mask=document_mask,
                    )  # fmt: skip
                    run.log.evaluation(val_bpb=val_bpb)
            if run.due.save:
                # SFT continues after the conversations read so far: after the block of the furthest shard.
                blocks = 1 + max(shard.positions[0].block for shard in position.shards.values())
                start.pretraining["conversations"] = blocks * position.shard_count * BLOCK_EXAMPLES
                run.save(position.to_tensors())
            if run.due.leave:
                break

            # ---- one step: the batch comes in micro-batches, each small enough for the device's memory
            micro = [next(loader) for _ in range(accumulation)]
            batches = (batch.to(device) for batch in track(micro, "micro-batch"))
            stats = train_step(
                compiled if step else model, optimizer, batches, next_token_loss, device=device,
                lr=schedule.lr(step), momentum=schedule.momentum(step), weight_decay=schedule.weight_decay(step),
            )  # fmt: skip
            run.log.add(stats, batch_tokens)
            position = micro[-1].state
            if run.due.log:
                run.log.step(stats, lr=rates.matrix * schedule.lr(step))
    loader.close()
    run.finish()


if __name__ == "__main__":
    cli.run(main, Config, shows_progress=True)
