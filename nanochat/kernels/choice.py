"""The choice of operators on each kind of device, by the dtype of the products and the name of the chip."""

import importlib
import importlib.util
import inspect
import re
from typing import Any

import torch

from nanochat.device import INFERENCE_NPUS
from nanochat.kernels.cpu import CpuKernels
from nanochat.kernels.gradients import WrittenKernels
from nanochat.operators import TorchKernels

# NPUs by name (source: torch_npu's SocVersion). The first generation (Ascend910A, Ascend910ProB, Ascend910B without a
# number) and the chips for inference lack fused operators for training, and bfloat16. All other chips have both:
# 910B1 to 910B4, 910_93.., 950.., and newer ones.
FIRST_NPUS = r"Ascend910(Pro|Premium)?[AB]?$"


def for_npu(dtype: torch.dtype, name: str) -> TorchKernels:
    npu: Any = importlib.import_module("nanochat.kernels.npu")  # it imports torch_npu
    has_fused = not re.match(f"{FIRST_NPUS}|{INFERENCE_NPUS}", name)
    return npu.NpuKernels(dtype) if has_fused else npu.PlainNpuKernels(dtype)


def for_cuda(dtype: torch.dtype, name: str) -> TorchKernels:
    if _has_varlen(dtype):
        return importlib.import_module("nanochat.kernels.cuda").CudaKernels(dtype)
    return WrittenKernels(dtype)


def for_cpu(dtype: torch.dtype, name: str) -> TorchKernels:
    return CpuKernels(dtype)


def _has_varlen(dtype: torch.dtype) -> bool:
    """Whether torch has attention for rows of several documents, with windows, and this GPU runs it in this dtype."""
    if not importlib.util.find_spec("torch.nn.attention.varlen"):  # before torch 2.10
        return False
    operator = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    if not {"scale", "window_size"} <= set(inspect.signature(operator).parameters):
        return False
    # The operator is flash attention. It needs Ampere or later, and 16 bits.
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability() >= (8, 0)
