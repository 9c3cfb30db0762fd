"""Supervised fine-tuning: whole conversations, packed, with a loss on what the assistant says alone.

python -m scripts.chat_sft --device_batch_size=4

python -m nanochat.run.launch --nproc_per_node=8 -m scripts.chat_sft -- --target_examples_per_step=32
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from nanochat.run.flags import ChatFlags
from nanochat.shell import cli
from nanochat.shell.cli import Fraction, Frozen, Positive, Range
from nanochat.shell.log import counted, print0
from nanochat.shell.screen import phase, track


@dataclass(frozen=True)
class Config(ChatFlags):
    source: str = "mid"  # a stage, a checkpoint's folder, or a model of a hub: hf:ORG/NAME
    # horizon and batch
    num_iterations: Positive = 200  # steps
    target_examples_per_step: Frozen[Positive] = 32  # conversations per step, over all devices
    device_batch_size: Positive = 8  # rows a device computes at once; a row holds as many conversations as fit
    # optimizer
    lr_scale: Annotated[float, Range(0, 100)] = 0.2  # multiplies all learning rates of pretraining
    warmdown_fraction: Fraction = 1.0  # last part of the run, in which the rates fall
    # evaluation, device
    eval_examples: Positive = 256  # held-out conversations
    compile: Literal["auto", "on", "off"] = "auto"  # torch.compile; auto: where it pays


def main(config: Config) -> None:
    phase("loading torch")
    # The heavy imports are here so that --help answers at once.
    import torch

    from nanochat import lora, scaling
    from nanochat.conversation import Rendered
    from nanochat.data.packing import PackedBatch, pack_sequences
    from nanochat.losses import masked_loss
    from nanochat.run.stage import Run, begin
    from nanochat.tasks.mixture import Mixture, default_tasks, is_learned, open_mixture
    from nanochat.train import Schedule, make_optimizer, mean_loss, train_step

    # ------------------------------------------------------------------ model, data
    start = begin(config)
    device = start.device
    model = start.model
    row_tokens = model.config.sequence_len
    tasks = config.tasks or default_tasks(start.pretraining["data"], config.hub)
    train = open_mixture(tasks, "train", config.hub, config.seed, bad_records=config.bad_records)
    held_out = open_mixture(tasks, "test", config.hub, config.seed, bad_records=config.bad_records)
    print0(f"tasks: {tasks}")

    def draw(mixture: Mixture, first: int, count: int) -> tuple[PackedBatch, list[Rendered]]:
        """`count` conversations from number `first` on, the same on every rank; those without a target are not in the
        rows."""
        numbers = range(first, first + count)
        rendered = [mixture.rendered(start.tokenizer, number, row_tokens + 1) for number in numbers]
        learned = [one for one in rendered if is_learned(one)]
        ids = [one.ids for one in learned]
        return pack_sequences(ids, [one.mask for one in learned], row_tokens, device.world_size), rendered

    # ------------------------------------------------------------------ horizon, optimizer
    steps = config.num_iterations
    examples = config.target_examples_per_step
    first = start.pretraining.get("conversations", 0)  # the next one after those that mid-training has read
    batch_tokens = examples * row_tokens  # about: a conversation is shorter than a row
    rates = scaling.rates(model.config, batch_tokens, steps * batch_tokens).scaled(config.lr_scale)
    peak_lr = rates.matrix
    if start.adapter is None:
        optimizer = make_optimizer(model, rates, device, layout=start.layout)
    else:
        peak_lr = config.lora_learning_rate
        optimizer = lora.make_optimizer(model, peak_lr, device, start.layout)
    schedule = Schedule.for_run(steps, warmdown_fraction=config.warmdown_fraction)
    print0(f"horizon: {counted(steps, 'step')} of {examples} conversations")

    # ------------------------------------------------------------------ train
    token_flops = scaling.flops_per_token(model.config, is_frozen=start.adapter is not None)
    run = Run(
        "sft", config, start, optimizer, steps, token_flops=token_flops, tasks=train.tasks,
        fingerprints={"what --tasks names": train.fingerprint()},
    )  # fmt: skip
    opening, opened = draw(train, first, examples)
    unlearned = sum(one.unlearned for one in opened)
    if unlearned:
        print0(
            f"the chat template writes {unlearned} replies of the first {examples} conversations otherwise when more "
            "turns follow, as templates do that drop earlier thoughts: such replies are read, and not learned"
        )
    # Micro-batches have a few shapes: the one of the run's first micro-batch is compiled, wherever the run resumes.
    usual = next(opening.micro_batches(config.device_batch_size, device, 0, device.world_size)).inputs.shape
    compiled = run.compile(model, config.compile, token_flops * opening.inputs.numel(), usual)
    held_out_count = min(config.eval_examples, sum(len(task) for task in held_out.tasks))
    val_rows, _ = draw(held_out, 0, held_out_count)
    no_target = 0  # conversations since the last log line that left nothing to learn
    cut = 0  # and that were longer than the context
    if run.loader_states:
        no_target = int(run.loader_states[0]["no_target"])
        cut = int(run.loader_states[0]["cut"])

    with run:
        for step in run.steps():
            # ---- `step` steps are finished: evaluate, save or leave, where it is time to
            if run.should_evaluate:
                with run.interruptible("evaluation"):
                    mine = val_rows.micro_batches(config.device_batch_size, device, device.rank, device.world_size)
                    val_loss = mean_loss(model, mine, masked_loss, device, run.should_stop)
                    # Not finite: nothing held out is a target.
                    run.log_evaluation(**({"val_loss": val_loss} if math.isfinite(val_loss) else {}))
            if run.should_save:
                start.pretraining["conversations"] = first + step * examples
                run.save({"no_target": torch.tensor(no_target), "cut": torch.tensor(cut)})
            if run.should_leave:
                break

            # ---- one step: conversation k of the run is the same on every rank and in every start, so that a resumed
            # run needs no position in the data
            rows, rendered = draw(train, first + step * examples, examples)
            mine = list(rows.micro_batches(config.device_batch_size, device, device.rank, device.world_size))
            stats = train_step(
                compiled if step else model, optimizer, track(mine, "micro-batch"), masked_loss, device=device,
                lr=schedule.lr(step), momentum=schedule.momentum(step), weight_decay=0.0,
            )  # fmt: skip
            run.add(stats, sum(len(one.ids) for one in rendered))
            no_target += len([one for one in rendered if not one.target_count])
            cut += len([one for one in rendered if one.cut])
            if run.should_log:
                # The share of what the step computed that is not padding.
                computed = sum(micro.inputs.numel() for micro in mine) * device.world_size
                real = sum(len(one.ids) - 1 for one in rendered if one.target_count) / computed
                lr = peak_lr * schedule.lr(step)
                run.log(stats, lr=lr, no_target=no_target, cut=cut, real_tokens=real)
                no_target = 0
                cut = 0
    run.finish()


if __name__ == "__main__":
    cli.run(main, Config, shows_progress=True)
