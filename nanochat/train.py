"""One optimisation step, shared by every stage; the scripts own the loops around it.

`train_step(model, optimizer, batches, loss_fn, ...)` sums the micro-batches' losses and gradients, divides by the
number of targets over all of them and all ranks, and updates. Stages differ in their batches and their loss function.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from nanochat.cross_entropy import IGNORE
from nanochat.device import Device
from nanochat.gpt import GPT
from nanochat.ground.cli import Interrupted
from nanochat.ground.screen import track
from nanochat.optim import Optimizer, ParameterGroup, StateFormat
from nanochat.ranks import Layout, lay_out, sum_over_ranks
from nanochat.scaling import Rates

# A loss function returns the sum of its losses and the number of targets in it, both 0-D on the device. A sum and a
# count, not a mean: micro-batches and ranks hold different numbers of targets, and only the whole step knows their sum.
LossFunction = Callable[[Any, Any], tuple[Tensor, Tensor]]

Fall = Literal["linear", "cosine", "constant"]


@dataclass(frozen=True)
class Schedule:
    """The settings that change over a run, as functions of the step (0-based)."""

    steps: int
    fall: Fall = "linear"  # how the rate falls; constant: it does not
    warmup_steps: int = 40
    warmdown_fraction: float = 0.65  # share of the steps, at the end
    final_lr: float = 0.05  # as a share of the peak
    momentum_start: float = 0.85
    momentum_end: float = 0.95
    momentum_steps: int = 300

    @classmethod
    def for_run(cls, steps: int, warmdown: float = 0.65, warmup: float | None = None, **changes: Any) -> "Schedule":
        """The default shape. In a short run the rate warms up for a tenth of the steps, the momentum for a fifth.

        `warmdown` is the part of the run in which the rate falls. With a `warmup` it rises in this part of the run, and
        falls in the rest at most.
        """
        warmup_steps = min(40, steps // 10)
        if warmup is not None:
            warmup_steps = round(warmup * steps)
            warmdown = min(warmdown, 1 - warmup)
        shape = {"warmup_steps": warmup_steps, "momentum_steps": min(300, steps // 5), **changes}
        return cls(steps, warmdown_fraction=warmdown, **shape)

    def lr(self, step: int) -> float:
        """Multiple of the peak learning rate: a linear rise, a plateau, a fall (with a linear one a "trapezoid")."""
        # A run of 1,000 steps:
        #
        #     1.00     _______
        #             /       \__
        #            /           \__
        #           /               \__
        #     0.02 /                   \__ 0.05
        #          0  40     350         1,000  steps
        #
        # The rise: the first gradients say little, and the optimizer's running means of them are empty. It starts above
        # 0, because a step at a rate of 0 is wasted.
        # The plateau: unlike a cosine, it does not depend on where the run ends (source: Hu et al. 2024, MiniCPM).
        # The fall: at a high rate the weights jump from one side of a valley of the loss to the other; small steps
        # reach its floor.
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        # `left` is 1 on the plateau and falls to 0 at the end; the rate falls with it to `final_lr`.
        fall_steps = max(1, round(self.warmdown_fraction * self.steps))
        left = min(1.0, max(0.0, (self.steps - step) / fall_steps))
        if self.fall == "constant":
            left = 1.0
        elif self.fall == "cosine":  # flat at both ends (source: Loshchilov and Hutter 2017, SGDR)
            left = (1 - math.cos(math.pi * left)) / 2
        else:
            assert self.fall == "linear", f"Schedule.lr does not know the fall {self.fall!r}"
        return left + (1 - left) * self.final_lr

    def momentum(self, step: int) -> float:
        """Muon's momentum: a linear rise (source: Jordan et al. 2024, modded-nanogpt)."""
        # 0.85 averages over about 7 steps, 0.95 over about 20. Early gradients change fast, so old ones mislead.
        share = min(1.0, step / self.momentum_steps) if self.momentum_steps else 1.0
        return self.momentum_start + share * (self.momentum_end - self.momentum_start)

    def weight_decay(self, step: int) -> float:
        """Multiple of the initial weight decay: a linear fall to zero."""
        # Decay erases what early steps wrote. Late steps write the final weights, which nothing should erase.
        return max(0.0, 1 - step / self.steps)


@dataclass(frozen=True)
class StepStats:
    """0-D tensors on the device; reading one waits for the step, so read them only to log."""

    loss: Tensor  # mean nats a target, over all ranks
    targets: Tensor  # over all ranks
    grad_norm: Tensor  # norm of the mean gradient per target, over all parameters, before clipping
    updated: Tensor  # 1, or 0 where nothing changed: something was not finite, or there was nothing to learn
    finite: Tensor  # 1, or 0 where the loss or a gradient was not finite

    @classmethod
    def of_updates(cls, updates: Sequence["StepStats"]) -> "StepStats":
        """The stats of a step of several updates: skipped if any of them was, idle if none changed anything."""
        finite = torch.stack([update.finite for update in updates]).amin()
        updated = torch.stack([update.updated for update in updates]).amax()
        return replace(updates[-1], finite=finite, updated=finite * updated)


def make_optimizer(
    model: GPT,
    rates: Rates,
    device: Device,
    matrices: str = "muon",
    layout: Layout | None = None,
    kept_as: StateFormat | None = None,
) -> Optimizer:
    """The optimizer of pretraining: Muon (or AdamW) for the matrices of the blocks, AdamW for all else.

    `layout` is the one that has sharded the model; without one every rank holds the whole model.
    """
    roles = model.parameter_groups()
    biases = _router_biases(model, roles)
    c = model.config
    decay = rates.weight_decay
    # Muon reads only the second, for its second moment. AdamW's 0.9 and 0.95 are the usual ones for language models
    # (source: Brown et al. 2020, GPT-3).
    betas = (0.8, 0.9) if matrices == "muon" else (0.9, 0.95)
    # One parameter holds the projections to queries, keys and values, and Muon orthogonalises each of the three
    # separately. Likewise gate and up of a gated MLP, and the matrices of experts.
    queries = 2 * c.n_head if c.attention_gate else c.n_head
    qkv_rows = (queries * c.head_dim, c.n_kv_head * c.head_dim, c.n_kv_head * c.head_dim)
    splits: dict[str, tuple[int, ...]] = {name: qkv_rows for name, _ in roles["qkv"]}
    keys = c.state_key_heads * c.state_key_dim
    values = c.state_value_heads * c.state_value_dim
    state_rows = (keys, keys, values, values, c.state_value_heads, c.state_value_heads)
    for name, parameter in roles["matrix"]:
        if name.endswith(".state_input.weight"):
            splits[name] = state_rows
        stacked = 2 if c.mlp == "swiglu" and name.endswith(".input.weight") else 1
        if c.experts and name.endswith((".mlp.input.weight", ".mlp.output.weight")):
            stacked *= c.experts
        if stacked > 1:
            splits[name] = (parameter.size(0) // stacked,) * stacked
    # At the start the gradients of vectors and scales are rounding noise, which AdamW with a small epsilon would turn
    # into whole steps.
    noise_eps = 1e-4
    groups = [
        # Weight decay only for the matrices. In a table it would erase the rows of rare tokens: every step shrinks
        # them, and few steps restore them.
        ParameterGroup(matrices, roles["matrix"] + roles["qkv"], rates.matrix, decay, betas, row_splits=splits),
        ParameterGroup("adamw", roles["embedding"], rates.embedding),
        ParameterGroup("adamw", roles["value_embedding"], rates.value_embedding),
        ParameterGroup("adamw", roles["head"], rates.head),
        ParameterGroup("adamw", roles["vector"], rates.vector, eps=noise_eps),
        ParameterGroup("adamw", roles["residual_scale"], rates.residual_scale, eps=noise_eps),
        *biases,
    ]
    return _optimizer(groups, model, device, layout, kept_as)


def make_adamw(
    model: GPT,
    learning_rate: float,
    device: Device,
    weight_decay: float = 0.0,
    layout: Layout | None = None,
    kept_as: StateFormat | None = None,
) -> Optimizer:
    """The usual optimizer of fine-tuning: AdamW at one rate for every parameter that requires a gradient.

    A model from elsewhere was trained by AdamW, and its recipes state absolute rates.
    """
    # Matrices decay; norms, biases and tables do not, as in `make_optimizer`.
    matrices = []
    others = []
    roles = model.parameter_groups()
    biases = _router_biases(model, roles)
    for role, parameters in roles.items():
        trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
        (matrices if role in ("matrix", "qkv") else others).extend(trained)
    # The constants of the paper, and of most recipes (source: Kingma and Ba 2015, Adam). Pretraining forgets old
    # squares sooner; fine-tuning takes few and small steps, whose sizes should not fluctuate.
    betas = (0.9, 0.999)
    eps = 1e-8
    groups = [
        ParameterGroup("adamw", matrices, learning_rate, weight_decay, betas, eps),
        ParameterGroup("adamw", others, learning_rate, 0.0, betas, eps),
        *biases,
    ]
    return _optimizer(groups, model, device, layout, kept_as)


def _router_biases(model: GPT, roles: dict[str, Any]) -> list[ParameterGroup]:
    """The group of the parameters that experts optimise in another way, taken out of the roles."""
    experts: Any = model.blocks[0].mlp
    return [experts.take_biases(roles)] if model.config.experts else []


def _optimizer(
    groups: Sequence[ParameterGroup], model: GPT, device: Device, layout: Layout | None, kept_as: StateFormat | None
) -> Optimizer:
    layout = layout or lay_out(device)
    return Optimizer(
        groups,
        exchange=layout.exchange(model),
        dtype=device.dtype,
        order=model.gradient_order(),
        kernels=model.kernels,
        kept_as=kept_as,
    )


def train_step(
    model: Any,
    optimizer: Optimizer,
    batches: Iterable[Any],
    loss_fn: LossFunction,
    *,
    device: Device,
    lr: float = 1.0,
    momentum: float = 0.95,
    weight_decay: float = 1.0,
    max_grad_norm: float | None = None,
) -> StepStats:
    """Forward and backward over the micro-batches, a sum of the gradients over the ranks, one update.

    With `max_grad_norm` a mean gradient whose norm over all parameters is larger is scaled down to it.
    A step whose loss or gradients are not finite on any rank, or that has no target or no gradient at all, changes
    nothing on any rank. The host never waits for the device here. Of a sharded model every rank must have equally many
    micro-batches.
    """
    # One step of 2 micro-batches on each of 2 ranks, with 900, 700, 1,000 and 400 targets:
    #
    #     gradient of the step = (g1 + g2 + g3 + g4) / 3,000      each g is the gradient of a SUM of losses
    #
    # A mean for each micro-batch and then a mean of the four would weigh a token of the last one 2.5 times as much as
    # one of the third. With one sum and one count the result does not depend on how rows are dealt out.
    totals = torch.zeros(3, device=device.torch_device)  # sum of losses, targets, squared gradients

    # ---- gradients: micro-batches add up in each parameter's .grad, as if they were one batch.
    with model.cast_weights():
        for batch, is_last in _with_last(batches):
            loss, targets = loss_fn(model, batch)
            # Ranks exchange whole gradients once a step, in the last backward, and not once a micro-batch. The exchange
            # of a layer's gradient starts as soon as it is complete, while earlier layers still compute.
            optimizer.before_backward(is_last)
            # The gradient of the sum: its divisor is known only after the last micro-batch of the last rank.
            loss.backward()
            totals[:2].add_(torch.stack((loss.detach().float(), targets.float())))  # += would copy it once more
    totals[2] = optimizer.reduce()

    # ---- agreement: after this sum every rank holds the same three numbers, and so decides alike. A NaN or an infinity
    # anywhere makes them not finite.
    sum_over_ranks(totals, device)
    loss_sum, target_count, squares = totals.unbind()
    finite = torch.isfinite(totals).all().float()
    # Where no gradient of any parameter is other than 0, such as in RL when all replies to each question are equally
    # good, there is nothing to learn: even so, the momentum of earlier steps would move every matrix by a whole step.
    updated = finite * (totals[1:] > 0).all()  # targets and squares

    # For the log: per target, so that runs of any batch size compare. The clamp keeps a step without a target finite.
    mean = target_count.clamp(min=1.0).reciprocal()
    grad_norm = squares.sqrt() * mean

    # ---- update: multiplied by `updated` instead of branching on it, which would wait for the device. The optimizer
    # divides by the number of targets, so that a token weighs the same in a full batch and in one of padding.
    divisor = target_count
    if max_grad_norm is not None:
        # A step of a few odd examples must not undo many others. A gradient of 3 times the largest norm is divided by
        # 3 times the targets (source: Pascanu et al. 2013, On the difficulty of training recurrent neural networks).
        divisor = target_count.clamp(min=1.0) * ((grad_norm + 1e-6) / max_grad_norm).clamp(min=1.0)
    optimizer.step(divisor, updated, lr_scale=lr, momentum=momentum, weight_decay_scale=weight_decay)
    return StepStats(loss_sum * mean, target_count, grad_norm, updated, finite)


def _with_last(batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Each batch, and whether it is the last one, which is known only when no other batch follows."""
    iterator = iter(batches)
    batch = next(iterator, None)
    while batch is not None:
        following = next(iterator, None)
        yield batch, following is None
        batch = following


@torch.no_grad()
def mean_loss(
    model: Any,
    batches: Iterable[Any],
    loss_fn: LossFunction,
    device: Device,
    should_stop: Callable[[], bool] = lambda: False,
) -> float:
    """Mean of a loss over this and all other ranks' batches, without a gradient.

    NaN where nothing is a target; infinite where the model computes NaN.

    Of a sharded model every rank must have equally many batches. `should_stop` is called before each batch.
    Raises Interrupted: on every rank, when `should_stop` returned True on any of them.
    """
    # A stop travels with the sums: if only one rank raised, the others would wait in the collective.
    totals = torch.zeros(3, device=device.torch_device)  # sum of losses, targets, ranks that broke off
    for batch in track(batches, "evaluation"):
        if should_stop():
            totals[2] = 1
            break
        loss, targets = loss_fn(model, batch)
        totals[:2] += torch.stack((loss.float(), targets.float()))
    loss_sum, target_count, broken_off = sum_over_ranks(totals, device).tolist()
    if broken_off:
        raise Interrupted
    if not target_count:
        return math.nan
    return math.inf if math.isnan(loss_sum) else loss_sum / target_count


def next_token_loss(model: Any, batch: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """The loss of pretraining: batch is (inputs, targets), both (B, T), IGNORE where nothing is predicted; the Segments
    of rows whose documents do not attend to each other may follow."""
    # targets[t] is inputs[t + 1]: one row of T tokens is T predictions at once, because attention looks back only.
    inputs, targets, *segments = batch
    return model(inputs, targets, segments=segments[0] if segments else None), (targets != IGNORE).sum()
