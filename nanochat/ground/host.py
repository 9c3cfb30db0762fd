"""The machine around a device: its processor and its main memory, and how their libraries are set up."""

import contextlib
import ctypes
import os
import platform
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import torch


def choose_math() -> None:
    """Have MKL choose its code for cos, exp and the like now, in one thread."""
    # It chooses in the first call. Where two threads make that call at once, one of them may get code that is right
    # only to 1e-4, for this one call (source: github.com/pytorch/pytorch/issues/188792). The rotary tables made that
    # first call: in 5 of 55 starts their second half was off, and so were all losses of the run.
    one = torch.ones(1)
    for function in (torch.cos, torch.sin, torch.exp, torch.log, torch.sqrt, torch.tanh):
        function(one)


def keep_freed_memory() -> None:
    """Have the C library keep large freed blocks."""
    # By default it returns every activation to the system, which clears the pages before it hands them out again. That
    # costs a training step 5% of its time: 486 ms instead of 463 at depth 4 (two cores of an AMD EPYC, 2026-11-20).
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if mallopt is not None:
        # The options' numbers are from malloc.h.
        mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD: keep blocks below 1 GiB, instead of mapping them one by one
        mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD: return memory only when 2 GiB lie unused
        mallopt(-2, 1 << 28)  # M_TOP_PAD: grow by 256 MiB at a time


def share_cores(world_size: int) -> None:
    """Share the cores evenly between the processes of this host: torchrun gives each one thread."""
    if world_size > 1 and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        local_world = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world))


@contextlib.contextmanager
def at_most_threads(limit: int) -> Iterator[None]:
    """Inside, torch computes on the CPU with at most this many threads."""
    usual = torch.get_num_threads()
    torch.set_num_threads(min(limit, usual))
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def peak_memory() -> int:
    """The most bytes that this process held."""
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage reports bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def free_memory() -> int | None:
    """Bytes of main memory that nothing uses yet; None where the system does not say."""
    text = ""
    with contextlib.suppress(OSError):  # only Linux has it
        text = Path("/proc/meminfo").read_text()
    kib = re.search(r"^MemAvailable:\s+(\d+)", text, re.MULTILINE)
    return int(kib[1]) * 1024 if kib else None


def cpu_name() -> str:
    return cpu_info("model name") or platform.processor() or platform.machine()


def cpu_features() -> set[str]:
    """The names of the processor's instruction sets. x86 lists "flags", Arm "Features"."""
    return set(cpu_info("flags").split() + cpu_info("Features").split())


def has_bfloat16() -> bool:
    """Whether the processor multiplies bf16 faster than fp32."""
    # Without these instructions bf16 is emulated: right, but far slower than fp32. With AVX-512, AMD's processors
    # multiply bf16 in a quarter of the time of fp32, and Intel's without AMX in nearly twice the time.
    features = cpu_features()
    is_amd = cpu_info("vendor_id") == "AuthenticAMD"
    return bool(features & {"amx_bf16", "bf16"}) or ("avx512_bf16" in features and is_amd)


def cpu_info(field: str) -> str:
    """The first core's value of a field such as "model name"; empty where Linux does not report it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")
