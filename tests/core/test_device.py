"""The one frozen value: what it finds, what it refuses, and vendors that are not here, played by a stand-in."""

import contextlib
import dataclasses
import os
import re
import subprocess
import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny import complaint

from nanochat import device as devices
from nanochat.device import init, runtime_of
from nanochat.ground import host, store
from nanochat.ground.cli import UserError
from nanochat.kernels import decoding
from nanochat.kernels.accelerators import NPU_ENVIRONMENT, Accelerator
from nanochat.run import stage
from nanochat.run.flags import TrainFlags

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, none of the runtime's variables set; and what `init` sets goes with the test."""
    monkeypatch.setattr(os, "environ", {**os.environ})
    for name in (*RANK_VARIABLES, *NPU_ENVIRONMENT, "PYTORCH_ALLOC_CONF"):
        os.environ.pop(name, None)


class Vendor(types.ModuleType):
    """A stand-in for torch.npu or torch.cuda that notes the calls which change something."""

    def __init__(self, kind: str, name: str, count: int = 2, has_bfloat16: bool = True):
        super().__init__(f"torch.{kind}")
        self.calls: list[Any] = []
        facts = {
            "is_available": count > 0, "device_count": count, "get_device_name": name, "max_memory_allocated": 12345,
            "is_bf16_supported": has_bfloat16, "get_device_capability": (8, 0) if has_bfloat16 else (7, 5),
            "_is_in_bad_fork": False, "get_task_queue_enable": 2,
            "NPUGraph": types.SimpleNamespace(replay=lambda: None),
        }  # fmt: skip
        for function, value in facts.items():
            setattr(self, function, lambda *_, value=value: value)
        for function in ("set_device", "synchronize", "set_task_queue_enable", "manual_seed_all"):
            setattr(self, function, lambda *values, function=function: self.calls.append((function, *values)))

    def graph(self, graph: Any, pool: Any, capture_error_mode: str) -> Any:
        assert capture_error_mode == "thread_local", "other threads of a server use the device meanwhile"
        self.calls.append(("record", pool))
        return contextlib.nullcontext()


@pytest.fixture
def vendors(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`vendors(npu=Vendor(...))` makes these and no others the machine's devices."""

    def put(**present: Vendor) -> None:
        for kind in ("npu", "cuda"):
            monkeypatch.setattr(torch, kind, present.get(kind, Vendor(kind, "none", count=0)), raising=False)
        monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)

    put()
    return put


# ---------------------------------------------------------------------- the CPU


def test_the_cpu_is_always_there() -> None:
    device = init("cpu")
    assert (device.kind, device.module, device.torch_device) == ("cpu", torch.cpu, torch.device("cpu"))
    assert (device.rank, device.local_rank, device.world_size, device.is_main) == (0, 0, 1, True)
    assert device.name
    assert device.peak_flops is None
    assert 20 << 20 < device.peak_memory() < 1 << 40
    assert device.total_memory() is None
    device.synchronize()
    assert not dist.is_initialized()
    tensor = torch.ones(3)
    assert device.to_device(tensor) is tensor


AMD, INTEL = "AuthenticAMD", "GenuineIntel"
PROCESSORS = [
    (AMD, "fma avx512f avx512_bf16", "bfloat16", False),
    (INTEL, "fma avx512f avx512_bf16 amx_bf16", "bfloat16", False),
    (INTEL, "fma avx512f avx512_bf16", "float32", True),
    (INTEL, "fma avx2", "float32", False),
    ("", "", "float32", False),
]


@pytest.mark.parametrize(("vendor", "flags", "dtype", "may_round"), PROCESSORS)
def test_a_cpu_computes_in_bfloat16_where_that_is_faster(
    vendor: str, flags: str, dtype: str, may_round: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = {"vendor_id": vendor, "flags": flags}
    monkeypatch.setattr(host, "cpu_info", lambda field: info.get(field, ""))
    assert (init("cpu").dtype, init("cpu").may_round) == (getattr(torch, dtype), may_round)
    for name in ("bfloat16", "float32"):  # perhaps slow, but right
        device = init("cpu", name)
        assert device.dtype == device.kernels.dtype == getattr(torch, name) and not device.may_round


def test_seed_and_generator_states() -> None:
    device = init("cpu")
    device.seed(7)
    first = torch.rand(3)
    state = device.rng_state()
    second = torch.rand(3)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(3), second)
    device.seed(7)
    assert torch.equal(torch.rand(3), first)
    # The ranks of a run draw other masks of dropout, and rank 1 not those of the next seed's rank 0.
    dataclasses.replace(device, rank=1).seed(7)
    other = torch.rand(3)
    device.seed(8)
    assert not torch.equal(other, first) and not torch.equal(other, torch.rand(3))


# ---------------------------------------------------------------------- others


def test_auto_prefers_an_accelerator(vendors: Any) -> None:
    npu, cuda = Vendor("npu", "Ascend910B3"), Vendor("cuda", "NVIDIA A100-SXM4-80GB")
    assert init().kind == "cpu"
    vendors(cuda=cuda)
    assert (init().kind, init().peak_flops) == ("cuda", 312e12)
    assert init("cuda", "float32").peak_flops is None
    vendors(npu=npu, cuda=cuda)
    device = init()
    assert (device.kind, device.name, device.dtype, device.peak_flops) == ("npu", "Ascend910B3", torch.bfloat16, 313e12)
    assert device.module is npu and npu.calls == [("set_device", 0)]
    cuda.calls.clear()
    device = init("cuda:1")
    assert device.torch_device == torch.device("cuda", 1)
    device.synchronize()
    device.seed(3)
    assert cuda.calls == [("set_device", 1), ("synchronize",), ("manual_seed_all", 3)]
    assert device.peak_memory() == 12345
    vendors(cuda=Vendor("cuda", "Tesla T4", has_bfloat16=False))
    assert (init("cuda").dtype, init("cuda").peak_flops) == (torch.float32, None)


NOT_HERE = [
    (("tpu",), "--device 'tpu'"),
    (("",), "--device ''"),
    (("cpu:x",), "npu:0"),
    (("cpu:-1",), "npu:0"),
    (("cpu", "int8"), "--dtype 'int8'"),
    (("npu",), "--device npu: none found.*check_npu.py"),
    (("cuda:0",), "--device cuda: none found.*--device cpu"),
    (("cuda", "bfloat16"), "Tesla T4 .*--dtype float32"),
    (("cuda:2",), "--device cuda:2"),
    (("cuda", "auto", "rank 3"), "process 3 .*--nproc_per_node"),
]


@pytest.mark.parametrize(("arguments", "words"), NOT_HERE)
def test_what_is_not_here_is_named_in_one_line(vendors: Any, arguments: tuple[str, ...], words: str) -> None:
    if "none found" not in words:
        vendors(cuda=Vendor("cuda", "Tesla T4", has_bfloat16=False))
    if len(arguments) == 3:
        os.environ.update(RANK="3", LOCAL_RANK="3", WORLD_SIZE="4")
    assert re.search(words, complaint(lambda: init(*arguments[:2])))


def test_a_job_that_hccl_cannot_share_out_or_start_again_is_told(vendors: Any, capsys: Any) -> None:
    vendors(npu=Vendor("npu", "Ascend910B3"))
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="3")
    with pytest.raises(UserError, match="--nproc_per_node 3.* 1, 2, 4, 8 or 16"):
        init("npu")
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", GROUP_WORLD_SIZE="2")
    assert store.of_this_start(devices.PROCESS_GROUP_TIMEOUT) is None
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in capsys.readouterr().err


# ---------------------------------------------------------------------- the runtime's variables


def test_the_task_queue_steps_down_while_launches_are_recorded(vendors: Any) -> None:
    npu = Vendor("npu", "Ascend910B3")
    vendors(npu=npu)
    device = init("npu")
    with pytest.raises(ZeroDivisionError):
        decoding.capture(device, lambda: 1 / 0)
    assert npu.calls[-3:] == [("set_task_queue_enable", 1), ("record", None), ("set_task_queue_enable", 2)]
    decoding.capture(device, lambda: None, "memory of others")
    assert npu.calls[-2] == ("record", "memory of others")


def npu_that_cannot_step_down() -> Vendor:
    npu = Vendor("npu", "Ascend910B3")
    del npu.set_task_queue_enable
    return npu


def test_a_torch_npu_that_cannot_step_down_begins_there(vendors: Any) -> None:
    vendors(npu=npu_that_cannot_step_down())
    device = init("npu")
    assert os.environ["TASK_QUEUE_ENABLE"] == "1"
    assert device.runtime.records("auto")
    decoding.capture(device, lambda: None)()


def test_nothing_is_recorded_where_the_queue_cannot_step_down(vendors: Any, monkeypatch: Any, capsys: Any) -> None:
    """Guides for this vendor export TASK_QUEUE_ENABLE=2, and torch_npu before 2.13 cannot leave it for a recording."""
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "2")
    vendors(npu=npu_that_cannot_step_down())
    monkeypatch.setattr(decoding, "NOT_RECORDING", set())
    runtime = init("npu").runtime
    assert not runtime.records("auto") and not runtime.records("auto")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: ") and "unset TASK_QUEUE_ENABLE" in line
    assert re.search("--graphs on.*TASK_QUEUE_ENABLE", complaint(lambda: runtime.records("on")))
    decoding.NOT_RECORDING.clear()
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "1")
    assert runtime.records("on")


def test_what_is_set_already_stays(vendors: Any) -> None:
    vendors(npu=Vendor("npu", "Ascend910B3"))
    given = {"TASK_QUEUE_ENABLE": "1", "HCCL_EXEC_TIMEOUT": "", "PYTORCH_ALLOC_CONF": "expandable_segments:False"}
    os.environ.update(given)
    init("npu")
    assert given.items() <= os.environ.items()
    assert os.environ["CPU_AFFINITY_CONF"] == NPU_ENVIRONMENT["CPU_AFFINITY_CONF"]
    assert "PYTORCH_NPU_ALLOC_CONF" not in os.environ, "both names of one setting"


ONE_ORDER = {
    "npu": {"HCCL_DETERMINISTIC": "true", "CLOSE_MATMUL_K_SHIFT": "1"},
    "cuda": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    "cpu": {},
}


@pytest.mark.parametrize("kind", ONE_ORDER)
def test_one_order_of_sums_is_set_where_it_changes(vendors: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    vendors(npu=Vendor("npu", "Ascend910B3"), cuda=Vendor("cuda", "NVIDIA A10"))
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    switched: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", switched.append)
    before = {**os.environ, **(NPU_ENVIRONMENT if kind == "npu" else {})}
    stage.open_device(TrainFlags(device=kind))
    assert os.environ == before and not switched
    stage.open_device(TrainFlags(device=kind, deterministic=True))
    assert os.environ == before | ONE_ORDER[kind]
    assert switched == ([] if kind == "cpu" else [True])


# ---------------------------------------------------------------------- peaks by name


PEAKS = {
    "NVIDIA H200": 989e12, "NVIDIA H200 NVL": 835e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA GH200 480GB": 989e12,
    "NVIDIA H100 NVL": 835e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA H20": 148e12, "NVIDIA A800 80GB PCIe": 312e12,
    "NVIDIA A10": 125e12, "NVIDIA L4": 121e12, "NVIDIA L40S": 362e12, "NVIDIA B200": 2.25e15,
    "NVIDIA GeForce RTX 4090": 165e12, "Ascend910B1": 376e12, "Ascend910B4": 280e12, "Ascend910_9382": 376e12,
}  # fmt: skip
UNKNOWN = ["NVIDIA H100 80GB HBM3 MIG 3g.40gb", "Ascend310P3", "NVIDIA A10G", "NVIDIA L40", "Tesla T4", ""]
UNKNOWN += ["NVIDIA RTX A1000 Laptop GPU", "Intel(R) Xeon(R) Platinum 8480C"]


def test_peak_flops_by_name() -> None:
    expected = PEAKS | dict.fromkeys(UNKNOWN)
    assert {name: Accelerator().peak_flops(name) for name in expected} == expected


# ---------------------------------------------------------------------- several processes


def test_ranks_that_a_shell_exports_are_ignored_with_one_line(monkeypatch, capsys):
    """As a guide has them: `export WORLD_SIZE=8 RANK=3 MASTER_ADDR=...`, and then one process is started."""
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    device = devices.init("cpu")
    assert (device.rank, device.world_size, device.is_main) == (0, 1, True)
    devices.init("cpu")
    warning = capsys.readouterr().err.splitlines()
    assert len(warning) == 1 and "WORLD_SIZE" in warning[0]


GPUS = [
    ((8, 0), torch.bfloat16, "CudaKernels"),
    ((7, 5), torch.bfloat16, "WrittenKernels"),  # before Ampere
    ((9, 0), torch.float32, "WrittenKernels"),  # flash attention is for 16 bits
]


@pytest.mark.parametrize(("capability", "dtype", "name"), GPUS)
def test_a_gpu_with_flash_attention_divides_packed_rows_by_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, name: str
) -> None:
    pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert type(runtime_of("cuda").kernels(dtype, "")).__name__ == name


# Each process opens the device, computes a product with two threads and then the functions, twice.
FIRST_CALLS = """
import os, torch
from nanochat.device import init

def differ():
    init("cpu")
    torch.set_num_threads(2)
    angles = torch.arange(16384.0)
    for function in (torch.cos, torch.exp, torch.tanh):
        torch.ones(1024, 1024) @ torch.ones(1024, 1024)  # both threads are awake now
        if not torch.equal(function(angles), function(angles)):
            return True
    return False

torch.set_num_threads(1)  # until they are forked, processes have one thread
for _ in range(40):
    process = os.fork()
    if process == 0:
        os._exit(differ())
    assert os.waitpid(process, 0)[1] == 0, "a first call had another result"
"""


@pytest.mark.slow
def test_first_calls_of_cos_and_exp_give_what_later_ones_do() -> None:
    """Without `choose_math` one process in 14 differs where MKL computes them: 1 in 20 such tests would pass."""
    done = subprocess.run([sys.executable, "-c", FIRST_CALLS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
