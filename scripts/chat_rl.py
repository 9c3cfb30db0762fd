"""Reinforcement learning: sample replies to questions, reward the right ones, and make them more likely.

python -m scripts.chat_rl --examples_per_step=8 --num_samples=8 --lr_scale=0.3

python -m nanochat.run.launch --nproc_per_node=8 -m scripts.chat_rl -- --device_batch_size=4 --examples_per_step=16
"""

import functools
import math
import re
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from nanochat.ground import cli
from nanochat.ground.cli import Count, Fraction, Frozen, Positive, Range, UserError
from nanochat.ground.log import counted, print0
from nanochat.ground.screen import phase, track
from nanochat.run.flags import ChatFlags, Epochs, forbid_both

if TYPE_CHECKING:
    from nanochat.losses import PolicyBatch, PolicyLoss
    from nanochat.rollout import RankSamples, Samples
    from nanochat.run.loop import Run
    from nanochat.run.stage import Start

# The rates of embeddings and head are scaled once more: less of the rewards' noise is learned there.
TABLE_LR_SCALE = 0.1


@dataclass(frozen=True)
class Config(ChatFlags):
    source: str = "sft"  # a stage, a folder (ours, Hugging Face's or peft's) or hf:ORG/NAME
    # samples
    num_iterations: Positive = 60  # steps
    num_epochs: Epochs | None = None  # instead of --num_iterations: every question of --tasks comes once an epoch
    examples_per_step: Frozen[Positive] = 16  # questions per step, over all devices
    num_samples: Frozen[Annotated[int, Range(2)]] = 16  # replies to each question, which are compared
    max_tokens: Frozen[Positive] = 256  # tokens of a reply
    reward: Frozen[str] = "task"  # the task's own, a FILE.py:FUNCTION, or a weighted sum: task:0.8,FILE.py:FUNCTION:0.2
    temperature: Frozen[Annotated[float, Range(0.01, 100)]] = 1.0  # the policy's, in sampling and in the loss
    top_k: Frozen[Count] = 0  # 0: off
    # This process's engine, servers (http://HOST:PORT[,http://...] of chat_web --for_rl, vLLM, SGLang), or ray:WORKERS.
    sampler: str = "engine"
    sampler_patience: Positive = 300  # seconds without a reply from a sampler; after them the run saves and ends
    # A step learns from samples of the weights this many steps earlier: servers sample while this process trains.
    staleness: Frozen[Annotated[int, Range(0, 100)]] = 0
    device_batch_size: Positive = 8  # rows a device computes at once; a row holds as many replies as fit
    # loss

    # grpo, dr_grpo, dapo, reinforce, rloo, ppo, gspo and others: docs/rl.md compares them, a wrong name lists all
    loss: Frozen[str] = "grpo"
    updates_per_step: Positive = 1  # passes over the same samples
    minibatches: Positive = 1  # updates of a pass, each from its own share of the questions
    # The clip compares with the policy that sampled, so it has an effect only from the second update of a step on.
    # How far a probability may fall, as a share of its old value. Default of both clips: the loss's, mostly 0.2.
    clip_low: Frozen[Fraction | None] = None
    clip_high: Frozen[Annotated[float, Range(0, 100)] | None] = None  # how far it may rise; default: 0.2, dapo 0.28
    kl: Frozen[Annotated[float, Range(0, 100)]] = 0.0  # weight of the KL penalty against the source model
    kl_in: Frozen[Literal["loss", "reward"]] = "loss"  # at each token in the loss, or summed up in a reply's reward
    # Weigh tokens by min(p_trainer / p_sampler, this); 0: off; default: 2 with --staleness, else 0.
    importance_cap: Frozen[Annotated[float, Range(0)] | None] = None
    # How often questions with equally good replies are replaced by others; default: 0, dapo 3.
    refills: Frozen[Annotated[int, Range(0, 1000)] | None] = None
    teacher: Frozen[str | None] = None  # --loss distill: the model to learn from; a stage, a folder or hf:ORG/NAME
    # optimizer
    lr_scale: Annotated[float, Range(0, 100)] = 0.05  # multiplies all learning rates of pretraining
    # evaluation, logging, device
    eval_every: Count = 20  # steps between evaluations; 0: only at the beginning and the end
    eval_examples: Positive = 200  # held-out questions, one reply each
    log_every: Positive = 1  # steps between log lines
    # An accelerator records the launches of a decoded token and replays them as one; auto: on accelerators.
    graphs: Literal["auto", "on", "off"] = "auto"

    def __post_init__(self):
        super().__post_init__()
        forbid_both(self, "num_epochs", "num_iterations", "the horizon")
        forbid_both(self, "gradient_accumulation_steps", "examples_per_step", "the questions of a step")

    def for_devices(self, count: int) -> "Config":
        """These flags with --gradient_accumulation_steps as a number of questions: a checkpoint records that number.

        Raises UserError: when its replies are not whole questions.
        """
        if self.gradient_accumulation_steps is None:
            return self
        replies = self.device_batch_size * self.gradient_accumulation_steps * count
        questions, rest = divmod(replies, self.num_samples)
        if rest:
            raise UserError(
                f"--gradient_accumulation_steps {self.gradient_accumulation_steps} x --device_batch_size "
                f"{self.device_batch_size} x {count} devices are {replies} replies a step, which --num_samples "
                f"{self.num_samples} does not divide: change one, or set --examples_per_step, the questions of a step"
            )
        return replace(self, examples_per_step=questions, gradient_accumulation_steps=None)

    @property
    def adapter_rate(self) -> float:
        return 1e-5

    @property
    def updates(self) -> int:
        """Weight updates per step."""
        return self.updates_per_step * self.minibatches

    @property
    def most_refills(self) -> int:
        """How often the questions of a step are replaced."""
        if self.refills is None:
            return 3 if self.loss == "dapo" else 0
        return self.refills

    @property
    def largest_weight(self) -> float:
        """The largest importance weight of a token; 0: tokens are not weighted."""
        if self.importance_cap is None:
            return 2.0 if self.staleness else 0.0
        return self.importance_cap


def main(config: Config) -> None:
    phase("loading torch")
    # The heavy imports are here so that --help answers at once.
    import torch

    from nanochat import losses, rollout, scaling
    from nanochat.alignment import rl_checks
    from nanochat.alignment.reward_model import NewScalarHead
    from nanochat.alignment.rewards import load_rewards, parse_rewards, reward_fingerprints
    from nanochat.alignment.value import ValueFunction
    from nanochat.kernels.run_flags import compiled_and_profiled
    from nanochat.mixture import FIRST_EXAMPLES
    from nanochat.run.loop import Run
    from nanochat.run.stage import begin, open_optimizer
    from nanochat.sampling import seed_of
    from nanochat.tasks.flag import open_tasks
    from nanochat.train import StepStats, train_step

    # ------------------------------------------------------------------ loss, rewards
    method = method_of(config)
    rewards = parse_rewards(config.reward)
    rl_checks.check_flags(config, method, rewards)
    critic = ValueFunction() if config.loss == "ppo" else None
    loss_fn = functools.partial(
        losses.policy_loss, method=method, max_tokens=config.max_tokens,
        kl=config.kl if config.kl_in == "loss" else 0.0, importance_cap=config.largest_weight,
        temperature=config.temperature, critic=critic,
    )  # fmt: skip
    print0(f"loss: {config.loss} ({method.source})")

    # ------------------------------------------------------------------ model, optimizer, questions
    prepare = [] if critic is None else [NewScalarHead()]
    start = begin(config, with_reference=config.kl > 0, teacher=config.teacher, prepare=prepare)
    device = start.device
    config = config.for_devices(device.data_ranks)
    row_tokens = start.model.config.sequence_len
    # Rewards give noisy gradients, whatever the number of tokens: start from the rates of the smallest batch.
    rates = scaling.rates(start.model.config, batch=1, tokens=1).scaled(config.lr_scale, TABLE_LR_SCALE)
    optimizer, peak_lr = open_optimizer(config, start, rates)
    rewards = load_rewards(rewards, device)
    if start.ledger is not None:  # --dry_run, which needs no data
        rl_checks.report_memory(config, start, optimizer, loss_fn)
        return
    tasks, train, held_out = open_tasks(config, start.pretraining["data"], "rl")
    examples = config.examples_per_step
    steps = config.num_iterations
    if config.num_epochs is not None:
        questions = sum(len(task) for task in train.tasks)
        steps = math.ceil(round(config.num_epochs * questions / examples, 6))  # rounded: 1.1 x 10 is above 11 in floats
    print0(f"tasks: {tasks}")
    print0(f"horizon: {counted(steps, 'step')} of {examples} questions, {config.num_samples} replies to each")
    questions_of = functools.partial(rollout.draw_questions, train, start.tokenizer, context=row_tokens)  # by number
    rl_checks.check_questions(config, tasks, questions_of(range(FIRST_EXAMPLES)), rewards, row_tokens)

    # ------------------------------------------------------------------ run
    fingerprints = {"what --tasks names": train.fingerprint(), **reward_fingerprints(rewards)}
    run = Run("rl", config, start, optimizer, steps, fingerprints=fingerprints, tasks=train.task_names)
    # In the demo, replies have half of the maximum length, and half of the computed tokens are in full micro-batches.
    replies = examples * config.num_samples
    step_flops = scaling.flops_per_token(start.model.config) * replies * config.max_tokens // 4
    # Micro-batches of samples have many shapes, unknown before sampling: only the full shape is compiled.
    shape = (config.device_batch_size, row_tokens)
    compiled, compiled_reference = compiled_and_profiled(
        run, step_flops, shape, start.model, start.reference, forward_alone=True
    )
    sample_on_rank = functools.partial(
        rollout.sample_on_rank, tokenizer=start.tokenizer, device=device, max_tokens=config.max_tokens,
        context=row_tokens, rewards=rewards, reward_seconds=config.hang_seconds, should_stop=run.stop.should_stop,
        temperature=config.temperature, top_k=config.top_k,
    )  # fmt: skip

    def draw(sampler: Any, step: int, refill: int = 0, count: int = examples) -> "RankSamples":
        """This rank's samples of a step, with the sampler's present weights. With `refill` (1, 2, ...) of `count`
        questions instead, which replace some of the step's."""
        # The step decides which questions come next, refills included.
        first = (step * (1 + config.most_refills) + refill) * examples
        seed = seed_of(config.seed, step, refill) if refill else seed_of(config.seed, step)
        questions = functools.partial(questions_of, range(first, first + count))
        return sample_on_rank(sampler, read_questions=questions, samples=config.num_samples, seed=seed)

    run.has_validation = bool(held_out.tasks)  # a small file has no held-out rows
    rollouts = open_rollouts(config, start, run, draw)
    last_kl = math.nan  # KL to the reference or the teacher in the last logged step

    with run:
        for step in run.steps():
            # ---- evaluate: one reply to each held-out question, sampled as in training; also before the first step
            if run.must_evaluate:
                with run.interruptible("evaluation"):
                    rollouts.hand_over(step)
                    numbers = range(config.eval_examples)
                    questions = functools.partial(
                        rollout.draw_questions, held_out, start.tokenizer, numbers, row_tokens
                    )
                    own = sample_on_rank(rollouts.sampler, read_questions=questions, samples=1, seed=config.seed)
                    earned = rollout.gather_samples(own, device).rewards
                    count = max(1, earned.size)
                    error = math.sqrt(earned.var() / count) if earned.size else 0.0
                    run.log_evaluation(eval_reward=float(earned.sum()) / count, eval_reward_error=error)
            if run.must_save:
                run.save({})  # the step's number decides which questions come next
            if run.must_leave:
                break

            # ---- sample: each rank samples some of the replies, then the ranks exchange them
            began = time.perf_counter()
            drawn = None
            metrics = {}
            with run.interruptible("sampling"):
                drawn = rollout.gather_samples(rollouts.take(step), device)
                metrics = drawn.metrics()
                if config.most_refills:
                    from nanochat.alignment.dapo import with_refills

                    more = functools.partial(rollouts.draw, step)
                    drawn = with_refills(drawn, config.most_refills, more, device)
                if config.staleness:
                    rollouts.begin(step)  # servers draw the next samples with the present weights during this step
            if drawn is None or run.stopped:
                continue  # a signal ended the sampling; the next pass through the loop saves and leaves
            sampled = time.perf_counter()

            # ---- compare: how much better was each reply than expected?
            policy = compiled if step else start.model
            reference = compiled_reference if step else start.reference
            minibatches = compare(drawn, policy, reference, config, method, start)
            if critic is not None:
                minibatches = critic.estimate(policy, minibatches, device)

            # ---- learn
            policy_stats = torch.zeros(len(losses.POLICY_STATS), device=device.torch_device)
            lr = 1 - step / steps
            updates = []
            for batches in minibatches * config.updates_per_step:
                updates.append(train_step(
                    policy, optimizer, track(batches, "micro-batch"), functools.partial(loss_fn, stats=policy_stats),
                    device=device, lr=lr, max_grad_norm=config.largest_norm,
                ))  # fmt: skip
            stats = StepStats.of_updates(updates)
            run.count(stats, drawn.token_count)

            # ---- log
            if run.must_log:
                means = losses.mean_policy_stats(policy_stats, device)  # waits for the device
                last_kl = means["kl"]
                if reference is None:
                    del means["kl"]
                seconds = {"sampling_seconds": sampled - began, "training_seconds": time.perf_counter() - sampled}
                run.log_step(lr=peak_lr * lr, **metrics, **means, **seconds)
                # Log an example as often as an evaluation runs.
                if run.every(config.eval_every) and drawn.groups:
                    first = drawn.groups[0][0]
                    text = re.sub(r"<\|\w+\|>", " ", start.tokenizer.decode(first.tokens))
                    print0(f"a question and a reply, reward {first.reward:g}: {' '.join(text.split())}")
    run.finish("" if config.teacher is None else f"KL to the teacher {last_kl:.3f} nats a token")


# ---------------------------------------------------------------------- before the loop


def method_of(config: Config) -> "PolicyLoss":
    """The method that --loss names, with the clips of the flags."""
    from nanochat import losses

    method = losses.find(config.loss)
    clips = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    return replace(method, **{name: clip for name, clip in clips.items() if clip is not None})


def open_rollouts(config: Config, start: "Start", run: "Run", draw: Any) -> Any:
    """The samples of each step. `draw` draws them with the step's weights, or earlier ones (--staleness)."""
    from nanochat import rollout
    from nanochat.engine import Engine
    from nanochat.ground import rooms

    model = start.model
    should_stop = run.stop.should_stop
    if config.sampler != "engine":
        from nanochat.samplers.agreement import Checked

        sampler = rooms.find("samplers", config.sampler.partition(":")[0])(config, start, should_stop)
        draw = functools.partial(draw, sampler)
        return Checked(sampler, model, draw, config.staleness, run.last, config=config, device=start.device)
    engine = Engine(model, start.tokenizer, start.device, config.graphs)
    sampler = rollout.EngineSampler(engine, rollout.ROWS_AT_ONCE, should_stop)
    draw = functools.partial(draw, sampler)
    if config.staleness:
        from nanochat.samplers.ahead import Ahead

        return Ahead(sampler, model, draw, config.staleness, run.last)
    return rollout.OnPolicy(sampler, model, draw)


# ---------------------------------------------------------------------- in a step


def compare(
    drawn: "Samples", policy: Any, reference: Any, config: Config, method: "PolicyLoss", start: "Start"
) -> list[list["PolicyBatch"]]:
    """A step's samples as minibatches of packed rows, of which each rank computes its share, with their advantages.

    All log probabilities are from before the first update.
    """
    from nanochat import rollout

    # With one update the present policy drew the samples: only a KL in the reward asks for its probabilities.
    old = policy if config.updates > 1 or config.kl_in == "reward" else None
    shape = (config.device_batch_size, start.model.config.sequence_len)
    minibatches = drawn.split(config.minibatches)
    batches = []
    for minibatch in minibatches:
        batches.append(rollout.policy_batches(minibatch, shape, start.device, old, reference, config.temperature))
    rewards = drawn.rewards
    if config.loss == "dapo":
        from nanochat.alignment.dapo import overlong_penalty

        rewards = rewards - overlong_penalty(drawn.grid(lambda sample: sample.longest), config.max_tokens)
    penalties = 0.0
    if config.kl_in == "reward":
        from nanochat.alignment.advantages import kl_of_samples

        sizes = [minibatch.rewards.size for minibatch in minibatches]
        penalties = config.kl * kl_of_samples(batches, sizes, start.device).reshape(rewards.shape)
    advantages = method.advantages(rewards, penalties)
    return rollout.with_advantages(minibatches, batches, advantages, start.device)


if __name__ == "__main__":
    cli.run(main, Config, shows_progress=True)
