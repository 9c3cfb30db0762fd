"""Preference optimisation: make the better of two replies to a question more likely than the worse one.

python -m scripts.chat_dpo --device_batch_size=8

python -m scripts.chat_dpo --loss=simpo --tasks=pairs.jsonl

python -m scripts.chat_dpo --loss=reward    # a reward model instead, for `chat_rl --reward rm:rm`

python -m nanochat.run.launch --nproc_per_node=8 -m scripts.chat_dpo -- --target_examples_per_step=64
"""

import functools
from dataclasses import dataclass
from typing import Annotated, Any

from nanochat.ground import cli
from nanochat.ground.cli import Count, Frozen, Positive, Range, UserError
from nanochat.ground.log import counted, print0
from nanochat.ground.screen import phase, track
from nanochat.run.flags import EpochFlags


@dataclass(frozen=True)
class Config(EpochFlags):
    # A stage, a folder (ours, Hugging Face's or peft's) or hf:ORG/NAME. Some losses use a frozen copy as the reference.
    source: str = "sft"
    # horizon and batch
    num_iterations: Positive = 100  # steps
    device_batch_size: Annotated[int, Range(2)] = 8  # rows a device computes at once; the replies of a pair share one
    # loss
    loss: Frozen[str] = "dpo"  # dpo, simpo, orpo; reward: train a reward model (stage rm)
    # A smaller value allows a larger distance from the reference. orpo: the odds ratio's weight. Default 0.1; simpo 2.
    beta: Frozen[Annotated[float, Range(1e-6, 100)] | None] = None
    gamma: Frozen[Annotated[float, Range(0, 100)] | None] = None  # by how much the chosen reply should lead (simpo: 1)
    label_smoothing: Frozen[Annotated[float, Range(0, 0.5)] | None] = None  # share of pairs that are wrong (dpo: 0)
    # Weight of the chosen reply's cross-entropy. Default 0, for orpo 1.
    sft_weight: Frozen[Annotated[float, Range(0, 100)] | None] = None
    # optimizer

    # Multiplies all learning rates of pretraining. Default 0.02, for reward 0.1.
    lr_scale: Annotated[float, Range(0, 100)] | None = None
    # evaluation
    eval_every: Count = 50  # steps between evaluations; 0: only at the beginning and the end
    eval_examples: Positive = 256  # held-out pairs

    @property
    def is_reward_model(self) -> bool:
        """Whether a second head is trained, which rates replies (alignment/reward_model.py)."""
        return self.loss == "reward"

    @property
    def adapter_rate(self) -> float:
        return 1e-4 if self.is_reward_model else 1e-5


def main(config: Config) -> None:
    phase("loading torch")
    # The heavy imports are here so that --help answers at once.
    from collections.abc import Iterator, Sequence

    import torch

    from nanochat import scaling
    from nanochat.alignment import reply_pairs
    from nanochat.alignment.pair_losses import PAIR_STATS, PairBatch, mean_pair_stats
    from nanochat.alignment.reward_model import NewScalarHead
    from nanochat.kernels.run_flags import compiled_and_profiled
    from nanochat.mixture import Horizon, Mixture, RenderedPair
    from nanochat.run.loop import Run
    from nanochat.run.stage import begin, open_optimizer
    from nanochat.tasks.data_table import passes
    from nanochat.tasks.flag import open_tasks
    from nanochat.train import Schedule, mean_loss, train_step

    # ------------------------------------------------------------------ loss
    loss = reply_pairs.find(config.loss)
    settings = {name: getattr(config, name) for name in ("beta", "gamma", "label_smoothing", "sft_weight")}
    loss_fn = reply_pairs.with_settings(config.loss, settings)
    print0(f"loss: {config.loss} ({loss.source})")

    # ------------------------------------------------------------------ model, data
    prepare = [NewScalarHead()] if config.is_reward_model else []
    start = begin(config, with_reference=loss.has_reference, prepare=prepare)
    device = start.device
    config = config.for_devices(device.data_ranks)
    model = start.model
    reference = start.reference
    row_tokens = model.config.sequence_len
    if start.ledger is not None:  # --dry_run, which needs no data: any rates take the same memory
        optimizer, _ = open_optimizer(config, start, scaling.rates(model.config, batch=1, tokens=1))
        reply_stats = torch.zeros(len(PAIR_STATS), device=device.torch_device)
        start.ledger.report(
            model, optimizer, functools.partial(loss_fn, stats=reply_stats), config.device_batch_size,
            batch_of=lambda rows: reply_pairs.with_reference(PairBatch(rows, len(rows.inputs) // 2), reference),
            max_grad_norm=config.largest_norm,
        )  # fmt: skip
        return
    tasks, train, held_out = open_tasks(config, start.pretraining["data"], "dpo")
    print0(f"tasks: {tasks}")

    # A row reads all tokens of a reply but the last, which is only a target. A reward model reads the last one, too.
    max_tokens = row_tokens if config.is_reward_model else row_tokens + 1

    def draw(mixture: Mixture, numbers: range) -> list[RenderedPair]:
        return reply_pairs.draw_pairs(mixture, start.tokenizer, numbers, max_tokens)

    def micro_batches(examples: Sequence[RenderedPair], frozen: Any = reference) -> Iterator[PairBatch]:
        """This rank's micro-batches, each with the log probabilities of the reference model, which may be compiled."""
        if config.is_reward_model:
            from nanochat.alignment.reward_model import with_places

            examples = with_places(examples)
        for batch in reply_pairs.pair_batches(examples, row_tokens, config.device_batch_size, device):
            yield reply_pairs.with_reference(batch, frozen)

    # ------------------------------------------------------------------ horizon, optimizer
    horizon = Horizon.of(train, config.target_examples_per_step, config.num_iterations, config.num_epochs)
    steps = horizon.steps
    batch_tokens = horizon.examples * row_tokens  # approximate: a reply is shorter than a row
    lr_scale = config.lr_scale
    if lr_scale is None:
        lr_scale = 0.1 if config.is_reward_model else 0.02
    rates = scaling.rates(model.config, batch_tokens, steps * batch_tokens).scaled(lr_scale)
    optimizer, peak_lr = open_optimizer(config, start, rates)
    schedule = Schedule.for_run(steps, config.warmdown_fraction, config.warmup_ratio, fall=config.lr_schedule)
    again = passes(train, steps * horizon.examples)
    print0("; ".join(filter(None, [f"horizon: {counted(steps, 'step')} of {horizon.examples} pairs", again])))

    # ------------------------------------------------------------------ train
    token_flops = scaling.flops_per_token(model.config, is_frozen=start.adapter is not None)
    run = Run(
        "rm" if config.is_reward_model else "dpo", config, start, optimizer, steps, token_flops=token_flops,
        tasks=train.task_names, fingerprints={"what --tasks names": train.fingerprint()},
    )  # fmt: skip
    held_out_count = min(config.eval_examples, sum(len(task) for task in held_out.tasks))
    val_examples = draw(held_out, range(held_out_count))
    first_examples = draw(train, horizon.draws(0))
    if not val_examples and not first_examples:
        raise UserError(
            f"--tasks {tasks}: the first pairs leave nothing to prefer: both replies are the same or one is empty, or "
            f"the prompts are longer than the context of {row_tokens} tokens; name other --tasks, or a .jsonl of pairs "
            "with two different replies"
        )
    reply_pairs.report_first(first_examples, row_tokens, config.strict_data)
    run.has_validation = bool(val_examples)
    if not val_examples:
        print0("no held-out pair leaves anything to prefer: there will be no val_loss")
    step_flops = token_flops * reply_pairs.token_count(first_examples)
    shape = (config.device_batch_size, row_tokens)  # the shape of every micro-batch
    compiled, compiled_reference = compiled_and_profiled(run, step_flops, shape, model, reference, forward_alone=True)
    left_out = int(run.loader_states[0]["left_out"]) if run.loader_states else 0  # pairs with nothing to prefer
    pairs_of = run.read_ahead(lambda step: draw(train, horizon.draws(step)))

    with run:
        for step in run.steps():
            # ---- `step` steps are finished: evaluate, save or leave if that is due
            if run.must_evaluate:
                with run.interruptible("evaluation"):
                    reply_stats = torch.zeros(len(PAIR_STATS), device=device.torch_device)
                    val_loss_fn = functools.partial(loss_fn, stats=reply_stats)
                    val_loss = mean_loss(model, micro_batches(val_examples), val_loss_fn, device, run.should_stop)
                    means = mean_pair_stats(reply_stats, device)
                    run.log_evaluation(val_loss=val_loss, **{f"val_{name}": value for name, value in means.items()})
            if run.must_save:
                run.save({"left_out": torch.tensor(left_out)})
            if run.must_leave:
                break

            # ---- one step
            examples = pairs_of(step)
            reply_stats = torch.zeros(len(PAIR_STATS), device=device.torch_device)
            # Both models are compiled, or neither is: otherwise the margin contains the difference of their rounding.
            policy = compiled if step else model
            frozen = compiled_reference if step else reference
            stats = train_step(
                policy, optimizer, track(micro_batches(examples, frozen), "micro-batch"),
                functools.partial(loss_fn, stats=reply_stats), device=device, lr=schedule.lr(step),
                momentum=schedule.momentum(step), max_grad_norm=config.largest_norm,
            )  # fmt: skip
            run.count(stats, reply_pairs.token_count(examples))
            left_out += len(horizon.draws(step)) - len(examples)
            if run.must_log:
                means = mean_pair_stats(reply_stats, device)
                run.log_step(lr=peak_lr * schedule.lr(step), left_out=left_out, **means)
    run.finish()


if __name__ == "__main__":
    cli.run(main, Config, shows_progress=True)
