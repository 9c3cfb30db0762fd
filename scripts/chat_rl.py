"""Reinforcement learning: sample replies to questions, reward those that are right, make them more likely.

python -m scripts.chat_rl --examples_per_step=8 --num_samples=8 --lr_scale=0.3

torchrun --standalone --nproc_per_node=8 -m scripts.chat_rl -- --device_batch_size=4 --examples_per_step=16
"""

import functools
import math
import time
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from nanochat.run.flags import StageFlags
from nanochat.shell.cli import Count, Fraction, Frozen, Positive, Range, UserError, check_ranges, run
from nanochat.shell.log import check_trackers, print0, record
from nanochat.shell.paths import checkpoint_dir


@dataclass(frozen=True)
class Config(StageFlags):
    source: str = "sft"  # a stage, or a checkpoint's folder
    # samples
    num_iterations: Positive = 60  # steps
    examples_per_step: Frozen[Positive] = 16  # questions a step over all devices
    num_samples: Frozen[Annotated[int, Range(2)]] = 16  # replies to each question, which are compared
    max_tokens: Frozen[Positive] = 256  # of a reply
    temperature: Frozen[float] = 1.0  # of the samples; the loss is that of temperature 1
    top_k: Frozen[int] = 0  # 0: off
    rollout_rows: Positive = 256  # replies a device samples at once
    device_batch_size: Positive = 8  # rows a device computes at once; a row holds as many replies as fit
    # loss
    loss: Frozen[Literal["reinforce", "grpo", "dapo", "dr_grpo"]] = "grpo"  # see the table in nanochat/losses.py
    updates_per_step: Positive = 1  # over the same samples
    clip_low: Frozen[Fraction] = 0.2  # how far a probability may fall, as a share of what it was
    clip_high: Frozen[Annotated[float, Range(0, 100)] | None] = None  # how far it may rise; default 0.2, for dapo 0.28
    kl: Frozen[Annotated[float, Range(0, 100)]] = 0.0  # weight of the KL penalty against the source model (grpo)
    # optimizer
    lr_scale: Annotated[float, Range(0, 100)] = 0.05  # of all learning rates, as a multiple of pretraining's
    table_lr_scale: Annotated[float, Range(0, 100)] = 0.1  # on top, of the embeddings' and the head's: less noise there
    # evaluation, logging, device
    eval_every: Count = 20  # steps between evaluations; 0: only at the beginning and the end
    eval_examples: Positive = 200  # held-out questions, one reply each
    log_every: Positive = 1  # steps between log lines
    graphs: bool = False  # an accelerator records what a decoded token launches and replays it in one


def main(config: Config) -> None:
    began = time.time()
    # The heavy imports stand here so that --help answers at once.
    import copy

    import numpy as np
    import torch

    from nanochat import checkpoint_manager, losses, rollout, scaling
    from nanochat import device as devices
    from nanochat.conversation import render_prompt
    from nanochat.data.packing import pack_sequences
    from nanochat.engine import Engine, SamplingParams, seed_of
    from nanochat.parallel.fsdp import shard
    from nanochat.parallel.mesh import lay_out
    from nanochat.run.resume import resume
    from nanochat.run.stage import Stage
    from nanochat.shell.cli import Interrupted
    from nanochat.tasks.mixture import Mixture, default_rl_tasks, open_mixture
    from nanochat.tasks.registry import parse_tasks, require_grades
    from nanochat.tasks.task import Example, Task
    from nanochat.train import Meter, Progress, make_optimizer, train_step

    # ------------------------------------------------------------------ model
    check(config)
    check_ranges(SamplingParams(config.temperature, config.top_k))
    device = devices.init(config.device, config.dtype)
    device.seed(config.seed)
    source = checkpoint_manager.find_source(
        config.source, config.source_tag or config.model_tag, config.source_step, device
    )
    model, tokenizer, source_meta = checkpoint_manager.load_model(source, device, verified=True)
    reference = copy.deepcopy(model) if config.kl else None
    layout = lay_out(device, config.parallel, config.replicate)
    shard(model, layout, device, config.activation_checkpointing)
    if reference is not None:
        shard(reference, layout, device)
    tag = config.model_tag or checkpoint_manager.tag_of(source)
    print0(f"device: {device}; {layout}")
    print0(f"source: {source}")

    # ------------------------------------------------------------------ data, loss, optimizer
    pretraining = source_meta.get("pretraining", {"data": ""})
    tasks = config.tasks or default_rl_tasks(pretraining["data"])
    require_grades(parse_tasks(tasks))
    train, held_out = (open_mixture(tasks, split, config.hub, config.seed) for split in ("train", "test"))
    fingerprints = {"what --tasks names": train.fingerprint()}
    if config.kl:
        fingerprints["the reference's weights"] = checkpoint_manager.weights_sha256(source)
    steps, row_tokens = config.num_iterations, model.config.sequence_len
    clip_high = config.clip_high if config.clip_high is not None else 0.28 if config.loss == "dapo" else 0.2
    clips = {"clip_low": config.clip_low, "clip_high": clip_high}
    loss_fn = {
        "reinforce": losses.reinforce_loss,
        "grpo": functools.partial(losses.grpo_loss, kl=config.kl, **clips),
        "dapo": functools.partial(losses.dapo_loss, **clips),
        "dr_grpo": functools.partial(losses.dr_grpo_loss, max_tokens=config.max_tokens, **clips),
    }[config.loss]
    rates = scaling.rates(model.config, 1, 1).scaled(config.lr_scale, config.table_lr_scale)
    optimizer = make_optimizer(model, rates, device, layout=layout)
    print0(f"tasks: {tasks}")
    print0(f"horizon: {steps:,} steps of {config.examples_per_step} questions, {config.num_samples} replies to each")

    # ------------------------------------------------------------------ resume
    folder = checkpoint_dir("rl", tag)
    progress, shares = Progress(), []
    if config.resume:
        progress, shares = resume(
            folder, config, steps, model, tokenizer, optimizer, device, source=source, fingerprints=fingerprints
        )
    engine = Engine(model, tokenizer, device, config.graphs)

    def questions(mixture: Mixture, first: int, count: int) -> list[tuple[Task, Example]]:
        """`count` questions from number `first` on, without those that the context cannot hold."""
        drawn = (mixture.draw(i) for i in range(first, first + count))
        found = [(task, task.example(number)) for task, number in drawn]
        room = row_tokens - 1
        return [(t, e) for t, e in found if len(render_prompt(tokenizer, e.question)) <= room]

    def sample(mixture: Mixture, first: int, count: int, samples: int, seed: int) -> rollout.Samples:
        return rollout.sample_replies(
            engine, questions(mixture, first, count), samples=samples, max_tokens=config.max_tokens,
            temperature=config.temperature, top_k=config.top_k, seed=seed, rows=config.rollout_rows,
            should_stop=stage.faults.should_stop,
        )  # fmt: skip

    def held_out_reward() -> float:
        """Mean reward of one reply to each held-out question, sampled as in training."""
        engine.update(model)
        rewards = sample(held_out, 0, config.eval_examples, 1, config.seed).rewards
        return float(rewards.sum()) / max(1, rewards.size)

    # ------------------------------------------------------------------ train
    reward = {"before": math.nan, "after": math.nan}  # held-out
    if shares:
        reward = {when: shares[0][f"reward_{when}"].item() for when in reward}

    def evaluate() -> dict[str, float]:
        reward["after"] = held_out_reward()
        return {"eval_reward": reward["after"]}

    stage = Stage(
        "rl", tag, config, device, layout, model, tokenizer, optimizer, progress, steps,
        evaluate=evaluate,
        loader_state=lambda: {f"reward_{w}": torch.tensor(value, dtype=torch.float64) for w, value in reward.items()},
        meta=lambda: {
            "source": checkpoint_manager.short_name(source), "pretraining": pretraining, "fingerprints": fingerprints,
        },
    )  # fmt: skip
    with stage:
        meter = Meter(progress, device)
        for step in stage.steps(meter):
            # ---- samples
            try:
                if math.isnan(reward["before"]):
                    with stage.faults.phase("evaluation"):
                        reward["before"] = reward["after"] = held_out_reward()
                    stage.log.message(f"held-out reward at the beginning: {reward['before']:.3f}")
                    meter.restart()
                with stage.faults.phase("sampling"):  # in which ranks wait for each other
                    engine.update(model)
                    first, count = step * config.examples_per_step, config.examples_per_step
                    drawn = sample(train, first, count, config.num_samples, seed_of(config.seed, step))
            except Interrupted:
                stage.stop()
                break
            advantages = rollout.group_advantages(drawn.rewards, by_deviation=config.loss in ("grpo", "dapo"))
            rows = pack_sequences(drawn.ids, drawn.masks, row_tokens)
            batches = [
                rollout.policy_batch(micro, drawn, advantages, device)
                for micro in rows.micro_batches(config.device_batch_size, device, device.rank, device.world_size)
            ]
            if config.updates_per_step > 1:  # with one update the samples are the present policy's own
                batches = [replace(b, old_logp=rollout.logp_of(model, b.rows, device)) for b in batches]
            if reference is not None:
                batches = [replace(b, reference_logp=rollout.logp_of(reference, b.rows, device)) for b in batches]

            # ---- updates
            updates = [
                train_step(model, optimizer, batches, loss_fn, device=device, lr=1 - step / steps, weight_decay=0.0)
                for _ in range(config.updates_per_step)
            ]
            stats = replace(updates[-1], finite=torch.stack([update.finite for update in updates]).amin())
            meter.add(stats, sum(map(len, drawn.ids)))
            if not stage.due(stats):
                continue
            metrics, replies = meter.read(stats), max(1, drawn.rewards.size)
            metrics |= {
                "lr": rates.matrix * (1 - step / steps), "reward": drawn.rewards.sum() / replies,
                "response_tokens": sum(map(sum, drawn.masks)) / replies,
                "with_advantage": np.count_nonzero(advantages) / replies,
            }  # fmt: skip
            if step == 0:
                metrics["reward_before"] = reward["before"]
            if reference is not None:
                metrics["kl"] = rollout.mean_kl(model, batches, device)
            stage.report(metrics)
            if stage.evaluates and drawn.replies:
                stage.log.message(f"a reply, reward {drawn.rewards.flat[0]:g}: {drawn.replies[0]!r}")
    stage.finish()
    print0(f"done: {progress.step:,} steps, held-out reward {reward['before']:.3f} -> {reward['after']:.3f}")
    record("rl", tag, began, device)


def check(config: Config) -> None:
    """Raises UserError: for sizes no run can have."""
    check_trackers(config.track)
    if config.temperature < 0.01:
        raise UserError(f"--temperature {config.temperature}: replies must differ to be compared; 1.0 is usual")
    if config.kl and config.loss != "grpo":
        raise UserError(f"--kl goes with --loss grpo, not with {config.loss}")


if __name__ == "__main__":
    run(main, Config)
