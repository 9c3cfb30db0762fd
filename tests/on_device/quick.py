"""What `check_npu.py` computes on a device: a product, two training steps, an all-reduce. It needs torch, not pytest.

Each check gets the kind of the device and returns its detail. It raises AssertionError for a wrong number, and SkipTest
where there is nothing to check.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import SkipTest

import torch

from nanochat import device as devices
from nanochat import scaling
from on_device.recording import TOLERANCES, differences, first_difference, record_step

ROOT = Path(__file__).resolve().parents[2]
RANKS = Path(__file__).with_name("ranks.py")
GIB = 1 << 30
WORKERS_SECONDS = 240  # time limit for all processes of the all-reduce together


def find(kind: str) -> str:
    device = devices.init(kind)
    count = 1 if kind == "cpu" else device.module.device_count()
    return f"{count} x {device.name}, computes in {str(device.dtype).removeprefix('torch.')}"


def memory(kind: str) -> str:
    device = devices.init(kind)
    free = device.free_memory()
    total = device.total_memory()
    if free is None:
        raise SkipTest("this system does not say")
    detail = f"{free / GIB:.1f} GiB free" + (f" of {total / GIB:.1f}" if total else "")
    if free < GIB:
        raise RuntimeError(f"nearly out of memory: {detail}")
    return detail


def matrix_product(kind: str) -> str:
    device = devices.init(kind)
    if device.kind == "npu" and device.dtype != torch.bfloat16:
        raise SkipTest(f"{device.name} does not do bfloat16; training uses {device.dtype}")
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(512, 512, generator=generator) for _ in range(2))
    expected = a @ b
    product = (a.to(device.torch_device, torch.bfloat16) @ b.to(device.torch_device, torch.bfloat16)).float().cpu()
    error = float((product - expected).norm() / expected.norm())
    assert error <= 0.01, f"a bfloat16 product is off by {error:.2%} (limit 1%)"  # NaN fails too
    return f"512 x 512 bfloat16 product within {error:.2%} of fp32"


def training_step(kind: str) -> str:
    """A step on whole rows and one on packed rows: every module, operator and gradient must be the CPU's."""
    device = devices.init(kind)
    if not device.can_train:
        raise SkipTest(f"{device.name} is made for inference")
    dtype = str(device.dtype).removeprefix("torch.")
    cpu = devices.init("cpu", dtype)
    config = scaling.model_config(2, 256, 128, head_dim=64, window_pattern="SL")
    found = []
    for document_tokens in (0, 20):
        steps = [record_step(one, config, rows=2, document_tokens=document_tokens) for one in (device, cpu)]
        found += differences(*steps)
    wrong = first_difference(found, TOLERANCES[dtype])
    assert not wrong, wrong
    largest = max(error for _, error in found)
    peak = device.peak_memory() / 2**20
    return f"{len(found)} tensors within {largest:.2%} of a CPU's in {dtype}, peak memory {peak:.0f} MiB"


def all_reduce(kind: str) -> str:
    """Start ranks.py through the launcher on every device, twice on a CPU: they add up their numbers."""
    processes = 2 if kind == "cpu" else devices.init(kind).module.device_count()
    command = [sys.executable, "-m", "nanochat.run.launch", f"--nproc_per_node={processes}", str(RANKS)]
    # HCCL gives up before this process does, so that its error is printed; 120 s is the least that it accepts.
    environment = os.environ | {"HCCL_CONNECT_TIMEOUT": "120", "HCCL_EXEC_TIMEOUT": "120"}
    what = f"{processes} process{'es' if processes > 1 else ''}"
    backend = devices.runtime_of(kind).backend
    try:
        done = subprocess.run(
            [*command, kind, "all_reduce"], env=environment, cwd=ROOT, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=WORKERS_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        # Workers end with the launcher (ranks.py).
        raise RuntimeError(f"{what} over {backend}: no answer in {WORKERS_SECONDS} s") from None
    if done.returncode or done.stdout.count('"all_reduce": {}') != processes:
        found = re.search(r"^(?:\[rank\d+\]: *)?([\w.]*(?:Error|Exception): [\s\S]+)", done.stderr, re.MULTILINE)
        reason = re.sub(r"^\[rank\d+\]: *", "", found[1], flags=re.MULTILINE) if found else done.stderr
        raise RuntimeError(f"{what} over {backend}: {reason}")
    return what


def checks(kind: str) -> dict[str, Callable[[str], str]]:
    """The checks by name; without the first one no other makes sense."""
    return {
        f"{kind} devices": find, "memory": memory, "matrix product": matrix_product, "training step": training_step,
        "all-reduce": all_reduce,
    }  # fmt: skip
