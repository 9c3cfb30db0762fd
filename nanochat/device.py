"""The one file that knows vendors: an Ascend NPU, an NVIDIA GPU or a plain CPU as one frozen value.

`init()` finds the device, joins the process group under torchrun, and returns a `Device`. The rest of the project uses
that value and never names a vendor. `torch.npu` mirrors `torch.cuda`, so most of this file is `getattr(torch, kind)`.
The operators that differ between devices are in kernels/, and `Device.kernels` finds them.
"""

import contextlib
import datetime
import importlib
import os
import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist

from nanochat.ground import host, rooms, screen, store
from nanochat.ground.cli import UserError, end_with_launcher, explainers, ignore_exported_ranks
from nanochat.ground.log import warn
from nanochat.operators import TorchKernels

# `auto` looks for them in this order: an accelerator before the CPU.
KINDS = ("npu", "cuda", "cpu")
# The library of collectives that torch.distributed uses for each.
BACKENDS = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}
DTYPES = ("auto", "bfloat16", "float32")

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

INFERENCE_NPUS = r"Ascend310"  # chips that are made for inference, by the start of their names

# `init` sets these where they are unset, before the runtime starts. docs/ascend.md says when to change one.
NPU_ENVIRONMENT = {
    "TASK_QUEUE_ENABLE": "2",  # prepare the next launch during the present one
    "CPU_AFFINITY_CONF": "2",  # give the launching threads their own cores
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",  # less fragmentation
    "HCCL_CONNECT_TIMEOUT": "600",  # seconds that ranks wait for each other at the start; the default is 120
    "HCCL_EXEC_TIMEOUT": "1200",  # seconds that a collective waits for a rank
}
# Where all processes run on one host: the address or the interface on which the collectives' library listens. Other
# hosts do not need to reach it.
LOOPBACK_ENVIRONMENT = {
    "hccl": ("HCCL_IF_IP", store.LOOPBACK),
    "nccl": ("NCCL_SOCKET_IFNAME", "lo"),
    "gloo": ("GLOO_SOCKET_IFNAME", "lo"),
}
# With --deterministic: HCCL adds up in one order, a product splits its sums in one way (source: MindSpeed's
# deterministic mode), and cuBLAS has one workspace.
DETERMINISTIC_ENVIRONMENT: dict[str, dict[str, str]] = {
    "npu": {"HCCL_DETERMINISTIC": "true", "CLOSE_MATMUL_K_SHIFT": "1"},
    "cuda": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
}
RANK_SEEDS = 1_000_003  # between the seeds of neighbouring ranks: `--seed 1` must not be rank 1 of `--seed 0`
# Above both HCCL timeouts: HCCL's own message names the cause, torch's watchdog only kills the process.
PROCESS_GROUP_TIMEOUT = datetime.timedelta(seconds=1800)

# The resources of a worker of a Ray cluster: one device.
RAY_OPTIONS: dict[str, dict[str, Any]] = {
    "npu": {"resources": {"NPU": 1}},
    "cuda": {"num_gpus": 1},
    "cpu": {"num_cpus": 1},
}


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
    def can_train(self) -> bool:
        """Whether the chip is made for training, and not only for inference."""
        return self.kind != "npu" or not re.match(INFERENCE_NPUS, self.name)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def kernels(self) -> TorchKernels:
        """The operators for a model that runs here: `GPT(config, device.kernels)`."""
        return kernels(self.kind, self.dtype, self.name)

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
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        if self.kind == "cuda":
            versions["cuda"] = str(torch.version.cuda)
        if self.kind == "npu":
            torch_npu: Any = importlib.import_module("torch_npu")
            versions["torch_npu"] = torch_npu.__version__
            for part in ("CANN", "DRIVER"):
                # An older torch_npu lacks the call. The runtime reads the versions from files, which may be elsewhere.
                with contextlib.suppress(AttributeError, RuntimeError):
                    versions[part.lower()] = torch_npu.npu.utils.get_cann_version(part)
        return versions

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

    def recording_memory(self) -> Any:
        """Memory for the intermediate tensors of recordings that never run at the same time (`capture`)."""
        return self.module.graph_pool_handle()

    def capture(self, function: Callable[[], None], memory: Any = None) -> Callable[[], None]:
        """Record what `function` launches, without running it; returns a call that replays everything in one launch.

        A replay uses the same tensors each time. The function writes its results to tensors that exist already, because
        its own are in `memory`, where the next recording puts its tensors, too. It must have run before: lazy set-up
        inside a recording fails. Raises RuntimeError: when the device cannot record it.
        """
        # In eager mode the host launches each operator separately, and a small model's operators are shorter than
        # their launches. A simulated NPU counts 241 launches for a decoded token at depth 12, and 9 with a recording
        # (2026-11-27).
        graph = self.module.NPUGraph() if self.kind == "npu" else self.module.CUDAGraph()
        # "thread_local": a server's other threads may use the device meanwhile.
        with self._recordable_launches(), self.module.graph(graph, pool=memory, capture_error_mode="thread_local"):
            function()
        return graph.replay

    @contextlib.contextmanager
    def _recordable_launches(self) -> Iterator[None]:
        """Leave the second level of an NPU's task queue, under which torch_npu refuses to record."""
        if self.kind != "npu" or not hasattr(self.module, "set_task_queue_enable"):
            yield
            return
        level = self.module.get_task_queue_enable()
        self.module.set_task_queue_enable(min(level, 1))
        try:
            yield
        finally:
            self.module.set_task_queue_enable(level)


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


def kernels(kind: str, dtype: torch.dtype = torch.float32, name: str = "") -> TorchKernels:
    """The operators that a model calls on this kind of device. Matrix products are in `dtype`; `name` is the chip's."""
    return rooms.find("kernels", kind)(dtype, name)


def records(kind: str, requested: Literal["auto", "on", "off"]) -> bool:
    """Whether decoding on this kind of device records its launches and replays them as one.

    Raises UserError: when recording is requested where it is impossible.
    """
    if requested == "on" and kind == "cpu":
        raise UserError("--graphs on: a CPU launches nothing that could be recorded; leave it out")
    if requested == "off" or kind == "cpu":
        return False
    # The vendor recommends the second level of the task queue, and torch_npu does not record under it. From 2.13 on
    # `capture` leaves it for a moment; before, the level of a process never changes.
    level = os.environ.get("TASK_QUEUE_ENABLE")
    if kind == "npu" and level == "2" and not hasattr(getattr(torch, kind), "set_task_queue_enable"):
        fix = "`unset TASK_QUEUE_ENABLE`, or set it to 1"
        if requested == "on":
            raise UserError(f"--graphs on: this torch_npu records nothing under TASK_QUEUE_ENABLE=2: {fix}")
        stop_recording(
            kind, f"decoding is slower under TASK_QUEUE_ENABLE=2, where this torch_npu records no launches: {fix}"
        )
    return kind not in _NOT_RECORDING


_NOT_RECORDING: set[str] = set()  # kinds of devices that record nothing any more in this process


def stop_recording(kind: str, why: str) -> None:
    """Make no more recordings in this process; the first call warns, with the reason."""
    # After a failure in the middle of a recording torch_npu 2.9 refuses all later ones.
    if kind not in _NOT_RECORDING:
        _NOT_RECORDING.add(kind)
        warn(why)


def peak_flops(name: str) -> float | None:
    """Nominal dense bf16 FLOP/s of a device by its reported name; None if the name is not known."""
    return next((flops for pattern, flops in PEAK_FLOPS if re.search(pattern, name)), None)


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

    # The runtime: its variables before its first call, then this process's device.
    module: ModuleType = getattr(torch, kind)
    host.choose_math()  # the host computes the rotary tables of every device
    if kind == "cpu":
        host.keep_freed_memory()
        host.share_cores(world_size)
    else:
        _set_environment(kind, module, deterministic)
        _take_device(kind, module, local_rank, world_size)
    if kind == "cuda":
        # TF32 rounds the inputs of an fp32 product to a fraction of 10 bits, so that tensor cores can compute it. A
        # request for float32 is a request for its precision.
        torch.set_float32_matmul_precision("highest" if dtype == "float32" else "high")

    name = host.cpu_name() if kind == "cpu" else module.get_device_name(local_rank)
    use_bfloat16 = _uses_bfloat16(kind, module, dtype, name)
    # A request for float32 is one for its precision here too. With AVX-512 the bits of a row still do not depend on the
    # rows next to it (batches of 1 to 64 on an Intel Xeon, 2026-11-27); with AVX2 they would.
    chose_float32 = kind == "cpu" and dtype == "auto" and not use_bfloat16
    may_round = chose_float32 and "avx512f" in host.cpu_features()
    # This waits for the other processes. It is the last step, so that wrong flags are reported without a wait.
    if world_size > 1 and not dist.is_initialized():
        _join(kind, rank, local_rank, world_size)
    return Device(
        kind=kind,
        module=module,
        dtype=torch.bfloat16 if use_bfloat16 else torch.float32,
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        name=name,
        peak_flops=peak_flops(name) if use_bfloat16 else None,
        may_round=may_round,
    )


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


def _set_environment(kind: str, module: ModuleType, deterministic: bool) -> None:
    """Set the variables of an accelerator's runtime that the user has not set."""
    variables = dict(NPU_ENVIRONMENT) if kind == "npu" else {}
    # An older torch_npu cannot change the task queue's level later, and does not record launches on the second one.
    if kind == "npu" and not hasattr(module, "set_task_queue_enable"):
        variables["TASK_QUEUE_ENABLE"] = "1"
    # torch has a vendor-free name for the allocator's options, and having both set is an error.
    if "PYTORCH_ALLOC_CONF" in os.environ:
        variables.pop("PYTORCH_NPU_ALLOC_CONF", None)
    if deterministic:
        variables |= DETERMINISTIC_ENVIRONMENT[kind]
    for variable, value in variables.items():
        os.environ.setdefault(variable, value)
    if deterministic:
        torch.use_deterministic_algorithms(True)  # torch_npu passes it on to CANN's operators
        # torch would also fill all new memory, to make reads of it repeatable. Nothing here reads unwritten memory.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _take_device(kind: str, module: ModuleType, local_rank: int, world_size: int) -> None:
    """Make an accelerator this process's own.

    Raises UserError: when it does not exist, or the vendor's collectives do not serve this many processes.
    """
    # The first call that needs the device would fail anyway, but without a line that names the fix.
    count = module.device_count()
    if local_rank >= count and world_size > 1:
        raise UserError(f"process {local_rank} has no device: {count} found; lower --nproc_per_node")
    if local_rank >= count:
        raise UserError(f"--device {kind}:{local_rank}: there are {count}, counted from 0")
    if kind == "npu" and world_size in (3, 5, 6, 7):  # the vendor's page on collectives leaves these out
        raise UserError(f"--nproc_per_node {world_size}: HCCL shares tensors out over 1, 2, 4, 8 or 16 devices")
    module.set_device(local_rank)


def _uses_bfloat16(kind: str, module: ModuleType, dtype: str, name: str) -> bool:
    """Whether matrix products are in bf16: on request, or with `auto` where the hardware computes in it.

    Raises UserError: when bf16 is requested of an accelerator that lacks it.
    """
    if kind == "cpu":
        has_bfloat16 = host.has_bfloat16()
    elif kind == "cuda":
        has_bfloat16 = module.get_device_capability()[0] >= 8  # from the A100's generation on
    else:
        has_bfloat16 = bool(module.is_bf16_supported())
    if dtype == "bfloat16" and not has_bfloat16 and kind != "cpu":
        raise UserError(f"--dtype bfloat16: {name} has no bfloat16; use --dtype float32")
    return dtype == "bfloat16" or (dtype == "auto" and has_bfloat16)


def _join(kind: str, rank: int, local_rank: int, world_size: int) -> None:
    """Join the process group of the job.

    Raises UserError: when the launcher of this process has died.
    """
    end_with_launcher()
    variable, value = LOOPBACK_ENVIRONMENT[BACKENDS[kind]]
    # HCCL_IF_IP would override an interface that the user chose.
    if store.on_one_host() and not (kind == "npu" and "HCCL_SOCKET_IFNAME" in os.environ):
        os.environ.setdefault(variable, value)
    with screen.Bar("waiting for the other processes"):
        dist.init_process_group(
            BACKENDS[kind],
            timeout=PROCESS_GROUP_TIMEOUT,
            store=store.of_this_start(PROCESS_GROUP_TIMEOUT),  # None: torch makes one from torchrun's variables
            rank=rank,
            world_size=world_size,
            device_id=None if kind == "cpu" else torch.device(kind, local_rank),
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
