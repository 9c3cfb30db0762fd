"""Direct preference optimisation: of two replies to a question, make the better one more likely than the worse one.

python -m scripts.chat_dpo --device_batch_size=8

python -m scripts.chat_dpo --tasks=pairs.jsonl

torchrun --standalone --nproc_per_node=8 -m scripts.chat_dpo -- --device_batch_size=8 --target_examples_per_step=64
"""

import functools
import time
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from nanochat.run.flags import StageFlags
from nanochat.shell.cli import Count, Fraction, Frozen, Positive, Range, UserError, run
from nanochat.shell.log import check_trackers, print0, record
from nanochat.shell.paths import checkpoint_dir


@dataclass(frozen=True)
class Config(StageFlags):
    source: str = "sft"  # a stage, or a checkpoint's folder; frozen, it is the reference too
    # horizon and batch
    num_iterations: Positive = 100  # steps
    target_examples_per_step: Frozen[Positive] = 32  # pairs a step over all devices
    device_batch_size: Annotated[int, Range(2)] = 8  # rows a device computes at once; the replies of a pair share one
    # loss
    loss: Frozen[Literal["dpo", "ipo"]] = "dpo"  # see the table in nanochat/losses.py
    beta: Frozen[Annotated[float, Range(1e-6, 100)]] = 0.1  # the smaller, the further from the reference
    label_smoothing: Frozen[Annotated[float, Range(0, 0.5)]] = 0.0  # share of pairs taken for the wrong way round (dpo)
    sft_weight: Frozen[Annotated[float, Range(0, 100)]] = 0.0  # of the chosen reply's own cross-entropy
    # optimizer
    lr_scale: Annotated[float, Range(0, 100)] = 0.02  # of all learning rates, as a multiple of pretraining's
    warmdown_fraction: Fraction = 1.0  # of the run, at its end, over which rates fall
    # evaluation
    eval_every: Count = 50  # steps between evaluations; 0: only at the end
    eval_examples: Positive = 256  # held-out pairs


def main(config: Config) -> None:
    began = time.time()
    # The heavy imports stand here so that --help answers at once.
    import copy
    import math
    from collections.abc import Iterator

    import torch
    import torch.distributed as dist

    from nanochat import checkpoint_manager, losses, scaling
    from nanochat import device as devices
    from nanochat.conversation import Rendered, render
    from nanochat.data.packing import pack_pairs
    from nanochat.parallel.fsdp import shard
    from nanochat.parallel.mesh import lay_out
    from nanochat.run.resume import resume
    from nanochat.run.stage import Stage
    from nanochat.tasks.mixture import Mixture, default_dpo_tasks, open_mixture
    from nanochat.tasks.registry import parse_tasks, require_pairs
    from nanochat.train import Meter, Progress, Schedule, make_optimizer, mean_loss, train_step

    # ------------------------------------------------------------------ model
    check(config)
    device = devices.init(config.device, config.dtype)
    device.seed(config.seed)
    source = checkpoint_manager.find_source(
        config.source, config.source_tag or config.model_tag, config.source_step, device
    )
    model, tokenizer, source_meta = checkpoint_manager.load_model(source, device, verified=True)
    reference = copy.deepcopy(model)
    layout = lay_out(device, config.parallel, config.replicate)
    shard(model.train(), layout, device, config.activation_checkpointing)
    shard(reference, layout, device)
    tag = config.model_tag or checkpoint_manager.tag_of(source)
    print0(f"device: {device}; {layout}")
    print0(f"source: {source}")

    # ------------------------------------------------------------------ data, horizon, optimizer
    pretraining = source_meta.get("pretraining", {"data": ""})
    tasks = config.tasks or default_dpo_tasks(pretraining["data"])
    require_pairs(parse_tasks(tasks))
    train, held_out = (open_mixture(tasks, split, config.hub, config.seed, pairs=True) for split in ("train", "test"))
    fingerprints = {
        "what --tasks names": train.fingerprint(), "the reference's weights": checkpoint_manager.weights_sha256(source)
    }  # fmt: skip
    row_tokens, examples, steps = model.config.sequence_len, config.target_examples_per_step, config.num_iterations

    def drawn(mixture: Mixture, first: int, count: int) -> list[tuple[Rendered, Rendered]]:
        """`count` pairs from number `first` on, the same on every rank, without those that have nothing to prefer: a
        reply is empty, or both are the same as far as the context goes."""
        pairs = []
        for index in range(first, first + count):
            chosen, rejected = (render(tokenizer, c, row_tokens + 1) for c in mixture.pair(index).conversations)
            if chosen.target_count and rejected.target_count and chosen.ids != rejected.ids:
                pairs.append((chosen, rejected))
        return pairs

    def batches(pairs: list[tuple[Rendered, Rendered]]) -> Iterator[losses.PairBatch]:
        """This rank's micro-batches; the reference is asked as each is taken."""
        replies = [reply for pair in pairs for reply in pair]
        for rows, count in pack_pairs(
            [r.ids for r in replies], [r.mask for r in replies], row_tokens, config.device_batch_size,
            device, device.rank, device.world_size,
        ):  # fmt: skip
            batch = losses.PairBatch(rows, count)
            with torch.no_grad(), device.autocast():
                logp = losses.reply_logp(reference, batch)
            yield replace(batch, reference_logp=logp)

    smoothing = {"label_smoothing": config.label_smoothing} if config.loss == "dpo" else {}
    loss_fn = functools.partial(
        losses.dpo_loss if config.loss == "dpo" else losses.ipo_loss,
        beta=config.beta, sft_weight=config.sft_weight, **smoothing,
    )  # fmt: skip

    def read(figures: torch.Tensor) -> dict[str, float]:
        """Means over the pairs of all ranks."""
        if device.world_size > 1:
            dist.all_reduce(figures)
        pairs, *sums = figures.tolist()
        return {name: total / max(1, pairs) for name, total in zip(losses.PAIR_FIGURES[1:], sums, strict=True)}

    rates = scaling.rates(model.config, examples * row_tokens, steps * examples * row_tokens).scaled(config.lr_scale)
    optimizer = make_optimizer(model, rates, device, layout=layout)
    schedule = Schedule.for_run(steps, warmdown_fraction=config.warmdown_fraction)
    print0(f"tasks: {tasks}")
    print0(f"horizon: {steps:,} steps of {examples} pairs")

    # ------------------------------------------------------------------ resume
    folder = checkpoint_dir("dpo", tag)
    progress, left_out = Progress(), 0  # pairs so far that had nothing to prefer
    if config.resume:
        progress, shares = resume(
            folder, config, steps, model, tokenizer, optimizer, device, source=source, fingerprints=fingerprints
        )
        left_out = int(shares[0]["left_out"].item()) if shares else 0

    # ------------------------------------------------------------------ train
    token_flops = scaling.flops_per_token(model.config)
    held_out_pairs = drawn(held_out, 0, min(config.eval_examples, sum(map(len, held_out.tasks))))
    if not held_out_pairs and not drawn(train, 0, examples):
        raise UserError(
            f"--tasks {tasks}: the first pairs leave nothing to prefer: both replies are the same or one is empty, or "
            f"the prompts are longer than the context of {row_tokens} tokens"
        )
    if not held_out_pairs:
        print0("no held-out pair leaves anything to prefer: there will be no val_loss")

    def evaluate() -> dict[str, float]:
        figures = torch.zeros(len(losses.PAIR_FIGURES), device=device.torch_device)
        told = functools.partial(loss_fn, figures=figures)
        val_loss = mean_loss(model, batches(held_out_pairs), told, device, stage.should_stop)
        if not math.isfinite(val_loss):
            return {}  # nothing held out may be left
        return {"val_loss": val_loss} | {f"val_{name}": value for name, value in read(figures).items()}

    stage = Stage(
        "dpo", tag, config, device, layout, model, tokenizer, optimizer, progress, steps,
        evaluate=evaluate,
        loader_state=lambda: {"left_out": torch.tensor(left_out)},
        meta=lambda: {
            "source": checkpoint_manager.short_name(source), "pretraining": pretraining, "fingerprints": fingerprints,
        },
    )  # fmt: skip
    with stage:
        meter = Meter(progress, device, token_flops)
        for step in stage.steps(meter):
            pairs = drawn(train, step * examples, examples)
            figures = torch.zeros(len(losses.PAIR_FIGURES), device=device.torch_device)
            stats = train_step(
                model, optimizer, batches(pairs), functools.partial(loss_fn, figures=figures),
                device=device, lr=schedule.lr(step), momentum=schedule.momentum(step), weight_decay=0.0,
            )  # fmt: skip
            meter.add(stats, sum(len(reply.ids) for pair in pairs for reply in pair))
            left_out += examples - len(pairs)
            if stage.due(stats):
                metrics = meter.read(stats) | {"lr": rates.matrix * schedule.lr(step), "left_out": left_out}
                stage.report(metrics | read(figures))
    stage.finish()
    print0(f"done: {progress.step:,} steps, {progress.seconds:.1f} s of training")
    record("dpo", tag, began, device)


def check(config: Config) -> None:
    """Raises UserError: for sizes no run can have."""
    check_trackers(config.track)
    if config.label_smoothing and config.loss != "dpo":
        raise UserError(f"--label_smoothing goes with --loss dpo, not with {config.loss}")


if __name__ == "__main__":
    run(main, Config)
