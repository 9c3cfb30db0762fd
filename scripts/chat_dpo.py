"""Direct preference optimisation: of two replies to a question, make the better one more likely than the worse one.

python -m scripts.chat_dpo --device_batch_size=8

python -m scripts.chat_dpo --tasks=pairs.jsonl

python -m nanochat.run.launch --nproc_per_node=8 -m scripts.chat_dpo -- --target_examples_per_step=64
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from nanochat.run.flags import EpochFlags
from nanochat.shell import cli
from nanochat.shell.cli import Count, Frozen, Positive, Range, UserError
from nanochat.shell.log import counted, print0
from nanochat.shell.screen import phase, track


@dataclass(frozen=True)
class Config(EpochFlags):
    # A stage, a folder (ours, Hugging Face's or peft's) or hf:ORG/NAME; frozen, it is the reference too.
    source: str = "sft"
    # horizon and batch
    num_iterations: Positive = 100  # steps
    device_batch_size: Annotated[int, Range(2)] = 8  # rows a device computes at once; the replies of a pair share one
    # loss
    loss: Frozen[str] = "dpo"  # dpo, ipo: a row of PAIR_LOSSES in nanochat/losses.py
    beta: Frozen[Annotated[float, Range(1e-6, 100)]] = 0.1  # the smaller, the further from the reference
    label_smoothing: Frozen[Annotated[float, Range(0, 0.5)]] = 0.0  # share of pairs taken for the wrong way round (dpo)
    sft_weight: Frozen[Annotated[float, Range(0, 100)]] = 0.0  # of the chosen reply's own cross-entropy
    # optimizer
    adapter_rate: ClassVar[float] = 1e-5
    lr_scale: Annotated[float, Range(0, 100)] = 0.02  # multiplies all learning rates of pretraining
    # evaluation, device
    eval_every: Count = 50  # steps between evaluations; 0: only at the beginning and the end
    eval_examples: Positive = 256  # held-out pairs
    compile: Literal["auto", "on", "off"] = "auto"  # torch.compile; auto: where it pays


def main(config: Config) -> None:
    phase("loading torch")
    # The heavy imports are here so that --help answers at once.
    from collections.abc import Iterator

    import torch

    from nanochat import losses, scaling
    from nanochat.conversation import Rendered
    from nanochat.data.packing import pack_pairs
    from nanochat.model_folder import weights_sha256
    from nanochat.run.memory import full_rows
    from nanochat.run.stage import Horizon, Run, begin, open_optimizer
    from nanochat.tasks.mixture import Mixture, default_dpo_tasks, is_learned, open_mixture
    from nanochat.tasks.registry import parse_tasks, require_pairs
    from nanochat.train import Schedule, mean_loss, train_step

    # ------------------------------------------------------------------ loss
    loss = losses.find(losses.PAIR_LOSSES, config.loss)
    if config.label_smoothing and not loss.takes("label_smoothing"):
        raise UserError(f"--label_smoothing {config.label_smoothing}: --loss {config.loss} has none, dpo has")
    loss_fn = loss.bind(beta=config.beta, label_smoothing=config.label_smoothing, sft_weight=config.sft_weight)
    print0(f"loss: {config.loss} ({loss.source})")

    # ------------------------------------------------------------------ model, data
    start = begin(config, with_reference=True)
    device = start.device
    model = start.model
    reference = start.reference
    row_tokens = model.config.sequence_len
    tasks = config.tasks or default_dpo_tasks(start.pretraining["data"])
    require_pairs(parse_tasks(tasks))
    by_epoch = config.num_epochs is not None
    files = {"files": "pairs", "bad_records": config.bad_records, "val_share": config.val_share}
    train = open_mixture(tasks, "train", config.hub, config.seed, by_epoch=by_epoch, **files)
    held_out = open_mixture(tasks, "test", config.hub, config.seed, **files)
    print0(f"tasks: {tasks}")

    def draw(mixture: Mixture, numbers: range) -> list[tuple[Rendered, Rendered]]:
        """Pairs by number, the same on every rank, without those that have nothing to prefer: a reply is empty, or both
        are the same as far as the context reaches."""
        pairs = []
        for number in numbers:
            pair = mixture.rendered_pair(start.tokenizer, number, row_tokens + 1)
            if is_learned(*pair):
                pairs.append(pair)
        return pairs

    def micro_batches(pairs: list[tuple[Rendered, Rendered]], frozen: Any = reference) -> Iterator[losses.PairBatch]:
        """This rank's micro-batches, each with the log probabilities of the reference model, which may be compiled."""
        replies = [reply for pair in pairs for reply in pair]
        for rows, count in pack_pairs(
            [reply.ids for reply in replies], [reply.mask for reply in replies], row_tokens, config.device_batch_size,
            device, device.rank, device.world_size,
        ):  # fmt: skip
            yield compared(losses.PairBatch(rows, count), frozen)

    @torch.no_grad()
    def compared(batch: losses.PairBatch, frozen: Any) -> losses.PairBatch:
        return replace(batch, reference_logp=losses.reply_logp(frozen, batch))

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

    if start.ledger is not None:
        rows = full_rows(config.device_batch_size, row_tokens, device)
        pairs = compared(losses.PairBatch(rows, config.device_batch_size // 2), reference)
        pair_stats = torch.zeros(len(losses.PAIR_STATS), device=device.torch_device)
        loss_fn = functools.partial(loss_fn, stats=pair_stats)
        start.ledger.report(model, optimizer, [pairs, pairs], loss_fn, max_grad_norm=config.largest_norm)
        return

    # ------------------------------------------------------------------ train
    assert start.source is not None
    token_flops = scaling.flops_per_token(model.config, is_frozen=start.adapter is not None)
    run = Run(
        "dpo", config, start, optimizer, steps, token_flops=token_flops, tasks=train.tasks,
        fingerprints={
            "what --tasks names": train.fingerprint(), "the reference's weights": weights_sha256(start.source)
        },
    )  # fmt: skip
    held_out_count = min(config.eval_examples, sum(len(task) for task in held_out.tasks))
    val_pairs = draw(held_out, range(held_out_count))
    opening = draw(train, horizon.draws(0))
    if not val_pairs and not opening:
        raise UserError(
            f"--tasks {tasks}: the first pairs leave nothing to prefer: both replies are the same or one is empty, or "
            f"the prompts are longer than the context of {row_tokens} tokens; name other --tasks, or a .jsonl of pairs "
            "with two different replies"
        )
    if not val_pairs:
        print0("no held-out pair leaves anything to prefer: there will be no val_loss")
    step_flops = token_flops * sum(len(chosen.ids) + len(rejected.ids) for chosen, rejected in opening)
    shape = (config.device_batch_size, row_tokens)  # of every micro-batch
    compiled = run.compile(model, config.compile, step_flops, shape, forward_alone=True)
    compiled_reference = run.compile(reference, config.compile, step_flops, shape, "reference", forward_alone=True)
    left_out = int(run.loader_states[0]["left_out"]) if run.loader_states else 0  # pairs that had nothing to prefer

    with run:
        for step in run.steps():
            # ---- `step` steps are finished: evaluate, save or leave, where it is time to
            if run.should_evaluate:
                with run.interruptible("evaluation"):
                    pair_stats = torch.zeros(len(losses.PAIR_STATS), device=device.torch_device)
                    val_loss_fn = functools.partial(loss_fn, stats=pair_stats)
                    val_loss = mean_loss(model, micro_batches(val_pairs), val_loss_fn, device, run.should_stop)
                    metrics = {}
                    if math.isfinite(val_loss):  # else no held-out pair is left
                        means = losses.mean_pair_stats(pair_stats, device)
                        metrics = {"val_loss": val_loss} | {f"val_{name}": value for name, value in means.items()}
                    run.log_evaluation(**metrics)
            if run.should_save:
                run.save({"left_out": torch.tensor(left_out)})
            if run.should_leave:
                break

            # ---- one step
            numbers = horizon.draws(step)
            pairs = draw(train, numbers)
            pair_stats = torch.zeros(len(losses.PAIR_STATS), device=device.torch_device)
            # Both models are compiled, or neither: else the margin would hold the difference of their rounding.
            mine = track(micro_batches(pairs, compiled_reference if step else reference), "micro-batch")
            stats = train_step(
                compiled if step else model, optimizer, mine, functools.partial(loss_fn, stats=pair_stats),
                device=device, lr=schedule.lr(step), momentum=schedule.momentum(step),
                max_grad_norm=config.largest_norm,
            )  # fmt: skip
            run.add(stats, sum(len(chosen.ids) + len(rejected.ids) for chosen, rejected in pairs))
            left_out += len(numbers) - len(pairs)
            if run.should_log:
                means = losses.mean_pair_stats(pair_stats, device)
                run.log(stats, lr=peak_lr * schedule.lr(step), left_out=left_out, **means)
    run.finish()


if __name__ == "__main__":
    cli.run(main, Config, shows_progress=True)
