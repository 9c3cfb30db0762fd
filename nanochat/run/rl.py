"""What surrounds the loop of chat_rl: its flags, checked before a model is loaded, and the memory of a dry run."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from nanochat import rollout
from nanochat.alignment import rewards
from nanochat.alignment.rewards import Reward
from nanochat.cli import UserError
from nanochat.engine import Slots
from nanochat.log import print0, warn
from nanochat.losses import PolicyBatch, PolicyLoss, clipped_objective
from nanochat.optim import Optimizer
from nanochat.packing import PackedBatch
from nanochat.samplers.agreement import LARGEST_DIFFERENCE
from nanochat.samplers.kinds import require_sampler
from nanochat.stage import Start
from nanochat.task import Example, Task
from nanochat.task_flag import parse_tasks, require_grades


def check_flags(flags: Any, method: PolicyLoss, reward_parts: Sequence[Reward]) -> None:
    """Print a hint for each flag of chat_rl that will do nothing, or little good.

    Raises UserError: when flags contradict each other, or name what there is not.
    """
    distills = method.advantages is None
    if distills != (flags.teacher is not None):
        raise UserError("--loss distill and --teacher SOURCE need each other: set both, or neither")
    if distills and flags.kl:
        raise UserError(f"--kl {flags.kl:g}: --loss distill is the KL to the teacher, leave --kl out")
    if flags.kl_in == "reward" and not flags.kl:
        raise UserError("--kl_in reward: there is no penalty without --kl")
    if flags.staleness and method.refills:
        raise UserError("--staleness: samples that are drawn ahead are not replaced, add --refills 0")
    if flags.minibatches > flags.examples_per_step:
        raise UserError(
            f"--minibatches {flags.minibatches}: each needs a question, and --examples_per_step is "
            f"{flags.examples_per_step}: lower the one, or raise the other"
        )
    require_sampler(flags.sampler)
    # The default tasks, which depend on the model, all have right answers.
    if flags.tasks and not distills and any(part.name == rewards.TASK.name for part in reward_parts):
        require_grades(parse_tasks(flags.tasks))

    if flags.importance_cap and flags.importance_cap < 1:
        print0(f"--importance_cap {flags.importance_cap:g} is below 1: it makes all tokens count less, 2 is usual")
    if flags.top_k == 1 or flags.temperature < 0.1:
        print0("the samples of a question will be nearly equal, and teach nothing: raise --top_k or --temperature")

    is_clip_set = (flags.clip_low, flags.clip_high) != (None, None)
    if is_clip_set and not method.has_clip:
        print0(f"--clip_low and --clip_high do nothing: --loss {flags.loss} has no clip")
    elif is_clip_set and flags.updates == 1:
        print0("--clip_low and --clip_high do nothing with one update a step: set --minibatches or --updates_per_step")
    if flags.updates > 1 and method.objective is not clipped_objective:
        print0(
            f"{flags.updates} updates a step: --loss {flags.loss} has no clip that ends a token's move, one update is "
            "safer: leave --minibatches and --updates_per_step out, or choose grpo"
        )


def check_questions(
    flags: Any, tasks: str, questions: Sequence[tuple[Task, Example]], reward_parts: Sequence[Reward], context: int
) -> None:
    """Try the rewards on the first questions. Raises UserError: when there are none, or a reward fails."""
    if not questions:
        raise UserError(
            f"--tasks {tasks}: the first questions are all longer than the context of {context} tokens: name other "
            "--tasks, or raise --max_seq_len"
        )
    if flags.max_tokens > context:
        print0(f"--max_tokens {flags.max_tokens:,}: a reply ends at the context of {context:,} tokens all the same")
    rewards.check(reward_parts, questions[:2], flags.hang_seconds)


def check_gap(gap: float, staleness: int) -> None:
    """Warn when the samples of a step do not have the log probabilities that the trainer computes for them.

    `gap` is the mean difference in nats a token; older weights have a larger one.
    """
    # How far a step moves the policy depends on its rate: this factor is a guess that leaves room, not a measurement.
    largest = LARGEST_DIFFERENCE * (1 + 4 * staleness)
    if not gap <= largest:
        warn(
            f"--sampler: its log probabilities are {gap:.2g} nats a token from the trainer's, more than {largest:g}: "
            "it has other weights, or log probabilities of another temperature; what is learned from them is wrong"
        )


def report_memory(
    flags: Any, start: Start, optimizer: Optimizer, loss_fn: Callable[..., Any], method: PolicyLoss
) -> None:
    """Print what a step takes, and what sampling takes on top; the command ends here."""
    assert start.ledger is not None
    model = start.model

    def batch_of(rows: PackedBatch) -> PolicyBatch:
        rows = replace(rows, values=rows.targets.float())
        batch = PolicyBatch(rows, rows.targets.float(), rows.targets.float())
        if flags.updates > 1:
            batch = replace(batch, old_logp=rollout.logp_of(model, rows))
        if start.reference is not None:
            batch = replace(batch, reference_logp=rollout.logp_of(start.reference, rows))
        if method.has_values:
            batch = replace(batch, old_values=rows.values, returns=rows.values)
        return batch

    start.ledger.report(
        model, optimizer, loss_fn, flags.device_batch_size, batch_of=batch_of, max_grad_norm=flags.largest_norm
    )
    replies = math.ceil(flags.examples_per_step * flags.num_samples / start.device.world_size)
    replies = min(flags.rollout_rows, replies)
    cache = replies * Slots.bytes_per_slot(model.config, start.device.dtype)
    print0(
        f"sampling comes on top: a cache of at most {cache / 2**20:,.1f} MiB for {replies} replies at once, and in "
        "bf16 a copy of the weights"
    )
