"""The one file that knows vendors: Ascend NPU, NVIDIA GPU or plain CPU as one frozen value.

`init()` finds the device, joins the process group where torchrun started us, and returns a `Device`. Everything else in
the project uses that value and never names a vendor. `torch.npu` mirrors `torch.cuda`, so most of this file is
`getattr(torch, kind)`. The operators that differ between devices are in kernels/.
"""

import contextlib
import ctypes
import datetime
import importlib.util
import inspect
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from nanochat import rooms, store
from nanochat.cli import UserError, explainers, ignore_exported_ranks
from nanochat.log import warn
from nanochat.operators import TorchKernels

# In the order in which `auto` looks for them: an accelerator before the CPU.
KINDS = ("npu", "cuda", "cpu")
# torch.distributed's library of collectives for each.
BACKENDS = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}

# Nominal dense bf16 FLOP/s by device name. MFU is the model's FLOPs per second divided by this peak (source: Chowdhery
# et al. 2022, PaLM). The first pattern that matches counts, so narrow patterns come before wide ones. A name that is
# not listed has no known peak, and prints no MFU: a guess would look like a measurement. Sources: vendors' data
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

# NPUs by their names (source: torch_npu's SocVersion). The first generation, such as Ascend910A, Ascend910ProB and
# Ascend910B without a number, and the chips for inference have no fused operators for training, and no bfloat16.
# Every other name is a chip that has both, such as 910B1 to 910B4, 910_93.., 950.., and what is newer than this line.
FIRST_NPUS = r"Ascend910(Pro|Premium)?[AB]?$"
INFERENCE_NPUS = r"Ascend310"

# Set where they are unset, before the runtime starts; docs/ascend.md says when to change one.
NPU_ENVIRONMENT = {
    "TASK_QUEUE_ENABLE": "2",  # prepare the next launch while one is under way
    "CPU_AFFINITY_CONF": "2",  # the launching threads keep cores of their own
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",  # less fragmentation
    "HCCL_CONNECT_TIMEOUT": "600",  # seconds that ranks wait for each other at the start; the default is 120
    "HCCL_EXEC_TIMEOUT": "1200",  # seconds that a collective waits for a rank
}
# Where all processes run on one host, and this is unset: the address or the interface on which the library of
# collectives listens. Other hosts need not reach it.
LOOPBACK_ENVIRONMENT = {
    "hccl": ("HCCL_IF_IP", store.LOOPBACK),
    "nccl": ("NCCL_SOCKET_IFNAME", "lo"),
    "gloo": ("GLOO_SOCKET_IFNAME", "lo"),
}
# With --deterministic, where they are unset. HCCL adds up in one order; a product splits its sums in one way (source:
# MindSpeed's deterministic mode); cuBLAS has one workspace.
DETERMINISTIC_ENVIRONMENT: dict[str, dict[str, str]] = {
    "npu": {"HCCL_DETERMINISTIC": "true", "CLOSE_MATMUL_K_SHIFT": "1"},
    "cuda": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
}
# Above both HCCL timeouts: HCCL's own message names the cause, torch's watchdog only kills the process.
PROCESS_GROUP_TIMEOUT = datetime.timedelta(seconds=1800)

# Compiling for a CPU takes 21 to 40 s. Where products are in bf16 it saves a fifth of a step, in fp32 a few percent.
# Two cores with AMX win that back after 4e13 model FLOPs or a little more (docs/measurements.md): a run that is not
# longer than this stays eager.
CPU_COMPILE_FLOPS = 6e13

# What a worker of a Ray cluster asks for: one device.
RAY_OPTIONS: dict[str, dict[str, Any]] = {
    "npu": {"resources": {"NPU": 1}},
    "cuda": {"num_gpus": 1},
    "cpu": {"num_cpus": 1},
}


@dataclass(frozen=True)
class Device:
    """Where this process computes, and its place among the others."""

    kind: str  # "npu", "cuda" or "cpu"
    module: ModuleType  # torch.npu, torch.cuda or torch.cpu
    # The dtype of matrix products: bfloat16 where the hardware computes in it, float32 elsewhere or on request.
    # Parameters and sums stay in fp32.
    dtype: torch.dtype
    # Two hosts with four devices each run eight processes:
    #
    #     host          A              B
    #     rank          0  1  2  3     4  5  6  7     which share of the data a process reads
    #     local_rank    0  1  2  3     0  1  2  3     which device of its host it uses
    rank: int  # among all processes
    local_rank: int  # among those of this host; also the index of this process's device
    world_size: int
    name: str  # as the runtime reports it, e.g. "Ascend910B3"
    # Dense FLOP/s in `dtype`, the yardstick of MFU; None where unknown.
    peak_flops: float | None

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.kind) if self.kind == "cpu" else torch.device(self.kind, self.local_rank)

    def __str__(self) -> str:
        return f"{self.world_size} x {self.name} ({self.kind}, {str(self.dtype).removeprefix('torch.')})"

    @property
    def can_train(self) -> bool:
        """Whether the chip is made for training, and not for inference alone."""
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
        # measures the queueing alone. A CPU runs each operator before the call returns.
        if self.kind != "cpu":
            self.module.synchronize()

    def peak_memory(self) -> int:
        """Bytes: the most the device's allocator held, on a CPU the most the process held."""
        if self.kind == "cpu":
            # getrusage reports bytes on macOS, KiB on Linux.
            unit = 1 if sys.platform == "darwin" else 1024
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return self.module.max_memory_allocated()

    def versions(self) -> dict[str, str]:
        """Of the software that a measurement depends on."""
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        if self.kind == "cuda":
            versions["cuda"] = str(torch.version.cuda)
        if self.kind == "npu":
            torch_npu: Any = importlib.import_module("torch_npu")
            versions["torch_npu"] = torch_npu.__version__
            for part in ("CANN", "DRIVER"):
                # An older torch_npu cannot ask; the runtime reads them from files, which may be elsewhere.
                with contextlib.suppress(AttributeError, RuntimeError):
                    versions[part.lower()] = torch_npu.npu.utils.get_cann_version(part)
        return versions

    def total_memory(self) -> int | None:
        """Bytes of device memory; None for a CPU. speedrun_npu.sh chooses its batch sizes by it."""
        if self.kind == "cpu":
            return None
        return self.module.get_device_properties(self.local_rank).total_memory

    def seed(self, seed: int) -> None:
        """Seed torch's generators on the host and on this device."""
        torch.manual_seed(seed)  # also seeds every accelerator that torch knows

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
        # The system never moves pinned memory, so the device can read it by itself, at any time. From ordinary memory
        # the host would have to copy it first, and wait.
        if self.kind == "cpu":
            return tensor
        return tensor.pin_memory().to(self.torch_device, non_blocking=True)

    def compile(
        self, function: Callable[..., Any], requested: Literal["auto", "on", "off"], run_flops: float
    ) -> tuple[Callable[..., Any], str]:
        """`torch.compile` by policy; returns the function, and for the log what was decided and why.

        Raises UserError: when `requested` is "on" and there is no compiler.
        """
        # What was requested decides first, then what is here, then whether compiling pays.
        missing = self._missing_compiler()
        if requested == "off":
            return function, "eager (--compile off)"
        if requested == "on" and missing:
            raise UserError(f"--compile on needs {missing}; install it or leave --compile out")
        if requested == "auto":
            if self.kind == "npu":  # not tried on a card yet
                return function, "eager (compile is opt-in here: --compile on)"
            if missing:
                return function, f"eager ({missing} is missing)"
            if self.kind == "cpu" and run_flops < CPU_COMPILE_FLOPS:
                return function, "eager (too short a run to repay compiling)"
        import torch._dynamo
        import torch._inductor.config

        # By default the compiler first builds and loads a library, to see that this can be done: 4 of 38 s.
        torch._inductor.config.cpp.vec_isa_ok = True
        # Blocks of a few kinds (with value embeddings, with short windows), with and without adapters. The compiler
        # gives up at the default of 8.
        torch._dynamo.config.recompile_limit = 64
        # Code for exactly these shapes: a training step has one shape, and the compiler uses sizes that it knows.
        return torch.compile(function, dynamic=False), "compiled"

    def use_fp8(self, model: Any) -> str:
        """Have the products of a GPT's blocks computed in FP8, if this chip can; returns for the log what computes
        them."""
        has_fp8 = self.kind == "cuda" and self.module.get_device_capability() >= (8, 9)
        if has_fp8 and self.dtype == torch.bfloat16:
            count = rooms.find("kernels", "fp8")(model.blocks)
            return f"fp8 in {count} matrices of the blocks, bfloat16 elsewhere"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} (--fp8 needs a GPU of compute capability 8.9 or more and bfloat16; this is {self.name})"

    def product_flops(self) -> float | None:
        """FLOP/s of a bare matrix product in `dtype`: measured on a CPU, 60% of an accelerator's peak, None where that
        is unknown."""
        if self.kind != "cpu":
            return self.peak_flops and 0.6 * self.peak_flops
        size = 512
        square = torch.ones(size, size, dtype=self.dtype)
        seconds = []
        for _ in range(4):  # the first one is slower
            began = time.perf_counter()
            torch.mm(square, square)
            seconds.append(time.perf_counter() - began)
            if seconds[-1] > 0.2:  # bfloat16 on a CPU without its instructions
                break
        return 2 * size**3 / min(seconds)

    def _missing_compiler(self) -> str | None:
        """What torch.compile needs and does not find."""
        # It generates Triton kernels for an accelerator, and C++ for a CPU.
        if self.kind != "cpu":
            return None if importlib.util.find_spec("triton") else "triton"
        compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")  # as torch chooses it
        try:
            subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            return f"the C++ compiler {compiler}"
        return None

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Record what `function` launches, without running it. The function must have run before: lazy set-up inside a
        recording fails.

        Returns a call that runs all of it again in one launch, over the same tensors, and what `function` returned:
        tensors that are valid only after such a call.
        """
        # In eager mode the host launches each operator by itself, and a small model's operators are shorter than their
        # launches. A simulated NPU counts 280 launches for a decoded token, and 9 with a recording
        # (docs/measurements.md). A replay runs over the same addresses, hence "over the same tensors".
        graph = self.module.NPUGraph() if self.kind == "npu" else self.module.CUDAGraph()
        with self._launching_in_order(), self.module.graph(graph):
            result = function()
        return graph.replay, result

    @contextlib.contextmanager
    def _launching_in_order(self) -> Iterator[None]:
        """On an NPU without the task queue's second level, under which torch_npu refuses to record."""
        if self.kind != "npu" or not hasattr(self.module, "set_task_queue_enable"):
            yield
            return
        level = self.module.get_task_queue_enable()
        self.module.set_task_queue_enable(min(level, 1))
        try:
            yield
        finally:
            self.module.set_task_queue_enable(level)

    def profiler(self, skipped: int, steps: int, folder: Path) -> Any:
        """A profiler that records `steps` steps after the first `skipped` and writes the trace to `folder`.

        It needs `start()`, a `step()` after every step, and `stop()`.
        """
        tool: Any = torch.profiler
        options: dict[str, Any] = {"on_trace_ready": lambda done: done.export_chrome_trace(str(folder / "trace.json"))}
        if self.kind == "npu":
            tool = importlib.import_module("torch_npu").profiler
            options = {
                "on_trace_ready": tool.tensorboard_trace_handler(str(folder.resolve())),
                "experimental_config": tool._ExperimentalConfig(aic_metrics=tool.AiCMetrics.AiCoreNone),
            }
        activities = [tool.ProfilerActivity.CPU]
        if self.kind != "cpu":
            activities.append(getattr(tool.ProfilerActivity, self.kind.upper()))
        # The profiler sets itself up in the last of the skipped steps: its own start-up is not in the trace.
        schedule = tool.schedule(wait=max(0, skipped - 1), warmup=min(1, skipped), active=steps, repeat=1)
        return tool.profile(activities=activities, schedule=schedule, **options)


def kind_of(requested: str) -> str:
    """npu, cuda or cpu for what `init` takes, without starting the device's runtime.

    Raises UserError: when it is none of them, or this machine has none.
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
    """The operators that a model calls on this kind of device, and the dtype of its products; of NPUs by their name."""
    name_of = kind
    if kind == "npu" and re.match(f"{FIRST_NPUS}|{INFERENCE_NPUS}", name):
        name_of = "npu without fused operators"
    if kind == "cuda" and not _has_varlen(dtype):
        name_of = "cuda without varlen_attn"
    return rooms.find("kernels", name_of)(dtype)


def _has_varlen(dtype: torch.dtype) -> bool:
    """Whether torch has attention for rows of several documents, with windows, and this GPU runs it in this dtype."""
    if not importlib.util.find_spec("torch.nn.attention.varlen"):  # before torch 2.10
        return False
    operator = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    if not {"scale", "window_size", "enable_gqa"} <= set(inspect.signature(operator).parameters):
        return False
    # It is flash attention: for Ampere and later, and in 16 bits alone.
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability() >= (8, 0)


def records(kind: str, requested: Literal["auto", "on", "off"]) -> bool:
    """Whether decoding on this kind of device records its launches and replays them as one.

    Raises UserError: when a CPU is requested to.
    """
    if requested == "on" and kind == "cpu":
        raise UserError("--graphs on: a CPU launches nothing that could be recorded; leave it out")
    return requested != "off" and kind != "cpu"


def init(requested: str = "auto", dtype: str = "auto", deterministic: bool = False) -> Device:
    """Find the device, set up its runtime, and join the process group under torchrun.

    `requested` is auto, npu, cuda or cpu, with an optional index for one process ("npu:1"). `dtype` is auto, bfloat16
    or float32. `deterministic` makes an accelerator add up in one order, which takes longer; a CPU always does.
    Raises UserError: when the requested device is not here, or cannot do the requested bfloat16.
    """
    kind = kind_of(requested)
    index = requested.partition(":")[2]
    if dtype not in ("auto", "bfloat16", "float32"):
        raise UserError(f"--dtype {dtype!r}: one of auto, bfloat16, float32")

    # Our place among the processes. torchrun sets these variables; without it there is one process.
    ignore_exported_ranks()
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    # An index chooses the device of a single process. Under torchrun each process takes the device of its own number.
    local_rank = int(os.environ.get("LOCAL_RANK", 0)) if world_size > 1 else int(index or 0)
    if explain not in explainers:
        explainers.append(explain)  # one line for a failed collective instead of a traceback

    # The runtime: its variables before its first call, then this process's device.
    _choose_host_math()  # the rotary tables are computed on the host for every device
    module: ModuleType = getattr(torch, kind)
    if kind == "cpu":
        _keep_freed_memory()
        if world_size > 1 and os.environ.get("OMP_NUM_THREADS", "1") == "1":
            # torchrun sets one thread per process; share the cores evenly instead.
            local_world = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world))
    else:
        if kind == "npu":
            for variable, value in NPU_ENVIRONMENT.items():
                # An older torch_npu cannot change the level later, and does not record launches on the second one.
                if variable == "TASK_QUEUE_ENABLE" and not hasattr(module, "set_task_queue_enable"):
                    value = "1"
                # torch has a vendor-free name for the allocator's options, and having both set is an error.
                if variable != "PYTORCH_NPU_ALLOC_CONF" or "PYTORCH_ALLOC_CONF" not in os.environ:
                    os.environ.setdefault(variable, value)
        if deterministic:
            for variable, value in DETERMINISTIC_ENVIRONMENT[kind].items():
                os.environ.setdefault(variable, value)
            _use_deterministic_algorithms()
        # The first call that needs the device would fail anyway, but not with a line that says what to change.
        count = module.device_count()
        if local_rank >= count and world_size > 1:
            raise UserError(f"process {local_rank} has no device: {count} found; lower --nproc_per_node")
        if local_rank >= count:
            raise UserError(f"--device {kind}:{local_rank}: there are {count}, counted from 0")
        if kind == "npu" and world_size in (3, 5, 6, 7):  # the vendor's page on collectives leaves these out
            raise UserError(f"--nproc_per_node {world_size}: HCCL shares tensors out over 1, 2, 4, 8 or 16 devices")
        module.set_device(local_rank)
    # TF32 rounds the inputs of an fp32 product to a fraction of 10 bits, so that tensor cores can compute it. A request
    # for float32 is a request for its precision.
    if kind == "cuda":
        torch.set_float32_matmul_precision("highest" if dtype == "float32" else "high")

    # Precision: bf16 where the hardware computes in it. On a CPU a request is enough: it is slow there, but right.
    if kind == "cpu":
        name = _cpu_info("model name") or platform.processor() or platform.machine()
    else:
        name = module.get_device_name(local_rank)
    has_bfloat16 = _has_fast_bfloat16(kind, module)
    if dtype == "bfloat16" and not has_bfloat16 and kind != "cpu":
        raise UserError(f"--dtype bfloat16: {name} has no bfloat16; use --dtype float32")
    use_bfloat16 = dtype == "bfloat16" or (dtype == "auto" and has_bfloat16)

    # This waits for the other processes. It is last, so that a mistake in the flags is reported without a wait.
    if world_size > 1 and not dist.is_initialized():
        _end_with_torchrun()
        variable, value = LOOPBACK_ENVIRONMENT[BACKENDS[kind]]
        # HCCL_IF_IP would be stronger than an interface that the user chose.
        if store.on_one_host() and not (kind == "npu" and "HCCL_SOCKET_IFNAME" in os.environ):
            os.environ.setdefault(variable, value)
        dist.init_process_group(
            BACKENDS[kind],
            timeout=PROCESS_GROUP_TIMEOUT,
            store=_store_of_this_start(),  # None: torch makes one from torchrun's variables
            rank=rank,
            world_size=world_size,
            device_id=None if kind == "cpu" else torch.device(kind, local_rank),
        )
    return Device(
        kind=kind,
        module=module,
        dtype=torch.bfloat16 if use_bfloat16 else torch.float32,
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        name=name,
        peak_flops=peak_flops(name) if use_bfloat16 else None,
    )


def _end_with_torchrun() -> None:
    """Have the system send this process SIGTERM, which a run hears, saves and leaves, when its torchrun dies."""
    # A torchrun that ends in good order ends its processes. One that is killed (kill -9, out of memory) cannot, and
    # they would train on, with nobody to restart them and the devices taken.
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux has it
    if prctl is not None and "TORCHELASTIC_RUN_ID" in os.environ:
        prctl(1, int(signal.SIGTERM), 0, 0, 0)  # PR_SET_PDEATHSIG


def _store_of_this_start() -> Store | None:
    """The job's store, with keys of this start's own; None: torch makes one from torchrun's variables."""
    if not store.is_torchruns():
        if not store.on_one_host():
            return None
        if os.environ["RANK"] == "0":
            return store.serve(PROCESS_GROUP_TIMEOUT, store.address()[1])
        return store.connect(PROCESS_GROUP_TIMEOUT)
    # The store in torchrun's process outlives the workers, and torch does not separate one start of them from the next:
    # restarted processes looked for each other at the addresses of those that had died (torch 2.13).
    if not store.on_one_host():  # each host counts its own starts, so the prefixes would differ
        warn("set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every host: a host that is lost cannot come back without it")
        return None
    port = store.address()[1]
    if store.is_open_to_others(port):
        warn(
            f"torchrun's port {port} is open to the network, without a password, and `--standalone` runs what it is "
            "sent there; put `python -m nanochat.run.launch` for `torchrun --standalone`"
        )
    prefix = f"start_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return PrefixStore(prefix, store.connect(PROCESS_GROUP_TIMEOUT))


def shutdown(device: Device) -> None:
    """Leave the process group together with the others."""
    if dist.is_initialized():
        # A rank that leaves early breaks the collectives of those that still compute.
        device.synchronize()
        dist.barrier()
        dist.destroy_process_group()


def explain(error: BaseException) -> str | None:
    """For failed code of torch.compile or a failed collective one line with its cause and what to do; None for other
    errors."""
    if type(error).__name__ in ("InductorError", "BackendCompilerFailed"):  # importing them would load the compiler
        # "...Error: what happened", in its first lines; then commands and a compiler's own output
        return f"torch.compile failed ({str(error).strip().splitlines()[0][:300]}): leave it out with --compile off"
    # A collective fails on every rank, and only one rank has the cause: the others notice that it is gone, or wait for
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


def peak_flops(name: str) -> float | None:
    """Nominal dense bf16 FLOP/s of a device by its reported name; None if the name is not known."""
    return next((flops for pattern, flops in PEAK_FLOPS if re.search(pattern, name)), None)


def _available(kind: str) -> bool:
    module = getattr(torch, kind, None)  # `import torch` imports torch_npu too, which adds torch.npu
    return module is not None and module.is_available()


def _has_fast_bfloat16(kind: str, module: ModuleType) -> bool:
    if kind == "cpu":
        # Without these instructions bf16 is emulated, far slower than fp32. x86 lists "flags", Arm "Features".
        flags = set(_cpu_info("flags").split() + _cpu_info("Features").split())
        return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})
    if kind == "cuda":  # from the A100's generation on
        return module.get_device_capability()[0] >= 8
    return bool(module.is_bf16_supported())


def _use_deterministic_algorithms() -> None:
    torch.use_deterministic_algorithms(True)  # torch_npu passes it on to CANN's operators
    # torch would also fill all new memory, to make reads of it repeatable. Nothing here reads what it did not write.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _choose_host_math() -> None:
    """Have MKL choose its code for cos, exp and the like now, in one thread."""
    # It chooses in the first call. Where two threads make that call at once, one of them may get code that is right to
    # 1e-4 only, for this one call (source: github.com/pytorch/pytorch/issues/188792). The first call was that of the
    # rotary tables: in 5 of 55 starts their second half was off, and so were all losses of the run.
    one = torch.ones(1)
    for function in (torch.cos, torch.sin, torch.exp, torch.log, torch.sqrt, torch.tanh):
        function(one)


def _keep_freed_memory() -> None:
    """Have the C library keep large freed blocks."""
    # Otherwise it returns every activation to the system, which clears the pages before it hands them out again. That
    # costs a training step 5 to 10% of its time: 486 ms instead of 463 at depth 4 (docs/measurements.md).
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's; others have none
    if mallopt is not None:
        # The options' numbers are those of malloc.h.
        mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD: blocks below 1 GiB are kept, not mapped one by one
        mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD: return memory only when 2 GiB lie unused
        mallopt(-2, 1 << 28)  # M_TOP_PAD: grow by 256 MiB at a time


def _cpu_info(field: str) -> str:
    """The first core's value of a field such as "model name"; empty where Linux does not report it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")
