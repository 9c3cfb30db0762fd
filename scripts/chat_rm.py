"""Train a reward model: of two replies to a question, a scalar head on the model rates the better one higher.

python -m scripts.chat_rm --device_batch_size=8

python -m scripts.chat_rm --source hf:Qwen/Qwen3-0.6B --tasks pairs.jsonl --lora_rank 16

python -m scripts.chat_rl --reward rm:rm
"""

import functools
import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from nanochat import cli
from nanochat.cli import Count, Positive, Range, UserError
from nanochat.flags import EpochFlags
from nanochat.log import counted, print0
from nanochat.screen import phase, track


@dataclass(frozen=True)
class Config(EpochFlags):
    source: str = "sft"  # a stage, a folder (ours, Hugging Face's or peft's) or hf:ORG/NAME; it gets a scalar head
    # horizon and batch
    num_iterations: Positive = 100  # steps
    device_batch_size: Annotated[int, Range(2)] = 8  # rows a device computes at once; the replies of a pair share one
    # optimizer
    adapter_rate: ClassVar[float] = 1e-4
    lr_scale: Annotated[float, Range(0, 100)] = 0.1  # multiplies all learning rates of pretraining
    # evaluation
    eval_every: Count = 50  # steps between evaluations; 0: only at the beginning and the end
    eval_examples: Positive = 256  # held-out pairs


def main(config: Config) -> None:
    phase("loading torch")
    # The heavy imports are here so that --help answers at once.
    from collections.abc import Iterator, Sequence

    import torch

    from nanochat import losses, scaling
    from nanochat.alignment import preferences
    from nanochat.alignment.reward_model import to_rate
    from nanochat.loop import Run
    from nanochat.mixture import Mixture, default_tasks, open_mixture
    from nanochat.stage import Horizon, begin, open_optimizer
    from nanochat.task_flag import parse_tasks, require_pairs
    from nanochat.train import Schedule, mean_loss, train_step

    # ------------------------------------------------------------------ model, data
    start = begin(config, with_scalar_head=True)
    device = start.device
    model = start.model
    row_tokens = model.config.sequence_len
    tasks = config.tasks or default_tasks(start.pretraining["data"], stage="dpo")
    require_pairs(parse_tasks(tasks))
    by_epoch = config.num_epochs is not None
    files = {"files": "pairs", "bad_records": config.bad_records, "val_share": config.val_share}
    train = open_mixture(tasks, "train", config.hub, config.seed, by_epoch=by_epoch, **files)
    held_out = open_mixture(tasks, "test", config.hub, config.seed, **files)
    print0(f"tasks: {tasks}")

    def draw(mixture: Mixture, numbers: range) -> list[preferences.Replies]:
        return preferences.draw_replies(mixture, start.tokenizer, numbers, row_tokens)

    def micro_batches(pairs: Sequence[preferences.Replies]) -> Iterator[losses.PairBatch]:
        rated = [to_rate(pair) for pair in pairs]
        return preferences.pair_batches(rated, row_tokens, config.device_batch_size, device)

    # ------------------------------------------------------------------ horizon, optimizer
    horizon = Horizon.of(config, train)
    steps = horizon.steps
    batch_tokens = horizon.examples * row_tokens  # about: a reply is shorter than a row
    rates = scaling.rates(model.config, batch_tokens, steps * batch_tokens).scaled(config.lr_scale)
    optimizer, peak_lr = open_optimizer(config, start, rates)
    schedule = Schedule.for_run(
        steps, config.warmup_ratio, warmdown_fraction=config.warmdown_fraction, fall=config.lr_schedule
    )
    print0(f"horizon: {counted(steps, 'step')} of {horizon.examples} pairs")

    if start.ledger is not None:  # --dry_run
        start.ledger.report(
            model, optimizer, losses.reward_loss, config.device_batch_size, max_grad_norm=config.largest_norm,
            batch_of=lambda rows: losses.PairBatch(rows, config.device_batch_size // 2),
        )  # fmt: skip
        return

    # ------------------------------------------------------------------ train
    token_flops = scaling.flops_per_token(model.config, is_frozen=start.adapter is not None)
    run = Run(
        "rm", config, start, optimizer, steps, token_flops=token_flops, tasks=train.tasks,
        fingerprints={"what --tasks names": train.fingerprint()},
    )  # fmt: skip
    val_pairs = draw(held_out, range(min(config.eval_examples, sum(len(task) for task in held_out.tasks))))
    first_pairs = draw(train, horizon.draws(0))
    if not val_pairs and not first_pairs:
        raise UserError(
            f"--tasks {tasks}: the first pairs leave nothing to compare: both replies are the same or one is empty, or "
            f"the prompts are longer than the context of {row_tokens} tokens; name other --tasks, or a .jsonl of pairs "
            "with two different replies"
        )
    preferences.report_first(first_pairs, row_tokens)
    left_out = int(run.loader_states[0]["left_out"]) if run.loader_states else 0  # pairs that had nothing to compare

    with run:
        for step in run.steps():
            # ---- `step` steps are finished: evaluate, save or leave, where it is time to
            if run.due.evaluate:
                with run.interruptible("evaluation"):
                    stats = torch.zeros(len(losses.REPLY_STATS), device=device.torch_device)
                    loss_fn = functools.partial(losses.reward_loss, stats=stats)
                    val_loss = mean_loss(model, micro_batches(val_pairs), loss_fn, device, run.should_stop)
                    metrics = {}
                    if math.isfinite(val_loss):  # else no held-out pair is left
                        means = losses.mean_reply_stats(stats, device)
                        metrics = {"val_loss": val_loss} | {f"val_{name}": value for name, value in means.items()}
                    run.log.evaluation(**metrics)
            if run.due.save:
                run.save({"left_out": torch.tensor(left_out)})
            if run.due.leave:
                break

            # ---- one step
            numbers = horizon.draws(step)
            pairs = draw(train, numbers)
            stats = torch.zeros(len(losses.REPLY_STATS), device=device.torch_device)
            step_stats = train_step(
                model, optimizer, track(micro_batches(pairs), "micro-batch"),
                functools.partial(losses.reward_loss, stats=stats), device=device, lr=schedule.lr(step),
                momentum=schedule.momentum(step), max_grad_norm=config.largest_norm,
            )  # fmt: skip
            run.log.add(step_stats, preferences.token_count(pairs))
            left_out += len(numbers) - len(pairs)
            if run.due.log:
                means = losses.mean_reply_stats(stats, device)
                run.log.step(step_stats, lr=peak_lr * schedule.lr(step), left_out=left_out, **means)
    run.finish()


if __name__ == "__main__":
    cli.run(main, Config, shows_progress=True)
