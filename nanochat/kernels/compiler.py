"""torch.compile by kind of device: is a compiler installed, and does compiling pay?"""

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import torch

from nanochat.device import Device
from nanochat.ground.cli import UserError, explainers

# Compiling for a CPU takes 21 to 40 s. Where products are in bf16 it saves a fifth of a step, in fp32 a few percent.
# Two cores with AMX win that back after 375 to 450 steps, 4e13 to 5e13 model FLOPs (depth 4, 4,096 tokens a step,
# 2026-11-23). A shorter run stays eager.
CPU_COMPILE_FLOPS = 6e13


def compile_by_policy(
    device: Device, function: Callable[..., Any], requested: Literal["auto", "on", "off"], run_flops: float
) -> tuple[Callable[..., Any], str]:
    """`torch.compile` by policy; returns the function, and the decision with its reason for the log.

    Raises UserError: when `requested` is "on" and the compiler is missing.
    """
    # The request decides first, then what this machine has, then whether compiling pays.
    missing = missing_compiler(device)
    if requested == "off":
        return function, "eager (--compile off)"
    if requested == "on" and missing:
        raise UserError(f"--compile on needs {missing}; install it or leave --compile out")
    if requested == "auto":
        if device.kind == "npu":  # not tried on a card yet
            return function, "eager (compile is opt-in here: --compile on)"
        if missing:
            return function, f"eager ({missing} is missing)"
        if device.kind == "cpu" and run_flops < CPU_COMPILE_FLOPS:
            return function, "eager (too short a run to repay compiling)"
    import torch._dynamo
    import torch._inductor.config

    # By default the compiler first builds and loads a library as a test, which takes 4 of 38 s.
    torch._inductor.config.cpp.vec_isa_ok = True
    # A model has several kinds of blocks: with value embeddings, with short windows, with and without adapters. With
    # the default of 8 the compiler gives up.
    torch._dynamo.config.recompile_limit = 64
    explainers.add(explain)
    # Compile for fixed shapes: a training step has one shape, and known sizes make faster code.
    return torch.compile(function, dynamic=False), "compiled"


def missing_compiler(device: Device) -> str | None:
    """The tool that torch.compile needs and this machine lacks; None if nothing is missing."""
    # torch.compile generates Triton kernels for an accelerator and C++ for a CPU.
    if device.kind != "cpu":
        return None if importlib.util.find_spec("triton") else "triton"
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")  # as torch chooses it
    try:
        subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return f"the C++ compiler {compiler}"
    return None


def explain(error: BaseException) -> str | None:
    """One line with a fix for a compilation error; None for other errors."""
    if type(error).__name__ not in ("InductorError", "BackendCompilerFailed"):  # importing them would load the compiler
        return None
    # "...Error: what happened" is in the first line; commands and the compiler's own output follow.
    return f"torch.compile failed ({str(error).strip().splitlines()[0][:300]}): leave it out with --compile off"


def product_flops(device: Device) -> float | None:
    """FLOP/s of a bare matrix product in the device's dtype: measured on a CPU, elsewhere 60% of the peak, or None if
    the peak is unknown."""
    if device.kind != "cpu":
        return device.peak_flops and 0.6 * device.peak_flops
    size = 512
    square = torch.ones(size, size, dtype=device.dtype)
    seconds = []
    for _ in range(4):  # the first one is slower
        began = time.perf_counter()
        torch.mm(square, square)
        seconds.append(time.perf_counter() - began)
        if seconds[-1] > 0.2:  # bfloat16 on a CPU without its instructions
            break
    return 2 * size**3 / min(seconds)
