"""The optimizer: Muon for the matrices of the blocks, AdamW for all other parameters.

A step is two calls. `reduce` takes the gradients from the parameters and returns their squared norm, `step` updates the
weights. Both rules keep running means of the gradient, derive a direction from them, and move the weights along it.
They differ in the direction: AdamW scales each element separately, Muon orthogonalises whole matrices.

Several ranks share the work and the state: each updates some of the rows, and keeps the state of only these (source:
Rajbhandari et al. 2020, ZeRO, stage 1). An `Exchange` moves gradients, matrices and new weights between the ranks
(ground/sharding.py).

The optimizer knows groups of parameters, not a model. Nothing in a step waits for the device: a step that must be
skipped runs the same kernels, and multiplies by 0.

Legend: N matrices of one shape (rows, columns).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nanochat.ground.sharding import Exchange, Rows, Share, local
from nanochat.operators import AdamWUpdate, TorchKernels, split_like


@dataclass
class ParameterGroup:
    """Parameters that share a rule and a learning rate."""

    kind: str  # the rule that moves them: muon or adamw
    parameters: list[tuple[str, nn.Parameter]]
    learning_rate: float
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.8, 0.95)  # Muon uses only the second: its momentum follows a schedule
    eps: float = 1e-10
    # Muon: the rows of each matrix in a parameter that holds several, such as q, k and v.
    row_splits: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """The values of one step, the same for every group."""

    targets: Tensor  # 0-D: gradients are divided by it
    ok: Tensor  # 0-D: 1 to update, 0 to change nothing
    skipped: Tensor  # 0-D: the opposite, as a bool
    momentum_portion: Tensor  # 0-D: (1 - momentum) x ok, by which Muon's average moves to the new gradient
    lr_scale: float
    momentum: float
    weight_decay_scale: float


class Rule(Protocol):
    """How some of the parameters move: Muon and AdamW below, and any other class with these three."""

    shares: dict[str, Share]  # by the name of the parameter
    state: dict[str, Tensor]  # what checkpoints save, by unique names (Optimizer.state_dict)

    def update(self, settings: Settings) -> None:
        """Move the weights of the shares by their gradients."""


# ---------------------------------------------------------------------- running means

# bf16 has 8 bits of precision: it loses changes of less than 1/512 to 1/256 of a value. A mean that moves by 1/10 or
# 1/20 of the way to each new value loses little. A mean that moves by 1/1000 of it (AdamW's beta2 of 0.999) would never
# move, because every step would be rounded away: it stays in fp32.
SMALLEST_BF16_PORTION = 1 / 32
MUON_PORTION = 1 / 20  # Muon's momentum, at the end of its schedule


@dataclass(frozen=True)
class StateFormat:
    """How running means are kept from one step to the next. An update computes with them in fp32 on the device."""

    dtype: torch.dtype = torch.float32
    in_main_memory: bool = False


class Mean:
    """A running mean in a format; each step moves it by `portion` of the way to a new value."""

    def __init__(self, shape: tuple[int, ...], portion: float, device: torch.device, kept_as: StateFormat):
        dtype = kept_as.dtype if portion >= SMALLEST_BF16_PORTION else torch.float32
        place = torch.device("cpu") if kept_as.in_main_memory else device
        # The system never moves pinned memory: the device copies from and to it while the host continues.
        self.kept = torch.zeros(shape, dtype=dtype, device=place, pin_memory=place != device)
        self.device = device

    def load(self) -> Tensor:
        """The mean in fp32 on the device. If the kept tensor has this form, it is that tensor itself."""
        return self.kept.to(self.device, non_blocking=True).float()

    def store(self, mean: Tensor) -> None:
        """Keep the mean that `load` has returned, after its step."""
        if mean is not self.kept:
            self.kept.copy_(mean.to(self.kept.dtype), non_blocking=True)


# ---------------------------------------------------------------------- Muon

# Polar Express: a polynomial a x + b x^3 + c x^5 for each step, each the best one for the result of the earlier steps.
# These five take every singular value from 1e-3 of the norm up to 1 within 15%. They include the safety factor of 1.02
# for bf16. Source: Amsel et al. 2025, The Polar Express (arXiv 2505.16932).
# Single singular values on their way through the five steps:
#
#     0.001 -> 0.008 -> 0.033 -> 0.128 -> 0.416 -> 0.859
#     0.100 -> 0.793 -> 1.962 -> 1.409 -> 0.585 -> 1.059
#     0.980 -> 1.185 -> 1.284 -> 0.895 -> 1.510 -> 0.979
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def orthogonalize(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Replace each of N matrices (N, rows, columns) by about U V^T of its singular value decomposition U S V^T.

    The products run in `dtype`. Source: Jordan et al. 2024, Muon.
    """
    # Why: a gradient has a few large singular values and many small ones. With all of them set to about 1, an update
    # moves the weights by as much in every direction, including the directions in which the gradient is small.
    # How: an odd polynomial a x + b (x x^T) x + c (x x^T)^2 x acts on only the singular values: U S V^T becomes
    # U (a S + b S^3 + c S^5) V^T. It takes matrix products, which accelerators do best, and no decomposition.
    x = matrices.to(dtype)
    is_tall = x.size(-2) > x.size(-1)
    if is_tall:
        # x x^T is the smaller of the two Gram matrices when x is wide: (768, 768) instead of (3072, 3072).
        x = x.mT
    # The root of the sum of all squares is at least the largest singular value. After this division none is above 1,
    # where the polynomials would diverge.
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    if x.size(-1) > 2 * x.size(-2):
        # In bf16 the rounding of x x^T grows from step to step, so it is computed anew after every two steps. After
        # three, some singular values end at 4 instead of 1.
        count = len(POLAR_EXPRESS) if dtype == torch.float32 else 2
        for first in range(0, len(POLAR_EXPRESS), count):
            x = _polynomials_of_gram(x @ x.mT, POLAR_EXPRESS[first : first + count]) @ x
    else:
        for a, b, c in POLAR_EXPRESS:
            gram = x @ x.mT
            polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b (x x^T) + c (x x^T)^2
            x = torch.baddbmm(x, polynomial, x, beta=a)  # a x + the polynomial x
    return x.mT if is_tall else x


def _polynomials_of_gram(gram: Tensor, steps: Sequence[tuple[float, float, float]]) -> Tensor:
    """x x^T (N, rows, rows) -> P of the same shape, the product of the steps' polynomials: P x is x after the steps."""
    # A step turns x into p x, and x x^T into p (x x^T) p: the small square matrices are all that the iteration needs.
    # For a matrix four times as wide as tall five steps are the work of 25 products of squares instead of 45, and two,
    # two and one of 35. Source: Zhang, Amsel, Chen and Dao 2026, Gram Newton-Schulz.
    product = polynomial = None
    for a, b, c in steps:
        if polynomial is not None:
            gram = polynomial @ gram @ polynomial
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
        product = polynomial if product is None else polynomial @ product
    assert product is not None
    return product


@dataclass(eq=False)
class Stack:
    """The matrices of one shape in a group, which one orthogonalisation serves. Each rank owns a run of them."""

    shape: tuple[int, int]
    matrices: list[Rows]
    owned: list[Rows]  # the matrices that this rank orthogonalises
    momentum: Mean  # (owned, rows, columns)
    second_moment: Tensor  # (owned, rows, 1), or (owned, 1, columns) where matrices are wide


class Muon:
    """Muon for one group (source: Jordan et al. 2024, Muon)."""

    # In the same wall time at depth 4 on pydoc, Muon reaches 1.591 bits per byte where AdamW reaches 1.629 (two
    # cores of an AMD EPYC, 2026-11-20). Its state is half of AdamW's: one mean for each element, and little more.

    def __init__(self, group: ParameterGroup, exchange: Exchange, dtype: torch.dtype, kept_as: StateFormat):
        self.group = group
        self.exchange = exchange
        self.dtype = dtype
        self.kept_as = kept_as
        self.state: dict[str, Tensor] = {}  # see Optimizer.state_dict
        self.shares = {name: exchange.share(parameter, is_matrix=True) for name, parameter in group.parameters}
        # Collect matrices by shape. q, k and v are one parameter, so that one product computes them, but three matrices
        # to Muon: the size of one must not decide the update of another.
        matrices: dict[tuple[int, int], list[Rows]] = {}
        for name, parameter in group.parameters:
            start = 0
            for rows in group.row_splits.get(name, (parameter.size(0),)):
                of_shape = matrices.setdefault((rows, parameter.size(1)), [])
                of_shape.append(Rows(self.shares[name], start, start + rows))
                start += rows
            assert start == parameter.size(0), "row_splits must cover a parameter's rows"
        self.stacks = [self._make_stack(shape, of_shape) for shape, of_shape in matrices.items()]

    def _make_stack(self, shape: tuple[int, int], matrices: list[Rows]) -> Stack:
        # The state of a stack is one tensor, cut along the matrices: each rank has the part of those that it owns.
        rows, columns = shape
        owned = matrices[self.exchange.owned(len(matrices))]
        # One second moment per row of a tall matrix, and per column of a wide one.
        neurons = (rows, 1) if rows >= columns else (1, columns)
        name, parameter = self.group.parameters[0]
        momentum = Mean((len(owned), rows, columns), MUON_PORTION, parameter.device, self.kept_as)
        second_moment = torch.zeros(len(owned), *neurons, device=parameter.device)
        for state_name, state in (("momentum", momentum.kept), ("second_moment", second_moment)):
            whole_shape = (len(matrices), *state.shape[1:])
            self.state[f"muon.{name}.{rows}x{columns}.{state_name}"] = self.exchange.as_part(state, whole_shape)
        return Stack(shape, matrices, owned, momentum, second_moment)

    def update(self, settings: Settings) -> None:
        """Move the weights of this group's shares."""
        portion = (1 - self.group.betas[1]) * settings.ok  # by which the second moments move
        for stack in self.stacks:
            # An update needs its whole matrix. Where a rank has only rows of each, the rows travel there and back.
            update, size = self.direction(stack, self.exchange.to_owners(stack), settings, portion)
            held, update, size = self.exchange.to_holders(stack, update, size)
            if not held:
                continue
            # The rows of a wide update have norm 1. The rows of a tall one are shorter: about 1/2 for 4C x C, where
            # the columns have norm 1. This factor gives them norm 1 too, so that every output moves by as much.
            rows, columns = stack.shape
            rate = self.group.learning_rate * settings.lr_scale * max(1.0, rows / columns) ** 0.5
            decay = self.group.weight_decay * settings.weight_decay_scale
            weights = [part.weight() for part in held]
            moved = _move(torch.cat(weights).view_as(update), update, size, rate, settings.ok, decay)
            copy_each(weights, moved.view(-1, columns).split([len(weight) for weight in weights]))

    def direction(self, stack: Stack, grad: Tensor, settings: Settings, portion: Tensor) -> tuple[Tensor, Tensor]:
        """The updates of this rank's matrices (owned, rows, columns), and the mean size of each (owned, 1, 1)."""
        if not stack.owned:
            return grad, grad.new_empty(0, 1, 1)
        # A skipped step's gradient may be NaN, and 0 x NaN is NaN: select instead of multiplying.
        grad = (grad / settings.targets).masked_fill_(settings.skipped, 0.0)

        # First the running average of the gradients, over about 20 steps at a momentum of 0.95: it removes the noise of
        # single batches. Then Nesterov's look-ahead: the update lies between the gradient and the new average, at
        # `momentum` of the way. In a skipped step `ok` is 0, so that neither the average nor the second moment below
        # changes.
        momentum = stack.momentum.load()
        momentum.lerp_(grad, settings.momentum_portion)
        update = grad.lerp_(momentum, settings.momentum)
        stack.momentum.store(momentum)
        del momentum  # where it is a copy, its memory is free for the products

        # The products may run in bf16: the iteration tolerates its rounding (source: Jordan et al. 2024).
        update = orthogonalize(update, self.dtype).float()

        # The neurons of an orthogonal update still differ in size. Divide each by its running second moment, then
        # restore the norm of the matrix (source: Li et al. 2025, NorMuon, arXiv 2510.05491).
        rows, columns = stack.shape
        square = update.square().mean(dim=-1 if rows >= columns else -2, keepdim=True)
        stack.second_moment.lerp_(square, portion)
        second_moment = stack.second_moment.clamp(min=1e-10)
        # The mean square of each matrix, before and after its neurons are divided by their sizes. The quotient of the
        # two is also the quotient of the squared norms.
        mean_square = square.mean(dim=(1, 2), keepdim=True)
        scaled = (square / second_moment).mean(dim=(1, 2), keepdim=True).clamp(min=1e-10)
        update *= (mean_square / (second_moment * scaled)).sqrt()
        size = mean_square.sqrt().clamp(min=1e-10)
        return update, size


def _move(weight: Tensor, update: Tensor, size: Tensor, rate: float, ok: Tensor, decay: float) -> Tensor:
    """Move matrices, or rows of them, in place; `size` is the mean size of the update of their matrix."""
    # Cautious weight decay: only where it pulls the same way as the update (source: Chen et al. 2025, arXiv
    # 2510.12402). With a hard switch at zero, rounding would grow: rows that are summed in two orders differ by 1e-4
    # after 20 steps. Here the decay rises from 0 to its full strength at a quarter of the update's mean size: they
    # differ by 4e-7.
    if decay:
        agreement = (update * weight.sign() / size).clamp(0, 1 / 4)
        update.addcmul_(weight, agreement, value=4 * decay)
    return weight.addcmul_(update, ok, value=-rate)


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, in one launch where the device can."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))  # pyright: ignore[reportPrivateImportUsage]


# ---------------------------------------------------------------------- AdamW

# How many elements of the means are copied at a time, where they are not kept in fp32 on the device. A bucket is as
# many whole parameters as have about this many elements.
BUCKET_ELEMENTS = 1 << 22
UPDATE_ELEMENTS = 1 << 28  # the same where they are: more than the tables of a depth of 20 have


@dataclass
class AdamWBatch:
    """Parameters of groups that share their betas and their decay: an accelerator updates them in a few launches."""

    shares: dict[str, Share]  # by name
    groups: list[ParameterGroup]  # the group of each share
    first_moment: Mean  # flat: the elements of all shares in a row
    second_moment: Mean  # likewise


class AdamW:
    """AdamW (source: Loshchilov and Hutter 2019, Decoupled weight decay regularization).

    One rule serves all groups: they share the count of steps and the values computed from it.
    """

    def __init__(
        self, groups: Sequence[ParameterGroup], exchange: Exchange, kernels: TorchKernels, kept_as: StateFormat
    ):
        self.exchange = exchange
        self.kernels = kernels
        self.kept_as = kept_as
        self.state: dict[str, Tensor] = {}  # see Optimizer.state_dict
        self.shares: dict[str, Share] = {}
        # The count of steps is a tensor on the device, because the host does not know which steps were skipped.
        self.steps = torch.zeros(1, device=groups[0].parameters[0][1].device)
        # The parameters of each batch, by the properties that they must have in common.
        together: dict[tuple[Any, ...], list[tuple[ParameterGroup, str, nn.Parameter]]] = {}
        elements = 0
        for group in groups:
            self.state[f"adamw.{group.parameters[0][0]}.steps"] = self.steps
            for name, parameter in group.parameters:
                # Means that are copied for the update are copied a bucket at a time. The others have larger buckets,
                # for the temporary tensors of an update: 8 bytes an element, 60 GB for all of a 7B at once.
                elements += local(parameter).numel()
                bucket = elements // (UPDATE_ELEMENTS if kept_as == StateFormat() else BUCKET_ELEMENTS)
                alike = together.setdefault((group.betas, group.weight_decay, bucket), [])
                alike.append((group, name, parameter))
        self.batches = [self._make_batch(alike) for alike in together.values()]

    def _make_batch(self, members: Sequence[tuple[ParameterGroup, str, nn.Parameter]]) -> AdamWBatch:
        shares = {name: self.exchange.share(parameter, is_matrix=False) for _, name, parameter in members}
        self.shares.update(shares)
        groups = [group for group, _, _ in members]
        # AdamW keeps two running means per element, the gradient's and its square's: twice as much memory as the
        # weights take. A rank holds only the means of its shares: this is what ZeRO saves.
        weights = [share.weight() for share in shares.values()]
        shape = (sum(weight.numel() for weight in weights),)
        portions = [1 - beta for beta in groups[0].betas]
        first_moment, second_moment = (Mean(shape, portion, self.steps.device, self.kept_as) for portion in portions)
        for kind, mean in (("first_moment", first_moment), ("second_moment", second_moment)):
            for (name, share), part in zip(shares.items(), split_like(mean.kept, weights), strict=True):
                if share.is_part:
                    part = self.exchange.as_part(part, tuple(share.parameter.shape))
                self.state[f"adamw.{name}.{kind}"] = part
        return AdamWBatch(shares, groups, first_moment, second_moment)

    def update(self, settings: Settings) -> None:
        """Move the weights of all shares."""
        # The bias correction below divides by 1 - beta^steps: a skipped step must not count.
        self.steps += settings.ok
        # For each element, with w its weight and g its gradient:
        #
        #     m = beta1 m + (1 - beta1) g           mean of the gradient: the direction
        #     v = beta2 v + (1 - beta2) g^2         mean of its square: the size to expect
        #     w -= lr (m' / (sqrt(v') + eps) + decay w)
        #
        # where m' = m / (1 - beta1^steps), and v' alike, remove the pull of the zeros that both start from. The
        # quotient is near +-1 for a gradient that keeps its sign, however small it is, and near 0 for one that
        # fluctuates: each element takes steps of a size that suits it.
        self.kernels.adamw(self._updates(settings), self.steps, settings.targets, settings.ok)

    def _updates(self, settings: Settings) -> Iterator[AdamWUpdate]:
        """The update of each batch. Its means are on the device until the next update is requested."""
        for batch in self.batches:
            first_moment = batch.first_moment.load()
            second_moment = batch.second_moment.load()
            yield AdamWUpdate(
                weights=[share.weight() for share in batch.shares.values()],
                grads=[share.grad for share in batch.shares.values()],
                first_moment=first_moment,
                second_moment=second_moment,
                learning_rates=[group.learning_rate * settings.lr_scale for group in batch.groups],
                eps=[group.eps for group in batch.groups],
                betas=batch.groups[0].betas,
                weight_decay=batch.groups[0].weight_decay * settings.weight_decay_scale,
            )
            batch.first_moment.store(first_moment)
            batch.second_moment.store(second_moment)


# ---------------------------------------------------------------------- a step


NORM_ELEMENTS = 1 << 22  # elements of a gradient whose squares are added up at a time


class Optimizer:
    """Muon and AdamW over groups of parameters.

    `dtype` is the dtype of the orthogonalisation's products; `kernels` are the device's. `order` lists names of
    parameters in the order in which a backward completes their gradients. `kept_as` may save memory of the device, for
    copies of the state in every step. `exchange` connects this rank to the others; without one there are none.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        *,
        exchange: Exchange | None = None,
        dtype: torch.dtype = torch.bfloat16,
        order: Sequence[str] = (),
        kernels: TorchKernels | None = None,
        kept_as: StateFormat | None = None,
    ):
        kept_as = kept_as or StateFormat()
        self.exchange = exchange or Exchange()
        self.groups = [group for group in groups if group.parameters]
        # Muon comes first: its new weights travel while AdamW updates the tables.
        self._rules: list[Rule] = []
        for group in self.groups:
            if group.kind == "muon":
                self._rules.append(Muon(group, self.exchange, dtype, kept_as))
        adamw = [group for group in self.groups if group.kind == "adamw"]
        if adamw:
            self._rules.append(AdamW(adamw, self.exchange, kernels or TorchKernels(), kept_as))

        # All ranks start their collectives in one order, because backends match them by it. Names outside `order` go
        # last.
        shares: dict[str, Share] = {}
        for rule in self._rules:
            shares.update(rule.shares)
        held = sum(len(group.parameters) for group in self.groups)
        assert len(shares) == held, "a parameter is in two groups, or a group has no rule"
        position = {name: i for i, name in enumerate(order)}
        names = sorted(shares, key=lambda name: position.get(name, len(order)))
        self.exchange.shares = [shares[name] for name in names]

    def before_backward(self, is_last: bool) -> None:
        """Call before each backward of a step. In the last one, ranks exchange gradients while it still runs."""
        self.exchange.before_backward(is_last)

    @torch.no_grad()
    def reduce(self) -> Tensor:
        """Take the gradients, summed over the ranks. Call `step` afterwards.

        Returns the squared norm of this rank's share, 0-D. Summed over all ranks it is the squared norm of the whole
        gradient, and it is not finite if any gradient of any rank is not.
        """
        counted = [grad for grad in self.exchange.reduce() if grad.numel()]
        if not counted:
            shares = self.exchange.shares
            return torch.zeros((), device=shares[0].parameter.device if shares else None)
        # One launch for all norms. Large gradients are cut into slices: a CPU adds up all squares of one tensor in
        # fp32, in a few sums that grow too large for what is added. At 155 million elements the norm is 2% too small,
        # in slices 0.01%. A gradient of one slice keeps its norm to the bit.
        slices: list[Tensor] = []
        for grad in counted:
            if grad.is_cpu and grad.numel() > NORM_ELEMENTS:
                slices += grad.flatten().split(NORM_ELEMENTS)
            else:  # an accelerator adds up in a tree, and takes a launch more for a longer list
                slices.append(grad)
        norms = torch.stack(torch._foreach_norm(slices))  # pyright: ignore[reportPrivateImportUsage]
        return norms.square().sum() * self.exchange.divided_by**2

    @torch.no_grad()
    def step(
        self,
        targets: Tensor,
        ok: Tensor,
        *,
        lr_scale: float = 1.0,
        momentum: float = 0.95,
        weight_decay_scale: float = 1.0,
    ) -> None:
        """Update the weights from the gradients that `reduce` has summed, then drop the gradients.

        `targets`, a 0-D fp32 tensor on the device, is the count over all ranks that the sums are divided by.
        `ok`, likewise, is 1 to update and 0 to change no parameter and no state byte.
        """
        # A step without a target is skipped by `ok`; the clamp keeps its numbers finite.
        divisor = targets.clamp(min=1.0)
        if self.exchange.divided_by != 1:
            divisor = divisor / self.exchange.divided_by
        portion = (1 - momentum) * ok
        settings = Settings(divisor, ok, ok == 0, portion, lr_scale, momentum, weight_decay_scale)
        for rule in self._rules:
            rule.update(settings)
            # The new weights travel while the next rule computes.
            for share in rule.shares.values():
                share.grad = share.grad.new_empty(0)  # the update has used it
                self.exchange.send_weight(share)
        self.exchange.receive_weights()

    def state_dict(self) -> dict[str, Tensor]:
        """The state by name, over the memory that the optimizer uses: a DTensor where each rank has a part, a plain
        tensor where all ranks hold the same.

        Names and whole shapes are the same under every layout, so that any layout resumes any other's checkpoint.
        State in main memory may still be on its way there: synchronize the device before reading it.
        """
        state: dict[str, Tensor] = {}
        for rule in self._rules:
            state.update(rule.state)
        return state

    def state_bytes(self) -> dict[str, int]:
        """How much of the state this rank keeps on each kind of device; "cpu" is main memory."""
        sizes: dict[str, int] = {}
        for tensor in self.state_dict().values():
            sizes[tensor.device.type] = sizes.get(tensor.device.type, 0) + local(tensor).nbytes
        return sizes
