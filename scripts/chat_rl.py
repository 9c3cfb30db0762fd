"""Reinforcement learning: sample replies to questions, reward those that are right, make them more likely.

python -m scripts.chat_rl --examples_per_step=8 --num_samples=8 --lr_scale=0.3

python -m nanochat.run.launch --nproc_per_node=8 -m scripts.chat_rl -- --device_batch_size=4 --examples_per_step=16
"""

import itertools
import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from nanochat.run.flags import ChatFlags
from nanochat.shell import cli
from nanochat.shell.cli import Count, Fraction, Frozen, Positive, Range, UserError
from nanochat.shell.log import print0
from nanochat.shell.screen import phase, track


@dataclass(frozen=True)
class Config(ChatFlags):
    source: str = "sft"  # a stage, a folder (ours, Hugging Face's or peft's) or hf:ORG/NAME
    # samples
    num_iterations: Positive = 60  # steps
    examples_per_step: Frozen[Positive] = 16  # questions per step, over all devices
    num_samples: Frozen[Annotated[int, Range(2)]] = 16  # replies to each question, which are compared
    max_tokens: Frozen[Positive] = 256  # of a reply
    reward: Frozen[str] = "task"  # the task's own, a FILE.py:FUNCTION, or a weighted sum: task:0.8,FILE.py:FUNCTION:0.2
    temperature: Frozen[Annotated[float, Range(0.01, 100)]] = 1.0  # of the samples; the loss is that of temperature 1
    top_k: Frozen[Count] = 0  # 0: off
    rollout_rows: Positive = 256  # replies a device samples at once
    device_batch_size: Positive = 8  # rows a device computes at once; a row holds as many replies as fit
    # loss
    loss: Frozen[str] = "grpo"  # reinforce, grpo, dapo, dr_grpo: a row of POLICY_LOSSES in nanochat/losses.py
    updates_per_step: Positive = 1  # passes over the same samples
    minibatches: Positive = 1  # updates of a pass, each from its own share of the questions
    # The clip compares with the policy that sampled: without a second update of a step, there is nothing to clip.
    clip_low: Frozen[Fraction] = 0.2  # how far a probability may fall, as a share of what it was; from 2 updates on
    clip_high: Frozen[Annotated[float, Range(0, 100)] | None] = None  # likewise rise; default 0.2, for dapo 0.28
    kl: Frozen[Annotated[float, Range(0, 100)]] = 0.0  # weight of the KL penalty against the source model (grpo)
    # optimizer
    adapter_rate: ClassVar[float] = 1e-5
    lr_scale: Annotated[float, Range(0, 100)] = 0.05  # multiplies all learning rates of pretraining
    table_lr_scale: Annotated[float, Range(0, 100)] = 0.1  # scales embeddings and head again: less noise there
    # evaluation, logging, device
    eval_every: Count = 20  # steps between evaluations; 0: only at the beginning and the end
    eval_examples: Positive = 200  # held-out questions, one reply each
    log_every: Positive = 1  # steps between log lines
    # An accelerator records the launches of a decoded token and replays them as one; auto: on accelerators.
    graphs: Literal["auto", "on", "off"] = "auto"
    compile: Literal["auto", "on", "off"] = "auto"  # torch.compile; auto: where it pays


def main(config: Config) -> None:
    phase("loading torch")
    # The heavy imports are here so that --help answers at once.
    import numpy as np
    import torch

    from nanochat import losses, rewards, rollout, scaling
    from nanochat.conversation import render_prompt
    from nanochat.data.packing import pack_sequences
    from nanochat.engine import Engine, Slots, seed_of
    from nanochat.model_folder import weights_sha256
    from nanochat.run.memory import full_rows
    from nanochat.run.stage import Run, begin, open_optimizer
    from nanochat.tasks.mixture import Mixture, default_rl_tasks, open_mixture
    from nanochat.tasks.registry import parse_tasks, require_grades
    from nanochat.tasks.task import Example, Task
    from nanochat.train import train_step

    # ------------------------------------------------------------------ loss
    loss = losses.find(losses.POLICY_LOSSES, config.loss)
    if config.kl and not loss.takes("kl"):
        raise UserError(f"--kl {config.kl}: --loss {config.loss} has no KL penalty, grpo has")
    loss_fn = loss.bind(
        clip_low=config.clip_low, clip_high=config.clip_high, kl=config.kl, max_tokens=config.max_tokens
    )
    print0(f"loss: {config.loss} ({loss.source})")
    updates_each = config.updates_per_step * config.minibatches
    if updates_each == 1 and (config.clip_low, config.clip_high) != (Config.clip_low, Config.clip_high):
        print0("--clip_low and --clip_high do nothing with one update a step: set --minibatches or --updates_per_step")

    # ------------------------------------------------------------------ model, data, optimizer
    start = begin(config, with_reference=config.kl > 0)
    device = start.device
    model = start.model
    reference = start.reference
    row_tokens = model.config.sequence_len
    tasks = config.tasks or default_rl_tasks(start.pretraining["data"])
    reward_parts = rewards.open_rewards(config.reward, device)
    if rewards.TASK.name in [part.name for part in reward_parts]:
        require_grades(parse_tasks(tasks))
    train, held_out = (
        open_mixture(tasks, split, config.hub, config.seed, "prompts", config.bad_records)
        for split in ("train", "test")
    )
    steps = config.num_iterations
    examples = config.examples_per_step
    # Rewards make noisy gradients, whatever the number of tokens: start from the rates of the smallest batch.
    rates = scaling.rates(model.config, batch=1, tokens=1).scaled(config.lr_scale, config.table_lr_scale)
    optimizer, peak_lr = open_optimizer(config, start, rates)
    print0(f"tasks: {tasks}")
    print0(f"horizon: {steps:,} steps of {examples} questions, {config.num_samples} replies to each")

    def draw(mixture: Mixture, first: int, count: int) -> list[tuple[Task, Example]]:
        """`count` questions from number `first` on, without those that the context cannot hold."""
        questions = []
        for number in range(first, first + count):
            task, index = mixture.draw(number)
            example = task.example(index)
            if len(render_prompt(start.tokenizer, task.environment(example).start())) < row_tokens:
                questions.append((task, example))
        return questions

    rewards.check(reward_parts, draw(train, 0, 2), config.hang_seconds)
    if start.ledger is not None:
        rows = full_rows(config.device_batch_size, row_tokens, device)
        batch = losses.PolicyBatch(rows, rows.targets.float(), rows.targets.float())
        if updates_each > 1:
            batch = replace(batch, old_logp=rollout.logp_of(model, rows))
        if reference is not None:
            batch = replace(batch, reference_logp=rollout.logp_of(reference, rows))
        start.ledger.report(model, optimizer, [batch, batch], loss_fn, max_grad_norm=config.largest_norm)
        replies = min(config.rollout_rows, math.ceil(examples * config.num_samples / device.world_size))
        cache = replies * Slots.bytes_per_slot(model.config, device.dtype)
        print0(
            f"sampling comes on top: a cache of at most {cache / 2**20:,.1f} MiB for {replies} replies at once, and in "
            "bf16 a copy of the weights"
        )
        return

    # ------------------------------------------------------------------ train
    fingerprints = {"what --tasks names": train.fingerprint(), **rewards.fingerprints(config.reward)}
    if reference is not None and start.source is not None:
        fingerprints["the reference's weights"] = weights_sha256(start.source)
    run = Run("rl", config, start, optimizer, steps, fingerprints=fingerprints, tasks=train.tasks)
    # Micro-batches of samples have many shapes, which nobody knows before they are drawn: the full one is compiled. In
    # the demo half of what a step computes is in full ones, and replies have half of their largest length.
    shape = (config.device_batch_size, row_tokens)
    step_flops = scaling.flops_per_token(model.config) * examples * config.num_samples * config.max_tokens // 4
    compiled = run.compile(model, config.compile, step_flops, shape, forward_alone=True)
    compiled_reference = None
    if reference is not None:
        compiled_reference = run.compile(reference, config.compile, step_flops, shape, "reference", forward_alone=True)
    engine = Engine(model, start.tokenizer, device, config.graphs)
    sampler = rollout.engine_sampler(engine, config.rollout_rows, lambda: run.faults.should_stop())
    reward_before = math.nan  # of held-out questions, before the first step
    reward_after = math.nan  # and at the last evaluation
    if run.loader_states:
        reward_before = run.loader_states[0]["reward_before"].item()
        reward_after = run.loader_states[0]["reward_after"].item()

    def sample(questions: list[tuple[Task, Example]], samples: int, seed: int) -> rollout.Samples:
        engine.update(model)
        return rollout.sample_episodes(
            sampler, start.tokenizer, device, questions, samples=samples, max_tokens=config.max_tokens,
            context=row_tokens, seed=seed, rewards=reward_parts, reward_seconds=config.hang_seconds,
            should_stop=lambda: run.faults.should_stop(), temperature=config.temperature, top_k=config.top_k,
        )  # fmt: skip

    with run:
        for step in run.steps():
            # ---- evaluate: one reply to each held-out question, sampled as in training; before the first step too
            if run.should_evaluate:
                with run.interruptible("evaluation"):
                    earned = sample(draw(held_out, 0, config.eval_examples), 1, config.seed).rewards
                    reward_after = float(earned.sum()) / max(1, earned.size)
                    if step == 0:
                        reward_before = reward_after
                    run.log_evaluation(eval_reward=reward_after)
            if run.should_save:
                # The step's number decides which questions come next: only the two rewards need saving.
                held_out_rewards = {"reward_before": reward_before, "reward_after": reward_after}
                run.save({name: torch.tensor(value, dtype=torch.float64) for name, value in held_out_rewards.items()})
            if run.should_leave:
                break

            # ---- sample: each rank samples some of the replies, then the ranks exchange them
            samples = None
            with run.interruptible("sampling"):
                questions = draw(train, step * examples, examples)
                samples = sample(questions, config.num_samples, seed_of(config.seed, step))
            if samples is None:
                continue  # a signal ended the sampling; the next pass through the loop saves and leaves

            # ---- learn: pack each minibatch's replies into rows, of which each rank computes its share. All log
            # probabilities are those before the first update.
            policy = compiled if step else model
            frozen = compiled_reference if step else reference
            minibatches = []
            with_advantage = 0  # replies
            for part in samples.split(config.minibatches):
                advantages = rollout.group_advantages(part.rewards, by_deviation=loss.by_deviation)
                with_advantage += np.count_nonzero(advantages)
                rows = pack_sequences(part.ids, part.masks, row_tokens, device.world_size)
                batches = [
                    rollout.policy_batch(micro, part, advantages, device)
                    for micro in rows.micro_batches(config.device_batch_size, device, device.rank, device.world_size)
                ]
                if updates_each > 1:  # with one update the samples are the present policy's own
                    batches = [replace(b, old_logp=rollout.logp_of(policy, b.rows)) for b in batches]
                if frozen is not None:
                    batches = [replace(b, reference_logp=rollout.logp_of(frozen, b.rows)) for b in batches]
                minibatches.append(batches)
            lr = 1 - step / steps
            updates = [
                train_step(
                    policy, optimizer, track(batches, "micro-batch"), loss_fn, device=device, lr=lr,
                    max_grad_norm=config.largest_norm,
                )
                for _ in range(config.updates_per_step)
                for batches in minibatches
            ]  # fmt: skip
            # A step counts as skipped where any of its updates was, and as idle where none changed anything.
            finite = torch.stack([update.finite for update in updates]).amin()
            updated = torch.stack([update.updated for update in updates]).amax()
            stats = replace(updates[-1], finite=finite, updated=finite * updated)
            run.add(stats, sum(len(ids) for ids in samples.ids))

            # ---- log
            if run.should_log:
                replies = max(1, samples.rewards.size)
                metrics = {
                    "lr": peak_lr * lr,
                    "reward": samples.rewards.sum() / replies,
                    "response_tokens": sum(sum(mask) for mask in samples.masks) / replies,
                    "with_advantage": with_advantage / replies,
                }
                if frozen is not None:
                    metrics["kl"] = rollout.mean_kl(policy, list(itertools.chain(*minibatches)), device)
                run.log(stats, **metrics)
                # An example as often as an evaluation: true where `log` has just kept the line for the next turn's.
                if run.should_evaluate and samples.ids:
                    text = start.tokenizer.decode(samples.ids[0])
                    run.logger.message(f"a question and a reply, reward {samples.rewards.flat[0]:g}: {text!r}")
    run.finish(f"held-out reward {reward_before:.3f} -> {reward_after:.3f}")


if __name__ == "__main__":
    cli.run(main, Config, shows_progress=True)
