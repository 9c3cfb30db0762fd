"""Supervised fine-tuning: whole conversations, packed, with a loss only on the assistant's tokens.

python -m scripts.chat_sft --device_batch_size=4

python -m nanochat.run.launch --nproc_per_node=8 -m scripts.chat_sft -- --target_examples_per_step=32
"""

import itertools
import math
from dataclasses import dataclass
from typing import Annotated, Literal

from nanochat.ground import cli
from nanochat.ground.cli import Frozen, Positive, Range
from nanochat.ground.log import counted, print0
from nanochat.ground.screen import phase, track
from nanochat.run.flags import EpochFlags


@dataclass(frozen=True)
class Config(EpochFlags):
    source: str = "mid"  # a stage, a folder (ours, Hugging Face's or peft's) or hf:ORG/NAME
    # data
    learn: Frozen[Literal["all", "last"]] = "all"  # the replies of a chat: all, or those to the user's last message
    too_long: Frozen[Literal["drop", "cut"]] = "drop"  # chats longer than --max_seq_len: left out, or without their end
    # optimizer
    lr_scale: Annotated[float, Range(0, 100)] = 0.2  # multiplies all learning rates of pretraining
    # evaluation
    eval_examples: Positive = 256  # held-out conversations


def main(config: Config) -> None:
    phase("loading torch")
    # The heavy imports are here so that --help answers at once.
    import torch

    from nanochat import scaling
    from nanochat.conversation import Rendered
    from nanochat.kernels.run_flags import compiled_and_profiled
    from nanochat.losses import masked_loss
    from nanochat.mixture import FIRST_EXAMPLES, Horizon, Mixture, is_learned, require_learnable
    from nanochat.packing import PackedBatch, pack_sequences
    from nanochat.run.loop import Run
    from nanochat.run.stage import begin, open_optimizer
    from nanochat.tasks.data_table import passes
    from nanochat.tasks.flag import open_tasks
    from nanochat.tasks.learned_share import report_learned
    from nanochat.train import Schedule, mean_loss, train_step

    # ------------------------------------------------------------------ model, data
    start = begin(config)
    device = start.device
    config = config.for_devices(device.data_ranks)
    model = start.model
    row_tokens = model.config.sequence_len
    if start.ledger is not None:  # --dry_run, which needs no data: any rates take the same memory
        optimizer, _ = open_optimizer(config, start, scaling.rates(model.config, batch=1, tokens=1))
        # A conversation takes a row at most.
        micro_batches = math.ceil(config.target_examples_per_step / (config.device_batch_size * device.data_ranks))
        start.ledger.report(
            model, optimizer, masked_loss, config.device_batch_size, micro_batches=micro_batches,
            max_grad_norm=config.largest_norm,
        )  # fmt: skip
        return
    tasks, train, held_out = open_tasks(config, start.pretraining["data"])
    print0(f"tasks: {tasks}")

    def draw(mixture: Mixture, numbers: range) -> tuple[PackedBatch, list[Rendered]]:
        """Conversations by number, the same on every rank. The rows leave out conversations without a target."""
        chats = (mixture.rendered_chat(start.tokenizer, number, row_tokens + 1) for number in numbers)
        rendered = list(itertools.chain.from_iterable(chats))
        learned = [one for one in rendered if is_learned(one)]
        ids = [one.ids for one in learned]
        return pack_sequences(ids, [one.mask for one in learned], row_tokens, device.data_ranks), rendered

    # ------------------------------------------------------------------ horizon, optimizer
    # The steps of a mixture begin with the first conversation that mid-training has not read.
    first = start.pretraining.get("conversations", 0)
    _, opened = draw(train, range(first, first + min(FIRST_EXAMPLES, sum(map(len, train.tasks)))))
    require_learnable(opened)
    horizon = Horizon.of(train, config.target_examples_per_step, config.num_iterations, config.num_epochs, first)
    steps = horizon.steps
    batch_tokens = horizon.examples * row_tokens  # approximate: a conversation is shorter than a row
    rates = scaling.rates(model.config, batch_tokens, steps * batch_tokens).scaled(config.lr_scale)
    optimizer, peak_lr = open_optimizer(config, start, rates)
    schedule = Schedule.for_run(steps, config.warmdown_fraction, config.warmup_ratio, fall=config.lr_schedule)
    again = passes(train, steps * horizon.examples)
    print0("; ".join(filter(None, [f"horizon: {counted(steps, 'step')} of {horizon.examples} conversations", again])))

    # ------------------------------------------------------------------ train
    token_flops = scaling.flops_per_token(model.config, is_frozen=start.adapter is not None)
    run = Run(
        "sft", config, start, optimizer, steps, token_flops=token_flops, tasks=train.task_names,
        fingerprints={"what --tasks names": train.fingerprint()},
    )  # fmt: skip
    report_learned(opened, start.tokenizer, config.strict_data)
    opening, _ = draw(train, horizon.draws(0))
    # Micro-batches have a few shapes. Compile the shape of the run's first micro-batch, also when the run resumes.
    usual = next(opening.micro_batches(config.device_batch_size, device, 0, device.data_ranks)).inputs.shape
    compiled, _ = compiled_and_profiled(run, token_flops * opening.inputs.numel(), usual, model)
    held_out_count = min(config.eval_examples, sum(len(task) for task in held_out.tasks))
    val_rows, chats = draw(held_out, range(held_out_count))
    run.has_validation = any(map(is_learned, chats))
    no_target = 0  # conversations since the last log line with nothing to learn
    cut = 0  # conversations since then that were longer than the context
    if run.loader_states:
        no_target = int(run.loader_states[0]["no_target"])
        cut = int(run.loader_states[0]["cut"])
    data_of = run.read_ahead(lambda step: draw(train, horizon.draws(step)))

    with run:
        for step in run.steps():
            # ---- `step` steps are finished: evaluate, save or leave if that is due
            if run.must_evaluate:
                with run.interruptible("evaluation"):
                    mine = val_rows.micro_batches(config.device_batch_size, device, device.data_rank, device.data_ranks)
                    run.log_evaluation(val_loss=mean_loss(model, mine, masked_loss, device, run.should_stop))
            if run.must_save:
                if config.num_epochs is None:
                    start.pretraining["conversations"] = horizon.draws(step).start
                run.save({"no_target": torch.tensor(no_target), "cut": torch.tensor(cut)})
            if run.must_leave:
                break

            # ---- one step: conversation k of the run is the same on every rank and after every restart, so a resumed
            # run does not store its position in the data
            rows, rendered = data_of(step)
            mine = list(rows.micro_batches(config.device_batch_size, device, device.data_rank, device.data_ranks))
            stats = train_step(
                compiled if step else model, optimizer, track(mine, "micro-batch"), masked_loss, device=device,
                lr=schedule.lr(step), momentum=schedule.momentum(step), max_grad_norm=config.largest_norm,
            )  # fmt: skip
            run.count(stats, sum(len(one.ids) for one in rendered))
            no_target += len([one for one in rendered if not one.target_count])
            cut += len([one for one in rendered if one.cut])
            if run.must_log:
                # The share of the computed tokens that is not padding.
                computed = sum(micro.inputs.numel() for micro in mine) * device.data_ranks
                real = sum(len(one.ids) - 1 for one in rendered if one.target_count) / computed
                lr = peak_lr * schedule.lr(step)
                run.log_step(lr=lr, no_target=no_target, cut=cut, real_tokens=real)
                no_target = 0
                cut = 0
    run.finish()


if __name__ == "__main__":
    cli.run(main, Config, shows_progress=True)
