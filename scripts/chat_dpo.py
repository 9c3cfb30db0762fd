"""Direct preference optimisation: of two replies to a question, make the better one more likely than the worse one.

python -m scripts.chat_dpo --device_batch_size=8

python -m scripts.chat_dpo --tasks=pairs.jsonl

python -m nanochat.run.launch --nproc_per_node=8 -m scripts.chat_dpo -- --target_examples_per_step=64
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from nanochat.run.flags import ChatFlags
from nanochat.shell import cli
from nanochat.shell.cli import Count, Fraction, Frozen, Positive, Range, UserError
from nanochat.shell.log import counted, print0
from nanochat.shell.screen import phase, track


@dataclass(frozen=True)
class Config(ChatFlags):
    source: str = "sft"  # a stage, a folder or hf:ORG/NAME; frozen, it is the reference too
    # horizon and batch
    num_iterations: Positive = 100  # steps
    target_examples_per_step: Frozen[Positive] = 32  # pairs per step, over all devices
    device_batch_size: Annotated[int, Range(2)] = 8  # rows a device computes at once; the replies of a pair share one
    # loss
    loss: Frozen[str] = "dpo"  # dpo, ipo: a row of PAIR_LOSSES in nanochat/losses.py
    beta: Frozen[Annotated[float, Range(1e-6, 100)]] = 0.1  # the smaller, the further from the reference
    label_smoothing: Frozen[Annotated[float, Range(0, 0.5)]] = 0.0  # share of pairs taken for the wrong way round (dpo)
    sft_weight: Frozen[Annotated[float, Range(0, 100)]] = 0.0  # of the chosen reply's own cross-entropy
    # optimizer
    # Ten times the usual rate of full fine-tuning (source: Schulman et al. 2025, LoRA Without Regret).
    lora_learning_rate: Annotated[float, Range(0, 100)] = 1e-5  # absolute, in place of --lr_scale
    lr_scale: Annotated[float, Range(0, 100)] = 0.02  # multiplies all learning rates of pretraining
    warmdown_fraction: Fraction = 1.0  # last part of the run, in which the rates fall
    # evaluation, device
    eval_every: Count = 50  # steps between evaluations; 0: only at the beginning and the end
    eval_examples: Positive = 256  # held-out pairs
    compile: Literal["auto", "on", "off"] = "auto"  # torch.compile; auto: where it pays


def main(config: Config) -> None:
    phase("loading torch")
    # The heavy imports are here so that --help answers at once.
    from collections.abc import Iterator

    import torch

    from nanochat import lora, losses, scaling
    from nanochat.checkpoint_manager import weights_sha256
    from nanochat.conversation import Rendered
    from nanochat.data.packing import pack_pairs
    from nanochat.run.stage import Run, begin
    from nanochat.tasks.mixture import Mixture, default_dpo_tasks, is_learned, open_mixture
    from nanochat.tasks.registry import parse_tasks, require_pairs
    from nanochat.train import Schedule, make_optimizer, mean_loss, train_step

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
    train = open_mixture(tasks, "train", config.hub, config.seed, pairs=True, bad_records=config.bad_records)
    held_out = open_mixture(tasks, "test", config.hub, config.seed, pairs=True, bad_records=config.bad_records)
    print0(f"tasks: {tasks}")

    def draw(mixture: Mixture, first: int, count: int) -> list[tuple[Rendered, Rendered]]:
        """`count` pairs from number `first` on, the same on every rank, without those that have nothing to prefer: a
        reply is empty, or both are the same as far as the context reaches."""
        pairs = []
        for number in range(first, first + count):
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
            batch = losses.PairBatch(rows, count)
            with torch.no_grad():
                logp = losses.reply_logp(frozen, batch)
            yield replace(batch, reference_logp=logp)

    # ------------------------------------------------------------------ horizon, optimizer
    steps = config.num_iterations
    examples = config.target_examples_per_step
    batch_tokens = examples * row_tokens  # about: a reply is shorter than a row
    rates = scaling.rates(model.config, batch_tokens, steps * batch_tokens).scaled(config.lr_scale)
    peak_lr = rates.matrix
    if start.adapter is None:
        optimizer = make_optimizer(model, rates, device, layout=start.layout)
    else:
        peak_lr = config.lora_learning_rate
        optimizer = lora.make_optimizer(model, peak_lr, device, start.layout)
    schedule = Schedule.for_run(steps, warmdown_fraction=config.warmdown_fraction)
    print0(f"horizon: {counted(steps, 'step')} of {examples} pairs")

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
    val_pairs = draw(held_out, 0, held_out_count)
    opening = draw(train, 0, examples)
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
            pairs = draw(train, step * examples, examples)
            pair_stats = torch.zeros(len(losses.PAIR_STATS), device=device.torch_device)
            # Both models are compiled, or neither: else the margin would hold the difference of their rounding.
            mine = track(micro_batches(pairs, compiled_reference if step else reference), "micro-batch")
            stats = train_step(
                compiled if step else model, optimizer, mine, functools.partial(loss_fn, stats=pair_stats),
                device=device, lr=schedule.lr(step), momentum=schedule.momentum(step), weight_decay=0.0,
            )  # fmt: skip
            run.add(stats, sum(len(chosen.ids) + len(rejected.ids) for chosen, rejected in pairs))
            left_out += examples - len(pairs)
            if run.should_log:
                means = losses.mean_pair_stats(pair_stats, device)
                run.log(stats, lr=peak_lr * schedule.lr(step), left_out=left_out, **means)
    run.finish()


if __name__ == "__main__":
    cli.run(main, Config, shows_progress=True)
