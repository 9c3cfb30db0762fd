"""The device: an Ascend NPU, an NVIDIA GPU or a plain CPU as one frozen value.

`init()` finds the device, joins the process group under torchrun, and returns a `Device`. The rest of the project uses
that value. Only this file and kernels/ name a vendor: `torch.npu` mirrors `torch.cuda`, so most of what a `Device` does
is a call of `module`. What differs between vendors is behind `Runtime`, and the operators behind `Device.kernels`.
"""

import datetime
import os
import platform
import re
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist

from nanochat.ground import host, rooms, screen, store
from nanochat.ground.cli import UserError, end_with_launcher, explainers, ignore_exported_ranks
from nanochat.operators import TorchKernels

# `auto` looks for them in this order: an accelerator before the CPU.
KINDS = ("npu", "cuda", "cpu")
DTYPES = ("auto", "bfloat16", "float32")

RANK_SEEDS = 1_000_003  # between the seeds of neighbouring ranks: `--seed 1` must not be rank 1 of `--seed 0`
# Above both HCCL timeouts: HCCL's own message names the cause, torch's watchdog only kills the process.
PROCESS_GROUP_TIMEOUT = datetime.timedelta(seconds=1800)


class Runtime:
    """What differs between kinds of devices when a process starts, as it is on a CPU. kernels/accelerators.py has the
    vendors'."""

    backend = "gloo"  # the library of collectives that torch.distributed uses
    # The variable that has it listen where only this host reaches it.
    loopback = {"GLOO_SOCKET_IFNAME": "lo"}
    ray_options: dict[str, Any] = {"num_cpus": 1}  # the resources of a worker of a Ray cluster: one device

    def start(self, local_rank: int, world_size: int, dtype: str, deterministic: bool) -> None:
        """Set up the runtime, its variables before its first call, and take this process's device.

        Raises UserError: when the device does not exist or lacks the requested dtype, or the vendor's collectives do
        not serve this many processes.
        """
        host.keep_freed_memory()
        host.share_cores(world_size)

    def device_name(self, local_rank: int) -> str:
        return host.cpu_name()

    def has_bfloat16(self) -> bool:
        """Whether the hardware computes in bf16."""
        return host.has_bfloat16()

    def may_round(self) -> bool:
        """`Device.may_round`, where products in fp32 were not requested."""
        # With AVX-512 the bits of a row still do not depend on the rows next to it (batches of 1 to 64 on an Intel
        # Xeon, 2026-11-27); with AVX2 they would.
        return "avx512f" in host.cpu_features()

    def can_train(self, name: str) -> bool:
        """Whether a chip of this name is made for training, and not only for inference."""
        return True

    def peak_flops(self, name: str) -> float | None:
        """Nominal dense bf16 FLOP/s of a device of this name; None if it is not known."""
        return None

    def versions(self) -> dict[str, str]:
        """The versions of the vendor's software."""
        return {}

    def kernels(self, dtype: torch.dtype, name: str) -> TorchKernels:
        """The operators of a model. Matrix products are in `dtype`; `name` is the chip's."""
        raise NotImplementedError

    def records(self, graphs: Literal["auto", "on", "off"]) -> bool:
        """Whether decoding records its launches and replays them as one.

        Raises UserError: when recording is requested where it is impossible.
        """
        if graphs == "on":
            raise UserError("--graphs on: a CPU launches nothing that could be recorded; leave it out")
        return False

    def decoders(self, records: bool) -> Any:
        """What makes an engine's decoders, which record launches or do not; None: they are `engine.Slots`."""
        return None


@dataclass(frozen=True)
class Device:
    """The device on which this process computes, and its place among the other processes."""

    kind: str  # "npu", "cuda" or "cpu"
    module: ModuleType  # torch.npu, torch.cuda or torch.cpu
    # The dtype of matrix products: bfloat16 where the hardware computes in it, float32 elsewhere or on request.
    # Parameters and sums stay in fp32.
    dtype: torch.dtype
    # Two hosts with four devices each run eight processes:
    #
    #     host          A              B
    #     rank          0  1  2  3     4  5  6  7     decides which share of the data a process reads (`data_rank`)
    #     local_rank    0  1  2  3     0  1  2  3     decides which device of its host it uses
    rank: int  # among all processes
    local_rank: int  # among the processes of this host; also the index of this process's device
    world_size: int
    name: str  # as the runtime reports it, e.g. "Ascend910B3"
    # Dense FLOP/s in `dtype`, to which MFU compares the model's; None where it is unknown.
    peak_flops: float | None
    # Whether decoding may round a model's matrices to 16 bits where that is faster (`TorchKernels.pack`).
    may_round: bool = False
    context_ranks: int = 1  # this many neighbouring ranks share their rows: they read the same data

    @property
    def data_rank(self) -> int:
        """The share of the data that this process reads, out of `data_ranks`."""
        return self.rank // self.context_ranks

    @property
    def data_ranks(self) -> int:
        return self.world_size // self.context_ranks

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.kind) if self.kind == "cpu" else torch.device(self.kind, self.local_rank)

    def __str__(self) -> str:
        return f"{self.world_size} x {self.name} ({self.kind}, {str(self.dtype).removeprefix('torch.')})"

    @property
    def runtime(self) -> Runtime:
        return runtime_of(self.kind)

    @property
    def can_train(self) -> bool:
        return self.runtime.can_train(self.name)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def kernels(self) -> TorchKernels:
        """The operators for a model that runs here: `GPT(config, device.kernels)`."""
        return self.runtime.kernels(self.dtype, self.name)

    def synchronize(self) -> None:
        """Wait until everything launched so far has run."""
        # An accelerator runs after the host: a call returns when its work is queued. A clock read without this wait
        # measures only the queueing. A CPU runs each operator before the call returns.
        if self.kind != "cpu":
            self.module.synchronize()

    def peak_memory(self) -> int:
        """The most bytes that the device's allocator held; on a CPU, that the process held."""
        return host.peak_memory() if self.kind == "cpu" else self.module.max_memory_allocated()

    def total_memory(self) -> int | None:
        """Bytes of device memory; None for a CPU. speedrun_npu.sh chooses its batch sizes by it."""
        if self.kind == "cpu":
            return None
        return self.module.get_device_properties(self.local_rank).total_memory

    def free_memory(self) -> int | None:
        """Bytes of memory that nothing uses yet, on a CPU of the host; None where the system does not say."""
        return host.free_memory() if self.kind == "cpu" else self.module.mem_get_info()[0]

    def versions(self) -> dict[str, str]:
        """The versions of the software that a measurement depends on."""
        return {"python": platform.python_version(), "torch": torch.__version__, **self.runtime.versions()}

    def seed(self, seed: int) -> None:
        """Seed torch's generators on the host and on this device, differently on each rank.

        Only dropout draws from them. With one seed, row i of every rank's batch would have the same mask.
        """
        torch.manual_seed(seed + RANK_SEEDS * self.rank)  # also seeds every accelerator that torch knows

    def rng_state(self) -> dict[str, torch.Tensor]:
        """Every generator state of this process, for a checkpoint."""
        state = {"host": torch.get_rng_state()}
        if self.kind != "cpu":
            state["device"] = self.module.get_rng_state(self.local_rank)
        return state

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        torch.set_rng_state(state["host"])
        if self.kind != "cpu" and "device" in state:
            self.module.set_rng_state(state["device"], self.local_rank)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a host tensor here. From pinned memory the copy is asynchronous: the host does not wait for it."""
        # The system never moves pinned memory, so the device can read it at any time without the host. From ordinary
        # memory the host would have to copy the tensor first, and wait.
        if self.kind == "cpu":
            return tensor
        return tensor.pin_memory().to(self.torch_device, non_blocking=True)


def kind_of(requested: str) -> str:
    """npu, cuda or cpu for a `requested` device as `init` takes it, without starting the device's runtime.

    Raises UserError: when it names none of them, or this machine does not have it.
    """
    kind, _, index = requested.partition(":")  # "npu:1" -> "npu", "1"
    if kind not in ("auto", *KINDS) or (index and not index.isdigit()):
        raise UserError(f"--device {requested!r}: one of auto, {', '.join(KINDS)}, or one with an index such as npu:0")
    if kind == "auto":
        return next(candidate for candidate in KINDS if _available(candidate))  # a CPU always is
    if not _available(kind):
        raise UserError(f"--device {kind}: none found here; run `python check_npu.py` to see why, or use --device cpu")
    return kind


def runtime_of(kind: str) -> Runtime:
    """The runtime of a kind of device."""
    return rooms.find("kernels", kind)()


# ---------------------------------------------------------------------- starting


def init(requested: str = "auto", dtype: str = "auto", deterministic: bool = False) -> Device:
    """Find the device, set up its runtime, and join the process group under torchrun.

    `requested` is auto, npu, cuda or cpu, with an optional index for a single process ("npu:1"). `dtype` is auto,
    bfloat16 or float32. `deterministic` makes an accelerator add up in one order, which is slower; a CPU always does.
    Raises UserError: when the requested device is not here, or cannot do the requested bfloat16.
    """
    kind = kind_of(requested)
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype!r}: one of {', '.join(DTYPES)}")

    # The place among the processes. torchrun sets these variables; without it there is one process.
    ignore_exported_ranks()
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    # Under torchrun each process takes the device with its number. An index chooses the device of a single process.
    index = requested.partition(":")[2]
    local_rank = int(os.environ.get("LOCAL_RANK", 0)) if world_size > 1 else int(index or 0)
    explainers.add(explain)  # a failed collective becomes one line instead of a traceback

    # The runtime and this process's device.
    host.choose_math()  # the host computes the rotary tables of every device
    runtime = runtime_of(kind)
    runtime.start(local_rank, world_size, dtype, deterministic)
    name = runtime.device_name(local_rank)
    use_bfloat16 = dtype == "bfloat16" or (dtype == "auto" and runtime.has_bfloat16())
    device = Device(
        kind=kind,
        module=getattr(torch, kind),
        dtype=torch.bfloat16 if use_bfloat16 else torch.float32,
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        name=name,
        peak_flops=runtime.peak_flops(name) if use_bfloat16 else None,
        # A request for float32 is one for its precision, in decoding too.
        may_round=dtype == "auto" and not use_bfloat16 and runtime.may_round(),
    )
    # This waits for the other processes. It is the last step, so that wrong flags are reported without a wait.
    if world_size > 1 and not dist.is_initialized():
        _join(device)
    return device


def shutdown(device: Device) -> None:
    """Leave the process group together with the others."""
    if dist.is_initialized():
        # A rank that leaves early breaks the collectives of the ranks that still compute.
        device.synchronize()
        dist.barrier()
        dist.destroy_process_group()


def _available(kind: str) -> bool:
    module = getattr(torch, kind, None)  # `import torch` imports torch_npu too, which adds torch.npu
    return module is not None and module.is_available()


def _join(device: Device) -> None:
    """Join the process group of the job."""
    end_with_launcher()
    if store.on_one_host():
        for variable, value in device.runtime.loopback.items():
            os.environ.setdefault(variable, value)
    with screen.Bar("waiting for the other processes"):
        dist.init_process_group(
            device.runtime.backend,
            timeout=PROCESS_GROUP_TIMEOUT,
            store=store.of_this_start(PROCESS_GROUP_TIMEOUT),  # None: torch makes one from torchrun's variables
            rank=device.rank,
            world_size=device.world_size,
            device_id=None if device.kind == "cpu" else device.torch_device,
        )


def explain(error: BaseException) -> str | None:
    """One line with cause and fix for a failed collective; None for other errors."""
    # A collective fails on every rank, but only one rank has the cause: the others notice that it is gone, or wait for
    # it until their limit. So the line says whether to look here or elsewhere.
    text = str(error)
    if not re.search(r"hccl|nccl|gloo|\bEI\d{4}", text, re.IGNORECASE):
        return None
    # HCCL's own code and sentence, such as "EI0006: ...", if there is one; else the first line.
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason = next((line for line in lines if re.match(r"EI\d{4}", line)), lines[0])[:300]
    where = f"rank {os.environ.get('RANK', '0')}"
    if re.search(r"error code is 9\b|EI0002|EI0006|EI0015|time[d ]*out", text, re.IGNORECASE):
        return (
            f"{where}: another process did not take part in a collective in time ({reason}): the first error among the "
            "processes' lines is the cause; if one is only slow, raise HCCL_CONNECT_TIMEOUT (to join) or "
            "HCCL_EXEC_TIMEOUT (seconds)"
        )
    return (
        f"{where}: a collective failed ({reason}): look at the first error among the processes' lines; "
        "`python check_npu.py` tries the links between the devices"
    )
