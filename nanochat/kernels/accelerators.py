"""Accelerators, a class for each vendor: what its runtime needs before its first call, and what its chips can do."""

import contextlib
import importlib
import importlib.util
import inspect
import os
import re
from types import ModuleType
from typing import Any, Literal

import torch

from nanochat.device import Runtime
from nanochat.ground import store
from nanochat.ground.cli import UserError
from nanochat.kernels.gradients import WrittenKernels
from nanochat.operators import TorchKernels

# Nominal dense bf16 FLOP/s by device name. MFU is the model's FLOPs per second divided by this peak (source: Chowdhery
# et al. 2022, PaLM). The first pattern that matches counts, so narrow patterns come before wide ones. A name that is
# not listed has no known peak and prints no MFU: a guess would look like a measurement. Sources: vendors' data
# sheets. The Ascend rows are the numbers in public use, because the vendor publishes none per chip.
PEAK_FLOPS = (
    (r"\bMIG\b", None),  # a part of a card
    (r"B200|B300", 2.25e15),
    (r"H200 NVL", 835e12),
    (r"H200|H800|H100 (80GB )?HBM3|H100.*SXM", 989e12),
    (r"H100.*NVL", 835e12),
    (r"H100", 756e12),
    (r"H20\b", 148e12),
    (r"A100\b|A800\b", 312e12),
    (r"L40S", 362e12),
    (r"L4\b", 121e12),
    (r"A10\b", 125e12),
    (r"RTX 5090", 209e12),
    (r"RTX 4090", 165e12),
    (r"RTX 3090", 71e12),
    (r"Ascend910_93|Ascend910B1|Ascend910B2", 376e12),  # 910_93 is one die of a 910C
    (r"Ascend910B3", 313e12),
    (r"Ascend910B4", 280e12),
)

# NPUs by name (source: torch_npu's SocVersion). The first generation (Ascend910A, Ascend910ProB, Ascend910B without a
# number) and the chips for inference lack fused operators for training, and bfloat16. All other chips have both:
# 910B1 to 910B4, 910_93.., 950.., and newer ones.
FIRST_NPUS = r"Ascend910(Pro|Premium)?[AB]?$"
INFERENCE_NPUS = r"Ascend310"

# Set where they are unset, before the runtime starts. docs/ascend.md says when to change one.
NPU_ENVIRONMENT = {
    "TASK_QUEUE_ENABLE": "2",  # prepare the next launch during the present one
    "CPU_AFFINITY_CONF": "2",  # give the launching threads their own cores
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",  # less fragmentation
    "HCCL_CONNECT_TIMEOUT": "600",  # seconds that ranks wait for each other at the start; the default is 120
    "HCCL_EXEC_TIMEOUT": "1200",  # seconds that a collective waits for a rank
}


class Accelerator(Runtime):
    """What the vendors share."""

    kind: str
    # With --deterministic: HCCL adds up in one order, a product splits its sums in one way (source: MindSpeed's
    # deterministic mode), and cuBLAS has one workspace.
    deterministic: dict[str, str]

    @property
    def module(self) -> ModuleType:
        return getattr(torch, self.kind)

    def start(self, local_rank: int, world_size: int, dtype: str, deterministic: bool) -> None:
        if deterministic:
            for variable, value in self.deterministic.items():
                os.environ.setdefault(variable, value)
            torch.use_deterministic_algorithms(True)  # torch_npu passes it on to CANN's operators
            # torch would also fill all new memory, to make reads of it repeatable. Nothing here reads unwritten memory.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        # The first call that needs the device would fail anyway, but without a line that names the fix.
        count = self.module.device_count()
        if local_rank >= count and world_size > 1:
            raise UserError(f"process {local_rank} has no device: {count} found; lower --nproc_per_node")
        if local_rank >= count:
            raise UserError(f"--device {self.kind}:{local_rank}: there are {count}, counted from 0")
        self.module.set_device(local_rank)
        if dtype == "bfloat16" and not self.has_bfloat16():
            name = self.device_name(local_rank)
            raise UserError(f"--dtype bfloat16: {name} has no bfloat16; use --dtype float32")

    def device_name(self, local_rank: int) -> str:
        return self.module.get_device_name(local_rank)

    def may_round(self) -> bool:
        return False

    def peak_flops(self, name: str) -> float | None:
        return next((flops for pattern, flops in PEAK_FLOPS if re.search(pattern, name)), None)

    def records(self, graphs: Literal["auto", "on", "off"]) -> bool:
        return graphs != "off" and self.kind not in _decoding().NOT_RECORDING

    def decoders(self, records: bool) -> Any:
        return _decoding().Decoders(records)


class NpuRuntime(Accelerator):
    kind = "npu"
    backend = "hccl"
    ray_options = {"resources": {"NPU": 1}}
    deterministic = {"HCCL_DETERMINISTIC": "true", "CLOSE_MATMUL_K_SHIFT": "1"}

    @property
    def loopback(self) -> dict[str, str]:
        # HCCL_IF_IP would override an interface that the user chose.
        return {} if "HCCL_SOCKET_IFNAME" in os.environ else {"HCCL_IF_IP": store.LOOPBACK}

    def start(self, local_rank: int, world_size: int, dtype: str, deterministic: bool) -> None:
        variables = dict(NPU_ENVIRONMENT)
        # An older torch_npu cannot change the task queue's level later, and does not record launches on the second one.
        if not hasattr(self.module, "set_task_queue_enable"):
            variables["TASK_QUEUE_ENABLE"] = "1"
        # torch has a vendor-free name for the allocator's options, and having both set is an error.
        if "PYTORCH_ALLOC_CONF" in os.environ:
            del variables["PYTORCH_NPU_ALLOC_CONF"]
        for variable, value in variables.items():
            os.environ.setdefault(variable, value)
        super().start(local_rank, world_size, dtype, deterministic)
        if world_size in (3, 5, 6, 7):  # the vendor's page on collectives leaves these out
            raise UserError(f"--nproc_per_node {world_size}: HCCL shares tensors out over 1, 2, 4, 8 or 16 devices")

    def has_bfloat16(self) -> bool:
        return bool(self.module.is_bf16_supported())

    def can_train(self, name: str) -> bool:
        return not re.match(INFERENCE_NPUS, name)

    def versions(self) -> dict[str, str]:
        torch_npu: Any = importlib.import_module("torch_npu")
        versions = {"torch_npu": torch_npu.__version__}
        for part in ("CANN", "DRIVER"):
            # An older torch_npu lacks the call. The runtime reads the versions from files, which may be elsewhere.
            with contextlib.suppress(AttributeError, RuntimeError):
                versions[part.lower()] = torch_npu.npu.utils.get_cann_version(part)
        return versions

    def kernels(self, dtype: torch.dtype, name: str) -> TorchKernels:
        npu: Any = importlib.import_module("nanochat.kernels.npu")  # it imports torch_npu
        has_fused = not re.match(f"{FIRST_NPUS}|{INFERENCE_NPUS}", name)
        return npu.NpuKernels(dtype) if has_fused else npu.PlainNpuKernels(dtype)

    def records(self, graphs: Literal["auto", "on", "off"]) -> bool:
        # The vendor recommends the second level of the task queue, and torch_npu does not record under it. From 2.13 on
        # `capture` leaves it for a moment; before, the level of a process never changes.
        is_stuck = os.environ.get("TASK_QUEUE_ENABLE") == "2" and not hasattr(self.module, "set_task_queue_enable")
        fix = "`unset TASK_QUEUE_ENABLE`, or set it to 1"
        if graphs == "on" and is_stuck:
            raise UserError(f"--graphs on: this torch_npu records nothing under TASK_QUEUE_ENABLE=2: {fix}")
        if graphs == "auto" and is_stuck:
            _decoding().stop_recording(
                self.kind,
                f"decoding is slower under TASK_QUEUE_ENABLE=2, where this torch_npu records no launches: {fix}",
            )
        return super().records(graphs)


class CudaRuntime(Accelerator):
    kind = "cuda"
    backend = "nccl"
    loopback = {"NCCL_SOCKET_IFNAME": "lo"}
    ray_options = {"num_gpus": 1}
    deterministic = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

    def start(self, local_rank: int, world_size: int, dtype: str, deterministic: bool) -> None:
        super().start(local_rank, world_size, dtype, deterministic)
        # TF32 rounds the inputs of an fp32 product to a fraction of 10 bits, so that tensor cores can compute it. A
        # request for float32 is a request for its precision.
        torch.set_float32_matmul_precision("highest" if dtype == "float32" else "high")

    def has_bfloat16(self) -> bool:
        return self.module.get_device_capability()[0] >= 8  # from the A100's generation on

    def versions(self) -> dict[str, str]:
        return {"cuda": str(torch.version.cuda)}

    def kernels(self, dtype: torch.dtype, name: str) -> TorchKernels:
        if _has_varlen(dtype):
            return importlib.import_module("nanochat.kernels.cuda").CudaKernels(dtype)
        return WrittenKernels(dtype)


def _decoding() -> Any:
    return importlib.import_module("nanochat.kernels.decoding")  # training has no decoder


def _has_varlen(dtype: torch.dtype) -> bool:
    """Whether torch has attention for rows of several documents, with windows, and this GPU runs it in this dtype."""
    if not importlib.util.find_spec("torch.nn.attention.varlen"):  # before torch 2.10
        return False
    operator = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    if not {"scale", "window_size"} <= set(inspect.signature(operator).parameters):
        return False
    # The operator is flash attention. It needs Ampere or later, and 16 bits.
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability() >= (8, 0)
