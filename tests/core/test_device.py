"""The one frozen value: what it finds, what it refuses, and vendors that are not here, played by a stand-in."""

import contextlib
import dataclasses
import os
import subprocess
import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny import cpu_device, run_ranks

from nanochat import device as devices
from nanochat.device import Device, init, runtime_of
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
    """A stand-in for torch.npu or torch.cuda that records what it was asked to do."""

    def __init__(self, kind: str, name: str, count: int = 2, has_bfloat16: bool = True):
        super().__init__(f"torch.{kind}")
        self.device_name, self.count, self.has_bfloat16 = name, count, has_bfloat16
        self.calls: list[Any] = []

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def set_device(self, index: int) -> None:
        self.calls.append(("set_device", index))

    def get_device_name(self, index: int) -> str:
        return self.device_name

    def is_bf16_supported(self) -> bool:
        return self.has_bfloat16

    def get_device_capability(self) -> tuple[int, int]:
        return (8, 0) if self.has_bfloat16 else (7, 5)

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def set_task_queue_enable(self, level: int) -> None:
        self.calls.append(("task queue", level))

    def get_task_queue_enable(self) -> int:
        return 2

    def NPUGraph(self) -> Any:  # noqa: N802 (torch_npu's name)
        return types.SimpleNamespace(replay=lambda: None)

    def graph(self, graph: Any, pool: Any, capture_error_mode: str) -> Any:
        assert capture_error_mode == "thread_local", "other threads of a server use the device meanwhile"
        self.calls.append("record" if pool is None else ("record in", pool))
        return contextlib.nullcontext()

    def max_memory_allocated(self) -> int:
        return 12345

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        self.calls.append(("seed", seed))


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


def test_the_value_is_frozen() -> None:
    device = init("cpu")
    with pytest.raises(dataclasses.FrozenInstanceError):
        device.rank = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("vendor", "flags", "dtype", "may_round"),
    [
        ("AuthenticAMD", "fma avx512f avx512_bf16", "bfloat16", False),
        ("GenuineIntel", "fma avx512f avx512_bf16 amx_bf16", "bfloat16", False),
        ("GenuineIntel", "fma avx512f avx512_bf16", "float32", True),
        ("GenuineIntel", "fma avx2", "float32", False),
        ("", "", "float32", False),
    ],
)
def test_a_cpu_computes_in_bfloat16_where_that_is_faster(
    vendor: str, flags: str, dtype: str, may_round: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = {"vendor_id": vendor, "flags": flags}
    monkeypatch.setattr(host, "cpu_info", lambda field: info.get(field, ""))
    assert init("cpu").dtype == getattr(torch, dtype)
    assert init("cpu").may_round == may_round
    for asked in (torch.bfloat16, torch.float32):  # perhaps slow, but right
        device = init("cpu", str(asked).removeprefix("torch."))
        assert device.dtype == device.kernels.dtype == asked
    assert not any(init("cpu", asked).may_round for asked in ("float32", "bfloat16"))


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
    npu, cuda = Vendor("npu", "Ascend910B3"), Vendor("cuda", "NVIDIA H100 80GB HBM3")
    assert init().kind == "cpu"
    vendors(cuda=cuda)
    assert (init().kind, init().peak_flops) == ("cuda", 989e12)
    vendors(npu=npu, cuda=cuda)
    device = init()
    assert (device.kind, device.name, device.dtype, device.peak_flops) == ("npu", "Ascend910B3", torch.bfloat16, 313e12)
    assert device.module is npu
    assert npu.calls == [("set_device", 0)]
    assert init("cuda").kind == "cuda"


def test_the_value_passes_questions_on_to_the_vendor(vendors: Any) -> None:
    cuda = Vendor("cuda", "NVIDIA A100-SXM4-80GB")
    vendors(cuda=cuda)
    device = init("cuda:1")
    assert device.torch_device == torch.device("cuda", 1)
    device.synchronize()
    device.seed(3)
    assert cuda.calls == [("set_device", 1), "synchronize", ("seed", 3)]
    assert device.peak_memory() == 12345


def test_float32_has_no_bfloat16_peak(vendors: Any) -> None:
    vendors(cuda=Vendor("cuda", "NVIDIA A100-SXM4-80GB"))
    assert init("cuda", "float32").peak_flops is None
    vendors(cuda=Vendor("cuda", "Tesla T4", has_bfloat16=False))
    assert (init("cuda").dtype, init("cuda").peak_flops) == (torch.float32, None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tpu",), "--device 'tpu': one of auto, npu, cuda, cpu"),
        (("",), "--device '': one of auto"),
        (("cpu:x",), "or one with an index such as npu:0"),
        (("cpu:-1",), "or one with an index such as npu:0"),
        (("cpu", "int8"), "--dtype 'int8': one of auto, bfloat16, float32"),
        (("npu",), "--device npu: none found here; run `python check_npu.py`"),
        (("cuda:0",), "--device cuda: none found here; .*or use --device cpu"),
        (("cuda", "bfloat16"), "Tesla T4 has no bfloat16; use --dtype float32"),
        (("cuda:2",), "--device cuda:2: there are 2, counted from 0"),
        (("cuda", "auto", "rank 3"), "process 3 has no device: 2 found; lower --nproc_per_node"),
    ],
)
def test_what_is_not_here_is_told_in_one_line(vendors: Any, arguments: tuple[str, ...], words: str) -> None:
    if "none found" not in words:
        vendors(cuda=Vendor("cuda", "Tesla T4", has_bfloat16=False))
    if len(arguments) == 3:
        os.environ.update(RANK="3", LOCAL_RANK="3", WORLD_SIZE="4")
    with pytest.raises(UserError, match=words) as error:
        init(*arguments[:2])
    assert "\n" not in str(error.value)


def test_a_job_that_hccl_cannot_share_out_or_start_again_is_told(vendors: Any, capsys: Any) -> None:
    vendors(npu=Vendor("npu", "Ascend910B3"))
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="3")
    with pytest.raises(UserError, match="--nproc_per_node 3: HCCL .* 1, 2, 4, 8 or 16"):
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
    assert npu.calls[-3:] == [("task queue", 1), "record", ("task queue", 2)]
    decoding.capture(device, lambda: None, "memory of others")
    assert npu.calls[-2] == ("record in", "memory of others")


def test_a_torch_npu_that_cannot_step_down_begins_there(vendors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Vendor, "set_task_queue_enable")
    npu = Vendor("npu", "Ascend910B3")
    vendors(npu=npu)
    device = init("npu")
    assert os.environ["TASK_QUEUE_ENABLE"] == "1"
    assert device.runtime.records("auto")
    decoding.capture(device, lambda: None)()


def test_nothing_is_recorded_where_the_queue_cannot_step_down(vendors: Any, monkeypatch: Any, capsys: Any) -> None:
    """Guides for this vendor export TASK_QUEUE_ENABLE=2, and torch_npu before 2.13 cannot leave it for a recording."""
    monkeypatch.delattr(Vendor, "set_task_queue_enable")
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "2")
    vendors(npu=Vendor("npu", "Ascend910B3"))
    monkeypatch.setattr(decoding, "NOT_RECORDING", set())
    runtime = init("npu").runtime
    assert not runtime.records("auto") and not runtime.records("auto")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: ") and "unset TASK_QUEUE_ENABLE" in line
    with pytest.raises(UserError, match="--graphs on: .*unset TASK_QUEUE_ENABLE"):
        runtime.records("on")
    decoding.NOT_RECORDING.clear()
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "1")
    assert runtime.records("on")


def test_what_is_set_already_stays(vendors: Any) -> None:
    vendors(npu=Vendor("npu", "Ascend910B3"))
    os.environ.update(TASK_QUEUE_ENABLE="1", HCCL_EXEC_TIMEOUT="")
    init("npu")
    assert os.environ["TASK_QUEUE_ENABLE"] == "1"
    assert os.environ["HCCL_EXEC_TIMEOUT"] == ""
    assert os.environ["CPU_AFFINITY_CONF"] == NPU_ENVIRONMENT["CPU_AFFINITY_CONF"]


def test_the_allocators_two_names_are_not_set_together(vendors: Any) -> None:
    vendors(npu=Vendor("npu", "Ascend910B3"))
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:False"
    init("npu")
    assert "PYTORCH_NPU_ALLOC_CONF" not in os.environ


@pytest.mark.parametrize(
    ("kind", "variables"),
    [
        ("npu", {"HCCL_DETERMINISTIC": "true", "CLOSE_MATMUL_K_SHIFT": "1"}),
        ("cuda", {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
        ("cpu", {}),
    ],
)
def test_one_order_of_sums_is_asked_for_where_it_changes(
    vendors: Any, monkeypatch: pytest.MonkeyPatch, kind: str, variables: dict[str, str]
) -> None:
    vendors(npu=Vendor("npu", "Ascend910B3"), cuda=Vendor("cuda", "NVIDIA A10"))
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    switched: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", switched.append)
    before = {**os.environ, **(NPU_ENVIRONMENT if kind == "npu" else {})}
    init(kind)
    assert os.environ == before and not switched
    init(kind, deterministic=True)
    assert os.environ == before | variables
    assert switched == ([] if kind == "cpu" else [True])


def test_a_stage_asks_for_one_order_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(devices, "init", lambda *arguments: asked.append(arguments) or cpu_device())
    stage.open_device(TrainFlags())
    stage.open_device(TrainFlags(deterministic=True))
    assert asked == [("auto", "auto", False), ("auto", "auto", True)]


# ---------------------------------------------------------------------- peaks by name


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A800 80GB PCIe", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA B200", 2.25e15),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("Ascend910B1", 376e12),
        ("Ascend910B3", 313e12),
        ("Ascend910B4", 280e12),
        ("Ascend910_9382", 376e12),
        ("Ascend310P3", None),
        ("NVIDIA A10G", None),
        ("NVIDIA L40", None),
        ("NVIDIA RTX A1000 Laptop GPU", None),
        ("Tesla T4", None),
        ("Intel(R) Xeon(R) Platinum 8480C", None),
        ("", None),
    ],
)
def test_peak_flops_by_name(name: str, flops: float | None) -> None:
    assert Accelerator().peak_flops(name) == flops


# ---------------------------------------------------------------------- several processes


def facts_on_a_rank(device: Device) -> dict[str, Any]:
    total = torch.tensor([device.rank + 1.0])
    dist.all_reduce(total)
    again = init("cpu", "float32")  # joins no second group
    return {
        "place": [device.rank, device.local_rank, device.world_size, device.is_main],
        "again": [again.rank, again.world_size],
        "backend": dist.get_backend(),
        "total": total.item(),
    }


@pytest.mark.slow
def test_processes_join_one_group() -> None:
    one, two = run_ranks(facts_on_a_rank)
    assert (one["place"], two["place"]) == ([0, 0, 2, True], [1, 1, 2, False])
    assert (one["again"], two["again"]) == ([0, 2], [1, 2])
    assert one["backend"] == two["backend"] == "gloo"
    assert one["total"] == two["total"] == 3


def fail_on_a_rank(device: Device) -> None:
    if device.rank == 1:
        raise ValueError("this rank is out of luck")
    dist.barrier()


@pytest.mark.slow
def test_a_rank_that_fails_is_named_and_the_others_do_not_stay() -> None:
    with pytest.raises(AssertionError, match="rank 1: (.|\n)*out of luck"):
        run_ranks(fail_on_a_rank)


def test_shutdown_without_a_group_is_nothing() -> None:
    devices.shutdown(cpu_device())
    assert not dist.is_initialized()


def test_ranks_that_a_shell_exports_are_ignored_with_one_line(monkeypatch, capsys):
    """As a guide has them: `export WORLD_SIZE=8 RANK=3 MASTER_ADDR=...`, and then one process is started."""
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    device = devices.init("cpu")
    assert (device.rank, device.world_size, device.is_main) == (0, 1, True)
    devices.init("cpu")
    warning = capsys.readouterr().err.splitlines()
    assert len(warning) == 1 and "WORLD_SIZE" in warning[0]


@pytest.mark.slow
def test_a_command_prints_although_a_shell_exports_a_rank(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from dataclasses import dataclass\nfrom nanochat import device\nfrom nanochat.ground import cli\n"
        "from nanochat.ground.log import print0\n\n"
        "@dataclass\nclass Config:\n    device: str = 'cpu'\n\n"
        "def main(config):\n    device.init(config.device)\n    print0('printed')\n\ncli.run(main, Config)\n"
    )
    code = os.fspath(devices.__file__).rpartition("/nanochat/")[0]
    environment = {**os.environ, "PYTHONPATH": code, "RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == "printed\n" and done.stderr.count("warning") == 1


@pytest.mark.parametrize(
    ("capability", "dtype", "name"),
    [
        ((8, 0), torch.bfloat16, "CudaKernels"),
        ((7, 5), torch.bfloat16, "WrittenKernels"),  # before Ampere
        ((9, 0), torch.float32, "WrittenKernels"),  # flash attention is for 16 bits
    ],
)
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
for _ in range(80):
    process = os.fork()
    if process == 0:
        os._exit(differ())
    assert os.waitpid(process, 0)[1] == 0, "a first call had another result"
"""


@pytest.mark.slow
def test_first_calls_of_cos_and_exp_give_what_later_ones_do() -> None:
    """Without `choose_math` one process in 14 differs where MKL computes them: 1 in 300 such tests would pass."""
    done = subprocess.run([sys.executable, "-c", FIRST_CALLS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
