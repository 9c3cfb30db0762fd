"""The exchange between the ranks of a run in a step of the optimizer. This is the version for one process.

The exchanges of several ranks are in parallel/; each overrides the methods that it needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanochat.sharding import local


class Share:
    """The rows of one parameter that this rank updates. One process updates all of them."""

    is_part = False  # whether other ranks update the other rows

    def __init__(self, parameter: nn.Parameter):
        self.parameter = parameter
        self.grad = torch.empty(0)  # the gradient of these rows, between `reduce` and `step`

    def weight(self) -> Tensor:
        """These rows, over the parameter's memory."""
        return local(self.parameter)

    def take_gradient(self) -> None:
        """Move the gradient here from the parameter. Where no loss reached the parameter, it is zero."""
        grad = self.parameter.grad
        self.grad = torch.zeros_like(local(self.parameter)) if grad is None else local(grad)
        self.parameter.grad = None


@dataclass(frozen=True)
class Rows:
    """Rows [start, stop) of a parameter: a matrix, or the part of a matrix that a share holds.

    A matrix is counted in the parameter's rows, a part in the share's. On one process the two are the same.
    """

    share: Share
    start: int
    stop: int

    def gradient(self) -> Tensor:
        return self.share.grad[self.start : self.stop]

    def weight(self) -> Tensor:
        return self.share.weight()[self.start : self.stop]


class Exchange:
    """The exchange of one process, which sends nothing. An exchange belongs to one optimizer."""

    # Gradients arrive divided by this number where a backend computes means over the ranks instead of sums.
    divided_by = 1

    def __init__(self) -> None:
        # Everything that `share` has returned, in the order in which a backward completes the gradients.
        self.shares: Sequence[Any] = []

    def share(self, parameter: nn.Parameter, is_matrix: bool) -> Share:
        """The rows of a parameter that this rank updates; `is_matrix` for those that Muon updates."""
        return Share(parameter)

    def before_backward(self, is_last: bool) -> None:
        """Prepare for a backward. Gradients may travel while it runs; whole ones do so in the last one of a step."""

    def reduce(self) -> list[Tensor]:
        """Fill every share's `grad` with the sum over the ranks; returns the gradients that count in this rank's norm.

        A gradient that several ranks hold counts on only one of them.
        """
        for share in self.shares:
            share.take_gradient()
        return [share.grad for share in self.shares]

    def owned(self, count: int) -> slice:
        """The matrices, out of `count`, that this rank orthogonalises."""
        return slice(0, count)

    def to_owners(self, stack: Any) -> Tensor:
        """The whole gradients of the matrices that this rank owns (owned, rows, columns)."""
        return torch.stack([matrix.gradient() for matrix in stack.matrices])

    def to_holders(self, stack: Any, update: Tensor, size: Tensor) -> tuple[list[Rows], Tensor, Tensor]:
        """The rows of the stack's matrices in this rank's shares, with their updates and sizes. `update` and `size` are
        the results of `Muon.direction` for the owned matrices."""
        return stack.matrices, update, size

    def send_weight(self, share: Any) -> None:
        """Start to send the new rows of a share to the other ranks."""

    def receive_weights(self) -> None:
        """Wait until every parameter has its new rows from all ranks."""

    def as_part(self, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        """This rank's rows of a tensor of `shape`; a DTensor over the same memory if other ranks have other rows."""
        return rows
