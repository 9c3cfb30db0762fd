"""Muon for the blocks' matrices, AdamW for all other parameters, with their work and state shared out over the ranks.

A step has three phases:

1. Gradients travel. Every gradient is summed over the ranks, and each rank receives the rows of its share (`_Share`).
2. Each rank updates its share, and holds the optimizer state of that alone (source: Rajbhandari et al. 2020, ZeRO,
   stage 1). AdamW treats each element by itself: any rows will do (`_AdamW`). Muon orthogonalises whole matrices:
   their rows make a detour by way of the ranks that own the matrices (`_DistributedMuon`).
3. Weights travel. Every rank receives the rows that the others have updated (`_Share`).

Under ddp this file does all three. Under fsdp, FSDP2 does phases 1 and 3. One process has phase 2 only: to learn the
arithmetic, read `_Muon` and `_AdamW`.

The optimizer knows groups of parameters, never a model. Nothing in a step waits for the device: a step that must be
skipped runs the same kernels, and multiplies by 0.

Legend: N matrices of one shape (rows, columns).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nanochat.collectives import all_gather, reduce_scatter
from nanochat.layout import Layout
from nanochat.operators import AdamWUpdate, TorchKernels, split_like
from nanochat.sharding import local

# Polar Express: a polynomial a x + b x^3 + c x^5 a step, each the best one for what the steps before have left.
# These five take every singular value from 1e-3 of the norm up to 1 within 15%. The safety factor of 1.02 for bf16
# is included. Source: Amsel et al. 2025, The Polar Express (arXiv 2505.16932).
# One singular value at a time, through the five steps:
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

# Under ddp, every rank updates smaller AdamW tensors for itself: that is cheaper than sending the new weights.
SHARD_ELEMENTS = 4096

# Elements of AdamW's means that are copied at a time, where they are not kept in fp32 on the device: as many whole
# parameters as have about so many.
BUCKET_ELEMENTS = 1 << 22
# bf16 has 8 bits of precision: it loses changes of less than 1/512 to 1/256 of a value. A mean that moves by 1/10 or
# 1/20 of the way to each new value loses little. One that moves by 1/1000 of it (AdamW's beta2 of 0.999) would stand
# still, because every step would be rounded away: such a mean stays in fp32.
SMALLEST_BF16_PORTION = 1 / 32
MUON_PORTION = 1 / 20  # of Muon's momentum, at the end of its schedule


@dataclass(frozen=True)
class StateFormat:
    """How running means are kept from one step to the next. An update computes with them in fp32 on the device."""

    dtype: torch.dtype = torch.float32
    in_main_memory: bool = False


class _Mean:
    """A running mean, kept by a format; each step moves it by `portion` of the way to a new value."""

    def __init__(self, shape: tuple[int, ...], portion: float, device: torch.device, kept_as: StateFormat):
        dtype = kept_as.dtype if portion >= SMALLEST_BF16_PORTION else torch.float32
        place = torch.device("cpu") if kept_as.in_main_memory else device
        # The system never moves pinned memory: the device copies from and to it by itself, and the host does not wait.
        self.kept = torch.zeros(shape, dtype=dtype, device=place, pin_memory=place != device)
        self.device = device

    def load(self) -> Tensor:
        """In fp32 on the device: the kept tensor itself, where it is that."""
        return self.kept.to(self.device, non_blocking=True).float()

    def store(self, mean: Tensor) -> None:
        """Keep what `load` has returned, after its step."""
        if mean is not self.kept:
            self.kept.copy_(mean.to(self.kept.dtype), non_blocking=True)


@dataclass
class ParameterGroup:
    """Parameters that share a rule and a learning rate."""

    kind: Literal["muon", "adamw"]
    parameters: list[tuple[str, nn.Parameter]]
    learning_rate: float
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.8, 0.95)  # Muon uses the second alone: its momentum follows a schedule
    eps: float = 1e-10
    # Muon: of parameters that hold several matrices (q, k, v), the rows of each.
    row_splits: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Settings:
    """What `Optimizer.step` passes to every group."""

    targets: Tensor  # 0-D: gradients are divided by it
    ok: Tensor  # 0-D: 1 to update, 0 to change nothing
    skipped: Tensor  # 0-D: the opposite, as a bool
    lr_scale: float
    momentum: float
    weight_decay_scale: float


# A step of Muon on 2 ranks, for 3 matrices A, B, C of 4 rows each. Rank 0 owns A and B, rank 1 owns C:
#
#     phase                             rank 0 has                        rank 1 has
#     backward                          its own gradients of A, B, C      its own gradients of A, B, C
#     1   reduce-scatter, sum           rows 0-1 of A, B, C               rows 2-3 of A, B, C
#     2a  all-to-all to the owners      all rows of A, B                  all rows of C
#     2b  orthogonalise                 updates of A, B                   update of C
#     2c  all-to-all back               rows 0-1 of the updates           rows 2-3 of the updates
#         move the weights              new rows 0-1 of A, B, C           new rows 2-3 of A, B, C
#     3   all-gather                    new A, B, C                       new A, B, C
#
# AdamW skips 2a to 2c: each rank updates the rows that phase 1 gave it.


class Optimizer:
    """Muon and AdamW over groups of parameters.

    `dtype` is that of the orthogonalisation's products; `kernels` are the device's. `order` lists names of parameters
    in the order in which a backward completes their gradients: the order in which they travel. `kept_as` may save
    memory of the device, for copies of the state in every step.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        *,
        layout: Layout | None = None,
        dtype: torch.dtype = torch.bfloat16,
        order: Sequence[str] = (),
        kernels: TorchKernels | None = None,
        kept_as: StateFormat | None = None,
    ):
        kept_as = kept_as or StateFormat()
        self.layout = layout or Layout()
        self.groups = [group for group in groups if group.parameters]
        # Muon comes first: its new weights travel while AdamW updates the tables.
        muon = _Muon if self.layout.ranks == 1 else _DistributedMuon
        self._rules: list[_AdamW | _Muon] = []
        self._rules += [muon(group, self.layout, dtype, kept_as) for group in self.groups if group.kind == "muon"]
        adamw = [group for group in self.groups if group.kind == "adamw"]
        if adamw:
            self._rules.append(_AdamW(adamw, self.layout, kernels or TorchKernels(), kept_as))

        # The queue. All ranks start their collectives in one order, because backends match them by it.
        shares: dict[str, _Share] = {}
        for rule in self._rules:
            shares.update(rule.shares)
        assert len(shares) == sum(len(rule.shares) for rule in self._rules), "a parameter is in two groups"
        position = {name: i for i, name in enumerate(order)}
        names = sorted(shares, key=lambda name: position.get(name, len(order)))  # names outside `order` go last
        self._queue = [shares[name] for name in names]
        self._started = 0  # so many of the queue are on their way
        self._awaited: set[nn.Parameter] = set()  # whose gradients the last backward has not completed yet
        self._hooks: list[RemovableHandle] = []

        # Everything here is about sums of gradients over the ranks. FSDP2 returns means, the one reduction that all
        # backends and versions know: gradients arrive divided by this number. `reduce` multiplies their squared norm by
        # its square, and `step` divides the gradients by so much less.
        self._divided_by = self.layout.ranks * self.layout.replicas if self.layout.sharded else 1

    def send_as_ready(self) -> None:
        """Call before a step's last backward: under ddp, gradients travel while the backward still runs.

        A gradient is dropped as soon as it is on its way. `reduce` sends the rest. Source: Li et al. 2020, PyTorch
        Distributed: Experiences on Accelerating Data Parallel Training.
        """
        if self.layout.ranks == 1 or self.layout.sharded:
            return
        assert not self._started, "a backward failed: its gradients are partly sent"
        self._awaited = {share.parameter for share in self._queue}
        self._hooks = [p.register_post_accumulate_grad_hook(self._gradient_is_ready) for p in self._awaited]

    # Autograd calls this on its own thread, as soon as a parameter's gradient is complete.
    @torch.no_grad()
    def _gradient_is_ready(self, parameter: Tensor) -> None:
        assert parameter in self._awaited, "a gradient was added to after it was sent"
        self._awaited.remove(parameter)  # type: ignore[arg-type]
        # Start what is complete, but never out of turn: a loss may reach other parameters on another rank.
        while self._started < len(self._queue) and self._queue[self._started].parameter not in self._awaited:
            self._queue[self._started].send_gradient()
            self._started += 1

    @torch.no_grad()
    def reduce(self) -> Tensor:
        """Phase 1: sum all gradients over the ranks, each rank receiving its share. Call `step` afterwards.

        Returns the squared norm of this rank's share, 0-D. Its sum over all ranks is that of the whole gradient, and
        is not finite if any gradient of any rank is not.
        """
        # Send what the hooks have not sent: all gradients without `send_as_ready`, else those that no loss reached and
        # those queued after them.
        # The hooks go first: the next step's earlier micro-batches must not send anything.
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for share in self._queue[self._started :]:
            share.send_gradient()
        self._started = 0
        for share in self._queue:
            share.receive_gradient()
        # The ranks' results will be added up. What several ranks hold must count once: on the first rank, and in the
        # first replica.
        first = self.layout.rank == 0
        counted = [share.grad for share in self._queue if share.grad.numel() and (share.is_part or first)]
        if not counted or self.layout.replica:
            return torch.zeros((), device=self._queue[0].parameter.device if self._queue else None)
        # One launch for all norms.
        norms = torch.stack(torch._foreach_norm(counted))  # pyright: ignore[reportPrivateImportUsage]
        return norms.square().sum() * self._divided_by**2

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
        """Phases 2 and 3: update from the gradients that `reduce` summed over the ranks, then drop them.

        `targets`, a 0-D fp32 tensor on the device, is the count over all ranks that the sums are divided by.
        `ok`, likewise, is 1 to update and 0 to leave every parameter and every state byte as it is.
        """
        # A step without a target is skipped by `ok`; the clamp keeps its numbers finite.
        divisor = targets.clamp(min=1.0) / self._divided_by
        settings = _Settings(divisor, ok, ok == 0, lr_scale, momentum, weight_decay_scale)
        for rule in self._rules:
            # Phase 2 of this rule, then the start of its phase 3. The next rule computes meanwhile.
            rule.update(settings)
            for share in rule.shares.values():
                share.send_weight()
        for share in self._queue:
            share.receive_weight()

    def set_adamw(self, betas: tuple[float, float], eps: float) -> None:
        """Change AdamW's constants from the next step on. Its running means stay."""
        for rule in self._rules:
            if isinstance(rule, _AdamW):
                for batch in rule.batches:
                    batch.betas = betas
                    batch.eps = eps

    def state_dict(self) -> dict[str, Tensor]:
        """The state by name, over its own memory: a DTensor where each rank has a part, a plain tensor where all
        ranks hold the same.

        Names and whole shapes are the same under every layout, so that any layout resumes any other's checkpoint.
        What is kept in main memory may still be on its way there: synchronize the device before reading it.
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


# ---------------------------------------------------------------------- phases 1 and 3


class _Share:
    """The rows of one parameter that this rank updates, and their way to and from the other ranks.

    Under ddp a large parameter's rows are split over the ranks, by a reduce-scatter and an all-gather. A small
    parameter's gradient is summed on all ranks, and all update the whole of it alike. Elsewhere the share is what the
    process holds, and nothing travels here.
    """

    def __init__(self, parameter: nn.Parameter, layout: Layout, is_large: bool):
        self.parameter = parameter
        self.layout = layout
        # Under ddp a large parameter is replicated and split, a small one replicated only. Under fsdp FSDP2 has split
        # the parameter itself. On one process it is neither.
        self.is_replicated = layout.ranks > 1 and not layout.sharded
        self.is_split = self.is_replicated and is_large
        self.is_part = self.is_split or layout.sharded  # other ranks have the other rows
        self.grad = torch.empty(0)  # this share's, between `reduce` and `step`
        self.work: dist.Work | None = None
        self.gathered: Tensor | None = None
        # The collectives need equal shares. If the rows do not divide evenly, zeros pad them to ranks x `most` rows.
        rows = parameter.size(0)
        self.rows = layout.share(rows) if self.is_split else slice(0, rows)
        self.most = layout.shares(rows)[0].stop  # rows of the largest share, which is the first
        self.is_padded = self.most * layout.ranks != rows

    def weight(self) -> Tensor:
        """This rank's rows, over the parameter's memory."""
        held = local(self.parameter)
        return held[self.rows] if self.is_split else held

    def as_whole(self, rows: Tensor) -> Tensor:
        """This rank's rows of a tensor of the parameter's shape, as a DTensor where other ranks have the others."""
        return self.layout.as_share(rows, tuple(self.parameter.shape)) if self.is_part else rows

    def send_gradient(self) -> None:
        held = local(self.parameter)
        # A parameter that no loss reached has a zero gradient. This rank must send it: other ranks wait for its part.
        grad = torch.zeros_like(held) if self.parameter.grad is None else local(self.parameter.grad)
        # Drop the gradient before the next one is sent, so that peak memory holds few at once. On 4 simulated NPUs the
        # peak fell from 185.0 to 167.7 MB once gradients travelled early (docs/measurements.md).
        self.parameter.grad = None
        self.grad = grad
        if self.is_split:
            # 5 rows on 2 ranks: padded to 6, summed over the ranks, 3 to each rank. The last row is padding.
            padded = _pad(grad.contiguous(), self.most * self.layout.ranks)
            self.grad = padded.new_empty(self.most, *grad.shape[1:])
            self.work = reduce_scatter(self.grad, padded, group=self.layout.group, async_op=True)
        elif self.is_replicated:
            # Too small to split: every rank receives the whole sum, and computes the same update from it.
            self.work = dist.all_reduce(grad, group=self.layout.group, async_op=True)

    def receive_gradient(self) -> None:
        self._wait()
        if self.is_split:
            # Without the padding.
            self.grad = self.grad[: self.rows.stop - self.rows.start]

    def send_weight(self) -> None:
        self.grad = self.grad.new_empty(0)  # the update has used it
        if not self.is_split:
            return  # every rank has made the same update, or FSDP2 gathers the weights when a layer needs them
        # Gather straight into the parameter, from a copy of this rank's rows: a collective must not read the memory
        # that it writes to. Padded rows need a detour by way of a tensor of their own.
        mine = _pad(self.weight().clone(), self.most)
        whole = local(self.parameter)
        if self.is_padded:
            whole = self.gathered = mine.new_empty(self.most * self.layout.ranks, *mine.shape[1:])
        self.work = all_gather(whole, mine, group=self.layout.group, async_op=True)

    def receive_weight(self) -> None:
        self._wait()
        if self.gathered is not None:
            local(self.parameter).copy_(self.gathered[: self.parameter.size(0)])
            self.gathered = None

    def _wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        self.work = None


def _pad(rows: Tensor, count: int) -> Tensor:
    """The rows, and zeros up to `count` rows."""
    missing = count - len(rows)
    return torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:]))) if missing else rows


# ---------------------------------------------------------------------- phase 2


# A rule updates one group: `update` moves the weights of the group's `shares` from their gradients.


@dataclass
class _AdamWBatch:
    """Parameters of groups that differ in their learning rates alone: an accelerator updates them in a few launches."""

    shares: dict[str, _Share]  # by name
    learning_rates: list[float]  # of each share
    first_moment: _Mean  # flat: the elements of all shares in a row
    second_moment: _Mean  # likewise
    betas: tuple[float, float]  # from here on the same for all
    eps: float
    weight_decay: float


class _AdamW:
    """AdamW (source: Loshchilov and Hutter 2019, Decoupled weight decay regularization).

    One rule for all groups: the count of steps, and what follows from it, is the same for each.
    """

    def __init__(self, groups: Sequence[ParameterGroup], layout: Layout, kernels: TorchKernels, kept_as: StateFormat):
        self.kernels = kernels
        self.kept_as = kept_as
        self.state: dict[str, Tensor] = {}  # see Optimizer.state_dict
        self.shares: dict[str, _Share] = {}
        # The count of steps is a tensor on the device, because the host does not know which steps were skipped.
        self.steps = torch.zeros(1, device=groups[0].parameters[0][1].device)
        # The parameters of each batch, by what they must have in common.
        together: dict[tuple[Any, ...], list[tuple[ParameterGroup, str, nn.Parameter]]] = {}
        elements = 0
        for group in groups:
            self.state[f"adamw.{group.parameters[0][0]}.steps"] = self.steps
            for name, parameter in group.parameters:
                # Means that are copied for the update are copied a bucket at a time.
                elements += local(parameter).numel()
                bucket = 0 if kept_as == StateFormat() else elements // BUCKET_ELEMENTS
                alike = together.setdefault((group.betas, group.eps, group.weight_decay, bucket), [])
                alike.append((group, name, parameter))
        self.batches = [self._make_batch(alike, layout) for alike in together.values()]

    def _make_batch(self, members: Sequence[tuple[ParameterGroup, str, nn.Parameter]], layout: Layout) -> _AdamWBatch:
        shares: dict[str, _Share] = {}
        learning_rates = []
        for group, name, parameter in members:
            # Only parameters whose rows the ranks divide evenly are split: nothing is padded here. Small ones are not
            # split, see SHARD_ELEMENTS.
            is_large = parameter.numel() >= SHARD_ELEMENTS and parameter.size(0) % layout.ranks == 0
            shares[name] = _Share(parameter, layout, is_large)
            learning_rates.append(group.learning_rate)
        self.shares.update(shares)
        # Two running means for each element: of its gradient, and of its gradient's square. They take twice the memory
        # of the weights. A rank holds those of its shares alone: this is what ZeRO saves.
        weights = [share.weight() for share in shares.values()]
        one = members[0][0]
        shape = (sum(weight.numel() for weight in weights),)
        first_moment, second_moment = (_Mean(shape, 1 - beta, self.steps.device, self.kept_as) for beta in one.betas)
        for kind, mean in (("first_moment", first_moment), ("second_moment", second_moment)):
            for (name, share), part in zip(shares.items(), split_like(mean.kept, weights), strict=True):
                self.state[f"adamw.{name}.{kind}"] = share.as_whole(part)
        return _AdamWBatch(shares, learning_rates, first_moment, second_moment, one.betas, one.eps, one.weight_decay)

    def update(self, settings: _Settings) -> None:
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
        # fluctuates: each element takes steps of its own size.
        self.kernels.adamw(self._updates(settings), self.steps, settings.targets, settings.ok)

    def _updates(self, settings: _Settings) -> Iterator[AdamWUpdate]:
        """Each batch's update, with its means on the device until the next one is asked for."""
        for batch in self.batches:
            first_moment = batch.first_moment.load()
            second_moment = batch.second_moment.load()
            yield AdamWUpdate(
                weights=[share.weight() for share in batch.shares.values()],
                grads=[share.grad for share in batch.shares.values()],
                first_moment=first_moment,
                second_moment=second_moment,
                learning_rates=[rate * settings.lr_scale for rate in batch.learning_rates],
                betas=batch.betas,
                eps=batch.eps,
                weight_decay=batch.weight_decay * settings.weight_decay_scale,
            )
            batch.first_moment.store(first_moment)
            batch.second_moment.store(second_moment)


def orthogonalize(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Replace each of N matrices (N, rows, columns) by about U V^T of its singular value decomposition U S V^T.

    The products run in `dtype`. Source: Jordan et al. 2024, Muon.
    """
    # Why: a gradient has a few large singular values and many small ones. With all of them set to about 1, an update
    # moves the weights by as much in every direction, also where the gradient is small.
    # How: an odd polynomial a x + b (x x^T) x + c (x x^T)^2 x acts on the singular values alone: U S V^T becomes
    # U (a S + b S^3 + c S^5) V^T. It needs nothing but matrix products, and no decomposition.
    x = matrices.to(dtype)
    is_tall = x.size(-2) > x.size(-1)
    if is_tall:
        # x x^T is the smaller of the two Gram matrices when x is wide: (768, 768) instead of (3072, 3072).
        x = x.mT
    # The root of the sum of all squares is at least the largest singular value: after this none is above 1, where the
    # polynomials would diverge.
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    if dtype == torch.float32 and x.size(-1) > 2 * x.size(-2):
        x = _polynomials_of_gram(x @ x.mT) @ x
    else:
        for a, b, c in POLAR_EXPRESS:
            gram = x @ x.mT
            polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b (x x^T) + c (x x^T)^2
            x = torch.baddbmm(x, polynomial, x, beta=a)  # a x + the polynomial x
    return x.mT if is_tall else x


def _polynomials_of_gram(gram: Tensor) -> Tensor:
    """x x^T (N, rows, rows) -> P of the same shape, the product of all steps' polynomials: P x is orthogonal."""
    # A step makes x into p x, and x x^T into p (x x^T) p: the small square matrices are enough to go on. For a matrix
    # four times as wide as tall the work is that of 25 products of squares instead of 45. Only in fp32: in bf16 the
    # rounding of x x^T grows from step to step. Source: Zhang, Amsel, Chen and Dao 2026, Gram Newton-Schulz.
    product = polynomial = None
    for a, b, c in POLAR_EXPRESS:
        if polynomial is not None:
            gram = polynomial @ gram @ polynomial
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
        product = polynomial if product is None else polynomial @ product
    assert product is not None
    return product


@dataclass(frozen=True)
class _Rows:
    """Rows [start, stop): a matrix, counted in its parameter's rows; or the part of one that a share holds, counted in
    the share's. On one process the share is the whole parameter."""

    share: _Share
    start: int
    stop: int

    def gradient(self) -> Tensor:
        return self.share.grad[self.start : self.stop]

    def weight(self) -> Tensor:
        return self.share.weight()[self.start : self.stop]


@dataclass(eq=False)
class _Stack:
    """The matrices of one shape in a group. Each rank owns a run of them."""

    shape: tuple[int, int]
    matrices: list[_Rows]
    owned: list[_Rows]  # those of them that this rank orthogonalises
    momentum: _Mean  # (owned, rows, columns)
    second_moment: Tensor  # (owned, rows, 1), or (owned, 1, columns) where matrices are wide


class _Muon:
    """Muon on one process (source: Jordan et al. 2024, Muon).

    Matrices of one shape are stacked: one orthogonalisation serves them all.
    """

    # In the same wall time at depth 4 on pydoc, Muon reaches 1.591 bits per byte where AdamW reaches 1.629
    # (docs/measurements.md). It also has half of AdamW's state: one mean for each element, and little more.

    def __init__(self, group: ParameterGroup, layout: Layout, dtype: torch.dtype, kept_as: StateFormat):
        self.group = group
        self.kept_as = kept_as
        self.state: dict[str, Tensor] = {}  # see Optimizer.state_dict
        self.layout = layout
        self.dtype = dtype
        self.shares = {name: _Share(parameter, layout, is_large=True) for name, parameter in group.parameters}
        # Collect matrices by shape. q, k and v are one parameter, so that one product computes them, but three matrices
        # to Muon: the size of one must not decide the update of another.
        matrices: dict[tuple[int, int], list[_Rows]] = {}
        for name, parameter in group.parameters:
            start = 0
            for rows in group.row_splits.get(name, (parameter.size(0),)):
                of_shape = matrices.setdefault((rows, parameter.size(1)), [])
                of_shape.append(_Rows(self.shares[name], start, start + rows))
                start += rows
            assert start == parameter.size(0), "row_splits must cover a parameter's rows"
        self.stacks = [self._make_stack(shape, of_shape) for shape, of_shape in matrices.items()]

    def _make_stack(self, shape: tuple[int, int], matrices: list[_Rows]) -> _Stack:
        # The state of a stack is one tensor, cut along the matrices: rank r has those that it owns.
        rows, columns = shape
        owned = matrices[self.layout.share(len(matrices))]
        # One second moment per row of a tall matrix, and per column of a wide one.
        neurons = (rows, 1) if rows >= columns else (1, columns)
        name, parameter = self.group.parameters[0]
        momentum = _Mean((len(owned), rows, columns), MUON_PORTION, parameter.device, self.kept_as)
        second_moment = torch.zeros(len(owned), *neurons, device=parameter.device)
        for state_name, state in (("momentum", momentum.kept), ("second_moment", second_moment)):
            whole_shape = (len(matrices), *state.shape[1:])
            self.state[f"muon.{name}.{rows}x{columns}.{state_name}"] = self.layout.as_share(state, whole_shape)
        return _Stack(shape, matrices, owned, momentum, second_moment)

    def update(self, settings: _Settings) -> None:
        decay = self.group.weight_decay * settings.weight_decay_scale
        for stack in self.stacks:
            update, size = self._direction(stack, self._gradient(stack), settings)
            # The rows of a wide update have norm 1, those of a tall one are shorter: about 1/2 for 4C x C, where the
            # columns have norm 1. This factor gives them norm 1 too, so that every output moves by as much.
            rows, columns = stack.shape
            rate = self.group.learning_rate * settings.lr_scale * max(1.0, rows / columns) ** 0.5
            self._apply(stack, update, size, rate * settings.ok, decay)

    def _gradient(self, stack: _Stack) -> Tensor:
        """The gradients of the matrices that this rank owns (owned, rows, columns)."""
        return torch.stack([matrix.gradient() for matrix in stack.matrices])

    def _direction(self, stack: _Stack, grad: Tensor, settings: _Settings) -> tuple[Tensor, Tensor]:
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
        momentum.lerp_(grad, (1 - settings.momentum) * settings.ok)
        update = grad.lerp_(momentum, settings.momentum)
        stack.momentum.store(momentum)
        del momentum  # where it is a copy, its memory is free for the products

        # The products may run in bf16: the iteration bears its rounding (source: Jordan et al. 2024).
        update = orthogonalize(update, self.dtype).float()

        # Neurons of an orthogonal update still differ in size. Divide each by its running second moment, then restore
        # the matrix's norm (source: Li et al. 2025, NorMuon, arXiv 2510.05491).
        rows, columns = stack.shape
        square = update.square().mean(dim=-1 if rows >= columns else -2, keepdim=True)
        stack.second_moment.lerp_(square, (1 - self.group.betas[1]) * settings.ok)
        second_moment = stack.second_moment.clamp(min=1e-10)
        # The mean square of each matrix, before and after its neurons are divided by their sizes. The quotient of the
        # two is that of the squared norms.
        mean_square = square.mean(dim=(1, 2), keepdim=True)
        scaled = (square / second_moment).mean(dim=(1, 2), keepdim=True).clamp(min=1e-10)
        update *= (mean_square / (second_moment * scaled)).sqrt()
        size = mean_square.sqrt().clamp(min=1e-10)
        return update, size

    def _apply(self, stack: _Stack, update: Tensor, size: Tensor, rate: Tensor, decay: float) -> None:
        """Move the weights of this rank's shares."""
        weights = [matrix.weight() for matrix in stack.matrices]
        _copy(weights, _move(torch.stack(weights), update, size, rate, decay).unbind())


class _DistributedMuon(_Muon):
    """Muon where each rank's shares are rows of every matrix, and each rank owns a few of the matrices.

    Its phase 2, stack by stack (the table above `Optimizer` has an example):

    2a. Each rank sends its rows of the gradients to the matrices' owners: one all-to-all (`_gradient`).
    2b. Each rank orthogonalises the matrices that it owns, and no rank computes another's (`_direction` of `_Muon`).
    2c. Each rank sends the updates' rows back by another all-to-all, and the ranks move their weights' rows (`_apply`).
        A row travels with the mean size of its matrix's update, which the weight decay needs.

    On R ranks this is 2/R of the matrices' bytes, besides those of phases 1 and 3 (docs/multinode.md).
    """

    def __init__(self, group: ParameterGroup, layout: Layout, dtype: torch.dtype, kept_as: StateFormat):
        super().__init__(group, layout, dtype, kept_as)
        self.routes = {stack: _Route(stack, layout) for stack in self.stacks}

    def _gradient(self, stack: _Stack) -> Tensor:
        # 2a. This rank's rows leave for the owners; the rows of its own matrices arrive, and are put in their places.
        route = self.routes[stack]
        rows = [part.gradient() for part in route.held]
        arrived = self._exchange(rows, stack.shape[1], route.held_counts, route.place_counts)
        grad = arrived.new_empty(len(stack.owned), *stack.shape)
        targets = [grad[place] for place in route.places]
        _copy(targets, arrived.split([len(target) for target in targets]))
        return grad

    def _apply(self, stack: _Stack, update: Tensor, size: Tensor, rate: Tensor, decay: float) -> None:
        # 2c. The same ways back: the update's rows leave this owner, and those of this rank's shares arrive.
        route = self.routes[stack]
        rows, columns = stack.shape
        with_size = torch.cat((update, size.expand(-1, rows, 1)), dim=2)  # (owned, rows, columns + 1)
        parts = [with_size[place] for place in route.places]
        arrived = self._exchange(parts, columns + 1, route.place_counts, route.held_counts)
        weights = [part.weight() for part in route.held]
        if weights:
            new = _move(torch.cat(weights), arrived[:, :columns], arrived[:, columns:], rate, decay)
            _copy(weights, new.split([len(weight) for weight in weights]))

    def _exchange(self, rows: list[Tensor], columns: int, leaving: list[int], arriving: list[int]) -> Tensor:
        """Send `leaving[r]` of the rows to each rank r; returns the `arriving[r]` rows of each, in rank order."""
        device = self.group.parameters[0][1].device
        sent = torch.cat(rows) if rows else torch.empty(0, columns, device=device)
        arrived = sent.new_empty(sum(arriving), columns)
        dist.all_to_all_single(arrived, sent, arriving, leaving, group=self.layout.group)
        return arrived


class _Route:
    """Which rows of a stack go where: from the shares that hold them to the owners of their matrices, and back.

    Both ends list the rows that they exchange in the order of the stack.
    """

    def __init__(self, stack: _Stack, layout: Layout):
        # What this rank holds, sorted by the owner of the matrix, and how many rows are each owner's.
        self.held: list[_Rows] = []
        self.held_counts: list[int] = []
        # Where rows lie in this rank's own matrices (owned, rows, columns), sorted by who holds them, and how many rows
        # each holder has. A place is (which matrix, which of its rows).
        self.places: list[tuple[int, slice]] = []
        self.place_counts: list[int] = []
        # In the example of 3 matrices on 2 ranks, rank 0 has:
        #     held    rows 0-1 of A and B for owner 0, of C for owner 1          held_counts  [4, 2]
        #     places  rows 0-1 of A and B from rank 0, rows 2-3 from rank 1      place_counts [4, 4]
        for rank, run in enumerate(layout.shares(len(stack.matrices))):
            # That rank's matrices, this rank's rows.
            count = 0
            for matrix in stack.matrices[run]:
                rows = _held_rows(matrix, layout, layout.rank)
                if rows:
                    first = layout.share(matrix.share.parameter.size(0)).start
                    self.held.append(_Rows(matrix.share, rows.start - first, rows.stop - first))
                count += len(rows)
            self.held_counts.append(count)
            # This rank's matrices, that rank's rows.
            count = 0
            for i, matrix in enumerate(stack.owned):
                rows = _held_rows(matrix, layout, rank)
                if rows:
                    self.places.append((i, slice(rows.start - matrix.start, rows.stop - matrix.start)))
                count += len(rows)
            self.place_counts.append(count)


def _held_rows(matrix: _Rows, layout: Layout, rank: int) -> range:
    """The rows of a matrix that a rank holds, counted in the whole parameter's rows."""
    share = layout.shares(matrix.share.parameter.size(0))[rank]
    return range(max(matrix.start, share.start), min(matrix.stop, share.stop))


def _move(weight: Tensor, update: Tensor, size: Tensor, rate: Tensor, decay: float) -> Tensor:
    """Move matrices, or rows of them, in place; `size` is the mean size of their matrix's update."""
    # Cautious weight decay: only where it pulls the same way as the update (source: Chen et al. 2025, arXiv
    # 2510.12402). A hard switch at zero would let rounding grow: rows summed in two orders part by 1e-4 in 20 steps.
    # Here the decay rises from 0 to its full strength at a quarter of the update's mean size: they part by 4e-7.
    if decay:
        agreement = (update * weight.sign() / (size / 4)).clamp(0, 1)
        update.addcmul_(weight, agreement, value=decay)
    return weight.addcmul_(update, rate, value=-1)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))  # pyright: ignore[reportPrivateImportUsage]
