"""Muon on several ranks: rows of matrices travel to the ranks that orthogonalise the matrices, and back.

ddp and fsdp share this part of the exchange; ddp.py and fsdp.py add the exchange of gradients and weights. `Travel` is
for what the ranks exchange within a forward pass.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from nanochat.ground.sharding import Exchange, Rows
from nanochat.optim import Stack, copy_each
from nanochat.parallel.mesh import Place

# A step of Muon on 2 ranks, for 3 matrices A, B, C of 4 rows each. Rank 0 owns A and B, rank 1 owns C:
#
#     phase                             rank 0 has                        rank 1 has
#     backward                          rank 0's gradients of A, B, C     rank 1's gradients of A, B, C
#     1   reduce-scatter, sum           rows 0-1 of A, B, C               rows 2-3 of A, B, C
#     2a  all-to-all to the owners      all rows of A, B                  all rows of C
#     2b  orthogonalise                 updates of A, B                   update of C
#     2c  all-to-all to the holders     rows 0-1 of the updates           rows 2-3 of the updates
#         move the weights              new rows 0-1 of A, B, C           new rows 2-3 of A, B, C
#     3   all-gather                    new A, B, C                       new A, B, C
#
# AdamW skips 2a to 2c: each rank updates the rows that phase 1 gave it. Under ddp phases 1 and 3 are in ddp.py, under
# fsdp FSDP2 does them.


class RankExchange(Exchange):
    """The exchange between ranks that each hold rows of every matrix and own a few whole matrices.

    The detour of phase 2 takes 2/R of the matrices' bytes on R ranks, in addition to phases 1 and 3. Each matrix's
    update is computed only on the rank that owns it.
    """

    def __init__(self, place: Place):
        super().__init__()
        self.place = place
        self._routes: dict[Stack, Route] = {}

    def owned(self, count: int) -> slice:
        return self.place.share(count)

    def as_part(self, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        return self.place.as_part(rows, shape)

    def to_owners(self, stack: Stack) -> Tensor:
        # 2a. This rank's rows leave for the owners. The rows of its own matrices arrive and move to their places.
        route = self._route(stack)
        rows = [part.gradient() for part in route.held]
        arrived = self._all_to_all(stack, rows, stack.shape[1], route.held_counts, route.place_counts)
        grad = arrived.new_empty(len(stack.owned), *stack.shape)
        targets = [grad[place] for place in route.places]
        copy_each(targets, arrived.split([len(target) for target in targets]))
        return grad

    def to_holders(self, stack: Stack, update: Tensor, size: Tensor) -> tuple[list[Rows], Tensor, Tensor]:
        # 2c. The way back: the rows of the updates leave this owner, and the rows of this rank's shares arrive. Each
        # row travels with the mean size of its matrix's update, which the weight decay needs.
        route = self._route(stack)
        rows, columns = stack.shape
        with_size = torch.cat((update, size.expand(-1, rows, 1)), dim=2)  # (owned, rows, columns + 1)
        parts = [with_size[place] for place in route.places]
        arrived = self._all_to_all(stack, parts, columns + 1, route.place_counts, route.held_counts)
        return route.held, arrived[:, :columns], arrived[:, columns:]

    def _route(self, stack: Stack) -> "Route":
        if stack not in self._routes:
            self._routes[stack] = Route(stack, self.place)
        return self._routes[stack]

    def _all_to_all(
        self, stack: Stack, rows: list[Tensor], columns: int, leaving: list[int], arriving: list[int]
    ) -> Tensor:
        """Send `leaving[r]` of the rows to each rank r; returns the `arriving[r]` rows of each, in rank order."""
        device = stack.matrices[0].share.parameter.device
        sent = torch.cat(rows) if rows else torch.empty(0, columns, device=device)
        arrived = sent.new_empty(sum(arriving), columns)
        dist.all_to_all_single(arrived, sent, arriving, leaving, group=self.place.group)
        return arrived


class Route:
    """The route of a stack's rows: from the shares that hold them to the owners of their matrices, and back.

    Both ends list the rows that they exchange in the order of the stack.
    """

    def __init__(self, stack: Stack, place: Place):
        # The rows that this rank holds, sorted by the owner of the matrix, and the number of rows per owner.
        self.held: list[Rows] = []
        self.held_counts: list[int] = []
        # The places of rows in the matrices that this rank owns (owned, rows, columns), sorted by their holder, and the
        # number of rows per holder. A place is (matrix, rows of it).
        self.places: list[tuple[int, slice]] = []
        self.place_counts: list[int] = []
        # In the example of 3 matrices on 2 ranks, rank 0 has:
        #     held    rows 0-1 of A and B for owner 0, of C for owner 1          held_counts  [4, 2]
        #     places  rows 0-1 of A and B from rank 0, rows 2-3 from rank 1      place_counts [4, 4]
        for rank, run in enumerate(place.shares(len(stack.matrices))):
            # That rank's matrices, this rank's rows.
            count = 0
            for matrix in stack.matrices[run]:
                rows = _held_rows(matrix, place, place.rank)
                if rows:
                    first = place.share(matrix.share.parameter.size(0)).start
                    self.held.append(Rows(matrix.share, rows.start - first, rows.stop - first))
                count += len(rows)
            self.held_counts.append(count)
            # This rank's matrices, that rank's rows.
            count = 0
            for i, matrix in enumerate(stack.owned):
                rows = _held_rows(matrix, place, rank)
                if rows:
                    self.places.append((i, slice(rows.start - matrix.start, rows.stop - matrix.start)))
                count += len(rows)
            self.place_counts.append(count)


def _held_rows(matrix: Rows, place: Place, rank: int) -> range:
    """The rows of a matrix that a rank holds, counted in the rows of the whole parameter."""
    share = place.shares(matrix.share.parameter.size(0))[rank]
    return range(max(matrix.start, share.start), min(matrix.stop, share.stop))


class Travel(torch.autograd.Function):
    """Tensors go one `way`; their gradients take the way `back`. It keeps no tensor."""

    @staticmethod
    def forward(ctx, way: Callable[..., Any], back: Callable[..., Any], *parts: Tensor) -> Any:
        ctx.back = back
        return way(*parts)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        arrived = ctx.back(*grads)
        return None, None, *(arrived if isinstance(arrived, tuple) else (arrived,))
