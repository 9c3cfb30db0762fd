"""Linear layers whose weights are laid out anew for a CPU's matrix products, which few rows at a time need most.

The engine decodes with a copy of the model made by `pack`. oneDNN's packed products read the weights with all threads,
where the plain ones of few rows take one, and a row has the same bits however many others stand beside it
(docs/measurements.md). They know no gradient.
"""

import torch
import torch.nn as nn
from torch import Tensor

from nanochat.gpt import GPT


class PackedLinear(nn.Module):
    """x (..., in) -> (..., out), with the weight (out, in) of a linear layer as it is now."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def pack(model: GPT) -> GPT:
    """Pack every linear layer of this model, in place; the head's weight goes, the packed one stays."""
    model.packed_head = PackedLinear(model.head_weight())
    model.head = None
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, PackedLinear(child.weight, child.bias))
    return model
