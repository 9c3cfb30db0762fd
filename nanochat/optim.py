"""Muon for matrices and AdamW for the rest, with state and work shared out over the ranks.

The optimizer knows parameters by group, never by model. `reduce` sums the ranks' gradients, `step` divides
by the number of targets and updates: every rank reduces, updates and sends back only its own share (source:
Rajbhandari et al. 2020, ZeRO stage 1). Nothing in a step waits for the device: a step that must be skipped
is skipped by arithmetic.

Muon: Jordan et al. 2024; orthogonalisation by Amsel et al. 2025, Polar Express (arXiv 2505.16932);
per-neuron second moment by Li et al. 2025, NorMuon (arXiv 2510.05491); cautious weight decay by
Chen et al. 2025 (arXiv 2510.12402). AdamW: Loshchilov and Hutter 2019.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Five steps of the Polar Express iteration for singular values down to 1e-3 of the norm, its safety factor included.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
SHARD_ELEMENTS = 4096  # smaller AdamW tensors are updated by every rank alike: cheaper than sending them


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


class Optimizer:
    """Muon and AdamW over groups. `dtype` is that of the orthogonalisation's products."""

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        *,
        rank: int = 0,
        world_size: int = 1,
        dtype: torch.dtype = torch.bfloat16,
    ):
        self.groups = [g for g in groups if g.parameters]
        self.rank, self.world_size, self.dtype = rank, world_size, dtype
        names = [name for g in self.groups for name, _ in g.parameters]
        assert len(names) == len(set(names)), "a parameter stands in two groups"
        self._plans = [_MuonPlan(g, self) if g.kind == "muon" else _AdamWPlan(g, self) for g in self.groups]

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
        targets = targets.clamp(min=1.0)
        for plan in self._plans:
            plan.update(targets, ok, lr_scale, momentum, weight_decay_scale)
        for plan in self._plans:
            plan.finish()
        self.zero_grad()

    def zero_grad(self) -> None:
        for group in self.groups:
            for _, parameter in group.parameters:
                parameter.grad = None

    @torch.no_grad()
    def reduce(self) -> Tensor:
        """Sum all gradients over the ranks, each rank keeping its share; then `step` may follow.

        Returns the squared norm of this rank's share, 0-D: the shares' sum over the ranks is that of the whole
        gradient, and not finite if any gradient of any rank is not.
        """
        for plan in self._plans:
            plan.reduce()
        shares = [grad for plan in self._plans for grad in plan.reduced() if grad.numel()]
        return torch.stack(torch._foreach_norm(shares)).square().sum() if shares else torch.zeros(())  # pyright: ignore[reportPrivateImportUsage]

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's share of the state. The shares of all ranks, in rank order, are the whole."""
        return {name: tensor for group in self.groups for name, tensor in group.state.items()}

    def load_state_dict(self, shares: Sequence[dict[str, Tensor]]) -> None:
        """Take this rank's share out of the shares of all ranks of a run of any world size.

        Raises ValueError: when they were not made by an optimizer of the same groups.
        """
        for plan in self._plans:
            for name, tensor in plan.group.state.items():
                if any(name not in share for share in shares):
                    raise ValueError(f"the optimizer state has no {name}: it belongs to another model or optimizer")
                plan.load(tensor, name, [share[name] for share in shares])


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
    """One group's part of a step: reduce the gradients, update this rank's share, finish by gathering."""

    works: list[dist.Work]  # collectives under way

    def finish_works(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []


class _MuonPlan(_Plan):
    """Matrices, stacked by shape, each rank owning an equal run of every stack."""

    def __init__(self, group: ParameterGroup, optimizer: Optimizer):
        self.group, self.optimizer = group, optimizer
        self.stacks: dict[tuple[int, int], list[tuple[nn.Parameter, int, int]]] = {}
        for _, parameter in group.parameters:
            start = 0
            for rows in group.row_splits or (parameter.size(0),):
                self.stacks.setdefault((rows, parameter.size(1)), []).append((parameter, start, start + rows))
                start += rows
            assert start == parameter.size(0), "row_splits must cover a parameter's rows"
        _, first = group.parameters[0]
        for (rows, columns), pieces in self.stacks.items():
            share = -(-len(pieces) // optimizer.world_size)
            key = self._key((rows, columns))
            neuron = (rows, 1) if rows >= columns else (1, columns)
            group.state[f"{key}.momentum"] = torch.zeros(share, rows, columns, device=first.device)
            group.state[f"{key}.second_moment"] = torch.zeros(share, *neuron, device=first.device)
        self.grads: dict[tuple[int, int], Tensor] = {}
        self.works: list[dist.Work] = []
        self.gathered: dict[tuple[int, int], Tensor] = {}

    def _key(self, shape: tuple[int, int]) -> str:
        return f"muon.{self.group.parameters[0][0]}.{shape[0]}x{shape[1]}"

    def _stack(self, tensors: list[Tensor]) -> Tensor:
        """Stack to a count the ranks divide evenly; the padding is zeros."""
        missing = -len(tensors) % self.optimizer.world_size
        return torch.stack(tensors + [torch.zeros_like(tensors[0])] * missing)

    def reduce(self) -> None:
        for shape, pieces in self.stacks.items():
            grads = self._stack([_grad(p)[a:b] for p, a, b in pieces])
            if self.optimizer.world_size > 1:
                mine = grads.new_empty(grads.size(0) // self.optimizer.world_size, *shape)
                self.works.append(_started(_reduce_scatter(mine, grads, async_op=True)))
                grads = mine
            self.grads[shape] = grads

    def reduced(self) -> list[Tensor]:
        """This rank's share of the summed gradients."""
        self.finish_works()
        return list(self.grads.values())

    def update(self, targets: Tensor, ok: Tensor, lr_scale: float, momentum: float, weight_decay_scale: float) -> None:
        group, world_size, rank = self.group, self.optimizer.world_size, self.optimizer.rank
        decay = group.weight_decay * weight_decay_scale
        for shape, pieces in self.stacks.items():
            rows, columns = shape
            grad = torch.where(ok > 0, self.grads.pop(shape) / targets, 0.0)  # 0 x NaN would still be NaN
            average = group.state[f"{self._key(shape)}.momentum"]
            average.lerp_(grad, (1 - momentum) * ok)
            update = orthogonalize(grad.lerp_(average, momentum), self.optimizer.dtype).float()  # Nesterov's look-ahead

            # Even out the neurons' step sizes by a running second moment, keeping each matrix's norm.
            second = group.state[f"{self._key(shape)}.second_moment"]
            square = update.square().mean(dim=-1 if rows >= columns else -2, keepdim=True)
            second.lerp_(square, (1 - group.betas[1]) * ok)
            even = second.clamp(min=1e-10).rsqrt()
            norm, new_norm = square.sum((1, 2), keepdim=True), (square * even.square()).sum((1, 2), keepdim=True)
            update *= even * (norm / new_norm.clamp(min=1e-10)).sqrt()

            own = pieces[rank * len(average) : (rank + 1) * len(average)]
            weights = [p.detach()[a:b] for p, a, b in own]
            weights += [torch.zeros_like(pieces[0][0][: shape[0]])] * (len(average) - len(own))
            weight = torch.stack(weights)
            rate = group.learning_rate * lr_scale * max(1.0, rows / columns) ** 0.5
            if decay:  # only where it pulls the same way as the update; graded about zero, where a hard switch lets
                # rounding grow: rows summed in two orders part by 1e-4 in 20 steps then, by 4e-7 with this
                size = square.mean(dim=(1, 2), keepdim=True).sqrt().clamp(min=1e-10)  # of the matrix's mean update
                update += decay * weight * (update * weight.sign() * (4 / size)).clamp(0, 1)
            weight -= rate * ok * update
            if world_size > 1:
                full = weight.new_empty(len(average) * world_size, *shape)
                self.works.append(_started(_all_gather(full, weight, async_op=True)))
                weight = full
            self.gathered[shape] = weight

    def finish(self) -> None:
        self.finish_works()
        for shape, pieces in self.stacks.items():
            new = list(self.gathered.pop(shape)[: len(pieces)].unbind())
            torch._foreach_copy_([p.detach()[a:b] for p, a, b in pieces], new)  # pyright: ignore[reportPrivateImportUsage]

    def load(self, tensor: Tensor, name: str, shares: list[Tensor]) -> None:
        shape = next(s for s in self.stacks if name.startswith(self._key(s) + "."))
        count, whole = len(self.stacks[shape]), torch.cat(list(shares))
        if whole.shape[1:] != tensor.shape[1:] or len(whole) != count + -count % len(shares):  # with its padding
            raise ValueError(f"the optimizer state {name} has another shape: it belongs to another model")
        mine = whole[:count][self.optimizer.rank * len(tensor) : (self.optimizer.rank + 1) * len(tensor)]
        tensor.zero_()
        tensor[: len(mine)].copy_(mine)


class _AdamWPlan(_Plan):
    """Any tensors: large tensors are shared out by rows, small ones are updated by every rank alike."""

    def __init__(self, group: ParameterGroup, optimizer: Optimizer):
        self.group, self.optimizer = group, optimizer
        self.shards: list[tuple[nn.Parameter, slice]] = []  # the rows this rank updates
        for name, parameter in group.parameters:
            rows = parameter.size(0)
            world_size = optimizer.world_size
            shared = world_size > 1 and parameter.numel() >= SHARD_ELEMENTS and rows % world_size == 0
            size = rows // world_size if shared else rows
            start = optimizer.rank * size if shared else 0
            self.shards.append((parameter, slice(start, start + size)))
            group.state[f"adamw.{name}.first_moment"] = torch.zeros_like(parameter[:size], requires_grad=False)
            group.state[f"adamw.{name}.second_moment"] = torch.zeros_like(parameter[:size], requires_grad=False)
        self.key = f"adamw.{group.parameters[0][0]}.steps"
        group.state[self.key] = torch.zeros(1, device=group.parameters[0][1].device)
        self.works: list[dist.Work] = []
        self.grads: list[Tensor] = []

    def _is_shared(self, index: int) -> bool:
        parameter, rows = self.shards[index]
        return rows.stop - rows.start < parameter.size(0)

    def reduce(self) -> None:
        for i, (parameter, rows) in enumerate(self.shards):
            grad = _grad(parameter)
            if self._is_shared(i):
                mine = torch.empty_like(grad[rows])
                self.works.append(_started(_reduce_scatter(mine, grad.contiguous(), async_op=True)))
                grad = mine
            elif self.optimizer.world_size > 1:
                self.works.append(_started(dist.all_reduce(grad, async_op=True)))
            self.grads.append(grad)

    def reduced(self) -> list[Tensor]:
        """This rank's share of the summed gradients; of those that every rank holds, rank 0 has the share."""
        self.finish_works()
        return [grad for i, grad in enumerate(self.grads) if self._is_shared(i) or self.optimizer.rank == 0]

    def update(self, targets: Tensor, ok: Tensor, lr_scale: float, momentum: float, weight_decay_scale: float) -> None:
        group = self.group
        steps = group.state[self.key]
        steps += ok
        names = [name for name, _ in group.parameters]
        # torch's one fused kernel: it divides by grad_scale, and touches nothing when found_inf is 1
        torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
            [p.detach()[rows] for p, rows in self.shards],
            self.grads,
            [group.state[f"adamw.{name}.first_moment"] for name in names],
            [group.state[f"adamw.{name}.second_moment"] for name in names],
            [],
            [steps] * len(names),
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
        self.grads = []
        for i, (parameter, rows) in enumerate(self.shards):
            if self._is_shared(i):
                mine = parameter.detach()[rows].clone()
                self.works.append(_started(_all_gather(parameter.detach(), mine, async_op=True)))

    def finish(self) -> None:
        self.finish_works()

    def load(self, tensor: Tensor, name: str, shares: list[Tensor]) -> None:
        if name == self.key:
            tensor.copy_(shares[0])
            return
        index = next(i for i, (n, _) in enumerate(self.group.parameters) if name.startswith(f"adamw.{n}."))
        parameter, rows = self.shards[index]
        whole = shares[0] if len(shares[0]) == len(parameter) else torch.cat(list(shares))
        if whole.shape != parameter.shape:
            raise ValueError(f"the optimizer state {name} has another shape: it belongs to another model")
        tensor.copy_(whole[rows])


def _grad(parameter: nn.Parameter) -> Tensor:
    """A parameter that no loss reached counts as one with a zero gradient, on every rank alike."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _reduce_scatter(output: Tensor, whole: Tensor, **options: Any) -> dist.Work | None:
    named = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13
    return named(output, whole, **options)


def _all_gather(whole: Tensor, share: Tensor, **options: Any) -> dist.Work | None:
    named = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    return named(whole, share, **options)


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work
