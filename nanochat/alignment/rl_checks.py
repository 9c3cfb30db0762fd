"""Checks of chat_rl's flags and questions before training, and the memory of its dry run."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from nanochat.alignment.rewards import FunctionReward
from nanochat.alignment.value import ValuedBatch
from nanochat.engine import Slots
from nanochat.ground import rooms
from nanochat.ground.cli import UserError
from nanochat.ground.log import print0
from nanochat.losses import PolicyBatch, PolicyLoss, token_logp
from nanochat.optim import Optimizer
from nanochat.packing import PackedBatch
from nanochat.rollout import ROWS_AT_ONCE, Reward
from nanochat.run.stage import Start
from nanochat.task import Example, Task
from nanochat.tasks.flag import parse_tasks, require_grades


def check_flags(flags: Any, method: PolicyLoss, rewards: Sequence[Reward]) -> None:
    """Print a hint for each flag that has no effect, or a bad one.

    Raises UserError: when flags contradict each other, or name something that does not exist.
    """
    check_sampler(flags.sampler)
    distills = flags.loss == "distill"
    if distills != (flags.teacher is not None):
        raise UserError("--loss distill and --teacher SOURCE need each other: set both, or neither")
    if distills and flags.kl:
        raise UserError(f"--kl {flags.kl:g}: --loss distill is the KL to the teacher, leave --kl out")
    if flags.kl_in == "reward" and not flags.kl:
        raise UserError("--kl_in reward: without --kl there is no penalty")
    if flags.staleness and flags.most_refills:
        raise UserError("--staleness: samples that are drawn ahead are not replaced, add --refills 0")
    if flags.gradient_accumulation_steps is None:  # else the number of devices decides
        _require_enough_questions(flags)
    if flags.num_epochs is not None and flags.most_refills:
        raise UserError("--num_epochs: questions that are replaced count in no pass, add --refills 0")
    # The default tasks, which depend on the model, all have right answers.
    if flags.tasks and not distills and any(reward.name == "task" for reward in rewards):
        require_grades(parse_tasks(flags.tasks))

    if flags.importance_cap and flags.importance_cap < 1:
        print0(f"--importance_cap {flags.importance_cap:g} is below 1: it makes all tokens count less, 2 is usual")
    if flags.top_k == 1 or flags.temperature < 0.1:
        print0("the samples of a question will be nearly equal, and teach nothing: raise --top_k or --temperature")

    is_clip_set = (flags.clip_low, flags.clip_high) != (None, None)
    if is_clip_set and method.clip == "nothing":
        print0(f"--clip_low and --clip_high do nothing: --loss {flags.loss} has no clip")
    elif is_clip_set and flags.updates == 1:
        print0("--clip_low and --clip_high do nothing with one update a step: set --minibatches or --updates_per_step")
    if flags.updates > 1 and method.clip != "move":
        print0(
            f"{flags.updates} updates a step: --loss {flags.loss} has no clip that ends a token's move, one update is "
            "safer: leave --minibatches and --updates_per_step out, or choose grpo"
        )


def check_sampler(flag: str) -> None:
    """Raises UserError: when --sampler names a kind that does not exist, or that needs a package that is missing."""
    kind = flag.partition(":")[0]
    if kind in rooms.names("samplers"):
        rooms.find("samplers", kind).check_flag(flag)
    elif flag != "engine":
        raise UserError(
            f"--sampler {flag}: engine, ray:N, or the addresses of servers as http://HOST:PORT, with commas"
        )


def _require_enough_questions(flags: Any) -> None:
    if flags.minibatches > flags.examples_per_step:
        raise UserError(
            f"--minibatches {flags.minibatches}: each needs a question, and --examples_per_step is "
            f"{flags.examples_per_step}: lower the one, or raise the other"
        )


def check_questions(
    flags: Any, tasks: str, questions: Sequence[tuple[Task, Example]], rewards: Sequence[Reward], context: int
) -> None:
    """Try the rewards on the first questions.

    Raises UserError: when no question fits, there are fewer of them than minibatches, or a reward fails.
    """
    if not questions:
        raise UserError(
            f"--tasks {tasks}: the first questions are all longer than the context of {context} tokens: name other "
            "--tasks, or raise --max_seq_len"
        )
    _require_enough_questions(flags)
    if flags.max_tokens > context:
        print0(f"--max_tokens {flags.max_tokens:,}: a reply ends at the context of {context:,} tokens all the same")
    for reward in rewards:
        if isinstance(reward, FunctionReward):
            reward.check(questions[:2], flags.hang_seconds)


def report_memory(flags: Any, start: Start, optimizer: Optimizer, loss_fn: Callable[..., Any]) -> None:
    """Print the memory of a step, and the additional memory of sampling; the command ends here."""
    model = start.model

    @torch.no_grad()
    def batch_of(rows: PackedBatch) -> PolicyBatch:
        rows = replace(rows, values=rows.targets.float())
        batch = PolicyBatch(rows, rows.targets.float(), rows.targets.float())
        if flags.updates > 1:
            batch = replace(batch, old_logp=token_logp(model, rows, flags.temperature))
        if start.reference is not None:
            batch = replace(batch, reference_logp=token_logp(start.reference, rows, flags.temperature))
        if flags.loss == "ppo":
            batch = ValuedBatch(**vars(batch), old_values=rows.values, returns=rows.values)
        return batch

    start.ledger.report(
        model, optimizer, loss_fn, flags.device_batch_size, batch_of=batch_of, max_grad_norm=flags.largest_norm
    )
    replies = math.ceil(flags.examples_per_step * flags.num_samples / start.device.world_size)
    replies = min(ROWS_AT_ONCE, replies)
    cache = replies * Slots.bytes_per_slot(model.config, start.device.dtype)
    print0(
        f"sampling comes on top: a cache of at most {cache / 2**20:,.1f} MiB for {replies} replies at once, and in "
        "bf16 a copy of the weights"
    )
