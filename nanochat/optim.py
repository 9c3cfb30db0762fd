"""Muon for matrices and AdamW for the rest, with state and work shared out over the ranks.

The optimizer knows parameters by group, never by model. `reduce` sums the ranks' gradients, `step` divides
by the number of targets and updates: every rank reduces, updates and sends back only its own share (source:
Rajbhandari et al. 2020, ZeRO stage 1). Where ranks hold whole models, gradients travel while the last backward
still runs (source: Li et al. 2020, PyTorch Distributed). Of sharded parameters (parallel.py) AdamW updates the rows
that a rank holds; Muon needs whole matrices, so each matrix has an owner, who is sent its gradient's rows by all
ranks and sends back where the rows go. Nothing in a step waits for the device: a step that must be skipped is
skipped by arithmetic.

Muon: Jordan et al. 2024; orthogonalisation by Amsel et al. 2025, Polar Express (arXiv 2505.16932);
per-neuron second moment by Li et al. 2025, NorMuon (arXiv 2510.05491); cautious weight decay by
Chen et al. 2025 (arXiv 2510.12402). AdamW: Loshchilov and Hutter 2019.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nanochat.parallel.collectives import all_gather, reduce_scatter
from nanochat.parallel.fsdp import local
from nanochat.parallel.mesh import Layout

# Five steps of the Polar Express iteration for singular values down to 1e-3 of the norm, its safety factor included.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
SHARD_ELEMENTS = 4096  # smaller AdamW tensors are updated by every rank alike: cheaper than sending them
BUCKET_BYTES = 32 << 20  # of matrices' gradients that travel together: enough to fill a link, and early enough

Shape = tuple[int, int]  # rows and columns of a matrix
Piece = tuple[nn.Parameter, int, int]  # rows [a, b) of a parameter are a matrix


@dataclass
class ParameterGroup:
    """Parameters that share a rule and a learning rate."""

    kind: Literal["muon", "adamw"]
    parameters: list[tuple[str, nn.Parameter]]
    learning_rate: float
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.8, 0.95)  # muon uses the second alone: its momentum is scheduled
    eps: float = 1e-10
    row_splits: tuple[int, ...] = ()  # muon: rows of each parameter that are matrices of their own (q, k, v)
    state: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class _Sending:
    """A part of the reduction, and the parameters whose gradients it needs."""

    parameters: list[nn.Parameter]
    start: Callable[[], None]


class Optimizer:
    """Muon and AdamW over groups of parameters laid out over the ranks. `dtype` is that of the orthogonalisation's
    products, `order` names the parameters as a backward comes to their gradients: in that order they travel."""

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        *,
        layout: Layout | None = None,
        dtype: torch.dtype = torch.bfloat16,
        order: Sequence[str] = (),
    ):
        self.groups = [g for g in groups if g.parameters]
        self.layout, self.dtype = layout or Layout(), dtype
        self.shapes: dict[str, tuple[int, ...]] = {}  # of states of which each rank has its share: the whole's
        names = [name for g in self.groups for name, _ in g.parameters]
        assert len(names) == len(set(names)), "a parameter stands in two groups"
        turns = {name: turn for turn, name in enumerate(order)}
        self.turns = {p: turns.get(name, len(turns)) for g in self.groups for name, p in g.parameters}
        self._replicated = self.layout.ranks > 1 and not self.layout.sharded
        muon = _ReplicatedMuonPlan if self._replicated else _ShardedMuonPlan if self.layout.sharded else _MuonPlan
        self._plans = [muon(g, self) if g.kind == "muon" else _AdamWPlan(g, self) for g in self.groups]
        # The same order on every rank: the backends match collectives by it.
        sendings = [sending for plan in self._plans for sending in plan.sendings()]
        self._sendings = sorted(sendings, key=lambda sending: max(self.turns[p] for p in sending.parameters))
        self._sent = 0  # so many of them are on their way
        self._awaited: set[nn.Parameter] = set()  # whose gradients the last backward has not brought yet
        self._hooks: list[RemovableHandle] = []
        # FSDP2 hands over the mean over its ranks, the one reduction that all backends and versions know.
        self._averaged = self.layout.ranks * self.layout.replicas if self.layout.sharded else 1

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
        """Update from the gradients that `reduce` summed over the ranks, then drop them.

        `targets`, a 0-D fp32 tensor on the device, is the count over all ranks that the sums are divided by.
        `ok`, likewise, is 1 to update and 0 to leave every parameter and every state byte as it is.
        """
        targets = targets.clamp(min=1.0) / self._averaged
        for plan in self._plans:
            plan.update(targets, ok, lr_scale, momentum, weight_decay_scale)
        for plan in self._plans:
            plan.finish()
        self.zero_grad()

    def zero_grad(self) -> None:
        for group in self.groups:
            for _, parameter in group.parameters:
                parameter.grad = None

    def send_as_ready(self) -> None:
        """Say before a step's last backward: where ranks hold whole models, what has its gradients goes on its way
        during the backward, and the gradients are dropped. `reduce` sends the rest."""
        if not self._replicated:
            return
        assert not self._sent, "a backward failed: its gradients are partly sent"
        self._awaited = set(self.turns)
        self._hooks = [p.register_post_accumulate_grad_hook(self._has_gradient) for p in self.turns]

    @torch.no_grad()
    def _has_gradient(self, parameter: Tensor) -> None:
        assert parameter in self._awaited, "a gradient was added to after it was sent"
        self._awaited.remove(parameter)  # type: ignore[arg-type]
        while self._sent < len(self._sendings) and self._awaited.isdisjoint(self._sendings[self._sent].parameters):
            self._send_next()

    def _send_next(self) -> None:
        self._sendings[self._sent].start()
        self._sent += 1

    @torch.no_grad()
    def reduce(self) -> Tensor:
        """Sum all gradients over the ranks, each rank keeping its share; then `step` may follow.

        Returns the squared norm of this rank's share, 0-D: the shares' sum over the ranks is that of the whole
        gradient, and not finite if any gradient of any rank is not.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        while self._sent < len(self._sendings):
            self._send_next()
        self._sent = 0
        shares = [grad for plan in self._plans for grad in plan.reduced() if grad.numel()]
        if not shares or self.layout.replica:  # the first replica speaks for all
            return torch.zeros((), device=next(iter(self.turns)).device if self.turns else None)
        return torch.stack(torch._foreach_norm(shares)).square().sum() * self._averaged**2  # pyright: ignore[reportPrivateImportUsage]

    def state_dict(self) -> dict[str, Tensor]:
        """The state by name, over its own memory: what ranks share out is a DTensor, what all hold alike a plain one.

        Names and whole shapes are the same under every layout."""
        state = {name: tensor for group in self.groups for name, tensor in group.state.items()}
        return {n: self.layout.as_share(t, self.shapes[n]) if n in self.shapes else t for n, t in state.items()}


def orthogonalize(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Replace each matrix of (N, rows, columns) by about U V^T of its singular value decomposition."""
    x = matrices.to(dtype)
    tall = x.size(-2) > x.size(-1)
    if tall:  # work with the smaller of the two Gram matrices
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class _Plan:
    """One group's part of a step: reduce the gradients, update this rank's share, finish by sending it back."""

    works: list[dist.Work]  # collectives under way

    def finish_works(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []


class _MuonPlan(_Plan):
    """Matrices, stacked by shape, each rank owning a run of every stack. This is the plan of one process."""

    def __init__(self, group: ParameterGroup, optimizer: Optimizer):
        self.group, self.layout, self.dtype = group, optimizer.layout, optimizer.dtype
        self.stacks: dict[Shape, list[Piece]] = {}
        for _, parameter in group.parameters:
            start = 0
            for rows in group.row_splits or (parameter.size(0),):
                self.stacks.setdefault((rows, parameter.size(1)), []).append((parameter, start, start + rows))
                start += rows
            assert start == parameter.size(0), "row_splits must cover a parameter's rows"
        device = group.parameters[0][1].device
        for (rows, columns), pieces in self.stacks.items():
            neuron = (rows, 1) if rows >= columns else (1, columns)
            for name, shape in (("momentum", (rows, columns)), ("second_moment", neuron)):
                key = f"{self._key((rows, columns))}.{name}"
                group.state[key] = torch.zeros(_length(self.layout.share(len(pieces))), *shape, device=device)
                optimizer.shapes[key] = (len(pieces), *shape)
        self.grads: dict[Shape, Tensor] = {}
        self.works = []

    def sendings(self) -> list[_Sending]:
        return [_Sending([p for _, p in self.group.parameters], self.reduce)]

    def _key(self, shape: Shape) -> str:
        return f"muon.{self.group.parameters[0][0]}.{shape[0]}x{shape[1]}"

    def reduce(self) -> None:
        for shape, pieces in self.stacks.items():
            self.grads[shape] = torch.stack([_grad(p)[a:b] for p, a, b in pieces])

    def reduced(self) -> list[Tensor]:
        """The summed gradients of this rank's matrices."""
        return list(self.grads.values())

    def update(self, targets: Tensor, ok: Tensor, lr_scale: float, momentum: float, weight_decay_scale: float) -> None:
        decay = self.group.weight_decay * weight_decay_scale
        for shape in self.stacks:
            rate = self.group.learning_rate * lr_scale * max(1.0, shape[0] / shape[1]) ** 0.5
            update, size = self._direction(shape, targets, ok, momentum)
            self._apply(shape, update, size, rate * ok, decay)

    def _direction(self, shape: Shape, targets: Tensor, ok: Tensor, momentum: float) -> tuple[Tensor, Tensor]:
        """The updates of this rank's matrices (N, rows, columns), and each one's mean size (N, 1, 1)."""
        rows, columns = shape
        grad = self.grads.pop(shape)
        if not len(grad):
            return grad, grad.new_empty(0, 1, 1)
        grad = torch.where(ok > 0, grad / targets, 0.0)  # 0 x NaN would still be NaN
        average = self.group.state[f"{self._key(shape)}.momentum"]
        average.lerp_(grad, (1 - momentum) * ok)
        update = orthogonalize(grad.lerp_(average, momentum), self.dtype).float()  # Nesterov's look-ahead

        # Even out the neurons' step sizes by a running second moment, keeping each matrix's norm.
        second = self.group.state[f"{self._key(shape)}.second_moment"]
        square = update.square().mean(dim=-1 if rows >= columns else -2, keepdim=True)
        second.lerp_(square, (1 - self.group.betas[1]) * ok)
        even = second.clamp(min=1e-10).rsqrt()
        norm, new_norm = square.sum((1, 2), keepdim=True), (square * even.square()).sum((1, 2), keepdim=True)
        update *= even * (norm / new_norm.clamp(min=1e-10)).sqrt()
        return update, square.mean(dim=(1, 2), keepdim=True).sqrt().clamp(min=1e-10)

    def _apply(self, shape: Shape, update: Tensor, size: Tensor, rate: Tensor, decay: float) -> None:
        weights = [p.detach()[a:b] for p, a, b in self.stacks[shape]]
        _copy(weights, _updated(torch.stack(weights), update, size, rate, decay).unbind())

    def finish(self) -> None:
        pass


class _ReplicatedMuonPlan(_MuonPlan):
    """Each rank holds all weights. Their gradients are summed by the bucket, each rank keeping an equal slice of it,
    wherever matrices begin and end: nothing is padded, however few they are. The slices' parts go on to the matrices'
    owners, and new weights take the same ways back: 1/ranks of the bytes goes a second time."""

    def __init__(self, group: ParameterGroup, optimizer: Optimizer):
        super().__init__(group, optimizer)
        self.buckets = buckets([p for _, p in sorted(group.parameters, key=lambda one: optimizer.turns[one[1]])])
        self.lengths = [-(-sum(p.numel() for p in bucket) // self.layout.ranks) for bucket in self.buckets]  # of slices
        self.slices: dict[int, Tensor] = {}  # this rank's, by bucket
        self.own: dict[Shape, Tensor] = {}  # this rank's new weights

        # The ways of elements: by owner, of this rank's slices, which one and from where to where in it; and by the
        # rank that sends them, of this rank's matrices, which one and from where to where in it. Ranks agree on the
        # order, that of the stacks.
        self.to_owner: list[list[tuple[int, int, int]]] = [[] for _ in range(self.layout.ranks)]
        self.from_rank: list[list[tuple[Shape, int, int, int]]] = [[] for _ in range(self.layout.ranks)]
        places = {}
        for number, bucket in enumerate(self.buckets):
            offset = 0
            for parameter in bucket:
                places[parameter] = number, offset
                offset += parameter.numel()
        for shape, pieces in self.stacks.items():
            runs = self.layout.shares(len(pieces))
            for i, (parameter, top, bottom) in enumerate(pieces):
                number, offset = places[parameter]
                begin, end = offset + top * shape[1], offset + bottom * shape[1]
                owner, length = i // _length(runs[0]), self.lengths[number]
                for rank in range(self.layout.ranks) if owner == self.layout.rank else [self.layout.rank]:
                    first, last = max(begin, rank * length), min(end, (rank + 1) * length)
                    if first < last and rank == self.layout.rank:
                        self.to_owner[owner].append((number, first - rank * length, last - rank * length))
                    if first < last and owner == self.layout.rank:
                        self.from_rank[rank].append((shape, i - runs[owner].start, first - begin, last - begin))

    def sendings(self) -> list[_Sending]:
        return [_Sending(bucket, functools.partial(self._start, i)) for i, bucket in enumerate(self.buckets)]

    def _start(self, number: int) -> None:
        grads = [_grad(p).flatten() for p in self.buckets[number]]
        missing = self.lengths[number] * self.layout.ranks - sum(len(g) for g in grads)  # less than an element a rank
        whole = torch.cat([*grads, grads[0].new_zeros(missing)] if missing else grads)
        for parameter in self.buckets[number]:
            parameter.grad = None  # on its way
        self.slices[number] = mine = whole.new_empty(self.lengths[number])
        self.works.append(_started(reduce_scatter(mine, whole, group=self.layout.group, async_op=True)))

    def reduced(self) -> list[Tensor]:
        self.finish_works()
        empty = self.slices[0].new_empty(0)
        sent = torch.cat([empty] + [self.slices[n][a:b] for parts in self.to_owner for n, a, b in parts])
        self.slices = {}
        received = self._exchange(sent, self._owners(), self._senders())
        self.finish_works()
        for shape, pieces in self.stacks.items():
            self.grads[shape] = empty.new_empty(_length(self.layout.share(len(pieces))), *shape)
        parts = self._parts(self.grads)
        _copy(parts, received.split([len(part) for part in parts]))
        return super().reduced()

    def _owners(self) -> list[int]:
        """Elements of this rank's slices, by owner."""
        return [sum(b - a for _, a, b in parts) for parts in self.to_owner]

    def _senders(self) -> list[int]:
        """Elements of this rank's matrices, by the rank whose slices they are in."""
        return [sum(b - a for _, _, a, b in parts) for parts in self.from_rank]

    def _parts(self, stacks: dict[Shape, Tensor]) -> list[Tensor]:
        """This rank's matrices as they come and go, piece by piece, over the same memory."""
        return [stacks[shape][i].view(-1)[a:b] for parts in self.from_rank for shape, i, a, b in parts]

    def _exchange(self, sent: Tensor, counts: list[int], incoming: list[int]) -> Tensor:
        """Send so many elements to each rank; what comes from each is there when the works have finished."""
        received, group = sent.new_empty(sum(incoming)), self.layout.group
        self.works.append(_started(dist.all_to_all_single(received, sent, incoming, counts, group, async_op=True)))
        return received

    def update(self, targets: Tensor, ok: Tensor, lr_scale: float, momentum: float, weight_decay_scale: float) -> None:
        super().update(targets, ok, lr_scale, momentum, weight_decay_scale)
        parts = self._parts(self.own)
        self.own = {}
        sent = torch.cat([targets.new_empty(0), *parts])
        self.received = self._exchange(sent, self._senders(), self._owners())

    def _apply(self, shape: Shape, update: Tensor, size: Tensor, rate: Tensor, decay: float) -> None:
        pieces = self.stacks[shape]
        weights = [p.detach()[a:b] for p, a, b in pieces[self.layout.share(len(pieces))]]
        self.own[shape] = _updated(torch.stack(weights), update, size, rate, decay) if weights else update

    def finish(self) -> None:
        self.finish_works()
        received = self.received.split([b - a for parts in self.to_owner for _, a, b in parts])
        slices = [self.received.new_empty(length) for length in self.lengths]  # what stands behind a bucket is not read
        _copy([slices[n][a:b] for parts in self.to_owner for n, a, b in parts], received)
        del self.received, received
        gathered = [mine.new_empty(len(mine) * self.layout.ranks) for mine in slices]
        for mine, whole in zip(slices, gathered, strict=True):
            self.works.append(_started(all_gather(whole, mine, group=self.layout.group, async_op=True)))
        self.finish_works()
        for bucket, whole in zip(self.buckets, gathered, strict=True):
            new = whole[: sum(p.numel() for p in bucket)].split([p.numel() for p in bucket])
            _copy([p.detach() for p in bucket], [values.view_as(p) for values, p in zip(new, bucket, strict=True)])


class _ShardedMuonPlan(_MuonPlan):
    """Each rank holds some rows of every weight: it sends their gradients to the matrices' owners, and is sent the
    rows' updates back, behind those of each owner the sizes of its matrices."""

    def __init__(self, group: ParameterGroup, optimizer: Optimizer):
        super().__init__(group, optimizer)
        self.routes = {shape: _Route(shape, pieces, self.layout) for shape, pieces in self.stacks.items()}
        self._nothing = torch.zeros(0, device=group.parameters[0][1].device)
        self.received: dict[Shape, Tensor] = {}
        self.steps: dict[Shape, tuple[Tensor, float]] = {}  # rate and decay of what is on its way

    def reduce(self) -> None:
        for shape, route in self.routes.items():
            rows = [_grad(p)[a:b].flatten() for p, a, b in route.held] or [self._nothing]
            self._send(shape, rows, route.from_owner, route.from_rank)
        for _, parameter in self.group.parameters:
            parameter.grad = None  # on its way

    def _send(self, shape: Shape, parts: list[Tensor], counts: list[int], incoming: list[int]) -> None:
        """Send so many elements to each rank, and receive as many from each."""
        sent = torch.cat(parts)
        self.received[shape] = received = sent.new_empty(sum(incoming))
        group = self.layout.group
        self.works.append(_started(dist.all_to_all_single(received, sent, incoming, counts, group, async_op=True)))

    def reduced(self) -> list[Tensor]:
        self.finish_works()
        for shape, route in self.routes.items():
            received = self.received.pop(shape)
            stack = received.new_empty(len(route.own), *shape)
            rows = [stack[i, a:b] for parts in route.owned for i, a, b in parts]
            _copy([r.view(-1) for r in rows], received.split([r.numel() for r in rows]))
            self.grads[shape] = stack
        return super().reduced()

    def _apply(self, shape: Shape, update: Tensor, size: Tensor, rate: Tensor, decay: float) -> None:
        route, parts = self.routes[shape], []
        for pieces in route.owned:
            parts += [update[i, a:b].flatten() for i, a, b in pieces] + [size.flatten()]
        counts = [n + len(route.own) for n in route.from_rank]
        self._send(shape, parts, counts, [n + m for n, m in zip(route.from_owner, route.owner_matrices, strict=True)])
        self.steps[shape] = rate, decay

    def finish(self) -> None:
        self.finish_works()
        for shape, route in self.routes.items():
            cuts = [n for pair in zip(route.from_owner, route.owner_matrices, strict=True) for n in pair]
            parts = self.received.pop(shape).split(cuts)
            update, sizes = torch.cat(parts[::2]).view(-1, shape[1]), torch.cat(parts[1::2])
            weights = [local(p)[a:b] for p, a, b in route.held]
            settings = self.steps.pop(shape)
            if not weights:
                continue
            size = sizes[route.matrix_of_row][:, None]  # (rows, 1)
            new = _updated(torch.cat(weights), update, size, *settings)
            _copy(weights, new.split([len(w) for w in weights]))


class _Route:
    """How the rows of a stack's matrices go from the ranks that hold them to the matrices' owners, and back."""

    def __init__(self, shape: Shape, pieces: list[Piece], layout: Layout):
        runs = layout.shares(len(pieces))
        self.own = range(len(pieces))[runs[layout.rank]]  # this rank's matrices
        self.owner_matrices = [_length(run) for run in runs]
        # by rank, of this rank's matrices: which one, and the rows of it that the rank holds
        self.owned: list[list[tuple[int, int, int]]] = [[] for _ in runs]
        for i, (parameter, start, stop) in enumerate(pieces[runs[layout.rank]]):
            for rank, share in enumerate(layout.shares(parameter.size(0))):
                if (first := max(start, share.start)) < (last := min(stop, share.stop)):
                    self.owned[rank].append((i, first - start, last - start))
        self.from_rank = [shape[1] * sum(b - a for _, a, b in parts) for parts in self.owned]  # elements

        self.held: list[Piece] = []  # what this rank holds of all matrices, counted in its own rows
        self.from_owner = [0] * layout.ranks  # elements
        matrix_of_row: list[int] = []
        for i, (parameter, start, stop) in enumerate(pieces):
            share = layout.share(parameter.size(0))
            if (first := max(start, share.start)) < (last := min(stop, share.stop)):
                self.held.append((parameter, first - share.start, last - share.start))
                self.from_owner[i // _length(runs[0])] += shape[1] * (last - first)
                matrix_of_row += [i] * (last - first)
        self.matrix_of_row = torch.tensor(matrix_of_row, dtype=torch.long, device=pieces[0][0].device)


class _AdamWPlan(_Plan):
    """Any tensors. Of sharded ones a rank updates the rows it holds; of others large ones are shared out by rows, small
    ones are updated by every rank alike."""

    def __init__(self, group: ParameterGroup, optimizer: Optimizer):
        self.group, self.layout = group, optimizer.layout
        self.rows: list[slice | None] = []  # of each parameter those this rank updates; None: all that it holds
        for name, parameter in group.parameters:
            divides = parameter.numel() >= SHARD_ELEMENTS and parameter.size(0) % self.layout.ranks == 0
            shared = self.layout.ranks > 1 and not self.layout.sharded and divides
            self.rows.append(self.layout.share(parameter.size(0)) if shared else None)
            held = local(parameter)
            for moment in ("first_moment", "second_moment"):
                key = f"adamw.{name}.{moment}"
                group.state[key] = torch.zeros_like(held[self.rows[-1]] if shared else held)
                if shared or self.layout.sharded:
                    optimizer.shapes[key] = tuple(parameter.shape)
        self.key = f"adamw.{group.parameters[0][0]}.steps"
        group.state[self.key] = torch.zeros(1, device=group.parameters[0][1].device)
        self.works = []
        self.grads: dict[int, Tensor] = {}  # by parameter, in no order

    def sendings(self) -> list[_Sending]:
        return [_Sending([p], functools.partial(self._start, i)) for i, (_, p) in enumerate(self.group.parameters)]

    def _start(self, number: int) -> None:
        parameter, rows = self.group.parameters[number][1], self.rows[number]
        grad = _grad(parameter)
        parameter.grad = None
        if rows is not None:
            mine = torch.empty_like(grad[rows])
            work = reduce_scatter(mine, grad.contiguous(), group=self.layout.group, async_op=True)
            self.works.append(_started(work))
            grad = mine
        elif self.layout.ranks > 1 and not self.layout.sharded:
            self.works.append(_started(dist.all_reduce(grad, group=self.layout.group, async_op=True)))
        self.grads[number] = grad

    def reduced(self) -> list[Tensor]:
        """This rank's share of the summed gradients; of those that every rank holds, rank 0 has the share."""
        self.finish_works()
        all_mine = self.layout.sharded or self.layout.rank == 0
        return [self.grads[i] for i, rows in enumerate(self.rows) if all_mine or rows is not None]

    def update(self, targets: Tensor, ok: Tensor, lr_scale: float, momentum: float, weight_decay_scale: float) -> None:
        group, state = self.group, self.group.state
        steps = state[self.key]
        steps += ok
        names, parameters = zip(*group.parameters, strict=True)
        weights = [
            local(p) if rows is None else p.detach()[rows] for p, rows in zip(parameters, self.rows, strict=True)
        ]
        here = [i for i, weight in enumerate(weights) if weight.numel()]  # a shard may have no row
        # torch's one fused kernel: it divides by grad_scale, and touches nothing when found_inf is 1
        torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
            [weights[i] for i in here],
            [self.grads[i] for i in here],
            [state[f"adamw.{names[i]}.first_moment"] for i in here],
            [state[f"adamw.{names[i]}.second_moment"] for i in here],
            [],
            [steps] * len(here),
            lr=group.learning_rate * lr_scale,
            beta1=group.betas[0],
            beta2=group.betas[1],
            weight_decay=group.weight_decay * weight_decay_scale,
            eps=group.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=targets,
            found_inf=1 - ok,
        )
        self.grads = {}
        for parameter, weight, rows in zip(parameters, weights, self.rows, strict=True):
            if rows is not None:
                work = all_gather(parameter.detach(), weight.clone(), group=self.layout.group, async_op=True)
                self.works.append(_started(work))

    def finish(self) -> None:
        self.finish_works()


def buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters cut into runs of at most BUCKET_BYTES, or of one."""
    cut: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        if not cut or parameter.nbytes > room:
            cut.append([])
            room = BUCKET_BYTES
        cut[-1].append(parameter)
        room -= parameter.nbytes
    return cut


def _grad(parameter: nn.Parameter) -> Tensor:
    """What this rank holds of a gradient. A parameter that no loss reached counts as one with a zero gradient, on
    every rank alike."""
    return torch.zeros_like(local(parameter)) if parameter.grad is None else local(parameter.grad)


def _updated(weight: Tensor, update: Tensor, size: Tensor, rate: Tensor, decay: float) -> Tensor:
    """Move matrices, or rows of them, in place; `size` is that of their matrix's mean update."""
    if decay:  # only where it pulls the same way as the update; graded about zero, where a hard switch lets
        # rounding grow: rows summed in two orders part by 1e-4 in 20 steps then, by 4e-7 with this
        update += decay * weight * (update * weight.sign() * (4 / size)).clamp(0, 1)
    weight -= rate * update
    return weight


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))  # pyright: ignore[reportPrivateImportUsage]


def _length(run: slice) -> int:
    return run.stop - run.start


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work
