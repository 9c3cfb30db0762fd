"""Products of rows in groups, each with its own matrix, for mixtures of experts (experts/).

Legend: E groups, O outputs, I inputs.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class Groups:
    """Rows that are sorted by group: how many there are, and in each group, a tensor (E,) on the device."""

    def __init__(self, rows: int, counts: Tensor):
        self.rows = rows
        self.counts = counts

    @functools.cached_property
    def ends(self) -> Tensor:
        """The end of each group, (E,) in int32."""
        return self.counts.cumsum(0, dtype=torch.int32)

    @functools.cached_property
    def sizes(self) -> list[int]:
        """The counts on the host, which waits for the device."""
        if type(self.counts) is not Tensor:  # without data, such as in a dry run: groups of equal sizes
            return even_sizes(self.rows, len(self.counts))
        return self.counts.tolist()


def even_sizes(rows: int, groups: int) -> list[int]:
    """The sizes of groups that divide rows as evenly as possible."""
    return [rows // groups + (group < rows % groups) for group in range(groups)]


def loop_product(
    product: Callable[..., Tensor], x: Tensor, weight: Tensor, groups: Groups, cast: Tensor | None = None
) -> Tensor:
    """x (rows, I), weight (E x O, I) -> (rows, O): one `product` after the other. The host waits for the counts."""
    experts = len(groups.sizes)
    weights = weight.unflatten(0, (experts, -1)).unbind()
    casts = [None] * experts if cast is None else cast.unflatten(0, (experts, -1)).unbind()
    parts = []
    for rows, its_weight, its_cast in zip(x.split(groups.sizes), weights, casts, strict=True):
        if len(rows):
            parts.append(product(rows, its_weight, its_cast))
    # Without any row the result still has to depend on its inputs.
    return torch.cat(parts) if parts else product(x, weights[0], casts[0])


# ---------------------------------------------------------------------- one operator for all groups


class GroupedOperators:
    """torch's `grouped_mm`; npu.py replaces it. `counts` and `ends` of the groups stay on the device."""

    @staticmethod
    def fits(x: Tensor, outputs: int) -> bool:
        """Whether it is fast here. It reads bf16 whose rows begin at multiples of 16 bytes, also in the backward pass;
        torch computes other inputs group by group."""
        aligned = x.size(1) % 8 == 0 and outputs % 8 == 0
        return hasattr(F, "grouped_mm") and x.dtype == torch.bfloat16 and aligned

    def rows_by_matrices(self, x: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
        """x (rows, A), matrices (E, A, B), which may be a transposed view -> (rows, B)."""
        return F.grouped_mm(x, matrices, offs=groups.ends)

    def columns_by_rows(self, x: Tensor, y: Tensor, groups: Groups) -> Tensor:
        """x (rows, A), y (rows, B) -> for each group the sum over its rows x^T y (E, A, B)."""
        return F.grouped_mm(x.T, y, offs=groups.ends)


def grouped_product(
    operators: GroupedOperators, x: Tensor, weight: Tensor, groups: Groups, cast: Tensor | None = None
) -> Tensor:
    """The same as `loop_product` with a device's grouped operators, which do not wait for the counts."""
    return _GroupedProduct.apply(x, weight if cast is None else cast, groups, operators)  # type: ignore[no-any-return]


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, groups: Groups, operators: GroupedOperators) -> Tensor:
        matrices = weight.to(x.dtype).unflatten(0, (len(groups.counts), -1))  # (E, O, I)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, matrices)  # a frozen weight needs no x (lora.py)
        ctx.weight_dtype = weight.dtype
        ctx.groups = groups
        ctx.operators = operators
        return operators.rows_by_matrices(x, matrices.mT, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        x, matrices = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = ctx.operators.rows_by_matrices(grad, matrices, ctx.groups)
        if ctx.needs_input_grad[1]:
            grad_weight = ctx.operators.columns_by_rows(grad, x, ctx.groups)  # (E, O, I)
            grad_weight = grad_weight.flatten(0, 1).to(ctx.weight_dtype)
        return grad_x, grad_weight, None, None
